"""Probes around ops: markers on their errors, and on the gradients of their inputs.

A probe before an op notes the gradient edges of its inputs, and one behind it finds the autograd nodes of the op that
lead to these edges. Hooks of these nodes mark the gradients while AOTAutograd traces; the forward is not touched, and
neither is the order in which autograd adds up gradients.
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradrewrite._compat import autograd, fake_tensors, make_fx, operators
from gradrewrite.instrumentation.dynamo_nodes import (
    changed_in_place,
    checkpoint_body,
    fake_of,
    is_checkpoint,
    op_name,
)
from gradrewrite.instrumentation.loops import run_loop
from gradrewrite.instrumentation.probes import is_use, probed
from gradrewrite.ir import markers
from gradrewrite.ir.called_ops import CalledOp, Operand, Symbol
from gradrewrite.ir.marked_loops import Loop, RolledLoop

_Edge = tuple[Any, int]  # an autograd node, and the number of an input of it


def insert_op_probes(gm: fx.GraphModule, loops: Sequence[Loop]) -> list[CalledOp]:
    """Insert probes around the ops of a Dynamo graph with probes of its values, in place.

    Bodies of activation checkpoints and of rolled loops are entered. A number of an op in its markers is the position
    in the result.
    """
    found: list[CalledOp] = []
    bodies = [loop.body for loop in loops if isinstance(loop, RolledLoop)]
    for graph_module in [*_with_checkpoints(gm, {}), *(b for body in bodies for b in _with_checkpoints(body, {}))]:
        _insert_in(graph_module, found)
        graph_module.recompile()
    return found


def _with_checkpoints(gm: fx.GraphModule, outer: dict[fx.Node, fx.Node]) -> Iterator[fx.GraphModule]:
    yield gm
    for node in filter(is_checkpoint, gm.graph.nodes):
        body, outside = checkpoint_body(gm, node, outer)
        for inner, given in outside.items():
            inner.meta.setdefault("example_value", given.meta.get("example_value"))
        yield from _with_checkpoints(body, outside)


def _insert_in(gm: fx.GraphModule, found: list[CalledOp]) -> None:
    for node in list(gm.graph.nodes):
        values = _values_of(node)
        if not values or is_checkpoint(node) or node.target is run_loop:
            continue
        operands = _operands_in((node.args, node.kwargs))
        if not operands:
            continue
        changed = changed_in_place(node)
        args, kwargs = _described((node.args, node.kwargs))
        op = CalledOp(values, args, kwargs, len(operands), len(_operands_in(node.args)))
        op.written = operands.index(changed[0]) if changed and changed[0] in operands else None
        op.refusal = _refusal(node, changed)
        if op.refusal and not _is_differentiable(node, changed):
            continue
        number = len(found)
        found.append(op)
        if op.refusal:
            continue
        with gm.graph.inserting_before(node):
            gm.graph.call_function(_before, (number, *operands))
        last = node.next if probed(node.next) is not None else node
        with gm.graph.inserting_after(last):
            gm.graph.call_function(_behind, (number, changed[0] if changed else node))


def _values_of(node: fx.Node) -> tuple[int, ...]:
    """Return the numbers of the values that an op makes; none for other nodes."""
    if node.op not in ("call_function", "call_method") or _is_selection(node) or probed(node) is not None:
        return ()
    if is_use(node):
        return ()
    if (number := probed(node.next)) is not None:
        return (number,)
    selections = (probed(user.next) for user in node.users if _is_selection(user))
    return tuple(sorted(number for number in selections if number is not None))


def _is_differentiable(node: fx.Node, changed: Sequence[fx.Node]) -> bool:
    """Whether a result of an op has a gradient, as far as that is known."""
    made = changed or [node, *filter(_is_selection, node.users)]
    known = [fake for fake in map(fake_of, made) if fake is not None]
    return not known or any(fake.requires_grad for fake in known)


def _is_selection(node: fx.Node) -> bool:
    """Whether a node takes an element out of the results of an op."""
    given = node.args[0] if node.target is operator.getitem else None
    return isinstance(given, fx.Node) and fake_of(given) is None and isinstance(node.args[1], int)


def _operands_in(arguments: Any) -> list[fx.Node]:
    """Return the tensor arguments of an op, with repeats."""
    found: list[fx.Node] = []

    def note(given: fx.Node) -> fx.Node:
        if fake_of(given) is not None:
            found.append(given)
        return given

    fx.node.map_arg(arguments, note)
    return found


def _described(arguments: Any) -> Any:
    """Return the arguments of an op with its operands numbered."""
    count = iter(range(1 << 30))

    def place(given: fx.Node) -> Any:
        return Operand(next(count)) if fake_of(given) is not None else Symbol()

    return fx.node.map_arg(arguments, place)


_ON_VIEW = "writes in place into a view: autograd hands its error to the base of the view, past the op"
_HIGHER = "takes functions, and their backward is one operator"
_SUBCLASS = "reads or makes a tensor subclass ({})"


def _refusal(node: fx.Node, changed: Sequence[fx.Node]) -> str:
    """Return why an op can have no markers; ``""`` if it can."""
    if node.target is operator.setitem:
        return _ON_VIEW
    if operators.is_higher_order(node.target) and op_name(node) != "apply":
        return _HIGHER
    if changed and len(changed) > 1:
        return "writes into several tensors in place"
    return ""


class _OpTracing:
    """The ops of a Dynamo graph while AOTAutograd traces it."""

    def __init__(self, ops: Sequence[CalledOp]) -> None:
        self._ops = ops
        self._edges: dict[int, list[GradientEdge | None]] = {}  # of the inputs, by op

    def begin(self, number: int, operands: Sequence[Tensor]) -> None:
        """Note the gradient edges of the inputs of an op."""
        op = self._ops[number]
        if op.written is not None and operands[op.written]._is_view():
            op.refusal = _ON_VIEW
        if _is_refused(op, operands):
            return
        with torch.no_grad():
            markers.mark_operands(list(operands), number, are_results=False)
        self._edges[number] = [get_gradient_edge(x) if x.requires_grad else None for x in operands]

    def end(self, number: int, made: Any) -> None:
        """Let hooks mark the errors of an op, and the gradients of its inputs."""
        op, given = self._ops[number], self._edges.pop(number, None)
        op.is_tuple = not isinstance(made, Tensor)
        results = [x for x in (made if op.is_tuple else [made]) if isinstance(x, Tensor)]
        if given is None or _is_refused(op, results):
            return
        places: dict[_Edge, list[int]] = defaultdict(list)
        for position, edge in enumerate(given):
            if edge is not None:
                places[edge.node, edge.output_nr].append(position)
        begins: dict[Any, dict[int, int]] = defaultdict(dict)  # by autograd node: results by the number of its output
        for position, x in enumerate(results):
            if x.requires_grad and x.grad_fn is not None and (x.grad_fn, x.output_nr) not in places:
                begins[x.grad_fn][x.output_nr] = position
        found = _ends(begins, places)
        if begins and not found:
            op.refusal = _ON_VIEW
            return
        with torch.no_grad():
            markers.mark_operands(results, number, are_results=True)
        _Hooks(op, number).register(begins, self._numbered(op, found, places))

    @staticmethod
    def _numbered(
        op: CalledOp, found: Sequence[tuple[Any, int, _Edge]], places: dict[_Edge, list[int]]
    ) -> dict[Any, dict[int, int]]:
        """Return, by autograd node, the operands by the number of its input."""
        ends: dict[Any, dict[int, int]] = defaultdict(dict)
        by_edge: dict[_Edge, list[tuple[Any, int]]] = defaultdict(list)
        for node, at, edge in found:
            by_edge[edge].append((node, at))
        for edge, own in by_edge.items():
            positions = places[edge]
            # The inputs of one autograd node are in the order of the op's schema, as positional arguments are.
            num_keywords = sum(position >= op.num_positional for position in positions)
            is_known = len(own) == len(positions) and len({id(node) for node, _ in own}) == 1 and num_keywords < 2
            op.repeated |= len(positions) > 1 and not is_known
            for n, (node, at) in enumerate(own):
                ends[node][at] = positions[n] if is_known else positions[0]
        return ends


class _Hooks:
    """Autograd hooks that insert the markers of an op."""

    def __init__(self, op: CalledOp, number: int) -> None:
        self._op, self._number = op, number
        # By backward: one that the forward runs, by torch.autograd.grad, has others than the one behind it.
        self._errors: dict[int, list[Tensor]] = defaultdict(list)

    def register(self, begins: dict[Any, dict[int, int]], ends: dict[Any, dict[int, int]]) -> None:
        """Register the hooks; results and operands are by autograd node, and number of its output or input."""
        for node, results in begins.items():
            node.register_prehook(partial(self._at_begin, results))
        for node, operands in ends.items():
            node.register_hook(partial(self._at_end, operands))

    def _at_begin(self, results: dict[int, int], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        marked = list(grads)
        for at, g in self._plain(results, grads):
            marked[at] = error = markers.mark_op_error(g, self._number, results[at])
            self._errors[autograd.backward_id()].append(error)
        return tuple(marked)

    def _at_end(self, operands: dict[int, int], grads: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...]:
        marked = list(grads)
        errors = self._errors[autograd.backward_id()]
        for at, g in self._plain(operands, grads) if errors else ():
            marked[at] = markers.mark_op_gradient(g, errors, self._number, operands[at])
        return tuple(marked)

    def _plain(self, places: dict[int, int], grads: Sequence[Tensor | None]) -> list[tuple[int, Tensor]]:
        found = [(at, g) for at, g in enumerate(grads) if g is not None and at in places]
        return [] if _is_refused(self._op, [g for _, g in found]) else found


def _is_refused(op: CalledOp, tensors: Sequence[Tensor]) -> bool:
    """Whether an op has a tensor that cannot be marked; note it."""
    for x in tensors:
        if fake_tensors.is_wrapper(x) or x.layout is not torch.strided:
            op.refusal = _SUBCLASS.format(type(x).__name__ if fake_tensors.is_wrapper(x) else x.layout)
    return bool(op.refusal) or any(map(autograd.is_transformed, tensors))


def _ends(begins: Collection[Any], places: Collection[_Edge]) -> list[tuple[Any, int, _Edge]]:
    """Return the autograd edges from an op to its inputs: node, number, edge."""
    found: list[tuple[Any, int, _Edge]] = []
    seen, todo = set(begins), list(begins)[::-1]
    while todo:
        node = todo.pop()
        for at, edge in enumerate(node.next_functions):
            if edge in places:
                found.append((node, at, edge))
            elif edge[0] is not None and edge[0] not in seen:
                seen.add(edge[0])
                todo.append(edge[0])
    return found


_traced_ops: ContextVar[_OpTracing | None] = ContextVar("gradrewrite_op_tracing", default=None)


def _before(number: int, *operands: Tensor) -> None:
    tracing = _traced_ops.get()
    if tracing is not None and make_fx.is_tracing():
        tracing.begin(number, operands)


def _behind(number: int, made: Any) -> None:
    tracing = _traced_ops.get()
    if tracing is not None and make_fx.is_tracing():
        tracing.end(number, made)


fx.node.has_side_effect(_before)
fx.node.has_side_effect(_behind)


@contextlib.contextmanager
def tracing_ops(ops: Sequence[CalledOp]) -> Iterator[None]:
    """Let the probes around these ops act inside the block."""
    token = _traced_ops.set(_OpTracing(ops) if ops else None)
    try:
        yield
    finally:
        _traced_ops.reset(token)
