"""Gradients inside of the forward beside the other features, against eager autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite._compat.inner_gradients import IS_KNOWN
from gradrewrite.passes import (
    CheckFinite,
    ClipByNorm,
    ClipPerExample,
    KeepZeros,
    Observe,
    Recompute,
    Store,
    WeighLosses,
)
from gradrewrite.rewriting import saved_tensors

from models.inner_gradients import LOSSES, Inner, batch, forces, perceptron, program

pytestmark = pytest.mark.skipif(not IS_KNOWN, reason="torch.autograd.grad in a forward is traced from torch 2.12 on")
COMPILED = [False, pytest.param(True, marks=pytest.mark.inductor)]
SEVERAL = ("forces", "heat", "gradient_of_parameters", "inner_steps")


def gradients(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(*(inputs or batch(0))).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_plain(plain: nn.Module, policy: gr.Policy, *, compiled: bool = False, **options: Any) -> gr.RewrittenModule:
    """Assert that a policy which changes nothing leaves the gradients as they are."""
    expected = gradients(copy.deepcopy(plain))
    model = gr.transform(plain, policy, **options)
    if compiled:
        model.compile()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-6 if compiled else 1e-10, atol=1e-12)
    return model


@pytest.mark.parametrize("loss", SEVERAL)
@pytest.mark.parametrize(
    "policy",
    [
        gr.on("backward:*/silu", lambda op: op.vjp(op.error)),
        gr.on("backward:*/*", KeepZeros()),
        gr.on("error:net.0->net.1", ClipByNorm(1e9)),
        gr.on("error:net.2", lambda g, *, a: g + 0 * a.sum(), reads={"a": "activation:net.0"}),
        gr.together("error:net.*", lambda errors: {}),
    ],
    ids=["backward", "zeros", "use", "reads", "together"],
)
def test_what_changes_nothing(loss: str, policy: gr.Rule) -> None:
    assert_plain(program("perceptron", loss), policy)


@pytest.mark.filterwarnings("ignore:.*left alone:gradrewrite.RewriteWarning")
@pytest.mark.parametrize("loss", SEVERAL)
@pytest.mark.parametrize("action", [Recompute(), Store("float32")], ids=["recompute", "store"])
def test_saved_tensors(loss: str, action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "SMALL", 17)
    expected = gradients(program("perceptron", loss))
    model = gr.transform(program("perceptron", loss), gr.on("saved:net.*", action))
    near = 1e-5 if isinstance(action, Store) else 1e-10
    torch.testing.assert_close(gradients(model), expected, rtol=near, atol=near)
    assert "saved:net" in str(model.explain())


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.LSTM | nn.GRU | nn.RNN]) -> None:
        super().__init__()
        self.rec, self.out = layer(1, 5, batch_first=True), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.rec(x.unsqueeze(-1))[0][:, -1])
        return y


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(layer: type[nn.LSTM | nn.GRU | nn.RNN], compiled: bool) -> None:
    torch.manual_seed(0)
    plain = Inner(Recurrent(layer), forces).double()
    assert_plain(copy.deepcopy(plain), gr.on("error:net.rec", ClipByNorm(1e9)), compiled=compiled)
    assert_plain(copy.deepcopy(plain), [], compiled=compiled)
    with pytest.raises(
        gr.NoSuchSiteError, match=r"no site matches 'error:net\.rec\.l0/h'; nearest sites: error:net\.rec"
    ):
        gr.transform(plain, gr.on("error:net.rec.l0/h", ClipByNorm(1.0)))(*batch(0))


class Beside(nn.Module):
    """A recurrent layer that no gradient in the forward depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.rec = program("perceptron", "forces"), nn.LSTM(3, 4).double()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.inner(x, target) + self.rec(x.unsqueeze(1))[0].square().mean()
        return loss


def test_other_recurrent_layers_keep_their_sites() -> None:
    torch.manual_seed(0)
    model = assert_plain(Beside(), gr.on("error:rec.l0/h", Observe("norm")))
    assert len(model.monitor.latest()) == len(batch(0)[0])


def over_time(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    h = x
    for _ in range(6):
        h = torch.tanh(h + net(h))
    (gradient,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return (gradient - target).square().mean()


def test_python_loops_stay_unrolled() -> None:
    torch.manual_seed(0)
    model = assert_plain(Inner(perceptron(), over_time).double(), gr.on("error:net.0", ClipByNorm(1e9)), loops="rolled")
    assert "torch.autograd.grad in the forward differentiates it" in str(model.explain())


@pytest.mark.parametrize("loss", ["forces_of_input", "penalty", "heat", "third", "hessian_product"])
@pytest.mark.parametrize("net", ["perceptron", "attention"])
def test_examples_are_clipped_as_in_a_loop_over_them(net: str, loss: str) -> None:
    bound, (x, target) = 0.05, batch(0)
    plain = program(net, loss)
    expected = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for row in range(len(x)):
        one = gradients(copy.deepcopy(plain), x[row : row + 1].clone(), target[row : row + 1].clone())
        norm = torch.stack([g.norm() for g in one.values()]).norm()
        for name, g in one.items():
            expected[name] += g * (bound / norm).clamp(max=1) / len(x)
    found = gradients(gr.transform(plain, gr.on("gradient:*", ClipPerExample(bound))), x.clone(), target.clone())
    for name, g in expected.items():
        torch.testing.assert_close(found.get(name, torch.zeros_like(g)), g, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("loss", ["gradient_of_parameters", "inner_steps", "adaptive_weight"])
def test_losses_that_are_no_sum_over_examples_are_refused(loss: str) -> None:
    with pytest.raises(gr.PolicyError, match=r"needs the gradient of each example: .* of a sum over the batch"):
        gradients(gr.transform(program("perceptron", loss), gr.on("gradient:*", ClipPerExample(1.0))))


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.net(x).sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return {"energy": (energy - 1).square(), "force": (gradient - target).square().mean()}


@pytest.mark.parametrize("compiled", COMPILED)
def test_losses_are_weighed(compiled: bool) -> None:
    torch.manual_seed(0)
    model = TwoLosses().double()
    plain = copy.deepcopy(model)
    losses = plain(*batch(0))
    settings: Any = {"retain_graph": True, "allow_unused": True}
    of_each = [torch.autograd.grad(loss, list(plain.parameters()), **settings) for loss in losses.values()]
    rewritten = gr.transform(model, gr.on("gradient:*", WeighLosses([2.0, 0.5])))
    if compiled:
        rewritten.compile()
    sum(rewritten(*batch(0)).values()).backward()
    for p, one, two in zip(model.parameters(), *of_each, strict=True):
        # A gradient of one loss alone keeps its weight; see WeighLosses(everywhere=True).
        expected = one if two is None else 2.0 * one + 0.5 * two
        torch.testing.assert_close(p.grad, expected, rtol=1e-6 if compiled else 1e-10, atol=1e-12)


class Checkpointed(Inner):
    def __init__(self, *, around: bool) -> None:
        super().__init__(perceptron(), forces)
        self.around = around

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if self.around:
            return checkpoint(super().forward, x, target, use_reentrant=False)
        return forces(lambda h: checkpoint(self.net, h, use_reentrant=False), x, target)


@pytest.mark.parametrize("around", [False, True])
def test_checkpoints(around: bool) -> None:
    torch.manual_seed(0)
    assert_plain(Checkpointed(around=around).double(), gr.on("error:*", ClipByNorm(1e9)))


def test_regions_are_refused() -> None:
    model = gr.transform(program("perceptron", "forces"), gr.on("error:*", ClipByNorm(1.0)), regions=["net.0"])
    with pytest.raises(gr.TraceError, match=r"gradients of gradients .* leave regions= out"):
        model(*batch(0)).backward()


@pytest.mark.parametrize("loss", LOSSES)
def test_the_oracle_agrees(loss: str) -> None:
    model = program("perceptron", loss)
    compared = gr.testing.assert_matches_eager(model, gr.on("error:*/*", ClipByNorm(1e-2)), *batch(0), compiled=False)
    assert compared.acted
    gr.testing.assert_matches_eager(model, gr.on("error:*", ClipByNorm(1e-4)), *batch(0), compiled=False)


def test_names_of_what_grad_returns() -> None:
    names = [str(site) for site in gr.transform(program("perceptron", "heat"), []).trace(*batch(0)).sites]
    assert [name for name in names if name.startswith("error:/grad")] == [
        "error:/grad.0",
        "error:/grad.1",
        "error:/grad",
    ]


class Distances(nn.Module):
    """The derivative of a root at 0 is infinite, in the gradient inside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        distances = (x[:, None] - x[None]).square().sum(-1).sqrt()
        (gradient,) = torch.autograd.grad(self.net(distances[..., None]).sum(), x, create_graph=True)
        return (gradient - target).square().mean()


@pytest.mark.parametrize("compiled", COMPILED)
def test_the_op_of_the_inner_gradient_is_named(compiled: bool) -> None:
    torch.manual_seed(0)
    plain = Distances().double()
    model = gr.transform(plain, gr.on("gradient:*", CheckFinite()))
    if compiled:
        model.compile()
    with pytest.raises(gr.NonFiniteError) as caught:
        model(*batch(0)).backward()
    located = gr.locate(plain, *batch(0))
    line = Distances.forward.__code__.co_firstlineno + 2
    for error in (caught.value, located):
        assert error is not None
        assert (str(error.site), error.op, error.is_inner) == ("activation:/grad", "/sqrt", True)
        assert f":{line} " in error.source
        assert "made by the backward of /sqrt, " in str(error)
        assert ", in a gradient inside of the forward" in str(error)
    cause = gr.diagnose(plain, [batch(0)], optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), steps=2)
    assert "made by the backward of /sqrt" in str(cause)


def test_its_nodes_have_a_lane() -> None:
    graph = gr.transform(program("perceptron", "forces"), []).trace(*batch(0))
    inner = [origin for origin in graph.provenance.origins.values() if origin.lane == "inner"]
    assert {origin.module for origin in inner} == {"net.0", "net.1", "net.2", "net.3", "net.4", ""}
    assert "gradients inside, run up" in viz.draw(graph, view="ladder")._repr_svg_()


class Residual(nn.Module):
    """A gradient for the result of what hands its input on, which is read as well."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.middle, self.b = nn.Linear(3, 4), middle, nn.Linear(4, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.a(x)
        y = self.middle(h)
        energy = self.b(y).sum() + h.square().sum()
        return torch.autograd.grad(energy, y, create_graph=True)[0].square().sum()


class Tap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gr.tap(x, "tapped")


@pytest.mark.parametrize("middle", [nn.Identity(), nn.Dropout(0.0), nn.Dropout(0.5).eval(), Tap()])
def test_what_hands_its_input_on_is_the_same_tensor(middle: nn.Module) -> None:
    plain = Residual(middle).double()
    loss = plain(*batch(0))
    assert torch.equal(gr.transform(plain, [])(*batch(0)), loss)
    assert_plain(plain, gr.on("error:*", ClipByNorm(1e9)))


class OfHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.a(x)
        energy = self.b(h.tanh()).sum()
        gradients = torch.autograd.grad(energy, (h, target), create_graph=True, allow_unused=True)
        assert gradients[1] is None
        return (h * gradients[0]).square().sum() + energy


def test_uses_of_what_is_differentiated() -> None:
    x, target = batch(0)
    plain = OfHidden().double()
    loss = plain(x, target.requires_grad_())
    model = gr.transform(plain, gr.on("error:*->*/*", Observe("norm")))
    torch.testing.assert_close(model(x, target), loss)
    model(x, target).backward()
    assert {key.partition("@")[2] for key in model.monitor.latest()} >= {"error:a->/tanh", "error:a->/mul"}


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


@pytest.mark.parametrize("is_constant", [False, True])
def test_custom_functions_are_refused_where_they_are_differentiated_twice(is_constant: bool) -> None:
    def loss(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy: Tensor = Cube.apply(net(x)).sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=not is_constant, retain_graph=True)
        return energy * gradient.square().mean()

    torch.manual_seed(0)
    plain = Inner(perceptron(), loss).double()
    if is_constant:
        assert_plain(plain, gr.on("error:*", ClipByNorm(1e9)))
        return
    with pytest.raises(gr.TraceError, match=r"Function is differentiated twice.*\n.*apply\(.*\n  Write it with"):
        gr.transform(plain, [])(*batch(0))


class Energy(nn.Module):
    """Energy and forces; in evaluation the gradient frees what it has used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = perceptron()

    @torch.enable_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.net(x).sum()
        return energy, -torch.autograd.grad(energy, x, create_graph=self.training)[0]


@pytest.mark.parametrize("compiled", COMPILED)
def test_evaluation_of_forces(compiled: bool) -> None:
    plain = Energy().double().eval()
    model = gr.transform(plain, gr.on("error:*", ClipByNorm(1.0)))
    if compiled:
        model.compile()
    with torch.no_grad():
        torch.testing.assert_close([t.detach() for t in model(batch(0)[0])], [t.detach() for t in plain(batch(0)[0])])


@pytest.mark.filterwarnings("ignore:.*the tracer skipped a region:gradrewrite.RewriteWarning")
@pytest.mark.parametrize("of_input", [False, True])
def test_a_graph_break_takes_nothing_from_it(of_input: bool) -> None:
    def loss(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        h = x.requires_grad_() if of_input else x.detach().requires_grad_() * 2
        torch._dynamo.graph_break()
        y = net(h).sum()
        return y + torch.autograd.grad(y * y, h, create_graph=True)[0].sum() if h.requires_grad else y

    torch.manual_seed(0)
    plain = Inner(perceptron(), loss).double()
    expected = plain(*batch(0))
    torch.testing.assert_close(gr.transform(plain, [], fullgraph=False)(*batch(0)), expected)


def test_an_input_that_begins_to_need_a_gradient_for_the_caller_is_refused() -> None:
    model = gr.transform(Inner(perceptron(), lambda net, x, _: net(x.requires_grad_()).sum()).double(), [])
    with pytest.raises(gr.GraphBreakError, match=r"call requires_grad_\(\) of inputs before the forward"):
        model(*batch(0))


def test_the_empty_policy_is_inert() -> None:
    gr.testing.assert_inert(program("perceptron", "penalty"), *batch(0), compiled=False)


def test_the_limits_of_the_page() -> None:
    """Rules act on constant gradients through regions; hooks on parameters do not act inside."""

    def constant(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(net(x).sum(), x)
        return net(x.detach() + gradient).square().sum()

    torch.manual_seed(0)
    plain, rule = Inner(perceptron(), constant).double(), gr.on("error:net.0", lambda g: -5 * g)
    loss = plain(*batch(0))
    assert torch.equal(gr.transform(copy.deepcopy(plain), rule)(*batch(0)), loss)
    assert not torch.allclose(gr.transform(copy.deepcopy(plain), rule, regions=["net"])(*batch(0)), loss)

    hooked = program("perceptron", "gradient_of_parameters")
    loss = hooked(*batch(0))
    next(hooked.parameters()).register_hook(lambda g: 10 * g)
    assert not torch.allclose(hooked(*batch(0)), loss)
    torch.testing.assert_close(gr.transform(hooked, [])(*batch(0)), loss)
