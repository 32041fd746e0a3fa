"""Comparison of a run's loss and gradient sizes with a baseline's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

from gradrewrite.diagnostics.causes import words
from gradrewrite.diagnostics.nonfinite_steps import is_bad
from gradrewrite.diagnostics.run_log import Run, loss_series

MAX_LOSSES = 10  # steps whose mean loss is "the first" and "the last"
LOWER_PEAK = 0.2  # of the range of both losses; a peak that is lower by less is no difference
TOTAL_NORM = "total norm of the gradients"
TOTALS = (TOTAL_NORM, "norm of all gradients")
_SIZES = (  # what is compared, of which kinds of sites, by which record
    (TOTALS[0], ("group", "step"), "total_norm"),
    (TOTALS[1], ("gradient",), "norm"),
    ("largest |gradient|", ("gradient",), "max_abs"),
    ("norm of all errors", ("error",), "norm"),
    ("largest |error|", ("error",), "max_abs"),
)


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a run: record ``loss``, or the value of ``gr.tap(loss, "loss")``."""

    steps: int  # how many steps have it
    count: int  # how many steps ``first`` and ``last`` are means of: a tenth of them, at most 10
    first: float  # mean of the first steps
    last: float  # mean of the last steps; NaN or infinite where one of them is
    peak: float  # largest finite loss; NaN without one
    bad_step: int  # first step whose loss is not finite; -1 if none
    bad_place: str  # that step in words; ``""`` if none
    noise: float  # standard error of ``last``; 0 where it is the value of one step
    address: str  # text of the key of its record
    lowest: float  # smallest finite loss; NaN without one
    begin: int  # number of the first update that has it
    end: int  # number of the last one
    unit: str  # ``"steps"``; ``"values"`` where a step may be a micro-batch

    def of(self, which: str) -> str:
        """Return the steps of a mean loss, ``(mean of the first 10 steps)``; ``""`` for the loss of one step."""
        return f" (mean of the {which} {self.count} {self.unit})" if self.count > 1 else ""


def loss_of(run: Run, begin: float = -math.inf, end: float = math.inf) -> Loss | None:
    """Return the loss of a run between two updates; None without one."""
    series = loss_series(run)
    known = {} if series is None else series.by_step
    by_step = {step: value for step, value in known.items() if begin <= run.update(step) <= end}
    if series is None or not by_step:
        return None
    steps, values = [*by_step], [*by_step.values()]
    count = max(1, min(MAX_LOSSES, len(values) // 10))
    finite = [value for value in values if math.isfinite(value)]
    bad = next((step for step, value in by_step.items() if not math.isfinite(value)), -1)
    place, last = run.place(bad) if bad >= 0 else "", values[-count:]
    noise = _standard_error(last) if count > 1 and all(map(math.isfinite, last)) else 0.0
    peak, lowest, address = max(finite, default=math.nan), min(finite, default=math.nan), str(series.at)
    unit = "values" if run.has_micro_batches else "steps"
    first, ends = mean_of(values[:count]), (run.update(steps[0]), run.update(steps[-1]))
    return Loss(len(values), count, first, mean_of(last), peak, bad, place, noise, address, lowest, *ends, unit)


def mean_of(values: Sequence[float]) -> float:
    """Return the mean; NaN of infinities of both signs. A sum may be beyond the range where the mean is not."""
    total = sum(values)
    return total / len(values) if math.isfinite(total) else sum(value / len(values) for value in values)


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; the exponent is taken out, for a deviation may be beyond the range."""
    exponent = max(math.frexp(value)[1] for value in values)
    deviation = stdev(math.ldexp(value, -exponent) for value in values)
    return math.ldexp(deviation / math.sqrt(len(values)), exponent)


def compare_runs(run: Run, baseline: Run) -> str:
    """Return the text of ``compare`` over common steps, with their span where the runs begin or end apart."""
    loss, other = loss_of(run), loss_of(baseline)
    if loss is None or other is None or (loss.begin, loss.end) == (other.begin, other.end):
        return compare(loss, other)
    begin, end = max(loss.begin, other.begin), min(loss.end, other.end)
    parts = loss_of(run, begin, end), loss_of(baseline, begin, end)
    if None in parts:
        return f"This run and the baseline have no step in common: their ends are compared. {compare(loss, other)}"
    spans = []
    if loss.begin != other.begin:
        spans.append(f"from step {begin}, where {'this run' if loss.begin == begin else 'the baseline'} begins")
    if loss.end != other.end:
        spans.append(f"up to step {end}, where {'this run' if loss.end == end else 'the baseline'} ends")
    text = compare(*parts)
    return f"Compared {', '.join(spans)}: {text[0].lower()}{text[1:]}"


def compare(loss: Loss | None, baseline: Loss | None) -> str:
    """Return a sentence on whether a run ended lower than its baseline, and by how much.

    They end alike where the difference of their last losses is at most twice its standard error.
    """
    if loss is None or baseline is None:
        missing = "neither has one" if loss is baseline else f"the {'run' if loss is None else 'baseline'} has none"
        return f'The losses cannot be compared: {missing}; record it with monitor.log("loss", loss).'
    figures = f"{_loss_text('The loss of this run', loss)}; {_loss_text('that of the baseline', baseline)}."
    trains, baseline_trains = math.isfinite(loss.last), math.isfinite(baseline.last)
    difference = baseline.last - loss.last
    if not trains and not baseline_trains:
        text = "Neither of them trains."
    elif trains != baseline_trains:
        text = "This run trains and the baseline does not." if trains else "The baseline trains and this run does not."
    elif abs(difference) <= 2 * math.hypot(loss.noise, baseline.noise):
        spread = max(loss.peak, baseline.peak) - min(loss.lowest, baseline.lowest)
        lower = baseline.peak - loss.peak > LOWER_PEAK * spread
        text = f"They end alike, within the noise of the loss{', and this run has the lower peak' if lower else ''}."
    else:
        text = f"This run ends {'lower' if difference > 0 else 'higher'}, by {words(abs(difference))}."
    return f"{text} {figures}"


def loss_text(loss: Loss | None) -> str:
    """Return a sentence on the loss of a run without a baseline."""
    if loss is None:
        return 'No loss was recorded: monitor.log("loss", loss) after each backward.'
    return f"{_loss_text('The loss', loss)}; it began at {words(loss.first)}{loss.of('first')}."


def _loss_text(who: str, loss: Loss) -> str:
    bad = f", first not finite in {loss.bad_place}" if loss.bad_step >= 0 else ""
    end = f"{words(loss.last)}{loss.of('last')}"
    return f"{who} peaked at {words(loss.peak)} and ended at {end} after {loss.steps} {loss.unit}{bad}"


def comparable_sizes(run: Run, other: Run) -> tuple[str, dict[int, float], dict[int, float]] | None:
    """Return the measure, and for both runs by step, the sizes of gradients or errors before clipping.

    The root of the sum of squares of the total norms of all groups, else of the norms of all gradients, else of all
    errors, or the largest ``max_abs``; infinite where a value is not finite. A total norm is compared with norms of
    gradients where the runs have nothing else in common. None where they have nothing.
    """
    known, others = _sizes_by_kind(run), _sizes_by_kind(other)
    key = next((name for name in known if name in others), None)
    if key is not None:
        return key, known[key], others[key]
    both = [next((sizes for name, sizes in found.items() if name in TOTALS), None) for found in (known, others)]
    return None if both[0] is None or both[1] is None else (TOTALS[0], both[0], both[1])


def _sizes_by_kind(run: Run) -> dict[str, dict[int, float]]:
    """Return sizes by step, for each kind of site and measure that was recorded, the most telling first."""
    rows = {step.step: step.records for step in run.steps}
    found: dict[str, dict[int, float]] = {}
    for name, kinds, record in _SIZES:
        join = max if record == "max_abs" else math.hypot
        by_step: dict[int, float] = {}
        for one in (one for one in run.select((record,), kinds) if one.at.occurrence == 1):
            for step, value in one.by_step.items():
                is_broken = not math.isfinite(value) and is_bad(record, one.at.site, value, rows[step])
                size = math.inf if is_broken else 0.0 if math.isnan(value) else abs(value)
                by_step[step] = join(by_step.get(step, 0.0), size)
        if by_step:
            found[name] = dict(sorted(by_step.items()))
    return found
