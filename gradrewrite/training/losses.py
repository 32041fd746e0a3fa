"""The losses among the outputs of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite.errors import TraceError
from gradrewrite.ir.markers import value_of


def losses_among(tangents: Mapping[int, fx.Node], paths: Mapping[int, str] | None) -> tuple[int, ...]:
    """Return the positions of the losses among a graph's outputs.

    ``tangents`` are the gradients of the differentiable outputs, by position; ``paths`` those of the outputs that the
    call returns (None: all). TraceError without a loss.
    """
    known = [n for n in sorted(tangents) if paths is None or n in paths]
    named = [("" if paths is None else paths[n], value_of(tangents[n])) for n in known]
    return tuple(known[n] for n in _choose(named))


def loss_of(value: Any) -> Tensor:
    """Return the loss among a model's results, of several their sum; TraceError without one."""
    named = [(path, t) for path, t in _named(value, "") if t.requires_grad]
    found = [named[n][1] for n in _choose(named)]
    return found[0] if len(found) == 1 else torch.stack([one.reshape(()) for one in found]).sum()


def _named(value: Any, path: str) -> Any:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _named(item, f"{path}.{number}" if path else str(number))
    elif hasattr(value, "__dict__"):
        yield from _named(vars(value), path)


def _choose(named: Sequence[tuple[str, Tensor]]) -> list[int]:
    """Return the positions of the losses among differentiable tensors with their paths."""
    of_name = [n for n, (path, t) in enumerate(named) if path == "loss" and t.numel() == 1]
    scalars = [n for n, (_, t) in enumerate(named) if t.numel() == 1]
    found = of_name or (scalars if len(scalars) in (1, len(named)) else [])
    if not found:
        told = ", ".join(f"{path or 'a tensor'} of shape {tuple(t.shape)}" for path, t in named) or "none"
        raise TraceError(
            "gr.train_step: there is no loss among the differentiable tensors that the model returns "
            f"({told}): it is what is named loss, or the only one with a single element; if all have one, their sum. "
            "Give compute_loss=, a function (model, *args) -> loss",
            code="train-step",
        )
    return found
