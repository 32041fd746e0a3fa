"""The noise scale of a network, against the gradients of its examples one by one."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByValue, ClipPerExample, NoiseScale, Observe, Scale, WeighLosses


class Net(nn.Module):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.one, self.two, self.reduction = nn.Linear(4, 6), nn.Linear(6, 2), reduction

    def forward(self, x: Tensor) -> Tensor:
        per_example = (self.two(self.one(x).tanh()) - 1).square().sum(-1)
        return per_example.mean() if self.reduction == "mean" else per_example.sum()


def made(reduction: str = "mean") -> Net:
    torch.manual_seed(0)
    return Net(reduction).double()


def batch(step: int, number: int = 8) -> Tensor:
    return torch.randn(number, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def estimates(net: Net, x: Tensor) -> tuple[float, float]:
    """The unbiased trace of the covariance, and squared norm of the true gradient."""
    rows = [torch.autograd.grad(net(row), list(net.parameters())) for row in x.split(1)]
    flat = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    trace = float(flat.var(0).sum())
    return trace, float(flat.mean(0).square().sum()) - trace / len(x)


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_examples_one_by_one(reduction: Any, scale: float | None) -> None:
    net, decay = made(reduction), 0.7
    plain = copy.deepcopy(net)
    loss_scale = None if scale is None else torch.tensor(scale, dtype=torch.float64)
    policy = gr.on("gradient:*", NoiseScale(decay=decay, loss_reduction=reduction))
    model, means = gr.transform(net, policy, loss_scale=loss_scale), [0.0, 0.0]
    for step in range(6):
        model.zero_grad()
        plain.zero_grad()
        loss = model(batch(step))
        (loss if scale is None else loss * scale).backward()
        plain(batch(step)).backward()
        trace, norm = estimates(plain, batch(step))
        means = [decay * mean + (1 - decay) * value for mean, value in zip(means, (trace, norm), strict=True)]
        latest = model.monitor.latest()
        assert latest["example_variance@group:default"] == pytest.approx(trace, rel=1e-6)
        assert latest["true_square_norm@group:default"] == pytest.approx(norm, rel=1e-6)
        assert latest["noise_scale@group:default"] == pytest.approx(means[0] / means[1], rel=1e-6)
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            torch.testing.assert_close(p.grad / (scale or 1), q.grad)


def test_gradients_keep_their_bits() -> None:
    found = []
    policies: list[Any] = [[], gr.on("gradient:*", NoiseScale())]
    for policy in policies:
        net = made()
        gr.transform(net, policy)(batch(0)).backward()
        found.append([p.grad for p in net.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_groups_are_apart() -> None:
    net = made()
    rules = [gr.on(f"gradient:{name}.*", NoiseScale(decay=0.0, group=name)) for name in ("one", "two")]
    model = gr.transform(net, [*rules, gr.on("gradient:two.bias", Observe("noise_scale"))])
    model(batch(0)).backward()
    latest = model.monitor.latest()
    for name in ("one", "two"):
        ratio = latest[f"example_variance@group:{name}"] / latest[f"true_square_norm@group:{name}"]
        assert latest[f"noise_scale@group:{name}"] == pytest.approx(ratio, rel=1e-5)
    assert "noise_scale@gradient:two.bias" in latest


def test_steps_that_are_not_finite_do_not_count() -> None:
    net = made()
    model = gr.transform(net, gr.on("gradient:*", NoiseScale(decay=0.5)))
    model(batch(0, 1)).backward()
    assert math.isnan(model.monitor.latest()["noise_scale@group:default"])
    model(batch(1)).backward()
    wanted = model.monitor.latest()["noise_scale@group:default"]
    bad = batch(2)
    bad[0] = math.nan
    model(bad).backward()
    latest = model.monitor.latest()
    assert math.isnan(latest["example_variance@group:default"])
    assert latest["noise_scale@group:default"] == pytest.approx(wanted)


def test_the_state_is_saved() -> None:
    policy = gr.on("gradient:*", NoiseScale(decay=0.9))
    one, other = gr.transform(made(), policy), gr.transform(made(), policy)
    one(batch(0)).backward()
    gr.load_state_dict(other, gr.state_dict(one))
    one(batch(1)).backward()
    other(batch(1)).backward()
    address = "noise_scale@group:default"
    assert one.monitor.latest()[address] == pytest.approx(other.monitor.latest()[address])


def test_beside_other_actions() -> None:
    net, plain = made(), made()
    policy = [gr.on("gradient:*", [Scale(2.0), NoiseScale(decay=0.0)]), gr.on("gradient:*", ClipPerExample(0.5))]
    model = gr.transform(net, policy)
    model(batch(0)).backward()
    trace, norm = estimates(plain, batch(0))
    assert model.monitor.latest()["noise_scale@group:default"] == pytest.approx(trace / norm, rel=1e-6)
    assert model.monitor.latest()["example_variance@group:default"] == pytest.approx(4 * trace, rel=1e-6)
    alone = made()
    gr.transform(alone, gr.on("gradient:*", [Scale(2.0), ClipPerExample(0.5)]))(batch(0)).backward()
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ([gr.on("gradient:*", [ClipByValue(0.1), NoiseScale()])], "NoiseScale.* needs the gradient of each example"),
        ([gr.on("gradient:*", WeighLosses((1.0, 2.0))), gr.on("gradient:*", NoiseScale())], "WeighLosses"),
        ([gr.on("error:one", NoiseScale())], "does not apply to this kind of site"),
    ],
)
def test_refused(policy: Any, words: str) -> None:
    with pytest.raises(gr.PolicyError, match=words):
        gr.transform(made(), policy)(batch(0))


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"decay is in \[0, 1\), got 1.0"):
        NoiseScale(decay=1.0)
    with pytest.raises(TypeError, match="decay is a number"):
        NoiseScale(decay=torch.tensor(0.5))
    with pytest.raises(ValueError, match="loss_reduction"):
        NoiseScale(loss_reduction="max")


@pytest.mark.inductor
def test_compiled() -> None:
    model = gr.transform(made(), gr.on("gradient:*", NoiseScale(decay=0.0))).compile()
    model(batch(0)).backward()
    trace, norm = estimates(made(), batch(0))
    assert model.monitor.latest()["noise_scale@group:default"] == pytest.approx(trace / norm, rel=1e-5)
