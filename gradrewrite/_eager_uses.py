"""Single uses of values in an eager forward: each destination reads a tensor of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gradrewrite.instrumentation.uses import TRANSPARENT
from gradrewrite.ir.values import ModuleCall, Value
from gradrewrite.sites import Pattern, Site


@dataclass(eq=False)
class EagerUse:
    """The uses of a value in one destination, and the tensor that they read."""

    value: Value
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class _Step:
    """A transparent op, to be run again on another tensor."""

    source: Tensor
    again: Callable[[Tensor], Tensor]
    used: frozenset[tuple[int, int]]  # values of which it is a use itself, by identity, with the pattern


class EagerUses:
    """The uses that patterns ask for, while the ops of an eager forward run.

    ``value_of`` returns the value that a tensor is; ``note`` is told of a further tensor of the value of another.
    """

    def __init__(
        self,
        patterns: Sequence[Pattern],
        value_of: Callable[[Tensor], Value | None],
        note: Callable[[Tensor, Tensor], None],
    ) -> None:
        self.patterns = patterns
        self._value_of, self._note = value_of, note
        self._found: dict[tuple[int, Any], EagerUse] = {}
        self._steps: dict[int, _Step] = {}  # by identity of the value that they make
        self._again: dict[tuple[int, int], Tensor] = {}  # what a step makes of the tensor of a use
        self._of_op: list[EagerUse] = []  # uses by the op that is about to run
        self._ops = 0
        self._used: frozenset[tuple[int, int]] = frozenset()  # values of which that op is a use

    def __iter__(self) -> Iterator[EagerUse]:
        return iter(self._found.values())

    def lead(self, name: str, stack: Sequence[ModuleCall], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of an op, with the tensors of uses."""
        self._ops += 1
        self._of_op = []
        if not self.patterns:
            return args, kwargs
        used: set[tuple[int, int]] = set()
        leaves, spec = pytree.tree_flatten((args, kwargs))
        led = [self._led(leaf, name, stack, used) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._used = frozenset(used)
        again: tuple[Any, Any] = pytree.tree_unflatten(led, spec)
        return again

    def note_results(self, name: str, func: Any, args: Any, kwargs: Any, results: Sequence[Tensor]) -> None:
        """Note the results of an op, made of its first argument if it is transparent."""
        if not self.patterns:
            return
        values = [value for value in map(self._value_of, results) if value is not None]
        for use in self._of_op:
            use.value.destination = values[0] if values else None
        given = args[0] if args else None
        if name not in TRANSPARENT or not isinstance(given, Tensor):
            return
        for number, (value, result) in enumerate(zip(values, results, strict=False)):

            def again(x: Tensor, number: int = number, is_one: bool = len(results) == 1) -> Tensor:
                made: Any = func(x, *args[1:], **kwargs)
                return made if is_one and isinstance(made, Tensor) else made[number]

            if value is not self._value_of(given) and result.requires_grad:
                self._steps[id(value)] = _Step(given, again, self._used)

    def _led(self, tensor: Tensor, name: str, stack: Sequence[ModuleCall], used: set[tuple[int, int]]) -> Tensor:
        """Lead a use through the tensors of its own: of the value, and of those in front of transparent ops."""
        value = self._value_of(tensor)
        if value is None or not tensor.requires_grad:
            return tensor
        way: list[tuple[Value, Tensor, _Step | None]] = [(value, tensor, self._steps.get(id(value)))]
        while (step := way[-1][2]) is not None:
            before = self._value_of(step.source)
            if before is None:
                break
            way.append((before, step.source, self._steps.get(id(before))))
        now: Tensor | None = None
        for position in range(len(way) - 1, -1, -1):
            own, given, step = way[position]
            if now is not None and step is not None:
                key = id(own), id(now)
                if key not in self._again:
                    with torch.enable_grad():
                        self._again[key] = step.again(now)
                    self._note(self._again[key], given)
                now = self._again[key]
            behind = {pair for _, _, one in way[:position] if one is not None for pair in one.used}
            wanted = [p for p in range(len(self.patterns)) if (id(own), p) not in behind]
            for use, asked in self._uses_of(own, given if now is None else now, name, stack, wanted):
                now = use.tensor
                used |= {(id(own), p) for p in asked}
        return tensor if now is None else now

    def note_tap(self, value: Value, given: Tensor) -> None:
        """Note the value of the result of a tap, and the given tensor."""
        self._steps[id(value)] = _Step(given, lambda x: x.view_as(x), frozenset())

    def _uses_of(
        self, value: Value, tensor: Tensor, name: str, stack: Sequence[ModuleCall], wanted: Sequence[int]
    ) -> Iterator[tuple[EagerUse, list[int]]]:
        """Yield the uses that patterns ask for here, outermost first, each of the one before."""
        calls = [call for call in stack if call[0] and call not in value.calls]
        own = f"{stack[-1][0] if stack else ''}/{name}"
        ends: dict[int, tuple[Any, tuple[ModuleCall, ...]]] = {}
        asked: dict[int, list[int]] = {}
        for p in wanted:
            pattern = self.patterns[p]
            if not pattern.may_begin_at(_possible(value)):
                continue
            at = next((n for n, call in enumerate(calls) if pattern.may_end_at(call[0], is_op=False)), None)
            if at is not None:
                ends[at] = calls[at], tuple(reversed(calls[:at]))
            elif pattern.may_end_at(own, is_op=True):
                at = len(calls)
                ends[at] = self._ops, ()
            if at is not None:
                asked.setdefault(at, []).append(p)
        for at, (end, around) in sorted(ends.items()):
            key = id(value), end
            if key not in self._found:
                with torch.enable_grad():
                    made = tensor.view_as(tensor)
                self._note(made, tensor)
                part = Value(value.op, value.calls, value.source, tensor, use_of=value, around=around)
                part.destination = end if isinstance(end, tuple) else None
                self._found[key] = EagerUse(part, made)
            if not isinstance(end, tuple):
                self._of_op.append(self._found[key])
            yield self._found[key], asked[at]
            tensor = self._found[key].tensor


def _possible(value: Value) -> Site:
    """Return a site with all names that a value may turn out to have."""
    modules = [call[0] for call in value.calls if call[0]] + value.taps + value.identities
    op = f"{value.calls[-1][0] if value.calls else ''}/{value.op}"
    return Site("error", op, output_of=tuple(modules), addresses=tuple((name, 0) for name in (*modules, op)))
