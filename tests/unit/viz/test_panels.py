"""The lines of the panels, against plain mathematics."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from matplotlib.figure import Figure

from gradrewrite.diagnostics.run_log import Run, last_run
from gradrewrite.viz._panels import Panel, panels_of

from models.clips import step_of

pytestmark = pytest.mark.pure

NAN, INF = math.nan, math.inf


def run_of(*rows: Mapping[str, float], first: int = 0) -> Run:
    return last_run([step_of(first + n, row) for n, row in enumerate(rows)])


def lines_of(run: Run) -> dict[str, Mapping[int, float]]:
    (panel,) = panels_of(run)
    return dict(panel.lines)


def test_the_total_norm_and_its_bound() -> None:
    group = [(0.5, 1.0), (2.0, 1.0), (3.0, 4.0), (NAN, 1.0), (9.0, INF)]
    lines = lines_of(run_of(*({"total_norm@group:all": n, "bound@group:all": b} for n, b in group)))

    assert lines == {
        "this run": {0: 0.5, 1: 2.0, 2: 3.0, 3: INF, 4: 9.0},
        "bound": {0: 1.0, 1: 1.0, 2: 4.0, 3: 1.0},
    }


def test_several_groups_are_one_norm_without_a_bound() -> None:
    row = {f"total_norm@group:{name}": size for name, size in (("a", 3.0), ("b", 4.0))}
    row |= {f"bound@group:{name}": 1.0 for name in "ab"}

    assert lines_of(run_of(row)) == {"this run": {0: 5.0}}
    assert list(lines_of(run_of({"total_norm@group:a": 1.0, "bound@group:a": INF}))) == ["this run"]  # it only measures


@pytest.mark.parametrize(
    ("row", "title", "size"),
    [
        ({"norm@gradient:a": 3.0, "norm@gradient:b": 4.0, "norm@error:a": 1.0}, "norm of all gradients", 5.0),
        ({"max_abs@gradient:a": 3.0, "max_abs@gradient:b": 4.0}, "largest |gradient|", 4.0),
        ({"norm@error:a": 3.0, "norm@error:b": 4.0, "norm@input:x": 9.0}, "norm of all errors", 5.0),
        ({"max_abs@error:a": 3.0, "mean_abs@error:b": 4.0}, "largest |error|", 3.0),
    ],
)
def test_without_a_total_norm_the_most_telling_measure_is_drawn(
    row: Mapping[str, float], title: str, size: float
) -> None:
    (panel,) = panels_of(run_of(row))

    assert (panel.name, panel.title) == ("norm", f"{title}, before clipping")
    assert panel.lines == [("this run", {0: size})]


def test_losses() -> None:
    values = (1.0, NAN, INF, 0.5, -INF)
    run = run_of(*({"loss@run": v, "max@activation:loss": 7.0} for v in values))
    (panel,) = panels_of(run)
    axes = Figure().subplots()
    panel.draw(axes, [], last_run([]))

    assert (panel.name, [label for label, _ in panel.lines]) == ("loss", ["this run"])
    curve, crosses = axes.lines
    assert [v for v in curve.get_ydata() if not math.isnan(v)] == [1.0, 0.5]
    assert list(crosses.get_xdata()) == [1, 2, 4]
    assert lines_of(run_of({"max@activation:loss": 7.0, "max@activation:x": 8.0})) == {"this run": {0: 7.0}}


@pytest.mark.parametrize(("values", "scale"), [((1.0, 29.0), "linear"), ((1.0, 31.0), "log"), ((-1.0, 31.0), "linear")])
def test_a_wide_range_has_a_logarithmic_axis(values: tuple[float, float], scale: str) -> None:
    axes = Figure().subplots()
    Panel("loss", "loss", [("this run", dict(enumerate(values)))]).draw(axes, [], last_run([]))

    assert axes.get_yscale() == scale
