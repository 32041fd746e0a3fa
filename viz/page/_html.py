"""Writer of the page: one HTML file that works offline."""

from __future__ import annotations

import html
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from importlib import resources
from typing import Any
from xml.etree import ElementTree as ET

from gradrewrite.diagnostics.run_log import COUNTS, Run, Step, record_of
from gradrewrite.ir.graph_view import GraphView, action_text, read_graph, visible_outputs
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.monitoring.writers import plain_number
from gradrewrite.viz import _layout
from gradrewrite.viz._fonts import xml_safe
from gradrewrite.viz._ladder import Ladder
from gradrewrite.viz._layout import LadderLayout, boxes_of, inset
from gradrewrite.viz._metric_colors import SiteMetric, edit_key, palette
from gradrewrite.viz._scene import PAD, STYLE, Scene, add_arrow, draw_into
from gradrewrite.viz._theme import NOT_FINITE, PAPER, css_variables

VERSION = 2
MOST_STEPS = 200
MOST_ROWS = 60  # a larger ladder opens folded
MOST_LISTED = 40  # edits; longer lists open closed, by action
_CHIP = 22  # height of a node inside an unfolded box, in pixels
_ASSIGNED = re.compile(r"^\s*(\w+)(?:: \"[^\"]*\")? = ")


def write_page(
    graph: JointGraph,
    layout: LadderLayout,
    overview: Ladder,
    scene: Scene,
    *,
    title: str,
    notes: Sequence[str],
    run: Run | None,
    metrics: Sequence[SiteMetric],
    chosen: SiteMetric | None,
    curves: str,
    root_cause: Collection[str],
) -> str:
    """Return the page as HTML; ``curves`` is an image, or empty."""
    ladder, blamed = layout.ladder, frozenset(root_cause)
    parts = [part for row in ladder.rows for part in row]
    data = {
        "schema": f"gradrewrite/page/{VERSION}",
        "most_rows": MOST_ROWS,
        "geometry": _geometry(layout),
        **_layout_data(layout, root_cause),
        "nodes": _nodes(graph, ladder.graph_view),
        "edits": _edits(graph, ladder),
        "overview": _sites(overview),
        "blamed": [part.key for part in parts if blamed.intersection(part.nodes)],
        **_measurements(run, metrics),
        "color_by": chosen.metric if chosen is not None else "",
        "palette": {"stops": palette() if metrics else [], "bad": NOT_FINITE, "none": PAPER},
    }
    size = {
        "viewBox": f"0 0 {scene.width:g} {scene.height:g}",
        "width": f"{scene.width:g}",
        "height": f"{scene.height:g}",
    }
    svg = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "group", "aria-label": "overview", **size})
    draw_into(svg, scene)
    arrow = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "arrow", "aria-hidden": "true"})
    add_arrow(arrow)
    here = resources.files("gradrewrite.viz.page")
    fill = {
        "title": html.escape(xml_safe(title)),
        "style": STYLE + css_variables() + "\n" + here.joinpath("page.css").read_text(encoding="utf-8"),
        "arrow": ET.tostring(arrow, encoding="unicode"),
        "overview": ET.tostring(svg, encoding="unicode"),
        "summary": html.escape("; ".join(notes)),
        "edits": _edit_list(ladder),
        "curves": f'<button id="enlarge" type="button">enlarge</button>{curves}' if curves else "<p>no records</p>",
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "code": here.joinpath("page.js").read_text(encoding="utf-8"),
    }
    template = here.joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], template)


def _geometry(layout: LadderLayout) -> dict[str, Any]:
    """Return the lengths that the page adds up; no other drawing has any of its own."""
    columns = {
        column: {"x": x, "width": _layout.WIDTHS[column], "heading": _layout.HEADINGS[column]}
        for column, x in layout.columns.items()
    }
    lengths = {"top": 30.0, "header": _layout.HEADER, "foot": _layout.FOOT, "gap": _layout.GAP, "box": _layout.BOX}
    insets = [inset(depth) for depth in range(7)]
    return {**lengths, "chip": _CHIP, "pad": PAD, "width": layout.width, "columns": columns, "insets": insets}


def _layout_data(layout: LadderLayout, root_cause: Collection[str]) -> dict[str, Any]:
    """Return rows, boxes, bands and lines; a control point is (x, 0 or 1 for its end, share of the height)."""
    ladder, boxes = layout.ladder, boxes_of(layout, {}, root_cause)
    sites, parts = _sites(ladder), []
    for number, (row, offsets) in enumerate(zip(ladder.rows, layout.offsets, strict=True)):
        for part in row:
            box = boxes[part.key]
            found: dict[str, Any] = {
                "key": part.key,
                "row": number,
                "column": part.column,
                "y": offsets[part.key],
                "height": box.height,
            }
            found |= {"text": box.text, "small": box.small, "classes": " ".join(box.classes), "title": box.title}
            found = {key: xml_safe(value) if isinstance(value, str) else value for key, value in found.items()}
            shown = [name for name in part.nodes if name not in ladder.hidden] or part.nodes
            found |= {"nodes": part.nodes, "shown": shown, "edits": part.edits, "sites": sites[part.key]}
            parts.append(found)
    at = {part.key: n for n, part in enumerate(part for row in ladder.rows for part in row)}
    lines = [
        [
            at[route.edge.source],
            at[route.edge.target],
            route.edge.kind,
            route.edge.tensors,
            [[x, int(key == route.edge.target), share] for x, key, share in route.points],
        ]
        for route in layout.routes
    ]
    bands = [
        {"key": xml_safe(b.key), "name": xml_safe(b.name), "first": b.first, "last": b.last, "depth": b.depth}
        for b in ladder.bands
    ]
    return {"rows": layout.heights, "parts": parts, "lines": lines, "bands": bands}


def _sites(ladder: Ladder) -> dict[str, list[str]]:
    """Return for each box the sites of its edits, or else of its values."""
    view = ladder.graph_view
    edited = {edit.site for edit in view.edits}
    held: dict[str, list[str]] = defaultdict(list)
    for site, name in view.anchors.items():
        if site not in edited:
            held[name].append(str(site))
    found = {}
    for part in (part for row in ladder.rows for part in row):
        sites = [key for number in part.edits for key in (edit_key(number), *view.edits[number].record_sites)]
        sites = sites or [site for name in part.nodes for site in held.get(name, ())]
        found[part.key] = [xml_safe(site) for site in dict.fromkeys(sites)]
    return found


def _edit_list(ladder: Ladder) -> str:
    """Return the edits by action, each with the names of its nodes as plain text."""
    by_action: dict[str, list[str]] = defaultdict(list)
    for number, edit in enumerate(ladder.graph_view.edits):
        site, names = html.escape(xml_safe(str(edit.site))), html.escape(" ".join(edit.nodes) or "no nodes")
        title = f'title="{names}" data-jump="{number}" data-edit="{site}"'
        by_action[action_text(edit)].append(f'<li><button type="button" {title}>{site}</button></li>')
    is_open = " open" if len(ladder.graph_view.edits) <= MOST_LISTED or len(by_action) == 1 else ""
    groups = [
        f"<details{is_open}><summary>{html.escape(xml_safe(text))} ({len(items)})</summary>"
        f"<ol>{''.join(items)}</ol></details>"
        for text, items in by_action.items()
    ]
    return "".join(groups) or "<p>no edits</p>"


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


def _edits(graph: JointGraph, ladder: Ladder) -> list[dict[str, Any]]:
    """Return the edits with the edges they replaced, as pairs of boxes; records replace none."""
    after, before = ladder.graph_view, read_graph(graph.before or graph)
    at = {name: n for n, part in enumerate(p for row in ladder.rows for p in row) for name in (part.key, *part.nodes)}
    sources = dict(visible_outputs(before, [(str(e.site), before.anchors[e.site]) for e in after.edits], ladder.hidden))
    found = []
    old, new = (_readers(view, ladder.hidden) for view in (before, after))
    for edit in after.edits:
        site, anchor = str(edit.site), before.anchors[edit.site]
        source, still = sources[site], new(anchor)
        is_shown = source in at and any(name not in ladder.hidden for name in edit.nodes)
        cut = {(at[source], at[b]): None for b in old(anchor) if is_shown and b not in still and b in at}
        texts = {"site": xml_safe(site), "action": xml_safe(edit.text)}
        found.append({**texts, "nodes": edit.nodes, "replaced": [*cut]})
    return found


def _readers(view: GraphView, hidden: Collection[str]) -> Callable[[str], list[str]]:
    """Return a function from a node to the nodes and outputs that read it, through hidden ones."""
    users: dict[str, list[str]] = defaultdict(list)
    for source, reader in [*view.edges, *((name, f"returned {label}") for label, name in view.returned)]:
        users[source].append(reader)

    def readers(name: str) -> list[str]:
        found, reached = [], [name]
        for one in reached:  # grows
            for reader in dict.fromkeys(users[one]):
                if reader not in hidden:
                    found.append(reader)
                elif reader not in reached:
                    reached.append(reader)
        return found

    return readers


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
            "bins": one.bins(),
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
