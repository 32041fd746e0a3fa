"""Copies of saved tensors in host memory: their order on streams that are written down."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradrewrite.numerics import offloading


class Log:
    """A stream whose calls are written down."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def record_event(self) -> str:
        self.calls.append("event")
        return f"event {self.calls.count('event')}"

    def wait_event(self, event: str) -> None:
        self.calls.append(f"wait for {event}")


@pytest.fixture
def computation(monkeypatch: pytest.MonkeyPatch) -> Log:
    """The stream of the computation; tensors note no streams."""

    @contextlib.contextmanager
    def on(stream: Log) -> Iterator[None]:
        yield

    log = Log()
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: log)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return log


def test_upcoming_copies_are_begun_once_and_waited_for_when_taken(computation: Log) -> None:
    beside: Any = Log()
    copies = offloading._Copies(beside)
    first, second = torch.ones(3), torch.arange(3.0)
    for one in (first, second, second):
        copies.begin(one, torch.device("cpu"))

    assert beside.calls == ["event", "event"]
    assert computation.calls == []
    assert torch.equal(copies.take(second), second)
    assert computation.calls == ["wait for event 2"]
    assert torch.equal(copies.take(first), first)
    assert copies.begun == {}


def test_copies_for_a_backward_that_ended_early_are_forgotten(computation: Log) -> None:
    beside: Any = Log()
    copies = offloading._Copies(beside)
    lost = torch.ones(3)
    copies.begin(lost, torch.device("cpu"))
    copies.forget_lost()

    assert len(copies.begun) == 1
    del lost
    copies.forget_lost()
    assert copies.begun == {}


def test_memory_used_again_is_fetched_again(computation: Log) -> None:
    beside: Any = Log()
    copies = offloading._Copies(beside)
    tensor = torch.ones(3)
    copies.begin(tensor, torch.device("cpu"))
    copies.take(tensor)
    tensor += 1
    copies.begin(tensor, torch.device("cpu"))

    assert torch.equal(copies.take(tensor), torch.full((3,), 2.0))
