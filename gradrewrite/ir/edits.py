"""Edits: the nodes of one action at one site."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from gradrewrite.ir.record_key import RecordKey
from gradrewrite.sites import Site

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


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

    @property
    def record_sites(self) -> list[str]:
        """Sites of its records, its own first: ``gradient:w``, ``group:default``."""
        return list(dict.fromkeys([str(self.site), *(key.site for key in self.records)]))

    @property
    def text(self) -> str:
        """The action as text, without addresses in memory: the same in every process."""
        return _ADDRESS.sub("", repr(self.action))
