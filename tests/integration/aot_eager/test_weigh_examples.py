"""Sums of gradients of examples by factors of their norms, against autograd for each example and plain optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipPerExample, WeighExamples

from models.per_example import example_gradients, make, vmap_gradients
from models.small import Lambda

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-13}
STEPS, MICRO_BATCHES = 6, 2
Factors = Callable[[Tensor], Tensor]
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
}


def automatic(norms: Tensor) -> Tensor:
    return 1 / (norms + 0.01)


def norms_of(terms: dict[str, Tensor]) -> Tensor:
    return torch.stack([own.flatten(1).square().sum(1) for own in terms.values()]).sum(0).sqrt()


def weighted(terms: dict[str, Tensor], f: Factors, reduction: str = "mean", *, each: bool = False) -> dict[str, Tensor]:
    """The weighted sums of the terms, or their means, by parameter."""
    factors = {name: f(norms_of({name: own} if each else terms)) for name, own in terms.items()}
    sums = {name: torch.einsum("b,b...->...", factors[name], own) for name, own in terms.items()}
    return {name: total / (len(terms[name]) if reduction == "mean" else 1) for name, total in sums.items()}


class Total(nn.Module):
    """The sum of the losses of which a model returns the mean."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x, y) * x.shape[0]


def with_loss(name: str, reduction: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model, inputs = make(name)
    return (Total(model) if reduction == "sum" else model), inputs


def batch(inputs: tuple[Tensor, ...], number: int) -> list[Tensor]:
    return [x.roll(number, -1) for x in inputs]


CASES = [
    ("linear 3-D", "AdamW", "mean", vmap_gradients),
    ("tied", "SGD", "mean", example_gradients),
    ("conv 2-D", "SGD", "sum", example_gradients),
    ("recurrent", "AdamW", "sum", example_gradients),
    ("checkpointed", "SGD", "mean", example_gradients),
    ("one example", "SGD", "mean", example_gradients),
]


@pytest.mark.long
@pytest.mark.parametrize("each", [False, True], ids=["whole", "each"])
@pytest.mark.parametrize(("name", "optimizer", "reduction", "oracle"), CASES, ids=[case[0] for case in CASES])
def test_training(name: str, optimizer: str, reduction: Any, oracle: Any, each: bool) -> None:
    plain, inputs = with_loss(name, reduction)
    own = copy.deepcopy(plain)
    action = WeighExamples(automatic, per_parameter=each, loss_reduction=reduction)
    model = gr.transform(own, gr.on("gradient:*", action))
    optimizers = [OPTIMIZERS[optimizer](one) for one in (plain, own)]
    for step in range(STEPS):
        for one in optimizers:
            one.zero_grad()
        for number in range(MICRO_BATCHES):
            given = batch(inputs, MICRO_BATCHES * step + number)
            model(*given).backward()
            for parameter, gradient in weighted(oracle(plain, *given), automatic, reduction, each=each).items():
                p = plain.get_parameter(parameter)
                p.grad = gradient if p.grad is None else p.grad + gradient
        for p, q in zip(plain.parameters(), own.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, **EXACT)
        for one in optimizers:
            one.step()
        torch.testing.assert_close(list(own.parameters()), list(plain.parameters()), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_a_clip_is_one_case(scale: float | None) -> None:
    """Also in units of the unscaled loss."""
    found, records = [], []
    factor = torch.tensor(1.0 if scale is None else scale)
    for action in (ClipPerExample(0.7), WeighExamples(lambda n: (0.7 / n).clamp(max=1))):
        model, inputs = make("attention")
        model = gr.transform(model, gr.on("gradient:*", action), loss_scale=None if scale is None else factor)
        (model(*inputs) * factor).backward()
        found.append([p.grad / factor for p in model.parameters()])
        records.append(model.monitor.latest())
    torch.testing.assert_close(*found, **EXACT)
    clip, weighing = records
    model, inputs = make("attention")
    norms = norms_of(example_gradients(model, *inputs))
    mean, share = weighing.pop("example_factor_mean@group:default"), clip.pop("clipped_share@group:default")
    assert mean == pytest.approx(float((0.7 / norms).clamp(max=1).mean()))
    assert share == pytest.approx(float((norms > 0.7).double().mean()))
    assert weighing == pytest.approx(clip)
    assert len(clip) == 2


@pytest.mark.long
def test_each_parameter_in_units_of_the_unscaled_loss() -> None:
    model, inputs = make("conv 2-D")
    terms, scale = example_gradients(model, *inputs), torch.tensor(1024.0)
    policy = gr.on("gradient:*", WeighExamples(automatic, per_parameter=True))
    rewritten = gr.transform(model, policy, loss_scale=scale)
    (rewritten(*inputs) * scale).backward()
    wanted: dict[str, Any] = {}
    for name, gradient in weighted(terms, automatic, each=True).items():
        torch.testing.assert_close(model.get_parameter(name).grad / scale, gradient, **EXACT)
    for name, own in terms.items():
        norms = norms_of({name: own})
        figures = {"norm_mean": norms.mean(), "norm_max": norms.max(), "factor_mean": automatic(norms).mean()}
        wanted |= {f"example_{what}@gradient:{name}": float(figure) for what, figure in figures.items()}
    assert rewritten.monitor.latest() == pytest.approx(wanted)


@pytest.mark.parametrize("each", [False, True], ids=["whole", "each"])
def test_states_and_records_of_the_function(each: bool) -> None:
    """One state for each call of the function; records stand beside its own."""
    model, inputs = make("linear 3-D")
    bounds = {name: torch.zeros((), dtype=torch.float64) for name, _ in model.named_parameters()}
    state = gr.State((), 0.0, torch.float64, name="bound")

    def follow(norms: Tensor) -> Tensor:
        bound = 0.5 * state.value + 0.5 * norms.mean()
        state.set(bound)
        gr.record("bound", bound)
        return (bound / norms).clamp(max=1)

    rewritten = gr.transform(model, gr.on("gradient:*", WeighExamples(follow, per_parameter=each)))
    for number in range(3):
        given = batch(inputs, number)
        terms = example_gradients(model, *given)
        model.zero_grad()
        rewritten(*given).backward()
        for name in terms:
            norms = norms_of({name: terms[name]} if each else terms)
            bounds[name] = 0.5 * bounds[name] + 0.5 * norms.mean()
            factors = (bounds[name] / norms).clamp(max=1)
            wanted = torch.einsum("b,b...->...", factors, terms[name]) / len(norms)
            torch.testing.assert_close(model.get_parameter(name).grad, wanted, **EXACT)
            at = f"gradient:{name}" if each else "group:default"
            assert rewritten.monitor.latest()[f"bound@{at}"] == pytest.approx(float(bounds[name]))
            torch.testing.assert_close(gr.state_dict(rewritten)["states"][f"{at}/bound"], bounds[name], **EXACT)
    assert len(gr.state_dict(rewritten)["states"]) == (len(bounds) if each else 1)


def test_a_tensor_in_the_function_is_read_at_every_backward() -> None:
    model, inputs = make("linear")
    terms, power = example_gradients(model, *inputs), torch.zeros(())
    rewritten = gr.transform(model, gr.on("gradient:*", WeighExamples(lambda n: n**-power)))
    for value in (1.0, 0.5):
        power.fill_(value)
        model.zero_grad()
        rewritten(*inputs).backward()
        for name, own in weighted(terms, lambda n, v=value: n**-v).items():
            torch.testing.assert_close(model.get_parameter(name).grad, own, **EXACT)


def test_behind_a_clip_norms_are_those_of_the_clipped_gradients() -> None:
    model, inputs = make("attention")
    terms = example_gradients(model, *inputs)
    factors = (0.7 / norms_of(terms)).clamp(max=1)
    clipped = {name: torch.einsum("b,b...->b...", factors, own) for name, own in terms.items()}
    gr.transform(model, gr.on("gradient:*", [ClipPerExample(0.7), WeighExamples(automatic)]))(*inputs).backward()
    for name, own in weighted(clipped, automatic).items():
        torch.testing.assert_close(model.get_parameter(name).grad, own, **EXACT)


def test_two_groups_have_two_functions() -> None:
    model, inputs = make("linear")
    terms = example_gradients(model, *inputs)
    groups = {"net.0.*": automatic, "net.2.*": torch.exp}
    rules = [gr.on(f"gradient:{p}", WeighExamples(f, group=p[:5])) for p, f in groups.items()]
    gr.transform(model, rules)(*inputs).backward()
    for pattern, f in groups.items():
        own = {name: t for name, t in terms.items() if name.startswith(pattern[:5])}
        assert len(own) == 2
        for name, gradient in weighted(own, f).items():
            torch.testing.assert_close(model.get_parameter(name).grad, gradient, **EXACT)


@pytest.mark.long
def test_the_batch_may_be_symbolic_or_empty() -> None:
    model, inputs = with_loss("linear 3-D", "sum")
    action = WeighExamples(automatic, per_parameter=True, loss_reduction="sum")
    rewritten = gr.transform(model, gr.on("gradient:*", action), dynamic=True)
    for number in (4, 3, 6):
        given = [torch.cat([x, x])[:number].clone() for x in inputs]
        model.zero_grad()
        rewritten(*given).backward()
        for name, own in weighted(example_gradients(model, *given), automatic, "sum", each=True).items():
            torch.testing.assert_close(model.get_parameter(name).grad, own, **EXACT)
    assert len(rewritten.explain().graphs) == 1
    model.zero_grad()
    total = Lambda(lambda outer, x: outer.net(x).sum(), net=nn.Linear(3, 2))
    gr.transform(total, gr.on("gradient:*", action))(torch.zeros(0, 3)).backward()
    assert all(not p.grad.any() for p in total.parameters())


def test_nothing_is_hidden() -> None:
    """Factors are multiplied as they are."""
    net = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    for value, wanted in ((torch.nan, torch.nan), (torch.inf, torch.inf), (0.0, 3.0), (-2.0, -9.0)):
        action = WeighExamples(lambda n, v=value: torch.where(n > 7, v, 1.0), loss_reduction="sum")
        net.zero_grad()
        gr.transform(net, gr.on("gradient:*", action))(x).sum().backward()
        torch.testing.assert_close(net.weight.grad[0, 0], torch.tensor(wanted), equal_nan=True)


def test_factors_are_converted() -> None:
    model, inputs = make("linear")
    wanted = weighted(example_gradients(model, *inputs), lambda n: automatic(n).bfloat16().double())
    gr.transform(model, gr.on("gradient:*", WeighExamples(lambda n: automatic(n).bfloat16())))(*inputs).backward()
    for name, own in wanted.items():
        torch.testing.assert_close(model.get_parameter(name).grad, own, **EXACT)


def noises(action: Any, steps: int) -> list[Tensor]:
    """Gradients that are noise alone, of a batch of four."""
    net = nn.Linear(40, 50, bias=False)
    model, found = gr.transform(net, gr.on("gradient:*", action)), []
    for _ in range(steps):
        net.zero_grad()
        model(torch.zeros(4, 40)).sum().backward()
        found.append(net.weight.grad.clone())
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_noise(reduction: Any) -> None:
    """That of a clip at norm 1, bit for bit; it comes anew at each backward."""
    drawn = []
    for make_action in (WeighExamples, ClipPerExample):
        torch.manual_seed(3)
        first = automatic if make_action is WeighExamples else 1.0
        drawn.append(noises(make_action(first, noise_multiplier=1.5, loss_reduction=reduction), 3))
    assert all(map(torch.equal, *drawn))
    together = torch.stack(drawn[0]) * (4 if reduction == "mean" else 1)
    assert float(together.std()) == pytest.approx(1.5, rel=0.05)
    assert float((torch.corrcoef(together.flatten(1)) - torch.eye(3)).abs().max()) < 0.1


@pytest.mark.pure
def test_equal_functions_are_equal_actions() -> None:
    def bounded(c: float) -> WeighExamples:
        return WeighExamples(lambda n: (c / n).clamp(max=1), noise_multiplier=1.0)

    assert bounded(1.0) == bounded(1.0)
    assert hash(bounded(1.0)) == hash(bounded(1.0))
    others = (bounded(2.0), WeighExamples(automatic), ClipPerExample(1.0))
    assert bounded(1.0) not in others
    assert WeighExamples(automatic) == WeighExamples(automatic) != WeighExamples(automatic, per_parameter=True)
    assert repr(WeighExamples(automatic, per_parameter=True)) == "WeighExamples(automatic, per_parameter=True)"


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda n: None, "NoneType"),
        (lambda n: 0.5, "float"),
        (lambda n: [n], "list"),
        (lambda n: n < 1, r"\(4,\), torch.bool, on cpu"),
        (lambda n: n.to(torch.complex64), r"\(4,\), torch.complex64, on cpu"),
        (lambda n: n[:, None], r"\(4, 1\), torch.float64, on cpu"),
        (lambda n: n.mean(), r"\(\), torch.float64, on cpu"),
        (lambda n: torch.ones(3), r"\(3,\), torch.float32, on cpu"),
        (lambda n: n.to("meta"), r"\(4,\), torch.float64, on meta"),
    ],
)
def test_wrong_answers(function: Any, got: str) -> None:
    model, inputs = make("linear")
    text = rf"gradient:net.0.weight: WeighExamples\(.*<lambda>\): .* floating .* shape \(4,\) on cpu; .* returned {got}"
    with pytest.raises(gr.CallbackError, match=text):
        gr.transform(model, gr.on("gradient:*", WeighExamples(function)))(*inputs)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("make_it", "error", "text"),
    [
        (lambda: WeighExamples(1.0), TypeError, r"function takes norms \[B\] and returns factors \[B\], got 1.0"),
        (lambda: WeighExamples(None), TypeError, "function takes norms"),
        (lambda: WeighExamples(lambda a, b: a), TypeError, "function takes norms"),
        (lambda: WeighExamples(automatic, noise_multiplier=-1.0), ValueError, "noise_multiplier must be >= 0"),
        (lambda: WeighExamples(automatic, noise_multiplier=torch.ones(())), TypeError, "noise_multiplier is a number"),
        (lambda: WeighExamples(automatic, noise_multiplier=True), TypeError, "WeighExamples: noise_multiplier"),
        (lambda: WeighExamples(automatic, loss_reduction="none"), ValueError, 'loss_reduction is "mean" or "sum"'),
        (lambda: WeighExamples(automatic, batch_dim=-1), ValueError, "batch_dim must be >= 0"),
    ],
)
def test_wrong_settings(make_it: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make_it()


def test_one_group_has_one_function() -> None:
    model, inputs = make("linear")
    rules = [gr.on("gradient:*.weight", WeighExamples(automatic)), gr.on("gradient:*.bias", WeighExamples(torch.exp))]
    with pytest.raises(gr.PolicyError, match="one action with one setting; give one of them another group"):
        gr.transform(model, rules)(*inputs)
