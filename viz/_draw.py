"""``draw``: a rewritten graph as a drawing or an interactive page."""

from __future__ import annotations

import html
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

from gradrewrite._utils.files import written_whole
from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.judge import Evidence
from gradrewrite.diagnostics.run_log import Run, last_run
from gradrewrite.errors import NonFiniteError
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.viz._curves import is_monitor, steps_of
from gradrewrite.viz._dot import scene_dot
from gradrewrite.viz._graph_view import GraphView, lane_of_site, read_graph
from gradrewrite.viz._ladder import Ladder, build_ladder
from gradrewrite.viz._layout import LadderLayout, draw_ladder
from gradrewrite.viz._metric_colors import Metric, SiteMetric, choose_metric, site_metrics
from gradrewrite.viz._norms import SiteNorms, norms_of
from gradrewrite.viz._overview import build_overview
from gradrewrite.viz._panels import panels_of
from gradrewrite.viz._raster import scene_to_bytes
from gradrewrite.viz._scene import Scene, to_svg
from gradrewrite.viz.page._html import GraphTabs, write_page
from gradrewrite.viz.page._report_tabs import report_tabs

if TYPE_CHECKING:
    from gradrewrite.viz._curves import Source

View = Literal["ladder", "overview"]
Format = Literal["svg", "png", "pdf", "dot", "html"]


@dataclass(frozen=True, eq=False, repr=False)
class Drawing:
    """Drawing of a rewritten graph, from ``draw``.

    The same graph gives the same bytes.

    Attributes:
        graph: The graph.
        view: What is shown of it.
        run: What was recorded, for colors and curves; None without a monitor.
        color_by: What colors say; None if they say nothing.
        root_cause: Nodes of the op that made the first non-finite value.
        title: Title above the drawing.
        reshapes: Whether the ladder and the page show ops that only reshape.
        records: Whether they show nodes that only serve logs and records.
    """

    graph: JointGraph
    view: View
    run: Run | None = None
    color_by: Metric | None = None
    root_cause: Collection[str] = ()
    title: str = "joint graph"
    reshapes: bool = False
    records: bool = False

    def render(self, path: str | os.PathLike[str], format: Format = "svg") -> str:
        """Write ``path.format``.

        Args:
            path: Where; folder and extension are added where they are missing.
            format: ``"svg"``, ``"png"``, ``"pdf"``, ``"dot"`` (Graphviz source), or ``"html"``: a page that works
                offline, to search, fold and click through the whole graph.

        Returns:
            The path of the file.

        Raises:
            ValueError: The format is none of these.
            OSError: The file cannot be written.
        """
        if format not in get_args(Format):
            raise ValueError(f"format={format!r}: choose one of {', '.join(map(repr, get_args(Format)))}")
        target = f"{os.fspath(path).removesuffix(f'.{format}')}.{format}"
        data = self._bytes(format)
        with written_whole(target) as part:
            part.write_bytes(data)
        return target

    def __repr__(self) -> str:
        return f"<Drawing {self.title!r}, {self.view}: {self._view.summary}>"

    def _repr_html_(self) -> str:
        page = html.escape(self._page())
        style = "width:100%;height:640px;border:0"
        return f'<iframe title="{html.escape(self.title)}" style="{style}" srcdoc="{page}"></iframe>'

    def _repr_svg_(self) -> str:
        return self._bytes("svg").decode()

    def _bytes(self, form: Format) -> bytes:
        if form == "html":
            return self._page().encode()
        scene = self._scene()
        if form == "dot":
            return scene_dot(scene).encode()
        return to_svg(scene).encode() if form == "svg" else scene_to_bytes(scene, form)

    @cached_property
    def _view(self) -> GraphView:
        return read_graph(self.graph)

    @cached_property
    def _metrics(self) -> Sequence[SiteMetric]:
        return site_metrics(self.run, self._view) if self.run is not None else ()

    @cached_property
    def _norms(self) -> SiteNorms | None:
        return norms_of(self.run, self._view) if self.run is not None and self.run.steps else None

    @cached_property
    def _ladder(self) -> LadderLayout:
        ladder = build_ladder(self._view, self.run, reshapes=self.reshapes, records=self.records)
        return LadderLayout(ladder, self._norms)

    @cached_property
    def _overview(self) -> LadderLayout:
        return LadderLayout(build_overview(self._view, self.run, self._norms), self._norms)

    def _note(self, ladder: Ladder) -> str:
        parts = [self._view.summary]
        parts += [f"{len(ladder.hidden)} nodes that only reshape or serve records are hidden"] if ladder.hidden else []
        if self.run is not None and self.color_by is not None:
            parts.append(f"{len(self.run.steps)} steps, colors: {self.color_by}")
        return "; ".join(parts)

    def _scene(self) -> Scene:
        layout = self._overview if self.view == "overview" else self._ladder
        metric = choose_metric(self._metrics, self.color_by)
        return draw_ladder(layout, self.title, self._note(layout.ladder), metric, self.root_cause)

    @property
    def graph_tabs(self) -> GraphTabs:
        """The graph for a page of a run."""
        note = self._note(self._ladder.ladder).partition(", colors:")[0]  # which are chosen there
        return GraphTabs(self.graph, self._ladder, self._overview, note, self._metrics, self.color_by, self.root_cause)

    def _page(self) -> str:
        if self.run is None:
            return write_page(self.title, graph=self.graph_tabs)
        text = report_tabs(examine(self.run.steps, evidence=evidence_of(self.graph)))
        return write_page(self.title, run=self.run, panels=panels_of(self.run), report=text, graph=self.graph_tabs)


def draw(
    graph: JointGraph,
    view: View = "ladder",
    *,
    monitor: Source | None = None,
    color_by: Metric | None = None,
    title: str = "",
    reshapes: bool = False,
    records: bool = False,
) -> Drawing:
    """Draw a rewritten graph.

    Each edit is one box in every view: its action and site, and with a monitor the share of the steps in which it acted
    and the median factor of these steps. In ``"ladder"`` the forward runs down on the left and the backward up on the
    right, each op beside its backward and the edits of its error, in bands for the calls of modules. ``"overview"`` has
    modules for ops, repeated blocks and their edits folded, at most 16 rows. The page has both, and
    shows the edges that a chosen edit replaced.

    Args:
        graph: What ``model.trace(...)`` returned.
        view: ``"ladder"`` or ``"overview"``.
        monitor: Where colors and curves come from: a monitor (reading it waits for the device), the path of a file
            that ``monitor.to_jsonl`` wrote, or steps. Of several runs the last counts.
        color_by: ``"clip strength"`` (median factor), ``"largest error"`` or ``"not finite"`` (share of elements); the
            first that the monitor has records for if None. Zero has no color, NaN and infinities have their own.
        title: Title above the drawing; the name of the model's class if empty.
        reshapes: Show ops that only reshape in the ladder and the page too.
        records: Show nodes that only serve logs and records in them too.

    Returns:
        A drawing: ``render`` it into a file, or show it in a notebook.

    Raises:
        TypeError: ``graph`` is no JointGraph, ``monitor`` none of these.
        OSError: The file cannot be read.
        ValueError: An unknown view or metric, a metric without records.

    Example:
        >>> import torch, gradrewrite as gr
        >>> from gradrewrite.passes import ClipByValue
        >>> graph = gr.transform(torch.nn.Linear(2, 2), gr.on("gradient:*", ClipByValue(0.1))).trace(torch.ones(1, 2))
        >>> draw(graph).view
        'ladder'
    """
    if view not in get_args(View):
        raise ValueError(f"view={view!r}: choose one of {', '.join(map(repr, get_args(View)))}")
    graph_view = read_graph(graph)
    steps = steps_of(monitor) if monitor is not None else ()
    run = last_run(steps) if steps else None
    chosen = choose_metric(site_metrics(run, graph_view) if run is not None else (), color_by)
    root_cause = _blamed(graph_view, monitor.failure()) if is_monitor(monitor) else ()
    metric = chosen.metric if chosen is not None else None
    return Drawing(graph, view, run, metric, root_cause, title or graph.name or "joint graph", reshapes, records)


def evidence_of(graph: JointGraph) -> Evidence:
    """Return the sites of a graph, for the lines of causes."""
    return Evidence({str(site): site for site in graph.sites})


def _blamed(graph_view: GraphView, error: NonFiniteError | None) -> Collection[str]:
    if error is None:
        return ()
    lane = "inner" if error.is_inner else lane_of_site(error.site)
    module, _, op = error.op.rpartition("/")
    return [n.name for n in graph_view.nodes.values() if (n.module, n.op, n.lane) == (module, op, lane) and not n.mark]
