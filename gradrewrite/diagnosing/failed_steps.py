"""Failures of steps that are not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradrewrite._locate import locate_in_step, name_break
from gradrewrite.backends.traced_step import TrainingStep
from gradrewrite.errors import NonFiniteError
from gradrewrite.monitoring.monitor import Monitor
from gradrewrite.replay.step_snapshot import RandomState


def has_finite_gradients(model: nn.Module) -> bool:
    """Return whether the gradients of all parameters are finite."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return all(bool(torch.isfinite(g.coalesce().values() if g.is_sparse else g).all()) for g in gradients)


def last_failure(monitor: Monitor) -> tuple[NonFiniteError | None, str]:
    """Return the failure of the last step, or else a remark why its replay found none."""
    try:
        return monitor.failure(anywhere=True), ""
    except RuntimeError as err:
        return None, f"The step that is not finite could not be replayed: {err}."


def failure_in_step(
    failure: NonFiniteError | None, model: nn.Module, step: TrainingStep, batch: Any, random: RandomState | None
) -> NonFiniteError | None:
    """Locate a failure by another run, with the loss traced.

    Args:
        failure: The failure by a replay, returned where an op of the model made the value; None where none was found.
        model: The plain model, with the values of the step.
        step: The step.
        batch: Its batch.
        random: The random state before it.
    """
    if failure is not None and not failure.is_from_outside:
        return failure
    args, kwargs = step.arguments(model, batch)
    found, skipped = locate_in_step(model, step, args, kwargs, random)
    if found is not None and failure is not None:
        found.step, found.update, found.micro_batch = failure.step, failure.update, failure.micro_batch
    found = found or failure
    if found is not None:
        name_break(found, skipped)
    return found
