"""Rows and tokens of a micro-batch, by errors and by the elements of the first value that is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._utils.tensors import computable
from gradrewrite.ir.replay_graph import ReplayGraph
from gradrewrite.monitoring.logged_tokens import LoggedTokens
from gradrewrite.replay.indices import indices_text, names_of_dimensions, split_rows
from gradrewrite.replay.interpreter import replay, run_again
from gradrewrite.replay.roots import RootCause
from gradrewrite.replay.step_snapshot import StepSnapshot
from gradrewrite.rewriting.batch_errors import by_part, find_batch_error, graph_of_value, has_batch


@dataclass(frozen=True, slots=True, eq=False)
class PartNorms:
    """Norms of the parts of a batch, rows or tokens."""

    norms: Tensor  # ``[N]``, float64; inf where they are not finite
    by: str  # ``"gradient"``, the site of an error, or the op of a value that is not finite
    of_elements: bool = False  # inf where elements of that value are not finite, else 0


@dataclass(frozen=True, slots=True, eq=False)
class BadValue:
    """The first value of a step that is not finite."""

    op: str  # ``module/op`` that made it, or the input that it is
    snapshot: StepSnapshot  # the graph of it
    mask: Tensor | None  # its elements that are not finite; None inside of a loop
    has_batch: bool = True  # whether it may have rows: it is no value of parameters alone, and no gradient of these


@dataclass(frozen=True, slots=True, eq=False)
class BatchSizes:
    """The sizes of a micro-batch."""

    rows: int | None
    positions: int | None  # length of its sequences


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedBatch:
    """The graphs of a micro-batch, in the order of their backwards, with the values of their placeholders."""

    graphs: Sequence[tuple[StepSnapshot, Sequence[Any]]]

    def sizes(self, logged: LoggedTokens | None, num_ids: int | None) -> BatchSizes:
        """Return the sizes by logged tokens, ids and inputs."""
        if logged is not None and not logged.is_packed:
            return BatchSizes(*logged.shape)
        shapes = [(tuple(t.shape), t.is_floating_point()) for t in self._inputs() if t.dim()]
        if not shapes:
            return BatchSizes(None, None)
        rows = next((shape[0] for shape, is_float in shapes if is_float), shapes[0][0][0])
        if num_ids is not None and any(num_ids in shape for shape, _ in shapes):
            rows = num_ids
        lengths = (s[1] for s, is_float in shapes if s[0] == rows and len(s) == (3 if is_float else 2))
        return BatchSizes(rows, next(lengths, None))

    def _inputs(self) -> Iterator[Tensor]:
        """Yield the tensors that the model was given."""
        for snapshot, values in reversed(self.graphs):
            placeholders = snapshot.replay_graph.graph.graph.find_nodes(op="placeholder")
            for node, value in zip(placeholders, values, strict=True):
                known = snapshot.replay_graph.inputs.get(node.name)
                if known is not None and known.role in ("input", "value") and isinstance(value, Tensor):
                    yield value

    def first_bad(self) -> BadValue | None:
        """Return the first value that is not finite, in the order of execution; None if a replay finds none."""
        found: list[tuple[tuple[Any, ...], int, RootCause]] = []
        for number, (snapshot, _) in enumerate(self.graphs):
            for root in replay(snapshot, {}).roots:
                if not root.came_in or root.given is None or root.given.role != "value":
                    at = -number if root.is_forward else number
                    found.append(((not root.is_forward, at, root.order), number, root))
        if not found:
            return None
        _, number, root = min(found, key=lambda entry: entry[0])
        snapshot, values = self.graphs[number]
        by = root.op or (root.given.name if root.given is not None else "the gradient from outside the model")
        graph = snapshot.replay_graph
        node: fx.Node = list(graph.graph.graph.nodes)[root.order[0]]
        if len(root.order) > 1 or not has_batch(graph, node.name):
            return BadValue(by, snapshot, None, len(root.order) > 1)
        (value,) = run_again(snapshot, graph_of_value(graph, node.name), values)
        return BadValue(by, snapshot, ~torch.isfinite(computable(value)) if isinstance(value, Tensor) else None)

    def by_error(self, batch: Sequence[int]) -> PartNorms | None:
        """Return the norms of the error at the logits, over all calls; None if no error has these parts."""
        for snapshot, values in self.graphs:
            error = find_batch_error(snapshot.replay_graph, values, batch)
            if error is not None:
                same = [own for own in self.graphs if own[0].replay_graph is snapshot.replay_graph]
                found = [_norms_at(error.node, own, values, batch) for own, values in same]
                squares = torch.stack([norms for norms in found if norms is not None]).square().sum(0)
                return PartNorms(squares.sqrt().nan_to_num(torch.inf, torch.inf), str(error.site))
        return None

    def calls(self) -> list[tuple[LoggedTokens, ReplayedBatch]]:
        """Return the calls of the model with logged tokens, and the graphs of each."""
        found: list[tuple[LoggedTokens | None, list[Any]]] = []
        seen: list[ReplayGraph] = []
        for snapshot, values in reversed(self.graphs):
            logged = None if snapshot.names is None else snapshot.names.tokens
            if logged is not None or not found or any(snapshot.replay_graph is graph for graph in seen):
                found.append((logged, []))
                seen = []
            seen.append(snapshot.replay_graph)
            found[-1][1].insert(0, (snapshot, values))
        return [(logged, ReplayedBatch(own)) for logged, own in found if logged is not None]


def _norms_at(node: str, snapshot: StepSnapshot, values: Sequence[Any], batch: Sequence[int]) -> Tensor | None:
    """Return the norms of the parts of one value, float64."""
    (value,) = run_again(snapshot, graph_of_value(snapshot.replay_graph, node), values)
    parts = by_part(computable(value), batch)
    return None if parts is None else torch.linalg.vector_norm(parts.reshape(len(parts), -1).double(), dim=1).cpu()


def row_norms(step: ReplayedBatch, sizes: BatchSizes, bad: BadValue | None) -> PartNorms | None:
    """Return the norms of the rows; None if they are not known."""
    if sizes.rows is None or (bad is not None and not bad.has_batch):
        return None
    if bad is None or bad.mask is None:
        return _telling(step.by_error((sizes.rows,)))
    return _of_elements(_mask_of(bad.mask, sizes, ("row",)), bad)


def token_norms(step: ReplayedBatch, sizes: BatchSizes, bad: BadValue | None, logged: LoggedTokens) -> PartNorms | None:
    """Return the norms of the tokens ``[N]``; None if they are not known."""
    if bad is not None and not bad.has_batch:
        return None
    if bad is None or bad.mask is None:
        return _telling(step.by_error(logged.shape))
    if logged.is_packed:
        parts = by_part(bad.mask, logged.shape)
        return _of_elements(None if parts is None else parts.reshape(len(parts), -1).any(1), bad)
    found = _mask_of(bad.mask, sizes, ("row", "position"))
    if found is not None and tuple(found.shape) == logged.shape:
        return _of_elements(found, bad)
    # A value of whole rows, or of tokens of which the loss leaves some out.
    return None if _mask_of(bad.mask, sizes, ("row",)) is None else _telling(step.by_error(logged.shape))


def _of_elements(mask: Tensor | None, bad: BadValue) -> PartNorms | None:
    """Return the parts with marked elements; None if these belong to no part."""
    if mask is None:
        return None
    norms = torch.where(mask.flatten().cpu(), torch.inf, torch.zeros((), dtype=torch.float64))
    return PartNorms(norms, bad.op, of_elements=True)


def _telling(found: PartNorms | None) -> PartNorms | None:
    """Return the norms; None for one without finite parts."""
    return None if found is None or (len(found.norms) > 1 and bool(found.norms.isinf().all())) else found


def _mask_of(mask: Tensor, sizes: BatchSizes, wanted: tuple[str, ...]) -> Tensor | None:
    """Return whether any element is marked, by rows, or by rows and positions; None without these dimensions."""
    mask = split_rows(mask, sizes.rows, sizes.positions)
    names = names_of_dimensions(mask.shape, sizes.rows, sizes.positions)
    if sizes.rows not in mask.shape or not set(wanted) <= set(names):
        return None
    own = [names.index(name) for name in wanted]
    rest = [dim for dim in range(mask.dim()) if dim not in own]
    found = mask.any(rest, keepdim=True) if rest else mask
    return found.permute(*own, *rest).flatten(len(own) - 1).reshape([mask.shape[d] for d in own])


def text_of_elements(bad: BadValue, sizes: BatchSizes) -> str:
    """Return the place of the first non-finite value, in words."""
    if bad.mask is None:
        return ""
    mask = split_rows(bad.mask, sizes.rows, sizes.positions)
    return indices_text(mask, names_of_dimensions(mask.shape, sizes.rows, sizes.positions))
