"""A run: which processes measure what, and in which order."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

import gradrewrite

from benchmarks import launches
from benchmarks.cases import WAYS, WITH_BOUNDS, Way
from benchmarks.measuring import CACHE, Compilation, compile_one, in_new_process, time_case
from benchmarks.results import About, Launches, Result, Row

ROOT = Path(__file__).parent.parent.parent
WARM = 3  # warm starts of a case that has bounds


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        cases: Names of cases.
        ways: Names of ways; ``"plain"`` is one of them.
        device: ``"cpu"`` or ``"cuda"``.
        rounds: Rounds of timed steps, at least.
        seconds: Seconds that the rounds of a case take, if they are not more than ten times ``rounds``.
        jobs: Processes that compile at one time; steps are timed alone.
        has_launches: Whether launches are counted on the simulated GPU, of all sizes but medium ones.
        has_bounds: Whether the launches of the models in the tests are.
        has_warm: Whether each way is compiled again, with the caches of the first time; three times where there are
            bounds.
    """

    cases: Sequence[str]
    ways: Sequence[str]
    device: str
    rounds: int
    seconds: float
    jobs: int
    has_launches: bool
    has_bounds: bool
    has_warm: bool = True


def run(settings: Settings, say: Callable[[str], None]) -> Result:
    """Measure; ``say`` is told what has been done."""
    start = time.monotonic()
    _set_environment()
    with tempfile.TemporaryDirectory() as name:
        os.environ[CACHE] = str(Path(name, "of-imports"))
        plan = _Plan(settings, Path(name), say)
        compiled, counted = plan.compile_and_count()
        timed = plan.time()
    rows = [
        _row(case, way, compiled.get((case, way.name), []), counted.get(case, {}), timed[case])
        for case in settings.cases
        for way in plan.ways(case)
    ]
    bounds = [Launches(**one) for one in counted.get(launches.BOUNDS, [])]
    return Result(_about(settings.device, time.monotonic() - start), rows, bounds)


def merged(before: Result, later: Result) -> Result:
    """A run in which a later one has measured some cases again; the page says both command lines."""
    again = set(later.cases())
    rows = [row for row in before.rows if row.case not in again] + later.rows
    order = before.cases()
    rows.sort(key=lambda row: order.index(row.case) if row.case in order else len(order))
    about = replace(
        later.about,
        command=f"{before.about.command}\n    {later.about.command}",
        gradrewrite=f"{before.about.gradrewrite}, {later.about.gradrewrite}",
        seconds=before.about.seconds + later.about.seconds,
    )
    return Result(about, rows, later.launches or before.launches)


def _set_environment() -> None:
    """For the processes that measure: one thread that does not wait in a loop, and where this package is."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "KINETO_LOG_LEVEL": "6"}
    os.environ["PYTHONPATH"] = str(launches.TESTS)


class _Plan:
    def __init__(self, settings: Settings, folder: Path, say: Callable[[str], None]) -> None:
        self._settings, self._folder, self._say = settings, folder, say

    def ways(self, case: str) -> list[Way]:
        """The ways in which a case is trained."""
        return [way for way in WAYS.values() if way.name in self._settings.ways and way.is_in(case)]

    def compile_and_count(self) -> tuple[dict[tuple[str, str], list[Compilation]], dict[str, Any]]:
        """Compile all ways, and count launches: several processes at one time, since processor time is measured."""
        settings = self._settings
        counted = [case for case in settings.cases if settings.has_launches and not case.endswith(":medium")]
        counted += [launches.BOUNDS] if settings.has_bounds else []
        with ThreadPoolExecutor(settings.jobs) as pool:
            compiling = {
                (case, way.name): pool.submit(self._compile, case, way)
                for case in settings.cases
                for way in self.ways(case)
                if not way.code
            }
            counting = {what: pool.submit(self._count, what) for what in counted}
            done = {key: future.result() for key, future in compiling.items()}
            sharing = {
                (case, way.name): pool.submit(self._compile, case, way)
                for case in settings.cases
                for way in self.ways(case)
                if way.code
            }
            done |= {key: future.result() for key, future in sharing.items()}
            return done, {what: future.result() for what, future in counting.items()}

    def time(self) -> dict[str, dict[str, list[float]]]:
        """Time the steps of each case."""
        settings, found = self._settings, {}
        for case in settings.cases:
            ways = [way for way in self.ways(case) if way.is_timed]
            folders = {way.name: self._cache_of(case, way) for way in ways}
            names = [way.name for way in ways]
            arguments = (case, names, settings.device, folders, settings.rounds, settings.seconds)
            found[case] = in_new_process(time_case, *arguments)
            self._say(f"{case}: {len(found[case]['plain'])} rounds")
        return found

    def _compile(self, case: str, way: Way) -> list[Compilation]:
        """Compile cold, then warm; code that another way has compiled, and no code, once."""
        times = 1
        if self._settings.has_warm and way.is_compiled:
            times += WARM if case in WITH_BOUNDS else 1
        folder = self._cache_of(case, way)
        done = [in_new_process(compile_one, case, way.name, self._settings.device, folder) for _ in range(times)]
        self._say(f"{case}, {way.name}: first step {', '.join(f'{one.seconds:.2f} s' for one in done)}")
        return done

    def _cache_of(self, case: str, way: Way) -> Path:
        return self._folder / re.sub(r"\W+", "_", case) / re.sub(r"\W+", "_", way.code or way.name)

    def _count(self, what: str) -> Any:
        counted = launches.ask(what)
        self._say(f"{what}: launches")
        return counted


def _row(
    case: str,
    way: Way,
    compiled: list[Compilation],
    counted: dict[str, Any],
    timed: dict[str, list[float]],
) -> Row:
    """All figures of one way."""
    row = Row(case, way.name)
    if compiled:
        last = compiled[-1]
        row = replace(row, peak=last.peak, state=last.state, launches=last.launches)
    if compiled and way.is_compiled:
        first = compiled[0]
        row = replace(row, kernels=first.kernels, size=first.size, cold=first.seconds)
        if way.how == "gradrewrite":
            row = replace(row, edits=first.edits, records=first.records)
        if len(compiled) > 1:
            row = replace(row, warm=statistics.median(one.seconds for one in compiled[1:]), is_hit=last.is_hit)
    if way.name in counted:
        found = counted[way.name]
        row = replace(row, launches=found["launches"])
        if way.is_compiled:
            row = replace(row, simulated_cold=found["seconds"])
    if way.name in timed:
        seconds = timed[way.name]
        low, middle, high = statistics.quantiles([a / b for a, b in zip(seconds, timed["plain"], strict=True)], n=4)
        row = replace(
            row, milliseconds=1e3 * statistics.median(seconds), ratio=(low, middle, high), rounds=len(seconds)
        )
    return row


def _about(device: str, seconds: float) -> About:
    return About(
        command=" ".join(["python -m tests.benchmarks", *sys.argv[1:]]),
        date=date.today().isoformat(),
        device=device,
        hardware=torch.cuda.get_device_name() if device == "cuda" else _processor(),
        cores=os.cpu_count() or 1,
        python=platform.python_version(),
        torch=torch.__version__,
        gradrewrite=f"{gradrewrite.__version__} ({_commit()})",
        seconds=seconds,
        load=os.getloadavg()[2],
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    return f"{found[1] if found else platform.processor()}, {platform.machine()}"


def _commit() -> str:
    """The commit; a copy without a repository has it in an environment variable."""
    if known := os.environ.get("GRADREWRITE_COMMIT"):
        return known
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "no commit"
