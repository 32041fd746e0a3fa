"""The command on the examples of ``gradrewrite.examples.demo``: demo."""

from __future__ import annotations

import argparse

from gradrewrite.cli.messages import Refused
from gradrewrite.examples.demo import run


def demo(options: argparse.Namespace) -> None:
    """Run the demo."""
    try:
        run(options.out)
    except OSError as err:
        raise Refused(f"cannot write to {options.out}: {err.strerror}; choose another folder with --out") from err
