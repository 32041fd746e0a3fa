"""gradrewrite: a compiler for the backward pass, on torch.fx."""

from gradrewrite._locate import locate as locate
from gradrewrite._version import __version__ as __version__
from gradrewrite.backends.backend import Backend as Backend
from gradrewrite.backends.backend import backend as backend
from gradrewrite.backends.explanation import Explanation as Explanation
from gradrewrite.backends.explanation import GraphReport as GraphReport
from gradrewrite.diagnostics.run_log import Finding as Finding
from gradrewrite.errors import CallbackError as CallbackError
from gradrewrite.errors import GraphBreakError as GraphBreakError
from gradrewrite.errors import NonFiniteError as NonFiniteError
from gradrewrite.errors import NoSuchSiteError as NoSuchSiteError
from gradrewrite.errors import NotRewrittenError as NotRewrittenError
from gradrewrite.errors import PolicyError as PolicyError
from gradrewrite.errors import PrecedingSite as PrecedingSite
from gradrewrite.errors import RewriteError as RewriteError
from gradrewrite.errors import RewriteWarning as RewriteWarning
from gradrewrite.errors import TraceError as TraceError
from gradrewrite.errors import UnsupportedGradientError as UnsupportedGradientError
from gradrewrite.ir.edits import Edit as Edit
from gradrewrite.ir.joint_graph import JointGraph as JointGraph
from gradrewrite.module import RewrittenModule as RewrittenModule
from gradrewrite.module import transform as transform
from gradrewrite.monitoring.monitor import Monitor as Monitor
from gradrewrite.optimizer.guard import guard as guard
from gradrewrite.policy.actions import Policy as Policy
from gradrewrite.policy.recording import record as record
from gradrewrite.policy.rules import on as on
from gradrewrite.rewriting.probes import tap as tap
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
    "PrecedingSite",
    "RewriteError",
    "RewriteWarning",
    "RewrittenModule",
    "Site",
    "TraceError",
    "UnsupportedGradientError",
    "backend",
    "guard",
    "locate",
    "on",
    "record",
    "tap",
    "transform",
]
