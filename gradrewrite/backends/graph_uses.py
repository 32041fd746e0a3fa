"""Uses of a compiled graph: names and parameters for the model or each region."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from gradrewrite._compat import autograd, data_parallel
from gradrewrite.backends.explanation import GraphReport
from gradrewrite.backends.parameter_watch import GraphCoverage
from gradrewrite.backends.region_calls import NotShared, RegionCall, current_region, region_of_backward
from gradrewrite.backends.renaming import Renaming, calls_by_name
from gradrewrite.backends.session import Session
from gradrewrite.errors import NotRewrittenError
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.policy.rules import Answered, ask_in_order
from gradrewrite.policy.scope import bounds_one_gradient
from gradrewrite.replay.step_snapshot import PendingForwards


@dataclass(eq=False, repr=False)
class GraphUse:
    """The names and parameters of a compiled graph for a model, or for one region."""

    outputs: BackwardOutputs
    parameters: Sequence[weakref.ref[Tensor]]  # those with gradients from the graph
    coverage: GraphCoverage
    accumulation: Accumulation  # of those that are clipped
    forwards: PendingForwards | None  # None where nothing is checked
    bounds: Sequence[Edit]  # clips of single gradients


class Accumulation:
    """Detection of an earlier backward's gradients in ``.grad`` of parameters, without reading them each time."""

    def __init__(self, parameters: Sequence[weakref.ref[Tensor]]) -> None:
        self._parameters = parameters
        self._versions: dict[int, int] = {}
        self._was_found = False

    def is_accumulating(self) -> bool:
        """Return whether a parameter has a gradient that is not zero (``set_to_none=False``); True at most once."""
        if self._was_found:
            return False
        for grad in self._gradients():
            known = self._versions.get(id(grad))
            # Unknown gradients are read, which happens once: from then on the version tells.
            self._was_found = bool(grad.count_nonzero()) if known is None else known == grad._version
            if self._was_found:
                return True
        return False

    def note_at_end(self) -> None:
        """Remember the gradients as this backward leaves them."""
        if self._parameters and not self._was_found:
            autograd.at_end_of_backward(self._note)

    def _note(self) -> None:
        self._versions = {id(g): g._version for g in self._gradients()}

    def _gradients(self) -> Iterator[Tensor]:
        parameters = (ref() for ref in self._parameters)
        return (p.grad for p in parameters if p is not None and p.grad is not None)


@dataclass(eq=False, repr=False)
class GraphUses:
    """The uses of one graph; they live as long as the compiled code, and hold nothing of the compilation.

    The fields are those of the first use.
    """

    session: Session
    region: RegionCall | None  # None for a graph of the model
    report: GraphReport
    answers: Sequence[Sequence[Answered]]  # site by site
    outputs: BackwardOutputs
    inputs: Mapping[int, GraphInput]  # by position
    forwards: PendingForwards | None

    def __post_init__(self) -> None:
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
        """Return the use of the region on this thread; for a new region the policy is asked.

        NotShared is raised where it answers otherwise; NotRewrittenError where graphs of the region may have run, too.
        """
        running = current_region()
        if self.region is None or running is None:
            return self._own
        return self._uses.get(running[0]) or self._join(*running)

    def of_backward(self) -> GraphUse:
        """Return the use of the region of this thread's backward; NotRewrittenError if nothing tells the region."""
        if self.region is None:
            return self._own
        region = region_of_backward()
        use = self._uses.get(region or self.region)
        if use is None or (region is None and len(self._uses) > 1):
            raise NotRewrittenError(
                f"it is not known of which of the regions {', '.join(map(str, self._uses))} this backward is, so that "
                "records and checks would have a wrong name; call the regions in the forward of the transformed model",
                code="regions",
            )
        return use

    def _new(
        self, outputs: BackwardOutputs, inputs: Mapping[int, GraphInput], forwards: PendingForwards | None
    ) -> GraphUse:
        parameters = [given.parameter for given in inputs.values() if given.parameter is not None]
        bounds = tuple(filter(bounds_one_gradient, self.report.edits))
        bounded = _parameters_of(bounds[:1], self.inputs, inputs)  # who accumulates does so for all of them
        accumulation = Accumulation(grouped(self.report.edits, self.inputs, inputs) or bounded)
        return GraphUse(outputs, parameters, GraphCoverage(parameters), accumulation, forwards, bounds)

    def _join(self, region: RegionCall, module: nn.Module) -> GraphUse:
        assert self.region is not None
        if self.outputs.states:  # each region has its own
            raise self._not_shared(region, "actions there have states; remove the break (fullgraph=True finds it)")
        known, number = self.report.sites, region.number - self.region.number
        renaming = Renaming(self.region.name, region.name, number, calls_by_name(known, self.region.number))
        sites = tuple(map(renaming.site, known))
        for site, answers in zip(sites, self.answers, strict=True):
            if _keys_of(ask_in_order(self.session.config.policy, site)) != _keys_of(answers):
                way_out = (
                    "remove the break (fullgraph=True finds it), or call the region first where the break is reached"
                )
                raise self._not_shared(region, f"the policy answers otherwise at {site}; {way_out}")
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

    def _not_shared(self, region: RegionCall, reason: str) -> Exception:
        if self.report.is_whole:
            return NotShared(str(region))
        return NotRewrittenError(
            f"a graph break in the region {region} was reached when {self.region} shared its code already, and "
            f"{reason}",
            code="regions",
        )


def grouped(
    edits: Sequence[Edit], own: Mapping[int, GraphInput], inputs: Mapping[int, GraphInput]
) -> list[weakref.ref[Tensor]]:
    """Return the parameters that are clipped together: ``inputs`` are ``own``, of the edits, as a region names them."""
    return _parameters_of([edit for edit in edits if edit.insertion.group is not None], own, inputs)


def _parameters_of(
    edits: Sequence[Edit], own: Mapping[int, GraphInput], inputs: Mapping[int, GraphInput]
) -> list[weakref.ref[Tensor]]:
    names = {edit.site.name for edit in edits}
    found = [given for known, given in zip(own.values(), inputs.values(), strict=True) if known.name in names]
    return [given.parameter for given in found if given.parameter is not None]


def _keys_of(answers: Sequence[Answered]) -> list[Any]:
    """Equal for answers that make the same graph."""
    return [(answer.position, answer.insertion.key) for answer in answers]
