"""Nodes of Dynamo graphs: ops, in-place ops, aliases."""

from __future__ import annotations

import inspect
import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from gradrewrite._compat import autograd, fake_tensors, operators
from gradrewrite.ir import editing


def is_checkpoint(node: fx.Node) -> bool:
    """Whether a node runs an activation checkpoint."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "tag_activation_checkpoint"


def checkpoint_body(
    gm: fx.GraphModule, node: fx.Node, outer: Mapping[fx.Node, fx.Node]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Return the body of an activation checkpoint, and by its placeholders the nodes outside.

    ``outer`` has those of the graph that the node is in, if that is a body too.
    """
    body_node, *args = node.args
    assert isinstance(body_node, fx.Node)
    body = getattr(gm, str(body_node.target))
    placeholders = body.graph.find_nodes(op="placeholder")
    inside = {p: outer.get(a, a) for p, a in zip(placeholders, args, strict=True) if isinstance(a, fx.Node)}
    return body, inside


def is_nested_region(node: fx.Node) -> bool:
    """Return whether a node calls a ``torch.compiler.nested_compile_region``."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "invoke_subgraph"


def fake_of(node: fx.Node) -> Tensor | None:
    """Return the fake tensor of a node; None for another value."""
    value = node.meta.get("example_value")
    return value if isinstance(value, Tensor) else None


def op_name(node: fx.Node) -> str:
    """Return the ``__name__`` of the user's function for a node; an element of a tuple has that of the tuple's op.

    Of several results of ``torch.autograd.grad`` they are ``grad.0``, ``grad.1``.
    """
    number: Any = None
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node) and fake_of(node.args[0]) is None:
        number, node = node.args[1], node.args[0]
    if node.target is torch.autograd.grad and number is not None and len(node.meta["example_value"]) > 1:
        return f"grad.{number}"
    if isinstance(node.target, str):
        return node.target
    name = str(getattr(node.target, "__name__", node.target))
    return "apply" if name == "autograd_function_apply" else name


def returns_its_input(node: fx.Node) -> bool:
    """Whether an op hands on the tensor that it is given: a dropout that drops nothing (traced, it makes a copy)."""
    if node.target not in _DROPOUTS or changed_in_place(node) or len(node.all_input_nodes) != 1:
        return False
    (given,) = node.all_input_nodes
    fake = fake_of(given)
    if fake is None:
        return False
    x = torch.empty([2] * fake.dim(), device="meta")  # asked of the op itself: it depends on its arguments alone
    dropout: Any = node.target
    mapped: Any = fx.map_arg((node.args, node.kwargs), lambda _: x)
    with torch.random.fork_rng(devices=()):
        result: Tensor = dropout(*mapped[0], **mapped[1])
    return result is x


def changed_in_place(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that an op changes in place; empty for any other op."""
    written = [given for given in _written(node) if isinstance(given, fx.Node)]
    return [given for given in written if fake_of(given) is not None or given.op == "placeholder"]


def _written(node: fx.Node) -> list[Any]:
    """Arguments that an op writes to: ``out=``, those of its schema, or the first one (a list of a foreach op)."""
    first = node.args[0] if node.args else None
    if node.target is operator.setitem:
        return [first]
    written = _listed(node.kwargs.get("out"))
    schema = operators.schema_of(node.target)
    if schema is not None:
        named = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
        changed = (a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        return [given for name in changed for given in _listed(named.get(name))]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "autograd_function_apply":
        written += _marked_dirty(node)
    if (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or _asks_for_in_place(node):
        written += _listed(first)
    return written


def _marked_dirty(node: fx.Node) -> list[Any]:
    """Arguments that a custom ``autograd.Function`` returns and has marked as dirty."""
    numbers: Any = node.kwargs.get("dirty_idx", ())
    body, module = node.args[0], node.graph.owning_module
    if not numbers or module is None:
        return []
    assert isinstance(body, fx.Node)
    graph = module.get_submodule(str(body.target)).graph
    assert isinstance(graph, fx.Graph)
    returned: Any = graph.output_node().args[0]
    (results, _), inputs = returned, graph.find_nodes(op="placeholder")  # and what is saved
    return [node.args[2 + inputs.index(_listed(results)[number])] for number in numbers]  # behind the two bodies


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def returned_inputs(graph: fx.Graph) -> set[int]:
    """Positions of the differentiable inputs that a Dynamo graph returns, themselves or as a view."""
    outputs, inputs = graph.output_node().all_input_nodes, graph.find_nodes(op="placeholder")
    storages = set(map(_differentiable_storage, outputs)) - {None}
    return {position for position, node in enumerate(inputs) if _differentiable_storage(node) in storages}


def positions_of(graph: fx.Graph, returned: Sequence[tuple[str, Tensor]] | None) -> dict[int, str] | None:
    """Return the paths of fake tensors by their positions among the outputs of a Dynamo graph; None for all."""
    if returned is None:
        return None
    paths = {id(fake): path for path, fake in reversed(returned)}
    outputs = enumerate(editing.outputs_of(graph.output_node()))
    return {n: paths[id(fake)] for n, node in outputs if id(fake := fake_of(node)) in paths}


def _differentiable_storage(node: fx.Node) -> int | None:
    fake = fake_of(node)
    return fake_tensors.storage_key(fake) if _has_storage(fake) and fake.requires_grad else None


class Aliases:
    """The tensors of a Dynamo graph that share memory, where each is used, and where the memory is written to."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {node: number for number, node in enumerate(graph.nodes)}
        fakes = {node: fake for node in graph.nodes if _has_storage(fake := fake_of(node))}
        storages = {node: fake_tensors.storage_key(fake) for node, fake in fakes.items()}
        self._first: dict[int, fx.Node] = {}  # by tensor: its first node
        self._uses: dict[int, list[tuple[int, fx.Node]]] = defaultdict(list)  # by storage, in execution order
        self._writes: dict[int, list[int]] = defaultdict(list)  # by storage, in execution order
        for node, position in self._position.items():
            if node in fakes:
                self._first.setdefault(id(fakes[node]), node)
            for read in filter(fakes.__contains__, node.all_input_nodes):
                self._uses[storages[read]].append((position, self._first[id(fakes[read])]))
            for written in filter(fakes.__contains__, changed_in_place(node)):
                self._writes[storages[written]].append(position)

    def of_all(self, changed: Sequence[fx.Node], *, after: fx.Node) -> list[fx.Node]:
        """Return the changed tensors, then all that share their memory and are used before it is written to again."""
        found = {id(fake_of(node)): node for node in changed}
        now = self._position[after]
        for fake in filter(_has_storage, map(fake_of, changed)):
            storage = fake_tensors.storage_key(fake)
            writes, uses = self._writes[storage], self._uses[storage]
            number = bisect_right(writes, now)
            until = writes[number] if number < len(writes) else len(self._position)
            begin, end = (bisect_right(uses, position, key=itemgetter(0)) for position in (now, until))
            used = {alias for _, alias in uses[begin:end] if self._position[alias] < now}
            for alias in sorted(used, key=self._position.__getitem__):
                found.setdefault(id(fake_of(alias)), alias)
        return list(found.values())

    def writes_behind(self, node: fx.Node, first: fx.Node) -> list[fx.Node]:
        """Return the nodes from this one on that write to the memory of a tensor."""
        fake = fake_of(node)
        if not _has_storage(fake):
            return []
        found = self._writes[fake_tensors.storage_key(fake)]
        nodes = list(self._position)
        return [nodes[position] for position in found if position >= self._position[first]]

    def is_alone(self, node: fx.Node, first: fx.Node) -> bool:
        """Return whether no other tensor of the same memory is used from this node on."""
        fake = fake_of(node)
        if not _has_storage(fake):
            return True
        uses = self._uses[fake_tensors.storage_key(fake)]
        used = (fake_of(alias) for position, alias in uses if position >= self._position[first])
        return all(other is fake for other in used)


def _has_storage(fake: Tensor | None) -> TypeGuard[Tensor]:
    return fake is not None and fake.layout is torch.strided and not autograd.is_transformed(fake)


_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor")
_DROPOUTS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
)  # fmt: skip


def _asks_for_in_place(node: fx.Node) -> bool:
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    if not inspect.isfunction(node.target):
        return False
    parameters = list(inspect.signature(node.target).parameters)
    position = parameters.index("inplace") if "inplace" in parameters else len(node.args)
    return position < len(node.args) and bool(node.args[position])
