"""Culprits: the rank, micro-batch, rows and layers behind a skipped update."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from gradrewrite._compat import data_parallel
from gradrewrite.diagnostics.skipped_updates import spike_reason
from gradrewrite.distributed.groups import this_rank
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.monitoring.kept_step import KeptStep
from gradrewrite.monitoring.step_record import StepRecord
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.replay.interpreter import run_again
from gradrewrite.replay.step_snapshot import StepSnapshot, VersionedRef
from gradrewrite.rewriting.example_norms import example_norms_of


class CulpritRow(NamedTuple):
    """One row of a batch.

    Attributes:
        index: Its number in the micro-batch, from 0.
        id: Its name of ``monitor.log_ids``; None without one.
        norm: L2 norm of what it adds to the gradient of the micro-batch, over all parameters.
        share: Its square over the sum of squares of all rows of the micro-batch, in [0, 1]; 1 if it is not finite, and
            0 for finite rows beside such.
    """

    index: int  # type: ignore[assignment]  # not ``tuple.index``, which nobody needs here
    id: int | str | None
    norm: float
    share: float


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
        note: Why rows, or more, are not known; ``""`` if all is.
    """

    step: int
    rank: int | None
    micro_batch: int | None
    rows: tuple[CulpritRow, ...] = ()
    layers: tuple[CulpritLayer, ...] = ()
    reason: str = ""
    note: str = ""

    def __str__(self) -> str:
        where = ", ".join(
            f"{name} {'not known' if number is None else number + first}"
            for name, number, first in (("rank", self.rank, 0), ("micro-batch", self.micro_batch, 1))
        )
        lines = [f"update {self.step} was skipped{f' ({self.reason})' if self.reason else ''}: {where}"]
        for row in self.rows:
            name = "" if row.id is None else f" (id {row.id!r})"
            lines.append(f"  row {row.index}{name}: gradient norm {row.norm:.4g}, {100 * row.share:.3g} %")
        lines += [f"  layer {layer.name or '(model)'}: {100 * layer.share:.3g} %" for layer in self.layers]
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


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
    return norms[at].suspect(update, at, k)


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

    def suspect(self, update: int, micro_batch: int, k: int) -> _Suspect:
        found = Culprits(update, this_rank() or 0, micro_batch, note=self.missing)
        if not self.rows:
            return _Suspect(replace(found, layers=_layers(self.gradients, k)), None, self.gradient())
        squares = self.by_row().tolist()
        order = sorted(range(len(squares)), key=lambda n: -_finite_or_inf(squares[n]))[:k]
        shares = _shares(squares)
        ids: Sequence[int | str | None] = [None] * len(squares) if self.ids is None else self.ids
        if len(ids) != len(squares):
            note = f"monitor.log_ids was given {len(ids)} of them, and there are {len(squares)} rows"
            found, ids = replace(found, note=f"ids are not known: {note}"), [None] * len(squares)
        rows = tuple(CulpritRow(n, ids[n], math.sqrt(squares[n]), shares[n]) for n in order)
        layers = _layers({name: float(own[order].sum()) for name, own in self.rows.items()}, k)
        return _Suspect(replace(found, rows=rows, layers=layers), self.largest_row(), self.gradient())


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
    ids = next((_ids_of(s.ids) for s in snapshots if s is not None and s.ids is not None), None)
    note = f"rows are not known: {missing}" if missing else ""
    return _Norms(squares, None if missing else by_row, note, ids)


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
