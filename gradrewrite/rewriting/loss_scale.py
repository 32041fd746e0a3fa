"""The loss scale: thresholds and records stay in units of the unscaled loss while it moves."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from gradrewrite._compat import fake_tensors, optimizers


class LossScale:
    """The factor of the loss, read at every backward on the device."""

    def __init__(self, source: torch.amp.GradScaler | Tensor) -> None:
        if isinstance(source, Tensor):
            if source.numel() != 1 or source.is_complex():
                raise ValueError(f"loss_scale as a tensor has one real element, got shape {tuple(source.shape)}")
            if not float(source) > 0:
                raise ValueError(f"loss_scale must be > 0, got {float(source)!r}")
        elif not isinstance(source, torch.amp.GradScaler):
            raise TypeError(f"loss_scale is a torch.amp.GradScaler or a tensor, got {type(source).__name__}")
        self._source = source
        self._on: dict[torch.device, Tensor] = {}

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The GradScaler, if it is one that scales."""
        is_scaling = isinstance(self._source, torch.amp.GradScaler) and self._source.is_enabled()
        return self._source if is_scaling else None  # type: ignore[return-value]

    @property
    def factor(self) -> Tensor | None:
        """The tensor, if it is one that the user gave."""
        return self._source if isinstance(self._source, Tensor) else None

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss times the scale."""
        if isinstance(self._source, Tensor):
            return loss * self._source.to(loss.device)
        return cast(Tensor, self._source.scale(loss))

    def on(self, device: torch.device) -> Tensor:
        """The scale as a 0-d float32 tensor on a device, as it was at the last ``update``; one tensor a device."""
        if device not in self._on:
            with fake_tensors.outside_of_tracing():
                self._on[device] = torch.ones((), device=device)
        return self._on[device]

    def update(self) -> None:
        """Read the scale; nothing waits. A GradScaler that has not been used yet, or is disabled, scales by 1."""
        now = self._source if isinstance(self._source, Tensor) else optimizers.scale_of(self._source)
        for tensor in self._on.values():
            if now is None:
                tensor.fill_(1.0)
            else:
                tensor.copy_(now.detach().reshape(()), non_blocking=True)
