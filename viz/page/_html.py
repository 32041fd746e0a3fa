"""Writer of the page: one HTML file that works offline."""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any
from xml.etree import ElementTree as ET

from gradrewrite.diagnostics.run_log import COUNTS, Run, Step, record_of
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.record_layout import RecordKey
from gradrewrite.monitoring.writers import plain_number
from gradrewrite.policy.actions import GroupAction
from gradrewrite.viz import _ladder_layout
from gradrewrite.viz._graph_view import GraphView, call_name, xml_safe
from gradrewrite.viz._ladder_layout import LadderCell, LadderLayout, lane_of
from gradrewrite.viz._metric_colors import SiteMetric, nodes_of_sites, palette
from gradrewrite.viz._scene import STYLE, Scene, draw_into
from gradrewrite.viz._theme import NOT_FINITE, PAPER, css_variables

VERSION = 1
MOST_STEPS = 200
MOST_UNFOLDED = 700  # boxes; a larger graph opens folded
MOST_LISTED = 40  # edits; longer lists open closed, by action
_ASSIGNED = re.compile(r"^\s*(\w+)(?:: \"[^\"]*\")? = ")


def write_page(
    graph: JointGraph,
    ladder: LadderLayout,
    scene: Scene,
    *,
    run: Run | None,
    metrics: Sequence[SiteMetric],
    chosen: SiteMetric | None,
    curves: str,
    view: str,
    site: str,
) -> str:
    """Return the page as HTML.

    Args:
        graph: The graph.
        ladder: Its layout.
        scene: Its ladder without colors or legend.
        run: What was recorded; None without a monitor.
        metrics: What colors can say.
        chosen: What they say first.
        curves: The curves of the run as SVG; ``""`` without.
        view: What is asked for: ``"overview"`` opens folded, ``"site"`` at a site.
        site: That site.
    """
    data = {
        "schema": f"gradrewrite/page/{VERSION}",
        "view": view,
        "site": site,
        "most_unfolded": MOST_UNFOLDED,
        "most_listed": MOST_LISTED,
        "geometry": _geometry(),
        **_layout(ladder, scene),
        "nodes": _nodes(graph, ladder.graph_view),
        "edits": [_edit(edit) for edit in ladder.graph_view.edits],
        **_measurements(run, metrics),
        "color_by": chosen.metric if chosen is not None else "",
        "palette": {"stops": palette() if metrics else [], "bad": NOT_FINITE, "none": PAPER},
    }
    svg = ET.Element("svg", {"id": "graph", "xmlns": "http://www.w3.org/2000/svg", "role": "group"})
    svg.set("aria-label", xml_safe(scene.title))
    draw_into(svg, scene)
    here = resources.files("gradrewrite.viz.page")
    image = base64.b64encode(curves.encode()).decode()
    picture_of = f'<img alt="curves of the run" src="data:image/svg+xml;base64,{image}">'
    parts = {
        "title": html.escape(xml_safe(scene.title)),
        "style": STYLE + css_variables() + "\n" + here.joinpath("page.css").read_text(encoding="utf-8"),
        "graph": ET.tostring(svg, encoding="unicode"),
        "summary": html.escape(_summary(ladder)),
        "curves": f'<button id="enlarge" type="button">enlarge</button>{picture_of}' if curves else "<p>no records</p>",
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "code": here.joinpath("page.js").read_text(encoding="utf-8"),
    }
    template = here.joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _summary(ladder: LadderLayout) -> str:
    hidden = f"; {len(ladder.hidden)} ops that only reshape are not shown" if ladder.hidden else ""
    return f"{ladder.graph_view.summary}{hidden}"


def _geometry() -> dict[str, float]:
    return {
        "width": _ladder_layout.TOTAL,
        "top": 10,
        "pitch": _ladder_layout.PITCH,
        "header": _ladder_layout.HEADER,
        "foot": _ladder_layout.FOOT,
        "far": _ladder_layout.FAR,
        "box": _ladder_layout.WIDTH,
        "high": _ladder_layout.HEIGHT,
        "forward": _ladder_layout.CENTER_LEFT - _ladder_layout.WIDTH,
        "backward": _ladder_layout.RIGHT,
    }


def _layout(ladder: LadderLayout, scene: Scene) -> dict[str, Any]:
    """Return rows, bands, boxes in the order of the scene's elements, and lines."""
    sites = defaultdict(list)
    for site, names in nodes_of_sites(ladder.graph_view).items():
        for name in names:
            sites[name].append(site)
    cells = {cell.key: cell for cell in ladder.cells}
    keys = _in_order_of_elements(scene)
    drawn = {box.key: box for box in scene.boxes}
    at = {key: number for number, key in enumerate(keys)}
    boxes = []
    for key in keys:
        box, cell = drawn[key], cells[key]
        shown = {
            "key": xml_safe(key),
            "row": cell.row,
            "line": cell.line,
            "x": box.x,
            "width": box.width,
            "height": box.height,
        }
        shown |= {"lane": lane_of(cell), "pill": "pill" in box.classes, "text": xml_safe(box.title).lower()}
        shown |= {
            "inserted": bool(cell.node and cell.node.mark) or cell.edit >= 0,
            "sites": _sites_of(ladder.graph_view, cell, sites),
        }
        boxes.append(shown)
    lines = [[at[n.source], at[n.target], n.classes[0] if n.classes else ""] for n in scene.lines]
    bands = [
        {
            "key": xml_safe("/".join(map(call_name, band.path))),
            "name": xml_safe(call_name(band.path[-1])),
            "first": band.first,
            "last": band.last,
            "depth": band.depth,
        }
        for band in ladder.bands
    ]
    return {"rows": list(ladder.lines), "boxes": boxes, "lines": lines, "bands": bands}


def _sites_of(graph_view: GraphView, cell: LadderCell, sites: Mapping[str, list[str]]) -> list[str]:
    found = sites.get(cell.node.name, []) if cell.node is not None else []
    if cell.edit >= 0:
        edit = graph_view.edits[cell.edit]
        group = [f"group:{edit.action.group}"] if isinstance(edit.action, GroupAction) else []
        found = [*found, str(edit.site), *group]
    return [xml_safe(site) for site in dict.fromkeys(found)]


def _in_order_of_elements(scene: Scene) -> list[str]:
    """Return the keys of the boxes in the order of the file: those of one edit are together."""
    groups: dict[str, list[str]] = {}
    for box in scene.boxes:
        groups.setdefault(box.data.get("edit", f"alone {box.key}"), []).append(box.key)
    return [key for keys in groups.values() for key in keys]


def _nodes(graph: JointGraph, graph_view: GraphView) -> dict[str, dict[str, Any]]:
    code = {}
    for line in graph.code.splitlines():
        assigned = _ASSIGNED.match(line)
        if assigned is not None:
            code[assigned[1]] = line.strip()
    return {
        name: {
            "target": node.target,
            "op": xml_safe(node.op_and_argument),
            "module": xml_safe(node.module_call),
            "shape": node.shape,
            "dtype": node.dtype,
            "source": xml_safe(node.source),
            "edit": node.edit,
            "code": xml_safe(code.get(name, "")),
        }
        for name, node in graph_view.nodes.items()
    }


def _edit(edit: Any) -> dict[str, Any]:
    return {"site": xml_safe(str(edit.site)), "action": xml_safe(edit.text), "nodes": list(edit.nodes)}


def _measurements(run: Run | None, metrics: Sequence[SiteMetric]) -> dict[str, Any]:
    """Return the records of at most ``MOST_STEPS`` steps, non-finite ones included, and the metrics of these steps."""
    steps = _sample(run) if run is not None else []
    numbers = [step.step for step in steps]
    values: dict[str, dict[str, list[float | str | None]]] = defaultdict(dict)
    for address, series in (run.series if run is not None else {}).items():
        name, _, site = address.partition("@")
        known = dict(zip(series.steps, series.values, strict=True))
        values[xml_safe(site)][xml_safe(name)] = [_number(known.get(n)) for n in numbers]
    shown = [
        {
            "name": one.metric,
            "low": one.low,
            "high": one.high,
            "legend": [[entry.color, entry.text] for entry in one.legend()],
            "values": {
                xml_safe(site): {"total": _number(one.totals[site]), "steps": [_number(known.get(n)) for n in numbers]}
                for site, known in one.by_site.items()
            },
        }
        for one in metrics
    ]
    return {"records": {"steps": numbers, "values": values}, "metrics": shown}


def _sample(run: Run) -> list[Step]:
    """Sample steps at equal distances, and as many non-finite ones as fit."""
    if len(run.steps) <= MOST_STEPS:
        return list(run.steps)
    bad = [n for n, step in enumerate(run.steps) if _is_bad(step)][: MOST_STEPS // 2]
    even = {round(n * (len(run.steps) - 1) / (MOST_STEPS - len(bad) - 1)) for n in range(MOST_STEPS - len(bad))}
    return [run.steps[n] for n in sorted(even | set(bad))]


def _is_bad(step: Step) -> bool:
    records = ((record_of(RecordKey.parse(text), step.records), value) for text, value in step.records.items())
    return any(not math.isfinite(value) or (value > 0 and record in COUNTS) for record, value in records)


def _number(value: float | None) -> float | str | None:
    if value is None:
        return None
    return plain_number(float(f"{value:.6g}")) if math.isfinite(value) else plain_number(value)
