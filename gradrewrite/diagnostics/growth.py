"""Geometric growth and decay over steps and layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from statistics import median

from gradrewrite._utils.grouping import grouped
from gradrewrite.diagnostics.causes import Cause
from gradrewrite.diagnostics.clipping import clips_of
from gradrewrite.diagnostics.comparison import loss_of
from gradrewrite.diagnostics.nonfinite_steps import harmful_steps
from gradrewrite.diagnostics.run_log import (
    BACKWARD,
    LISTED,
    MAGNITUDES,
    MIN_STEPS,
    Run,
    Series,
    Step,
    as_executed,
    is_group,
    listed_values,
    rule_of,
)

EXPLODING = 1e3  # healthy gradients drift by a factor of 10 to 100 over a run
MIN_GROWTH = 1.02  # per step; slower growth cannot be told from a drift
STEADINESS = 0.8  # net growth over all ups and downs: a random walk that went as far by luck has about 0.6
MIN_LATE_SHARE = 0.5  # growth in the second half over that in the first: power laws (warm-up, a zero start) slow down
SLACK = 2  # steps; where growth begins is no sharper than this under noise
MIN_LAYERS = 4  # fewer sites make no geometric sequence
EXPLODING_LAYERS, MIN_LAYER_GROWTH = 1e3, 1.2  # a sound model keeps errors within two orders from end to end
VANISHING_LAYERS, MAX_LAYER_SHARE = 1e-6, 0.8  # float32 has 7 digits; larger maps alone make errors 1e-3 as large
MIN_CALL_GROWTH, MAX_CALL_SHARE = 1.02, 0.95  # a recurrence has many steps: the ends tell
MOST_SLOTS = 4  # calls of one module in each step of a loop
LARGE_JUMP = 100.0  # between neighboring layers; healthy models keep errors within two orders from end to end
MAX_ONE_LAYER = 0.6  # of the ratio from end to end, in logs; four layers have three steps of 0.33 each
_LARGEST_LOG = 700.0  # exp of more overflows


def growth_over_steps(run: Run) -> list[Cause]:
    """Return findings for steady growth per step, the earliest first.

    Groups have one only where no single site grows.
    """
    clipped = {clip.site for clip in clips_of(run) if any(clip.acted)}
    every = (_growth(run, one, is_clipped=one.at.site in clipped) for one in measured_over_steps(run))
    found = [growth for growth in every if growth is not None]
    if not found:
        return []
    single = [one for one in found if not is_group(one.site)] or found
    begin = min(one.step for one in single)
    sites = as_executed(one.site for one in single)

    def order(one: Cause) -> tuple[int, float, int]:
        late = one.step if one.step > begin + SLACK else begin
        return late, -round(math.log(one.figures["to"]) - math.log(one.figures["from"]), 6), sites.index(one.site)

    worst: dict[str, Cause] = {}
    for growth in sorted(single, key=order):
        worst.setdefault(growth.site, growth)  # of several records of a site
    return list(worst.values())


def measured_over_steps(run: Run) -> list[Series]:
    """Return the records of errors and gradients over the steps."""
    return run.select(MAGNITUDES, BACKWARD - {"outside"})


def _growth(run: Run, series: Series, *, is_clipped: bool) -> Cause | None:
    pairs = [(step, math.log(v)) for step, v in series.by_step.items() if 0 < v < math.inf]
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
    site, step, steps = series.at.site, rows[0][0], rows[-1][0] - rows[0][0]
    low, high = math.exp(part[0]), math.exp(part[-1])
    text = f"{site} grows by a factor of {factor:.4g} per step: from {low:.4g} in {run.place(step)} to {high:.4g}"
    clip = f", or clip by a norm near {low:.2g}, the level at which growth begins"
    figures = {"growth_per_step": factor, "from": low, "to": high, "steps": steps}
    advice = f"Lower the learning rate{'' if is_clipped else clip}."
    return Cause("exploding", site, step=step, text=f"{text}, {steps} steps later.", advice=advice, figures=figures)


def _exp(log: float) -> float:
    return math.exp(min(log, _LARGEST_LOG))


def _smooth(values: Sequence[float]) -> list[float]:
    """Running median of five, at the ends of fewer."""
    widths = [min(2, n, len(values) - 1 - n) for n in range(len(values))]
    return [median(values[n - w : n + w + 1]) for n, w in enumerate(widths)]


def _last_below(values: Sequence[float], level: float) -> int:
    return max((n for n, v in enumerate(values) if v <= level), default=0)


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """Theil-Sen slope of at most 100 points."""
    every = -(-len(points) // 100)
    thin = points[::every]
    return median((b[1] - a[1]) / (b[0] - a[0]) for n, a in enumerate(thin) for b in thin[n + 1 :])


def _is_geometric(logs: Sequence[float]) -> bool:
    """Whether values grow steadily, and no slower in the end."""
    every = max(1, len(logs) // 20)
    thin = [*logs[:-1:every], logs[-1]]
    travelled = sum(abs(b - a) for a, b in pairwise(thin))
    middle = logs[len(logs) // 2]
    is_steady = logs[-1] - logs[0] >= STEADINESS * travelled
    return is_steady and (len(logs) < MIN_STEPS or logs[-1] - middle >= MIN_LATE_SHARE * (middle - logs[0]))


@dataclass(frozen=True, slots=True)
class Chain:
    """Errors of successive layers, or calls of one module, backward."""

    record: str  # name of the record
    module: str  # the module that is called; ``""`` for layers
    sites: tuple[str, ...]  # from the output end to the input end
    sizes: tuple[float, ...]  # medians over the judged steps
    logs: tuple[float, ...]  # logarithms of the sizes; -inf for 0
    slope: float  # log of the growth per link; -inf without two sizes

    @property
    def ends(self) -> list[float]:
        """Logs of the fitted and the actual ratio, in order."""
        return sorted((self.slope * (len(self.logs) - 1), self.logs[-1] - self.logs[0]))

    @property
    def ratios(self) -> list[float]:
        """Growth of each link; 1 behind a size of 0."""
        return [back / front if front > 0 else 1.0 for front, back in pairwise(self.sizes)]

    @property
    def jump(self) -> int:
        """Position of the site behind the largest growth."""
        return self.ratios.index(max(self.ratios)) + 1

    @property
    def unit(self) -> str:
        """Name of one link: ``"call"`` or ``"layer"``."""
        return "call" if self.module else "layer"

    @property
    def is_steady(self) -> bool:
        """Whether no single link makes most of the ratio."""
        smooth = _smooth([log for log in self.logs if log > -math.inf])
        largest = max((abs(b - a) for a, b in pairwise(smooth)), default=0.0)
        return largest <= MAX_ONE_LAYER * abs(smooth[-1] - smooth[0])

    @property
    def explodes(self) -> bool:
        """Whether the errors grow steadily by 1,000 or more."""
        least = MIN_CALL_GROWTH if self.module else MIN_LAYER_GROWTH
        far = self.ends[0] >= math.log(EXPLODING_LAYERS)
        return far and self.slope >= math.log(least) and self.is_steady

    @property
    def vanishes(self) -> bool:
        """Whether the errors fall steadily below a millionth."""
        if not self.module and self.sizes[-1] == self.sizes[-2] == 0:
            return True
        most = MAX_CALL_SHARE if self.module else MAX_LAYER_SHARE
        far = self.ends[1] <= math.log(VANISHING_LAYERS)
        return far and self.slope <= math.log(most) and self.is_steady

    def first_step(self, steps: Sequence[Step], is_far: Callable[[float], bool]) -> int:
        """Return the first step with a far ratio, if any."""
        for step in steps:
            output = step.records.get(f"{self.record}@{self.sites[0]}", 0.0)
            back = step.records.get(f"{self.record}@{self.sites[-1]}", math.nan)
            if output > 0 and is_far(back / output):
                return step.step
        return steps[0].step


def are_neighbors(back: str, front: str) -> bool:
    """Whether two sites are neighbors in one list of layers."""
    (parent, _, number), (other, _, following) = (site.partition(":")[2].rpartition(".") for site in (back, front))
    both = number.isdecimal() and following.isdecimal()
    return parent == other and both and int(following) == int(number) + 1


def factor_of(chain: Chain) -> float:
    """Return the growth per layer or call."""
    return _exp(chain.slope)


def judged_steps(run: Run) -> Sequence[Step]:
    """Return the steps before the first non-finite one."""
    bad, loss = [one.step.step for one in harmful_steps(run)[:1]], loss_of(run)
    if loss is not None and loss.bad_step >= 0:
        bad.append(loss.bad_step)
    before = [step for step in run.steps if step.step < min(bad)] if bad else run.steps
    return before or run.steps[:1]


def chains_of(run: Run, steps: Sequence[Step]) -> list[Chain]:
    """Return the chains of layers and of repeatedly called modules."""
    record, sizes = max(
        (_sizes_of(steps, record) for record in ("norm", "max_abs", "mean_abs")), key=lambda s: len(s[1])
    )
    calls = grouped((site.partition("#")[0], site) for site in sizes)
    single = [own[0] for own in calls.values() if len(own) == 1]
    modules = [site for site in single if "/" not in site]
    layers = modules if len(modules) >= MIN_LAYERS else single
    of_calls = [_chain_of_calls(record, name, own[::-1], sizes) for name, own in calls.items()]
    return [chain for chain in (_chain(record, "", layers[::-1], sizes), *of_calls) if chain is not None]


def _sizes_of(steps: Sequence[Step], record: str) -> tuple[str, dict[str, float]]:
    begin = f"{record}@error:"
    rows = [[address for address in step.records if address.startswith(begin)] for step in steps]
    sizes = {}
    for address in max(rows, key=len, default=[]):
        values = [value for step in steps if math.isfinite(value := step.records.get(address, math.nan))]
        if values:
            sizes[address.partition("@")[2]] = median(values)
    return record, sizes


def _chain(record: str, module: str, sites: Sequence[str], sizes: Mapping[str, float]) -> Chain | None:
    rest = tuple(dropwhile(lambda site: sizes[site] <= 0, sites))  # what the loss does not use
    if len(rest) < MIN_LAYERS:
        return None
    known = tuple(sizes[site] for site in rest)
    logs = tuple(math.log(size) if size > 0 else -math.inf for size in known)
    points = [(n, log) for n, log in enumerate(logs) if log > -math.inf]
    return Chain(record, module, rest, known, logs, _slope(points) if len(points) > 1 else -math.inf)


def _chain_of_calls(record: str, name: str, sites: Sequence[str], sizes: Mapping[str, float]) -> Chain | None:
    """Return the chain of a module's calls or one slot."""
    module = name.partition(":")[2]
    for period in range(1, MOST_SLOTS + 1):
        slots = [_chain(record, module, sites[n::period], sizes) for n in range(period)]
        known = [chain for chain in slots if chain is not None]
        if len(known) == period and all(chain.is_steady for chain in known):
            return max(known, key=lambda chain: abs(chain.slope))
    return None


def _described(chain: Chain) -> tuple[str, str, dict[str, float]]:
    """Return growth and ends of a chain as text, and as figures."""
    (first, *_, last), (at_first, *_, at_last), factor = chain.sizes, chain.sites, factor_of(chain)
    growth = f"by a factor of {factor:.4g} per {f'call of {chain.module}' if chain.module else 'layer'}"
    ends = f"median {chain.record} is {first:.4g} at {at_first} and {last:.4g} at {at_last}"
    figures = {f"growth_per_{chain.unit}": factor, "at_output_end": first, "at_input_end": last}
    return growth, f"{ends}, over {len(chain.sites)} {chain.unit}s", figures | {f"{chain.unit}s": len(chain.sites)}


def growth_over_layers(run: Run) -> list[Cause]:
    """Return a finding for steady growth or decay per layer."""
    steps = judged_steps(run) if run.steps else ()
    chains = chains_of(run, steps)
    grow = [chain for chain in chains if chain.explodes]
    if grow:
        return [exploding(steps, max(grow, key=lambda chain: chain.ends[0]))]
    return [vanishing(steps, chain) for chain in chains if chain.vanishes][:1]


def exploding(steps: Sequence[Step], chain: Chain) -> Cause:
    """Return the finding for an exploding chain."""
    growth, ends, figures = _described(chain)
    text = f"Errors grow {growth} on the way back: {ends}."
    begin = chain.first_step(steps, lambda ratio: ratio >= EXPLODING_LAYERS)
    site = chain.sites[-1].partition("#")[0]
    clipped = [site] if chain.module else chain.sites[::-1]
    rules = tuple(rule_of(name, "ClipByNorm", 2 * chain.sizes[0]) for name in clipped)
    advice = (
        "Clip the error where it grows: a clip of the gradients acts when it has grown already. Or start from smaller "
        f"weights{_shorter(chain) if chain.module else ''}."
    )
    return Cause("exploding", site, step=begin, text=text, advice=advice, rules=rules, figures=figures)


def _shorter(chain: Chain) -> str:
    """Return the growth over all calls and over a harmless number of them, as the end of an advice."""
    length = max(int(math.log(LARGE_JUMP) / chain.slope), 1)
    over = [f"{factor_of(chain) ** n:.2g}-fold over {n}" for n in (length, len(chain.sites)) if n <= len(chain.sites)]
    return f", or backpropagate through fewer calls: the error grows {', '.join(dict.fromkeys(over))}"


def vanishing(steps: Sequence[Step], chain: Chain) -> Cause:
    """Return the finding for a vanishing chain."""
    sizes = list(zip(chain.sites, chain.sizes, strict=True))
    gone = [(site, size) for site, size in sizes if size <= VANISHING_LAYERS * chain.sizes[0]]
    growth, ends, figures = _described(chain)
    is_zero, how = chain.sizes[-1] == 0, f", {growth}"
    if is_zero and factor_of(chain) > MAX_LAYER_SHARE:
        how = ""  # zeros at once, not little by little
        del figures[f"growth_per_{chain.unit}"]
    text = f"Errors vanish on the way back{how}: {ends}; gone at {listed_values(gone)}."
    figures[f"vanished_{chain.unit}s"] = len(gone)
    figures |= {f"{chain.record}@{site}": size for site, size in gone[:LISTED]}
    begin = chain.first_step(steps, lambda ratio: ratio <= VANISHING_LAYERS)
    advice = "Add residual connections or normalization, or use units that do not saturate. No clip is a remedy."
    if is_zero:
        advice = (
            f"Look at what comes after {gone[0][0]}: dead units, a detach, a Zero(), or underflow in half precision."
        )
    return Cause("vanishing", gone[0][0], step=begin, text=text, advice=advice, figures=figures)
