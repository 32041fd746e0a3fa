"""A statistic, a report and an action that are nothing but examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import Observe
from gradrewrite.policy.recording import record_ratio
from gradrewrite.sites import Kind

from models.small import TwoLayers


@dataclass(frozen=True)
class HalvedByDepth:
    kinds: ClassVar[frozenset[Kind]] = frozenset(("gradient",))
    has_units: ClassVar[bool] = False

    def apply(self, tensor: Tensor) -> Tensor:
        raise AssertionError("lowered to a factor")

    def factor_at(self, depth: int) -> float:
        return 0.5**depth


def ratio(gradient: Tensor) -> Tensor:
    record_ratio(gradient.amax(), gradient.amin())
    return gradient


@pytest.mark.parametrize("engine", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_toys(engine: str) -> None:
    torch.manual_seed(0)
    plain = TwoLayers(3, 4, 2)
    plain(torch.ones(2, 3)).square().sum().backward()
    want = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
    plain.zero_grad()
    model = gr.transform(plain, gr.on("gradient:*", [Observe("negative"), ratio, HalvedByDepth()]))
    if engine == "inductor":
        model.compile()
    model(torch.ones(2, 3)).square().sum().backward()
    got = model.monitor.latest()
    for name, parameter in model.named_parameters():
        g = want[name]
        torch.testing.assert_close(parameter.grad, g * 0.5 ** name.count("."))
        records = (got[f"{record}@gradient:{name}"] for record in ("negative", "above", "below"))
        expected = (g < 0).float().mean(), g.amax(), g.amin()
        assert tuple(records) == pytest.approx(tuple(map(float, expected)))
