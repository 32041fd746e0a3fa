"""Per-example gradients in a joint graph: nodes for their norms, their squares and their weighted sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, fake_tensors, operators
from gradrewrite.errors import PolicyError
from gradrewrite.instrumentation.source_locations import line_in
from gradrewrite.ir import editing
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import value_of
from gradrewrite.per_example.analysis import ExampleAnalysis
from gradrewrite.per_example.layouts import Batch, Mixed, MixesExamplesError, Size, Sum, weighted
from gradrewrite.per_example.op_calls import PUTS, is_selection, is_zero, size_of
from gradrewrite.per_example.rows import (
    Rows,
    find_rows,
    has_cheap_gram,
    products_of,
    square_norms_of,
    sum_of_squares_of,
)
from gradrewrite.per_example.tails import Tail, find_tail, terms_of
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import ExampleQuantity, Insertion, PerExample
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.rewriting.insertion_points import InsertionPoint

_aten = torch.ops.aten
NeededTail: TypeAlias = "Tail | None"  # None of a gradient that is 0
Noise: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Asked:
    """An insertion with the figures of single examples' gradients for it."""

    insertion: Insertion
    reads: PerExample


@dataclass(frozen=True, slots=True)
class _Found:
    name: str  # of the first input that has them
    num_examples: Size
    analysis: ExampleAnalysis | None  # None where there is one example alone, or none

    @property
    def is_empty(self) -> bool:
        return isinstance(self.num_examples, int) and self.num_examples == 0


class ExampleGradients:
    """The per-example gradients of one joint graph, while it is rewritten."""

    def __init__(self, marked: MarkedJointGraph) -> None:
        self.new: list[fx.Node] = []  # inserted since somebody took them
        self.replaced: list[fx.Node] = []  # nothing may need them any more
        self._marked = marked
        self._graph = marked.graph
        self._found: dict[int, _Found] = {}
        self._copies: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
        self._squares: dict[tuple[fx.Node, int], fx.Node] = {}
        self._terms: dict[tuple[fx.Node, int], fx.Node] = {}
        self._summed: dict[fx.Node, tuple[Tail, fx.Node]] = {}  # gradients that are sums of terms which are computed

    def take_new(self) -> list[fx.Node]:
        """Return the nodes inserted since the last call."""
        new, self.new = self.new, []
        return new

    def quantities(self, point: InsertionPoint, node: fx.Node, asked: Asked, scale: Tensor | None) -> list[fx.Node]:
        """Return the nodes of an action's per-example quantities of a gradient, as the actions so far have left it."""
        return [self._quantity(kind, point, node, asked, scale) for kind in asked.reads.quantities]

    def _quantity(
        self, kind: ExampleQuantity, point: InsertionPoint, node: fx.Node, asked: Asked, scale: Tensor | None
    ) -> fx.Node:
        tail = self._tail(point, node, asked)
        squares = self._square_norms(node, tail, asked) if kind == "square_norms" else self._moment(node, tail, asked)
        number = self._found[asked.reads.batch_dim].num_examples

        def in_units(squares: Tensor) -> Tensor:
            x: Any = squares
            if asked.reads.loss_reduction == "mean":  # the terms have 1 / B in them
                x = x * number * number
            x = x / number if kind == "second_moment" else x
            result: Tensor = x if scale is None else x / scale.to(x.device).square()
            return result

        return self._insert(in_units, [squares], reads_live=scale is not None)

    def total_square_norms(
        self, points: Sequence[InsertionPoint], nodes: Sequence[fx.Node], asked: Asked, scale: Tensor | None
    ) -> fx.Node:
        """Return the node of the squared norms ``[B]`` of the gradients of examples, over several parameters."""
        tails = [self._tail(point, node, asked) for point, node in zip(points, nodes, strict=True)]
        squares = [self._square_norms(node, tail, asked) for node, tail in zip(nodes, tails, strict=True)]
        number = self._found[asked.reads.batch_dim].num_examples

        def add_up(*norms: Tensor) -> Tensor:
            widest = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
            total: Any = torch.stack([n.to(norms[0].device, widest) for n in norms]).sum(0)
            if asked.reads.loss_reduction == "mean":
                total = total * number * number
            result: Tensor = total if scale is None else total / scale.to(total.device).square()
            return result

        return self._insert(add_up, squares, reads_live=scale is not None)

    def weighted_gradient(
        self,
        point: InsertionPoint,
        node: fx.Node,
        weights: fx.Node,
        asked: Asked,
        noise: Noise | None,
        scale: Tensor | None,
    ) -> fx.Node:
        """Return the node of a gradient with weighted examples ``[B]``, and noise if any."""
        tail = self._tail(point, node, asked)
        found = self._found[asked.reads.batch_dim]
        if found.is_empty:
            result = self._insert(torch.zeros_like, [node])
        elif found.analysis is None:
            result = self._insert(lambda g, w: g * w.to(g.device, g.dtype).reshape(()), [node, weights])
        elif tail is None:
            result = node
        else:
            terms = self._small_terms(node, tail, asked)
            result = self._clone(tail, weights) if terms is None else self._weigh(node, terms, weights)
            self.replaced += tail.nodes
        examples = found.num_examples
        if noise is None:
            return result

        def add_noise(gradient: Tensor) -> Tensor:
            drawn = noise(gradient)
            drawn = drawn / examples if asked.reads.loss_reduction == "mean" else drawn
            return gradient + (drawn if scale is None else drawn * scale.to(drawn.device, drawn.dtype))

        return self._insert(add_noise, [result], reads_live=True)

    def _tail(self, point: InsertionPoint, node: fx.Node, asked: Asked) -> NeededTail:
        refuse(asked.insertion, Context(point.site, tensor_type="Tensor" if point.layout is None else "DTensor"))
        found = self._examples(point, asked)
        if found.analysis is None or is_zero(node):
            return None
        found.analysis.update()
        layout = found.analysis.of(node)
        start = f"{point.site}: {describe(asked.insertion.action)} needs the gradient of each example"
        if layout == Sum():
            try:
                return find_tail(node, found.analysis.layouts, found.analysis.splits)
            except MixesExamplesError as err:
                raise PolicyError(f"{start}: {err}. {WAY_OUT}", code="per-example") from None
        if not isinstance(layout, Mixed):
            raise PolicyError(f"{start}, and this one does not depend on the examples of the batch", code="per-example")
        mixing = next(other for other in self._graph.nodes if other.name == layout.node)
        line = f", {found_line}" if (found_line := line_in(self._marked, mixing)) else ""
        raise PolicyError(f"{start}: {layout.reason} ({layout.node}{line}). {WAY_OUT}", code="per-example")

    def _examples(self, point: InsertionPoint, asked: Asked) -> _Found:
        dim = asked.reads.batch_dim
        if dim not in self._found:
            self._found[dim] = self._look(point, asked)
        found = self._found[dim]
        if found.is_empty and asked.reads.loss_reduction == "mean":
            raise PolicyError(
                f"{point.site}: {describe(asked.insertion.action)}: the batch has no examples (dimension {dim} of "
                f"input {found.name!r} is 0), and a mean over none is not defined. Leave out empty batches, or let the "
                'loss be a sum over examples and say so (loss_reduction="sum"): that of none is 0',
                code="per-example",
            )
        return found

    def _look(self, point: InsertionPoint, asked: Asked) -> _Found:
        refuse(asked.insertion, Context(point.site, is_part=not (self._marked.is_whole and self._marked.is_last)))
        start = f"{point.site}: {describe(asked.insertion.action)}"
        inputs = self._marked.inputs
        batched: dict[fx.Node, str] = {}
        for node, position in aot_autograd.plain_inputs(self._graph).items():
            given, value = inputs.get(position), node.meta.get("val")
            if given is not None and given.role not in ("parameter", "buffer") and isinstance(value, Tensor):
                if value.dim() > asked.reads.batch_dim:
                    batched[node] = given.name
                elif value.dim():
                    raise PolicyError(
                        f"{start}: input {given.name!r} has no dimension {asked.reads.batch_dim}", code="per-example"
                    )
        if not batched:
            raise PolicyError(f"{start}: no input of the model is a tensor with a batch", code="per-example")
        (first, *others), dim = batched, asked.reads.batch_dim
        size = fake_tensors.as_number(value_of(first).shape[dim])
        for node in others:
            if not fake_tensors.equal_or_guarded(size, value_of(node).shape[dim]):
                raise PolicyError(
                    f"{start}: dimension {dim} of every input is the batch, and it is {size} in {batched[first]!r} and "
                    f"{value_of(node).shape[dim]} in {batched[node]!r}. Make what has no batch a buffer of the model",
                    code="per-example",
                )
        if isinstance(size, int) and size <= 1:
            return _Found(batched[first], size, None)
        return _Found(batched[first], size, ExampleAnalysis(self._graph, dict.fromkeys(batched, Batch(dim)), size))

    def _square_norms(self, node: fx.Node, tail: NeededTail, asked: Asked) -> fx.Node:
        """Return the node of the squared norms of the terms, ``[B]``, at least in float32."""
        key = node, asked.reads.batch_dim
        if key not in self._squares:
            self._squares[key] = self._make_square_norms(node, tail, asked)
        return self._squares[key]

    def _make_square_norms(self, node: fx.Node, tail: NeededTail, asked: Asked) -> fx.Node:
        found = self._found[asked.reads.batch_dim]
        wide, examples = _wide(node), found.num_examples
        if tail is None:
            if found.analysis is None and not found.is_empty:
                return self._insert(lambda g: g.to(wide).square().sum().reshape(1), [node])
            return self._insert(lambda g: g.new_zeros(examples, dtype=wide), [node])
        rows = find_rows(tail)
        if rows and has_cheap_gram(rows, node):
            nodes, run = square_norms_of(rows, examples, wide)
            return self._insert(run, nodes)
        terms = self._terms_of(node, tail, rows, asked)
        return self._insert(lambda t: t.to(wide).reshape(examples, -1).square().sum(1), [terms])

    def _moment(self, node: fx.Node, tail: NeededTail, asked: Asked) -> fx.Node:
        """Return the node of the sum over examples of the squared terms, in the shape of the parameter."""
        wide, examples = _wide(node), self._found[asked.reads.batch_dim].num_examples
        if tail is None:  # a gradient that is 0, or that of one example; of none it is divided by 0
            return self._insert(lambda g: g.to(wide).square(), [node])
        rows = find_rows(tail)
        found = sum_of_squares_of(rows, node, examples, wide) if rows else None
        if found is not None:
            return self._insert(found[1], found[0])
        terms = self._terms_of(node, tail, rows, asked)
        self._summed[node] = tail, terms
        return self._insert(lambda t: t.to(wide).square().sum(0), [terms])

    def _terms_of(self, node: fx.Node, tail: Tail, rows: list[Rows], asked: Asked) -> fx.Node:
        """Return the node of the terms ``[B, *P]`` of a gradient, before the gradient."""
        key = node, asked.reads.batch_dim
        if key not in self._terms:
            examples = self._found[asked.reads.batch_dim].num_examples
            found = products_of(rows, examples, _wide(node)) if rows else None
            nodes, run = terms_of(tail, examples) if found is None else found
            # Inductor cannot lay out views of a symbolic batch that the forward would save (2.13).
            in_backward = isinstance(examples, torch.SymInt)
            self._terms[key] = self._insert(run, nodes, reads_live=in_backward, before=node)
        return self._terms[key]

    def add_up_terms(self) -> None:
        """Sum computed terms to gradients: one product instead of two."""
        for node, (tail, terms) in self._summed.items():
            if node.users:
                editing.call_instead(node, _aten.sum.dim_IntList, (terms, [0]), {"dtype": value_of(node).dtype})
                self.replaced += [other for other in tail.nodes if other is not node]

    def _small_terms(self, node: fx.Node, tail: Tail, asked: Asked) -> fx.Node | None:
        """Return the node of the terms; None if not computed, or larger than their operands."""
        terms = self._terms.get((node, asked.reads.batch_dim))
        if terms is None:
            return None
        size = sum(_numel_hint(operand) for operand, layout in tail.operands if layout is not None)
        return terms if _numel_hint(terms) <= size else None

    def _weigh(self, node: fx.Node, terms: fx.Node, weights: fx.Node) -> fx.Node:
        def add_up(terms: Tensor, weights: Tensor) -> Tensor:
            of_each = weights.to(terms.device, terms.dtype).reshape(-1, *(1,) * (terms.dim() - 1))
            return (terms * of_each).sum(0).to(value_of(node).dtype)

        return self._insert(add_up, [terms, weights])

    def _clone(self, tail: Tail, weights: fx.Node) -> fx.Node:
        """Return a copy of a tail with one weighted argument at each frontier node."""
        copies = self._copies.setdefault(weights, {})  # one op may make the gradients of two parameters
        for node in tail.nodes:
            if node in copies:
                continue
            changed: dict[str, Any] = {}
            if node in tail.splits:
                name, argument = _linear_argument(node, tail)
                layout = tail.splits[node][argument]
                changed[name] = self._insert(lambda x, w, at=layout: weighted(x, at, w), [argument, weights])
                if "output_mask" in operators.arguments_of(node):
                    changed["output_mask"] = [False, *operators.arguments_of(node)["output_mask"][1:]]
            copies[node] = editing.insert_copy(node, copies, changed, self._graph.output_node())
            self.new.append(copies[node])
        return copies[tail.gradient]

    def _insert(
        self,
        run: Callable[..., Tensor],
        nodes: Sequence[fx.Node],
        *,
        reads_live: bool = False,
        before: fx.Node | None = None,
    ) -> fx.Node:
        placeholders = self._graph.find_nodes(op="placeholder")
        sizes = {str(n.meta["val"]): n for n in placeholders if isinstance(n.meta.get("val"), torch.SymInt)}
        inputs = [*dict.fromkeys(nodes), *sizes.values()]  # symbols in layouts come from these
        places = [inputs.index(node) for node in nodes]
        tag, before = "must_be_in_backward" if reads_live else "is_backward", before or self._graph.output_node()
        (result,), new = editing.compute(
            self._graph, lambda *xs: [run(*(xs[n] for n in places))], inputs, before, tag, is_pruned=True
        )
        self.new += new
        return result


WAY_OUT = (
    "Per-example gradients need a loss that is a sum or a mean over examples, each computed from its own inputs; leave "
    "this parameter out, or replace the op (GroupNorm or LayerNorm for BatchNorm, a weight decay for a penalty)"
)


def _wide(node: fx.Node) -> torch.dtype:
    return torch.promote_types(value_of(node).dtype, torch.float32)


# The argument of each op of a frontier in which its result is linear; of the others the first one.
_LINEAR = {
    _aten.mm.default: ("self", "mat2"),
    _aten.bmm.default: ("self", "mat2"),
    _aten._trilinear.default: ("i1", "i2", "i3"),
    **dict.fromkeys(PUTS, ("values",)),
}


def _linear_argument(node: fx.Node, tail: Tail) -> tuple[str, fx.Node]:
    """Return the argument of a node of the frontier that is multiplied: of a product the smaller one."""
    given = operators.arguments_of(node)
    names = _LINEAR.get(node.target, tuple(given)[:1])
    names = tuple(name for name in names if given[name] in tail.splits[node])
    # Of two of one size the error: what the forward has saved lives in memory of its own.
    chosen = min(names, key=lambda name: (_numel_hint(given[name]), not aot_autograd.is_backward(given[name])))
    return chosen, given[chosen]


def _numel_hint(node: fx.Node) -> int:
    return math.prod(map(fake_tensors.hint_of, size_of(node)))


def drop_replaced(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Take nodes out of a graph that nothing reads, and results that nothing reads out of the others."""
    left = set(graph.nodes)
    editing.erase_unused(graph, [node for node in nodes if node in left])
    left = set(graph.nodes)
    for node in nodes:
        if node in left and "output_mask" in operators.arguments_of(node):
            read = {user.args[1] for user in node.users if is_selection(user)}
            asked = operators.arguments_of(node)["output_mask"]
            editing.set_argument(node, "output_mask", [bool(a) and n in read for n, a in enumerate(asked)])
