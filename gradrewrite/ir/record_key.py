"""``RecordKey``: the key of a record, ``record@site``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PLACED = re.compile(r"(.*?)(@\d+)?(#\d+)?", re.DOTALL)
_OF_LOSS = re.compile(r"(.*)\[[^\W\d][^][]*\](#\d+)?", re.DOTALL)
_NUMBERED = re.compile(r"(.*)\.([2-9]|[1-9][0-9]{1,8})", re.DOTALL)


def with_label(site: str, label: str) -> str:
    """Put the label of a model behind a site, before the number of a call."""
    name, call, number = site.rpartition("#")
    return f"{name}{label}{call}{number}" if call and number.isdecimal() else f"{site}{label}"


def without_label(site: str) -> tuple[str, str]:
    """Return the site of a record without the label of its model, and the label; ``""`` without one."""
    found = _PLACED.fullmatch(site)
    assert found is not None
    return f"{found[1]}{found[3] or ''}", found[2] or ""


def with_loss(site: str, loss: str) -> str:
    """Put the name of a loss behind a site, before the number of a call: ``gradient:w[energy]``; ``""`` for none."""
    return with_label(site, f"[{loss}]") if loss else site


def without_loss(site: str) -> str:
    """Return the site of a record without the name of a loss."""
    found = _OF_LOSS.fullmatch(site)
    return site if found is None else f"{found[1]}{found[2] or ''}"


@dataclass(frozen=True, slots=True)
class RecordKey:
    """The key of a record, with the text ``record@site``.

    The second record of a name at a site is ``record.2@site``. A name that a user gave and that itself ends in a dot
    and a whole number > 1 (``expert.3``) is read as such an occurrence, so ``RecordKey.parse(str(key)) == key`` for
    every key.
    """

    record: str  # without ``@``
    occurrence: int  # among the records of this name at this site, 1 to 999,999,999
    site: str  # ``kind:name``; for what has none ``group:default``, ``optimizer:0``, ``run``

    def __post_init__(self) -> None:
        """Refuse names that could not be parsed back."""
        if "@" in self.record:
            raise ValueError(f"the name of a record has no '@', got {self.record!r}")
        if not 1 <= self.occurrence <= 999_999_999:
            raise ValueError(f"the occurrence of {self.record!r} is in 1 to 999,999,999, got {self.occurrence!r}")
        if self.occurrence == 1 and _NUMBERED.fullmatch(self.record) is not None:
            raise ValueError(f"{self.record!r} ends in an occurrence; use RecordKey.of")

    @property
    def kind(self) -> str:
        """Kind of the site: ``error`` of ``error:a``."""
        return self.site.partition(":")[0]

    @property
    def name(self) -> str:
        """The record with its occurrence: ``norm``, ``norm.2``."""
        return self.record if self.occurrence == 1 else f"{self.record}.{self.occurrence}"

    def __str__(self) -> str:
        """``record@site``."""
        return f"{self.name}@{self.site}"

    @classmethod
    def of(cls, name: str, site: str) -> RecordKey:
        """Make the key with the text ``name@site``; ValueError for an ``@`` in ``name``."""
        numbered = _NUMBERED.fullmatch(name)
        return cls(name, 1, site) if numbered is None else cls(numbered[1], int(numbered[2]), site)

    @classmethod
    def parse(cls, text: str) -> RecordKey:
        """Parse ``record@site`` or ``record.2@site``; ValueError without an ``@``."""
        name, at, site = text.partition("@")
        if not at:
            raise ValueError(f"wanted record@site as the name of a record, got {text!r}")
        return cls.of(name, site)
