"""Rewriting a joint graph to show it, beside the graph as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from gradrewrite import edit
from gradrewrite.joint import JointGraph
from gradrewrite.owners import read_origins, with_edits
from gradrewrite.places import Leaf
from gradrewrite.policy import Policy
from gradrewrite.probes import Value
from gradrewrite.recipe import Given
from gradrewrite.rewrite import ScaleOf, rewrite
from gradrewrite.sites import Site


def show(
    gm: fx.GraphModule,
    values: Sequence[Value],
    leaves: Mapping[int, Leaf],
    policy: Policy,
    *,
    given: Mapping[int, Given] | None = None,
    scale_of: ScaleOf | None = None,
) -> tuple[JointGraph, tuple[tuple[Site, tuple[Any, ...]], ...]]:
    """Rewrite a joint graph and show it beside the graph as it was; and the answers at sites that are out of reach."""
    meaning = read_origins(gm.graph, values, leaves, given or {})
    before = edit.copy_of(gm)
    edit.erase_markers(before.graph)
    before.recompile()  # the copy had the markers
    result = rewrite(gm.graph, values, leaves, policy, given=given, scale_of=scale_of)
    gm.graph.lint()
    after = edit.copy_of(gm)  # as plain as the graph before: AOTAutograd's own has two lists for its inputs
    carriers = [node for node in after.graph.nodes if node.name in result.carriers]
    meaning = with_edits(meaning, result.anchors, result.edits, carriers)
    plain = JointGraph(before, result.sites, meaning=meaning)
    return JointGraph(after, result.sites, result.edits, result.carriers, plain, meaning), result.out_of_reach
