"""A policy is never lost in silence: graph breaks, refusals, limits, and gradients that a clip does not see."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, Scale

from helpers import gradient, mostly_slow
from models.small import Broken, Lambda

DOUBLE = gr.on("gradient:*", Scale(2.0))


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
    model = gr.transform(Broken(), DOUBLE)

    with pytest.raises(
        gr.GraphBreakError, match=r"(?s)small.py:\d+ \"torch._dynamo.graph_break\(\)\".*fullgraph=False"
    ):
        model(x)
    with pytest.raises(gr.GraphBreakError, match="explain"):
        model.trace(x)


@pytest.mark.broad
def test_graph_break_is_listed_and_warned_about_once(x: Tensor) -> None:
    plain = Broken()
    wanted = gradient(plain, x)
    model = gr.transform(plain, DOUBLE, fullgraph=False)

    with pytest.warns(gr.RewriteWarning, match=r"small.py:\d+ \"torch._dynamo.graph_break\(\)\""):
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


@pytest.mark.pure
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


@pytest.mark.broad
def test_recompile_limit_is_refused() -> None:
    model = gr.transform(nn.Linear(4, 3), DOUBLE, dynamic=False)

    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(gr.NotRewrittenError, match="recompile_limit"):
        many_shapes(model)


def test_recompile_limit_warns_without_fullgraph() -> None:
    model = gr.transform(nn.Linear(4, 3), DOUBLE, dynamic=False, fullgraph=False)

    with torch._dynamo.config.patch(recompile_limit=1), pytest.warns(gr.RewriteWarning, match=r"plain model|outside"):
        many_shapes(model)


@pytest.mark.broad
def test_outer_compile_keeps_the_policy(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, DOUBLE)
    outer = torch.compile(lambda t: model(t) * 1.0, backend="aot_eager")
    model.zero_grad()
    outer(x).sum().backward()
    got = plain[0].weight.grad.clone()

    torch.testing.assert_close(got, 2 * gradient(plain, x))


GLOBAL = gr.on("gradient:*", ClipByGlobalNorm(0.1))


@pytest.mark.broad
def test_accumulated_gradients_warn_once(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, GLOBAL)
    model(x).sum().backward()
    with pytest.warns(gr.RewriteWarning, match="each backward by itself"):
        model(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
    assert norm_of_gradients(model) == pytest.approx(3 * 0.1)  # three times the bound: each was clipped by itself


def norm_of_gradients(model: nn.Module) -> float:
    return float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())


@pytest.mark.broad
def test_zeroed_gradients_do_not_warn(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, GLOBAL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            model(x).sum().backward()
            assert norm_of_gradients(model) == pytest.approx(0.1)  # the bound


@pytest.mark.broad
def test_two_runs_before_one_backward_warn(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, GLOBAL)
    with pytest.warns(gr.RewriteWarning, match="several times"):
        (model(x).sum() + model(2 * x).sum()).backward()


@pytest.mark.long
def test_part_of_the_gradients_warns(x: Tensor) -> None:
    model = gr.transform(Broken(), GLOBAL, fullgraph=False)
    with pytest.warns(gr.RewriteWarning) as caught:
        gradient(model, x)
    assert sum("each part by itself" in str(w.message) for w in caught) == 1
    assert sum("graph_break()" in str(w.message) for w in caught) >= 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient(model, x)


@pytest.mark.slow
def test_transforms_of_a_breaking_model_keep_their_policies(x: Tensor) -> None:
    plain = Broken()
    wanted = gradient(plain, x)

    for n in range(1, 13):
        model = gr.transform(plain, gr.on("gradient:*", Scale(float(n))), fullgraph=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gr.RewriteWarning)
            got = gradient(model, x)
        torch.testing.assert_close(got, n * wanted)


def quietly(run: Callable[[], Tensor]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return run()


@pytest.mark.long
@pytest.mark.parametrize("fullgraph", mostly_slow([True, False]))
@pytest.mark.parametrize("mode", mostly_slow([torch.no_grad, torch.inference_mode]))
def test_graph_break_without_backward_is_nothing(x: Tensor, mode: Callable[[], Any], fullgraph: bool) -> None:
    plain = Broken()
    model = gr.transform(plain, DOUBLE, fullgraph=fullgraph)

    for rows in (5, 3, 5):
        with mode():
            assert torch.equal(quietly(lambda rows=rows: model(x[:rows])), plain(x[:rows]))
    assert not model.explain().skipped
    if fullgraph:
        with pytest.raises(gr.GraphBreakError, match="graph_break"):
            model(x)
    else:
        with pytest.warns(gr.RewriteWarning, match="graph_break"):
            torch.testing.assert_close(gradient(model, x), 2 * gradient(plain, x))


@pytest.mark.broad
def test_graph_break_of_a_frozen_model_is_nothing(x: Tensor) -> None:
    plain = Broken().requires_grad_(False)
    model = gr.transform(plain, DOUBLE)

    assert torch.equal(quietly(lambda: model(x)), plain(x))
    with pytest.raises(gr.GraphBreakError, match="graph_break"):
        model(x.requires_grad_())


@pytest.mark.long
def test_update_bn_of_a_breaking_model(x: Tensor) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Broken())
    other = copy.deepcopy(plain)
    model = gr.transform(plain, DOUBLE)
    torch.optim.swa_utils.update_bn([x, x + 1], other)
    quietly(lambda: torch.optim.swa_utils.update_bn([x, x + 1], model))  # type: ignore[return-value]

    for got, wanted in zip(plain.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(got, wanted)


class PassingOn(Broken):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x, super().forward(x)


@pytest.mark.broad
def test_graph_break_of_a_model_that_returns_its_input(x: Tensor) -> None:
    model = gr.transform(PassingOn(), DOUBLE)
    given = x.requires_grad_() * 2

    with torch.no_grad():
        returned, _ = model(given)
    assert returned is given


class SwitchingOn(Broken):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x)


@pytest.mark.slow
def test_graph_break_where_the_model_switches_gradients_on(x: Tensor) -> None:
    model = gr.transform(SwitchingOn(), DOUBLE)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(gr.GraphBreakError, match="graph_break"):
                model(x)
    loose = gr.transform(SwitchingOn(), DOUBLE, fullgraph=False)
    with torch.no_grad(), pytest.warns(gr.RewriteWarning, match="graph_break"):
        loose(x)


class GradientsOn(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x)


@pytest.mark.broad
def test_recompile_limit_where_the_model_switches_gradients_on() -> None:
    model = gr.transform(GradientsOn(4, 3), DOUBLE, dynamic=False)

    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for rows in (1, 2):
            model(torch.randn(rows, 4))
        with pytest.raises(gr.GraphBreakError, match="recompile limit") as caught:
            model(torch.randn(3, 4))
    assert caught.value.code == "recompile-limit"


@pytest.mark.broad
def test_recompile_limit_without_backward_is_nothing() -> None:
    plain = nn.Linear(4, 3)
    model = gr.transform(plain, DOUBLE, dynamic=False)

    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for rows in range(1, 6):
            x = torch.randn(rows, 4)
            assert torch.equal(quietly(lambda x=x: model(x)), plain(x))


@pytest.mark.slow
def test_late_hook_is_honoured_without_backward(x: Tensor) -> None:
    plain = Broken()
    model = gr.transform(plain, DOUBLE)
    with torch.no_grad():
        model(x)
        plain.one.register_forward_hook(lambda _, __, out: out * 3)
        assert torch.equal(model(x), plain(x))


def test_callback_that_answers_none_everywhere_is_named() -> None:
    def by_wrong_kind(site: gr.Site) -> Any:
        return Scale(0.0) if site.kind == "grad" else None  # type: ignore[comparison-overlap]

    model = gr.transform(nn.Linear(2, 2), [gr.on("gradient:*", Scale(2.0)), by_wrong_kind])
    model(torch.ones(1, 2)).sum().backward()
    model.zero_grad()
    second = model(torch.ones(1, 2)).sum()
    with pytest.warns(gr.RewriteWarning, match=r"by_wrong_kind answered None at every site .*2 of kind 'gradient'"):
        second.backward()
    assert torch.equal(model.bias.grad, torch.full((2,), 2.0))


def test_callback_that_answers_none_in_regions_is_named() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = gr.transform(net, lambda site: None, regions="?")
    model(torch.ones(1, 2)).sum().backward()
    loss = model(torch.ones(1, 2)).sum()
    with pytest.warns(
        gr.RewriteWarning, match=r"lambda> \(test_lost.*\) answered None at every site so far .*2 of kind 'error'"
    ):
        loss.backward()


@pytest.mark.broad
@pytest.mark.parametrize("kind", ["gradient", "step"])
def test_callback_that_answers_somewhere_is_not_warned_of(kind: str) -> None:
    plain = nn.Linear(2, 2)
    model = gr.transform(plain, lambda site: Scale(2.0) if site.kind == kind and site.name == "bias" else None)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1.0), model)
    before = plain.bias.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(plain.bias.detach(), before - 6.0)


def test_callback_that_answers_none_is_named_beside_a_guard() -> None:
    silent = gr.transform(nn.Linear(2, 2), [gr.on("step:bias", Scale(2.0)), lambda site: None])
    optimizer = gr.guard(torch.optim.SGD(silent.parameters(), lr=1.0), silent)
    silent(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    loss = silent(torch.ones(1, 2)).sum()
    with pytest.warns(gr.RewriteWarning, match=r"lambda> \(test_lost.*\) answered None at every site"):
        loss.backward()


def test_data_parallel() -> None:
    with pytest.raises(TypeError, match=r"DataParallel, whose copies .* have no policy; use DistributedDataParallel"):
        gr.transform(nn.DataParallel(nn.Linear(2, 2)), [])
    around = nn.DataParallel(gr.transform(nn.Linear(2, 2), gr.on("gradient:*", Scale(2.0))))
    with pytest.warns(gr.RewriteWarning, match="on several GPUs"):
        around(torch.ones(1, 2)).sum().backward()
    assert torch.equal(around.module.bias.grad, torch.full((2,), 2.0))  # alone, it only calls the model


@pytest.mark.broad
@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("kind", ["gradient", "step"])
def test_guard_of_an_optimizer_that_never_steps(kind: str, other: Any) -> None:
    model = gr.transform(nn.Linear(2, 2), gr.on(f"{kind}:*", Scale(1.0)))
    forgotten = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    used = other(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(6):
            model(torch.ones(1, 2)).sum().backward()
            used.step()

    with pytest.warns(gr.RewriteWarning, match=r"this SGD has made no step.*another optimizer") as caught:
        train()
    assert len(caught) == 1
    assert forgotten.param_groups


def test_guard_of_an_optimizer_that_steps_late_is_not_warned_of() -> None:

    # Its forward changes a parameter in place.
    net = Lambda(lambda net, x: net.fc(net.embed(x)), embed=nn.Embedding(4, 2, max_norm=1.0), fc=nn.Linear(2, 1))
    model = gr.transform(net, gr.on("gradient:fc.*", Scale(2.0)))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(12):
        model(torch.arange(4)).sum().backward()
        if step % 6 == 5:
            optimizer.step()
    assert model.fc.bias.grad.item() == 12 * 2 * 4  # steps, the factor, examples
