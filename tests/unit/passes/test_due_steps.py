"""``Every``, ``After``: actions in some of the steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import (
    AdaptiveClip,
    After,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    Every,
    NanToNum,
    Observe,
    Scale,
    Zero,
)
from gradrewrite.testing import assert_matches_eager

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 1.0, 1.0]])
ACTIONS: dict[str, Any] = {
    "norm": ClipByNorm(0.1),
    "global norm": ClipByGlobalNorm(0.1),
    "value": ClipByValue(0.1),
    "two bounds": ClipByValue(0.1, min=-0.2),
    "adaptive": AdaptiveClip(0.01),
    "scale": Scale(-2.0),
    "zero": Zero(),
    "nan": NanToNum(),
    "function": lambda g: g / (1 + g.norm()),
    "function of two": lambda g, w: g + 0.1 * w,
    "schedule": ClipByNorm(gr.Schedule.linear(1.0, 0.1, steps=5)),
    "by site": ClipByNorm({"0.*": 0.1, "*": math.inf}),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def gradients(policy: Any, steps: int, *, compiled: bool = False) -> list[list[Tensor]]:
    model = gr.transform(net(), policy)
    if compiled:
        model.compile()
    found = []
    for _ in range(steps):
        model.zero_grad()
        model(X).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(model.explain().graphs) == 1
    return found


def check(action: Any, due: Any, is_due: list[bool], *, compiled: bool = False) -> None:
    site = "gradient:*"
    plain = gradients([], 1, compiled=compiled)[0]
    always = gradients(gr.on(site, action), len(is_due), compiled=compiled)
    for now, acted, found in zip(
        is_due, always, gradients(gr.on(site, due), len(is_due), compiled=compiled), strict=True
    ):
        for own, expected in zip(found, acted if now else plain, strict=True):
            assert torch.equal(own, expected)


@pytest.mark.broad
@pytest.mark.parametrize("name", list(ACTIONS))
def test_every_third_step(name: str) -> None:
    check(ACTIONS[name], Every(3, ACTIONS[name]), [True, False, False, True, False])


@pytest.mark.broad
@pytest.mark.parametrize("name", list(ACTIONS))
def test_from_a_step_on(name: str) -> None:
    check(ACTIONS[name], After(2, ACTIONS[name]), [False, False, True, True])


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["norm", "two bounds", "function", "by site"])
def test_compiled(name: str) -> None:
    check(ACTIONS[name], Every(2, ACTIONS[name]), [True, False, True], compiled=True)


@pytest.mark.broad
@pytest.mark.parametrize("site", ["gradient:*", "step:*", "error:2"])
def test_steps_are_those_of_a_guarded_optimizer(site: str) -> None:
    model = gr.transform(net(), gr.on(site, Every(2, ClipByNorm(1e-3))))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.0), model)
    for _ in range(4):
        for _ in range(2):
            model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    name = {"gradient:*": "gradient:0.weight", "step:*": "step:0.weight", "error:2": "error:2"}[site]
    acted = [factor < 1 for factor in model.monitor.history(f"factor@{name}")]
    each = 1 if site == "step:*" else 2
    assert acted == [now for now in (True, False, True, False) for _ in range(each)]
    bounds = model.monitor.history(f"bound@{name}")
    assert [math.isinf(bound) for bound in bounds] == [not now for now in acted]


@pytest.mark.broad
def test_steps_go_on_after_a_resume() -> None:
    def acted(state: Any, steps: int) -> tuple[list[bool], Any]:
        model = gr.transform(net(), gr.on("gradient:*", Every(3, ClipByNorm(1e-3))))
        if state is not None:
            gr.load_state_dict(model, state)
        for _ in range(steps):
            model(X).sum().backward()
            model.zero_grad()
        return [factor < 1 for factor in model.monitor.history("factor@gradient:0.weight")], gr.state_dict(model)

    first, state = acted(None, 2)
    second, _ = acted(state, 3)
    assert first + second == [True, False, False, True, False]


@pytest.mark.broad
def test_nan_in_steps_that_are_not_due_does_not_spread() -> None:
    def spoil(g: Tensor) -> Tensor:
        return g * math.nan

    check(spoil, After(2, spoil), [False, False])


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Every(0, Zero()), ValueError, r"Every: steps is a whole number >= 1, got 0"),
        (lambda: Every(2.5, Zero()), ValueError, r"got 2\.5"),
        (lambda: After(-1, Zero()), ValueError, r"After: steps is a whole number >= 0, got -1"),
        (lambda: Every(2, Observe("norm")), TypeError, r"Observe\('norm', every=n\)"),
        (lambda: Every(2, ClipByNorm), TypeError, "takes a clip"),
        (lambda: After(2, 1.0), TypeError, r"got 1\.0"),
    ],
)
def test_what_is_refused(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_a_tensor_bound_is_filled_by_the_user() -> None:
    model = gr.transform(net(), gr.on("gradient:*", Every(2, ClipByNorm(torch.tensor(1.0)))))
    with pytest.raises(
        gr.PolicyError, match=r"gradient:0\.weight: .*its bound may not be a tensor; fill that with inf by hand"
    ):
        model(X).sum().backward()


def test_text() -> None:
    assert repr(Every(10, ClipByNorm(1.0))) == "Every(10, ClipByNorm(1.0))"
    assert repr(gr.on("error:*", After(5, Zero()))) == "on('error:*', After(5, Zero()))"


# ---- bounds by site


@pytest.mark.broad
@pytest.mark.parametrize("make", [ClipByNorm, ClipByValue])
@pytest.mark.parametrize("way", ["mapping", "function"])
def test_bounds_by_site(make: Any, way: str) -> None:
    bounds = {"0.weight": 0.1, "2.*": 0.2, "*": 0.3}
    by_function = lambda site: bounds.get(site.name, 0.2 if site.module == "2" else 0.3)  # noqa: E731
    found = gradients(gr.on("gradient:*", make(bounds if way == "mapping" else by_function)), 1)[0]
    one_by_one = [gr.on(f"gradient:{n}", make(b)) for n, b in (("0.weight", 0.1), ("0.bias", 0.3), ("2.*", 0.2))]
    for own, expected in zip(found, gradients(one_by_one, 1)[0], strict=True):
        assert torch.equal(own, expected)


def test_live_bounds_and_schedules_by_site() -> None:
    live = torch.tensor(0.5)
    model = gr.transform(
        net(), gr.on("gradient:*.weight", ClipByNorm({"0.*": live, "2.*": gr.Schedule(lambda n: 1.0 + n)}))
    )
    for bound in (0.5, 0.25):
        live.fill_(bound)
        model(X).sum().backward()
    assert model.monitor.history("bound@gradient:0.weight") == [0.5, 0.25]
    assert model.monitor.history("bound@gradient:2.weight") == [1.0, 2.0]


@pytest.mark.broad
def test_values_that_a_function_of_the_site_reads_are_followed() -> None:
    bounds = {"now": 0.5}
    model = gr.transform(net(), gr.on("gradient:0.weight", ClipByNorm(lambda _: bounds["now"])))
    for bound in (0.5, 0.25, 0.5):
        bounds["now"] = bound
        model(X).sum().backward()
    assert model.monitor.history("bound@gradient:0.weight") == [0.5, 0.25, 0.5]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: ClipByNorm({"0.*": -1.0}), ValueError, r"max_norm\['0\.\*'\] must be > 0"),
        (lambda: ClipByNorm({"eror:0": 1.0}), ValueError, "'eror' is no kind of site"),
        (lambda: ClipByValue({"0.*": "1"}), TypeError, r"max\['0\.\*'\] is a number"),  # type: ignore[dict-item]
        (lambda: ClipByGlobalNorm({"0.*": 1.0}), TypeError, "ClipByGlobalNorm: max_norm is a number"),
    ],
)
def test_wrong_bounds_by_site(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_a_site_without_a_bound_is_named() -> None:
    model = gr.transform(net(), gr.on("gradient:*", ClipByNorm({"0.*": 1.0})))
    with pytest.raises(gr.PolicyError, match=r"gradient:2\.weight: ClipByNorm has no max_norm there.*'0\.\*'"):
        model(X)


def test_a_function_of_the_site_that_fails_is_named() -> None:
    model = gr.transform(net(), gr.on("gradient:*", ClipByNorm(lambda site: {}[site.name])))
    with pytest.raises(gr.PolicyError, match=r"gradient:0\.weight: ClipByNorm\(.*KeyError"):
        model(X)


@pytest.mark.broad
@pytest.mark.parametrize("make", [ClipByNorm, ClipByValue])
def test_bounds_by_site_hold_at_step_sites(make: Any) -> None:
    model = gr.transform(net(), gr.on("step:*", make({"0.*": 1e-3, "step:2.bias": 0.5, "*": 9.0})))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(X).sum().backward()
    optimizer.step()
    assert [float(p.grad.norm()) < 0.01 for p in model.parameters()] == [True, True, False, False]


def test_a_mapping_without_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_norm has no bound; give one by pattern, as \{'\*': 1\.0\}"):
        ClipByNorm({})


@pytest.mark.broad
@pytest.mark.parametrize("name", ["norm", "two bounds", "function", "schedule", "by site"])
@pytest.mark.parametrize("make", [lambda a: Every(2, a), lambda a: After(1, a)], ids=["every", "after"])
def test_eager_hooks_follow_the_steps(name: str, make: Any) -> None:
    assert_matches_eager(net(), gr.on("gradient:*", make(ACTIONS[name])), X, compiled=False, steps=3)
