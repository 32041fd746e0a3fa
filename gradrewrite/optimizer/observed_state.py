"""Parameters and optimizer state behind ``optimizer.step()``: measured, kept, checked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite.distributed.groups import RankGroups
from gradrewrite.distributed.shards import local_of, spread_of
from gradrewrite.ir.outputs import BackwardOutputs, Pack
from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.numerics.measuring import measure_all
from gradrewrite.optimizer._target import Target
from gradrewrite.optimizer.step_exchange import ExchangeSettings, Slot, SpreadSite, exchange_figures, slots_of
from gradrewrite.optimizer.updated_tensors import Member
from gradrewrite.policy.insertions import KeepTensor, MeasureTensor, Omitted
from gradrewrite.rewriting.record_packing import RecordPacking

_Interval: TypeAlias = tuple[int, int | None]  # of an action: its target, and its steps; None for each step


@dataclass(slots=True)
class _Reading:
    """The measurements of these members; positions are theirs."""

    members: Sequence[Member]
    plain: dict[torch.device, list[tuple[int, list[str]]]] = field(default_factory=lambda: defaultdict(list))
    spread: dict[int, SpreadSite] = field(default_factory=dict)
    settings: ExchangeSettings | None = None  # for the spread ones
    slots: Sequence[Slot] = ()
    kept: list[int] = field(default_factory=list)
    outputs: BackwardOutputs = field(default_factory=BackwardOutputs)  # packs of devices, that of spread ones, kept


class ObservedState:
    """The actions at parameters and state of one optimizer: they only measure, outside of any graph.

    Sharded tensors have the figures of the whole: in a step with a due measurement of such, each set of ranks makes one
    all-reduce with ``SUM`` and, where extremes are measured, one with ``MAX``.
    """

    def __init__(self, targets: Sequence[Target], groups: RankGroups) -> None:
        """Take the targets for their sampling."""
        self._targets, self._groups = targets, groups
        self._members: Sequence[Member] = ()  # at the last measurement
        self._intervals: list[set[_Interval]] = []  # of each
        self._readings: dict[frozenset[_Interval], _Reading] = {}  # by what is due

    def measure(
        self, optimizer: torch.optim.Optimizer, members: Sequence[Member]
    ) -> tuple[BackwardOutputs, list[Tensor]] | None:
        """Return records and kept tensors of a finished step; else None."""
        if members is not self._members:
            self._members = members
            self._readings.clear()
            self._intervals = [{(m.target, a.insertion.every) for a in m.measuring} for m in members]
        due = frozenset(interval for interval in set().union(*self._intervals) if self._is_due(*interval))
        if not due:
            return None
        read = [m for m, own in zip(members, self._intervals, strict=True) if not due.isdisjoint(own)]
        own = [p for group in optimizer.param_groups for p in group["params"]]
        tensors = [own[m.parameter] if m.key is None else optimizer.state[own[m.parameter]][m.key] for m in read]
        with torch.no_grad():
            if due not in self._readings:
                self._readings[due] = self._read(read, tensors, due)
            reading = self._readings[due]
            return reading.outputs, self._measure(reading, tensors)

    def _is_due(self, number: int, every: int | None) -> bool:
        session = self._targets[number].session
        if session is None or every is None:
            return session is not None
        session.sampling.of_update()
        return session.sampling.is_due(every)

    def _read(self, members: Sequence[Member], tensors: Sequence[Tensor], due: frozenset[_Interval]) -> _Reading:
        packing, found = RecordPacking(), _Reading(members)
        keys: dict[torch.device | None, list[RecordKey]] = defaultdict(list)  # None: of spread tensors
        for n, (member, tensor) in enumerate(zip(members, tensors, strict=True)):
            site, layout = member.site, spread_of(tensor)
            is_spread = layout is not None and len(layout.ranks) > 1 and layout.size > 0
            is_due = ((member.target, a.insertion.every) in due for a in member.measuring)
            answers = tuple(a if d else a.omitted() for a, d in zip(member.measuring, is_due, strict=True))
            for insertion in (answered.insertion for answered in answers):
                match insertion.effect:
                    case Omitted(names):
                        packing.numbering.new(names, str(site))
                    case KeepTensor():
                        packing.keep(insertion, site, len(found.kept))
                        found.kept.append(n)
                    case MeasureTensor(statistics):
                        seen = Anchor("", n)  # of no node; checks are in the order of the members
                        keys[None if is_spread else tensor.device] += packing.measure(insertion, site, seen=seen)
                        if statistics and not is_spread:
                            found.plain[tensor.device].append((n, list(statistics.values())))
                    case _:
                        raise AssertionError(f"{insertion.action!r} does not stand at parameters or state")
            if is_spread and layout is not None:
                self._note_mesh(tensor)
                found.spread[n] = SpreadSite(site, layout, answers, None)
        if keys[None]:
            spread = tuple(found.spread.values())
            groups = {ranks: self._groups.of_ranks(ranks) for ranks in sorted({one.spread.ranks for one in spread})}
            found.settings, found.slots = ExchangeSettings(spread, groups), slots_of(spread)
        packs = [Pack(tuple(keys[device])) for device in (*found.plain, None) if keys.get(device)]
        found.outputs = packing.outputs(packs, (key for pack in packs for key in pack.keys))
        return found

    def _measure(self, reading: _Reading, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the packs, and copies of the kept tensors."""
        parts = [local_of(tensor).detach() for tensor in tensors]
        found = [measure_all([(parts[n], names) for n, names in reports]) for reports in reading.plain.values()]
        if reading.settings is not None:
            own = {member.site: parts[n] for n, member in reading.spread.items()}
            figures = exchange_figures(reading.settings, reading.slots, own)
            widest = torch.float64 if any(figure.dtype == torch.float64 for figure in figures) else torch.float32
            found.append(torch.stack([figure.to(widest) for figure in figures]))
        return found + [tensors[n].detach().clone() for n in reading.kept]

    def _note_mesh(self, tensor: Tensor) -> None:
        if is_dtensor(tensor):
            self._groups.note_mesh(tensor.device_mesh)
