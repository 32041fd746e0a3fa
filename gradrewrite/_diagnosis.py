"""``diagnose``: train a copy of a model for some steps, and name its faults and their remedies."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradrewrite import passes
from gradrewrite._locate import first_line
from gradrewrite._utils.progress import show_progress
from gradrewrite._utils.tensors import kept_random_state
from gradrewrite.auditing.findings import Audit
from gradrewrite.backends.traced_step import ComputeLoss
from gradrewrite.diagnostics.causes import Cause, Outcome
from gradrewrite.diagnostics.health import Health, examine, without_rules
from gradrewrite.diagnostics.trials import Trial, lines_of
from gradrewrite.diagnostics.used_gradients import checked_clip
from gradrewrite.errors import TraceError
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.module import RewrittenModule
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.numbers import python_number
from gradrewrite.policy.rules import on

if TYPE_CHECKING:
    from gradrewrite.viz import Report
from gradrewrite.diagnosing.observation import observe
from gradrewrite.diagnosing.step_loss import Loss, StepLoss
from gradrewrite.diagnosing.suggested_rules import evaluated, on_one_line, policy_code
from gradrewrite.diagnosing.trained_copies import MakeOptimizer, TrainedCopies
from gradrewrite.diagnosing.training_run import UNREAD

AS_IT_IS, GLOBAL_CLIP, SUGGESTED = "as it is", "global clip", "suggested policy"
GLOBAL_BOUND = 1.0  # of the global clip that is tried, as most trainings have it


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
    train = TrainedCopies(model, StepLoss(loss, compute_loss), optimizer, number, compile=compile, clip=bound)
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
        kept = (text for text in evidence.remarks if not (is_said and text.endswith(UNREAD)))
        evidence = replace(evidence, audited=faults, remarks=(*kept, *remarks))
        health = examine(recorded, evidence=evidence)
        trials, health = _trials(train, stream, losses, health) if try_clips else ({}, health)
    verdict = health.verdict
    texts = verdict.outcome, verdict.causes, verdict.remarks, verdict.text, policy_code(health)
    return Diagnosis(*texts, trials, health, train.graph, audited)


def _trials(
    train: TrainedCopies, batches: Iterable[Any], losses: Trial, health: Health
) -> tuple[dict[str, Trial], Health]:
    """Return the trials, and the judgement without useless rules."""
    trials = {AS_IT_IS: Trial(losses, is_bad=health.verdict.outcome == "non-finite")}
    eps = next((c.figures["suggested_eps"] for c in health.verdict.causes if "suggested_eps" in c.figures), None)
    policy = policy_code(health)
    wanted: list[tuple[str, Policy, dict[str, float]]] = [
        (GLOBAL_CLIP, on("gradient:*", passes.ClipByGlobalNorm(GLOBAL_BOUND)), {}),
        *([(f"eps={eps:g}", [], {"eps": eps})] if eps is not None else []),
        *([(SUGGESTED, evaluated(policy), {})] if policy else []),
    ]
    try:
        for name, own, settings in wanted:
            trials[name] = train.tried(batches, own, name, **settings)
    except TraceError as err:  # a loss that differentiates the model again is in no graph with a policy
        return trials, without_rules(health, f"No policy could be tried: {first_line(err).partition('. ')[0]}.")
    if policy and not trials[SUGGESTED].is_of_help(trials[AS_IT_IS], trials[GLOBAL_CLIP]):
        remark = f"Tried, and of no help, so that it is not suggested: {on_one_line(policy)}."
        return trials, without_rules(health, remark)
    return trials, health


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
