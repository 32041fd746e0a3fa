"""Every use of a torch name that torch does not promise to keep; checked on 2.11, 2.13 and 2.15.

Inductor is imported inside functions: it takes a second, and ``import gradrewrite`` should not.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import config as dynamo_config
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import (
    OptimizedModule,
    _debug_get_cache_entry_list,
    cached_backends,
    innermost_backend,
)
from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
from torch._dynamo.exc import Unsupported as Unsupported
from torch._dynamo.exc import UserError as UserError
from torch._dynamo.guards import CheckFunctionManager, DeletedGuardManagerWrapper
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters, get_metrics_context
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
from torch.autograd.graph import _engine_run_backward
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true
from torch.fx.graph import _BoxedCodeGen
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel as DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DistributedDataParallel",
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


class CompiledFunction:
    """A function under ``torch.compile``, and what torch keeps for it.

    torch keeps compiled code with the code object of each frame, which Python's garbage collector does not look into,
    and every backend in a table. So nothing is freed by itself; ``drop`` frees it.
    """

    _num_running = 0
    _lock = threading.Lock()

    def __init__(
        self,
        fn: Callable[..., Any],
        backend: Callable[..., Any],
        settings: Mapping[str, Any],
        while_tracing: Callable[[], contextlib.AbstractContextManager[Collection[int]]],
    ) -> None:
        """Compile with these arguments of ``torch.compile``; TypeError for one that it does not take.

        Args:
            fn: The function.
            backend: The backend. It holds what belongs to a model weakly: torch may keep it after ``drop``.
            settings: Other arguments of ``torch.compile``.
            while_tracing: Entered on the thread that traces a frame; no other thread traces meanwhile. It gives the
                identities of objects that compiled code is not guarded on.
        """
        settings = dict(settings)
        if isinstance(settings.get("options"), dict):
            settings["options"] = dict(settings["options"])  # torch.compile takes entries out of it
        compiled = torch.compile(nn.Identity(), backend=backend, **settings)
        self._frames: _Frames | None = None
        self._run = fn
        if isinstance(compiled, OptimizedModule):  # otherwise torch.compile is disabled
            context: Any = compiled.dynamo_ctx
            context.callback = self._frames = _Frames(context.callback, while_tracing)
            # Whole graphs are asked of the tracer. While a function runs that has this set, no other thread's compiled
            # code runs behind a graph break (torch before 2.15).
            context.fullgraph = False
            self._run = context(fn)

    @classmethod
    def is_running(cls) -> bool:
        """Whether a thread is in a function of this kind."""
        return cls._num_running > 0

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        with self._lock:
            clear_dropped()
            CompiledFunction._num_running += 1
        try:
            return self._run(*args)
        finally:
            with self._lock:
                CompiledFunction._num_running -= 1

    @property
    def drop(self) -> Callable[[], None]:
        """Frees what torch keeps; a function that does not keep this object alive."""
        return self._frames.compiled.drop if self._frames is not None else _nothing


def _nothing() -> None:
    return None


class CompiledCode:
    """The code that torch has compiled for one backend."""

    def __init__(self, backend: Any) -> None:
        """Start without code, and remove the backend from the table in which torch keeps every backend."""
        self._backend = weakref.ref(backend)
        self._codes: dict[int, types.CodeType] = {}
        cached_backends.pop(id(backend), None)

    def add(self, code: types.CodeType) -> None:
        """Note that a frame with this code object is compiled."""
        self._codes[id(code)] = code

    def drop(self) -> None:
        """Let torch forget it, as it does when an object is deleted that code was compiled for."""
        codes, self._codes = self._codes, {}
        backend, guards = self._backend(), []
        for code in codes.values():
            for entry in _debug_get_cache_entry_list(code):
                if entry.backend is backend and not _is_dropped(entry):
                    guards.append(entry.guard_manager)
                    gone = DeletedGuardManagerWrapper("the model that gradrewrite compiled it for is gone")
                    cast(Any, entry.guard_manager.extra_state).invalidate(entry, gone)
            _dropped.append(weakref.ref(code))
        _forget_guards(guards)


def _forget_guards(dropped: Sequence[Any]) -> None:
    """Let go of guards that are not in use any more.

    torch leaves a ``weakref.finalize`` for each class, module and function that compiled code is guarded on. It holds
    the guards until that object is gone, so for a class for good; ``torch.compiler.reset()`` does not release them.
    """
    identities = {id(guards) for guards in dropped}
    for finalizer in weakref.finalize._registry.copy():  # type: ignore[attr-defined]
        if id(_guards_held_by(finalizer)) in identities:
            finalizer.detach()


def _guards_held_by(finalizer: weakref.finalize[Any, Any]) -> Any:
    alive = finalizer.peek()
    callback = alive[1] if alive is not None else None
    method = callback.func if isinstance(callback, functools.partial) else None
    manager = method.__self__ if isinstance(method, types.MethodType) else None
    # A manager whose guards could not be made has none.
    return vars(manager).get("guard_manager") if isinstance(manager, CheckFunctionManager) else None


def backend_in_use() -> tuple[Any, types.CodeType, Any] | None:
    """Return the backend object that torch.compile uses for the current frame, the frame's code and its ``self``."""
    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:  # called by hand
        return None
    root = tx.output.root_tx
    return innermost_backend(cast(Any, tx.output.compiler_fn)), root.f_code, root.f_locals.get("self")


class _Frames:
    """Dynamo's callback for frames that it has no code for."""

    def __init__(
        self, callback: Any, while_tracing: Callable[[], contextlib.AbstractContextManager[Collection[int]]]
    ) -> None:
        self._callback = callback
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend  # where torch looks for the backend
        self._backend = innermost_backend(callback)
        self._while_tracing = while_tracing
        self.compiled = CompiledCode(self._backend)

    def __call__(self, frame: Any, *args: Any) -> Any:
        with compile_lock, self._while_tracing() as unguarded:
            self.compiled.add(frame.f_code)
            try:
                with self._limits(frame.f_code), self._without_guards_on(unguarded):
                    return self._callback(frame, *args)
            finally:
                _forget_stacks()

    def _limits(self, code: types.CodeType) -> contextlib.AbstractContextManager[None]:
        """Allow each backend as many compilations of a code object as torch allows all; dropped ones do not count."""
        entries = _debug_get_cache_entry_list(code)
        times = len({id(self._backend), *(id(entry.backend) for entry in entries if not _is_dropped(entry))})
        more = sum(_is_dropped(entry) for entry in entries)
        patch: contextlib.AbstractContextManager[None] = dynamo_config.patch(
            recompile_limit=dynamo_config.recompile_limit * times + more,
            accumulated_recompile_limit=dynamo_config.accumulated_recompile_limit * times + more,
        )
        return patch

    @contextlib.contextmanager
    def _without_guards_on(self, unguarded: Collection[int]) -> Iterator[None]:
        """Let compiled code be used whatever has become of these objects, and of what they contain."""
        if not unguarded:
            yield
            return
        hooks = self._callback.hooks
        given = hooks.guard_filter_fn

        def keep(guards: Sequence[Any]) -> list[bool]:
            names = tuple({guard.name for guard in guards if id(guard.value) in unguarded})
            kept = list(given(guards)) if given is not None else [True] * len(guards)
            inside = tuple(f"{name}[" for name in names)
            ours = [guard.name in names or guard.name.startswith(inside) for guard in guards]
            return [k and not o for k, o in zip(kept, ours, strict=True)]

        hooks.guard_filter_fn = keep
        try:
            yield
        finally:
            hooks.guard_filter_fn = given


def _forget_stacks() -> None:
    """Clear what torch remembers of this thread's compilations: Python stacks, whose code objects would never die."""
    metrics = get_metrics_context()
    if not metrics.in_progress():
        metrics._edits.clear()


_dropped: deque[weakref.ref[types.CodeType]] = deque()


def _is_dropped(entry: Any) -> bool:
    return isinstance(entry.guard_manager, DeletedGuardManagerWrapper)


def clear_dropped() -> None:
    """Take the empty entries from code objects that have no others; torch counts them as compilations.

    Torch must not be looking for code meanwhile: if a thread compiles, it is left for later.
    """
    if not _dropped or CompiledFunction.is_running() or not compile_lock.acquire(blocking=False):
        return
    try:
        for _ in range(len(_dropped)):
            code = _dropped.popleft()()
            if code is None:
                continue
            entries = _debug_get_cache_entry_list(code)
            if not all(_is_dropped(entry) for entry in entries):
                _dropped.append(weakref.ref(code))
                continue
            del entries
            reset_code(code)
    finally:
        compile_lock.release()


_SPLITS = (True, "ddp_optimizer")


def whole_graphs_under_ddp() -> contextlib.AbstractContextManager[None]:
    """Keep DistributedDataParallel, in whose forward this runs, from splitting graphs into its buckets.

    Outside of such a forward nothing is changed: up to 2.11 torch's settings are process-wide.
    """
    if DistributedDataParallel._get_active_ddp_module() is None or dynamo_config.optimize_ddp not in _SPLITS:
        return contextlib.nullcontext()
    patch: contextlib.AbstractContextManager[None] = dynamo_config.patch(optimize_ddp=False)
    return patch


def is_ddp_split(gm: fx.GraphModule) -> bool:
    """Whether a graph is a part that DDPOptimizer made of one of Dynamo's."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and reason.reason.startswith("DDPOptimizer")


def ranks_around(modules: Iterable[nn.Module]) -> tuple[str, int]:
    """Return the name of the data parallelism around these modules and its number of ranks; ``("", 1)`` if none."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return "", 1
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None:
        return "DistributedDataParallel", ddp.process_group.size()
    if str(dynamo_config.optimize_ddp).startswith("python_reducer"):  # then torch does not say whose forward runs
        return "DistributedDataParallel (python_reducer)", torch.distributed.get_world_size()
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it no module is sharded
    if fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in modules):
        return "FSDP2 (fully_shard)", torch.distributed.get_world_size()
    return "", 1


def outside_of_graphs(fn: _Function, reason: str) -> _Function:
    """A function that no graph of an outer torch.compile contains."""
    outside: _Function = torch.compiler.disable(fn, reason=reason)
    return outside


def keep_lstms_differentiable(gm: fx.GraphModule) -> None:
    """Let the LSTMs of a Dynamo graph be traced as what can be differentiated.

    On the CPU torch decomposes an LSTM into oneDNN's inference kernel if its *input* needs no gradient, though its
    parameters may; that kernel has no backward (2.11 to 2.15). The setting that switches it off is process-wide.
    """
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op == "call_function" and node.target is torch.lstm:
                node.target = _lstm


def _lstm(*args: Any, **kwargs: Any) -> Any:
    given = [*args, *kwargs.values()]
    x = kwargs["input"] if "input" in kwargs else args[0]
    states_and_parameters = (t for a in given if isinstance(a, (tuple, list)) for t in a if isinstance(t, Tensor))
    if torch.is_grad_enabled() and not x.requires_grad and any(t.requires_grad for t in states_and_parameters):
        x = x.detach().requires_grad_()  # nobody asks for this gradient, so nothing computes it
    return torch.lstm(*args, **{**kwargs, "input": x}) if "input" in kwargs else torch.lstm(x, *args[1:], **kwargs)


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


def refuse_compiled_autograd(backward: fx.GraphModule, make_error: Callable[[], Exception]) -> None:
    """Raise an error where compiled autograd would copy the nodes of a backward graph, instead of running its code.

    Compiled autograd reads the graph that the partitioner returned, and nothing of what was compiled. Each
    fx.GraphModule has a class of its own, which its copies do not share, so no other graph is touched.
    """
    kind = type(backward)
    plain = cast(property, kind.graph)

    def read(gm: fx.GraphModule) -> Any:
        readers = [
            frame.f_globals.get("__name__") for frame in (sys._getframe(1), sys._getframe(2))
        ]  # one is disable's
        if "torch._dynamo.compiled_autograd" in readers:
            raise make_error()
        return plain.__get__(gm)

    untraced = torch.compiler.disable(read)  # the tracer may be on while compiled autograd is at work
    kind.graph = property(untraced, plain.__set__)  # type: ignore[assignment, method-assign]


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


def refuses_shared_memory(err: AssertionError) -> bool:
    """Whether AOTAutograd gave up because an input that is written to shares its memory with another."""
    return "view input mutations" in str(err)


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one storage."""
    return a.layout is b.layout is torch.strided and storage_key(a) == storage_key(b)


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


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share memory, fake ones included, as long as both are alive."""
    return cast(int, StorageWeakRef(tensor.untyped_storage()).cdata)


def schema_of(target: Any) -> Any:
    """The schema of an operator of ``torch.ops`` with one overload; None for anything else."""
    if isinstance(target, torch._ops.OpOverloadPacket) and len(target.overloads()) == 1:
        target = getattr(target, target.overloads()[0])
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def view_chain(tensor: Tensor) -> Iterator[tuple[Any, int]]:
    """Yield the autograd nodes, with output numbers, of an output and of the tensors that it is a view of.

    AOTAutograd may make all of these outside of a graph. The base that the graph returns is not among them, unless it
    is an input: the gradient of a view of an input does not come through the graph.
    """
    base = tensor._base
    current: tuple[Any, int] = (tensor.grad_fn or tensor, tensor.output_nr)
    yield current
    if base is None:
        return
    end = (base.grad_fn or base, base.output_nr)
    is_input = base.grad_fn is None or not base.grad_fn.next_functions
    while not isinstance(current[0], Tensor):
        following = [pair for pair in current[0].next_functions if pair[0] is not None]
        if len(following) != 1 or following[0] == end:
            break
        (current,) = following
        yield current
    if is_input:
        yield end


def regenerated_outputs(graph: fx.Graph) -> set[int]:
    """Positions of the Dynamo graph's outputs whose gradients do not come into a joint graph.

    Those that need no gradient, and views that AOTAutograd makes outside of the graph, from a base that it returns.
    """
    descs = graph.output_node().meta.get("desc") or ()
    returned = {desc.idx for desc in descs if isinstance(desc, PlainAOTOutput)}
    known = (node.meta["desc"].output for node in tangents(graph))
    inside = {output.idx for output in known if isinstance(output, PlainAOTOutput)}
    return returned - inside


def has_unknown_size(tensor: Tensor) -> bool:
    """Whether a size or a stride depends on data."""
    return bool(free_unbacked_symbols([*tensor.shape, *tensor.stride()]))


def assumptions(graph: fx.Graph) -> Any:
    """Return the assumptions on data-dependent sizes of a graph, as a value that compares equal if none was added."""
    values = (node.meta.get("val") for node in graph.nodes)
    env = next((v.fake_mode.shape_env for v in values if isinstance(v, FakeTensor)), None)
    if env is None:
        return None
    asserts = {symbol: len(known) for symbol, known in env.deferred_runtime_asserts.items()}
    unbacked = {symbol: known for symbol, known in env.var_to_range.items() if free_unbacked_symbols(symbol)}
    return asserts, unbacked, {s: r for s, r in env.replacements.items() if free_unbacked_symbols(s)}


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
    is_cacheable: Callable[[], bool],
) -> Callable[..., Any]:
    """Inductor with our pass before its joint passes, our partitioner, and our view of the backward graph."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner_compile(graph: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        def compile_graph(g: fx.GraphModule, xs: Sequence[Any]) -> Any:
            if is_cacheable():
                return compile_fx_inner(g, xs, **kwargs)
            with config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
                return compile_fx_inner(g, xs, **kwargs)

        if kwargs.get("is_backward", False):
            return backward(compile_graph, graph, example_inputs)
        if kwargs.get("is_inference", False):
            return compile_graph(graph, example_inputs)
        return forward(compile_graph, graph, example_inputs)

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


def compiled_alone(model: nn.Module, backend: str = "inductor") -> Callable[..., Any]:
    """A model under plain torch.compile, with a code object of its own: transforms do not count against its limit."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_name="plain_model")
    return torch.compile(run, backend=backend, fullgraph=True)


def num_generated_kernels() -> int:
    """Return the number of kernels that Inductor has generated in this process."""
    from torch._inductor import metrics

    return int(metrics.generated_kernel_count)


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


def runs_backward(frame: FrameType) -> bool:
    """Whether a Python frame is the one that hands a backward to the autograd engine and waits for it."""
    return frame.f_code is _engine_run_backward.__code__


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


_OURS_WHILE_TRACING = -1  # torch counts hooks from 0


def hooks_of(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Identities of the hooks registered on one module; those of ``shown_while_tracing`` are left out."""
    dicts = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    # Read at once: another thread may be tracing.
    return tuple(tuple(key for key in tuple(hooks) if key != _OURS_WHILE_TRACING) for hooks in dicts)


@contextlib.contextmanager
def shown_while_tracing(modules: Sequence[nn.Module], show: Callable[[Any], Any]) -> Iterator[Collection[int]]:
    """Pass what these modules return (or are given, where they have forward hooks) through ``show``.

    It is done by a hook on each module, put into its dictionary without the counter of hooks moving. Gives the
    identities of the dictionaries. A module that has forward hooks and forward pre-hooks is left out.
    """

    def on_output(module: nn.Module, args: Any, output: Any) -> Any:
        return show(output)

    def on_input(module: nn.Module, args: Any) -> Any:
        return (show(args[0]), *args[1:]) if args else None

    changed = []
    try:
        for module in modules:
            if not module._forward_hooks:
                module._forward_hooks[_OURS_WHILE_TRACING] = on_output
                changed.append(module._forward_hooks)
            elif _OURS_WHILE_TRACING not in module._forward_hooks and not module._forward_pre_hooks:
                module._forward_pre_hooks[_OURS_WHILE_TRACING] = on_input
                changed.append(module._forward_pre_hooks)
        yield {id(hooks) for hooks in changed}
    finally:
        for hooks in changed:
            del hooks[_OURS_WHILE_TRACING]


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
