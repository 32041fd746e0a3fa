"""Calls of the code of a loop: its forward, and its backward with the gradients of invariants behind it."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, fake_tensors
from gradrewrite.ir import editing, markers
from gradrewrite.ir.loop_code import call
from gradrewrite.ir.markers import value_of
from gradrewrite.rewriting.loop_bodies import Given, LoopParts


@dataclass(frozen=True)
class LoopCalls:
    """The functions of tensors that a graph gets in the place of a loop."""

    parts: LoopParts

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Run the loop on carries, inputs and invariants.

        Returns the last carries, results and further outputs stacked by time (the latter in the order of execution),
        the tensors of the operator, and the values that do not change.
        """
        parts, loop = self.parts, self.parts.body.loop
        carries, inputs, invariants = loop.split(tensors)
        inputs, known = self._counted(inputs), parts.invariants_of(invariants)
        made = call(parts.forward, carries, inputs, [known[n] for n in parts.forward_reads])
        count = len(parts.results) - parts.body.num_forward
        results = [self._stack(found, inputs, known, made) for found in parts.results]
        last = [self._last(n, made[n]) for n in range(loop.num_carries)]
        return [
            *last,
            *results[:count],
            *map(self._in_order, results[count:]),
            *made,
            *known[len(known) - self._extra :],
        ]

    def split_forward(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split the results of ``forward``: of the loop, further outputs, inputs of the backward."""
        first, second = self.parts.body.num_results, self.parts.body.num_results + self.parts.body.num_forward
        return list(values[:first]), list(values[first:second]), list(values[second:])

    def backward(self, *tensors: Tensor) -> list[Tensor]:
        """Run the backward on gradients of the results, arguments of the loop, and the last results of ``forward``.

        Returns the gradients of the wanted arguments, further outputs in the order of the forward's execution, and the
        states that are carried.
        """
        parts, body, loop = self.parts, self.parts.body, self.parts.body.loop
        code = parts.backward
        assert code is not None
        assert parts.tail is not None
        tangents, rest = tensors[: len(body.floating)], tensors[len(body.floating) :]
        given, made = rest[: len(rest) - self._num_made], list(rest[len(rest) - self._num_made :])
        inputs, invariants = self._counted(loop.split(given)[1]), loop.split(given)[2]
        tables = [self._in_order(own.narrow(0, 0, inputs[0].shape[0])) for own in body.tables]
        if body.live:  # as they are now
            known = parts.invariants_of(invariants)
        else:
            known = [*invariants, *made[len(made) - self._extra :]]
        saved = [self._stack(found, inputs, known, made) for found in parts.saved]
        number, moving = code.num_carries - len(body.carried), parts.num_moving
        carries, inputs_ = [*tangents[:number], *body.carried], [*tangents[number:], *tables, *saved[:moving]]
        inputs_ = inputs_ or [inputs[0].new_empty((inputs[0].shape[0],), dtype=torch.bool)]
        outputs = call(code, carries, inputs_, saved[moving:])
        states, stacks = outputs[number : code.num_carries], outputs[code.num_carries :]
        of_inputs = [stacks[n] for n in parts.inputs_at]
        further = [self._in_order(stacks[n]) for n in parts.further_at]
        return [*outputs[:number], *of_inputs, *parts.tail(saved, stacks), *further, *states]

    @property
    def _extra(self) -> int:
        """Number of values that are computed from invariants alone."""
        return self.parts.num_hoisted

    @property
    def _num_made(self) -> int:
        code = self.parts.forward
        return code.num_carries + code.num_outputs + self._extra

    def _counted(self, inputs: list[Tensor]) -> list[Tensor]:
        if self.parts.body.num_inputs == self.parts.body.loop.num_inputs:
            return inputs
        numbers = torch.arange(inputs[0].shape[0], device=inputs[0].device)
        return [*inputs, self._in_order(numbers)]

    def _in_order(self, stack: Tensor) -> Tensor:
        """Turn a stack by time into one in the order of execution, or back."""
        return stack.flip(0) if self.parts.body.loop.is_reversed else stack

    def _stack(
        self, found: tuple[Given, int], inputs: Sequence[Tensor], known: Sequence[Tensor], made: Sequence[Tensor]
    ) -> Tensor:
        kind, n = found
        is_reversed, length = self.parts.body.loop.is_reversed, inputs[0].shape[0]
        match kind:
            case "input":
                return inputs[n]
            case "invariant":
                return known[n]
            case "before":
                return made[n].narrow(0, int(is_reversed), length)
            case "after":
                return made[n].narrow(0, int(not is_reversed), length)
            case "output":
                return made[self.parts.forward.num_carries + n]

    def _last(self, n: int, made: Tensor) -> Tensor:
        if not self.parts.forward.stacked[n]:
            return made
        return made.select(0, 0 if self.parts.body.loop.is_reversed else -1)


def flat(stack: Tensor) -> list[Tensor]:
    """Return all iterations of the first record of a stack ``[T, R]``, then of the second."""
    return [stack.t().reshape(-1)]


def return_copies(graph: fx.Graph, memory: Collection[int]) -> None:
    """Let a graph return copies of tensors in this memory: the caller may change its outputs in place."""
    outputs = editing.outputs_of(graph.output_node())
    for position in range(aot_autograd.num_forward_outputs(graph)):
        node = outputs[position]
        if isinstance(node, fx.Node) and fake_tensors.storage_key(value_of(node)) in memory:
            copied = editing.insert_call(graph, markers.copy, (node,), graph.output_node(), "is_forward")
            editing.replace_output(graph, position, copied)


def replace_results(operator_node: fx.Node, results: Sequence[fx.Node]) -> None:
    """Let the readers of an operator with several results read these instead, and erase it."""
    for user in list(operator_node.users):
        assert user.target is operator.getitem
        editing.skip(user, results[int(user.args[1])])  # type: ignore[arg-type]
    editing.erase(operator_node)
