"""Results of a run of the benchmarks, as values and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class About:
    """The circumstances of a run.

    Attributes:
        command: The command line.
        date: Day of the run, as ``2026-11-22``.
        device: ``"cpu"`` or ``"cuda"``.
        hardware: The processor, or the GPU.
        cores: Cores of the processor.
        python: Version of Python.
        torch: Version of torch.
        gradrewrite: Version of gradrewrite, with the commit.
        seconds: Wall time of the run.
        load: Load of the machine in the last 15 minutes, when the run ended: 1 is the run itself.
    """

    command: str
    date: str
    device: str
    hardware: str
    cores: int
    python: str
    torch: str
    gradrewrite: str
    seconds: float
    load: float


@dataclass(frozen=True)
class Row:
    """One way to train one case; None is what was not measured, or has no meaning.

    Attributes:
        case: ``model:size``.
        way: Its name.
        kernels: Kernels that Inductor generated, of forward and backward.
        size: Bytes that they read and write.
        edits: Edits of the rewritten graph.
        records: Records of a step.
        launches: Kernels and other operations on a GPU in one step, real or simulated.
        cold: Processor seconds of the first step, without caches.
        warm: The same in another process, with the caches that the first has left.
        is_hit: Whether code then came out of AOTAutograd's cache.
        simulated_cold: As ``cold``, for the simulated GPU, of Python alone.
        peak: The most bytes that a step has at one time, over those that were there before.
        state: Bytes of parameters, buffers and inputs.
        milliseconds: Median of the steps: processor time on the CPU, time between events on a GPU.
        ratio: Quartiles of the ratios to plain torch.compile in the same round.
        rounds: How many rounds there were.
    """

    case: str
    way: str
    kernels: int | None = None
    size: int | None = None
    edits: int | None = None
    records: int | None = None
    launches: int | None = None
    cold: float | None = None
    warm: float | None = None
    is_hit: bool | None = None
    simulated_cold: float | None = None
    peak: int | None = None
    state: int | None = None
    milliseconds: float | None = None
    ratio: tuple[float, float, float] | None = None
    rounds: int | None = None


@dataclass(frozen=True)
class Launches:
    """Launches that a policy adds to a step on the simulated GPU.

    Attributes:
        model: The model.
        dtype: ``"float32"``, or ``"bfloat16"`` under autocast.
        policy: The policy.
        bound: What it may add.
        added: What it adds.
    """

    model: str
    dtype: str
    policy: str
    bound: int
    added: int


@dataclass(frozen=True)
class Result:
    """A run.

    Attributes:
        about: Its circumstances.
        rows: One for each case and way.
        launches: Added launches of the models whose bounds the tests hold; empty if they were not counted.
    """

    about: About
    rows: list[Row]
    launches: list[Launches] = field(default_factory=list)

    def row(self, case: str, way: str) -> Row | None:
        """The row of a case and a way."""
        return next((row for row in self.rows if (row.case, row.way) == (case, way)), None)

    def of(self, case: str) -> list[Row]:
        """All rows of a case."""
        return [row for row in self.rows if row.case == case]

    def cases(self) -> list[str]:
        """The cases, in their order."""
        return list(dict.fromkeys(row.case for row in self.rows))


def write(result: Result, path: Path) -> None:
    """Write a run as JSON, a row a line; floats have six significant digits."""
    about, rows, launches = asdict(result.about), result.rows, result.launches
    lines = [f'{{"schema": {SCHEMA},', f' "about": {json.dumps(about, indent=2)},', ' "rows": [']
    lines.append(",\n".join(f"  {json.dumps(_rounded(asdict(row)))}" for row in rows))
    lines += [" ],", ' "launches": [']
    lines.append(",\n".join(f"  {json.dumps(asdict(one))}" for one in launches))
    lines += [" ]", "}"]
    path.write_text("\n".join(lines) + "\n")


def read(path: Path) -> Result:
    """Read a run.

    Raises:
        ValueError: The file is of another version.
    """
    found = json.loads(path.read_text())
    if found.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {found.get('schema')!r}, and {SCHEMA} is read")
    rows = [Row(**row | {"ratio": None if row["ratio"] is None else tuple(row["ratio"])}) for row in found["rows"]]
    return Result(About(**found["about"]), rows, [Launches(**one) for one in found["launches"]])


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
