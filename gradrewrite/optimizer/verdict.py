"""The verdict on an update: failed checks, counts of skipped updates, agreement among ranks."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from gradrewrite._compat import data_parallel, optimizers
from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite.distributed.agreement import Ballot
from gradrewrite.distributed.groups import RankGroups, this_rank
from gradrewrite.errors import NonFiniteError, PolicyError
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import OnFailure
from gradrewrite.monitoring.host_copy import LateRecord, floats_of
from gradrewrite.monitoring.messages import failure_of
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.optimizer._target import Attachment, Target
from gradrewrite.optimizer.spikes import Judge, Judgement, Spike
from gradrewrite.sites import Site

logger = logging.getLogger("gradrewrite.optim")

_REPORT_EVERY = 100
_SKIP: tuple[OnFailure, ...] = ("skip",)
_NOT_ALL_AGREE = (
    "{0}: a check that skips may fail on one rank alone, and not all ranks would skip then: the device meshes of the "
    "parameters have the ranks {1}, and gradients are averaged over the ranks {2}. Give a group that has all ranks of "
    "the model: gr.guard(optimizer, model, process_group=torch.distributed.group.WORLD). Or let it check averages, "
    'behind AllReduce() or at "step:*"'
)
_JOINS = (
    "gr.guard: the DistributedDataParallel around the model has a join context, model.join(), in which ranks that are "
    "out of inputs take part in its collectives alone; the guards of all ranks agree on each step by an all-reduce, "
    "which would wait for them until the timeout. Give all ranks equally many batches (DistributedSampler pads or "
    "drops), or end with the first rank: model.join(throw_on_early_termination=True). If nothing skips, or all of it "
    "follows from averaged gradients, let each rank decide alone: gr.guard(optimizer, model, process_group="
    "torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)). torch keeps the "
    "setting after the context; model.join(enable=False) ends it"
)


class UpdateVerdict:
    """The verdict on the next update of one optimizer, on the device, and the counts of those before."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        targets: Sequence[Target],
        attached: Sequence[Attachment],
        max_consecutive_skips: int,
        process_group: distributed.ProcessGroup | None,
        groups: RankGroups,
    ) -> None:
        """Begin without verdicts; the optimizer is not held, attachments to recorders are read at each use."""
        self._targets, self._attached, self._process_group, self._groups = targets, attached, process_group, groups
        self._max_consecutive_skips = max_consecutive_skips
        own = {id(p) for group in optimizer.param_groups for p in group["params"] if is_dtensor(p)}
        named = ((name, p) for t in targets for name, p in t.parameters().items()) if own else ()
        self._sharded_names = {name for name, p in named if id(p) in own} or ({""} if own else set())
        self._is_agreed = False  # whether other ranks have a say in the counts
        self._by_device: dict[torch.device, Tensor] = {}
        self._judged: dict[int, weakref.ref[Tensor]] = {}  # parameters whose gradients the verdicts are about
        self._counts: Tensor | None = None  # [in all, in a row, by spikes], float64
        self._judges: list[Judge] = []  # of the last update
        self._counted: Tensor | None = None  # the counts, and the values of the judgements on the last update
        self._arriving: deque[tuple[LateRecord, list[Judge]]] = deque()
        self._reported = 0
        self._num_spikes = 0  # as far as counts have arrived

    @property
    def num_skipped(self) -> Tensor | None:
        """Number of skipped updates, on the device; None if none was checked."""
        return None if self._counts is None else self._counts[0]

    @property
    def is_open(self) -> bool:
        """Whether something was checked since the last step."""
        return bool(self._by_device)

    def note(self, optimizer: torch.optim.Optimizer, bad: Tensor, parameters: Sequence[weakref.ref[Tensor]]) -> None:
        """Note a graph's verdict, if it has parameters of the optimizer or none at all."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        alive = [(p, ref) for ref in parameters if (p := ref()) is not None]
        refs = {id(p): ref for p, ref in alive if id(p) in own}
        if alive and not refs and not self._has_shards_of([p for p, _ in alive]):
            return  # those that are gone were replaced (``load_state_dict(assign=True)``), and may be its own by now
        # The gradients of micro-batches whose shards wait for the last one are elsewhere (FSDP2).
        self._judged |= {id(p): ref for p, ref in alive if id(p) in own and not is_dtensor(p)}
        known = self._by_device.get(bad.device)
        self._by_device[bad.device] = bad if known is None else torch.maximum(known, bad)

    def _has_shards_of(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether the optimizer has shards of one of these; under FSDP2 they are whole in their module."""
        if not self._sharded_names:
            return False
        whole = {id(p) for p in parameters}
        names = {name for t in self._targets for name, p in t.parameters().items() if id(p) in whole}
        return not names or not names.isdisjoint(self._sharded_names)

    def drop_if_cleared(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Drop the verdict where none of the gradients that it is about is left."""
        left = (ref() for ref in self._judged.values())
        if self._by_device and self._judged and all(p is None or p.grad is None for p in left):
            self._give_up(optimizer)

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the verdict, if there is one, with the gradients."""
        if self._by_device:
            self._give_up(optimizer)
            self.look_at_counts()

    def _give_up(self, optimizer: torch.optim.Optimizer | None) -> None:
        """The update never came: a GradScaler did not call ``step``, or the gradients were thrown away."""
        bad = self.take(optimizer) if optimizer is not None else None
        if bad is not None and not self._is_agreed:  # ranks count together or not at all
            self.count(bad)

    def take(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """1 if a check failed since the last step, 0 if none did; None if nothing was checked."""
        if not self._by_device:
            return None
        devices = (p.device for g in optimizer.param_groups for p in g["params"] if p.device in self._by_device)
        device = next(devices, next(iter(self._by_device))) if self._counts is None else self._counts.device
        verdicts = [bad.to(device, non_blocking=True) for bad in self._by_device.values()]
        self._by_device.clear()
        self._judged.clear()
        return torch.stack(verdicts).amax()

    def ballot(self, optimizer: torch.optim.Optimizer, bad: Tensor | None) -> Ballot | None:
        """Return the verdicts of this rank, for the ranks that skip together; None where there are no others."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        group = self.agreeing(parameters)
        if group is None:
            return None
        refs = [a.recorder.links.data_parallel for a in self._attached]
        around_model = [module for ref in refs if ref is not None and (module := ref())]
        if any(map(data_parallel.lets_ranks_join, around_model)):  # ranks that joined take no part in this exchange
            raise PolicyError(_JOINS, code="agreement")
        device = parameters[0].device if self._counts is None else self._counts.device
        optimizers.check_unmixed(optimizer)
        found_inf = optimizer.__dict__.get("found_inf")  # a GradScaler's
        return Ballot(group, [bad, found_inf], device)

    def agreeing(self, parameters: Sequence[Tensor]) -> distributed.ProcessGroup | None:
        """Return the ranks of common skips; None for this rank alone."""
        group = self._process_group
        if group is None:
            around = next((g for a in self._attached if (g := a.recorder.links.process_group) is not None), None)
            group = self._groups.of_tensors(parameters, around)
            self._check_all_agree(group, around)
        return None if group is None or group.size() == 1 else group

    def note_agreement(self) -> None:
        """Other ranks have a say in the verdicts."""
        self._is_agreed = True

    def _check_all_agree(self, group: distributed.ProcessGroup | None, around: distributed.ProcessGroup | None) -> None:
        """Raise PolicyError where ranks with equal parameters may disagree on a skip."""
        site = next((s for a in self._attached if (s := a.recorder.links.lone_skip) is not None), None)
        if site is None or around is None or group is None:
            return
        averaged, agreeing = self._groups.ranks_of(around), self._groups.ranks_of(group)
        if not set(averaged).issubset(agreeing):
            raise PolicyError(_NOT_ALL_AGREE.format(site, list(agreeing), list(averaged)), code="agreement")

    def start(self, ballot: Ballot | None, of_step_sites: Tensor | None) -> None:
        """Start to exchange the verdicts of all ranks."""
        if ballot is not None:
            if of_step_sites is not None:
                ballot.add(of_step_sites)
            ballot.start()

    def decide(
        self, optimizer: torch.optim.Optimizer, bad: Tensor | None, ballot: Ballot | None, of_step_sites: Tensor | None
    ) -> Tensor | None:
        """Return the verdict of all ranks on all checks; None if nothing was checked."""
        if ballot is not None:
            self._is_agreed = True
            bad, found_inf = ballot.result()
            if "found_inf" in optimizer.__dict__:  # a GradScaler's
                optimizer.__dict__["found_inf"] = found_inf
                optimizers.note_found_inf(optimizer, found_inf)
        if of_step_sites is not None:  # of ranks that have parts of a gradient: more than agree
            own = of_step_sites if self._counts is None else of_step_sites.to(self._counts.device, non_blocking=True)
            bad = own if bad is None else torch.maximum(bad, own.to(bad.device, non_blocking=True))
        return bad

    def vote_again(self, bad: Tensor, ballot: Ballot) -> Tensor:
        """Return the verdict of all ranks on a later one."""
        (verdict,) = Ballot(ballot.group, [bad], bad.device).result()
        return verdict

    def count(self, bad: Tensor, checked: Tensor | None = None, judgements: Sequence[Judgement] = ()) -> None:
        """Count an update, made or skipped; ``checked`` is the verdict of the checks of this rank, without judges."""
        if self._counts is None:
            self._counts = torch.zeros(3, dtype=torch.float64, device=bad.device)
        for attachment in self._attached:
            skipped = RecordKey("skipped", 1, f"optimizer:{attachment.seat.first_group}")
            attachment.recorder.add_late((skipped,), bad.reshape(1), is_own=True)
        total, in_a_row, spikes = self._counts.unbind()
        judged = [judgement.values.to(bad.device, torch.float64, non_blocking=True) for judgement in judgements]
        if judged:
            spike = torch.stack(judged)[:, 2].amax()
            spikes = spikes + (spike if checked is None else spike * (checked.to(bad.device, non_blocking=True) == 0))
        self._counts = torch.stack([total + bad, (in_a_row + 1) * bad, spikes])
        self._judges = [judgement.judge for judgement in judgements]
        self._counted = torch.cat([self._counts, *judged]) if judged else self._counts

    def look_at_counts(self) -> None:
        """Report skipped updates, as far as their counts have arrived."""
        if self._counted is None:
            return
        self._arriving.append((LateRecord((), self._counted), self._judges))
        self._arriving[-1][0].start_copy()
        while self._arriving and self._arriving[0][0].is_here():
            record, judges = self._arriving.popleft()
            total, in_a_row, spikes, *values = floats_of(record.pack)
            found = [Spike(judge, *values[4 * n : 4 * n + 4]) for n, judge in enumerate(judges)]
            for spike in found:
                spike.raise_without_parts()
            self._report_skips(int(total), int(in_a_row), int(spikes), found)

    def _report_skips(self, total: int, in_a_row: int, num_spikes: int, judged: Sequence[Spike]) -> None:
        is_new, self._num_spikes = num_spikes > self._num_spikes, num_spikes
        spike = next((one for one in judged if one.is_spike), None) if is_new else None  # why this one was skipped
        if total // _REPORT_EVERY > self._reported:
            self._reported = total // _REPORT_EVERY
            logger.warning("%d updates skipped so far, %s", total, _reasons(total, num_spikes, spike))
        if in_a_row >= self._max_consecutive_skips:
            limit = f"max_consecutive_skips={self._max_consecutive_skips}"
            reason = f"{in_a_row} updates in a row were skipped, so training does not go on ({limit})"
            reason += "; monitor.culprits(), on all ranks, says who made the last skip"
            recorder = self._attached[0].recorder
            if spike is not None:
                raise spike.error(recorder.num_steps - 1, recorder.last_update, reason)
            raise _skip_error(recorder, reason, is_agreed=self._is_agreed)


def _reasons(total: int, num_spikes: int, last: Spike | None) -> str:
    """Return why updates were skipped: after failed checks, spikes, or both; ``last`` is the last one, if a spike."""
    latest = "" if last is None else f" ({last.text})"
    if not num_spikes:
        return "because a finite check failed"
    if num_spikes == total:
        return f"because of spikes{latest}"
    return f"{num_spikes} of them because of spikes{latest}, the others because a finite check failed"


def _skip_error(recorder: StepRecorder, reason: str, *, is_agreed: bool) -> NonFiniteError:
    """Return the failure behind the last skipped update; its step may be over, if later micro-batches passed."""
    with recorder.lock:
        records = list(reversed(recorder.records))
        for record in records[:1] if is_agreed else records:  # an older one may not be why the others skipped
            for part in (*reversed(record.updates), record):
                error = failure_of(part, _SKIP, reason=reason)
                if error is not None:
                    return error
        note = f"the step that failed is not in the buffer (capacity {recorder.capacity}); this is the first check"
        if is_agreed:
            note = (
                "no check failed in the last backward on this rank, but one in an earlier backward, or on another "
                "rank, whose error says more"
            )
        assert is_agreed or recorder.last_skip is not None
        site = recorder.last_skip or Site("step", "")
        error = NonFiniteError(site, step=recorder.num_steps - 1, note=f"{reason}; {note}", rank=this_rank())
        error.update = recorder.last_update
        return error
