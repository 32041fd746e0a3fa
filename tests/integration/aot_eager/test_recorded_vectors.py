"""Vectors that functions record: rows by element, lists in run logs, a few figures elsewhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import Every

from models.small import CellLoop

COMPILED = [False, pytest.param(True, marks=pytest.mark.inductor)]
X = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def largest(g: Tensor) -> Tensor:
    gr.record("largest", g.abs().amax(dim=0))
    return g


def rows_of(model: gr.RewrittenModule, address: str) -> Tensor:
    return torch.tensor(model.monitor.history(address, per="element"), dtype=torch.float64)


@pytest.mark.parametrize("compiled", COMPILED)
def test_rows_are_those_of_an_eager_hook(compiled: bool) -> None:
    plain, expected = net(), list[Tensor]()
    model = gr.transform(net(), gr.on("error:0", largest))
    if compiled:
        model.compile()
    for factor in (1.0, 2.0, math.nan):
        hidden = plain[0](X)
        hidden.register_hook(lambda g: expected.append(g.abs().amax(dim=0)))
        (plain[2](plain[1](hidden)) * factor).sum().backward()
        (model(X) * factor).sum().backward()

    torch.testing.assert_close(rows_of(model, "largest@error:0"), torch.stack(expected), equal_nan=True)
    assert list(model.monitor.latest()) == [f"largest[{n}]@error:0" for n in range(4)]
    assert math.isnan(model.monitor.latest()["largest[2]@error:0"])
    for read in (model.monitor.history, model.monitor.latest().__getitem__):
        with pytest.raises(KeyError, match=r"nearest: largest\[0\]@error:0, .*\('largest@error:0', per='element'\)"):
            read("largest@error:0")
    with pytest.raises(KeyError, match="no record 'largest@error:1'"):
        model.monitor.history("largest@error:1", per="element")


def test_a_second_vector_of_a_name_is_numbered() -> None:
    model = gr.transform(net(), gr.on("error:0", [largest, lambda g: largest(2 * g)]))
    model(X).sum().backward()
    assert torch.equal(rows_of(model, "largest.2@error:0"), 2 * rows_of(model, "largest@error:0"))


def test_a_run_log_has_one_list(tmp_path: Path) -> None:
    model = gr.transform(net(), gr.on("error:0", [largest, lambda g: largest(2 * g)]))
    model.monitor.to_jsonl(tmp_path / "run.jsonl")
    for _ in range(3):
        model(X).sum().backward()
    model.monitor.flush()

    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    found = json.loads(lines[-1])["records"]
    assert [list(own["records"]) for own in found.values()] == [["largest[0]@error:0"], ["largest[0].2@error:0"]]
    assert gr.read_jsonl(tmp_path / "run.jsonl")[-1].records == model.monitor.latest()
    assert gr.read_jsonl(tmp_path / "run.jsonl") == model.monitor.steps()


def test_tables_have_one_row() -> None:
    def elements(g: Tensor) -> Tensor:
        gr.record("largest", g.flatten())
        return g

    model = gr.transform(net(), gr.on("error:*", elements))
    model(X).sum().backward()
    table = model.monitor.table()
    rows = {"largest[0-19]@error:0", "largest[0-19]@error:1", "largest[0-9]@error:2"}
    assert {row.address for row in table.shown} == rows
    assert len(table.rows) == 50


class Scalars:
    """What is asked of a ``SummaryWriter``."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.values[tag] = value


def test_other_logs_have_three_figures() -> None:
    model, writer = gr.transform(net(), gr.on("error:0", largest)), Scalars()
    model.monitor.to_tensorboard(writer)
    model(X).sum().backward()
    model.monitor.flush()
    row = rows_of(model, "largest@error:0")[0]
    assert writer.values == pytest.approx(
        {
            "largest_largest/error:0": row.max().item(),
            "largest_largest_at/error:0": row.argmax().item(),
            "largest_mean/error:0": row.mean().item(),
        }
    )


@pytest.mark.parametrize("compiled", COMPILED)
def test_each_iteration_of_a_loop_has_its_own(compiled: bool, tmp_path: Path) -> None:
    x, found, figures = torch.randn(5, 2, 3, dtype=torch.float64), [], []
    for loops in ("unrolled", "rolled"):
        torch.manual_seed(0)
        model = gr.transform(CellLoop(), gr.on("error:cell*", largest), loops=loops)
        if compiled:
            model.compile()
        model.monitor.to_jsonl(tmp_path / f"{loops}.jsonl")
        model.monitor.to_tensorboard(writer := Scalars())
        model(x).backward()
        model.monitor.flush()
        found.append([rows_of(model, f"largest@error:cell{call}") for call in ("", "#1", "#2", "#3", "#4")])
        figures.append(writer.values)
        assert gr.read_jsonl(tmp_path / f"{loops}.jsonl")[-1].records == model.monitor.latest()
        assert [row.address for row in model.monitor.table().shown] == ["largest[0-3]@error:cell#0-4"]
        by_iteration = torch.tensor(model.monitor.history("largest[2]@error:cell", per="iteration"))
        torch.testing.assert_close(by_iteration[0].double(), torch.cat(found[-1])[:, 2])
    torch.testing.assert_close(*found)
    assert figures[0] == pytest.approx(figures[1])
    assert figures[0].keys() == {f"largest_{what}/error:cell" for what in ("largest", "largest_at", "mean")}


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).sum()


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize(
    "site", ["error:net.0->net.1", "input:x", "gradient:net.0.weight", "step:net.0.weight", "param:net.0.weight"]
)
def test_kinds_of_sites(site: str, compiled: bool) -> None:
    def both(g: Tensor) -> Tensor:
        gr.keep("largest", g.abs().amax(dim=0))
        return largest(g)

    model = gr.transform(Summed(), gr.on(site, both))
    if compiled:
        model.compile()
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(X.clone().requires_grad_()).backward()
    optimizer.step()
    torch.testing.assert_close(rows_of(model, f"largest@{site}")[0], model.monitor.kept("largest")[site].double())


def test_groups_record_one() -> None:
    def norms(gs: dict[str, Tensor]) -> dict[str, Tensor]:
        gr.record("norms", torch.stack([g.norm() for g in gs.values()]))
        return {}

    model = gr.transform(net(), gr.together("gradient:*", norms))
    model(X).sum().backward()
    expected = torch.stack([p.grad.norm() for p in model.parameters()])
    torch.testing.assert_close(rows_of(model, "norms@group:default")[0].sort().values, expected.sort().values)


def test_every_second_step() -> None:
    model = gr.transform(net(), gr.on("error:0", Every(2, largest)))
    for _ in range(4):
        model(X).sum().backward()
    assert rows_of(model, "largest@error:0").isnan().all(dim=1).tolist() == [False] * 4


@pytest.mark.parametrize(
    ("value", "shape"), [(lambda g: g, r"\(5, 4\)"), (lambda g: g[:, :0].flatten(), r"\(0,\)"),
                         (lambda g: g.flatten().repeat(205), r"\(4100,\)"), (lambda g: g[0] * 1j, r"\(4,\)")]
)  # fmt: skip
def test_what_is_no_record(value: Any, shape: str) -> None:
    def recorded(g: Tensor) -> Tensor:
        gr.record("x", value(g))
        return g

    model = gr.transform(net(), gr.on("error:0", recorded))
    with pytest.raises(
        gr.CallbackError, match=rf"error:0: gr\.record\('x'.*a vector of 2 to 4,096.* got shape {shape}"
    ):
        model(X)


def test_a_length_of_batches_is_no_record() -> None:
    def by_row(g: Tensor) -> Tensor:
        gr.record("x", g.norm(dim=1))
        return g

    model = gr.transform(net(), gr.on("error:0", by_row)).compile(dynamic=True)
    with pytest.raises(gr.CallbackError, match=r"a vector of 2 to 4,096 in every batch; got shape \(s"):
        model(X)


@pytest.mark.parametrize("compiled", COMPILED)
def test_the_longest(compiled: bool) -> None:
    def recorded(g: Tensor) -> Tensor:
        gr.record("x", g)
        return g

    layer = nn.Linear(2, 4096)
    model = gr.transform(layer, gr.on("gradient:bias", recorded))
    if compiled:
        model.compile()
    model(torch.ones(3, 2)).square().sum().backward()
    assert torch.equal(rows_of(model, "x@gradient:bias")[0].float(), layer.bias.grad)
