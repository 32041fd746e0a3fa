"""The threshold of a clip by value is recorded where it logs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.diagnostics.clipping import clips_of
from gradrewrite.diagnostics.run_log import last_run
from gradrewrite.passes import ClipByValue


def run(*actions: ClipByValue, steps: int = 1, change: Tensor | None = None) -> gr.RewrittenModule:
    torch.manual_seed(0)
    model = gr.transform(nn.Linear(3, 2), lambda site: actions if site.kind == "gradient" and site.op == "" else None)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        if change is not None:
            change.mul_(2)
    return model


def test_a_number() -> None:
    model = run(ClipByValue(0.25, log=True))

    (clip, _) = clips_of(last_run(model.monitor.steps()))
    assert (clip.site, clip.sizes, clip.bounds, clip.acted) == ("gradient:weight", [1.0], [0.25], [True])
    assert model.monitor.latest()["limit@gradient:weight"] == 0.25


def test_a_tensor_is_read_at_every_backward() -> None:
    bound = torch.tensor(0.5)
    model = run(ClipByValue(bound, log=True), steps=3, change=bound)

    (clip, _) = clips_of(last_run(model.monitor.steps()))
    assert clip.bounds == [0.5, 1.0, 2.0]
    assert clip.acted == [True, False, False]


def test_two_bounds_have_no_one_threshold() -> None:
    model = run(ClipByValue(0.5, min=-2.0, log=True))

    (clip, _) = clips_of(last_run(model.monitor.steps()))
    assert clip.bounds == [pytest.approx(float("nan"), nan_ok=True)]


@pytest.mark.long
def test_the_second_clip_of_a_site_has_its_own() -> None:
    model = run(ClipByValue(0.75, log=True), ClipByValue(0.25, log=True))

    records = model.monitor.steps()[0].records
    assert records["limit@gradient:weight"] == 0.75
    assert records["limit.2@gradient:weight"] == 0.25
    assert records["max_abs.2@gradient:weight"] == 0.75
