"""Tensor functions that read values of other sites: ``call``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from gradrewrite._utils.formatting import located_callable
from gradrewrite.ir.values import ModuleCall
from gradrewrite.policy.frozen import explained
from gradrewrite.policy.insertions import Insertion, OtherValues, ReplaceTensor, action_key
from gradrewrite.sites import Kind, Pattern, Site, escape

_READABLE: tuple[Kind, ...] = ("activation", "error", "gradient", "input", "param")
_NAMES = ("name", "module", "parent")  # in braces, in a pattern


@explained
@dataclass(frozen=True, slots=True)
class Call:
    """A tensor function that is given other values; see ``call``."""

    function: Callable[..., Tensor]
    reads: tuple[tuple[str, str], ...]  # keyword, and pattern
    takes_value: bool = False  # its second argument is what the gradient is of

    @property
    def kinds(self) -> frozenset[Kind]:
        """The allowed kinds of site."""
        return frozenset(("error", "gradient", "input"))

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        run = partial(_called, self.function, tuple(name for name, _ in self.reads))
        effect = ReplaceTensor(run, OtherValues(self.reads, self.takes_value))
        # A region of equal structure has other names: a pattern with none of its own means other values there.
        named = tuple("" if "{" in text else site.module for _, text in self.reads)
        return Insertion(self, effect, has_units=True, key=(Call, action_key(self.function), self.reads, named))

    def __repr__(self) -> str:
        """As the call that makes it."""
        return f"call({located_callable(self.function)}, reads={dict(self.reads)!r})"


def _called(function: Callable[..., Tensor], names: tuple[str, ...], *tensors: Tensor) -> Tensor:
    first = len(tensors) - len(names)
    return function(*tensors[:first], **dict(zip(names, tensors[first:], strict=True)))


def filled(text: str, site: Site, calls: Sequence[ModuleCall]) -> str:
    """Fill the names of a site into a pattern; ``calls`` are the module calls around the op."""
    around = [name for name, *_ in calls]
    known = around[: around.index(site.module)] if site.module in around else [site.module.rpartition(".")[0]]
    names = site.name, site.module, known[-1] if known else ""
    for name, value in zip(_NAMES, names, strict=True):
        text = text if value else text.replace(f"{{{name}}}.", "")  # the model itself
        text = text.replace(f"{{{name}}}", escape(value))
    return text


def call(function: Callable[..., Tensor], *, reads: Mapping[str, str]) -> Call:
    """Make an action of a tensor function that reads values of other sites.

    Args:
        function: ``f(g, *, name, ...) -> tensor`` or ``f(g, x, *, name, ...) -> tensor``, with a keyword for each name
            in ``reads``; otherwise like any tensor function. It may not change what it reads.
        reads: Patterns of sites, ``kind:glob[#call]``, by keyword; each means one value of the same run of the graph.
            ``activation``: a value of the forward. ``param``: a parameter or a buffer as that forward read it.
            ``error``: behind the actions at that site. ``gradient`` and ``input``: before the actions there. These
            three exist when the function runs, and are in units of the unscaled loss. ``{name}``, ``{module}`` and
            ``{parent}`` are the name, the module and the module around the module of the site at which the function
            acts. Without ``#n`` it is the value of the same call of the innermost module around both, and in a rolled
            loop that of the same iteration.

    Returns:
        A frozen action for ``error``, ``gradient`` and ``input`` sites.

    Raises:
        TypeError: ``function`` is not callable, or its arguments are not those that it is given.
        ValueError: A pattern is malformed, has no kind, or one without a tensor to read.
        PolicyError: (at the rewrite) No site matches, or several of equal standing, or one that does not exist yet.

    Example:
        >>> import gradrewrite as gr
        >>> gate = gr.call(lambda g, *, gate: g * gate, reads={"gate": "activation:{parent}.router"})
        >>> sorted(gate.kinds)
        ['error', 'gradient', 'input']
    """
    if not callable(function):
        raise TypeError(f"gr.call(function, reads=...): function is callable, got {function!r}")
    return Call(function, tuple(reads.items()), check_reads(function, reads))


def check_reads(function: Callable[..., Any], reads: Mapping[str, str]) -> bool:
    """Check a function and its patterns; return whether it takes a value.

    That is the second of two tensors before the keywords: what the gradient is of.
    """
    if not isinstance(reads, Mapping) or not reads or not all(isinstance(text, str) for text in reads.values()):
        raise ValueError(f"reads has a pattern for each keyword of the function, got {reads!r}")
    for name, text in reads.items():
        kind = Pattern.parse(_without_names(name, text)).kind
        if kind not in _READABLE:
            raise ValueError(f"reads[{name!r}] is kind:glob with one of {', '.join(_READABLE)}, got {text!r}")
    return _takes_value(function, reads)


def _without_names(name: str, text: str) -> str:
    for known in _NAMES:
        text = text.replace(f"{{{known}}}", known)
    if "{" in text or "}" in text:
        raise ValueError(f"reads[{name!r}]: {{name}}, {{module}} and {{parent}} are filled in, got {text!r}")
    return text


def _takes_value(function: Callable[..., Any], reads: Mapping[str, str]) -> bool:
    try:
        given = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except ValueError:  # a built-in function
        return False
    parameters = list(given.parameters.values())
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    unknown = [name for name in reads if name not in named and not takes_any]
    needed = [p for p in parameters if p.default is p.empty and p.name not in reads]
    left = [p.name for p in needed if p.kind is p.KEYWORD_ONLY]
    if unknown or left:
        what = f"no keyword {unknown[0]!r}, which reads has" if unknown else f"a keyword {left[0]!r}, which reads lacks"
        raise TypeError(f"{located_callable(function)} has {what}")
    positional = [p.name for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL][: len(positional)]
    takes_some = positional or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(positional) > 2 or not takes_some or first != positional:
        raise TypeError(
            f"{located_callable(function)} takes ({', '.join(given.parameters)}); before the keywords in reads it "
            "takes the gradient, or the gradient and what it is of"
        )
    return len(positional) == 2


def with_any_names(text: str) -> Pattern:
    """Return the pattern of a read, with ``*`` for names in braces."""
    return Pattern.parse(re.sub(r"\{\w+\}\.?", "*", text))


def nearest_sites(
    site: Site, calls: Sequence[ModuleCall], others: Sequence[tuple[Site, Sequence[ModuleCall]]]
) -> list[int]:
    """Return the positions of the sites nearest to a site.

    They share most of the module calls around both with it; of these, one of the same name and call stands for itself.
    """

    def shared(other: Sequence[ModuleCall]) -> int:
        pairs = zip(calls, other, strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(calls), len(other)))

    depths = [shared(own) for _, own in others]
    most = max(depths, default=0)
    near = [n for n, depth in enumerate(depths) if depth == most]
    return [n for n in near if (others[n][0].name, others[n][0].call) == (site.name, site.call)] or near
