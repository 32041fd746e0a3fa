"""Errors: the model's own stay as they are; ours appear where torch has none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import Observe, Scale

from helpers import gradient

DOUBLE = gr.on("gradient:*", Scale(2.0))


class Strict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return (self.fc(x) * scale).sum()


def transformed(plain: nn.Module) -> Callable[..., Any]:
    return gr.transform(plain, DOUBLE)


def traced(plain: nn.Module) -> Callable[..., Any]:
    return gr.transform(plain, DOUBLE).trace


def located(plain: nn.Module) -> Callable[..., Any]:
    return lambda *args, **kwargs: gr.locate(plain, *args, **kwargs)


def loosely(plain: nn.Module) -> Callable[..., Any]:
    return gr.transform(plain, DOUBLE, fullgraph=False)


@pytest.mark.long
@pytest.mark.parametrize("way", [transformed, traced, located, loosely])
@pytest.mark.parametrize(
    ("number", "named"),
    [(0, {}), (2, {}), (1, {"nonsense": 1}), (1, {"x": 1})],
    ids=["few", "many", "unknown", "twice"],
)
def test_wrong_arguments(
    x: Tensor, way: Callable[[nn.Module], Callable[..., Any]], number: int, named: dict[str, Any]
) -> None:
    plain = Strict()
    with pytest.raises(TypeError) as wanted:
        plain(*[x] * number, **named)
    with pytest.raises(TypeError) as got:
        way(plain)(*[x] * number, **named)

    assert str(got.value) == str(wanted.value)
    with torch.no_grad(), pytest.raises(TypeError, match="nonsense"):
        gr.transform(plain, DOUBLE)(x, nonsense=1)


def test_arguments_that_a_hook_changes(x: Tensor) -> None:
    plain = Strict()
    plain.register_forward_pre_hook(lambda _, args: (args[0],))
    model = gr.transform(plain, DOUBLE)

    assert torch.equal(model(x, "dropped by the hook"), plain(x))


class Sharing(nn.Module):
    """A buffer in the memory of a parameter."""

    def __init__(self, view: Callable[[Tensor], Tensor], *, writes: bool = True) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("top", view(self.w))
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.top.add_(1.0)
        return (self.w * x).sum() + self.top.sum()


@pytest.mark.parametrize("view", [lambda w: w.detach()[:2], lambda w: w.data, lambda w: w.data[2:]])
def test_buffer_in_the_memory_of_a_parameter(x: Tensor, view: Callable[[Tensor], Tensor]) -> None:
    plain = Sharing(view)
    model = gr.transform(plain, DOUBLE)

    for run in (model, model.trace):
        with pytest.raises(gr.TraceError, match=r"buffer 'top' .* parameter 'w'.*w\.detach\(\)\.clone\(\)"):
            run(x)
    assert torch.equal(plain.w, torch.ones(4))
    assert plain.w.grad is None


def test_buffer_in_the_memory_of_a_parameter_may_be_read(x: Tensor) -> None:
    plain = Sharing(lambda w: w.detach()[:2], writes=False)

    torch.testing.assert_close(gradient(gr.transform(plain, DOUBLE), x), 2 * gradient(plain, x))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)


class Prints(Head):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        print(h)
        return h.sum()


class Branches(Head):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return h.sum() if h.sum() > 0 else h.mean()


class Lists(Head):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).sum() * max(x.sum(1).tolist())


class Selects(Head):
    def forward(self, x: Tensor) -> Tensor:
        chosen = self.fc(x)[x.sum(1) > 0]
        return chosen.sum() if chosen.shape[0] > 1 else chosen.mean()


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_sequence([x, x[:2]])
        return self.lstm(packed)[0].data.sum()


class InPlace(Head):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x).exp()
        squares = h * h
        h.add_(1.0)
        return squares.sum()


class Narrow(Head):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x[:, 1:]).sum()


BROKEN: list[tuple[type[nn.Module], type[Exception], str, str, str]] = [
    (Prints, gr.GraphBreakError, "cannot print", "print(h)", "Observe"),
    (Branches, gr.GraphBreakError, "branch", "return h.sum() if h.sum() > 0 else h.mean()", "torch.where"),
    (Lists, gr.GraphBreakError, "read on the host", "return self.fc(x).sum() * max(x.sum(1).tolist())", "outside"),
    (Selects, gr.GraphBreakError, "a size, a branch or a Python number", "chosen.shape[0] > 1", "fullgraph=False"),
    (Packs, gr.GraphBreakError, "PackedSequence", "packed = nn.utils.rnn.pack_sequence([x, x[:2]])", "mask its output"),
    (InPlace, gr.TraceError, "in-place op", "squares = h * h", "the plain model fails too"),
    (Narrow, gr.TraceError, "got [3, 3] X [4, 2]", "return self.fc(x[:, 1:]).sum()", "the plain model fails too"),
]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=[pytest.mark.inductor, pytest.mark.slow])])
@pytest.mark.parametrize(
    ("kind", "error", "what", "line", "way_out"), BROKEN, ids=[case[0].__name__ for case in BROKEN]
)
def test_four_lines(
    kind: type[nn.Module], error: type[gr.RewriteError], what: str, line: str, way_out: str, compiled: bool
) -> None:
    model = gr.transform(kind(), DOUBLE)
    if compiled:
        model.compile()
    with pytest.raises(error) as caught:
        model(torch.ones(3, 4))

    first, second, third, last = str(caught.value).splitlines()
    assert what in first
    assert second.startswith("  test_messages.py:")
    assert line in second
    assert way_out in third
    assert last == f"help: gradrewrite help {caught.value.code}"
    assert caught.value.__cause__ is not None
    assert len(str(caught.value)) < 600


def test_what_the_plain_model_can_do_is_not_blamed_on_it() -> None:
    with pytest.raises(gr.GraphBreakError) as caught:
        gr.transform(Branches(), DOUBLE)(torch.ones(3, 4))
    assert "plain model" not in str(caught.value)


def test_unknown_record_names_the_nearest() -> None:
    model = gr.transform(nn.Linear(2, 2), gr.on("gradient:*", Observe("norm")))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(KeyError, match="nearest: norm@gradient:weight"):
        model.monitor.latest()["norm@gradient:weigth"]


def test_compile_returns_the_model() -> None:
    model = gr.transform(nn.Linear(2, 2), [])
    assert model.compile() is model


@torch.library.custom_op("gradrewrite_tests::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x * 2.0


@pytest.mark.long
def test_an_op_that_only_the_tracer_lacks_is_not_blamed_on_the_inputs() -> None:
    class Custom(Head):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(without_fake(x)).sum()

    with pytest.raises((gr.TraceError, gr.GraphBreakError)) as caught:
        gr.transform(Custom(), DOUBLE)(torch.ones(3, 4))
    assert "fails too" not in str(caught.value)
    assert "Give inputs" not in str(caught.value)


def test_warnings_of_a_compilation_that_fails_are_given() -> None:
    def warns(site: gr.Site) -> None:
        warnings.warn("from the policy", UserWarning, stacklevel=1)
        raise ValueError("of the policy")

    with pytest.warns(UserWarning, match="from the policy"), pytest.raises(gr.PolicyError):
        gr.transform(nn.Linear(2, 2), warns)(torch.ones(1, 2))
