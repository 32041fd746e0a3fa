"""Non-finite values in a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import operators
from gradrewrite._utils.tensors import computable, tensors_in
from gradrewrite.ir.mask_infinities import has_infinite_literal, propagates
from gradrewrite.replay.noted_calls import NotedCall, note_call, note_growth, op_name
from gradrewrite.replay.reason_table import EXPONENTIALS
from gradrewrite.sites import Site

Repair = Callable[[list[Any]], list[Any]]  # of the arguments of a call
Order = tuple[int, ...]  # the position of a node in its graph; inside a loop the iteration and the position there, too


@dataclass(slots=True)
class ValueState:
    """The state of a value of a replay."""

    is_bad: bool = False
    is_expected: bool = False  # it is not finite, by what the program wrote
    overwritten: str = ""  # an input that was overwritten meanwhile and on which it depends
    has_numbers: bool = True  # with a fraction
    given: str = ""  # the input of the model whose infinities it holds


@dataclass(frozen=True, slots=True)
class SiteObservation:
    """The values of a site in a replay."""

    site: Site
    order: Order  # position in the order of execution
    is_forward: bool  # whether it belongs to the forward
    percent: float  # share of elements that are not finite, in percent; expected infinities are not counted
    smallest: float  # smallest absolute value; NaN if it is empty
    largest: float  # largest absolute value of the finite elements; NaN if there are none
    node: str  # name of the value


class Observing(fx.Interpreter):
    """An interpreter with the states of all values."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.extra_traceback = False  # the error of a node stays as it is
        self.states: dict[fx.Node, ValueState] = {}
        self.noted: dict[fx.Node, NotedCall] = {}  # calls that made bad values
        self.grown: dict[fx.Node, NotedCall] = {}  # exponentials with very large results
        self.repairs: Mapping[fx.Node, Repair] = {}  # of arguments of calls
        self.mended: Mapping[fx.Node, Repair] = {}  # of results, before anything reads them

    def name_of_value(self, node: fx.Node) -> str:
        """Return the name of a value for a reader."""
        raise NotImplementedError

    def differentiated_op(self, node: fx.Node) -> str:
        """Return the differentiated op of a node; ``""`` in the forward."""
        raise NotImplementedError

    def observed(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Run a node that calls an operator, and note the state of its value."""
        states = self.states
        reads = [states[n] for n in node.all_input_nodes if n in states]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node in self.repairs:
            args, kwargs = _repaired(self.repairs[node], args, kwargs)
        if self.repairs and torch.float32 in (types := {t.dtype for t in tensors_in(args)}) and torch.float16 in types:
            args = fx.node.map_aggregate(args, _wide)  # of an op behind one that computes in float32 now
        result = operators.run_node(node, args, kwargs)
        if node in self.mended:
            (result,) = self.mended[node]([result])
        needed = [states[n] for n in operators.nodes_that_matter(node) if n in states]
        overwritten = next((s.overwritten for s in needed if s.overwritten), "")
        state = ValueState(overwritten=overwritten, has_numbers=bool(_inexact_in(result)))
        if not is_finite(result):
            masks = {n: values[n] for n in node.all_input_nodes if n in states and states[n].is_expected}
            is_written = has_infinite_literal(node) or propagates(node, result, masks)
            state.is_expected = is_written and not has_nan(result) and not any(s.is_bad for s in reads)
            state.is_bad = not state.is_expected
            state.given = next((s.given for s in reads if s.given), "")
            if state.is_bad and not any(s.is_bad for s in reads):
                call = note_call(node, args, kwargs, result, self.differentiated_op(node), self.name_of_value)
                if call is not None:
                    self.noted[node] = call
        elif op_name(node) in EXPONENTIALS and (grown := note_growth(node, args, kwargs, result, self.name_of_value)):
            self.grown[node] = grown
        states[node] = state
        return result

    def bad(self) -> set[fx.Node]:
        """Return the nodes of bad values."""
        return {node for node, state in self.states.items() if state.is_bad}


def _repaired(repair: Repair, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with some of them changed."""
    values = repair([*args, *kwargs.values()])
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float16 else value


def merged(states: Iterable[ValueState]) -> ValueState:
    """Return the state of several values together."""
    own = list(states)
    is_bad = any(state.is_bad for state in own)
    is_expected = not is_bad and any(state.is_expected for state in own)
    overwritten = next((state.overwritten for state in own if state.overwritten), "")
    return ValueState(is_bad, is_expected, overwritten, given=next((state.given for state in own if state.given), ""))


def observation(site: Site, node: str, value: Tensor, order: Order, state: ValueState) -> Iterable[SiteObservation]:
    """Yield the observation of a site, if its value has a fraction."""
    if not value.is_floating_point() and not value.is_complex():
        return
    value = _numbers_of(value)
    at_fault = torch.isnan(value) if site.may_be_infinite else torch.isfinite(value).logical_not()
    bad = 0 if state.is_expected else int(at_fault.sum())
    size = value.detach().abs()
    finite = size[torch.isfinite(size)]
    smallest = float(finite.amin()) if finite.numel() else float("nan")
    largest = float(finite.amax()) if finite.numel() else float("nan")
    percent = 100.0 * bad / max(value.numel(), 1)
    yield SiteObservation(site, order, site.traits.in_forward, percent, smallest, largest, node)


def is_finite(value: Any) -> bool:
    """Return whether all numbers in a value are finite."""
    return all(bool(torch.isfinite(t).all()) for t in _inexact_in(value))


def has_nan(value: Any) -> bool:
    """Return whether a value has a NaN."""
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
