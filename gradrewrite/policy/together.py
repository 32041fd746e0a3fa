"""One function for the values of several sites: ``together``, ``joint``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradrewrite._utils.formatting import listed, located_callable, nearest
from gradrewrite.errors import CallbackError, PolicyError
from gradrewrite.policy.calls import check_reads
from gradrewrite.policy.frozen import explained
from gradrewrite.policy.insertions import BACKWARD, Insertion, OtherValues, ReplaceGroup, action_key
from gradrewrite.policy.rules import Rule, line_of
from gradrewrite.sites import Kind, Pattern, Site

GroupFunction = Callable[..., Mapping[str, Tensor]]


@explained
@dataclass(frozen=True, slots=True)
class Joint:
    """A function of all values of a group; see ``joint``."""

    function: GroupFunction
    reads: tuple[tuple[str, str], ...] = ()  # keyword, and pattern
    act_at: str | None = None  # pattern of the sites that it may change; None for all
    group: str = "default"

    @property
    def kinds(self) -> frozenset[Kind]:
        """The allowed kinds of site."""
        return BACKWARD

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        effect = ReplaceGroup(self.group, self.run, OtherValues(self.reads))
        key = Joint, action_key(self.function), self.reads, self.act_at, self.group
        return Insertion(self, effect, has_units=True, key=key)

    def run(self, sites: Sequence[Site], values: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
        """Call the function; return the values of all members.

        CallbackError for an answer that is none, PolicyError for members that cannot be told apart.
        """
        names = [name_in_group(site) for site in sites]
        self._check_members(sites, names)
        further = dict(zip((name for name, _ in self.reads), others, strict=True))
        copies = [value.clone() for value in values]  # what it changes in place and does not return is lost
        result = self.function(dict(zip(names, copies, strict=True)), **further)
        if not isinstance(result, Mapping):
            raise CallbackError(
                f"{self!r} returned {type(result).__name__}; it returns a mapping from the names of sites to tensors, "
                "empty if it changes none"
            )
        unknown = next((name for name in result if name not in names), None)
        if unknown is not None:
            close = listed(nearest(str(unknown), names)[:3])
            raise CallbackError(f"{self!r} returned {unknown!r}, a site that it was not given; nearest: {close}")
        for site, name in zip(sites, names, strict=True):
            if name in result and not self._may_change(site):
                raise CallbackError(f"{self!r} returned {name!r}, which act_at={self.act_at!r} does not match")
        return [result.get(name, value) for name, value in zip(names, values, strict=True)]

    def _may_change(self, site: Site) -> bool:
        return self.act_at is None or Pattern.parse(self.act_at).matches(site)

    def _check_members(self, sites: Sequence[Site], names: Sequence[str]) -> None:
        known: dict[str, Site] = {}
        for site, name in zip(sites, names, strict=True):
            if known.setdefault(name, site) is not site:
                raise PolicyError(
                    f"{self!r}: {known[name]} and {site} have one name; give each kind of site a group of its own",
                    code="together",
                )
        if not any(map(self._may_change, sites)):
            close = listed(nearest(str(self.act_at), [str(site) for site in sites])[:3])
            raise PolicyError(f"{self!r}: act_at matches none of its sites; nearest: {close}", code="together")

    def __repr__(self) -> str:
        """As the call that makes it."""
        reads = f", reads={dict(self.reads)!r}" if self.reads else ""
        act_at = "" if self.act_at is None else f", act_at={self.act_at!r}"
        return f"joint({located_callable(self.function)}{reads}{act_at}, group={self.group!r})"


def name_in_group(site: Site) -> str:
    """Return the name of a site in its group, without the kind."""
    return str(site).partition(":")[2]


def joint(
    function: GroupFunction,
    *,
    reads: Mapping[str, str] | None = None,
    act_at: str | None = None,
    group: str = "default",
) -> Joint:
    """Make an action of one function for several sites.

    Args:
        function: ``f(values, *, name, ...) -> values``. ``values`` has the tensors of all sites of the group by their
            names, without the kind (``layers.0``, ``cell#1``); it returns a mapping with those that it changes, of the
            same shape, dtype and device. Otherwise like any tensor function: ``gr.record`` makes a record of the group
            (``name@group:default``), a ``gr.State`` is one state.
        reads: As for ``gr.call``, without names to be filled in.
        act_at: Pattern of the sites that the function may change; the others are only given to it. None for all.
        group: Name of the group; two functions need two.

    Returns:
        A frozen action for ``error``, ``gradient``, ``input`` and ``step`` sites.

    Raises:
        TypeError: ``function`` is not callable, or lacks a keyword of a name in ``reads``.
        ValueError: A pattern is malformed.
        PolicyError: (at the rewrite) A value that the function changes is one that another member is computed from;
            or the gradients are those of several graphs, or of a process among several, before their average.
        CallbackError: (at the rewrite) The function returned something else.

    Example:
        >>> import gradrewrite as gr
        >>> def equal_norms(errors):
        ...     mean = sum(e.norm() for e in errors.values()) / len(errors)
        ...     return {name: e * (mean / e.norm()) for name, e in errors.items()}
        >>> policy = gr.on("error:heads.*", gr.joint(equal_norms))
    """
    if not callable(function):
        raise TypeError(f"gr.joint(function): function is callable, got {function!r}")
    if not isinstance(group, str) or not group:
        raise ValueError(f"gr.joint: group is a name, got {group!r}")
    if act_at is not None:
        Pattern.parse(act_at)
    if reads:
        if check_reads(function, reads) or any("{" in text for text in reads.values()):
            raise ValueError("gr.joint: the function takes the values and the keywords in reads, without names in {}")
    elif _num_needed(function) not in (None, 1):
        raise TypeError(f"gr.joint: {located_callable(function)} takes one argument, the values by their names")
    return Joint(function, tuple((reads or {}).items()), act_at, group)


def _num_needed(function: Callable[..., Any]) -> int | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a built-in function
        return None
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return sum(p.kind in named and p.default is inspect.Parameter.empty for p in parameters)


def together(
    pattern: str,
    function: GroupFunction,
    *,
    reads: Mapping[str, str] | None = None,
    act_at: str | None = None,
    group: str = "default",
) -> Rule:
    """Make a policy of one function for several sites.

    Args:
        pattern: ``[kind:]glob[#call]``, as for ``gr.on``.
        function: As for ``gr.joint``.
        reads: Patterns of other values, by keyword.
        act_at: Pattern of the sites that the function may change.
        group: Name of the group.

    Returns:
        ``gr.on(pattern, gr.joint(function, ...))``, a frozen policy.

    Raises:
        TypeError, ValueError: As ``gr.joint``.

    Example:
        >>> import gradrewrite as gr
        >>> def to_unit(gradients):
        ...     total = sum(g.square().sum() for g in gradients.values()).sqrt()
        ...     gr.record("total", total)
        ...     return {name: g / total for name, g in gradients.items() if g.dim() > 1}
        >>> gr.together("gradient:*", to_unit).pattern
        'gradient:*'
    """
    Pattern.parse(pattern)
    action = joint(function, reads=reads, act_at=act_at, group=group)
    return Rule(pattern, action, line_of(sys._getframe(1)))
