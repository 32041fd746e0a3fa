"""Failures as causes, and in run logs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from gradrewrite.diagnostics.failures import cause_of, cause_of_json
from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.nonfinite_steps import failure_in, first_bad_step
from gradrewrite.diagnostics.run_file import read_jsonl, step_to_json
from gradrewrite.diagnostics.run_log import Step, last_run
from gradrewrite.errors import NonFiniteError, Operand, Story
from gradrewrite.sites import Site

pytestmark = pytest.mark.pure
LINE = 'model.py:3 "return torch.log(x)"'
STORY = Story(
    why="log of -0.135 for 2 of 12",
    advice="Bound its input before it.",
    facts=("t is 49 there",),
    operands=(Operand("x", "float32", (3, 4), -0.135, 2.0, 0, 0),),
    indices="rows 1 and 2",
    rows=(1, 2),
    parameter="fc.bias",
    cover=('where, model.py:4 "return torch.where(m, y, 0)"',),
    roots=("/exp, exp of up to 101",),
    is_tried=True,
)


def failure(story: Story = STORY, **given: object) -> NonFiniteError:
    site = Site("activation", "/log", op="log", shape=(3, 4), dtype=torch.float32)
    return NonFiniteError(site, percent=25.0, op="/log", source=LINE, step=7, story=story, **given)


def test_the_error_tells_the_story() -> None:
    err = failure()
    assert str(err) == (
        f"step 7: first non-finite: activation:/log, 25 % of 12 elements, made by /log, {LINE}: log of -0.135 for 2 of "
        "12 at rows 1 and 2; t is 49 there; it reaches fc.bias first; the loss does not show it: where, "
        'model.py:4 "return torch.where(m, y, 0)" hides it; also, independent of it: /exp, exp of up to 101\n'
        "What to change: Bound its input before it.\nhelp: gradrewrite help non-finite"
    )
    assert (err.indices, err.rows, err.parameter) == ("rows 1 and 2", (1, 2), "fc.bias")
    assert (err.cover, err.roots, err.operands) == (STORY.cover, STORY.roots, STORY.operands)
    assert str(STORY.operands[0]) == "x (float32, [3, 4], -0.135 to 2)"
    assert str(Operand("y", "float16", (0,), math.nan, math.nan, 0, 0)) == "y (float16, [0], empty)"
    assert str(Operand("y", "float16", (2,), 0.0, 0.0, 1, 1)) == "y (float16, [2], 0 to 0, 1 zeros, 1 not finite)"


def test_a_cause_has_the_words_of_the_error() -> None:
    err = failure()
    cause = cause_of(err)

    assert cause.text == f"{err.told}."
    assert cause.advice.startswith("Bound its input before it. Tried in a replay")
    assert (cause.indices, cause.parameter, cause.cover) == (err.indices, err.parameter, err.cover)
    assert cause.is_explained
    assert not cause_of(failure(Story(why="sum exceeds", is_overflow=True))).is_explained
    assert cause_of(failure(Story())).advice.startswith("Mend that line")


def test_causes_in_json() -> None:
    for err in (failure(), failure(Story(operands=(Operand("x", "float32", (), math.nan, math.inf, 0, 1),)))):
        cause = cause_of(err)
        again = cause_of_json(json.loads(json.dumps(cause.to_json())))
        assert repr(again) == repr(cause)
    with pytest.raises(ValueError, match="wanted a failure, got"):
        cause_of_json({"kind": "non-finite op"})
    with pytest.raises(ValueError, match="wanted a failure, got"):
        cause_of_json(3)


def test_a_run_log_keeps_the_failure(tmp_path: object) -> None:
    cause = cause_of(failure())
    records = {"loss@run": 1.0, "nonfinite@gradient:w": 0.0}
    bad = {"loss@run": math.nan, "nonfinite@gradient:w": 3.0}
    steps = [Step(n, bad if n == 7 else records, failure=cause if n == 7 else None) for n in range(8)]
    path = f"{tmp_path}/run.jsonl"
    with open(path, "w") as file:
        file.write('{"graphs": 0, "clips": []}\n')
        file.writelines(json.dumps(step_to_json(step, 0)) + "\n" for step in steps)

    for judged in (examine(steps), examine(read_jsonl(path))):
        assert judged.verdict.kind == "non-finite op"
        assert cause.text in judged.verdict.text
        assert judged.verdict.advice == cause.advice
        assert judged.verdict.causes[0].source == LINE


def test_a_replay_that_failed_says_so() -> None:
    note = "the step could not be replayed: parameter w was overwritten since the forward"
    err = NonFiniteError(failure().site, percent=25.0, step=7, note=note)
    assert cause_of(err).text == f"step 7: first non-finite: activation:/log, 25 % of 12 elements; {note}."


@pytest.mark.parametrize(
    ("bad", "skipped", "explained", "first", "told"),
    [
        ((3, 4, 5), (), (3,), 3, 3),
        ((3, 4, 5), (), (4,), 3, None),  # a later step
        ((3, 4, 5), (), (), 3, None),
        ((1, 4, 5), (), (1,), 1, 1),  # a row of an embedding
        ((1, 4, 5), (), (4,), 1, None),
        ((1, 4, 5), (), (1, 4), 1, 4),  # an error that was caught
        ((1, 4, 5), (1,), (1,), 4, None),
        ((1, 4, 5), (1,), (1, 4), 4, 4),
        ((1, 4, 5), (1,), (4,), 4, 4),
        ((), (), (), None, None),
    ],
)
def test_the_first_bad_step_is_told_and_no_later_one(
    bad: tuple[int, ...], skipped: tuple[int, ...], explained: tuple[int, ...], first: int | None, told: int | None
) -> None:
    run = last_run(
        [
            Step(
                n,
                {
                    "nonfinite@gradient:w": float(n in bad),
                    "skipped@optimizer:0": float(n in skipped),
                },
                failure=replace(cause_of(failure()), step=n) if n in explained else None,
            )
            for n in range(6)
        ]
    )
    found, cause = first_bad_step(run), failure_in(run)
    assert (None if found is None else found.step) == first
    assert (None if cause is None else cause.step) == told
