"""The command ``help``."""

from __future__ import annotations

import importlib

import pytest

from gradrewrite.cli import main, reference
from gradrewrite.cli.pages import entries

from helpers import ROOT

pytestmark = pytest.mark.pure


def test_an_entry_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "no-such-site"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# Sites without a match\n")
    assert "gradrewrite sites my_models:make" in out
    assert "Answers of a policy" not in out
    assert main(["help", "troubleshooting#no-such-site"]) == 0
    assert capsys.readouterr().out == out


def test_the_cheat_sheet_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "cheatsheet"]) == 0
    assert capsys.readouterr().out.strip() == (ROOT / "docs" / "cheatsheet.md").read_text().strip()


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert "gradrewrite help ClipByNorm, gr.guard, Monitor.reduce" in last
    names = [line.split()[0] for line in lines]
    assert names == ["cheatsheet", *entries()]
    assert "policy-answer" in names


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "ClipByNorm",
            ["# gradrewrite.passes.ClipByNorm(max_norm: Bound | ", "Attributes:", "apply(self, tensor: Tensor)"],
        ),
        ("P.L2", ["# gradrewrite.passes.L2(rate: float | Tensor) -> None"]),
        ("gr.record", ["# gradrewrite.record(name: str, value: Tensor | float) -> None", "Example:"]),
        ("Monitor.reduce", ["# gradrewrite.Monitor.reduce(self, how: How | None = None", "A collective call"]),
        ("gradrewrite.Site.matches", ["# gradrewrite.Site.matches(self, pattern: str) -> bool"]),
        ("Policy", ["# gradrewrite.Policy = Callable[[Site], Answer] | Sequence[Policy]"]),
        ("viz.Format", ["# gradrewrite.viz.Format = typing.Literal["]),
        ("testing.assert_inert", ["# gradrewrite.testing.assert_inert("]),
    ],
)
def test_a_public_name_has_its_signature_and_docstring(
    name: str, wanted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["help", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith(wanted[0])
    assert all(text in out for text in wanted)


def test_a_module_has_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "passes"]) == 0
    assert "gradrewrite.passes.ClipByNorm" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", ["Monitor._records", "ClipByNorm.max_norm", "gr.nothing", "__name__"])
def test_no_other_name_has_an_entry(name: str) -> None:
    assert main(["help", name]) == 2


@pytest.mark.parametrize("module", reference.MODULES)
def test_the_pages_of_the_reference_can_be_read_as_they_are(module: str) -> None:
    page = (ROOT / "docs" / "reference" / f"{module.rpartition('.')[2]}.md").read_text()
    rows = []
    for name in sorted(importlib.import_module(module).__all__):
        if name != "__version__":
            line = reference.first_line(getattr(importlib.import_module(module), name))
            line = line.replace("``", "`").replace("|", "\\|")
            rows.append(f"| [`{name}`](#{module}.{name}) | {line} |")
    table = "\n".join(["| | |", "|---|---|", *rows])
    assert table in page, f"docs/reference: the table is\n{table}"


def test_an_unknown_name_has_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "no-such-sites"]) == 2
    assert "there is no 'no-such-sites'; nearest: no-such-site" in capsys.readouterr().err
