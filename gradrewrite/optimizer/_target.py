"""Targets of a guard: the model, backend or monitor behind its policy."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from gradrewrite.backends.engines import Engine
from gradrewrite.backends.session import Session, attached_state
from gradrewrite.ir.record_layout import BackwardOutputs
from gradrewrite.monitoring.monitor import Monitor
from gradrewrite.monitoring.step_recorder import Seat, SkipGuard, StepRecorder


class Target(Protocol):
    """A policy and its parameters, read anew at each use, for ``compile`` makes a new session."""

    @property
    def monitor(self) -> Monitor:
        """The monitor of its records."""

    @property
    def session(self) -> Session | None:
        """The policy at work; None for a bare monitor, and where the model is gone."""

    @property
    def engine(self) -> Engine | None:
        """The engine of its graphs; None without a session."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the parameters by name."""


class _Model:
    """A rewritten model, held weakly: its recorder holds the guard."""

    def __init__(self, model: nn.Module, monitor: Monitor) -> None:
        self._model = weakref.ref(model)
        self._monitor = monitor

    @property
    def monitor(self) -> Monitor:
        """That of its present policy; that of the last one where it was restored."""
        state = attached_state(self._model())
        if state is not None:
            self._monitor = state.monitor
        return self._monitor

    @property
    def session(self) -> Session | None:
        state = attached_state(self._model())
        return None if state is None else state.session

    @property
    def engine(self) -> Engine | None:
        state = attached_state(self._model())
        return None if state is None else state.engine

    def parameters(self) -> Mapping[str, Tensor]:
        state = attached_state(self._model())
        return {} if state is None else dict(state.original.named_parameters())


class _OfBackend:
    """A backend, with the names of the parameters that it has met."""

    def __init__(self, session: Session, engine: Engine, monitor: Monitor) -> None:
        self.session, self.engine, self.monitor = session, engine, monitor

    def parameters(self) -> Mapping[str, Tensor]:
        return self.session.names.known_parameters()


class _OfMonitor:
    """A bare monitor: no names, no policy."""

    session = None
    engine = None

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor

    def parameters(self) -> Mapping[str, Tensor]:
        return {}


@dataclass(slots=True)
class Attachment:
    """The place of a guard at one recorder."""

    recorder: StepRecorder
    seat: Seat  # its numbers there
    last_step: int  # step that took records of its updates last

    def move_up(self, guard: SkipGuard) -> None:
        """Take the first free seat."""
        self.seat = self.recorder.move_up(guard)

    def collect_update(self, outputs: BackwardOutputs, tensors: Sequence[Tensor]) -> None:
        """Give the recorder the records of an update."""
        self.last_step = self.recorder.collect_update(outputs, tensors, self.last_step)


def targets_of(model: Any) -> tuple[Target, ...]:
    """Return the targets for the argument of ``gr.guard``: one or a sequence; TypeError for anything else."""
    if isinstance(model, Sequence) and not isinstance(model, str | nn.Module):
        if not model:
            raise TypeError("gr.guard(optimizer, models): the sequence is empty; give what gr.transform returned")
        return tuple(target for item in model for target in targets_of(item))
    if isinstance(model, Monitor):
        return (_OfMonitor(model),)
    state = attached_state(model)
    if state is not None:
        return (_Model(model, state.monitor),)
    if not isinstance(model, nn.Module) and isinstance(getattr(model, "session", None), Session):
        return (_OfBackend(model.session, model.engine, model.monitor),)
    raise TypeError(
        f"gr.guard(optimizer, model): {type(model).__name__} has no monitor; give what gr.transform or gr.backend "
        "returned"
    )
