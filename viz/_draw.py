"""``draw``: a rewritten graph as a drawing or an interactive page."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

from gradrewrite._warnings import warn_caller
from gradrewrite.diagnostics.nonfinite_steps import bad_steps, expected_infinities
from gradrewrite.diagnostics.run_log import Run, Step, last_run
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.policy.actions import GroupAction
from gradrewrite.sites import Site
from gradrewrite.viz import _graph_view
from gradrewrite.viz._curves import plot
from gradrewrite.viz._diagram import Diagram
from gradrewrite.viz._diagram_dot import diagram_dot, finish_svg
from gradrewrite.viz._graphviz import GraphvizError, run_dot
from gradrewrite.viz._grid_layout import lay_out_diagram
from gradrewrite.viz._ladder_dot import ladder_dot
from gradrewrite.viz._ladder_drawing import draw_ladder
from gradrewrite.viz._ladder_layout import LadderLayout, lay_out_ladder
from gradrewrite.viz._metric_colors import Metric, SiteMetric, choose_metric, node_colors, site_colors, site_metrics
from gradrewrite.viz._monitors import is_monitor
from gradrewrite.viz._overview import overview_diagram
from gradrewrite.viz._raster import scene_to_bytes
from gradrewrite.viz._scene import ColorSample, Scene, to_svg
from gradrewrite.viz._site import find_site, site_diagram
from gradrewrite.viz.page._html import write_page

if TYPE_CHECKING:
    from gradrewrite.monitoring.monitor import Monitor

View = Literal["ladder", "overview", "site"]
Format = Literal["svg", "png", "pdf", "dot", "html"]
VIEWS: tuple[View, ...] = get_args(View)
FORMATS: tuple[Format, ...] = get_args(Format)
_HOPS = 3


class DrawingWarning(UserWarning):
    """A drawing was made in another way than requested; the message says why."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """Drawing of a rewritten graph, as ``draw`` returns it. The same graph gives the same bytes.

    Attributes:
        graph: The graph.
        view: What is shown of it.
        site: The site of the view ``"site"``; None otherwise.
        hops: How far its neighborhood goes, in edges.
        run: What was recorded, for colors and curves; None without a monitor.
        color_by: What colors say; None if they say nothing.
        root_cause: Nodes of the op that made the first non-finite value.
        title: Title above the drawing.
        reshapes: Whether the ladder and the page show ops that only reshape.
    """

    graph: JointGraph
    view: View
    site: Site | None = None
    hops: int = _HOPS
    run: Run | None = None
    color_by: Metric | None = None
    root_cause: Collection[str] = ()
    title: str = "joint graph"
    reshapes: bool = False

    def render(self, path: str | os.PathLike[str], format: Format = "svg") -> str:
        """Write ``path.format``.

        Args:
            path: Where, without the extension; the folder has to be there.
            format: ``"svg"``, ``"png"``, ``"pdf"``, ``"dot"`` (Graphviz source), or ``"html"``: a page that works
                offline, to search, fold and click through the whole graph.

        Returns:
            The path of the file.

        Raises:
            ValueError: The format is none of these.
            OSError: The file cannot be written.
        """
        if format not in FORMATS:
            raise ValueError(f"format={format!r}: choose one of {', '.join(map(repr, FORMATS))}")
        target = f"{os.fspath(path)}.{format}"
        data = self._bytes(format)
        with open(target, "wb") as file:
            file.write(data)
        return target

    def _repr_svg_(self) -> str:
        """Return SVG, for notebooks."""
        return self._bytes("svg").decode()

    def _bytes(self, form: Format) -> bytes:
        if form == "html":
            return self._page().encode()
        if self.view == "ladder":
            if form == "dot":
                return ladder_dot(self._ladder, self._node_colors).encode()
            return _finish(self._scene, form)
        diagram = self._diagram
        source = diagram_dot(diagram)
        if form == "dot":
            return source.encode()
        try:
            data = run_dot(source, form)
        except GraphvizError as err:
            notice = f"{err}: drawn by gradrewrite's own layout"
            warn_caller(notice, DrawingWarning)
            return _finish(lay_out_diagram(diagram, notice), form)
        return finish_svg(data, diagram).encode() if form == "svg" else data

    @cached_property
    def _rewritten(self) -> _graph_view.GraphView:
        return _graph_view.read_graph(self.graph)

    @cached_property
    def _ladder(self) -> LadderLayout:
        return lay_out_ladder(self._rewritten, reshapes=self.reshapes)

    @cached_property
    def _metrics(self) -> Sequence[SiteMetric]:
        return site_metrics(self.run, self._rewritten) if self.run is not None else ()

    @cached_property
    def _metric(self) -> SiteMetric | None:
        return choose_metric(self._metrics, self.color_by)

    @cached_property
    def _node_colors(self) -> Mapping[str, ColorSample]:
        return node_colors(self._rewritten, self._metric) if self._metric is not None else {}

    @property
    def _scene(self) -> Scene:
        legend = self._metric.legend() if self._metric is not None else []
        return draw_ladder(self._ladder, self._node_colors, legend, self.title)

    @property
    def _diagram(self) -> Diagram:
        legend = self._metric.legend() if self._metric is not None else []
        if self.view == "overview":
            colors = site_colors(self._metric) if self._metric is not None else {}
            return replace(overview_diagram(self._rewritten, colors, self.title), legend=legend)
        assert self.site is not None
        before = _graph_view.read_graph(self.graph.before or self.graph)
        found = site_diagram(
            before,
            self._rewritten,
            self.site,
            self.hops,
            root_cause=self.root_cause,
            records=self._records(),
            colors=self._node_colors,
        )
        return replace(found, legend=legend)

    def _records(self) -> dict[str, float]:
        """Return the last records of the site and of its groups."""
        if self.run is None:
            return {}
        actions = [edit.action for edit in self.graph.edits if edit.site == self.site]
        sites = {str(self.site), *(f"group:{a.group}" for a in actions if isinstance(a, GroupAction))}
        found = [one for one in self.run.series.values() if one.at.site in sites]
        return {f"{one.at.name}, step {one.steps[-1]}": one.values[-1] for one in found}

    def _page(self) -> str:
        plain = replace(draw_ladder(self._ladder, {}, [], self.title), labels=(), legend=())
        curves = plot(self.run.steps, title="curves")._repr_svg_() if self.run is not None else ""
        return write_page(
            self.graph,
            self._ladder,
            plain,
            run=self.run,
            metrics=self._metrics,
            chosen=self._metric,
            curves=curves,
            view=self.view,
            site="" if self.site is None else str(self.site),
        )


def draw(
    graph: JointGraph,
    view: View = "ladder",
    *,
    site: Site | str | None = None,
    hops: int = _HOPS,
    monitor: Monitor | Sequence[Step] | None = None,
    color_by: Metric | None = None,
    title: str = "",
    reshapes: bool = False,
) -> Drawing:
    """Draw a rewritten graph.

    What was inserted has an orange edge in every view. In ``"ladder"`` the forward runs down on the left and the
    backward up on the right, each op beside its backward, in bands for the calls of modules; ops that only reshape are
    left out. ``"overview"`` has modules for ops, repeated blocks folded, and fits on one screen. ``"site"`` shows what
    is around one site, before and after the rewrite.

    Args:
        graph: What ``model.trace(...)`` returned.
        view: ``"ladder"``, ``"overview"`` or ``"site"``.
        site: The site of the view ``"site"``: a Site, its name (``"error:decoder.0"``), or a pattern that only it
            matches. If None, that of the first non-finite value that the monitor knows of.
        hops: How many edges around the site are shown, >= 0.
        monitor: Where colors and curves come from: a monitor (reading it waits for the device), or steps. Of several
            runs the last counts.
        color_by: ``"clip rate"``, ``"largest error"`` or ``"not finite"`` (share of elements); the first that the
            monitor has records for if None. NaN and infinities have a color of their own.
        title: Title above the drawing.
        reshapes: Show ops that only reshape in the ladder and the page too.

    Returns:
        A drawing: ``render`` it into a file, or show it in a notebook.

    Raises:
        TypeError: ``graph`` is no JointGraph, ``monitor`` no monitor.
        ValueError: An unknown view or metric, ``hops`` < 0, a pattern of several sites, a metric without records; the
            view ``"site"`` without a site where nothing failed.
        NoSuchSiteError: The site is none of the graph's.

    Example:
        >>> import torch, gradrewrite as gr
        >>> from gradrewrite.passes import ClipByValue
        >>> graph = gr.transform(torch.nn.Linear(2, 2), gr.on("gradient:*", ClipByValue(0.1))).trace(torch.ones(1, 2))
        >>> draw(graph).view
        'ladder'
    """
    if view not in VIEWS:
        raise ValueError(f"view={view!r}: choose one of {', '.join(map(repr, VIEWS))}")
    if isinstance(hops, bool) or not isinstance(hops, int) or hops < 0:
        raise ValueError(f"hops is a whole number >= 0, got {hops!r}")
    if view != "site" and hops != _HOPS:
        raise ValueError(f"hops={hops} belongs to view='site', got view={view!r}")
    graph_view = _graph_view.read_graph(graph)
    steps = _steps(monitor)
    run = last_run(steps) if steps else None
    chosen = choose_metric(site_metrics(run, graph_view), color_by) if run is not None else choose_metric((), color_by)
    found: Site | None = None
    root_cause: Collection[str] = ()
    if view == "site":
        if site is not None:
            found = find_site(list(graph_view.anchors), site)
        else:
            found, root_cause = _first_failure(graph_view, monitor, run)
    elif site is not None:
        raise ValueError(f"site={str(site)!r} belongs to view='site', got view={view!r}")
    metric = chosen.metric if chosen is not None else None
    name = title or (str(found) if found is not None else "joint graph")
    return Drawing(graph, view, found, hops, run, metric, root_cause, name, reshapes)


def _steps(monitor: Monitor | Sequence[Step] | None) -> Sequence[Step]:
    if monitor is None:
        return ()
    if is_monitor(monitor):
        return monitor.steps()
    if isinstance(monitor, Sequence) and all(isinstance(step, Step) for step in monitor):
        return monitor
    raise TypeError(f"monitor is a Monitor (model.monitor) or a sequence of Step, got {type(monitor).__name__}")


def _first_failure(graph_view: _graph_view.GraphView, monitor: object, run: Run | None) -> tuple[Site, Collection[str]]:
    """Return the site of the first non-finite value, and the nodes of the op that made it."""
    by_name = {str(site): site for site in graph_view.anchors}
    error = monitor.failure() if is_monitor(monitor) else None
    if error is not None and str(error.site) in by_name:
        lane = "forward" if error.site.kind == "activation" else "backward"
        module, _, op = error.op.rpartition("/")
        nodes = graph_view.nodes.values()
        root_cause = [n.name for n in nodes if (n.module, n.op, n.lane) == (module, op, lane)]
        return by_name[str(error.site)], root_cause
    bad = bad_steps(run) if run is not None else []
    expected = expected_infinities(run, bad) if run is not None else set()
    for one in bad:  # sites in the order of execution
        found = [by_name[site] for site in one.sites if site in by_name and site not in expected]
        if found:
            return found[0], ()
    known = "nothing non-finite was recorded" if run is not None else "there is no monitor"
    raise ValueError(f"view='site' needs a site: {known}; give site='error:...' (graph.sites has all of them)")


def _finish(scene: Scene, form: str) -> bytes:
    return to_svg(scene).encode() if form == "svg" else scene_to_bytes(scene, form)
