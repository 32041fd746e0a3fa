"""The run-time wrapper of a compiled backward: live inputs, auxiliary outputs, step snapshots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from gradrewrite._compat import autograd, dtensors
from gradrewrite._compat.data_parallel import DataParallelism
from gradrewrite._utils.formatting import located_callable
from gradrewrite.backends.graph_uses import GraphUse
from gradrewrite.backends.live_tensors import Form, LiveTensors, form_of
from gradrewrite.backends.session import Session
from gradrewrite.backends.traced_values import first_change, shown_value
from gradrewrite.errors import CallbackError, PolicyError, TraceError
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.reports import KEPT
from gradrewrite.policy.sampling import Measured
from gradrewrite.policy.scope import warning_of_bounds, warnings_in_parts
from gradrewrite.replay.step_snapshot import StepSnapshot
from gradrewrite.rewriting.function_values import FunctionValues

_BATCHED = (
    "autograd.grad(..., is_grads_batched=True), or another transform of torch.func around the backward: it computes "
    "several backwards as one, and records, log lines and checks are those of one. Take a policy that records nothing "
    "(clips by value, Scale, tensor functions), or call autograd.grad for each vector"
)
_SECOND = (
    "gradients of gradients (a backward through what create_graph=True returned) do not lead through a compiled "
    "backward. Compute the penalty in the model's forward, with torch.autograd.grad(..., create_graph=True), which is "
    "a part of the graph (torch 2.12 and later); or with the plain model, model.original, which shares its parameters. "
    "What is compiled by itself has a backward of its own: leave regions= out, and graph breaks"
)
_CHANGED = (
    "a tensor that an action closes over was {} when this backward was compiled, and is {} now. Change dtype, device "
    "or sizes (module.to(...), t.data = ...) before the forward: the next call of a rewritten model compiles anew; "
    "with gr.backend call torch.compiler.reset() first"
)
_OTHER_VALUE = (
    "{} reads {}, which is {} now and was something else when this backward was traced. Change it before the "
    "forward: the next call of a rewritten model traces anew; with gr.backend call torch.compiler.reset() first. Or "
    "let the function close over a tensor that is changed in place (tensor.fill_(...)), which is read at every backward"
)


@dataclass(eq=False, repr=False)
class RewrittenBackward:
    """A compiled backward graph that is given its live inputs, and has its auxiliary outputs taken off."""

    session: Session
    compiled: Callable[[list[Any]], Any]
    live: Sequence[tuple[Tensor, Form]]  # tensors that it reads at every call, after its inputs
    use: Callable[[], GraphUse]  # tells the use of the running backward
    num_outputs: int  # auxiliary ones
    is_whole: bool  # its graph holds all that one call of the model does
    copies_packs: bool  # the next call overwrites its outputs
    parallelism: DataParallelism
    measured: Measured
    live_calls: LiveTensors | None = None  # None where nothing of the user's is closed over
    values_read: Sequence[FunctionValues] = ()  # by its actions' functions, when they were traced

    def __call__(self, args: list[Any]) -> Any:
        """Run; gradients are returned, records go to the session's recorder."""
        session, use = self.session, self.use()
        outputs = use.outputs
        _refuse_batched(args, records=bool(outputs.packs or outputs.checks))
        _refuse_second_backward()
        check_values(self.values_read)
        use.coverage.note()
        if not session.has_model:
            session.check_rules()
            session.graphs.note_parallelism(self.parallelism)
            session.warnings.flush_warnings()
        if self.live_calls is not None:
            self.live_calls.note_backward(args)
            session.warnings.flush_warnings()
        backward = session.recorder.step_backward()
        session.note_backward(backward)
        if use.accumulation.is_accumulating():
            warn_in_parts(session, "accumulated", outputs.groups, outputs.noisy, use.bounds)
        is_kept = session.may_skip and bool(session.recorder.guards)
        is_checked = bool(outputs.checks) or session.has_checks  # in this graph, or in another one of the step
        snapshot = self._snapshot(use, args) if is_checked or is_kept else None
        if is_kept:
            session.recorder.keep(backward, snapshot)
        session.config.states.note_backward(backward)
        if session.config.loss_scale is not None:
            session.config.loss_scale.update()
        args.extend(self._live_inputs())
        results = self.compiled(args)
        checked = snapshot if is_checked else None
        if not self.num_outputs and not session.sampling.is_in_use and checked is None:
            return results
        number = len(results) - self.num_outputs
        results, auxiliary = results[:number], results[number:]
        packs, kept, states = outputs.split(auxiliary)
        outputs, kept = outputs.unrolled(packs, kept)
        if self.copies_packs:  # a CUDA graph overwrites all of it
            tensors = [t.clone() for t in (*packs, *kept)]
        else:
            tensors = [*packs, *owned(kept, [what for what, *_ in outputs.kept], [*results, *packs])]
        update = session.config.states.current
        again = session.recorder.collect(outputs, tensors, checked, use.parameters, session.sampling.is_due, update)
        if outputs.states:
            session.config.states.write([tensor for _, tensor in outputs.states], states)
        if again and (self.is_whole or "part" not in session.warnings):
            warn_in_parts(session, "again", again, outputs.noisy)
        use.accumulation.note_at_end()
        return results

    def _snapshot(self, use: GraphUse, args: list[Any]) -> StepSnapshot | None:
        """Return the inputs of a replay; None for an unknown forward."""
        if use.forwards is None:
            return None
        streams = self.session.config.states.copied_streams(use.outputs.states)
        return use.forwards.snapshot(args)._replace(streams=streams)

    def _live_inputs(self) -> list[Tensor]:
        for tensor, form in self.live:
            if form_of(tensor) != form:
                raise PolicyError(_CHANGED.format(_text(form), _text(form_of(tensor))), code="live-form")
        return [tensor for tensor, _ in self.live]


def warn_in_parts(
    session: Session,
    cause: Literal["accumulated", "again"],
    groups: Sequence[str],
    noisy: Collection[str],
    bounds: Sequence[Edit] = (),
) -> None:
    """Warn once of clips that see a part of a gradient."""
    if bounds:
        session.warnings.warn_once("bounds", warning_of_bounds(bounds))
    for key, text in warnings_in_parts(cause, groups, noisy).items():
        session.warnings.warn_once(key, text)
    session.warnings.flush_warnings()


def check_values(values: Sequence[FunctionValues]) -> None:
    """Raise CallbackError for changed Python values of a traced function."""
    changed = first_change(values)
    if changed is not None:
        function, name, value = changed
        text = _OTHER_VALUE.format(located_callable(function), name, shown_value(value))
        raise CallbackError(text, code="changing-value")


def _refuse_second_backward() -> None:
    """Refuse a backward through the results of this one, if it is asked to make it possible."""
    if autograd.creates_graph():
        autograd.refuse_second_backward(partial(TraceError, _SECOND, code="second-backward"))


def _refuse_batched(args: Sequence[Any], *, records: bool) -> None:
    if records and any(autograd.is_batched(t) for t in args if isinstance(t, Tensor)):
        raise PolicyError(_BATCHED, code="batched-backward")


def _text(form: Form) -> str:
    dtype, device, size, stride = form
    return f"{dtype} of shape {tuple(size)} and strides {stride} on {device}"


def owned(kept: Sequence[Tensor], kept_as: Sequence[str], others: Sequence[Any]) -> list[Tensor]:
    """Return kept tensors in memory of their own.

    A kept tensor may be a gradient itself, which belongs to autograd, or a view of what others have. Norms and
    moments of examples are made for it: they are copied only where another output of the graph is the same tensor.
    """
    is_made = [what in KEPT and what != "tensor" for what in kept_as]
    if not any(is_made):
        return [tensor.clone() for tensor in kept]
    known = {t.untyped_storage().data_ptr() for t in others if isinstance(t, Tensor) and not dtensors.is_dtensor(t)}
    owned = []
    for tensor, is_new in zip(kept, is_made, strict=True):
        if not is_new or tensor.untyped_storage().data_ptr() in known:
            owned.append(tensor.clone())
        else:
            known.add(tensor.untyped_storage().data_ptr())
            owned.append(tensor)
    return owned
