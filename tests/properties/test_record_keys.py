"""Keys of records: unique, and parsed back exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import HostBound, Leaf, NormClip, Output, Scalars, leaves
from gradrewrite.rewriting.record_nodes import RecordNumbering

pytestmark = pytest.mark.pure

# Names that end in dots and numbers are the ones that could be mistaken.
ENDS = st.sampled_from(["", ".", ".0", ".1", ".2", ".02", ".2.3", ".12", ".999999999", ".9999999999", "\n", ".2\n"])
NAMES = st.builds(str.__add__, st.text().map(lambda text: text.replace("@", "")), ENDS)
SITES = st.text() | st.sampled_from(["error:a#1", "gradient:w", "run", "a@b", ""])


@given(NAMES, st.integers(2, 999_999_999), SITES)
def test_a_key_is_parsed_back(name: str, occurrence: int, site: str) -> None:
    key = RecordKey(name, occurrence, site)
    assert RecordKey.parse(str(key)) == key


@given(NAMES, SITES)
def test_a_name_that_a_user_gave_is_its_text(name: str, site: str) -> None:
    key = RecordKey.of(name, site)
    assert str(key) == f"{name}@{site}"
    assert RecordKey.parse(str(key)) == key


@given(st.lists(st.tuples(st.sampled_from(["a", "a.2", "a.2.2", "a.3", "b", "norm"]), st.sampled_from(["x", "y"]))))
def test_numbered_keys_are_unique(asked: list[tuple[str, str]]) -> None:
    numbering = RecordNumbering()
    keys = [key for name, site in asked for key in numbering.new([name], site)]

    assert len({str(key) for key in keys}) == len(keys)
    assert [key.site for key in keys] == [site for _, site in asked]


def test_a_bound_has_the_number_of_the_occurrence_not_of_a_name() -> None:
    numbering = RecordNumbering()
    report: NormClip[Leaf] = NormClip("expert.3", Output(0), HostBound(1.0), is_wide=False)
    ((first, _),), ((second, factor),) = (numbering.of_action([report], "gradient:w") for _ in range(2))

    assert list(map(str, leaves(first))) == ["expert.3@gradient:w", "bound@gradient:w"]
    assert list(map(str, leaves(second))) == ["expert.3.2@gradient:w", "bound.2@gradient:w"]
    assert factor is not None


def test_a_bound_that_a_function_records_has_the_number_of_its_norm() -> None:
    numbering = RecordNumbering()
    numbering.new(["norm"], "gradient:w")  # of another action
    given: list[Scalars[Leaf]] = [
        Scalars((name,), (Output(n),)) for n, name in enumerate(("limit", "norm", "bound", "x"))
    ]
    found = [str(key) for report, _ in numbering.of_action(given, "gradient:w") for key in leaves(report)]

    assert found == ["limit@gradient:w", "norm.2@gradient:w", "bound.2@gradient:w", "x@gradient:w"]
