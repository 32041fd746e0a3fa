"""The work of tracing grows in proportion to the number of ops: executed lines of this package, not time."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import fx

import gradrewrite as gr
from gradrewrite._compat import dynamo_cache
from gradrewrite.ir import editing, markers
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByValue

from helpers import mostly_slow
from models.recurrence import Ending, Recurrence

OURS = str(Path(gr.__file__).parent)
CLIPS = [
    gr.on("error:*", ClipByValue(1.0)),
    gr.on("*/*", ClipByValue(2.0)),
    gr.on("gradient:*", ClipByGlobalNorm(1.0)),
]


def lines_of(run: Callable[[], object]) -> Counter[str]:
    """Numbers of executed lines of each function of this package."""
    found: Counter[str] = Counter()

    def line(frame: FrameType, event: str, _: Any) -> Any:
        found[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += event == "line"
        return line

    def call(frame: FrameType, *_: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(OURS) else None

    before = sys.gettrace()
    gc.collect()
    dynamo_cache.clear_dropped()
    gc.disable()  # what is run where the models of other tests are collected is no work of this one
    sys.settrace(call)
    try:
        run()
    finally:
        sys.settrace(before)
        gc.enable()
    return found


CASES: list[tuple[Ending, Any]] = [
    ("summed", CLIPS),
    ("written", CLIPS),
    ("last", CLIPS),
    ("stacked", CLIPS),
    ("last", []),
    ("last", gr.on("*", CheckFinite())),
]


@pytest.mark.long
@pytest.mark.parametrize(("ending", "policy"), mostly_slow(CASES, quick=2))
def test_lines_are_linear_in_the_steps(ending: Ending, policy: Any) -> None:
    def trace(steps: int) -> Counter[str]:
        model = gr.transform(Recurrence(steps, ending), policy)
        return lines_of(lambda: model.trace(torch.randn(4, 8)))

    few, some, many = trace(6), trace(12), trace(24)
    worse = {
        name: (few[name], some[name], many[name])
        for name in many
        if many[name] - some[name] > 2 * (some[name] - few[name]) + 40
    }
    assert worse == {}
    assert sum(many.values()) > 10_000


@pytest.mark.pure
@pytest.mark.parametrize("length", [10, 100])
def test_users_behind_a_chain_of_markers_are_moved_once(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    users = []
    for number in range(length):
        node = graph.call_function(markers.mark_error, (node, number))
        users.append(graph.call_function(torch.relu, (node,)))
    graph.output(tuple(users))
    moved = 0
    replace = fx.Node.replace_all_uses_with

    def counting(self: fx.Node, *args: Any, **kwargs: Any) -> list[fx.Node]:
        nonlocal moved
        found = replace(self, *args, **kwargs)
        moved += len(found)
        return found

    monkeypatch.setattr(fx.Node, "replace_all_uses_with", counting)
    editing.erase_markers(graph)
    assert moved == 2 * length - 1
    assert {user.args[0] for user in users} == {next(iter(graph.nodes))}
