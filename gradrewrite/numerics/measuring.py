"""Operators that measure tensors and pack the figures."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradrewrite._compat import dtensors
from gradrewrite._utils.tensors import computable
from gradrewrite.numerics.library import LIBRARY
from gradrewrite.numerics.native_statistics import figures_of, names_of
from gradrewrite.numerics.statistics import STATISTICS, _dtype, measure_shards

LIBRARY.define("measure(Tensor[] xs, str statistics) -> Tensor")
LIBRARY.define("pack(Tensor[] xs, str statistics, int[] checks) -> Tensor")

_names_of = functools.lru_cache(maxsize=4096)(names_of)


def pack_eagerly(xs: Sequence[Tensor], statistics: str, checks: Sequence[int] = ()) -> Tensor:
    """The figures of ``native_statistics.figures_of`` by operations of torch, on any device."""
    dtype = _dtype_of_pack(xs, statistics)
    parts: list[Tensor] = []
    for x, names in zip(xs, _names_of(statistics), strict=True):
        figures = _figures_of(x, names, is_eager=True) if names else [x]
        parts += (figure.reshape(-1).to(dtype) for figure in figures)
    packed = torch.cat(parts)
    if not checks:
        return packed
    checked = torch.stack([packed[n] for n in checks])
    return torch.cat([packed, (checked.amax() > 0).to(dtype).reshape(1)])


def _figures_of(x: Tensor, names: Sequence[str], *, is_eager: bool) -> list[Tensor]:
    """Figures of a tensor, 0-d; the parts of one statistic are computed together."""
    found: dict[object, Any] = {}
    figures, wide = [], computable(x)
    for statistic in (STATISTICS[name] for name in names):
        function = (statistic.eager if is_eager else None) or statistic.traced
        if function not in found:
            found[function] = function(x if statistic.unit == "bits" else wide)
        figures.append(found[function] if statistic.part is None else found[function][statistic.part])
    return figures


def _pack_on_cpu(xs: Sequence[Tensor], statistics: str, checks: Sequence[int] = ()) -> Tensor:
    figures = figures_of(xs, statistics, checks)
    return pack_eagerly(xs, statistics, checks) if figures is None else figures


def _fake_pack(xs: Sequence[Tensor], statistics: str, checks: Sequence[int] = ()) -> Tensor:
    names = _names_of(statistics)
    count = sum(len(own) if own else x.numel() for x, own in zip(xs, names, strict=True))
    return xs[0].new_empty(count + bool(checks), dtype=_dtype_of_pack(xs, statistics))


def _dtype_of_pack(xs: Sequence[Tensor], statistics: str) -> torch.dtype:
    dtypes = {_dtype(x) if names else x.dtype for x, names in zip(xs, _names_of(statistics), strict=True)}
    return torch.float64 if torch.float64 in dtypes else torch.float32


for _name in ("measure", "pack"):
    LIBRARY.impl(_name, pack_eagerly, "CompositeExplicitAutograd")
    LIBRARY.impl(_name, _pack_on_cpu, "CPU")
    for _key in ("Autograd", "ADInplaceOrView"):  # neither has a derivative; torch's own fallback takes longer
        LIBRARY.impl(_name, torch.library.fallthrough_kernel, _key)
    torch.library.register_fake(f"gradrewrite::{_name}", _fake_pack, lib=LIBRARY)


def measure(x: Tensor, names: Sequence[str], *, is_opaque: bool) -> Tensor:
    """Statistics of a tensor in the given order, ``[len(names)]``, float32 (float64 for 64-bit elements).

    ``min``, ``max`` and ``saturated_*`` need a real tensor. ``is_opaque``: by one operation that the compiler does not
    look into, instead of nodes that it fuses.
    """
    if dtensors.is_dtensor(x):
        return measure_shards([(x, names)], lambda part, names: measure(part, names, is_opaque=is_opaque))
    if is_opaque:
        return measure_all([(x, names)])
    values = [figure.to(_dtype(x)) for figure in _figures_of(x, names, is_eager=False)]
    return torch.stack(values) if len(values) > 1 else values[0].reshape(1)


def measure_all(reports: Sequence[tuple[Tensor, Sequence[str]]]) -> Tensor:
    """The statistics of several tensors of one device, tensor after tensor, by one opaque operation; see ``pack``."""
    values: Tensor = OP_MEASURE([x for x, _ in reports], text_of([names for _, names in reports]))
    return values


def pack(reports: Sequence[tuple[Tensor, Sequence[str]]], checks: Sequence[int] = ()) -> Tensor:
    """All records of one device, ``[N]``, by one opaque operation, for it compiles faster; on CUDA by nodes.

    Tensors come with the statistics that are taken here; without any, their elements are records. ``checks`` are
    positions of counts; the last element is then 1 if one of them is not 0, else 0. float64 if a tensor has 64-bit
    elements, else float32.
    """
    text = text_of([names for _, names in reports])
    if reports[0][0].device.type == "cuda":  # each value is written where it belongs, by the kernel that computes it
        return pack_eagerly([x for x, _ in reports], text, checks)
    packed: Tensor = OP_PACK([x for x, _ in reports], text, list(checks))
    return packed


def text_of(statistics: Iterable[Sequence[str]]) -> str:
    """Return the statistics of several tensors as one string; it is parsed once."""
    return "; ".join(map(",".join, statistics))


OP_MEASURE, OP_PACK = torch.ops.gradrewrite.measure.default, torch.ops.gradrewrite.pack.default
OPAQUE = frozenset((OP_MEASURE, OP_PACK))
