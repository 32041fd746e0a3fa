"""Recurrent layers in a module, and loops over their cells with hooks in each time step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Hook = Callable[[Tensor], Tensor | None]


class Recurrent(nn.Module):
    """A recurrent layer; returns its output, then its last states."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.rec = layer

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        given: Any = (states if len(states) > 1 else states[0]) if states else None
        output, last = self.rec(x, given)
        return output, *(last if isinstance(last, tuple) else (last,))


def loop_over_cells(
    layer: nn.RNNBase, x: Tensor, hooks: dict[str, Callable[[int], Hook | None]], states: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Compute one layer and direction, ``x`` of ``[T, B, features]``, time step by time step.

    ``hooks`` give the hook of the errors of a value (``"h"``, ``"c"``, ``"gates"``) in an iteration.
    """
    carried = list(states) or [x.new_zeros(x.shape[1], layer.hidden_size) for _ in range(1 + (layer.mode == "LSTM"))]
    bias = layer.bias_hh_l0 if layer.mode == "GRU" else layer.bias_ih_l0 + layer.bias_hh_l0
    given = x @ layer.weight_ih_l0.t() + (layer.bias_ih_l0 if layer.mode == "GRU" else bias)
    outputs = []

    def hooked(value: Tensor, name: str, t: int) -> Tensor:
        hook = hooks[name](t) if name in hooks else None
        if hook is not None:
            value.register_hook(hook)
        return value

    for t, g in enumerate(given.unbind(0)):
        if layer.mode == "GRU":
            gates = hooked(carried[0] @ layer.weight_hh_l0.t() + bias, "gates", t)
            (r, z, n), (hr, hz, hn) = g.chunk(3, -1), gates.chunk(3, -1)
            z, n = (z + hz).sigmoid(), (n + (r + hr).sigmoid() * hn).tanh()
            carried = [hooked((1 - z) * n + z * carried[0], "h", t)]
        elif layer.mode == "LSTM":
            gates = hooked(g + carried[0] @ layer.weight_hh_l0.t(), "gates", t)
            i, f, n, o = gates.chunk(4, -1)
            c = hooked(f.sigmoid() * carried[1] + i.sigmoid() * n.tanh(), "c", t)
            carried = [hooked(o.sigmoid() * c.tanh(), "h", t), c]
        else:
            gates = hooked(g + carried[0] @ layer.weight_hh_l0.t(), "gates", t)
            carried = [hooked(gates.tanh() if layer.mode == "RNN_TANH" else gates.relu(), "h", t)]
        outputs.append(carried[0])
    return torch.stack(outputs), *(own.unsqueeze(0) for own in carried)
