"""The configuration of a rewrite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gradrewrite.policy.actions import Policy
from gradrewrite.policy.numbers import python_number
from gradrewrite.policy.state_store import StateStore
from gradrewrite.rewriting.loss_scale import LossScale
from gradrewrite.sites import Pattern

Loops = Literal["rolled", "unrolled"] | None  # what becomes of Python loops


@dataclass(frozen=True, slots=True)
class RewriteConfig:
    """The arguments of ``transform`` or ``backend``."""

    policy: Policy
    loss_scale: LossScale | None = None
    fullgraph: bool = True  # what the tracer cannot see is refused
    dynamic: bool | None = None  # symbolic shapes, as in ``torch.compile``
    methods: tuple[str, ...] = ("forward",)  # of the model that have an entry point; ``forward`` stands for a call
    regions: tuple[str, ...] = ()  # patterns of names of modules that are compiled separately
    loops: Loops = None
    uses: tuple[str, ...] = ()  # patterns of single uses of values with sites, beside those of the policy's rules
    # The callback of a framework trains with it: one joint graph is kept; rules are checked without a call of the model
    # itself; and what the tracer skips is warned of where a gradient comes from it, for frameworks log and step inside.
    in_framework: bool = False
    # Text behind the sites of records, where another model of the same monitor has such names too.
    label: Callable[[], str] = field(default=str, compare=False)
    states: StateStore = field(default_factory=StateStore, compare=False)

    def __post_init__(self) -> None:
        """Check ``loops``; ValueError."""
        if self.loops not in (None, "rolled", "unrolled"):
            layers = '; regions="layers.*" compiles a stack of equal modules once' * isinstance(self.loops, dict)
            raise ValueError(f'loops is "rolled", "unrolled" or None, got {self.loops!r}{layers}')


def states_with(seed: int) -> StateStore:
    """Return a store with this seed of random numbers; TypeError unless it is a whole number."""
    number = python_number(seed)
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"seed is a whole number, got {seed!r}")
    return StateStore(number)


def uses_of(patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Return patterns of single uses of values as a tuple; ValueError for another pattern."""
    found = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in found:
        if Pattern.parse(pattern).to is None:
            raise ValueError(f"uses: {pattern!r} is no pattern of a use, as 'cell->cell' or 'norm->*.attn'")
    return found
