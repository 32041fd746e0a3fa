"""Loops in Python that are rolled, or stay unrolled for a reason; each is a forward of one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr

STEPS = 7
Forward = Callable[[Any, Tensor], Any]
FORWARDS: dict[str, Forward] = {}
REASONS: dict[str, str] = {}  # parts of the texts for loops that stay unrolled, by the name of the case


class LoopCase(nn.Module):
    """A module with one of the forwards."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.a, self.embed, self.logits = nn.Linear(4, 4), nn.Embedding(8, 4), nn.Linear(4, 8)
        self.lstm, self.norm = nn.LSTM(4, 4, batch_first=True), nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(STEPS))

    def forward(self, x: Tensor) -> Any:
        return FORWARDS[self.name](self, x)


def case(reason: str = "") -> Callable[[Forward], Forward]:
    """Add a forward under its name; a loop without a reason is rolled."""

    def add(forward: Forward) -> Forward:
        FORWARDS[forward.__name__] = forward
        if reason:
            REASONS[forward.__name__] = reason
        return forward

    return add


@case("draws random numbers")
def dropout(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS):
        h = F.dropout(s.a(h).tanh(), 0.5) + x[:, t]
    return h.sum()


@case("may write to a buffer")
def running_mean(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS):
        h = s.norm(s.a(h)) + x[:, t]
    return h.square().sum()


@case("has other arguments in each iteration")
def written_into(s: Any, x: Tensor) -> Tensor:
    h, out = x[:, 0], torch.zeros(3, STEPS, 4, dtype=x.dtype)
    for t in range(STEPS):
        h = s.a(h).tanh() + x[:, t]
        out[:, t] = h
    return out.square().sum()


@case("higher-order operator")
def checkpoints(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS):
        h = checkpoint(lambda h, e: s.a(h).tanh() + e, h, x[:, t], use_reentrant=False)
    return h.square().sum()


@case("has other arguments in each iteration")
def layers_of_lstm(s: Any, x: Tensor) -> Tensor:
    h = x
    for _ in range(STEPS):
        h = s.lstm(h)[0] + x
    return h.square().sum()


@case("other modules (layers.0, layers.1)")
def layers(s: Any, x: Tensor) -> Tensor:
    for layer in s.layers:
        x = layer(x).tanh()
    return x.square().sum()


@case("makes (3, 1, 4) torch.float64 and (3, 2, 4) torch.float64")
def prefixes(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS):
        h = s.a(h).tanh() + x[:, : t + 1].mean(1)
    return h.square().sum()


@case("makes (3, 6, 4) torch.float64 and (3, 5, 4) torch.float64")
def shrinking(s: Any, x: Tensor) -> Tensor:
    h = x
    for _ in range(STEPS - 1):
        h = s.a(h[:, 1:]).tanh()
    return h.square().sum()


@case()
def two_before(s: Any, x: Tensor) -> Tensor:
    a = b = x[:, 0]
    for _ in range(STEPS):
        a, b = s.a(a).tanh() + 0.3 * b, a
    return a.sum()


@case()
def two_before_in_list(s: Any, x: Tensor) -> Tensor:
    states = [x[:, 0], x[:, 1]]
    for _ in range(STEPS):
        states.append(s.a(states[-1]).tanh() + 0.3 * states[-2])
    return torch.stack(states).square().sum()


@case()
def refined(s: Any, x: Tensor) -> Tensor:
    """Long loops in a short one: each of them is rolled."""
    states = list(x.unbind(1))
    for _ in range(4):
        h = x[:, 0]
        for t in range(STEPS):
            h = states[t] = s.a(h + states[t]).tanh()
    return torch.stack(states).square().sum()


@case()
def nested(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS):
        for _ in range(3):
            h = s.a(h).tanh()
        h = h + x[:, t]
    return h.square().sum()


@case()
def inside_checkpoint(s: Any, x: Tensor) -> Tensor:
    def run(h: Tensor) -> Tensor:
        for t in range(STEPS):
            h = s.a(h).tanh() + x[:, t]
        return h

    return checkpoint(run, x[:, 0], use_reentrant=False).square().sum()


@case()
def beside_lstm(s: Any, x: Tensor) -> Tensor:
    y, h = s.lstm(x)[0], x[:, 0]
    for t in range(STEPS):
        h = s.a(h).tanh() + y[:, t]
    return h.square().sum()


@case()
def tapped(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS):
        h = gr.tap(s.a(h).tanh() + x[:, t], "state")
    return h.square().sum()


@case()
def detached_states(s: Any, x: Tensor) -> Tensor:
    h, out = x[:, 0], []
    for t in range(STEPS):
        h = s.a(h.detach()).tanh() + x[:, t]
        out.append(h)
    return torch.stack(out).square().sum()


@case()
def last_of_detached(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS):
        h = s.a(h.detach()).tanh() + x[:, t]
    return h.square().sum()


@case()
def mean_without_gradient(s: Any, x: Tensor) -> Tensor:
    h, mean = x[:, 0], torch.zeros(4, dtype=x.dtype)
    for t in range(STEPS):
        h = s.a(h).tanh() + x[:, t]
        mean = 0.9 * mean + h.detach().mean(0)
        h = h - 0.1 * mean
    return h.square().sum()


@case()
def unused_carry(s: Any, x: Tensor) -> Tensor:
    h, unused = x[:, 0], torch.zeros_like(x[:, 0])
    for t in range(STEPS):
        h = s.a(h).tanh() + x[:, t]
        unused = 0.5 * unused + h
    return h.square().sum()


@case()
def greedy(s: Any, x: Tensor) -> Tensor:
    token, h, loss = torch.zeros(3, dtype=torch.long), x[:, 0], torch.zeros((), dtype=x.dtype)
    for _ in range(STEPS):
        h = s.a(h + s.embed(token)).tanh()
        logits = s.logits(h)
        token, loss = logits.argmax(-1), loss + logits.logsumexp(-1).mean()
    return loss


@case()
def without_carry(s: Any, x: Tensor) -> Tensor:
    return torch.stack([s.a(x[:, t]).tanh() for t in range(STEPS)], 1).square().sum()


@case()
def made_first(s: Any, x: Tensor) -> Tensor:
    h, given = x[:, 0], [s.a(x[:, t]).tanh() for t in range(STEPS)]
    for e in given:
        h = torch.tanh(s.a(h) + e)
    return h.square().sum()


@case()
def returned(s: Any, x: Tensor) -> Any:
    h, out = x[:, 0], []
    for t in range(STEPS):
        h = s.a(h).tanh() + x[:, t]
        out.append(h)
    return torch.stack(out).square().sum() + h.sum(), h, out[3], *out


@case()
def list_of_losses(s: Any, x: Tensor) -> Tensor:
    h, losses = x[:, 0], []
    for t in range(STEPS):
        h = s.a(h).tanh() + x[:, t]
        losses.append(h.square().mean())
    return sum(losses)


@case()
def called_before_and_after(s: Any, x: Tensor) -> Tensor:
    h = s.a(s.a(x[:, 0]).relu()).sigmoid()
    for t in range(STEPS):
        h = s.a(h).tanh() + x[:, t]
    return s.a(h).square().sum()


@case()
def numbers(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS):
        h = s.a(h).tanh() + 0.1 * t * x[:, t]
    return h.square().sum()


@case()
def called_twice(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS):
        h = s.a(s.a(h).tanh() * x[:, t]).tanh() + x[:, t]
    return h.square().sum()


@case()
def windows(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS - 1):
        h = s.a(h).tanh() + x[:, t : t + 2].mean(1)
    return h.square().sum()


@case()
def backward_in_time(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in reversed(range(STEPS)):
        h = s.a(h).tanh() + x[:, t]
    return h.square().sum()


@case()
def part_without_gradient(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS):
        with torch.no_grad():
            gate = s.a(h).sigmoid()
        h = s.a(h * gate).tanh() + x[:, t]
    return h.square().sum()


@case()
def written_behind(s: Any, x: Tensor) -> Tensor:
    h, states = x[:, 0], []
    for t in range(STEPS):
        h = s.a(h).tanh() + x[:, t]
        states.append(h)
    out = torch.zeros(3, STEPS, 4, dtype=x.dtype)
    out[:] = torch.stack(states, 1)
    return out.square().sum()


@case()
def same_tensors(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS):
        h = (s.a(h).contiguous().to(x.dtype).view(3, 4) + x[:, t]).reshape(3, 4)
    return h.square().sum()


@case()
def first_value_with_gradient(s: Any, x: Tensor) -> Tensor:
    h = before = s.a(x[:, 0])
    for _ in range(STEPS):
        h = (s.a(h) + before).tanh()
        before = h.detach()
    return h.sum()


@case("mul_ (loop_cases.py:")
def written_states(s: Any, x: Tensor) -> Tensor:
    h, states = x[:, 0], []
    for t in range(STEPS):
        h = s.a(h) + x[:, t]
        states.append(h)
    h.mul_(2)
    return torch.stack(states).sum()


@case()
def written_stack(s: Any, x: Tensor) -> Tensor:
    h, states = x[:, 0], []
    for t in range(STEPS):
        h = s.a(h) + x[:, t]
        states.append(h)
    y = torch.stack(states)
    y.mul_(2)
    return y.sum() + states[3].sum()


@case("changes a tensor of the loop in place")
def written_buffer(s: Any, x: Tensor) -> Tensor:
    h, mean = x[:, 0], s.norm.running_mean
    for t in range(STEPS):
        h = s.a(h - mean).tanh() + x[:, t]
    mean.mul_(0.9).add_(h.detach().mean(0))
    return h.square().sum()


@case("may write to a buffer")
def functional_norm(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(STEPS):
        h = F.batch_norm(s.a(h), s.norm.running_mean, s.norm.running_var, training=True) + x[:, t]
    return h.square().sum()


@case()
def joined(s: Any, x: Tensor) -> Tensor:
    h, states = x[:, 0], []
    for t in range(STEPS):
        h = s.a(h).tanh() + x[:, t]
        states.append(h)
    weights = torch.arange(STEPS, dtype=x.dtype).view(1, STEPS, 1)
    first = (torch.stack(states, axis=1) * weights).sum()  # type: ignore[call-arg]
    return first + torch.stack(states, 1).view(-1, 4).square().sum() + torch.cat(states, -1).view(-1).sum()


@case()
def one_behind_the_other(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for e in x.unbind(1):
        h = s.a(h).tanh() + e
    for e in torch.split(tensor=x, split_size_or_sections=1, dim=1):
        h = s.a(h).sin() + e[:, 0]
    return h.square().sum()


@case()
def equal_line_behind(s: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for _ in range(5):
        h = s.a(h).tanh()
    h = h.sin()
    h = s.a(h).tanh()
    return h.sum()


@case()
def nothing_read(s: Any, x: Tensor) -> Tensor:
    return torch.stack([s.a(x[:, 0]).tanh() for _ in range(STEPS)]).square().sum()


@case()
def beginning_alike(s: Any, x: Tensor) -> Tensor:
    h = c = x[:, 0]
    for t in range(STEPS):
        z = s.a(h + c).tanh()
        h, c = z + x[:, t], z * x[:, t]
    for _ in range(STEPS):
        z = s.a(h + c).tanh()
        h, c = z.sin(), z.cos()
    return (h + c).square().sum()


@case("is contiguous in a loop, and was not")
def made_contiguous(s: Any, x: Tensor) -> Tensor:
    h, y = x[:, 0], s.a(x)
    for t in range(STEPS):
        h = s.a(h).tanh() + y[:, t].contiguous()
    return h.square().sum()


@case()
def some_read_before(s: Any, x: Tensor) -> Tensor:
    rows = x.unbind(1)
    h = rows[0] + rows[1] + rows[2]
    for e in rows[2:]:
        h = s.a(h).tanh() + e
    return h.square().sum()


@case()
def made_backward(s: Any, x: Tensor) -> Tensor:
    rows, h = [x[:, STEPS - 1 - t] for t in range(STEPS)], x[:, 0]
    for e in reversed(rows):
        h = s.a(h).tanh() + e
    return h.square().sum()
