"""Lines of a file that say which records belong to which clip; rates of clips in TensorBoard and logs of frameworks."""

from __future__ import annotations

import gc
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite.diagnostics.clipping import clips_of
from gradrewrite.diagnostics.run_file import clip_of_json
from gradrewrite.diagnostics.run_log import last_run
from gradrewrite.integrations._attachment import Attachment, Settings
from gradrewrite.ir.reports import NormClip, ValueClip
from gradrewrite.monitoring.writers import ClipRates, JsonLines
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue, Observe

from helpers import Probe, run_probe
from models.clips import step_of
from models.small import TwoLayers

NAN = float("nan")


def by_callback(site: gr.Site) -> ClipByValue | None:
    return ClipByValue(0.5, log=True) if site.kind == "input" else None


def trained(policy: gr.Policy, path: Path) -> list[gr.Step]:
    torch.manual_seed(0)
    model = gr.transform(TwoLayers(3, 4, 2), policy)
    model.monitor.to_jsonl(path)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 3, requires_grad=True)).square().sum().backward()
    model.monitor.flush()
    return model.monitor.steps()


@pytest.mark.broad
def test_a_file_has_the_clips_of_the_graphs(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    actions = [ClipByNorm(0.1), Observe("norm"), ClipByNorm(9.0, log=True)]
    group = ClipByGlobalNorm(1.0, log=True)
    steps = trained([gr.on("error:*", actions), by_callback, gr.on("gradient:*.weight", group)], path)
    assert gr.read_jsonl(path) == steps
    assert path.read_text().count('"clips"') == 1

    clips = steps[0].clips
    found = [(clip.site, clip.action.partition("(")[0], clip.rule, str(clip.factor)) for clip in clips]
    first, second = sorted({str(clip.site) for clip in clips if clip.kind == "error"})
    assert sorted(found) == sorted(
        [
            *((site, "ClipByNorm", "error:*", f"{record}@{site}") for site in (first, second) for record in FACTORS),
            ("input:x", "ClipByValue", "by_callback", "factor@input:x"),
            ("group:default", "ClipByGlobalNorm", "gradient:*.weight", "factor@group:default"),
        ]
    )
    reports = {clip.site: clip.report for clip in clips}
    assert isinstance(reports["input:x"], ValueClip)
    assert isinstance(reports["group:default"], NormClip)
    assert reports["group:default"].shares is not None
    logging = reports[first]
    assert isinstance(logging, NormClip)
    assert (str(logging.norm), str(logging.bound)) == (f"norm.2@{first}", f"bound.2@{first}")
    assert logging.log is not None
    for clip in clips_of(last_run(steps)):
        assert clip.acted == [factor != 1 for factor in clip.factors]


FACTORS = ("factor", "factor.2")


def test_a_file_has_the_ops_at_which_clips_stand(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    clip = ClipByNorm(0.1, log=True)
    trained(gr.on("error:*", clip), path)
    ops = [line["ops"] for line in map(json.loads, path.read_text().splitlines()) if "ops" in line]
    assert [sorted(op for op, _ in one.values()) for one in ops] == [["one/linear", "two/linear"]]


def test_calls_and_regions_keep_their_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh())
    shared = layers[0]
    model = gr.transform(nn.Sequential(shared, layers[2], shared), gr.on("error:*", ClipByNorm(1.0)), regions="?")
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    (step,) = model.monitor.steps()
    assert {(clip.name, clip.call, clip.site) for clip in step.clips} == {
        ("0", 0, "error:0"),
        ("1", 0, "error:1"),
        ("0", 1, "error:0#1"),
    }
    assert all(str(clip.factor) in step.records for clip in step.clips)


def test_sets_of_graphs_are_declared_once(tmp_path: Path) -> None:
    clipped, observed = {"norm@error:a": 2.0, "bound@error:a": 1.0}, {"norm@error:a": 3.0}
    steps = [step_of(n, observed if n % 2 else clipped) for n in range(4)]
    sink = JsonLines(tmp_path / "run.jsonl")
    for step in steps:
        sink.write(step)
    lines = [json.loads(line) for line in sink.path.read_text().splitlines()]
    assert [line["graphs"] for line in lines] == [0, 0, 1, 1, 0, 1]
    assert gr.read_jsonl(sink.path) == steps
    (clip,) = clips_of(last_run(steps))
    assert (clip.steps, clip.factors[0]) == ([0, 1, 2, 3], 0.5)


def test_another_bound_for_the_same_records_makes_no_second_clip() -> None:
    records = {"norm@error:a": 2.0, "bound@error:a": 1.0}
    first = step_of(0, records)
    (clip,) = first.clips
    changed = gr.Step(1, first.records, (replace(clip, action="ClipByNorm(max_norm=0.5)"),))
    run = last_run([first, changed])
    assert [clip.action for clip in run.clips] == ["ClipByNorm(max_norm=0.5)"]
    assert [clip.steps for clip in clips_of(run)] == [[0, 1]]


def test_names_of_records_make_no_clip(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    records = {"norm@error:a": 2.0, "bound@error:a": 1.0, "factor@error:a": 0.5, "loss@run": 1.0}
    path.write_text("".join(json.dumps({"step": n, "records": records}) + "\n" for n in range(30)))
    run = last_run(gr.read_jsonl(path))
    assert clips_of(run) == []
    assert run.series["norm@error:a"].values == [2.0] * 30


@pytest.mark.parametrize(
    "text",
    [
        '{"step": 0, "graphs": 1, "records": {}}',
        '{"graphs": 0, "clips": {}}',
        '{"graphs": 0, "clips": [3]}',
        '{"graphs": 0, "clips": [], "ops": [3]}',
        '{"graphs": 0, "clips": [], "ops": {"a": ["a/relu"]}}',
        '{"graphs": 0, "clips": [{"report": {"by": "norm", "log": null}}]}',
        '{"graphs": -1, "clips": []}',
    ],
)
def test_what_is_no_line_of_clips(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(ValueError, match=r"run.jsonl, line 1: .*mend or remove the line"):
        gr.read_jsonl(path)
    with pytest.raises(ValueError, match="wanted the records of a clip"):
        clip_of_json(None)


class Writer:
    def __init__(self) -> None:
        self.rates: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if tag.startswith("rate"):
            self.rates.append((tag, value, step))


@pytest.mark.pure
def test_share_of_the_steps_in_which_a_clip_acted() -> None:
    rates = ClipRates()
    for factor in (0.5, 1.0, NAN, 1.0):
        by_norm = {"total_norm.2@group:a": 9.0, "factor.2@group:a": factor, "bound.2@group:a": 1.0}
        rates.add(step_of(0, {"clipped@error:h": 0.0, "factor@error:h": 1.0} | by_norm))
    assert rates.take() == {"rate.2@group:a": 0.5, "rate@error:h": 0.0}
    assert rates.take() == {}


@pytest.mark.pure
def test_factor_of_a_user_is_none_of_a_clip() -> None:
    rates = ClipRates()
    rates.add(gr.Step(0, {"norm@error:a": 2.0, "bound@error:a": 1.0, "factor@error:a": 0.5}))
    assert rates.take() == {}


def test_tensorboard_has_the_rate_of_what_was_written_together() -> None:
    writer = Writer()
    actions = [ClipByNorm(2.0), ClipByValue(0.9, log=True)]
    model = gr.transform(Probe(), gr.on("error:h", actions))
    model.monitor.to_tensorboard(writer)
    run_probe(model, 3.0, 0.1, 1.0, 1.0)
    assert writer.rates == []
    model.monitor.flush()
    model.monitor.flush()
    run_probe(model, 9.0)
    model.monitor.flush()

    assert writer.rates == [
        ("rate/error:h", 0.25, 3),
        ("rate.2/error:h", 0.75, 3),
        ("rate/error:h", 1.0, 4),
        ("rate.2/error:h", 1.0, 4),
    ]


def test_frameworks_get_the_rate_since_their_last_log() -> None:
    policy = gr.on("step:*", ClipByGlobalNorm(1.0))
    attachment = Attachment(Settings(policy, compile=False, records="*", folder=False, options={}), gr.Monitor(3))
    net = Probe()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    attachment.attach(net, [optimizer], None, "", is_resumed=False)

    def figures(*errors: float) -> dict[str, float]:
        for error in errors:
            optimizer.zero_grad()
            run_probe(net, error)
            optimizer.step()
        return attachment.figures()

    first = figures(3.0, 0.1)
    assert first["rate/step:group:default"] == 0.5
    assert first["factor/step:group:default"] == 1.0
    assert first["total_norm/step:group:default"] == pytest.approx(0.1 * 2**0.5)
    assert figures(3.0)["rate/step:group:default"] == 1.0
    assert "rate/step:group:default" not in figures()
    assert figures(9.0, 9.0, 9.0, 0.1, 0.1)["rate/step:group:default"] == pytest.approx(1 / 3)  # of those in the buffer
    attachment.detach()


@pytest.mark.broad
def test_waiting_steps_of_garbage_are_written_before_its_file_is_closed(tmp_path: Path) -> None:
    model = gr.transform(Probe(), gr.on("error:h", Observe("norm")))
    model.monitor.to_jsonl(tmp_path / "run.jsonl")
    run_probe(model, 1.0, 2.0, 3.0)
    del model
    gc.collect()  # a cycle, whose weak references end before any __del__ is called

    assert [step.step for step in gr.read_jsonl(tmp_path / "run.jsonl")] == [0, 1, 2]


def test_a_file_is_closed_without_the_module_os(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the interpreter ends, globals of modules are None before the last objects are deleted."""
    file = JsonLines(tmp_path / "run.jsonl")
    number = file._file
    monkeypatch.setattr("gradrewrite.monitoring.writers.os", None)
    del file

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
