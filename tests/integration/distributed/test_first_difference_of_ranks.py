"""One flipped bit on one of two ranks that compute the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite.cli import main
from gradrewrite.passes import AllReduce, Observe

from models.planted import flip
from ranks import outcomes_of, run_parts

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
STEPS, BAD = 4, 2


def replicas(rank: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    policy: list[Any] = [gr.on(f"{kind}:*", Observe("fingerprint", "norm")) for kind in ("activation", "error")]
    policy.append(gr.on("gradient:*", [AllReduce(), Observe("fingerprint", "norm")]))
    rewritten = gr.transform(model, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rewritten.monitor.to_jsonl(Path(sys.argv[1]) / "run.{rank}.jsonl")
    for step in range(STEPS):
        if (rank, step) == (1, BAD):
            flip(model[2].weight, 5, 13)
        optimizer.zero_grad()
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        rewritten(x).square().mean().backward()
        optimizer.step()
    rewritten.monitor.flush()
    return list(rewritten.monitor.latest())


def test_the_site_of_a_flipped_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = outcomes_of(__file__, tmp_path, 2)
    assert all(isinstance(outcome["replicas"], list) for outcome in outcomes), outcomes
    logs = [str(tmp_path / f"run.{rank}.jsonl") for rank in range(2)]

    assert main(["diff", *logs]) == 1
    assert capsys.readouterr().out.startswith(f"first difference: step {BAD}, activation:2, 2/linear")
    assert main(["diff", *logs, "--sites", "gradient:*"]) == 0  # which are averaged, so equal on both
    assert capsys.readouterr().out == f"no difference in {STEPS} steps and 4 sites\n"
    assert main(["diff", logs[0], logs[0]]) == 0


if __name__ == "__main__":
    run_parts([replicas])
