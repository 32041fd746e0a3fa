"""The losses among the outputs of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite.backends.compilation import GraphCompilation
from gradrewrite.instrumentation.dynamo_nodes import fake_of
from gradrewrite.ir import editing


def losses_among(gm: fx.GraphModule, compilation: GraphCompilation) -> tuple[int, ...]:
    """Return the positions of the losses among the outputs of a Dynamo graph."""
    outputs = list(enumerate(editing.outputs_of(gm.graph.output_node())))
    fakes = {n: fake for n, node in outputs if isinstance(node, fx.Node) and (fake := fake_of(node)) is not None}
    paths = compilation.outputs
    known = {n: fake for n, fake in fakes.items() if paths is None or n in paths}
    named = [("" if paths is None else paths[n], fake) for n, fake in known.items()]
    chosen = _choose(named)
    return tuple(n for n, fake in known.items() if any(fake is one for one in chosen))


def loss_of(value: Any) -> Tensor:
    """Return the loss of what a model returned, of several their sum."""
    found = _choose(list(_named(value, "")))
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


def _choose(named: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    """Return the losses among tensors with their paths."""
    differentiable = [(path, t) for path, t in named if t.requires_grad]
    for path, t in differentiable:
        if path == "loss":
            return [t]
    scalars = [t for _, t in differentiable if t.numel() == 1]
    if len(scalars) == len(differentiable) or len(scalars) == 1:
        if scalars:
            return scalars
    raise TypeError("gr.train_step: the model returns no loss: give compute_loss=, a function (model, *args) -> loss")
