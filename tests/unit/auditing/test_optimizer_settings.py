"""Faults of optimizers: each is found by itself, and shown by a step in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop

from gradrewrite.auditing.optimizer_settings import optimizer_causes
from gradrewrite.diagnostics.causes import Cause

from models.optimizers import OPTIMIZERS
from models.small import Layers, TwoLayers

pytestmark = pytest.mark.pure


def all_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def audit(optimizer: Optimizer, model: nn.Module, **kwargs: Any) -> tuple[list[Cause], list[str]]:
    return optimizer_causes(optimizer, model, kwargs.pop("with_gradient", all_names(model)), **kwargs)


def only(optimizer: Optimizer, model: nn.Module, **kwargs: Any) -> Cause:
    (cause,), remarks = audit(optimizer, model, **kwargs)
    assert not remarks
    assert cause.advice
    return cause


def moved(optimizer: Optimizer, model: nn.Module, gradient: float = 1.0) -> list[str]:
    """Names of the parameters that a step moves when all have a gradient."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.full_like(p, gradient) if p.requires_grad else None
    optimizer.step()
    return [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sound_optimizers_have_no_causes(name: str) -> None:
    model = TwoLayers()
    optimizer = OPTIMIZERS[name](model.parameters())

    assert audit(optimizer, model, steps=[{n: torch.ones_like(p) for n, p in model.named_parameters()}]) == ([], [])


def test_missing_parameters_are_one_cause() -> None:
    model = Layers(6, 2)
    optimizer = SGD(model.layers[0].parameters(), lr=0.1)
    cause = only(optimizer, model)

    assert moved(optimizer, model) == ["layers.0.weight", "layers.0.bias"]
    assert cause.kind == "not in the optimizer"
    assert cause.site == "gradient:layers.1.weight"
    assert cause.text == (
        "10 parameters with a gradient are not in the optimizer and never changed: layers.1.weight, layers.1.bias, "
        "layers.2.weight, layers.2.bias, layers.3.weight and 5 more."
    )
    assert "add_param_group" in cause.advice


def test_frozen_parameters_and_those_without_a_gradient_are_not_missing() -> None:
    model = TwoLayers()
    model.one.requires_grad_(False)
    optimizer = SGD([model.two.weight], lr=0.1)

    assert audit(optimizer, model, with_gradient=["two.weight"]) == ([], [])


def test_tied_parameters_go_by_their_first_name() -> None:
    model = TwoLayers(3, 3, 3)
    model.two.weight = model.one.weight

    assert audit(SGD(model.parameters(), lr=0.1), model) == ([], [])


def test_replaced_parameters_are_told_from_forgotten_ones() -> None:
    model = TwoLayers()
    optimizer = AdamW(model.parameters())
    model.two = nn.Linear(3, 2)
    cause = only(optimizer, model)

    assert moved(optimizer, model) == ["one.weight", "one.bias"]
    assert cause.text == (
        "2 parameters with a gradient are not in the optimizer and never changed: two.weight, two.bias. The optimizer "
        "holds 2 tensors ([2, 3], [2]) that the model no longer has: parameters were replaced after it was made."
    )
    assert cause.advice.endswith("optimizer = AdamW(model.parameters(), ...).")


def test_a_copy_of_the_model_is_another_model() -> None:
    model = TwoLayers()
    optimizer = SGD(model.parameters(), lr=0.1)
    other = copy.deepcopy(model)

    assert moved(optimizer, other) == []
    assert "4 parameters with a gradient are not in the optimizer" in only(optimizer, other).text


def test_parameters_of_another_module_are_a_remark() -> None:
    model, weights = TwoLayers(), [nn.Parameter(torch.ones(7)) for _ in range(2)]
    causes, remarks = audit(SGD([*model.parameters(), *weights], lr=0.1), model)

    assert causes == []
    assert remarks == ["The optimizer holds 2 tensors ([7] x 2) from outside of the model."]


def test_forgotten_parameters_beside_those_of_another_module() -> None:
    model, weight = TwoLayers(), nn.Parameter(torch.ones(3))
    causes, remarks = audit(SGD([*model.two.parameters(), weight], lr=0.1), model)  # one.bias has its shape

    assert [cause.text for cause in causes] == [
        "2 parameters with a gradient are not in the optimizer and never changed: one.weight, one.bias."
    ]
    assert remarks == ["The optimizer holds 1 tensor ([3]) from outside of the model."]


def test_float32_copies_of_narrow_parameters_are_master_weights() -> None:
    model = TwoLayers().to(torch.bfloat16)
    causes, (remark,) = audit(Adam([p.detach().float() for p in model.parameters()]), model)

    assert causes == []
    assert "master weights" in remark


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_held_twice_moves_twice() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = SGD([model.weight, model.weight], lr=1.0)
    before = model.weight.detach().clone()
    cause = only(optimizer, model)
    moved(optimizer, model)

    assert torch.allclose(model.weight, before - 2)
    assert cause.kind == "optimizer setting"
    assert cause.text == "1 parameter is in the optimizer more than once: weight. Each update moves it once per entry."


def test_idle_parameters_are_remarks() -> None:
    model = TwoLayers()
    model.one.requires_grad_(False)
    causes, remarks = audit(SGD(model.parameters(), lr=0.1), model, with_gradient=["two.weight"])

    assert causes == []
    assert remarks == [
        "The optimizer holds 2 frozen parameters: one.weight, one.bias.",
    ]


def test_learning_rate_of_zero() -> None:
    model = TwoLayers()
    optimizer = AdamW([{"params": model.one.parameters()}, {"params": model.two.parameters(), "lr": 0.0}], lr=0.1)
    cause = only(optimizer, model)

    assert moved(optimizer, model) == ["one.weight", "one.bias"]
    assert cause.site == "gradient:two.weight"
    assert cause.text == "The learning rate of param group 1 is 0: no update moves two.weight, two.bias."


def test_learning_rates_that_may_change_are_remarks() -> None:
    model = TwoLayers()
    scheduled = SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: step / 10)
    causes, (remark,) = audit(scheduled, model)

    assert causes == []
    assert remark.endswith("as long as no scheduler changes it.")
    assert audit(Adam(model.parameters(), lr=torch.tensor(0.0)), model)[0] == []


def test_empty_param_groups() -> None:
    model = TwoLayers()
    groups: list[dict[str, Any]] = [
        {"params": model.parameters()},
        {"params": [p for name, p in model.named_parameters() if "norm" in name], "weight_decay": 0.0},
    ]
    cause = only(SGD(groups, lr=0.1), model)

    assert cause.text == "Param group 1 holds no parameter: a filter matched nothing."
    assert cause.site == ""


def masked(model: nn.Linear) -> list[Mapping[str, Tensor]]:
    """Freeze the first row by a hook, and return the gradients of two steps."""
    mask = torch.ones_like(model.weight)
    mask[0] = 0
    model.weight.register_hook(mask.mul)
    steps: list[Mapping[str, Tensor]] = []
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(5, model.in_features)).square().sum().backward()
        steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return steps


@pytest.mark.parametrize(("decay", "wanted"), [(0.1, 1), (0.0, 0)])
def test_weight_decay_moves_masked_rows(decay: float, wanted: int) -> None:
    model = nn.Linear(3, 4)
    steps = masked(model)
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=decay)
    causes, remarks = audit(optimizer, model, steps=steps)
    before = model.weight.detach().clone()
    optimizer.step()

    assert not torch.equal(model.weight[0], before[0]) == bool(wanted)
    assert remarks == []
    assert [cause.text for cause in causes] == wanted * [
        "Row 0 of weight (of 4) got no gradient in 2 steps, and it has a gradient hook; weight_decay=0.1 of param "
        "group 0 moves it all the same."
    ]


def test_masks_need_steps_rows_that_are_not_zero_and_some_gradient() -> None:
    model = nn.Linear(3, 4)
    steps = masked(model)
    optimizer = AdamW(model.parameters())

    assert audit(optimizer, model) == ([], [])
    assert audit(optimizer, model, steps=[{"weight": torch.zeros(4, 3)}]) == ([], [])
    assert audit(optimizer, nn.Linear(3, 4), with_gradient=[], steps=steps)[0] == []
    with torch.no_grad():
        model.weight[0] = 0
    assert audit(optimizer, model, steps=steps) == ([], [])


@pytest.mark.parametrize("is_sparse", [False, True])
def test_weight_decay_moves_a_padding_row(is_sparse: bool) -> None:
    model = nn.Embedding(6, 2, padding_idx=1, sparse=is_sparse)
    model(torch.tensor([0, 1, 2])).sum().backward()
    assert model.weight.grad is not None
    steps = [{"weight": model.weight.grad}]
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.01)

    assert audit(optimizer, model, steps=steps) == ([], [])  # the row is 0
    with torch.no_grad():
        model.weight[1] = 1.0
    assert only(optimizer, model, steps=steps).text.startswith(
        "Row 1 of weight (of 6) got no gradient in 1 step, and it "
    )


def test_unseen_rows_of_an_embedding_with_a_hook_are_a_remark() -> None:
    model = nn.Embedding(6, 2)
    model.weight.register_hook(lambda g: g * 2)
    model(torch.tensor([0, 1])).sum().backward()
    assert model.weight.grad is not None
    causes, (remark,) = audit(AdamW(model.parameters()), model, steps=[{"weight": model.weight.grad}])

    assert causes == []
    assert remark.startswith("Rows 2, 3, 4, 5 of weight (of 6)")
    assert remark.endswith("if the hook is what freezes them.")


LOSSY: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": lambda m: Adam(m.parameters()),
    "adamw": lambda m: AdamW(m.parameters(), foreach=True),
    "nadam": lambda m: NAdam(m.parameters()),
    "radam": lambda m: RAdam(m.parameters(), foreach=True),
    "adamax": lambda m: Adamax(m.parameters()),
    "adagrad": lambda m: Adagrad(m.parameters()),
    "rmsprop": lambda m: RMSprop(m.parameters()),
}


@pytest.mark.parametrize("name", LOSSY)
def test_eps_that_float16_loses_gives_nan(name: str) -> None:
    model = TwoLayers(8, 8, 8).half()
    optimizer = LOSSY[name](model)
    cause = only(optimizer, model)
    moved(optimizer, model, gradient=0.0)

    assert model.one.weight.isnan().any()
    assert cause.kind == "constant vanishes"
    assert cause.site == "gradient:one.weight"
    assert "is 0 in float16, the dtype of one.weight, one.bias, two.weight, two.bias: a gradient whose" in cause.text
    assert "eps=0.0001)" in cause.advice


class WideAdam(Adam):
    """An optimizer that updates in float32."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            gradient = torch.zeros_like(p).float() if p.grad is None else p.grad.float()
            p.data.copy_(p.float() - 0.1 * gradient / (gradient.abs() + self.param_groups[0]["eps"]))


KEPT: dict[str, tuple[torch.dtype, Callable[[nn.Module], Optimizer]]] = {
    "fused adam": (torch.float16, lambda m: Adam(m.parameters(), fused=True)),
    "larger eps": (torch.float16, lambda m: Adam(m.parameters(), eps=1e-4)),
    "adadelta": (torch.float16, lambda m: Adadelta(m.parameters())),
    "bfloat16": (torch.bfloat16, lambda m: Adam(m.parameters())),
    "float32": (torch.float32, lambda m: RMSprop(m.parameters())),
    "own step": (torch.float16, lambda m: WideAdam(m.parameters())),
    "muon": (torch.float16, lambda m: Muon([p for p in m.parameters() if p.dim() > 1], eps=1e-9)),
}


@pytest.mark.parametrize("name", KEPT)
def test_eps_that_is_kept_is_no_cause(name: str) -> None:
    dtype, make = KEPT[name]
    model = TwoLayers(bias=False).to(dtype)
    model.one.bias.requires_grad_(False)
    optimizer = make(model)
    moved(optimizer, model, gradient=0.0)

    assert all(p.isfinite().all() for p in model.parameters())
    assert audit(optimizer, model)[0] == []
