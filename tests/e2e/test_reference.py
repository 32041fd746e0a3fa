"""The API reference has every public name, and nothing else."""

from __future__ import annotations

import importlib
import re

import pytest

from helpers import ROOT

PAGES = ROOT / "docs" / "reference"
PACKAGES = {
    "gradrewrite": "gradrewrite.md",
    "gradrewrite.passes": "passes.md",
    "gradrewrite.viz": "viz.md",
    "gradrewrite.testing": "testing.md",
}


pytestmark = pytest.mark.pure


def test_every_page_is_listed() -> None:
    assert {path.name for path in PAGES.iterdir()} == set(PACKAGES.values())


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_public_name_once(package: str) -> None:
    shown = re.findall(r"^::: (\S+)$", (PAGES / PACKAGES[package]).read_text(), re.M)
    public = importlib.import_module(package).__all__

    assert shown == [f"{package}.{name}" for name in public]
