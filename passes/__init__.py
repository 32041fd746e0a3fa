"""Actions: what a policy may answer."""

from gradrewrite.passes._check_finite import CheckFinite as CheckFinite
from gradrewrite.passes._clip_by_norm import ClipByGlobalNorm as ClipByGlobalNorm
from gradrewrite.passes._clip_by_norm import ClipByNorm as ClipByNorm
from gradrewrite.passes._clip_by_value import ClipByValue as ClipByValue
from gradrewrite.passes._keep import Keep as Keep
from gradrewrite.passes._observe import Observe as Observe
from gradrewrite.passes._simple import NanToNum as NanToNum
from gradrewrite.passes._simple import Scale as Scale
from gradrewrite.passes._simple import Zero as Zero

__all__ = [
    "CheckFinite",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "Keep",
    "NanToNum",
    "Observe",
    "Scale",
    "Zero",
]
