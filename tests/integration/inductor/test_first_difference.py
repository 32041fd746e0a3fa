"""Op by op against Inductor, and bfloat16 against float32: the first bits that differ, and none beyond a tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite import Step, read_jsonl
from gradrewrite.diagnostics.first_difference import compare_logs
from gradrewrite.diagnostics.run_log import as_executed
from gradrewrite.passes import Keep, Observe

from models.gpt import Gpt, batch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")]
STEPS = 3


@dataclass(frozen=True)
class Outcome:
    steps: list[Step]
    kept: dict[str, Tensor]  # of the first step


def run(path: Path, dtype: torch.dtype, *, compiles: bool) -> Outcome:
    torch.manual_seed(0)
    model = Gpt(layers=2, width=32, heads=2, vocabulary=32, context=16).to(dtype)
    inputs = batch(4, 16, 32)
    watch = [Observe("fingerprint", "norm", "max_abs"), Keep()]
    policy = [gr.on(f"{kind}:*", watch) for kind in ("activation", "error", "gradient")]
    rewritten = gr.transform(model, policy)
    if compiles:
        rewritten.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept: dict[str, Tensor] = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        rewritten(*inputs).backward()
        kept = kept or {str(site): tensor for site, tensor in rewritten.monitor.kept().items()}
        optimizer.step()
    rewritten.monitor.to_jsonl(path)
    return Outcome(read_jsonl(path), kept)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("runs")
    ways = {"eager": (torch.float32, False), "inductor": (torch.float32, True), "bfloat16": (torch.bfloat16, True)}
    return {name: run(folder / f"{name}.jsonl", dtype, compiles=compiles) for name, (dtype, compiles) in ways.items()}


@pytest.mark.sample(12)
@pytest.mark.parametrize(("other", "tolerance"), [("inductor", 1e-4), ("bfloat16", 0.05)])
def test_the_first_bits_and_nothing_beyond_a_tolerance(
    other: str, tolerance: float, outcomes: dict[str, Outcome]
) -> None:
    a, b = outcomes["eager"], outcomes[other]
    found = compare_logs(a.steps, b.steps)
    assert found.first is not None
    first = next(s for s in as_executed(a.kept) if a.kept[s].dtype != b.kept[s].dtype or not a.kept[s].equal(b.kept[s]))
    assert (found.first.step, found.first.site) == (0, first)
    assert found.first.source.startswith("gpt.py:")
    assert not found.remarks
    assert max(error for _, error in found.first.steps) > 0
    within = compare_logs(a.steps, b.steps, tolerance=tolerance)
    assert within.is_equal, str(within)
    assert (within.num_steps, within.num_sites) == (STEPS, found.num_sites)


@pytest.mark.sample(12)
def test_records_of_the_values_are_those_of_kept_tensors(outcomes: dict[str, Outcome]) -> None:
    for outcome in outcomes.values():
        for site, tensor in outcome.kept.items():
            assert outcome.steps[0].records[f"norm@{site}"] == pytest.approx(tensor.double().norm().item(), rel=1e-6)
