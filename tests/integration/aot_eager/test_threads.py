"""Several threads: no thread sees what another one does to trace its model."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.backends.model_state import state_of
from gradrewrite.passes import ClipByGlobalNorm, ClipByValue

from models.stress_threads import stress

_during_trace: list[Callable[[], Any]] = []


@torch.compiler.assume_constant_result
def _while_traced() -> int:
    """Runs when the tracer reaches it, and is a constant of the graph."""
    for call in _during_trace:
        call()
    return 0


class Net(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.fc, self.here, self.out = nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 1)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        _while_traced()
        h = self.here(h)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.out(h)


def hooks_in(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.fixture
def during_trace() -> Any:
    yield _during_trace
    _during_trace.clear()


def clipped(model: gr.RewrittenModule, batch: Tensor) -> list[float]:
    model.zero_grad()
    (1000.0 * model(batch)).sum().backward()
    return model.fc.bias.grad.tolist()


@pytest.mark.long
def test_identity_is_a_site_while_another_thread_calls_its_model(during_trace: list[Callable[[], Any]]) -> None:
    other = gr.transform(nn.Linear(3, 1), [])
    other(torch.ones(1, 3)).sum().backward()
    with ThreadPoolExecutor(1) as pool:
        during_trace.append(lambda: pool.submit(other, torch.ones(1, 3)).result(timeout=60))
        model = gr.transform(Net(), gr.on("error:here", ClipByValue(0.5)))
        assert [abs(g) for g in clipped(model, torch.ones(1, 3))] == [0.5] * 3


@pytest.mark.long
def test_code_of_torch_waits_for_no_other_thread(during_trace: list[Callable[[], Any]]) -> None:
    """It is not traced: what torch notes of it does not go with a model, and needs no other thread to have finished."""
    gone, other = (gr.transform(nn.Linear(3, 1), []) for _ in range(2))
    for model in (gone, other):
        model(torch.ones(1, 3)).sum().backward()
    del gone, model
    gc.collect()
    with ThreadPoolExecutor(1) as pool:
        during_trace.append(lambda: pool.submit(other, torch.ones(1, 3)).result(timeout=20))
        traced = gr.transform(Net(), gr.on("error:here", ClipByValue(0.5)))
        assert [abs(g) for g in clipped(traced, torch.ones(1, 3))] == [0.5] * 3


def test_identity_class_is_never_changed(during_trace: list[Callable[[], Any]]) -> None:
    plain, seen = nn.Identity.__dict__["forward"], []
    during_trace.append(lambda: seen.append(nn.Identity.__dict__["forward"]))
    model = gr.transform(Net(), gr.on("error:here", ClipByValue(0.5)))
    model(torch.ones(1, 3))
    assert seen
    assert all(forward is plain for forward in [*seen, nn.Identity.__dict__["forward"]])


def test_no_hook_is_left_behind(during_trace: list[Callable[[], Any]]) -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    model = gr.transform(Net(), gr.on("error:here", ClipByValue(0.5)))
    during_trace.append(stop)
    with pytest.raises(Exception, match="Stop"):
        model(torch.ones(1, 3))
    assert hooks_in(model) == 0
    during_trace.clear()
    assert [abs(g) for g in clipped(model, torch.ones(1, 3))] == [0.5] * 3
    assert hooks_in(model) == 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::gradrewrite.RewriteWarning")
@pytest.mark.parametrize("fullgraph", [True, False])
def test_nothing_is_traced_again(fullgraph: bool, during_trace: list[Callable[[], Any]]) -> None:
    traced: list[int] = []
    during_trace.append(lambda: traced.append(threading.get_ident()))
    model = gr.transform(Net(breaks=not fullgraph), gr.on("error:here", ClipByValue(0.5)), fullgraph=fullgraph)
    clipped(model, torch.ones(1, 3))
    count = len(traced)
    assert count
    if fullgraph:
        model.trace(torch.ones(1, 3))
        assert len(traced) > count
        count = len(traced)
    for _ in range(3):
        assert [abs(g) for g in clipped(model, torch.ones(1, 3))] == [0.5] * 3
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(model, [torch.ones(1, 3)] * 4))
    assert len(traced) == count


@pytest.mark.long
def test_hook_of_the_user_on_an_identity_is_noticed_and_the_name_stays(during_trace: list[Callable[[], Any]]) -> None:
    model = gr.transform(Net(), gr.on("error:here", ClipByValue(0.5)))
    clipped(model, torch.ones(1, 3))
    model.here.register_forward_hook(lambda module, args, output: 2.0 * output)
    assert [abs(g) for g in clipped(model, torch.ones(1, 3))] == [0.5] * 3
    traced: list[int] = []
    during_trace.append(lambda: traced.append(0))
    clipped(model, torch.ones(1, 3))
    assert traced == []


@pytest.mark.long
def test_guards_that_the_user_filters_stay_filtered(during_trace: list[Callable[[], Any]]) -> None:
    seen: list[int] = []
    traced: list[int] = []
    during_trace.append(lambda: traced.append(0))

    def keep_all(guards: Any) -> list[bool]:
        seen.append(len(guards))
        return [True] * len(guards)

    model = gr.transform(Net(), gr.on("error:here", ClipByValue(0.5)))
    state = state_of(model)
    assert state is not None
    state.compile_options = {"options": {"guard_filter_fn": keep_all}}
    for number in (1, 2):  # torch.compile takes the entry out of the dictionary that it is given
        state.restart()
        for _ in range(3):
            clipped(model, torch.ones(1, 3))
        assert len(traced) == len(seen) == number


@pytest.mark.slow
def test_two_threads_trace_one_model_for_different_shapes() -> None:
    model = gr.transform(Net(), gr.on("error:here", ClipByValue(0.5)), dynamic=False)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: model(torch.ones(n, 3)).sum(), [1, 2, 3, 4]))
    sites = [[str(e.site) for e in graph.edits] for graph in model.explain().graphs]
    assert sites == [["error:here"]] * 4
    assert hooks_in(model) == 0


@pytest.mark.slow
def test_recompile_limit_of_torch_stays_while_threads_break_graphs() -> None:
    limit = torch._dynamo.config.recompile_limit

    def one(number: int) -> int:
        model = gr.transform(Net(breaks=True), gr.on("error:here", ClipByValue(0.5)), fullgraph=False)
        clipped(model, torch.ones(1, 3))
        return int(torch._dynamo.config.recompile_limit)

    with ThreadPoolExecutor(2) as pool, pytest.warns(gr.errors.RewriteWarning):
        assert set(pool.map(one, range(6))) == {limit}
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.sample(12)
@pytest.mark.slow
def test_threads_that_train_and_delete_models_get_the_gradients_of_one_thread_and_leave_nothing() -> None:
    outcome = stress(2, 5.0, compiled=False)
    assert (outcome.wrong, outcome.errors) == ([], [])
    assert outcome.models >= 5
    assert outcome.ours[-1] <= outcome.ours[1]
    assert outcome.guards[-1] <= outcome.guards[1]
    assert outcome.tensors[-1] <= outcome.tensors[1]


def clipped_steps(kind: int) -> list[Tensor]:
    """Weights of a model after guarded steps, each with a graph of its own, and with the same mathematics by hand."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2 + kind % 2)))
    plain = copy.deepcopy(net)
    model = gr.transform(net, gr.on("step:*", ClipByGlobalNorm(0.1)))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for size in (1, 2):
        optimizer.zero_grad()
        model(torch.ones(size, 4)).sum().backward()
        optimizer.step()
        gradients = torch.autograd.grad(plain(torch.ones(size, 4)).sum(), list(plain.parameters()))
        factor = 0.1 / torch.stack([g.norm() for g in gradients]).norm()
        with torch.no_grad():
            for p, g in zip(plain.parameters(), gradients, strict=True):
                p -= 0.1 * factor * g
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, wanted)
    return list(model.parameters())


@pytest.mark.slow
def test_step_sites_on_several_threads() -> None:
    """Each thread compiles graphs of steps while others trace, compile and run models of their own."""
    with ThreadPoolExecutor(4) as pool:
        found = [future.result() for future in [pool.submit(clipped_steps, n) for n in range(16)]]
    assert len(found) == 16
    clipped_steps(0)  # what is compiled later is as ever
