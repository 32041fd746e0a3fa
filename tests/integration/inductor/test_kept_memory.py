"""``model.memory()`` counts what a compiled forward really saves, as autograd's hooks see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import Recompute, Store

from models.small import Lambda

pytestmark = pytest.mark.inductor

POLICIES: dict[str, Any] = {
    "plain": [],
    "int8": gr.on("saved:*", Store("int8")),
    "recompute": [gr.on("saved:up", Recompute()), gr.on("saved:/dropout", Store("bfloat16"))],
}


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of the memories that a forward saves beside parameters and inputs, each once."""
    known = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in known:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    assert out.grad_fn is not None
    return sum(kept.values())


@pytest.mark.parametrize("name", POLICIES)
def test_bytes_are_those_that_autograd_holds(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 64)
    net = Lambda(
        lambda net, x: net.down(nn.functional.dropout(net.norm(nn.functional.gelu(net.up(x))), 0.1)),
        up=nn.Linear(64, 256),
        norm=nn.LayerNorm(256),
        down=nn.Linear(256, 64),
    )
    model = gr.transform(net, POLICIES[name])
    memory = model.memory(x)
    model.compile()

    assert saved_bytes(model, x) == memory.policy_bytes
    assert (memory.policy_bytes == memory.plain_bytes) == (name == "plain")
