"""Train two models plainly, and with all that the backward needs kept as int8.

The models are the recurrent network of ``character_model.py`` and a small GPT, both on Python's help texts.
``python examples/train_with_less_memory.py --seeds 3 --steps 300`` prints losses, bytes and time of each way, from the
same starts on the same batches, and draws the losses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import gradrewrite as gr
from gradrewrite.examples.character_model import POLICY, UNROLL, CharacterModel, batches, load_text
from gradrewrite.passes import ClipByGlobalNorm, Observe, Store

LAST = 20  # steps, whose mean loss counts
SAVED = (gr.on("saved:*", Store("int8")), gr.on("saved:*", Observe("stored_error", every=10)))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and around a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next features, ``[rows, steps, width]``."""
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, 2))
        x = x + self.proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


class Gpt(nn.Module):
    """Predicts the next character from those before it."""

    def __init__(self, vocabulary: int, width: int = 96, layers: int = 2, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats; ``characters`` is ``[rows, steps + 1]`` of int64."""
        read, wanted = characters[:, :-1], characters[:, 1:]
        x = self.embed(read) + self.position.weight[: read.shape[1]]
        return functional.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), wanted.flatten())


MODELS: dict[str, tuple[Callable[[int], nn.Module], Sequence[Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "character model": (CharacterModel, POLICY, lambda parameters: torch.optim.SGD(parameters, lr=1.0)),
    "GPT": (Gpt, [gr.on("gradient:*", ClipByGlobalNorm(1.0))], lambda p: torch.optim.AdamW(p, lr=3e-3)),
}


@dataclass
class Way:
    """The trainings of one model in one way."""

    model: str
    name: str
    losses: list[list[float]] = field(default_factory=list)  # of each seed, by step
    seconds: list[float] = field(default_factory=list)  # processor time of each step
    kept: int = 0  # bytes that the forward keeps for the backward
    peak: int = 0  # bytes that a step has at most, over those that were there before it
    error: float = 0.0  # largest relative error of a stored tensor

    @property
    def final(self) -> list[float]:
        """The mean loss of the last steps of each seed."""
        return [statistics.fmean(losses[-LAST:]) for losses in self.losses]

    def __str__(self) -> str:
        final = " ".join(f"{loss:.4f}" for loss in self.final)
        sizes = f"{self.kept / 2**20:6.2f} {self.peak / 2**20:6.2f} {statistics.median(self.seconds) * 1e3:8.1f}"
        return f"{self.model:16} {self.name:6} {sizes} {self.error:8.2%}   {final}"


def allocations(run: Callable[[], Any]) -> list[int]:
    """Return the bytes of each allocation in order, negative for freed memory."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the most bytes that a call has at one time, by the reports of the allocator."""
    total = largest = 0
    for number in allocations(run):
        total += number
        largest = max(largest, total)
    return largest


def train(name: str, steps: int, seeds: int, unroll: int, *, compiled: bool) -> tuple[Way, Way]:
    """Train a model in both ways with each seed, and print the results."""
    make, policy, optimizer_of = MODELS[name]
    characters, vocabulary = load_text()
    plain, int8 = Way(name, "plain"), Way(name, "int8")
    for way, saved in ((plain, ()), (int8, SAVED)):
        model = gr.transform(make(vocabulary), [*policy, *saved])
        if compiled:
            model.compile()
        for seed in range(seeds):
            torch.manual_seed(seed)
            model.load_state_dict(make(vocabulary).state_dict())  # one compilation serves all seeds
            data = [batch[:, : unroll + 1] for batch in batches(characters, steps)]
            run(model, optimizer_of(model.parameters()), data, way)
    memory = model.memory(data[0])
    plain.kept, int8.kept = memory.plain_bytes, memory.policy_bytes
    print(plain, int8, sep="\n")
    return plain, int8


def run(model: gr.RewrittenModule, optimizer: torch.optim.Optimizer, data: Sequence[Tensor], way: Way) -> None:
    """Train from the model's present state, and add the figures to a way."""
    losses = []

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        losses.append(loss.item())

    for batch in data:
        start = time.process_time()
        step(batch)
        optimizer.step()
        way.seconds.append(time.process_time() - start)
        errors = [value for key, value in model.monitor.latest().items() if key.startswith("stored_error@")]
        way.error = max([way.error, *errors])
    way.losses.append(losses[: len(data)])
    optimizer.zero_grad()
    way.peak = min(peak_bytes(lambda: step(data[-1])) for _ in range(2))  # one of them measures no errors


def draw(ways: Sequence[Way], path: Path) -> str:
    """Draw the losses of each seed, one panel for a model."""
    figure, axes = plt.subplots(1, len(MODELS), figsize=(10, 4), layout="constrained", sharey=True)
    for axis, name in zip(axes, MODELS, strict=True):
        for number, way in enumerate(way for way in ways if way.model == name):
            for losses in way.losses:
                axis.plot(
                    losses, color=f"C{number}", linewidth=0.8, label=way.name if losses is way.losses[0] else None
                )
        axis.set(title=name, xlabel="step", ylabel="loss (nats)")
        axis.legend(frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return str(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Train each model in each way, print, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--unroll", type=int, default=UNROLL, help="characters of a text")
    parser.add_argument("--compile", action="store_true", help="compile each model with Inductor")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the picture")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # the tensors are small
    columns = f"{'model':16} {'way':6} {'kept':>6} {'peak':>6} {'ms/step':>8} {'error':>8}"
    print(f"{columns}   mean loss of the last {LAST} steps, by seed")
    trained = [train(name, options.steps, options.seeds, options.unroll, compiled=options.compile) for name in MODELS]
    print("kept for the backward, and peak of a step: MiB; error: the largest stored_error")
    print(draw([way for pair in trained for way in pair], options.out / "train_with_less_memory.png"))


if __name__ == "__main__":
    main()
