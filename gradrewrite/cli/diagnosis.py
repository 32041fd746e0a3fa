"""The commands on a model and its training: diagnose and audit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gradrewrite._diagnosis import diagnose as diagnosis_of
from gradrewrite.auditing.verdicts import audit_call
from gradrewrite.backends.traced_step import ComputeLoss, TrainingStep, arguments_of
from gradrewrite.cli.loading import load, made
from gradrewrite.cli.messages import Refused, split_ending


def diagnose(options: argparse.Namespace) -> None:
    """Print the diagnosis of a model, and write the page."""
    name, _ = split_ending(options.out, [".html"])
    model = made(options.model, "the model", nn.Module)
    batches = made(options.input, "the batches", (list, tuple))
    loss = load(options.loss, "the loss") if options.loss is not None else None
    compute_loss = load(options.compute_loss, "compute_loss") if options.compute_loss is not None else None
    optimizer = load(options.optimizer, "the optimizer") if options.optimizer is not None else None
    try:
        found = diagnosis_of(
            model,
            batches,
            loss=loss,
            compute_loss=compute_loss,
            optimizer=optimizer,
            steps=options.steps,
            try_clips=options.try_clips,
            clip=options.clip,
        )
    except (TypeError, ValueError) as err:
        raise Refused(str(err)) from err
    print(found)
    try:
        print(found.render(name))
    except OSError as err:
        raise Refused(f"cannot write {options.out}: {err.strerror}; choose another path with --out") from err


def audit(options: argparse.Namespace) -> int:
    """Print the audit of a training step; return 1 if it has faults, else 0."""
    model = made(options.model, "the model", nn.Module)
    batch = made(options.input, "the batch", (Tensor, tuple, list, Mapping))
    optimizer = load(options.optimizer, "the optimizer") if options.optimizer is not None else None
    args, kwargs, compute_loss = _step_of(options, model, batch)
    settings = {"optimizer": optimizer, "trained": options.trained, "steps": options.steps}
    try:
        found = audit_call(model, args, kwargs, compute_loss=compute_loss, **settings)
    except (TypeError, ValueError) as err:
        raise Refused(str(err)) from err
    print(json.dumps(found.to_json(), indent=1, allow_nan=False) if options.json else found)
    if options.out is not None:
        try:
            found.render(options.out)
        except OSError as err:
            raise Refused(f"cannot write {options.out}: {err.strerror}; choose another path with --out") from err
    return 1 if found.causes else 0


def _step_of(
    options: argparse.Namespace, model: nn.Module, batch: Any
) -> tuple[tuple[Any, ...], dict[str, Any], ComputeLoss | None]:
    """Return the arguments of a training step, and its loss, if one is named."""
    given = [options.loss, options.compute_loss]
    loss, compute_loss = (None if one is None else load(one, "the loss") for one in given)
    if loss is not None and compute_loss is not None:
        raise Refused("--loss and --compute-loss are two ways to name one loss; give one")
    if loss is compute_loss is None:
        return *arguments_of(model, batch, has_loss=False), None
    step = TrainingStep(loss, compute_loss)
    return *step.arguments(model, batch), step.function(model)
