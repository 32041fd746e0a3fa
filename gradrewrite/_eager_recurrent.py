"""Recurrent layers as eager loops over time, for the oracle: with the values that have sites inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradrewrite.instrumentation.recurrent import RecurrentCall

RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
Note = Callable[[str, str, int, Tensor], None]  # of a layer (``l0_reverse``), a value of it, an iteration, a tensor


def run_recurrent(op: Any, args: Sequence[Any], dtype: torch.dtype, note: Note) -> tuple[Tensor, ...]:
    """Compute ``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu`` time step by time step.

    Args:
        op: One of ``RECURRENT``.
        args: Its arguments, of padded sequences.
        dtype: That of its output, which autocast decides.
        note: Called with each gate, hidden state and cell state.

    Returns:
        As ``op``: the output, then the last states.
    """
    call = RecurrentCall.of(op, args)
    assert call is not None
    with torch.autocast(call.x.device.type, enabled=False):
        x = (call.x.transpose(0, 1) if call.batch_first else call.x).to(dtype)
        last: list[Sequence[Tensor]] = []
        for layer in range(call.num_layers):
            x = F.dropout(x, call.dropout, call.train) if layer and call.dropout else x
            outputs = []
            for direction in range(call.num_directions):
                number = layer * call.num_directions + direction
                name = f"l{layer}{'_reverse' * direction}"
                states = [own[number].to(dtype) for own in call.states]
                parameters = [p.to(dtype) for p in call.parameters_of(number)]
                rows = list(x)[::-1] if direction else list(x)
                made, states = _run_layer(call, rows, states, parameters, lambda *one, name=name: note(name, *one))
                outputs.append(torch.stack(made[::-1] if direction else made))
                last.append(states)
            x = torch.cat(outputs, -1)
    finals = [torch.stack(own) for own in zip(*last, strict=True)]
    return (x.transpose(0, 1) if call.batch_first else x), *finals


def _run_layer(
    call: RecurrentCall,
    rows: Sequence[Tensor],
    states: list[Tensor],
    parameters: Sequence[Tensor],
    note: Callable[[str, int, Tensor], None],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs of one layer and direction in the order of execution, and its last states."""
    of_input, of_state, *rest = parameters
    bias_ih, bias_hh = (rest[0], rest[1]) if call.has_biases else (None, None)
    projection = rest[-1] if call.is_projected else None
    made = []
    for t, row in enumerate(rows):
        of_x, of_h = F.linear(row, of_input, bias_ih), F.linear(states[0], of_state, bias_hh)
        gates = of_h if call.op == torch.gru else of_x + of_h
        note("gates", t, gates)
        if call.op == torch.lstm:
            i, f, g, o = gates.chunk(4, -1)
            c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
            note("c", t, c)
            h = o.sigmoid() * c.tanh()
            states = [h if projection is None else F.linear(h, projection), c]
        elif call.op == torch.gru:
            (r, z, n), (r_h, z_h, n_h) = of_x.chunk(3, -1), gates.chunk(3, -1)
            update = (z + z_h).sigmoid()
            new = (n + (r + r_h).sigmoid() * n_h).tanh()
            states = [(1 - update) * new + update * states[0]]
        else:
            states = [gates.tanh() if call.op == torch.rnn_tanh else gates.relu()]
        note("h", t, states[0])
        made.append(states[0])
    return made, states
