"""Training steps as one graph: scaled losses against two phases, and what is refused with the way out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, Observe

from models.small import Broken, Lambda, SquaredTwoLayers
from models.training_steps import OPTIMIZERS, batch, sgd

WAY_OUT = r"loss\.backward\(\); optimizer\.step\(\); optimizer\.zero_grad\(\)"


class Scaled:
    """A model in training steps with a GradScaler, and its equal in two phases."""

    def __init__(self, policy: Callable[[], Any], optimizer: str) -> None:
        torch.manual_seed(0)
        net = SquaredTwoLayers().double()
        self.scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3) for _ in range(2)]
        self.models = [gr.transform(copy.deepcopy(net), policy(), loss_scale=scaler) for scaler in self.scalers]
        self.optimizers = [gr.guard(OPTIMIZERS[optimizer](m.parameters()), m) for m in self.models]
        self.run = gr.train_step(self.models[0], self.optimizers[0], compile=False)

    def step(self, x: Tensor, *micro_batches: Tensor) -> None:
        for one in micro_batches:
            self.run.accumulate(one)
        loss = self.run(x)
        scaler, model, optimizer = self.scalers[1], self.models[1], self.optimizers[1]
        for one in (*micro_batches, x):
            wanted = model(one)
            scaler.scale(wanted).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-15, equal_nan=True)
        assert self.scalers[0].state_dict() == self.scalers[1].state_dict()
        for (name, p), q in zip(model.named_parameters(), self.models[0].parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-11, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
        states = [list(o.state_dict()["state"].values()) for o in self.optimizers]
        for got, own in zip(*states, strict=True):
            for key, value in own.items():
                torch.testing.assert_close(got[key], value, rtol=1e-11, atol=1e-13, msg=lambda m, n=key: f"{n}: {m}")


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    "policy",
    [
        list,
        lambda: [gr.on("error:one", ClipByNorm(0.05)), gr.on("error:*", Observe("norm"))],
        lambda: [gr.on("step:*", ClipByGlobalNorm(0.1))],
        lambda: [gr.on("gradient:*", ClipByGlobalNorm(0.1)), gr.on("gradient:*", CheckFinite("skip"))],
    ],
)
def test_scaled_losses(policy: Callable[[], Any], optimizer: str) -> None:
    scaled = Scaled(policy, optimizer)
    for number in range(9):
        x = batch(number)
        if number in (2, 6):
            x[0, 0] = math.inf
        scaled.step(x)
    scales = [scaler.get_scale() for scaler in scaled.scalers]
    assert scales[0] == scales[1] == 2.0**7
    one, two = (m.monitor for m in scaled.models)
    assert one.skipped == two.skipped
    for address in two.latest():
        # Two phases call no step that an infinity leaves out, so that it has no records.
        is_of_step = address.partition("@")[2].startswith(("step", "optimizer"))
        histories = [m.history(address, per="step") for m in (one, two)]
        got, wanted = ([v for v in own if math.isfinite(v)] if is_of_step else own for own in histories)
        if address.startswith("total_norm") or not is_of_step:
            assert got == pytest.approx(wanted, rel=1e-9, nan_ok=True), address


def test_scaled_losses_of_micro_batches() -> None:
    scaled = Scaled(lambda: [gr.on("step:*", ClipByGlobalNorm(0.1)), gr.on("error:*", Observe("norm"))], "SGD")
    for number in range(6):
        x = batch(10 + number)
        if number == 3:
            x[0, 0] = math.inf
        scaled.step(batch(number), x)
    assert scaled.models[0].monitor.history("total_norm@step:group:default")[-1] > 0.1


def test_a_loss_scale_that_is_a_tensor() -> None:
    torch.manual_seed(0)
    net, scale = SquaredTwoLayers().double(), torch.tensor(4.0, dtype=torch.float64)
    models = [
        gr.transform(copy.deepcopy(net), [gr.on("error:one", ClipByNorm(0.05))], loss_scale=scale) for _ in range(2)
    ]
    optimizers = [gr.guard(sgd(m.parameters()), m) for m in models]
    step = gr.train_step(models[0], optimizers[0], compile=False)
    for number in range(4):
        loss = step(batch(number))
        wanted = models[1](batch(number))
        (wanted * scale).backward()
        for p in models[1].parameters():
            assert p.grad is not None
            p.grad /= scale
        optimizers[1].step()
        optimizers[1].zero_grad()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-15)
        scale.mul_(2)
    assert models[0].monitor.history("norm@error:one") == pytest.approx(models[1].monitor.history("norm@error:one"))


def _refused(net: nn.Module, prepare: Callable[[Any, Any], Any] | None = None, **options: Any) -> gr.TraceError:
    model: Any = gr.transform(net.double(), [], **options)
    optimizer = sgd(model.parameters())
    if prepare is not None:
        prepare(model, optimizer)
    with pytest.raises(gr.TraceError, match=WAY_OUT) as caught:
        _run(model, optimizer)
    return caught.value


def _run(model: Any, optimizer: torch.optim.Optimizer) -> None:
    step = gr.train_step(model, optimizer, compile=False)
    for number in range(2):
        step(batch(number))


def test_hooks_on_parameters_are_refused() -> None:
    assert "one.weight" in str(_refused(SquaredTwoLayers(), lambda m, _: m.one.weight.register_hook(lambda g: g)))


def test_hooks_behind_accumulation_are_refused() -> None:
    found = _refused(SquaredTwoLayers(), lambda m, _: m.two.bias.register_post_accumulate_grad_hook(lambda p: None))
    assert "two.bias" in str(found)


@pytest.mark.parametrize("name", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_an_optimizer_are_refused(name: str) -> None:
    found = _refused(SquaredTwoLayers(), lambda _, o: getattr(o, name)(lambda *_: None))
    assert "hook" in str(found)


def test_sparse_gradients_are_refused() -> None:
    net = Lambda(lambda m, x: m.e((x.abs() * 3).long() % 7).square().mean(), e=nn.Embedding(7, 3, sparse=True))
    assert "sparse" in str(_refused(net))


def test_graph_breaks_are_refused() -> None:
    class Summed(Broken):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().sum()

    with pytest.raises(gr.RewriteError, match="break"):
        _run(gr.transform(Summed().double(), []), sgd(Summed().double().parameters()))


def test_regions_are_refused() -> None:
    assert "regions" in str(_refused(SquaredTwoLayers(), regions="one"))


def test_lbfgs_is_refused() -> None:
    model = gr.transform(SquaredTwoLayers().double(), [])
    with pytest.raises((gr.TraceError, TypeError), match="LBFGS"):
        gr.train_step(model, torch.optim.LBFGS(model.parameters()), compile=False)


def test_nothing_to_train() -> None:
    net = SquaredTwoLayers().double().requires_grad_(False)
    model = gr.transform(net, [])
    step = gr.train_step(model, sgd(model.parameters()), compile=False)
    with pytest.raises((gr.TraceError, gr.NotRewrittenError)):
        step(batch(0))


def test_a_model_without_a_loss() -> None:
    model = gr.transform(Lambda(lambda m, x: m.one(x), one=nn.Linear(4, 3)).double(), [])
    step = gr.train_step(model, sgd(model.parameters()), compile=False)
    with pytest.raises(gr.TraceError, match="compute_loss"):
        step(batch(0))


def test_a_plain_model_is_refused() -> None:
    net = SquaredTwoLayers()
    with pytest.raises(TypeError, match=r"gr\.transform"):
        gr.train_step(net, sgd(net.parameters()))
