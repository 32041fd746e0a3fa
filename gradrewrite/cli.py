"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gradrewrite._version import __version__


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
    options = parser.parse_args(argv)
    return _demo(options.out)


def _demo(out: Path) -> int:
    from gradrewrite.demo import run

    try:
        run(out)
    except OSError as err:
        print(f"gradrewrite: cannot write to {out}: {err.strerror}; choose another folder with --out", file=sys.stderr)
        return 2
    return 0
