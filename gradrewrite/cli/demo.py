"""``gradrewrite demo``: two diverging examples, without and with clipping in the backward."""

from __future__ import annotations

import argparse
import contextlib
import copy
import html
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from tqdm import tqdm

from gradrewrite.cli.messages import Refused
from gradrewrite.diagnostics.run_log import Step
from gradrewrite.examples import character_model, regression
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.module import transform
from gradrewrite.monitoring.monitor import Monitor
from gradrewrite.monitoring.writers import plain_number
from gradrewrite.viz import Report, draw, plot, report

SEEDS = range(8)
REGRESSION_STEPS = 1000
TEXT_STEPS = 200


_NOTES = {
    "_report.html": "health report: the verdict on the clipped run, how strongly clips acted, the plain run",
    "_curves.png": "curves of the clipped run; loss and norms of the plain run beside them",
    ".html": "the rewritten backward graph as a page to search, fold and click through",
    ".svg": "the same graph as a drawing",
    "_clipped.jsonl": "records of the clipped run, as monitor.to_jsonl writes them",
    "_plain.jsonl": "loss and norms of the plain run, in the same form",
}
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>gradrewrite demo</title>
<style>body {{ font: 15px/1.5 Verdana, Arial, sans-serif; margin: 20px auto; max-width: 1000px; padding: 0 16px }}
img {{ width: 100% }} li {{ margin: 4px 0 }}</style></head>
<body><h1>gradrewrite demo</h1>
<p>Two small models whose losses blow up in training, once as they are and once with clips in their backward pass.
Begin with a health report.</p>
{parts}
<p><a href="demo.json">demo.json</a> has the losses of all seeds, and all edits.</p></body></html>
"""


@dataclass
class Losses:
    """Losses by step, without and with the rewrite."""

    seed: int
    plain: list[float] = field(default_factory=list)
    rewritten: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """Results of one example."""

    title: str  # what was trained, and what was clipped
    runs: list[Losses]  # losses of all seeds
    edits: tuple[Edit, ...]  # what was inserted
    graph: JointGraph  # rewritten graph
    monitor: Monitor  # what the rewritten model reported
    plain: list[Step]  # losses and norms of the plain model, with the last seed


def demo(options: argparse.Namespace) -> None:
    """Run the demo; see ``run``."""
    try:
        run(options.out)
    except OSError as err:
        raise Refused(f"cannot write to {options.out}: {err.strerror}; choose another folder with --out") from err


def run(out: Path) -> Path:
    """Train both examples, print edits and losses, and write everything into ``out``; return ``demo.json``.

    Of each example there are a page (``regression.html``, ``text.html``), a ladder (``.svg``), the records of the
    clipped and of the plain run (``_clipped.jsonl``, ``_plain.jsonl``), curves (``_curves.png``) and a health report
    (``_report.html``); ``index.html`` explains and links all. OSError before training if ``out`` cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "demo.json"
    path.touch()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    try:
        return _run(out, path)
    finally:
        torch.set_num_threads(threads)


def _run(out: Path, path: Path) -> Path:
    console, start = Console(), time.monotonic()
    first = _run_regression()
    _show_regression(console, first)
    log = _LogLines()
    second = _run_text(log)
    _show_text(console, second, log.lines)
    parts = {"regression": first, "text": second}
    path.write_text(json.dumps({name: _as_json(part) for name, part in parts.items()}, indent=1) + "\n")
    drawn = {half: _draw(out / half, part) for half, part in parts.items()}
    written = [_write_index(out, parts, drawn), str(path), *(name for _, names in drawn.values() for name in names)]
    console.print(f"wrote {', '.join(written)} after {time.monotonic() - start:.0f} s", highlight=False)
    return path


def _run_regression() -> Part:
    base = regression.Regression()
    clipped = copy.deepcopy(base)
    model = transform(clipped, regression.POLICY)
    model.compile()
    runs = []
    for seed in tqdm(SEEDS, desc="y = x + 3, 8 seeds", unit="seed"):
        norms = _Norms(base)
        with norms:
            plain = regression.train(base, base, seed=seed, steps=10)
        runs.append(Losses(seed, plain, regression.train(clipped, model, seed=seed, steps=REGRESSION_STEPS)))
    graph = model.trace(torch.ones(regression.ROWS, 1))
    edits, title = (
        model.explain().graphs[0].edits,
        f"y = x + 3, every gradient clipped to a norm of 1, seed {SEEDS[-1]}",
    )
    return Part(title, runs, edits, graph, model.monitor, norms.steps(plain))


def _run_text(log: _LogLines) -> Part:
    characters, vocabulary = character_model.load_text()
    torch.manual_seed(0)
    base = character_model.CharacterModel(vocabulary)
    model = transform(copy.deepcopy(base), list(character_model.POLICY))
    model.compile()
    losses, norms = Losses(0), _Norms(base)
    for net, name, history in ((base, "plain", losses.plain), (model, "rewritten", losses.rewritten)):
        torch.manual_seed(0)
        data = character_model.batches(characters, TEXT_STEPS)
        with log, norms if net is base else contextlib.nullcontext():
            bar = tqdm(data, desc=f"help topics, {name}", total=TEXT_STEPS, unit="step")
            history += character_model.train(net, bar)
    graph = model.trace(torch.zeros(character_model.ROWS, character_model.UNROLL + 1, dtype=torch.int64))
    title = "A recurrent network on Python's help texts, the error of every step of the recurrence clipped by value"
    edits = model.explain().graphs[0].edits
    return Part(title, [losses], edits, graph, model.monitor, norms.steps(losses.plain))


def _draw(path: Path, part: Part) -> tuple[Report, list[str]]:
    title = f"gradrewrite demo: {path.name}"
    clipped, plain = f"{path}_clipped.jsonl", f"{path}_plain.jsonl"
    last = part.monitor.steps()[-len(part.runs[-1].rewritten) :]  # the steps of the last seed
    _write_steps(clipped, [Step(n, step.records) for n, step in enumerate(last)])
    _write_steps(plain, part.plain)
    drawing = draw(part.graph, monitor=part.monitor, title=title)
    health = report(clipped, baseline=plain, title=title)
    curves = plot(clipped, baseline=plain, title=title)
    written = [health.render(f"{path}_report"), curves.render(f"{path}_curves", "png")]
    return health, [*written, drawing.render(path, "html"), drawing.render(path, "svg"), clipped, plain]


def _write_steps(path: str, steps: Sequence[Step]) -> None:
    rows = [{"step": s.step, "records": {key: plain_number(v) for key, v in s.records.items()}} for s in steps]
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _write_index(out: Path, parts: Mapping[str, Part], drawn: Mapping[str, tuple[Report, list[str]]]) -> str:
    sections = []
    for half, (health, files) in drawn.items():
        names = [Path(file).name for file in files]
        links = "".join(f'<li><a href="{name}">{name}</a>: {_NOTES[name.removeprefix(half)]}</li>' for name in names)
        sections.append(
            f"<h2>{html.escape(parts[half].title)}</h2><p>{html.escape(health.health.loss)}</p><ul>{links}</ul>"
            f'<a href="{half}_report.html"><img alt="loss and norms of {half}" src="{half}_curves.png"></a>'
        )
    page = out / "index.html"
    page.write_text(_PAGE.format(parts="\n".join(sections)), encoding="utf-8")
    return str(page)


class _Norms:
    """Collects the norms of a plain model's gradients inside a ``with`` block, at each step of an optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._rows: list[dict[str, Tensor]] = []

    def __enter__(self) -> None:
        self._handle = register_optimizer_step_pre_hook(self._note)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def steps(self, losses: Sequence[float]) -> list[Step]:
        """Return steps as a monitor has them, with the loss of each."""
        rows = zip(self._rows, losses, strict=True)
        return [
            Step(n, {**{key: float(norm) for key, norm in norms.items()}, "loss@run": loss})
            for n, (norms, loss) in enumerate(rows)
        ]

    def _note(self, *_: object) -> None:
        known = ((name, parameter.grad) for name, parameter in self._model.named_parameters())
        self._rows.append({f"norm@gradient:{name}": grad.norm() for name, grad in known if grad is not None})


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
