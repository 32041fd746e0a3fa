"""``nn.RNN``, ``nn.GRU`` and ``nn.LSTM``: against torch's own modules, and eager loops over cells with hooks."""

from __future__ import annotations

import copy
import functools
import json
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.backends.backend import make_backend
from gradrewrite.backends.engines import AotEager
from gradrewrite.diagnostics.run_file import read_jsonl
from gradrewrite.instrumentation import recurrent
from gradrewrite.ir import marked_loops
from gradrewrite.passes import (
    After,
    CheckFinite,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    Every,
    Keep,
    Observe,
    PCGrad,
    Scale,
    WeighLosses,
)
from gradrewrite.testing import assert_matches_eager

from helpers import ROOT, gradients_of, mostly_slow
from models.bytes_kept import bytes_behind
from models.cudnn import cudnn_on_cpu
from models.recurrent import Recurrent, loop_over_cells

WIDTH, FEATURES, LENGTH, BATCH = 7, 5, 6, 3
LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": functools.partial(nn.RNN, nonlinearity="relu"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "two_layers": {"num_layers": 2},
    "both_directions": {"bidirectional": True, "batch_first": True},
    "all": {"num_layers": 2, "bidirectional": True},
    "no_bias": {"bias": False},
    "projected": {"proj_size": 4, "num_layers": 2, "bidirectional": True},
}


def made(name: str, **settings: Any) -> Recurrent:
    return Recurrent(LAYERS[name](FEATURES, WIDTH, **settings).double())


def weighted(outputs: tuple[Tensor, ...]) -> Tensor:
    torch.manual_seed(1)
    return torch.stack([(out * torch.randn(out.shape, dtype=out.dtype)).sum() for out in outputs]).sum()


def assert_same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], leaves: list[Tensor]) -> None:
    """Compare outputs and gradients within 1e-12."""
    own, other = torch.autograd.grad(weighted(found), leaves), torch.autograd.grad(weighted(wanted), leaves)
    for a, b in zip((*found, *own), (*wanted, *other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


INSIDE = [gr.on("error:rec.l*/*", Observe("norm")), gr.on("activation:rec.l*/h", Observe("max_abs"))]
MODULES = [(n, s) for n in LAYERS for s in SETTINGS if s != "projected" or n == "lstm"]


@pytest.mark.broad
@pytest.mark.parametrize("policy", [[], INSIDE], ids=["plain", "inside"])
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize(("name", "settings"), mostly_slow(MODULES, 4))
def test_modules_of_torch(name: str, settings: str, given: bool, policy: Any) -> None:
    model = made(name, **SETTINGS[settings])
    layer, batch_first = model.rec, SETTINGS[settings].get("batch_first", False)
    x = torch.randn(*((BATCH, LENGTH) if batch_first else (LENGTH, BATCH)), FEATURES, dtype=torch.float64)
    directions = layer.num_layers * (1 + layer.bidirectional)
    widths = [layer.proj_size or WIDTH, *([WIDTH] if name == "lstm" else [])]
    states = [torch.randn(directions, BATCH, n, dtype=torch.float64, requires_grad=True) for n in widths if given]
    x.requires_grad_(True)
    rewritten = gr.transform(model, policy)

    assert_same(rewritten(x, *states), model(x, *states), [x, *states, *layer.parameters()])
    count = LENGTH * directions * {"lstm": 3}.get(name, 2)
    assert len([a for a in rewritten.monitor.latest() if a.startswith("norm@")]) == (count if policy else 0)
    assert len([a for a in rewritten.monitor.latest() if "activation" in a]) == (LENGTH * directions if policy else 0)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_unbatched_input_and_frozen_parameters(name: str) -> None:
    model, x = made(name), torch.randn(LENGTH, FEATURES, dtype=torch.float64)
    model.rec.weight_hh_l0.requires_grad_(False)
    rewritten = gr.transform(model, INSIDE)

    assert_same(rewritten(x), model(x), [p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_truncated_backpropagation(name: str) -> None:
    """The state is detached and passed on from call to call."""
    model, other = made(name), made(name)
    other.load_state_dict(model.state_dict())
    rewritten = gr.transform(model, gr.on("error:rec.l0/h", Observe("norm")))
    own: tuple[Tensor, ...] = ()
    wanted: tuple[Tensor, ...] = ()
    for _ in range(3):
        x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
        found, plain = rewritten(x, *own), other(x, *wanted)
        weighted(found).backward()
        weighted(plain).backward()
        own, wanted = tuple(t.detach() for t in found[1:]), tuple(t.detach() for t in plain[1:])

    assert rewritten.monitor.history("norm@error:rec.l0/h#5") != [0.0] * 3
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_dropout_between_layers_draws_torch_s_numbers() -> None:
    model = made("lstm", num_layers=3, dropout=0.5)
    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    rewritten = gr.transform(model, INSIDE)

    torch.manual_seed(7)
    found = rewritten(x)
    torch.manual_seed(7)
    wanted = model(x)
    assert_same(found, wanted, list(model.parameters()))
    assert_same(gr.transform(model.eval(), INSIDE)(x), model(x), list(model.parameters()))


@pytest.mark.parametrize("policy", [[], INSIDE], ids=["plain", "inside"])
def test_autocast(policy: Any) -> None:
    model = Recurrent(nn.LSTM(FEATURES, WIDTH))
    x = torch.randn(LENGTH, BATCH, FEATURES)
    rewritten = gr.transform(model, policy)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = rewritten(x), model(x)

    assert [t.dtype for t in found] == [t.dtype for t in wanted] == [torch.bfloat16] * 3
    own = torch.autograd.grad(sum(t.float().sum() for t in found), list(model.parameters()))
    other = torch.autograd.grad(sum(t.float().sum() for t in wanted), list(model.parameters()))
    for a, b in zip((*found, *own), (*wanted, *other), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
    assert all(g.dtype == torch.float32 for g in own)


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}])
@pytest.mark.parametrize("train", [True, False])
def test_an_lstm_without_an_action_inside_is_torch_s_kernel(settings: dict[str, Any], train: bool) -> None:
    model = Recurrent(nn.LSTM(FEATURES, WIDTH, **settings)).train(train)
    x = torch.randn(BATCH, LENGTH, FEATURES, requires_grad=True)
    rewritten = gr.transform(model, gr.on("gradient:*", Scale(1.0)))

    leaves = [x, *model.parameters()]
    found, wanted = rewritten(x), model(x)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    own, other = torch.autograd.grad(weighted(found), leaves), torch.autograd.grad(weighted(wanted), leaves)
    assert all(map(torch.equal, own, other))
    code = rewritten.trace(x).code
    assert code.count("lstm_layer.default") == code.count("lstm_layer_backward.default") == (4 if settings else 1)
    assert "gradrewrite.loop." not in code
    assert [str(s) for s in rewritten.trace(x).sites if "rec.l0/c" in str(s)][:2] == [
        "activation:rec.l0/c",
        "error:rec.l0/c",
    ]


def scaled(bound: float, norms: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def hook(error: Tensor) -> Tensor:
        norms.append(error.norm())
        return error * (bound / error.norm().clamp(min=bound))

    return hook


def against_a_loop(name: str, policy: Any, hooks: dict[str, Any]) -> gr.RewrittenModule:
    model = made(name)
    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    rewritten = gr.transform(model, policy)
    leaves = list(model.parameters())
    free = torch.autograd.grad(weighted(model(x)), leaves)
    outputs = loop_over_cells(model.rec, x, hooks)
    found = rewritten(x)
    own, wanted = torch.autograd.grad(weighted(found), leaves), torch.autograd.grad(weighted(outputs), leaves)
    for a, b in zip((*found, *own), (*outputs, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert any(not torch.allclose(a, b) for a, b in zip(own, free, strict=True))  # something acts
    return rewritten


@pytest.mark.parametrize(
    ("name", "value"), [*((name, value) for name in LAYERS for value in ("h", "gates")), ("lstm", "c")]
)
def test_a_clip_at_each_time_step(name: str, value: str) -> None:
    norms: list[Tensor] = []
    hooks = {value: lambda t: scaled(0.7, norms)}
    model = against_a_loop(name, gr.on(f"error:rec.l0/{value}", ClipByNorm(0.7)), hooks)

    records = model.monitor.latest()
    for t, norm in enumerate(reversed(norms)):
        number = f"#{t}" if t else ""
        assert records[f"norm@error:rec.l0/{value}{number}"] == pytest.approx(norm.item(), rel=1e-12)


def test_different_answers_at_different_time_steps() -> None:
    policy = [
        gr.on("error:rec.l0/h#1", ClipByNorm(0.5)),
        gr.on("error:rec.l0/h#4", [ClipByValue(0.1), Observe("norm")]),
        lambda site: Scale(2.0) if site.matches("error:rec.l0/c") and site.iteration in (2, 3, 5) else None,
    ]

    def of_h(t: int) -> Any:
        return {1: scaled(0.5, []), 4: lambda e: e.clamp(-0.1, 0.1)}.get(t)

    hooks = {"h": of_h, "c": lambda t: (lambda e: e * 2) if t in (2, 3, 5) else None}
    model = against_a_loop("lstm", policy, hooks)
    assert {a for a in model.monitor.latest() if a.startswith("norm@")} == {
        "norm@error:rec.l0/h#1",
        "norm@error:rec.l0/h#4",
    }


def test_functions_with_records_values_and_bounds_that_change() -> None:
    bound = torch.tensor(0.3, dtype=torch.float64)

    def act(error: Tensor, value: Tensor) -> Tensor:
        gr.record("product", (error * value).sum())
        return torch.where(value.abs() > bound, error * 0.5, error)

    products: list[float] = []

    def loop(limit: float, x: Tensor, model: Recurrent) -> tuple[Tensor, ...]:
        layer, values = model.rec, list[Tensor]()

        def at(t: int) -> Callable[[Tensor], Tensor]:
            def hook(error: Tensor) -> Tensor:
                products.append((error * values[t]).sum().item())
                return torch.where(values[t].abs() > limit, error * 0.5, error)

            return hook

        outputs = loop_over_cells(layer, x, {"h": at})
        values += outputs[0].detach().unbind(0)
        return torch.autograd.grad(weighted(outputs), list(model.parameters()))

    model = made("lstm")
    rewritten = gr.transform(model, gr.on("error:rec.l0/h", act))
    for limit in (0.3, 0.1):
        bound.fill_(limit)
        x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
        products.clear()
        wanted = loop(limit, x, model)
        found = torch.autograd.grad(weighted(rewritten(x)), list(model.parameters()))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        records = rewritten.monitor.latest()
        assert [records[f"product@error:rec.l0/h{f'#{t}' if t else ''}"] for t in range(LENGTH)] == pytest.approx(
            products[::-1]
        )
    assert len(rewritten.explain().graphs) == 1


def test_a_reversed_direction_counts_from_its_first_iteration() -> None:
    """Iteration 0 of ``l0_reverse`` reads the last time step."""
    model = Recurrent(nn.LSTM(FEATURES, WIDTH, bidirectional=True).double())
    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    rewritten = gr.transform(
        model, [gr.on("activation:rec.l0_reverse/h", Keep()), gr.on("error:rec.l0_reverse/h", Keep())]
    )
    output, *_ = rewritten(x)
    output.retain_grad()
    weighted((output,)).backward()

    kept = rewritten.monitor.kept()
    for n in range(LENGTH):
        number = f"#{n}" if n else ""
        torch.testing.assert_close(kept[f"activation:rec.l0_reverse/h{number}"], output[LENGTH - 1 - n, :, WIDTH:])
    first = f"error:rec.l0_reverse/h#{LENGTH - 1}"  # the last iteration: nothing reads its state
    torch.testing.assert_close(kept[first], output.grad[0, :, WIDTH:])


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gradrewrite.monitor")
    model = made("lstm")
    rewritten = gr.transform(model, gr.on("error:rec.l0/h", ClipByNorm(1e-3, log=True)))
    weighted(rewritten(torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64))).backward()
    lines = [r.getMessage() for r in caplog.records if "need clipping" in r.getMessage()]

    assert len(lines) == LENGTH
    assert all(line.startswith("layer=rec.l0/h need clipping, max error=") for line in lines)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.inductor)])
def test_a_failed_check_names_the_iteration(compiled: bool) -> None:
    model = made("lstm")
    divisor = torch.ones((), dtype=torch.float64)
    policy = [gr.on("error:rec.l0/c#4", lambda e: e / divisor), gr.on("error:rec.l0/h", CheckFinite())]
    rewritten = gr.transform(model, policy)
    if compiled:
        rewritten.compile()
    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    weighted(rewritten(x)).backward()
    divisor.zero_()

    with pytest.raises(gr.NonFiniteError) as caught:  # the backward begins with the last time step
        weighted(rewritten(x)).backward()
    names = [f"error:rec.l0/{value}{number}" for number in ("#3", "#2", "#1", "") for value in ("h", "c", "gates")]
    assert str(caught.value.site) == "error:rec.l0/gates#4"
    assert caught.value.op.startswith("rec.l0/c: ")  # the function there
    assert {str(site) for site in caught.value.others} >= {*names}


def test_groups_and_clips_inside_together() -> None:
    model = made("gru")
    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    policy = [gr.on("error:rec.l0/h", ClipByNorm(0.5)), gr.on("gradient:*", ClipByGlobalNorm(0.25))]
    rewritten = gr.transform(model, policy)
    weighted(rewritten(x)).backward()
    wanted = torch.autograd.grad(
        weighted(loop_over_cells(model.rec, x, {"h": lambda _: scaled(0.5, [])})), list(model.parameters())
    )
    total = torch.stack([g.norm() for g in wanted]).norm()

    for found, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(found.grad, gradient * 0.25 / total, rtol=1e-12, atol=1e-12)


def test_sampled_measurements() -> None:
    """In steps without a measurement there is nothing inside, so an LSTM is torch's kernel."""
    model = Recurrent(nn.LSTM(FEATURES, WIDTH))
    rewritten = gr.transform(model, gr.on("error:rec.l0/h", Observe("norm", every=2)))
    x = torch.randn(LENGTH, BATCH, FEATURES)
    known = []
    for _ in range(4):
        rewritten(x)[0].sum().backward()
        known.append("norm@error:rec.l0/h#2" in rewritten.monitor.latest())

    assert known == [True, False, True, False]


def test_two_calls_count_on() -> None:
    class Twice(Recurrent):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.rec(self.rec(x)[0])[0]

    model = Twice(nn.GRU(WIDTH, WIDTH).double())
    x = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64)
    rewritten = gr.transform(model, gr.on("error:rec.l0/h", Observe("norm")))
    weighted((rewritten(x),)).backward()

    assert len(rewritten.monitor.latest()) == 2 * LENGTH
    found = torch.autograd.grad(weighted((rewritten(x),)), list(model.parameters()))
    for a, b in zip(found, torch.autograd.grad(weighted((model(x),)), list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("policy", [[], INSIDE], ids=["plain", "inside"])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_lengths_and_batches(name: str, policy: Any) -> None:
    """One graph for all lengths but 1; batches of one size and of others."""
    model = made(name)
    rewritten = gr.transform(model, policy)
    for length, batch, graphs in ((6, 3, 1), (9, 3, 1), (4, 3, 1), (1, 3, 2), (12, 3, 2), (5, 2, 3), (7, 4, 3)):
        x = torch.randn(length, batch, FEATURES, dtype=torch.float64)
        assert_same(rewritten(x), model(x), list(model.parameters()))
        if policy:
            assert len([a for a in rewritten.monitor.latest() if a.startswith("max_abs@")]) == length
        assert len(rewritten.explain().graphs) == graphs, (length, batch)


def where_in(pattern: str, acts: Callable[[int], bool]) -> Callable[[gr.Site], Any]:
    return lambda site: Scale(3.0) if site.matches(pattern) and acts(site.iteration or 0) else None


@pytest.mark.parametrize(
    ("policy", "acts", "graphs"),
    [
        (gr.on("error:rec.l0/h#3", Scale(3.0)), lambda t: t == 3, 1),
        (where_in("error:rec.l0/h", lambda t: t % 2 == 0), lambda t: t % 2 == 0, 1),
        (where_in("error:rec.l0/h", lambda t: t >= 5), lambda t: t >= 5, 2),
    ],
    ids=["one", "even", "late"],
)
def test_answers_at_lengths_that_change(policy: Any, acts: Callable[[int], bool], graphs: int) -> None:
    """A longer sequence is compiled anew where an answer comes in that was not there before."""
    model = made("gru")
    rewritten = gr.transform(model, policy)
    for length in (4, 9, 3, 6):
        x = torch.randn(length, BATCH, FEATURES, dtype=torch.float64)
        hooks = {"h": lambda t: (lambda e: e * 3.0) if acts(t) else None}
        found = torch.autograd.grad(weighted(rewritten(x)), list(model.parameters()))
        wanted = torch.autograd.grad(weighted(loop_over_cells(model.rec, x, hooks)), list(model.parameters()))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert len(rewritten.explain().graphs) == graphs


BY_ITERATION = {
    "norm": gr.on("error:*/h", ClipByNorm(lambda site: 0.05 * (1 + site.iteration), log=True)),
    "value": gr.on("error:*/gates", ClipByValue(lambda site: 0.01 / (1 + site.iteration))),
    "both": gr.on("error:*/c", ClipByValue({"*#1": 0.5, "*#6": 0.25, "*": 0.1}, min=-0.3)),
    "late": gr.on("error:*/h", ClipByNorm({"*#7": 0.01, "*": 0.1})),
    "every": gr.on("error:*/h", Every(1, ClipByNorm({"*#7": 0.01, "*": 0.1}))),
    "scale": lambda site: Scale(1.0 + 0.1 * site.iteration) if site.matches("error:*/h") else None,
}


@pytest.mark.parametrize("name", BY_ITERATION)
def test_settings_that_differ_by_iteration(name: str) -> None:
    """They are rows of a table: the body is as with one setting, and longer sequences compile nothing."""
    policy = BY_ITERATION[name]
    model = made("lstm", bidirectional=True)
    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    assert_matches_eager(model, policy, x, compiled=False)

    rewritten = gr.transform(model, policy)
    codes = []
    for length in (4, 9):
        x = torch.randn(length, BATCH, FEATURES, dtype=torch.float64)
        apart = gr.transform(model, policy, dynamic=False)
        assert_same(rewritten(x), apart(x), list(model.parameters()))
        assert rewritten.monitor.latest() == apart.monitor.latest()
        codes.append(len(apart.trace(x).code))
    if name in ("norm", "value", "scale"):  # with several settings at both lengths
        assert codes[0] == pytest.approx(codes[1], rel=0.01)
    assert len(rewritten.explain().graphs) == (2 if name == "every" else 1)


def test_edits_of_settings_by_iteration() -> None:
    rewritten = gr.transform(made("gru"), BY_ITERATION["norm"])
    graph = rewritten.trace(torch.randn(3, BATCH, FEATURES, dtype=torch.float64))
    assert [str(edit.action) for edit in graph.edits] == [
        "ClipByNorm(0.05, log=True)", "ClipByNorm(0.1, log=True)", "ClipByNorm(0.15000000000000002, log=True)",
    ]  # fmt: skip


def test_functions_that_a_callback_makes_anew() -> None:
    """They are one where they hold equal values, so the body does not grow with the length."""

    def policy(site: gr.Site) -> Any:
        return (lambda e: e.clamp(-0.1, 0.1)) if site.matches("error:rec.l0/h") else None

    model = made("gru")
    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    assert_matches_eager(model, policy, x, compiled=False)
    rewritten = gr.transform(model, policy)
    assert rewritten.trace(x).code.count("where") == 0
    weighted(rewritten(x)).backward()
    weighted(rewritten(torch.cat([x, x]))).backward()
    assert len(rewritten.explain().graphs) == 1


class Scaled(float):
    def __call__(self, error: Tensor) -> Tensor:
        return error * float(self)


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by: float) -> None:
        self.by = by


class OfSlotted(Slotted):
    def __call__(self, error: Tensor) -> Tensor:
        return error * self.by


class Named(nn.Module):
    """A module whose text does not tell its factor."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, error: Tensor) -> Tensor:
        return error * self.by


def with_attribute(by: float) -> Callable[[Tensor], Tensor]:
    def scale(error: Tensor) -> Tensor:
        factor: float = scale.by  # type: ignore[attr-defined]
        return error * factor

    scale.by = by  # type: ignore[attr-defined]
    return scale


CALLABLES: dict[str, Callable[[float], Any]] = {
    "a subclass of float": Scaled,
    "inherited slots": OfSlotted,
    "a module": Named,
    "an attribute of a function": with_attribute,
    "a partial": lambda by: functools.partial(lambda f, e: e * f, by),
    "a keyword": lambda by: lambda e, *, by=by: e * by,
    "Every": lambda by: Every(1, Named(by)),
    "After, a text that is equal": lambda by: After(0, OfSlotted(by)),
    "Every, a partial of a tensor": lambda by: Every(1, functools.partial(torch.mul, torch.tensor(by).double())),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_callables_that_differ_by_iteration(name: str) -> None:
    made_anew = [CALLABLES[name](1.0 + 0.1 * n) for n in range(LENGTH)]

    def policy(site: gr.Site) -> Any:
        return made_anew[site.iteration] if site.iteration is not None and site.matches("error:rec.l0/h") else None

    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    found = assert_matches_eager(made("gru"), policy, x, compiled=False)
    assert len(found.changed) == LENGTH - 1  # the factor of the first one is 1


def test_answers_beyond_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer sequence than those at which the policy was asked is compiled anew, and the answers are right."""
    monkeypatch.setattr(marked_loops, "LEAST_AHEAD", 8)
    factors = [1.0, 2.0, 3.0] * 4

    def policy(site: gr.Site) -> Any:  # it ends with an IndexError at iteration 12
        return Scale(factors[site.iteration or 0]) if site.matches("error:rec.l0/h") else None

    model = made("gru")
    rewritten = gr.transform(model, policy)
    for length, graphs in ((2, 1), (8, 1), (3, 1), (9, 2), (12, 2)):
        x = torch.randn(length, BATCH, FEATURES, dtype=torch.float64)
        hooks = {"h": lambda t: lambda e: e * factors[t]}
        found = torch.autograd.grad(weighted(rewritten(x)), list(model.parameters()))
        wanted = torch.autograd.grad(weighted(loop_over_cells(model.rec, x, hooks)), list(model.parameters()))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert len(rewritten.explain().graphs) == graphs
    with pytest.raises(gr.PolicyError, match=r"error:rec\.l0/h#12: the policy raised IndexError"):
        rewritten(torch.randn(13, BATCH, FEATURES, dtype=torch.float64))


def test_a_number_beyond_the_length_warns_once() -> None:
    rewritten = gr.transform(made("gru"), gr.on("error:rec.l0/h#5", Observe("norm")))

    def recorded(length: int) -> list[str]:
        weighted(rewritten(torch.randn(length, BATCH, FEATURES, dtype=torch.float64))).backward()
        return list(rewritten.monitor.latest())

    with pytest.warns(UserWarning, match=r"'error:rec\.l0/h#5' is beyond the 4 iterations of rec\.l0/h"):
        assert recorded(4) == []
    assert recorded(3) == []  # warnings are errors here
    assert recorded(6) == ["norm@error:rec.l0/h#5"]
    recorded(2)
    assert len(rewritten.explain().graphs) == 2
    other = gr.transform(made("gru"), gr.on("error:rec.l1/h#5", Observe("norm")))
    with pytest.raises(gr.NoSuchSiteError):
        other(torch.randn(3, BATCH, FEATURES, dtype=torch.float64))


class Twice(nn.Module):
    """A layer over two sequences, the second one with the states of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.rec = nn.LSTM(FEATURES, WIDTH).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, states = self.rec(x)
        return first.square().sum() + self.rec(y, states)[0].sum()


def odd_calls(site: gr.Site) -> Any:
    return Observe("norm") if site.kind == "error" and site.op == "h" and site.call % 2 else None


def named(address: str, numbers: Iterable[int]) -> list[str]:
    return [f"{address}#{n}" if n else address for n in numbers]


@pytest.mark.parametrize(
    ("policy", "graphs", "record"),
    [
        (gr.on("error:rec.l0/h", Observe("norm")), 1, "norm@error:rec.l0/h"),
        (gr.on("error:rec.l0/[hc]", ClipByNorm(1e-3)), 1, "norm@error:rec.l0/c"),
        (gr.on("activation:rec.l0/*", Observe("norm")), 1, "norm@activation:rec.l0/gates"),
        ([gr.on("error:rec.l0/h", Scale(0.5)), gr.on("error:rec.l0/h", Observe("norm"))], 1, "norm@error:rec.l0/h"),
        (gr.on("error:rec.l0/h#3", Observe("norm")), 4, ""),
        (odd_calls, 4, ""),
    ],
)
def test_numbers_of_a_second_call_at_lengths_that_change(policy: Any, graphs: int, record: str) -> None:
    model = Twice()
    rewritten = gr.transform(copy.deepcopy(model), policy)
    for lengths in ((6, 4), (8, 4), (3, 9), (5, 5)):
        x, y = (torch.randn(length, BATCH, FEATURES, dtype=torch.float64) for length in lengths)
        whole = gr.transform(model, policy, dynamic=False)
        for own in (rewritten, whole):
            own.zero_grad()
            own(x, y).backward()
        records = rewritten.monitor.latest()
        assert records == pytest.approx(whole.monitor.latest(), rel=1e-12)
        assert list(records) == list(whole.monitor.latest())
        if record:
            found = [address for address in records if address.partition("#")[0] == record]
            assert found == named(record, range(sum(lengths)))
        for a, b in zip(rewritten.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)
    assert len(rewritten.explain().graphs) == graphs


def test_a_fault_in_a_second_call_at_lengths_that_change() -> None:
    rewritten = gr.transform(Twice(), gr.on("error:*/*", CheckFinite()))
    for lengths in ((6, 4), (3, 9), (4, 7)):
        x, y = (torch.randn(length, BATCH, FEATURES, dtype=torch.float64) for length in lengths)
        y[2] = float("nan") if lengths == (4, 7) else y[2]
        loss = rewritten(x, y)
        if lengths != (4, 7):
            loss.backward()
    with pytest.raises(
        gr.NonFiniteError, match=r"first non-finite: activation:rec\.l0/gates#6, .* the input y was not"
    ):
        loss.backward()


def test_history_by_iteration() -> None:
    model = made("gru")
    other = copy.deepcopy(model)
    policy = [gr.on("error:rec.l0/h", Observe("norm")), gr.on("error:rec.l0/gates#2", Observe("max"))]
    rewritten = gr.transform(model, policy)
    wanted: list[list[float]] = []

    def note(row: list[float], error: Tensor) -> None:
        row.insert(0, error.norm().item())

    for length in (3, 5, 4):
        wanted.append([])
        x = torch.randn(length, BATCH, FEATURES, dtype=torch.float64)
        hook = functools.partial(note, wanted[-1])
        weighted(loop_over_cells(other.rec, x, {"h": lambda _, hook=hook: hook})).backward()
        weighted(rewritten(x)).backward()
        wanted[-1] += [float("nan")] * (5 - length)

    monitor = rewritten.monitor
    history = monitor.history("norm@error:rec.l0/h", per="iteration")
    assert history == [pytest.approx(row, nan_ok=True, rel=1e-12) for row in wanted]
    assert [len(row) for row in monitor.history("max@error:rec.l0/gates", per="iteration")] == [3, 3, 3]
    with pytest.raises(KeyError, match=r"nearest: norm@error:rec\.l0/h"):
        monitor.history("norm@error:rec.l1/h", per="iteration")
    with pytest.raises(ValueError, match='per is "backward", "step", "iteration" or "element", got \'iterations\''):
        monitor.history("norm@error:rec.l0/h", per="iterations")  # type: ignore[call-overload]


class OverCells(nn.Module):
    """The unrolled loop."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.cell = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "tanh": nn.RNNCell}[name](32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], 32)
        out = []
        for row in x:
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(row, (h, c))
            else:
                h = self.cell(row, h)
            out.append(h)
        return torch.stack(out)


@pytest.mark.parametrize("name", ["lstm", "gru", "tanh"])
def test_bytes_kept_are_those_of_the_unrolled_loop_or_fewer(name: str) -> None:
    """A stack of states has the first and the last one too, which the unrolled loop shares or does not keep."""
    x = torch.randn(20, 16, 32)
    clip = ClipByNorm(0.1)
    rolled = gr.transform(Recurrent(LAYERS[name](32, 32)), gr.on("error:rec.l0/h", clip)).memory(x)
    unrolled = gr.transform(OverCells(name), gr.on("error:cell", clip)).memory(x)

    row = 16 * 32 * x.itemsize
    assert 0 < rolled.policy_bytes <= unrolled.policy_bytes + 2 * row * (name == "lstm")
    assert {row.module for row in rolled.rows if row.policy_bytes} == {"rec"}


class Headed(nn.Module):
    """A layer that reads the output of a loop."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x)
        scores: Tensor = self.head(output[0] if isinstance(output, tuple) else output)
        return scores


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.inductor)])
@pytest.mark.parametrize(("name", "kibibytes"), [("lstm", (244, 318)), ("gru", (202, 280)), ("tanh", (42, 82))])
def test_bytes_kept_where_a_layer_reads_the_output(name: str, kibibytes: tuple[int, int], compiled: bool) -> None:
    """The stack of states is the output, for both; an unrolled loop stacks copies."""
    x, clip = torch.randn(20, 16, 32), ClipByNorm(0.1)
    found: list[float] = []
    for inner, pattern in ((Recurrent(LAYERS[name](32, 32)), "error:inner.rec.l0/h"), (OverCells(name), "error:*cell")):
        rewritten = gr.transform(Headed(inner), gr.on(pattern, clip))
        if compiled and not found:
            rewritten.compile()
        found.append(bytes_behind(rewritten(x), [x, *rewritten.parameters()]) / 1024)
    assert tuple(found) == kibibytes


class Scalars(dict[str, float]):
    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self[tag] = value


def test_logs(tmp_path: Path) -> None:
    policy = [gr.on("error:rec.l0/[hc]", ClipByNorm(1e-3)), gr.on("error:rec.l0/gates#2", Observe("max"))]
    rewritten = gr.transform(made("lstm"), policy)
    rewritten.monitor.to_jsonl(tmp_path / "run.jsonl")
    writer = Scalars()
    rewritten.monitor.to_tensorboard(writer)
    for length in (3, 5):
        weighted(rewritten(torch.randn(length, BATCH, FEATURES, dtype=torch.float64))).backward()
    rewritten.monitor.flush()

    rows = read_jsonl(tmp_path / "run.jsonl")
    latest = rewritten.monitor.latest()
    assert list(rows[-1].records.items()) == list(latest.items())
    assert len([name for name in latest if "#4" in name]) == 6  # norm, factor and bound, of h and c
    data = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])["records"]
    assert list(data) == ["loop 0", "loop 1"]
    assert data["loop 1"]["dtype"] == "float64"  # of bounds
    norms = [latest[f"norm@error:rec.l0/h{n}"] for n in ("", "#1", "#2", "#3", "#4")]
    assert writer["norm_largest/error:rec.l0/h"] == max(norms)
    assert writer["norm_largest_at/error:rec.l0/h"] == norms.index(max(norms))
    assert writer["norm_last/error:rec.l0/h"] == norms[-1]
    assert writer["rate/error:rec.l0/h"] == 1
    assert not [tag for tag in writer if "#" in tag and "gates" not in tag]


def test_marks_of_lengths_are_taken_off_again() -> None:
    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    gr.transform(made("lstm"), INSIDE)(x)

    assert not [name for name in vars(x) if "dynamo" in name]


def test_trace() -> None:
    model = made("lstm")
    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    graph = gr.transform(model, gr.on("error:rec.l0/h", ClipByNorm(0.5))).trace(x)

    assert [str(e.site) for e in graph.edits] == [f"error:rec.l0/h{f'#{n}' if n else ''}" for n in range(LENGTH)]
    assert [site.iteration for site in graph.sites if site.matches("activation:rec.l0/gates")] == list(range(LENGTH))
    assert graph.code.count(" runs once an iteration:") == 2
    assert "sqrt" in graph.code.split(" runs once an iteration:")[2]
    assert graph.before is not None
    inputs = [torch.randn(n.meta["val"].shape).double() for n in graph.graph_module.graph.find_nodes(op="placeholder")]
    before, after = graph.before.graph_module(*inputs), graph.graph_module(*inputs)
    for a, b in zip(before[:3], after[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    plain = gr.transform(model, gr.on("error:rec.l0/h", Observe("norm"))).trace(x)
    for a, b in zip(before, plain.graph_module(*inputs), strict=False):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Padded(nn.Module):
    """Sequences of different lengths: packed, and padded with a mask."""

    def __init__(self, *, packed: bool) -> None:
        super().__init__()
        self.rec, self.packed = nn.LSTM(FEATURES, WIDTH, batch_first=True).double(), packed

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if self.packed:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            output, (last, _) = self.rec(packed)
            return nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0], last[0]
        output, _ = self.rec(x)
        output = output * (torch.arange(output.shape[1]) < lengths[:, None])[..., None]
        return output, output[torch.arange(len(x)), lengths - 1]


def test_packed_sequences_are_refused_and_the_masked_form_is_equal() -> None:
    x, lengths = torch.randn(3, LENGTH, FEATURES, dtype=torch.float64), torch.tensor([6, 2, 4])
    packed, masked = Padded(packed=True), Padded(packed=False)
    masked.load_state_dict(packed.state_dict())
    with pytest.raises(gr.GraphBreakError, match=r"PackedSequence(?s:.*)mask its output"):
        gr.transform(packed, [])(x, lengths)

    rewritten = gr.transform(masked, gr.on("error:rec.l0/h", Observe("norm")))
    found = torch.autograd.grad(weighted(rewritten(x, lengths)), list(masked.parameters()))
    wanted = torch.autograd.grad(weighted(packed(x, lengths)), list(packed.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_page_shows_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "loops.md").read_text()
    code, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL).groups()
    exec(compile(code, "loops.md", "exec"), {})

    assert capsys.readouterr().out == printed


class TakesPacked(Recurrent):
    def forward(self, x: Any) -> Tensor:  # type: ignore[override]
        output: Tensor = self.rec(x)[0].data.sum()
        return output


def test_a_packed_input_is_refused() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(LENGTH, 3, FEATURES), torch.tensor([6, 4, 2]))
    with pytest.raises(gr.GraphBreakError, match=r"PackedSequence(?s:.*)mask its output"):
        gr.transform(TakesPacked(nn.LSTM(FEATURES, WIDTH)), [])(packed)


def test_refused_inside() -> None:
    rewritten = gr.transform(made("lstm"), gr.on("error:rec.l0/h", WeighLosses(PCGrad())))
    with pytest.raises(gr.PolicyError, match=r"error:rec\.l0/h(?s:.*)acts on several gradients"):
        rewritten(torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64))


def smoothed() -> Callable[[Tensor], Tensor]:
    mean = gr.State((), 1.0, torch.float64, name="mean")

    def divide(error: Tensor) -> Tensor:
        mean.set(0.5 * mean.value + 0.5 * error.abs().mean())
        return error / (1 + 10 * mean.value)

    return divide


@pytest.mark.parametrize("pattern", ["error:*/h", "error:rec.l0/gates#2"])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_state_for_each_iteration(name: str, pattern: str) -> None:
    model = made(name, bidirectional=True)
    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    found = assert_matches_eager(model, gr.on(pattern, smoothed()), x, compiled=False, steps=3)

    assert len(found.changed) == (1 if "#" in pattern else 2 * LENGTH)


def test_states_at_lengths_that_change() -> None:
    """A longer loop has new states, of a shorter one the others stay; they are those of the unrolled program."""
    model, means = made("gru"), [torch.ones((), dtype=torch.float64) for _ in range(6)]
    rewritten = gr.transform(model, gr.on("error:rec.l0/h", smoothed()))

    def divided(t: int, error: Tensor) -> Tensor:
        means[t] = 0.5 * means[t] + 0.5 * error.abs().mean()
        return error / (1 + 10 * means[t])

    def compare(net: nn.Module, length: int) -> None:
        x = torch.randn(length, BATCH, FEATURES, dtype=torch.float64)
        hooks = {"h": lambda t: functools.partial(divided, t)}
        found = torch.autograd.grad(weighted(net(x)), list(net.parameters()))
        wanted = torch.autograd.grad(weighted(loop_over_cells(model.rec, x, hooks)), list(model.parameters()))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    for length in (4, 6, 2, 6, 3):
        compare(rewritten, length)
    assert len(rewritten.explain().graphs) == 1
    kept = gr.state_dict(rewritten)["states"]
    assert kept == {f"error:rec.l0/h{f'#{t}' if t else ''}/mean": means[t] for t in range(6)}

    other = gr.transform(copy.deepcopy(model), gr.on("error:rec.l0/h", smoothed()))
    gr.load_state_dict(other, gr.state_dict(rewritten))
    for length in (2, 6, 5):
        compare(other, length)
    gr.load_state_dict(other, {**gr.state_dict(rewritten), "states": kept})
    means[:] = [kept[f"error:rec.l0/h{f'#{t}' if t else ''}/mean"] for t in range(6)]
    compare(other, 6)


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rec = nn.LSTM(FEATURES, FEATURES).double()

    def forward(self, x: Tensor) -> Tensor:
        first = self.rec(x)[0]
        loss: Tensor = 100 * first.square().sum() + self.rec(first)[0].square().sum()
        return loss


def counting() -> Callable[[Tensor], Tensor]:
    number = gr.State(name="n", dtype=torch.float64)

    def count(error: Tensor) -> Tensor:
        number.set(number + 1)
        return error * number.value

    return count


def test_states_of_a_layer_that_is_called_twice_at_lengths_that_change() -> None:
    """Iteration 2 is of the second call in a short sequence, of the first one in a long one: one site, one state."""
    rewritten = gr.transform(CalledTwice(), gr.on("error:rec.l0/h", counting()))
    for length in (2, 3, 2, 4, 2):
        rewritten(torch.randn(length, BATCH, FEATURES, dtype=torch.float64)).backward()
    found = gr.state_dict(rewritten)["states"]

    numbers = [float(found[f"error:rec.l0/h{f'#{n}' if n else ''}/n"]) for n in range(8)]
    assert numbers == [5, 5, 5, 5, 2, 2, 1, 1]


def test_states_of_answers_that_change_with_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marked_loops, "LEAST_AHEAD", 1)
    count = counting()
    numbers = dict.fromkeys(range(18), 0.0)

    def policy(site: gr.Site) -> Any:
        n = site.iteration or 0
        return count if site.matches("error:rec.l0/h") and (n % 2 == 1 or n > 16) else None

    def counted(t: int, error: Tensor) -> Tensor:
        numbers[t] += 1
        return error * numbers[t]

    model = made("gru")
    rewritten = gr.transform(model, policy)
    for length in (4, 6, 18, 4, 18):
        x = torch.randn(length, BATCH, FEATURES, dtype=torch.float64)
        hooks = {"h": lambda t: functools.partial(counted, t) if t > 16 or t % 2 == 1 else None}
        found = torch.autograd.grad(weighted(rewritten(x)), list(model.parameters()))
        wanted = torch.autograd.grad(weighted(loop_over_cells(model.rec, x, hooks)), list(model.parameters()))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    states = gr.state_dict(rewritten)["states"]
    assert states == {f"error:rec.l0/h#{n}/n": value for n, value in numbers.items() if value}
    assert len(rewritten.explain().graphs) == 2


def test_states_of_two_actions_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of two forms share the states of a function at one value, also where a longer sequence is compiled."""
    monkeypatch.setattr(marked_loops, "LEAST_AHEAD", 1)
    count, numbers = counting(), dict.fromkeys(range(18), 0.0)

    def policy(site: gr.Site) -> Any:
        return [count, *([Scale(2.0)] if (site.iteration or 0) % 2 else [])] if site.matches("error:rec.l0/h") else None

    def counted(t: int, error: Tensor) -> Tensor:
        numbers[t] += 1
        return error * numbers[t] * (2.0 if t % 2 else 1.0)

    model = made("gru")
    rewritten = gr.transform(model, policy)
    for length in (4, 18, 4, 18):
        x = torch.randn(length, BATCH, FEATURES, dtype=torch.float64)
        hooks = {"h": lambda t: functools.partial(counted, t)}
        found = torch.autograd.grad(weighted(rewritten(x)), list(model.parameters()))
        wanted = torch.autograd.grad(weighted(loop_over_cells(model.rec, x, hooks)), list(model.parameters()))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert len(rewritten.explain().graphs) == 2


@pytest.mark.filterwarnings("error")
def test_loaded_states_of_another_length_are_of_the_same_policy() -> None:
    model = made("gru")
    kept = gr.transform(copy.deepcopy(model), gr.on("error:rec.l0/h", counting()))
    weighted(kept(torch.randn(4, BATCH, FEATURES, dtype=torch.float64))).backward()
    for length in (2, 6):
        other = gr.transform(copy.deepcopy(model), gr.on("error:rec.l0/h", counting()))
        gr.load_state_dict(other, gr.state_dict(kept))
        for _ in range(3):
            weighted(other(torch.randn(length, BATCH, FEATURES, dtype=torch.float64))).backward()
        found = gr.state_dict(other)["states"]
        assert [float(found[f"error:rec.l0/h{f'#{n}' if n else ''}/n"]) for n in range(2)] == [4, 4]
        assert float(found["error:rec.l0/h#3/n"]) == (1 if length == 2 else 4)


@pytest.mark.filterwarnings("error")
def test_loaded_states_of_shorter_sequences() -> None:
    """They are those of the same policy; what was there of longer ones is as if it had never run."""
    model = made("gru")
    kept, other = (gr.transform(copy.deepcopy(model), gr.on("error:rec.l0/h", counting())) for _ in range(2))
    for net, length in ((kept, 2), (other, 9)):
        weighted(net(torch.randn(length, BATCH, FEATURES, dtype=torch.float64))).backward()
    gr.load_state_dict(other, gr.state_dict(kept))
    assert gr.state_dict(other) == gr.state_dict(kept)
    for _ in range(2):
        weighted(other(torch.randn(5, BATCH, FEATURES, dtype=torch.float64))).backward()
    found = gr.state_dict(other)["states"]
    assert [float(found[f"error:rec.l0/h{f'#{n}' if n else ''}/n"]) for n in range(5)] == [3, 3, 2, 2, 2]


@pytest.mark.parametrize("over", [None, "iterations"])
def test_a_state_is_read_by_the_first_of_two_functions(over: Any) -> None:
    """At each site one function reads it and the next one sets it."""
    mean = gr.State((), 0.0, torch.float64, name="mean", over=over)

    def read(error: Tensor) -> Tensor:
        return error / (1 + mean.value)

    def follow(error: Tensor) -> Tensor:
        mean.set(mean + error.abs().sum())
        return error

    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    model = made("gru", num_layers=2)
    assert_matches_eager(model, gr.on("error:*/h", [read, follow]), x, compiled=False, steps=2)
    assert_matches_eager(model, gr.on("gradient:*", [read, follow]), x, compiled=False, steps=2)


def test_logs_of_a_layer_that_is_called_twice() -> None:
    rewritten = gr.transform(CalledTwice(), gr.on("error:rec.l0/h", ClipByNorm(1e9)))
    writer = Scalars()
    rewritten.monitor.to_tensorboard(writer)
    rewritten(torch.randn(4, BATCH, FEATURES, dtype=torch.float64)).backward()
    rewritten.monitor.flush()
    norms = [rewritten.monitor.latest()[f"norm@error:rec.l0/h{f'#{n}' if n else ''}"] for n in range(8)]

    assert writer["norm_largest/error:rec.l0/h"] == max(norms)
    assert writer["norm_largest_at/error:rec.l0/h"] == norms.index(max(norms))
    assert writer["norm_last/error:rec.l0/h"] == norms[-1]
    assert [tag for tag in writer if tag.startswith("rate")] == ["rate/error:rec.l0/h"]


class Selected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2).double()

    def forward(self, outputs: tuple[Tensor, ...]) -> Tensor:
        loss: Tensor = self.head(outputs[0]).square().sum()
        return loss


@pytest.mark.parametrize("policy", [[], gr.on("error:*/h", ClipByNorm(0.1)), gr.on("activation:*/h", Observe("norm"))])
@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("frozen", ["l0", "l"])
def test_layers_without_a_backward(name: str, frozen: str, policy: Any) -> None:
    layer = Recurrent(LAYERS[name](FEATURES, WIDTH, num_layers=2).double())
    for own, parameter in layer.rec.named_parameters():
        parameter.requires_grad_(frozen not in own)
    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    assert_matches_eager(nn.Sequential(layer, Selected()), policy, x, compiled=False)


class WithSubclass(nn.Module):
    """The error of the recurrent layer is a tensor subclass, for the weight of the head is."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.rec, self.head = layer, nn.Linear(WIDTH, WIDTH).double()
        weight = self.head.weight.detach()
        self.head.weight = nn.Parameter(TwoTensor(weight, 2 * weight))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.rec(x)[0]).square().mean()
        return loss


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.inductor)])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_errors_of_a_tensor_subclass_are_left_alone(layer: Any, compiled: bool) -> None:
    model = WithSubclass(layer(FEATURES, WIDTH).double())
    rewritten = gr.transform(copy.deepcopy(model), gr.on("error:rec.l0/h", Scale(0.0)))
    if compiled:
        rewritten.compile()
    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    model(x).backward()
    with pytest.warns(UserWarning, match=r"error:rec\.l0/h.*: the policy answers at values that are a TwoTensor"):
        rewritten(x).backward()

    for found, wanted in zip(rewritten.parameters(), model.parameters(), strict=True):
        assert isinstance(found.grad, TwoTensor)
        assert isinstance(wanted.grad, TwoTensor)
        for a, b in ((found.grad.a, wanted.grad.a), (found.grad.b, wanted.grad.b)):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Hidden:
    """A function with a state that no reading of its code finds."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def __call__(self, error: Tensor) -> Tensor:
        return globals()["_HIDDEN"](error)


_HIDDEN = smoothed()


@pytest.mark.parametrize("dynamic", [None, False])
def test_a_state_that_a_function_finds_when_it_runs(dynamic: bool | None) -> None:
    rewritten = gr.transform(made("gru"), gr.on("error:rec.l0/h", Hidden()), dynamic=dynamic)
    for length in (LENGTH, 3):
        weighted(rewritten(torch.randn(length, BATCH, FEATURES, dtype=torch.float64))).backward()
    assert len(gr.state_dict(rewritten)["states"]) == LENGTH
    assert len(rewritten.explain().graphs) == (1 if dynamic is None else 2)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("policy", [[], INSIDE], ids=["plain", "inside"])
def test_outputs_that_the_caller_changes_in_place(policy: Any, batch_first: bool) -> None:
    model, x = made("lstm", batch_first=batch_first), torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)

    def gradients(net: nn.Module) -> tuple[Tensor, ...]:
        outputs = net(x)
        for output in outputs:
            output.mul_(3.0)
        return torch.autograd.grad(weighted(outputs), list(model.parameters()))

    for found, wanted in zip(gradients(gr.transform(model, policy)), gradients(model), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


class Exploding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rec, self.head = nn.RNN(8, 32, batch_first=True, nonlinearity="relu"), nn.Linear(32, 8)
        with torch.no_grad():
            self.rec.weight_hh_l0.mul_(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rec(x)[0])


def test_a_diagnosis_names_the_growth_through_time() -> None:
    torch.manual_seed(0)
    diagnosis = gr.diagnose(
        Exploding(),
        [(torch.randn(8, 40, 8),) for _ in range(10)],
        loss=lambda output, batch: (output - batch[0].roll(1, 1)).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        steps=10,
    )
    (cause,) = diagnosis.causes

    assert diagnosis.outcome == "non-finite"
    assert (cause.kind, cause.site) == ("exploding", "error:rec.l0/h")
    assert "per call of rec.l0/h" in cause.text
    assert 'gr.on("error:rec.l0/h", ClipByNorm(' in diagnosis.policy


class SeveralLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rec, self.a, self.b = nn.LSTM(FEATURES, WIDTH).double(), nn.Linear(7, 1).double(), nn.Linear(7, 1).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, _ = self.rec(x)
        return self.a(output).square().sum(), self.b(output).sum()


def test_several_losses() -> None:
    """Weighed at the parameters of a layer without an action inside; with one, each loss would need its own loop."""
    model, x = SeveralLosses(), torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    weigh = gr.on("gradient:rec.*", WeighLosses(lambda gramian: gramian.new_tensor([0.0, 3.0])))
    for policy in ([weigh], [weigh, gr.on("activation:rec.l0/h", Observe("norm"))]):
        model.zero_grad()
        rewritten = gr.transform(model, policy)
        torch.stack(rewritten(x)).sum().backward()
        wanted = torch.autograd.grad(3 * model(x)[1], list(model.rec.parameters()))
        for found, gradient in zip(model.rec.parameters(), wanted, strict=True):
            torch.testing.assert_close(found.grad, gradient, rtol=1e-12, atol=1e-12)

    with pytest.raises(gr.PolicyError, match="each loss would have a loop of its own"):
        gr.transform(model, [weigh, gr.on("error:rec.l0/h", ClipByNorm(1.0))])(x)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.rec = nn.Linear(FEATURES, FEATURES).double(), nn.GRU(FEATURES, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(lambda x: self.rec(self.inner(x))[0], x, use_reentrant=False)
        return output


@pytest.mark.parametrize("policy", [[], INSIDE], ids=["plain", "inside"])
def test_in_a_checkpoint(policy: Any) -> None:
    model, x = Checkpointed(), torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    rewritten = gr.transform(model, policy)

    assert_same((rewritten(x),), (model(x),), list(model.parameters()))
    assert len([a for a in rewritten.monitor.latest() if a.startswith("norm@")]) == (2 * LENGTH if policy else 0)
    with torch.no_grad():
        assert torch.equal(rewritten(x), model(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recurrent(nn.LSTM(FEATURES, FEATURES).double()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)[0]
        return x


def test_regions() -> None:
    model, x = Stack(), torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    rewritten = gr.transform(model, gr.on("error:*.l0/h", Observe("norm")), regions="blocks.*")

    assert_same((rewritten(x),), (model(x),), list(model.parameters()))
    names = {a.partition("#")[0] for a in rewritten.monitor.latest()}
    assert names == {f"norm@error:blocks.{n}.rec.l0/h" for n in range(3)}
    assert len(rewritten.monitor.latest()) == 3 * LENGTH


def test_a_backend_says_that_dynamo_traces_no_recurrent_layers() -> None:
    model, backend = made("lstm"), make_backend(gr.on("error:rec.l0/h", Observe("norm")), None, AotEager())
    run = torch.compile(model, backend=backend)
    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64)
    outputs = run(x)
    with pytest.warns(UserWarning, match=r"traces no nn\.RNN, .* \(rec\).*torch\._dynamo\.config\.allow_rnn = True"):
        weighted(outputs).backward()
    assert "allow_rnn = True" in str(backend.explain())


def test_explanations_tell_of_the_iterations_once() -> None:
    rewritten = gr.transform(made("lstm"), gr.on("error:rec.l0/h", ClipByNorm(1.0)))
    weighted(rewritten(torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64))).backward()
    text = str(rewritten.explain())

    assert f"error:rec.l0/h ({LENGTH} iterations): ClipByNorm" in text
    assert text.count("ClipByNorm") == 1


@pytest.mark.inductor
def test_as_a_backend_of_torch_compile() -> None:
    model = made("lstm")
    backend = gr.backend(gr.on("error:*l0/h", Observe("norm")))
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(model, backend=backend)
        for length in (LENGTH, LENGTH + 2):
            x = torch.randn(length, BATCH, FEATURES, dtype=torch.float64)
            found, wanted = compiled(x), model(x)
            own = torch.autograd.grad(weighted(found), list(model.parameters()))
            other = torch.autograd.grad(weighted(wanted), list(model.parameters()))
            for a, b in zip((*found, *own), (*wanted, *other), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
            assert len(backend.monitor.latest()) == length


def test_a_skipped_update() -> None:
    model = made("gru")
    rewritten = gr.transform(model, gr.on("error:rec.l0/h", CheckFinite("skip")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gr.guard(optimizer, rewritten)
    x, known = torch.randn(LENGTH, BATCH, FEATURES, dtype=torch.float64), []
    for scale in (1.0, float("nan"), 1.0):
        before = model.rec.weight_hh_l0.detach().clone()
        (weighted(rewritten(x)) * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        known.append(torch.equal(before, model.rec.weight_hh_l0))

    assert known == [False, True, False]
    assert rewritten.monitor.skipped == 1


BOUND = 0.05


class WithHead(nn.Module):
    def __init__(self, layer: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.rnn = layer(3, 4, batch_first=True, **settings)
        self.head = nn.Linear(4 * (1 + self.rnn.bidirectional), 2)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(x)
        return self.head(output).square().sum()


def clipped_by_a_hook(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    model = copy.deepcopy(model)
    model.rnn.register_forward_hook(lambda _, __, out: out[0].register_hook(lambda g: g.clamp(-BOUND, BOUND)) and None)
    model(x).backward()
    return gradients_of(model)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("input_needs_grad", [False, True])
def test_clip_at_the_output(layer: type[nn.RNNBase], input_needs_grad: bool) -> None:
    plain, x = WithHead(layer, num_layers=2, bidirectional=True), torch.randn(2, 5, 3)
    wanted = clipped_by_a_hook(plain, x)
    x.requires_grad_(input_needs_grad)
    model = gr.transform(plain, gr.on("error:rnn#0", ClipByValue(BOUND)))
    model(x).backward()

    assert any(str(s) == "error:rnn" for g in model.explain().graphs for s in g.sites)
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, wanted[name])
    (free,) = torch.autograd.grad(plain(x), [plain.rnn.weight_ih_l0])
    assert not torch.allclose(free, wanted["rnn.weight_ih_l0"])  # the clip acts


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_evaluation(layer: type[nn.RNNBase]) -> None:
    plain, x = WithHead(layer), torch.randn(2, 5, 3)
    model = gr.transform(plain, gr.on("gradient:*", Scale(2.0)))
    model(x).backward()

    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        assert torch.equal(model.eval()(x), plain.eval()(x))
    assert not x.requires_grad
    assert torch.backends.mkldnn.enabled == torch.backends.mkldnn.is_available()


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.inductor)])
@pytest.mark.parametrize("name", LAYERS)
def test_cudnn_s_operator(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments, results, reserve and weights, with cuDNN's layers computed on the CPU; the reserve stays as it was."""
    monkeypatch.setattr(recurrent, "has_cudnn", lambda _: True)
    settings = {
        "num_layers": 2,
        "bidirectional": True,
        "batch_first": True,
        **({"proj_size": 3} if name == "lstm" else {}),
    }
    model = made(name, **settings)
    rewritten = gr.transform(model, gr.on("error:rec", Observe("norm")))
    if compiled:
        rewritten.compile()
    with cudnn_on_cpu():
        for length in (LENGTH, 9):
            x = torch.randn(BATCH, length, FEATURES, dtype=torch.float64)
            assert_same(rewritten(x), model(x), list(model.parameters()))
        loss = weighted(rewritten(x))
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        assert all(map(torch.equal, first, torch.autograd.grad(loss, list(model.parameters()))))
        assert "cudnn_layers_backward" in rewritten.trace(x).code
    assert len(rewritten.explain().graphs) == 1
