"""Outcomes of the cases of a suite, and the lists of those that do not pass.

A case either passes, or its outcome stands in ``refusals/<suite>.txt``, one a line: name, kind, type of the exception,
reason. The kinds are

- ``torch``: plain ``torch.compile(fullgraph=True)`` raises too;
- ``refused``: gradrewrite raises or warns that it cannot follow;
- ``wrong``: a result differs from the reference;
- ``crash``: any other exception.

A new refusal fails the suite, and so does one that has vanished; with another torch than that of the lists only a case
that becomes ``wrong`` or ``crash`` does. ``python tests/conformance/write_refusals.py <suite>`` makes a list anew.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import gradrewrite as gr

REFUSALS = Path(__file__).parent / "refusals"
TORCH = "2.13."  # the version of the lists
Check = Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    """What became of a case; two are equal if kind and type are, for reasons contain names of nodes and numbers."""

    kind: str
    error: str = ""
    reason: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and (self.kind, self.error) == (other.kind, other.error)

    def __hash__(self) -> int:
        return hash((self.kind, self.error))


PASSES = Outcome("passes")


class TorchRefusesError(Exception):
    """Plain torch.compile raises too; the cause says what."""


def outcome_of(check: Check) -> Outcome:
    """Run a case; a warning of gradrewrite is an error, those of others are not looked at."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", gr.RewriteWarning)
            check()
    except pytest.skip.Exception:
        raise
    except Exception as err:
        return _of_error(err)
    finally:
        torch.compiler.reset()
    return PASSES


def _of_error(err: Exception) -> Outcome:
    if isinstance(err, TorchRefusesError):
        assert err.__cause__ is not None
        return Outcome("torch", type(err.__cause__).__name__, _first_line(err.__cause__))
    if isinstance(err, TypeError | ValueError) and _is_ours(err):
        return Outcome("refused", type(err).__name__, _first_line(err))
    kinds = {gr.RewriteError: "refused", gr.RewriteWarning: "refused", AssertionError: "wrong"}
    kind = next((kind for error, kind in kinds.items() if isinstance(err, error)), "crash")
    return Outcome(kind, type(err).__name__, _first_line(err))


def _is_ours(err: BaseException) -> bool:
    """Whether gradrewrite has raised an error itself."""
    frames = traceback.extract_tb(err.__traceback__)
    return Path(frames[-1].filename).is_relative_to(Path(gr.__file__).parent)


def _first_line(err: BaseException) -> str:
    line = next((line.strip() for line in str(err).splitlines() if line.strip()), "")
    return re.sub(r"0x[0-9a-f]+", "0x...", line).replace("|", "/")[:140]


def expected(suite: str) -> dict[str, Outcome]:
    """The list of a suite."""
    path = REFUSALS / f"{suite}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    split = [[part.strip() for part in line.split("|")] for line in lines if not line.startswith("#")]
    return {name: Outcome(*rest) for name, *rest in split}


def write(suite: str, found: dict[str, Outcome]) -> None:
    """Write the list of a suite."""
    rows = [(n, o.kind, o.error, o.reason) for n, o in sorted(found.items()) if o != PASSES]
    lines = ["# name | kind | error | reason", *(" | ".join(row).rstrip() for row in rows)]
    REFUSALS.joinpath(f"{suite}.txt").write_text("\n".join(lines) + "\n")


def check_outcome(suite: str, name: str, check: Check) -> None:
    """Fail if the outcome of a case is not that of the list, or, with another torch, if it is a fault."""
    wanted, found = expected(suite).get(name, PASSES), outcome_of(check)
    is_fault = found.kind in ("wrong", "crash")
    assert found == wanted or not (torch.__version__.startswith(TORCH) or is_fault), (
        f"{name}: {found}, the list has {wanted}; python tests/conformance/write_refusals.py {suite} makes it anew"
    )
