"""The Python code of documents runs, block by block; some pages have tests of their own."""

from __future__ import annotations

import importlib.util
import linecache
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite import passes, viz
from gradrewrite.cli import _COMMANDS, parse

from helpers import ROOT

PAGES = ROOT / "docs"
RUN = ["guide", "index", "pictures", "report", "diagnosis", "differences", "benchmarks", "train-step"]
TESTED_ELSEWHERE = [
    "audit",
    "backward",
    "cheatsheet",
    "distributed",
    "frameworks",
    "loops",
    "per-example",
    "saved-tensors",
    "several-losses",
    "state",
    "uses",
    "inner-gradients",
    "functions",
    "recipes",
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Sections of docs/comparison.md of which the first block needs a package.
RIVALS = {
    "TorchLens": "torchlens",
    "TransformerEngine": "transformer_engine.pytorch",
    "torchtitan": "torchtitan.observability.tensor_logging",
    "Opacus": "opacus",
    "TorchJD": "torchjd",
}


class Net(nn.Module):
    """An autoencoder with the names that pages use; with labels it returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cell = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.decoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).tanh()

    def decode(self, h: Tensor) -> Tensor:
        return self.decoder(h)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.cell(self.cell(self.encode(x)).tanh())
        for layer in self.layers:
            h = layer(h).softmax(-1)
        out = self.decode(h)
        return out if y is None else functional.cross_entropy(out, y)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 4), torch.randint(0, 4, (5,))


def names(code: str) -> dict[str, Any]:
    """Return the names that code assumes; ``model`` is plain where it is transformed or diagnosed."""
    net, monitor, (x, y) = Net(), gr.Monitor(), batch()
    plain = any(call in code for call in ("gr.transform(model", "gr.diagnose(", "gr.compare("))
    return {
        **{name: getattr(passes, name) for name in passes.__all__},
        **{"gr": gr, "viz": viz, "torch": torch, "x": x, "y": y, "net": net, "autoencoder": net, "f": net},
        "model": net if plain else gr.transform(net, gr.on("error:*", passes.Observe("norm")), monitor=monitor),
        "monitor": monitor,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "scaler": torch.amp.GradScaler("cpu"),
        "batches": [x, x] if "gr.diagnose(" in code else [[batch(), batch()]],
        "loss_fn": functional.cross_entropy,
        "training_step": lambda x, y: net(x, y).backward(),
        "another_policy": [],
    }


def run(code: str, known: dict[str, Any], path: Path) -> None:
    """Run code from a file, so that sites have lines; ``...`` on a line of its own is a forward and backward."""

    def train() -> None:
        known["model"](known["x"], known["y"]).backward()
        known["loss"] = known["model"](known["x"], known["y"])  # for a backward of the page

    known["train"] = train
    path.write_text(re.sub(r"^\.\.\.$", "train()", code, flags=re.MULTILINE))
    linecache.checkcache(str(path))
    exec(compile(path.read_text(), str(path), "exec"), known)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.sample(12)
@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("page", RUN)
def test_page(page: str, folder: Path) -> None:
    kept: dict[str, Any] = {}  # each block begins anew, but for a policy, a graph and definitions of the page
    for number, block in enumerate(BLOCK.findall((PAGES / f"{page}.md").read_text())):
        known = names(block) | kept
        if page == "report":
            for path in ("run.jsonl", "plain.jsonl", "wider.jsonl"):
                write_run(known["model"], known["x"], path)
        run(block, known, folder / f"block_{number}.py")
        kept = {name: known[name] for name in ("policy", "graph") if name in known}


def write_run(model: gr.RewrittenModule, x: Tensor, path: str) -> None:
    model.monitor.to_jsonl(path)
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        model.monitor.log("loss", loss)
    model.monitor.flush()


SECTIONS = {
    title.split(" ")[0].strip("`"): BLOCK.findall(text)
    for title, text in re.findall(r"^##? (.+?)\n(.*?)(?=^## |\Z)", (PAGES / "comparison.md").read_text(), re.M | re.S)
}


@pytest.mark.slow
@pytest.mark.parametrize("rival", list(SECTIONS)[1:])
def test_comparison(rival: str, folder: Path) -> None:
    code = SECTIONS[rival]
    if not is_installed(rival):
        code = code[1:]  # that of gradrewrite, where it does not need the other package
    script = folder / "section.py"
    script.write_text("\n".join([*SECTIONS["gradrewrite"], *code]))
    # In a process of its own: TorchLens wraps the functions of torch, and leaves them so.
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    if not code:
        pytest.skip(f"{RIVALS[rival]} is not installed")


def is_installed(rival: str) -> bool:
    top, *_ = package = RIVALS.get(rival, "torch").split(".")
    return importlib.util.find_spec(top) is not None and importlib.util.find_spec(".".join(package)) is not None


COMMANDS = sorted(
    {
        line.partition("  #")[0]
        for path in (ROOT / "README.md", *PAGES.glob("*.md"))
        for line in re.findall(r"(?:^|`)(gradrewrite [a-z]+ [^`\n]+)", path.read_text(), re.MULTILINE)
        if " ... " not in line and line.split()[1] in _COMMANDS
    }
)


@pytest.mark.pure
@pytest.mark.parametrize("line", COMMANDS)
def test_command_lines_have_known_arguments(line: str) -> None:
    _, command, *arguments = shlex.split(line)
    assert parse([command, *arguments]).command == command


@pytest.mark.pure
def test_pages_whose_code_runs() -> None:
    pages = {path.stem for path in PAGES.glob("*.md") if BLOCK.search(path.read_text())}
    assert pages == {*RUN, *TESTED_ELSEWHERE, "comparison"}
