"""The update of an optimizer, its own ``step``, as a functional graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from gradrewrite._compat import fake_tensors, make_fx, operators
from gradrewrite._compat.traced_numbers import Name
from gradrewrite._utils.tensors import kept_random_state
from gradrewrite.errors import TraceError
from gradrewrite.ir import editing
from gradrewrite.training.refusals import check_by_name, check_gradients, refusal, refusal_of
from gradrewrite.training.shadows import (
    Member,
    attributes_of,
    changed_part,
    counters_of,
    frozen,
    is_of_torch,
    names_of,
    numbered,
    plain_parts_of,
    run_step,
    shadow_of,
    value_of,
)
from gradrewrite.training.trials import Trial, try_out

# Classes of torch.optim that update each parameter by itself.
_SEPARATE = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class UpdateGraph:
    """A step of an optimizer as a graph of decomposed, functional ATen nodes.

    Its inputs are parameters, their gradients, tensors of state, and one flat float64 tensor of numbers, if there are
    any. It returns the new parameters and the new tensors of state; one that the step leaves alone is the input.

    Attributes:
        graph_module: The graph.
        parameters: Positions of the updated parameters among all, in the order of param groups.
        states: The tensors of state that the step reads or writes, by position of the parameter and key.
        numbers: Hyperparameters that are read at each call, by param group and name: ``(0, "betas.1")``.
        compared: Those of them whose sign is baked in, for the code compares them with 0.
        key: All that is baked in.
        device: That of the tensor of numbers.
    """

    graph_module: fx.GraphModule
    parameters: tuple[int, ...]
    states: tuple[tuple[int, str], ...]
    numbers: tuple[Name, ...]
    compared: tuple[Name, ...]
    key: Hashable
    device: torch.device

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether what is baked in is as it was; gradients and state have to be of the same form too."""
        return self.key == key_of(optimizer, self.numbers, self.compared)


@dataclass(frozen=True, slots=True)
class _Part:
    """A traced step of some parameters; its inputs are theirs, and a 0-d tensor for each number."""

    graph_module: fx.GraphModule
    states: tuple[tuple[int, str], ...]  # by position among the members
    compared: frozenset[Name]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Members that are traced together."""

    members: tuple[Member, ...]
    trial: Trial
    form: Hashable  # equal for those with equal graphs


def trace_update(optimizer: Optimizer, gradients: Sequence[Tensor | None], *, foreach: bool = False) -> UpdateGraph:
    """Trace the ``step`` of an optimizer's class, whose state is there; the optimizer stays as it is.

    Args:
        optimizer: Of ``torch.optim``, or one written in Python.
        gradients: Tensors of the form of the gradients, real or fake; None for parameters without one.
        foreach: Whether to trace the code that works on lists of tensors, where the class has it.

    Raises:
        TraceError: The step cannot be traced; the message names the line.
    """
    check_by_name(optimizer)
    check_gradients(optimizer, gradients)
    members = _fake_members(optimizer, gradients)
    if not members:
        raise refusal(optimizer, "none of its parameters has a gradient")
    with kept_random_state():
        pieces = _separate_pieces(optimizer, members) if _is_separate(optimizer, foreach) else None
        pieces = pieces or [_whole_piece(optimizer, members, foreach)]
        parts: dict[Hashable, _Part] = {}
        for piece in pieces:
            if piece.form not in parts:
                parts[piece.form] = _trace_part(optimizer, piece)
    return _assembled(optimizer, members, [(piece, parts[piece.form]) for piece in pieces])


def check_traceable(optimizer: Optimizer) -> None:
    """Raise TraceError for an optimizer that cannot be traced, before there is a gradient; tiny steps are run."""
    check_by_name(optimizer)
    members = _fake_members(optimizer, [p.detach() for _, _, p in numbered(optimizer)])
    with kept_random_state():
        _trials(optimizer, members) if _is_separate(optimizer, False) else _whole_piece(optimizer, members, False)


def key_of(optimizer: Optimizer, numbers: Sequence[Name] = (), compared: Sequence[Name] = ()) -> Hashable:
    """Return all that a graph bakes in beside these numbers, and the signs of those that its code compares with 0."""
    read, signed = frozenset(numbers), frozenset(compared)
    groups = tuple(_key_of_group(group, n, read, signed) for n, group in enumerate(optimizer.param_groups))
    own = () if is_of_torch(optimizer) else attributes_of(optimizer)
    return type(optimizer), own, groups


def _key_of_group(
    group: Mapping[str, Any], number: int, read: frozenset[Name], signed: frozenset[Name]
) -> tuple[Hashable, ...]:
    found: list[Hashable] = [len(group["params"])]
    for name, value in group.items():
        if name == "params":
            continue
        if type(value) in (tuple, list):
            found.append(
                (name, *(_key_of_value(x, (number, f"{name}.{n}"), read, signed) for n, x in enumerate(value)))
            )
        else:
            found.append((name, _key_of_value(value, (number, name), read, signed)))
    return tuple(found)


def _key_of_value(value: Any, name: Name, read: frozenset[Name], signed: frozenset[Name]) -> Hashable:
    if name in signed:
        return "sign", bool(value > 0), bool(value < 0)
    return "read" if name in read else frozen(value)


def numbers_of(optimizer: Optimizer, numbers: Sequence[Name]) -> list[Any]:
    """Return present hyperparameters: numbers, or tensors where the user gave tensors."""
    groups = optimizer.param_groups
    return [value_of(groups[number], name) for number, name in numbers]


def _fake_members(optimizer: Optimizer, gradients: Sequence[Tensor | None]) -> list[Member]:
    """Return the parameters with gradients, as fake tensors in the mode of the gradients, if they are in one."""
    mode = fake_tensors.fake_mode_of(gradients)

    def fake(t: Tensor) -> Tensor:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)

    with torch.no_grad(), mode:
        return [
            Member(
                position,
                group,
                fake(parameter),
                gradient if isinstance(gradient, fake_tensors.FakeTensor) else fake(gradient),
                {
                    key: fake(value) if isinstance(value, Tensor) else value
                    for key, value in optimizer.state.get(parameter, {}).items()
                },
            )
            for (position, group, parameter), gradient in zip(numbered(optimizer), gradients, strict=True)
            if gradient is not None
        ]


def _is_separate(optimizer: Optimizer, foreach: bool) -> bool:
    return not foreach and is_of_torch(optimizer) and type(optimizer).__name__ in _SEPARATE


def _whole_piece(optimizer: Optimizer, members: Sequence[Member], foreach: bool) -> _Piece:
    trial = try_out(optimizer, members, foreach=foreach, all_groups=True)
    return _Piece(tuple(members), trial, "whole")


def _trials(optimizer: Optimizer, members: Sequence[Member]) -> dict[int, Trial]:
    """Return a trial for each param group, run once for those that differ in the size of numbers alone."""
    known: dict[Hashable, Trial] = {}
    found: dict[int, Trial] = {}
    for number, group in enumerate(optimizer.param_groups):
        own = [m for m in members if m.group == number]
        if own:
            signs = frozenset((0, name) for name in names_of(group))
            key = _key_of_group(group, 0, signs, signs)[1:], frozenset(_kind_of(m) for m in own)
            if key not in known:
                known[key] = try_out(optimizer, own, foreach=False, all_groups=False)
            found[number] = _renumbered(known[key], number)
    return found


def _renumbered(trial: Trial, number: int) -> Trial:
    return Trial(trial.options, tuple((number, name) for _, name in trial.numbers))


def _kind_of(m: Member) -> Hashable:
    return m.parameter.dim(), 0 in m.parameter.shape, m.parameter.dtype, m.parameter.device


def _separate_pieces(optimizer: Optimizer, members: Sequence[Member]) -> list[_Piece]:
    trials = _trials(optimizer, members)
    pieces = []
    for m in members:
        trial, group = trials[m.group], optimizer.param_groups[m.group]
        read = frozenset((0, name) for _, name in trial.numbers)
        options = _key_of_group(group, 0, read, read)[1:]
        state = tuple((key, _form(value)) for key, value in m.state.items())
        pieces.append(_Piece((m,), trial, (options, trial.options, _form(m.parameter), _form(m.gradient), state)))
    return pieces


def _form(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return frozen(value)
    return value.shape, value.stride(), value.dtype, value.device


def _device_of(members: Sequence[Member]) -> torch.device:
    """Return the device of step counts, as other numbers are computed with them; else that of the parameter."""
    counters = [t for m in members for t in counters_of(m)]
    return (counters or [members[0].parameter])[0].device


def _trace_part(optimizer: Optimizer, piece: _Piece) -> _Part:
    members, names = piece.members, piece.trial.numbers
    mode = fake_tensors.fake_mode_of([m.parameter for m in members])
    with torch.no_grad(), mode:
        numbers = [torch.empty((), dtype=torch.float64, device=_device_of(members)) for _ in names]
    tensors = [*(m.parameter for m in members), *(m.gradient for m in members)]
    states = [(n, key) for n, m in enumerate(members) for key, value in m.state.items() if isinstance(value, Tensor)]
    inputs = [*tensors, *(members[n].state[key] for n, key in states), *numbers]
    values = {name: float(value_of(optimizer.param_groups[name[0]], name[1])) for name in names}
    compared: set[Name] = set()

    def step(*given: Tensor) -> list[Tensor]:
        copies = [x.clone() for x in given[: len(given) - len(names)]]
        own = _with_tensors(members, copies, states)
        given_numbers = dict(zip(names, given[len(copies) :], strict=True))
        compared.update(_run(optimizer, piece, own, {name: (t, values[name]) for name, t in given_numbers.items()}))
        return [*copies[: len(members)], *(own[n].state[key] for n, key in states)]

    try:
        traced = make_fx.trace(step, inputs)
    except TraceError:
        raise
    except Exception as err:
        raise refusal_of(optimizer, err) from err
    graph = traced.graph
    editing.erase_copies(graph)
    graph.eliminate_dead_code()
    _check_graph(optimizer, graph)
    used = _used_states(graph, len(members), len(states))
    results = editing.outputs_of(graph.output_node())
    kept = [*results[: len(members)], *(results[len(members) + n] for n in used)]
    graph.output_node().args = (tuple(kept),)
    return _Part(traced, tuple(states[n] for n in used), frozenset(compared))


def _run(
    optimizer: Optimizer, piece: _Piece, members: Sequence[Member], numbers: Mapping[Name, tuple[Tensor, float]]
) -> set[Name]:
    """Run the step of a shadow; TraceError where it changes more than tensors."""
    given = {name: tensor for name, (tensor, _) in numbers.items()}
    shadow = shadow_of(optimizer, members, piece.trial.options, given, all_groups=piece.form == "whole")
    before, keys = plain_parts_of(shadow), [_tensor_keys(shadow, m) for m in members]
    compared = run_step(shadow, members, numbers)
    for m, known in zip(members, keys, strict=True):
        made = sorted(_tensor_keys(shadow, m) ^ known)
        if made:
            raise refusal(optimizer, f"its step makes or drops the state {made[0]!r}: run its first step in two phases")
        m.state.update(shadow.state.get(m.parameter, {}))
    after = plain_parts_of(shadow)
    changed = changed_part(before, after)
    if changed:
        raise refusal(optimizer, f"its step changes {changed}, a Python value, which would stay as it is in a graph")
    return compared


def _tensor_keys(shadow: Optimizer, member: Member) -> set[str]:
    return {key for key, value in shadow.state.get(member.parameter, {}).items() if isinstance(value, Tensor)}


def _with_tensors(
    members: Sequence[Member], tensors: Sequence[Tensor], states: Sequence[tuple[int, str]]
) -> list[Member]:
    """Return the members with these parameters, gradients and tensors of state."""
    count = len(members)
    own = [Member(m.position, m.group, tensors[n], tensors[count + n], dict(m.state)) for n, m in enumerate(members)]
    for (n, key), tensor in zip(states, tensors[2 * count :], strict=True):
        own[n].state[key] = tensor
    return own


def _check_graph(optimizer: Optimizer, graph: fx.Graph) -> None:
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        if node.target is torch.ops.aten._local_scalar_dense.default:
            raise refusal(optimizer, "its step reads a value of a tensor on the host")
        if operators.written_by(node):
            raise refusal(optimizer, f"its step writes to a tensor that is no parameter and no state, by {node.target}")
        if operators.draws_numbers(node):
            raise refusal(optimizer, f"its step draws random numbers, by {node.target}")


def _used_states(graph: fx.Graph, members: int, states: int) -> list[int]:
    """Return the positions of the states that are read or written."""
    placeholders = graph.find_nodes(op="placeholder")[2 * members :]
    results = editing.outputs_of(graph.output_node())[members:]
    output = graph.output_node()
    return [n for n in range(states) if results[n] is not placeholders[n] or set(placeholders[n].users) != {output}]


def _assembled(optimizer: Optimizer, members: Sequence[Member], parts: Sequence[tuple[_Piece, _Part]]) -> UpdateGraph:
    """Put the parts into one graph."""
    numbers = tuple(dict.fromkeys(name for piece, _ in parts for name in piece.trial.numbers))
    compared = tuple(dict.fromkeys(name for piece, part in parts for name in _compared_by(piece, part)))
    owners = [(piece.members[n], key) for piece, part in parts for n, key in part.states]
    device = _device_of(members)
    mode = fake_tensors.fake_mode_of([m.parameter for m in members])
    inputs = [(f"parameter_{m.position}", m.parameter) for m in members]
    inputs += [(f"gradient_{m.position}", m.gradient) for m in members]
    inputs += [(f"state_{m.position}_{key}", m.state[key]) for m, key in owners]
    if numbers:
        with mode:
            inputs.append(("numbers", torch.empty(len(numbers), dtype=torch.float64, device=device)))
    owner = editing.graph_of(inputs, len(members))
    nodes = owner.graph.find_nodes(op="placeholder")
    at = {("parameter", m.position): node for m, node in zip(members, nodes, strict=False)}
    at |= {("gradient", m.position): node for m, node in zip(members, nodes[len(members) :], strict=False)}
    at |= {(key, m.position): node for (m, key), node in zip(owners, nodes[2 * len(members) :], strict=False)}
    each = _elements(owner.graph, nodes[-1], len(numbers)) if numbers else []
    results = _spliced(owner.graph, parts, at, dict(zip(numbers, each, strict=True)))
    order = [("parameter", m.position) for m in members] + [(key, m.position) for m, key in owners]
    editing.return_instead(owner.graph, [results[one] for one in order])
    owner.graph.lint()
    owner.recompile()
    positions, states = tuple(m.position for m in members), tuple((m.position, key) for m, key in owners)
    return UpdateGraph(owner, positions, states, numbers, compared, key_of(optimizer, numbers, compared), device)


def _compared_by(piece: _Piece, part: _Part) -> list[Name]:
    """Return compared numbers, of the param group of a piece where each has one."""
    names = [name for _, name in part.compared] if piece.form != "whole" else []
    return [(piece.members[0].group, name) for name in sorted(names)] if names else sorted(part.compared)


def _elements(graph: fx.Graph, numbers: fx.Node, count: int) -> list[fx.Node]:
    select: Callable[[Tensor], list[Tensor]] = lambda t: [t[n] for n in range(count)]  # noqa: E731
    return editing.compute(graph, select, [numbers], graph.output_node())[0]


def _spliced(
    graph: fx.Graph,
    parts: Sequence[tuple[_Piece, _Part]],
    at: Mapping[tuple[str, int], fx.Node],
    numbers: Mapping[Name, fx.Node],
) -> dict[tuple[str, int], fx.Node]:
    """Copy each part in; return what it makes of parameters and state."""
    found: dict[tuple[str, int], fx.Node] = {}
    for piece, part in parts:
        positions = [m.position for m in piece.members]
        states = [(key, positions[n]) for n, key in part.states]
        given = [at["parameter", n] for n in positions] + [at["gradient", n] for n in positions]
        given += [at[one] for one in states] + [numbers[name] for name in piece.trial.numbers]
        outputs, _ = editing.splice(part.graph_module, graph, given, graph.output_node(), "is_backward")
        found |= dict(zip([*(("parameter", n) for n in positions), *states], outputs, strict=True))
    return found
