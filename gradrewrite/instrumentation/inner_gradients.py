"""Gradients that a forward computes of itself, by ``torch.autograd.grad``, in a Dynamo graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from gradrewrite.errors import TraceError
from gradrewrite.instrumentation.dynamo_nodes import checkpoint_body, is_checkpoint, op_name
from gradrewrite.instrumentation.source_locations import source_of

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


def check_inner_gradients(gm: fx.GraphModule) -> None:
    """Refuse custom autograd functions that are differentiated twice: torch's tracer drops their second derivative."""
    for node in gm.graph.nodes:
        if is_checkpoint(node):
            check_inner_gradients(checkpoint_body(gm, node, {})[0])
        elif is_inner_gradient(node) and _argument(node, 4, "create_graph"):
            for own in _between(_argument(node, 1, "inputs"), _argument(node, 0, "outputs")):
                _check_twice(gm, own)


def _check_twice(gm: fx.GraphModule, node: fx.Node) -> None:
    if is_checkpoint(node):
        for inner in checkpoint_body(gm, node, {})[0].graph.nodes:
            _check_twice(gm, inner)
    elif op_name(node) == "apply":
        raise TraceError(
            "a custom autograd.Function is differentiated twice, and torch's tracer would drop the derivative of its "
            f"backward\n  {source_of(node)}\n  Write it with torch's operations, or as a torch.library.custom_op with "
            "register_autograd; or take the gradient as a constant (retain_graph=True, no create_graph)",
            code="second-backward",
        )


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _between(first: Any, last: Any) -> Iterator[fx.Node]:
    """Yield the nodes on the ways from some nodes to others."""
    begin = set[fx.Node]()
    fx.node.map_arg(first, begin.add)
    behind, todo = set(begin), list(begin)
    while todo:
        new = [user for user in todo.pop().users if user not in behind]
        behind.update(new)
        todo += new
    ends = list[fx.Node]()
    fx.node.map_arg(last, ends.append)
    seen, todo = set(ends), ends
    while todo:
        node = todo.pop()
        if node in behind and node not in begin:
            yield node
            new = [given for given in node.all_input_nodes if given not in seen]
            seen.update(new)
            todo += new
