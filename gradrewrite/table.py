"""The monitor's table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Summary:
    """One record over the steps that are in the monitor.

    Attributes:
        address: ``record@site``.
        last: Its last value.
        smallest: Its smallest value; NaN where there is none.
        median: Its median.
        largest: Its largest value.
        steps: In how many steps it was reported.
        nonfinite: In how many of them it was NaN or infinite.
    """

    address: str
    last: float
    smallest: float
    median: float
    largest: float
    steps: int
    nonfinite: int


@dataclass(frozen=True, slots=True)
class Table:
    """A table of all records; ``print`` shows it, and rich renders it.

    Attributes:
        rows: One summary a record.
        caption: How many steps it covers, and what is missing.
    """

    rows: tuple[Summary, ...]
    caption: str

    def __rich__(self) -> Any:
        """The table as rich draws it."""
        from rich.table import Table as RichTable

        table = RichTable(caption=self.caption)
        table.add_column("record@site", overflow="fold")
        for name in ("last", "min", "median", "max", "steps", "not finite"):
            table.add_column(name, justify="right")
        for row in self.rows:
            figures = [f"{v:.4g}" for v in (row.last, row.smallest, row.median, row.largest)]
            table.add_row(row.address, *figures, str(row.steps), str(row.nonfinite))
        return table

    def __str__(self) -> str:
        """The table as plain text."""
        from rich.console import Console

        widest = max((len(row.address) for row in self.rows), default=20)
        console = Console(width=max(100, widest + 80), no_color=True, force_terminal=False)
        with console.capture() as text:
            console.print(self)
        return text.get().rstrip("\n")


def table_of(rows: Sequence[Mapping[str, float]], caption: str) -> Table:
    """Sum up the records of several steps."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for address, value in row.items():
            values.setdefault(address, []).append(value)
    return Table(tuple(_summary(address, known) for address, known in values.items()), caption)


def _summary(address: str, values: list[float]) -> Summary:
    finite = sorted(v for v in values if math.isfinite(v))
    known = sorted(v for v in values if not math.isnan(v))
    nan = math.nan
    return Summary(
        address,
        last=values[-1],
        smallest=known[0] if known else nan,
        median=finite[len(finite) // 2] if finite else nan,
        largest=known[-1] if known else nan,
        steps=len(values),
        nonfinite=len(values) - len(finite),
    )
