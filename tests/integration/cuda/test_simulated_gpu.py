"""The simulated GPU itself: numbers, waits, uploads, events, CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradrewrite.numerics.measuring import measure

from gpu import twins
from gpu.log import SimulatedGpu


def on_host(tensor: Tensor) -> Tensor:
    return twins.twin(tensor.detach())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.gelu(x).sum(1),
        lambda x: torch.softmax(x, -1).amax(0),
        lambda x: (x @ x.mT).tanh().abs().mean(),
        lambda x: torch.isnan(x / (x - x)).any() | (x > 3).all(),
        lambda x: functional.layer_norm(x, (40,)).erf().sum(),
        lambda x: x.prod(1).isinf().sum(),
    ],
)
def test_kernels_equal_operations_on_the_cpu(gpu: SimulatedGpu, function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(24, 40)
    got, x_here = torch.compile(function)(x.cuda()), on_host(x)

    assert got.device.type == "cuda"
    assert gpu.launches
    got_here = on_host(got)
    with twins.plain():
        torch.testing.assert_close(got_here, function(x_here))


def test_training_steps_equal_those_on_the_cpu(gpu: SimulatedGpu) -> None:
    plain = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 2))
    model, x = copy.deepcopy(plain).cuda(), torch.randn(7, 6)
    compiled, x_there = torch.compile(model, fullgraph=True), x.cuda()
    for run, inputs, of in ((plain, x, plain), (compiled, x_there, model)):
        optimizer = torch.optim.AdamW(of.parameters(), lr=0.01, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            run(inputs).square().sum().backward()
            optimizer.step()
    pairs = [(on_host(p), on_host(q)) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]

    assert [kernel.is_backward for kernel in gpu.kernels] == sorted(kernel.is_backward for kernel in gpu.kernels)
    assert any(kernel.is_backward for kernel in gpu.kernels)
    with twins.plain():
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("reads", "waits"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: bool(x.any()), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: torch.empty_like(x, device="cpu").copy_(x, non_blocking=True), 1),
        (lambda x: torch.empty_like(x, device="cpu", pin_memory=True).copy_(x), 1),
        (lambda x: torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True), 0),
        (lambda x: x.view(-1).square_().t(), 0),
    ],
)
def test_waits(gpu: SimulatedGpu, reads: Callable[[Tensor], object], waits: int) -> None:
    x = torch.ones(3, device="cuda")
    reads(x)
    assert len(gpu.waits) == waits
    assert all(" test_simulated_gpu.py:" in wait for wait in gpu.waits)
    torch.cuda.set_sync_debug_mode("error")
    if waits:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation: aten"):
            reads(x)
    else:
        reads(x)


@pytest.mark.parametrize(
    ("sends", "uploads", "blocking"),
    [
        (lambda x: x.cuda(), 1, 1),
        (lambda _: torch.tensor(1.0, device="cuda"), 1, 1),
        (lambda x: x.cuda(non_blocking=True), 1, 0),
        (lambda x: x.pin_memory().to("cuda", non_blocking=True), 1, 0),
        (lambda x: torch.empty(3, device="cuda").copy_(x), 1, 1),
        (lambda _: torch.full((3,), 2.0, device="cuda"), 0, 0),
    ],
)
def test_uploads(gpu: SimulatedGpu, sends: Callable[[Tensor], Tensor], uploads: int, blocking: int) -> None:
    x = torch.ones(3)
    before = gpu.count()
    assert sends(x).device.type == "cuda"
    done = gpu.count() - before

    assert (done.uploads, done.blocking, done.waits) == (uploads, blocking, blocking)


def test_events_are_late(gpu: SimulatedGpu) -> None:
    event = torch.cuda.Event()
    assert event.query()  # not recorded
    event.record(torch.cuda.current_stream())
    assert [event.query(), event.query()] == [False, True]
    event.synchronize()
    assert not gpu.waits
    event.record()
    event.synchronize()
    assert len(gpu.waits) == 1


def test_a_cuda_graph_overwrites_its_outputs(gpu: SimulatedGpu) -> None:
    double = torch.compile(lambda x: x * 2, mode="reduce-overhead")
    first = double(torch.ones(2, device="cuda"))
    assert first.sum() == 4
    second = double(torch.ones(2, device="cuda"))

    assert gpu.num_graphs == 1
    assert torch.isnan(first).all()
    assert second.sum() == 4


def test_operations_are_counted(gpu: SimulatedGpu) -> None:
    x = torch.ones(2, 2, device="cuda")
    before = gpu.count()
    (x @ x).t().relu_()
    y = torch.compile(lambda t: t.sin() + 1)(x)

    assert y.shape == (2, 2)
    done = gpu.count() - before
    assert (done.launches, done.operations, done.size) == (1, 2, 32)


def test_operations_inside_of_opaque_operators_are_counted(gpu: SimulatedGpu) -> None:
    x = torch.tensor([3.0, -4.0]).cuda()
    before = gpu.count()
    measured = measure(x, ["max_abs", "nan"], is_opaque=True)

    assert measured.tolist() == [4.0, 0.0]
    assert (gpu.count() - before).operations > 1
