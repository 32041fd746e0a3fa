"""Spikes: verdicts on updates from figures and the accepted ones before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import dynamo_cache, fake_tensors, make_fx
from gradrewrite.backends.engines import AotEager, Engine
from gradrewrite.errors import PolicyError, SpikeError, spike_text
from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import StateUpdate
from gradrewrite.monitoring.host_copy import number_of
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import JudgeUpdate
from gradrewrite.policy.recording import Recording, recording
from gradrewrite.policy.state_store import StateStore, write_states

NUM_FIGURES = 2  # of a rank for the mean loss of all: the sum of its losses, and their number


@dataclass(frozen=True, slots=True)
class Judge:
    """A judge at the step sites of an optimizer."""

    action: Any  # as the policy answered it
    effect: JudgeUpdate
    where: str  # site of its records and of its states
    # Keys of its records: the figure, its limit, whether it is a spike. The first may be that of another action, which
    # records it.
    keys: tuple[RecordKey, RecordKey, RecordKey]
    records_figure: bool = True

    @classmethod
    def at(cls, action: Any, effect: JudgeUpdate, where: str) -> Judge:
        """Make a judge with the first records at a site."""
        figure, limit, spike = (RecordKey(name, 1, where) for name in (effect.of, "spike_limit", "spike"))
        return cls(action, effect, where, (figure, limit, spike))

    @property
    def recorded(self) -> tuple[RecordKey, ...]:
        """The keys of its own records."""
        return self.keys if self.records_figure else self.keys[1:]


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement on one figure, on its device."""

    judge: Judge
    values: Tensor  # ``[4]``, float64 where the device has it: figure, limit, 1 if it is a spike, number of its parts
    states: Sequence[tuple[Tensor, Tensor]]  # tensors of its states, with what they are if the update is made

    @property
    def verdict(self) -> Tensor:
        """1 for a spike, else 0; 0-d float32."""
        return self.values[2].to(torch.float32)

    @property
    def recorded(self) -> Tensor:
        """The values of its records, flat."""
        return self.values[:3] if self.judge.records_figure else self.values[1:3]


@dataclass(frozen=True, slots=True)
class Spike:
    """The values of a judgement on the host."""

    judge: Judge
    figure: float
    limit: float
    spike: float
    num_parts: float

    @property
    def is_spike(self) -> bool:
        """Whether the update was skipped for it."""
        return self.spike > 0

    @property
    def text(self) -> str:
        """The figure and its limit."""
        return spike_text(str(self.judge.keys[0]), self.figure, self.limit)

    def error(self, step: int, update: int, note: str) -> SpikeError:
        """Return the error at the end of the training."""
        return SpikeError(
            str(self.judge.keys[0]), figure=self.figure, limit=self.limit, step=step, update=update, note=note
        )

    def raise_without_parts(self) -> None:
        """Raise PolicyError if it is a mean of no losses."""
        if self.judge.effect.of == "loss" and self.num_parts == 0:
            raise no_loss(self.judge)


def no_loss(judge: Judge) -> PolicyError:
    """Return the error for a step without a loss."""
    return PolicyError(
        f"{judge.where}: {describe(judge.action)} judges the mean loss of a step, and none was logged since the last "
        'step of this optimizer. Call model.monitor.log("loss", loss) once for each micro-batch, before '
        "optimizer.step()",
        code="no-loss",
    )


class Judging:
    """The code of a judge.

    Inductor compiles it for each kind of figure when it is first needed.
    """

    def __init__(self, judge: Judge, states: StateStore, engine: Engine) -> None:
        self.judge, self._states, self._engine = judge, states, engine
        self._known: dict[tuple[torch.device, torch.dtype], tuple[Callable[..., Any], list[Tensor], list[Tensor]]] = {}

    def __call__(self, figure: Tensor, number: Tensor | None = None) -> Judgement:
        """Judge a figure, 0-d; ``number`` is that of the losses behind it, 0-d."""
        inputs = [figure.detach(), torch.ones_like(figure) if number is None else number]
        kind = (figure.device, figure.dtype)
        with torch.no_grad():
            if kind not in self._known:
                return self._judge_first(inputs)
            run, live, targets = self._known[kind]
            values, *new = run(*inputs, *live)
        return Judgement(self.judge, values, list(zip(targets, new, strict=True)))

    def _judge_first(self, inputs: Sequence[Tensor]) -> Judgement:
        """Judge the first figure of a kind, op by op.

        It makes the states. Without Inductor all figures are judged so: decomposed nodes would take longer.
        """
        figure = inputs[0]
        with self._recording(figure.device) as reported:
            values, *new = self._run(reported, *inputs)
        if not isinstance(self._engine, AotEager):
            with fake_tensors.outside_of_modes(), dynamo_cache.compiling():
                self._known[figure.device, figure.dtype] = self._compile(inputs)
        return Judgement(self.judge, values, list(zip(_states_of(reported), new, strict=True)))

    def _recording(self, device: torch.device) -> AbstractContextManager[Recording]:
        return recording(device, states=self._states.scope(self.judge.where))

    def _run(self, reported: Recording, figure: Tensor, number: Tensor) -> list[Tensor]:
        """Return the values of a judgement, and the new values of states."""
        reported.clear()
        limit, is_spike = self.judge.effect.judge(figure)
        reported.close()
        values = [t.to(limit.dtype) for t in (figure, limit, is_spike, number)]
        return [torch.stack(values), *reported.outputs]

    def trace(self, inputs: Sequence[Tensor]) -> tuple[fx.GraphModule, list[Tensor]]:
        """Return the graph for a figure and a number, both fake, and the tensors of its states.

        It returns the values of a judgement, then new values of the states.
        """
        with self._recording(inputs[0].device) as reported:
            traced = make_fx.trace(partial(self._run, reported), inputs)
        return traced, _states_of(reported)

    def _compile(self, inputs: Sequence[Tensor]) -> tuple[Callable[..., Any], list[Tensor], list[Tensor]]:
        """Return the code, its live inputs, and the tensors of its states."""
        traced, states = self.trace(fake_tensors.fakes_of(inputs))
        gm, live = editing.with_live_inputs(traced)
        code = self._engine.compile_step(gm, [value_of(node) for node in gm.graph.find_nodes(op="placeholder")])
        return code, live, states


def _states_of(reported: Recording) -> list[Tensor]:
    return [report.state for report in reported.reports if isinstance(report, StateUpdate)]


def remember(judgements: Sequence[Judgement], skipped: Tensor | None) -> None:
    """Write the states of judges, unless the update was skipped.

    ``skipped`` has one element, 0 if the update is made; None: it is.
    """
    for judgement in judgements:
        targets, values = zip(*judgement.states, strict=True)
        if skipped is not None:
            is_made = skipped.reshape(()).to(targets[0].device, non_blocking=True) == 0
            values = tuple(torch.where(is_made, new, old) for old, new in zip(targets, values, strict=True))
        write_states(targets, values)


class Losses:
    """The losses since the last step, one for each micro-batch."""

    def __init__(self) -> None:
        self._packs: list[Tensor] = []
        self.num_backwards = 0  # since then
        self._last_backward = -1

    def __len__(self) -> int:
        return len(self._packs)

    def note(self, loss: Tensor) -> None:
        """Take a loss, a copy with one element."""
        self._packs.append(loss)

    def note_backward(self, backward: int, is_cleared: Callable[[], bool]) -> None:
        """Take note of a backward by its number.

        ``is_cleared`` tells whether the gradients of those before it are gone; then their losses go.
        """
        if backward == self._last_backward:
            return
        if self._packs and self.num_backwards and is_cleared():
            self.drop()
        self._last_backward = backward
        self.num_backwards += 1

    def clear(self) -> None:
        """Begin anew: the update is made or skipped."""
        self._packs.clear()
        self.num_backwards = 0

    def drop(self) -> None:
        """Drop the losses of discarded gradients, one for each backward.

        A loss that was logged before its backward stays.
        """
        del self._packs[: self.num_backwards]
        self.num_backwards = 0

    def sums(self, device: torch.device) -> Tensor:
        """Return their sum and their number.

        They are ``[2]``, float64 where the device has it. Nothing is uploaded where the host has a loss: numbers are
        arguments of kernels.
        """
        wide = torch.float32 if device.type == "mps" else torch.float64
        figures = torch.zeros(NUM_FIGURES, dtype=wide, device=device)
        on_host = [number_of(pack) for pack in self._packs if pack.device.type == "cpu"]
        elsewhere = [pack.to(device, wide, non_blocking=True) for pack in self._packs if pack.device.type != "cpu"]
        figures[0] += sum(on_host)
        figures[1] += len(self._packs)
        if elsewhere:
            figures[0] += torch.cat(elsewhere).sum()
        return figures


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of an update for its judges."""

    judges: tuple[Judging, ...] = ()
    norms: Mapping[int, Tensor] = field(default_factory=dict)  # total norms, 0-d, by the position of the judge
    is_agreed: bool = True  # whether all ranks that skip together have equal norms, or vote on the verdicts here

    @property
    def judges_of_loss(self) -> list[Judging]:
        """The judges of the mean loss."""
        return [judging for judging in self.judges if judging.judge.effect.of == "loss"]

    def judge_norms(self) -> list[Judgement]:
        """Judge total norms."""
        return [self.judges[n](norm) for n, norm in self.norms.items()]

    def judge_loss(self, sums: Tensor) -> list[Judgement]:
        """Judge the mean loss from the sum of losses and their number.

        They are given as ``[2]``; the mean of none is NaN.
        """
        return [judging(sums[0] / sums[1], sums[1]) for judging in self.judges_of_loss]
