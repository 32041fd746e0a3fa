"""The doctor on real training runs: what it says of a sick one, and that it says nothing of a healthy one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite import cli
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, Observe

NORMS = [gr.on("error:*", Observe("norm")), gr.on("gradient:*", Observe("norm"))]
CHECKS = gr.on("*", CheckFinite("record"))


class Deep(nn.Module):
    def __init__(self, layers: int, act: Callable[[], nn.Module], gain: float = 1.0, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), act()) for _ in range(layers)))
        self.head = nn.Linear(width, 1)
        with torch.no_grad():
            for parameter in self.layers.parameters():
                parameter.mul_(gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def train(
    plain: nn.Module,
    policy: gr.Policy,
    steps: int = 30,
    lr: float = 0.01,
    guarded: bool = False,
    spoil: Callable[[int, Tensor, torch.optim.Optimizer], Tensor] | None = None,
    loss_of: Callable[[Tensor, int], Tensor] = lambda out, _: out.square().mean(),
) -> gr.RewrittenModule:
    model = gr.transform(plain, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if guarded:
        gr.guard(optimizer, model)
    for step in range(steps):
        x = torch.randn(32, 16)
        if spoil is not None:
            x = spoil(step, x, optimizer)
        optimizer.zero_grad()
        loss_of(model(x) - x[:, :1], step).backward()
        optimizer.step()
    return model


def only(model: gr.RewrittenModule) -> gr.Cause:
    (finding,) = model.monitor.diagnose()
    assert finding.figures
    assert finding.suggestion
    return finding


@pytest.mark.slow
def test_healthy_run_has_no_findings() -> None:
    policy = [*NORMS, CHECKS, gr.on("activation:*", Observe("zeros", "saturated"))]
    model = train(Deep(3, nn.ReLU), policy, steps=100, lr=0.05)
    assert model.monitor.diagnose() == ()


@pytest.mark.slow
def test_vanishing() -> None:
    finding = only(train(Deep(12, nn.Sigmoid), gr.on("error:layers.*", Observe("norm"))))
    assert finding.kind == "vanishing"
    assert finding.site.startswith("error:layers.")
    assert finding.figures["growth_per_layer"] < 0.5


@pytest.mark.slow
def test_exploding_over_layers() -> None:
    finding = only(train(Deep(10, nn.Identity, gain=6.0), gr.on("error:layers.*", Observe("norm")), lr=1e-30))
    assert finding.kind == "exploding"
    assert finding.figures["growth_per_layer"] > 1.5


def test_exploding_over_steps() -> None:
    model = train(nn.Linear(16, 1), gr.on("gradient:*", Observe("norm")), steps=60, lr=1.3)
    finding, *others = model.monitor.diagnose()
    assert {one.kind for one in (finding, *others)} == {"exploding"}
    assert finding.site.startswith("gradient:")
    assert 1.1 < finding.figures["growth_per_step"] < 4.0  # |1 - 2.6 e| for eigenvalues e of a batch around 1


@pytest.mark.broad
@pytest.mark.parametrize("logs", [True, False])
def test_a_clip_that_always_acts_is_no_fault_where_the_loss_falls(logs: bool) -> None:
    torch.manual_seed(0)
    model = gr.transform(nn.Linear(16, 1), gr.on("gradient:*", ClipByGlobalNorm(0.1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(30):
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if logs:
            model.monitor.log("loss", loss)

    assert [one.kind for one in model.monitor.diagnose()] == ([] if logs else ["clip acts always"])


@pytest.mark.long
def test_dead_and_saturated_layers() -> None:
    dead = Deep(2, nn.ReLU)
    with torch.no_grad():
        dead.layers[0][0].bias.fill_(-50.0)
    finding = only(train(dead, gr.on("activation:layers.*", Observe("zeros")), lr=1e-3))
    assert (finding.kind, finding.site) == ("dead", "activation:layers.0.1")
    finding = only(train(Deep(2, nn.Tanh, gain=200.0), gr.on("activation:layers.*", Observe("saturated")), lr=1e-3))
    assert finding.kind == "saturated"
    assert finding.site.startswith("activation:layers.")


@pytest.mark.long
def test_thresholds() -> None:
    finding = only(train(Deep(2, nn.Tanh), gr.on("gradient:*", ClipByGlobalNorm(1e-6))))
    assert (finding.kind, finding.site) == ("clip acts always", "group:default")
    assert finding.figures["bound"] == pytest.approx(1e-6)
    model = train(Deep(2, nn.Tanh), gr.on("gradient:*", ClipByGlobalNorm(1e6)))
    assert model.monitor.diagnose() == ()  # a clip that never acts is no fault


@pytest.mark.long
def test_faulty_input() -> None:
    def spoil(step: int, x: Tensor, _: torch.optim.Optimizer) -> Tensor:
        return torch.where(torch.arange(32)[:, None] < 3, torch.nan, x) if step == 7 else x

    findings = train(Deep(2, nn.Tanh), CHECKS, spoil=spoil).monitor.diagnose()
    assert (findings[0].kind, findings[0].site, findings[0].step) == ("faulty input", "data:x", 7)
    assert findings[0].figures["count"] == 48.0


@pytest.mark.long
def test_faulty_loss() -> None:
    def loss_of(out: Tensor, step: int) -> Tensor:
        return out.square().sum() / (0 if step == 5 else out.numel())

    findings = train(Deep(2, nn.Tanh), CHECKS, loss_of=loss_of).monitor.diagnose()
    assert (findings[0].kind, findings[0].site, findings[0].step) == ("faulty loss", "outside:0", 5)


@pytest.mark.long
def test_faulty_learning_rate() -> None:
    def spoil(step: int, x: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.param_groups[0]["lr"] = math.nan if step == 4 else 0.01
        return x

    findings = train(Deep(2, nn.Tanh), CHECKS, spoil=spoil, guarded=True).monitor.diagnose()
    assert (findings[0].kind, findings[0].site, findings[0].step) == ("faulty learning rate", "optimizer:0", 4)


@pytest.mark.slow
def test_first_site_that_is_not_finite() -> None:
    class Logs(Deep):
        def forward(self, x: Tensor) -> Tensor:
            h = gr.tap(torch.log(self.layers(x).abs()), "logs")
            return self.head(h)

    def spoil(step: int, x: Tensor, _: torch.optim.Optimizer) -> Tensor:
        return x * 0.0 if step == 6 else x

    plain = Logs(2, nn.ReLU)
    with torch.no_grad():
        plain.layers[1][0].bias.fill_(-1.0)
        plain.layers[0][0].bias.zero_()
    finding = train(plain, CHECKS, spoil=spoil).monitor.diagnose()[0]
    assert finding.kind == "non-finite"
    assert finding.site == "activation:logs"


@pytest.mark.slow
def test_doctor_reads_what_the_monitor_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = train(Deep(12, nn.Sigmoid), gr.on("error:layers.*", Observe("norm")))
    model.monitor.to_jsonl(tmp_path / "run.jsonl")
    assert cli.main(["doctor", str(tmp_path / "run.jsonl"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)

    assert shown == [finding.to_json() for finding in model.monitor.diagnose()]
    assert cli.main(["doctor", str(tmp_path / "run.jsonl")]) == 0
    assert capsys.readouterr().out.startswith("Vanishing gradients\n\nErrors vanish on the way back")


def classified(depth: int) -> tuple[nn.Module, list[Any]]:
    """Sigmoid layers, and batches with classes of which one is frequent, so that a bias alone lowers the loss."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
    draw = torch.Generator().manual_seed(0)
    shares = torch.tensor([0.7, 0.1, 0.1, 0.1])
    batches = [
        (torch.randn(64, 16, generator=draw), torch.multinomial(shares, 64, True, generator=draw)) for _ in range(100)
    ]
    return nn.Sequential(*layers, nn.Linear(16, 4)), batches


@pytest.mark.broad
def test_a_loss_that_falls_by_the_bias_of_the_head_alone_hides_no_vanishing_error() -> None:
    net, batches = classified(14)
    found = gr.diagnose(
        net,
        batches,
        loss=lambda out, batch: nn.functional.cross_entropy(out, batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.03),
        steps=100,
    )

    assert [cause.kind for cause in found.causes] == ["vanishing"]
    assert found.outcome == "learns"
    assert "It learns no more than the best constant answer, whose loss is 0.9" in str(found)


def test_call_numbers_of_causes_and_no_help_in_verdicts() -> None:
    class Divides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x) / 2
            return (h / (0 * h)).sum()

    found = gr.diagnose(Divides(), [torch.randn(4, 3)], steps=3)
    (cause,) = found.causes

    assert cause.site == "activation:/truediv#1"
    assert "help: gradrewrite" not in str(found)
