"""Trainings of copies of one model, from the same start."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from gradrewrite._locate import first_line
from gradrewrite._utils.progress import current_progress
from gradrewrite._utils.tensors import kept_random_state
from gradrewrite.auditing.findings import Audit
from gradrewrite.auditing.verdicts import audit_step
from gradrewrite.backends.traced_step import arguments_of
from gradrewrite.diagnosing.observation import observe
from gradrewrite.diagnosing.step_loss import StepLoss
from gradrewrite.diagnosing.training_run import TrainingRun
from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.judge import Evidence
from gradrewrite.diagnostics.run_log import Step
from gradrewrite.diagnostics.trials import Trial
from gradrewrite.errors import GraphBreakError, NotRewrittenError, RewriteWarning
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.optimizer.guard import guard
from gradrewrite.policy.actions import Policy

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
_MOST_FOLLOWING = 3  # batches behind a step that is not finite, to tell whether skipping it helps


@dataclass
class TrainedCopies:
    """Trains copies of one model from the same start."""

    model: nn.Module
    loss: StepLoss
    optimizer: MakeOptimizer | torch.optim.Optimizer | None
    steps: int
    compile: bool
    clip: float = math.nan  # to which the optimizer clips
    graph: JointGraph | None = None  # of the training that was observed
    failed: tuple[TrainingRun, Any, list[Any]] | None = None  # with the batch that is not finite, and those behind it
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
        run = TrainingRun(self, model, policy, optimizer, fullgraph=fullgraph)
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


def _kept(batches: Iterable[Any], seen: list[Any]) -> Iterator[Any]:
    """Yield batches, and keep them in a list."""
    for batch in batches:
        seen.append(batch)
        yield batch
