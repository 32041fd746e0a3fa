"""Gradients that a forward computes of itself, by ``torch.autograd.grad``, in a Dynamo graph."""

from __future__ import annotations

import torch
from torch import fx

from gradrewrite.instrumentation.dynamo_nodes import checkpoint_body, is_checkpoint

# What the loops of recurrent layers and rolled loops leave to torch: their backward is one operator without a backward.
REASON = "torch.autograd.grad in the forward differentiates it"


def is_inner_gradient(node: fx.Node) -> bool:
    """Return whether a node is a call of ``torch.autograd.grad``."""
    return node.target is torch.autograd.grad


def differentiated_inside(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that a gradient inside of the forward depends on, those in bodies of checkpoints too."""
    bodies = {node: checkpoint_body(gm, node, {})[0] for node in gm.graph.nodes if is_checkpoint(node)}
    found: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if node in bodies:
            inside = differentiated_inside(bodies[node])
            found |= set(bodies[node].graph.nodes) if node in found else inside
            if inside:
                found.add(node)
        if node in found or is_inner_gradient(node):
            found |= {node, *node.all_input_nodes}
    return found
