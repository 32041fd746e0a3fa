"""The optimizer of a training step, and the call at hand."""

from __future__ import annotations

import functools
from collections.abc import MutableMapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradrewrite.optimizer.guard import Guard
from gradrewrite.optimizer.update import GuardedUpdate


class StateMissing(BaseException):  # not an Exception: torch wraps those
    """Ends a compilation: the first update itself makes the state of the optimizer."""


@dataclass(eq=False)
class Training:
    """The optimizer of a training step, and the call at hand."""

    optimizer: torch.optim.Optimizer
    guard: Guard
    accumulates: bool = False  # whether the call at hand is a micro-batch
    sums: MutableMapping[int, Tensor] = field(
        default_factory=dict
    )  # accumulated gradients, by position of the parameter
    losses: Tensor | None = None  # sum and number of the losses of micro-batches, ``[2]`` float64
    num_losses: int = 0
    _update: GuardedUpdate | None = None
    num_backwards: int = 0

    @functools.cached_property
    def parameters(self) -> list[Tensor]:
        """The parameters of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def update(self) -> GuardedUpdate:
        """Return the guarded update behind the present models."""
        if self._update is None or len(self.guard.targets) > 1:
            self._update = self.guard.follow_in_graph()
        return self._update

    def next_backward(self) -> int:
        """Return a number for a backward, unlike those of autograd."""
        self.num_backwards += 1
        return -1 - self.num_backwards

    def follow(self) -> bool:
        """Return whether the optimizer has other parameters now (``add_param_group``)."""
        has_changed = len(self.parameters) != sum([len(group["params"]) for group in self.optimizer.param_groups])
        if has_changed:
            del self.parameters
            self._update = None
        return has_changed

    def note_losses(self, losses: list[Tensor]) -> None:
        """Add the losses of a micro-batch to those before."""
        if not self.sums:  # zero_grad() has dropped what was there
            self.losses, self.num_losses = None, 0
        self.num_losses += 1
        total = torch.stack([loss.reshape(()).to(torch.float64) for loss in losses]).sum()
        own = torch.stack([total, torch.ones_like(total)])
        self.losses = own if self.losses is None else self.losses + own

    def log_losses(self, loss: Tensor) -> None:
        """Tell the guard of the losses of a step in two phases."""
        if self.losses is not None:
            for _ in range(self.num_losses):
                self.guard.note_loss(self.losses[0] / self.losses[1])
        self.guard.note_loss(loss)
        self.losses, self.num_losses = None, 0

    def take_gradients(self) -> None:
        """Add gradients that are there to the sums, as ``backward`` does; none is left."""
        found = [n for n, p in enumerate(self.parameters) if p.grad is not None]
        for n in found:
            own = self.parameters[n].grad
            assert own is not None
            self.sums[n] = own if n not in self.sums else self.sums[n] + own
            self.parameters[n].grad = None

    def give_gradients(self) -> None:
        """Move the sums to ``.grad``, for a step of two phases."""
        for n, total in self.sums.items():
            self.parameters[n].grad = total
        self.sums.clear()
