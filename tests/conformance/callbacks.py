"""Functions of torch's OpInfo database as the bodies of callbacks."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # as conftest.py does

import gradrewrite as gr

from conformance.op_db import DTYPE, name_of, without_seed

NUM_SAMPLES = 12  # of an entry, among which one is looked for


@dataclass(frozen=True)
class Body:
    """A function of a tensor that returns one of its shape, dtype and device, and a tensor to call it with."""

    function: Callable[[Tensor], Tensor]
    given: Tensor


def _body_of(op: Callable[..., object], sample: SampleInput) -> Body | None:
    """The function of the first tensor of a sample; None if it maps to something else, or writes."""
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not places:
        return None
    first = places[0]
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    given = leaves[first]
    if given.dtype != DTYPE or given.layout is not torch.strided or given.numel() == 0:
        return None

    def function(x: Tensor) -> Tensor:
        args, kwargs = pytree.tree_unflatten([*leaves[:first], x, *leaves[first + 1 :]], spec)
        return op(*args, **kwargs)  # type: ignore[return-value]

    kept = given.clone()
    try:
        found = function(given.clone())
    except Exception:  # a sample that is not for this dtype
        return None
    if not isinstance(found, Tensor) or (found.shape, found.dtype, found.layout) != (kept.shape, DTYPE, torch.strided):
        return None
    return Body(function, kept)


def body_of(op: OpInfo) -> Body | None:
    """The first sample of an entry that is a body of a callback."""
    try:
        function = without_seed(op)
    except AttributeError:  # a random method, which writes in place
        return None
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its samples
        samples = itertools.islice(op.sample_inputs("cpu", DTYPE, requires_grad=False), NUM_SAMPLES)
        return next((body for sample in samples if (body := _body_of(function, sample)) is not None), None)


ENTRIES: Mapping[str, OpInfo] = {name_of(op): op for op in op_db if DTYPE in op.dtypes}
LIST = Path(__file__).parent / "callbacks.txt"  # to find them takes longer than to collect tests may take
NAMES = [name for name in LIST.read_text().split() if name in ENTRIES]


def found_names() -> list[str]:
    """The names of all entries that are bodies; ``python tests/conformance/callbacks.py`` writes the list."""
    return [name for name, op in ENTRIES.items() if body_of(op) is not None]


class Given(nn.Module):
    """The error of each product, and the gradient of each weight, is a given tensor."""

    def __init__(self, bodies: Sequence[Body]) -> None:
        super().__init__()
        self.bodies = bodies
        self.products = nn.ModuleList(Product(body.given) for body in bodies)

    def forward(self, weight: Tensor) -> Tensor:
        return torch.stack([product(weight) for product in self.products]).sum()


class Product(nn.Module):
    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.weight, self.given = nn.Parameter(torch.ones_like(given)), given

    def forward(self, one: Tensor) -> Tensor:
        return ((self.weight * one) * self.given).sum()


def at(kind: str, bodies: Sequence[Body]) -> list[gr.Rule]:
    """A policy with each body at its own site."""
    ends = {"error": "/mul#0", "gradient": ".weight"}
    return [gr.on(f"{kind}:products.{n}{ends[kind]}", body.function) for n, body in enumerate(bodies)]


def gradients(plain: Given, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    plain.zero_grad()
    run(torch.ones((), dtype=DTYPE)).backward()
    return [product.weight.grad for product in plain.products]


if __name__ == "__main__":
    LIST.write_text("\n".join(found_names()) + "\n")
