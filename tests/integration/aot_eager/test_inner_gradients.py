"""Models whose forward differentiates inside of itself, under a policy, against eager hooks of the outer backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite._compat import inner_gradients as _compat_inner_gradients
from gradrewrite.passes import CheckFinite, ClipByNorm, ClipByValue, Observe

from models import inner_gradients
from models.inner_gradients import PROGRAMS, Inner, OuterHooks, batch, program

TRACED = pytest.mark.skipif(
    not _compat_inner_gradients.IS_KNOWN, reason="torch.autograd.grad in a forward is traced from torch 2.12 on"
)
COMPILED = [False, pytest.param(True, marks=pytest.mark.inductor)]
STEPS = 20
NORM, VALUE = 1e-5, 1e-3


def clip(g: Tensor) -> Tensor:
    norm = g.norm()
    return g * (NORM / norm) if norm > NORM else g


# The modules whose errors are clipped, by norm and by value.
CLIPPED = {
    "perceptron": ("0", "2"), "normalized": ("2", "3"), "convolutions": ("conv", "norm"), "attention": ("qkv", "norm"),
    "recurrent": ("cell", "out"),
}  # fmt: skip


def trained(model: nn.Module, parameters: list[nn.Parameter]) -> list[float]:
    optimizer, losses = torch.optim.Adam(parameters, lr=0.01), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@TRACED
@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize(("net", "loss"), PROGRAMS)
def test_training_is_that_of_eager_hooks(net: str, loss: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    by_norm, by_value = CLIPPED[net]
    plain, model = program(net, loss), program(net, loss)
    hooks = OuterHooks(plain.net, {by_norm: clip, by_value: lambda g: g.clamp(-VALUE, VALUE)})
    with monkeypatch.context() as patch:
        patch.setattr(inner_gradients, "grad", hooks.grad)
        expected = trained(plain, list(plain.parameters()))

    policy = [
        gr.on(f"error:net.{by_norm}", ClipByNorm(NORM)),
        gr.on(f"error:net.{by_value}", ClipByValue(VALUE)),
        gr.on("error:*", CheckFinite()),
        gr.on("gradient:*", Observe("norm")),
    ]
    rewritten = gr.transform(model, policy)
    if compiled:
        rewritten.compile()
    found = trained(rewritten, list(model.parameters()))
    tolerance = 1e-6 if compiled else 1e-10
    assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
    assert min(rewritten.monitor.history(f"factor@error:net.{by_norm}")) < 1


@TRACED
@pytest.mark.parametrize("compiled", COMPILED)
def test_without_a_policy_nothing_changes(compiled: bool) -> None:
    plain, model = program("perceptron", "heat"), program("perceptron", "heat")
    rewritten = gr.transform(model, [])
    if compiled:
        rewritten.compile()
    losses = [m(*batch(0)) for m in (plain, rewritten)]
    for loss in losses:
        loss.backward()
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if compiled else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(*losses, **tolerance)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **tolerance)


@TRACED
def test_the_switch_is_that_of_these_models_alone() -> None:
    model = program("perceptron", "penalty")
    gr.transform(model, [])(*batch(0)).backward()
    assert not torch._dynamo.config.trace_autograd_ops
    with pytest.raises(torch._dynamo.exc.Unsupported, match="trace_autograd_ops"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(batch(0)[0].requires_grad_(), batch(0)[1])


class Refused(Inner):
    def __init__(self, kind: str) -> None:
        super().__init__(inner_gradients.perceptron().double(), getattr(self, f"_{kind}"))

    @staticmethod
    def _backward(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        net(x).sum().backward(create_graph=True)
        assert x.grad is not None
        return x.grad.square().mean()

    @staticmethod
    def _freed(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = net(x).sum()
        return torch.autograd.grad(energy, x)[0].square().mean() + energy

    @staticmethod
    def _returned(net: nn.Module, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        return net(x).sum(), x.flatten()


@TRACED
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("backward", r"a backward runs inside of the forward\n.*\n  Compute .* torch.autograd.grad\(loss, inputs, "),
        ("freed", r"frees values that the backward .* needs\n.*\n  Pass create_graph=True, or retain_graph=True"),
        ("returned", r"returns a tensor that began to need a gradient(.|\n)*\n  Return .*x\.detach\(\)"),
    ],
)
def test_what_is_refused(kind: str, message: str) -> None:
    model = gr.transform(Refused(kind), [])
    with pytest.raises(gr.GraphBreakError, match=message):
        model(*batch(0))


@pytest.mark.skipif(_compat_inner_gradients.IS_KNOWN, reason="traced there")
def test_older_versions_are_refused() -> None:
    with pytest.raises(gr.GraphBreakError, match=r"from torch 2\.12 on, and torch .* is installed"):
        gr.transform(program("perceptron", "forces"), [])(*batch(0))


@TRACED
def test_the_error_of_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no switch; here it is off."""
    monkeypatch.setattr(_compat_inner_gradients, "IS_KNOWN", False)
    with pytest.raises(
        gr.GraphBreakError, match=r"from torch 2\.12 on, and torch .* is installed\n.*grad\(.*\n  Pip install"
    ):
        gr.transform(program("perceptron", "penalty"), [])(batch(0)[0], batch(0)[1].requires_grad_())


@TRACED
def test_evaluation_with_gradients_switched_on() -> None:
    plain, model = program("perceptron", "forces"), gr.transform(program("perceptron", "forces"), [])
    with torch.no_grad():
        for one in (plain, model):
            with pytest.raises((RuntimeError, gr.TraceError), match="does not require grad"):
                one(*batch(0))
        with torch.enable_grad():
            assert torch.equal(plain(*batch(0)).detach(), model(*batch(0)).detach())
    model.eval()
    assert torch.equal(plain(*batch(1)).detach(), model(*batch(1)).detach())


def test_a_second_backward_through_the_model_says_where_it_belongs() -> None:
    model = gr.transform(inner_gradients.perceptron().double(), [])
    x = batch(0)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"Compute the penalty in the model's forward, .*torch\.autograd\.grad"):
        gradient.square().sum().backward()


def test_torch_func_grad_is_a_single_op() -> None:
    def loss(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda given: net(given).sum())(x)
        return (gradient + target).square().mean()

    plain = Inner(inner_gradients.perceptron(), loss).double()
    model = gr.transform(plain, gr.on("error:net.0", ClipByNorm(1.0)))
    assert not any(site.matches("error:net.*") for site in gr.transform(plain, []).trace(*batch(0)).sites)
    with pytest.warns(gr.RewriteWarning, match="'error:net.0' matches net.0, which made no differentiable value"):
        model(*batch(0)).backward()
