"""Small random fx graphs of ATen operations, as hypothesis draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

SIZE = 3
ATEN = torch.ops.aten
UNARY: dict[str, Any] = {
    "neg": ATEN.neg.default,
    "tanh": ATEN.tanh.default,
    "exp": ATEN.exp.default,
    "log": ATEN.log.default,
    "sqrt": ATEN.sqrt.default,
    "reciprocal": ATEN.reciprocal.default,
    "relu": ATEN.relu.default,
}
BINARY: dict[str, Any] = {
    "add": ATEN.add.Tensor,
    "sub": ATEN.sub.Tensor,
    "mul": ATEN.mul.Tensor,
    "div": ATEN.div.Tensor,
    "maximum": ATEN.maximum.default,
}


@dataclass(frozen=True)
class Op:
    """One operation; its operands are values by their number: inputs first, then the results of earlier operations."""

    name: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """A program over vectors: inputs, operations one after the other, and which values it returns."""

    num_inputs: int
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return self.num_inputs + len(self.ops)

    def values(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """All values, computed eagerly."""
        found = list(inputs)
        for op in self.ops:
            run = UNARY.get(op.name) or BINARY[op.name]
            found.append(run(*(found[n] for n in op.operands)))
        return found

    def graph(self) -> tuple[fx.GraphModule, list[fx.Node]]:
        """The same as a graph, and its nodes in the order of the values."""
        graph, mode = fx.Graph(), FakeTensorMode()
        with mode:
            fakes = self.values([torch.empty(SIZE) for _ in range(self.num_inputs)])
        nodes = [graph.placeholder(f"x{n}") for n in range(self.num_inputs)]
        for op in self.ops:
            run = UNARY.get(op.name) or BINARY[op.name]
            nodes.append(graph.call_function(run, tuple(nodes[n] for n in op.operands)))
        for node, fake in zip(nodes, fakes, strict=True):
            node.meta["val"] = fake
        graph.output(tuple(nodes[n] for n in self.outputs))
        return fx.GraphModule({}, graph), nodes


@st.composite
def chains(draw: Any, max_ops: int = 8) -> Chain:
    num_inputs = draw(st.integers(1, 3))
    ops: list[Op] = []
    for n in range(draw(st.integers(1, max_ops))):
        value = st.integers(0, num_inputs + n - 1)
        name = draw(st.sampled_from([*UNARY, *BINARY]))
        ops.append(Op(name, tuple(draw(value) for _ in range(1 if name in UNARY else 2))))
    last = num_inputs + len(ops) - 1
    outputs = draw(st.lists(st.integers(0, last), min_size=1, max_size=4))
    return Chain(num_inputs, tuple(ops), tuple(outputs))


def inputs_of(chain: Chain, seed: int) -> list[Tensor]:
    """Inputs of both signs and of several magnitudes, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(chain.num_inputs):
        scale = 10.0 ** float(torch.randint(-2, 3, (), generator=generator))
        value = torch.randn(SIZE, generator=generator) * scale
        found.append(torch.where(torch.rand(SIZE, generator=generator) < 0.1, 0.0, value))
    return found
