"""Whether a traced function is elementwise in its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gradrewrite.ir.markers import value_of


def constants_of(graph: fx.Graph) -> list[Any]:
    """Return operations and numbers of a traced function, in order; sizes of tensors that are filled are not in it."""
    position = {node: n for n, node in enumerate(graph.nodes)}
    found = []
    for node in graph.nodes:
        args = node.args[1:] if node.target is torch.ops.aten.full.default else node.args
        if node.op == "call_function":
            given = fx.node.map_arg((args, node.kwargs), lambda other: f"node {position[other]}")
            found.append((node.target, repr(given)))
    return found


def reason_not_elementwise(graph: fx.Graph) -> str:
    """Return why a traced function is not elementwise in its inputs; ``""`` if it is."""
    derived = set(graph.find_nodes(op="placeholder"))
    for node in graph.nodes:
        if node.op == "get_attr" and value_of(node).numel() != 1:
            return "it reads a tensor of many elements, of which a part is not known"
        if node.op != "call_function":
            continue
        if derived.isdisjoint(node.all_input_nodes):
            if value_of(node).numel() != 1 and node.target is not torch.ops.aten.full.default:
                return f"{node.target} makes a tensor of the size of the gradient"
            continue
        derived.add(node)
        if torch.Tag.pointwise not in node.target.tags and node.target not in _LIKE:
            return f"{node.target} is not elementwise"
    return ""


_LIKE = frozenset((torch.ops.aten.full_like.default, torch.ops.aten.zeros_like.default))
