"""The exchange of ranks in a step graph: figures of spread gradients, and verdicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, fx

from gradrewrite._compat import collectives
from gradrewrite.distributed.figures import (
    Combination,
    Part,
    decode,
    encode,
    encode_extreme,
    has_extreme,
    needs_largest,
)
from gradrewrite.distributed.groups import device_for
from gradrewrite.distributed.shards import Spread
from gradrewrite.ir import editing
from gradrewrite.numerics.measuring import measure, measure_all
from gradrewrite.numerics.statistics import STATISTICS, from_sums, norm_of, to_summands
from gradrewrite.policy.insertions import Effect, JudgeUpdate, MeasureTensor, ScaleGroup
from gradrewrite.policy.rules import Answered
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class SpreadSite:
    """A spread gradient with actions, on this rank or not."""

    site: Site
    spread: Spread  # how it is spread
    answers: tuple[Answered, ...]  # answers of the policy
    position: int | None  # its position among the gradients of the graph; None where this rank has none, and others may


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """The members of an exchange and their figures: the same, whichever gradients a rank has."""

    sites: tuple[SpreadSite, ...]  # gradients, in the order of the optimizer
    groups: Mapping[tuple[int, ...], distributed.ProcessGroup]  # a process group for the ranks of each of them
    voters: tuple[int, ...] = ()  # ranks that exchange verdicts; ``()`` if none do
    num_sent: int = 0  # how many figures follow the verdicts


@dataclass(frozen=True, slots=True)
class Slot:
    """One figure that ranks exchange: of one gradient, or the norm of several."""

    ranks: tuple[int, ...]  # ranks, ascending
    how: Combination  # how the figure is put together
    statistic: str  # statistic of each part
    members: tuple[SpreadSite, ...]  # gradients
    group: Hashable = None  # type and name of the group action whose norm it is; None for a statistic of one gradient


def slots_of(sites: Sequence[SpreadSite]) -> list[Slot]:
    """Return the slots of an exchange: statistics of gradients, then group norms.

    Statistics are in the order of the gradients. The norms of a group are summed together over one set of ranks, unless
    its action needs that of each member.
    """
    slots = [
        Slot(member.spread.ranks, STATISTICS[name].combination, name, (member,))
        for member in sites
        for answered in member.answers
        if isinstance(measure := answered.insertion.effect, MeasureTensor)
        for name in measure.statistics.values()
    ]
    norms: dict[tuple[Hashable, tuple[int, ...], Site | None], tuple[float, list[SpreadSite]]] = {}
    for member in sites:
        for insertion in (answered.insertion for answered in member.answers):
            order = _order_of_norms(insertion.effect)
            if order is not None:
                alone = (
                    member.site if isinstance(insertion.effect, ScaleGroup) and insertion.effect.has_shares else None
                )
                key = insertion.group, member.spread.ranks, alone
                members = norms.setdefault(key, (order, []))[1]
                if member not in members[-1:]:  # two rules may answer with one group
                    members.append(member)
    for (group, ranks, _), (order, members) in norms.items():
        slots.append(Slot(ranks, Combination("norm", order), "norm", tuple(members), group))
    return slots


def _order_of_norms(effect: Effect) -> float | None:
    """Return the order of a group's norm; None without one."""
    if isinstance(effect, ScaleGroup):
        return effect.norm_type
    return 2.0 if isinstance(effect, JudgeUpdate) and effect.of == "total_norm" else None


@dataclass(frozen=True, slots=True)
class SlotPart:
    """A slot with this rank's part of it."""

    slot: Slot
    nodes: tuple[fx.Node, ...] = ()  # parts of the gradients on this rank
    parts: tuple[Part, ...] = ()  # what they are parts of
    skips: bool = False  # whether it is the count of a check that skips


def insert_exchange(
    graph: fx.Graph,
    settings: ExchangeSettings,
    figures: Sequence[SlotPart],
    checks: Sequence[tuple[fx.Node, Sequence[str]]],
    votes: fx.Node | None,
    device: torch.device,
) -> tuple[list[fx.Node], fx.Node | None, list[fx.Node]]:
    """Insert the exchange before the outputs of a step graph: one all-reduce for each set of ranks.

    Figures are in an order that is the same on all ranks. ``checks`` are nodes with the statistics of checks that skip:
    a count that is not 0 makes the first vote 1. Votes are those of this rank, flat float64. Returns a 0-d node for
    each figure (float32, or float64 where a part is), the sums of the votes of all ranks, and all new nodes.
    """
    inputs = list(dict.fromkeys([*(n for f in figures for n in f.nodes), *(node for node, _ in checks)]))
    position = {node: n for n, node in enumerate(inputs)}
    parts = [tuple(position[n] for n in figure.nodes) for figure in figures]
    counted = [(position[node], list(names)) for node, names in checks]

    def exchange(*values: Tensor) -> list[Tensor]:
        tensors, given = values[: len(inputs)], values[len(inputs) :]
        measured = iter(_measure([(tensors[n], f.slot) for f, own in zip(figures, parts, strict=True) for n in own]))
        found = [[next(measured) for _ in own] for own in parts]
        own_votes = given[0] if given else None
        if own_votes is not None:
            counts = [measure_all([(tensors[n], names)]) for n, names in counted]
            counts += [torch.stack(own) for own, figure in zip(found, figures, strict=True) if figure.skips]
            for count in counts:
                failed = (count.amax() > 0).to(torch.float64).reshape(1)
                own_votes = torch.cat([torch.maximum(own_votes[:1], failed), own_votes[1:]])
        return _exchange(settings, figures, found, own_votes, device)

    nodes = [*inputs, *([] if votes is None else [votes])]
    results, new = editing.compute(graph, exchange, nodes, graph.output_node())
    return (results, None, new) if votes is None else (results[1:], results[0], new)


def send_nothing(
    settings: ExchangeSettings, votes: Tensor | None, device: torch.device
) -> tuple[Tensor | None, dict[Hashable, list[Tensor]]]:
    """Take part in an exchange without a gradient.

    Returns the sums of the verdicts of all ranks, if there are any, and the norms of each group.
    """
    figures = [SlotPart(slot) for slot in slots_of(settings.sites)]
    results = _exchange(settings, figures, [[] for _ in figures], votes, device)
    sums = None if votes is None else results.pop(0)
    norms: dict[Hashable, list[Tensor]] = defaultdict(list)
    for figure, result in zip(figures, results, strict=True):
        if figure.slot.group is not None:
            norms[figure.slot.group].append(result)
    return sums, norms


def exchange_figures(settings: ExchangeSettings, slots: Sequence[Slot], own: Mapping[Site, Tensor]) -> list[Tensor]:
    """Exchange the statistics of spread tensors, outside of a graph; ``own`` are their parts on this rank.

    Returns a 0-d tensor for each slot of the settings (float32 or float64).
    """
    wanted = [(own[slot.members[0].site], slot) for slot in slots]
    figures = [SlotPart(slot, parts=(Part(slot.members[0].spread, part.numel()),)) for part, slot in wanted]
    return _exchange(settings, figures, [[figure] for figure in _measure(wanted)], None, wanted[0][0].device)


def _exchange(
    settings: ExchangeSettings,
    figures: Sequence[SlotPart],
    found: Sequence[Sequence[Tensor]],
    votes: Tensor | None,
    device: torch.device,
) -> list[Tensor]:
    """Return the sums of the votes, if there are any, and the figures of the wholes.

    Each set of ranks makes one sum and, where extremes are among its figures, one maximum.
    """
    slots = [figure.slot for figure in figures]
    flat = [
        torch.stack(own) if own else torch.zeros(0, dtype=torch.float64, device=device)
        for own in _summands(slots, found)
    ]
    given = list(zip(flat, (figure.parts for figure in figures), slots, strict=True))
    extremes = _Exchange(settings, device)
    for values, parts, slot in given:
        if has_extreme(slot.how):
            extremes.add(slot.ranks, encode_extreme(values, parts, slot.how))
    extremes.begin(collectives.begin_max)
    largest: list[Tensor | None] = [None] * len(slots)
    if any(needs_largest(slot.how) for slot in slots):
        largest = [extremes.take(s.ranks) if has_extreme(s.how) else None for s in slots]  # the sum waits for them
    sums = _Exchange(settings, device)
    if votes is not None:
        sums.add(settings.voters, votes.to(device))
    for (values, parts, slot), most in zip(given, largest, strict=True):
        sums.add(slot.ranks, encode(values, parts, slot.how, most))
    sums.begin(collectives.begin_sum)
    results = [] if votes is None else [sums.take(settings.voters)]
    combined = []
    for slot, most in zip(slots, largest, strict=True):
        known = extremes.take(slot.ranks) if most is None and has_extreme(slot.how) else most
        combined.append(decode(sums.take(slot.ranks), known, slot.how))
    wholes = from_sums([slot.statistic for slot in slots], torch.stack(combined)).unbind() if slots else ()
    for slot, whole in zip(slots, wholes, strict=True):
        dtypes = {member.site.dtype for member in slot.members}  # the same on a rank that has none of them
        dtype = torch.float32 if dtypes.isdisjoint((torch.float64, torch.complex128)) else torch.float64
        results.append(whole.to(dtype))
    return results


def _summands(slots: Sequence[Slot], found: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Figures of this rank's parts as summands, at most one a statistic."""
    here = [n for n, own in enumerate(found) if len(own) == 1]
    names = [slots[n].statistic for n in here]
    if not here:
        return [list(own) for own in found]
    widest = torch.float64 if any(found[n][0].dtype == torch.float64 for n in here) else torch.float32
    summands = to_summands(names, torch.stack([found[n][0].to(widest) for n in here]))
    combining = dict(zip(here, summands.unbind(), strict=True))
    return [[combining[n]] if n in combining else list(own) for n, own in enumerate(found)]


class _Exchange:
    """One reduction of vectors for each set of ranks."""

    def __init__(self, settings: ExchangeSettings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._vectors: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        self._begun: dict[tuple[int, ...], Tensor] = {}
        self._ended: dict[tuple[int, ...], Iterator[Tensor]] = {}

    def add(self, ranks: tuple[int, ...], vector: Tensor) -> None:
        """Add a vector of this rank."""
        self._vectors[ranks].append(vector)

    def begin(self, reduce: Callable[[Tensor, distributed.ProcessGroup], Tensor]) -> None:
        """Start the reductions, in the same order on all ranks."""
        for ranks in sorted(self._vectors):
            group = self._settings.groups[ranks]
            vector = torch.cat(self._vectors[ranks]).to(device_for(group, self._device))
            self._begun[ranks] = reduce(vector, group)

    def take(self, ranks: tuple[int, ...]) -> Tensor:
        """Return the next result in the order of ``add``; waits for the reduction."""
        if ranks not in self._ended:
            result = collectives.wait(self._begun[ranks]).to(self._device)
            self._ended[ranks] = iter(result.split([vector.numel() for vector in self._vectors[ranks]]))
        return next(self._ended[ranks])


def _measure(wanted: Sequence[tuple[Tensor, Slot]]) -> list[Tensor]:
    """Return the statistics of tensors, 0-d each; on the CPU all of one tensor are measured by one operation."""
    results: dict[int, Tensor] = {}
    first: dict[Hashable, int] = {}  # of equal figures
    equal = [first.setdefault((id(t), slot.statistic, slot.how), n) for n, (t, slot) in enumerate(wanted)]
    alike: dict[tuple[str, ...], list[tuple[Tensor, list[int]]]] = defaultdict(list)
    of_tensor: dict[int, tuple[Tensor, list[int]]] = {}
    apart: dict[Hashable, list[int]] = defaultdict(list)  # parts of one statistic, which are computed together
    for n in first.values():
        tensor, slot = wanted[n]
        if slot.how.kind == "norm" and slot.how.order != 2:
            results[n] = norm_of(tensor, slot.how.order)
        elif tensor.device.type != "cpu" or tensor.is_complex():
            apart[id(tensor), STATISTICS[slot.statistic].traced].append(n)
        else:
            of_tensor.setdefault(id(tensor), (tensor, []))[1].append(n)
    for numbers in apart.values():
        names = [wanted[n][1].statistic for n in numbers]
        results |= zip(numbers, measure(wanted[numbers[0]][0], names, is_opaque=False).unbind(), strict=True)
    for tensor, numbers in of_tensor.values():
        alike[tuple(wanted[n][1].statistic for n in numbers)].append((tensor, numbers))
    for statistics, members in alike.items():
        found = measure_all([(tensor, statistics) for tensor, _ in members]).unbind()
        results |= zip((n for _, numbers in members for n in numbers), found, strict=True)
    return [results[n] for n in equal]
