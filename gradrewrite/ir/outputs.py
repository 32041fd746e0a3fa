"""Auxiliary outputs of a rewritten backward: packed records, placed reports, states."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeAlias, TypeVar, cast

from torch import Tensor

from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.record_key import RecordKey, with_label
from gradrewrite.ir.reports import (
    Check,
    Clip,
    Figures,
    Kept,
    NormClip,
    OnFailure,
    Scalars,
    ValueClip,
    acting_bound,
    leaves,
)
from gradrewrite.numerics.statistics import COUNTS
from gradrewrite.sites import Site

Owner: TypeAlias = Site | str  # a site, or the text of what is none: ``group:default``, ``data:x``
PlacedReport: TypeAlias = Figures[RecordKey] | Kept
Bound: TypeAlias = float | Tensor | Mapping[int, float]  # or by the iterations of a loop
# Addresses of the records of a loop, by record and iteration; or of one vector, by element.
Stack: TypeAlias = tuple[tuple[str, ...], ...]
_Placed = TypeVar("_Placed", bound=PlacedReport, covariant=True)


@dataclass(frozen=True, slots=True)
class ClipRecords:
    """The records of one clip."""

    kind: str  # of its site; of a group what stands before the name (``group``, ``step:group``)
    name: str  # of its site, or of its group
    call: int  # of its site
    action: str  # as text
    rule: str  # pattern of the rule that answered with it; of another callback its name
    report: Clip[RecordKey]  # the keys
    factor: RecordKey  # the host computes it

    @property
    def site(self) -> str:
        """The site of its records."""
        return self.factor.site

    def on_host(self, known: Mapping[RecordKey, float]) -> Clip[float]:
        """Return the figures of the clip at one step; KeyError if one is not known."""
        return self.report.map(lambda _, key: known[key])


@dataclass(frozen=True, slots=True)
class SiteOp:
    """The op of an activation and of its error, in the forward."""

    name: str  # of the site, with ``#call``, without a kind
    op: str  # ``module/op``
    source: str  # ``file:line "code"``; ``""`` where there is none

    @classmethod
    def of(cls, site: Site) -> SiteOp:
        """Return the op of a site."""
        return cls(str(site).partition(":")[2], f"{site.module}/{site.op}", site.source)


@dataclass(frozen=True, slots=True)
class MeasuredTensor:
    """The tensor behind the records of one action, for the figures of a whole."""

    statistics: Mapping[str, str]  # keys of ``statistics.STATISTICS``, by the names of the records
    size: int | None  # number of elements; None where it is symbolic
    replicas: int = 1  # how many ranks have the same tensor: that of a DTensor is the whole one
    number: int = 0  # equal for the records of one measurement, of several at one site


@dataclass(frozen=True, slots=True)
class Iterations:
    """Iterations of a loop with an action, as spans.

    A span has its first and its last iteration; None stands for the last one of a loop of any length.
    """

    # The keys of the loops of its name up to it, and of those before it the lengths that the names of its sites know.
    loops: tuple[tuple[str, int], ...]
    spans: tuple[tuple[int, int | None], ...]

    @property
    def loop(self) -> str:
        """Key of the loop."""
        return self.loops[-1][0]

    def moved(self, lengths: Mapping[str, int]) -> int:
        """Return the shift of the calls of its sites for other lengths.

        Loops without records have a fixed length.
        """
        return sum(lengths.get(key, known) - known for key, known in self.loops[:-1])

    def of(self, length: int) -> list[int]:
        """Return them, for a number of iterations."""
        return [
            n for first, last in self.spans for n in range(first, length if last is None else min(last + 1, length))
        ]


@dataclass(frozen=True, slots=True)
class Placed(Generic[_Placed]):
    """A report with its place among the outputs."""

    report: _Placed
    owner: Owner
    action: str = ""  # as text; ``""`` for counts at the boundary of a graph
    rule: str = ""  # pattern of the rule that answered with it; of another callback its name
    every: int | None = None  # the number of steps from one measurement to the next, if they are counted
    factor: RecordKey | None = None  # of a clip; the host computes it
    bounds: tuple[tuple[RecordKey, Bound], ...] = ()  # those that the host has; see ``BackwardOutputs.bounds``
    tensor: MeasuredTensor | None = None
    seen: Anchor | None = None  # of a check: the node that it looks at
    iterations: Iterations | None = None  # in which it reports; the site and the keys are those of the first one

    @property
    def site(self) -> Site:
        """The site, of a report at a single one."""
        assert isinstance(self.owner, Site)
        return self.owner

    def site_at(self, number: int, lengths: Mapping[str, int]) -> Site:
        """Return the site of one iteration of the loop; iterations before the loop count."""
        assert self.iterations is not None
        assert self.site.iteration is not None
        site = self.site.at_iteration(self.site.iteration + number - self.iterations.spans[0][0])
        return site.moved(self.iterations.moved(lengths))

    @property
    def is_kept(self) -> bool:
        """Whether it is a kept tensor."""
        return isinstance(self.report, Kept)

    @property
    def keys(self) -> tuple[RecordKey, ...]:
        """The keys of its records in packed tensors, in their order."""
        if isinstance(self.report, Kept):
            return ()
        on_host = {key for key, _ in self.bounds}
        return tuple(key for key in leaves(self.report) if key not in on_host)

    @property
    def named(self) -> list[tuple[str, RecordKey]]:
        """The names of the figures as they were given, with their keys."""
        found: list[tuple[str, RecordKey]] = []
        if not isinstance(self.report, Kept):
            self.report.map(lambda name, key: found.append((name, key)))
        return found

    @property
    def shown(self) -> tuple[RecordKey, ...]:
        """The keys of a step, with the factor of a clip.

        It stands behind the norm of the clip, or in the place of the norms before and after.
        """
        if self.factor is None:
            return self.keys
        if isinstance(self.report, ValueClip):
            hidden = {self.report.before: (self.factor,), self.report.after: ()}
        else:
            assert isinstance(self.report, NormClip)
            hidden = {self.report.norm: (self.report.norm, self.factor)}
        return tuple(shown for key in self.keys for shown in hidden.get(key, (key,)))

    def map(self: Placed[PlacedReport], owner: Owner, key: Callable[[RecordKey], RecordKey]) -> Placed[PlacedReport]:
        """Return the report with another owner and other keys."""
        report = self.report if isinstance(self.report, Kept) else self.report.map(lambda _, leaf: key(leaf))
        factor = None if self.factor is None else key(self.factor)
        bounds = tuple((key(old), bound) for old, bound in self.bounds)
        return replace(self, report=report, owner=owner, factor=factor, bounds=bounds)

    def at_iteration(
        self: Placed[PlacedReport], number: int, lengths: Mapping[str, int], label: str
    ) -> Placed[PlacedReport]:
        """Return the report of one iteration of the loop."""
        site = self.site_at(number, lengths)
        before, after = with_label(str(self.site), label), with_label(str(site), label)
        placed = self.map(site, lambda key: replace(key, site=after) if key.site == before else key)
        bounds = tuple((key, bound[number] if isinstance(bound, Mapping) else bound) for key, bound in placed.bounds)
        return replace(placed, iterations=None, bounds=bounds)


PlacedCheck: TypeAlias = Placed[Check[RecordKey]]


@dataclass(frozen=True, slots=True)
class Pack:
    """The layout of a packed tensor.

    Where the records are those of the iterations of a loop, the keys are those of the first iteration of each, and the
    tensor has all iterations of the first record, then of the second; see ``BackwardOutputs.unrolled``.
    """

    keys: tuple[RecordKey, ...]
    num_skips: int = 0  # how many counts of checks that skip it begins with
    # Whether it has one element more, behind the records: 1 if one of these counts is not 0, else 0. Elsewhere the
    # counts are looked at where somebody wants to know.
    has_verdict: bool = False
    positions: tuple[int, ...] | None = None  # of the elements that are records; None if the first ones are


@dataclass(frozen=True)
class BackwardOutputs:
    """The auxiliary outputs of a rewritten backward graph.

    They are packs, kept tensors, and new values of states, in this order.
    """

    packs: tuple[Pack, ...] = ()
    placed: tuple[Placed[PlacedReport], ...] = ()  # in the order of the sites
    # What actions remember, by key, in the order of the new values, which are the last outputs.
    states: tuple[tuple[str, Tensor], ...] = ()
    groups: tuple[str, ...] = ()  # that are clipped together, or whose noise is drawn together
    noisy: frozenset[str] = frozenset()  # groups with noise
    label: str = ""  # of the model, behind its sites; see ``RewriteConfig.label``

    @cached_property
    def keys(self) -> tuple[RecordKey, ...]:
        """The records of a step, factors of clips included."""
        return tuple(key for placed in self.placed for key in placed.shown)

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The records of iterations of loops (figures, then bounds that the host has), then vectors outside of them."""
        inside = [p for p in self.placed if isinstance(p.owner, Site) and p.site.iteration is not None]
        groups: list[list[Placed[PlacedReport]]] = []
        for placed in inside:
            if not groups or (groups[-1][-1].site.iteration or 0) > (placed.site.iteration or 0):
                groups.append([])  # of the next loop
            groups[-1].append(placed)
        found = [_stack_of((p.site, p.shown) for p in own) for own in groups]
        found += [_stack_of((p.site, tuple(key for key, _ in p.bounds)) for p in own) for own in groups]
        rest = (p for p in self.placed if not (isinstance(p.owner, Site) and p.site.iteration is not None))
        found += [(tuple(map(str, p.keys)),) for p in rest if isinstance(p.report, Scalars) and p.report.is_vector]
        return tuple(stack for stack in found if stack)

    @cached_property
    def checks(self) -> tuple[PlacedCheck, ...]:
        """The finite checks, in the order of execution."""
        found = [p for p in self.placed if isinstance(p.report, Check)]
        checks = cast(list[PlacedCheck], found)
        positions = {id(check): number for number, check in enumerate(checks)}
        return tuple(sorted(checks, key=lambda check: _execution_of(check, positions[id(check)])))

    @cached_property
    def clips(self) -> tuple[ClipRecords, ...]:
        """The clips with known factors."""
        return tuple(
            ClipRecords(*_named(p.owner, self.label), p.action, p.rule, p.report, p.factor)
            for p in self.placed
            if isinstance(p.report, NormClip | ValueClip) and p.factor is not None
        )

    @cached_property
    def kept(self) -> tuple[tuple[str, Owner, str, int | None], ...]:
        """Kinds, owners, losses and intervals of kept tensors; kinds as in ``Kept``."""
        kept = ((p.report, p.owner, p.every) for p in self.placed if isinstance(p.report, Kept))
        return tuple((report.what, self._labelled(owner), report.loss, every) for report, owner, every in kept)

    def _labelled(self, owner: Owner) -> Owner:
        if isinstance(owner, str):
            return with_label(owner, self.label)
        return replace(owner, name=f"{owner.name}{self.label}")

    @cached_property
    def ops(self) -> tuple[SiteOp, ...]:
        """The ops of the recorded activations and errors."""
        owners = (p.owner for p in self.placed if not p.is_kept)
        found = dict.fromkeys(SiteOp.of(site) for site in owners if isinstance(site, Site) and site.op)
        return tuple(replace(one, name=with_label(one.name, self.label)) for one in found)

    @cached_property
    def bounds(self) -> tuple[tuple[RecordKey, float | Tensor], ...]:
        """Bounds of clips that the host has (numbers, tensors in host memory).

        ``bound@site`` by norm, ``limit@site`` by value, which counts by its size.
        """
        found = [(key, bound) for p in self.placed for key, bound in p.bounds]
        return tuple((key, bound) for key, bound in found if not isinstance(bound, Mapping))

    @cached_property
    def acting_numbers(self) -> dict[RecordKey, float]:
        """The bounds that are numbers, as clips act by them."""
        return {key: acting_bound(float(bound)) for key, bound in self.bounds if not isinstance(bound, Tensor)}

    @cached_property
    def live_bounds(self) -> tuple[tuple[RecordKey, Tensor], ...]:
        """The bounds that are tensors in host memory."""
        return tuple((key, bound) for key, bound in self.bounds if isinstance(bound, Tensor))

    @cached_property
    def measured(self) -> Mapping[RecordKey, MeasuredTensor]:
        """The tensors behind the statistics among the records."""
        found = ((key, p.tensor) for p in self.placed for key in p.keys)
        return {key: tensor for key, tensor in found if tensor is not None and key.record in tensor.statistics}

    @cached_property
    def counts(self) -> frozenset[RecordKey]:
        """Counts of elements, summed over the graphs of a backward."""
        return frozenset(key for p in self.placed for name, key in p.named if name in COUNTS)

    @cached_property
    def logs(self) -> bool:
        """Whether a clip logs."""
        return any(clip.report.logs for clip in self.clips)

    @cached_property
    def checked(self) -> Mapping[OnFailure, tuple[tuple[int, ...], ...]]:
        """The positions of counts in each pack, by consequence."""
        modes: dict[OnFailure, set[RecordKey]] = {}
        for check in self.checks:
            modes.setdefault(check.report.on_failure, set()).add(check.report.count)
        return {
            mode: tuple(
                tuple(n for n, key in zip(pack.positions or itertools.count(), pack.keys, strict=False) if key in keys)
                for pack in self.packs
            )
            for mode, keys in modes.items()
        }

    @cached_property
    def _sampled(self) -> tuple[tuple[int, tuple[RecordKey, ...]], ...]:
        return tuple((p.every, p.keys) for p in self.placed if p.every is not None and p.keys)

    @cached_property
    def _intervals(self) -> frozenset[int]:
        return frozenset(every for every, _ in self._sampled)

    @cached_property
    def _known_lengths(self) -> dict[tuple[tuple[str, int], ...], tuple[BackwardOutputs, list[tuple[int, int | None]]]]:
        return {}

    @cached_property
    def _has_loops(self) -> bool:
        return any(p.iterations is not None for p in self.placed)

    @cached_property
    def _rolled(self) -> dict[RecordKey, Iterations]:
        return {key: p.iterations for p in self.placed if p.iterations is not None for key in p.keys}

    def unrolled(self, packs: Sequence[Tensor], kept: Sequence[Tensor]) -> tuple[BackwardOutputs, Sequence[Tensor]]:
        """Return the outputs and kept tensors with a report for each iteration of loops.

        The lengths of loops are those of the tensors.
        """
        if not self._has_loops:
            return self, kept
        of_packs = [(own, self._rolled.get(own.keys[0])) for own in self.packs]
        of_kept = [p.iterations for p in self.placed if p.is_kept]
        found = [(its, len(t) // len(own.keys)) for (own, its), t in zip(of_packs, packs, strict=True)]
        found += [(its, 0 if its is None else len(t)) for its, t in zip(of_kept, kept, strict=True)]
        sizes = [(its.loop, length) for its, length in found if its is not None]
        if not sizes:
            return self, kept
        key = tuple(sorted(set(sizes)))
        if key not in self._known_lengths:
            self._known_lengths[key] = self._with_iterations(dict(sizes))
        outputs, rows = self._known_lengths[key]
        return outputs, [kept[number] if n is None else kept[number][n] for number, n in rows]

    def _with_iterations(self, lengths: Mapping[str, int]) -> tuple[BackwardOutputs, list[tuple[int, int | None]]]:
        """Return the outputs for these lengths, and for each kept tensor its position and iteration."""
        first = {key: p for p in self.placed if p.iterations is not None for key in p.keys}
        loops = [self._rolled.get(own.keys[0]) for own in self.packs]
        packs = [
            own if its is None else _pack_of_all(own, first, lengths, self.label)
            for own, its in zip(self.packs, loops, strict=True)
        ]
        of_kept = {id(p): n for n, p in enumerate(p for p in self.placed if p.is_kept)}
        placed: list[Placed[PlacedReport]] = []
        rows: list[tuple[int, int | None]] = []
        for loop, own in itertools.groupby(self.placed, lambda p: "" if p.iterations is None else p.iterations.loop):
            members = [(p, None if p.iterations is None else set(p.iterations.of(lengths[loop]))) for p in own]
            for n in range(lengths[loop]) if loop else (None,):
                acting = [p for p, numbers in members if n is None or (numbers is not None and n in numbers)]
                placed += (p if n is None else p.at_iteration(n, lengths, self.label) for p in acting)
                rows += ((of_kept[id(p)], n) for p in acting if id(p) in of_kept)
        return replace(self, packs=tuple(packs), placed=tuple(placed)), rows

    def undue(self, is_due: Callable[[int], bool]) -> frozenset[RecordKey]:
        """Return the keys of measurements with intervals not due."""
        due = {every: is_due(every) for every in self._intervals}
        return frozenset(key for every, keys in self._sampled if not due[every] for key in keys)

    def kept_keys(self, is_due: Callable[[int], bool]) -> list[tuple[str, Owner, str] | None]:
        """Return kinds, owners and losses of kept tensors; None of one that is not due."""
        return [
            (what, owner, loss) if every is None or is_due(every) else None for what, owner, loss, every in self.kept
        ]

    def split(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Split the tensors: packs, kept tensors, new states."""
        packs, kept = len(self.packs), len(self.packs) + len(self.kept)
        return tensors[:packs], tensors[packs:kept], tensors[kept:]


def _execution_of(check: PlacedCheck, position: int) -> tuple[int, int, int]:
    """Return the place of a check in the order of execution; the backward of a loop begins with its last iteration."""
    order, iteration = 0 if check.seen is None else check.seen.order, check.site.iteration
    if iteration is None:
        return order, 0, 0
    return (order, iteration, position) if check.site.traits.in_forward else (order, -iteration, -position)


def _stack_of(reports: Iterable[tuple[Site, tuple[RecordKey, ...]]]) -> Stack:
    """Return the stack of the records of reports, in an order that each iteration keeps."""
    # By report, with the number of iteration 0 among the calls, and the stride.
    order: list[tuple[tuple[RecordKey, ...], int, int]] = []
    length, position = 0, 0
    begin: int | None = None
    for site, keys in reports:
        assert site.iteration is not None
        begin = site.iteration if begin is None else min(begin, site.iteration)
        if site.iteration >= length:
            length, position = site.iteration + 1, 0
        bases = tuple(replace(key, site=key.site.removesuffix(f"#{site.call}")) for key in keys)
        one = bases, site.call - site.iteration * site.stride, site.stride
        if one not in order:
            order.insert(position, one)
        position = order.index(one) + 1
    first = begin or 0
    return tuple(
        iterations_of(str(key), call + first * by, length - first, by) for keys, call, by in order for key in keys
    )


def iterations_of(address: str, first: int, length: int, stride: int = 1) -> tuple[str, ...]:
    """Return the addresses of a record in the calls of a loop, from an address without a number."""
    numbers = range(first, first + length * stride, stride)
    return tuple(f"{address}#{n}" if n else address for n in numbers)


def _pack_of_all(
    pack: Pack, first: Mapping[RecordKey, Placed[PlacedReport]], lengths: Mapping[str, int], label: str
) -> Pack:
    """Return the layout of a pack of a loop, with the keys of all iterations."""
    its = first[pack.keys[0]].iterations
    assert its is not None
    length = lengths[its.loop]
    keys: list[RecordKey] = []
    positions: list[int] = []
    for number, key in enumerate(pack.keys):
        placed = first[key]
        assert placed.iterations is not None
        for n in placed.iterations.of(length):
            keys.append(replace(key, site=with_label(str(placed.site_at(n, lengths)), label)))
            positions.append(number * length + n)
    return Pack(tuple(keys), pack.num_skips * length, positions=tuple(positions))


def in_order(placed: Iterable[Placed[PlacedReport]], keys: Iterable[RecordKey]) -> tuple[Placed[PlacedReport], ...]:
    """Return reports in the order of their first records.

    Reports without records come last.
    """
    position = {key: number for number, key in enumerate(keys)}
    return tuple(sorted(placed, key=lambda p: min((position[key] for key in p.keys), default=len(position))))


def _named(owner: Owner, label: str) -> tuple[str, str, int]:
    """Return kind, name and call of the owner of a clip."""
    if isinstance(owner, Site):
        return owner.kind, f"{owner.name}{label}", owner.call
    before, kind, name = owner.partition("group:")
    return f"{before}{kind[:-1]}", f"{name}{label}", 0
