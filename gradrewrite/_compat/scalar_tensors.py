"""Tensors with one element that a model reads and writes; Python's floats as symbols."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from gradrewrite._compat.versions import needed_for

with needed_for("AOTAutograd turns operations on Python's floats into operations on tensors by one function"):
    from torch._functorch._aot_autograd import graph_compile

    _module: Any = graph_compile
    _plain: Callable[..., None] = _module.tensorify_python_scalars
with needed_for("the symbol of a float has a source: an item of a tensor, or a float"):
    from torch._dynamo.source import CallMethodItemSource
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextlib.contextmanager
def written_scalars_kept() -> Iterator[None]:
    """Keep updates of 0-d float64 tensors: torch loses them.

    Each such tensor has a symbol for its item. Where nothing reads the item, torch takes the symbol for a float that
    became a constant, and traces once more without the nodes of its value, its in-place updates too.
    """
    _module.tensorify_python_scalars = _without_items
    try:
        yield
    finally:
        _module.tensorify_python_scalars = _plain


def _without_items(gm: fx.GraphModule, shape_env: ShapeEnv, *further: Any) -> None:
    read = {
        symbol
        for node in gm.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.SymFloat)
        for symbol in value.node.expr.free_symbols
    }
    values = shape_env.backed_var_to_val
    sources = shape_env.var_to_sources
    hidden = {
        symbol: value
        for symbol, value in values.items()
        if symbol not in read and any(isinstance(source, CallMethodItemSource) for source in sources.get(symbol, ()))
    }
    for symbol in hidden:
        del values[symbol]
    try:
        _plain(gm, shape_env, *further)
    finally:
        values.update(hidden)
