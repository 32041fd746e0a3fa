"""What is kept for culprits in compiled code: the kernels of the plain model, and rows of code out of the cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code

import gradrewrite as gr
from gradrewrite.passes import SkipSpikes

from models.culprits import task_of

SPIKES = gr.on("step:*", SkipSpikes(6.0, window=8))


def make(policy: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = gr.transform(task_of("scaled label", dropout=0.2).make(), policy)
    model.compile()
    return model, gr.guard(torch.optim.AdamW(model.parameters(), lr=1e-3), model)


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_kernels_are_those_of_the_empty_policy() -> None:
    x = torch.randn(8, 5)
    codes = []
    policies: list[Any] = [SPIKES, []]
    for policy in policies:
        model, _ = make(policy)
        with torch._inductor.config.patch(force_disable_caches=True):
            _, found = run_and_get_code(lambda m=model: m(x).sum().backward())
        lines = [line for code in found for line in code.splitlines() if not line.lstrip().startswith("#")]
        codes.append(re.sub(r"cpp_fused_\w+", "kernel", "\n".join(lines)))
        assert (model.monitor._recorder.links.kept_step is not None) == bool(policy)

    assert "kernel" in codes[0]
    assert codes[0] == codes[1]


def test_rows_of_code_out_of_the_cache(tmp_path: Path) -> None:
    task, answers = task_of("scaled label"), []
    with fresh_cache(dir=str(tmp_path)):
        for is_hit in (False, True):
            torch.compiler.reset()
            counters.clear()
            model, optimizer = make(SPIKES)
            for step in range(7):
                optimizer.zero_grad()
                batch = task.batch(step, 3 if step == 6 else None)
                task.loss(model(batch[0]), batch).backward()
                optimizer.step()
            assert counters["aot_autograd"]["autograd_cache_hit"] == is_hit
            answers.append(model.monitor.culprits())

    assert answers[0] == answers[1]
    assert answers[0].rows[0].index == 3


def test_dropout_of_batches_of_changing_size() -> None:
    """The replay draws as many numbers as the step did: a row that dominates has the norm of the gradient."""
    torch.manual_seed(0)
    model = gr.transform(task_of("scaled label", dropout=0.5).make(), SPIKES)
    model.compile()
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    for step in range(7):
        x, y = torch.randn(8 + step, 5), torch.randn(8 + step, 3)
        if step == 6:
            y[9] *= 1e5
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    (row,) = model.monitor.culprits(k=1).rows

    assert row.index == 9
    assert row.norm == pytest.approx(float(norm), rel=1e-3)
