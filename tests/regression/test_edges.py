"""Sparse gradients, transforms, conditions and taps: right models are no faults, and wrong calls are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByNorm, Observe, Scale
from gradrewrite.testing import assert_matches_eager

from models.small import Lambda


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.fc = nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.fc(self.table(words)).square().sum()
        return y


class Alone(nn.Module):
    """Its only gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=True)
        nn.init.ones_(self.table.weight)

    def forward(self, words: Tensor) -> Tensor:
        h = self.table(words)
        return (h - 1).sqrt().sum()


WORDS = torch.tensor([1, 2, 3])
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
MAPPED = Lambda(lambda m, x: torch.vmap(lambda row: m.fc(row).sin())(x).cos().sum(), fc=nn.Linear(4, 4))
CHOICE = Lambda(
    lambda m, x: torch.cond(m.fc(x).sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (m.fc(x),)).tanh().sum(),
    fc=nn.Linear(4, 4),
)


@pytest.mark.broad
@pytest.mark.parametrize(
    ("model", "given", "pattern"),
    [
        (Words(), WORDS, "error:*"),
        (MAPPED, X, "error:*/*"),
        (MAPPED, X, "gradient:*"),
        (CHOICE, X, "error:*/*"),
        (CHOICE, X, "gradient:*"),
    ],
    ids=["sparse", "vmap, errors", "vmap, gradients", "cond, errors", "cond, gradients"],
)
def test_right_models_match_eager(model: nn.Module, given: Tensor, pattern: str) -> None:
    found = assert_matches_eager(model, gr.on(pattern, ClipByNorm(1e-3)), given, compiled=False)
    assert found.changed


@pytest.mark.broad
def test_sparse_gradients_are_left_out_where_nobody_named_them() -> None:
    plain = Words()
    assert gr.locate(plain, WORDS) is None
    assert gr.compare(plain, plain, WORDS) is None
    other = Words()
    with torch.no_grad():
        other.table.weight[2] += 1
    difference = gr.compare(plain, other, WORDS)
    assert difference is not None
    assert difference.op == "table/embedding"
    assert "learn" in gr.diagnose(Words(), [(WORDS,)] * 4, optimizer=lambda p: torch.optim.SGD(p, lr=0.01)).outcome


def test_a_fault_is_located_in_a_model_whose_only_gradient_is_sparse() -> None:
    err = gr.locate(Alone(), WORDS)
    assert err is not None
    assert err.op == "/sqrt"


def test_an_action_at_a_sparse_gradient_names_the_parameter() -> None:
    with pytest.raises(gr.UnsupportedGradientError, match=r"gradient:table\.weight: the gradient is torch\.sparse_coo"):
        gr.transform(Words(), gr.on("gradient:*", Scale(0.5)))(WORDS)


@pytest.mark.parametrize("call", [lambda h: gr.tap(x=h, name="h"), lambda h: gr.tap(name="h", x=h)])
def test_taps_by_keywords(call: Callable[[Tensor], Tensor]) -> None:
    model = gr.transform(Lambda(lambda m, x: call(m.fc(x)).sum(), fc=nn.Linear(4, 4)), gr.on("error:h", Scale(0.0)))
    model(X).backward()
    assert not model.fc.weight.grad.any()


@pytest.mark.parametrize(("given", "name"), [(lambda h: (h, h), "tuple"), (lambda _: 2.0, "float")])
def test_what_is_no_tensor_is_not_tapped(given: Callable[[Tensor], Any], name: str) -> None:
    with pytest.raises(TypeError, match=f"x is one tensor, got {name}"):
        gr.tap(given(X), "h")

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.fc(x)
        tapped = gr.tap(given(h), "h")
        return (tapped[0] if isinstance(tapped, tuple) else h * tapped).sum()

    with pytest.raises(gr.TraceError, match=f"x is one tensor, got {name}"):
        gr.transform(Lambda(forward, fc=nn.Linear(4, 4)), [])(X)


@pytest.mark.broad
def test_names_with_signs_of_patterns() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("[0]", "a*", "b?", "c#1")})

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts.values():
                x = part(x).sin()
            return x.sum()

    for name in ("[0]", "a*", "b?", "c#1"):
        site = f"parts.{name}"
        rewritten = gr.transform(Named(), gr.on("error:" + gr.escape(site), ClipByNorm(1.0)))
        rewritten(X).backward()
        assert [edit.site.name for edit in rewritten.explain().graphs[0].edits] == [site]
    with pytest.raises(gr.NoSuchSiteError, match=r"write gr.on\('error:' \+ gr.escape\('parts.\[0\]'\), ...\)"):
        gr.transform(Named(), gr.on("error:parts.[0]", ClipByNorm(1.0)))(X).backward()
    with pytest.raises(gr.NoSuchSiteError) as found:  # a site of another kind has this name
        gr.transform(nn.Linear(4, 4), gr.on("error:weight", ClipByNorm(1.0)))(X).sum().backward()
    assert "escape" not in str(found.value)


def test_two_calls_of_a_normalization_inside_a_checkpoint() -> None:
    """Plain aot_eager refuses the backward: the second call has written the statistics."""

    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = checkpoint(lambda x: self.norm(self.fc(x)).sin(), x, use_reentrant=False)
            return h.square().sum()

    def gradients(plain: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        (run(X) + run(2 * X)).backward()
        return [p.grad for p in plain.parameters()]

    plain, copied = Normalized(), Normalized()
    torch.testing.assert_close(gradients(copied, gr.transform(copied, [])), gradients(plain, plain))


class Written(nn.Module):
    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both = both

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        if self.both:
            y.add_(1)
        return (x * y).sum()


def halves() -> tuple[Tensor, Tensor, Tensor]:
    leaf = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    made = leaf * 1
    return leaf, made[0:2], made[1:3]


def test_inputs_that_share_memory_and_are_written() -> None:
    """A model without parameters; the gradient is that of the memory which the inputs share."""
    found = []
    for run in (Written(both=False), gr.transform(Written(both=False), [])):
        leaf, x, y = halves()
        run(x, y).backward()
        found.append(leaf.grad)
    torch.testing.assert_close(found[1], found[0])
    _, x, y = halves()
    with pytest.raises(gr.TraceError, match=r"input 'x' shares its memory with input 'y'.*y\.clone\(\)"):
        gr.transform(Written(both=True), [])(x, y)


def jacobian(policy: gr.Policy) -> list[Tensor]:
    torch.manual_seed(0)
    plain = nn.Linear(4, 2)
    out = gr.transform(plain, policy)(X)
    vectors = torch.eye(2)[:, None].expand(2, 3, 2).contiguous()
    return list(torch.autograd.grad(out, list(plain.parameters()), vectors, is_grads_batched=True))


@pytest.mark.broad
def test_batched_backwards() -> None:
    plain, scaled = jacobian([]), jacobian(gr.on("gradient:*", Scale(0.5)))
    torch.testing.assert_close(scaled, [0.5 * g for g in plain])
    for action in (Observe("norm"), CheckFinite(), ClipByNorm(1.0)):
        with pytest.raises(gr.PolicyError, match="is_grads_batched=True"):
            jacobian(gr.on("gradient:*", action))
