"""The compiled graph of a whole step, with its inputs behind those of the model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from gradrewrite._compat import autograd, fake_tensors, optimizers
from gradrewrite.backends.engines import Engine
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.optimizer.step_plan import StepPlan
from gradrewrite.optimizer.update import GuardedUpdate
from gradrewrite.rewriting.config import RewriteConfig
from gradrewrite.training.hyperparameters import is_of_torch, numbers_of
from gradrewrite.training.joined_graph import JoinedGraph
from gradrewrite.training.prepared_state import prepare_state
from gradrewrite.training.training import StateMissing, Training
from gradrewrite.training.update_trace import UpdateGraph, trace_update
from gradrewrite.training.whole_graph import Place, Scaling, UpdateParts, WholeGraph, WholeGraphBuilder


class _Numbers:
    """The hyperparameters that a compiled update reads at each call, as one tensor."""

    def __init__(self, update: UpdateGraph, optimizer: torch.optim.Optimizer) -> None:
        self._update, self._is_of_torch = update, is_of_torch(optimizer)
        self.tensor = torch.zeros(len(update.numbers), dtype=torch.float64, device=update.device)
        self._groups: list[list[Any]] = []  # of the optimizer, as they were read
        self._given: list[tuple[int, Tensor]] = []  # those that are tensors of the user's

    def follow(self, optimizer: torch.optim.Optimizer) -> bool:
        """Read the present values; False if another graph is needed."""
        groups = [list(group.values()) for group in optimizer.param_groups]
        if groups != self._groups or not self._is_of_torch:
            if not self._update.fits(optimizer):
                return False
            self._groups = groups
            values = numbers_of(optimizer, self._update.numbers)
            self._given = [(n, value) for n, value in enumerate(values) if isinstance(value, Tensor)]
            plain = [0.0 if isinstance(value, Tensor) else float(value) for value in values]
            self.tensor.copy_(torch.tensor(plain, dtype=torch.float64), non_blocking=True)
        for n, value in self._given:
            self.tensor[n].copy_(value.detach().reshape(()), non_blocking=True)
        return True


@dataclass(eq=False)
class CompiledStep:
    """A compiled graph and its inputs beside those of the model."""

    graph: WholeGraph
    code: Callable[[list[Any]], Any]
    plan: StepPlan
    keeps_versions: bool  # whether its code tells autograd what it writes
    numbers: _Numbers | None = None  # None without an update
    _live: list[Tensor] = field(default_factory=list)
    _states: list[Any] | None = None  # of the optimizer, for which the live inputs were read

    def follow(self, optimizer: torch.optim.Optimizer) -> bool:
        """Read the hyperparameters; False if another graph is needed."""
        return self.numbers is None or self.numbers.follow(optimizer)

    def begin(self, update: GuardedUpdate, training: Training) -> list[Tensor]:
        """Prepare an update; return the verdict and the losses of earlier micro-batches, if there are any."""
        if training.accumulates:
            return []
        earlier = update.begin_in_graph(training.optimizer, self.plan), training.losses
        training.losses, training.num_losses = None, 0
        return [one for one in earlier if one is not None]

    def live(self, training: Training) -> list[Tensor]:
        """Return the live inputs as they are now; StateMissing if the optimizer's state is gone."""
        states = list(training.optimizer.state.values())
        known = self._states
        if known is None or len(states) != len(known) or not all(map(operator.is_, states, known)):
            self._states = states
            self._live = [self._read(one, training) for one in self.graph.live]
        return self._live

    def _read(self, live: Tensor | Place, training: Training) -> Tensor:
        if isinstance(live, Tensor):
            return live
        state = training.optimizer.state.get(training.parameters[live.parameter], {})
        if live.key not in state:
            raise StateMissing
        return cast(Tensor, state[live.key])

    def run(self, args: list[Any], written: Sequence[Tensor]) -> list[Any]:
        """Run the code without gradients; the caller counts versions of written tensors."""
        with autograd.no_gradients():
            if not self.keeps_versions:
                return list(self.code(args))
            with autograd.versions_kept(tuple(written)):
                return list(self.code(args))


def compile_step(
    engine: Engine,
    joined: JoinedGraph,
    outputs: BackwardOutputs,
    training: Training,
    update: GuardedUpdate,
    inputs: Mapping[int, int],
    config: RewriteConfig,
) -> CompiledStep:
    """Compile a joined graph with the accumulation or update behind it.

    ``outputs`` are its auxiliary outputs, ``inputs`` the positions of parameters among its inputs, by their positions
    in the optimizer. StateMissing where the first update itself makes the optimizer's state.
    """
    has_verdict = not training.accumulates and update.has_verdict
    has_losses = not training.accumulates and training.losses is not None
    parts = UpdateParts(inputs, training.parameters, dict(training.sums), has_verdict, has_losses, outputs)
    builder = WholeGraphBuilder(joined, parts)
    gradients = builder.gradients()
    builder.judge_backward()
    plan, numbers = StepPlan(), None
    returned: list[int] = []
    if training.accumulates:
        returned = builder.accumulate(gradients)
    else:
        has_gradient = [n in gradients for n in range(len(training.parameters))]
        with fake_tensors.outside_of_transforms():
            has_state = prepare_state(training.optimizer, has_gradient)
        if not has_state:
            raise StateMissing
        plan = update.plan(training.optimizer, has_gradient)
        numbers = _insert_update(builder, training, plan, gradients, _scaling(config, training))
    graph = builder.finish(returned, gradients)
    code = engine.compile_training_step(graph.gm, graph.num_outputs, graph.static)
    return CompiledStep(graph, code, plan, engine.name != "inductor", numbers)


def _insert_update(
    builder: WholeGraphBuilder,
    training: Training,
    plan: StepPlan,
    gradients: dict[int, Any],
    scaling: Scaling | None,
) -> _Numbers:
    """Insert the actions at step sites and the update; return the hyperparameters that it reads."""
    optimizer, parameters = training.optimizer, training.parameters
    if scaling is not None:
        builder.unscale(gradients, scaling)
    builder.run_step(plan, gradients)
    forms = [value_of(gradients[n]) if n in gradients else None for n in range(len(parameters))]
    with fake_tensors.outside_of_transforms():
        update = trace_update(optimizer, forms)
        numbers = _Numbers(update, optimizer)

    def state(n: int, key: str) -> Tensor:
        return cast(Tensor, optimizer.state[parameters[n]][key])

    builder.update(update, gradients, numbers.tensor if update.numbers else None, state)
    builder.scale_parameters(plan)
    if plan.change is not None:
        builder.change(plan.change, gradients, state)
    if plan.group is not None:
        builder.agree(plan.group)
    builder.let_skip()
    if plan.ratios:
        builder.measure_ratios([n for n, _ in plan.ratios])
    return numbers


def _scaling(config: RewriteConfig, training: Training) -> Scaling | None:
    scale = config.loss_scale
    if scale is None:
        return None
    device, scaler = training.parameters[0].device, scale.scaler
    if scaler is None:
        return Scaling(scale.on(device))
    with fake_tensors.outside_of_transforms():
        scale_now, tracker = optimizers.scaling_of(scaler, device)
    return Scaling(scale_now, tracker, *optimizers.settings_of(scaler))
