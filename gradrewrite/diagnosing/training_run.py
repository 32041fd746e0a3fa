"""One training of a copy: forwards, backwards, updates, and the evidence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradrewrite._locate import first_line, name_break, searched
from gradrewrite._utils.tensors import tensors_in
from gradrewrite.auditing.update_watch import UpdateWatch, began_with
from gradrewrite.backends.model_state import ModelState, state_of
from gradrewrite.backends.state_dict import load_state_dict, state_dict
from gradrewrite.backends.traced_step import METHOD, arguments_of
from gradrewrite.diagnosing.failed_steps import failure_in_step, has_finite_gradients, last_failure
from gradrewrite.diagnosing.observation import observe, observe_model
from gradrewrite.diagnosing.suggested_rules import evaluated
from gradrewrite.diagnostics.causes import Cause
from gradrewrite.diagnostics.constant_answers import Classes, Targets
from gradrewrite.diagnostics.judge import KEEP_ZEROS, SKIP, Evidence, Remedy
from gradrewrite.diagnostics.nonfinite_steps import bad_steps, is_in_errors_alone
from gradrewrite.diagnostics.run_log import Step, last_run
from gradrewrite.errors import GraphBreakError, NonFiniteError, Story, TraceError
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.module import RewrittenModule, restore, shown, transform
from gradrewrite.monitoring.monitor import Monitor
from gradrewrite.policy.actions import Policy
from gradrewrite.replay.observations import is_finite
from gradrewrite.replay.step_snapshot import RandomState
from gradrewrite.sites import Site

if TYPE_CHECKING:
    from gradrewrite.diagnosing.trained_copies import TrainedCopies

UNREAD = "got no gradient: nothing that reaches the loss reads them."
_NAMED = 5  # parameters in one remark
_BROKEN_LINE = re.compile(r'\n +([^"\n]+:\d+ ".*")\n')  # in the error of a graph break
_MOST_GRAPHS = 4  # of a model with its loss: a Python value that changes, as a counter, makes one a step


class TrainingRun:
    """One training of a copy: its forwards, backwards and updates, and the evidence.

    An observed model is one graph with its loss, as far as that can be traced; a policy that is tried is one of the
    model alone.
    """

    def __init__(
        self,
        trainer: TrainedCopies,
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
            and self._is_finite(batch, evaluated(f"[\n{KEEP_ZEROS.rule}\n]"), self._random)
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


def _remarks(model: RewrittenModule) -> tuple[str, ...]:
    parameters = dict(model.named_parameters())
    unused = [name for name, p in parameters.items() if p.requires_grad and p.grad is None]
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    found = [f"{_named(unused)} {UNREAD}"] if unused else []
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
