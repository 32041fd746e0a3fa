"""``locate``: the op behind the first non-finite value, on demand."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradrewrite._utils.kept_state import kept_state
from gradrewrite._utils.tensors import kept_random_state, tensors_in
from gradrewrite.backends.backend import Backend
from gradrewrite.backends.engines import AotEager
from gradrewrite.backends.entry_point import EntryPoint
from gradrewrite.backends.model_state import state_of
from gradrewrite.backends.session import Session
from gradrewrite.backends.traced_step import METHOD, TrainingStep
from gradrewrite.errors import GraphBreakError, NonFiniteError, TraceError
from gradrewrite.monitoring.monitor import Monitor, recorder_of
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.state_store import StateStore
from gradrewrite.replay.eager_search import EagerRoot, search_eagerly
from gradrewrite.replay.step_snapshot import RandomState
from gradrewrite.rewriting.config import RewriteConfig

_LINE = re.compile(r'[^"]+:\d+ ".*"(?=: )')  # before the reason of a graph break
_MOST_BREAKS = 3  # in the text of one cause


def locate(
    model: nn.Module, *args: Any, loss_fn: Callable[[Any], Tensor] | None = None, **kwargs: Any
) -> NonFiniteError | None:
    """Run one step op by op and find the op of the first non-finite value.

    The model stays as it was: parameters, gradients, buffers, random state. Its policy, if it has one, holds.

    Args:
        model: A module, or what ``transform`` returned.
        *args: Its inputs.
        loss_fn: From the model's output to the loss, a tensor with one element. None: the output itself if it is one
            tensor with one element, otherwise the sum of all its differentiable tensors.
        **kwargs: Its inputs.

    Returns:
        The error that a check at every op would raise, not raised; None if all that leaves the model (outputs,
        gradients) is finite.

    Raises:
        GraphBreakError: The tracer cannot see the whole model, and it has a policy. A plain one runs in parts then.
        TraceError: Nothing needs a gradient.
        TypeError: ``model`` is no module, or ``loss_fn`` returns no tensor with one element.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> print(locate(model, torch.ones(1, 2)))
        None
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"gr.locate takes an nn.Module, got {type(model).__name__}")
    state = state_of(model)
    original, own = (model, []) if state is None else (state.original, [state.config.policy])
    states = None if state is None else copy.deepcopy(state.config.states)

    def loss_of(output: Any) -> Tensor:
        return _loss(output, loss_fn)

    random = RandomState.now([*original.parameters()])
    try:
        failure = run_once(original, own, args, kwargs, loss_of, states).failure(anywhere=True)
    except GraphBreakError:
        if state is not None:
            raise
        return _locate_in_parts(model, args, kwargs, loss_of, random)
    if failure is not None and state is None:
        searched(failure, model, lambda: loss_of(model(*args, **kwargs)), (args, kwargs), random)
    return failure


def _locate_in_parts(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_of: Callable[[Any], Tensor],
    random: RandomState,
) -> NonFiniteError | None:
    """Locate in the parts of a model, and else in eager mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = RewriteConfig([], fullgraph=False, dynamic=False)
        monitor, session = _run(model, config, args, kwargs, loss_of, random)
    failure = None
    with contextlib.suppress(RuntimeError):  # it cannot be replayed: the eager run tells
        failure = monitor.failure(anywhere=True)

    def run() -> Tensor:
        return loss_of(model(*args, **kwargs))

    if failure is None:
        found = _search(model, run, (args, kwargs), random)
        return None if found is None else found.error()
    name_break(failure, session.graphs.explanation().skipped)
    searched(failure, model, run, (args, kwargs), random)
    return failure


def run_once(
    model: nn.Module,
    policy: Policy,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_of: Callable[[Any], Tensor],
    states: StateStore | None = None,
) -> Monitor:
    """Run one forward and backward op by op, with a policy; return the records.

    Parameters, gradients, buffers, random state and inputs stay as they were. ``states`` are changed.
    """
    config = RewriteConfig(policy, dynamic=False, states=StateStore() if states is None else states)
    return _run(model, config, args, kwargs, loss_of)[0]


def locate_in_step(
    model: nn.Module,
    step: TrainingStep,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    random: RandomState | None = None,
) -> tuple[NonFiniteError | None, tuple[str, ...]]:
    """Return the error of a step's first op, by another run.

    It runs op by op, with the loss traced; in several graphs, if it must. Nothing of the user's changes.

    Args:
        model: The plain model, with the values of the step.
        step: The step.
        args: Its arguments for the model.
        kwargs: Its arguments for the model.
        random: The random state in which it ran; None for the present one.

    Returns:
        The error, None if all that leaves the graphs is finite, or the run cannot be replayed; and the lines that the
        tracer skipped, in order.

    Raises:
        Exception: Of any kind, if the step cannot be run.
    """
    config = RewriteConfig([], fullgraph=False, dynamic=False, methods=("forward", METHOD))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monitor, session = _run(step.added_to(model), config, args, kwargs, lambda loss: loss, random)
        skipped = session.graphs.explanation().skipped
        with contextlib.suppress(RuntimeError):
            return monitor.failure(anywhere=True), skipped
        return None, skipped


def _run(
    model: nn.Module,
    config: RewriteConfig,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_of: Callable[[Any], Tensor],
    random: RandomState | None = None,
) -> tuple[Monitor, Session]:
    monitor = Monitor()
    session = Session(config, recorder_of(monitor), model)
    session.replay_all()
    backend = Backend(session, AotEager(), monitor)
    entry_point = EntryPoint(session, lambda _: backend, backend, model, {}, config.methods[-1])
    given = list(tensors_in((args, kwargs)))
    leaves = [t for t in (*model.parameters(), *given) if t.requires_grad and t.is_leaf]
    written = [t for t in (*model.buffers(), *given) if not t.requires_grad]
    before = [(t, t.detach().clone(), t._version) for t in written]
    try:
        with torch.enable_grad(), kept_random_state():
            if random is not None:
                random.restore()
            loss = loss_of(entry_point(args, kwargs))
            with contextlib.suppress(NonFiniteError):  # the policy's own checks: what follows says more
                torch.autograd.grad(loss, leaves, allow_unused=True)
    finally:
        with torch.no_grad():
            for tensor, value, version in before:
                if tensor._version != version:
                    tensor.copy_(value)
    return monitor, session


def _loss(output: Any, loss_fn: Callable[[Any], Tensor] | None) -> Tensor:
    if loss_fn is not None:
        loss = loss_fn(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"gr.locate: loss_fn returns a tensor with one element, got {_text(loss)}")
        return loss
    return sum_of_outputs(output, "gr.locate")


def sum_of_outputs(output: Any, name: str) -> Tensor:
    """Return the output if it is one number, else the sum of its tensors.

    Only differentiable ones count. TraceError, beginning with ``name``, if there is none.
    """
    tensors = [t for t in tensors_in(output) if t.requires_grad]
    if not tensors:
        raise TraceError(
            f"{name}: no output of the model depends on a parameter or an input that needs a gradient",
            code="no-backward",
        )
    return (
        tensors[0] if len(tensors) == 1 and tensors[0].numel() == 1 else torch.stack([t.sum() for t in tensors]).sum()
    )


def _text(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def searched(
    failure: NonFiniteError, model: nn.Module, run: Callable[[], Tensor], batch: Any, random: RandomState | None
) -> list[str]:
    """Search an eager run for the op of a failure from outside; return a remark why it could not run.

    Args:
        failure: The failure, to which the op is added.
        model: The plain model, with the values of the step.
        run: Computes the loss.
        batch: The batch.
        random: The random state before the step.
    """
    if not failure.is_from_outside or random is None:
        return []
    try:
        found = _search(model, run, batch, random)
    except Exception as err:  # of any kind: the failure has the line of the graph break
        return [f"The step could not be searched in eager mode ({type(err).__name__}: {first_line(err)})."]
    if found is not None:
        failure.op, failure.source, failure.in_backward = found.op, found.source, found.in_backward
        failure.story = replace(found.story, parameter=failure.story.parameter)
        failure.cause, failure.is_from_outside = "", False
        if not found.in_backward and failure.percent == 0:  # of a gradient that is finite
            failure.site, failure.percent = found.site, found.percent
    return []


def _search(model: nn.Module, run: Callable[[], Tensor], batch: Any, random: RandomState) -> EagerRoot | None:
    with kept_state(model, batch) as state:

        def begin() -> None:
            state.restore()
            random.restore()

        return search_eagerly(model, run, begin, [batch])


def name_break(failure: NonFiniteError, skipped: Sequence[str]) -> None:
    """Name the lines of graph breaks in a failure from there."""
    if not (skipped and failure.is_from_outside):
        return
    lines = "; ".join(dict.fromkeys(skipped[-_MOST_BREAKS:]))
    failure.cause = f"the value comes from where the tracer cannot follow: {lines}"
    match = _LINE.match(skipped[-1])
    failure.source = match[0] if match else ""


def first_line(err: Exception) -> str:
    """Return the first line of an error's text, else its type."""
    return str(err).strip().partition("\n")[0] or type(err).__name__
