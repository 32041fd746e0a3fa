"""Refusals of models without per-example gradients name the op that mixes examples and its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByValue, ClipPerExample, Keep

from models.small import Broken

X, Y = torch.randn(4, 3), torch.randint(0, 5, (4,))


class Model(nn.Module):
    """One layer, and a loss of its output, the targets and the layer."""

    def __init__(self, loss: Callable[[Tensor, Tensor, nn.Linear], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(3, 5), loss
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y, self.layer)


class Normalized(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.norm(self.layer(x)), y)


def softmax_over_the_batch(out: Tensor, y: Tensor, _: nn.Linear) -> Tensor:
    return out.softmax(0).square().sum()


def penalty(out: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return F.cross_entropy(out, y) + 0.1 * layer.weight.square().sum()


def similarities(out: Tensor, y: Tensor, _: nn.Linear) -> Tensor:
    return F.cross_entropy(out @ out.t(), y.clamp(max=3))


def centred(out: Tensor, y: Tensor, _: nn.Linear) -> Tensor:
    return (out * (y - y.sum() / 4).unsqueeze(1)).sin().sum()


def unknown_op(out: Tensor, y: Tensor, _: nn.Linear) -> Tensor:
    return torch.linalg.inv(torch.diag_embed(out.exp())).sum()


def plain(out: Tensor, y: Tensor, _: nn.Linear) -> Tensor:
    return F.cross_entropy(out, y)


def of_weights_alone(out: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return layer.weight.square().sum()


def loss_with_a_factor(out: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return layer.bias[0] * F.mse_loss(out, torch.zeros_like(out)) + F.cross_entropy(out, y)


HERE = r"test_per_example_refusals\.py:\d+ "
REFUSED = {
    "BatchNorm": (lambda: Normalized(plain), "in training is computed over the batch"),
    "softmax": (
        lambda: Model(softmax_over_the_batch),
        "_softmax is computed along the batch .*" + HERE + '"return out',
    ),
    "penalty": (lambda: Model(penalty), "add is computed of a sum over the batch"),
    "similarities": (lambda: Model(similarities), "mm multiplies different examples .*" + HERE + '"return F'),
    "unknown op": (lambda: Model(unknown_op), "has no rule, so nobody knows .*" + HERE + '"return torch.linalg'),
    "centred by integers": (lambda: Model(centred), "adds up integers over the batch, which may be data"),
    "no example": (lambda: Model(of_weights_alone), "does not depend on the examples"),
}


@pytest.mark.long
@pytest.mark.parametrize("action", [ClipPerExample(1.0), Keep("example_norms"), Keep("second_moment")], ids=repr)
@pytest.mark.parametrize("name", REFUSED)
def test_mixing_is_refused(name: str, action: Any) -> None:
    make, text = REFUSED[name]
    model = gr.transform(make(), gr.on("gradient:layer.weight", action))
    with pytest.raises(gr.PolicyError, match=rf"gradient:layer\.weight: {type(action).__name__}\(.*{text}"):
        model(X, Y)


@pytest.mark.broad
@pytest.mark.parametrize("action", [ClipPerExample(1.0), Keep("example_norms"), Keep("second_moment")], ids=repr)
def test_a_parameter_that_multiplies_a_loss_is_refused(action: Any) -> None:
    model = gr.transform(Model(loss_with_a_factor), gr.on("gradient:layer.bias", action))
    text = r"gradient:layer\.bias: .* its terms go through mse_loss, whose value is known as a sum only"
    with pytest.raises(gr.PolicyError, match=text):
        model(X, Y)


def test_evaluation_of_batch_norm_mixes_nothing() -> None:
    model = gr.transform(Normalized(plain).eval(), gr.on("gradient:layer.weight", Keep("example_norms")))
    model(X, Y).backward()
    (norms,) = model.monitor.kept("example_norms").values()
    assert norms.shape == (4,)


@pytest.mark.parametrize(
    ("inputs", "options", "text"),
    [
        ((X, Y[:3]), {}, "dimension 0 of every input is the batch, and it is 4 in 'x' and 3 in 'y'.*buffer"),
        ((X, Y), {"batch_dim": 1}, "input 'y' has no dimension 1"),
    ],
)
def test_inputs_have_one_batch(inputs: tuple[Tensor, Tensor], options: dict[str, int], text: str) -> None:
    def first(out: Tensor, y: Tensor, _: nn.Linear) -> Tensor:
        return out.square().sum() + 0 * y.sum()

    model = gr.transform(Model(first), gr.on("gradient:*", ClipPerExample(1.0, **options)))
    with pytest.raises(gr.PolicyError, match=text):
        model(*inputs)


def test_no_examples_have_no_mean() -> None:
    model = gr.transform(Model(plain), gr.on("gradient:layer.*", ClipPerExample(1.0)))
    text = r"^gradient:layer.weight: ClipPerExample\(1.0\): .*\(dimension 0 of input 'x' is 0\).*loss_reduction=\"sum\""
    with pytest.raises(gr.PolicyError, match=text):
        model(X[:0], Y[:0])


def test_a_part_of_the_model_is_refused() -> None:
    model = gr.transform(Broken(3, 3, 3), gr.on("gradient:*", ClipPerExample(1.0)), fullgraph=False)
    with pytest.raises(gr.PolicyError, match=r"needs the whole model in one graph, .* \(a graph break, or regions\)"):
        model(X)


def test_what_changed_the_gradient_before_is_named() -> None:
    actions = [ClipByValue(0.1), ClipPerExample(1.0)]
    model = gr.transform(Model(plain), gr.on("gradient:layer.weight", actions))
    with pytest.raises(gr.PolicyError, match="is computed of a sum over the batch"):
        model(X, Y)


def test_one_group_has_one_bound() -> None:
    policy = [gr.on("gradient:*.weight", ClipPerExample(1.0)), gr.on("gradient:*.bias", ClipPerExample(2.0))]
    with pytest.raises(gr.PolicyError, match="are in one group 'default'"):
        gr.transform(Model(plain), policy)(X, Y)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ClipPerExample(0.0), ValueError, "max_norm must be > 0"),
        (lambda: ClipPerExample(1.0, noise_multiplier=-1.0), ValueError, "noise_multiplier must be >= 0"),
        (lambda: ClipPerExample(1.0, noise_multiplier=torch.ones(())), TypeError, "noise_multiplier is a number"),
        (lambda: ClipPerExample(1.0, noise_multiplier="1"), TypeError, "ClipPerExample: noise_multiplier"),
        (lambda: ClipPerExample(1.0, loss_reduction="none"), ValueError, 'loss_reduction is "mean" or "sum"'),
        (lambda: Keep("example_norms", batch_dim=-1), ValueError, "batch_dim must be >= 0, got -1"),
        (lambda: Keep("example_norms", batch_dim=0.5), TypeError, "batch_dim is an integer, got 0.5"),
    ],
)
def test_settings_are_checked(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
