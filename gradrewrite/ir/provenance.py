"""Provenance of joint-graph nodes: their op, module calls and source line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gradrewrite.sites import Site

Lane = Literal["forward", "inner", "backward"]  # ``"inner"``: a gradient that the forward computes of itself


@dataclass(frozen=True, slots=True)
class Origin:
    """The op, module calls and source line of one node."""

    lane: Lane
    # Number of the torch-level op in the order of the forward; the nodes of its backward share it. A placeholder has
    # that of its first use, what carries records has -1.
    order: int
    # The module calls around the op, outermost first: each a module's name and the number of the call.
    calls: tuple[tuple[str, int], ...] = ()
    # As the user called it; of a placeholder ``"parameter"``, ``"buffer"``, ``"input"``, ``"value"`` (from before a
    # graph break) or ``"outside"`` (the gradient of an output).
    op: str = ""
    name: str = ""  # what a placeholder stands for: a parameter's name; ``""`` for ops
    source: str = ""  # ``file:line "code"`` of the op; ``""`` where there is none
    loss: int | None = None  # of a node in the backward of one of several losses, its number

    @property
    def module(self) -> str:
        """Name of the innermost module; ``""`` is the root."""
        return self.calls[-1][0] if self.calls else ""


@dataclass(frozen=True, slots=True)
class Anchor:
    """The node of a site."""

    node: str  # the node that holds the value before anything acts on it
    order: int  # of the torch-level op that it belongs to, as in ``Origin``


@dataclass(frozen=True, slots=True)
class Provenance:
    """The provenance of the parts of a joint graph."""

    origins: Mapping[str, Origin] = field(default_factory=dict)  # by name of the node, inserted ones included
    anchors: Mapping[Site, Anchor] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()  # by position: ``output:0``, ``gradient:w``, ``input:x``
