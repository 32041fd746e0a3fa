"""Packing of records: the nodes that leave a joint graph beside the gradients, and their layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from gradrewrite._compat import make_fx
from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.ops import pack
from gradrewrite.ir.record_layout import BackwardOutputs, Check, LogLine, RecordKey
from gradrewrite.rewriting.action_tracing import TracedAction
from gradrewrite.rewriting.record_nodes import RecordNode, RecordNumbering
from gradrewrite.sites import Site


@dataclass
class RecordPacking:
    """The nodes that become auxiliary outputs of the backward.

    Attributes:
        records: Nodes of records.
        checks: The finite checks.
        kept: Nodes that ``Keep`` keeps, by their site.
        logs: Log lines of clips.
        groups: Names of the groups that are clipped together.
        bounds: Bounds of clips that the host has.
        numbering: Makes the keys of records.
    """

    records: list[RecordNode] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    kept: list[tuple[Site, fx.Node]] = field(default_factory=list)
    logs: list[LogLine] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    bounds: list[tuple[RecordKey, float | Tensor]] = field(default_factory=list)
    numbering: RecordNumbering = field(default_factory=RecordNumbering)

    def add(self, where: str, site: Site, traced: TracedAction, extras: Sequence[fx.Node]) -> list[RecordKey]:
        """Take what a traced action returns beside the replacement; returns the keys of its records."""
        bound = None if traced.bound is None else traced.bound[0]
        named, key_of_bound = self.numbering.of_action(traced.records, where, bound)
        for own, node in zip(named, extras, strict=False):
            self.records.append(RecordNode(tuple(own), node, site.kind == "activation", traced.fails == "skip"))
        keys = [key for own in named for key in own]
        self.kept += [(site, node) for node in extras[len(traced.records) :]]
        if traced.logs:
            self.logs.append(LogLine(site, *keys[-3:]))
        if traced.bound is not None and key_of_bound is not None:
            self.bounds.append((key_of_bound, traced.bound[1]))
        return keys

    def pack_into(self, graph: fx.Graph) -> tuple[BackwardOutputs, list[fx.Node]]:
        """Pack the records and hold what leaves the graph; returns its layout and all new nodes."""
        groups: dict[tuple[torch.device, bool], list[RecordNode]] = defaultdict(list)
        for record in sorted(self.records, key=lambda r: not r.skips):
            # Those of the forward are packed in the forward: one tensor is carried into the backward.
            groups[value_of(record.node).device, record.is_forward].append(record)
        packs: list[fx.Node] = []
        new: list[fx.Node] = []
        for (_, is_forward), records in groups.items():
            nodes = [record.node for record in records]
            traced = make_fx.trace(lambda *values: [pack(*values)], [value_of(n) for n in nodes])
            tag = "is_forward" if is_forward else "is_backward"
            (packed,), added = editing.splice(traced, graph, nodes, graph.output_node(), tag)
            packs.append(packed)
            new += added
        held = packs + [node for _, node in self.kept]
        if held:
            new.append(editing.hold(graph, held))
        return self._layout(list(groups.values())), new

    def _layout(self, packs: Sequence[Sequence[RecordNode]]) -> BackwardOutputs:
        return BackwardOutputs(
            packs=tuple(tuple(key for record in records for key in record.keys) for records in packs),
            num_skips=tuple(sum(len(r.keys) for r in records if r.skips) for records in packs),
            kept=tuple(site for site, _ in self.kept),
            logs=tuple(self.logs),
            groups=tuple(self.groups),
            checks=tuple(sorted(self.checks, key=lambda check: check.order)),
            bounds=tuple(self.bounds),
            counts=frozenset(self.numbering.counts),
        )
