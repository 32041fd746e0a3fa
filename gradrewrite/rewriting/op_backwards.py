"""The backward of single ops in a joint graph: the nodes between the markers of probes around ops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd
from gradrewrite.ir import editing, markers
from gradrewrite.ir.called_ops import CalledOp, OpBackward
from gradrewrite.numerics.library import LIBRARY

LIBRARY.define("op_vjp(Tensor[] errors, int[] given, Tensor[] gradients) -> Tensor[]")


def _vjp(errors: Sequence[Tensor], given: Sequence[int], gradients: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(g.size(), g.stride(), dtype=g.dtype, device=g.device) for g in gradients]


LIBRARY.impl("op_vjp", _vjp, "CompositeExplicitAutograd")
torch.library.register_fake("gradrewrite::op_vjp", _vjp, lib=LIBRARY)
# Stands for torch's own backward while a rule is traced; ``expand_vjps`` replaces it.
op_vjp: Callable[[list[Tensor], list[int], list[Tensor]], list[Tensor]] = torch.ops.gradrewrite.op_vjp.default


def find_op_backwards(graph: fx.Graph, ops: Sequence[CalledOp]) -> dict[int, OpBackward]:
    """Return the backwards of ops, by number of the op, of those that are in the graph."""
    found: dict[int, OpBackward] = {}
    for node in graph.nodes:
        if node.target is markers.mark_operands:
            values, number, are_results = node.args
            own = found.setdefault(number, OpBackward(ops[number]))
            setattr(own, "results" if are_results else "operands", list(values))
        elif node.target is markers.mark_op_error and aot_autograd.is_backward(node):
            _, number, result = node.args
            found.setdefault(number, OpBackward(ops[number])).errors[result] = node
        elif node.target is markers.mark_op_gradient and aot_autograd.is_backward(node):
            _, _, number, operand = node.args
            found.setdefault(number, OpBackward(ops[number])).gradients.setdefault(operand, []).append(node)
    return {number: own for number, own in found.items() if own.errors and own.gradients}


def nodes_of(backward: OpBackward) -> list[fx.Node]:
    """Return the nodes of the backward of an op, in the order of execution."""
    found: set[fx.Node] = set()
    todo = [marker.args[0] for marker in backward.ends]
    while todo:
        node = todo.pop()
        assert isinstance(node, fx.Node)
        is_own = node.op == "call_function" and aot_autograd.is_backward(node)
        if node in found or not is_own or node.target is markers.mark_op_error:
            continue
        found.add(node)
        todo += node.all_input_nodes
    return sorted(found)


def total_gradients(backward: OpBackward) -> tuple[dict[int, fx.Node], list[fx.Node]]:
    """Return the total gradient of each operand, and the new sums."""
    found: dict[int, fx.Node] = {}
    new: list[fx.Node] = []
    last = backward.ends[-1]
    for operand, markers_of in sorted(backward.gradients.items()):
        parts = [marker.args[0] for marker in markers_of]
        total = parts[0]
        assert isinstance(total, fx.Node)
        if len(parts) > 1:
            (total,), added = editing.compute(last.graph, _sum, parts, last)  # type: ignore[arg-type]
            new += added
        found[operand] = total
    return found, new


def _sum(first: Tensor, *others: Tensor) -> list[Tensor]:
    for other in others:
        first = first + other
    return [first]


def expand_vjps(
    new: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    backward: OpBackward,
    own: Sequence[fx.Node],
    totals: Mapping[int, fx.Node],
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Replace calls of ``op_vjp`` by copies of the backward; return new nodes and outputs.

    ``own`` are the nodes of the backward, and of its ``totals``, in the order of execution. For the errors of the op
    itself its own nodes are read.
    """
    left: list[fx.Node] = []
    replaced: dict[fx.Node, fx.Node] = {}
    for node in new:
        if node.target is not op_vjp:
            left.append(node)
            continue
        errors = dict(zip(node.args[1], node.args[0], strict=True))  # type: ignore[arg-type]
        copies: dict[fx.Node, fx.Node] = {}
        if any(errors.get(result) is not marker for result, marker in backward.errors.items()):
            zeros = {n: _zeros(marker, node) for n, marker in backward.errors.items() if n not in errors}
            left += zeros.values()
            copies = {marker: (errors | zeros)[n] for n, marker in backward.errors.items()}
            for inner in own:
                copies[inner] = editing.insert_copy(inner, copies, {}, node)
                left.append(copies[inner])
        results = [copies.get(total, total) for total in totals.values()]
        for getitem in list(node.users):
            assert getitem.target is operator.getitem
            replaced[getitem] = results[getitem.args[1]]  # type: ignore[index]
            editing.skip(getitem, replaced[getitem])
        editing.erase(node)
    return [node for node in left if node not in replaced], [replaced.get(node, node) for node in outputs]


def _zeros(marker: fx.Node, before: fx.Node) -> fx.Node:
    (node,), _ = editing.compute(marker.graph, lambda e: [torch.zeros_like(e)], [marker], before)
    return node


def replace_gradients(backward: OpBackward, results: Mapping[int, fx.Node]) -> str:
    """Replace the gradients of an op; return the reason on failure, else ``""``.

    Of several parts of a gradient, the first is replaced by the whole, and the others are left out of their sums.
    """
    parts = [marker for markers_of in backward.gradients.values() for marker in markers_of[1:]]
    sums = {marker: [u for u in marker.users if u.target is torch.ops.aten.add.Tensor] for marker in parts}
    if any(len(own) != len(marker.users) or len(own) != 1 for marker, own in sums.items()):
        return "reads an input in several parts, and the gradients of these are added up elsewhere"
    for operand, markers_of in backward.gradients.items():
        for marker in markers_of[1:]:
            (added,) = marker.users
            other = next(node for node in added.args[:2] if node is not marker)
            assert isinstance(other, fx.Node)
            editing.skip(added, other)
            editing.skip(marker, results[operand])
        editing.skip(markers_of[0], results[operand])
    for result in sorted(set(results.values())):
        editing.put_readers_behind(result)
    return ""
