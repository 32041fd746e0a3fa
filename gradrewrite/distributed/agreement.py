"""Agreement of a process group: a step skipped by one rank is skipped by all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from gradrewrite.distributed.groups import device_for

NUM_VOTES = 2  # of a rank on a step: the checks, and a GradScaler


class Ballot:
    """The verdicts of all ranks on one step, from one collective call.

    Nothing waits on the host where the group is NCCL's; gloo's CPU operation blocks in ``result``.
    """

    def __init__(self, group: dist.ProcessGroup, votes: Sequence[Tensor | None], device: torch.device) -> None:
        """Take the votes of this rank: one element each, 0 or 1, None is 0; all ranks give as many."""
        self.group = group  # ranks that agree
        where = device_for(group, device)
        zero = torch.zeros(1, dtype=torch.float64, device=where)
        given = [zero if v is None else v.to(where, torch.float64, non_blocking=True).reshape(1) for v in votes]
        self.votes = torch.cat(given)  # verdicts of this rank, float64, 0 or 1; then what it sends along
        self._num_votes = len(votes)
        self._device = device
        self._work: dist.Work | None = None
        self._result: Tensor | None = None

    def start(self) -> None:
        """Start the collective."""
        if self._work is None and self._result is None:
            self._work = dist.all_reduce(self.votes, op=dist.ReduceOp.SUM, group=self.group, async_op=True)

    def send(self, figures: Tensor) -> None:
        """Send figures of this rank along, flat: all ranks send as many; the collective has not started."""
        assert self._work is None
        self.votes = torch.cat([self.votes, figures.to(self.votes.device, torch.float64, non_blocking=True)])

    def add(self, vote: Tensor) -> None:
        """Add a verdict to the first one of this rank, unless the sums are here; the collective has not started."""
        if self._result is not None:
            return
        assert self._work is None
        self.votes[0] += vote.to(self.votes.device, torch.float64, non_blocking=True).reshape(())

    def decide(self, sums: Tensor) -> None:
        """Take the sums of all ranks' votes from a collective that another has made."""
        self._result = sums

    def result(self) -> list[Tensor]:
        """Return the verdicts of the group: 0-d float32 each, 1 if that of any rank is not 0."""
        verdicts = (self._sums()[: self._num_votes] != 0).to(torch.float32).to(self._device, non_blocking=True)
        return list(verdicts.unbind())

    def figures(self) -> Tensor:
        """Return the sums of the sent figures, flat."""
        return self._sums()[self._num_votes :].to(self._device, non_blocking=True)

    def _sums(self) -> Tensor:
        if self._result is None:
            self.start()
            assert self._work is not None
            self._work.wait()
            self._result = self.votes
        return self._result
