"""Uses of values: the part of a value's error that one destination sends.

Where a rule asks for it, the uses of a value in one call of a module, or by one op, read the value through a node of
their own, so that autograd has the sum of their errors by itself before it adds it to the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from gradrewrite.instrumentation.dynamo_nodes import (
    Aliases,
    checkpoint_body,
    fake_of,
    is_checkpoint,
    op_name,
    returns_its_input,
)
from gradrewrite.instrumentation.inner_gradients import is_inner_gradient
from gradrewrite.instrumentation.module_names import ModuleNames
from gradrewrite.instrumentation.naming import name_values
from gradrewrite.instrumentation.probes import add_probe, add_use, calls_around, is_use, probed, region_call
from gradrewrite.ir.values import ModuleCall, Value
from gradrewrite.sites import ARROW, NamePattern, Pattern

# Ops that hand their first argument on, in another form, part, type or place: a use behind them is one of the argument.
TRANSPARENT = frozenset((
    "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "transpose",
    "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "adjoint", "getattr", "expand", "expand_as",
    "broadcast_to", "narrow", "select", "diagonal", "unfold", "as_strided", "view_as_real", "view_as_complex",
    "split", "split_with_sizes", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind",
    "unsafe_chunk", "unsafe_split", "getitem", "index_select", "take_along_dim", "gather", "take", "flip", "roll",
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone", "cpu", "cuda",
))  # fmt: skip
_ACROSS = (
    "the use reads it through {}, outside of the activation checkpoint that the use is in. Name the result of that "
    "with gr.tap, and the use of that"
)
_WRITTEN = (
    "its memory is written to in place behind the use, by {}. Let the op change a copy: h = h + 1 in the place of "
    "h += 1"
)


_Edge = tuple[fx.Node, ...]  # one use: the value, transparent ops that lead on from it, and the node that uses it


@dataclass(eq=False)
class _Use:
    """The uses of one value in one destination."""

    value: int
    destination: ModuleCall | int  # of an op the number of its value
    around: tuple[ModuleCall, ...]
    edges: list[_Edge] = field(default_factory=list)
    refusal: str = ""

    @property
    def depth(self) -> tuple[bool, int]:
        """A key that sorts a destination behind those around it."""
        return isinstance(self.destination, int), len(self.around)


@dataclass(frozen=True, slots=True)
class _Path:
    """The way from an earlier value to one that transparent ops made of it."""

    source: int
    root: fx.Node
    nodes: tuple[fx.Node, ...]
    used: frozenset[tuple[int, int]]  # values of which these ops are uses themselves, with the pattern


def insert_uses(
    gm: fx.GraphModule, values: list[Value], names: ModuleNames, patterns: Sequence[Pattern], region: str = ""
) -> list[list[str]]:
    """Insert a node and a probe for each use that a pattern asks for, in place; values of uses are appended.

    Bodies of activation checkpoints are entered. Returned are, by pattern, the other uses of values on its left side,
    as text, and for a pattern without a use those with its right side.
    """
    reader = _Reader(values, names, patterns, region)
    reader.read(gm, {}, ())
    for p in set(range(len(patterns))) - reader.found:
        near = _Reader(values, names, [replace(patterns[p], source=NamePattern(glob)) for glob in ("*", "*/*")], region)
        near.read(gm, {}, ())
        reader.others[p] |= dict.fromkeys(map(near.text, near.uses))
    # Later values first: what writes to a value changes what its readers behind that read.
    uses = sorted(reader.uses.values(), key=lambda use: (use.value, use.depth), reverse=True)
    for number, use in enumerate(uses):
        _Insertion(use, values).insert(uses[number + 1 :])
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()
    return [list(found) for found in reader.others]


_Outer = dict[fx.Node, fx.Node]  # placeholders of a checkpoint's body to the nodes outside
_Checkpoints = tuple[tuple[fx.Node, tuple[ModuleCall, ...]], ...]  # with the module calls around, outermost first


class _Reader:
    """Finds the uses that patterns ask for."""

    def __init__(self, values: Sequence[Value], names: ModuleNames, patterns: Sequence[Pattern], region: str) -> None:
        self._values, self._names, self._patterns = values, names, patterns
        self._region = region_call(region)
        known = name_values(values)
        self._sources = {
            n: [p for p, pattern in enumerate(patterns) if n in known and pattern.may_begin_at(known[n]("error"))]
            for n in range(len(values))
        }
        self._texts = {n: str(known[n]("error")) for n, found in self._sources.items() if found}
        self.uses: dict[tuple[int, ModuleCall | int], _Use] = {}
        self.found: set[int] = set()  # patterns with a use
        self.others: list[dict[str, None]] = [{} for _ in patterns]
        self._current: dict[int, int] = {}  # number of the value, by identity of the fake tensor
        self._paths: dict[int, _Path] = {}  # by the value that they lead to
        self._read_at: dict[fx.Node, _Path] = {}  # by transparent op with several results; without itself

    def text(self, use: tuple[int, ModuleCall | int]) -> str:
        """Return a use as text, without the number of the destination."""
        value, end = use
        return f"{self._texts[value]}{ARROW}{_op_address(self._values[end]) if isinstance(end, int) else end[0]}"

    def read(self, gm: fx.GraphModule, outer: _Outer, checkpoints: _Checkpoints) -> None:
        """Read a graph, or the body of a checkpoint."""
        for node in gm.graph.nodes:
            if node.op not in ("call_function", "call_method", "call_module"):
                continue
            number = probed(node)
            if number is not None:
                made = node.all_input_nodes[0]
                self._current[id(fake_of(outer.get(made, made)))] = number
            elif is_checkpoint(node):
                body, inside = checkpoint_body(gm, node, outer)
                calls = calls_around(node, self._names, self._region)
                self.read(body, inside, (*checkpoints, (node, calls)))
            elif is_inner_gradient(node):
                continue  # it is given tensors to know them, and another one would be none of those
            elif returns_its_input(node):
                given = node.all_input_nodes[0]
                value = self._current.get(id(fake_of(outer.get(given, given))))
                if value is not None:
                    self._current[id(fake_of(node))] = value
            else:
                self._read_node(node, outer, checkpoints)

    def _read_node(self, node: fx.Node, outer: _Outer, checkpoints: _Checkpoints) -> None:
        used: set[tuple[int, int]] = set()
        for argument in node.all_input_nodes:
            number = self._current.get(id(fake_of(outer.get(argument, argument))))
            for path in self._ways_to(number, argument):
                used |= {(path.source, p) for p in self._note(node, argument, path, outer, checkpoints)}
        if op_name(node) in TRANSPARENT or is_use(node):
            self._follow(node, frozenset(used), outer)

    def _ways_to(self, number: int | None, argument: fx.Node) -> Iterator[_Path]:
        """Yield the ways to an argument: from its own value, and from those in front of transparent ops."""
        if number is None:
            return
        yield _Path(number, argument, (), frozenset())
        nodes: tuple[fx.Node, ...] = ()
        used: frozenset[tuple[int, int]] = frozenset()
        while (path := self._paths.get(number)) is not None:
            nodes, used, number = (*path.nodes, *nodes), used | path.used, path.source
            yield _Path(number, path.root, nodes, used)

    def _follow(self, node: fx.Node, used: frozenset[tuple[int, int]], outer: _Outer) -> None:
        """Note a transparent op on the way to its result."""
        given = node.args[0] if node.args else node.kwargs.get("input")
        if not isinstance(given, fx.Node):
            return
        earlier = self._read_at.get(given)
        number = self._current.get(id(fake_of(outer.get(given, given))))
        if earlier is not None:
            path = _Path(earlier.source, earlier.root, (*earlier.nodes, node), earlier.used | used)
        elif number is not None and fake_of(given) is not None:
            path = _Path(number, given, (node,), used)
        else:
            return
        if fake_of(node) is None:
            self._read_at[node] = path
        elif (made := probed(node.next)) is not None:
            self._paths[made] = path

    def _note(
        self, node: fx.Node, argument: fx.Node, path: _Path, outer: _Outer, checkpoints: _Checkpoints
    ) -> Iterator[int]:
        """Note a use for the patterns that ask for it; yield their numbers."""
        patterns, made = self._sources[path.source], set(self._values[path.source].calls)
        wanted = [p for p in patterns if (path.source, p) not in path.used]
        if not wanted:
            return
        around = calls_around(node, self._names, self._region)
        calls, op = [call for call in around if call[0] and call not in made], _made_by(node)
        for p in wanted:
            end = self._destination(self._patterns[p], calls, op)
            if end is None:
                names = [call[0] for call in calls[:1]] or ([] if op is None else [_op_address(self._values[op])])
                self.others[p] |= {f"{self._texts[path.source]}{ARROW}{name}": None for name in names}
                continue
            within = calls[: calls.index(end)] if isinstance(end, tuple) else []
            use = self.uses.setdefault((path.source, end), _Use(path.source, end, tuple(reversed(within))))
            edge = self._edge(node, argument, path, end, outer, checkpoints)
            use.edges += [edge] * (edge not in use.edges)
            elsewhere = [one for one in path.nodes if one.graph is not edge[-1].graph]
            use.refusal = _ACROSS.format(op_name(elsewhere[-1])) if elsewhere else use.refusal
            self.found.add(p)
            yield p

    def _destination(self, pattern: Pattern, calls: Sequence[ModuleCall], op: int | None) -> ModuleCall | int | None:
        """Return the outermost call that a pattern means, or the number of the value of the op."""
        for call in calls:
            if pattern.may_end_at(call[0], is_op=False):
                return call
        return op if op is not None and pattern.may_end_at(_op_address(self._values[op]), is_op=True) else None

    @staticmethod
    def _edge(
        node: fx.Node, argument: fx.Node, path: _Path, end: Any, outer: _Outer, checkpoints: _Checkpoints
    ) -> _Edge:
        """Return the nodes of a use; that of a checkpoint inside of the destination is its argument."""
        user = next((checkpoint for checkpoint, calls in checkpoints if end in calls), node)
        if user is not node:
            fake = fake_of(outer.get(argument, argument))
            argument = next(given for given in user.all_input_nodes if fake_of(given) is fake)
        return (path.root, *path.nodes, user) if path.nodes else (argument, user)


def _made_by(node: fx.Node) -> int | None:
    """Return the number of the first value that an op makes."""
    number = probed(node.next)
    if number is not None or fake_of(node) is not None:
        return number
    selections = (probed(user.next) for user in node.users)
    return min((one for one in selections if one is not None), default=None)


def _op_address(value: Value) -> str:
    return f"{value.calls[-1][0] if value.calls else ''}/{value.op}"


class _Insertion:
    """Inserts the node of one use, and lets the uses read it."""

    def __init__(self, use: _Use, values: list[Value]) -> None:
        self._use, self._values = use, values
        source = values[use.value]
        destination = values[use.destination] if isinstance(use.destination, int) else use.destination
        self._value = _part_of(source)
        self._value.destination, self._value.around, self._value.refusal = destination, use.around, use.refusal
        self._copies: dict[fx.Node, fx.Node] = {}  # of transparent ops

    def insert(self, others: Sequence[_Use]) -> None:
        """Insert the node, and let the other uses lead over it."""
        use, values = self._use, self._values
        values.append(self._value)
        number = len(values) - 1
        if use.refusal:
            return
        first = min(edge[1] for edge in use.edges)
        self._check_memory(first)
        if self._value.refusal:
            return
        root, graph = use.edges[0][0], first.graph
        with graph.inserting_before(first):
            made = add_use(root)
            probe = add_probe(made, number)
        covered = {pair for edge in use.edges for pair in itertools.pairwise(edge[1:])}
        for edge in use.edges:
            self._lead(edge, made, covered)
        self._follow_writes(root, made, probe)
        for other in others:
            copied = [(*edge[:-1], self._copies[edge[-1]]) for edge in other.edges if edge[-1] in self._copies]
            other.edges = list(dict.fromkeys(self._over(edge, made) for edge in [*other.edges, *copied]))

    def _over(self, edge: _Edge, made: fx.Node) -> _Edge:
        """Return the nodes of another use as they follow each other now."""
        nodes = [edge[-1]]
        for node in reversed(edge[:-1]):
            given = nodes[-1].all_input_nodes
            if node not in given and self._copies.get(node) in given:
                nodes.append(self._copies[node])
                continue
            nodes += [made] * (node not in given and made in given)
            nodes.append(node)
        return tuple(reversed(nodes))

    def _lead(self, edge: _Edge, made: fx.Node, covered: set[tuple[fx.Node, fx.Node]]) -> None:
        """Let a use read the node; transparent ops that others read too are copied."""
        before, now = edge[0], made
        for node in edge[1:-1]:
            readers = [user for user in node.users if probed(user) is None]
            if all((node, user) in covered for user in readers):
                node.replace_input_with(before, now)
                before = now = node
                continue
            if node not in self._copies:
                self._copies[node] = self._copied(node, before, now)
            before, now = node, self._copies[node]
        edge[-1].replace_input_with(before, now)
        assert now in edge[-1].all_input_nodes

    def _copied(self, node: fx.Node, before: fx.Node, now: fx.Node) -> fx.Node:
        probe = probed(node.next)
        with node.graph.inserting_before(node):
            copy = node.graph.node_copy(node, lambda given: now if given is before else given)
            if probe is not None:
                self._values.append(_part_of(self._values[probe]))
                add_probe(copy, len(self._values) - 1)
        return copy

    def _check_memory(self, first: fx.Node) -> None:
        """Refuse a use of memory written to under another name."""
        aliases = Aliases(first.graph)
        root = self._use.edges[0][0]
        written = aliases.writes_behind(root, first)
        own = {edge[-1] for edge in self._use.edges if all(map(is_use, edge[1:-1]))}
        if written and not (written[0] in own and aliases.is_alone(root, first)):
            self._value.refusal = _WRITTEN.format(op_name(written[0]))

    def _follow_writes(self, root: fx.Node, made: fx.Node, probe: fx.Node) -> None:
        """Let the nodes behind a write to the use read the result."""
        written = Aliases(made.graph).writes_behind(made, probe)
        if any(edge[-1] in written for edge in self._use.edges):
            for user in [user for user in root.users if user > written[0]]:
                user.replace_input_with(root, made)


def _part_of(value: Value) -> Value:
    return Value(value.op, value.calls, value.source, value.fake, use_of=value)
