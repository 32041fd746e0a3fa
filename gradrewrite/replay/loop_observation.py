"""Replays of loops, iteration by iteration."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from gradrewrite.ir.loop_code import LoopCode
from gradrewrite.ir.replay_graph import ReplayLoop
from gradrewrite.replay.noted_calls import NotedCall
from gradrewrite.replay.observations import Observing, SiteObservation, ValueState, is_finite, merged, observation
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class RootInside:
    """The first op of bad values inside a loop."""

    node: str  # of the body
    iteration: int
    number: int  # of the iteration among those that ran


Origins = frozenset[int | RootInside]  # of a bad value: arguments of the loop by position, ops inside


@dataclass(slots=True)
class ObservedLoop:
    """The observations of one run of a loop."""

    seen: list[SiteObservation] = field(default_factory=list)  # in the order of execution
    results: list[ValueState] = field(default_factory=list)  # of the operator, in order
    origins: list[Origins] = field(default_factory=list)  # of these
    failed: Origins = frozenset()  # of bad values at failed checks
    noted: dict[RootInside, NotedCall] = field(default_factory=dict)


class LoopObserver:
    """Runs the body of a loop op by op."""

    def __init__(
        self, code: LoopCode, replayed: ReplayLoop, failed: Collection[Site], moved: int, *, is_forward: bool
    ) -> None:
        self._code, self._replayed, self._failed, self._is_forward = code, replayed, failed, is_forward
        self._moved = moved  # how many calls later its sites are than when it was traced
        self._values = [
            (replayed.positions[node.name], node, name, kind)
            for node in code.body.graph.nodes
            for name, kind in replayed.values.get(node.name, ())
            if (kind == "activation") == is_forward
        ]

    def observe(
        self, name: str, order: int, tensors: Sequence[Tensor], states: Sequence[ValueState], names: Sequence[str]
    ) -> ObservedLoop:
        """Run the loop on tensors in these states, with these names for a reader.

        ``name`` and ``order`` are those of the node of the loop.
        """
        code, found = self._code, ObservedLoop()
        rows = enumerate(zip(tensors, states, names, strict=True))
        given = [_Known(x, state, frozenset((n,)), own) for n, (x, state, own) in rows]
        carries, inputs, invariants = code.split(given)
        returned: list[list[_Known]] = [
            [known] if own else [] for known, own in zip(carries, code.stacked, strict=True)
        ]
        returned += [[] for _ in range(code.num_outputs)]
        length = len(inputs[0].value)
        for k in range(length):
            at = length - 1 - k if code.is_reversed else k
            iteration = k if self._is_forward else length - 1 - k
            own = [*carries, *(known.row(at) for known in inputs), *invariants]
            body = _Body(code.body, own, self._replayed, iteration, k)
            results = body.results()
            found.noted |= {RootInside(node.name, iteration, k): call for node, call in body.noted.items()}
            self._look(body, name, (order, k), found)
            for n, known in enumerate(results):
                if n < len(carries) and not code.stacked[n]:  # the last value alone is returned
                    returned[n].clear()
                returned[n].append(known)
            carries = [known.carried(name) for known, name in zip(results[: len(carries)], body.names(), strict=False)]
        found.results = [merged(known.state for known in own) for own in returned]
        found.origins = [frozenset().union(*(known.origins for known in own if known.state.is_bad)) for own in returned]
        return found

    def _look(self, body: _Body, name: str, order: tuple[int, int], found: ObservedLoop) -> None:
        """Note the values of the sites of an iteration."""
        loop = self._replayed.loop
        for n, node, value, kind in self._values:
            site, known = loop.site(value, kind, body.iteration).moved(self._moved), body.known[node]
            if site in self._failed and known.state.is_bad:
                found.failed |= known.origins
            found.seen.extend(observation(site, name, known.value, (*order, n), known.state))


@dataclass(frozen=True, slots=True)
class _Known:
    """A value with its state, and the origins of it if it is bad."""

    value: Any
    state: ValueState
    origins: Origins
    name: str = ""  # of an argument, for a reader

    def row(self, at: int) -> _Known:
        value = self.value[at]
        return replace(self, value=value, state=ValueState() if is_finite(value) else self.state)

    def carried(self, name: str) -> _Known:
        """Return it as an argument of the next iteration."""
        return replace(self, value=self.value.contiguous(), name=name)


class _Body(Observing):
    """An interpreter of one iteration."""

    def __init__(
        self, gm: fx.GraphModule, given: Sequence[_Known], replayed: ReplayLoop, iteration: int, number: int
    ) -> None:
        super().__init__(gm)
        self._replayed = replayed
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.known = dict(zip(placeholders, given, strict=True))
        self.states = {node: known.state for node, known in self.known.items()}
        self.iteration, self._number = iteration, number

    def name_of_value(self, node: fx.Node) -> str:
        """Return the op of a value; of an argument its name outside of the loop."""
        if node.op == "placeholder":
            return str(self.known[node].name)
        name = self._replayed.name_in_body(node.name)
        site = self._replayed.site_of_op(name, self.iteration)
        of_backward = "the backward of " if name not in self._replayed.of_forward else ""
        return str(node.name) if site is None else f"{of_backward}{site.module}/{site.op}"

    def names(self) -> list[str]:
        """Return the names of the results."""
        return [self.name_of_value(node) for node in self._returned()]

    def differentiated_op(self, node: fx.Node) -> str:
        """Return the differentiated op of a node; ``""`` in the forward."""
        name = self._replayed.name_in_body(node.name)
        site = self._replayed.site_of_op(name, self.iteration)
        return "" if name in self._replayed.of_forward else (node.name if site is None else site.op)

    def results(self) -> list[_Known]:
        """Run; return the results."""
        graph: fx.Graph = self.module.graph  # type: ignore[assignment]
        for node in graph.nodes:
            if node.op == "get_attr":
                self.states[node] = ValueState()
                self.known[node] = _Known(self.fetch_attr(node.target), self.states[node], frozenset())
            elif node.op == "call_function":
                value = self.observed(node, {read: self.known[read].value for read in node.all_input_nodes})
                root = RootInside(node.name, self.iteration, self._number)
                self.known[node] = _Known(value, self.states[node], self._origins_of(node, root))
        return [self.known[node] for node in self._returned()]

    def _returned(self) -> Sequence[fx.Node]:
        graph: fx.Graph = self.module.graph  # type: ignore[assignment]
        returned: Sequence[fx.Node] = graph.output_node().args[0]  # type: ignore[assignment]
        return returned

    def _origins_of(self, node: fx.Node, root: RootInside) -> Origins:
        if not self.states[node].is_bad:
            return frozenset()
        bad = [self.known[read].origins for read in node.all_input_nodes if self.states[read].is_bad]
        return frozenset().union(*bad) if bad else frozenset((root,))
