"""The command ``help``."""

from __future__ import annotations

import pytest

from gradrewrite.cli import main
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
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["cheatsheet", *entries()]
    assert "policy-answer" in names


def test_an_unknown_name_has_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "no-such-sites"]) == 2
    assert "there is no 'no-such-sites'; nearest: no-such-site" in capsys.readouterr().err
