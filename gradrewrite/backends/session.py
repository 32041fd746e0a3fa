"""Sessions: one policy at work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed, nn

from gradrewrite._compat.data_parallel import DataParallelism
from gradrewrite._utils.formatting import describe_callable, nearest
from gradrewrite._utils.warnings import PendingWarnings
from gradrewrite.backends.explanation import Explanation, GraphReport
from gradrewrite.backends.parameter_watch import methods_that_use
from gradrewrite.errors import NoSuchSiteError, PolicyError
from gradrewrite.instrumentation.module_names import InputNames, ModuleNames
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.policy.actions import BucketedAction, ExampleClip, GroupAction, Measurement
from gradrewrite.policy.rules import (
    ask_in_order,
    callbacks_of,
    first_step_site,
    may_answer_at_steps,
    rules_of,
    step_site,
)
from gradrewrite.rewriting.action_tracing import describe
from gradrewrite.rewriting.config import RewriteConfig
from gradrewrite.sites import Pattern, Site

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

STATE = "_gradrewrite"  # the slot of a rewritten model, or its attribute where it was rewritten in place
_MANY = 3  # names that a warning lists
_CLIPS_APART = (
    "{0!r} at gradient sites under {1} with {2} processes: each process would clip its own gradients, before they are "
    "reduced, and not the gradients that the optimizer uses. Clip those, at step sites: "
    'gr.transform(model, gr.on("step:*", {0!r})) and gr.guard(optimizer, model). Or reduce in the graph before the '
    "clip, without {1}: put gr.passes.AllReduce() at the gradient sites before it. Clips of single sites act in each "
    "process by itself and are allowed"
)
_AVERAGED_TWICE = (
    "{0!r} inside {1}: gradients would be averaged twice. Take out the action and let {1} average them, or call the "
    "rewritten model itself, without it"
)
_SPANS = (
    "{0!r} at gradient sites acts on the gradients of one graph, but its group has gradients of {1}. Let it act on all "
    'of them before the update: gr.on("step:*", {0!r}) in the policy, and gr.guard(optimizer, model)'
)
_AVERAGED_IN_PART = (
    "{0!r} averages gradients in the graphs of regions, but its pattern has {1!r} too, which is used outside of all "
    "regions, and whose gradient would stay that of each process. Take a pattern of parameters inside of regions, if "
    "the others are averaged elsewhere; or compile the model as a whole, without regions; or take out the action, and "
    "let DistributedDataParallel(gr.transform(model, policy, regions=...)) average all of them"
)


class Session:
    """One policy at work: its compiled graphs, and the names of known modules.

    Attributes:
        config: The configuration.
        recorder: Takes what backwards report.
        has_model: Whether it belongs to one model; it does not hold the model, for torch keeps backends for good.
        entry_frames: The compiled functions around the model by name, with the method that each calls.
        begun: The methods that were called where a backward could follow.
        names: Names of modules, parameters and buffers.
        inputs: Names of the model's inputs.
        graphs: Every compiled graph with a backward, in order.
        skipped: Lines of regions that the tracer skipped, in order.
        warnings: Warnings that wait for a safe moment.
        regions: Names of the modules that are compiled separately; empty for the model as a whole.
        outside: Names of the outermost modules outside of them.
        step_answers: Positions of the callbacks that answered at step sites; None until a guard has asked.
        may_have_step_sites: Whether the policy may have answers at step sites.
    """

    def __init__(self, config: RewriteConfig, recorder: StepRecorder, model: nn.Module | None = None) -> None:
        self.config = config
        self.recorder = recorder
        self.has_model = model is not None
        self.entry_frames: dict[str, str] = {}
        self.begun: set[str] = set()
        self.names = ModuleNames(model)
        self.inputs = InputNames(model, config.methods)
        self.graphs: list[GraphReport] = []
        self.skipped: dict[str, None] = {}
        self.warnings = PendingWarnings()
        self.regions: tuple[str, ...] = ()
        self.outside: tuple[str, ...] = ()
        self._checked_rules = self._checked_outside = False
        self._averaging: ProcessGroup | None = None
        self.step_answers: frozenset[tuple[int, ...]] | None = None
        self.may_have_step_sites = may_answer_at_steps(config.policy)
        # Backwards so far, until it is known whether a guard runs the actions at step sites.
        self._backwards: set[int] | None = set() if self.may_have_step_sites else None

    def explanation(self) -> Explanation:
        """Return the compiled graphs and skipped regions so far."""
        return Explanation(tuple(self.graphs), tuple(self.skipped), self.outside)

    def note_graph(self, report: GraphReport) -> None:
        """List a graph.

        Raises:
            PolicyError: A group is clipped together in the graphs of several regions, or of several calls of one.
        """
        if report.region:
            groups = _groups_of(report)
            other = next((g for g in self.graphs if g.region != report.region and groups & _groups_of(g)), None)
            if other is not None:
                self.check_group(_first_group(report), report.region, other.region)
        self.graphs.append(report)
        for edit in report.edits:
            if isinstance(edit.action, BucketedAction):
                self._note_averaging(edit.action.processes())
        self.recorder.lone_skip = self.recorder.lone_skip or _lone_skip_of(report)

    def _note_averaging(self, group: ProcessGroup) -> None:
        """Let the largest group that averages agree on skipped steps: its ranks have equal parameters."""
        if self._averaging is None or group.size() > self._averaging.size():
            self._averaging = self.recorder.process_group = group

    def check_group(self, action: Any, region: str, other: str) -> None:
        """Raise PolicyError for an action of a group in two different regions."""
        if region != other:
            raise PolicyError(_SPANS.format(action, f"the regions {other!r} and {region!r}"))

    def check_outside(self, watched: Callable[[], Sequence[Tensor]]) -> None:
        """Look once for answers at gradient sites that do not exist, because parameters are outside of all regions.

        Args:
            watched: Lists the parameters that are used in regions alone; called where it is looked.

        Raises:
            PolicyError: One of them is an action of a group, which would act on a part of the group; or averages.
        """
        if self._checked_outside:
            return
        inside = set(map(id, watched()))
        silent = []
        for name, parameter in self.names.known_parameters().items():
            if id(parameter) in inside or not parameter.requires_grad:
                continue
            site = replace(step_site(name, parameter), kind="gradient")
            answers = ask_in_order(self.config.policy, site)
            group = next((a.action for a in answers if isinstance(a.action, GroupAction | BucketedAction)), None)
            if isinstance(group, BucketedAction):
                raise PolicyError(_AVERAGED_IN_PART.format(group, name))
            if group is not None:
                raise PolicyError(_SPANS.format(group, f"a region and {name!r}, which is used outside of all regions"))
            silent += [name] if answers else []
        self._checked_outside = True
        if silent:
            shown = ", ".join(silent[:_MANY]) + (f" and {len(silent) - _MANY} more" if len(silent) > _MANY else "")
            self.warnings.warn_once(
                "outside regions",
                f"the policy answers at the gradients of {shown}, which are used outside of all regions: there is no "
                'gradient site, or one that has a part of the gradient. Use gr.on("step:*", action) with gr.guard',
            )

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
        self.entry_frames.clear()
        self.begun.clear()
        self._checked_rules = self._checked_outside = False
        self._averaging = self.recorder.lone_skip = None

    def note_out_of_reach(self, site: Site, actions: Sequence[Any]) -> None:
        """Warn once of actions that were not inserted at a site."""
        self.warnings.warn_once(
            f"view {site}",
            f"{site}: {', '.join(map(describe, actions))} cannot act, and nothing was inserted, because a part of this "
            "error does not come by here. Either the model returns this value, or a view of it, beside other views of "
            "the same memory (torch.compile makes such outputs outside of the graph), or it changes this value, a "
            "view, in place. Return or change a copy (.clone()), or act on another value",
        )

    def warn_outside(self, model: nn.Module, names: Sequence[str]) -> None:
        """Warn of the parameters of the plain model that a backward reached through no rewritten graph."""
        is_partial = not self.config.fullgraph or not self.has_model
        if is_partial and (self.skipped or "plain" in self.warnings):
            return  # the tracer skipped a region, of which the user was told
        shown = ", ".join(names[:_MANY]) + (f" and {len(names) - _MANY} more" if len(names) > _MANY else "")
        children = list(dict.fromkeys(name.partition(".")[0] for name in names))
        kind = "rewritten" if self.has_model else "compiled"
        reason = f"the {kind} model was never called"
        if self.graphs:
            used = ", ".join(map(repr, children[:_MANY]))
            reason = f"the plain model, or {used} of it, was called directly or used outside of the graphs"
        way_out = f"call the {kind} model itself, or {'transform' if self.has_model else 'compile'} what is called"
        methods = methods_that_use(model, children)[:_MANY]
        if methods:
            reason += f", or a method without an entry point ({', '.join(f'{name}()' for name in methods)})"
            way_out += f"; or name the methods, gr.transform(model, policy, methods={tuple(methods)!r})"
        self.warnings.warn_once(
            "outside",
            f"a backward reached {shown} through no rewritten graph of the model, so the policy did not hold there: "
            f"{reason}. To have it there, {way_out}",
        )
        self.warnings.flush_warnings()

    def note_backward(self, backward: int) -> None:
        """Tell the guards; warn at the second one of answers at step sites that no guard runs, and of no answers."""
        guards = self.recorder.guards
        if not any(guard.has_stepped for guard in guards):
            for guard in guards:
                guard.note_backward()
        if self._backwards is None:
            return
        self._backwards.add(backward)
        is_guarded = any(guard.has_step_sites for guard in self.recorder.live_guards)
        if len(self._backwards) < 2 or (is_guarded and self.step_answers is None):
            return  # a guard has not asked the policy yet
        self._backwards = None
        if is_guarded:
            self._warn_of_silent_callbacks()
            return
        parameters = self.names.known_parameters()
        site = first_step_site(self.config.policy, parameters)
        if site is None:
            self._warn_of_silent_callbacks()
        else:
            self.warnings.warn_once(
                "no guard",
                f"the policy has actions at step sites ({site}), which nothing runs: let the optimizer run them, with "
                "gr.guard(optimizer, model)",
            )
            self.warnings.flush_warnings()

    def note_step_answers(self, positions: Iterable[tuple[int, ...]]) -> None:
        """Take note of callbacks of the policy, by their position in its lists, that answered at a step site."""
        self.step_answers = (self.step_answers or frozenset()).union(positions)

    def note_parallelism(self, around: DataParallelism) -> None:
        """Take note of the data parallelism around the model: its ranks are those that agree on skipped steps.

        Raises:
            PolicyError: A global clip would act on the gradients of each process by itself.
        """
        group = self._averaging if around.size == 1 else around.group
        ranks = around.size if group is None else group.size()
        # The noise of the sum over all ranks is drawn once.
        self.config.states.add_noise(ranks == 1 or distributed.get_rank(group) == 0)
        if around.size == 1:
            return
        if around.group is not None:
            self.recorder.process_group = around.group
        self.recorder.data_parallel = around.module
        edits = [edit for graph in self.graphs for edit in graph.edits if edit.site.kind == "gradient"]
        averaged = {edit.site: edit.action for edit in edits if isinstance(edit.action, BucketedAction)}
        if averaged and around.name.startswith("DistributedDataParallel"):
            raise PolicyError(_AVERAGED_TWICE.format(next(iter(averaged.values())), around.name))
        groups = (e.action for e in edits if isinstance(e.action, GroupAction) and e.site not in averaged)
        clips = (action for action in groups if not isinstance(action, ExampleClip))  # of whole gradients of examples
        clip = next(clips, None)
        if clip is not None:
            raise PolicyError(_CLIPS_APART.format(clip, around.name, around.size))

    def check_rules(self) -> None:
        """Raise NoSuchSiteError for a rule that matched no site of any graph; once, when all methods were called."""
        is_begun = bool(self.regions) or self.begun.issuperset(self.entry_frames.values())
        if self._checked_rules or not self.graphs or not is_begun:
            return
        sites = dict.fromkeys(site for graph in self.graphs for site in graph.sites)
        self.check_rules_on(sites)
        self._checked_rules = True

    def _warn_of_silent_callbacks(self) -> None:
        """Warn of callbacks that answered None at every site of the graphs so far."""
        answered = (self.step_answers or frozenset()).union(*(graph.answered for graph in self.graphs))
        sites = {site: site.kind for graph in self.graphs for site in graph.sites}
        kinds = ", ".join(f"{number} of kind {kind!r}" for kind, number in Counter(sites.values()).items())
        for position, callback in callbacks_of(self.config.policy).items():
            if position in answered:
                continue
            name = describe_callable(callback)
            self.warnings.warn_once(
                f"silent {position}",
                f"the policy {name} answered None at every site so far ({kinds}) and does nothing; sites are listed "
                "by gr.transform(model, []).trace(...).sites",
            )
        self.warnings.flush_warnings()

    def check_rules_on(self, sites: Sequence[Site] | Mapping[Site, None]) -> None:
        """Raise for the first rule that matches none of these sites, warn where its module made no value."""
        for rule in rules_of(self.config.policy):
            pattern = Pattern.parse(rule.pattern)
            if pattern.kind == "step" or any(pattern.matches(site) for site in sites):
                continue  # gr.guard checks the rules for its step sites
            silent = sorted(self._names_without_site(pattern))
            if not silent:
                meant = self._likely_sites(pattern, sites)
                known = [*meant, *nearest(rule.pattern, [str(s) for s in sites if str(s) not in meant])]
                raise NoSuchSiteError(rule.pattern, known[:5])
            self.warnings.warn_once(
                rule.pattern,
                f"{rule.pattern!r} matches {', '.join(silent[:3])}, which made no differentiable value "
                "(unused, frozen, not a tensor, or its input handed on, as a dropout of probability 0 does): "
                f"the rule does nothing{self._advice(silent)}",
            )

    def _names_without_site(self, pattern: Pattern) -> set[str]:
        """Return module, parameter or input names that match a pattern without sites."""
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


def _groups_of(report: GraphReport) -> set[Any]:
    found = (e.action for e in report.edits if isinstance(e.action, GroupAction) and e.site.kind == "gradient")
    return {(type(action), action.group) for action in found}


def _first_group(report: GraphReport) -> Any:
    return next(e.action for e in report.edits if isinstance(e.action, GroupAction) and e.site.kind == "gradient")


def _lone_skip_of(report: GraphReport) -> Site | None:
    """Return the site of the first skipping check that no average precedes."""
    averaged = set()
    for edit in report.edits:  # in their order at each site
        if isinstance(edit.action, BucketedAction):
            averaged.add(edit.site)
        elif isinstance(edit.action, Measurement) and edit.action.fails == "skip" and edit.site not in averaged:
            return edit.site
    return None


def attached_state(value: Any) -> Any:
    """Return the state (``ModelState``) of a rewritten model; None for any other object, its plain view included."""
    return getattr(value, STATE, None) if hasattr(type(value), STATE) else None
