"""Launches of narrower forms of saved tensors on the simulated GPU, over those of plain torch.compile."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import gradrewrite as gr
from gradrewrite.passes import Store

from gpu import launch_counts

FORMS = ("int8", "bfloat16", "float8_e4m3fn")


def store_wide(form: Any, site: gr.Site) -> Any:
    """Keep what has rows of more than one element in a form; statistics of a layer norm have one."""
    return Store(form) if site.kind == "saved" and site.shape[-1] != 1 else None


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("mlp", form) for form in FORMS),
        ("gpt", "int8"),
        *(pytest.param("gpt", form, marks=pytest.mark.sample(12)) for form in FORMS[1:]),
        *(pytest.param("cnn", form, marks=pytest.mark.sample(12)) for form in FORMS),
    ],
)
def test_forms(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one launch a saved tensor: one more kernel to encode it, or to restore it for a matrix product."""
    stored: list[gr.Site] = []

    def policy(site: gr.Site) -> Any:
        found = store_wide(form, site)
        stored.extend([site] * (found is not None))
        return found

    monkeypatch.setitem(launch_counts.POLICIES, form, (policy, 0))
    monkeypatch.setattr(launch_counts, "step", functools.cache(launch_counts.step.__wrapped__))
    found = launch_counts.added(name, "float32", form)

    assert stored
    assert found <= len(set(stored))
