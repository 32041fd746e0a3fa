"""Sessions: one policy at work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from gradrewrite._compat import dynamo_cache, optimizers
from gradrewrite._utils.formatting import listed
from gradrewrite._utils.warnings import PendingWarnings
from gradrewrite.backends.call_counts import ForwardCalls
from gradrewrite.backends.compiled_graphs import MANY, CompiledGraphs
from gradrewrite.backends.live_tensors import LiveForms
from gradrewrite.backends.parameter_watch import methods_that_use
from gradrewrite.backends.rule_checks import RuleChecks
from gradrewrite.backends.traced_values import TracedValues
from gradrewrite.backends.written_buffers import WrittenBuffers
from gradrewrite.instrumentation.module_names import STEP, InputNames, ModuleNames
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.loop_code import LoopCode
from gradrewrite.ir.marked_loops import Loop
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import Insertion
from gradrewrite.policy.rules import Answered, callbacks_of, parts_of, policy_text, rule_skips
from gradrewrite.policy.sampling import Sampling
from gradrewrite.policy.scope import skips_updates
from gradrewrite.rewriting.config import RewriteConfig

SCALED = "a scale that the policy does not know"  # key of a warning
STATE = "_gradrewrite"  # the slot of a rewritten model, or its attribute where it was rewritten in place


class Session:
    """One policy at work: its names, its compiled graphs, and the checks of its rules.

    It does not hold the model, for torch keeps backends for good.
    """

    def __init__(
        self,
        config: RewriteConfig,
        recorder: StepRecorder,
        model: nn.Module | None = None,
        outside: Sequence[str] | None = None,  # outermost modules outside of all regions; None without regions
    ) -> None:
        self.config = config
        self.recorder = recorder
        self.has_model = model is not None
        self.entry_frames: dict[str, str] = {}  # names of the functions around the model, with the method of each
        self.begun: set[str] = set()  # methods that were called where a backward could follow
        self.names = ModuleNames(model)
        self.inputs = InputNames(model, config.methods)
        self.sampling = Sampling(recorder.sampling, config.states, config.policy)
        self.warnings = PendingWarnings()
        self.codes: set[LoopCode | Loop] = set()  # of loops, which operators find as long as they are alive
        self.graphs = CompiledGraphs(config, recorder, self.warnings, outside or ())
        recorder.links.note_policy(policy_text(config.policy))
        self.rules = RuleChecks(config.policy, self.graphs, self.names, self.inputs, self.warnings)
        self.buffers = WrittenBuffers(recorder)
        self.calls = ForwardCalls()
        self.live_forms = LiveForms()
        self.values = TracedValues(config.policy, self.warnings)  # of the graphs
        self.step_values = TracedValues(config.policy, self.warnings)  # of the guards
        self.has_checks = False  # whether something is checked in a graph
        self.is_replayed = False  # whether every call can be replayed, checked or not
        self._parts = parts_of(config.policy)
        self._has_looked = False  # for a GradScaler without a guard
        self._skips = rule_skips(config.policy)
        self._has_silent_callbacks = bool(callbacks_of(config.policy))  # until a guard asks them
        self._has_regions = outside is not None

    def check_rules(self) -> None:
        """Raise NoSuchSiteError for a rule that matched no site of any graph; once, when all methods were called."""
        awaited = set(self.entry_frames.values())
        if self.config.in_framework and len(awaited) > 1:
            awaited.discard("forward")  # which a framework calls through the other methods while it trains
        if STEP in self.begun:  # a call of the model is inside
            awaited.discard("forward")
        if self._has_regions or self.begun.issuperset(awaited):
            self.rules.check()

    @property
    def has_other_policy(self) -> bool:
        """Whether rules were added to the policy's lists, or taken out, since this session began."""
        now = parts_of(self.config.policy)
        return len(now) != len(self._parts) or any(a is not b for a, b in zip(now, self._parts, strict=True))

    @property
    def may_skip(self) -> bool:
        """Whether updates may be skipped, and steps are kept."""
        return self._skips or (self._has_silent_callbacks and bool(self.recorder.guards))

    @property
    def keeps_buffers(self) -> bool:
        """Whether buffers are copied before they are written, for an update that may be skipped."""
        may_skip = self.may_skip or self.buffers.may_be_scaled or self.config.loss_scale is not None
        return may_skip and bool(self.recorder.guards)

    def note_checks(self, has_checks: bool) -> None:
        """Take note of a graph with finite checks."""
        self.has_checks |= has_checks

    def replay_all(self) -> None:
        """Let every call be replayed, checked or not."""
        self.has_checks = self.is_replayed = True

    def note_skips(self, insertions: Iterable[Insertion]) -> None:
        """Take note of insertions in a graph, or at a step site."""
        self._skips = self._skips or any(map(skips_updates, insertions))

    def note_step_answers(self, answers: Sequence[Answered]) -> None:
        """Take note of the policy's answers at a step site."""
        self.rules.note_step_answers(answered.position[1:] for answered in answers)
        self.note_skips(answered.insertion for answered in answers)
        self._has_silent_callbacks = False

    def forget(self) -> None:
        """Forget the compiled graphs: they are not in use any more."""
        self.graphs.forget()
        self.rules.forget()
        self.entry_frames.clear()
        self.begun.clear()

    def note_backward(self, backward: int) -> None:
        """Tell the guards of a backward, and the checks of rules."""
        if not self.has_model:
            self.calls.begin()  # no entry point tells of a forward
        guards = self.recorder.guards
        for guard in guards:
            guard.count_backward(backward)
        if not any(guard.has_stepped for guard in guards):
            for guard in guards:
                guard.note_backward()
        self.rules.note_backward(backward, self.recorder)
        if not guards and self.buffers.may_be_scaled and not self._has_looked:
            self._look_for_scaler()

    def _look_for_scaler(self) -> None:
        """Warn, once, of a GradScaler that the policy does not know; a guard looks itself."""
        self._has_looked = True
        edit = self.edit_with_units() if self.config.loss_scale is None else None
        if edit is not None and optimizers.living_scaler() is not None:
            self.warn_of_scaler(edit)

    def edit_with_units(self) -> Edit | None:
        """Return the first edit of a graph that means something else for gradients that are multiplied."""
        edits = (edit for graph in self.graphs for edit in graph.edits if not edit.site.traits.in_forward)
        return next((edit for edit in edits if edit.insertion.has_units), None)

    def warn_of_scaler(self, edit: Edit) -> None:
        """Warn once of a scale that the policy does not know."""
        way = "gr.transform(model, policy, loss_scale=scaler)" if self.has_model else 'gr.on("step:*", action)'
        self.warnings.warn_once(
            SCALED,
            f"{edit.site}: {describe(edit.action)} acts on gradients that a GradScaler has multiplied by its scale, so "
            f"that its figures are not in units of the loss. Write {way}",
        )
        self.warnings.flush_warnings()

    def warn_outside(self, model: nn.Module, names: Sequence[str]) -> None:
        """Warn of parameters of the plain model that a backward reached through no rewritten graph."""
        is_partial = not self.config.fullgraph or not self.has_model
        was_told = "plain" in self.warnings or (self.graphs.skipped and not self.config.in_framework)
        if is_partial and was_told:
            return  # of the region that the tracer skipped
        children = list(dict.fromkeys(name.partition(".")[0] for name in names))
        kind = "rewritten" if self.has_model else "compiled"
        reason = f"the {kind} model was never called"
        if self.graphs:
            used = ", ".join(map(repr, children[:MANY]))
            reason = f"the plain model, or {used} of it, was called directly or used outside of the graphs"
        way_out = f"call the {kind} model itself, or {'transform' if self.has_model else 'compile'} what is called"
        methods = methods_that_use(model, children)[:MANY]
        untraced = [name or "model" for name, module in model.named_modules() if isinstance(module, nn.RNNBase)]
        if untraced and not self.has_model and not dynamo_cache.traces_recurrent():
            reason = f"torch.compile traces no nn.RNN, nn.GRU or nn.LSTM ({listed(untraced)})"
            way_out = "set torch._dynamo.config.allow_rnn = True before the first call"
            self.graphs.skipped[f"{reason}: {way_out}"] = None
        elif methods:
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
