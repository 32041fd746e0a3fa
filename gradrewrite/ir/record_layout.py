"""The layout of the auxiliary outputs of a rewritten backward: records, checks, log lines, kept tensors."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from gradrewrite.ir.record_key import RecordKey
from gradrewrite.sites import Site

OnFailure = Literal["raise", "skip", "warn", "record"]

# Records of the bounds of clips, by norm and by value; a bound has the occurrence of what it bounds.
BOUNDS = frozenset(("bound", "limit"))


def acting_bound(number: float) -> float:
    """Return the effective bound of a clip, ``max(bound, 0)``; NaN is kept."""
    return max(number, 0.0)


@dataclass(frozen=True, slots=True)
class LogLine:
    """The records of one log line of a clip.

    Attributes:
        site: Site of the clip.
        max_abs: Largest absolute value before the clip.
        mean_abs: Mean absolute value before the clip.
        clipped: 1 if the clip acted, else 0.
    """

    site: Site
    max_abs: RecordKey
    mean_abs: RecordKey
    clipped: RecordKey


@dataclass(frozen=True, slots=True)
class NormClip:
    """The records of one clip by norm.

    Attributes:
        norm: The norm before the clip.
        bound: Its bound.
        factor: What the clip multiplies by, which follows from both.
        is_wide: Whether the clip compares and divides in float64, not float32.
    """

    norm: RecordKey
    bound: RecordKey
    factor: RecordKey
    is_wide: bool

    def strength(self, known: Mapping[RecordKey, float]) -> float:
        """Return the factor of the clip, bound / norm, in float64.

        It is 1 where the clip does not act, also for a norm of 0, inf or NaN.
        """
        norm, bound = known[self.norm], known[self.bound]
        bound = bound if self.is_wide else ctypes.c_float(bound).value
        return bound / norm if bound < norm < math.inf and norm != 0 else 1.0


@dataclass(frozen=True, slots=True)
class ValueClip:
    """The records of one clip by value that logs.

    Attributes:
        before: The L2 norm before the clip; no record of a step.
        after: The L2 norm after it; no record of a step.
        clipped: 1 if an element changed, else 0.
        factor: The ratio of the norms after and before.
    """

    before: RecordKey
    after: RecordKey
    clipped: RecordKey
    factor: RecordKey

    def strength(self, known: Mapping[RecordKey, float]) -> float:
        """Return the ratio of the norms after and before the clip.

        It is 1 where no element changed, and for a norm of 0. By IEEE rules: 0 where infinities were bounded, NaN where
        an element is NaN or remains infinite.
        """
        before, after = known[self.before], known[self.after]
        return after / before if known[self.clipped] > 0 and before != 0 else 1.0


@dataclass(frozen=True, slots=True)
class Check:
    """One finite check.

    Attributes:
        site: The site.
        on_failure: What follows a failure.
        key: Key of the record of its count.
        order: Position in the order of execution: forward first, then backward.
        node: Name of the fx node that it looks at.
    """

    site: Site
    on_failure: OnFailure
    key: RecordKey
    order: int
    node: str


@dataclass(frozen=True, slots=True)
class BackwardOutputs:
    """The auxiliary outputs of a rewritten backward graph, in their order.

    Attributes:
        packs: Keys of the records in each packed tensor.
        keys: Those of a step, factors of clips included, in the order of the sites.
        num_skips: How many counts of checks that skip each packed tensor begins with.
        verdicts: Whether each packed tensor has one element more, behind the records: 1 if one of these counts is not
            0, else 0. Elsewhere the counts are looked at where somebody wants to know.
        kept: Sites whose tensors are kept.
        kept_as: What each of these tensors is (``Keep.what``).
        logs: The lines of clips that log.
        groups: Names of groups that are clipped together, or whose noise is drawn together.
        noisy: Those with noise.
        checks: The finite checks, in the order of execution.
        clips: The clips of which a factor is known.
        group_logs: Clips by norm of groups that log.
        bounds: Bounds of clips that the host has (numbers, tensors in host memory), by key: ``bound@site`` by norm,
            ``limit@site`` by value, which counts by its size.
        states: What actions remember, by key, in the order of the new values, which are the last outputs.
        counts: Keys of counts of elements, which add up over several graphs of one backward.
        checked: For each consequence of a failed check, the positions of the counts in each packed tensor.
    """

    packs: tuple[tuple[RecordKey, ...], ...] = ()
    keys: tuple[RecordKey, ...] = ()
    num_skips: tuple[int, ...] = ()
    verdicts: tuple[bool, ...] = ()
    kept: tuple[Site, ...] = ()
    kept_as: tuple[str, ...] = ()
    logs: tuple[LogLine, ...] = ()
    groups: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    clips: tuple[NormClip | ValueClip, ...] = ()
    group_logs: tuple[NormClip, ...] = ()
    bounds: tuple[tuple[RecordKey, float | Tensor], ...] = ()
    states: tuple[tuple[str, Tensor], ...] = ()
    counts: frozenset[RecordKey] = frozenset()
    noisy: frozenset[str] = frozenset()
    checked: Mapping[OnFailure, tuple[tuple[int, ...], ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the counts of the checks, for the look after every step."""
        modes: dict[OnFailure, set[RecordKey]] = {}
        for check in self.checks:
            modes.setdefault(check.on_failure, set()).add(check.key)
        checked = {
            mode: tuple(tuple(n for n, key in enumerate(pack) if key in keys) for pack in self.packs)
            for mode, keys in modes.items()
        }
        object.__setattr__(self, "checked", checked)

    @property
    def kept_keys(self) -> list[tuple[str, Site]]:
        """The kinds and sites of the kept tensors."""
        return list(zip(self.kept_as, self.kept, strict=True))
