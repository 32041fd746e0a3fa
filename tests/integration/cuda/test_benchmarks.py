"""The benchmarks on a GPU; on a simulated one without memory, which it does not have."""

from __future__ import annotations

import torch

from benchmarks.cases import CASES, WAYS
from benchmarks.measuring import kernels_on_gpu, peak_bytes, time_in_turn
from gpu.log import SimulatedGpu


def test_steps_are_measured(simulation: SimulatedGpu | None) -> None:
    steps = {name: WAYS[name].step(CASES["Two layers:small"], "cuda") for name in ("plain", "clips", "eager, hooks")}
    for step in steps.values():
        step()
    found = time_in_turn(steps, lambda name: steps[name].clear(), "cuda", rounds=2, seconds=0)

    assert [len(seconds) for seconds in found.values()] == [2, 2, 2]
    assert all(second > 0 for seconds in found.values() for second in seconds)
    gradients = [[p.grad for p in step.model.parameters()] for step in steps.values()]
    torch.testing.assert_close(gradients[1], gradients[2])
    if simulation is None:
        assert peak_bytes(steps["plain"], "cuda") > 0
        assert kernels_on_gpu(steps["plain"]) > 0
