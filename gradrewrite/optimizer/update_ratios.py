"""Update ratios: the relative distance of each parameter's update."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradrewrite._compat import optimizers
from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.optimizer._target import Target


@dataclass(frozen=True, slots=True)
class Before:
    """Parameters of one device and dtype, before a step."""

    keys: tuple[RecordKey, ...]  # of their ratios
    parameters: list[Tensor]
    copies: list[Tensor]  # what they were, float32 or float64; complex ones as pairs of real numbers

    @classmethod
    def of(cls, named: Sequence[tuple[str, Tensor]]) -> Before:
        """Copy parameters."""
        now = _real([p for _, p in named])
        wide = torch.promote_types(now[0].dtype, torch.float32)
        copies = [torch.empty_like(t, dtype=wide) for t in now]
        optimizers.foreach_copy(copies, now)
        keys = tuple(RecordKey("update_ratio", 1, f"gradient:{name}") for name, _ in named)
        return cls(keys, [p for _, p in named], copies)

    def ratios(self) -> Tensor:
        """Return the ratios after the step, flat float64 (float32 where there is none); the copies are used up.

        0 where nothing moved, inf where something came from nothing, NaN where a parameter is not finite.
        """
        # Squares of small differences underflow, and long sums lose digits, in float32.
        dtype = torch.float32 if self.copies[0].device.type == "mps" else torch.float64
        sizes = optimizers.foreach_norm(self.copies, dtype)
        optimizers.foreach_subtract(self.copies, _real(self.parameters))
        changes = optimizers.foreach_norm(self.copies, dtype)
        return torch.where(changes == 0, changes, changes / sizes)


class UpdateRatios:
    """Ratios ``||w_after - w_before|| / ||w_before||`` of named parameters."""

    def __init__(self, targets: Sequence[Target]) -> None:
        """Take the targets for their names, asked again where the optimizer has a parameter without a name."""
        self._targets = targets
        self._names: list[str | None] = []
        self._own: list[weakref.ref[Tensor]] = []  # all of the optimizer when names were asked for, without a name too

    def before(self, optimizer: torch.optim.Optimizer) -> list[Before]:
        """Copy the parameters; nothing waits for the device."""
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if any(map(is_dtensor, own)):
            raise ValueError("gr.guard(..., update_ratios=True): ratios of sharded parameters (DTensors) are not known")
        is_known = len(own) == len(self._own) and all(p is ref() for p, ref in zip(own, self._own, strict=True))
        if not is_known:
            names = {id(p): name for target in reversed(self._targets) for name, p in target.parameters().items()}
            self._own = [weakref.ref(p) for p in own]
            self._names = [names.get(id(p)) for p in own]
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = defaultdict(list)
        for name, parameter in zip(self._names, own, strict=True):
            if name is not None:
                alike[parameter.device, parameter.dtype].append((name, parameter))
        return [Before.of(named) for named in alike.values()]


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors]
