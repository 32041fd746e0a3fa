"""The judge of a run: outcome, causes, remedies."""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from gradrewrite.diagnostics import growth
from gradrewrite.diagnostics.activations import DEAD, dead, saturated
from gradrewrite.diagnostics.causes import Cause, Judgement, Kind, Outcome
from gradrewrite.diagnostics.clipping import CLIPS_ALWAYS, MIN_CLIP_STEPS, ClipHistory, clips_of_modules
from gradrewrite.diagnostics.comparison import comparable_sizes, loss_series, mean_of
from gradrewrite.diagnostics.growth import LARGE_JUMP, Chain, chains_of, factor_of, judged_steps
from gradrewrite.diagnostics.nonfinite_steps import bad_steps, skips_updates
from gradrewrite.diagnostics.run_log import Finding, Run, Step, is_group, words
from gradrewrite.diagnostics.site_health import quoted
from gradrewrite.errors import NonFiniteError
from gradrewrite.sites import Site

LEARNS, DIVERGES = 0.02, 0.1  # of the first loss; and twice the noise of both ends
MIN_LOSSES = 4
OUTLIER = 30.0  # times the median size of the other steps
LARGE_BATCH = 10.0  # times the median of the largest values of the batches
RISES = 10.0  # from the first step to the last finite one
UNDERFLOW = 0.9  # share of zeros in float16
LOW_CLIP = 0.3  # median factor of a clip that always acts
_NEAR = 3  # steps around a spike


@dataclass(frozen=True, slots=True)
class Evidence:
    """Knowledge of a run beside its records."""

    sites: Mapping[str, Site] = field(default_factory=dict)  # by their texts
    failure: NonFiniteError | None = None  # of the last step, by its replay
    batches: Mapping[int, float] = field(default_factory=dict)  # largest absolute value of the batch, by step
    is_trained: bool = True  # whether parameters were updated
    recurrent: frozenset[str] = frozenset()  # modules whose calls read what their calls before returned
    remarks: tuple[str, ...] = ()  # what is no fault


def judge_run(run: Run, evidence: Evidence | None = None) -> Judgement:
    """Return the outcome, causes and remarks of a run."""
    evidence = evidence or Evidence()
    found = _Findings(run, outcome_of(run, evidence.is_trained), evidence)
    causes = tuple(map(found.with_remedy, found.causes()))
    loss = loss_series(run)
    values = [] if loss is None else loss.values
    span = f": loss {words(values[0])} -> {words(values[-1])} in {len(values)} steps" if values else ""
    text = f"{_OUTCOMES[found.outcome]}{span}.{f' {causes[0].text}' if causes else ''}"
    rules = dict.fromkeys(rule for cause in causes for rule in cause.rules)
    return Judgement(found.outcome, causes, (*evidence.remarks, *found.remarks()), text, tuple(rules))


def outcome_of(run: Run, is_trained: bool = True) -> Outcome:
    """Return the outcome of a training, from its loss.

    It learns, or diverges, where the mean of the last losses (a fifth of them, at most 10) is lower by 2 %, or higher
    by 10 %, than that of the first, and by more than twice the standard error of the difference (from the median of
    the differences between neighbors, which a trend does not enlarge); else it stalls.
    Without a loss, or with fewer than 4, nothing is known.
    """
    loss, bad = loss_series(run), bad_steps(run)
    if (bad and bad[-1].step is run.steps[-1]) or (loss is not None and not math.isfinite(loss.values[-1])):
        return "non-finite"
    if not is_trained:
        return "untrained"
    values = [] if loss is None else [value for value in loss.values if math.isfinite(value)]
    if len(values) < MIN_LOSSES:
        return "unknown"
    count = max(1, min(10, len(values) // 5))
    first, last = values[:count], values[-count:]
    begin, fall = abs(mean_of(first)), mean_of(first) - mean_of(last)
    noise = 2 * math.hypot(_noise(first), _noise(last)) / math.sqrt(count)
    if fall > max(noise, LEARNS * begin):
        return "learns"
    return "diverges" if -fall > max(noise, DIVERGES * begin) else "stalls"


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation of noise, without trend and outliers."""
    return 1.05 * median(abs(b - a) for a, b in pairwise(values)) if len(values) > 1 else 0.0


class _Findings:
    """The causes of one run, each rule a method."""

    def __init__(self, run: Run, outcome: Outcome, evidence: Evidence) -> None:
        self.run, self.outcome, self.evidence = run, outcome, evidence
        self.steps: Sequence[Step] = judged_steps(run) if run.steps else ()
        self.chains = chains_of(run, self.steps)
        self.first = chains_of(run, self.steps[:1])  # as they were before anything was learned
        sizes = comparable_sizes(run, run)
        self.sizes = {} if sizes is None else sizes[1]  # of all gradients by step; inf where one is not finite
        clips = clips_of_modules(run)
        self.bound = min((c.bound for c in clips if is_group(c.site) and c.bound > 0), default=math.inf)  # of gradients
        self.always = [
            clip
            for clip in clips
            if len(set(clip.steps)) >= MIN_CLIP_STEPS and clip.rate > CLIPS_ALWAYS and clip.median_factor < 1
        ]
        fixed = ("ClipByNorm", "ClipByGlobalNorm", "ClipByValue")  # others find their bounds by themselves
        self.low = [clip for clip in self.always if clip.median_factor < LOW_CLIP and clip.action in fixed]

    def causes(self) -> tuple[Cause, ...]:
        """Return the causes, the gravest first."""
        found = self.bad_batch()
        if self.outcome not in ("learns", "unknown"):
            found += self.exploding()
            if self.outcome == "non-finite":
                found = found or self.one_layer() or self.learning_rate() or self.op()
            else:
                found += self.dead() or self.underflow() or self.saturated()
                found = found or self.one_layer() or self.vanishing()
            if self.outcome == "diverges":
                found = found or self.learning_rate()
            if self.outcome == "stalls":
                found = found or self.low_clips()
        return tuple(found or self.spike())

    def _cause(self, kind: Kind, site: str, factor: float, step: int, text: str) -> Cause:
        known = self.evidence.sites.get(site)
        return Cause(kind, site.partition("#")[0], "" if known is None else known.source, factor, step, text)

    def _found(self, kind: Kind, findings: Sequence[Finding], factor: float = math.nan) -> list[Cause]:
        return [self._cause(kind, one.site, factor, one.step, one.text) for one in findings[:1]]

    def exploding(self) -> list[Cause]:
        """Errors with steady growth from the first step on."""
        early = {chain.module for chain in self.first if chain.explodes}
        chains = [chain for chain in self.chains if chain.explodes and chain.module in early]
        if not chains:
            return []
        chain = max(chains, key=lambda chain: (chain.module in self.evidence.recurrent, chain.ends[0]))
        finding = growth.exploding(self.steps, chain)
        late = next((clip for clip in self.always if is_group(clip.site)), None)
        if late is not None:
            left = f"and leaves {late.median_factor:.2g} of all gradients"
            finding = replace(finding, text=f"{finding.text} {late.action} at {late.site} acts after that, {left}.")
        return self._found("exploding", [replace(finding, site=chain.sites[-1])], factor_of(chain))

    def one_layer(self) -> list[Cause]:
        """One layer with far larger growth than the others."""
        chain = _layers(self.first)
        if chain is None:
            return []
        ratios = [back / front if front > 0 else 1.0 for front, back in pairwise(chain.sizes)]
        worst = max(ratios)
        place = ratios.index(worst) + 1
        lasting = 3 * median(chain.sizes[place:]) >= LARGE_JUMP * median(chain.sizes[:place])
        if worst < LARGE_JUMP or not lasting:  # what the next layers take back is no explosion
            return []
        front, back = chain.sites[place - 1], chain.sites[place]
        text = (
            f"One layer explodes: on its way back through {front.partition(':')[2]} the error grows "
            f"{words(worst)}-fold, from {front} to {back}; a typical layer multiplies it by {words(median(ratios))}."
        )
        return [self._cause("one layer", front, worst, self.steps[0].step, text)]

    def bad_batch(self) -> list[Cause]:
        """A batch of large values with a bad step."""
        finite = [size for size in self.evidence.batches.values() if math.isfinite(size)]
        usual = median(finite) if finite else 0.0
        for step, size in self.evidence.batches.items():
            if usual > 0 and not size <= LARGE_BATCH * usual and self._goes_wrong(step):
                times = f"{words(size / usual)} times the usual {words(usual)}"
                text = f"The batch of step {step} has values up to {words(size)}, {times}, and the step goes wrong."
                return [self._cause("bad batch", "", size / usual, step, text)]
        return []

    def _goes_wrong(self, step: int) -> bool:
        near = [size for number, size in self.sizes.items() if step <= number < step + _NEAR]
        others = [size for number, size in self.sizes.items() if number not in range(step, step + _NEAR)]
        finite = [size for size in others if math.isfinite(size)]
        most = RISES * median(finite) if finite else math.inf
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
            f"The gradients of step {step} are {words(size / usual)} times as large as usual, those around it are not."
        )
        return [self._cause("spike", "", size / usual, step, text)]

    def learning_rate(self) -> list[Cause]:
        """Loss or gradients with growth over the steps."""
        loss = loss_series(self.run)
        losses = {} if loss is None else dict(zip(loss.steps, loss.values, strict=True))
        for what, values in (("loss", losses), ("norm of the gradients", self.sizes)):
            finite = [(step, value) for step, value in values.items() if math.isfinite(value)]
            if len(finite) > 1 and 0 < finite[0][1] * RISES < finite[-1][1]:
                (begin, first), (end, last) = finite[0], finite[-1]
                text = (
                    f"The {what} grew {words(last / first)}-fold from step {begin} to step {end}, in a network that "
                    "was sound at the start: each update overshoots, so the learning rate is too high."
                )
                lowest = min(finite, key=lambda row: row[1])[0]
                return [self._cause("learning rate", "", last / first, lowest, text)]
        return []

    def op(self) -> list[Cause]:
        """The op behind the first non-finite value, by a replay."""
        failure, bad = self.evidence.failure, bad_steps(self.run)
        if failure is not None:
            text = f"{str(failure).partition('; just before it')[0]}."
            site = str(failure.site).partition("#")[0]
            return [Cause("non-finite op", site, failure.source, math.nan, failure.step, text)]
        if bad:
            site, step = bad[0].sites[0], bad[0].step.step
            text = f"The first value that is not finite is at {site}, in step {step}."
            return [self._cause("non-finite op", site, math.nan, step, text)]
        loss = loss_series(self.run)
        assert loss is not None  # or the outcome would be another
        step = next(n for n, value in zip(loss.steps, loss.values, strict=True) if not math.isfinite(value))
        return [self._cause("non-finite op", "", math.nan, step, f"The loss is not finite from step {step} on.")]

    def dead(self) -> list[Cause]:
        """Rectifiers with zeros alone."""
        return self._found("dead", dead(self.run, {("zeros", "activation"): DEAD}))

    def saturated(self) -> list[Cause]:
        """Units at the bounds of their tanh or sigmoid."""
        return self._found("saturated", saturated(self.run))

    def underflow(self) -> list[Cause]:
        """Zeros in float16, at the site nearest to the loss."""
        found: list[Cause] = []
        for one in self.run.series.values():
            known = self.evidence.sites.get(one.at.site)
            share = median(one.values) if one.record == "zeros" and one.at.kind in ("error", "gradient") else 0.0
            if known is not None and str(known.dtype) == "torch.float16" and share > UNDERFLOW:
                text = f"{share:.1%} of {one.at.site} are 0: it is too small for float16, which ends at 6e-8."
                found.append(self._cause("underflow", one.at.site, math.nan, one.steps[0], text))
        return ([cause for cause in found if cause.site.startswith("error:")] or found)[-1:]

    def vanishing(self) -> list[Cause]:
        """Vanishing errors."""
        chain = next((chain for chain in self.chains if chain.vanishes), None)
        return (
            [] if chain is None else self._found("vanishing", [growth.vanishing(self.steps, chain)], factor_of(chain))
        )

    def low_clips(self) -> list[Cause]:
        """Clips with a high rate and a small factor."""
        if not self.low:
            return []
        worst = min(self.low, key=lambda clip: clip.median_factor)
        more = f" (and at {len(self.low) - 1} more sites)" if len(self.low) > 1 else ""
        text = (
            f"The bound of {worst.action} at {worst.site}{more} is too low: it acts in {worst.rate:.0%} of the steps "
            f"and leaves {worst.median_factor:.2g} of the size, so that the bound sets the size of the updates."
        )
        return [self._cause("clip too low", worst.site, worst.median_factor, worst.steps[0], text)]

    def remarks(self) -> list[str]:
        """Return remarks on a learning run."""
        if self.outcome != "learns":
            return []
        found = [
            f"{clip.action} at {clip.site} always acts, and leaves {clip.median_factor:.2g} of the size (median); the "
            "loss falls, so this is no fault."
            for clip in self.always
        ]
        grow = [chain for chain in self.chains if chain.explodes]
        found += [f"The error grows by a factor of {factor_of(c):.3g} per {c.link}; the loss falls." for c in grow]
        return found

    def with_remedy(self, cause: Cause) -> Cause:
        """Return a cause with its advice and rules."""
        rules = tuple(self.rules(cause))
        advice = _ADVICE[cause.kind] + (_OF_RULES.get(cause.kind, "") if rules else "")
        return replace(cause, advice=advice, rules=rules)

    def rules(self, cause: Cause) -> list[str]:
        """Return the code of the rules against a cause."""
        finite = [size for size in self.sizes.values() if 0 < size < math.inf]
        if cause.kind == "exploding":
            chain = next(c for c in self.chains if c.explodes and c.sites[-1].partition("#")[0] == cause.site)
            sites = [cause.site] if chain.module else chain.sites[::-1]
            found = [f"gr.on({_name(site)}, ClipByNorm({2 * chain.sizes[0]:.2g}))" for site in sites]
            return found if self.bound < math.inf else [*found, 'gr.on("gradient:*", ClipByGlobalNorm(1.0))']
        if cause.kind == "one layer":
            layers = _layers(self.first)
            assert layers is not None  # which has the cause
            place = [site.partition("#")[0] for site in layers.sites].index(cause.site)
            return [f"gr.on({_name(layers.sites[place + 1])}, ClipByNorm({2 * layers.sizes[place]:.2g}))"]
        if cause.kind in ("spike", "bad batch", "learning rate") and finite:
            bound = 2 * (finite[0] if cause.kind == "learning rate" else median(finite))
            return [] if self.bound <= bound else [f'gr.on("step:*", ClipByGlobalNorm({bound:.2g}))']
        if cause.kind == "non-finite op" and not skips_updates(self.run):
            return ['gr.on("gradient:*", CheckFinite("skip"))']
        if cause.kind == "clip too low":
            bounds: dict[str, float] = {}  # by the rule that made the clips, of several clips the largest
            for clip in self.low:
                sizes = [size for size in clip.sizes if 0 < size < math.inf]
                of = f"{_rule(clip)}, {clip.action}"
                bounds[of] = max(bounds.get(of, 0.0), median(sizes) if sizes else 0.0)
            return [f"gr.on({of}({bound:.2g}))" for of, bound in bounds.items() if bound > 0]
        return []


def _name(site: str) -> str:
    return quoted(glob.escape(site))


def _rule(clip: ClipHistory) -> str:
    """Return the pattern of a clip's rule or site."""
    if {*":*?["} & set(clip.rule):
        return quoted(clip.rule)
    if is_group(clip.site):
        return '"step:*"' if clip.site.startswith("step:") else '"gradient:*"'
    return _name(clip.site)


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
_ADVICE: dict[Kind, str] = {
    "exploding": "Clip the error where it grows: a clip of the gradients acts when it has grown already. Or start from "
    "smaller weights.",
    "one layer": "Start the weights of this layer smaller, lower its learning rate, or normalize its input.",
    "vanishing": "Add residual connections or normalization, or use units that do not saturate. No clip is a remedy.",
    "non-finite op": "Mend that line (a clamp, an epsilon, an empty mask).",
    "learning rate": "Lower the learning rate, for a start to a tenth, or warm it up.",
    "dead": "Lower the learning rate, start from another bias, or use a unit that leaks (LeakyReLU, GELU).",
    "saturated": "Start from smaller weights, or normalize what comes in.",
    "spike": "Look at that step.",
    "bad batch": "Look at that batch, and filter or normalize such values.",
    "underflow": "Scale the loss (torch.amp.GradScaler), or use bfloat16.",
    "clip too low": "Raise the bound, as a first step, until the clip acts in about a tenth of the steps.",
}
_BOUNDED = " The suggested clip, with gr.guard(optimizer, model), bounds such an update."
_OF_RULES: dict[Kind, str] = {  # where there are rules
    "one layer": " The suggested clip holds its error back until then.",
    "non-finite op": " The suggested rule skips such updates, with gr.guard(optimizer, model).",
    **dict.fromkeys(("learning rate", "spike", "bad batch"), _BOUNDED),
}
