"""Site diagram: the neighborhood of one site, before and after the rewrite side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from gradrewrite._formatting import nearest
from gradrewrite.errors import NoSuchSiteError
from gradrewrite.sites import Pattern, Site
from gradrewrite.viz._diagram import Diagram, Item, Link
from gradrewrite.viz._graph_view import (
    GraphView,
    action_name,
    contracted_edges,
    describe_node,
    hidden_reshapes,
    visible_outputs,
)
from gradrewrite.viz._scene import ColorSample

MOST = 24  # boxes a side that were not inserted


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of the diagram."""

    name: str
    graph_view: GraphView
    edges: Sequence[tuple[str, str]]
    names: Sequence[str]
    more: int


def find_site(sites: Sequence[Site], wanted: Site | str) -> Site:
    """Return the one site that matches.

    Raises:
        NoSuchSiteError: None is.
        ValueError: Several are.
    """
    if isinstance(wanted, Site):
        if wanted not in sites:
            raise NoSuchSiteError(str(wanted), nearest(str(wanted), [str(s) for s in sites]))
        return wanted
    named = [site for site in sites if str(site) == wanted]
    pattern = Pattern.parse(wanted)
    found = named or [site for site in sites if pattern.matches(site)]
    if not found:
        raise NoSuchSiteError(wanted, nearest(wanted, [str(s) for s in sites]))
    if len(found) > 1:
        names = ", ".join(str(s) for s in found[:5])
        raise ValueError(f"{wanted!r} names {len(found)} sites; give one of them: {names}{', ...' * (len(found) > 5)}")
    return found[0]


def site_diagram(
    before: GraphView,
    after: GraphView,
    site: Site,
    hops: int,
    *,
    root_cause: Collection[str],
    records: Mapping[str, float],
    colors: Mapping[str, ColorSample],
) -> Diagram:
    """Return the diagram of a site's neighborhood.

    Args:
        before: The graph as it was.
        after: The rewritten graph.
        site: The site.
        hops: How many edges away.
        root_cause: Nodes of the op that made the first non-finite value.
        records: What the site reported last, by name.
        colors: By node; the rewritten graph has them.
    """
    anchor = before.anchors[site]
    own = [number for number, edit in enumerate(after.edits) if edit.site == site]
    inserted = [name for number in own for name in after.edits[number].nodes]
    sides = [_side("before", before, [anchor], hops), _side("after", after, [anchor, *inserted], hops)]
    kept = set(sides[1].edges)
    cut = {edge for edge in sides[0].edges if edge[0] == anchor and edge not in kept}
    items: list[Item] = []
    links: list[Link] = []
    for side in sides:
        items += _items(side, anchor, root_cause, colors if side.name == "after" else {})
        shown = set(side.names)
        pairs = [edge for edge in side.edges if edge[0] in shown and edge[1] in shown]
        for a, b in pairs:
            is_saved = b in side.graph_view.nodes and side.graph_view.nodes[a].lane != side.graph_view.nodes[b].lane
            kind = "cut" if side.name == "before" and (a, b) in cut else ("saved" if is_saved else "")
            links.append(Link(_key(side, a), _key(side, b), kind))
    empty = [number for number in own if not after.edits[number].nodes]
    items += [_empty_item(after, number, len(items)) for number in empty]
    caption = _caption(after, site, own, sides, records)
    return Diagram(str(site), ("before", "after"), items, links, caption, is_grid=False)


def _side(name: str, graph_view: GraphView, seeds: Sequence[str], hops: int) -> _Side:
    hidden = hidden_reshapes(graph_view) - set(seeds)
    edges = [
        *contracted_edges(graph_view, hidden),
        *((name, label) for label, name in visible_outputs(graph_view, graph_view.returned, hidden)),
    ]
    graph = nx.DiGraph(edges)
    graph.add_nodes_from(seeds)
    distance: dict[str, int] = {}
    for one_way in (graph, graph.reverse(copy=False)):  # what reads the site, and what it is computed from
        for number, seed in enumerate(seeds):
            cutoff = hops if number == 0 else min(hops, 1)  # around what was inserted only what it reads and feeds
            for other, far in nx.single_source_shortest_path_length(one_way, seed, cutoff=cutoff).items():
                distance[other] = min(far, distance.get(other, far))
    order = {n: number for number, n in enumerate([*graph_view.nodes, *(label for label, _ in graph_view.returned)])}
    others = sorted((n for n in distance if n not in seeds), key=lambda n: (distance[n], order[n]))
    names = [*seeds, *others[:MOST]]
    return _Side(name, graph_view, edges, sorted(names, key=order.__getitem__), max(0, len(others) - MOST))


def _items(side: _Side, anchor: str, root_cause: Collection[str], colors: Mapping[str, ColorSample]) -> list[Item]:
    rows = _depths(side)
    items = []
    for name in side.names:
        item = _item(side, name, rows[name])
        if name == anchor:
            item = replace(item, badge="the value of the site", classes=("anchor", *item.classes))
        if name in root_cause:
            item = replace(item, classes=(*item.classes, "root_cause"))
        if name in colors:
            item = replace(item, fill=colors[name].color, title=f"{item.title}\n{colors[name].text}")
        items.append(item)
    return items


def _key(side: _Side, name: str) -> str:
    """Return the key of a box; Graphviz would read a port name after a colon."""
    return f"{side.name} {name}".replace(":", " of ")


def _item(side: _Side, name: str, row: int) -> Item:
    if name not in side.graph_view.nodes:
        data = {"returned": name, "side": side.name}
        return Item(_key(side, name), side.name, row, name, "returned", "", (), name, data)
    node = side.graph_view.nodes[name]
    key, title = _key(side, name), describe_node(side.graph_view, node)
    data = {"node": name, "side": side.name}
    if node.edit >= 0:
        edit = side.graph_view.edits[node.edit]
        data |= {"edit": str(node.edit), "site": str(edit.site), "action": edit.text}
        text = f"{action_name(edit.action)}: {node.aten}"
        return Item(key, side.name, row, text, str(edit.site), "", ("inserted",), title, data)
    if node.mark:
        return Item(key, side.name, row, f"records: {node.aten}", "", "", ("records",), title, data)
    text = f"{node.op}: {node.aten}" if node.role == "op" else node.op_and_argument
    return Item(key, side.name, row, text, node.module_call or "(model)", "", (), title, data)


def _empty_item(graph_view: GraphView, number: int, row: int) -> Item:
    edit = graph_view.edits[number]
    data = {"edit": str(number), "site": str(edit.site), "action": edit.text, "side": "after"}
    title = f"{edit.text} at {edit.site}: no nodes of its own"
    return Item(
        f"after edit {number}",
        "after",
        row,
        action_name(edit.action),
        "no nodes",
        classes=("inserted",),
        title=title,
        data=data,
    )


def _depths(side: _Side) -> dict[str, int]:
    """Return the rows of the grid layout: each node below all that it reads."""
    shown = set(side.names)
    reads: dict[str, list[str]] = defaultdict(list)
    for a, b in side.edges:
        if a in shown and b in shown:
            reads[b].append(a)
    depth: dict[str, int] = {}
    for name in side.names:  # in execution order
        depth[name] = max((depth[r] + 1 for r in reads[name]), default=0)
    return depth


def _caption(
    graph_view: GraphView, site: Site, own: Iterable[int], sides: Sequence[_Side], records: Mapping[str, float]
) -> list[str]:
    sizes = ", ".join("?" if size is None else str(size) for size in site.shape)
    lines = [f"[{sizes}] {str(site.dtype).removeprefix('torch.')}"]
    if site.source:
        lines.append(site.source)
    lines += [f"edit: {graph_view.edits[n].text}, {len(graph_view.edits[n].nodes)} nodes" for n in own] or [
        "no edit stands here"
    ]
    lines += [f"{name} = {value:.6g}" for name, value in records.items()]
    lines += [f"{side.name}: {side.more} more nodes are not shown" for side in sides if side.more]
    return lines
