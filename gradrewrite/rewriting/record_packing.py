"""What leaves a joint graph beside the gradients: nodes with records, packed; kept tensors; log lines; checks."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from gradrewrite._compat import make_fx
from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.ops import pack
from gradrewrite.ir.record_layout import BOUNDS, Carried, Check, LogLine
from gradrewrite.ir.statistics import COUNTS
from gradrewrite.rewriting.action_tracing import Traced
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class Report:
    """A node with one or more records; ``skips`` if all of them are counts of checks that skip."""

    addresses: tuple[str, ...]
    node: fx.Node
    is_forward: bool
    skips: bool = False


class Addresses:
    """The addresses ``record@site`` of a graph; the only place that numbers a name that was used before at its site."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}  # of the occurrence, by address
        self.counts: set[str] = set()  # those of counts of elements

    def new(self, names: Iterable[str], where: str, *, number: int | None = None) -> list[str]:
        """Addresses of new records: each with the first number that is free, or with this one if it is."""
        found = []
        for name in names:
            wanted = (n for n in itertools.chain([number or 1], itertools.count(1)))
            chosen = next(n for n in wanted if _address(name, n, where) not in self._number)
            found.append(_address(name, chosen, where))
            self._number[found[-1]] = chosen
            if name in COUNTS:
                self.counts.add(found[-1])
        return found

    def of_action(self, named: Sequence[Sequence[str]], where: str, bound: str | None) -> tuple[list[list[str]], str]:
        """Addresses of what one action reports.

        Args:
            named: Names of its records, in each of its tensors.
            where: The site.
            bound: Name of a bound that is a number, and so no record; None if there is none.

        Returns:
            The addresses, and that of the bound (``""`` if there is none); bounds are numbered like what they bound.
        """
        plain = self.new((name for names in named for name in names if name not in BOUNDS), where)
        number = self._number[plain[0]] if plain else None
        rest = iter(plain)
        addresses = [
            [self.new([name], where, number=number)[0] if name in BOUNDS else next(rest) for name in names]
            for names in named
        ]
        return addresses, self.new([bound], where, number=number)[0] if bound is not None else ""


@dataclass
class Reports:
    """Nodes that have to leave the graph."""

    records: list[Report] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    kept: list[tuple[Site, fx.Node]] = field(default_factory=list)
    logs: list[LogLine] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    bounds: list[tuple[str, float]] = field(default_factory=list)
    addresses: Addresses = field(default_factory=Addresses)
    _packs: list[tuple[tuple[str, ...], list[Report]]] = field(default_factory=list)

    def add(self, where: str, site: Site, traced: Traced, extras: Sequence[fx.Node]) -> list[str]:
        """Take what a traced action returns beside the replacement; returns the addresses of its records."""
        bound = None if traced.bound is None else traced.bound[0]
        named, address_of_bound = self.addresses.of_action(traced.records, where, bound)
        for own, node in zip(named, extras, strict=False):
            self.records.append(Report(tuple(own), node, site.kind == "activation", traced.fails == "skip"))
        addresses = [address for own in named for address in own]
        self.kept += [(site, node) for node in extras[len(traced.records) :]]
        if traced.logs:
            self.logs.append(LogLine(site, *addresses[-3:]))
        if traced.bound is not None:
            self.bounds.append((address_of_bound, traced.bound[1]))
        return addresses

    def pack_into(self, graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
        """Pack the records; returns the packs and all new nodes."""
        groups: dict[tuple[torch.device, bool], list[Report]] = defaultdict(list)
        for report in sorted(self.records, key=lambda r: not r.skips):
            # Those of the forward are packed in the forward: one tensor is carried into the backward.
            groups[value_of(report.node).device, report.is_forward].append(report)
        packs: list[fx.Node] = []
        new: list[fx.Node] = []
        for (_, is_forward), reports in groups.items():
            nodes = [report.node for report in reports]
            traced = make_fx.trace(lambda *values: [pack(*values)], [value_of(n) for n in nodes])
            tag = "is_forward" if is_forward else "is_backward"
            (packed,), added = editing.splice(traced, graph, nodes, graph.output_node(), tag)
            packs.append(packed)
            new += added
        self._packs = [(tuple(a for r in reports for a in r.addresses), reports) for reports in groups.values()]
        return packs, new

    def carried(self) -> Carried:
        """What leaves the graph, for the run time; after ``pack_into``."""
        return Carried(
            packs=tuple(addresses for addresses, _ in self._packs),
            num_skips=tuple(sum(len(r.addresses) for r in reports if r.skips) for _, reports in self._packs),
            kept=tuple(s for s, _ in self.kept),
            logs=tuple(self.logs),
            groups=tuple(self.groups),
            checks=tuple(sorted(self.checks, key=lambda check: check.order)),
            bounds=tuple(self.bounds),
            counts=frozenset(self.addresses.counts),
        )


def _address(name: str, number: int, where: str) -> str:
    return f"{name}@{where}" if number == 1 else f"{name}.{number}@{where}"
