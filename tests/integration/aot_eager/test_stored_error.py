"""A stored tensor that loses precision, from the training to the doctor and the report."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.cli import main
from gradrewrite.passes import Observe, Store

WIDE, SMALL = 1024, 0.0039  # less than half of a step of int8 rows whose largest element is 1


def test_error_in_doctor_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All elements of a row but the first become 0, so that the error is the norm of the others."""
    net = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 8))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(WIDE))
        net[0].bias.zero_()
    x = torch.full((8, WIDE), SMALL)
    x[:, 0] = 1
    wanted = math.sqrt((WIDE - 1) * SMALL**2 / (1 + (WIDE - 1) * SMALL**2))
    model = gr.transform(net, [gr.on("saved:*", Store("int8")), gr.on("saved:*", Observe("stored_error"))])
    for _ in range(6):
        loss = model(x).square().mean()
        loss.backward()
        model.monitor.log("loss", loss)
    path = tmp_path / "run.jsonl"
    model.monitor.to_jsonl(path)

    assert model.monitor.latest()["stored_error@saved:1"] == pytest.approx(wanted, rel=1e-4)
    assert main(["doctor", str(path)]) == 0
    assert f"saved:1 ({wanted:.4g})" in capsys.readouterr().out
    page = Path(viz.report(path).render(tmp_path / "report")).read_text()
    assert "Imprecise stored tensors" in page
    assert '"saved:1":{"stored_error":[' in page
