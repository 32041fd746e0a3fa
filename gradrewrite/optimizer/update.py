"""The update of one guarded optimizer, from its step sites to its records."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed

from gradrewrite._compat import optimizers
from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite._utils.warnings import warn
from gradrewrite.backends.session import SCALED
from gradrewrite.backends.written_buffers import WrittenBuffers
from gradrewrite.distributed.agreement import Ballot
from gradrewrite.distributed.groups import RankGroups
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.monitoring.host_copy import number_of
from gradrewrite.optimizer._target import Attachment, Target
from gradrewrite.optimizer.changed_state import ChangedState, Work
from gradrewrite.optimizer.observed_state import ObservedState
from gradrewrite.optimizer.spikes import Judgement, Losses, no_loss, remember
from gradrewrite.optimizer.step_graph import AtSteps
from gradrewrite.optimizer.step_plan import StepPlan
from gradrewrite.optimizer.step_sites import StepOutcome, StepSites
from gradrewrite.optimizer.update_ratios import Before, UpdateRatios
from gradrewrite.optimizer.updated_tensors import Member, Names, UpdatedTensors
from gradrewrite.optimizer.verdict import UpdateVerdict
from gradrewrite.policy.numbers import python_number
from gradrewrite.policy.state_store import StateStore


@dataclass(frozen=True, slots=True)
class UpdateInGraph:
    """An update that the graph of a whole step has made or skipped."""

    bad: Tensor | None = None  # verdict of checks and judges, not 0 if it was skipped; None if nothing was checked
    checked: Tensor | None = None  # verdict of the checks alone
    skipped: Tensor | None = None  # ``bad``, or what a GradScaler found
    judgements: Sequence[Judgement] = ()
    behind: tuple[BackwardOutputs, list[Tensor]] | None = None  # records of functions behind it
    ratios: Tensor | None = None  # of the plan


class GuardedUpdate:
    """The updates of one optimizer: prepared, made or skipped, finished."""

    def __init__(
        self,
        guard: int,
        targets: Sequence[Target],
        attached: Sequence[Attachment],
        verdict: UpdateVerdict,
        ratios: UpdateRatios | None,
        groups: RankGroups,
    ) -> None:
        """Take the parts of a guard.

        ``guard`` is its ``id()``; attachments to recorders are read at each use.
        """
        self._guard, self._targets, self._attached = guard, targets, attached
        self._verdict, self._ratios = verdict, ratios
        has_policy = any(target.session is not None for target in targets)
        self._step_sites = StepSites(targets, attached, groups) if has_policy else None
        self._tensors = UpdatedTensors(targets, guard) if has_policy else None
        self._observed, self._changed = ObservedState(targets, groups), ChangedState(targets)
        self._work = Work()  # behind the update at hand
        self._is_made = False  # whether the host knows of no skip
        self._skipped: Tensor | None = None  # not 0 where the device has skipped it
        self._num_graphs: dict[int, int] = {}  # by session, when its edits were looked at for a loss scale
        self._agreeing: distributed.ProcessGroup | None = None  # ranks that decided on the last update together
        self._warned_of_no_step = False
        self._has_new_gradients = False  # whether a backward has run since the last step
        self._keys: dict[int, RecordKey] = {}  # of learning rates, by the number of the group
        self.losses = Losses()

    @property
    def has_step_sites(self) -> bool:
        """Whether it runs the actions at step sites: not with a bare monitor."""
        return self._step_sites is not None

    @property
    def may_have_actions(self) -> bool:
        """Whether a policy may have actions at step sites, at parameters or at state."""
        if self._step_sites is None or self._tensors is None:
            return False
        return self._step_sites.may_act or self._tensors.may_act

    @property
    def states(self) -> list[StateStore]:
        """The states of the actions of all models."""
        return [target.session.config.states for target in self._targets if target.session is not None]

    def note_backward(self, backward: int, is_cleared: Callable[[], bool]) -> None:
        """Take note of a backward, by its number."""
        self._has_new_gradients = True
        if self.may_have_actions:
            self.losses.note_backward(backward, is_cleared)

    def give_up(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop gradients without a step, perhaps left out by a GradScaler."""
        is_left_out = self._has_new_gradients and self._may_be_scaled and _leaves_out(optimizer)
        self._restore_unless_finite(optimizer)
        self._verdict.drop(optimizer)
        if is_left_out:
            self._count_update()
        self.losses.drop()

    def prepare(
        self, optimizer: torch.optim.Optimizer, inner: Callable[..., Any], scaler: torch.amp.GradScaler | None
    ) -> tuple[StepOutcome, Tensor | None, Sequence[Before]]:
        """Run the actions at step sites and judge; return their outcome, the verdict and the parameters before.

        ``inner`` makes the update. An optimizer that is given the GradScaler asks it whether to unscale.
        """
        is_scaled = "found_inf" in optimizer.__dict__ or scaler is not None or optimizers.scaler_in_use() is not None
        self._has_new_gradients = False
        for written in self._written_buffers:
            written.note_scaling(is_scaled)
        self._warn_of_scaler()
        if scaler is not None and self._step_sites is not None and self._step_sites.may_act:
            optimizers.unscale_once(scaler, optimizer)
        scale = optimizer.__dict__.get("grad_scale")  # a GradScaler's
        bad = self._verdict.take(optimizer)
        ballot = self._verdict.ballot(optimizer, bad)
        self._agreeing = None if ballot is None else ballot.group
        outcome = StepOutcome()
        if self.may_have_actions:
            for states in self.states:
                states.begin_step()
        if self._step_sites is not None:
            outcome = self._step_sites.run(optimizer, inner, scale, ballot, self.losses)
        checked = _worst(bad, outcome.verdict) if outcome.figures.judges else bad
        bad, judgements = self._judge(optimizer, bad, ballot, outcome)
        self.losses.clear()
        outcome = outcome.with_judgements(judgements)
        for at in self._attached:
            at.collect_first(outcome.outputs, outcome.tensors, self._is_due, self._number)
            at.recorder.add_host_values(_learning_rates(optimizer, at.seat.first_group, self._keys))
        before = self._ratios.before(optimizer) if self._ratios is not None and self._is_due(1) else []
        if bad is not None:
            self._verdict.count(bad, checked, judgements)
        work = Work(*self._members(optimizer), outcome.held, outcome.at_steps)
        self._work = self._changed.prepare(optimizer, work)
        if judgements:
            remember(judgements, _worst(bad, optimizer.__dict__.get("found_inf")))
        return outcome, bad, before

    def plan(self, optimizer: torch.optim.Optimizer, has_gradient: Sequence[bool]) -> StepPlan:
        """Return the actions at step sites and behind the update, for the graph of a whole step."""
        if self._step_sites is None or self._tensors is None:
            return StepPlan()
        plan = self._step_sites.plan(optimizer, has_gradient)
        at_steps = AtSteps() if plan.rewrite is None else plan.rewrite.at_steps
        change = self._changed.plan(optimizer, Work(*self._members(optimizer), plan.held, at_steps))
        ratios = self._ratios.keys(optimizer) if self._ratios is not None and self._is_due(1) else ()
        given = self.may_have_actions, self._tensors.may_act
        group = self._verdict.agreeing([p for group in optimizer.param_groups for p in group["params"]])
        return replace(plan, change=change, ratios=ratios, group=group, may_act=given[0], observes=given[1])

    @property
    def has_plan(self) -> bool:
        """Whether there may be actions at step sites or behind the update, or ratios are measured."""
        return self.may_have_actions or (self._ratios is not None and self._step_sites is not None)

    def key_of_plan(self) -> Hashable:
        """Return the measurements of the next update and the Python values of functions: the key of its plan."""
        assert self._step_sites is not None
        values = tuple([t.session.step_values.number() for t in self._targets if t.session is not None])
        return self._step_sites.measurements(), values, self._ratios is not None and self._is_due(1)

    @property
    def has_verdict(self) -> bool:
        """Whether a check of a backward since the last update skips."""
        return self._verdict.is_open

    def begin_in_graph(self, optimizer: torch.optim.Optimizer, plan: StepPlan) -> Tensor | None:
        """Prepare an update that a graph makes; return the verdict of earlier micro-batches."""
        self._has_new_gradients = False
        for states in self.states if plan.may_act else ():
            states.begin_step()
        return self._verdict.take(optimizer) if self._verdict.is_open else None

    def end_in_graph(
        self, optimizer: torch.optim.Optimizer, plan: StepPlan, outcome: StepOutcome, made: UpdateInGraph
    ) -> None:
        """Record an update that a graph has made or skipped; NonFiniteError if a check raises."""
        self.losses.clear()
        outcome = outcome.with_judgements(made.judgements)
        has_records = bool(outcome.outputs.placed or outcome.outputs.packs)
        for at in self._attached:
            if has_records:
                at.collect_first(outcome.outputs, outcome.tensors, self._is_due, self._number)
            else:
                at.begin()
            at.recorder.add_host_values(_learning_rates(optimizer, at.seat.first_group, self._keys))
        self._agreeing = plan.group
        self._count_in_graph(made)
        optimizers.note_step(optimizer)
        try:
            if plan.observes or made.behind is not None:
                self._report_behind(optimizer, made.behind)
        finally:
            self._count_update()
        if made.ratios is not None:
            self._add_late(tuple(key for _, key in plan.ratios), made.ratios)
        if made.bad is not None:
            self._verdict.look_at_counts()

    def _count_in_graph(self, made: UpdateInGraph) -> None:
        """Count an update, restore buffers and write the states of judges by its verdicts."""
        if made.bad is not None:
            if self._agreeing is not None:
                self._verdict.note_agreement()
            self._verdict.count(made.bad, made.checked, made.judgements)
        if made.skipped is not None:
            for written in self._written_buffers:
                written.restore_present(made.skipped)
        if made.judgements:
            remember(made.judgements, made.skipped)

    def _report_behind(
        self, optimizer: torch.optim.Optimizer, changed: tuple[BackwardOutputs, list[Tensor]] | None
    ) -> None:
        """Measure parameters and state; record the reports of functions there."""
        if self._tensors is None or not (changed is not None or self._tensors.may_act):
            return
        _, members = self._members(optimizer)
        if self._tensors.may_act:
            self._tensors.warn_of_none(optimizer)
        for found in (changed, self._observed.measure(optimizer, members)):
            if found is not None and (found[0].packs or found[0].kept):  # else states alone
                for at in self._attached:
                    at.collect_again(*found, self._number)

    def _judge(
        self, optimizer: torch.optim.Optimizer, bad: Tensor | None, ballot: Ballot | None, outcome: StepOutcome
    ) -> tuple[Tensor | None, list[Judgement]]:
        """Return the verdict of all ranks on all checks and figures, None if there are none, and the judgements."""
        figures, verdict = outcome.figures, outcome.verdict
        judgements = figures.judge_norms()
        own = _worst(verdict, *(judgement.verdict for judgement in judgements))
        self._verdict.start(ballot, own)
        bad = self._verdict.decide(optimizer, bad, ballot, own)
        if judgements and bad is not None and ballot is not None and not figures.is_agreed:
            bad = self._verdict.vote_again(bad, ballot)
        if not figures.judges_of_loss:
            return bad, judgements
        if ballot is None and not self.losses:
            raise no_loss(figures.judges_of_loss[0].judge)
        device = optimizer.param_groups[0]["params"][0].device
        sums = self.losses.sums(device) if ballot is None else ballot.figures()
        of_loss = figures.judge_loss(sums)
        return _worst(bad, *(judgement.verdict for judgement in of_loss)), [*judgements, *of_loss]

    @property
    def _number(self) -> int:
        """Number of the present update; -1 without a model."""
        return max((states.step for states in self.states), default=-1)

    def _is_due(self, every: int) -> bool:
        """Return whether a measurement with this interval is due in this step, in one of the models."""
        sampled = [target.session.sampling for target in self._targets if target.session is not None]
        return any(sampling.is_due(every) for sampling in sampled) or not sampled

    def finish(self, optimizer: torch.optim.Optimizer, bad: Tensor | None, before: Sequence[Before]) -> None:
        """Act behind the update and record; NonFiniteError if a check raises."""
        try:
            self._after_update(optimizer)
        finally:
            self._work = Work()
            self._count_update()
        self._add_ratios(before)
        if bad is not None:
            self._verdict.look_at_counts()

    def _count_update(self) -> None:
        """An update was made, or left out: later backwards belong to the next one."""
        for states in self.states:
            states.note_step(self._guard)
        for attachment in self._attached:
            attachment.recorder.note_update(self._agreeing)

    def _members(self, optimizer: torch.optim.Optimizer) -> tuple[Names, Sequence[Member]]:
        """Return the names of the parameters, and the tensors with actions behind the update."""
        if self._step_sites is None or self._tensors is None or not self.may_have_actions:
            return (), ()
        names = self._step_sites.names(optimizer)
        num_guards = max(len(at.recorder.guards.live) for at in self._attached)
        return names, self._tensors.members(optimizer, names, num_guards)

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Put back held elements, call functions, and measure."""
        if self._tensors is None or not (self._work.held or self._tensors.may_act):
            return
        names, members = self._members(optimizer)
        work = replace(self._work, names=names, members=members)
        changed = self._changed.run(optimizer, work, self._skipped) if self._is_made else None
        self._report_behind(optimizer, changed)

    def make(
        self, optimizer: torch.optim.Optimizer, update: Callable[[], Any], bad: Tensor | None, outcome: StepOutcome
    ) -> Any:
        """Make the update, unless it is skipped; ``bad`` and ``outcome`` are those of ``prepare``."""
        skipped = optimizer.__dict__.get("found_inf")  # a GradScaler's
        self._is_made = False
        if bad is not None and not _decides_on_device(optimizer):
            if bool(bad):
                optimizers.note_step(optimizer)
                self._restore_buffers(None)
                return None
        elif bad is not None:
            skipped = bad if skipped is None else torch.maximum(bad, skipped.to(bad.device).reshape(()))
        with optimizers.attributes_set(optimizer, {} if skipped is None else {"found_inf": skipped}):
            result = update()
        _scale_parameters(outcome, skipped)
        self._is_made, self._skipped = True, skipped
        if skipped is not None:
            self._restore_buffers(skipped)
        return result

    def _restore_buffers(self, skipped: Tensor | None) -> None:
        """Restore the buffers after a skipped update; see ``WrittenBuffers.restore``."""
        for written in self._written_buffers:
            written.restore(skipped)

    @property
    def _written_buffers(self) -> list[WrittenBuffers]:
        return [target.session.buffers for target in self._targets if target.session is not None]

    @property
    def _may_be_scaled(self) -> bool:
        """Whether a GradScaler may leave out updates."""
        scales = (target.session.config.loss_scale for target in self._targets if target.session is not None)
        return any(written.may_be_scaled for written in self._written_buffers) or any(s is not None for s in scales)

    def _restore_unless_finite(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore buffers after a skip by a GradScaler without a call of ``step``."""
        if not self._has_new_gradients:  # those of the last step were judged
            return
        self._has_new_gradients = False
        if not any(written.may_be_scaled for written in self._written_buffers):
            return
        plain = _plain_gradients(optimizer)
        if plain:
            self._restore_buffers(_worst(*((~g.isfinite().all()).float() for g in plain)))

    def _warn_of_scaler(self) -> None:
        """Warn once of bounds on gradients under an unknown GradScaler."""
        for target in self._targets:
            session = target.session
            if session is None or session.config.loss_scale is not None or SCALED in session.warnings:
                continue
            if self._num_graphs.get(id(session)) == len(session.graphs):
                continue
            edit = session.edit_with_units()
            scaler = None if edit is None else optimizers.scaler_in_use()
            if edit is None or scaler is None or not scaler.is_enabled():
                self._num_graphs[id(session)] = len(session.graphs)
                continue
            session.warn_of_scaler(edit)

    def _add_ratios(self, before: Sequence[Before]) -> None:
        for keys, ratios in self._ratios.after(before) if self._ratios is not None else ():
            self._add_late(keys, ratios)

    def _add_late(self, keys: tuple[RecordKey, ...], ratios: Tensor) -> None:
        added = [attachment.recorder.add_late(keys, ratios) for attachment in self._attached]
        if not any(added) and not self._warned_of_no_step:
            self._warned_of_no_step = True
            warn(
                "gr.guard(..., update_ratios=True): no backward has recorded anything, so the ratios have no step "
                'to be added to; let the policy record something, such as gr.on("gradient:*", Observe("norm"))'
            )


def _worst(*verdicts: Tensor | None) -> Tensor | None:
    """Return the largest of verdicts, 0-d, on the device of the first one; None without any."""
    found = [verdict.reshape(()) for verdict in verdicts if verdict is not None]
    if len(found) < 2:
        return found[0] if found else None
    return torch.stack([verdict.to(found[0].device, non_blocking=True) for verdict in found]).amax()


def _plain_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [g for g in gradients if not g.is_sparse and not is_dtensor(g)]


def _leaves_out(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler has left out an update: its gradients are not finite. Waits for the device."""
    is_finite = all(bool(g.isfinite().all()) for g in _plain_gradients(optimizer))
    return not is_finite and optimizers.living_scaler() is not None


def _decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's kernels read ``found_inf``, and a skipped first step leaves no state behind."""
    if not optimizers.is_fused(optimizer):
        return False
    if isinstance(optimizer, torch.optim.SGD):
        # Its first step makes the momentum buffers, uninitialised if that step is skipped.
        moved = (p for group in optimizer.param_groups if group["momentum"] for p in group["params"])
        return all(optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in moved if p.grad is not None)
    return True


def _scale_parameters(outcome: StepOutcome, skipped: Tensor | None) -> None:
    """Multiply parameters after an update; a device that decided to skip it leaves them as they are."""
    with torch.no_grad():
        for effect, parameters in outcome.parameter_factors:
            factor = effect.factor()
            if skipped is not None:
                wide = torch.float32 if skipped.device.type == "mps" else torch.float64
                if isinstance(factor, Tensor):
                    given = factor.reshape(()).to(skipped.device, wide, non_blocking=True)
                else:
                    given = torch.full((), factor, dtype=wide, device=skipped.device)
                factor = torch.where(skipped.reshape(()) > 0, torch.ones_like(given), given)
            optimizers.foreach_scale(parameters, factor)


def _learning_rates(optimizer: torch.optim.Optimizer, first: int, keys: dict[int, RecordKey]) -> dict[RecordKey, float]:
    """Numbers, and tensors in host memory; reading one on a device would wait for it."""
    rates: dict[RecordKey, float] = {}
    for number, group in enumerate(optimizer.param_groups, first):
        if number not in keys:
            keys[number] = RecordKey("lr", 1, f"optimizer:{number}")
        rate, key = python_number(group.get("lr")), keys[number]
        if isinstance(rate, int | float) or (isinstance(rate, Tensor) and rate.device.type == "cpu"):
            rates[key] = number_of(rate)
    return rates
