"""Calls of a forward and their backwards, told apart by the memory of their tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradrewrite.backends.live_tensors import LiveTensors

pytestmark = pytest.mark.pure


def reusing(address: int) -> Tensor:
    """A new tensor, with the storage object at this address if it is free."""
    kept = []
    for _ in range(1000):
        tensor = torch.ones(7)
        if tensor.untyped_storage()._cdata == address:
            return tensor
        kept.append(tensor)
    return tensor


def test_memory_that_is_used_again_does_not_mean_an_earlier_call() -> None:
    warned: list[str] = []
    bound = torch.ones(())
    live = LiveTensors({"bound": bound}, lambda _, text: warned.append(text))
    out, x, y = torch.ones(7), torch.ones(3), torch.ones(5)
    live.note_call([], [out])  # never has a backward
    bound.fill_(2.0)
    live.note_call([x], [y])
    address = out.untyped_storage()._cdata
    del out
    live.note_backward([reusing(address)])  # as the gradient of the loss may be

    assert not warned


def test_the_backward_of_an_earlier_call_warns() -> None:
    warned: list[str] = []
    bound = torch.ones(())
    live = LiveTensors({"bound": bound}, lambda _, text: warned.append(text))
    first, second = torch.ones(7), torch.ones(7)
    live.note_call([], [first])
    bound.fill_(2.0)
    live.note_call([], [second])
    live.note_backward([first])

    assert len(warned) == 1
