"""Loops in Python, rolled again: against the unrolled loop, which torch and hooks agree with."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.backends.backend import make_backend
from gradrewrite.backends.engines import AotEager
from gradrewrite.passes import (
    CheckFinite,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    Keep,
    Observe,
    Scale,
)

from models import python_loops
from models.bytes_kept import bytes_behind
from models.loop_cases import FORWARDS, REASONS, LoopCase
from models.python_loops import Decoder
from models.recurrent_programs import program

Policy = Any
PROGRAMS, EACH = 200, 20
NUMBER = r"\d+\.\d+(e[+-]\d+)?"


def grown() -> Policy:
    """Return an action that remembers the size of errors and scales by it."""
    size = gr.State(init=1.0, name="size", dtype=torch.float64)

    def scaled(g: Tensor) -> Tensor:
        followed = 0.5 * size + g.abs().mean()
        size.set(followed)
        return g / (1 + followed)

    return scaled


def by_iteration(site: gr.Site) -> Any:
    return ClipByNorm(1e-3 * (1 + site.call)) if site.kind == "error" and site.call % 2 else None


POLICIES: dict[str, Callable[[], Policy]] = {
    "nothing": lambda: [],
    "clips": lambda: gr.on("error:*/*", ClipByNorm(1e-3, log=True)),
    "values": lambda: [gr.on("activation:*/*", Observe("norm")), gr.on("error:*", ClipByValue(1e-4))],
    "checks": lambda: [gr.on("error:*/*", CheckFinite("record")), gr.on("activation:*", CheckFinite("skip"))],
    "one": lambda: [gr.on("error:*/*#3", Scale(0.5)), gr.on("error:*#4", Keep())],
    "callback": lambda: by_iteration,
    "gradients": lambda: [gr.on("gradient:*", [Observe("norm"), ClipByGlobalNorm(0.1)])],
    "states": lambda: gr.on("error:*/*", grown()),
    "sampled": lambda: gr.on("error:*/*", Observe("norm", every=2)),
}


@contextlib.contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def trained(cls: Any, length: int, policy: Policy, loops: Any, steps: int = 2) -> tuple[Any, list[Any]]:
    """Return the model and what its steps give: loss, gradients, records, kept tensors."""
    torch.manual_seed(0)
    with float64_by_default():
        model = gr.transform(cls(), policy, loops=loops)
        found = []
        for _ in range(steps):
            given = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in cls.inputs(length))
            model.zero_grad()
            loss = model(*given)
            loss.backward()
            gradients = [p.grad for p in model.parameters()] + [x.grad for x in given if x.requires_grad]
            kept = {str(site): value for site, value in model.monitor.kept().items()}
            found.append((loss.detach(), gradients, model.monitor.latest(), kept))
    return model, found


def at_bound(records: dict[str, float]) -> set[str]:
    """Return the flags of clips whose norm is their bound but for rounding: an error that was clipped before."""
    sites = [name.partition("@")[2] for name in records if name.startswith("bound@")]
    norms = {site: (records[f"norm@{site}"], records[f"bound@{site}"]) for site in sites if f"norm@{site}" in records}
    return {f"clipped@{site}" for site, (norm, bound) in norms.items() if norm == pytest.approx(bound, rel=1e-9)}


def assert_equal(own: Any, other: Any, tolerance: float = 1e-12) -> None:
    for (loss, gradients, records, kept), (loss2, gradients2, records2, kept2) in zip(own, other, strict=True):
        torch.testing.assert_close(loss, loss2, rtol=tolerance, atol=tolerance)
        for a, b in zip(gradients, gradients2, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert set(records) == set(records2)
        for name in set(records) - at_bound(records):
            assert records[name] == pytest.approx(records2[name], rel=1e-9, abs=1e-15), name
        assert set(kept) == set(kept2)
        for site, value in kept.items():
            torch.testing.assert_close(value, kept2[site], rtol=tolerance, atol=tolerance)


def edits_of(graph: Any) -> list[str]:
    return sorted(f"{edit.site} {edit.text}" for edit in graph.edits)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cls", python_loops.ALL, ids=lambda cls: cls.__name__)
def test_rolled_loops_are_as_unrolled_ones(cls: Any, policy: str) -> None:
    rolled, own = trained(cls, 7, POLICIES[policy](), "rolled")
    unrolled, other = trained(cls, 7, POLICIES[policy](), None)

    assert_equal(own, other)
    states, states2 = gr.state_dict(rolled), gr.state_dict(unrolled)
    assert set(states) == set(states2)
    torch.testing.assert_close([states[k] for k in states], [states2[k] for k in states])
    for graph, plain in zip(rolled.explain().graphs, unrolled.explain().graphs, strict=True):
        assert {*map(str, graph.sites)} == {*map(str, plain.sites)}
        assert edits_of(graph) == edits_of(plain)
        assert graph.loops
        assert not any(loop.reason for loop in graph.loops)


def graphs_of(model: Any) -> Any:
    return model.explain().graphs


def run(model: Any, inputs: Sequence[Tensor]) -> list[Any]:
    """Run two steps; return what they give."""
    found: list[Any] = []
    for _ in range(2):
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        model.zero_grad()
        torch.manual_seed(0)
        outputs = model(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum((out * (n + 1)).sin().sum() for n, out in enumerate(outputs))
        loss.backward()
        gradients = [p.grad for p in model.parameters()] + [x.grad for x in given if x.requires_grad]
        found.append((loss.detach(), gradients, model.monitor.latest(), {}))
    return found


EVERYWHERE = [
    gr.on("error:*", [Observe("norm"), ClipByNorm(0.5)]),
    gr.on("error:*/*", Observe("norm")),
    gr.on("activation:*/*", Observe("norm")),
    gr.on("gradient:*", ClipByGlobalNorm(3.0)),
]


@pytest.mark.parametrize("name", FORWARDS)
def test_kinds_of_loops(name: str) -> None:
    found: list[Any] = []
    reports: list[Any] = []
    for loops in ("rolled", None):
        torch.manual_seed(0)
        model = gr.transform(LoopCase(name).double(), EVERYWHERE, loops=loops)
        found.append(run(model, [torch.randn(3, 7, 4, dtype=torch.float64)]))
        reports.append(graphs_of(model)[0])
    rolled, unrolled = reports

    assert_equal(*found)
    assert {*map(str, rolled.sites)} == {*map(str, unrolled.sites)}
    assert rolled.loops
    reasons = [loop.reason for loop in rolled.loops]
    if name in REASONS:
        assert any(REASONS[name] in reason for reason in reasons), reasons
    else:
        assert reasons == [""] * len(reasons)
        assert max(loop.iterations for loop in rolled.loops) >= 5


def test_iterations_before_the_loop_count() -> None:
    """In the first iteration of the decoder the loss is a number; in the last one nothing reads the cell state."""
    with float64_by_default():
        model = gr.transform(Decoder(), gr.on("error:*", Observe("norm")), loops="rolled")
        model(*Decoder.inputs(9)).backward()
    found = [site for site in graphs_of(model)[0].sites if site.name == "head" and site.kind == "error"]
    sites = sorted(found, key=lambda site: site.call)

    assert [(site.call, site.iteration) for site in sites] == [(0, None), *((n, n) for n in range(1, 7)), (7, None)]
    (row,) = model.monitor.history("norm@error:head", per="iteration")
    assert row == [model.monitor.latest()[f"norm@{site}"] for site in sites]


def test_backends_roll_loops() -> None:
    policy = gr.on("error:*", Observe("norm"))
    with float64_by_default():
        model, inputs = python_loops.Simulator(), python_loops.Simulator.inputs(9)
        backends = [make_backend(policy, None, AotEager(), loops) for loops in ("rolled", None)]
        for backend in backends:
            torch.compile(model, backend=backend)(*inputs).backward()

    rolled, unrolled = (backend.monitor.latest() for backend in backends)
    assert [loop.reason for loop in backends[0].explain().graphs[0].loops] == [""]
    assert not backends[1].explain().graphs[0].loops
    assert rolled == pytest.approx(unrolled, rel=1e-12)


@pytest.mark.pure
def test_other_loops_are_refused() -> None:
    text = """loops is "rolled", "unrolled" or None, got {'layers': 'layers.*'}; regions="layers.*" compiles a stack"""
    with pytest.raises(ValueError, match=re.escape(text)):
        gr.transform(torch.nn.Linear(2, 2), [], loops={"layers": "layers.*"})
    with pytest.raises(ValueError, match=re.escape("got 'roll'")):
        gr.backend([], loops="roll")


# Bytes kept for the backward, rolled and unrolled, for 20 iterations of batch 3 in float64. The stack of a carry has
# its first and its last value too, which the unrolled loop does not always keep.
KEPT = {
    "Cell": (27032, 29768),
    "Plain": (16112, 15968),
    "Decoder": (39664, 49400),
    "Simulator": (5856, 5856),
    "RungeKutta": (11712, 11520),
    "Masked": (12096, 13500),
    "Chunks": (3840, 3840),
}


@pytest.mark.parametrize("cls", python_loops.ALL, ids=lambda cls: cls.__name__)
def test_bytes_kept(cls: Any) -> None:
    found = []
    with float64_by_default():
        for loops in ("rolled", None):
            inputs = cls.inputs(20)
            model = gr.transform(cls(), gr.on("error:*", ClipByNorm(0.1)), loops=loops)
            found.append(bytes_behind(model(*inputs), [*inputs, *model.parameters()]))
    assert tuple(found) == KEPT[cls.__name__]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, PROGRAMS, EACH))
def test_random_programs(first: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gradrewrite")
    for seed in range(first, first + EACH):
        torch.compiler.reset()
        policy = POLICIES[random.Random(seed).choice(sorted(POLICIES))]
        found: list[Any] = []
        lines: list[list[str]] = []
        reports: list[Any] = []
        for loops in ("rolled", None):
            model, inputs, choices = program(seed)
            rewritten = gr.transform(model, policy(), loops=loops)
            caplog.clear()
            found.append(run(rewritten, inputs))
            lines.append(sorted(re.sub(NUMBER, "", r.message) for r in caplog.records if "clipped" in r.message))
            reports.append(graphs_of(rewritten)[0])
        assert_equal(*found)
        flags = at_bound(found[0][-1][2])
        assert flags or lines[0] == lines[1], choices
        assert {*map(str, reports[0].sites)} == {*map(str, reports[1].sites)}, choices
        assert reports[0].loops, choices
        # A loop of few iterations stays unrolled where the first ones have values without gradients.
        is_rolled = any(not loop.reason for loop in reports[0].loops)
        assert is_rolled or choices["length"] < 7, choices
