"""``draw``: a rewritten graph as a picture or a page."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from gradrewrite.callers import warn_caller
from gradrewrite.history import Run, Step
from gradrewrite.joint import JointGraph
from gradrewrite.monitor import Monitor
from gradrewrite.nonfinite import bad_steps, intended
from gradrewrite.policy import GroupAction
from gradrewrite.sites import Site
from gradrewrite.viz import _graph_view
from gradrewrite.viz._curves import plot
from gradrewrite.viz._diagram import Sketch
from gradrewrite.viz._diagram_dot import finish_svg, to_dot
from gradrewrite.viz._graphviz import GraphvizError, run_dot
from gradrewrite.viz._grid_layout import arrange
from gradrewrite.viz._ladder_dot import ladder_dot
from gradrewrite.viz._ladder_drawing import draw_ladder
from gradrewrite.viz._ladder_layout import Ladder, lay_out
from gradrewrite.viz._metric_colors import Measured, Metric, choose, measure, paint, paint_sites
from gradrewrite.viz._overview import sketch_overview
from gradrewrite.viz._raster import to_bytes
from gradrewrite.viz._scene import Paint, Picture, to_svg
from gradrewrite.viz._site import find_site, sketch_site
from gradrewrite.viz.page._html import run_of, write_page

View = Literal["ladder", "overview", "site"]
Format = Literal["svg", "png", "pdf", "dot", "html"]
VIEWS: tuple[View, ...] = get_args(View)
FORMATS: tuple[Format, ...] = get_args(Format)
_HOPS = 3


class DrawingWarning(UserWarning):
    """A picture is not drawn as it was asked for, and says so."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """A picture of a rewritten graph; made by ``draw``. The same graph gives the same bytes.

    Attributes:
        graph: The graph.
        view: What is shown of it.
        site: The site of the view ``"site"``; None otherwise.
        hops: How far its neighbourhood goes, in edges.
        run: What was recorded, for colours and curves; None without a monitor.
        color_by: What colours say; None if they say nothing.
        blamed: Nodes of the op that made the first non-finite value.
        title: What stands above.
        reshapes: Whether the ladder and the page show ops that only reshape.
    """

    graph: JointGraph
    view: View
    site: Site | None = None
    hops: int = _HOPS
    run: Run | None = None
    color_by: Metric | None = None
    blamed: Collection[str] = ()
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
        """For notebooks."""
        return self._bytes("svg").decode()

    def _bytes(self, form: Format) -> bytes:
        if form == "html":
            return self._page().encode()
        if self.view == "ladder":
            if form == "dot":
                return ladder_dot(self._ladder, self._colours).encode()
            return _finish(self._picture, form)
        sketch = self._sketch
        source = to_dot(sketch)
        if form == "dot":
            return source.encode()
        try:
            data = run_dot(source, form)
        except GraphvizError as err:
            notice = f"{err}: drawn by gradrewrite's own layout"
            warn_caller(notice, DrawingWarning)
            return _finish(arrange(sketch, notice), form)
        return finish_svg(data, sketch).encode() if form == "svg" else data

    @cached_property
    def _now(self) -> _graph_view.Net:
        return _graph_view.read(self.graph)

    @cached_property
    def _ladder(self) -> Ladder:
        return lay_out(self._now, reshapes=self.reshapes)

    @cached_property
    def _metrics(self) -> Sequence[Measured]:
        return measure(self.run, self._now) if self.run is not None else ()

    @cached_property
    def _measured(self) -> Measured | None:
        return choose(self._metrics, self.color_by)

    @cached_property
    def _colours(self) -> Mapping[str, Paint]:
        return paint(self._now, self._measured) if self._measured is not None else {}

    @property
    def _picture(self) -> Picture:
        legend = self._measured.legend() if self._measured is not None else []
        return draw_ladder(self._ladder, self._colours, legend, self.title)

    @property
    def _sketch(self) -> Sketch:
        legend = self._measured.legend() if self._measured is not None else []
        if self.view == "overview":
            colours = paint_sites(self._measured) if self._measured is not None else {}
            return replace(sketch_overview(self._now, colours, self.title), legend=legend)
        assert self.site is not None
        before = _graph_view.read(self.graph.before or self.graph)
        found = sketch_site(
            before,
            self._now,
            self.site,
            self.hops,
            blamed=self.blamed,
            records=self._records(),
            colours=self._colours,
        )
        return replace(found, legend=legend)

    def _records(self) -> dict[str, float]:
        """What the site reported last."""
        if self.run is None:
            return {}
        actions = [edit.action for edit in self.graph.edits if edit.site == self.site]
        sites = {str(self.site), *(f"group:{a.group}" for a in actions if isinstance(a, GroupAction))}
        found = [one for one in self.run.series.values() if one.at.site in sites]
        return {f"{one.at.record}{one.at.number}, step {one.steps[-1]}": one.values[-1] for one in found}

    def _page(self) -> str:
        plain = replace(draw_ladder(self._ladder, {}, [], self.title), words=(), legend=())
        curves = plot(self.run.steps, title="curves")._repr_svg_() if self.run is not None else ""
        return write_page(
            self.graph,
            self._ladder,
            plain,
            run=self.run,
            metrics=self._metrics,
            chosen=self._measured,
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
    """Show a rewritten graph.

    What was inserted has an orange edge in every view. In ``"ladder"`` the forward runs down on the left and the
    backward up on the right, each op beside its backward, in bands for the runs of modules; ops that only reshape are
    left out. ``"overview"`` has modules for ops, repeated blocks folded, and fits on one screen. ``"site"`` shows what
    stands around one site, before and after the rewrite.

    Args:
        graph: What ``model.trace(...)`` returned.
        view: ``"ladder"``, ``"overview"`` or ``"site"``.
        site: The site of the view ``"site"``: a Site, its name (``"error:decoder.0"``), or a pattern that only it
            matches. If None, that of the first non-finite value that the monitor knows of.
        hops: How many edges around the site are shown, >= 0.
        monitor: Where colours and curves come from: a monitor (reading it waits for the device), or steps. Of several
            runs the last counts.
        color_by: ``"clip rate"``, ``"largest error"`` or ``"not finite"`` (share of elements); the first that the
            monitor has records for if None. NaN and infinities have a colour of their own.
        title: What stands above.
        reshapes: Show ops that only reshape in the ladder and the page too.

    Returns:
        A picture: ``render`` it into a file, or show it in a notebook.

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
    net = _graph_view.read(graph)
    run = run_of(_steps(monitor))
    chosen = choose(measure(run, net), color_by) if run is not None else choose((), color_by)
    found: Site | None = None
    blamed: Collection[str] = ()
    if view == "site":
        if site is not None:
            found = find_site(list(net.anchors), site)
        else:
            found, blamed = _first_failure(net, monitor, run)
    elif site is not None:
        raise ValueError(f"site={str(site)!r} belongs to view='site', got view={view!r}")
    metric = chosen.metric if chosen is not None else None
    name = title or (str(found) if found is not None else "joint graph")
    return Drawing(graph, view, found, hops, run, metric, blamed, name, reshapes)


def _steps(monitor: Monitor | Sequence[Step] | None) -> Sequence[Step]:
    if monitor is None:
        return ()
    if isinstance(monitor, Monitor):
        return monitor.steps()
    if isinstance(monitor, Sequence) and all(isinstance(step, Step) for step in monitor):
        return monitor
    raise TypeError(f"monitor is a Monitor (model.monitor) or a sequence of Step, got {type(monitor).__name__}")


def _first_failure(net: _graph_view.Net, monitor: object, run: Run | None) -> tuple[Site, Collection[str]]:
    """The site of the first non-finite value, and the nodes of the op that made it."""
    by_name = {str(site): site for site in net.anchors}
    error = monitor.failure() if isinstance(monitor, Monitor) else None
    if error is not None and str(error.site) in by_name:
        lane = "forward" if error.site.kind == "activation" else "backward"
        module, _, op = error.op.rpartition("/")
        nodes = net.nodes.values()
        blamed = [n.name for n in nodes if (n.origin.module, n.origin.op, n.origin.lane) == (module, op, lane)]
        return by_name[str(error.site)], blamed
    bad = bad_steps(run) if run is not None else []
    meant = intended(run, bad) if run is not None else set()
    for one in bad:  # sites in the order of execution
        found = [by_name[site] for site in one.sites if site in by_name and site not in meant]
        if found:
            return found[0], ()
    known = "nothing non-finite was recorded" if run is not None else "there is no monitor"
    raise ValueError(f"view='site' needs a site: {known}; give site='error:...' (print(graph) lists them)")


def _finish(picture: Picture, form: str) -> bytes:
    return to_svg(picture).encode() if form == "svg" else to_bytes(picture, form)
