"""Root causes: from failed finite checks to the error that says where it began."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from gradrewrite.diagnostics.replay import Evidence, Root, Seen, replay
from gradrewrite.diagnostics.step_snapshot import Witness
from gradrewrite.errors import NonFiniteError, Window
from gradrewrite.ir.record_layout import Carried, Check, OnFailure
from gradrewrite.sites import Site

_WINDOW = 5
_DID_NOT_FAIL = (
    "a replay op by op did not fail: compiled code may round elsewhere, or something that the step read has changed"
)


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """One backward graph of a step: what it carried, the values of its records, and what a replay needs."""

    carried: Carried
    values: Mapping[str, float]
    witness: Witness | None

    def failed(self, modes: Collection[str]) -> list[Check]:
        """The checks of these kinds that failed, in the order of execution."""
        return [c for c in self.carried.checks if c.on_failure in modes and self.values[c.address] > 0]


def find_failure(
    step: int, runs: Sequence[CheckedRun], modes: Collection[str], *, replays: bool
) -> NonFiniteError | None:
    """The error for a step; None if no check of these kinds failed.

    Args:
        step: Number of the backward.
        runs: Its graphs, in the order in which their backwards ran.
        modes: Which checks count.
        replays: Whether to replay the step op by op, or to say what the checks alone say.
    """
    if not any(run.failed(modes) for run in runs):
        return None
    if not replays:
        return _from_checks(step, runs, modes, "")
    try:
        evidence = [_replay(run, {c.node: c.site for c in run.failed(modes)}) for run in runs]
        return _from_evidence(step, runs, modes, evidence)
    except Exception as err:  # whatever stops a replay, the failed check has to be reported
        reason = (str(err).strip().splitlines() or [type(err).__name__])[0]
        return _from_checks(step, runs, modes, f"the step could not be replayed: {reason}")


def find_anywhere(step: int, runs: Sequence[CheckedRun]) -> NonFiniteError | None:
    """The error that a check at all that leaves the graphs would give; None if all of it is finite.

    Raises:
        RuntimeError: The step cannot be replayed.
    """
    evidence = [_replay(run, {}) for run in runs]
    return _from_evidence(step, runs, get_args(OnFailure), evidence) if any(e.roots for e in evidence) else None


def _replay(run: CheckedRun, failed: Mapping[str, Site]) -> Evidence:
    if run.witness is None and run.carried.checks:
        raise RuntimeError("its inputs have been let go, or were never known")
    if run.witness is None:
        return Evidence()
    if run.witness.missing:
        raise RuntimeError(run.witness.missing)
    return replay(run.witness, failed)


def _from_checks(step: int, runs: Sequence[CheckedRun], modes: Collection[str], note: str) -> NonFiniteError:
    """Only what the checks say: the first that failed."""
    forward = [(run, c) for run in reversed(runs) for c in run.failed(modes) if c.site.kind == "activation"]
    backward = [(run, c) for run in runs for c in run.failed(modes) if c.site.kind != "activation"]
    if not forward and not backward:  # only find_anywhere asks without a failed check
        raise RuntimeError(note or "the op at fault leads to no site")
    (run, check), *rest = forward + backward
    size = math.prod(math.nan if s is None else s for s in check.site.shape)
    is_activation = check.site.kind == "activation"
    return NonFiniteError(
        check.site,
        percent=100.0 * run.values[check.address] / size,
        op=_name(check.site) if is_activation else "",
        source=check.site.source if is_activation else "",
        step=step,
        others=[c.site for _, c in rest],
        note=note,
    )


def _from_evidence(
    step: int, runs: Sequence[CheckedRun], modes: Collection[str], evidence: Sequence[Evidence]
) -> NonFiniteError:
    last = len(runs) - 1

    def place(number: int, item: Root | Seen) -> tuple[bool, int, int]:
        return (not item.is_forward, last - number if item.is_forward else number, item.order)

    roots = sorted(((place(n, r), n, r) for n, e in enumerate(evidence) for r in e.roots), key=lambda entry: entry[0])
    roots = [entry for entry in roots if _counts(entry[2], entry[1], last)] or roots
    if roots:
        overwritten = roots[0][2].overwritten or _changed_unseen(roots[0][2], runs[roots[0][1]])
    else:
        overwritten = next((e.overwritten for e in evidence if e.overwritten), "")
    if overwritten:
        note = f"the step could not be replayed: {overwritten} was overwritten since the forward"
        return _from_checks(step, runs, modes, note)
    if not roots:
        return _from_checks(step, runs, modes, _DID_NOT_FAIL)
    _, number, root = roots[0]
    seen = sorted(((place(n, s), n, s) for n, e in enumerate(evidence) for s in e.seen), key=lambda entry: entry[0])
    bad = [(n, s) for _, n, s in seen if s.percent > 0]
    first = next(((n, s) for n, s in bad if n == number and s.node in root.reached), None)
    if first is None:  # what failed is no site of its own, or other actions have hidden it since
        error = _from_checks(step, runs, modes, "")
        error.op, error.source, error.cause = root.op, root.source, root.came_in
        return error
    before = [s for _, n, s in seen if place(n, s) < place(*first)]
    stale = next((e.overwritten for e in evidence if e.overwritten), "")
    return NonFiniteError(
        first[1].site,
        percent=first[1].percent,
        op=root.op,
        source=root.source,
        step=step,
        others=[s.site for n, s in bad if s is not first[1]],
        window=[Window(s.site, s.smallest, s.largest) for s in before[-_WINDOW:]],
        cause=root.came_in,
        note=f"{stale} was overwritten since the forward: figures that rest on it are those of now" if stale else "",
    )


def _counts(root: Root, number: int, last: int) -> bool:
    """Whether a root can be the first: what comes from another graph of the step was made there."""
    if not root.came_in or (root.given is not None and root.given.role == "parameter"):
        return True
    return number == last if root.is_forward else number == 0


def _changed_unseen(root: Root, run: CheckedRun) -> str:
    """An input that was finite when the step ran and is not now, though its version says nothing (numpy)."""
    if root.given is None or root.given.role != "input":
        return ""
    was_finite = run.values.get(f"nonfinite@data:{root.given.name}") == 0
    return f"input {root.given.name}" if was_finite else ""


def _name(site: Site) -> str:
    return f"{site.module}/{site.op}"
