"""Geometric growth and decay of errors and gradients, over steps and layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from gradrewrite.diagnostics.run_log import (
    BACKWARD,
    LISTED,
    MAGNITUDES,
    MIN_STEPS,
    Finding,
    Run,
    Series,
    Step,
    as_executed,
    is_group,
    listed,
)

EXPLODING = 1e3  # healthy gradients drift by a factor of 10 to 100 over a run
MIN_GROWTH = 1.02  # per step; slower growth cannot be told from a drift
STEADINESS = 0.8  # net growth over all ups and downs: a random walk that went as far by luck has about 0.6
MIN_LATE_SHARE = 0.5  # growth in the second half over that in the first: power laws (warm-up, a zero start) slow down
SLACK = 2  # steps; where growth begins is no sharper than this under noise
MIN_LAYERS = 4  # fewer sites make no geometric sequence
EXPLODING_LAYERS, MIN_LAYER_GROWTH = 1e3, 1.2  # a sound model keeps errors within two orders from end to end
VANISHING_LAYERS, MAX_LAYER_SHARE = 1e-6, 0.8  # float32 has 7 digits; larger maps alone make errors 1e-3 as large
MAX_ONE_LAYER = 0.6  # of the ratio from end to end, in logs; four layers have three steps of 0.33 each
_LARGEST_LOG = 700.0  # exp of more overflows


@dataclass(frozen=True, slots=True)
class _Growth:
    site: str
    step: int
    factor: float
    first: float
    last: float
    steps: int


def growth_over_steps(run: Run) -> list[Finding]:
    """Return findings for errors or gradients with steady growth per step; first the fastest of the earliest.

    Groups have one only where no single site grows.
    """
    found = [growth for one in measured_over_steps(run) if (growth := _growth(one)) is not None]
    if not found:
        return []
    single = [g for g in found if not is_group(g.site)] or found
    begin = min(g.step for g in single)
    sites = as_executed(g.site for g in single)

    def order(growth: _Growth) -> tuple[int, float, int]:
        late = growth.step if growth.step > begin + SLACK else begin
        return late, -round(math.log(growth.last) - math.log(growth.first), 6), sites.index(growth.site)

    worst: dict[str, _Growth] = {}
    for growth in sorted(single, key=order):
        worst.setdefault(growth.site, growth)  # of several records of a site
    return [_growing(growth) for growth in worst.values()]


def measured_over_steps(run: Run) -> list[Series]:
    """Return the records for the search of growth over the steps."""
    return [
        one
        for one in run.series.values()
        if one.record in MAGNITUDES and one.at.kind in BACKWARD and one.at.kind != "outside"
    ]


def _growing(growth: _Growth) -> Finding:
    text = (
        f"{growth.site} grows by a factor of {growth.factor:.4g} per step: from {growth.first:.4g} in step "
        f"{growth.step} to {growth.last:.4g}, {growth.steps} steps later."
    )
    figures = {"growth_per_step": growth.factor, "from": growth.first, "to": growth.last, "steps": growth.steps}
    advice = f"Lower the learning rate, or clip by a norm near {growth.first:.2g}, the level at which growth begins."
    return Finding("exploding", growth.site, growth.step, text, figures, advice)


def _growth(series: Series) -> _Growth | None:
    pairs = [(s, math.log(v)) for s, v in zip(series.steps, series.values, strict=True) if 0 < v < math.inf]
    if len(pairs) < MIN_STEPS:
        return None
    logs = [log for _, log in pairs]
    early, late = median(logs[: max(3, min(10, len(logs) // 4))]), median(logs[-3:])
    if late - early < math.log(EXPLODING):
        return None
    smooth = _smooth(logs)
    first = _last_below(smooth[:-1], early)  # the last value alone shows no return
    before = sorted(smooth[: first + 1])  # all steps at the early level: how high does it reach by itself?
    first = _last_below(smooth[:-1], max(early, before[int(0.9 * len(before))]))
    if first >= len(smooth) - 2:
        return None
    while first > 0 and smooth[first - 1] < smooth[first]:
        first -= 1
    last = next((n for n in range(first + 1, len(smooth)) if smooth[n] >= late - math.log(2)), len(smooth) - 1)
    while last < len(smooth) - 1 and smooth[last + 1] > smooth[last]:
        last += 1
    part, rows = smooth[first : last + 1], pairs[first : last + 1]
    factor = _exp(_slope(rows))
    if factor < MIN_GROWTH or not _is_geometric(part):
        return None
    return _Growth(series.at.site, rows[0][0], factor, math.exp(part[0]), math.exp(part[-1]), rows[-1][0] - rows[0][0])


def _exp(log: float) -> float:
    return math.exp(min(log, _LARGEST_LOG))


def _smooth(values: Sequence[float]) -> list[float]:
    """Running median of five, of three and one at the ends; a sequence that only rises stays as it is."""
    widths = [min(2, n, len(values) - 1 - n) for n in range(len(values))]
    return [median(values[n - w : n + w + 1]) for n, w in enumerate(widths)]


def _last_below(values: Sequence[float], level: float) -> int:
    return max((n for n, v in enumerate(values) if v <= level), default=0)


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """Median of the slopes between all pairs of at most 100 points (Theil and Sen): half of them may be outliers."""
    every = -(-len(points) // 100)
    thin = points[::every]
    return median((b[1] - a[1]) / (b[0] - a[0]) for n, a in enumerate(thin) for b in thin[n + 1 :])


def _is_geometric(logs: Sequence[float]) -> bool:
    """Whether values grow without much up and down, and no slower in the second half."""
    every = max(1, len(logs) // 20)
    thin = [*logs[:-1:every], logs[-1]]
    travelled = sum(abs(b - a) for a, b in pairwise(thin))
    middle = logs[len(logs) // 2]
    is_steady = logs[-1] - logs[0] >= STEADINESS * travelled
    return is_steady and (len(logs) < MIN_STEPS or logs[-1] - middle >= MIN_LATE_SHARE * (middle - logs[0]))


@dataclass(frozen=True, slots=True)
class _Profile:
    """Medians over a run of one record of the errors, walking backward."""

    record: str  # name of the record
    sites: list[tuple[str, float]]  # sites with their medians, from the output end to the input end

    def first_step(self, steps: Sequence[Step], is_far: Callable[[float], bool]) -> int:
        """Return the number of the first step with a far ratio of input end to output end; else of the first."""
        (first, _), (last, _) = self.sites[0], self.sites[-1]
        for step in steps:
            output = step.records.get(f"{self.record}@{first}", 0.0)
            back = step.records.get(f"{self.record}@{last}", math.nan)
            if output > 0 and is_far(back / output):
                return step.step
        return steps[0].step


def growth_over_layers(run: Run) -> list[Finding]:
    """Return a finding for errors that grow or shrink steadily per layer backward."""
    profile = _profile(run)
    values = [v for _, v in profile.sites]
    if len(values) < MIN_LAYERS:
        return []
    points = [(n, math.log(v)) for n, v in enumerate(values) if v > 0]
    slope = _slope(points) if len(points) > 1 else -math.inf
    factor, fitted, ratio = _exp(slope), _exp(slope * (len(values) - 1)), values[-1] / values[0]
    is_spread = _is_spread([log for _, log in points])
    explodes = is_spread and min(fitted, ratio) >= EXPLODING_LAYERS and factor >= MIN_LAYER_GROWTH
    vanishes = is_spread and max(fitted, ratio) <= VANISHING_LAYERS and factor <= MAX_LAYER_SHARE
    if explodes:
        return [_exploding(run, profile, factor)]
    if vanishes or values[-1] == values[-2] == 0:
        return [_vanishing(run, profile, factor)]
    return []


def _profile(run: Run) -> _Profile:
    profiles = [_profile_of(run, record) for record in ("norm", "max_abs", "mean_abs")]
    return max(profiles, key=lambda profile: len(profile.sites))  # the first of those that are as long


def _profile_of(run: Run, record: str) -> _Profile:
    begin = f"{record}@error:"
    rows = [[address for address in step.records if address.startswith(begin)] for step in run.steps]
    sites = []
    for address in reversed(max(rows, key=len, default=[])):
        series = run.series[address]
        values = [v for v in series.values if math.isfinite(v)]
        if values:
            sites.append((series.at.site, median(values)))
    modules = [pair for pair in sites if "/" not in pair[0]]
    sites = modules if len(modules) >= MIN_LAYERS else sites
    while sites and sites[0][1] <= 0:
        del sites[0]  # what the loss does not use
    return _Profile(record, sites)


def _is_spread(logs: Sequence[float]) -> bool:
    """Whether no single layer makes most of the ratio, as a layer that scales on purpose does."""
    smooth = _smooth(logs)
    largest = max((abs(b - a) for a, b in pairwise(smooth)), default=0.0)
    return largest <= MAX_ONE_LAYER * abs(smooth[-1] - smooth[0])


def _exploding(run: Run, profile: _Profile, factor: float) -> Finding:
    (first, low), (last, high) = profile.sites[0], profile.sites[-1]
    number = len(profile.sites)
    text = (
        f"Errors grow by a factor of {factor:.4g} per layer on the way back: median {profile.record} is {low:.4g} at "
        f"{first} and {high:.4g} at {last}, over {number} layers."
    )
    figures = {"growth_per_layer": factor, "at_output_end": low, "at_input_end": high, "layers": number}
    begin = profile.first_step(run.steps, lambda ratio: ratio >= EXPLODING_LAYERS)
    advice = (
        "Normalise between the layers or start from smaller weights; ClipByNorm on error:* holds it back until then."
    )
    return Finding("exploding", last, begin, text, figures, advice)


def _vanishing(run: Run, profile: _Profile, factor: float) -> Finding:
    (first, high), (last, low) = profile.sites[0], profile.sites[-1]
    number = len(profile.sites)
    gone = [(site, v) for site, v in profile.sites if v <= VANISHING_LAYERS * high]
    how, figures = f", by a factor of {factor:.4g} per layer", {"growth_per_layer": factor}
    if low == 0 and factor > MAX_LAYER_SHARE:
        how, figures = "", {}  # zeros at once, not little by little
    text = (
        f"Errors vanish on the way back{how}: median {profile.record} is {high:.4g} at {first} and {low:.4g} at "
        f"{last}, over {number} layers; gone at {listed(gone)}."
    )
    figures |= {"at_output_end": high, "at_input_end": low, "layers": number, "vanished_layers": len(gone)}
    figures |= {f"{profile.record}@{site}": v for site, v in gone[:LISTED]}
    begin = profile.first_step(run.steps, lambda ratio: ratio <= VANISHING_LAYERS)
    advice = "Add residual connections or normalisation, or use units that do not saturate."
    if low == 0:
        advice = (
            f"Look at what comes after {gone[0][0]}: dead units, a detach, a Zero(), or underflow in half precision."
        )
    return Finding("vanishing", gone[0][0], begin, text, figures, advice)
