"""Who made a skipped update: micro-batch, row and layers, from a replay that changes nothing."""

from __future__ import annotations

import copy
import gc
import html
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByValue, Observe, SkipSpikes
from gradrewrite.viz import report

from helpers import mostly_slow
from models.culprits import ROWS, Poison, Task, example_norms, task_of
from models.small import Lambda

POISONS: tuple[Poison, ...] = ("scaled label", "repeated token", "finite outlier")
SPIKES = gr.on("step:*", SkipSpikes(6.0, window=8))


class Run:
    """A training of a few steps, until one row of one micro-batch is poisoned."""

    def __init__(self, task: Task, *, policy: Any = SPIKES, num_micro: int = 1, compiled: bool = False) -> None:
        torch.manual_seed(0)
        self.task, self.num_micro = task, num_micro
        self.model = gr.transform(task.make(), policy)
        if compiled:
            self.model.compile()
        self.optimizer = gr.guard(torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True), self.model)
        self.seed = 0
        self.batches: list[tuple[Tensor, ...]] = []

    def step(self, poisoned: tuple[int, int] | None = None) -> None:
        """One update; ``poisoned`` is a micro-batch and a row."""
        self.optimizer.zero_grad()
        self.batches = []
        for micro in range(self.num_micro):
            self.seed += 1
            row = poisoned[1] if poisoned is not None and poisoned[0] == micro else None
            batch = self.task.batch(self.seed, row)
            self.batches.append(batch)
            self.model.monitor.log_ids([f"{self.seed}.{n}" for n in range(ROWS)])
            self.backward(batch)
        self.optimizer.step()

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        out = self.model(*batch[: self.task.num_inputs])
        (self.task.loss(out, batch) / self.num_micro).backward()

    def until_spike(self, micro: int, row: int) -> None:
        for _ in range(6):
            self.step()
        before = self.model.monitor.skipped
        self.step((micro, row))
        assert self.model.monitor.skipped == before + 1


def assert_named(found: gr.Culprits, run: Run, micro: int, row: int) -> None:
    assert (found.rank, found.micro_batch, found.note) == (0, micro, "")
    assert found.rows[0].index == row
    assert found.rows[0].id == f"{run.seed - run.num_micro + 1 + micro}.{row}"
    assert found.rows[0].share > 0.5
    assert found.layers
    assert sum(layer.share for layer in found.layers) == pytest.approx(1)


def runs(number: int) -> Iterator[tuple[Poison, int]]:
    return ((POISONS[n % len(POISONS)], n) for n in range(number))


@pytest.mark.broad
@pytest.mark.parametrize(("poison", "number"), mostly_slow(list(runs(24)), quick=3))
def test_row_is_named(poison: Poison, number: int) -> None:
    run = Run(task_of(poison))
    row = (5 * number + 2) % ROWS
    run.until_spike(0, row)

    assert_named(run.model.monitor.culprits(), run, 0, row)


@pytest.mark.broad
@pytest.mark.parametrize(("poison", "number"), mostly_slow(list(runs(8)), quick=2))
def test_micro_batch_is_named(poison: Poison, number: int) -> None:
    run = Run(task_of(poison), num_micro=3)
    micro, row = number % 3, (3 * number + 1) % ROWS
    run.until_spike(micro, row)

    assert_named(run.model.monitor.culprits(), run, micro, row)


@pytest.mark.broad
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("poison", ["scaled label", "repeated token"])
def test_norms_are_those_of_a_loop_over_rows(poison: Poison, reduction: str) -> None:
    task = task_of(poison, reduction=reduction)
    run = Run(task)
    run.until_spike(0, 3)
    found = run.model.monitor.culprits(k=ROWS)

    expected = example_norms(task, run.model.original, run.batches[0], reduction)
    got = torch.tensor([row.norm for row in sorted(found.rows)])
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-9)
    shares = expected.square() / expected.square().sum()
    torch.testing.assert_close(
        torch.tensor([row.share for row in sorted(found.rows)]).double(), shares, rtol=1e-3, atol=1e-9
    )


@pytest.mark.broad
def test_replay_changes_nothing() -> None:
    run = Run(
        task_of("repeated token", dropout=0.3), policy=[SPIKES, gr.on("gradient:*", Observe("norm"))], num_micro=2
    )
    run.model.register_buffer("extra", torch.ones(2))
    run.until_spike(1, 4)

    def state() -> list[Any]:
        model, monitor = run.model, run.model.monitor
        moments = [v.clone() for s in run.optimizer.state.values() for v in s.values()]
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        tensors = [*(t.clone() for t in model.state_dict().values()), *grads, *moments, torch.get_rng_state()]
        records = [monitor.latest(), [monitor.history(name) for name in monitor.latest()]]
        return [*tensors, repr(records), model.training, monitor.skipped, repr(monitor.steps())]

    before = state()
    first = run.model.monitor.culprits()
    after = state()

    assert len(before) > 20
    assert all(torch.equal(b, a) if isinstance(b, Tensor) else b == a for b, a in zip(before, after, strict=True))
    assert run.model.monitor.culprits() == first


@pytest.mark.broad
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.inductor)])
def test_dropout_draws_the_same_numbers(compiled: bool) -> None:
    """The norm of a batch of one row is that of its gradient, which dropout changes."""
    task = task_of("scaled label", dropout=0.5)
    run = Run(task, compiled=compiled)
    run.until_spike(0, 2)
    found = run.model.monitor.culprits(k=ROWS)
    grads = {n: p.grad.double() for n, p in run.model.named_parameters() if p.grad is not None}

    assert found.rows[0].index == 2
    # The sum of squares of the dominating row is nearly that of the gradient: to the share of the others.
    norm = float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt())
    others = sum(row.norm for row in found.rows[1:])
    assert abs(found.rows[0].norm - norm) <= others
    assert others < 0.05 * norm


@pytest.mark.inductor
@pytest.mark.parametrize("poison", POISONS)
def test_compiled_model(poison: Poison) -> None:
    run = Run(task_of(poison, dropout=0.1), num_micro=2, compiled=True)
    run.until_spike(1, 6)

    assert_named(run.model.monitor.culprits(), run, 1, 6)


@pytest.mark.broad
def test_input_changed_in_place_is_said() -> None:
    run = Run(task_of("scaled label"), policy=[SPIKES, gr.on("gradient:*", Observe("norm"))], num_micro=2)
    run.until_spike(1, 3)
    run.batches[0][0].zero_()
    found = run.model.monitor.culprits()

    assert found.rows == ()
    assert found.micro_batch == 1  # by the norms of the gradients
    assert {layer.name for layer in found.layers} == {"net.0", "net.3"}
    assert "input x was changed in place since the step" in found.note
    assert "input x was changed in place" in str(found)


@pytest.mark.broad
def test_next_forward_lets_go_of_the_step() -> None:
    run = Run(task_of("scaled label"), policy=[SPIKES, gr.on("gradient:*", Observe("norm"))], num_micro=2)
    run.until_spike(1, 3)
    with torch.no_grad():
        run.model(run.batches[0][0])  # no step begins
    assert run.model.monitor.culprits().rows
    inputs = [weakref.ref(t) for batch in run.batches for t in batch]
    run.batches = []
    gc.collect()
    assert inputs[0]() is not None
    run.model(run.task.batch(99, None)[0])
    gc.collect()

    assert all(ref() is None for ref in inputs)
    found = run.model.monitor.culprits()
    assert (found.micro_batch, found.rows) == (1, ())
    assert found.layers
    assert found.note.startswith("rows are not known: the step can be replayed until the next one's first forward")


@pytest.mark.broad
def test_nothing_is_known_without_records() -> None:
    run = Run(task_of("scaled label"), num_micro=2)
    run.until_spike(1, 3)
    run.model(run.task.batch(99, None)[0])

    assert run.model.monitor.culprits().micro_batch is None


@pytest.mark.broad
@pytest.mark.parametrize("policy", [[], gr.on("gradient:*", Observe("norm")), gr.on("gradient:*", CheckFinite("warn"))])
def test_nothing_is_kept_without_a_policy_that_skips(policy: Any) -> None:
    run = Run(task_of("scaled label"), policy=policy)
    run.step()
    run.step()

    assert run.model.monitor._recorder.links.kept_step is None
    with pytest.raises(RuntimeError, match="no update was skipped"):
        run.model.monitor.culprits()


def test_nothing_is_kept_without_a_guard() -> None:
    task = task_of("scaled label")
    model = gr.transform(task.make(), SPIKES)
    x, y = task.batch(0, None)
    task.loss(model(x), (x, y)).backward()

    assert model.monitor._recorder.links.kept_step is None


@pytest.mark.broad
def test_discarded_gradients_are_let_go_of() -> None:
    run = Run(task_of("scaled label"))
    for discard in (run.optimizer.zero_grad, run.model.zero_grad):
        run.until_spike(0, 1)
        run.optimizer.zero_grad()
        run.backward(run.task.batch(50, 5))
        discard()
        run.step((0, 2))
        found = run.model.monitor.culprits()
        assert (found.micro_batch, found.rows[0].index) == (0, 2)


@pytest.mark.broad
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_check_finite(value: float) -> None:
    run = Run(task_of("scaled label"), policy=gr.on("gradient:*", CheckFinite("skip")), num_micro=3)
    run.step()
    run.optimizer.zero_grad()
    for micro in range(3):
        x, y = run.task.batch(micro, None)
        if micro == 1:
            x[4, 0] = value
        run.model.monitor.log_ids(torch.arange(ROWS) + 100 * micro)
        run.backward((x, y))
    run.optimizer.step()
    found = run.model.monitor.culprits()

    assert (found.micro_batch, found.rows[0].index, found.rows[0].id, found.rows[0].share) == (1, 4, 104, 1.0)
    assert [row.share for row in found.rows[1:]] == [0.0] * 4
    assert found.layers[0].share == 1.0
    assert "a finite check failed" in str(found)


@pytest.mark.broad
def test_batch_norm_mixes_examples() -> None:
    def make_net() -> Lambda:
        return Lambda(
            lambda net, x: net.b(net.norm(net.a(x))), a=nn.Linear(5, 8), norm=nn.BatchNorm1d(8), b=nn.Linear(8, 3)
        )

    task = task_of("scaled label")
    run = Run(Task(make_net, task.batch, task.loss, 1), num_micro=2)
    run.until_spike(1, 3)
    found = run.model.monitor.culprits()

    assert (found.micro_batch, found.rows[0].index, found.rows[0].id) == (1, 3, f"{run.seed}.3")
    assert found.note.startswith("rows are by the norm of error:b, as per-example gradients are refused: ")
    assert "monitor.culprits() needs the gradient of each example" in found.note
    assert {layer.name for layer in found.layers} == {"a", "norm", "b"}


def test_buffers_that_the_forward_changes() -> None:
    """The scale of each micro-batch is what it was before its forward."""

    class Net(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.a, self.is_updated = nn.Linear(5, 3), True
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.is_updated:
                self.scale.mul_(-1.0).sub_(0.01)
            return self.a(x) * self.scale

    task = task_of("scaled label")
    run = Run(Task(Net, task.batch, task.loss, 1))
    run.until_spike(0, 3)
    now = run.model.scale.clone()
    found = run.model.monitor.culprits(k=ROWS)
    assert torch.equal(run.model.scale, now)

    plain = copy.deepcopy(run.model.original)
    plain.is_updated = False
    plain.scale.mul_(-1.0).sub_(0.01)  # the skip has taken it back
    expected = example_norms(Task(Net, task.batch, task.loss, 1), plain, run.batches[0])
    got = torch.tensor([row.norm for row in sorted(found.rows)]).double()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.broad
def test_actions_at_the_gradients_do_not_hide_the_row() -> None:
    policy = [SPIKES, gr.on("gradient:*", [ClipByValue(1e6), lambda g: g * 1.0])]
    run = Run(task_of("finite outlier"), policy=policy)
    run.until_spike(0, 7)

    assert_named(run.model.monitor.culprits(), run, 0, 7)


@pytest.mark.broad
def test_policy_as_a_callback() -> None:
    run = Run(task_of("scaled label"), policy=lambda site: SkipSpikes(6.0, window=8) if site.kind == "step" else None)
    run.until_spike(0, 5)

    assert_named(run.model.monitor.culprits(), run, 0, 5)


@pytest.mark.broad
@pytest.mark.parametrize("layers", ["net", "net.0"])
def test_regions(layers: str) -> None:
    task = task_of("scaled label")
    torch.manual_seed(0)
    model = gr.transform(task.make(), SPIKES, regions=layers)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    for step in range(7):
        for micro in range(2):
            batch = task.batch(10 * step + micro, 3 if (step, micro) == (6, 1) else None)
            task.loss(model(batch[0]), batch).backward()
        optimizer.step()
        if step < 6:
            optimizer.zero_grad()
    found = model.monitor.culprits()

    assert (found.micro_batch, found.rows[0].index) == (1, 3)
    assert found.rows_by.startswith("error:net")
    assert "regions" in found.note


@pytest.mark.inductor
def test_backend() -> None:
    task = task_of("repeated token")
    torch.manual_seed(0)
    model = task.make()
    backend = gr.backend(SPIKES)
    compiled = torch.compile(model, backend=backend)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1e-3), backend)
    for step in range(7):
        optimizer.zero_grad()
        compiled(*task.batch(step, 3 if step == 6 else None)).backward()
        optimizer.step()

    assert backend.monitor.culprits().rows[0].index == 3


@pytest.mark.broad
def test_ids_of_a_wrong_length() -> None:
    run = Run(task_of("scaled label"))
    run.until_spike(0, 5)
    run.optimizer.zero_grad()
    run.model.monitor.log_ids(range(3))
    run.backward(run.task.batch(5, 5))
    run.optimizer.step()
    found = run.model.monitor.culprits()

    assert (found.rows[0].index, found.rows[0].id) == (5, None)
    assert "monitor.log_ids was given 3 of them, and there are 8 rows" in found.note
    for wrong in ("abc", 3, torch.ones(3), torch.ones(2, 2, dtype=torch.int64)):
        with pytest.raises(TypeError, match="log_ids takes integers or strings"):
            run.model.monitor.log_ids(wrong)


def test_report() -> None:
    run = Run(task_of("scaled label"))
    run.until_spike(0, 5)
    found = run.model.monitor.culprits(k=2)

    lines = str(found).splitlines()
    assert lines[0].startswith("update 6 was skipped (total_norm@step:group:default was ")
    assert lines[0].endswith("above its limit " + lines[0].split("limit ")[1])
    assert lines[0].endswith("rank 0, micro-batch 1")
    assert lines[1].startswith(f"  row 5 (id '{run.seed}.5'): gradient norm ")
    assert len(found.rows) == len(found.layers) == 2
    assert "row 5" in found._repr_html_()
    with pytest.raises(AttributeError):
        found.step = 3
    with pytest.raises(ValueError, match="k is a whole number"):
        run.model.monitor.culprits(0)


@pytest.mark.broad
def test_run_log_and_report_have_the_skips_that_were_asked_about(tmp_path: Path) -> None:
    run = Run(task_of("scaled label"))
    run.model.monitor.to_jsonl(tmp_path / "run.jsonl")
    run.until_spike(0, 5)
    before = run.model.monitor.steps()
    text = str(run.model.monitor.culprits())
    run.step()
    run.model.monitor.flush()
    steps = gr.read_jsonl(tmp_path / "run.jsonl")

    assert run.model.monitor.steps()[:-1] == before
    assert [step.culprits for step in steps] == [""] * 6 + [text, ""]
    for source in (run.model.monitor, tmp_path / "run.jsonl"):
        page = Path(report(source).render(tmp_path / "report")).read_text()
        assert html.escape(text) in page


@pytest.mark.broad
def test_an_update_of_another_optimizer_since() -> None:
    """Its parameters are others than in the step: no rows are named that a replay with them would give."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = gr.transform(net, gr.on("step:2.*", SkipSpikes(3.0, window=8)))
    skipping = gr.guard(torch.optim.SGD(model[2].parameters(), lr=0.1), model)
    other = gr.guard(torch.optim.SGD(model[0].parameters(), lr=10.0), model)
    for step in range(8):
        skipping.zero_grad()
        other.zero_grad()
        y = torch.randn(6, 1)
        y[2] *= 1e4 if step == 7 else 1.0
        (model(torch.randn(6, 4)) - y).square().mean().backward()
        skipping.step()
    assert model.monitor.skipped == 1
    assert model.monitor.culprits().rows[0].index == 2
    other.step()
    found = model.monitor.culprits()
    assert not found.rows
    assert found.note
