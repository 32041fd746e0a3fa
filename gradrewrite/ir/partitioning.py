"""Cutting a joint graph into forward and backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from gradrewrite._compat import aot_autograd
from gradrewrite.ir import editing


def partition(
    gm: fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    inner: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    num_fwd_outputs: int,
    **kwargs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition a joint graph by a partitioner of torch, with held nodes as outputs.

    Else the partitioner may compute in the backward what the forward has to, even from an output of the model,
    which the caller may change in place. What the backward needs of an input that the forward writes is saved as it was
    read: torch's partitioners compute it again from what was written (torch 2.13).
    """
    written = aot_autograd.written_inputs(gm.graph)
    readings = [copied for node in written for copied in editing.read_before_writing(node)]
    aot_autograd.always_save(readings)
    early = editing.nodes_for_forward(gm.graph)
    count = editing.release(gm.graph)
    if early:
        editing.insert_outputs(gm.graph, num_fwd_outputs, early)
        aot_autograd.always_save(early)
    forward, backward = inner(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs + len(early), **kwargs)
    if early:
        editing.drop_outputs(forward.graph, num_fwd_outputs, len(early))
    if early or readings:
        editing.read_directly(forward.graph, {node.name for node in readings})
        forward.recompile()
    if count:
        editing.hold_last(backward.graph, count)  # recompiled when it is compiled
    return forward, backward


def saved_names(gm: fx.GraphModule, further: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the nodes that the forward would save, by torch's partitioner; the graph stays as it is.

    ``further`` are nodes of the backward that will be returned, too.
    """
    trial = editing.copy_of(gm)
    marked = {node.name: node for node in trial.graph.nodes}
    editing.add_outputs(trial.graph, [marked[name] for name in further])  # markers, too, where two sites are one tensor
    editing.erase_markers(trial.graph)
    nodes = {node.name: node for node in trial.graph.nodes}
    count = aot_autograd.num_forward_outputs(trial.graph)
    forward, _ = partition(trial, (), inner=aot_autograd.min_cut_partition, num_fwd_outputs=count)
    saved = editing.outputs_of(forward.graph.output_node())[count:]
    return tuple(node.name for node in saved if isinstance(node, fx.Node) and _is_of(nodes, node))


def _is_of(nodes: Mapping[str, fx.Node], node: fx.Node) -> bool:
    """Whether a node stands for one of these; of random ops in checkpoints the partitioner saves a state it made."""
    is_made = node.target is operator.getitem and node.all_input_nodes[0].name not in nodes
    return node.name in nodes and not is_made
