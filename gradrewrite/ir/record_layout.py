"""The layout of the auxiliary outputs of a rewritten backward: records, checks, log lines, kept tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import Clip, OnFailure
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class ClipRecords:
    """The records of one clip.

    Attributes:
        kind: Kind of its site; of a group what stands before the name (``group``, ``step:group``).
        name: Name of its site, or of its group.
        call: Call of its site.
        action: The action as text.
        rule: Pattern of the rule that answered with it; of another callback its name.
        report: The keys of its report.
        factor: Key of its factor, which the host computes.
    """

    kind: str
    name: str
    call: int
    action: str
    rule: str
    report: Clip[RecordKey]
    factor: RecordKey

    @property
    def site(self) -> str:
        """The site of its records."""
        return self.factor.site

    def on_host(self, known: Mapping[RecordKey, float]) -> Clip[float]:
        """Return the figures of the clip at one step; KeyError if one is not known."""
        return self.report.map(lambda _, key: known[key])


@dataclass(frozen=True, slots=True)
class FiniteCheck:
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
        groups: Names of groups that are clipped together, or whose noise is drawn together.
        noisy: Those with noise.
        checks: The finite checks, in the order of execution.
        clips: The clips of which a factor is known.
        logs: Whether one of them logs.
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
    groups: tuple[str, ...] = ()
    checks: tuple[FiniteCheck, ...] = ()
    clips: tuple[ClipRecords, ...] = ()
    bounds: tuple[tuple[RecordKey, float | Tensor], ...] = ()
    states: tuple[tuple[str, Tensor], ...] = ()
    counts: frozenset[RecordKey] = frozenset()
    noisy: frozenset[str] = frozenset()
    logs: bool = field(init=False, repr=False, compare=False)
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

    @property
    def kept_keys(self) -> list[tuple[str, Site]]:
        """The kinds and sites of the kept tensors."""
        return list(zip(self.kept_as, self.kept, strict=True))
