"""Runs of random compositions: as they are, and on the plain model with hooks of eager autograd."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.backends.backend import make_backend
from gradrewrite.backends.engines import AotEager, Inductor
from gradrewrite.policy.rules import patterns_of_uses
from gradrewrite.policy.state_store import StateStore
from gradrewrite.testing import _Hooked

from models.compositions import GROUPS, IN_ONE_GRAPH, LAST, STEPS, Composition, Net, batch, equalize

Result = dict[str, Tensor]


def run_rewritten(one: Composition, *, compiled: bool = False) -> list[Result]:
    """Run a composition; the gradients of each step and the state of the model afterwards."""
    model = one.make()
    run: Any
    run, owner, optimizers = _rewritten(one, model, compiled=compiled)
    found = []
    for number in range(STEPS):
        if one.loop == "resumed" and number == 1:
            kept = copy.deepcopy((model.state_dict(), [o.state_dict() for o in optimizers], gr.state_dict(owner)))
            model = one.make()
            run, owner, optimizers = _rewritten(one, model, compiled=compiled)
            model.load_state_dict(kept[0])
            for optimizer, state in zip(optimizers, kept[1], strict=True):
                optimizer.load_state_dict(state)
            gr.load_state_dict(owner, kept[2])
        _before_step(one, model, optimizers, number, owner if one.way == IN_ONE_GRAPH else run)
        batches = one.batches(model, number)
        if one.way == IN_ONE_GRAPH:
            *earlier, last = batches
            for x in earlier:
                run.accumulate(x)
            run(last)
            continue
        losses = [run(x) for x in batches] if one.loop == "two forwards" else []
        for loss in losses or map(run, batches):
            total = total_of(loss)
            if one.loop == "retained":
                total.backward(retain_graph=True)
            _backward(one, total)
        found.append(_gradients(model))
        for optimizer in optimizers:
            optimizer.step()
    return [*found, _state(model)]


def total_of(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the loss of an output: the sum of losses, or of windows with weights."""
    if isinstance(output, tuple):
        return torch.stack(output).sum()
    weights = torch.linspace(0, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return (output * weights).square().mean() if output.dim() else output


def _backward(one: Composition, loss: Tensor) -> None:
    if not one.threaded:
        loss.backward()
        return
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()


def _before_step(
    one: Composition, model: Net, optimizers: Sequence[torch.optim.Optimizer], number: int, run: Callable[..., Any]
) -> None:
    """Change what the loop changes, evaluate, and reset gradients."""
    if one.loop == "grown" and number == 1:
        optimizers[0].add_param_group({"params": model.grow()})
    if one.loop == "moved" and number == 1:
        model.float()
    if one.loop == "evaluated":
        model.eval()
        with torch.no_grad():
            run(batch(100 + number))
        model.train()
    for optimizer in optimizers:
        optimizer.zero_grad()


def _rewritten(
    one: Composition, model: Net, *, compiled: bool
) -> tuple[Callable[[Tensor], Any], Any, list[torch.optim.Optimizer]]:
    options: dict[str, Any] = {
        "dynamic": {"dynamic": True},
        "regions": {"regions": ["first", "layers.*", "head"]},
        "parts": {"fullgraph": False},
        "methods": {"methods": ("features", "finish")},
    }.get(one.way, {})
    optimizers = one.optimizers(model)
    if one.way == "backend":
        backend = make_backend(one.policy(), None, Inductor() if compiled else AotEager())
        run = torch._dynamo.config.patch(allow_rnn=True)(torch.compile(model, backend=backend))
        return run, backend, [gr.guard(o, backend) for o in optimizers]
    rewritten: Any = gr.transform(model, one.policy(), **options)
    if compiled:
        rewritten.compile()
    guarded = [gr.guard(o, rewritten) for o in optimizers]
    if one.way == IN_ONE_GRAPH:
        loss = (lambda model, x: total_of(model(x))) if one.windows else None
        return gr.train_step(rewritten, guarded[0], compute_loss=loss, compile=compiled), rewritten, guarded
    if one.way == "methods":
        return lambda x: rewritten.finish(rewritten.features(x)), rewritten, guarded
    return rewritten, rewritten, guarded


def run_reference(one: Composition) -> list[Result]:
    """Run the same on the plain model, with hooks of eager autograd, by hand at the steps."""
    model = one.make()
    found: list[Result] = []
    accepted: list[list[float]] = [[], []]
    optimizers, states = one.optimizers(model), StateStore()
    for number in range(STEPS):
        _before_step(one, model, optimizers, number, model)
        before, skips, policy = _state(model), False, one.policy(number)
        total: Result = {}
        for x in one.batches(model, number):
            reference = _Reference(one, model, policy, states)
            for name, g in reference.gradients(x).items():
                total[name] = total[name] + g if name in total else g
            skips |= reference.skips
        for name, p in model.named_parameters():
            p.grad = total.get(name)
        found.append(_gradients(model))
        skips &= any(kind == "gradient" and action == "CheckFinite('skip')" for kind, _, action in one.rules)
        skips = any(
            [
                _at_step(one, optimizer, norms, is_skipped=skips)
                for optimizer, norms in zip(optimizers, accepted, strict=False)
            ]
        )
        if skips:
            model.load_state_dict(before)
            continue
        for optimizer in optimizers:
            optimizer.step()
        if any(action.startswith("DecayWeights") for *_, action in one.rules):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.0 if p.grad is None else 0.9)
    return [*found, _state(model)]


class _Reference:
    """The gradients of one batch, and whether a check at a gradient found what is not finite."""

    def __init__(self, one: Composition, model: Net, policy: list[gr.Rule], states: StateStore) -> None:
        self._one, self._model, self._states = one, model, states
        self.skips = False
        self._at = next((n for n, (*_, action) in enumerate(one.rules) if action.startswith(LAST)), len(policy))
        whole = one.losses == 1 and self._at < len(policy)  # a clip of examples: behind all but the groups

        def is_first(number: int, site: gr.Site) -> bool:
            if site.kind != "gradient" or self._at == len(policy):
                return True
            is_group = one.rules[number][2].startswith(GROUPS)
            return not is_group and (whole or (number < self._at and site.name in self._names()))

        def rules(first: bool) -> gr.Policy:
            numbers = [n for n in range(len(policy)) if n != self._at]
            return [lambda site, n=n: policy[n](site) if is_first(n, site) is first else None for n in numbers]

        self._first, self._then = rules(True), rules(False)

    def gradients(self, x: Tensor) -> Result:
        if self._at == len(self._one.rules):
            return self._hooked(self._model, self._first, x, 2 if self._one.loop == "retained" else 1)[0]
        found = self._of_losses(x) if self._one.losses > 1 else self._of_examples(x)
        found = self._behind(found)
        return {name: 2 * g for name, g in found.items()} if self._one.loop == "retained" else found

    def _hooked(self, model: nn.Module, policy: gr.Policy, x: Tensor, times: int = 1) -> list[Result]:
        """Return the gradients of each loss, with actions as hooks."""
        hooked, found = _Hooked(model, policy, set(), (), self._states, patterns_of_uses(self._one.policy())), []
        losses = hooked(x)
        for loss in losses if isinstance(losses, tuple) else (total_of(losses),):
            model.zero_grad()
            for _ in range(times):
                hooked.prepare(loss)
                loss.backward(retain_graph=True)
            if not isinstance(losses, tuple):
                hooked.finish()
            found.append(_gradients(model))
        hooked.finish()
        self.skips |= any(v > 0 for key, v in hooked.records.items() if key.startswith("nonfinite@gradient:"))
        return found

    def _behind(self, gradients: Result) -> Result:
        """Return gradients after the rules that come later: those of a sum that has just these gradients."""
        model = self._model
        parameters = dict(model.named_parameters())
        model.forward = lambda _: torch.stack([(parameters[name] * g).sum() for name, g in gradients.items()]).sum()
        try:
            return self._hooked(model, self._then, torch.zeros(()))[0]
        finally:
            del model.forward

    def _names(self) -> list[str]:
        pattern = self._one.rules[self._at][1]
        return [name for name, _ in self._model.named_parameters() if fnmatch.fnmatchcase(name, pattern)]

    def _of_losses(self, x: Tensor) -> Result:
        """Return the gradients, those that several losses share weighed by the inner products."""
        by_loss = self._hooked(self._model, self._first, x)
        shared = [name for name in self._names() if all(name in found for found in by_loss)]
        weights = torch.ones(len(by_loss), dtype=torch.float64)
        if shared:
            flat = torch.stack([torch.cat([found[name].flatten() for name in shared]) for found in by_loss]).double()
            weights = _weighting(self._one.rules[self._at][2])(flat @ flat.T)
        total: Result = {}
        for found, weight in zip(by_loss, weights, strict=True):
            for name, g in found.items():
                term = (weight.to(g.dtype) * g) if name in shared else g
                total[name] = total[name] + term if name in total else term
        return total

    def _of_examples(self, x: Tensor) -> Result:
        """Return the sum of the gradients of examples, each clipped over the parameters of the group."""
        total: Result = {}
        for row in x.split(1):
            copied = copy.deepcopy(self._model)
            copied.loss_divisor = len(x)
            (found,) = self._hooked(copied, self._first, row)
            group = [found[name] for name in self._names() if name in found]
            norm = len(x) * torch.stack([g.norm() for g in group]).norm()
            factor = 1e-2 / norm if 1e-2 < norm < torch.inf else 1.0
            for name, g in found.items():
                term = factor * g if name in self._names() else g
                total[name] = total[name] + term if name in total else term
        with torch.no_grad():
            self._model(x)  # writes its buffers once
        return total


def _weighting(action: str) -> Callable[[Tensor], Tensor]:
    """Return the weights of a weighting, by their definitions."""

    def shortest(gramian: Tensor) -> Tensor:  # on the line between two gradients
        difference = gramian[0, 0] - 2 * gramian[0, 1] + gramian[1, 1]
        share = torch.where(difference == 0, 0.5, ((gramian[1, 1] - gramian[0, 1]) / difference).clamp(0, 1))
        return torch.stack([share, 1 - share])

    def without_conflict(gramian: Tensor) -> Tensor:  # half of the sum, each projected where they conflict
        shares = gramian[0, 1].clamp(max=0) / gramian.diagonal()
        return (1 - torch.where(gramian[0, 1] == 0, 0.0, shares)) / 2

    return {"MGDA": shortest, "UPGrad": without_conflict}.get(action[len("WeighLosses(") :].split("(")[0], equalize)


def _at_step(one: Composition, optimizer: torch.optim.Optimizer, accepted: list[float], *, is_skipped: bool) -> bool:
    """Act on the gradients of an optimizer, in order, the groups last; return whether the update is skipped."""
    parameters = [p for part in optimizer.param_groups for p in part["params"] if p.grad is not None]
    actions = [action for kind, _, action in one.rules if kind == "step"]
    skips = is_skipped
    for action in actions:
        if action == "CheckFinite('skip')":
            skips |= not all(bool(p.grad.isfinite().all()) for p in parameters)
        if action.startswith("AdaptiveClip"):
            for p in parameters:
                p.grad = _adapted(p.grad, p.detach())
    total = torch.stack([p.grad.norm() for p in parameters]).norm()
    if any(action.startswith("SkipSpikes") for action in actions):
        values = torch.tensor(accepted[-2:], dtype=torch.float64)
        limit = values.mean() + 2 * values.std() if len(values) == 2 else torch.inf
        skips |= not bool(total.isfinite()) or bool(total > limit)
        if not skips:
            accepted.append(float(total))
    if any(action.startswith("ClipByGlobalNorm") for action in actions) and 1e-2 < total < torch.inf:
        for p in parameters:
            p.grad = p.grad * (1e-2 / total)
    return skips


def _adapted(g: Tensor, p: Tensor) -> Tensor:
    """Return a gradient clipped to a share of the parameter, row by row (AGC)."""
    rows = tuple(range(1, g.dim())) if g.dim() > 1 else tuple(range(g.dim()))
    norms = torch.linalg.vector_norm(g, dim=rows, keepdim=True)
    bounds = 0.01 * torch.linalg.vector_norm(p, dim=rows, keepdim=True).clamp(min=1e-3)
    return torch.where((norms > bounds) & norms.isfinite(), g * (bounds / norms), g)


def _gradients(model: nn.Module) -> Result:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _state(model: nn.Module) -> Result:
    return {name: t.clone() for name, t in model.state_dict().items()}


def _assert_of_subclass(one: Composition, *, compiled: bool) -> None:
    """Rules at gradients and steps, which are tensor subclasses, are refused by name; others change nothing."""
    model, plain = one.make(), one.make()
    plain(batch(0)).backward()
    run, _, optimizers = _rewritten(one, model, compiled=compiled)
    is_refused = any(kind in ("gradient", "step") for kind, *_ in one.rules)

    def train() -> None:
        run(batch(0)).backward()
        if is_refused:
            optimizers[0].step()

    if is_refused:
        with pytest.raises(gr.PolicyError, match=r"(gradient|step):\S+: .*(tensor subclass|TwoTensor)"):
            train()
        return
    train()
    near = 1e-3 if any(action.startswith("Store") for *_, action in one.rules) else 1e-8
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        for part in ("a", "b"):
            got, wanted = getattr(p.grad, part), getattr(q.grad, part)
            torch.testing.assert_close(got, wanted, rtol=near, atol=near, msg=lambda m, n=name: f"{n}: {m}\n{one.text}")


def assert_same(one: Composition, *, compiled: bool = False) -> None:
    """Compare a composition with its reference; AssertionError shows the program."""
    if one.subclass:
        _assert_of_subclass(one, compiled=compiled)
        return
    near = 1e-3 if any(action.startswith("Store") for *_, action in one.rules) else 1e-8
    near = 1e-3 if one.loop == "moved" else near
    got_all, wanted_all = run_rewritten(one, compiled=compiled), run_reference(one)
    if one.way == IN_ONE_GRAPH:  # which has no gradients to compare
        wanted_all = wanted_all[-1:]
    first = STEPS + 1 - len(wanted_all)
    for number, (got, wanted) in enumerate(zip(got_all, wanted_all, strict=True), first):
        where = f"gradients of step {number}" if number < STEPS else "the model afterwards"
        assert got.keys() >= wanted.keys(), f"{where}: {sorted(wanted.keys() - got.keys())}\n{one.text}"
        finite = [float(t.abs().max()) for t in wanted.values() if t.is_floating_point() and t.isfinite().all()]
        largest = max(finite, default=1.0)
        for name, t in wanted.items():
            torch.testing.assert_close(
                got[name], t, rtol=near, atol=near * max(largest, 1e-12), equal_nan=True,
                msg=lambda m, n=name, w=where: f"{w}, {n}: {m}\n{one.text}",
            )  # fmt: skip
