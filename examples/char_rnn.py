"""Train ``nn.LSTM`` with 10 and with 40 steps of backpropagation through time, plain and with a clip inside.

It reads Python's help texts in order; the state goes on from piece to piece, detached. The recurrent weights begin too
large, so that errors grow from time step to time step on their way back. 10 steps train all the same; 40 do not, and a
clip of the gradients comes too late. A clip of the error of the hidden state, at each time step inside the layer, acts
before it has grown. ``python examples/char_rnn.py`` prints losses and growth; ``--out FOLDER`` writes for each training
a report, compared with that of the error clip, and a map of the errors by time step and update.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, Observe
from gradrewrite.policy.actions import Policy

ROWS, WIDTH, RATE, SCALE = 16, 64, 1e-2, 14.0
SITE = "error:lstm.l0/h"
POLICIES: dict[str, Policy] = {
    "plain": [gr.on(SITE, Observe("norm"))],
    "gradient clip": [gr.on(SITE, Observe("norm")), gr.on("gradient:*", ClipByGlobalNorm(1.0))],
    "error clip": [gr.on(SITE, ClipByNorm(0.01))],
}


class CharRNN(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(128, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 128)
        with torch.no_grad():
            self.lstm.get_parameter("weight_hh_l0").mul_(SCALE)

    def forward(self, text: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean cross-entropy in nats, and the last states; ``text`` is ``[rows, steps + 1]`` of int64."""
        output, (h, c) = self.lstm(self.embed(text[:, :-1]), (h, c))
        return functional.cross_entropy(self.head(output).mT, text[:, 1:]), h, c


def pieces(length: int, count: int) -> Iterator[Tensor]:
    """Yield the text in order, ``[ROWS, length + 1]``, of ASCII."""
    text = torch.tensor([min(ord(character), 127) for character in "".join(topics.values())])
    rows = text[: len(text) // ROWS * ROWS].view(ROWS, -1)
    for n in range(count):
        begin = n * length % (rows.shape[1] - length - 1)
        yield rows[:, begin : begin + length + 1]


def train(policy: Policy, length: int, updates: int, seed: int = 0) -> tuple[list[float], gr.Monitor]:
    """Train with Adam on pieces of this length; return the losses and the monitor."""
    torch.manual_seed(seed)
    model = gr.transform(CharRNN(), policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    h = c = torch.zeros(1, ROWS, WIDTH)
    losses = []
    for text in pieces(length, updates):
        loss, h, c = model(text, h, c)
        h, c = h.detach(), c.detach()
        optimizer.zero_grad()
        loss.backward()
        model.monitor.log("loss", loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.monitor


def growth(monitor: gr.Monitor) -> float:
    """Return the factor from one time step to the one before, in the median of the first ten backwards."""
    rows = [[n for n in row if 0 < n < math.inf] for row in monitor.history(f"norm@{SITE}", per="iteration")[:10]]
    return float(median((row[0] / row[-1]) ** (1 / (len(row) - 1)) for row in rows if len(row) > 1))


def main(argv: Sequence[str] | None = None) -> None:
    """Train with each policy and length, and print the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="updates of each training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the pages")
    options = parser.parse_args(argv)
    for length in (10, 40):
        monitors = {}
        for name, policy in POLICIES.items():
            losses, monitors[name] = train(policy, length, options.steps, options.seed)
            last = losses[-max(len(losses) // 10, 1) :]
            print(f"{length} steps, {name:13} loss {losses[0]:.2f} -> {sum(last) / len(last):.2f}", end="")
            print(f", errors grow {growth(monitors[name]):.2f}-fold a time step in the first ten updates")
        for name, monitor in monitors.items() if options.out is not None else ():
            path = options.out / f"{length}_steps_{name.replace(' ', '_')}"
            best = None if name == "error clip" else monitors["error clip"]
            viz.report(monitor, baseline=best, title=f"{length} steps, {name}").render(path)
            viz.plot(monitor, title=f"{length} steps, {name}").render(path)


if __name__ == "__main__":
    main()
