"""The judge of a run: outcome, causes, remedies."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from gradrewrite.diagnostics import growth
from gradrewrite.diagnostics.causes import KINDS, Cause, Kind, Outcome, traits_of, words
from gradrewrite.diagnostics.clipping import CLIPS_ALWAYS, MIN_CLIP_STEPS
from gradrewrite.diagnostics.comparison import comparable_sizes, loss_of, mean_of
from gradrewrite.diagnostics.doctor import DEAD, dead, saturated
from gradrewrite.diagnostics.failures import cause_of
from gradrewrite.diagnostics.growth import LARGE_JUMP, Chain, are_neighbors, chains_of, factor_of, judged_steps
from gradrewrite.diagnostics.nonfinite_steps import failure_in, harmful_steps, skips_updates
from gradrewrite.diagnostics.run_log import Run, Series, Step, is_group, loss_series, rule_of
from gradrewrite.diagnostics.site_health import SiteHealth, percent
from gradrewrite.errors import NonFiniteError
from gradrewrite.sites import Site

LEARNS, DIVERGES = 0.02, 0.1  # of the first loss; and twice the noise of both ends
HALF = 0.5  # of the first loss
MIN_LOSSES = 4
OUTLIER = 30.0  # times the median size of the other steps
LARGE_BATCH = 10.0  # times the median of the largest values of the batches
RISES = 10.0  # from the first step to the last finite one
UNDERFLOW = 0.9  # share of zeros in float16
LOW_CLIP = 0.3  # median factor of a clip that always acts
STRONG_CLIP = 0.2  # median factor of a clip that hides one layer, over that of the clips of other errors
WIDE = 1e30  # a dtype beyond it: what overflows there has exploded
LARGEST_BOUND = 1e6  # of a suggested clip, times the smallest usual norm of a site, or times 1
_BOUND = re.compile(r"ClipBy\w+\((\d[\d.e+-]*)\)")
_NEAR = 3  # steps around a spike
_NARROW = "the largest of float16"  # in the text of an overflow


@dataclass(frozen=True, slots=True)
class Remedy:
    """A rule that was tried on a step that is not finite, and helps."""

    rule: str
    text: str


KEEP_ZEROS = Remedy(
    'gr.on("backward:*/*", KeepZeros())',
    "Or leave the model as it is, with the suggested rule: what does not reach the loss gets no error. Tried on that "
    "batch: all its gradients are finite then.",
)
SKIP = Remedy(
    'gr.on("gradient:*", CheckFinite("skip"))',
    "Until then the suggested rule skips such updates, with gr.guard(optimizer, model); batches behind that step were "
    "tried, and are finite.",
)

_BOUNDS = "The suggested clip, with gr.guard(optimizer, model), bounds such an update."


def without_rule(advice: str) -> str:
    """Return an advice without its sentences on a suggested rule."""
    for text in (KEEP_ZEROS.text, SKIP.text, _BOUNDS):
        advice = advice.replace(text, "")
    return advice.strip()


@dataclass(frozen=True, slots=True)
class Evidence:
    """Knowledge of a run beside its records."""

    sites: Mapping[str, Site] = field(default_factory=dict)  # by their texts
    failure: NonFiniteError | None = None  # of the last step, by its replay
    batches: Mapping[int, float] = field(default_factory=dict)  # largest absolute value of the batch, by step
    is_trained: bool = True  # whether parameters were updated
    recurrent: frozenset[str] = frozenset()  # modules whose calls read what their calls before returned
    remarks: tuple[str, ...] = ()  # what is no fault
    constant_loss: float = math.nan  # of the best constant answer, where targets are classes; NaN if not known
    audited: tuple[Cause, ...] = ()  # faults of the training step itself
    remedies: tuple[Remedy, ...] = ()  # against the failure
    update: Cause | None = None  # of the last step: its update made something non-finite
    clip: float = math.nan  # the global norm to which the user clips
    used: Mapping[int, float] = field(default_factory=dict)  # global norms that the optimizer used, by step
    updates: tuple[Cause, ...] = ()  # faults of the gradients that were used: of a clip, of a loss scale


def outcome_of(run: Run, is_trained: bool = True) -> Outcome:
    """Return the outcome of a training, from its loss.

    It learns, or diverges, where the mean of the last losses (a fifth of them, at most 10) is lower by 2 %, or higher
    by 10 %, than that of the first, and by more than twice the standard error of the difference (from the median of
    the differences between neighbors, which a trend does not enlarge); else it stalls. A loss that has halved has
    fallen, whatever its noise.
    Without a loss, or with fewer than 4, nothing is known. Errors that are dropped on the way back are no outcome.
    """
    loss, bad = loss_series(run), harmful_steps(run)
    if (bad and bad[-1].step is run.steps[-1]) or (loss is not None and not math.isfinite(loss.values[-1])):
        return "non-finite"
    if not is_trained:
        return "untrained"
    values = [] if loss is None else [value for value in loss.values if math.isfinite(value)]
    if len(values) < MIN_LOSSES:
        return "unknown"
    begin, fall, noise = _fall_of(values)
    if fall > max(noise, LEARNS * begin) or fall >= HALF * begin > 0:
        return "learns"
    return "diverges" if -fall > max(noise, DIVERGES * begin) else "stalls"


def _fall_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the size of the first losses, the fall to the last, and twice its standard error."""
    count = max(1, min(10, len(values) // 5))
    first, last = values[:count], values[-count:]
    noise = 2 * math.hypot(_noise(first), _noise(last)) / math.sqrt(count)
    return abs(mean_of(first)), mean_of(first) - mean_of(last), noise


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation of noise, without trend and outliers."""
    return 1.05 * median(abs(b - a) for a, b in pairwise(values)) if len(values) > 1 else 0.0


class Judge:
    """The causes of one run, each rule a method."""

    def __init__(
        self, run: Run, findings: Sequence[Cause], sites: Sequence[SiteHealth], evidence: Evidence, *, is_higher: bool
    ) -> None:
        """Judge a run.

        ``is_higher``: it ends higher than its baseline, and has a fault even where it learns.
        """
        self.run, self.findings, self.sites, self.evidence = run, findings, sites, evidence
        self.outcome = "non-finite" if evidence.update is not None else outcome_of(run, evidence.is_trained)
        loss = loss_of(run)
        # A fall to the loss of a constant answer is made by the last bias alone.
        constant = evidence.constant_loss
        is_above = loss is not None and loss.last >= constant - max(LEARNS * constant, 2 * loss.noise)
        self.is_constant = self.outcome == "learns" and is_above
        self.learns = self.outcome == "learns" and not is_higher
        self.steps: Sequence[Step] = judged_steps(run) if run.steps else ()
        self.chains = chains_of(run, self.steps)
        self.first = chains_of(run, self.steps[:1])  # as they were before anything was learned
        sizes = comparable_sizes(run, run)
        self.sizes = {} if sizes is None else sizes[1]  # of all gradients by step; inf where one is not finite
        self.bound = min((row.bound for row in sites if is_group(row.site) and row.bound > 0), default=math.inf)
        often = [row for row in sites if row.steps >= MIN_CLIP_STEPS and row.rate > CLIPS_ALWAYS]
        self.always = [row for row in often if row.median_factor < 1]
        self.low = [row for row in self.always if row.median_factor < LOW_CLIP and row.suggestion > 0]

    @property
    def text(self) -> str:
        """The outcome and the span of the loss, from means of its ends."""
        loss = loss_of(self.run)
        span = "" if loss is None else f": loss {words(loss.first)} -> {words(loss.last)} in {_steps(loss.steps)}"
        if self.is_constant:
            known = words(self.evidence.constant_loss)
            return f"It learns no more than the best constant answer, whose loss is {known}{span}."
        return f"{_OUTCOMES[self.outcome]}{span}{self._noise_text()}."

    def _noise_text(self) -> str:
        """How large the noise is, where the loss falls by less than that, or halves in spite of it."""
        series = loss_series(self.run)
        values = [] if series is None else [value for value in series.values if math.isfinite(value)]
        if self.outcome not in ("learns", "stalls") or len(values) < MIN_LOSSES:
            return ""
        begin, fall, noise = _fall_of(values)
        if LEARNS * begin < fall <= noise:
            return f"; a fall of {words(fall)}, within the noise of {words(noise)}"
        return ""

    def causes(self) -> tuple[Cause, ...]:
        """Return the causes, the gravest first, without bounds that bound nothing."""
        sizes = [median(finite) for one in self.run.series.values() if (finite := _norms_of(one))]
        most = LARGEST_BOUND * max(min(sizes, default=1.0), 1.0)
        found = self._causes()
        return tuple(replace(one, rules=tuple(r for r in one.rules if not _bound_in(r) > most)) for one in found)

    def _causes(self) -> tuple[Cause, ...]:
        found = [*self.update(), *self.op_at_fault()]
        is_explained = bool(found)
        found = found or self.bad_batch()
        is_grave = any(traits_of(one.kind).gravity != "mild" for one in self.findings)
        if self.outcome == "non-finite":
            found += [] if is_explained else self.exploding()
            found = found or self.one_layer() or self.learning_rate() or self.op()
        elif self.outcome not in ("learns", "unknown"):
            idle, full = dead(self.run, {("zeros", "activation"): DEAD}), saturated(self.run)
            found += self.exploding()
            found += self._found("dead", idle) or self.underflow() or self._found("saturated", full)
            found = found or self.one_layer() or self.vanishing()
            if self.outcome == "diverges":
                found = found or self.learning_rate()
            found = found or self.hidden_layer()
            if self.outcome == "stalls":
                found = found or self.low_clips()
        elif not self.learns and not is_grave:
            found = found or self.hidden_layer()
        if self.outcome == "learns":
            found = found or self.vanishing()
        if self.learns or not is_grave:
            found = found or self.spike()
        return tuple(found or self.exploded_update())

    def _cause(self, kind: Kind, site: str, factor: float, step: int, text: str, advice: str, *rules: str) -> Cause:
        known = self.evidence.sites.get(site)
        source = "" if known is None else known.source
        return Cause(kind, site, source, factor, step, text, advice or KINDS[kind].advice, rules)

    def _found(self, kind: Kind, findings: Sequence[Cause], factor: float = math.nan) -> list[Cause]:
        """Return the cause in the first finding."""
        return [self._cause(kind, f.site, factor, f.step, f.text, f.advice, *f.rules) for f in findings[:1]]

    def _bounded(self, kind: Kind, factor: float, step: int, text: str) -> list[Cause]:
        """Return a cause of large updates, with a bound.

        It is twice the usual size, or, of a learning rate that is too high, twice the first.
        """
        finite = [size for size in self.sizes.values() if 0 < size < math.inf]
        bound = 2 * (finite[0] if kind == "learning rate" else median(finite)) if finite else math.inf
        if self.bound <= bound:
            return [self._cause(kind, "", factor, step, text, "")]
        advice = f"{KINDS[kind].advice} {_BOUNDS}"
        return [self._cause(kind, "", factor, step, text, advice, f'gr.on("step:*", ClipByGlobalNorm({bound:.2g}))')]

    def update(self) -> list[Cause]:
        """An update with finite gradients and a non-finite result, and faults of the gradients that were used."""
        own = self.evidence.update
        made = [own] if own is not None else [one for one in self.findings if one.kind == "update"][:1]
        return [*(one for one in made if not _has_exploded(one)), *self.evidence.updates]

    def exploded_update(self) -> list[Cause]:
        """An update beyond a wide dtype, as the last reason."""
        own = self.evidence.update
        return [] if own is None or not _has_exploded(own) else [own]

    def exploding(self) -> list[Cause]:
        """Errors with steady growth from the first step on."""
        early = {chain.module for chain in self.first if chain.explodes}
        chains = [chain for chain in self.chains if chain.explodes and chain.module in early]
        if not chains:
            return []
        chain = max(chains, key=lambda chain: (chain.module in self.evidence.recurrent, chain.ends[0]))
        finding = growth.exploding(self.steps, chain)
        late = next((row for row in self.always if is_group(row.site)), None)
        if late is not None:
            left = f"and leaves {late.median_factor:.2g} of all gradients"
            finding = replace(finding, text=f"{finding.text} {late.action} at {late.site} acts after that, {left}.")
        if self.bound == math.inf:
            finding = replace(finding, rules=(*finding.rules, self._clip_of_all()))
        site = chain.sites[-1].partition("#")[0] if chain.module else chain.sites[-1]
        return self._found("exploding", [replace(finding, site=site)], factor_of(chain))

    def _clip_of_all(self) -> str:
        """Return a clip of all gradients: at step sites for several backwards an update."""
        kind = "step" if self.run.has_micro_batches else "gradient"
        return f'gr.on("{kind}:*", ClipByGlobalNorm(1.0))'

    def one_layer(self) -> list[Cause]:
        """One layer with far larger growth than the others."""
        chain = _layers(self.first)
        if chain is None:
            return []
        place = chain.jump
        lasting = 3 * median(chain.sizes[place:]) >= LARGE_JUMP * median(chain.sizes[:place])
        if max(chain.ratios) < LARGE_JUMP or not lasting:  # what the next layers take back is no explosion
            return []
        front, text = chain.sites[place - 1], f"{_jump_text(chain)}."
        advice = (
            "Start the weights of this layer smaller, lower its learning rate, or normalize its input. The suggested "
            "clip holds its error back until then."
        )
        rule = rule_of(chain.sites[place], "ClipByNorm", 2 * chain.sizes[place - 1])
        return [self._cause("one layer", front, max(chain.ratios), self.steps[0].step, text, advice, rule)]

    def hidden_layer(self) -> list[Cause]:
        """One such layer, hidden by a clip behind it.

        It is blamed only where the names are neighbors (``layers.2``, ``layers.3``): others may be parallel branches.
        """
        chain = _layers(self.chains)
        if chain is None or max(chain.ratios) < LARGE_JUMP:
            return []
        front, back = chain.sites[chain.jump - 1], chain.sites[chain.jump].partition("#")[0]
        clips = [row for row in self.sites if row.median_factor >= 0 and row.site.startswith("error:")]
        factors = [(row.site, row.median_factor if row.rate >= 0.5 else 1.0) for row in clips]
        factor = min((factor for site, factor in factors if site == back), default=1.0)
        if not factors or factor > STRONG_CLIP * median(factor for _, factor in factors):
            return []
        cut = f"the clip at {back} acts after that, and leaves {percent(factor)} of it."
        keep = "Until then keep the clip: it makes that error small again, so that the layers before it can learn."
        layer, name, growth, step = _layer(front), _layer(back), max(chain.ratios), self.steps[0].step
        if are_neighbors(back, front):
            advice = f"Change {layer}, not the bound: {_SMALLER} {keep}"
            return [self._cause("one layer", front, growth, step, f"{_jump_text(chain)}; {cut}", advice)]
        advice = (
            f"If {name} feeds {layer}, the error explodes on its way back through {layer}: {_SMALLER} If they are "
            f"parallel branches, look at what follows {name}. {keep}"
        )
        text = f"One error is far larger than its neighbor: that at {back} is {words(growth)} times that at {front}"
        return [self._cause("large error", back, growth, step, f"{text}; {cut}", advice)]

    def bad_batch(self) -> list[Cause]:
        """A batch of large values with a bad step."""
        found = self._large_batch()
        return [self._with_op(one) for large in found for one in self._bounded("bad batch", *large)]

    def _large_batch(self) -> list[tuple[float, int, str]]:
        """Return the multiple, step and text of a large batch, if any."""
        for step, size in self.evidence.batches.items():
            usual = self._usual(self.evidence.batches, step, 1)
            if 0 < usual < math.inf and not size <= LARGE_BATCH * usual and self._goes_wrong(step):
                times = f"{words(size / usual)} times the usual {words(usual)}"
                batch = f"The batch of {self.run.place(step)}"
                text = f"{batch} has values up to {words(size)}, {times}, and the step goes wrong."
                return [(size / usual, step, text)]
        return []

    def _with_op(self, cause: Cause) -> Cause:
        """Return a cause with the op behind the overflow in its step."""
        failure = self.failure
        if self.outcome != "non-finite" or failure is None or failure.step != cause.step or not failure.source:
            return cause
        known = {name: getattr(failure, name) for name in ("source", "operands", "indices", "parameter", "cover")}
        return replace(cause, text=f"{cause.text} {failure.text}", **known)

    def _usual(self, sizes: Mapping[int, float], step: int, count: int) -> float:
        """Return the median size of other steps; of a training with a bad end of those before."""
        others = {n: size for n, size in sizes.items() if math.isfinite(size) and n not in range(step, step + count)}
        before = [size for number, size in others.items() if number < step]
        is_wrong = self.outcome in ("diverges", "non-finite") and len(before) >= MIN_LOSSES
        return median(before if is_wrong else others.values() or [math.inf])

    def _goes_wrong(self, step: int) -> bool:
        near = [size for number, size in self.sizes.items() if step <= number < step + _NEAR]
        most = RISES * self._usual(self.sizes, step, _NEAR)
        return not all(size < most for size in near)

    def spike(self) -> list[Cause]:
        """One step with far larger gradients than those around it."""
        finite = [(step, size) for step, size in self.sizes.items() if math.isfinite(size)]
        if len(finite) < MIN_LOSSES:
            return []
        usual, place = median(size for _, size in finite), max(range(len(finite)), key=lambda n: finite[n][1])
        step, size = finite[place]
        if place in (0, len(finite) - 1):  # a start, or the beginning of growth
            return []
        near = [size for _, size in (*finite[max(0, place - _NEAR) : place], *finite[place + 1 : place + 1 + _NEAR])]
        if not (usual > 0 and size >= OUTLIER * max(usual, median(near))):
            return []
        text = (
            f"The gradients of {self.run.place(step)} are {words(size / usual)} times as large as usual, those around "
            "it are not."
        )
        return self._bounded("spike", size / usual, step, text)

    def learning_rate(self) -> list[Cause]:
        """Loss or gradients with growth over the steps."""
        loss = loss_series(self.run)
        losses = {} if loss is None else loss.by_step
        for what, values in (("loss", losses), ("norm of the gradients", self.sizes)):
            finite = [(step, value) for step, value in values.items() if math.isfinite(value)]
            if len(finite) > 1 and 0 < finite[0][1] * RISES < finite[-1][1]:
                (begin, first), (end, last) = finite[0], finite[-1]
                text = (
                    f"The {what} grew {words(last / first)}-fold from {self.run.place(begin)} to "
                    f"{self.run.place(end)}, in a network that was sound at the start: each update overshoots, so the "
                    "learning rate is too high."
                )
                lowest = min(finite, key=lambda row: row[1])[0]
                return self._bounded("learning rate", last / first, lowest, text)
        return []

    @property
    def failure(self) -> Cause | None:
        """The first non-finite value, by a replay; None without one."""
        told = self.evidence.failure
        return cause_of(told) if told is not None else failure_in(self.run)

    def op_at_fault(self) -> list[Cause]:
        """The op behind the first non-finite value, if it is explained.

        An overflow is explained by what made the values grow, as far as that is known; one of float16 by its range,
        unless the network itself explodes.
        """
        failure = self.failure
        if self.outcome != "non-finite" or failure is None:
            return []
        if failure.is_explained:
            return self.op()
        if _NARROW not in failure.text or self.exploding() or self.one_layer() or self.learning_rate():
            return []
        batch = "".join(f" {text}" for _, _, text in self._large_batch())
        return [replace(one, text=one.text + batch) for one in self.op()]

    def op(self) -> list[Cause]:
        """The op behind the first non-finite value, by a replay."""
        cause = self.failure
        if cause is None:
            return self._found("non-finite op", [one for one in self.findings if traits_of(one.kind).is_non_finite])
        tried = () if skips_updates(self.run) else self.evidence.remedies
        advice = " ".join((cause.advice, *(remedy.text for remedy in tried)))
        return [replace(cause, advice=advice, rules=tuple(remedy.rule for remedy in tried))]

    def underflow(self) -> list[Cause]:
        """Zeros in float16, at the site nearest to the loss."""
        found: list[Cause] = []
        for one in self.run.select(("zeros",), ("error", "gradient")):
            known, share = self.evidence.sites.get(one.at.site), median(one.values)
            if known is not None and str(known.dtype) == "torch.float16" and share > UNDERFLOW:
                text = f"{share:.1%} of {one.at.site} are 0: it is too small for float16, which ends at 6e-8."
                found.append(self._cause("underflow", one.at.site, math.nan, one.steps[0], text, ""))
        return ([cause for cause in found if cause.site.startswith("error:")] or found)[-1:]

    def vanishing(self) -> list[Cause]:
        """Vanishing errors."""
        for chain in self.chains:
            if chain.vanishes and (self.outcome != "learns" or chain.sizes[-1] > 0):  # zeros may be masked on purpose
                return self._found("vanishing", [growth.vanishing(self.steps, chain)], factor_of(chain))
        return []

    def low_clips(self) -> list[Cause]:
        """Clips with a high rate and a small factor."""
        factors = {row.key: row.median_factor for row in self.low}
        found = sorted((one for one in self.findings if one.key in factors), key=lambda one: factors[one.key])
        causes = self._found("clip too low", found, min(factors.values(), default=math.nan))
        return [replace(cause, rules=tuple(row.code for row in self.low if row.code)) for cause in causes]

    def remarks(self) -> list[str]:
        """Return remarks on a learning run."""
        found = [
            f"{row.action} at {row.site} acts in {percent(row.rate)} of {row.occasions}, and leaves "
            f"{row.median_factor:.2g} of the size (median); the loss falls, so this is no fault."
            for row in self.always
        ]
        others = [one.text for one in self.findings if not one.kind.startswith("clip")]
        return [*found, *(cause.text for cause in self.hidden_layer()), *others]


def _has_exploded(update: Cause) -> bool:
    return update.figures.get("limit", 0.0) > WIDE


def _steps(number: int) -> str:
    return f"{number} step{'s' * (number != 1)}"


def _norms_of(series: Series) -> list[float]:
    is_size = series.record == "norm" and series.at.kind in ("error", "gradient")
    return [value for value in series.values if is_size and 0 < value < math.inf]


def _bound_in(rule: str) -> float:
    """Return the bound of a clip in a rule; NaN without one."""
    found = _BOUND.search(rule)
    return float(found[1]) if found else math.nan


def _layer(site: str) -> str:
    return site.partition(":")[2]


def _jump_text(chain: Chain) -> str:
    front, back = chain.sites[chain.jump - 1 : chain.jump + 1]
    return (
        f"One layer explodes: on its way back through {_layer(front)} the error grows {words(max(chain.ratios))}-fold, "
        f"from {front} to {back}; a typical layer multiplies it by {words(median(chain.ratios))}"
    )


def _layers(chains: Sequence[Chain]) -> Chain | None:
    return next((chain for chain in chains if not chain.module), None)


_OUTCOMES: dict[Outcome, str] = {
    "learns": "It learns",
    "stalls": "It does not learn",
    "diverges": "It diverges",
    "non-finite": "It ends with values that are not finite",
    "untrained": "Nothing was updated",
    "unknown": "Too little is known of the loss",
}
_ALL_GRADIENTS = 'gr.on("gradient:*", ClipByGlobalNorm(1.0))'
_SMALLER = "start its weights smaller, lower its learning rate, or normalize its input (LayerNorm)."
