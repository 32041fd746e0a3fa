"""Checks of a policy's rules and callbacks: each matches a site, and something runs its step sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from gradrewrite._utils.formatting import located_callable, nearest
from gradrewrite._utils.warnings import PendingWarnings
from gradrewrite.backends.compiled_graphs import CompiledGraphs
from gradrewrite.errors import NoSuchSiteError, PolicyError
from gradrewrite.instrumentation.module_names import InputNames, ModuleNames
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.rules import callbacks_of, first_guarded_site, may_answer_at, rules_at, rules_of
from gradrewrite.rewriting.inserters.saved import SavedRewrite
from gradrewrite.sites import AFTER_UPDATE, AT_GUARD, Pattern, Site

_OP_BY_OP = (
    "{!r} matches no tensor that is kept where the model runs op by op; the compiled model may keep others. "
    "model.memory(...) lists those"
)
_LOST = (
    "{!r} matched a site and matches none since the model has changed (a module was replaced, or is not used any "
    "more): the rule does nothing. Nearest sites: {}"
)
_BEYOND = "{!r} is beyond the {} iterations of {}: the rule does nothing at this length"
_NOTHING: Mapping[Site, str] = MappingProxyType({})


class RuleChecks:
    """The checks of one policy against the sites of its graphs."""

    def __init__(
        self, policy: Policy, graphs: CompiledGraphs, names: ModuleNames, inputs: InputNames, warnings: PendingWarnings
    ) -> None:
        self._policy, self._graphs, self._names, self._inputs, self._warnings = policy, graphs, names, inputs, warnings
        self._is_done = False
        self._followed: set[Hashable] = set()
        self._uses: dict[str, None] = {}  # other uses of the values of rules
        self._refused: dict[Hashable, str] = {}
        self._step_answers: frozenset[tuple[int, ...]] | None = None  # None until a guard has asked
        self.may_have_step_sites = may_answer_at(policy, {"step"})
        self.may_act_after_updates = may_answer_at(policy, AFTER_UPDATE)
        self._state_sites: dict[int, tuple[Site, ...]] = {}  # by guard
        # Backwards so far, until it is known whether a guard runs the actions at its sites.
        self._backwards: set[int] | None = set() if may_answer_at(policy, AT_GUARD) else None

    def check(self) -> None:
        """Raise NoSuchSiteError for a rule that matched no site of any graph; once."""
        if not self._is_done and self._graphs:
            not_saved = dict(item for graph in self._graphs for item in graph.not_saved)
            self.check_forms()
            self.check_on(dict.fromkeys(site for graph in self._graphs for site in graph.sites), not_saved)
            self._is_done = True

    def check_again(self, first: int) -> None:
        """Warn of rules that matched a site of an earlier graph and none of those from this number on.

        A module was replaced: a graph of other inputs has the names of the first one.
        """
        graphs = list(self._graphs)
        before, new = graphs[:first], graphs[first:]
        if not self._is_done or not new or not all(graph.is_whole for graph in new):
            return
        known = dict.fromkeys(site for graph in before for site in graph.sites)
        sites = dict.fromkeys(site for graph in new for site in graph.sites)
        for rule in rules_of(self._policy):
            pattern = Pattern.parse(rule.pattern)
            if pattern.kind == "saved" or not any(map(pattern.matches, known)) or any(map(pattern.matches, sites)):
                continue
            if self._warn_of_length(rule.pattern, pattern, sites):
                continue
            near = ", ".join([*self._likely_sites(pattern, sites), *nearest(rule.pattern, list(map(str, sites)))][:5])
            self._warnings.warn_once(f"lost {rule.pattern}", _LOST.format(rule.pattern, near or "none"))

    def note_uses(self, others: Sequence[Sequence[str]]) -> None:
        """Note the uses that a graph has of the values of patterns that match none of them."""
        for own in others:
            self._uses |= dict.fromkeys(own)

    def note_forms(self, saved: SavedRewrite) -> None:
        """Note the answers with forms of saved tensors that a graph followed, and those that it refused at a site."""
        self._followed.update(saved.followed)
        self._refused.update(saved.refused)
        if self._is_done:  # a later graph: of other inputs
            self._warn_of_refused()

    def check_forms(self) -> None:
        """Raise PolicyError for a form that was refused at every site so far; warn of those refused at some."""
        for key, text in self._refused.items():
            if key not in self._followed:
                raise PolicyError(f"{text}. Nor does it act elsewhere: give it another form", code="saved-tensor")
        self._warn_of_refused()

    def _warn_of_refused(self) -> None:
        for text in self._refused.values():
            self._warnings.warn_once(text, text)

    def forget(self) -> None:
        """Check anew when there are graphs again."""
        self._is_done = False

    def note_backward(self, backward: int, recorder: StepRecorder) -> None:
        """Warn at the second backward of answers at step sites that no guard runs, and of callbacks without answers."""
        if self._backwards is None:
            return
        self._backwards.add(backward)
        is_guarded = any(guard.has_step_sites for guard in recorder.guards.live)
        if len(self._backwards) < 2 or (is_guarded and self._step_answers is None):
            return  # a guard has not asked the policy yet
        self._backwards = None
        site = None if is_guarded else first_guarded_site(self._policy, self._names.known_parameters())
        if site is None:
            self._warn_of_silent_callbacks()
        else:
            self._warnings.warn_once(
                "no guard",
                f"the policy has actions at {site.partition(':')[0]} sites ({site}), which nothing runs: let the "
                "optimizer run them, with gr.guard(optimizer, model)",
            )
        self._warnings.flush_warnings()

    def note_step_answers(self, positions: Iterable[tuple[int, ...]]) -> None:
        """Note answers at a guard's sites, by position of the callback."""
        self._step_answers = (self._step_answers or frozenset()).union(positions)

    def note_state_sites(self, guard: int, sites: Sequence[Site], num_guards: int) -> None:
        """Note a guarded optimizer's state; at last NoSuchSiteError for lone rules."""
        self._state_sites[guard] = tuple(sites)
        if not sites or len(self._state_sites) < num_guards:
            return
        known = [site for own in self._state_sites.values() for site in own]
        for rule in rules_at(self._policy, "state"):
            if not any(map(Pattern.parse(rule.pattern).matches, known)):
                raise NoSuchSiteError(rule.pattern, nearest(rule.pattern, list(map(str, known)))[:5], rule.source)

    def _warn_of_silent_callbacks(self) -> None:
        answered = (self._step_answers or frozenset()).union(*(graph.answered for graph in self._graphs))
        sites = {site: site.kind for graph in self._graphs for site in graph.sites}
        kinds = ", ".join(f"{number} of kind {kind!r}" for kind, number in Counter(sites.values()).items())
        for position, callback in callbacks_of(self._policy).items():
            if position in answered:
                continue
            self._warnings.warn_once(
                f"silent {position}",
                f"the policy {located_callable(callback)} answered None at every site so far ({kinds}) and does "
                "nothing; sites are listed by gr.transform(model, []).trace(...).sites",
            )

    def check_on(self, sites: Sequence[Site] | Mapping[Site, None], not_saved: Mapping[Site, str] = _NOTHING) -> None:
        """Raise for the first rule without a site, warn of modules without a value.

        ``not_saved`` are values that are no saved tensors, and why; a rule that matches only such is warned of, too.
        """
        for rule in rules_of(self._policy):
            pattern = Pattern.parse(rule.pattern)
            if pattern.kind in AT_GUARD or any(pattern.matches(site) for site in sites):
                continue  # gr.guard checks the rules for its sites
            left = [(site, why) for site, why in not_saved.items() if pattern.kind == "saved" and pattern.matches(site)]
            if left:
                self._warn_not_saved(rule.pattern, left)
                continue
            if pattern.kind == "saved" and any(graph.engine == "aot_eager" for graph in self._graphs):
                self._warnings.warn_once(rule.pattern, _OP_BY_OP.format(rule.pattern))
                continue
            if self._warn_of_length(rule.pattern, pattern, sites):
                continue
            silent = sorted(self._names_without_site(pattern))
            if not silent:
                meant = self._likely_sites(pattern, sites)
                among = [str(s) for s in sites if str(s) not in meant and bool(s.to) == (pattern.to is not None)]
                among += list(self._uses) if pattern.to is not None else []
                known = [*meant, *nearest(rule.pattern, among)]
                raise NoSuchSiteError(rule.pattern, known[:5], rule.source)
            self._warnings.warn_once(
                rule.pattern,
                f"{rule.pattern!r} matches {', '.join(silent[:3])}, which made no differentiable value "
                "(unused, frozen, not a tensor, or its input handed on, as a dropout of probability 0 does): "
                f"the rule does nothing{self._advice(silent)}",
            )

    def _warn_of_length(self, text: str, pattern: Pattern, sites: Iterable[Site]) -> bool:
        """Warn of a rule for an iteration that a loop does not have at this length; return whether it is one."""
        whole = replace(pattern, source=replace(pattern.source, call=None))
        inside = [site for site in sites if site.iteration is not None and whole.matches(site)]
        if pattern.call is None or not inside:
            return False
        last = max(inside, key=lambda site: site.iteration or 0)
        self._warnings.warn_once(text, _BEYOND.format(text, (last.iteration or 0) + 1, last.name))
        return True

    def _warn_not_saved(self, pattern: str, left: Sequence[tuple[Site, str]]) -> None:
        site, why = min(left, key=lambda one: (not one[0].dtype.is_floating_point, "/" in one[0].name))
        others = f", and {len(left) - 1} more values that are not kept" if len(left) > 1 else ""
        self._warnings.warn_once(
            pattern,
            f"{pattern!r} matches {site.name}, which is no saved tensor: {why}{others}. The rule does nothing; "
            "model.memory(...) lists what is kept",
        )

    def _names_without_site(self, pattern: Pattern) -> set[str]:
        names: set[str] = set()
        if pattern.kind in (None, "error", "activation"):
            names.update(self._names.modules.values())
        if pattern.kind in (None, "gradient"):
            names.update(self._names.parameters.values())
        if pattern.kind == "input":
            names.update(self._inputs.known)
        return {
            name for name in names if name and pattern.matches(Site(pattern.kind or "error", name, output_of=(name,)))
        }

    def _likely_sites(self, pattern: Pattern, sites: Sequence[Site] | Mapping[Site, None]) -> list[str]:
        """Return sites that a pattern without sites may mean: under a first name, or the parameters of a module."""
        shared = self._names.first_names(pattern)
        found = [str(s) for s in sites if s.name in shared and pattern.kind in (None, s.kind)]
        if pattern.kind == "gradient":
            modules = {m for m in self._names.modules.values() if m and pattern.matches(Site("gradient", m))}
            found += [str(s) for s in sites if s.kind == "gradient" and s.name.rpartition(".")[0] in modules]
        return found

    def _advice(self, silent: Sequence[str]) -> str:
        """Return the advice to use ``gr.tap``, if one of these names is an ``nn.Identity`` that names no value."""
        identities = {self._names.modules.get(id(m)) for m in self._names.all_modules() if isinstance(m, nn.Identity)}
        if identities.isdisjoint(silent):
            return ""
        return (
            ". An nn.Identity names no value under gr.backend, or if it has both forward hooks and forward pre-hooks; "
            "name the value in the forward with gr.tap(x, name)"
        )
