"""Saving and loading the state of a model's actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from gradrewrite.backends.session import Session, attached_state
from gradrewrite.policy.state_store import StateStore


def state_dict(model: Any) -> dict[str, Any]:
    """Return the state of a model's actions, for a checkpoint; a copy.

    The state of ``AutoClip``, ``ZClip``, ``SkipSpikes`` and every ``gr.State`` that the compiled graphs have used, by
    site and name, and the step that each ``gr.Schedule`` is at. Parameters and buffers are in ``model.state_dict()``,
    which is that of the plain model.

    Args:
        model: What ``gr.transform`` or ``gr.backend`` returned.

    Returns:
        Numbers, strings and tensors, which ``torch.save`` and ``torch.load(weights_only=True)`` take: the version of
        the format under ``version``, the step under ``step``, tensors by name under ``states``.

    Raises:
        TypeError: ``model`` has no policy.

    Example:
        >>> import torch, gradrewrite as gr
        >>> model = gr.transform(torch.nn.Linear(2, 2), [])
        >>> state_dict(model)
        {'version': 1, 'step': 0, 'states': {}}
    """
    return _store_of(model, "gr.state_dict").state_dict()


def load_state_dict(model: Any, state: Mapping[str, Any]) -> None:
    """Load a state from ``gr.state_dict`` into the actions of a model.

    It may be called before or after the first call of the model; nothing is compiled again. What the policy has no
    state for (yet) is kept, and is part of the next ``gr.state_dict``. States that are there and are not among the
    loaded ones begin anew.

    Args:
        model: What ``gr.transform`` or ``gr.backend`` returned, with the policy that it had when the state was saved.
        state: What ``gr.state_dict`` returned; tensors are copied, to the device of the state.

    Raises:
        TypeError: ``model`` has no policy.
        ValueError: ``state`` is no such state, or a tensor has another shape or dtype than the state in use, which
            stays as it was.
        PolicyError: (from the first backward) The same, of a state that was not in use yet.
    """
    _store_of(model, "gr.load_state_dict").load_state_dict(state)


def _store_of(model: Any, what: str) -> StateStore:
    state = attached_state(model)
    session = None if isinstance(model, nn.Module) else getattr(model, "session", None)
    session = session if state is None else state.session
    if not isinstance(session, Session):
        raise TypeError(f"{what}: {type(model).__name__} has no policy; give what gr.transform or gr.backend returned")
    return session.config.states
