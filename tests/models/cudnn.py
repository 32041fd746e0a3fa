"""cuDNN's recurrent layers, computed by torch's on the CPU: their arguments, reserve and weights are checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_OPS = {0: torch.rnn_relu, 1: torch.rnn_tanh, 2: torch.lstm, 3: torch.gru}


def _cudnn_rnn(x: Any, weight: Any, count: int, _: Any, h: Any, c: Any, mode: int, *rest: Any) -> tuple[Tensor, ...]:
    """Compute what cuDNN computes by torch's layer on the CPU; the reserve has the marks of a training call."""
    _, _, num_layers, batch_first, dropout, train, bidirectional, *_ = rest
    states = (h, c) if mode == 2 else h
    output, *last = _OPS[mode](x, states, weight, count >= 4, num_layers, dropout, train, bidirectional, batch_first)
    reserve = torch.full((16 if train else 0,), 7, dtype=torch.uint8)
    return output, last[0], last[1] if mode == 2 else x.new_empty(0), reserve, torch.cat([w.flatten() for w in weight])


def _cudnn_rnn_backward(
    x: Tensor, weight: list[Tensor], count: int, weights: Tensor, h: Tensor, c: Tensor | None, output: Tensor,
    grad_output: Tensor, grad_h: Tensor, grad_c: Tensor | None, mode: int, *rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    *settings, reserve, _ = rest
    assert reserve.numel() == 16, "it has no storage of its own"
    assert reserve.eq(7).all(), "the reserve is that of another call, or of a backward before"
    reserve.zero_()
    assert torch.equal(weights, torch.cat([w.flatten() for w in weight]))
    given = [t.detach().requires_grad_() for t in (x, h, *([] if c is None else [c]), *weight)]
    number = 2 + (c is not None)
    seeds = [grad_output, grad_h, *([] if grad_c is None else [grad_c])]

    def differentiate() -> tuple[Tensor, ...]:
        own = given[0], given[number:], count, None, given[1], given[2] if c is not None else None
        return torch.autograd.grad(_cudnn_rnn(*own, mode, *settings)[:number], given, seeds)

    with ThreadPoolExecutor(1) as pool:  # another thread, because autograd is off inside of an operator
        grads = pool.submit(differentiate).result()
    return grads[0], grads[1], x.new_empty(0) if c is None else grads[2], list(grads[number:])


@contextlib.contextmanager
def cudnn_on_cpu() -> Iterator[None]:
    """Give torch's operators of cuDNN's layers kernels on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_cudnn_rnn", _cudnn_rnn, "CPU")
    library.impl("_cudnn_rnn_backward", _cudnn_rnn_backward, "CPU")
    try:
        yield
    finally:
        library._destroy()
