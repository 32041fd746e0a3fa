"""Rates of clips in TensorBoard and in the logs of frameworks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradrewrite as gr
from gradrewrite.integrations._attachment import Attachment
from gradrewrite.monitoring.clip_rates import ClipRates
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue

from helpers import Probe, run_probe
from models.clips import step_of

NAN = float("nan")


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
    settings: dict[str, Any] = {"max_consecutive_skips": 50, "update_ratios": False, "options": {}}
    policy = gr.on("step:*", ClipByGlobalNorm(1.0))
    attachment = Attachment(policy, compile=False, monitor=gr.Monitor(capacity=3), records="*", **settings)
    net = Probe()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    attachment.attach(net, [optimizer], None)

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
