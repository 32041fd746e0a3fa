"""Norms, second moments and clipped sums of per-example gradients against the autograd of each example."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import ClipPerExample, Keep, Observe, WeighExamples

from models.per_example import MODELS, example_gradients, make
from models.small import Lambda

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-13}


def names(model: torch.nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def norms_of(terms: dict[str, Tensor]) -> Tensor:
    """The norms of the examples over all parameters."""
    return torch.stack([t.flatten(1).square().sum(1) for t in terms.values()]).sum(0).sqrt()


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_norms_and_second_moments(name: str) -> None:
    model, inputs = make(name)
    wanted = example_gradients(model, *inputs)
    policy = [gr.on("gradient:*", [Keep("example_norms"), Keep("second_moment")])]
    rewritten = gr.transform(model, policy)
    rewritten(*inputs).backward()
    norms = {site.name: t for site, t in rewritten.monitor.kept("example_norms").items()}
    moments = {site.name: t for site, t in rewritten.monitor.kept("second_moment").items()}
    for parameter, terms in wanted.items():
        torch.testing.assert_close(norms[parameter], terms.flatten(1).norm(dim=1), **EXACT)
        torch.testing.assert_close(moments[parameter], terms.square().mean(0), **EXACT)
        torch.testing.assert_close(model.get_parameter(parameter).grad, terms.mean(0), **EXACT)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_clipped_sums(name: str) -> None:
    model, inputs = make(name)
    terms = example_gradients(model, *inputs)
    norms = norms_of(terms)
    bound = float(norms.median()) * 0.99
    rewritten = gr.transform(model, gr.on("gradient:*", ClipPerExample(bound)))
    rewritten(*inputs).backward()
    factors = (bound / norms).clamp(max=1)
    for parameter, own in terms.items():
        wanted = torch.einsum("b,b...->...", factors, own) / len(norms)
        torch.testing.assert_close(model.get_parameter(parameter).grad, wanted, **EXACT)
    records = rewritten.monitor.latest()
    assert records["clipped_share@group:default"] == pytest.approx(float((norms > bound).double().mean()))
    assert records["example_norm_max@group:default"] == pytest.approx(float(norms.max()))
    assert records["example_norm_mean@group:default"] == pytest.approx(float(norms.mean()))


def clipped(terms: dict[str, Tensor], bound: float, reduction: str = "mean") -> dict[str, Tensor]:
    """The sum of the clipped gradients, or their mean."""
    norms = norms_of(terms)
    factors = (bound / norms).clamp(max=1) / (len(norms) if reduction == "mean" else 1)
    return {name: torch.einsum("b,b...->...", factors, own) for name, own in terms.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", ["linear 3-D", "recurrent", "conv 1-D", "conv 2-D", "attention", "parts"])
def test_the_batch_may_be_symbolic(name: str) -> None:
    """One compilation serves every size of the batch above 1."""
    model, inputs = make(name)
    actions = [Keep("example_norms"), Keep("second_moment"), ClipPerExample(0.1)]
    rewritten = gr.transform(model, gr.on("gradient:*", actions), dynamic=True)
    for number in (4, 3, 6, 2):
        batch = [torch.cat([x, x])[:number].clone() for x in inputs]
        terms = example_gradients(model, *batch)
        model.zero_grad()
        rewritten(*batch).backward()
        moments = {site.name: t for site, t in rewritten.monitor.kept("second_moment").items()}
        for parameter, wanted in clipped(terms, 0.1).items():
            torch.testing.assert_close(model.get_parameter(parameter).grad, wanted, **EXACT)
            torch.testing.assert_close(moments[parameter], terms[parameter].square().mean(0), **EXACT)
    assert len(rewritten.explain().graphs) == 1


@pytest.mark.long
def test_the_length_may_be_symbolic() -> None:
    """One compilation serves sequences of every length."""
    model, (x, y) = make("attention")
    rewritten = gr.transform(model, gr.on("gradient:*", [Keep("example_norms"), ClipPerExample(0.1)]), dynamic=True)
    for number, length in ((4, 5), (3, 3), (2, 4)):
        batch = x[:number, :length].clone(), y[:number, :length].clone()
        wanted = clipped(example_gradients(model, *batch), 0.1)
        model.zero_grad()
        rewritten(*batch).backward()
        for parameter, own in wanted.items():
            torch.testing.assert_close(model.get_parameter(parameter).grad, own, **EXACT)
    assert len(rewritten.explain().graphs) == 1


def test_loss_reduction_and_batch_dim() -> None:
    torch.manual_seed(0)
    # A loss that is the sum over examples, with the batch in dimension 1 of its inputs.
    model = Lambda(lambda net, x: net.layer(x.transpose(0, 1)).square().sum(), layer=torch.nn.Linear(3, 2).double())
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    options: dict[str, Any] = {"loss_reduction": "sum", "batch_dim": 1}
    statistics = Observe("norm", "example_norm_mean", "example_norm_max", "noise_scale", **options)
    actions = [statistics, Keep("second_moment", **options), ClipPerExample(3.0, **options)]
    terms = {}
    of = [torch.autograd.grad(model(x[:, n : n + 1]), list(model.parameters())) for n in range(4)]
    for (name, _), parts in zip(model.named_parameters(), zip(*of, strict=True), strict=True):
        terms[name] = torch.stack(parts)
    rewritten = gr.transform(model, gr.on("gradient:*", actions))
    rewritten(x).backward()
    records = rewritten.monitor.latest()
    moments = {site.name: t for site, t in rewritten.monitor.kept("second_moment").items()}
    for name, wanted in clipped(terms, 3.0, "sum").items():
        own = terms[name].flatten(1)
        torch.testing.assert_close(model.get_parameter(name).grad, wanted, **EXACT)
        torch.testing.assert_close(moments[name], terms[name].square().mean(0), **EXACT)
        assert records[f"norm@gradient:{name}"] == pytest.approx(float(own.sum(0).norm()))
        assert records[f"example_norm_mean@gradient:{name}"] == pytest.approx(float(own.norm(dim=1).mean()))
        assert records[f"example_norm_max@gradient:{name}"] == pytest.approx(float(own.norm(dim=1).max()))
        trace = float(own.var(0).sum())  # unbiased, as is the squared norm of the true gradient below
        true = float(own.mean(0).square().sum()) - trace / 4
        assert records[f"noise_scale@gradient:{name}"] == pytest.approx(trace / true)


@pytest.mark.long
@pytest.mark.parametrize("name", ["attention", "conv 2-D"])
def test_a_loose_bound_changes_nothing(name: str) -> None:
    model, inputs = make(name)
    model(*inputs).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    gr.transform(model, gr.on("gradient:*", ClipPerExample(1e9)))(*inputs).backward()
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(model.get_parameter(parameter).grad, gradient, **EXACT)


@pytest.mark.long
@pytest.mark.parametrize("name", ["attention", "conv 2-D"])
def test_norms_change_no_bit(name: str) -> None:
    model, inputs = make(name)
    found = []
    for actions in ([Observe("norm")], [Keep("example_norms"), Observe("noise_scale")]):
        model.zero_grad()
        gr.transform(model, gr.on("gradient:*", actions))(*inputs).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def products_of(model: torch.nn.Module, policy: Any, *inputs: Any) -> Counter[str]:
    """Count the products and the weight gradients of convolutions of a rewritten graph."""
    graph = gr.transform(model, policy).trace(*inputs).graph_module.graph
    return Counter(found for node in graph.nodes if (found := _product(node)))


def _product(node: torch.fx.Node) -> str:
    """Name of the op of a product, or of a backward that computes a weight gradient."""
    if node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
        return "product"
    is_convolution = node.target is torch.ops.aten.convolution_backward.default
    return "convolution" if is_convolution and node.args[-1][1] else ""


def sum_of(net: torch.nn.Module) -> Lambda:
    """A net whose loss is the sum of what another one returns."""
    return Lambda(lambda outer, x: outer.net(x).sum(), net=net)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "what"), [("conv 2-D", "convolution"), ("linear 3-D", "product"), ("recurrent", "product")]
)
def test_a_gradient_whose_terms_are_computed_is_their_sum(name: str, what: str) -> None:
    """There are no more products and weight gradients than without the moments."""
    model, inputs = make(name)
    actions = [Keep("second_moment"), Observe("norm")]
    assert 0 < products_of(model, gr.on("gradient:*", actions), *inputs)[what] <= products_of(model, [], *inputs)[what]


@pytest.mark.long
@pytest.mark.parametrize(("size", "number"), [(12, 1), (3, 2)])
def test_a_clipped_sum_of_terms(size: int, number: int) -> None:
    """Terms that are no larger than the inputs of the convolution are kept from the norms; others computed again."""
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, bias=False), torch.nn.Flatten(0)).double()
    x = torch.randn(5, 4, size, size, dtype=torch.float64)
    policy = gr.on("gradient:*", ClipPerExample(0.1, loss_reduction="sum"))
    assert products_of(sum_of(model), policy, x)["convolution"] == number
    terms = {
        name: torch.stack([torch.autograd.grad(model(row.unsqueeze(0)).sum(), p)[0] for row in x])
        for name, p in model.named_parameters()
    }
    gr.transform(sum_of(model), policy)(x).backward()
    for name, wanted in clipped(terms, 0.1, "sum").items():
        torch.testing.assert_close(model.get_parameter(name).grad, wanted, **EXACT)


@pytest.mark.long
@pytest.mark.parametrize("name", ["conv 2-D", "attention"])
def test_the_plain_gradient_is_not_computed(name: str) -> None:
    """Nothing is left of what made it: products, and the halves of backwards of convolutions."""
    model, inputs = make(name)
    graph = gr.transform(model, gr.on("gradient:*", ClipPerExample(1.0))).trace(*inputs)
    wanted = graph.before
    assert wanted is not None

    plain = {n.name for n in wanted.graph_module.graph.nodes}
    left = [n for n in graph.graph_module.graph.nodes if n.name in plain]
    assert not [n for n in left if "convolution_backward" in str(n.target) and any(n.args[-1][1:])]
    before = [n for n in wanted.graph_module.graph.nodes if n.target is torch.ops.aten.mm.default]
    after = [n for n in left if n.target is torch.ops.aten.mm.default]
    num_matrices = sum(isinstance(m, torch.nn.Linear) for m in model.modules())
    assert len(before) - len(after) == num_matrices
    outputs = [n for n in graph.graph_module.graph.output_node().all_input_nodes if n.name in plain]
    gradients = {f"gradient:{n}" for n in names(model)}
    assert {str(edit.site) for edit in graph.edits} == gradients
    assert len(outputs) == 1  # the loss


@pytest.mark.long
def test_units_are_those_of_the_unscaled_loss() -> None:
    model, inputs = make("linear 3-D")
    terms, scale = example_gradients(model, *inputs), torch.tensor(1024.0)
    actions = [Keep("example_norms"), Keep("second_moment"), Observe("noise_scale"), ClipPerExample(0.1)]
    rewritten = gr.transform(model, gr.on("gradient:*", actions), loss_scale=scale)
    (rewritten(*inputs) * scale).backward()
    norms = {site.name: t for site, t in rewritten.monitor.kept("example_norms").items()}
    moments = {site.name: t for site, t in rewritten.monitor.kept("second_moment").items()}
    for name, wanted in clipped(terms, 0.1).items():
        own = terms[name].flatten(1)
        torch.testing.assert_close(model.get_parameter(name).grad, wanted * 1024, **EXACT)
        torch.testing.assert_close(norms[name], own.norm(dim=1), **EXACT)
        torch.testing.assert_close(moments[name], terms[name].square().mean(0), **EXACT)
        true = float(own.mean(0).square().sum()) - float(own.var(0).sum()) / len(own)
        found = rewritten.monitor.latest()[f"noise_scale@gradient:{name}"]
        assert found == pytest.approx(float(own.var(0).sum()) / true, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_noise(reduction: Any) -> None:
    """Its deviation is that of the formula; it comes anew at each backward, and not from torch's own generator."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Flatten(0))
    x = torch.zeros(4, 40)
    action = ClipPerExample(2.0, noise_multiplier=1.5, loss_reduction=reduction)
    rewritten = gr.transform(model, gr.on("gradient:0.weight", action))
    state = torch.get_rng_state()
    drawn = []
    for _ in range(3):
        model.zero_grad()
        rewritten(x).sum().backward()
        drawn.append(model[0].weight.grad.clone() * (4 if reduction == "mean" else 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert float(torch.stack(drawn).std()) == pytest.approx(3.0, rel=0.05)
    correlation = torch.corrcoef(torch.stack([d.flatten() for d in drawn]))
    assert float((correlation - torch.eye(3)).abs().max()) < 0.1


def test_the_bound_may_follow_a_schedule() -> None:
    model, inputs = make("linear")
    terms = example_gradients(model, *inputs)
    norms = norms_of(terms)
    schedule = gr.Schedule(lambda step: 0.5 * float(norms.amin()) / (1 + step))
    rewritten = gr.transform(model, gr.on("gradient:*", ClipPerExample(schedule)))
    for step in range(2):
        rewritten.zero_grad()
        rewritten(*inputs).backward()
        weights = schedule.at(step) / norms
        for name, own in terms.items():
            wanted = torch.einsum("b,b...->...", weights, own) / len(norms)
            torch.testing.assert_close(model.get_parameter(name).grad, wanted, **EXACT)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "of", "options"),
    [
        (ClipPerExample, 1.0, {}),
        (WeighExamples, torch.reciprocal, {}),
        (WeighExamples, torch.reciprocal, {"per_parameter": True}),
    ],
)
def test_noise_goes_on_after_a_checkpoint(kind: Any, of: Any, options: dict[str, Any]) -> None:
    def made() -> Any:
        torch.manual_seed(5)
        model, inputs = make("linear")
        return gr.transform(model, gr.on("gradient:*", kind(of, noise_multiplier=2.0, **options))), inputs

    def gradients(model: Any, inputs: Any, times: int) -> list[Tensor]:
        found = []
        for _ in range(times):
            model.zero_grad()
            model(*inputs).backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found

    model, inputs = made()
    gradients(model, inputs, 2)
    state = gr.state_dict(model)
    assert list(state["states"]) == [f"group:default/{kind.__name__}.noise.cpu"]
    copied = pickle.loads(pickle.dumps(model))
    wanted = gradients(model, inputs, 2)
    for is_called in (False, True):
        resumed, inputs = made()
        first = gradients(resumed, inputs, 1) if is_called else []
        gr.load_state_dict(resumed, state)
        got = gradients(resumed, inputs, 2)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert not first or not torch.equal(first[0], got[0])
    assert all(torch.equal(a, b) for a, b in zip(gradients(copied, inputs, 2), wanted, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(gradients(model, inputs, 1), wanted, strict=False))


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [None, True])
def test_no_examples_give_the_noise_alone(dynamic: bool | None) -> None:
    """A batch that was drawn empty is one step of private training as any other, if the loss is a sum."""
    torch.manual_seed(3)
    model = sum_of(torch.nn.Linear(40, 50)).double()
    options: dict[str, Any] = {"loss_reduction": "sum"}
    statistics = Observe("example_norm_mean", "example_norm_max", "noise_scale", **options)
    kept = [Keep("example_norms", **options), Keep("second_moment", **options)]
    clip = ClipPerExample(2.0, noise_multiplier=1.5, **options)
    rewritten = gr.transform(model, gr.on("gradient:net.weight", [statistics, *kept, clip]), dynamic=dynamic)
    for number in (0, 4, 0):
        model.zero_grad()
        rewritten(torch.zeros(number, 40, dtype=torch.float64)).backward()
        assert model.net.bias.grad is not None
        assert torch.equal(model.net.bias.grad, torch.full((50,), float(number), dtype=torch.float64))
        assert float(model.net.weight.grad.std()) == pytest.approx(3.0, rel=0.05)
    records = rewritten.monitor.latest()
    assert records["clipped_share@group:default"] == 0
    for name in ("example_norm_mean", "example_norm_max"):
        assert math.isnan(records[f"{name}@group:default"])
        assert math.isnan(records[f"{name}@gradient:net.weight"])
    (norms,) = rewritten.monitor.kept("example_norms").values()
    assert norms.shape == (0,)
    (moment,) = rewritten.monitor.kept("second_moment").values()
    assert moment.isnan().all()


def test_a_clipped_sum_of_no_examples_is_zero() -> None:
    """Even of a loss whose gradient is not."""
    model = torch.nn.Linear(3, 2)
    policy = gr.on("gradient:weight", ClipPerExample(1.0, loss_reduction="sum"))
    (gr.transform(model, policy)(torch.zeros(0, 3)).sum() * torch.inf).backward()
    assert torch.equal(model.weight.grad, torch.zeros(2, 3))
