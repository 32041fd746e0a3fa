"""The page of the documentation that shows runs of the benchmarks: text, tables and plots, all of it from JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import plots
from benchmarks.bounds import LAUNCHES, REASONS, Bound, bounds, missed, peak_ratio
from benchmarks.cases import CASES, WAYS
from benchmarks.results import Result, Row

HEAD = """\
# Benchmarks

The cost of a policy: time, memory, kernels and compilation. `python -m tests.benchmarks` measures it and writes this
page. A step is forward and backward of one model on one batch, without an optimizer. "Everywhere" means errors and
activations of all module outputs, and all gradients.

| way | what it is |
|---|---|
"""
COLUMNS = "way|edits|records|ms|ratio|kernels|MB|launches|peak|ratio|cold|warm"
NO_GPU = """
## GPU

These benchmarks have not run to their end on a GPU yet (`python -m tests.benchmarks --device cuda`). The simulated one
shows launches, waits and Inductor's time in Python. Policies wait for the device only where that is documented
(`tests/integration/cuda/test_waits.py`).

On an H200 (torch 2.11, CUDA 13.0, Python 3.12, November 2026) the first step of a GPT of 12 layers of width 768 in
bfloat16 took 27.9 s of processor time with plain `torch.compile`, 38.3 with clips at all module outputs, 54.5 with a
global norm and 66.0 with checks everywhere: one run, in up to 14 processes, that was ended after 175 s. Steps were not
timed.

    python -m tests.benchmarks --device cuda --jobs 14 --no-warm --cases GPT:huge --ways clips "global norm" checks
"""
RUNS = "tests/benchmarks/all_*.json"
# A run of another program, with a text of its own.
PER_EXAMPLE = Path(__file__).with_name("per_example_cost_cpu_202611.md")
STEP = "ways take turns in random order in each round; median and quartiles of a round's ratios to plain"
KERNELS = "Inductor's counts for forward and backward; opaque operations count in MB alone"
COLD = "processor time of the first step in seconds, in a new process that has imported torch, with empty caches"


# Of each figure: its title, and what has to be said.
CAPTIONS = {
    "steps": (
        "Time of a step over plain torch.compile",
        "Medians and quartiles of a step's time. A measured tensor has to be in memory, also where plain torch.compile "
        "fuses it away.",
    ),
    "memory": (
        "Peak memory over plain torch.compile",
        "Peak memory: statistics keep tensors until a batch of 1 MiB is full.",
    ),
    "compilation": (
        "Processor time of the first step, cold and warm",
        "Processor time of the first step. Eager ways have none.",
    ),
    "launches": (
        "Launches of a step",
        "Launches of a step. Small independent kernels with an inserted one among them are launched together, so there "
        "can be fewer than in plain torch.compile.",
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
        f"{about.gradrewrite}; {about.date}, {about.seconds / 60:.0f} minutes; load at the end "
        f"{about.load:.1f}, of which at most 2 are this run.\n\n    {about.command}\n"
    )
    yield from _columns(is_cpu)
    yield from _figures(result, folder)
    yield from _bounds(result)
    yield f"\n### Figures of the largest sizes\n\n`{RUNS}` has all sizes; the plots above show them.\n"
    for model in dict.fromkeys(CASES[case].model for case in result.cases()):
        yield from _table(result, model)


def _columns(is_cpu: bool) -> Iterator[str]:
    """Yield a table with the way in which each figure is measured."""
    timer = "processor time of one thread" if is_cpu else "time between two events on the device"
    launches = "on a simulated H100" if is_cpu else "as torch.profiler sees them"
    memory = "sums of what the allocator reports" if is_cpu else "`torch.cuda.max_memory_allocated`"
    yield "\n| figure | how it is measured |\n|---|---|\n"
    yield f"| ms | {timer}; {STEP} |\n"
    yield f"| kernels, MB | {KERNELS} |\n"
    yield f"| launches | kernels and other operations on the device in one step, {launches} |\n"
    yield f"| peak | memory of tensors in MB, parameters and inputs included: {memory} |\n"
    yield f"| cold | {COLD} |\n| warm | the same in another process, with the caches that the first has left |\n"


def _figures(result: Result, folder: str) -> Iterator[str]:
    for name in plots.drawn(result):
        title, remark = CAPTIONS[name]
        yield f"\n![{title}]({folder}/{name}_{result.about.device}.svg)\n\n{remark}\n"


def _bounds(result: Result) -> Iterator[str]:
    found = bounds(result)
    if not found:
        return
    late = missed(found)
    yield "\n### Bounds\n\n"
    yield f"{len(found) - len(late)} of {len(found)} bounds are held in this run.\n"
    if late:
        yield "\nMissed:\n\n| bound | at most | measured | missed by |\n|---|---|---|---|\n"
        yield from (f"| {b.text} | {_goal(b)} | {_measured(b)} | {_excess(b)} |\n" for b in late)
        yield "\nReasons, and what was tried:\n\n"
        for reason in dict.fromkeys(bound.reason for bound in late):
            yield f"- **{reason.capitalize().replace('cuda', 'CUDA')}.** {REASONS[reason]}\n"
    yield "\nHeld, but for launches:\n\n| bound | at most | measured |\n|---|---|---|\n"
    yield from _held([b for b in found if not b.is_missed and b.command != LAUNCHES])
    yield from _launches(result)
    yield "\nCommands:\n\n"
    yield from (f"    {command}\n" for command in dict.fromkeys(bound.command for bound in found))


def _held(found: list[Bound]) -> Iterator[str]:
    """Yield the rows of bounds that are held; ways with the same bound share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for bound in found:
        name, colon, what = bound.text.partition(": ")
        model, _, way = name.rpartition(", ")
        key = f"{model}: {what}" if model and colon else bound.text
        measured = f"{way} {_measured(bound)}" if model and colon else _measured(bound)
        rows.setdefault((key, _goal(bound)), []).append(measured)
    yield from (f"| {key} | {goal} | {'; '.join(measured)} |\n" for (key, goal), measured in rows.items())


def _launches(result: Result) -> Iterator[str]:
    """Yield a table of launches over plain: a row a model and dtype, a column a policy with its bound."""
    if not result.launches:
        return
    added = {(one.model, one.dtype, one.policy): one.added for one in result.launches}
    policies = {one.policy: one.bound for one in result.launches}
    yield "\nLaunches over plain (at most):\n\n"
    yield f"| model | dtype | {' | '.join(f'{name} ({bound})' for name, bound in policies.items())} |\n"
    yield f"|---|---{'|---' * len(policies)}|\n"
    for model, dtype in dict.fromkeys((one.model, one.dtype) for one in result.launches):
        cells = [str(added.get((model, dtype, policy), "")) for policy in policies]
        yield f"| {model} | {dtype} | {' | '.join(cells)} |\n"


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


def _table(result: Result, model: str) -> Iterator[str]:
    """Yield the table of a model, of its largest size."""
    columns, case = COLUMNS.split("|"), [case for case in result.cases() if CASES[case].model == model][-1]
    plain = result.row(case, "plain")
    assert plain is not None
    yield f"\n#### {model}: {CASES[case].text}\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    for row in result.of(case):
        yield "| " + " | ".join(_cells(row, plain)) + " |\n"


def _cells(row: Row, plain: Row) -> Iterator[str]:
    yield row.way
    yield _number(row.edits)
    yield _number(row.records)
    yield _number(row.milliseconds, ".3f")
    yield "" if row.ratio is None else f"{row.ratio[1]:.2f} ({row.ratio[0]:.2f}-{row.ratio[2]:.2f})"
    yield _number(row.kernels)
    yield _number(None if row.size is None else row.size / 1e6, ".2f")
    yield _number(row.launches)
    yield _number(None if row.peak is None else (row.peak + (row.state or 0)) / 1e6, ".3f")
    yield _number(None if row.peak is None else peak_ratio(row, plain), ".3f")
    yield _number(row.cold, ".1f")
    yield _number(row.warm, ".2f") + (" (no hit)" if row.is_hit is False else "")


def _number(value: float | None, form: str = "") -> str:
    return "" if value is None else format(value, form)
