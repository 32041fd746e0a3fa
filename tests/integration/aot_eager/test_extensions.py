"""What a new kind of action, a new record and a new kind of site take: dummies, added from outside."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn

import gradrewrite as gr
from gradrewrite import sites, viz
from gradrewrite._compat import aot_autograd
from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.values import shape_of
from gradrewrite.passes import ClipByGlobalNorm, Observe
from gradrewrite.policy.insertions import BACKWARD, Insertion, MeasureTensor
from gradrewrite.rewriting import insertion_points, joint
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.inserters import insert
from gradrewrite.rewriting.insertion_points import FoundPoints, InsertionPoint
from gradrewrite.sites import Kind, KindTraits, Site


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.second(self.first(x).tanh()))


def step(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model(torch.randn(5, 4)).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# A kind of action: the action, its effect, and the inserter of that.


@dataclass(frozen=True, eq=False)
class ReverseTensor:
    """The elements of a tensor in the opposite order."""


@dataclass(frozen=True)
class Reverse:
    kinds = BACKWARD

    def at(self, site: Site) -> Insertion:
        return Insertion(self, cast(Any, ReverseTensor()))


def insert_reversed(canvas: Canvas, point: InsertionPoint, insertion: Insertion) -> None:
    current = canvas.current(point.node)
    (result,), new = editing.compute(
        canvas.graph, lambda g: [g.flatten().flip(0).view_as(g)], [current], point.before, "is_backward"
    )
    canvas.replace(point, result)
    canvas.note(point.site, insertion, tuple(node.name for node in new))


def test_a_kind_of_action_is_an_effect_with_its_inserter(monkeypatch: pytest.MonkeyPatch) -> None:
    def insert_any(canvas: Canvas, point: InsertionPoint, insertions: Sequence[Insertion]) -> None:
        for insertion in insertions:
            if isinstance(insertion.effect, ReverseTensor):
                insert_reversed(canvas, point, insertion)
            else:
                insert(canvas, point, [insertion])

    monkeypatch.setattr(joint, "insert", insert_any)
    policy = [gr.on("error:first", [Reverse(), Observe("norm")]), gr.on("gradient:*", ClipByGlobalNorm(1e-2))]
    model = gr.transform(Net(), policy)
    graph = model.trace(torch.randn(5, 4))
    found = step(model)

    plain = Net()
    torch.manual_seed(1)
    x = torch.randn(5, 4)
    hidden = plain.first(x)
    hidden.register_hook(lambda g: g.flatten().flip(0).view_as(g))
    plain.second(hidden.tanh()).square().sum().backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1e-2)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    (edit,) = [edit for edit in graph.edits if isinstance(edit.action, Reverse)]
    assert edit.nodes
    assert set(edit.nodes) <= {node.name for node in graph.graph_module.graph.nodes}
    assert "Reverse()" in str(model.explain())
    assert "norm@error:first" in model.monitor.latest()
    assert "Reverse()" in str(viz.draw(graph)._repr_svg_())


def test_a_record_needs_nothing_but_its_name(tmp_path: Path) -> None:
    def quarter(g: Tensor) -> Tensor:
        gr.record("quartile", g.abs().flatten().quantile(0.25))
        return g

    model = gr.transform(Net(), gr.on("error:first", quarter))
    step(model)
    model.monitor.to_jsonl(tmp_path / "run.jsonl")
    step(model)
    model.monitor.flush()

    value = model.monitor.latest()["quartile@error:first"]
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [row["records"]["quartile@error:first"] for row in lines if "step" in row] == [value, value]
    assert "quartile@error:first" in str(model.monitor.table())


# A kind of site: what the model returns.


@dataclass(frozen=True)
class Watch:
    kinds = frozenset(("result",))

    def at(self, site: Site) -> Insertion:
        return Insertion(self, MeasureTensor({"max_abs": "max_abs"}), cast(Any, self.kinds))


def test_a_kind_of_site_is_a_row_of_traits_and_the_code_that_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = cast(Kind, "result")
    monkeypatch.setitem(sites.TRAITS, kind, KindTraits(2, in_forward=True, needs_kind=True))

    def find(marked: Any) -> FoundPoints:
        found = insertion_points.find_insertion_points(marked)
        order = {node: number for number, node in enumerate(marked.graph.nodes)}
        for number, node in enumerate(aot_autograd.forward_outputs(marked.graph)):
            assert isinstance(node, fx.Node)
            value = value_of(node)
            site = Site(kind, str(number), shape=shape_of(value), dtype=value.dtype, device=value.device)
            found.points.append(InsertionPoint(site, node, node.next, order[node]))
        return found

    monkeypatch.setattr(joint, "find_insertion_points", find)
    model = gr.transform(Net(), [gr.on("result:0", Watch()), gr.on("activation:second", Observe("max_abs"))])
    step(model)

    latest = model.monitor.latest()
    assert latest["max_abs@result:0"] == latest["max_abs@activation:second"] > 0
    assert [str(site) for site in model.explain().graphs[0].sites if site.kind == kind] == ["result:0"]
    assert dataclasses.replace(model.explain().graphs[0].sites[0], kind=kind).traits.order == 2
    with pytest.raises(gr.PolicyError, match="does not apply to this kind of site; it applies to result"):
        step(gr.transform(Net(), gr.on("error:first", Watch())))
    with pytest.raises(gr.NoSuchSiteError, match="result:7"):
        step(gr.transform(Net(), gr.on("result:7", Watch())))
