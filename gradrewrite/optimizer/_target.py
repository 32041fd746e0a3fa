"""Targets of a guard: the model, backend or monitor behind its policy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from gradrewrite._compat import fake_tensors
from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite.backends.engines import Engine
from gradrewrite.backends.session import STATE, Session, attached_state
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.monitoring.guards import Seat
from gradrewrite.monitoring.monitor import Monitor
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.policy.rules import Answered, ask_in_order
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.rewriting.action_tracing import check_dense
from gradrewrite.sites import Site


class Target:
    """A monitor, its policy and parameters, read anew at each use, for ``compile`` makes a new session."""

    def __init__(self, given: Any) -> None:
        """Take a rewritten model, a backend or a bare monitor; a model is held weakly: its recorder holds the guard."""
        state = attached_state(given)
        self._model = None if state is None else weakref.ref(given)
        self._given = given if state is None else None
        self._monitor: Monitor = given if isinstance(given, Monitor) else (state or given).monitor

    @property
    def _state(self) -> Any:
        return self._given if self._model is None else attached_state(self._model())

    @property
    def monitor(self) -> Monitor:
        """That of the present policy; that of the last one where the model was restored."""
        self._monitor = getattr(self._state, "monitor", self._monitor)
        return self._monitor

    @property
    def session(self) -> Session | None:
        """The policy at work; None for a bare monitor, and where the model is gone."""
        given = self._given if self._model is None else getattr(self._model(), STATE, None)
        found: Session | None = getattr(given, "session", None)
        return found

    @property
    def engine(self) -> Engine | None:
        """The engine of its graphs; None without a session."""
        return cast("Engine | None", getattr(self._state, "engine", None))

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the parameters by name; of a backend those that it has met."""
        state = self._state
        if self._model is not None:
            return {} if state is None else dict(state.original.named_parameters())
        return {} if isinstance(state, Monitor) else state.session.names.known_parameters()

    def ask(self, number: int, site: Site, tensor: Tensor, call: int = 0) -> tuple[Answered, ...]:
        """Return the policy's answers at the site of a tensor.

        ``number`` is that of the target; ``call`` numbers the site in errors, for several models with one of the name.

        PolicyError for an answer that is not allowed, UnsupportedGradientError for an action at a sparse tensor.
        """
        session = self.session
        if session is None:
            return ()
        answers = ask_in_order(session.config.policy, site, (number,))
        site = replace(site, call=call)
        is_subclass = fake_tensors.is_wrapper(tensor) and not is_dtensor(tensor)
        for answered in answers:
            check_dense(answered.action, site, tensor)
            if is_subclass:
                refuse(answered.insertion, Context(site, tensor_type=type(tensor).__name__))
        session.note_step_answers(answers)
        return answers


@dataclass(slots=True)
class Attachment:
    """The place of a guard at one recorder."""

    recorder: StepRecorder
    seat: Seat  # its numbers there
    last_step: int  # step that took records of its updates last
    _previous_step: int = -1  # the same, before the update at hand

    def move_up(self, guard: Any) -> None:
        """Take the first free seat for the guard."""
        self.seat = self.recorder.guards.move_up(guard)

    def begin(self) -> None:
        """Begin an update: its reports belong to the step that took none of the one before."""
        self._previous_step = self.last_step

    def collect_first(
        self, outputs: BackwardOutputs, tensors: Sequence[Tensor], is_due: Callable[[int], bool], number: int
    ) -> None:
        """Record the report of an update by its number, if there is one, before the update is made."""
        self.begin()
        if outputs.packs or outputs.kept:
            self.last_step = self.recorder.collect_update(outputs, tensors, self.last_step, is_due, number)

    def collect_again(self, outputs: BackwardOutputs, tensors: Sequence[Tensor], number: int) -> None:
        """Record a further report of the same update."""
        self.last_step = self.recorder.collect_update(outputs, tensors, self._previous_step, lambda _: True, number)


def targets_of(model: Any) -> tuple[Target, ...]:
    """Return the targets for the argument of ``gr.guard``: one or a sequence; TypeError for anything else."""
    if isinstance(model, Sequence) and not isinstance(model, str | nn.Module):
        if not model:
            raise TypeError("gr.guard(optimizer, models): the sequence is empty; give what gr.transform returned")
        return tuple(target for item in model for target in targets_of(item))
    is_backend = not isinstance(model, nn.Module) and isinstance(getattr(model, "session", None), Session)
    if is_backend or isinstance(model, Monitor) or attached_state(model) is not None:
        return (Target(model),)
    raise TypeError(
        f"gr.guard(optimizer, model): {type(model).__name__} has no monitor; give what gr.transform or gr.backend "
        "returned"
    )
