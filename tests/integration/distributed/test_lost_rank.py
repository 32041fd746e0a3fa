"""A rank that dies: the others end with torch.distributed's error, and leave no part of a checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm

from helpers import TESTS
from ranks import join

SECONDS = 10.0  # the group's timeout
LAST = 3  # the step before which rank 1 dies


def train(rank: int, path: Path) -> None:
    join(path, rank, 2, SECONDS)
    policy = [gr.on("error:1", CheckFinite("skip")), gr.on("step:*", ClipByGlobalNorm(0.1))]
    model = gr.transform(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), policy)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), fused=True), model)
    model.monitor.to_jsonl(path / "run.jsonl")
    for step in range(LAST + 2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        if step == LAST and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            optimizer.step()
            save({"model": model.state_dict()}, checkpoint_id=path / f"step{step}")
        except (distributed.DistBackendError, distributed.DistError, RuntimeError) as err:
            seconds = time.monotonic() - began
            (path / "error").write_text(f"{step} {seconds} {type(err).__name__}: {err}")
            raise


def test_the_others_end_and_leave_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE) for rank in range(2)]
    try:
        results = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[1].returncode == -signal.SIGKILL
    assert processes[0].returncode not in (0, None), results[0]
    step, seconds, text = (tmp_path / "error").read_text().split(" ", 2)
    assert int(step) == LAST
    assert float(seconds) < SECONDS + 5
    assert "gloo" in text or "peer" in text or "Timed out" in text, text
    # The checkpoints of the steps before are whole, and there is no other; so are the lines of the records.
    assert sorted(p.name for p in tmp_path.glob("step*")) == [f"step{n}" for n in range(LAST)]
    assert all((tmp_path / f"step{n}" / ".metadata").exists() for n in range(LAST))
    for file in tmp_path.glob("run.rank*.jsonl"):
        assert all(line.endswith("}") for line in file.read_text().splitlines())


if __name__ == "__main__":
    train(int(sys.argv[2]), Path(sys.argv[1]))
