"""Messages of commands on the error stream, one line each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")


class Refused(Exception):
    """One line for the user, with the way out."""


def warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a message in one line, on the error stream."""
    print(f"gradrewrite: {' '.join(str(message).split())}", file=sys.stderr)


def split_ending(path: Path, endings: Sequence[str]) -> tuple[str, str]:
    """A path without its ending, and the ending."""
    found = next((e for e in endings if path.name.endswith(e) and path.name != e), None)
    if found is None:
        raise Refused(f"--out {path}: the ending says the format; use one of {', '.join(endings)}")
    return str(path)[: -len(found)], found


def reading(read: Callable[[], _T]) -> _T:
    """Call a reader of record files; refuse unreadable ones."""
    try:
        return read()
    except OSError as err:
        raise Refused(f"cannot read {err.filename}: {err.strerror}; give a file of monitor.to_jsonl") from err
    except ValueError as err:
        raise Refused(str(err)) from err


def one_line(err: BaseException) -> str:
    """An error with its type, in one line."""
    return " ".join(f"{type(err).__name__}: {err}".split())
