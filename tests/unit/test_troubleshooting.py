"""Every error leads to an entry of ``docs/troubleshooting.md``."""

from __future__ import annotations

import pickle
import re
from collections import Counter

import pytest
import torch

import gradrewrite as gr

from helpers import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
ERRORS = (
    gr.CallbackError,
    gr.GraphBreakError,
    gr.NotRewrittenError,
    gr.PolicyError,
    gr.TraceError,
    gr.UnsupportedGradientError,
)


def codes_in_sources() -> set[str]:
    """Codes of classes, ``code = "..."``, and of single errors, ``code="..."``, or a row of the table of refusals."""
    found = set()
    for folder in ("gradrewrite", "passes", "viz"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            found |= set(re.findall(r'(?:^    code = |\bcode=|code: str = )"([a-z-]+)"', text, re.M))
            if path.name == "scope.py":
                found |= set(re.findall(r'^        "([a-z]+-[a-z-]+)",$', text, re.M))
                found |= set(re.findall(r'% .*, "([a-z-]+)"\),$', text, re.M))
    return found


@pytest.mark.pure
def test_each_code_has_one_entry_and_each_entry_a_code() -> None:
    entries = Counter(re.findall(r"^### .* \{#([a-z-]+)\}$", PAGE.read_text(), re.M))

    assert set(entries.values()) == {1}
    assert set(entries) == codes_in_sources()


@pytest.mark.pure
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_last_line_names_the_entry(error: type[gr.RewriteError]) -> None:
    err = error("what is wrong")

    assert str(err) == f"what is wrong\nhelp: gradrewrite help {error.code}"
    assert error.code in codes_in_sources()


@pytest.mark.pure
def test_code_of_one_error_survives_pickling() -> None:
    err = pickle.loads(pickle.dumps(gr.PolicyError("two bounds", code="groups")))

    assert (err.args, str(err)) == (("two bounds",), "two bounds\nhelp: gradrewrite help groups")


@pytest.mark.pure
def test_errors_with_fields_end_with_their_entry() -> None:
    assert str(gr.NoSuchSiteError("error:x", ["error:y"])).splitlines()[-1] == "help: gradrewrite help no-such-site"


def test_an_error_that_is_raised_again_with_its_site_has_one_last_line() -> None:
    def reported(g: torch.Tensor) -> torch.Tensor:
        gr.record("n", g)
        return g

    model = gr.transform(torch.nn.Linear(2, 2), gr.on("gradient:weight", reported))
    with pytest.raises(gr.CallbackError) as caught:
        model.trace(torch.ones(1, 2))

    assert str(caught.value).count("help: ") == 1
    assert str(caught.value).endswith("\nhelp: gradrewrite help record")
