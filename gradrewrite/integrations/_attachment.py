"""Attachment of a policy to a model and its optimizers, for the callbacks of all frameworks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from gradrewrite._utils.warnings import warn
from gradrewrite.backends.model_state import state_of
from gradrewrite.backends.state_dict import load_state_dict, state_dict
from gradrewrite.module import restore, transform
from gradrewrite.monitoring.monitor import Monitor, recorder_of, steps_since
from gradrewrite.monitoring.writers import ClipRates
from gradrewrite.optimizer.guard import guard, unguard
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.rules import ask, step_site

_CLIPS = (ClipByGlobalNorm, ClipByNorm, ClipByValue)


class Attachment:
    """A policy on a model and its optimizers while a framework trains; see the callbacks for the arguments."""

    def __init__(
        self,
        policy: Policy,
        compile: bool | Mapping[str, Any],
        monitor: Monitor | None,
        records: str | Sequence[str],
        options: Mapping[str, Any],
        **of_guards: Any,
    ) -> None:
        self.monitor = Monitor() if monitor is None else monitor
        self._policy, self._compile, self._options, self._of_guards = policy, compile, dict(options), of_guards
        self._patterns = (records,) if isinstance(records, str) else tuple(records)
        self._model: nn.Module | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._was_told_of_clipping = False
        self._num_logged = 0  # steps
        self._loaded: Mapping[str, Any] | None = None  # for the next model
        self._last: dict[str, Any] = {}  # of the last one

    def attach(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None
    ) -> None:
        """Detach the last model, rewrite this one in place, and guard the optimizers."""
        self.detach()
        left = state_of(model)
        if left is not None and left.is_temporary:  # by a training that failed
            restore(model)
            for optimizer in optimizers:
                unguard(optimizer)
        try:
            self._attach(model, optimizers, {"loss_scale": scaler, **self._options})
        except BaseException:
            self.detach()
            raise

    def _attach(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: Mapping[str, Any]
    ) -> None:
        rewritten = transform(model, self._policy, monitor=self.monitor, inplace=True, **options)
        self._model = model
        state = state_of(rewritten)
        assert state is not None
        state.is_temporary = True
        if self._loaded is not None:
            load_state_dict(rewritten, self._loaded)
            self._loaded = None
        if self._compile is not False:
            state.compile({} if self._compile is True else self._compile)
        for optimizer in optimizers:
            guard(optimizer, rewritten, **self._of_guards)
            self._optimizers.append(optimizer)

    def detach(self) -> None:
        """Let model and optimizers be plain again."""
        self._last = self.state_dict()
        for optimizer in self._optimizers:
            unguard(optimizer)
        if self._model is not None and state_of(self._model) is not None:
            restore(self._model)
        self._model, self._optimizers = None, []

    def state_dict(self) -> dict[str, Any]:
        """Return ``gr.state_dict`` of the model, or of the last one; empty before the first."""
        if self._loaded is not None:
            return dict(self._loaded)
        if state_of(self._model) is not None:
            return state_dict(self._model)
        return self._last

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into the current model, or else into the next."""
        if state_of(self._model) is not None:
            load_state_dict(self._model, state)
        elif state:
            self._loaded = state

    @property
    def has_states(self) -> bool:
        """Whether an action of the model has a state or follows a schedule."""
        state = state_of(self._model)
        return state is not None and state.config.states.is_used

    def figures(self) -> dict[str, float]:
        """Return the latest records under the tags of TensorBoard (``record/site``); waits for the device.

        And ``rate/site``, the share of the steps since the last call in which a clip acted.
        """
        rates = ClipRates()
        for step in steps_since(self.monitor, self._num_logged):
            rates.add(step)
        self._num_logged = recorder_of(self.monitor).num_steps
        latest = {key.replace("@", "/", 1): value for key, value in (self.monitor.latest() | rates.take()).items()}
        return {tag: value for tag, value in latest.items() if any(fnmatchcase(tag, p) for p in self._patterns)}

    def note_own_clipping(self, setting: str, bound: float | Tensor | None) -> None:
        """Warn once where the framework clips gradients as well; the policy's clips are known after the first step."""
        if self._was_told_of_clipping or not bound or self._model is None:
            return
        self._was_told_of_clipping = True
        state = state_of(self._model)
        graphs = state.session.graphs if state is not None else ()
        answers = [(edit.site, edit.action) for graph in graphs for edit in graph.edits]
        for name, parameter in self._model.named_parameters():
            site = step_site(name, parameter)
            answers += [(site, action) for action in ask(self._policy, site)]
        clips = [(site, action) for site, action in answers if isinstance(action, _CLIPS)]
        if clips:
            warn(
                f"{clips[0][0]}: {clips[0][1]!r} clips, and {setting} clips the gradients of all parameters as "
                "well. Leave one of the two"
            )
