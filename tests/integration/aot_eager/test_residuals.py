"""Errors that pass an op unchanged, as those of residual sums: several sites share one tensor of the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByValue, Keep, NanToNum, Observe, Scale, Zero
from gradrewrite.testing import assert_matches_eager


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.1, 1.0, 4))
        self.delta = nn.Parameter(torch.linspace(-1.0, 1.0, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = gr.tap(torch.sin(self.w), "h")
        y = gr.tap(h + x, "y")
        q = gr.tap(self.delta + y.detach(), "q")
        return (y * 10).sum() + (q * 10).sum()


CLIP = ClipByValue(0.5)
X = torch.linspace(1.0, 2.0, 4)


@pytest.mark.long
@pytest.mark.parametrize(
    "policy",
    [
        [gr.on("error:y", CLIP), gr.on("error:h", Observe("max_abs", "norm"))],
        [gr.on("error:h", Observe("max_abs")), gr.on("error:y", [Scale(2.0), CLIP])],
        [gr.on("error:y", Zero()), gr.on("error:h", [Observe("zeros"), Scale(3.0)])],
        [gr.on("error:q", CLIP), gr.on("gradient:delta", Scale(2.0))],
        [gr.on("error:q", CLIP), gr.on("gradient:*", ClipByGlobalNorm(0.3))],
        [gr.on("error:q", CLIP), gr.on("gradient:delta", Observe("max_abs"))],
        [gr.on("error:y", lambda g: 3 * g), gr.on("error:h", lambda g: g + 1), gr.on("gradient:w", Observe("norm"))],
    ],
)
def test_actions_at_sites_that_share_an_error(policy: Any) -> None:
    assert_matches_eager(Residual(), policy, X, compiled=False)


def test_measurements_and_kept_tensors_are_those_of_their_site() -> None:
    policy = [gr.on("error:y", CLIP), gr.on("error:h", [Observe("max_abs"), Keep()]), gr.on("error:q", CLIP)]
    model = gr.transform(Residual(), [*policy, gr.on("gradient:delta", [Observe("max_abs"), Scale(2.0)])])
    model(X).backward()

    assert model.monitor.latest()["max_abs@error:h"] == 0.5
    assert model.monitor.latest()["max_abs@gradient:delta"] == 0.5
    assert [t.tolist() for t in model.monitor.kept().values()] == [[0.5] * 4]
    assert model.delta.grad.tolist() == [1.0] * 4


def test_a_check_sees_what_an_action_before_it_has_mended() -> None:
    class Infinite(Residual):
        def forward(self, x: Tensor) -> Tensor:
            y = gr.tap(gr.tap(torch.sin(self.w), "h") + x, "y")
            return (y * torch.tensor([1.0, torch.inf, 1.0, 1.0])).sum()

    mended = gr.transform(Infinite(), [gr.on("error:y", NanToNum()), gr.on("error:h", CheckFinite())])
    mended(X).backward()
    broken = gr.transform(Residual(), [gr.on("error:y", lambda g: g * torch.nan), gr.on("error:h", CheckFinite())])

    assert mended.monitor.latest()["nonfinite@error:h"] == 0
    with pytest.raises(gr.NonFiniteError) as caught:
        broken(X).backward()
    assert (str(caught.value.site), caught.value.note) == ("error:h", "")
    assert caught.value.op.startswith("y: <function")
