"""What a replay saw."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradrewrite.recipe import Given
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class Seen:
    """What a site held in a replay.

    Attributes:
        site: The site.
        order: Place in the order of execution.
        is_forward: Whether it belongs to the forward.
        percent: Share of elements that are not finite, in percent; intended infinities are not counted.
        smallest: Smallest absolute value; NaN if it is empty.
        largest: Largest absolute value of the finite elements; NaN if there are none.
        node: Name of the value.
    """

    site: Site
    order: int
    is_forward: bool
    percent: float
    smallest: float
    largest: float
    node: str


@dataclass(frozen=True, slots=True)
class Root:
    """Where non-finite values begin: an op, or a value that came into the graph.

    Attributes:
        order: Place in the order of execution.
        is_forward: Whether it belongs to the forward.
        op: ``module/op`` of the op that was run, forward or backward; ``""`` for what came in.
        source: Line of that op.
        came_in: What came into the graph already non-finite, in words; ``""`` for an op.
        given: What that is; None for an op, and for the loss.
        reached: Names of the non-finite values that it leads to.
        overwritten: An input that was overwritten meanwhile and on which it depends; ``""`` if there is none.
    """

    order: int
    is_forward: bool
    op: str
    source: str
    came_in: str
    given: Given | None
    reached: frozenset[str]
    overwritten: str


@dataclass
class Evidence:
    """What one replay saw, in the order of execution, and an input that was overwritten since (``""`` if none was)."""

    seen: list[Seen] = field(default_factory=list)
    roots: list[Root] = field(default_factory=list)
    overwritten: str = ""
