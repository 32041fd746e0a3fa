"""Statistics of a tensor, as nodes that the compiler fuses or as one opaque operation.

Traced nodes fuse with what makes the tensor and read it once; each costs compile time. The opaque operation compiles
at once and reads the tensor by itself. ``docs/design.md`` says which is used when, with the figures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import assert_never

from gradrewrite._compat import collectives, dtensors, fake_tensors
from gradrewrite.distributed.figures import Combination
from gradrewrite.distributed.layouts import added_up
from gradrewrite.ir.stages import reduce_all

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Figure: TypeAlias = Callable[[Tensor], Tensor]


def norm_of(tensor: Tensor, order: float = 2.0) -> Tensor:
    """Norm ``(sum |x|^p)^(1/p)``, as 0-d float32 or float64.

    It does not overflow while it is representable; 0 if the tensor is empty, inf or NaN if an element is. Squares of
    narrower elements are summed in float64, which holds them all: one pass. Otherwise it is
    ``m * (sum (|x| / m)^p)^(1/p)`` with ``m = max |x|``: two passes.
    """
    if dtensors.is_dtensor(tensor):
        return norms_of([tensor], order)[0]
    size = size_of(tensor)
    if _is_empty(tensor):
        return size.new_zeros(())
    if order == 2 and size.dtype == torch.float32 and size.device.type != "mps":  # which has no float64
        wide = size.to(torch.float64)  # squares of float32 neither overflow nor vanish: one pass
        return reduce_all(torch.sum, wide * wide).sqrt().to(torch.float32)
    largest = reduce_all(torch.amax, _padded(size, 0.0))
    if math.isinf(order):
        return largest
    # Dividing by an infinite or a zero maximum would make NaN; by one it changes nothing.
    unit = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
    share = size / unit
    if order == 1:
        return unit * reduce_all(torch.sum, share)
    if order == 2:
        return unit * reduce_all(torch.sum, share * share).sqrt()
    return unit * reduce_all(torch.sum, share**order) ** (1.0 / order)


def norms_of(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """The norms of tensors, see ``norm_of``; those of DTensors with equal shards by one collective together."""
    norms: list[Tensor | None] = [None if dtensors.is_dtensor(t) else norm_of(t, order) for t in tensors]
    alike: dict[object, list[tuple[int, DTensor]]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        if dtensors.is_dtensor(tensor):
            whole = added_up(tensor)
            replicated = tuple(placement.is_replicate() for placement in whole.placements)
            alike[whole.device_mesh, replicated, _dtype(whole)].append((position, whole))
    for members in alike.values():
        own = torch.stack([norm_of(dtensors.local_of(whole), order) for _, whole in members])
        rows = _gather_shards(own, members[0][1])
        for column, (position, _) in enumerate(members):
            norms[position] = own[column] if rows.shape[0] == 1 else norm_of(rows[:, column], order)
    return [norm for norm in norms if norm is not None]


def total_norm_of(norms: Sequence[Tensor], order: float = 2.0) -> tuple[Tensor, Tensor]:
    """The norm of several tensors as one vector, 0-d, and their own norms, flat; they are given in any shapes."""
    wide = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    flat = torch.cat([n.to(norms[0].device, wide).reshape(-1) for n in norms])
    return norm_of(flat, order), flat


def norms_of_units(tensor: Tensor) -> Tensor:
    """L2 norms of the rows of dimension 0, as ``norm_of`` computes them: ``[rows, 1, ...]``, float32 or float64.

    A tensor of one dimension, or of none, is one unit: ``[1]`` or ``[]``.
    """
    size = size_of(tensor)
    dims = tuple(range(1 if tensor.dim() > 1 else 0, tensor.dim()))
    if size.dtype == torch.float32 and size.device.type != "mps":
        wide = size.to(torch.float64)
        return (wide * wide).sum(dims, keepdim=True).sqrt().to(torch.float32)
    if _is_empty(tensor):
        return size.sum(dims, keepdim=True)
    largest = size.amax(dims, keepdim=True)
    unit = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
    share = size / unit
    return unit * (share * share).sum(dims, keepdim=True).sqrt()


def shares_of(norms: Tensor, order: float = 2.0) -> Tensor:
    """Share of each norm in the sum of their ``order``-th powers, same shape; the shares add up to 1.

    ``order=inf``: those at the largest norm have equal shares, the others 0. Norms that are not finite have equal
    shares, the others 0. All norms 0: all shares 0.
    """
    largest = norms.amax()
    unit = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
    powers = (norms == unit).to(norms.dtype) if math.isinf(order) else (norms / unit) ** order
    parts = torch.where(torch.isfinite(largest), powers, torch.isfinite(norms).logical_not().to(norms.dtype))
    total = parts.sum()
    return parts / torch.where(total > 0, total, 1.0)


def size_of(x: Tensor) -> Tensor:
    """Absolute values, in at least float32."""
    size = x.abs()
    return size.to(torch.promote_types(size.dtype, torch.float32))


def _dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype in (torch.float64, torch.complex128) else torch.float32


def _is_empty(x: Tensor) -> bool:
    return fake_tensors.statically_known_true(x.numel() == 0)


def _may_be_empty(x: Tensor) -> bool:
    """Whether the size depends on data and may be 0: a reduction must then not assume that there is an element."""
    return not fake_tensors.statically_known_true(x.numel() != 0)


def _padded(x: Tensor, neutral: float) -> Tensor:
    """The tensor, flat and with one more element where it may be empty: ``amax`` of none is an error."""
    return torch.cat([x.reshape(-1), x.new_full((1,), neutral)]) if _may_be_empty(x) else x


def _number(x: Tensor) -> Tensor:
    """Number of elements, on the device: a size that depends on data is no number while a graph is traced."""
    return torch.ones_like(x, dtype=torch.float32).sum()


def _or_nan(reduce: Figure) -> Figure:
    def reduce_or_nan(x: Tensor) -> Tensor:
        if _is_empty(x):
            return torch.full((), math.nan, device=x.device)
        return torch.where(_number(x) == 0, math.nan, reduce(x)) if _may_be_empty(x) else reduce(x)

    return reduce_or_nan


def share_of(mask: Tensor) -> Tensor:
    """Share of the elements that are true; 0 for an empty tensor."""
    if _is_empty(mask):
        return torch.zeros((), device=mask.device)
    found = mask.to(torch.float32)
    return found.sum() / _number(mask).clamp(min=1.0) if _may_be_empty(mask) else reduce_all(torch.mean, found)


largest_of = _or_nan(lambda size: reduce_all(torch.amax, _padded(size, 0.0)))  # of absolute values
mean_of = _or_nan(lambda size: reduce_all(torch.mean, size))


def _wide_norm(x: Tensor) -> Tensor:
    if x.dtype in (torch.float64, torch.complex128) or x.device.type == "mps":  # which has no float64
        return norm_of(x)
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.complex128 if x.is_complex() else torch.float64)
    return norm


@dataclass(frozen=True, slots=True)
class Statistic:
    """A statistic of a tensor."""

    traced: Figure  # by operations that a compiler fuses
    combination: Combination  # the rule for the figure of a whole tensor from those of its parts
    # ``"value"`` grows with the tensor (in units of the unscaled loss where there is a loss scale), ``"elements"`` are
    # counts, which add up over the graphs of a step, ``"share"`` is in [0, 1].
    unit: Literal["value", "elements", "share"]
    eager: Figure | None = None  # the same by fewer operations, whose number costs where nothing is fused
    takes_complex: bool = True  # defined for complex tensors
    # ``native_statistics.cpp`` has it; another one, and those measured with it, are measured by operations of torch
    is_native: bool = True


def _share_of(mask: Figure, *, takes_complex: bool = True) -> Statistic:
    return Statistic(lambda x: share_of(mask(x)), Combination("mean"), "share", takes_complex=takes_complex)


def _count_of(mask: Figure, eager: Figure | None = None) -> Statistic:
    """Count the elements of a mask, as a float: integer sums would not fuse."""
    return Statistic(lambda x: reduce_all(torch.sum, mask(x).to(_dtype(x))), Combination("sum"), "elements", eager)


_LEAST, _MOST = Combination("min"), Combination("max")
# The native ones in the order of the numbers in native_statistics.cpp.
STATISTICS: Mapping[str, Statistic] = {
    "max_abs": Statistic(lambda x: largest_of(size_of(x)), _MOST, "value"),
    "mean_abs": Statistic(lambda x: mean_of(size_of(x)), Combination("mean"), "value"),
    "norm": Statistic(norm_of, Combination("norm"), "value", _wide_norm),
    "min": Statistic(
        _or_nan(lambda x: reduce_all(torch.amin, _padded(x, math.inf))), _LEAST, "value", takes_complex=False
    ),
    "max": Statistic(
        _or_nan(lambda x: reduce_all(torch.amax, _padded(x, -math.inf))), _MOST, "value", takes_complex=False
    ),
    "nan": _count_of(torch.isnan, lambda x: torch.count_nonzero(x != x)),
    "inf": _count_of(torch.isinf),
    # An infinity less itself is NaN.
    "nonfinite": _count_of(lambda x: torch.isfinite(x).logical_not(), lambda x: torch.count_nonzero(x - x)),
    "zeros": _share_of(lambda x: x == 0),
    "saturated_tanh": _share_of(lambda x: x.abs() >= 0.99, takes_complex=False),
    "saturated_sigmoid": _share_of(lambda x: (x <= 0.01) | (x >= 0.99), takes_complex=False),
}
COUNTS = frozenset(name for name, statistic in STATISTICS.items() if statistic.unit == "elements")
IN_UNITS = frozenset(name for name, statistic in STATISTICS.items() if statistic.unit == "value")


def measure_shards(
    reports: Sequence[tuple[DTensor, Sequence[str]]], measure: Callable[[Tensor, Sequence[str]], Tensor]
) -> Tensor:
    """Statistics of global tensors, tensor after tensor, as a plain vector; one collective for all of them.

    The tensors have one shape and are on one mesh; ``measure`` measures a plain one.
    """
    first = added_up(reports[0][0])
    wholes = [added_up(tensor).redistribute(first.device_mesh, first.placements) for tensor, _ in reports]
    names = [name for _, own in reports for name in own]
    parts = [_of_shard(whole, own, measure) for whole, (_, own) in zip(wholes, reports, strict=True)]
    widest = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    found = torch.cat([part.to(widest) for part in parts])
    if _is_empty(first) or all(placement.is_replicate() for placement in first.placements):
        return found
    rows = _gather_shards(found, first)
    return torch.stack([_combine(name, rows[:, column]) for column, name in enumerate(names)])


def _of_shard(whole: DTensor, names: Sequence[str], measure: Callable[[Tensor, Sequence[str]], Tensor]) -> Tensor:
    """The part of one process in the statistics of a global tensor."""
    local = dtensors.local_of(whole)
    if _is_empty(whole):
        return measure(local, names)
    if _is_empty(local):
        neutral = [STATISTICS[name].combination.neutral for name in names]
        return torch.stack([local.new_full((), value, dtype=_dtype(local)) for value in neutral])
    weight = local.numel() / whole.numel()
    figures = measure(local, names)
    is_mean = [STATISTICS[name].combination.kind == "mean" for name in names]
    return torch.stack([figures[n] * weight if mean else figures[n] for n, mean in enumerate(is_mean)])


def _combine(name: str, figures: Tensor) -> Tensor:
    kind = STATISTICS[name].combination.kind
    match kind:
        case "min":
            return figures.amin()
        case "max":
            return figures.amax()
        case "norm":
            return norm_of(figures)
        case "sum" | "mean":
            return figures.sum()
        case _:
            assert_never(kind)


def _gather_shards(values: Tensor, like: DTensor) -> Tensor:
    """Gather the vectors of all shards, ``[shards, N]``; replicas, equal to each other, are counted once.

    ``like`` has no partial sums. It takes one collective for each dimension of the mesh that is sharded.
    """
    rows = values.unsqueeze(0)
    for dim, placement in enumerate(like.placements):
        if not placement.is_replicate():
            rows = collectives.gather_rows(rows, like.device_mesh.get_group(dim))
    return rows
