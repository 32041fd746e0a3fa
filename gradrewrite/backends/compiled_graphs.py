"""The compiled graphs of a policy: their reports, skipped regions, and the processes that they run in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, distributed

from gradrewrite._compat.data_parallel import DataParallelism
from gradrewrite._utils.formatting import listed
from gradrewrite._utils.warnings import PendingWarnings
from gradrewrite.backends.explanation import Explanation, GraphReport
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.policy.actions import describe
from gradrewrite.policy.rules import Answered, ask_in_order, step_site
from gradrewrite.policy.scope import (
    OUTSIDE_OF_REGIONS,
    Context,
    lone_skip,
    processes_of,
    refuse,
    refuse_group_in_parts,
    refuse_group_in_regions,
    refuse_in_data_parallelism,
)
from gradrewrite.rewriting.config import RewriteConfig
from gradrewrite.sites import Site

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MANY = 3  # names that a warning lists


class CompiledGraphs:
    """The compiled graphs of one policy, in order.

    ``recorder`` is told of the processes that skip updates together, ``outside`` are the outermost modules outside of
    all regions.
    """

    def __init__(
        self, config: RewriteConfig, recorder: StepRecorder, warnings: PendingWarnings, outside: Sequence[str]
    ) -> None:
        self.skipped: dict[str, None] = {}  # lines of regions that the tracer skipped, in order
        self.joint: JointGraph | None = None  # the largest joint graph, where one is kept
        self._num_nodes = 0  # of it
        self._config, self._recorder, self._warnings, self._outside = config, recorder, warnings, tuple(outside)
        self._reports: list[GraphReport] = []
        self._region_of_group: dict[Hashable, str] = {}
        self._averaging: ProcessGroup | None = None
        self._checked_outside = False

    def __iter__(self) -> Iterator[GraphReport]:
        return iter(self._reports)

    def __len__(self) -> int:
        return len(self._reports)

    def explanation(self) -> Explanation:
        """Return the compiled graphs and skipped regions so far."""
        return Explanation(tuple(self._reports), tuple(self.skipped), self._outside)

    def note(self, report: GraphReport) -> None:
        """List a graph; PolicyError where a group spans the graphs of several regions, or of several calls of one."""
        for edit in report.edits:
            if report.region:
                refuse_group_in_regions(self._region_of_group, edit.insertion, edit.site, report.region)
            elif not report.is_whole:
                refuse_group_in_parts(self._region_of_group, edit.insertion, edit.site, report.frame)
        self._reports.append(report)
        for edit in report.edits:
            group = processes_of(edit.insertion)
            # The largest group that averages agrees on skipped steps: its ranks have equal parameters.
            if group is not None and (self._averaging is None or group.size() > self._averaging.size()):
                self._averaging = group
                self._recorder.links.note_process_group(group)
        alone = lone_skip(report.edits)
        if alone is not None:
            self._recorder.links.note_lone_skip(alone)

    def check_outside(self, parameters: Mapping[str, Tensor], watched: Callable[[], Sequence[Tensor]]) -> None:
        """Warn once of answers at gradient sites of parameters that are not used in regions alone (``watched``).

        PolicyError for an action of a group, which would act on a part of the group, and for one that averages.
        """
        if self._checked_outside:
            return
        inside = set(map(id, watched()))
        silent = []
        for name, parameter in parameters.items():
            if id(parameter) in inside or not parameter.requires_grad:
                continue
            site = replace(step_site(name, parameter), kind="gradient")
            answers = ask_in_order(self._config.policy, site)
            for answered in answers:
                refuse(answered.insertion, Context(site, outside=name))
            silent += [name] if answers else []
        self._checked_outside = True
        if silent:
            self._warnings.warn_once("outside regions", OUTSIDE_OF_REGIONS.format(listed(silent)))

    def note_skipped(self, line: str) -> None:
        """List a region that the tracer skipped, and say so once."""
        if line not in self.skipped:
            self.skipped[line] = None
            if not self._config.in_framework:
                self._warnings.warn_once(line, f"the tracer skipped a region, which the policy does not reach: {line}")

    def note_break(self, reason: str) -> None:
        """List a reason that torch counted, unless its region is listed already."""
        first = reason.strip().splitlines()[0]
        if not any(line.endswith(first) for line in self.skipped):
            detail = [line.strip() for line in reason.splitlines() if "Developer debug context" in line]
            self.note_skipped(" ".join([*detail, first]))

    def wants(self, num_nodes: int) -> bool:
        """Whether to keep a joint graph with so many nodes: in a framework, the largest one."""
        return self._config.in_framework and num_nodes > self._num_nodes

    def keep(self, joint: JointGraph, num_nodes: int) -> None:
        """Keep a joint graph, with its nodes before the rewrite counted."""
        self.joint, self._num_nodes = joint, num_nodes

    def forget(self) -> None:
        """Forget the graphs: they are not in use any more."""
        self._reports.clear()
        self._region_of_group.clear()
        self._checked_outside = False
        self._averaging = None
        self._recorder.links.note_lone_skip(None)

    def note_out_of_reach(self, site: Site, answers: Sequence[Answered]) -> None:
        """Warn once of actions that were not inserted at a site."""
        actions = [answered.action for answered in answers]
        self._warnings.warn_once(
            f"view {site}",
            f"{site}: {', '.join(map(describe, actions))} cannot act, and nothing was inserted, because a part of this "
            "error does not come by here. Either the model returns this value, or a view of it, beside other views of "
            "the same memory (torch.compile makes such outputs outside of the graph), or it changes this value, a "
            "view, in place. Return or change a copy (.clone()), or act on another value",
        )

    def note_parallelism(self, around: DataParallelism) -> None:
        """Note the data parallelism around the model: its ranks are those that agree on skipped steps.

        PolicyError where a global clip would act on the gradients of each process by itself.
        """
        group = self._averaging if around.size == 1 else around.group
        ranks = around.size if group is None else group.size()
        # The noise of the sum over all ranks is drawn once.
        self._config.states.add_noise(ranks == 1 or distributed.get_rank(group) == 0)
        if around.size == 1:
            return
        if around.group is not None:
            self._recorder.links.note_process_group(around.group)
        self._recorder.links.note_data_parallel(around.module)
        edits = (edit for graph in self._reports for edit in graph.edits)
        refuse_in_data_parallelism(edits, around.name, around.size)
