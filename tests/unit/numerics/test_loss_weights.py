"""Weights of losses against TorchJD, exact references, and the properties that define them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import cvxpy
import mpmath
import numpy as np
import pytest
import torch
from cvxpy.atoms.norm import norm2
from scipy.optimize import minimize, nnls
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchjd.aggregation import MGDA, AlignedMTL, CAGrad, PCGrad, UPGrad

from gradrewrite.numerics import loss_weights
from gradrewrite.numerics.loss_weights import OP_ALIGNED_MTL, OP_CAGRAD, OP_MGDA, OP_PCGRAD, OP_UPGRAD

NUMBERS = range(2, 9)
SEEDS = range(3)
COUNT = torch.tensor(5)

# With our defaults, by name.
WEIGHTINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "pcgrad": lambda gramian: OP_PCGRAD(gramian, torch.full((), 5, device=gramian.device), 0),
    "upgrad": lambda gramian: OP_UPGRAD(gramian, 0.0, 1e-4),
    "mgda": lambda gramian: OP_MGDA(gramian, 1e-3, 100),
    "cagrad": lambda gramian: OP_CAGRAD(gramian, 0.5, 0.0),
    "aligned_mtl": lambda gramian: OP_ALIGNED_MTL(gramian, "min"),
}
# The functions that run on a GPU.
ON_DEVICES: dict[str, Callable[[Tensor], Tensor]] = {
    "pcgrad": lambda gramian: loss_weights.pcgrad(gramian, torch.zeros_like(gramian[0, 0], dtype=torch.int64), 3),
    "upgrad": lambda gramian: loss_weights.upgrad(gramian, 1e-4, 1e-4),
    "mgda": lambda gramian: loss_weights.mgda(gramian, 1e-3, 100),
    "cagrad": lambda gramian: loss_weights.cagrad(gramian, 0.5, 1e-4),
    "aligned_mtl min": lambda gramian: loss_weights.aligned_mtl(gramian, "min"),
    "aligned_mtl median": lambda gramian: loss_weights.aligned_mtl(gramian, "median"),
    "aligned_mtl rmse": lambda gramian: loss_weights.aligned_mtl(gramian, "rmse"),
}


def gradients(number: int, seed: int) -> Tensor:
    """Gradients ``[K, 12]``: even seeds of about one norm, odd ones of norms that differ; mostly with conflicts."""
    generator = torch.Generator().manual_seed(100 * number + seed)
    drawn = torch.randn(number, 12, generator=generator, dtype=torch.float64)
    norms = torch.exp(2 * (seed % 2) * torch.randn(number, 1, generator=generator, dtype=torch.float64))
    return (drawn + 0.4 * (seed % 4 - 1) * drawn[0]) * norms


def gramian_of(rows: Tensor) -> Tensor:
    return rows @ rows.T


def matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, to the largest weight where there is one."""
    largest = float(wanted.abs().max())
    return float((found - wanted).abs().max()) / (largest or 1.0)


@pytest.fixture(params=[(number, seed) for number in NUMBERS for seed in SEEDS], ids="K={0[0]},{0[1]}".format)
def rows(request: pytest.FixtureRequest) -> Tensor:
    return gradients(*request.param)


@pytest.fixture
def gramian(rows: Tensor) -> Tensor:
    return gramian_of(rows)


# Against TorchJD


@pytest.mark.pure
def test_pcgrad_is_that_of_torchjd_in_the_same_order(gramian: Tensor) -> None:
    orders = iter(loss_weights.order_of_projections(COUNT, 7, len(gramian)))
    with patch("torch.randperm", lambda _: next(orders)):
        wanted = PCGrad().gramian_weighting(gramian)

    assert error(OP_PCGRAD(gramian, COUNT, 7), wanted) < 1e-12


@pytest.mark.pure
def test_upgrad_is_that_of_torchjd_with_its_settings(gramian: Tensor) -> None:
    assert error(OP_UPGRAD(gramian, 1e-4, 1e-4), UPGrad().gramian_weighting(gramian)) < 1e-11
    assert torch.equal(OP_UPGRAD(gramian, 1e-4, 1e-4), OP_UPGRAD(gramian, 0.0, 1e-4))  # the trace is not small
    small = gramian * (1e-5 / gramian.trace())
    assert error(OP_UPGRAD(small, 1e-4, 1e-4), UPGrad().gramian_weighting(small)) < 1e-12


@pytest.mark.pure
@pytest.mark.parametrize(("epsilon", "max_iters"), [(1e-3, 100), (1e-3, 3), (0.2, 100), (1e-9, 40)])
def test_mgda_is_that_of_torchjd(gramian: Tensor, epsilon: float, max_iters: int) -> None:
    wanted = MGDA(epsilon=epsilon, max_iters=max_iters).gramian_weighting(gramian)

    assert error(OP_MGDA(gramian, epsilon, max_iters), wanted) < 1e-10
    assert error(loss_weights.frank_wolfe(gramian, epsilon, max_iters), wanted) < 1e-10  # that of other devices


@pytest.mark.pure
@pytest.mark.parametrize("scale_mode", loss_weights.SCALE_MODES)
def test_aligned_mtl_is_that_of_torchjd(gramian: Tensor, scale_mode: Any) -> None:
    found = OP_ALIGNED_MTL(gramian, scale_mode)

    assert error(found, AlignedMTL(scale_mode=scale_mode).gramian_weighting(gramian)) < 1e-8
    with patch("torch.linalg.eigh", loss_weights.eigh_by_rotations):  # that of other devices
        assert error(OP_ALIGNED_MTL(gramian, scale_mode), found) < 1e-8


@pytest.mark.pure
@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")  # than 1e-13
@pytest.mark.parametrize("c", [0.1, 0.5, 1.5])
def test_cagrad_is_that_of_torchjd(gramian: Tensor, c: float) -> None:
    """TorchJD's solver stops at a gap that leaves 1e-4 and more in the weights, so its tolerance is tightened."""
    solve = cvxpy.Problem.solve
    exact = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-13)
    with patch.object(cvxpy.Problem, "solve", lambda problem, solver: solve(problem, solver, **exact)):
        wanted = CAGrad(c).gramian_weighting(gramian)

    assert error(OP_CAGRAD(gramian, c, 1e-4), wanted) < 1e-4


# Against exact references


def exact_cagrad(gramian: Tensor, c: float) -> Tensor:
    """Weights by Newton in 40 digits on the support that SLSQP finds, with a proof that they are the minimum."""
    number = len(gramian)
    gramian = gramian / gramian.trace()
    values = gramian.numpy()
    mean = values.mean(1)
    radius = c * math.sqrt(mean.mean())

    def objective(w: np.ndarray) -> float:
        return float(w @ mean + radius * math.sqrt(max(w @ values @ w, 1e-300)))

    simplex = {"type": "eq", "fun": lambda w: w.sum() - 1}
    bounds, start = [(0, 1)] * number, np.full(number, 1 / number)
    near = minimize(objective, start, bounds=bounds, constraints=simplex, options={"ftol": 1e-15, "maxiter": 500}).x
    with mpmath.workdps(40):
        g = mpmath.matrix(gramian.tolist())
        b = [mpmath.fsum(g[i, j] for j in range(number)) / number for i in range(number)]
        s = c * mpmath.sqrt(mpmath.fsum(b) / number)
        for floor in (1e-3, 1e-4, 1e-5, 1e-6, 1e-2):
            support = [i for i in range(number) if near[i] > floor]
            point = _stationary_point(g, b, s, support, near)
            if point is not None:
                return torch.tensor([float(one) for one in point], dtype=torch.float64)
    raise AssertionError(f"SLSQP found no support: {near}")


def _stationary_point(g: Any, b: list[Any], s: Any, support: list[int], near: np.ndarray) -> list[Any] | None:
    """The weights of the stationary point on a face, if it meets the conditions of the minimum."""
    number = len(b)

    def slopes(w: list[Any]) -> tuple[list[Any], Any]:
        products = [mpmath.fsum(g[i, j] * w[j] for j in range(number)) for i in range(number)]
        norm = mpmath.sqrt(mpmath.fsum(w[i] * products[i] for i in range(number)))
        return [b[i] + s * products[i] / norm for i in range(number)], norm

    def whole(part: Any) -> list[Any]:
        w = [mpmath.mpf(0)] * number
        for i, one in zip(support, part, strict=True):
            w[i] = one
        return w

    def conditions(*point: Any) -> list[Any]:
        all_slopes, _ = slopes(whole(point[:-1]))
        return [*(all_slopes[i] - point[-1] for i in support), mpmath.fsum(point[:-1]) - 1]

    first = [mpmath.mpf(float(near[i])) for i in support]
    level = slopes(whole(first))[0][support[0]]
    try:
        point = list(mpmath.findroot(conditions, [*first, level], tol=1e-50, maxsteps=50))
    except (ValueError, ZeroDivisionError):
        return None
    w = whole(point[:-1])
    all_slopes, norm = slopes(w)
    if min(w) < 0 or min(all_slopes) < point[-1] - mpmath.mpf(10) ** -20:
        return None
    return [mpmath.mpf(1) / number + s / norm * one for one in w]


@pytest.mark.pure
@pytest.mark.parametrize("c", [0.1, 0.5, 0.9])
def test_cagrad_is_the_exact_minimum(gramian: Tensor, c: float) -> None:
    assert error(OP_CAGRAD(gramian, c, 0.0), exact_cagrad(gramian, c)) < 1e-9


@pytest.mark.pure
def test_upgrad_is_the_exact_projection(rows: Tensor) -> None:
    """The added weights are a least-squares problem of numbers that are not negative."""
    units = torch.eye(len(rows), dtype=torch.float64).numpy() / len(rows)
    added = sum(nnls(rows.T.numpy(), -rows.T.numpy() @ unit)[0] for unit in units)

    assert error(OP_UPGRAD(gramian_of(rows), 0.0, 0.0), torch.from_numpy(1 / len(rows) + added)) < 1e-10


@pytest.mark.pure
@pytest.mark.parametrize("number", range(1, 17))
def test_rotations_give_eigenvalues_and_vectors(number: int) -> None:
    for seed, rank in ((0, 20), (1, number), (2, max(1, number // 2))):
        drawn = torch.randn(number, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        symmetric = gramian_of(drawn * torch.logspace(0, -4, number, dtype=torch.float64)[:, None])
        values, vectors = loss_weights.eigh_by_rotations(symmetric)
        scale = float(symmetric.abs().max())

        torch.testing.assert_close(values, torch.linalg.eigvalsh(symmetric), rtol=0, atol=1e-14 * scale * number)
        torch.testing.assert_close(vectors @ values.diag() @ vectors.T, symmetric, rtol=0, atol=1e-14 * scale * number)
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(number, dtype=torch.float64), rtol=0, atol=1e-13)


# Properties


@pytest.mark.pure
def test_upgrad_leaves_no_conflict(rows: Tensor) -> None:
    direction = OP_UPGRAD(gramian_of(rows), 0.0, 0.0) @ rows

    assert (rows @ direction >= -1e-10 * rows.norm(dim=1) * direction.norm()).all()


@pytest.mark.pure
def test_the_regularization_of_upgrad_leaves_a_conflict_of_a_much_smaller_gradient() -> None:
    rows = matrix([1.0, 0.0], [-1e-3, 1e-3])
    least = [(rows @ (OP_UPGRAD(gramian_of(rows), 0.0, reg_eps) @ rows)).min() for reg_eps in (0.0, 1e-4)]

    assert least[0] >= -1e-15
    assert least[1] < -1e-4


@pytest.mark.pure
def test_most_of_the_gradients_conflict() -> None:
    """So that the tests above and below say something."""
    gramians = [gramian_of(gradients(number, seed)) for number in NUMBERS for seed in SEEDS]

    assert sum(bool((gramian < 0).any()) for gramian in gramians) > 0.7 * len(gramians)
    assert sum(bool((gramian.mean(1) < 0).any()) for gramian in gramians) > 0.3 * len(gramians)


@pytest.mark.pure
def test_upgrad_and_pcgrad_without_conflict_change_nothing() -> None:
    gramian = matrix([2.0, 0.5, 0.0], [0.5, 1.0, 0.25], [0.0, 0.25, 3.0])

    assert torch.equal(WEIGHTINGS["pcgrad"](gramian), torch.ones(3, dtype=torch.float64))
    assert torch.equal(WEIGHTINGS["upgrad"](gramian), torch.full((3,), 1 / 3, dtype=torch.float64))


@pytest.mark.broad
@pytest.mark.pure
def test_mgda_is_about_the_point_of_least_norm(gramian: Tensor) -> None:
    """At the minimum all products with the combination are at least its square."""
    weights = OP_MGDA(gramian, 1e-9, 20_000)
    products = gramian @ weights

    assert float(weights.sum()) == pytest.approx(1)
    assert (weights >= 0).all()
    assert float(weights @ products - products.min()) < 2e-3 * float(weights @ products) + 1e-6 * float(gramian.trace())


@pytest.mark.pure
@pytest.mark.parametrize("c", [0.1, 0.5, 0.9])
def test_cagrad_is_in_the_ball_and_the_worst_loss_gains(rows: Tensor, c: float) -> None:
    mean = rows.mean(0)
    direction = OP_CAGRAD(gramian_of(rows), c, 0.0) @ rows
    worst = (rows @ direction).min()

    assert float((direction - mean).norm()) == pytest.approx(c * float(mean.norm()))
    assert worst > (rows @ mean).min()
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):  # no other point of the ball is better
        step = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64)
        other = mean + c * mean.norm() * step / step.norm()
        other = direction + 0.1 * (other - direction)
        assert (rows @ other).min() <= worst + 1e-12 * rows.square().sum()


@pytest.mark.pure
def test_aligned_mtl_makes_the_components_equally_long(rows: Tensor) -> None:
    """The mean of K orthogonal gradients, each as long as the least singular value."""
    values = torch.linalg.svdvals(rows)
    direction = OP_ALIGNED_MTL(gramian_of(rows), "min") @ rows

    assert float(direction.norm()) == pytest.approx(float(values.min()) / math.sqrt(len(rows)), rel=1e-6)


# Zero, NaN, one loss, parallel and opposite gradients, scale


@pytest.mark.pure
@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("number", [2, 3, 8])
def test_weights_do_not_depend_on_the_scale(name: str, number: int) -> None:
    for seed in SEEDS:
        gramian = gramian_of(gradients(number, seed))
        wanted = WEIGHTINGS[name](gramian)
        for scale in (1e-280, 1e-12, 1e12, 1e280):
            torch.testing.assert_close(WEIGHTINGS[name](gramian * scale), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.pure
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_weights_of_a_gramian_that_is_not_finite_are_nan(name: str, number: int, bad: float) -> None:
    for i, j in {(0, 0), (0, number - 1), (number - 1, number - 1)}:
        gramian = gramian_of(gradients(number, 0))
        gramian[i, j] = gramian[j, i] = bad
        weights = WEIGHTINGS[name](gramian)

        assert weights.shape == (number,)
        assert weights.isnan().all()


@pytest.mark.pure
@pytest.mark.parametrize(
    ("name", "wanted"), [("pcgrad", 1.0), ("upgrad", 1.0), ("mgda", 1.0), ("cagrad", 1.5), ("aligned_mtl", 1.0)]
)
def test_one_loss(name: str, wanted: float) -> None:
    assert WEIGHTINGS[name](matrix([3.0])).tolist() == pytest.approx([wanted])


@pytest.mark.pure
@pytest.mark.parametrize(
    ("name", "one", "all_zero"),
    [
        ("pcgrad", [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        ("upgrad", [1 / 3, 1 / 3, 1 / 3], [1 / 3, 1 / 3, 1 / 3]),
        ("mgda", [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]),
        ("cagrad", [1 / 3, 1 / 3, 1 / 3], [1 / 3, 1 / 3, 1 / 3]),
        ("aligned_mtl", [1 / 3, 0.0, 1 / 6], [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_gradients_of_zero(name: str, one: list[float], all_zero: list[float]) -> None:
    gramian = matrix([1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 4.0])

    assert WEIGHTINGS[name](gramian).tolist() == pytest.approx(one)
    assert WEIGHTINGS[name](torch.zeros(3, 3, dtype=torch.float64)).tolist() == pytest.approx(all_zero)


@pytest.mark.pure
@pytest.mark.parametrize("reg_eps", [0.0, 1e-4])
def test_upgrad_leaves_a_gradient_of_zero_out(reg_eps: float) -> None:
    pair = OP_UPGRAD(matrix([1.0, -1.0], [-1.0, 4.0]), 0.0, reg_eps)
    third = OP_UPGRAD(matrix([1.0, -1.0, 0.0], [-1.0, 4.0, 0.0], [0.0, 0.0, 0.0]), 0.0, reg_eps)

    assert third.tolist() == pytest.approx([*(2 / 3 * pair).tolist(), 1 / 3])


@pytest.mark.pure
def test_cagrad_with_a_gradient_of_zero_negotiates_if_another_opposes_the_mean() -> None:
    rows = matrix([10.0, 0.0], [-1.0, 0.1], [0.0, 0.0])
    direction = OP_CAGRAD(gramian_of(rows), 0.5, 0.0) @ rows

    assert float((direction - rows.mean(0)).norm()) == pytest.approx(0.5 * float(rows.mean(0).norm()))


@pytest.mark.pure
def test_cagrad_with_the_setting_of_torchjd_stops_where_the_method_is_stationary() -> None:
    opposite, zero, small = [[1.0, -0.5], [-0.5, 0.25]], [[1.0, 0.0], [0.0, 0.0]], [[1e-6, 0.0], [0.0, 1e-6]]
    for c, rows, ours in ((1.5, opposite, 0.5), (0.5, zero, 0.5), (0.5, small, 0.75)):
        gramian = matrix(*rows)

        assert CAGrad(c).gramian_weighting(gramian).tolist() == [0.0, 0.0]
        assert OP_CAGRAD(gramian, c, 1e-4).tolist() == [0.0, 0.0]
        assert OP_CAGRAD(gramian, c, 0.0).tolist() == pytest.approx([ours, ours])


def singular_rows() -> Iterator[Any]:
    base = gradients(2, 0)
    yield pytest.param(torch.stack([base[0], base[0]]), id="equal")
    yield pytest.param(torch.stack([base[0], 3 * base[0]]), id="parallel")
    yield pytest.param(torch.stack([base[0], -base[0]]), id="opposite")
    yield pytest.param(torch.stack([base[0], -3 * base[0]]), id="opposite, longer")
    yield pytest.param(torch.stack([base[0], base[1], base[0] + base[1]]), id="sum")
    yield pytest.param(torch.stack([base[0], base[1], -base[0] - base[1]]), id="stationary")
    yield pytest.param(torch.stack([base[0], base[0], -base[0], base[1]]), id="equal and opposite")
    for number in (3, 5, 8):
        generator = torch.Generator().manual_seed(number)
        plane = torch.randn(number, 2, generator=generator, dtype=torch.float64)
        yield pytest.param(plane, id=f"{number} in a plane")
        yield pytest.param(plane.abs(), id=f"{number} in a quadrant")


@pytest.mark.pure
@pytest.mark.parametrize("rows", list(singular_rows()))
def test_gradients_that_depend_on_each_other(rows: Tensor) -> None:
    """Weights may be ambiguous, directions are not."""
    gramian, scale = gramian_of(rows), float(rows.norm())
    directions = {name: weigh(gramian) @ rows for name, weigh in WEIGHTINGS.items()}
    exact = OP_UPGRAD(gramian, 0.0, 0.0) @ rows

    assert all(bool(direction.isfinite().all()) for direction in directions.values())
    assert all(float(direction.norm()) <= 2 * len(rows) * scale for direction in directions.values())
    assert (rows @ exact).min() >= -1e-9 * scale**2
    units = np.eye(len(rows)) / len(rows)
    added = sum(nnls(rows.T.numpy(), -rows.T.numpy() @ unit)[0] for unit in units)
    torch.testing.assert_close(exact, torch.from_numpy(1 / len(rows) + added) @ rows, rtol=0, atol=1e-7 * scale)
    ball = 0.5 * float(rows.mean(0).norm())
    assert float((directions["cagrad"] - rows.mean(0)).norm()) <= ball * (1 + 1e-6) + 1e-12 * scale
    least = cvxpy.Variable(len(rows))
    combination = rows.T.numpy() @ least
    cost = combination @ rows.mean(0).numpy() + ball * norm2(combination)
    value = cvxpy.Problem(cvxpy.Minimize(cost), [least >= 0, least @ np.ones(len(rows)) == 1]).solve(cvxpy.CLARABEL)
    worst = float((rows @ directions["cagrad"]).min())
    is_stationary = float(OP_CAGRAD(gramian, 0.5, 1e-4).abs().max()) == 0
    assert is_stationary or worst == pytest.approx(value, abs=1e-5 * scale**2)
    assert not is_stationary or value == pytest.approx(0, abs=1e-4 * scale**2)


@pytest.mark.pure
@pytest.mark.parametrize("name", ["pcgrad", "mgda", "aligned_mtl"])
def test_more_than_ten_losses(name: str) -> None:
    weights = WEIGHTINGS[name](gramian_of(gradients(14, 0)))

    assert weights.shape == (14,)
    assert weights.isfinite().all()


@pytest.mark.pure
@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_gramian_in_float32_is_computed_in_float64(name: str) -> None:
    gramian = gramian_of(gradients(3, 1)).float()

    assert torch.equal(WEIGHTINGS[name](gramian), WEIGHTINGS[name](gramian.double()))


# The order of projections


@pytest.mark.pure
def test_orders_are_permutations_and_follow_from_seed_and_count() -> None:
    def order(count: int, seed: int, number: int = 4) -> list[list[int]]:
        return loss_weights.order_of_projections(torch.tensor(count), seed, number).tolist()

    assert all(sorted(one) == [0, 1, 2, 3] for count in range(50) for one in order(count, 0))
    assert order(3, 9) == order(3, 9)
    distinct = {str(order(count, seed)) for count in (0, 1, 2, 2**40) for seed in (0, 1, 2**32, 2**63 - 1)}
    assert len(distinct) >= 12  # of 16; a count is taken modulo 2^32
    assert order(0, 0, 3) == [[2, 1, 0], [0, 2, 1], [0, 2, 1]]  # on every platform


@pytest.mark.pure
def test_all_orders_are_equally_frequent() -> None:
    """Chi-squared of 24 permutations of 4 losses, for each loss, has 23 degrees of freedom."""
    orders = torch.stack([loss_weights.order_of_projections(torch.tensor(n), 1, 4) for n in range(4800)])
    codes = (orders * torch.tensor([64, 16, 4, 1])).sum(-1)
    for loss in range(4):
        counts = codes[:, loss].unique(return_counts=True)[1]

        assert len(counts) == 24
        assert float(((counts - 200) ** 2 / 200).sum()) < 56  # p = 1e-4


# No wait of the host, one node, compiled


class NoWait(TorchDispatchMode):
    """Count operations, and refuse those with which the host waits for a device."""

    WAITING = ("item", "_local_scalar_dense", "nonzero", "masked_select", "linalg", "_linalg")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        name = func.name().partition("::")[2].partition(".")[0]
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        assert not name.startswith(self.WAITING), name
        assert all(one.device.type == "meta" or one.dim() == 0 for one in tensors), f"{name} copies"
        if name.startswith("index"):
            indices = [one for one in tree_leaves(args[1]) if isinstance(one, Tensor)]
            assert all(one.dtype == torch.int64 for one in indices), f"{name} by a mask"
        return func(*args, **kwargs or {})


@pytest.mark.broad
@pytest.mark.pure
@pytest.mark.parametrize("name", ON_DEVICES)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_nothing_waits_for_a_device(name: str, number: int) -> None:
    """On tensors without elements, of which nothing can be read."""
    gramian = torch.empty(number, number, dtype=torch.float64, device="meta")
    with NoWait() as mode:
        weights = ON_DEVICES[name](gramian)

    assert (weights.device.type, weights.shape, weights.dtype) == ("meta", (number,), torch.float64)
    assert mode.count > 3


@pytest.mark.pure
def test_a_wait_would_be_found() -> None:
    gramian = torch.empty(2, 2, dtype=torch.float64, device="meta")
    refused = {
        "linalg_eigh": torch.linalg.eigh,
        "linalg": lambda given: torch.linalg.solve(given, given),
        "_local_scalar_dense": lambda given: given[0, 0].item(),
        "by a mask": lambda given: given[given > 0],
        "copies": lambda given: torch.zeros(2).to(given.device),
    }
    for name, function in refused.items():
        with NoWait(), pytest.raises(AssertionError, match=name):
            function(gramian)


@pytest.mark.pure
@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_weighting_is_one_node(name: str) -> None:
    gramian = gramian_of(gradients(3, 1))
    traced = make_fx(WEIGHTINGS[name], tracing_mode="fake")(gramian)
    targets = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]

    assert f"gradrewrite.weights_{name}.default" in targets
    assert len(targets) <= 2  # and one that takes a constant
    assert torch.equal(traced(gramian), WEIGHTINGS[name](gramian))


@pytest.mark.cuda
@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_gpu_gives_the_weights_of_the_cpu_and_does_not_wait(name: str) -> None:
    for number in (1, 2, 3, 8):
        gramian = gramian_of(gradients(number, 1))
        on_gpu = gramian.to("cuda")
        WEIGHTINGS[name](on_gpu)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = WEIGHTINGS[name](on_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")

        assert error(found.cpu(), WEIGHTINGS[name](gramian)) < 1e-9


@pytest.mark.inductor
@pytest.mark.parametrize("name", WEIGHTINGS)
def test_compiled(name: str) -> None:
    gramian = gramian_of(gradients(3, 1))
    compiled = torch.compile(lambda given: WEIGHTINGS[name](given * 1.0) * 2.0, fullgraph=True)

    assert torch.equal(compiled(gramian), WEIGHTINGS[name](gramian) * 2.0)
