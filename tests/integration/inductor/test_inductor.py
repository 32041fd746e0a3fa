"""The same rewrites through Inductor: equal to op by op, live, without recompilation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue, Keep, NanToNum, Scale, Zero

from models.small import Lambda

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums are in a fixed order; caches are off, so that graphs are compiled."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch.set_num_threads(threads)


def compiled(model: nn.Module, policy: gr.Policy, **options: Any) -> gr.RewrittenModule:
    rewritten = gr.transform(copy.deepcopy(model), policy)
    rewritten.compile(**options)
    return rewritten


class Chain(nn.Module):
    """One layer and one named value for each action."""

    def __init__(self, count: int, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum() * 0
        for number, layer in enumerate(self.layers):
            total = total + gr.tap(layer(x).sin(), f"h{number}").square().sum()
        return total


BOUND, SHIFT = torch.tensor(0.5), torch.tensor([1.0, -1.0, 2.0, 0.5])


def masked(g: Tensor) -> Tensor:
    g = g.clone()
    g[:, 0] = 0
    return g.view(-1).flip(0).view(g.shape)


ACTIONS: list[Any] = [
    ClipByValue(0.1),
    ClipByValue(0.1, min=-0.05, log=True),
    ClipByValue(BOUND),
    ClipByNorm(0.1, log=True),
    ClipByNorm(BOUND, norm_type=1.0),
    ClipByNorm(0.1, norm_type=float("inf")),
    ClipByNorm(0.1, norm_type=3.0),
    Scale(-1.0),
    Scale(BOUND),
    Zero(),
    NanToNum(),
    Keep(),
    lambda g: g.clamp(-0.1, 0.1) * SHIFT,
    lambda g: g / (1 + g.norm()),
    lambda g: -SHIFT + g,
    masked,
]


@pytest.mark.sample(6)
def test_compiled_equals_op_by_op_for_every_action() -> None:
    plain, x = Chain(len(ACTIONS)), torch.randn(3, 4)
    policy = [gr.on(f"error:h{n}", action) for n, action in enumerate(ACTIONS)]
    policy += [
        gr.on("gradient:*.weight", ClipByGlobalNorm(0.3)),
        gr.on("gradient:*.bias", ClipByGlobalNorm(BOUND, group="b")),
    ]
    op_by_op, model = gr.transform(copy.deepcopy(plain), policy), compiled(plain, policy)
    for m in (op_by_op, model):
        m(x).backward()
    counters.clear()

    for bound, sign in ((0.5, 1), (0.25, -1), (2.0, 1)):
        BOUND.fill_(bound)
        SHIFT.mul_(sign)
        results = []
        for m in (op_by_op, model):
            m.zero_grad()
            (sign * m(x)).backward()
            results.append((m.monitor.latest(), [p.grad for p in m.parameters()], list(m.monitor.kept().values())))
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert not counters["frames"]
    assert not counters["stats"]


def test_dynamic_shapes_compile_once() -> None:
    plain = Chain(2)
    policy = [gr.on("error:h0", ClipByNorm(0.1, log=True)), gr.on("error:h1", lambda g: g / g.shape[0])]
    op_by_op, model = gr.transform(copy.deepcopy(plain), policy), compiled(plain, policy, dynamic=True)
    for rows in (3, 7, 5):
        x = torch.randn(rows, 4)
        for m in (op_by_op, model):
            m.zero_grad()
            m(x).backward()
        for p, q in zip(op_by_op.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-6)
        assert model.monitor.latest() == pytest.approx(op_by_op.monitor.latest(), rel=1e-5)
    assert len(model.explain().graphs) == 1


def test_compile_options_win(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            torch._dynamo.graph_break()
            return h.tanh().sum()

    model = gr.transform(Breaking(), gr.on("error:fc", Zero()))
    model.compile(fullgraph=False)
    with pytest.warns(gr.RewriteWarning):
        model(torch.ones(1, 2)).backward()
    assert not model.fc.weight.grad.any()


def test_forward_random_numbers_are_those_of_plain_torch_compile() -> None:

    plain = Lambda(lambda net, x: net.body(x), body=nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    by_torch, x = copy.deepcopy(plain), torch.randn(4, 8)
    by_torch.compile()
    outs: list[Tensor] = []
    runs: list[Callable[[Tensor], Tensor]] = [by_torch, compiled(plain, gr.on("error:*", [ClipByNorm(0.1), Keep()]))]
    for run in runs:
        torch.manual_seed(3)
        outs.append(run(x))
    assert torch.equal(*outs)
