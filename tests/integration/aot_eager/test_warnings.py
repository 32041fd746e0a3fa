"""Every warning names the user's line: the first outside of torch and gradrewrite."""

from __future__ import annotations

import _thread
import linecache
import threading
import warnings
from collections.abc import Callable
from types import FunctionType

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import gradrewrite as gr
from gradrewrite._utils.warnings import warn
from gradrewrite.instrumentation.source_locations import source_of
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByValue, Scale

from models.small import Broken

DOUBLE = gr.on("gradient:*", Scale(2.0))
GLOBAL = gr.on("gradient:*", ClipByGlobalNorm(0.1))


def warned_lines(run: Callable[[], object]) -> list[str]:
    """The lines of this file that the warnings of a function name."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    ours = [w for w in caught if issubclass(w.category, gr.RewriteWarning)]
    assert {w.filename for w in ours} == {__file__}
    return [linecache.getline(w.filename, w.lineno).partition("#")[2].strip() for w in ours]


@pytest.mark.long
def test_forward(x: Tensor) -> None:
    model = gr.transform(Broken(), DOUBLE, fullgraph=False)

    def run() -> None:
        model(x)  # the call

    assert warned_lines(run) == ["the call"]


def test_trace(x: Tensor) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain[0].requires_grad_(False)
    model = gr.transform(plain, gr.on("error:0", Scale(2.0)))

    def run() -> None:
        model.trace(x)  # the trace

    assert warned_lines(run) == ["the trace"]


@pytest.mark.long
@pytest.mark.parametrize("is_function", [False, pytest.param(True, marks=pytest.mark.inductor)])
def test_backward(plain: nn.Module, x: Tensor, is_function: bool) -> None:
    model = torch.compile(plain, backend=gr.backend(GLOBAL)) if is_function else gr.transform(plain, GLOBAL)

    def run() -> None:
        for _ in range(2):
            loss = model(x).sum()
            loss.backward()  # the backward

    assert warned_lines(run) == ["the backward"]


def test_check_that_warns(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, gr.on("gradient:*", CheckFinite("warn")))

    def run() -> None:
        model(x * float("inf")).sum().backward()
        model.zero_grad()
        model(x).sum().backward()  # the next step
        model(x * float("inf")).sum().backward()
        model.monitor.latest()  # the reading

    assert warned_lines(run) == ["the next step", "the reading"]


@pytest.mark.long
@pytest.mark.parametrize("has_scheduler", [False, True])
def test_guard(plain: nn.Module, x: Tensor, has_scheduler: bool) -> None:
    model = gr.transform(plain, gr.on("gradient:*", ClipByValue(1.0)))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model, update_ratios=True)
    if has_scheduler:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def run() -> None:
        model(x).sum().backward()
        optimizer.step()  # the step

    assert warned_lines(run) == ["the step"]


@pytest.mark.pure
def test_backward_on_a_thread_of_autograd(x: Tensor) -> None:
    """Such a thread has no Python frames of the user; here a thread without any stands for it."""
    told = threading.Event()

    def tell() -> None:
        warn("from elsewhere")
        told.set()

    on_no_frame = FunctionType(tell.__code__, {"warn": warn}, "tell", None, tell.__closure__)

    def wait(_: Tensor) -> None:
        _thread.start_new_thread(on_no_frame, ())
        assert told.wait(10)

    x.requires_grad_().register_hook(wait)

    def run() -> None:
        x.sum().backward()  # the backward

    assert warned_lines(run) == ["the backward"]


@pytest.mark.pure
def test_library_is_no_prefix() -> None:
    graph = Graph()
    node = graph.placeholder("x")
    for name, found in (("torch", ""), ("torchvision", 'vgg.py:7 "x = self.features(x)"')):
        file = torch.__file__.replace("torch/__init__.py", f"{name}/vgg.py")
        node.stack_trace = f'  File "{file}", line 7, in forward\n    x = self.features(x)\n'
        assert source_of(node) == found
