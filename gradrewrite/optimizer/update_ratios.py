"""Update ratios: the relative distance of each parameter's update."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradrewrite._compat import collectives, optimizers
from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite.distributed.figures import root_of, squares_of
from gradrewrite.distributed.groups import RankGroups, device_for
from gradrewrite.distributed.shards import local_of, spread_of
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.optimizer._target import Target


@dataclass(frozen=True, slots=True)
class Before:
    """Parameters of one device, dtype and set of ranks, before a step."""

    keys: tuple[RecordKey, ...]  # of their ratios
    parameters: list[Tensor]
    copies: list[Tensor]  # what they were, float32 or float64; complex ones as pairs of real numbers
    ranks: tuple[int, ...]  # over which they are spread; ``()`` for plain ones

    @classmethod
    def of(cls, named: Sequence[tuple[str, Tensor]], ranks: tuple[int, ...]) -> Before:
        """Copy parameters, of spread ones the parts on this rank."""
        now = _real([p for _, p in named])
        wide = torch.promote_types(now[0].dtype, torch.float32)
        copies = [torch.empty_like(t, dtype=wide) for t in now]
        optimizers.foreach_copy(copies, now)
        keys = tuple(_key(name) for name, _ in named)
        return cls(keys, [p for _, p in named], copies, ranks)

    def norms(self) -> Tensor:
        """Return the norms before the step and of the changes, ``[2, N]``; the copies are used up.

        float64, float32 where there is none; of spread parameters those of this rank's parts, so that the squares of
        all ranks add up to those of the whole.
        """
        # Squares of small differences underflow, and long sums lose digits, in float32.
        dtype = torch.float32 if self.copies[0].device.type == "mps" else torch.float64
        sizes = optimizers.foreach_norm(self.copies, dtype)
        optimizers.foreach_subtract(self.copies, _real(self.parameters))
        norms = torch.stack([sizes, optimizers.foreach_norm(self.copies, dtype)])
        if not self.ranks:
            return norms
        weights = [1.0 if (spread := spread_of(p)) is None else spread.replicas**-0.5 for p in self.parameters]
        if len(set(weights)) == 1:
            return norms * weights[0]
        return torch.stack([column * weight for column, weight in zip(norms.unbind(1), weights, strict=True)], 1)


class UpdateRatios:
    """Ratios ``||w_after - w_before|| / ||w_before||`` of named parameters."""

    def __init__(self, targets: Sequence[Target]) -> None:
        """Take the targets for their names, asked again where the optimizer has a parameter without a name."""
        self._targets, self._groups = targets, RankGroups()
        self._names: list[str | None] = []
        self._own: list[weakref.ref[Tensor]] = []  # all of the optimizer when names were asked for, without a name too

    def keys(self, optimizer: torch.optim.Optimizer) -> tuple[tuple[int, RecordKey], ...]:
        """Return the keys of the ratios by the position of the parameter."""
        self._read_names([p for group in optimizer.param_groups for p in group["params"]])
        named = enumerate(self._names)
        return tuple((n, _key(name)) for n, name in named if name is not None)

    def before(self, optimizer: torch.optim.Optimizer) -> list[Before]:
        """Copy the parameters; nothing waits for the device."""
        own = [p for group in optimizer.param_groups for p in group["params"]]
        self._read_names(own)
        alike: dict[tuple[torch.device, torch.dtype, tuple[int, ...]], list[tuple[str, Tensor]]] = defaultdict(list)
        for name, parameter in zip(self._names, own, strict=True):
            if name is not None:
                alike[parameter.device, parameter.dtype, self._ranks_of(parameter)].append((name, parameter))
        return [Before.of(named, ranks) for (_, _, ranks), named in alike.items()]

    def _ranks_of(self, parameter: Tensor) -> tuple[int, ...]:
        spread = spread_of(parameter)
        if spread is None or len(spread.ranks) == 1:
            return ()
        if is_dtensor(parameter):
            self._groups.note_mesh(parameter.device_mesh)
        return spread.ranks

    def _read_names(self, own: Sequence[Tensor]) -> None:
        """Read names again after a change of parameters."""
        if len(own) == len(self._own) and all(p is ref() for p, ref in zip(own, self._own, strict=True)):
            return
        names = {id(p): name for target in reversed(self._targets) for name, p in target.parameters().items()}
        self._own = [weakref.ref(p) for p in own]
        self._names = [names.get(id(p)) for p in own]

    def after(self, before: Sequence[Before]) -> list[tuple[tuple[RecordKey, ...], Tensor]]:
        """Return keys and ratios after the step, flat float64 (float32 where there is none).

        0 where nothing moved, inf where something came from nothing, NaN where a parameter is not finite. Each set of
        ranks with spread parameters makes one all-reduce.
        """
        norms = [part.norms() for part in before]
        for ranks in sorted({part.ranks for part in before if part.ranks}):
            members = [n for n, part in enumerate(before) if part.ranks == ranks]
            wholes = self._whole([norms[n] for n in members], ranks)
            for n, whole in zip(members, wholes, strict=True):
                norms[n] = whole
        found = []
        for part, (sizes, changes) in zip(before, norms, strict=True):
            found.append((part.keys, torch.where(changes == 0, changes, changes / sizes)))
        return found

    def _whole(self, norms: Sequence[Tensor], ranks: tuple[int, ...]) -> list[Tensor]:
        """Return the norms of whole parameters from those of parts, on their devices."""
        group = self._groups.of_ranks(ranks)
        device = device_for(group, norms[0].device)
        squares = [squares_of(own.reshape(-1).to(torch.float64)).to(device) for own in norms]
        sums = collectives.wait(collectives.begin_sum(torch.cat(squares, 1), group))
        roots = root_of(sums).split([own.numel() for own in norms])
        return [root.reshape(own.shape).to(own.device) for root, own in zip(roots, norms, strict=True)]


def _key(name: str) -> RecordKey:
    return RecordKey("update_ratio", 1, f"gradient:{name}")


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    own = [local_of(t).detach() for t in tensors]
    return [torch.view_as_real(t) if t.is_complex() else t for t in own]
