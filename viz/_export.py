"""Export of rewritten graphs: networkx, JSON, GraphML."""

from __future__ import annotations

import json
import os
from typing import Literal, get_args

import networkx as nx

from gradrewrite._utils.files import written_whole
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.viz._fonts import xml_safe
from gradrewrite.viz._graph_view import GraphView, Node, call_name, read_graph

SCHEMA, VERSION = "gradrewrite/graph", 1
ExportFormat = Literal["json", "graphml"]


def to_networkx(graph: JointGraph) -> nx.DiGraph[str]:
    """Return a rewritten graph as a networkx DiGraph; an edge goes from a value to its reader.

    Nodes are named as in fx, in execution order. Their attributes are numbers, strings and truth values:
    ``role`` (``"op"``, ``"placeholder"``, ``"constant"``), ``target`` (``"aten.mul.Tensor"``), ``lane`` (``"forward"``,
    ``"inner"`` in a gradient that the forward computes of itself, ``"backward"``), ``order`` (number of the torch-level
    op in the forward; its backward has the same; -1 for what carries records), ``op`` (as the user called it), ``name``
    (what a placeholder stands for), ``module`` (the innermost, with ``#n`` for its calls), ``runs`` (all module calls
    around it, outermost first, separated by ``/``),
    ``source``, ``turns`` (iterations of a loop, else 0; the nodes of its body are named behind it, ``loop_1.where``),
    ``loss`` (of the backward of one of several losses, -1 of others), ``shape``, ``dtype``, ``inserted``,
    ``mark`` (``""``, ``"edit"``, ``"records"``), ``edit`` (its number, -1 for none), ``site`` and ``action`` (of the
    edit), ``reshapes``. Edges have ``saved``: from the forward to the backward. The graph has ``schema``, ``version``,
    ``sites``, ``edits`` and ``outputs``.

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
    graph_view = read_graph(graph)
    found: nx.DiGraph[str] = nx.DiGraph(
        schema=SCHEMA,
        version=VERSION,
        sites=[str(site) for site in graph_view.sites],
        edits=[{"site": str(e.site), "action": e.text, "nodes": list(e.nodes)} for e in graph_view.edits],
        outputs=[{"label": label, "node": node} for label, node in graph_view.returned],
    )
    for name, node in graph_view.nodes.items():
        found.add_node(name, **_attributes(graph_view, node))
    for source, target in graph_view.edges:
        lanes = graph_view.nodes[source].lane, graph_view.nodes[target].lane
        found.add_edge(source, target, saved=lanes[0] != "backward" == lanes[1])
    return found


def export(graph: JointGraph, path: str | os.PathLike[str], format: ExportFormat = "json") -> str:
    """Write a rewritten graph to a file for another program.

    Args:
        graph: What ``model.trace(...)`` returned.
        path: Where; folder and extension are added where they are missing.
        format: ``"json"`` (docs/graph-schema.md describes it) or ``"graphml"`` (Gephi, yEd, Cytoscape).

    Returns:
        The path of the file.

    Raises:
        ValueError: The format is none of these.
        TypeError: ``graph`` is no JointGraph.
        OSError: The file cannot be written.
    """
    if format not in get_args(ExportFormat):
        raise ValueError(f"format={format!r}: choose one of {', '.join(map(repr, get_args(ExportFormat)))}")
    text = _to_json(graph) if format == "json" else _to_graphml(graph)
    target = f"{os.fspath(path).removesuffix(f'.{format}')}.{format}"
    with written_whole(target) as part:
        part.write_text(text, encoding="utf-8")
    return target


def _attributes(graph_view: GraphView, node: Node) -> dict[str, str | int | bool]:
    edit = graph_view.edits[node.edit] if node.edit >= 0 else None
    found: dict[str, str | int | bool] = {
        "role": node.role,
        "target": node.target,
        "lane": node.lane,
        "order": node.order,
        "op": node.op,
        "name": node.argument,
        "module": node.module_call,
        "runs": "/".join(map(call_name, node.calls)),
        "source": node.source,
        "turns": node.turns,
        "loss": -1 if node.loss is None else node.loss,
        "shape": node.shape,
        "dtype": node.dtype,
        "inserted": bool(node.mark),
        "mark": node.mark,
        "edit": node.edit,
        "site": str(edit.site) if edit is not None else "",
        "action": edit.text if edit is not None else "",
        "reshapes": node.reshapes,
    }
    return {name: xml_safe(value) if isinstance(value, str) else value for name, value in found.items()}


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
