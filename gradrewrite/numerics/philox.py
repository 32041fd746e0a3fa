"""Random numbers as a function of a key and a counter: Philox2x32-7, in int64 arithmetic.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011
(https://doi.org/10.1145/2063384.2063405): 7 rounds are the fewest that pass BigCrush. All products are smaller than
2^63, so that every device and compiler computes the same integers.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradrewrite._compat.inductor import lower_elementwise
from gradrewrite.numerics.library import LIBRARY

_ROUNDS = 7
_WORD = 0xFFFFFFFF
_MULTIPLIER = 0xD256D193 - 2**32  # less 2^32, which is added to the high word again
_INCREMENT = 0x9E3779B9
_OF_NUMBERS = 0x85EBCA6B  # odd


def key_of(seed: int, name: str) -> int:
    """Return a signed 64-bit key, a hash of a seed and a name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little", signed=True)


def words(
    first: Any, second: Any, key: Any, constant: Callable[[int], Any] = int, shift: Callable[..., Any] = operator.rshift
) -> tuple[Any, Any]:
    """Return the two random 32-bit words of a counter of two words and a key of one.

    Each is an int, an int64 tensor or a value of a compiler, in [0, 2^32); ``constant`` makes one of an int, and
    ``shift`` shifts to the right.
    """
    word, high_bits, multiplier = map(constant, (_WORD, 32, _MULTIPLIER))
    for number in range(_ROUNDS):
        product = first * multiplier
        own = (key + constant(number * _INCREMENT)) & word
        first, second = (shift(product, high_bits) + first) ^ second ^ own, product & word
    return first, second


def _bits(
    position: Any,
    key: Any,
    count: Any,
    draw: int,
    number: Any = None,
    constant: Callable[[int], Any] = int,
    shift: Callable[..., Any] = operator.rshift,
) -> Any:
    """Return 63 random bits."""
    word, high_bits = constant(_WORD), constant(32)
    own = key + constant(draw * _INCREMENT)
    if number is not None:
        own = own + number * constant(_OF_NUMBERS)
    # Compilers compute with positions in 32 bits until something else enters: the second word begins with an ``^``.
    high, low = words((shift(key, high_bits) + count) & word, position, own & word, constant, shift)
    return (shift(high, constant(1)) << high_bits) | low


LIBRARY.define("random_bits(Tensor positions, Tensor stream, int draw, Tensor? number=None) -> Tensor")


def random_bits(positions: Tensor, stream: Tensor, draw: int, number: Tensor | None = None) -> Tensor:
    """Return an int64 number in [0, 2^63) for each position; one node of a graph.

    Args:
        positions: The positions, int64, in [0, 2^32).
        stream: A key and the count of former uses of it, ``[2]``, int64; the count enters modulo 2^32.
        draw: The number of the draw among those of one use.
        number: What tells apart draws that are alike otherwise, 0-d, int64.
    """
    return torch.ops.gradrewrite.random_bits.default(positions, stream, draw, number)  # type: ignore[no-any-return]


def _draw(positions: Tensor, stream: Tensor, draw: int, number: Tensor | None = None) -> Tensor:
    key, count = stream.unbind()
    bits: Tensor = _bits(positions, key, count, draw, number)
    return bits


def _batched(info: Any, in_dims: Any, positions: Tensor, stream: Tensor, draw: int, number: Tensor | None) -> Any:
    of_positions, of_stream, _, of_number = in_dims
    each = [positions] * info.batch_size if of_positions is None else positions.unbind(of_positions)
    streams = [stream] * info.batch_size if of_stream is None else stream.unbind(of_stream)
    numbers = [number] * info.batch_size if number is None or of_number is None else number.unbind(of_number)
    rows = [random_bits(own, key, draw, n) for own, key, n in zip(each, streams, numbers, strict=True)]
    return torch.stack(rows), 0


LIBRARY.impl("random_bits", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("gradrewrite::random_bits", lambda positions, *_: torch.empty_like(positions), lib=LIBRARY)
torch.library.register_vmap("gradrewrite::random_bits", _batched, lib=LIBRARY)
lower_elementwise(torch.ops.gradrewrite.random_bits.default, _bits)


def uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return multiples of the dtype's spacing below 1, in [0, 1), of random bits."""
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return ((bits >> (63 - digits)).to(torch.promote_types(dtype, torch.float32)) * 2.0**-digits).to(dtype)


def normal(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers by the transform of Box and Muller, at least in float32, of random bits."""
    wide = torch.promote_types(dtype, torch.float32)
    first, second = (bits >> 32).to(wide), (bits & _WORD).to(wide)
    size = (-2 * ((first + 0.5) * 2.0**-31).log()).sqrt()
    return (size * (second * (2 * math.pi * 2.0**-32)).cos()).to(dtype)
