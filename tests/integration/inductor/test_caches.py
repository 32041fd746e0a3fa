"""Caches on disk: no process gets the gradients of another process's policy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys, torch
from torch._dynamo.utils import counters
import gradrewrite as gr
from gradrewrite.passes import Scale

torch.manual_seed(0)
model, x = torch.nn.Linear(4, 3), torch.ones(2, 4)
factor = sys.argv[1]
if factor == "none":
    model.compile()
else:
    model = gr.transform(model, [] if factor == "empty" else gr.on("gradient:weight", Scale(float(factor))))
    model.compile()
model(x).sum().backward()
hits = counters["inductor"]["fxgraph_cache_hit"] + 2 * counters["aot_autograd"]["autograd_cache_hit"]
print(json.dumps([model.get_parameter("weight").grad[0, 0].item(), hits]))
"""


def run(factor: str, cache: Path) -> tuple[float, int]:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, factor], env=environment, capture_output=True, text=True, check=True
    )
    value, hits = json.loads(done.stdout.splitlines()[-1])
    return value, hits


@pytest.mark.sample(12)
def test_processes_share_caches_but_no_policies(tmp_path: Path) -> None:
    values = {}
    for factor in ("3", "none", "5", "empty", "3", "none"):
        values[factor], _ = run(factor, tmp_path)

    assert values == {"3": 6.0, "none": 2.0, "5": 10.0, "empty": 2.0}
    assert run("3", tmp_path)[1] >= 2  # the same rewritten graph is found again
