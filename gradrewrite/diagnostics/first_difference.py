"""The first difference between two runs or models, in the order of execution, and its growth."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Literal, TypeAlias

from gradrewrite._utils.fingerprints import is_fingerprint, text_of, with_whole_fingerprints
from gradrewrite._utils.formatting import plain_table
from gradrewrite._utils.html_tables import html_table, write_table_page
from gradrewrite.diagnostics.causes import words
from gradrewrite.diagnostics.run_log import Run, Step, as_executed, last_run, listed
from gradrewrite.diagnostics.used_gradients import scale_exponent, scale_text
from gradrewrite.diagnostics.whole_updates import TOLERANCE, WholeUpdates, whole_updates, without_nothing
from gradrewrite.ir.outputs import SiteOp

DifferenceKind = Literal["bits", "values", "shape", "missing"]

_SHOWN = 12  # sites in a text
_MOST_ROWS = 500  # of a page
_COLUMNS = ("site", "in the other", "op", "source", "this", "other", "relative difference")


@dataclass(frozen=True, slots=True)
class SiteDifference:
    """The values of one site in two models, or in one step of two runs."""

    site: str
    other: str  # name of the site in the other one; ``""`` where it has none
    op: str  # ``module/op``; ``""`` where that is not known, and for gradients
    source: str  # ``file:line "code"`` of the op; ``""`` where that is not known
    error: float  # relative difference; inf for another shape or a missing site, NaN where nothing tells
    kind: DifferenceKind | None  # None: no difference
    values: tuple[str, str]  # figures of both, as text


@dataclass(frozen=True, repr=False)
class Difference:
    """The first difference between two models or runs, and its growth.

    Attributes:
        rows: All compared sites from the first one that differs on, in order of execution: activations as the forward
            makes them, then errors as the backward makes them, then gradients.
        step: Step of the runs; None for models.
        steps: The step and all later common ones, each with its largest relative difference.
        place: The step in words, ``update 3, micro-batch 2 of 4``; ``""`` for models.
    """

    rows: tuple[SiteDifference, ...]
    step: int | None = None
    steps: tuple[tuple[int, float], ...] = ()
    place: str = ""

    @property
    def site(self) -> str:
        """The first different site, ``kind:name``, as the first model names it."""
        return self.rows[0].site

    @property
    def other(self) -> str:
        """Its name in the other; ``""`` for none."""
        return self.rows[0].other

    @property
    def op(self) -> str:
        """``module/op`` of the value, or of the value behind an error; ``""`` if unknown."""
        return self.rows[0].op

    @property
    def source(self) -> str:
        """Source line of the op, ``file:line "code"``; ``""`` if it is not known."""
        return self.rows[0].source

    @property
    def error(self) -> float:
        """Relative difference at the first site.

        inf for another shape or a missing site, NaN where a log does not tell.
        """
        return self.rows[0].error

    @property
    def kind(self) -> DifferenceKind:
        """``"bits"``, ``"values"``, ``"shape"`` or ``"missing"``.

        ``"values"``: two dtypes, or figures of a log without fingerprints, or beyond a tolerance.
        """
        kind = self.rows[0].kind
        assert kind is not None
        return kind

    @property
    def growth(self) -> tuple[tuple[str, float], ...]:
        """Relative differences by site from the first one on, in order of execution."""
        return tuple((row.site, row.error) for row in self.rows)

    def beyond(self, tolerance: float) -> Difference | None:
        """Return the first difference beyond a relative tolerance; None without one.

        What is not known (NaN) counts as more.
        """
        first = next((n for n, row in enumerate(self.rows) if row.kind and not row.error <= tolerance), None)
        return None if first is None else replace(self, rows=self.rows[first:])

    def __repr__(self) -> str:
        return f"Difference({self.site!r}, {self.kind!r}, error={self.error:.3g}; {len(self.rows)} sites)"

    def __str__(self) -> str:
        """The first site with op and line, then the growth."""
        shown = [("site", "relative difference"), *((row.site, f"{row.error:.3g}") for row in self._milestones())]
        lines = [self._headline(), plain_table(shown[0], shown[1:])]
        if len(self.steps) > 1:
            lines.append("largest by step: " + ", ".join(f"{n}: {error:.3g}" for n, error in self.steps[:_SHOWN]))
        return "\n".join(lines)

    def _headline(self) -> str:
        first = self.rows[0]
        where = f"{self.place or f'step {self.step}'}, " if self.step is not None else ""
        name = first.site if first.other in (first.site, "") else f"{first.site} ({first.other} in the other)"
        by = "".join(f", {text}" for text in (first.op, first.source) if text)
        return f"first difference: {where}{name}{by}: {_KINDS[self.kind]}: {first.values[0]} and {first.values[1]}"

    def _milestones(self) -> list[SiteDifference]:
        """The first site, each doubling of the difference, and the largest."""
        found, largest = [self.rows[0]], self.error
        for row in self.rows[1:]:
            if row.error > 0 and not row.error < 2 * largest and row.error != largest:
                found.append(row)
                largest = row.error
        most = max(self.rows, key=lambda row: _known(row.error))
        return [*found[:_SHOWN], *([most] if most.error > largest else [])]

    def _repr_html_(self) -> str:
        """A table of both, side by side."""
        rows = self.rows[:_MOST_ROWS]
        cells = [
            (r.site, r.other, r.op, r.source, *r.values, "" if math.isnan(r.error) else words(r.error)) for r in rows
        ]
        groups = ["first", *("differs" if row.kind else "equal" for row in rows[1:])]
        more = f"; the first {_MOST_ROWS} of {len(self.rows)} sites" if len(self.rows) > _MOST_ROWS else ""
        table = html_table(_COLUMNS, cells, f"{self._headline()}{more}", groups)
        by_step = [(str(step), words(error)) for step, error in self.steps[:_MOST_ROWS]]
        return table + (html_table(("step", "largest"), by_step, "By step") if len(by_step) > 1 else "")

    def render(self, path: str | os.PathLike[str]) -> str:
        """Write ``path.html``, a self-contained page; return its path.

        Raises:
            OSError: The file cannot be written.
        """
        return write_table_page(path, "First difference", self._repr_html_())


_KINDS = {
    "bits": "the bits differ",
    "values": "the values differ",
    "shape": "the shapes differ",
    "missing": "only one has it",
}


@dataclass(frozen=True, slots=True)
class LogComparison:
    """The comparison of two run logs.

    Attributes:
        first: The first difference; None if all that both have is equal.
        remarks: What only one of them has: steps, sites.
        num_steps: Number of compared steps.
        num_sites: Number of compared sites.
        tolerance: Relative tolerance; None: bits where there are fingerprints, else figures that are exactly equal.
        notes: How they were compared, where that is not step by step.
    """

    first: Difference | None
    remarks: tuple[str, ...]
    num_steps: int
    num_sites: int
    tolerance: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether both have the same records with the same values."""
        return self.first is None and not self.remarks

    def __str__(self) -> str:
        within = "" if self.tolerance is None else f" within a relative difference of {self.tolerance:g}"
        steps = "updates" if self.notes else "steps"
        equal = f"no difference{within} in {self.num_steps} {steps} and {self.num_sites} sites"
        return "\n".join([equal if self.first is None else str(self.first), *self.remarks, *self.notes])

    def render(self, path: str | os.PathLike[str]) -> str:
        """Write ``path.html`` with both side by side; return its path."""
        text = str(self) if self.first is None else "\n".join((*self.remarks, *self.notes))
        table = "" if self.first is None else self.first._repr_html_()
        return write_table_page(path, "First difference", table, text)

    def to_json(self) -> dict[str, object]:
        """Return strict JSON, with NaN and infinities as strings."""
        first = self.first
        head = None
        if first is not None:
            own = first.rows[0]
            head = {
                "step": first.step,
                "site": own.site,
                "kind": own.kind,
                "op": own.op,
                "source": own.source,
                "error": _plain(own.error),
                "values": list(own.values),
                "growth": [[site, _plain(error)] for site, error in first.growth],
                "steps": [[step, _plain(error)] for step, error in first.steps],
            }
        counts = {"steps": self.num_steps, "sites": self.num_sites, "tolerance": self.tolerance}
        return {"equal": self.is_equal, "first": head, "remarks": [*self.remarks, *self.notes], **counts}


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else words(value)


def relative_difference(a: float, b: float) -> float:
    """Return ``|a - b| / max(|a|, |b|)``.

    0 for equal numbers and for two NaN; inf for one NaN, one infinity, or two infinities of different signs.
    """
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    error = abs(a - b) / max(abs(a), abs(b))
    return error if math.isfinite(error) else math.inf


def merged_order(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """Merge two sequences of names in the order of ``a``.

    Names of ``b`` alone come behind the common name before them in ``b``, or at the beginning.
    """
    known = set(a)
    after: dict[str, list[str]] = {}  # names of b alone, by the last common one before them
    last = ""
    for name in dict.fromkeys(b):
        if name in known:
            last = name
        else:
            after.setdefault(last, []).append(name)
    return [*after.get("", ()), *chain.from_iterable((name, *after.get(name, ())) for name in a)]


_Number: TypeAlias = tuple[int, int, int]  # of the update, of the micro-batch, how many of these came before
_BySite: TypeAlias = Mapping[str, Mapping[str, float]]  # records by site, then by name


def compare_logs(
    a: Sequence[Step],
    b: Sequence[Step],
    *,
    tolerance: float | None = None,
    sites: str = "*",
    names: tuple[str, str] = ("the first", "the second"),
) -> LogComparison:
    """Compare the last runs of two logs in order of execution.

    Without a tolerance a site with fingerprints in both is compared by them, any other by its figures, which must be
    equal. With one, figures are: the largest ``relative_difference`` of the records that both have, without
    fingerprints. What was logged by hand (``name@run``) is not compared, for it may be a time.

    Runs with unlike numbers of backwards an update are compared by update: what it used and left, and its loss, within
    a relative difference of 0.001 if there is no tolerance.

    Args:
        a: Steps of ``read_jsonl``.
        b: Those of the other run.
        tolerance: The largest relative difference that is none; None: see above.
        sites: Pattern of the sites, as ``step:*``.
        names: What remarks call the two.

    Raises:
        ValueError: The tolerance is no number >= 0, or they have no step or no record in common.
    """
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"a tolerance is a relative difference >= 0, got {tolerance}")
    last = last_run(a), last_run(b)
    whole = whole_updates(*last)
    if whole is None:
        runs, place, notes = [_by_number(run) for run in last], last[0].place, []
    else:
        runs, place, notes = _by_update(whole), "update {}".format, [*whole.notes]
        tolerance = TOLERANCE if tolerance is None else tolerance
    ops = {one.name: one for run in reversed(runs) for step in run.values() for one in step.ops}
    seen: tuple[dict[str, int], dict[str, int]] = ({}, {})  # sites of one run alone, with their first step
    compared: dict[str, None] = {}
    first: Difference | None = None
    later: list[tuple[int, float]] = []
    common = [at for at in runs[0] if at in runs[1]]
    for at in common:
        step = runs[0][at].step
        one, other = (_by_site(run[at], sites) for run in runs)
        for own, lacking, alone in ((one, other, seen[0]), (other, one, seen[1])):
            for site in (site for site in own if site not in lacking):
                alone.setdefault(site, step)
        rows = _rows(one, other, ops, tolerance)
        compared |= dict.fromkeys(row.site for row in rows)
        start = next((n for n, row in enumerate(rows) if row.kind), None)
        if first is None and start is not None:
            first = Difference(tuple(rows[start:]), step, place=place(step))
        if first is not None:
            later.append((step, max((row.error for row in rows), key=_known, default=0.0)))
    if not compared:
        what = (
            "record" if tolerance is None else "record that a tolerance applies to (fingerprints have none: add norm)"
        )
        way_out = "; ".join(("give logs of the same policy", *notes))
        raise ValueError(f"{names[0]} and {names[1]} have no step with a common {what}; {way_out}")
    remarks = [*_scale(last, names), *_steps_of_one(runs, names), *_sites_of_one(seen, names)]
    first = replace(first, steps=tuple(later)) if first is not None else None
    return LogComparison(first, tuple(remarks), len(common), len(compared), tolerance, tuple(notes))


def _scale(runs: tuple[Run, Run], names: tuple[str, str]) -> list[str]:
    """Return a sentence on norms that are a power of two off."""
    exponent = scale_exponent(*runs)
    if exponent is None:
        return []
    larger = names[exponent < 0]
    return [f"norms of gradients and errors in {larger} are {scale_text(abs(exponent))}"]


def _by_update(whole: WholeUpdates) -> list[dict[_Number, Step]]:
    """Return whole updates by their numbers."""
    a, b = whole.runs
    return [
        {(n, 0, 0): without_nothing(step, b[n]) if n in b else step for n, step in a.items()},
        {(n, 0, 0): step for n, step in b.items()},
    ]


def _by_number(run: Run) -> dict[_Number, Step]:
    """Return the steps by their numbers; those of several models, or of updates left out, may have equal ones."""
    times: Counter[tuple[int, int]] = Counter()
    found = {}
    for step in run.steps:
        update, micro_batch = step.update, step.micro_batch
        found[update, micro_batch, times[update, micro_batch]] = step
        times[update, micro_batch] += 1
    return found


def _by_site(step: Step, pattern: str) -> _BySite:
    found: dict[str, dict[str, float]] = {}
    for address, value in with_whole_fingerprints(step.records).items():
        name, _, site = address.partition("@")
        if site != "run" and fnmatchcase(site, pattern):
            found.setdefault(site, {})[name] = value
    return found


def _rows(a: _BySite, b: _BySite, ops: Mapping[str, SiteOp], tolerance: float | None) -> list[SiteDifference]:
    """Compare the common sites in order of execution, unknown kinds last."""
    sites = [site for site in a if site in b]
    known = as_executed(sites)
    order = [*known, *(site for site in sites if site not in known)]
    rows = (_row(site, a[site], b[site], ops, tolerance) for site in order)
    return [row for row in rows if row is not None]


def _row(
    site: str, a: Mapping[str, float], b: Mapping[str, float], ops: Mapping[str, SiteOp], tolerance: float | None
) -> SiteDifference | None:
    """Compare the records of a site in one step; None without any."""
    common = [name for name in a if name in b]
    prints = [name for name in common if is_fingerprint(name)]
    figures = {name: relative_difference(a[name], b[name]) for name in common if name not in prints}
    by_bits = bool(prints) and tolerance is None
    if not by_bits and not figures:
        return None
    worst = max(figures, key=figures.__getitem__, default="")
    error = figures.get(worst, math.nan)
    other = [name for name in prints if a[name] != b[name]]
    if by_bits:
        kind: DifferenceKind | None = "bits" if other else None
        shown = (other or prints)[0]
        error = error if kind else 0.0
    else:
        kind, shown = ("values" if error > (tolerance or 0.0) else None), worst
    at = ops.get(site.partition(":")[2])
    texts = [f"{shown} {text_of(one[shown]) if is_fingerprint(shown) else f'{one[shown]:.9g}'}" for one in (a, b)]
    return SiteDifference(site, site, at.op if at else "", at.source if at else "", error, kind, (texts[0], texts[1]))


def _known(error: float) -> float:
    return -1.0 if math.isnan(error) else error


def _steps_of_one(runs: Sequence[Mapping[_Number, Step]], names: tuple[str, str]) -> list[str]:
    remarks = []
    for own, other, name in ((runs[0], runs[1], names[0]), (runs[1], runs[0], names[1])):
        alone = [step.step for at, step in own.items() if at not in other]
        if alone:
            span = f"step {alone[0]}" if len(alone) == 1 else f"{len(alone)} steps, {alone[0]} to {alone[-1]}"
            remarks.append(f"only in {name}: {span}")
    return remarks


def _sites_of_one(seen: Sequence[Mapping[str, int]], names: tuple[str, str]) -> list[str]:
    texts = [listed([f"{site} (from step {step})" for site, step in alone.items()]) for alone in seen]
    return [f"only in {name}: {text}" for name, text in zip(names, texts, strict=True) if text]
