"""Updates of runs, with their backwards as one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, mode

from gradrewrite.diagnostics.run_log import Run, Step, kind_of, loss_series
from gradrewrite.diagnostics.used_gradients import ROUNDING
from gradrewrite.sites import AT_GUARD

TOLERANCE = 1e-3  # sums of micro-batches round otherwise than those of the whole batch
NOTHING = 1e-6  # of the largest value of a record: what is left of sums that cancel
_KINDS = frozenset((*AT_GUARD, "optimizer"))
_LOSS = "loss@loss"  # what is logged by hand (``loss@run``) is not compared by backward


@dataclass(frozen=True, slots=True)
class WholeUpdates:
    """The updates of two runs that split them otherwise."""

    runs: tuple[Mapping[int, Step], Mapping[int, Step]]  # by number of the update
    notes: tuple[str, ...]


def whole_updates(a: Run, b: Run) -> WholeUpdates | None:
    """Return the updates of two runs with unlike numbers of backwards.

    An update has the records of step sites, parameters, state and optimizer, and its loss: the mean over its backwards,
    or their sum, if that is nearer to the other run's (the logged loss is divided already).
    """
    counts = _usual_count(a), _usual_count(b)
    if counts[0] == counts[1]:
        return None
    note = (
        f"The runs have {counts[0]} and {counts[1]} backwards an update: updates are compared, and records of "
        'backwards (gradient:, error:) are left out; gr.on("step:*", Observe("norm")), with gr.guard, records what '
        "updates use."
    )
    updates = _updates(a), _updates(b)
    losses = _alike(_losses(a), _losses(b))
    whole = [
        {update: _whole(update, rows, own.get(update)) for update, rows in steps.items()}
        for steps, own in zip(updates, losses, strict=True)
    ]
    undivided = _undivided(whole, counts)
    return WholeUpdates((whole[0], whole[1]), (note, *([undivided] if undivided else [])))


def _undivided(whole: Sequence[Mapping[int, Step]], counts: tuple[int, int]) -> str:
    """Return a sentence on gradients that are larger by the number of backwards, in the first common update."""
    first = next((update for update in whole[0] if update in whole[1]), None)
    steps = [] if first is None else [own[first].records for own in whole]
    pairs = [(a, steps[1].get(address, 0.0)) for address, a in (steps[0] if steps else {}).items() if _is_used(address)]
    ratios = [b / a for a, b in pairs if 0 < a < math.inf and 0 < b < math.inf]
    ratio, times = median(ratios or [1.0]), counts[1] / counts[0]
    if abs(ratio / times - 1) > ROUNDING:
        return ""
    count = max(counts)
    return (
        f"The gradients that updates use are {max(times, 1 / times):g}-fold in the run with {count} backwards, as "
        f"where the loss of each is not divided by their number: (loss / {count}).backward()."
    )


def _is_used(address: str) -> bool:
    record, _, site = address.partition("@")
    return record in ("norm", "total_norm") and kind_of(site) == "step"


def _usual_count(run: Run) -> int:
    """Return the usual number of backwards in an update."""
    return mode([count for _, _, count in run.numbers.values()] or [1])


def _updates(run: Run) -> dict[int, list[Step]]:
    found: dict[int, list[Step]] = defaultdict(list)
    for step in run.steps:
        found[run.update(step.step)].append(step)
    return found


def _losses(run: Run) -> dict[int, list[float]]:
    series, found = loss_series(run), defaultdict(list)
    for step, value in ({} if series is None else series.by_step).items():
        found[run.update(step)].append(value)
    return found


def _alike(a: Mapping[int, Sequence[float]], b: Mapping[int, Sequence[float]]) -> list[dict[int, float]]:
    """Return the losses of updates, as means or sums, so that those of the first common update are nearest."""
    sums = [{update: math.fsum(values) for update, values in own.items()} for own in (a, b)]
    means = [
        {update: total / len(own[update]) for update, total in of.items()} for own, of in zip((a, b), sums, strict=True)
    ]
    first = next((update for update in a if update in b), None)
    if first is None:
        return means
    forms = [(one, other) for one in (means[0], sums[0]) for other in (means[1], sums[1])]
    nearest = min(forms, key=lambda form: abs(form[0][first] - form[1][first]))
    return [*nearest]


def _whole(update: int, rows: Sequence[Step], loss: float | None) -> Step:
    every = ((address, value) for step in rows for address, value in step.records.items())
    records = {address: value for address, value in every if kind_of(address.partition("@")[2]) in _KINDS}
    return Step(update, records if loss is None else {_LOSS: loss, **records})


def without_nothing(a: Step, b: Step) -> Step:
    """Return the first of two updates, with values that are nothing beside the others as in the second."""
    largest: dict[tuple[str, str], float] = defaultdict(float)
    for address, value in (*a.records.items(), *b.records.items()):
        if math.isfinite(value):
            largest[_class(address)] = max(largest[_class(address)], abs(value))
    found = dict(a.records)
    for address in found.keys() & b.records.keys():
        if max(abs(found[address]), abs(b.records[address])) <= NOTHING * largest[_class(address)]:
            found[address] = b.records[address]
    return Step(a.step, found)


def _class(address: str) -> tuple[str, str]:
    record, _, site = address.partition("@")
    return record, kind_of(site)
