"""Held elements, and functions at parameters and optimizer state, against the same by hand behind a plain step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.optimizer.changed_state import ChangedState
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, DecayWeights, Hold, Observe
from gradrewrite.testing import assert_matches_eager

from models.small import Lambda

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9, weight_decay=0.3, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.5),
}
STEPS = 6


def made() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), Lambda(lambda m, x: x * m.s, s=nn.Parameter(torch.ones(())))
    )
    with torch.no_grad():
        net[0].weight[torch.rand(5, 4) < 0.5] = 0.0
    return net.double()


def batch(number: int) -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def is_zero(gradient: Tensor, value: Tensor) -> Tensor:
    return value == 0


def is_small(gradient: Tensor, value: Tensor) -> Tensor:
    return gradient.abs() < gradient.abs().mean()


def to_unit_rows(value: Tensor) -> Tensor:
    norms = value.norm(dim=-1, keepdim=True)
    gr.record("longest", norms.amax())
    return value / norms.clamp(min=1.0)


def half_way(value: Tensor, before: Tensor) -> Tensor:
    return 0.5 * (value + before)


Reference = Callable[[dict[str, Tensor], dict[str, dict[str, Tensor]], dict[str, Tensor], dict[str, Any]], None]


def hold(where: Any, names: tuple[str, ...]) -> Reference:
    def put_back(parameters: Any, states: Any, old: Any, old_states: Any) -> None:
        for name in names:
            mask = where(parameters[name].grad, old[name])
            parameters[name].data = torch.where(mask, old[name], parameters[name].data)
            for key, tensor in states[name].items():
                if key in ("step", "mu_product"):
                    continue
                first = tensor.clone() if key == "step_size" else torch.zeros_like(tensor)
                tensor.copy_(torch.where(mask, old_states[name].get(key, first), tensor))

    return put_back


def project(parameters: Any, states: Any, old: Any, old_states: Any) -> None:
    value = parameters["0.weight"]
    value.data = value.data / value.data.norm(dim=-1, keepdim=True).clamp(min=1.0)


def average(parameters: Any, states: Any, old: Any, old_states: Any) -> None:
    for name in ("0.weight", "2.bias", "3.s"):
        parameters[name].data = 0.5 * (parameters[name].data + old[name])


NAMES = ("0.weight", "0.bias", "2.weight", "2.bias", "3.s")
POLICIES: dict[str, tuple[Callable[[], list[Any]], list[Reference]]] = {
    "hold zeros": (lambda: [gr.on("step:0.weight", Hold(is_zero))], [hold(is_zero, ("0.weight",))]),
    "hold small gradients": (lambda: [gr.on("step:*", Hold(is_small))], [hold(is_small, NAMES)]),
    "two holds": (
        lambda: [gr.on("step:0.*", Hold(is_zero)), gr.on("step:0.*", Hold(is_small))],
        [hold(lambda g, v: is_zero(g, v) | is_small(g, v), NAMES[:2])],
    ),
    "project": (lambda: [gr.on("param:0.weight", to_unit_rows)], [project]),
    "average": (
        lambda: [gr.on(f"param:{name}", half_way) for name in ("0.weight", "2.bias", "3.s")], [average],
    ),
    "hold and project": (
        lambda: [gr.on("param:0.weight", to_unit_rows), gr.on("step:0.weight", Hold(is_zero))],
        [hold(is_zero, ("0.weight",)), project],
    ),
}  # fmt: skip


def train(
    net: nn.Module, run: Callable[[Tensor], Tensor], optimizer: Any, around: Callable[[Callable[[], None]], None]
) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            run(batch(2 * step + part)).square().sum().backward()
        around(optimizer.step)


def state_of(optimizer: torch.optim.Optimizer, net: nn.Module) -> dict[str, dict[str, Tensor]]:
    return {name: optimizer.state.get(p, {}) for name, p in net.named_parameters()}


def by_hand(net: nn.Module, make: Make, references: list[Reference]) -> torch.optim.Optimizer:
    optimizer = make(net.parameters())

    def around(step: Callable[[], None]) -> None:
        old = {name: p.detach().clone() for name, p in net.named_parameters()}
        old_states = copy.deepcopy(
            {n: {k: t.clone() for k, t in s.items()} for n, s in state_of(optimizer, net).items()}
        )
        step()
        for reference in references:
            reference(dict(net.named_parameters()), state_of(optimizer, net), old, old_states)

    train(net, net, optimizer, around)
    return optimizer


def assert_same(net: nn.Module, optimizer: Any, plain: nn.Module, other: Any, near: float = 1e-10) -> None:
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=near, atol=near, msg=lambda m, n=name: f"{n}: {m}")
    ours, theirs = state_of(optimizer, net), state_of(other, plain)
    for name in ours:
        assert ours[name].keys() == theirs[name].keys()
        for key, t in ours[name].items():
            torch.testing.assert_close(
                t, theirs[name][key], rtol=near, atol=near, msg=lambda m, n=f"{name}.{key}": f"{n}: {m}"
            )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_equals_the_same_by_hand(policy: str, name: str) -> None:
    rules, references = POLICIES[policy]
    net, plain = made(), made()
    other = by_hand(plain, OPTIMIZERS[name], references)
    model = gr.transform(net, rules())
    optimizer = gr.guard(OPTIMIZERS[name](net.parameters()), model)
    train(net, model, optimizer, lambda step: step())
    assert_same(net, optimizer, plain, other)


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD"])
def test_compiled(name: str) -> None:
    rules, references = POLICIES["hold and project"]
    net, plain = made(), made()
    other = by_hand(plain, OPTIMIZERS[name], references)
    model = gr.transform(net, [*rules(), gr.on("error:*", Observe("norm"))]).compile()
    optimizer = gr.guard(OPTIMIZERS[name](net.parameters()), model)
    train(net, model, optimizer, lambda step: step())
    assert_same(net, optimizer, plain, other, near=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_held_elements_keep_their_bits(name: str) -> None:
    net = made()
    model = gr.transform(net, [gr.on("step:*", Hold(is_zero)), gr.on("step:*", DecayWeights(0.1))])
    optimizer = gr.guard(OPTIMIZERS[name](net.parameters()), model)
    with torch.no_grad():
        net[2].weight[0] = 0.0
    mask = {n: p == 0 for n, p in net.named_parameters()}
    for number in range(50):
        optimizer.zero_grad()
        model(batch(number)).square().sum().backward()
        optimizer.step()
        if number == 0:
            first = copy.deepcopy(state_of(optimizer, net))
    for parameter_name, p in net.named_parameters():
        held = mask[parameter_name]
        assert torch.equal(p == 0, held)
        for key, tensor in state_of(optimizer, net)[parameter_name].items():
            if tensor.shape == p.shape and held.any():
                assert torch.equal(tensor[held], first[parameter_name][key][held])


def test_the_gradient_is_the_one_that_was_used() -> None:
    def where(gradient: Tensor, value: Tensor) -> Tensor:
        gr.record("largest", gradient.abs().amax())
        return gradient.abs() < 1e-3

    net = made()
    policy = [
        gr.on("step:0.weight", Hold(where)),
        gr.on("step:*", ClipByGlobalNorm(1e-2)),
        gr.on("step:0.weight", ClipByNorm(5e-3)),
    ]
    model = gr.transform(net, policy)
    optimizer = gr.guard(OPTIMIZERS["SGD fused"](net.parameters()), model)
    model(batch(0)).square().sum().backward()
    before = net[0].weight.detach().clone()
    optimizer.step()
    used = net[0].weight.grad
    assert model.monitor.latest()["largest@step:0.weight"] == pytest.approx(float(used.abs().amax()), rel=1e-6)
    assert torch.equal(net[0].weight == before, used.abs() < 1e-3)


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD"])
def test_a_skipped_step_calls_nothing(name: str) -> None:
    count = gr.State((), 0.0, torch.float64, name="count")

    def shrink(value: Tensor) -> Tensor:
        count.set(count.value + 1)
        return 0.5 * value

    net = made()
    model = gr.transform(
        net,
        [gr.on("gradient:*", CheckFinite("skip")), gr.on("param:0.weight", shrink), gr.on("step:*", Hold(is_small))],
    )
    optimizer = gr.guard(OPTIMIZERS[name](net.parameters()), model)
    for number in range(4):
        optimizer.zero_grad()
        x = batch(number) * (float("nan") if number in (0, 2) else 1.0)
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        model(x).square().sum().backward()
        optimizer.step()
        is_same = [torch.equal(p, before[n]) for n, p in net.named_parameters()]
        assert all(is_same) if number in (0, 2) else not any(is_same)
    assert model.monitor.skipped == 2
    assert float(gr.state_dict(model)["states"]["param:0.weight/count"]) == 2


def test_a_scaler_beside() -> None:
    nets = [made().float(), made().float()]
    for number, net in enumerate(nets):
        model = gr.transform(net, [gr.on("step:*", Hold(is_small)), gr.on("param:0.weight", to_unit_rows)])
        optimizer = gr.guard(OPTIMIZERS["AdamW fused"](net.parameters()), model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=number == 1)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(batch(step).float()).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_state_is_changed_and_resumed() -> None:
    def forget(moment: Tensor) -> Tensor:
        count = steps.value + 1
        steps.set(torch.where(count == 2, torch.zeros_like(count), count))
        return torch.where(count == 2, torch.zeros_like(moment), moment)

    def begin(net: nn.Module) -> tuple[Any, Any]:
        model = gr.transform(net, gr.on("state:*.exp_avg", forget))
        return model, gr.guard(OPTIMIZERS["AdamW"](net.parameters()), model)

    steps = gr.State((), 0.0, torch.float64)
    net, plain = made(), made()
    model, optimizer = begin(net)
    other = OPTIMIZERS["AdamW"](plain.parameters())
    for number in range(5):
        if number == 3:
            kept = copy.deepcopy((net.state_dict(), optimizer.state_dict(), gr.state_dict(model)))
            net = made()
            model, optimizer = begin(net)
            net.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            gr.load_state_dict(model, kept[2])
        for run, own in ((model, optimizer), (plain, other)):
            own.zero_grad()
            run(batch(number)).square().sum().backward()
            own.step()
        if number % 2:
            for p in plain.parameters():
                other.state[p]["exp_avg"].zero_()
    assert_same(net, optimizer, plain, other)


def test_measurements_see_what_functions_have_made() -> None:
    net = made()
    model = gr.transform(
        net, [gr.on("param:0.weight", Observe("max_abs")), gr.on("param:0.weight", lambda p: p.clamp(-0.1, 0.1))]
    )
    optimizer = gr.guard(OPTIMIZERS["AdamW"](net.parameters()), model, update_ratios=True)
    before = net[0].weight.detach().clone()
    model(batch(0)).square().sum().backward()
    optimizer.step()
    latest = model.monitor.latest()
    assert latest["max_abs@param:0.weight"] == pytest.approx(0.1)
    ratio = (net[0].weight.detach() - before).norm() / before.norm()
    assert latest["update_ratio@gradient:0.weight"] == pytest.approx(float(ratio))


def test_python_values_of_a_function() -> None:
    class Limit:
        value = 0.1

    net = made()
    model = gr.transform(net, gr.on("param:0.weight", lambda p: p.clamp(-Limit.value, Limit.value)))
    optimizer = gr.guard(OPTIMIZERS["SGD"](net.parameters()), model)
    for Limit.value in (0.1, 0.05, 0.1):
        with torch.no_grad():
            net[0].weight.fill_(1.0)
        model(batch(0)).square().sum().backward()
        optimizer.step()
        assert float(net[0].weight.detach().abs().max()) == pytest.approx(Limit.value)


def test_two_models_in_one_optimizer() -> None:
    nets = made(), made()
    models = [gr.transform(net, gr.on("step:0.weight", Hold(is_zero))) for net in nets]
    optimizer = gr.guard(OPTIMIZERS["AdamW"]([p for net in nets for p in net.parameters()]), models)
    zeros = nets[0][0].weight == 0
    for model in models:
        model(batch(0)).square().sum().backward()
    optimizer.step()
    for net in nets:
        assert torch.equal(net[0].weight == 0, zeros)


def test_held_state_is_only_that_of_the_shape() -> None:
    net = made()
    policy = [gr.on("step:*", Hold(lambda g, v: torch.ones_like(v, dtype=torch.bool))), gr.on("state:*", lambda s: s)]
    model = gr.transform(net, policy)
    optimizer = gr.guard(OPTIMIZERS["AdamW"](net.parameters()), model)
    for _ in range(3):
        model(batch(0)).square().sum().backward()
        optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_a_mask_shares_what_functions_of_its_site_remember() -> None:
    mean = gr.State((), 0.0, torch.float64, name="mean")

    def follow(g: Tensor) -> Tensor:
        mean.set(0.5 * mean + 0.5 * g.abs().mean())
        return g

    def below(gradient: Tensor, value: Tensor) -> Tensor:
        mask = (gradient.abs() < mean.value) & (gr.uniform(gradient) < 0.9)
        gr.record("share", mask.to(gradient.dtype).mean())
        return mask

    policy = gr.on("step:*", [follow, Hold(below)])
    found = assert_matches_eager(made(), policy, batch(0), compiled=False, optimizer=OPTIMIZERS["AdamW"], steps=4)
    assert "share@step:0.weight" in found.records


def test_gradients_that_a_hook_takes_away() -> None:
    net = made()
    model = gr.transform(net, gr.on("step:0.weight", Hold(is_zero)))
    inner = OPTIMIZERS["AdamW"](net.parameters())
    inner.register_step_post_hook(lambda own, args, kwargs: own.zero_grad())
    optimizer, mask = gr.guard(inner, model), net[0].weight == 0
    model(batch(0)).square().sum().backward()
    optimizer.step()
    assert torch.equal(net[0].weight == 0, mask)


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
def test_records_of_a_skipped_step(name: str) -> None:
    def seen(value: Tensor) -> Tensor:
        gr.record("sum", value.sum())
        return value

    net = made()
    model = gr.transform(net, [gr.on("gradient:*", CheckFinite("skip")), gr.on("param:0.weight", seen)])
    optimizer = gr.guard(OPTIMIZERS[name](net.parameters()), model)
    for number in range(3):
        optimizer.zero_grad()
        model(batch(number) * (math.nan if number == 1 else 1.0)).square().sum().backward()
        optimizer.step()
    assert [math.isnan(value) for value in model.monitor.history("sum@param:0.weight")] == [False, True, False]


def test_schedules_of_parameters_alone() -> None:
    net, step = made(), gr.Schedule(float)
    model = gr.transform(net, gr.on("param:0.weight", lambda v: torch.zeros_like(v) + step.value))
    optimizer = gr.guard(OPTIMIZERS["AdamW"](net.parameters()), model)
    for number in range(3):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert bool((net[0].weight == number).all())


def test_nothing_is_made_again_for_another_batch_size() -> None:
    net = made()
    model = gr.transform(net, gr.on("step:*", Hold(is_zero)))
    optimizer = gr.guard(OPTIMIZERS["AdamW"](net.parameters()), model)
    with mock.patch.object(ChangedState, "_rewrite", autospec=True, side_effect=ChangedState._rewrite) as made_again:
        for number, rows in enumerate((6, 6, 6, 2, 1, 5)):
            optimizer.zero_grad()
            model(batch(number)[:rows]).square().sum().backward()
            optimizer.step()
    assert made_again.call_count == 2  # before the first step without state, to be checked, and behind it


ERRORS: dict[str, tuple[Any, str, str]] = {
    "no mask": (gr.on("step:0.weight", Hold(lambda g, v: g)), "AdamW", r"step:0\.weight: Hold.* torch.float64"),
    "another shape": (gr.on("step:0.weight", Hold(lambda g, v: g[0] > 0)), "AdamW", r"bool of shape \(4,\).*\(5, 4\)"),
    "no tensor": (gr.on("step:0.weight", Hold(cast("Any", lambda g, v: True))), "AdamW", "returned bool"),
    "function": (gr.on("param:0.weight", lambda v: v[0]), "AdamW", r"param:0\.weight"),
    "arguments": (gr.on("param:0.weight", lambda v: v.float()), "AdamW", "dtype"),
    "factored": (gr.on("step:0.weight", Hold(is_zero)), "Adafactor", "Adafactor keeps rows and columns.*AdamW"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    policy, name, text = ERRORS[case]
    make = {"Adafactor": torch.optim.Adafactor, **OPTIMIZERS}[name]
    net = made()
    model = gr.transform(net, policy)
    optimizer = gr.guard(make(net.parameters()), model)
    model(batch(0)).square().sum().backward()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(gr.RewriteError, match=text):
        optimizer.step()
    assert all(torch.equal(t, before[key]) for key, t in net.state_dict().items())
    assert not optimizer.state


def test_vectors_of_a_factored_optimizer_are_held() -> None:
    net = made()
    model = gr.transform(net, gr.on("step:0.bias", Hold(lambda g, v: torch.ones_like(v, dtype=torch.bool))))
    optimizer = gr.guard(torch.optim.Adafactor(net.parameters()), model)
    before = net[0].bias.detach().clone()
    model(batch(0)).square().sum().backward()
    optimizer.step()
    assert torch.equal(net[0].bias, before)
    assert not bool(optimizer.state[net[0].bias]["variance"].any())


def test_a_wrong_argument() -> None:
    for where in (0.1, lambda gradient: gradient > 0):
        with pytest.raises(TypeError, match="function of the gradient"):
            Hold(cast("Any", where))
