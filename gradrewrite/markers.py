"""Operators that stand in a joint graph between tracing and rewriting, and the one that holds what must leave it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_LIBRARY = torch.library.Library("gradrewrite", "DEF")
_LIBRARY.define("mark_activation(Tensor x, int value) -> ()")
_LIBRARY.define("mark_error(Tensor g, int value) -> Tensor")
_LIBRARY.define("hold(Tensor[] tensors) -> ()")


def _no_result(*_: Any) -> None:
    return None


def _like(g: Tensor, _: int) -> Tensor:
    # Same strides, so that what is traced behind a marker is what is traced without it.
    return torch.empty_strided(g.size(), g.stride(), dtype=g.dtype, device=g.device)


for _name, _implementation in (("mark_activation", _no_result), ("mark_error", _like), ("hold", _no_result)):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gradrewrite::{_name}", _implementation, lib=_LIBRARY)

# A forward may differentiate inside itself, and then once more through that: the marker is an identity.
torch.library.register_autograd("gradrewrite::mark_error", lambda _, g: (g, None), lib=_LIBRARY)

mark_activation = torch.ops.gradrewrite.mark_activation.default
mark_error = torch.ops.gradrewrite.mark_error.default
hold = torch.ops.gradrewrite.hold.default
fx.node.has_side_effect(mark_activation)
fx.node.has_side_effect(hold)
