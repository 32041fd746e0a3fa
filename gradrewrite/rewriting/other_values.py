"""Values of other sites, read by the functions of actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from gradrewrite._utils.formatting import listed, nearest
from gradrewrite.distributed.layouts import Layout
from gradrewrite.errors import PolicyError
from gradrewrite.ir import editing
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.policy.actions import describe
from gradrewrite.policy.calls import filled, nearest_sites
from gradrewrite.policy.insertions import Insertion, OtherValues
from gradrewrite.rewriting.action_tracing import unscale
from gradrewrite.rewriting.forward_values import ForwardValues
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.sites import Pattern, Site

Inputs = Mapping[fx.Node, tuple[GraphInput, Layout | None]]
Read = tuple[fx.Node, Layout | None]


class OtherSites:
    """The values of a graph, for functions to read.

    ``where`` says in a message which values those are; ``is_repeated``: the graph runs for several iterations;
    ``has_losses``: its gradients are those of each loss.
    """

    def __init__(
        self,
        points: Sequence[InsertionPoint],
        inputs: Inputs,
        current: Callable[[fx.Node], fx.Node],
        scale_on: Callable[[torch.device], Tensor | None],
        where: str = "",
        *,
        is_repeated: bool = False,
        has_losses: bool = False,
    ) -> None:
        self._points, self._inputs, self._where = points, inputs, where
        self._current, self._scale_on, self._is_repeated = current, scale_on, is_repeated
        self._gradients = {point: point.node for point in points if point.output is not None}  # before any action
        self._copies: dict[fx.Node, fx.Node] = {}  # of buffers
        self._has_losses = has_losses

    def read(
        self, insertion: Insertion, reads: OtherValues, point: InsertionPoint, forward: ForwardValues
    ) -> list[Read]:
        """Return the nodes that an action reads at a point.

        PolicyError for a pattern that means no value, or several.
        """
        begin = f"{point.site}: {describe(insertion.action)}"
        texts = ((name, filled(text, point.site, point.calls)) for name, text in reads.patterns)
        return [self._one(text, f"{begin}: reads[{name!r}]", point, forward) for name, text in texts]

    def _one(self, text: str, begin: str, point: InsertionPoint, forward: ForwardValues) -> Read:
        if Pattern.parse(text).kind == "param":
            return self._parameter(text, begin)
        other = self._find(text, begin, point)
        if other.site.traits.in_forward:
            return forward.for_backward(other.node), other.layout
        if self._has_losses:
            raise _refused(begin, f"{other.site} is read where WeighLosses takes the gradients of the losses apart")
        node = self._gradients.get(other) or self._current(other.marker or other.node)
        if not node < point.before:
            self._wait_for(node, point, other.site, begin)
        return self._unscaled(node, other.site, point), other.layout

    def _find(self, text: str, begin: str, point: InsertionPoint) -> InsertionPoint:
        pattern = Pattern.parse(text)
        found = [other for other in self._points if pattern.matches(other.site) and other.site != point.site]
        around = [(other.site, other.calls) for other in found]
        near = [found[n] for n in nearest_sites(point.site, point.calls, around)]
        if not near and pattern.matches(point.site):
            raise _refused(begin, f"{point.site} is the site itself, whose value is the first argument")
        if not near:
            raise _refused(begin, f"no site matches {self._without(text, [str(p.site) for p in self._points])}")
        if len({other.site for other in near}) > 1:
            names = listed([str(other.site) for other in near])
            raise _refused(begin, f"several sites match, {names}; name one, of several calls with '#n'")
        if self._is_repeated and pattern.call is not None:
            raise _refused(begin, "'#n' is one iteration, and the rule acts in several; let its own pattern have '#n'")
        return near[0]

    def _without(self, text: str, known: Sequence[str]) -> str:
        return f"{text}{self._where}; nearest: {listed(nearest(text, list(known))[:3]) or 'none'}"

    def _parameter(self, text: str, begin: str) -> Read:
        pattern = Pattern.parse(text)
        sites = {node: Site("param", one.name) for node, (one, _) in self._inputs.items() if one.role in _TENSORS}
        found = [node for node, site in sites.items() if pattern.matches(site)]
        if len(found) != 1:
            several = listed([str(sites[node]) for node in found])
            none = f"the forward reads no {self._without(text, list(map(str, sites.values())))}"
            raise _refused(begin, f"several sites match, {several}; name one" if found else none)
        (node,) = found
        one, layout = self._inputs[node]
        if one.role == "parameter":  # autograd refuses one that was changed since
            return node, layout
        if node not in self._copies:
            self._copies[node] = editing.insert_saved_copy(node)
        return self._copies[node], layout

    def _wait_for(self, node: fx.Node, point: InsertionPoint, site: Site, begin: str) -> None:
        """Move a point behind a node; PolicyError for a circle."""
        if editing.first_reached([point.before], {node}) is not None:
            raise _refused(begin, f"{site} is computed from {point.site}, and does not exist yet{self._where}")
        editing.move_behind(point.before, node)

    def _unscaled(self, node: fx.Node, site: Site, point: InsertionPoint) -> fx.Node:
        assert site.device is not None
        scale = self._scale_on(site.device)
        if scale is None:
            return node

        def run(g: Tensor) -> tuple[Tensor, ...]:
            return (unscale(g, scale),)

        (made,), _ = editing.compute(point.before.graph, run, [node], point.before, "must_be_in_backward")
        return made


_TENSORS = ("parameter", "buffer")


def _refused(begin: str, what: str) -> PolicyError:
    return PolicyError(f"{begin}: {what}", code="reads")
