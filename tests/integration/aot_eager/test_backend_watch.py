"""A backend for a module that is never called with it warns; backends are copied and pickled with their policy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import Scale

DOUBLE = gr.on("gradient:*", Scale(2.0))


class Lit(nn.Module):
    """As a LightningModule: its trainer calls ``training_step``, not the module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, x: Tensor) -> Tensor:
        return self.net(x).sum()


@pytest.mark.pure
def test_compiled_module_that_is_never_called_warns_once() -> None:
    lit, x = Lit(), torch.ones(2, 3)
    lit.compile(backend=gr.backend(DOUBLE))
    with pytest.warns(
        gr.RewriteWarning, match=r"net\.weight, net\.bias .*compiled model was never called.*training_step"
    ):
        lit.training_step(x).backward()
    lit.training_step(x).backward()


@pytest.mark.inductor
def test_compiled_module_that_is_called_does_not_warn() -> None:
    lit, x = Lit(), torch.ones(2, 3)
    lit.compile(backend=gr.backend(DOUBLE))
    lit(x).sum().backward()
    assert lit.net.bias.grad.tolist() == [4.0, 4.0]
    other = Lit()
    torch.compile(other, backend=gr.backend(DOUBLE))(x).sum().backward()
    assert other.net.bias.grad.tolist() == [4.0, 4.0]


@pytest.mark.pure
@pytest.mark.parametrize("make", [Lit, lambda: nn.Linear(3, 2)])
def test_second_module_is_refused(make: Callable[[], nn.Module]) -> None:
    backend = gr.backend(DOUBLE)
    first, other = Lit(), make()
    torch.compile(first, backend=backend)
    torch.compile(first, backend=backend)
    with pytest.raises(gr.PolicyError, match=r'has a Lit already: .* use gr.transform\(model, policy, regions="layers'):
        torch.compile(other, backend=backend)
    del first
    torch.compile(other, backend=backend)


@pytest.mark.inductor
@pytest.mark.parametrize("again", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_copies_and_pickles(again: object) -> None:
    backend = gr.backend(DOUBLE)
    copied = again(backend)
    assert (copied.monitor is backend.monitor) == (again is copy.deepcopy)
    net = nn.Linear(3, 2)
    torch.compile(net, backend=copied)(torch.ones(2, 3)).sum().backward()

    assert net.bias.grad.tolist() == [4.0, 4.0]
    assert len(copied.explain().graphs) == 1
    assert not backend.explain().graphs
