"""``audit``: untrained parameters, with op and line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gradrewrite._compat.optimizers import inside_of
from gradrewrite._utils.formatting import listed, nearest
from gradrewrite.auditing.constants import vanishing_constants
from gradrewrite.auditing.eager_steps import EagerSteps, run_eager_steps
from gradrewrite.auditing.findings import WITH_GRADIENT, Audit, AuditRow, Fate
from gradrewrite.auditing.gradient_flow import Cut, GradientFlow, Segment, Term, flow_of
from gradrewrite.auditing.optimizer_settings import optimizer_causes
from gradrewrite.auditing.step_graphs import StepGraphs, is_sharded, trace_step
from gradrewrite.backends.model_state import state_of
from gradrewrite.backends.parameter_watch import unwatched
from gradrewrite.backends.traced_step import ComputeLoss
from gradrewrite.diagnostics.causes import Cause
from gradrewrite.policy.numbers import python_number

STEPS = 3
_NAMED = 5
_MOST_REMARKS = 5  # of one kind


def audit(
    model: nn.Module,
    *args: Any,
    compute_loss: ComputeLoss | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    trained: str | Sequence[str] | None = None,
    steps: int = STEPS,
    **kwargs: Any,
) -> Audit:
    """Find untrained parameters of a training step, with op and line.

    Forward and loss are traced as one graph, in which every parameter is followed to the loss. Ops that stop its
    gradient are named: ``detach``, ``.data``, ``torch.no_grad()``, ``argmax``, ``round``, comparisons and casts to
    integers, a custom ``autograd.Function`` that returns None, constants by algebra (a softmax over one element, terms
    that cancel). A fault is a parameter that an op reads, and whose every way to the loss is cut. Then eager steps on
    the same batch show who gets a gradient without torch.compile (a reentrant checkpoint makes a difference), and whose
    gradient is 0. Numbers that their dtype cannot hold (``1e-8`` in float16), and settings of the optimizer, are faults
    too.

    Parameters, gradients, buffers, attributes of modules (numbers, tensors, lists, dicts), inputs and random state are
    given back bit for bit; other Python objects go on. Where the step is several graphs, it is run once for the trace.
    Hooks behind an accumulated gradient do not run.

    Args:
        model: A module in the mode in which it is to be trained; of what ``transform`` returned its original.
        *args: Its inputs: one batch.
        compute_loss: ``(model, *args, **kwargs) -> scalar``. None if the model returns the loss, an object with
            ``.loss``, or a mapping with ``"loss"``; if it returns other tensors, all of them count as the loss.
        optimizer: The optimizer of the model, or a function from parameters to one: what it holds is compared with the
            parameters that have a gradient, and its ``eps`` with their dtypes. Parameters that it does not hold, and
            that are detached, are a remark.
        trained: Names of the parameters that are meant to be trained, as ``"*.lora_*"`` (``fnmatch``), or several: then
            a further fault is a parameter that is trained without being named, or named and frozen.
        steps: How many eager steps at most; none with parameters that are DTensors (FSDP2). The second and third are
            only run where a gradient of the first was 0, and move the parameters (they are given back). 0 runs nothing.
        **kwargs: Its inputs.

    Returns:
        The audit: print it, ``render`` it as a page, or show it in a notebook.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``steps`` is not a whole number >= 0, a pattern of ``trained`` matches no parameter, or a lazy
            module is not initialized.

    Example:
        >>> import torch, gradrewrite as gr
        >>> class Gate(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.choose, self.value = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        ...
        ...     def forward(self, x):
        ...         best = self.choose(x).argmax(-1, keepdim=True)
        ...         return self.value(x).gather(-1, best).square().mean()
        >>> found = gr.audit(Gate(), torch.randn(8, 4))
        >>> [(row.name, row.verdict, row.op) for row in found.rows][:2]
        [('choose.weight', 'no gradient', 'argmax'), ('choose.bias', 'no gradient', 'argmax')]
    """
    return audit_call(model, args, kwargs, compute_loss=compute_loss, optimizer=optimizer, trained=trained, steps=steps)


def audit_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    compute_loss: ComputeLoss | None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None,
    trained: str | Sequence[str] | None,
    steps: Any,
) -> Audit:
    """Audit a step with any names of inputs; see ``audit``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"gr.audit takes an nn.Module, got {type(model).__name__}")
    steps = python_number(steps)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"gr.audit: steps is a whole number >= 0, got {steps!r}")
    state = state_of(model)
    model = model if state is None else state.original
    if lazy := [name for name, p in model.named_parameters() if is_lazy(p)]:
        raise ValueError(f"gr.audit: {lazy[0]} of a lazy module is not initialized: call the model once, model(*args).")
    patterns = _patterns(trained, model)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.parameters())
    return audit_step(model, args, kwargs, compute_loss, optimizer, patterns, steps)


def audit_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    compute_loss: ComputeLoss | None,
    optimizer: torch.optim.Optimizer | None,
    patterns: tuple[str, ...] | None = None,
    steps: int = STEPS,
) -> Audit:
    """Audit a step of a plain model; see ``audit``."""
    steps = 0 if is_sharded(model) else steps
    step = trace_step(model, compute_loss, args, kwargs)
    flow = flow_of(step, model)
    keep = _watched(model) if optimizer is not None else set()
    with unwatched():
        read = [value for graph in step.graphs for value in graph.inputs]
        eager = run_eager_steps(
            model, compute_loss, args, kwargs, steps=steps, keep=keep, written=flow.written, read=read
        )
    return _Judge(model, step, flow, eager, patterns).audit(optimizer)


def _patterns(trained: str | Sequence[str] | None, model: nn.Module) -> tuple[str, ...] | None:
    if trained is None:
        return None
    patterns = (trained,) if isinstance(trained, str) else tuple(trained)
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(nearest(pattern, names))
            raise ValueError(f"gr.audit: trained={pattern!r} matches no parameter; nearest: {known or 'there is none'}")
    return patterns


def _watched(model: nn.Module) -> set[str]:
    """Return parameters with rows that may be frozen."""
    hooked = {name for name, p in model.named_parameters() if p._backward_hooks}
    padded = (n for n, m in model.named_modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None)
    return hooked | {f"{name}.weight" if name else "weight" for name in padded}


class _Judge:
    """The verdicts on all parameters of one step."""

    def __init__(
        self,
        model: nn.Module,
        step: StepGraphs,
        flow: GradientFlow,
        eager: EagerSteps,
        patterns: tuple[str, ...] | None,
    ) -> None:
        self._named = dict(model.named_parameters())
        self._model, self._step, self._flow, self._eager, self._patterns = model, step, flow, eager, patterns
        self._cuts = flow.cuts_before(flow.loss)
        self._bits = {name: 1 << number for number, name in enumerate(flow.names)}
        self._causes: list[Cause] = []
        self._remarks: list[str] = []
        self._varying: list[str] = []  # names of parameters that another branch reads
        self._held: set[int] | None = None  # identities of the optimizer's tensors

    def audit(self, optimizer: torch.optim.Optimizer | None) -> Audit:
        """Judge all parameters, constants and the optimizer."""
        if optimizer is not None:
            self._held = {id(p) for group in inside_of(optimizer).param_groups for p in group["params"]}
        rows = tuple(self._row(name) for name in self._named)
        self._no_gradient(rows)
        self._against_eager(rows)
        self._unasked(rows)
        self._note_others(rows)
        names = [row.name for row in rows if row.verdict != "frozen"]
        if not self._causes and names and all(row.verdict in ("unused", "frozen") for row in rows):
            text = f"{_get(names)} no gradient: no path leads from the loss to a parameter."
            self._fault("no gradient", names, "", text, "Return the loss as a tensor that is computed from them.")
        causes = [*self._causes]
        if optimizer is not None:
            got = [row.name for row in rows if row.verdict in WITH_GRADIENT]
            found, remarks = optimizer_causes(optimizer, self._model, got, self._eager.kept)
            missing = any(cause.kind == "not in the optimizer" for cause in found)
            rows = tuple(map(self._of_optimizer, rows)) if missing else rows
            causes += found
            self._remarks += remarks
        causes += vanishing_constants(graph.gm for graph in self._step.graphs)
        return Audit(tuple(causes), tuple(self._remarks), rows, type(self._model).__name__)

    def _of_optimizer(self, row: AuditRow) -> AuditRow:
        """Return the verdict on a parameter that the optimizer may lack."""
        is_held = self._held is None or id(self._named[row.name]) in self._held
        return row if is_held or row.verdict not in WITH_GRADIENT else replace(row, verdict="not in the optimizer")

    def _row(self, name: str) -> AuditRow:
        if not self._named[name].requires_grad:
            return AuditRow(name, "frozen")
        bit = self._bits[name]
        loss, ran = self._flow.loss, self._eager.num_steps > 0
        losses = tuple(_term_text(term) for term in self._flow.terms if term.reach.trained & bit)
        cuts = [cut for cut in self._cuts if cut.stopped & bit]
        cut = min(cuts, key=lambda cut: (cut.is_meant, cut.is_bridged, cut.is_discrete), default=None)
        op, line = ("", "") if cut is None else (cut.op, cut.source)
        if not loss.trained & bit:
            return self._cut_off(name, cut, "no gradient" if loss.read & bit else "unused")
        if not ran or name in self._eager.nonzero:
            fate: Fate = "zero up to rounding" if name in self._eager.rounding else "trained"
            return AuditRow(name, fate, losses=losses)
        if name not in self._eager.got:
            return self._compiled_only(name, bit, losses)
        if cut is not None and not (
            cut.is_discrete or cut.is_bridged or cut.is_meant
        ):  # the other way hands on 0, as a selection of other elements
            return AuditRow(name, "no gradient", op, line)
        return AuditRow(name, "zero so far", losses=losses)

    def _cut_off(self, name: str, cut: Cut | None, fate: Fate) -> AuditRow:
        op, line = ("", "") if cut is None else (cut.op, cut.source)
        if cut is not None and cut.is_algebra:  # nonzero in eager mode by rounding errors, or algebra is mistaken
            return AuditRow(name, "trained") if name in self._eager.sure else AuditRow(name, fate, op, line)
        if name not in self._eager.nonzero:
            return AuditRow(name, fate, op, line)
        is_other_branch = not op and self._varies(name)
        return AuditRow(name, "trained") if is_other_branch else AuditRow(name, "eager only", op, line)

    def _compiled_only(self, name: str, bit: int, losses: tuple[str, ...]) -> AuditRow:
        inside = [s for s in self._flow.segments if s.inside & bit]
        segment = min(inside, key=lambda segment: bool(segment.reason), default=None)
        if segment is not None and segment.reason:
            return AuditRow(name, "no gradient", segment.op, segment.source)
        if segment is None and self._varies(name):
            return AuditRow(name, "trained", losses=losses)
        where = ("", "") if segment is None else (segment.op, segment.source)
        return AuditRow(name, "compiled only", *where, losses)

    def _varies(self, name: str) -> bool:
        """Whether calls may take other branches; note the parameter."""
        if not self._eager.has_drawn:
            return False
        self._varying.append(name)
        return True

    def _no_gradient(self, rows: Sequence[AuditRow]) -> None:
        meant = {(cut.op, cut.source) for cut in self._cuts if cut.is_meant}
        alike = _grouped((row.op, row.line, row.name) for row in rows if row.verdict == "no gradient")
        for (op, line), group in alike.items():
            known: list[Cut | Segment] = [*self._cuts, *(segment for segment in self._flow.segments if segment.reason)]
            reason = next((one.reason for one in known if (one.op, one.source) == (op, line)), "")
            names = [name for name in group if self._patterns is None or self._is_named(name)]
            if (op, line) in meant:
                self._remarks.append(f"{_get(group)} no gradient by algebra: {reason}, at {line}.")
                continue
            if names := self._without_left_out(op, line, reason, names):
                text = f"{_get(names)} no gradient: {reason}."
                self._fault("no gradient", names, line, text, _advice(op, reason))
        frozen = [row.name for row in rows if row.verdict == "frozen" and self._is_named(row.name)]
        if self._patterns is not None and frozen:
            text = f"{_subject(frozen)} should be trained (trained=), and requires_grad is False."
            self._fault("no gradient", frozen, "", text, "Call requires_grad_() on them before the optimizer is made.")
        unread = [row.name for row in rows if row.verdict == "unused"]
        wanted = [name for name in unread if self._patterns is not None and self._is_named(name)]
        if wanted:
            text = f"{_subject(wanted)} should be trained (trained=), and the loss is computed without {_them(wanted)}."
            self._fault("no gradient", wanted, "", text, "Use them in the forward, or take them out of trained=.")
        self._note_unread([name for name in unread if name not in wanted])

    def _without_left_out(self, op: str, line: str, reason: str, names: list[str]) -> list[str]:
        """Leave out parameters that are cut off and not optimized."""
        if op not in _ON_PURPOSE or self._held is None or self._patterns is not None:
            return names
        left_out = [name for name in names if id(self._named[name]) not in self._held]
        if left_out:
            text = f"{_get(left_out)} no gradient: {reason}{f', at {line}' if line else ''}"
            self._remarks.append(
                f"{text}; {'it is' if len(left_out) == 1 else 'they are'} not in the optimizer either."
            )
        return [name for name in names if name not in left_out]

    def _note_unread(self, names: Sequence[str]) -> None:
        ends = {name: self._break_behind(name) for name in names}
        for (line, reason), group in _grouped((*ends[name], name) for name in names).items():
            text = f"{_get(group)} no gradient: the loss is computed without {_them(group)}"
            if line:
                text += f" in the graphs; code that is not traced may use {_them(group)}, at {line} ({reason})"
            self._remarks.append(f"{text}.")

    def _break_behind(self, name: str) -> tuple[str, str]:
        """Return line and reason of a graph break behind a parameter."""
        bit = self._bits[name]
        return next(((line, reason) for mask, line, reason in self._flow.breaks if mask & bit), ("", ""))

    def _against_eager(self, rows: Sequence[AuditRow]) -> None:
        alike = _grouped((row.op, row.line, row.name) for row in rows if row.verdict == "compiled only")
        for (op, line), names in alike.items():
            text = f"{_get(names)} no gradient in eager mode"
            text += f", where `{op}` hands on none; compiled there is one." if op else "; the graph shows no reason."
            self._fault("no gradient", names, line, text, _advice(op, "eager"))
        alike = _grouped((row.op, row.line, row.name) for row in rows if row.verdict == "eager only")
        for (op, line), names in alike.items():
            where = f": `{op}` hands on none when it is traced" if op else ""
            text = f"{_get(names)} a gradient in eager mode, and none under torch.compile{where}."
            self._fault(
                "no gradient",
                names,
                line,
                text,
                "Look for a branch on torch.compiler.is_compiling() at or before the line, and remove it.",
            )

    def _unasked(self, rows: Sequence[AuditRow]) -> None:
        if self._patterns is None:
            return
        names = [row.name for row in rows if row.verdict in (*WITH_GRADIENT, "compiled only", "eager only")]
        names = [name for name in names if not self._is_named(name)]
        if names:
            text = f"{_get(names)} a gradient, and trained={', '.join(map(repr, self._patterns))} does not name them."
            advice = "Freeze them with requires_grad_(False) before the optimizer is made, or name them."
            self._fault("trained unasked", names, "", text, advice)

    def _note_others(self, rows: Sequence[AuditRow]) -> None:
        zero = [row.name for row in rows if row.verdict == "zero so far"]
        if zero:
            number = self._eager.num_steps
            steps = "the step that ran" if number == 1 else f"all {number} steps that ran"
            self._remarks.append(f"{_get(zero)} a gradient that was 0 in {steps}, with this batch.")
        if rounding := [row.name for row in rows if row.verdict == "zero up to rounding"]:
            self._remarks.append(
                f"{_get(rounding)} a gradient of 0 up to rounding, as a bias in front of a softmax or a "
                "normalization, on which it has no influence."
            )
        if self._varying:
            self._remarks.append(f"{_are(self._varying)} read in some calls only: other calls take another branch.")
        self._note_terms()
        self._note_partial_cuts(rows)

    def _note_terms(self) -> None:
        """Note parameters without the gradient of one of several losses."""
        found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for name, bit in self._bits.items():
            own = [term for term in self._flow.terms if term.reach.trained & bit]
            for term in self._flow.terms if own else ():
                if term.reach.trained & bit:
                    continue
                cuts = [c for c in self._flow.cuts_before(term.reach) if c.stopped & bit]
                cut = min(cuts, key=lambda cut: cut.is_discrete, default=None)
                if cut is not None and not (cut.is_meant or cut.op == "graph break"):
                    texts = " and ".join(map(_term_text, own)), f"`{cut.op}` at {cut.source}", _term_text(term)
                    found[texts].append(name)
        told: set[str] = set()
        for (losses, cut_text, term_text), names in list(found.items())[:_MOST_REMARKS]:
            if told.isdisjoint(names):
                text = f"{_are(names)} not trained by {term_text}: {cut_text} ends the path"
                self._remarks.append(f"{text}; what trains {_them(names)} is {losses}.")
            told.update(names)

    def _note_partial_cuts(self, rows: Sequence[AuditRow]) -> None:
        """Note ops at the end of one of several paths."""
        told = " ".join(self._remarks)
        found: dict[tuple[str, str], int] = defaultdict(int)
        cut_off = {row.name for row in rows if row.verdict == "no gradient"}
        trained = self._flow.loss.trained & sum(bit for name, bit in self._bits.items() if name not in cut_off)
        for cut in self._cuts:
            if cut.is_discrete or not cut.source:  # another way is left as a rule; of a library's own
                continue
            if cut.is_meant or cut.is_bridged or cut.op == "graph break":  # written so; not known what it reads
                continue
            if cut.stopped & trained and f"`{cut.op}` at {cut.source}" not in told:
                found[cut.op, cut.source] |= cut.stopped & trained
        for (op, line), mask in list(found.items())[:_MOST_REMARKS]:
            names = list(self._flow.bits(mask))
            self._remarks.append(f"`{op}` at {line} ends one path of gradients to {listed(names, 3)}; another is left.")
        if len(found) > _MOST_REMARKS:
            self._remarks.append(f"{len(found) - _MOST_REMARKS} more ops end one of several paths.")

    def _is_named(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._patterns or ())

    def _fault(self, kind: Any, names: Sequence[str], source: str, text: str, advice: str) -> None:
        self._causes.append(Cause(kind, f"gradient:{names[0]}", source, text=text, advice=advice))


def _grouped(rows: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for op, line, name in rows:
        found[op, line].append(name)
    return found


def _subject(names: Sequence[str]) -> str:
    return listed(names, _NAMED) if len(names) == 1 else f"{len(names)} parameters ({listed(names, _NAMED)})"


def _get(names: Sequence[str]) -> str:
    return f"{_subject(names)} get{'s' if len(names) == 1 else ''}"


def _are(names: Sequence[str]) -> str:
    return f"{_subject(names)} {'is' if len(names) == 1 else 'are'}"


def _them(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _term_text(term: Term) -> str:
    return f"`{term.op}` at {term.source.partition(' ')[0]}" if term.source else f"`{term.op}`"


_ON_PURPOSE = ("detach", ".data", "no_grad", "inference_mode", "requires_grad_")
_FREEZE = "or freeze the parameters (requires_grad_(False)) if they are not to be trained"
_CHOICE = "Choose softly (softmax, gumbel_softmax(hard=True)), or hand the gradient on: soft + (hard - soft).detach()."
_ADVICE = {
    "detach": f"Take the detach() out, {_FREEZE}.",
    ".data": f"Use the tensor itself instead of .data, {_FREEZE}.",
    "no_grad": f"Compute it outside of torch.no_grad(), {_FREEZE}.",
    "inference_mode": f"Compute it outside of torch.inference_mode(), {_FREEZE}.",
    "requires_grad_": "Do not call it in the forward: detach() the value, or freeze parameters before the training.",
    "item": f"Compute with the tensor itself instead of the number, {_FREEZE}.",
    "tensor": f"Use the tensor itself, or torch.stack of several: torch.tensor copies values alone, {_FREEZE}.",
    "sample": "Call rsample() where the distribution has it, or add log_prob(sample) times the reward to the loss.",
    "normal": "Draw mean + std * torch.randn_like(mean).",
    "checkpoint": (
        "Pass use_reentrant=False, or let an input of the checkpoint need a gradient (requires_grad_(); "
        "model.enable_input_require_grads() in transformers)."
    ),
    "graph break": "Let the line be traced, or compute with tensors that keep their gradient.",
}


def _advice(op: str, reason: str) -> str:
    """Return advice on an op that stops gradients."""
    if op in _ADVICE:
        return _ADVICE[op]
    if reason == "eager":
        return (
            "Ask ctx.needs_input_grad in backward, not requires_grad of what forward was given or saved."
            if op
            else "Look at hooks and at branches on torch.compiler.is_compiling(), and at torch.func."
        )
    if op.startswith("grad") and "without a gradient" in reason:
        return "Pass create_graph=True to torch.autograd.grad."
    if "a derivative of 0" in reason:
        return f"Hand the gradient on: x + ({op}(x) - x).detach()."
    if "has no gradient" in reason:
        return _CHOICE
    if "returns None" in reason:
        return "Return the gradient of this input from backward, where ctx.needs_input_grad asks for it."
    if "one element" in reason or "one class" in reason:
        return "Look at the dimension: it has one element, so that nothing is left to be learned."
    if "cancel" in reason or "divided by itself" in reason:
        return "The inputs of this line have no influence. If one term should be constant, detach it: x.detach()."
    return f"Look at the line, {_FREEZE}."
