"""Samples of torch's OpInfo database as modules."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

DTYPE = torch.float64
NUM_SAMPLES = 2


class Op(nn.Module):
    """One op with the arguments of a sample that are no tensors."""

    def __init__(self, op: Callable[..., Any], sample: SampleInput) -> None:
        super().__init__()
        self.op, self.process = op, sample.output_process_fn_grad
        leaves, self.spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self.given = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def forward(self, *inputs: Tensor) -> Any:
        leaves = list(self.given)
        for place, tensor in zip(self.places, inputs, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.process(self.op(*args, **kwargs))


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def without_seed(op: OpInfo) -> Callable[..., Any]:
    """The op of an entry; where that sets the seed, which cannot be traced, the function that its name says."""
    code = getattr(op.op, "__code__", None)
    if code is None or "wrapper_set_seed" not in code.co_names:
        return op.op
    if any(isinstance(constant, CodeType) for constant in code.co_consts):  # it prepares the arguments, too
        return op.op
    return operator.attrgetter(op.name)(torch)


def _has_gradient(inputs: list[Tensor]) -> bool:
    return any(t.requires_grad for t in inputs) and all(t.layout is torch.strided for t in inputs)


DIFFERENTIABLE = {name_of(op): op for op in op_db if op.supports_autograd and DTYPE in op.dtypes}


def samples_of(op: OpInfo, number: int = NUM_SAMPLES) -> Iterator[tuple[Op, list[Tensor]]]:
    """The first samples of an op that have a differentiable input: a module and its inputs."""
    torch.manual_seed(0)
    samples = op.sample_inputs("cpu", DTYPE, requires_grad=True)
    found = ((Op(without_seed(op), sample)) for sample in samples)
    differentiable = (module for module in found if _has_gradient(module.tensors))
    for module in itertools.islice(differentiable, number):
        inputs, module.tensors = module.tensors, []
        yield module, inputs
