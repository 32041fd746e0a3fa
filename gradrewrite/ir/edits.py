"""Edits: what one action inserted at one site."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gradrewrite.sites import Site

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class Edit:
    """The nodes that one action inserted at one site.

    Attributes:
        site: Where.
        action: The action or tensor function, as the policy answered it.
        nodes: Names of the inserted fx nodes in execution order. What several sites share (the total norm of a
            group, the one measurement of all gradients) is listed with the first. An action that inserts nothing
            (an identity) has none.
    """

    site: Site
    action: Any
    nodes: tuple[str, ...]

    @property
    def text(self) -> str:
        """The action as text, without addresses in memory: the same in every process."""
        return _ADDRESS.sub("", repr(self.action))
