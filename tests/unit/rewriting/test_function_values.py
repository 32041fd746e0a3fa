"""What functions read of Python, and the refusal of those that keep it from call to call: they are traced once."""

from __future__ import annotations

import functools
import timeit
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.rewriting.function_values import FunctionValues
from gradrewrite.testing import assert_matches_eager

Function = Callable[[Tensor], Tensor]
calls = 0


class Follows:
    """Clips at a mean of earlier norms, as an eager hook would; its first call keeps a tensor."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, g: Tensor) -> Tensor:
        norm = g.norm()
        mean = self.mean
        self.mean = norm if mean is None else 0.9 * mean + 0.1 * norm
        return g if mean is None else torch.where(norm > mean, g * (mean / norm), g)

    def method(self, g: Tensor) -> Tensor:
        return self(g)


class Counts:
    def __init__(self) -> None:
        self.step = 0

    def __call__(self, g: Tensor) -> Tensor:
        self.step += 1
        return g / self.step


def counts_in_a_global(g: Tensor) -> Tensor:
    global calls
    calls += 1
    return g / calls


def counts_in_a_closure() -> Function:
    number = 0

    def scale(g: Tensor) -> Tensor:
        nonlocal number
        number += 1
        return g / number

    return scale


def appends() -> Function:
    seen: list[Tensor] = []

    def note(g: Tensor) -> Tensor:
        seen.append(g)
        return g * 1

    return note


def writes_an_attribute(g: Tensor) -> Tensor:
    writes_an_attribute.last = g  # type: ignore[attr-defined]
    return g * 1


class Slots:
    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, g: Tensor) -> Tensor:
        self.step += 1
        return g / self.step


def counts_in_a_container(container: Any, place: Any) -> Function:
    def scale(g: Tensor) -> Tensor:
        container[place] += 1
        return g / container[place]

    return scale


def keeps_the_last(norms: deque[Tensor]) -> Function:
    def clip(g: Tensor) -> Tensor:
        norms.append(g.square().sum())
        return g / (1 + norms[0])

    return clip


def wrapped(fn: Function) -> Function:
    @functools.wraps(fn)
    def call(g: Tensor) -> Tensor:
        return fn(g)

    return call


def by_an_object(settings: SimpleNamespace) -> Function:
    def scale(g: Tensor) -> Tensor:
        settings.rate *= 0.5
        return g * settings.rate

    return scale


def by_an_argument(g: Tensor, *, seen: dict[str, int]) -> Tensor:
    seen["calls"] += 1
    return g / seen["calls"]


CASES: dict[str, tuple[Function, str]] = {
    "an attribute of an object": (Follows(), "mean"),
    "a method": (Follows().method, "mean"),
    "a partial": (functools.partial(Follows().method), "mean"),
    "an argument of a partial": (functools.partial(by_an_argument, seen={"calls": 0}), "seen"),
    "a number": (Counts(), "step"),
    "slots": (Slots(), "step"),
    "a global": (counts_in_a_global, "calls"),
    "a closure": (counts_in_a_closure(), "number"),
    "a list": (appends(), "seen"),
    "a number in a list": (counts_in_a_container([0], 0), "container"),
    "a number in a dict": (counts_in_a_container({"n": 0}, "n"), "container"),
    "a deque": (keeps_the_last(deque(maxlen=3)), "norms"),
    "an object behind a closure": (by_an_object(SimpleNamespace(rate=1.0)), "settings.rate"),
    "a wrapped function": (wrapped(counts_in_a_closure()), "fn.number"),
    "an attribute of a function": (writes_an_attribute, "last"),
}


@pytest.mark.broad
@pytest.mark.parametrize("case", CASES)
def test_a_kept_value_is_refused(case: str) -> None:
    fn, name = CASES[case]
    model = gr.transform(nn.Linear(2, 2), gr.on("gradient:weight", fn))
    with pytest.raises(gr.CallbackError, match=f"gradient:weight.* keeps {name!r} from one call to the next") as caught:
        model.trace(torch.ones(1, 2))
    assert caught.value.code == "kept-value"
    assert "gr.State" in caught.value.text


def test_the_oracle_says_so_too() -> None:
    with pytest.raises(gr.CallbackError, match="keeps 'step'"):
        assert_matches_eager(nn.Linear(2, 2), gr.on("gradient:*", Counts()), torch.ones(1, 2), compiled=False)


class Remembers:
    """Assigns a tensor that was there, and a state."""

    def __init__(self) -> None:
        self.bound, self.mean = torch.tensor(1.0), gr.State()
        self.chosen = self.bound

    def __call__(self, g: Tensor) -> Tensor:
        self.chosen = self.bound
        self.mean.set(self.mean + 1)
        return torch.where(g > self.chosen, g * 0.5, g)


@pytest.mark.broad
@pytest.mark.parametrize("wrap", [lambda fn: fn, lambda fn: fn.__call__, functools.partial, wrapped])
def test_what_is_as_it_was_stays_allowed(wrap: Callable[[Function], Function]) -> None:
    model = gr.transform(nn.Linear(2, 2), gr.on("gradient:*", wrap(Remembers())))
    for rows in (1, 3):
        assert {edit.site.name for edit in model.trace(torch.ones(rows, 2)).edits} == {"weight", "bias"}
    model(torch.ones(4, 2)).sum().backward()


def test_a_module_is_a_function() -> None:
    model = gr.transform(
        nn.Sequential(nn.Linear(2, 2), nn.Tanh()), gr.on("error:*", nn.Sequential(nn.Tanh(), nn.Hardtanh()))
    )
    model(torch.ones(4, 2)).sum().backward()


def test_modules_of_python_are_not_read() -> None:
    def make() -> Function:
        import math

        return lambda g: g * math.pi

    assert FunctionValues([make()]).first_change() is None
    assert len(FunctionValues([make()])) <= 3


def test_a_look_costs_little() -> None:
    bound, settings = 0.5, SimpleNamespace(factor=2.0, names={"a"})

    def clip(g: Tensor, power: float = 1.0) -> Tensor:
        return g.clamp(-bound, bound) * settings.factor**power

    values = FunctionValues([clip])
    assert len(values) >= 4
    seconds = min(timeit.repeat(values.first_change, number=1000, repeat=20)) / 1000
    assert seconds < 1.5e-6, f"{seconds * 1e6:.2f} microseconds; it is done twice in a step"
