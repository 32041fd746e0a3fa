"""The oracle for users: a policy on one's own model, against eager hooks.

The plain model runs eagerly, and what it does is observed from outside: a ``TorchFunctionMode`` sees its torch-level
ops, hooks on the modules see their calls. From that the values are named by the rules that hold for rewritten graphs,
the policy is asked at the same sites, and its actions run as hooks of eager autograd. Neither the tracer nor the
rewriter takes part.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import inspect
import itertools
import math
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradrewrite._compat import aot_autograd, autograd, fake_tensors, inductor, nn_modules
from gradrewrite._eager_groups import EagerGroups
from gradrewrite._eager_reads import EagerReads
from gradrewrite._eager_recurrent import RECURRENT, run_recurrent
from gradrewrite._eager_step import EagerStep
from gradrewrite._eager_uses import EagerUse, EagerUses
from gradrewrite._utils.tensors import kept_random_state, tensors_in
from gradrewrite.backends.module_hooks import passes_through
from gradrewrite.errors import PolicyError, TraceError
from gradrewrite.instrumentation.module_names import InputNames
from gradrewrite.instrumentation.naming import name_values
from gradrewrite.instrumentation.probes import listen_to_taps
from gradrewrite.instrumentation.source_locations import user_line
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.reports import HostBound, Kept, Leaf, NormClip, StateUpdate, ValueClip, acting_bound, leaves
from gradrewrite.ir.values import ModuleCall, Value
from gradrewrite.module import RewrittenModule, transform
from gradrewrite.monitoring.host_copy import number_of
from gradrewrite.optimizer.guard import guard
from gradrewrite.policy.actions import Policy, describe
from gradrewrite.policy.insertions import (
    AverageOverRanks,
    Insertion,
    JudgeUpdate,
    KeepTensor,
    MeasureTensor,
    OtherValues,
    ReplaceTensor,
    group_effect,
    run_group,
)
from gradrewrite.policy.recording import Recording, recording
from gradrewrite.policy.rules import Answered, ask_in_order, patterns_of_uses, rules_at
from gradrewrite.policy.scope import needs_examples, needs_losses
from gradrewrite.policy.state_store import CarriedKeys, StateStore
from gradrewrite.rewriting.record_nodes import RecordNumbering
from gradrewrite.sites import AT_GUARD, Kind, Pattern, Site

__all__ = ["Comparison", "assert_inert", "assert_matches_eager"]

Loss = Callable[[Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_Register = Callable[[Callable[[Tensor], Tensor]], Any]  # of a hook
_Hookable = tuple[Site, _Register, Tensor]  # with the value that the site is of
_Key = tuple[Any, int]  # autograd node, or the tensor itself where there is none; output of the node

_SLACK = 10.0  # times the difference between plain torch.compile and eager mode
_LARGEST_PLAIN_ERROR = 1e-3
_NO_OPTIMIZER = (
    "{}: the actions of this rule run in optimizer.step(), and assert_matches_eager has no optimizer: give one, "
    "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), and its steps are compared too"
)
# Relative tolerances: one of the largest gradient, and one of each element.
TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of ``assert_matches_eager``.

    Attributes:
        acted: Sites at which actions were inserted, in the rewritten graph and in the eager model.
        changed: Those of them at which the actions changed the gradient in the eager model; a clip that is loose
            everywhere compares nothing.
        refused: Sites at which the policy answered, and which the rewritten graph refused with a warning: their error,
            or a part of it, is outside of the graph. The eager model had no hook there.
        gradients: Names of the parameters and inputs whose gradients were compared.
        records: Addresses of the records that were compared: those of float64 tensors.
        plain_error: By how much plain torch.compile differs from the eager model, without the policy, relative to the
            element and the largest value; 0.0 where it was not asked: the policy's gradients agree, and the forward
            writes no buffer but those of batch normalization.
    """

    acted: tuple[str, ...]
    changed: tuple[str, ...]
    refused: tuple[str, ...]
    gradients: tuple[str, ...]
    records: tuple[str, ...]
    plain_error: float = 0.0

    @property
    def note(self) -> str:
        """A remark on plain torch.compile; empty if it agrees with eager mode."""
        if self.plain_error <= _LARGEST_PLAIN_ERROR:
            return ""
        return f"plain torch.compile is off eager here, by {self.plain_error:.2g}; the rewritten model is not"


def assert_matches_eager(
    model: nn.Module,
    policy: Policy,
    *args: Any,
    compiled: bool = True,
    loss_fn: Loss | None = None,
    steps: int = 1,
    optimizer: MakeOptimizer | None = None,
    rtol: float | None = None,
    **kwargs: Any,
) -> Comparison:
    """Compare a policy on a model with the same policy as hooks of eager autograd on the plain model.

    Both are run on copies, from the same parameters, buffers and random numbers. Outputs, buffers, all gradients and
    what actions record at float64 errors and gradients have to agree, and the actions have to be at the same sites.

    A compiler rounds otherwise than eager mode (a softmax in float32 inside of a float64 model, by 1e-7). So where the
    two differ, plain torch.compile without a policy is compared with the plain eager model, and up to ten times their
    difference is allowed.

    Args:
        model: The model; it stays as it was.
        policy: A policy without actions on the gradients of single losses or examples: no hook of eager autograd sees
            these. Actions at activations change no gradient and are not compared. With functions of several errors the
            eager backward runs several times.
        *args: Inputs of the model; leaves that require a gradient are compared too.
        compiled: Compile with Inductor (random numbers then fall back to eager's); False runs the graph op by op.
        loss_fn: From the model's output to the loss, a tensor with one element. None: the output itself if it is one,
            otherwise the sum of all differentiable outputs, each element weighted differently.
        steps: Steps of gradient descent after which gradients are compared again; with an optimizer, its steps.
        optimizer: From parameters to an optimizer. One is guarded and updates the rewritten model, another one the
            plain model, with the policy's actions at ``step``, ``param`` and ``state`` sites run by hand; parameters,
            the optimizer's state, gradients and records have to agree after each step. Losses are not logged, so that
            no update is judged by them.
        rtol: Tolerance relative to the element, and to the largest gradient of the model. None: 1e-9 for float64, 1e-4
            for float32, 1e-2 for float16, 5e-2 for bfloat16. NaN equals NaN.
        **kwargs: Inputs of the model.

    Returns:
        What was compared.

    Raises:
        AssertionError: Something differs; the message names it, and says how far plain torch.compile is from the eager
            model. Differences that ``docs/semantics.md`` describes are
            among them: actions that change zeros where the loss ignores an output, gradients of parameters and inputs
            that the model returns, an ``nn.Identity`` with hooks of its own. A rule for a use that overwrites the value
            is not compared either.
        RewriteError: The policy cannot be followed on this model.
        PolicyError: The policy has rules for ``step``, ``param`` or ``state`` sites, and no optimizer was given.
        TraceError: No output needs a gradient, or the model computes nothing.

    Example:
        >>> import gradrewrite as gr
        >>> from gradrewrite.passes import ClipByNorm
        >>> from gradrewrite.testing import assert_matches_eager
        >>> plain = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> policy = gr.on("error:0", ClipByNorm(0.1))
        >>> assert_matches_eager(plain, policy, torch.ones(4, 2), compiled=False).acted
        ('error:0',)
    """
    given, held = (model.original if isinstance(model, RewrittenModule) else model), (args, kwargs)
    plain, rewritten = copy.deepcopy(given), copy.deepcopy(given)
    changed = transform(rewritten, policy)
    if compiled:
        changed.compile(options={"fallback_random": True})
    updates = _updates_of(optimizer, plain, changed, policy, steps)
    found: list[dict[str, None]] = [{} for _ in range(5)]
    states = StateStore()
    plain_error = 0.0
    with kept_random_state(), torch.enable_grad():
        for step in range(steps):
            before = given if step == 0 else copy.deepcopy(plain)
            with kept_random_state():
                got = _run(changed, rewritten, held, loss_fn)
            graphs = changed.explain().graphs
            if not graphs:
                raise TraceError(
                    "the model computes nothing that has a backward (it may return its input as it is)",
                    code="no-backward",
                )
            _check_comparable([edit for graph in graphs for edit in graph.edits])
            lost = {str(site) for graph in graphs for site in graph.out_of_reach}
            hooked = _Hooked(plain, policy, lost, [site for graph in graphs for site in graph.sites], states)
            states.note_backward(step)
            wanted = _run(hooked, plain, held, loss_fn)
            edits = (edit.site for graph in graphs for edit in graph.edits if edit.site.kind == "error")
            _check_sites({str(site) for site in edits if 0 not in site.shape}, hooked)
            where = f"step {step}: " if steps > 1 else ""
            got, wanted = replace(got, records=changed.monitor.latest()), replace(wanted, records=hooked.records)
            try:
                _check_step(got, wanted, rtol, where)
            except AssertionError as err:
                plain_error = max(plain_error, _plain_error(before, held, loss_fn, compiled=compiled))
                try:
                    if plain_error > _LARGEST_PLAIN_ERROR:
                        raise
                    _check_step(got, wanted, rtol, where, _SLACK * plain_error)
                except AssertionError:
                    raise AssertionError(f"{err}\n{_blame(plain_error)}") from None
            if _writes_buffers(before, got):  # where torch's partitioners may read what was written
                plain_error = max(plain_error, _plain_error(before, held, loss_fn, compiled=compiled))
            updates.compare(rtol, where, _SLACK * plain_error, failed=hooked.failed)
            of_step: tuple[Iterable[str], ...] = (
                hooked.acted | updates.acted,
                hooked.changed | updates.changed,
                sorted(lost),
                got.gradients,
                hooked.records | updates.records,
            )
            for names, new in zip(found, of_step, strict=True):
                names |= dict.fromkeys(new)
    acted, altered, refused, gradients, records = map(tuple, found)
    return Comparison(acted, altered, refused, gradients, records, plain_error)


def _check_comparable(edits: Iterable[Edit]) -> None:
    """Raise PolicyError for an action on the gradients of single losses or examples."""
    for edit in edits:
        action = edit.action
        if edit.site.kind == "saved":
            raise PolicyError(
                f"{edit.site}: assert_matches_eager compares with hooks of eager autograd, which keeps other tensors "
                f"than a compiled graph; {describe(action)} acts on those. Compare without it",
                code="action-not-allowed",
            )
        if needs_examples(edit.insertion) or needs_losses(edit.insertion):
            raise PolicyError(
                f"{edit.site}: assert_matches_eager compares with hooks of eager autograd, which do not see the "
                f"gradients of single losses or examples; {describe(action)} needs them. Compare without it",
                code="action-not-allowed",
            )


def _writes_buffers(model: nn.Module, step: _Step) -> bool:
    """Whether a step has written buffers, other than those of batch normalization."""
    normalized = {
        id(b) for module in model.modules() if nn_modules.updates_statistics(module) for b in module.buffers()
    }
    written = (b for n, b in model.named_buffers() if not _are_equal(b, step.buffers[f"buffer {n}"]))
    return any(id(b) not in normalized for b in written)


def _are_equal(first: Tensor, second: Tensor) -> bool:
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _plain_error(model: nn.Module, held: Any, loss_fn: Loss | None, *, compiled: bool) -> float:
    eager, traced = copy.deepcopy(model), copy.deepcopy(model)
    backend, options = ("inductor", {"fallback_random": True}) if compiled else (aot_autograd.compile_plain, None)
    run = inductor.compiled_alone(traced, backend=backend, options=options)
    with kept_random_state():
        got = _run(run, traced, held, loss_fn)
    wanted = _run(eager, eager, held, loss_fn)
    largest = 0.0
    for part in ("outputs", "buffers", "gradients"):
        theirs = getattr(wanted, part)
        scale = max((_largest(t) for t in theirs.values() if t is not None), default=0.0)
        for name, tensor in getattr(got, part).items():
            other = theirs.get(name)
            if tensor is None or other is None or tensor.shape != other.shape or not tensor.numel():
                continue
            difference = (tensor - other).abs() / (other.abs() + scale)
            largest = max(largest, float(difference.nan_to_num(0.0).max()))
    return largest


def _blame(plain_error: float) -> str:
    if plain_error == 0.0:
        return "plain torch.compile agrees with the eager model, without the policy: it is the rewrite that differs"
    begin = f"plain torch.compile differs from the eager model too, without the policy, by {plain_error:.2g}"
    if plain_error > _LARGEST_PLAIN_ERROR:
        return f"{begin}: the model computes otherwise where it is traced, and the policy cannot be compared"
    return f"{begin}; the rewritten model by more than {_SLACK:g} times as much"


def assert_inert(
    model: nn.Module, *args: Any, compiled: bool = True, loss_fn: Loss | None = None, **kwargs: Any
) -> None:
    """Show that the empty policy changes nothing: outputs, buffers and gradients are equal bit for bit.

    Args:
        model: The model; it stays as it was.
        *args: Inputs of the model.
        compiled: Compare with plain torch.compile, whose number of generated kernels has to be the same too; False
            compares the graph that runs op by op with the eager model, or, where that differs, with plain
            torch.compile(backend="aot_eager"), for a traced model may compute otherwise than an eager one. (In that
            reference too a view is copied where the strides of a kernel are not those that torch predicts.)
        loss_fn: As for ``assert_matches_eager``.
        **kwargs: Inputs of the model.

    Raises:
        AssertionError: Something differs; the message names it.

    Example:
        >>> from gradrewrite.testing import assert_inert
        >>> assert_inert(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)), torch.ones(4, 2), compiled=False)
    """
    given, held = (model.original if isinstance(model, RewrittenModule) else model), (args, kwargs)
    plain, rewritten = copy.deepcopy(given), copy.deepcopy(given)
    changed = transform(rewritten, [])
    run: Callable[..., Any] = plain
    if compiled:
        changed.compile()
        run = inductor.compiled_alone(plain)
    with kept_random_state(), torch.enable_grad():
        begin = inductor.num_generated_kernels()
        with kept_random_state():
            wanted = _run(run, plain, held, loss_fn)
        middle = inductor.num_generated_kernels()
        with kept_random_state():
            got = _run(changed, rewritten, held, loss_fn)
        end = inductor.num_generated_kernels()
        try:
            _check_step(got, wanted, 0.0, "empty policy: ")
        except AssertionError:
            if compiled:
                raise
            traced = copy.deepcopy(given)
            wanted = _run(inductor.compiled_alone(traced, backend=aot_autograd.compile_plain), traced, held, loss_fn)
            _check_step(got, wanted, 0.0, "empty policy: ")
    has_loops = any(isinstance(module, nn.RNNBase) for module in given.modules())  # torch.compile compiles none
    if end - middle != middle - begin and not has_loops:
        raise AssertionError(
            f"empty policy: {end - middle} kernels were generated, plain torch.compile has {middle - begin}"
        )


@dataclass(frozen=True, slots=True)
class _Step:
    outputs: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]
    records: Mapping[str, float] = field(default_factory=dict)


def _run(run: Callable[..., Any], module: nn.Module, held: Any, loss_fn: Loss | None) -> _Step:
    """One step from the state of ``module``; inputs are copies, for a model may change them in place."""
    args, kwargs = _copied(held)
    leaves = dict(_named_inputs(module, args, kwargs))  # the forward may let others begin to need a gradient
    module.zero_grad()
    torch.clear_autocast_cache()  # casts of parameters as they were before the last step
    out = run(*args, **kwargs)
    outputs = {f"output {n}": t.detach().clone() for n, t in enumerate(tensors_in(out))}
    loss = _loss(out, loss_fn)
    if isinstance(run, _Hooked):
        run.prepare(loss)
    loss.backward()
    if isinstance(run, _Hooked):
        run.finish()
    gradients = {f"gradient:{name}": p.grad for name, p in module.named_parameters() if p.requires_grad}
    gradients |= {f"input:{name}": t.grad for name, t in leaves.items()}
    copies = {name: None if g is None else g.detach().to_dense().clone() for name, g in gradients.items()}
    return _Step(outputs, {f"buffer {n}": b.detach().clone() for n, b in module.named_buffers()}, copies)


def _copied(value: Any) -> Any:
    """Containers with copies of their tensors; leaves stay leaves."""
    if isinstance(value, Tensor):
        copied = value.detach().clone().requires_grad_(value.requires_grad)
        return copied if value.is_leaf else copied * 1
    if isinstance(value, Mapping):
        items = {key: _copied(item) for key, item in value.items()}
        return items if type(value) is dict else copy.copy(value).__class__(**items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copied, value))
    return type(value)(map(_copied, value)) if isinstance(value, list | tuple) else value


def _loss(out: Any, loss_fn: Loss | None) -> Tensor:
    if loss_fn is not None:
        return loss_fn(out)
    tensors = [t for t in tensors_in(out) if t.requires_grad]
    if not tensors:
        raise TraceError(
            "no output of the model depends on a parameter or an input that needs a gradient", code="no-backward"
        )
    if len(tensors) == 1 and tensors[0].numel() == 1:
        return tensors[0].reshape(())
    return torch.stack([_weighted(t) for t in tensors]).sum()


def _weighted(t: Tensor) -> Tensor:
    real = torch.view_as_real(t) if t.is_complex() else t
    wide = real.to(torch.promote_types(real.dtype, torch.float32)).reshape(-1)
    return (wide * torch.cos(torch.arange(wide.numel(), dtype=wide.dtype, device=wide.device))).sum().to(torch.float64)


def _named_inputs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the differentiable leaves among the inputs, with their names."""
    inputs = InputNames(module)
    for path, tensor in (*_paths("L['args']", args), *_paths("L['kwargs']", kwargs)):
        if tensor.requires_grad and tensor.is_leaf:
            yield inputs.name(path), tensor


def _paths(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _paths(f"{path}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _paths(f"{path}[{number}]", item)


def _updates_of(
    make: MakeOptimizer | None, plain: nn.Module, rewritten: RewrittenModule, policy: Policy, steps: int
) -> _Updates | _Descent:
    """Return the updates of both models; PolicyError for a rule of the update without an optimizer."""
    if make is not None:
        return _Updates.of(make, plain, rewritten, policy, steps)
    rules = [rule.pattern for kind in sorted(AT_GUARD) for rule in rules_at(policy, kind)]
    if rules:
        raise PolicyError(_NO_OPTIMIZER.format(rules[0]), code="action-not-allowed")
    return _Descent(plain, rewritten)


@dataclass
class _Descent:
    """Gradient descent of both models with the plain one's gradients."""

    plain: nn.Module
    rewritten: nn.Module
    acted: dict[str, None] = field(default_factory=dict)
    changed: dict[str, None] = field(default_factory=dict)
    records: dict[str, float] = field(default_factory=dict)

    def compare(self, rtol: float | None, where: str, slack: float, *, failed: bool) -> None:
        """Make a step; there is nothing to be compared."""
        with torch.no_grad():
            for parameter in self.plain.parameters():
                grad = None if parameter.grad is None else parameter.grad.to_dense()
                if grad is not None and bool(torch.isfinite(grad).all()):
                    parameter.sub_(grad, alpha=1e-2)
        _copy_parameters(self.plain, self.rewritten)


def _copy_parameters(plain: nn.Module, rewritten: nn.Module) -> None:
    others = dict(rewritten.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            others[name].copy_(parameter)


@dataclass
class _Updates:
    """The guarded optimizer of the rewritten model, and the reference of its steps."""

    guarded: torch.optim.Optimizer
    rewritten: RewrittenModule
    eager: EagerStep
    reports: _Reports

    @classmethod
    def of(
        cls, make: MakeOptimizer, plain: nn.Module, rewritten: RewrittenModule, policy: Policy, steps: int
    ) -> _Updates:
        guarded = guard(make(rewritten.parameters()), rewritten, max_consecutive_skips=steps + 1)
        reports = _Reports()
        eager = EagerStep(make(plain.parameters()), plain, policy, _apply, reports.note)
        return cls(guarded, rewritten, eager, reports)

    @property
    def acted(self) -> dict[str, None]:
        """Sites with an action."""
        return self.eager.acted

    @property
    def changed(self) -> dict[str, None]:
        """Sites with a changed gradient."""
        return self.eager.changed

    @property
    def records(self) -> dict[str, float]:
        """The reports of actions, by address."""
        return self.reports.figures

    def compare(self, rtol: float | None, where: str, slack: float, *, failed: bool) -> None:
        """Make both updates and compare the results; ``failed``: a check of the backward has failed."""
        self.reports.clear()
        self.guarded.step()
        self.eager(failed=failed)
        ours = _after_update(self.rewritten, self.guarded)
        theirs = _after_update(self.eager.model, self.eager.optimizer)
        got = _Step({}, {}, ours, self.rewritten.monitor.latest())
        _check_step(got, _Step({}, {}, theirs, self.reports.figures), rtol, where, slack)
        _copy_parameters(self.eager.model, self.rewritten)


def _after_update(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = parameter.detach()
        found[f"gradient of the update {name}"] = parameter.grad
        state = optimizer.state.get(parameter, {})
        found |= {f"state {name}.{key}": t for key, t in state.items() if isinstance(t, Tensor) and t.dim()}
    return found


class _Reports:
    """The reports of actions, by address."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self._numbering = RecordNumbering()

    def clear(self) -> None:
        """Begin a step."""
        self.figures = {}
        self._numbering = RecordNumbering()

    def note(self, reported: Recording, where: str, members: Sequence[str] = ()) -> None:
        """Note the reports of an action, and the factors of clips."""

        def number(_: str, leaf: Leaf) -> float:
            if isinstance(leaf, HostBound):
                return acting_bound(number_of(leaf.value))
            return float(reported.outputs[leaf.number].reshape(-1)[leaf.element])

        reports = [report for report in reported.reports if not isinstance(report, Kept | StateUpdate)]
        placed = self._numbering.of_action(reports, where, members)
        for report, (keys, factor) in zip(reports, placed, strict=True):
            figures = report.map(number)
            self.figures |= zip(map(str, leaves(keys)), leaves(figures), strict=True)
            if isinstance(figures, NormClip | ValueClip):
                self.figures[str(factor)] = figures.factor()
            if isinstance(keys, ValueClip):  # whose norms are no records
                del self.figures[str(keys.before)], self.figures[str(keys.after)]


class _Hooked:
    """The plain model with the actions of a policy as hooks; called like the model."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        refused: set[str],
        known: Sequence[Site],
        states: StateStore,
        uses: Sequence[Pattern] = (),
    ) -> None:
        self._model = model
        self._policy = policy
        self._refused = refused
        self._order = {str(site): number for number, site in enumerate(known)}
        self.made: set[str] = set()  # every error site
        self.acted: dict[str, None] = {}  # sites with an action whose gradient was computed
        self.failed = False  # whether a check that skips the update has failed
        self._reports = _Reports()
        self.changed: dict[str, None] = {}  # where an action changed it
        self._groups: list[_Member] = []  # at gradients alone
        self._several = EagerGroups()
        self._leaves: list[Tensor] = []
        self._handles: list[Any] = []
        self._states = states
        self._uses = [*patterns_of_uses(policy), *uses]
        self._carried: CarriedKeys = {}
        self._reads = EagerReads()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._carried, self._reads = {}, EagerReads.of(self._model)
        observer = _Observer(self._model, self._policy, self._uses)
        with observer.watching():
            out = self._model(*args, **kwargs)
        observer.note_returned(out)
        for site, (calls, tensor) in observer.activations().items():
            self._reads.expect(site, calls)
            self._reads.note(site, tensor)
        found = [*self._errors(observer), *self._gradients(args, kwargs)]
        self._leaves = [value for site, _, value in found if site.traits.is_leaf]
        answers = [[] if str(site) in self._refused else ask_in_order(self._policy, site) for site, *_ in found]
        is_read = any(bool(answered.insertion.read_patterns) for own in answers for answered in own)
        self._several = EagerGroups(
            {
                answered.insertion.group
                for (site, *_), own in zip(found, answers, strict=True)
                for answered in own
                if site.kind != "gradient" and answered.insertion.group is not None
            }
        )
        for (site, register, value), own in zip(found, answers, strict=True):
            self._several.expect(site, own)
            self._note_groups(site, value, own)
            single = [answered.insertion for answered in own if answered.insertion.group is None]
            self._hook(site, register, value, single, is_read=is_read)
        return out

    def prepare(self, loss: Tensor) -> None:
        """Run the backward until functions of several errors were given all of them; gradients stay as they are."""
        if not self._several.names:
            return
        kept = [(leaf, leaf.grad) for leaf in self._leaves]
        failed, changed, is_new = self.failed, dict(self.changed), True
        while is_new:  # ends: a value that a function changes leads to none that it is given
            for leaf, _ in kept:
                leaf.grad = None
            self._reports = _Reports()
            with self._states.undone():
                loss.backward(retain_graph=True)
                is_new = self._several.run(self._run_function)
        self.failed, self.changed, self._reports = failed, changed, _Reports()
        self._several.run(self._run_function)
        for leaf, grad in kept:
            leaf.grad = grad

    def _errors(self, observer: _Observer) -> Iterator[_Hookable]:
        for use, site in observer.uses():
            self.made.add(str(site))
            self._reads.expect(site, use.value.calls)
            yield site, _register_at(_key_of(use.tensor)), use.tensor
        for seen, site in observer.sites():
            self.made.add(str(site))
            self._reads.expect(site, seen.value.calls)
            if 0 not in site.shape:  # eager ops may return the same empty tensor where traced ones make another
                yield site, seen.register, seen.tensor if seen.copy is None else seen.copy
        for tensor, site in observer.inside:
            self.made.add(str(site))
            of_forward = replace(site, kind="activation")
            self._reads.expect(of_forward)
            self._reads.note(of_forward, tensor)
            self._reads.expect(site)
            yield site, tensor.register_hook, tensor

    def _gradients(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[_Hookable]:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                site = _site_of_leaf("gradient", name, parameter)
                self._reads.expect(site)
                yield site, parameter.register_hook, parameter
        for name, tensor in _named_inputs(self._model, args, kwargs):
            site = _site_of_leaf("input", name, tensor)
            self._reads.expect(site)
            yield site, tensor.register_hook, tensor

    def _hook(
        self, site: Site, register: _Register, value: Tensor, found: Sequence[Insertion], *, is_read: bool
    ) -> None:
        reads, is_leaf, several = self._reads, site.traits.is_leaf, self._several

        def act(g: Tensor) -> Tensor:
            self.acted[str(site)] = None
            result = g
            if is_leaf:
                reads.note(site, g)
            states = self._states.scope(str(site), self._carried)
            for insertion in found:
                with recording(g.device, states=states) as reported:
                    states.begin()
                    result = _apply(insertion, result, value, reads.arguments(insertion, site))
                    states.write()
                if g.dtype == torch.float64:  # elsewhere a record may differ by the rounding of what it measures
                    self._reports.note(reported, str(site))
                is_check = isinstance(insertion.effect, MeasureTensor) and insertion.effect.fails == "skip"
                self.failed |= is_check and not bool(result.isfinite().all())
            result = several.act(site, result)
            if not is_leaf:
                reads.note(site, result)
            if not torch.equal(result, g):
                self.changed[str(site)] = None
            return result

        def see(g: Tensor) -> Tensor:
            reads.note(site, g)
            return g

        is_acting = bool(found) or site in several
        if is_acting or is_read:
            self._handles.append(register(act if is_acting else see))

    @property
    def records(self) -> dict[str, float]:
        """The reports of actions, by address."""
        return self._reports.figures

    def _note_groups(self, site: Site, value: Tensor, answers: Sequence[Answered]) -> None:
        for answered in answers:
            if answered.insertion.group is not None and answered.insertion.group not in self._several.names:
                order = self._order.get(str(site), len(self._order))
                self._groups.append(_Member(answered.position, order, answered.insertion, value, site))
                self.acted[str(site)] = None

    def finish(self) -> None:
        """Remove the hooks, and run group actions in the order of the policy."""
        for handle in self._handles:
            handle.remove()
        groups: dict[Any, list[_Member]] = {}
        for entry in sorted(self._groups, key=lambda m: m.order):
            groups.setdefault(entry.insertion.group, []).append(entry)
        for members in sorted(groups.values(), key=lambda m: min(member.position for member in m)):
            self._run_group(list({id(m.parameter): m for m in members if m.parameter.grad is not None}.values()))
        self._groups.clear()

    def _run_group(self, members: Sequence[_Member]) -> None:
        if not members:
            return
        grads = [m.parameter.grad for m in members if m.parameter.grad is not None]
        results = self._run_function(members[0].insertion, [m.site for m in members], grads)
        for member, g, result in zip(members, grads, results, strict=True):
            member.parameter.grad = result
            if not torch.equal(result, g):
                self.changed[str(member.site)] = None

    def _run_function(self, insertion: Insertion, sites: Sequence[Site], values: Sequence[Tensor]) -> Sequence[Tensor]:
        effect = group_effect(insertion)
        assert not isinstance(effect, JudgeUpdate)  # at step sites alone
        where = f"group:{effect.group}"
        states = self._states.scope(where)
        with torch.no_grad(), recording(values[0].device, states=states) as reported:
            results = run_group(effect, sites, values, self._reads.arguments(insertion, sites[0]))
            states.write()
        if all(value.dtype == torch.float64 for value in values):
            self._reports.note(reported, where, [str(site) for site in sites])
        return results


@dataclass(frozen=True, slots=True)
class _Member:
    """A parameter of a group: where the policy names the group, and the position of the parameter among the sites."""

    position: tuple[int, ...]
    order: int
    insertion: Insertion
    parameter: Tensor
    site: Site


def _apply(insertion: Insertion, g: Tensor, value: Tensor, others: Sequence[Tensor] = ()) -> Tensor:
    match insertion.effect:
        case ReplaceTensor(run, reads):
            takes_value = reads == "value" or (isinstance(reads, OtherValues) and reads.reads_value)
            return run(g, *([value.detach()] if takes_value else []), *others)
        case MeasureTensor() | KeepTensor() as effect:
            return effect.run(g)
        case AverageOverRanks(_, begin, end):
            return end(begin([g]), [g])[0]
        case _:  # what leaves the gradient as it is
            return g


def _site_of_leaf(kind: Kind, name: str, leaf: Tensor) -> Site:
    module = name.rpartition(".")[0] if kind == "gradient" else ""
    return Site(kind, name, module, shape=tuple(leaf.shape), dtype=leaf.dtype, device=leaf.device)


@dataclass(eq=False)
class _Seen:
    value: Value
    tensor: Tensor
    key: _Key
    order: tuple[int, int]  # number of the op, place among what the op made
    copy: Tensor | None = None  # of a differentiable one, as it was made: an op may write into it later

    @property
    def is_differentiable(self) -> bool:
        """Return whether the value has an error; one that lost its identity, as in a custom function, has none."""
        return self.tensor.requires_grad and (self.key[0] is not self.tensor or self.tensor.grad_fn is None)

    def register(self, fn: Callable[[Tensor], Tensor]) -> Any:
        return _register_at(self.key)(fn)


def _register_at(key: _Key) -> Callable[[Callable[[Tensor], Tensor]], Any]:
    """Return the function for hooks on the error of a tensor."""
    node, number = key
    if isinstance(node, Tensor):
        return node.register_hook

    def register(fn: Callable[[Tensor], Tensor]) -> Any:
        def before(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            return tuple(fn(g) if n == number and g is not None else g for n, g in enumerate(grads))

        # On the node, not on the tensor, which an in-place op may have moved to another node since.
        return node.register_prehook(before)

    return register


@dataclass
class _Op:
    """The op that wrote to a piece of memory last: it makes every alias of it a new value."""

    name: str
    calls: tuple[ModuleCall, ...]
    source: str
    number: int


class _Observer(TorchFunctionMode):
    """An observer of an eager forward: each value's ops and module calls."""

    def __init__(self, model: nn.Module, policy: Policy, uses: Sequence[Pattern]) -> None:
        super().__init__()
        self._policy = policy
        self.inside: list[tuple[Tensor, Site]] = []  # values inside recurrent layers, with their sites of errors
        self._iterations: Counter[str] = Counter()  # so far, by loop
        self._names = {id(module): name for name, module in model.named_modules()}
        self._model = model
        self._calls = itertools.count()
        self._stack: list[ModuleCall] = []
        self._returns: dict[ModuleCall, list[Value]] = {}
        self._seen: list[_Seen] = []
        self._by_key: dict[_Key, _Seen] = {}
        self._writers: dict[int, _Op] = {}  # by storage
        self._operators: dict[CodeType, Mapping[int, str]] = {}
        self._num_ops = 0
        self._begun: dict[int, Tensor] = {}  # leaves that began to need a gradient in the forward, to which none comes
        self._is_watching = False
        self._uses = EagerUses(uses, self._value_at, self._note_twin)
        self._paths: list[tuple[_Seen, _Seen]] = []  # results of taps, with the values that were given

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the code inside the block, but no recomputation of a checkpoint."""
        handles = [h for module in self._model.modules() for h in self._watch_calls(module)]
        self._is_watching = True
        try:
            with self, listen_to_taps(self._note_tap), autograd.hear_transforms(self._note_result, self._paused):
                yield
        finally:
            self._is_watching = False
            for handle in handles:
                handle.remove()

    def _watch_calls(self, module: nn.Module) -> list[Any]:
        name = self._names[id(module)]

        def enter(*_: Any) -> None:
            if self._is_watching and module is not self._model:
                self._stack.append((name, str(len(self._stack)), str(next(self._calls))))

        def leave(_: nn.Module, __: Any, output: Any) -> Any:
            if self._is_watching and module is not self._model:
                call = self._stack.pop()
                self._is_watching = False  # what is asked about a tensor here is no use of it
                self._returns[call] = self._known_in(output)
                self._is_watching = True
                if passes_through(module) and isinstance(output, Tensor):
                    return self._named(output, name, (*self._stack, call), is_tap=False)
            return output

        return [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = list(tensors_in((args, kwargs)))
        if not self._is_watching or func in _ASKED_ONLY:
            return func(*args, **kwargs)
        for value in self._known_in(read):
            value.used_in.append(tuple(self._stack))
        name = self._op_name(func, sys._getframe(1))
        args, kwargs = self._led(name, args, kwargs)
        read = list(tensors_in((args, kwargs)))
        before = [(_key_of(t), t._version) for t in read]
        self._num_ops += 1
        source = user_line(traceback.extract_stack(limit=11)[:-1])
        if func in RECURRENT and torch.is_grad_enabled():
            result = self._run_recurrent(func, (*args, *kwargs.values()), source)
        else:
            result = func(*args, **kwargs)
        self._begun.update({id(result): result} if func is Tensor.requires_grad_ and result.is_leaf else {})
        self._forget_use(name, read, kwargs, result)
        op = _Op(name, tuple(self._stack), source, self._num_ops)
        for tensor, (key, version) in zip(read, before, strict=True):
            if tensor._version != version and tensor.layout is torch.strided:
                self._writers[fake_tensors.storage_key(tensor)] = op
                if not tensor.requires_grad:  # no autograd node tells it from its older self
                    value = Value(op.name, op.calls, op.source, tensor)
                    self._seen.append(_Seen(value, tensor, (tensor, 0), (op.number, len(self._seen))))
            if _key_of(tensor) != key:
                self._value_of(tensor, op)
        for tensor, own in _named_results(name, func, result):
            is_new = _key_of(tensor) not in self._by_key
            value = self._value_of(tensor, replace(op, name=own)).value
            value.is_selection = is_new and (op.name == "getitem" or not isinstance(result, Tensor))
        with self._unwatched():
            self._uses.note_results(name, func, args, kwargs, list(tensors_in(result)))
        return result

    def _forget_use(self, name: str, read: Sequence[Tensor], kwargs: Mapping[str, Any], result: Any) -> None:
        """Forget the use by an op that hands its input on, as ``contiguous`` of such a tensor."""
        if not _writes(name, kwargs) and any(result is tensor for tensor in read):
            with self._unwatched():
                for value in self._known_in(result):
                    value.used_in.pop()

    def _led(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the arguments of an op, with the tensors of single uses; a written one is left alone."""
        first = int(_writes(name, kwargs))
        with self._unwatched():
            rest, kwargs = self._uses.lead(name, self._stack, tuple(args[first:]), kwargs)
        return (*args[:first], *rest), kwargs

    def _run_recurrent(self, func: Any, args: Sequence[Any], source: str) -> Any:
        """Run a recurrent layer.

        It is a loop over time with an answer of the policy inside; both draw the same random numbers.
        """
        module, found = self._stack[-1][0] if self._stack else "", list[tuple[Tensor, Site]]()
        begin = Counter(self._iterations)

        def note(layer: str, op: str, iteration: int, value: Tensor) -> None:
            loop = f"{module}.{layer}" if module else layer
            self._iterations[loop] = begin[loop] + iteration + 1
            name, call = f"{loop}/{op}", begin[loop] + iteration
            form = {"shape": tuple(value.shape), "dtype": value.dtype, "device": value.device, "source": source}
            addresses = ((name, call),)
            site = Site("error", name, module, op, call=call, addresses=addresses, iteration=iteration, **form)  # type: ignore[arg-type]
            found.append((value, site))

        self._is_watching = False
        with kept_random_state():
            result = func(*args)
        looped = run_recurrent(func, args, result[0].dtype, note)
        self._is_watching = True
        if not any(ask_in_order(self._policy, site) for _, site in found):
            return result
        self.inside += ((value, site) for value, site in found if value.requires_grad)
        return looped

    def _op_name(self, func: Any, caller: FrameType) -> str:
        """Name of an op as Dynamo's graphs have it: ``/`` is ``truediv``, an attribute like ``.mT`` is ``getattr``."""
        while caller.f_back is not None and caller.f_code.co_filename in _BETWEEN:
            caller = caller.f_back  # Tensor.__rsub__ and others are Python
        if caller.f_code not in self._operators:
            self._operators[caller.f_code] = _binary_operators(caller.f_code)
        symbol = self._operators[caller.f_code].get(caller.f_lasti)
        if symbol is not None:
            name = _OPERATORS[symbol.removesuffix("=")]
            return f"i{name.rstrip('_')}" if symbol.endswith("=") else name
        name = str(getattr(func, "__name__", func))
        if name.startswith("__") and name.endswith("__"):
            name = name.strip("_")
        return "getattr" if name == "get" else name

    def _known_in(self, value: Any) -> list[Value]:
        return [known.value for tensor in tensors_in(value) if (known := self._find(tensor)) is not None]

    def note_returned(self, out: Any) -> None:
        """Note the values that the model returns."""
        for value in self._known_in(out):
            value.used_in.append(())
            value.is_returned = True
        self._join_paths()
        for value in (s.value for s in self._seen):
            value.stored_by = {c for c in value.calls if c in self._returns and value not in self._returns[c]}

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def _note_result(self, name: str, given: Any, result: Any) -> None:
        for value in self._known_in(given):
            value.used_in.append(tuple(self._stack))
        self._num_ops += 1
        op = _Op(name, tuple(self._stack), user_line(traceback.extract_stack(limit=11)), self._num_ops)
        for tensor in tensors_in(result):
            self._value_of(tensor, op).value.is_selection = not isinstance(result, Tensor)

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        was_watching, self._is_watching = self._is_watching, False
        try:
            yield
        finally:
            self._is_watching = was_watching

    def _value_at(self, tensor: Tensor) -> Value | None:
        known = self._find(tensor)
        return None if known is None else known.value

    def _note_twin(self, twin: Tensor, tensor: Tensor) -> None:
        """Note a tensor that is the value of another one."""
        known = self._find(tensor)
        if known is not None:
            self._by_key[_key_of(twin)] = known

    def _note_tap(self, tensor: Tensor, name: str) -> Tensor:
        return self._named(tensor, name, tuple(self._stack), is_tap=True) if self._is_watching else tensor

    def _named(self, tensor: Tensor, name: str, calls: tuple[ModuleCall, ...], *, is_tap: bool) -> Tensor:
        """Return a tensor of its own as the result of a tap; see ``_join_paths``."""
        op = _Op("tap", calls, "", self._num_ops)
        with self._unwatched():
            given = self._value_of(tensor, op)
            seen = given
            if tensor.requires_grad:
                given_tensor = tensor
                with torch.enable_grad():
                    tensor = tensor.view_as(tensor)
                seen = self._value_of(tensor, op)
                self._uses.note_tap(seen.value, given_tensor)
                self._paths.append((seen, given))
        (seen.value.taps if is_tap else seen.value.identities).append(name)
        return tensor

    def _join_paths(self) -> None:
        """Join the results of taps with their values, except for single branches."""
        for seen, given in reversed(self._paths):
            writer = (
                self._writers.get(fake_tensors.storage_key(given.tensor))
                if given.tensor.layout is torch.strided
                else None
            )
            is_written = writer is not None and writer.number > seen.order[0]
            others = (other.value for other, of in self._paths if of is given and other is not seen)
            is_read_otherwise = _is_read(given.value) or any(map(_is_read, others))
            if _is_read(seen.value) and is_read_otherwise and not is_written:
                given.value.used_in.append(seen.value.calls)
                continue
            value = given.value
            value.used_in += seen.value.used_in
            value.taps += seen.value.taps
            value.identities += seen.value.identities
            value.is_returned |= seen.value.is_returned
            seen.value.same_as = value
            self._seen.remove(seen)
            for own in self._returns.values():
                own[:] = [value if one is seen.value else one for one in own]

    def uses(self) -> list[tuple[EagerUse, Site]]:
        """The single uses, in the order of execution, with their sites."""
        uses, values = list(self._uses), [s.value for s in sorted(self._seen, key=lambda s: s.order)]
        for value in (use.value for use in uses):
            while value.use_of is not None and value.use_of.same_as is not None:
                value.use_of = value.use_of.same_as
        named = name_values([*values, *(use.value for use in uses)])
        return [(use, named[len(values) + n]("error")) for n, use in enumerate(uses) if len(values) + n in named]

    def activations(self) -> dict[Site, tuple[Sequence[ModuleCall], Tensor]]:
        """The values, by their sites, with the module calls around the op that made each."""
        seen = sorted(self._seen, key=lambda s: s.order)
        named = ((seen[number], site) for number, site in name_values([s.value for s in seen]).items())
        return {site("activation"): (s.value.calls, s.tensor if s.copy is None else s.copy) for s, site in named}

    def _find(self, tensor: Tensor) -> _Seen | None:
        """The value that a tensor is now; an alias of written memory becomes a new one when it is met."""
        key = _key_of(tensor)
        known = self._by_key.get(key)
        if known is not None or tensor.grad_fn is None or tensor.layout is not torch.strided:
            return known
        writer = self._writers.get(fake_tensors.storage_key(tensor))
        if writer is not None:
            return self._value_of(tensor, writer)
        inside = self._by_key.get((tensor, 0))  # what a custom autograd.Function computed without gradients
        if inside is None:
            return None
        made = inside.value
        return self._value_of(tensor, _Op("apply", made.calls, made.source, inside.order[0]))

    def _value_of(self, tensor: Tensor, op: _Op) -> _Seen:
        key = _key_of(tensor)
        if key not in self._by_key:
            value = Value(op.name, op.calls, op.source, tensor)
            self._by_key[key] = _Seen(value, tensor, key, (op.number, len(self._seen)))
            self._seen.append(self._by_key[key])
            if tensor.requires_grad:
                was_watching, self._is_watching = self._is_watching, False
                self._by_key[key].copy = tensor.detach().clone()
                self._is_watching = was_watching
        return self._by_key[key]

    def sites(self) -> list[tuple[_Seen, Site]]:
        """The error sites of differentiable values, in the order of execution."""
        seen = sorted(self._seen, key=lambda s: s.order)
        named = name_values([s.value for s in seen])
        found = [(seen[number], site) for number, site in named.items()]
        sites = [(value, site("error")) for value, site in found if value.is_differentiable]
        return [(value, site) for value, site in sites if not self._begun or self._leads_outside(value.key)]

    def _leads_outside(self, key: _Key) -> bool:
        """Whether a value depends on a leaf that needed a gradient before the forward."""
        seen, todo = set[Any](), [key[0]]
        while todo:
            node = todo.pop()
            leaf = node if isinstance(node, Tensor) else getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in self._begun:
                return True
            more = [] if isinstance(node, Tensor) else [n for n, _ in node.next_functions if n is not None]
            todo += [n for n in more if n not in seen]
            seen.update(more)
        return False


def _named_results(name: str, func: Any, result: Any) -> list[tuple[Tensor, str]]:
    """Return the tensors that an op made, with the names of their ops: ``grad.0``, ``grad.1`` for several gradients."""
    if func is torch.autograd.grad and len(result) > 1:
        return [(tensor, f"{name}.{number}") for number, tensor in enumerate(result) if tensor is not None]
    return [(tensor, name) for tensor in tensors_in(result)]


def _key_of(tensor: Tensor) -> _Key:
    return (tensor, 0) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def _is_read(value: Value) -> bool:
    return bool(value.used_in) or value.is_returned


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether an op writes in place; such uses are not compared."""
    is_named = name.endswith("_") or name in ("setitem", *(f"i{op}" for op in ("add", "sub", "mul", "truediv", "pow")))
    return is_named or bool(kwargs.get("inplace")) or "out" in kwargs


# What asks about a tensor, and makes none.
_ASKED_ONLY = frozenset((Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.register_hook))
_BETWEEN = (inspect.getfile(Tensor), torch.overrides.__file__)
_OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "@": "matmul", "**": "pow",
    "&": "and_", "|": "or_", "^": "xor", "<<": "lshift", ">>": "rshift",
}  # fmt: skip


def _binary_operators(code: CodeType) -> Mapping[int, str]:
    """Return the binary operators (``+`` or ``+=``) of a function, by their position in its bytecode."""
    names = {name.upper(): symbol for name, symbol in _BINARY_3_10.items()}
    found = {}
    for instruction in dis.get_instructions(code):
        kind, _, name = instruction.opname.partition("_")
        if instruction.opname == "BINARY_OP":
            found[instruction.offset] = instruction.argrepr
        elif kind in ("BINARY", "INPLACE") and name in names:
            found[instruction.offset] = names[name] + ("=" if kind == "INPLACE" else "")
    return found


_BINARY_3_10 = {
    "add": "+", "subtract": "-", "multiply": "*", "true_divide": "/", "floor_divide": "//", "modulo": "%",
    "matrix_multiply": "@", "power": "**", "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip


def _check_sites(edited: set[str], hooked: _Hooked) -> None:
    missing = sorted(s for s in hooked.acted if s.startswith("error:") and s not in edited)
    if missing:
        raise AssertionError(
            f"the eager model has {', '.join(missing[:5])}, where the policy answers and a gradient comes by; the "
            "rewritten graph has no edit there"
        )
    unknown = sorted(edited - hooked.made)
    if unknown:
        raise AssertionError(
            f"the rewritten graph has edits at {', '.join(unknown[:5])}; the eager model has no such sites"
        )


def _check_step(got: _Step, wanted: _Step, rtol: float | None, where: str, slack: float = 0.0) -> None:
    for part in ("outputs", "buffers", "gradients"):
        ours, theirs = getattr(got, part), getattr(wanted, part)
        if ours.keys() != theirs.keys():
            raise AssertionError(
                f"{where}{part}: {sorted(ours)} in the rewritten model, {sorted(theirs)} in the plain one"
            )
        scale = max((_largest(t) for t in theirs.values() if t is not None), default=0.0)
        for name, tensor in ours.items():
            _check_close(f"{where}{name}", tensor, theirs[name], rtol, scale, slack)
    for address, value in wanted.records.items():
        if address not in got.records:
            raise AssertionError(f"{where}{address}: the eager model records it, the rewritten one does not")
        ours = got.records[address]
        same = math.isclose(ours, value, rel_tol=max(1e-5, slack), abs_tol=1e-9)
        if not same and not (math.isnan(ours) and math.isnan(value)):
            raise AssertionError(f"{where}{address}: the rewritten model records {ours!r}, the eager one {value!r}")


def _largest(t: Tensor) -> float:
    finite = t[torch.isfinite(t)].abs() if t.is_floating_point() or t.is_complex() else t.new_zeros(0)
    return float(finite.max()) if finite.numel() else 0.0


def _check_close(
    name: str, got: Tensor | None, wanted: Tensor | None, rtol: float | None, scale: float, slack: float
) -> None:
    if got is None or wanted is None:
        left = got if wanted is None else wanted
        # torch.compile gives zeros where a parameter reaches only outputs that the loss ignores; eager autograd None.
        if left is not None and bool((left != 0).any()):
            raise AssertionError(f"{name}: a gradient on one side alone, up to {_largest(left):.3g}")
        return
    tolerance = max(TOLERANCES.get(got.dtype, 0.0) if rtol is None else rtol, slack)
    # A gradient that is zero but for rounding is compared with the size of the others.
    torch.testing.assert_close(
        got, wanted, rtol=tolerance, atol=tolerance * (scale if math.isfinite(scale) else 1.0), equal_nan=True,
        msg=lambda text: f"{name}: the rewritten model and the plain one differ. {text}",
    )  # fmt: skip
