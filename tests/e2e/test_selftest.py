"""The command that checks an installation."""

from __future__ import annotations

import pytest

import gradrewrite as gr
from gradrewrite.cli import main, selftest
from gradrewrite.passes import CheckFinite

NUM_EAGER, NUM_CHECKS = 3, 6


@pytest.mark.long
def test_eager(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--eager"]) == 0
    versions, *lines = capsys.readouterr().out.splitlines()
    assert versions.startswith(f"gradrewrite {gr.__version__}, torch ")
    assert [line.split("  ")[0] for line in lines] == ["ok"] * NUM_EAGER


@pytest.mark.slow
@pytest.mark.inductor
def test_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["ok"] * NUM_CHECKS


@pytest.mark.long
def test_what_fails_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(selftest, "CheckFinite", lambda: CheckFinite("record"))
    assert main(["selftest", "--eager"]) == 2
    out, err = capsys.readouterr()
    failed = [line for line in out.splitlines() if line.startswith("failed")]
    assert failed == [
        "failed  a failed check names the op and the line: AssertionError: the gradients are NaN, and no check failed"
    ]
    assert err == "gradrewrite: 1 of 3 checks failed\n"
