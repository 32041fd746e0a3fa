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

    names: tuple[str, ...]
    parameters: list[Tensor]
    copies: list[Tensor]  # what they were, float32 or float64; complex ones as pairs of real numbers


class UpdateRatios:
    """Ratios ``||w_after - w_before|| / ||w_before||`` of named parameters."""

    def __init__(self, targets: Sequence[Target]) -> None:
        """Take the targets for their names, asked again where the optimizer has a parameter without a name."""
        self._targets = targets
        self._named: list[tuple[str, weakref.ref[Tensor]]] = []
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
            self._named = [(names[id(p)], weakref.ref(p)) for p in own if id(p) in names]
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = defaultdict(list)
        for name, ref in self._named:
            parameter = ref()
            assert parameter is not None  # the optimizer has it
            alike[parameter.device, parameter.dtype].append((name, parameter))
        return [_copy(named) for named in alike.values()]


def packs_of(parts: Sequence[Before]) -> list[tuple[tuple[RecordKey, ...], Tensor]]:
    """Return the keys and ratios after the step, one flat float64 (float32 where there is none) tensor a device.

    0 where nothing moved, inf where something came from nothing, NaN where a parameter is not finite. The copies
    are used up.
    """
    by_device: dict[torch.device, list[Before]] = defaultdict(list)
    for part in parts:
        by_device[part.copies[0].device].append(part)
    packs = []
    for device, some in by_device.items():
        # squares of small differences underflow, and long sums lose digits, in float32
        dtype = torch.float32 if device.type == "mps" else torch.float64
        ratios = torch.cat([_ratios(part, dtype) for part in some])
        keys = tuple(RecordKey("update_ratio", 1, f"gradient:{name}") for part in some for name in part.names)
        packs.append((keys, ratios))
    return packs


def _copy(named: Sequence[tuple[str, Tensor]]) -> Before:
    parameters = [p for _, p in named]
    now = _real(parameters)
    wide = torch.promote_types(now[0].dtype, torch.float32)
    copies = [torch.empty_like(t, dtype=wide) for t in now]
    optimizers.foreach_copy(copies, now)
    return Before(tuple(name for name, _ in named), parameters, copies)


def _ratios(part: Before, dtype: torch.dtype) -> Tensor:
    sizes = optimizers.foreach_norm(part.copies, dtype)
    optimizers.foreach_subtract(part.copies, _real(part.parameters))
    changes = optimizers.foreach_norm(part.copies, dtype)
    return torch.where(changes == 0, changes, changes / sizes)


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors]
