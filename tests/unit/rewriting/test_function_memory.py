"""A tensor function that keeps Python values between calls is refused: it is traced once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
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


CASES: dict[str, tuple[Function, str]] = {
    "an attribute of an object": (Follows(), "mean"),
    "a method": (Follows().method, "mean"),
    "a partial": (functools.partial(Follows().method), "mean"),
    "a number": (Counts(), "step"),
    "a global": (counts_in_a_global, "calls"),
    "a closure": (counts_in_a_closure(), "number"),
    "a list": (appends(), "seen"),
    "an attribute of a function": (writes_an_attribute, "last"),
}


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


def test_what_is_no_memory_stays_allowed() -> None:
    class Lazy:
        limit: float | None = None
        table: dict[str, Any]

        def __init__(self) -> None:
            self.limit, self.table, self.bound, self.mean = None, {}, torch.tensor(1.0), gr.State()

        def __call__(self, g: Tensor) -> Tensor:
            self.limit = 2.0 if self.limit is None else self.limit
            self.table["shape"] = tuple(g.shape)
            self.mean.set(self.mean + 1)
            return torch.where(g > self.bound, g / self.limit, g)

    model = gr.transform(nn.Linear(2, 2), gr.on("gradient:*", Lazy()))
    assert {edit.site.name for edit in model.trace(torch.ones(1, 2)).edits} == {"weight", "bias"}
