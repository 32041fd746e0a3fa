"""The configuration of a rewrite."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradrewrite.policy.actions import Policy
from gradrewrite.policy.state_store import StateStore
from gradrewrite.rewriting.loss_scale import LossScale


@dataclass(frozen=True, slots=True)
class RewriteConfig:
    """The arguments of ``transform`` or ``backend``.

    Attributes:
        policy: The policy.
        loss_scale: The loss scale; None if there is none.
        fullgraph: Whether what the tracer cannot see is refused.
        dynamic: Symbolic shapes, as in ``torch.compile``.
        methods: Names of the methods of the model that have an entry point; ``forward`` stands for a call.
        regions: Patterns of the names of modules that are compiled separately; empty for the model as a whole.
        states: What its actions remember.
    """

    policy: Policy
    loss_scale: LossScale | None = None
    fullgraph: bool = True
    dynamic: bool | None = None
    methods: tuple[str, ...] = ("forward",)
    regions: tuple[str, ...] = ()
    states: StateStore = field(default_factory=StateStore, compare=False)
