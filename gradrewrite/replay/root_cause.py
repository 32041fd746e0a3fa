"""Root causes of failed finite checks: the site and the op."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from gradrewrite._compat import collectives
from gradrewrite._utils.grouping import grouped
from gradrewrite.distributed.groups import this_rank
from gradrewrite.errors import NonFiniteError, PrecedingSite, Story
from gradrewrite.ir.outputs import PlacedCheck
from gradrewrite.ir.record_key import RecordKey, without_label
from gradrewrite.ir.reports import OnFailure
from gradrewrite.replay.interpreter import replay
from gradrewrite.replay.observations import Order, Repair, SiteObservation
from gradrewrite.replay.roots import ReplayResult, RootCause
from gradrewrite.replay.step_snapshot import CheckedGraph, StepSnapshot
from gradrewrite.sites import Site

_WINDOW, _MOST_ROOTS = 5, 3
_ROUNDS = 4  # of repairs, each with what the last has uncovered
_ELSEWHERE = (
    "what this process computed is finite: it came from another process, with which gradients are averaged, and which "
    "names the op"
)
_DID_NOT_FAIL = (
    "a replay op by op did not fail: compiled code may round elsewhere, or something that the step read has changed"
)


def analyse_checks(step: int, graphs: Sequence[CheckedGraph], modes: Collection[str], note: str = "") -> NonFiniteError:
    """Return the error of the first failed check of these modes, in the order of execution.

    Graphs are in the order in which their backwards ran. RuntimeError if no such check failed.
    """
    forward = [(graph, c) for graph in reversed(graphs) for c in graph.failed(modes) if c.site.traits.in_forward]
    backward = [(graph, c) for graph in graphs for c in graph.failed(modes) if not c.site.traits.in_forward]
    if not forward and not backward:
        raise RuntimeError(note or "the op at fault leads to no site")
    (graph, check), *rest = forward + backward
    size = math.prod(math.nan if s is None else s for s in check.site.shape)
    is_activation = check.site.traits.in_forward
    return NonFiniteError(
        check.site,
        step=step,
        percent=100.0 * graph.values[check.report.count] / size,
        op=f"{check.site.module}/{check.site.op}" if is_activation else "",
        source=check.site.source if is_activation else "",
        others=[c.site for _, c in rest],
        note=note,
        rank=this_rank(),
    )


def analyse(step: int, graphs: Sequence[CheckedGraph], modes: Collection[str]) -> NonFiniteError:
    """Return the error of a step by a replay; by the checks alone, with a note why, if it cannot be replayed."""
    try:
        results = [_replay(graph, _nodes_of(graph.failed(modes))) for graph in graphs]
        return _from_replays(step, graphs, modes, results)
    except Exception as err:  # whatever stops a replay, the failed check has to be reported
        reason = (str(err).strip().splitlines() or [type(err).__name__])[0]
        return analyse_checks(step, graphs, modes, f"the step could not be replayed: {reason}")


def _nodes_of(checks: Sequence[PlacedCheck]) -> dict[str, list[Site]]:
    """Return the sites of checks by the nodes that they look at."""
    return grouped((check.seen.node, check.site) for check in checks if check.seen is not None)


def find_anywhere(step: int, graphs: Sequence[CheckedGraph]) -> NonFiniteError | None:
    """Return the error that checks at all outputs of the graphs would find; RuntimeError without a replay."""
    results = [_replay(graph, {}) for graph in graphs]
    return _from_replays(step, graphs, get_args(OnFailure), results) if any(r.roots for r in results) else None


def _replay(graph: CheckedGraph, failed: Mapping[str, Sequence[Site]]) -> ReplayResult:
    if graph.snapshot is None and graph.outputs.checks:
        raise RuntimeError("its inputs have been let go, or were never known")
    if graph.snapshot is None:
        return ReplayResult()
    if graph.snapshot.missing:
        raise RuntimeError(graph.snapshot.missing)
    return replay(graph.snapshot, failed)


def _from_replays(
    step: int, graphs: Sequence[CheckedGraph], modes: Collection[str], results: Sequence[ReplayResult]
) -> NonFiniteError:
    last = len(graphs) - 1

    def position(number: int, item: RootCause | SiteObservation) -> tuple[bool, int, Order]:
        return (not item.is_forward, last - number if item.is_forward else number, item.order)

    roots = sorted(((position(n, r), n, r) for n, e in enumerate(results) for r in e.roots), key=lambda entry: entry[0])
    roots = [entry for entry in roots if _counts(entry[2], entry[1], last)] or roots
    if roots:
        overwritten = roots[0][2].overwritten or _changed_unseen(roots[0][2], graphs[roots[0][1]])
    else:
        overwritten = next((e.overwritten for e in results if e.overwritten), "")
    if overwritten:
        note = f"the step could not be replayed: {overwritten} was overwritten since the forward"
        return analyse_checks(step, graphs, modes, note)
    if not roots:
        return analyse_checks(step, graphs, modes, _ELSEWHERE if any(map(_averages, graphs)) else _DID_NOT_FAIL)
    _, number, root = roots[0]
    story = _story(roots[0][2], [entry[2] for entry in roots[1:]], _mends(graphs, results))
    seen = sorted(((position(n, s), n, s) for n, e in enumerate(results) for s in e.seen), key=lambda entry: entry[0])
    bad = [(n, s) for _, n, s in seen if s.percent > 0]
    first_gradient = next((s.site.name for _, s in bad if s.site.kind == "gradient"), "")
    story = replace(story, parameter=story.parameter or first_gradient)
    behind = [(n, s) for n, s in bad if n == number and position(n, s) >= position(n, root)]
    first = next(((n, s) for n, s in behind if s.node in root.reached), None)
    if first is None:  # what failed is no site of its own, or other actions have hidden it since
        error = analyse_checks(step, graphs, modes)
        error.op, error.source, error.cause, error.is_inner = root.op, root.source, root.came_in, root.is_inner
        error.in_backward = root.in_backward or root.is_inner
        error.is_from_outside, error.story = root.is_from_outside, story
        return error
    before = [s for _, n, s in seen if position(n, s) < position(*first)]
    stale = next((e.overwritten for e in results if e.overwritten), "")
    return NonFiniteError(
        first[1].site,
        step=step,
        percent=first[1].percent,
        op=root.op,
        source=root.source,
        is_inner=root.is_inner,
        others=[s.site for n, s in bad if s is not first[1]],
        window=[PrecedingSite(s.site, s.smallest, s.largest) for s in before[-_WINDOW:]],
        cause=root.came_in,
        note=f"{stale} was overwritten since the forward: figures that rest on it are those of now" if stale else "",
        rank=this_rank(),
        in_backward=root.in_backward or root.is_inner,
        is_from_outside=root.is_from_outside,
        story=story,
    )


def _story(root: RootCause, others: Sequence[RootCause], later: Sequence[RootCause] | None) -> Story:
    """Return the story of the first root.

    ``later`` are the roots behind its repair; None where that does not mend the step.
    """
    keys = {(root.op, root.source, root.came_in)}
    others = [one for one in others if not (root.is_forward and (one.is_from_outside or one.is_again))]
    rest: dict[tuple[str, str, str], RootCause] = {}
    for one in others:
        if (key := (one.op, one.source, one.came_in)) not in keys:
            rest.setdefault(key, one)
    texts = tuple(map(_root_text, list(rest.values())[:_MOST_ROOTS]))
    known = {(one.op, one.source) for one in (root, *others)}
    told: dict[tuple[str, str], str] = {}
    for one in later or ():
        if (one.op, one.source) not in known:
            told.setdefault((one.op, one.source), f"{_root_text(one)}. {one.story.advice}")
    advice = " ".join((root.story.advice, *(f"With that alone it is not finite yet: {text}" for text in told.values())))
    return replace(root.story, roots=texts, advice=advice, is_tried=later is not None)


def _root_text(root: RootCause) -> str:
    made = root.came_in or f"{'the backward of ' * root.in_backward}{root.op}"
    return ", ".join(
        part for part in (made, root.source, str(replace(root.story, facts=(), parameter="", cover=()))) if part
    )


def _mends(graphs: Sequence[CheckedGraph], results: Sequence[ReplayResult]) -> list[RootCause] | None:
    """Follow the advice, at the ops or at their operands; return further roots, None if it fails."""
    if not any(root.repair and root.node not in _tangents(graph) for graph, e in _pairs(graphs, results) for root in e):
        return None
    ways = []
    for at_operands in (True, False):
        found = [_mended(graph.snapshot, roots, at_operands=at_operands) for graph, roots in _pairs(graphs, results)]
        if all(later is not None for later in found):
            ways.append([root for later in found for root in later or ()])
            if not ways[-1]:
                break
    return min(ways, key=len, default=None)


def _pairs(
    graphs: Sequence[CheckedGraph], results: Sequence[ReplayResult]
) -> Iterator[tuple[CheckedGraph, list[RootCause]]]:
    return ((graph, found.roots) for graph, found in zip(graphs, results, strict=True))


def _tangents(graph: CheckedGraph) -> Collection[str]:
    return () if graph.snapshot is None else graph.snapshot.replay_graph.tangents


def _mended(snapshot: StepSnapshot | None, roots: Sequence[RootCause], *, at_operands: bool) -> list[RootCause] | None:
    """Replay with repairs, also of further roots; return those, None if the step is not finite then."""
    known, later = list(roots), list[RootCause]()
    for _ in range(_ROUNDS):
        if snapshot is None or not known:
            return later
        try:
            found = _replayed(snapshot, known, at_operands=at_operands)
        except (RuntimeError, TypeError, ValueError):  # a change of arguments that another op does not take
            return None
        if not found:
            return later
        nodes = {root.node for root in known}
        new = [root for root in found if root.node not in nodes and root.repair is not None and not root.came_in]
        if len(new) < len(found):
            return None
        known, later = known + new, later + new
    return None


def _replayed(snapshot: StepSnapshot, roots: Sequence[RootCause], *, at_operands: bool) -> list[RootCause]:
    given = {root.node: root.repair for root in roots if root.repair and root.came_in}
    made = [root for root in roots if root.repair and not root.came_in]
    repairs = {} if at_operands else {root.node: root.repair for root in made if root.repair}
    mended = dict(given)
    for root in made if at_operands else ():
        mended |= {name: _of_one(root.repair, number) for name, number in root.operands.items() if root.repair}
    return replay(snapshot, {}, repairs, mended).roots


def _of_one(repair: Repair, number: int) -> Repair:
    """Return the change of one argument as a change of its value."""
    return lambda values: [repair([*[None] * number, *values])[number]]


def _counts(root: RootCause, number: int, last: int) -> bool:
    """Return whether a root can be the first: a value from another graph of the step was made there."""
    if not root.came_in or (root.given is not None and root.given.role == "parameter"):
        return True
    return number == last if root.is_forward else number == 0


def _changed_unseen(root: RootCause, graph: CheckedGraph) -> str:
    """Return an input that became non-finite without a new version (numpy)."""
    if root.given is None or root.given.role != "input":
        return ""
    site = f"data:{root.given.name}"
    counts = [value for key, value in graph.values.items() if key.record == "nonfinite" and _is_at(key, site)]
    return f"input {root.given.name}" if counts and counts[0] == 0 else ""


def _is_at(key: RecordKey, site: str) -> bool:
    """Whether a record is at a site, with or without the label of a model."""
    return site in (key.site, without_label(key.site)[0])


def _averages(graph: CheckedGraph) -> bool:
    """Whether a graph averages gradients over processes."""
    if graph.snapshot is None:
        return False
    return any(map(collectives.is_collective, graph.snapshot.replay_graph.graph.graph.nodes))
