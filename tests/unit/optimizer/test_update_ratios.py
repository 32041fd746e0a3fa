"""``gr.guard(..., update_ratios=True)``: how far each step moves each parameter."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, Observe

from helpers import mostly_slow
from models.optimizers import OPTIMIZERS
from models.small import Lambda

GOOD, BAD = torch.ones(2, 3), torch.full((2, 3), math.nan)
NAMES = ("sgd", "sgd plain fused", "adamw", "adamw fused")


class Net(nn.Module):
    """Tied, scalar, zero and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.zeros(3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x).tanh()) * self.scale + self.shift).square().sum()


POLICY = gr.on("gradient:*", CheckFinite("skip"))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()


def ratios(before: dict[str, Tensor], after: nn.Module) -> dict[str, float]:
    """By plain float64 mathematics."""
    found = {}
    for name, parameter in after.named_parameters():
        old, new = (
            t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (before[name], parameter)
        )
        change, size = (new - old).abs().square().sum().sqrt(), old.abs().square().sum().sqrt()
        found[name] = 0.0 if change == 0 else float(change / size)
    return found


def recorded(model: gr.RewrittenModule) -> dict[str, float]:
    head = "update_ratio@gradient:"
    return {k.removeprefix(head): v for k, v in model.monitor.latest().items() if k.startswith(head)}


@pytest.mark.parametrize("name", mostly_slow(NAMES, 2))
def test_equals_an_eager_optimizer(name: str) -> None:
    plain = Net()
    model = gr.transform(copy.deepcopy(plain), POLICY)
    optimizer = gr.guard(OPTIMIZERS[name](model.parameters()), model, update_ratios=True)
    other = OPTIMIZERS[name](plain.parameters())
    for _ in range(3):
        before = {n: p.detach().clone() for n, p in plain.named_parameters()}
        step(plain, other, GOOD)
        step(model, optimizer, GOOD)
        want = ratios(before, plain)

        assert recorded(model) == pytest.approx(want, rel=1e-4)
        assert set(want) == {"first.weight", "first.bias", "second.bias", "scale", "shift", "unused"}
        assert want["unused"] == 0
        assert want["scale"] > 0


@pytest.mark.broad
@pytest.mark.parametrize("name", mostly_slow(NAMES, 2))
def test_skipped_step_is_zero_and_leaves_no_trace(name: str) -> None:
    plain = gr.transform(Net(), POLICY)
    model = gr.transform(copy.deepcopy(plain.original), POLICY)
    other = gr.guard(OPTIMIZERS[name](plain.parameters()), plain)
    optimizer = gr.guard(OPTIMIZERS[name](model.parameters()), model, update_ratios=True)
    for x in (GOOD, BAD, GOOD):
        step(plain, other, x)
        step(model, optimizer, x)
        assert (max(recorded(model).values()) == 0) is (x is BAD)

    assert model.monitor.history("skipped@optimizer:0") == [0.0, 1.0, 0.0]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_zero_and_non_finite_parameters() -> None:
    net = Net()
    net.still = nn.Parameter(torch.zeros(2))
    model = gr.transform(net, gr.on("gradient:s*", Observe("norm")))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model, update_ratios=True)
    step(model, optimizer, GOOD)
    assert recorded(model)["shift"] == math.inf  # it was 0 and moved
    assert recorded(model)["still"] == 0.0  # it was 0 and stays 0
    with torch.no_grad():
        model.scale.fill_(math.nan)
    step(model, optimizer, GOOD)
    assert math.isnan(recorded(model)["scale"])


@pytest.mark.parametrize("dtype", mostly_slow([torch.bfloat16, torch.float16, torch.float64, torch.complex64]))
def test_dtypes(dtype: torch.dtype) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.linspace(1, 2, 48, dtype=dtype).reshape(6, 8).t())
            self.v = nn.Parameter(torch.full((3,), 1e-30 if dtype == torch.float64 else 1e-3, dtype=dtype))

            self.u = nn.Parameter(torch.full((1,), 1.0078125, dtype=dtype))  # its change has more digits than itself

        def forward(self) -> Tensor:
            return (self.w.abs().square().sum() + self.v.abs().sum() * 1e-3 + self.u.abs().sum() * 317).float()

    model = gr.transform(One(), gr.on("gradient:*", Observe("norm")))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1e-2), model, update_ratios=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model().backward()
    optimizer.step()

    assert recorded(model) == pytest.approx(ratios(before, model.original), rel=1e-6)


@pytest.mark.slow
def test_large_parameters_are_summed_exactly() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((30_000_000,), 0.1))

        def forward(self) -> Tensor:
            return self.w[:9].sum()

    model = gr.transform(Large(), gr.on("gradient:*", Observe("norm")))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1e-3), model, update_ratios=True)
    model().backward()
    optimizer.step()

    assert recorded(model)["w"] == pytest.approx(1e-3 * 3 / (0.1 * math.sqrt(30_000_000)), rel=1e-4)


def test_sparse_gradients_and_other_parameters() -> None:

    net = Lambda(lambda net, x: net.out(net.table(x)).sum(), table=nn.Embedding(4, 2, sparse=True), out=nn.Linear(2, 1))
    model = gr.transform(net, gr.on("gradient:out.*", Observe("norm")))
    strange = nn.Parameter(torch.ones(1))
    optimizer = gr.guard(torch.optim.SGD([*model.parameters(), strange], lr=0.1), model, update_ratios=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    step(model, optimizer, torch.tensor([1, 2]))

    assert recorded(model) == pytest.approx(ratios(before, model.original), rel=1e-5)


def test_parameters_that_are_added_later() -> None:
    model = gr.transform(Net(), gr.on("gradient:*", Observe("norm")))
    optimizer = gr.guard(torch.optim.SGD([model.scale], lr=0.1), model, update_ratios=True)
    step(model, optimizer, GOOD)
    assert set(recorded(model)) == {"scale"}
    optimizer.add_param_group({"params": [model.shift]})
    step(model, optimizer, GOOD)
    assert set(recorded(model)) == {"scale", "shift"}


def test_closure_and_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = gr.transform(Net(), POLICY, loss_scale=scaler)
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), model, update_ratios=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    scaler.scale(model(GOOD)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert recorded(model) == pytest.approx(ratios(before, model.original), rel=1e-5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(GOOD)
        loss.backward()
        return loss

    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step(closure)
    assert len(model.monitor.history("update_ratio@gradient:scale")) == 2
    assert recorded(model) == pytest.approx(ratios(before, model.original), rel=1e-5)


@pytest.mark.inductor
def test_names_of_a_backend() -> None:
    net = Net()
    backend = gr.backend(gr.on("gradient:*", Observe("norm")))
    optimizer = gr.guard(torch.optim.SGD(net.parameters(), lr=0.1), backend, update_ratios=True)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    torch.compile(net, backend=backend)(GOOD).backward()
    optimizer.step()
    found = {k.removeprefix("update_ratio@gradient:"): v for k, v in backend.monitor.latest().items() if "update" in k}

    assert found == pytest.approx(ratios(before, net), rel=1e-5)


def test_off_by_default_and_no_names_of_a_monitor() -> None:
    model = gr.transform(Net(), POLICY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"give the model: gr\.guard\(optimizer, model, update_ratios=True\)"):
        gr.guard(optimizer, model.monitor, update_ratios=True)
    gr.guard(optimizer, model)
    step(model, optimizer, GOOD)
    assert not recorded(model)


def test_no_row_is_said_once() -> None:
    model = gr.transform(Net(), [])
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model, update_ratios=True)
    with pytest.warns(gr.RewriteWarning, match="let the policy record something"):
        step(model, optimizer, GOOD)
    step(model, optimizer, GOOD)
    assert model.monitor.latest() == {}
