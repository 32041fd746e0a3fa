"""Calls of ATen ops, as the rules of example layouts see them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import operators
from gradrewrite._compat.fake_tensors import as_number
from gradrewrite.per_example.layouts import Batch, Const, Layout, Size, Sum, agree, same_size

Layouts = Layout | tuple[Layout, ...]

_aten = torch.ops.aten

# Writes of values where indices say; by index arithmetic, with a mask of what counts.
PUTS = frozenset(operators.overloads(("index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate")))


@dataclass(eq=False)
class OpCall:
    """One node that calls an op."""

    node: fx.Node
    layouts: Mapping[fx.Node, Layouts]  # of the nodes before it
    num_examples: Size
    # layouts by which the op contracts the batch, by the argument: set by a rule whose result is a ``Sum``
    split: dict[fx.Node, Batch] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return an argument by its name in the schema."""
        return self.arguments[name]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name, defaults included."""
        return operators.arguments_of(self.node)

    def batch_of(self, given: Any) -> Batch | None:
        """Return the layout of a node with the batch; None for any other, and for a number."""
        found = self.layouts[given] if isinstance(given, fx.Node) else None
        assert not isinstance(found, tuple)
        return found if isinstance(found, Batch) else None

    def size(self, name: str) -> tuple[Size, ...]:
        """Return the sizes of a tensor argument."""
        return size_of(self[name])

    @property
    def batched(self) -> list[tuple[fx.Node, Batch]]:
        """The inputs with the batch, and their layouts."""
        pairs = ((node, self.batch_of(node)) for node in self.node.all_input_nodes)
        return [(node, layout) for node, layout in pairs if layout is not None]

    def dim(self, name: str = "dim") -> int:
        """Return a dimension argument, counted from 0, of ``self`` or of ``input_sizes``."""
        size = self.size("self") if "self" in self.arguments else self["input_sizes"]
        return int(self[name]) % max(len(size), 1)

    @property
    def results(self) -> list[Tensor | None]:
        """The fake tensors of the results."""
        return values_of(self.node)

    def all_results(self, layout: Layout) -> Layouts:
        """Return the same layout for each result; results without dimensions are constant."""
        value = self.node.meta["val"]
        if not isinstance(value, tuple | list):
            return layout
        return tuple(layout if isinstance(v, Tensor) else Const() for v in value)

    def by_position(self, *layouts: Layout) -> Layouts:
        """Return layouts of the first results; the others are constant."""
        return (*layouts, *[Const()] * (len(self.results) - len(layouts)))

    def same_places(self, *names: str) -> Batch:
        """Return the common layout of elementwise arguments of one rank, of all if none are named."""
        return agree(map(self.batch_of, [self[name] for name in names] if names else self.node.all_input_nodes))

    def contract(self, split: Mapping[fx.Node, Batch]) -> Sum:
        """Note that the op adds up over the examples of arguments with these layouts."""
        self.split.update(split)
        return Sum()


def values_of(node: fx.Node) -> list[Any]:
    """Return the fake tensors of the results of a node."""
    value = node.meta.get("val")
    return list(value) if isinstance(value, tuple | list) else [value]


def size_of(node: Any) -> tuple[Size, ...]:
    """Return the sizes of a node's tensor; none of a number."""
    value = node.meta["val"] if isinstance(node, fx.Node) else None
    return tuple(map(as_number, value.shape)) if isinstance(value, Tensor) else ()


def is_zero(node: Any) -> bool:
    """Whether a node is known to be 0 everywhere."""
    if not isinstance(node, fx.Node):
        return isinstance(node, int | float) and node == 0
    target = node.target
    if target in (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default):
        return True
    if target in (_aten.full.default, _aten.full_like.default, _aten.new_full.default):
        return bool(operators.arguments_of(node)["fill_value"] == 0)
    if target is _aten.scalar_tensor.default:
        return bool(node.args[0] == 0)
    if target in (_aten.expand.default, _aten.view.default, _aten.clone.default, _aten.alias.default):
        return is_zero(node.args[0])
    return False


def counts_up(node: Any, length: Size, step: Size = 1) -> bool:
    """Whether a node is ``[0, step, ..., (length - 1) * step]`` along its one dimension that is not 1."""
    while isinstance(node, fx.Node) and node.target in _KEEP_ORDER:
        node = node.args[0]
    if not isinstance(node, fx.Node) or len(size_of(node)) != 1 or not same_size(size_of(node)[0], length):
        return False
    if node.target not in _COUNTS_UP:
        return False
    given = {"start": 0, "step": 1, **operators.arguments_of(node)}
    start, own = fx.map_arg((given["start"], given["step"]), lambda size: size.meta["val"])
    return bool(start == 0) and same_size(own, step)


def kept_dims(rank: int, removed: Sequence[int]) -> list[int]:
    """Return the remaining dimensions of a tensor, in order."""
    return [d for d in range(rank) if d not in removed]


def is_count(node: Any) -> bool:
    """Whether a node is made of yes and no: a mask, or the number of its elements that hold; integers may be data."""
    if not isinstance(node, fx.Node) or not isinstance(value := node.meta["val"], Tensor):
        return False
    if value.dtype == torch.bool:
        return True
    is_whole = not (value.dtype.is_floating_point or value.dtype.is_complex)
    return is_whole and node.target in _COUNTS and is_count(node.args[0])


_CONVERT = torch.ops.prims.convert_element_type.default
_COUNTS = {*operators.overloads(("sum", "view", "_to_copy", "unsqueeze", "squeeze", "expand", "clone")), _CONVERT}
_COUNTS_UP = {*operators.overloads(("arange",)), torch.ops.prims.iota.default}
_KEEP_ORDER = {
    *(getattr(_aten, name).default for name in ("view", "unsqueeze", "expand", "alias", "clone", "_to_copy")),
    _CONVERT,
}


def is_selection(node: fx.Node) -> bool:
    """Whether a node takes one result out of several."""
    return node.target is operator.getitem
