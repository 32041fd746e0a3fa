"""Region calls: the running region on each thread, forward or backward."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradrewrite._compat import autograd

_KEY = "gradrewrite_region"  # in the metadata of an autograd node
_AGAIN = "gradrewrite_region_again"  # there, once what it saved was asked for


class RegionCall(NamedTuple):
    """One call of a region in a call of its model.

    Attributes:
        name: Name of the module.
        number: How many calls of the module came before, in this call of the model.
    """

    name: str
    number: int = 0

    def __str__(self) -> str:
        """``layers.0``, ``layers.0#1`` for the second call."""
        return f"{self.name}#{self.number}" if self.number else self.name


class _Current(threading.local):
    call: RegionCall | None = None
    module: nn.Module | None = None


_current = _Current()


class NotShared(Exception):
    """Refusal to share a compiled graph between two regions.

    The policy answers otherwise in the second one, or its actions have states. Nothing has run.
    """


@contextlib.contextmanager
def region_running(call: RegionCall, module: nn.Module) -> Iterator[None]:
    """Set the running region of this thread."""
    before = _current.call, _current.module
    _current.call, _current.module = call, module
    try:
        yield
    finally:
        _current.call, _current.module = before


def current_region() -> tuple[RegionCall, nn.Module] | None:
    """Return the running region of this thread and its module; None without one."""
    return (_current.call, _current.module) if _current.call is not None and _current.module is not None else None


def running_module() -> nn.Module | None:
    """Return the module of the running region on this thread."""
    return _current.module


def mark_backward(call: RegionCall, outputs: Iterable[Tensor], ends: set[Any]) -> None:
    """Note the region in the autograd nodes of its compiled graphs.

    Args:
        call: The region.
        outputs: What it returned, and inputs that it changed.
        ends: The autograd nodes of its inputs.
    """
    for node in autograd.compiled_nodes(outputs, ends):
        node.metadata.setdefault(_KEY, call)


def region_of_backward() -> RegionCall | None:
    """Return the region of this thread's backward; None if it is not known."""
    node = autograd.running_node()
    return None if node is None else node.metadata.get(_KEY)


def region_computed_again(name: str) -> RegionCall | None:
    """Return the call of a region that an activation checkpoint makes again, for the node that this thread runs.

    None if the node is not the region's, or if it is the second call: then the checkpoint holds several.
    """
    node, call = autograd.running_node(), region_of_backward()
    if call is None or call.name != name or _AGAIN in node.metadata:
        return None
    node.metadata[_AGAIN] = True
    return call
