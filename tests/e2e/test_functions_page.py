"""The code of docs/functions.md runs, and prints the output of the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr

from helpers import ROOT

PAGE = (ROOT / "docs" / "functions.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
RECIPES = re.findall(r"^\| [^|]* \| `(gr\.\w+\(.*\))` \|$", PAGE, re.MULTILINE)


@pytest.mark.broad
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_blocks(number: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (code, output), path = BLOCKS[number], tmp_path / "block.py"
    path.write_text(code)
    exec(compile(code, str(path), "exec"), {})
    assert capsys.readouterr().out == output


class Masked(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.mask: Tensor
        self.register_buffer("mask", (torch.arange(inputs * outputs).view(outputs, inputs) % 2).float())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.mask, self.bias) + 1e-6 * self.weight.sum()


class Recipe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = Masked(3, 3), Masked(3, 3), Masked(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return 10 * self.left(h).square().sum() + self.right(h).square().sum()


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_recipes(number: int) -> None:
    rule, found = eval(RECIPES[number], {"gr": gr, "torch": torch}), list[Tensor]()
    policies: list[Any] = [[], rule]
    for policy in policies:
        torch.manual_seed(1)
        model = gr.transform(Recipe(), policy)
        model(torch.ones(4, 3)).backward()
        found.append(model.body.weight.grad.clone())

    assert not torch.allclose(*found)
    assert found[1].isfinite().all()
