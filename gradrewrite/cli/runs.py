"""Commands that draw the records of runs: plot, report."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from gradrewrite import viz
from gradrewrite.cli.messages import Refused, reading, split_ending, warn

_FOLLOW = 2  # seconds between two looks at a file


def plot(options: argparse.Namespace) -> None:
    """Draw the curves of a run."""
    formats: dict[str, viz.CurveFormat] = {f".{form}": form for form in get_args(viz.CurveFormat)}
    name, ending = split_ending(options.out, list(formats))
    curves = reading(lambda: viz.plot(options.run, baseline=_by_name(options.baseline)))
    try:
        print(curves.render(name, formats[ending]))
    except OSError as err:
        raise Refused(f"cannot write {options.out}: {err.strerror}; choose another path with --out") from err


def report(options: argparse.Namespace) -> None:
    """Write the health report of a run, again and again with ``--follow``."""
    name, _ = split_ending(options.out, [".html"])
    if options.follow:
        _follow(options, name)
    print(_write_report(options, name))


def _follow(options: argparse.Namespace, name: str) -> None:
    """Write the report whenever a file has changed, until Ctrl-C; a file that is not there yet is waited for."""
    warn(f"following {', '.join(map(str, options.run))}, writing {name}.html until Ctrl-C")
    files = [*options.run, *(options.baseline or ())]
    seen: list[tuple[int, int]] = []
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            start = time.monotonic()
            found = [(stat.st_size, stat.st_mtime_ns) for path in files if path.exists() for stat in [path.stat()]]
            if found != seen and len(found) == len(files):
                _write_report(options, name, reload=_FOLLOW)
                seen = found
            # The work on a long run must not take more than half of a core from its training.
            time.sleep(max(_FOLLOW, time.monotonic() - start))


def _write_report(options: argparse.Namespace, name: str, *, reload: int = 0) -> str:
    page = reading(lambda: viz.report(_one_or_all(options.run), baseline=_by_name(options.baseline), clip=options.clip))
    try:
        return page.render(name, reload=reload)
    except OSError as err:
        raise Refused(f"cannot write {options.out}: {err.strerror}; choose another path with --out") from err


def _by_name(paths: Sequence[Path] | None) -> Path | dict[str, Path] | None:
    """Return one baseline as it is, and several by the names of their files."""
    if paths is None or len(paths) == 1:
        return paths[0] if paths else None
    is_unique = len({path.name for path in paths}) == len(paths)
    return {path.name if is_unique else str(path): path for path in paths}


def _one_or_all(paths: Sequence[Path]) -> Path | list[Path]:
    return paths[0] if len(paths) == 1 else list(paths)
