"""Records of a training run, as the doctor reads them."""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

from gradrewrite._utils import formatting
from gradrewrite._utils.formatting import table_of
from gradrewrite.diagnostics.causes import Cause
from gradrewrite.ir.outputs import ClipRecords, SiteOp, Stack
from gradrewrite.ir.record_key import RecordKey, without_label, without_loss
from gradrewrite.sites import TRAITS, kinds_with

MIN_STEPS = 5  # fewer values show no trend
LISTED = 5  # sites named in one finding
SHOWN = 4  # records in the text of a step

COUNTS = ("nonfinite", "nan", "inf")
MAGNITUDES = ("norm", "max_abs", "mean_abs", "total_norm")  # the first is the fairest between layers of unlike size
# Kinds in the order of execution, with what is no site; as ``KindTraits.order``.
_ORDER: dict[str, int] = {"data": 0, "output": 2, "outside": 3, "group": 7}
_ORDER |= {kind: traits.order for kind, traits in TRAITS.items() if traits.order is not None}
_EXECUTION = sorted(_ORDER, key=_ORDER.__getitem__)
BACKWARD = frozenset(("outside", "group", *kinds_with(lambda traits: traits.has_units)))


@dataclass(frozen=True, slots=True)
class Origin:
    """Version, policy and configuration of the steps in a part of a run log.

    Attributes:
        version: Version of gradrewrite.
        policy: Its rules, each as text with the line that made it.
        config: What was given to ``monitor.to_jsonl(config=...)``.
    """

    version: str
    policy: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """The records of one backward.

    Attributes:
        step: Number of the backward, from 0.
        records: Values by the text of their keys, ``record@site``, in the order of the sites: activations and errors
            in the order of the forward, then gradients; magnitudes in units of the unscaled loss.
        clips: The records of each clip; ``()`` if there is none, or where that is not known.
        ops: The op and the source line of each recorded activation and error; ``()`` where that is not known.
        culprits: Who made its update skip, in words; ``""`` where nobody asked ``monitor.culprits()``.
        update: Number of the update of its model, from 0, skipped ones too; it goes on after ``gr.load_state_dict``.
            Where no optimizer has a guard, of the backward of its model.
        micro_batch: Number of the backward among those of its update, from 0.
        origin: Version, policy and configuration; None where it was read from a file that does not tell.
        stacks: Addresses of the records of each loop, by record and iteration; some may have no value.
        failure: The op behind its non-finite values; None where no check raised, and nobody asked.

    Raises:
        ValueError: A name has no ``@``.
    """

    step: int
    records: Mapping[str, float]
    clips: tuple[ClipRecords, ...] = ()
    ops: tuple[SiteOp, ...] = ()
    culprits: str = field(default="", compare=False)
    update: int = -1
    micro_batch: int = 0
    origin: Origin | None = field(default=None, compare=False)
    stacks: tuple[Stack, ...] = field(default=(), compare=False)
    failure: Cause | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.update < 0:
            object.__setattr__(self, "update", self.step)
        wrong = next((name for name in self.records if "@" not in name), None)
        if wrong is not None:
            raise ValueError(f"wanted record@site as the name of a record, got {wrong!r}")

    def __repr__(self) -> str:
        """All records, or their number if large."""
        many = len(self.records) > SHOWN
        return f"Step({self.step}, {f'{{{len(self.records)} records}}' if many else dict(self.records)})"


@dataclass(frozen=True, slots=True)
class Series:
    """One record over a run."""

    at: RecordKey
    # Name of the record: without its occurrence where there is a first one; a user may give any name, and ``norm.2`` is
    # then no second norm.
    record: str
    steps: list[int]  # numbers of the steps that have it
    values: list[float]  # its value in each of them

    @property
    def by_step(self) -> dict[int, float]:
        """Values by number of the step."""
        return dict(zip(self.steps, self.values, strict=True))


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """One run, by step and by record."""

    steps: Sequence[Step]  # its rows; their numbers rise
    series: Mapping[str, Series]  # its records by the text of their keys, in the order of their first appearance
    # Records of each clip of its steps; of clips with the same records the last one.
    clips: tuple[ClipRecords, ...] = ()
    # By the number of a step: of its update, among the micro-batches of that, and of these; empty where each step is an
    # update with its number.
    numbers: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    resumed: tuple[int, ...] = ()  # updates with which later parts begin
    num_before: int = 0  # runs that ended before it in the same steps

    @property
    def has_micro_batches(self) -> bool:
        """Whether an update has several backwards."""
        return any(count > 1 for _, _, count in self.numbers.values())

    @property
    def origin(self) -> Origin | None:
        """The origin of its last step; None if that is not known."""
        return self.steps[-1].origin if self.steps else None

    def place(self, step: int) -> str:
        """Return a step in words: ``step 33``, or ``update 33, micro-batch 3 of 4``."""
        update, micro_batch, count = self.numbers.get(step, (step, 0, 1))
        if not self.has_micro_batches:
            return f"step {update}"
        return f"update {update}, micro-batch {micro_batch + 1} of {count}"

    def position(self, step: float) -> float:
        """Return the place of a step on an axis of updates, micro-batches at equal distances between them."""
        if not self.numbers:
            return step
        last = self.steps[-1].step
        update, micro_batch, count = self.numbers.get(int(step), self.numbers[last])
        beyond = max(step - last, 0)  # of a longer run beside it
        return update + (micro_batch + beyond) / count

    def update(self, step: int) -> int:
        """Return the number of a step's update."""
        return self.numbers.get(step, (step, 0, 1))[0]

    def span(self, first: int, last: int) -> str:
        """Return steps in words: ``steps 3 to 9``, ``updates 3 to 9``."""
        what = "updates" if self.has_micro_batches else "steps"
        return f"{what} {self.update(first)} to {self.update(last)}"

    def place_of_update(self, step: int) -> str:
        """Return the update of a step in words: ``step 33``, ``update 33``."""
        return f"{'update' if self.has_micro_batches else 'step'} {self.update(step)}"

    @property
    def num_updates(self) -> int:
        """Number of its updates."""
        firsts = sum(micro_batch == 0 for _, micro_batch, _ in self.numbers.values())
        return firsts if self.numbers else len(self.steps)

    @property
    def length(self) -> str:
        """The number of its steps in words: ``300 steps``, ``75 updates (300 backwards)``."""
        number = len(self.steps)
        if not self.has_micro_batches:
            return f"{number} step{'s' * (number != 1)}"
        return f"{self.num_updates} update{'s' * (self.num_updates != 1)} ({number} backwards)"

    @property
    def resumed_text(self) -> list[str]:
        """The first updates of later parts, in words; empty without such."""
        return [f"resumed at {', '.join(map(str, self.resumed))}"] if self.resumed else []

    def select(self, records: Collection[str], kinds: Collection[str]) -> list[Series]:
        """Return the records of some names at sites of some kinds."""
        return [one for one in self.series.values() if one.record in records and one.at.kind in kinds]

    def __repr__(self) -> str:
        return f"Run({self._extent()})"

    def _repr_html_(self) -> str:
        return table_of([step.records for step in self.steps], self._extent())._repr_html_()

    def _extent(self) -> str:
        span = ""
        if self.steps:
            span = f", {self.update(self.steps[0].step)} to {self.update(self.steps[-1].step)}"
        return "; ".join((f"{self.length}{span}", *self.resumed_text, f"{len(self.series)} records"))


def last_run(steps: Sequence[Step]) -> Run:
    """Return the last run: the steps after the last falling step number, and those that they go on from."""
    last, resumed, num_before = _joined(steps)
    known = {address for step in last for address in step.records}
    series: dict[str, Series] = {}
    sets: list[tuple[ClipRecords, ...]] = []
    for step in last:
        if step.clips not in sets:
            sets.append(step.clips)
        for address, value in step.records.items():
            if address not in series:
                key = RecordKey.parse(address)
                is_numbered = str(RecordKey.of(key.record, key.site)) in known
                series[address] = Series(key, key.record if is_numbered else key.name, [], [])
            series[address].steps.append(step.step)
            series[address].values.append(value)
    clips = {clip.factor: clip for clip in chain.from_iterable(sets)}
    return Run(last, series, tuple(clips.values()), _numbers_of(last), resumed, num_before)


def _joined(steps: Sequence[Step]) -> tuple[Sequence[Step], tuple[int, ...], int]:
    """Return the steps of the last run, numbered throughout, updates of its resumes, and the number of runs before.

    A part goes on from the one before where its first update is a later one than the first update of that. What was
    computed a second time after the resume replaces the first.
    """
    begins = [n for n, (before, after) in enumerate(pairwise(steps), 1) if after.step <= before.step]
    run, resumed, num_before = [*steps[: begins[0]]] if begins else steps, list[int](), 0
    for begin, end in pairwise([*begins, len(steps)]):
        part = steps[begin:end]
        first = part[0]
        before = [step for step in run if step.update < first.update]
        if not before:
            run, resumed, num_before = part, [], num_before + 1
            continue
        shift = before[-1].step + 1 - first.step
        run = [*before, *(replace(step, step=step.step + shift) for step in part)]
        resumed = [update for update in resumed if update < first.update] + [first.update]
    return run, tuple(resumed), num_before


def _numbers_of(steps: Sequence[Step]) -> dict[int, tuple[int, int, int]]:
    """Return the numbers of steps in a run; see ``Run.numbers``."""
    if all(step.update == step.step for step in steps):
        return {}
    updates: list[list[Step]] = []
    for step in steps:
        last = updates[-1][-1] if updates else None
        if last is None or step.update != last.update or step.micro_batch <= last.micro_batch:
            updates.append([])  # a later one of the same number: the first was not made
        updates[-1].append(step)
    return {step.step: (step.update, step.micro_batch, len(own)) for own in updates for step in own}


def loss_series(run: Run) -> Series | None:
    """Return the loss: ``loss``, or ``max`` at ``activation:loss``."""
    return next((one for one in run.series.values() if one.record == "loss"), run.series.get("max@activation:loss"))


def kind_of(site: str) -> str:
    """Kind of a site: ``error`` of ``error:a``."""
    return site.partition(":")[0]


def is_group(site: str) -> bool:
    """Whether a site is a group: ``group:default``, ``step:group:default``."""
    return site.removeprefix("step:").startswith("group:")


def as_executed(sites: Iterable[str]) -> list[str]:
    """Return sites of known kinds in the order of execution."""
    forward = list(dict.fromkeys(sites))
    ordered: list[str] = []
    for kind in _EXECUTION:
        part = [site for site in forward if kind_of(site) == kind]
        ordered += reversed(part) if kind in ("error", "backward") else part
    return ordered


def rule_of(site: str, action: str, bound: float, further: str = "") -> str:
    """Return the code of a clip at one site, of its model."""
    name = glob.escape(without_loss(without_label(site)[0]))
    literal = f'"{name}"' if repr(name) == f"'{name}'" and '"' not in name else repr(name)
    return f"gr.on({literal}, {action}({float(f'{bound:.2g}'):g}{further}))"


def listed(sites: Sequence[str]) -> str:
    """The first sites, and the number of others."""
    return formatting.listed(sites, LISTED)


def listed_values(sites: Sequence[tuple[str, float]]) -> str:
    """The first sites with values, and the number of others."""
    return listed([f"{site} ({value:.4g})" for site, value in sites])
