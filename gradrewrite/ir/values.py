"""Values of a forward: the tensors of a Dynamo graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from gradrewrite.distributed.layouts import Layout

ModuleCall = tuple[str, str, str]  # a module's name, and the two strings that tell its calls apart


@dataclass(eq=False)
class Value:
    """One tensor of the forward, as Dynamo's graph shows it.

    Attributes:
        op: Name of the op as the user called it.
        calls: The module calls in which it was made, outermost first.
        source: The user's line that made it.
        fake: Its fake tensor.
        used_in: The module calls around each use.
        stored_by: Those of ``calls`` that are known not to return it: they may store it.
        taps: Names given to it by ``gr.tap``.
        identities: Pass-through modules that returned it.
        is_returned: Whether the graph returns it.
        returned_through: Positions of the outputs of the graph that are this value or views of it.
        may_be_infinite: Whether the program itself fills it with infinities.
        is_selection: Whether it is an element of a tuple, or the result of indexing.
        is_view: Whether it is a view of another tensor.
        replaces: The value that the same tensor was before an in-place op.
        is_overwritten: Whether autograd gave the tensor another history when such an op changed it.
        same_as: The value that this one turned out to be (``x.contiguous()`` of a contiguous ``x``).
        is_part: Whether it is a plain tensor that is a part of a global one, and nobody knows of which.
        layout: The layout of a DTensor; None for a plain tensor.
        error_layout: That of its error.
        has_error: Whether its error came by while the graph was traced, used or not.
    """

    op: str
    calls: tuple[ModuleCall, ...]
    source: str
    fake: Tensor
    used_in: list[tuple[ModuleCall, ...]] = field(default_factory=list)
    stored_by: set[ModuleCall] = field(default_factory=set)
    taps: list[str] = field(default_factory=list)
    identities: list[str] = field(default_factory=list)
    is_returned: bool = False
    returned_through: set[int] = field(default_factory=set)
    may_be_infinite: bool = False
    is_selection: bool = False
    is_view: bool = False
    replaces: Value | None = None
    is_overwritten: bool = False
    same_as: Value | None = None
    is_part: bool = False
    layout: Layout | None = None
    error_layout: Layout | None = None
    has_error: bool = False

    @property
    def is_bypassed(self) -> bool:
        """Return whether a part of the error goes past this value.

        An in-place op on a view sends it to the base.
        """
        return self.is_view and self.is_overwritten

    @property
    def is_unused_selection(self) -> bool:
        """Whether it is one that Dynamo leaves out of its graphs; in the body of a checkpoint it does not."""
        return self.is_selection and not self.used_in and not self.is_returned


def shape_of(tensor: Tensor | Layout) -> tuple[int | None, ...]:
    """Sizes of a fake tensor, or of a global one; None where one is symbolic."""
    return tuple(size if isinstance(size, int) else None for size in tensor.shape)
