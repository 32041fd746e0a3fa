"""The benchmarks: what they measure is right where it is known, and the page says what the JSON says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import losses_cost, page, per_example_cost, plots, results, sampling_cost
from benchmarks.bounds import REASONS, bounds, missed, peak_ratio
from benchmarks.cases import CASES, WAYS
from benchmarks.measuring import allocations, largest_sum, time_in_turn
from benchmarks.results import About, Launches, Result, Row
from benchmarks.running import merged
from helpers import ROOT, TESTS

COMMITTED = sorted((TESTS / "benchmarks").glob("all_*.json"))
ABOUT = About("python -m tests.benchmarks", "2026-11-22", "cpu", "a processor", 2, "3.11", "2.13", "0.1", 60.0, 1.0)


@pytest.mark.pure
def test_peak_of_a_known_size() -> None:
    def run() -> None:
        first = torch.empty(1000)
        second = torch.empty(2000)
        del first
        third = torch.empty(500)
        del second, third

    run()

    assert allocations(run) == [4000, 8000, -4000, 2000, -8000, -2000]
    assert largest_sum(allocations(run)) == 12000


@pytest.mark.pure
@pytest.mark.parametrize(("numbers", "largest"), [([], 0), ([-5, 3], 0), ([5, -3, 4], 6), ([5, -5, 2], 5)])
def test_largest_sum(numbers: list[int], largest: int) -> None:
    assert largest_sum(numbers) == largest


@pytest.mark.broad
@pytest.mark.pure
def test_ways_take_turns() -> None:
    calls: list[str] = []
    steps = {name: lambda n=name: calls.append(n) for name in "abc"}
    found = time_in_turn(steps, lambda name: calls.append(f"clear {name}"), "cpu", rounds=2, seconds=0)

    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 2, "b": 2, "c": 2}
    assert all(calls[at] == f"clear {calls[at + 1]}" for at in range(0, len(calls), 2))
    rounds = [calls[at + 1 : at + 6 : 2] for at in range(0, len(calls), 6)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1


def made_up(checks: float, added: int) -> Result:
    """A run in which all but two bounds are held."""
    row = Row("GPT:large", "plain", 10, 1000, cold=10.0, warm=1.0, is_hit=True, simulated_cold=5.0, peak=100, state=50)
    row = replace(row, milliseconds=20.0, ratio=(1.0, 1.0, 1.0), rounds=3)
    ways = ("empty", "by hand", "clips", "checks", "statistics")
    rows = [row, *(replace(row, way=way) for way in ways)]
    rows[-2] = replace(rows[-2], ratio=(checks - 0.1, checks, checks + 0.1))
    rows.append(replace(rows[0], case="Two layers:small"))
    return Result(
        ABOUT, rows, [Launches("gpt", "float32", "value", 0, 0), Launches("gpt", "float32", "check", 6, added)]
    )


@pytest.mark.pure
def test_bounds_that_are_held() -> None:
    found = bounds(made_up(checks=1.1, added=6))

    assert len(found) == 18
    assert missed(found) == []


@pytest.mark.pure
def test_bounds_that_are_missed(tmp_path: Path) -> None:
    result = made_up(checks=1.27, added=8)
    late = missed(bounds(result))
    text = page.text([result], "plots")

    assert [(bound.goal, bound.measured) for bound in late] == [(1.1, 1.27), (6, 8)]
    assert "| GPT, large, checks: time over plain | 1.10 | 1.27 (1.17 to 1.37) | 0.17 |" in text
    assert "| gpt, float32, check: launches over plain | 6 | 8 | 2 |" in text
    page.write([result], tmp_path / "page.md")
    assert {path.name for path in (tmp_path / "page").iterdir()} == {
        "steps_cpu.svg",
        "memory_cpu.svg",
        "compilation_cpu.svg",
    }


@pytest.mark.pure
def test_points_are_at_their_labels() -> None:
    """A way that only the last case has is not drawn in the row of another."""
    result = made_up(checks=1.25, added=0)
    extra = replace(result.rows[-1], way="gradient checks", ratio=(1.4, 1.5, 1.6))
    figure = plots.figures(replace(result, rows=[*result.rows, extra]))["steps"]
    found = {}
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    for panel in figure.axes:
        for line in panel.get_lines():
            if line.get_marker() == "o":
                found[panel.get_title(), labels[int(line.get_ydata()[0])]] = line.get_xdata()[0]

    assert labels == ["statistics", "checks", "gradient checks", "clips", "by hand", "empty", "plain"]
    assert found["GPT, large", "checks"] == 1.25
    assert found["Two layers, small", "gradient checks"] == 1.5
    assert found["GPT, large", "statistics"] == found["Two layers, small", "plain"] == 1.0


@pytest.mark.pure
def test_every_bound_has_a_reason() -> None:
    needed = {bound.reason for bound in bounds(made_up(1.0, 0))} - {""}

    assert needed <= REASONS.keys()


@pytest.mark.pure
def test_json_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = made_up(checks=1.123456789, added=3)
    results.write(result, tmp_path / "run.json")
    read = results.read(tmp_path / "run.json")

    assert read.row("GPT:large", "checks").ratio == (1.02346, 1.12346, 1.22346)
    assert (read.about, read.launches) == (result.about, result.launches)
    assert read.of("Two layers:small") == result.of("Two layers:small")

    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(ValueError, match="schema None, and 1 is read"):
        results.read(tmp_path / "old.json")


@pytest.mark.pure
def test_cases_that_are_measured_again_take_the_place_of_the_old() -> None:
    before, later = made_up(checks=1.2, added=3), made_up(checks=1.1, added=0)
    again = replace(later, rows=later.of("GPT:large"), launches=[])
    both = merged(before, again)

    assert both.cases() == before.cases()
    assert both.row("GPT:large", "checks").ratio[1] == 1.1
    assert both.of("Two layers:small") == before.of("Two layers:small")
    assert both.launches == before.launches
    assert both.about.seconds == 120
    assert both.about.command.count("python -m tests.benchmarks") == 2


@pytest.mark.pure
def test_the_page_says_what_the_json_says() -> None:
    runs = [results.read(path) for path in COMMITTED]

    assert {run.about.device for run in runs} >= {"cpu"}
    written, wanted = (ROOT / "docs" / "benchmarks.md").read_text(), page.text(runs, "benchmarks")
    assert [line for line in written.splitlines() if line[:1] == "|"] == [
        line for line in wanted.splitlines() if line[:1] == "|"
    ]
    assert "| GPT, large, checks: time over plain |" in written
    for run in runs:
        is_gpu = run.about.device == "cuda"
        assert run.cases() == [name for name, case in CASES.items() if is_gpu or not case.is_for_gpu]
        for name in plots.drawn(run):
            assert (ROOT / "docs" / "benchmarks" / f"{name}_{run.about.device}.svg").exists()


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--cases", "GPT:huge"), ("--ways", "magic")])
def test_unknown_names(arguments: Sequence[str]) -> None:
    done = run_command(*arguments)

    assert done.returncode == 2
    assert f"unknown: {arguments[1]}; cases: GPT:small" in done.stderr


@pytest.mark.sample(12)
@pytest.mark.slow
def test_a_quick_run(tmp_path: Path) -> None:
    ways = ("clips", "statistics", "eager, hooks")
    done = run_command("--quick", "--cases", "Two layers:small", "--ways", *ways, "--jobs", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    run = results.read(path)
    plain, clips, statistics, hooks = run.rows

    assert path == Path(done.stdout.strip())
    assert [row.way for row in run.rows] == ["plain", *ways]
    assert run.about.torch == torch.__version__
    assert plain.ratio == (1.0, 1.0, 1.0)
    for row in run.rows:
        assert row.case == "Two layers:small"
        assert row.rounds == 5
        assert row.milliseconds > 0
        assert 0 < row.ratio[0] <= row.ratio[1] <= row.ratio[2]
        assert 0.5 < peak_ratio(row, plain) < 2
        assert (row.kernels is not None) == (row.cold is not None) == (WAYS[row.way].how != "eager")
        assert row.launches is row.warm is None
    assert (clips.edits, clips.records) == (3, 0)
    assert (statistics.edits, statistics.records) == (10, 30)
    assert hooks.edits is None
    assert (tmp_path / "benchmarks.md").read_text() == page.text([run], "benchmarks")
    assert (tmp_path / "benchmarks" / "steps_cpu.svg").read_text().startswith("<?xml")


@pytest.mark.pure
def test_a_second_moment_needs_one_more_product(capsys: pytest.CaptureFixture[str]) -> None:
    """The program on the page that shows the least cost of the moments of an MLP."""
    (block,) = re.findall(r"```python\n(.*?)```", page.PER_EXAMPLE.read_text(), re.DOTALL)
    exec(block, {})

    assert capsys.readouterr().out == "1.417\n"


@pytest.mark.pure
def test_the_costs_of_examples_are_those_of_the_json() -> None:
    measured = json.loads(page.PER_EXAMPLE.with_suffix(".json").read_text())

    rows = [per_example_cost.line(per_example_cost.Row(**row)) for row in measured["rows"]]
    assert [line for line in page.PER_EXAMPLE.read_text().splitlines() if line.startswith("| ")][1:] == rows


@pytest.mark.pure
def test_weighed_losses_cost_less_than_their_backwards() -> None:
    """The committed runs, which the page beside them rounds."""
    folder = TESTS / "benchmarks"
    names = ("losses_cost_cpu_202611.json", "losses_cost_small_heads_cpu_202611.json")
    runs = [json.loads((folder / name).read_text())["costs"] for name in names]
    bounded, others = ([losses_cost.Costs(**one) for one in run] for run in runs)
    assert [(one.model, one.losses) for one in bounded] == [(name, n) for name in ("GPT", "ConvNet") for n in (2, 3, 4)]
    for one in bounded:
        assert one.ratio("gradients") <= one.bound
        assert one.ratio("features") <= 1.10
        assert one.ratio("gradients") < min(one.ratio("torchjd"), one.ratio("backwards"))
        assert one.peaks["gradients"] < min(one.peaks["torchjd"], one.peaks["backwards"])
        assert one.compilation["gradients"] <= (1 + 0.7 * (one.losses - 1)) * one.compilation["plain"]
    page = (folder / "losses_cost_cpu_202611.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| ")][1:] == [
        losses_cost.line(one) for one in (*bounded, *others)
    ]


@pytest.mark.pure
def test_sampling_costs_a_hundredth() -> None:
    """The committed run, which the page beside it rounds."""
    folder = TESTS / "benchmarks"
    found = json.loads((folder / "sampling_cost_cpu_202611.json").read_text())
    found.pop("machine")
    costs = sampling_cost.Costs(**found)
    figures = costs.ratio, costs.ratio_of(measuring=False), costs.ratio_of(measuring=True)
    assert len(costs.plain) == len(costs.sampled) == 200
    assert (costs.every, costs.recompiled) == (10, 0)
    assert figures[0] <= 1.01
    assert figures[2] <= 1.10
    page = (folder / "sampling_cost_cpu_202611.md").read_text()
    assert [float(one) for one in re.findall(r"\| (\d\.\d{3}) \|", page)] == [round(figure, 3) for figure in figures]
