"""Sites of a backward graph, and patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch

Kind = Literal["error", "gradient", "activation", "input", "step", "saved", "param", "state", "backward"]


@dataclass(frozen=True, slots=True)
class KindTraits:
    """The traits of a kind of site."""

    order: int | None  # in the execution of a step, with what is no site; None for none. See ``diagnostics.run_log``
    noun: str = "value"  # in log lines
    in_forward: bool = False
    of_value: bool = False  # of a value of the forward: it is named by modules and ops, with calls
    of_parameter: bool = False  # it is named as a parameter
    has_units: bool = False  # a gradient, which a loss scale multiplies
    is_leaf: bool = False  # the gradient of a leaf: an output of the backward, nothing there reads it
    at_guard: bool = False  # it is found by a guard, at ``optimizer.step()``
    after_update: bool = False  # of these, behind the update
    needs_kind: bool = False  # only rules and callbacks that name this kind act there


TRAITS: dict[Kind, KindTraits] = {
    "error": KindTraits(4, "error", of_value=True, has_units=True),
    "gradient": KindTraits(6, "grad", of_parameter=True, has_units=True, is_leaf=True),
    "activation": KindTraits(1, in_forward=True, of_value=True),
    "input": KindTraits(5, "error", has_units=True, is_leaf=True),
    "step": KindTraits(8, "grad", of_parameter=True, has_units=True, is_leaf=True, at_guard=True),
    "saved": KindTraits(None, in_forward=True, of_value=True, needs_kind=True),
    "param": KindTraits(9, of_parameter=True, at_guard=True, after_update=True, needs_kind=True),
    "state": KindTraits(10, at_guard=True, after_update=True, needs_kind=True),
    "backward": KindTraits(4, "backward", of_value=True, needs_kind=True),
}


def kinds_with(has_trait: Callable[[KindTraits], bool]) -> frozenset[Kind]:
    """Return the kinds of sites with a trait."""
    return frozenset(kind for kind, traits in TRAITS.items() if has_trait(traits))


AFTER_UPDATE = kinds_with(lambda traits: traits.after_update)
AT_GUARD = kinds_with(lambda traits: traits.at_guard)


@dataclass(frozen=True, slots=True)
class Site:
    """One insertion point of a joint forward/backward graph.

    Attributes:
        kind: ``"error"`` for dL/d(activation), summed over all uses, or the part of one use; ``"gradient"`` for
            dL/d(parameter); ``"activation"`` for a value of the forward; ``"input"`` for the
            gradient of a differentiable input; ``"step"`` for the gradient that ``optimizer.step()``
            uses, of a parameter; ``"param"`` for a parameter and ``"state"`` for a tensor of its optimizer's state,
            both as a guarded ``optimizer.step()`` leaves them; ``"saved"`` for a tensor that the forward keeps for the
            backward; ``"backward"`` for the backward of an op.
        name: Name of the module whose output the value is, else ``module/op``; a parameter's name, with
            ``.KEY`` behind it for ``optimizer.state[parameter][KEY]``; an input's argument name; the name given to
            ``gr.tap``. A saved tensor has the name of its value; one that is no value of the model's code has
            ``module/op.1``, ``module/op.2`` of the op that it is a part of, in the order of the forward. The backward
            of an op has ``module/op``; its other attributes are those of the op's value.
        module: Name of the innermost module that ran the op (``""`` is the root).
        op: Name of the op as the user called it (``"softmax"``); ``""`` for gradients and inputs.
        output_of: Names of the modules whose output this value is, innermost first.
        call: Which call of the module (or of the op in its module), from 0; at a step site which of the models in one
            optimizer that have a parameter of this name (policies are asked with 0).
        shape: Sizes in elements; ``None`` for a symbolic size.
        dtype: Element type.
        device: Device of the value.
        nbytes: Size in memory of a saved tensor, views of which share it; None where symbolic, and at other kinds.
        source: ``file:line "code"`` of the forward op; ``""`` where there is none.
        may_be_infinite: Whether the program itself fills the value with infinities (a mask before a softmax).
        addresses: Every ``(name, call)`` that a pattern may match; empty means name and call.
        iteration: Which iteration of a loop, from 0, in the order of execution; None outside of loops.
        destination: For one use of a value, the name and call of the module or op that uses it, then those of the
            module calls around that, innermost first; empty for the sum over all uses.
        strides: How much the call of each address, and of each destination, grows from one iteration to the next; empty
            for 1.
        is_outside: Whether an op outside of all calls of modules made the value, as in a loss that is traced.
    """

    kind: Kind
    name: str
    module: str = ""
    op: str = ""
    output_of: tuple[str, ...] = ()
    call: int = 0
    shape: tuple[int | None, ...] = ()
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    source: str = ""
    may_be_infinite: bool = field(default=False, repr=False)
    addresses: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    nbytes: int | None = None
    iteration: int | None = None
    destination: tuple[tuple[str, int], ...] = ()
    strides: tuple[int, ...] = field(default=(), repr=False, compare=False)
    is_outside: bool = field(default=False, repr=False, compare=False)

    @property
    def stride(self) -> int:
        """The difference between the calls of two successive iterations."""
        return self.strides[0] if self.strides else 1

    @property
    def to(self) -> str:
        """The module or op (``module/op``) that uses the value, at the site of one use; ``""`` at other sites."""
        return self.destination[0][0] if self.destination else ""

    @property
    def to_call(self) -> int:
        """The number of the call of the destination, from 0."""
        return self.destination[0][1] if self.destination else 0

    def at_iteration(self, number: int) -> Site:
        """Return the site of the same value in another iteration of its loop."""
        assert self.iteration is not None
        moved, named = number - self.iteration, self.addresses + self.destination
        own = zip(named, self.strides or (1,) * len(named), strict=True)
        found = tuple((name, call + moved * stride) for (name, call), stride in own)
        addresses, destination = found[: len(self.addresses)], found[len(self.addresses) :]
        call = self.call + moved * self.stride
        return replace(self, call=call, iteration=number, addresses=addresses, destination=destination)

    def moved(self, calls: int) -> Site:
        """Return the site of the same value as many calls later."""
        if not calls:
            return self
        addresses = tuple((name, call + calls) for name, call in self.addresses)
        destination = tuple((name, call + calls) for name, call in self.destination)
        return replace(self, call=self.call + calls, addresses=addresses, destination=destination)

    @property
    def traits(self) -> KindTraits:
        """The traits of its kind."""
        return TRAITS[self.kind]

    def __str__(self) -> str:
        used = f"{ARROW}{_numbered(self.to, self.to_call)}" if self.destination else ""
        return f"{self.kind}:{_numbered(self.name, self.call)}{used}"

    def matches(self, pattern: str) -> bool:
        """Return whether a pattern names this site.

        Args:
            pattern: ``[kind:]glob[#call]`` after ``fnmatch.fnmatchcase``; ``*`` crosses dots and
                slashes. Without ``/`` the glob is compared with the modules whose output the value
                is (or with the parameter's name), with ``/`` with ``module/op`` and with names of
                modules and parameters that have a ``/`` themselves. A pattern without a kind matches no ``step``,
                ``saved``, ``param``, ``state`` or ``backward`` site. ``[error:]glob[#call]->glob[#call]`` matches the
                sites of single uses alone, and these by no other pattern; of nested modules around a use that the
                second glob names, the outermost is meant.

        Returns:
            True if any address of the site matches.

        Raises:
            ValueError: The part before ``:`` is no kind of site (of a single use: not ``error``), the part after ``#``
                no number, or a side of ``->`` is empty.

        Example:
            >>> Site("error", "decoder.3").matches("error:decoder.?")
            True
        """
        return Pattern.parse(pattern).matches(self)

    def matched(self, pattern: str) -> str:
        """Return the name of this site in a pattern.

        ``name`` is that of the innermost module that returns the value; a pattern may mean one around it.

        Args:
            pattern: As for ``matches``.

        Returns:
            The first address that matches, innermost first, with ``#call`` where that is not 0; ``""`` if none does.

        Raises:
            ValueError: As ``matches``.

        Example:
            >>> site = Site("error", "block.mlp.down", addresses=(("block.mlp.down", 0), ("block.mlp", 0)))
            >>> site.matched("error:*.mlp")
            'block.mlp'
        """
        return Pattern.parse(pattern).address_in(self) or ""


ARROW = "->"  # from a value to a use of it


def _numbered(name: str, call: int) -> str:
    return f"{name}#{call}" if call else name


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A parsed pattern of names and calls.

    Attributes:
        glob: Shell-style pattern of names.
        call: Number of the call, from 0; None for every call.
    """

    glob: str
    call: int | None = None

    @classmethod
    def parse(cls, text: str, whole: str) -> NamePattern:
        """Parse ``glob[#call]``, a part of a whole pattern."""
        glob, sharp, number = text.rpartition("#")
        if not sharp or (glob.endswith("[") and number.startswith("]")):  # none, or one of the name
            return cls(text)
        if not number.isdecimal():
            raise ValueError(f"pattern {whole!r}: '#' is followed by the number of a call, got {number!r}")
        return cls(glob, int(number))

    def matches(self, name: str, call: int, *, is_op: bool) -> bool:
        """Compare with a name, and with its kind: globs with ``/`` are for ops."""
        may_mean = ("/" in self.glob) == is_op or (not is_op and "/" in name)
        return may_mean and fnmatchcase(name, self.glob) and self.call in (None, call)

    def matches_text(self, text: str) -> bool:
        """Compare with ``name[#call]``."""
        name, sharp, number = text.rpartition("#")
        name, number = (name, number) if sharp and number.isdecimal() else (text, "")
        return (self.call is None or str(self.call) == (number or "0")) and (
            fnmatchcase(name, self.glob) or fnmatchcase(text, self.glob)
        )


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern.

    Attributes:
        kind: Kind of the sites; None for every kind.
        source: Pattern of the names of sites.
        to: Pattern of what uses the value, for sites of single uses; None for all others.
    """

    kind: Kind | None
    source: NamePattern
    to: NamePattern | None = None

    @property
    def glob(self) -> str:
        """Shell-style pattern of names."""
        return self.source.glob

    @property
    def call(self) -> int | None:
        """Number of the call, from 0; None for every call."""
        return self.source.call

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Parse ``[kind:]glob[#call]``; the ValueError names the wrong part."""
        if not isinstance(text, str) or not text:
            raise ValueError(f"a pattern is a non-empty string such as 'error:decoder.*', got {text!r}")
        kind: Kind | None = None
        head, colon, rest = text.partition(":")
        if colon:
            kind = next((k for k in TRAITS if k == head), None)
            if kind is None:
                raise ValueError(f"pattern {text!r}: {head!r} is no kind of site; use one of {', '.join(TRAITS)}")
        source, arrow, to = (rest if colon else text).partition(ARROW)
        if not arrow:
            return cls(kind, NamePattern.parse(source, text))
        is_plain = source.strip() == source and to.strip() == to and ARROW not in to
        if not (source and to and is_plain) or kind not in (None, "error"):
            raise ValueError(
                f"pattern {text!r}: the error of one use of a value is 'error:SOURCE->DESTINATION', with the name of "
                "the value on the left, and on the right that of the module or op that uses it"
            )
        return cls(kind, NamePattern.parse(source, text), NamePattern.parse(to, text))

    def may_begin_at(self, site: Site) -> bool:
        """Return whether its left side means the value of a site, in whichever call."""
        return replace(self, source=replace(self.source, call=None), to=None).matches(site)

    def may_end_at(self, name: str, *, is_op: bool) -> bool:
        """Return whether its right side means a module or an op, in whichever call."""
        return self.to is not None and replace(self.to, call=None).matches(name, 0, is_op=is_op)

    def matches_text(self, site: str) -> bool:
        """Return whether the text of a site, ``kind:name[#call]``, matches, as in the address of a record."""
        kind, colon, rest = site.partition(":")
        kind, rest = (kind, rest) if colon else ("", site)
        source, arrow, to = rest.partition(ARROW)
        if self.kind not in (None, kind) or bool(arrow) != (self.to is not None):
            return False
        return self.source.matches_text(source) and (self.to is None or self.to.matches_text(to))

    def matches(self, site: Site) -> bool:
        """Compare with every address of the site; without a kind, only sites of the model's graphs match."""
        return self.address_in(site) is not None

    def address_in(self, site: Site) -> str | None:
        """Return the first address of a site that matches, with ``#call``; None if none does."""
        # A step site too is of no graph of the model: a pattern without a kind does not mean it.
        is_elsewhere = site.traits.needs_kind or site.traits.at_guard
        if (site.kind != self.kind and (self.kind is not None or is_elsewhere)) or not self._matches_use(site):
            return None
        for name, call in site.addresses or ((site.name, site.call),):
            is_op = site.traits.of_value and "/" in name and name not in site.output_of
            if self.source.matches(name, call, is_op=is_op):
                return _numbered(name, call)
        return None

    def _matches_use(self, site: Site) -> bool:
        """Whether the destination is meant: the outermost one that matches."""
        if self.to is None or not site.destination:
            return self.to is None and not site.destination
        first, *around = (self.to.matches(name, call, is_op="/" in name) for name, call in site.destination)
        return first and not any(around)


def escape(name: str) -> str:
    """Escape the signs ``[``, ``*``, ``?`` and ``#`` of a name, for a pattern that means this name alone.

    Args:
        name: A site's name, without its kind, and without the number of a call.

    Returns:
        The pattern; the name itself if it has none of these signs. As ``glob.escape``.

    Raises:
        TypeError: ``name`` is no string.

    Example:
        >>> "error:" + escape("blocks.[0]") + "#1"
        'error:blocks.[[]0]#1'
    """
    if not isinstance(name, str):
        raise TypeError(f"gr.escape(name): name is a string, got {type(name).__name__}")
    return re.sub(r"([*?[#])", r"[\1]", name)
