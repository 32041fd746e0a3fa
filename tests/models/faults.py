"""A transformer with planted faults, all of them asleep until a number wakes one."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PLACES = ("norm1", "scores", "attended", "mixed", "norm2", "up", "act", "down")


def log_of_zero(h: Tensor) -> Tensor:
    return torch.log(h)  # fault


def division_by_zero(h: Tensor) -> Tensor:
    return 1.0 / h  # fault


def zero_by_zero(h: Tensor) -> Tensor:
    return h / h.detach()  # fault


def overflow(h: Tensor) -> Tensor:
    big = (h == 0) * 1000.0
    return torch.exp(big - h)  # fault


def root_of_negative(h: Tensor) -> Tensor:
    small = h - (h == 0) * 1.0
    return small.sqrt()  # fault


def root_backward(h: Tensor) -> Tensor:
    return torch.sqrt(h)  # fault


def power_backward(h: Tensor) -> Tensor:
    return h**0.5  # fault


def masked_log_backward(h: Tensor) -> Tensor:
    logs = torch.log(h)  # fault
    return torch.where(h != 0, logs, torch.zeros_like(h))


def arc_backward(h: Tensor) -> Tensor:
    share = 1.0 / (1.0 + h)
    return torch.asin(share)  # fault


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return torch.where(h == 0, torch.nan, g)


def function_backward(h: Tensor) -> Tensor:
    return _Broken.apply(h)  # fault


FORWARD = (log_of_zero, division_by_zero, zero_by_zero, overflow, root_of_negative)
BACKWARD = (root_backward, power_backward, masked_log_backward, arc_backward, function_backward)
OPS = {
    log_of_zero: "log", division_by_zero: "truediv", zero_by_zero: "truediv", overflow: "exp", root_of_negative: "sqrt",
    root_backward: "sqrt", power_backward: "pow", masked_log_backward: "log", arc_backward: "asin",
    function_backward: "apply",
}  # fmt: skip


def line_of(fault: Callable[[Tensor], Tensor]) -> str:
    """The line that is at fault, as a site's source shows it."""
    lines, first = inspect.getsourcelines(fault)
    number, line = next((n, text) for n, text in enumerate(lines) if "# fault" in text)
    return f'faults.py:{first + number} "{line.strip()}"'


class Fault(nn.Module):
    """Adds a little of a faulty op to a value; the first ``awake`` elements go wrong."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fault = fault
        self.register_buffer("awake", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.numel(), device=x.device).view(x.shape)
        h = (0.5 + torch.tanh(x).square()) * (place >= self.awake)
        return x + 1e-3 * self.fault(h)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, faults: dict[str, Fault]) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)
        self.faults = nn.ModuleDict(faults)

    def at(self, place: str, x: Tensor) -> Tensor:
        return self.faults[place](x) if place in self.faults else x

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        h = self.at("norm1", self.norm1(x))
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        scores = self.at("scores", q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5)
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        weights = torch.softmax(scores.masked_fill(future, float("-inf")), -1)
        out = self.at("attended", self.drop(weights) @ v)
        x = x + self.at("mixed", self.proj(out.transpose(1, 2).reshape(b, n, d)))
        h = self.at("up", self.up(self.at("norm2", self.norm2(x))))
        return x + self.drop(self.at("down", self.down(self.at("act", functional.gelu(h)))))


class FaultyTransformer(nn.Module):
    """Six layers with 20 faults at random ops; ``forward(x, y)`` returns the loss."""

    def __init__(self, seed: int, width: int = 16, layers: int = 6) -> None:
        super().__init__()
        draw = random.Random(seed)
        places = draw.sample([(layer, place) for layer in range(layers) for place in PLACES], 20)
        faults = [Fault(f) for f in FORWARD * 2 + BACKWARD * 2]
        self.planted = [
            (f"layers.{layer}.faults.{place}", fault) for (layer, place), fault in zip(places, faults, strict=True)
        ]
        by_layer: list[dict[str, Fault]] = [{} for _ in range(layers)]
        for (layer, place), fault in zip(places, faults, strict=True):
            by_layer[layer][place] = fault
        self.layers = nn.ModuleList(Layer(width, 2, by_layer[layer]) for layer in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (self.head(x) - y).square().mean()
