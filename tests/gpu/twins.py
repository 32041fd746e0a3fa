"""Tensors of the simulated device: fake tensors, each with a twin on the CPU that has its values."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gradrewrite.ir import editing, loop_code
from gradrewrite.numerics import measuring

from gpu.log import SimulatedGpu, Upload, caller

_aten = torch.ops.aten
_READS = (_aten._local_scalar_dense.default, _aten.equal.default)  # the host gets a value
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_UNCOUNTED = ("prim",)  # properties of tensors


def _run_loop(tensors: list[Tensor], key: str) -> list[Tensor]:
    """Run a loop op by op, with its constants on the CPU."""
    code = copy.copy(loop_code.code_named(key))
    code.body, code.compile, code._run = editing.copy_of(code.body), None, None
    for node in code.body.graph.nodes:
        node.kwargs = {name: torch.device("cpu") if name == "device" else given for name, given in node.kwargs.items()}
    code.body.recompile()
    return code.run(*code.split(tensors))


# What the opaque operators run.
_OPAQUE = {**dict.fromkeys(measuring.OPAQUE, measuring.pack_eagerly), loop_code.OP_LOOP: _run_loop}


class Watch(TorchDispatchMode):
    """Notes operations, copies and waits; with values, computes each operation on the twins too."""

    def __init__(self, log: SimulatedGpu) -> None:
        super().__init__()
        self._log = log

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """On while compiled code runs, off while it is made; without it torch.compile runs eagerly below the mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace in _UNCOUNTED:
            return func(*args, **kwargs)
        if func.namespace == "gradrewrite":
            return self._run_opaque(func, args, kwargs)
        self._note(func, args, kwargs)
        if func is _aten.is_pinned.default:
            return getattr(args[0], "was_pinned", False)
        if func is _aten._pin_memory.default:
            return self._pin(args[0])
        if func in _READS and self._log.has_values:
            return _on_twins(func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        except DynamicOutputShapeException:  # of ``nonzero`` and the like the host waits for the size
            if not self._log.has_values:
                raise
            self._log.wait(str(func))
            real = _on_twins(func, args, kwargs)
            return tree_map(lambda t: put(t, args[0].device) if isinstance(t, Tensor) else t, real)
        if kwargs.pop("pin_memory", False):
            out.was_pinned = True
        if self._log.has_values:
            _give_twins(out, _on_twins(func, args, kwargs))
        return out

    def _pin(self, tensor: Any) -> Tensor:
        """Copy to pinned memory, which fake tensors do not know."""
        out = _aten.clone.default(tensor)
        out.was_pinned = True
        if self._log.has_values:
            _give_twins(out, _on_twins(_aten.clone.default, [tensor], {}))
        return out

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        on_device = any(t.device.type == "cuda" for t in tensors)
        if func in _READS:
            if on_device:
                self._log.wait(str(func))
        elif func in _COPIES:
            self._note_copy(func, args, kwargs)
        elif on_device and not is_view(func):
            self._log.operations[str(func)] += 1

    def _note_copy(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        is_in_place = func is _aten.copy_.default
        source = args[1] if is_in_place else args[0]
        target = args[0].device if is_in_place else torch.device(kwargs.get("device") or args[0].device)
        asks_to_wait = not (kwargs.get("non_blocking") or (is_in_place and len(args) > 2 and args[2]))
        text = f"{func} {tuple(source.shape)}"
        if (source.device.type, target.type) == ("cuda", "cpu"):
            if asks_to_wait or not (is_in_place and getattr(args[0], "was_pinned", False)):
                self._log.wait(text)
        elif (source.device.type, target.type) == ("cpu", "cuda"):
            self._log.uploads.append(Upload(f"{text} {caller()}", asks_to_wait))
            if asks_to_wait:  # the copy is followed by a wait for the stream
                self._log.wait(f"{text} to the device")
        elif target.type == "cuda":
            self._log.operations[str(func)] += 1

    def _run_opaque(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator of gradrewrite, and count the operations on the device that it consists of."""
        out = func(*args, **kwargs)
        if func in _OPAQUE and any(isinstance(t, Tensor) and t.device.type == "cuda" for t in tree_leaves((args, out))):
            with plain():
                args, kwargs = tree_map(_twin_or_zeros, (args, kwargs))
                with _Counting(self._log, str(func)):
                    real = _OPAQUE[func](*args, **kwargs)  # not the operator itself, inside of which the mode is off
            if self._log.has_values:
                _give_twins(out, real)
        elif self._log.has_values:
            _give_twins(out, _on_twins(func, args, kwargs))
        return out


class _Counting(TorchDispatchMode):
    """Counts the operations that an opaque operator runs one by one."""

    def __init__(self, log: SimulatedGpu, name: str) -> None:
        super().__init__()
        self._log, self._name = log, name

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            self._log.wait(f"{func} in {self._name}")
        if not is_view(func):
            self._log.operations[f"{self._name}: {func}"] += 1
        return func(*args, **(kwargs or {}))


def is_view(func: Any) -> bool:
    """Whether an operation launches nothing: views, and memory without values."""
    return func.is_view or func in _NO_LAUNCH or "empty" in str(func) or "detach" in str(func)


_NO_LAUNCH = (_aten.is_pinned.default, _aten._pin_memory.default, _aten._unsafe_view.default, _aten.set_.source_Tensor)


def _on_twins(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with plain():
        return func(*tree_map(twin, args), **tree_map(twin, kwargs))


def _give_twins(out: Any, real: Any) -> None:
    for fake, value in zip(tree_leaves(out), tree_leaves(real), strict=True):
        if isinstance(fake, FakeTensor):
            fake.twin = value  # type: ignore[attr-defined]


def twin(value: Any) -> Any:
    """The CPU tensor that has the values of a fake tensor; the CPU for a device."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.twin if isinstance(value, FakeTensor) else value  # type: ignore[attr-defined]


def _twin_or_zeros(value: Any) -> Any:
    if isinstance(value, FakeTensor) and not hasattr(value, "twin"):
        return torch.zeros(value.shape, dtype=value.dtype, device="cpu")
    return twin(value)


def address(fake: FakeTensor) -> int:
    """Return where host code may read the values of a fake tensor in host memory; zeros if it has no twin."""
    if not hasattr(fake, "twin"):
        if fake.device.type == "cuda":
            return 0
        with plain():
            fake.twin = torch.zeros(fake.shape, dtype=fake.dtype)  # type: ignore[attr-defined]
    real: Tensor = twin(fake)
    return real.data_ptr()


def put(value: Tensor, device: torch.device | str = "cuda") -> Tensor:
    """Return a tensor of the simulated device with these values; ``module._apply(put)`` moves a module there."""
    with plain():
        value = value.detach().clone()
    fake = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    fake.twin = value  # type: ignore[attr-defined]
    return fake


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Torch without the modes of the simulation."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def apply_to_module(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` with new parameters: torch cannot change the data of a fake tensor."""
    known: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None:
                if id(old) not in known:
                    with torch.no_grad():
                        known[id(old)] = nn.Parameter(fn(old), old.requires_grad)
                part._parameters[name] = known[id(old)]
        part._buffers.update({name: b if b is None else fn(b) for name, b in part._buffers.items()})
    return module


def deepcopy(fake: FakeTensor, memo: dict[int, Any]) -> Tensor:
    """``copy.deepcopy`` of a fake tensor, values included."""
    copied = fake.detach().clone()
    if isinstance(fake, nn.Parameter):
        copied = nn.Parameter(copied, fake.requires_grad)
    copy: Tensor = memo.setdefault(id(fake), copied)
    return copy
