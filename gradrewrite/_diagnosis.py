"""``diagnose``: train a copy of a model for some steps, and name its faults and their remedies."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradrewrite import passes
from gradrewrite._locate import first_line, locate_in_step, name_break, searched
from gradrewrite._utils.progress import current_progress, show_progress
from gradrewrite._utils.tensors import kept_random_state, tensors_in
from gradrewrite.auditing.findings import Audit
from gradrewrite.auditing.update_watch import UpdateWatch, began_with
from gradrewrite.auditing.verdicts import audit_step
from gradrewrite.backends.model_state import ModelState, state_of
from gradrewrite.backends.state_dict import load_state_dict, state_dict
from gradrewrite.backends.traced_step import METHOD, ComputeLoss, TrainingStep, arguments_of, own_batch
from gradrewrite.diagnostics.causes import Cause, Outcome
from gradrewrite.diagnostics.constant_answers import Classes, Targets
from gradrewrite.diagnostics.health import Health, examine, without_rules
from gradrewrite.diagnostics.judge import KEEP_ZEROS, SKIP, Evidence, Remedy
from gradrewrite.diagnostics.nonfinite_steps import bad_steps, is_in_errors_alone
from gradrewrite.diagnostics.run_log import Step, last_run
from gradrewrite.diagnostics.trials import Trial, lines_of
from gradrewrite.diagnostics.used_gradients import checked_clip
from gradrewrite.errors import GraphBreakError, NonFiniteError, NotRewrittenError, RewriteWarning, Story, TraceError
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.module import RewrittenModule, restore, shown, transform
from gradrewrite.monitoring.monitor import Monitor
from gradrewrite.optimizer.guard import guard
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.numbers import python_number
from gradrewrite.policy.rules import leave_out_unsupported, on
from gradrewrite.replay.observations import is_finite
from gradrewrite.replay.step_snapshot import RandomState
from gradrewrite.sites import Site

if TYPE_CHECKING:
    from gradrewrite.viz import Report

Loss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

AS_IT_IS, SUGGESTED = "as it is", "suggested policy"
GLOBAL_BOUND = 1.0  # of the global clip that is tried, as most trainings have it
_RECTIFIERS = frozenset(("relu", "relu_", "relu6", "threshold"))
_SATURATING = frozenset(("tanh", "tanh_", "sigmoid", "sigmoid_"))
_UNREAD = "got no gradient: nothing that reaches the loss reads them."
_NAMED = 5  # parameters in one remark
_BROKEN_LINE = re.compile(r'\n +([^"\n]+:\d+ ".*")\n')  # in the error of a graph break
_MOST_GRAPHS = 4  # of a model with its loss: a Python value that changes, as a counter, makes one a step
_MOST_FOLLOWING = 3  # batches behind a step that is not finite, to tell whether skipping it helps


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a training: outcome, causes, remedies; see ``diagnose``.

    Attributes:
        outcome: ``"learns"``, ``"stalls"``, ``"diverges"`` or ``"non-finite"``; without an optimizer ``"untrained"`` or
            ``"non-finite"``; ``"unknown"`` where there were fewer than four steps.
        causes: The causes, the gravest first; empty if nothing is wrong.
        remarks: Sentences about what is no fault: parameters without a gradient, frozen ones, code that was not seen.
        verdict: The outcome and the first cause in one or two sentences.
        policy: Python code of a list of rules against the causes, one a line, with ``gr`` for this package and the
            names of ``gradrewrite.passes``; ``""`` where a policy is no remedy.
        trials: With ``try_clips=True`` the losses by step, from the same start on the same batches: ``"as it is"``,
            ``"global clip"`` (of all gradients, to a norm of 1) and, where there is a policy, ``"suggested policy"``.
            Each has ``skipped`` and ``is_bad`` too. A policy that does not help is no longer suggested.
        health: The figures of all sites, for programs.
        audit: The audit of the first step, whose faults are among the causes; None if it could not run.
        graph: The largest graph of the model and its loss, without clips, for drawing.
    """

    outcome: Outcome
    causes: tuple[Cause, ...]
    remarks: tuple[str, ...]
    verdict: str
    policy: str
    trials: Mapping[str, Trial] = field(default_factory=lambda: MappingProxyType({}))
    health: Health | None = field(default=None, repr=False, compare=False)
    graph: JointGraph | None = field(default=None, repr=False, compare=False)
    audit: Audit | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """The verdict, the advice, the policy, the trials and the remarks, as plain text."""
        parts = [self.verdict]
        if self.health is not None and self.causes:
            parts += [f"What to change: {self.health.verdict.advice}", *([self.policy] if self.policy else [])]
        parts += [f"{cause.kind}: {cause.text}" for cause in self.causes[1:]]
        parts += lines_of(self.trials)
        return "\n".join([*parts, *(f"remark: {text}" for text in self.remarks)])

    def render(self, path: str | os.PathLike[str]) -> str:
        """Write ``path.html``, a page that loads nothing.

        Args:
            path: Where; folder and extension are added where they are missing.

        Returns:
            The path of the file.

        Raises:
            OSError: The file cannot be written.
        """
        return self._report().render(path)

    def _repr_html_(self) -> str:
        return self._report()._repr_html_()

    def _report(self) -> Report:
        from gradrewrite import viz  # which loads libraries for drawing

        assert self.health is not None
        tables = "" if self.audit is None else self.audit._repr_html_()
        return viz.Report(self.health, "diagnosis", trials=self.trials, graph=self.graph, audit=tables)


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    compute_loss: ComputeLoss | None = None,
    optimizer: MakeOptimizer | torch.optim.Optimizer | None = None,
    steps: int = 50,
    compile: bool = False,
    try_clips: bool = False,
    clip: float | None = None,
) -> Diagnosis:
    """Train a copy of a model for some steps, and name its faults, their places and the remedies.

    No policy is needed: norms of the errors of all modules and of all gradients, zeros, saturated units and values that
    are not finite are recorded. It stops at the first step that is not finite, and replays it to find the op. Outcome
    and causes are those of ``gradrewrite report``; ``docs/diagnosis.md`` has the thresholds.

    The loss is traced with the model, as one graph, so that an op of the loss is found as one of the model is. Where
    the tracer cannot follow it, it runs beside the graph, and the line that stops the tracer is named.

    After each update parameters, buffers and optimizer state are looked at: where the gradients were finite and one of
    these is not any more, the training ends there with the outcome ``"non-finite"``.

    The first step is audited (``gr.audit``). Its faults come first among the causes, unless the training diverges or
    ends with values that are not finite.

    The model, the optimizer, gradients, buffers and torch's random state stay as they were, bit for bit: a deep copy
    is trained, and another one audited. One copy lives at a time, so that a diagnosis takes the memory of a second
    model and optimizer. A ``loss`` that reads the model itself reads the original, and ``compute_loss`` is given the
    copy; the generators of Python and NumPy go on.

    Args:
        model: A module in the mode in which it is to run; it is called with each batch.
        batches: A tensor, a tuple or list of positional arguments, or a mapping of keyword arguments each, as a
            DataLoader gives them. Read once; what can be iterated again begins anew where it ends before the last step.
        loss: ``(output, batch) -> scalar``; the model is then given the first parts of a batch, as many as its forward
            has parameters without a default; of a mapping those that it has. None if the model returns the loss, or an
            object with ``.loss``.
        compute_loss: ``(model, *args, **kwargs) -> scalar``, in the place of ``loss``, with the parts of a batch: it
            calls the model itself, as often as it likes.
        optimizer: A function from parameters to an optimizer, or an optimizer of the model, which is copied with its
            state. None looks at gradients without an update.
        steps: How many steps at most.
        compile: Compile with ``torch.compile`` instead of op by op.
        try_clips: Train again from the same start, on the same batches, with a clip of all gradients to a norm of 1,
            and with the suggested policy. The batches are kept in memory.
        clip: The global norm to which the optimizer clips, in a step pre-hook or a ``step`` of its own: it is compared
            with the norms of the gradients that the updates used. Nothing clips to it.

    Returns:
        The diagnosis: print it, ``render`` it as a page, or show it in a notebook.

    Raises:
        TypeError: ``model`` is no module, rewritten already, or cannot be copied; or the loss is no tensor with one
            element.
        ValueError: ``steps`` is not a whole number >= 1, ``clip`` is no number > 0, there is no batch, ``loss`` and
            ``compute_loss`` are both given, or the optimizer has none of the model's parameters.
        TraceError: The loss depends on no parameter.

    Example:
        >>> import torch, gradrewrite as gr
        >>> generator = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> batches = [torch.randn(16, 4) for _ in range(50)]
        >>> found = gr.diagnose(
        ...     model,
        ...     batches,
        ...     loss=lambda output, x: (output - x[:, :1]).square().mean(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ... )
        >>> found.outcome, found.causes
        ('learns', ())
    """
    _check(model, optimizer)
    number = python_number(steps)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"gr.diagnose: steps is a whole number >= 1, got {number!r}")
    if loss is not None and compute_loss is not None:
        raise ValueError(
            "gr.diagnose: loss, (output, batch) -> scalar, and compute_loss, (model, *args, **kwargs) -> scalar, are "
            "two ways to say one thing; give one"
        )
    bound = math.nan if clip is None else checked_clip(clip, "gr.diagnose")
    train = _Trainer(model, _Loss(loss, compute_loss), optimizer, number, compile=compile, clip=bound)
    with (
        show_progress("diagnose", "training"),
        kept_random_state(),
        _kept_gradients(model),
        torch.enable_grad(),
    ):
        stream: Iterable[Any] = list(_stream(batches, number)) if try_clips else _stream(batches, number)
        first = next(iter(stream))
        stream = stream if isinstance(stream, list) else itertools.chain([first], stream)
        recorded, losses, evidence = train(stream, observe)
        evidence = train.with_remedies(recorded, evidence)
        audited, remarks = train.audited(first)
        faults = () if audited is None else tuple(map(with_line, audited.causes))
        is_said = any(one.kind == "no gradient" for one in faults)
        kept = (text for text in evidence.remarks if not (is_said and text.endswith(_UNREAD)))
        evidence = replace(evidence, audited=faults, remarks=(*kept, *remarks))
        health = examine(recorded, evidence=evidence)
        trials, health = _trials(train, stream, losses, health) if try_clips else ({}, health)
    verdict = health.verdict
    texts = verdict.outcome, verdict.causes, verdict.remarks, verdict.text, _policy(health)
    return Diagnosis(*texts, trials, health, train.graph, audited)


def _trials(train: _Trainer, batches: Iterable[Any], losses: Trial, health: Health) -> tuple[dict[str, Trial], Health]:
    """Return the trials, and the judgement without useless rules."""
    trials = {AS_IT_IS: Trial(losses, is_bad=health.verdict.outcome == "non-finite")}
    eps = next((c.figures["suggested_eps"] for c in health.verdict.causes if "suggested_eps" in c.figures), None)
    policy = _policy(health)
    wanted: list[tuple[str, Policy, dict[str, float]]] = [
        ("global clip", on("gradient:*", passes.ClipByGlobalNorm(GLOBAL_BOUND)), {}),
        *([(f"eps={eps:g}", [], {"eps": eps})] if eps is not None else []),
        *([(SUGGESTED, _evaluated(policy), {})] if policy else []),
    ]
    try:
        for name, own, settings in wanted:
            trials[name] = train.tried(batches, own, name, **settings)
    except TraceError as err:  # a loss that differentiates the model again is in no graph with a policy
        return trials, without_rules(health, f"No policy could be tried: {first_line(err).partition('. ')[0]}.")
    if policy and not trials[SUGGESTED].is_better_than(trials[AS_IT_IS]):
        remark = f"Tried, and of no help, so that it is not suggested: {_on_one_line(policy)}."
        return trials, without_rules(health, remark)
    return trials, health


def _policy(health: Health) -> str:
    """Return the code of the rules against the causes; ``""`` without any."""
    rules = health.verdict.code if health.verdict.causes else ()
    return "[\n" + "".join(f"    {rule},\n" for rule in rules) + "]" if rules else ""


def _evaluated(policy: str) -> Policy:
    known = {name: getattr(passes, name) for name in passes.__all__}
    found: Policy = eval(policy, {**known, "gr": SimpleNamespace(on=on)})  # our own text
    return found


def _on_one_line(policy: str) -> str:
    return ", ".join(line.strip().rstrip(",") for line in policy.splitlines()[1:-1])


def _check(model: Any, optimizer: Any) -> None:
    if isinstance(model, RewrittenModule):
        raise TypeError(
            "gr.diagnose takes the plain model, and this one has a policy: give model.original, or ask "
            "model.monitor.diagnose() for the training that ran with the policy"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"gr.diagnose takes an nn.Module, got {type(model).__name__}")
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(parameter) for parameter in model.parameters()}
        if own.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "gr.diagnose: the optimizer has none of the model's parameters; make it from model.parameters()"
            )


def _stream(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """Yield one batch a step, from the beginning again if need be."""
    if isinstance(batches, Tensor | Mapping):
        kind = type(batches).__name__
        raise TypeError(f"gr.diagnose: batches is an iterable of batches, got {kind}; of one batch it is [batch]")
    count = 0
    while count < steps:
        before = count
        for batch in itertools.islice(batches, steps - count):
            count += 1
            yield batch
        if isinstance(batches, Iterator) or count == before:
            break
    if not count:
        raise ValueError("gr.diagnose: there is no batch; give an iterable of batches")


def with_line(cause: Cause) -> Cause:
    """Return a cause of an audit with its line in the text."""
    return replace(cause, text=f"{cause.text[:-1]}, at {cause.source}.") if cause.source else cause


def _kept(batches: Iterable[Any], seen: list[Any]) -> Iterator[Any]:
    """Yield batches, and keep them in a list."""
    for batch in batches:
        seen.append(batch)
        yield batch


@contextlib.contextmanager
def _kept_gradients(model: nn.Module) -> Iterator[None]:
    """Leave gradients as they are, if a loss reads the model."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@dataclass(frozen=True)
class _Loss:
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


@dataclass
class _Trainer:
    """Trains copies of one model from the same start."""

    model: nn.Module
    loss: _Loss
    optimizer: MakeOptimizer | torch.optim.Optimizer | None
    steps: int
    compile: bool
    clip: float = math.nan  # to which the optimizer clips
    graph: JointGraph | None = None  # of the training that was observed
    failed: tuple[_Run, Any, list[Any]] | None = None  # with the batch that is not finite, and those behind it
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the optimizer's groups, in place of its own

    def audited(self, batch: Any) -> tuple[Audit | None, list[str]]:
        """Audit the first step, of another copy; return the audit, or a remark why it could not run."""
        try:
            model, optimizer = self._copies()
            step = self.loss.step
            compute_loss = None if step is None else step.function(model)
            args, kwargs = arguments_of(model, batch, has_loss=False) if step is None else step.arguments(model, batch)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the model: the training has said them
                return audit_step(model, args, kwargs, compute_loss, optimizer), []
        except Exception as err:  # the training has run: it keeps its verdict
            return None, [f"The step could not be audited ({type(err).__name__}: {first_line(err)})."]

    def __call__(
        self, batches: Iterable[Any], policy: Policy, stage: str = "training"
    ) -> tuple[Sequence[Step], Trial, Evidence]:
        """Train one copy with a policy; stop at the first step that is not finite, unless it is skipped.

        Where the model is not one graph, another copy trains from the start, in parts.
        """
        seen: list[Any] = []
        stream = iter(batches)
        with contextlib.suppress(GraphBreakError, NotRewrittenError):
            return self._train(_kept(stream, seen), policy, stage, fullgraph=True)
        return self._train(itertools.chain(seen, stream), policy, stage, fullgraph=False)  # the first copy is free

    def _train(
        self, batches: Iterable[Any], policy: Policy, stage: str, *, fullgraph: bool
    ) -> tuple[Sequence[Step], Trial, Evidence]:
        model, optimizer = self._copies()
        run = _Run(self, model, policy, optimizer, fullgraph=fullgraph)
        if optimizer is not None and policy is not observe:
            guard(optimizer, run.rewritten, max_consecutive_skips=self.steps + 1)
        progress = current_progress()
        progress.begin(stage, self.steps)
        with kept_random_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RewriteWarning)  # graph breaks and the like are among the remarks
            warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
            batches, is_bad, has_failed = iter(batches), False, False
            for batch in batches:
                is_bad = not run.step(batch)
                if has_failed := is_bad and policy is observe:
                    run.explain(batch)
                    break
                num_skipped = run.rewritten.monitor.skipped
                is_made = run.update()
                progress.advance()
                is_bad = not is_made or (is_bad and run.rewritten.monitor.skipped == num_skipped)
                if is_bad:
                    break
            recurrent = run.look(batch) if policy is observe else frozenset()
            evidence = run.evidence(recurrent)
            if policy is observe:
                self.graph = run.graph
            if has_failed:
                self.failed = run, batch, list(itertools.islice(batches, _MOST_FOLLOWING))
        return run.recorded, Trial(run.losses, run.rewritten.monitor.skipped, is_bad=is_bad), evidence

    def with_remedies(self, recorded: Sequence[Step], evidence: Evidence) -> Evidence:
        """Add the rules that help against an op at fault, and let go of the copy that failed."""
        failed, self.failed = self.failed, None
        if failed is None or not any(
            cause.kind == "non-finite op" for cause in examine(recorded, evidence=evidence).verdict.causes
        ):
            return evidence
        run, batch, following = failed
        with kept_random_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RewriteWarning)
            return replace(evidence, remedies=run.remedies(batch, following))

    def tried(self, batches: Iterable[Any], policy: Policy, name: str, **settings: Any) -> Trial:
        """Train one copy with a policy, and with other settings of the optimizer; return its losses."""
        return replace(self, settings=settings)(batches, [policy], name)[1]

    def _copies(self) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        gc.collect()  # the last copy: the error of a failed trace holds it in a cycle
        memo: dict[int, Any] = {}
        optimizer = self.optimizer
        try:
            model = copy.deepcopy(self.model, memo)
            optimizer = copy.deepcopy(optimizer, memo) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        except Exception as err:
            raise TypeError(
                f"gr.diagnose trains a deep copy, and copying failed ({type(err).__name__}: {err}); give a model that "
                "copy.deepcopy takes, before it has run, and a function that makes the optimizer"
            ) from err
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(model.parameters())
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError("gr.diagnose: LBFGS calls the model by itself; take another optimizer for the diagnosis")
        for group in [] if optimizer is None else optimizer.param_groups:
            group.update(self.settings)
        return model, optimizer


class _Run:
    """One training of a copy: its forwards, backwards and updates, and the evidence.

    An observed model is one graph with its loss, as far as that can be traced; a policy that is tried is one of the
    model alone.
    """

    def __init__(
        self,
        trainer: _Trainer,
        model: nn.Module,
        policy: Policy,
        optimizer: torch.optim.Optimizer | None,
        *,
        fullgraph: bool,
    ) -> None:
        self.losses: list[float] = []
        self._trainer, self._model, self._loss, self._fullgraph = trainer, model, trainer.loss, fullgraph
        self._policy, self._monitor = policy, Monitor(trainer.steps)
        self._is_observed, self._optimizer = policy is observe, optimizer
        self._watch: UpdateWatch | None = None
        if self._is_observed and optimizer is not None:
            self._watch = UpdateWatch(model, optimizer, measures=not math.isnan(trainer.clip))
        self._began = began_with(model) if self._is_observed else {}
        self._update: Cause | None = None  # in the last one
        self._sizes: dict[int, float] = {}
        self._plain: list[Step] = []  # where nothing can be traced
        self._failure: NonFiniteError | None = None
        self._remarks: list[str] = []
        self._targets, self._classes = Targets(), Classes()
        self._has_classes = False  # a traced loss has classes for targets
        self._num_searched = 0  # graphs
        self._constant = math.nan  # of a loss in the graph
        self._random: RandomState | None = None  # before the last step
        self._step = trainer.loss.step
        self._in_graph = False
        if fullgraph and self._is_observed and self._step is not None:
            try:
                self._step.add_to(model)
                self._in_graph = True
            except (TypeError, ValueError) as err:  # a class without subclasses, a forward without a signature
                self._remarks.append(_beside(err))
        self.rewritten = self._rewritten()

    def _rewritten(self) -> RewrittenModule:
        policy: Policy = observe_model if self._in_graph else self._policy
        methods = (METHOD,) if self._in_graph else ()
        rewritten = transform(self._model, policy, fullgraph=self._fullgraph, monitor=self._monitor, methods=methods)
        if self._is_observed:
            self._state_of(rewritten).serve_framework()
        if self._trainer.compile:
            rewritten.compile()
        return rewritten

    @staticmethod
    def _state_of(rewritten: RewrittenModule) -> ModelState:
        state = state_of(rewritten)
        assert state is not None
        return state

    def _leave_graph(self, reason: Exception | str) -> None:
        """Compute the loss beside the graph from now on, with a remark."""
        self._remarks.append(_beside(reason))
        count = state_dict(self.rewritten)  # of the updates
        restore(self.rewritten)
        self._in_graph = False
        self.rewritten = self._rewritten()
        load_state_dict(self.rewritten, count)

    @property
    def graph(self) -> JointGraph | None:
        """The largest graph."""
        joint = self._state_of(self.rewritten).session.graphs.joint
        return None if joint is None else shown(joint, self._model)

    def step(self, batch: Any) -> bool:
        """Run a forward and a backward; return whether the step is finite."""
        self._model.zero_grad()
        self._random = RandomState.now([*self._model.parameters()]) if self._is_observed else None
        value = self._value(batch)
        value.backward()
        self.losses.append(float(value.detach()))
        real = [t.detach() for t in tensors_in(batch) if t.is_floating_point()]
        finite = [t[torch.isfinite(t)].abs() for t in real]
        if sizes := [float(t.max()) for t in finite if t.numel()]:
            self._sizes[len(self.losses) - 1] = max(sizes)
        if self._is_observed and not self._record_plainly():
            self.rewritten.monitor.log("loss", self.losses[-1])
        self._search_classes()
        if self._has_classes:
            self._classes.count(batch)
        if not self._is_observed:
            return math.isfinite(self.losses[-1]) and has_finite_gradients(self._model)
        return not _is_bad(self.recorded, self.losses[-1])

    @property
    def recorded(self) -> Sequence[Step]:
        """The steps; of a model without a graph those of its gradients."""
        return self._plain or self.rewritten.monitor.steps()

    def _record_plainly(self) -> bool:
        """Record the gradients of a step without a graph; return whether it is one."""
        if self._num_graphs and not self._plain:
            return False
        if not self._plain:
            self._remarks.append("Nothing of the model can be traced: its loss, gradients and updates are judged.")
        step = len(self.losses) - 1
        self._plain.append(Step(step, {"loss@run": self.losses[-1], **_figures_of(self._model)}))
        return True

    def update(self) -> bool:
        """Make an update, if any; return whether its results are finite."""
        if self._optimizer is None:
            return True
        if self._watch is None:
            self._optimizer.step()
            return True
        self._watch.before()
        self._optimizer.step()
        self._update = self._watch.after(len(self.losses) - 1)
        return self._update is None

    def _value(self, batch: Any) -> Tensor:
        if self._in_graph and self._num_graphs > _MOST_GRAPHS:
            self._leave_graph(f"it was traced anew {self._num_graphs} times, as one with a counter is")
        if self._in_graph:
            assert self._step is not None
            try:
                args, kwargs = self._step.arguments(self._model, batch)
                return self._loss.checked(getattr(self.rewritten, METHOD)(*args, **kwargs))
            except Exception as err:  # a graph break; or the user's own, which comes again below
                self._leave_graph(err)
        return self._loss(self.rewritten, batch, self._targets)

    @property
    def _num_graphs(self) -> int:
        return len(self._state_of(self.rewritten).session.graphs)

    def _search_classes(self) -> None:
        """Search the new graphs for a loss of classes."""
        if self._in_graph and not self._has_classes and self._num_graphs > self._num_searched:
            self._num_searched = self._num_graphs
            graphs = self.rewritten.explain().graphs
            self._has_classes = any(site.op == "cross_entropy" for graph in graphs for site in graph.sites)

    def explain(self, batch: Any) -> None:
        """Find the op behind the last, non-finite step."""
        if not self._is_observed:
            return
        remark = ""
        if self._plain:
            self._failure = _failure_of(self._model, len(self.losses) - 1)
        else:
            self._failure, remark = last_failure(self.rewritten.monitor)
        self._remarks += [remark] if remark else []
        if self._step is not None and not self._in_graph and not self._plain:
            try:
                self._failure = failure_in_step(self._failure, self._model, self._step, batch, self._random)
            except Exception as err:  # of any kind: the step is not finite by its records
                text = f"{type(err).__name__}: {first_line(err)}"
                self._remarks.append(f"The step could not be run again with its loss ({text}).")
        if self._failure is not None:
            name_break(self._failure, self.rewritten.explain().skipped)
            run = partial(self._loss, self._model, batch, Targets())
            self._remarks += searched(self._failure, self._model, run, batch, self._random)
            for name in self._began:
                known, ended = f" {name} was not finite already", self._failure.cause.partition(":")[0]
                if ended.endswith(known):
                    self._failure.cause = f"{ended} when the run began"

    def remedies(self, batch: Any, following: Sequence[Any]) -> tuple[Remedy, ...]:
        """Return the rules that mend the last step, or leave it out, as tried on the model as it is now."""
        restore(self.rewritten)
        is_hidden = math.isfinite(self.losses[-1])  # in the forward
        if (
            is_hidden
            and self._random is not None
            and self._is_finite(batch, _evaluated(f"[\n{KEEP_ZEROS.rule}\n]"), self._random)
        ):
            return (KEEP_ZEROS,)
        goes_on = any(self._is_finite(one, []) for one in following)
        return (SKIP,) if goes_on else ()

    def _is_finite(self, batch: Any, policy: Policy, random: RandomState | None = None) -> bool:
        """Return whether loss and gradients of a batch are finite with a policy."""
        self._model.zero_grad()
        rewritten = transform(self._model, policy, fullgraph=False, monitor=Monitor())
        self._state_of(rewritten).serve_framework()
        try:
            if random is not None:
                random.restore()
            value = self._loss(rewritten, batch, Targets())
            value.backward()
            return math.isfinite(float(value.detach())) and has_finite_gradients(self._model)
        except TraceError:  # it cannot be tried, as in a loss that differentiates the model again
            return False
        finally:
            restore(rewritten)

    def look(self, batch: Any) -> frozenset[str]:
        """Run the last step eagerly; return the recurrent modules."""
        targets, loss = Targets(), self._loss

        def run() -> None:
            args, kwargs = arguments_of(self._model, batch, has_loss=loss.loss is not None)
            if loss.compute_loss is not None:
                with targets:
                    loss.compute_loss(self._model, *args, **kwargs)
            elif self._has_classes:
                loss(self._model, batch, targets)
            else:
                self._model(*args, **kwargs)

        found = _recurrent(self._model, run)
        if self._has_classes:
            self._constant = targets.constant_loss_over(self._classes, batch)
        return found

    def evidence(self, recurrent: frozenset[str]) -> Evidence:
        """Return the evidence beside the records."""
        sites = {str(site): site for graph in self.rewritten.explain().graphs for site in graph.sites}
        remarks = (*_remarks(self.rewritten), *self._remarks)
        constant = self._constant if self._has_classes else self._targets.constant_loss
        found = Evidence(sites, self._failure, self._sizes, self._optimizer is not None, recurrent, remarks, constant)
        found = replace(found, update=self._update)
        clip = self._trainer.clip
        if math.isnan(clip):
            return found
        if self._watch is None or not self._watch.may_clip:
            return replace(found, remarks=(*remarks, _no_clip(clip, is_trained=self._watch is not None)))
        return replace(found, clip=clip, used=self._watch.norms)


@leave_out_unsupported
def observe(site: Site) -> list[Any] | None:
    """Record all that the judge reads; no policy of the user's."""
    if site.kind == "activation" and site.op in _SATURATING | _RECTIFIERS:
        return [passes.Observe("saturated" if site.op in _SATURATING else "zeros")]
    is_hidden_state = site.iteration is not None and site.op == "h"  # of a recurrent layer, at each time step
    if site.kind == "error" and (site.output_of or is_hidden_state or site.dtype == torch.float16):
        return [passes.Observe("norm", "zeros")]
    if site.kind == "gradient":
        return [passes.Observe("norm", "zeros"), passes.CheckFinite("record")]
    return None


@leave_out_unsupported
def observe_model(site: Site) -> list[Any] | None:
    """Record the judge's figures of a model, without its loss."""
    return None if site.is_outside and site.kind in ("activation", "error") else observe(site)


def _figures_of(model: nn.Module) -> dict[str, float]:
    """Return the figures of all gradients by address."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            numbers = parameter.grad.detach()
            numbers = numbers.to_dense() if numbers.is_sparse else numbers
            found[f"norm@gradient:{name}"] = float(numbers.double().norm())
            found[f"zeros@gradient:{name}"] = float((numbers == 0).double().mean())
            found[f"nonfinite@gradient:{name}"] = float(torch.isfinite(numbers).logical_not().sum())
    return found


def _failure_of(model: nn.Module, step: int) -> NonFiniteError | None:
    """Return the failure of a step without a graph, at the first non-finite gradient, or the first of all."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    bad = [(name, g) for name, g in named if not is_finite(g)]
    if not named:
        return None
    name, gradient = (bad or named)[0]
    share = 100.0 * float(torch.isfinite(gradient.to_dense()).logical_not().double().mean())
    site = Site("gradient", name, shape=tuple(gradient.shape), dtype=gradient.dtype, device=gradient.device)
    others = [Site("gradient", other) for other, _ in bad[1:]]
    failure = NonFiniteError(site, step=step, percent=share, others=others, is_from_outside=True)
    failure.story = Story(parameter=name)
    return failure


def _is_bad(recorded: Sequence[Step], loss: float) -> bool:
    """Whether the last step is not finite; expected infinities and errors that reach no gradient do not count."""
    run = last_run(recorded)
    last = bad_steps(run)[-1:]
    is_bad = any(one.step is run.steps[-1] and not is_in_errors_alone(run, one) for one in last)
    return is_bad or not math.isfinite(loss)


def has_finite_gradients(model: nn.Module) -> bool:
    """Return whether the gradients of all parameters are finite."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return all(bool(torch.isfinite(g.coalesce().values() if g.is_sparse else g).all()) for g in gradients)


def last_failure(monitor: Monitor) -> tuple[NonFiniteError | None, str]:
    """Return the failure of the last step, or else a remark why its replay found none."""
    try:
        return monitor.failure(anywhere=True), ""
    except RuntimeError as err:
        return None, f"The step that is not finite could not be replayed: {err}."


def _recurrent(model: nn.Module, run: Callable[[], None]) -> frozenset[str]:
    """Return the modules with a second call that reads the result of the first, by an eager forward."""
    returned: dict[str, set[Any]] = {}
    found = set()

    def look(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name in returned:
                todo, seen = [t.grad_fn for t in tensors_in((args, kwargs))], set()
                while todo and returned[name]:
                    node = todo.pop()
                    if node in returned[name]:
                        found.add(name)
                    elif node is not None and node not in seen:
                        seen.add(node)
                        todo += [before for before, _ in node.next_functions]
                returned[name].clear()
            else:
                returned[name] = {t.grad_fn for t in tensors_in(output) if t.grad_fn is not None}

        return hook

    handles = [module.register_forward_hook(look(name), with_kwargs=True) for name, module in model.named_modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return frozenset(found)


def failure_in_step(
    failure: NonFiniteError | None, model: nn.Module, step: TrainingStep, batch: Any, random: RandomState | None
) -> NonFiniteError | None:
    """Locate a failure by another run, with the loss traced.

    Args:
        failure: The failure by a replay, returned where an op of the model made the value; None where none was found.
        model: The plain model, with the values of the step.
        step: The step.
        batch: Its batch.
        random: The random state before it.
    """
    if failure is not None and not failure.is_from_outside:
        return failure
    args, kwargs = step.arguments(model, batch)
    found, skipped = locate_in_step(model, step, args, kwargs, random)
    if found is not None and failure is not None:
        found.step, found.update, found.micro_batch = failure.step, failure.update, failure.micro_batch
    found = found or failure
    if found is not None:
        name_break(found, skipped)
    return found


def _remarks(model: RewrittenModule) -> tuple[str, ...]:
    parameters = dict(model.named_parameters())
    unused = [name for name, p in parameters.items() if p.requires_grad and p.grad is None]
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    found = [f"{_named(unused)} {_UNREAD}"] if unused else []
    found += [f"{_named(frozen)} are frozen (requires_grad=False)."] if frozen else []
    found += [f"Not seen by the tracer, and not judged: {line}." for line in model.explain().skipped]
    return tuple(found)


def _no_clip(clip: float, *, is_trained: bool) -> str:
    if not is_trained:
        return f"clip={clip:g} was not compared: without optimizer= nothing is updated."
    return (
        f"clip={clip:g} was not compared: gr.diagnose calls optimizer.step() itself, and this optimizer has neither a "
        f"step pre-hook nor a step of its own that clips; monitor.diagnose(clip={clip:g}) judges a training of yours."
    )


def _beside(reason: Exception | str) -> str:
    """Return the remark on a loss beside the graph; of a graph break with its line."""
    text = first_line(reason) if isinstance(reason, Exception) else reason
    if isinstance(reason, GraphBreakError) and (line := _BROKEN_LINE.search(str(reason))):
        text = f"{line[1]}: {text.partition(': ')[2]}"
    return f"The loss is computed beside the graph: {text.rstrip('.')}."


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
