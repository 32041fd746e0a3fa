"""Programs in which a value has several uses, and hooks of eager autograd on one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr

Hook = Callable[[Tensor], Tensor]
WIDTH = 6


class Program(nn.Module):
    """A model that names its uses: ``self.use(name, value)`` is a use of the value by itself."""

    def __init__(self, hooks: Mapping[str, Hook] | None = None) -> None:
        super().__init__()
        self.hooks = hooks  # None in a model that a policy is for
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def use(self, name: str, value: Tensor) -> Tensor:
        if self.hooks is None:
            return value
        value = value * 1
        if name in self.hooks and value.requires_grad:
            value.register_hook(self.hooks[name])
        return value


class Head(nn.Module):
    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        self.a, self.act = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.act(self.a(x)) * x.sigmoid() * scale


class Heads(Program):
    """Two heads, one of which is called twice, a view and a cast that several read."""

    def build(self) -> None:
        self.body, self.policy, self.value = nn.Linear(WIDTH, WIDTH), Head(), Head()

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        last = h[:, -1]
        given = self.use("value", h)
        out = self.policy(self.use("policy", h)).sum() + self.policy(self.use("policy#1", h), scale=2.0).square().sum()
        seen = given[:, -1] if self.hooks else last
        return out + self.value(seen).exp().mean() + (last * self.use("mul", h).mean(1)).sum()


class Attention(nn.Module):
    """Reads its input three times, and writes to what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        out += x
        return out


class Block(Program):
    """A residual block, in an activation checkpoint or around one."""

    way = ""

    def build(self) -> None:
        self.norm, self.attn, self.head = nn.LayerNorm(WIDTH), Attention(), Head()
        self.inner = nn.Sequential(Head(), Head())

    def body(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return h + self.attn(self.use("attn", h)) + self.inner(self.use("inner", h))

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x) + x
        if self.way == "checkpoint":
            x = checkpoint(self.body, x, use_reentrant=False)
        else:
            x = self.body(x)
        return self.head(self.use("head#1", x)).sum() + x.square().mean()


class Recompute(Block):
    way = "checkpoint"


class Around(Program):
    """An activation checkpoint inside of the module that uses the value, which it also reads outside of it."""

    def build(self) -> None:
        self.body, self.mlp = nn.Linear(WIDTH, WIDTH), Checkpointed()

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.mlp(self.use("mlp", h)).sum() + h.square().sum()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.head, x, use_reentrant=False) * x


class Nested(Program):
    """A module in a module, both of which read the value."""

    def build(self) -> None:
        self.body, self.outer = nn.Linear(WIDTH, WIDTH), Outer(self)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.outer(self.use("outer", h)).sum() + h.exp().mean()


class Outer(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.inner, self.program = Head(), (program,)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.program[0].use("inner", x)) * x


class InPlace(Program):
    """Uses that overwrite the value, and read what they have written."""

    def build(self) -> None:
        self.body, self.act, self.head = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), Head()

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        y = h.mean() * 3
        h = self.use("act", h)
        self.act(h)
        return self.head(self.use("head", h)).sum() + h.square().sum() + y


class Selections(Program):
    """Parts of one value: of a split, of views of views, transposed."""

    def build(self) -> None:
        self.body, self.left, self.right = nn.Linear(WIDTH, 2 * WIDTH), Head(), Head()

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        left, right = h.chunk(2, -1)
        if self.hooks:
            left = self.use("left", h).chunk(2, -1)[0]
            right = self.use("right", h).chunk(2, -1)[1]
        return self.left(left.transpose(0, 1)).sum() + self.right(right).square().sum() + h.chunk(2, -1)[1].exp().mean()


class Recurrence(Program):
    """A cell in a Python loop, with a head at each step."""

    steps = 7

    def build(self) -> None:
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), Head()

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], WIDTH)
        total = x.new_zeros(())
        for t in range(self.steps):
            h = self.cell(x[:, t], self.use(f"cell#{t}", h))
            total = total + self.head(self.use(f"head#{t}", h)).square().mean()
        return total


class Lstm(Program):
    """Outputs of a recurrent layer."""

    def build(self) -> None:
        self.lstm, self.head, self.other = nn.LSTM(WIDTH, WIDTH, batch_first=True), Head(), Head()

    def forward(self, x: Tensor) -> Tensor:
        y, (h, _) = self.lstm(x)
        return self.head(self.use("head", y)).sum() + self.other(y).square().sum() + self.other(h).sum()


def clamp(g: Tensor) -> Tensor:
    return g.clamp(-2e-3, 2e-3)


def norm_clip(g: Tensor) -> Tensor:
    norm = g.norm()
    return torch.where(norm > 0.01, g * (0.01 / norm), g)


@dataclass(frozen=True)
class Case:
    """A policy, and the hooks that are equal to it."""

    program: type[Program]
    rules: Mapping[str, Any]  # action by pattern
    hooks: Mapping[str, Hook]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def policy(self) -> list[gr.Rule]:
        return [gr.on(pattern, action) for pattern, action in self.rules.items()]


_CLIP, _NORM, _ZERO = gr.passes.ClipByValue(2e-3), gr.passes.ClipByNorm(0.01), gr.passes.Zero()
_HALF = gr.passes.Scale(0.5)
_EACH_CELL = {f"cell#{t}": clamp for t in range(1, 7)}
CASES: dict[str, Case] = {
    "head": Case(Heads, {"error:/tanh->policy": _CLIP}, {"policy": clamp, "policy#1": clamp}),
    "second call": Case(Heads, {"error:/tanh->policy#1": _ZERO}, {"policy#1": torch.zeros_like}),
    "view": Case(Heads, {"error:/tanh->value": _NORM}, {"value": norm_clip}),
    "op": Case(Heads, {"error:/tanh->/mean": _HALF}, {"mul": lambda g: g * 0.5}),
    "several": Case(
        Heads,
        {"error:/tanh->*": lambda g: g.clamp(-2e-3, 2e-3)},
        {"policy": clamp, "policy#1": clamp, "value": clamp},
    ),
    "attention": Case(Block, {"error:norm->*attn": _NORM}, {"attn": norm_clip}),
    "checkpoint": Case(Recompute, {"error:norm->attn": _NORM, "error:norm->inner": _ZERO}, {
        "attn": norm_clip, "inner": torch.zeros_like,
    }),
    "behind a checkpoint": Case(Recompute, {"error:/add#2->head": _CLIP}, {"head#1": clamp}),
    "around a checkpoint": Case(Around, {"error:body->mlp": _NORM}, {"mlp": norm_clip}),
    "nested": Case(Nested, {"error:body->outer.inner": _CLIP, "error:body->outer": _NORM}, {
        "inner": clamp, "outer": norm_clip,
    }),
    "outermost": Case(Nested, {"error:body->outer*": _NORM}, {"outer": norm_clip}),
    "in place": Case(InPlace, {"error:body->act": _HALF, "error:act->head": _CLIP}, {
        "act": lambda g: g * 0.5, "head": clamp,
    }),
    "selections": Case(Selections, {"error:body->left": _CLIP, "error:body->right": _ZERO}, {
        "left": clamp, "right": torch.zeros_like,
    }),
    "lstm": Case(Lstm, {"error:lstm->head": _NORM}, {"head": norm_clip}),
    "truncated": Case(Recurrence, {"error:cell->cell": _ZERO}, dict.fromkeys(_EACH_CELL, torch.zeros_like)),
    "truncated once": Case(Recurrence, {"error:cell#3->cell": _ZERO}, {"cell#4": torch.zeros_like}),
    "each step": Case(Recurrence, {"error:cell->cell": _CLIP}, _EACH_CELL),
    "step and head": Case(
        Recurrence,
        {"error:cell->head": _NORM, "error:cell->cell": _CLIP},
        {**_EACH_CELL, **{f"head#{t}": norm_clip for t in range(7)}},
    ),
}  # fmt: skip
CASES |= {
    f"rolled {name}": Case(case.program, case.rules, case.hooks, {"loops": "rolled"})
    for name, case in CASES.items()
    if case.program is Recurrence
}


def build(case: Case, *, is_by_hand: bool) -> Any:
    """Return the program in float64, with hooks or with the policy."""
    torch.manual_seed(0)
    model = case.program(case.hooks if is_by_hand else None).double()
    return model if is_by_hand else gr.transform(model, case.policy, **case.options)


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
