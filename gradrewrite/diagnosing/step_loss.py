"""The loss of a batch, as ``diagnose`` is given it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradrewrite.backends.traced_step import ComputeLoss, TrainingStep, arguments_of, own_batch
from gradrewrite.diagnostics.constant_answers import Targets
from gradrewrite.errors import TraceError

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class StepLoss:
    """The loss of a batch, in one of three forms."""

    loss: Loss | None
    compute_loss: ComputeLoss | None

    @property
    def step(self) -> TrainingStep | None:
        """Model and loss as one function; None if the model returns its loss."""
        given = self.loss, self.compute_loss
        return None if given == (None, None) else TrainingStep(*given)

    def __call__(self, model: nn.Module, batch: Any, targets: Targets) -> Tensor:
        """Call the model, and compute the loss beside its graph."""
        args, kwargs = arguments_of(model, batch, has_loss=self.loss is not None)
        if self.compute_loss is not None:
            return self.checked(self.compute_loss(model, *args, **kwargs))
        output = model(*args, **kwargs)
        value = output if isinstance(output, Tensor) else getattr(output, "loss", output)
        if self.loss is not None:
            with targets:
                value = self.loss(output, own_batch(batch))
        return self.checked(value)

    def checked(self, value: Any) -> Tensor:
        """Return a loss as a number; TypeError or TraceError if it is none."""
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            way_out = "give loss=, a function (output, batch) -> scalar"
            if self.compute_loss is not None:
                way_out = "compute_loss is a function (model, *args, **kwargs) -> scalar"
            raise TypeError(f"gr.diagnose: the loss is a tensor with one element, got {got}; {way_out}")
        if not value.requires_grad:
            raise TraceError("gr.diagnose: the loss depends on no parameter that needs a gradient", code="no-backward")
        return value.reshape(())
