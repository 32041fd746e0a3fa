"""Models of the zoo with stored saved tensors, against an independent evaluation of their plain joint graphs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import gradrewrite as gr
from gradrewrite.passes import Store
from gradrewrite.rewriting import saved_tensors as own

from conformance.outcomes import expected
from conformance.test_zoo import CASES, SUITE, given
from models import saved_tensors
from models.saved_tensors import assert_as_expected, changes, trace

# Models of the zoo are tiny, and so are their tensors. Those without dimensions remain left alone.
LARGE = 17


@pytest.mark.filterwarnings(
    "ignore",  # warnings of the libraries
    "error::gradrewrite.RewriteWarning",
    "ignore:saved.* leaves them as they are:gradrewrite.RewriteWarning",
)
@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_models(name: str) -> None:
    if name in expected(SUITE) and expected(SUITE)[name].kind == "torch":
        pytest.skip("torch.compile does not trace it as one graph")
    case = given(name)
    form = "float32" if next(case.model.parameters()).dtype == torch.float64 else "int8"
    with mock.patch.object(own, "SMALL", LARGE), mock.patch.object(saved_tensors, "SMALL", LARGE):
        traced = trace(case.model, gr.on("saved:*", Store(form)), **case.inputs)
        # Among others, that each saved tensor has an edit if the form is smaller.
        assert_as_expected(traced, form, rtol=1e-10 if form == "float32" else 1e-5)
    sites = [site for site in traced.graph.sites if site.kind == "saved"]
    assert len(set(map(str, sites))) == len(sites)
    assert {edit.site for edit in traced.graph.edits} <= set(sites)
    assert changes(traced) > 0
