"""Train on Python's help texts with both kinds of weight decay, under momentum and under Adam.

``DecayWeights`` shrinks every weight by the same share per step, whatever the optimizer. ``L2`` adds the decay to the
gradient, as Caffe's solvers do: momentum accumulates it and the learning rate multiplies it, and Adam divides it by the
size of the gradients, so that weights without a gradient of their own lose far more than others.
``python examples/weight_decay.py --steps 300`` shows that on the embeddings of characters that never occur and of those
that do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite.passes import L2, ClipByGlobalNorm, DecayWeights

CONTEXT, ROWS, CHARACTERS = 6, 64, 128
RATE = 2e-3
DECAYS = {"DecayWeights": DecayWeights(RATE), "L2": L2(RATE)}
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "SGD, momentum 0.9": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


class NextCharacter(nn.Module):
    """Predicts a character from the ones before it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, width)
        self.hidden, self.head = nn.Linear(CONTEXT * width, 128), nn.Linear(128, CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the mean loss of the last of ``CONTEXT + 1`` characters, ``[rows, CONTEXT + 1]``."""
        state = torch.tanh(self.hidden(self.embed(characters[:, :-1]).flatten(1)))
        return functional.cross_entropy(self.head(state), characters[:, -1])


def train(text: Tensor, optimize: Callable[[Iterable[Tensor]], Any], decay: Any, steps: int) -> tuple[float, Tensor]:
    """Train from the same start; return the last losses' mean and the share of its length that each embedding keeps."""
    torch.manual_seed(0)
    # Decay is no business of the biases; the clip sees the gradient of the loss and, with L2, of the decay.
    policy = [gr.on("step:*weight", decay), gr.on("step:*", ClipByGlobalNorm(1.0))]
    model = gr.transform(NextCharacter(), policy)
    optimizer = gr.guard(optimize(model.parameters()), model)
    before = model.embed.weight.detach().norm(dim=1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (ROWS,))
        optimizer.zero_grad()
        loss = model(text[starts[:, None] + torch.arange(CONTEXT + 1)])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / len(losses[-20:]), model.embed.weight.detach().norm(dim=1) / before


def main(argv: Sequence[str] | None = None) -> None:
    """Train with each optimizer and each decay, and print what the embeddings keep of their length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(argv)
    text = torch.tensor([ord(c) for c in "".join(topics.values()) if ord(c) < CHARACTERS])
    counts = torch.bincount(text, minlength=CHARACTERS)
    common = counts > len(text) // 100
    print(f"(1 - {RATE}) ** {options.steps} = {(1 - RATE) ** options.steps:.3f}")
    for name, optimize in OPTIMIZERS.items():
        for kind, decay in DECAYS.items():
            loss, kept = train(text, optimize, decay, options.steps)
            unused, used = kept[counts == 0].mean(), kept[common].mean()
            print(f"{name:18} {kind:13} loss {loss:.2f}, length of unused rows x {unused:.3f}, of common x {used:.3f}")


if __name__ == "__main__":
    main()
