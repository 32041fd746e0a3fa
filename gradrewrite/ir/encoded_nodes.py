"""Nodes that encode and decode stored forms, as their operations."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, fx

from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.numerics.stored_forms import FORMS, decode, decode_with, encode, encode_with


def expand(graph: fx.Graph) -> None:
    """Replace encoding and decoding by their operations in a graph of the forward or of the backward, to be fused."""
    for node in graph.find_nodes(op="call_function", target=encode):
        tensor, form = node.args
        if not (FORMS[form].is_encoded_apart and value_of(tensor).device.type == "cpu"):
            results, _ = editing.compute(graph, partial(encode_with, form=form), [tensor], node, "is_forward")
            for getitem in list(node.users):
                editing.replace_node(getitem, results[getitem.args[1]])
            editing.erase(node)
    for node in graph.find_nodes(op="call_function", target=decode):
        parts, form, dtype = node.args
        if not (FORMS[form].is_decoded_apart and value_of(node).device.type == "cpu"):
            run = partial(_decoded, form=form, dtype=dtype)
            (result,), _ = editing.compute(graph, run, parts, node)
            editing.replace_node(node, result)


def _decoded(*parts: Tensor, form: str, dtype: torch.dtype) -> list[Tensor]:
    return [decode_with(parts, form, dtype)]
