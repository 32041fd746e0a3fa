"""Values of tokens: what fits, and the places of packed tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.monitoring.logged_tokens import logged_tokens

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({}, ValueError, "no value of the tokens"),
        ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, "no value of the tokens"),
        ({"ratio": [1.0, 2.0]}, TypeError, "ratio is list"),
        ({"ratio": 1.0}, TypeError, r"one tensor \[B, T\] for each value.* ratio is float"),
        ({"ratio": torch.ones(2, 3, dtype=torch.complex64)}, TypeError, "ratio is a tensor of torch.complex64"),
        ({"ratio": torch.ones(3)}, ValueError, r"ratio is \[3\]"),
        ({"ratio": torch.ones(2, 3, 4)}, ValueError, r"ratio is \[2, 3, 4\]"),
        ({"ratio": torch.ones(2, 3), "reward": torch.ones(2)}, ValueError, r"reward is \[2\].*expand\(-1, T\)"),
        ({"ratio": torch.ones(2, 3), "mask": torch.ones(2, 2)}, ValueError, r"ratio is \[2, 3\], mask is \[2, 2\]"),
        ({"ratio": torch.ones(5), "cu_seqlens": torch.ones(1, 5)}, ValueError, r"one dimension, and it is \[1, 5\]"),
        ({"ratio": torch.ones(5), "position_ids": torch.ones(4)}, ValueError, r"position_ids is \[4\]"),
        (
            {"ratio": torch.ones(5), "cu_seqlens": torch.tensor([0, 5]), "position_ids": torch.arange(5)},
            ValueError,
            "not both",
        ),
    ],
)
def test_what_does_not_fit(given: dict[str, Any], error: type[Exception], match: str) -> None:
    monitor = gr.Monitor()
    with pytest.raises(error, match=match):
        monitor.log_tokens(**given)


def places(shape: tuple[int, ...], **packing: Tensor) -> list[tuple[int, int]]:
    rows, positions = logged_tokens({"a": torch.zeros(shape)}, **packing).places()
    return list(zip(rows.tolist(), positions.tolist(), strict=True))


def test_places() -> None:
    packed = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]

    assert places((2, 2)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert places((5,), cu_seqlens=torch.tensor([0, 2, 5])) == packed
    assert places((1, 5), cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32)) == packed
    assert places((5,), position_ids=torch.tensor([0, 1, 0, 1, 2])) == packed
    assert places((1, 5), position_ids=torch.tensor([[0, 1, 0, 1, 2]])) == packed
    # Several packed rows; one begins in the middle of its sequence.
    assert places((2, 3), position_ids=torch.tensor([[0, 1, 0], [4, 5, 0]])) == [
        *((0, 0), (0, 1), (1, 0)),
        *((2, 0), (2, 1), (3, 0)),
    ]
    # A sequence without tokens keeps its number.
    assert places((3,), cu_seqlens=torch.tensor([0, 1, 1, 3])) == [(0, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize("starts", [[], [0], [0, 4], [1, 5], [0, 3, 2, 5]])
def test_starts_that_do_not_fit(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="it goes from 0 to 5, and never down"):
        places((5,), cu_seqlens=torch.tensor(starts, dtype=torch.int64))


def test_values_are_copies_without_history() -> None:
    value = torch.ones(2, 3, requires_grad=True)
    logged = logged_tokens({"ratio": value * 2})

    assert not logged.values["ratio"].requires_grad
    assert logged.shape == (2, 3)
    assert not logged.is_packed


def test_nothing_waits_for_the_device() -> None:
    """A meta tensor has no values that could be read."""
    values = {name: torch.zeros(1, 4, device="meta") for name in ("ratio", "position_ids")}
    gr.Monitor().log_tokens(**values)
    gr.Monitor().log_tokens(ratio=values["ratio"], cu_seqlens=torch.zeros(3, dtype=torch.int32, device="meta"))
