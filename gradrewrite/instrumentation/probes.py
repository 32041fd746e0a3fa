"""Probes: calls in a Dynamo graph that leave markers in the joint graph.

A probe behind a value makes two markers while AOTAutograd traces: one on the value in the forward, and, by a
tensor hook, one on its accumulated error in the backward. The forward computation is not touched.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import autograd, dtensors, fake_tensors, make_fx
from gradrewrite._utils.progress import current_progress
from gradrewrite.distributed.layouts import InputLayouts, Layout
from gradrewrite.errors import PolicyError
from gradrewrite.instrumentation.dynamo_nodes import (
    Aliases,
    changed_in_place,
    checkpoint_body,
    fake_of,
    is_checkpoint,
    op_name,
    returns_its_input,
)
from gradrewrite.instrumentation.inner_gradients import differentiated_inside
from gradrewrite.instrumentation.module_names import ModuleNames
from gradrewrite.instrumentation.recurrent import loops_in
from gradrewrite.instrumentation.source_locations import source_of
from gradrewrite.ir import markers
from gradrewrite.ir.mask_infinities import propagates_infinity
from gradrewrite.ir.values import ModuleCall, Value
from gradrewrite.sites import ARROW


def tap(x: Tensor, name: str) -> Tensor:
    """Name a value in a model's forward, so that a policy can address it; an identity.

    Args:
        x: Any tensor.
        name: The site's name, without ``: # / * ? [ ]`` and ``->``. A name used several times counts its calls.

    Returns:
        ``x`` itself, compiled or not. Where the result is used and ``x`` elsewhere too, the site's error is the part
        of the uses of the result; else that of all uses.

    Raises:
        TypeError: ``x`` is no tensor, or ``name`` is no string.
        PolicyError: (at the rewrite) ``name`` is empty or has a sign that patterns use.

    Example:
        >>> h = tap(torch.ones(2), "hidden")
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"gr.tap(x, name): x is one tensor, got {type(x).__name__}; name each of several by itself")
    if not isinstance(name, str):
        raise TypeError(f"gr.tap(x, name): name is a string, got {type(name).__name__}")
    listener = _tap_listener.get()
    return x if listener is None else listener(x, name)


_tap_listener: ContextVar[Callable[[Tensor, str], Tensor] | None] = ContextVar("gradrewrite_taps", default=None)


@contextlib.contextmanager
def listen_to_taps(listener: Callable[[Tensor, str], Tensor]) -> Iterator[None]:
    """Let a function make the results of taps of a model that runs eagerly inside the block."""
    token = _tap_listener.set(listener)
    try:
        yield
    finally:
        _tap_listener.reset(token)


def tap_module(x: Any) -> Any:
    """Return a pass-through module's value; while tracing, the module around names it."""
    return x


def note_return(key: str, path: str, *returned: Any) -> None:
    """Stand in a traced graph behind the call of a module, with the values that it returned."""


def erase_notes(gm: fx.GraphModule) -> None:
    """Erase the notes of modules' results from a Dynamo graph and its inner bodies."""
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        notes = module.graph.find_nodes(op="call_function", target=note_return)
        for node in notes:
            module.graph.erase_node(node)
        if notes:
            module.recompile()


def _probe(x: Tensor | None, number: int) -> None:
    tracing = _tracing.get()
    if x is None:  # a gradient that torch.autograd.grad does not find
        return
    if tracing is None or not make_fx.is_tracing() or autograd.is_transformed(x) or tracing.knows(x, number):
        return
    progress = tracing.progress
    progress.advance()
    value = tracing.values[number]
    if fake_tensors.is_wrapper(x) and not dtensors.is_dtensor(x):  # a marker would stand at each tensor inside
        value.subclass = type(x).__name__
        return
    value.layout = Layout.of(x)
    with torch.no_grad():
        mark_value = markers.mark_activation if value.use_of is None else markers.mark_use
        mark_value(dtensors.local_of(x) if dtensors.is_dtensor(x) else x, number)
    if x.requires_grad:

        def mark(g: Tensor | None) -> Tensor | None:
            progress.advance()
            value.has_error = True
            if g is not None and fake_tensors.is_wrapper(g) and not dtensors.is_dtensor(g):
                value.subclass = type(g).__name__
                return None
            if g is None:  # of a gradient that autograd knows to be zero there may be none
                return None
            layout = value.error_layout = Layout.of(g)
            if layout is None or not dtensors.is_dtensor(g):
                marked: Tensor = markers.mark_error(g, number)
                return marked
            return layout.wrap(markers.mark_error(dtensors.local_of(g), number))

        x.register_hook(mark)


def _use(x: Tensor) -> Tensor:
    """Return the same tensor, with an error of its own."""
    is_traced = _tracing.get() is not None and make_fx.is_tracing() and not autograd.is_transformed(x)
    if not is_traced or not x.requires_grad:
        return x
    with torch.enable_grad():  # a use may begin where the model computes without gradients
        if dtensors.is_dtensor(x):
            return x.view_as(x)
        made: Tensor = x if fake_tensors.is_wrapper(x) else markers.use(x)
        return made


def add_use(made: fx.Node) -> fx.Node:
    """Add a node that hands a value on to some of its uses, at the insertion point of the graph."""
    node = made.graph.call_function(_use, (made,))
    node.meta["example_value"] = made.meta.get("example_value")
    return node


def is_use(node: fx.Node) -> bool:
    """Return whether a node hands a value on to some of its uses."""
    return node.target is _use


def add_probe(made: fx.Node, number: int) -> fx.Node:
    """Add a probe of a value, at the insertion point of the graph."""
    return made.graph.call_function(_probe, (made, number))


def probed(node: fx.Node) -> int | None:
    """Return the number of the value that a probe is behind; None for other nodes."""
    number = node.args[1] if node.target is _probe else None
    return number if isinstance(number, int) else None


def _probe_gradient(x: Tensor, position: int) -> None:
    """Note the layouts of an input of the graph and of its gradient."""
    tracing = _tracing.get()
    if tracing is None or not make_fx.is_tracing() or autograd.is_transformed(x) or not x.requires_grad:
        return

    def note(g: Tensor | None) -> None:
        layout = None if g is None else Layout.of(g)
        if layout is not None:
            tracing.layouts.gradients[position] = layout

    own = Layout.of(x)
    if own is not None:
        tracing.layouts.values[position] = own
    x.register_hook(note)


def _probe_outputs(*outputs: Any) -> None:
    tracing = _tracing.get()
    if tracing is not None and make_fx.is_tracing():
        tracing.note_outputs(outputs)


torch.compiler.allow_in_graph(tap)
torch.compiler.allow_in_graph(tap_module)
fx.node.has_side_effect(note_return)
fx.node.has_side_effect(_probe)
fx.node.has_side_effect(_probe_outputs)
fx.node.has_side_effect(_probe_gradient)


class _Tracing:
    """The values that are one tensor, and the outputs that are views of values, while AOTAutograd traces."""

    def __init__(self, values: Sequence[Value], layouts: InputLayouts) -> None:
        self.values = values
        self.layouts = layouts
        self.progress = current_progress()
        self.progress.begin("differentiating", 2 * len(values))
        self._first: dict[tuple[Any, int], int] = {}  # by autograd node and output of it

    def knows(self, x: Tensor, number: int) -> bool:
        """Note a value; True if an earlier one is the same tensor at the same version."""
        if not x.requires_grad:
            return False
        value = self.values[number]
        value.is_view = x._is_view()
        first = self._first.setdefault((x.grad_fn or x, x.output_nr), number)
        if first == number and value.replaces is not None:
            value.replaces.is_overwritten = True
        if first != number:
            value.same_as = self.values[first].use_of or self.values[first]
        return first != number

    def note_outputs(self, outputs: Sequence[Any]) -> None:
        """Note the outputs that are views of a value: AOTAutograd may make such an output outside of the graph."""
        for position, output in enumerate(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                for node in filter(self._first.__contains__, autograd.view_chain(output)):
                    self.values[self._first[node]].returned_through.add(position)


_tracing: ContextVar[_Tracing | None] = ContextVar("gradrewrite_tracing", default=None)


@contextlib.contextmanager
def tracing(values: Sequence[Value], layouts: InputLayouts) -> Iterator[None]:
    """Let the probes of these values act inside the block, and note layouts of inputs that are DTensors."""
    token = _tracing.set(_Tracing(values, layouts))
    try:
        yield
    finally:
        _tracing.reset(token)


def insert_probes(
    gm: fx.GraphModule,
    names: ModuleNames,
    infinite: Collection[fx.Node] = (),
    returned: Collection[Tensor] | None = None,
    *,
    region: str = "",
) -> list[Value]:
    """Insert a probe behind every value of a Dynamo graph, in place, and erase notes of taps and modules' results.

    Bodies of activation checkpoints are entered. ``infinite`` are placeholders of buffers that hold infinities on
    purpose; ``returned`` are fake tensors, None if all outputs of the graph are returned; ``region`` names the module
    whose forward the graph is, as Dynamo may not have seen it called. A probe's number is the position of its value
    among the results, which are in execution order.
    """
    reader = _Reader(names, infinite, region, None if returned is None else set(map(id, returned)))
    reader.read(gm, {}, is_body=False)
    for value in reader.values:  # the module calls that are known to have returned, and not this value
        value.stored_by = {c for c in value.calls if value not in reader.returns.get(c, [value])}
    erase_notes(gm)
    _probe_gradients(gm.graph)
    return reader.values


def _probe_gradients(graph: fx.Graph) -> None:
    placeholders = graph.find_nodes(op="placeholder")
    for position, node in reversed(list(enumerate(placeholders))):
        value = fake_of(node)
        if value is not None and dtensors.is_dtensor(value) and value.requires_grad:
            with graph.inserting_after(placeholders[-1]):
                graph.call_function(_probe_gradient, (node, position))


_Outer = dict[fx.Node, fx.Node]  # placeholders of a checkpoint's body to the nodes outside


class _Reader:
    def __init__(
        self, names: ModuleNames, infinite: Collection[fx.Node], region: str, returned: Collection[int] | None
    ) -> None:
        self.names = names
        self._returned = returned  # identities of fake tensors
        self.returns: dict[ModuleCall, list[Value]] = {}  # of calls that are known to have returned
        self._region = region_call(region)
        self._infinite = set(infinite)
        self.values: list[Value] = []
        self._checkpoints: tuple[fx.Node, ...] = ()  # around the node that is read
        self._parts: set[fx.Node] = set()
        self._differentiated: set[fx.Node] = set()  # that a gradient inside of the forward depends on
        self._current: dict[int, Value] = {}  # by identity of the fake tensor: in-place ops make a new value

    def read(self, gm: fx.GraphModule, outer: _Outer, *, is_body: bool) -> None:
        aliases = Aliases(gm.graph)
        self._differentiated |= differentiated_inside(gm)
        for node in list(gm.graph.nodes):
            if node.op == "output" and not is_body:  # what a body returns is used at the checkpoint
                for value in self._use(node, (), outer, self._returned):
                    value.is_returned = True
                with gm.graph.inserting_before(node):
                    gm.graph.call_function(_probe_outputs, tuple(node.args[0]))
            elif node.op in ("call_function", "call_method", "call_module"):
                self._read_call(gm, node, outer, aliases)

    def _read_call(self, gm: fx.GraphModule, node: fx.Node, outer: _Outer, aliases: Aliases) -> None:
        if is_checkpoint(node):
            self._enter(gm, node, outer)
            return
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and is_checkpoint(node.args[0]):
            return  # the same tensor as the body's output, which has its probe
        self._enter_loops(node)
        if node.target in (tap, tap_module):
            self._tap(node, outer)
            return
        if node.target is note_return:
            self._note_return(node, outer)
            return
        if returns_its_input(node):
            self._pass_on(node, outer)
            return
        calls = self._calls(node)
        self._use(node, calls, outer)
        changed = changed_in_place(node)
        writes_infinity = propagates_infinity(op_name(node), node, self._infinite)
        last = node
        for made in aliases.of_all(changed, after=node) if changed else [node]:
            fake = fake_of(outer.get(made, made))
            if fake is None or (not changed and id(fake) in self._current):
                continue
            may_be_infinite = writes_infinity or (bool(changed) and made in self._infinite)
            if may_be_infinite:
                self._infinite |= {node, made}
            value = Value(op_name(node), calls, source_of(node), fake, may_be_infinite=may_be_infinite)
            value.is_selection = node.target is operator.getitem
            value.replaces = self._current.get(id(fake))
            value.is_part = self._is_part(node, fake)
            if value.is_part:
                self._parts |= {node, made}
            last = self._add(value, made, after=last)

    def _enter(self, gm: fx.GraphModule, node: fx.Node, outer: _Outer) -> None:
        body, inside = checkpoint_body(gm, node, outer)
        self._infinite |= {p for p, a in inside.items() if a in self._infinite}
        around, self._checkpoints = self._checkpoints, (*self._checkpoints, node)
        self.read(body, inside, is_body=True)
        self._checkpoints = around
        body.recompile()

    def _enter_loops(self, node: fx.Node) -> None:
        """Insert probes into the bodies of loops."""
        for loop in filter(lambda loop: loop.is_marked, loops_in(node)):
            for name, value in loop.values.items():
                loop.numbers[name] = len(self.values)
                self._add(value, loop.nodes[name], after=loop.nodes[name])
            loop.body.recompile()

    def _tap(self, node: fx.Node, outer: _Outer) -> None:
        given = dict(zip(("x", "name"), node.args, strict=False)) | node.kwargs
        target = given["x"]
        if node.target is tap:
            name = str(given["name"])
        else:
            calls = self._calls(node)
            name = calls[-1][0] if calls else ""
        if node.target is tap and (not name or set(name) & set(":#/*?[]") or ARROW in name):
            raise PolicyError(f"gr.tap(x, {name!r}): a name is not empty and has none of : # / * ? [ ] ->", code="tap")
        if not isinstance(target, fx.Node):
            raise TypeError(f"gr.tap(x, {name!r}): x is one tensor, got {type(target).__name__}")
        fake = fake_of(outer.get(target, target))
        if fake is not None and self._is_path(node, target, outer):
            self._name_path(node, target, fake, name)
            return
        if fake is not None:
            value = self._current.get(id(fake))
            if value is None:
                value = Value("tap", self._calls(node), source_of(node), fake)
                self._add(value, target, after=node)
            if name:  # the model itself may be an Identity, or call one that is no submodule
                (value.taps if node.target is tap else value.identities).append(name)
        node.replace_all_uses_with(target)
        node.graph.erase_node(node)

    def _is_path(self, node: fx.Node, target: fx.Node, outer: _Outer) -> bool:
        """Whether a tap hands its value on to some of its uses, and others read the value itself."""
        while returns_its_input(target):
            target = target.all_input_nodes[0]
        around = (node, *self._checkpoints)
        others = (_is_read(one, around) for one in (target, outer.get(target, target)))
        if node in self._differentiated:  # a gradient inside may be asked for it: it stays the same tensor
            return False
        return any(others) and _is_read(node) and not Aliases(node.graph).writes_behind(target, node)

    def _name_path(self, node: fx.Node, target: fx.Node, fake: Tensor, name: str) -> None:
        """Give the readers of a tap's result an error of their own, with this name."""
        calls = self._calls(node)
        if id(fake) in self._current:
            self._current[id(fake)].used_in.append(calls)
        with node.graph.inserting_before(node):
            made = add_use(target)
        with torch.enable_grad():
            made.meta = {**node.meta, "example_value": fake.clone()}
        value = Value("tap", calls, source_of(node), made.meta["example_value"])
        if name:
            (value.taps if node.target is tap else value.identities).append(name)
        self._add(value, made, after=made)
        node.replace_all_uses_with(made)
        node.graph.erase_node(node)

    def _note_return(self, note: fx.Node, outer: _Outer) -> None:
        key, path = map(str, note.args[:2])
        fakes = [fake_of(outer.get(node, node)) for node in note.all_input_nodes]
        values = [self._current[id(fake)] for fake in fakes if fake is not None and id(fake) in self._current]
        self.returns[self.names.module(key, path), key, path] = values

    def _pass_on(self, node: fx.Node, outer: _Outer) -> None:
        """Let the value of an op's input be that of its result too."""
        self._use(node, self._calls(node), outer)
        given, made = fake_of(outer.get(node.all_input_nodes[0], node.all_input_nodes[0])), fake_of(node)
        if given is not None and made is not None and id(given) in self._current:
            self._current[id(made)] = self._current[id(given)]
        if node in self._differentiated:  # traced, it would be a copy, of which a gradient is another one
            node.replace_all_uses_with(node.all_input_nodes[0])

    def _is_part(self, node: fx.Node, fake: Tensor) -> bool:
        """Whether a plain value was taken out of a sharded DTensor, or computed from such a value."""
        if dtensors.is_dtensor(fake):
            return False
        if any(read in self._parts for read in node.all_input_nodes):
            return True
        given = fake_of(node.all_input_nodes[0]) if node.all_input_nodes else None
        if given is None or not dtensors.is_dtensor(given) or "to_local" not in op_name(node):
            return False
        return not all(placement.is_replicate() for placement in given.placements)

    def _add(self, value: Value, made: fx.Node, *, after: fx.Node) -> fx.Node:
        self._current[id(value.fake)] = value
        with after.graph.inserting_after(after):
            probe = add_probe(made, len(self.values))
        self.values.append(value)
        return probe

    def _use(
        self, node: fx.Node, calls: tuple[ModuleCall, ...], outer: _Outer, among: Collection[int] | None = None
    ) -> list[Value]:
        """Note uses of values, of these fake tensors if they are given, and return all values that are read."""
        fakes = [id(fake_of(outer.get(read, read))) for read in node.all_input_nodes]
        used = [fake for fake in fakes if fake in self._current]
        for fake in used:
            if among is None or fake in among:
                self._current[fake].used_in.append(calls)
        return [self._current[fake] for fake in used]

    def _calls(self, node: fx.Node) -> tuple[ModuleCall, ...]:
        return calls_around(node, self.names, self._region)


def _is_read(node: fx.Node, without: Collection[fx.Node] = ()) -> bool:
    """Whether a node has a reader beside these: no probe, no note, no tap without readers."""
    for user in node.users:
        if user in without or probed(user) is not None or user.target is note_return:
            continue
        if not (user.target in (tap, tap_module) or returns_its_input(user)) or _is_read(user, without):
            return True
    return False


def region_call(region: str) -> tuple[ModuleCall, ...]:
    """Return the call of a region as a module call; none for ``""``."""
    return ((region, f"region {region}", region),) if region else ()


def calls_around(node: fx.Node, names: ModuleNames, region: tuple[ModuleCall, ...] = ()) -> tuple[ModuleCall, ...]:
    """Return the module calls around a node of a Dynamo graph, outermost first."""
    stack = node.meta.get("nn_module_stack", {})
    entries = ((key, path) for key, (path, _) in stack.items() if not names.is_function(key, path))
    calls = tuple((names.module(key, path), key, path) for key, path in entries)
    is_seen = not region or (calls and calls[0][0] == region[0][0])
    return calls if is_seen else (*region, *calls)
