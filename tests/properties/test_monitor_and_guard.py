"""Monitor and guard over random sequences of backwards, steps, reads and writes, compared with plain lists."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import gradrewrite as gr
from gradrewrite.diagnostics.run_file import read_jsonl
from gradrewrite.passes import CheckFinite, Observe

from helpers import Probe

CAPACITY, RATE = 5, 0.5
POLICY = [gr.on("error:h", Observe("max_abs")), gr.on("gradient:w", CheckFinite("skip"))]
SEEN, COUNT, LOSS = "max_abs@error:h", "nonfinite@gradient:w", "loss@run"
LEARNING_RATE, SKIPPED = "lr@optimizer:0", "skipped@optimizer:0"
OURS = frozenset((SEEN, COUNT, LOSS, LEARNING_RATE, SKIPPED))  # a check adds what it saw of inputs and outputs


def exactly(records: Any) -> Any:
    return pytest.approx(records, rel=0, abs=0, nan_ok=True)


def ours(records: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in records.items() if name in OURS}


class Training(RuleBasedStateMachine):
    """Trains a model of one parameter ``w`` whose gradient is the input.

    Attributes:
        rows: The records of each backward.
        frozen: The rows that were the last one when they were written, as they were then, by their number.
        skipped: How many updates were skipped.
        w: The parameter.
        total: The gradient accumulated since it was thrown away; None if there is none.
        verdict: Whether a check failed since the last step or ``zero_grad``; None if nothing was checked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = gr.transform(Probe(1), POLICY, monitor=gr.Monitor(capacity=CAPACITY))
        self.monitor = self.model.monitor
        self.optimizer: Any = gr.guard(torch.optim.SGD(self.model.parameters(), lr=RATE), self.model)
        self.folder = tempfile.TemporaryDirectory()
        self.path: Path | None = None
        self.first_written = 0
        self.rows: list[dict[str, float]] = []
        self.frozen: dict[int, dict[str, float]] = {}
        self.skipped, self.w = 0, 0.0
        self.total: float | None = None
        self.verdict: bool | None = None

    def teardown(self) -> None:
        self.folder.cleanup()
        torch.compiler.reset()

    def judge(self) -> None:
        """The guard decides, or gives the update up."""
        if self.verdict is not None:
            self.rows[-1][SKIPPED] = float(self.verdict)
            self.skipped += self.verdict
            self.verdict = None

    @rule(value=st.sampled_from([1.0, -2.0, 0.25, 0.0]) | st.sampled_from([math.nan, math.inf, -math.inf]))
    def backward(self, value: float) -> None:
        if self.total is None:  # the gradients that were checked are gone
            self.judge()
        self.model(torch.tensor([value])).backward()
        self.rows.append({SEEN: abs(value), COUNT: float(not math.isfinite(value))})
        self.total = (self.total or 0.0) + value
        self.verdict = bool(self.verdict) or not math.isfinite(value)

    @rule()
    def zero_grad_of_the_optimizer(self) -> None:
        self.optimizer.zero_grad()
        self.judge()
        self.total = None

    @rule()
    def zero_grad_of_the_model(self) -> None:
        self.model.zero_grad()
        self.total = None

    @rule()
    def step(self) -> None:
        self.optimizer.step()
        if self.rows:
            self.rows[-1][LEARNING_RATE] = RATE
        if not self.verdict and self.total is not None:
            self.w -= RATE * self.total
        self.judge()

    @precondition(lambda self: self.rows and len(self.rows) - 1 not in self.frozen)
    @rule(value=st.floats(-1e6, 1e6))
    def log(self, value: float) -> None:
        self.monitor.log("loss", value)
        self.rows[-1][LOSS] = value

    @rule()
    def write(self) -> None:
        if self.path is None:
            self.path = Path(self.folder.name, "run.jsonl")
            self.first_written = max(0, len(self.rows) - CAPACITY)
            self.monitor.to_jsonl(self.path)
        else:
            self.monitor.flush()
        if self.rows:
            self.frozen.setdefault(len(self.rows) - 1, dict(self.rows[-1]))
        expected = [self.frozen.get(n, row) for n, row in enumerate(self.rows)][self.first_written :]
        steps = read_jsonl(self.path)
        assert [s.step for s in steps] == list(range(self.first_written, len(self.rows)))
        assert [ours(s.records) for s in steps] == [exactly(row) for row in expected]

    @rule()
    def read(self) -> None:
        kept = self.rows[-CAPACITY:]
        assert [s.step for s in self.monitor.steps()] == list(range(len(self.rows)))[-CAPACITY:]
        assert ours(self.monitor.latest()) == exactly(kept[-1] if kept else {})
        assert self.monitor.history(SEEN) == exactly([row[SEEN] for row in kept])

    @invariant()
    def the_parameter_moved_by_the_updates_that_were_not_skipped(self) -> None:
        assert self.model.get_parameter("w").item() == exactly(self.w)

    @invariant()
    def skips_are_counted(self) -> None:
        assert self.monitor.skipped == self.skipped

    @invariant()
    def a_file_loses_no_row(self) -> None:
        assert self.path is None or self.monitor.dropped <= self.first_written


@pytest.mark.long
def test_training() -> None:
    few = settings(max_examples=settings().max_examples // 2, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(Training, settings=few)
