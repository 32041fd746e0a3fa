"""Attributes, modes and random numbers that stay as they were."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import torch
from torch import nn

from gradrewrite.integrations._kept import kept_attributes, kept_generators, kept_modes


class Owner:
    def __init__(self) -> None:
        self.number = 1
        self.metrics: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.metrics["train"]["loss"].append(1.0)
        self.data = [0] * 2000


def test_attributes_and_the_items_of_containers() -> None:
    owner = Owner()
    losses, data = owner.metrics["train"]["loss"], owner.data
    with kept_attributes(owner):
        owner.number = 2
        vars(owner)["other"] = 3
        owner.metrics["train"]["loss"].append(2.0)
        owner.metrics["eval"]["loss"].append(2.0)
        owner.data.append(1)

    assert (owner.number, dict(owner.metrics)) == (1, {"train": {"loss": [1.0]}})
    assert owner.metrics["train"]["loss"] is losses
    assert not hasattr(owner, "other")
    assert owner.data is data
    assert len(data) == 2000  # too long to be copied


def test_a_list_that_grows_beyond_the_copied_length() -> None:
    owner = Owner()
    owner.metrics["train"]["loss"] = [1.0] * 1000
    with kept_attributes(owner):
        owner.metrics["train"]["loss"] += [2.0] * 5
        owner.data[0] = 3

    assert owner.metrics["train"]["loss"] == [1.0] * 1000
    assert owner.data[0] == 3  # items of a long list are not restored


def test_a_module_keeps_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    weight = model[0].weight
    with kept_attributes(model):
        pass
    assert model[0].weight is weight


def test_modes() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    with kept_modes(model):
        model.eval()
    assert [module.training for module in model.modules()] == [True, True, False]


def test_random_numbers() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with kept_generators():
        first = draw()
    assert draw() == first
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
