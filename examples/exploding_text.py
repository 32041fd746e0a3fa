"""Train a recurrent network with exploding errors, plain and clipped.

It reads Python's help texts; the error is clipped at each time step. Activations stay bounded (a sine), errors grow
1.7-fold a time step on their way back, so that a plain training leaves no finite number after a few dozen steps. It is
the network of the README. ``python examples/exploding_text.py --steps 100`` prints the losses of both.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite.passes import ClipByNorm, Observe

ROWS, UNROLL, WIDTH, RATE = 16, 49, 64, 0.5
POLICY = (gr.on("error:wh", ClipByNorm(0.01, log=True)),)


class ExplodingModel(nn.Module):
    """Predicts the next character; ``wh`` is called once for each, so errors flow back through time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.wh, self.head = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 128)
        nn.init.normal_(self.wh.weight, std=2.5 / WIDTH**0.5)

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats; ``text`` is ``[rows, steps + 1]`` of int64."""
        state, states = self.embed.weight.new_zeros(len(text), WIDTH), []
        for read in self.embed(text[:, :-1]).unbind(1):
            state = torch.sin(self.wh(state) + read)
            states.append(state)
        return functional.cross_entropy(self.head(torch.stack(states, 1)).mT, text[:, 1:])


def batches(count: int) -> Iterator[Tensor]:
    """Yield random pieces of text, ``[ROWS, UNROLL + 1]``, of ASCII."""
    text = torch.tensor([min(ord(character), 127) for character in "".join(topics.values())])
    for _ in range(count):
        yield text[torch.randint(len(text) - UNROLL - 1, (ROWS, 1)) + torch.arange(UNROLL + 1)]


def train(model: gr.RewrittenModule, data: Iterable[Tensor]) -> list[float]:
    """Train with SGD; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for text in data:
        loss = model(text)
        optimizer.zero_grad()
        loss.backward()
        model.monitor.log("loss", loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> None:
    """Train plain and clipped, and print the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(argv)
    for name, policy in (("plain", [gr.on("gradient:*", Observe("norm"))]), ("clipped", list(POLICY))):
        torch.manual_seed(0)
        model = gr.transform(ExplodingModel(), policy)
        losses = train(model, batches(options.steps))
        print(f"{name:8} loss {losses[0]:.2f} -> {sum(losses[-10:]) / len(losses[-10:]):.2f}")


if __name__ == "__main__":
    main()
