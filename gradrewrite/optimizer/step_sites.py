"""Step sites: actions on the gradients of the next ``optimizer.step()``."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradrewrite._compat import dynamo_cache, fake_tensors, optimizers
from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite._utils.formatting import nearest
from gradrewrite._utils.warnings import warn
from gradrewrite.backends.engines import AotEager, Engine
from gradrewrite.backends.live_tensors import Form, form_of
from gradrewrite.backends.session import Session
from gradrewrite.distributed.agreement import Ballot
from gradrewrite.distributed.groups import RankGroups
from gradrewrite.distributed.layouts import added_up
from gradrewrite.distributed.shards import Spread, like_of, local_of, spread_of
from gradrewrite.errors import NoSuchSiteError, TraceError
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.outputs import BackwardOutputs, Owner, Pack, Placed
from gradrewrite.ir.reports import KEPT, Scalars
from gradrewrite.monitoring.host_copy import number_of
from gradrewrite.monitoring.step_record import verdicts_of
from gradrewrite.numerics.statistics import total_norm_of
from gradrewrite.optimizer._target import Attachment, Target, targets_of
from gradrewrite.optimizer.spikes import NUM_FIGURES, Figures, Judge, Judgement, Judging, Losses
from gradrewrite.optimizer.step_exchange import ExchangeSettings, SpreadSite, send_nothing
from gradrewrite.optimizer.step_graph import AtSteps, StepGradient, StepRewrite, StepSettings, rewrite_step, runnable
from gradrewrite.optimizer.step_plan import InGraphJudge, StepPlan
from gradrewrite.policy.insertions import HoldElements, Insertion, JudgeUpdate, ScaleParameter
from gradrewrite.policy.rules import Answered, Rule, rules_at, step_site
from gradrewrite.policy.sampling import Measured, sampled
from gradrewrite.policy.state_store import StateStore, write_states
from gradrewrite.sites import Pattern, Site

# By position of a parameter: its site, None without a name, and the answers of its model's policy there.
_Asked = Mapping[int, tuple[Site | None, tuple[Answered, ...]]]
_Parameters = Sequence[Tensor]
_Gradients = Sequence[Tensor | None]

GUARD = "_gradrewrite_guard"  # name of the guard among the attributes of its optimizer
MAX_PLANS = 16


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of the actions at step sites: records, and work for the update; by default that of none."""

    outputs: BackwardOutputs = field(default_factory=BackwardOutputs)  # what the tensors are
    tensors: Sequence[Tensor] = ()  # packed records, then what is kept
    verdict: Tensor | None = None  # 1 if a check that skips failed, else 0, 0-d float32; None if nothing is checked
    divisor: Tensor | None = None  # what the fused optimizer divides gradients by; None if they are as they should be
    is_unscaled: bool = False  # whether the gradients are no longer multiplied by the loss scale
    # Parameters that are multiplied after the update, by the factor's action.
    parameter_factors: Sequence[tuple[ScaleParameter, Sequence[Tensor]]] = ()
    figures: Figures = field(default_factory=Figures)  # for the judges
    held: Mapping[int, tuple[Insertion, ...]] = field(default_factory=dict)  # by position of the parameter
    at_steps: AtSteps = field(default_factory=AtSteps)

    def with_judgements(self, judgements: Sequence[Judgement]) -> StepOutcome:
        """Return the outcome with the records of judgements, in a pack of their own."""
        if not judgements:
            return self
        own, number = self.outputs, len(self.outputs.packs)
        placed = [
            Placed(Scalars(tuple(key.record for key in judge.recorded), judge.recorded), judge.where)
            for judge in (judgement.judge for judgement in judgements)
        ]
        keys = tuple(key for one in placed for key in one.keys)
        outputs = replace(own, packs=(*own.packs, Pack(keys)), placed=(*own.placed, *placed))
        pack = torch.cat([judgement.recorded for judgement in judgements])
        return replace(self, outputs=outputs, tensors=[*self.tensors[:number], pack, *self.tensors[number:]])


@dataclass(frozen=True, slots=True)
class _Plan:
    rewrite: StepRewrite  # graph
    run: Callable[..., Any]  # its code
    live: Sequence[Tensor]  # its live inputs
    live_forms: Sequence[Form]  # for which it was compiled
    gradients: tuple[int, ...]  # positions of its gradients among the parameters of the optimizer
    kept: tuple[int | None, ...]  # positions among its gradients of those that are kept; None of other tensors
    held: Mapping[int, tuple[Insertion, ...]]  # parameters with elements that are held, by position

    @property
    def fits_live(self) -> bool:
        """Whether the live inputs have the dtypes and sizes of the compiled code."""
        return all(form_of(t) == form for t, form in zip(self.live, self.live_forms, strict=True))


@dataclass(frozen=True, slots=True)
class _Work:
    plan: _Plan | None  # for the gradients that are here; None without actions
    exchange: ExchangeSettings | None  # without a plan: other ranks may have gradients
    judges: tuple[Judging, ...]
    is_agreed: bool  # see ``Figures``


class StepSites:
    """The actions at an optimizer's step sites: one graph for each set of gradients."""

    def __init__(self, targets: Sequence[Target], attached: Sequence[Attachment], groups: RankGroups) -> None:
        """Ask the policies of these targets; attachments of the guard, if there is one, are read at each use."""
        self._targets, self._attached, self._groups = targets, attached, groups
        # When names were read: the parameters of the optimizer, the sessions of the targets, and how many graphs each
        # has.
        self._parameters: list[weakref.ref[Tensor]] = []
        self._sessions: list[weakref.ref[Session] | None] = []
        self._num_graphs: list[int] = []
        self._named: list[tuple[int, str] | None] = []  # target and name of each parameter; None where it has none
        self._numbered: list[tuple[int, str, int] | None] = []  # the same, with their numbers among equal names
        self._plans: OrderedDict[Hashable, _Work] = OrderedDict()
        self._ones: dict[torch.device, Tensor] = {}
        self._measures = False  # whether an action that was answered only measures
        self._measured: tuple[Measured, ...] = ()  # by the models, in the step at hand; () for all
        self._warned_of_strangers = False
        self._warned_of_lost = False
        self.check_rules()

    @property
    def _suffix(self) -> str:
        number = self._attached[0].seat.number if self._attached else 0
        return f"#{number}" if number else ""

    def check_rules(self) -> None:
        """Raise NoSuchSiteError for a step rule that matches no parameter of its model."""
        for target in self._targets:
            session = target.session
            rules = [] if session is None else step_rules_of(session)
            parameters = target.parameters() if rules else {}
            sites = [step_site(name, p) for name, p in parameters.items() if p.requires_grad]
            for rule in rules:
                pattern = Pattern.parse(rule.pattern)
                if not parameters or any(pattern.matches(site) for site in sites):
                    continue  # a backend knows no parameters before its first graph
                frozen = [name for name, p in parameters.items() if pattern.matches(step_site(name, p))]
                if not frozen:
                    raise NoSuchSiteError(
                        rule.pattern, nearest(rule.pattern, [str(site) for site in sites])[:5], rule.source
                    )
                assert session is not None
                session.warnings.warn_once(
                    rule.pattern,
                    f"{rule.pattern!r} matches {', '.join(frozen[:3])}, which has requires_grad=False: the rule does "
                    "nothing",
                )
                session.warnings.flush_warnings()

    @property
    def may_act(self) -> bool:
        """Whether a policy may have actions at step sites."""
        return any(t.session is not None and t.session.rules.may_have_step_sites for t in self._targets)

    def run(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[..., Any],
        scale: Tensor | None,
        ballot: Ballot | None,
        losses: Losses,
    ) -> StepOutcome:
        """Run the actions on the gradients before their update by ``step``, in place.

        ``scale`` is that of a GradScaler by which gradients are still multiplied. The ballot is decided here where
        figures of sharded gradients are exchanged too; losses are sent along where a judge asks for them.
        """
        self._check_alive()
        if not self.may_act:
            return StepOutcome()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._read_names(parameters)
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None and is_dtensor(grad) and (whole := added_up(grad)) is not grad:
                parameter.grad = whole
        gradients = [p.grad for p in parameters]
        work = self._work_on(parameters, gradients, _may_divide(optimizer, step), ballot)
        figures = Figures(work.judges, is_agreed=work.is_agreed)
        if ballot is not None and figures.judges_of_loss:
            ballot.send(losses.sums(parameters[0].device))
        if work.plan is not None:
            rewrite = work.plan.rewrite
            if ballot is not None and not (rewrite.takes_votes or "skip" in rewrite.outputs.checked or rewrite.judged):
                ballot.start()  # nothing is added to it: the ranks exchange verdicts while the actions run
            return self._run(work.plan, parameters, gradients, scale, ballot, figures)
        if work.exchange is not None:  # other ranks may have gradients
            figures = _send_nothing(work.exchange, figures, ballot, parameters[0].device)
        return StepOutcome(figures=figures)

    def _work_on(self, parameters: _Parameters, gradients: _Gradients, divides: bool, ballot: Ballot | None) -> _Work:
        """Return the work on the present gradients; it is kept for later steps."""
        voters = () if ballot is None else self._groups.ranks_of(ballot.group)
        kinds = [p.requires_grad if g is None else _kind_of(g, p) for p, g in zip(parameters, gradients, strict=True)]
        self._measured = self.measurements()

        def key() -> Hashable:
            values = tuple([t.session.step_values.number() for t in self._targets if t.session is not None])
            return (divides, voters, self._measured if self._measures else None, values, *kinds)

        known = self._plans.get(key())
        if known is not None and (known.plan is None or known.plan.fits_live):
            self._plans.move_to_end(key())
            return known
        with fake_tensors.outside_of_modes():
            work = self._plan(parameters, gradients, divides, voters)
        self._plans[key()] = work  # it is known now whether something is measured
        if len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return work

    def trace(self, optimizer: torch.optim.Optimizer) -> JointGraph:
        """Return the step graph for a step with all gradients, without edits if there are no actions; nothing runs.

        TraceError if none of the optimizer's parameters that need a gradient belongs to a model of the targets.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._read_names(parameters)
        gradients = [p.detach() if p.requires_grad else None for p in parameters]
        asked = self._ask(parameters, gradients)
        settings = StepSettings(_may_divide(optimizer, optimizer.step), self._suffix, states=self._states())
        known = [n for n, (site, _) in asked.items() if site is not None]
        if not known:
            raise TraceError(
                "none of the optimizer's parameters that need a gradient belongs to this model, so it has no step "
                "sites; make the optimizer from model.parameters()",
                code="optimizer",
            )
        shown = [n for n in known if asked[n][1]] or known
        everywhere, missing = self._everywhere(asked, parameters, gradients, None)
        exchange = self._exchange(asked, everywhere, missing, None)
        settings = replace(settings, exchange=exchange, judges=_judges_of(everywhere))
        with dynamo_cache.compiling():
            return _rewrite(asked, shown, parameters, gradients, settings).shown

    def plan(self, optimizer: torch.optim.Optimizer, has_gradient: Sequence[bool]) -> StepPlan:
        """Return the actions at gradients, for the graph of a whole step."""
        self._check_alive()
        if not self.may_act:
            return StepPlan()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._read_names(parameters)
        gradients = [p.detach() if known else None for p, known in zip(parameters, has_gradient, strict=True)]
        self._measured = self.measurements()
        asked = self._ask(parameters, gradients)
        self._note_values(asked)
        own = tuple(n for n, (_, answers) in asked.items() if answers)
        if not own:
            return StepPlan()
        settings = StepSettings(False, self._suffix, None, self._states(), _judges_of(asked))
        rewrite = _rewrite(asked, own, parameters, gradients, settings)
        judges = tuple(map(InGraphJudge, self._judgings(rewrite.judges)))
        return StepPlan(rewrite, own, judges, {n: found for n in own if (found := _holds(asked[n][1]))})

    def measurements(self) -> tuple[Measured, ...]:
        """Return the measurements of this update, by model."""
        return tuple("all" if t.session is None else t.session.sampling.of_update() for t in self._targets)

    def _ask(self, parameters: _Parameters, gradients: _Gradients) -> _Asked:
        """Ask the policies at each gradient that is there.

        Actions that only measure are left out where they are not due. Where several models have a
        parameter of one name, the policies are asked at equal sites, and the ``call`` of
        the sites that are returned numbers the models, in the optimizer's order. PolicyError for an answer that is not
        allowed, UnsupportedGradientError for an action at a sparse gradient.
        """
        asked: dict[int, tuple[Site | None, tuple[Answered, ...]]] = {}
        counts: Counter[str] = Counter()  # of equal names of several models
        for n, (own, parameter, gradient) in enumerate(zip(self._named, parameters, gradients, strict=True)):
            if own is not None:
                counts[own[1]] += 1
            if gradient is None:
                continue
            session = None if own is None else self._targets[own[0]].session
            if own is None or session is None:
                asked[n] = (None, ())
                continue
            site = step_site(own[1], parameter)
            answers = self._targets[own[0]].ask(own[0], site, gradient, counts[own[1]] - 1)
            site = replace(site, call=counts[own[1]] - 1)
            session.sampling.note([answers], at_steps=True)
            self._measures |= any(answered.insertion.every for answered in answers)
            answers = sampled(answers, self._measured[own[0]]) if self._measured else answers
            asked[n] = (site, answers)
        return asked

    def _everywhere(
        self, asked: _Asked, parameters: _Parameters, gradients: _Gradients, voters: tuple[int, ...] | None
    ) -> tuple[_Asked, Sequence[Tensor | None]]:
        """Return the answers at gradients that this rank lacks too, where others may have them, with all gradients.

        A gradient that is missing is its parameter.
        """
        missing = [g if g is not None or not p.requires_grad else p for p, g in zip(parameters, gradients, strict=True)]
        may_differ = (voters and not asked) or any(tensor is not None and is_dtensor(tensor) for tensor in missing)
        everywhere = self._ask(parameters, missing) if may_differ and len(asked) < len(parameters) else asked
        return everywhere, missing

    def _exchange(
        self, asked: _Asked, everywhere: _Asked, missing: Sequence[Tensor | None], voters: tuple[int, ...] | None
    ) -> ExchangeSettings | None:
        """Return the ranks' exchange for spread gradients, those that this rank lacks included; None without any.

        ``voters`` are None for a graph that is only shown: it may be asked for by one rank alone.
        """
        position = {n: number for number, n in enumerate(n for n, (_, answers) in asked.items() if answers)}
        sites = [
            SpreadSite(site, spread, answers, position.get(n))
            for n, (site, answers) in everywhere.items()
            if site is not None and answers and (spread := spread_over_ranks(missing[n])) is not None
        ]
        if not sites:
            return None
        for n, tensor in enumerate(missing):
            if tensor is not None and n in everywhere and is_dtensor(tensor):
                self._groups.note_mesh(tensor.device_mesh)
        sets = sorted({member.spread.ranks for member in sites} | ({voters} if voters else set()))
        group_of = self._groups.known if voters is None else self._groups.of_ranks
        groups = {ranks: group_of(ranks) for ranks in sets}
        takes_losses = any(effect.of == "loss" for _, effect in _judges_of(everywhere))
        return ExchangeSettings(tuple(sites), groups, voters or (), NUM_FIGURES if takes_losses else 0)

    def _run(
        self,
        plan: _Plan,
        parameters: _Parameters,
        gradients: _Gradients,
        scale: Tensor | None,
        ballot: Ballot | None,
        figures: Figures,
    ) -> StepOutcome:
        rewrite = plan.rewrite
        own = [local_of(g).detach() for n in plan.gradients if (g := gradients[n]) is not None]
        with torch.no_grad():
            if scale is not None and not rewrite.takes_scale:
                inverse = scale.double().reciprocal().float()  # as GradScaler.unscale_
                optimizers.foreach_scale([local_of(g) for g in gradients if g is not None], inverse)
            inputs = [*own, *(local_of(parameters[plan.gradients[n]]).detach() for n in rewrite.parameters)]
            if rewrite.takes_scale:
                inputs.append(self._one(own[-1].device) if scale is None else scale.to(own[-1].device))
            if ballot is not None and rewrite.takes_votes:
                inputs.append(ballot.votes)
            results = list(plan.run(*inputs, *plan.live))
            factors, tensors = results[: len(rewrite.scaled)], results[len(rewrite.scaled) :]
            totals = [tensors.pop(0) for _ in rewrite.judged]
            if ballot is not None and rewrite.takes_votes:
                ballot.decide(tensors.pop(0))
            packs, kept, states = rewrite.outputs.split(tensors)
            if states:
                write_states([tensor for _, tensor in rewrite.outputs.states], states)
            tensors = [
                *packs,
                *(
                    t if n is None else like_of(t, gradients[plan.gradients[n]])
                    for t, n in zip(kept, plan.kept, strict=True)
                ),
            ]
            idle = [factor.device.type == "cpu" and number_of(factor) == 1.0 for factor in factors]  # nothing waits
            for members, factor, is_idle in zip(rewrite.scaled, factors, idle, strict=True):
                if not rewrite.is_divided and not is_idle:
                    optimizers.foreach_scale([own[n] for n in members], factor)
        return StepOutcome(
            rewrite.outputs,
            tensors,
            _verdict(rewrite.outputs, tensors),
            # Beside a scale even 1 is given, or the optimizer would divide by the scaler's own.
            factors[0] if rewrite.is_divided and not (idle[0] and (scale is None or not rewrite.takes_scale)) else None,
            scale is not None and not rewrite.takes_scale,
            [
                (effect, [local_of(parameters[plan.gradients[n]]) for n in members])
                for effect, members in rewrite.parameter_factors
            ],
            replace(figures, norms=dict(zip(rewrite.judged, totals, strict=True))),
            plan.held,
            rewrite.at_steps,
        )

    def names(self, optimizer: torch.optim.Optimizer) -> list[tuple[int, str, int] | None]:
        """Return target, name and number among equal names of each parameter; None for one without a name.

        The list is the same one until something has changed.
        """
        self._read_names([p for group in optimizer.param_groups for p in group["params"]])
        return self._numbered

    def _states(self) -> StateStore | None:
        """Return the state store of the first model; groups may have several models."""
        return next((t.session.config.states for t in self._targets if t.session is not None), None)

    def _one(self, device: torch.device) -> Tensor:
        if device not in self._ones:
            self._ones[device] = torch.ones((), device=device)
        return self._ones[device]

    def _read_names(self, parameters: _Parameters) -> None:
        """Read names again after a change of parameters, policies or known names."""
        sessions = [target.session for target in self._targets]
        is_known = len(parameters) == len(self._parameters) and len(sessions) == len(self._sessions)
        is_known = is_known and all(p is ref() for p, ref in zip(parameters, self._parameters, strict=True))
        known = zip(sessions, self._sessions, strict=False)
        is_known = is_known and all(s is None or (ref is not None and s is ref()) for s, ref in known)
        counts = zip(sessions, self._num_graphs, strict=False)
        if is_known and all(s is None or len(s.graphs) == n for s, n in counts):
            return
        found: dict[int, tuple[int, str]] = {}
        for number, target in enumerate(self._targets):
            for name, parameter in target.parameters().items():
                found.setdefault(id(parameter), (number, name))
        named = [found.get(id(p)) for p in parameters]
        if not is_known or named != self._named:
            self._plans.clear()
            self.check_rules()
            self._warn_of_strangers(named)
        self._parameters = [weakref.ref(p) for p in parameters]
        self._sessions = [None if session is None else weakref.ref(session) for session in sessions]
        self._num_graphs = [0 if session is None else len(session.graphs) for session in sessions]
        if named == self._named and is_known:
            return
        self._named = named
        numbers: Counter[str] = Counter()
        self._numbered = []
        for own in named:
            self._numbered.append(None if own is None else (*own, numbers[own[1]]))
            numbers.update([] if own is None else [own[1]])

    def _check_alive(self) -> None:
        """Warn once if the models of all targets are gone."""
        if not self._warned_of_lost and not any(target.session for target in self._targets):
            self._warned_of_lost = True
            warn(
                "gr.guard: the rewritten model is gone, and with it the actions at its step sites; keep what "
                "gr.transform returned, or use gr.transform(model, policy, inplace=True)"
            )

    def _warn_of_strangers(self, named: Sequence[Any]) -> None:
        rules = [rule for t in self._targets if t.session is not None for rule in step_rules_of(t.session)]
        knows_names = any(target.parameters() for target in self._targets)
        if rules and knows_names and not any(named) and not self._warned_of_strangers:
            self._warned_of_strangers = True
            warn(
                f"gr.guard: {rules[0].pattern!r} does nothing, because none of the optimizer's parameters belongs to "
                "the model that the guard was given; make the optimizer from model.parameters()"
            )

    def _plan(self, parameters: _Parameters, gradients: _Gradients, divides: bool, voters: tuple[int, ...]) -> _Work:
        """Ask, rewrite and compile for the present gradients."""
        asked = self._ask(parameters, gradients)
        self._note_values(asked)
        own = tuple(n for n, (_, answers) in asked.items() if answers)
        everywhere, missing = self._everywhere(asked, parameters, gradients, voters)
        exchange = self._exchange(asked, everywhere, missing, voters)
        asking = _judges_of(everywhere)
        is_agreed = exchange is None or _is_agreed(exchange, everywhere)
        if not own:
            judges = tuple(
                Judge.at(insertion.action, effect, f"step:group:{effect.group}{self._suffix}")
                for insertion, effect in asking
            )
            return _Work(None, exchange, self._judgings(judges), is_agreed)
        settings = StepSettings(divides, self._suffix, exchange, self._states(), asking)
        with dynamo_cache.compiling():
            rewrite = _rewrite(asked, own, parameters, gradients, settings)
            gm, live = runnable(rewrite.shown.graph_module, rewrite.num_gradients)
            forms = [form_of(t) for t in live]
            run = self._engine.compile_step(gm, [value_of(node) for node in gm.graph.find_nodes(op="placeholder")])
        known: dict[Owner | None, int] = {asked[n][0]: number for number, n in enumerate(own)}
        kept = tuple(known[owner] if what in KEPT else None for what, owner, *_ in rewrite.outputs.kept)
        held = {n: found for n in own if (found := _holds(asked[n][1]))}
        plan = _Plan(rewrite, run, live, forms, own, kept, held)
        return _Work(plan, exchange, self._judgings(rewrite.judges), is_agreed)

    def _note_values(self, asked: _Asked) -> None:
        """Note the Python values that the functions of the answers read."""
        for number, target in enumerate(self._targets):
            if target.session is None:
                continue
            own = {
                replace(site, call=0): tuple(replace(a, position=a.position[1:]) for a in answers)
                for n, (site, answers) in asked.items()
                if site is not None and (named := self._named[n]) is not None and named[0] == number
            }
            target.session.step_values.note(own)

    @property
    def _engine(self) -> Engine:
        return next((t.engine for t in self._targets if t.engine is not None), None) or AotEager()

    def _judgings(self, judges: Sequence[Judge]) -> tuple[Judging, ...]:
        states = self._states()
        return () if states is None else tuple(Judging(judge, states, self._engine) for judge in judges)


def trace_step(model: Any, optimizer: torch.optim.Optimizer) -> JointGraph:
    """Return the graph of an optimizer's guard, or of one that it would have; see ``RewrittenModule.trace_step``."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"trace_step takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    optimizer = optimizers.inside_of(optimizer)
    guard = optimizer.__dict__.get(GUARD)
    targets, attached = (targets_of(model), ()) if guard is None else (guard.targets, guard.attached)
    return StepSites(targets, attached, RankGroups()).trace(optimizer)


def step_rules_of(session: Session) -> list[Rule]:
    """Return a policy's rules for step sites."""
    return rules_at(session.config.policy, "step")


def _send_nothing(exchange: ExchangeSettings, figures: Figures, ballot: Ballot | None, device: torch.device) -> Figures:
    """Take part in an exchange without a gradient; return the figures with the norms of the others' gradients."""
    sums, norms = send_nothing(exchange, None if ballot is None else ballot.votes, device)
    if ballot is not None and sums is not None:
        ballot.decide(sums)
    keys = [(type(judging.judge.action), judging.judge.effect.group) for judging in figures.judges]
    return replace(figures, norms={n: total_norm_of(norms[key])[0] for n, key in enumerate(keys) if key in norms})


def _judges_of(asked: _Asked) -> tuple[tuple[Insertion, JudgeUpdate], ...]:
    """Return the judges among the answers, each once."""
    insertions = (answered.insertion for _, answers in asked.values() for answered in answers)
    found = ((insertion, insertion.effect) for insertion in insertions)
    return tuple({i.key: (i, effect) for i, effect in found if isinstance(effect, JudgeUpdate)}.values())


def _holds(answers: Sequence[Answered]) -> tuple[Insertion, ...]:
    return tuple(a.insertion for a in answers if isinstance(a.insertion.effect, HoldElements))


def _is_agreed(exchange: ExchangeSettings, asked: _Asked) -> bool:
    """Return whether all gradients are spread over all voting ranks."""
    if not exchange.voters:
        return True
    spread = {member.site: member.spread.ranks for member in exchange.sites}
    judged = (site for site, answers in asked.values() if any(_judges_norm(a.insertion) for a in answers))
    return all(site is None or set(exchange.voters).issubset(spread.get(site, ())) for site in judged)


def _judges_norm(insertion: Insertion) -> bool:
    return isinstance(insertion.effect, JudgeUpdate) and insertion.effect.of == "total_norm"


def _rewrite(
    asked: _Asked, own: Sequence[int], parameters: _Parameters, gradients: _Gradients, settings: StepSettings
) -> StepRewrite:
    """Make the graph of the gradients at these positions; the sites of others are listed."""
    tensors = [t for n in own for t in (gradients[n], parameters[n]) if t is not None]
    fakes = fake_tensors.fakes_of([local_of(t) for t in tensors])
    spreads = [spread_over_ranks(gradient) for gradient in tensors[::2]]
    given = [
        StepGradient(site, gradient, parameter, answers, spread)
        for (site, answers), gradient, parameter, spread in zip(
            (asked[n] for n in own), fakes[::2], fakes[1::2], spreads, strict=True
        )
        if site is not None
    ]
    shown = set(own)
    further = [site for n, (site, _) in asked.items() if site is not None and n not in shown]
    if any(site is None for site, _ in asked.values()):
        settings = replace(settings, divides=False)  # a gradient that is nobody's would be divided too
    return rewrite_step(given, settings, further)


def _may_divide(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> bool:
    """Whether the kernels of an optimizer can divide the gradients, and nothing reads them before."""
    return optimizers.is_fused(optimizer) and not optimizers.may_read_gradients(optimizer, step)


def _kind_of(gradient: Tensor, parameter: Tensor) -> Hashable:
    """Equal for tensors that one compiled graph takes: sizes change where a parameter is pruned (``p.data = ...``)."""
    if gradient.layout is not torch.strided:
        return gradient.layout
    kind = (gradient.dtype, gradient.device, gradient.shape, _layout_of(gradient), _layout_of(parameter))
    return (*kind, gradient.placements, gradient.device_mesh) if is_dtensor(gradient) else kind


def _layout_of(tensor: Tensor) -> Hashable:
    local = local_of(tensor)
    return local.dtype, local.shape, local.stride()


def spread_over_ranks(gradient: Tensor | None) -> Spread | None:
    """Return the spread of a tensor; None for a whole or empty one."""
    spread = None if gradient is None else spread_of(gradient)
    return spread if spread is not None and len(spread.ranks) > 1 and spread.size else None


def _verdict(outputs: BackwardOutputs, tensors: Sequence[Tensor]) -> Tensor | None:
    found = verdicts_of(outputs, tensors)
    if len(found) < 2:
        return found[0] if found else None
    return torch.stack([bad.to(found[0].device, non_blocking=True) for bad in found]).amax()
