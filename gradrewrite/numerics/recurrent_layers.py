"""Recurrent layers as single operators: those of torch's kernels, and one for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradrewrite.numerics.library import LIBRARY

LIBRARY.define(
    "recurrent(str op, Tensor x, Tensor[] states, Tensor[] parameters, bool has_biases, int num_layers, float dropout, "
    "bool train, bool bidirectional, bool batch_first) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _recurrent(op: str, x: Tensor, states: list[Tensor], parameters: list[Tensor], *rest: Any) -> list[Tensor]:
    """Run a recurrent layer of torch as it is, without gradients."""
    with torch.no_grad():
        own: Any = tuple(states) if op == "lstm" else states[0]
        found = getattr(torch, op)(x, own, parameters, *rest)
        return [t.clone() if any(t is s for s in states) else t.contiguous() for t in found]


def _fake_recurrent(op: str, x: Tensor, states: list[Tensor], parameters: list[Tensor], *rest: Any) -> list[Tensor]:
    num_directions = 2 if rest[4] else 1
    output = x.new_empty((*x.shape[:2], states[0].shape[-1] * num_directions))
    return [output, *(state.new_empty(state.shape) for state in states)]


LIBRARY.define(
    "lstm_layer(Tensor x, Tensor h, Tensor c, Tensor[] parameters, bool is_reversed, bool train) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "lstm_layer_backward(Tensor x, Tensor h, Tensor c, Tensor[] parameters, Tensor[] results, Tensor[] tangents, "
    "bool is_reversed) -> Tensor[]"
)


def _run_layer(x: Tensor, h: Tensor, c: Tensor, parameters: list[Tensor], is_reversed: bool, train: bool) -> Any:
    given = x, *parameters, h.unsqueeze(0), c.unsqueeze(0)
    rest: tuple[Any, ...] = is_reversed, [], _LSTM, h.shape[-1], 1, True, False, False, train
    with torch.set_grad_enabled(train):  # without it the kernel leaves out the workspace
        output, last_h, last_c, workspace = torch.ops.aten.mkldnn_rnn_layer.default(*given, *rest)
    shown = _shown(workspace, x, h) if train else x.new_empty((len(x), 0), dtype=torch.uint8)
    return output, last_h.squeeze(0), last_c.squeeze(0), shown


def _shown(workspace: Tensor, x: Tensor, h: Tensor) -> Tensor:
    """Return a workspace in a form of known size; its storage has all of it.

    Its size is oneDNN's matter, and 3.8 to 3.9 times that of the gates, but at least 28,672 bytes.
    """
    length, width = len(x), _workspace_width(h)
    if workspace.numel() < length * width:
        workspace.resize_(length * width)
    return workspace[: length * width].view(length, width)


def _workspace_width(h: Tensor) -> Any:
    return 15 * h.shape[0] * h.shape[1] * h.element_size()


def _fake_layer(x: Tensor, h: Tensor, c: Tensor, parameters: list[Tensor], is_reversed: bool, train: bool) -> Any:
    output = x.new_empty((*x.shape[:2], h.shape[-1]))
    workspace = x.new_empty((x.shape[0], _workspace_width(h) if train else 0), dtype=torch.uint8)
    return output, torch.empty_like(h), torch.empty_like(c), workspace


def _run_layer_backward(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    parameters: list[Tensor],
    results: list[Tensor],
    tangents: list[Tensor],
    is_reversed: bool,
) -> list[Tensor]:
    output, last_h, last_c, workspace = results
    whole = torch.empty(0, dtype=torch.uint8).set_(workspace.untyped_storage())
    states = h.unsqueeze(0), c.unsqueeze(0), output, last_h.unsqueeze(0), last_c.unsqueeze(0)
    seeds = tangents[0], tangents[1].unsqueeze(0), tangents[2].unsqueeze(0)
    rest: tuple[Any, ...] = is_reversed, _LSTM, h.shape[-1], 1, True, True, False, [], False, whole
    found = torch.ops.aten.mkldnn_rnn_layer_backward.default(x, *parameters, *states, *seeds, *rest)
    return [found[0], found[5].view_as(h), found[6].view_as(c), *found[1:5]]


def _fake_layer_backward(x: Tensor, h: Tensor, c: Tensor, parameters: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, h, c, *parameters)]


for _name, _implementation, _fake in (
    ("recurrent", _recurrent, _fake_recurrent),
    ("lstm_layer", _run_layer, _fake_layer),
    ("lstm_layer_backward", _run_layer_backward, _fake_layer_backward),
):
    LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gradrewrite::{_name}", _fake, lib=LIBRARY)


def _note(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, h, c, parameters, ctx.is_reversed, _ = inputs
    ctx.num_parameters = len(parameters)
    ctx.mark_non_differentiable(output[3])
    ctx.save_for_backward(x, h, c, *parameters, *output)


def _differentiate(ctx: Any, *gradients: Tensor) -> Any:
    x, h, c, *rest = ctx.saved_tensors
    parameters, results = rest[: ctx.num_parameters], rest[ctx.num_parameters :]
    tangents = [g.contiguous() for g in gradients[:3]]
    found = OP_LSTM_BACKWARD(x, h, c, parameters, results, tangents, ctx.is_reversed)
    return *found[:3], list(found[3:]), None, None


torch.library.register_autograd("gradrewrite::lstm_layer", _differentiate, setup_context=_note, lib=LIBRARY)

OP_RECURRENT = torch.ops.gradrewrite.recurrent.default
OP_LSTM, OP_LSTM_BACKWARD = torch.ops.gradrewrite.lstm_layer.default, torch.ops.gradrewrite.lstm_layer_backward.default
_LSTM = 2  # number of LSTMs among oneDNN's kinds of recurrent layers


def has_fused_lstm(x: Tensor, *, is_projected: bool) -> bool:
    """Whether torch runs an LSTM layer with this input by oneDNN's kernel."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled) or is_projected:
        return False
    is_known = x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return x.device.type == "cpu" and is_known


def fused_lstm(
    x: Tensor, h: Tensor, c: Tensor, parameters: Sequence[Tensor], *, is_reversed: bool, train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer and direction of an LSTM by oneDNN's kernel.

    ``x`` is ``[T, B, features]``, ``h`` and ``c`` are ``[B, width]``; the parameters are two weights, and two biases or
    none. Returns the output ``[T, B, width]`` and the last states. Without ``train`` it has no derivative.
    """
    known = list(parameters)
    if len(known) == 2:
        known += [x.new_zeros(known[0].shape[0]), x.new_zeros(known[0].shape[0])]
    output, last_h, last_c, _ = OP_LSTM(x.contiguous(), h.contiguous(), c.contiguous(), known, is_reversed, train)
    return output, last_h, last_c
