"""Updates with finite gradients and a non-finite result, from records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from gradrewrite._utils.formatting import listed
from gradrewrite.diagnostics.causes import Cause, words
from gradrewrite.diagnostics.nonfinite_steps import count_of, harmful_steps, is_bad
from gradrewrite.diagnostics.run_log import COUNTS, MAGNITUDES, Run, Step, kind_of, loss_series
from gradrewrite.ir.record_key import RecordKey

_OF_GRADIENTS = ("gradient", "group", "step")
_WRITTEN = ("param", "state")
_EXPLODED = 1e15  # a gradient
_EXTREMES = ("max", "min", "mean")
_SHOWN = 3
_SECOND_MOMENTS = frozenset(("exp_avg_sq", "square_avg", "sum", "max_exp_avg_sq"))
_MOMENTS = _SECOND_MOMENTS | {"exp_avg", "momentum_buffer", "exp_inf", "acc_delta", "grad_avg", "row_var", "col_var"}
_ADVICE = (
    "Look at the optimizer's eps in the dtype of the parameters (1e-8 is 0 in float16: take eps=1e-4, or float32 "
    "weights), and at its learning rate; gr.diagnose(model, batches, optimizer=...) names the rows and the reason."
)
_ADVICE_OF_STATE = (
    "Keep the parameters in float32 and compute under torch.autocast, or use bfloat16; or clip: such gradients are too "
    "large for the dtype of the state."
)


def update_in(run: Run) -> Cause | None:
    """Return the first update that made parameters or state non-finite of finite gradients.

    None where something was not finite before it. Infinite parameters with a finite loss to the end may be meant, and
    an infinite state before gradients that are not finite is made by what explodes.
    """
    if not any(one.at.kind in _WRITTEN for one in run.series.values()):
        return None
    names = {one.at.site.partition(":")[2] for one in run.select((*COUNTS, *MAGNITUDES), ("gradient", "step"))}
    meant: set[str] = set()
    is_spoilt = False  # by a gradient of an earlier update, whose result was not recorded
    for _, steps in groupby(run.steps, key=lambda step: run.update(step.step)):
        rows = [*steps]
        bad = [site for site in _bad_sites(run, rows, names) if site not in meant]
        if bad and _is_meant(run, rows, bad):
            meant.update(bad)
        elif bad:
            return _cause(run, rows, bad) if _is_finite(run, rows) and not is_spoilt else None
        is_recorded = any(run.series[address].at.kind in _WRITTEN for step in rows for address in step.records)
        has_bad = any(_has_bad_gradient(run, step) for step in rows) and not _is_skipped(rows)
        is_spoilt = not is_recorded and (is_spoilt or has_bad)
    return None


def _bad_sites(run: Run, rows: Sequence[Step], names: set[str]) -> list[str]:
    """Return the non-finite parameters, then state."""
    found: dict[str, None] = {}
    for step in rows:
        for address, value in step.records.items():
            key = run.series[address].at
            if key.kind in _WRITTEN and _is_bad(key, value, step.records):
                found[key.site] = None
    own = [site for site in found if site.startswith("state:") or not names or site.partition(":")[2] in names]
    return sorted(own, key=lambda site: site.startswith("state:"))


def _is_bad(key: RecordKey, value: float, records: Mapping[str, float]) -> bool:
    if key.record in _EXTREMES:
        return not math.isfinite(value) and records.get(f"nonfinite@{key.site}") != 0
    return is_bad(key.record, key.site, value, records)


def _has_bad_gradient(run: Run, step: Step) -> bool:
    found = ((run.series[address].at, value) for address, value in step.records.items())
    return any(key.kind in _OF_GRADIENTS and is_bad(key.record, key.site, value, step.records) for key, value in found)


def _is_finite(run: Run, rows: Sequence[Step]) -> bool:
    """Whether gradients were recorded, and they and the loss are finite."""
    kinds = {kind_of(address.partition("@")[2]) for step in rows for address in step.records}
    is_recorded = not kinds.isdisjoint(_OF_GRADIENTS)
    losses = [value for step in rows for address, value in step.records.items() if address == "loss@run"]
    return is_recorded and all(map(math.isfinite, losses)) and not any(_has_bad_gradient(run, step) for step in rows)


def _is_skipped(rows: Sequence[Step]) -> bool:
    records = (row for step in rows for row in step.records.items())
    return any(value > 0 for address, value in records if address.startswith("skipped@"))


def _is_meant(run: Run, rows: Sequence[Step], bad: Sequence[str]) -> bool:
    """Whether infinities may be masks, bounds that a user's optimizer keeps, or of an explosion."""
    if any(_has_nan(rows, site) for site in bad):
        return False
    loss, harmful = loss_series(run), harmful_steps(run)
    ends_finite = loss is None or math.isfinite(loss.values[-1])
    ends_finite &= all(kind_of(site) in _WRITTEN for one in harmful for site in one.sites)
    if any(kind_of(site) == "param" for site in bad):
        return ends_finite
    return not ends_finite or all(site.rpartition(".")[2] not in _MOMENTS for site in bad)


def _has_nan(rows: Sequence[Step], site: str) -> bool:
    values = [step.records.get(f"{name}@{site}", 0.0) for step in rows for name in (*MAGNITUDES, *_EXTREMES)]
    return any(map(math.isnan, values)) or any(step.records.get(f"nan@{site}", 0.0) > 0 for step in rows)


def _cause(run: Run, rows: Sequence[Step], bad: Sequence[str]) -> Cause:
    last, site = rows[-1], bad[0]
    step, name = last.step, site.partition(":")[2]
    place = run.place_of_update(step)
    others = [one.partition(":")[2] for one in bad[1:] if kind_of(one) == kind_of(site)]
    also = f", also {listed(others, _SHOWN)}" if others else ""
    text = f"{place}: every gradient was finite; step() made {name} {_extent(rows, site)}{also}."
    advice = _ADVICE
    moment = next((key for key in _SECOND_MOMENTS if f"max@state:{name}.{key}" in last.records), "")
    largest = last.records.get(f"max@state:{name}.{moment}", math.nan)
    if math.isfinite(largest):
        text = (
            f"{text[:-1]}: {moment} is at most {words(largest)} there, and where it is 0 step() divides by eps alone."
        )
    if kind_of(site) == "state":
        advice = _ADVICE_OF_STATE
        if name.rpartition(".")[2] in _SECOND_MOMENTS and not _has_nan(rows, site):
            text = f"{text[:-1]}: the square of a gradient is beyond its dtype, and these elements stop to move."
    count = count_of(last.records, site)
    figures = {"step": float(step)} | ({} if count is None else {"count": count}) | {"bad_sites": float(len(bad))}
    sizes = [one.by_step.get(step, 0.0) for one in run.select(MAGNITUDES, _OF_GRADIENTS)]
    figures |= {"limit": math.inf} if max(sizes, default=0.0) > _EXPLODED else {}
    return Cause("update", site, step=step, text=text, advice=advice, figures=figures)


def _extent(rows: Sequence[Step], site: str) -> str:
    last = rows[-1]
    count = count_of(last.records, site)
    known = [last.records[f"{name}@{site}"] for name in (*MAGNITUDES, *_EXTREMES) if f"{name}@{site}" in last.records]
    what = "NaN" if _has_nan(rows, site) else "infinite" if any(map(math.isinf, known)) else "not finite"
    return f"{what} ({count:.0f} elements are not finite)" if count is not None else what
