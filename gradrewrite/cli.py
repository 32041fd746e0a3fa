"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gradrewrite._version import __version__
from gradrewrite.doctor import diagnose, report
from gradrewrite.history import read_jsonl


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; those of the process if None.

    Returns:
        Exit status: 0, or 2 with one line on the error stream that says what to do.
    """
    parser = argparse.ArgumentParser(
        prog="gradrewrite", description="A compiler for the backward pass of PyTorch models."
    )
    parser.add_argument("--version", action="version", version=f"gradrewrite {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train two models that explode, with and without clipping in the backward")
    demo.add_argument("--out", type=Path, default=Path(), help="folder for demo.json (default: the current one)")
    doctor = commands.add_parser("doctor", help="say in plain words what is wrong with a run, from its records")
    doctor.add_argument("run", type=Path, metavar="run.jsonl", help="what monitor.to_jsonl wrote")
    doctor.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    options = parser.parse_args(argv)
    if options.command == "doctor":
        return _doctor(options.run, as_json=options.json)
    return _demo(options.out)


def _demo(out: Path) -> int:
    from gradrewrite.demo import run

    try:
        run(out)
    except OSError as err:
        print(f"gradrewrite: cannot write to {out}: {err.strerror}; choose another folder with --out", file=sys.stderr)
        return 2
    return 0


def _doctor(path: Path, *, as_json: bool) -> int:
    try:
        steps = read_jsonl(path)
    except OSError as err:
        print(f"gradrewrite: cannot read {path}: {err.strerror}; give a file of monitor.to_jsonl", file=sys.stderr)
        return 2
    except ValueError as err:
        print(f"gradrewrite: {err}; mend or remove the line, or give a file of monitor.to_jsonl", file=sys.stderr)
        return 2
    found = diagnose(steps)
    print(json.dumps([one.to_json() for one in found], indent=1, allow_nan=False) if as_json else report(found, steps))
    return 0
