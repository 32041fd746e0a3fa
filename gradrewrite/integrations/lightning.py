"""``RewriteCallback`` for the Trainer of Lightning, and ``diagnose`` for its modules."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer

from gradrewrite._compat import dynamo
from gradrewrite._diagnosis import Diagnosis
from gradrewrite._diagnosis import diagnose as diagnose_model
from gradrewrite.backends.traced_step import ComputeLoss, TrainingStep
from gradrewrite.integrations._attachment import UNEXPLAINED, Attached, Attachment, Settings, told
from gradrewrite.integrations._kept import kept_attributes, kept_generators
from gradrewrite.module import refuse_trainers
from gradrewrite.monitoring.monitor import Monitor
from gradrewrite.policy.actions import Policy
from gradrewrite.replay.step_snapshot import RandomState

# What hands over to the Trainer in a training step, and is not traced.
_OPAQUE = (
    *((LightningModule, name) for name in ("manual_backward", "clip_gradients", "optimizers", "lr_schedulers")),
    *((LightningModule, name) for name in ("toggle_optimizer", "untoggle_optimizer", "print")),
    (LightningOptimizer, "step"),
)


def diagnose(
    module: LightningModule,
    loader: Iterable[Any],
    *,
    steps: int = 50,
    compile: bool = False,
    try_clips: bool = False,
) -> Diagnosis:
    """Diagnose the training of a LightningModule, on a copy.

    It is ``gr.diagnose`` with ``training_step(batch, batch_idx)`` and the optimizer of ``configure_optimizers()``,
    without a Trainer: what the module logs is dropped, schedules, accumulation and precision plugins are left out, and
    ``self.trainer`` is what it is outside of a training.

    The module, and the random state of torch, Python and NumPy, stay as they were.

    Args:
        module: A module in the mode in which it is to run.
        loader: Batches, as ``Trainer.fit`` takes them.
        steps: How many steps at most.
        compile: Compile with ``torch.compile`` instead of op by op.
        try_clips: Train with clips too, as in ``gr.diagnose``.

    Returns:
        The diagnosis.

    Raises:
        TypeError: ``module`` is no LightningModule, it updates its parameters itself (``automatic_optimization`` is
            False), or it has several optimizers.
        ValueError: ``steps`` is not a whole number >= 1, or there is no batch.

    Example:
        >>> diagnose(1, [])
        Traceback (most recent call last):
        TypeError: diagnose takes a LightningModule, got int
    """
    if not isinstance(module, LightningModule):
        raise TypeError(f"diagnose takes a LightningModule, got {type(module).__name__}")
    if not module.automatic_optimization:
        raise TypeError(
            "diagnose: the module updates its parameters itself (automatic_optimization is False); give gr.diagnose a "
            "function compute_loss(model, batch), and one optimizer"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_silent())
        stack.enter_context(kept_generators())
        stack.enter_context(kept_attributes(module))
        stack.enter_context(dynamo.changing_numbers())
        return diagnose_model(
            module,
            _Batches(module, loader),
            compute_loss=_loss_of(module),
            optimizer=_one_optimizer(module.configure_optimizers()),
            steps=steps,
            compile=compile,
            try_clips=try_clips,
        )


def _loss_of(module: LightningModule) -> ComputeLoss:
    """Return a module's training step as a function of model, batch and number."""
    takes_index = _takes_index(module)

    def compute_loss(model: LightningModule, batch: Any, batch_idx: int) -> Any:
        output = model.training_step(batch, batch_idx) if takes_index else model.training_step(batch)
        return output["loss"] if isinstance(output, Mapping) else output

    return compute_loss


def _takes_index(module: LightningModule) -> bool:
    """Return whether a training step has a second positional parameter."""
    parameters = inspect.signature(module.training_step).parameters.values()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    has_many = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    return has_many or sum(parameter.kind in by_position for parameter in parameters) > 1


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop values that modules log inside the block."""
    with contextlib.ExitStack() as stack:
        for name in ("log", "log_dict", "print"):
            stack.enter_context(_replaced(LightningModule, name, _do_nothing))
        yield


def _do_nothing(self: LightningModule, *args: Any, **kwargs: Any) -> None:
    pass


def _one_optimizer(configured: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer of ``configure_optimizers()``; TypeError of several."""
    if isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], Sequence):
        configured = configured[0]  # and schedules
    found = list(configured) if isinstance(configured, Sequence) else [configured]
    optimizers = [one["optimizer"] if isinstance(one, Mapping) else one for one in found]
    if len(optimizers) > 1:
        raise TypeError(
            f"diagnose: configure_optimizers() returns {len(optimizers)} optimizers; give gr.diagnose a function "
            "compute_loss(model, batch), and one of them"
        )
    return optimizers[0] if optimizers else None


@dataclass(frozen=True)
class _Batches:
    """The numbered batches of a loader, on a module's device."""

    module: LightningModule
    loader: Iterable[Any]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        module = self.module
        for number, batch in enumerate(self.loader):
            batch = module.on_before_batch_transfer(batch, 0)
            batch = module.transfer_batch_to_device(batch, module.device, 0)
            yield {"batch": module.on_after_batch_transfer(batch, 0), "batch_idx": number}


class RewriteCallback(Attached, Callback):  # type: ignore[misc]  # the checker skips Lightning
    """Train with a policy in Lightning's ``Trainer``.

    When fitting begins the LightningModule is rewritten in place and its optimizers guarded, with the GradScaler of the
    precision plugin as loss scale if there is one; when it ends, or fails, both are plain again. Every
    ``log_every_n_steps`` steps four figures are logged: ``gradrewrite/total_norm``, ``gradrewrite/clip_rate:<site>``
    (the clip that acted most often since the last log), ``gradrewrite/nonfinite`` (elements in the backward) and
    ``gradrewrite/growth:<module>`` (factor per call, or per layer, that is farthest from 1), as far as the policy
    records them.

    The loss that ``training_step`` returns is the record ``loss@run``, not divided by ``accumulate_grad_batches``.

    In ``default_root_dir`` are ``run.jsonl``, with all records as they come, and ``run.html``, the page about the
    training, when it has ended or failed. If it ends by an error, or with values that are not finite, ``diagnosis.txt``
    says why: on the CPU the first such step is replayed before its update. A training that is resumed appends to
    ``run.jsonl``; else that of the training before becomes ``run.previous.jsonl``. On several ranks each has a
    ``run.rank0.jsonl``, and the first writes the page.

    What the actions remember (``gr.State``, ``AutoClip``, schedules) is part of the Trainer's checkpoints, and is there
    again after ``fit(..., ckpt_path=...)``.

    ``training_step`` is traced, with all that it calls: ``self(x)``, submodules, the loss. ``self.log`` is carried out
    when the step is over; where the tracer cannot follow, as in a manual optimization, the step is several graphs.
    With ``methods=("forward",), fullgraph=True`` the calls ``self(x)`` alone have the policy.

    Args:
        policy: As ``transform`` takes it; sites of kind ``step`` see the gradient that the optimizer uses. Or
            ``"diagnose"``: record what the judge needs, and change nothing.
        compile: Compile with Inductor; a mapping has arguments for ``model.compile``. False runs op by op. None: yes,
            but not for ``"diagnose"``, which then trains to the same bits as without it.
        monitor: Where records go; a new one if None. It is ``callback.monitor``.
        records: Patterns (``fnmatch``) of the records that are logged (``record/site``) instead of the four figures.
        folder: Where the files are written; True is ``default_root_dir``, False writes none.
        prog_bar: Whether the figures are in the progress bar too.
        max_consecutive_skips: See ``guard``.
        update_ratios: See ``guard``.
        audit: Audit the first training step, before it runs (``gr.audit``): one line in the log, tables in the page.
            None: for ``"diagnose"``. Steps with a manual optimization are not audited.
        **options: Further arguments of ``transform`` (``fullgraph``, ``dynamic``, ``methods``, ``regions``,
            ``loss_scale``). Without ``methods``, ``fullgraph`` is False.

    Raises:
        ValueError: ``policy`` is a string other than ``"diagnose"``.

    Example:
        >>> import gradrewrite as gr
        >>> from gradrewrite.passes import ClipByGlobalNorm
        >>> callback = RewriteCallback(gr.on("step:*", ClipByGlobalNorm(1.0)))
        >>> callback.monitor.latest()
        {}
    """

    def __init__(
        self,
        policy: Policy | Literal["diagnose"],
        *,
        compile: bool | Mapping[str, Any] | None = None,
        monitor: Monitor | None = None,
        records: str | Sequence[str] | None = None,
        folder: bool | str | PathLike[str] = True,
        prog_bar: bool = False,
        max_consecutive_skips: int = 50,
        update_ratios: bool = False,
        audit: bool | None = None,
        **options: Any,
    ) -> None:
        self._prog_bar = prog_bar
        of_guards = {"max_consecutive_skips": max_consecutive_skips, "update_ratios": update_ratios}
        if "methods" not in options and "regions" not in options:
            options = {"fullgraph": False, **options, "methods": ("training_step",)}
        self._traces_step = "training_step" in options.get("methods", ())
        settings = Settings(policy, compile, records, folder, options, of_guards, audit)
        self._attachment = Attachment(settings, monitor)
        self._while_fitting = contextlib.ExitStack()
        self._loss: torch.Tensor | None = None  # of the backward that runs
        self._repeated: Callable[[], tuple[TrainingStep, Any, RandomState]] | None = None  # the last step

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rewrite the module and guard its optimizers."""
        assert trainer.model is not None
        refuse_trainers(trainer.model)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._while_fitting.close()
        is_resumed = trainer.ckpt_path is not None or trainer.global_step > 0
        folder = trainer.default_root_dir
        self._attachment.attach(pl_module, trainer.optimizers, scaler, folder, is_resumed=is_resumed)
        if self._traces_step:
            self._while_fitting.enter_context(_traceable(pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Audit the first step."""
        self._repeated = None
        if not pl_module.automatic_optimization:
            return
        given = {"batch": batch, "batch_idx": batch_idx}
        if self._attachment.awaits_audit:
            with _aside(trainer, pl_module):
                self._attachment.audit(TrainingStep(compute_loss=_loss_of(pl_module)), given)
        if pl_module.device.type == "cpu":
            random = self._attachment.random_state()
            self._repeated = lambda: (TrainingStep(compute_loss=_loss_of(pl_module)), given, random)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Keep the loss for the look behind the backward."""
        self._loss = loss.detach()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Explain the first step that is not finite, before its update; on a GPU nothing waits for that."""
        loss, self._loss = self._loss, None
        if loss is None or loss.device.type != "cpu":
            return
        if self._attachment.is_first_bad(bool(loss.isfinite().all())):
            with told(UNEXPLAINED), _aside(trainer, pl_module):
                self._attachment.explain_first(self._repeated)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the loss, and the figures."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            is_divided = pl_module.automatic_optimization
            self._attachment.add_loss(loss * trainer.accumulate_grad_batches if is_divided else loss)
        self._attachment.log_loss()
        bound = trainer.gradient_clip_val
        self._attachment.note_own_clipping(f"Trainer(gradient_clip_val={bound})", bound)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1  # the one that ends
        if trainer.log_every_n_steps and step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self._attachment.figures(), prog_bar=self._prog_bar)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the page, and make module and optimizers plain again."""
        self._while_fitting.close()
        self._attachment.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write page and diagnosis, and make module and optimizers plain again."""
        self._while_fitting.close()
        self._attachment.end(exception)


@contextlib.contextmanager
def _aside(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Run a step beside the unchanged training."""
    with _silent(), kept_generators(), kept_attributes(module), trainer.precision_plugin.forward_context():
        yield


@contextlib.contextmanager
def _traceable(module: LightningModule) -> Iterator[None]:
    """Let a training step be traced, without the work of the Trainer.

    Values that it logs wait until it is over.
    """
    plain, waiting = LightningModule.log, []

    @functools.wraps(plain)
    def log(self: LightningModule, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling() or self._current_fx_name != "training_step" or kwargs.get("enable_graph"):
            plain(self, name, value, *args, **kwargs)
        else:  # as it is now: it may be changed in place before the step is over
            waiting.append((name, value.detach().clone() if isinstance(value, torch.Tensor) else value, args, kwargs))

    traced = type(module).training_step

    @functools.wraps(traced)
    def training_step(self: LightningModule, *args: Any, **kwargs: Any) -> Any:
        waiting.clear()  # of a step that failed
        output = traced(self, *args, **kwargs)
        for name, value, further, options in waiting:
            plain(self, name, value, *further, **options)
        waiting.clear()
        return output

    reason = "the Trainer's part of a training step is not traced"
    with contextlib.ExitStack() as stack:
        for cls, name in _OPAQUE:
            stack.enter_context(_replaced(cls, name, dynamo.outside_of_graphs(vars(cls)[name], reason)))
        stack.enter_context(_replaced(LightningModule, "log", log))
        stack.enter_context(_replaced(type(module), "training_step", training_step))
        stack.enter_context(dynamo.changing_numbers())
        yield


@contextlib.contextmanager
def _replaced(cls: type, name: str, value: Any) -> Iterator[None]:
    before = vars(cls)[name]
    setattr(cls, name, value)
    try:
        yield
    finally:
        setattr(cls, name, before)
