"""Writer of the page: one HTML file that works offline, with the graph, the curves and the report of a run as tabs."""

from __future__ import annotations

import html
import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from gradrewrite._utils.grouping import grouped
from gradrewrite.diagnostics.growth import judged_steps
from gradrewrite.diagnostics.nonfinite_steps import bad_steps
from gradrewrite.diagnostics.run_log import BACKWARD, Run
from gradrewrite.diagnostics.site_health import backward_order
from gradrewrite.diagnostics.stacked_records import plain_number
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.viz import _layout
from gradrewrite.viz import _theme as theme
from gradrewrite.viz._fonts import xml_safe
from gradrewrite.viz._graph_view import GraphView, action_text, read_graph, visible_outputs
from gradrewrite.viz._ladder import Ladder, Part, only_measures, template
from gradrewrite.viz._layout import LadderLayout, boxes_of, draw_ladder, inset
from gradrewrite.viz._metric_colors import SiteMetric, sites_of
from gradrewrite.viz._norms import HEIGHT, SiteNorms, differing_siblings
from gradrewrite.viz._panels import Panel
from gradrewrite.viz._scene import ARROW, PAD, PAGE_STYLE, to_svg

VERSION = 3
MOST_STEPS = 200
MOST_CALLS = 64  # of one site; rows of the heat map
MOST_POINTS = 1000  # of one line of a chart
MOST_ROWS = 60  # a larger ladder opens folded
_CHIP = 22  # height of a node inside an unfolded box, in pixels
_ASSIGNED = re.compile(r"^\s*(\w+)(?:: \"[^\"]*\")? = ")
_CSS = {getattr(theme, name): theme.css_variable(name) for name in ("PAPER", "NOT_FINITE")}
_CSS |= {color: f"var(--s{n})" for n, color in enumerate(theme.palette())}
_SIZES = ("norm", "total_norm", "max_abs")  # records of the heat map, of each site the first


@dataclass(frozen=True)
class GraphTabs:
    """The graph for a page: both views and the meaning of colors."""

    graph: JointGraph
    layout: LadderLayout
    overview: LadderLayout
    note: str
    metrics: Sequence[SiteMetric]
    color_by: str | None
    root_cause: Collection[str]


def write_page(
    title: str,
    *,
    run: Run | None = None,
    panels: Sequence[Panel] = (),
    report: str = "",
    graph: GraphTabs | None = None,
    reload: str = "",
    is_report_first: bool = False,
) -> str:
    """Return a page as HTML.

    Args:
        title: Its title.
        run: The run whose records are in it.
        panels: Curves.
        report: Elements of the tabs ``report`` and ``curves``; ``""`` without them.
        graph: The graph for the tabs ``overview`` and ``ladder``.
        reload: Elements of the head that read the file again.
        is_report_first: Whether the page opens with the report, and not with the overview.
    """
    here = resources.files("gradrewrite.viz.page")
    text = {name: here.joinpath(name).read_text(encoding="utf-8") for name in _FILES}
    records, numbers = _records(run)
    data: dict[str, Any] = {"schema": f"gradrewrite/page/{VERSION}", "records": records, "norms": None}
    data["panels"] = [_panel(panel) for panel in panels]
    data["names"] = _names(run, [numbers, *(line["steps"] for panel in data["panels"] for line in panel["lines"])])
    tools, graph_panels, aside = text["graph.html"].split("<!-- panels -->")[0], "", ""
    if graph is not None:
        data |= _graph_data(graph, run, numbers)
        graph_panels, _, aside = text["graph.html"].partition("<!-- panels -->")[2].partition("<!-- aside -->")
        overview = draw_ladder(graph.overview, root_cause=graph.root_cause, is_page=True)
        graph_panels = graph_panels.replace("{{overview}}", to_svg(overview, label="overview"))
    both = [("report", "curves") if report else (), ("overview", "ladder") if graph else ()]
    own = [name for names in (both if is_report_first else both[::-1]) for name in names]
    fill = {
        "title": html.escape(title),
        "reload": reload,
        "style": PAGE_STYLE + theme.css_variables() + "\n" + text["page.css"],
        "arrow": ARROW,
        "tabs": "".join(_TAB.format(name=name) for name in own),
        "tools": tools if graph is not None else "",
        "summary": html.escape(graph.note) if graph is not None else "",
        "panels": graph_panels + report,
        "aside": aside,
        "data": json.dumps(_safe(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "scripts": "".join(
            f"<script>{text[name]}</script>" for name in ("run.js", *(("graph.js",) if graph is not None else ()))
        ),
    }
    return xml_safe(re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], text["page.html"]))


_FILES = ("page.html", "page.css", "graph.html", "run.js", "graph.js")
_TAB = '<button id="tab-{name}" type="button" role="tab" aria-controls="{name}">{name}</button>'


def _graph_data(graph: GraphTabs, run: Run | None, numbers: Sequence[int]) -> dict[str, Any]:
    layout, norms = graph.layout, graph.layout.norms
    return {
        "most_rows": MOST_ROWS,
        "geometry": _geometry(layout),
        **_layout_data(layout, graph.root_cause),
        **_nodes(graph.graph, layout.ladder.graph_view),
        "edits": _edits(graph.graph, layout.ladder),
        "overview": _overview_data(graph.overview),
        "norms": None if norms is None else _norms(norms, numbers),
        "metrics": [_metric(one, numbers) for one in graph.metrics] if run is not None else [],
        "color_by": graph.color_by or "",
    }


def _norms(norms: SiteNorms, numbers: Sequence[int]) -> dict[str, Any]:
    places = {"start": numbers.index(norms.start), "now": numbers.index(norms.now)}
    ends = {"low": norms.scale.weak, "high": norms.scale.strong}
    return {"record": norms.record, **ends, "bounds": norms.bounds, **places}


def _overview_data(layout: LadderLayout) -> list[dict[str, Any]]:
    sites = sites_of(layout.ladder)
    return [
        {
            **_inside(layout, part, sites),
            "small": part.small,
            "width": _layout.WIDTHS[part.column],
            "isIdle": "idle" in part.classes,
        }
        for part in layout.ladder.parts
    ]


def _inside(layout: LadderLayout, part: Part, sites: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the sites of a box, and of its cells."""
    return {"sites": sites[part.key], "cells": [(cell.name, cell.sites) for cell in layout.cells.get(part.key, ())]}


def _geometry(layout: LadderLayout) -> dict[str, Any]:
    """Return the lengths that the page adds up; no other drawing has any of its own."""
    columns = {
        column: {"x": x, "width": _layout.WIDTHS[column], "heading": _layout.HEADINGS[column]}
        for column, x in layout.columns.items()
    }
    heights = {"top": 30.0, "header": _layout.HEADER, "foot": _layout.FOOT, "gap": _layout.GAP, "box": _layout.BOX}
    inside = {"bar": HEIGHT, "chip": _CHIP, "pad": PAD, "insets": [inset(depth) for depth in range(7)]}
    return {**heights, **inside, "width": layout.width, "columns": columns}


def _safe(value: Any) -> Any:
    """Replace the characters forbidden in XML, in nested data."""
    if isinstance(value, dict):
        return {_safe(key): _safe(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(one) for one in value]
    return xml_safe(value) if isinstance(value, str) else value


def _layout_data(layout: LadderLayout, root_cause: Collection[str]) -> dict[str, Any]:
    """Return rows, boxes, bands and lines; a control point is (x, 0 or 1 for its end, share of the height)."""
    ladder, boxes = layout.ladder, boxes_of(layout, None, root_cause, is_page=True)
    sites, parts = sites_of(ladder), []
    for number, (row, offsets) in enumerate(zip(ladder.rows, layout.offsets, strict=True)):
        for part in row:
            box = boxes[part.key]
            place = {"row": number, "column": part.column, "y": offsets[part.key], "height": box.height}
            texts = {"text": box.text, "small": box.small, "classes": " ".join(box.classes), "title": box.title}
            shown = [name for name in part.nodes if name not in ladder.hidden] or part.nodes
            nodes = {"nodes": part.nodes, "shown": shown, "edits": part.edits}
            parts.append({"key": part.key, **place, **texts, **nodes, **_inside(layout, part, sites)})
    at = {part["key"]: n for n, part in enumerate(parts)}
    lines = []
    for edge, points in layout.routes:
        controls = [[x, int(key == edge.target), share] for x, key, share in points]
        lines.append([at[edge.source], at[edge.target], edge.kind, edge.tensors, controls])
    apart = _bands_apart(layout)
    bands = [{**asdict(band), "isApart": number in apart} for number, band in enumerate(ladder.bands)]
    return {"rows": layout.heights, "parts": parts, "lines": lines, "bands": bands}


def _bands_apart(layout: LadderLayout) -> set[int]:
    """Return the numbers of the bands of blocks that differ from their siblings."""
    bands, norms = layout.ladder.bands, layout.norms
    if norms is None:
        return set()
    cells = [[c for part in row for c in layout.cells.get(part.key, ())] for row in layout.ladder.rows]

    def inside(number: int) -> list[float]:
        band = bands[number]
        sites = [site for row in cells[band.first : band.last + 1] for cell in row for site in cell.sites]
        return norms.values(sites, norms.now)

    names = [(band.depth, template(band.name.partition("#")[0])) for band in bands]
    return differing_siblings(grouped((name, number) for number, name in enumerate(names)).values(), inside)


def _nodes(graph: JointGraph, graph_view: GraphView) -> dict[str, Any]:
    """Return the nodes, with places in ``sources`` and ``modules`` for shared texts."""
    lines = graph.code.splitlines()
    code = {assigned[1]: line.strip() for line in lines if (assigned := _ASSIGNED.match(line)) is not None}
    sources = {text: n for n, text in enumerate(dict.fromkeys(node.source for node in graph_view.nodes.values()))}
    modules = {text: n for n, text in enumerate(dict.fromkeys(node.module_call for node in graph_view.nodes.values()))}
    nodes = {
        name: {
            "target": node.target,
            "module": modules[node.module_call],
            "value": f"[{node.shape}] {node.dtype}" if node.shape or node.dtype else "",
            "source": sources[node.source],
            "code": code.get(name, ""),
        }
        for name, node in graph_view.nodes.items()
    }
    return {"nodes": nodes, "sources": [*sources], "modules": [*modules]}


def _edits(graph: JointGraph, ladder: Ladder) -> list[dict[str, Any]]:
    """Return the edits with the edges they replaced, as pairs of boxes; records replace none."""
    after, before = ladder.graph_view, read_graph(graph.before or graph)
    at = {name: n for n, part in enumerate(ladder.parts) for name in (part.key, *part.nodes)}
    sources = dict(visible_outputs(before, [(str(e.site), before.anchors[e.site]) for e in after.edits], ladder.hidden))
    old, new, found = _users(before), _users(after), []
    for edit in after.edits:
        anchor, source = before.anchors[edit.site], sources[str(edit.site)]
        is_shown = source in at and any(name not in ladder.hidden for name in edit.nodes)
        still = _readers(new, anchor, ladder.hidden)
        gone = [name for name in _readers(old, anchor, ladder.hidden) if name in at and name not in still]
        cut = dict.fromkeys((at[source], at[name]) for name in gone) if is_shown else {}
        texts = {"site": str(edit.site), "action": action_text(edit), "nodes": edit.nodes}
        found.append({**texts, "replaced": [*cut], "isFigure": only_measures(edit)})
    return found


def _users(view: GraphView) -> dict[str, list[str]]:
    return grouped([*view.edges, *((name, f"returned {label}") for label, name in view.returned)])


def _readers(users: Mapping[str, Sequence[str]], name: str, hidden: Collection[str]) -> list[str]:
    """Return the visible readers of a node, through hidden ones."""
    through = [*users.get(name, ())]
    reached = dict.fromkeys(through)
    for reader in through:  # grows
        if reader in hidden:
            through += [one for one in users.get(reader, ()) if one not in reached]
            reached |= dict.fromkeys(through)
    return [reader for reader in reached if reader not in hidden]


def _records(run: Run | None) -> tuple[dict[str, Any], list[int]]:
    """Return the records of at most ``MOST_STEPS`` steps, non-finite ones included, and the numbers of the steps.

    ``first`` is the place of the step that is shown at first: the last finite one, or all.
    """
    if run is None or not run.steps:
        return {"steps": [], "values": {}, "first": 0, "rows": []}, []
    last = judged_steps(run)[-1].step
    numbers = _sample(run, last)
    values: dict[str, dict[str, list[float | str | None]]] = defaultdict(dict)
    dropped = _dropped_calls({one.at.site for one in run.series.values()})
    for address, series in run.series.items():
        name, _, site = address.partition("@")
        if name.startswith("exponents_") or site in dropped:
            continue
        known = series.by_step
        values[site][name] = [_number(known.get(n)) for n in numbers]
    order = [
        site for site in backward_order(run) if site.partition(":")[0] in BACKWARD - {"outside"} and site in values
    ]
    rows = [(site, name) for site in order for name in [one for one in _SIZES if one in values[site]][:1]]
    first = len(numbers) if last == run.steps[-1].step else numbers.index(last)
    return {"steps": numbers, "values": values, "first": first, "rows": rows}, numbers


def _dropped_calls(sites: Collection[str]) -> set[str]:
    """Return the sites that are left out: of many calls of one site all but ``MOST_CALLS`` at equal distances."""
    dropped: set[str] = set()
    for base, own in grouped((site.partition("#")[0], site) for site in sites).items():
        if len(own) > MOST_CALLS:
            ordered = sorted(own, key=lambda site: int(site.removeprefix(f"{base}#")) if site != base else 0)
            dropped |= set(own) - {ordered[round(n * (len(own) - 1) / (MOST_CALLS - 1))] for n in range(MOST_CALLS)}
    return dropped


def _names(run: Run | None, series: Iterable[Sequence[int]]) -> dict[int, str]:
    """Return steps in words, where a number alone is another step's."""
    if run is None or not run.numbers:
        return {}
    return {step: run.place(step) for steps in series for step in steps}


def _metric(metric: SiteMetric, numbers: Sequence[int]) -> dict[str, Any]:
    return {
        "name": metric.metric,
        "weak": metric.scale.weak,
        "strong": metric.scale.strong,
        "legend": [[_CSS[entry.color], entry.text] for entry in metric.legend()],
        "values": {
            site: {"total": _number(metric.totals[site]), "steps": [_number(known.get(n)) for n in numbers]}
            for site, known in metric.by_site.items()
        },
    }


def _panel(panel: Panel) -> dict[str, Any]:
    """Return the lines of a chart; of many points equal distances, and those beside values that are not finite."""
    lines = []
    for name, values in panel.lines:
        steps, distance = [*values], -(-len(values) // MOST_POINTS)
        bad = {n for n, step in enumerate(steps) if not math.isfinite(values[step])}
        ends = {0, len(steps) - 1} | {n for one in sorted(bad)[:MOST_POINTS] for n in (one - 1, one, one + 1)}
        kept = [step for n, step in enumerate(steps) if n % distance == 0 or n in ends]
        lines.append({"name": name, "steps": kept, "values": [_number(values[step]) for step in kept]})
    return {"title": panel.title, "lines": lines}


def _sample(run: Run, last: int) -> list[int]:
    """Sample steps at equal distances, and of the non-finite ones; with the last finite one."""
    numbers = [step.step for step in run.steps]
    if len(numbers) <= MOST_STEPS:
        return numbers
    bad = [last, *(one.step.step for one in bad_steps(run))][: MOST_STEPS // 2]
    num_even = MOST_STEPS - len(bad)
    return sorted({*bad, *(numbers[round(n * (len(numbers) - 1) / (num_even - 1))] for n in range(num_even))})


def _number(value: float | None) -> float | str | None:
    return None if value is None else plain_number(float(f"{value:.6g}"))
