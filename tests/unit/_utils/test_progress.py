"""Progress of long tracing: on a terminal, and only if it takes long."""

from __future__ import annotations

import io
import threading

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite._utils import progress as _progress
from gradrewrite._utils.progress import current_progress, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def as_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal; inside of a test, for pytest sets it anew after fixtures."""
    found = Terminal()
    monkeypatch.setattr("sys.stderr", found)
    return found


@pytest.mark.broad
@pytest.mark.pure
def test_stages_of_a_long_block(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    monkeypatch.setattr(_progress, "INTERVAL", 0.005)
    waited = threading.Event()
    with show_progress("trace", "reading", delay=0.0):
        progress = current_progress()
        waited.wait(0.3)
        progress.begin("rewriting", 4)
        progress.advance()
        waited.wait(0.3)
    assert "trace, reading: 0op" in terminal.getvalue()
    assert "trace, rewriting:  25%" in terminal.getvalue()
    assert "| 1/4 [" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")  # the bar is gone


@pytest.mark.pure
def test_quick_block_shows_nothing_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), show_progress("trace", "reading"):
        _ = 1 / 0
    assert terminal.getvalue() == ""
    assert threading.active_count() == before


@pytest.mark.pure
def test_no_thread_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    before = threading.active_count()
    with show_progress("trace", "reading", delay=0.0):
        assert threading.active_count() == before


def test_trace_counts_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    seen: list[tuple[str, int, int | None]] = []
    begin = _progress.Progress.begin

    def noting(self: _progress.Progress, stage: str, total: int | None = None) -> None:
        seen.append((self.stage, self.done, self.total))
        begin(self, stage, total)

    monkeypatch.setattr(_progress.Progress, "begin", noting)
    gr.transform(nn.Linear(2, 2), []).trace(torch.ones(1, 2))
    assert terminal.getvalue() == ""
    assert seen == [("reading the model", 0, None), ("differentiating", 2, 2)]
