"""Find the op that makes the first NaN: ``CheckFinite`` raises an error that names it and its source line."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite


class Distances(nn.Module):
    """Pairwise distances; the backward of ``sqrt`` is infinite at zero, on the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean distance of the rows of ``x``, ``[rows, 4]``."""
        points = self.embed(x)
        distances: Tensor = (points[:, None] - points[None]).square().sum(-1).sqrt()
        return distances.mean()


def main() -> None:
    """Run one backward and print what the error says."""
    torch.manual_seed(0)
    model = gr.transform(Distances(), gr.on("gradient:*", CheckFinite("raise")))
    try:
        model(torch.rand(3, 4)).backward()
    except gr.NonFiniteError as error:
        print(error)
        print(f"op: {error.op}, source: {error.source}")


if __name__ == "__main__":
    main()
