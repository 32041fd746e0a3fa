"""The page: one file that works offline, with the ladder, its data and a little code in it."""

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

from gradrewrite.history import COUNTS, Run, Step, last_run, parse
from gradrewrite.joint import JointGraph
from gradrewrite.policy import GroupAction
from gradrewrite.sinks import plain_number
from gradrewrite.viz import _ladder_layout
from gradrewrite.viz._graph_view import Net, plain, run_name
from gradrewrite.viz._ladder_layout import Ladder, Spot, lane_of
from gradrewrite.viz._metric_colors import NOT_FINITE, Measured, nodes_of_sites, palette
from gradrewrite.viz._scene import STYLE, Picture, draw_into

VERSION = 1
MOST_STEPS = 200
MOST_UNFOLDED = 700  # boxes; a larger graph opens folded
MOST_LISTED = 40  # edits; longer lists open closed, by action
_ASSIGNED = re.compile(r"^\s*(\w+)(?:: \"[^\"]*\")? = ")


def write_page(
    graph: JointGraph,
    ladder: Ladder,
    picture: Picture,
    *,
    run: Run | None,
    metrics: Sequence[Measured],
    chosen: Measured | None,
    curves: str,
    view: str,
    site: str,
) -> str:
    """The page as HTML.

    Args:
        graph: The graph.
        ladder: Its layout.
        picture: Its ladder without colours or legend.
        run: What was recorded; None without a monitor.
        metrics: What colours can say.
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
        **_layout(ladder, picture),
        "nodes": _nodes(graph, ladder.net),
        "edits": [_edit(edit) for edit in ladder.net.edits],
        **_measurements(run, metrics),
        "color_by": chosen.metric if chosen is not None else "",
        "palette": {"stops": palette() if metrics else [], "bad": NOT_FINITE},
    }
    svg = ET.Element("svg", {"id": "graph", "xmlns": "http://www.w3.org/2000/svg", "role": "group"})
    svg.set("aria-label", plain(picture.title))
    draw_into(svg, picture)
    here = resources.files("gradrewrite.viz.page")
    image = base64.b64encode(curves.encode()).decode()
    picture_of = f'<img alt="curves of the run" src="data:image/svg+xml;base64,{image}">'
    parts = {
        "title": html.escape(plain(picture.title)),
        "style": STYLE + here.joinpath("page.css").read_text(encoding="utf-8"),
        "graph": ET.tostring(svg, encoding="unicode"),
        "summary": html.escape(_summary(ladder)),
        "curves": f'<button id="enlarge" type="button">enlarge</button>{picture_of}' if curves else "<p>no records</p>",
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "code": here.joinpath("page.js").read_text(encoding="utf-8"),
    }
    template = here.joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _summary(ladder: Ladder) -> str:
    net = ladder.net
    hidden = f"; {len(ladder.hidden)} ops that only reshape are not shown" if ladder.hidden else ""
    return f"{len(net.nodes)} nodes, {len(net.edits)} edits, {net.num_inserted} nodes inserted{hidden}"


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
        "forward": _ladder_layout.CENTRE_LEFT - _ladder_layout.WIDTH,
        "backward": _ladder_layout.RIGHT,
    }


def _layout(ladder: Ladder, picture: Picture) -> dict[str, Any]:
    """Rows, bands, boxes in the order of the picture's elements, and lines."""
    sites = defaultdict(list)
    for site, names in nodes_of_sites(ladder.net).items():
        for name in names:
            sites[name].append(site)
    spots = {spot.key: spot for spot in ladder.spots}
    keys = _in_order_of_elements(picture)
    drawn = {box.key: box for box in picture.boxes}
    at = {key: number for number, key in enumerate(keys)}
    boxes = []
    for key in keys:
        box, spot = drawn[key], spots[key]
        shown = {
            "key": plain(key),
            "row": spot.row,
            "line": spot.line,
            "x": box.x,
            "width": box.width,
            "height": box.height,
        }
        shown |= {"lane": lane_of(spot), "pill": "pill" in box.classes, "text": plain(box.title).lower()}
        shown |= {
            "inserted": bool(spot.node and spot.node.mark) or spot.edit >= 0,
            "sites": _sites_of(ladder.net, spot, sites),
        }
        boxes.append(shown)
    lines = [[at[n.source], at[n.target], n.classes[0] if n.classes else ""] for n in picture.lines]
    bands = [
        {
            "key": plain("/".join(map(run_name, band.path))),
            "name": plain(run_name(band.path[-1])),
            "first": band.first,
            "last": band.last,
            "depth": band.depth,
        }
        for band in ladder.bands
    ]
    return {"rows": list(ladder.lines), "boxes": boxes, "lines": lines, "bands": bands}


def _sites_of(net: Net, spot: Spot, sites: Mapping[str, list[str]]) -> list[str]:
    found = sites.get(spot.node.name, []) if spot.node is not None else []
    if spot.edit >= 0:
        edit = net.edits[spot.edit]
        group = [f"group:{edit.action.group}"] if isinstance(edit.action, GroupAction) else []
        found = [*found, str(edit.site), *group]
    return [plain(site) for site in dict.fromkeys(found)]


def _in_order_of_elements(picture: Picture) -> list[str]:
    """Keys of the boxes as they stand in the file: those of one edit are together."""
    groups: dict[str, list[str]] = {}
    for box in picture.boxes:
        groups.setdefault(box.data.get("edit", f"alone {box.key}"), []).append(box.key)
    return [key for keys in groups.values() for key in keys]


def _nodes(graph: JointGraph, net: Net) -> dict[str, dict[str, Any]]:
    code = {}
    for line in graph.code.splitlines():
        assigned = _ASSIGNED.match(line)
        if assigned is not None:
            code[assigned[1]] = line.strip()
    return {
        name: {
            "target": node.target,
            "op": plain(f"{node.origin.op} {node.origin.name}".strip()),
            "module": plain(node.module),
            "shape": node.shape,
            "dtype": node.dtype,
            "source": plain(node.origin.source),
            "edit": node.edit,
            "code": plain(code.get(name, "")),
        }
        for name, node in net.nodes.items()
    }


def _edit(edit: Any) -> dict[str, Any]:
    return {"site": plain(str(edit.site)), "action": plain(edit.text), "nodes": list(edit.nodes)}


def _measurements(run: Run | None, metrics: Sequence[Measured]) -> dict[str, Any]:
    """Records of at most ``MOST_STEPS`` steps, those that were not finite among them, and what colours say of them."""
    steps = _sample(run) if run is not None else []
    numbers = [step.step for step in steps]
    values: dict[str, dict[str, list[float | str | None]]] = defaultdict(dict)
    for address, series in (run.series if run is not None else {}).items():
        name, _, site = address.partition("@")
        known = dict(zip(series.steps, series.values, strict=True))
        values[plain(site)][plain(name)] = [_number(known.get(n)) for n in numbers]
    shown = [
        {
            "name": one.metric,
            "low": one.low,
            "high": one.high,
            "legend": [[swatch.colour, swatch.text] for swatch in one.legend()],
            "values": {
                plain(site): {"total": _number(one.totals[site]), "steps": [_number(known.get(n)) for n in numbers]}
                for site, known in one.by_site.items()
            },
        }
        for one in metrics
    ]
    return {"records": {"steps": numbers, "values": values}, "metrics": shown}


def _sample(run: Run) -> list[Step]:
    """Steps at equal distances, and all that are not finite as far as there is room."""
    if len(run.steps) <= MOST_STEPS:
        return list(run.steps)
    bad = [n for n, step in enumerate(run.steps) if _is_bad(step)][: MOST_STEPS // 2]
    even = {round(n * (len(run.steps) - 1) / (MOST_STEPS - len(bad) - 1)) for n in range(MOST_STEPS - len(bad))}
    return [run.steps[n] for n in sorted(even | set(bad))]


def _is_bad(step: Step) -> bool:
    return any(
        not math.isfinite(v) or (v > 0 and parse(a, step.records).record in COUNTS) for a, v in step.records.items()
    )


def _number(value: float | None) -> float | str | None:
    if value is None:
        return None
    return plain_number(float(f"{value:.6g}")) if math.isfinite(value) else plain_number(value)


def run_of(steps: Sequence[Step]) -> Run | None:
    """The last run; None if nothing was recorded."""
    return last_run(steps) if steps else None
