"""The gradients of single losses: copies of shared backward nodes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, fake_tensors, operators
from gradrewrite.instrumentation.source_locations import line_in
from gradrewrite.ir import editing, markers
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import value_of
from gradrewrite.numerics.gramian import gramian
from gradrewrite.policy.insertions import Insertion, LossStatistic
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.rewriting.forward_values import ForwardValues
from gradrewrite.sites import Site

_aten = torch.ops.aten
MOST = 32  # losses
_NAME = re.compile(r"[^\W\d][\w .:/-]*")  # of a loss; positions in a tuple are none
Rows: TypeAlias = Mapping[int, fx.Node]  # gradients of one tensor, by the number of the loss; 0 where there is none
Copies: TypeAlias = dict[int, dict[fx.Node, fx.Node]]  # of nodes, by loss

# Each element of the result is one of the arguments, at the same place.
_KEEPING = frozenset((markers.mark_error, _aten.copy.default, _aten.slice_scatter.default))
# Results that depend on the shape of a tensor alone.
_SHAPED = frozenset(
    operators.overloads(
        [f"{name}_like" for name in ("zeros", "ones", "full", "empty")]
        + [f"new_{name}" for name in ("zeros", "ones", "full", "empty", "empty_strided")]
    )
)


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses among the outputs of a model."""

    number: int
    tangents: Mapping[fx.Node, frozenset[int]]  # the losses of each tangent; none for other outputs
    vector: fx.Node | None  # the tangent of the one output with all losses, ``[number]``
    others: frozenset[int]  # positions of other differentiable outputs of the Dynamo graph
    parts: Mapping[int, Sequence[int]] = field(default_factory=dict)  # by number: losses that a loss is computed from
    names: Mapping[int, str] = field(default_factory=dict)  # by number; empty if one has none

    def name(self, number: int) -> str:
        """The name of a loss in the keys of records: ``energy``, or ``loss1`` without one of its own."""
        return self.names.get(number, f"loss{number}")


@dataclass(frozen=True, slots=True)
class AsksForLosses:
    """The first insertion that needs the gradient of each loss."""

    insertion: Insertion
    site: Site


def find_losses(marked: MarkedJointGraph, asks: AsksForLosses) -> Losses:
    """Return the losses of a model: its differentiable scalars, or the elements of its only differentiable vector.

    What a model stores is no loss of it. PolicyError if there is none.
    """
    graph, returned = marked.graph, marked.returned
    by_tangent = aot_autograd.outputs_of_tangents(graph)
    own = {node: at for node, at in by_tangent.items() if at is not None and (returned is None or at in returned)}
    scalars = sorted((at, node) for node, at in own.items() if value_of(node).dim() == 0)
    vectors = [(at, node) for node, at in own.items() if value_of(node).dim() == 1]
    # A base of views has no position: any output that is made outside of the graph may be one.
    outside = aot_autograd.regenerated_outputs(graph) if None in by_tangent.values() else set()
    others = outside.union(at for at in by_tangent.values() if at is not None)
    if scalars:
        numbered = {node: frozenset([number]) for number, (_, node) in enumerate(scalars)}
        tangents = {node: numbered.get(node, frozenset()) for node in by_tangent}
        found = _checked(len(scalars), asks), tangents, None, frozenset(others - {at for at, _ in scalars})
        names = {} if returned is None else _names([returned[at] for at, _ in scalars])
        return Losses(*found, _parts(graph, [node for _, node in scalars]), names)
    if len(vectors) == 1 and isinstance(value_of(vectors[0][1]).shape[0], int):
        ((at, node),) = vectors
        number = _checked(value_of(node).shape[0], asks)
        tangents = {other: frozenset(range(number)) if other is node else frozenset() for other in by_tangent}
        return Losses(number, tangents, node, frozenset(others - {at}))
    shapes = ", ".join(str(tuple(value_of(node).shape)) for node in own) or "none"
    views = " Some are views of one tensor: return that tensor, or a .clone() of each view." if outside else ""
    refuse(asks.insertion, Context(asks.site, returned=f"{shapes}.{views}"))
    raise AssertionError("no losses")


def _checked(number: int, asks: AsksForLosses) -> int:
    if number > MOST:
        text = f"{number} losses, each of which would have a backward of its own; at most {MOST}"
        refuse(asks.insertion, Context(asks.site, too_many_losses=text))
    return number


def _names(paths: Sequence[str]) -> dict[int, str]:
    """Return the names of losses by their numbers; nothing if one has none of its own."""
    is_named = all(map(_NAME.fullmatch, paths)) and len(set(paths)) == len(paths)
    return dict(enumerate(paths)) if is_named else {}


def _parts(graph: fx.Graph, tangents: Sequence[fx.Node]) -> dict[int, list[int]]:
    """Return the losses that others are computed from, by the numbers of these."""
    outputs = aot_autograd.outputs_by_tangent(graph)
    losses = [outputs[node] for node in tangents]
    behind: dict[fx.Node, frozenset[int]] = {}  # the losses that a node is computed from
    for node in graph.nodes:
        own = {losses.index(node)} if node in losses else set()
        behind[node] = frozenset(own).union(*(behind[n] for n in node.all_input_nodes))
    found = {number: sorted(behind[loss] - {number}) for number, loss in enumerate(losses)}
    return {number: parts for number, parts in found.items() if parts}


class LossGradients:
    """The backward of each loss in a joint graph, while it is rewritten.

    ``acting`` are the markers of errors that actions change.
    """

    def __init__(self, marked: MarkedJointGraph, asks: AsksForLosses, acting: Collection[fx.Node]) -> None:
        # By the names of nodes of this backward: that of the plain node, and the loss; None of a sum or of zeros.
        self.copies: dict[str, tuple[str, int | None]] = {}
        self.sums: list[fx.Node] = []  # over the losses, for what is not copied
        self._new: list[fx.Node] = []  # Gram matrices and losses
        self.losses = find_losses(marked, asks)
        self._marked, self._graph, self._asks, self._acting = marked, marked.graph, asks, acting
        self._masked: dict[int, fx.Node] = {}
        # Of the tangent of a vector: values of its shape with the elements of the losses apart, and single elements.
        self._diagonal = {node for node in (self.losses.vector,) if node is not None}
        self._elements: dict[fx.Node, int] = {}
        self._depends = self._find_dependencies()

    def take_new(self) -> list[fx.Node]:
        """Return the nodes of Gram matrices and losses since the last call."""
        new, self._new = self._new, []
        return new

    def measured(self, nodes: Sequence[fx.Node]) -> list[Rows]:
        """Return the gradients of each loss at nodes, without markers, so that no action changes them."""
        if self.losses.number == 1:
            return [{0: node} for node in nodes]
        wanted = self._ancestors(nodes, lambda n: bool(self._depends[n]))
        copies = self._copy(wanted, marked=False)
        return [self._of_each(node, copies) for node in nodes]

    def separate(
        self, targets: Sequence[fx.Node], behind: Collection[fx.Node | None]
    ) -> tuple[list[Rows], dict[fx.Node, Rows]]:
        """Take a backward apart as far as several losses share it, up to these nodes.

        ``behind`` are the markers of targets that are errors. Other readers get the sums over the losses. Returns the
        gradients of each loss at the targets, and the copies of the markers of errors; copied nodes are gone.
        """
        found = self._ancestors(targets, lambda n: len(self._depends[n]) > 1)
        if not self._diagonal.isdisjoint(self._acting):  # what acts on the tangent of a vector acts on each loss, too
            found += self._ancestors([*self._elements], lambda n: len(self._depends[n]) > 1 and n not in behind)
        wanted = sorted(set(found))  # nodes compare by their position
        copies = self._copy(wanted, marked=True)
        rows: list[Rows] = [self._of_each(node, copies) for node in targets]
        marked = {node: self._of_each(node, copies) for node in wanted if node.target is markers.mark_error}
        self._add_up(wanted, copies)
        editing.erase_unused(self._graph, wanted)
        return rows, marked

    def _of_each(self, node: fx.Node, copies: Copies) -> Rows:
        return {k: self._of_loss(node, k, copies) for k in sorted(self._depends.get(node, ()))}

    def _of_loss(self, node: fx.Node, k: int, copies: Copies) -> fx.Node:
        return self._masked_tangent(k) if node is self.losses.vector else copies[k].get(node, node)

    def _find_dependencies(self) -> dict[fx.Node, frozenset[int]]:
        """Return the losses of each node of the backward; none where it is 0 for all."""
        found = dict(self.losses.tangents)
        for node in self._graph.nodes:
            read = [n for n in node.all_input_nodes if n in found] if node.op == "call_function" else []
            if not read or node.target in _SHAPED or not _has_tensors(node):
                continue
            element = self._element(node)
            if element is not None:
                self._elements[node] = element
            elif self._keeps_elements_apart(node, {n: found[n] for n in read}):
                self._diagonal.add(node)
            found[node] = frozenset().union(*(found[n] for n in read)) if element is None else frozenset([element])
        return found

    def _keeps_elements_apart(self, node: fx.Node, read: Mapping[fx.Node, frozenset[int]]) -> bool:
        """Whether each element of a result is computed from the same element of the tangent of a vector."""
        value, vector = node.meta.get("val"), self.losses.vector
        if vector is None or not isinstance(value, Tensor) or value.shape != value_of(vector).shape:
            return False
        others = [n for n in read if n not in self._diagonal]
        if node.target is _aten.select_scatter.default:
            number = int(node.args[3]) % self.losses.number  # type: ignore[arg-type]
            return all(read[n] <= {number} for n in others)
        return not others and (node.target in _KEEPING or operators.is_pointwise(node))

    def _element(self, node: fx.Node) -> int | None:
        """Return the number of the loss with this tangent, if the node selects it from that of a vector."""
        read = node.args[0] if node.args else None
        if not isinstance(read, fx.Node):
            return None
        if read in self._diagonal and node.target is _aten.select.int:
            return int(node.args[2]) % self.losses.number  # type: ignore[arg-type]
        if read in self._diagonal and node.target is _aten.slice.Tensor and value_of(node).shape[0] == 1:
            start: Any = node.args[2] if len(node.args) > 2 else None
            return int(start or 0) % self.losses.number
        is_unbound = read.target is _aten.unbind.int and read.all_input_nodes[0] in self._diagonal
        return int(node.args[1]) if is_unbound else None  # type: ignore[arg-type]

    def _ancestors(self, nodes: Sequence[fx.Node], is_wanted: Callable[[fx.Node], bool]) -> list[fx.Node]:
        """Return wanted nodes of the backward with wanted readers down to ``nodes``, in the order of execution."""
        found: set[fx.Node] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node in found or node in self.losses.tangents or node not in self._depends:
                continue
            if node in self._elements:
                todo += node.all_input_nodes
            if not is_wanted(node):
                continue
            found.add(node)
            todo += node.all_input_nodes
            if not isinstance(node.meta.get("val"), Tensor):
                todo += node.users  # all results of an op are copied: sums are of tensors
        return [node for node in self._graph.nodes if node in found]

    def _copy(self, nodes: Sequence[fx.Node], *, marked: bool) -> Copies:
        copies: Copies = {k: {} for k in range(self.losses.number)}
        zeros: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            for k in sorted(self._depends[node]):
                copies[k][node] = self._copy_of(node, k, copies, zeros, marked=marked)
        return copies

    def _copy_of(
        self, node: fx.Node, k: int, copies: Copies, zeros: dict[fx.Node, fx.Node], *, marked: bool
    ) -> fx.Node:
        """Insert the copy of a node for a loss; of a sum with one term that is not 0 this term is taken."""
        missing = [n for n in node.all_input_nodes if n in self._depends and k not in self._depends[n]]
        inputs = {n: self._of_loss(n, k, copies) for n in node.all_input_nodes if n not in missing}
        if node.target is markers.mark_error and not marked:
            return inputs[node.all_input_nodes[0]]
        term = _only_term(node, missing)
        if term is not None and _has_same_layout(inputs[term], node):
            return inputs[term]
        self._check(node)
        for n in missing:
            if n not in zeros:
                like = next((copies[j].get(n, n) for j in sorted(self._depends[n])), n)
                zeros[n] = self._zeros_like(like, n, node)
            inputs[n] = zeros[n]
        made = editing.insert_twin(node, inputs, f"{node.name}_loss{k}")
        self._note(made, node, k)
        return made

    def _note(self, made: fx.Node, node: fx.Node, loss: int | None) -> None:
        self.copies[made.name] = _unmarked(node).name, loss  # a marker has no provenance

    def _zeros_like(self, node: fx.Node, plain: fx.Node, before: fx.Node) -> fx.Node:
        (zeros,), new = editing.compute(self._graph, lambda tensor: [torch.zeros_like(tensor)], [node], before)
        for made in new:
            self._note(made, plain, None)
        return zeros

    def _masked_tangent(self, k: int) -> fx.Node:
        """Return the node of the tangent of a vector of losses, with 0 for the others."""
        vector, number = self.losses.vector, self.losses.number
        assert vector is not None
        if k not in self._masked:

            def mask(tangent: Tensor) -> list[Tensor]:
                return [torch.where(torch.arange(number, device=tangent.device) == k, tangent, 0)]

            after = self._graph.find_nodes(op="placeholder")[-1].next
            (self._masked[k],), new = editing.compute(self._graph, mask, [vector], after)
            for made in new:
                self._note(made, vector, k)
        return self._masked[k]

    def _check(self, node: fx.Node) -> None:
        """Raise PolicyError for an op that may not run once for each loss."""
        name = operators.name_of(node)
        if operators.is_random(node):
            what = "draws random numbers, and would draw others for each loss"
        elif operators.written_by(node) or node.is_impure() or name == "with_effects":
            what = "has a side effect, which would happen once for each loss"
        else:
            return
        line = line_in(self._marked, node)
        op = f"{name}{f' ({line})' if line else ''} in the shared part of their backward {what}"
        refuse(self._asks.insertion, Context(self._asks.site, op_of_all_losses=op))

    def _add_up(self, nodes: Sequence[fx.Node], copies: Copies) -> None:
        """Let the readers of copied nodes that were not copied read the sums."""
        inside = set(nodes)
        for node in nodes:
            outside = [user for user in node.users if user not in inside]
            if not outside:
                continue
            first, *others = self._of_each(node, copies).values()
            total = first
            if any(user.op == "output" or user in self._depends for user in outside if user not in self._elements):
                for other in others:
                    total = editing.insert_call(self._graph, _aten.add.Tensor, (total, other), node, "is_backward")
                    self.sums.append(total)
                    self._note(total, node, None)
            for user in outside:
                element = self._elements.get(user)
                editing.replace_input(user, node, total if element is None else copies[element][node])

    def gramian(self, rows: Sequence[Rows], scale: Tensor | None, before: fx.Node, *, is_opaque: bool) -> fx.Node:
        """Insert the Gram matrix ``[K, K]`` of gradients, float64, in units of the unscaled losses."""
        nodes = [node for own in rows for node in own.values()]
        losses, counts = [k for own in rows for k in own], [len(own) for own in rows]

        def run(*gradients: Tensor) -> list[Tensor]:
            found = gramian(gradients, losses, counts, self.losses.number, is_opaque=is_opaque)
            return [found if scale is None else found / scale.to(found.device, torch.float64).square()]

        different = list(dict.fromkeys(nodes))
        places = [different.index(node) for node in nodes]
        tag = "is_backward" if scale is None else "must_be_in_backward"
        (result,), new = editing.compute(self._graph, lambda *xs: run(*(xs[n] for n in places)), different, before, tag)
        self._new += new
        return result

    def statistics(
        self, rows: Sequence[Rows], names: Sequence[LossStatistic], scale: Tensor | None, before: fx.Node
    ) -> list[fx.Node]:
        """Insert statistics ``[K]``, float64, of the unscaled losses."""
        nodes, number = [node for own in rows for node in own.values()], self.losses.number
        losses = [k for own in rows for k in own]
        places = [n for n, own in enumerate(rows) for _ in own]

        def run(*gradients: Tensor) -> list[Tensor]:
            first = {place: g for place, g in zip(reversed(places), reversed(gradients), strict=True)}
            count = sum(g.numel() for g in first.values())
            of_loss = [[g.abs() for g, k in zip(gradients, losses, strict=True) if k == loss] for loss in range(number)]
            found = [_statistic_of(name, of_loss, count, gradients[0].device) for name in names]
            return [f if scale is None else f / scale.to(f.device, torch.float64) for f in found]

        tag = "is_backward" if scale is None else "must_be_in_backward"
        results, new = editing.compute(self._graph, run, nodes, before, tag)
        self._new += new
        return results

    def values(self, forward: ForwardValues, before: fx.Node) -> fx.Node:
        """Insert the losses ``[K]``, as the forward has computed them, float64."""
        returned = aot_autograd.outputs_by_tangent(self._graph)
        own = {node: losses for node, losses in self.losses.tangents.items() if losses}
        nodes = [forward.for_backward(returned[tangent]) for tangent in sorted(own, key=lambda t: min(own[t]))]

        def run(*losses: Tensor) -> list[Tensor]:
            wide = [loss.to(torch.float64).reshape(-1) for loss in losses]
            return [torch.cat(wide)]

        (result,), new = editing.compute(self._graph, run, nodes, before)
        self._new += new
        return result


def _statistic_of(
    name: LossStatistic, of_loss: Sequence[Sequence[Tensor]], count: int | torch.SymInt, device: torch.device
) -> Tensor:
    """Return a statistic of absolute values, ``[K]``."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    found = []
    for tensors in of_loss:
        if name == "max_abs":
            parts = [zero, *(t.amax().to(torch.float64) for t in tensors if 0 not in t.shape)]
            found.append(torch.stack(parts).amax())
        else:
            found.append(sum((t.sum(dtype=torch.float64) for t in tensors), zero) / count)
    return torch.stack(found)


def weighted_sum(first: Tensor, *others: Tensor) -> Tensor:
    """The sum of ``K`` gradients times the ``K`` 0-d weights behind them, computed in the wider of their dtypes."""
    number = (1 + len(others)) // 2
    gradients, weights = (first, *others[: number - 1]), others[number - 1 :]
    # A product with a 0-d tensor would have the dtype of the gradient.
    wide = torch.promote_types(first.dtype, weights[0].dtype)
    terms = [gradient.to(wide) * weight for gradient, weight in zip(gradients, weights, strict=True)]
    return functools.reduce(torch.add, terms).to(first.dtype)


def unbound_as(dtype: torch.dtype, weights: Tensor) -> list[Tensor]:
    """The elements of a vector, 0-d, in another dtype."""
    return list(weights.to(dtype).unbind())


def _unmarked(node: fx.Node) -> fx.Node:
    while node.target is markers.mark_error:
        (node,) = node.all_input_nodes
    return node


def _has_tensors(node: fx.Node) -> bool:
    found: list[bool] = []
    fx.node.map_aggregate(node.meta.get("val"), lambda x: found.append(isinstance(x, Tensor)))
    return any(found)


def _only_term(node: fx.Node, missing: Sequence[fx.Node]) -> fx.Node | None:
    """Return the term of a sum that is left when these inputs are 0; None for other ops."""
    if node.target not in (_aten.add.Tensor, _aten.sub.Tensor) or len(missing) != 1:
        return None
    left, right = node.args
    if right is missing[0] and isinstance(left, fx.Node):
        return left
    is_plain = node.target is _aten.add.Tensor and node.kwargs.get("alpha", 1) == 1
    return right if is_plain and left is missing[0] and isinstance(right, fx.Node) else None


def _has_same_layout(node: fx.Node, other: fx.Node) -> bool:
    a, b = value_of(node), value_of(other)
    if a.dtype != b.dtype or a.dim() != b.dim() or a.layout is not torch.strided:
        return False
    pairs = zip((*a.shape, *a.stride()), (*b.shape, *b.stride()), strict=True)
    return all(fake_tensors.statically_known_true(x == y) for x, y in pairs)
