"""The row behind a spike: a training on digits names it."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import SkipSpikes

MICRO, ROWS = 4, 32  # micro-batches of a step, and rows of each


class Regressor(nn.Module):
    """Reads the digit as a number, ``[rows]``."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(32, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the numbers shown by images ``[rows, 64]``."""
        numbers: Tensor = self.head(self.encoder(images)).squeeze(1)
        return numbers


def main() -> None:
    """Train; one label was written without its decimal point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    found = load_digits()
    images, labels = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target, dtype=torch.float32)
    order = torch.randperm(len(labels))
    poisoned = order[(steps - 1) * MICRO * ROWS + 2 * ROWS + 7]  # row 7 of micro-batch 2 of the last step
    labels[poisoned] *= 1000

    model = gr.transform(Regressor(), gr.on("step:*", SkipSpikes(sigma=6.0, window=16)))
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True), model)
    for number, batch in enumerate(order[: steps * MICRO * ROWS].split(ROWS)):
        model.monitor.log_ids([f"digits/{row}" for row in batch.tolist()])
        loss = nn.functional.mse_loss(model(images[batch]), labels[batch])
        (loss / MICRO).backward()
        if number % MICRO == MICRO - 1:
            before = model.monitor.skipped
            optimizer.step()
            if model.monitor.skipped > before:
                print(model.monitor.culprits(k=3))
            optimizer.zero_grad()
    print(f"the poisoned row was digits/{poisoned}")


if __name__ == "__main__":
    main()
