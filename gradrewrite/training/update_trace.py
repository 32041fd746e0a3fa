"""An optimizer's own ``step`` as a functional graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from gradrewrite._compat import fake_tensors
from gradrewrite._compat.traced_numbers import Name
from gradrewrite._utils.tensors import kept_random_state
from gradrewrite.ir import editing
from gradrewrite.training.hyperparameters import frozen, is_of_torch, key_of, key_of_group, names_of
from gradrewrite.training.optimizer_refusals import check_by_name, check_gradients, refusal
from gradrewrite.training.shadows import Member, numbered
from gradrewrite.training.traced_parts import WHOLE, Part, Piece, device_of, family_of, form, trace_parts
from gradrewrite.training.trials import Trial, state_keys, try_out

# Classes of torch.optim that update each parameter by itself.
_SEPARATE = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class UpdateGraph:
    """A step of an optimizer, of functional ATen nodes.

    Its inputs are parameters, their gradients, tensors of state, and one flat float64 tensor of numbers, if there are
    any. It returns the new parameters and the new tensors of state; one that the step leaves alone is the input.

    Attributes:
        graph_module: The graph.
        parameters: Positions of the updated parameters among all, in the order of param groups.
        states: The tensors of state that the step reads or writes, by position of the parameter and key.
        numbers: Hyperparameters that are read at each call, by param group and name: ``(0, "betas.1")``.
        compared: Those of them whose sign is baked in, for the code compares them with 0.
        groups: The param groups that matter; None for all.
        key: All that is baked in.
        device: That of the tensor of numbers.
    """

    graph_module: fx.GraphModule
    parameters: tuple[int, ...]
    states: tuple[tuple[int, str], ...]
    numbers: tuple[Name, ...]
    compared: tuple[Name, ...]
    groups: tuple[int, ...] | None
    key: Hashable
    device: torch.device

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether all values baked in are as they were.

        Gradients and state have to be of the same form too.
        """
        return self.key == key_of(optimizer, self.numbers, self.compared, self.groups)


def trace_update(optimizer: Optimizer, gradients: Sequence[Tensor | None], *, foreach: bool = False) -> UpdateGraph:
    """Trace the ``step`` of an optimizer's class.

    The optimizer stays as it is. Numbers of its param groups that its code takes as tensors are read at each call;
    those that it branches on, other than by comparing them with 0, are baked in.

    Args:
        optimizer: Of ``torch.optim``, or one written in Python. Its state is there.
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
        _check_state(optimizer, members)
    with fake_tensors.outside_of_modes():
        parts = trace_parts(optimizer, pieces)
        return _assembled(optimizer, members, list(zip(pieces, parts, strict=True)))


def check_traceable(optimizer: Optimizer) -> None:
    """Raise TraceError early; tiny steps are run."""
    check_by_name(optimizer)
    members = _fake_members(optimizer, [p.detach() for _, _, p in numbered(optimizer)])
    with kept_random_state():
        _trials(optimizer, members) if _is_separate(optimizer, False) else _whole_piece(optimizer, members, False)


def _fake_members(optimizer: Optimizer, gradients: Sequence[Tensor | None]) -> list[Member]:
    """Return the parameters with gradients as fake tensors.

    They are in the mode of the gradients, if these are in one.
    """
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


def _check_state(optimizer: Optimizer, members: Sequence[Member]) -> None:
    """Raise TraceError for the missing state of a first step."""
    without = [m for m in members if not m.state]
    for made in state_keys(optimizer, without, all_groups=not is_of_torch(optimizer)) if without else []:
        if made:
            what = f"its step makes the state {min(made)!r}: prepare it, or run the first step in two phases"
            raise refusal(optimizer, what)


def _is_separate(optimizer: Optimizer, foreach: bool) -> bool:
    return not foreach and is_of_torch(optimizer) and type(optimizer).__name__ in _SEPARATE


def _whole_piece(optimizer: Optimizer, members: Sequence[Member], foreach: bool) -> Piece:
    trial = try_out(optimizer, members, foreach=foreach, all_groups=True)
    return Piece(tuple(members), trial, WHOLE, None)


def _trials(optimizer: Optimizer, members: Sequence[Member]) -> dict[int, Trial]:
    """Return a trial for each param group.

    Groups that differ in the size of numbers alone share one.
    """
    known: dict[Hashable, Trial] = {}
    found: dict[int, Trial] = {}
    for number, group in enumerate(optimizer.param_groups):
        own = [m for m in members if m.group == number]
        if own:
            signs = frozenset((0, name) for name in names_of(group))
            key = key_of_group(group, 0, signs, signs)[1:], frozenset(_kind_of(m) for m in own)
            if key not in known:
                known[key] = try_out(optimizer, own, foreach=False, all_groups=False)
            found[number] = _renumbered(known[key], number)
    return found


def _renumbered(trial: Trial, number: int) -> Trial:
    return Trial(trial.options, tuple((number, name) for _, name in trial.numbers))


def _kind_of(m: Member) -> Hashable:
    return m.parameter.dim(), 0 in m.parameter.shape, m.parameter.dtype, m.parameter.device


def _separate_pieces(optimizer: Optimizer, members: Sequence[Member]) -> list[Piece]:
    trials = _trials(optimizer, members)
    pieces = []
    for m in members:
        trial, group = trials[m.group], optimizer.param_groups[m.group]
        read = frozenset((0, name) for _, name in trial.numbers)
        code = key_of_group(group, 0, read, read)[1:], trial.options
        state = tuple((k, form(v) if isinstance(v, Tensor) else frozen(v)) for k, v in m.state.items())
        family = family_of(m)
        exact = (code, form(m.parameter), form(m.gradient), state)
        pieces.append(Piece((m,), trial, exact, None if family is None else (code, family)))
    return pieces


def _assembled(optimizer: Optimizer, members: Sequence[Member], parts: Sequence[tuple[Piece, Part]]) -> UpdateGraph:
    """Put the parts into one graph."""
    numbers = tuple(dict.fromkeys(name for piece, _ in parts for name in piece.trial.numbers))
    compared = tuple(dict.fromkeys(name for piece, part in parts for name in _compared_by(piece, part)))
    owners = [(piece.members[n], key) for piece, part in parts for n, key in part.states]
    device = device_of(members)
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
    if numbers:
        _share_numbers(owner.graph, nodes[-1])
    order = [("parameter", m.position) for m in members] + [(key, m.position) for m, key in owners]
    editing.return_instead(owner.graph, [results[one] for one in order])
    owner.graph.lint()
    owner.recompile()
    positions, states = tuple(m.position for m in members), tuple((m.position, key) for m, key in owners)
    groups = None if parts[0][0].form == WHOLE else tuple(dict.fromkeys(m.group for m in members))
    key = key_of(optimizer, numbers, compared, groups)
    return UpdateGraph(owner, positions, states, numbers, compared, groups, key, device)


def _compared_by(piece: Piece, part: Part) -> list[Name]:
    """Return compared numbers, of the param group of a piece."""
    names = [name for _, name in part.compared] if piece.form != WHOLE else []
    return [(piece.members[0].group, name) for name in sorted(names)] if names else sorted(part.compared)


def _share_numbers(graph: fx.Graph, numbers: fx.Node) -> None:
    """Compute once the same functions of numbers alone."""
    known: dict[Hashable, fx.Node] = {}
    shared = {numbers}
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.all_input_nodes or not shared.issuperset(node.all_input_nodes):
            continue
        key = node.target, repr(node.args), repr(node.kwargs)
        if key in known:
            editing.skip(node, known[key])
        else:
            known[key] = node
            shared.add(node)


def _elements(graph: fx.Graph, numbers: fx.Node, count: int) -> list[fx.Node]:
    select: Callable[[Tensor], list[Tensor]] = lambda t: [t[n] for n in range(count)]  # noqa: E731
    return editing.compute(graph, select, [numbers], graph.output_node())[0]


def _spliced(
    graph: fx.Graph,
    parts: Sequence[tuple[Piece, Part]],
    at: Mapping[tuple[str, int], fx.Node],
    numbers: Mapping[Name, fx.Node],
) -> dict[tuple[str, int], fx.Node]:
    """Copy each part in; return new parameters and state."""
    found: dict[tuple[str, int], fx.Node] = {}
    for piece, part in parts:
        positions = [m.position for m in piece.members]
        states = [(key, positions[n]) for n, key in part.states]
        given = [at["parameter", n] for n in positions] + [at["gradient", n] for n in positions]
        given += [at[one] for one in states] + [numbers[name] for name in piece.trial.numbers]
        outputs, _ = editing.splice(part.graph_module, graph, given, graph.output_node(), "is_backward")
        found |= dict(zip([*(("parameter", n) for n in positions), *states], outputs, strict=True))
    return found
