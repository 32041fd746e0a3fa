"""Cost of a policy for a GPT in kernels, bytes and memory, against plain torch.compile and hooks written by hand."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch._inductor.compile_fx
from torch import Tensor
from torch._inductor import metrics

import gradrewrite as gr

from benchmarks.bounds import GPT
from benchmarks.cases import CASES, WAYS
from benchmarks.measuring import peak_bytes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")]


@dataclass(frozen=True)
class Cost:
    kernels: int
    bytes_accessed: int
    peak: int
    edits: int
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module")
def cost_of() -> Iterator[Callable[[str], Cost]]:
    """The figures of a way, measured once; on one thread, so that scatter-adds sum in a fixed order."""
    threads, log = torch.get_num_threads(), torch._inductor.compile_fx.inductor_metrics_log
    level = log.level
    torch.set_num_threads(1)
    log.setLevel(logging.INFO)  # Inductor counts bytes only to log them
    with torch._inductor.config.patch(force_disable_caches=True):
        yield functools.cache(cost)
    log.setLevel(level)
    torch.set_num_threads(threads)


def cost(name: str) -> Cost:
    step = WAYS[name].step(CASES[GPT], "cpu")
    metrics.reset()
    step()
    kernels, bytes_accessed = metrics.generated_kernel_count, metrics.num_bytes_accessed
    gradients = {name: p.grad.clone() for name, p in step.model.named_parameters() if p.grad is not None}
    edits = len(step.run.explain().graphs[0].edits) if isinstance(step.run, gr.RewrittenModule) else 0
    return Cost(kernels, bytes_accessed, peak_bytes(step, "cpu"), edits, gradients)


@pytest.mark.sample(12)
def test_an_empty_policy_costs_nothing(cost_of: Callable[[str], Cost]) -> None:
    plain, empty = cost_of("plain"), cost_of("empty")

    assert empty.kernels == plain.kernels > 100
    assert empty.bytes_accessed == plain.bytes_accessed > 0
    assert empty.peak == plain.peak
    assert empty.gradients.keys() == plain.gradients.keys()
    assert all(torch.equal(empty.gradients[name], plain.gradients[name]) for name in plain.gradients)


@pytest.mark.sample(12)
def test_clips_cost_no_more_than_hooks_by_hand(cost_of: Callable[[str], Cost]) -> None:
    hand, clips = cost_of("by hand"), cost_of("clips")

    assert clips.edits == 36
    assert clips.kernels <= hand.kernels
    assert clips.bytes_accessed <= hand.bytes_accessed
    assert clips.peak <= hand.peak
    for name in hand.gradients:
        torch.testing.assert_close(clips.gradients[name], hand.gradients[name], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["empty", "clips", "checks", "statistics"])
def test_peak_memory(cost_of: Callable[[str], Cost], name: str) -> None:
    """Of a step, with the parameters that are there before it."""
    parameters = sum(g.nbytes for g in cost_of("plain").gradients.values())

    assert cost_of("plain").peak > parameters > 10e6  # all gradients are there at the end
    assert cost_of(name).peak + parameters <= 1.02 * (cost_of("plain").peak + parameters)
