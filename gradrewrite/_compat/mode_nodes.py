"""Mode-setting functions in Dynamo graphs."""

from __future__ import annotations

import torch

from gradrewrite._compat.versions import needed_for

with needed_for("a Dynamo graph enters and leaves autocast, and sets whether gradients are wanted, by nodes"):
    from torch._C import _set_grad_enabled
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

set_grad_enabled, enter_autocast, exit_autocast = _set_grad_enabled, _enter_autocast, _exit_autocast
MODES = (set_grad_enabled, enter_autocast, exit_autocast)


def autocast_around() -> list[tuple[str, torch.dtype, bool, None]]:
    """Return the arguments of ``enter_autocast`` for the autocast that is on now."""
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return [(device, torch.get_autocast_dtype(device), True, None) for device in devices]
