"""Insertion at saved tensors: their stored forms, and restored values for the backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from gradrewrite._compat import aot_autograd, operators
from gradrewrite.ir import editing, markers
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.provenance import Anchor
from gradrewrite.numerics.offloading import fetch
from gradrewrite.policy.actions import Policy, describe
from gradrewrite.policy.insertions import Insertion, KeepTensor, Omitted, ReplaceTensor, StoreSaved
from gradrewrite.policy.rules import Answered, callbacks_of, rules_at
from gradrewrite.policy.sampling import Measured, sampled
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.lowering import SavedPlan, lower_saved
from gradrewrite.rewriting.restored_values import backward_closure, redirect_backward
from gradrewrite.rewriting.saved_tensors import SavedTensor, SavedTensors
from gradrewrite.sites import Site


def find_saved(
    marked: MarkedJointGraph, policy: Policy, ask: Callable[[Site], tuple[Answered, ...]]
) -> tuple[SavedTensors | None, tuple[Site, ...]]:
    """Return the saved tensors for a policy, and the sites of its callbacks' trial.

    None if the policy answers at none of these sites, and has no rule for saved tensors. What is saved is known after a
    trial of the partitioner; a callback that answers at no tensor that might be saved needs none.
    """
    if not aot_autograd.has_gradients(marked.graph):
        return None, ()
    if rules_at(policy, "saved"):
        return SavedTensors(marked), ()
    if not callbacks_of(policy):
        return None, ()
    saved = SavedTensors(marked)
    candidates = tuple(saved.candidates())
    return (saved if any(map(ask, candidates)) else None), candidates


@dataclass(frozen=True, slots=True)
class SavedRewrite:
    """The result of a rewrite at saved tensors."""

    candidates: tuple[Site, ...] = ()  # sites at which callbacks were asked, before it was known what is saved
    stored: Mapping[str, Site] = field(default_factory=dict)  # tensors that are not to be kept any more, by node
    not_saved: Mapping[Site, str] = field(default_factory=dict)  # values that are no saved tensors, and why
    followed: frozenset[Hashable] = frozenset()  # keys of the answers with forms that act at a site
    refused: Mapping[Hashable, str] = field(default_factory=dict)  # messages on answers that were refused at a site
    restoring: frozenset[str] = frozenset()  # names of nodes that restore values, in the backward


class SavedInsertion:
    """The edits at the saved tensors of one graph, as they are made."""

    def __init__(self, canvas: Canvas, saved: SavedTensors) -> None:
        self._canvas, self._graph, self._saved = canvas, canvas.graph, saved
        self.answers: dict[Site, tuple[Answered, ...]] = {}  # of the policy, by site in the order of the forward
        self.bases: dict[Site, fx.Node] = {}
        self.not_saved: dict[Site, str] = {}  # values that are no sites, and why
        self.restoring: set[str] = set()  # names of nodes that run in the backward
        self._plans: dict[Site, SavedPlan] = {}
        self._refused: dict[Hashable, list[tuple[Answered, Site, str]]] = {}  # by answer
        self._restored: dict[fx.Node, fx.Node] = {}  # what the backward reads instead of a tensor
        self._names: frozenset[str] = frozenset()  # of all saved nodes
        self._unmeasured: dict[str, tuple[Site, Any]] = {}  # by rule: a site at which nothing is stored
        self._measuring: set[str] = set()  # rules that measure somewhere
        self._closure: set[fx.Node] = set()  # what only the backward computes

    def ask(self, ask: Callable[[Site], tuple[Answered, ...]], measured: Measured) -> None:
        """Find the saved tensors and ask the policy, also at those that ``Recompute`` leads to."""
        further = [record.node for record in self._canvas.packing.records if not record.is_forward]
        self._saved.follow()
        while True:
            found, self._names = self._saved.find(further)
            new = [saved for saved in found if saved.node not in self.bases.values()]
            again = [saved.node for saved in new if self._ask_at(saved, ask, measured).recomputation is not None]
            if not new:
                break
            for base in again:
                aot_autograd.compute_again(self._family(base))
            if not again:
                break
        self.not_saved = self._saved.not_saved(found)

    def _ask_at(self, saved: SavedTensor, ask: Callable[[Site], tuple[Answered, ...]], measured: Measured) -> SavedPlan:
        site = saved.site
        while site in self.answers:  # a part of an op that is kept because of ``Recompute``
            site = _next(site)
        found, kept = ask(site), []
        for answered in found:
            effect = answered.insertion.effect
            refusal = effect.refusal(value_of(saved.node)) if isinstance(effect, StoreSaved) else ""
            if refusal:
                self._refused.setdefault(_key(answered), []).append((answered, site, refusal))
            else:
                kept.append(answered)
        plan = lower_saved(sampled(kept, measured), site)
        if plan.recomputation is not None:
            self._check_recomputation(saved, site, plan.recomputation)
        self.answers[site], self.bases[site], self._plans[site] = found, saved.node, plan
        return plan

    def _check_recomputation(self, saved: SavedTensor, site: Site, recomputation: Insertion) -> None:
        number = self._saved.number_of(saved.node)
        is_random = number in self._saved.random
        if is_random or number in self._saved.collective:
            reason = "draws random numbers, and would draw others" if is_random else "waits for other processes"
            refuse(recomputation, Context(site, not_repeatable=reason))

    @property
    def anchors(self) -> dict[Site, Anchor]:
        """The nodes of the saved tensors."""
        return {site: Anchor(base.name, self._saved.number_of(base) or 0) for site, base in self.bases.items()}

    @property
    def notes(self) -> list[str]:
        """Warnings of rules with measurements but no acting form."""
        idle = [found for rule, found in self._unmeasured.items() if rule not in self._measuring]
        text = "{}: {} records nothing, for no Store acts at a site that it matches"
        return [text.format(site, describe(action)) for site, action in idle]

    def result(self, candidates: tuple[Site, ...]) -> SavedRewrite:
        """Return the result at the saved tensors."""
        followed = (
            _key(answered)
            for site, found in self.answers.items()
            for answered in found
            if answered.insertion.key in {form.key for form in self._plans[site].forms}
        )
        refused = {}
        for key, answers in self._refused.items():
            answered, site, reason = answers[0]
            others = f" and {len(answers) - 1} more" if len(answers) > 1 else ""
            refused[key] = f"{site}{others}: {describe(answered.action)} leaves them as they are: {reason}"
        return SavedRewrite(
            candidates=candidates,
            stored={base.name: site for site, base in self.bases.items() if self._plans[site].is_acting},
            not_saved=self.not_saved,
            followed=frozenset(followed),
            refused=refused,
            restoring=frozenset(self.restoring),
        )

    def insert(self) -> None:
        """Insert the forms, and let the backward read restored values."""
        self._closure = backward_closure(self._graph)
        for site, plan in self._plans.items():
            base = self.bases[site]
            if plan.recomputation is not None:
                self._canvas.note(site, plan.recomputation)
            decoded = self._insert_forms(site, base, plan.forms) if plan.forms else base
            for insertion in plan.measured:
                self._measure(site, base, decoded, insertion)
        if self._restored:
            self._note_twins(redirect_backward(self._graph, self._closure, self._restored, self._is_kept))
            self._prefetch()

    def _insert_forms(self, site: Site, base: fx.Node, insertions: Sequence[Insertion]) -> fx.Node:
        """Insert encoding and decoding; return the decoded value in the forward."""
        before = self._behind_first_reader(base)
        forms = [insertion.effect for insertion in insertions if isinstance(insertion.effect, StoreSaved)]
        made: dict[str, list[fx.Node]] = {form.form: [] for form in forms}
        parts, self._restored[base] = self._insert_form(base, forms, before, made)
        for insertion, form in zip(insertions, forms, strict=True):
            self._canvas.note(site, insertion, tuple(node.name for node in made[form.form]))
        if len(forms) == 1:
            return self._restored[base]
        decoded, _ = self._decode(forms[0], parts, base, before)  # which does not come from host memory
        return decoded

    def _insert_form(
        self, node: fx.Node, forms: Sequence[StoreSaved], before: fx.Node, made: dict[str, list[fx.Node]]
    ) -> tuple[list[fx.Node], fx.Node]:
        """Insert the first form of a value, and the others of its parts; return these, and the restored value."""
        form, *others = forms
        parts, new = editing.compute(self._graph, lambda x: list(form.encode(x)), [node], before, "is_forward")
        made[form.form] += new
        if others:
            kept = [self._insert_form(part, others, before, made)[1] for part in parts]
        else:
            editing.store(parts)
            kept = parts
        restored, new = self._decode(form, kept, node, before)
        aot_autograd.compute_again(new)
        self.restoring.update(one.name for one in new)
        made[form.form] += new
        return parts, restored

    def _decode(
        self, form: StoreSaved, parts: Sequence[fx.Node], like: fx.Node, before: fx.Node
    ) -> tuple[fx.Node, list[fx.Node]]:
        wanted = value_of(like)
        (result,), new = editing.compute(
            self._graph,
            lambda *xs: [form.decode(xs[:-1], xs[-1])],
            [*parts, like],
            before,
            "is_forward",
            is_pruned=True,
        )
        got = value_of(result)
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        sizes = zip(wanted.shape, got.stride(), wanted.stride(), strict=True)
        assert all(size == 1 or a == b for size, a, b in sizes)
        return result, new

    def _measure(self, site: Site, base: fx.Node, decoded: fx.Node, insertion: Insertion) -> None:
        if isinstance(insertion.effect, Omitted):
            self._canvas.packing.numbering.new(insertion.effect.names, str(site))
            return
        assert isinstance(insertion.effect, ReplaceTensor | KeepTensor)
        if decoded is base:
            self._unmeasured.setdefault(insertion.rule, (site, insertion.action))
            return
        self._measuring.add(insertion.rule)
        traced = self._canvas.tracer.trace(
            insertion, insertion.effect.run, site, value_of(base), self._canvas.mode(site), [value_of(decoded)]
        )
        (_, *extras), new = editing.splice(traced.graph, self._graph, [base, decoded], decoded.next, "is_forward")
        keys = self._canvas.packing.add(insertion, site, site, traced.reports, extras)
        self._canvas.note(site, insertion, tuple(node.name for node in new), tuple(keys))

    def _behind_first_reader(self, base: fx.Node) -> fx.Node:
        """Return the node behind a tensor and its first reader in the forward.

        Inductor has put in memory by then what the reader needs there, and does not compute it again for the form. What
        is written back to inputs, as running statistics are, is written at the end of the joint graph.
        """
        family = self._family(base)
        readers = [u for node in family for u in node.users if not _is_marker(u) and u not in self._closure]
        readers = [reader for reader in readers if self._saved.base_of(reader) is not base and reader.op != "output"]
        readers = [reader for reader in readers if not operators.written_by(reader)]
        return _behind(min(readers, default=base))

    def _family(self, base: fx.Node) -> list[fx.Node]:
        return [node for node in self._graph.nodes if self._saved.base_of(node) is base]

    def _note_twins(self, twins: Mapping[fx.Node, fx.Node]) -> None:
        """List recomputed nodes with the edit of the tensor that they are made from."""
        site_of = {base: site for site, base in self.bases.items()}
        added: dict[Site, list[str]] = {}
        self.restoring.update(twin.name for twin in twins)
        for twin, base in twins.items():
            added.setdefault(site_of[base], []).append(twin.name)
        for number, edit in enumerate(self._canvas.edits):
            if edit.insertion in self._plans[edit.site].forms[-1:] if edit.site in self._plans else False:
                self._canvas.edits[number] = replace(edit, nodes=(*edit.nodes, *added.get(edit.site, ())))

    def _is_kept(self, node: fx.Node) -> bool:
        """Return whether the forward keeps a node's value unchanged."""
        return node.name in self._names and self._saved.base_of(node) not in self._restored

    def _prefetch(self) -> None:
        """Let each copy from host memory begin those of the module that the backward comes to next."""
        order = {node: number for number, node in enumerate(self._graph.nodes)}
        closure = self._closure
        first: dict[fx.Node, int] = {}  # position of the first reader in the backward
        for node in reversed(self._graph.nodes):
            readers = [order[u] if u in closure else first[u] for u in node.users if u in closure or u in first]
            if readers and node not in closure:
                first[node] = min(readers)
        copies: dict[str, list[fx.Node]] = {}  # by module, in the order of the backward
        sites = {node: edit.site for edit in self._canvas.edits for node in edit.nodes}
        found = [node for node in self._graph.find_nodes(op="call_function", target=fetch) if node in first]
        for node in sorted(found, key=first.__getitem__):
            copies.setdefault(sites[node.name].module, []).append(node)
        groups = [*copies.values(), []]
        for group, following in itertools.pairwise(groups):
            for number, node in enumerate(group):
                copied = [other.args[0] for other in (*group[number + 1 :], *following)]
                made = [one for one in copied if isinstance(one, fx.Node) and order[one] < order[node]]
                editing.set_argument(node, "upcoming", made)


def _behind(node: fx.Node) -> fx.Node:
    """Return the node right behind a node and all inputs of the graph."""
    last: fx.Node = max(node, node.graph.find_nodes(op="placeholder")[-1])
    return last.next


def _key(answered: Answered) -> Hashable:
    return answered.position, answered.insertion.key


def _is_marker(node: fx.Node) -> bool:
    return node.target is markers.mark_activation


def _next(site: Site) -> Site:
    head, dot, number = site.name.rpartition(".")
    name = f"{head}.{int(number) + 1}" if dot and number.isdecimal() else f"{site.name}.1"
    return replace(site, name=name, addresses=((name, site.call), *site.addresses[1:]))
