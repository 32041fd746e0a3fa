"""Nine architectures as they are drawn: tiny models with clips at every error and gradient; each is traced once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue

from models.lstm import LstmLoop, sequences

_IDS = {"vocab_size": 40, "max_position_embeddings": 32}
_SMALL = {**_IDS, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
_VIT = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 8, "patch_size": 4}
# model, configuration, settings
_CONFIGURED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", {**_SMALL, "num_hidden_layers": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 40, "n_embd": 16, "n_layer": 12, "n_head": 2}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_SMALL, "num_hidden_layers": 4, "num_key_value_heads": 1}),
    "mixtral": (
        "MixtralForCausalLM", "MixtralConfig",
        {**_SMALL, "num_hidden_layers": 2, "num_key_value_heads": 1, "num_local_experts": 3,
         "experts_implementation": "batched_mm"},
    ),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2,
         "decoder_start_token_id": 0},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {**_VIT, "num_hidden_layers": 4}),
    "resnet": (
        "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16, 24], "depths": [2, 2, 2], "layer_type": "basic", "num_labels": 5},
    ),
}  # fmt: skip
NAMES = [*_CONFIGURED, "unet", "lstm"]


class UNet(nn.Module):
    """Two levels down and up, joined by skip connections, with the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(3, 8), _block(8, 16)])
        self.middle = _block(16, 16)
        self.up = nn.ModuleList([_block(32, 8), _block(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        skips = []
        x = images
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], dim=1))
        return functional.cross_entropy(self.head(x), labels)


class Loop(nn.Module):
    """A cell of two layers that a Python loop calls ``steps`` times."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.cell = steps, _Cell()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps):
            x = self.cell(x)
        return x.square().mean()


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keep = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.keep(x)) + x


def _block(channels: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


def _ids(*shape: int) -> Tensor:
    return torch.randint(3, 40, shape)


def _configured(name: str) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    model, config, settings = _CONFIGURED[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**settings)).train()
    if name in ("vit", "resnet"):
        return made, {"pixel_values": torch.randn(2, 3, 16 if name == "resnet" else 8, 16 if name == "resnet" else 8),
                      "labels": torch.tensor([1, 0])}  # fmt: skip
    return made, {"input_ids": _ids(2, 6), "labels": _ids(2, 6)}


@functools.cache
def drawn(name: str) -> gr.JointGraph:
    """Trace one of ``NAMES`` with a clip at every module's error and two at every gradient."""
    torch.manual_seed(0)
    policy = [
        gr.on("error:*", ClipByValue(1.0, log=True)),
        gr.on("gradient:*", ClipByNorm(1.0)),
        gr.on("gradient:*", ClipByGlobalNorm(1.0)),
    ]
    if name == "unet":
        return gr.transform(UNet(), policy).trace(torch.randn(2, 3, 8, 8), torch.randint(0, 2, (2, 8, 8)))
    if name == "lstm":
        return gr.transform(LstmLoop(8), policy).trace(*sequences(2, 40, 8))
    model, inputs = _configured(name)
    return gr.transform(model, policy).trace(**inputs)


@functools.cache
def recurrence(steps: int) -> gr.JointGraph:
    """Trace a cell that is called ``steps`` times, with a clip at each of its errors."""
    return gr.transform(Loop(steps), gr.on("error:cell", ClipByNorm(1.0))).trace(torch.ones(2, 4))


CASES: dict[str, Callable[[], gr.JointGraph]] = {name: functools.partial(drawn, name) for name in NAMES}
