"""The configuration of a rewrite."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradrewrite.policy.actions import Policy
from gradrewrite.policy.state_store import StateStore
from gradrewrite.rewriting.loss_scale import LossScale


@dataclass(frozen=True, slots=True)
class RewriteConfig:
    """The arguments of ``transform`` or ``backend``."""

    policy: Policy
    loss_scale: LossScale | None = None
    fullgraph: bool = True  # what the tracer cannot see is refused
    dynamic: bool | None = None  # symbolic shapes, as in ``torch.compile``
    methods: tuple[str, ...] = ("forward",)  # of the model that have an entry point; ``forward`` stands for a call
    regions: tuple[str, ...] = ()  # patterns of names of modules that are compiled separately
    states: StateStore = field(default_factory=StateStore, compare=False)
