"""``gradrewrite demo``: two models that explode, with and without clipping in the backward."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from gradrewrite.ir.edits import Edit
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.module import RewrittenModule, transform
from gradrewrite.monitoring.monitor import Monitor
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue
from gradrewrite.policy.rules import on
from gradrewrite.viz import draw, plot

SEEDS = range(8)
REGRESSION_STEPS = 1000
TEXT_STEPS = 200
UNROLL = 40
ROWS = 16


@dataclass
class Losses:
    """Losses per step, without and with the rewrite."""

    seed: int
    plain: list[float] = field(default_factory=list)
    rewritten: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """One half of the demo: its runs, its edits, and what pictures are made of."""

    runs: list[Losses]
    edits: tuple[Edit, ...]
    graph: JointGraph
    monitor: Monitor


class Regression(nn.Module):
    """The network of PaddlePaddle's gradient-clip guide: 1-32-32-1, no activations, a first weight too large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 32), nn.Linear(32, 32), nn.Linear(32, 1))

    def reset(self) -> None:
        """Begin again from the current seed."""
        linears = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        for layer in linears:
            layer.reset_parameters()
        with torch.no_grad():
            linears[0].weight += 2

    def forward(self, x: Tensor) -> Tensor:
        """Mean squared error of ``y = x + 3``; ``x`` is ``[rows, 1]``."""
        return functional.mse_loss(self.layers(x), x + 3)


class Cell(nn.Module):
    """One step of a plain recurrent network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read, self.keep = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """The next state ``[rows, width]``."""
        return torch.tanh(self.read(x) + self.keep(state))


class CharacterModel(nn.Module):
    """Predicts the next character; the cell runs once for each, so errors flow back through time."""

    def __init__(self, vocabulary: int, width: int = 96) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(vocabulary, width), Cell(width), nn.Linear(width, vocabulary)
        with torch.no_grad():
            self.cell.keep.weight.copy_(1.2 * torch.eye(width))  # grows what flows back through it

    def forward(self, characters: Tensor) -> Tensor:
        """Mean cross-entropy in nats; ``characters`` is ``[rows, steps + 1]`` of int64."""
        read, wanted = self.embed(characters[:, :-1]), characters[:, 1:]
        state = read.new_zeros(read.shape[0], read.shape[2])
        states = []
        for step in range(read.shape[1]):
            state = self.cell(read[:, step], state)
            states.append(state)
        return functional.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), wanted.flatten())


def run(out: Path) -> Path:
    """Run both halves, print what was inserted and what it did, write ``demo.json`` and pictures into ``out``.

    The pictures of each half are a page (``regression.html``, ``text.html``), a ladder (``.svg``) and curves
    (``regression_curves.png``, ``text_curves.png``).

    Returns:
        The path of ``demo.json``.

    Raises:
        OSError: ``out`` cannot be written; raised before anything runs.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "demo.json"
    path.touch()
    console, start = Console(), time.monotonic()
    regression = _run_regression()
    _show_regression(console, regression)
    log = _Log()
    text = _run_text(log)
    _show_text(console, text, log)
    parts = {"regression": regression, "text": text}
    path.write_text(json.dumps({name: _as_json(part) for name, part in parts.items()}, indent=1) + "\n")
    written = [str(path), *(name for half, part in parts.items() for name in _draw(out / half, part))]
    console.print(f"wrote {', '.join(written)} after {time.monotonic() - start:.0f} s", highlight=False)
    return path


def _run_regression() -> Part:
    base = Regression()
    model = transform(copy.deepcopy(base), on("gradient:*", ClipByNorm(1.0)))
    model.compile()
    runs = []
    for seed in tqdm(SEEDS, desc="y = x + 3, 8 seeds", unit="seed"):
        losses = Losses(seed)
        for net, steps, history in ((base, 10, losses.plain), (model, REGRESSION_STEPS, losses.rewritten)):
            torch.manual_seed(seed)
            net.reset()
            batches = (5 * torch.rand(ROWS, 1) for _ in range(steps))
            history += _train(net, torch.optim.SGD(net.parameters(), lr=0.01), batches)
        runs.append(losses)
    return Part(runs, model.explain().graphs[0].edits, model.trace(torch.ones(ROWS, 1)), model.monitor)


def _run_text(log: _Log) -> Part:
    text = "\n".join(topics.values())
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    characters = torch.tensor([alphabet[c] for c in text])
    torch.manual_seed(0)
    base = CharacterModel(len(alphabet))
    policy = [on("error:cell", ClipByValue(1e-3, log=True)), on("gradient:*", ClipByGlobalNorm(1.0))]
    model: RewrittenModule = transform(copy.deepcopy(base), policy)
    model.compile()
    losses = Losses(0)
    for net, name, history in ((base, "plain", losses.plain), (model, "rewritten", losses.rewritten)):
        torch.manual_seed(0)
        batches = tqdm(_batches(characters, TEXT_STEPS), desc=f"help topics, {name}", total=TEXT_STEPS, unit="step")
        with log:
            history += _train(net, torch.optim.SGD(net.parameters(), lr=1.0), batches)
    graph = model.trace(torch.zeros(ROWS, UNROLL + 1, dtype=torch.int64))
    return Part([losses], model.explain().graphs[0].edits, graph, model.monitor)


def _batches(characters: Tensor, count: int) -> Iterable[Tensor]:
    for _ in range(count):
        starts = torch.randint(0, len(characters) - UNROLL - 1, (ROWS, 1))
        yield characters[starts + torch.arange(UNROLL + 1)]


def _train(
    model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]
) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(batch)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if isinstance(model, RewrittenModule):
            model.monitor.log("loss", loss)
        optimizer.step()
    return losses


def _draw(path: Path, part: Part) -> list[str]:
    """Write the page, the ladder and the curves of one half; returns their paths."""
    drawing = draw(part.graph, monitor=part.monitor, title=f"gradrewrite demo: {path.name}")
    curves = plot(part.monitor, title=f"gradrewrite demo: {path.name}")
    return [drawing.render(path, "html"), drawing.render(path, "svg"), curves.render(f"{path}_curves", "png")]


class _Log(logging.Handler):
    """Keeps the log lines of clips while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self._logger = logging.getLogger("gradrewrite")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> None:
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)


def _show_regression(console: Console, part: Part) -> None:
    table = Table(title="y = x + 3, loss", title_justify="left")
    for column in ("seed", "plain: first", "5th step", "clipped: first", f"{REGRESSION_STEPS}th step"):
        table.add_column(column, justify="right")
    for run_ in part.runs:
        figures = (run_.plain[0], run_.plain[4], run_.rewritten[0], run_.rewritten[-1])
        table.add_row(str(run_.seed), *(f"{f:.4g}" for f in figures))
    console.print(table)
    _show_edits(console, part.edits)


def _show_text(console: Console, part: Part, log: _Log) -> None:
    (run_,) = part.runs
    for name, losses in (("plain", run_.plain), ("clipped", run_.rewritten)):
        first, last = _mean(losses[:10]), _mean(losses[-10:])
        console.print(f"help topics, {name}: loss {first:.3f} -> {last:.3f} nats (means of 10 steps)", highlight=False)
    _show_edits(console, part.edits)
    console.print(f"{len(log.lines)} log lines; the first:", highlight=False)
    for line in log.lines[:3]:
        console.print(f"  {line}", highlight=False)


def _show_edits(console: Console, edits: Sequence[Edit]) -> None:
    table = Table(title="inserted into the backward", title_justify="left")
    for column in ("sites", "action", "first nodes"):
        table.add_column(column, overflow="fold")
    groups = Counter((e.site.kind, e.site.name if e.site.kind == "error" else "*", repr(e.action)) for e in edits)
    for (kind, name, action), count in groups.items():
        first = next(e for e in edits if (e.site.kind, repr(e.action)) == (kind, action))
        label = f"{kind}:{name}" + (f" x {count}" if count > 1 else "")
        table.add_row(label, action, f"{', '.join(first.nodes[:3])}, ...")
    console.print(table)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _as_json(part: Part) -> dict[str, object]:
    edits = [{"site": str(e.site), "action": repr(e.action), "nodes": list(e.nodes)} for e in part.edits]
    return {"runs": [asdict(run_) for run_ in part.runs], "edits": edits}
