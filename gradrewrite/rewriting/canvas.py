"""The canvas: a graph while insertions are made."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, fx

from gradrewrite.errors import PolicyError
from gradrewrite.ir import editing
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import StateUpdate
from gradrewrite.ir.values import shape_of
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import Insertion, MeasureTensor, OtherValues
from gradrewrite.policy.state_store import CarriedKeys, StateScope, StateStore
from gradrewrite.rewriting.action_tracing import ActionTracer, TracedAction, TraceMode
from gradrewrite.rewriting.carried_states import CarriedStates
from gradrewrite.rewriting.example_gradients import ExampleGradients, drop_replaced
from gradrewrite.rewriting.forward_values import ForwardValues
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.rewriting.loss_gradients import LossGradients, Rows
from gradrewrite.rewriting.loss_scale import LossScale
from gradrewrite.rewriting.other_values import Inputs, OtherSites, Read
from gradrewrite.rewriting.record_packing import RecordPacking
from gradrewrite.sites import Site

# From this many measured errors and activations on, their statistics are opaque, except on CUDA: see docs/design.md.
MANY = 64
# Where errors and activations are always measured by an operation of our own, which reads memory at full speed.
MEASURED_APART = frozenset(("cpu",))


class Canvas:
    """A graph while insertions are made: current values, edits, reports and states; it knows no inserter."""

    def __init__(
        self,
        graph: fx.Graph,
        scale: LossScale | None = None,
        states: StateStore | None = None,
        marked: MarkedJointGraph | None = None,
        label: str = "",
        *,
        outer: Canvas | None = None,
    ) -> None:
        self.graph = graph
        self._is_body = outer is not None  # of a loop: an operation of our own would run in each iteration
        self.forward = ForwardValues(graph)
        self.packing = RecordPacking(label)
        self.tracer = ActionTracer()
        self.edits: list[Edit] = []
        self.carried = CarriedStates()
        self.is_whole = marked is None or marked.is_whole
        self.num_measured = 0  # errors and activations
        self.changed: set[fx.Node] = set()  # markers of errors that actions change
        self.averaged: set[str] = set()  # names of nodes
        self.examples = None if marked is None else ExampleGradients(marked)  # None where the inputs are not known
        self.losses: LossGradients | None = None  # None where no action asks for those of single losses
        self.others: OtherSites | None = None  # set when the points are found
        self.loss_rows: dict[Site, Rows] = {}  # gradients of each loss, before any action
        self.of_groups: set[fx.Node] = set()  # nodes that were inserted for groups with errors
        self._scale = scale
        self._states = states
        self._scopes: dict[str, StateScope] = {}
        self._carried_keys: CarriedKeys = {} if outer is None else outer._carried_keys
        self._replaced: dict[fx.Node, fx.Node] = {}  # what is read instead of a marker since

    def current(self, node: fx.Node) -> fx.Node:
        """Return the current successor of a node.

        An error that passes an op unchanged (the sum of a residual) is the marker of another site, whose actions may
        replace it later.
        """
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def replace(self, point: InsertionPoint, result: fx.Node) -> None:
        """Replace the value of a point for its readers."""
        if point.marker is not None:
            editing.reroute(point.marker, result)
            self._replaced[point.marker] = result
        elif point.output is not None:
            editing.replace_output(self.graph, point.output, result)
        point.node = result  # of an activation too, which only the next action reads: the forward is never changed

    def replace_behind(self, point: InsertionPoint, readers: Sequence[fx.Node], result: fx.Node) -> None:
        """Replace the error of a point for these readers; they move behind it."""
        assert point.marker is not None
        current = self.current(point.marker)
        for reader in readers:
            reader.replace_input_with(current, result)
        editing.put_readers_behind(result)
        point.node = self._replaced[point.marker] = result

    def splice(
        self, traced: TracedAction, nodes: list[fx.Node], point: InsertionPoint, before: fx.Node | None = None
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """Insert the graph of an action; return its outputs, and all new nodes."""
        tag = "must_be_in_backward" if traced.reads_live else "is_backward"
        tag = "is_forward" if point.site.traits.in_forward else tag
        return editing.splice(traced.graph, self.graph, nodes, point.before if before is None else before, tag)

    def let_read(self, points: Sequence[InsertionPoint], inputs: Inputs, where: str = "", **facts: bool) -> None:
        """Let actions read these points and inputs; see ``OtherSites``."""
        self.others = OtherSites(points, inputs, self.current, self.scale_on, where, **facts)

    def other_values(self, insertion: Insertion, reads: OtherValues, point: InsertionPoint) -> list[Read]:
        """Return the other values of an action, with layouts."""
        if self.others is None:
            text = f"{point.site}: {describe(insertion.action)}: functions at step sites read no other values"
            raise PolicyError(text, code="reads")
        return self.others.read(insertion, reads, point, self.forward)

    def note(
        self, site: Site, insertion: Insertion, nodes: tuple[str, ...] = (), keys: tuple[RecordKey, ...] = ()
    ) -> None:
        """List an edit."""
        self.edits.append(Edit(site, insertion.action, nodes, keys, insertion))

    def note_states(self, mode: TraceMode, traced: TracedAction, nodes: Sequence[fx.Node], new: list[fx.Node]) -> None:
        """Note reads and new values of carried states in an action."""
        if mode.states is not None and mode.states.carried:
            updates = {r.key: nodes[r.number] for r in traced.reports if isinstance(r, StateUpdate)}
            self.carried.note(mode.states.carried, new, updates)

    def take_new(self) -> list[fx.Node]:
        """Return the nodes with figures of single examples and losses that were inserted since the last call."""
        sources = (self.examples, self.losses)
        return [node for source in sources if source is not None for node in source.take_new()]

    def reducing_edits(self, sites: Collection[Site]) -> tuple[Edit, ...]:
        """Return the edits at these sites that are not elementwise."""
        if not sites:
            return ()
        shapes = {node.name: shape_of(v) for node in self.graph.nodes if isinstance(v := node.meta.get("val"), Tensor)}

        def reduces(edit: Edit) -> bool:
            changes_shape = any(shapes.get(name, edit.site.shape) != edit.site.shape for name in edit.nodes)
            return changes_shape or isinstance(edit.insertion.effect, MeasureTensor)

        return tuple(edit for edit in self.edits if edit.site in sites and reduces(edit))

    def erase_unused(self) -> None:
        """Erase markers and replaced nodes without readers."""
        editing.erase_markers(self.graph)
        if self.examples is not None:
            drop_replaced(self.graph, self.examples.replaced)
        if self.losses is not None:
            editing.erase_unused(self.graph, self.losses.sums)

    @property
    def scopes(self) -> dict[str, StateScope]:
        """The states of all actions so far, by site or group."""
        return self._scopes

    def states_at(self, where: str) -> StateScope | None:
        """Return the states of the actions at a site, or of a group."""
        if self._states is None:
            return None
        return self._scopes.setdefault(where, self._states.scope(where, self._carried_keys))

    def check_states(self) -> None:
        """Raise PolicyError for a state that the actions of a site only read, and those of another one set."""
        for scope in self._scopes.values():
            scope.check()

    def mode(self, site: Site, where: str = "") -> TraceMode:
        """Return the trace mode at a site, or of a group.

        ``where`` names the states of a group.
        """
        # On CUDA first stages fuse with what makes the tensor, and the others are launched together.
        is_apart = self.measures_apart(site.device) or (site.traits.is_leaf and not self._is_body)
        is_opaque = site.device.type != "cuda" and (is_apart or self.num_measured > MANY)
        scale = None if site.traits.in_forward else self.scale_on(site.device)
        return TraceMode(is_opaque, scale, self.states_at(where or str(site)))

    def mode_at(self, point: InsertionPoint) -> TraceMode:
        """Return the mode of tracing an action at a point."""
        # What acts on the gradient of each loss has states for each.
        return self.mode(point.site, f"{point.site}/loss{point.loss}" if point.loss is not None else "")

    def scale_on(self, device: torch.device) -> Tensor | None:
        """Return the loss scale on a device; None without one."""
        return None if self._scale is None else self._scale.on(device)

    def measures_apart(self, device: torch.device) -> bool:
        """Return whether errors and activations on a device are measured by an operation of our own."""
        return device.type in MEASURED_APART and not self._is_body
