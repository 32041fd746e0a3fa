"""Names of values: sites from the module calls around them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from gradrewrite._compat import fake_tensors
from gradrewrite.ir.marked_loops import Loop
from gradrewrite.ir.values import ModuleCall, Value, shape_of
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.rules import ask_in_order, callbacks_of, rules_at
from gradrewrite.sites import Kind, Site


def name_values(
    values: Sequence[Value], calls_before: int = 0, counts: Mapping[str, int] = MappingProxyType({})
) -> dict[int, Callable[[Kind], Site]]:
    """Name the values of a graph after tracing; return functions from kind to site, by number.

    A use of a value has the name of that, with its destination; a further path to another use has none.
    Two names for one value are one. Calls of modules and ops are counted on from ``calls_before`` of the graph, and
    from ``counts`` of calls in other graphs, by name.
    """
    for value in values:
        first = value.same_as
        if first is not None and not value.is_merged:
            value.is_merged = True
            first.used_in += value.used_in
            first.stored_by -= set(value.calls) - value.stored_by
            first.returned_through |= value.returned_through
            first.is_returned |= value.is_returned
            first.is_overwritten |= value.is_overwritten
            first.has_error |= value.has_error
            first.taps += value.taps
            first.identities += value.identities
    named = {
        n: value
        for n, value in enumerate(values)
        if value.same_as is None and not (value.is_unused_selection or value.loop or value.use_of is not None)
    }
    names = _Namer(list(named.values()), calls_before, counts)
    found: dict[int, Callable[[Kind], Site]] = {n: partial(names.site, value) for n, value in named.items()}
    return found | {n: partial(names.use, value) for n, value in enumerate(values) if names.has_use(value)}


def may_answer_at_ops(policy: Policy, values: Sequence[Value]) -> bool:
    """Return whether a policy has a rule for the backward of ops, or a callback that answers at one of these values."""
    if rules_at(policy, "backward"):
        return True
    callbacks = list(callbacks_of(policy).values())
    if not callbacks:
        return False
    own = [value for value in values if not value.loop and value.use_of is None]
    names = _Namer(own, 0, {})
    return any(ask_in_order(callbacks, names.site(value, "backward")) for value in own)


def number_loops(loops: Sequence[Loop], calls_before: int, counts: Mapping[str, int]) -> None:
    """Number the iterations of loops, in their order; see ``name_values``."""
    iterations: Counter[str] = Counter()
    before: dict[str, list[Loop]] = defaultdict(list)
    for loop in loops:
        loop.first_call = iterations[loop.name]
        loop.before = tuple(before[loop.name])
        before[loop.name].append(loop)
        iterations[loop.name] += fake_tensors.hint_of(loop.length)
    for loop in loops:
        loop.first_call += calls_before * iterations[loop.name] + counts.get(f"{loop.name}/h", 0)


class _Namer:
    """Gives values their names: first the calls of modules and ops are counted, then sites are made."""

    def __init__(self, values: Sequence[Value], calls_before: int, counts: Mapping[str, int]) -> None:
        self._values = values
        self._outputs: dict[ModuleCall, list[Value]] = defaultdict(list)
        self._call_number: dict[ModuleCall, int] = {}
        self._moved_call: Callable[[tuple[str, int]], tuple[str, int]] = lambda at: at  # of a module
        self._address: dict[int, list[tuple[str, int]]] = {}
        self._inside: dict[int, tuple[str, int]] = {}  # the module call in which the value was made
        module_calls: Counter[str] = Counter()
        op_calls: Counter[str] = Counter()
        taps: Counter[str] = Counter()
        for value in values:
            for call in value.calls:
                if call not in self._call_number:
                    self._call_number[call] = module_calls[call[0]]
                    module_calls[call[0]] += 1
            for call in value.returned_by:
                self._outputs[call].append(value)
        taken: set[tuple[str, int]] = set()
        for value in values:
            module = value.calls[-1][0] if value.calls else ""
            op = (f"{module}/{value.op}", op_calls[f"{module}/{value.op}"])
            op_calls[op[0]] += 1
            given = []
            for name in value.taps + value.identities:
                given.append((name, taps[name]))
                taps[name] += 1
            produced = [
                (call[0], self._call_number[call]) for call in reversed(value.calls) if self._is_output(value, call)
            ]
            first = [*given, *([] if self._shares_module(value) else produced[:1]), op]
            chosen = next(a for a in first if a not in taken)
            taken.add(chosen)
            self._address[id(value)] = list(dict.fromkeys([chosen, *given, *produced, op]))
            self._inside[id(value)] = (module, self._call_number[value.calls[-1]] if value.calls else 0)
        if calls_before or counts:
            self._count_on(calls_before, counts)

    def _count_on(self, calls_before: int, counts: Mapping[str, int]) -> None:
        def moved(known: Iterable[tuple[str, int]]) -> Callable[[tuple[str, int]], tuple[str, int]]:
            last = dict(sorted(known))
            return lambda at: (at[0], at[1] + calls_before * (last[at[0]] + 1) + counts.get(at[0], 0))

        move = moved(address for found in self._address.values() for address in found)
        for found in self._address.values():
            found[:] = map(move, found)
        move = moved(self._inside.values())
        self._inside = {key: move(at) for key, at in self._inside.items()}
        self._moved_call = moved((call[0], number) for call, number in self._call_number.items())

    def site(self, value: Value, kind: Kind) -> Site:
        addresses = [*self._address[id(value)]]
        if kind == "backward":  # an op has one name, whether its value is a module's output or not
            addresses = [addresses[-1], *addresses[:-1]]
        if kind == "saved":  # a module names what it keeps, its output or not
            addresses = list(dict.fromkeys([*addresses, self._inside[id(value)]]))
        outputs = [call[0] for call in reversed(value.calls) if self._is_output(value, call)]
        return Site(
            kind=kind,
            name=addresses[0][0],
            module=value.calls[-1][0] if value.calls else "",
            op=value.op,
            output_of=tuple(dict.fromkeys([*value.identities, *outputs])),
            call=addresses[0][1],
            shape=shape_of(value.fake),
            dtype=value.fake.dtype,
            device=value.fake.device,
            source=value.source,
            may_be_infinite=value.may_be_infinite,
            addresses=tuple(addresses),
            is_outside=not value.calls,
        )

    def has_use(self, value: Value) -> bool:
        """Return whether a value is one use of a named one, in a destination that is known."""
        source, end = value.source_of_use, value.destination
        is_known = (id(end) in self._address) if isinstance(end, Value) else end in self._call_number
        return id(source) in self._address and is_known

    def use(self, value: Value, kind: Kind) -> Site:
        """Return the site of a use."""
        source, end = value.source_of_use, value.destination
        assert source is not None
        ends = [self._address[id(end)][-1]] if isinstance(end, Value) else self._numbered([end] if end else [])
        return replace(self.site(source, kind), destination=(*ends, *self._numbered(value.around)))

    def _numbered(self, calls: Iterable[ModuleCall]) -> list[tuple[str, int]]:
        return [self._moved_call((call[0], self._call_number[call])) for call in calls if call in self._call_number]

    def _is_output(self, value: Value, call: ModuleCall) -> bool:
        return bool(call[0]) and any(value is other for other in self._outputs[call])

    def _shares_module(self, value: Value) -> bool:
        call = next((r for r in reversed(value.calls) if self._is_output(value, r)), None)
        return call is not None and len(self._outputs[call]) > 1
