"""The code of docs/uses.md runs, and prints the output of the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByNorm, Scale, Zero

from helpers import ROOT

PAGE = (ROOT / "docs" / "uses.md").read_text()
(BLOCK,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(OUTPUT,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
RECIPES = re.findall(r"^\| [^|]* \| `(gr\.on\(.*\))` \|$", PAGE, re.MULTILINE)


@pytest.mark.broad
def test_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "block.py"
    path.write_text(BLOCK)
    known: dict[str, Any] = {}
    exec(compile(BLOCK, str(path), "exec"), known)
    assert capsys.readouterr().out == OUTPUT


class Recipe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head, self.domain = nn.GRUCell(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.sin()
        out = x.new_zeros(())
        for _ in range(3):
            h = self.cell(x, h)
            out = out + (self.head(h) + self.domain(h) + (h + 1)).square().mean()
        return out


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe: str) -> None:
    rule = eval(recipe, {"gr": gr, "ClipByNorm": ClipByNorm, "Scale": Scale, "Zero": Zero})
    found = []
    policies: list[Any] = [[], rule]
    for policy in policies:
        torch.manual_seed(1)
        model = gr.transform(Recipe(), policy)
        model(torch.ones(4, 3)).backward()
        found.append([model.cell.weight_hh.grad.clone(), model.head.weight.grad.clone()])
    (plain, head), (changed, same) = found

    assert len(RECIPES) == 5
    assert not torch.allclose(plain, changed)
    assert torch.equal(head, same)
