"""Non-finite values that a replay has explained, as causes."""

from __future__ import annotations

from typing import Any

from gradrewrite.diagnostics.causes import KINDS, Cause
from gradrewrite.errors import NonFiniteError, Operand

_TRIED = " Tried in a replay of that step: all its values are finite then."
_LOOK_BEFORE = "Look at what that value is computed from."

_ASK_EARLIER = (
    "Ask monitor.failure(anywhere=True), or monitor.diagnose(), right after such a backward, before its update."
)


def cause_of(failure: NonFiniteError) -> Cause:
    """Return a failure as a cause."""
    story = failure.story
    text = failure.told if story.why else failure.with_window
    return Cause(
        "non-finite op",
        str(failure.site),
        failure.source,
        step=failure.step,
        text=f"{text if failure.op or failure.cause or not failure.note else f'{text}; {failure.note}'}.",
        advice=f"{story.advice or _advice_without_reason(failure)}{_TRIED * story.is_tried}",
        operands=story.operands,
        indices=story.indices,
        parameter=story.parameter,
        cover=story.cover,
        roots=story.roots,
        is_explained=bool(story.why) and not story.is_overflow,
    )


def cause_of_json(data: Any) -> Cause:
    """Return a cause that ``to_json`` of a failure made; ValueError otherwise."""
    try:
        return Cause(
            data["kind"],
            data["site"],
            data["source"],
            step=data["step"],
            text=data["text"],
            advice=data["suggestion"],
            operands=tuple(map(_operand_of_json, data.get("operands", ()))),
            indices=data.get("indices", ""),
            parameter=data.get("parameter", ""),
            cover=tuple(data.get("cover", ())),
            roots=tuple(data.get("roots", ())),
            is_explained=bool(data.get("is_explained", False)),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise ValueError(f"wanted a failure, got {data!r:.60} ({type(err).__name__}: {err})") from err


def _operand_of_json(data: Any) -> Operand:
    low, high = (float(data[name]) for name in ("low", "high"))
    return Operand(**{**data, "shape": tuple(data["shape"]), "low": low, "high": high})


def _advice_without_reason(failure: NonFiniteError) -> str:
    if failure.source:
        return KINDS["non-finite op"].advice
    if "could not be replayed" in failure.note:
        return _ASK_EARLIER
    return _LOOK_BEFORE if failure.cause else f"Look at the values that {failure.op or failure.site} reads."
