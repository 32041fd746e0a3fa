"""Step sites under a GradScaler: they act on the unscaled gradient, and the scaler does what it does."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gradrewrite as gr
from gradrewrite.passes import L2, CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue, DecayWeights, Keep, Observe

from helpers import mostly_slow
from models.small import SquaredTwoLayers

POLICIES: dict[str, Any] = {
    "global": [CheckFinite("skip"), ClipByGlobalNorm(0.1)],
    "value": ClipByValue(0.02),
    "observed": [Observe("norm"), ClipByGlobalNorm(0.1)],
    "l2": [L2(0.1), ClipByGlobalNorm(0.1), DecayWeights(0.01)],
    "kept": [Keep(), ClipByNorm(0.1)],
}


def inputs() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(6, 4) for _ in range(6)]


def train(model: Any, optimizer: torch.optim.Optimizer, xs: list[Tensor], scaler: Any, unscales: bool) -> list[float]:
    scales = []
    for x in xs:
        optimizer.zero_grad()
        scaler.scale(model(x)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


CASES = [
    *((name, torch.optim.AdamW, fused, False) for name in ("global", "observed") for fused in (True, False)),
    *itertools.product(POLICIES, (torch.optim.SGD, torch.optim.AdamW), (False, True), (True, False)),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "optimize", "fused", "unscales"), mostly_slow(list(dict.fromkeys(CASES)), 4))
def test_equal_to_the_reference_without_a_scale(name: str, optimize: Any, fused: bool, unscales: bool) -> None:
    """Growth at every second step; a step with an infinity is skipped, and the scale is halved, as without us."""
    torch.manual_seed(0)
    plain = SquaredTwoLayers()
    xs = inputs()
    bad = [xs[0], xs[1], xs[2] * math.inf, *xs[3:]]
    scaled, reference = (gr.transform(copy.deepcopy(plain), gr.on("step:*", POLICIES[name])) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = gr.guard(optimize(scaled.parameters(), lr=0.1, fused=fused), scaled)
    scales = train(scaled, optimizer, bad, scaler, unscales)

    other = gr.guard(optimize(reference.parameters(), lr=0.1), reference)
    for x in (xs[0], xs[1], *xs[3:]):
        other.zero_grad()
        reference(x).backward()
        other.step()
    for (parameter, got), wanted in zip(scaled.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6, msg=lambda m, n=parameter: f"{n}: {m}")
    got, wanted = scaled.monitor.latest(), reference.monitor.latest()
    for key in wanted:
        assert got[key] == pytest.approx(wanted[key], rel=1e-5), key  # records are in units of the loss
    for key, tensor in reference.monitor.kept().items():
        torch.testing.assert_close(scaled.monitor.kept()[key], tensor, rtol=1e-5, atol=1e-7)

    plain_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    plain_optimizer = optimize(plain.parameters(), lr=0.1, fused=fused)
    assert scales == train(plain, plain_optimizer, bad, plain_scaler, unscales)
    assert scaler.state_dict() == plain_scaler.state_dict()
    assert not {"grad_scale", "found_inf"} & optimizer.__dict__.keys()


def test_a_scaler_that_is_disabled() -> None:
    model = gr.transform(SquaredTwoLayers(), gr.on("step:*", ClipByGlobalNorm(0.1)))
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), fused=True), model)
    train(model, optimizer, inputs()[:1], torch.amp.GradScaler("cpu", enabled=False), False)
    total = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert total == pytest.approx(0.1, rel=1e-5)


@pytest.mark.long
def test_a_step_that_only_our_check_skips() -> None:
    """The scaler sees nothing of it: its scale goes on growing."""
    model = gr.transform(
        SquaredTwoLayers(), gr.on("step:*", [lambda g: g / 0.0, CheckFinite("skip"), DecayWeights(0.5)])
    )
    for fused in (False, True):
        optimizer = gr.guard(torch.optim.AdamW(model.parameters(), fused=fused), model)
        before = copy.deepcopy(model.state_dict())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        assert train(model, optimizer, inputs()[:1], scaler, False) == [8.0]
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.long
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("action", [ClipByValue(1.0), ClipByGlobalNorm(1.0), lambda g: g.clamp(-1, 1)])
def test_thresholds_in_the_backward_without_loss_scale_are_told(action: Any, fused: bool) -> None:
    model = gr.transform(SquaredTwoLayers(), gr.on("gradient:*", action))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with pytest.warns(
        gr.RewriteWarning, match=r"gradient:one\.weight: .*transform\(model, policy, loss_scale=scaler\)"
    ):
        train(model, optimizer, inputs()[:1], scaler, False)
    train(model, optimizer, inputs()[:3], scaler, False)  # once


@pytest.mark.broad
@pytest.mark.parametrize("policy", ["known", "step", "observed"])
def test_nothing_is_told_where_thresholds_are_in_their_units(policy: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    known = {"loss_scale": scaler} if policy == "known" else {}
    actions = {"known": ("gradient:*", ClipByValue(1.0)), "step": ("step:*", ClipByValue(1.0))}
    rule = gr.on(*actions.get(policy, ("gradient:*", Observe("norm"))))
    model = gr.transform(SquaredTwoLayers(), rule, **known)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    train(model, optimizer, inputs()[:2], scaler, False)


@pytest.mark.parametrize("scale", [0.5, 0.25, 1.0])
def test_a_scale_that_undoes_the_divisor(scale: float) -> None:
    """Scale times divisor is 1 for the first one; the scaler's own scale must not be used instead."""
    net = nn.Linear(1, 1, bias=False)
    before = net.weight.detach().clone()
    model = gr.transform(net, gr.on("step:*", ClipByGlobalNorm(1.0)))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1.0, fused=True), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(model(torch.full((1, 1), 2.0)).sum()).backward()
    scaler.step(optimizer)
    assert (before - net.weight).item() == pytest.approx(1.0)
    assert net.weight.grad is not None
    assert net.weight.grad.item() == pytest.approx(1.0)


class TakesScaler(torch.optim.SGD):
    """An optimizer that does with a scale what it likes, after the older contract of GradScaler."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: torch.amp.GradScaler | None = None) -> Any:
        assert grad_scaler is not None
        if grad_scaler._per_optimizer_states[id(self)]["stage"].name == "READY":
            grad_scaler.unscale_(self)
        return super().step(closure)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("policy", [[], gr.on("step:*", ClipByGlobalNorm(0.1))], ids=["empty", "clip"])
def test_an_optimizer_that_takes_the_scaler(policy: gr.Policy, unscales: bool) -> None:
    torch.manual_seed(0)
    plain = SquaredTwoLayers()
    model, reference = (gr.transform(copy.deepcopy(plain), policy) for _ in range(2))
    optimizer = TakesScaler(model.parameters(), lr=0.1)
    signatures = [inspect.signature(method) for method in (optimizer.step, optimizer.zero_grad)]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    gr.guard(optimizer, model)
    assert [inspect.signature(method) for method in (optimizer.step, optimizer.zero_grad)] == signatures
    later = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, inputs()[:1], torch.amp.GradScaler("cpu", init_scale=8.0), unscales)
    scheduler.step()
    later.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.25

    other = gr.guard(torch.optim.SGD(reference.parameters(), lr=0.1), reference)
    reference(inputs()[0]).backward()
    other.step()
    for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, wanted)


class Reads(torch.optim.SGD):
    """An optimizer whose ``step`` looks at the gradients before the kernels of torch run."""

    seen: list[Tensor] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.seen is not None:
            self.seen.extend(p.grad.clone() for group in self.param_groups for p in group["params"])
        return super().step(closure)


def readers(way: str, model: Any, scheduled: bool) -> tuple[torch.optim.Optimizer, list[Tensor], Any]:
    """A guarded fused optimizer, what is read before its update, and what makes the reading begin."""
    seen: list[Tensor] = []
    kind = Reads if way == "subclass" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 100)

    def hook(own: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.extend(p.grad.clone() for group in own.param_groups for p in group["params"] if p.grad is not None)

    def begin() -> Any:
        if isinstance(optimizer, Reads):
            optimizer.seen = seen
            return None
        if way == "hook":
            return optimizer.register_step_pre_hook(hook)
        return register_optimizer_step_pre_hook(hook)

    return gr.guard(optimizer, model), seen, begin


@pytest.mark.long
@pytest.mark.parametrize("scale", [None, 2.0**10])
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("way", ["subclass", "hook", "global hook"])
def test_readers_before_the_update_see_the_gradient_that_is_used(
    way: str, scheduled: bool, scale: float | None
) -> None:
    """What is read from the second step on is the clipped, unscaled gradient: the one that moves the parameters."""
    torch.manual_seed(0)
    model = gr.transform(SquaredTwoLayers(), gr.on("step:*", ClipByGlobalNorm(0.1)))
    optimizer, seen, begin = readers(way, model, scheduled)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    handle = None
    for number, x in enumerate(inputs()):
        if number == 1:
            handle = begin()
        optimizer.zero_grad()
        scaler.scale(model(x)).backward()
        total = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())) / (scale or 1.0)
        assert total > 0.1
        wanted = [p.grad / (scale or 1.0) * (0.1 / total) for p in model.parameters()]
        before = [p.detach().clone() for p in model.parameters()]
        seen.clear()
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(seen, wanted if number else [])
        moved = [(old - p.detach()) / 0.1 for old, p in zip(before, model.parameters(), strict=True)]
        torch.testing.assert_close(moved, wanted, rtol=1e-3, atol=1e-6)
    if handle is not None:
        handle.remove()


def test_a_scheduler_alone_leaves_the_division_to_the_kernel() -> None:
    model = gr.transform(SquaredTwoLayers(), gr.on("step:*", ClipByGlobalNorm(0.1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 100)
    gr.guard(optimizer, model)
    torch.optim.lr_scheduler.StepLR(optimizer, 100)
    assert "grad_scale" in model.trace_step(optimizer).provenance.outputs
    with_hook = optimizer.register_step_pre_hook(lambda *given: None)
    assert "grad_scale" not in model.trace_step(optimizer).provenance.outputs
    with_hook.remove()
    assert "grad_scale" in model.trace_step(optimizer).provenance.outputs
