"""``GraphView``: an immutable view of a joint graph, for drawings and exports."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, fx

from gradrewrite._compat import fake_tensors
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.provenance import Lane, Origin
from gradrewrite.sites import Site

Role = Literal["op", "placeholder", "constant"]
Mark = Literal["", "edit", "records"]

_RESHAPES = frozenset(
    "_unsafe_view alias as_strided chunk clone detach expand permute reshape select slice split split_with_sizes "
    "squeeze t transpose unbind unsqueeze view".split()
)

_LOOP = "gradrewrite.loop.default"  # the operator, whose module imports the compiler


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a joint graph, with its provenance; see ``Origin``."""

    name: str  # its fx name
    role: Role  # ``"constant"``: a live tensor of an action or a constant of the model
    target: str  # what it calls, ``aten.mul.Tensor``
    lane: Lane
    order: int
    calls: tuple[tuple[str, int], ...]
    op: str
    argument: str  # what a placeholder stands for: a parameter's name; ``""`` for ops
    source: str
    loss: int | None  # of a node in the backward of one of several losses, its number
    mark: Mark  # ``"edit"`` if an edit inserted it, ``"records"`` if it packs records
    edit: int  # number of the edit, -1 if there is none
    shape: str  # ``"4, 16"``; several values are in brackets
    dtype: str  # ``"float32"``
    turns: int  # of a loop, the number of its iterations; else 0
    num_carried: int  # of a loop, the number of values that it carries from iteration to iteration
    reshapes: bool  # it only gives a tensor another shape, or takes a tuple apart

    @property
    def module(self) -> str:
        """Name of the innermost module; ``""`` is the root."""
        return self.calls[-1][0] if self.calls else ""

    @property
    def module_call(self) -> str:
        """The innermost module with the number of its call, ``cell#3``."""
        return call_name(self.calls[-1]) if self.calls else ""

    @property
    def aten(self) -> str:
        """The op without its namespace and overload: ``mul`` of ``aten.mul.Tensor``."""
        parts = self.target.split(".")
        return parts[1] if len(parts) > 1 else parts[0]

    @property
    def op_and_argument(self) -> str:
        """``parameter decoder.weight`` for a placeholder, the op's name otherwise."""
        return f"{self.op} {self.argument}".strip()


@dataclass(frozen=True, slots=True)
class GraphView:
    """Immutable view of a joint graph."""

    nodes: Mapping[str, Node]  # by name, in execution order
    edges: tuple[tuple[str, str], ...]  # pairs (read, reader), each once, in execution order
    returned: tuple[tuple[str, str], ...]  # pairs (label, name of the node)
    edits: tuple[Edit, ...]
    sites: tuple[Site, ...]
    anchors: Mapping[Site, str]  # the node that holds a site's value before anything acts on it
    orders: Mapping[Site, int]  # number of the torch-level op of a site

    @property
    def summary(self) -> str:
        """Numbers of nodes and edits, as text."""
        inserted = sum(bool(node.mark) for node in self.nodes.values())
        return f"{len(self.nodes)} nodes, {len(self.edits)} edits, {inserted} nodes inserted"


def read_graph(graph: JointGraph) -> GraphView:
    """Return the view of a joint graph; TypeError for anything else."""
    if not isinstance(graph, JointGraph):
        raise TypeError(
            f"a picture is drawn of a JointGraph, as model.trace(...) returns it; got {type(graph).__name__}"
        )
    marks: dict[str, tuple[Mark, int]] = dict.fromkeys(graph.record_nodes, ("records", -1))
    marks |= {name: ("edit", number) for number, edit in enumerate(graph.edits) for name in edit.nodes}
    nodes: dict[str, Node] = {}
    edges: list[tuple[str, str]] = []
    for node in graph.graph_module.graph.nodes:
        if node.op == "output":
            continue
        if str(node.target) == _LOOP:
            inside, edges_inside = _body(node, graph, marks)
            nodes |= inside
            edges += edges_inside
        else:
            edges += ((read.name, node.name) for read in node.all_input_nodes)
        nodes[node.name] = _node(node, node.name, graph, *marks.get(node.name, ("", -1)))
    anchors = graph.provenance.anchors
    return GraphView(
        nodes=nodes,
        edges=tuple(dict.fromkeys(edges)),
        returned=tuple(_returned(graph)),
        edits=graph.edits,
        sites=graph.sites,
        anchors={site: anchor.node for site, anchor in anchors.items()},
        orders={site: anchor.order for site, anchor in anchors.items()},
    )


def contracted_edges(graph_view: GraphView, hidden: Iterable[str]) -> list[tuple[str, str]]:
    """Return the edges between visible nodes, with hidden nodes contracted into direct edges."""
    gone = set(hidden)
    reads: dict[str, list[str]] = {name: [] for name in graph_view.nodes}
    for source, reader in graph_view.edges:
        reads[reader].append(source)
    through: dict[str, list[str]] = {}
    found: list[tuple[str, str]] = []
    for name in graph_view.nodes:  # in execution order, so what is read is known
        sources = [s for read in reads[name] for s in (through[read] if read in gone else [read])]
        through[name] = list(dict.fromkeys(sources))
        if name not in gone:
            found += [(source, name) for source in through[name]]
    return found


def visible_outputs(
    graph_view: GraphView, returned: Iterable[tuple[str, str]], hidden: Collection[str]
) -> list[tuple[str, str]]:
    """Return pairs (label, node) of the graph's outputs, each with its nearest visible ancestor."""
    reads: dict[str, str] = {}
    for source, reader in graph_view.edges:
        reads.setdefault(reader, source)
    found = []
    for label, name in returned:
        while name in hidden and name in reads:
            name = reads[name]
        found.append((label, name))
    return found


def hidden_nodes(graph_view: GraphView, *, reshapes: bool = False, records: bool = False) -> set[str]:
    """Return the nodes left out of drawings, unless ``reshapes`` and nodes for ``records`` alone are shown.

    The latter are the nodes that pack records, and the part of an edit that computes them.
    """
    hidden: set[str] = set()
    if not reshapes:
        hidden |= {name for name, node in graph_view.nodes.items() if node.reshapes and not node.mark}
    if not records:
        hidden |= _record_nodes(graph_view)
    return hidden


def _record_nodes(graph_view: GraphView) -> set[str]:
    readers: dict[str, list[str]] = {}
    for source, reader in graph_view.edges:
        readers.setdefault(source, []).append(reader)
    returned = {name for label, name in graph_view.returned if not graph_view.nodes[name].mark == "records"}
    found = {name for name, node in graph_view.nodes.items() if node.mark == "records"}
    for name in reversed(list(graph_view.nodes)):
        leads = readers.get(name, [])
        if graph_view.nodes[name].mark and leads and name not in returned and found.issuperset(leads):
            found.add(name)
    return found


def action_name(action: object) -> str:
    """Return the short name of an action: its class, or the function's name."""
    name = getattr(action, "__name__", type(action).__name__)
    return "lambda" if name == "<lambda>" else str(name)


def action_text(edit: Edit) -> str:
    """Return an action with its settings, of a tensor function its name."""
    return action_name(edit.action) if edit.text.startswith("<") else edit.text


def lane_of_site(site: Site) -> Lane:
    """Return the lane of a site and of its edits."""
    return "forward" if site.traits.in_forward else "backward"


def call_name(call: tuple[str, int]) -> str:
    """Return ``cell#3`` for the fourth call of ``cell``."""
    return f"{call[0]}#{call[1]}" if call[1] else call[0]


def _body(
    call: fx.Node, graph: JointGraph, marks: Mapping[str, tuple[Mark, int]]
) -> tuple[dict[str, Node], list[tuple[str, str]]]:
    """Return the nodes in the body of a loop, and the edges to them and to the node that runs it."""
    given: list[fx.Node] = call.args[0]  # type: ignore[assignment]
    body = call.meta["loop"].body.graph
    names = {node: f"{call.name}.{node.name}" for node in body.nodes}
    names |= {node: read.name for node, read in zip(body.find_nodes(op="placeholder"), given, strict=True)}
    nodes: dict[str, Node] = {}
    edges: list[tuple[str, str]] = []
    for node in body.nodes:
        is_output = node.op == "output"
        edges += ((names[read], call.name if is_output else names[node]) for read in node.all_input_nodes)
        if not is_output and node.op != "placeholder":
            nodes[names[node]] = _node(node, names[node], graph, *marks.get(names[node], ("", -1)), call)
    return nodes, edges


def _node(node: fx.Node, name: str, graph: JointGraph, mark: Mark, edit: int, call: fx.Node | None = None) -> Node:
    shape, dtype = _describe_value(node.meta.get("val"))
    target = str(node.target) if not callable(node.target) or hasattr(node.target, "overloadpacket") else ""
    target = target or getattr(node.target, "__name__", str(node.target))
    is_reshape = node.target is operator.getitem or (target.startswith("aten.") and target.split(".")[1] in _RESHAPES)
    role: Role = "op" if node.op == "call_function" else ("placeholder" if node.op == "placeholder" else "constant")
    origins, unknown = graph.provenance.origins, Origin("backward", -1, op="unknown")
    origin = origins.get(name, unknown if call is None else origins.get(call.name, unknown))
    is_loop = str(node.target) == _LOOP
    return Node(
        name=name,
        role=role,
        target=target,
        lane=origin.lane,
        order=origin.order,
        calls=origin.calls,
        op=origin.op,
        argument=origin.name,
        source=origin.source,
        loss=origin.loss,
        mark=mark,
        edit=edit,
        shape=shape,
        dtype=dtype,
        turns=_turns(node) if is_loop else 0,
        num_carried=node.meta["loop"].num_carries if is_loop else 0,
        reshapes=is_reshape,
    )


def _turns(call: fx.Node) -> int:
    """Return the number of iterations of a loop, of a symbolic one that of its first inputs."""
    given: list[fx.Node] = call.args[0]  # type: ignore[assignment]
    return fake_tensors.hint_of(given[call.meta["loop"].num_carries].meta["val"].shape[0])


def _describe_value(value: Any) -> tuple[str, str]:
    if isinstance(value, Tensor):
        return ", ".join(str(size) for size in value.shape), str(value.dtype).removeprefix("torch.")
    if isinstance(value, list | tuple):
        parts = [_describe_value(v) for v in value]
        return ", ".join(f"({shape})" for shape, _ in parts), ", ".join(dict.fromkeys(dtype for _, dtype in parts))
    return "", "" if value is None else type(value).__name__


def _returned(graph: JointGraph) -> list[tuple[str, str]]:
    returned = graph.graph_module.graph.output_node().args[0]
    assert isinstance(returned, list | tuple)
    labels = graph.provenance.outputs or ("",) * len(returned)
    pairs = zip(labels, returned, strict=True)
    return [(label or f"#{n}", node.name) for n, (label, node) in enumerate(pairs) if isinstance(node, fx.Node)]
