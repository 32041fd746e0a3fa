"""Code of loops: a body in ATen nodes, and the operator that runs it once an iteration."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, fake_tensors
from gradrewrite.ir import editing
from gradrewrite.numerics.library import LIBRARY

Compile = Callable[[fx.GraphModule, Sequence[Tensor]], Callable[..., Any]]
_codes: weakref.WeakValueDictionary[str, LoopCode] = weakref.WeakValueDictionary()  # by key


@dataclass(eq=False)
class LoopCode:
    """The body of a loop, with the layout of its results.

    ``body(*carries, *inputs, *invariants)`` returns the next carries, then the outputs of the iteration. The operator
    ``loop`` returns one tensor a carry, then the outputs stacked over the iterations. Of a stacked carry that is all
    its values, T + 1 of them, the first one before (of a reversed loop: behind) the others; else the last one.
    """

    key: str
    body: fx.GraphModule
    num_carries: int
    num_inputs: int
    stacked: tuple[bool, ...]  # for each carry
    is_reversed: bool  # it begins with the last of its inputs
    # Compiles the body for arguments like these, when it runs first; None to run it op by op.
    compile: Compile | None = None
    _run: Callable[..., Any] | None = field(default=None, init=False)
    _sizes: dict[tuple[Any, ...], list[tuple[Any, ...]]] = field(default_factory=dict, init=False)

    @property
    def num_outputs(self) -> int:
        """Number of outputs of an iteration, carries left out."""
        return len(editing.outputs_of(self.body.graph.output_node())) - self.num_carries

    def results(
        self, carries: Sequence[Tensor], inputs: Sequence[Tensor], invariants: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return fake results of one iteration."""
        tensors = [*carries, *(x.new_empty(x.shape[1:]) for x in inputs), *invariants]
        return list(self.body(*tensors))

    def run(self, carries: list[Tensor], inputs: list[Tensor], invariants: list[Tensor]) -> list[Tensor]:
        """Run the loop."""
        carries, inputs = [t.contiguous() for t in carries], [t.contiguous() for t in inputs]
        invariants = [
            _laid_out(t, wanted) for t, wanted in zip(invariants, self._strides(len(invariants)), strict=True)
        ]
        length = len(inputs[0])
        stacks, slots = self._stacks(carries, inputs, invariants, length)
        first = length if self.is_reversed else 0
        for number, own in enumerate(slots[: sum(self.stacked)]):
            own[first].copy_(carries[[n for n, is_stacked in enumerate(self.stacked) if is_stacked][number]])
        return self._iterate(carries, inputs, invariants, stacks, slots, length)

    def _iterate(
        self,
        carries: list[Tensor],
        inputs: list[Tensor],
        invariants: list[Tensor],
        stacks: list[Tensor],
        slots: list[Sequence[Tensor]],
        length: int,
    ) -> list[Tensor]:
        of_carries = [n for n, is_stacked in enumerate(self.stacked) if is_stacked]
        others = [n for n, is_stacked in enumerate(self.stacked) if not is_stacked]
        carried, outputs = slots[: len(of_carries)], slots[len(of_carries) :]
        rows = [x.unbind(0) for x in inputs]
        current, run = list(carries), self._run
        # Of T + 1 carries iteration t reads number t and writes number t + 1, of a reversed loop the other way round.
        reads, writes = (1, 0) if self.is_reversed else (0, 1)
        for t in range(length - 1, -1, -1) if self.is_reversed else range(length):
            for n, own in zip(of_carries, carried, strict=True):
                current[n] = own[t + reads]
            args = [*current, *(row[t] for row in rows), *invariants]
            args += (own[t + writes] for own in carried)
            args += (own[t] for own in outputs)
            if run is None:
                run = self._run = self._prepared(args)
            results = run(args)
            for n, result in zip(others, results, strict=True):
                current[n] = result if result.is_contiguous() else result.contiguous()
        kept = iter(stacks)
        last = [next(kept) if is_stacked else current[n].clone() for n, is_stacked in enumerate(self.stacked)]
        return [*last, *kept]

    def _strides(self, count: int) -> list[tuple[Any, ...] | None]:
        """Return the strides of traced invariants; None for unknown ones."""
        nodes = self.body.graph.find_nodes(op="placeholder")
        known = [node.meta["val"].stride() if "val" in node.meta else None for node in nodes[len(nodes) - count :]]
        return known if count else []

    def _stacks(
        self, carries: list[Tensor], inputs: list[Tensor], invariants: list[Tensor], length: int
    ) -> tuple[list[Tensor], list[Sequence[Tensor]]]:
        """Return new stacks of carries and outputs, and their slots."""
        tensors = [*carries, *inputs, *invariants]
        sizes = tuple((tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors)
        if sizes not in self._sizes:
            fakes = fake_tensors.fakes_of(tensors)
            number = len(carries)
            with torch.no_grad(), fake_tensors.fake_mode_of(fakes):
                made = self.results(*self.split(fakes))
            kept = [t for t, is_stacked in zip(made, self.stacked, strict=False) if is_stacked]
            self._sizes[sizes] = [(tuple(t.shape), t.dtype, t.device) for t in (*kept, *made[number:])]
        stacks = [
            torch.empty((length + (n < sum(self.stacked)), *shape), dtype=dtype, device=device)
            for n, (shape, dtype, device) in enumerate(self._sizes[sizes])
        ]
        return stacks, [stack.unbind(0) for stack in stacks]

    def split(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split the arguments of the operator: carries, inputs, invariants."""
        first, second = self.num_carries, self.num_carries + self.num_inputs
        return list(tensors[:first]), list(tensors[first:second]), list(tensors[second:])

    def _prepared(self, args: Sequence[Tensor]) -> Callable[..., Any]:
        body = editing.copy_of(self.body)
        moved = [n for n, is_stacked in enumerate(self.stacked) if is_stacked]
        editing.write_to_inputs(body.graph, moved, self.num_carries)
        body.recompile()
        return aot_autograd.box(body) if self.compile is None else self.compile(body, args)


def _laid_out(tensor: Tensor, strides: tuple[Any, ...] | None) -> Tensor:
    """Return a tensor with these strides: a compiler may have given it others."""
    if strides is None or tensor.stride() == strides or not all(isinstance(n, int) for n in strides):
        return tensor
    return torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def code_for(code: LoopCode) -> LoopCode:
    """Let the operator find a code as long as it is alive; return the one that it finds under the same key."""
    return _codes.setdefault(code.key, code)


def code_named(key: str) -> LoopCode:
    """Return the code with a key."""
    return _codes[key]


LIBRARY.define("loop(Tensor[] tensors, str key) -> Tensor[]")


def _loop(tensors: list[Tensor], key: str) -> list[Tensor]:
    code = code_named(key)
    with torch.no_grad():
        return code.run(*code.split(tensors))


def _fake_loop(tensors: list[Tensor], key: str) -> list[Tensor]:
    code = code_named(key)
    carries, inputs, invariants = code.split(tensors)
    results, length = code.results(carries, inputs, invariants), inputs[0].shape[0]
    made = [
        out.new_empty((length + 1, *out.shape)) if is_stacked else out.new_empty(out.shape)
        for out, is_stacked in zip(results, code.stacked, strict=False)
    ]
    return [*made, *(out.new_empty((length, *out.shape)) for out in results[code.num_carries :])]


LIBRARY.impl("loop", _loop, "CompositeExplicitAutograd")
torch.library.register_fake("gradrewrite::loop", _fake_loop, lib=LIBRARY)

OP_LOOP = torch.ops.gradrewrite.loop.default


def code_of(node: fx.Node) -> LoopCode:
    """Return the code of a node that calls the operator ``loop``."""
    return code_named(str(node.args[1]))


def hold_code(node: fx.Node) -> None:
    """Keep the code of a node alive as long as the node, and its copies."""
    node.meta["loop"] = code_of(node)


def call(code: LoopCode, carries: Sequence[Any], inputs: Sequence[Any], invariants: Sequence[Any]) -> Any:
    """Call the operator ``loop``."""
    return OP_LOOP([*carries, *inputs, *invariants], code.key)
