"""Sessions: one policy at work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from gradrewrite._utils.warnings import PendingWarnings
from gradrewrite.backends.compiled_graphs import CompiledGraphs, listed
from gradrewrite.backends.parameter_watch import methods_that_use
from gradrewrite.backends.rule_checks import RuleChecks
from gradrewrite.instrumentation.module_names import InputNames, ModuleNames
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.rewriting.config import RewriteConfig

STATE = "_gradrewrite"  # the slot of a rewritten model, or its attribute where it was rewritten in place
_MANY = 3  # names that a warning lists


class Session:
    """One policy at work: its names, its compiled graphs, and the checks of its rules.

    Attributes:
        config: The configuration.
        recorder: Takes what backwards report.
        has_model: Whether it belongs to one model; it does not hold the model, for torch keeps backends for good.
        entry_frames: The compiled functions around the model by name, with the method that each calls.
        begun: The methods that were called where a backward could follow.
        names: Names of modules, parameters and buffers.
        inputs: Names of the model's inputs.
        warnings: Warnings that wait for a safe moment.
        graphs: The compiled graphs with a backward.
        rules: The checks of the policy's rules.
    """

    def __init__(
        self,
        config: RewriteConfig,
        recorder: StepRecorder,
        model: nn.Module | None = None,
        outside: Sequence[str] | None = None,
    ) -> None:
        """Begin without graphs.

        Args:
            config: The configuration.
            recorder: Takes what backwards report.
            model: The model, if it belongs to one.
            outside: Names of the outermost modules outside of all regions; None for a model without regions.
        """
        self.config = config
        self.recorder = recorder
        self.has_model = model is not None
        self.entry_frames: dict[str, str] = {}
        self.begun: set[str] = set()
        self.names = ModuleNames(model)
        self.inputs = InputNames(model, config.methods)
        self.warnings = PendingWarnings()
        self.graphs = CompiledGraphs(config, recorder, self.warnings, outside or ())
        self.rules = RuleChecks(config.policy, self.graphs, self.names, self.inputs, self.warnings)
        self._has_regions = outside is not None

    def check_rules(self) -> None:
        """Raise NoSuchSiteError for a rule that matched no site of any graph; once, when all methods were called."""
        if self._has_regions or self.begun.issuperset(self.entry_frames.values()):
            self.rules.check()

    def forget(self) -> None:
        """Forget the compiled graphs: they are not in use any more."""
        self.graphs.forget()
        self.rules.forget()
        self.entry_frames.clear()
        self.begun.clear()

    def note_backward(self, backward: int) -> None:
        """Tell the guards of a backward, and the checks of rules."""
        guards = self.recorder.guards
        if not any(guard.has_stepped for guard in guards):
            for guard in guards:
                guard.note_backward()
        self.rules.note_backward(backward, self.recorder)

    def warn_outside(self, model: nn.Module, names: Sequence[str]) -> None:
        """Warn of the parameters of the plain model that a backward reached through no rewritten graph."""
        is_partial = not self.config.fullgraph or not self.has_model
        if is_partial and (self.graphs.skipped or "plain" in self.warnings):
            return  # the tracer skipped a region, of which the user was told
        children = list(dict.fromkeys(name.partition(".")[0] for name in names))
        kind = "rewritten" if self.has_model else "compiled"
        reason = f"the {kind} model was never called"
        if self.graphs:
            used = ", ".join(map(repr, children[:_MANY]))
            reason = f"the plain model, or {used} of it, was called directly or used outside of the graphs"
        way_out = f"call the {kind} model itself, or {'transform' if self.has_model else 'compile'} what is called"
        methods = methods_that_use(model, children)[:_MANY]
        if methods:
            reason += f", or a method without an entry point ({', '.join(f'{name}()' for name in methods)})"
            way_out += f"; or name the methods, gr.transform(model, policy, methods={tuple(methods)!r})"
        self.warnings.warn_once(
            "outside",
            f"a backward reached {listed(names)} through no rewritten graph of the model, so the policy did not hold "
            f"there: {reason}. To have it there, {way_out}",
        )
        self.warnings.flush_warnings()


def attached_state(value: Any) -> Any:
    """Return the state (``ModelState``) of a rewritten model; None for any other object, its plain view included."""
    return getattr(value, STATE, None) if hasattr(type(value), STATE) else None
