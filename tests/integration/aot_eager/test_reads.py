"""Functions that read values of other sites, against hooks of eager autograd that close over them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.passes import ClipByValue, Scale

WIDTH = 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.arange(WIDTH).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * self.router(x).softmax(-1) + self.mask


class Net(nn.Module):
    """Two experts, one of which is called twice; ``hooks`` act on values in the eager model."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Expert(), Expert()]), nn.Linear(WIDTH, 2)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.head(x).square().mean()


def at_gate(g: Tensor, *, gate: Tensor, w: Tensor) -> Tensor:
    return g * gate.sigmoid() + 1e-3 * w.mean()


def masked(g: Tensor, *, mask: Tensor) -> Tensor:
    return g * mask


@dataclass(frozen=True)
class Case:
    """A policy, and a function that hooks it onto a module of the eager model."""

    policy: Any
    hook: Callable[[Net], None]


def _hook_gate(net: Net) -> None:
    for layer in net.layers:
        seen: list[Tensor] = []

        def keep(_: nn.Module, __: Any, out: Tensor, seen: list[Tensor] = seen) -> None:
            seen.append(out.detach())

        def act(module: nn.Module, _: Any, out: Tensor, layer: Any = layer, seen: list[Tensor] = seen) -> None:
            number = len(seen)  # up runs before the router of the same call

            def change(g: Tensor) -> Tensor:
                return at_gate(g, gate=seen[number], w=layer.up.weight.detach())

            out.register_hook(change)

        layer.router.register_forward_hook(keep)
        layer.up.register_forward_hook(act)


def _hook_mask(net: Net) -> None:
    def act(module: Any, _: Any, out: Tensor) -> None:
        mask = module.mask.clone()
        out.register_hook(lambda g: masked(g, mask=mask))

    for layer in net.layers:
        layer.register_forward_hook(act)


CASES = {
    "gate": Case(
        gr.on("error:*.up", at_gate, reads={"gate": "activation:{parent}.router", "w": "param:{name}.weight"}),
        _hook_gate,
    ),
    "buffer": Case(gr.on("error:layers.?", masked, reads={"mask": "param:{name}.mask"}), _hook_mask),
}


def train(model: Any, net: Net, *, changes: bool, steps: int = 6) -> list[Tensor]:
    """Return all gradients, with two forwards before two backwards, and a buffer that changes between the forwards."""
    optimizer, found = torch.optim.SGD(net.parameters(), lr=1e-3), []
    x = torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for step in range(steps):
        optimizer.zero_grad()
        first = model(x + step)
        for layer in net.layers:
            if changes:
                layer.mask.mul_(1.25)
        second = model(x - step)
        first.backward()
        second.backward()
        found += [p.grad.clone() for p in net.parameters()]
        optimizer.step()
    return found


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_equals_hooks_that_close_over_the_values(name: str, is_checkpointed: bool) -> None:
    torch.manual_seed(0)
    plain = Net(is_checkpointed=is_checkpointed).double()
    net = copy.deepcopy(plain)
    if not is_checkpointed or name != "gate":
        CASES[name].hook(plain)
    else:  # a checkpoint runs hooks again
        plain.is_checkpointed = False
        CASES[name].hook(plain)
    changes = not is_checkpointed  # a checkpoint reads buffers again
    got = train(gr.transform(net, CASES[name].policy), net, changes=changes)
    wanted = train(plain, plain, changes=changes)

    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.inductor
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    net = copy.deepcopy(plain)
    CASES[name].hook(plain)
    got = train(gr.transform(net, CASES[name].policy).compile(), net, changes=True, steps=2)
    for one, other in zip(got, train(plain, plain, changes=True, steps=2), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.left(h).square().sum() + self.right(h).exp().mean()


def balanced(g: Tensor, *, other: Tensor) -> Tensor:
    return g * (other.norm() / g.norm())


@pytest.mark.parametrize(("of", "by"), [("left", "right"), ("right", "left")])
def test_another_error_that_may_come_later(of: str, by: str) -> None:
    torch.manual_seed(0)
    plain = Pair().double()
    net = copy.deepcopy(plain)
    rules = [gr.on(f"error:{of}", balanced, reads={"other": f"error:{by}"}), gr.on(f"error:{by}", Scale(3.0))]
    gr.transform(net, rules)(torch.ones(2, WIDTH).double()).backward()

    h = plain.body(torch.ones(2, WIDTH).double())
    values = {"left": plain.left(h), "right": plain.right(h)}
    loss = values["left"].square().sum() + values["right"].exp().mean()
    grads = dict(zip(values, torch.autograd.grad(loss, list(values.values()), retain_graph=True), strict=True))
    grads[by] = 3 * grads[by]
    grads[of] = balanced(grads[of], other=grads[by])
    torch.autograd.backward(list(values.values()), list(grads.values()))
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)


def test_a_circle_is_refused() -> None:
    def read(g: Tensor, *, other: Tensor) -> Tensor:
        return g + other.sum()

    model = gr.transform(Pair(), gr.on("error:left", read, reads={"other": "error:body"}))
    with pytest.raises(gr.PolicyError, match="error:body is computed from error:left, and does not exist yet"):
        model(torch.ones(2, WIDTH))


def test_the_loss_scale_is_taken_out() -> None:
    x, found = torch.ones(2, WIDTH).double(), []
    for scale in (None, torch.tensor(1024.0, dtype=torch.float64)):
        torch.manual_seed(0)
        net = Pair().double()
        rules = gr.on("error:left", lambda g, *, other: g + other.sum(), reads={"other": "error:right"})
        loss = gr.transform(net, rules, loss_scale=scale)(x)
        (loss if scale is None else loss * scale).backward()
        found.append([p.grad / (1 if scale is None else scale) for p in net.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_one_use_reads_another() -> None:
    torch.manual_seed(0)
    plain = Pair().double()
    net = copy.deepcopy(plain)
    rule = gr.on("error:body->left", balanced, reads={"other": "error:body->right"})
    gr.transform(net, [rule, gr.on("error:body->right", Scale(1.0))])(torch.ones(2, WIDTH).double()).backward()

    h = plain.body(torch.ones(2, WIDTH).double())
    first, second = h * 1, h * 1
    loss = plain.left(first).square().sum() + plain.right(second).exp().mean()
    a, b = torch.autograd.grad(loss, [first, second], retain_graph=True)
    h.backward(balanced(a, other=b) + b, retain_graph=True)
    torch.testing.assert_close(net.body.weight.grad, plain.body.weight.grad, rtol=1e-10, atol=1e-12)


def test_a_callback_returns_a_call() -> None:
    def policy(site: gr.Site) -> Any:
        if str(site) == "error:left":
            return [ClipByValue(1e3), gr.call(balanced, reads={"other": "activation:right"})]
        return None

    model = gr.transform(Pair(), policy)
    model(torch.ones(2, WIDTH)).backward()

    assert "call(balanced" in str(model.explain().graphs[0].edits[1].action)


@pytest.mark.parametrize(
    ("reads", "words"),
    [
        ({"other": "activation:rigth"}, "no site matches activation:rigth; nearest: activation:right"),
        ({"other": "param:right.wieght"}, "the forward reads no param:right.wieght; nearest: param:right.weight"),
        ({"other": "activation:*t"}, "several sites match, activation:left, activation:right; name one"),
    ],
)
def test_wrong_reads(reads: dict[str, str], words: str) -> None:
    with pytest.raises(gr.PolicyError, match="error:body") as caught:
        gr.transform(Pair(), gr.on("error:body", balanced, reads=reads))(torch.ones(2, WIDTH))
    assert words in str(caught.value)


def test_wrong_functions_and_patterns() -> None:
    with pytest.raises(TypeError, match="has no keyword 'gate', which reads has"):
        gr.call(balanced, reads={"gate": "activation:left"})
    with pytest.raises(ValueError, match="kind:glob"):
        gr.call(balanced, reads={"other": "left"})
    with pytest.raises(ValueError, match=r"\{name\}, \{module\} and \{parent\} are filled in"):
        gr.call(balanced, reads={"other": "error:{modul}"})
    with pytest.raises(TypeError, match="has a keyword 'w', which reads lacks"):
        gr.call(at_gate, reads={"gate": "activation:left"})
    with pytest.raises(ValueError, match="a pattern for each keyword"):
        gr.call(balanced, reads={})
    with pytest.raises(gr.PolicyError, match="reads is for a tensor function"):
        gr.on("error:left", Scale(1.0), reads={"other": "activation:left"})
