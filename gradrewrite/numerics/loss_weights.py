"""Weights of several losses from the Gram matrix of their gradients, on its device and without a wait of the host.

Each weighting is one opaque operator, so that the compiler need not look into hundreds of tiny nodes. The number of
iterations is fixed; only on the CPU, where reading a value waits for nothing, one may end early.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from gradrewrite.numerics.library import LIBRARY

ScaleMode = Literal["min", "median", "rmse"]
SCALE_MODES: tuple[str, ...] = get_args(ScaleMode)
MOST_LOSSES = 10  # of the weightings that look at all sets of losses
LEAST_PIVOT = 1e-13  # square of a combination, to the square of that of norms: less is rounding of the Gram matrix
TOLERANCE = 1e-12  # of conditions on numbers of the order of 1
STATIONARY = 1e-4  # norm of a convex combination, to that combination of norms: gradients of less cancel each other

LIBRARY.define("weights_pcgrad(Tensor gramian, Tensor count, int seed) -> Tensor")
LIBRARY.define("weights_upgrad(Tensor gramian, float norm_eps, float reg_eps) -> Tensor")
LIBRARY.define("weights_mgda(Tensor gramian, float epsilon, int max_iters) -> Tensor")
LIBRARY.define("weights_cagrad(Tensor gramian, float c, float norm_eps) -> Tensor")
LIBRARY.define("weights_aligned_mtl(Tensor gramian, str scale_mode) -> Tensor")


def _guarded(weigh: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Normalize the Gram matrix of a weighting to a largest diagonal element of 1.

    It is float64; the weights are NaN if an element is not finite.
    """

    @functools.wraps(weigh)
    def run(gramian: Tensor, *settings: Any) -> Tensor:
        wide = gramian.detach().to(torch.float64)
        is_finite = wide.isfinite().all()
        largest = wide.diagonal().amax()
        scaled = torch.where(is_finite, wide / torch.where(largest > 0, largest, 1.0), 0.0)
        return torch.where(is_finite, weigh(scaled, *settings), math.nan)

    return run


# PCGrad


def order_of_projections(count: Tensor, seed: int, number: int) -> Tensor:
    """Return a random order of all losses for each loss, ``[K, K]``, from a hash of seed, count and position."""
    cells = torch.arange(number * number, device=count.device)
    key = _mix(_mix(seed & _MASK ^ _mix(seed >> 32 ^ 0x9E3779B9)) ^ count & _MASK)
    order: Tensor = _mix(key ^ cells).view(number, number).argsort(1)
    return order


_MASK = 0xFFFFFFFF


def _mix(x: Any) -> Any:
    """A permutation of 32-bit numbers (of Wellons' hash prospector), by products of less than 63 bits."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


@_guarded
def pcgrad(gramian: Tensor, count: Tensor, seed: int) -> Tensor:
    """Project each gradient off those it conflicts with, one after another, all gradients at a time."""
    order = order_of_projections(count.to(gramian.device), seed, len(gramian)).T  # [step, loss]
    weights = torch.eye(len(gramian), dtype=gramian.dtype, device=gramian.device)
    products, squares = gramian[order], gramian.diagonal()
    inverse = torch.where(squares > 0, 1 / squares, 0.0)
    away = weights[order] * inverse * (1 - weights)  # [step, loss, K]: nothing off the gradient itself
    for step in range(len(gramian)):
        inner = (products[step] * weights).sum(1, keepdim=True).clamp(max=0)
        weights = torch.addcmul(weights, inner, away[step], value=-1)
    return weights.sum(0)


# UPGrad and CAGrad: the solution for every set of losses at once


class _Sets(NamedTuple):
    """All sets of losses, ``[2^K]``; a loss is in a set if its bit is set in the index.

    Attributes:
        tableaus: ``[2^K, K, K]``: the matrix C of cosines swept at each set F, which is ``-C_FF^-1`` in F,
            ``C_FF^-1 C_FG`` between F and its complement G, and the Schur complement in G.
        members: ``[2^K, K]``, bool.
        is_regular: ``[2^K]``: the gradients in F do not depend on each other, so that the tableau says something.
        meets_zero: 0-d: a convex combination of gradients is 0.
        norms: ``[K]``: of the gradients; 1 for a gradient of 0.
    """

    tableaus: Tensor
    members: Tensor
    is_regular: Tensor
    meets_zero: Tensor
    norms: Tensor


def _sets_of(gramian: Tensor) -> _Sets:
    number = len(gramian)
    norms = gramian.diagonal().clamp(min=0).sqrt()
    norms = torch.where(norms > 0, norms, 1.0)
    tableaus = (gramian / norms / norms[:, None])[None]
    members = torch.zeros(1, number, dtype=torch.bool, device=gramian.device)
    losses = torch.arange(number, device=gramian.device)
    rows, others = [], []
    for k in range(number):
        row = tableaus[:, k]
        rows.append(row)
        others.append(members)
        scaled = row.clone()
        scaled[:, k] = -1.0
        scaled /= row[:, k, None].clamp(min=LEAST_PIVOT)
        swept = torch.addcmul(tableaus, scaled[:, :, None], row[:, None], value=-1)
        swept[:, k] = swept[:, :, k] = scaled
        tableaus = torch.cat([tableaus, swept])
        members = torch.cat([members, members | (losses == k)])
    pivots = torch.cat([row[:, k] for k, row in enumerate(rows)])
    combination = torch.where(torch.cat(others), torch.cat(rows), 0.0)  # of the others, closest to the last of a set
    is_independent = pivots > LEAST_PIVOT * (1 + combination.abs().sum(1)).square()
    is_regular = torch.ones_like(members[:1, 0])
    for k in range(number):
        is_regular = torch.cat([is_regular, is_regular & is_independent[2**k - 1 : 2 ** (k + 1) - 1]])
    are_others_regular = torch.cat([is_regular[: 2**k] for k in range(number)])
    is_opposite = (combination <= TOLERANCE).all(1)
    meets_zero = (are_others_regular & ~is_independent & is_opposite).any()
    return _Sets(tableaus, members, is_regular, meets_zero, norms)


def _first_valid(violation: Tensor) -> Tensor:
    """Return the first index along dimension 0 with a violation of about 0, or else that of the least one."""
    number = len(violation)
    index = torch.arange(number, device=violation.device, dtype=violation.dtype)
    index = index.view(-1, *[1] * (violation.dim() - 1))
    return torch.where(violation <= TOLERANCE, index, number * (1 + violation)).argmin(0)


def _trace_at_least(gramian: Tensor, norm_eps: float) -> Tensor:
    """Return zeros for a Gram matrix with a smaller trace."""
    return gramian if norm_eps == 0 else torch.where(gramian.diagonal().sum() < norm_eps, 0.0, gramian)


def _of_trace_one(gramian: Tensor) -> Tensor:
    trace = gramian.diagonal().sum()
    return gramian / torch.where(trace > 0, trace, 1.0)


def upgrad(gramian: Tensor, norm_eps: float, reg_eps: float) -> Tensor:
    """Project each gradient onto the dual cone of all, and take the mean."""
    return _upgrad(_trace_at_least(gramian, norm_eps), reg_eps)


@_guarded
def _upgrad(gramian: Tensor, reg_eps: float) -> Tensor:
    losses = torch.arange(len(gramian), device=gramian.device)
    gramian = _of_trace_one(gramian) + reg_eps * torch.eye(len(gramian), dtype=gramian.dtype, device=gramian.device)
    sets = _sets_of(gramian)
    # Column i of a tableau: with F the losses that conflict, minus their weights, and the products of the others.
    inside = sets.members[:, :, None]
    violation = torch.where(inside, sets.tableaus, -sets.tableaus).amax(1)
    violation = violation / (1 + torch.where(inside, sets.tableaus, 0.0).abs().sum(1))
    is_out = sets.members | ~sets.is_regular[:, None]  # the weight of i itself stays at its bound
    best = _first_valid(torch.where(is_out, math.inf, violation))
    added = torch.where(sets.members[best], -sets.tableaus[best, :, losses], 0.0).clamp(min=0)  # [i, weight]
    return (1 + (added * sets.norms[:, None]).sum(0) / sets.norms) / len(gramian)


def cagrad(gramian: Tensor, c: float, norm_eps: float) -> Tensor:
    """Maximise the least product with a gradient in a ball around the mean gradient."""
    return _cagrad(_trace_at_least(gramian, norm_eps), c, norm_eps)


@_guarded
def _cagrad(gramian: Tensor, c: float, norm_eps: float) -> Tensor:
    """Look at the stationary point of each face of the simplex.

    With ``b = G 1 / K`` and ``s = c |g_0|``, that of ``b^T w + s |g_w|`` on the face F has a value mu, and for
    ``y = s / |g_w| w`` holds ``y = G_FF^-1 (mu 1 - b)`` and ``y^T G y = s^2``.
    """
    number = len(gramian)
    gramian = _of_trace_one(gramian)
    sets = _sets_of(gramian)
    inside = sets.members[:, :, None] & sets.members[:, None]
    inverses = torch.where(inside, -sets.tableaus, 0.0)
    products, ones = gramian.mean(1) / sets.norms, 1 / sets.norms  # b and 1, scaled like the matrix that is swept
    square = c * c * gramian.mean().clamp(min=0)
    of_ones = inverses @ ones
    curvature = of_ones @ ones
    mean = (of_ones @ products / curvature)[:, None]
    rest = products - mean * ones
    of_rest = (inverses @ rest[:, :, None])[:, :, 0]
    slack = square - (of_rest * rest).sum(1)
    step = (slack / curvature).sqrt()[:, None]
    found = of_ones * step - of_rest
    is_inside = (found >= -TOLERANCE * found.abs().amax(1, keepdim=True)).all(1)
    is_point = (slack > 0) & sets.is_regular & is_inside
    values = torch.where(is_point, (mean + step)[:, 0], math.inf)
    # Values tell points apart to the square root of rounding only; of those that are left the conditions decide.
    violation = ((mean + step) * ones - products - found @ (gramian / sets.norms / sets.norms[:, None])).amax(1)
    best = _first_valid(torch.where(values <= values.amin() + 1e-9, violation, math.inf)).reshape(1)
    added = found[best][0].clamp(min=0)
    weights = 1 / number + added / sets.norms
    is_zero = sets.meets_zero & (values.amin() >= 0)  # then 0 has the least value, 0
    if norm_eps == 0:
        is_stationary = is_zero | ~(added.sum() * STATIONARY <= square.sqrt())
        return torch.where(is_stationary, 1 / number, weights)
    norm = (square / (curvature * slack)).sqrt()[best]
    return torch.where(is_zero | ~(norm >= norm_eps), 0.0, weights)


# MGDA


@_guarded
def mgda(gramian: Tensor, epsilon: float, max_iters: int) -> Tensor:
    """Find the point of least norm by Frank-Wolfe with exact steps, from the mean, to the first step below epsilon."""
    if gramian.device.type == "cpu":  # where it costs nothing to read them, numbers are faster than small tensors
        return torch.tensor(_frank_wolfe(gramian.tolist(), epsilon, max_iters), dtype=gramian.dtype)
    return frank_wolfe(gramian, epsilon, max_iters)


def frank_wolfe(gramian: Tensor, epsilon: float, max_iters: int) -> Tensor:
    """Run all iterations; those after the stop have a step of 0."""
    corners = torch.stack([torch.eye(len(gramian), dtype=gramian.dtype, device=gramian.device), gramian], 1)
    squares, point = gramian.diagonal(), corners.mean(0)
    is_going: Tensor | float = 1.0
    for _ in range(max_iters):
        weights, products = point.unbind()
        least, corner = products.min(0)
        down, up = (weights @ products - least).clamp(min=0), squares.take(corner) - least
        step = torch.where(up <= 0, 1.0, down / (down + up)) * is_going
        point = torch.lerp(point, corners.index_select(0, corner)[0], step)
        is_going = step >= epsilon
    return point[0]


def _frank_wolfe(gramian: list[list[float]], epsilon: float, max_iters: int) -> list[float]:
    """Run the iteration on numbers, to its stop."""
    weights = [1 / len(gramian)] * len(gramian)
    for _ in range(max_iters):
        products = [_dot(row, weights) for row in gramian]
        least = min(products)
        corner = products.index(least)
        down, up = max(_dot(weights, products) - least, 0.0), gramian[corner][corner] - least
        step = 1.0 if up <= 0 else down / (down + up)
        weights = [weight - step * weight for weight in weights]
        weights[corner] += step
        if step < epsilon:
            break
    return weights


def _dot(a: list[float], b: list[float]) -> float:
    return math.fsum(map(operator.mul, a, b))


# AlignedMTL


@_guarded
def aligned_mtl(gramian: Tensor, scale_mode: ScaleMode) -> Tensor:
    """Give all principal directions one length, that of the least, of the median or of the mean of the squares."""
    number = len(gramian)
    values, vectors = (torch.linalg.eigh if gramian.device.type == "cpu" else eigh_by_rotations)(gramian)
    is_kept = values > values[-1] * number * torch.finfo(values.dtype).eps
    rank = is_kept.sum()
    if scale_mode == "rmse":
        scale = torch.where(is_kept, values, 0.0).sum() / rank
    else:
        position = number - rank + ((rank - 1) // 2 if scale_mode == "median" else 0)
        scale = values[position.clamp(max=number - 1).reshape(1)]
    factors = torch.where(is_kept, (scale / values).sqrt(), 0.0)
    aligned: Tensor = vectors @ (factors * vectors.mean(0))
    return torch.where(rank > 0, aligned, 1 / number)


def eigh_by_rotations(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, ascending, and eigenvectors of a symmetric matrix, by Jacobi rotations of neighbors."""
    number = len(matrix)
    matrix = torch.nn.functional.pad(matrix, (0, number % 2) * 2)  # to an even number of rows, which all have partners
    size = len(matrix)
    vectors = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    crossing = torch.zeros_like(vectors)
    crossing.diagonal(1)[::2], crossing.diagonal(-1)[::2] = 1.0, -1.0
    straight, crossing = (torch.stack([one[:, n] for n in _next_round(size)], 1) for one in (vectors, crossing))
    sweeps = 1 if size == 2 else number // 2 + 8  # most matrices need half of them
    for _ in range(sweeps * (size - 1)):
        squares = matrix.diagonal().view(-1, 2)
        ratio = 2 * matrix.diagonal(1)[::2] / (squares[:, 1] - squares[:, 0])
        angle = torch.atan(ratio.nan_to_num(0.0, math.inf, -math.inf)) / 2  # at most 45 degrees
        angle = angle[:, None].expand(-1, 2).reshape(-1, 1)
        rotation = torch.addcmul(angle.cos() * straight, angle.sin(), crossing)
        matrix, vectors = rotation.T @ matrix @ rotation, vectors @ rotation
    values, order = matrix.diagonal()[:number].sort()  # after each sweep all are where they were
    return values, vectors[:number, :number][:, order]


def _next_round(size: int) -> list[int]:
    """Return the old place of each in the next round of ``size - 1`` with all neighbors once, as in a tournament."""
    if size == 2:
        return [0, 1]
    upper, lower = list(range(0, size, 2)), list(range(1, size, 2))
    upper, lower = [upper[0], lower[0], *upper[1:-1]], [*lower[1:], upper[-1]]
    return [place for pair in zip(upper, lower, strict=True) for place in pair]


def _fake(gramian: Tensor, *_: Any) -> Tensor:
    return gramian.new_empty(gramian.shape[0], dtype=torch.float64)


for _name, _weigh in (
    ("weights_pcgrad", pcgrad),
    ("weights_upgrad", upgrad),
    ("weights_mgda", mgda),
    ("weights_cagrad", cagrad),
    ("weights_aligned_mtl", aligned_mtl),
):
    LIBRARY.impl(_name, _weigh, "CompositeExplicitAutograd")
    for _key in ("Autograd", "ADInplaceOrView"):  # weights have no derivative
        LIBRARY.impl(_name, torch.library.fallthrough_kernel, _key)
    torch.library.register_fake(f"gradrewrite::{_name}", _fake, lib=LIBRARY)

OP_PCGRAD = torch.ops.gradrewrite.weights_pcgrad.default
OP_UPGRAD = torch.ops.gradrewrite.weights_upgrad.default
OP_MGDA = torch.ops.gradrewrite.weights_mgda.default
OP_CAGRAD = torch.ops.gradrewrite.weights_cagrad.default
OP_ALIGNED_MTL = torch.ops.gradrewrite.weights_aligned_mtl.default
