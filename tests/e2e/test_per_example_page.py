"""The code of docs/per-example.md against the gradients of single examples."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from helpers import ROOT
from models.per_example import example_gradients

PAGE = (ROOT / "docs" / "per-example.md").read_text()


@pytest.mark.long
def test_the_page() -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    inputs = "torch.randn(16, 4), torch.randint(0, 3, (16,))"
    assert f"model({inputs})" in code
    known: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(code.replace(f"model({inputs})", f"batch = {inputs}\nmodel(*batch)"), known)
    plain = known["Classifier"]()
    plain.load_state_dict(known["model"].state_dict())
    wanted = example_gradients(plain, *known["batch"])
    norms = {site.name: t for site, t in known["norms"].items()}
    moments = {site.name: t for site, t in known["moments"].items()}
    assert norms.keys() == moments.keys() == wanted.keys()
    for name, own in wanted.items():
        torch.testing.assert_close(norms[name], own.flatten(1).norm(dim=1))
        torch.testing.assert_close(moments[name], own.square().mean(0))
    total = torch.stack([own.flatten(1).square().sum(1) for own in wanted.values()]).sum(0).sqrt()
    assert known["share"] == pytest.approx(float((total > 1.0).double().mean()))


def test_the_noise_scale(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of the page, up to rounding on other processors."""
    _, code, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (output,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    found, wanted = ([line.split() for line in text.splitlines()] for text in (capsys.readouterr().out, output))
    assert [step for step, _ in found] == [step for step, _ in wanted]
    assert [float(v) for _, v in found] == pytest.approx([float(v) for _, v in wanted], rel=0.05)


def test_factors() -> None:
    *_, code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    known: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(code, known)
    kept = [n for n in range(16) if n != 5]
    loss = (known["net"](known["x"][kept]) - known["y"][kept]).square().sum() / (16 * 3)
    for p, wanted in zip(known["net"].parameters(), torch.autograd.grad(loss, known["net"].parameters()), strict=True):
        torch.testing.assert_close(p.grad, wanted)
    assert known["outliers"] == 1
