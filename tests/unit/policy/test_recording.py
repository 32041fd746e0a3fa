"""Records, what the monitor says of them, and the log lines of clips."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByNorm, ClipByValue, Keep, Observe
from gradrewrite.rewriting import canvas

from helpers import Probe
from models.small import Broken


def watch(g: Tensor) -> Tensor:
    gr.record("largest", g.amax())
    gr.record("first", g[:1])
    gr.record("constant", 2)
    return g


def test_tensor_function_records() -> None:
    model = gr.transform(Probe(3), gr.on("error:h", watch))
    assert model.monitor.latest() == {}
    for scale in (1.0, 10.0):
        model(torch.tensor([1.0, 3.0, 2.0]) * scale).backward()
        assert model.monitor.latest() == {
            "largest@error:h": 3.0 * scale,
            "first@error:h": 1.0 * scale,
            "constant@error:h": 2.0,
        }


def test_records_keep_nan_and_infinity_and_double_precision() -> None:
    model = gr.transform(Probe(2), gr.on("error:h", watch))
    model(torch.tensor([math.nan, 1.0])).backward()
    latest = model.monitor.latest()
    assert math.isnan(latest["largest@error:h"])
    model(torch.tensor([-math.inf, 1.0])).backward()
    assert model.monitor.latest()["first@error:h"] == -math.inf
    third = 1 / 3
    model = gr.transform(Probe(1, torch.float64), gr.on("error:h", watch))
    model(torch.tensor([third], dtype=torch.float64)).backward()
    assert model.monitor.latest()["largest@error:h"] == third


def test_second_record_of_a_name_is_numbered() -> None:
    model = gr.transform(Probe(2), gr.on("error:h", [ClipByNorm(1.0), ClipByNorm(0.5)]))
    model(torch.tensor([3.0, 4.0])).backward()

    latest = {"norm@error:h": 5.0, "norm.2@error:h": 1.0, "bound@error:h": 1.0, "bound.2@error:h": 0.5}
    assert model.monitor.latest() == pytest.approx(latest | {"factor@error:h": 0.2, "factor.2@error:h": 0.5})
    assert model.monitor.history("bound.2@error:h") == [0.5]
    assert "bound.2@error:h" in str(model.monitor.table())


def twice(g: Tensor) -> Tensor:
    gr.record("total", g.sum())
    gr.record("total", -g.sum())
    gr.record("layer.2", 7.0)
    return g


def test_records_of_several_functions_at_one_site_are_numbered_in_one_place() -> None:
    model = gr.transform(Probe(2), gr.on("error:h", [twice, lambda g: twice(g * 2)]))
    model(torch.tensor([3.0, 4.0])).backward()

    totals = {"total@error:h": 7.0, "total.2@error:h": -7.0, "total.3@error:h": 14.0, "total.4@error:h": -14.0}
    assert model.monitor.latest() == totals | {"layer.2@error:h": 7.0, "layer.2.2@error:h": 7.0}


def test_a_bound_is_numbered_like_the_norm_that_it_bounds() -> None:
    model = gr.transform(Probe(2), gr.on("error:h", [Observe("norm"), ClipByNorm(0.5, norm_type=1)]))
    model(torch.tensor([3.0, 4.0])).backward()

    latest = {"norm@error:h": 5.0, "norm.2@error:h": 7.0, "bound.2@error:h": 0.5, "factor.2@error:h": 0.5 / 7}
    assert model.monitor.latest() == pytest.approx(latest)


@pytest.mark.broad
@pytest.mark.parametrize("bounds", [(0.5, torch.tensor(0.25)), (torch.tensor(0.5), 0.25)])
def test_bounds_that_are_numbers_and_bounds_that_are_tensors_are_told_apart(bounds: tuple[Any, Any]) -> None:
    model = gr.transform(Probe(2), gr.on("error:h", [Observe("max_abs"), *(ClipByNorm(bound) for bound in bounds)]))
    model(torch.tensor([3.0, 4.0])).backward()

    norms = {"max_abs@error:h": 4.0, "norm@error:h": 5.0, "norm.2@error:h": 0.5}
    bounds_and_factors = {"bound@error:h": 0.5, "bound.2@error:h": 0.25, "factor@error:h": 0.1, "factor.2@error:h": 0.5}
    assert model.monitor.latest() == pytest.approx(norms | bounds_and_factors)


@pytest.mark.slow
def test_observing_many_gradients_leaves_the_measurement_of_an_error_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvas, "MEASURED_APART", frozenset())
    plain = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    alone, beside = (gr.transform(plain, policy).trace(torch.ones(1, 2)) for policy in _observing(plain))
    measured = [e.nodes for graph in (alone, beside) for e in graph.edits if e.site.kind == "error"]

    assert len(measured[0]) > 1  # traced, not one opaque operation
    assert len(measured[0]) == len(measured[1])


def _observing(plain: nn.Module) -> tuple[gr.Policy, gr.Policy]:
    rule = gr.on("error:3", Observe("norm"))
    return rule, [rule, gr.on("gradient:*", Observe("norm"))]


@pytest.mark.pure
def test_record_outside_a_rewrite_does_nothing() -> None:
    g = torch.ones(3)
    assert watch(g) is g


def test_two_policies_may_share_a_monitor() -> None:
    monitor = gr.Monitor()
    one, two = (gr.transform(Probe(3), gr.on("error:h", watch), monitor=monitor) for _ in range(2))
    one(torch.ones(3)).backward()
    two(torch.ones(3) * 2).backward()

    assert one.monitor is two.monitor is monitor
    assert monitor.latest()["largest@error:h@2"] == 2.0


def test_evaluation_in_between_changes_no_record() -> None:
    model = gr.transform(Probe(3), gr.on("error:h", watch))
    model(torch.ones(3)).backward()
    with torch.no_grad():
        model(torch.ones(3) * 5)

    assert model.monitor.latest()["largest@error:h"] == 1.0


@pytest.mark.long
def test_a_row_is_one_backward_of_several_graphs() -> None:
    model = gr.transform(Broken(2, 2, 2), gr.on("gradient:*", ClipByNorm(math.inf)), fullgraph=False)
    with pytest.warns(gr.RewriteWarning):
        model(torch.ones(1, 2)).sum().backward()

    sites = [f"gradient:{m}.{p}" for m in ("one", "two") for p in ("weight", "bias")]
    assert set(model.monitor.latest()) == {
        f"{record}@{site}" for record in ("norm", "bound", "factor") for site in sites
    }


def test_backward_that_fails_leaves_the_monitor_usable() -> None:
    model = gr.transform(Probe(3), gr.on("error:h", watch))
    x = torch.ones(3)

    def fail(_: Tensor) -> None:
        raise KeyError("hook")

    handle = model.w.register_hook(fail)
    with pytest.raises(KeyError):
        model(x).backward()
    handle.remove()
    model(x * 7).backward()
    assert model.monitor.latest()["largest@error:h"] == 7.0


def test_log_line_of_an_error_clip(caplog: pytest.LogCaptureFixture) -> None:
    error = torch.tensor([150.3211, -6.0, 3.0])
    model = gr.transform(Probe(3), gr.on("error:h", ClipByValue(10.0, log=True)))
    with caplog.at_level(logging.INFO, "gradrewrite.monitor"):
        model(error).backward()
        model(torch.ones(3)).backward()
        model.monitor.latest()

    assert [r.getMessage() for r in caplog.records] == ["layer=h need clipping, max error=150.321 avg error=53.107"]
    assert caplog.records[0].levelno == logging.INFO


def test_log_line_of_a_gradient_clip_and_of_calls(caplog: pytest.LogCaptureFixture) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.cell.weight)

        def forward(self, x: Tensor) -> Tensor:
            return 3 * self.cell(self.cell(x))

    policy = [gr.on("error:cell", ClipByNorm(2.0, log=True)), gr.on("gradient:cell.*", ClipByValue(0.5, log=True))]
    model = gr.transform(Twice(), policy)
    with caplog.at_level(logging.INFO, "gradrewrite.monitor"):
        model(torch.ones(1, 1)).sum().backward()

    assert sorted(r.getMessage() for r in caplog.records) == [
        "layer=cell need clipping, max error=3 avg error=3",
        "parameter=cell.weight need clipping, max grad=4 avg grad=4",
    ]


def test_clip_that_changes_no_element_does_not_log(caplog: pytest.LogCaptureFixture) -> None:
    policy = gr.on("error:h", [ClipByValue(10.0, log=True), ClipByNorm(20.0, log=True)])
    model = gr.transform(Probe(3), policy)
    with caplog.at_level(logging.INFO, "gradrewrite.monitor"):
        model(torch.tensor([10.0, math.nan, -10.0])).backward()
        model(torch.zeros(3)).backward()

    assert not caplog.records


def test_kept_tensors_are_those_of_the_last_backward() -> None:
    model = gr.transform(Probe(3), gr.on("error:h", Keep()))
    for scale in (1.0, 2.0):
        model(torch.ones(3) * scale).backward()
    (site,) = model.monitor.kept()

    assert str(site) == "error:h"
    assert model.monitor.kept()[site].tolist() == [2.0, 2.0, 2.0]


def test_no_host_synchronisation_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gr.transform(Probe(3), [gr.on("error:h", watch), gr.on("gradient:w", ClipByNorm(1.0))])
    model(torch.ones(3)).backward()

    def refuse(*_: object) -> None:
        raise AssertionError("the host read a tensor")

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, refuse)
    model(torch.ones(3)).backward()
