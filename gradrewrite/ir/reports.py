"""Reports of actions: one closed union, from the traced action to the host.

The leaves of a report are of a type of their own at each stage: a ``Leaf`` in a traced action, a ``RecordKey`` in the
layout of the auxiliary outputs, a float on the host. ``map`` takes a report from one stage to the next.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar, cast

from torch import Tensor

from gradrewrite.sites import TRAITS, Kind

T = TypeVar("T")
S = TypeVar("S")

OnFailure = Literal["raise", "skip", "warn", "record"]

# Records of the bounds of clips, by norm and by value; a bound has the occurrence of what it bounds.
BOUNDS = frozenset(("bound", "limit"))

SHARE_OF_MEMBER = "norm_share"  # the only record of a group that is at the sites of its members


def acting_bound(number: float) -> float:
    """Return ``max(bound, 0)``, the bound of a clip; NaN bounds nothing and stays NaN."""
    return max(number, 0.0)


@dataclass(frozen=True, slots=True)
class Output:
    """A figure among the outputs of a traced action."""

    number: int  # position of the output, behind the replacements
    element: int = 0  # position in the output, which is flat


@dataclass(frozen=True, slots=True)
class HostBound:
    """A bound that the host has, and that is no output."""

    value: float | Tensor  # a number, or a tensor in host memory; it acts as ``max(bound, 0)``


Leaf: TypeAlias = Output | HostBound


@dataclass(frozen=True, slots=True)
class Scalars(Generic[T]):
    """Figures that mean nothing beyond their names."""

    names: tuple[str, ...]  # as they were given
    values: tuple[T, ...]
    is_vector: bool = False  # whether they are the elements of one

    def map(self, f: Callable[[str, T], S]) -> Scalars[S]:
        """Return the report with other leaves, made from names and leaves."""
        return Scalars(self.names, tuple(map(f, self.names, self.values)), self.is_vector)


@dataclass(frozen=True, slots=True)
class LogFigures(Generic[T]):
    """The figures of the log line of a clip."""

    max_abs: T  # before the clip
    mean_abs: T  # before the clip
    clipped: T  # 1 if an element changed, else 0

    def map(self, f: Callable[[str, T], S]) -> LogFigures[S]:
        """See ``Scalars.map``."""
        return LogFigures(f("max_abs", self.max_abs), f("mean_abs", self.mean_abs), f("clipped", self.clipped))

    def line(self: LogFigures[float], kind: str, name: str) -> str | None:
        """Return the log line of a clip at a site of this kind and name; None if the clip did not act."""
        if not self.clipped > 0:
            return None
        traits = TRAITS.get(cast(Kind, kind), TRAITS["error"])  # a group is none
        owner, what = "parameter" if traits.of_parameter else "layer", traits.noun
        return f"{owner}={name} need clipping, max {what}={self.max_abs:.6g} avg {what}={self.mean_abs:.6g}"


@dataclass(frozen=True, slots=True)
class NormClip(Generic[T]):
    """A clip by the norm of a tensor or of a group."""

    name: str  # of the record of the norm
    norm: T  # before the clip
    bound: T
    is_wide: bool  # it compares and divides in float64, not float32
    log: LogFigures[T] | None = None  # if it logs at a single site
    shares: tuple[T, ...] | None = None  # of each member of a group in the norm, if it logs for a group

    def map(self, f: Callable[[str, T], S]) -> NormClip[S]:
        """See ``Scalars.map``; the bound follows the norm."""
        norm, bound = f(self.name, self.norm), f("bound", self.bound)
        log = None if self.log is None else self.log.map(f)
        shares = None if self.shares is None else tuple(f(SHARE_OF_MEMBER, share) for share in self.shares)
        return NormClip(self.name, norm, bound, self.is_wide, log, shares)

    @property
    def logs(self) -> bool:
        """Whether it has a log line."""
        return self.log is not None or self.shares is not None

    def factor(self: NormClip[float]) -> float:
        """Return bound / norm, in float64, if the clip acts; else 1, also for a norm of 0, inf or NaN."""
        bound = self.bound if self.is_wide else ctypes.c_float(self.bound).value
        return bound / self.norm if bound < self.norm < math.inf and self.norm != 0 else 1.0

    def line(self: NormClip[float], kind: str, name: str) -> str | None:
        """Return the log line, if it logs and acted at a site of this kind and name, or a group of this name."""
        if self.shares is None:
            return None if self.log is None else self.log.line(kind, name)
        if self.factor() == 1.0:
            return None
        return f"group={name} need clipping, total norm={self.norm:.6g} max norm={self.bound:.6g}"


@dataclass(frozen=True, slots=True)
class ValueClip(Generic[T]):
    """A clip by value that logs."""

    before: T  # the L2 norm; no record of a step
    after: T  # the L2 norm; no record of a step
    share: T  # of the elements that changed
    log: LogFigures[T]
    limit: T | None = None  # the largest absolute value that it lets pass; None where the bounds differ in size

    def map(self, f: Callable[[str, T], S]) -> ValueClip[S]:
        """See ``Scalars.map``; the limit follows ``clipped``."""
        before, after, share = f("norm_before", self.before), f("norm_after", self.after), f("share", self.share)
        log = self.log.map(f)
        return ValueClip(before, after, share, log, None if self.limit is None else f("limit", self.limit))

    @property
    def logs(self) -> bool:
        """Whether it has a log line."""
        return True

    def factor(self: ValueClip[float]) -> float:
        """Return after / before if an element changed and the norm was not 0; else 1.

        By IEEE rules: 0 where infinities were bounded, NaN where an element is NaN or remains infinite.
        """
        return self.after / self.before if self.log.clipped > 0 and self.before != 0 else 1.0

    def line(self: ValueClip[float], kind: str, name: str) -> str | None:
        """Return the log line of the clip, if it acted; see ``NormClip.line``."""
        return self.log.line(kind, name)


@dataclass(frozen=True, slots=True)
class Check(Generic[T]):
    """A finite check."""

    name: str  # of the record of its count
    count: T  # the elements that fail it
    on_failure: OnFailure

    def map(self, f: Callable[[str, T], S]) -> Check[S]:
        """See ``Scalars.map``."""
        return Check(self.name, f(self.name, self.count), self.on_failure)


KEPT = ("tensor", "example_norms", "second_moment")  # ``Keep.what``


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that is kept."""

    what: str  # one of ``KEPT``, or the name that ``gr.keep`` was given
    number: int  # position of its output
    loss: str = ""  # the name of the loss that it is the gradient of; "" for that of all


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """The new value of a state."""

    key: str
    state: Tensor  # written after the graph
    number: int  # position of the output with the new value
    is_carried: bool = False  # other actions may set it, at other calls


Clip: TypeAlias = NormClip[T] | ValueClip[T]
Figures: TypeAlias = Scalars[T] | NormClip[T] | ValueClip[T] | Check[T]
Report: TypeAlias = Figures[T] | Kept | StateUpdate


def leaves(report: Figures[T]) -> list[T]:
    """Return the leaves of a report, in the order of ``map``."""
    found: list[T] = []
    report.map(lambda _, leaf: found.append(leaf))
    return found
