"""The layout of what a rewritten backward returns beside the gradients: records, checks, log lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradrewrite.sites import Site

OnFailure = Literal["raise", "skip", "warn", "record"]


@dataclass(frozen=True, slots=True)
class LogLine:
    """The records of one log line of a clip: three addresses ``record@site``."""

    site: Site
    max_abs: str
    mean_abs: str
    clipped: str


@dataclass(frozen=True, slots=True)
class Check:
    """One finite check.

    Attributes:
        site: Where it stands.
        on_failure: What follows a failure.
        address: Address of its count.
        order: Place in the order of execution: forward first, then backward.
        node: Name of the fx node that it looks at.
    """

    site: Site
    on_failure: OnFailure
    address: str
    order: int
    node: str


@dataclass(frozen=True, slots=True)
class Carried:
    """What leaves a rewritten backward beside the gradients, in the order of the extra outputs.

    Attributes:
        packs: Addresses ``record@site`` in each packed tensor; counts of checks that skip come first.
        num_skips: How many counts of checks that skip each packed tensor begins with.
        kept: Sites whose tensors are kept.
        logs: The lines of clips that log.
        groups: Names of groups that are clipped together.
        checks: The finite checks, in the order of execution.
        bounds: Bounds of clips that are numbers, by address: ``bound@site`` by norm, ``limit@site`` by value.
        counts: Addresses of counts of elements, which add up over several runs in one backward.
    """

    packs: tuple[tuple[str, ...], ...] = ()
    num_skips: tuple[int, ...] = ()
    kept: tuple[Site, ...] = ()
    logs: tuple[LogLine, ...] = ()
    groups: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    bounds: tuple[tuple[str, float], ...] = ()
    counts: frozenset[str] = frozenset()


BOUNDS = frozenset(("bound", "limit"))
