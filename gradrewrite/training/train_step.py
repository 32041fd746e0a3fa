"""``train_step``: forward, backward, policy and update as one graph."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from gradrewrite._compat import optimizers
from gradrewrite.backends.backend import Backend
from gradrewrite.backends.compilation import GraphCompilation
from gradrewrite.backends.engines import AotEager, Engine, Inductor, Runnable
from gradrewrite.backends.entry_point import EntryPoint
from gradrewrite.backends.model_state import ModelState, state_of
from gradrewrite.backends.session import Session
from gradrewrite.instrumentation.module_names import STEP
from gradrewrite.optimizer.guard import Guard, guard
from gradrewrite.optimizer.step_sites import GUARD
from gradrewrite.policy.sampling import Measured
from gradrewrite.rewriting.loss_scale import LossScale
from gradrewrite.training.joined_graph import join_graphs
from gradrewrite.training.losses import loss_of
from gradrewrite.training.prepared_state import prepare_state
from gradrewrite.training.step_refusals import check_graph, check_inputs, check_model, nothing_to_train
from gradrewrite.training.training import StateMissing, Training
from gradrewrite.training.update_trace import check_traceable
from gradrewrite.training.whole_step import WholeStep


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

        def run(*_: Any) -> Any:
            raise nothing_to_train()

        return run

    def compile_rewritten(self, gm: fx.GraphModule, inputs: Sequence[Any], hooks: Any) -> Runnable:
        """See ``Engine``."""
        assert isinstance(hooks, GraphCompilation)
        model = next(iter(hooks.session.names.roots))
        check_graph(hooks, model)
        check_inputs(hooks, inputs)
        joined = join_graphs(self.engine, gm, inputs, hooks)
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
    """Make a training step of one graph: forward, backward, policy, update.

    Its result is that of two phases, ``model(...)``, ``backward``, the guarded ``optimizer.step()`` and ``zero_grad``:
    equal op by op, to rounding under Inductor. Parameters, buffers and the optimizer's state are updated in place, so
    that ``state_dict()`` of both, schedulers, checkpoints and evaluation work as ever, and each step may be one of two
    phases. ``.grad`` stays None; a ``.grad`` that exists is added to, as by ``backward``.

    The update is the optimizer's own ``step``, traced. Learning rates, and other numbers of its param groups that its
    code accepts as tensors, are read at each call; another value of one that is not makes another graph. An optimizer
    that makes its state in its first step makes that step in two phases, op by op unless the model is compiled.

    A skipped step (``CheckFinite("skip")``, ``SkipSpikes``, a GradScaler's) leaves parameters, state, step counters and
    the buffers that the forward wrote bit-equal, inside the graph; nothing waits for the device. A check that raises
    leaves them so too.

    Args:
        model: What ``gr.transform`` returned.
        optimizer: An optimizer of its parameters; it is guarded (``gr.guard``) if it is not yet.
        compute_loss: A function of the model and the arguments of the step that returns the loss, or what has one. It
            is traced, and the policy acts in it. None where the model returns its loss.
        compile: Compile with Inductor; else the graph runs op by op.
        **torch_compile_kwargs: ``mode``, ``options`` and ``dynamic`` of ``torch.compile``.

    Returns:
        A callable that takes the arguments of the model (those of ``compute_loss`` behind the model) and returns what
        the model returns, detached.

    Raises:
        TypeError: ``model`` has no policy, ``optimizer`` is none, or ``compute_loss`` is no function.
        TraceError: (also from the first call) Two phases alone can make the step: regions, sharded parameters,
            DistributedDataParallel, graph breaks, hooks on parameters, an optimizer that cannot be traced. The message
            has the way out.

    Example:
        >>> import torch, gradrewrite as gr
        >>> from gradrewrite.passes import ClipByGlobalNorm
        >>> net = torch.nn.Linear(2, 1, bias=False)
        >>> model = gr.transform(net, gr.on("gradient:*", ClipByGlobalNorm(1.0)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> step = gr.train_step(model, optimizer, compute_loss=lambda model, x: model(x).sum(), compile=False)
        >>> before = net.weight.detach().clone()
        >>> loss = step(torch.tensor([[3.0, 4.0]]))
        >>> before - net.weight.detach()
        tensor([[0.6000, 0.8000]])
    """
    state = state_of(model)
    if state is None:
        raise TypeError(
            f"gr.train_step takes what gr.transform returned, got {type(model).__name__}; of a model in a wrapper give "
            "the one inside, and for no policy gr.transform(model, [])"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"gr.train_step takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if compute_loss is not None and not callable(compute_loss):
        raise TypeError(f"compute_loss is a function (model, *args) -> loss, got {type(compute_loss).__name__}")
    unknown = torch_compile_kwargs.keys() - {"mode", "options", "dynamic"}
    if unknown:
        raise TypeError(
            f"gr.train_step takes mode, options and dynamic of torch.compile, got {', '.join(sorted(unknown))}"
        )
    engine: Engine = Inductor() if compile else AotEager()
    engine.configured(torch_compile_kwargs.get("mode"), torch_compile_kwargs.get("options"))
    check_model(state)
    return TrainStep(model, state, optimizer, compute_loss, engine, torch_compile_kwargs)


class TrainStep:
    """A training step as one graph; made by ``train_step``."""

    def __init__(
        self,
        model: Any,
        state: ModelState,
        optimizer: torch.optim.Optimizer,
        compute_loss: Callable[..., Any] | None,
        engine: Engine,
        options: Mapping[str, Any],
    ) -> None:
        self._model, self._state, self._compute_loss = model, state, compute_loss
        inner = optimizers.inside_of(optimizer)
        check_traceable(inner)
        if GUARD not in inner.__dict__:
            guard(optimizer, model)
        watching = inner.__dict__[GUARD]
        assert isinstance(watching, Guard)
        self._training = Training(inner, watching, sums=watching.accumulated)
        self._engine, self._options = engine, options
        self._session: Session | None = None
        self._own: EntryPoint | None = None
        self._generation = -1  # of the model's compiled code, when the entry points were made
        self._in_two_phases: EntryPoint | None = None  # None where a call of the model is
        self._is_begun = False  # whether a graph has made an update
        self._num_graphs = -1  # of the session, when its rules were checked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train for one step; return what the model returns, detached.

        Raises:
            NonFiniteError: A check that raises failed; the update is left out.
            SpikeError: Too many updates in a row were skipped.
            TraceError: Two phases alone can make the step; see ``train_step``.
        """
        return self._call(args, kwargs, accumulates=False)

    def accumulate(self, *args: Any, **kwargs: Any) -> Any:
        """Add the gradients of a micro-batch to those of the next step.

        Returns:
            What the model returns, detached.
        """
        return self._call(args, kwargs, accumulates=True)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, accumulates: bool) -> Any:
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self._call(args, kwargs, accumulates=accumulates)
        training = self._training
        training.accumulates = accumulates
        entry = self._entry()
        training.take_gradients()
        if not self._is_begun and not accumulates and self._begins_in_two_phases():
            return self._run_two_phases(args, kwargs)
        try:
            result = entry.train(args, kwargs)
        except StateMissing:
            return self._run_two_phases(args, kwargs)
        self._is_begun |= not accumulates
        self._look_at_new_graphs()
        return result if isinstance(result, Tensor) and not result.requires_grad else _detached(result)

    def _begins_in_two_phases(self) -> bool:
        """Whether the first update itself makes the optimizer's state."""
        optimizer = self._training.optimizer
        if optimizer.state:
            return False
        trial = copy.copy(optimizer)
        trial.state = defaultdict(dict)
        return not prepare_state(trial, [p.requires_grad for p in self._training.parameters])

    def _look_at_new_graphs(self) -> None:
        """Check rules, and warn, after a compilation."""
        session = self._session
        assert session is not None
        if len(session.graphs) != self._num_graphs:
            self._num_graphs = len(session.graphs)
            session.rules.check()
            session.warnings.flush_warnings()

    def _run_two_phases(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step as two phases do, op by op unless the model is compiled."""
        training, session = self._training, self._session
        assert session is not None
        scale = session.config.loss_scale
        others = self._gradients_of_others()
        training.give_gradients()
        try:
            with torch.enable_grad():
                result = (
                    self._model(*args, **kwargs) if self._in_two_phases is None else self._in_two_phases(args, kwargs)
                )
                loss = loss_of(result)
                training.log_losses(loss.detach().clone())
                (loss if scale is None else scale.scaled(loss)).backward()
            self._update_in_two_phases(scale)
        finally:
            training.optimizer.zero_grad()
            for parameter, gradient in others:
                parameter.grad = gradient
        return _detached(result)

    def _update_in_two_phases(self, scale: LossScale | None) -> None:
        optimizer, scaler = self._training.optimizer, None if scale is None else scale.scaler
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
            return
        if scale is not None and scale.factor is not None:
            for gradient in [p.grad for p in self._training.parameters if p.grad is not None]:
                gradient.div_(scale.factor.to(gradient.device))
        optimizer.step()

    def _gradients_of_others(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the model's parameters outside of the optimizer, with their gradients."""
        own = set(map(id, self._training.parameters))
        return [(p, p.grad) for p in self._state.original.parameters() if id(p) not in own]

    def _entry(self) -> EntryPoint:
        """Return the compiled function around the model; another one after a change of policy or parameters."""
        state, generation = self._state, self._state.follow()
        if self._own is None or self._generation != generation or self._training.follow():
            self._is_begun, self._num_graphs, self._generation = False, -1, generation
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
    """Return what a model returned with its tensors detached, in containers and data classes too."""
    return value.detach() if isinstance(value, Tensor) else tree_map(_detached_leaf, value)


def _detached_leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if not is_dataclass(value) or isinstance(value, type):
        return value
    found = copy.copy(value)
    for one in fields(value):
        object.__setattr__(found, one.name, _detached(getattr(value, one.name)))
    return found
