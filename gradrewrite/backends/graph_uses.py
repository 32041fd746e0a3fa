"""Uses of a compiled graph: names and parameters for the model or each region."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from gradrewrite._compat import data_parallel
from gradrewrite.backends.explanation import GraphReport
from gradrewrite.backends.graph_use import Accumulation, GraphUse
from gradrewrite.backends.parameter_watch import GraphCoverage
from gradrewrite.backends.region_calls import NotShared, RegionCall, current_region, region_of_backward
from gradrewrite.backends.session import Session
from gradrewrite.errors import NotRewrittenError
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.ir.record_layout import BackwardOutputs
from gradrewrite.ir.renaming import Renaming, calls_by_name
from gradrewrite.policy.actions import action_key
from gradrewrite.policy.rules import Answered, ask_in_order
from gradrewrite.policy.scope import group_of
from gradrewrite.replay.step_snapshot import PendingForwards


@dataclass(eq=False, repr=False)
class GraphUses:
    """The uses of one graph; they live as long as the compiled code.

    They hold nothing of the compilation.

    Attributes:
        session: Whose policy it follows.
        region: The region that it was compiled for; None for a graph of the model.
        report: The graph, as that region has it.
        answers: The answers of the policy there, site by site.
        outputs: The auxiliary outputs of the backward there.
        inputs: The tensor inputs of the graph there, by position.
        forwards: The pending calls of the forward there; None where nothing is checked.
    """

    session: Session
    region: RegionCall | None
    report: GraphReport
    answers: Sequence[Sequence[Answered]]
    outputs: BackwardOutputs
    inputs: Mapping[int, GraphInput]
    forwards: PendingForwards | None

    def __post_init__(self) -> None:
        """Add the use that the graph was compiled for."""
        self._saved: Sequence[str] | None = None  # names of the inputs of the backward, once it is compiled
        self._own = self._new(self.outputs, self.inputs, self.forwards)
        self._uses: dict[RegionCall | None, GraphUse] = {self.region: self._own}

    def note_saved(self, names: Sequence[str]) -> None:
        """Note the inputs of the backward, when that is compiled."""
        self._saved = names
        for use in self._uses.values():
            if use.forwards is not None:
                use.forwards.note_saved(names)

    def of_forward(self) -> GraphUse:
        """Return the use of the region on this thread.

        For a new region the policy is asked.

        Raises:
            NotShared: The policy answers otherwise there. Nothing has run.
            NotRewrittenError: The policy answers otherwise there, and other graphs of the region may have run.
            PolicyError: An action of a group would act in several regions.
        """
        running = current_region()
        if self.region is None or running is None:
            return self._own
        return self._uses.get(running[0]) or self._join(*running)

    def of_backward(self) -> GraphUse:
        """Return the use of the region of this thread's backward.

        Raises:
            NotRewrittenError: Several regions share the graph, and nothing tells whose backward it is.
        """
        if self.region is None:
            return self._own
        region = region_of_backward()
        use = self._uses.get(region or self.region)
        if use is None or (region is None and len(self._uses) > 1):
            raise NotRewrittenError(
                f"it is not known of which of the regions {', '.join(map(str, self._uses))} this backward is, so that "
                "records and checks would have a wrong name; call the regions in the forward of the transformed model"
            )
        return use

    def _new(
        self, outputs: BackwardOutputs, inputs: Mapping[int, GraphInput], forwards: PendingForwards | None
    ) -> GraphUse:
        parameters = [given.parameter for given in inputs.values() if given.parameter is not None]
        accumulation = Accumulation(grouped(self.report.edits, self.inputs, inputs))
        return GraphUse(outputs, parameters, GraphCoverage(parameters), accumulation, forwards)

    def _join(self, region: RegionCall, module: nn.Module) -> GraphUse:
        assert self.region is not None
        if self.outputs.states:  # each region has its own
            if self.report.is_whole:
                raise NotShared(str(region))
            raise NotRewrittenError(
                f"a graph break in the region {region} was reached when {self.region} shared its code already, and "
                "actions there have states; remove the break (fullgraph=True finds it)"
            )
        known, number = self.report.sites, region.number - self.region.number
        renaming = Renaming(self.region.name, region.name, number, calls_by_name(known, self.region.number))
        sites = tuple(map(renaming.site, known))
        for site, answers in zip(sites, self.answers, strict=True):
            if _keys_of(ask_in_order(self.session.config.policy, site)) != _keys_of(answers):
                if self.report.is_whole:
                    raise NotShared(str(region))
                raise NotRewrittenError(
                    f"a graph break in the region {region} was reached when {self.region} shared its code already, and "
                    f"the policy answers otherwise at {site}; remove the break (fullgraph=True finds it), or call the "
                    "region first where the break is reached"
                )
        tensors = dict(module.named_parameters(prefix=region.name, remove_duplicate=False))
        sharded = data_parallel.sharded_parameters(module.modules())

        def input_of(given: GraphInput) -> GraphInput:
            name = renaming.name(given.name)
            tensor = tensors.get(name) if given.parameter is not None else None
            if tensor is None:
                return replace(given, name=name)
            return replace(given, name=name, parameter=weakref.ref(sharded.get(id(tensor), tensor)))

        forwards = self.forwards
        if forwards is not None:
            graph = forwards.replay_graph
            named = {name: input_of(given) for name, given in graph.inputs.items()}
            forwards = PendingForwards(replace(renaming.replay_graph(graph, known), inputs=named))
            if self._saved is not None:
                forwards.note_saved(self._saved)
        inputs = {position: input_of(given) for position, given in self.inputs.items()}
        use = self._new(renaming.outputs(self.outputs, known), inputs, forwards)
        edits = tuple(renaming.edit(edit, known) for edit in self.report.edits)
        lost = tuple(map(renaming.site, self.report.out_of_reach))
        report = replace(self.report, sites=sites, edits=edits, out_of_reach=lost, region=str(region))
        self.session.graphs.note(report)
        self._uses[region] = use
        return use


def grouped(
    edits: Sequence[Edit], own: Mapping[int, GraphInput], inputs: Mapping[int, GraphInput]
) -> list[weakref.ref[Tensor]]:
    """Return the parameters that are clipped together.

    Args:
        edits: What was inserted.
        own: The inputs of the graph, as the edits name them.
        inputs: The same inputs, as another region names them.
    """
    names = {edit.site.name for edit in edits if group_of(edit.action) is not None}
    found = [given for known, given in zip(own.values(), inputs.values(), strict=True) if known.name in names]
    return [given.parameter for given in found if given.parameter is not None]


def _keys_of(answers: Sequence[Answered]) -> list[Any]:
    """Equal for answers that make the same graph."""
    return [(answer.position, action_key(answer.action)) for answer in answers]
