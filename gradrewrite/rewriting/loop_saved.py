"""Saved values of an iteration of a loop."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import fx

from gradrewrite._compat import fake_tensors, operators
from gradrewrite.ir import editing

_MOST = 8  # ops that are run again for one value


def saved_nodes(forward: fx.GraphModule, backward: fx.GraphModule, num_given: int) -> list[fx.Node]:
    """Return the saved nodes of a forward, in the order of the inputs of its backward.

    ``num_given`` is the number of inputs behind them.
    """
    known = [*forward.graph.find_nodes(op="placeholder"), *editing.outputs_of(forward.graph.output_node())]
    by_name = {node.name: node for node in known if isinstance(node, fx.Node)}
    placeholders = backward.graph.find_nodes(op="placeholder")
    return [by_name[node.name] for node in placeholders[: len(placeholders) - num_given]]


def save_less(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    saved: list[fx.Node],
    carried: list[tuple[fx.Node, fx.Node]],
    results: Collection[fx.Node],
    free: Collection[fx.Node],
) -> list[fx.Node]:
    """Compute saved values again in the backward.

    torch's partitioner sees one iteration. It does not know that the stack of a carry (``carried``: before and behind
    an iteration) has both of its values, and which inputs take no memory (``free``). Values are computed by a few
    elementwise ops and views, from others that take less memory. Returns what is saved then, in the order of the inputs
    of the backward.
    """
    placeholders = forward.graph.find_nodes(op="placeholder")
    sources = {*placeholders, *results, *saved}
    stacks = _stacks(carried)
    kept = {*(stacks.get(node, node) for node in saved), *free}
    there = dict(zip(saved, backward.graph.find_nodes(op="placeholder"), strict=False))
    computed = {node.name: node for node in backward.graph.nodes if node.op == "call_function"}
    order = {node: n for n, node in enumerate(forward.graph.nodes)}
    for node in sorted(set(saved).difference(placeholders, results), key=order.__getitem__):
        chain = sorted(_chain(node, sources - {node}), key=order.__getitem__)
        if not chain or any(user.target is torch.ops.aten.sym_size.int for user in there[node].users):
            continue
        read = [n for n in dict.fromkeys(n for made in chain for n in made.all_input_nodes) if n not in chain]
        cost = sum({stack: _size(stack) for n in read if (stack := stacks.get(n, n)) not in kept}.values())
        if cost < _size(node) or (cost == _size(node) and all(map(_is_view, chain))):
            kept.update(stacks.get(n, n) for n in read)
            _compute_again(there, chain, read, computed)
    backward.graph.eliminate_dead_code()
    editing.erase_unused(backward.graph, [own for own in there.values() if own.op == "placeholder"])
    by_input = {own: node for node, own in there.items() if own.op == "placeholder"}
    return [by_input[own] for own in backward.graph.find_nodes(op="placeholder") if own in by_input]


def _stacks(carried: list[tuple[fx.Node, fx.Node]]) -> dict[fx.Node, fx.Node]:
    """Return a name for the stack of each value of a carry: its first value.

    A value of two carries is in the stack of the first one, as in the code.
    """
    behind = {after: before for before, after in reversed(carried)}
    return behind | {before: before for before, _ in carried}


def _chain(node: fx.Node, sources: Collection[fx.Node]) -> set[fx.Node]:
    """Return the ops from sources to a node.

    None if they are too many, or of other kinds.
    """
    chain: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        made = waiting.pop()
        if made in sources or made in chain:
            continue
        if not made.all_input_nodes or not (operators.is_pointwise(made) or _is_view(made)) or len(chain) == _MOST:
            return set()
        chain.add(made)
        waiting += made.all_input_nodes
    return chain


def _is_view(node: fx.Node) -> bool:
    is_strided = node.target is torch.ops.aten.as_strided.default  # of memory, and a row of a stack is contiguous
    return operators.memory_of(node) is not node and not is_strided and not operators.written_by(node)


def _size(node: fx.Node) -> int:
    """Return the bytes of a value, for the sizes at hand."""
    value = node.meta["val"]
    return math.prod(map(fake_tensors.hint_of, value.shape)) * int(value.itemsize)


def _compute_again(
    there: dict[fx.Node, fx.Node], chain: list[fx.Node], read: list[fx.Node], computed: Mapping[str, fx.Node]
) -> None:
    """Compute the last node of a chain in the backward.

    ``there`` has the nodes of the backward by those of the forward.
    """
    saved = there[chain[-1]]
    for node in read:
        if node not in there:
            there[node] = editing.read_from_forward(node, saved, computed.get(node.name))
    for node in chain:
        there[node] = editing.copy_from_forward(node, there, saved.graph)
    editing.skip(saved, there[chain[-1]])
