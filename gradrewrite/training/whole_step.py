"""Whole steps at run time: inputs, results, records and the verdict of an update."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from gradrewrite._compat import autograd, dynamo_cache, fake_tensors, optimizers
from gradrewrite.backends.compilation import GraphCompilation
from gradrewrite.backends.engines import Engine
from gradrewrite.backends.runtime_wrapper import check_values
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.optimizer.guard import Guard
from gradrewrite.optimizer.spikes import Judgement
from gradrewrite.optimizer.step_plan import StepPlan
from gradrewrite.optimizer.step_sites import StepOutcome
from gradrewrite.policy.state_store import write_states
from gradrewrite.replay.step_snapshot import StepSnapshot, VersionedRef
from gradrewrite.training.joined_graph import JoinedGraph
from gradrewrite.training.update_trace import (
    key_of,
    numbers_of,
    prepare_state,
    trace_update,
)
from gradrewrite.training.whole_graph import Place, Scaling, UpdateParts, WholeGraph, WholeGraphBuilder


class StateMissing(BaseException):  # not an Exception: torch wraps those
    """Ends a compilation: the first step itself makes the state of the optimizer."""


@dataclass(eq=False)
class Training:
    """The optimizer of a training step, and the step at hand."""

    optimizer: torch.optim.Optimizer
    guard: Guard
    accumulates: bool = False  # whether the call at hand is a micro-batch
    sums: dict[int, Tensor] = field(default_factory=dict)  # accumulated gradients, by position of the parameter
    num_steps: int = 0  # numbers backwards that autograd does not know

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def next_backward(self) -> int:
        """Return a number for a backward, unlike those of autograd."""
        self.num_steps += 1
        return -1 - self.num_steps


@dataclass(eq=False)
class _Compiled:
    """One compiled graph and its inputs behind those of Dynamo."""

    graph: WholeGraph
    run: Callable[[list[Any]], Any]
    plan: StepPlan
    numbers: tuple[tuple[int, str], ...]
    number: Tensor | None  # that has their values
    values: list[float] = field(default_factory=list)
    live: list[Tensor] = field(default_factory=list)
    states: Any = None  # the optimizer's, for which ``live`` was read

    def follow(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return the live inputs as they are now."""
        if self.number is not None:
            values = numbers_of(optimizer, self.numbers)
            if values != self.values:
                self.values = values
                self.number.copy_(torch.tensor(values, dtype=self.number.dtype))
        if self.states is not optimizer.state:
            self.states = optimizer.state
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.live = [
                optimizer.state[parameters[t.parameter]][t.key] if isinstance(t, Place) else t for t in self.graph.live
            ]
        return self.live


class WholeStep:
    """The step of one Dynamo graph: compiled for each kind of call."""

    def __init__(self, training: Training, engine: Engine, compilation: GraphCompilation, joined: JoinedGraph) -> None:
        assert compilation.result is not None
        self._training, self._engine, self._joined = training, engine, joined
        self._session = compilation.session
        self._outputs = compilation.result.outputs
        self._uses = compilation.uses
        self._forwards = compilation.forwards
        self._values_read = compilation.values_read
        self._is_checked = bool(self._outputs.checks)
        self._is_replayed = compilation.is_replayed
        self._compiled: dict[Hashable, _Compiled] = {}
        parameters = training.parameters
        known = {id(p): n for n, p in enumerate(parameters)}
        given = {n: one.parameter() for n, one in compilation.inputs.items() if one.parameter is not None}
        self._inputs = {known[id(p)]: n for n, p in given.items() if id(p) in known and n in joined.gradients}
        self._refs = [weakref.ref(parameters[n]) for n in self._inputs]
        self._tangents = {name: VersionedRef(self._tangent(*known), 0) for name, known in joined.tangents.items()}
        self.prepare()

    def _tangent(self, is_of_loss: bool, fake: Tensor) -> Tensor:
        """Return the gradient of an output, for replays; without memory of its own."""
        scale, device = self._session.config.loss_scale, fake.device
        shape = [fake_tensors.hint_of(n) for n in fake.shape]
        with fake_tensors.outside_of_tracing():
            number = torch.ones((), device=device) if scale is None else scale.on(device)
            number = number if is_of_loss else torch.zeros((), device=device)
            return number.to(fake.dtype).expand(shape)

    def prepare(self) -> _Compiled:
        """Return the compiled graph for the call at hand."""
        training = self._training
        update = None if training.accumulates else training.guard.follow_in_graph()
        has_verdict = update is not None and update.has_verdict
        key = (
            training.accumulates,
            has_verdict,
            None if update is None else update.measured(),
            tuple(training.sums),
            key_of(training.optimizer),
            self._key_of_scale(),
        )
        if key not in self._compiled:
            with dynamo_cache.compiling(), fake_tensors.outside_of_modes():
                self._compiled[key] = self._compile(has_verdict)
        return self._compiled[key]

    def _key_of_scale(self) -> Hashable:
        scale = self._session.config.loss_scale
        scaler = None if scale is None else scale.scaler
        return None if scaler is None else optimizers.settings_of(scaler)

    def _scaling(self) -> Scaling | None:
        scale = self._session.config.loss_scale
        if scale is None:
            return None
        device = self._training.parameters[0].device
        scaler = scale.scaler
        if scaler is None:
            return Scaling(scale.on(device))
        return Scaling(*optimizers.scaling_of(scaler, device), *optimizers.settings_of(scaler))

    def _compile(self, has_verdict: bool) -> _Compiled:
        training, optimizer = self._training, self._training.optimizer
        parameters = training.parameters
        parts = UpdateParts(self._inputs, parameters, tuple(training.sums), has_verdict, self._outputs)
        builder = WholeGraphBuilder(self._joined, parts)
        gradients = builder.gradients()
        plan, numbers, number, returned = StepPlan(), (), None, []
        builder.judge_backward()
        if training.accumulates:
            returned = builder.accumulate(gradients)
        else:
            has_gradient = [n in gradients for n in range(len(parameters))]
            if not prepare_state(optimizer, has_gradient):
                raise StateMissing
            plan = training.guard.follow_in_graph().plan(optimizer, has_gradient)
            scaling = self._scaling()
            if scaling is not None:
                builder.unscale(gradients, scaling)
            builder.run_step(plan, gradients)
            forms = [value_of(gradients[n]) if n in gradients else None for n in range(len(parameters))]
            update = trace_update(optimizer, forms)
            numbers = update.numbers
            if numbers:
                number = torch.zeros(len(numbers), dtype=torch.float64, device=parameters[0].device)

            def state(n: int, key: str) -> Tensor:
                return cast(Tensor, optimizer.state[parameters[n]][key])

            builder.update(update, gradients, number, state)
            builder.scale_parameters(plan)
            if plan.change is not None:
                builder.change(plan.change, gradients, state)
            builder.let_skip()
            if plan.ratios:
                builder.measure_ratios([n for n, _ in plan.ratios])
        graph = builder.finish(returned, gradients)
        run = self._engine.compile_training_step(graph.gm, graph.num_outputs, graph.static)
        return _Compiled(graph, run, plan, numbers, number)

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the step; return the outputs of the model."""
        training, session = self._training, self._session
        check_values(self._values_read)
        compiled = self.prepare()
        graph = compiled.graph
        backward = training.next_backward()
        session.note_backward(backward)
        if training.accumulates and session.keeps_buffers:
            session.buffers.copy({n: inputs[n] for n in self._joined.written})
        snapshot = self._snapshot(inputs, backward)
        session.config.states.note_backward(backward)
        if session.config.loss_scale is not None:
            session.config.loss_scale.update()
        update = None if training.accumulates else training.guard.follow_in_graph()
        earlier = None if update is None else update.begin_in_graph(training.optimizer)
        verdicts = [] if earlier is None else [earlier]
        args = [*inputs, *training.sums.values(), *verdicts, *compiled.follow(training.optimizer)]
        written = tuple([args[n] for n in graph.written])
        with torch.no_grad(), autograd.versions_kept(written):
            results = list(compiled.run(args))
        outputs, results = results[: graph.num_outputs], results[graph.num_outputs :]
        self._give_gradients(inputs, graph, results[: len(graph.others)])
        results = results[len(graph.others) :]
        if training.accumulates:
            training.sums.update(zip(graph.returned, results, strict=False))
        else:
            training.sums.clear()
        self._report(compiled, results[len(graph.returned) :], snapshot)
        autograd.increment_versions(written)
        return outputs

    def _give_gradients(self, inputs: Sequence[Any], graph: WholeGraph, gradients: Sequence[Tensor]) -> None:
        """Accumulate the gradients of inputs that the optimizer does not have."""
        for n, gradient in zip(graph.others, gradients, strict=True):
            given = inputs[n]
            if not isinstance(given, torch.nn.Parameter):
                given.grad = gradient if given.grad is None else given.grad + gradient

    def _snapshot(self, inputs: Sequence[Any], backward: int) -> StepSnapshot | None:
        session = self._session
        is_kept = session.may_skip and bool(session.recorder.guards)
        if not (self._is_checked or is_kept or self._is_replayed) or self._forwards is None:
            return None
        begun = self._forwards.begin(inputs, session.recorder.links.begin_forward())
        values, versions, random, names = begun
        streams = session.config.states.copied_streams(self._outputs.states)
        graph = self._forwards.replay_graph
        snapshot = StepSnapshot(graph, values, versions, self._tangents, random, "", names, streams)
        if is_kept:
            session.recorder.keep(backward, snapshot)
        return snapshot

    def _report(self, compiled: _Compiled, results: Sequence[Tensor], snapshot: StepSnapshot | None) -> None:
        session, training, graph = self._session, self._training, compiled.graph
        own, rest = results[: graph.num_backward], results[graph.num_backward :]
        packs, kept, states = self._outputs.split(own)
        outputs, kept = self._outputs.unrolled(packs, kept)
        number = session.config.states.current
        if own or session.sampling.is_in_use or self._is_checked:
            given = outputs, [*packs, *kept], snapshot if self._is_checked else None, self._refs
            session.recorder.collect_whole(*given, session.sampling.is_due, number, notes_verdicts=training.accumulates)
        if states:
            session.config.states.write([tensor for _, tensor in self._outputs.states], states)
        if training.accumulates:
            return
        self._report_update(compiled, rest)

    def _report_update(self, compiled: _Compiled, results: Sequence[Tensor]) -> None:
        training, graph, plan = self._training, compiled.graph, compiled.plan
        own, rest = list(results[: graph.num_step]), list(results[graph.num_step :])
        outcome = StepOutcome()
        if plan.rewrite is not None:
            packs, kept, states = plan.rewrite.outputs.split(own)
            if states:
                self._session.config.states.write([tensor for _, tensor in plan.rewrite.outputs.states], states)
            outcome = StepOutcome(plan.rewrite.outputs, [*packs, *kept])
        judgements = []
        for judge, count in zip(plan.judges, graph.num_states, strict=True):
            values, states = rest.pop(0), [rest.pop(0) for _ in range(count)]
            new = list(zip(judge.targets, states, strict=True))
            judgements.append(Judgement(judge.judging.judge, values, new))
        bad = rest.pop() if graph.has_verdict else None
        found_inf = rest.pop() if graph.has_found_inf else None
        skipped = bad if found_inf is None else found_inf if bad is None else torch.maximum(bad, found_inf)
        checked = rest.pop() if graph.has_checked else None if judgements else bad
        ratios = (tuple(key for _, key in plan.ratios), rest.pop()) if graph.has_ratios else None
        behind = self._changed(plan, rest, skipped)
        training.guard.follow_in_graph().end_in_graph(
            training.optimizer, outcome, (bad, checked, skipped), judgements, behind, ratios
        )

    def _changed(
        self, plan: StepPlan, results: Sequence[Tensor], verdict: Tensor | None
    ) -> tuple[BackwardOutputs, list[Tensor]] | None:
        """Return the records of functions behind an update, NaN where it was skipped; write their states."""
        if plan.change is None:
            return None
        outputs = plan.change.rewrite.outputs
        packs, kept, states = outputs.split(results)
        targets = [tensor for _, tensor in outputs.states]
        if verdict is not None:
            skipped = verdict > 0
            states = [torch.where(skipped.to(t.device), t, n) for t, n in zip(targets, states, strict=True)]
            packs = [pack.masked_fill(skipped.to(pack.device), torch.nan) for pack in packs]
        write_states(targets, states)
        return outputs, [*packs, *kept]
