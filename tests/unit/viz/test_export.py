"""Exports: every node, edge and edit of the graph, in forms that other programs read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import pytest

from gradrewrite import viz
from gradrewrite.ir.joint_graph import JointGraph

from models.graphs import EACH, three_layers


@EACH
def test_networkx_has_the_graph_node_by_node(make: Callable[[], JointGraph]) -> None:
    graph = make()
    found = viz.to_networkx(graph)
    nodes = [n for n in graph.graph_module.graph.nodes if n.op != "output"]

    assert list(found.nodes) == [n.name for n in nodes]
    assert set(found.edges) == {(read.name, n.name) for n in nodes for read in n.all_input_nodes}
    assert nx.is_directed_acyclic_graph(found)
    by_edit = {name: number for number, edit in enumerate(graph.edits) for name in edit.nodes}
    for node in nodes:
        data = found.nodes[node.name]
        assert data["edit"] == by_edit.get(node.name, -1)
        assert data["inserted"] == (node.name in by_edit or node.name in graph.record_nodes)
        assert data["site"] == (str(graph.edits[data["edit"]].site) if data["edit"] >= 0 else "")
        assert data["lane"] == graph.provenance.origins[node.name].lane
        if node.op == "call_function":
            assert data["target"].split(".")[-2 if "." in data["target"] else 0] in str(node.target)
    saved = {(a, b) for a, b, is_saved in found.edges(data="saved") if is_saved}
    lanes = nx.get_node_attributes(found, "lane")
    assert saved == {(a, b) for a, b in found.edges if (lanes[a], lanes[b]) == ("forward", "backward")}


@pytest.mark.long
@EACH
def test_json_and_graphml_come_back_as_they_were(make: Callable[[], JointGraph], tmp_path: Path) -> None:
    graph = make()
    wanted = viz.to_networkx(graph)

    data = json.loads(Path(viz.export(graph, tmp_path / "g", "json")).read_text(), parse_constant=pytest.fail)
    assert list(data) == ["schema", "version", "sites", "edits", "outputs", "nodes", "edges"]
    assert (data["schema"], data["version"]) == ("gradrewrite/graph", 1)
    assert {n["id"]: {k: v for k, v in n.items() if k != "id"} for n in data["nodes"]} == dict(wanted.nodes(data=True))
    assert {(e["source"], e["target"]): e["saved"] for e in data["edges"]} == {
        (a, b): saved for a, b, saved in wanted.edges(data="saved")
    }
    assert [e["nodes"] for e in data["edits"]] == [list(e.nodes) for e in graph.edits]
    assert data["outputs"][0]["label"] == "output:0"

    back = nx.read_graphml(viz.export(graph, tmp_path / "g", "graphml"))
    assert dict(back.nodes(data=True)) == dict(wanted.nodes(data=True))
    assert set(back.edges) == set(wanted.edges)


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format='xml': choose one of 'json', 'graphml'"):
        viz.export(three_layers(), tmp_path / "g", "xml")
    with pytest.raises(TypeError, match="JointGraph"):
        viz.to_networkx(3)


def test_actions_are_written_without_addresses() -> None:
    assert not [e.text for e in three_layers().edits if "0x" in e.text]
    assert any(e.text.startswith("<function three_layers.<locals>.<lambda>") for e in three_layers().edits)
