"""Run whole suites, write the lists of what does not pass, and print their figures.

``python tests/conformance/write_refusals.py [SUITE ...]``; without an argument all of them. With ``--only TEXT`` the
cases whose names contain it; the others keep their lines.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # as conftest.py does

from conformance.outcomes import Outcome, expected, outcome_of, write

SUITES = (
    "op_db",
    "module_db",
    "per_example_ops",
    "per_example_modules",
    "optim_db",
    "hop_db",
    "opacus_layers",
    "callbacks",
    "zoo",
)


def run(suite: str, only: str) -> dict[str, Outcome]:
    """The outcomes of the cases of a suite, written as they come; those without a gradient are left out."""
    module = importlib.import_module(f"conformance.test_{suite}")
    known = {name: outcome for name, outcome in expected(suite).items() if name in module.CASES}
    found: dict[str, Outcome] = {}
    for name in (name for name in module.CASES if only in name):
        start = time.perf_counter()
        try:
            found[name] = outcome_of(lambda name=name: module.check(name))
        except pytest.skip.Exception as reason:
            print(f"{suite} {name}: skipped, {reason}", flush=True)
            continue
        write(suite, known | found)
        print(f"{suite} {name}: {found[name]} {time.perf_counter() - start:.1f} s", flush=True)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", default=SUITES, choices=SUITES)
    parser.add_argument("--only", default="", help="a part of the names of cases")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    for suite in arguments.suites:
        found = run(suite, arguments.only)
        print(suite, dict(Counter(outcome.kind for outcome in found.values())), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
