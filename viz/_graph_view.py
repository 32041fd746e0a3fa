"""A joint graph as plain values: what every picture and every export reads."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, fx

from gradrewrite.joint import Edit, JointGraph
from gradrewrite.origins import Lane, Origin
from gradrewrite.sites import Site

Role = Literal["op", "placeholder", "constant"]
Mark = Literal["", "edit", "records"]

_RESHAPES = frozenset(
    "_unsafe_view alias as_strided chunk clone detach expand permute reshape select slice split split_with_sizes "
    "squeeze t transpose unbind unsqueeze view".split()
)
_NO_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a joint graph.

    Attributes:
        name: Its fx name.
        role: ``"op"``; ``"placeholder"`` for what comes in; ``"constant"`` for a live tensor of an action or a constant
            of the model.
        target: What it calls, ``aten.mul.Tensor``.
        origin: Lane, order, op and modules.
        mark: ``"edit"`` if an edit inserted it, ``"records"`` if it carries records, else ``""``.
        edit: Number of the edit, -1 if there is none.
        shape: Sizes as text, ``"4, 16"``; several values stand in brackets.
        dtype: Element type, ``"float32"``.
        reshapes: Whether it only gives a tensor another shape, or takes a tuple apart.
    """

    name: str
    role: Role
    target: str
    origin: Origin
    mark: Mark
    edit: int
    shape: str
    dtype: str
    reshapes: bool

    @property
    def module(self) -> str:
        """The innermost module with the number of its run, ``cell#3``."""
        return run_name(self.origin.runs[-1]) if self.origin.runs else ""

    @property
    def aten(self) -> str:
        """The op without its namespace and overload: ``mul`` of ``aten.mul.Tensor``."""
        parts = self.target.split(".")
        return parts[1] if len(parts) > 1 else parts[0]


@dataclass(frozen=True, slots=True)
class Net:
    """A joint graph as plain values.

    Attributes:
        nodes: By name, in execution order.
        edges: Which node reads which: pairs (read, reader), each once, in execution order.
        returned: What the graph returns: pairs (label, name of the node).
        edits: What was inserted.
        sites: All sites.
        anchors: Name of the node that holds a site's value before anything acts on it.
        orders: Number of the torch-level op beside which a site stands.
    """

    nodes: Mapping[str, Node]
    edges: tuple[tuple[str, str], ...]
    returned: tuple[tuple[str, str], ...]
    edits: tuple[Edit, ...]
    sites: tuple[Site, ...]
    anchors: Mapping[Site, str]
    orders: Mapping[Site, int]

    @property
    def num_inserted(self) -> int:
        """How many nodes were inserted."""
        return sum(bool(node.mark) for node in self.nodes.values())


def read(graph: JointGraph) -> Net:
    """Read a joint graph.

    Raises:
        TypeError: ``graph`` is no JointGraph.
    """
    if not isinstance(graph, JointGraph):
        raise TypeError(
            f"a picture is drawn of a JointGraph, as model.trace(...) returns it; got {type(graph).__name__}"
        )
    marks: dict[str, tuple[Mark, int]] = dict.fromkeys(graph.carriers, ("records", -1))
    marks |= {name: ("edit", number) for number, edit in enumerate(graph.edits) for name in edit.nodes}
    fx_nodes = [node for node in graph.graph_module.graph.nodes if node.op != "output"]
    nodes = {node.name: _node(node, graph, *marks.get(node.name, ("", -1))) for node in fx_nodes}
    edges = [(read.name, node.name) for node in fx_nodes for read in node.all_input_nodes]
    anchors = graph.meaning.anchors
    return Net(
        nodes=nodes,
        edges=tuple(dict.fromkeys(edges)),
        returned=tuple(_returned(graph)),
        edits=graph.edits,
        sites=graph.sites,
        anchors={site: anchor.node for site, anchor in anchors.items()},
        orders={site: anchor.order for site, anchor in anchors.items()},
    )


def contracted(net: Net, hidden: Iterable[str]) -> list[tuple[str, str]]:
    """The edges between the nodes that are not hidden: what is read through hidden nodes is read directly."""
    gone = set(hidden)
    reads: dict[str, list[str]] = {name: [] for name in net.nodes}
    for source, reader in net.edges:
        reads[reader].append(source)
    through: dict[str, list[str]] = {}
    found: list[tuple[str, str]] = []
    for name in net.nodes:  # in execution order, so what is read is known
        sources = [s for read in reads[name] for s in (through[read] if read in gone else [read])]
        through[name] = list(dict.fromkeys(sources))
        if name not in gone:
            found += [(source, name) for source in through[name]]
    return found


def shown_for(net: Net, returned: Iterable[tuple[str, str]], hidden: Collection[str]) -> list[tuple[str, str]]:
    """What a graph returns, with the node that is shown for it: the nearest that is not hidden."""
    reads: dict[str, str] = {}
    for source, reader in net.edges:
        reads.setdefault(reader, source)
    found = []
    for label, name in returned:
        while name in hidden and name in reads:
            name = reads[name]
        found.append((label, name))
    return found


def hidden_reshapes(net: Net) -> set[str]:
    """Nodes that a picture leaves out: ops that only reshape and were not inserted."""
    return {name for name, node in net.nodes.items() if node.reshapes and not node.mark}


def action_name(action: object) -> str:
    """Short name of an action: its class, or the function's name."""
    name = getattr(action, "__name__", type(action).__name__)
    return "lambda" if name == "<lambda>" else str(name)


def lane_of_site(site: Site) -> Lane:
    """The lane that a site stands in, and what is inserted there."""
    return "forward" if site.kind == "activation" else "backward"


def run_name(run: tuple[str, int]) -> str:
    """``cell#3`` for the fourth run of ``cell``."""
    return f"{run[0]}#{run[1]}" if run[1] else run[0]


def plain(text: str) -> str:
    """Text without the signs that no XML file may hold."""
    return _NO_XML.sub("\ufffd", text)


def shorten(text: str, width: int) -> str:
    """Text of at most so many signs; the middle goes, for the ends of names tell them apart."""
    if len(text) <= width:
        return text
    head = (width - 2) // 3
    return f"{text[:head]}..{text[len(text) - (width - 2 - head) :]}"


def shorten_front(text: str, width: int) -> str:
    """Text of at most so many signs; the front goes, for parameters differ in their last words."""
    return text if len(text) <= width else f"..{text[len(text) - width + 2 :]}"


def describe(net: Net, node: Node) -> str:
    """All that is known of a node, a line each: for titles."""
    origin = node.origin
    lines = [f"{node.name}: {node.target}"]
    what = f"{origin.op} {origin.name}".strip() if node.role == "placeholder" else f"{node.module}/{origin.op}"
    lines.append(f"{what}, {origin.lane}")
    if node.shape or node.dtype:
        lines.append(f"[{node.shape}] {node.dtype}")
    if node.edit >= 0:
        edit = net.edits[node.edit]
        lines.append(f"inserted: {edit.text} at {edit.site}")
    elif node.mark:
        lines.append("inserted: carries records")
    return plain("\n".join([*lines, *([origin.source] if origin.source else [])]))


def _node(node: fx.Node, graph: JointGraph, mark: Mark, edit: int) -> Node:
    shape, dtype = _describe_value(node.meta.get("val"))
    target = str(node.target) if not callable(node.target) or hasattr(node.target, "overloadpacket") else ""
    target = target or getattr(node.target, "__name__", str(node.target))
    is_reshape = node.target is operator.getitem or (target.startswith("aten.") and target.split(".")[1] in _RESHAPES)
    role: Role = "op" if node.op == "call_function" else ("placeholder" if node.op == "placeholder" else "constant")
    origin = graph.meaning.origins.get(node.name, Origin("backward", -1, op="unknown"))
    return Node(node.name, role, target, origin, mark, edit, shape, dtype, is_reshape)


def _describe_value(value: Any) -> tuple[str, str]:
    """Sizes and element type as text."""
    if isinstance(value, Tensor):
        return ", ".join(str(size) for size in value.shape), str(value.dtype).removeprefix("torch.")
    if isinstance(value, list | tuple):
        parts = [_describe_value(v) for v in value]
        return ", ".join(f"({shape})" for shape, _ in parts), ", ".join(dict.fromkeys(dtype for _, dtype in parts))
    return "", "" if value is None else type(value).__name__


def _returned(graph: JointGraph) -> list[tuple[str, str]]:
    returned = graph.graph_module.graph.output_node().args[0]
    assert isinstance(returned, list | tuple)
    labels = graph.meaning.outputs or ("",) * len(returned)
    pairs = zip(labels, returned, strict=True)
    return [(label or f"#{n}", node.name) for n, (label, node) in enumerate(pairs) if isinstance(node, fx.Node)]
