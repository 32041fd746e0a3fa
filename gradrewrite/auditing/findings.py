"""Findings of an audit: faults, remarks, a verdict on each parameter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gradrewrite._utils.formatting import plain_table
from gradrewrite._utils.html_tables import html_table, write_table_page
from gradrewrite.diagnostics.causes import Cause

Fate = Literal[
    "trained",
    "frozen",
    "not in the optimizer",
    "no gradient",
    "unused",
    "zero so far",
    "zero up to rounding",
    "compiled only",
    "eager only",
]
VERDICTS: Mapping[Fate, str] = {
    "trained": "it gets a gradient, and the optimizer, if one was given, holds it",
    "frozen": "requires_grad is False",
    "not in the optimizer": "it gets a gradient, and the optimizer does not hold it",
    "no gradient": "an op reads it, and every path from there to the loss ends",
    "unused": "the loss is computed without it",
    "zero so far": "its gradient was 0 in all steps that ran",
    "zero up to rounding": "its gradient is a rounding error",
    "compiled only": "it gets a gradient under torch.compile, and none in eager mode",
    "eager only": "it gets a gradient in eager mode, and none under torch.compile",
}
WITH_GRADIENT = ("trained", "zero so far", "zero up to rounding")
_USUAL = ("trained", "frozen")
_FAULTY = ("not in the optimizer", "no gradient", "compiled only", "eager only")
_MOST_ROWS = 40
_COLUMNS = ("parameter", "verdict", "stops at", "line", "trained by")


@dataclass(frozen=True, slots=True)
class AuditRow:
    """The verdict on one parameter.

    Attributes:
        name: Its name, as ``model.named_parameters()`` has it.
        verdict: A key of ``VERDICTS``, which says what it means.
        op: Where the gradient stops, as ``"detach"``; ``""`` where it does not.
        line: The user's line of that op, ``file:line "code"``.
        losses: Of several losses, or terms of a sum, those that train it, by op and line.
    """

    name: str
    verdict: Fate
    op: str = ""
    line: str = ""
    losses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Audit:
    """Faults and remarks of an audit; see ``audit``.

    Attributes:
        causes: The faults, the gravest first; empty if all is well.
        remarks: Notes that need no change.
        rows: One a parameter, in the order of ``model.named_parameters()``.
        model: Name of the model's class.
    """

    causes: tuple[Cause, ...]
    remarks: tuple[str, ...]
    rows: tuple[AuditRow, ...] = field(repr=False)
    model: str = ""

    @property
    def headline(self) -> str:
        """The number of trained parameters, in one sentence."""
        trained = sum(row.verdict in WITH_GRADIENT for row in self.rows)
        frozen = sum(row.verdict == "frozen" for row in self.rows)
        more = f", {frozen} {'is' if frozen == 1 else 'are'} frozen" if frozen else ""
        end = "; no fault was found" if not self.causes else ""
        return f"{trained} of {len(self.rows)} parameters are trained{more}{end}."

    def __str__(self) -> str:
        """Faults with lines and advice, untrained parameters, remarks."""
        parts = [self.headline]
        for cause in self.causes:
            at = [f"  {cause.source}"] if cause.source else []
            parts.append("\n".join([f"{cause.kind}: {cause.text}", *at, f"  {cause.advice}"]))
        rows = [row for row in self.rows if row.verdict not in _USUAL]
        if rows:
            parts.append(plain_table(*_table(rows[:_MOST_ROWS])))
            parts += [f"and {len(rows) - _MOST_ROWS} more"] * (len(rows) > _MOST_ROWS)
            parts.append(self._legend(rows))
        return "\n\n".join([*parts, "\n".join(f"remark: {text}" for text in self.remarks)]).rstrip()

    @staticmethod
    def _legend(rows: Sequence[AuditRow]) -> str:
        """Return the meaning of verdicts, one a line."""
        present = {row.verdict for row in rows}
        return "\n".join(f"{verdict}: {meaning}." for verdict, meaning in VERDICTS.items() if verdict in present)

    def to_json(self) -> dict[str, object]:
        """Return causes, remarks and rows as strict JSON."""
        rows = [
            {"name": r.name, "verdict": r.verdict, "op": r.op, "line": r.line, "losses": r.losses} for r in self.rows
        ]
        return {"causes": [cause.to_json() for cause in self.causes], "remarks": self.remarks, "rows": rows}

    def _repr_html_(self) -> str:
        rows = [row for row in self.rows if row.verdict not in _USUAL] if len(self.rows) > _MOST_ROWS else self.rows
        groups = ["first" if row.verdict in _FAULTY else "" for row in rows]
        faults = [(c.kind, c.text, c.source, c.advice) for c in self.causes]
        columns = "fault", "parameters and reason", "line", "what to change"
        first = html_table(columns, faults, self.headline) if faults else ""
        which = "All parameters" if len(rows) == len(self.rows) else "Parameters that are neither trained nor frozen"
        return first + html_table(*_table(rows), f"{which}." if faults else self.headline, groups)

    def render(self, path: str | os.PathLike[str]) -> str:
        """Write ``path.html``, a page that loads nothing.

        Args:
            path: Where; the extension is added where it is missing.

        Returns:
            The path of the file.

        Raises:
            OSError: The file cannot be written.
        """
        remarks = "\n".join(f"remark: {text}" for text in self.remarks)
        text = f"{remarks}\n\n{self._legend(self.rows)}".strip()
        title = f"Audit of a training step of {self.model}" if self.model else "Audit of a training step"
        return write_table_page(path, title, self._repr_html_(), text)


def _table(rows: Sequence[AuditRow]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns with content, and the cells of rows."""
    cells = [(row.name, row.verdict, row.op, row.line, ", ".join(row.losses)) for row in rows]
    kept = [n for n in range(len(_COLUMNS)) if any(row[n] for row in cells)]
    return tuple(_COLUMNS[n] for n in kept), [tuple(row[n] for n in kept) for row in cells]
