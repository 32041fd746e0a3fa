"""Versions of torch: the tested range, and errors for private names that a version lacks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator

OLDEST, NEWEST = (2, 11), (2, 15)  # the suite runs on both, see tests/versions.sh


def installed_torch() -> str:
    """Return the version of torch, from its metadata if it is not imported."""
    if "torch" not in sys.modules:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version("torch")
    import torch

    return str(torch.__version__)


def check_torch(version: str | None = None) -> str:
    """Raise ImportError for a torch older than the tested range; return a warning of a newer one, else ``""``."""
    version = installed_torch() if version is None else version
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return ""  # a build without a number
    number = int(found[1]), int(found[2])
    if number < OLDEST:
        raise ImportError(
            f"gradrewrite needs torch {_text(OLDEST)} to {_text(NEWEST)}, and torch {version} is installed; "
            f"pip install 'torch>={_text(OLDEST)}'"
        )
    if number > NEWEST:
        return (
            f"gradrewrite was tested with torch {_text(OLDEST)} to {_text(NEWEST)}, and torch {version} is installed: "
            "run its tests (pytest -m upstream) to see whether what it relies on still holds"
        )
    return ""


@contextlib.contextmanager
def needed_for(fact: str) -> Iterator[None]:
    """Use private names of torch inside the block, for a fact that ``docs/design.md`` lists and the error names."""
    try:
        yield
    except (ImportError, AttributeError) as err:
        raise type(err)(
            f"{err}. gradrewrite relies on this fact: {fact}. It does not hold in torch {installed_torch()}; versions "
            f"{_text(OLDEST)} to {_text(NEWEST)} are tested"
        ) from err


def _text(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"
