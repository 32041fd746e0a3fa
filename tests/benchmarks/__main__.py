"""Benchmarks: measure, write JSON, and write the page of the documentation from it.

python -m tests.benchmarks                            everything: JSON beside this file, docs/benchmarks.md
python -m tests.benchmarks --quick --out /tmp/bench   two small models, few ways, JSON and page in that folder
python -m tests.benchmarks --pages-of FILE.json ...   the page of runs that are there already
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

QUICK = ("ConvNet:small", "Two layers:small")
QUICK_WAYS = ("plain", "empty", "by hand", "clips", "statistics", "eager, hooks")


def main(argv: Sequence[str]) -> int:
    """Parse, measure, write."""
    options = _parser().parse_args(argv)
    from benchmarks import page, results

    if options.pages_of:
        page.write([results.read(path) for path in options.pages_of], options.page or ROOT / "docs" / "benchmarks.md")
        return 0
    from benchmarks.running import merged, run

    folder = options.out or Path(__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    result = run(_settings(options), lambda text: print(text, file=sys.stderr, flush=True))
    path = options.into or folder / f"all_{options.device}_{date.today():%Y%m}.json"
    if options.into:
        result = merged(results.read(path), result)
    results.write(result, path)
    # From the file: the page says what JSON says.
    default = folder / "benchmarks.md" if options.out else ROOT / "docs" / "benchmarks.md"
    page.write([results.read(path)], options.page or default)
    print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two small models, six ways, few rounds; no launches")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cases", nargs="+", metavar="MODEL:SIZE", help="of all cases, these")
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="of all ways, these and plain")
    parser.add_argument("--rounds", type=int, help="rounds of timed steps, at least")
    parser.add_argument("--seconds", type=float, help="go on with rounds for as long, to ten times as many")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile at one time")
    parser.add_argument("--no-launches", action="store_true", help="do not count launches on the simulated GPU")
    parser.add_argument("--no-warm", action="store_true", help="do not compile again with caches")
    parser.add_argument("--out", type=Path, help="folder of the JSON and, without --page, of the page")
    parser.add_argument("--into", type=Path, metavar="FILE.json", help="replace these cases in a run that is there")
    parser.add_argument("--page", type=Path, help="the page, a file .md; plots go into a folder of its name beside it")
    parser.add_argument("--pages-of", type=Path, nargs="+", metavar="FILE.json", help="measure nothing")
    return parser


def _settings(options: argparse.Namespace) -> object:
    from benchmarks.cases import CASES, WAYS
    from benchmarks.running import Settings

    fitting = [name for name, case in CASES.items() if options.device == "cuda" or not case.is_for_gpu]
    cases = options.cases or (QUICK if options.quick else fitting)
    ways = options.ways or (QUICK_WAYS if options.quick else list(WAYS))
    unknown = [name for name in cases if name not in CASES] + [name for name in ways if name not in WAYS]
    if unknown:
        _parser().error(f"unknown: {', '.join(unknown)}; cases: {', '.join(CASES)}; ways: {'; '.join(WAYS)}")
    has_launches = not (options.no_launches or options.quick or options.device == "cuda")
    return Settings(
        cases=cases,
        ways=["plain", *(name for name in ways if name != "plain")],
        device=options.device,
        rounds=options.rounds or (5 if options.quick else 40),
        seconds=options.seconds or (0 if options.quick else 15),
        jobs=options.jobs,
        has_launches=has_launches,
        has_bounds=has_launches and not options.cases,
        has_warm=not (options.quick or options.no_warm),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
