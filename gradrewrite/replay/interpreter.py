"""Replay of a failed step, node by node, to find where non-finite values begin."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import collectives, fake_tensors, operators
from gradrewrite.ir import markers
from gradrewrite.ir.attribution import attribute_nodes, inner_gradient_nodes
from gradrewrite.ir.loop_code import code_of
from gradrewrite.ir.markers import number_of
from gradrewrite.ir.mask_infinities import is_added
from gradrewrite.numerics.measuring import OPAQUE
from gradrewrite.replay.loop_observation import LoopObserver, ObservedLoop
from gradrewrite.replay.noted_calls import (
    BatchSizes,
)
from gradrewrite.replay.observations import (
    Order,
    Repair,
    ValueState,
    has_nan,
    is_finite,
    merged,
    observation,
)
from gradrewrite.replay.roots import ReplayResult, RootFinder
from gradrewrite.replay.step_snapshot import StepSnapshot
from gradrewrite.sites import Site


def replay(
    snapshot: StepSnapshot,
    failed: Mapping[str, Sequence[Site]],
    repairs: Mapping[str, Repair] = MappingProxyType({}),
    mended: Mapping[str, Repair] = MappingProxyType({}),
) -> ReplayResult:
    """Replay a step op by op, and check every value; change nothing of the user's.

    Roots are left out that lead neither to a failed check nor to an output of the graph: the infinity of a logarithm
    that ``torch.where`` discards is harmless. So are infinities of the model's inputs, unless nothing else explains
    the step: the op that makes a NaN of them is the root.

    Args:
        snapshot: The step.
        failed: Sites of failed checks by the node that they looked at.
        repairs: Changes of the arguments of nodes, by the name of the node.
        mended: Changes of the values of nodes, also of inputs.
    """
    found = _Replay(snapshot, failed, repairs, mended).result()
    if not found.roots and not repairs and not mended and found.has_given_infinities:
        return _Replay(snapshot, failed, expects_infinities=False).result()
    return found


def run_again(snapshot: StepSnapshot, graph: fx.GraphModule, values: Sequence[Any]) -> list[Tensor]:
    """Run a graph op by op in the random state of a step; nothing of the user's changes."""
    with _apart(snapshot, values):
        results: list[Tensor] = _Plain(graph).run(*values, enable_io_processing=False)
    return results


class _Plain(fx.Interpreter):
    """An interpreter of a graph without markers."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        return operators.run_node(n, *self.fetch_args_kwargs_from_env(n))


class _Replay(RootFinder):
    """An interpreter of a replay graph that notes non-finite values."""

    def __init__(
        self,
        snapshot: StepSnapshot,
        failed: Mapping[str, Sequence[Site]],
        repairs: Mapping[str, Repair] = MappingProxyType({}),
        mended: Mapping[str, Repair] = MappingProxyType({}),
        *,
        expects_infinities: bool = True,
    ) -> None:
        super().__init__(snapshot.replay_graph.graph)
        self._expects_infinities = expects_infinities
        replay_graph = snapshot.replay_graph
        self._snapshot = snapshot
        self._replay_graph = replay_graph
        self._graph = replay_graph.graph.graph
        self._nodes = list(self._graph.nodes)
        self._order = {node: number for number, node in enumerate(self._nodes)}
        numbers = {site: number for number, site in replay_graph.errors.items()}
        acting = {name: numbers[e.site] for name, e in replay_graph.actions.items() if e.site in numbers}
        self._ops = attribute_nodes(self._graph, replay_graph.backward, acting)
        self._inner = inner_gradient_nodes(self._graph, replay_graph.backward)
        self._output = self._graph.output_node()
        returned = self._output.args[0]
        assert isinstance(returned, list | tuple)
        self._gradients = {site: returned[at] for at, site in replay_graph.gradients.items()}
        self._loops: dict[fx.Node, ObservedLoop] = {}
        self._lengths: dict[str, int] = {}  # by key of the loop
        self._result = ReplayResult()
        self.repairs = {node: repairs[node.name] for node in self._nodes if node.name in repairs}
        self.mended = {node: mended[node.name] for node in self._nodes if node.name in mended}
        marks = self._graph.find_nodes(op="call_function", target=markers.mark_activation)
        self._numbers = {node.all_input_nodes[0]: number_of(node) for node in marks}  # of values, by their node
        self._failed = failed
        self._failed_sites = {site for sites in failed.values() for site in sites}
        self._positions = self._positions_of_sites()
        self._given = self._given_values()
        inputs = self._replay_graph.inputs
        by_role = {
            role: [n for n in self._given if (known := inputs.get(n.name)) is not None and known.role == role]
            for role in ("input", "value")
        }
        self._batch = by_role["input"] or by_role["value"]  # behind a graph break
        self._sizes = BatchSizes.of([self._given[node][0] for node in self._batch])

    def result(self) -> ReplayResult:
        """Run, and find the roots."""
        values = [value for value, _ in self._given.values()]
        with _apart(self._snapshot, values):
            self.run(*values, enable_io_processing=False)
        self._result.seen.sort(key=lambda seen: (not seen.is_forward, seen.order))
        self._result.roots = self._find_roots()
        return self._result

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and look at its value."""
        if n.op == "output":
            self._look_at_gradients(self.env)
            return None
        value = self._call(n, self.env) if n.op == "call_function" else super().run_node(n)
        value = self._snapshot.streams.get(id(value), value) if n.op == "get_attr" else value
        if n.op == "placeholder":
            self.states[n] = self._state_of_given(n, value, self._given[n][1])
        elif n.op == "get_attr":
            self.states[n] = ValueState(is_expected=not is_finite(value) and not has_nan(value))
        for site in self._failed.get(n.name, ()):
            if isinstance(value, Tensor):
                self._look_at(site, n, value, self._positions.get(site, (self._order[n],)))
        return value

    def name_of_value(self, node: fx.Node) -> str:
        """Return the input, or the op that made a value."""
        if node.op == "placeholder":
            known = self._replay_graph.inputs.get(node.name)
            return node.name if known is None else known.name
        site = self._replay_graph.activations.get(self._numbers.get(node, -1))
        if site is not None:
            return site.name
        of_backward = "the backward of " if node.name in self._replay_graph.backward else ""
        return of_backward + self._op_at(node, None)[0]

    def differentiated_op(self, node: fx.Node) -> str:
        """Return the differentiated op of a node; ``""`` in the forward."""
        if node.name not in self._replay_graph.backward and node not in self._inner:
            return ""
        return self._op_at(node, None)[0].rpartition("/")[2]

    def _positions_of_sites(self) -> dict[Site, Order]:
        """Positions of the sites in the order of execution."""
        positions: dict[Site, Order] = {site: (self._order[node],) for site, node in self._gradients.items()}
        for node in self._nodes:
            if (
                node.target in (markers.mark_activation, markers.mark_error)
                and (site := self._marked_site(node)) is not None
            ):
                positions[site] = (self._order[node],)
        return positions

    def _marked_site(self, marker: fx.Node) -> Site | None:
        is_forward = marker.target is markers.mark_activation
        if not is_forward and marker.name not in self._replay_graph.backward:
            return None  # of a gradient inside of the forward
        return (self._replay_graph.activations if is_forward else self._replay_graph.errors).get(number_of(marker))

    def _given_values(self) -> dict[fx.Node, tuple[Any, str]]:
        """Return the placeholders' values in order, and the names of overwritten ones."""
        inputs = iter(self._snapshot.inputs)
        given = {}
        for node in self._graph.find_nodes(op="placeholder"):
            known = self._replay_graph.inputs.get(node.name)
            if node.name in self._replay_graph.tangents:
                held, name = self._snapshot.tangents[node.name], "the gradient of an output"
            else:
                held, name = next(inputs), node.name if known is None else f"{known.role} {known.name}"
            value = held.get()
            if node in self.mended:
                (value,) = self.mended[node]([value])
            given[node] = (value, name if held.is_overwritten() else "")
            if held.is_overwritten() and known is not None and known.role != "buffer":  # a step updates its buffers
                self._result.overwritten = name
        return given

    def _state_of_given(self, node: fx.Node, value: Any, overwritten: str) -> ValueState:
        if is_finite(value):
            return ValueState(overwritten=overwritten)
        known = self._replay_graph.inputs.get(node.name)
        if known is None or known.role == "parameter":
            return ValueState(True, overwritten=overwritten)
        is_expected, given = fake_tensors.is_mask(value) and is_added(node), ""
        if not is_expected and known.role == "input" and not has_nan(value):
            self._result.has_given_infinities = True
            is_expected, given = self._expects_infinities, known.name
        return ValueState(not is_expected, is_expected, overwritten, given=given)

    def _call(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        if node.target in OPAQUE:  # a measurement, from which nothing is computed before the records are packed
            self.states[node] = ValueState()
            return None
        if node.target in (markers.mark_activation, markers.mark_error):
            result = values[node.all_input_nodes[0]]
            self.states[node] = self.states[node.all_input_nodes[0]]
            self._look_at_marker(node, result)
            return result if node.target is markers.mark_error else None
        if collectives.is_collective(node):  # an average: other processes may not replay this step
            self.states[node] = self.states[node.all_input_nodes[0]]
            return values[node.all_input_nodes[0]]
        result = self.observed(node, values)
        if node.name in self._replay_graph.loops:
            self._look_inside(node, values)
        elif node.target is operator.getitem and node.args[0] in self._loops:
            self.states[node] = self._loops[node.args[0]].results[node.args[1]]  # type: ignore[index]
        return result

    def _look_inside(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
        """Observe the iterations of a loop."""
        is_forward = node.name not in self._replay_graph.backward
        replayed, failed = self._replay_graph.loops[node.name], self._failed.get(node.name, ())
        given: list[fx.Node] = node.args[0]  # type: ignore[assignment]
        code, loop = code_of(node), replayed.loop
        if is_forward:
            self._lengths[loop.key] = len(values[code.split(given)[1][0]])
        before = ((fake_tensors.hint_of(other.length), other.key) for other in loop.before)
        moved = sum(self._lengths.get(key, traced) - traced for traced, key in before)
        observer = LoopObserver(code, replayed, failed, moved, is_forward=is_forward)
        states = [self.states.get(n, ValueState()) for n in given]
        names = [self._name_of_argument(n) for n in given]
        found = observer.observe(node.name, self._order[node], [values[n] for n in given], states, names)
        self._result.seen += found.seen
        self._loops[node] = found
        self.states[node] = merged(found.results)

    def _name_of_argument(self, node: fx.Node) -> str:
        """Return the name of a loop's argument, before the loop's own stacking."""
        known = self._replay_graph
        while node.op != "placeholder" and known.activations.get(self._numbers.get(node, -1)) is None:
            if len(node.all_input_nodes) != 1 or node.name in known.backward:
                return "a value from before the loop"
            node = node.all_input_nodes[0]
        return self.name_of_value(node)

    def _look_at_marker(self, marker: fx.Node, value: Tensor) -> None:
        site = self._marked_site(marker)
        if site is not None and site not in self._failed_sites:
            self._look_at(site, marker.all_input_nodes[0], value, (self._order[marker],))

    def _look_at_gradients(self, values: Mapping[fx.Node, Any]) -> None:
        for site, node in self._gradients.items():
            if isinstance(node, fx.Node) and site not in self._failed_sites:
                self._look_at(site, node, values[node], (self._order[node],))

    def _look_at(self, site: Site, node: fx.Node, value: Tensor, order: Order) -> None:
        self._result.seen += observation(site, node.name, value, order, self.states[node])


@contextlib.contextmanager
def _apart(snapshot: StepSnapshot, values: Sequence[Any]) -> Iterator[None]:
    """Run with the random state of the step, and leave that of the program as it is."""
    devices = sorted({v.device.index for v in values if isinstance(v, Tensor) and v.device.type == "cuda"})
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        for kind in {"cpu", *("cuda" for _ in devices)}:
            stack.enter_context(torch.autocast(kind, enabled=False))  # the graph has its casts
        warnings.simplefilter("ignore")  # torch gave them when the step ran
        if snapshot.random is not None:
            snapshot.random.restore()
        yield
