"""Edits: the nodes of one action at one site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradrewrite._utils.formatting import without_addresses
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class Edit:
    """The inserted nodes of one action at one site.

    Attributes:
        site: Where.
        action: The action or tensor function, as the policy answered it.
        nodes: Names of the inserted fx nodes in execution order. What several sites share (the total norm of a
            group, the one measurement of all gradients) is listed with the first. An action that inserts nothing
            (an identity) has none.
        records: Keys of what it records; those of a group are listed with each of its sites.
    """

    site: Site
    action: Any
    nodes: tuple[str, ...]
    records: tuple[RecordKey, ...] = field(default=(), repr=False, compare=False)
    # Of ``policy.insertions``, which this package does not know; None in an edit that was read from a cache.
    insertion: Any = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[type[Edit], tuple[Any, ...]]:
        """Leave out the insertion with its functions."""
        return Edit, (self.site, self.action, self.nodes, self.records)

    @property
    def record_sites(self) -> list[str]:
        """Sites of its records, its own first: ``gradient:w``, ``group:default``."""
        return list(dict.fromkeys([str(self.site), *(key.site for key in self.records)]))

    @property
    def text(self) -> str:
        """The action as text, without addresses in memory."""
        return without_addresses(repr(self.action))


def told_once(edits: Sequence[Edit]) -> Iterator[tuple[str, Edit]]:
    """Yield edits with their sites as text; one action at a value in several iterations of a loop comes once."""
    inside = Counter((e.text, e.site.kind, e.site.name) for e in edits if e.site.iteration is not None)
    for edit in edits:
        count = 1 if edit.site.iteration is None else inside.pop((edit.text, edit.site.kind, edit.site.name), 0)
        if count:
            yield f"{edit.site} ({count} iterations)" if count > 1 else str(edit.site), edit
