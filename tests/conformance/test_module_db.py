"""Torch's ModuleInfo database: clips at the outputs of modules against hooks, and the empty policy bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, module_db

from conformance.outcomes import check_outcome
from conformance.reference import Comparison, check_samples

SUITE = "module_db"
NUM_SAMPLES = 2
MODULES: dict[str, ModuleInfo] = {}
for _info in module_db:
    _count = sum(name.split("#")[0] == _info.formatted_name for name in MODULES)
    MODULES[f"{_info.formatted_name}#{_count}" if _count else _info.formatted_name] = _info
CASES = list(MODULES)


# Loops form the gradient of a weight by one product, with another order of additions.
RECURRENT = ("nn_RNN", "nn_GRU", "nn_LSTM")


class Module(nn.Module):
    """A module and the arguments of a sample by name."""

    def __init__(self, inner: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module, self.names = inner, names

    def forward(self, *inputs: Any) -> Any:
        number = len(inputs) - len(self.names)
        return self.module(*inputs[:number], **dict(zip(self.names, inputs[number:], strict=True)))


def samples_of(info: ModuleInfo, number: int = NUM_SAMPLES) -> Iterator[tuple[Callable[[], Module], list[Any]]]:
    """The first samples of a module class in training mode: what makes the module, and its inputs."""
    torch.manual_seed(0)
    samples = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=True)
    for sample in itertools.islice((s for s in samples if s.forward_input is not None), number):
        construct, given = sample.constructor_input, sample.forward_input

        def make(construct: Any = construct, given: Any = given) -> Module:
            torch.manual_seed(3)
            # Lazy modules make their parameters in the first call.
            module = info.module_cls(*construct.args, **construct.kwargs).to(torch.float64)
            made = Module(module, tuple(given.kwargs)).train(True)
            if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
                made(*given.args, *given.kwargs.values())
            return made

        yield make, [*given.args, *given.kwargs.values()]


def check(name: str) -> None:
    samples = samples_of(MODULES[name])
    with torch._dynamo.config.patch(allow_rnn=True):  # for the plain model
        check_samples((Comparison(make, inputs) for make, inputs in samples), is_inert=name not in RECURRENT)


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_clips_and_the_empty_policy(name: str) -> None:
    check_outcome(SUITE, name, lambda: check(name))
