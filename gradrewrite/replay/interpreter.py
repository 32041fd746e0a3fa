"""Replay of a failed step, node by node, to find where non-finite values begin."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import collectives, fake_tensors, operators
from gradrewrite._utils.tensors import computable, tensors_in
from gradrewrite.ir import markers
from gradrewrite.ir.attribution import attribute_nodes
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.ir.markers import number_of
from gradrewrite.ir.mask_infinities import has_infinite_literal, is_added, propagates
from gradrewrite.numerics.measuring import OPAQUE
from gradrewrite.replay.step_snapshot import StepSnapshot
from gradrewrite.sites import Site


@dataclass(slots=True)
class _State:
    is_bad: bool = False
    is_expected: bool = False
    overwritten: str = ""


def replay(snapshot: StepSnapshot, failed: Mapping[str, Site]) -> ReplayResult:
    """Replay a step op by op, and check every value; change nothing of the user's.

    ``failed``: sites of failed checks by the node that they looked at. Roots are left out that lead neither to one
    of these nor to an output of the graph: the infinity of a logarithm that ``torch.where`` discards is harmless.
    """
    return _Replay(snapshot, failed).result()


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


class _Replay(fx.Interpreter):
    """An interpreter of a replay graph that notes non-finite values."""

    def __init__(self, snapshot: StepSnapshot, failed: Mapping[str, Site]) -> None:
        super().__init__(snapshot.replay_graph.graph)
        self.extra_traceback = False  # the error of a node stays as it is
        replay_graph = snapshot.replay_graph
        self._snapshot = snapshot
        self._replay_graph = replay_graph
        self._graph = replay_graph.graph.graph
        self._nodes = list(self._graph.nodes)
        self._order = {node: number for number, node in enumerate(self._nodes)}
        numbers = {site: number for number, site in replay_graph.errors.items()}
        acting = {name: numbers[e.site] for name, e in replay_graph.actions.items() if e.site in numbers}
        self._ops = attribute_nodes(self._graph, replay_graph.backward, acting)
        self._output = self._graph.output_node()
        returned = self._output.args[0]
        assert isinstance(returned, list | tuple)
        self._gradients = {site: returned[at] for at, site in replay_graph.gradients.items()}
        self._states: dict[fx.Node, _State] = {}
        self._result = ReplayResult()
        self._failed = failed
        self._positions = self._positions_of_sites()
        self._given = self._given_values()

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
        if n.op == "placeholder":
            self._states[n] = self._state_of_given(n, value, self._given[n][1])
        elif n.op == "get_attr":
            self._states[n] = _State(is_expected=not _is_finite(value) and not _has_nan(value))
        site = self._failed.get(n.name)
        if site is not None and isinstance(value, Tensor):
            order = self._positions.get(site, self._order[n])
            self._look_at(site, n, value, order)
        return value

    def _positions_of_sites(self) -> dict[Site, int]:
        """Positions of the sites in the order of execution."""
        positions = {site: self._order[node] for site, node in self._gradients.items()}
        for node in self._nodes:
            if (
                node.target in (markers.mark_activation, markers.mark_error)
                and (site := self._marked_site(node)) is not None
            ):
                positions[site] = self._order[node]
        return positions

    def _marked_site(self, marker: fx.Node) -> Site | None:
        is_forward = marker.target is markers.mark_activation
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
            given[node] = (held.get(), name if held.is_overwritten() else "")
            if held.is_overwritten() and known is not None and known.role != "buffer":  # a step updates its buffers
                self._result.overwritten = name
        return given

    def _state_of_given(self, node: fx.Node, value: Any, overwritten: str) -> _State:
        if _is_finite(value):
            return _State(overwritten=overwritten)
        known = self._replay_graph.inputs.get(node.name)
        is_expected = known is not None and known.role != "parameter" and fake_tensors.is_mask(value) and is_added(node)
        return _State(not is_expected, is_expected, overwritten)

    def _call(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        reads = [self._states[n] for n in node.all_input_nodes if n in self._states]
        if node.target in OPAQUE:  # a measurement, from which nothing is computed before the records are packed
            self._states[node] = _State()
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.target in (markers.mark_activation, markers.mark_error):
            result = values[node.all_input_nodes[0]]
            self._states[node] = self._states[node.all_input_nodes[0]]
            self._look_at_marker(node, result)
            return result if node.target is markers.mark_error else None
        if collectives.is_collective(node):  # an average: other processes may not replay this step
            self._states[node] = self._states[node.all_input_nodes[0]]
            return values[node.all_input_nodes[0]]
        result = operators.run_node(node, args, kwargs)
        needed = [self._states[n] for n in operators.nodes_that_matter(node) if n in self._states]
        state = _State(overwritten=next((s.overwritten for s in needed if s.overwritten), ""))
        if not _is_finite(result):
            masks = [values[n] for n in node.all_input_nodes if n in self._states and self._states[n].is_expected]
            is_written = has_infinite_literal(node) or propagates(node, result, masks)
            state.is_expected = is_written and not _has_nan(result) and not any(s.is_bad for s in reads)
            state.is_bad = not state.is_expected
        self._states[node] = state
        return result

    def _look_at_marker(self, marker: fx.Node, value: Tensor) -> None:
        site = self._marked_site(marker)
        if site is not None and site not in self._failed.values():
            self._look_at(site, marker.all_input_nodes[0], value, self._order[marker])

    def _look_at_gradients(self, values: Mapping[fx.Node, Any]) -> None:
        for site, node in self._gradients.items():
            if isinstance(node, fx.Node) and site not in self._failed.values():
                self._look_at(site, node, values[node], self._order[node])

    def _look_at(self, site: Site, node: fx.Node, value: Tensor, order: int) -> None:
        if not value.is_floating_point() and not value.is_complex():
            return
        value = _numbers_of(value)
        at_fault = torch.isnan(value) if site.may_be_infinite else torch.isfinite(value).logical_not()
        bad = 0 if self._states[node].is_expected else int(at_fault.sum())
        size = value.detach().abs()
        finite = size[torch.isfinite(size)]
        smallest = float(finite.amin()) if finite.numel() else float("nan")
        largest = float(finite.amax()) if finite.numel() else float("nan")
        percent = 100.0 * bad / max(value.numel(), 1)
        is_forward = site.traits.in_forward
        self._result.seen.append(SiteObservation(site, order, is_forward, percent, smallest, largest, node.name))

    def _find_roots(self) -> list[RootCause]:
        bad = {node for node, state in self._states.items() if state.is_bad}
        targets = {node for node in bad if node.name in self._failed} | (bad & set(self._output.all_input_nodes))
        leads: set[fx.Node] = set()
        roots = []
        for node in reversed(self._nodes):
            if node not in bad or (node not in targets and leads.isdisjoint(node.users)):
                continue
            leads.add(node)
            if not any(read in bad for read in node.all_input_nodes):
                roots.append(node)
        return [self._root(node, bad) for node in reversed(roots)]

    def _root(self, node: fx.Node, bad: set[fx.Node]) -> RootCause:
        reached, todo = set(), [node]
        while todo:
            at = todo.pop()
            if at.name not in reached:
                reached.add(at.name)
                todo += [user for user in at.users if user in bad]
        is_forward = node.name not in self._replay_graph.backward and node.name not in self._replay_graph.tangents
        op, source, came_in = "", "", ""
        if node.op == "placeholder":
            came_in = self._describe_given(node)
        elif node.name in self._replay_graph.actions:
            edit = self._replay_graph.actions[node.name]
            op = f"{edit.site.name}: {edit.action!r}"
        else:
            site = self._replay_graph.activations.get(self._ops.get(node, -1))
            op, source = (f"{site.module}/{site.op}", site.source) if site is not None else (str(node.target), "")
        return RootCause(
            order=self._order[node],
            is_forward=is_forward,
            op=op,
            source=source,
            came_in=came_in,
            given=self._replay_graph.inputs.get(node.name),
            reached=frozenset(reached),
            overwritten=self._states[node].overwritten,
        )

    def _describe_given(self, node: fx.Node) -> str:
        if node.name in self._replay_graph.tangents:
            outside = "outside the model (the loss)" if self._replay_graph.is_whole else "behind this part of the model"
            return f"the gradient that came from {outside} was not finite already"
        known = self._replay_graph.inputs.get(node.name)
        if known is None:
            return "a value that came into the graph was not finite already"
        if known.role == "parameter":
            return f"the parameter {known.name} was not finite already: an earlier update, or what it began with"
        if known.role == "value":
            return f"the value {known.name} from before a graph break was not finite already"
        return f"the {known.role} {known.name} was not finite already"


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


def _is_finite(value: Any) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in _inexact_in(value))


def _has_nan(value: Any) -> bool:
    return any(bool(torch.isnan(t).any()) for t in _inexact_in(value))


def _inexact_in(value: Any) -> list[Tensor]:
    """Return the tensors of inexact numbers, as torch can test them."""
    return [_numbers_of(t) for t in tensors_in(value) if t.is_floating_point() or t.is_complex()]


def _numbers_of(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor, those of eight bits in float32; of a sparse one those that it holds."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense() if tensor.is_mkldnn else tensor.values()
    return computable(tensor)


@dataclass(frozen=True, slots=True)
class SiteObservation:
    """The values of a site in a replay."""

    site: Site
    order: int  # position in the order of execution
    is_forward: bool  # whether it belongs to the forward
    percent: float  # share of elements that are not finite, in percent; expected infinities are not counted
    smallest: float  # smallest absolute value; NaN if it is empty
    largest: float  # largest absolute value of the finite elements; NaN if there are none
    node: str  # name of the value


@dataclass(frozen=True, slots=True)
class RootCause:
    """A root cause of non-finite values: an op, or a graph input."""

    order: int  # position in the order of execution
    is_forward: bool  # whether it belongs to the forward
    op: str  # ``module/op`` of the op that was run, forward or backward; ``""`` for what came in
    source: str  # line of that op
    came_in: str  # what came into the graph already non-finite, in words; ``""`` for an op
    given: GraphInput | None  # what that is; None for an op, and for the loss
    reached: frozenset[str]  # names of the non-finite values that it leads to
    overwritten: str  # an input that was overwritten meanwhile and on which it depends; ``""`` if there is none


@dataclass
class ReplayResult:
    """The observations of one replay."""

    seen: list[SiteObservation] = field(default_factory=list)  # values of sites, in the order of execution
    roots: list[RootCause] = field(default_factory=list)  # root causes, in that order
    overwritten: str = ""  # an input that was overwritten since; ``""`` if there is none
