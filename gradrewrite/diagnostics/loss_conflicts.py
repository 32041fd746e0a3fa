"""Remarks on losses with opposite gradients, by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import Literal, TypeAlias

from typing_extensions import assert_never

from gradrewrite._utils.grouping import grouped
from gradrewrite.diagnostics.nonfinite_steps import has_counts
from gradrewrite.diagnostics.run_log import MIN_STEPS, Run, Series, is_group, kind_of, listed
from gradrewrite.diagnostics.site_health import percent

OFTEN = 0.2  # share of the steps
OPPOSED = -0.05  # median of the cosines < 0; nearer to 0 losses are orthogonal, and a sum undoes nothing
_MOST_PAIRS = 3
_COSINE, _WEIGHT = re.compile(r"loss_cosine(?:_(\d+)_(\d+))?"), re.compile(r"loss_weight_(\d+)")
_Lack: TypeAlias = Literal["no gradient", "not finite", "no weight"]


@dataclass(frozen=True, slots=True)
class Conflict:
    """The conflict of two losses at a site."""

    pair: tuple[int, int]
    site: str
    steps: int  # with a cosine
    share: float  # of these, with a cosine < 0
    cosine: float  # median of those < 0; 0 without one

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Key of the order from the worst on."""
        return not self.is_often, -self.share, self.cosine

    @property
    def is_often(self) -> bool:
        """Whether it is more than noise."""
        return self.share >= OFTEN and self.cosine <= OPPOSED

    @property
    def place(self) -> str:
        """The module, or the group."""
        kind, _, name = self.site.partition(":")
        module = name.partition("#")[0].partition("/")[0]
        module = module.rpartition(".")[0] if kind == "gradient" else module
        return self.site if is_group(self.site) or not module else module

    def __str__(self) -> str:
        often = f"in {percent(self.share)} of {self.steps} steps at {self.site}"
        return f"{often} (median of these {self.cosine:.2g})"


def cosines_of(run: Run) -> list[Series]:
    """Return the cosines of pairs of losses; of two losses the only one."""
    found = [one for one in run.series.values() if _COSINE.fullmatch(one.at.record)]
    paired = {one.at.site for one in found if one.at.record != "loss_cosine"}
    return [one for one in found if one.at.record != "loss_cosine" or one.at.site not in paired]


def conflicts_in(run: Run) -> list[str]:
    """Return sentences on the losses with opposite gradients, the worst first, and on those without weight.

    A cosine is NaN where a loss has no gradient: that is no conflict.
    """
    return [*_conflicts(run), *_idle(run)]


def _conflicts(run: Run) -> list[str]:
    known = [one for series in cosines_of(run) if (one := _conflict(series)) is not None]
    if not known:
        return []
    found = sorted(known, key=lambda one: one.rank)
    pairs = grouped((one.pair, one) for one in found)
    texts = [_sentence(own) for own in pairs.values() if any(one.is_often for one in own)]
    if not texts:
        return [_calm(found[0])]
    more = len(texts) - _MOST_PAIRS
    texts[_MOST_PAIRS:] = [f"{more} further pair{'s' * (more > 1)} of losses conflict less often."] * (more > 0)
    has_weights = any(_WEIGHT.fullmatch(one.at.record) for one in run.series.values())
    return texts if has_weights else [*texts, _advice([one.site for one in known])]


def _conflict(series: Series) -> Conflict | None:
    """Return a series as a conflict; None with few cosines."""
    known = [value for value in series.values if math.isfinite(value)]
    if len(known) < MIN_STEPS:
        return None
    match = _COSINE.fullmatch(series.at.record)
    assert match is not None
    pair = (int(match[1] or 0), int(match[2] or 1))
    negative = [value for value in known if value < 0]
    cosine = median(negative) if negative else 0.0
    return Conflict(pair, series.at.site, len(known), len(negative) / len(known), cosine)


def _sentence(found: Sequence[Conflict]) -> str:
    """Return a sentence on one pair, the worst place first."""
    places = [own[0] for own in grouped((one.place, one) for one in found).values()]
    first, *also = [one for one in places if one.is_often]
    more = [f"also in {listed([f'{one.place} ({percent(one.share)})' for one in also])}"] * bool(also)
    rest = len(places) - len(also) - 1
    more += [f"rarely or never in {rest} other place{'s' * (rest > 1)}"] * (rest > 0)
    return f"{'; '.join([f'Losses {_named(first.pair)} conflict (cosine < 0) {first}', *more])}."


def _calm(most: Conflict) -> str:
    if most.share == 0:
        return f"No losses conflict: every cosine of {most.steps} steps is >= 0."
    return f"No losses conflict often: losses {_named(most.pair)} have a cosine < 0 {most}, which is the most."


def _named(pair: tuple[int, int]) -> str:
    return f"{pair[0]} and {pair[1]}"


def _advice(sites: Sequence[str]) -> str:
    """Return the rule for the parameters that losses share, or for the last error."""
    modules = [site.partition(":")[2].split(".")[:-1] for site in sites if kind_of(site) == "gradient"]
    errors = [site for site in sites if kind_of(site) == "error"]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
    where = errors[-1] if errors and not modules else f"gradient:{'.'.join([*(part for part, *_ in shared), '*'])}"
    rule = f'gr.on("{where}", gr.passes.WeighLosses(gr.passes.UPGrad()))'
    return f"{rule} weighs the losses so that none undoes another."


def _idle(run: Run) -> list[str]:
    """Return sentences on losses with the gradient 0 or NaN, or with the weight 0."""
    found = []
    for site, number in dict.fromkeys(_weighed(run)):
        weights, norms = (_by_step(run, f"loss_{what}_{number}@{site}") for what in ("weight", "norm"))
        steps = norms or weights
        counts: dict[_Lack, int] = {
            "no gradient": sum(norm == 0 for norm in norms.values()),
            "not finite": sum(not math.isfinite(value) for value in steps.values()),
            # Not where its gradient is 0, or where MGDA gives a loss without a gradient all the weight.
            "no weight": sum(
                weight == 0 and norms.get(step) != 0 and not _weighs_nothing(run, site, step)
                for step, weight in weights.items()
            ),
        }
        for lack, count in counts.items():
            if len(steps) >= MIN_STEPS and count / len(steps) >= OFTEN:
                often = f"in {percent(count / len(steps))} of {len(steps)} steps in {site}"
                found.append(((lack, often), number))
    return [_lacking(lack, often, losses, run) for (lack, often), losses in grouped(found).items()]


def _weighed(run: Run) -> list[tuple[str, str]]:
    """Return groups and numbers of losses with weights."""
    matches = ((one.at.site, _WEIGHT.fullmatch(one.at.record)) for one in run.series.values())
    return [(site, match[1]) for site, match in matches if match is not None and is_group(site)]


def _by_step(run: Run, address: str) -> Mapping[int, float]:
    series = run.series.get(address)
    return {} if series is None else series.by_step


def _weighs_nothing(run: Run, site: str, step: int) -> bool:
    """Whether a loss without a gradient has a weight in a group at a step."""
    numbers = [number for where, number in _weighed(run) if where == site]
    pairs = [[_by_step(run, f"loss_{what}_{n}@{site}").get(step) for what in ("norm", "weight")] for n in numbers]
    return any(norm == 0 and weight for norm, weight in pairs)


def _lacking(lack: _Lack, often: str, losses: Sequence[str], run: Run) -> str:
    is_one = len(losses) == 1
    who = f"Loss {losses[0]} has" if is_one else f"Losses {listed(losses)} have"
    match lack:
        case "no gradient":
            return (
                f"{who} the gradient 0 {often}, which counts in the weights of all: these parameters are not reached, "
                "backward was called without the loss, or a metric was not detached."
            )
        case "not finite":
            checks = "" if has_counts(run) else '; gr.on("gradient:*", CheckFinite()) names the op and its line'
            return f"{who} a gradient that is not finite {often}, and so all weights are NaN{checks}."
        case "no weight":
            teach = "teaches" if is_one else "teach"
            return f"{who} the weight 0 {often}, and {teach} it nothing then; UPGrad gives each loss a weight > 0."
        case _:
            assert_never(lack)
