"""Checks, replays, guards and the monitor where it is not simple."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.monitoring.monitor import recorder_of
from gradrewrite.passes import CheckFinite, ClipByNorm, ClipByValue, NanToNum, Observe

from helpers import failure
from models.small import Lambda

GRADIENTS = gr.on("gradient:*", CheckFinite())


@pytest.mark.broad
@pytest.mark.parametrize("hides", [NanToNum(), ClipByValue(1.0)])
def test_action_behind_a_check_hides_nothing_from_the_answer(hides: Any) -> None:
    model = gr.transform(nn.Linear(3, 3, bias=False), gr.on("gradient:*", [CheckFinite(), hides]))
    x = torch.full((2, 3), 1e30)
    err = failure((model(x).sum() * 1e30).backward)
    assert str(err.site) == "gradient:weight"
    assert err.percent == 100.0
    assert err.op == "/linear"


def test_counts_of_several_runs_add_up() -> None:
    model = gr.transform(nn.Linear(2, 2), gr.on("gradient:*", [CheckFinite("record"), Observe("max_abs")]))
    good, bad = torch.ones(1, 2), torch.full((1, 2), math.nan)
    for first, last in ((good, bad), (bad, good)):
        (model(first).sum() + model(last).sum()).backward()
        latest = model.monitor.latest()
        assert latest["nonfinite@gradient:weight"] == 4.0
        assert latest["nonfinite@data:input"] == 2.0


@pytest.mark.parametrize("order", [1, -1])
def test_fault_from_outside_of_one_of_two_runs(order: int) -> None:
    model = gr.transform(nn.Linear(2, 2), GRADIENTS)
    good, bad = torch.ones(1, 2), torch.full((1, 2), math.nan)
    first, last = (good, bad)[::order]
    err = failure((model(first).sum() + model(last).sum()).backward)
    assert err.cause == "the input input was not finite already"
    outs = model(good), model(good)
    scales = (1.0, math.nan)[::order]
    err = failure((outs[0] * scales[0] + outs[1] * scales[1]).sum().backward)
    assert "the loss" in err.cause


def test_second_backward_takes_no_other_forward() -> None:

    model = gr.transform(Lambda(lambda net, x: torch.tanh(net.fc(x)).sum(), fc=nn.Linear(2, 2)), GRADIENTS)
    first = model(torch.ones(1, 2))
    first.backward(retain_graph=True)
    second = model(torch.full((1, 2), math.nan))
    err = failure((first * math.nan).backward)
    assert "the loss" in err.cause
    assert failure(second.backward).cause == "the input x was not finite already"


def test_halves_of_one_tensor_are_told_apart() -> None:
    model = gr.transform(nn.Linear(2, 2), GRADIENTS)
    x = torch.ones(4, 2)
    x[:2] = math.nan
    bad, good = model(x[:2]).sum(), model(x[2:]).sum()
    assert failure(bad.backward).cause == "the input input was not finite already"
    good.backward()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.plain = torch.full((4, 4), -math.inf).triu(1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return (self.fc(x) + (self.plain if mask is None else mask)).softmax(-1).square().sum()


@pytest.mark.broad
@pytest.mark.parametrize("policy", [GRADIENTS, [GRADIENTS, gr.on("activation:*/*", CheckFinite())]])
def test_masks_that_are_arguments_or_attributes(policy: gr.Policy) -> None:
    x, mask = torch.randn(4, 4), torch.full((4, 4), -math.inf).triu(1)
    model = gr.transform(Masked(), policy)
    model(x).backward()
    model(x, mask).backward()
    mask[1] = -math.inf
    err = failure(model(x, mask).backward)
    assert (err.op, str(err.site), err.percent) == ("/softmax", "activation:/softmax", 25.0)
    assert "activation:/add" not in map(str, err.others)  # which has the infinities of the mask alone


@pytest.mark.broad
def test_overflow_among_masked_scores_is_found_where_it_is() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            future = torch.ones(4, 4, dtype=torch.bool).triu(1)
            weights = torch.exp(self.fc(x).masked_fill(future, -math.inf))
            return (weights / weights.sum(-1, keepdim=True)).square().sum()

    model = gr.transform(Net(), GRADIENTS)
    model(torch.randn(4, 4)).backward()
    err = failure(model(torch.full((4, 4), 1e4) * model.fc.weight.sign()).backward)
    assert err.op == "/exp"


def test_buffer_that_overflowed_is_named() -> None:

    net = Lambda(lambda net, x: (net.fc(x) * net.scale).sum(), fc=nn.Linear(2, 2), scale=nn.Buffer(torch.ones(())))
    model = gr.transform(net, GRADIENTS)
    model(torch.ones(1, 2)).backward()
    model.scale.fill_(math.inf)
    assert failure(model(torch.ones(1, 2)).backward).cause == "the buffer scale was not finite already"


def test_replay_knows_no_autocast_around_the_backward() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                h = self.fc(x) * 1e4
                h = h @ h.mT  # far beyond float16
                return torch.sqrt(h * 0.0).sum()

    model = gr.transform(Net(), GRADIENTS)
    with torch.autocast("cpu", dtype=torch.float16):
        assert failure(model(torch.ones(4, 4)).backward).op == "/sqrt"


def test_inference_tensors_are_inputs_too() -> None:

    with torch.inference_mode():
        x = torch.ones(2)
    model = gr.transform(Lambda(lambda net, x: (x + net.w).sum(), w=nn.Parameter(torch.ones(2))), GRADIENTS)
    model(x).backward()


@pytest.mark.broad
@pytest.mark.filterwarnings("ignore::gradrewrite.RewriteWarning")
def test_doctor_is_not_misled_by_a_graph_break() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.sqrt(self.one(x) - 100.0)
            torch._dynamo.graph_break()
            return self.two(h).sum()

    model = gr.transform(Net(), gr.on("*", CheckFinite("record")), fullgraph=False)
    model(torch.ones(1, 2)).backward()
    (finding,) = model.monitor.diagnose()
    assert (finding.kind, finding.site) == ("non-finite op", "activation:/sqrt")
    assert not any(name.startswith("nonfinite@data:h") for name in model.monitor.latest())


def test_percentages_leave_intended_infinities_out() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.fc(x).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -math.inf)
            return torch.softmax(gr.tap(scores * 1.0, "scores"), -1).square().sum()

    model = gr.transform(Net(), gr.on("activation:scores", CheckFinite()))
    x = torch.ones(4, 4)
    x[0] = math.nan
    err = failure(model(x).backward)
    assert str(err.site) == "activation:fc"
    scores = next(site for site in err.others if str(site) == "activation:scores")
    assert scores.may_be_infinite
    assert model.monitor.latest()["nan@activation:scores"] == 1.0  # the others are masked


# Files


class Writer:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.steps.append(step)


def observed(**settings: Any) -> gr.RewrittenModule:
    return gr.transform(nn.Linear(2, 2), gr.on("gradient:bias", Observe("norm")), **settings)


def run(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()


def test_two_writers_and_two_spellings_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, one, two = observed(), Writer(), Writer()
    run(model, 3)
    for sink in (one, two, one):
        model.monitor.to_tensorboard(sink)
    model.monitor.to_jsonl("run.jsonl")
    model.monitor.to_jsonl(tmp_path / "run.jsonl")
    assert one.steps == two.steps == [0, 1, 2]
    assert len(gr.read_jsonl(tmp_path / "run.jsonl")) == 3


def test_writer_that_fails_does_not_end_training() -> None:
    class Broken(Writer):
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            raise ValueError("closed")

    model = observed(monitor=gr.Monitor(every=1))
    model.monitor.to_tensorboard(Broken())
    with pytest.warns(
        gr.RewriteWarning, match=r"TensorBoard \(Broken\): step 0 could not be written.*ValueError: closed"
    ):
        run(model, 3)
    assert len(model.monitor.history("norm@gradient:bias")) == 3


@pytest.mark.pure
def test_foreign_files_are_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x" * 100_000)
    with pytest.raises(OSError, match=r"weights\.bin is no run log"):
        observed().monitor.to_jsonl(path)
    assert path.read_bytes() == b"x" * 100_000


def test_live_bounds_are_those_of_their_step(tmp_path: Path) -> None:
    bound = torch.tensor(1.0)
    policy = gr.on("gradient:bias", ClipByNorm(bound))
    model = gr.transform(nn.Linear(2, 2), policy, monitor=gr.Monitor(every=1))
    model.monitor.to_jsonl(tmp_path / "run.jsonl")
    for value in (1.0, 2.0, 3.0):
        bound.fill_(value)
        run(model, 1)
    model.monitor.to_jsonl(tmp_path / "run.jsonl")
    records = [step.records for step in gr.read_jsonl(tmp_path / "run.jsonl")]
    assert [record["bound@gradient:bias"] for record in records] == [1.0, 2.0, 3.0]


def test_rows_that_were_read_are_not_called_dropped() -> None:
    model = observed(monitor=gr.Monitor(capacity=2))
    for _ in range(5):
        run(model, 1)
        model.monitor.latest()
    assert model.monitor.dropped == 0


# Guards

SKIP = gr.on("gradient:*", CheckFinite("skip"))
BAD = torch.full((1, 2), math.nan)


def test_check_that_skips_is_not_silent_without_a_guard() -> None:
    model = gr.transform(nn.Linear(2, 2), SKIP)
    model(BAD).sum().backward()
    with pytest.warns(gr.RewriteWarning, match=r"skips nothing without gr\.guard"):
        model.monitor.latest()


@pytest.mark.long
def test_optimizers_on_one_monitor_skip_for_their_own_parameters() -> None:
    monitor = gr.Monitor()
    models = [gr.transform(nn.Linear(2, 2), SKIP, monitor=monitor) for _ in range(2)]
    one, two = (gr.guard(torch.optim.SGD(m.parameters(), lr=lr), m) for m, lr in zip(models, (0.1, 0.2), strict=True))
    before = [m.bias.clone() for m in models]
    models[0](BAD).sum().backward()
    models[1](torch.ones(1, 2)).sum().backward()
    one.step()
    two.step()

    assert torch.equal(models[0].bias, before[0])
    assert not torch.equal(models[1].bias, before[1])
    assert monitor.skipped == 1
    rates = {name: value for name, value in monitor.latest().items() if name.startswith("lr@")}
    assert rates == {"lr@optimizer:0": 0.1, "lr@optimizer:1": 0.2}
    del one, two
    assert monitor.skipped == 1


def test_parameters_outside_of_the_model_keep_no_verdict() -> None:
    model, head = gr.transform(nn.Linear(2, 2), SKIP), nn.Linear(2, 1)
    optimizer = gr.guard(torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1), model)
    head(model(BAD)).sum().backward()
    for module in (model, head):
        module.zero_grad()
    before = model.bias.clone()
    head(model(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    assert not torch.equal(model.bias, before)


def test_too_many_skips_are_said_though_the_row_is_gone() -> None:
    model = gr.transform(nn.Linear(2, 2), SKIP, monitor=gr.Monitor(capacity=1))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model, max_consecutive_skips=1)
    model(BAD).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    err = failure(optimizer.step)
    assert "1 updates in a row were skipped" in err.note


@pytest.mark.long
def test_locate_writes_no_gradient() -> None:
    x, w = torch.ones(1, 2, requires_grad=True), nn.Parameter(torch.ones(2))
    assert gr.locate(nn.Linear(2, 2), x, loss_fn=lambda out: (out * w).sum()) is None
    assert x.grad is None
    assert w.grad is None


class Parts(nn.Module):
    """The backward of the second part makes NaN; the head is a third one."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Module(), nn.Linear(4, 1)
        self.second = Lambda(lambda m, x: (m.inner(x) * 0).sqrt(), inner=nn.Linear(4, 4))
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.broken:
            torch._dynamo.graph_break()
        h = self.second(h)
        if self.broken:
            torch._dynamo.graph_break()
        loss: Tensor = self.head(h).sum()
        return loss


@pytest.mark.broad
@pytest.mark.filterwarnings("ignore:the tracer skipped a region:gradrewrite.RewriteWarning")
@pytest.mark.parametrize("checked", ["error:first", "gradient:first.*"])
@pytest.mark.parametrize("options", [{"regions": ["first", "second"]}, {"fullgraph": False}])
def test_a_fault_is_found_in_a_part_without_checks(checked: str, options: dict[str, Any]) -> None:
    model = gr.transform(Parts(broken="fullgraph" in options), gr.on(checked, CheckFinite()), **options)
    for _ in range(2):
        err = failure(lambda: model(torch.randn(2, 4)).backward())
        assert err.op == "second/sqrt"
        assert err.site.module == "second"
        assert "(m.inner(x) * 0).sqrt()" in err.source
        assert err.cause == ""


def test_a_fault_behind_all_regions_is_said_to_come_from_there() -> None:
    model = gr.transform(Parts(), gr.on("error:first", CheckFinite()), regions="first")
    err = failure(model(torch.randn(2, 4)).backward)

    assert err.op == ""
    assert err.cause == "the gradient that came from behind this part of the model was not finite already"


def test_parts_of_a_model_without_checks_keep_nothing() -> None:
    model = gr.transform(Parts(), gr.on("error:first", Observe("norm")), regions=["first", "second"])
    model(torch.randn(2, 4)).backward()

    assert all(graph.snapshot is None for step in recorder_of(model.monitor).records for graph in step.graphs)
