"""Failures: analyses of steps with a failed finite check."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradrewrite.distributed.groups import this_rank
from gradrewrite.errors import NonFiniteError, PrecedingSite
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class Failure:
    """The analysis of a failed step, with the attributes of ``NonFiniteError``."""

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
        """Return a new error; ``reason`` begins its note: why it is raised, if not for the failed check alone."""
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
