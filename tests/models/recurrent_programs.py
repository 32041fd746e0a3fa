"""Random programs with loops over time in Python: cells, reads, masks, losses inside or outside, lists, two loops."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gradrewrite as gr

FEATURES, WIDTH = 3, 4


@dataclass(frozen=True)
class Choices:
    """What a program does."""

    cell: str
    read: str
    length: int
    batch: int
    mask: bool
    loss: str  # in the loop, behind it over all states, or of the last state
    feeds_back: bool  # an output of the iteration is an input of the next
    attention: bool
    is_given: bool  # the first state is an input
    second: str  # a further loop over the states: none, forward, or backward
    scaled: bool  # by the number of the iteration
    detached: bool  # a running mean without a gradient
    tapped: bool

    @classmethod
    def draw(cls, seed: int) -> Choices:
        """Draw them."""
        r = random.Random(seed)
        return cls(
            cell=r.choice(["gru", "lstm", "tanh", "residual", "module", "shared"]),
            read=r.choice(["unbind", "index", "chunk", "split", "window", "reversed", "list", "none"]),
            length=r.randint(5, 9),
            batch=r.randint(1, 3),
            mask=r.random() < 0.3,
            loss=r.choice(["inside", "list", "outside", "last"]),
            feeds_back=r.random() < 0.25,
            attention=r.random() < 0.25,
            is_given=r.random() < 0.3,
            second=r.choice(["", "", "forward", "backward"]),
            scaled=r.random() < 0.2,
            detached=r.random() < 0.2,
            tapped=r.random() < 0.2,
        )


class Step(nn.Module):
    """A cell of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.norm = nn.Linear(FEATURES + WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.norm(h + torch.tanh(self.there(torch.cat([x, h], -1))))


class Program(nn.Module):
    """One program."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self.choices = choices
        self.gru, self.lstm = nn.GRUCell(FEATURES, WIDTH), nn.LSTMCell(FEATURES, WIDTH)
        self.there, self.step = nn.Linear(FEATURES, WIDTH), Step()
        self.back, self.out, self.query = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, FEATURES),
            nn.Linear(WIDTH, FEATURES),
        )

    def rows(self, x: Tensor) -> list[Tensor]:
        """Return the input of each iteration, for the ways to read that make them first."""
        length = x.shape[1]
        match self.choices.read:
            case "unbind":
                return list(x.unbind(1))
            case "chunk":
                return [part[:, 0] for part in x.chunk(length, 1)]
            case "split":
                return [part.squeeze(1) for part in x.split(1, 1)]
            case "list":
                return [x[:, t] * 2 for t in range(length)]
        return []

    def read(self, x: Tensor, rows: list[Tensor], t: int) -> Tensor:
        """Return the input of iteration t."""
        match self.choices.read:
            case "index":
                return x[:, t]
            case "reversed":
                return x[:, x.shape[1] - 1 - t]
            case "window":
                return x[:, t : t + 2].mean(1)
            case "none":
                return x.mean(1)
        return rows[t]

    def advance(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next states."""
        match self.choices.cell:
            case "gru":
                return self.gru(x, h), c
            case "lstm":
                h, c = self.lstm(x, (h, c))
                return h, c
            case "tanh":
                return torch.tanh(self.there(x) + self.back(h)), c
            case "residual":
                return h + 0.1 * self.back(h).sin() + self.there(x), 0.5 * c + h
            case "module":
                return self.step(x, h), c
        return self.back(self.back(h).tanh() + self.there(x)).tanh(), c

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        """Return the loss."""
        o = self.choices
        h = given[0] if given else x.new_zeros(len(x), WIDTH)
        c, mean, last = x.new_zeros(len(x), WIDTH), x.new_zeros(WIDTH), x.new_zeros(len(x), FEATURES)
        rows, states, losses = self.rows(x), [], []
        loss: Any = 0.0
        for t in range(x.shape[1] - (o.read == "window")):
            e = self.given(x, rows, t, h, last)
            new, c = self.advance(e, h, c)
            h = self.masked(x[:, t, :1], new, h) if o.mask else new
            h = gr.tap(h, "state") if o.tapped else h
            h = h * (1 - 0.01 * t) if o.scaled else h
            if o.detached:
                mean = 0.9 * mean + 0.1 * h.detach().mean(0)
                h = h - 0.1 * mean
            last = self.out(h)
            states.append(h)
            if o.loss == "inside":
                loss = loss + (last - e).square().mean()
            if o.loss == "list":
                losses.append((last - e).square().mean())
        return loss + self.behind(states, losses)

    def given(self, x: Tensor, rows: list[Tensor], t: int, h: Tensor, last: Tensor) -> Tensor:
        """Return what an iteration is given: its input, what attention finds, and the last output."""
        e = self.read(x, rows, t)
        if self.choices.attention:
            weights = torch.softmax((self.query(h)[:, None] * x).sum(-1), -1)
            e = e + (weights[..., None] * x).sum(1)
        return e + 0.1 * last if self.choices.feeds_back else e

    def masked(self, x: Tensor, new: Tensor, h: Tensor) -> Tensor:
        """Keep the state of some rows."""
        keep = (x > -0.5).to(x.dtype)
        return keep * new + (1 - keep) * h

    def behind(self, states: list[Tensor], losses: list[Tensor]) -> Tensor:
        """Return the losses behind the loop."""
        o, loss = self.choices, torch.zeros(())
        match o.loss:
            case "list":
                loss = torch.stack(losses).sum()
            case "outside":
                loss = self.out(torch.stack(states, 1)).square().mean()
            case "last":
                loss = self.out(states[-1]).square().mean()
        if o.second:
            g, outputs = torch.zeros_like(states[0]), []
            for s in states if o.second == "forward" else reversed(states):
                g = torch.tanh(self.back(g) + s)
                outputs.append(g)
            loss = loss + torch.cat(outputs, -1).square().mean()
        return loss


def program(seed: int) -> tuple[Program, tuple[Tensor, ...], dict[str, Any]]:
    """Return a program with its inputs in float64."""
    choices = Choices.draw(seed)
    torch.manual_seed(seed)
    model = Program(choices).double()
    x = torch.randn(choices.batch, choices.length, FEATURES, dtype=torch.float64)
    given = (torch.randn(choices.batch, WIDTH, dtype=torch.float64),) if choices.is_given else ()
    return model, (x, *given), vars(choices)
