"""Train two models with exploding losses, plain and with clips in the backward: ``gradrewrite demo``.

One fits a line, the other is a recurrent network on Python's help texts. ``python examples/demo.py --out folder``
prints losses and edits, and writes ``index.html``: the losses of both, plain and clipped, then links to a health
report, the rewritten graph as a page and as a ladder, and the records of all runs. ``demo.json`` has the losses of all
seeds and all edits.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.examples import exploding_text, regression
from gradrewrite.passes import Observe

SEEDS = range(8)
PLAIN_STEPS, REGRESSION_STEPS, TEXT_STEPS = 10, 1000, 150

_FILES = {
    "_curves.png": "loss and norm of both runs",
    "_report.html": "health report: the verdict on the clipped run, how strongly clips acted, the plain run",
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
{curves}
<h2>Files</h2>
{links}
<p><a href="demo.json">demo.json</a> has the losses of all seeds, and all edits.</p></body></html>
"""


@dataclass(frozen=True)
class Training:
    """One model, trained as it is and with clips.

    Attributes:
        title: What was trained, and what was clipped.
        plain: The model that is only observed.
        clipped: The model with clips.
        inputs: An input, to trace it with.
        losses: Losses of both by step, for each seed.
    """

    title: str
    plain: gr.RewrittenModule
    clipped: gr.RewrittenModule
    inputs: Tensor
    losses: dict[int, tuple[list[float], list[float]]]

    @property
    def shown(self) -> tuple[list[float], list[float]]:
        """The losses of the last seed."""
        return self.losses[max(self.losses)]

    @property
    def edits(self) -> Sequence[gr.Edit]:
        """The edits of the clipped model."""
        return self.clipped.explain().graphs[0].edits


def train_regression() -> Training:
    """Fit y = x + 3 from eight seeds; the records are those of the last one."""
    losses = {}
    for seed in tqdm(SEEDS, desc="y = x + 3, 8 seeds", unit="seed"):
        if seed in (SEEDS[0], SEEDS[-1]):
            nets = regression.Regression(), regression.Regression()
            plain, clipped = observed(nets[0]), gr.transform(nets[1], regression.POLICY)
            clipped.compile()
        before = regression.train(nets[0], plain, seed=seed, steps=PLAIN_STEPS)
        losses[seed] = before, regression.train(nets[1], clipped, seed=seed, steps=REGRESSION_STEPS)
    title = f"y = x + 3, every gradient clipped to a norm of 1, seed {SEEDS[-1]}"
    return Training(title, plain, clipped, torch.ones(regression.ROWS, 1), losses)


def train_text() -> Training:
    """Train the exploding model twice, on the same pieces of text."""
    models = []
    for policy in (None, list(exploding_text.POLICY)):
        torch.manual_seed(0)
        net = exploding_text.ExplodingModel()
        models.append(observed(net) if policy is None else gr.transform(net, policy, loops="rolled"))
    models[1].compile()
    losses = []
    for model, name in zip(models, ("plain", "clipped"), strict=True):
        torch.manual_seed(0)
        data = exploding_text.batches(TEXT_STEPS)
        losses.append(exploding_text.train(model, tqdm(data, f"help topics, {name}", TEXT_STEPS, unit="step")))
    title = "A recurrent network on Python's help texts, the error of every time step clipped to a norm of 0.01"
    inputs = torch.zeros(exploding_text.ROWS, exploding_text.UNROLL + 1, dtype=torch.int64)
    return Training(title, models[0], models[1], inputs, {0: (losses[0], losses[1])})


def observed(net: nn.Module) -> gr.RewrittenModule:
    """Return a model that records the norms of its gradients, and trains as it is."""
    return gr.transform(net, gr.on("gradient:*", Observe("norm")))


@contextlib.contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collect the log lines of clips."""
    logger, handler = logging.getLogger("gradrewrite.monitor"), BufferingHandler(1 << 20)
    lines: list[str] = []
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        lines += [record.getMessage() for record in handler.buffer]


def run(out: Path) -> Path:
    """Train both, print edits and losses, and write everything into ``out``; return ``demo.json``.

    Raises:
        OSError: ``out`` cannot be written; before training.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "demo.json"
    path.touch()
    console, start, threads = Console(), time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    try:
        trainings = {"regression": train_regression()}
        show_regression(console, trainings["regression"])
        with log_lines() as lines:
            trainings["text"] = train_text()
        show_text(console, trainings["text"], lines)
    finally:
        torch.set_num_threads(threads)
    path.write_text(json.dumps({name: as_json(training) for name, training in trainings.items()}, indent=1) + "\n")
    parts = [written(out / name, training) for name, training in trainings.items()]
    curves, links = map("\n".join, zip(*parts, strict=True))
    (out / "index.html").write_text(_PAGE.format(curves=curves, links=links), encoding="utf-8")
    console.print(f"wrote {out / 'index.html'} after {time.monotonic() - start:.0f} s", highlight=False)
    return path


def written(path: Path, training: Training) -> tuple[str, str]:
    """Write the files of one training, and return its parts of the index: the losses, and links."""
    title, clipped, plain = f"gradrewrite demo: {path.name}", f"{path}_clipped.jsonl", f"{path}_plain.jsonl"
    for name, model in ((clipped, training.clipped), (plain, training.plain)):
        Path(name).unlink(missing_ok=True)
        model.monitor.to_jsonl(name)
    report = viz.report(clipped, baseline=plain, title=title)
    report.render(f"{path}_report")
    viz.plot(clipped, baseline=plain, title=title).render(f"{path}_curves", "png")
    drawing = viz.draw(training.clipped.trace(training.inputs), monitor=training.clipped.monitor, title=title)
    drawing.render(path, "html")
    drawing.render(path, "svg")
    draw_losses(*training.shown, f"{path}_losses.svg")
    files = {f"{path.name}{ending}": text for ending, text in _FILES.items()}
    links = "".join(f'<li><a href="{name}">{name}</a>: {text}</li>' for name, text in files.items())
    curves = (
        f"<h2>{html.escape(training.title)}</h2><p>{html.escape(seen(*training.shown))}</p>"
        f'<img alt="losses by step, plain and clipped" src="{path.name}_losses.svg">'
    )
    return curves, f"<h3>{path.name}</h3><p>{html.escape(report.health.loss)}</p><ul>{links}</ul>"


def seen(plain: Sequence[float], clipped: Sequence[float]) -> str:
    """Return the message of two curves of losses, in one sentence."""
    bad = next((step for step, loss in enumerate(plain) if not math.isfinite(loss)), None)
    end = (
        f"is not finite from step {bad} on"
        if bad is not None
        else f"peaks at {max(plain):.4g} and ends at {plain[-1]:.4g}"
    )
    steps = f"in {len(clipped)} steps, and never exceeds {max(clipped):.4g}"
    return f"Plain, the loss {end}; clipped, it goes from {clipped[0]:.4g} to {clipped[-1]:.4g} {steps}."


def draw_losses(plain: Sequence[float], clipped: Sequence[float], path: str) -> None:
    """Draw both losses into one panel, up to ten times the largest of the clipped run."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    for name, losses, color in (("plain", plain, "#d62728"), ("clipped", clipped, "#1f77b4")):
        axes.plot(losses, label=name, color=color, linewidth=1.5, marker="x" if len(losses) < len(clipped) else "")
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.set_ylim(0.8 * min(clipped), min(10 * max(clipped), 1.25 * max(filter(math.isfinite, [*plain, *clipped]))))
    axes.legend()
    figure.savefig(path)


def show_regression(console: Console, training: Training) -> None:
    """Print first and last losses of all seeds, and the edits."""
    table = Table(title="y = x + 3, loss", title_justify="left")
    for column in ("seed", "plain: first", "5th step", "clipped: first", f"{REGRESSION_STEPS}th step"):
        table.add_column(column, justify="right")
    for seed, (plain, clipped) in training.losses.items():
        table.add_row(str(seed), *(f"{loss:.4g}" for loss in (plain[0], plain[4], clipped[0], clipped[-1])))
    console.print(table)
    show_edits(console, training.edits)


def show_text(console: Console, training: Training, lines: Sequence[str]) -> None:
    """Print first and last losses, the edits, and the first log lines."""
    for name, losses in zip(("plain", "clipped"), training.losses[0], strict=True):
        first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
        console.print(f"help topics, {name}: loss {first:.3f} -> {last:.3f} nats (means of 10 steps)", highlight=False)
    for loop in training.clipped.explain().graphs[0].loops:
        console.print(f"compiled once: {loop}", highlight=False, soft_wrap=True)
    show_edits(console, training.edits)
    console.print(f"{len(lines)} log lines; the first:", *lines[:3], sep="\n  ", highlight=False)


def show_edits(console: Console, edits: Sequence[gr.Edit]) -> None:
    """Print equal actions at calls of one module, or at all gradients, on one line."""
    table = Table(title="inserted into the backward", title_justify="left")
    for column in ("sites", "action", "first nodes"):
        table.add_column(column, overflow="fold")
    groups = Counter((e.site.kind, e.site.name if e.site.kind == "error" else "*", repr(e.action)) for e in edits)
    for (kind, name, action), count in groups.items():
        first = next(e for e in edits if (e.site.kind, repr(e.action)) == (kind, action))
        table.add_row(f"{kind}:{name} x {count}", action, f"{', '.join(first.nodes[:3])}, ...")
    console.print(table)


def as_json(training: Training) -> dict[str, object]:
    """Return losses and edits, as JSON takes them."""
    edits = [{"site": str(e.site), "action": repr(e.action), "nodes": list(e.nodes)} for e in training.edits]
    runs = [{"seed": seed, "plain": both[0], "rewritten": both[1]} for seed, both in training.losses.items()]
    return {"runs": runs, "edits": edits}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gradrewrite_demo"), help="folder for what it writes")
    run(parser.parse_args(argv).out)


if __name__ == "__main__":
    main()
