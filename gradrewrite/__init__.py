"""gradrewrite: a compiler for the backward pass, on torch.fx."""

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from gradrewrite._compat.versions import check_torch
from gradrewrite._version import __version__ as __version__

if TYPE_CHECKING:
    from gradrewrite._compare import compare as compare
    from gradrewrite._diagnosis import Diagnosis as Diagnosis
    from gradrewrite._diagnosis import diagnose as diagnose
    from gradrewrite._locate import locate as locate
    from gradrewrite.auditing.findings import Audit as Audit
    from gradrewrite.auditing.findings import AuditRow as AuditRow
    from gradrewrite.auditing.verdicts import audit as audit
    from gradrewrite.backends.backend import Backend as Backend
    from gradrewrite.backends.backend import backend as backend
    from gradrewrite.backends.explanation import Explanation as Explanation
    from gradrewrite.backends.explanation import GraphReport as GraphReport
    from gradrewrite.backends.state_dict import load_state_dict as load_state_dict
    from gradrewrite.backends.state_dict import state_dict as state_dict
    from gradrewrite.diagnostics.causes import Cause as Cause
    from gradrewrite.diagnostics.first_difference import Difference as Difference
    from gradrewrite.diagnostics.memory import Memory as Memory
    from gradrewrite.diagnostics.run_file import read_jsonl as read_jsonl
    from gradrewrite.diagnostics.run_log import Origin as Origin
    from gradrewrite.diagnostics.run_log import Step as Step
    from gradrewrite.errors import CallbackError as CallbackError
    from gradrewrite.errors import GraphBreakError as GraphBreakError
    from gradrewrite.errors import NonFiniteError as NonFiniteError
    from gradrewrite.errors import NoSuchSiteError as NoSuchSiteError
    from gradrewrite.errors import NotRewrittenError as NotRewrittenError
    from gradrewrite.errors import Operand as Operand
    from gradrewrite.errors import PolicyError as PolicyError
    from gradrewrite.errors import PrecedingSite as PrecedingSite
    from gradrewrite.errors import RewriteError as RewriteError
    from gradrewrite.errors import RewriteWarning as RewriteWarning
    from gradrewrite.errors import SpikeError as SpikeError
    from gradrewrite.errors import Story as Story
    from gradrewrite.errors import TraceError as TraceError
    from gradrewrite.errors import UnsupportedGradientError as UnsupportedGradientError
    from gradrewrite.instrumentation.probes import tap as tap
    from gradrewrite.ir.edits import Edit as Edit
    from gradrewrite.ir.joint_graph import JointGraph as JointGraph
    from gradrewrite.ir.memory import KeptTensor as KeptTensor
    from gradrewrite.module import RewrittenModule as RewrittenModule
    from gradrewrite.module import restore as restore
    from gradrewrite.module import transform as transform
    from gradrewrite.monitoring.culprits import Culprits as Culprits
    from gradrewrite.monitoring.monitor import Monitor as Monitor
    from gradrewrite.optimizer.guard import guard as guard
    from gradrewrite.optimizer.guard import unguard as unguard
    from gradrewrite.policy.actions import Policy as Policy
    from gradrewrite.policy.backward_op import BackwardOp as BackwardOp
    from gradrewrite.policy.calls import call as call
    from gradrewrite.policy.random_numbers import bernoulli as bernoulli
    from gradrewrite.policy.random_numbers import normal as normal
    from gradrewrite.policy.random_numbers import uniform as uniform
    from gradrewrite.policy.recording import keep as keep
    from gradrewrite.policy.recording import record as record
    from gradrewrite.policy.rules import on as on
    from gradrewrite.policy.schedules import Schedule as Schedule
    from gradrewrite.policy.state import State as State
    from gradrewrite.policy.together import joint as joint
    from gradrewrite.policy.together import together as together
    from gradrewrite.sites import Site as Site
    from gradrewrite.sites import escape as escape
    from gradrewrite.training.train_step import TrainStep as TrainStep
    from gradrewrite.training.train_step import train_step as train_step

_untested = check_torch()
if _untested:
    from gradrewrite._utils.warnings import warn

    warn(_untested)

# Modules and their public names, imported on first use: a command that only reads files needs no compiler.
_PUBLIC = {
    "_compare": "compare",
    "_diagnosis": "Diagnosis diagnose",
    "_locate": "locate",
    "auditing.findings": "Audit AuditRow",
    "auditing.verdicts": "audit",
    "backends.backend": "Backend backend",
    "backends.explanation": "Explanation GraphReport",
    "backends.state_dict": "load_state_dict state_dict",
    "diagnostics.causes": "Cause",
    "diagnostics.first_difference": "Difference",
    "diagnostics.run_file": "read_jsonl",
    "diagnostics.run_log": "Origin Step",
    "errors": (
        "CallbackError GraphBreakError NonFiniteError NoSuchSiteError NotRewrittenError Operand PolicyError "
        "PrecedingSite RewriteError RewriteWarning SpikeError Story TraceError UnsupportedGradientError"
    ),
    "instrumentation.probes": "tap",
    "ir.edits": "Edit",
    "ir.joint_graph": "JointGraph",
    "diagnostics.memory": "Memory",
    "ir.memory": "KeptTensor",
    "module": "RewrittenModule restore transform",
    "monitoring.culprits": "Culprits",
    "monitoring.monitor": "Monitor",
    "optimizer.guard": "guard unguard",
    "policy.actions": "Policy",
    "policy.backward_op": "BackwardOp",
    "policy.calls": "call",
    "policy.random_numbers": "bernoulli normal uniform",
    "policy.recording": "keep record",
    "policy.rules": "on",
    "policy.schedules": "Schedule",
    "policy.together": "joint together",
    "policy.state": "State",
    "sites": "Site escape",
    "training.train_step": "TrainStep train_step",
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _PUBLIC.items() for name in names.split()}
_SUBMODULES = ("errors", "passes", "policy", "sites", "testing", "viz")

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "Finding":
        from gradrewrite._utils.warnings import warn

        warn("gr.Finding is gr.Cause; the old name goes in 0.3")
        return __getattr__("Cause")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_hint(name)}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """Return the nearest name as a hint; ``""`` without one."""
    if name.startswith("_"):
        return ""
    near = difflib.get_close_matches(name, __all__, 1, 0.7)
    passes = importlib.import_module(f"{__name__}.passes").__all__
    own = difflib.get_close_matches(name, passes, 1, 0.7)
    if (own and own[0] == name) or not near:
        return f"; it is in {__name__}.passes: from {__name__}.passes import {own[0]}" if own else ""
    return f"; did you mean {near[0]!r}?"


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*__all__, *_SUBMODULES, "__version__"})
