"""Train the kind of model that error clipping was built for, as it is, with clipped gradients, and with clipped errors.

A bidirectional GRU reads Python's help texts without their vowels; a GRU that attends to it writes the text with them.
The cells are called in a Python loop, so each time step is a site. The recurrent weights begin so large that errors
explode over the length of a sequence. ``python examples/seq2seq_attention.py`` trains each way from 8 seeds, prints
losses, clip rates and largest errors, and writes a picture of them by layer and time step.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm

ROWS, WIDTH, SCALE, RATE = 16, 32, 6.0, 1.0
VOWELS = "aeiou"
WAYS = {"plain": (math.inf, math.inf), "gradient clip": (math.inf, 1.0), "error clip": (0.01, math.inf)}
LAYERS = ("encoder.ahead", "encoder.back", "decoder.cell")


class Encoder(nn.Module):
    """Reads a sequence in both directions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ahead, self.back = nn.GRUCell(width, width), nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the states of both directions, ``[rows, steps, 2 * width]``."""
        ahead = back = x.new_zeros(x.shape[0], x.shape[2])
        forwards, backwards = [], []
        for step in range(x.shape[1]):
            ahead = self.ahead(x[:, step], ahead)
            forwards.append(ahead)
        for step in reversed(range(x.shape[1])):
            back = self.back(x[:, step], back)
            backwards.append(back)
        return torch.cat([torch.stack(forwards, 1), torch.stack(backwards[::-1], 1)], -1)


class Decoder(nn.Module):
    """Writes a sequence; at each step it attends to all states of the encoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.query = nn.GRUCell(3 * width, width), nn.Linear(width, 2 * width, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Return state and context of each step, ``[rows, steps, 3 * width]``."""
        state, context = x.new_zeros(x.shape[0], x.shape[2]), memory.new_zeros(memory.shape[0], memory.shape[2])
        written = []
        for step in range(x.shape[1]):
            state = self.cell(torch.cat([x[:, step], context], -1), state)
            weights = (memory @ self.query(state)[:, :, None]).squeeze(-1).softmax(-1)
            context = (weights[:, None] @ memory).squeeze(1)
            written.append(torch.cat([state, context], -1))
        return torch.stack(written, 1)


class Translator(nn.Module):
    """Encoder, attention and decoder; the last embedding is that of the start of a sequence."""

    def __init__(self, vocabulary: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.encoder, self.decoder = nn.Embedding(vocabulary + 1, width), Encoder(width), Decoder(width)
        self.head = nn.Linear(3 * width, vocabulary)

    def reset(self, seed: int) -> None:
        """Initialize from a seed, the recurrent weights ``SCALE`` times as large as keeps a norm."""
        torch.manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear | nn.GRUCell):
                module.reset_parameters()
        for cell in (self.encoder.ahead, self.encoder.back, self.decoder.cell):
            nn.init.normal_(cell.weight_hh, std=SCALE / cell.hidden_size**0.5)

    def forward(self, read: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of ``wanted``, ``[rows, steps]``, each step given the true past."""
        start = torch.full_like(wanted[:, :1], self.embed.num_embeddings - 1)
        past = self.embed(torch.cat([start, wanted[:, :-1]], 1))
        logits = self.head(self.decoder(past, self.encoder(self.embed(read))))
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def load_text() -> tuple[str, str]:
    """Return the help texts in lower case, blanks joined, and the characters in them."""
    text = re.sub(r"\s+", " ", " ".join(topics.values()).lower().encode("ascii", "ignore").decode())
    return text, "".join(sorted(set(text)))


def batches(count: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield texts without vowels, ``[ROWS, 3 * length // 4]``, and with them, ``[ROWS, length]``."""
    text, alphabet = load_text()
    numbers = {character: number for number, character in enumerate(alphabet)}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - length, (ROWS,), generator=generator).tolist()
        pieces = [text[start : start + length] for start in starts]
        room = 3 * length // 4
        bare = [re.sub(f"[{VOWELS}]", "", piece)[:room].ljust(room) for piece in pieces]
        read, wanted = ([[numbers[c] for c in piece] for piece in several] for several in (bare, pieces))
        yield torch.tensor(read), torch.tensor(wanted)


@dataclass(frozen=True)
class Runs:
    """Records of one way to train, from all seeds.

    Attributes:
        losses: ``[seeds, steps]``.
        total_norms: Of all gradients before clipping, ``[seeds, steps]``.
        errors: Norm of the error before its clip, of each layer ``[seeds, steps, calls]``.
        rates: Share of the seeds and steps in which the clip acted, of each layer ``[calls]``.
    """

    losses: np.ndarray
    total_norms: np.ndarray
    errors: Mapping[str, np.ndarray]
    rates: Mapping[str, np.ndarray]


def train(ways: Mapping[str, tuple[float, float]], *, seeds: int, steps: int, length: int) -> dict[str, Runs]:
    """Train each way from each seed; the model is rewritten once, for its bounds are tensors.

    Args:
        ways: Bounds of the error of a cell and of the total norm of the gradients; infinity measures only.
        seeds: How many seeds, from 0.
        steps: Training steps from each.
        length: Characters of a text.
    """
    at_cell, over_all = torch.tensor(math.inf), torch.tensor(math.inf)
    clips = [gr.on(f"error:{layer}", ClipByNorm(at_cell)) for layer in LAYERS]
    net = Translator(len(load_text()[1]))
    monitor = gr.Monitor(len(ways) * seeds * steps)
    model = gr.transform(net, [*clips, gr.on("gradient:*", ClipByGlobalNorm(over_all))], monitor=monitor)
    for error, total in ways.values():
        at_cell.fill_(error)
        over_all.fill_(total)
        for seed in range(seeds):
            net.reset(seed)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            for read, wanted in batches(steps, length, seed):
                optimizer.zero_grad()
                loss = model(read, wanted)
                loss.backward()
                monitor.log("loss", loss)
                optimizer.step()
    return {name: collect(monitor, number, len(ways), seeds, length) for number, name in enumerate(ways)}


def collect(monitor: gr.Monitor, way: int, ways: int, seeds: int, length: int) -> Runs:
    """Read the records of all seeds of one way."""

    def read(record: str, site: str) -> np.ndarray:
        every: np.ndarray = np.array(monitor.history(f"{record}@{site}")).reshape(ways, seeds, -1)
        return np.asarray(every[way])

    calls = {layer: length if layer.startswith("decoder") else 3 * length // 4 for layer in LAYERS}
    sites = {layer: [f"error:{layer}" + (f"#{n}" if n else "") for n in range(calls[layer])] for layer in LAYERS}
    errors = {layer: np.stack([read("norm", site) for site in sites[layer]], -1) for layer in LAYERS}
    factors = {layer: np.stack([read("factor", site) for site in sites[layer]], -1) for layer in LAYERS}
    rates = {layer: (factors[layer] < 1).mean((0, 1)) for layer in LAYERS}
    return Runs(read("loss", "run"), read("total_norm", "group:default"), errors, rates)


def describe(name: str, runs: Runs) -> str:
    """Return the figures of one way as text."""
    last = runs.losses[:, -5:].mean(1)
    lines = [
        f"{name}: loss {runs.losses[:, 0].mean():.3f} -> {last.mean():.3f}, mean over {len(last)} seeds of the last "
        f"{min(5, runs.losses.shape[1])} steps (best {last.min():.3f}, worst {last.max():.3f})",
        f"  total norm of all gradients: median {np.median(runs.total_norms):.3g}, most {runs.total_norms.max():.3g}",
    ]
    for layer in LAYERS:
        largest, rate = runs.errors[layer].max((0, 1)), 100 * runs.rates[layer]
        lines.append(
            f"  {layer}: largest error {largest.max():.3g} at call {largest.argmax()}, {largest[-1]:.3g} at the last; "
            f"clipped {rate.mean():.0f} % of the time, at most {rate.max():.0f} % (call {rate.argmax()})"
        )
    return "\n".join(lines)


def draw(found: Mapping[str, Runs], path: Path) -> str:
    """Draw the losses of all seeds, the largest errors and the clip rate by layer and time step."""
    figure, axes = plt.subplots(1, 3, figsize=(17, 4), layout="constrained")
    for color, (name, runs) in zip(("C3", "C0", "C2"), found.items(), strict=True):
        for number, losses in enumerate(runs.losses):
            axes[0].plot(losses, color=color, linewidth=0.7, alpha=0.4, label=name if number == 0 else None)
        axes[0].plot(runs.losses.mean(0), color=color, linewidth=2)
    axes[0].set(title="loss: each seed, and their mean", xlabel="training step", ylabel="nats per character")
    axes[0].legend()
    for color, layer in zip(("C0", "C1", "C4"), LAYERS, strict=True):
        for style, name in (("--", "plain"), (":", "gradient clip"), ("-", "error clip")):
            largest = found[name].errors[layer].max((0, 1))
            axes[1].semilogy(largest, style, color=color, linewidth=1.2, label=f"{layer}, {name}")
        axes[2].plot(100 * found["error clip"].rates[layer], color=color, label=layer)
    axes[1].set(title="largest error before its clip", xlabel="call of the cell", ylabel="norm")
    axes[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    axes[2].set(title="error clip: % of seeds and steps in which it acts", xlabel="call of the cell", ylim=(-3, 103))
    axes[2].legend()
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return str(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Train each way from all seeds, print the figures, draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=32, help="characters of a text")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the picture")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # the tensors are small
    found = train(WAYS, seeds=options.seeds, steps=options.steps, length=options.length)
    for name, runs in found.items():
        print(describe(name, runs))
    print(draw(found, options.out / "seq2seq_attention.png"))


if __name__ == "__main__":
    main()
