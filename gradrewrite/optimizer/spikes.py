"""Spikes: figures of updates, judged by what was accepted before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradrewrite.errors import PolicyError, SpikeError, spike_text
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.monitoring.host_copy import number_of
from gradrewrite.policy.actions import UpdateJudge, describe
from gradrewrite.policy.recording import recording
from gradrewrite.policy.state_store import StateScope, StateStore, write_states

NUM_FIGURES = 2  # of a rank for the mean loss of all: the sum of its losses, and their number


@dataclass(frozen=True, slots=True)
class Judge:
    """A judge at the step sites of an optimizer."""

    action: UpdateJudge
    where: str  # site of its records and of its states
    # Keys of its records: the figure, its limit, whether it is a spike. The first may be that of another action, which
    # records it.
    keys: tuple[RecordKey, RecordKey, RecordKey]
    records_figure: bool = True

    @classmethod
    def at(cls, action: UpdateJudge, where: str) -> Judge:
        """Make a judge with the only records of their names at a site."""
        figure, limit, spike = (RecordKey(name, 1, where) for name in (action.of, "spike_limit", "spike"))
        return cls(action, where, (figure, limit, spike))

    @property
    def recorded(self) -> tuple[RecordKey, ...]:
        """The keys of its own records."""
        return self.keys if self.records_figure else self.keys[1:]


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement on one figure, on its device."""

    judge: Judge
    values: Tensor  # ``[4]``, float64 where the device has it: figure, limit, 1 if it is a spike, number of its parts
    scope: StateScope  # the states after an accepted figure

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

    def error(self, step: int, note: str) -> SpikeError:
        """Return the error of a training that does not go on."""
        return SpikeError(str(self.judge.keys[0]), figure=self.figure, limit=self.limit, step=step, note=note)

    def raise_without_parts(self) -> None:
        """Raise PolicyError if it is a mean of no losses."""
        if self.num_parts == 0:
            raise no_loss(self.judge)


def no_loss(judge: Judge) -> PolicyError:
    """Return the error for a step without a loss."""
    return PolicyError(
        f"{judge.where}: {describe(judge.action)} judges the mean loss of a step, and none was logged since the last "
        'step of this optimizer. Call model.monitor.log("loss", loss) once for each micro-batch, before '
        "optimizer.step()",
        code="no-loss",
    )


def judge_figure(judge: Judge, figure: Tensor, states: StateStore | None, number: Tensor | None = None) -> Judgement:
    """Judge a figure, 0-d; ``number`` is that of the losses behind it, 0-d."""
    scope = (states or StateStore()).scope(judge.where)
    with torch.no_grad(), recording(figure.device, states=scope):
        limit, is_spike = judge.action.judge(figure)
    parts = torch.ones_like(limit) if number is None else number.to(limit.dtype)
    return Judgement(judge, torch.stack([figure.to(limit.dtype), limit, is_spike.to(limit.dtype), parts]), scope)


def remember(judgements: Sequence[Judgement], skipped: Tensor | None) -> None:
    """Write the states of judges, unless the update was skipped: ``skipped`` is one element, 0 if it is made."""
    for judgement in judgements:
        targets, values = zip(*judgement.scope.updates.values(), strict=True)
        if skipped is not None:
            is_made = skipped.reshape(()).to(targets[0].device, non_blocking=True) == 0
            values = tuple(torch.where(is_made, new, old) for old, new in zip(targets, values, strict=True))
        write_states(targets, values)


class Losses:
    """The losses that were logged since the last step of an optimizer, one for each micro-batch."""

    def __init__(self) -> None:
        self._packs: list[Tensor] = []
        self._backwards: set[int] = set()

    def __len__(self) -> int:
        return len(self._packs)

    def note(self, loss: Tensor) -> None:
        """Take a loss, a copy with one element."""
        self._packs.append(loss)

    def note_backward(self, backward: int) -> None:
        """Take note of a backward by its number."""
        self._backwards.add(backward)

    def clear(self) -> None:
        """Begin anew: the update is made or skipped."""
        self._packs.clear()
        self._backwards.clear()

    def drop(self) -> None:
        """Drop the losses of gradients that are thrown away: one for each backward.

        One that was logged before its backward stays.
        """
        del self._packs[: len(self._backwards)]
        self._backwards.clear()

    def sums(self, device: torch.device) -> Tensor:
        """Return their sum and their number, ``[2]``, float64 where the device has it.

        Nothing is uploaded where the host has a loss: numbers are arguments of kernels.
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

    judges: tuple[Judge, ...] = ()
    norms: Mapping[int, Tensor] | None = None  # total norms, 0-d, by the position of the judge
    states: StateStore | None = None
    is_agreed: bool = True  # whether all ranks that skip together have equal norms, or vote on the verdicts here

    @property
    def takes_losses(self) -> bool:
        """Whether a judge asks for the mean loss."""
        return any(judge.action.of == "loss" for judge in self.judges)

    def judge_norms(self) -> list[Judgement]:
        """Judge total norms."""
        return [judge_figure(self.judges[n], norm, self.states) for n, norm in (self.norms or {}).items()]

    def judge_loss(self, sums: Tensor) -> list[Judgement]:
        """Judge the mean loss, from the sum of all losses and their number, ``[2]``; NaN without any."""
        judges = [judge for judge in self.judges if judge.action.of == "loss"]
        return [judge_figure(judge, sums[0] / sums[1], self.states, sums[1]) for judge in judges]
