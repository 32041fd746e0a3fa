"""A policy is never lost in silence: graph breaks, refusals, limits, and gradients that a clip does not see."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, Scale

from helpers import gradient

DOUBLE = gr.on("gradient:*", Scale(2.0))


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        torch._dynamo.graph_break()
        return self.two(h.tanh())


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

    @torch.compiler.disable
    def unseen(self, h: Tensor) -> Tensor:
        return self.two(h) * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.unseen(self.one(x))


def test_graph_break_is_an_error_that_names_the_line(x: Tensor) -> None:
    model = gr.transform(Breaking(), DOUBLE)

    with pytest.raises(
        gr.GraphBreakError, match=r"test_lost_policies.py:\d+ \"torch._dynamo.graph_break\(\)\".*fullgraph=False"
    ):
        model(x)
    with pytest.raises(gr.GraphBreakError, match="explain"):
        model.trace(x)


def test_graph_break_is_listed_and_warned_about_once(x: Tensor) -> None:
    plain = Breaking()
    wanted = gradient(plain, x)
    model = gr.transform(plain, DOUBLE, fullgraph=False)

    with pytest.warns(gr.RewriteWarning, match=r"test_lost_policies.py:\d+ \"torch._dynamo.graph_break\(\)\""):
        got = gradient(model, x)
    torch.testing.assert_close(got, 2 * wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient(model, x)
    assert any("graph_break()" in line for line in model.explain().skipped)
    assert {str(e.site) for g in model.explain().graphs for e in g.edits} == {
        "gradient:one.weight", "gradient:one.bias", "gradient:two.weight", "gradient:two.bias"
    }  # fmt: skip


def test_skipped_region_is_listed(x: Tensor) -> None:
    model = gr.transform(Skipping(), DOUBLE, fullgraph=False)

    with pytest.warns(gr.RewriteWarning):
        gradient(model, x)
    assert any("self.unseen" in line for line in model.explain().skipped)


def test_stance_is_refused(plain: nn.Module, x: Tensor) -> None:
    model, loose = gr.transform(plain, DOUBLE), gr.transform(plain, DOUBLE, fullgraph=False)
    gradient(model, x)

    with torch.compiler.set_stance("force_eager"):
        with pytest.raises(gr.NotRewrittenError, match="plain model"):
            model(x)
        with pytest.warns(gr.RewriteWarning, match="plain model"):
            loose(x)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))


def test_disabled_torch_compile_is_refused(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, DOUBLE)
    model.compile(disable=True)

    with pytest.raises(gr.NotRewrittenError, match="plain model"):
        model(x)


def test_disabled_caller_keeps_the_policy(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, DOUBLE)

    torch.testing.assert_close(gradient(torch.compiler.disable(model), x), 2 * gradient(plain, x))


def many_shapes(model: nn.Module) -> None:
    for rows in range(1, 60):
        model(torch.randn(rows, 4))


def test_recompile_limit_is_refused() -> None:
    model = gr.transform(nn.Linear(4, 3), DOUBLE, dynamic=False)

    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(gr.NotRewrittenError, match="recompile_limit"):
        many_shapes(model)


def test_recompile_limit_warns_without_fullgraph() -> None:
    model = gr.transform(nn.Linear(4, 3), DOUBLE, dynamic=False, fullgraph=False)

    with torch._dynamo.config.patch(recompile_limit=1), pytest.warns(gr.RewriteWarning, match=r"plain model|outside"):
        many_shapes(model)


def test_outer_compile_keeps_the_policy(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, DOUBLE)
    outer = torch.compile(lambda t: model(t) * 1.0, backend="aot_eager")
    model.zero_grad()
    outer(x).sum().backward()
    got = plain[0].weight.grad.clone()

    torch.testing.assert_close(got, 2 * gradient(plain, x))


GLOBAL = gr.on("gradient:*", ClipByGlobalNorm(0.1))


def test_accumulated_gradients_warn_once(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, GLOBAL)
    model(x).sum().backward()
    with pytest.warns(gr.RewriteWarning, match="each backward by itself"):
        model(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()


def test_zeroed_gradients_do_not_warn(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, GLOBAL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            model(x).sum().backward()


def test_two_runs_before_one_backward_warn(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, GLOBAL)
    with pytest.warns(gr.RewriteWarning, match="several times"):
        (model(x).sum() + model(2 * x).sum()).backward()


def test_part_of_the_gradients_warns(x: Tensor) -> None:
    model = gr.transform(Breaking(), GLOBAL, fullgraph=False)
    with pytest.warns(gr.RewriteWarning) as caught:
        gradient(model, x)
    assert sum("each part by itself" in str(w.message) for w in caught) == 1
    assert sum("graph_break()" in str(w.message) for w in caught) >= 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient(model, x)


def test_transforms_of_a_breaking_model_keep_their_policies(x: Tensor) -> None:
    plain = Breaking()
    wanted = gradient(plain, x)

    for n in range(1, 13):
        model = gr.transform(plain, gr.on("gradient:*", Scale(float(n))), fullgraph=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gr.RewriteWarning)
            got = gradient(model, x)
        torch.testing.assert_close(got, n * wanted)
