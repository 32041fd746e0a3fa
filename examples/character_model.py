"""Train a recurrent network on Python's help texts, with the error of every step of the recurrence clipped.

The recurrent weight starts at 1.2 times the identity, so errors grow on their way back through time.
``python examples/character_model.py --steps 200`` prints losses, log lines and records, and writes curves to
``character_model.png``.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.passes import ClipByGlobalNorm, ClipByValue

ROWS = 16
UNROLL = 40
POLICY = (gr.on("error:cell", ClipByValue(1e-3, log=True)), gr.on("gradient:*", ClipByGlobalNorm(1.0)))


class Cell(nn.Module):
    """One step of a plain recurrent network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read, self.keep = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """Return the next state, ``[rows, width]``."""
        return torch.tanh(self.read(x) + self.keep(state))


class CharacterModel(nn.Module):
    """Predicts the next character; the cell is called once for each, so errors flow back through time."""

    def __init__(self, vocabulary: int, width: int = 96) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(vocabulary, width), Cell(width), nn.Linear(width, vocabulary)
        with torch.no_grad():
            self.cell.keep.weight.copy_(1.2 * torch.eye(width))

    def forward(self, characters: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats; ``characters`` is ``[rows, steps + 1]`` of int64."""
        read, wanted = self.embed(characters[:, :-1]), characters[:, 1:]
        state = read.new_zeros(read.shape[0], read.shape[2])
        states = []
        for step in range(read.shape[1]):
            state = self.cell(read[:, step], state)
            states.append(state)
        return functional.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), wanted.flatten())


def load_text() -> tuple[Tensor, int]:
    """Return the help texts as character numbers, and the size of the alphabet."""
    text = "\n".join(topics.values())
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text]), len(numbers)


def batches(characters: Tensor, count: int) -> Iterator[Tensor]:
    """Yield random pieces of the text, ``[ROWS, UNROLL + 1]``."""
    for _ in range(count):
        starts = torch.randint(0, len(characters) - UNROLL - 1, (ROWS, 1))
        yield characters[starts + torch.arange(UNROLL + 1)]


def train(model: nn.Module, data: Iterable[Tensor]) -> list[float]:
    """Train with SGD; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for batch in data:
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        if isinstance(model, gr.RewrittenModule):
            model.monitor.log("loss", loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> None:
    """Train with the policy, print losses and clips, plot the records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the curves")
    options = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("gradrewrite").setLevel(logging.INFO)
    torch.manual_seed(0)
    characters, vocabulary = load_text()
    model = gr.transform(CharacterModel(vocabulary), list(POLICY))
    model.compile()
    losses = train(model, batches(characters, options.steps))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats")
    print(model.monitor.table())
    print(viz.plot(model.monitor, title="character model").render(options.out / "character_model"))


if __name__ == "__main__":
    main()
