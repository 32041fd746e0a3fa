"""Programs in which a mask discards a value whose derivative is infinite, and the same with the mask in front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

INF = float("inf")


@dataclass(frozen=True)
class Masked:
    """A program and its input; ``covered`` selects what is kept before the op, and not behind it."""

    program: Callable[[Tensor, bool], Tensor]
    x: Tensor


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def exp_behind_min(x: Tensor, covered: bool) -> Tensor:
    is_kept = torch.arange(8) < 5
    y = torch.where(is_kept, x, 0).exp() if covered else torch.where(is_kept, x, x + 1000).exp()
    return (torch.minimum(y, y.clamp(0.8, 1.2)) * is_kept).sum()


def _attention(x: Tensor, covered: bool) -> tuple[Tensor, Tensor]:
    is_valid = torch.arange(6) != 2
    is_blocked = torch.zeros(6, 6, dtype=torch.bool).index_fill(0, torch.tensor([2]), value=not covered)
    return torch.softmax((x @ x.mT).masked_fill(is_blocked, -INF), -1) @ x, is_valid


def softmax_and_where(x: Tensor, covered: bool) -> Tensor:
    out, is_valid = _attention(x, covered)
    return torch.where(is_valid[:, None], out, 0).square().sum()


def softmax_and_index(x: Tensor, covered: bool) -> Tensor:
    out, is_valid = _attention(x, covered)
    return out[is_valid].square().sum()


def acos_at_one(x: Tensor, covered: bool) -> Tensor:
    is_kept = x.detach() < 1
    y = torch.where(is_kept, x, 0) if covered else x.clamp(-1, 1)
    return (torch.acos(y) * is_kept).sum()


def sqrt_twice(x: Tensor, covered: bool) -> Tensor:
    is_kept = x.detach() > 0
    y = torch.where(is_kept, x, 1) if covered else x * is_kept
    return (y.sqrt().sqrt() * is_kept).sum()


def log1p_of_saturated(x: Tensor, covered: bool) -> Tensor:
    p = torch.sigmoid(x.to(torch.bfloat16))
    is_kept = p.detach() < 1
    p = torch.where(is_kept, p, 0) if covered else p
    return torch.where(is_kept, torch.log1p(-p), 0).float().sum()


def divergence(x: Tensor, covered: bool) -> Tensor:
    logits = x.roll(1, 0).masked_fill(torch.arange(8) > 5, -INF)
    p, q = x.softmax(-1), logits.softmax(-1)
    is_kept = torch.arange(8) <= 5
    if covered:
        q = torch.where(is_kept, q, 1)
        return torch.where(is_kept, p * (p.log() - q.log()), 0).sum()
    return (p * (p.log() - q.log())).nan_to_num(0, 0, 0).sum()


def polar_of_zeros(x: Tensor, covered: bool) -> Tensor:
    is_kept = x.detach().abs().sum(0) > 0
    a, b = torch.where(is_kept, x, 1) if covered else x * is_kept
    return ((torch.atan2(a, b) + torch.hypot(a, b)) * is_kept).sum()


def norm_of_a_zero_row(x: Tensor, covered: bool) -> Tensor:
    is_kept = torch.arange(4) != 1
    rows = torch.where(is_kept[:, None], x, 1) if covered else x * is_kept[:, None]
    unit = rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return torch.where(is_kept[:, None], unit, 0)[:, 0].sum()


PROGRAMS = {
    "exp behind min": Masked(exp_behind_min, _drawn(4, 8)),
    "softmax, where": Masked(softmax_and_where, _drawn(6, 6)),
    "softmax, index": Masked(softmax_and_index, _drawn(6, 6)),
    "acos at 1": Masked(acos_at_one, torch.tensor([0.5, 1.0, -0.25, 1.0])),
    "sqrt at 0, twice": Masked(sqrt_twice, torch.tensor([0.5, 0.0, 4.0, -1.0])),
    "log1p, saturated": Masked(log1p_of_saturated, torch.tensor([0.5, 20.0, -3.0, 1.0])),
    "divergence": Masked(divergence, _drawn(4, 8)),
    "polar of zeros": Masked(polar_of_zeros, torch.stack([_drawn(4), _drawn(4) * 2]) * torch.tensor([1, 0, 1, 1])),
    "norm of a zero row": Masked(norm_of_a_zero_row, _drawn(4, 3)),
}


class Program(nn.Module):
    """A program as a model."""

    def __init__(self, name: str, *, covered: bool = False) -> None:
        super().__init__()
        self.name, self.covered = name, covered

    def forward(self, x: Tensor) -> Tensor:
        return PROGRAMS[self.name].program(x, self.covered)


def gradient(model: Callable[[Tensor], Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of the input."""
    x = PROGRAMS[name].x.clone().requires_grad_()
    loss = model(x)
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad
