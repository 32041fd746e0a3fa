"""Step plans: the actions at step sites for the graph of a whole training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, distributed, fx

from gradrewrite.ir.record_key import RecordKey
from gradrewrite.optimizer.spikes import Judging
from gradrewrite.optimizer.step_graph import StepRewrite
from gradrewrite.optimizer.update_graph import UpdateRewrite
from gradrewrite.policy.insertions import Insertion


@dataclass(frozen=True, slots=True)
class InGraphJudge:
    """A judge in the graph of a whole step."""

    judging: Judging
    targets: list[Tensor] = field(default_factory=list)  # tensors of its states, when it is traced

    @property
    def is_of_loss(self) -> bool:
        """Whether it judges the mean loss."""
        return self.judging.judge.effect.of == "loss"

    def trace(self, figure: Tensor, number: Tensor) -> fx.GraphModule:
        """Return its graph for a figure and the number of its parts, both fake."""
        traced, targets = self.judging.trace([figure, number])
        self.targets[:] = targets
        return traced


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """Held elements and functions behind an update."""

    rewrite: UpdateRewrite
    places: Sequence[tuple[int, Any]]  # of its tensors: position of the parameter, key of its state or None
    before: Sequence[tuple[int, Any]]  # those that it is given as they were before the update
    held: Sequence[int]  # parameters with their gradients


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The actions at the step sites of an optimizer, and behind its update."""

    rewrite: StepRewrite | None = None  # None without actions
    gradients: tuple[int, ...] = ()  # positions of its gradients among the parameters
    judges: Sequence[InGraphJudge] = ()
    held: Mapping[int, tuple[Insertion, ...]] = field(default_factory=dict)
    change: ChangePlan | None = None
    ratios: tuple[tuple[int, RecordKey], ...] = ()  # of updates, by position of the parameter
    group: distributed.ProcessGroup | None = None  # ranks that skip together
    may_act: bool = False  # whether a policy may have actions at step sites, at parameters or at state
    observes: bool = False  # whether parameters or state may be measured
