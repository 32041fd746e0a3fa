"""Figures of every site of a run, with suggested bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles

from gradrewrite.diagnostics.causes import Cause
from gradrewrite.diagnostics.clipping import CLIPS_ALWAYS, MIN_CLIP_STEPS, ClipHistory, clips_of_modules
from gradrewrite.diagnostics.run_log import Run, Series, as_executed, is_group, kind_of, rule_of
from gradrewrite.sites import kinds_with

COLUMNS = (
    "site", "clip and bound", "acted", "median factor", "worst factor", "share", "p50", "p90", "p99", "bound to try",
    "code that sets it",
)  # fmt: skip
_NUMBERS = re.compile(r"(?<![^.:])\d+(?![^.#])")
RARE = 0.2  # share of the steps: twice that of a bound at the 90 % quantile
_MEASURES = ("norm", "total_norm", "max_abs")
_ACTIONS = {"norm": "ClipByNorm", "total_norm": "ClipByGlobalNorm", "max_abs": "ClipByValue"}


@dataclass(frozen=True, slots=True)
class SiteHealth:
    """Figures of one site over a run; NaN if unknown."""

    site: str
    action: str  # name of the clip that acts there; ``""`` where the site was only measured
    # Name of the record that the quantiles are of: ``norm``, ``total_norm`` or ``max_abs``; ``""`` if none.
    measure: str
    steps: int  # how many steps reported it
    p50: float = math.nan  # median of the finite sizes before the clip
    p90: float = math.nan  # what 90 % of them stay below, interpolated linearly
    p99: float = math.nan  # what 99 % of them stay below
    # A bound that would act in a tenth of the steps: ``p90``, rounded to two digits; NaN with fewer than 20 finite
    # sizes, where they were 0, the bound is not known, or a bound is no remedy. Of a baseline where ``from_baseline``.
    suggestion: float = math.nan
    begin: int = -1  # first step, of a clip
    bound: float = math.nan  # last finite bound
    rate: float = math.nan  # share of the steps in which the clip acted
    # Median of size after the clip / size before, of the steps in which it acted; 1 if there are none.
    median_factor: float = math.nan
    worst_factor: float = math.nan  # smallest of these factors
    share: float = math.nan  # mean share of the elements that a clip by value changed
    # Median share of the squared total norm of the global clip that the gradient belongs to.
    norm_share: float = math.nan
    from_baseline: bool = False  # whether the suggestion is that of the baseline, which is larger
    keep: bool = False  # whether the bound may stay, for the clip acts rarely
    mark: str = ""  # a note on the site, where the verdict names it
    # Record that tells the clip from others at the site (``norm.2``); ``""`` for the first of its kind.
    record: str = ""
    key: str = ""  # text of the key of the record that tells the clip from all others; ``""`` without a clip
    num_calls: int = 1  # of the module in a step, whose figures are together
    rule: str = ""  # pattern of the rule that made the clip

    @property
    def name(self) -> str:
        """The site, with the number of its calls."""
        return f"{self.site} x {self.num_calls}" if self.num_calls > 1 else self.site

    @property
    def occasions(self) -> str:
        """The whole of its shares in words: ``the steps``, ``its 49 calls a step``."""
        return "the steps" if self.num_calls == 1 else f"its {self.num_calls} calls a step"

    @property
    def label(self) -> str:
        """The name, with the record of a further clip."""
        return f"{self.name} ({self.record})" if self.record else self.name

    @property
    def family(self) -> str:
        """Name of alike rows: rule and clip, or site."""
        return f"{self.rule}, {self.action}" if self.rule and self.action else _NUMBERS.sub("*", self.site)

    @property
    def code(self) -> str:
        """The rule with the suggested bound; ``""`` without one."""
        if not self.suggestion > 0 or self._named_group:
            return ""
        action = self.action or _ACTIONS[self.measure]
        if is_group(self.site):
            kind = "step" if self.site.startswith("step:") else "gradient"
            return f'gr.on("{kind}:*", {action}({self.suggestion:g}))'
        log = ", log=True" if action == "ClipByValue" else ""
        return rule_of(self.site, action, self.suggestion, log)

    @property
    def _named_group(self) -> str:
        """The recorded group; ``""`` for ``default``."""
        group = self.site.removeprefix("step:").removeprefix("group:")
        return group if is_group(self.site) and group.partition("#")[0] != "default" else ""

    def cells(self) -> tuple[str, ...]:
        """Return the texts of ``COLUMNS``; ``-`` for an unknown one."""
        notes = ", ".join(note for note in (self.record, self.mark) if note)
        site = f"{self.name} ({notes})" if notes else self.name
        clip = f"{self.action}({_number(self.bound)})" if self.action else "none"
        factors = _number(self.median_factor, "x "), _number(self.worst_factor, "x ")
        shares = [f"{percent(self.share)} of elements"] if self.share >= 0 else []
        shares += [f"{percent(self.norm_share)} of the squared total norm"] if self.norm_share >= 0 else []
        bound = f"{_number(self.suggestion)}{' (from the baseline)' if self.from_baseline else ''}"
        bound, code = "keep" if self.keep else bound, self.code
        if self._named_group and self.suggestion > 0:
            code = f"raise max_norm of group {self._named_group} to {self.suggestion:g}"
        sizes = map(_number, (self.p50, self.p90, self.p99))
        texts = (site, clip, percent(self.rate), *factors, "; ".join(shares), *sizes, bound, code)
        return tuple(text or "-" for text in texts)


def sites_of(run: Run) -> tuple[SiteHealth, ...]:
    """Return the figures of all sites with a measure."""
    known = clips_of_modules(run)
    clips = [clip for clip in known if any(clip.acted) or not math.isinf(clip.bound)]  # an infinite bound measures
    rows = [_of_clip(run, clip) for clip in clips]
    clipped = {_module(clip.site) for clip in clips}
    measured: dict[str, dict[str, Series]] = {}  # by module and call
    for one in (one for measure in _MEASURES for one in run.series.values() if one.record == measure):
        if one.at.kind not in ("activation", "data", "output", "run"):
            measured.setdefault(_module(one.at.site), {}).setdefault(one.at.site, one)
    rows += [_of_sizes(run, list(calls.values())) for name, calls in measured.items() if name not in clipped]
    sites = clipped | measured.keys()
    shares = [one for one in run.series.values() if one.record == "norm_share" and one.at.site not in sites]
    rows += [SiteHealth(one.at.site, "", "", len(one.steps), norm_share=_median(one.values)) for one in shares]
    order = {_module(site): n for n, site in enumerate(backward_order(run))}
    return tuple(sorted(rows, key=lambda row: order[_module(row.site)]))


def _module(site: str) -> str:
    return site.partition("#")[0] if site.startswith("error:") else site


def with_baseline(sites: Sequence[SiteHealth], baseline: Run) -> tuple[SiteHealth, ...]:
    """Return figures with the larger bounds of a baseline.

    Sizes before a clip that always acts are those of a run that it shaped, and may be too small. A site where a size
    of the baseline was NaN or infinite suggests nothing.
    """
    known: dict[tuple[str, str, str], float] = {}
    for row in sites_of(baseline):
        sizes = baseline.series.get(f"{row.record or row.measure}@{row.site}")
        if sizes is not None and all(map(math.isfinite, sizes.values)):
            known.setdefault((row.site, row.measure, row.record), row.suggestion)
    rows = []
    for row in sites:
        larger = known.get((row.site, row.measure, row.record), math.nan)
        is_larger = bool(row.action) and not math.isnan(row.bound) and larger > row.suggestion
        rows.append(replace(row, suggestion=larger, from_baseline=True) if is_larger else row)
    return tuple(rows)


def where_needed(sites: Sequence[SiteHealth], *, is_remedy: bool) -> tuple[SiteHealth, ...]:
    """Return figures with suggestions for frequent clips alone.

    None has one unless a higher bound is a remedy.
    """
    rows = []
    for row in sites:
        rare = bool(row.action) and row.rate <= RARE
        if rare or not row.action or not is_remedy:
            row = replace(
                row, suggestion=math.nan, from_baseline=False, keep=rare and is_remedy and row.steps >= MIN_CLIP_STEPS
            )
        rows.append(row)
    return tuple(rows)


def steps_of_clips(sites: Sequence[SiteHealth]) -> dict[str, int]:
    """Return the number of steps of each clip."""
    by_norm = {row.label for row in sites if row.action and row.measure != "max_abs"}
    return {
        f"{row.label}{' (by value)' * (row.measure == 'max_abs' and row.label in by_norm)}": row.steps
        for row in sites
        if row.action
    }


def clips_always(sites: Sequence[SiteHealth]) -> list[Cause]:
    """Return a finding for each clip with a high rate."""
    found = [row for row in sites if row.steps >= MIN_CLIP_STEPS and row.rate > CLIPS_ALWAYS]
    found.sort(key=lambda row: (-row.rate, 1.0 if math.isnan(row.median_factor) else row.median_factor))
    return [_always(row) for row in found]


def _always(row: SiteHealth) -> Cause:
    figures = {"share": row.rate, "steps": row.steps, "bound": row.bound, "percentile_90": row.p90}
    figures |= {"median_factor": row.median_factor, "smallest_factor": row.worst_factor}
    figures = {name: value for name, value in figures.items() if not math.isnan(value)}
    by = "value" if row.measure == "max_abs" else "norm"
    bound = f", with the bound {row.bound:.4g}," if "bound" in figures else ""
    left = f", and leaves {percent(row.median_factor)} of the size (median)" if "median_factor" in figures else ""
    times = f"{row.steps} steps" if row.num_calls == 1 else f"{row.occasions}, in {row.steps} steps"
    text = f"The clip by {by} at {row.label}{bound} acts in {percent(row.rate)} of {times}{left}."
    advice = "a clip that acts in nearly all steps sets the size of the updates by itself."
    advice = f"Raise the bound: {advice}" if bound else f"Widen the range of this clip: {advice}"
    if row.suggestion > 0:
        raised = f"Raise the bound at {row.label} from {row.bound:.4g} to about {row.suggestion:g}"
        advice = (
            f"{raised} (from the baseline), which 90 % of the sizes there stay below."
            if row.from_baseline
            else f"{raised}, which 90 % of the sizes seen stay below, as a first step, and again until the clip acts "
            "in about a tenth of the steps."
        )
    return Cause("clip acts always", row.site, step=row.begin, text=text, advice=advice, figures=figures, key=row.key)


def backward_order(run: Run) -> list[str]:
    """Return the sites in backward order, kind by kind."""
    sites = as_executed(one.at.site for one in run.series.values())
    turned = kinds_with(lambda traits: traits.of_parameter and traits.has_units)
    parts = [[site for site in sites if kind_of(site) == kind] for kind in dict.fromkeys(map(kind_of, sites))]
    return [site for part in parts for site in (reversed(part) if kind_of(part[0]) in turned else part)]


def _of_clip(run: Run, clip: ClipHistory) -> SiteHealth:
    share = run.series.get(str(clip.share))
    shares = [] if share is None else [value for value in share.values if 0 <= value <= 1]
    factors = [factor for factor in clip.factors if not math.isnan(factor)]
    suggests = not math.isnan(clip.bound) and clip.action in _ACTIONS.values()  # a single bound, given by the user
    return SiteHealth(
        clip.site,
        clip.action,
        clip.record,
        len(set(clip.steps)),
        *_quantiles(clip.sizes, suggests=suggests),
        begin=clip.steps[0],
        num_calls=clip.num_calls,
        bound=clip.bound,
        rate=clip.rate,
        median_factor=clip.median_factor,
        worst_factor=min(factors, default=math.nan),
        record=clip.key.name if clip.key.occurrence > 1 else "",
        key=str(clip.key),
        rule=clip.rule,
        share=fmean(shares) if shares else math.nan,
        norm_share=_norm_share(run, clip.site),
    )


def _of_sizes(run: Run, calls: Sequence[Series]) -> SiteHealth:
    first = calls[0]
    site = first.at.site if len(calls) == 1 else _module(first.at.site)
    values = [value for one in calls for value in one.values]
    figures, share = _quantiles(values), _norm_share(run, site)
    return SiteHealth(site, "", first.record, len(first.steps), *figures, norm_share=share, num_calls=len(calls))


def _norm_share(run: Run, site: str) -> float:
    found = run.series.get(f"norm_share@{site}")
    return math.nan if found is None else _median(found.values)


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else math.nan


def _quantiles(values: Iterable[float], *, suggests: bool = True) -> tuple[float, float, float, float]:
    """Return the quantiles of ``SiteHealth``, and the suggested bound."""
    sizes = [value for value in values if math.isfinite(value)] or [math.nan]
    cuts = quantiles(sizes, n=100, method="inclusive") if len(sizes) > 1 else sizes * 99
    suggests = suggests and len(sizes) >= MIN_CLIP_STEPS and cuts[89] > 0
    return cuts[49], cuts[89], cuts[98], float(f"{cuts[89]:.2g}") if suggests else math.nan


def _number(value: float, times: str = "") -> str:
    return "" if math.isnan(value) else f"{times}{value:.3g}"


def percent(share: float) -> str:
    """Return a share as text; ``""`` for NaN."""
    if math.isnan(share):
        return ""
    scaled = 100 * share
    if 0 < scaled < 1 or 99.5 <= scaled < 100:
        return f"{scaled:.2g} %" if scaled < 1 else "> 99 %"
    return f"{scaled:.0f} %"
