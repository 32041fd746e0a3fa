"""Relevance by rules at the backward of ops: equal to autograd functions by hand, and conserved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import gradrewrite as gr
from gradrewrite.examples.attribution import RULES, Digits, Recall, relevance, sequences

pytest.importorskip("transformers", reason="transformers is not installed")


class ByHand(TorchFunctionMode):
    """Computes the ops of the rules with values detached, so that torch's gradients are those of the rules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.gelu:
            (x,) = args
            return x * (func(x, **kwargs) / x).detach()
        if func is F.layer_norm:
            centred = args[0] - args[0].mean(-1, keepdim=True)
            scale = (args[0].var(-1, correction=0, keepdim=True) + kwargs["eps"]).rsqrt().detach()
            return centred * scale * kwargs["weight"] + kwargs["bias"]
        if func is torch.matmul:
            made = func(*args, **kwargs)
            return made / 2 + made.detach() / 2
        return func(*args, **kwargs)


def by_hand(model: nn.Module, given: Tensor, answers: Tensor, further: Tensor | float = 0) -> Tensor:
    given = given.detach().requires_grad_()
    with ByHand():
        model(given).gather(1, answers[:, None]).sum().backward()
    assert given.grad is not None
    return (given + further).detach() * given.grad


def gpt() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Recall(layers=1, width=16).double().eval()
    tokens, _, wanted = sequences(4, 0)
    return model, model.embedded(tokens).detach(), wanted, model.gpt.transformer.wpe.weight.detach()


def vit() -> tuple[nn.Module, Tensor, Tensor, float]:
    torch.manual_seed(0)
    return Digits(layers=1, width=16).double().eval(), torch.rand(4, 64, dtype=torch.float64), torch.arange(4), 0.0


@pytest.mark.parametrize("make", [gpt, vit])
def test_equals_functions_by_hand(make: Callable[[], Any]) -> None:
    model, given, answers, further = make()
    found = relevance(model, RULES, given, answers, further)
    wanted = by_hand(model, given, answers, further)

    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(found, relevance(model, [], given, answers, further))


@pytest.mark.inductor
def test_compiled() -> None:
    model, given, answers, further = gpt()
    x = given.clone().requires_grad_()
    gr.transform(model, RULES).compile()(x).gather(1, answers[:, None]).sum().backward()

    assert x.grad is not None
    torch.testing.assert_close((given + further) * x.grad, relevance(model, RULES, given, answers, further))


def test_relevance_is_conserved() -> None:
    """Biases are 0 at first: all that the score has comes from the tokens, but for what softmax absorbs."""
    model, given, answers, further = gpt()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    rewritten = gr.transform(model, RULES)
    x = given.clone().requires_grad_()
    score = rewritten(x).gather(1, answers[:, None]).sum()
    score.backward()
    assert x.grad is not None
    total = ((given + further) * x.grad).sum()
    absorbed = [value for name, value in rewritten.monitor.latest().items() if name.startswith("absorbed@")]

    assert len(absorbed) == 1
    torch.testing.assert_close(total + sum(absorbed), score.detach(), rtol=1e-6, atol=1e-6)
    assert abs(total - score) > 1e-4


def test_the_model_is_trained_as_it_is() -> None:
    found = []
    for is_explained in (False, True):
        model, given, answers, _ = gpt()
        if is_explained:
            relevance(model, RULES, given, answers)
            model.zero_grad()
        nn.functional.cross_entropy(model(given), answers).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])

    assert len(found[0]) > 10
    assert all(map(torch.equal, *found))
