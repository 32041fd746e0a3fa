"""Opacus's tests of layers, with gradrewrite in the place of Opacus: per-example gradients against its micro-batches.

The tests draw the settings of a layer by hypothesis and call ``run_test``, which is replaced here.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from torch import Tensor, nn

from conformance.examples import Examples
from conformance.outcomes import Outcome, check_outcome, outcome_of

SUITE = "opacus_layers"
NUM_EXAMPLES = 20  # settings of a layer


def _tests() -> Iterator[tuple[str, type[unittest.TestCase], str]]:
    package = pytest.importorskip("opacus.tests.grad_samples", reason="the layers are those of Opacus")
    base = importlib.import_module("opacus.tests.grad_samples.common").GradSampleHooks_test
    for info in pkgutil.iter_modules(package.__path__):
        if not info.name.endswith("_test"):
            continue
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, base) and kind is not base:
                for method in unittest.defaultTestLoader.getTestCaseNames(kind):
                    yield f"{info.name.removesuffix('_test')}.{method}", kind, method


TESTS = {name: (kind, method) for name, kind, method in _tests()}
CASES = list(TESTS)


class BatchFirst(nn.Module):
    """A layer on a batch in dimension 0, whatever dimension the layer takes it in."""

    def __init__(self, layer: nn.Module, dim: int) -> None:
        super().__init__()
        self.layer, self.dim = layer, dim

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.movedim(0, self.dim))
        return found.movedim(self.dim, 0)


def examples_of(x: Any, module: nn.Module, batch_first: bool = True, **_: Any) -> Examples | None:
    """The arguments of ``run_test``; None if there are no several examples in one dimension of a tensor."""
    module = module.double()
    if type(x) is tuple:  # words and where their bags begin: of several sizes, so they have to be refused
        return Examples(lambda: module, list(x), list(range(len(x))))
    if not isinstance(x, Tensor):  # a packed sequence
        return None
    dim = 0 if batch_first else 1
    given = x.movedim(dim, 0)
    given = given.double() if given.is_floating_point() else given
    return Examples(lambda: BatchFirst(module, dim), [given], [0]) if given.shape[0] > 1 else None


def _settings(function: Callable[..., Any], wanted: settings) -> Any:
    """Other settings of a test than those it was decorated with, which hypothesis lets nobody replace."""
    if not hasattr(function, "_hypothesis_internal_use_settings"):
        return contextlib.nullcontext()
    return mock.patch.object(function, "_hypothesis_internal_use_settings", wanted)


def check(name: str) -> None:
    kind, method = TESTS[name]
    found: list[Outcome] = []
    errors: list[Exception] = []

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        examples = examples_of(*args, **kwargs)

        def compare() -> None:
            try:
                examples.check()
            except Exception as err:
                errors.append(err)
                raise

        if examples is not None:
            found.append(outcome_of(compare))

    function = getattr(kind, method)
    quick = settings(
        max_examples=NUM_EXAMPLES, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    torch.manual_seed(0)
    with mock.patch.object(kind, "run_test", run), _settings(function, quick):
        function(kind(method))
    if not found:
        pytest.skip("no setting has several examples in one dimension of a tensor")
    if errors:
        raise errors[0]


@pytest.mark.slow
@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_a_loop_or_refused(name: str) -> None:
    check_outcome(SUITE, name, lambda: check(name))
