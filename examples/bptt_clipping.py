"""Answer two questions of backpropagation through time with the health report: is it exploding, is clipping helping?

A tanh network with a recurrent weight of a spectral radius of about 3 reads long pieces of Python's help texts, one
character at a time. It is trained from the same start as it is, with all gradients clipped together, and with the error
clipped at every time step. ``python examples/bptt_clipping.py`` prints verdicts and figures of the three reports, and
writes the records, the reports and a picture. ``gradrewrite report bptt_error_clip.jsonl --baseline bptt_plain.jsonl``
makes a report again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.examples.character_model import CharacterModel, load_text
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm

ROWS, WIDTH, RADIUS, RATE = 8, 64, 3.0, 0.5


def policies(*, total: float = 1.0, error: float = 0.01) -> dict[str, list[gr.Policy]]:
    """Return the policies by name; a bound of infinity measures only."""
    bounds = {"plain": (math.inf, math.inf), "gradient clip": (math.inf, total), "error clip": (error, math.inf)}
    return {
        name: [gr.on("error:cell", ClipByNorm(at_cell)), gr.on("gradient:*", ClipByGlobalNorm(over_all))]
        for name, (at_cell, over_all) in bounds.items()
    }


def start(seed: int = 0) -> CharacterModel:
    """Return the model; with its random recurrent weight states are chaotic, and errors grow on their way back."""
    torch.manual_seed(seed)
    model = CharacterModel(load_text()[1], WIDTH)
    torch.nn.init.normal_(model.cell.keep.weight, std=RADIUS / WIDTH**0.5)
    return model


def batches(count: int, unroll: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield random pieces of the text, ``[ROWS, unroll + 1]``."""
    characters, _ = load_text()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(characters) - unroll - 1, (ROWS, 1), generator=generator)
        yield characters[starts + torch.arange(unroll + 1)]


def train(policy: Sequence[gr.Policy], *, steps: int, unroll: int, path: Path, seed: int = 0) -> gr.RewrittenModule:
    """Train with SGD, write the records to ``path``; the monitor of the returned model has them too."""
    model = gr.transform(start(seed), list(policy))
    path.unlink(missing_ok=True)
    model.monitor.to_jsonl(path)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in batches(steps, unroll, seed):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        model.monitor.log("loss", loss)
        optimizer.step()
    model.monitor.flush()
    return model


def error_norms(monitor: gr.Monitor, unroll: int) -> np.ndarray:
    """Return the norm of the error before its clip, ``[time step, training step]``."""
    names = ["norm@error:cell", *(f"norm@error:cell#{step}" for step in range(1, unroll))]
    return np.array([monitor.history(name) for name in names])


def describe(name: str, monitor: gr.Monitor, norms: np.ndarray, report: viz.Report) -> str:
    """Return the figures of one run as text."""
    losses, totals = monitor.history("loss@run"), monitor.history("total_norm@group:default")
    health = report.health
    clipped = [site for site in health.sites if site.rate > 0]
    strongest = min(clipped, key=lambda site: (site.median_factor, site.worst_factor), default=None)
    growth = (norms[0] / norms[-1]) ** (1 / max(1, len(norms) - 1))
    last = losses[-10:]
    return "\n".join(
        [
            f"{name}: loss {losses[0]:.3f} -> {sum(last) / len(last):.3f} (mean of the last {len(last)})",
            f"  error: grows by {growth[0]:.3f} per time step in step 0, median over the run {np.median(growth):.3f}; "
            f"largest norm {norms.max():.3g}",
            f"  total norm of the gradients: {totals[0]:.3g} in step 0, largest {max(totals):.3g}",
            f"  clips acted at {len(clipped)} of {len(health.sites)} sites, there in "
            f"{100 * np.mean([site.rate for site in clipped] or [0]):.0f} % of the steps"
            + (f"; strongest at {strongest.site}, median factor {strongest.median_factor:.4g}" if strongest else ""),
            f"  report: {health.verdict.headline}. {health.verdict.text}",
            f"  {health.loss}",
        ]
    )


def draw(runs: Mapping[str, gr.Monitor], norms: Mapping[str, np.ndarray], path: Path) -> str:
    """Draw the losses, and the norm of the error over time steps and training steps."""
    figure, axes = plt.subplots(1, 1 + len(runs), figsize=(15, 3.8), layout="constrained")
    for name, monitor in runs.items():
        axes[0].plot(monitor.history("loss@run"), label=name, linewidth=1)
    axes[0].set(title="loss (nats per character)", xlabel="training step")
    axes[0].legend()
    finite = np.concatenate([one[np.isfinite(one) & (one > 0)] for one in norms.values()])
    limits = math.log10(finite.min()), math.log10(finite.max())
    for axis, (name, one) in zip(axes[1:], norms.items(), strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            shown = axis.imshow(np.log10(one), aspect="auto", origin="lower", vmin=limits[0], vmax=limits[1])
        axis.set(title=f"{name}: norm of the error", xlabel="training step", ylabel="time step")
    figure.colorbar(shown, ax=axes[1:], label="log10, before the clip of the site")
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return str(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Train three times, report, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--unroll", type=int, default=80, help="time steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the picture")
    parser.add_argument("--records", type=Path, default=Path(), help="folder of records and reports")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # the tensors are small
    runs, norms = {}, {}
    plain = options.records / "bptt_plain.jsonl"
    for name, policy in policies().items():
        path = options.records / f"bptt_{name.replace(' ', '_')}.jsonl"
        model = train(policy, steps=options.steps, unroll=options.unroll, path=path, seed=options.seed)
        runs[name], norms[name] = model.monitor, error_norms(model.monitor, options.unroll)
        report = viz.report(path, baseline=None if path == plain else plain, title=name)
        print(describe(name, model.monitor, norms[name], report))
        print(" ", report.render(path.with_suffix("")))
    print(draw(runs, norms, options.out / "bptt_clipping.png"))


if __name__ == "__main__":
    main()
