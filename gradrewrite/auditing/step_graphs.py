"""Dynamo graphs of a training step, forward and loss."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from gradrewrite._compat import data_parallel, dtensors, dynamo, dynamo_cache
from gradrewrite._utils.kept_state import KeptState, kept_state
from gradrewrite._utils.tensors import kept_random_state, tensors_in
from gradrewrite.backends.traced_step import ComputeLoss
from gradrewrite.backends.tracing_errors import explained
from gradrewrite.instrumentation.source_locations import user_line


@dataclass(eq=False)
class StepGraph:
    """One Dynamo graph of a training step.

    Attributes:
        gm: The graph.
        inputs: Its inputs, by placeholder.
        break_line: The user's line that ended it, ``file:line "code"``; ``""`` if none did.
        break_reason: Dynamo's reason for that.
    """

    gm: fx.GraphModule
    inputs: tuple[Any, ...]
    break_line: str = ""
    break_reason: str = ""


@dataclass(eq=False)
class StepGraphs:
    """All graphs of a training step, in execution order.

    Attributes:
        graphs: The graphs.
        names: Names of the parameters by identity, of sharded ones the whole tensors.
        calls: Of several graphs the calls in execution order, with inputs and outputs.
        loss: The result of the step; None where it is one graph, for that does not run.
        is_whole: Whether the step is one graph.
    """

    graphs: list[StepGraph]
    names: Mapping[int, str]
    calls: list[tuple[StepGraph, Sequence[Any], Sequence[Any]]] = field(default_factory=list)
    loss: Any = None
    is_whole: bool = True


class _Traced(BaseException):  # not an Exception: torch wraps those
    """Ends the trace of a whole step."""


class _Recorder:
    """A backend for keeping Dynamo graphs, and running several."""

    def __init__(self, model: nn.Module, state: KeptState | None) -> None:
        self.graphs: list[StepGraph] = []
        self.calls: list[tuple[StepGraph, Sequence[Any], Sequence[Any]]] = []
        self._state = state
        with data_parallel.unsharded(model.modules()):
            self.names = {id(p): name for name, p in model.named_parameters()}

    def __deepcopy__(self, memo: Any) -> _Recorder:
        """Return itself: Lightning copies the arguments of ``torch.compile``."""
        return self

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        reason, stack = dynamo.graph_break_of(gm) or ("", ())
        told = reason.partition("\n")[0]
        graph = StepGraph(gm, tuple(inputs), break_line=user_line(stack), break_reason=told)
        self.graphs.append(graph)
        if self._state is None:
            raise _Traced
        self._state.add(t for t in inputs if isinstance(t, Tensor))

        def run(*given: Any) -> Any:
            outputs = gm(*given)
            self.calls.append((graph, given, outputs))
            return outputs

        return run


def trace_step(
    model: nn.Module, compute_loss: ComputeLoss | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> StepGraphs:
    """Trace forward and loss; several graphs run op by op.

    Errors of the model itself pass through; TraceError if torch cannot trace it.
    """
    try:
        return _traced(model, compute_loss, args, kwargs, is_whole=True)
    except dynamo.TRACING_ERRORS:
        try:
            return _traced(model, compute_loss, args, kwargs, is_whole=False)
        except (*dynamo.TRACING_ERRORS, RuntimeError) as err:
            error = explained(err, model, "forward", args, dict(kwargs))
            if error is err:
                raise
            raise error from err


def _traced(
    model: nn.Module,
    compute_loss: ComputeLoss | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_whole: bool,
) -> StepGraphs:
    def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if compute_loss is None:
            return loss_in(model(*args, **kwargs))
        return loss_in(compute_loss(model, *args, **kwargs))

    # Dynamo keeps compiled code with code objects: one of its own is dropped with it.
    code = step.__code__.replace(co_name="gradrewrite_audited_step")
    own = types.FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)
    settings = {"fullgraph": is_whole, "dynamic": False}
    with contextlib.ExitStack() as stack:
        written = frozenset[int]() if is_sharded(model) else None
        state = None if is_whole else stack.enter_context(kept_state(model, (args, kwargs), written))
        recorder = _Recorder(model, state)
        compiled = dynamo_cache.CompiledFunction(own, recorder, settings, lambda: contextlib.nullcontext(()))
        stack.callback(compiled.drop)
        stack.enter_context(kept_random_state())
        loss = None
        with contextlib.suppress(_Traced), torch.enable_grad():
            loss = compiled(model, args, dict(kwargs))
            if is_sharded(model) and (scalar := scalar_of(loss)) is not None:
                scalar.backward()  # behind which FSDP2 takes parameters apart again
    is_one_graph = is_whole and bool(recorder.graphs)  # a step without an op has none
    return StepGraphs(recorder.graphs, recorder.names, recorder.calls, loss, is_one_graph)


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are DTensors, as those of FSDP2."""
    return any(dtensors.is_dtensor(p) for p in model.parameters())


def loss_in(output: Any) -> Any:
    """Return ``.loss`` or ``["loss"]`` of an output, else the output."""
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return output if loss is None else loss


def scalar_of(output: Any) -> Tensor | None:
    """Return the loss in an output, or a weighted sum.

    None without differentiable ones; TypeError without tensors. The weights are random, for the sum of a softmax is
    constant.
    """
    loss = loss_in(output)
    if next(tensors_in(loss), None) is None:
        kind = type(loss).__name__
        raise TypeError(f"gr.audit: the loss is a tensor, got {kind}; let compute_loss, or the model, return it")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    tensors = [t for t in tensors_in(loss) if t.requires_grad]
    if not tensors:
        return None
    with kept_random_state():
        torch.manual_seed(0)
        parts = [(t * torch.randn_like(t)).sum() for t in tensors]
    return torch.stack([part.abs() if part.is_complex() else part.float() for part in parts]).sum()
