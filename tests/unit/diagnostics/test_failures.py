"""Failures as causes, and in run logs."""

from __future__ import annotations

import json
import math

import pytest
import torch

from gradrewrite.diagnostics.failures import cause_of, cause_of_json
from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.run_file import read_jsonl, step_to_json
from gradrewrite.diagnostics.run_log import Step
from gradrewrite.errors import NonFiniteError, Operand, Story
from gradrewrite.sites import Site

pytestmark = pytest.mark.pure
LINE = 'model.py:3 "return torch.log(x)"'
STORY = Story(
    why="log of -0.135 for 2 of 12",
    advice="Bound its input before it.",
    facts=("where t is 49",),
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
        "12 at rows 1 and 2, where t is 49; it reaches fc.bias first; the loss does not show it: where, "
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
