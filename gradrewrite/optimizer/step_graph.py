"""Step graphs: actions on the gradients of an optimizer before its update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor, fx

from gradrewrite._compat import make_fx
from gradrewrite.distributed.agreement import NUM_VOTES
from gradrewrite.distributed.figures import Part
from gradrewrite.distributed.shards import Spread
from gradrewrite.ir import editing
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.ir.provenance import Anchor, Origin, Provenance
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.numerics.measuring import measure_all
from gradrewrite.numerics.statistics import norm_of, total_norm_of
from gradrewrite.optimizer.spikes import Judge
from gradrewrite.optimizer.step_exchange import (
    ExchangeSettings,
    SlotPart,
    insert_exchange,
    slots_of,
)
from gradrewrite.policy.insertions import (
    Insertion,
    JudgeUpdate,
    ReplaceTensor,
    ScaleGroup,
    ScaleParameter,
)
from gradrewrite.policy.recording import recording
from gradrewrite.policy.rules import Answered
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.policy.state_store import StateScope, StateStore
from gradrewrite.rewriting.action_tracing import TracedAction, check_dense
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.inserters import insert, insert_at_part, insert_group
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.rewriting.lowering import Group, is_in_units, lower
from gradrewrite.rewriting.record_nodes import RecordNode, RecordNumbering
from gradrewrite.sites import Site

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class StepGradient:
    """A gradient of the next optimizer step."""

    site: Site
    gradient: Tensor  # gradient, fake
    parameter: Tensor  # parameter, fake
    answers: tuple[Answered, ...]  # answers of the policy
    # How it is spread over ranks; then both tensors are the parts on this rank. None for a plain gradient.
    spread: Spread | None = None


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings behind the form of a step graph."""

    # Whether the optimizer divides all gradients by a number of ours, if one group action scales them all.
    divides: bool = False
    suffix: str = ""  # what follows the name of a group in the site of its records (``#1`` for the second optimizer)
    exchange: ExchangeSettings | None = None  # what ranks exchange; None where no gradient is spread over several
    states: StateStore | None = None  # what actions remember; None if they have no model
    judges: tuple[tuple[Insertion, JudgeUpdate], ...] = ()  # those at step sites, of gradients that this rank lacks too


@dataclass(frozen=True, slots=True)
class AtSteps:
    """The states and record names of the actions at step sites, for ``Hold`` behind the update."""

    scopes: Mapping[str, StateScope] = field(default_factory=dict)  # by site
    numbering: RecordNumbering = field(default_factory=RecordNumbering)


@dataclass(frozen=True, slots=True)
class StepRewrite:
    """A step graph: gradients, parameters that actions read, the loss scale and the votes of this rank in.

    It returns the gradients in their order, a factor for each of ``scaled``, the total norms for judges, the sums of
    the votes of all ranks, the packed records, and what is kept.
    """

    shown: JointGraph  # graph with its edits
    num_gradients: int  # number of gradients, its first inputs and outputs
    parameters: tuple[int, ...]  # positions of the gradients whose parameters it reads, in the order of these inputs
    # Positions of the gradients that are multiplied by one factor after the graph, for each factor.
    scaled: tuple[tuple[int, ...], ...]
    # Whether the optimizer divides all gradients by the only factor; it is float32, times the loss scale.
    is_divided: bool
    takes_scale: bool  # whether an input is the loss scale (0-d float32) that all gradients were multiplied by
    # Whether the last input is the verdicts of this rank (flat float64), which ranks exchange: the output behind the
    # factors is their sums.
    takes_votes: bool
    outputs: BackwardOutputs  # auxiliary outputs
    # Factors of parameters after the update, with the positions of their gradients.
    parameter_factors: Sequence[tuple[ScaleParameter, Sequence[int]]]
    judges: tuple[Judge, ...] = ()
    judged: tuple[int, ...] = ()  # positions of the judges that are given total norms, in the order of these
    at_steps: AtSteps = field(default_factory=AtSteps)


def rewrite_step(
    gradients: Sequence[StepGradient], settings: StepSettings, further: Sequence[Site] = ()
) -> StepRewrite:
    """Insert the actions at step sites into a graph that returns its gradients, in the order of the optimizer.

    Sites without actions (``further``) are listed. PolicyError, UnsupportedGradientError or CallbackError as for a
    joint graph; PolicyError too for an action that would be another one on parts of a spread gradient.
    """
    builder = _Builder(gradients, settings)
    plan = lower((point, given.answers) for point, given in zip(builder.points, gradients, strict=True))
    groups = [group for group in plan.groups if not isinstance(group.effect, JudgeUpdate)]
    judged = [group for group in plan.groups if isinstance(group.effect, JudgeUpdate)]
    # A float32 divisor is as good as one in the gradient's own precision where that is no wider.
    may_divide = settings.divides and all(given.gradient.dtype in _NARROW for given in gradients)
    divides = may_divide and not further and len(groups) == 1 and len(groups[0].points) == len(gradients)
    is_only_judged = may_divide and not groups and len(plan.groups) > 0
    takes_scale = divides or is_only_judged
    takes_scale = takes_scale and not any(
        map(is_in_units, [*(group.insertion for group in groups), *chain.from_iterable(plan.single.values())])
    )
    scale = builder.add_input("loss_scale", ()) if takes_scale else None
    for point, own in plan.single.items():
        spread = builder.spreads[point.order]
        if spread is None:
            insert(builder.canvas, point, own)
        else:
            for insertion in own:
                builder.measured[point.order] += insert_at_part(builder.canvas, point, insertion, spread)
        for insertion in own:
            if isinstance(insertion.effect, ScaleParameter):
                builder.parameter_factors.setdefault(insertion.key, (insertion.effect, []))[1].append(point.order)
    if settings.exchange is not None:
        builder.exchange(settings.exchange)
    builder.insert_judges(judged, scale)
    is_divided = False
    for number, group in enumerate(groups):
        later = {point for other in groups[number + 1 :] for point in other.points}
        if isinstance(group.effect, ScaleGroup) and later.isdisjoint(group.points):
            is_divided = divides
            builder.insert_scaling(group, group.effect, scale, divides=divides)
        else:
            builder.refuse_parts(group.insertion, group.points)
            insert_group(builder.canvas, group, builder.where(group.effect.group))
    builder.name_judges(plan.groups)
    return builder.finish([*(given.site for given in gradients), *further], is_divided, takes_scale)


def reads_value(insertion: Insertion) -> bool:
    """Return whether an action is given the value of its gradient."""
    return isinstance(insertion.effect, ReplaceTensor) and insertion.effect.reads == "value"


class _Builder:
    def __init__(self, gradients: Sequence[StepGradient], settings: StepSettings) -> None:
        reading = [n for n, given in enumerate(gradients) if any(reads_value(a.insertion) for a in given.answers)]
        inputs = [(f"grad_{given.site.name}", given.gradient) for given in gradients]
        inputs += [(f"parameter_{gradients[n].site.name}", gradients[n].parameter) for n in reading]
        self.owner = editing.graph_of(inputs, len(gradients))
        self.graph = self.owner.graph
        placeholders = self.graph.find_nodes(op="placeholder")
        self.nodes = placeholders[: len(gradients)]
        values = dict(zip(reading, placeholders[len(gradients) :], strict=True))
        self.parameters = tuple(reading)
        output = self.graph.output_node()
        self.points = [
            InsertionPoint(given.site, node, output, n, output=n, value=values.get(n))
            for n, (given, node) in enumerate(zip(gradients, self.nodes, strict=True))
        ]
        self.settings = settings
        self.canvas = Canvas(self.graph, states=settings.states)
        self.spreads = [given.spread for given in gradients]
        self.measured: dict[int, list[RecordNode]] = defaultdict(list)  # of parts on this rank, by the point's order
        self.norms: dict[Hashable, list[tuple[tuple[Site, ...], fx.Node]]] = defaultdict(list)  # of groups, by members
        self.measured_norms: dict[Hashable, tuple[list[fx.Node], list[int], list[fx.Node]]] = {}
        self.totals: dict[int, tuple[fx.Node, tuple[str, ...]]] = {}  # of judges, by position, with all their nodes
        self.judges: list[Judge] = []
        self.exchanged: list[fx.Node] = []
        self.votes: fx.Node | None = None
        self.scaled: list[tuple[int, ...]] = []
        self.parameter_factors: dict[Hashable, tuple[ScaleParameter, list[int]]] = {}
        self.factors: list[fx.Node] = []

    def add_input(self, name: str, size: Sequence[int], dtype: torch.dtype | None = None) -> fx.Node:
        """Add an input behind the others, on the device of the last gradient."""
        with value_of(self.nodes[-1]).fake_mode:  # type: ignore[attr-defined]
            value = torch.empty(size, dtype=dtype, device=value_of(self.nodes[-1]).device)
        return editing.add_input(self.graph, name, value)

    def refuse_parts(self, insertion: Insertion, members: Sequence[InsertionPoint]) -> None:
        """Raise PolicyError for a group action that needs whole gradients where one is spread over ranks."""
        for point in members:
            spread = self.spreads[point.order]
            if spread is not None:
                reason = "it is no global clip, or its gradients are in a later group too"
                refuse(insertion, Context(point.site, num_ranks=len(spread.ranks), needs_whole=reason))

    def exchange(self, settings: ExchangeSettings) -> None:
        """Let ranks exchange the figures of the gradients that are spread over them, and their verdicts."""
        packing = self.canvas.packing
        figures: list[SlotPart] = []
        measured = {n: iter(own) for n, own in self.measured.items()}
        uses: list[RecordNode | None] = []
        for slot in slots_of(settings.sites):
            here = [(m.position, m.spread) for m in slot.members if m.position is not None]
            part = next(measured[here[0][0]]) if here and slot.group is None else None
            nodes = [self.canvas.current(self.points[n].node) if part is None else part.node for n, _ in here]
            parts = [Part(spread, value_of(node).numel()) for (_, spread), node in zip(here, nodes, strict=True)]
            figures.append(SlotPart(slot, tuple(nodes), tuple(parts), part is not None and part.skips))
            uses.append(part)
        checks = [(r.node, r.statistics) for r in packing.records if r.skips and r.statistics]
        size = NUM_VOTES + settings.num_sent
        votes = self.add_input("votes", (size,), torch.float64) if settings.voters else None
        device = value_of(self.nodes[-1]).device
        results, self.votes, self.exchanged = insert_exchange(self.graph, settings, figures, checks, votes, device)
        for use, figure, node in zip(uses, figures, results, strict=True):
            if use is not None:
                packing.records.append(replace(use, node=node))
            elif figure.slot.group is not None:  # other ranks may have what this one lacks
                self.norms[figure.slot.group].append((tuple(m.site for m in figure.slot.members), node))

    def where(self, name: Hashable) -> str:
        """Return the site of the records of a group."""
        return f"step:group:{name}{self.settings.suffix}"

    def insert_scaling(self, group: Group, effect: ScaleGroup, scale: fx.Node | None, *, divides: bool) -> None:
        """Insert a group's factor; the gradients are multiplied after the graph."""
        canvas, insertion, points = self.canvas, group.insertion, group.points
        for point in points:
            check_dense(insertion.action, point.site, value_of(point.node))
        wholes = self.norms[insertion.group]
        plain = [point for point in points if self.spreads[point.order] is None]
        nodes = [canvas.current(point.node) for point in plain]
        known = self._norms_apart(nodes) if effect.norm_type == 2 else None
        is_apart = known is not None
        norms, order, measured = known or (nodes, list(range(len(nodes))), [])
        norms = [*(node for _, node in wholes), *norms]
        members = [*(site for sites, _ in wholes for site in sites), *(plain[n].site for n in order)]
        measured = [*self.exchanged, *measured] if wholes else measured
        where = self.where(effect.group)
        states = canvas.states_at(where)
        with recording(value_of(points[0].node).device, states=states) as reported:

            def factor(*values: Tensor) -> list[Tensor]:
                reported.clear()
                given = values if scale is None else values[:-1]
                found, rest = list(given[: len(wholes)]), given[len(wholes) :]
                found += rest if is_apart else [norm_of(v, effect.norm_type) for v in rest]
                if scale is not None:
                    found = [norm / values[-1].to(norm.device) for norm in found]
                bound, total = effect.bound_and_total(found)
                result = total / bound if divides else bound / total
                if divides and scale is not None:
                    result = result * values[-1].to(result.device)
                reported.close()
                return [result, *reported.outputs]

            inputs = [*norms, *([] if scale is None else [scale])]
            graph = make_fx.trace(factor, [value_of(node) for node in inputs])
        traced = TracedAction.of(graph, reported)
        (result, *extras), new = editing.splice(graph, self.graph, inputs, points[0].before, "is_backward")
        keys = canvas.packing.add(insertion, where, points[0].site, traced.reports, extras, members)
        canvas.packing.groups.append(str(effect.group))
        names = tuple(node.name for node in (*measured, *new))
        for n, point in enumerate(points):
            own = tuple(key for key in keys if key.site in (where, str(point.site)))
            canvas.note(point.site, insertion, () if n else names, own)
        self.scaled.append(tuple(point.order for point in points))
        self.factors.append(result)

    def insert_judges(self, groups: Sequence[Group], scale: fx.Node | None) -> None:
        """Insert the total norms for judges, before group actions change a gradient."""
        points_of = {group.insertion.group: group.points for group in groups}
        for number, (insertion, effect) in enumerate(self.settings.judges):
            if effect.of == "total_norm":
                key = insertion.group
                self._insert_total(number, [node for _, node in self.norms[key]], points_of.get(key, ()), scale)

    def _insert_total(
        self, number: int, wholes: Sequence[fx.Node], points: Sequence[InsertionPoint], scale: fx.Node | None
    ) -> None:
        nodes = [self.canvas.current(point.node) for point in points if self.spreads[point.order] is None]
        norms, _, measured = (self._norms_apart(nodes, always=True) if nodes else None) or ([], [], [])
        inputs = [*wholes, *norms, *([] if scale is None else [scale])]
        if not (wholes or norms):
            return

        def total(*values: Tensor) -> list[Tensor]:
            found = list(values) if scale is None else [norm / values[-1].to(norm.device) for norm in values[:-1]]
            return [total_norm_of(found)[0]]

        (node,), new = editing.compute(self.graph, total, inputs, self.graph.output_node())
        made = [*(self.exchanged if wholes else ()), *measured, *new]
        self.totals[number] = node, tuple(one.name for one in made)

    def name_judges(self, groups: Sequence[Group]) -> None:
        """Make the keys of the records of judges, behind those of group actions."""
        numbering = self.canvas.packing.numbering
        points_of = {group.insertion.group: group.points for group in groups}
        for number, (insertion, effect) in enumerate(self.settings.judges):
            where, points = self.where(effect.group), points_of.get(insertion.group, ())
            is_known = effect.of == "total_norm" and _records_total(groups, effect.group, points)
            figure = RecordKey(effect.of, 1, where) if is_known else numbering.new([effect.of], where)[0]
            limit, spike = numbering.new(["spike_limit", "spike"], where)
            judge = Judge(insertion.action, effect, where, (figure, limit, spike), not is_known)
            self.judges.append(judge)
            _, names = self.totals.get(number, (None, ()))
            for n, point in enumerate(points):
                self.canvas.note(point.site, insertion, () if n else names, judge.keys)

    def _norms_apart(
        self, nodes: Sequence[fx.Node], *, always: bool = False
    ) -> tuple[list[fx.Node], list[int], list[fx.Node]] | None:
        """Measure L2 norms of these nodes, each read once; see ``_measured_norms``.

        None where they are better measured with what reads them, unless ``always``, and have not been measured.
        """
        key = tuple(nodes)
        values = [value_of(node) for node in nodes]
        if key in self.measured_norms or not nodes:
            return self.measured_norms.get(key)
        if all(v.device.type == "cpu" and not v.is_complex() for v in values):
            self.measured_norms[key] = self._measured_norms(nodes)
        elif always:
            norms, new = editing.compute(
                self.graph, lambda *tensors: list(map(norm_of, tensors)), nodes, self.graph.output_node()
            )
            self.measured_norms[key] = norms, list(range(len(nodes))), new
        return self.measured_norms.get(key)

    def _measured_norms(self, nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[int], list[fx.Node]]:
        """Measure norms together with all else that is measured of these nodes and was put off.

        Returns flat nodes with the norms, the positions of the given nodes in their order, and all new nodes.
        """
        packing = self.canvas.packing
        own = {node: [r for r in packing.records if r.statistics and r.node is node] for node in nodes}
        alike: dict[Hashable, list[fx.Node]] = {}
        for node in nodes:
            # Counts of checks that skip come first, as in a pack.
            own[node].sort(key=lambda record: not record.skips)
            # Figures of float32 gradients are float32, and would be float64 beside those of float64 gradients.
            kind = tuple((r.skips, r.statistics) for r in own[node])
            alike.setdefault((value_of(node).dtype == torch.float64, kind), []).append(node)
        taken = {id(record) for records in own.values() for record in records}
        packing.records = [record for record in packing.records if id(record) not in taken]
        norms: list[fx.Node] = []
        new: list[fx.Node] = []
        for members in alike.values():
            kinds = [(record.skips, record.statistics) for record in own[members[0]]]
            statistics = ["norm", *(name for _, names in kinds for name in names)]
            num_skips = sum(len(names) for skips, names in kinds if skips)
            run = _measure_together(statistics, num_skips)
            (norm, skipping, others), added = editing.compute(self.graph, run, members, self.graph.output_node())
            norms.append(norm)
            new += added
            for skips, node in ((True, skipping), (False, others)):
                keys = tuple(key for n in members for r in own[n] if r.skips == skips for key in r.keys)
                if keys:
                    packing.records.append(RecordNode(keys, node, is_forward=False, skips=skips))
        position = {node: n for n, node in enumerate(nodes)}
        return norms, [position[node] for members in alike.values() for node in members], new

    def finish(self, sites: Sequence[Site], is_divided: bool, takes_scale: bool) -> StepRewrite:
        """Add the auxiliary outputs."""
        canvas, graph = self.canvas, self.graph
        canvas.check_states()
        canvas.packing.follow(canvas.current, graph)
        totals = [node for node, _ in self.totals.values()]
        added = [*self.factors, *totals, *([] if self.votes is None else [self.votes])]
        if added:
            editing.add_outputs(graph, added)
        outputs, record_nodes = canvas.packing.pack_into(graph, canvas.forward)
        editing.release(graph)
        graph.eliminate_dead_code()
        graph.lint()
        self.owner.recompile()
        present = {node.name for node in graph.nodes}
        edits = tuple(replace(e, nodes=tuple(n for n in e.nodes if n in present)) for e in canvas.edits)
        names = tuple(node.name for node in record_nodes if node.name in present)
        labels = [str(point.site) for point in self.points]
        labels += ["grad_scale" if is_divided else "factor"] * len(self.factors)
        labels += ["total norm"] * len(totals)
        labels += ["votes"] * (self.votes is not None)
        labels += ["records"] * len(outputs.packs) + [f"kept {site}" for _, site, *_ in outputs.kept]
        labels += [f"state {key}" for key, _ in outputs.states]
        before = JointGraph(
            editing.graph_of([(node.name, value_of(node)) for node in self.nodes], len(self.nodes)),
            tuple(sites),
            provenance=self._provenance((), (), labels[: len(self.points)]),
        )
        shown = JointGraph(self.owner, tuple(sites), edits, names, before, self._provenance(edits, names, labels))
        return StepRewrite(
            shown,
            len(self.points),
            self.parameters,
            tuple(self.scaled),
            is_divided,
            takes_scale,
            self.votes is not None,
            outputs,
            tuple(self.parameter_factors.values()),
            tuple(self.judges),
            tuple(self.totals),
            AtSteps(canvas.scopes, canvas.packing.numbering),
        )

    def _provenance(self, edits: Sequence[Edit], records: Collection[str], outputs: Sequence[str]) -> Provenance:
        def origin(number: int, op: str) -> Origin:
            site = self.points[number].site
            name = "" if op == "step" else site.name
            return Origin("backward", number, ((site.module, 0),) if site.module else (), op, name)

        orders = {point.site: point.order for point in self.points}
        found = {node.name: origin(n, "gradient") for n, node in enumerate(self.nodes)}
        placeholders = self.graph.find_nodes(op="placeholder")
        values = placeholders[len(self.nodes) : len(self.nodes) + len(self.parameters)]
        for number, node in zip(self.parameters, values, strict=True):
            found[node.name] = origin(number, "parameter")
        for node in placeholders[len(self.nodes) + len(self.parameters) :]:
            found[node.name] = Origin("backward", 0, op="input", name=node.name)
        for edit in edits:
            found.update(dict.fromkeys(edit.nodes, origin(orders[edit.site], "step")))
        found.update(dict.fromkeys(records, Origin("backward", -1, op="records")))
        anchors = {p.site: Anchor(node.name, p.order) for p, node in zip(self.points, self.nodes, strict=True)}
        return Provenance(found, anchors, tuple(outputs))


def _records_total(groups: Sequence[Group], name: Hashable, points: Sequence[InsertionPoint]) -> bool:
    """Return whether a clip records the total L2 norm of these gradients, unchanged before it, as that of a group."""
    for group in groups:
        effect = group.effect
        if isinstance(effect, JudgeUpdate):
            continue
        if isinstance(effect, ScaleGroup) and effect.group == name and effect.norm_type == 2:
            return set(group.points) == set(points)
        if not set(group.points).isdisjoint(points):
            return False
    return False


def _measure_together(statistics: Sequence[str], num_skips: int) -> Callable[..., list[Tensor]]:
    """A function of tensors for their norms, the counts of checks that skip, and the other statistics, each flat."""

    def measure(*tensors: Tensor) -> list[Tensor]:
        figures = measure_all([(t, statistics) for t in tensors]).view(len(tensors), len(statistics))
        parts = (figures[:, 0], figures[:, 1 : 1 + num_skips], figures[:, 1 + num_skips :])
        return [part.reshape(-1) for part in parts]

    return measure


def runnable(given: fx.GraphModule, count: int) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return a copy that writes its first results in place and returns all else, and its live inputs, the last ones."""
    gm = editing.copy_of(given)
    editing.write_back(gm.graph, count)
    lifted = editing.lift_live(gm)
    gm.graph.lint()
    gm.recompile()
    live = editing.live_tensors(given.graph)
    return gm, [live[name] for name, _ in lifted]
