"""Where an update may be skipped, the buffers that the forward writes cost one copy, and one select on the device."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.backends.written_buffers import WrittenBuffers
from gradrewrite.passes import CheckFinite

from gpu.device import simulated_gpu
from models.buffers import WIDTH, All


def _step(*, copies: bool) -> tuple[Counter[str], int, int]:
    """Operations of the last of four steps, with the number and the bytes of the buffers that it writes."""
    with simulated_gpu(90) as gpu:
        with torch.device("cuda"):
            model, x = All(), torch.randn(8, WIDTH)
        rewritten = gr.transform(model, gr.on("gradient:*", CheckFinite("skip"))).compile()
        optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), rewritten)
        buffers = rewritten._gradrewrite.session.buffers
        with mock.patch.object(WrittenBuffers, "copy", WrittenBuffers.copy if copies else _copy_nothing):
            for _ in range(4):
                optimizer.zero_grad()
                before = gpu.operations + Counter(launches=len(gpu.launches), waits=len(gpu.waits))
                rewritten(x).backward()
                written = buffers.num_copied, buffers.bytes_copied
                optimizer.step()
                after = gpu.operations + Counter(launches=len(gpu.launches), waits=len(gpu.waits))
        return after - before, *written


def _copy_nothing(self: WrittenBuffers, buffers: dict[int, Tensor]) -> dict[int, Tensor]:
    return {}


def test_what_is_written_is_copied_once() -> None:
    plain, *_ = _step(copies=False)
    ours, number, size = _step(copies=True)
    assert number >= 6
    assert size > 0
    assert ours["aten.clone.default"] == number  # some of them are what a replay of the step needs anyway
    assert ours - plain == Counter(
        {
            "aten.where.self_out": number,
            "aten.gt.Scalar": 1,
            "aten.clone.default": ours["aten.clone.default"] - plain["aten.clone.default"],
        }
    )
