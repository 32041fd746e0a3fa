"""The command on the faults of runs: doctor."""

from __future__ import annotations

import argparse
import json

from gradrewrite.cli.messages import reading
from gradrewrite.diagnostics.doctor import skipped_rules
from gradrewrite.diagnostics.ranks import examine_ranks, read_ranks


def doctor(options: argparse.Namespace) -> None:
    """Print the verdict on a run, and its other findings."""
    runs = reading(lambda: read_ranks(options.run))
    health = examine_ranks(runs)
    if options.json:
        skipped = skipped_rules(health.run.steps)
        found = [*(fault.to_json() for fault in health.faults), *(rule.to_json() for rule in skipped)]
        print(json.dumps(found, indent=1, allow_nan=False))
        return
    ranks = f"{len(runs)} ranks: {', '.join(map(str, runs))}\n\n" if len(runs) > 1 else ""
    print(f"{ranks}{health}")
