"""``guard``: what happens at ``optimizer.step()`` after a finite check failed."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradrewrite._compat import optimizers
from gradrewrite._warnings import warn
from gradrewrite.errors import NonFiniteError
from gradrewrite.ir.record_layout import OnFailure, RecordKey
from gradrewrite.monitoring.failed_checks import failure_of
from gradrewrite.monitoring.host_copy import floats_of, number_of
from gradrewrite.monitoring.monitor import Monitor, recorder_of
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.optimizer.update_ratios import Before, UpdateRatios, names_of, packs_of

logger = logging.getLogger("gradrewrite.optim")

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)
_REPORT_EVERY = 100
_NAME = "_gradrewrite_guard"
_SKIP: tuple[OnFailure, ...] = ("skip",)


def guard(
    optimizer: _Optimizer, model_or_monitor: Any, *, max_consecutive_skips: int = 50, update_ratios: bool = False
) -> _Optimizer:
    """Let an optimizer skip its update when a ``CheckFinite("skip")`` failed since its last step.

    A skipped step leaves parameters and optimizer state untouched. A fused optimizer (``fused=True``) decides on the
    device, through ``found_inf``, and nothing waits; any other costs one host read a step. A failed micro-batch spoils
    the whole step, whatever came after it; ``optimizer.zero_grad`` clears it. A GradScaler's own ``found_inf`` and
    ``grad_scale`` hold beside it; an update that it does not ask for counts as skipped too. Learning rates become
    records ``lr@optimizer:<group>`` of the last backward (tensors on a device excepted); groups of several guarded
    optimizers are numbered through. ``skipped@optimizer:<first group>`` is 1 where the update after the last backward
    was skipped, 0 where it was made after a check. Every 100th skipped step is logged as a warning; ``monitor.skipped``
    counts all.

    Args:
        optimizer: Its ``step`` is replaced on this object alone; a closure is called once, before the decision.
        model_or_monitor: What ``transform`` or ``backend`` returned, or its monitor.
        max_consecutive_skips: After so many skipped steps in a row ``NonFiniteError`` is raised from ``step`` (with
            a fused optimizer on a GPU as soon as the count has arrived).
        update_ratios: Record ``update_ratio@gradient:<name>``, the L2 length of the update over that of the parameter,
            ``||w_after - w_before|| / ||w_before||``, in the record of the last backward: for each parameter of the
            optimizer that belongs to the model, under its first name. 0 where nothing moved (a skipped step), inf where
            a parameter was 0 before, NaN where it is not finite; complex numbers count by modulus. Nothing waits for
            the device; each step copies the parameters (in float32 at least) and reads them three times. A policy
            that records nothing has nothing to add them to: a warning tells once.

    Returns:
        The same optimizer.

    Raises:
        TypeError: ``optimizer`` is none, has a guard already, or evaluates its closure itself (LBFGS); or there is no
            monitor.
        ValueError: ``max_consecutive_skips`` is not a whole number >= 1; or ``update_ratios`` with a bare monitor,
            which knows no names.

    Example:
        >>> import gradrewrite as gr
        >>> from gradrewrite.passes import CheckFinite
        >>> model = gr.transform(torch.nn.Linear(2, 2), gr.on("gradient:*", CheckFinite("skip")))
        >>> optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"gr.guard takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("gr.guard: LBFGS evaluates its closure several times in a step, so no single verdict holds")
    if _NAME in optimizer.__dict__:
        raise TypeError("gr.guard: this optimizer has a guard already")
    monitor = model_or_monitor if isinstance(model_or_monitor, Monitor) else _monitor_of(model_or_monitor)
    number = max_consecutive_skips
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"gr.guard: max_consecutive_skips is a whole number >= 1, got {number!r}")
    if update_ratios and isinstance(model_or_monitor, Monitor):
        raise ValueError(
            "gr.guard: a monitor knows no names of parameters, which update_ratios=True needs; give the model: "
            "gr.guard(optimizer, model, update_ratios=True)"
        )
    ratios = UpdateRatios(names_of(model_or_monitor)) if update_ratios else None
    watching = Guard(optimizer, monitor, number, ratios)
    optimizer.__dict__[_NAME] = watching
    _replace(optimizer, "step", watching.step)
    _replace(optimizer, "zero_grad", watching.zero_grad)
    return optimizer


def _monitor_of(model: Any) -> Monitor:
    monitor = getattr(model, "monitor", None)
    if not isinstance(monitor, Monitor):
        raise TypeError(
            f"gr.guard(optimizer, model): {type(model).__name__} has no monitor; give what gr.transform or gr.backend "
            "returned"
        )
    return monitor


def _replace(optimizer: torch.optim.Optimizer, name: str, run: Callable[..., Any]) -> None:
    """Put a method on the object; learning-rate schedulers expect a bound method there."""
    inner = getattr(optimizer, name)

    def method(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return run(self, inner, *args, **kwargs)

    if "_wrapped_by_lr_sched" in vars(inner):  # so that a scheduler does not wrap it again
        method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.__dict__[name] = MethodType(method, optimizer)


class Guard:
    """The state of one guarded optimizer: the verdict since its last step, and its counts, on the device."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        monitor: Monitor,
        max_consecutive_skips: int,
        ratios: UpdateRatios | None = None,
    ) -> None:
        """Watch an optimizer of which nothing was skipped yet."""
        self._optimizer = weakref.ref(optimizer)
        self._recorder = recorder_of(monitor)
        self._max_consecutive_skips = max_consecutive_skips
        self._ratios = ratios
        self._warned_of_no_step = False
        self._verdicts: dict[torch.device, Tensor] = {}
        self._counts: Tensor | None = None  # [in all, in a row], float64
        self._arriving: deque[tuple[torch.cuda.Event | None, Tensor]] = deque()
        self._reported = 0
        self._judged: dict[int, weakref.ref[Tensor]] = {}  # parameters whose gradients the verdicts are about
        self._first_group = self._recorder.add_guard(self, len(optimizer.param_groups))

    @property
    def is_alive(self) -> bool:
        """Whether the optimizer is still there."""
        return self._optimizer() is not None

    @property
    def skipped(self) -> int:
        """Number of updates that did not happen after a failed check; waits for the device."""
        return int(self._counts[0]) if self._counts is not None else 0

    def begin(self) -> None:
        """A backward begins: where none of the gradients is left, no verdict on them is left either."""
        left = (ref() for ref in self._judged.values())
        if self._verdicts and self._judged and all(p is None or p.grad is None for p in left):
            self._give_up()

    def _give_up(self) -> None:
        """The update never came: a GradScaler did not call ``step``, or the gradients were thrown away."""
        optimizer = self._optimizer()
        bad = self._verdict(optimizer) if optimizer is not None else None
        if bad is not None:
            self._count(bad)

    def note(self, bad: Tensor, parameters: Sequence[weakref.ref[Tensor]]) -> None:
        """Take the verdict of one graph, if the optimizer has one of its parameters, or it has none."""
        optimizer = self._optimizer()
        assert optimizer is not None
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        refs = {id(p): ref for ref in parameters if (p := ref()) is not None and id(p) in own}
        if parameters and not refs:
            return
        self._judged |= refs
        known = self._verdicts.get(bad.device)
        self._verdicts[bad.device] = bad if known is None else torch.maximum(known, bad)

    def zero_grad(self, optimizer: torch.optim.Optimizer, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The gradients go, and the verdict with them."""
        if self._verdicts:
            self._give_up()
            self._look_at_counts()
        return inner(*args, **kwargs)

    def step(
        self, optimizer: torch.optim.Optimizer, inner: Callable[..., Any], closure: Any = None, **kwargs: Any
    ) -> Any:
        """Update, unless a check failed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._recorder.add_host_values(_learning_rates(optimizer, self._first_group))
        before = self._ratios.before(optimizer) if self._ratios is not None else []
        bad = self._verdict(optimizer)
        if bad is None:
            result = inner(**kwargs)
        else:
            self._count(bad)
            result = self._decide(optimizer, inner, bad, kwargs)
        self._add_ratios(before)
        if bad is not None:
            self._look_at_counts()
        return loss if closure is not None else result

    def _add_ratios(self, before: Sequence[Before]) -> None:
        for keys, ratios in packs_of(before):
            if not self._recorder.add_late(keys, ratios) and not self._warned_of_no_step:
                self._warned_of_no_step = True
                warn(
                    "gr.guard(..., update_ratios=True): no backward has recorded anything, so the ratios have no step "
                    'to be added to; let the policy record something, such as gr.on("gradient:*", Observe("norm"))'
                )

    def _verdict(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """1 if a check failed since the last step, 0 if none did; None if nothing was checked."""
        if not self._verdicts:
            return None
        device = next(
            (p.device for g in optimizer.param_groups for p in g["params"] if p.device in self._verdicts), None
        )
        device = device or next(iter(self._verdicts))
        if self._counts is not None:
            device = self._counts.device
        verdicts = [bad.to(device, non_blocking=True) for bad in self._verdicts.values()]
        self._verdicts.clear()
        self._judged.clear()
        return torch.stack(verdicts).amax()

    def _count(self, bad: Tensor) -> None:
        if self._counts is None:
            self._counts = torch.zeros(2, dtype=torch.float64, device=bad.device)
        skipped = RecordKey("skipped", 1, f"optimizer:{self._first_group}")
        self._recorder.add_late((skipped,), bad.reshape(1), is_own=True)
        total, in_a_row = self._counts.unbind()
        self._counts = torch.stack([total + bad, (in_a_row + 1) * bad])

    def _decide(
        self, optimizer: torch.optim.Optimizer, inner: Callable[..., Any], bad: Tensor, kwargs: dict[str, Any]
    ) -> Any:
        if not _decides_on_device(optimizer):
            if not bool(bad):
                return inner(**kwargs)
            optimizers.note_step(optimizer)
            return None
        given = getattr(optimizer, "found_inf", None)  # a GradScaler's
        ours = bad if given is None else torch.maximum(bad, given.to(bad.device).reshape(()))
        optimizer.__dict__["found_inf"] = ours
        try:
            return inner(**kwargs)
        finally:
            if given is None:
                del optimizer.__dict__["found_inf"]
            else:
                optimizer.__dict__["found_inf"] = given

    def _look_at_counts(self) -> None:
        assert self._counts is not None
        if self._counts.device.type == "cuda":
            copy = torch.empty(2, dtype=torch.float64, pin_memory=True).copy_(self._counts, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._counts.device))
            self._arriving.append((event, copy))
        else:
            self._arriving.append((None, self._counts))
        while self._arriving and _has_arrived(self._arriving[0][0]):
            total, in_a_row = floats_of(self._arriving.popleft()[1])
            self._report(int(total), int(in_a_row))

    def _report(self, total: int, in_a_row: int) -> None:
        if total // _REPORT_EVERY > self._reported:
            self._reported = total // _REPORT_EVERY
            logger.warning("%d updates skipped so far, because a finite check failed", total)
        if in_a_row >= self._max_consecutive_skips:
            raise _skip_error(self._recorder, f"{in_a_row} updates in a row were skipped, so training does not go on")


def _has_arrived(event: torch.cuda.Event | None) -> bool:
    return event is None or event.query()


def _decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's kernels read ``found_inf``, and a skipped first step leaves no state behind."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    if isinstance(optimizer, torch.optim.SGD):
        # Its first step makes the momentum buffers, uninitialised if that step is skipped.
        return all(
            not group["momentum"] or all(optimizer.state[p].get("momentum_buffer") is not None for p in _used(group))
            for group in optimizer.param_groups
        )
    return True


def _used(group: dict[str, Any]) -> list[Tensor]:
    return [p for p in group["params"] if p.grad is not None]


def _learning_rates(optimizer: torch.optim.Optimizer, first: int) -> dict[RecordKey, float]:
    """Numbers, and tensors in host memory; reading one on a device would wait for it."""
    rates: dict[RecordKey, float] = {}
    for number, group in enumerate(optimizer.param_groups, first):
        rate, key = group.get("lr"), RecordKey("lr", 1, f"optimizer:{number}")
        if isinstance(rate, int | float) or (isinstance(rate, Tensor) and rate.device.type == "cpu"):
            rates[key] = number_of(rate)
    return rates


def _skip_error(recorder: StepRecorder, reason: str) -> NonFiniteError:
    """The failure for which the last update was skipped; its step may be over, if later micro-batches passed."""
    with recorder.lock:
        for record in reversed(recorder.records):
            error = failure_of(record, _SKIP, reason=reason)
            if error is not None:
                return error
        assert recorder.last_skip is not None
        note = f"the step that failed is not in the buffer (capacity {recorder.capacity}); this is the first check"
        return NonFiniteError(recorder.last_skip.site, step=recorder.num_steps - 1, note=f"{reason}; {note}")
