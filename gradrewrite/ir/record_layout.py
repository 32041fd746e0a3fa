"""The layout of the auxiliary outputs of a rewritten backward: records, checks, log lines, kept tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from gradrewrite.sites import Site

OnFailure = Literal["raise", "skip", "warn", "record"]

# Records of the bounds of clips, by norm and by value; a bound has the occurrence of what it bounds.
BOUNDS = frozenset(("bound", "limit"))

_NUMBERED = re.compile(r"(.*)\.([2-9]|[1-9][0-9]{1,8})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RecordKey:
    """The key of a record: its text is ``record@site``, or ``record.2@site`` for the second of a name at a site.

    A name that a user gave and that itself ends in a dot and a whole number > 1 (``expert.3``) is read as such an
    occurrence, so ``RecordKey.parse(str(key)) == key`` for every key.

    Attributes:
        record: Name of the record, without ``@``.
        occurrence: Number of the record among those of this name at this site, from 1.
        site: ``kind:name`` of the site; for what has none ``group:default``, ``optimizer:0``, ``run``.

    Raises:
        ValueError: The key could not be parsed back: ``record`` has an ``@``, ``occurrence`` is not in 1 to
            999,999,999, or it is 1 and ``record`` ends in a number (see ``of``).
    """

    record: str
    occurrence: int
    site: str

    def __post_init__(self) -> None:
        """Refuse what could not be parsed back."""
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
        """Make the key whose text is ``name@site``; ValueError if ``name`` has an ``@``."""
        numbered = _NUMBERED.fullmatch(name)
        return cls(name, 1, site) if numbered is None else cls(numbered[1], int(numbered[2]), site)

    @classmethod
    def parse(cls, text: str) -> RecordKey:
        """Parse ``record@site`` or ``record.2@site``.

        Raises:
            ValueError: There is no ``@``.
        """
        name, at, site = text.partition("@")
        if not at:
            raise ValueError(f"wanted record@site as the name of a record, got {text!r}")
        return cls.of(name, site)


@dataclass(frozen=True, slots=True)
class LogLine:
    """The records of one log line of a clip.

    Attributes:
        site: Site of the clip.
        max_abs: Largest absolute value before the clip.
        mean_abs: Mean absolute value before the clip.
        clipped: 1 if the clip acted, else 0.
    """

    site: Site
    max_abs: RecordKey
    mean_abs: RecordKey
    clipped: RecordKey


@dataclass(frozen=True, slots=True)
class Check:
    """One finite check.

    Attributes:
        site: The site.
        on_failure: What follows a failure.
        key: Key of the record of its count.
        order: Position in the order of execution: forward first, then backward.
        node: Name of the fx node that it looks at.
    """

    site: Site
    on_failure: OnFailure
    key: RecordKey
    order: int
    node: str


@dataclass(frozen=True, slots=True)
class BackwardOutputs:
    """The auxiliary outputs of a rewritten backward graph, in their order.

    Attributes:
        packs: Keys of the records in each packed tensor.
        keys: All of them, in the order of the sites.
        num_skips: How many counts of checks that skip each packed tensor begins with.
        verdicts: Whether each packed tensor has one element more, behind the records: 1 if one of these counts is not
            0, else 0. Elsewhere the counts are looked at where somebody wants to know.
        kept: Sites whose tensors are kept.
        logs: The lines of clips that log.
        groups: Names of groups that are clipped together.
        checks: The finite checks, in the order of execution.
        bounds: Bounds of clips that the host has (numbers, tensors in host memory), by key: ``bound@site`` by norm,
            ``limit@site`` by value, which counts by its size.
        counts: Keys of counts of elements, which add up over several graphs of one backward.
        checked: For each consequence of a failed check, the positions of the counts in each packed tensor.
    """

    packs: tuple[tuple[RecordKey, ...], ...] = ()
    keys: tuple[RecordKey, ...] = ()
    num_skips: tuple[int, ...] = ()
    verdicts: tuple[bool, ...] = ()
    kept: tuple[Site, ...] = ()
    logs: tuple[LogLine, ...] = ()
    groups: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    bounds: tuple[tuple[RecordKey, float | Tensor], ...] = ()
    counts: frozenset[RecordKey] = frozenset()
    checked: Mapping[OnFailure, tuple[tuple[int, ...], ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Find the counts of the checks, which are looked at after every step."""
        modes: dict[OnFailure, set[RecordKey]] = {}
        for check in self.checks:
            modes.setdefault(check.on_failure, set()).add(check.key)
        checked = {
            mode: tuple(tuple(n for n, key in enumerate(pack) if key in keys) for pack in self.packs)
            for mode, keys in modes.items()
        }
        object.__setattr__(self, "checked", checked)
