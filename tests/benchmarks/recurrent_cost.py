"""Cost of recurrent layers on the CPU, compiled, beside torch's eager layer: first steps and steps.

``python -m tests.benchmarks.recurrent_cost LENGTH BATCH WIDTH [lstm|gru|rnn]`` prints CPU seconds of one thread of the
first step, and of the fastest of 15 steps, interleaved, as ratios to the eager layer. Caches of torch may be warm:
``TORCHINDUCTOR_CACHE_DIR`` names an empty folder where they are not to be.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByNorm
from gradrewrite.policy.actions import Policy

LAYERS: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
POLICIES: dict[str, Policy | None] = {
    "eager": None,
    "no rule": [],
    "a clip in each time step": gr.on("error:rec.l0/h", ClipByNorm(1e-3)),
}


class Net(nn.Module):
    """One layer, and the mean squared distance of its output from ``y``."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.rec = layer

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        distance: Tensor = (self.rec(x)[0] - y).square().mean()
        return distance


def main(length: int, batch: int, width: int, name: str = "lstm") -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = LAYERS[name](width, width, batch_first=True)
    x, y = torch.randn(batch, length, width), torch.randn(batch, length, width)
    steps: dict[str, Callable[[], None]] = {}
    for title, policy in POLICIES.items():
        net: nn.Module = Net(LAYERS[name](width, width, batch_first=True))
        net.rec.load_state_dict(base.state_dict())
        if policy is not None:
            net = gr.transform(net, policy)
            net.compile()
        steps[title] = lambda net=net: (net.zero_grad(), net(x, y).backward())
        begin = time.process_time()
        steps[title]()
        print(f"{title}: first step {time.process_time() - begin:.1f} CPU s", flush=True)
    best: dict[str, float] = defaultdict(lambda: float("inf"))
    for _ in range(15):
        for title, step in steps.items():
            begin = time.process_time()
            step()
            best[title] = min(best[title], time.process_time() - begin)
    for title, seconds in best.items():
        print(f"{title}: {seconds * 1e3:.1f} ms, {seconds / best['eager']:.2f} of eager")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:5])
