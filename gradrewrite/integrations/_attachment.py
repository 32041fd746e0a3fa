"""Attachment of a policy to a model and its optimizers, for the callbacks of all frameworks."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn

from gradrewrite._diagnosis import with_line
from gradrewrite._locate import name_break
from gradrewrite._utils.exponent_counts import split_exponents
from gradrewrite._utils.warnings import warn
from gradrewrite.auditing.findings import Audit
from gradrewrite.auditing.verdicts import STEPS, audit_step
from gradrewrite.backends.model_state import state_of
from gradrewrite.backends.state_dict import load_state_dict, state_dict
from gradrewrite.backends.traced_step import TrainingStep
from gradrewrite.diagnosing.failed_steps import failure_in_step, last_failure
from gradrewrite.diagnosing.observation import observe
from gradrewrite.diagnostics.health import Health, examine
from gradrewrite.diagnostics.judge import Evidence
from gradrewrite.diagnostics.nonfinite_steps import first_bad_step, harmful_steps, skips_updates
from gradrewrite.diagnostics.run_log import last_run
from gradrewrite.diagnostics.stacked_records import summed_up
from gradrewrite.diagnostics.used_gradients import used_norms
from gradrewrite.distributed.groups import this_rank
from gradrewrite.errors import NonFiniteError
from gradrewrite.integrations._figures import log_histograms, main_figures
from gradrewrite.integrations._run_files import RunFiles
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import OnFailure
from gradrewrite.module import restore, shown, transform
from gradrewrite.monitoring.monitor import Monitor, note_failure, recorder_of, steps_since
from gradrewrite.monitoring.writers import ClipRates
from gradrewrite.optimizer.guard import guard, unguard
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.rules import ask, step_site
from gradrewrite.replay.step_snapshot import RandomState

logger = logging.getLogger("gradrewrite.integrations")

T = TypeVar("T")

_CLIPS = (ClipByGlobalNorm, ClipByNorm, ClipByValue)
_MOST_EXPLAINED = 3  # losses, each by a run that is traced anew
_LOSS = (RecordKey.of("loss", "run"),)
UNEXPLAINED = "the step could not be run again to explain it"


@dataclass(frozen=True)
class Settings:
    """The common arguments of the callbacks of all frameworks."""

    policy: Policy
    compile: bool | Mapping[str, Any] | None
    records: str | Sequence[str] | None
    folder: bool | str | PathLike[str]
    options: Mapping[str, Any]
    of_guards: Mapping[str, Any] = field(default_factory=dict)
    audit: bool | None = None  # None: of a diagnosis

    def __post_init__(self) -> None:
        if isinstance(self.policy, str) and self.policy != "diagnose":
            raise ValueError(
                f'RewriteCallback: the only policy with a name is "diagnose", which observes, got {self.policy!r}; '
                "give a rule (gr.on(pattern, action)), a callback or a list of them"
            )

    @property
    def is_diagnosis(self) -> bool:
        """Whether the training is observed only."""
        return self.policy == "diagnose"

    @property
    def audits(self) -> bool:
        """Whether the first training step is audited."""
        return self.is_diagnosis if self.audit is None else self.audit


class Attachment:
    """A policy on a model and its optimizers while a framework trains; see the callbacks for the arguments."""

    def __init__(self, settings: Settings, monitor: Monitor | None) -> None:
        self.monitor = Monitor() if monitor is None else monitor
        self.graph: JointGraph | None = None
        self._judged: tuple[Health, str] | None = None  # what ``examine`` returned when the last training ended
        self._settings = settings
        self._policy: Policy = observe if settings.is_diagnosis else settings.policy
        records = settings.records
        self._patterns = (records,) if isinstance(records, str) else None if records is None else tuple(records)
        self._model: nn.Module | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._files = RunFiles(None, self.monitor)
        self._losses: deque[Tensor | float] = deque(maxlen=1000)  # of micro-batches that have no record yet
        self._num_rows = 0  # records when the last loss was logged
        self.audited: Audit | None = None  # the first step of the last training
        self._has_audited = False
        self._one_optimizer: torch.optim.Optimizer | None = None  # of the training; None if it has several
        self._num_explained = 0  # losses that are not finite
        self._was_told_of_clipping = False
        self.clip = math.nan  # the global norm to which the framework clips
        self._num_logged = 0  # steps
        self._loaded: Mapping[str, Any] | None = None  # for the next model
        self._last: dict[str, Any] = {}  # of the last one
        self._first_failure: NonFiniteError | None = None  # of the first step that was not finite
        self._scaler: torch.amp.GradScaler | None = None
        self._was_bad = False  # the last step was not finite

    def attach(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None,
        folder: str | PathLike[str],
        *,
        is_resumed: bool,
    ) -> None:
        """Detach the last model, rewrite this one in place, guard the optimizers, and begin the files of the run."""
        self.detach()
        left = state_of(model)
        if left is not None and left.config.in_framework:  # by a training that failed
            restore(model)
            for optimizer in optimizers:
                unguard(optimizer)
        try:
            self._attach(model, optimizers, {"loss_scale": scaler, **self._settings.options})
            self._scaler = scaler
        except BaseException:
            self.detach()
            raise
        chosen = self._settings.folder
        path = None if chosen is False else Path(folder if chosen is True else chosen)
        self._files = RunFiles(path, self.monitor, is_resumed)
        self._num_rows = self._num_logged = self._files.first_step
        self._losses.clear()
        self.graph = self._judged = self._first_failure = self.audited = None
        self._has_audited = self._was_bad = False
        self._num_explained = 0
        self._one_optimizer = optimizers[0] if len(optimizers) == 1 else None
        atexit.register(self._end_at_exit)

    def _attach(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: Mapping[str, Any]
    ) -> None:
        rewritten = transform(model, self._policy, monitor=self.monitor, inplace=True, **options)
        self._model = model
        state = state_of(rewritten)
        assert state is not None
        state.serve_framework()
        if self._loaded is not None:
            load_state_dict(rewritten, self._loaded)
            self._loaded = None
        compile = not self._settings.is_diagnosis if self._settings.compile is None else self._settings.compile
        if compile is not False:
            state.compile({} if compile is True else compile)
        for optimizer in () if self._settings.is_diagnosis else optimizers:
            guard(optimizer, rewritten, **self._settings.of_guards)
            self._optimizers.append(optimizer)

    def detach(self) -> None:
        """Let model and optimizers be plain again; keep the graph for drawing."""
        atexit.unregister(self._end_at_exit)
        self._last = self.state_dict()
        for optimizer in self._optimizers:
            unguard(optimizer)
        self.graph = self._graph()
        if self._model is not None and state_of(self._model) is not None:
            restore(self._model)
        self._model, self._optimizers, self._one_optimizer = None, [], None

    def end(self, error: BaseException | None = None) -> None:
        """Judge an ended training, write its page, and detach.

        Args:
            error: The error that ended it, if any.
        """
        if self._model is None:
            return
        self._files.end()
        try:
            if this_rank() in (None, 0) or error is not None:
                self._conclude(error)
        except Exception as err:  # of the judge: the training is as good without it
            warn(f"RewriteCallback: the training could not be judged ({type(err).__name__}: {err})")
        finally:
            self.detach()

    def _end_at_exit(self) -> None:
        """End a failed training at the exit of the program."""
        self.end(vars(sys).get("last_value"))

    def _conclude(self, error: BaseException | None) -> None:
        health, cause = self.examine(error)
        if error is not None and not health.run.steps:
            return  # it never began
        has_failed = error is not None or health.verdict.outcome == "non-finite"
        self._judged = health, cause
        page = self.report()
        if has_failed:
            how = "values that are not finite" if error is None else type(error).__name__
            parts = [f"The training ended with {how}.", str(health), cause or str(error or "")]
            page = self._files.diagnose("\n\n".join(filter(None, parts))) or page
        level = logging.WARNING if has_failed else logging.INFO
        logger.log(level, "%s%s", health.verdict.headline, f": see {page}" if page else f". {health.verdict.text}")

    def examine(self, error: BaseException | None = None) -> tuple[Health, str]:
        """Return the health of the training so far, and the known cause of a non-finite last step."""
        steps = self._files.steps()
        failure = error if isinstance(error, NonFiniteError) else None
        run, remark = last_run(steps), ""
        first = first_bad_step(run, skips=self._scaler is not None) if run.steps else None
        if self._first_failure is not None and first is not None and self._first_failure.step == first.step:
            failure = self._first_failure
        elif failure is None and first is not None and first is run.steps[-1]:
            failure, remark = last_failure(self.monitor)
        state = state_of(self._model)
        graphs = state.session.graphs.explanation().graphs if state is not None else ()
        sites = {str(site): site for graph in graphs for site in graph.sites}
        audited = () if self.audited is None else tuple(map(with_line, self.audited.causes))
        clip = self.clip if used_norms(run) else math.nan
        evidence = Evidence(sites, failure, remarks=(remark,) if remark else (), audited=audited, clip=clip)
        return examine(steps, evidence=evidence), "" if failure is None else str(failure)

    @property
    def health(self) -> Health:
        """The verdict on the last training, or on the current one so far."""
        return (self._judged or self.examine())[0]

    def report(self) -> str:
        """Write the page of the training so far; return its path."""
        health, cause = self._judged or self.examine()
        graph = self._graph()
        title = "training" if graph is None else f"training of {graph.name}"
        return self._files.report(health, title, graph, cause, self.audited)

    def _graph(self) -> JointGraph | None:
        state = state_of(self._model)
        joint = None if state is None else state.session.graphs.joint
        return self.graph if state is None or joint is None else shown(joint, state.original)

    @property
    def awaits_audit(self) -> bool:
        """Whether the next step is the one that is audited."""
        return self._settings.audits and not self._has_audited and self._model is not None

    def audit(self, step: TrainingStep, batch: Any) -> None:
        """Audit a training step, and log one line; of several processes the structural half alone."""
        self._has_audited = True
        state = state_of(self._model)
        assert state is not None
        plain, optimizer = state.original, self._one_optimizer
        try:
            args, kwargs = step.arguments(plain, batch)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the model: the training says them again
                number = STEPS if this_rank() is None else 0
                found = audit_step(plain, args, kwargs, step.function(plain), optimizer, steps=number)
        except Exception as err:  # of any kind: the training goes on
            warn(f"RewriteCallback: the first step could not be audited ({type(err).__name__}: {err})")
            return
        self.audited = found
        if this_rank() in (None, 0):
            line = " ".join([found.headline, *(cause.text for cause in map(with_line, found.causes))])
            logger.log(logging.WARNING if found.causes else logging.INFO, "Audit: %s", line)

    def random_state(self) -> RandomState:
        """Return the random state of the CPU, and of the device of the model."""
        return RandomState.now([] if self._model is None else [next(self._model.parameters(), None)])

    def explain(self, error: NonFiniteError, step: TrainingStep, batch: Any, random: RandomState) -> None:
        """Name the op of the loss in the last step's error."""
        state = state_of(self._model)
        found = None if state is None else failure_in_step(error, state.original, step, batch, random)
        if found is not None and found is not error:
            error.args = found.args
            vars(error).update(vars(found))

    def is_first_bad(self, is_finite: bool) -> bool:
        """Return whether the last step is the first that is not finite, and is to be explained before its update.

        Nothing waits for the device without a new record of a check. Where such steps are skipped, as by a GradScaler,
        which makes them on purpose, it is the first of the last ones in a row.

        Args:
            is_finite: Whether the loss is.
        """
        was_bad, self._was_bad = self._was_bad, not is_finite or self._last_is_bad()
        if was_bad or not self._was_bad or self._model is None or self._num_explained >= _MOST_EXPLAINED:
            return False
        self._num_explained += 1
        return self._is_first_bad()

    def explain_first(self, repeated: Callable[[], tuple[TrainingStep, Any, RandomState]] | None = None) -> None:
        """Find the op behind the last step.

        Args:
            repeated: Returns the step, its batch and its random state, to run it again with the loss; None if it
                cannot be.
        """
        state = state_of(self._model)
        assert state is not None
        failure = last_failure(self.monitor)[0] if self._has_new_record else None
        self._first_failure = failure  # which it stays, if the run fails
        if repeated is not None:
            step, batch, random = repeated()
            found = failure_in_step(failure, state.original, step, batch, random)
            if failure is None and found is not None:
                found.step = found.update = self._number
            self._first_failure = found
        elif failure is not None:
            name_break(failure, state.session.graphs.explanation().skipped)
        self._note_failure()

    @property
    def _has_new_record(self) -> bool:
        """Whether the last backward has a record, and not its update alone."""
        return recorder_of(self.monitor).num_steps > self._num_rows

    @property
    def _number(self) -> int:
        """The number of the last backward, with or without a record."""
        return recorder_of(self.monitor).num_steps - self._has_new_record

    def _is_first_bad(self) -> bool:
        """Return whether the records before the last step are finite, or belong to skipped updates."""
        before = [step for step in steps_since(self.monitor, self._files.first_step) if step.step < self._number]
        if self._scaler is not None or not before:
            return True
        run = last_run(before)
        is_over = skips_updates(run) and all(one.step is not before[-1] for one in harmful_steps(run))
        return is_over or first_bad_step(run) is None

    def _note_failure(self) -> None:
        """Add the first failure to the record of its step, once it is there."""
        records, failure = recorder_of(self.monitor).records, self._first_failure
        if failure is not None and records and records[-1].step == failure.step:
            note_failure(self.monitor, failure)

    def _last_is_bad(self) -> bool:
        """Return whether the last backward has a failed check, or, on the CPU, a norm that is not finite."""
        if not self._has_new_record:
            return False
        record = recorder_of(self.monitor).records[-1]
        if record.is_checked(get_args(OnFailure)):
            record.fetch()
            if record.has_failed(get_args(OnFailure)):
                return True
        return record.has_bad_norms()

    def add_loss(self, loss: Tensor | float) -> None:
        """Take the loss of a micro-batch, for its next record."""
        self._losses.append(loss.detach().clone() if isinstance(loss, Tensor) else loss)

    def log_loss(self) -> None:
        """Log the mean loss since the last record.

        Nothing is logged without a new record, or where the user has logged its loss.
        """
        self._files.begin()
        recorder = recorder_of(self.monitor)
        with recorder.lock:
            if not self._losses or recorder.num_steps == self._num_rows:
                return
            self._num_rows = recorder.num_steps
            if _LOSS not in recorder.records[-1].late:
                self.monitor.log("loss", sum(self._losses) / len(self._losses))
            self._note_failure()
        self._losses.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return ``gr.state_dict`` of the model, or of the last one; empty before the first."""
        if self._loaded is not None:
            return dict(self._loaded)
        if state_of(self._model) is not None:
            return state_dict(self._model)
        return self._last

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into the current model, or else into the next."""
        if state_of(self._model) is not None:
            load_state_dict(self._model, state)
        elif state:
            self._loaded = state

    @property
    def has_states(self) -> bool:
        """Whether an action of the model has a state or follows a schedule."""
        state = state_of(self._model)
        return state is not None and state.config.states.is_used

    def figures(self) -> dict[str, float]:
        """Return the main figures, or else the chosen records; waits for the device.

        Records have the tags of TensorBoard (``record/site``). ``rate/site`` is the share of the steps since the last
        call in which a clip acted. Exponents are no figures: chosen ones become histograms of a wandb run, if there is
        one.
        """
        clips = ClipRates()
        steps = steps_since(self.monitor, self._num_logged)
        for step in steps:
            clips.add(step)
        self._num_logged = recorder_of(self.monitor).num_steps
        self._files.write()
        rates = clips.take()
        if self._patterns is None:
            return main_figures(steps, rates) if steps else {}
        rows = (summed_up(step.records, step.stacks) for step in steps)
        records = {key: value for row in rows for key, value in row.items()}  # the last one of each
        latest, exponents = split_exponents(records | rates)
        log_histograms({tag: counts for tag, counts in _tagged(exponents) if self._is_chosen(tag)})
        return {tag: value for tag, value in _tagged(latest) if self._is_chosen(tag)}

    def _is_chosen(self, tag: str) -> bool:
        return any(fnmatchcase(tag, pattern) for pattern in self._patterns or ())

    def note_own_clipping(self, setting: str, bound: float | Tensor | None) -> None:
        """Warn once where the framework clips gradients as well; the policy's clips are known after the first step."""
        if self._was_told_of_clipping or not bound or self._model is None:
            return
        self._was_told_of_clipping = True
        state = state_of(self._model)
        graphs = state.session.graphs if state is not None else ()
        answers = [(edit.site, edit.action) for graph in graphs for edit in graph.edits]
        for name, parameter in self._model.named_parameters():
            site = step_site(name, parameter)
            answers += [(site, action) for action in ask(self._policy, site)]
        clips = [(site, action) for site, action in answers if isinstance(action, _CLIPS)]
        if clips:
            warn(
                f"{clips[0][0]}: {clips[0][1]!r} clips, and {setting} clips the gradients of all parameters as "
                "well. Leave one of the two"
            )


def _tagged(records: Mapping[str, T]) -> list[tuple[str, T]]:
    """Return records by their tags of TensorBoard."""
    return [(address.replace("@", "/", 1), value) for address, value in records.items()]


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Warn of an error inside: the training goes on, or has an error of its own."""
    try:
        yield
    except Exception as err:  # of any kind
        warn(f"RewriteCallback: {what} ({type(err).__name__}: {err})")


class Attached:
    """Properties and methods of the callbacks of all frameworks."""

    _attachment: Attachment

    @property
    def monitor(self) -> Monitor:
        """The monitor, with the records of the backward passes."""
        return self._attachment.monitor

    @property
    def graph(self) -> JointGraph | None:
        """The rewritten graph of the last training, for ``viz.draw``; of several the largest, None before the first."""
        return self._attachment.graph

    @property
    def health(self) -> Health:
        """The verdict on the last training, or on the current one so far; ``print`` shows it."""
        return self._attachment.health

    def report(self) -> str:
        """Write the page of the training so far, and return its path; ``""`` where none is written."""
        return self._attachment.report()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model's actions, or the last; see ``gr.state_dict``."""
        return self._attachment.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state into the trained model, or into the next one."""
        self._attachment.load_state_dict(state_dict)
