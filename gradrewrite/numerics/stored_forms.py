"""Narrower forms of tensors: encoding and decoding as torch operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradrewrite.numerics.library import LIBRARY

# From here on rounding to float8_e4m3fn goes beyond its largest number, 448.
_TOO_LARGE = 464.0


@dataclass(frozen=True, slots=True)
class StoredForm:
    """One form of a tensor."""

    encode: Callable[[Tensor], Sequence[Tensor]]
    decode: Callable[[Sequence[Tensor], torch.dtype], Tensor]
    element_size: int
    has_scales: bool = False  # one for each row
    capability: tuple[int, int] = (0, 0)  # the least compute capability of a CUDA device
    # On the CPU it stays one operation, of torch's kernels: Inductor's code for narrow numbers is slow there.
    is_encoded_apart: bool = False
    is_decoded_apart: bool = False

    def bytes_per_row(self, length: int, dtype: torch.dtype) -> int:
        """Return the bytes of a row of so many elements."""
        return length * self.element_size + (_wide(dtype).itemsize if self.has_scales else 0)

    def is_on(self, device: torch.device) -> bool:
        """Return whether a device has such numbers."""
        return device.type != "cuda" or torch.cuda.get_device_capability(device) >= self.capability


def _encode_int8(tensor: Tensor) -> Sequence[Tensor]:
    rows = tensor.to(_wide(tensor.dtype))
    largest = rows.abs().amax(-1, keepdim=True)
    # The scale of a row that is not finite is NaN, so that the restored row is. It is rounded, and 127 times as much is
    # to be finite where the row is.
    bound = torch.finfo(rows.dtype).max * (1 - 2**-16)
    scale = torch.where(largest < math.inf, largest.clamp(max=bound) / 127, math.nan)
    # Rows of zeros, and of numbers so small that the scale vanishes, become zeros.
    quotient = rows / torch.where(scale > 0, scale, 1.0)
    return quotient.round().to(torch.int8), scale


def _decode_int8(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    quantized, scale = parts
    restored = quantized.to(scale.dtype)
    restored *= scale  # in place: new memory costs more than the product
    return restored.to(dtype)


def _encode_float8(tensor: Tensor) -> Sequence[Tensor]:
    wide = tensor.to(_wide(tensor.dtype)).to(torch.float32)
    return (torch.where(wide.abs() < _TOO_LARGE, wide, math.nan).to(torch.float8_e4m3fn),)


def _rounded(dtype: torch.dtype) -> StoredForm:
    """Return the form of rounding to a dtype."""
    return StoredForm(
        lambda tensor: (tensor.to(dtype),),
        lambda parts, wide: parts[0].to(wide),
        dtype.itemsize,
        is_encoded_apart=True,
        is_decoded_apart=True,
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


FORMS = {
    "int8": StoredForm(_encode_int8, _decode_int8, 1, has_scales=True, is_decoded_apart=True),
    "float8_e4m3fn": StoredForm(
        _encode_float8, lambda parts, dtype: parts[0].to(torch.float32).to(dtype), 1, capability=(8, 9)
    ),
    "bfloat16": _rounded(torch.bfloat16),
    "float32": _rounded(torch.float32),
}


def encode_with(x: Tensor, form: str) -> list[Tensor]:
    """Return the parts of a tensor, by operations of torch."""
    return list(FORMS[form].encode(x))


def decode_with(parts: Sequence[Tensor], form: str, dtype: torch.dtype) -> Tensor:
    """Return a tensor from its parts, by operations of torch."""
    return FORMS[form].decode(parts, dtype)


# In a joint graph each is one node, so that no pass of the compiler takes it apart before the graph is cut.
LIBRARY.define("encode(Tensor x, str form) -> Tensor[]")
LIBRARY.define("decode(Tensor[] parts, str form, ScalarType dtype) -> Tensor")
for _name, _implementation in (("encode", encode_with), ("decode", decode_with)):
    LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gradrewrite::{_name}", _implementation, lib=LIBRARY)

encode = torch.ops.gradrewrite.encode.default
decode = torch.ops.gradrewrite.decode.default
