"""The command that judges the records of runs: doctor."""

from __future__ import annotations

import argparse
import json

from gradrewrite.cli.messages import reading
from gradrewrite.diagnostics import doctor as diagnosis
from gradrewrite.diagnostics.ranks import diagnose_ranks, read_ranks


def doctor(options: argparse.Namespace) -> None:
    """Print the findings on a run."""
    runs = reading(lambda: read_ranks(options.run))
    steps = max(runs.values(), key=len)  # of ranks that recorded alike; to say how much was looked at
    found = diagnose_ranks(runs)
    as_json = [*(one.to_json() for one in found), *(rule.to_json() for rule in diagnosis.skipped_rules(steps))]
    text = json.dumps(as_json, indent=1, allow_nan=False) if options.json else diagnosis.report(found, steps)
    print(text if options.json or len(runs) == 1 else f"{len(runs)} ranks: {', '.join(map(str, runs))}\n\n{text}")
