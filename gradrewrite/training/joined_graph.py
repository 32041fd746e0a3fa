"""Joined graphs: forward and backward of a model's call as one functional graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, fake_tensors
from gradrewrite.backends.capture import CaptureComplete
from gradrewrite.backends.compilation import GraphCompilation
from gradrewrite.backends.engines import Engine, Runnable
from gradrewrite.errors import RewriteError
from gradrewrite.instrumentation.dynamo_nodes import fake_of
from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.rewriting.loss_scale import LossScale
from gradrewrite.training.losses import losses_among
from gradrewrite.training.step_refusals import nothing_to_train, refused


@dataclass(frozen=True, slots=True)
class JoinedGraph:
    """Forward and rewritten backward of one call, as one functional graph.

    It returns the user's outputs, the gradients, the auxiliary outputs of the backward, and the new values of inputs
    that the forward writes.
    """

    gm: fx.GraphModule
    num_inputs: int  # of the Dynamo graph
    num_outputs: int  # of the Dynamo graph
    losses: tuple[int, ...]  # positions of the losses among these
    gradients: tuple[int, ...]  # positions of inputs with gradients
    num_auxiliary: int
    written: tuple[int, ...]  # positions of inputs that are written
    tangents: Mapping[str, tuple[bool, Tensor]]  # by name: whether it is that of a loss, and a fake tensor like it


@dataclass(frozen=True, slots=True)
class JointLayout:
    """The meaning of the inputs and outputs of a rewritten joint graph."""

    num_results: int  # outputs of the forward
    meanings: tuple[tuple[str, int], ...]  # of all outputs; see ``aot_autograd.meanings_of_outputs``
    tangents: Mapping[str, int | None]  # positions of the user's outputs, by the name of the tangent

    @classmethod
    def of(cls, graph: fx.Graph) -> JointLayout:
        """Read a joint graph."""
        tangents = {node.name: n for node, n in aot_autograd.outputs_of_tangents(graph).items()}
        meanings = tuple(aot_autograd.meanings_of_outputs(graph))
        return cls(aot_autograd.num_forward_outputs(graph), meanings, tangents)

    @property
    def num_outputs(self) -> int:
        """Number of the user's outputs, so far as the graph returns them."""
        return 1 + max((n for kind, n in self.meanings if kind == "output"), default=-1)


def joined(
    gm: fx.GraphModule,
    layout: JointLayout,
    num_auxiliary: int,
    paths: Mapping[int, str] | None,
    scale: LossScale | None,
) -> JoinedGraph:
    """Make a joined graph of one that has the results of forward and backward, in place.

    ``paths`` are those of the outputs that the model's call returns, by position; TraceError without a loss there.
    """
    graph = gm.graph
    written = editing.take_writes(graph)
    results = editing.outputs_of(graph.output_node())
    placeholders = graph.find_nodes(op="placeholder")
    others = [node for node in placeholders if node.name in layout.tangents]
    inputs = [node for node in placeholders if node.name not in layout.tangents]
    named = dict(zip(layout.meanings, results, strict=False))
    of_tangents = {n: node for node in others if (n := layout.tangents[node.name]) is not None}
    losses = losses_among(of_tangents, paths)
    positions = {node: n for n, node in enumerate(inputs)}
    new = {positions[node]: value for node, value in written.items()}
    new |= {n: node for (kind, n), node in named.items() if kind == "written"}
    gradients = {n: node for (kind, n), node in named.items() if kind == "gradient" and node is not None}
    tangents = {node.name: (layout.tangents[node.name] in losses, value_of(node)) for node in others}
    outputs = [named.get(("output", n)) for n in range(layout.num_outputs)]
    auxiliary = results[len(results) - num_auxiliary :]
    order = tuple(sorted(gradients)), tuple(sorted(new))
    further = [*(gradients[n] for n in order[0]), *auxiliary, *(new[n] for n in order[1])]
    editing.set_outputs(graph, [*outputs, *further])
    _set_tangents(graph, of_tangents, losses, scale)
    sizes = len(inputs), len(outputs), losses
    return JoinedGraph(gm, *sizes, order[0], num_auxiliary, order[1], tangents)


@dataclass
class _JoiningHooks:
    """Hooks of a compiler that end at the forward and the backward graph."""

    compilation: GraphCompilation
    num_inputs: int
    is_cacheable: bool = False
    store: None = None

    def rewrite(self, graph: fx.Graph) -> None:
        """See ``CompilationHooks``."""
        try:
            self.compilation.rewrite(graph)
        except RewriteError as err:
            raise CaptureComplete(err) from None

    def partition(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], *, inner: Runnable, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Join the parts of the graph, and end."""
        layout = JointLayout.of(gm.graph)
        forward, backward = self.compilation.partition(gm, joint_inputs, inner=inner, **kwargs)
        try:
            found: Any = self._joined(forward, backward, layout)
        except RewriteError as err:
            found = err
        raise CaptureComplete(found)

    def _joined(self, forward: fx.GraphModule, backward: fx.GraphModule, layout: JointLayout) -> JoinedGraph:
        compilation, result = self.compilation, self.compilation.result
        assert result is not None
        num_auxiliary = editing.release(backward.graph)
        gm = editing.join(forward, backward, layout.num_results)
        for name, tensor in result.live.items():  # the partitioner may have copied them
            if hasattr(gm, name):
                setattr(gm, name, tensor)
        inputs = gm.graph.find_nodes(op="placeholder")[: -len(layout.tangents)]
        if len(inputs) != self.num_inputs:
            raise refused(f"torch gave the graph an input of its own ({inputs[-1].name})")
        return joined(gm, layout, num_auxiliary, compilation.outputs, compilation.session.config.loss_scale)

    def compile_forward(self, compile_graph: Runnable, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """See ``CompilationHooks``; of a graph without a backward."""
        raise CaptureComplete(nothing_to_train())

    def compile_backward(self, compile_graph: Runnable, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """See ``CompilationHooks``."""
        raise AssertionError("the forward is compiled before")


def _set_tangents(
    graph: fx.Graph, tangents: Mapping[int, fx.Node], losses: Sequence[int], scale: LossScale | None
) -> None:
    """Give losses the gradient 1, or the loss scale, and other outputs 0."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for position, tangent in tangents.items():
        factor = None if scale is None or position not in losses else scale.on(value_of(tangent).device)
        (node,), _ = editing.compute(graph, _filled(float(position in losses), factor), [tangent], first)
        editing.replace_node(tangent, node)


def _filled(number: float, factor: Tensor | None) -> Callable[[Tensor], list[Tensor]]:
    def fill(t: Tensor) -> list[Tensor]:
        filled = torch.full_like(t, number)
        return [filled if factor is None else filled * factor.to(t.dtype)]

    return fill


def join_graphs(
    engine: Engine, gm: fx.GraphModule, inputs: Sequence[Any], compilation: GraphCompilation
) -> JoinedGraph:
    """Trace and rewrite a Dynamo graph with a loss, up to its forward and backward.

    TraceError where nothing needs a gradient, or there is no loss; errors of the policy as in two phases.
    """
    copy_views(gm)
    hooks = _JoiningHooks(compilation, len(gm.graph.find_nodes(op="placeholder")))
    found: Any = nothing_to_train()
    try:
        with aot_autograd.states_of_generators():
            engine.compile_rewritten(gm, inputs, hooks)
    except CaptureComplete as end:
        found = end.result
    if isinstance(found, RewriteError):
        raise found from found.__cause__
    assert isinstance(found, JoinedGraph)
    return found


def copy_views(gm: fx.GraphModule) -> None:
    """Return copies of outputs that are views or inputs: these are none of the results of a joint graph."""
    output = gm.graph.output_node()
    copies: dict[fx.Node, fx.Node] = {}
    seen: set[int] = {
        fake_tensors.storage_key(f) for n in gm.graph.find_nodes(op="placeholder") if (f := fake_of(n)) is not None
    }
    for node in output.all_input_nodes:
        fake = fake_of(node)
        if fake is None or fake.layout is not torch.strided:
            continue
        key = fake_tensors.storage_key(fake)
        if key in seen or fake._is_view():
            copies[node] = editing.copied_before(node, output)
        seen.add(key)
    if copies:
        editing.set_outputs(gm.graph, [copies.get(node, node) for node in editing.outputs_of(output)])
        gm.recompile()
