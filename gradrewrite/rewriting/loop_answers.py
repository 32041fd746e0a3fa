"""Answers of a policy in the iterations of a loop: classes of equal ones, and settings that differ by iteration."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import fake_tensors
from gradrewrite.instrumentation.naming import name_values
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.marked_loops import Loop, RolledLoop
from gradrewrite.ir.outputs import Iterations
from gradrewrite.ir.record_key import with_label
from gradrewrite.policy.actions import insertion_at
from gradrewrite.policy.insertions import Insertion, Omitted, ReplaceTensor
from gradrewrite.policy.rules import Answered
from gradrewrite.policy.sampling import Measured, sampled
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.sites import Kind, Site

KINDS: tuple[Kind, ...] = ("activation", "error")
Answers = Mapping[Site, tuple[Answered, ...]]


def sites_in(loop: Loop, first: int = 0, length: int | None = None) -> Iterable[Site]:
    """Yield the sites of a loop, iteration by iteration, up to this length; to the one at hand without it."""
    for iteration in range(first, fake_tensors.hint_of(loop.length) if length is None else length):
        for kind in KINDS:
            yield from (loop.site(name, kind, iteration) for name in loop.values if loop.has_site(name, kind))


def name_rolled(marked: MarkedJointGraph) -> None:
    """Name the values of Python loops, now that their bodies are traced."""
    rolled = [loop for loop in marked.loops if isinstance(loop, RolledLoop)]
    for loop in rolled:
        loop.share_facts(marked.values)
    if rolled:
        site_at = name_values(marked.values, marked.call, marked.counts)
        for loop in rolled:
            loop.name_sites(site_at)


def is_acting(answers: Sequence[Answered], measured: Measured) -> bool:
    """Return whether a policy's answers at a site insert something in steps with these measurements."""
    return any(not isinstance(found.insertion.effect, Omitted) for found in sampled(answers, measured))


def answer_form(answers: Sequence[Answered]) -> Hashable:
    """Return a key of answers without the numbers that may be tensors."""
    return tuple((one.position, one.insertion.rule, one.insertion.form) for one in answers)


@dataclass(frozen=True, slots=True)
class Table:
    """A setting of an action that differs by iteration."""

    tensor: Tensor  # 0-d, float64 where the device has that: what the action is given
    values: Mapping[int, float]  # by iteration

    def rows(self, length: int, device: torch.device) -> Tensor:
        """Return the settings of all iterations, ``[length]``; 1 for those without one."""
        return self.tensor.new_tensor([self.values.get(n, 1.0) for n in range(length)], device=device)


@dataclass(frozen=True, slots=True)
class IterationClass:
    """Iterations with equal answers at the sites of one value and kind, but for settings in tables."""

    site: Site  # of the first of them
    insertions: tuple[Insertion, ...]
    iterations: Iterations
    is_all: bool
    answered: Mapping[int, tuple[Insertion, ...]]  # by iteration
    tables: tuple[Table, ...] = ()

    def calls(self, length: int) -> range:
        """Return the numbers of this many iterations of the loop among the calls of the site."""
        stride = self.site.stride
        first = self.site.call - self.iterations.spans[0][0] * stride
        return range(first, first + length * stride, stride)

    def site_at(self, iteration: int) -> Site:
        """Return the site of an iteration of the loop."""
        assert self.site.iteration is not None
        return self.site.at_iteration(self.site.iteration + iteration - self.iterations.spans[0][0])

    def edit_at(self, edit: Edit, iteration: int, label: str) -> Edit:
        """Return an edit as that of one iteration."""
        site = self.site_at(iteration)
        keys = tuple(replace(key, site=with_label(str(site), label)) for key in edit.records)
        return replace(edit, site=site, action=self.answer(edit.insertion, iteration).action, records=keys)

    def answer(self, insertion: Insertion, iteration: int) -> Insertion:
        """Return the answer of an iteration in the place of an insertion."""
        return self.answered[iteration][self.insertions.index(insertion)]


def classes_of(loop: Loop, answers: Answers, name: str, kind: Kind, measured: Measured) -> list[IterationClass]:
    """Return the classes of iterations with answers at a value."""
    if not loop.has_site(name, kind):
        return []
    length = loop.num_answered
    known: dict[Hashable, dict[int, tuple[Insertion, ...]]] = {}
    for n in range(length):
        found = sampled(answers[loop.site(name, kind, n)], measured)
        known.setdefault(answer_form(found), {})[n] = tuple(one.insertion for one in found)
    classes = []
    for own in known.values():
        first = min(own)
        if own[first]:
            site = loop.site(name, kind, first)
            insertions, tables = _tabulated(own, site)
            loops = tuple((one.key, fake_tensors.hint_of(one.length)) for one in (*loop.before, loop))
            iterations = Iterations(loops, _spans(list(own), length))
            classes.append(IterationClass(site, insertions, iterations, len(own) == length, own, tables))
    return classes


def points_in(loop: Loop, markers: Sequence[Mapping[int, fx.Node]], iteration: int) -> list[InsertionPoint]:
    """Return the points of the values of an iteration.

    ``markers`` are by kind, and by the number of the value.
    """
    points = []
    for kind, own in zip(KINDS, markers, strict=True):
        for name, number in loop.numbers.items():
            marker = own.get(number)
            if marker is not None and loop.has_site(name, kind):
                point = InsertionPoint(loop.site(name, kind, iteration), marker.all_input_nodes[0], marker, -1)
                point.marker, point.calls = marker if kind == "error" else None, loop.values[name].calls
                points.append(point)
    return points


def _tabulated(own: Mapping[int, tuple[Insertion, ...]], site: Site) -> tuple[tuple[Insertion, ...], tuple[Table, ...]]:
    """Return the insertions of all iterations, and tables of the settings that differ."""
    dtype = torch.float32 if site.device is not None and site.device.type == "mps" else torch.float64
    insertions: list[Insertion] = []
    tables: list[Table] = []
    for at, insertion in enumerate(own[min(own)]):
        given: dict[str, Tensor] = {}
        for name, number in insertion.numbers.items():
            values = {n: float(found[at].numbers[name]) for n, found in own.items()}
            if len(set(values.values())) > 1:
                given[name] = torch.tensor(float(number), dtype=dtype)
                tables.append(Table(given[name], values))
        insertions.append(_with_tensors(insertion, given, site) if given else insertion)
    return tuple(insertions), tuple(tables)


def _with_tensors(insertion: Insertion, tensors: Mapping[str, Any], site: Site) -> Insertion:
    made, effect = insertion_at(replace(insertion.action, **tensors), site), insertion.effect
    assert isinstance(effect, ReplaceTensor)
    assert isinstance(made.effect, ReplaceTensor)
    return replace(insertion, action=made.action, effect=replace(effect, run=made.effect.run), key=made.key)


def _spans(numbers: Sequence[int], length: int) -> tuple[tuple[int, int | None], ...]:
    """Return the spans of ascending numbers; one that reaches the last iteration goes on in a longer loop."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return tuple((first, None if last == length - 1 else last) for first, last in spans)
