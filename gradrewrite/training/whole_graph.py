"""Whole graphs: a joined graph with the actions at step sites and the update behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.optimizer.step_plan import InGraphJudge, StepPlan
from gradrewrite.training.joined_graph import JoinedGraph
from gradrewrite.training.update_trace import UpdateGraph

_TAG = "is_backward"
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of an optimizer: the gradient accumulated for a parameter, or an entry of its state."""

    parameter: int  # position among the parameters of the optimizer
    key: str  # of its state


@dataclass(frozen=True, slots=True)
class UpdateParts:
    """What follows a joined graph: accumulation or an update."""

    inputs: Mapping[int, int]  # positions among the inputs of the joined graph, by that of the parameter
    parameters: Sequence[Tensor]  # of the optimizer
    accumulated: tuple[int, ...] = ()  # parameters with gradients of earlier backwards
    has_verdict: bool = False  # whether an earlier backward had checks that skip
    outputs: BackwardOutputs = field(default_factory=BackwardOutputs)  # of the joined graph
    kept_buffers: tuple[int, ...] = ()  # inputs that earlier backwards have written, by position


@dataclass(frozen=True, slots=True)
class WholeGraph:
    """A graph of a whole step, and the order of its inputs and results.

    Inputs: those of the joined graph, accumulated gradients, the verdict so far, copies of buffers, live tensors.
    Results: the user's outputs, gradients that are not of the optimizer, those of a micro-batch, the auxiliary outputs
    of the backward, those of the step graph, the values and new states of judges, and the verdict.
    """

    gm: fx.GraphModule
    live: Sequence[Tensor | Place]
    written: Sequence[int]  # positions of inputs that it writes
    num_outputs: int
    others: tuple[int, ...]  # inputs with gradients that the optimizer does not have
    returned: tuple[int, ...]  # parameters with gradients among the results
    num_backward: int  # auxiliary outputs
    num_step: int
    num_states: tuple[int, ...]  # of each judge
    has_verdict: bool
    static: Sequence[int]  # positions of inputs with fixed addresses


class WholeGraphBuilder:
    """Adds to a copy of a joined graph the work behind it."""

    def __init__(self, joined: JoinedGraph, parts: UpdateParts) -> None:
        self.joined, self.parts = joined, parts
        self.gm = editing.copy_of(joined.gm)
        self.graph: fx.Graph = self.gm.graph
        self.output = self.graph.output_node()
        results = editing.outputs_of(self.output)
        self.inputs = self.graph.find_nodes(op="placeholder")
        ends = joined.num_outputs, len(joined.gradients), joined.num_auxiliary
        self.outputs, rest = results[: ends[0]], results[ends[0] :]
        self.by_input = dict(zip(joined.gradients, rest[: ends[1]], strict=True))
        self.auxiliary = rest[ends[1] : ends[1] + ends[2]]
        self.writes = dict(zip((self.inputs[n] for n in joined.written), rest[ends[1] + ends[2] :], strict=True))
        editing.set_outputs(self.graph, results)
        self.live: dict[fx.Node, Tensor | Place] = {}
        self.added: list[fx.Node] = []
        self.sums = {n: self._add_input(f"accumulated_{n}", parts.parameters[n]) for n in parts.accumulated}
        self.verdict = self._add_scalar("verdict") if parts.has_verdict else None
        self.kept = {n: self._add_like(f"buffer_{n}", self.inputs[n]) for n in parts.kept_buffers}
        self.step_results: list[fx.Node] = []
        self.judged: list[tuple[fx.Node, list[fx.Node]]] = []
        self.blocked: list[fx.Node] = []

    def _add_input(self, name: str, tensor: Tensor) -> fx.Node:
        mode = value_of(self.inputs[-1]).fake_mode  # type: ignore[attr-defined]
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return self._noted(editing.add_input(self.graph, name, fake))

    def _add_like(self, name: str, node: fx.Node) -> fx.Node:
        value = value_of(node)
        with value.fake_mode:  # type: ignore[attr-defined]
            return self._noted(editing.add_input(self.graph, name, torch.empty_like(value)))

    def _add_scalar(self, name: str) -> fx.Node:
        value = next(value_of(self.inputs[n]) for n in self.parts.inputs.values())
        with value.fake_mode:  # type: ignore[attr-defined]
            fake = torch.empty((), dtype=torch.float32, device=value.device)
        return self._noted(editing.add_input(self.graph, name, fake))

    def _noted(self, node: fx.Node) -> fx.Node:
        self.added.append(node)
        return node

    def _compute(self, run: Callable[..., Sequence[Tensor]], nodes: Sequence[fx.Node]) -> list[fx.Node]:
        return editing.compute(self.graph, run, nodes, self.output)[0]

    def _splice(self, traced: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        return editing.splice(traced, self.graph, nodes, self.output, _TAG)[0]

    def read(self, tensor: Tensor, place: Place | None = None) -> fx.Node:
        """Insert a read of a real tensor."""
        node = editing.live(self.graph, tensor, next(iter(self.parts_inputs())), self.output)
        self.live.setdefault(node, tensor if place is None else place)
        return node

    def parts_inputs(self) -> list[fx.Node]:
        """Return the placeholders of parameters."""
        return [self.inputs[n] for n in self.parts.inputs.values()]

    def gradients(self) -> dict[int, fx.Node]:
        """Return the gradients by the position of the parameter, with those of earlier backwards."""
        found: dict[int, fx.Node] = {}
        for n in range(len(self.parts.parameters)):
            own = self.by_input.get(self.parts.inputs.get(n, -1))
            known = self.sums.get(n)
            if own is not None and known is not None:
                (found[n],) = self._compute(lambda a, b: [a + b], [known, own])
            elif own is not None or known is not None:
                found[n] = own if known is None else known  # type: ignore[assignment]
        return found

    def judge_backward(self) -> None:
        """Gather the verdict of the checks in the backward."""
        packs = self.auxiliary[: len(self.parts.outputs.packs)]
        self._judge(self.parts.outputs, packs)

    def _judge(self, outputs: BackwardOutputs, packs: Sequence[fx.Node]) -> None:
        """Add verdicts on packs: of checks that skip to the verdict, of others that raise beside it."""
        for kind in ("skip", "raise"):
            rows = outputs.checked.get(kind, ())  # type: ignore[call-overload]
            given = [
                (node, own, len(pack.keys)) for node, own, pack in zip(packs, rows, outputs.packs, strict=False) if own
            ]
            if not given:
                continue
            (node,) = self._compute(_verdict_on([own[1:] for own in given]), [node for node, _, _ in given])
            if kind == "raise":
                self.blocked.append(node)
            else:
                self.add_verdict(node)

    def add_verdict(self, node: fx.Node) -> None:
        """Skip the update where a 0-d number is above 0."""
        if self.verdict is None:
            self.verdict = node
        else:
            (self.verdict,) = self._compute(lambda a, b: [torch.maximum(a, b.to(a.device))], [self.verdict, node])

    def run_step(self, plan: StepPlan, gradients: dict[int, fx.Node]) -> None:
        """Insert the step graph: gradients are replaced."""
        rewrite = plan.rewrite
        if rewrite is not None:
            own = [gradients[n] for n in plan.gradients]
            read = [self.parameter(plan.gradients[n]) for n in rewrite.parameters]
            results = self._splice(rewrite.shown.graph_module, [*own, *read])
            given, rest = results[: len(own)], results[len(own) :]
            factors, rest = rest[: len(rewrite.scaled)], rest[len(rewrite.scaled) :]
            totals, self.step_results = rest[: len(rewrite.judged)], rest[len(rewrite.judged) :]
            for members, factor in zip(rewrite.scaled, factors, strict=True):
                for n in members:
                    given[n] = self._scaled(given[n], factor)
            gradients.update(zip(plan.gradients, given, strict=True))
            self._judge(rewrite.outputs, self.step_results[: len(rewrite.outputs.packs)])
            figures = dict(zip(rewrite.judged, totals, strict=True))
        else:
            figures = {}
        for number, judge in enumerate(plan.judges):
            figure = figures.get(number)
            if figure is not None:
                self._insert_judge(judge, figure)

    def _scaled(self, gradient: fx.Node, factor: fx.Node) -> fx.Node:
        def scale(g: Tensor, f: Tensor) -> list[Tensor]:
            wide = torch.promote_types(g.dtype, torch.float32)
            return [(g.to(wide) * f.to(g.device, wide.to_real())).to(g.dtype)]

        return self._compute(scale, [gradient, factor])[0]

    def _insert_judge(self, judge: InGraphJudge, figure: fx.Node) -> None:
        (one,) = self._compute(lambda f: [torch.ones_like(f)], [figure])
        values, *states = self._splice(judge.trace(value_of(figure)), [figure, one])
        self.judged.append((values, states))
        (spike,) = self._compute(lambda v: [v[2].to(torch.float32)], [values])
        self.add_verdict(spike)

    def parameter(self, n: int) -> fx.Node:
        """Return the node of a parameter of the optimizer."""
        position = self.parts.inputs.get(n)
        return self.inputs[position] if position is not None else self.read(self.parts.parameters[n])

    def accumulate(self, gradients: Mapping[int, fx.Node]) -> list[int]:
        """Write sums into the buffers there are; return the parameters with gradients among the results."""
        for n, node in gradients.items():
            if n in self.sums and node is not self.sums[n]:
                self.writes[self.sums[n]] = node
        return [n for n in gradients if n not in self.sums]

    def update(
        self, update: UpdateGraph, gradients: Mapping[int, fx.Node], numbers: Tensor | None, states: Any
    ) -> None:
        """Insert the update of the optimizer; ``states`` is its state, by parameter and key."""
        parameters = [self.parameter(n) for n in update.parameters]
        own = [gradients[n] for n in update.parameters]
        kept = [self.read(states(n, key), Place(n, key)) for n, key in update.states]
        given = [*parameters, *own, *kept, *([] if numbers is None else [self.read(numbers)])]
        results = self._splice(update.graph_module, given)
        self.writes.update(zip([*parameters, *kept], results, strict=True))

    def scale_parameters(self, plan: StepPlan) -> None:
        """Multiply parameters behind their update."""
        for effect, members in plan.rewrite.parameter_factors if plan.rewrite is not None else ():
            for n in members:
                target = self.parameter(plan.gradients[n])
                (self.writes[target],) = self._compute(_scaled_by(effect.factor()), [self.writes[target]])

    def let_skip(self) -> None:
        """Keep what is written where the verdict is not 0."""
        found = [*self.blocked, *([] if self.verdict is None else [self.verdict])]
        if not found:
            return

        def decide(*flags: Tensor) -> list[Tensor]:
            return [torch.stack([f.to(flags[0].device) for f in flags]).amax() > 0]

        (skips,) = self._compute(decide, found)
        for target, value in self.writes.items():
            before = self._before(target)
            self.writes[target] = editing.insert_call(
                self.graph, aten.where.self, (skips, before, value), self.output, _TAG
            )

    def _before(self, target: fx.Node) -> fx.Node:
        positions = {self.inputs[n]: node for n, node in self.kept.items()}
        return positions.get(target, target)

    def finish(self, returned: Sequence[int], gradients: Mapping[int, fx.Node]) -> WholeGraph:
        """Return the graph, with its results and writes."""
        known = set(self.parts.inputs.values())
        others = tuple(n for n in self.joined.gradients if n not in known)
        judged = [node for values, states in self.judged for node in (values, *states)]
        verdict = [] if self.verdict is None else [self.verdict]
        results = [*self.outputs, *(self.by_input[n] for n in others), *(gradients[n] for n in returned)]
        editing.set_outputs(self.graph, [*results, *self.auxiliary, *self.step_results, *judged, *verdict])
        editing.write(self.graph, self.writes)
        self.graph.eliminate_dead_code()
        names = {str(node.target): place for node, place in self.live.items() if isinstance(place, Place)}
        tensors: Mapping[str, Tensor | Place] = {**editing.live_tensors(self.graph), **names}
        lifted = editing.lift_live(self.gm)
        self.graph.lint()
        self.gm.recompile()
        placeholders = self.graph.find_nodes(op="placeholder")
        targets = {node.args[0] for node in self.graph.find_nodes(op="call_function", target=aten.copy_.default)}
        live = [tensors[name] for name, _ in lifted]
        first = len(placeholders) - len(live)
        static = [*sorted(known), *range(first, len(placeholders))]
        return WholeGraph(
            self.gm,
            live,
            [n for n, node in enumerate(placeholders) if node in targets],
            self.joined.num_outputs,
            others,
            tuple(returned),
            len(self.auxiliary),
            len(self.step_results),
            tuple(len(states) for _, states in self.judged),
            self.verdict is not None,
            static,
        )


def _verdict_on(rows: Sequence[tuple[Sequence[int], int]]) -> Callable[..., list[Tensor]]:
    """Return a function of packs: 1 if a count in one of these rows is not 0, else 0."""

    def verdict(*packs: Tensor) -> list[Tensor]:
        found = [
            (pack[: pack.numel() // number * number].view(number, -1)[list(own)].nan_to_num() > 0).any()
            for pack, (own, number) in zip(packs, rows, strict=True)
        ]
        return [torch.stack([one.to(packs[0].device) for one in found]).any().to(torch.float32)]

    return verdict


def _scaled_by(factor: Any) -> Callable[[Tensor], list[Tensor]]:
    def scale(p: Tensor) -> list[Tensor]:
        wide = torch.promote_types(p.dtype, torch.float32)
        return [(p.to(wide) * factor).to(p.dtype)]

    return scale
