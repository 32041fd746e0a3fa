"""Boundary counters: counts of non-finite elements at the boundary of a checked graph.

They tell a faulty input from a faulty loss: inputs (``data:x``), outputs (``output:0``), and the gradients that come in
from outside (``outside:0``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd
from gradrewrite.ir import editing
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.numerics.measuring import measure
from gradrewrite.rewriting.record_nodes import RecordNode, RecordNumbering


def insert_boundary_counters(
    graph: fx.Graph, inputs: Mapping[fx.Node, GraphInput], tangents: Sequence[fx.Node], numbering: RecordNumbering
) -> tuple[list[RecordNode], list[str]]:
    """Count non-finite elements of arguments (in a mask NaN alone), incoming gradients, and, if there are any, outputs.

    Returns the nodes with the counts, and the names of all new nodes. On the CPU there are none: all is counted where
    the records are packed, but for the inputs of a graph that writes to some.
    """
    first = next(node for node in graph.nodes if node.op != "placeholder")
    writes = bool(graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))
    records: list[RecordNode] = []
    names: list[str] = []

    def count(node: fx.Node, where: str, before: fx.Node, is_forward: bool, name: str = "nonfinite") -> None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point or value.layout is not torch.strided:
            return
        keys = tuple(numbering.new([name], where))
        is_written = writes and node.op == "placeholder" and is_forward
        if value.device.type == "cpu" and not is_written:
            records.append(RecordNode(keys, node, is_forward, statistics=(name,)))
            return
        run = partial(_counted, name=name, is_opaque=value.device.type != "cuda")
        (counted,), new = editing.compute(graph, run, [node], before, "is_forward" if is_forward else "is_backward")
        names.extend(n.name for n in new)
        records.append(RecordNode(keys, counted, is_forward))

    for node, given in inputs.items():
        if given.role == "input":
            count(node, f"data:{given.name}", first, True, "nan" if given.is_mask else "nonfinite")
    if tangents:
        for number, node in enumerate(aot_autograd.forward_outputs(graph)):
            count(node, f"output:{number}", graph.output_node(), True)
    for number, node in enumerate(tangents):
        count(node, f"outside:{number}", first, False)
    return records, names


def _counted(tensor: Tensor, name: str, *, is_opaque: bool) -> list[Tensor]:
    return [measure(tensor, [name], is_opaque=is_opaque)]
