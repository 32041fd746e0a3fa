"""Sessions: one policy at work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from gradrewrite._formatting import nearest
from gradrewrite._warnings import PendingWarnings
from gradrewrite.backends.explanation import Explanation, GraphReport
from gradrewrite.errors import NoSuchSiteError, PolicyError
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.policy.actions import GroupAction, Measurement
from gradrewrite.policy.rules import rules_of
from gradrewrite.rewriting.action_tracing import describe
from gradrewrite.rewriting.config import RewriteConfig
from gradrewrite.rewriting.module_names import InputNames, ModuleNames
from gradrewrite.sites import Pattern, Site

_CLIPS_APART = (
    "{!r} at gradient sites under {} with {} processes is not supported yet: each process would clip its own "
    "gradients, before they are reduced, and not the gradients that the optimizer uses. Clip after loss.backward() for "
    "now, with torch.nn.utils.clip_grad_norm_; clips of single sites act in each process by itself and are allowed"
)
_SKIPS_APART = (
    "{!r} with gr.guard under {} with {} processes is not supported yet: a check sees the gradients of its own process "
    "alone, so one process could skip an update that the others make, and their parameters would differ from then on. "
    "Use CheckFinite('raise') for now, or look at the reduced gradients after loss.backward()"
)


class Session:
    """One policy at work: the graphs that were compiled for it, and the names of the modules that it has met.

    Attributes:
        config: The configuration.
        recorder: Takes what backwards report.
        has_model: Whether it belongs to one model; it does not hold the model, for torch keeps backends for good.
        entry_name: Name of the compiled function around the model.
        names: Names of modules, parameters and buffers.
        inputs: Names of the model's inputs.
        graphs: Every compiled graph with a backward, in order.
        skipped: Lines of regions that the tracer skipped, in order.
        warnings: Warnings that wait for a safe moment.
    """

    def __init__(self, config: RewriteConfig, recorder: StepRecorder, model: nn.Module | None = None) -> None:
        self.config = config
        self.recorder = recorder
        self.has_model = model is not None
        self.entry_name = ""
        self.names = ModuleNames(model)
        self.inputs = InputNames(model)
        self.graphs: list[GraphReport] = []
        self.skipped: dict[str, None] = {}
        self.warnings = PendingWarnings()
        self._checked_rules = False

    def explanation(self) -> Explanation:
        """Return what was compiled so far."""
        return Explanation(tuple(self.graphs), tuple(self.skipped))

    def note_skipped(self, line: str) -> None:
        """List a region that the tracer skipped, and say so once."""
        if line not in self.skipped:
            self.skipped[line] = None
            self.warnings.warn_once(line, f"the tracer skipped a region, which the policy does not reach: {line}")

    def note_break(self, reason: str) -> None:
        """List a reason that torch counted, unless its region is listed already."""
        first = reason.strip().splitlines()[0]
        if not any(line.endswith(first) for line in self.skipped):
            detail = [line.strip() for line in reason.splitlines() if "Developer debug context" in line]
            self.note_skipped(" ".join([*detail, first]))

    def forget(self) -> None:
        """Forget the compiled graphs: they are not in use any more."""
        self.graphs.clear()
        self._checked_rules = False

    def note_out_of_reach(self, site: Site, actions: Sequence[Any]) -> None:
        """Warn once that the actions at a site were not inserted."""
        self.warnings.warn_once(
            f"view {site}",
            f"{site}: {', '.join(map(describe, actions))} cannot act, and nothing was inserted, because a part of this "
            "error does not come by here. Either the model returns this value, or a view of it, beside other views of "
            "the same memory (torch.compile makes such outputs outside of the graph), or it changes this value, a "
            "view, in place. Return or change a copy (.clone()), or act on another value",
        )

    def check_ranks(self, trainer: str, number: int) -> None:
        """Raise PolicyError for what does not act on the gradients of several processes as it should.

        Args:
            trainer: What shares the training among them.
            number: How many processes there are.
        """
        if number == 1:
            return
        edits = [e for graph in self.graphs for e in graph.edits]
        clips = [e for e in edits if isinstance(e.action, GroupAction) and e.site.kind == "gradient"]
        if clips:
            raise PolicyError(_CLIPS_APART.format(clips[0].action, trainer, number))
        skips = [e for e in edits if isinstance(e.action, Measurement) and e.action.fails == "skip"]
        if skips and self.recorder.live_guards:
            raise PolicyError(_SKIPS_APART.format(skips[0].action, trainer, number))

    def check_rules(self) -> None:
        """Raise NoSuchSiteError for a rule that matched no site of any graph so far; once."""
        if self._checked_rules or not self.graphs:
            return
        sites = dict.fromkeys(site for graph in self.graphs for site in graph.sites)
        self.check_rules_on(sites)
        self._checked_rules = True

    def check_rules_on(self, sites: Sequence[Site] | Mapping[Site, None]) -> None:
        """Raise for the first rule that matches none of these sites, warn where its module made no value."""
        for rule in rules_of(self.config.policy):
            pattern = Pattern.parse(rule.pattern)
            if any(pattern.matches(site) for site in sites):
                continue
            silent = sorted(self._names_without_site(pattern))
            if not silent:
                meant = self._likely_sites(pattern, sites)
                known = [*meant, *nearest(rule.pattern, [str(s) for s in sites if str(s) not in meant])]
                raise NoSuchSiteError(rule.pattern, known[:5])
            self.warnings.warn_once(
                rule.pattern,
                f"{rule.pattern!r} matches {', '.join(silent[:3])}, which made no differentiable value "
                f"(unused, frozen, or not a tensor): the rule does nothing{self._advice(silent)}",
            )

    def _names_without_site(self, pattern: Pattern) -> set[str]:
        """Return what a pattern without sites matches: modules, parameters or inputs that have a name and no site."""
        names: set[str] = set()
        if pattern.kind in (None, "error", "activation"):
            names.update(self.names.modules.values())
        if pattern.kind in (None, "gradient"):
            names.update(self.names.parameters.values())
        if pattern.kind == "input":
            names.update(self.inputs.known)
        return {
            name for name in names if name and pattern.matches(Site(pattern.kind or "error", name, output_of=(name,)))
        }

    def _likely_sites(self, pattern: Pattern, sites: Sequence[Site] | Mapping[Site, None]) -> list[str]:
        """Return sites that a pattern without sites may mean: under a first name, or the parameters of a module."""
        shared = self.names.first_names(pattern)
        found = [str(s) for s in sites if s.name in shared and pattern.kind in (None, s.kind)]
        if pattern.kind == "gradient":
            modules = {m for m in self.names.modules.values() if m and pattern.matches(Site("gradient", m))}
            found += [str(s) for s in sites if s.kind == "gradient" and s.name.rpartition(".")[0] in modules]
        return found

    def _advice(self, silent: Sequence[str]) -> str:
        """Return the advice to use ``gr.tap``, if one of these names is an ``nn.Identity`` that names no value."""
        identities = {self.names.modules.get(id(m)) for m in self.names.all_modules() if isinstance(m, nn.Identity)}
        if identities.isdisjoint(silent):
            return ""
        return (
            ". An nn.Identity names no value under gr.backend, or if it has both forward hooks and forward pre-hooks; "
            "name the value in the forward with gr.tap(x, name)"
        )
