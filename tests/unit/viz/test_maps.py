"""Maps of a record by iteration and step: which are drawn, and where the values stand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradrewrite import viz
from gradrewrite.diagnostics.run_log import Run, Step, last_run
from gradrewrite.viz._maps import LEAST, maps_of

pytestmark = pytest.mark.pure


def address(record: str, site: str, n: int) -> str:
    return f"{record}@{site}#{n}" if n else f"{record}@{site}"


def run_of(sites: dict[str, int], num_steps: int = 3, record: str = "norm") -> Run:
    """A run in which the value at iteration n of step s is (n + 1) * 10 ** s."""
    return last_run(
        [
            Step(
                s, {address(record, site, n): (n + 1.0) * 10**s for site, count in sites.items() for n in range(count)}
            )
            for s in range(num_steps)
        ]
    )


def test_maps_are_those_of_many_iterations() -> None:
    run = run_of({"error:a": LEAST, "error:b": LEAST - 1, "activation:c": LEAST, "gradient:w": 1})

    assert [one.name for one in maps_of(run)] == ["norm@error:a"]
    assert viz.Curves(run, "").panels == ("norm", "norm@error:a by iteration")


def test_of_many_values_those_with_most_iterations() -> None:
    run = run_of({f"error:{n}": LEAST + n for n in range(6)})

    assert [one.name for one in maps_of(run)] == [f"norm@error:{n}" for n in (2, 3, 4, 5)]


def test_of_several_records_the_first_magnitude() -> None:
    records = {address(record, "error:a", n): 1.0 for record in ("max_abs", "norm", "zeros") for n in range(LEAST)}

    assert [one.name for one in maps_of(last_run([Step(0, records)]))] == ["norm@error:a"]


def test_values_stand_at_their_iteration_and_step() -> None:
    run = run_of({"error:a": 10})
    figure = viz.Curves(run, "").figure()
    ax = figure.axes[-1]
    mesh = ax.collections[0]

    values = np.asarray(mesh.get_array()).reshape(10, 3)
    assert values == pytest.approx(np.outer(np.arange(1, 11), [1, 10, 100]))
    assert mesh.get_clim() == (1, 1000)
    assert (ax.get_ylim(), ax.get_xlim()) == ((-0.5, 9.5), (-0.5, 2.5))


def test_what_is_not_finite_is_red_and_what_is_missing_is_not_drawn() -> None:
    records = {address("norm", "error:a", n): 1.0 for n in range(LEAST)}
    bad = {**records, "norm@error:a#2": math.nan, "norm@error:a#5": math.inf, "norm@error:a#6": 0.0}
    del bad["norm@error:a#3"]
    run = last_run([Step(0, records), Step(1, bad)])
    plain, red = viz.Curves(run, "").figure().axes[-1].collections

    hidden = np.ma.getmaskarray(plain.get_array()).reshape(LEAST, 2)
    assert np.argwhere(hidden).tolist() == [[2, 1], [3, 1], [5, 1]]
    shown = ~np.ma.getmaskarray(red.get_array()).reshape(LEAST, 2)
    assert np.argwhere(shown).tolist() == [[2, 1], [5, 1]]


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_without_a_size_nothing_fails(value: float) -> None:
    records = {address("norm", "error:a", n): value for n in range(LEAST)}

    viz.Curves(last_run([Step(0, records)]), "").figure().canvas.draw()
