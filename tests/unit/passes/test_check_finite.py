"""What follows a failed check, and that nothing waits for it."""

from __future__ import annotations

import gc
import logging
import math
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.backends.engines import AotEager
from gradrewrite.passes import CheckFinite, ClipByNorm, ClipByValue, Observe

from helpers import Probe, run_probe
from models.small import Lambda

SEEN = "max_abs@error:h"


def test_warning_comes_one_step_later_and_names_the_site() -> None:
    model = gr.transform(Probe(), gr.on("error:h", CheckFinite("warn")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_probe(model, 1.0, math.nan)
    with pytest.warns(gr.RewriteWarning, match=r"step 1: first non-finite: error:h, 100 % of 2 elements"):
        run_probe(model, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_probe(model, 1.0, 1.0)
        assert model.monitor.history("nonfinite@error:h") == [0.0, 2.0, 0.0, 0.0, 0.0]


def test_warning_comes_when_the_monitor_is_read() -> None:
    model = gr.transform(Probe(), gr.on("error:h", CheckFinite("warn")))
    run_probe(model, math.inf)
    with pytest.warns(gr.RewriteWarning, match="error:h"):
        model.monitor.latest()


def test_record_only_records() -> None:
    model = gr.transform(Probe(), gr.on("error:h", [CheckFinite("record"), CheckFinite("record", nan_only=True)]))
    model(torch.tensor([math.inf, math.nan])).backward()
    latest = model.monitor.latest()

    assert latest["nonfinite@error:h"] == 2.0
    assert latest["nan@error:h"] == 1.0
    err = model.monitor.failure()
    assert err is not None
    assert err.cause == "the input error was not finite already"


def test_raise_leaves_the_monitor_usable() -> None:
    model = gr.transform(Probe(), gr.on("error:h", [Observe("max_abs"), CheckFinite()]))
    run_probe(model, 1.0)
    with pytest.raises(gr.NonFiniteError, match="step 1: first non-finite: activation:/mul#1"):
        run_probe(model, math.inf)
    assert model.w.grad is not None
    run_probe(model, 3.0)
    assert model.monitor.history(SEEN) == [1.0, math.inf, 3.0]


def test_nan_only_lets_infinities_pass() -> None:
    model = gr.transform(Probe(), gr.on("error:h", CheckFinite(nan_only=True)))
    run_probe(model, math.inf)
    with pytest.raises(gr.NonFiniteError):
        run_probe(model, math.nan)


def test_first_site_is_the_first_in_execution_not_in_the_alphabet() -> None:

    policy = [gr.on("activation:*", CheckFinite("warn")), gr.on("error:*", CheckFinite("warn"))]
    net = Lambda(lambda net, x: net.c(net.a(net.b(x))).sum(), b=nn.Linear(2, 2), a=nn.Linear(2, 2), c=nn.Linear(2, 2))
    model = gr.transform(net, policy)
    with torch.no_grad():
        model.a.weight[0, 0] = torch.nan
    model(torch.ones(1, 2)).backward()
    with pytest.warns(gr.RewriteWarning, match="first non-finite: activation:a, .*2 other sites"):
        model.monitor.latest()  # activation:c, then error:b; the errors of a and c are finite


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.inductor)])
def test_no_host_synchronisation_in_a_step(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not one read of a tensor, whatever is recorded, checked, clipped, logged, guarded or written."""
    policy = [
        gr.on("error:h", [Observe("norm", "zeros"), CheckFinite("warn"), ClipByValue(0.5, log=True)]),
        gr.on("gradient:w", [CheckFinite("skip"), CheckFinite("record"), ClipByNorm(1.0)]),
        gr.on("activation:h", CheckFinite("skip")),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = gr.transform(Probe(), policy, monitor=gr.Monitor(every=1), loss_scale=scaler)
    if is_compiled:
        model.compile()
    model.monitor.to_jsonl(tmp_path / "run.jsonl")
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), fused=True), model)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2))).backward()
        optimizer.step()

    step()
    read: list[str] = []
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, lambda *_, name=name: read.append(name))
    with caplog.at_level(logging.INFO, "gradrewrite.monitor"):
        for _ in range(3):
            step()
    assert read == []
    monkeypatch.undo()
    assert len(model.monitor.history("norm@error:h")) == 4
    assert model.monitor.skipped == 0


@pytest.mark.slow
def test_checks_do_not_keep_the_model_alive() -> None:
    model = gr.transform(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), gr.on("*", CheckFinite("record")))
    model(torch.ones(3, 2)).sum().backward()
    model(torch.ones(3, 2))  # without a backward
    monitor, refs = model.monitor, [weakref.ref(model.original), weakref.ref(model.original[0].weight)]
    del model
    gc.collect()

    assert [ref() for ref in refs] == [None, None]
    assert "nonfinite@gradient:0.weight" in monitor.latest()


@pytest.mark.slow
def test_inputs_of_a_step_are_let_go() -> None:
    model = gr.transform(nn.Linear(2, 2), gr.on("gradient:*", CheckFinite("record")))
    x = torch.ones(3, 2)
    ref = weakref.ref(x)
    model(x).sum().backward()
    del x
    model(torch.ones(3, 2)).sum().backward()
    gc.collect()
    assert ref() is None


def test_by_torch_compile_and_a_backend() -> None:
    net = nn.Linear(3, 4, bias=False)

    def step(x: Tensor) -> Tensor:
        h = net(x)
        return torch.sqrt(h * h).sum()

    backend = gr.backend(gr.on("gradient:*", CheckFinite()))
    backend.engine = AotEager()
    run_step = torch.compile(step, backend=backend, fullgraph=True)
    run_step(torch.ones(2, 3)).backward()
    with pytest.raises(gr.NonFiniteError) as caught:
        run_step(torch.zeros(2, 3)).backward()
    assert caught.value.op == "/sqrt"
    assert str(caught.value.site) == "error:/mul"
