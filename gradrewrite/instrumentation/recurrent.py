"""``nn.RNN``, ``nn.GRU`` and ``nn.LSTM`` as loops over time: one for each layer and direction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from gradrewrite.errors import GraphBreakError
from gradrewrite.instrumentation.dynamo_nodes import checkpoint_body, is_checkpoint
from gradrewrite.instrumentation.inner_gradients import differentiated_inside
from gradrewrite.instrumentation.loops import run_loop
from gradrewrite.instrumentation.source_locations import source_of
from gradrewrite.ir.marked_loops import Loop, find_loop
from gradrewrite.ir.values import ModuleCall, Value
from gradrewrite.numerics.cudnn_layers import cudnn_layers, has_cudnn
from gradrewrite.numerics.recurrent_layers import OP_RECURRENT, fused_lstm, has_fused_lstm


def named(x: Tensor, name: str) -> Tensor:
    """Name a value of a body; it becomes a site of each iteration."""
    return x


fx.wrap("named")


def _lstm_cell(h: Tensor, c: Tensor, g: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    gates = named(torch.addmm(g, h, weight.t()), "gates")
    i, f, n, o = gates.chunk(4, -1)
    c = named(f.sigmoid() * c + i.sigmoid() * n.tanh(), "c")
    h = named(o.sigmoid() * c.tanh(), "h")
    return h, c, h


def _projected_lstm_cell(h: Tensor, c: Tensor, g: Tensor, weight: Tensor, projection: Tensor) -> tuple[Tensor, ...]:
    gates = named(torch.addmm(g, h, weight.t()), "gates")
    i, f, n, o = gates.chunk(4, -1)
    c = named(f.sigmoid() * c + i.sigmoid() * n.tanh(), "c")
    h = named((o.sigmoid() * c.tanh()) @ projection.t(), "h")
    return h, c, h


def _gru_cell(h: Tensor, g: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return _gru_step(h, g, torch.addmm(bias, h, weight.t()))


def _gru_cell_without_bias(h: Tensor, g: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return _gru_step(h, g, h @ weight.t())


def _gru_step(h: Tensor, g: Tensor, gates: Tensor) -> tuple[Tensor, ...]:
    gates = named(gates, "gates")
    (r, z, n), (hr, hz, hn) = g.chunk(3, -1), gates.chunk(3, -1)
    z = (z + hz).sigmoid()
    n = (n + (r + hr).sigmoid() * hn).tanh()
    h = named((h - n) * z + n, "h")
    return h, h


def _tanh_cell(h: Tensor, g: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    h = named(named(torch.addmm(g, h, weight.t()), "gates").tanh(), "h")
    return h, h


def _relu_cell(h: Tensor, g: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    h = named(named(torch.addmm(g, h, weight.t()), "gates").relu(), "h")
    return h, h


_CELLS: Mapping[Any, Callable[..., tuple[Tensor, ...]]] = {
    torch.lstm: _lstm_cell,
    torch.gru: _gru_cell,
    torch.rnn_tanh: _tanh_cell,
    torch.rnn_relu: _relu_cell,
}
NUM_GATES = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}


@dataclass(frozen=True, slots=True)
class RecurrentCall:
    """The arguments of a call of ``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu`` on padded sequences."""

    op: Any
    x: Any  # [T, B, features], or [B, T, features]
    states: Sequence[Any]  # h, of an LSTM c too, [layers * directions, B, width]
    parameters: Sequence[Any]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @classmethod
    def of(cls, op: Any, args: Sequence[Any]) -> RecurrentCall | None:
        """Return the call; None for one of a packed sequence."""
        if len(args) != 9 or not isinstance(args[3], bool):
            return None
        x, states, parameters, *rest = args
        return cls(op, x, tuple(states) if op is torch.lstm else (states,), parameters, *rest)

    @property
    def num_directions(self) -> int:
        """1, or 2 of a bidirectional call."""
        return 2 if self.bidirectional else 1

    def parameters_of(self, number: int) -> Sequence[Any]:
        """Parameters of one layer and direction: of the input, of the state, biases of both, projection."""
        count = len(self.parameters) // (self.num_layers * self.num_directions)
        return self.parameters[number * count : (number + 1) * count]

    @property
    def is_projected(self) -> bool:
        """Whether an LSTM projects its hidden state."""
        return len(self.parameters_of(0)) > (4 if self.has_biases else 2)


Bodies = Sequence[tuple[fx.GraphModule, str]]  # and keys of loops, first layer first, forward before reverse


def lstm(loops: Bodies, dtype: torch.dtype, *args: Any) -> tuple[Tensor, ...]:
    """Compute ``torch.lstm`` by loops: output, then the last states."""
    return _run(torch.lstm, loops, dtype, args)


def gru(loops: Bodies, dtype: torch.dtype, *args: Any) -> tuple[Tensor, ...]:
    """Compute ``torch.gru`` by loops."""
    return _run(torch.gru, loops, dtype, args)


def rnn_tanh(loops: Bodies, dtype: torch.dtype, *args: Any) -> tuple[Tensor, ...]:
    """Compute ``torch.rnn_tanh`` by loops."""
    return _run(torch.rnn_tanh, loops, dtype, args)


def rnn_relu(loops: Bodies, dtype: torch.dtype, *args: Any) -> tuple[Tensor, ...]:
    """Compute ``torch.rnn_relu`` by loops."""
    return _run(torch.rnn_relu, loops, dtype, args)


_BY_LOOPS: Mapping[Any, Callable[..., tuple[Tensor, ...]]] = {
    torch.lstm: lstm,
    torch.gru: gru,
    torch.rnn_tanh: rnn_tanh,
    torch.rnn_relu: rnn_relu,
}


def _run(op: Any, loops: Bodies, dtype: torch.dtype, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Compute a recurrent layer of torch, in the dtype that autocast gives its output."""
    with torch.autocast(args[0].device.type, enabled=False):
        call = RecurrentCall.of(op, [_converted(a, dtype) for a in args])
        assert call is not None
        if has_cudnn(call.x) and not any(find_loop(key).is_marked for _, key in loops):
            return _run_by_cudnn(call)
        x = call.x.transpose(0, 1) if call.batch_first else call.x
        states, last = [s.unbind(0) for s in call.states], []
        for layer in range(call.num_layers):
            if layer and call.dropout:
                x = F.dropout(x, call.dropout, call.train)
            outputs = []
            for direction in range(call.num_directions):
                number = layer * call.num_directions + direction
                output, *results = _run_layer(call, number, x, [own[number] for own in states], loops[number])
                last.append(results)
                outputs.append(output)
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        finals = [torch.stack(own) for own in zip(*last, strict=True)]
        return (x.transpose(0, 1) if call.batch_first else x), *finals


def _run_by_cudnn(call: RecurrentCall) -> tuple[Tensor, ...]:
    """Compute all layers by one operator, with dropout between them by one each."""
    x, last = call.x.transpose(0, 1) if call.batch_first else call.x, []
    train = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *call.states, *call.parameters))
    number = 1 if call.dropout and call.train else call.num_layers
    for first in range(0, call.num_layers, number):
        if first:
            x = F.dropout(x, call.dropout, call.train)
        rows = range(first * call.num_directions, (first + number) * call.num_directions)
        states = [own[rows.start : rows.stop] for own in call.states]
        parameters = [p for row in rows for p in call.parameters_of(row)]
        given = call.op.__name__, x, states, parameters, number
        x, *results = cudnn_layers(*given, bidirectional=call.bidirectional, train=train)
        last.append(results)
    finals = [torch.cat(own) for own in zip(*last, strict=True)]
    return (x.transpose(0, 1) if call.batch_first else x), *finals


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return [_converted(one, dtype) for one in value]
    return value.to(dtype) if isinstance(value, Tensor) else value


def _run_layer(
    call: RecurrentCall, number: int, x: Tensor, carries: Sequence[Tensor], loop: tuple[fx.GraphModule, str]
) -> tuple[Tensor, ...]:
    """Compute one layer and direction: its output, then the last states.

    Where there is no action inside, an LSTM is one operator where torch has one; see ``fused_lstm``.
    """
    known = find_loop(loop[1])
    if not known.is_marked and call.op is torch.lstm and has_fused_lstm(x, is_projected=call.is_projected):
        tensors = (x, *carries, *call.parameters_of(number))
        train = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        h, c = carries
        return fused_lstm(x, h, c, call.parameters_of(number), is_reversed=known.is_reversed, train=train)
    inputs, invariants = _arguments(call, x, number)
    *results, output = run_loop(*loop, *(own.contiguous() for own in carries), inputs.contiguous(), *invariants)
    return output, *results


def _arguments(call: RecurrentCall, x: Tensor, number: int) -> tuple[Tensor, list[Tensor]]:
    """Return the gates of the input for all time steps, and the invariants of the loop."""
    of_input, of_state, *rest = call.parameters_of(number)
    biases, projection = (rest[:2], rest[2:]) if call.has_biases else ([], rest)
    if not biases:
        return F.linear(x, of_input), [of_state, *projection]
    if call.op is torch.gru:
        return F.linear(x, of_input, biases[0]), [of_state, biases[1]]
    return F.linear(x, of_input, biases[0] + biases[1]), [of_state, *projection]


@dataclass(eq=False)
class RecurrentNode:
    """A node of a Dynamo graph that calls a recurrent layer, and the loops that compute the same."""

    node: fx.Node
    call: RecurrentCall  # of fake tensors
    loops: list[Loop]

    def replace(self) -> None:
        """Let the loops compute the layer, or operators that are the same."""
        gm, node = self.node.graph.owning_module, self.node
        assert gm is not None
        given = []
        with node.graph.inserting_before(node):
            for loop in self.loops:
                name = f"{loop.key}_body"
                setattr(gm, name, loop.body)
                given.append((node.graph.get_attr(name), loop.key))
        node.args, node.kwargs = (tuple(given), fake_result(node).dtype, *_positional(node)), {}
        node.target = _BY_LOOPS[self.call.op]


def sizes_of_lengths(gm: fx.GraphModule) -> list[tuple[int, int]]:
    """Return the sizes of a Dynamo graph's inputs that are the length of a recurrent layer, as it seems.

    They are pairs of the position of an input and one of its first two dimensions. A length that is the size of the
    batch too, or 1, is left out.
    """
    lengths = set()
    for _, call in _recurrent_calls(gm, {}):
        if call is not None:
            length, batch = (call.x.shape[n] for n in ((1, 0) if call.batch_first else (0, 1)))
            if isinstance(length, int) and length not in (1, batch):
                lengths.add(length)
    found = []
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
            sizes = [(dim, size) for dim, size in enumerate(value.shape[:2]) if isinstance(size, int)]
            found += [(position, dim) for dim, size in sizes if size in lengths]
    return found


def run_as_operators(gm: fx.GraphModule) -> None:
    """Let a Dynamo graph without gradients compute each recurrent layer by one operator."""
    left = differentiated_inside(gm)
    for node, known in list(_recurrent_calls(gm, {})):
        if known is not None and node not in left:
            call = RecurrentCall.of(node.target, _positional(node))
            assert call is not None
            settings = _positional(node)[3:]
            node.args = (call.op.__name__, call.x, list(call.states), list(call.parameters), *settings)
            node.target, node.kwargs = OP_RECURRENT, {}
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()


def loops_in(node: fx.Node) -> list[Loop]:
    """Return the loops of a recurrent layer that they compute; empty for other nodes."""
    if node.op != "call_function" or all(node.target is not by_loops for by_loops in _BY_LOOPS.values()):
        return []
    bodies: Any = node.args[0]
    return [find_loop(key) for _, key in bodies]


def find_recurrent(gm: fx.GraphModule, calls: Callable[[fx.Node], tuple[ModuleCall, ...]]) -> list[RecurrentNode]:
    """Find the recurrent layers of a Dynamo graph; ``calls`` gives the module calls around a node.

    Those that a gradient inside of the forward depends on are left to torch.
    """
    found, left = [], differentiated_inside(gm)
    for node, call in _recurrent_calls(gm, {}):
        if node in left:
            continue
        if call is None:
            raise GraphBreakError(f"{PACKED}\n  {source_of(node)}\n  {MASKED[0].upper()}{MASKED[1:-1]}")
        found.append(RecurrentNode(node, call, _loops_of(call, calls(node), source_of(node), fake_result(node))))
    return found


def _recurrent_calls(
    gm: fx.GraphModule, outer: Mapping[fx.Node, fx.Node]
) -> Iterator[tuple[fx.Node, RecurrentCall | None]]:
    """Yield nodes of recurrent layers with their calls on fake tensors, those in checkpoints too.

    ``outer`` has the nodes around a checkpoint by the inputs of its body. The call is None for packed sequences.
    """
    for node in gm.graph.nodes:
        if is_checkpoint(node):
            body, inside = checkpoint_body(gm, node, outer)
            yield from _recurrent_calls(body, inside)
        elif node.op == "call_function" and node.target in tuple(_CELLS):
            args = fx.map_arg(_positional(node), lambda n: outer.get(n, n).meta["example_value"])
            yield node, RecurrentCall.of(node.target, args)


PACKED = "a PackedSequence has sizes that depend on the values of a tensor"
MASKED = (
    "give the layer the padded sequences, and mask its output: y * (torch.arange(y.shape[1]) < lengths[:, None])"
    "[..., None]; the last state of a sequence is its output at lengths - 1, and gradients are those of the packed "
    "form (docs/loops.md);"
)


def fake_result(node: fx.Node) -> Tensor:
    """Return the fake output of a recurrent layer, all time steps of the last layer."""
    result = node.meta["example_value"][0]
    assert isinstance(result, Tensor)
    return result


def _positional(node: fx.Node) -> tuple[Any, ...]:
    return (*node.args, *node.kwargs.values())


def _loops_of(call: RecurrentCall, calls: tuple[ModuleCall, ...], source: str, output: Tensor) -> list[Loop]:
    module, found = calls[-1][0] if calls else "", []
    length, batch = (call.x.shape[n] for n in ((1, 0) if call.batch_first else (0, 1)))
    for layer in range(call.num_layers):
        for suffix in ("", "_reverse")[: call.num_directions]:
            name = f"{module}.l{layer}{suffix}" if module else f"l{layer}{suffix}"
            body, nodes = _body_of(call)
            loop = Loop(name, body, len(call.states), 1, bool(suffix), length)
            widths = {"h": call.states[0].shape[-1], "c": call.states[-1].shape[-1]}
            for op, node in nodes.items():
                width = widths.get(op, NUM_GATES[call.op] * call.states[-1].shape[-1])
                loop.values[op] = Value(op, calls, source, output.new_empty((batch, width)), loop=name)
                loop.nodes[op] = node
            found.append(loop)
    return found


def _body_of(call: RecurrentCall) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """Return the body of the loops of a call, and the nodes of its values, by name."""
    cell = _projected_lstm_cell if call.is_projected else _CELLS[call.op]
    if call.op is torch.gru and not call.has_biases:
        cell = _gru_cell_without_bias
    body = fx.symbolic_trace(cell)
    nodes = {}
    for node in body.graph.find_nodes(op="call_function", target=named):
        given, name = node.args
        nodes[str(name)] = given
        node.replace_all_uses_with(given)
        body.graph.erase_node(node)
    body.recompile()
    return body, nodes
