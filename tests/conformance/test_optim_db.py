"""Torch's OptimizerInfo database: guarded steps equal plain ones bit for bit, and skipped steps leave no trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

import gradrewrite as gr
from gradrewrite.passes import CheckFinite

from conformance.outcomes import check_outcome

SUITE = "optim_db"
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "forloop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}
}  # fmt: skip


def name_of(info: OptimizerInfo) -> str:
    optimizer: Any = info.optim_cls
    return str(optimizer.__name__)


def implementations_of(info: OptimizerInfo) -> list[str]:
    is_there = {"foreach": "foreach" in info.supported_impls, "fused": "cpu" in info.supports_fused_on}
    return ["forloop", *(name for name, found in is_there.items() if found)]


def _cases() -> Iterator[tuple[str, tuple[OptimizerInfo, dict[str, Any]]]]:
    for info in optim_db:
        for given in info.optim_inputs_func(device="cpu"):
            for name in implementations_of(info):
                choice = IMPLEMENTATIONS[name] if "foreach" in info.supported_impls else {}
                desc = given.desc.replace("|", "/")
                yield f"{name_of(info)}.{name}.{desc}", (info, {**given.kwargs, **choice})


SETTINGS = dict(_cases())
CASES = list(SETTINGS)


class Model(nn.Module):
    """Two layers; their gradients are infinite where an input is."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first: nn.Module = nn.Embedding(7, 4, sparse=True) if is_sparse else nn.Linear(4, 4)
        self.second = nn.Linear(4, 3, bias=not is_sparse)
        self.second.requires_grad_(not is_sparse)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return ((self.second(self.first(x).tanh())) * scale).square().mean()


class Training:
    """A model and its optimizer, guarded or plain, step by step."""

    def __init__(self, info: OptimizerInfo, settings: Mapping[str, Any], *, guarded: bool) -> None:
        self.info, self.settings, self.guarded = info, settings, guarded
        self.model = Model(is_sparse=info.only_supports_sparse_grads).double()
        self.run = gr.transform(self.model, gr.on("gradient:*", CheckFinite("skip"))) if guarded else self.model
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if name_of(info) == "Muon":  # matrices alone
            parameters = [p for p in parameters if p.dim() == 2]
        self.optimizer = info.optim_cls(parameters, **copy.deepcopy(dict(settings)))
        if guarded:
            gr.guard(self.optimizer, self.run)

    def step(self, seed: int, *, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size, is_sparse = (5, 4), self.info.only_supports_sparse_grads
        x = (
            torch.randint(0, 7, (5,), generator=generator)
            if is_sparse
            else torch.randn(size, generator=generator).double()
        )

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.run(x, torch.tensor(scale, dtype=torch.float64))
            loss.backward()
            return loss

        if self.info.step_requires_closure:
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Copies of parameters and optimizer state."""
        parameters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return {"parameters": parameters, "optimizer": copy.deepcopy(self.optimizer.state_dict())}

    def load(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


def assert_same(found: Any, wanted: Any, where: str) -> None:
    """Bit for bit, with the same keys."""
    if isinstance(wanted, Mapping):
        assert list(map(str, found)) == list(map(str, wanted)), where
        for key, value in wanted.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for number, value in enumerate(wanted):
            assert_same(found[number], value, f"{where}.{number}")
    elif isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{where}: {m}")
    else:
        assert found == wanted, where


def check(name: str) -> None:
    info, settings = SETTINGS[name]
    plain, guarded = (Training(info, settings, guarded=is_guarded) for is_guarded in (False, True))
    start = guarded.state()
    guarded.step(0, scale=float("inf"))
    assert_same(guarded.state()["parameters"], start["parameters"], "after a skipped first step")
    for seed in range(1, 4):
        plain.step(seed)
        guarded.step(seed)
        assert_same(guarded.state(), plain.state(), f"after step {seed}")
    before = guarded.state()
    guarded.step(4, scale=float("inf"))
    assert_same(guarded.state(), before, "after a skipped step")
    resumed = [Training(info, settings, guarded=is_guarded) for is_guarded in (False, True)]
    for training in resumed:
        training.load(before)
    for training in (plain, guarded, *resumed):
        training.step(5)
    assert_same(guarded.state(), plain.state(), "after the step behind a skipped one")
    assert_same(resumed[1].state(), resumed[0].state(), "after the step behind a restored state")


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_guarded_steps(name: str) -> None:
    check_outcome(SUITE, name, lambda: check(name))
