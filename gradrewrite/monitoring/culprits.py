"""Culprits: the rank, micro-batch, rows, tokens and layers behind a skipped update."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from gradrewrite._compat import data_parallel
from gradrewrite._utils.formatting import plain_table
from gradrewrite.diagnostics.skipped_updates import spike_reason
from gradrewrite.distributed.groups import this_rank
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.monitoring.batch_parts import (
    BadValue,
    BatchSizes,
    PartNorms,
    ReplayedBatch,
    row_norms,
    text_of_elements,
    token_norms,
)
from gradrewrite.monitoring.kept_step import KeptStep
from gradrewrite.monitoring.logged_tokens import LoggedTokens
from gradrewrite.monitoring.step_record import StepRecord
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.replay.interpreter import run_again
from gradrewrite.replay.step_snapshot import StepSnapshot, VersionedRef
from gradrewrite.rewriting.example_norms import example_norms_of


class CulpritRow(NamedTuple):
    """One row of a batch.

    Attributes:
        index: Its number in the micro-batch, from 0; of a packed batch that of the sequence.
        id: Its name of ``monitor.log_ids``; None without one.
        norm: L2 norm of what it adds to the gradient of the micro-batch, over all parameters; where
            ``Culprits.rows_by`` says so that of its part of an error, or inf.
        share: Its square over the sum of squares of all rows of the micro-batch, in [0, 1]; 1 if it is not finite, and
            0 for finite rows beside such.
    """

    index: int  # type: ignore[assignment]  # not ``tuple.index``, which nobody needs here
    id: int | str | None
    norm: float
    share: float


@dataclass(frozen=True, slots=True)
class CulpritToken:
    """One token of a batch.

    Attributes:
        row: Number of its row in the micro-batch, from 0; of a packed batch that of its sequence.
        position: Its number in the row, or in the sequence, from 0.
        norm: L2 norm of its part of the error at ``Culprits.tokens_by``; inf if it is not finite.
        share: Its square over the sum of squares of all tokens, in [0, 1]; 1 if it is not finite, and 0 for finite ones
            beside such.
        values: What ``monitor.log_tokens`` was given of it, by name.
        id: Name of its row of ``monitor.log_ids``; None without one.
    """

    row: int
    position: int
    norm: float
    share: float
    values: Mapping[str, float] = field(hash=False)
    id: int | str | None = None


class CulpritLayer(NamedTuple):
    """One module.

    Attributes:
        name: The module of the parameters; ``""`` is the model itself.
        share: Share of its parameters in the squared norm of the rows that are listed, of the micro-batch without
            rows; 1 if it is not finite, and 0 for finite ones beside such.
    """

    name: str
    share: float


@dataclass(frozen=True, slots=True)
class Culprits:
    """The origin of a skipped update, as ``Monitor.culprits`` returns it.

    Attributes:
        step: Number of the update, from 0.
        rank: The rank, 0 in a single process; None where records do not tell.
        micro_batch: Number of the backward among those of the update, from 0 (the text counts from 1, as all texts do);
            None where records do not tell.
        rows: Rows of the micro-batch, the one with the largest norm first; ``()`` where they are not known.
        layers: Modules that they act in, the one with the largest share first; ``()`` where they are not known.
        reason: Why the update was skipped.
        note: Why rows, or more, are not known or known in another way; ``""`` if there is nothing to say.
        tokens: Tokens of the micro-batch, the one with the largest norm first; ``()`` without ``monitor.log_tokens``.
        more_tokens: How many there are besides; of those that are not finite, if any is not.
        more_rows: How many more rows are not finite.
        rows_by: ``"gradient"``: rows are by what they add to the gradient. Where they act on each other it is the site
            of the error at the logits, ``"error:head"``, or the op of the first value that is not finite,
            ``"encoder/sqrt"``: they are the rows of its elements.
        tokens_by: Likewise for tokens; ``""`` without them.
    """

    step: int
    rank: int | None
    micro_batch: int | None
    rows: tuple[CulpritRow, ...] = ()
    layers: tuple[CulpritLayer, ...] = ()
    reason: str = ""
    note: str = ""
    tokens: tuple[CulpritToken, ...] = ()
    more_tokens: int = 0
    more_rows: int = 0
    rows_by: str = "gradient"
    tokens_by: str = ""

    def __str__(self) -> str:
        where = ", ".join(
            f"{name} {'not known' if number is None else number + first}"
            for name, number, first in (("rank", self.rank, 0), ("micro-batch", self.micro_batch, 1))
        )
        lines = [f"update {self.step} was skipped{f' ({self.reason})' if self.reason else ''}: {where}"]
        lines += [f"  row {_named(row.index, row.id)}: {self._figure(row)}" for row in self.rows]
        lines += [f"  and {self.more_rows} more"] if self.more_rows else []
        lines += [f"  layer {layer.name or '(model)'}: {100 * layer.share:.3g} %" for layer in self.layers]
        return "\n".join([*lines, *self._table(), *([f"  {self.note}"] if self.note else [])])

    def _figure(self, row: CulpritRow) -> str:
        if self.rows_by != "gradient" and not self.rows_by.startswith("error:"):
            return f"not finite in {self.rows_by}"
        of = "gradient norm" if self.rows_by == "gradient" else f"norm of {self.rows_by}"
        return f"{of} {row.norm:.4g}, {100 * row.share:.3g} %"

    def _table(self) -> list[str]:
        """Return the lines of the table of tokens."""
        if not self.tokens:
            return []
        is_error = self.tokens_by.startswith("error:")
        columns = ["row", "position", *(["norm", "share"] if is_error else []), *self.tokens[0].values]
        rows = []
        for token in self.tokens:
            figures = [f"{token.norm:.4g}", f"{100 * token.share:.3g} %"] if is_error else []
            values = [f"{value:.4g}" for value in token.values.values()]
            rows.append([_named(token.row, token.id), str(token.position), *figures, *values])
        by = "by the norm of" if is_error else "that are not finite in"
        more = [f"  and {self.more_tokens} more"] if self.more_tokens else []
        table = [f"  {line}" for line in plain_table(columns, rows).splitlines() if line.strip(" \u2500")]
        return [f"  tokens {by} {self.tokens_by}:", *table, *more]

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _named(number: int, name: int | str | None) -> str:
    return str(number) if name is None else f"{number} (id {name!r})"


@dataclass(frozen=True, slots=True)
class _Suspect:
    """The micro-batch of a rank with the largest figure."""

    found: Culprits
    row: float | None  # norm of the largest row, inf if one is not finite; None without rows
    gradient: float | None  # norm of the gradient, likewise; None where it is not known


def find_culprits(recorder: StepRecorder, k: int) -> Culprits:
    """Return the culprits of the last skipped update; see ``Monitor.culprits``."""
    with recorder.lock:
        records = _last_skipped(recorder)
        update, key = records[-1].update, records[-1].update_key
        modules = [module for ref in recorder.links.modules if (module := ref()) is not None]
        with data_parallel.unsharded(modules if recorder.links.can_replay(key) else ()):
            own = _replayed(recorder.links.kept_step, key, update, k)
        if isinstance(own, str):
            own = _of_records(records, update, own, k)
        own = replace(
            own, found=replace(own.found, reason=spike_reason(records[-1].values()) or "a finite check failed")
        )
    found = _of_ranks(own, recorder.links.agreeing)
    with recorder.lock:
        records[-1].note_culprits(str(found))
        recorder.writers.note_late(records[-1].step, "what monitor.culprits() says")
    return found


def _last_skipped(recorder: StepRecorder) -> list[StepRecord]:
    """Return the records of the last skipped update; RuntimeError without one."""
    for record in reversed(recorder.records):
        record.fetch()
        if any(key.record == "skipped" and value > 0 for key, value in record.values().items()):
            of_update = [one for one in recorder.records if one.update_key == record.update_key]
            for one in of_update:
                one.fetch()
            return of_update
    raise RuntimeError(
        "monitor.culprits(): no update was skipped in the steps of the buffer. It tells who made a skip, by SkipSpikes "
        'or CheckFinite("skip"), of an optimizer with gr.guard'
    )


def _of_ranks(own: _Suspect, group: dist.ProcessGroup | None) -> Culprits:
    """Return the culprits of the rank with the largest figure; all ranks of the group call it."""
    if group is None:
        return own.found
    gathered: list[_Suspect] = [own] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    figures = [suspect.row for suspect in gathered]
    if None in figures:
        figures = [suspect.gradient for suspect in gathered]
    if None in figures:
        note = f"{own.found.note}; which rank it was is not known: not all of them recorded figures".lstrip("; ")
        return replace(own.found, rank=None, micro_batch=None, layers=(), note=note)
    at = figures.index(max(figure for figure in figures if figure is not None))
    return replace(gathered[at].found, rank=dist.get_process_group_ranks(group)[at])


def _replayed(kept: KeptStep | None, key: int, update: int, k: int) -> _Suspect | str:
    """Return the micro-batch of a kept step with the largest row, or gradient; or why it cannot be replayed."""
    if kept is None or kept.update_key != key:
        return "rows are not known: the step can be replayed until the next one's first forward, which has begun"
    try:
        norms = [_norms_of(kept, snapshots) for snapshots in kept.micro_batches.values()]
    except Exception as err:  # whatever stops a replay, all ranks have to take part in what follows
        reason = (str(err).strip().splitlines() or [type(err).__name__])[0]
        return f"rows are not known: the step could not be replayed: {reason}"
    if all(one.rows is not None for one in norms):
        at = _largest([one.largest_row() for one in norms])
    else:
        at = _largest([one.gradient() for one in norms])
    return norms[at].suspect(update, at, k, _parts_of(kept, list(kept.micro_batches.values())[at], norms[at]))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Rows and tokens of a micro-batch, by errors and elements."""

    rows: PartNorms | None = None  # None: those by gradients, if any
    tokens: PartNorms | None = None
    places: tuple[Tensor, Tensor] | None = None  # row and position of each token
    logged: LoggedTokens | None = None
    notes: tuple[str, ...] = ()


def _parts_of(kept: KeptStep, snapshots: Sequence[StepSnapshot | None], norms: _Norms) -> _Parts:
    """Return the parts of a micro-batch, as far as somebody asked or gradients do not tell them."""
    known = [snapshot for snapshot in snapshots if snapshot is not None]
    is_logged = any(s.names is not None and s.names.tokens is not None for s in known)
    if not is_logged and norms.rows is not None:
        return _Parts()
    try:
        return _replayed_parts(ReplayedBatch([(s, _values_of(kept, s)) for s in known]), norms)
    except Exception as err:  # as in _replayed
        reason = (str(err).strip().splitlines() or [type(err).__name__])[0]
        wanted = "tokens" if norms.rows is not None else "rows and tokens" if is_logged else "rows"
        return _Parts(notes=(f"{wanted} are not known: {norms.missing or reason}",))


def _replayed_parts(step: ReplayedBatch, norms: _Norms) -> _Parts:
    bad = None if math.isfinite(norms.gradient()) else step.first_bad()
    logged, tokens = _worst_call(step, bad)
    sizes = step.sizes(logged, None if norms.ids is None else len(norms.ids))
    places = None if logged is None else logged.places()
    notes = []
    if logged is not None and tokens is None:
        notes.append(_without_tokens(logged, bad))
    if logged is not None and logged.is_packed:
        rows = None if tokens is None or places is None else _of_sequences(tokens, places[0])
    else:
        rows = row_norms(step, sizes, bad) if norms.rows is None else None
    if norms.rows is None or rows is not None:
        notes.append(_note_of(rows, norms.missing, bad, sizes, logged))
    return _Parts(rows, tokens, places, logged, tuple(notes))


def _worst_call(step: ReplayedBatch, bad: BadValue | None) -> tuple[LoggedTokens | None, PartNorms | None]:
    """Return the tokens of the call with the largest norm; those of the call with the first bad value."""
    calls = step.calls()
    own = [call for call in calls if bad is not None and any(s is bad.snapshot for s, _ in call[1].graphs)] or calls
    found = [(logged, token_norms(part, part.sizes(logged, None), bad, logged)) for logged, part in own]
    if not found:
        return None, None
    return max(found, key=lambda one: -1.0 if one[1] is None else float(one[1].norms.max()))


def _without_tokens(logged: LoggedTokens, bad: BadValue | None) -> str:
    if bad is not None:
        return f"tokens are not known: the first value that is not finite, {bad.op}, has none"
    return (
        f"tokens are not known: no error has the shape of what monitor.log_tokens was given, {list(logged.shape)}, in "
        "front; give values of the tokens that the logits are of"
    )


def _note_of(
    rows: PartNorms | None, missing: str, bad: BadValue | None, sizes: BatchSizes, logged: LoggedTokens | None
) -> str:
    """Return how the rows are known, or why they are not."""
    if rows is None:
        return f"rows are not known: {missing}" + (
            "" if bad is None else f"; the first value that is not finite, {bad.op}, has no rows"
        )
    refused = f", as per-example gradients are refused: {missing}" if missing else ""
    if logged is not None and logged.is_packed:
        return "rows are the sequences of the packed batch, by their tokens"
    if rows.of_elements and bad is not None:
        return (
            f"rows are those of the first value that is not finite, {bad.op} ({text_of_elements(bad, sizes)}){refused}"
        )
    return f"rows are by the norm of {rows.by}{refused}"


def _of_sequences(tokens: PartNorms, rows: Tensor) -> PartNorms:
    """Return the norms of sequences from those of their tokens."""
    squares = tokens.norms.new_zeros(int(rows.max()) + 1).index_add(0, rows, tokens.norms.square())
    return PartNorms(squares.sqrt(), tokens.by, tokens.of_elements)


@dataclass(frozen=True, slots=True)
class _Norms:
    """The squared norms of a micro-batch, float64."""

    gradients: Mapping[str, float]  # by parameter
    rows: Mapping[str, Tensor] | None  # likewise, ``[B]`` each; None where they are not known
    missing: str  # why they are not
    ids: tuple[int | str, ...] | None

    def gradient(self) -> float:
        return _finite_or_inf(math.sqrt(sum(self.gradients.values())))

    def largest_row(self) -> float:
        return max(map(_finite_or_inf, self.by_row().sqrt().tolist()), default=0.0)

    def by_row(self) -> Tensor:
        assert self.rows
        return torch.stack(list(self.rows.values())).sum(0)

    def suspect(self, update: int, micro_batch: int, k: int, parts: _Parts) -> _Suspect:
        notes = list(parts.notes)
        found = Culprits(update, this_rank() or 0, micro_batch, layers=_layers(self.gradients, k))
        norms = parts.rows or (PartNorms(self.by_row().sqrt().cpu(), "gradient") if self.rows else None)
        if norms is not None:
            ids = self._ids_for(len(norms.norms), notes)
            order, shares = _largest_parts(norms, k)
            rows = tuple(CulpritRow(n, ids[n], float(norms.norms[n]), shares[n]) for n in order)
            found = replace(found, rows=rows, more_rows=_more_bad(norms, order), rows_by=norms.by)
            if parts.rows is None and self.rows:
                layers = _layers({name: float(own[order].sum()) for name, own in self.rows.items()}, k)
                found = replace(found, layers=layers)
        if parts.tokens is not None:
            found = _with_tokens(found, parts, parts.tokens, k, self.ids)
        row = self.largest_row() if self.rows else None
        return _Suspect(replace(found, note="; ".join(notes)), row, self.gradient())

    def _ids_for(self, number: int, notes: list[str]) -> Sequence[int | str | None]:
        if self.ids is None or len(self.ids) == number:
            return self.ids or [None] * number
        given = f"monitor.log_ids was given {len(self.ids)} of them, and there are {number} rows"
        notes.append(f"ids are not known: {given}")
        return [None] * number


def _largest_parts(norms: PartNorms, k: int) -> tuple[list[int], list[float]]:
    """Return the numbers of the largest parts, and the shares of all."""
    sizes = list(map(_finite_or_inf, norms.norms.tolist()))
    order = sorted(range(len(sizes)), key=lambda n: -sizes[n])
    if norms.of_elements:
        order = [n for n in order if math.isinf(sizes[n])]
    return order[:k], _shares([size * size for size in sizes])


def _more_bad(norms: PartNorms, named: Sequence[int]) -> int:
    """Return how many parts are not finite besides."""
    finite = norms.norms.isfinite()
    return int((~finite).sum() - (~finite[list(named)]).sum())


def _with_tokens(
    found: Culprits, parts: _Parts, norms: PartNorms, k: int, ids: tuple[int | str, ...] | None
) -> Culprits:
    assert parts.logged is not None
    assert parts.places is not None
    rows, positions = parts.places
    values = {name: value.flatten().cpu() for name, value in parts.logged.values.items()}
    order, shares = _largest_parts(norms, k)
    names = ids if ids is not None and len(ids) == int(rows.max()) + 1 else None
    tokens = tuple(
        CulpritToken(
            row=(row := int(rows[n])),
            position=int(positions[n]),
            norm=float(norms.norms[n]),
            share=shares[n],
            values={name: float(value[n]) for name, value in values.items()},
            id=None if names is None else names[row],
        )
        for n in order
    )
    is_finite = bool(norms.norms.isfinite().all())
    more = len(norms.norms) - len(order) if is_finite else _more_bad(norms, order)
    return replace(found, tokens=tokens, more_tokens=more, tokens_by=norms.by)


def _norms_of(kept: KeptStep, snapshots: Sequence[StepSnapshot | None]) -> _Norms:
    """Replay a micro-batch; RuntimeError without the means for it."""
    gradients: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    missing = ""
    for snapshot in snapshots:
        values = _values_of(kept, snapshot)
        assert snapshot is not None
        made = example_norms_of(snapshot.replay_graph, values)
        missing = missing or made.missing
        results = run_again(snapshot, made.graph, values)
        number = len(made.parameters)
        for name, gradient in zip(made.parameters, results, strict=False):
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
        rows |= zip(made.parameters, results[number:], strict=False)
    if len(snapshots) > 1:
        missing = (
            missing or "the model ran as several graphs in one backward (regions, a graph break, or several calls)"
        )
    squares = {name: float(g.detach().abs().double().square().sum()) for name, g in gradients.items()}
    by_row = {name: own.double().cpu() for name, own in rows.items()}
    names = (s.names.ids for s in snapshots if s is not None and s.names is not None)
    ids = next((_ids_of(own) for own in names if own is not None), None)
    return _Norms(squares, None if missing else by_row, missing, ids)


def _ids_of(ids: Tensor | tuple[int | str, ...]) -> tuple[int | str, ...]:
    return tuple(ids.tolist()) if isinstance(ids, Tensor) else ids


def _values_of(kept: KeptStep, snapshot: StepSnapshot | None) -> list[object]:
    """Return the inputs of a graph; RuntimeError if one is gone or changed."""
    if snapshot is None:
        raise RuntimeError("a graph of it cannot be run again (it computes with other ranks, or is not known)")
    if snapshot.missing:
        raise RuntimeError(snapshot.missing)
    graph, inputs = snapshot.replay_graph, iter(snapshot.inputs)
    values = []
    for node in graph.graph.graph.find_nodes(op="placeholder"):
        known = graph.inputs.get(node.name)
        is_tangent = node.name in graph.tangents
        ref: VersionedRef = snapshot.tangents[node.name] if is_tangent else next(inputs)
        is_own = known is not None and known.role == "buffer" and node.name not in graph.updated  # of batch norm
        if not is_own and kept.is_changed(ref):
            name = "the gradient of an output" if known is None else f"{known.role} {known.name}"
            raise RuntimeError(f"{name} was changed in place since the step; give each micro-batch tensors of its own")
        values.append(ref.get())
    return values


_LATER = "{}; what is named rests on records"


def _of_records(records: Sequence[StepRecord], update: int, why: str, k: int) -> _Suspect:
    """Return the micro-batch with the largest figure among records: failed checks, norms of gradients."""
    backwards = [record for record in records if record.graphs]
    figures = [_figure(record.values()) for record in backwards]
    known = [figure for figure in figures if figure is not None]
    is_told = bool(known) and len(known) == len(figures)
    at = _largest(known) if is_told else (0 if len(backwards) == 1 else None)
    squares = _squares_of((backwards[at] if at is not None else records[-1]).values())
    found = Culprits(update, this_rank() or 0, at, layers=_layers(squares, k), note=_LATER.format(why))
    return _Suspect(found, None, known[at] if is_told and at is not None else None)


def _figure(values: Mapping[RecordKey, float]) -> float | None:
    """Return a backward's largest figure; inf after a failed check, else None."""
    own = {key: value for key, value in values.items() if not key.site.startswith("step:")}
    counts = [value for key, value in own.items() if key.record in ("nonfinite", "nan")]
    if any(value > 0 for value in counts):
        return math.inf
    squares = _squares_of(own)
    totals = [value for key, value in own.items() if key.record == "total_norm"]
    found = [math.sqrt(sum(squares.values()))] if squares else totals
    return max(map(_finite_or_inf, found)) if found else (0.0 if counts else None)


def _squares_of(values: Mapping[RecordKey, float]) -> dict[str, float]:
    """Return the squared norms of gradients by parameter, of the backward or else of the update.

    They are inf where elements are not finite.
    """
    for kind in ("gradient", "step"):
        squares: dict[str, float] = {}
        for key, value in values.items():
            own, _, name = key.site.partition(":")
            if own != kind or name.startswith("group:"):
                continue
            if key.record == "norm":
                squares[name] = max(squares.get(name, 0.0), _finite_or_inf(value) ** 2)
            elif key.record in ("nonfinite", "nan") and value > 0:
                squares[name] = math.inf
        if squares:
            return squares
    return {}


def _layers(squares: Mapping[str, float], k: int) -> tuple[CulpritLayer, ...]:
    """Return the modules of parameters with these squared norms, the largest first."""
    modules: dict[str, float] = defaultdict(float)
    for name, value in squares.items():
        modules[name.rpartition(".")[0]] += value
    shares = _shares(list(modules.values()))
    layers = [CulpritLayer(name, share) for name, share in zip(modules, shares, strict=True)]
    return tuple(sorted(layers, key=lambda layer: -layer.share)[:k])


def _shares(squares: Sequence[float]) -> list[float]:
    if not all(map(math.isfinite, squares)):
        return [0.0 if math.isfinite(square) else 1.0 for square in squares]
    total = math.fsum(squares)
    return [square / total if total else 0.0 for square in squares]


def _largest(figures: Sequence[float]) -> int:
    return max(range(len(figures)), key=lambda n: figures[n])


def _finite_or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf
