"""Elements of parameters that an update leaves as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradrewrite._utils.formatting import located_callable
from gradrewrite.policy.actions import num_required
from gradrewrite.policy.insertions import HoldElements, Insertion
from gradrewrite.sites import Kind, Site


@dataclass(frozen=True, slots=True, repr=False)
class Hold:
    """Hold elements of a parameter, with their optimizer state, through an update.

    ``where(gradient, value)`` returns a bool tensor of the parameter's shape. ``gradient`` is the one that the
    optimizer used, behind all actions, and ``value`` the parameter before the update. Where it is True the element, and
    that of each tensor of this shape in ``optimizer.state[parameter]``, keeps its bits: momentum does not move it, nor
    the optimizer's weight decay, nor ``DecayWeights``. Numbers in the state (``step``) move on; state that this update
    has made begins at 0 there. Several of them hold what any of them holds. NaN and infinities are held like other
    numbers. Runs in ``gr.guard``, behind the update; each step copies the parameter and its state. Functions at
    ``param`` and ``state`` sites act after it, and may change held elements.

    Attributes:
        where: The function, of torch operations as any tensor function.

    Raises:
        TypeError: ``where`` is no function of two arguments.
        CallbackError: (from ``step``) It returned something else than a bool tensor of the parameter's shape.
        PolicyError: (from ``step``) The optimizer keeps state of another shape for the parameter (Adafactor), or the
            parameter is sharded and ``where`` is not elementwise.

    Example:
        >>> Hold(lambda gradient, value: value == 0)  # doctest: +ELLIPSIS
        Hold(<lambda> (...))
    """

    where: Callable[[Tensor, Tensor], Tensor]

    kinds: ClassVar[frozenset[Kind]] = frozenset(("step",))

    def __post_init__(self) -> None:
        if not callable(self.where) or num_required(self.where) not in (None, 2):
            raise TypeError(f"Hold(where): where is a function of the gradient and the value, got {self.where!r}")

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return Insertion(self, HoldElements(self.where), self.kinds)

    def __repr__(self) -> str:
        """As the call that makes it."""
        return f"Hold({located_callable(self.where)})"
