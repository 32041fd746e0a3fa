"""Where rows of the monitor are written: JSON lines, TensorBoard."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

_BEGIN = b'{"step"'
_BLOCK = 1 << 16


class Sink(Protocol):
    """Takes the rows of a run, each once, in order; two sinks with one key are one."""

    @property
    def key(self) -> object:
        """What tells it from others."""
        ...

    def write(self, step: int, records: Mapping[str, float]) -> None:
        """Write one row; OSError if that fails."""
        ...


class JsonLines:
    """A file with one object a line, ``{"step": 3, "records": {...}}``.

    A line is one write, so a kill leaves whole lines. A line that could not be written whole (a full disk) is taken
    back, and an unfinished one that an earlier run left is taken off when the file is opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open for appending; OSError if that fails."""
        self.path = Path(path)
        self.key = os.path.abspath(self.path)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        self._mend()

    def write(self, step: int, records: Mapping[str, float]) -> None:
        """Append one line; OSError if it does not fit."""
        line = json.dumps({"step": step, "records": {k: plain_number(v) for k, v in records.items()}}, allow_nan=False)
        data = line.encode() + b"\n"
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            if written:
                os.ftruncate(self._file, os.lseek(self._file, 0, os.SEEK_END) - written)
            raise

    def _mend(self) -> None:
        """Take off a line that an earlier run did not finish; OSError if the file is none of ours."""
        at = size = os.lseek(self._file, 0, os.SEEK_END)
        tail = b""
        while at > 0 and b"\n" not in tail:
            block = min(at, _BLOCK)
            at -= block
            tail = os.pread(self._file, block, at) + tail
        unfinished = tail.rpartition(b"\n")[2]
        if unfinished and not (unfinished.startswith(_BEGIN) or _BEGIN.startswith(unfinished)):
            raise OSError(errno.EINVAL, f"{self.path} is no file of JSON lines; give another path")
        if unfinished:
            os.ftruncate(self._file, size - len(unfinished))

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def __str__(self) -> str:
        return str(self.path)


class TensorBoard:
    """A ``SummaryWriter``, or anything with its ``add_scalar(tag, value, step)``; the tag is ``record/site``."""

    def __init__(self, writer: Any) -> None:
        """Write with this writer."""
        self.writer = writer
        self.key = id(writer)

    def write(self, step: int, records: Mapping[str, float]) -> None:
        """Add one scalar a record."""
        for address, value in records.items():
            record, _, site = address.partition("@")
            self.writer.add_scalar(f"{record}/{site}", value, step)

    def __str__(self) -> str:
        return f"TensorBoard ({type(self.writer).__name__})"


def plain_number(value: float) -> float | str:
    """A number as strict JSON has it; NaN and infinities as strings that ``float`` reads."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
