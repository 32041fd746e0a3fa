"""Python floats of an optimizer as 0-d float64 tensors."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradrewrite._compat import factors
from gradrewrite._compat.versions import needed_for

with needed_for("calls of torch functions and operators can be watched"):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

Name = tuple[int, str]  # of a number: its param group, and its name there

_LEAVING = frozenset(("numpy", "__array__", "__dlpack__", "data_ptr", "to_dlpack", "untyped_storage", "storage"))
_READING = frozenset(("__bool__", "__float__", "__int__", "__index__", "__complex__", "tolist", "is_nonzero", "item"))
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, kind) for kind in ("eq", "ne", "lt", "le", "gt", "ge") for name in (kind, f"__{kind}__")
}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_IN_PLACE = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "pow"))
_SUMS = frozenset(("add", "add_", "sub", "sub_"))
_PRODUCTS = frozenset(("addcmul", "addcmul_", "addcdiv", "addcdiv_"))
_FOREACH_PRODUCTS = frozenset(("_foreach_addcmul_", "_foreach_addcdiv_"))
_LERPS = frozenset(("lerp", "lerp_"))
_CLAMPS = frozenset(("clamp", "clamp_", "clip", "clip_"))


class HostReadError(Exception):
    """A tensor's value or memory, asked for on the host."""


class Numbers(TorchFunctionMode):
    """Lets 0-d float64 tensors stand for floats.

    They promote as Python's floats do, may be factors (``alpha=``, ``value=``, ``weight``, bounds), and are float64
    whatever the code asks of ``to``. A 0-d tensor of state (a step count) is in its own dtype where it is written, and
    such a number where it is read, as its ``item()`` would be.

    Attributes:
        compared: Names of the given numbers that were compared with 0. The answer is that for their present value.
    """

    def __init__(self, given: Mapping[Name, tuple[Tensor, float]], counters: Iterable[Tensor]) -> None:
        super().__init__()
        self.compared: set[Name] = set()
        self._given = {id(tensor): (name, value) for name, (tensor, value) in given.items()}
        self._fixed = {id(tensor): tensor for tensor, _ in given.values()}  # as floats, not changed in place
        self._numbers = dict(self._fixed)
        self._counters = {id(tensor): tensor for tensor in counters}
        self._casts: dict[tuple[Any, ...], Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__get__":
            is_data = func == torch.Tensor.data.__get__  # type: ignore[attr-defined]
            return args[0].detach() if is_data else func(*args, **kwargs)
        if name == "__set__" and func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise HostReadError("it replaces the memory of a tensor (.data = ...)")
        if name in _LEAVING:
            raise HostReadError(f"it takes the memory of a tensor out of torch ({name})")
        answer = self._answer(name, args)
        if answer is not None:
            return answer
        if name in _READING:
            return self._read(name, args[0])
        return self._call(func, name, args, kwargs)

    def _answer(self, name: str, args: tuple[Any, ...]) -> bool | None:
        """Compare a given number with 0; None for all else."""
        if name == "__bool__" and id(args[0]) in self._given:
            return self._compare(args[0], "ne")
        if name not in _COMPARISONS or len(args) != 2:
            return None
        kind = name.strip("_")
        for one, other, asked in ((*args, kind), (*reversed(args), _MIRRORED[kind])):
            is_zero = isinstance(other, int | float) and other == 0
            if is_zero and isinstance(one, Tensor) and id(one) in self._given:
                return self._compare(one, asked)
        return None

    def _compare(self, number: Tensor, kind: str) -> bool:
        name, value = self._given[id(number)]
        self.compared.add(name)
        return _COMPARISONS[kind](value, 0)

    def _read(self, name: str, tensor: Tensor) -> Tensor:
        if name == "item":
            if id(tensor) in self._numbers:
                return tensor
            if id(tensor) in self._counters:
                return self._note(self._widened(tensor), is_fixed=True)
        meant = {"__bool__": "branches on", "item": "reads"}.get(name, "reads")
        raise HostReadError(f"it {meant} a value of a tensor on the host ({name})")

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in _FOREACH_PRODUCTS and isinstance(args[-1], Tensor):
            return _each_product(name, *args)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not any(id(t) in self._numbers or id(t) in self._counters for t in tensors):
            return func(*args, **kwargs)
        if name == "to" and id(args[0]) in self._numbers:
            return args[0]
        written = self._written(name, args, kwargs)
        if written is not None and id(written) in self._fixed:  # x *= 2 binds the name of a float anew
            copied = self._note(written.clone())
            args, written = (copied, *args[1:]), copied
        alone = all(t is written or id(t) in self._numbers or id(t) in self._counters for t in tensors)
        args = tuple(x if x is written else self._plain(x) for x in args)
        kwargs = {key: x if x is written else self._plain(x) for key, x in kwargs.items()}
        args, kwargs, narrow = self._promoted(args, kwargs, written)
        with contextlib.suppress(KeyError):
            return _written_out(name, args, kwargs)
        if written is not None:
            self._casts = {key: cast for key, cast in self._casts.items() if key[0] != id(written)}
        result = func(*args, **kwargs)
        if narrow is not None and written is None and isinstance(result, Tensor) and result.is_floating_point():
            return result.to(narrow)
        is_number = alone and id(written) not in self._counters and isinstance(result, Tensor)
        return self._note(result) if is_number and _is_number(result) else result

    def _written(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        if isinstance(kwargs.get("out"), Tensor):
            return kwargs["out"]  # type: ignore[no-any-return]
        is_in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or name == "__setitem__"
        return args[0] if is_in_place and args and isinstance(args[0], Tensor) else None

    def _note(self, tensor: Tensor, *, is_fixed: bool = False) -> Tensor:
        self._numbers[id(tensor)] = tensor
        if is_fixed:
            self._fixed[id(tensor)] = tensor
        return tensor

    def _widened(self, counter: Tensor) -> Tensor:
        return counter.to(torch.float64) if counter.dtype != torch.float64 else counter.clone()

    def _plain(self, value: Any) -> Any:
        """Read a count as a number."""
        is_counter = isinstance(value, Tensor) and id(value) in self._counters
        return self._note(self._widened(value)) if is_counter else value

    def _promoted(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], written: Tensor | None
    ) -> tuple[tuple[Any, ...], dict[str, Any], torch.dtype | None]:
        """Give numbers the dtype of floats beside these tensors.

        The third result is the dtype of the result, where that is half precision of 0-d tensors.
        """
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        others = [t for t in tensors if id(t) not in self._numbers and (t.is_floating_point() or t.is_complex())]
        if not others:
            return args, kwargs, None
        wide, dtype = factors.dtypes_of(*others)
        is_small = not any(t.dim() for t in tensors)
        device = written.device if is_small and written is not None else None

        def cast(x: Any) -> Any:
            is_number = isinstance(x, Tensor) and id(x) in self._numbers and x is not written
            return self._cast(x, wide.to_real(), device, is_computed_once=not is_small) if is_number else x

        narrow = dtype if is_small and wide != dtype else None
        return tuple(map(cast, args)), {key: cast(x) for key, x in kwargs.items()}, narrow

    def _cast(
        self, number: Tensor, dtype: torch.dtype, device: torch.device | None, *, is_computed_once: bool
    ) -> Tensor:
        """Return a number in another dtype.

        ``is_computed_once`` is for numbers that meet each element of a tensor: Inductor computes 0-d nodes anew for
        each element on the CPU, several times as long as the update itself, unless a node asks for their memory.
        """
        key = id(number), dtype, device, is_computed_once
        if key not in self._casts:
            found = number.to(device=device, dtype=dtype)
            is_held = is_computed_once and number.device.type == "cpu"
            self._casts[key] = found.as_strided((), ()) if is_held else found
        return self._casts[key]


def _is_number(tensor: Tensor) -> bool:
    return tensor.dim() == 0 and tensor.dtype == torch.float64


def _written_out(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Write tensor factors out as products; KeyError without any."""
    if name in _SUMS and isinstance(kwargs["alpha"], Tensor):
        alpha = -kwargs["alpha"] if name.startswith("sub") else kwargs["alpha"]
        result = factors.scaled_sum(args[0], 1, args[1], alpha)
    elif name in _PRODUCTS and isinstance(kwargs["value"], Tensor):
        run = factors.DECOMPOSITIONS[getattr(torch.ops.aten, name.rstrip("_")).default]
        result = run(*args, value=kwargs["value"])
    elif name in _LERPS and isinstance(weight := args[2] if len(args) > 2 else kwargs["weight"], Tensor):
        result = _between(args[0], args[1], weight)
    elif name in _CLAMPS:
        result = _clamped(*args, **kwargs)
    else:
        raise KeyError(name)
    return args[0].copy_(result) if name.endswith("_") else result


def _each_product(name: str, targets: Any, a: Any, b: Any, values: Tensor) -> None:
    """Write out the factors of an op on lists."""
    run = factors.DECOMPOSITIONS[getattr(torch.ops.aten, name.removeprefix("_foreach_").rstrip("_")).default]
    for target, x, y, value in zip(targets, a, b, values.unbind(), strict=True):
        target.copy_(run(target, x, y, value=value))


def _between(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """Interpolate as ``lerp`` does, from the nearer end."""
    wide, dtype = factors.dtypes_of(start)
    start, end, weight = start.to(wide), end.to(wide), weight.to(wide.to_real())
    is_far = weight.abs() >= 0.5
    base = torch.where(is_far, end, start)
    return (base + (end - start) * torch.where(is_far, weight - 1, weight)).to(dtype)


def _clamped(value: Tensor, min: Any = None, max: Any = None) -> Tensor:
    for name, bound, choose in (("min", min, torch.maximum), ("max", max, torch.minimum)):
        if isinstance(bound, Tensor):
            value = choose(value, bound.to(value.device, value.dtype))
        elif bound is not None:
            value = torch.clamp(value, **{name: bound})
    return value


class _RefuseReads(TorchDispatchMode):
    """Stops torch's own reads of tensors in place of numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise HostReadError("it gives torch a tensor where a number is read on the host")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def reads_refused() -> Iterator[None]:
    """Raise HostReadError for reads of real tensors."""
    with _RefuseReads():  # type: ignore[no-untyped-call]
        yield


@contextlib.contextmanager
def told_of_compilation(is_compiling: bool) -> Iterator[None]:
    """Tell optimizers whether they are compiled: then they keep step counts in tensors."""
    before = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: is_compiling
    try:
        yield
    finally:
        torch.compiler.is_compiling = before
