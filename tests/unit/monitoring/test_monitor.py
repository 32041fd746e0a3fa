"""The monitor: rows, what is read of them, files, and what follows a failed check."""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByNorm, Keep, Observe

from helpers import Probe, run_probe
from models.small import Lambda

SEEN = "max_abs@error:h"


def watched(monitor: gr.Monitor | None = None, *more: Any) -> gr.RewrittenModule:
    return gr.transform(Probe(), [gr.on("error:h", Observe("max_abs")), *more], monitor=monitor)


def test_history_is_one_float_a_row() -> None:
    model = watched()
    assert model.monitor.history(SEEN) == []
    run_probe(model, 1.0, 2.0, 3.0)

    assert model.monitor.history(SEEN) == [1.0, 2.0, 3.0]
    with pytest.raises(KeyError, match=r"nearest: max_abs@error:h"):
        model.monitor.history("max_abs@error:g")


@pytest.mark.broad
def test_history_is_nan_where_a_row_lacks_the_record() -> None:
    monitor = gr.Monitor()
    one, other = watched(monitor), gr.transform(Probe(), gr.on("error:h", Observe("norm")), monitor=monitor)
    run_probe(one, 1.0)
    run_probe(other, 1.0)
    run_probe(one, 2.0)

    assert monitor.history(SEEN) == pytest.approx([1.0, math.nan, 2.0], nan_ok=True)


def test_buffer_forgets_the_oldest_and_says_so() -> None:
    model = watched(gr.Monitor(capacity=3))
    run_probe(model, *range(5))
    assert model.monitor.history(SEEN) == [2.0, 3.0, 4.0]
    assert model.monitor.dropped == 2
    assert "2 were dropped unread (capacity 3)" in str(model.monitor.table())
    run_probe(model, 5.0)
    assert model.monitor.dropped == 2  # the step that left had been read


def test_table_sums_up() -> None:
    model = watched()
    run_probe(model, 1.0, 5.0, math.inf, 3.0)
    table = model.monitor.table()
    (row,) = table.rows

    assert (row.address, row.last, row.smallest, row.median, row.largest) == (SEEN, 3.0, 1.0, 3.0, math.inf)
    assert (row.steps, row.nonfinite) == (4, 1)
    assert SEEN in str(table)
    assert "4 of 4 steps" in str(table)
    assert str(gr.Monitor().table())


@pytest.mark.broad
@pytest.mark.parametrize("bounds", [[math.inf], [math.inf, 0.5, math.inf], [0.5, math.nan, 1.0]])
def test_an_infinite_bound_is_a_value(bounds: list[float]) -> None:
    bound = torch.tensor(bounds[0])
    model = gr.transform(nn.Linear(2, 1), gr.on("gradient:weight", ClipByNorm(bound)))
    for value in bounds:
        bound.fill_(value)
        model(torch.ones(1, 2)).sum().backward()
    row = next(row for row in model.monitor.table().rows if row.address == "bound@gradient:weight")

    known = [value for value in bounds if not math.isnan(value)]
    assert row.median == statistics.median(known)
    assert row.nonfinite == len(bounds) - len(known)


@pytest.mark.pure
def test_monitor_refuses_sizes_that_are_none() -> None:
    for settings in ({"capacity": 0}, {"every": 0}, {"capacity": 5, "every": 6}, {"every": 1.5}):
        with pytest.raises(ValueError, match="Monitor"):
            gr.Monitor(**settings)


def all_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=lambda c: pytest.fail(c)) for line in path.read_text().splitlines()]


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of steps."""
    return [line for line in all_lines(path) if "step" in line]


def test_jsonl_holds_every_row_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = watched()
    run_probe(model, 1.0, math.nan)
    model.monitor.to_jsonl(path)
    run_probe(model, -math.inf)
    model.monitor.to_jsonl(path)
    model.monitor.to_jsonl(path)

    assert all_lines(path) == [
        {"run": {"version": gr.__version__, "policy": ANY, "config": {}}},
        {"graphs": 0, "clips": [], "ops": {"h": ["/mul", ANY]}},
        {"step": 0, "graphs": 0, "records": {SEEN: 1.0}},
        {"step": 1, "graphs": 0, "records": {SEEN: "NaN"}},
        {"step": 2, "graphs": 0, "records": {SEEN: "Infinity"}},
    ]


def test_jsonl_follows_at_the_interval(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = watched(gr.Monitor(every=2))
    model.monitor.to_jsonl(path)
    run_probe(model, *range(7))
    assert [line["step"] for line in lines(path)] == list(range(6))[: len(lines(path))]
    assert len(lines(path)) >= 4
    assert model.monitor.dropped == 0
    model.monitor.to_jsonl(path)
    assert [line["step"] for line in lines(path)] == list(range(7))


def test_jsonl_loses_nothing_when_the_buffer_is_small(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = watched(gr.Monitor(capacity=4))
    model.monitor.to_jsonl(path)
    run_probe(model, *range(30))
    model.monitor.to_jsonl(path)

    assert [line["step"] for line in lines(path)] == list(range(30))
    assert model.monitor.dropped == 0


def test_reading_in_between_keeps_no_row_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = watched(gr.Monitor(every=4))
    model.monitor.to_jsonl(path)
    for value in range(10):
        run_probe(model, value)
        assert model.monitor.history(SEEN)[-1] == value
    model.monitor.to_jsonl(path)
    assert [line["step"] for line in lines(path)] == list(range(10))


def test_unfinished_line_is_taken_off(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 0, "records": {}}\n{"step": 1, "rec')
    model = watched()
    run_probe(model, 1.0)
    model.monitor.to_jsonl(path)

    assert [line["step"] for line in lines(path)] == [0, 0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_is_said_and_training_goes_on() -> None:
    model = watched(gr.Monitor(every=1))
    model.monitor.to_jsonl("/dev/full")
    with pytest.warns(gr.RewriteWarning, match=r"/dev/full: step 0 could not be written \(No space left on device\)"):
        run_probe(model, 1.0, 2.0, 3.0)
    assert model.monitor.history(SEEN) == [1.0, 2.0, 3.0]
    with pytest.raises(OSError, match=r"/dev/full.*No space left"):
        model.monitor.to_jsonl("/dev/full")


def test_line_that_does_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    model = watched()
    run_probe(model, 1.0)
    model.monitor.to_jsonl(path)
    whole = path.read_bytes()
    write = os.write

    def half(file: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return write(file, data[:-9])

    run_probe(model, 2.0)
    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space left"):
        model.monitor.to_jsonl(path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("how", ["kill", "end"])
@pytest.mark.slow
def test_jsonl_survives(how: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    program = f"""
        import sys, torch, gradrewrite as gr
        from gradrewrite.passes import Observe
        model = gr.transform(torch.nn.Linear(4, 4), gr.on("*", Observe("max_abs", "norm")), monitor=gr.Monitor(every=1))
        model.monitor.to_jsonl({str(path)!r})
        for step in range(10**6 if {how == "kill"} else 5):
            model(torch.ones(1, 4)).sum().backward()
            if step == 30:
                print("running", flush=True)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    if how == "kill":
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()

    assert path.read_bytes().endswith(b"\n")
    steps = [line["step"] for line in lines(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) >= (28 if how == "kill" else 5)


def test_tensorboard_gets_tags_and_steps() -> None:
    class Writer:
        def __init__(self) -> None:
            self.calls: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.calls.append((tag, value, step))

    writer = Writer()
    model = watched()
    run_probe(model, 1.0)
    model.monitor.to_tensorboard(writer)
    run_probe(model, 2.0)
    model.monitor.to_tensorboard(writer)

    assert writer.calls == [("max_abs/error:h", 1.0, 0), ("max_abs/error:h", 2.0, 1)]


def test_tensorboard_itself(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = tensorboard.SummaryWriter(tmp_path)
        model = watched()
        run_probe(model, 1.0)
        model.monitor.to_tensorboard(writer)
        writer.close()
    assert list(tmp_path.iterdir())


def test_exponents_are_a_histogram_in_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = tensorboard.SummaryWriter(tmp_path)
        model = gr.transform(Probe(4), gr.on("error:h", Observe("exponents", "norm")))
        model.monitor.to_tensorboard(writer)
        model(torch.tensor([0.0, 0.3, -0.4, 5.0])).backward()
        model.monitor.flush()
        writer.close()
        read = EventAccumulator(str(tmp_path)).Reload()
    (event,) = read.Histograms("exponents/error:h")
    found = event.histogram_value
    known = {limit: n for limit, n in zip(found.bucket_limit, found.bucket, strict=True) if n}

    assert read.Tags()["scalars"] == ["norm/error:h"]
    assert (event.step, found.min, found.max, found.num, found.sum) == (0, 0.0, 8.0, 4.0, 6.75)
    assert known == {2.0**-46: 1.0, 0.5: 2.0, 8.0: 1.0}  # 0; [0.25, 0.5); [4, 8)


def test_writer_without_histograms_has_no_exponents() -> None:
    class Writer:
        def __init__(self) -> None:
            self.tags: list[str] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.tags.append(tag)

    writer = Writer()
    model = gr.transform(Probe(), gr.on("error:h", Observe("exponents", "norm")))
    run_probe(model, 1.0)
    model.monitor.to_tensorboard(writer)

    assert writer.tags == ["norm/error:h"]


@pytest.mark.slow
def test_reading_from_another_thread_while_training() -> None:
    model = watched(gr.Monitor(capacity=20))
    run_probe(model, 0.0)
    done, failures = threading.Event(), []

    def read() -> None:
        try:
            while not done.is_set():
                history = model.monitor.history(SEEN)
                assert history == [history[0] + i for i in range(len(history))]
                model.monitor.table()
        except BaseException as err:  # pragma: no cover
            failures.append(err)

    reader = threading.Thread(target=read)
    reader.start()
    run_probe(model, *range(1, 200))
    done.set()
    reader.join()

    assert not failures
    assert model.monitor.latest() == {SEEN: 199.0}


def test_several_backwards_a_step_are_several_rows() -> None:
    model = watched()
    one, two = model(torch.ones(2)), model(torch.ones(2) * 2)
    (one + two).backward()  # one backward through two runs: the last report stands
    assert len(model.monitor.history(SEEN)) == 1
    run_probe(model, 3.0, 4.0)
    assert model.monitor.history(SEEN)[1:] == [3.0, 4.0]


@pytest.mark.slow
def test_several_shapes_and_evaluation_in_between() -> None:

    net = Lambda(lambda net, x: net.fc(x).sum(), fc=nn.Linear(1, 1))
    model = gr.transform(net, gr.on("error:fc", Observe("norm")), dynamic=False)
    for rows in (1, 4, 9):
        model(torch.ones(rows, 1)).backward()
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 1))
        model.train()

    assert model.monitor.history("norm@error:fc") == [1.0, 2.0, 3.0]


@pytest.mark.long
def test_monitor_outlives_its_model_and_is_not_copied() -> None:
    model = watched()
    run_probe(model, 1.0)
    other = copy.deepcopy(model)
    run_probe(other, 5.0)
    monitor = model.monitor
    assert other.monitor is not monitor
    del model
    gc.collect()
    assert monitor.latest() == {SEEN: 1.0}


def test_only_the_last_row_keeps_tensors() -> None:
    model = gr.transform(Probe(), gr.on("error:h", Keep()))
    run_probe(model, 1.0, 2.0)
    assert [len(row.kept) for row in model.monitor._recorder.records] == [0, 1]


class _Again(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.cell, self.head, self.times = nn.Linear(2, 2), nn.Linear(2, 1), times

    def forward(self, h: Tensor) -> Tensor:
        for _ in range(self.times):
            h = self.cell(h)
        return self.head(h).sum()


@pytest.mark.broad
def test_a_printed_table_has_one_row_for_many_calls() -> None:
    model = gr.transform(_Again(40), [gr.on("error:*", Observe("norm")), gr.on("gradient:*", Observe("norm"))])
    for _ in range(3):
        model(torch.ones(1, 2)).backward()
    table = model.monitor.table()
    assert sum(row.address.startswith("norm@error:cell") for row in table.rows) == 40
    text = str(table)
    (line,) = [line for line in text.splitlines() if "error:cell" in line]
    assert "norm@error:cell#0-39" in line
    norms = [
        value for number in range(40) for value in model.monitor.history(f"norm@error:cell#{number}".removesuffix("#0"))
    ]
    for figure in (min(norms), max(norms), statistics.median(norms)):
        assert f"{figure:.4g}" in line
    assert text.count("\n") < 20
    assert "error:cell#17" not in table._repr_html_()
    few = gr.transform(_Again(2), gr.on("error:*", Observe("norm")))
    few(torch.ones(1, 2)).backward()
    assert "norm@error:cell#1" in str(few.monitor.table())


@pytest.mark.broad
@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("error:*", {"norm@error:cell", "norm@error:cell#1", "norm@error:head"}),
        ("error:cell", {"norm@error:cell", "norm@error:cell#1"}),
        ("error:cell#1", {"norm@error:cell#1"}),
        ("head*", {"norm@error:head", "norm@gradient:head.weight", "norm@gradient:head.bias"}),
        ("gradient:*.bias", {"norm@gradient:cell.bias", "norm@gradient:head.bias"}),
    ],
)
def test_a_table_of_some_sites(pattern: str, wanted: set[str]) -> None:
    policy = [
        gr.on("error:cell", Observe("norm")),
        gr.on("error:head", Observe("norm")),
        gr.on("gradient:*", Observe("norm")),
    ]
    model = gr.transform(_Again(2), policy)
    model(torch.ones(1, 2)).backward()
    assert {row.address for row in model.monitor.table(pattern).rows} == wanted
    with pytest.raises(KeyError, match=r"no record at 'error:nope'.*error:head"):
        model.monitor.table("error:nope")
