"""Values of the forward, read by inserted nodes of the backward."""

from __future__ import annotations

from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, fake_tensors
from gradrewrite.ir import editing


class ForwardValues:
    """Saves values of a joint graph's forward for inserted nodes without saving outputs of the model.

    The caller may change an output in place before the backward, and autograd then refuses a backward that has saved
    it. So a value that shares memory with an output is copied, and one that is computed from such a value is saved
    itself, since the partitioner may save the output in its place.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._copies: dict[fx.Node, fx.Node] = {}
        self._outputs: set[fx.Node] | None = None
        self._behind: set[fx.Node] = set()

    def for_backward(self, node: fx.Node) -> fx.Node:
        """Return the node that the backward may read in place of a value: that value, or a copy of it."""
        if self._outputs is None:
            self._outputs = self._read()
        if node in self._behind:
            aot_autograd.always_save([node])
        if node not in self._outputs:
            return node
        if node not in self._copies:
            self._copies[node] = editing.insert_saved_copy(node)
        return self._copies[node]

    def _read(self) -> set[fx.Node]:
        """Return the values that share memory with an output of the model; note those that are computed from them."""
        memory = {key for node in aot_autograd.forward_outputs(self._graph) if (key := _memory_of(node)) is not None}
        outputs: set[fx.Node] = set()
        for node in self._graph.nodes:
            if node.op != "call_function" or aot_autograd.is_backward(node):
                continue
            reads = any(n in outputs or n in self._behind for n in node.all_input_nodes)
            if _memory_of(node) in memory:
                outputs.add(node)
            elif reads and not aot_autograd.is_computed_again(node):
                self._behind.add(node)
        return outputs


def _memory_of(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or fake_tensors.is_wrapper(value) or value.is_sparse:
        return None
    return fake_tensors.storage_key(value)
