"""Steps of some parameters of an optimizer, traced."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from gradrewrite._compat import fake_tensors, make_fx, operators
from gradrewrite._compat.traced_numbers import Name
from gradrewrite.errors import TraceError
from gradrewrite.ir import editing
from gradrewrite.training.hyperparameters import frozen, value_of
from gradrewrite.training.optimizer_refusals import refusal, refusal_of
from gradrewrite.training.shadows import Member, changed_part, counters_of, plain_parts_of, run_step, shadow_of
from gradrewrite.training.trials import CHANGES, Trial

WHOLE = "whole"  # the form of all parameters together
_WITHOUT_SIZES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)  # beside pointwise ops


@dataclass(frozen=True, slots=True)
class Part:
    """A traced step of some parameters.

    Its inputs are those of its members, and a 0-d tensor for each number.
    """

    graph_module: fx.GraphModule
    states: tuple[tuple[int, str], ...]  # by position among the members
    compared: frozenset[Name]


@dataclass(frozen=True, slots=True)
class Piece:
    """Members traced together."""

    members: tuple[Member, ...]
    trial: Trial
    form: Hashable  # equal for those with equal graphs
    family: Hashable  # equal for those whose graphs differ in sizes alone, if it has no sizes inside; None without one


def trace_parts(optimizer: Optimizer, pieces: Sequence[Piece]) -> list[Part]:
    """Trace the pieces, each form once.

    Elementwise updates of contiguous parameters are traced once for all sizes.
    """
    known: dict[Hashable, Part] = {}
    families: dict[Hashable, tuple[Part, Member]] = {}
    for piece in pieces:
        if piece.form in known:
            continue
        first = piece.members[0]
        if piece.family in families:
            known[piece.form] = _resized(*families[piece.family], first)
            continue
        part = known[piece.form] = trace_part(optimizer, piece)
        if piece.family is not None and _has_no_sizes(part.graph_module.graph, first):
            families[piece.family] = part, first
    return [known[piece.form] for piece in pieces]


def _has_no_sizes(graph: fx.Graph, member: Member) -> bool:
    """Whether a graph computes each element by itself, and numbers."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or (isinstance(value, Tensor) and value.dim() == 0):
            continue
        is_alike = isinstance(value, Tensor) and form(value)[:2] == form(member.parameter)[:2]
        if not is_alike or not (operators.is_pointwise(node) or node.target in _WITHOUT_SIZES):
            return False
    return True


def _resized(part: Part, known: Member, member: Member) -> Part:
    """Return a part for a parameter of other sizes."""
    owner = editing.copy_of(part.graph_module)
    like = member.parameter
    mode = fake_tensors.fake_mode_of([like])
    for node in owner.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.shape == known.parameter.shape:
            with torch.no_grad(), mode:
                value = torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=value.device)
            node.meta = {**node.meta, "val": value}
    return Part(owner, part.states, part.compared)


def family_of(member: Member) -> Hashable:
    """Return the form of a parameter without its sizes.

    None where its tensors are not laid out alike.
    """
    like = member.parameter
    tensors = {key: value for key, value in member.state.items() if isinstance(value, Tensor)}
    alike = [t for t in (*tensors.values(), member.gradient) if t.dim() or t.shape == like.shape]
    if (
        not like.is_contiguous()
        or not like.dim()
        or any((t.shape, t.stride()) != (like.shape, like.stride()) for t in alike)
    ):
        return None
    state = tuple((key, form(value)[2:] if key in tensors else frozen(value)) for key, value in member.state.items())
    return tuple(min(size, 2) for size in like.shape), form(like)[2:], form(member.gradient)[2:], state


def trace_part(optimizer: Optimizer, piece: Piece) -> Part:
    """Trace a shadow of the members of a piece alone."""
    members, names = piece.members, piece.trial.numbers
    mode = fake_tensors.fake_mode_of([m.parameter for m in members])
    with torch.no_grad(), mode:
        numbers = [torch.empty((), dtype=torch.float64, device=device_of(members)) for _ in names]
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
    _skip_copies(graph)
    graph.eliminate_dead_code()
    _check_graph(optimizer, graph)
    used = _used_states(graph, len(members), len(states))
    results = editing.outputs_of(graph.output_node())
    kept = [*results[: len(members)], *(results[len(members) + n] for n in used)]
    graph.output_node().args = (tuple(kept),)
    return Part(traced, tuple(states[n] for n in used), frozenset(compared))


def _run(
    optimizer: Optimizer, piece: Piece, members: Sequence[Member], numbers: Mapping[Name, tuple[Tensor, float]]
) -> set[Name]:
    """Run a shadow; TraceError for changes outside of tensors."""
    given = {name: tensor for name, (tensor, _) in numbers.items()}
    shadow = shadow_of(optimizer, members, piece.trial.options, given, all_groups=piece.form == WHOLE)
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
        raise refusal(optimizer, CHANGES % changed)
    return compared


def _tensor_keys(shadow: Optimizer, member: Member) -> set[str]:
    return {key for key, value in shadow.state.get(member.parameter, {}).items() if isinstance(value, Tensor)}


def _with_tensors(
    members: Sequence[Member], tensors: Sequence[Tensor], states: Sequence[tuple[int, str]]
) -> list[Member]:
    """Return the members with other tensors."""
    count = len(members)
    own = [Member(m.position, m.group, tensors[n], tensors[count + n], dict(m.state)) for n, m in enumerate(members)]
    for (n, key), tensor in zip(states, tensors[2 * count :], strict=True):
        own[n].state[key] = tensor
    return own


def _skip_copies(graph: fx.Graph) -> None:
    """Read computed values directly, not as copies."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default):
        source = node.args[1]
        if isinstance(source, fx.Node) and source.op == "call_function":
            if form(source.meta["val"]) == form(node.meta["val"]):
                editing.skip(node, source)


def _check_graph(optimizer: Optimizer, graph: fx.Graph) -> None:
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        if node.target is torch.ops.aten._local_scalar_dense.default:
            raise refusal(optimizer, "its step reads a value of a tensor on the host")
        if operators.written_by(node):
            raise refusal(optimizer, f"its step writes to a tensor that is no parameter and no state, by {node.target}")
        if operators.draws_numbers(node):
            raise refusal(optimizer, f"its step draws random numbers, by {node.target}")


def _used_states(graph: fx.Graph, members: int, states: int) -> list[int]:
    """Return the positions of states read or written."""
    placeholders = graph.find_nodes(op="placeholder")[2 * members :]
    results = editing.outputs_of(graph.output_node())[members:]
    output = graph.output_node()
    return [n for n in range(states) if results[n] is not placeholders[n] or set(placeholders[n].users) != {output}]


def form(tensor: Tensor) -> tuple[Hashable, ...]:
    """Return sizes, strides, dtype and device."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def device_of(members: Sequence[Member]) -> torch.device:
    """Return the device of step counts, or of the parameter.

    Numbers are computed with step counts.
    """
    counters = [t for m in members for t in counters_of(m)]
    return (counters or [members[0].parameter])[0].device
