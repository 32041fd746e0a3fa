"""Four small trainings and their health reports: ``python tests/models/health_runs.py --out folder``.

The reports have neutral names, ``a.html`` to ``d.html``: a reader who knows nothing of the runs is to say which is
healthy, whose bound is too low, where a layer explodes and where gradients vanish, and what to change.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, Observe

CHARACTERS, CONTEXT, ROWS, STEPS = 128, 8, 64, 150
KINDS = {"a": "exploding", "b": "healthy", "c": "vanishing", "d": "clip acts always"}


class NextCharacter(nn.Module):
    """Predicts a character of Python's help texts from the eight before it."""

    def __init__(self, depth: int, activation: Callable[[Tensor], Tensor], *, residual: bool, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, width)
        self.mix = nn.Linear(CONTEXT * width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, CHARACTERS)
        self.activation, self.residual = activation, residual

    def forward(self, characters: Tensor) -> Tensor:
        """Return the mean loss of the last of ``CONTEXT + 1`` characters, ``[rows, CONTEXT + 1]``."""
        state = self.mix(self.embed(characters[:, :-1]).flatten(1))
        for layer in self.layers:
            change = self.activation(layer(state))
            state = state + change if self.residual else change
        return functional.cross_entropy(self.head(state), characters[:, -1])


def policy(bound: float) -> list[gr.Policy]:
    """Return clips of the errors of all layers and of all gradients together; infinite bounds only measure."""
    rules = [gr.on("error:layers.*", ClipByNorm(bound)), gr.on("gradient:*", Observe("norm"))]
    return [*rules, gr.on("step:*", ClipByGlobalNorm(100 * bound))]


def make(kind: str) -> tuple[NextCharacter, float, float]:
    """Return the model of a kind of run, the bound of its clips, and its learning rate."""
    torch.manual_seed(0)
    if kind == "vanishing":
        return NextCharacter(14, torch.sigmoid, residual=False), 0.1, 0.3
    if kind == "exploding":
        model = NextCharacter(6, torch.relu, residual=False)
        with torch.no_grad():
            model.layers[3].weight.mul_(1000)
        return model, 0.1, 0.1
    return NextCharacter(6, torch.tanh, residual=True), 1e-3 if kind == "clip acts always" else 0.1, 0.1


def train(kind: str, path: Path, *, clips: bool) -> Path:
    """Train one model, and write its records as JSON lines."""
    net, bound, rate = make(kind)
    model = gr.transform(net, policy(bound if clips else float("inf")))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=rate), model, update_ratios=True)
    text = torch.tensor([ord(c) for c in "".join(topics.values()) if ord(c) < CHARACTERS])
    torch.manual_seed(1)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT, (ROWS, 1))
        loss = model(text[starts + torch.arange(CONTEXT + 1)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.monitor.log("loss", loss)
    path.unlink(missing_ok=True)
    model.monitor.to_jsonl(path)
    return path


def main(argv: Sequence[str] | None = None) -> None:
    """Train all, and write runs and reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("health_runs"))
    torch.set_num_threads(1)  # the tensors are small
    out = parser.parse_args(argv).out
    (out / "runs").mkdir(parents=True, exist_ok=True)
    for name, kind in KINDS.items():
        run = train(kind, out / "runs" / f"{name}.jsonl", clips=True)
        plain = train(kind, out / "runs" / f"{name}_without_clips.jsonl", clips=False)
        report = viz.report(run, baseline=plain, title=f"run {name}")
        print(f"{report.render(out / name)}: {report.health.verdict}")


if __name__ == "__main__":
    main()
