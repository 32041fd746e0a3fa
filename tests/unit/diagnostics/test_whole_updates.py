"""Runs that split their updates otherwise, compared by update."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradrewrite.diagnostics.first_difference import compare_logs
from gradrewrite.diagnostics.run_log import Step, last_run
from gradrewrite.diagnostics.whole_updates import whole_updates

pytestmark = pytest.mark.pure


def run_of(count: int, *, logs_part: bool = False, factor: float = 1.0, updates: int = 5) -> list[Step]:
    """Updates of some backwards; ``factor``: of what the updates use."""
    found: list[Step] = []
    for update in range(updates):
        for number in range(count):
            loss = (2.0 - 0.1 * update + 0.01 * (number - (count - 1) / 2)) / (count if logs_part else 1)
            records = {"norm@gradient:w": 1.0 / count, "loss@run": loss, "norm@error:h": 0.3}
            if number == count - 1:
                records |= {
                    "norm@step:w": factor * (3.0 + update),
                    "norm@param:w": 5.0 + factor * update,
                    "lr@optimizer:0": 0.1,
                }
            found.append(Step(len(found), records, update=update, micro_batch=number))
    return found


@given(a=st.integers(1, 5), b=st.integers(1, 5), logs=st.booleans())
def test_right_accumulations_are_equal(a: int, b: int, logs: bool) -> None:
    found = compare_logs(run_of(a, logs_part=logs), run_of(b, logs_part=logs))
    if a == b:
        assert found.notes == ()
    else:
        assert f"The runs have {a} and {b} backwards an update" in found.notes[0]
        assert found.num_steps == 5
        assert str(found).startswith("no difference within a relative difference of 0.001 in 5 updates and 4 sites")
    assert found.is_equal


def test_a_wrong_accumulation_is_a_difference() -> None:
    found = compare_logs(run_of(1), run_of(4, factor=4.0))
    assert found.first is not None
    assert not found.is_equal
    assert (found.first.site, found.first.step, found.first.place) == ("step:w", 0, "update 0")
    assert "4-fold in the run with 4 backwards" in found.notes[1]
    assert "(loss / 4).backward()" in found.notes[1]
    assert len(compare_logs(run_of(1), run_of(4, factor=3.0)).notes) == 1
    assert compare_logs(run_of(1), run_of(4, factor=4.0), sites="optimizer:*").is_equal
    assert compare_logs(run_of(1), run_of(4, factor=1.001), tolerance=1e-2).is_equal
    assert not compare_logs(run_of(1), run_of(4, factor=1.001), tolerance=1e-6).is_equal


def test_what_is_left_of_sums_that_cancel_is_no_difference() -> None:
    def with_bias(count: int, rest: float) -> list[Step]:
        steps = run_of(count)
        return [
            Step(s.step, {**s.records, "norm@step:b": rest}, update=s.update, micro_batch=s.micro_batch) for s in steps
        ]

    assert compare_logs(with_bias(1, 1e-9), with_bias(2, 7e-9)).is_equal
    assert not compare_logs(with_bias(1, 1e-3), with_bias(2, 7e-3)).is_equal


def test_without_common_updates_the_note_says_what_to_record() -> None:
    def bare(count: int) -> list[Step]:
        rows = [(update, number) for update in range(3) for number in range(count)]
        return [Step(n, {"norm@gradient:w": 1.0}, update=u, micro_batch=m) for n, (u, m) in enumerate(rows)]

    with pytest.raises(ValueError, match=r"no step with a common record.*updates are compared"):
        compare_logs(bare(1), bare(2))
    assert whole_updates(last_run(bare(2)), last_run(bare(2))) is None
