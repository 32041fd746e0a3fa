"""The result of the rewrite of a joint graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gradrewrite.ir.edits import Edit
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.replay_graph import ReplayGraph
from gradrewrite.policy.insertions import Insertion
from gradrewrite.policy.rules import Answered
from gradrewrite.rewriting.inserters.saved import SavedRewrite
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """The result of the rewrite of a joint graph."""

    sites: tuple[Site, ...]
    answers: tuple[tuple[Answered, ...], ...]  # of the policy, site by site
    edits: tuple[Edit, ...]
    record_nodes: tuple[str, ...]  # names of the nodes that carry records out of the graph
    anchors: Mapping[Site, Anchor]
    outputs: BackwardOutputs
    live: Mapping[str, Tensor]  # what the graph reads at every backward, by name
    out_of_reach: tuple[tuple[Site, tuple[Insertion, ...]], ...]  # answered, but outside of the graph
    replay_graph: ReplayGraph | None  # None where nothing is checked
    # Whether an action assumes something of a size that depends on data. Such an assumption becomes part of the code of
    # the forward and the backward, but not of the key under which Inductor stores that code.
    assumes: bool
    # Edits that reduce the plain part of a global tensor, of which each process knows its own alone.
    of_parts: tuple[Edit, ...] = ()
    # Nodes of the backward of single losses, by name; see ``LossGradients.copies``.
    copies_of_losses: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    refused_outputs: frozenset[int] = frozenset()  # of the Dynamo graph: those may receive no gradient
    notes: tuple[str, ...] = ()  # for warnings
    saved: SavedRewrite = field(default_factory=SavedRewrite)
    candidates: tuple[Site, ...] = ()  # saved sites at which callbacks were asked, before it was known what is saved
