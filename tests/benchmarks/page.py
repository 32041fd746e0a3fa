"""The page of the documentation that shows runs of the benchmarks: text, tables and plots, all of it from JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import plots
from benchmarks.bounds import REASONS, Bound, bounds, missed, peak_ratio
from benchmarks.cases import CASES, WAYS
from benchmarks.results import Result, Row

HEAD = """\
# Benchmarks

`python -m tests.benchmarks` writes this page and its figures from JSON files in `tests/benchmarks`. Each way to train
runs forward and backward of one model on one batch, without an optimizer. "Everywhere" is at errors and activations of
all module outputs and at all gradients.

| way | what it is |
|---|---|
"""
COLUMNS = "way|edits|records|step ms|over plain|kernels|MB|launches|peak MB|over plain|cold s|warm s"
NO_GPU = """
## GPU

These benchmarks have not run on a GPU yet; `python -m tests.benchmarks --device cuda` is the command for one. What is
known comes from the simulated one (`CONTRIBUTING.md`): launches, waits, and what Inductor's Python takes. No policy
waits for the device or uploads anything while it blocks, but for those that are documented to:
`tests/integration/cuda/test_waits.py` holds it.
"""
# A run of another program, with a text of its own.
PER_EXAMPLE = Path(__file__).with_name("per_example_cost_cpu_202611.md")
STEP = "ways take turns in random order in each round; the median of a round's ratios to plain, and their quartiles"
KERNELS = "Inductor's counts for forward and backward; an opaque operation has bytes, but is no kernel"
COLD = (
    "processor time of the first step, compilers included, in a new process that has imported torch, with empty caches"
)


# Of each figure: its title, and what has to be said.
CAPTIONS = {
    "steps": (
        "Time of a step over plain torch.compile",
        "Medians and quartiles. What is measured has to be in memory: where plain torch.compile fuses it away, as "
        "between BatchNorm and ReLU, it is written for that.",
    ),
    "memory": (
        "Peak memory over plain torch.compile",
        "Statistics keep tensors until a batch of 1 MiB is full, which shows in small models.",
    ),
    "compilation": ("Processor time of the first step, cold and warm", "Eager ways have none."),
    "launches": (
        "Launches of a step",
        "Small kernels that do not depend on each other are launched together where an inserted one is among them, so "
        "there can be fewer than in plain torch.compile.",
    ),
}


def write(results: Sequence[Result], path: Path) -> None:
    """Write the page and its plots.

    Args:
        results: Runs, on different devices; the first is shown first.
        path: The page; plots go into the folder of its name without the ending.
    """
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        for name, figure in plots.figures(result).items():
            plots.save(figure, folder / f"{name}_{result.about.device}.svg")
    path.write_text(text(results, folder.name))


def text(results: Sequence[Result], folder: str) -> str:
    """The page in Markdown.

    Args:
        results: Runs, on different devices.
        folder: Where the plots are, beside the page.
    """
    parts = [HEAD]
    used = {row.way for result in results for row in result.rows}
    parts += [f"| {way.name} | {way.text} |\n" for way in WAYS.values() if way.name in used]
    for result in results:
        parts += _of(result, folder)
    if all(result.about.device == "cpu" for result in results):
        parts.append(NO_GPU)
    parts.append(f"\n#{PER_EXAMPLE.read_text()}")
    return "".join(parts)


def _of(result: Result, folder: str) -> Iterator[str]:
    about = result.about
    is_cpu = about.device == "cpu"
    yield f"\n## {'CPU' if is_cpu else about.hardware}\n\n"
    yield (
        f"{about.hardware}, {about.cores} cores; Python {about.python}, torch {about.torch}, gradrewrite "
        f"{about.gradrewrite}; {about.date}, {about.seconds / 60:.0f} minutes. At the end the machine's load was "
        f"{about.load:.1f}; at most 2 of it are this run.\n\n    {about.command}\n"
    )
    yield from _columns(is_cpu)
    yield from _figures(result, folder)
    yield from _bounds(result)
    yield "\n### All figures\n"
    for case in result.cases():
        yield from _table(result, case)


def _columns(is_cpu: bool) -> Iterator[str]:
    """Yield a table with the way in which each figure is measured."""
    timer = "processor time of one thread" if is_cpu else "time between two events on the device"
    launches = "on a simulated H100" if is_cpu else "as torch.profiler sees them"
    memory = "sums of what the allocator reports" if is_cpu else "`torch.cuda.max_memory_allocated`"
    yield "\n| figure | how it is measured |\n|---|---|\n"
    yield f"| step ms | {timer}; {STEP} |\n"
    yield f"| kernels, MB | {KERNELS}; on the CPU a kernel may be a part of a loop |\n"
    yield f"| launches | kernels and other operations on the device in one step, {launches} |\n"
    yield f"| peak MB | tensors that live at one time, parameters and inputs included: {memory} |\n"
    yield f"| cold s | {COLD} |\n| warm s | the same in another process, with the caches that the first has left |\n"


def _figures(result: Result, folder: str) -> Iterator[str]:
    for name in plots.drawn(result):
        title, remark = CAPTIONS[name]
        yield f"\n![{title}]({folder}/{name}_{result.about.device}.svg)\n\n{title}. {remark}\n"


def _bounds(result: Result) -> Iterator[str]:
    found = bounds(result)
    if not found:
        return
    late = missed(found)
    yield "\n### Bounds and where they are missed\n\n"
    yield f"{len(found) - len(late)} of {len(found)} bounds are held in this run.\n"
    if late:
        yield "\nMissed:\n\n| bound | at most | measured | missed by |\n|---|---|---|---|\n"
        yield from (f"| {b.text} | {_goal(b)} | {_measured(b)} | {_excess(b)} |\n" for b in late)
        yield "\nWhy, and what was tried:\n\n"
        reasons: dict[str, list[Bound]] = {}
        for bound in late:
            reasons.setdefault(bound.reason, []).append(bound)
        for reason, own in reasons.items():
            yield f"- **{'; '.join(bound.text for bound in own)}.** {REASONS[reason]}\n"
    yield "\nHeld:\n\n| bound | at most | measured |\n|---|---|---|\n"
    yield from (f"| {b.text} | {_goal(b)} | {_measured(b)} |\n" for b in found if not b.is_missed)
    yield "\nCommands:\n\n"
    yield from (f"    {command}\n" for command in dict.fromkeys(bound.command for bound in found))


def _goal(bound: Bound) -> str:
    return f"{bound.goal:.2f}" if isinstance(bound.goal, float) else str(bound.goal)


def _measured(bound: Bound) -> str:
    if isinstance(bound.measured, int):
        return str(bound.measured)
    spread = "" if bound.spread is None else f" ({bound.spread[0]:.2f} to {bound.spread[1]:.2f})"
    return f"{bound.measured:.2f}{spread}"


def _excess(bound: Bound) -> str:
    difference = bound.measured - bound.goal
    return str(difference) if isinstance(difference, int) else f"{difference:.2f}"


def _table(result: Result, case: str) -> Iterator[str]:
    plain = result.row(case, "plain")
    assert plain is not None
    yield f"\n#### {CASES[case].model}, {CASES[case].size}: {CASES[case].text}\n\n"
    columns = COLUMNS.split("|")
    yield f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    for row in result.of(case):
        yield "| " + " | ".join(_cells(row, plain)) + " |\n"


def _cells(row: Row, plain: Row) -> Iterator[str]:
    yield row.way
    yield _number(row.edits)
    yield _number(row.records)
    yield _number(row.milliseconds, ".3f")
    yield "" if row.ratio is None else f"{row.ratio[1]:.2f} ({row.ratio[0]:.2f} to {row.ratio[2]:.2f})"
    yield _number(row.kernels)
    yield _number(None if row.size is None else row.size / 1e6, ".2f")
    yield _number(row.launches)
    yield _number(None if row.peak is None else (row.peak + (row.state or 0)) / 1e6, ".3f")
    yield _number(None if row.peak is None else peak_ratio(row, plain), ".3f")
    yield _number(row.cold, ".1f")
    yield _number(row.warm, ".2f") + (" (no hit)" if row.is_hit is False else "")


def _number(value: float | None, form: str = "") -> str:
    return "" if value is None else format(value, form)
