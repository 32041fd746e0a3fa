"""The numbers behind the curves, against plain mathematics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import pytest

from gradrewrite import viz
from gradrewrite.diagnostics.run_log import Run, last_run
from gradrewrite.viz import _curve_data
from gradrewrite.viz._heat import MAX_COLUMNS, MAX_ROWS, group, heat_map
from gradrewrite.viz._panels import colors_of
from gradrewrite.viz._theme import CURVE_ABSENT, CURVE_RED, CURVE_ZERO

from models.clips import step_of

pytestmark = pytest.mark.pure

NAN, INF = math.nan, math.inf


def run_of(*rows: Mapping[str, float], first: int = 0) -> Run:
    return last_run([step_of(first + n, row) for n, row in enumerate(rows)])


def artists(curves: viz.Curves, gid: str) -> list[Any]:
    return curves.figure().findobj(lambda artist: artist.get_gid() == gid)


def test_heat_map_keeps_zero_not_finite_and_absent_apart() -> None:
    run = run_of(
        {"norm@gradient:b": 1.0, "norm@gradient:a": 0.0},
        {"norm@gradient:b": NAN, "norm@gradient:a": -INF},
        {"norm@gradient:a": 2.0},
        first=5,
    )
    heat = heat_map(run, "gradient")

    assert heat is not None
    assert (heat.measure, heat.rows, heat.first, heat.width) == ("norm", ["b", "a"], 5, 1)
    np.testing.assert_array_equal(heat.values, [[1.0, INF, NAN], [0.0, INF, 2.0]])
    _, colors = colors_of(heat.values)
    for color, cells in ((CURVE_RED, [(0, 1), (1, 1)]), (CURVE_ABSENT, [(0, 2)]), (CURVE_ZERO, [(1, 0)])):
        for row, column in cells:
            assert tuple(colors[row, column]) == matplotlib.colors.to_rgba(color)
    assert not np.allclose(colors[0, 0], colors[1, 2])


def test_heat_map_takes_one_measure_and_says_what_it_left_out() -> None:
    row = {"norm@gradient:a": 1.0, "max_abs.2@gradient:a": 9.0, "max_abs@gradient:a": 2.0, "max_abs@gradient:b": 3.0}
    heat = heat_map(run_of(row), "gradient")
    other = heat_map(run_of({"norm@error:x": 4.0, "mean_abs@error:y": 5.0}), "error")

    assert heat is not None
    assert other is not None
    assert (heat.measure, heat.values.tolist(), heat.num_left_out) == ("max_abs", [[2.0], [3.0]], 0)
    assert (other.measure, other.rows, other.num_left_out) == ("norm", ["x"], 1)
    assert heat_map(run_of({"norm@input:x": 1.0}), "gradient") is None


def test_empty_tensor_is_no_event() -> None:
    run = run_of({"mean_abs@gradient:a": NAN, "nonfinite@gradient:a": 0.0, "mean_abs@gradient:b": 1.0})
    heat = heat_map(run, "gradient")

    assert heat is not None
    np.testing.assert_array_equal(heat.values, [[NAN], [1.0]])
    assert _curve_data.events(run).num_sites == 0


@pytest.mark.parametrize("extra", [0, 1, 1500])
def test_bins_hold_the_largest_and_what_is_not_finite(extra: int) -> None:
    count = MAX_COLUMNS + extra
    values = [float(n % 7) for n in range(count)]
    values[41] = NAN
    heat = heat_map(run_of(*({"norm@error:a": v} for v in values)), "error")

    assert heat is not None
    width = math.ceil(count / MAX_COLUMNS)
    cleaned = [INF if math.isnan(v) else v for v in values]
    want = [max(cleaned[n : n + width]) for n in range(0, count, width)]
    assert heat.width == width
    np.testing.assert_array_equal(heat.values, [want])


def test_many_layers_are_grouped_by_module() -> None:
    names = [f"blocks.{n}.{part}" for n in range(24) for part in ("a.weight", "a.bias", "b")] + ["head.weight"]
    groups = group(names, MAX_ROWS)
    assert [name for name, _ in groups] == [f"blocks.{n}.*" for n in range(24)] + ["head.weight"]
    assert [n for _, rows in groups for n in rows] == list(range(73))

    long = group([f"layers.{n}.weight" for n in range(100)], MAX_ROWS)  # one list, 100 layers: neighbours together
    assert [name for name, _ in long][:2] == ["layers.0 ... layers.2", "layers.3 ... layers.5"]
    assert [n for _, rows in long for n in rows] == list(range(100))
    assert len(long) == 34
    assert group(["a", "b"], 2) == [("a", [0]), ("b", [1])]
    assert len(group([f"w{n}" for n in range(90)], MAX_ROWS)) <= MAX_ROWS

    heat = heat_map(run_of({f"norm@gradient:{name}": float(n) for n, name in enumerate(names)}), "gradient")
    assert heat is not None
    assert heat.values[:, 0].tolist() == [float(max(rows)) for _, rows in groups]
    title = viz.Curves(run_of({f"norm@gradient:{n}": 1.0 for n in names}), "").figure().axes[0].get_title("left")
    assert title == "norm of gradients by parameter; largest of each group, 73 sites in 25 rows"


def test_total_norms_and_their_bounds() -> None:
    group_ = [(0.5, 1.0), (2.0, 1.0), (3.0, 4.0), (NAN, 1.0), (9.0, INF)]
    run = run_of(*({"total_norm@group:all": n, "bound@group:all": b} for n, b in group_))
    norm, bound = _curve_data.total_norms(run)

    assert (norm.label, bound.label) == ("group:all", "bound of group:all")
    np.testing.assert_array_equal(norm.values, [0.5, 2.0, 3.0, INF, 9.0])
    assert (bound.steps.tolist(), bound.values.tolist()) == ([0, 1, 2, 3], [1.0, 1.0, 4.0, 1.0])
    lines = viz.Curves(run, "").figure().axes[0].lines
    labels = [line.get_label() for line in lines if line.get_gid() != "event"]
    assert labels == ["group:all", "infinite (group:all)", "bound of group:all"]


def test_at_most_four_total_norms_are_drawn() -> None:
    row = {f"{record}@group:{n}": 1.0 for n in range(6) for record in ("total_norm", "bound")}

    assert len(_curve_data.total_norms(run_of(row))) == 8
    measured = _curve_data.total_norms(run_of({"total_norm@group:a": 1.0, "bound@group:a": INF}))
    assert [line.label for line in measured] == ["group:a"]


def test_update_ratios_over_layers() -> None:
    head = "update_ratio@gradient:"
    rows = [{f"{head}a": 1e-3, f"{head}b": INF, f"{head}c": 4e-3}, {f"{head}{n}": 0.0 for n in "abc"}]
    rows += [{f"{head}a": NAN, f"{head}b": 2e-3, f"{head}c": 6e-3}, {f"{head}a": NAN}]
    ratios = _curve_data.update_ratios(run_of(*rows))

    assert ratios is not None
    np.testing.assert_allclose(ratios.median, [4e-3, 0.0, 4e-3, NAN])
    np.testing.assert_allclose(ratios.low, [1e-3, NAN, 2e-3, NAN])
    np.testing.assert_allclose(ratios.high, [4e-3, NAN, 6e-3, NAN])
    assert ratios.is_infinite.tolist() == [True, False, True, True]
    curves = viz.plot([step_of(n, row) for n, row in enumerate(rows)])
    assert [list(a.get_xdata()) for a in artists(curves, "zero")] == [[1]]
    assert [list(a.get_xdata()) for a in artists(curves, "nonfinite")] == [[0, 2, 3]]
    assert 1e-3 in [line.get_ydata()[0] for line in curves.figure().axes[0].lines]


def test_losses() -> None:
    rows: list[dict[str, float]] = [{"loss@run": v, "max@activation:loss": 7.0} for v in (1.0, NAN, INF, 0.5, -INF)]
    (line,) = _curve_data.losses(run_of(*rows))
    assert line.label == "loss@run"
    np.testing.assert_array_equal(line.values, [1.0, NAN, INF, 0.5, -INF])
    marks = [list(a.get_xdata()) for a in artists(viz.Curves(run_of(*rows), ""), "nonfinite")]
    assert marks == [[1], [2, 4]]
    (tapped,) = _curve_data.losses(run_of({"max@activation:loss": 7.0, "max@activation:x": 8.0}))
    assert (tapped.label, tapped.values.tolist()) == ("max@activation:loss", [7.0])


def test_events_in_the_order_of_execution() -> None:
    sites = {f"norm@error:layer{n:02}": NAN for n in range(35)}
    plain: list[dict[str, float]] = [{**dict.fromkeys(sites, 1.0), "inf@activation:mask": 4.0}] * 6
    rows = [*plain, {**sites, "nan@gradient:w": 3.0, "inf@activation:mask": 4.0, "skipped@optimizer:0": 1.0}, plain[0]]
    seen = _curve_data.events(run_of(*rows))

    assert [site for site, _ in seen.sites][:3] == ["activation:mask", "error:layer34", "error:layer33"]
    assert (len(seen.sites), seen.num_sites) == (30, 37)
    assert seen.expected == {"activation:mask"}
    assert (seen.steps.tolist(), seen.skipped.tolist()) == ([6], [6])
    curves = viz.plot([step_of(n, row) for n, row in enumerate(rows)])
    assert sum(len(mark.get_xdata()) for mark in artists(curves, "nonfinite")) == 8 + 29 + 1
    assert curves.panels == ("error norm", "non-finite")
    title = next(ax.get_title("left") for ax in curves.figure().axes if "in the order" in ax.get_title("left"))
    assert "the first 30 sites, 7 more are not shown" in title
