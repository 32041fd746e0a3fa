"""``gradrewrite demo``: two examples whose losses diverge, without and with clipping in the backward."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from gradrewrite.examples import character_model, regression
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.module import transform
from gradrewrite.monitoring.monitor import Monitor
from gradrewrite.viz import draw, plot

SEEDS = range(8)
REGRESSION_STEPS = 1000
TEXT_STEPS = 200


@dataclass
class Losses:
    """Losses by step, without and with the rewrite."""

    seed: int
    plain: list[float] = field(default_factory=list)
    rewritten: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """Results of one example."""

    runs: list[Losses]
    edits: tuple[Edit, ...]
    graph: JointGraph
    monitor: Monitor


def run(out: Path) -> Path:
    """Train both examples, print edits and losses, write ``demo.json`` and drawings into ``out``.

    The drawings of each example are a page (``regression.html``, ``text.html``), a ladder (``.svg``) and curves
    (``regression_curves.png``, ``text_curves.png``).

    Returns:
        The path of ``demo.json``.

    Raises:
        OSError: ``out`` cannot be written; raised before training.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "demo.json"
    path.touch()
    console, start = Console(), time.monotonic()
    first = _run_regression()
    _show_regression(console, first)
    log = _LogLines()
    second = _run_text(log)
    _show_text(console, second, log.lines)
    parts = {"regression": first, "text": second}
    path.write_text(json.dumps({name: _as_json(part) for name, part in parts.items()}, indent=1) + "\n")
    written = [str(path), *(name for half, part in parts.items() for name in _draw(out / half, part))]
    console.print(f"wrote {', '.join(written)} after {time.monotonic() - start:.0f} s", highlight=False)
    return path


def _run_regression() -> Part:
    base = regression.Regression()
    clipped = copy.deepcopy(base)
    model = transform(clipped, regression.POLICY)
    model.compile()
    runs = []
    for seed in tqdm(SEEDS, desc="y = x + 3, 8 seeds", unit="seed"):
        plain = regression.train(base, base, seed=seed, steps=10)
        runs.append(Losses(seed, plain, regression.train(clipped, model, seed=seed, steps=REGRESSION_STEPS)))
    graph = model.trace(torch.ones(regression.ROWS, 1))
    return Part(runs, model.explain().graphs[0].edits, graph, model.monitor)


def _run_text(log: _LogLines) -> Part:
    characters, vocabulary = character_model.load_text()
    torch.manual_seed(0)
    base = character_model.CharacterModel(vocabulary)
    model = transform(copy.deepcopy(base), list(character_model.POLICY))
    model.compile()
    losses = Losses(0)
    for net, name, history in ((base, "plain", losses.plain), (model, "rewritten", losses.rewritten)):
        torch.manual_seed(0)
        data = character_model.batches(characters, TEXT_STEPS)
        with log:
            bar = tqdm(data, desc=f"help topics, {name}", total=TEXT_STEPS, unit="step")
            history += character_model.train(net, bar)
    graph = model.trace(torch.zeros(character_model.ROWS, character_model.UNROLL + 1, dtype=torch.int64))
    return Part([losses], model.explain().graphs[0].edits, graph, model.monitor)


def _draw(path: Path, part: Part) -> list[str]:
    """Write the page, the ladder and the curves of one example; return their paths."""
    title = f"gradrewrite demo: {path.name}"
    drawing = draw(part.graph, monitor=part.monitor, title=title)
    curves = plot(part.monitor, title=title).render(f"{path}_curves", "png")
    return [drawing.render(path, "html"), drawing.render(path, "svg"), curves]


class _LogLines(logging.Handler):
    """Collects the log lines of clips inside a ``with`` block."""

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
    for losses in part.runs:
        figures = (losses.plain[0], losses.plain[4], losses.rewritten[0], losses.rewritten[-1])
        table.add_row(str(losses.seed), *(f"{f:.4g}" for f in figures))
    console.print(table)
    _show_edits(console, part.edits)


def _show_text(console: Console, part: Part, lines: Sequence[str]) -> None:
    (run_,) = part.runs
    for name, losses in (("plain", run_.plain), ("clipped", run_.rewritten)):
        first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
        console.print(f"help topics, {name}: loss {first:.3f} -> {last:.3f} nats (means of 10 steps)", highlight=False)
    _show_edits(console, part.edits)
    console.print(f"{len(lines)} log lines; the first:", highlight=False)
    for line in lines[:3]:
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


def _as_json(part: Part) -> dict[str, object]:
    edits = [{"site": str(e.site), "action": repr(e.action), "nodes": list(e.nodes)} for e in part.edits]
    return {"runs": [asdict(run_) for run_ in part.runs], "edits": edits}
