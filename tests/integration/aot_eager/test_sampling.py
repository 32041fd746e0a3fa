"""Sampling: which steps are measured, with what records; gradients never depend on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByNorm, Keep, Observe

from models.small import TwoLayers

CLIP = gr.on("error:one", ClipByNorm(1e-2))
STEPS = 12


def batch(step: int, part: int = 0, rows: int = 5) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(100 * step + part))


def train(
    policy: Any,
    monitor: gr.Monitor | None = None,
    *,
    build: Callable[[], nn.Module] = TwoLayers,
    parts: int = 1,
    is_guarded: bool = True,
    each: Callable[[int, Any], None] = lambda step, model: None,
    rows: Callable[[int], int] = lambda step: 5,
    **options: Any,
) -> tuple[Any, list[dict[str, float]], list[Tensor]]:
    """Train; return the model, the records of each step, and the parameters at the end."""
    torch.manual_seed(0)
    model = gr.transform(build(), policy, monitor=monitor, **options)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_guarded:
        optimizer = gr.guard(optimizer, model)
    rows_of: list[dict[str, float]] = []
    for step in range(STEPS):
        each(step, model)
        for part in range(parts):
            model(batch(step, part, rows(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        rows_of.append(dict(model.monitor.latest()))
    return model, rows_of, [p.detach().clone() for p in model.parameters()]


def steps_with(rows: list[dict[str, float]], record: str) -> list[int]:
    return [step for step, row in enumerate(rows) if record in row]


def measurements(model: Any) -> list[str]:
    return [graph.measured for graph in model.explain().graphs]


@pytest.mark.broad
@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize(
    ("policy", "sample", "expected", "graphs"),
    [
        (gr.on("error:two", Observe("norm")), 1, range(STEPS), ["all"]),
        (gr.on("error:two", Observe("norm")), 5, (0, 5, 10), ["all", "nothing"]),
        (gr.on("error:two", Observe("norm", every=4)), 1, (0, 4, 8), ["all", "nothing"]),
        (gr.on("error:two", Observe("norm", every=4)), 3, (0,), ["all", "nothing"]),
        (gr.on("error:two", Observe("norm", every=3)), 2, (0, 6), ["all", "nothing"]),
        (lambda s: Observe("norm", every=4) if s.matches("error:two") else None, 1, (0, 4, 8), ["all", "nothing"]),
        (gr.on("error:two", [Observe("norm", every=6), Observe("max_abs")]), 1, (0, 6), ["all", "every step"]),
        (
            gr.on("error:two", [Observe("norm", every=6), Observe("max_abs")]),
            2,
            (0, 6),
            ["all", "nothing", "every step"],
        ),
    ],
)
def test_steps_that_are_due(policy: Any, sample: int, expected: Any, graphs: list[str], is_guarded: bool) -> None:
    model, rows, end = train([policy, CLIP], gr.Monitor(sample=sample), is_guarded=is_guarded)
    assert steps_with(rows, "norm@error:two") == list(expected)
    assert steps_with(rows, "norm@error:one") == list(range(STEPS)), "the clip's own records"
    assert measurements(model) == graphs
    _, _, plain = train([CLIP], is_guarded=is_guarded)
    assert all(torch.equal(a, b) for a, b in zip(end, plain, strict=True))
    assert [step.step for step in model.monitor.steps()] == list(range(STEPS))


@pytest.mark.broad
def test_values_are_those_of_every_step() -> None:
    policy = [gr.on("error:*", Observe("norm", "max_abs", every=3)), gr.on("gradient:*", Observe("norm", every=3))]
    _, sampled, _ = train(policy)
    _, every, _ = train([gr.on("error:*", Observe("norm", "max_abs")), gr.on("gradient:*", Observe("norm"))])
    for step, (row, whole) in enumerate(zip(sampled, every, strict=True)):
        assert row == (whole if step % 3 == 0 else {"lr@optimizer:0": 0.1})


@pytest.mark.broad
def test_records_that_are_not_due_are_discarded() -> None:
    policy = [
        gr.on("error:two", Observe("norm", every=2)),
        gr.on("error:one", [Observe("norm", every=3), Keep(every=4)]),
    ]
    kept: list[int] = []

    def each(step: int, model: Any) -> None:
        if step and model.monitor.kept():
            kept.append(step - 1)

    _, rows, _ = train(policy, each=each)
    assert steps_with(rows, "norm@error:two") == [0, 2, 4, 6, 8, 10]
    assert steps_with(rows, "norm@error:one") == [0, 3, 6, 9]
    assert kept == [0, 4, 8]


def test_a_step_that_is_asked_for_has_all_measurements() -> None:
    def each(step: int, model: Any) -> None:
        if step == 7:
            model.monitor.sample_next()

    policy = [gr.on("error:two", Observe("norm")), gr.on("error:one", Observe("norm", every=1000))]
    _, rows, _ = train(policy, gr.Monitor(sample=1000), each=each)
    assert steps_with(rows, "norm@error:two") == steps_with(rows, "norm@error:one") == [0, 7]


@pytest.mark.broad
def test_a_request_between_micro_batches_is_for_the_next_step() -> None:
    torch.manual_seed(0)
    model = gr.transform(TwoLayers(), gr.on("error:two", Observe("norm")), monitor=gr.Monitor(sample=1000))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    found = []
    for step in range(4):
        for part in range(3):
            if (step, part) == (1, 1):
                model.monitor.sample_next()
            model(batch(step, part)).sum().backward()
            found.append("norm@error:two" in model.monitor.latest())
        optimizer.step()
    assert found == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3


@pytest.mark.broad
def test_all_micro_batches_of_a_step_are_measured() -> None:
    model, _, _ = train(gr.on("error:two", Observe("norm")), gr.Monitor(sample=4), parts=3)
    there = [not math.isnan(value) for value in model.monitor.history("norm@error:two")]
    assert there == ([True] * 3 + [False] * 9) * 3


def test_a_change_of_the_sample_compiles_nothing() -> None:
    def each(step: int, model: Any) -> None:
        model.monitor.sample = (1, 2, 5)[step // 4]

    model, rows, _ = train(gr.on("error:two", Observe("norm")), each=each)
    assert steps_with(rows, "norm@error:two") == [0, 1, 2, 3, 4, 6, 10]
    assert measurements(model) == ["all", "nothing"]


@pytest.mark.broad
def test_checks() -> None:
    """Checks that raise or skip are in every step; those that only measure are sampled."""
    policy = [
        gr.on("error:one", CheckFinite("skip")),
        gr.on("error:two", CheckFinite("record")),
        gr.on("activation:two", CheckFinite("raise")),
    ]
    model, rows, _ = train(policy, gr.Monitor(sample=4))
    assert steps_with(rows, "nonfinite@error:one") == list(range(STEPS))
    assert steps_with(rows, "nonfinite@activation:two") == list(range(STEPS))
    assert steps_with(rows, "nonfinite@error:two") == [0, 4, 8]
    with pytest.raises(gr.NonFiniteError, match="step 12"):
        model(torch.full((5, 4), math.inf)).sum().backward()
    assert model.monitor.skipped == 0


@pytest.mark.broad
def test_names_of_records_do_not_depend_on_the_step() -> None:
    """The norm is the clip's in each step, and the second measurement keeps its name."""
    policy = gr.on("error:two", [Observe("norm", every=3), ClipByNorm(1e-3), Observe("norm", every=3)])
    _, rows, _ = train(policy)
    own = {"norm@error:two", "bound@error:two", "factor@error:two", "lr@optimizer:0"}
    for step, row in enumerate(rows):
        assert set(row) == own | ({"norm.2@error:two"} if step % 3 == 0 else set())


@pytest.mark.broad
@pytest.mark.parametrize("kind", ["error:two", "gradient:two.weight", "step:two.weight"])
def test_a_clip_records_what_is_observed_beside_it(kind: str) -> None:
    plain, alone, beside = (
        train([gr.on(kind, actions), gr.on(kind, ClipByNorm(1e-3, log=True))])
        for actions in (Observe("zeros"), Observe("norm", "max_abs"), Observe("norm", "zeros", "mean_abs"))
    )
    names = {f"{name}@{kind}" for name in ("norm", "bound", "factor", "max_abs", "mean_abs", "clipped")}
    for _, rows, end in (plain, alone, beside):
        found = rows[0].keys() - {"lr@optimizer:0"}
        assert found - {f"zeros@{kind}"} == names
        assert rows[0][f"norm@{kind}"] == pytest.approx(plain[1][0][f"norm@{kind}"])
        assert all(torch.equal(a, b) for a, b in zip(end, plain[2], strict=True))


@pytest.mark.parametrize("is_observed", [False, True])
def test_the_norm_of_a_clip_is_that_of_the_whole_batch_where_it_is_observed(is_observed: bool) -> None:
    torch.manual_seed(0)
    actions = [*[Observe("norm")] * is_observed, ClipByNorm(1e-3)]
    model = gr.transform(TwoLayers(), gr.on("error:two", actions))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for part in range(2):
        model(batch(part)).square().sum().backward()
    optimizer.step()
    norms = model.monitor.history("norm@error:two")

    (whole,) = model.monitor.history("norm@error:two", per="step")
    assert norms[0] != norms[1]
    assert whole == pytest.approx(math.hypot(*norms) if is_observed else sum(norms) / 2)


def test_sampled_measurements_of_parameters_keep_their_names() -> None:
    rules = [gr.on("param:two.weight", Observe("norm", every=every)) for every in (2, 3)]
    _, rows, _ = train([*rules, gr.on("param:two.weight", [Observe("nonfinite"), CheckFinite("record")])])
    for step, row in enumerate(rows):
        found = {key.partition("@")[0] for key in row if key.endswith("@param:two.weight")}
        assert found == {"nonfinite", *["norm"] * (step % 2 == 0), *["norm.2"] * (step % 3 == 0)}


@pytest.mark.broad
def test_step_sites_and_update_ratios() -> None:
    torch.manual_seed(0)
    policy = [gr.on("step:*", [Observe("norm", "max_abs"), ClipByNorm(1e-3)]), gr.on("error:two", Observe("norm"))]
    model = gr.transform(TwoLayers(), policy, monitor=gr.Monitor(sample=3))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model, update_ratios=True)
    rows = []
    for step in range(7):
        model(batch(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        rows.append(dict(model.monitor.latest()))
    for record in ("max_abs@step:one.weight", "update_ratio@gradient:one.weight"):
        assert steps_with(rows, record) == [0, 3, 6]
    assert steps_with(rows, "norm@step:one.weight") == list(range(7))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Blocks(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


class Broken(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[2](self.blocks[1](x))


KINDS: dict[str, dict[str, Any]] = {
    "whole": {"build": Blocks},
    "checkpoints": {"build": lambda: Blocks(checkpoints=True)},
    "regions": {"build": Blocks, "regions": "blocks.*"},
    "regions in checkpoints": {"build": lambda: Blocks(checkpoints=True), "regions": "blocks.*"},
    "graph break": {"build": Broken, "fullgraph": False},
    "dynamic": {"build": Blocks, "dynamic": True, "rows": lambda step: 3 + step % 4},
    "new shapes": {"build": Blocks, "dynamic": False, "rows": lambda step: 3 + step // 6},
}


@pytest.mark.broad
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:the tracer skipped")
def test_kinds_of_models(kind: str) -> None:
    clip = gr.on("error:blocks.?.linear", ClipByNorm(1e-2))
    observe = gr.on("error:blocks.?.linear", Observe("max_abs", "norm", every=4))
    model, rows, end = train([observe, clip], **KINDS[kind])
    _, _, plain = train([clip], **KINDS[kind])
    _, every, _ = train([gr.on("error:blocks.?.linear", Observe("max_abs", "norm")), clip], **KINDS[kind])
    assert all(torch.equal(a, b) for a, b in zip(end, plain, strict=True))
    for number in range(3):
        record = f"max_abs@error:blocks.{number}.linear"
        assert steps_with(rows, record) == [0, 4, 8]
        assert [rows[n][record] for n in (0, 4, 8)] == [every[n][record] for n in (0, 4, 8)]
        assert steps_with(rows, f"norm@error:blocks.{number}.linear") == list(range(STEPS))
    assert set(measurements(model)) == {"all", "nothing"}


@pytest.mark.broad
def test_a_saved_step_goes_on() -> None:
    policy = gr.on("error:two", Observe("norm", every=5))
    model, _, _ = train(policy)  # 12 steps
    state = gr.state_dict(model)
    loaded = gr.transform(TwoLayers(), policy)
    gr.load_state_dict(loaded, state)
    optimizer = gr.guard(torch.optim.SGD(loaded.parameters(), lr=0.1), loaded)
    found = []
    for step in range(12, 18):
        loaded(batch(step)).sum().backward()
        optimizer.step()
        found.append("norm@error:two" in loaded.monitor.latest())
    assert found == [False, False, False, True, False, False]
    assert measurements(loaded) == ["nothing", "all"], "each graph is compiled when it is first needed"


@pytest.mark.broad
def test_trace_shows_all_measurements() -> None:
    model, _, _ = train(gr.on("error:two", Observe("norm", every=5)))
    assert [str(edit.site) for edit in model.trace(batch(0)).edits] == ["error:two"]


def test_logged_values_belong_to_their_step() -> None:
    model = gr.transform(TwoLayers(), gr.on("error:two", Observe("norm")), monitor=gr.Monitor(sample=4))
    for step in range(6):
        loss = model(batch(step)).square().sum()
        loss.backward()
        model.monitor.log("loss", float(step))
    assert model.monitor.history("loss@run") == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: gr.Monitor(sample=0),
        lambda: gr.Monitor(sample=True),
        lambda: gr.Monitor(sample=1.5),
        lambda: Observe("norm", every=0),
        lambda: Observe("norm", every=-3),
        lambda: Keep(every=0),
    ],
)
def test_wrong_intervals(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="is a whole number >= 1, got"):
        make()


def test_a_wrong_sample_leaves_the_monitor_as_it_was() -> None:
    monitor = gr.Monitor(sample=3)
    with pytest.raises(ValueError, match="sample is a whole number"):
        monitor.sample = 0
    assert monitor.sample == 3
    assert repr(monitor) == "Monitor(capacity=1000, every=None, sample=3): 0 steps"
    assert repr(Observe("norm", every=7)) == "Observe('norm', every=7)"
    assert repr(Keep(every=7)) == "Keep(every=7)"


@pytest.mark.broad
def test_two_optimizers_of_one_step() -> None:
    torch.manual_seed(0)
    policy = [gr.on("step:*", Observe("norm")), gr.on("error:two", Observe("norm"))]
    model = gr.transform(TwoLayers(), policy, monitor=gr.Monitor(sample=2))
    optimizers = [gr.guard(torch.optim.SGD(part.parameters(), lr=0.1), model) for part in (model.one, model.two)]
    rows = []
    for step in range(6):
        if step == 3:
            model.monitor.sample_next()
        model(batch(step)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        rows.append(dict(model.monitor.latest()))
    for record in ("norm@error:two", "norm@step:one.weight", "norm@step:two.weight"):
        assert steps_with(rows, record) == [0, 2, 3, 4]


def test_step_sites_alone_compile_one_graph() -> None:
    model, rows, _ = train(gr.on("step:*", Observe("norm", every=5)))
    assert measurements(model) == ["all"]
    assert steps_with(rows, "norm@step:one.weight") == [0, 5, 10]
    assert [step.step for step in model.monitor.steps()] == list(range(STEPS))


@pytest.mark.broad
def test_discarded_micro_batches_are_no_part_of_the_next_update() -> None:
    model = gr.transform(TwoLayers(), gr.on("error:two", Observe("norm")))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.full((2, 4), math.inf)).square().sum().backward()
    optimizer.zero_grad()  # as a GradScaler lets it be, which found an infinity
    for _ in range(2):
        model(batch(0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    bad, *good = model.monitor.history("norm@error:two", per="step")
    assert not math.isfinite(bad)
    assert len(good) == 2
    assert all(map(math.isfinite, good))


def test_the_mean_over_ranks_is_that_of_their_own_figures() -> None:
    model = gr.transform(TwoLayers(), gr.on("error:two", Observe("nan", "norm")))
    first, second = model(torch.full((2, 4), math.nan)), model(batch(0))
    (first.sum() + second.sum()).backward()
    own = model.monitor.latest()
    assert model.monitor.reduce("mean")["nan@error:two"] == own["nan@error:two"]
    assert model.monitor.reduce("mean")["norm@error:two"] == pytest.approx(own["norm@error:two"], nan_ok=True)
