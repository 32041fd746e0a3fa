"""Tensor subclasses other than DTensors: nothing acts there in silence, and what is plain keeps its sites."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByValue, Observe, Recompute, Scale, Store
from gradrewrite.rewriting import saved_tensors


def two(t: Tensor) -> TwoTensor:
    return TwoTensor(t.detach().clone(), 2 * t.detach())


class Weighted(nn.Module):
    """One weight has two tensors inside; what is computed behind it has, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.second.weight = nn.Parameter(two(self.second.weight))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.second(self.first(x).tanh()).square().sum()
        return h


class Jagged(nn.Module):
    """Rows of unequal length, made inside or given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_nested:
            x = torch.nested.nested_tensor_from_jagged(self.first(x), torch.tensor([0, 2, 5]))
        values: Tensor = self.second(x).sin().values()
        return values.square().sum()


def nested() -> Tensor:
    parts = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (2, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def inner(t: Any) -> list[Tensor]:
    return [t.a, t.b] if isinstance(t, TwoTensor) else [t]


def gradients(plain: nn.Module, run: nn.Module, x: Tensor) -> dict[str, list[Tensor]]:
    plain.zero_grad()
    run(x).backward()
    return {name: inner(p.grad) for name, p in plain.named_parameters() if p.grad is not None}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def test_without_actions_gradients_are_those_of_eager(x: Tensor) -> None:
    plain = Weighted()
    wanted = gradients(plain, plain, x)
    assert len(wanted["second.weight"]) == 2
    torch.testing.assert_close(gradients(plain, gr.transform(plain, []), x), wanted)


@pytest.mark.broad
@pytest.mark.parametrize("action", [ClipByGlobalNorm(1.0), Scale(0.5), CheckFinite(), Observe("norm")], ids=str)
def test_an_action_at_such_a_gradient_is_an_error_that_names_it(x: Tensor, action: Any) -> None:
    rewritten = gr.transform(Weighted(), gr.on("gradient:second.*", action))
    with pytest.raises(gr.UnsupportedGradientError, match=r"gradient:second\.weight: .* tensor subclass"):
        rewritten(x)


def test_actions_at_such_values_are_warned_of(x: Tensor) -> None:
    plain = Weighted()
    wanted = gradients(plain, plain, x)
    rewritten = gr.transform(plain, gr.on("error:second", ClipByValue(1e-6)))
    with pytest.warns(gr.RewriteWarning, match="error:second: the policy answers at values that are a TwoTensor"):
        found = gradients(plain, rewritten, x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.broad
@pytest.mark.parametrize("action", [Recompute(), Store("float32")], ids=str)
def test_saved_tensors_behind_such_weights_have_other_forms(
    x: Tensor, action: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_tensors, "SMALL", 17)
    plain = Weighted().double()
    wanted = gradients(plain, plain, x.double())
    rewritten = gr.transform(plain, gr.on("saved:*", action))
    torch.testing.assert_close(gradients(plain, rewritten, x.double()), wanted, rtol=1e-6, atol=1e-6)
    assert any(isinstance(edit.action, type(action)) for edit in rewritten.explain().graphs[0].edits)


@pytest.mark.broad
@pytest.mark.parametrize("given", [False, True], ids=["made inside", "given"])
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.inductor)], ids=["aot_eager", "inductor"]
)
def test_jagged_tensors(x: Tensor, given: bool, compiled: bool) -> None:
    plain = Jagged()
    batch = nested() if given else x
    wanted = gradients(plain, plain, batch)
    rewritten = gr.transform(plain, gr.on("gradient:*", Scale(0.5)))
    if compiled:
        rewritten.compile()
    found = gradients(plain, rewritten, batch)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found, {name: [0.5 * t for t in ts] for name, ts in wanted.items()})


def test_plain_values_in_front_of_jagged_ones_keep_their_sites(x: Tensor) -> None:
    plain = Jagged()
    rewritten = gr.transform(plain, [gr.on("error:first", Scale(0.0)), gr.on("activation:first", Observe("norm"))])
    found = gradients(plain, rewritten, x)
    assert not found["first.weight"][0].any()
    assert found["second.weight"][0].any()
    assert rewritten.monitor.latest()["norm@activation:first"] == pytest.approx(float(plain.first(x).detach().norm()))
    with pytest.warns(gr.RewriteWarning, match="error:second: the policy answers at values that are a NestedTensor"):
        gradients(plain, gr.transform(plain, gr.on("error:second", Scale(0.0))), x)
