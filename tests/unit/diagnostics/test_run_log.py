"""What the doctor reads: files, addresses, the order of sites."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gradrewrite.diagnostics.causes import Cause
from gradrewrite.diagnostics.doctor import diagnose
from gradrewrite.diagnostics.run_file import read_jsonl
from gradrewrite.diagnostics.run_log import Step, as_executed, last_run
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.monitoring.writers import JsonLines

pytestmark = pytest.mark.pure

NAN, INF = math.nan, math.inf


def test_jsonl_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = ['{"step": 3, "records": {"norm@error:a": 1.5, "max@error:a": "NaN"}}']
    lines += ['{"step": 4, "records": {"norm@error:a": "Infinity", "max@error:a": "-Infinity", "nan@error:a": 2}}']
    path.write_text("\n".join(lines) + '\n{"step": 5, "records": {"norm@err')
    first, second = read_jsonl(path)

    assert (first.step, first.records["norm@error:a"]) == (3, 1.5)
    assert math.isnan(first.records["max@error:a"])
    assert second == Step(4, {"norm@error:a": INF, "max@error:a": -INF, "nan@error:a": 2.0})
    path.write_text(lines[1])  # whole, without a newline
    assert read_jsonl(str(path)) == [second]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"step": 1, "rec', "one JSON object"),
        ("", "one JSON object"),
        ('{"step": 1, "records": {"a@b": NaN}}', "one JSON object"),
        ("[" * 100_000, "one JSON object"),
        ("[1]", r'"step": number, "records"'),
        ('{"step": true, "records": {}}', "whole number >= 0 as step"),
        ('{"step": -1, "records": {}}', "whole number >= 0 as step"),
        ('{"step": 1, "records": {"a@b": "1.5"}}', "wanted a number.* for 'a@b', got '1.5'"),
        ('{"step": 1, "records": {"a@b": null}}', "wanted a number"),
        ('{"step": 1, "records": {"ab": 1}}', "record@site"),
        ('{"step": 1, "records": {"a@b": 1' + "0" * 400 + "}}", "too large"),
    ],
)
def test_bad_line(tmp_path: Path, line: str, wanted: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 0, "records": {}}\n' + line + '\n{"step": 2, "records": {}}\n')

    with pytest.raises(ValueError, match=rf"run\.jsonl, line 2: .*{wanted}"):
        read_jsonl(path)


def test_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.touch()

    assert read_jsonl(path) == []
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "none.jsonl")


def test_reads_what_the_sink_writes(tmp_path: Path) -> None:
    steps = [Step(n, {"norm@error:a": 0.1 + n, "bound.2@error:a": INF}) for n in range(3)]
    sink = JsonLines(tmp_path / "run.jsonl")
    for step in steps:
        sink.write(step)

    assert read_jsonl(sink.path) == steps


@pytest.mark.parametrize(
    ("text", "key", "kind"),
    [
        ("norm@error:a.2#1", RecordKey("norm", 1, "error:a.2#1"), "error"),
        ("norm.12@gradient:w", RecordKey("norm", 12, "gradient:w"), "gradient"),
        ("bound.2@gradient:v", RecordKey("bound", 2, "gradient:v"), "gradient"),
        ("layer.2.2@gradient:w", RecordKey("layer.2", 2, "gradient:w"), "gradient"),
        ("norm.1@gradient:w", RecordKey("norm.1", 1, "gradient:w"), "gradient"),
        ("my.own@activation:a@b", RecordKey("my.own", 1, "activation:a@b"), "activation"),
        ("x@", RecordKey("x", 1, ""), ""),
    ],
)
def test_parse(text: str, key: RecordKey, kind: str) -> None:
    assert RecordKey.parse(text) == key
    assert str(key) == text
    assert key.kind == kind


@pytest.mark.parametrize(("record", "occurrence"), [("a@b", 1), ("a", 0), ("a.2", 1), ("a", 10**9)])
def test_key_that_could_not_be_parsed_back_is_refused(record: str, occurrence: int) -> None:
    with pytest.raises(ValueError, match=r"record|occurrence"):
        RecordKey(record, occurrence, "gradient:w")


def test_order_of_execution() -> None:
    sites = ["optimizer:0", "data:x", "activation:a", "error:a", "activation:b", "error:b", "gradient:w", "outside:0"]
    forward, backward = ["data:x", "activation:a", "activation:b"], ["outside:0", "error:b", "error:a", "gradient:w"]

    assert as_executed([*sites, "error:a"]) == forward + backward


def test_last_run() -> None:
    steps = [Step(0, {"a@x": 9.0}), Step(1, {"a@x": 9.0}), Step(0, {"a@x": 1.0}), Step(4, {"b@x": 2.0, "a@x": 3.0})]
    run = last_run(steps)

    assert run.steps == steps[2:]
    assert [(a, s.steps, s.values) for a, s in run.series.items()] == [
        ("a@x", [0, 4], [1.0, 3.0]),
        ("b@x", [4], [2.0]),
    ]


def test_cause_as_json() -> None:
    figures = {"rate": NAN, "low": -INF, "high": INF, "share": 0.5, "steps": 20}
    data = Cause("dead", "error:a", step=2, text="All is 0.", advice="Wake it.", figures=figures).to_json()

    assert json.loads(json.dumps(data, allow_nan=False)) == {
        "kind": "dead",
        "site": "error:a",
        "source": "",
        "factor": None,
        "step": 2,
        "text": "All is 0.",
        "figures": {"rate": "NaN", "low": "-Infinity", "high": "Infinity", "share": 0.5, "steps": 20},
        "suggestion": "Wake it.",
    }


@pytest.mark.pure
def test_a_name_that_ends_in_a_number_is_no_second_norm() -> None:
    own = [Step(n, {"norm.2@gradient:w": 10.0**n, "nonfinite.3@gradient:w": 1.0}) for n in range(9)]
    assert diagnose(own) == ()

    second = [Step(n, {"norm@gradient:w": 1.0, "norm.2@gradient:w": 10.0**n}) for n in range(9)]
    assert [finding.kind for finding in diagnose(second)] == ["exploding"]


@pytest.mark.pure
def test_step_refuses_names_that_are_no_keys() -> None:
    with pytest.raises(ValueError, match=r"wanted record@site as the name of a record, got 'loss'"):
        Step(0, {"loss": 1.0})
