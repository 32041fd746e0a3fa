"""Buffers and inputs that the forward reads and writes later: gradients are those of eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import gradrewrite as gr
from gradrewrite.backends.backend import make_backend
from gradrewrite.backends.engines import AotEager
from gradrewrite.ir import partitioning
from gradrewrite.passes import CheckFinite, Observe, Recompute, Store
from gradrewrite.testing import assert_matches_eager

from models.buffers import BUFFERS, WIDTH, Net

STEPS = 3
OFF = set(BUFFERS) - {"batch norm"}  # with plain torch.compile


def rows(rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH)


WAYS: Mapping[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "op by op": lambda model: gr.transform(model, []),
    "regions": lambda model: gr.transform(model, [], regions=["first", "second"]),
    "graph breaks": lambda model: gr.transform(model, [], fullgraph=False),
    "backend": lambda model: torch.compile(model, backend=make_backend([], None, AotEager())),
    "clip": lambda model: gr.transform(model, gr.on("error:*", lambda g: g * 1.0)),
    "check and record": lambda model: gr.transform(model, gr.on("error:*", [CheckFinite(), Observe("norm")])),
    "dynamic": lambda model: gr.transform(model, [], dynamic=True),
}


def steps(run: Callable[[Tensor], Tensor], model: nn.Module) -> list[dict[str, Tensor]]:
    """Gradients and buffers after each of some steps without an update."""
    torch.manual_seed(1)
    found = []
    for number in range(STEPS):
        model.zero_grad()
        run(rows(8 + number)).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append({**gradients, **{name: b.clone() for name, b in model.named_buffers()}})
    return found


@pytest.mark.broad
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BUFFERS)
def test_gradients_equal_eager(name: str, way: str) -> None:
    plain = Net(BUFFERS[name])
    model = copy.deepcopy(plain)

    torch.testing.assert_close(steps(WAYS[way](model), model), steps(plain, plain), rtol=1e-5, atol=1e-7)


@pytest.mark.broad
@pytest.mark.parametrize("form", [Recompute(), Store("bfloat16")])
@pytest.mark.parametrize("name", BUFFERS)
def test_saved_tensors_are_restored_from_what_was_read(name: str, form: Any) -> None:
    plain = Net(BUFFERS[name]).double()
    model, x = copy.deepcopy(plain), torch.randn(600, WIDTH, dtype=torch.float64)
    rewritten = gr.transform(model, gr.on("saved:*", form))
    rewritten(x).backward()
    plain(x).backward()

    assert rewritten.explain().graphs[0].edits
    near = 1e-9 if isinstance(form, Recompute) else 0.02
    for (parameter, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        largest = float(q.grad.abs().max())
        torch.testing.assert_close(
            p.grad, q.grad, rtol=near, atol=near * max(largest, 1e-3), msg=lambda m, n=parameter: f"{n}: {m}"
        )


@pytest.mark.broad
@pytest.mark.parametrize("name", BUFFERS)
def test_a_comparison_says_where_plain_compilation_is_off(name: str) -> None:
    torch.manual_seed(0)
    model = Net(BUFFERS[name]).double()
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    found = assert_matches_eager(model, gr.on("gradient:*", lambda g: 2 * g), x, compiled=False)

    is_off = found.plain_error > 1e-3
    assert is_off == (name in OFF)
    assert found.note.startswith("plain torch.compile is off eager here, by 0.") == is_off


class Written(nn.Module):
    """Reads an input and writes it; the second time its square."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = (self.linear(x.cos()) - x.detach()) * 1.1
        with torch.no_grad():
            x.mul_(3)
        loss: Tensor = h.sin().square().tanh().sum() + self.linear(x.clone()).sum()
        return loss


@pytest.mark.broad
@pytest.mark.parametrize("policy", [[], gr.on("saved:*", Recompute()), gr.on("error:*", CheckFinite())])
def test_an_input_that_is_written(policy: gr.Policy) -> None:
    plain, x = Written(), torch.randn(600, WIDTH)
    model, theirs = copy.deepcopy(plain), x.clone()
    plain(x).backward()
    gr.transform(model, policy)(theirs).backward()

    torch.testing.assert_close(theirs, x)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.broad
@pytest.mark.parametrize("name", ["batch norm", "running mean"])
def test_only_what_the_backward_needs_is_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards: list[fx.GraphModule] = []
    cut = partitioning.partition

    def partition(*args: Any, **kwargs: Any) -> Any:
        forward, backward = cut(*args, **kwargs)
        forwards.append(forward)
        return forward, backward

    monkeypatch.setattr(partitioning, "partition", partition)
    gr.transform(Net(BUFFERS[name]), [])(rows())
    (forward,) = forwards
    copied = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)

    assert len(copied) == (0 if name == "batch norm" else 2)
