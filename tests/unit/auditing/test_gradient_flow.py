"""Where gradients stop: the flow of parameters through graphs, against eager autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gradrewrite._compat import inner_gradients
from gradrewrite.auditing.gradient_flow import flow_of
from gradrewrite.auditing.step_graphs import trace_step

from models.cuts import NoGradient, Step, TwoParameters, flow


def reaches(step: Step) -> tuple[str, str]:
    """The parameters that the loss reads, and those that it trains."""
    found = flow(step)
    return "".join(found.bits(found.loss.read)), "".join(found.bits(found.loss.trained))


def in_place(a: Tensor, b: Tensor) -> Tensor:
    h = a * 2
    h[0] = b[0]
    return h.sum()


def through_a_view(a: Tensor, b: Tensor) -> Tensor:
    h = a * 2
    row = h[1]
    row.mul_(b[1])
    return h.sum()


def in_place_without_gradient(a: Tensor, b: Tensor) -> Tensor:
    h = a * 2
    with torch.no_grad():
        h.add_(b)
    return h.sum()


def overwritten_later(a: Tensor, b: Tensor) -> Tensor:
    h = a * 2
    read = h + b
    h.add_(1)
    return read.sum()


def straight_through(a: Tensor, b: Tensor) -> Tensor:
    return ((a + (a.round() - a).detach()) * b).sum()


def through_a_checkpoint(a: Tensor, b: Tensor) -> Tensor:
    return checkpoint(lambda x: (x * b.detach()).sin(), a, use_reentrant=False).sum()


def from_a_list(a: Tensor, b: Tensor) -> Tensor:
    parts = torch.stack([a.sin(), b.argmax(-1).expand(4, 4).to(a.dtype)])
    return parts.sum()


def selection(a: Tensor, b: Tensor) -> Tensor:
    values, where = a.topk(2, dim=-1)
    return values.sum() + b.gather(-1, where).sum()


def sizes_alone(a: Tensor, b: Tensor) -> Tensor:
    return a.sum() * b.shape[0] + torch.zeros_like(b).sum() + a.new_ones(b.shape).sum()


def mapped(a: Tensor, b: Tensor) -> Tensor:
    return torch.vmap(lambda x, y: (x * y).sin())(a, b).sum()


CASES: dict[str, tuple[Step, str, str]] = {
    "both": (lambda a, b: (a @ b).sum(), "ab", "ab"),
    "one": (lambda a, b: a.sum(), "a", "a"),
    "in place": (in_place, "ab", "ab"),
    "in place, through a view": (through_a_view, "ab", "ab"),
    "in place, without a gradient": (in_place_without_gradient, "ab", "a"),
    "overwritten later": (overwritten_later, "ab", "ab"),
    "straight through": (straight_through, "ab", "ab"),
    "a difference to a copy": (lambda a, b: (a - a.detach()).sum() + b.sum(), "ab", "ab"),
    "a checkpoint": (through_a_checkpoint, "ab", "a"),
    "a list": (from_a_list, "ab", "a"),
    "a selection": (selection, "ab", "ab"),
    "sizes alone": (sizes_alone, "a", "a"),
    "vmap": (mapped, "ab", "ab"),
    "where": (lambda a, b: torch.where(b > 0, a, 0.0).sum(), "ab", "a"),
    "a custom function": (lambda a, b: NoGradient.apply(a @ b).sum() + b.sum(), "ab", "b"),
    "a product with a copy": (lambda a, b: (a.detach() * b).sum(), "ab", "b"),
    "detached in place": (lambda a, b: ((a * 2).detach_() * b).sum(), "ab", "b"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_and_trained(name: str) -> None:
    step, read, trained = CASES[name]
    model = TwoParameters(step)
    model().backward()

    assert "".join(n for n, p in model.named_parameters() if p.grad is not None) == trained  # eager autograd
    assert reaches(step) == (read, trained)


FLAT = ("round", "floor", "ceil", "trunc", "sign", "sgn")


@pytest.mark.parametrize("name", FLAT)
def test_a_derivative_of_zero_is_a_cut(name: str) -> None:
    model = TwoParameters(lambda a, b: (getattr(torch, name)(a) * b).sum())
    model().backward()
    found = flow(model.step)

    assert model.a.grad is not None

    assert not model.a.grad.any()
    assert [*found.bits(found.loss.trained)] == ["b"]
    (cut,) = found.cuts_before(found.loss)
    assert (cut.op, cut.reason) == (name, f"`{name}` has a derivative of 0 everywhere")


def test_the_first_cut_of_a_way_has_op_line_and_reason() -> None:
    found = flow(lambda a, b: (a.tanh().detach().round() * b).sum())

    (cut,) = found.cuts_before(found.loss)
    assert (cut.op, [*found.bits(cut.stopped)]) == ("detach", ["a"])
    assert "a.tanh().detach()" in cut.source
    assert "test_gradient_flow.py" in cut.source


def test_a_cut_that_does_not_reach_the_loss_is_none_of_its_cuts() -> None:
    def logged(a: Tensor, b: Tensor) -> Tensor:
        (b.detach() * 2).sum()
        return (a * b).sum()

    found = flow(logged)

    assert [*found.bits(found.loss.trained)] == ["a", "b"]
    assert not found.cuts_before(found.loss)


def test_terms_of_a_sum_have_their_own_parameters() -> None:
    found = flow(lambda a, b: a.sin().sum() + 0.1 * b.cos().mean() - a.detach().sum())

    terms = [(term.op, "".join(found.bits(term.reach.trained))) for term in found.terms]
    assert terms == [("sum", "a"), ("mean", "b"), ("sum", "")]


def test_parts_of_a_step_are_joined_behind_a_graph_break() -> None:
    def broken(a: Tensor, b: Tensor) -> Tensor:
        h = a.sin() * b.detach()
        torch._dynamo.graph_break()
        return h.sum() + b.round().sum()

    assert reaches(broken) == ("ab", "a")


@torch.compiler.disable
def copied(x: Tensor) -> Tensor:
    return x.detach() * 1


@torch.compiler.disable
def doubled(x: Tensor) -> Tensor:
    return x * 2


def test_code_that_is_not_traced_is_a_cut_where_it_hands_on_no_gradient() -> None:
    def through(a: Tensor, b: Tensor) -> Tensor:
        return (copied(b.sin()) * a).sum()

    model = TwoParameters(through)
    model().backward()
    found = flow(through)
    (cut,) = found.cuts_before(found.loss)

    assert model.b.grad is None
    assert reaches(through) == ("ab", "a")
    assert (cut.op, [*found.bits(cut.stopped)]) == ("graph break", ["b"])
    assert "copied(b.sin())" in cut.source


def test_autograd_is_followed_through_code_that_is_not_traced() -> None:
    assert reaches(lambda a, b: (doubled(b.sin()) * a.detach()).cos().sum()) == ("ab", "b")
    assert reaches(lambda a, b: doubled((b.sin() * a).sum())) == ("ab", "ab")  # the loss itself


@pytest.mark.skipif(not inner_gradients.IS_KNOWN, reason="torch.autograd.grad is traced from torch 2.12 on")
def test_a_gradient_inside_depends_on_what_its_own_backward_needs() -> None:
    """A force: the derivative by an input. What is added to the energy has no part in it."""

    def force(a: Tensor, b: Tensor) -> Tensor:
        x = torch.ones(4, 4, requires_grad=True)
        (found,) = torch.autograd.grad(((x * a).sin() + b).sum(), x, create_graph=True)
        return found.square().sum()

    model = TwoParameters(force)
    model().backward()
    found = flow(force)
    (cut,) = found.cuts_before(found.loss)

    assert model.b.grad is None
    assert reaches(force) == ("ab", "a")
    assert (cut.op, cut.is_meant) == ("grad", True)


def test_inputs_that_the_step_overwrites_are_known() -> None:
    def writes(a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            b[0].zero_()
        return (a * b).sum()

    model = TwoParameters(writes)
    found = flow_of(trace_step(model, None, (), {}), model)

    assert found.written == frozenset((id(model.b),))
