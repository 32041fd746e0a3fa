"""The layout of the auxiliary outputs of a rewritten backward: records, checks, log lines, kept tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import Clip, OnFailure
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class ClipRecords:
    """The records of one clip."""

    kind: str  # of its site; of a group what stands before the name (``group``, ``step:group``)
    name: str  # of its site, or of its group
    call: int  # of its site
    action: str  # as text
    rule: str  # pattern of the rule that answered with it; of another callback its name
    report: Clip[RecordKey]  # the keys
    factor: RecordKey  # the host computes it

    @property
    def site(self) -> str:
        """The site of its records."""
        return self.factor.site

    def on_host(self, known: Mapping[RecordKey, float]) -> Clip[float]:
        """Return the figures of the clip at one step; KeyError if one is not known."""
        return self.report.map(lambda _, key: known[key])


@dataclass(frozen=True, slots=True)
class SiteOp:
    """The op of an activation and of its error, in the forward."""

    name: str  # of the site, with ``#call``, without a kind
    op: str  # ``module/op``
    source: str  # ``file:line "code"``; ``""`` where there is none

    @classmethod
    def of(cls, site: Site) -> SiteOp:
        """Return the op of a site."""
        return cls(str(site).partition(":")[2], f"{site.module}/{site.op}", site.source)


@dataclass(frozen=True, slots=True)
class FiniteCheck:
    """One finite check."""

    site: Site
    on_failure: OnFailure
    key: RecordKey  # of the record of its count
    order: int  # in the order of execution: forward first, then backward
    node: str  # name of the fx node that it looks at


@dataclass(frozen=True, slots=True)
class MeasuredTensor:
    """The tensor behind a record, for the figure of a whole."""

    statistic: str  # a key of ``statistics.STATISTICS``
    size: int | None  # number of elements; None where it is symbolic
    replicas: int  # how many ranks have the same tensor: that of a DTensor is the whole one
    number: int = 0  # equal for the records of one measurement


@dataclass(frozen=True, slots=True)
class BackwardOutputs:
    """The auxiliary outputs of a rewritten backward graph, in their order."""

    packs: tuple[tuple[RecordKey, ...], ...] = ()  # keys of the records in each packed tensor
    keys: tuple[RecordKey, ...] = ()  # those of a step, factors of clips included, in the order of the sites
    num_skips: tuple[int, ...] = ()  # how many counts of checks that skip each packed tensor begins with
    # Whether each packed tensor has one element more, behind the records: 1 if one of these counts is not 0, else 0.
    # Elsewhere the counts are looked at where somebody wants to know.
    verdicts: tuple[bool, ...] = ()
    kept: tuple[Site, ...] = ()  # sites of kept tensors
    kept_as: tuple[str, ...] = ()  # what each of these tensors is (``Keep.what``)
    groups: tuple[str, ...] = ()  # that are clipped together, or whose noise is drawn together
    checks: tuple[FiniteCheck, ...] = ()  # in the order of execution
    clips: tuple[ClipRecords, ...] = ()  # of which a factor is known
    # Bounds of clips that the host has (numbers, tensors in host memory): ``bound@site`` by norm, ``limit@site`` by
    # value, which counts by its size.
    bounds: tuple[tuple[RecordKey, float | Tensor], ...] = ()
    # What actions remember, by key, in the order of the new values, which are the last outputs.
    states: tuple[tuple[str, Tensor], ...] = ()
    counts: frozenset[RecordKey] = frozenset()  # of elements; they add up over several graphs of one backward
    noisy: frozenset[str] = frozenset()  # groups with noise
    # Keys of measurements, by the number of steps from one to the next.
    sampled: tuple[tuple[int, frozenset[RecordKey]], ...] = ()
    kept_every: tuple[int, ...] = ()  # the same numbers, of the kept tensors
    ops: tuple[SiteOp, ...] = ()  # of the recorded activations and errors
    measured: Mapping[RecordKey, MeasuredTensor] = field(default_factory=dict)  # statistics among the records
    logs: bool = field(init=False, repr=False, compare=False)
    # For each consequence of a failed check, the positions of the counts in each packed tensor.
    checked: Mapping[OnFailure, tuple[tuple[int, ...], ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Find the counts of checks and the clips that log: they are read after every step."""
        modes: dict[OnFailure, set[RecordKey]] = {}
        for check in self.checks:
            modes.setdefault(check.on_failure, set()).add(check.key)
        checked = {
            mode: tuple(tuple(n for n, key in enumerate(pack) if key in keys) for pack in self.packs)
            for mode, keys in modes.items()
        }
        object.__setattr__(self, "checked", checked)
        object.__setattr__(self, "logs", any(clip.report.logs for clip in self.clips))

    def undue(self, is_due: Callable[[int], bool]) -> frozenset[RecordKey]:
        """Return the keys of measurements with intervals not due."""
        return frozenset[RecordKey]().union(*(keys for every, keys in self.sampled if not is_due(every)))

    def kept_keys(self, is_due: Callable[[int], bool]) -> list[tuple[str, Site] | None]:
        """Return kinds and sites of kept tensors; None if not due."""
        found = zip(self.kept_as, self.kept, self.kept_every, strict=True)
        return [(what, site) if is_due(every) else None for what, site, every in found]
