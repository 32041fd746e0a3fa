"""Zeros of errors, kept through the backward of an op.

A value that is computed from the errors of an op has a mask: where it is 0 because all errors that it is computed from
are. The mask of an error is ``error == 0``; that of another value follows from its operator (``zero_rules``). A product
with a value of the forward may make NaN of such a 0: there it becomes 0 again, before it is added to others or leaves
the op. Masks are made where something asks for them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import operators
from gradrewrite.ir import editing
from gradrewrite.ir.called_ops import OpBackward
from gradrewrite.ir.zero_cover import ZeroCover
from gradrewrite.rewriting.action_tracing import laid_out_as
from gradrewrite.rewriting.zero_rules import RULES, Derived, unchanged_by_errors


def keep_zeros(
    graph: fx.Graph, backward: OpBackward, own: Sequence[fx.Node], parameters: Collection[fx.Node]
) -> tuple[list[fx.Node], ZeroCover]:
    """Keep zeros in the backward of an op with these nodes.

    ``parameters`` are not mended in products. Returns the new nodes, too.
    """
    walk = _Walk(graph, backward, parameters)
    ends = set(backward.ends)
    for node in sorted([*own, *ends]):
        if node in ends:
            given: fx.Node = node.args[0]  # type: ignore[assignment]
            walk.replace(node, given, walk.clean(given, node))
        elif walk.read(node) and not unchanged_by_errors(node):
            walk.follow(node)
    new = [node for node in walk.new if node.users]
    not_covered = tuple(dict.fromkeys(walk.not_covered))
    slices = sum(node.target in _SEARCHES for node in new)
    return new, ZeroCover(walk.num_selected, slices, walk.num_factors, not_covered)


_SEARCHES = frozenset(operators.overloads(["any", "all"]))


class _Walk:
    """The values of one backward that are computed from its errors; a ``zero_rules.Walk``."""

    def __init__(self, graph: fx.Graph, backward: OpBackward, parameters: Collection[fx.Node]) -> None:
        self.new: list[fx.Node] = []
        self.not_covered: list[str] = []
        self.num_selected = 0
        self.num_factors = 0
        self._graph = graph
        self._parameters = parameters
        self._known: dict[fx.Node, Derived | list[Derived]] = {}
        self._masks: dict[Derived, fx.Node | None] = {}
        for error in backward.errors.values():
            self._known[error] = Derived(self._mask_of_error(error))

    def _mask_of_error(self, error: fx.Node) -> Callable[[fx.Node], fx.Node | None]:
        return lambda before: self.compute(lambda x: x == 0, [error], before)

    def read(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs of a node that are computed from errors."""
        return [given for given in node.all_input_nodes if given in self._known]

    def is_risky(self, nodes: Sequence[fx.Node]) -> bool:
        """Return whether zero errors may have made NaN in these values."""
        known = (self._known.get(node) for node in nodes)
        return any(isinstance(one, Derived) and one.is_risky for one in known)

    def mask(self, node: fx.Node, before: fx.Node) -> fx.Node | None:
        """Return the mask of a value, or None."""
        known = self._known[node]
        if not isinstance(known, Derived):
            return None
        if known not in self._masks:
            self._masks[known] = known.mask(before)
        return self._masks[known]

    def clean(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """Return a value with the NaN of zero errors set to 0."""
        mask = self.mask(node, before) if self.is_risky([node]) else None
        if mask is None:
            return node
        self.num_selected += 1
        return self.compute(_without_nan, [node, mask], before)

    def take_out(self, reader: fx.Node, factor: fx.Node, run: Callable[..., Tensor], mask: fx.Node) -> None:
        """Let a node read a mended copy of a factor; parameters stay."""
        if operators.memory_of(factor) not in self._parameters:
            self.num_factors += 1
            mended = self.compute(lambda x, m: laid_out_as(run(x, m), x), [factor, mask], reader)
            self.replace(reader, factor, mended)

    def compute(self, run: Callable[..., Tensor], nodes: Sequence[fx.Node], before: fx.Node) -> fx.Node:
        """Insert a function of the values of nodes."""
        (node,), new = editing.compute(self._graph, lambda *x: [run(*x)], nodes, before)
        self.new += new
        return node

    def compute_like(
        self, run: Callable[..., Tensor], nodes: Sequence[fx.Node], like: fx.Node, before: fx.Node
    ) -> fx.Node:
        """Insert a function of the values of nodes, with a result that is expanded to the shape of another one."""
        return self.compute(lambda *x: run(*x[:-1]).broadcast_to(x[-1].shape), [*nodes, like], before)

    def replace(self, reader: fx.Node, given: fx.Node, replacement: fx.Node) -> None:
        """Let a node read another one."""
        if replacement is not given:
            editing.replace_input(reader, given, replacement)

    def leave_uncovered(self, node: fx.Node) -> None:
        """Note that zeros are not followed through a node."""
        self.not_covered.append(operators.name_of(node))

    def follow(self, node: fx.Node) -> None:
        """Go through a node that is computed from errors."""
        target: Any = node.target
        if target is operator.getitem:
            several = self._known[node.all_input_nodes[0]]
            self._known[node] = several[int(node.args[1])] if isinstance(several, list) else Derived()  # type: ignore[arg-type]
            return
        rule = RULES.get(target)
        if rule is None:
            self.leave_uncovered(node)
            count = 1 if isinstance(node.meta["val"], Tensor) else len(node.meta["val"])
            unknown = [Derived() for _ in range(count)]
            self._known[node] = unknown[0] if isinstance(node.meta["val"], Tensor) else unknown
            return
        self._known[node] = rule(self, node)


def _without_nan(x: Tensor, mask: Tensor) -> Tensor:
    return laid_out_as(torch.where(mask & x.isnan(), 0, x), x)  # nodes behind it were traced for these strides
