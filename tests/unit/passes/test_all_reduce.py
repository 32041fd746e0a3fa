"""Settings of AllReduce, and buckets; tests/integration/distributed runs it in processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.distributed.buckets import bucket_order, flatten, unflatten
from gradrewrite.passes import AllReduce


@pytest.mark.parametrize("size", [0, -1.0, math.nan])
@pytest.mark.pure
def test_size_is_positive(size: float) -> None:
    with pytest.raises(ValueError, match="bucket_mb must be > 0"):
        AllReduce(bucket_mb=size)


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"bucket_mb": "25"}, "bucket_mb is a number"), ({"bucket_mb": True}, "bucket_mb is a number"),
     ({"process_group": "world"}, r"process_group is a torch\.distributed\.ProcessGroup, got str")],
)  # fmt: skip
@pytest.mark.pure
def test_settings_are_checked(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        AllReduce(**settings)


def test_it_is_for_gradients() -> None:
    model = gr.transform(nn.Linear(2, 2), lambda site: AllReduce() if site.kind == "error" else None)
    with pytest.raises(gr.PolicyError, match="does not apply to this kind of site; it applies to gradient"):
        model.trace(torch.ones(1, 2))


@pytest.mark.pure
def test_buckets_are_filled_in_order() -> None:
    kinds = ["a", "b", "a", "a", "b", "a"]
    sizes = [4, 4, 4, 4, 100, None]

    assert bucket_order(kinds, sizes, 8) == [[1], [0, 2], [3], [4], [5]]
    assert bucket_order(kinds, sizes, math.inf) == [[0, 2, 3], [1, 4], [5]]
    assert bucket_order([], [], 8) == []


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.randn(3, 4), torch.randn(5, 2).t(), torch.randn(()), torch.randn(0, 3)],
        [torch.randn(2, 3, dtype=torch.complex64), torch.randn(4, dtype=torch.complex64)],
        [torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)],
        [torch.randn(3, 1).expand(3, 4), torch.randn(4, 6)[:, ::2]],
    ],
)
@pytest.mark.pure
def test_flat_tensors_come_back(tensors: list[Tensor]) -> None:
    flat = flatten(tensors)
    results = unflatten(flat, tensors)

    assert flat.dim() == 1
    assert not flat.is_complex()
    for result, tensor in zip(results, tensors, strict=True):
        assert torch.equal(result, tensor)
        assert result.dtype == tensor.dtype


@pytest.mark.pure
def test_dense_tensors_keep_their_strides() -> None:
    tensors = [torch.randn(5, 2).t(), torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)]

    assert [t.stride() for t in unflatten(flatten(tensors), tensors)] == [t.stride() for t in tensors]
