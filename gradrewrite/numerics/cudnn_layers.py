"""Recurrent layers by cuDNN: one operator for all layers and directions of a call, and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradrewrite.numerics.library import LIBRARY

# cuDNN's numbers of recurrent layers, as torch.backends.cudnn.rnn has them where cuDNN is there.
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_SETTINGS = "str op, int num_layers, bool bidirectional, bool train"

LIBRARY.define(f"cudnn_layers(Tensor x, Tensor[] states, Tensor[] parameters, {_SETTINGS}) -> Tensor[]")
LIBRARY.define(
    "cudnn_layers_backward(Tensor x, Tensor[] states, Tensor[] parameters, Tensor[] results, Tensor[] tangents, "
    f"{_SETTINGS}) -> Tensor[]"
)


def has_cudnn(x: Tensor) -> bool:
    """Whether torch runs a recurrent layer with this input by cuDNN."""
    return x.device.type == "cuda" and torch.backends.cudnn.enabled and torch.cudnn_is_acceptable(x)


def _settings(
    states: Sequence[Tensor],
    parameters: Sequence[Tensor],
    op: str,
    num_layers: int,
    bidirectional: bool,
    train: bool,
) -> tuple[int, tuple[Any, ...]]:
    """Return the number of parameters of a layer and direction, and the arguments behind the states."""
    hidden, output = states[-1].shape[-1], states[0].shape[-1]
    count = len(parameters) // (num_layers * (2 if bidirectional else 1))
    projected = output if op == "lstm" and output != hidden else 0
    return count, (_MODES[op], hidden, projected, num_layers, False, 0.0, train, bidirectional, [], None)


def _cell(states: Sequence[Tensor]) -> Tensor | None:
    return states[1] if len(states) > 1 else None


def _run(x: Tensor, states: list[Tensor], parameters: list[Tensor], *rest: Any) -> list[Tensor]:
    count, settings = _settings(states, parameters, *rest)
    given = x, parameters, count, None, states[0], _cell(states)
    with torch.no_grad():
        output, last_h, last_c, reserve, weights = torch.ops.aten._cudnn_rnn.default(*given, *settings)
    return [output, *(last_h, last_c)[: len(states)], _shown(reserve, x), _shown(weights, x)]


def _shown(buffer: Tensor, x: Tensor) -> Tensor:
    """Return the first byte of a buffer; its storage has all of it, in a size that cuDNN chooses."""
    whole = x.new_empty(1, dtype=torch.uint8) if buffer.numel() == 0 else buffer
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(whole.untyped_storage(), 0, (1,), (1,))


def _whole(shown: Tensor, dtype: torch.dtype) -> Tensor:
    storage = shown.untyped_storage()
    size = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=shown.device).set_(storage, 0, (size,), (1,))


def _fake(x: Tensor, states: list[Tensor], parameters: list[Tensor], *rest: Any) -> list[Tensor]:
    num_directions = 2 if rest[2] else 1
    output = x.new_empty((*x.shape[:2], states[0].shape[-1] * num_directions))
    buffers = [x.new_empty(1, dtype=torch.uint8) for _ in range(2)]
    return [output, *(s.new_empty(s.shape) for s in states), *buffers]


def _run_backward(
    x: Tensor, states: list[Tensor], parameters: list[Tensor], results: list[Tensor], tangents: list[Tensor], *rest: Any
) -> list[Tensor]:
    count, settings = _settings(states, parameters, *rest)
    output, reserve, weights = results[0], _whole(results[-2], torch.uint8), _whole(results[-1], x.dtype)
    seeds = tangents[0], tangents[1], _cell(tangents[1:])
    given = x, parameters, count, weights, states[0], _cell(states), output
    # It writes into the reserve, and there may be another backward.
    found = torch.ops.aten._cudnn_rnn_backward.default(*given, *seeds, *settings, reserve.clone(), [True] * 4)
    return [found[0], *found[1 : 1 + len(states)], *found[3]]


def _fake_backward(x: Tensor, states: list[Tensor], parameters: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, *states, *parameters)]


for _name, _implementation, _shapes in (
    ("cudnn_layers", _run, _fake),
    ("cudnn_layers_backward", _run_backward, _fake_backward),
):
    LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gradrewrite::{_name}", _shapes, lib=LIBRARY)


def _note(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, states, parameters, *ctx.settings = inputs
    ctx.counts = len(states), len(parameters)
    ctx.mark_non_differentiable(*output[-2:])
    ctx.save_for_backward(x, *states, *parameters, *output)


def _differentiate(ctx: Any, gradients: list[Tensor]) -> Any:
    num_states, num_parameters = ctx.counts
    x, *rest = ctx.saved_tensors
    states, parameters = rest[:num_states], rest[num_states : num_states + num_parameters]
    tangents = [g.contiguous() for g in gradients[: 1 + num_states]]
    results = rest[num_states + num_parameters :]
    found = OP_CUDNN_BACKWARD(x, states, parameters, results, tangents, *ctx.settings)
    return found[0], list(found[1 : 1 + num_states]), list(found[1 + num_states :]), *([None] * len(ctx.settings))


torch.library.register_autograd("gradrewrite::cudnn_layers", _differentiate, setup_context=_note, lib=LIBRARY)

OP_CUDNN = torch.ops.gradrewrite.cudnn_layers.default
OP_CUDNN_BACKWARD = torch.ops.gradrewrite.cudnn_layers_backward.default


def cudnn_layers(
    op: str,
    x: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Tensor],
    num_layers: int,
    *,
    bidirectional: bool,
    train: bool,
) -> list[Tensor]:
    """Run ``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu`` by cuDNN, without dropout.

    Arguments and results are theirs: ``x`` is ``[T, B, features]``; the output ``[T, B, directions * width]`` comes
    first, then the last states ``[layers * directions, B, width]``. Without ``train`` it has no derivative.
    """
    given = x.contiguous(), [s.contiguous() for s in states], list(parameters)
    found: list[Tensor] = OP_CUDNN(*given, op, num_layers, bidirectional, train)
    return found[: 1 + len(states)]
