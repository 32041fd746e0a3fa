"""The code of docs/backward.md runs, and prints the output of the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import KeepZeros

from helpers import ROOT

PAGE = (ROOT / "docs" / "backward.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
OUTPUTS = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
RECIPES = re.findall(r"^\| [^|]* \| `(gr\.on\(.*\))` \|$", PAGE, re.MULTILINE)


@pytest.mark.broad
def test_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    known: dict[str, Any] = {}
    for number, (block, output) in enumerate(zip(BLOCKS, OUTPUTS, strict=True)):
        path = tmp_path / f"block_{number}.py"
        path.write_text(block)
        exec(compile(block, str(path), "exec"), known)
        assert capsys.readouterr().out == output


class Recipe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.relu(self.domain(x)).round().softmax(-1) * torch.arange(3)).sum()


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe: str) -> None:
    torch.manual_seed(0)
    rule = eval(recipe, {"gr": gr, "KeepZeros": KeepZeros})
    through = [] if "round" in recipe else [gr.on("backward:*/round", lambda op: op.error)]
    x = torch.randn(4, 3)
    found = []
    for policy in (through, [*through, rule]):
        torch.manual_seed(1)
        model = gr.transform(Recipe(), policy)
        torch.nn.init.normal_(model.domain.weight)
        model(x).backward()
        found.append(model.domain.weight.grad)

    assert len(RECIPES) == 5
    assert found[1] is not None
    assert found[1].isfinite().all()
    assert torch.equal(found[0], found[1]) == ("KeepZeros" in recipe)
