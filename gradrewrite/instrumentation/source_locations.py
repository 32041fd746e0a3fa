"""Source lines of the user's code."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary

import torch
from torch import fx

from gradrewrite.ir.attribution import attribute_nodes, backward_names
from gradrewrite.ir.marked_graph import MarkedJointGraph

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')
_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parents[1])
_LIBRARIES = tuple(f"{package}{os.sep}" for package in _PACKAGES)  # not torchvision
_EXAMPLES = f"{_PACKAGES[1] / 'examples'}{os.sep}"


def source_of(node: fx.Node) -> str:
    """``file:line "code"`` of the user's innermost line that made a node of a Dynamo graph; ``""`` if none did."""
    return last_line_in(node.stack_trace or "")


def line_in(marked: MarkedJointGraph, node: fx.Node) -> str:
    """Return the user's line behind a node of a joint graph, or of the op that it is the backward of."""
    if (found := source_of(node)) or not marked.values:  # none in a replay
        return found
    number = attribute_nodes(marked.graph, backward_names(marked.graph)).get(node)
    return "" if number is None else marked.values[number].source


def last_line_in(trace: str) -> str:
    """``file:line "code"`` of the user's innermost line in the text of a traceback; ``""`` if there is none."""
    return _innermost([f for f in _FRAME.findall(trace) if not _is_library(f[0])])


def user_line(stack: Sequence[FrameSummary], *, only_user: bool = False) -> str:
    """``file:line "code"`` of the user's innermost line in a stack; if there is none, ``""`` or a library's line."""
    frames = [(f.filename, str(f.lineno), f.line or "") for f in stack if f.line or not f.filename.startswith("<")]
    own = [f for f in frames if not _is_library(f[0])]
    return _innermost(own if own or only_user else frames)


def _innermost(frames: Sequence[tuple[str, str, str]]) -> str:
    if not frames:
        return ""
    file, line, code = frames[-1]
    return f'{Path(file).name}:{line} "{code.strip()}"'


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) and not file.startswith(_EXAMPLES)
