"""Probes: calls placed in a Dynamo graph that leave markers in the joint graph; names of the values.

A probe behind a value makes two markers while AOTAutograd traces: one on the value in the forward, and, by a
tensor hook, one on its accumulated error in the backward. The forward computation is not touched.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite import _torch, markers
from gradrewrite.errors import PolicyError
from gradrewrite.intended import hands_on_infinity
from gradrewrite.names import Names, source_of
from gradrewrite.nodes import Aliases, changed_in_place, fake_of, is_checkpoint, op_name
from gradrewrite.sites import Kind, Site

Run = tuple[str, str, str]  # a module's name, and the two strings that tell its runs apart


def tap(x: Tensor, name: str) -> Tensor:
    """Name a value in a model's forward, so that a policy can address it; an identity.

    Args:
        x: Any tensor.
        name: The site's name, without ``: # / * ? [ ]``. A name used several times counts its calls.

    Returns:
        ``x`` itself, compiled or not.

    Raises:
        TypeError: ``name`` is no string.
        PolicyError: (at the rewrite) ``name`` is empty or has a sign that patterns use.

    Example:
        >>> h = tap(torch.ones(2), "hidden")
    """
    if not isinstance(name, str):
        raise TypeError(f"gr.tap(x, name): name is a string, got {type(name).__name__}")
    listener = _tap_listener.get()
    if listener is not None:
        listener(x, name)
    return x


_tap_listener: ContextVar[Callable[[Tensor, str], None] | None] = ContextVar("gradrewrite_taps", default=None)


@contextlib.contextmanager
def listen_to_taps(listener: Callable[[Tensor, str], None]) -> Iterator[None]:
    """Report the taps of a model that runs eagerly inside the block."""
    token = _tap_listener.set(listener)
    try:
        yield
    finally:
        _tap_listener.reset(token)


def _tap_module(x: Any) -> Any:
    """What a pass-through module returns while it is traced; named by the module around it."""
    return x


def _probe(x: Tensor, number: int) -> None:
    tracing = _tracing.get()
    if tracing is None or not _torch.is_tracing() or _torch.is_transformed(x) or tracing.knows(x, number):
        return
    with torch.no_grad():
        markers.mark_activation(x, number)
    if x.requires_grad:
        # Of a gradient that autograd knows to be zero there may be none.
        x.register_hook(lambda g: None if g is None else markers.mark_error(g, number))


def _probe_outputs(*outputs: Any) -> None:
    tracing = _tracing.get()
    if tracing is not None and _torch.is_tracing():
        tracing.note_outputs(outputs)


torch.compiler.allow_in_graph(tap)
torch.compiler.allow_in_graph(_tap_module)
fx.node.has_side_effect(_probe)
fx.node.has_side_effect(_probe_outputs)


@dataclass(eq=False)
class Value:
    """One tensor that the forward makes, as Dynamo's graph shows it.

    Attributes:
        op: Name of the op as the user called it.
        runs: The module runs in which it was made, outermost first.
        source: The user's line that made it.
        fake: Its fake tensor.
        used_in: The module runs around each use.
        taps: Names given to it by ``gr.tap``.
        identities: Pass-through modules that returned it.
        is_returned: Whether the graph returns it.
        returned_through: Positions of the outputs of the graph that are this value or views of it.
        may_be_infinite: Whether the program itself fills it with infinities.
        is_selection: Whether it is an element of a tuple, or the result of indexing.
        is_view: Whether it is a view of another tensor.
        replaces: The value that the same tensor was before an in-place op.
        is_overwritten: Whether autograd gave the tensor another history when such an op changed it.
        same_as: The value that this one turned out to be (``x.contiguous()`` of a contiguous ``x``).
    """

    op: str
    runs: tuple[Run, ...]
    source: str
    fake: Tensor
    used_in: list[tuple[Run, ...]] = field(default_factory=list)
    taps: list[str] = field(default_factory=list)
    identities: list[str] = field(default_factory=list)
    is_returned: bool = False
    returned_through: set[int] = field(default_factory=set)
    may_be_infinite: bool = False
    is_selection: bool = False
    is_view: bool = False
    replaces: Value | None = None
    is_overwritten: bool = False
    same_as: Value | None = None

    @property
    def is_bypassed(self) -> bool:
        """Whether a part of its error goes past it: behind an in-place op on a view, to what it is a view of."""
        return self.is_view and self.is_overwritten

    @property
    def is_unused_selection(self) -> bool:
        """Whether it is one that Dynamo leaves out of its graphs; in the body of a checkpoint it does not."""
        return self.is_selection and not self.used_in and not self.is_returned


class _Tracing:
    """Tells which values are one tensor, and which outputs are views of which values, while AOTAutograd traces."""

    def __init__(self, values: Sequence[Value]) -> None:
        self._values = values
        self._first: dict[tuple[Any, int], int] = {}  # by autograd node and output of it

    def knows(self, x: Tensor, number: int) -> bool:
        """Note a value; True if an earlier one is the same tensor at the same version."""
        if not x.requires_grad:
            return False
        value = self._values[number]
        value.is_view = x._is_view()
        first = self._first.setdefault((x.grad_fn or x, x.output_nr), number)
        if first == number and value.replaces is not None:
            value.replaces.is_overwritten = True
        if first != number:
            value.same_as = self._values[first]
        return first != number

    def note_outputs(self, outputs: Sequence[Any]) -> None:
        """Note the outputs that are views of a value: AOTAutograd may make such an output outside of the graph."""
        for position, output in enumerate(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                for node in _torch.view_chain(output):
                    number = self._first.get(node)
                    if number is not None:
                        self._values[number].returned_through.add(position)


_tracing: ContextVar[_Tracing | None] = ContextVar("gradrewrite_tracing", default=None)


@contextlib.contextmanager
def tracing(values: Sequence[Value]) -> Iterator[None]:
    """Let the probes of these values act inside the block."""
    token = _tracing.set(_Tracing(values))
    try:
        yield
    finally:
        _tracing.reset(token)


def place(gm: fx.GraphModule, names: Names, infinite: Collection[fx.Node] = ()) -> list[Value]:
    """Place a probe behind every value of a Dynamo graph; taps are taken out.

    Args:
        gm: Dynamo's graph, changed in place; bodies of activation checkpoints are entered.
        names: The names of the frame's modules.
        infinite: Placeholders of buffers that hold infinities on purpose.

    Returns:
        The values in execution order; a probe's number is the position of its value.
    """
    reader = _Reader(names, infinite)
    reader.read(gm, {}, is_body=False)
    return reader.values


def name_values(values: Sequence[Value]) -> dict[int, Callable[[Kind], Site]]:
    """Name the values, after tracing: by its number, what makes the site of each; two names for one value are one."""
    for value in values:
        first = value.same_as
        if first is not None:
            first.used_in += value.used_in
            first.returned_through |= value.returned_through
            first.is_returned |= value.is_returned
            first.is_overwritten |= value.is_overwritten
            first.taps += value.taps
            first.identities += value.identities
    named = {n: value for n, value in enumerate(values) if value.same_as is None and not value.is_unused_selection}
    names = _Namer(list(named.values()))
    return {n: partial(names.site, value) for n, value in named.items()}


class _Reader:
    """Walks a Dynamo graph in execution order."""

    def __init__(self, names: Names, infinite: Collection[fx.Node]) -> None:
        self.names = names
        self._infinite = set(infinite)
        self.values: list[Value] = []
        self._current: dict[int, Value] = {}  # by identity of the fake tensor: in-place ops make a new value

    def read(self, gm: fx.GraphModule, outer: dict[fx.Node, fx.Node], *, is_body: bool) -> None:
        """Read one graph; ``outer`` maps the placeholders of a checkpoint's body to the nodes outside."""
        aliases = Aliases(gm.graph)
        for node in list(gm.graph.nodes):
            if node.op == "output" and not is_body:  # what a body returns is used where the checkpoint stands
                for value in self._use(node, (), outer):
                    value.is_returned = True
                with gm.graph.inserting_before(node):
                    gm.graph.call_function(_probe_outputs, tuple(node.args[0]))
            elif node.op in ("call_function", "call_method", "call_module"):
                self._read_call(gm, node, outer, aliases)

    def _read_call(self, gm: fx.GraphModule, node: fx.Node, outer: dict[fx.Node, fx.Node], aliases: Aliases) -> None:
        if is_checkpoint(node):
            self._enter(gm, node, outer)
            return
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and is_checkpoint(node.args[0]):
            return  # the same tensor as the body's output, which has its probe
        if node.target in (tap, _tap_module):
            self._tap(node, outer)
            return
        runs = self._runs(node)
        self._use(node, runs, outer)
        changed = changed_in_place(node)
        writes_infinity = hands_on_infinity(op_name(node), node, self._infinite)
        last = node
        for made in aliases.of_all(changed, after=node) if changed else [node]:
            fake = fake_of(outer.get(made, made))
            if fake is None or (not changed and id(fake) in self._current):
                continue
            may_be_infinite = writes_infinity or (bool(changed) and made in self._infinite)
            if may_be_infinite:
                self._infinite |= {node, made}
            value = Value(op_name(node), runs, source_of(node), fake, may_be_infinite=may_be_infinite)
            value.is_selection = node.target is operator.getitem
            value.replaces = self._current.get(id(fake))
            last = self._add(value, made, after=last)

    def _enter(self, gm: fx.GraphModule, node: fx.Node, outer: dict[fx.Node, fx.Node]) -> None:
        body_node, *args = node.args
        assert isinstance(body_node, fx.Node)
        body = getattr(gm, str(body_node.target))
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        inside = {p: outer.get(a, a) for p, a in zip(placeholders, args, strict=True) if isinstance(a, fx.Node)}
        self._infinite |= {p for p, a in inside.items() if a in self._infinite}
        self.read(body, inside, is_body=True)
        body.recompile()

    def _tap(self, node: fx.Node, outer: dict[fx.Node, fx.Node]) -> None:
        target = node.args[0]
        if node.target is tap:
            name = str(node.args[1] if len(node.args) > 1 else node.kwargs["name"])
        else:
            runs = self._runs(node)
            name = runs[-1][0] if runs else ""
        if node.target is tap and (not name or set(name) & set(":#/*?[]")):
            raise PolicyError(f"gr.tap(x, {name!r}): a name is not empty and has none of : # / * ? [ ]")
        assert isinstance(target, fx.Node)
        fake = fake_of(outer.get(target, target))
        if fake is not None:
            value = self._current.get(id(fake))
            if value is None:
                value = Value("tap", self._runs(node), source_of(node), fake)
                self._add(value, target, after=node)
            if name:  # the model itself may be an Identity, or call one that is no submodule
                (value.taps if node.target is tap else value.identities).append(name)
        node.replace_all_uses_with(target)
        node.graph.erase_node(node)

    def _add(self, value: Value, made: fx.Node, *, after: fx.Node) -> fx.Node:
        self._current[id(value.fake)] = value
        with after.graph.inserting_after(after):
            probe = after.graph.call_function(_probe, (made, len(self.values)))
        self.values.append(value)
        return probe

    def _use(self, node: fx.Node, runs: tuple[Run, ...], outer: dict[fx.Node, fx.Node]) -> list[Value]:
        used = []
        for read in node.all_input_nodes:
            fake = fake_of(outer.get(read, read))
            value = self._current.get(id(fake)) if fake is not None else None
            if value is not None:
                value.used_in.append(runs)
                used.append(value)
        return used

    def _runs(self, node: fx.Node) -> tuple[Run, ...]:
        stack = node.meta.get("nn_module_stack", {})
        return tuple((self.names.module(key, path), key, path) for key, (path, _) in stack.items())


class _Namer:
    """Gives values their names: first all runs and calls are counted, then sites are made."""

    def __init__(self, values: Sequence[Value]) -> None:
        self._values = values
        self._outputs: dict[Run, list[Value]] = defaultdict(list)
        self._run_number: dict[Run, int] = {}
        self._address: dict[int, list[tuple[str, int]]] = {}
        runs: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        taps: Counter[str] = Counter()
        for value in values:
            for run in value.runs:
                if run not in self._run_number:
                    self._run_number[run] = runs[run[0]]
                    runs[run[0]] += 1
                if any(run not in use for use in value.used_in):
                    self._outputs[run].append(value)
        taken: set[tuple[str, int]] = set()
        for value in values:
            module = value.runs[-1][0] if value.runs else ""
            op = (f"{module}/{value.op}", calls[f"{module}/{value.op}"])
            calls[op[0]] += 1
            given = []
            for name in value.taps + value.identities:
                given.append((name, taps[name]))
                taps[name] += 1
            produced = [(run[0], self._run_number[run]) for run in reversed(value.runs) if self._is_output(value, run)]
            first = [*given, *([] if self._shares_module(value) else produced[:1]), op]
            chosen = next(a for a in first if a not in taken)
            taken.add(chosen)
            self._address[id(value)] = list(dict.fromkeys([chosen, *given, *produced, op]))

    def site(self, value: Value, kind: Kind) -> Site:
        """The site of one value."""
        addresses = self._address[id(value)]
        outputs = [run[0] for run in reversed(value.runs) if self._is_output(value, run)]
        return Site(
            kind=kind,
            name=addresses[0][0],
            module=value.runs[-1][0] if value.runs else "",
            op=value.op,
            output_of=tuple(dict.fromkeys([*value.identities, *outputs])),
            call=addresses[0][1],
            shape=shape_of(value.fake),
            dtype=value.fake.dtype,
            device=value.fake.device,
            source=value.source,
            may_be_infinite=value.may_be_infinite,
            addresses=tuple(addresses),
        )

    def _is_output(self, value: Value, run: Run) -> bool:
        return bool(run[0]) and any(value is other for other in self._outputs[run])

    def _shares_module(self, value: Value) -> bool:
        """Whether the innermost module that returns the value returns others too."""
        run = next((r for r in reversed(value.runs) if self._is_output(value, r)), None)
        return run is not None and len(self._outputs[run]) > 1


def shape_of(tensor: Tensor) -> tuple[int | None, ...]:
    """Sizes of a fake tensor; None where one is symbolic."""
    return tuple(size if isinstance(size, int) else None for size in tensor.shape)
