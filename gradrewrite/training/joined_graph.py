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
from gradrewrite.errors import RewriteError, TraceError
from gradrewrite.instrumentation.dynamo_nodes import fake_of
from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.rewriting.loss_scale import LossScale


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


@dataclass
class _JoiningHooks:
    """Hooks of a compiler that end at the forward and the backward graph."""

    compilation: GraphCompilation
    losses: tuple[int, ...]
    num_inputs: int
    num_outputs: int
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
        meanings, tangents = aot_autograd.meanings_of_outputs(gm.graph), aot_autograd.outputs_of_tangents(gm.graph)
        num_results = aot_autograd.num_forward_outputs(gm.graph)
        of_tangents = {node.name: position for node, position in tangents.items()}
        forward, backward = self.compilation.partition(gm, joint_inputs, inner=inner, **kwargs)
        raise CaptureComplete(self._joined(forward, backward, num_results, meanings, of_tangents))

    def compile_forward(self, compile_graph: Runnable, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """See ``CompilationHooks``; of a graph without a backward."""
        raise CaptureComplete(TraceError(_NO_BACKWARD, code="no-backward"))

    def compile_backward(self, compile_graph: Runnable, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """See ``CompilationHooks``."""
        raise AssertionError("the forward is compiled before")

    def _joined(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        num_results: int,
        meanings: Sequence[tuple[str, int]],
        tangents: Mapping[str, int | None],
    ) -> JoinedGraph:
        num_auxiliary = editing.release(backward.graph)
        joined = editing.join(forward, backward, num_results)
        graph = joined.graph
        written = editing.take_writes(graph)
        results = editing.outputs_of(graph.output_node())
        placeholders = graph.find_nodes(op="placeholder")
        inputs, others = placeholders[: self.num_inputs], placeholders[self.num_inputs :]
        if [node for node in others if node.name not in tangents]:
            raise TraceError(_OWN_INPUTS.format(others[-1].name), code="train-step")
        named = dict(zip(meanings, results, strict=False))
        outputs = [named.get(("output", n)) for n in range(self.num_outputs)]
        scale = self.compilation.session.config.loss_scale
        given_tangents = {node.name: (tangents[node.name] in self.losses, value_of(node)) for node in others}
        _set_tangents(graph, others, [tangents[node.name] for node in others], self.losses, scale)
        positions = {node: n for n, node in enumerate(inputs)}
        new = {positions[node]: value for node, value in written.items()}
        new |= {n: node for (kind, n), node in named.items() if kind == "written"}
        gradients = {n: node for (kind, n), node in named.items() if kind == "gradient" and node is not None}
        auxiliary = results[len(results) - num_auxiliary :]
        ordered = sorted(gradients), sorted(new)
        editing.set_outputs(
            graph, [*outputs, *(gradients[n] for n in ordered[0]), *auxiliary, *(new[n] for n in ordered[1])]
        )
        sizes = self.num_inputs, self.num_outputs, self.losses
        given = *sizes, tuple(ordered[0]), num_auxiliary, tuple(ordered[1]), given_tangents
        result = self.compilation.result
        assert result is not None
        for name, tensor in result.live.items():  # the partitioner may have copied them
            if hasattr(joined, name):
                setattr(joined, name, tensor)
        return JoinedGraph(joined, *given)


def _set_tangents(
    graph: fx.Graph,
    tangents: Sequence[fx.Node],
    positions: Sequence[int | None],
    losses: Sequence[int],
    scale: LossScale | None,
) -> None:
    """Give losses the gradient 1, or the loss scale, and other outputs 0."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for tangent, position in zip(tangents, positions, strict=True):
        factor = None if scale is None or position not in losses else scale.on(value_of(tangent).device)
        (node,), _ = editing.compute(graph, _filled(float(position in losses), factor), [tangent], first)
        editing.replace_node(tangent, node)


def _filled(number: float, factor: Tensor | None) -> Callable[[Tensor], list[Tensor]]:
    def fill(t: Tensor) -> list[Tensor]:
        filled = torch.full_like(t, number)
        return [filled if factor is None else filled * factor.to(t.dtype)]

    return fill


def join_graphs(
    engine: Engine, gm: fx.GraphModule, inputs: Sequence[Any], compilation: GraphCompilation, losses: Sequence[int]
) -> JoinedGraph:
    """Trace and rewrite a Dynamo graph with a loss, up to its forward and backward.

    TraceError where nothing needs a gradient; errors of the policy as in two phases.
    """
    _copy_views(gm)
    count = len(editing.outputs_of(gm.graph.output_node()))
    hooks = _JoiningHooks(compilation, tuple(losses), len(gm.graph.find_nodes(op="placeholder")), count)
    try:
        engine.compile_rewritten(gm, inputs, hooks)
    except CaptureComplete as end:
        if isinstance(end.result, RewriteError):
            raise end.result from end.result.__cause__
        assert isinstance(end.result, JoinedGraph)
        return end.result
    raise TraceError(_NO_BACKWARD, code="no-backward")


def _copy_views(gm: fx.GraphModule) -> None:
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


_NO_BACKWARD = (
    "gr.train_step: nothing here needs a gradient, so there is no update; is the model's output its loss, and does a "
    "parameter have requires_grad=True?"
)
_OWN_INPUTS = (
    "gr.train_step: torch gave the backward an input of its own ({}), which one graph has no place for; use the "
    "two-phase way: loss.backward(); optimizer.step(); optimizer.zero_grad()"
)
