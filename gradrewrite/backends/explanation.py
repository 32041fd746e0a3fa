"""Explanation of the compiled graphs, their edits, and the skipped regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradrewrite._utils.formatting import listed
from gradrewrite.instrumentation.rolling import LoopReport
from gradrewrite.ir.edits import Edit, told_once
from gradrewrite.ir.zero_cover import ZeroCover
from gradrewrite.policy.sampling import Measured
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One compiled graph with a backward.

    Attributes:
        frame: Name of the compiled Python frame.
        is_whole: Whether the graph holds all that one call of the model does.
        sites: Its sites.
        edits: What was inserted.
        out_of_reach: Sites of ``sites`` at which the policy answered and nothing was inserted, because their error, or
            a part of it, is outside of the graph.
        region: The region of the model that it was compiled for or is shared by, with the number of the call
            (``layers.0#1``) if that is not the first; ``""`` for a graph of the model.
        answered: Positions of the callbacks that answered at any site, in the nested lists of the policy.
        measured: Which of the actions that only measure it has: ``"all"``; ``"every step"``, those without an interval;
            ``"nothing"``, none. See ``Monitor(sample=)``.
        loss_nodes: Where the gradients of several losses are taken apart (``WeighLosses``), the numbers of the nodes in
            the backward of each loss by itself.
        engine: ``"inductor"`` for compiled code, ``"aot_eager"`` for a graph that runs op by op.
        not_saved: Where the policy may act on saved tensors, the values that are none, each with the reason.
        loops: Python loops that the tracer has unrolled, rolled again or not (``loops=``). Without ``loops=``, those of
            32 iterations or more.
        zeros: Ops whose backward keeps zeros (``KeepZeros``), with what is inserted, and what is not covered.
    """

    frame: str
    is_whole: bool
    sites: tuple[Site, ...]
    edits: tuple[Edit, ...]
    out_of_reach: tuple[Site, ...] = ()
    region: str = ""
    answered: frozenset[tuple[int, ...]] = frozenset()
    measured: Measured = "all"
    loss_nodes: tuple[int, ...] = ()
    engine: str = "inductor"
    not_saved: tuple[tuple[Site, str], ...] = ()
    loops: tuple[LoopReport, ...] = ()
    zeros: tuple[tuple[Site, ZeroCover], ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """The compiled and rewritten graphs so far, and the skipped regions.

    Attributes:
        graphs: Every compiled graph with a backward, in order; a new input shape makes a new one.
        skipped: Lines at which the tracer gave up, with the reason; code that ran there was not rewritten.
        outside: Names of the outermost modules outside of all regions (``regions=``), which run as plain PyTorch; empty
            for a model without regions.
    """

    graphs: tuple[GraphReport, ...]
    skipped: tuple[str, ...]
    outside: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A short report in plain text."""
        lines = [f"{len(self.graphs)} rewritten graphs, {len(self.skipped)} skipped regions"]
        for number, graph in enumerate(self.graphs):
            where = f"{graph.frame}, {graph.region}" if graph.region else graph.frame
            where += "" if graph.measured == "all" else f", measuring {graph.measured}"
            lines.append(f"graph {number} ({where}): {len(graph.sites)} sites, {len(graph.edits)} edits")
            of_losses = [f"{number} of loss {loss}" for loss, number in enumerate(graph.loss_nodes)]
            lines += [f"  nodes in the backward of each loss by itself: {', '.join(of_losses)}"] * bool(of_losses)
            lines += [f"  {loop}" for loop in graph.loops]
            covered = dict(graph.zeros)  # the first edit at each of these sites
            own = [edit for edit in graph.edits if covered.pop(edit.site, None) is None]
            lines += [f"  {where}: {edit.action!r}" for where, edit in told_once(own)]
            lines += _lines_of_zeros(graph.zeros)
            lines += [f"  {site}: out of reach, nothing was inserted" for site in graph.out_of_reach]
        lines += [f"skipped: {line}" for line in self.skipped]
        if self.outside:
            lines.append(f"outside of all regions, without a policy: {', '.join(self.outside)}")
        return "\n".join(lines)


def _lines_of_zeros(zeros: Sequence[tuple[Site, ZeroCover]]) -> list[str]:
    """Return a line for each op with ``KeepZeros``, and each cost."""
    by_kind: dict[tuple[str, str], list[Site]] = {}
    for site, cover in zeros:
        by_kind.setdefault((site.op, str(cover)), []).append(site)
    return [
        f"  KeepZeros() at {op} ({listed([str(site) for site in sites])}): {text}"
        for (op, text), sites in by_kind.items()
    ]
