"""A rewritten joint graph beside the plain one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gradrewrite.ir import editing
from gradrewrite.ir.attribution import read_provenance, with_edits
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.marked_loops import hold_loops
from gradrewrite.ir.replay_graph import ReplayGraph
from gradrewrite.policy.rules import Answered
from gradrewrite.policy.sampling import Measured
from gradrewrite.rewriting.config import RewriteConfig
from gradrewrite.rewriting.joint import rewrite_joint_graph
from gradrewrite.rewriting.result import RewriteResult
from gradrewrite.sites import Site


def rewrite_and_compare(
    marked: MarkedJointGraph,
    config: RewriteConfig,
    asked: Mapping[Site, tuple[Answered, ...]] = MappingProxyType({}),
    measured: Measured = "all",
    *,
    is_replayed: bool = False,
) -> tuple[JointGraph, RewriteResult, ReplayGraph | None]:
    """Rewrite a joint graph, and return it beside a copy of the graph as it was; see ``rewrite_joint_graph``."""
    gm = marked.graph.owning_module
    assert gm is not None
    provenance = read_provenance(marked)
    hold_loops(marked.graph)
    before = editing.copy_of(gm)
    editing.erase_markers(before.graph)
    before.recompile()  # the copy had the markers
    result, replay_graph = rewrite_joint_graph(marked, config, asked, measured, is_replayed=is_replayed)
    gm.graph.lint()
    after = editing.copy_of(gm)  # as plain as the graph before: AOTAutograd's own has two lists for its inputs
    record_nodes = [node for node in after.graph.nodes if node.name in result.record_nodes]
    provenance = with_edits(
        provenance, result.anchors, result.edits, record_nodes, result.copies, result.saved.restoring
    )
    plain = JointGraph(before, result.sites, provenance=provenance)
    joint = JointGraph(after, result.sites, result.edits, result.record_nodes, plain, provenance)
    return joint, result, replay_graph
