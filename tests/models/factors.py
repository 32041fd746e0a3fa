"""Tensor functions whose ops have a factor, for gradients of matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Function = Callable[[Tensor, Tensor], Tensor]


def _rows(t: Tensor) -> Tensor:
    return t.reshape(t.shape[0], -1)


def _stack(t: Tensor) -> Tensor:
    return torch.stack([_rows(t), _rows(t).cos()])


def _square(t: Tensor) -> Tensor:
    return _rows(t) @ _rows(t).T


# From a gradient and another tensor of its shape to a replacement. Of every op with ``alpha``, ``beta`` or ``value``.
FUNCTIONS: Mapping[str, Function] = {
    "add": lambda g, p: g.add(p, alpha=0.25),
    "add a product": lambda g, p: torch.add(p, g, alpha=0.25),
    "add a number": lambda g, p: torch.ops.aten.add.Scalar(g, 2.0, 0.25),
    "add in place": lambda g, p: g.clone().add_(p, alpha=0.25),
    "sub": lambda g, p: g.sub(p, alpha=0.25),
    "subtract": lambda g, p: torch.subtract(g, p, alpha=0.25),
    "rsub": lambda g, p: torch.rsub(p, g, alpha=0.25),
    "lerp": lambda g, p: g.lerp(p, 0.25),
    "addmm": lambda g, p: torch.addmm(_rows(p), _square(p), _rows(g), beta=0.5, alpha=0.25).reshape(g.shape),
    "addmm without the sum": lambda g, p: torch.addmm(_rows(p) / 0, _square(p), _rows(g), beta=0, alpha=2).reshape(
        g.shape
    ),
    "addmv": lambda g, p: g + torch.addmv(_rows(p)[:, 0], _square(p), _rows(g)[:, 0], beta=0.5, alpha=0.25).sum(),
    "addr": lambda g, p: torch.addr(_rows(g), _rows(p)[:, 0], _rows(p)[0], beta=0.5, alpha=0.25).reshape(g.shape),
    "addbmm": lambda g, p: torch.addbmm(
        _rows(p), _square(p).expand(2, -1, -1), _stack(g), beta=0.5, alpha=0.25
    ).reshape(g.shape),
    "baddbmm": lambda g, p: torch.baddbmm(
        _stack(p), _square(p).expand(2, -1, -1), _stack(g), beta=0.5, alpha=0.25
    )[0].reshape(g.shape),
    "addcmul": lambda g, p: torch.addcmul(g, p, p, value=0.25),
    "addcdiv": lambda g, p: torch.addcdiv(g, p, p.abs() + 1, value=0.25),
    "foreach add": lambda g, p: torch._foreach_add([g, g], [p, p], alpha=0.25)[0],
    "foreach add of one": lambda g, p: torch._foreach_add([g, g], p.mean(), alpha=0.25)[0],
    "foreach sub": lambda g, p: torch._foreach_sub([g, g], [p, p], alpha=0.25)[1],
    "foreach addcmul": lambda g, p: torch._foreach_addcmul([g, g], [p, p], [p, p], [0.5, 0.25])[1],
    "foreach addcdiv": lambda g, p: torch._foreach_addcdiv([g, g], [p, p], [p.cosh(), p.cosh()], 0.25)[1],
    "index add": lambda g, p: g.index_add(0, torch.arange(len(g), device=g.device), p, alpha=0.25),
}  # fmt: skip
