"""``guard``: step-site actions and skipped updates at ``optimizer.step()``."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from gradrewrite._compat import dynamo, optimizers
from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite._utils.warnings import warn
from gradrewrite.distributed.groups import RankGroups, check_group
from gradrewrite.monitoring.guards import let_guards_follow
from gradrewrite.monitoring.monitor import Monitor, recorder_of
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.optimizer._target import Attachment, Target, targets_of
from gradrewrite.optimizer.step_sites import GUARD, StepOutcome
from gradrewrite.optimizer.update import GuardedUpdate
from gradrewrite.optimizer.update_ratios import Before, UpdateRatios
from gradrewrite.optimizer.verdict import UpdateVerdict
from gradrewrite.policy.numbers import python_number
from gradrewrite.policy.rules import check_bounds

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

    Behind the update, and ``DecayWeights``, ``Hold`` puts back elements, and tensor functions at parameters,
    ``param:NAME``, and at the floating-point tensors of their state, ``state:NAME.KEY``
    (``optimizer.state[parameter][KEY]``), change what is there: ``f(value)`` or ``f(value, before)``, one graph for
    all. ``Observe``, ``Keep`` and ``CheckFinite`` (but not with ``"skip"``) stand there too: they see what the step
    leaves, unchanged where it was skipped. They are measured outside of any graph; sharded tensors have the figures of
    the whole (in such steps one further all-reduce with ``SUM``, and one with ``MAX`` where extremes are measured). A
    callback's answers count there only if it tells the kind from others, so that ``lambda site: Observe("norm")`` says
    nothing about parameters.

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
        CallbackError: (from ``step``) A function returned something else than a tensor like the one it was given.

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
        self.accumulated: MutableMapping[int, Tensor] = {}  # gradients that a training step holds
        self.attached = [self._attach(recorder, optimizer) for recorder in _recorders_of(targets)]
        self._is_settled = False
        groups = RankGroups()
        self._verdict = UpdateVerdict(optimizer, targets, self.attached, max_consecutive_skips, process_group, groups)
        self._update = GuardedUpdate(id(self), targets, self.attached, self._verdict, ratios, groups)
        # Versions of two parameters at the last backward, and how often both had changed; None once this has stepped.
        self._changes: tuple[tuple[int, ...], int] | None = ((), -1)
        for states in self._update.states:
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
        for states in self._update.states:
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
                attachment.move_up(self)

    @property
    def _has_moved(self) -> bool:
        return _recorders_of(self.targets) != [attachment.recorder for attachment in self.attached]

    def leave(self) -> None:
        """The optimizer is gone: its steps do not count any more."""
        for states in self._update.states:
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
        return self._update.has_step_sites

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
        return self._update.may_have_actions

    @property
    def makes_next_record(self) -> bool:
        """Whether a backward has run since its last step, and step sites may have actions."""
        return self.may_have_step_actions and self._update.losses.num_backwards > 0

    def note_loss(self, loss: Tensor) -> None:
        """Take a logged loss, a copy with one element."""
        if self.may_have_step_actions:
            self._update.losses.note(loss)

    def count_backward(self, backward: int) -> None:
        """Take note of a backward, by its number."""
        self._update.note_backward(backward, self.is_cleared)

    def is_cleared(self) -> bool:
        """Whether there are no gradients; those of shards may be elsewhere while micro-batches add up (FSDP2)."""
        optimizer = self._optimizer()
        parameters = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        plain = [p for p in parameters if not is_dtensor(p)]
        return not self.accumulated and bool(plain) and all(p.grad is None for p in plain)

    def zero_grad(self, optimizer: torch.optim.Optimizer, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The gradients go, and the verdict and their losses with them."""
        self._update.give_up(optimizer)
        self.accumulated.clear()
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
            result = self._update.make(optimizer, functools.partial(inner, **kwargs), bad, outcome)
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
        """Follow the models, and prepare the update; see ``GuardedUpdate.prepare``."""
        self._changes = None
        self._follow_all()
        self.settle()
        return self._update.prepare(optimizer, inner, scaler)

    def follow_in_graph(self) -> GuardedUpdate:
        """Follow the models before an update in a graph; return the update."""
        self._changes = None
        self._follow_all()
        self.settle()
        return self._update

    def finish(self, optimizer: torch.optim.Optimizer, bad: Tensor | None, before: Sequence[Before]) -> None:
        """Record the figures known after the update; NonFiniteError if a check of these raises."""
        self._update.finish(optimizer, bad, before)


def _recorders_of(targets: Sequence[Target]) -> list[StepRecorder]:
    """Return the recorders of the targets' monitors as they are now, each once."""
    return list(dict.fromkeys(recorder_of(target.monitor) for target in targets))


_APART = "gradrewrite compiles the actions at step sites by itself, and keeps accounts of them"
_prepare = dynamo.outside_of_graphs(Guard.prepare, _APART)
_finish = dynamo.outside_of_graphs(Guard.finish, _APART)
