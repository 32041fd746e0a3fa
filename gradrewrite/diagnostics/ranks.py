"""Files of one run by rank, and its verdict."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradrewrite._utils.grouping import grouped
from gradrewrite.diagnostics.causes import Cause, traits_of
from gradrewrite.diagnostics.health import Health, examine
from gradrewrite.diagnostics.judge import Evidence
from gradrewrite.diagnostics.nonfinite_steps import bad_steps
from gradrewrite.diagnostics.run_file import read_with_rank
from gradrewrite.diagnostics.run_log import Step, as_executed, last_run


@dataclass(frozen=True, slots=True)
class FirstBad:
    """The first non-finite value of a run."""

    rank: int  # rank that recorded it
    step: int
    place: str  # the step in words
    site: str
    also: tuple[int, ...] = ()  # other ranks with such a value in that step, ascending

    def __str__(self) -> str:
        also = f" ({_named(self.also)} in the same step)" if self.also else ""
        return f"The first value that is not finite was on rank {self.rank}{also}: {self.site} in {self.place}."


def read_ranks(paths: Sequence[str | os.PathLike[str]]) -> dict[int, list[Step]]:
    """Read the files of the ranks of one run.

    The rank is in the lines of a file; in a file without it, its name tells (``run.rank1.jsonl``). OSError; ValueError
    if a line is none of a monitor's, two files are of one rank, or one of several has no rank.
    """
    runs: dict[int, list[Step]] = {}
    names: dict[int, str] = {}
    for path in paths:
        name = os.fspath(path)
        steps, rank = read_with_rank(path)
        if rank is None:
            found = re.findall(r"(?<![a-zA-Z])rank[-_]?(\d+)", os.path.basename(name))  # not in "lowrank8"
            if not found and len(paths) > 1:
                raise ValueError(
                    f"{name} has no rank in lines or name (run.rank1.jsonl), and several files are those of the "
                    "ranks of one run. To compare two runs: gradrewrite report run.jsonl --baseline other.jsonl"
                )
            rank = int(found[-1]) if found else 0
        if rank in runs:
            raise ValueError(
                f"{name} and {names[rank]} are both of rank {rank}; give one file for each rank of one run"
            )
        runs[rank], names[rank] = steps, name
    return dict(sorted(runs.items()))


def examine_ranks(runs: Mapping[int, Sequence[Step]], evidence: Evidence | None = None) -> Health:
    """Judge the first bad rank, with the faults of all.

    What several ranks find at one site is one fault, with the figures of the first of them. Of what is not finite
    only the first is a fault: what other ranks then have may come from it, through reduced gradients.
    """
    by_rank = {rank: examine(steps, evidence=evidence) for rank, steps in runs.items()}
    first = first_bad_of(runs)
    order = sorted(runs, key=lambda rank: (by_rank[rank].verdict.is_sound, first is None or rank != first.rank))
    health = by_rank[order[0]]
    if len(runs) == 1:
        return health
    every = [(number, rank, fault) for rank in order for number, fault in enumerate(by_rank[rank].faults)]
    alike = grouped((_subject(row[2]), row) for row in every)
    found: list[tuple[str, Cause]] = []  # behind their ranks as text
    for key, rows in sorted(alike.items(), key=lambda item: min(number for number, *_ in item[1])):
        (_, rank, fault), ranks = rows[0], sorted(r for _, r, _ in rows)
        prefix = f"{_named(ranks, len(runs))}:" if key or first is None else str(first)
        figures = {**fault.figures, "rank": rank, "ranks": len(ranks)}
        found.append((prefix, replace(fault, text=f"{prefix} {fault.text}", figures=figures)))
    prefix = found[0][0] if found else f"Rank {order[0]}:"
    verdict = replace(health.verdict, text=f"{prefix} {health.verdict.text}")
    return replace(health, verdict=verdict, faults=tuple(fault for _, fault in found))


def first_bad_of(runs: Mapping[int, Sequence[Step]]) -> FirstBad | None:
    """Return the first non-finite value of all ranks.

    Of several sites in that step it is the one that is executed first, and of several ranks with it the lowest.
    """
    first = ((rank, one) for rank, steps in runs.items() for one in bad_steps(last_run(steps))[:1])
    rows = [(one.step.step, rank, one.sites[0]) for rank, one in first]
    if not rows:
        return None
    step = min(row[0] for row in rows)
    there = [(rank, site) for number, rank, site in rows if number == step]
    run = last_run(runs[there[0][0]])
    order = {site: n for n, site in enumerate(as_executed(one.at.site for one in run.series.values()))}
    rank, site = min(there, key=lambda row: (order.get(row[1], math.inf), row[0]))
    return FirstBad(rank, step, run.place(step), site, tuple(other for other, _ in there if other != rank))


def _subject(fault: Cause) -> tuple[str, ...]:
    """Key of a fault of several ranks; one for all non-finite values."""
    return () if traits_of(fault.kind).is_non_finite else (fault.kind, fault.site, fault.key)


def _named(ranks: Sequence[int], number: int | None = None) -> str:
    """Ranks as text, with the number of all capitalized."""
    if number == len(ranks):
        return "All ranks"
    word = "rank" if number is None else "Rank"
    return f"{word}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
