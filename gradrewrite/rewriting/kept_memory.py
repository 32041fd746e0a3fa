"""The bytes that the forward of a joint graph keeps: before a rewrite, and behind it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, dtensors, fake_tensors, operators
from gradrewrite._utils.grouping import grouped
from gradrewrite._utils.tensors import kept_random_state
from gradrewrite.ir import editing
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.memory import Forms, KeptTensor
from gradrewrite.ir.partitioning import saved_names
from gradrewrite.numerics.statistics import norm_of
from gradrewrite.numerics.stored_forms import FORMS, decode, encode
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import SavedEffect, StoreSaved
from gradrewrite.rewriting.result import RewriteResult
from gradrewrite.rewriting.saved_tensors import SMALL, SavedTensors
from gradrewrite.sites import Site

_BECAUSE = "kept because of the policy"


class KeptMemory:
    """The saved tensors of one marked joint graph; to be made before its rewrite."""

    def __init__(self, marked: MarkedJointGraph, inputs: Sequence[Any]) -> None:
        self._graph, self._inputs = marked.graph, inputs
        self._saved = SavedTensors(marked)
        found, names = self._saved.find()
        self._sites = {one.node.name: one.site for one in found}
        self._plain = self._bases(names)

    def compare(
        self, joint: JointGraph, result: RewriteResult
    ) -> tuple[tuple[KeptTensor, ...], Callable[[float], Mapping[Site, Forms]]]:
        """Return the bytes before and behind the rewrite that was made, and a function that measures forms."""
        assert self._graph.owning_module is not None
        assert joint.before is not None
        self._saved.follow({name: plain for name, (plain, loss) in result.copies.items() if loss is None})
        now = self._bases(saved_names(self._graph.owning_module))
        self._sites |= {anchor.node: site for site, anchor in result.anchors.items() if site.kind == "saved"}
        inserted = {name: edit.site for edit in result.edits for name in edit.nodes}
        parts = grouped((site, base) for name, base in now.items() if (site := inserted.get(name)) is not None)
        nodes = {node.name: node for node in self._graph.nodes}
        bases = {name: nodes[name] for name in self._sites if name in nodes} | self._plain | now
        order = {name: number for number, name in enumerate(nodes)}
        sites, found = set(self._sites.values()), []
        for name in sorted(bases, key=lambda name: order.get(name, -1)):
            if inserted.get(name) in sites:
                continue  # it counts at the site
            known = self._sites.get(name)
            kept = [now[name]] if name in now else []
            kept += [] if known is None else parts.get(known, [])
            row = self._row(bases[name], known or inserted.get(name), kept, result)
            found += [row] * bool(row.plain_bytes or row.policy_bytes or row.host_bytes)
        return _with_sums(found), partial(self._measured, joint.before.graph_module)

    def _bases(self, names: Iterable[str]) -> dict[str, fx.Node]:
        """Return the nodes that made the memory of these, by name."""
        nodes = {node.name: node for node in self._graph.nodes}
        found = [base for name in names if (base := self._saved.base_of(nodes[name])) is not None]
        return {base.name: base for base in found}

    def _row(self, base: fx.Node, known: Site | None, kept: Sequence[fx.Node], result: RewriteResult) -> KeptTensor:
        next_to, reason = self._saved.left_alone(base)
        site = known or next_to
        on_host = [node for node in kept if value_of(node).device.type == "cpu" != site.device.type]
        edits = [edit for edit in result.edits if edit.site == site and isinstance(edit.insertion.effect, SavedEffect)]
        if base.name in self._sites:
            answers = () if site is None else result.answers.get(site, ())
            forms = [(a.action, a.insertion.effect) for a in answers if base in kept]
            refused = [(action, form) for action, form in forms if isinstance(form, StoreSaved)]
            reason = "".join(f"{describe(action)}: {form.refusal(value_of(base))}" for action, form in refused[:1])
        if base.name not in self._plain:
            reason = reason or _BECAUSE
        return KeptTensor(
            site,
            site.module,
            _size(base) if base.name in self._plain else 0,
            sum(_size(node) for node in kept if node not in on_host),
            sum(map(_size, on_host)),
            ", ".join(edit.text for edit in edits),
            reason,
        )

    def _measured(self, plain: fx.GraphModule, largest_error: float) -> Mapping[Site, Forms]:
        """Run the forward of the plain graph on the inputs, and measure forms at each site."""
        graph = editing.copy_of(plain)
        nodes = {node.name: node for node in graph.graph.nodes}
        sites = {nodes[name]: site for name, site in self._sites.items() if name in self._plain}
        editing.return_instead(graph.graph, list(sites))  # without the writes into buffers at its end
        positions = aot_autograd.plain_inputs(graph.graph)
        given = [self._input(positions.get(node)) for node in graph.graph.find_nodes(op="placeholder")]
        run = _FormErrors(graph, sites, largest_error)
        with torch.no_grad(), kept_random_state(), warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")  # torch gives them when the model runs
            for kind in {site.device.type for site in sites.values()}:
                stack.enter_context(torch.autocast(kind, enabled=False))  # the graph has its casts
            run.run(*given, enable_io_processing=False)
        return run.found

    def _input(self, position: int | None) -> Any:
        value = None if position is None else self._inputs[position]
        if dtensors.is_dtensor(value):
            return dtensors.local_of(value)
        return fake_tensors.hint_of(value) if isinstance(value, torch.SymInt) else value


class _FormErrors(fx.Interpreter):
    """An interpreter that measures the errors of stored forms."""

    def __init__(self, graph: fx.GraphModule, sites: Mapping[fx.Node, Site], largest_error: float) -> None:
        super().__init__(graph)
        self._sites, self._largest_error = sites, largest_error
        self.found: dict[Site, Forms] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n) if n.op != "output" else None
        value = operators.run_node(n, *self.fetch_args_kwargs_from_env(n))
        if n in self._sites:
            self.found[self._sites[n]] = _errors_of(value, self._largest_error)
        return value


def _errors_of(tensor: Tensor, largest_error: float) -> Forms:
    """Return the forms that are smaller, and errors from the smallest to the first small one."""
    length, norm = tensor.shape[-1], norm_of(tensor)
    sizes = {name: tensor.numel() // length * form.bytes_per_row(length, tensor.dtype) for name, form in FORMS.items()}
    found: dict[str, tuple[float | None, int]] = {}
    is_done = False
    for name in sorted(sizes, key=sizes.__getitem__):
        if sizes[name] >= tensor.nbytes or not FORMS[name].is_on(tensor.device):
            continue
        error = None
        if not is_done:
            restored = decode(encode(tensor, name), name, tensor.dtype)
            difference = norm_of(restored.to(norm.dtype) - tensor.to(norm.dtype))
            error = float(difference / norm if norm > 0 else difference)
            is_done = error <= largest_error
        found[name] = error, sizes[name]
    return found


def _size(node: fx.Node) -> int:
    value = value_of(node)
    return fake_tensors.hint_of(value.numel()) * value.element_size()


def _with_sums(rows: Sequence[KeptTensor]) -> tuple[KeptTensor, ...]:
    """Return rows with the small tensors of a module as one, at the place of the first."""
    small = [bool(row.reason) and max(row.plain_bytes, row.policy_bytes) < SMALL for row in rows]
    groups = grouped(
        (row.module if is_small else n, row) for n, (row, is_small) in enumerate(zip(rows, small, strict=True))
    )
    return tuple(group[0] if len(group) == 1 else _sum(group) for group in groups.values())


def _sum(rows: Sequence[KeptTensor]) -> KeptTensor:
    plain, policy, host = (sum(getattr(row, f"{name}_bytes") for row in rows) for name in ("plain", "policy", "host"))
    reason = f"each under {SMALL} bytes, and no site"
    return KeptTensor(rows[0].site, rows[0].module, plain, policy, host, "", reason, len(rows))
