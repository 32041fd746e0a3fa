"""Whole steps at run time: inputs, results, records, and the verdict on the update."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradrewrite._compat import autograd, dynamo_cache, fake_tensors, optimizers
from gradrewrite.backends.compilation import GraphCompilation
from gradrewrite.backends.engines import Engine
from gradrewrite.backends.runtime_wrapper import check_values, owned, warn_in_parts
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.optimizer.spikes import Judgement
from gradrewrite.optimizer.step_plan import StepPlan
from gradrewrite.optimizer.step_sites import StepOutcome
from gradrewrite.optimizer.update import GuardedUpdate, UpdateInGraph
from gradrewrite.policy.scope import bounds_one_gradient
from gradrewrite.policy.state_store import write_states
from gradrewrite.replay.step_snapshot import StepSnapshot, VersionedRef
from gradrewrite.training.compiled_step import CompiledStep, compile_step
from gradrewrite.training.joined_graph import JoinedGraph
from gradrewrite.training.training import Training


class WholeStep:
    """The step of one Dynamo graph, compiled for each kind of call."""

    def __init__(self, training: Training, engine: Engine, compilation: GraphCompilation, joined: JoinedGraph) -> None:
        """Compile for the call at hand; StateMissing where the first update itself makes the optimizer's state."""
        assert compilation.result is not None
        self._training, self._engine, self._joined = training, engine, joined
        self._session = compilation.session
        self._outputs = compilation.result.outputs
        self._bounds = tuple(filter(bounds_one_gradient, compilation.result.edits))
        self._has_parts = bool(self._bounds or self._outputs.groups)  # of which no part of a sum was met so far
        self._forwards = compilation.forwards
        self._values_read = compilation.values_read
        self._is_checked = bool(self._outputs.checks)
        self._is_replayed = compilation.is_replayed
        self._has_plan = training.update().has_plan
        self._compiled: dict[Hashable, list[CompiledStep]] = {}
        known = {id(p): n for n, p in enumerate(training.parameters)}
        given = {n: one.parameter() for n, one in compilation.inputs.items() if one.parameter is not None}
        self._inputs = {known[id(p)]: n for n, p in given.items() if id(p) in known and n in joined.gradients}
        self._refs = [weakref.ref(training.parameters[n]) for n in self._inputs]
        self._tangents = {name: VersionedRef(self._tangent(*known), 0) for name, known in joined.tangents.items()}
        scale = self._session.config.loss_scale
        if scale is not None and scale.scaler is not None:  # so that the first micro-batch has its scale
            optimizers.scaling_of(scale.scaler, training.parameters[0].device)
        self._compiled_for(training.update())

    def _tangent(self, is_of_loss: bool, fake: Tensor) -> Tensor:
        """Return the gradient of an output, for replays; without memory of its own."""
        scale, device = self._session.config.loss_scale, fake.device
        shape = [fake_tensors.hint_of(n) for n in fake.shape]
        with fake_tensors.outside_of_tracing():
            number = torch.ones((), device=device) if scale is None else scale.on(device)
            number = number if is_of_loss else torch.zeros((), device=device)
            return number.to(fake.dtype).expand(shape)

    def _compiled_for(self, update: GuardedUpdate) -> CompiledStep:
        """Return the compiled graph for the call at hand."""
        training = self._training
        key: Hashable = tuple([(n, total.stride()) for n, total in training.sums.items()])
        if not training.accumulates:
            has_losses = training.losses is not None
            plan = update.key_of_plan() if self._has_plan else None
            scale = None if self._session.config.loss_scale is None else self._key_of_scale()
            key = update.has_verdict, has_losses, plan, key, scale
        known = self._compiled.setdefault((training.accumulates, key), [])
        found = next((one for one in known if one.follow(training.optimizer)), None)
        if found is None:
            given = self._engine, self._joined, self._outputs, training, update, self._inputs, self._session.config
            with dynamo_cache.compiling(), fake_tensors.outside_of_modes():
                found = compile_step(*given)
            with fake_tensors.outside_of_transforms():
                found.follow(training.optimizer)
            known.insert(0, found)
        return found

    def _key_of_scale(self) -> Hashable:
        scale = self._session.config.loss_scale
        scaler = None if scale is None else scale.scaler
        return None if scaler is None else optimizers.settings_of(scaler)

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the step; return the outputs of the model."""
        training, session = self._training, self._session
        update = training.update()
        if self._values_read:
            check_values(self._values_read)
        compiled = self._compiled_for(update)
        snapshot = self._begin(inputs)
        args = [*inputs, *training.sums.values(), *compiled.begin(update, training), *compiled.live(training)]
        written = [args[n] for n in compiled.graph.written]
        results = compiled.run(args, written)
        graph = compiled.graph
        outputs, rest = results[: graph.num_outputs], results[graph.num_outputs :]
        if self._engine.overwrites_outputs:  # a CUDA graph does, when it is replayed
            rest = [t.clone() for t in rest]
        if graph.others:
            _give_gradients([inputs[n] for n in graph.others], rest)
            rest = rest[len(graph.others) :]
        if training.accumulates:
            training.note_losses([outputs[n] for n in self._joined.losses])
            training.sums.update(zip(graph.returned, rest, strict=False))
            rest = rest[len(graph.returned) :]
        else:
            training.sums.clear()
        try:
            if graph.num_backward or self._is_checked or session.sampling.is_in_use:
                self._report(rest[: graph.num_backward], snapshot, outputs)
            if not training.accumulates:
                self._report_update(update, compiled, rest[graph.num_backward :])
        finally:  # behind the replay of a check that raises
            autograd.increment_versions(written)
            session.recorder.links.note_versions()
        return outputs

    def _begin(self, inputs: Sequence[Any]) -> StepSnapshot | None:
        """Tell of a backward; return the inputs of a replay, if there may be one."""
        training, session = self._training, self._session
        backward = training.next_backward()
        if self._has_parts and any(bool(total.count_nonzero()) for total in training.sums.values()):
            self._has_parts = False
            warn_in_parts(session, "accumulated", self._outputs.groups, self._outputs.noisy, self._bounds)
        if training.accumulates:
            session.note_backward(backward)
            if session.keeps_buffers:
                session.buffers.copy({n: inputs[n] for n in self._joined.written})
        session.config.states.note_backward(backward)
        if session.config.loss_scale is not None:
            session.config.loss_scale.update()
        return self._snapshot(inputs, backward)

    def _snapshot(self, inputs: Sequence[Any], backward: int) -> StepSnapshot | None:
        session = self._session
        is_kept = session.may_skip and bool(session.recorder.guards)
        if not (self._is_checked or is_kept or self._is_replayed) or self._forwards is None:
            return None
        values, versions, random, names = self._forwards.begin(inputs, session.recorder.links.begin_forward())
        streams = session.config.states.copied_streams(self._outputs.states)
        graph = self._forwards.replay_graph
        snapshot = StepSnapshot(graph, values, versions, self._tangents, random, "", names, streams)
        if is_kept:
            session.recorder.keep(backward, snapshot)
        return snapshot

    def _report(self, results: Sequence[Tensor], snapshot: StepSnapshot | None, returned: Sequence[Any]) -> None:
        """Record the report of the backward, and write states; the user has ``returned``."""
        session, training = self._session, self._training
        packs, kept, states = self._outputs.split(results)
        outputs, kept = self._outputs.unrolled(packs, kept)
        if kept:
            kept = owned(kept, [what for what, *_ in outputs.kept], [*results, *returned])
        number = session.config.states.current
        given = outputs, [*packs, *kept], snapshot if self._is_checked else None, self._refs
        session.recorder.collect_whole(*given, session.sampling.is_due, number, notes_verdicts=training.accumulates)
        if states:
            session.config.states.write([tensor for _, tensor in self._outputs.states], states)

    def _report_update(self, update: GuardedUpdate, compiled: CompiledStep, results: Sequence[Tensor]) -> None:
        graph, plan = compiled.graph, compiled.plan
        outcome = _NOTHING
        if plan.rewrite is not None:
            packs, kept, states = plan.rewrite.outputs.split(results[: graph.num_step])
            if states:
                self._session.config.states.write([tensor for _, tensor in plan.rewrite.outputs.states], states)
            outcome = StepOutcome(plan.rewrite.outputs, [*packs, *kept])
        made = _update_of(compiled, list(results[graph.num_step :])) if graph.has_report else _MADE
        update.end_in_graph(self._training.optimizer, plan, outcome, made)


_NOTHING, _MADE = StepOutcome(), UpdateInGraph()


def _give_gradients(inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Accumulate the gradients of inputs; parameters that the optimizer does not have get none."""
    for given, gradient in zip(inputs, gradients, strict=False):
        if not isinstance(given, torch.nn.Parameter):
            given.grad = gradient if given.grad is None else given.grad + gradient


def _update_of(compiled: CompiledStep, results: list[Tensor]) -> UpdateInGraph:
    """Return the update from its results, in the order of ``WholeGraph``."""
    graph, plan = compiled.graph, compiled.plan
    judgements = []
    for judge, count in zip(plan.judges, graph.num_states, strict=True):
        values, *states = results[: 1 + count]
        results = results[1 + count :]
        judgements.append(Judgement(judge.judging.judge, values, list(zip(judge.targets, states, strict=True))))
    bad = results.pop() if graph.has_verdict else None
    found_inf = results.pop() if graph.has_found_inf else None
    skipped = bad if found_inf is None else found_inf if bad is None else torch.maximum(bad, found_inf)
    checked = results.pop() if graph.has_checked else None if judgements else bad
    ratios = results.pop() if graph.has_ratios else None
    return UpdateInGraph(bad, checked, skipped, judgements, _behind(plan, results, skipped), ratios)


def _behind(
    plan: StepPlan, results: Sequence[Tensor], verdict: Tensor | None
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
