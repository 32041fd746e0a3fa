"""``Diagram``: boxes and edges without coordinates, for Graphviz or for the grid layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradrewrite.viz._scene import LegendEntry

MAX_LABEL = 44  # of a label


@dataclass(frozen=True, slots=True)
class Item:
    """One box of a diagram.

    Attributes:
        key: Its name in the diagram.
        column: The column, and Graphviz's cluster, that it belongs to.
        row: Its row from above.
        text: First line.
        small: Second line.
        badge: A mark beside it: the number of inserted nodes.
        classes: ``inserted``, ``records``, ``root_cause``.
        title: What a pointer on it shows.
        data: ``data-`` attributes.
        fill: Color, if not that of its classes.
    """

    key: str
    column: str
    row: int
    text: str
    small: str = ""
    badge: str = ""
    classes: tuple[str, ...] = ()
    title: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    fill: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """One edge: ``kind`` is ``""``, ``"saved"``, ``"carried"`` (to the records) or ``"cut"`` (replaced)."""

    source: str
    target: str
    kind: str = ""
    tensors: int = 1


@dataclass(frozen=True, slots=True)
class Diagram:
    """Boxes in columns, and the edges between them.

    Attributes:
        title: Its title.
        columns: Names of the columns from the left.
        items: Boxes.
        links: Edges.
        caption: Lines of text below.
        legend: What colors mean.
        is_grid: Whether rows are the same in all columns.
    """

    title: str
    columns: tuple[str, ...]
    items: Sequence[Item]
    links: Sequence[Link]
    caption: Sequence[str] = ()
    legend: Sequence[LegendEntry] = ()
    is_grid: bool = True
