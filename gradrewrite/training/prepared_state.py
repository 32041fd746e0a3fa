"""The state of an optimizer before its first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradrewrite._compat import optimizers
from gradrewrite._utils.tensors import kept_random_state
from gradrewrite.training.hyperparameters import is_of_torch
from gradrewrite.training.shadows import Member, numbered, shadow_of
from gradrewrite.training.trials import state_keys


def prepare_state(optimizer: Optimizer, has_gradient: Sequence[bool]) -> bool:
    """Make the state of a first step; existing state stays.

    Args:
        optimizer: Classes of ``torch.optim`` make their state themselves, on a shadow.
        has_gradient: For each parameter, in the order of param groups.

    Returns:
        False where the first step itself makes state, as that of ``SGD`` with momentum or of a class that torch does
        not know: it has to run in two phases.
    """
    parameters = {
        position: parameter
        for (position, _, parameter), has in zip(numbered(optimizer), has_gradient, strict=True)
        if has and not optimizer.state.get(parameter)
    }
    members = [
        Member(position, group, parameter.detach(), parameter.detach(), {})
        for position, group, parameter in numbered(optimizer)
        if position in parameters
    ]
    if not members:
        return True
    separate = is_of_torch(optimizer)
    if separate and hasattr(optimizer, "_init_group"):
        _make(optimizer, members, parameters)
    with kept_random_state():
        wanted = state_keys(optimizer, members, all_groups=not separate)
    present = [optimizer.state.get(parameters[m.position], {}).keys() for m in members]
    return all(keys <= found for keys, found in zip(wanted, present, strict=True))


def _make(optimizer: Optimizer, members: Sequence[Member], parameters: dict[int, Tensor]) -> None:
    shadow = shadow_of(optimizer, members, None, {}, all_groups=False)
    with torch.no_grad():
        for group in shadow.param_groups:
            optimizers.init_group(shadow, group)
    for m in members:
        made = shadow.state.get(m.parameter)
        if made:
            optimizer.state[parameters[m.position]] = made
