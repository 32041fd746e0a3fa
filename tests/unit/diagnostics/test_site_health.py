"""Figures of sites, against numpy and by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradrewrite as gr
from gradrewrite.diagnostics.run_log import Run, last_run
from gradrewrite.diagnostics.site_health import COLUMNS, SiteHealth, percent, sites_of

from models.clips import step_of

pytestmark = pytest.mark.pure

NAN, INF = math.nan, math.inf
SIZES = st.lists(st.floats(0, 1e30) | st.sampled_from([NAN, INF]), min_size=1, max_size=40)


def clipped(sizes: list[float], bound: float, site: str = "error:layers.1") -> Run:
    return last_run([step_of(n, {f"norm@{site}": size, f"bound@{site}": bound}) for n, size in enumerate(sizes)])


@given(SIZES, st.floats(1e-3, 1e3))
def test_figures_of_a_norm_clip_equal_numpy(sizes: list[float], bound: float) -> None:
    (row,) = sites_of(clipped(sizes, bound))

    values = np.array(sizes)
    acts = (values > bound) & np.isfinite(values)
    factors = np.divide(bound, values, out=np.ones_like(values), where=acts)
    finite = values[np.isfinite(values)]
    assert (row.action, row.measure, row.steps, row.bound) == ("ClipByNorm", "norm", len(sizes), bound)
    assert row.rate == pytest.approx(acts.mean())
    assert row.median_factor == pytest.approx(np.median(factors[acts]) if acts.any() else 1.0)
    assert row.worst_factor == pytest.approx(factors.min())
    if len(finite):
        assert (row.p50, row.p90, row.p99) == pytest.approx(tuple(np.quantile(finite, [0.5, 0.9, 0.99])), rel=1e-9)
    else:
        assert math.isnan(row.p50)
    if len(finite) >= 20 and row.p90 > 0:
        assert row.suggestion == pytest.approx(row.p90, rel=0.051)  # two digits
    else:
        assert math.isnan(row.suggestion)
        assert row.code == ""


@pytest.mark.parametrize(
    ("site", "wanted"),
    [
        ("error:layers.1", 'gr.on("error:layers.1", ClipByNorm(2.3))'),
        ("gradient:a.weight", 'gr.on("gradient:a.weight", ClipByNorm(2.3))'),
        ("error:cell#3", 'gr.on("error:cell#3", ClipByNorm(2.3))'),
        ("error:a[0]", 'gr.on("error:a[[]0]", ClipByNorm(2.3))'),
        ("step:w", 'gr.on("step:w", ClipByNorm(2.3))'),
    ],
)
def test_code_is_a_rule_that_matches_its_site(site: str, wanted: str) -> None:
    (row,) = sites_of(clipped([2.3] * 20, 1.0, site))

    assert row.code == wanted
    pattern = wanted.split('"')[1]
    assert fnmatchcase(site, pattern)
    gr.on(pattern, lambda g: g)  # it is a pattern


@pytest.mark.parametrize(
    ("site", "wanted"),
    [
        ("group:default", 'gr.on("gradient:*", ClipByGlobalNorm(0.5))'),
        ("group:heads", ""),
        ("step:group:default", 'gr.on("step:*", ClipByGlobalNorm(0.5))'),
        ("step:group:default#1", 'gr.on("step:*", ClipByGlobalNorm(0.5))'),
    ],
)
def test_code_of_groups(site: str, wanted: str) -> None:
    run = last_run([step_of(n, {f"total_norm@{site}": 0.5, f"bound@{site}": 1.0}) for n in range(20)])

    (row,) = sites_of(run)
    assert (row.action, row.code) == ("ClipByGlobalNorm", wanted)


def test_a_clip_by_value_has_its_recorded_factor_and_share() -> None:
    site = "error:a"
    figures = [(2.0, 1.0, 0.5, 0.25), (0.5, 0.0, 1.0, 0.0), (4.0, 1.0, 0.25, 0.75)]
    names = ("max_abs", "clipped", "factor", "share")
    order = ("factor", "share", "max_abs", "mean_abs", "clipped", "limit")
    rows = []
    for values in figures:
        known = dict(zip(names, values, strict=True)) | {"mean_abs": 0.1, "limit": 1.0}
        rows.append({f"{name}@{site}": known[name] for name in order})
    (row,) = sites_of(last_run([step_of(n, records) for n, records in enumerate(rows)]))

    assert (row.action, row.measure, row.bound) == ("ClipByValue", "max_abs", 1.0)
    assert (row.rate, row.median_factor, row.worst_factor) == (2 / 3, 0.375, 0.25)
    assert row.share == pytest.approx(1 / 3)
    assert row.p50 == 2.0
    assert dict(zip(COLUMNS, row.cells(), strict=True))["share"] == "33 % of elements"


def test_without_recorded_factors_a_clip_by_value_that_acted_has_none() -> None:
    rows = [{"max_abs@error:a": 2.0, "clipped@error:a": 1.0, "limit@error:a": 1.0}] * 3
    (row,) = sites_of(last_run([step_of(n, records) for n, records in enumerate(rows)]))

    assert row.rate == 1.0
    assert math.isnan(row.median_factor)
    assert math.isnan(row.worst_factor)


def test_two_clips_at_a_site_have_a_row_each() -> None:
    first = {"norm@error:a": 4.0, "bound@error:a": 2.0, "factor@error:a": 0.5}
    second = {"norm.2@error:a": 2.0, "bound.2@error:a": 1.0, "factor.2@error:a": 0.5}
    value = {"factor.3@error:a": 0.25, "share@error:a": 0.5, "max_abs@error:a": 1.0, "mean_abs@error:a": 0.1}
    rows = sites_of(last_run([step_of(0, first | second | value | {"clipped@error:a": 1.0, "limit@error:a": 0.5})]))

    assert [(row.action, row.bound, row.median_factor) for row in rows] == [
        ("ClipByNorm", 2.0, 0.5),
        ("ClipByNorm", 1.0, 0.5),
        ("ClipByValue", 0.5, 0.25),
    ]
    assert [row.cells()[0] for row in rows] == ["error:a", "error:a (norm.2)", "error:a"]
    assert rows[2].share == 0.5


def test_a_bound_that_is_infinite_only_measures() -> None:
    (row,) = sites_of(clipped([1.0, 2.0, 3.0], INF))

    assert (row.action, row.p50) == ("", 2.0)
    assert math.isnan(row.rate)


def test_a_clip_that_finds_its_bound_by_itself_keeps_its_name_and_gets_none() -> None:
    steps = [step_of(n, {"total_norm@group:default": 9.0, "bound@group:default": 1.0}) for n in range(30)]
    own = [
        replace(step, clips=tuple(replace(c, action="AutoClip(percentile=10.0)") for c in step.clips)) for step in steps
    ]
    (row,), (fixed,) = sites_of(last_run(own)), sites_of(last_run(steps))

    assert (row.action, row.bound, row.code) == ("AutoClip", 1.0, "")
    assert math.isnan(row.suggestion)
    assert fixed.code == 'gr.on("gradient:*", ClipByGlobalNorm(9))'


def test_measured_sites_and_members_of_a_global_clip() -> None:
    rows = [
        {"max_abs@gradient:a": 3.0, "norm@gradient:b": 1.0, "norm_share@gradient:b": 0.9, "norm_share@gradient:c": 0.1}
    ]
    found = {row.site: row for row in sites_of(last_run([step_of(n, rows[0]) for n in range(4)]))}

    assert [*found] == ["gradient:c", "gradient:b", "gradient:a"]  # the backward comes to the last first
    assert (found["gradient:a"].measure, found["gradient:a"].p99) == ("max_abs", 3.0)
    assert (found["gradient:b"].norm_share, found["gradient:c"].norm_share) == (0.9, 0.1)
    assert found["gradient:b"].cells()[5] == "90 % of the squared total norm"
    assert found["gradient:c"].cells()[6] == "-"


def test_sites_of_the_backward_from_output_to_input() -> None:
    names = [
        "error:layers.0",
        "error:layers.1",
        "gradient:layers.0.weight",
        "gradient:layers.1.weight",
        "group:default",
    ]
    records = {f"{'total_norm' if 'group' in name else 'norm'}@{name}": 1.0 for name in names}

    found = [row.site for row in sites_of(last_run([step_of(0, records)]))]
    assert found == [names[1], names[0], names[3], names[2], names[4]]


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.83, "83 %"), (0.0034, "0.34 %"), (0.999, "> 99 %"), (1.0, "100 %"), (NAN, "")],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_cells_of_what_is_not_known() -> None:
    assert SiteHealth("error:a", "", "", 0).cells() == ("error:a", "none", *["-"] * 9)
