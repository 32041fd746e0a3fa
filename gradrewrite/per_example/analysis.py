"""Analysis of a joint graph: the example layout of every node."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping

from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, operators
from gradrewrite.ir import markers
from gradrewrite.ir.markers import number_of
from gradrewrite.per_example.layouts import Batch, Const, Layout, Mixed, MixesExamplesError, Size, Sum
from gradrewrite.per_example.linear_rules import is_linear
from gradrewrite.per_example.op_calls import Layouts, OpCall, values_of
from gradrewrite.per_example.rules import READ_SIZES, check_sizes, rule_of


class ExampleAnalysis:
    """The example layouts of a joint graph with its markers, node by node in the order of execution."""

    def __init__(self, graph: fx.Graph, inputs: Mapping[fx.Node, Layout], num_examples: Size) -> None:
        """Analyze a graph with these layouts of placeholders; others are constant."""
        self.layouts: dict[fx.Node, Layouts] = {}
        self.splits: dict[fx.Node, dict[fx.Node, Batch]] = {}  # of nodes that add up over examples: of their arguments
        self._num_examples = num_examples
        self._graph = graph
        self._inputs = dict(inputs)
        self._values: dict[int, Layouts] = {}  # of the marked activations
        self._position: dict[fx.Node, int] = {}
        self._outputs = aot_autograd.outputs_by_tangent(graph)
        self.update()

    def update(self) -> None:
        """Analyze the nodes added since."""
        for position, node in enumerate(self._graph.nodes):
            self._position[node] = position
            if node not in self.layouts and node.op != "output":
                self.layouts[node] = self._layout_of(node)

    def of(self, node: fx.Node) -> Layout:
        """Return the layout of a node with one tensor."""
        found = self.layouts[node]
        assert not isinstance(found, tuple)
        return found

    def _layout_of(self, node: fx.Node) -> Layouts:
        if node.op == "placeholder":
            return self._inputs.get(node, Const())
        if node.op != "call_function":
            return Const()
        if node.target is operator.getitem:
            whole, index = node.args
            assert isinstance(whole, fx.Node)
            found = self.layouts[whole]
            return found[index] if isinstance(found, tuple) and isinstance(index, int) else found
        if node.target is markers.mark_activation:
            (value, *_) = node.all_input_nodes
            self._values[number_of(node)] = self._known(value)
            return Const()
        if not any(isinstance(value, Tensor) for value in values_of(node)):
            return Const()
        layouts = {source: self._known(source) for source in node.all_input_nodes}
        flat = (own if isinstance(own, tuple) else (own,) for own in layouts.values())
        mixed = [layout for layout in itertools.chain.from_iterable(flat) if isinstance(layout, Mixed)]
        if mixed:
            return _everywhere(node, min(mixed, key=lambda m: m.order))
        if node.target is markers.mark_error:
            return self._of_error(node, layouts)
        try:
            return self._infer(OpCall(node, layouts, self._num_examples))
        except MixesExamplesError as err:
            return _everywhere(node, Mixed(node.name, f"{operators.name_of(node)} {err}", self._position[node]))

    def _known(self, node: fx.Node) -> Layouts:
        """Return the layout of a node; a tangent has that of its output."""
        output = self._outputs.get(node)
        if output is None:
            return self.layouts[node]
        layout = self.layouts.get(output, Const())
        return layout if isinstance(layout, Batch) else Const()

    def _infer(self, call: OpCall) -> Layouts:
        sums = [node for node, layout in call.layouts.items() if isinstance(layout, Sum)]
        if sums and call.node.target not in READ_SIZES:
            if not is_linear(call, sums):
                raise MixesExamplesError(
                    "is computed of a sum over the batch, and no rule says that it is linear in it"
                )
            return _everywhere(call.node, Sum())
        if not call.batched:
            return _everywhere(call.node, Const())
        rule = rule_of(call.node)
        if rule is None:
            raise MixesExamplesError("has no rule, so nobody knows whether it mixes examples")
        found = rule(call)
        check_sizes(call, found)
        if call.split:
            self.splits[call.node] = call.split
        return found

    def _of_error(self, node: fx.Node, layouts: Mapping[fx.Node, Layouts]) -> Layouts:
        """An error has the layout of its value: a constant one is the same for all examples."""
        (found,) = layouts.values()
        value = self._values.get(number_of(node))
        return value if isinstance(value, Batch) and isinstance(found, Const) else found


def _everywhere(node: fx.Node, layout: Layout) -> Layouts:
    value = node.meta.get("val")
    return tuple(layout for _ in value) if isinstance(value, tuple | list) else layout
