"""``locate``: the op behind the first non-finite value, on demand."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradrewrite._utils.tensors import kept_random_state, tensors_in
from gradrewrite.backends.backend import Backend
from gradrewrite.backends.engines import AotEager
from gradrewrite.backends.entry_point import EntryPoint
from gradrewrite.backends.model_state import state_of
from gradrewrite.backends.session import Session
from gradrewrite.backends.traced_step import METHOD, TrainingStep
from gradrewrite.errors import NonFiniteError, TraceError
from gradrewrite.monitoring.monitor import Monitor, recorder_of
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.state_store import StateStore
from gradrewrite.replay.step_snapshot import RandomState
from gradrewrite.rewriting.config import RewriteConfig


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
        GraphBreakError: The tracer cannot see the whole model.
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

    return run_once(original, own, args, kwargs, loss_of, states).failure(anywhere=True)


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
