"""States that are carried from call to call, or iteration to iteration, against hooks of eager models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.errors import RewriteWarning
from gradrewrite.passes import CheckFinite
from gradrewrite.testing import assert_matches_eager

WIDTH, FEATURES, LENGTH, BATCH = 7, 5, 6, 3
COMPILED = [False, pytest.param(True, marks=pytest.mark.inductor)]


class Unrolled(nn.Module):
    """A Python loop over a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        h, loss = x.new_zeros(x.shape[1], WIDTH), x.new_zeros(())
        for row in x.unbind(0):
            h = self.cell(row, h)
            loss = loss + h.square().sum()
        return loss


class Layer(nn.Module):
    """A layer of torch, once or twice."""

    def __init__(self, rec: nn.Module, calls: int = 1) -> None:
        super().__init__()
        self.rec, self.calls = rec.double(), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.rec(x)[0]
        return x.square().sum()


def layer(**settings: Any) -> Layer:
    return Layer(nn.LSTM(FEATURES, WIDTH, **settings))


def given(length: int = LENGTH, width: int = FEATURES) -> Tensor:
    return torch.randn(length, BATCH, width, dtype=torch.float64)


def following(shape: tuple[int, ...] = ()) -> Callable[[Tensor], Tensor]:
    """Divide by a mean of the largest values of all calls so far."""
    mean = gr.State(shape, 1.0, torch.float64, name="mean", over="iterations")

    def divide(error: Tensor) -> Tensor:
        mean.set(0.7 * mean.value + 0.3 * error.abs().amax(dim=0 if shape else None))
        return error / (1 + mean.value)

    return divide


def copied() -> Callable[[Tensor], Tensor]:
    """Add the error of the call that ran before it in the backward."""
    last = gr.State((BATCH, WIDTH), 0.0, torch.float64, name="last", over="iterations")

    def add(error: Tensor) -> Tensor:
        result = error + 0.1 * last
        last.set(error)
        return result

    return add


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("made", [following, lambda: following((WIDTH,)), copied], ids=["mean", "rows", "last"])
@pytest.mark.parametrize("name", ["cell", "gru", "lstm"])
def test_equal_to_hooks(name: str, made: Callable[[], Callable[[Tensor], Tensor]], compiled: bool) -> None:
    if name == "cell":
        model, pattern, key = Unrolled(), "error:cell", "error:cell"
    elif name == "gru":
        model, pattern, key = Layer(nn.GRU(FEATURES, WIDTH)), "error:rec.l0/h", "error:rec.l0/h"
    else:
        model, pattern, key = layer(num_layers=2, bidirectional=True), "error:*/h", "error:rec.l1_reverse/h"
    torch.manual_seed(0)
    function = made()
    found = assert_matches_eager(model, gr.on(pattern, function), given(), compiled=compiled, steps=3)
    assert len(found.changed) == (4 if name == "lstm" else 1) * LENGTH

    rewritten = gr.transform(model, gr.on(pattern, made()))
    rewritten(given()).backward()
    states = gr.state_dict(rewritten)["states"]
    assert {site.rpartition("/")[0] for site in states} == (
        {key} if name != "lstm" else {f"error:rec.l{n}{way}/h" for n in (0, 1) for way in ("", "_reverse")}
    )


def test_the_order_is_that_of_the_backward() -> None:
    """By hand: the last time step sets first, the first one last, and the next backward goes on."""
    model, x = Layer(nn.RNN(FEATURES, WIDTH)), given()
    count = gr.State((), 0.0, torch.float64, name="count", over="iterations")

    def scaled(error: Tensor) -> Tensor:
        count.set(count + 1)
        gr.record("count", count.value)
        return error * count.value

    rewritten = gr.transform(model, gr.on("error:rec.l0/h", scaled))
    for first in (0, LENGTH, 2 * LENGTH):
        rewritten(x).backward()
        found = rewritten.monitor.latest()
        numbers = [found[f"count@error:rec.l0/h{f'#{t}' if t else ''}"] for t in range(LENGTH)]
        assert numbers == [first + LENGTH - t for t in range(LENGTH)]
    assert float(gr.state_dict(rewritten)["states"]["error:rec.l0/h/count"]) == 3 * LENGTH


@pytest.mark.parametrize("compiled", COMPILED)
def test_with_other_features(compiled: bool) -> None:
    """Some iterations, two actions, a layer that is called twice, checks, a state for each iteration beside it."""
    mine = gr.State((), 0.0, torch.float64, name="own")

    def own(error: Tensor) -> Tensor:
        mine.set(mine + error.abs().sum())
        return error + 1e-3 * mine

    first, second = following(), following()

    def by_parity(site: gr.Site) -> Any:
        if not site.matches("error:rec.l0/h"):
            return None
        return [own, first if (site.iteration or 0) % 2 else second]

    for policy in (
        by_parity,
        lambda site: (
            following() if site.matches("error:rec.l0/h") else None
        ),  # each a state of its own: mean, mean.2 ...
        gr.on("error:rec.l0/h#2", following()),
        gr.on("error:*/*", [following(), CheckFinite("skip")]),
        [gr.on("error:rec.l0/h", following()), gr.on("error:rec.l0/h", following())],
    ):
        assert_matches_eager(layer(), policy, given(), compiled=compiled, steps=2)
    twice = Layer(nn.LSTM(WIDTH, WIDTH), calls=2)
    assert_matches_eager(twice, gr.on("error:rec.l0/h", following()), given(width=WIDTH), compiled=compiled, steps=2)


def test_two_actions_with_one_state() -> None:
    """What the first one sets the second one reads, at the next iteration the first one again."""
    function = following()
    found = assert_matches_eager(
        layer(),
        [gr.on("error:rec.l0/h", function), gr.on("error:rec.l0/h", function)],
        given(),
        compiled=False,
        steps=2,
    )
    assert len(found.changed) == LENGTH


def test_a_state_that_another_call_sets() -> None:
    """It may be set in one iteration alone and read in all."""
    bound = gr.State((), 10.0, torch.float64, name="bound", over="iterations")

    def first(error: Tensor) -> Tensor:
        bound.set(error.abs().mean())
        return error

    def others(error: Tensor) -> Tensor:
        return error.clamp(-bound.value, bound.value)

    def policy(site: gr.Site) -> Any:
        if not site.matches("error:rec.l0/h"):
            return None
        return first if site.iteration == LENGTH - 1 else others

    assert_matches_eager(layer(), policy, given(), compiled=False, steps=2)


def test_lengths_that_change() -> None:
    model = layer()
    rewritten = gr.transform(model, gr.on("error:rec.l0/h", following()))
    unrolled = gr.transform(model, gr.on("error:rec.l0/h", following()), dynamic=False)
    for length in (4, 9, 2, 1):
        x = given(length)
        for net in (rewritten, unrolled):
            net(x).backward()
        torch.testing.assert_close(gr.state_dict(rewritten)["states"], gr.state_dict(unrolled)["states"])
    assert len(rewritten.explain().graphs) == 2  # one for the length 1

    other = gr.transform(copy.deepcopy(model), gr.on("error:rec.l0/h", following()))
    gr.load_state_dict(other, gr.state_dict(rewritten))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RewriteWarning)
        for net in (rewritten, other):
            net(x).backward()
    assert gr.state_dict(rewritten)["states"] == gr.state_dict(other)["states"]


def test_in_branches_regions_and_checkpoints() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(FEATURES, FEATURES).double()

        def forward(self, x: Tensor) -> Tensor:
            return (self.fc(self.fc(x)) * self.fc(2 * x)).sum()

    assert_matches_eager(Branches(), gr.on("error:fc", following()), given(), compiled=False, steps=2)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Unrolled()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            return found

    assert_matches_eager(Checkpointed(), gr.on("error:inner.cell", following()), given(), compiled=False, steps=2)


def test_wrong_settings() -> None:
    with pytest.raises(ValueError, match=r"gr\.State: over is 'iterations' or None, got 'steps'"):
        gr.State(over="steps")
    assert repr(gr.State(over="iterations")) == "State((), 0.0, torch.float32, over='iterations')"
