"""Pictures of loops over time: one box with its body inside, its iterations as a strip, one box for its edits."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.diagnostics.run_log import last_run
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.passes import ClipByNorm, Observe
from gradrewrite.viz._graph_view import read_graph
from gradrewrite.viz._ladder import Ladder, build_ladder
from gradrewrite.viz._norms import cells_of, norms_of
from gradrewrite.viz._overview import build_overview

from models.recurrent import Recurrent

LENGTH = 5
POLICY = [
    gr.on("error:rec.l0/h", ClipByNorm(1e-3)),
    gr.on("error:rec.l0/c#2", ClipByNorm(1e-2)),
    gr.on("error:rec.l0/gates", Observe("norm")),
]


@functools.cache
def traced() -> tuple[JointGraph, gr.Monitor]:
    torch.manual_seed(0)
    model = gr.transform(Recurrent(nn.LSTM(3, 4, dtype=torch.float64)), POLICY)
    x = torch.randn(LENGTH, 2, 3, dtype=torch.float64)
    graph = model.trace(x)
    model(x)[0].square().sum().backward()
    return graph, model.monitor


def boxes(ladder: Ladder, column: str) -> dict[str, str]:
    return {part.key: f"{part.text}; {part.small}" for part in ladder.parts if part.column == column}


@pytest.mark.parametrize("build", [build_ladder, build_overview])
def test_a_loop_is_one_box_that_leads_to_itself(build: type) -> None:
    ladder = build(read_graph(traced()[0]))
    loops = [key for key, text in boxes(ladder, "forward").items() if f"loop x {LENGTH}" in text]
    loops += [key for key, text in boxes(ladder, "backward").items() if f"loop x {LENGTH}" in text]

    assert len(loops) == 2
    assert [(e.source, e.target, e.tensors) for e in ladder.edges if e.kind == "carried"] == [(k, k, 2) for k in loops]
    inside = {part.key: part.nodes for part in ladder.parts}
    assert all(any(name.endswith(".tanh") for name in inside[key]) for key in loops)
    drawn = [line for line in viz.draw(traced()[0], view="ladder")._scene().lines if line.source == line.target]
    assert len(drawn) == 2


@pytest.mark.parametrize("build", [build_ladder, build_overview])
def test_the_edits_of_all_iterations_are_one_box(build: type) -> None:
    found = boxes(build(read_graph(traced()[0])), "edit")

    assert list(found.values()) == [
        "ClipByNorm(0.01); error:rec.l0/c#2",
        f"ClipByNorm(0.001) x {LENGTH}; error:rec.l0/h",
    ]
    names = {node.name for node in read_graph(traced()[0]).nodes.values() if node.edit >= 0}
    assert names
    assert all(name.startswith("loop") and "." in name for name in names)


def test_edges_lead_through_the_edits_inside() -> None:
    ladder = build_ladder(read_graph(traced()[0]))
    (loop,) = (key for key, text in boxes(ladder, "backward").items() if "loop" in text)
    pairs = {(edge.source, edge.target) for edge in ladder.edges}

    for edit in boxes(ladder, "edit"):
        assert {(loop, edit), (edit, loop)} <= pairs


def test_a_strip_has_a_cell_for_each_iteration() -> None:
    graph, monitor = traced()
    view, run = read_graph(graph), last_run(monitor.steps())
    norms = norms_of(run, view)
    assert norms is not None
    ladder = build_ladder(view, run)
    (cells,) = (own for own in cells_of(ladder, norms).values() if len(own) > 1)

    assert [cell.name for cell in cells] == [f"lstm#{n}" for n in range(LENGTH)]
    assert all(len([site for site in cell.sites if site in norms.by_site]) >= 2 for cell in cells)


def test_code_marks_the_lines_inside() -> None:
    graph = traced()[0]
    body = graph.code.partition("loop_1 runs once an iteration")[2]

    assert "# ClipByNorm(0.001) at error:rec.l0/h" in body
    assert f"# error:rec.l0/h ({LENGTH} iterations): ClipByNorm(0.001) -> loop_1." in str(graph)
    assert str(graph).count(": ClipByNorm(0.001) ->") == 1
