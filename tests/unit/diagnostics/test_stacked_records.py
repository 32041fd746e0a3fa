"""Records of loops, and vectors: lists in a run log come back in order; other logs get a few figures."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradrewrite._utils.elements import elements_of
from gradrewrite._utils.exponent_counts import EXPONENTS
from gradrewrite.diagnostics.stacked_records import StackReader, records_to_json, summed_up
from gradrewrite.ir.outputs import iterations_of

pytestmark = pytest.mark.pure

VALUE = st.floats(width=32) | st.sampled_from([0.1, -0.0, 1e300, math.nan, math.inf, -math.inf])


def bits(records: dict[str, float]) -> list[tuple[str, bytes]]:
    return [(key, b"NaN" if math.isnan(value) else struct.pack("d", value)) for key, value in records.items()]


@given(
    st.integers(0, 12),
    st.integers(1, 5),
    st.lists(st.lists(VALUE | st.none(), min_size=5, max_size=5), min_size=1, max_size=3),
)
def test_lists_come_back(first: int, length: int, rows: list[list[float | None]]) -> None:
    stack = tuple(iterations_of(f"norm@error:cell/{n}", first, length) for n in range(len(rows)))
    records = {"norm@activation:a": 1.0}
    for n in range(length):
        records |= {own[n]: row[n] for own, row in zip(stack, rows, strict=True) if row[n] is not None}
    records["loss@run"] = 0.1
    reader = StackReader()
    for _ in range(2):
        text = json.dumps(records_to_json(records, [stack]), allow_nan=False)
        found, stacks = reader.read(json.loads(text))

        assert bits(found) == bits(records)
        assert stacks in ((), (stack,))  # none where it has no record


@given(st.lists(VALUE, min_size=2, max_size=20), st.sampled_from(["row[0]@error:a#3", "row[0].2@group:default"]))
def test_vectors_come_back(values: list[float], first: str) -> None:
    stack = (elements_of(first, len(values)),)
    records = {"norm@activation:a": 1.0} | dict(zip(stack[0], values, strict=True))
    text = json.dumps(records_to_json(records, [stack]), allow_nan=False)
    found, stacks = StackReader().read(json.loads(text))

    assert bits(found) == bits(records)
    assert stacks == (stack,)


def test_a_vector_begins_with_its_first_element() -> None:
    data = {"dtype": "float32", "records": {"row[1]@error:a": [1.0, 2.0]}}
    with pytest.raises(ValueError, match="the address of the first element for 'vector 0'"):
        StackReader().read({"vector 0": data})


def test_a_row_is_small() -> None:
    stack = tuple(iterations_of(f"norm@error:lstm.l{n}/h", 0, 400) for n in range(8))
    values = {address: struct.unpack("f", struct.pack("f", 1 / (n + 3)))[0] for n, address in enumerate(sum(stack, ()))}
    small, large = (len(json.dumps(records_to_json(values, own))) for own in ([stack], []))

    assert small < 16 * len(values)
    assert large > 3 * small


@pytest.mark.parametrize(
    "data",
    [
        {"dtype": "int8", "records": {"a@b": [1]}},
        {"dtype": "float32", "records": {"a@b": [1], "c@d": []}},
        {"dtype": "float32", "records": [1]},
        {"dtype": "float32"},
    ],
)
def test_malformed_lists(data: object) -> None:
    with pytest.raises(ValueError, match="'loop 0', all lists of one length"):
        StackReader().read({"loop 0": data})


def test_no_number_in_a_list() -> None:
    with pytest.raises(ValueError, match="for 'a@b#1', got 'x'"):
        StackReader().read({"loop 0": {"dtype": "float32", "records": {"a@b": [1, "x"]}}})


def test_a_few_figures_for_other_logs() -> None:
    stack = (iterations_of("norm@error:l/h", 3, 4), iterations_of(f"{EXPONENTS[0]}@error:l/h", 3, 4))
    records = {"loss@run": 2.0, "norm@error:l/h#3": 1.0, "norm@error:l/h#4": 5.0, "norm@error:l/h#5": 3.0}
    records |= {f"{EXPONENTS[0]}@error:l/h#{n}": 2.0 for n in (3, 4, 5, 6)}

    assert summed_up(records, [stack, stack]) == summed_up(records, [stack])
    assert summed_up(records, [stack]) == {
        "loss@run": 2.0,
        "norm_largest@error:l/h": 5.0,
        "norm_largest_at@error:l/h": 4.0,
        "norm_last@error:l/h": 3.0,
        f"{EXPONENTS[0]}@error:l/h": 8.0,
    }
    vector = (elements_of("row[0]@error:l", 3),)
    assert summed_up(dict(zip(vector[0], (1.0, 7.0, 4.0), strict=True)), [vector]) == {
        "row_largest@error:l": 7.0,
        "row_largest_at@error:l": 1.0,
        "row_mean@error:l": 4.0,
    }
    records["norm@error:l/h#3"] = math.nan
    assert summed_up(records, [stack])["norm_largest_at@error:l/h"] == 3
