"""Launches of a training step on the simulated GPU, over those of plain torch.compile: four models, six policies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByValue, Observe

from gpu.log import Count
from models.convnet import ConvNet, images
from models.gpt import Gpt, batch

DTYPES = ("float32", "bfloat16")
WIDTH = 256
LAYERS = 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(WIDTH, 1024), nn.GELU(), nn.Linear(1024, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.act(self.one(x))).square().sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:-1], 3, 4, -1).permute(2, 0, 3, 1, 4).unbind()
        weights = self.drop(functional.softmax(q @ k.mT / 8, -1))
        return self.out((weights @ v).transpose(1, 2).flatten(-2)).square().sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "mlp": (Mlp, lambda: (torch.randn(512, WIDTH),)),
    "attention": (Attention, lambda: (torch.randn(8, 128, WIDTH),)),
    "gpt": (lambda: Gpt(2, WIDTH, vocabulary=1000, context=128), lambda: batch(8, 128, 1000, "cuda")),
    "cnn": (ConvNet, lambda: images(16, device="cuda")),
}


def everywhere(site: gr.Site) -> Any:
    return Observe("norm", "max_abs", "zeros") if site.kind in ("error", "activation", "gradient") else None


# What a policy may add to the launches of a step.
POLICIES: dict[str, tuple[Any, int]] = {
    "empty": ([], 0),
    "value": (gr.on("error:*", ClipByValue(1e-3)), 0),
    "value, log": (gr.on("error:*", ClipByValue(1e-3, log=True)), 4),
    "global norm": (gr.on("gradient:*", ClipByGlobalNorm(1.0)), 6),
    "check": ([gr.on(f"{kind}:*", CheckFinite("skip")) for kind in ("error", "gradient")], 6),
    "three statistics": (everywhere, 10),
}


@functools.cache
def step(name: str, dtype: str, policy: str | None) -> Count:
    """Forward and backward of one model, after two others."""
    make, inputs = MODELS[name]
    from gpu.device import simulated_gpu  # imports triton

    with simulated_gpu(90) as gpu:
        with torch.device("cuda"):
            model, args = make(), inputs()
        if policy is None:
            model.compile()
            run: nn.Module = model
        else:
            run = gr.transform(model, POLICIES[policy][0])
            run.compile()
        for _ in range(3):
            model.zero_grad()
            begin = gpu.count()
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "bfloat16"):
                loss = run(*args)
            loss.backward()
        return gpu.count() - begin


def added(name: str, dtype: str, policy: str) -> int:
    """Launches and other operations on the device that a policy adds."""
    plain, ours = step(name, dtype, None), step(name, dtype, policy)
    return ours.launches + ours.operations - plain.launches - plain.operations


def launches_of_layers(policy: Any) -> int:
    """Return the launches and other operations of a step of a GPT with ``LAYERS`` layers, after another one."""
    from gpu.device import simulated_gpu  # imports triton

    with simulated_gpu(90) as gpu:
        with torch.device("cuda"):
            model, args = Gpt(LAYERS, WIDTH, vocabulary=1000, context=128), batch(8, 128, 1000, "cuda")
        if policy is None:
            model.compile()
        else:
            model = gr.transform(model, policy).compile()
        for _ in range(2):
            model.zero_grad()
            begin = gpu.count()
            model(*args).backward()
        found = gpu.count() - begin
        return found.launches + found.operations
