"""Statistics of a tensor, as nodes that the compiler fuses or as one opaque operation.

Traced nodes fuse with what makes the tensor and read it once; each costs compile time. The opaque operation compiles
at once and reads the tensor by itself. ``docs/design.md`` says which is used when, with the figures.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import assert_never

from gradrewrite._compat import collectives, dtensors, fake_tensors
from gradrewrite._utils.exponent_counts import EXPONENTS
from gradrewrite.distributed.figures import Combination, Kind
from gradrewrite.distributed.layouts import added_up
from gradrewrite.numerics.exponents import exponents_of
from gradrewrite.numerics.moments import MOMENTS, from_raw, moments_of, to_raw
from gradrewrite.numerics.stages import reduce_all

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Figure: TypeAlias = Callable[[Tensor], Tensor]
Parts: TypeAlias = Callable[[Tensor], Sequence[Tensor]]

FINGERPRINT = ("fingerprint_0", "fingerprint_1", "fingerprint_2")  # 16 bits each, the low ones first


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


def _numel(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.int64).sum()


def _or_nan(reduce: Figure) -> Figure:
    def reduce_or_nan(x: Tensor) -> Tensor:
        if _is_empty(x):
            return torch.full((), math.nan, device=x.device)
        return torch.where(_number(x) == 0, math.nan, reduce(x)) if _may_be_empty(x) else reduce(x)

    return reduce_or_nan


def share_of(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Share of the elements that are true; 0 for an empty tensor."""
    if _is_empty(mask):
        return torch.zeros((), dtype=dtype, device=mask.device)
    found = mask.to(dtype)
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
    """A statistic of a tensor, or one part of a statistic with several records (``PARTS``)."""

    traced: Figure | Parts  # by operations that a compiler fuses; all parts of a statistic have one function
    combination: Combination  # the rule for the figure of a whole tensor from those of its parts
    # ``"value"`` grows with the tensor (in units of the unscaled loss where there is a loss scale), ``"elements"`` are
    # counts, which add up over the graphs of a step, as ``"bits"`` of a fingerprint do, ``"share"`` is in [0, 1],
    # ``"shape"`` has no unit; ``"exponents"`` are counts by size.
    unit: Literal["value", "elements", "share", "bits", "shape", "exponents"]
    eager: Figure | Parts | None = None  # the same by fewer operations, whose number costs where nothing is fused
    takes_complex: bool = True  # defined for complex tensors
    # ``native_statistics.cpp`` has it; another one, and those measured with it, are measured by operations of torch
    is_native: bool = True
    part: int | None = None  # position in what the functions return; None where they return the figure itself


def _share_of(mask: Figure, *, takes_complex: bool = True) -> Statistic:
    return Statistic(lambda x: share_of(mask(x), _dtype(x)), Combination("mean"), "share", takes_complex=takes_complex)


def _count_of(mask: Figure, eager: Figure | None = None) -> Statistic:
    """Count the elements of a mask, as a float: integer sums would not fuse."""
    return Statistic(lambda x: reduce_all(torch.sum, mask(x).to(_dtype(x))), Combination("sum"), "elements", eager)


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_UPPER = 0x9E3779B97F4B  # odd, so that each of the upper 16 bits of a 64-bit word changes the lower 48


def words_of(x: Tensor) -> Tensor:
    """The bits of each element as a signed whole number.

    Those of a complex element are two, in a last dimension.
    """
    real = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).resolve_neg()
    return real.view(_WORDS[real.element_size()])


def fingerprint_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Order-independent sum of the bits of a tensor, modulo 2^48.

    Three 0-d int64 tensors with 16 bits each, the low ones first. It is ``sum v * (2 * v + 1)`` over the elements,
    modulo 2^48; ``v`` is the word of an element (8, 16 or 32 bits as a signed whole number), of 64 bits
    ``w + (w >> 48) * 0x9E3779B97F4B``. Both maps are such that one flipped bit always changes the sum
    (``v * (2 * v + 1)`` is a permutation of the numbers modulo 2^48), and it is not linear, so that two changes by one
    unit in the last place do not cancel. Signs of zeros and payloads of NaN count. Complex elements are two real ones.
    0 if the tensor is empty.
    """
    words = words_of(x)
    word = words.to(torch.int64)
    if words.element_size() == 8:
        word = word + (word >> 48) * _UPPER
    return _in_16_bits(reduce_all(torch.sum, word * (2 * word + 1)))  # int64 wraps modulo 2^64


def _in_16_bits(total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return total & 0xFFFF, (total >> 16) & 0xFFFF, (total >> 32) & 0xFFFF


def combine_fingerprints(parts: Tensor) -> Tensor:
    """Add fingerprints of parts modulo 2^48.

    ``[..., 3]`` becomes ``[3]``, of the same dtype. Figures are those of ``fingerprint_of`` or sums of them.
    """
    low, middle, high = parts.reshape(-1, 3).round().to(torch.int64).sum(0).unbind()
    return torch.stack(_in_16_bits(low + (middle << 16) + (high << 32))).to(parts.dtype)


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
    **{name: Statistic(fingerprint_of, Combination("sum"), "bits", part=n) for n, name in enumerate(FINGERPRINT)},
    "numel": Statistic(_numel, Combination("sum"), "elements"),
    **{
        name: Statistic(
            moments_of,
            Combination("mean"),  # of powers: see ``to_summands``
            "value" if name in ("mean", "std") else "shape",
            takes_complex=False,
            is_native=False,
            part=n,
        )
        for n, name in enumerate(MOMENTS)
    },
    **{
        name: Statistic(exponents_of, Combination("sum"), "exponents", is_native=False, part=n)
        for n, name in enumerate(EXPONENTS)
    },
}
# Statistics that make several records, computed together: the names of their parts, which are adjacent in a request.
PARTS: Mapping[str, tuple[str, ...]] = {
    "fingerprint": FINGERPRINT,
    "std": MOMENTS[:2],
    "kurtosis": MOMENTS,
    "exponents": EXPONENTS,
}
COUNTS = frozenset(n for n, statistic in STATISTICS.items() if statistic.unit in ("elements", "bits", "exponents"))
# With a loss scale these are measured of the unscaled tensor; all of ``IN_UNITS`` depend on it.
UNSCALED = frozenset((*MOMENTS, *EXPONENTS))
IN_UNITS = UNSCALED | {name for name, statistic in STATISTICS.items() if statistic.unit == "value"}


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
    dtype = torch.float64 if any(_dtype(whole) == torch.float64 for whole in wholes) else torch.float32
    widest = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    found = torch.cat([part.to(widest) for part in parts])
    if not _is_empty(first) and not all(placement.is_replicate() for placement in first.placements):
        found = _combine(names, _gather_shards(found, first))
    return from_sums(names, found).to(dtype)


def to_summands(names: Sequence[str], figures: Tensor) -> Tensor:
    """Figures of a part, ``[names]``, as summands; moments as float64.

    Of moments they are means of powers, of all else the figures.
    """
    return _replaced(figures, ((start, end, to_raw(figures[start:end])) for start, end in _runs(names, MOMENTS)))


def from_sums(names: Sequence[str], figures: Tensor) -> Tensor:
    """Figures of wholes, ``[names]``, from combined ones: moments, and fingerprints modulo 2^48."""
    moments = [(start, end, from_raw(figures[start:end])) for start, end in _runs(names, MOMENTS)]
    bits = [(start, end, combine_fingerprints(figures[start:end])) for start, end in _runs(names, FINGERPRINT)]
    return _replaced(figures, sorted((*moments, *bits), key=operator.itemgetter(0)))


def _runs(names: Sequence[str], parts: Sequence[str]) -> list[tuple[int, int]]:
    """Ranges of the first parts of a statistic in a list of names."""
    runs = []
    for start in (n for n, name in enumerate(names) if name == parts[0]):
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(names[start:], parts, strict=False))
        runs.append((start, start + len(list(same))))
    return runs


def _replaced(vector: Tensor, replacements: Iterable[tuple[int, int, Tensor]]) -> Tensor:
    """Replace disjoint, ordered ranges of a vector."""
    pieces, position = [], 0
    for start, end, new in replacements:
        pieces += [vector[position:start], new]
        position = end
    if not pieces:
        return vector
    widest = torch.float64 if any(piece.dtype == torch.float64 for piece in pieces) else vector.dtype
    return torch.cat([piece.to(widest) for piece in (*pieces, vector[position:])])


def _of_shard(whole: DTensor, names: Sequence[str], measure: Callable[[Tensor, Sequence[str]], Tensor]) -> Tensor:
    """The part of one process in the statistics of a global tensor."""
    local = dtensors.local_of(whole)
    if _is_empty(whole) or not _is_empty(local):
        figures = to_summands(names, measure(local, names))
    else:
        neutral = [STATISTICS[name].combination.neutral for name in names]
        figures = torch.cat([local.new_full((1,), value, dtype=_dtype(local)) for value in neutral])
    weight = 1.0 if _is_empty(whole) else local.numel() / whole.numel()
    blocks = ((kind == "mean", figures[start:end]) for kind, start, end in _kinds(names))
    return torch.cat([block * weight if is_mean else block for is_mean, block in blocks])


def _kinds(names: Sequence[str]) -> Iterator[tuple[Kind, int, int]]:
    """Yield the kinds of combination of consecutive statistics, with the positions of the first and behind the last."""
    for kind, run in itertools.groupby(range(len(names)), lambda n: STATISTICS[names[n]].combination.kind):
        start, *rest = run
        yield kind, start, start + 1 + len(rest)


def _combine(names: Sequence[str], rows: Tensor) -> Tensor:
    """The combined figures of shards, ``[shards, names]``."""
    found = []
    for kind, start, end in _kinds(names):
        block = rows[:, start:end]
        match kind:
            case "min":
                found.append(block.amin(0))
            case "max":
                found.append(block.amax(0))
            case "norm":
                found.append(torch.stack([norm_of(column) for column in block.unbind(1)]))
            case "sum" | "mean":
                found.append(block.sum(0))
            case _:
                assert_never(kind)
    return torch.cat([block.to(rows.dtype) for block in found])


def _gather_shards(values: Tensor, like: DTensor) -> Tensor:
    """Gather the vectors of all shards, ``[shards, N]``; replicas, equal to each other, are counted once.

    ``like`` has no partial sums. It takes one collective for each dimension of the mesh that is sharded.
    """
    rows = values.unsqueeze(0)
    for dim, placement in enumerate(like.placements):
        if not placement.is_replicate():
            rows = collectives.gather_rows(rows, like.device_mesh.get_group(dim))
    return rows
