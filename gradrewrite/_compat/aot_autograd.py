"""AOTAutograd: descriptors of a joint graph's inputs and outputs, partitioners, the aot_eager backend."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gradrewrite._compat import operators
from gradrewrite._compat.versions import needed_for

with needed_for("AOTAutograd's cache can be switched off, for on a hit no pass runs"):
    from torch._functorch import config as functorch_config
with needed_for("the inputs and outputs of a joint graph carry descriptors of what they are"):
    from torch._functorch._aot_autograd.descriptors import (
        BackwardTokenAOTOutput,
        GradAOTOutput,
        InputMutationAOTOutput,
        PhiloxUpdatedBackwardOffsetAOTOutput,
        PlainAOTInput,
        PlainAOTOutput,
        SubclassGetAttrAOTInput,
        SubclassGetAttrAOTOutput,
        TangentAOTInput,
    )
with needed_for("the partitioner that Inductor uses can be called around a joint graph"):
    from torch._functorch.partitioners import min_cut_rematerialization_partition
with needed_for("torch lists the donated buffers of a backward while it is compiled"):
    from torch._guards import TracingContext
with needed_for("a graph can take its inputs in one list and free them early"):
    from torch.fx.graph import _BoxedCodeGen

Runnable = Callable[..., Any]
_OF_BACKWARD = (GradAOTOutput, BackwardTokenAOTOutput, PhiloxUpdatedBackwardOffsetAOTOutput)

min_cut_partition = min_cut_rematerialization_partition


def refuse_compiled_autograd(backward: fx.GraphModule, refuse: Callable[[], Any]) -> None:
    """Let ``refuse`` raise where compiled autograd would copy the nodes of a backward graph, not run its code.

    It reads the graph that the partitioner returned, and nothing of what was compiled. Each fx.GraphModule has a class
    of its own, which its copies do not share, so no other graph is touched.
    """
    kind = type(backward)
    plain = cast(property, kind.graph)

    def read(gm: fx.GraphModule) -> Any:
        frames = sys._getframe(1), sys._getframe(2)  # one is disable's
        if any(frame.f_globals.get("__name__") == "torch._dynamo.compiled_autograd" for frame in frames):
            refuse()
        return plain.__get__(gm)

    untraced = torch.compiler.disable(read)  # the tracer may be on while compiled autograd is at work
    kind.graph = property(untraced, plain.__set__)  # type: ignore[assignment, method-assign]


def refuse_cached(backward: fx.GraphModule, refuse: Callable[[], fx.GraphModule]) -> None:
    """Let AOTAutograd's cache store a call of ``refuse``, for compiled autograd, in place of a compiled backward graph.

    ``refuse`` is a function of a module, by whose name it is pickled.
    """
    type(backward).__reduce__ = lambda self: (refuse, ())  # type: ignore[method-assign]


def always_save(nodes: Sequence[fx.Node]) -> None:
    """Let the partitioner save values of the forward, and never compute them again in the backward."""
    for node in nodes:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def is_computed_again(node: fx.Node) -> bool:
    """Whether an activation checkpoint computes a value of the forward again in the backward."""
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def compute_again(nodes: Sequence[fx.Node]) -> None:
    """Let the partitioner compute values of the forward again in the backward, and never save them.

    Of an op with several results the op itself, too: it cannot be saved.
    """
    for node in nodes:
        made_by = node.all_input_nodes if node.target is operator.getitem else ()
        for one in (node, *made_by):
            one.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def is_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd made a node in its backward."""
    return node.meta.get("partitioner_tag") != "is_forward"


def refuses_shared_memory(err: AssertionError) -> bool:
    """Whether AOTAutograd gave up because an input that is written to shares its memory with another."""
    return any(text in str(err) for text in ("view input mutations", "outs_to_grad length"))


def regenerated_outputs(graph: fx.Graph) -> set[int]:
    """Return positions of Dynamo outputs without gradients in the joint graph.

    They need none, or are views that AOTAutograd makes outside of the graph, from a base that it returns.
    """
    returned = {desc.idx for desc in _output_descriptors(graph) if isinstance(desc, PlainAOTOutput)}
    known = (_described(node.meta["desc"]).output for node in tangents(graph))
    inside = {output.idx for output in known if isinstance(output, PlainAOTOutput)}
    return returned - inside


def gradient_outputs(graph: fx.Graph) -> list[tuple[int, int]]:
    """Return ``(output position, Dynamo input position)`` of each gradient of a joint graph."""
    outputs = enumerate(_output_descriptors(graph))
    inputs = [(position, _described(desc.grad_of)) for position, desc in outputs if isinstance(desc, GradAOTOutput)]
    return [(position, of.idx) for position, of in inputs if isinstance(of, PlainAOTInput)]


def subclass_gradients(graph: fx.Graph) -> dict[int, fx.Node]:
    """Return the gradients that are tensor subclasses other than DTensors: an inner tensor by Dynamo input position."""
    found: dict[int, fx.Node] = {}
    returned = graph.output_node().args[0]
    assert isinstance(returned, list | tuple)
    for node, desc in zip(returned, graph.output_node().meta.get("desc") or (), strict=False):
        if _described(desc) is None and isinstance(node, fx.Node):
            outer = _outermost(desc)
            given = _outermost(outer.grad_of) if isinstance(outer, GradAOTOutput) else None
            if isinstance(given, PlainAOTInput):
                found[given.idx] = node
    plain = {position for _, position in gradient_outputs(graph)}
    return {position: node for position, node in found.items() if position not in plain}


def has_gradients(graph: fx.Graph) -> bool:
    """Whether a joint graph computes a gradient: of an input, or of the memory that several inputs share."""
    return any(isinstance(_outermost(desc), GradAOTOutput) for desc in graph.output_node().meta.get("desc") or ())


def _output_descriptors(graph: fx.Graph) -> list[Any]:
    return [_described(desc) for desc in graph.output_node().meta.get("desc") or ()]


def _described_outputs(graph: fx.Graph) -> list[tuple[Any, Any]]:
    returned = graph.output_node().args[0]
    assert isinstance(returned, list | tuple)
    return list(zip(returned, _output_descriptors(graph), strict=False))


def _described(desc: Any) -> Any:
    """Return the descriptor of an input or output: that of the DTensor for its local tensor, None for its mesh."""
    while isinstance(desc, SubclassGetAttrAOTInput | SubclassGetAttrAOTOutput):
        if desc.attr != "_local_tensor":
            return None
        desc = desc.base
    return desc


def _outermost(desc: Any) -> Any:
    while isinstance(desc, SubclassGetAttrAOTInput | SubclassGetAttrAOTOutput):
        desc = desc.base
    return desc


def plain_inputs(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return placeholders of the Dynamo graph's inputs, with their positions there."""
    placeholders = graph.find_nodes(op="placeholder")
    descs = {node: _described(node.meta.get("desc")) for node in placeholders}
    return {node: desc.idx for node, desc in descs.items() if isinstance(desc, PlainAOTInput)}


def forward_outputs(graph: fx.Graph) -> list[fx.Node]:
    """Return the joint graph's outputs for the model's caller."""
    pairs = _described_outputs(graph)
    return [node for node, desc in pairs if isinstance(desc, PlainAOTOutput) and isinstance(node, fx.Node)]


def written_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Return the placeholders with written tensors: inside of the graph, or after its run."""
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = {node.args[0] for node in copies}
    after = [desc.mutated_input for desc in _output_descriptors(graph) if isinstance(desc, InputMutationAOTOutput)]
    placeholders = graph.find_nodes(op="placeholder")
    return [node for node in placeholders if node in written or node.meta.get("desc") in after]


def num_forward_outputs(graph: fx.Graph) -> int:
    """Return the number of outputs of a joint graph that its forward returns.

    The gradient of an input that needs none is None, without a description.
    """
    descs = graph.output_node().meta.get("desc") or ()
    behind = (n for n, desc in enumerate(descs) if desc is None or isinstance(_outermost(desc), _OF_BACKWARD))
    return next(behind, len(descs))


def output_positions(graph: fx.Graph) -> list[int]:
    """Return the positions of the model's outputs among those of a joint graph."""
    descs = _output_descriptors(graph)
    return [position for position, desc in enumerate(descs) if isinstance(desc, PlainAOTOutput)]


def tangents(graph: fx.Graph) -> list[fx.Node]:
    """Return the placeholders of the output gradients of a joint graph."""
    placeholders = graph.find_nodes(op="placeholder")
    return [node for node in placeholders if isinstance(_described(node.meta.get("desc")), TangentAOTInput)]


def outputs_of_tangents(graph: fx.Graph) -> dict[fx.Node, int | None]:
    """Return the positions of Dynamo outputs by their tangent placeholders; None for those of bases of views."""
    known = {node: _described(node.meta["desc"]).output for node in tangents(graph)}
    return {node: output.idx if isinstance(output, PlainAOTOutput) else None for node, output in known.items()}


def outputs_by_tangent(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the outputs of a joint graph, by tangent placeholder."""
    by_desc = {desc: node for node, desc in _described_outputs(graph) if isinstance(node, fx.Node)}
    of = {node: _described(node.meta["desc"]).output for node in tangents(graph)}
    return {node: by_desc[desc] for node, desc in of.items() if desc in by_desc}


def meanings_of_outputs(graph: fx.Graph) -> list[tuple[str, int]]:
    """Return the meaning of each output of a joint graph, with a position among those of the Dynamo graph.

    ``"output"``, the ``"gradient"`` of an input, or the new value of a ``"written"`` one; ``""`` for others.
    """
    found: list[tuple[str, int]] = []
    for desc in _output_descriptors(graph):
        kind, known = "", desc
        if isinstance(desc, PlainAOTOutput):
            kind = "output"
        elif isinstance(desc, GradAOTOutput):
            kind, known = "gradient", _described(desc.grad_of)
        elif isinstance(desc, InputMutationAOTOutput):
            kind, known = "written", _described(desc.mutated_input)
        is_known = isinstance(known, PlainAOTOutput | PlainAOTInput)
        found.append((kind, known.idx) if is_known else ("", -1))
    return found


def no_autograd_cache() -> contextlib.AbstractContextManager[None]:
    """Turn AOTAutograd's cache off around a compilation; on a hit of that cache no pass runs."""
    return cast(contextlib.AbstractContextManager[None], functorch_config.patch(enable_autograd_cache=False))


def states_of_generators() -> contextlib.AbstractContextManager[None]:
    """Let recomputed random ops read states of generators that the forward returns, on GPUs too, and no generators."""
    name = "graphsafe_rng_functionalization"
    patch = functorch_config.patch({name: False}) if hasattr(functorch_config, name) else contextlib.nullcontext()
    return cast(contextlib.AbstractContextManager[None], patch)


def take_donated() -> tuple[int, ...]:
    """Return the positions of the donated inputs of the backward that was just compiled.

    Torch's own list is emptied: where it is not, ``backward(retain_graph=True)`` raises.
    """
    context = TracingContext.try_get()
    listed = context.fw_metadata.bw_donated_idxs if context is not None and context.fw_metadata is not None else None
    donated = tuple(listed or ())
    if listed:
        listed.clear()  # one list object, in the metadata of plain tensors and of subclasses
    return donated


def box(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Run a graph op by op; the callable takes its inputs in one list and frees them early."""
    for node in gm.graph.nodes:
        node.target = operators.with_any_strides(node.target)
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    forward = gm.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    return boxed(run)


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a callable as taking its inputs in one list."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class CodeStore(Protocol):
    """One compilation's side of AOTAutograd's cache: payloads to store, and their way back."""

    @property
    def identity(self) -> str:
        """The policy's part of the cache key."""

    @property
    def probes(self) -> Sequence[str]:
        """Names of the functions of ours in the Dynamo graph."""

    def forward_payload(self) -> Any:
        """Return the payload for ``restore_forward``; None if the graph is not stored."""

    def backward_payload(self) -> Any:
        """Return the payload for ``restore_backward``; None if the graph is not stored."""

    def restore_forward(self, compiled: Callable[[list[Any]], Any], payload: Any) -> Callable[[list[Any]], Any]:
        """Wrap a forward that comes out of the cache; an error if it was not made for this compilation."""

    def restore_backward(self, compiled: Callable[[list[Any]], Any], payload: Any) -> Callable[[list[Any]], Any]:
        """Wrap the backward that comes out of the cache beside it."""


class CompilationHooks(Protocol):
    """The hooks of a compiler into one joint graph."""

    @property
    def is_cacheable(self) -> bool:
        """Whether the compiler may store the code of this graph in its caches."""

    @property
    def store(self) -> CodeStore | None:
        """The store for AOTAutograd's cache; None to bypass that cache."""

    def rewrite(self, graph: fx.Graph) -> None:
        """Rewrite a joint graph, or a graph without gradients, in place."""

    def partition(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], *, inner: Runnable, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut a joint graph into forward and backward, by another partitioner."""

    def compile_forward(self, compile_graph: Runnable, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """Compile a forward graph, by another compiler."""

    def compile_backward(self, compile_graph: Runnable, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """Compile a backward graph, by another compiler."""


def compile_plain(gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
    """AOTAutograd without a compiler (torch's ``aot_eager``)."""
    return _compile(gm, inputs, forward=_run_eagerly, backward=_run_eagerly, inference=_run_eagerly)


def compile_rewritten(gm: fx.GraphModule, inputs: Sequence[Any], hooks: CompilationHooks) -> Runnable:
    """AOTAutograd without a compiler, with our hooks."""

    def partition(joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        hooks.rewrite(joint.graph)
        joint.graph.lint()
        joint.recompile()
        return hooks.partition(joint, joint_inputs, inner=min_cut_partition, **kwargs)

    def inference(graph: fx.GraphModule, _: Sequence[Any]) -> Any:
        hooks.rewrite(graph.graph)
        return box(graph)

    forward = functools.partial(hooks.compile_forward, _run_eagerly)
    backward = functools.partial(hooks.compile_backward, _run_backward_eagerly)
    return _compile(gm, inputs, forward=forward, backward=backward, inference=inference, partition=partition)


def _run_backward_eagerly(gm: fx.GraphModule, _: Sequence[Any]) -> Runnable:
    take_donated()  # it overwrites none of its inputs
    return box(gm)


def _run_eagerly(gm: fx.GraphModule, _: Sequence[Any]) -> Runnable:
    return box(gm)


def _compile(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    forward: Runnable,
    backward: Runnable,
    inference: Runnable,
    partition: Runnable = min_cut_partition,
) -> Runnable:
    with needed_for("AOTAutograd can be called with compilers and a partitioner of ours"):
        from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return backend(gm, inputs)
