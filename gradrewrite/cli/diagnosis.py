"""The command on a short training: diagnose."""

from __future__ import annotations

import argparse

from torch import nn

from gradrewrite._diagnosis import diagnose as diagnosis_of
from gradrewrite.cli.loading import load, made
from gradrewrite.cli.messages import Refused, split_ending


def diagnose(options: argparse.Namespace) -> None:
    """Print the diagnosis of a model, and write the page."""
    name, _ = split_ending(options.out, [".html"])
    model = made(options.model, "the model", nn.Module)
    batches = made(options.input, "the batches", (list, tuple))
    loss = load(options.loss, "the loss") if options.loss is not None else None
    optimizer = load(options.optimizer, "the optimizer") if options.optimizer is not None else None
    try:
        found = diagnosis_of(
            model, batches, loss=loss, optimizer=optimizer, steps=options.steps, try_clips=options.try_clips
        )
    except (TypeError, ValueError) as err:
        raise Refused(str(err)) from err
    print(found)
    try:
        print(found.render(name))
    except OSError as err:
        raise Refused(f"cannot write {options.out}: {err.strerror}; choose another path with --out") from err
