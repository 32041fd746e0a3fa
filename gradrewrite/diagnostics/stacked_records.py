"""Records of loops, and vectors: one list in a run log, a few figures in other logs."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from gradrewrite._utils.elements import elements_of, split_element
from gradrewrite._utils.exponent_counts import EXPONENTS
from gradrewrite._utils.grouping import grouped
from gradrewrite.ir.outputs import Stack, iterations_of

_CODES = {"float32": "f", "float64": "d"}  # of dtypes in ``array``
_DIGITS = 9  # tell all float32 numbers apart


def plain_number(value: float) -> float | str:
    """A number as strict JSON has it; NaN and infinities as strings that ``float`` reads."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def number_of_json(address: str, value: object) -> float:
    """Return a number from JSON; ValueError otherwise."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    raise ValueError(f'wanted a number, "NaN", "Infinity" or "-Infinity" for {address!r}, got {value!r:.60}')


def records_to_json(records: Mapping[str, float], stacks: Sequence[Stack]) -> dict[str, Any]:
    """Return records as JSON takes them, with one list for the iterations of a record in a loop, and for a vector.

    The lists of a loop are in one object, at the place of its first record; an iteration without the record is None.
    Numbers that are all of float32 have nine digits.
    """
    owners = {address: number for number, stack in enumerate(stacks) for own in stack for address in own}
    found: dict[str, Any] = {}
    for address, value in records.items():
        if address not in owners:
            found[address] = plain_number(value)
        elif (name := f"{_kind_of(stacks[owners[address]])} {owners[address]}") not in found:
            found[name] = _stack_to_json(records, stacks[owners[address]])
    return found


def _kind_of(stack: Stack) -> str:
    """Return ``"loop"``, or ``"vector"`` for the elements of one at a site."""
    own = stack[0]
    is_vector = len(own) > 1 and own[0].partition("@")[2] == own[-1].partition("@")[2]
    return "vector" if is_vector else "loop"


def _stack_to_json(records: Mapping[str, float], stack: Stack) -> dict[str, object]:
    rows = {own[0]: [records.get(address) for address in own] for own in stack}
    values = array("d", (value for row in rows.values() for value in row if value is not None))
    is_single = array("d", array("f", values)).tobytes() == values.tobytes()

    def written(value: float | None) -> float | str | None:
        if value is None or not math.isfinite(value):
            return None if value is None else plain_number(value)
        return float(f"{value:.{_DIGITS}g}") if is_single else value

    lists = {address: list(map(written, row)) for address, row in rows.items()}
    return {"dtype": "float32" if is_single else "float64", "records": lists}


class StackReader:
    """Reads records from JSON; equal addresses and stacks are kept once."""

    def __init__(self) -> None:
        self._stacks: dict[tuple[tuple[str, ...], int, bool], Stack] = {}

    def read(self, data: Mapping[str, object]) -> tuple[dict[str, float], tuple[Stack, ...]]:
        """Return records and stacks; ValueError for malformed ones."""
        records: dict[str, float] = {}
        stacks: list[Stack] = []
        for name, value in data.items():
            if isinstance(value, dict):
                stacks.append(self._add(name, value, records))
            else:
                records[sys.intern(name)] = number_of_json(name, value)
        return records, tuple(stacks)

    def _add(self, name: str, data: Mapping[str, Any], records: dict[str, float]) -> Stack:
        given, code = data.get("records"), _CODES.get(str(data.get("dtype")))
        lists: dict[str, Any] = given if isinstance(given, dict) else {}
        rows = list(lists.values())
        if code is None or not rows or not all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows):
            raise ValueError(
                f'wanted {{"dtype": "float32", "records": {{"record@site": [1.5, null]}}}} for {name!r}, all lists of '
                f"one length, got {data!r:.60}"
            )
        is_vector = name.startswith("vector ")
        if is_vector and any(split_element(address)[1] != 0 for address in lists):
            raise ValueError(f"wanted the address of the first element for {name!r}, got {list(lists)!r:.60}")
        key = tuple(lists), len(rows[0]), is_vector
        if key not in self._stacks:
            self._stacks[key] = tuple(
                elements_of(address, len(rows[0])) if is_vector else iterations_of(*split_call(address), len(rows[0]))
                for address in lists
            )
        stack = self._stacks[key]
        known = (
            array(
                code,
                (number_of_json(own[n], row[n]) for own, row in zip(stack, rows, strict=True) if row[n] is not None),
            )
            for n in range(len(rows[0]))
        )
        for n, values in enumerate(known):
            present = (own[n] for own, row in zip(stack, rows, strict=True) if row[n] is not None)
            records.update(zip(present, values, strict=True))
        return stack


def summed_up(records: Mapping[str, float], stacks: Sequence[Stack]) -> dict[str, float]:
    """Return records with three figures in the place of the iterations of a loop, and of the elements of a vector.

    They are ``norm_largest@site``, of which NaN is the largest; ``norm_largest_at@site``, the number of that call of
    the site; and ``norm_last@site``, of the last iteration. Counts by exponent are summed. Of a vector they are
    ``row_largest@site``, ``row_largest_at@site``, the number of that element, and ``row_mean@site``; those of a vector
    in a loop are of all iterations together.
    """
    inside = {address for stack in stacks for own in stack for address in own}
    found = {address: value for address, value in records.items() if address not in inside}
    calls = grouped(
        (split_element(base_of(own[0]))[0], address) for stack in stacks for own in stack for address in own
    )
    for base, own in calls.items():  # of a layer that is called twice, all iterations of both
        once = dict.fromkeys(own)  # two forwards before one backward have the same addresses
        known = [(records[address], _number_of(address)) for address in once if address in records]
        if not known:
            continue
        name, _, site = base.partition("@")
        if name.partition(".")[0] in EXPONENTS:
            found[base] = sum(value for value, _ in known)
            continue
        is_vector = split_element(own[0])[1] is not None
        largest, n = max(known, key=lambda one: (math.isnan(one[0]), one[0]))
        rest = {"mean": sum(value for value, _ in known) / len(known)} if is_vector else {"last": known[-1][0]}
        figures = {"largest": largest, "largest_at": float(n), **rest}
        found |= {f"{name}_{what}@{site}": value for what, value in figures.items()}
    return found


def _number_of(address: str) -> int:
    element = split_element(address)[1]
    return split_call(address)[1] if element is None else element


def base_of(address: str) -> str:
    """Return an address without the number of a call."""
    return split_call(address)[0]


def split_call(address: str) -> tuple[str, int]:
    """Return the address without the number of a call, and the number."""
    base, _, number = address.rpartition("#")
    return (base, int(number)) if base and number.isdecimal() else (address, 0)
