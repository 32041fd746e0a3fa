"""Restored values in the backward, in the place of those of the forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import fx

from gradrewrite._compat import aot_autograd, operators
from gradrewrite.ir import editing


def backward_closure(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of the backward alone: those that depend on the gradients of outputs."""
    found = set(aot_autograd.tangents(graph))
    for node in graph.nodes:
        is_bound = node.meta.get("partitioner_tag") == "must_be_in_backward"
        if node.op == "call_function" and (is_bound or not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def redirect_backward(
    graph: fx.Graph,
    closure: Collection[fx.Node],
    restored: Mapping[fx.Node, fx.Node],
    is_kept: Callable[[fx.Node], bool],
) -> dict[fx.Node, fx.Node]:
    """Let the backward read restored values, and recomputed ones made from these.

    ``closure`` are the nodes of the backward alone; ``restored`` has what is read instead of saved tensors; ``is_kept``
    says of a node whether its value is saved unchanged. Returns the inserted nodes, each with the first saved tensor
    that it is made from.
    """
    values = _BackwardValues(graph, closure, restored, is_kept)
    for node in closure:
        for given in node.all_input_nodes:
            if given not in closure:
                editing.replace_input(node, given, values.of(given))
    results = enumerate(editing.outputs_of(graph.output_node()))
    for position, result in list(results)[aot_autograd.num_forward_outputs(graph) :]:
        if isinstance(result, fx.Node) and result not in closure:
            editing.replace_output(graph, position, values.of(result))
    editing.erase_unused(graph, values.replaced)
    return values.twins


class _BackwardValues:
    """The nodes to be read by the backward, by those that it reads now."""

    def __init__(
        self,
        graph: fx.Graph,
        closure: Collection[fx.Node],
        restored: Mapping[fx.Node, fx.Node],
        is_kept: Callable[[fx.Node], bool],
    ) -> None:
        self._made_from = {new: base for base, new in restored.items()}
        self.twins: dict[fx.Node, fx.Node] = {}
        self.replaced: list[fx.Node] = []  # in the order of execution
        self._is_kept = is_kept
        self._first = _first_of_equals([node for node in graph.nodes if node not in closure])
        self._known = {self._first.get(base, base): new for base, new in restored.items()} | dict(restored)

    def of(self, wanted: fx.Node) -> fx.Node:
        todo = [wanted]
        while todo:  # not by recursion: chains of operations are long
            waiting = self._find(todo[-1])
            todo += waiting
            if not waiting:
                todo.pop()
        return self._known[wanted]

    def _find(self, node: fx.Node) -> list[fx.Node]:
        """Find the replacement of a node, or return other nodes to be found before."""
        if node in self._known:
            return []
        same = node if self._is_kept(node) else self._first.get(node, node)
        if same is not node:
            if same not in self._known:
                return [same]
            other = self._known[same]
            self._known[node] = node if other is same else other
        elif self._is_kept(node) or node.op != "call_function" or operators.is_random(node):
            self._known[node] = node
        elif waiting := [read for read in node.all_input_nodes if read not in self._known]:
            return waiting
        else:
            self._known[node] = self._recomputed(node)
        return []

    def _recomputed(self, node: fx.Node) -> fx.Node:
        inputs = {read: self._known[read] for read in node.all_input_nodes}
        if all(read is other for read, other in inputs.items()):
            return node  # the partitioner saves it, or computes it again, as it likes
        twin = editing.insert_twin(node, inputs, f"{node.name}_restored")
        aot_autograd.compute_again([twin])
        changed = next(other for read, other in inputs.items() if read is not other)
        self.twins[twin] = self._made_from[twin] = self._made_from[changed]
        self.replaced.append(node)
        return twin


def _first_of_equals(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return, for each node, the first one with the same computation, as the partitioner merges them."""
    first: dict[tuple[object, str], fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.op != "call_function" or operators.is_random(node) or operators.written_by(node):
            continue
        key = (node.target, repr(fx.map_arg((node.args, node.kwargs), lambda n: found.get(n, n))))
        found[node] = first.setdefault(key, node)
    return found
