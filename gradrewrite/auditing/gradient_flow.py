"""Flow of gradients through the graphs of a training step."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from gradrewrite._compat import autograd
from gradrewrite._utils.tensors import tensors_in
from gradrewrite.auditing.algebra import LinearForms, storage_of
from gradrewrite.auditing.step_graphs import StepGraph, StepGraphs
from gradrewrite.instrumentation.dynamo_nodes import (
    Aliases,
    changed_in_place,
    checkpoint_body,
    fake_of,
    is_checkpoint,
    op_name,
)
from gradrewrite.instrumentation.source_locations import source_of

_LARGEST_WALK = 500  # autograd nodes behind one op
_MAX_TERMS = 16  # of a sum of losses
_FLAT = (
    "round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "heaviside", "floor_divide", "floordiv",
    "bernoulli", "normal", "poisson",
)  # fmt: skip
_NUMBERS = (torch.SymFloat, torch.SymInt, torch.SymBool, int, float)
_DETACHING = {"detach": "detach", "detach_": "detach", "_get_data_attr": ".data", "data": ".data"}
_SHAPES_ALONE = re.compile(r"(empty|zeros|ones|full|rand|randn|randint)_like|new_\w+|size|dim|numel|is_\w+|__len__")
_NO_GRADIENT = "which has no gradient"
_DISTRIBUTIONS = re.compile(r"torch[/\\]distributions[/\\].*\bin sample\b")
_FILES = re.compile(r'File "([^"]+)"')
_TORCH = os.path.dirname(torch.__file__) + os.sep
_FUNCTION = re.compile(r"(\w+)\.apply\(")


@dataclass(eq=False)
class Cut:
    """One op at the end of gradients.

    Attributes:
        op: Name of the op, ``"detach"``, ``".data"``, ``"no_grad"`` or the class of a custom function included.
        source: The user's line of it.
        reason: Why, as a sentence: ``"`round` has a derivative of 0 everywhere"``.
        stopped: Bits of the parameters with no gradient behind it.
        is_meant: Whether it is written on purpose: a product with 0, a derivative that a constant has no part in.
        is_algebra: Whether the gradient is 0 and not None.
        is_discrete: Whether the result is of a type without gradients, as an index, or a sample.
        is_bridged: Whether another term of its sum has these gradients, as in a straight-through estimator, or it is a
            ``detach`` of torch's own.
    """

    op: str
    source: str
    reason: str
    stopped: int
    is_meant: bool = False
    is_algebra: bool = False
    is_discrete: bool = False
    is_bridged: bool = False


@dataclass(frozen=True, slots=True)
class Reach:
    """The parameters behind a value, as bits.

    Attributes:
        read: Those that it is computed from.
        trained: Those of them that get a gradient from it.
        cuts: Bits of the cuts on the way to it.
    """

    read: int = 0
    trained: int = 0
    cuts: int = 0

    def __or__(self, other: Reach) -> Reach:
        return Reach(self.read | other.read, self.trained | other.trained, self.cuts | other.cuts)


NOTHING = Reach()


@dataclass(frozen=True)
class Term:
    """A term of the loss, or one of several losses."""

    op: str
    source: str
    reach: Reach


@dataclass(eq=False)
class Segment:
    """A reentrant checkpoint, a custom function or a custom op."""

    op: str
    source: str
    inside: int  # bits of the parameters that are read in it, or before it
    reason: str = ""  # why compiled steps give none either


@dataclass(eq=False)
class GradientFlow:
    """The flow of gradients through all graphs.

    Attributes:
        names: Names of the parameters, by bit.
        loss: The parameters behind the loss.
        terms: The terms of the loss, or the losses if there are several.
        cuts: All cuts, in execution order.
        segments: The parts where eager mode may differ.
        written: Identities of the inputs that the step overwrites; None if it is not one graph.
        breaks: Graph breaks: bits of the parameters behind the tensors that the code there may read, line and reason.
    """

    names: list[str]
    loss: Reach = NOTHING
    terms: list[Term] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    written: frozenset[int] | None = None
    breaks: list[tuple[int, str, str]] = field(default_factory=list)

    def bits(self, mask: int) -> Iterator[str]:
        """Return the names of parameters by their bits."""
        return (name for bit, name in enumerate(self.names) if mask >> bit & 1)

    def cuts_before(self, reach: Reach) -> list[Cut]:
        """Return the cuts on the ways to a value."""
        return [cut for bit, cut in enumerate(self.cuts) if reach.cuts >> bit & 1]


def flow_of(step: StepGraphs, model: nn.Module) -> GradientFlow:
    """Follow the parameters through the graphs of a step."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    flow = GradientFlow([name for name, _ in named])
    by_name = {name: 1 << bit for bit, (name, _) in enumerate(named)}
    bits = {key: by_name[name] for key, name in step.names.items() if name in by_name}
    if step.is_whole:
        reader = _Reader(flow, step.graphs[0])
        given = (Reach(bits.get(id(value), 0), bits.get(id(value), 0)) for value in step.graphs[0].inputs)
        reader.begin(list(given))
        roots = [node for node in reader.read_all() if _needs_gradient(node)]
        flow.loss = _union(reader.reach.get(root, NOTHING) for root in roots or reader.outputs)
        _note_terms(flow, reader, roots)
        flow.written = reader.written_inputs(step.graphs[0].inputs)
        return flow
    _Parts(flow, bits).read(step)
    return flow


def _note_terms(flow: GradientFlow, reader: _Reader, roots: Sequence[fx.Node]) -> None:
    nodes = list(reader.forms.atoms(roots[0]) if len(roots) == 1 else dict.fromkeys(roots))
    if 1 < len(nodes) <= _MAX_TERMS:
        flow.terms = [Term(op_name(node), source_of(node), reader.reach.get(node, NOTHING)) for node in nodes]


class _Parts:
    """Follows gradients through several graphs, by the tensors of a run."""

    def __init__(self, flow: GradientFlow, bits: Mapping[int, int]) -> None:
        self._flow, self._bits = flow, bits
        self._known: dict[int, tuple[Tensor, Reach]] = {}  # by identity
        self._made: dict[Any, Reach] = {}  # by autograd node
        self._last = NOTHING  # what the code between two graphs may read
        self._break = ("", "")

    def read(self, step: StepGraphs) -> None:
        """Read the calls of graphs in their order."""
        readers = []
        for graph, inputs, outputs in step.calls:
            reader = _Reader(self._flow, graph)
            reader.begin([self._reach(value) for value in inputs])
            nodes = reader.read_all()
            self._last = NOTHING
            for node, tensor in zip(nodes, outputs, strict=True):
                if isinstance(tensor, Tensor):
                    reach = reader.reach.get(node, NOTHING)
                    self._known[id(tensor)] = tensor, reach
                    self._last |= reach
                    if tensor.grad_fn is not None:
                        self._made[tensor.grad_fn] = reach
            self._break = graph.break_reason, graph.break_line
            if graph.break_line and all(graph.break_line != line for _, line, _ in self._flow.breaks):
                self._flow.breaks.append((self._last.read, graph.break_line, graph.break_reason))
            readers.append((reader, outputs))
        losses = [t for t in tensors_in(step.loss) if t.is_floating_point()]
        for loss in [t for t in losses if t.requires_grad] or losses:
            self._flow.loss |= self._reach(loss)
        for reader, outputs in readers[-1:]:  # of a loss that the last one makes the terms are known
            for node, tensor in zip(reader.outputs, outputs, strict=True):
                if len(losses) == 1 and tensor is losses[0]:
                    _note_terms(self._flow, reader, [node])

    def _reach(self, value: Any) -> Reach:
        """Return the parameters behind an input or the loss."""
        if not isinstance(value, Tensor):
            return NOTHING
        if id(value) in self._bits:
            return Reach(self._bits[id(value)], self._bits[id(value)])
        if id(value) in self._known:
            return self._known[id(value)][1]
        if not value.is_floating_point() or (value.is_leaf and value.requires_grad):
            return NOTHING
        found = self._behind(value)
        if self._last.trained & ~found.trained and not value.requires_grad and self._break[1]:
            reason, line = self._break
            cut = Cut(
                "graph break", line, f"code that is not traced ({reason}) hands on no gradient", self._last.trained
            )
            self._flow.cuts.append(cut)
            found |= Reach(self._last.read, 0, self._last.cuts | 1 << len(self._flow.cuts) - 1)
        return found

    def _behind(self, value: Tensor) -> Reach:
        """Follow the autograd graph of a tensor from between two graphs."""
        found, todo, seen = NOTHING, [value.grad_fn], set()
        while todo:
            fn: Any = todo.pop()
            if fn is None or fn in seen:
                continue
            seen.add(fn)
            if fn in self._made:
                found |= self._made[fn]
            elif hasattr(fn, "variable"):
                bit = self._bits.get(id(fn.variable), 0)
                found |= Reach(bit, bit)
            else:
                todo += [before for before, _ in fn.next_functions]
        return found


class _Reader:
    """Follows gradients through one Dynamo graph."""

    def __init__(self, flow: GradientFlow, graph: StepGraph) -> None:
        self._flow, self._gm = flow, graph.gm
        self.reach: dict[fx.Node, Reach] = {}
        self.outputs: list[fx.Node] = []
        self._written: set[int | None] = set()  # storages
        self.forms = LinearForms(self._written)
        self._has_gradients = True  # whether gradients are switched on
        self._is_inference = False
        self._detached: set[int] = set()  # identities of fake tensors with a later detach_()

    def begin(self, given: Sequence[Reach]) -> None:
        """Note the parameters behind the inputs."""
        self.reach = dict(zip(self._gm.graph.find_nodes(op="placeholder"), given, strict=True))
        for node, reach in self.reach.items():
            fake = fake_of(node)
            if reach.trained and fake is not None and not fake.requires_grad:
                reason = "`requires_grad_(False)` in the forward switches it off"
                self.reach[node] = self._cut_off(Cut("requires_grad_", "", reason, reach.trained), reach)

    def read_all(self) -> list[fx.Node]:
        """Read the whole graph; return the nodes of its outputs."""
        self._read(self._gm, {})
        returned: Any = self._gm.graph.output_node().args[0]
        self.outputs = list(returned)
        return self.outputs

    def written_inputs(self, inputs: Sequence[Any]) -> frozenset[int]:
        """Return the identities of overwritten inputs."""
        pairs = zip(self._gm.graph.find_nodes(op="placeholder"), inputs, strict=True)
        return frozenset(id(value) for node, value in pairs if storage_of(fake_of(node)) in self._written)

    def _read(self, gm: fx.GraphModule, outer: dict[fx.Node, fx.Node]) -> None:
        aliases = Aliases(gm.graph)
        written = [t for node in gm.graph.nodes for t in _written(node)]
        fakes = [fake for node in written for fake in (fake_of(node), fake_of(outer.get(node, node)))]
        self._detached.update(
            id(fake_of(one)) for n in gm.graph.nodes if op_name(n) == "detach_" for one in _written(n)
        )
        self._written.update(storage for fake in fakes if (storage := storage_of(fake)) is not None)
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                self.reach.setdefault(node, self.reach.get(outer.get(node, node), NOTHING))
                self.forms.read(node, is_opaque=True)
            elif is_checkpoint(node):
                self._enter(gm, node, outer)
            elif not self._switches(node):
                self._read_op(node, aliases)

    def _switches(self, node: fx.Node) -> bool:
        """Whether a node switches gradients on or off; note that."""
        name = op_name(node)
        if name == "_set_grad_enabled":
            self._has_gradients = bool(node.args[0])
        elif name in ("_enter_inference_mode", "_exit_inference_mode"):
            self._is_inference = name == "_enter_inference_mode" and bool(node.args[0])
        else:
            return False
        return True

    def _cut_off(self, cut: Cut, reach: Reach, kept: int = 0) -> Reach:
        """Note a cut; return the reach behind it."""
        self._flow.cuts.append(cut)
        return Reach(reach.read, kept, reach.cuts | 1 << len(self._flow.cuts) - 1)

    def _enter(self, gm: fx.GraphModule, node: fx.Node, outer: dict[fx.Node, fx.Node]) -> None:
        body, inside = checkpoint_body(gm, node, outer)
        for placeholder, given in inside.items():
            self.reach[placeholder] = self.reach.get(given, NOTHING)
        if node.kwargs.get("use_reentrant"):
            self._note_segment("checkpoint", node, node.all_input_nodes)
        self._read(body, inside)
        returned: Any = body.graph.output_node().args[0]
        results = returned if isinstance(returned, list | tuple) else (returned,)
        reaches = [self.reach.get(result, NOTHING) for result in results]
        self.reach[node] = _union(reaches)
        self.forms.read(node, is_opaque=True)
        for user in node.users:
            if op_name(user) == op_name(node) and len(user.args) == 2 and isinstance(user.args[1], int):
                self.reach[user] = reaches[user.args[1]]

    def _note_segment(self, op: str, node: fx.Node, given: Iterable[fx.Node], reason: str = "") -> None:
        inside = _union(self.reach.get(one, NOTHING) for one in given).trained
        self._flow.segments.append(Segment(op, source_of(node), inside, reason))

    def _read_op(self, node: fx.Node, aliases: Aliases) -> None:
        if node in self.reach:  # an element of what a checkpoint returns
            self.forms.read(node, is_opaque=True)
            return
        name, given = op_name(node), node.all_input_nodes
        if _SHAPES_ALONE.fullmatch(name) or not _has_tensors(node):
            self.forms.read(node, is_opaque=True)
            self.reach[node] = self._number(node, name)
            return
        if (one := _own_input(node, name)) is not None:
            given = [one]
        before = _union(self.reach.get(one, NOTHING) for one in given)
        if name == "apply" and node.target is not operator.getitem:
            self._note_segment(_function_name(node), node, given)
        elif getattr(node.target, "namespace", "aten") not in ("aten", "prims", "higher_order"):
            own = name.partition(".")[0]
            self._note_segment(own, node, given, f"the backward registered for `{own}` returns None for it")
        behind, cut = self._behind(node, name)
        result = Reach(before.read, behind, before.cuts)
        if cut is not None and (stopped := before.trained & ~behind):
            cut.stopped = stopped
            result = self._cut_off(cut, before, behind)
        self.reach[node] = result
        self._note_bridges(node)
        changed = changed_in_place(node)
        for alias in aliases.of_all(changed, after=node) if changed else ():
            self.reach[alias] = result if name == "detach_" else self.reach.get(alias, NOTHING) | result

    def _number(self, node: fx.Node, name: str) -> Reach:
        """Return the parameters behind a Python number, with its cut."""
        if not isinstance(node.meta.get("example_value"), _NUMBERS) or _SHAPES_ALONE.fullmatch(name):
            return NOTHING
        before = _union(self.reach.get(one, NOTHING) for one in node.all_input_nodes)
        if not before.trained:
            return before
        if name not in ("item", "tolist"):
            return NOTHING
        cut = Cut(name, source_of(node), f"`{name}` returns a Python number, {_NO_GRADIENT}", before.trained)
        cut.is_discrete = True
        return self._cut_off(cut, before)

    def _note_bridges(self, node: fx.Node) -> None:
        """Note cuts behind a term beside trained ones."""
        atoms = list(self.forms.atoms(node)) if len(node.all_input_nodes) > 1 else []
        reaches = [self.reach.get(atom, NOTHING) for atom in atoms]
        for number, reach in enumerate(reaches):
            if len(reaches) < 2 or reach.trained:
                continue
            others = _union(reaches[:number] + reaches[number + 1 :]).trained
            for cut in self._flow.cuts_before(reach):
                cut.is_bridged |= not cut.stopped & ~others

    def _behind(self, node: fx.Node, name: str) -> tuple[int, Cut | None]:
        """Return the trained bits behind an op, and the cut."""
        cut = Cut(name, source_of(node), "", 0, is_bridged=name in _DETACHING and _is_in_torch(node))
        stops = self._stop(node, name)
        if stops is not None:
            self.forms.read(node, is_opaque=True)
            cut.op, cut.reason = stops
            cut.is_discrete = cut.reason.endswith(_NO_GRADIENT) or cut.op == "sample"
            return 0, cut
        differentiable, cut.reason = self._differentiable(node, name)
        if name == "apply":
            cut.op = _function_name(node)
        cut.is_meant = node.target is torch.autograd.grad
        if differentiable is None:
            differentiable = node.all_input_nodes
        trained = _union(self.reach.get(one, NOTHING) for one in differentiable).trained
        constant = self.forms.read(node)
        if constant is not None:
            cut.reason, cut.is_meant, cut.is_algebra = f"`{name}` {constant.reason}", constant.is_meant, True
            kept = [] if constant.inputs is None else [n for n in differentiable if n not in constant.inputs]
            return _union(self.reach.get(one, NOTHING) for one in kept).trained, cut
        if self.forms.cancels(node):
            left = _union(self.reach.get(atom, NOTHING) for atom in self.forms.atoms(node))
            if trained & ~left.trained:
                cut.reason, cut.is_algebra = f"a term cancels in `{name}`", True
            return trained & left.trained, cut
        return trained, cut

    def _stop(self, node: fx.Node, name: str) -> tuple[str, str] | None:
        """Return name and reason of an op without a gradient."""
        made = list(tensors_in(node.meta.get("example_value")))
        is_mapped = any(map(autograd.is_transformed, made))  # inside of a vmap, where fake tensors need no gradient
        if not is_mapped and (not self._has_gradients or self._is_inference):
            return self._switched_off(node, name)
        if name in _DETACHING:
            return _DETACHING[name], f"`{_DETACHING[name]}` hands on the value without its gradient"
        if name in _FLAT or node.kwargs.get("rounding_mode") is not None:
            return name, f"`{name}` has a derivative of 0 everywhere"
        if made and not any(fake.is_floating_point() or fake.is_complex() for fake in made):
            dtype = str(made[0].dtype).removeprefix("torch.")
            return name, f"`{name}` returns {dtype}, {_NO_GRADIENT}"
        if is_mapped or not made or changed_in_place(node) or any(id(fake) in self._detached for fake in made):
            return None
        is_cut = not any(fake.requires_grad for fake in made)
        return (name, f"`{name}` returns a tensor without a gradient") if is_cut else None

    def _switched_off(self, node: fx.Node, name: str) -> tuple[str, str]:
        """Return name and reason of an op without gradient mode."""
        if _DISTRIBUTIONS.search(str(node.meta.get("stack_trace", ""))):
            return "sample", "`sample()` of a distribution draws under torch.no_grad()"
        mode = "inference_mode" if self._is_inference else "no_grad"
        return mode, f"`{name}` runs under torch.{mode}()"

    def _leaves(self, node: fx.Node) -> list[fx.Node]:
        """Return the placeholders behind a result of ``torch.autograd.grad``.

        A shift of the differentiated value has no influence on the result.
        """
        leaves = _leaves_behind(tensors_in(node.meta.get("example_value")))
        return [given for given in self._gm.graph.find_nodes(op="placeholder") if id(fake_of(given)) in leaves]

    def _differentiable(self, node: fx.Node, name: str) -> tuple[Collection[fx.Node] | None, str]:
        """Return the inputs with a gradient (None: all), and a reason."""
        if name == "apply":
            left_out = _inputs_without_gradient(node)
            given = [one for one in node.all_input_nodes if one not in left_out]
            return given, f"the backward of `{_function_name(node)}` returns None for this input"
        if changed_in_place(node):
            return None, ""
        if node.target is torch.autograd.grad:
            return self._leaves(node), f"`{name}` does not depend on it"
        found = _connected(node)
        if found is not None:  # the autograd node of an input that is overwritten later is another one by now
            written = [one for one in node.all_input_nodes if storage_of(fake_of(one)) in self._written]
            found += [one for one in written if one not in found and _needs_gradient(one)]
        return found, f"`{name}` has no derivative by this input"


def _is_in_torch(node: fx.Node) -> bool:
    """Whether the innermost line of a node is one of torch."""
    files = _FILES.findall(str(node.meta.get("stack_trace", "")))
    return bool(files) and files[-1].startswith(_TORCH)


def _own_input(node: fx.Node, name: str) -> fx.Node | None:
    """Return the input behind one result of ``broadcast_tensors``, ``meshgrid`` and such."""
    made_of = node.args[0] if node.target is operator.getitem and len(node.args) == 2 else None
    if name not in _TENSOR_BY_TENSOR or not isinstance(made_of, fx.Node):
        return None
    given = made_of.args[0] if len(made_of.args) == 1 and isinstance(made_of.args[0], list | tuple) else made_of.args
    number = node.args[1]
    one = given[number] if isinstance(number, int) and -len(given) <= number < len(given) else None
    return one if isinstance(one, fx.Node) else None


_TENSOR_BY_TENSOR = ("broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d")


def _leaves_behind(tensors: Iterable[Tensor]) -> set[int]:
    """Return the identities of the leaves behind tensors."""
    found, seen = set(), set()
    todo: list[Any] = [t.grad_fn for t in tensors]
    while todo:
        fn = todo.pop()
        if fn is None or fn in seen:
            continue
        seen.add(fn)
        if hasattr(fn, "variable"):
            found.add(id(fn.variable))
        todo += [before for before, _ in fn.next_functions]
    return found


def _union(reaches: Iterable[Reach]) -> Reach:
    found = NOTHING
    for reach in reaches:
        found |= reach
    return found


def _needs_gradient(node: fx.Node) -> bool:
    fake = fake_of(node)
    return fake is not None and fake.requires_grad


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the overwritten inputs of an op."""
    if op_name(node) == "embedding" and node.op == "call_function":
        bound = dict(zip(_EMBEDDING, node.args, strict=False)) | node.kwargs
        weight = bound.get("weight")
        return [weight] if bound.get("max_norm") is not None and isinstance(weight, fx.Node) else []
    return changed_in_place(node)


_EMBEDDING = ("input", "weight", "padding_idx", "max_norm")


def _has_tensors(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return value is None or any(True for _ in tensors_in(value))


def _function_name(node: fx.Node) -> str:
    """Return the class of a custom function, by its source line."""
    found = _FUNCTION.search(source_of(node))
    return found[1] if found else "apply"


def _inputs_without_gradient(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a custom function without a gradient."""
    body, module = node.args[1], node.graph.owning_module
    if not isinstance(body, fx.Node) or module is None:
        return []
    graph = module.get_submodule(str(body.target)).graph
    assert isinstance(graph, fx.Graph)
    returned: Any = graph.output_node().args[0]
    gradients = returned if isinstance(returned, list | tuple) else (returned,)
    pairs = zip(node.args[2:], gradients, strict=False)
    given = [(one, gradient) for one, gradient in pairs if isinstance(one, fx.Node)]
    got = {one for one, gradient in given if gradient is not None}
    return [one for one, _ in given if one not in got]


def _connected(node: fx.Node) -> list[fx.Node] | None:
    """Return the differentiable inputs of an op, None if unknown."""
    targets: dict[Any, fx.Node] = {}
    made = list(tensors_in(node.meta.get("example_value")))
    if any(map(autograd.is_transformed, made)):
        return None
    given = [(one, fake) for one in node.all_input_nodes for fake in tensors_in(one.meta.get("example_value"))]
    for one, fake in given:
        if fake.requires_grad:
            targets[id(fake) if fake.grad_fn is None else (fake.grad_fn, fake.output_nr)] = one
    found: list[fx.Node] = []
    todo = [(fake.grad_fn, fake.output_nr) for fake in made if fake.grad_fn is not None]
    seen: set[Any] = set()
    while todo:
        edge = todo.pop()
        fn: Any = edge[0]
        key = id(fn.variable) if hasattr(fn, "variable") else edge
        if key in targets:
            found.append(targets[key])
        elif edge not in seen:
            seen.add(edge)
            todo += [one for one in fn.next_functions if one[0] is not None]
        if len(seen) > _LARGEST_WALK:
            return None
    return list(dict.fromkeys(found)) or None
