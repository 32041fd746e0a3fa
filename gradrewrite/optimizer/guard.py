"""``guard``: step-site actions and skipped updates at ``optimizer.step()``."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from gradrewrite._compat import dynamo, optimizers
from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite._utils.warnings import warn
from gradrewrite.backends.session import SCALED
from gradrewrite.backends.written_buffers import WrittenBuffers
from gradrewrite.distributed.agreement import Ballot
from gradrewrite.distributed.groups import RankGroups, check_group
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.monitoring.guards import let_guards_follow
from gradrewrite.monitoring.host_copy import number_of
from gradrewrite.monitoring.monitor import Monitor, recorder_of
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.optimizer._target import Attachment, Target, targets_of
from gradrewrite.optimizer.observed_state import ObservedState
from gradrewrite.optimizer.spikes import Judgement, Losses, no_loss, remember
from gradrewrite.optimizer.step_sites import GUARD, StepOutcome, StepSites
from gradrewrite.optimizer.update_ratios import Before, UpdateRatios
from gradrewrite.optimizer.verdict import UpdateVerdict
from gradrewrite.policy.numbers import python_number
from gradrewrite.policy.rules import check_bounds
from gradrewrite.policy.state_store import StateStore

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)
_METHODS = "_gradrewrite_methods"  # those of the guard among the attributes of its optimizer, and what was there
_UPDATES_BY_OTHERS = 3


def guard(
    optimizer: _Optimizer,
    model: Any,
    *,
    max_consecutive_skips: int = 50,
    update_ratios: bool = False,
    process_group: distributed.ProcessGroup | None = None,
) -> _Optimizer:
    """Run step-site actions before each update; skip it after a failed check, or a spike.

    The checks are those of ``CheckFinite("skip")``, and ``SkipSpikes``. A step site is the gradient that
    ``optimizer.step()`` uses: accumulated over backwards and, under a GradScaler, unscaled, whether or not ``unscale_``
    was called. Its name is the parameter's. The policies of the models are asked at the step sites of the optimizer's
    parameters, once for each set of gradients that are there (``None`` is left out, at most 16 such sets are kept
    compiled), and the actions run as one graph, compiled if the model is. After the step ``.grad`` holds the gradient
    that was used. Records are added to those of the last backward; they make a step of their own where no backward has
    recorded anything since this optimizer's last step.

    ``Observe``, ``Keep`` and ``CheckFinite`` (but not with ``"skip"``) also stand at parameters, ``param:NAME``, and at
    the floating-point tensors of their state, ``state:NAME.KEY`` (``optimizer.state[parameter][KEY]``), as the step
    leaves them: after the update, ``DecayWeights`` included, and unchanged where it was skipped. They are measured
    outside of any graph; sharded tensors have the figures of the whole (in such steps one further all-reduce with
    ``SUM``, and one with ``MAX`` where extremes are measured). A callback's answers count there only if it tells the
    kind from others, so that ``lambda site: Observe("norm")`` says nothing about parameters.

    Where one ``ClipByGlobalNorm`` is the only group action, all gradients are in its group, and the optimizer is fused,
    the optimizer's kernel divides by ``total norm / max_norm`` as it reads the gradients, which costs no pass of its
    own; the quotient may differ from ``gradient * (max_norm / total norm)`` in the last bit. Otherwise gradients of a
    group are multiplied in place before the step; so they are where the optimizer's ``step`` is overridden or it has
    step pre-hooks, which may read ``.grad``.

    A skipped step leaves parameters and optimizer state untouched, and restores the buffers that the forwards since the
    last update have written (running statistics, counters): where an update may be skipped, each is copied before it is
    first written. A fused optimizer (``fused=True``) decides on the
    device, through ``found_inf``, and nothing waits; any other costs one host read a step. A failed micro-batch spoils
    the whole step, whatever came after it; ``optimizer.zero_grad`` clears it. A GradScaler's own ``found_inf`` and
    ``grad_scale`` hold beside it; an update that it does not ask for counts as skipped too. Learning rates become
    records ``lr@optimizer:<group>`` of the last backward (tensors on a device excepted); groups of several guarded
    optimizers are numbered through. ``skipped@optimizer:<first group>`` is 1 where the update after the last backward
    was skipped, 0 where it was made after a check. Every 100th skipped step is logged as a warning; ``monitor.skipped``
    counts all.

    On several ranks all of a process group skip a step that one of them skips: after a failed check, or where a
    GradScaler found an infinity for a fused optimizer. Every ``step`` then makes one all-reduce of two numbers (four
    with ``SkipSpikes(of="loss")``), and those of the step sites of sharded gradients, so all ranks must call ``step``
    equally often. The host waits for no device; on the CPU the collective itself blocks. ``monitor.skipped`` and
    ``skipped@optimizer`` are those of the group. An optimizer that is not fused is not called at all by a GradScaler
    that found an infinity; ``zero_grad``, where such gradients go, counts the update. DistributedDataParallel and FSDP2
    let all ranks find it. That waits for the device, where gradients without a step go.

    Args:
        optimizer: Its ``step`` is replaced on this object alone; a closure is called once, before the decision. Of an
            optimizer that accelerate or Lightning has prepared, it is that of the optimizer inside.
        model: What ``transform`` or ``backend`` returned; its monitor (then there are no step sites); or a sequence of
            such, whose parameters the optimizer has. A name that several of them have is that of the first one's site;
            the others' are numbered, ``step:weight#1``, in the order of the optimizer; each policy is asked without the
            number. All records go to each monitor. A model that is restored and rewritten again in place stays
            guarded: its new policy holds, and its new monitor gets the records.
        max_consecutive_skips: After so many skipped steps in a row ``NonFiniteError`` is raised from ``step``, or
            ``SpikeError`` if the last one was skipped for a spike (with a fused optimizer on a GPU as soon as the
            count has arrived).
        update_ratios: Record ``update_ratio@gradient:<name>``, the L2 length of the update over that of the parameter,
            ``||w_after - w_before|| / ||w_before||``, in the record of the last backward: for each parameter of the
            optimizer that belongs to the model, under its first name. 0 where nothing moved (a skipped step), inf where
            a parameter was 0 before, NaN where it is not finite; complex numbers count by modulus. Nothing waits for
            the device; each step copies the parameters (in float32 at least) and reads them three times. A policy
            that records nothing has nothing to add them to: a warning tells once. The ratio of a sharded parameter is
            that of the whole: one more all-reduce for each set of ranks, in steps that are measured.
        process_group: The ranks that skip a step together. By default those of the DistributedDataParallel in which
            the model is called, of the largest group of ``AllReduce``, or of the device meshes of the parameters
            (FSDP2, tensor parallel); without any of these nothing is communicated. Needed where these are different
            ranks, and a check that skips comes before the average.

    Returns:
        The same optimizer.

    Raises:
        TypeError: ``optimizer`` is none, has a guard already, or evaluates its closure itself (LBFGS); or there is no
            monitor.
        ValueError: ``max_consecutive_skips`` is not a whole number >= 1; ``update_ratios`` with a bare monitor,
            which knows no names; or this process is not in ``process_group``; or a bound in a rule is a tensor that is
            negative.
        NoSuchSiteError: A rule for ``step`` or ``param`` sites matches no parameter of its model (of a backend: from
            ``step``); or (from ``step``) a rule for ``state`` sites none of the tensors in the optimizers' state.
        PolicyError: (from ``step``) ``process_group`` is needed; or ranks of a DistributedDataParallel may join
            (``model.join()``), and the others would wait for them.
        UnsupportedGradientError: (from ``step``) There is an action at a sparse gradient.

    Example:
        >>> import gradrewrite as gr
        >>> from gradrewrite.passes import CheckFinite
        >>> model = gr.transform(torch.nn.Linear(2, 2), gr.on("gradient:*", CheckFinite("skip")))
        >>> optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"gr.guard takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    outer: torch.optim.Optimizer = optimizer
    inner = optimizers.inside_of(outer)
    if isinstance(inner, torch.optim.LBFGS):
        raise TypeError(
            "gr.guard: LBFGS evaluates its closure several times in a step, so no single verdict holds. Use it without "
            "a guard, with the actions at gradient sites, where they act on each evaluation; or another optimizer"
        )
    if GUARD in inner.__dict__:
        raise TypeError(
            "gr.guard: this optimizer has a guard already, which gr.unguard(optimizer) takes off; one guard takes "
            "several models, gr.guard(optimizer, [model, other])"
        )
    targets = targets_of(model)
    number = python_number(max_consecutive_skips)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"gr.guard: max_consecutive_skips is a whole number >= 1, got {number!r}")
    if update_ratios and any(isinstance(item, Monitor) for item in (model if isinstance(model, Sequence) else [model])):
        raise ValueError(
            "gr.guard: a monitor knows no names of parameters, which update_ratios=True needs; give the model: "
            "gr.guard(optimizer, model, update_ratios=True)"
        )
    check_group(process_group)
    for target in targets:
        if target.session is not None:
            check_bounds(target.session.config.policy)
    ratios = UpdateRatios(targets) if update_ratios else None
    if any(recorder.guards.live for recorder in _recorders_of(targets)):
        gc.collect()  # an optimizer in a cycle may be gone, and the new one is to have its number
    watching = Guard(inner, targets, number, ratios, process_group)
    inner.__dict__[GUARD] = watching
    inner.__dict__[_METHODS] = {
        "step": _replace(inner, "step", watching, watching.step),
        "zero_grad": _replace(inner, "zero_grad", watching, watching.zero_grad),
    }
    optimizers.use_methods_of(inner, outer)
    return optimizer


def unguard(optimizer: torch.optim.Optimizer) -> None:
    """Take the guard off an optimizer, if any; later wrappers of methods go on."""
    inner = optimizers.inside_of(optimizer)
    watching = inner.__dict__.pop(GUARD, None)
    if not isinstance(watching, Guard):
        return
    watching.remove()
    for name, (method, own) in inner.__dict__.pop(_METHODS).items():
        if inner.__dict__.get(name) is method:
            del inner.__dict__[name]
            if own is not None:
                inner.__dict__[name] = own


def _replace(
    optimizer: torch.optim.Optimizer, name: str, watching: Guard, run: Callable[..., Any]
) -> tuple[MethodType, Any]:
    """Put a method on the object; return it with the object's own attribute.

    Learning-rate schedulers expect a bound method there. It is bound to a weak proxy, and holds no method that is bound
    to the optimizer: in a cycle the optimizer would not be freed when it is deleted.
    """
    inner = getattr(optimizer, name)
    is_bound = isinstance(inner, MethodType) and inner.__self__ is optimizer
    function = inner.__func__ if is_bound else inner
    ref = weakref.ref(optimizer)

    @functools.wraps(function, updated=())
    def method(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        own = ref()
        if own is None:  # ``self`` is a proxy for it
            raise RuntimeError(
                f"gr.guard: the optimizer of this {name} method is gone: methods of a guarded optimizer do not keep "
                "it alive. Keep the optimizer itself: self.optimizer = gr.guard(optimizer, model)"
            )
        update = MethodType(function, own) if is_bound else function
        return update(*args, **kwargs) if watching.is_removed else run(own, update, *args, **kwargs)

    # GradScaler looks for a parameter ``grad_scaler``; the signature of a bound method lacks the first one. That of a
    # scheduler's function has a ``self`` which it does not take.
    own = inspect.signature(inner)
    taken = [parameter for parameter in own.parameters.values() if parameter.name != "self"]
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = own.replace(parameters=[first, *taken])  # type: ignore[attr-defined]
    if "_wrapped_by_lr_sched" in vars(inner):  # so that a scheduler does not wrap it again
        method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    replaced = MethodType(method, weakref.proxy(optimizer)), optimizer.__dict__.get(name)
    optimizer.__dict__[name] = replaced[0]
    return replaced


class Guard:
    """The steps of one guarded optimizer: actions at step sites, the verdict, the update and its records."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        targets: Sequence[Target],
        max_consecutive_skips: int,
        ratios: UpdateRatios | None,
        process_group: distributed.ProcessGroup | None,
    ) -> None:
        """Watch an optimizer; NoSuchSiteError if a rule for step sites matches no parameter."""
        self._optimizer = weakref.ref(optimizer)
        self.is_removed = False  # whether it was taken off
        self.targets = targets  # what it was given
        self.attached = [self._attach(recorder, optimizer) for recorder in _recorders_of(targets)]
        self._is_settled = False
        groups = RankGroups()
        has_policy = any(target.session is not None for target in targets)
        self._step_sites = StepSites(targets, self.attached, groups) if has_policy else None
        self._observed = ObservedState(targets, groups) if has_policy else None
        self._verdict = UpdateVerdict(optimizer, targets, self.attached, max_consecutive_skips, process_group, groups)
        self._num_graphs: dict[int, int] = {}  # by session, when its edits were looked at for a loss scale
        self._losses = Losses()
        self._ratios = ratios
        self._agreeing: distributed.ProcessGroup | None = None  # ranks that decided on the last update together
        self._warned_of_no_step = False
        self._has_new_gradients = False  # whether a backward has run since the last step
        # Versions of two parameters at the last backward, and how often both had changed; None once this has stepped.
        self._changes: tuple[tuple[int, ...], int] | None = ((), -1)
        for states in self._states:
            states.add_guard(id(self))

    def _attach(self, recorder: StepRecorder, optimizer: torch.optim.Optimizer) -> Attachment:
        last_step = recorder.last_used_step()
        return Attachment(recorder, recorder.guards.add(self, len(optimizer.param_groups)), last_step)

    @property
    def is_alive(self) -> bool:
        """Whether the optimizer is still there, with this guard."""
        return self._optimizer() is not None and not self.is_removed

    def follow(self) -> None:
        """Follow the models to their current recorders, after another rewrite in place."""
        optimizer = self._optimizer()
        if not self._has_moved or optimizer is None or self.is_removed:
            return
        recorders, before = _recorders_of(self.targets), {id(a.recorder): a for a in self.attached}
        last_skip = self.attached[0].recorder.last_skip
        for attachment in self.attached:
            if attachment.recorder not in recorders:
                attachment.recorder.guards.remove(self)
        self.attached[:] = [before.get(id(r)) or self._attach(r, optimizer) for r in recorders]
        for recorder in recorders:
            if id(recorder) not in before:
                recorder.note_last_skip(last_skip)
        for states in self._states:
            states.add_guard(id(self))

    def settle(self) -> None:
        """Take the numbers of the guards of deleted optimizers.

        It does so before the first use of its own. An optimizer that is replaced is gone only after the new one has its
        guard: ``o = gr.guard(..., model)``.
        """
        if self._is_settled:
            return
        self._is_settled = True
        if any(len(attachment.recorder.guards) > 1 for attachment in self.attached):
            gc.collect()  # the other optimizers may be in cycles
            for attachment in self.attached:
                attachment.seat = attachment.recorder.guards.move_up(self)

    @property
    def _has_moved(self) -> bool:
        return _recorders_of(self.targets) != [attachment.recorder for attachment in self.attached]

    @property
    def _states(self) -> list[StateStore]:
        return [target.session.config.states for target in self.targets if target.session is not None]

    def leave(self) -> None:
        """The optimizer is gone: its steps do not count any more."""
        for states in self._states:
            states.remove_guard(id(self))

    def _follow_all(self) -> None:
        if self._has_moved:
            let_guards_follow()

    def remove(self) -> None:
        """Let the optimizer, and the monitors, be without it."""
        self.is_removed = True
        self.leave()
        for attachment in self.attached:
            attachment.recorder.guards.remove(self)

    @property
    def has_step_sites(self) -> bool:
        """Whether it runs the actions at step sites: not with a bare monitor."""
        return self._step_sites is not None

    @property
    def num_skipped(self) -> Tensor | None:
        """Number of skipped updates, on the device; None if none was checked."""
        return self._verdict.num_skipped

    def begin(self) -> None:
        """A backward begins: where none of the gradients is left, no verdict on them is left either."""
        self._verdict.drop_if_cleared(self._optimizer())

    def note(self, bad: Tensor, parameters: Sequence[weakref.ref[Tensor]]) -> None:
        """Note a graph's verdict, if it has parameters of the optimizer or none at all."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._verdict.note(optimizer, bad, parameters)

    @property
    def may_have_step_actions(self) -> bool:
        """Whether a policy may have actions at step sites, at parameters or at state."""
        if self._step_sites is None or self._observed is None:
            return False
        return self._step_sites.may_act or self._observed.may_act

    @property
    def makes_next_record(self) -> bool:
        """Whether a backward has run since its last step, and step sites may have actions."""
        return self.may_have_step_actions and self._losses.num_backwards > 0

    def note_loss(self, loss: Tensor) -> None:
        """Take a logged loss, a copy with one element."""
        if self.may_have_step_actions:
            self._losses.note(loss)

    def count_backward(self, backward: int) -> None:
        """Take note of a backward, by its number."""
        self._has_new_gradients = True
        if self.may_have_step_actions:
            self._losses.note_backward(backward, self.is_cleared)

    def is_cleared(self) -> bool:
        """Whether there are no gradients; those of shards may be elsewhere while micro-batches add up (FSDP2)."""
        optimizer = self._optimizer()
        parameters = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        plain = [p for p in parameters if not is_dtensor(p)]
        return bool(plain) and all(p.grad is None for p in plain)

    def zero_grad(self, optimizer: torch.optim.Optimizer, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The gradients go, and the verdict and their losses with them."""
        is_left_out = self._has_new_gradients and self._may_be_scaled and _leaves_out(optimizer)
        self._restore_unless_finite(optimizer)
        self._verdict.drop(optimizer)
        if is_left_out:
            self._count_update()
        self._losses.drop()
        for attachment in self.attached:
            attachment.recorder.drop_step()
        self._follow_all()
        return inner(*args, **kwargs)

    def step(
        self, optimizer: torch.optim.Optimizer, inner: Callable[..., Any], closure: Any = None, **kwargs: Any
    ) -> Any:
        """Update, unless a check failed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        outcome, bad, before = _prepare(self, optimizer, inner, kwargs.get("grad_scaler"))
        # The kernels of a fused optimizer read it instead of a GradScaler's.
        replaced = {} if outcome.divisor is None and not outcome.is_unscaled else {"grad_scale": outcome.divisor}
        with optimizers.attributes_set(optimizer, replaced):
            result = self._update(optimizer, functools.partial(inner, **kwargs), bad, outcome)
        _finish(self, optimizer, bad, before)
        return loss if closure is not None else result

    @property
    def has_stepped(self) -> bool:
        """Whether the optimizer has made a step, or was warned of for making none."""
        return self._changes is None

    def note_backward(self) -> None:
        """Warn once of parameters updated by another optimizer, never by this one."""
        optimizer = self._optimizer() if self._changes is not None else None
        if optimizer is None or self._changes is None:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if not p.is_inference()]
        ends = parameters[:1] + parameters[-1:]
        versions, (before, times) = tuple(p._version for p in ends), self._changes
        times += not before or all(v != b for v, b in zip(versions, before, strict=True))
        self._changes = versions, times
        if times == _UPDATES_BY_OTHERS and ends:
            self._changes = None
            warn(
                f"gr.guard: this {type(optimizer).__name__} has made no step, while its parameters change between "
                "backwards, as by another optimizer, whose updates have none of the guard's actions and skips. Guard "
                "the optimizer whose step() is called: gr.guard(optimizer, model)"
            )

    def prepare(
        self, optimizer: torch.optim.Optimizer, inner: Callable[..., Any], scaler: torch.amp.GradScaler | None
    ) -> tuple[StepOutcome, Tensor | None, Sequence[Before]]:
        """Run the actions at step sites and judge; return their outcome, the verdict and the parameters before.

        ``inner`` makes the update. An optimizer that is given the GradScaler asks it whether to unscale.
        """
        self._changes = None
        self._follow_all()
        self.settle()
        is_scaled = "found_inf" in optimizer.__dict__ or scaler is not None or optimizers.scaler_in_use() is not None
        self._has_new_gradients = False
        for written in self._written_buffers:
            written.may_be_scaled |= is_scaled
        self._warn_of_scaler()
        if scaler is not None and self._step_sites is not None and self._step_sites.may_act:
            optimizers.unscale_once(scaler, optimizer)
        scale = optimizer.__dict__.get("grad_scale")  # a GradScaler's
        bad = self._verdict.take(optimizer)
        ballot = self._verdict.ballot(optimizer, bad)
        self._agreeing = None if ballot is None else ballot.group
        outcome = StepOutcome()
        if self._step_sites is not None:
            outcome = self._step_sites.run(optimizer, inner, scale, ballot, self._losses)
        checked = _worst(bad, outcome.verdict) if outcome.figures.judges else bad
        bad, judgements = self._judge(optimizer, bad, ballot, outcome)
        self._losses.clear()
        outcome = outcome.with_judgements(judgements)
        for at in self.attached:
            at.previous_step = at.last_step
            if outcome.outputs.packs or outcome.outputs.kept:
                at.last_step = at.recorder.collect_update(
                    outcome.outputs, outcome.tensors, at.last_step, self._is_due, self._number
                )
            at.recorder.add_host_values(_learning_rates(optimizer, at.seat.first_group))
        before = self._ratios.before(optimizer) if self._ratios is not None and self._is_due(1) else []
        if bad is not None:
            self._verdict.count(bad, checked, judgements)
        if judgements:
            remember(judgements, _worst(bad, optimizer.__dict__.get("found_inf")))
        return outcome, bad, before

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
        if ballot is None and not self._losses:
            raise no_loss(figures.judges_of_loss[0].judge)
        device = optimizer.param_groups[0]["params"][0].device
        sums = self._losses.sums(device) if ballot is None else ballot.figures()
        of_loss = figures.judge_loss(sums)
        return _worst(bad, *(judgement.verdict for judgement in of_loss)), [*judgements, *of_loss]

    @property
    def _number(self) -> int:
        """Number of the present update; -1 without a model."""
        return max((states.step for states in self._states), default=-1)

    def _is_due(self, every: int) -> bool:
        """Return whether a measurement with this interval is due in this step, in one of the models."""
        sampled = [target.session.sampling for target in self.targets if target.session is not None]
        return any(sampling.is_due(every) for sampling in sampled) or not sampled

    def finish(self, optimizer: torch.optim.Optimizer, bad: Tensor | None, before: Sequence[Before]) -> None:
        """Record the figures known after the update; NonFiniteError if a check of these raises."""
        try:
            self._observe(optimizer)
        finally:
            self._count_update()
        self._add_ratios(before)
        if bad is not None:
            self._verdict.look_at_counts()

    def _count_update(self) -> None:
        """An update was made, or left out: later backwards belong to the next one."""
        for states in self._states:
            states.note_step(id(self))
        for attachment in self.attached:
            attachment.recorder.note_update(self._agreeing)

    def _observe(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the observed parameters and optimizer state."""
        if self._step_sites is None or self._observed is None or not self._observed.may_act:
            return
        num_guards = max(len(at.recorder.guards.live) for at in self.attached)
        found = self._observed.measure(optimizer, self._step_sites.names(optimizer), id(self), num_guards)
        if found is None:
            return
        for at in self.attached:
            at.last_step = at.recorder.collect_update(*found, at.previous_step, lambda _: True, self._number)

    def _update(
        self, optimizer: torch.optim.Optimizer, update: Callable[[], Any], bad: Tensor | None, outcome: StepOutcome
    ) -> Any:
        skipped = optimizer.__dict__.get("found_inf")  # a GradScaler's
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
        if skipped is not None:
            self._restore_buffers(skipped)
        return result

    def _restore_buffers(self, skipped: Tensor | None) -> None:
        """Restore the buffers after a skipped update; see ``WrittenBuffers.restore``."""
        for written in self._written_buffers:
            written.restore(skipped)

    @property
    def _written_buffers(self) -> list[WrittenBuffers]:
        return [target.session.buffers for target in self.targets if target.session is not None]

    @property
    def _may_be_scaled(self) -> bool:
        """Whether a GradScaler may leave out updates."""
        scales = (target.session.config.loss_scale for target in self.targets if target.session is not None)
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
        """Warn once of thresholds in units of the gradient where a GradScaler scales the loss unknown to the policy."""
        for target in self.targets:
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
            added = [attachment.recorder.add_late(keys, ratios) for attachment in self.attached]
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


def _recorders_of(targets: Sequence[Target]) -> list[StepRecorder]:
    """Return the recorders of the targets' monitors as they are now, each once."""
    return list(dict.fromkeys(recorder_of(target.monitor) for target in targets))


_APART = "gradrewrite compiles the actions at step sites by itself, and keeps accounts of them"
_prepare = dynamo.outside_of_graphs(Guard.prepare, _APART)
_finish = dynamo.outside_of_graphs(Guard.finish, _APART)


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


def _learning_rates(optimizer: torch.optim.Optimizer, first: int) -> dict[RecordKey, float]:
    """Numbers, and tensors in host memory; reading one on a device would wait for it."""
    rates: dict[RecordKey, float] = {}
    for number, group in enumerate(optimizer.param_groups, first):
        rate, key = python_number(group.get("lr")), RecordKey("lr", 1, f"optimizer:{number}")
        if isinstance(rate, int | float) or (isinstance(rate, Tensor) and rate.device.type == "cpu"):
            rates[key] = number_of(rate)
    return rates
