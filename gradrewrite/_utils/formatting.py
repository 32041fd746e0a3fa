"""Tables of records, and the names nearest to a misspelt one."""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from types import FunctionType
from typing import Any

from gradrewrite._utils.elements import split_element
from gradrewrite._utils.exponent_counts import split_exponents
from gradrewrite._utils.fingerprints import is_fingerprint, text_of, with_whole_fingerprints
from gradrewrite._utils.grouping import grouped
from gradrewrite._utils.html_tables import html_table

_COLUMNS = ("record@site", "last", "min", "median", "max", "steps", "not finite")
_BOUNDS = ("bound", "limit")  # records of clips; an infinite one clips nothing
_CALL = re.compile(r"#\d+$")
_FEW_CALLS = 5  # of one site that have a row each where a table is shown
_MOST_ROWS = 40  # of a table in a notebook


@dataclass(frozen=True, slots=True)
class Summary:
    """One record over the steps that are in the monitor."""

    address: str  # ``record@site``
    last: float  # its last value
    smallest: float  # its smallest value; NaN where there is none
    median: float
    largest: float  # its largest value
    steps: int  # in how many steps it was reported
    nonfinite: int  # in how many of them it was NaN or infinite; an infinite bound of a clip is none of them
    text: str = ""  # in the place of the values, for what has no order

    def cells(self) -> tuple[str, ...]:
        """The texts of a row of the table."""
        figures = [f"{v:.4g}" for v in (self.last, self.smallest, self.median, self.largest)]
        if self.text:
            figures = [self.text, "", "", ""]
        return self.address, *figures, str(self.steps), str(self.nonfinite)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of all records; ``print`` shows it, and rich renders it."""

    rows: tuple[Summary, ...]  # one summary a record
    caption: str  # how many steps it covers, and what is missing
    shown: tuple[Summary, ...] = ()  # the rows that are shown: many calls of a site are one

    def __rich__(self) -> Any:
        from rich.table import Table as RichTable

        table = RichTable(caption=self.caption)
        table.add_column(_COLUMNS[0], overflow="fold")
        for name in _COLUMNS[1:]:
            table.add_column(name, justify="right")
        for row in self.shown:
            table.add_row(*row.cells())
        return table

    def _repr_html_(self) -> str:
        more = f"; the first {_MOST_ROWS} of {len(self.shown)} records" if len(self.shown) > _MOST_ROWS else ""
        return html_table(_COLUMNS, [row.cells() for row in self.shown[:_MOST_ROWS]], f"{self.caption}{more}")

    def __str__(self) -> str:
        widest = max((len(row.address) for row in self.shown), default=20)
        return _as_text(self, max(100, widest + 80))


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as plain text, as wide as it needs to be."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        is_number = bool(rows) and all(row[number].isdecimal() or not row[number] for row in rows)
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return _as_text(table, sum(max([len(name), *(len(row[n]) for row in rows)]) + 4 for n, name in enumerate(columns)))


def _as_text(renderable: Any, width: int) -> str:
    from rich.console import Console

    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as text:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in text.get().rstrip("\n").splitlines())


def table_of(rows: Sequence[Mapping[str, float]], caption: str) -> Table:
    """Sum up the records of several steps."""
    values: dict[str, list[float]] = {}
    texts: dict[str, str] = {}
    for row in rows:
        rest, exponents = split_exponents(row)
        numbers = with_whole_fingerprints(rest)
        texts |= {address: text_of(value) for address, value in numbers.items() if is_fingerprint(address)}
        texts |= {address: str(counts) for address, counts in exponents.items()}
        numbers |= {address: math.nan if one.inf or one.nan else one.total for address, one in exponents.items()}
        for address, value in numbers.items():
            values.setdefault(address, []).append(value)
    summaries = tuple(_summary(address, known, texts.get(address, "")) for address, known in values.items())
    shown = tuple(_folded(summaries, values))
    if len(shown) < len(summaries):
        caption += f"; a row with #0-n or [0-n] is of all calls or elements together (.rows has all {len(summaries)})"
    return Table(summaries, caption, shown)


def _folded(rows: Sequence[Summary], values: Mapping[str, list[float]]) -> Iterator[Summary]:
    """Yield rows, with one for many calls of a site or elements of a vector; "last" is that of the last one."""
    starts = {row.address: split_element(_CALL.sub("", row.address))[0] for row in rows}
    alike = grouped((starts[row.address], row) for row in rows)
    for row in rows:
        start = starts[row.address]
        own = alike[start]
        if len(own) < _FEW_CALLS or any(one.text for one in own):
            yield row
        elif row is own[0]:
            together = _summary(start, [value for one in own for value in values[one.address]], "")
            name, at, site = start.partition("@")
            elements = _span([number for one in own if (number := split_element(one.address)[1]) is not None])
            calls = _span([int(found[0][1:]) if (found := _CALL.search(one.address)) else 0 for one in own])
            where = f"{name}{f'[{elements}]' if elements else ''}{at}{site}{f'#{calls}' if calls else ''}"
            yield replace(together, address=where, steps=max(one.steps for one in own))


def _span(numbers: Sequence[int]) -> str:
    """Return the first and the last number; ``""`` for none, and for one that is 0."""
    first, last = min(numbers, default=0), max(numbers, default=0)
    return f"{first}-{last}" if last > first else (str(last) if last else "")


def _summary(address: str, values: list[float], text: str) -> Summary:
    known = [v for v in values if not math.isnan(v)]
    expected = known if address.partition("@")[0] in _BOUNDS else [v for v in values if math.isfinite(v)]
    return Summary(
        address,
        last=values[-1],
        smallest=min(known, default=math.nan),
        median=statistics.median(expected) if expected else math.nan,
        largest=max(known, default=math.nan),
        steps=len(values),
        nonfinite=len(values) - len(expected),
        text=text,
    )


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names as text, with the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(pattern: str, known: Sequence[str], count: int = 5) -> list[str]:
    """The names most like a pattern, the best first."""
    head, colon, rest = pattern.partition(":")
    wanted = rest if colon else head
    candidates = dict.fromkeys(n for n in known if not colon or n.startswith(f"{head}:"))

    def likeness(name: str) -> float:
        _, colon, rest = name.partition(":")
        return SequenceMatcher(None, wanted, rest if colon else name).ratio()

    return sorted(candidates or dict.fromkeys(known), key=likeness, reverse=True)[:count]


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def describe_callable(function: Callable[..., Any]) -> str:
    """Return the name of a function or a class; of any other callable its representation."""
    return function.__qualname__ if isinstance(function, FunctionType | type) else repr(function)


def located_callable(function: Callable[..., Any]) -> str:
    """Return the name of a callable for a message, of a lambda with its line."""
    if not isinstance(function, FunctionType) or function.__name__ != "<lambda>":
        return describe_callable(function)
    code = function.__code__
    return f"<lambda> ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def without_addresses(text: str) -> str:
    """Return a representation without addresses in memory: the same in every process."""
    return _ADDRESS.sub("", text)
