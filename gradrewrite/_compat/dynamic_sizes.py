"""Sizes that Dynamo takes as symbols: marks on inputs of the frame that is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, fx

from gradrewrite._compat.versions import needed_for

with needed_for("a backend can have a frame traced again"):
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

_marked: list[Tensor] = []  # while a frame is traced, under torch's compile lock
_NAME = "_dynamo_weak_dynamic_indices"


@contextlib.contextmanager
def marks_removed() -> Iterator[None]:
    """Take marks off the inputs of a frame when it is traced, for code is guarded on them."""
    try:
        yield
    finally:
        for tensor in _marked:
            vars(tensor).pop(_NAME, None)
            vars(tensor).pop("_has_dynamo_dim_marking", None)
        _marked.clear()


def trace_again_with_symbols(gm: fx.GraphModule, dims: Collection[tuple[int, int]]) -> None:
    """Trace the frame of a Dynamo graph again, with symbols as these sizes of its inputs; once.

    ``dims`` are pairs of an input's position and a dimension. Returns where nothing can be done: the sizes are marked
    already, or the inputs are not those of the frame.
    """
    if _marked:
        return
    placeholders = gm.graph.find_nodes(op="placeholder")
    for position, dim in dims:
        tensor = getattr(placeholders[position].meta.get("grapharg"), "example", None)
        if isinstance(tensor, Tensor) and not any(name.startswith("_dynamo_") for name in vars(tensor)):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
            _marked.append(tensor)
        elif isinstance(tensor, Tensor) and any(tensor is known for known in _marked):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    if _marked:
        raise TensorifyScalarRestartAnalysis("gradrewrite: the length of a loop becomes a symbol")
