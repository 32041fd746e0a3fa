"""``RewriteCallback`` for the Trainer of transformers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from gradrewrite._utils.warnings import warn
from gradrewrite.integrations._attachment import Attachment
from gradrewrite.monitoring.monitor import Monitor
from gradrewrite.policy.actions import Policy


class RewriteCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Train with a policy in ``transformers.Trainer``.

    When training begins the model is rewritten in place and the optimizer guarded, with the GradScaler as loss scale if
    there is one; when it ends both are plain again. Whenever the Trainer logs, the latest records are among its logs
    (``record/site``), so that TensorBoard, wandb and the progress bar have them. What the actions remember
    (``gr.State``, ``AutoClip``, schedules) is saved in the folder of each checkpoint, and is there again when training
    resumes from that: ``trainer.train(resume_from_checkpoint=...)``.

    Args:
        policy: As ``transform`` takes it; sites of kind ``step`` see the gradient that the optimizer uses.
        compile: Compile with Inductor; a mapping has arguments for ``model.compile``. False runs op by op.
        monitor: Where records go; a new one if None. It is ``callback.monitor``.
        records: Patterns (``fnmatch``) of the records that are logged.
        max_consecutive_skips: See ``guard``.
        update_ratios: See ``guard``.
        **options: Further arguments of ``transform`` (``fullgraph``, ``dynamic``, ``methods``, ``regions``,
            ``loss_scale``).

    Example:
        >>> import gradrewrite as gr
        >>> from gradrewrite.passes import ClipByGlobalNorm
        >>> callback = RewriteCallback(gr.on("step:*", ClipByGlobalNorm(1.0)))
        >>> callback.monitor.latest()
        {}
    """

    def __init__(
        self,
        policy: Policy,
        *,
        compile: bool | Mapping[str, Any] = True,
        monitor: Monitor | None = None,
        records: str | Sequence[str] = "*",
        max_consecutive_skips: int = 50,
        update_ratios: bool = False,
        **options: Any,
    ) -> None:
        self._resumed = ""  # the file of states that was not there
        of_guards = {"max_consecutive_skips": max_consecutive_skips, "update_ratios": update_ratios}
        self._attachment = Attachment(policy, compile, monitor, records, options, **of_guards)

    @property
    def monitor(self) -> Monitor:
        """The monitor, with the records of the backward passes."""
        return self._attachment.monitor

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
        _check_trainer(getattr(prepared, "accelerator_state", None))
        self._attachment.attach(model, [prepared], getattr(prepared, "scaler", None))
        self._resumed = ""
        if state.global_step:
            self._resume(args)
        if not _put_first(self):
            warn("RewriteCallback: records are not among the Trainer's logs, for its list of callbacks was not found")

    def _resume(self, args: TrainingArguments) -> None:
        checkpoint = _checkpoint_in_use()
        file = None if checkpoint is None else _state_file(args, checkpoint)
        if file is not None and file.exists():
            self._attachment.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        else:
            self._resumed = "a checkpoint whose folder is known" if file is None else str(file)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say once that the Trainer clips as well, and that states began anew in a training that was resumed."""
        if self._resumed and self._attachment.has_states:
            warn(
                f"RewriteCallback: training was resumed without {self._resumed}, so that what the actions remember "
                "began anew; give the state that was saved to callback.load_state_dict before the training"
            )
            self._resumed = ""
        self._attachment.note_own_clipping(f"TrainingArguments(max_grad_norm={args.max_grad_norm})", args.max_grad_norm)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the state of the actions beside the checkpoint."""
        file = _state_file(args, Path(args.output_dir, f"checkpoint-{state.global_step}"))
        if self._attachment.has_states and file.parent.is_dir():
            torch.save(self._attachment.state_dict(), file)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model's actions, or the last; see ``gr.state_dict``."""
        return self._attachment.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into the trained model, or into the next one."""
        self._attachment.load_state_dict(state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the latest records to the logs of a training step."""
        if logs is None or "loss" not in logs:
            return
        figures = self._attachment.figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make model and optimizer plain again."""
        self._attachment.detach()


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


def _check_trainer(accelerator: Any) -> None:
    """Raise TypeError where DeepSpeed or FSDP1 runs the backward and the optimizer."""
    kind = "" if accelerator is None else str(accelerator.distributed_type).rpartition(".")[2]
    if kind == "DEEPSPEED" or (kind == "FSDP" and not accelerator.is_fsdp2):
        trainer = "DeepSpeed" if kind == "DEEPSPEED" else "FSDP1"
        raise TypeError(
            f"RewriteCallback: {trainer} has parameters and a backward of its own, where a policy does not hold. Train "
            "with DistributedDataParallel, or with FSDP2 (fsdp_version=2)"
        )
