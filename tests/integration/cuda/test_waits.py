"""No policy waits for the device or uploads anything while it blocks, but for those that are documented to wait."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import (
    L2,
    CheckFinite,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    DecayWeights,
    Keep,
    NanToNum,
    Observe,
    Scale,
    SkipSpikes,
    Zero,
)

from gpu.log import Count, SimulatedGpu

WARM, STEPS = 3, 7  # steps before it counts, and all


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        policy: Makes the policy; on the device there may be tensors of it.
        waits: How often the host waits in a step; 0 if it is not documented to wait.
        optimizer: ``"fused"``, ``"foreach"`` or ``"sgd"``.
        guard: Arguments of ``gr.guard``; None without a guard.
        monitor: Arguments of ``gr.Monitor``.
        scale: ``"scaler"`` for a GradScaler; else the device of a tensor.
        accumulate: Backwards of a step.
        set_to_none: As ``zero_grad`` takes it.
        logs: Whether it logs the loss of each micro-batch.
        writes: Whether records are written to a file.
        keeps_gradients: Whether ``.grad`` is read after the next forward; with CUDA graphs the next replay overwrites
            it, under plain torch.compile too.
    """

    policy: Callable[[], Any]
    waits: int = 0
    optimizer: str = "fused"
    guard: Mapping[str, Any] | None = None
    monitor: Mapping[str, Any] = field(default_factory=dict)
    scale: str = ""
    accumulate: int = 1
    set_to_none: bool = True
    logs: bool = False
    writes: bool = False
    keeps_gradients: bool = False


def on(pattern: str, *actions: Any) -> Callable[[], Any]:
    return lambda: gr.on(pattern, list(actions))


def here(value: float) -> Tensor:
    return torch.tensor(value, device="cpu")


def there(value: float) -> Tensor:
    return torch.full((), value, device="cuda")


def scaled_by(factor: Tensor) -> Callable[[Tensor], Tensor]:
    def scale(gradient: Tensor) -> Tensor:
        gr.record("largest", gradient.abs().amax())
        return gradient * factor

    return scale


ALL = ("max_abs", "mean_abs", "norm", "min", "max", "nan", "inf", "nonfinite", "zeros")
GLOBAL = on("gradient:*", ClipByGlobalNorm(1e-2))
CHECKED = on("gradient:*", CheckFinite("skip"))
CASES: dict[str, Case] = {
    "nothing": Case(list),
    "value": Case(on("error:*", ClipByValue(1e-3))),
    "value, log": Case(on("error:*", ClipByValue(1e-3, log=True)), monitor={"every": 1}),
    "value, two bounds": Case(on("gradient:*", ClipByValue(1e-3, min=-1.0, log=True))),
    "value, bound on the device": Case(lambda: gr.on("error:*", ClipByValue(there(1e-3), log=True))),
    "value, bound on the host": Case(lambda: gr.on("error:*", ClipByValue(here(1e-3)))),
    "value, log, bound on the host": Case(lambda: gr.on("error:*", ClipByValue(here(1e-3), log=True))),
    "norm": Case(on("gradient:*", ClipByNorm(1e-3))),
    "norm, log": Case(on("error:*", ClipByNorm(1e-3, log=True))),
    "norm, bound on the device": Case(lambda: gr.on("gradient:*", ClipByNorm(there(1e-3)))),
    "norm, bound on the host": Case(lambda: gr.on("gradient:*", ClipByNorm(here(1e-3)))),
    "norm of errors, bound on the host": Case(lambda: gr.on("error:*", ClipByNorm(here(1e-3), log=True))),
    "global norm": Case(GLOBAL),
    "global norm, largest": Case(on("gradient:*", ClipByGlobalNorm(1e-3, norm_type=torch.inf))),
    "global norm, bound on the device": Case(lambda: gr.on("gradient:*", ClipByGlobalNorm(there(1e-3)))),
    "global norm, bound on the host": Case(lambda: gr.on("gradient:*", ClipByGlobalNorm(here(1e-3)))),
    "global norm, gradients set to zero": Case(GLOBAL, set_to_none=False, keeps_gradients=True),
    "global norm, two backwards": Case(GLOBAL, accumulate=2, keeps_gradients=True),
    "global norm, GradScaler": Case(GLOBAL, scale="scaler"),
    "global norm, scale on the device": Case(GLOBAL, scale="cuda"),
    "global norm, scale on the host": Case(GLOBAL, scale="cpu"),
    "global norm, written": Case(GLOBAL, writes=True, monitor={"every": 2, "capacity": 8}),
    "keep": Case(on("error:*", Keep())),
    "scale, zero, finite": Case(lambda: [gr.on("error:0", [Scale(-1.0), NanToNum()]), gr.on("error:1", Zero())]),
    "function": Case(lambda: gr.on("error:*", scaled_by(there(0.5)))),
    "function, tensor on the host": Case(lambda: gr.on("error:*", scaled_by(here(0.5)))),
    "observe": Case(
        lambda: [gr.on(f"{kind}:*", Observe(*ALL)) for kind in ("error", "activation", "gradient")],
        monitor={"every": 1},
    ),
    "observe, GradScaler": Case(on("error:*", Observe(*ALL)), scale="scaler"),
    "check, warn": Case(on("error:*", CheckFinite("warn"))),
    "check, record": Case(on("activation:*", CheckFinite("record"))),
    "check, skip, no guard": Case(CHECKED),
    "check, skip, fused optimizer": Case(CHECKED, guard={}),
    "check, skip, GradScaler": Case(CHECKED, guard={}, scale="scaler"),
    "update ratios": Case(CHECKED, guard={"update_ratios": True}),
    "step, global norm": Case(on("step:*", CheckFinite("skip"), ClipByGlobalNorm(1e-2)), guard={}),
    "step, global norm, GradScaler": Case(
        on("step:*", CheckFinite("skip"), ClipByGlobalNorm(1e-2)),
        guard={},
        scale="scaler",
        accumulate=2,
        keeps_gradients=True,
    ),
    "step, bound on the device": Case(lambda: gr.on("step:*", ClipByGlobalNorm(there(1e-2))), guard={}),
    "step, plain SGD": Case(on("step:*", Observe(*ALL), ClipByGlobalNorm(1e-2)), guard={}, optimizer="sgd"),
    "step, all of it": Case(
        lambda: [
            gr.on("step:0.*", [ClipByValue(1e-3, log=True), L2(0.1), Scale(there(0.5)), Keep()]),
            gr.on("step:*", [CheckFinite("warn"), ClipByNorm(1e-2), CheckFinite("skip"), DecayWeights(0.1)]),
        ],
        guard={},
        monitor={"every": 1},
    ),
    "step, spikes": Case(on("step:*", ClipByGlobalNorm(1e-2), SkipSpikes(window=4)), guard={}),
    "step, spikes of the loss, GradScaler": Case(
        on("step:*", SkipSpikes(window=4, of="loss")),
        guard={},
        scale="scaler",
        accumulate=2,
        keeps_gradients=True,
        logs=True,
    ),
    "step, observed, GradScaler": Case(on("step:*", Observe(*ALL)), guard={}, scale="scaler"),
    "param and state": Case(
        lambda: [gr.on(f"{kind}:*", [Observe(*ALL), CheckFinite("warn"), Keep()]) for kind in ("param", "state")],
        guard={},
    ),
    # Documented to wait: "raise" at the end of the backward, a guard of an optimizer that cannot skip on the device.
    "check, raise": Case(on("gradient:*", CheckFinite()), waits=1),
    "step, check, raise": Case(on("step:*", CheckFinite()), guard={}, waits=1),
    "param, check, raise": Case(on("param:*", CheckFinite()), guard={}, waits=1),
    "check, skip, plain SGD": Case(CHECKED, guard={}, optimizer="sgd", waits=1),
}


def train(case: Case, mode: str, gpu: SimulatedGpu | None, folder: Path) -> list[Count]:
    """Train; what each step did, as far as it counts."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).cuda()
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0) if case.scale == "scaler" else None
    scale = torch.full((), 8.0, device=case.scale) if case.scale in ("cpu", "cuda") else scaler
    model = gr.transform(net, case.policy(), monitor=gr.Monitor(**case.monitor), loss_scale=scale)
    model.compile(mode=mode)
    if case.writes:
        model.monitor.to_jsonl(folder / "run.jsonl")
    if case.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    if case.guard is not None:
        optimizer = gr.guard(optimizer, model, **case.guard)
    x = torch.randn(16, 8, device="cuda")
    done = []
    for step in range(STEPS):
        begin = gpu.count() if gpu is not None else None
        torch.cuda.set_sync_debug_mode("error" if step >= WARM and not case.waits else "default")
        optimizer.zero_grad(set_to_none=case.set_to_none)
        for _ in range(case.accumulate):
            loss = model(x).square().sum()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if case.logs:
                model.monitor.log("loss", loss)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        torch.cuda.set_sync_debug_mode("default")
        if gpu is not None and begin is not None and step >= WARM:
            done.append(gpu.count() - begin)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    return done


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::gradrewrite.RewriteWarning")
def test_nothing_waits(
    name: str, mode: str, simulation: SimulatedGpu | None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    case = CASES[name]
    if case.keeps_gradients and mode == "reduce-overhead":
        pytest.skip("the simulated replay overwrites gradients that are kept; not compared with torch on a device")
    with caplog.at_level(logging.INFO, "gradrewrite.monitor"):
        done = train(case, mode, simulation, tmp_path)
    if simulation is None:
        return  # a real GPU has said so itself
    texts = [*simulation.waits, *(upload.text for upload in simulation.uploads)]
    assert [step.waits for step in done] == [case.waits] * (STEPS - WARM), texts
    assert not any(step.blocking for step in done), texts
    if mode == "reduce-overhead":
        assert simulation.num_graphs == 2  # forward and backward
        assert not simulation.graph_refusals


def test_log_lines_come_while_training_logs_too(caplog: pytest.LogCaptureFixture) -> None:
    model = gr.transform(nn.Linear(4, 2).cuda(), gr.on("gradient:*", ClipByNorm(1e-3, log=True)))
    with caplog.at_level(logging.INFO, "gradrewrite.monitor"):
        for _ in range(20):
            loss = model(torch.ones(3, 4, device="cuda")).sum()
            loss.backward()
            model.monitor.log("loss", loss)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        before = len(caplog.records)
        model.monitor.flush()

    assert len(caplog.records) == 40  # of two parameters
    assert before >= 10  # an event of the simulated device has happened at the second look, and each step has two
