"""An independent evaluation of joint graphs with saved tensors in narrower forms."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing

import gradrewrite as gr
from gradrewrite._compat import aot_autograd, fake_tensors
from gradrewrite.backends import capture
from gradrewrite.ir.partitioning import saved_names
from gradrewrite.passes import Store

SMALL = 4096  # bytes; smaller tensors are left alone
DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}


def restored(x: Tensor, form: str) -> Tensor:
    """Return what is left of a tensor behind ``Store``, by the formulas of its documentation."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if form == "int8":
        rows = x.to(wide)
        scale = rows.abs().amax(-1, keepdim=True) / 127
        back = (rows / torch.where(scale > 0, scale, 1)).round() * scale
        back = torch.where(rows.isfinite().all(-1, keepdim=True), back, torch.nan)
    else:
        rows = x.to(wide)
        if form == "float8_e4m3fn":
            rows = torch.where(rows.abs() < 464, rows, torch.nan)
        back = rows.to(DTYPES[form]).to(wide)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(back)


def is_smaller(x: Tensor, form: str) -> bool:
    """Whether a form takes less memory than a tensor."""
    width = 1 if form in ("int8", "float8_e4m3fn") else DTYPES[form].itemsize
    scales = x.numel() // x.shape[-1] * max(4, x.element_size()) if form == "int8" else 0
    return x.numel() * width + scales < x.numel() * x.element_size()


@dataclass(frozen=True)
class Traced:
    """The joint graph of a model, with the values of its placeholders."""

    graph: gr.JointGraph
    values: tuple[Any, ...]

    @property
    def plain(self) -> fx.GraphModule:
        assert self.graph.before is not None
        return self.graph.before.graph_module

    @property
    def num_outputs(self) -> int:
        """Number of the outputs of the forward."""
        return aot_autograd.num_forward_outputs(self.plain.graph)

    def with_tangents_of_one(self) -> Traced:
        """The same with ones for the gradients of the outputs."""
        nodes, outside = self.plain.graph.find_nodes(op="placeholder"), set(aot_autograd.tangents(self.plain.graph))
        pairs = zip(nodes, self.values, strict=True)
        return replace(self, values=tuple(torch.ones_like(v) if n in outside else v for n, v in pairs))

    def run(self, seed: int = 1) -> list[Any]:
        """Run the rewritten graph."""
        torch.manual_seed(seed)
        return list(fx.Interpreter(self.graph.graph_module).run(*self.values))

    def expected(self, forms: Mapping[str, str] | None = None, seed: int = 1) -> Evaluation:
        """Evaluate the plain graph; see ``Evaluation``."""
        torch.manual_seed(seed)
        given = forms if forms is not None else self.forms()
        return Evaluation(self.plain, self.values, given)

    def forms(self) -> dict[str, str]:
        """Return the forms that the rewrite says it keeps, by the name of the node that makes the memory."""
        anchors = self.graph.provenance.anchors
        edits = [e for e in self.graph.edits if isinstance(e.action, Store)]
        assert all(e.nodes for e in edits)
        return {anchors[e.site].node: e.action.form for e in edits}


def trace(model: nn.Module, policy: gr.Policy, *args: Any, **kwargs: Any) -> Traced:
    """Trace a rewritten model, with the values of the placeholders of its graph.

    The gradients of its outputs are random numbers.
    """
    seen: list[Sequence[Any]] = []
    own = capture._capture

    def keep(*given: Any, **options: Any) -> Any:
        seen.append([t.detach() if isinstance(t, Tensor) else t for t in given[-1]])
        return own(*given, **options)

    with mock.patch.object(capture, "_capture", keep):
        graph = gr.transform(model, policy).trace(*args, **kwargs)
    assert graph.before is not None
    joint = graph.before.graph_module.graph
    inputs, positions, values = seen[-1], aot_autograd.plain_inputs(joint), []
    generator = torch.Generator().manual_seed(7)
    for node in joint.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if node in positions:
            values.append(inputs[positions[node]])
        else:
            noise = torch.randn(tuple(value.shape), generator=generator, dtype=torch.float64).to(value.dtype)
            values.append(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(noise))
    return Traced(graph, tuple(values))


class Evaluation:
    """The outputs of a plain joint graph whose backward reads restored values.

    Each node of the forward has two values: the one of the forward, and the one that the backward reads. The latter is
    restored where the node makes the memory of a saved tensor with a form, or is a saved view of that; it is the former
    where the node is another saved tensor, an input, or random; otherwise it is computed from what the backward reads
    of the node's inputs.

    Attributes:
        outputs: Those of the graph.
        saved: Names of the nodes that make the memory of saved tensors.
    """

    def __init__(self, gm: fx.GraphModule, values: Sequence[Any], forms: Mapping[str, str]) -> None:
        self._gm = gm
        self._forms = forms
        self._names = frozenset(_saved_names(gm))
        self._forward: dict[fx.Node, Any] = {}
        self._read: dict[fx.Node, Any] = {}
        self._own: dict[int, fx.Node] = {}  # the node that made the memory, by its address
        self._decoded: dict[fx.Node, Tensor] = {}
        self._first: dict[Any, fx.Node] = {}  # nodes by what they compute
        self._same: dict[fx.Node, fx.Node] = {}
        backward = set(aot_autograd.tangents(gm.graph))
        given = iter(values)
        self.outputs: list[Any] = []
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self._forward[node] = self._read[node] = next(given)
                self._note_memory(node, self._forward[node])
            elif node.op == "get_attr":
                self._forward[node] = self._read[node] = operator.attrgetter(str(node.target))(gm)
                self._note_memory(node, self._forward[node])
            elif node.op == "output":
                count = aot_autograd.num_forward_outputs(gm.graph)
                for number, result in enumerate(node.args[0]):
                    env = self._forward if number < count else self._read
                    self.outputs.append(env[result] if isinstance(result, fx.Node) else result)
            elif not backward.isdisjoint(node.all_input_nodes):
                backward.add(node)
                self._read[node] = _call(node, self._read)
            else:
                self._run_forward(node)
        self.saved = frozenset(
            node.name
            for name in self._names
            for node in [self._base_of(next(n for n in gm.graph.nodes if n.name == name))]
            if node is not None and node.op == "call_function"
        )

    def _run_forward(self, node: fx.Node) -> None:
        value = self._forward[node] = _call(node, self._forward)
        self._note_memory(node, value)
        is_random = isinstance(node.target, torch._ops.OpOverload) and (
            torch.Tag.nondeterministic_seeded in node.target.tags
        )
        same = self._first_like(node, is_random=is_random)
        base = self._base_of(node)
        is_kept = node.name in self._names or node.name in self._forms
        if same is not node and not is_kept:
            self._read[node] = self._read[same]
        elif base is not None and is_kept and base.name in self._forms:
            self._read[node] = self._view_of_restored(base, self._forms[base.name], value)
        elif is_kept:
            self._read[node] = value
        elif is_random:
            self._read[node] = value
        elif all(self._read[n] is self._forward[n] for n in node.all_input_nodes):
            self._read[node] = value
        else:
            self._read[node] = _call(node, self._read)

    def _first_like(self, node: fx.Node, *, is_random: bool) -> fx.Node:
        """Return the first node that computes the same; a partitioner saves that one."""
        key = (node.target, str(fx.map_arg((node.args, node.kwargs), lambda n: self._same.get(n, n))))
        self._same[node] = node if is_random else self._first.setdefault(key, node)
        return self._same[node]

    def _view_of_restored(self, base: fx.Node, form: str, view: Tensor) -> Tensor:
        if base not in self._decoded:
            self._decoded[base] = restored(self._forward[base], form)
        memory = self._decoded[base].untyped_storage()
        return torch.empty(0, dtype=view.dtype).set_(memory, view.storage_offset(), view.shape, view.stride())

    def _note_memory(self, node: fx.Node, value: Any) -> None:
        if _has_memory(value):
            self._own.setdefault(value.untyped_storage().data_ptr(), node)

    def _base_of(self, node: fx.Node) -> fx.Node | None:
        value = self._forward[node]
        return self._own[value.untyped_storage().data_ptr()] if _has_memory(value) else None

    def sites(self, form: str) -> dict[str, str]:
        """Return the saved tensors that a form of all of them is for, each with that form."""
        values = {node.name: self._forward[node] for node in self._forward if node.name in self.saved}
        return {
            name: form
            for name, x in values.items()
            if x.is_floating_point() and x.numel() * x.element_size() >= SMALL and _is_dense(x) and is_smaller(x, form)
        }


def _saved_names(gm: fx.GraphModule) -> tuple[str, ...]:
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    mode = fake_tensors.fake_mode_of(fakes)
    with tracing(TracingContext(mode)):  # which the partitioner asks for the states of random number generators
        return saved_names(gm)


def _call(node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0


def _is_dense(x: Tensor) -> bool:
    return x.untyped_storage().nbytes() == x.numel() * x.element_size()


def assert_as_expected(traced: Traced, form: str | None = None, rtol: float = 1e-10) -> Evaluation:
    """Compare the rewritten graph with the evaluation of the plain one; ``form`` is that of all saved tensors."""
    forms = traced.forms()
    expected = traced.expected(forms)
    if form is not None:
        wanted = expected.sites(form)
        assert forms == wanted, {name: (forms.get(name), wanted.get(name)) for name in forms.keys() ^ wanted.keys()}
    got = traced.run()
    assert len(got) == len(expected.outputs)
    scales = [float(t.abs().max()) for t in expected.outputs[traced.num_outputs :] if _is_gradient(t)]
    scale = max((s for s in scales if s < float("inf")), default=0.0)
    for number, (one, other) in enumerate(zip(got, expected.outputs, strict=True)):
        if not isinstance(one, Tensor):
            assert one == other
        elif number < traced.num_outputs:
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), f"output {number} of the forward"
        else:
            torch.testing.assert_close(
                one, other, rtol=rtol, atol=rtol * scale, equal_nan=True, msg=lambda m, n=number: f"output {n}: {m}"
            )
    return expected


def _is_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def changes(traced: Traced) -> float:
    """Return the largest difference of gradients from those of the plain graph, relative to the largest of them."""
    plain, got = traced.expected({}).outputs, traced.run()
    pairs = itertools.islice(zip(plain, got, strict=True), traced.num_outputs, None)
    found = [(float((a - b).abs().max()), float(a.abs().max())) for a, b in pairs if _is_gradient(a)]
    return max(d for d, _ in found) / max(s for _, s in found)
