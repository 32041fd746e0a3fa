"""Models of transformers, timm, diffusers and torch_geometric: empty policy, and clips of all errors and gradients."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm
from gradrewrite.testing import assert_inert, assert_matches_eager

from conformance.outcomes import TorchRefusesError, check_outcome
from models.architectures import ARCHITECTURES, FURTHER, Architecture
from models.library_models import LIBRARY_MODELS, LibraryModel, find_libraries, let_dropouts_drop

SUITE = "zoo"
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Given:
    """A model, its inputs, and its loss; None is a weighted sum of all outputs."""

    model: nn.Module
    inputs: Mapping[str, Any]
    loss: Loss | None


def _of_architecture(a: Architecture) -> Given:
    model, inputs = a.make(), a.make_inputs()
    let_dropouts_drop(model)
    if a.prepare is not None:
        a.prepare(model, inputs)
    return Given(model, inputs, lambda out: a.loss(out, inputs))


def _name(model: Architecture | LibraryModel) -> str:
    library = model.library if isinstance(model, LibraryModel) else "transformers"
    return f"{library}.{model.name}" + (f", {model.variant}" if model.variant else "")


MODELS: dict[str, Architecture | LibraryModel] = {
    _name(m): m for m in (*(a for a in ARCHITECTURES if a.works), *FURTHER, *LIBRARY_MODELS)
}
CASES = list(MODELS)


def given(name: str) -> Given:
    library = name.partition(".")[0]
    find_libraries()
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: .ci/run shows how the libraries of these models are installed")
    torch.manual_seed(0)
    model = MODELS[name]
    if isinstance(model, Architecture):
        return _of_architecture(model)
    return Given(model.make(), model.inputs(), None)


def check(name: str) -> None:
    case = given(name)
    try:
        assert_inert(case.model, compiled=False, loss_fn=case.loss, **case.inputs)
    except Exception as err:
        raise_if_torch_refuses(case, err)
        raise
    torch.compiler.reset()
    check_clips(case)


def clip_to_mean(g: Tensor) -> Tensor:
    """A clip that acts however small the clips before it have made the error."""
    bound = g.abs().mean()
    return g.clamp(-bound, bound)


def check_clips(case: Given) -> None:
    """The error of each module output, and all gradients, against hooks on the plain model."""
    policy = [gr.on("error:*", clip_to_mean), gr.on("gradient:*", ClipByGlobalNorm(1e-9))]
    found = assert_matches_eager(case.model, policy, compiled=False, loss_fn=case.loss, **case.inputs)
    assert not found.refused, found.refused
    assert {site.partition(":")[0] for site in found.changed} == {"error", "gradient"}, sorted(found.acted)


def backward(run: Callable[..., Any], model: nn.Module, case: Given) -> None:
    """One backward, from the same random numbers each time."""
    torch.manual_seed(1)
    out = run(**{n: t.clone() if isinstance(t, Tensor) else t for n, t in case.inputs.items()})
    (weighted(out) if case.loss is None else case.loss(out)).backward()


def weighted(out: Any) -> Tensor:
    tensors = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([(t.flatten() * torch.cos(torch.arange(t.numel(), dtype=t.dtype))).sum() for t in tensors]).sum()


def raise_if_torch_refuses(case: Given, err: Exception) -> None:
    if isinstance(err, AssertionError):
        return
    torch.compiler.reset()
    model = copy.deepcopy(case.model)
    try:
        backward(torch.compile(model, backend="aot_eager", fullgraph=True), model, case)
    except Exception as plain:
        raise TorchRefusesError from plain


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_models(name: str) -> None:
    check_outcome(SUITE, name, lambda: check(name))
