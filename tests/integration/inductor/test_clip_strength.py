"""The strength of clips costs no kernel: generated code against that of the same clips written by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import gradrewrite as gr
from gradrewrite.numerics.stages import reduce_all
from gradrewrite.numerics.statistics import largest_of, mean_of, norm_of, size_of
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue

from models.small import SquaredTwoLayers

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")]


def code_of(policy: Any) -> str:
    """All code that Inductor makes for one step, without comments, which name the nodes."""
    torch.manual_seed(0)
    model = gr.transform(SquaredTwoLayers(16, 32, 8), policy)
    x = torch.randn(64, 16)
    model.compile()

    def step() -> None:
        model(x).backward()

    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(step)
    assert codes
    lines = (line for code in codes for line in code.splitlines() if not line.lstrip().startswith("#"))
    return re.sub(r"cpp_fused_\w+", "kernel", "\n".join(lines))


def kernels(code: str) -> int:
    return len(re.findall(r'extern "C"', code))


def clip_by_value(g: Tensor) -> Tensor:
    return torch.clamp(torch.clamp(g, min=-0.1), max=0.1)


def clip_by_value_that_logs(g: Tensor) -> Tensor:
    clipped = clip_by_value(g)
    size, changed = size_of(g), (clipped != g) & (g == g)
    gr.record("max_abs", largest_of(size))
    gr.record("mean_abs", mean_of(size))
    gr.record("clipped", reduce_all(torch.any, changed).to(size.dtype))
    return clipped


def clip_by_norm(g: Tensor) -> Tensor:
    norm = norm_of(g)
    gr.record("norm", norm)
    bound = norm.new_full((), 0.1)
    return torch.where((norm > bound) & (norm < torch.inf), g * (bound / norm), g)


@pytest.mark.parametrize("pattern", ["error:*", "gradient:*"])
def test_clip_by_value_without_log_is_as_by_hand(pattern: str) -> None:
    assert code_of(gr.on(pattern, ClipByValue(0.1))) == code_of(gr.on(pattern, clip_by_value))


@pytest.mark.parametrize("pattern", ["error:*", "gradient:*"])
def test_clip_by_norm_is_as_by_hand(pattern: str) -> None:
    assert code_of(gr.on(pattern, ClipByNorm(0.1))) == code_of(gr.on(pattern, clip_by_norm))


@pytest.mark.parametrize("pattern", ["error:*", "gradient:*"])
def test_clip_by_value_that_logs_has_no_more_kernels(pattern: str) -> None:
    ours, plain = code_of(gr.on(pattern, ClipByValue(0.1, log=True))), code_of(gr.on(pattern, clip_by_value_that_logs))
    assert kernels(ours) == kernels(plain) > 1


def test_shares_of_a_global_clip_have_no_kernel_per_member() -> None:
    ours, plain = (code_of(gr.on("gradient:*", ClipByGlobalNorm(0.1, log=log))) for log in (True, False))
    assert kernels(ours) <= kernels(plain) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_compiled_records_are_those_of_op_by_op(dtype: torch.dtype) -> None:
    policy = [
        gr.on("error:*", [ClipByNorm(5.0), ClipByValue(0.05, log=True)]),
        gr.on("gradient:*", ClipByValue(0.1, log=True)),
    ]
    policy.append(gr.on("gradient:*", ClipByGlobalNorm(0.1, log=True)))
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = gr.transform(SquaredTwoLayers(16, 32, 8).to(dtype), policy)
        if is_compiled:
            model.compile()
        model(torch.randn(64, 16, dtype=dtype)).backward()
        found.append(model.monitor.latest())
    names = [name for name in found[0] if name.startswith(("factor", "share", "norm_share"))]
    assert {"factor@group:default", "share@error:one"} <= set(names), names
    for name in names:
        assert found[1][name] == pytest.approx(
            found[0][name], rel=1e-5 if dtype != torch.bfloat16 else 0.05, abs=1e-3
        ), name
