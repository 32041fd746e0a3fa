"""``RewriteCallback`` for the Trainer of Lightning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from gradrewrite.integrations._attachment import Attachment
from gradrewrite.module import refuse_trainers
from gradrewrite.monitoring.monitor import Monitor
from gradrewrite.policy.actions import Policy


class RewriteCallback(Callback):  # type: ignore[misc]  # the checker skips Lightning
    """Train with a policy in Lightning's ``Trainer``.

    When fitting begins the LightningModule is rewritten in place and its optimizers guarded, with the GradScaler of the
    precision plugin as loss scale if there is one; when it ends, or fails, both are plain again. Every
    ``log_every_n_steps`` steps the latest records are logged (``record/site``).

    What the actions remember (``gr.State``, ``AutoClip``, schedules) is part of the Trainer's checkpoints, and is there
    again after ``fit(..., ckpt_path=...)``.

    The policy holds where the LightningModule is called (``self(batch)`` in ``training_step``). One that calls its
    submodules there (``self.encoder(x)``) needs ``methods=("training_step",), fullgraph=False``: that traces
    ``training_step`` itself, in parts where it logs.

    Args:
        policy: As ``transform`` takes it; sites of kind ``step`` see the gradient that the optimizer uses.
        compile: Compile with Inductor; a mapping has arguments for ``model.compile``. False runs op by op.
        monitor: Where records go; a new one if None. It is ``callback.monitor``.
        records: Patterns (``fnmatch``) of the records that are logged.
        prog_bar: Whether they are in the progress bar too.
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
        prog_bar: bool = False,
        max_consecutive_skips: int = 50,
        update_ratios: bool = False,
        **options: Any,
    ) -> None:
        self._prog_bar = prog_bar
        of_guards = {"max_consecutive_skips": max_consecutive_skips, "update_ratios": update_ratios}
        self._attachment = Attachment(policy, compile, monitor, records, options, **of_guards)

    @property
    def monitor(self) -> Monitor:
        """The monitor, with the records of the backward passes."""
        return self._attachment.monitor

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the actions, for a checkpoint; see ``gr.state_dict``."""
        return self._attachment.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state from a checkpoint."""
        self._attachment.load_state_dict(state_dict)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rewrite the module and guard its optimizers."""
        assert trainer.model is not None
        refuse_trainers(trainer.model)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._attachment.attach(pl_module, trainer.optimizers, scaler)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the latest records."""
        bound = trainer.gradient_clip_val
        self._attachment.note_own_clipping(f"Trainer(gradient_clip_val={bound})", bound)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1  # the one that ends
        if trainer.log_every_n_steps and step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self._attachment.figures(), prog_bar=self._prog_bar)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make module and optimizers plain again."""
        self._attachment.detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Make module and optimizers plain again."""
        self._attachment.detach()
