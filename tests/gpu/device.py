"""The simulated GPU as a context manager: torch, Inductor and Triton are patched to find a device."""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.compile_fx
import torch._inductor.cudagraph_utils
import torch._inductor.output_code
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._inductor import config, metrics
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import _load_triton_kernel_from_source
from torch._inductor.constant_folding import ConstantFolder
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import hints, triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _triton
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.language.extra import libdevice
from triton.runtime.interpreter import ReduceOps

from gradrewrite._compat import fake_tensors
from gradrewrite.monitoring import step_recorder

from gpu import interpreter, twins
from gpu.log import MULTIPROCESSORS, SHARED_MEMORY, Kernel, SimulatedGpu
from gpu.streams import Event, Stream


@contextlib.contextmanager
def simulated_gpu(
    capability: int = 90, *, has_values: bool = False, has_fake_tensors: bool = True
) -> Iterator[SimulatedGpu]:
    """Let torch find a GPU inside the block, where all tensors are fake.

    Args:
        capability: 80 (as an A100) or 90 (as an H100).
        has_values: Whether tensors have values; kernels are then interpreted, for which the process needs
            ``TRITON_INTERPRET=1``.
        has_fake_tensors: Without them only kernels can be compiled.

    Yields:
        The log of the device.
    """
    gpu = SimulatedGpu(capability, has_values)
    Event.log = gpu
    with contextlib.ExitStack() as stack:
        _patch_torch(stack, gpu)
        _patch_inductor(stack, gpu)
        if has_values:
            _patch(stack, libdevice, **interpreter.libdevice())
            _patch(stack, ReduceOps, apply_impl=interpreter.reduction(ReduceOps.apply_impl))
        stack.callback(triton.runtime.driver.set_active, None)
        triton.runtime.driver.set_active(_driver(capability))
        for cached in (_triton.has_triton, _triton.triton_backend, hints.DeviceProperties.create):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        stack.callback(torch.compiler.reset)
        torch.compiler.reset()
        metrics.reset()
        if has_fake_tensors:
            modes = (FakeTensorMode(), twins.Watch(gpu))
            outside = functools.partial(_outside_of_tracing, modes)
            transforms = functools.partial(_outside_of_transforms, modes)
            _patch(stack, fake_tensors, outside_of_tracing=outside, outside_of_transforms=transforms)
            for mode in modes:
                stack.enter_context(mode)
        stack.callback(_flush, gpu)
        yield gpu


def compile_to_cubins(kernels: Sequence[Kernel], capability: int) -> int:
    """Compile kernels that a block of ``simulated_gpu`` has left; return the number of cubins.

    Raises:
        RuntimeError: A cubin is not for this chip, or does not fit it; else what Triton and ptxas raise.
    """
    count = 0
    with simulated_gpu(capability, has_fake_tensors=False):
        for kernel in kernels:
            for binary in kernel.compile():
                if not binary.asm["cubin"] or f".target sm_{capability}" not in binary.asm["ptx"]:
                    raise RuntimeError(f"{kernel.name} was not compiled for sm_{capability}")
                count += 1
    return count


def _patch(stack: contextlib.ExitStack, owner: Any, **values: Any) -> None:
    for name, value in values.items():
        stack.enter_context(mock.patch.object(owner, name, value, create=not hasattr(owner, name)))


def _flush(gpu: SimulatedGpu) -> None:
    """Fetch records that have not been read; at the end of the program the device is no longer there."""
    gpu.sync_debug_mode = "default"
    step_recorder._flush_all()


@contextlib.contextmanager
def _outside_of_tracing(modes: Sequence[Any]) -> Iterator[None]:
    """Replacement of ``unset_fake_temporarily``: the modes of the simulation go on."""
    with unset_fake_temporarily(), contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


@contextlib.contextmanager
def _outside_of_transforms(modes: Sequence[Any]) -> Iterator[None]:
    """As ``fake_tensors.outside_of_transforms``, in the modes of the simulation."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes(), contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def _properties(capability: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=f"simulated sm_{capability}",
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=MULTIPROCESSORS[capability],
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=SHARED_MEMORY[capability],
        L2_cache_size=50 << 20,
        gcnArchName="",
    )


def _driver(capability: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
    )


def _patch_torch(stack: contextlib.ExitStack, gpu: SimulatedGpu) -> None:
    properties = _properties(gpu.capability)
    device: dict[str, Callable[..., Any]] = {
        "current_device": lambda: 0,
        "current_stream": lambda *_: Stream(),
        "device_count": lambda: 1,
        "get_device_properties": lambda *_: properties,
        "set_device": lambda _: None,
        "synchronize": lambda *_: gpu.wait("torch.cuda.synchronize", is_checked=False),
    }
    _patch(
        stack,
        torch.cuda,
        **device,
        Event=Event,
        Stream=Stream,
        _exchange_device=lambda _: 0,
        _lazy_init=lambda: None,
        _maybe_exchange_device=lambda _: 0,
        get_device_capability=lambda *_: (properties.major, properties.minor),
        get_rng_state=lambda *_: _cpu_rng_state(),
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed_all=lambda _: None,  # twins draw from the generator of the CPU
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        set_sync_debug_mode=lambda mode: setattr(gpu, "sync_debug_mode", mode),
        stream=lambda stream: stream,
    )
    names = ("exchange_device", "get_raw_stream", "maybe_exchange_device")
    exchange = {name: staticmethod(lambda _: 0) for name in names}
    _patch(stack, CudaInterface, **exchange, **{name: staticmethod(function) for name, function in device.items()})
    _patch(
        stack,
        torch._C,
        _cuda_cudaCachingAllocator_is_enabled=lambda: True,
        _cuda_getCurrentRawStream=lambda _: 0,
    )
    _patch(
        stack,
        torch._C._dynamo.guards,
        _empty_strided_cpu_pinned=lambda size, stride, dtype: torch.empty_strided(
            size, stride, dtype=dtype, device="cpu", pin_memory=True
        ),
        _empty_strided_cuda=lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda"),
        _reinterpret_tensor=_reinterpret,
    )
    _patch(stack, FakeTensor, data_ptr=twins.address, __deepcopy__=twins.deepcopy)
    _patch(stack, FakeTensorMode, avoid_device_init=True)
    _patch(stack, torch.nn.Module, _apply=twins.apply_to_module)


def _reinterpret(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _cpu_rng_state() -> Tensor:
    with twins.plain():
        return torch.get_rng_state()


def _patch_inductor(stack: contextlib.ExitStack, gpu: SimulatedGpu) -> None:
    settings = {
        "autotune_local_cache": False,
        "compile_threads": 1,
        "fx_graph_cache": False,  # a hit would make no kernels
        "shape_padding": False,  # it measures on the device
        "use_static_triton_launcher": False,
    }
    stack.enter_context(config.patch(settings))
    stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
    _patch(stack, AsyncCompile, cpp_pybinding=_cpp_kernels(gpu), triton=_triton_kernels(gpu))
    _patch(stack, CachingAutotuner, run=_launcher(gpu))
    _patch(stack, ConstantFolder, run=_folding_on_cpu())
    _patch(stack, GraphLowering, save_output_code=gpu.code.append)
    _patch(stack, triton_helpers, set_driver_to_gpu=lambda: None)
    for module in (torch._inductor.output_code, torch._inductor.cudagraph_utils):
        _patch(stack, module, log_cudagraph_skip_and_bump_counter=gpu.graph_refusals.append)
    _patch(stack, torch._inductor.compile_fx, compile_fx=_compile_unwatched(), cudagraphify=_graphs(gpu))


def _triton_kernels(gpu: SimulatedGpu) -> Callable[..., CachingAutotuner]:
    """Load kernels without compiling them."""

    def load(_: AsyncCompile, kernel_name: str, source_code: str, device_str: str = "cuda") -> CachingAutotuner:
        tuner: CachingAutotuner = _load_triton_kernel_from_source(kernel_name, source_code)
        gpu.kernels.append(Kernel(kernel_name, tuner, bool(V.graph.is_backward)))
        return tuner

    return load


def _cpp_kernels(gpu: SimulatedGpu) -> Callable[..., Callable[..., Any]]:
    """Run kernels of the CPU on twins."""
    original = AsyncCompile.cpp_pybinding

    def load(self: AsyncCompile, argtypes: list[str], source: str) -> Callable[..., Any]:
        kernel = original(self, argtypes, source)

        def run(*args: Any) -> Any:
            if not gpu.has_values:
                return None
            loaded = kernel.result() if hasattr(kernel, "result") else kernel
            with twins.plain():
                return loaded(*tree_map(twins.twin, args))

        return run

    return load


def _launcher(gpu: SimulatedGpu) -> Callable[..., None]:
    def launch(tuner: CachingAutotuner, *args: Any, stream: Any = None, **kwargs: Any) -> None:
        gpu.launches.append(tuner.inductor_meta["kernel_name"])
        gpu.size += sum(arg.numel() * arg.element_size() for arg in args if isinstance(arg, Tensor))
        if gpu.has_values:
            interpreter.interpret(tuner, args, kwargs)

    return launch


def _graphs(gpu: SimulatedGpu) -> Callable[..., Callable[[list[Any]], Any]]:
    """CUDA graphs, as far as memory goes: a run overwrites the outputs of the run before, here with NaN."""

    def cudagraphify(model: Callable[..., Any], static_input_idxs: Sequence[int] = (), **_: Any) -> Callable[..., Any]:
        gpu.num_graphs += 1
        last: list[Tensor] = []

        def run(inputs: list[Any]) -> Any:
            if not gpu.has_values:
                return model(inputs)
            own = {_storage(t) for t in inputs if isinstance(t, FakeTensor)}
            with twins.plain():
                for tensor in last:
                    tensor.fill_(math.nan)
            outputs = model(inputs)
            floats = [t for t in outputs if isinstance(t, FakeTensor) and t.is_floating_point()]
            fresh = [t for t in floats if _storage(t) not in own]
            last[:] = [twins.twin(t) for t in fresh]
            return outputs

        return run

    return cudagraphify


def _storage(tensor: Tensor) -> int:
    real: Tensor = twins.twin(tensor)
    return real.untyped_storage().data_ptr()


def _compile_unwatched() -> Callable[..., Any]:
    """``compile_fx`` without the watch, which torch.compile takes off and a direct call does not."""
    original = torch._inductor.compile_fx.compile_fx

    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        is_watched = isinstance(_get_current_dispatch_mode(), twins.Watch)
        with _pop_mode_temporarily() if is_watched else contextlib.nullcontext():
            return original(*args, **kwargs)

    return compile_fx


def _folding_on_cpu() -> Callable[[ConstantFolder], Any]:
    """``ConstantFolder.run``, which runs operations on the device."""
    original = ConstantFolder.run

    def run(self: ConstantFolder) -> Any:
        with _OnCpu():
            return original(self)

    return run


class _OnCpu(TorchDispatchMode):
    """Makes new tensors on the CPU."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)
