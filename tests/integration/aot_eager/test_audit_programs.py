"""Programs that users write: no false alarm, few remarks, and each cut by its name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.auditing.findings import Audit

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
Step = Callable[[Tensor, Tensor], Tensor]


class Two(nn.Module):
    """Two layers; a function makes the loss of their outputs."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.a(x), self.b(x))


def audit(step: Step, **settings: Any) -> Audit:
    return gr.audit(Two(step), X, **settings)


def fate(found: Audit, name: str = "a.weight") -> tuple[str, str]:
    return next((row.verdict, row.op) for row in found.rows if row.name == name)


def least_squares(a: Tensor, b: Tensor) -> Tensor:
    a = a + (a.round() - a).detach()
    return (a * b).square().mean()


def ratio(a: Tensor, b: Tensor) -> Tensor:
    logp = a.log_softmax(-1)
    return ((logp - logp.detach()).exp() * b).square().mean()


def hard_choice(a: Tensor, b: Tensor) -> Tensor:
    soft = a.softmax(-1)
    hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
    return ((hard - soft.detach() + soft) * b).square().mean()


def forces(a: Tensor, b: Tensor) -> Tensor:
    x = a.detach().requires_grad_()
    (slope,) = torch.autograd.grad((x * b).sin().sum(), x, create_graph=True)
    return slope.square().mean() + a.square().mean()


def sampled(a: Tensor, b: Tensor) -> Tensor:
    return (torch.distributions.Normal(a, 1.0).rsample() * b).square().mean()


@pytest.mark.parametrize("step", [least_squares, ratio, hard_choice, sampled], ids=lambda f: f.__name__)
def test_straight_through_and_sampling_have_no_remark(step: Step) -> None:
    found = audit(step)

    assert (found.causes, found.remarks) == ((), ())


def test_a_difference_to_another_copy_keeps_its_remark() -> None:
    found = audit(lambda a, b: (b - a.detach()).square().mean() + a.square().mean())

    assert found.causes == ()
    assert "`detach` at" in found.remarks[0]


def test_a_bias_without_a_part_in_a_slope_is_told_once() -> None:
    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor, *, also_energy: bool) -> Tensor:
            x = x.detach().requires_grad_()
            energy = self.b(self.a(x).tanh()).sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
            return slope.square().mean() + (energy if also_energy else 0.0)

    found = gr.audit(Energy(), X, also_energy=True)
    assert (found.causes, found.remarks) == ((), ())
    found = gr.audit(Energy(), X, also_energy=False)
    assert (found.causes, len(found.remarks)) == ((), 1)


class RandomDepth(nn.Module):
    """Drops blocks by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() < 0.5:
                x = x + block(x).relu()
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_random_depth_is_no_fault() -> None:
    for seed in range(4):
        random.seed(seed)
        state = random.getstate()
        found = gr.audit(RandomDepth(), X)

        assert found.causes == ()
        assert random.getstate() == state


def test_a_renormalized_choice_of_one_is_named_by_its_division() -> None:
    """A router of the best expert alone, whose weight is 1 whatever it is."""

    def step(a: Tensor, b: Tensor) -> Tensor:
        weight, chosen = a.softmax(-1).topk(1, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        return (weight * b.gather(-1, chosen)).square().mean()

    found = audit(step)
    assert fate(found) == ("no gradient", "truediv")
    assert "divided by itself" in found.causes[0].text


def in_inference_mode(a: Tensor, b: Tensor) -> Tensor:
    with torch.inference_mode():
        c = a * 2
    return (c.clone() * b).sum()


CUTS: dict[str, tuple[Step, str, str]] = {
    "detach_": (lambda a, b: (a.clone().detach_() * b).sum(), "detach", "Take the detach() out"),
    "inference mode": (in_inference_mode, "inference_mode", "outside of torch.inference_mode()"),
    "sample": (lambda a, b: (torch.distributions.Normal(a, 1.0).sample() * b).sum(), "sample", "rsample()"),
    "normal": (lambda a, b: (torch.normal(a, 1.0) * b).sum(), "normal", "torch.randn_like"),
    "bernoulli": (lambda a, b: (torch.bernoulli(a.sigmoid()) * b).sum(), "bernoulli", "Hand the gradient on"),
    "item": (lambda a, b: (a.mean().item() * b).sum(), "item", "the tensor itself"),
    "rounding division": (lambda a, b: (torch.div(a, 0.1, rounding_mode="floor") * b).sum(), "div", "Hand"),
    "slope": (
        lambda a, b: (torch.autograd.grad((a * a).sum(), a)[0] * b).sum(),
        "grad",
        "create_graph=True",
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_cuts_by_their_name(name: str) -> None:
    step, op, advice = CUTS[name]
    found = audit(step)

    assert fate(found) == ("no gradient", op)
    assert fate(found, "b.weight") == ("trained", "")
    assert len(found.causes) == 1
    assert "test_audit_programs.py" in found.causes[0].source
    assert advice in found.causes[0].advice
    assert found.remarks == ()


def other_player(a: Tensor, b: Tensor) -> Tensor:
    return (a.detach() * b).square().mean()


def test_a_part_that_is_not_asked_for_is_no_fault() -> None:
    """The step of one of two players: its optimizer, or ``trained``, says so."""
    model = Two(other_player)
    mine = torch.optim.SGD(model.b.parameters(), lr=0.1)
    by_optimizer, by_name = gr.audit(model, X, optimizer=mine), gr.audit(model, X, trained="b.*")
    text = "2 parameters (a.weight, a.bias) get no gradient: `detach` hands on the value without its gradient"

    assert by_optimizer.causes == by_name.causes == ()
    assert by_optimizer.remarks[0].startswith(text)
    assert "are not in the optimizer" in by_optimizer.remarks[0]
    assert by_name.remarks == ()
    assert len(gr.audit(model, X, trained="*").causes) == 1
    assert len(gr.audit(model, X).causes) == 1
    assert len(gr.audit(model, X, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).causes) == 1


def test_reasons_of_a_graph_break_have_one_line() -> None:
    def step(a: Tensor, b: Tensor) -> Tensor:
        c = torch.tensor(a.tolist())
        torch._dynamo.graph_break()
        return (c * b).sum()

    found = audit(step)
    for text in (*(cause.text for cause in found.causes), *found.remarks):
        assert "\n" not in text


def test_one_parameter_is_it() -> None:
    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.used(x).square().mean()
            return result

    assert gr.audit(Unread(), X).remarks == ("scale gets no gradient: the loss is computed without it.",)


def overwritten_row(a: Tensor, b: Tensor) -> Tensor:
    h = a * 1
    row, before = h[1], h * 1
    row.mul_(b[1])
    return (before - h * 1).square().sum()


def overwritten_base(a: Tensor, b: Tensor) -> Tensor:
    h = a * 1
    flat = h.view(-1)
    before = flat[:4] * 1
    h.mul_(b)
    return (before - flat[:4] * 1).square().sum()


def attention_twice(a: Tensor, b: Tensor) -> Tensor:
    """Consistency of two passes with dropout (R-Drop)."""
    once, again = (
        nn.functional.scaled_dot_product_attention(a[None], a[None], b[None], dropout_p=0.5) for _ in range(2)
    )
    return (once - again).square().mean()


def random_slopes_twice(a: Tensor, b: Tensor) -> Tensor:
    once, again = (nn.functional.rrelu(a * b, training=True) for _ in range(2))
    return (once - again).square().mean()


@torch.library.custom_op("audit_programs::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, g: g * 0.5)


def noise_twice(a: Tensor, b: Tensor) -> Tensor:
    result: Tensor = ((noisy(a) - 0.5 * noisy(a)) * b + (noisy(b) - noisy(b)) * b).square().mean()
    return result


ALIKE = [overwritten_row, overwritten_base, attention_twice, random_slopes_twice, noise_twice]


@pytest.mark.parametrize("step", ALIKE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("steps", [0, 1])
def test_what_looks_alike_and_is_not_does_not_cancel(step: Step, steps: int) -> None:
    """In-place writes through views, and random ops, in the structural half and beside the eager steps."""
    assert audit(step, steps=steps).causes == ()


def test_a_library_s_own_detach_has_no_remark() -> None:
    found = audit(lambda a, b: torch.distributions.Gamma(a.exp(), b.exp()).rsample().square().mean())

    assert (found.causes, found.remarks) == ((), ())


def test_an_eager_gradient_overrules_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the size of the others: no rounding error. One of a rounding error does not."""
    monkeypatch.setattr("gradrewrite.auditing.algebra._has_state", lambda node: False)
    assert audit(attention_twice).causes == ()

    def rounding(a: Tensor, b: Tensor) -> Tensor:
        e = a[:, :1].exp()
        return (e / e.sum(-1, keepdim=True) * b).square().mean()

    assert fate(audit(rounding)) == ("no gradient", "truediv")


@torch.library.custom_op("audit_programs::scaled", mutates_args=())
def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


scaled.register_fake(lambda x, scale: torch.empty_like(x))
scaled.register_autograd(lambda ctx, g: (None, g))


def test_a_custom_op_that_returns_none_is_named() -> None:
    found = audit(lambda a, b: scaled(a, b).square().mean())

    (cause,) = found.causes
    text = "2 parameters (a.weight, a.bias) get no gradient: the backward registered for `scaled` returns None"
    assert cause.text.startswith(text)
    assert "scaled(a, b)" in cause.source
    assert fate(found, "b.weight") == ("trained", "")


def test_an_empty_batch_is_no_fault() -> None:
    found = gr.audit(nn.Linear(4, 4), X[:0])

    assert found.causes == ()
    assert fate(found, "weight") == ("zero so far", "")


MAPPED: dict[str, tuple[Step, str]] = {
    "detach": (lambda a, b: torch.vmap(lambda x, y: x.detach() * y)(a, b).sum(), "detach"),
    "round": (lambda a, b: torch.vmap(lambda x, y: x.round() * y)(a, b).sum(), "round"),
    "argmax": (
        lambda a, b: torch.vmap(lambda x, y: y[None].index_select(1, x.argmax()[None]))(a, b).sum(),
        "argmax",
    ),
}


@pytest.mark.parametrize("name", MAPPED)
def test_cuts_inside_of_a_vmap(name: str) -> None:
    step, op = MAPPED[name]
    found = audit(step)

    assert fate(found) == ("no gradient", op)
    assert len(found.causes) == 1


def test_transforms_of_functions_are_no_cuts() -> None:
    def step(a: Tensor, b: Tensor) -> Tensor:
        slope = torch.func.grad(lambda z: (z.sin() * b).sum())(a)
        result: Tensor = (slope * torch.func.jvp(torch.sin, (a,), (b,))[1]).square().mean()
        return result

    assert audit(step).causes == ()


def test_no_reason_is_no_claim_about_the_compiler() -> None:
    found = audit(lambda a, b: (torch.func.grad(lambda z: (z * b).sum())(a) * b).sum())

    (cause,) = found.causes
    text = "2 parameters (a.weight, a.bias) get no gradient in eager mode; the graph shows no reason"
    assert cause.text.startswith(text)
