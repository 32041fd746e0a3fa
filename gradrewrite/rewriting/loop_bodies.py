"""Bodies of loops: the joint graph of one iteration, and its parts in forward, backward and behind the loop."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, fake_tensors, make_fx, operators
from gradrewrite.errors import TraceError
from gradrewrite.ir import editing
from gradrewrite.ir.loop_code import LoopCode, code_for
from gradrewrite.ir.marked_loops import Loop
from gradrewrite.rewriting.loop_saved import save_less, saved_nodes

aten = torch.ops.aten
Given = Literal["input", "invariant", "before", "after", "output"]


@dataclass(eq=False)
class JointBody:
    """The joint graph of one iteration, with the markers of its values.

    Its inputs are carries, inputs, invariants, and the gradients of the floating results; its outputs are the results,
    then the gradients of the wanted inputs.
    """

    loop: Loop
    gm: fx.GraphModule
    num_inputs: int  # those of the loop, and the number of the iteration if something asks for it
    num_results: int
    floating: list[int]  # positions of the results that have a gradient
    wanted: list[int]  # positions of the inputs whose gradients are asked for
    num_forward: int = 0  # further outputs of the forward, behind the results
    live: list[Tensor] = field(default_factory=list)  # further invariants
    # States and settings ``[T, *shape]``; inputs of the backward behind the gradients. They may have more rows.
    tables: list[Tensor] = field(default_factory=list)
    # States that are carried from iteration to iteration of the backward: further carries, and its last results.
    carried: list[Tensor] = field(default_factory=list)

    @property
    def graph(self) -> fx.Graph:
        """The graph."""
        return self.gm.graph

    @property
    def num_moving(self) -> int:
        """Number of inputs that differ from iteration to iteration, gradients left out."""
        return self.loop.num_carries + self.num_inputs

    @property
    def num_given(self) -> int:
        """Number of inputs of the backward alone: gradients, rows of tables, and carried states."""
        return len(self.floating) + len(self.tables) + len(self.carried)

    def add_table(self, rows: Tensor, value: Tensor) -> fx.Node:
        """Add a table as an input of the backward; return the node of the row of an iteration."""
        self.tables.append(rows)
        last = self.graph.find_nodes(op="placeholder")[-1 - len(self.carried)]
        return editing.input_behind(last, f"tangents_row_{len(self.tables)}", value)

    def add_carried(self, state: Tensor, value: Tensor) -> fx.Node:
        """Add a state as a carry of the backward; return the node of its value before an iteration."""
        self.carried.append(state)
        last = self.graph.find_nodes(op="placeholder")[-1]
        return editing.input_behind(last, f"tangents_carried_{len(self.carried)}", value)

    def iteration(self) -> fx.Node:
        """Return the number of the iteration, int64, 0-d; made when it is first asked for."""
        placeholders = self.graph.find_nodes(op="placeholder")
        if self.num_inputs == self.loop.num_inputs:
            value = fake_tensors.fake_like(placeholders[0].meta["val"], torch.zeros((), dtype=torch.int64))
            self.num_inputs += 1
            return editing.input_behind(placeholders[self.num_moving - 2], "primals_iteration", value)
        node: fx.Node = placeholders[self.num_moving - 1]
        return node


def trace_body(loop: Loop, given: Sequence[Tensor], wanted: Collection[int] | None) -> JointBody:
    """Trace the joint graph of one iteration, for fake arguments of the loop; ``wanted`` is None without a backward."""
    carries, inputs, invariants = loop.split(given)
    mode = fake_tensors.fake_mode_of(given)
    with torch.no_grad(), mode:
        rows = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in carries]
        rows += [torch.empty(t.shape[1:], dtype=t.dtype, device=t.device) for t in inputs]
        rows += [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in invariants]
        results = loop.body(*rows)
        floating = [n for n, r in enumerate(results) if loop.is_differentiable(n, r)]
        tangents = [torch.empty(results[n].shape, dtype=results[n].dtype, device=results[n].device) for n in floating]
    differentiable = [n for n, t in enumerate(carries) if loop.is_differentiable(n, t)]
    asked = [] if wanted is None else [*differentiable, *sorted(n for n in wanted if n >= len(carries))]

    def joint(*tensors: Tensor) -> list[Any]:
        primals, gradients = tensors[: len(rows)], tensors[len(rows) :]
        with torch.enable_grad():
            for n in asked:
                primals[n].requires_grad_(True)
            made = loop.body(*primals)
            pairs = [(made[n], g) for n, g in zip(floating, gradients, strict=True) if made[n].requires_grad]
            outputs, seeds = [r for r, _ in pairs], [g for _, g in pairs]
            found: Sequence[Any] = [None] * len(asked)
            if outputs and asked:
                found = torch.autograd.grad(outputs, [primals[n] for n in asked], seeds, allow_unused=True)
        with torch.no_grad():
            known = [torch.zeros_like(primals[n]) if g is None else g for n, g in zip(asked, found, strict=True)]
            return [*(r.contiguous() for r in made), *(g.contiguous() for g in known)]

    inputs_of_joint = [*rows, *tangents]
    gm = make_fx.trace(make_fx.trace_parts(joint, inputs_of_joint), inputs_of_joint)
    gm.graph.eliminate_dead_code()
    placeholders = gm.graph.find_nodes(op="placeholder")
    editing.rename_inputs(placeholders[: len(rows)], "primals")
    editing.rename_inputs(placeholders[len(rows) :], "tangents")
    behind = reached_from(gm.graph, placeholders[len(rows) :])
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta["partitioner_tag"] = "is_backward" if node in behind else "is_forward"
    return JointBody(loop, gm, loop.num_inputs, len(results), floating, asked)


def reached_from(graph: fx.Graph, roots: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that are computed from others, and these."""
    found = set(roots)
    for node in graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


@dataclass(eq=False)
class LoopParts:
    """A loop in code: forward, backward, and the gradients of invariants behind the loop."""

    body: JointBody
    hoisted: fx.GraphModule  # of the invariants and live tensors: values that are the same in each iteration
    forward: LoopCode
    backward: LoopCode | None  # None where nothing is differentiated
    num_hoisted: int = 0
    forward_reads: list[int] = field(default_factory=list)  # invariants, by position; see ``invariants_of``
    results: list[tuple[Given, int]] = field(default_factory=list)  # results and further outputs, behind the carries
    saved: list[tuple[Given, int]] = field(default_factory=list)  # read by the backward, moving ones first
    num_moving: int = 0
    inputs_at: list[int] = field(default_factory=list)  # gradients of inputs, among the stacks of the backward
    further_at: list[int] = field(default_factory=list)  # further outputs of the backward, likewise
    # gradients of invariants, from what is saved and the stacks of the backward
    tail: Callable[[list[Tensor], list[Tensor]], list[Tensor]] | None = None

    def invariants_of(self, invariants: Sequence[Tensor]) -> list[Tensor]:
        """Return all values that do not change: invariants, live tensors, and values computed from both."""
        known = [*invariants, *self.body.live]
        return [*known, *self.hoisted(*known)]


def partition(body: JointBody, given: Sequence[fx.Node], engine: str) -> LoopParts:
    """Cut the joint graph of an iteration into its parts; it has no markers any more.

    ``given`` are the arguments of the loop in the graph around it.
    """
    gm = body.gm
    gm.graph.eliminate_dead_code()
    hoisted = _hoist(gm, body.num_moving, body.num_given)
    gm.recompile()
    num_forward = body.num_results + body.num_forward
    if not body.floating or len(editing.outputs_of(gm.graph.output_node())) == num_forward:
        return _forward_alone(body, hoisted, engine)
    forward, backward = aot_autograd.min_cut_partition(gm, (), num_fwd_outputs=num_forward)
    _express_sizes(backward, body.num_given)
    saved = _saved(body, given, forward, backward)
    parts = _cut_forward(body, hoisted, forward, saved, engine)
    _cut_backward(parts, forward, backward, engine)
    return parts


def _forward_alone(body: JointBody, hoisted: fx.GraphModule, engine: str) -> LoopParts:
    outputs = editing.outputs_of(body.graph.output_node())[: body.num_results + body.num_forward]
    editing.return_instead(body.graph, outputs)
    for node in body.graph.find_nodes(op="placeholder")[-body.num_given :] if body.num_given else ():
        editing.erase(node)
    return _cut_forward(body, hoisted, body.gm, [], engine)


def _saved(
    body: JointBody, given: Sequence[fx.Node], forward: fx.GraphModule, backward: fx.GraphModule
) -> list[fx.Node]:
    """Return the saved nodes of a forward; the backward computes others again."""
    placeholders = forward.graph.find_nodes(op="placeholder")
    results = editing.outputs_of(forward.graph.output_node())[: body.num_results + body.num_forward]
    carried = list(zip(placeholders[: body.loop.num_carries], results, strict=False))
    free = placeholders[body.num_moving :]
    inputs = zip(body.loop.split(placeholders)[1], body.loop.split(given)[1], strict=True)
    free += (node for node, outer in inputs if operators.memory_of(outer).op == "placeholder")  # a view of an input
    saved = saved_nodes(forward, backward, body.num_given)
    return save_less(forward, backward, saved, carried, results, free)


def _hoist(gm: fx.GraphModule, num_moving: int, num_tangents: int) -> fx.GraphModule:
    """Take out the nodes on invariants alone; their values become further invariants, before the tangents."""
    graph = gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    count = len(placeholders) - num_tangents
    fixed, tangents = placeholders[num_moving:count], placeholders[count:]
    moving = reached_from(graph, [*placeholders[:num_moving], *tangents])
    of_fixed = reached_from(graph, fixed)
    taken = [node for node in graph.nodes if node.op == "call_function" and node in of_fixed and node not in moving]
    needed = [node for node in taken if any(user in moving or user.op == "output" for user in node.users)]
    outer = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in fixed:
        copies[node] = outer.placeholder(node.name)
    for node in graph.nodes:  # constants are copied too
        if node.op == "call_function" and (node in of_fixed or not node.all_input_nodes) and node not in moving:
            copies[node] = outer.node_copy(node, lambda n: copies[n])
    outer.output(tuple(copies[node] for node in needed))
    outer.eliminate_dead_code()
    last = placeholders[count - 1]
    for number, node in enumerate(needed):
        last = editing.input_instead(node, f"primals_{count + number}", last)
    graph.eliminate_dead_code()
    return fx.GraphModule({}, outer)


def _express_sizes(backward: fx.GraphModule, num_tangents: int) -> None:
    """Let a backward read symbolic sizes off its inputs, so that all inputs are tensors."""
    placeholders = backward.graph.find_nodes(op="placeholder")
    tensors = [node for node in placeholders if isinstance(node.meta["val"], Tensor)]
    for node in placeholders:
        if isinstance(node.meta["val"], Tensor):
            continue
        expression = node.meta["val"].node.expr
        found = next(
            (
                (tensor, d)
                for tensor in tensors
                for d, size in enumerate(tensor.meta["val"].shape)
                if isinstance(size, torch.SymInt) and size.node.expr == expression
            ),
            None,
        )
        if found is None:
            raise TraceError(f"a loop saves the size {expression}, which none of its tensors has")
        editing.size_instead(node, *found)
    backward.recompile()


def _cut_forward(
    body: JointBody, hoisted: fx.GraphModule, forward: fx.GraphModule, saves: Sequence[fx.Node], engine: str
) -> LoopParts:
    loop, graph = body.loop, forward.graph
    placeholders = graph.find_nodes(op="placeholder")
    outputs = editing.outputs_of(graph.output_node())
    number, num_moving = loop.num_carries, body.num_moving
    carried, results = outputs[:number], outputs[number : body.num_results + body.num_forward]
    stacked = [False] * number
    stacks: list[fx.Node] = []

    def place(node: fx.Node) -> tuple[Given, int]:
        """Find the stack of a node's values, or add one."""
        if node in placeholders:
            position = placeholders.index(node)
            if position < number:
                stacked[position] = True
                return "before", position
            return ("input", position - number) if position < num_moving else ("invariant", position - num_moving)
        if node in carried:
            stacked[carried.index(node)] = True
            return "after", carried.index(node)
        if node not in stacks:
            stacks.append(node)
        return "output", stacks.index(node)

    def placed_result(node: fx.Node) -> tuple[Given, int]:
        found = place(node)
        if found[0] in ("input", "invariant", "before"):  # a result has memory of its own
            stacks.append(node)
            return "output", len(stacks) - 1
        return found

    own_results = [placed_result(node) for node in results]
    saved = [place(node) for node in saves]
    editing.return_instead(graph, [*carried, *stacks])
    reads = [n - num_moving for n, node in enumerate(placeholders) if n >= num_moving and node.users]
    for n, node in enumerate(placeholders):
        if n >= num_moving and not node.users:
            editing.erase(node)
    code = _code(forward, number, body.num_inputs, tuple(stacked), loop.is_reversed, engine)
    num_hoisted = len(editing.outputs_of(hoisted.graph.output_node()))
    return LoopParts(body, hoisted, code, None, num_hoisted, reads, own_results, saved)


def _cut_backward(parts: LoopParts, forward: fx.GraphModule, backward: fx.GraphModule, engine: str) -> None:
    """Cut the body of the backward in two.

    Nodes for gradients of invariants alone are computed behind the loop, for all iterations.
    """
    body, loop, graph = parts.body, parts.body.loop, backward.graph
    placeholders, outputs = graph.find_nodes(op="placeholder"), editing.outputs_of(graph.output_node())
    num_saved = len(placeholders) - body.num_given
    saved, tangents = placeholders[:num_saved], placeholders[num_saved:]
    num_carries, num_states = sum(n < loop.num_carries for n in body.wanted), len(body.carried)
    of_inputs = sum(loop.num_carries <= n < loop.num_carries + loop.num_inputs for n in body.wanted)
    gradients, further = outputs[: len(body.wanted)], outputs[len(body.wanted) : len(outputs) - num_states]
    states = outputs[len(outputs) - num_states :]
    tangents = [*tangents[:num_carries], *tangents[len(tangents) - num_states :], *tangents[num_carries:]]
    tangents = tangents[: len(tangents) - num_states]
    inside, of_invariants = gradients[: num_carries + of_inputs], gradients[num_carries + of_inputs :]
    kept = needed_for([*inside, *further, *states])
    tail = [node for node in graph.nodes if node.op == "call_function" and node not in kept]
    read = [n for node in tail for n in node.all_input_nodes if n not in set(tail)]
    read = list(dict.fromkeys([*read, *(node for node in of_invariants if node not in set(tail))]))
    emitted = [node for node in read if node not in saved]

    moving = [n for n, (kind, _) in enumerate(parts.saved) if kind != "invariant"]
    still = [n for n in range(num_saved) if n not in moving]
    fixed = {saved[n] for n in still}
    inner = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    num_inputs = len(tangents) - num_carries - num_states + len(moving)
    for node in (*tangents, *(saved[n] for n in moving), *(saved[n] for n in still)):
        copies[node] = inner.placeholder(node.name)
        copies[node].meta = dict(node.meta)
        if node not in fixed:  # a part of a stack, or a carry
            copies[node].meta["val"] = node.meta["val"].new_empty(node.meta["val"].shape)
    for node in graph.nodes:
        if node.op == "call_function" and node in kept:
            copies[node] = inner.node_copy(node, lambda n: copies[n])
    stacks = list(dict.fromkeys([*inside[num_carries:], *emitted, *further]))
    if not num_inputs:  # a loop has as many iterations as its inputs have rows
        last = inner.find_nodes(op="placeholder")[num_carries + num_states - 1]
        editing.input_behind(last, "counter", tangents[0].meta["val"].new_empty((), dtype=torch.bool))
    inner.output(tuple(copies[node] for node in (*inside[:num_carries], *states, *stacks)))
    num_tangents = sum(n < loop.num_carries for n in body.floating)
    assert num_tangents == num_carries
    code = _code(
        fx.GraphModule(backward, inner),
        num_carries + num_states,
        max(1, num_inputs),
        (False,) * (num_carries + num_states),
        not loop.is_reversed,
        engine,
    )
    parts.backward, parts.num_moving = code, len(moving)
    parts.saved = [parts.saved[n] for n in (*moving, *still)]
    positions = {node: n for n, node in enumerate(stacks)}
    parts.inputs_at = [positions[node] for node in inside[num_carries:]]
    parts.further_at = [positions[node] for node in further]
    order = [saved[n] for n in (*moving, *still)]

    summable = _summable(tail, of_invariants, {node for node in read if node in fixed})

    def behind(given: list[Tensor], made: list[Tensor]) -> list[Tensor]:
        known: dict[fx.Node, _Value] = {}
        for node in read:
            if node in saved:
                position = order.index(node)
                known[node] = _Value(given[position], "stack" if position < len(moving) else "fixed")
            else:
                known[node] = _Value(made[positions[node]], "stack")
        for node in tail:
            known[node] = _over_time(node, known, may_sum=node in summable)
        stacks = [*made, *given[: len(moving)]]  # none where all gradients are zeros by themselves
        length = stacks[0].shape[0] if stacks else loop.length
        return [known[node].summed(length) for node in of_invariants]

    parts.tail = behind


def needed_for(nodes: Iterable[Any]) -> set[fx.Node]:
    """Return these nodes, and all that they are computed from."""
    found: set[fx.Node] = set()
    waiting = [node for node in nodes if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of the tail: stacked over the iterations, summed over them, or the same in each."""

    tensor: Tensor
    how: Literal["stack", "sum", "fixed"]

    def summed(self, length: Any) -> Tensor:
        if self.how == "stack":
            return self.tensor.sum(0)
        return self.tensor if self.how == "sum" else self.tensor.mul(length)


def _summable(tail: Sequence[fx.Node], results: Collection[fx.Node], fixed: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes of the tail with linear successors alone; they may be summed over the iterations."""
    constant = set(fixed)
    for node in tail:
        if constant.issuperset(node.all_input_nodes):
            constant.add(node)
    found: set[fx.Node] = set()
    for node in reversed(tail):
        users = [user for user in node.users if user.op != "output"]
        is_linear = all(
            u in found and u.target in _LINEAR and constant.issuperset({*u.all_input_nodes} - {node}) for u in users
        )
        if is_linear and (users or node in results):
            found.add(node)
    return found


def _over_time(node: fx.Node, known: dict[fx.Node, _Value], *, may_sum: bool) -> _Value:
    """Compute a node of the tail for all iterations at once."""
    given = [known.get(a) if isinstance(a, fx.Node) else None for a in node.args]
    kinds = {value.how for value in known_inputs(node, known)}
    target: Any = node.target
    if may_sum and target is aten.mm.default and kinds == {"stack"}:
        left, right = (value.tensor for value in given if value is not None)
        # [T, m, B] and [T, B, n]: one product of [m, T B] and [T B, n]
        product = left.permute(1, 0, 2).reshape(left.shape[1], -1) @ right.reshape(-1, right.shape[2])
        return _Value(product, "sum")
    if may_sum and target is aten.sum.dim_IntList and given[0] is not None and kinds == {"stack"}:
        stack, keeps = given[0].tensor, len(node.args) > 2 and node.args[2]
        dims: Any = node.args[1]
        summed = stack.sum([0, *(d % (stack.dim() - 1) + 1 for d in dims)], keepdim=bool(keeps))
        return _Value(summed.squeeze(0) if keeps else summed, "sum")
    if "stack" not in kinds:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known[n].tensor)
        return _Value(target(*args, **kwargs), "sum" if "sum" in kinds else "fixed")
    assert "sum" not in kinds, f"{node.format_node()} follows a sum"
    inputs = node.all_input_nodes

    def one(*values: Tensor) -> Tensor:
        by_node = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), by_node.__getitem__)
        result: Tensor = target(*args, **kwargs)
        return result

    dims = tuple(0 if known[n].how == "stack" else None for n in inputs)
    return _Value(torch.vmap(one, in_dims=dims)(*(known[n].tensor for n in inputs)), "stack")


def known_inputs(node: fx.Node, known: dict[fx.Node, _Value]) -> list[_Value]:
    """Return the values that a node of the tail reads."""
    return [known[n] for n in node.all_input_nodes]


_LINEAR = frozenset((  # in each of their arguments, the others fixed
    aten.t.default, aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
    aten.clone.default, aten.alias.default, aten._unsafe_view.default, aten.squeeze.dim, aten.unsqueeze.default,
    aten.neg.default, aten.mul.Tensor, torch.ops.prims.convert_element_type.default,
))  # fmt: skip


def _code(
    gm: fx.GraphModule, num_carries: int, num_inputs: int, stacked: tuple[bool, ...], is_reversed: bool, engine: str
) -> LoopCode:
    gm.graph.lint()
    gm.recompile()
    described = [(n.name, str(n.meta["val"])) for n in gm.graph.find_nodes(op="placeholder")]
    parts = (str(gm.graph), described, num_carries, num_inputs, stacked, is_reversed, engine)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    return code_for(LoopCode(key, gm, num_carries, num_inputs, stacked, is_reversed))
