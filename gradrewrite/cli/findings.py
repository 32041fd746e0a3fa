"""The command on the faults of runs: doctor."""

from __future__ import annotations

import argparse
import json

from gradrewrite.cli.messages import Refused, reading
from gradrewrite.diagnostics.causes import Cause
from gradrewrite.diagnostics.doctor import skipped_rules
from gradrewrite.diagnostics.judge import Evidence
from gradrewrite.diagnostics.ranks import examine_ranks, read_ranks
from gradrewrite.diagnostics.used_gradients import checked_clip, missing_norms, used_norms


def doctor(options: argparse.Namespace) -> None:
    """Print the verdict on a run, and its other findings."""
    runs = reading(lambda: read_ranks(options.run))
    health = examine_ranks(runs, evidence_of(options.clip))
    if options.json:
        skipped = skipped_rules(health.run.steps)
        found = [*(fault.to_json() for fault in health.faults), *(rule.to_json() for rule in skipped)]
        if options.clip is not None and not used_norms(health.run):
            found.append(Cause("not judged", "", text=missing_norms(options.clip)).to_json())
        print(json.dumps(found, indent=1, allow_nan=False))
        return
    ranks = f"{len(runs)} ranks: {', '.join(map(str, runs))}\n\n" if len(runs) > 1 else ""
    print(f"{ranks}{health}")


def evidence_of(clip: float | None) -> Evidence | None:
    """Return the evidence of a bound that the user names."""
    try:
        return None if clip is None else Evidence(clip=checked_clip(clip, "--clip"))
    except ValueError as err:
        raise Refused(str(err)) from err
