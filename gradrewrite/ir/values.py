"""Values of a forward: the tensors of a Dynamo graph."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from gradrewrite.distributed.layouts import Layout

ModuleCall = tuple[str, str, str]  # a module's name, and the two strings that tell its calls apart


@dataclass(eq=False)
class Value:
    """One tensor of the forward, as Dynamo's graph shows it."""

    op: str  # as the user called it
    calls: tuple[ModuleCall, ...]  # in which it was made, outermost first
    source: str  # the user's line that made it
    fake: Tensor
    used_in: list[tuple[ModuleCall, ...]] = field(default_factory=list)  # the module calls around each use
    # those of ``calls`` that are known not to return it: they may store it
    stored_by: set[ModuleCall] = field(default_factory=set)
    taps: list[str] = field(default_factory=list)  # names given to it by ``gr.tap``
    identities: list[str] = field(default_factory=list)  # pass-through modules that returned it
    is_returned: bool = False  # by the graph
    # positions of outputs of the graph that are this value or views of it
    returned_through: set[int] = field(default_factory=set)
    may_be_infinite: bool = False  # the program itself fills it with infinities
    is_selection: bool = False  # an element of a tuple, or the result of indexing
    is_view: bool = False
    replaces: Value | None = None  # what the same tensor was before an in-place op
    is_overwritten: bool = False  # autograd gave the tensor another history when such an op changed it
    same_as: Value | None = None  # what it turned out to be (``x.contiguous()`` of a contiguous ``x``)
    is_merged: bool = False  # what is known of it was added to that of ``same_as``
    subclass: str = ""  # its class, or that of its error, where it is no plain tensor and no DTensor
    is_part: bool = False  # a plain tensor that is a part of a global one, and nobody knows of which
    layout: Layout | None = None  # of a DTensor
    error_layout: Layout | None = None
    loop: str = ""  # name of the loop in whose body it is made; it is a value of each iteration
    has_error: bool = False  # its error came by while the graph was traced, used or not
    use_of: Value | None = None  # the value of which it is one use: the same tensor
    # What uses that: the call of a module, or the op that makes a value. None where it is a further path to a use of
    # another value, and with its error a part of that of ``use_of``.
    destination: ModuleCall | Value | None = None
    around: tuple[ModuleCall, ...] = ()  # the module calls around the destination that did not make it, innermost first
    refusal: str = ""  # why the use has no error of its own; ``""`` if it has

    @property
    def source_of_use(self) -> Value | None:
        """The used value, under its first name; None for a value that is no use."""
        return self.use_of if self.use_of is None or self.use_of.same_as is None else self.use_of.same_as

    @property
    def returned_by(self) -> list[ModuleCall]:
        """The module calls that return it, outermost first."""
        return [c for c in self.calls if c not in self.stored_by and any(c not in use for use in self.used_in)]

    @property
    def form(self) -> Hashable:
        """A key of the values of a line of code in equal iterations of a loop."""
        returned, calls = self.returned_by, [call for call in self.calls if call[0]]
        modules = tuple((call[0], call in returned) for call in calls)
        given = tuple(self.taps), tuple(self.identities), self.op, modules
        return *given, self.may_be_infinite, self.is_unused_selection, self.is_part, self.replaces is not None

    @property
    def is_bypassed(self) -> bool:
        """Whether a part of the error goes past it: an in-place op on a view sends that to the base."""
        return self.is_view and self.is_overwritten

    @property
    def is_unused_selection(self) -> bool:
        """Whether it is one that Dynamo leaves out of its graphs; in the body of a checkpoint it does not."""
        return self.is_selection and not self.used_in and not self.is_returned


def shape_of(tensor: Tensor | Layout) -> tuple[int | None, ...]:
    """Sizes of a fake tensor, or of a global one; None where one is symbolic."""
    return tuple(size if isinstance(size, int) else None for size in tensor.shape)


def num_bytes(tensor: Tensor) -> int | None:
    """Size of a fake tensor in memory; None where it is symbolic."""
    number = tensor.numel()
    return number * tensor.element_size() if isinstance(number, int) else None
