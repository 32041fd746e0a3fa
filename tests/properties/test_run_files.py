"""The history of a run as JSON lines: every number and name comes back, and a file may end at any byte."""

from __future__ import annotations

import itertools
import json
import math
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradrewrite.diagnostics.run_file import read_jsonl
from gradrewrite.diagnostics.run_log import Step
from gradrewrite.monitoring.writers import JsonLines

pytestmark = pytest.mark.pure

ADDRESS = st.builds("{}@{}".format, st.text(max_size=6), st.text(max_size=8))
VALUE = st.floats(width=64) | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 5e-324])
ROWS = st.lists(st.dictionaries(ADDRESS, VALUE, max_size=4), max_size=5)


def written(path: Path, rows: Sequence[dict[str, float]], first: int = 0) -> None:
    file = JsonLines(path)
    for step, records in enumerate(rows, first):
        file.write(Step(step, records))


def lines_of(content: bytes) -> list[bytes]:
    return content.splitlines(keepends=True)


def bits(steps: Sequence[Step]) -> list[tuple[int, dict[str, bytes]]]:
    """Steps with their values bit for bit, but for the payload of NaN."""
    return [
        (s.step, {a: b"NaN" if math.isnan(v) else struct.pack("d", v) for a, v in s.records.items()}) for s in steps
    ]


def steps_of(rows: Sequence[dict[str, float]], first: int = 0) -> list[Step]:
    return [Step(step, records) for step, records in enumerate(rows, first)]


@given(ROWS)
def test_what_was_written_is_read_bit_for_bit(rows: list[dict[str, float]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.jsonl")
        written(path, rows)
        assert bits(read_jsonl(path)) == bits(steps_of(rows))
        for line in path.read_text("ascii").splitlines():
            json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is no strict JSON"))


@given(ROWS, st.data())
def test_a_file_that_ends_at_any_byte_has_the_whole_lines(rows: list[dict[str, float]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.jsonl")
        written(path, rows)
        whole = path.read_bytes()
        end = data.draw(st.integers(0, len(whole)), label="cut at")
        path.write_bytes(whole[:end])
        # a line is complete with its last brace: the newline tells where the next one begins
        ends = itertools.accumulate(map(len, lines_of(whole)))
        is_step = [line.startswith(b'{"step"') for line in lines_of(whole)]
        num_whole = sum(end >= n - 1 for n, has_step in zip(ends, is_step, strict=True) if has_step)
        assert bits(read_jsonl(path)) == bits(steps_of(rows[:num_whole]))


@given(ROWS, ROWS, st.data())
def test_a_later_run_goes_on_behind_the_last_whole_line(
    rows: list[dict[str, float]], more: list[dict[str, float]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.jsonl")
        written(path, rows)
        whole = path.read_bytes()
        end = data.draw(st.integers(0, len(whole)), label="cut at")
        path.write_bytes(whole[:end])
        written(path, more)
        kept = lines_of(whole)[: whole[:end].count(b"\n")]
        num_whole = sum(line.startswith(b'{"step"') for line in kept)
        assert path.read_bytes().startswith(b"".join(kept))
        assert bits(read_jsonl(path)) == bits([*steps_of(rows[:num_whole]), *steps_of(more)])
