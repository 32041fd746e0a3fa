"""The result of the rewrite of a joint graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gradrewrite.ir.edits import Edit
from gradrewrite.ir.loop_code import LoopCode
from gradrewrite.ir.marked_loops import Loop
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.zero_cover import ZeroCover
from gradrewrite.policy.rules import Answered
from gradrewrite.rewriting.inserters.saved import SavedRewrite
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """The result of the rewrite of a joint graph."""

    answers: Mapping[Site, tuple[Answered, ...]]  # of the policy at all sites, in their order
    edits: tuple[Edit, ...]
    record_nodes: tuple[str, ...]  # names of the nodes that carry records out of the graph
    anchors: Mapping[Site, Anchor]
    outputs: BackwardOutputs
    live: Mapping[str, Tensor]  # what the graph reads at every backward, by name
    out_of_reach: tuple[Site, ...]  # with answers, but outside of the graph
    # Whether an action assumes something of a size that depends on data. Such an assumption becomes part of the code of
    # the forward and the backward, but not of the key under which Inductor stores that code.
    assumes: bool
    # Nodes in the place of others, by name, with the number of a loss: of the backward of single losses (see
    # ``LossGradients.copies``), and the code of loops.
    copies: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    refused_outputs: frozenset[int] = frozenset()  # of the Dynamo graph: those may receive no gradient
    notes: tuple[str, ...] = ()  # for warnings
    saved: SavedRewrite = field(default_factory=SavedRewrite)
    loops: tuple[LoopCode | Loop, ...] = ()  # which lives as long as it may run
    zeros: Mapping[Site, ZeroCover] = field(default_factory=dict)  # of the backward of ops, where zeros stay zeros

    @property
    def sites(self) -> tuple[Site, ...]:
        """All sites, in their order."""
        return tuple(self.answers)
