"""``train_step``: forward, backward, policy and update as one graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import optimizers
from gradrewrite.backends.backend import Backend
from gradrewrite.backends.compilation import GraphCompilation
from gradrewrite.backends.engines import AotEager, Engine, Inductor, Runnable
from gradrewrite.backends.entry_point import EntryPoint
from gradrewrite.backends.model_state import ModelState, state_of
from gradrewrite.backends.session import Session
from gradrewrite.errors import TraceError
from gradrewrite.instrumentation.module_names import STEP
from gradrewrite.optimizer.guard import Guard, guard
from gradrewrite.optimizer.step_sites import GUARD
from gradrewrite.policy.sampling import Measured
from gradrewrite.training.joined_graph import join_graphs
from gradrewrite.training.losses import losses_among, loss_of
from gradrewrite.training.update_trace import check_traceable, prepare_state
from gradrewrite.training.whole_step import StateMissing, Training, WholeStep


@dataclass(frozen=True)
class _TrainingEngine:
    """An engine for graphs of whole steps."""

    engine: Engine
    training: Training

    @property
    def name(self) -> str:
        """See ``Engine``."""
        return self.engine.name

    @property
    def draws_from_seeds(self) -> bool:
        """See ``Engine``."""
        return self.engine.draws_from_seeds

    @property
    def overwrites_outputs(self) -> bool:
        """See ``Engine``."""
        return self.engine.overwrites_outputs

    @property
    def settings(self) -> Mapping[str, Any]:
        """See ``Engine``."""
        return self.engine.settings

    def cache_folder(self) -> str:
        """See ``Engine``; AOTAutograd's cache knows nothing of an update."""
        return ""

    def configured(self, mode: str | None, options: Mapping[str, Any] | None) -> Engine:
        """See ``Engine``."""
        return _TrainingEngine(self.engine.configured(mode, options), self.training)

    def compile_plain(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """See ``Engine``; a step without a gradient is refused."""
        raise TraceError("gr.train_step: nothing here needs a gradient", code="no-backward")

    def compile_rewritten(self, gm: fx.GraphModule, inputs: Sequence[Any], hooks: Any) -> Runnable:
        """See ``Engine``."""
        assert isinstance(hooks, GraphCompilation)
        losses = losses_among(gm, hooks)
        joined = join_graphs(self.engine, gm, inputs, hooks, losses)
        return WholeStep(self.training, self.engine, hooks, joined)

    def compile_step(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """See ``Engine``."""
        return self.engine.compile_step(gm, inputs)

    def compile_training_step(self, gm: fx.GraphModule, num_results: int, static: Sequence[int]) -> Runnable:
        """See ``Engine``."""
        return self.engine.compile_training_step(gm, num_results, static)

    def compile_body(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """See ``Engine``."""
        return self.engine.compile_body(gm, inputs)


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    *,
    compute_loss: Callable[..., Any] | None = None,
    compile: bool = True,
    **torch_compile_kwargs: Any,
) -> TrainStep:
    """Make one graph of forward, backward, policy and update."""
    return TrainStep(model, optimizer, compute_loss, compile=compile, options=torch_compile_kwargs)


class TrainStep:
    """A training step as one graph; made by ``train_step``."""

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        compute_loss: Callable[..., Any] | None,
        *,
        compile: bool,
        options: Mapping[str, Any],
    ) -> None:
        state = state_of(model)
        if state is None:
            raise TypeError("gr.train_step takes what gr.transform returned")
        self._model, self._state, self._compute_loss = model, state, compute_loss
        inner = optimizers.inside_of(optimizer)
        check_traceable(inner)
        if GUARD not in inner.__dict__:
            guard(optimizer, model)
        watching = inner.__dict__[GUARD]
        assert isinstance(watching, Guard)
        self._training = Training(inner, watching)
        self._options = options
        self._engine: Engine = Inductor() if compile else AotEager()
        self._session: Session | None = None
        self._in_two_phases: EntryPoint | None = None  # None where a call of the model is

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train for one step; return what the model returns, detached."""
        return self._call(args, kwargs, accumulates=False)

    def accumulate(self, *args: Any, **kwargs: Any) -> Any:
        """Add the gradients of a micro-batch to those of the next step."""
        return self._call(args, kwargs, accumulates=True)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, accumulates: bool) -> Any:
        training = self._training
        training.accumulates = accumulates
        entry = self._entry()
        self._take_gradients()
        if not accumulates and not prepare_state(training.optimizer, [False] * len(training.parameters)):
            return self._run_two_phases(args, kwargs)
        try:
            with torch.enable_grad():
                result = entry(args, kwargs)
        except StateMissing:
            return self._run_two_phases(args, kwargs)
        session = self._session
        assert session is not None
        session.rules.check()
        session.warnings.flush_warnings()
        return result

    def _take_gradients(self) -> None:
        sums = self._training.sums
        for n, parameter in enumerate(self._training.parameters):
            if parameter.grad is not None:
                sums[n] = parameter.grad if n not in sums else sums[n] + parameter.grad
                parameter.grad = None

    def _run_two_phases(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step as two phases do, op by op unless the model is compiled."""
        training, session = self._training, self._session
        assert session is not None
        parameters = training.parameters
        for n, total in training.sums.items():
            parameters[n].grad = total
        training.sums.clear()
        with torch.enable_grad():
            result = self._model(*args, **kwargs) if self._in_two_phases is None else self._in_two_phases(args, kwargs)
            loss = loss_of(result)
            scaler = None if session.config.loss_scale is None else session.config.loss_scale.scaler
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            training.optimizer.step()
        else:
            scaler.step(training.optimizer)
            scaler.update()
        training.optimizer.zero_grad()
        return _detached(result)

    def _entry(self) -> EntryPoint:
        """Return the compiled function around the model; another one after a change of the policy."""
        state = self._state
        if self._session is not state.session:
            self._session = state.session
            self._own = self._new_entry(state, _TrainingEngine(self._engine, self._training), self._options)
            if self._compute_loss is not None:
                self._in_two_phases = self._new_entry(state, AotEager(), {})
        return self._own

    def _new_entry(self, state: ModelState, engine: Engine, options: Mapping[str, Any]) -> EntryPoint:
        session, function = state.session, self._compute_loss

        @functools.cache
        def backend(measured: Measured) -> Backend:
            return Backend(session, engine, state.monitor, measured=measured)

        silent = Backend(session, engine, state.monitor, is_silent=True)
        given = session, backend, silent, state.original, options
        if function is None:
            return EntryPoint(*given)
        session.inputs.add(STEP, functools.partial(function, state.original))
        return EntryPoint(*given, STEP, function=function)


def _detached(value: Any) -> Any:
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda t: t.detach(), value)
