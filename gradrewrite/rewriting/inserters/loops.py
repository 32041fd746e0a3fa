"""Insertions inside loops: each body has a canvas of its own, and is cut into forward and backward afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, fx

from gradrewrite._compat import fake_tensors
from gradrewrite._utils.grouping import grouped
from gradrewrite.ir import editing
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.loop_code import OP_LOOP, LoopCode, hold_code
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.marked_loops import Loop, loop_backward, loop_forward, loop_of
from gradrewrite.ir.markers import read_markers, value_of
from gradrewrite.ir.outputs import Pack, Placed, PlacedReport
from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.replay_graph import ReplayLoop
from gradrewrite.policy.rules import Answered
from gradrewrite.policy.sampling import Measured
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.config import RewriteConfig
from gradrewrite.rewriting.forward_values import ForwardValues
from gradrewrite.rewriting.inserters.loop_backwards import Covers, Insert, insert_at_ops
from gradrewrite.rewriting.inserters.single import insert
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.rewriting.loop_answers import IterationClass, Table, classes_of, name_rolled, points_in, sites_in
from gradrewrite.rewriting.loop_bodies import LoopParts, partition, trace_body
from gradrewrite.rewriting.loop_calls import LoopCalls, flat, replace_results, return_copies
from gradrewrite.rewriting.loop_replays import describe
from gradrewrite.sites import Site

Ask = Callable[[Site], tuple[Answered, ...]]


@dataclass
class InsertedLoops:
    """The insertions in the loops of a graph."""

    answers: dict[Site, tuple[Answered, ...]] = field(default_factory=dict)
    anchors: dict[Site, Anchor] = field(default_factory=dict)
    codes: list[LoopCode | Loop] = field(default_factory=list)  # and loops that are left as they are
    of_subclasses: dict[Site, tuple[Answered, ...]] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)  # that carry records out of the graph
    replaced: dict[str, str] = field(default_factory=dict)  # by new node: the operator in whose place it is
    recording: set[str] = field(default_factory=set)  # keys of loops with records or kept tensors, that have its length
    replayed: dict[str, ReplayLoop] = field(default_factory=dict)  # by the node that runs a loop
    covers: Covers = field(default_factory=dict)  # of the backward of ops, where zeros stay zeros


def insert_in_loops(
    canvas: Canvas, marked: MarkedJointGraph, config: RewriteConfig, ask: Ask, measured: Measured
) -> InsertedLoops:
    """Insert the policy's answers inside loops, and put their code in the place of their operators."""
    found = InsertedLoops()
    forwards, backwards = (
        grouped((loop_of(n).key, n) for n in canvas.graph.find_nodes(op="call_function", target=target))
        for target in (loop_forward, loop_backward)
    )
    insertions: list[_Insertion] = []
    for loop in marked.loops:
        own, back = forwards.get(loop.key, []), backwards.get(loop.key, [])
        if len(own) > 1 or len(back) > 1:  # one for each tensor inside of a tensor subclass
            answers = {site: ask(site) for site in sites_in(loop)}
            found.answers |= answers
            found.of_subclasses |= answers
            found.anchors |= dict.fromkeys(answers, Anchor(own[0].name, -1))
            found.codes.append(loop)
        elif own:
            insertions.append(_Insertion(canvas, config, loop, own[0], back[0] if back else None, found))
        else:
            found.answers |= {site: ask(site) for site in sites_in(loop)}
    name_rolled(marked)
    for insertion in insertions:
        insertion.run(ask, measured, marked)
    if insertions:
        copies = editing.copy_repeated_gradients(canvas.graph)
        found.replaced |= {copy: found.replaced.get(of, of) for copy, of in copies.items()}
    return found


def run_loops_in(marked: MarkedJointGraph, config: RewriteConfig) -> tuple[LoopCode | Loop, ...]:
    """Put the code of loops into a graph without gradients."""
    found = insert_in_loops(Canvas(marked.graph), marked, config, lambda _: (), "all")
    return tuple(found.codes)


class _Insertion:
    """The insertions in one loop."""

    def __init__(
        self,
        outer: Canvas,
        config: RewriteConfig,
        loop: Loop,
        forward: fx.Node,
        backward: fx.Node | None,
        found: InsertedLoops,
    ) -> None:
        self._outer, self._loop, self._found = outer, loop, found
        self._forward, self._backward = forward, backward
        wanted: list[int] | None = None if backward is None else backward.args[2]  # type: ignore[assignment]
        self._wanted = wanted or []
        self._body = trace_body(loop, [node.meta["val"] for node in self._given], wanted)
        positions = {node: number for number, node in enumerate(outer.graph.nodes)}
        self._orders = {True: positions[forward], False: positions.get(backward, 0)}
        label = config.label()
        self._canvas = Canvas(self._body.graph, config.loss_scale, config.states, None, label, outer=outer)
        self._canvas.packing.numbering.label = label
        self._label = label
        self._edits: list[tuple[IterationClass, Edit]] = []
        self._acting: dict[str, int] = {}  # numbers of errors, by the nodes that act on them
        self._store = config.states
        self._states: list[tuple[IterationClass, str]] = []  # with their keys in the first iterations
        self._new_states: list[tuple[str, Tensor]] = []  # of all iterations, that are set
        self._tables: list[Table] = []
        self._carried: dict[str, tuple[Tensor, fx.Node]] = {}  # states, with the nodes that are read now

    @property
    def _given(self) -> list[fx.Node]:
        """The arguments of the loop: other loops before it may have replaced them since it was traced."""
        given: list[fx.Node] = self._forward.args[0]  # type: ignore[assignment]
        return given

    def run(self, ask: Ask, measured: Measured, marked: MarkedJointGraph) -> None:
        """Insert, cut the body, and put its code into the graph."""
        loop, self._inputs = self._loop, marked.inputs_by_node()
        own_answers = {site: ask(site) for site in sites_in(loop)}
        self._found.answers |= own_answers
        ahead = sites_in(loop, fake_tensors.hint_of(loop.length), loop.num_answered)
        answers = own_answers | {site: ask(site) for site in ahead}
        self._found.answers |= insert_at_ops(
            self._canvas, self._body, marked, self._given, ask, measured, self._insert, self._found.covers
        )
        activations, errors = self._markers = read_markers(self._body.graph)
        used = editing.take_used(self._body.graph)
        order = {node: number for number, node in enumerate(self._body.graph.nodes)}
        for name in self._loop.numbers:
            number = self._loop.numbers[name]
            forward, marker = activations.get(number), errors.get(number)
            if forward is not None:
                for own in classes_of(self._loop, answers, name, "activation", measured):
                    self._insert(own, InsertionPoint(own.site, forward.all_input_nodes[0], forward, order[forward]))
            if marker is not None:
                node = self._canvas.current(marker.all_input_nodes[0])
                first = InsertionPoint(self._loop.site(name, "error"), node, marker, order[marker], marker=marker)
                for own in classes_of(self._loop, answers, name, "error", measured):
                    point = InsertionPoint(own.site, node, marker, order[marker])
                    point.value = used.get(number) if forward is None else forward.all_input_nodes[0]
                    num_edits = len(self._edits)
                    node = self._insert(own, point)
                    self._acting |= {n: number for _, edit in self._edits[num_edits:] for n in edit.nodes}
                if node is not first.node:
                    self._canvas.replace(first, node)
        self._canvas.check_states()
        replayed = describe(self._body, self._acting)
        packs = self._add_records()
        kept = self._add_kept()
        self._fix_lengths(is_recording=bool(packs or kept))
        self._add_states()
        self._add_tables()
        editing.add_outputs(self._body.graph, [last for _, last in self._carried.values()])
        self._canvas.erase_unused()
        self._lift_live()
        parts = partition(self._body, self._given, marked.engine)
        self._found.replayed |= dict.fromkeys(self._emit(parts, packs, kept), replayed)
        for own, edit in self._edits:
            by_iteration = {n: own.edit_at(edit, n, self._label) for n in self._iterations_of(own)}
            replayed.actions.update(dict.fromkeys(edit.nodes, by_iteration))

    def _fix_lengths(self, *, is_recording: bool) -> None:
        """Fix the lengths of earlier loops of its name, as far as its names need them."""
        if is_recording:
            self._found.recording.add(self._loop.key)
        for other in self._loop.before:
            if self._states or (is_recording and other.key not in self._found.recording):
                other.fix()

    def _insert(self, own: IterationClass, point: InsertionPoint, insert: Insert = insert) -> fx.Node:
        """Insert at a value in some iterations; return the result in all of them."""
        canvas, packing = self._canvas, self._canvas.packing
        before, num_placed, num_records = point.node, len(packing.placed), len(packing.records)
        num_edits = len(canvas.edits)
        for insertion in own.insertions:
            refuse(insertion, Context(own.site, is_in_loop=True))
        self._let_read(own)
        insert(canvas, point, own.insertions)
        scope = canvas.states_at(str(own.site))
        if scope is not None:
            self._states += ((own, key) for key in scope.keys if key not in scope.carried)
        self._carry_states(own, point)
        self._tables += own.tables
        by_iteration = {id(table.tensor): table.values for table in own.tables}
        for number in range(num_placed, len(packing.placed)):
            placed = packing.placed[number]
            bounds = tuple((key, by_iteration.get(id(bound), bound)) for key, bound in placed.bounds)
            packing.placed[number] = replace(placed, iterations=own.iterations, bounds=bounds)
        self._edits += ((own, edit) for edit in canvas.edits[num_edits:])
        if own.is_all:
            return point.node
        for number in range(num_records, len(packing.records)):
            record = packing.records[number]
            node = self._where(own, record.node, None, point.before)
            packing.records[number] = replace(record, node=node)
        return before if point.node is before else self._where(own, point.node, before, point.before)

    def _let_read(self, own: IterationClass) -> None:
        """Let actions read values of the same iteration."""
        if any(insertion.read_patterns for insertion in own.insertions):
            points = points_in(self._loop, self._markers, own.iterations.spans[0][0])
            pairs = zip(self._given, self._body.graph.find_nodes(op="placeholder"), strict=False)
            inputs = {node: self._inputs[outer] for outer, node in pairs if outer in self._inputs}
            self._canvas.let_read(points, inputs, _IN_LOOP, is_repeated=len(own.answered) > 1)

    def _carry_states(self, own: IterationClass, point: InsertionPoint) -> None:
        """Chain the reads and new values of carried states."""
        graph, canvas = self._body.graph, self._canvas
        for key, state in canvas.carried.take().items():
            if key not in self._carried:
                value = fake_tensors.fake_like(self._given[0].meta["val"], state.tensor)
                self._carried[key] = state.tensor, self._body.add_carried(state.tensor, value)
            tensor, before = self._carried[key]
            last = state.chain(graph, canvas.current, before) or before
            canvas.packing.states.pop(key, None)
            if last is not before and not own.is_all:
                last = self._where(own, last, before, point.before)
            self._carried[key] = tensor, last

    def _where(self, own: IterationClass, value: fx.Node, other: fx.Node | None, before: fx.Node) -> fx.Node:
        """Select a value in the iterations of a class, and another, or 0, in the others."""
        iteration = self._body.iteration()

        def run(number: Tensor, x: Tensor, *rest: Tensor) -> list[Tensor]:
            is_inside = torch.zeros((), dtype=torch.bool, device=number.device)
            for first, last in own.iterations.spans:
                is_in_span = number >= first
                is_inside = is_inside | (is_in_span if last is None else is_in_span & (number <= last))
            return [torch.where(is_inside, x, rest[0] if rest else torch.zeros_like(x))]

        nodes = [iteration, value, *([] if other is None else [other])]
        tag = "is_forward" if own.site.traits.in_forward else "is_backward"
        (node,), _ = editing.compute(self._body.graph, run, nodes, before, tag)
        return node

    def _add_records(self) -> list[tuple[Pack, bool]]:
        """Pack the records of an iteration as a further output of the forward, and one of the backward."""
        body, found = self._body, []
        for is_forward in (True, False):
            records = [r for r in self._canvas.packing.records if r.is_forward == is_forward]
            records.sort(key=lambda record: not record.skips)
            if not records:
                continue
            nodes, tag = [record.node for record in records], "is_forward" if is_forward else "is_backward"
            (node,), _ = editing.compute(body.graph, _packed, nodes, body.graph.output_node(), tag)
            keys = tuple(key for record in records for key in record.keys)
            skips = sum(len(record.keys) for record in records if record.skips)
            found.append((Pack(keys, skips), is_forward))
            self._add_output(node, is_forward=is_forward)
        return found

    def _add_kept(self) -> list[bool]:
        """Return kept tensors of an iteration as further outputs; whether each is one of the forward."""
        placed = [p for p in self._canvas.packing.placed if p.is_kept]
        found = [p.site.traits.in_forward for p in placed]
        for node, is_forward in zip(self._canvas.packing.kept, found, strict=True):
            self._add_output(self._canvas.current(node), is_forward=is_forward)
        return found

    def _add_states(self) -> None:
        """Give each iteration its states, and return the new ones as further outputs."""
        body, packing = self._body, self._canvas.packing
        at_hand, length = fake_tensors.hint_of(self._loop.length), self._loop.limit() if self._states else 0
        found: dict[int, tuple[fx.Node, fx.Node, Tensor, str]] = {}  # values before and behind, table, key
        held = [(own, key, self._store.held(key)) for own, key in self._states]  # before they become rows of a stack
        for own, key, tensor in held:
            site, name, calls = own.site, key.removeprefix(f"{own.site}"), own.calls(length)
            acting = [calls[n] for n in own.iterations.of(length)]
            in_use = own.calls(at_hand)[-1] + 1
            states = self._store.stack(f"{site.kind}:{site.name}", name, calls, acting, in_use)
            given, last, *_ = found.get(id(states), (None, None))  # classes of iterations share the states of a name
            given = self._read_by_iteration(tensor, states, tensor, given)
            last = last or given
            _, node = packing.states.pop(key, (None, None))
            if node is not None:
                node = self._canvas.current(node)
                last = node if own.is_all else self._where(own, node, last, body.graph.output_node())
            found[id(states)] = given, last, states, key
        for given, last, states, key in found.values():
            if last is not given:  # else it is only read
                self._add_output(last, is_forward=False)
                self._new_states.append((key, states))

    def _add_tables(self) -> None:
        """Give each iteration the settings that differ from one to another."""
        device = self._given[0].meta["val"].device
        for table in self._tables:
            with fake_tensors.outside_of_transforms():
                rows = table.rows(self._loop.limit(), device)
                row = rows[0]
            self._read_by_iteration(table.tensor, rows, row)

    def _read_by_iteration(self, tensor: Tensor, rows: Tensor, row: Tensor, given: fx.Node | None = None) -> fx.Node:
        """Let the readers of a live tensor read the row of their iteration instead; return its node."""
        if given is None:
            given = self._body.add_table(rows, fake_tensors.fake_like(self._given[0].meta["val"], row))
        editing.read_instead_of_live(self._body.graph, tensor, given)
        return given

    def _add_output(self, node: fx.Node, *, is_forward: bool) -> None:
        body = self._body
        if is_forward:
            editing.insert_outputs(body.graph, body.num_results + body.num_forward, [node])
            body.num_forward += 1
        else:
            editing.add_outputs(body.graph, [node])

    def _lift_live(self) -> None:
        live = editing.live_tensors(self._body.graph)
        lifted = editing.lift_live(self._body.gm)
        self._body.live = [live[name] for name, _ in lifted]
        if lifted:
            editing.move_inputs(self._body.graph, len(lifted), self._body.num_given)

    def _emit(self, parts: LoopParts, packs: Sequence[tuple[Pack, bool]], kept: Sequence[bool]) -> list[str]:
        """Put the code of the loop in the place of its operators; return the names of its calls."""
        graph, forward, backward = self._outer.graph, self._forward, self._backward
        code = LoopCalls(parts)
        given = list(self._given)
        nodes, new = editing.compute(graph, code.forward, given, forward, "is_forward")
        for node in new:
            node.meta |= {key: forward.meta[key] for key in _OF_CHECKPOINTS if key in forward.meta}
        results, further, made = code.split_forward(nodes)
        memory = {fake_tensors.storage_key(value_of(node)) for node in (*made, *forward.users)}
        replace_results(forward, results)
        return_copies(graph, memory)
        outputs = {True: further, False: []}
        self._found.codes.append(parts.forward)
        calls = {True: self._note(new, forward)}
        if backward is not None:
            values = ForwardValues(graph)
            tangents: list[fx.Node] = backward.args[1]  # type: ignore[assignment]
            inputs = [*tangents, *given, *map(values.for_backward, made)]
            is_live = self._body.live or self._body.tables
            tag = "must_be_in_backward" if is_live else "is_backward"
            nodes, new = editing.compute(graph, code.backward, inputs, backward, tag)
            positions = {n: at for at, n in enumerate(self._body.wanted)}
            replace_results(backward, [nodes[positions[n]] for n in self._wanted])
            outputs[False] = nodes[len(self._body.wanted) :]
            states = dict(zip(self._carried, nodes[len(nodes) - len(self._carried) :], strict=True))
            self._outer.carried.note({key: tensor for key, (tensor, _) in self._carried.items()}, new, states)
            assert parts.backward is not None
            self._found.codes.append(parts.backward)
            calls[False] = self._note(new, backward)
        self._report(parts, packs, kept, outputs, calls)
        return list(calls.values())

    def _report(
        self,
        parts: LoopParts,
        packs: Sequence[tuple[Pack, bool]],
        kept: Sequence[bool],
        outputs: Mapping[bool, list[fx.Node]],
        calls: Mapping[bool, str],
    ) -> None:
        """Report records, kept tensors and edits of the loop to the canvas of the graph."""
        outer, left = self._outer, {is_forward: iter(nodes) for is_forward, nodes in outputs.items()}
        of_packs = []
        for pack, is_forward in packs:
            stack, tag = next(left[is_forward]), "is_forward" if is_forward else "is_backward"
            (node,), new = editing.compute(outer.graph, flat, [stack], stack.next, tag)
            of_packs.append((pack, node, is_forward))
            self._found.nodes += (node.name for node in new)
            self._found.replaced |= {node.name: calls[is_forward] for node in new}
        of_kept = [next(left[is_forward]) for is_forward in kept]
        for key, states in self._new_states:
            outer.packing.states[key] = states, next(left[False])
        codes = zip(calls.values(), filter(None, (parts.forward, parts.backward)), strict=True)
        bodies = {name: {node.name for node in code.body.graph.nodes} for name, code in codes}
        outer.packing.add_loop(map(partial(self._seen_outside, calls), self._canvas.packing.placed), of_packs, of_kept)
        for own, edit in self._edits:
            name = calls[edit.site.traits.in_forward]
            inserted = tuple(f"{name}.{node}" for node in edit.nodes if node in bodies[name])
            for n in self._iterations_of(own):
                at = own.edit_at(edit, n, self._label)
                outer.edits.append(replace(at, nodes=inserted if at.site == own.site else ()))
        for site in sites_in(self._loop):
            self._found.anchors[site] = Anchor(calls.get(site.traits.in_forward, calls[True]), -1)

    def _iterations_of(self, own: IterationClass) -> Iterable[int]:
        return own.iterations.of(fake_tensors.hint_of(self._loop.length))

    def _note(self, new: Sequence[fx.Node], replaced: fx.Node) -> str:
        """Note new nodes and the operator that they replace; return the name of the call of the loop among them."""
        self._found.replaced |= {node.name: replaced.name for node in new}
        (call,) = (node for node in new if node.target is OP_LOOP)
        hold_code(call)
        return call.name

    def _seen_outside(self, calls: Mapping[bool, str], placed: Placed[PlacedReport]) -> Placed[PlacedReport]:
        """Let a check look at the loop."""
        if placed.seen is None:
            return placed
        is_forward = placed.site.traits.in_forward
        return replace(placed, seen=Anchor(calls[is_forward], self._orders[is_forward]))


_IN_LOOP = " in this iteration of the loop (loops='unrolled' lets a function read all values)"
_OF_CHECKPOINTS = ("recompute", "ac_graph_id", "has_backward_hook")


def _packed(*values: Tensor) -> list[Tensor]:
    dtype = torch.float64 if any(v.dtype == torch.float64 for v in values) else torch.float32
    return [torch.cat([v.reshape(-1).to(dtype) for v in values])]
