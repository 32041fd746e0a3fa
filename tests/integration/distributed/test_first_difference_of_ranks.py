"""One flipped bit on one of two ranks that compute the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gradrewrite as gr
from gradrewrite.cli import main
from gradrewrite.numerics.statistics import FINGERPRINT, fingerprint_of
from gradrewrite.passes import AllReduce, Observe

from models.planted import flip
from ranks import outcomes_of, run_parts

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
STEPS, BAD = 4, 2
KINDS = ("gradient", "step")


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


def shards(rank: int) -> list[str]:
    """Sites of a sharded parameter whose fingerprint is not that of the whole gradient."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    wrong = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False)).to(dtype)
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
        model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.detach(), mesh, [Replicate()]))
        rewritten = gr.transform(model, [gr.on(f"{kind}:*", Observe("norm", "fingerprint")) for kind in KINDS])
        optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), rewritten)
        x = distribute_tensor(
            torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).to(dtype), mesh, [Replicate()]
        )
        rewritten(x).full_tensor().square().mean().backward()
        optimizer.step()
        latest = rewritten.monitor.latest()
        for name, parameter in model.named_parameters():
            wanted = [float(part) for part in fingerprint_of(parameter.grad.full_tensor())]
            for kind in KINDS:
                got = [latest[f"{record}@{kind}:{name}"] for record in FINGERPRINT]
                wrong += [f"{dtype} {kind}:{name}: {got} {wanted}"] * (got != wanted)
    return wrong


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[dict[str, Any]]:
    return outcomes_of(__file__, folder, 2)


def test_fingerprints_of_shards_are_those_of_the_whole(outcomes: list[dict[str, Any]]) -> None:
    assert [outcome["shards"] for outcome in outcomes] == [[], []]


def test_the_site_of_a_flipped_bit(
    folder: Path, outcomes: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(isinstance(outcome["replicas"], list) for outcome in outcomes), outcomes
    logs = [str(folder / f"run.{rank}.jsonl") for rank in range(2)]

    assert main(["diff", *logs]) == 1
    assert capsys.readouterr().out.startswith(f"first difference: step {BAD}, activation:2, 2/linear")
    assert main(["diff", *logs, "--sites", "gradient:*"]) == 0  # which are averaged, so equal on both
    assert capsys.readouterr().out == f"no difference in {STEPS} steps and 4 sites\n"
    assert main(["diff", logs[0], logs[0]]) == 0


if __name__ == "__main__":
    run_parts([replicas, shards])
