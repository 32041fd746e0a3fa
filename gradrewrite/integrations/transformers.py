"""``RewriteCallback`` and ``diagnose`` for the Trainer of transformers."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from gradrewrite._diagnosis import Diagnosis
from gradrewrite._diagnosis import diagnose as diagnose_model
from gradrewrite._utils.warnings import warn
from gradrewrite.backends.traced_step import TrainingStep
from gradrewrite.errors import NonFiniteError
from gradrewrite.integrations._attachment import UNEXPLAINED, Attached, Attachment, Settings, told
from gradrewrite.integrations._kept import kept_attributes, kept_generators, kept_modes
from gradrewrite.monitoring.monitor import Monitor
from gradrewrite.policy.actions import Policy
from gradrewrite.replay.step_snapshot import RandomState


def diagnose(trainer: Trainer, *, steps: int = 50, compile: bool = False, try_clips: bool = False) -> Diagnosis:
    """Diagnose the training of a Trainer, on a copy of its model.

    It is ``gr.diagnose`` with the Trainer's batches, ``compute_loss`` and optimizer, also those of a subclass. Each
    batch is one update, at the rate of the optimizer: schedules, accumulation, clips and the GradScaler are left out.
    With ``fp16`` or ``bf16`` the step runs under autocast.

    The Trainer, its model, its optimizer and the random state of torch, Python and NumPy stay as they were.

    Args:
        trainer: A Trainer, before or after a training.
        steps: How many steps at most.
        compile: Compile with ``torch.compile`` instead of op by op.
        try_clips: Train with clips too, as in ``gr.diagnose``.

    Returns:
        The diagnosis.

    Raises:
        TypeError: ``trainer`` is none, its batches are no mappings, or DeepSpeed or FSDP1 trains the model.
        ValueError: ``steps`` is not a whole number >= 1, or there is no batch.

    Example:
        >>> diagnose(1)
        Traceback (most recent call last):
        TypeError: diagnose takes a transformers.Trainer, got int
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"diagnose takes a transformers.Trainer, got {type(trainer).__name__}")
    accelerator = trainer.accelerator
    _check_trainer(accelerator.state, "diagnose")
    model: nn.Module = accelerator.unwrap_model(trainer.model)
    loaders = len(accelerator._dataloaders)
    with kept_generators(), kept_attributes(trainer), kept_modes(model):
        try:
            model.train()
            prepared = trainer.optimizer if trainer.optimizer is not None else trainer.create_optimizer()
            return diagnose_model(
                model,
                _Batches(trainer),
                compute_loss=_loss_of(trainer),
                optimizer=getattr(prepared, "optimizer", prepared),  # of an AcceleratedOptimizer
                steps=steps,
                compile=compile,
                try_clips=try_clips,
            )
        finally:
            del accelerator._dataloaders[loaders:]


def _loss_of(trainer: Trainer) -> Callable[..., torch.Tensor]:
    """Return a Trainer's loss as a function of model and batch."""
    kind, dtype = trainer.args.device.type, _HALVES.get(trainer.accelerator.mixed_precision)

    def compute_loss(model: nn.Module, /, **inputs: Any) -> torch.Tensor:
        items = inputs.pop(_ITEMS, None)
        with torch.autocast(kind, dtype) if dtype is not None else contextlib.nullcontext():
            loss: torch.Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=items)
            return loss

    return compute_loss


_ITEMS = "num_items_in_batch"
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class _Batches:
    """The prepared batches of a Trainer, with their numbers of labels."""

    trainer: Trainer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        trainer = self.trainer
        loader = iter(trainer.get_train_dataloader())
        takes_device = len(inspect.signature(trainer.get_batch_samples).parameters) > 2
        given = (1, trainer.args.device) if takes_device else (1,)
        while True:
            samples, items = trainer.get_batch_samples(loader, *given)
            if not samples:
                return
            inputs = trainer._prepare_inputs(samples[0])
            if not isinstance(inputs, Mapping):
                raise TypeError(f"diagnose: {_no_mappings(inputs)}; a mapping of keyword arguments is needed")
            yield dict(inputs) if items is None else {**inputs, _ITEMS: items}


def _no_mappings(batch: Any) -> str:
    return f"the batches of the Trainer are {type(batch).__name__}s"


class RewriteCallback(Attached, TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Train with a policy in ``transformers.Trainer``.

    When training begins the model is rewritten in place and the optimizer guarded, with the GradScaler as loss scale if
    there is one; when it ends both are plain again. Whenever the Trainer logs, four figures are among its logs, so that
    TensorBoard, wandb and the progress bar have them: ``gradrewrite/total_norm``, ``gradrewrite/clip_rate:<site>`` (the
    clip that acted most often since the last log), ``gradrewrite/nonfinite`` (elements in the backward) and
    ``gradrewrite/growth:<module>`` (factor per call, or per layer, that is farthest from 1), as far as the policy
    records them.

    The loss of each ``training_step`` is the record ``loss@run``: times the number of micro-batches that are
    accumulated, so that its mean over an update is what the Trainer logs; NaN, which the Trainer leaves out, stays.

    In ``output_dir`` are ``run.jsonl``, with all records as they come, and ``run.html``, the page about the training,
    when it has ended. If it ends by an error, or with values that are not finite, ``diagnosis.txt`` says why. Of an
    error outside of ``training_step`` the Trainer tells no callback: then the files are written when the program ends,
    or by ``callback.report()``. A training that is resumed appends to ``run.jsonl``; else that of the training before
    becomes ``run.previous.jsonl``. Where the policy records norms of gradients at step sites, they are compared with
    ``max_grad_norm``. On several ranks each has a ``run.rank0.jsonl``, and the first writes the page.

    Where the batches are no mappings (tuples, say), no step is audited or run again; a warning says so.

    What the actions remember (``gr.State``, ``AutoClip``, schedules) is saved in the folder of each checkpoint, and is
    there again when training resumes from that: ``trainer.train(resume_from_checkpoint=...)``.

    Args:
        policy: As ``transform`` takes it; sites of kind ``step`` see the gradient that the optimizer uses. Or
            ``"diagnose"``: record what the judge needs, and change nothing.
        compile: Compile with Inductor; a mapping has arguments for ``model.compile``. False runs op by op. None: yes,
            but not for ``"diagnose"``, which then trains to the same bits as without it.
        monitor: Where records go; a new one if None. It is ``callback.monitor``.
        records: Patterns (``fnmatch``) of the records that are logged (``record/site``) instead of the four figures.
        folder: Where the files are written; True is ``output_dir``, False writes none.
        max_consecutive_skips: See ``guard``.
        update_ratios: See ``guard``.
        audit: Audit the first training step, before it runs (``gr.audit``): one line in the log, tables in the page.
            None: for ``"diagnose"``.
        **options: Further arguments of ``transform`` (``fullgraph``, ``dynamic``, ``methods``, ``regions``,
            ``loss_scale``).

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
        max_consecutive_skips: int = 50,
        update_ratios: bool = False,
        audit: bool | None = None,
        **options: Any,
    ) -> None:
        self._resumed = ""  # the file of states that was not there
        of_guards = {"max_consecutive_skips": max_consecutive_skips, "update_ratios": update_ratios}
        settings = Settings(policy, compile, records, folder, options, of_guards, audit)
        self._attachment = Attachment(settings, monitor)
        self._trainer: Trainer | None = None  # whose training step is watched
        self._was_told_of_batches = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Rewrite the model and guard the optimizer."""
        model: nn.Module = kwargs["model"]
        if args.torch_compile:
            raise ValueError(
                "TrainingArguments(torch_compile=True) compiles the model around its policy; leave that to "
                "RewriteCallback(policy, compile=True), which is the default"
            )
        prepared = kwargs["optimizer"]
        _check_trainer(getattr(prepared, "accelerator_state", None), "RewriteCallback")
        scaler, is_resumed = getattr(prepared, "scaler", None), state.global_step > 0
        self._attachment.attach(model, [prepared], scaler, args.output_dir, is_resumed=is_resumed)
        self._watch(_calling_trainer())
        self._resumed, self._was_told_of_batches = "", False
        if state.global_step:
            self._resume(args)
        if not _put_first(self):
            warn("RewriteCallback: records are not among the Trainer's logs, for its list of callbacks was not found")

    def _watch(self, trainer: Trainer | None) -> None:
        """Watch the training steps for losses and errors; None: stop."""
        if self._trainer is not None and isinstance(watched := vars(self._trainer).get("training_step"), _WatchedStep):
            del self._trainer.training_step
            if watched.is_own:
                self._trainer.training_step = watched.plain
        self._trainer = trainer
        if trainer is not None:
            step, is_own = trainer.training_step, "training_step" in vars(trainer)
            trainer.training_step = _WatchedStep(step, self, is_own)

    def _is_mapping(self, batch: _StepBatch) -> bool:
        """Return whether a step can be run again; warn once if not."""
        if isinstance(batch.inputs, Mapping):
            return True
        if not self._was_told_of_batches:
            self._was_told_of_batches = True
            warn(
                f"RewriteCallback: {_no_mappings(batch.inputs)}, and no step is audited or run again to explain it; a "
                "mapping of keyword arguments is needed for that"
            )
        return False

    def _audit(self, batch: _StepBatch) -> None:
        if self._attachment.awaits_audit and self._trainer is not None and self._is_mapping(batch):
            with kept_generators(), kept_attributes(self._trainer), told("the first step could not be audited"):
                step, given, _ = batch.of(self._trainer)
                self._attachment.audit(step, given)

    def _note_step(self, loss: torch.Tensor, batch: _StepBatch) -> None:
        trainer = self._trainer
        assert trainer is not None
        self._attachment.add_loss(loss * trainer.current_gradient_accumulation_steps)
        if loss.device.type == "cpu" or trainer.args.logging_nan_inf_filter:  # else nothing waits for the device
            if self._attachment.is_first_bad(bool(loss.isfinite())):
                with kept_generators(), kept_attributes(trainer), told(UNEXPLAINED):
                    self._attachment.explain_first(partial(batch.of, trainer) if self._is_mapping(batch) else None)

    def _fail(self, error: BaseException, batch: _StepBatch) -> None:
        if isinstance(error, NonFiniteError) and self._trainer is not None and self._is_mapping(batch):
            with kept_generators(), kept_attributes(self._trainer), told(UNEXPLAINED):
                self._attachment.explain(error, *batch.of(self._trainer))  # which it stays, if that fails
        self._watch(None)
        self._attachment.end(error)

    def _resume(self, args: TrainingArguments) -> None:
        checkpoint = _checkpoint_in_use()
        file = None if checkpoint is None else _state_file(args, checkpoint)
        if file is not None and file.exists():
            self._attachment.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        else:
            self._resumed = "a checkpoint whose folder is known" if file is None else str(file)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the loss; say once that the Trainer clips as well, and that states of a resumed training began anew."""
        self._attachment.log_loss()
        if self._resumed and self._attachment.has_states:
            warn(
                f"RewriteCallback: training was resumed without {self._resumed}, so that what the actions remember "
                "began anew; give the state that was saved to callback.load_state_dict before the training"
            )
            self._resumed = ""
        self._attachment.clip = args.max_grad_norm or math.nan
        self._attachment.note_own_clipping(f"TrainingArguments(max_grad_norm={args.max_grad_norm})", args.max_grad_norm)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the loss of a recorded micro-batch."""
        self._attachment.log_loss()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the state of the actions beside the checkpoint."""
        file = _state_file(args, Path(args.output_dir, f"checkpoint-{state.global_step}"))
        if self._attachment.has_states and file.parent.is_dir():
            torch.save(self._attachment.state_dict(), file)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the figures to the logs of a training step."""
        if logs is None or "loss" not in logs:
            return
        if self._trainer is None:
            self._attachment.add_loss(logs["loss"])
            self._attachment.log_loss()
        figures = self._attachment.figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the page, and make model and optimizer plain again."""
        self._watch(None)
        self._attachment.end()


@dataclass(frozen=True)
class _WatchedStep:
    """The training step of a Trainer, with its loss and errors noted."""

    plain: Callable[..., torch.Tensor]
    callback: RewriteCallback
    is_own: bool  # it was set on the Trainer itself before

    def __call__(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        items = args[0] if args else kwargs.get(_ITEMS)
        own = dict(inputs) if isinstance(inputs, Mapping) else inputs
        batch = _StepBatch(own, items, self.callback._attachment.random_state())
        self.callback._audit(batch)
        try:
            loss = self.plain(model, inputs, *args, **kwargs)
        except BaseException as err:
            self.callback._fail(err, batch)
            raise
        self.callback._note_step(loss, batch)
        return loss


@dataclass(frozen=True)
class _StepBatch:
    """The inputs of a training step, for another run of it."""

    inputs: Any  # a mapping where the step can be run again
    items: Any  # number of labels
    random: RandomState  # before the step

    def of(self, trainer: Trainer) -> tuple[TrainingStep, Mapping[str, Any], RandomState]:
        """Return the step of a Trainer, its batch and its random state."""
        inputs = trainer._prepare_inputs(dict(self.inputs))
        batch = inputs if self.items is None else {**inputs, _ITEMS: self.items}
        return TrainingStep(compute_loss=_loss_of(trainer)), batch, self.random


def _state_file(args: TrainingArguments, checkpoint: Path) -> Path:
    number = f"_{args.process_index}" if args.world_size > 1 else ""
    return checkpoint / f"gradrewrite_state{number}.pt"


def _checkpoint_in_use() -> Path | None:
    """Return the checkpoint folder of the calling Trainer; no callback is told of it."""
    frame: FrameType | None = _calling_handler()
    while frame is not None and "resume_from_checkpoint" not in frame.f_locals:
        frame = frame.f_back
    found = None if frame is None else frame.f_locals["resume_from_checkpoint"]
    return Path(found) if isinstance(found, str | PathLike) else None


def _calling_handler() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back
    return frame


def _calling_trainer() -> Trainer | None:
    frame = _calling_handler()
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def _put_first(callback: RewriteCallback) -> bool:
    """Move the callback before the Trainer's callbacks for logs, if the list is found; return whether it is.

    The Trainer puts those that write logs first. The list is that of the ``CallbackHandler`` which is calling. Those
    that it has still to call stay where they are.
    """
    frame = _calling_handler()
    callbacks = frame.f_locals["self"].callbacks if frame is not None else []
    if callback not in callbacks:
        return False
    callbacks.remove(callback)
    callbacks.insert(0, callback)
    return True


def _check_trainer(accelerator: Any, caller: str) -> None:
    """Raise TypeError where DeepSpeed or FSDP1 runs the backward and the optimizer."""
    kind = "" if accelerator is None else str(accelerator.distributed_type).rpartition(".")[2]
    if kind == "DEEPSPEED" or (kind == "FSDP" and not accelerator.is_fsdp2):
        trainer = "DeepSpeed" if kind == "DEEPSPEED" else "FSDP1"
        raise TypeError(
            f"{caller}: {trainer} has parameters and a backward of its own, where a policy does not hold. Train "
            "with DistributedDataParallel, or with FSDP2 (fsdp_version=2)"
        )
