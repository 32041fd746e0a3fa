"""Remarks on the noise scale of groups of gradients."""

from __future__ import annotations

import math
from statistics import median

from gradrewrite.diagnostics.run_log import MIN_STEPS, Run, is_group


def noise_in(run: Run) -> list[str]:
    """Return a sentence for each noise scale: its median at last."""
    found = []
    for series in run.series.values():
        if series.at.record != "noise_scale" or not is_group(series.at.site):
            continue
        known = [value for value in series.values if math.isfinite(value)]
        if len(known) < MIN_STEPS:
            continue
        last, site = known[len(known) // 2 :], series.at.site
        if median(last) > 0:
            text = (
                f"is {median(last):.3g} examples (median of the last {len(last)} steps): a batch of that size has as "
            )
            text += "much noise as signal"
        else:
            text = "is not known yet, for the estimate of the true gradient is noise itself: take larger batches, or a "
            text += "larger decay"
        found.append(f"The noise scale of {site} {text}.")
    return found
