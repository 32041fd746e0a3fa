"""The four figures in the logs of a framework by default, and histograms in those of wandb."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from gradrewrite._utils.exponent_counts import EDGES, ExponentCounts
from gradrewrite.diagnostics.comparison import TOTALS, comparable_sizes
from gradrewrite.diagnostics.growth import chains_of, factor_of
from gradrewrite.diagnostics.run_log import BACKWARD, COUNTS, Step, kind_of, last_run


def main_figures(steps: Sequence[Step], rates: Mapping[str, float]) -> dict[str, float]:
    """Return total norm, largest rate of a clip, number of non-finite elements, and worst growth of errors.

    Those that the records allow: norm and growth of the last step, the number over all steps, in the backward.
    """
    figures = {}
    run = last_run(steps[-1:])
    sizes = comparable_sizes(run, run)
    if sizes is not None and sizes[0] in TOTALS:
        figures["gradrewrite/total_norm"] = sizes[1][run.steps[-1].step]
    if rates:
        worst = max(rates, key=lambda address: rates[address])
        figures[f"gradrewrite/clip_rate:{worst.partition('@')[2]}"] = rates[worst]
    counts = [value for step in steps for address, value in step.records.items() if _is_count(address)]
    if counts:
        figures["gradrewrite/nonfinite"] = sum(counts)
    chains = chains_of(run, run.steps)
    if chains:
        chain = max(chains, key=lambda chain: abs(chain.slope))
        figures[f"gradrewrite/growth:{chain.module or 'layers'}"] = factor_of(chain)
    return figures


def log_histograms(exponents: Mapping[str, ExponentCounts]) -> None:
    """Add histograms to the next log of the wandb run of this process; nothing happens without one.

    The logs of a framework take numbers alone.
    """
    wandb = sys.modules.get("wandb")
    if wandb is None or getattr(wandb, "run", None) is None or not exponents:
        return
    edges = list(EDGES)
    found = {tag: wandb.Histogram(np_histogram=(one.histogram(), edges)) for tag, one in exponents.items()}
    wandb.log(found, commit=False)


def _is_count(address: str) -> bool:
    record, _, site = address.partition("@")
    return record in COUNTS and kind_of(site) in BACKWARD
