"""Custom operators of the ``gradrewrite`` namespace: markers, holding, opaque statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite.ir.statistics import STATISTICS, Statistic, _dtype, norm_of

_LIBRARY = torch.library.Library("gradrewrite", "DEF")
_LIBRARY.define("mark_activation(Tensor x, int value) -> ()")
_LIBRARY.define("mark_error(Tensor g, int value) -> Tensor")
_LIBRARY.define("hold(Tensor[] tensors) -> ()")
_LIBRARY.define("measure(Tensor[] xs, str[] names) -> Tensor")
_LIBRARY.define("pack(Tensor[] values) -> Tensor")


def _no_result(*_: Any) -> None:
    return None


def _like(g: Tensor, _: int) -> Tensor:
    # Same strides, so that what is traced behind a marker is what is traced without it.
    return torch.empty_strided(g.size(), g.stride(), dtype=g.dtype, device=g.device)


for _name, _implementation in (("mark_activation", _no_result), ("mark_error", _like), ("hold", _no_result)):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gradrewrite::{_name}", _implementation, lib=_LIBRARY)

# A forward may differentiate inside itself, and then once more through that: the marker is an identity.
torch.library.register_autograd("gradrewrite::mark_error", lambda _, g: (g, None), lib=_LIBRARY)

mark_activation = torch.ops.gradrewrite.mark_activation.default
mark_error = torch.ops.gradrewrite.mark_error.default
hold = torch.ops.gradrewrite.hold.default
fx.node.has_side_effect(mark_activation)
fx.node.has_side_effect(hold)


def number_of(marker: fx.Node) -> int:
    """Return the number of the value of a marker."""
    number = marker.args[1]
    assert isinstance(number, int)
    return number


def _wide_norm(x: Tensor) -> Tensor:
    if x.dtype in (torch.float64, torch.complex128):
        return norm_of(x)
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.complex128 if x.is_complex() else torch.float64)
    return norm


# The same figures in few operations: run eagerly, it is their number that costs.
_EAGERLY: Mapping[str, Statistic] = {
    "norm": _wide_norm,
    "nan": lambda x: torch.count_nonzero(x != x),
    "nonfinite": lambda x: torch.count_nonzero(x - x),  # an infinity less itself is NaN
}


def _measure(xs: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    functions = [_EAGERLY.get(name, STATISTICS[name]) for name in names]
    dtype = _widest(xs)
    return torch.stack([function(x).to(dtype) for x in xs for function in functions])


def _fake_measure(xs: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    return xs[0].new_empty(len(xs) * len(names), dtype=_widest(xs))


def _widest(xs: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(_dtype(x) == torch.float64 for x in xs) else torch.float32


def _pack(values: Sequence[Tensor]) -> Tensor:
    dtype = _pack_dtype(values)
    return torch.cat([v.reshape(-1).to(dtype) for v in values])


def _fake_pack(values: Sequence[Tensor]) -> Tensor:
    return values[0].new_empty(sum(v.numel() for v in values), dtype=_pack_dtype(values))


def _pack_dtype(values: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(v.dtype == torch.float64 for v in values) else torch.float32


_OPERATIONS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("measure", _measure, _fake_measure),
    ("pack", _pack, _fake_pack),
)
for _name, _run, _fake in _OPERATIONS:
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gradrewrite::{_name}", _fake, lib=_LIBRARY)


def measure(x: Tensor, names: Sequence[str], *, is_opaque: bool) -> Tensor:
    """Statistics of a tensor in the given order, ``[len(names)]``, float32 (float64 for 64-bit elements).

    Args:
        x: A real or complex tensor; ``min``, ``max`` and ``saturated_*`` need a real one.
        names: Keys of ``STATISTICS``.
        is_opaque: One operation that the compiler does not look into, instead of nodes that it fuses.
    """
    if is_opaque:
        return measure_all([x], names)
    values = [STATISTICS[name](x).to(_dtype(x)) for name in names]
    return torch.stack(values) if len(values) > 1 else values[0].reshape(1)


def measure_all(xs: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    """The same statistics of several tensors of one device, tensor after tensor, by one opaque operation."""
    values: Tensor = torch.ops.gradrewrite.measure(list(xs), list(names))
    return values


def pack(*values: Tensor) -> Tensor:
    """One flat tensor of all values of one device: float64 if any is, else float32; opaque, for it compiles faster."""
    if values[0].device.type == "cuda":
        return _pack(values)  # each value is written where it belongs, by the kernel that computes it
    packed: Tensor = torch.ops.gradrewrite.pack(list(values))
    return packed


OPAQUE = frozenset((torch.ops.gradrewrite.measure.default, torch.ops.gradrewrite.pack.default))
