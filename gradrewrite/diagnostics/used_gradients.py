"""Gradients that updates used, against a clip and a baseline."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from statistics import median, mode

from gradrewrite.diagnostics.causes import Cause, words
from gradrewrite.diagnostics.judge import Evidence, outcome_of
from gradrewrite.diagnostics.run_log import BACKWARD, MAGNITUDES, Run, is_group
from gradrewrite.policy.numbers import python_number

ROUNDING = 0.02  # of a norm
LEAST_SCALE = 4  # log2: smaller powers of two come by chance
MIN_NORMS = 4
MOSTLY = 0.9
_MOST_EXAMPLES = 4096  # a larger power of two is no number of examples
_RULE = 'gr.on("step:*", Observe("norm"))'


def checked_clip(clip: float, caller: str) -> float:
    """Return a global norm as a float; ValueError if it is none."""
    number = python_number(clip)
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        raise ValueError(f"{caller}: clip is a number > 0, the global norm to which a training clips; got {clip!r}")
    return float(number)


def used_norms(run: Run) -> dict[int, float]:
    """Return the global norms of the gradients that updates used, by step.

    They are behind the clips at step sites: of groups, else of all parameters. Skipped updates are left out.
    """
    used = run.select(("norm", "total_norm"), ("step",))
    series = [one for one in used if is_group(one.at.site)] or used
    found: dict[int, float] = {}
    for one in series:
        if one.at.occurrence == 1:
            factors = run.series.get(f"factor@{one.at.site}")
            factor_at = {} if factors is None else factors.by_step
            for step, value in one.by_step.items():
                found[step] = math.hypot(found.get(step, 0.0), value * factor_at.get(step, 1.0))
    for one in run.select(("skipped",), ("optimizer",)):
        for step, value in one.by_step.items():
            if value > 0:
                found.pop(step, None)
    return {step: norm for step, norm in found.items() if math.isfinite(norm)}


def with_used(evidence: Evidence, run: Run, baseline: Run | None) -> Evidence:
    """Return evidence with the faults of a clip and of a loss scale."""
    clip, used = evidence.clip, evidence.used or used_norms(run)
    causes = [] if math.isnan(clip) else clip_causes(run, clip, used)
    remarks = [] if used or math.isnan(clip) else [missing_norms(clip)]
    exponent = None if baseline is None else scale_exponent(run, baseline)
    if baseline is not None and exponent is not None:
        text = scale_text(exponent)
        of_used = scale_exponent(run, baseline, ("step",))
        if (of_used or 0) > 0 or outcome_of(run, evidence.is_trained) != "learns":
            causes.append(_scale_cause(run, exponent, is_used=of_used is not None))
        else:
            remarks.append(f"Against the baseline, norms of the backward are {text}.")
    return replace(evidence, updates=(*evidence.updates, *causes), remarks=(*evidence.remarks, *remarks))


def missing_norms(clip: float) -> str:
    """Return the rule for a comparison with a clip, in words."""
    return f"clip={clip:g} was not compared: add {_RULE}, with gr.guard(optimizer, model), which sees what updates use."


def clip_causes(run: Run, clip: float, used: Mapping[int, float]) -> list[Cause]:
    """Return the fault of a clip that changed nothing, or saw scaled gradients."""
    above = {step: norm for step, norm in used.items() if norm > clip * (1 + ROUNDING)}
    if above:
        most = max(above.values())
        text = (
            f"clip={clip:g}, but the optimizer used gradients of norm up to {words(most)}: the clip ran before "
            f"backward(), after step(), or on other parameters. It is exceeded in {len(above)} of {len(used)} updates."
        )
        advice = (
            "Clip between the last backward() of an update and its step(), the parameters of the optimizer; or let the "
            "suggested rule clip, with gr.guard(optimizer, model)."
        )
        rules = (f'gr.on("step:*", ClipByGlobalNorm({clip:g}))',)
        figures = {"clip": clip, "largest": most, "above": len(above), "updates": len(used)}
        return [Cause("update", "", "", most / clip, min(above), text, advice, rules, figures=figures)]
    logs = {step: math.log2(clip / norm) for step, norm in used.items() if norm > 0}
    exact = {step: round(log) for step, log in logs.items() if abs(log - round(log)) <= math.log2(1 + ROUNDING)}
    scaled = {step: log for step, log in exact.items() if log >= LEAST_SCALE}
    is_all = all(log > LEAST_SCALE - math.log2(1 + ROUNDING) for log in logs.values())
    if not is_all or len(scaled) < max(MIN_NORMS, len(used) / 2):
        return []
    scale = 2 ** mode(scaled.values())
    text = (
        f"clip={clip:g}, but the norms that the optimizer used are at most {words(clip / scale)}, in {len(scaled)} of "
        f"{len(used)} updates a power of two below: the clip saw gradients scaled by {scale:,}: "
        "scaler.unscale_(optimizer) has to come before the clip."
    )
    advice = "Call scaler.unscale_(optimizer) once, between the last backward() of an update and the clip."
    figures = {"clip": clip, "scale": scale, "scaled": len(scaled), "updates": len(used)}
    return [Cause("loss scale", "", "", float(scale), min(scaled), text, advice, figures=figures)]


def scale_exponent(run: Run, other: Run, kinds: Collection[str] = BACKWARD) -> int | None:
    """Return the power of two between the norms of two runs; None without one.

    The first common steps tell: those behind may be of other weights.
    """
    known = {str(one.at): one.by_step for one in other.select(MAGNITUDES, kinds)}
    both = [(one.by_step, known[str(one.at)]) for one in run.select(MAGNITUDES, kinds) if str(one.at) in known]
    logs: list[float] = []
    for step in sorted(set().union(*(own.keys() & theirs.keys() for own, theirs in both))):
        pairs = [(own[step], theirs[step]) for own, theirs in both if step in own and step in theirs]
        logs += [math.log2(a / b) for a, b in pairs if 0 < a < math.inf and 0 < b < math.inf]
        if len(logs) >= MIN_NORMS:
            break
    if len(logs) < MIN_NORMS:
        return None
    exponent = round(median(logs))
    alike = sum(abs(log - exponent) <= math.log2(1 + ROUNDING) for log in logs)
    return exponent if abs(exponent) >= LEAST_SCALE and alike >= MOSTLY * len(logs) else None


def scale_text(exponent: int) -> str:
    """Return a power of two as a ratio in words, with its origin."""
    scale = 2 ** abs(exponent)
    ratio = f"{scale:,}-fold" if exponent > 0 else f"1/{scale:,} of the other's"
    of_sum = ", or a sum over so many examples in the place of their mean" if scale <= _MOST_EXAMPLES else ""
    return f"{ratio}: a loss scale{of_sum}"


def _scale_cause(run: Run, exponent: int, *, is_used: bool) -> Cause:
    who = "the gradients that the optimizer used" if is_used else "gradients and errors"
    text = f"Against the baseline, {who} are {scale_text(exponent)}."
    advice = "Take the scale back once an update: scaler.step(optimizer) does, and scaler.unscale_(optimizer) before."
    if not is_used:
        advice += " If that is done, give the scaler: gr.transform(..., loss_scale=scaler)."
    return Cause("loss scale", "", "", 2.0**exponent, run.steps[0].step, text, advice, figures={"exponent": exponent})
