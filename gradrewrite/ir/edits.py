"""Edits: the nodes of one action at one site."""

from __future__ import annotations

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
