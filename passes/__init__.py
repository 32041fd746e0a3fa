"""Actions: the answers of a policy."""

from difflib import get_close_matches

from gradrewrite.passes._adaptive_clip import AdaptiveClip as AdaptiveClip
from gradrewrite.passes._adaptive_norm import AutoClip as AutoClip
from gradrewrite.passes._adaptive_norm import ZClip as ZClip
from gradrewrite.passes._all_reduce import AllReduce as AllReduce
from gradrewrite.passes._check_finite import CheckFinite as CheckFinite
from gradrewrite.passes._clip_by_norm import ClipByGlobalNorm as ClipByGlobalNorm
from gradrewrite.passes._clip_by_norm import ClipByNorm as ClipByNorm
from gradrewrite.passes._clip_by_value import ClipByValue as ClipByValue
from gradrewrite.passes._clip_per_example import ClipPerExample as ClipPerExample
from gradrewrite.passes._due_steps import After as After
from gradrewrite.passes._due_steps import Every as Every
from gradrewrite.passes._hold import Hold as Hold
from gradrewrite.passes._keep import Keep as Keep
from gradrewrite.passes._keep_zeros import KeepZeros as KeepZeros
from gradrewrite.passes._loss_weightings import MGDA as MGDA
from gradrewrite.passes._loss_weightings import AlignedMTL as AlignedMTL
from gradrewrite.passes._loss_weightings import CAGrad as CAGrad
from gradrewrite.passes._loss_weightings import PCGrad as PCGrad
from gradrewrite.passes._loss_weightings import UPGrad as UPGrad
from gradrewrite.passes._noise_scale import NoiseScale as NoiseScale
from gradrewrite.passes._observe import Observe as Observe
from gradrewrite.passes._offload import Offload as Offload
from gradrewrite.passes._recompute import Recompute as Recompute
from gradrewrite.passes._simple import NanToNum as NanToNum
from gradrewrite.passes._simple import Scale as Scale
from gradrewrite.passes._simple import Zero as Zero
from gradrewrite.passes._skip_spikes import SkipSpikes as SkipSpikes
from gradrewrite.passes._store import Store as Store
from gradrewrite.passes._weigh_examples import WeighExamples as WeighExamples
from gradrewrite.passes._weigh_losses import WeighLosses as WeighLosses
from gradrewrite.passes._weight_decay import L2 as L2
from gradrewrite.passes._weight_decay import DecayWeights as DecayWeights
from gradrewrite.policy.frozen import explained as _explained

__all__ = [  # noqa: RUF022 - L2 is a class, not a constant
    "AdaptiveClip",
    "After",
    "AlignedMTL",
    "AllReduce",
    "AutoClip",
    "CAGrad",
    "CheckFinite",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "ClipPerExample",
    "DecayWeights",
    "Every",
    "Hold",
    "Keep",
    "KeepZeros",
    "L2",
    "MGDA",
    "NanToNum",
    "NoiseScale",
    "Observe",
    "Offload",
    "PCGrad",
    "Recompute",
    "Scale",
    "SkipSpikes",
    "Store",
    "UPGrad",
    "WeighExamples",
    "WeighLosses",
    "ZClip",
    "Zero",
]

for _name in __all__:
    _explained(globals()[_name])


def __getattr__(name: str) -> object:
    """Name the nearest action for one that is not there."""
    near = ", ".join(get_close_matches(name, __all__, 3, 0.5))
    known = f"but {near}" if near else f"and has {', '.join(__all__)}"
    raise AttributeError(f"gradrewrite.passes has no {name!r}, {known}")
