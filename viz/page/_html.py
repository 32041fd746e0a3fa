"""Writer of the page: one HTML file that works offline."""

from __future__ import annotations

import html
import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from gradrewrite.diagnostics.nonfinite_steps import bad_steps
from gradrewrite.diagnostics.run_log import Run
from gradrewrite.ir.graph_view import GraphView, action_text, read_graph, visible_outputs
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.monitoring.writers import plain_number
from gradrewrite.viz import _layout
from gradrewrite.viz._curves import Curves, image_of
from gradrewrite.viz._fonts import xml_safe
from gradrewrite.viz._ladder import Ladder
from gradrewrite.viz._layout import LadderLayout, boxes_of, draw_ladder, inset
from gradrewrite.viz._metric_colors import SiteMetric, palette, sites_of
from gradrewrite.viz._scene import ARROW, PAD, STYLE, to_svg
from gradrewrite.viz._theme import NOT_FINITE, PAPER, css_variables

VERSION = 2
MOST_STEPS = 200
MOST_ROWS = 60  # a larger ladder opens folded
_CHIP = 22  # height of a node inside an unfolded box, in pixels
_ASSIGNED = re.compile(r"^\s*(\w+)(?:: \"[^\"]*\")? = ")


def write_page(
    graph: JointGraph,
    layout: LadderLayout,
    overview: LadderLayout,
    *,
    title: str,
    note: str,
    run: Run | None,
    metrics: Sequence[SiteMetric],
    color_by: str | None,
    root_cause: Collection[str],
) -> str:
    """Return the page as HTML."""
    ladder = layout.ladder
    data = {
        "schema": f"gradrewrite/page/{VERSION}",
        "most_rows": MOST_ROWS,
        "geometry": _geometry(layout),
        **_layout_data(layout, root_cause),
        "nodes": _nodes(graph, ladder.graph_view),
        "edits": _edits(graph, ladder),
        "overview": [*sites_of(overview.ladder).values()],
        **_measurements(run, metrics),
        "color_by": color_by or "",
        "palette": {"stops": palette() if metrics else [], "bad": NOT_FINITE, "none": PAPER},
    }
    curves = "<p>no records</p>"
    if run is not None:
        image = image_of(Curves(run, "").figure(), "curves of the run")
        curves = f'<button id="enlarge" type="button">enlarge</button>{image}'
    here = resources.files("gradrewrite.viz.page")
    fill = {
        "title": html.escape(title),
        "style": STYLE + css_variables() + "\n" + here.joinpath("page.css").read_text(encoding="utf-8"),
        "arrow": ARROW,
        "overview": to_svg(draw_ladder(overview, root_cause=root_cause), label="overview"),
        "summary": html.escape(note),
        "curves": curves,
        "data": json.dumps(_safe(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "code": here.joinpath("page.js").read_text(encoding="utf-8"),
    }
    template = here.joinpath("page.html").read_text(encoding="utf-8")
    return xml_safe(re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], template))


def _geometry(layout: LadderLayout) -> dict[str, Any]:
    """Return the lengths that the page adds up; no other drawing has any of its own."""
    columns = {
        column: {"x": x, "width": _layout.WIDTHS[column], "heading": _layout.HEADINGS[column]}
        for column, x in layout.columns.items()
    }
    lengths = {"top": 30.0, "header": _layout.HEADER, "foot": _layout.FOOT, "gap": _layout.GAP, "box": _layout.BOX}
    insets = [inset(depth) for depth in range(7)]
    return {**lengths, "chip": _CHIP, "pad": PAD, "width": layout.width, "columns": columns, "insets": insets}


def _safe(value: Any) -> Any:
    """Replace the characters forbidden in XML, in nested data."""
    if isinstance(value, dict):
        return {_safe(key): _safe(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(one) for one in value]
    return xml_safe(value) if isinstance(value, str) else value


def _layout_data(layout: LadderLayout, root_cause: Collection[str]) -> dict[str, Any]:
    """Return rows, boxes, bands and lines; a control point is (x, 0 or 1 for its end, share of the height)."""
    ladder, boxes = layout.ladder, boxes_of(layout, None, root_cause)
    sites, parts = sites_of(ladder), []
    for number, (row, offsets) in enumerate(zip(ladder.rows, layout.offsets, strict=True)):
        for part in row:
            box = boxes[part.key]
            parts.append(
                {
                    "key": part.key,
                    "row": number,
                    "column": part.column,
                    "y": offsets[part.key],
                    "height": box.height,
                    "text": box.text,
                    "small": box.small,
                    "classes": " ".join(box.classes),
                    "title": box.title,
                    "nodes": part.nodes,
                    "shown": [name for name in part.nodes if name not in ladder.hidden] or part.nodes,
                    "edits": part.edits,
                    "sites": sites[part.key],
                }
            )
    at = {part.key: n for n, part in enumerate(part for row in ladder.rows for part in row)}
    lines = [
        [
            at[edge.source],
            at[edge.target],
            edge.kind,
            edge.tensors,
            [[x, int(key == edge.target), share] for x, key, share in points],
        ]
        for edge, points in layout.routes
    ]
    return {"rows": layout.heights, "parts": parts, "lines": lines, "bands": list(map(asdict, ladder.bands))}


def _nodes(graph: JointGraph, graph_view: GraphView) -> dict[str, dict[str, Any]]:
    code = {}
    for line in graph.code.splitlines():
        assigned = _ASSIGNED.match(line)
        if assigned is not None:
            code[assigned[1]] = line.strip()
    return {
        name: {
            "target": node.target,
            "op": node.op_and_argument,
            "module": node.module_call,
            "shape": node.shape,
            "dtype": node.dtype,
            "source": node.source,
            "edit": node.edit,
            "code": code.get(name, ""),
        }
        for name, node in graph_view.nodes.items()
    }


def _edits(graph: JointGraph, ladder: Ladder) -> list[dict[str, Any]]:
    """Return the edits with the edges they replaced, as pairs of boxes; records replace none."""
    after, before = ladder.graph_view, read_graph(graph.before or graph)
    at = {name: n for n, part in enumerate(p for row in ladder.rows for p in row) for name in (part.key, *part.nodes)}
    sources = dict(visible_outputs(before, [(str(e.site), before.anchors[e.site]) for e in after.edits], ladder.hidden))
    old, new, found = _users(before), _users(after), []
    for edit in after.edits:
        anchor, source = before.anchors[edit.site], sources[str(edit.site)]
        is_shown = source in at and any(name not in ladder.hidden for name in edit.nodes)
        still = _readers(new, anchor, ladder.hidden)
        gone = [name for name in _readers(old, anchor, ladder.hidden) if name in at and name not in still]
        cut = dict.fromkeys((at[source], at[name]) for name in gone) if is_shown else {}
        found.append({"site": str(edit.site), "action": action_text(edit), "nodes": edit.nodes, "replaced": [*cut]})
    return found


def _users(view: GraphView) -> dict[str, list[str]]:
    users: dict[str, list[str]] = defaultdict(list)
    for source, reader in [*view.edges, *((name, f"returned {label}") for label, name in view.returned)]:
        users[source].append(reader)
    return users


def _readers(users: Mapping[str, Sequence[str]], name: str, hidden: Collection[str]) -> list[str]:
    """Return the visible readers of a node, through hidden ones."""
    reached, through = dict.fromkeys(users[name]), [*users[name]]
    for reader in through:  # grows
        if reader in hidden:
            through += [one for one in users[reader] if one not in reached]
            reached |= dict.fromkeys(users[reader])
    return [reader for reader in reached if reader not in hidden]


def _measurements(run: Run | None, metrics: Sequence[SiteMetric]) -> dict[str, Any]:
    """Return the records of at most ``MOST_STEPS`` steps, non-finite ones included, and the metrics of these steps."""
    if run is None:
        return {"records": {"steps": [], "values": {}}, "metrics": []}
    numbers = _sample(run)
    values: dict[str, dict[str, list[float | str | None]]] = defaultdict(dict)
    for address, series in run.series.items():
        name, _, site = address.partition("@")
        known = dict(zip(series.steps, series.values, strict=True))
        values[site][name] = [_number(known.get(n)) for n in numbers]
    shown = [
        {
            "name": one.metric,
            "weak": one.weak,
            "strong": one.strong,
            "legend": [[entry.color, entry.text] for entry in one.legend()],
            "values": {
                site: {"total": _number(one.totals[site]), "steps": [_number(known.get(n)) for n in numbers]}
                for site, known in one.by_site.items()
            },
        }
        for one in metrics
    ]
    return {"records": {"steps": numbers, "values": values}, "metrics": shown}


def _sample(run: Run) -> list[int]:
    """Sample steps at equal distances, and of the non-finite ones."""
    numbers = [step.step for step in run.steps]
    if len(numbers) <= MOST_STEPS:
        return numbers
    bad = [one.step.step for one in bad_steps(run)][: MOST_STEPS // 2]
    num_even = MOST_STEPS - len(bad)
    return sorted({*bad, *(numbers[round(n * (len(numbers) - 1) / (num_even - 1))] for n in range(num_even))})


def _number(value: float | None) -> float | str | None:
    return None if value is None else plain_number(float(f"{value:.6g}"))
