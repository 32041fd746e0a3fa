"""gradrewrite: a compiler for the backward pass, on torch.fx."""

from gradrewrite._version import __version__ as __version__
from gradrewrite.backend import Backend as Backend
from gradrewrite.backend import backend as backend
from gradrewrite.errors import CallbackError as CallbackError
from gradrewrite.errors import GraphBreakError as GraphBreakError
from gradrewrite.errors import NonFiniteError as NonFiniteError
from gradrewrite.errors import NoSuchSiteError as NoSuchSiteError
from gradrewrite.errors import NotRewrittenError as NotRewrittenError
from gradrewrite.errors import PolicyError as PolicyError
from gradrewrite.errors import RewriteError as RewriteError
from gradrewrite.errors import RewriteWarning as RewriteWarning
from gradrewrite.errors import TraceError as TraceError
from gradrewrite.errors import UnsupportedGradientError as UnsupportedGradientError
from gradrewrite.errors import Window as Window
from gradrewrite.history import Finding as Finding
from gradrewrite.joint import Edit as Edit
from gradrewrite.joint import JointGraph as JointGraph
from gradrewrite.locate import locate as locate
from gradrewrite.module import RewrittenModule as RewrittenModule
from gradrewrite.module import transform as transform
from gradrewrite.monitor import Monitor as Monitor
from gradrewrite.optim import guard as guard
from gradrewrite.policy import Policy as Policy
from gradrewrite.policy import on as on
from gradrewrite.probes import tap as tap
from gradrewrite.records import record as record
from gradrewrite.session import Explanation as Explanation
from gradrewrite.session import GraphReport as GraphReport
from gradrewrite.sites import Site as Site

__all__ = [
    "Backend",
    "CallbackError",
    "Edit",
    "Explanation",
    "Finding",
    "GraphBreakError",
    "GraphReport",
    "JointGraph",
    "Monitor",
    "NoSuchSiteError",
    "NonFiniteError",
    "NotRewrittenError",
    "Policy",
    "PolicyError",
    "RewriteError",
    "RewriteWarning",
    "RewrittenModule",
    "Site",
    "TraceError",
    "UnsupportedGradientError",
    "Window",
    "backend",
    "guard",
    "locate",
    "on",
    "record",
    "tap",
    "transform",
]
