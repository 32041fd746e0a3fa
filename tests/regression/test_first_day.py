"""What a new user meets: results that are thrown away, rules that come late, modules that are replaced."""

from __future__ import annotations

import copy
import errno
import gc
import pickle
import re
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.diagnostics.health import examine
from gradrewrite.passes import AdaptiveClip, CheckFinite, ClipByNorm, ClipByValue, Keep, Observe, Scale

_X = torch.ones(2, 2)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


def _backward(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(_X).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.broad
@pytest.mark.parametrize("regions", [(), "0"])
@pytest.mark.parametrize("way", ["transform", "compile", "guard", "monitor"])
def test_a_result_that_is_thrown_away_is_said(way: str, regions: Any) -> None:
    net = _net()
    model = gr.transform(net, gr.on("gradient:*", Scale(2.0)), regions=regions)
    if way == "compile":
        model.compile()
    elif way == "monitor":
        assert model.monitor.skipped == 0
    elif way == "guard":
        gr.guard(torch.optim.SGD(net.parameters(), lr=0.1), model)
    del model
    gc.collect()
    with pytest.warns(gr.RewriteWarning, match=r"never called and is gone.*inplace=True"):
        _backward(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _backward(net)


@pytest.mark.broad
@pytest.mark.parametrize("way", ["call", "trace", "memory", "restore", "again", "inplace", "copy"])
def test_a_result_that_was_used_is_not(way: str) -> None:
    net = _net()
    policy = gr.on("gradient:*", Scale(2.0))
    model = gr.transform(net, policy, inplace=way == "inplace")
    if way in ("call", "inplace"):
        _backward(model)
    elif way == "trace":
        model.trace(_X)
    elif way == "memory":
        model.memory(_X)
    elif way == "restore":
        gr.restore(model)
    elif way == "copy":
        net = copy.deepcopy(model)
    again = gr.transform(net, policy) if way == "again" else net
    if way != "inplace":
        del model
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _backward(again)


@pytest.mark.broad
@pytest.mark.parametrize("regions", [(), "0"])
def test_a_rule_that_is_added_later_holds(regions: Any) -> None:
    net = _net()
    plain, policy = _backward(copy.deepcopy(net)), [gr.on("gradient:0.weight", Scale(2.0))]
    model = gr.transform(net, policy, regions=regions)
    _backward(model)
    policy.append(gr.on("gradient:0.bias", Scale(3.0)))
    found = _backward(model)
    torch.testing.assert_close(found["0.weight"], 2 * plain["0.weight"])
    torch.testing.assert_close(found["0.bias"], 3 * plain["0.bias"])
    policy[:] = policy[1:]
    torch.testing.assert_close(_backward(model)["0.weight"], plain["0.weight"])
    policy.append(gr.on("gradient:0.weigth", Scale(3.0)))
    with pytest.raises(gr.NoSuchSiteError, match=r"gradient:0\.weight"):
        _backward(model)


def test_a_rule_for_the_step_that_is_added_later_holds() -> None:
    net = _net()
    policy: list[Any] = [gr.on("gradient:*", ClipByValue(1e9))]
    model = gr.transform(net, policy)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    plain = _backward(model)
    optimizer.step()
    policy.append(gr.on("step:0.weight", Scale(0.0)))
    _backward(model)
    optimizer.step()
    assert not net[0].weight.grad.any()
    assert plain["0.weight"].any()


def test_a_rule_that_loses_its_last_site_is_said() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(3, 2)

        def forward(self, h: Tensor) -> Tensor:
            return self.projection(h)

    net = _net()
    model = gr.transform(net, [gr.on("gradient:2.weight", Scale(2.0)), gr.on("gradient:0.weight", Scale(2.0))])
    _backward(model)
    net[2] = Head()
    with pytest.warns(
        gr.RewriteWarning, match=r"'gradient:2.weight' matched .*gradient:2\.projection\.weight"
    ) as caught:
        _backward(model)
    assert len(caught) == 1


def test_other_lengths_lose_no_rule() -> None:
    model = gr.transform(_net(), gr.on("gradient:0.weight", Scale(2.0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (1, 2, 3):
            model(torch.ones(rows, 2)).sum().backward()


BOUNDS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "norm": (ClipByNorm(1e-3), lambda g: g.norm()),
    "value": (ClipByValue(1e-3), lambda g: g.abs().max()),
    "adaptive": (AdaptiveClip(1e-3), lambda g: g.norm()),
}


@pytest.mark.broad
@pytest.mark.parametrize("case", BOUNDS)
@pytest.mark.parametrize("regions", [(), "0"])
def test_a_bound_on_each_micro_batch_is_said(case: str, regions: Any) -> None:
    action, size = BOUNDS[case]
    model = gr.transform(_net(), gr.on("gradient:0.weight", action), regions=regions)
    model(_X).sum().backward()
    first = model[0].weight.grad.clone()
    with pytest.warns(gr.RewriteWarning, match=r"each backward by itself.*gr\.on\(.step:\*., .*gr\.guard") as caught:
        model(_X).sum().backward()
    assert float(size(model[0].weight.grad)) == pytest.approx(2 * float(size(first)))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(_X).sum().backward()


@pytest.mark.broad
@pytest.mark.parametrize(
    "policy",
    [
        gr.on("gradient:*", Scale(2.0)),
        gr.on("gradient:*", Observe("norm")),
        gr.on("gradient:*", Keep()),
        gr.on("gradient:*", CheckFinite("record")),
        gr.on("error:*", ClipByValue(1.0)),
        gr.on("step:*", ClipByValue(1.0)),
    ],
)
def test_what_has_no_bound_on_a_sum_is_not_warned_of(policy: Any) -> None:
    model = gr.transform(_net(), policy)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(_X).sum().backward()
        optimizer.step()


@pytest.mark.broad
@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
@pytest.mark.parametrize("told", [False, True])
def test_a_scale_that_the_policy_does_not_know_is_said(told: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = gr.transform(_net(), gr.on("error:*", ClipByNorm(1.0)), loss_scale=scaler if told else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(_X).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step()
    texts = [str(w.message) for w in caught if isinstance(w.message, gr.RewriteWarning)]
    assert len(texts) == (0 if told else 1)
    assert all("error:0: ClipByNorm(1.0)" in text and "loss_scale=scaler" in text for text in texts)


def _report(policy: Any, bad: Collection[int], steps: int = 40) -> str:
    """Train with batches that are NaN in some steps, and return what the report says."""
    torch.manual_seed(0)
    model = gr.transform(_net(), policy)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.full((4, 2), torch.nan) if step in bad else torch.randn(4, 2)
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        model.monitor.log("loss", loss.detach())
    return str(examine(model.monitor.steps()))


@pytest.mark.broad
def test_a_run_with_skipped_updates_is_not_said_to_be_finite() -> None:
    policy = [gr.on("gradient:*", CheckFinite("skip")), gr.on("gradient:*", Observe("norm"))]
    text = _report(policy, bad=(7, 20))
    assert "no gradient exploded, vanished or was not finite" not in text
    assert "Nothing has to be changed." not in text.splitlines()
    assert "2 of 40 updates were skipped, first in step 7, last in step 20 (not finite" in text
    assert "culprits" in text


@pytest.mark.broad
def test_a_run_without_skipped_updates_is() -> None:
    policy = [gr.on("gradient:*", CheckFinite("skip")), gr.on("gradient:*", Observe("norm"))]
    text = _report(policy, bad=())
    assert "no gradient exploded, vanished or was not finite" in text


@pytest.mark.broad
def test_a_diagnosis_without_an_optimizer_says_what_it_cannot_judge() -> None:
    batches = [torch.randn(4, 2) * (1 + number) for number in range(30)]
    net = nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 2))
    found = gr.diagnose(net, batches, loss=lambda output, x: (output - 1).square().mean())
    assert found.outcome == "untrained"
    assert "the loss went from" not in str(found)
    assert "nothing was trained" in str(found)
    assert "optimizer=" in str(found)


@pytest.mark.broad
def test_a_clip_that_acts_in_most_steps_is_said_to() -> None:
    text = _report(gr.on("gradient:*", ClipByNorm(0.05, log=True)), bad=())
    assert "always acts" not in text


@pytest.mark.broad
@pytest.mark.parametrize("what", ["to_jsonl", "report", "draw", "export", "plot"])
def test_a_missing_folder_is_made(what: str, tmp_path: Path) -> None:
    model = gr.transform(_net(), gr.on("gradient:*", Observe("norm")))
    path = tmp_path / "runs" / "first" / "x"
    if what == "to_jsonl":
        model.monitor.to_jsonl(path)
    _backward(model)
    model.monitor.flush()
    graph = model.trace(_X)
    written = {
        "to_jsonl": lambda: path,
        "report": lambda: gr.viz.report(model.monitor).render(path),
        "draw": lambda: gr.viz.draw(graph, "overview").render(path, "dot"),
        "export": lambda: gr.viz.export(graph, path),
        "plot": lambda: gr.viz.plot(model.monitor).render(path),
    }[what]()
    assert Path(written).stat().st_size > 0
    assert [p.name for p in path.parent.iterdir()] == [Path(written).name]


def test_a_full_disk_names_the_file_and_leaves_no_part(tmp_path: Path) -> None:
    model = gr.transform(_net(), gr.on("gradient:*", Observe("norm")))
    _backward(model)
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch("gradrewrite._utils.files.os.replace", side_effect=full),
        pytest.raises(OSError, match=r"No space left on device: .*x\.html"),
    ):
        gr.viz.report(model.monitor).render(tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.broad
def test_a_rule_without_a_site_is_named_with_its_line() -> None:
    model = gr.transform(_net(), gr.on("gradient:nope", Scale(2.0)))
    with pytest.raises(gr.NoSuchSiteError, match=r"test_first_day\.py:\d+: no site matches 'gradient:nope'"):
        _backward(model)
    again = gr.transform(_net(), gr.on("activation:*", ClipByNorm(1.0)))
    with pytest.raises(gr.PolicyError, match=r"test_first_day\.py:\d+: activation:.* does not apply"):
        _backward(again)
    late = gr.transform(_net(), gr.on("step:nope", Scale(2.0)))
    with pytest.raises(gr.NoSuchSiteError, match=r"test_first_day\.py:\d+: no site matches 'step:nope'"):
        gr.guard(torch.optim.SGD(late.parameters(), lr=0.1), late)


def test_equal_rules_of_two_lines_are_equal() -> None:
    first = gr.on("gradient:*", Scale(2.0))
    second = gr.on("gradient:*", Scale(2.0))
    assert first == second
    assert hash(first) == hash(second)
    assert pickle.loads(pickle.dumps(first)) == second
    assert repr(first) == "on('gradient:*', Scale(2.0))"


def test_what_cannot_be_pickled_names_the_rule() -> None:
    model = gr.transform(_net(), [gr.on("gradient:*", Scale(2.0)), gr.on("error:0", lambda g: g * 2)])
    with pytest.raises(TypeError, match=r"on\('error:0', .*test_first_day\.py:\d+.*gr\.state_dict") as caught:
        pickle.dumps(model)
    assert "lambda" in str(caught.value)
    assert pickle.loads(pickle.dumps(gr.transform(_net(), gr.on("gradient:*", Scale(2.0))))) is not None


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")
@pytest.mark.parametrize("way", ["script", "trace"])
def test_torchscript_is_refused_with_the_way_out(way: str) -> None:
    model = gr.transform(_net(), gr.on("gradient:*", Scale(2.0)))
    run = {"script": lambda: torch.jit.script(model), "trace": lambda: torch.jit.trace(model, _X)}[way]
    with pytest.raises(TypeError, match=r"TorchScript has no backward of ours.*model\.original"):
        run()


@pytest.mark.parametrize("pre", [False, True])
def test_full_backward_hooks_are_refused_with_the_way_out(pre: bool) -> None:
    net = _net()
    if pre:
        net[0].register_full_backward_pre_hook(lambda *_: None)
    else:
        net[0].register_full_backward_hook(lambda *_: None)
    model = gr.transform(net, gr.on("gradient:*", Scale(2.0)))
    with pytest.raises(gr.GraphBreakError) as caught:
        _backward(model)
    assert "gr.on('error:0', function)" in caught.value.text
    assert "compiled_autograd" not in caught.value.text


def _one_monitor(first: nn.Module, second: nn.Module, **options: Any) -> gr.Monitor:
    """Train two models with one monitor, the second with gradients of twice the size."""
    monitor = gr.Monitor()
    policy = [gr.on("gradient:*", Observe("norm")), gr.on("error:*", ClipByNorm(1e-3)), gr.on("gradient:*", Keep())]
    models = [gr.transform(net, policy, monitor=monitor, **options) for net in (first, second)]
    for _ in range(2):
        (models[0](_X).sum() + 2 * models[1](_X).sum()).backward()
        for model, factor in zip(models, (1, 2), strict=True):
            model(_X).mul(factor).sum().backward()
            model.zero_grad()
    return monitor


@pytest.mark.broad
@pytest.mark.parametrize("regions", [(), ("0", "2")])
def test_one_monitor_of_two_models_keeps_two_series(regions: Any) -> None:
    monitor = _one_monitor(_net(), _net(), regions=regions)
    alone = gr.Monitor()
    model = gr.transform(_net(), gr.on("error:*", ClipByNorm(1e-3)), monitor=alone, regions=regions)
    model(_X).sum().backward()
    sites = {address.partition("@")[2] for step in monitor.steps() for address in step.records}
    assert {site for site in sites if "@" not in site} == {site.removesuffix("@2") for site in sites if "@" in site}
    assert {"gradient:0.weight", "gradient:0.weight@2"} <= sites
    assert {str(site) for site in monitor.kept()} == {f"gradient:{n}.{p}@2" for n in (0, 2) for p in ("weight", "bias")}
    if regions:
        return
    for label, factor in (("", 1.0), ("@2", 2.0)):
        values = monitor.history(f"norm@error:2{label}")
        assert [v for v in values if v == v] == pytest.approx([factor * alone.latest()["norm@error:2"]] * 4)
    assert examine(monitor.steps()).verdict is not None


def test_calls_of_a_region_keep_their_tensors_apart_for_the_second_model_too() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cell(self.cell(x))

    monitor = gr.Monitor()
    policy = gr.on("activation:cell", Keep())
    models = [gr.transform(Twice(), policy, monitor=monitor, regions="cell") for _ in range(2)]
    for model, label in zip(models, ("", "@2"), strict=True):
        model(_X).sum().backward()
        assert {str(site) for site in monitor.kept()} == {f"activation:cell{label}", f"activation:cell{label}#1"}


@pytest.mark.broad
def test_models_with_other_names_need_no_label() -> None:
    monitor = _one_monitor(_net(), nn.Sequential(nn.Identity(), nn.Linear(2, 2)))
    assert all("@" not in address.partition("@")[2] for step in monitor.steps() for address in step.records)


@pytest.mark.broad
def test_a_model_that_takes_the_place_of_another_has_its_series() -> None:
    monitor = gr.Monitor()
    for _ in range(3):
        model = gr.transform(_net(), gr.on("gradient:*", Observe("norm")), monitor=monitor)
        gc.collect()  # a loop that is run again: the former model is gone before the first call
        _backward(model)
    assert len(monitor.history("norm@gradient:0.weight")) == 3


@pytest.mark.broad
def test_a_model_that_is_transformed_again_keeps_its_series() -> None:
    monitor, net = gr.Monitor(), _net()
    for _ in range(3):
        model = gr.transform(net, gr.on("gradient:*", Observe("norm")), monitor=monitor)
        _backward(model)
        gr.restore(model)
    del model
    gc.collect()
    assert len(monitor.history("norm@gradient:0.weight")) == 3
    assert {len(step.records) for step in monitor.steps()} == {4}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.inductor)])
def test_one_log_line_tells_of_a_compilation(compiled: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = gr.transform(_net(), gr.on("gradient:*", Scale(2.0)))
    if compiled:
        model.compile()
    with caplog.at_level("INFO", "gradrewrite"):
        for _ in range(3):
            _backward(model)
    (line,) = [record.getMessage() for record in caplog.records]
    engine = "inductor" if compiled else "aot_eager"
    assert re.fullmatch(rf"rewriting: 4 edits, \d+ nodes; compiling \({engine}\)", line)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = self.cell(x).sin()
        return x


@pytest.mark.broad
def test_calls_of_the_second_model_are_its_own() -> None:
    monitor = gr.Monitor()
    policy = [gr.on("error:cell", [ClipByNorm(1e-3), Keep()])]
    models = [gr.transform(_Recurrent(), policy, monitor=monitor) for _ in range(2)]
    for _ in range(25):
        for model in models:
            model(_X).sum().backward()
    assert "error:cell@2#3" in {str(site) for site in monitor.kept()}
    assert monitor.kept()["error:cell@2#3"].shape == (2, 2)
    assert len(monitor.history("factor@error:cell@2#3")) == 50
    health = examine(monitor.steps())
    assert {row.site: row.num_calls for row in health.sites} == {"error:cell": 6, "error:cell@2": 6}
    assert all(row.code.startswith('gr.on("error:cell", ') for row in health.sites if row.code)
    assert len(monitor.table("error:cell@2").shown) < len(monitor.table("error:cell@2").rows)
