"""Small models, and differences planted into copies of them, each with the site at which it shows first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.gpt import Gpt, batch


class SeededDropout(nn.Module):
    """Dropout whose mask is a function of ``seed`` alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.frac(torch.sin(torch.arange(x.numel()) * 12.9898 + self.seed) * 43758.5453).abs()
        return x * (noise.view_as(x) > 0.2) / 0.8


class Residual(nn.Module):
    """Blocks with batch normalization and two kinds of dropout; the loss is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.BatchNorm1d(6),
                    "up": nn.Linear(6, 12),
                    "act": nn.GELU(),
                    "drop": nn.Dropout(0.2),
                    "down": nn.Linear(12, 6),
                    "seeded": SeededDropout(n),
                }
            )
            for n in range(3)
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer["up"](layer["norm"](x))
            x = x + layer["seeded"](layer["down"](layer["drop"](layer["act"](h))))
        return self.head(x).square().mean()


class Pictures(nn.Module):
    """A convolutional net without a module for its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = functional.silu(self.stem(x))
        h = torch.tanh(self.norm(self.conv(h)))
        return functional.cross_entropy(self.head(h.mean((2, 3))), y)


def _residual() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Residual(), (torch.randn(8, 6),)


def _pictures() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Pictures(), (torch.randn(4, 1, 8, 8), torch.randint(0, 3, (4,)))


def _gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Gpt(layers=2, width=16, heads=2, vocabulary=16, context=8), batch(2, 8, 16)


MODELS = {"residual": _residual, "pictures": _pictures, "gpt": _gpt}


def make(name: str, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model and its inputs; the same ones for the same seed."""
    torch.manual_seed(seed)
    return MODELS[name]()


class WideLinear(nn.Linear):
    """Computes in float64 and returns float32."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.double(), self.weight.double(), self.bias.double()).float()


class NarrowLinear(nn.Linear):
    """Computes in bfloat16 and returns float32."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()


class NarrowOutput(nn.Linear):
    """Returns float16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).half()


class NarrowConv(nn.Conv2d):
    """Computes in bfloat16 and returns float32."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return functional.conv2d(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()


class ShiftedDropout(nn.Dropout):
    """Draws its mask from one number later on."""

    def forward(self, x: Tensor) -> Tensor:
        zero = torch.rand(1) * 0  # used, or the compiler leaves it out
        return super().forward(x) + zero


class ByHandNorm(nn.LayerNorm):
    """Layer normalization by other operations."""

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


class TanhGelu(nn.GELU):
    """The approximation by tanh."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh")


class OtherBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return g * 1.001


class BackwardScaled(nn.Linear):
    """Equal forward; the gradient of its input is larger by a thousandth."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(OtherBackward.apply(x))


def flip(tensor: Tensor, place: int, bit: int) -> None:
    """Flip one bit of one element of a contiguous float32 tensor."""
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[place] ^= 1 << bit if bit < 31 else -(1 << 31)


@dataclass(frozen=True)
class Plant:
    """A difference, made by ``change`` in a copy of a model."""

    model: str
    kind: str
    site: str
    change: Callable[[nn.Module], None]

    @property
    def name(self) -> str:
        return f"{self.model}: {self.kind} at {self.site}"


def _becomes(module: str, other: type[nn.Module]) -> Callable[[nn.Module], None]:
    return lambda model: setattr(model.get_submodule(module), "__class__", other)


def _seed(module: str) -> Callable[[nn.Module], None]:
    return lambda model: setattr(model.get_submodule(module), "seed", 99)


def _flips(parameter: str, place: int, bit: int) -> Callable[[nn.Module], None]:
    return lambda model: flip(model.get_parameter(parameter), place, bit)


def _scaled(parameter: str, factor: float = 1.01) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter(parameter).mul_(factor)

    return change


PLANTS = [
    Plant("residual", "kernel", "activation:layers.0.act", _becomes("layers.0.act", TanhGelu)),
    Plant("residual", "kernel", "activation:layers.2.act", _becomes("layers.2.act", TanhGelu)),
    Plant("gpt", "kernel", "activation:blocks.0.mlp.act", _becomes("blocks.0.mlp.act", TanhGelu)),
    Plant("gpt", "kernel", "activation:blocks.1.mlp.act", _becomes("blocks.1.mlp.act", TanhGelu)),
    Plant("gpt", "kernel", "activation:blocks.0.norm1", _becomes("blocks.0.norm1", ByHandNorm)),
    Plant("gpt", "kernel", "activation:norm", _becomes("norm", ByHandNorm)),
    Plant("residual", "backward", "error:layers.1.norm", _becomes("layers.1.up", BackwardScaled)),
    Plant("gpt", "backward", "error:blocks.1.mlp.act", _becomes("blocks.1.mlp.down", BackwardScaled)),
    Plant("residual", "dtype", "activation:layers.1.up", _becomes("layers.1.up", NarrowLinear)),
    Plant("residual", "dtype", "activation:layers.2.down", _becomes("layers.2.down", WideLinear)),
    Plant("residual", "dtype", "activation:head", _becomes("head", NarrowOutput)),
    Plant("gpt", "dtype", "activation:blocks.1.attn.qkv", _becomes("blocks.1.attn.qkv", NarrowLinear)),
    Plant("gpt", "dtype", "activation:blocks.0.mlp.down", _becomes("blocks.0.mlp.down", WideLinear)),
    Plant("pictures", "dtype", "activation:conv", _becomes("conv", NarrowConv)),
    Plant("residual", "seed", "activation:layers.0.seeded/add", _seed("layers.0.seeded")),
    Plant("residual", "seed", "activation:layers.2.seeded/add", _seed("layers.2.seeded")),
    Plant("residual", "seed", "activation:layers.1.drop", _becomes("layers.1.drop", ShiftedDropout)),
    Plant("residual", "bit", "activation:layers.0.norm", _flips("layers.0.norm.weight", 3, 10)),
    Plant("residual", "bit", "activation:layers.1.down", _flips("layers.1.down.weight", 17, 12)),
    Plant("residual", "bit", "activation:head", _flips("head.bias", 1, 22)),
    Plant("gpt", "bit", "activation:position", _flips("position.weight", 5, 0)),
    Plant("gpt", "bit", "activation:blocks.0.attn.proj", _flips("blocks.0.attn.proj.weight", 7, 20)),
    Plant("gpt", "bit", "activation:blocks.1.norm2", _flips("blocks.1.norm2.weight", 4, 9)),
    Plant("gpt", "bit", "activation:head", _flips("head.weight", 100, 31)),
    Plant("pictures", "bit", "activation:stem", _flips("stem.weight", 11, 14)),
    Plant("pictures", "bit", "activation:norm", _flips("norm.weight", 2, 3)),
    Plant("residual", "layer", "activation:layers.1.up", _scaled("layers.1.up.weight")),
    Plant("gpt", "layer", "activation:embed", _scaled("embed.weight")),
    Plant("gpt", "layer", "activation:blocks.1.mlp.up", _scaled("blocks.1.mlp.up.bias", -1.0)),
    Plant("pictures", "layer", "activation:head", _scaled("head.weight", 1.0001)),
]
