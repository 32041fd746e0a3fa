"""Files that are written as a whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give the path of a part of a new file, and make its folder.

    The part becomes the file at the end. Who opens the file sees the old one or the new one. After an error no part is
    left, and an OSError names the file.
    """
    target = Path(path)
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as err:
        if err.errno is None:  # of a library, which names no file
            raise
        raise OSError(err.errno, err.strerror, str(target)) from err
