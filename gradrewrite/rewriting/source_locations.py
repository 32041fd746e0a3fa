"""Source lines of the user's code."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')
_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parents[1])
_LIBRARIES = tuple(f"{package}{os.sep}" for package in _PACKAGES)  # not torchvision
_EXAMPLES = f"{_PACKAGES[1] / 'examples'}{os.sep}"


def source_of(node: fx.Node) -> str:
    """``file:line "code"`` of the user's innermost line that made a node of a Dynamo graph; ``""`` if none did."""
    return _innermost([f for f in _FRAME.findall(node.stack_trace or "") if not _is_library(f[0])])


def user_line(stack: Sequence[FrameSummary]) -> str:
    """``file:line "code"`` of the user's innermost line in a stack; of a library's where there is no other."""
    frames = [(f.filename, str(f.lineno), f.line or "") for f in stack]
    return _innermost([f for f in frames if not _is_library(f[0])] or frames)


def _innermost(frames: Sequence[tuple[str, str, str]]) -> str:
    if not frames:
        return ""
    file, line, code = frames[-1]
    return f'{Path(file).name}:{line} "{code.strip()}"'


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) and not file.startswith(_EXAMPLES)
