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
    """One call of a region in a call of its model: ``layers.0``, ``layers.0#1`` for the second one."""

    name: str  # of the module
    number: int = 0  # of the calls of the module before, in this call of the model

    def __str__(self) -> str:
        return f"{self.name}#{self.number}" if self.number else self.name


class _Current(threading.local):
    value: tuple[RegionCall, nn.Module] | None = None


_current = _Current()


class NotShared(Exception):
    """Refusal to share a graph with a region of other answers, or of actions with states; nothing has run."""


@contextlib.contextmanager
def region_running(call: RegionCall, module: nn.Module) -> Iterator[None]:
    """Set the running region of this thread."""
    before, _current.value = _current.value, (call, module)
    try:
        yield
    finally:
        _current.value = before


def current_region() -> tuple[RegionCall, nn.Module] | None:
    """Return the running region of this thread and its module; None without one."""
    return _current.value


def running_module() -> nn.Module | None:
    """Return the module of the running region on this thread."""
    return None if _current.value is None else _current.value[1]


def mark_backward(call: RegionCall, outputs: Iterable[Tensor], ends: set[Any]) -> None:
    """Note the region in the autograd nodes of its compiled graphs.

    ``outputs`` are what it returned and inputs that it changed, ``ends`` the autograd nodes of its inputs.
    """
    for node in autograd.compiled_nodes(outputs, ends):
        node.metadata.setdefault(_KEY, call)


def region_of_backward() -> RegionCall | None:
    """Return the region of this thread's backward; None if it is not known."""
    node = autograd.running_node()
    return None if node is None else node.metadata.get(_KEY)


def region_computed_again(name: str) -> RegionCall | None:
    """Return the call of a region that an activation checkpoint makes again, for this thread's running node.

    None if the node is not the region's, or if it is the second call: then the checkpoint holds several.
    """
    node, call = autograd.running_node(), region_of_backward()
    if call is None or call.name != name or _AGAIN in node.metadata:
        return None
    node.metadata[_AGAIN] = True
    return call
