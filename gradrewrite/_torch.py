"""Every use of a torch name that torch does not promise to keep; checked on 2.11, 2.13 and 2.15.

Inductor is imported inside functions: it takes a second, and ``import gradrewrite`` should not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
from torch._dynamo.exc import Unsupported as Unsupported
from torch._dynamo.exc import UserError as UserError
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut_partition
from torch._logging._internal import trace_structured
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true
from torch.fx.graph import _BoxedCodeGen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FailOnRecompileLimitHit",
    "FakeTensor",
    "Unsupported",
    "UserError",
    "min_cut_partition",
    "statically_known_true",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def current_frame() -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """Locals, globals and code name of the frame that Dynamo is compiling; empty outside Dynamo."""
    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:  # no translator on this thread: the backend was called by hand
        return {}, {}, ""
    return tx.f_locals, tx.f_globals, tx.f_code.co_name


def user_stack(err: Exception) -> Sequence[Any]:
    """Frames of the code that the tracer could not follow; empty if the error has none."""
    return tuple(getattr(err, "real_stack", None) or ())


def graph_breaks_so_far() -> Mapping[str, int]:
    """How often each reason has broken a graph in this process."""
    return dict(counters["graph_break"])


def is_last_compilation() -> bool:
    """Whether torch's recompile limit refuses a further compilation of the frame that is being compiled."""
    try:
        code = InstructionTranslator.current_tx().f_code
    except AttributeError:
        return False
    return len(_debug_get_cache_entry_list(code)) + 1 >= dynamo_config.recompile_limit


def graph_break_of(gm: fx.GraphModule) -> tuple[str, Sequence[Any]] | None:
    """Reason and user stack of the graph break that ended a Dynamo graph; None if it ended by itself."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return (reason.reason, reason.user_stack) if reason is not None and reason.graph_break else None


def recompile_limit_times(factor: int) -> contextlib.AbstractContextManager[None]:
    """Allow several backends as many compilations of one code object as torch allows one."""
    patch: contextlib.AbstractContextManager[None] = dynamo_config.patch(
        recompile_limit=dynamo_config.recompile_limit * factor,
        accumulated_recompile_limit=dynamo_config.accumulated_recompile_limit * factor,
    )
    return patch


def outside_of_graphs(fn: _Function, reason: str) -> _Function:
    """A function that no graph of an outer torch.compile contains."""
    outside: _Function = torch.compiler.disable(fn, reason=reason)
    return outside


@contextlib.contextmanager
def on_compile(start: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Call ``start`` and ``end`` around each compilation that this thread does inside the block."""
    thread = threading.get_ident()

    def at_start(_: Any) -> None:
        if threading.get_ident() == thread:
            start()

    def at_end(_: Any) -> None:
        if threading.get_ident() == thread:
            end()

    callback_handler.register_start_callback(at_start)
    callback_handler.register_end_callback(at_end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(at_start)
        callback_handler.remove_end_callback(at_end)


def is_tracing() -> bool:
    """Whether a proxy mode records operations on this thread."""
    return get_proxy_mode() is not None


def is_transformed(x: Tensor) -> bool:
    """Whether a tensor belongs to a ``torch.func`` transform (vmap, grad) and so stands for others."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def source_name(node: fx.Node) -> str:
    """Dynamo's path to what a placeholder stands for, ``L['x']``; ``""`` where a graph was made by something else."""
    source = getattr(node, "_dynamo_source", None)
    return source.name if source is not None else ""


def is_mask(tensor: Tensor) -> bool:
    """Whether a real tensor holds -inf and nothing else that is not finite; False for a fake one."""
    if isinstance(tensor, FakeTensor) or not tensor.is_floating_point():
        return False
    return bool(torch.isneginf(tensor).any()) and not bool((torch.isnan(tensor) | torch.isposinf(tensor)).any())


def is_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd made a node in its backward."""
    return node.meta.get("partitioner_tag") != "is_forward"


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode:
    """The fake mode of these values, or a new one."""
    return next((t.fake_mode for t in values if isinstance(t, FakeTensor)), None) or FakeTensorMode()


def trace(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Trace ``fn`` on fake tensors into decomposed, functional ATen nodes; real tensors become ``get_attr``."""
    from torch._inductor.decomposition import select_decomp_table

    mode = fake_mode_of(inputs)
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with torch.no_grad(), mode:
            functional = torch.func.functionalize(fn, remove="mutations")
            # make_fx tells its inputs apart by identity.
            different, seen = [], set()
            for t in inputs:
                again = id(t) in seen
                seen.add(id(t))
                different.append(_another(t) if again else t)
            return make_fx(functional, decomposition_table=select_decomp_table())(*different)
    finally:
        mode.allow_non_fake_inputs = allowed


def _another(t: Tensor) -> Tensor:
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)


class RefuseToLeave(TorchFunctionMode):
    """Stops a function that would take a fake tensor's memory out of torch (numpy, DLPack, pointers)."""

    _LEAVING = frozenset(("numpy", "__array__", "__dlpack__", "data_ptr", "to_dlpack", "tolist"))

    def __init__(self, error: Exception) -> None:
        """Raise ``error`` before anything leaves."""
        super().__init__()
        self._error = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what is called."""
        if getattr(func, "__name__", "") in self._LEAVING:
            raise self._error
        return func(*args, **(kwargs or {}))


class RefuseToChangeReal(TorchDispatchMode):
    """Stops an operation that would change a real tensor while a function is traced on fake ones."""

    def __init__(self, error: Exception) -> None:
        """Raise ``error`` before anything is changed."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments that the schema says are written to."""
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            value = named.get(argument.name)
            if written and isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                raise self._error
        return func(*args, **(kwargs or {}))


def fake_result(node: fx.Node, mode: FakeTensorMode) -> Any:
    """What a node returns, from the fake values of its arguments; views share their storage, as Inductor expects."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with torch.no_grad(), mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def run_node(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one node of an ATen graph on real values; what it would write to is copied first."""
    target = node.target
    if target is torch.ops.prims.inductor_seeds.default:
        limits = torch.iinfo(torch.int64)  # as compiled code draws them
        return torch.randint(limits.min, limits.max, [args[0]], dtype=torch.int64, device=args[1])
    if target is torch.ops.prims.inductor_random.default:
        return _inductor_random(args, kwargs)
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        args = tuple(
            a.clone() if isinstance(a, Tensor) and s.alias_info is not None and s.alias_info.is_write else a
            for a, s in zip(args, target._schema.arguments, strict=False)
        )
    return cast(Callable[..., Any], target)(*args, **kwargs)


def nodes_that_matter(node: fx.Node) -> list[fx.Node]:
    """What a node's result depends on: batch normalisation reads its running statistics in evaluation alone."""
    if isinstance(node.target, torch._ops.OpOverload):
        arguments = [a.name for a in node.target._schema.arguments]
        given = dict(zip(arguments, node.args, strict=False)) | node.kwargs
        if given.get("training") is True or given.get("train") is True:
            return [a for name, a in given.items() if isinstance(a, fx.Node) and not name.startswith("running_")]
    return node.all_input_nodes


def _inductor_random(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random numbers as compiled code draws them: its generator exists only there."""
    from torch._inductor.compile_fx import compile_fx

    size, seed, mode = args
    graph = fx.Graph()
    node = graph.call_function(
        torch.ops.prims.inductor_random.default, (list(size), graph.placeholder("seed"), mode), kwargs
    )
    graph.output((node,))
    with torch.no_grad():
        run = cast(Callable[..., Any], compile_fx(fx.GraphModule({}, graph), [seed]))
        return run(seed)[0]


def replace_random(gm: fx.GraphModule) -> None:
    """Let random nodes draw from seeds, as Inductor does, unless it was told not to."""
    from torch._inductor import config
    from torch._inductor.fx_passes.replace_random import replace_random_passes

    if not config.fallback_random:
        replace_random_passes(gm)


def fake_like(reference: Tensor, tensor: Tensor) -> Tensor:
    """Fake copy of a real tensor, in the fake mode of ``reference``."""
    if not isinstance(reference, FakeTensor):
        return tensor
    return reference.fake_mode.from_tensor(tensor, static_shapes=True).detach()


def gradient_outputs(graph: fx.Graph) -> list[tuple[int, int]]:
    """``(position among the outputs, position of the Dynamo input)`` of each gradient of a joint graph."""
    output = graph.output_node()
    descs = output.meta.get("desc")
    found = []
    for position, desc in enumerate(descs or ()):
        if isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, PlainAOTInput):
            found.append((position, desc.grad_of.idx))
    return found


def plain_inputs(graph: fx.Graph) -> dict[fx.Node, int]:
    """Placeholders of a joint graph that are inputs of the Dynamo graph, with their positions there."""
    placeholders = graph.find_nodes(op="placeholder")
    descs = {node: node.meta.get("desc") for node in placeholders}
    return {node: desc.idx for node, desc in descs.items() if isinstance(desc, PlainAOTInput)}


def forward_outputs(graph: fx.Graph) -> list[fx.Node]:
    """What a joint graph returns to the model's caller."""
    output = graph.output_node()
    returned = output.args[0]
    assert isinstance(returned, list | tuple)
    pairs = zip(returned, output.meta.get("desc") or (), strict=False)
    return [node for node, desc in pairs if isinstance(desc, PlainAOTOutput) and isinstance(node, fx.Node)]


def output_positions(graph: fx.Graph) -> list[int]:
    """Where among the outputs of a joint graph those of the model stand."""
    descs = graph.output_node().meta.get("desc") or ()
    return [position for position, desc in enumerate(descs) if isinstance(desc, PlainAOTOutput)]


def note_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured log (``TORCH_TRACE``), which ``tlparse`` shows; made only if there is a log."""
    metadata = {"name": name, "encoding": "string"}
    trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=text, expect_trace_id=False)


def tangents(graph: fx.Graph) -> list[fx.Node]:
    """Placeholders of a joint graph that are gradients of its outputs."""
    placeholders = graph.find_nodes(op="placeholder")
    return [node for node in placeholders if isinstance(node.meta.get("desc"), TangentAOTInput)]


def no_autograd_cache() -> contextlib.AbstractContextManager[None]:
    """On a hit of AOTAutograd's cache no pass runs, so that cache is off around our compilations."""
    patch: contextlib.AbstractContextManager[None] = functorch_config.patch(enable_autograd_cache=False)
    return patch


def box(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Run a graph op by op; the callable takes its inputs in one list and frees them early."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    forward = gm.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    return boxed(run)


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a callable as one that takes its inputs in one list."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def op_by_op(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    forward: Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]],
    backward: Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]],
    inference: Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]],
) -> Callable[..., Any]:
    """AOTAutograd without a compiler (what torch calls ``aot_eager``)."""
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return backend(gm, inputs)


def plain_inductor(gm: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Inductor as it is."""
    from torch._inductor.compile_fx import compile_fx

    with no_autograd_cache():
        return cast(Callable[..., Any], compile_fx(gm, inputs, config_patches=dict(options) or None))


def inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any],
    joint_pass: Callable[[fx.Graph], None],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    forward: Callable[[Callable[..., Any], fx.GraphModule, Sequence[Any]], Any],
    backward: Callable[[Callable[..., Any], fx.GraphModule, Sequence[Any]], Any],
) -> Callable[..., Any]:
    """Inductor with our pass before its joint passes, our partitioner, and our view of the backward graph."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner_compile(graph: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        if kwargs.get("is_backward", False):
            return backward(lambda g, xs: compile_fx_inner(g, xs, **kwargs), graph, example_inputs)
        if kwargs.get("is_inference", False):
            return compile_fx_inner(graph, example_inputs, **kwargs)
        return forward(lambda g, xs: compile_fx_inner(g, xs, **kwargs), graph, example_inputs)

    patches = dict(options)
    asked = {name: options.get(name, getattr(config, name)) for name in _OURS}
    patches["joint_custom_pre_pass"] = _inductor_pass(joint_pass, asked["joint_custom_pre_pass"])
    patches["custom_partitioner_fn"] = _inductor_partitioner(partition, asked["custom_partitioner_fn"])
    # Named here so that what stop_folding sets is undone with the rest.
    patches["joint_graph_constant_folding"] = asked["joint_graph_constant_folding"]
    with no_autograd_cache():
        compiled = compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches)
    return cast(Callable[..., Any], compiled)


_OURS = ("joint_custom_pre_pass", "custom_partitioner_fn", "joint_graph_constant_folding")


def _inductor_pass(joint_pass: Callable[[fx.Graph], None], asked: Any) -> Any:
    """Our pass, then those that the user asked for."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    others = tuple(asked) if isinstance(asked, (list, tuple)) else (() if asked is None else (asked,))

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            joint_pass(graph)
            for other in others:
                other(graph)

        def uuid(self) -> Any:
            # Inductor's cache keys on the rewritten graph itself; only the user's passes add to the key.
            return ("gradrewrite", *(other.uuid() for other in others))

        def __reduce__(self) -> Any:  # the cache pickles settings to hash them
            return _hashed, self.uuid()

    return Pass()


def _inductor_partitioner(partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]], asked: Any) -> Any:
    """Our partitioner around the one that the user asked for, or around Inductor's."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
            return partition(gm, joint_inputs, inner=asked or min_cut_partition, **kwargs)

        def uuid(self) -> Any:
            return ("gradrewrite", None if asked is None else asked.uuid())

        def __reduce__(self) -> Any:
            return _hashed, self.uuid()

    return Partitioner()


def _hashed(*identity: Any) -> Any:
    return identity


def stop_folding() -> None:
    """Stop Inductor from folding what is derived from a ``get_attr``, and ``x * 0``; for the joint pass."""
    from torch._inductor import config

    config.joint_graph_constant_folding = False


def inductor_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Inductor settings of ``torch.compile(mode=..., options=...)``; unknown ones raise RuntimeError."""
    from torch._inductor import config, list_mode_options

    patches: dict[str, Any] = {}
    if mode is not None and mode != "default":
        patches.update(list_mode_options(mode))
    known = config.get_config_copy()
    for key, value in (options or {}).items():
        name = key.replace("-", "_")
        if name not in known:
            raise RuntimeError(f"Unexpected optimization option {key!r}; known options: {sorted(known)}")
        patches[name] = value
    return patches


def outside_of_tracing() -> contextlib.AbstractContextManager[Any]:
    """Make real tensors, whatever is being traced."""
    return unset_fake_temporarily()


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that ``step`` was called, though it changed nothing; else they warn."""
    optimizer.__dict__["_opt_called"] = True


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, by few kernels."""
    torch._foreach_copy_(list(targets), list(sources))


def foreach_subtract(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Subtract in place, by few kernels where the dtypes are equal."""
    torch._foreach_sub_(list(tensors), list(others))


def foreach_norm(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """L2 norms, accumulated in ``dtype``, as one flat tensor."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype))


def scale_of(scaler: torch.amp.GradScaler) -> Tensor | None:
    """The scale of a GradScaler on its device; None before its first use, or if it is disabled."""
    return scaler._scale if scaler.is_enabled() else None  # get_scale() would wait for the device


def uses_cuda_graphs(options: Mapping[str, Any]) -> bool:
    """Whether outputs will live in memory that the next replay of a CUDA graph overwrites."""
    from torch._inductor import config

    return bool(options.get("triton.cudagraphs", config.triton.cudagraphs))


def backward_id() -> int:
    """Number of the backward that autograd is running on this thread; -1 outside one."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that is running ends, after gradients are accumulated."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def global_hooks() -> tuple[tuple[int, ...], ...]:
    """Identities of the hooks registered on all modules."""
    module = torch.nn.modules.module
    return tuple(
        tuple(hooks)
        for hooks in (
            module._global_forward_pre_hooks,
            module._global_forward_hooks,
            module._global_backward_pre_hooks,
            module._global_backward_hooks,
        )
    )


def hooks_of(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Identities of the hooks registered on one module."""
    return tuple(
        tuple(hooks)
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_pre_hooks,
            module._backward_hooks,
        )
    )


def find_plain_op(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> str | None:
    """Name of an autograd node between inputs and outputs that no compiled graph made; None if there is none.

    Views that AOTAutograd makes anew of what a graph returned are not counted.
    """
    todo = [(t if t._base is None else t._base).grad_fn for t in outputs]
    seen = {t.grad_fn for t in inputs}
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if "CompiledFunction" not in name and name != "torch::autograd::AccumulateGrad":
            return name
        todo += [following for following, _ in node.next_functions]
    return None
