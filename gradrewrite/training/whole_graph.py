"""Whole graphs: a joined graph with the actions at step sites and the update behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, fx

from gradrewrite._compat import collectives
from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.optimizer.step_plan import ChangePlan, InGraphJudge, StepPlan
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
class Scaling:
    """The scale of the loss; with a GradScaler, the settings of its updates."""

    scale: Tensor
    growth_tracker: Tensor | None = None
    growth_factor: float = 1.0
    backoff_factor: float = 1.0
    growth_interval: int = 1

    def next(self, scale: Tensor, tracker: Tensor, found_inf: Tensor) -> list[Tensor]:
        """Return scale and tracker behind a step, as ``torch._amp_update_scale_`` does."""
        grown, is_bad = scale * self.growth_factor, found_inf.reshape(scale.shape) > 0
        count = tracker + 1
        is_due = count == self.growth_interval
        larger = torch.where(is_due & grown.isfinite(), grown, scale)
        zero = torch.zeros_like(tracker)
        return [
            torch.where(is_bad, scale * self.backoff_factor, larger),
            torch.where(is_bad | is_due, zero, count),
        ]


@dataclass(frozen=True, slots=True)
class UpdateParts:
    """The inputs and settings of the part behind a joined graph."""

    inputs: Mapping[int, int]  # positions among the inputs of the joined graph, by that of the parameter
    parameters: Sequence[Tensor]  # of the optimizer
    accumulated: Mapping[int, Tensor] = field(default_factory=dict)  # gradients of earlier backwards, by parameter
    has_verdict: bool = False  # whether an earlier backward had checks that skip
    has_losses: bool = False  # whether there is a sum of earlier losses
    outputs: BackwardOutputs = field(default_factory=BackwardOutputs)  # of the joined graph


@dataclass(frozen=True, slots=True)
class WholeGraph:
    """A graph of a whole step, and the order of its inputs and results.

    Inputs: those of the joined graph, accumulated gradients, the verdict so far, sum and number of earlier losses, live
    tensors.
    Results: the user's outputs, gradients that are not of the optimizer, those of a micro-batch, the auxiliary outputs
    of the backward, those of the step graph, the values and new states of judges, the auxiliary outputs of functions
    behind the update, ratios of updates, the verdict of checks alone, what a GradScaler found, and the
    verdict.
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
    num_changed: int
    has_ratios: bool
    has_checked: bool
    has_found_inf: bool
    has_verdict: bool
    static: Sequence[int]  # positions of inputs with fixed addresses

    @property
    def has_report(self) -> bool:
        """Whether it returns more of an update than the step graph does."""
        flags = self.has_verdict, self.has_found_inf, self.has_ratios
        return bool(self.num_states or self.num_changed or any(flags))


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
        self.names: dict[fx.GraphModule, dict[str, str]] = {}  # of nodes by those in the graph that was spliced in
        self.live: dict[fx.Node, Tensor | Place] = {}
        self.sums = {n: self._add_input(f"accumulated_{n}", total) for n, total in parts.accumulated.items()}
        self.verdict = self._add_flat("verdict", (), torch.float32) if parts.has_verdict else None
        self.losses = self._add_flat("losses", (2,), torch.float64) if parts.has_losses else None
        self.step_results: list[fx.Node] = []
        self.judged: list[tuple[fx.Node, list[fx.Node]]] = []
        self.blocked: list[fx.Node] = []
        self.late: dict[fx.Node, fx.Node] = {}  # writes of a skipped update, too
        self.states: dict[tuple[int, str], fx.Node] = {}  # of the optimizer, by parameter and key
        self.changed: list[fx.Node] = []  # auxiliary outputs of functions behind the update
        self.ratios: fx.Node | None = None
        self.checked: fx.Node | None = None  # the verdict of checks, where there are judges too
        self.found_inf: fx.Node | None = None  # 1 where a GradScaler skips, else 0

    def _add_input(self, name: str, tensor: Tensor) -> fx.Node:
        mode = value_of(self.inputs[-1]).fake_mode  # type: ignore[attr-defined]
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return editing.add_input(self.graph, name, fake)

    def _add_flat(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        value = next(value_of(self.inputs[n]) for n in self.parts.inputs.values())
        with value.fake_mode:  # type: ignore[attr-defined]
            fake = torch.empty(size, dtype=dtype, device=value.device)
        return editing.add_input(self.graph, name, fake)

    def _compute(self, run: Callable[..., Sequence[Tensor]], nodes: Sequence[fx.Node]) -> list[fx.Node]:
        return editing.compute(self.graph, run, nodes, self.output)[0]

    def _splice(self, traced: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        results, new = editing.splice(traced, self.graph, nodes, self.output, _TAG)
        spliced = [node.name for node in traced.graph.nodes if node.op in ("get_attr", "call_function")]
        self.names[traced] = dict(zip(spliced, (node.name for node in new), strict=True))
        return results

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
            rows = outputs.checked.get(kind, ())
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
        self.checked = self.verdict if plan.judges else None
        for number, judge in enumerate(plan.judges):
            if judge.is_of_loss:
                self._insert_judge(judge, *self._mean_loss())
            elif number in figures:
                (one,) = self._compute(lambda f: [torch.ones_like(f)], [figures[number]])
                self._insert_judge(judge, figures[number], one)

    def _scaled(self, gradient: fx.Node, factor: fx.Node) -> fx.Node:
        def scale(g: Tensor, f: Tensor) -> list[Tensor]:
            wide = torch.promote_types(g.dtype, torch.float32)
            return [(g.to(wide) * f.to(g.device, wide.to_real())).to(g.dtype)]

        return self._compute(scale, [gradient, factor])[0]

    def _mean_loss(self) -> list[fx.Node]:
        """Return the mean loss of the micro-batches so far, and their number."""
        own = [self.outputs[n] for n in self.joined.losses]

        def mean(*values: Tensor) -> list[Tensor]:
            losses, earlier = values[: len(own)], values[len(own) :]
            total = torch.stack([loss.reshape(()).to(torch.float64) for loss in losses]).sum()
            number = torch.ones_like(total)
            for sums in earlier:
                total, number = total + sums[0], number + sums[1]
            return [total / number, number]

        return self._compute(mean, [*own, *([] if self.losses is None else [self.losses])])

    def _insert_judge(self, judge: InGraphJudge, figure: fx.Node, number: fx.Node) -> None:
        values, *states = self._splice(judge.trace(value_of(figure), value_of(number)), [figure, number])
        self.judged.append((values, states))
        (spike,) = self._compute(lambda v: [v[2].to(torch.float32)], [values])
        self.add_verdict(spike)

    def unscale(self, gradients: dict[int, fx.Node], scaling: Scaling) -> None:
        """Divide gradients by the loss scale; with a GradScaler, skip and change the scale as it does."""
        scale = self.read(scaling.scale)
        members = list(gradients)

        def run(*given: Tensor) -> list[Tensor]:
            scale, *tensors = given
            inverse = scale.reshape(()).double().reciprocal().float()  # as GradScaler.unscale_
            found = [(~t.isfinite()).any() for t in tensors]
            results = [t * inverse.to(t.device) for t in tensors]
            return [*results, torch.stack([one.to(scale.device) for one in found]).any().to(torch.float32)]

        *results, found_inf = self._compute(run, [scale, *(gradients[n] for n in members)])
        gradients.update(zip(members, results, strict=True))
        if scaling.growth_tracker is not None:
            self.found_inf = found_inf
            tracker = self.read(scaling.growth_tracker)
            self.late.update(
                zip(
                    (scale, tracker),
                    self._compute(lambda *given: scaling.next(*given), [scale, tracker, found_inf]),
                    strict=True,
                )
            )

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
        self.states = dict(zip(update.states, kept, strict=True))

    def scale_parameters(self, plan: StepPlan) -> None:
        """Multiply parameters behind their update."""
        for effect, members in plan.rewrite.parameter_factors if plan.rewrite is not None else ():
            for n in members:
                target = self.parameter(plan.gradients[n])
                (self.writes[target],) = self._compute(_scaled_by(effect.factor()), [self.writes[target]])

    def change(self, plan: ChangePlan, gradients: Mapping[int, fx.Node], states: Any) -> None:
        """Insert held elements and functions behind the update."""
        places = {place: self._node_of(place, states) for place in plan.places}
        now = [self.writes.get(node, node) for node in places.values()]
        before = [places[place] for place in plan.before]
        given = [*now, *before, *(gradients[n] for n in plan.held)]
        results = self._splice(plan.rewrite.graph_module, given)
        for node, old, new in zip(places.values(), now, results, strict=False):
            if new is not old:
                self.writes[node] = new
        self.changed = results[len(now) :]

    def _node_of(self, place: tuple[int, Any], states: Any) -> fx.Node:
        n, key = place
        if key is None:
            return self.parameter(n)
        return self.states.get((n, key)) or self.read(states(n, key), Place(n, key))

    def measure_ratios(self, members: Sequence[int]) -> None:
        """Measure the relative distance of updates, as they are made or skipped."""

        def ratios(*values: Tensor) -> list[Tensor]:
            number = len(values) // 2
            found = []
            for old, new in zip(values[:number], values[number:], strict=True):
                wide = torch.promote_types(old.dtype, torch.float32)
                a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (old.to(wide), new.to(wide)))
                size, change = (torch.linalg.vector_norm(t, dtype=torch.float64) for t in (a, a - b))
                found.append(torch.where(change == 0, change, change / size))
            return [torch.stack(found)]

        own = [self.parameter(n) for n in members]
        (self.ratios,) = self._compute(ratios, [*own, *(self.writes.get(node, node) for node in own)])

    def agree(self, group: distributed.ProcessGroup) -> None:
        """Let ranks that skip together have one verdict."""
        if self.verdict is not None:
            run = _largest_of(group)
            (self.verdict,) = self._compute(run, [self.verdict])

    def let_skip(self) -> None:
        """Leave written tensors alone under a verdict other than 0."""
        found = [*self.blocked, *(node for node in (self.verdict, self.found_inf) if node is not None)]
        if not found:
            return

        def decide(*flags: Tensor) -> list[Tensor]:
            return [torch.stack([f.to(flags[0].device) for f in flags]).amax() > 0]

        (skips,) = self._compute(decide, found)
        for target, value in self.writes.items():
            given = (skips, target, value)
            self.writes[target] = editing.insert_call(self.graph, aten.where.self, given, self.output, _TAG)

    def finish(self, returned: Sequence[int], gradients: Mapping[int, fx.Node]) -> WholeGraph:
        """Return the graph, with its results and writes."""
        known = set(self.parts.inputs.values())
        others = tuple(n for n in self.joined.gradients if n not in known)
        judged = [node for values, states in self.judged for node in (values, *states)]
        last = [node for node in (self.ratios, self.checked, self.found_inf, self.verdict) if node is not None]
        results = [*self.outputs, *(self.by_input[n] for n in others), *(gradients[n] for n in returned)]
        editing.set_outputs(self.graph, [*results, *self.auxiliary, *self.step_results, *judged, *self.changed, *last])
        editing.write(self.graph, {**self.writes, **self.late})
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
        static = [*sorted({*known, *self.joined.written}), *range(first, len(placeholders))]
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
            len(self.changed),
            self.ratios is not None,
            self.checked is not None,
            self.found_inf is not None,
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


def _largest_of(group: distributed.ProcessGroup) -> Callable[[Tensor], list[Tensor]]:
    return lambda verdict: [collectives.wait(collectives.begin_max(verdict, group))]


def _scaled_by(factor: Any) -> Callable[[Tensor], list[Tensor]]:
    def scale(p: Tensor) -> list[Tensor]:
        wide = torch.promote_types(p.dtype, torch.float32)
        return [(p.to(wide) * factor).to(p.dtype)]

    return scale
