"""A rewritten graph for other programs: networkx, JSON, GraphML, DOT, Model Explorer."""

from __future__ import annotations

import json
import os
from typing import Any, Literal, get_args

import graphviz
import networkx as nx

from gradrewrite.joint import JointGraph
from gradrewrite.viz._graph_view import Net, Node, action_name, plain, read, run_name
from gradrewrite.viz._scene import INSERTED, INSERTED_EDGE, LINE, PAPER, SAVED

SCHEMA, VERSION = "gradrewrite/graph", 1
ExportFormat = Literal["json", "graphml", "dot", "model_explorer"]
_ENDINGS: dict[str, str] = {"model_explorer": "model_explorer.json"}


def to_networkx(graph: JointGraph) -> nx.DiGraph[str]:
    """A rewritten graph as a networkx DiGraph; an edge goes from what is read to its reader.

    Nodes are named as in fx, and stand in execution order. Their attributes are numbers, strings and truth values:
    ``role`` (``"op"``, ``"placeholder"``, ``"constant"``), ``target`` (``"aten.mul.Tensor"``), ``lane`` (``"forward"``
    or ``"backward"``), ``order`` (number of the torch-level op in the forward; its backward has the same; -1 for what
    carries records), ``op`` (as the user called it), ``name`` (what a placeholder stands for), ``module`` (the
    innermost, with ``#n`` for its runs), ``runs`` (all module runs around it, outermost first, separated by ``/``),
    ``source``, ``shape``, ``dtype``, ``inserted``, ``mark`` (``""``, ``"edit"``, ``"records"``), ``edit`` (its number,
    -1 for none), ``site`` and ``action`` (of the edit), ``reshapes``. Edges have ``saved``: from the forward to the
    backward. The graph has ``schema``, ``version``, ``sites``, ``edits`` and ``outputs``.

    Args:
        graph: What ``model.trace(...)`` returned.

    Raises:
        TypeError: ``graph`` is no JointGraph.

    Example:
        >>> import torch, gradrewrite as gr
        >>> graph = gr.transform(torch.nn.Linear(2, 2), []).trace(torch.ones(1, 2))
        >>> to_networkx(graph).nodes["primals_1"]["name"]
        'weight'
    """
    net = read(graph)
    found: nx.DiGraph[str] = nx.DiGraph(
        schema=SCHEMA,
        version=VERSION,
        sites=[str(site) for site in net.sites],
        edits=[{"site": str(e.site), "action": e.text, "nodes": list(e.nodes)} for e in net.edits],
        outputs=[{"label": label, "node": node} for label, node in net.returned],
    )
    for name, node in net.nodes.items():
        found.add_node(name, **_attributes(net, node))
    for source, target in net.edges:
        lanes = net.nodes[source].origin.lane, net.nodes[target].origin.lane
        found.add_edge(source, target, saved=lanes == ("forward", "backward"))
    return found


def export(graph: JointGraph, path: str | os.PathLike[str], format: ExportFormat = "json") -> str:
    """Write a rewritten graph for another program.

    Args:
        graph: What ``model.trace(...)`` returned.
        path: Where, without the extension.
        format: ``"json"`` (docs/graph-schema.md describes it), ``"graphml"`` (Gephi, yEd, Cytoscape), ``"dot"`` (every
            node; ``draw(...).render(path, "dot")`` has the layout of a picture), or ``"model_explorer"`` (Google's
            Model Explorer; written to ``path.model_explorer.json``).

    Returns:
        The path of the file.

    Raises:
        ValueError: The format is none of these.
        TypeError: ``graph`` is no JointGraph.
        OSError: The file cannot be written.
    """
    if format not in get_args(ExportFormat):
        raise ValueError(f"format={format!r}: choose one of {', '.join(map(repr, get_args(ExportFormat)))}")
    text = {"json": _to_json, "graphml": _to_graphml, "dot": _to_dot, "model_explorer": _to_model_explorer}[format](
        graph
    )
    target = f"{os.fspath(path)}.{_ENDINGS.get(format, format)}"
    with open(target, "w", encoding="utf-8") as file:
        file.write(text)
    return target


def _attributes(net: Net, node: Node) -> dict[str, str | int | bool]:
    origin = node.origin
    edit = net.edits[node.edit] if node.edit >= 0 else None
    return {
        "role": node.role,
        "target": node.target,
        "lane": origin.lane,
        "order": origin.order,
        "op": plain(origin.op),
        "name": plain(origin.name),
        "module": plain(node.module),
        "runs": plain("/".join(map(run_name, origin.runs))),
        "source": plain(origin.source),
        "shape": node.shape,
        "dtype": node.dtype,
        "inserted": bool(node.mark),
        "mark": node.mark,
        "edit": node.edit,
        "site": plain(str(edit.site)) if edit is not None else "",
        "action": plain(edit.text) if edit is not None else "",
        "reshapes": node.reshapes,
    }


def _to_json(graph: JointGraph) -> str:
    data = nx.node_link_data(to_networkx(graph), edges="edges", name="id")
    known = data.pop("graph")
    head = {name: known.pop(name) for name in ("schema", "version")}
    nodes = [{"id": node["id"], **{k: v for k, v in node.items() if k != "id"}} for node in data["nodes"]]
    return json.dumps({**head, **known, "nodes": nodes, "edges": data["edges"]}, indent=1, allow_nan=False) + "\n"


def _to_graphml(graph: JointGraph) -> str:
    found = to_networkx(graph)
    found.graph = {"schema": SCHEMA, "version": VERSION}
    return "\n".join(nx.generate_graphml(found)) + "\n"


def _to_dot(graph: JointGraph) -> str:
    found = to_networkx(graph)
    dot = graphviz.Digraph("gradrewrite", node_attr={"shape": "box", "style": "filled", "fillcolor": PAPER})
    for name, attributes in found.nodes(data=True):
        data = {f"data_{key}": graphviz.escape(str(value)) for key, value in attributes.items()}
        marks = {"fillcolor": INSERTED, "color": INSERTED_EDGE} if attributes["inserted"] else {}
        dot.node(name, **marks, **data)
    for source, target, saved in found.edges(data="saved"):
        dot.edge(source, target, color=SAVED if saved else LINE)
    return str(dot.source)


def _to_model_explorer(graph: JointGraph) -> str:
    net = read(graph)
    reads: dict[str, list[str]] = {name: [] for name in net.nodes}
    for source, target in net.edges:
        reads[target].append(source)
    nodes = [_explorer_node(net, node, reads[name]) for name, node in net.nodes.items()]
    edges = [
        {"sourceNodeId": name, "sourceNodeOutputId": "0", "targetNodeInputId": str(n)}
        for n, (_, name) in enumerate(net.returned)
    ]
    attributes = [{"key": str(n), "value": plain(label)} for n, (label, _) in enumerate(net.returned)]
    nodes.append({"id": "output", "label": "output", "namespace": "", "attrs": attributes, "incomingEdges": edges})
    graphs = [{"id": "rewritten joint graph", "nodes": nodes}]
    return json.dumps({"label": "gradrewrite", "graphs": graphs}, indent=1, allow_nan=False) + "\n"


def _explorer_node(net: Net, node: Node, reads: list[str]) -> dict[str, Any]:
    origin = node.origin
    label = f"{origin.op}: {node.aten}" if node.role == "op" else f"{origin.op} {origin.name}".strip()
    if node.edit >= 0:
        label = f"{action_name(net.edits[node.edit].action)}: {node.aten}"
    runs = [run_name(run).replace("/", "_") for run in origin.runs]
    attributes = {key: str(value) for key, value in _attributes(net, node).items() if value not in ("", -1)}
    found: dict[str, Any] = {
        "id": node.name,
        "label": plain(label),
        "namespace": plain("/".join([origin.lane, *runs])),
        "attrs": [{"key": key, "value": value} for key, value in attributes.items()],
        "incomingEdges": [
            {"sourceNodeId": name, "sourceNodeOutputId": "0", "targetNodeInputId": str(n)}
            for n, name in enumerate(reads)
        ],
        "outputsMetadata": [{"id": "0", "attrs": [{"key": "tensor_shape", "value": f"{node.dtype}[{node.shape}]"}]}],
    }
    if node.mark:
        found["style"] = {"backgroundColor": INSERTED, "borderColor": INSERTED_EDGE}
    return found
