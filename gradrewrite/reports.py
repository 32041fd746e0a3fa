"""What leaves a joint graph beside the gradients: nodes with records, packed; kept tensors; log lines; checks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from gradrewrite import _torch, edit
from gradrewrite.joint import value_of
from gradrewrite.records import Carried, Check, LogLine
from gradrewrite.sites import Site
from gradrewrite.statistics import pack
from gradrewrite.tracing import Traced


@dataclass(frozen=True, slots=True)
class Report:
    """A node with one or more records; ``skips`` if all of them are counts of checks that skip."""

    addresses: tuple[str, ...]
    node: fx.Node
    is_forward: bool
    skips: bool = False


@dataclass
class Reports:
    """Nodes that have to leave the graph."""

    records: list[Report] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    kept: list[tuple[Site, fx.Node]] = field(default_factory=list)
    logs: list[LogLine] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    bounds: list[tuple[str, float]] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    _packs: list[tuple[tuple[str, ...], list[Report]]] = field(default_factory=list)

    def add(self, where: str, site: Site, traced: Traced, extras: Sequence[fx.Node]) -> list[str]:
        """Take what a traced action returns beside the replacement; returns the addresses of its records."""
        addresses: list[str] = []
        for names, node in zip(traced.records, extras, strict=False):
            new = tuple(self.addresses(names, where))
            addresses += new
            self.records.append(Report(new, node, site.kind == "activation", traced.fails == "skip"))
        self.kept += [(site, node) for node in extras[len(traced.records) :]]
        if traced.logs:
            self.logs.append(LogLine(site, *addresses[-3:]))
        if traced.bound is not None:
            name, bound = traced.bound
            suffix = addresses[0].partition("@")[0].partition(".")[2]  # numbered like what it bounds
            self.bounds.append((f"{name}{'.' + suffix if suffix else ''}@{where}", bound))
        return addresses

    def addresses(self, names: Iterable[str], where: str) -> list[str]:
        """Addresses of new records; a name used before is numbered."""
        new = []
        for name in names:
            address, number = f"{name}@{where}", 2
            while address in self.taken:
                address, number = f"{name}.{number}@{where}", number + 1
            self.taken.add(address)
            new.append(address)
        return new

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
            traced = _torch.trace(lambda *values: [pack(*values)], [value_of(n) for n in nodes])
            tag = "is_forward" if is_forward else "is_backward"
            (packed,), added = edit.splice(traced, graph, nodes, graph.output_node(), tag)
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
        )
