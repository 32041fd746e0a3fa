"""The bounds of the project, what a run measured of each, and what is known of those that are missed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.results import Result, Row

GPT, TINY = "GPT:large", "Two layers:small"
RUN = "python -m tests.benchmarks --cases"
LAUNCHES = "GRADREWRITE_GPU=compiled pytest -m launches"


@dataclass(frozen=True)
class Bound:
    """A bound, and what was measured.

    Attributes:
        text: What is bounded.
        goal: What it is at most.
        measured: What it is; a count is a whole number.
        command: How to measure it.
        reason: A key of ``REASONS``: what is known if it is missed.
        spread: First and third quartile.
    """

    text: str
    goal: float
    measured: float
    command: str
    reason: str = ""
    spread: tuple[float, float] | None = None

    @property
    def is_missed(self) -> bool:
        """Whether more was measured than the goal; ratios are compared with two decimals."""
        return round(self.measured, 2) > self.goal


# Why a bound is missed, and what was tried.
REASONS = {
    "checks in time": (
        "Of 11 per cent 6 are reading: with a compiled function that does nothing the ratio is 1.05. The rest is 60 "
        "operations (6 us each in a loop) and fusion around them. Tried: one operation a site (1.19 instead of 1.14, "
        "at 128 tokens), views measured at their base (1.13), errors and activations traced (1.12)."
    ),
    "statistics in time": (
        "With a compiled function that does nothing the ratio is 1.05. Another run of the same day had 1.149."
    ),
    "fixed cost": (
        "The load of the machine shows: another run of the same day had 1.50 for checked gradients and 1.32 for "
        "statistics; four ways in turn instead of fourteen gave 1.38 and 1.17. Plain torch.compile takes a third of "
        "a millisecond; a check adds an operation in the forward (25 us) and a note of its inputs for a replay (30 "
        "us)."
    ),
    "launches": (
        "The first stage of a reduction fuses with the kernel that makes the tensor. Matrix products have none, nor "
        "have values inside of other kernels: there it is a kernel by itself (about 9 of the 15 of attention). "
        "Independent second stages are launched together. Tried: Inductor's own `combo_kernels` (94 launches more "
        "for everything, where a plain step had 43)."
    ),
    "cold compile on CUDA": (
        "Processor time of Python alone. Each statistic is two reductions, which Inductor lowers, fuses, schedules "
        "and writes. Tried: opaque operations (no compile time, but several eager kernels a tensor). Not tried: one "
        "Triton kernel, written by hand, for all second stages."
    ),
    "cold compile": (
        "Measuring is opaque, so no kernel is added. The rest is the C++ function for statistics, built "
        "once in a cache folder (0.6 s), the rewrite, and the larger graph in AOTAutograd and Inductor."
    ),
    "warm start": (
        "On a hit the policy is asked at all sites, its answers are hashed (20 ms here) and the entry is read, with "
        "the replay graph where something is checked."
    ),
    "memory": (
        "Statistics keep tensors until a batch of 1 MiB is full (`BATCH` in `rewriting/record_packing.py`); clips "
        "change which kernels are fused, and so the order in which buffers are freed, as hooks by hand do."
    ),
}


def bounds(result: Result) -> list[Bound]:
    """All bounds of which the run has figures."""
    return [*_kernels(result), *_times(result), *_memory(result), *_compilation(result), *_launches(result)]


def missed(found: list[Bound]) -> list[Bound]:
    """Those that are missed."""
    return [bound for bound in found if bound.is_missed]


def _command(case: str) -> str:
    return f'{RUN} "{case}"'


def _kernels(result: Result) -> Iterator[Bound]:
    plain, empty, hand, clips = (result.row(GPT, way) for way in ("plain", "empty", "by hand", "clips"))
    if plain and empty and plain.kernels is not None and empty.kernels is not None:
        yield Bound(
            "empty policy: kernels that differ from plain", 0, abs(empty.kernels - plain.kernels), _command(GPT)
        )
        assert plain.size is not None
        assert empty.size is not None
        yield Bound("empty policy: bytes that differ from plain", 0, abs(empty.size - plain.size), _command(GPT))
    if hand and clips and hand.kernels is not None and clips.kernels is not None:
        yield Bound(
            "clips at every module output: kernels over those by hand", 0, clips.kernels - hand.kernels, _command(GPT)
        )
        assert hand.size is not None
        assert clips.size is not None
        yield Bound("clips at every module output: bytes over those by hand", 0, clips.size - hand.size, _command(GPT))


def _times(result: Result) -> Iterator[Bound]:
    goals = [
        (GPT, "checks", 1.10, "checks in time"),
        (GPT, "statistics", 1.15, "statistics in time"),
        (TINY, "empty", 1.10, "fixed cost"),
        (TINY, "gradient checks", 1.30, "fixed cost"),
        (TINY, "statistics", 1.30, "fixed cost"),
    ]
    for case, way, goal, reason in goals:
        row = result.row(case, way)
        if row and row.ratio:
            low, middle, high = row.ratio
            yield Bound(f"{_short(case)}, {way}: time over plain", goal, middle, _command(case), reason, (low, high))


def _memory(result: Result) -> Iterator[Bound]:
    plain = result.row(GPT, "plain")
    for way in ("empty", "clips", "checks", "statistics"):
        row = result.row(GPT, way)
        if plain and row and row.peak is not None:
            yield Bound(
                f"{_short(GPT)}, {way}: peak memory over plain", 1.02, peak_ratio(row, plain), _command(GPT), "memory"
            )


def peak_ratio(row: Row, plain: Row) -> float:
    """Peak memory of a step over that of plain torch.compile: parameters, inputs, and what the step has at one time."""
    mine, others = ((one.peak or 0) + (one.state or 0) for one in (row, plain))
    return mine / others


def _compilation(result: Result) -> Iterator[Bound]:
    plain, statistics = result.row(GPT, "plain"), result.row(GPT, "statistics")
    if plain and statistics and plain.cold and statistics.cold:
        name = f"{_short(GPT)}, statistics ({statistics.records} records): cold compilation over plain"
        yield Bound(name, 1.25, statistics.cold / plain.cold, _command(GPT), "cold compile")
        if plain.simulated_cold and statistics.simulated_cold:
            ratio = statistics.simulated_cold / plain.simulated_cold
            yield Bound(f"{name}, for a simulated H100", 1.25, ratio, _command(GPT), "cold compile on CUDA")
    for way in ("empty", "clips", "checks", "statistics"):
        row = result.row(GPT, way)
        if plain and row and plain.warm and row.warm:
            yield Bound(
                f"{_short(GPT)}, {way}: warm start over plain", 1.30, row.warm / plain.warm, _command(GPT), "warm start"
            )


def _launches(result: Result) -> Iterator[Bound]:
    for one in result.launches:
        text = f"{one.model}, {one.dtype}, {one.policy}: launches over plain"
        yield Bound(text, one.bound, one.added, LAUNCHES, "launches")


def _short(case: str) -> str:
    return {GPT: "GPT, large", TINY: "two 8-wide layers"}[case]
