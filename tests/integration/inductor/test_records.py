"""Records, checks and replays through Inductor: the figures of op by op, and nothing folded away."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import metrics

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByNorm, Observe
from gradrewrite.rewriting import canvas

from models.gpt import Gpt, batch
from models.small import Lambda

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")]
ALL = Observe("max_abs", "mean_abs", "norm", "min", "max", "nan", "inf", "nonfinite", "zeros", "saturated")


def both(plain: nn.Module, policy: Any, **options: Any) -> list[gr.RewrittenModule]:
    models = [gr.transform(copy.deepcopy(plain), policy, **options) for _ in range(2)]
    models[1].compile()
    return models


@pytest.mark.parametrize("many", [0, 1000], ids=["opaque", "traced"])
def test_records_are_those_of_op_by_op(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvas, "MANY", many)
    if many:
        monkeypatch.setattr(canvas, "MEASURED_APART", frozenset())
    policy = [gr.on("*", ALL), gr.on("*/*", ALL), gr.on("*", CheckFinite("record")), gr.on("error:*", ClipByNorm(0.1))]
    net = Lambda(
        lambda net, x: net.two(torch.tanh(net.one(x)).relu()).sigmoid().sum(), one=nn.Linear(6, 8), two=nn.Linear(8, 3)
    )
    models = both(net, policy, dynamic=True)
    for rows in (2, 5):
        x = torch.randn(rows, 6)
        latest = []
        for model in models:
            model.zero_grad()
            model(x).backward()
            latest.append(model.monitor.latest())
        assert list(latest[0]) == list(latest[1])
        assert latest[1] == pytest.approx(latest[0], rel=1e-5, abs=1e-6)
        assert len(latest[0]) > 100
        assert ("aten.amax" in models[1].trace(x).code) == bool(many)


@pytest.mark.sample(12)
def test_gradients_are_not_changed_by_what_is_observed() -> None:
    torch.set_num_threads(1)
    plain, inputs = Gpt(layers=1), batch()
    models = [gr.transform(copy.deepcopy(plain), p) for p in ([], [gr.on("*", CheckFinite("record")), gr.on("*", ALL)])]
    grads = []
    for model in models:
        model.compile()
        model(*inputs).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    torch.set_num_threads(2)
    for name, wanted in grads[0].items():
        torch.testing.assert_close(grads[1][name], wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.sample(12)
def test_check_of_gradients_adds_no_kernel() -> None:
    plain, inputs = Gpt(layers=1), batch()
    counts = []
    with torch._inductor.config.patch(force_disable_caches=True):
        for policy in ([], gr.on("gradient:*", CheckFinite("skip"))):  # type: ignore[var-annotated]
            model = gr.transform(copy.deepcopy(plain), policy)
            model.compile()
            metrics.reset()
            model(*inputs).backward()
            counts.append(metrics.generated_kernel_count)
    assert counts[0] == counts[1] > 10


@pytest.mark.parametrize("policy", [gr.on("gradient:*", CheckFinite()), gr.on("activation:/mul#1", CheckFinite())])
def test_product_with_zero_is_not_folded_where_something_is_checked(policy: gr.Policy) -> None:
    # Folded to 0, the product would hide that it is NaN where x is infinite.
    model = gr.transform(Lambda(lambda net, x: ((net.w * x) * 0.0).sum(), w=nn.Parameter(torch.ones(4))), policy)
    model.compile()
    model(torch.ones(4)).backward()
    with pytest.raises(gr.NonFiniteError) as caught:
        model(torch.tensor([1.0, torch.inf, 1.0, 1.0])).backward()
    assert caught.value.cause == "the input x was not finite already"
    assert str(caught.value.site) == "activation:/mul"


def test_overflow_that_only_rounding_makes_is_said() -> None:
    """Compiled code may keep float32 where eager code rounds to float16; a check sees what eager code does."""

    net = Lambda(lambda net, x: ((net.w * x) / x).sum(), w=nn.Parameter(torch.full((4,), 200.0, dtype=torch.float16)))
    model = gr.transform(net, gr.on("activation:/mul", CheckFinite("record")))
    model.compile()
    model(torch.full((4,), 500.0, dtype=torch.float16)).backward()
    recorded = model.monitor.latest()["nonfinite@activation:/mul"]
    err = gr.locate(model, torch.full((4,), 500.0, dtype=torch.float16))
    assert err is not None  # op by op 200 * 500 is no float16
    assert err.op == "/mul"
    assert recorded == 4.0  # measured apart, it is read as float16
