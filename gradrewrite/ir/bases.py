"""Tensors with the same elements, in another order or shape."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from gradrewrite._compat import fake_tensors
from gradrewrite.ir import markers
from gradrewrite.ir.markers import value_of

_aten = torch.ops.aten
# As long as the number of elements stays, every element is there once.
_SAME_ELEMENTS = frozenset(
    (
        _aten._unsafe_view.default,
        _aten.alias.default,
        _aten.detach.default,
        _aten.permute.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unsqueeze.default,
        _aten.view.default,
        markers.mark_error,
    )
)


def base_of(node: fx.Node, stop: Collection[fx.Node]) -> fx.Node:
    """Return the base of a view with the same elements, so with equal statistics.

    The users of markers in ``stop`` are going to read another value than the marker's input.
    """
    while node.op == "call_function" and node.target in _SAME_ELEMENTS and node not in stop:
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        before, after = value_of(source), value_of(node)
        if before.layout is not torch.strided or before.dtype != after.dtype:
            break
        if not fake_tensors.statically_known_true(before.numel() == after.numel()):
            break
        node = source
    return node
