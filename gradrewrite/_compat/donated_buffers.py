"""Donated buffers of compiled backwards, and retain_graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gradrewrite._compat.aot_autograd import boxed
from gradrewrite._compat.autograd import keeps_graph
from gradrewrite._compat.versions import needed_for

with needed_for("torch lists the donated buffers of a backward while it is compiled"):
    from torch._guards import TracingContext


def take_donated() -> tuple[int, ...]:
    """Return the positions of the donated inputs of the backward that was just compiled.

    Torch's own list is emptied: where it is not, ``backward(retain_graph=True)`` raises.
    """
    context = TracingContext.try_get()
    listed = context.fw_metadata.bw_donated_idxs if context is not None and context.fw_metadata is not None else None
    donated = tuple(listed or ())
    if listed:
        listed.clear()  # one list object, in the metadata of plain tensors and of subclasses
    return donated


def preserve_donated(compiled: Callable[[list[Any]], Any], donated: Sequence[int]) -> Callable[[list[Any]], Any]:
    """Copy donated inputs before a backward that keeps its graph; any other backward may overwrite them."""
    if not donated:
        return compiled

    def run(args: list[Any]) -> Any:
        if keeps_graph():
            for position in donated:
                if isinstance(args[position], Tensor):
                    args[position] = args[position].clone()
        return compiled(args)

    return boxed(run)
