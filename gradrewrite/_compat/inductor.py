"""Inductor: compilation with our passes, its settings, its metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx, nn

from gradrewrite._compat.aot_autograd import (
    CodeStore,
    CompilationHooks,
    min_cut_partition,
    no_autograd_cache,
    take_donated,
)
from gradrewrite._compat.combined_kernels import combined_kernels, mark
from gradrewrite._compat.donated_buffers import preserve_donated
from gradrewrite._compat.fake_tensors import describe_nodes, fake_mode_of
from gradrewrite._compat.inner_gradients import inner_gradients_traced
from gradrewrite._compat.versions import needed_for


def _config() -> Any:
    with needed_for("Inductor's settings and metrics can be read, and patched for one compilation"):
        from torch._inductor import config

    return config


_elementwise: dict[Any, Callable[..., Any]] = {}


def lower_elementwise(op: Any, formula: Callable[..., Any]) -> None:
    """Let Inductor compute an operator by a formula, inside of the kernels around it.

    The operator takes positions, a stream ``[2]``, an int and a 0-d tensor or None, and returns an int64 tensor of the
    shape of the positions; ``formula(position, *stream, int, number, constant, shift)`` works on values of Inductor.
    """
    _elementwise[op] = formula


def _add_lowerings() -> None:
    with needed_for("Inductor lowers an operator of ours to elementwise code"):
        import sympy
        from torch._inductor.ir import Pointwise
        from torch._inductor.lowering import lowerings, register_lowering
        from torch._inductor.virtualized import ops

    def constant(number: int) -> Any:
        return ops.constant(number, torch.int64)

    for op, formula in _elementwise.items():
        if op not in lowerings:

            def lower(positions: Any, stream: Any, draw: int, number: Any = None, formula: Any = formula) -> Any:
                load, load_stream = positions.make_loader(), stream.make_loader()
                load_number = None if number is None else number.make_loader()

                def inner(index: Any) -> Any:
                    own = None if load_number is None else load_number([])
                    key, count = load_stream([sympy.Integer(0)]), load_stream([sympy.Integer(1)])
                    return formula(load(index), key, count, draw, own, constant, ops.bitwise_right_shift)

                device, size = positions.get_device(), positions.get_size()
                return Pointwise.create(device=device, dtype=torch.int64, inner_fn=inner, ranges=list(size))

            register_lowering(op, type_promotion_kind=None)(lower)


def replace_random(gm: fx.GraphModule, traced: fx.Graph) -> None:
    """Let random nodes draw from seeds, as Inductor does, unless it was told not to.

    ``gm`` has no fakes; Inductor traces with the symbolic sizes of the nodes of ``traced``, which have their names.
    """
    with needed_for("Inductor draws the random numbers of a graph from seeds"):
        from torch._inductor.fx_passes.replace_random import replace_random_passes

    if _config().fallback_random:
        return
    known = {node.name: node.meta["val"] for node in traced.nodes if isinstance(node.meta.get("val"), torch.SymInt)}
    sizes = [node for node in gm.graph.nodes if node.name in known]
    for node in sizes:
        node.meta["val"] = known[node.name]
    replace_random_passes(gm)
    for node in sizes:
        node.meta.pop("val", None)


def compile_plain(gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile with Inductor, unchanged."""
    with needed_for("Inductor can be called with a compiler of ours around its own"):
        from torch._inductor.compile_fx import compile_fx

    _add_lowerings()
    with no_autograd_cache():
        return cast(Callable[..., Any], compile_fx(gm, inputs, config_patches=dict(settings) or None))


def compile_step(gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Inductor without CUDA graphs and without folding ``x * 0``, for a graph without gradients that we made."""
    with needed_for("Inductor can be called with a compiler of ours around its own"):
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner_compile(graph: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        for node in graph.graph.nodes:
            mark(node)
        with combined_kernels(example_inputs):
            return compile_fx_inner(graph, example_inputs, **kwargs)

    _add_lowerings()
    patches = {**settings, "triton.cudagraphs": False, "joint_graph_constant_folding": False}
    with torch.no_grad(), no_autograd_cache():
        return cast(Callable[..., Any], compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches))


def compile_body(gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Inductor alone, without AOTAutograd and its wrappers, for a functional graph of ATen nodes that we made.

    Its last nodes may copy results into inputs. The callable takes its inputs in one list, which it empties. Where the
    nodes have no fake values, they get those of the inputs.
    """
    with needed_for("Inductor can be called with a compiler of ours around its own"):
        from torch._inductor.compile_fx import compile_fx_inner
    with needed_for("Inductor compiles a graph under the fake mode of its values"):
        from torch._inductor.virtualized import V
    with needed_for("Inductor's cache asks the tracing context for a shape environment"):
        from torch._guards import TracingContext, tracing

    _add_lowerings()
    placeholders = gm.graph.find_nodes(op="placeholder")
    if any("val" not in node.meta for node in gm.graph.nodes if node.op != "output"):
        describe_nodes(gm, inputs)
    fakes = [node.meta["val"] for node in placeholders]
    patches, mode = {**settings, "triton.cudagraphs": False, "size_asserts": False}, fake_mode_of(fakes)
    context = tracing(TracingContext(mode))
    with torch.no_grad(), _config().patch(patches), V.set_fake_mode(mode), context, combined_kernels(fakes):
        return cast(Callable[..., Any], compile_fx_inner(gm, fakes))


def compile_training_step(
    gm: fx.GraphModule, settings: Mapping[str, Any], num_results: int, static: Sequence[int]
) -> Callable[..., Any]:
    """Inductor alone, for a functional graph of ATen nodes that has been through its joint passes.

    Its last nodes may copy results into inputs. The callable takes its inputs in one list, which it empties. The first
    results keep their strides; the inputs at the positions ``static`` stay at their addresses.
    """
    with needed_for("Inductor can be called with a compiler of ours around its own"):
        from torch._inductor.compile_fx import _graph_counter, compile_fx_inner
        from torch._inductor.cudagraph_utils import BoxedDeviceIndex
        from torch._inductor.utils import BoxedBool
    with needed_for("Inductor compiles a graph under the fake mode of its values"):
        from torch._inductor.virtualized import V
    with needed_for("Inductor's cache asks the tracing context for a shape environment"):
        from torch._guards import TracingContext, tracing

    _add_lowerings()
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    output = gm.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(num_results))
    mode = fake_mode_of(fakes)
    given = TracingContext.try_get()
    context = contextlib.nullcontext() if given is not None else tracing(TracingContext(mode))
    patches = {**_settings_for_updates(gm), **settings}
    with torch.no_grad(), _config().patch(patches), V.set_fake_mode(mode), context, combined_kernels(fakes):
        uses_graphs = bool(_config().triton.cudagraphs)
        compiled = compile_fx_inner(
            gm,
            fakes,
            static_input_idxs=tuple(static),
            cudagraphs=BoxedBool(uses_graphs),
            graph_id=next(_graph_counter) if uses_graphs else None,
            is_inference=True,
            boxed_forward_device_index=BoxedDeviceIndex(None),
        )
    return cast(Callable[..., Any], compiled)


_SMALL = 1 << 20  # bytes of parameters and state, up to which few kernels matter more than memory


def _settings_for_updates(gm: fx.GraphModule) -> dict[str, Any]:
    """Return settings for updates right behind their gradients.

    Of large tensors alone: Inductor fuses the updates of tensors of one size, for they read the same step size, and
    then all gradients are alive.
    """
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    size = sum(node.args[0].meta["val"].nbytes for node in copies)
    return {"score_fusion_memory_threshold": 64} if size > _SMALL else {}


def compile_rewritten(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any], hooks: CompilationHooks
) -> Callable[..., Any]:
    """Compile with our pass before Inductor's joint passes, our partitioner, and our view of the backward graph.

    With ``hooks.store`` AOTAutograd's cache is on, and its key has the store's identity.
    """
    with needed_for("Inductor can be called with a compiler of ours around its own"):
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    config, store = _config(), hooks.store
    _add_lowerings()

    def inner_compile(graph: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        made: list[Any] = []
        donated: tuple[int, ...] = ()
        is_backward = bool(kwargs.get("is_backward", False))

        def compile_graph(g: fx.GraphModule, xs: Sequence[Any]) -> Any:
            nonlocal donated
            with config.patch({} if hooks.is_cacheable else _NOT_STORED), combined_kernels(xs):
                made.append(compile_fx_inner(g, xs, **kwargs))
            donated = take_donated() if is_backward else ()
            return preserve_donated(made[-1], donated)

        if kwargs.get("is_inference", False):
            return compile_graph(graph, example_inputs)
        compile_wrapped = hooks.compile_backward if is_backward else hooks.compile_forward
        run = compile_wrapped(compile_graph, graph, example_inputs)
        if store is None:
            return run
        from gradrewrite._compat import autograd_cache

        payload = store.backward_payload() if is_backward else store.forward_payload()
        return autograd_cache.CachedCode(made[0], payload, is_backward, donated, run)

    def asked(name: str) -> Any:
        return settings.get(name, getattr(config, name))

    patches = {
        **settings,
        "joint_custom_pre_pass": _inductor_pass(hooks.rewrite, asked("joint_custom_pre_pass"), store),
        "custom_partitioner_fn": _inductor_partitioner(hooks.partition, asked("custom_partitioner_fn")),
        # Named here so that what stop_folding sets is undone with the rest.
        "joint_graph_constant_folding": asked("joint_graph_constant_folding"),
    }
    caching = no_autograd_cache()
    if store is not None:
        from gradrewrite._compat import autograd_cache

        patches[_CACHEABLE] = {**asked(_CACHEABLE), **dict.fromkeys(store.probes, "gradrewrite")}
        caching = autograd_cache.caching(store)
    with caching:
        compiled = compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches)
    return cast(Callable[..., Any], compiled)


_NOT_STORED = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
_CACHEABLE = "unsafe_marked_cacheable_functions"


def _inductor_pass(joint_pass: Callable[[fx.Graph], None], asked: Any, store: CodeStore | None = None) -> Any:
    """Our pass, then those that the user asked for."""
    with needed_for("Inductor takes a pass and a partitioner of ours"):
        from torch._inductor.custom_graph_pass import CustomGraphPass

    others = tuple(asked) if isinstance(asked, (list, tuple)) else (() if asked is None else (asked,))

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            joint_pass(graph)
            for other in others:
                other(graph)

        def uuid(self) -> Any:
            # Inductor's cache keys on the rewritten graph itself, AOTAutograd's on the graph before.
            return ("gradrewrite", store.identity if store is not None else "", *(other.uuid() for other in others))

        def __reduce__(self) -> Any:  # the cache pickles settings to hash them
            return _hashed, self.uuid()

    return Pass()


def _inductor_partitioner(partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]], asked: Any) -> Any:
    """Our partitioner around the one that the user asked for, or around Inductor's."""
    with needed_for("Inductor takes a pass and a partitioner of ours"):
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


def compiled_alone(
    model: nn.Module, backend: str | Callable[..., Any] = "inductor", options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """A model under plain torch.compile, with a code object of its own: transforms do not count against its limit.

    The graph breaks at recurrent layers alone, which Dynamo does not trace by default.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_name="plain_model")
    is_whole = not any(isinstance(module, torch.nn.RNNBase) for module in model.modules())
    compiled = torch.compile(run, backend=backend, options=options, fullgraph=is_whole)

    def call(*args: Any, **kwargs: Any) -> Any:
        with inner_gradients_traced():
            return compiled(*args, **kwargs)

    return call


def num_generated_kernels() -> int:
    """Return the number of kernels that Inductor has generated in this process."""
    with needed_for("Inductor's settings and metrics can be read, and patched for one compilation"):
        from torch._inductor import metrics

    return int(metrics.generated_kernel_count)


def stop_folding() -> None:
    """Stop the joint pass from folding ``get_attr`` values and ``x * 0``."""
    _config().joint_graph_constant_folding = False


def settings_of(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Inductor settings of ``torch.compile(mode=..., options=...)``; unknown ones raise RuntimeError."""
    with needed_for("Inductor's settings and metrics can be read, and patched for one compilation"):
        from torch._inductor import config, list_mode_options

    patches: dict[str, Any] = {} if mode in (None, "default") else dict(list_mode_options(mode))
    known = config.get_config_copy()
    for key, value in (options or {}).items():
        name = key.replace("-", "_")
        if name not in known:
            raise RuntimeError(f"Unexpected optimization option {key!r}; known options: {sorted(known)}")
        patches[name] = value
    return patches


def cache_folder(settings: Mapping[str, Any]) -> str:
    """Return the folder of Inductor's caches; ``""`` where AOTAutograd's cache is off, or unknown to us."""
    if not knows_cache():
        return ""
    from gradrewrite._compat import autograd_cache

    return autograd_cache.folder() if autograd_cache.is_enabled(settings) else ""


def knows_cache() -> bool:
    """Whether AOTAutograd's cache, private in all its parts, was tested in this version of torch."""
    return (2, 13) <= tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 15)


def uses_cuda_graphs(settings: Mapping[str, Any]) -> bool:
    """Whether outputs will live in memory that the next replay of a CUDA graph overwrites."""
    return bool(settings.get("triton.cudagraphs", _config().triton.cudagraphs))
