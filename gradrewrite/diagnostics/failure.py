"""Failures: the analysis of a step in which a finite check failed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradrewrite.distributed.groups import this_rank
from gradrewrite.errors import NonFiniteError, PrecedingSite
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class Failure:
    """The analysis of a failed step; its attributes are those of ``NonFiniteError``, which it makes."""

    site: Site
    step: int
    percent: float = math.nan
    op: str = ""
    source: str = ""
    others: tuple[Site, ...] = ()
    window: tuple[PrecedingSite, ...] = ()
    cause: str = ""
    note: str = ""

    def error(self, reason: str = "") -> NonFiniteError:
        """Return a new error; ``reason``, why it is raised if not for the failed check alone, begins its note."""
        return NonFiniteError(
            self.site,
            percent=self.percent,
            op=self.op,
            source=self.source,
            step=self.step,
            others=self.others,
            window=self.window,
            cause=self.cause,
            note="; ".join(part for part in (reason, self.note) if part),
            rank=this_rank(),
        )
