"""Bytes kept for the backward, by hand; errors of suggested forms as training records them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite.passes import ClipByValue, Observe, Recompute, Store

ROWS, WIDE, INNER = 32, 64, 256
FULL, INT8 = ROWS * INNER * 4, ROWS * (INNER + 4)
X = torch.linspace(-3, 3, ROWS * WIDE).sin().view(ROWS, WIDE)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, INNER), nn.ReLU(), nn.Linear(INNER, WIDE))


def memory(policy: Any, model: nn.Module | None = None) -> gr.Memory:
    return gr.transform(mlp() if model is None else model, policy).memory(X)


@pytest.mark.broad
@pytest.mark.parametrize(
    ("policy", "kept", "action"),
    [
        ([], FULL, ""),
        (gr.on("error:*", ClipByValue(1.0)), FULL, ""),
        (gr.on("saved:*", Store("int8")), INT8, "Store('int8')"),
        (gr.on("saved:1", Store("bfloat16")), FULL // 2, "Store('bfloat16')"),
    ],
)
def test_bytes_of_a_perceptron(policy: Any, kept: int, action: str) -> None:
    """The backward needs the ReLU's output alone: the input of the second layer, and its sign."""
    found = memory(policy)

    (row,) = found.rows
    assert (str(row.site), row.module, row.reason) == ("saved:1", "1", "")
    assert (row.plain_bytes, row.policy_bytes, row.action) == (FULL, kept, action)
    assert (found.plain_bytes, found.policy_bytes, found.host_bytes) == (FULL, kept, 0)


def test_what_is_kept_because_of_recompute() -> None:
    """The ReLU is computed again from the output of the layer before, which is computed from input and parameters."""
    model = nn.Sequential(nn.Linear(WIDE, INNER), nn.Tanh(), nn.Linear(INNER, WIDE))
    found = memory(gr.on("saved:1", Recompute()), model)

    rows = {str(row.site): row for row in found.rows}
    assert (rows["saved:1"].plain_bytes, rows["saved:1"].policy_bytes, rows["saved:1"].action) == (
        FULL,
        0,
        "Recompute()",
    )
    assert found.plain_bytes == FULL
    assert found.policy_bytes == sum(row.policy_bytes for row in found.rows)
    others = [row for name, row in rows.items() if name != "saved:1"]
    assert all(row.plain_bytes == 0 and row.reason == "kept because of the policy" for row in others)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(WIDE, INNER), nn.BatchNorm1d(INNER)
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(INNER, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.norm(self.up(x))))


def test_reasons() -> None:
    found = memory(gr.on("saved:*", Store("int8")), Mixed())
    reasons = {(row.module, row.reason, row.count) for row in found.rows if row.reason}

    assert ("drop", "it is torch.bool", 1) in reasons
    assert any(module == "norm" and "under 4096" in reason and count == 2 for module, reason, count in reasons)
    assert found.plain_bytes == sum(row.plain_bytes for row in found.rows) == 2 * FULL + FULL // 4 + 2 * 4 * INNER


def test_nothing_changes() -> None:
    """Buffers, parameters, gradients and random numbers stay, of the trace and of the forward that is measured."""
    model = Mixed()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = memory([], model)
    code = found.suggestion()

    assert 'gr.on("saved:*", Store("int8"))' in code
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.broad
@pytest.mark.parametrize("form", ["int8", "bfloat16", "float8_e4m3fn"])
def test_measured_errors_are_those_of_a_run(form: Any) -> None:
    """The oracle is ``stored_error`` of a training step on the same inputs."""
    model = gr.transform(mlp(), [gr.on("saved:1", Store(form)), gr.on("saved:1", Observe("stored_error"))])
    model(X).sum().backward()
    measure = model.memory(X)._measure
    assert measure is not None
    (measured,) = measure(0.0).values()
    error, size = measured[form]

    assert error == pytest.approx(model.monitor.latest()["stored_error@saved:1"], rel=1e-6)
    assert size == model.memory(X).policy_bytes - 4  # the record of the error is kept too


@pytest.mark.broad
def test_symbolic_sizes_count_as_given() -> None:
    model = gr.transform(mlp(), gr.on("saved:*", Store("int8")), dynamic=True)

    assert (model.memory(X).plain_bytes, model.memory(X).policy_bytes) == (FULL, INT8)
    assert "1 tensor, largest error" in model.memory(X).suggestion()


def test_refusals_are_those_of_trace() -> None:
    with pytest.raises(gr.NoSuchSiteError, match="saved:nothing"):
        memory(gr.on("saved:nothing", Store("int8")))
    with pytest.raises(gr.TraceError):
        memory([], mlp().requires_grad_(False))


def test_figures_are_pickled_without_the_graph() -> None:
    memory = gr.transform(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), []).memory(torch.ones(32, 64))
    other = pickle.loads(pickle.dumps(memory))

    assert other == memory
    with pytest.raises(RuntimeError, match=r"call model\.memory"):
        other.suggestion()
