"""Python values that functions and callbacks read are followed; what cannot be followed is an error."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByValue, Scale, WeighLosses

from models.python_values import WAYS, Function

_INPUT = torch.tensor([[1.0, 2.0]])


def _plain_gradient(net: nn.Module) -> Tensor:
    plain = copy.deepcopy(net)
    plain(_INPUT).sum().backward()
    return plain.weight.grad  # type: ignore[return-value]


def _gradient(model: nn.Module) -> Tensor:
    model.zero_grad()
    model(_INPUT).sum().backward()
    return model.weight.grad.clone()


@pytest.mark.broad
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("how", ["gradient", "step", "regions"])
def test_a_change_is_followed(name: str, how: str) -> None:
    function, change = WAYS[name]()
    net = nn.Sequential(nn.Linear(2, 2)) if how == "regions" else nn.Linear(2, 2)
    own = net[0] if how == "regions" else net
    plain, prefix = _plain_gradient(own), "0." if how == "regions" else ""
    kind = "step" if how == "step" else "gradient"
    model = gr.transform(net, gr.on(f"{kind}:{prefix}weight", function), regions="0" if how == "regions" else ())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if how == "step":
        gr.guard(optimizer, model)
    for number in range(3):
        if number:
            change()
        optimizer.zero_grad()
        model(_INPUT).sum().backward()
        optimizer.step()
        torch.testing.assert_close(own.weight.grad, function(plain), rtol=1e-6, atol=0)


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["closed_over_number", "dict_entry", "closed_over_tensor_replaced"])
def test_a_change_is_followed_compiled(name: str) -> None:
    function, change = WAYS[name]()
    net = nn.Linear(2, 2)
    model = gr.transform(net, gr.on("gradient:weight", function)).compile()
    for _ in range(2):
        torch.testing.assert_close(_gradient(model), function(_plain_gradient(net)), rtol=1e-6, atol=0)
        change()


@pytest.mark.broad
@pytest.mark.parametrize("name", WAYS)
def test_a_change_under_a_backend_is_an_error(name: str) -> None:
    function, change = WAYS[name]()
    net = nn.Linear(2, 2)
    backend = gr.backends.backend.make_backend(gr.on("gradient:weight", function), None, gr.backends.engines.AotEager())
    compiled = torch.compile(net, backend=backend)
    compiled(_INPUT).sum().backward()
    change()
    with pytest.raises(gr.CallbackError, match=r"was something else when this backward was traced.*reset\(\)"):
        compiled(_INPUT).sum().backward()


def test_a_change_between_forward_and_backward_is_an_error() -> None:
    function, change = WAYS["dict_entry"]()
    model = gr.transform(nn.Linear(2, 2), gr.on("gradient:weight", function))
    loss = model(_INPUT).sum()
    change()
    with pytest.raises(gr.CallbackError, match=r"reads own\['factor'\], which is 0.25 now") as caught:
        loss.backward()
    assert caught.value.code == "changing-value"


def test_values_that_come_back_are_not_traced_again() -> None:
    is_on = {"value": True}
    model = gr.transform(nn.Linear(2, 2), gr.on("gradient:weight", lambda g: g * 2 if is_on["value"] else g))
    plain = _plain_gradient(model.original)
    for number in range(20):
        is_on["value"] = number % 2 == 0
        torch.testing.assert_close(_gradient(model), plain * (2 if is_on["value"] else 1))
    assert len(model.explain().graphs) == 2


@pytest.mark.broad
@pytest.mark.parametrize("how", ["gradient", "step"])
def test_a_ninth_value_is_an_error(how: str) -> None:
    steps = {"now": 0}
    model = gr.transform(nn.Linear(2, 2), gr.on(f"{how}:*", lambda g: g * 0 if steps["now"] % 10 == 9 else g))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def step() -> None:
        model(_INPUT).sum().backward()
        optimizer.step()

    for _ in range(8):
        step()
        steps["now"] += 1
    with pytest.raises(
        gr.CallbackError, match=r"steps\['now'\], which has had 8 values so far, and is 8 now"
    ) as caught:
        step()
    for way_out in ("gr.Schedule", "gr.State", "fill_"):
        assert way_out in caught.value.text


def test_a_callback_that_answers_otherwise_is_asked_again() -> None:
    scale = {"value": 0.5}
    model = gr.transform(nn.Linear(2, 2), lambda site: Scale(scale["value"]) if site.kind == "gradient" else None)
    plain = _plain_gradient(model.original)
    for value in (0.5, 0.25, 0.5):
        scale["value"] = value
        torch.testing.assert_close(_gradient(model), plain * value)


def test_a_callback_may_keep_what_it_is_asked() -> None:
    seen, graphs = [], []

    def policy(site: gr.Site) -> Any:
        seen.append(str(site))
        return ClipByValue(0.1) if site.kind in ("gradient", "step") else None

    model = gr.transform(nn.Linear(2, 2), policy)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.0), model)
    for _ in range(20):
        assert float(_gradient(model).max()) <= 0.1 + 1e-6
        optimizer.step()
        graphs.append(len(model.explain().graphs))
    assert graphs == [1] * 20


def _write_nonlocal() -> Function:
    count = 0

    def scale(g: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return g

    return scale


def _write_list() -> Function:
    norms: list[int] = []

    def note(g: Tensor) -> Tensor:
        norms.append(g.dim())
        return g

    return note


def _write_dict() -> Function:
    seen = {"n": 0}

    def note(g: Tensor) -> Tensor:
        seen["n"] += 1
        return g

    return note


def _take_next() -> Function:
    numbers: Iterator[int] = iter(range(10))
    return lambda g: g * next(numbers)


OUTSIDE: dict[str, tuple[Callable[[], Function], str]] = {
    "nonlocal": (_write_nonlocal, "keeps 'count'"),
    "list": (_write_list, "keeps 'norms'"),
    "dict": (_write_dict, "keeps 'seen"),
    "iterator": (_take_next, "keeps 'numbers'"),
    "cycle": (lambda: (lambda own: lambda g: g * next(own))(itertools.cycle([1.0, 2.0])), "keeps 'own'"),
    "random": (lambda: lambda g: g * random.random(), "random numbers"),
    "random object": (lambda: (lambda own: lambda g: g * own.random())(random.Random(0)), "keeps 'own'"),
    "numpy": (lambda: lambda g: g * np.random.rand(), "random numbers"),
    "numpy generator": (lambda: (lambda own: lambda g: g * own.random())(np.random.default_rng(0)), "keeps 'own'"),
    "time": (lambda: lambda g: g * time.time(), r"time.time\(\)"),
    "time by another name": (lambda: (lambda now: lambda g: g * now())(time.perf_counter), r"time.perf_counter\(\)"),
    "date": (lambda: lambda g: g * datetime.now().second, r"datetime.now\(\)"),
}


@pytest.mark.broad
@pytest.mark.parametrize("case", OUTSIDE)
@pytest.mark.parametrize("kind", ["gradient", "error", "step"])
def test_what_is_outside_of_the_graph_is_an_error(case: str, kind: str) -> None:
    make, what = OUTSIDE[case]
    net = nn.Sequential(nn.Linear(2, 2))
    model = gr.transform(net, gr.on(f"{kind}:*", make()))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def step() -> None:
        model(_INPUT).sum().backward()
        optimizer.step()

    with pytest.raises(gr.CallbackError, match=what) as caught:
        step()
    assert caught.value.code == "kept-value"
    assert f"{kind}:" in caught.value.text


class _Hidden(nn.Linear):
    """Keeps a hidden state of its own, as recurrent models do."""

    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = super().forward(x)
        return self.hidden


class _Trainer:
    def __init__(self) -> None:
        self.step, self.bound, self.data = 0, 0.1, [0.5]

    def __call__(self, model: nn.Module) -> Tensor:
        self.step += 1
        self.data = [0.5]  # made anew, and equal
        return _gradient(model)


class _Lazy:
    @functools.cached_property
    def factor(self) -> float:
        return 0.5


def _cached(masks: dict[Any, float]) -> Function:
    def run(g: Tensor) -> Tensor:
        if g.shape not in masks:
            masks[g.shape] = 0.5
        return g * masks[g.shape]

    return run


def test_the_state_of_a_model_is_no_value_of_a_function_that_asks_for_its_mode() -> None:
    net = _Hidden(2, 2)
    model = gr.transform(net, gr.on("gradient:weight", lambda g: g * 2 if net.training else g))
    for _ in range(10):
        _gradient(model)
    assert len(model.explain().graphs) == 1


@pytest.mark.broad
@pytest.mark.parametrize("case", ["attribute", "equal list", "cached property", "cache"])
def test_what_only_looks_like_a_change_is_none(case: str) -> None:
    trainer, lazy = _Trainer(), _Lazy()
    function: Function = {
        "attribute": lambda g: g.clamp(-trainer.bound, trainer.bound),
        "equal list": lambda g: g * trainer.data[0],
        "cached property": lambda g: g * lazy.factor,
        "cache": _cached({}),
    }[case]
    model = gr.transform(nn.Linear(2, 2), gr.on("gradient:weight", function))
    plain = _plain_gradient(model.original)
    for _ in range(10):
        torch.testing.assert_close(trainer(model), function(plain))
    assert len(model.explain().graphs) == 1


def test_an_equal_list_is_followed_from_then_on() -> None:
    own = {"factors": [0.5]}
    model = gr.transform(nn.Linear(2, 2), gr.on("gradient:weight", lambda g: g * own["factors"][0]))
    plain = _plain_gradient(model.original)
    _gradient(model)
    own["factors"] = [0.5]
    torch.testing.assert_close(_gradient(model), plain * 0.5)
    own["factors"][0] = 2.0
    torch.testing.assert_close(_gradient(model), plain * 2)


class _Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, g: Tensor) -> Tensor:
        return g * self.factor


def _multiply(factor: float, g: Tensor) -> Tensor:
    return g * factor


@pytest.mark.broad
@pytest.mark.parametrize("answer", ["partial", "object", "lambda"])
def test_callables_that_are_made_anew_are_equal(answer: str) -> None:
    epoch = {"now": 0}

    def policy(site: gr.Site) -> Any:
        if str(site) != "gradient:weight" or epoch["now"] < 0:
            return None
        made = {"partial": functools.partial(_multiply, 0.5), "object": _Scaled(0.5), "lambda": lambda g: g * 0.5}
        return made[answer]

    model = gr.transform(nn.Linear(2, 2), policy)
    for _ in range(12):
        _gradient(model)
        epoch["now"] += 1
    assert len(model.explain().graphs) == 1


def test_a_variable_without_a_value_yet_is_no_obstacle() -> None:
    steps: list[int] = []

    def policy(site: gr.Site) -> Any:
        late: int
        steps.append(len(steps))
        return (lambda g: g if g.dim() else late) if str(site) == "gradient:weight" else None
        late = 2  # never reached

    model = gr.transform(nn.Linear(2, 2), policy)
    for _ in range(3):
        steps.append(-1)
        _gradient(model)
    assert len(model.explain().graphs) == 1


@pytest.mark.broad
def test_another_thread_may_draw_random_numbers() -> None:
    stops = threading.Event()

    def draw() -> None:
        while not stops.is_set():
            random.random()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for policy in (gr.on("gradient:*", ClipByValue(1.0)), gr.on("gradient:*", lambda g: g * 2)):
            _gradient(gr.transform(nn.Linear(2, 2), policy))
    finally:
        stops.set()
        thread.join()


def test_values_that_come_back_are_kept_in_regions() -> None:
    is_on = {"value": True}
    net = nn.Sequential(nn.Linear(2, 2))
    model = gr.transform(net, gr.on("gradient:0.weight", lambda g: g * 2 if is_on["value"] else g), regions="0")
    plain = _plain_gradient(net[0])
    for number in range(12):
        is_on["value"] = number % 2 == 0
        model.zero_grad()
        model(_INPUT).sum().backward()
        torch.testing.assert_close(net[0].weight.grad, plain * (2 if is_on["value"] else 1))
    assert len(model.explain().graphs) == 2


@pytest.mark.broad
def test_functions_in_actions_are_followed() -> None:
    class Weights:
        second = 1.0

        def __call__(self, gramian: Tensor) -> Tensor:
            one = torch.ones_like(gramian[0, 0])
            return torch.stack([one, one * self.second])

    class Two(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            y = super().forward(x)
            return y.sum(), y.square().sum()

    weights = Weights()
    model = gr.transform(Two(2, 2), gr.on("gradient:*", WeighLosses(weights)))

    def gradient() -> Tensor:
        model.zero_grad()
        torch.stack(model(_INPUT)).sum().backward()
        return model.weight.grad.clone()

    first = gradient()
    weights.second = 3.0
    assert not torch.allclose(gradient(), first)


def test_print_is_said_to_print_once(capsys: pytest.CaptureFixture[str]) -> None:
    def show(g: Tensor) -> Tensor:
        print("shape", tuple(g.shape))
        return g

    model = gr.transform(nn.Linear(2, 2), gr.on("gradient:weight", show))
    with pytest.warns(gr.RewriteWarning, match=r"show prints while it is traced, once .*gr\.record"):
        _gradient(model)
    assert capsys.readouterr().out == "shape (2, 2)\n"
    _gradient(model)
    assert capsys.readouterr().out == ""
