"""Samples of tests: each test is drawn by some number, and one case of each function at fixed numbers."""

from __future__ import annotations

import zlib

import pytest
import sampling
from hypothesis import given
from hypothesis import strategies as st
from sampling import CASES, PERIOD, Case, drawn

NUMBERS = st.integers(0, 10_000)
NAMES = st.lists(st.sampled_from("abcdefghij"), min_size=1, unique=True)
SHARES = st.integers(1, PERIOD)


@pytest.mark.pure
@given(NAMES, SHARES, NUMBERS)
def test_a_case_is_drawn_where_its_checksum_and_the_number_are_divided(
    names: list[str], share: int, number: int
) -> None:
    ids = [f"f[{name}]" for name in names]
    wanted = {name for name in ids if (zlib.crc32(name.encode()) + number) % share == 0}

    assert drawn((Case(name, share) for name in ids), number) == wanted


@pytest.mark.pure
@given(NAMES, SHARES, NUMBERS)
def test_some_case_of_a_function_is_always_drawn(names: list[str], share: int, number: int) -> None:
    cases = [Case(f"f[{name}]", share, keeps=1) for name in names]
    exact = drawn([Case(case.id, share) for case in cases], number)
    found = drawn(cases, number)

    assert exact == found if exact else len(found) == 1


@pytest.mark.pure
@given(NAMES, SHARES, NUMBERS)
def test_a_group_is_drawn_as_one(names: list[str], share: int, number: int) -> None:
    cases = [Case(f"f[{name}]", share, group="a file") for name in names]

    assert len(drawn(cases, number)) in (0, len(names))


@pytest.mark.pure
@given(NAMES, NUMBERS)
def test_some_case_of_a_slow_function_is_drawn_for_one_in_four(names: list[str], number: int) -> None:
    cases = [Case(f"f[{name}]", 12, keeps=4) for name in names]
    exact = drawn([Case(case.id, 12) for case in cases], number)
    kept = (zlib.crc32(b"f") + number) % 4 == 0

    assert drawn(cases, number) == exact if exact or not kept else len(drawn(cases, number)) == 1


@pytest.mark.pure
def test_a_test_without_cases_always_runs() -> None:
    assert all(drawn([Case("f", 12, keeps=1)], number) == {"f"} for number in range(12))


@pytest.mark.long
def test_consecutive_numbers_run_every_test(request: pytest.FixtureRequest) -> None:
    """All that are collected beside this one."""
    cases = request.config.stash[CASES]
    first = sampling.number_of_run() or 0
    runs = [drawn(cases, number) for number in range(first, first + PERIOD)]

    assert request.node.nodeid.partition("@")[0] in runs[0]
    assert set().union(*runs) == {case.id for case in cases}


@pytest.mark.pure
def test_a_number_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sampling.VARIABLE, "-1")
    with pytest.raises(pytest.UsageError, match="GRADREWRITE_SAMPLE is '-1'; it takes a number, or all"):
        sampling.number_of_run()
    monkeypatch.setenv(sampling.VARIABLE, "all")
    assert sampling.number_of_run() is None
    monkeypatch.delenv(sampling.VARIABLE)
    assert sampling.number_of_run() is None


@pytest.mark.pure
@pytest.mark.parametrize("marks", [(), (13,), (0,), ("4",)])
def test_a_share_that_is_none(marks: tuple[object, ...], request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.sample(*marks))
    with pytest.raises(pytest.UsageError, match=r"sample takes a number from 1 to 12, got \("):
        sampling.case_of(request.node)
