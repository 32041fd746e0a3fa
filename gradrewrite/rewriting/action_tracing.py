"""Tracing actions: torch code in, checked functional nodes and records out."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import dtensors, fake_tensors, make_fx, operators
from gradrewrite.distributed.layouts import Layout, added_up, full
from gradrewrite.errors import CallbackError, RewriteError, UnsupportedGradientError
from gradrewrite.instrumentation.source_locations import user_line
from gradrewrite.ir import editing
from gradrewrite.ir.reports import Leaf, Report
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import Insertion
from gradrewrite.policy.recording import Recording, recording
from gradrewrite.policy.state_store import StateScope
from gradrewrite.rewriting.function_values import FunctionValues, functions_in, random_state
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class TracedAction:
    """A traced action: its graph returns the replacements, then the outputs of its reports."""

    graph: fx.GraphModule
    reports: tuple[Report[Leaf], ...] = ()
    reads_live: bool = False  # the graph reads live tensors
    has_states: bool = False  # it reads or sets states

    @classmethod
    def of(cls, graph: fx.GraphModule, reported: Recording) -> TracedAction:
        """Put a graph together with the reports of its trace."""
        has_states = reported.states is not None and reported.states.is_used
        return cls(graph, tuple(reported.reports), bool(graph.graph.find_nodes(op="get_attr")), has_states)


@dataclass(frozen=True, slots=True)
class TraceMode:
    """The mode of tracing an action."""

    is_opaque: bool = False  # statistics are custom ops, which Inductor does not look into
    scale: Tensor | None = None  # 0-d; gradients are divided by it for the action
    states: StateScope | None = None  # of the actions at the site; None where they have none of their own


PLAIN = TraceMode()


class ActionTracer:
    """Traces actions; equal actions on equal tensors are traced once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, TracedAction] = {}

    def trace(
        self,
        insertion: Insertion,
        run: Callable[..., Tensor],
        site: Site,
        value: Tensor,
        mode: TraceMode = PLAIN,
        further: Sequence[Tensor] = (),
        layouts: Sequence[Layout | None] = (),
    ) -> TracedAction:
        """Trace one insertion at one site with a fake tensor; ``layouts`` as in ``trace_function``."""
        check_dense(insertion.action, site, value)
        return self.trace_part(insertion.key, run, insertion, site, value, mode, further, layouts)

    def trace_part(
        self,
        name: Hashable,
        run: Callable[..., Tensor],
        insertion: Insertion,
        site: Site,
        value: Tensor,
        mode: TraceMode = PLAIN,
        further: Sequence[Tensor] = (),
        layouts: Sequence[Layout | None] = (),
    ) -> TracedAction:
        """Trace a function of one tensor, a part of an action; equal names insert the same nodes."""
        tensors = (value, *further)
        is_static = all(map(_is_static, tensors)) and all(layout is None or layout.is_static for layout in layouts)
        shapes = [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors] if is_static else []
        key = (name, tuple(shapes), mode.is_opaque, id(mode.scale), tuple(layouts))
        if is_static and key in self._known:
            return self._known[key]
        traced = trace_function(lambda g, *more: (run(g, *more),), [value], [site], insertion, mode, further, layouts)
        if is_static and not traced.has_states:
            self._known[key] = traced
        return traced


def check_dense(action: Any, site: Site, value: Tensor) -> None:
    """Raise UnsupportedGradientError where a gradient is sparse."""
    if value.layout is not torch.strided:
        raise UnsupportedGradientError(
            f"{site}: the gradient is {value.layout}; {describe(action)} needs a dense one. Make the layer's "
            "gradient dense (sparse=False), or let the policy leave this site alone"
        )


def trace_function(
    run: Callable[..., Sequence[Tensor]],
    values: Sequence[Tensor],
    sites: Sequence[Site],
    insertion: Insertion,
    mode: TraceMode,
    further: Sequence[Tensor] = (),
    layouts: Sequence[Layout | None] = (),
) -> TracedAction:
    """Trace a function of tensors that returns their replacements; check all of it before any edit.

    Arguments after ``values`` are in ``further``; they are not replaced. ``layouts`` are those of both, for the
    function works on global tensors; none if all are plain.
    """
    action = insertion.action
    given_scale, scale = (mode.scale, None) if insertion.has_units else (None, mode.scale)
    refused, *left = _refusals(sites[0], action)
    values_read = _values_read(action, sites[0])
    own_layouts, sharded = layouts[: len(values)], any(layout is not None for layout in layouts)
    with recording(values[0].device, is_opaque=mode.is_opaque, scale=scale, states=mode.states) as reported:

        def whole(*parts: Tensor) -> list[Tensor]:
            reported.clear()
            given = [_global(part, layout) for part, layout in zip_longest(parts, layouts)]
            tensors, more = given[: len(values)], given[len(values) :]
            with make_fx.RefuseToChangeReal(refused), make_fx.RefuseToLeave(*left):
                seen = tensors if given_scale is None else [unscale(t, given_scale) for t in tensors]
                results = run(*seen, *more)
            for result, value, site in zip(results, seen, sites, strict=True):
                _check_result(result, value, site, action)
            if given_scale is not None:
                results = [rescale(r, u, t, given_scale) for r, u, t in zip(results, seen, tensors, strict=True)]
            if sharded:
                results = [_part(*four) for four in zip_longest(results, tensors, parts[: len(values)], own_layouts)]
            results = [laid_out_as(r, v) for r, v in zip(results, values, strict=True)]
            reported.close()
            return [*results, *map(full, reported.outputs)]

        def trace() -> fx.GraphModule:
            inputs = [*values, *further]
            return make_fx.trace(make_fx.trace_parts(whole, inputs) if sharded else whole, inputs)

        try:
            before = random_state() if values_read is not None else ()
            graph = trace()
            if values_read is not None:
                _check_repeats(values_read, before, graph, trace, f"{sites[0]}: {describe(action)}")
        except RewriteError as err:
            line = _line_of(err)
            if line or str(sites[0]) not in err.text:
                named = err.text if str(sites[0]) in err.text else f"{sites[0]}: {err.text}"
                raise type(err)(f"{line}{named}", code=err.code) from err
            raise
        except Exception as err:
            first_line, *_ = str(err).strip().splitlines() or ["no message"]
            raise CallbackError(
                f"{_line_of(err)}{sites[0]}: {describe(action)} could not be traced: {type(err).__name__}: "
                f"{first_line}. A tensor function computes with torch operations alone; what it remembers is a gr.State"
            ) from err
    _check_graph(graph.graph, sites[0], action)
    graph.graph.eliminate_dead_code()
    return TracedAction.of(graph, reported)


_KEEPS = (
    "keeps {!r} from one call to the next, and is called once, while it is traced: every backward would see "
    "what it was then. Remember values in a gr.State, which state.set(...) writes, report figures with gr.record, and "
    "make constants before the first call"
)
_OUTSIDE = (
    "reads {}, and is called once, while it is traced: every backward would see those of that call. Draw with "
    "gr.uniform, gr.normal or gr.bernoulli; read others before the step, into a tensor that the function closes over "
    "(tensor.fill_(...)), which is read at every backward"
)


def _values_read(action: Any, site: Site) -> FunctionValues | None:
    """Return the values read by the user's functions in an action; CallbackError for a clock."""
    functions = functions_in(action)
    if not functions:
        return None
    found = FunctionValues(functions, in_libraries=False)
    if found.clock:
        outside = _OUTSIDE.format(f"{found.clock}()")
        raise CallbackError(f"{site}: {describe(action)} {outside}", code="kept-value")
    return found


def _check_repeats(
    read: FunctionValues,
    numbers: tuple[int, ...],
    graph: fx.GraphModule,
    trace: Callable[[], fx.GraphModule],
    start: str,
) -> None:
    """Raise CallbackError for a function with another result, or another change, in a second call.

    What is made in a first call and used in the next ones (a cached property) is no difference.
    """
    after = FunctionValues(read.functions, in_libraries=False)
    kept, changed = after.leaked_since(read), read.first_change()
    if kept is None and changed is None and random_state() == numbers:
        return
    if kept is None:
        is_other = str(trace().graph) != str(graph.graph)  # another thread may draw random numbers, too
        if changed is None and is_other:
            raise CallbackError(f"{start} {_OUTSIDE.format('random numbers')}", code="kept-value")
        again = after.first_change()
        changed = again or (changed if is_other else None)
        if changed is None:
            return
        kept, _ = changed
    raise CallbackError(f"{start} {_KEEPS.format(kept)}", code="kept-value")


def _global(part: Tensor, layout: Layout | None) -> Tensor:
    return part if layout is None else added_up(layout.wrap(part))


def _part(result: Tensor, given: Tensor, part: Tensor, layout: Layout | None) -> Tensor:
    if layout is None:
        return result
    if result is given:  # only measured
        return part
    assert dtensors.is_dtensor(result)
    return layout.unwrap(result)


_READS = (
    "{}: {} reads a value on the host (.item(), float(), or a branch on it), which would make every backward wait for "
    "the device; compute with tensors, select with torch.where"
)


def _refusals(site: Site, action: Any) -> tuple[CallbackError, CallbackError, CallbackError]:
    """Return the errors for functions that change a tensor they close over, take one out of torch, or read one."""
    start = f"{site}: {describe(action)}"
    changing = (
        f"{start} changes a tensor that it closes over; report figures with gr.record instead, and remember values in "
        "a gr.State, which state.set(...) writes"
    )
    leaving = (
        f"{start} takes a tensor out of torch (numpy, DLPack, .tolist(), a pointer); what runs there cannot become "
        "part of the graph. Compute with torch operations"
    )
    return (
        CallbackError(changing),
        CallbackError(leaving),
        CallbackError(_READS.format(site, describe(action)), code="reads-a-value"),
    )


def unscale(tensor: Tensor, scale: Tensor) -> Tensor:
    """A gradient in units of the unscaled loss; at least float32, where nothing underflows."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) / scale.to(tensor.device)


def rescale(result: Tensor, seen: Tensor, tensor: Tensor, scale: Tensor) -> Tensor:
    """The inverse; an element that the action left alone keeps its bits."""
    if result is seen:
        return tensor
    return torch.where(result == seen, tensor, (result * scale.to(tensor.device)).to(tensor.dtype))


def laid_out_as(result: Tensor, value: Tensor) -> Tensor:
    """Return a result with the strides of the original value.

    The graph downstream was traced for them. It is contiguous where memory overlaps or has gaps, and where a size
    depends on data: its strides cannot be compared.
    """
    if all(fake_tensors.statically_known_true(a == b) for a, b in zip(result.stride(), value.stride(), strict=True)):
        return result
    if fake_tensors.has_unknown_size(value):
        return result.contiguous()
    order = sorted(range(value.dim()), key=lambda d: (value.stride(d), value.shape[d]), reverse=True)
    if value.permute(order).is_contiguous():
        back = sorted(range(value.dim()), key=order.__getitem__)
        return result.permute(order).contiguous().permute(back)
    return result.contiguous()


def _check_result(result: Any, value: Tensor, site: Site, action: Any) -> None:
    if not isinstance(result, Tensor):
        raise CallbackError(f"{site}: {describe(action)} returned {type(result).__name__}; it has to return a tensor")
    if dtensors.is_dtensor(value) and not dtensors.is_dtensor(result):
        raise CallbackError(
            f"{site}: {describe(action)} made a plain tensor of a DTensor; compute with the DTensor that it is given"
        )
    for what in ("shape", "dtype", "device"):
        got, wanted = getattr(result, what), getattr(value, what)
        if not (_same_shape(got, wanted) if what == "shape" else got == wanted):
            hint = f"; end it with .to({wanted})" if what != "shape" else ""
            raise CallbackError(
                f"{site}: {describe(action)} changed the {what} from {_text(wanted)} to {_text(got)}; "
                f"a gradient keeps it{hint}"
            )


def _line_of(err: Exception) -> str:
    line = user_line(traceback.extract_tb(err.__traceback__), only_user=True)
    return f"{line}: " if line else ""


def _check_graph(graph: fx.Graph, site: Site, action: Any) -> None:
    for node in list(graph.nodes):
        if operators.is_random(node):
            raise CallbackError(
                f"{site}: {describe(action)} calls the random op {node.target}; random numbers in the backward would "
                "change those of the forward. Draw with gr.uniform, gr.normal or gr.bernoulli, which have their own",
                code="random-op",
            )
        if node.target is torch.ops.aten._local_scalar_dense.default:  # read by an operator, as the value of torch.full
            raise CallbackError(_READS.format(site, describe(action)))
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            editing.skip(node, node.args[1])  # the argument was changed in place: what counts is returned
        elif (lost := _lost_write(node)) is not None:
            raise CallbackError(
                f"{site}: {describe(action)} writes in place ({operators.name_of(node)}) into {lost}, which is lost or "
                "seen too late. Write a gr.State with state.set(...), report figures with gr.record, and compute new "
                "tensors (torch.where, torch.cat) instead of changing others",
                code="in-place-write",
            )


def _lost_write(node: fx.Node) -> str | None:
    """Return the target of a write that the trace loses; None for other nodes.

    The tracer makes all writes functional but those to what the function closes over.
    """
    if any(operators.memory_of(written).op == "get_attr" for written in operators.written_by(node)):
        return "a tensor that it closes over or a state"
    return None


def _same_shape(got: torch.Size, wanted: torch.Size) -> bool:
    return len(got) == len(wanted) and all(
        fake_tensors.statically_known_true(a == b) for a, b in zip(got, wanted, strict=True)
    )


def _is_static(value: Tensor) -> bool:
    return all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def _text(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)
