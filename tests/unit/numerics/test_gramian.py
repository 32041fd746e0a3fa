"""Gram matrices of the gradients of losses, as an operator and as traced, against plain inner products in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from gradrewrite.numerics import gramian as module
from gradrewrite.numerics.gramian import cosines, gramian

pytestmark = pytest.mark.pure

# By parameter, the gradients of losses by their numbers.
Rows = list[dict[int, Tensor]]
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)


def of_all(*shape: int, dtype: torch.dtype = torch.float64) -> dict[int, Tensor]:
    return {k: drawn(*shape, dtype=dtype) for k in range(3)}


def both(rows: Rows, number: int) -> list[Tensor]:
    """The matrix of the operator, and the traced one."""
    gradients, losses = [g for own in rows for g in own.values()], [k for own in rows for k in own]
    counts = [len(own) for own in rows]
    return [gramian(gradients, losses, counts, number, is_opaque=is_opaque) for is_opaque in (True, False)]


def wide(gradient: Tensor) -> list[complex]:
    return gradient.resolve_conj().to(torch.complex128).flatten().tolist()


def reference(rows: Rows, number: int) -> Tensor:
    """Inner products in Python, of complex numbers those of their parts."""

    def dot(i: int, j: int) -> float:
        pairs = [z for own in rows if i in own and j in own for z in zip(wide(own[i]), wide(own[j]), strict=True)]
        return math.fsum(a.real * b.real + a.imag * b.imag for a, b in pairs)

    return torch.tensor([[dot(i, j) for j in range(number)] for i in range(number)], dtype=torch.float64)


CASES: dict[str, tuple[Callable[[], Rows], int]] = {
    "one parameter": (lambda: [of_all(4, 3)], 3),
    "one loss": (lambda: [{0: drawn(4)}], 1),
    "some parameters": (lambda: [{0: drawn(5), 2: drawn(5)}, of_all(2, 3), {1: drawn(), 2: drawn()}], 3),
    "two pairs": (lambda: [{0: drawn(4), 1: drawn(4)}, {2: drawn(4), 3: drawn(4)}], 4),
    "a loss without gradients": (lambda: [{0: drawn(4), 2: drawn(4)}], 4),
    "transposed": (lambda: [{k: g.t() for k, g in of_all(4, 3).items()}], 3),
    "one of them transposed": (lambda: [{0: drawn(3, 4), 1: drawn(4, 3).t()}], 2),
    "permuted": (
        lambda: [{0: drawn(2, 3, 4).permute(2, 0, 1), 1: drawn(4, 2, 3), 2: drawn(3, 4, 2).permute(1, 2, 0)}],
        3,
    ),
    "channels last": (
        lambda: [{0: drawn(2, 3, 4, 5).to(memory_format=torch.channels_last), 1: drawn(2, 3, 4, 5)}],
        2,
    ),
    "expanded": (lambda: [{0: drawn(1, 4).expand(3, 4), 1: drawn(3, 1).expand(3, 4), 2: drawn(3, 4)}], 3),
    "with gaps": (lambda: [{k: drawn(6, 8)[::2, 1::3] for k in range(2)}], 2),
    "empty": (lambda: [of_all(0), of_all(3, 0), of_all(2)], 3),
    "nothing but empty": (lambda: [of_all(0, 2)], 3),
    "scalars": (lambda: [of_all(), of_all()], 3),
    "conjugated": (
        lambda: [{0: drawn(4, dtype=torch.complex128).conj(), 1: drawn(4, dtype=torch.complex128)}],
        2,
    ),
    "imaginary part": (lambda: [{0: drawn(4, dtype=torch.complex128).conj().imag, 1: drawn(4)}], 2),
    "several dtypes": (lambda: [of_all(3, dtype=dtype) for dtype in FLOATS], 3),
}


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
@pytest.mark.parametrize("name", CASES)
def test_equals_plain_inner_products(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    make, number = CASES[name]
    rows = make()
    expected, tolerance = reference(rows, number), 1e-6 if name == "several dtypes" else 1e-13
    for found in both(rows, number):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(found, found.T)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64, torch.complex128], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    """Narrow elements are multiplied and added in float32, so that their own sums do not overflow or stop to grow."""
    rows = [{k: (10 * drawn(50, 60, dtype=torch.promote_types(dtype, torch.float32))).to(dtype) for k in range(2)}]
    expected = reference(rows, 2)
    tolerance = 1e-12 if dtype in (torch.float64, torch.complex128) else 1e-5
    for found in both(rows, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.amax()))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinities_propagate(value: float) -> None:
    rows = [of_all(4), of_all(3)]
    rows[1][1][2] = value
    for found in both(rows, 3):
        touched = torch.zeros(3, 3, dtype=torch.bool)
        touched[1], touched[:, 1] = True, True
        assert torch.equal(~found.isfinite(), touched)
        assert math.isnan(found[1, 1]) == math.isnan(value)
        torch.testing.assert_close(
            found[~touched], reference([{k: own[k] for k in (0, 2)} for own in rows], 3)[~touched]
        )


def of(*rows: Sequence[float]) -> Tensor:
    vectors = torch.tensor(rows, dtype=torch.float64)
    return vectors @ vectors.T


COSINES: dict[str, tuple[Tensor, list[float]]] = {
    "two": (of([3.0, 4.0], [4.0, -3.0]), [0.0, 0.0]),
    "opposite": (of([1e-9, 0.0], [-1e9, 0.0]), [-1.0, -1.0]),
    "three": (of([1.0, 0.0], [0.6, 0.8], [-2.0, 0.0]), [-1.0, 0.6, -1.0, -0.6]),
    "one loss": (of([2.0, 1.0]), [math.nan]),
    "zero": (of([1.0, 0.0], [0.0, 0.0], [3.0, 4.0]), [0.6, math.nan, 0.6, math.nan]),
    "all zero": (of([0.0], [0.0]), [math.nan, math.nan]),
    "nan": (of([1.0, 0.0], [math.nan, 0.0], [-3.0, 4.0]), [-0.6, math.nan, -0.6, math.nan]),
    "infinite": (of([1.0, 0.0], [math.inf, 1.0], [-3.0, 4.0]), [-0.6, math.nan, -0.6, math.nan]),
    "tiny": (of([1e-120, 0.0], [1e-120, 1e-120]), [0.5**0.5] * 2),
    # The squares of the second one are too large, its products with the first one are not.
    "too large": (torch.tensor([[1.0, 0.5], [0.5, math.inf]], dtype=torch.float64), [math.nan, math.nan]),
}


@pytest.mark.parametrize("is_opaque", [True, False])
@pytest.mark.parametrize("name", COSINES)
def test_cosines(name: str, is_opaque: bool) -> None:
    matrix, expected = COSINES[name]

    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(cosines(matrix, is_opaque=is_opaque), wanted, equal_nan=True)
