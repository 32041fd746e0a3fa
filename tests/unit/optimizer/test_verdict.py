"""The verdict by itself: one optimizer, one recorder, checks given by hand."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from gradrewrite.distributed.groups import RankGroups
from gradrewrite.errors import NonFiniteError
from gradrewrite.monitoring.guards import Seat
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.optimizer._target import Attachment
from gradrewrite.optimizer.verdict import UpdateVerdict
from gradrewrite.sites import Site

pytestmark = pytest.mark.pure

GOOD, BAD = torch.zeros(()), torch.ones(())


class Update:
    """An optimizer of two weights, and its verdict."""

    def __init__(self, max_consecutive_skips: int = 50) -> None:
        self.weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        self.stranger = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD(self.weights, lr=0.1)
        self.recorder = StepRecorder(8)
        attached = [Attachment(self.recorder, Seat(0, 0, 1), -1)]
        self.verdict = UpdateVerdict(self.optimizer, (), attached, max_consecutive_skips, None, RankGroups())

    def note(self, bad: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        self.verdict.note(self.optimizer, bad, [weakref.ref(p) for p in parameters])

    def decide(self) -> float | None:
        """Judge as ``step`` does."""
        bad = self.verdict.take(self.optimizer)
        ballot = self.verdict.ballot(self.optimizer, bad)
        self.verdict.start(ballot, None)
        bad = self.verdict.decide(self.optimizer, bad, ballot, None)
        if bad is not None:
            self.verdict.count(bad)
        self.verdict.look_at_counts()
        return None if bad is None else float(bad)


def test_one_bad_backward_decides_and_the_next_step_begins_anew() -> None:
    update = Update()
    assert (update.decide(), update.verdict.num_skipped) == (None, None)

    for bad in (GOOD, BAD, GOOD):
        update.note(bad, update.weights)

    assert [update.decide(), update.decide()] == [1.0, None]
    update.note(GOOD, update.weights[:1])
    assert update.decide() == 0.0
    assert update.verdict.num_skipped is not None
    assert float(update.verdict.num_skipped) == 1


def test_backwards_of_other_parameters_are_not_judged() -> None:
    update = Update()

    update.note(BAD, [update.stranger])
    assert update.decide() is None
    update.note(BAD, [update.stranger, update.weights[0]])
    assert update.decide() == 1.0
    update.note(BAD, [])  # a graph without parameters concerns every optimizer
    assert update.decide() == 1.0


def test_cleared_gradients_take_the_verdict_along_and_count() -> None:
    update = Update()
    update.weights[0].grad = torch.ones(2)
    update.note(BAD, update.weights)

    update.verdict.drop_if_cleared(update.optimizer)
    assert update.verdict.num_skipped is None
    update.weights[0].grad = None
    update.verdict.drop_if_cleared(update.optimizer)

    assert update.decide() is None
    assert update.verdict.num_skipped is not None
    assert float(update.verdict.num_skipped) == 1


def test_the_limit_is_of_updates_in_a_row() -> None:
    update = Update(max_consecutive_skips=3)

    for bad in (BAD, BAD, GOOD, BAD, BAD):
        update.note(bad, update.weights)
        update.decide()
    update.recorder.note_last_skip(Site("error", "fc"))
    update.note(BAD, update.weights)
    with pytest.raises(NonFiniteError, match=r"error:fc.*3 updates in a row were skipped"):
        update.decide()
