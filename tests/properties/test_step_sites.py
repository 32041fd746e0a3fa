"""Step sites on gradients of any shape and type, against the actions called by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import (
    L2,
    CheckFinite,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    NanToNum,
    Observe,
    Scale,
    Zero,
)
from gradrewrite.policy.actions import insertion_at
from gradrewrite.policy.insertions import ReplaceTensor

SHAPES = ((), (0,), (1,), (7,), (3, 4), (2, 1, 3))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
SINGLE: tuple[Any, ...] = (
    ClipByValue(0.5, min=-0.25),
    ClipByNorm(0.7),
    ClipByNorm(0.7, norm_type=math.inf),
    Scale(-2.0),
    Zero(),
    NanToNum(),
    L2(0.5),
    Observe("max_abs", "nonfinite"),
    CheckFinite("record"),
)
GROUPS: tuple[Any, ...] = (
    ClipByGlobalNorm(0.9),
    ClipByGlobalNorm(1e6),
    ClipByGlobalNorm(0.9, norm_type=1.0),
    ClipByGlobalNorm(0.3, group="other"),
    ClipByGlobalNorm(math.inf, group="other"),
)

parameters = st.lists(
    st.tuples(
        st.sampled_from(SHAPES),
        st.sampled_from(DTYPES),
        st.sampled_from(("none", "zero", "normal", "small", "infinite")),
        st.lists(st.sampled_from(SINGLE), max_size=3),
        st.lists(st.sampled_from(range(len(GROUPS))), max_size=2, unique=True),
    ),
    min_size=1,
    max_size=5,
)


class Holder(nn.Module):
    def __init__(self, shapes: Any) -> None:
        super().__init__()
        self.p = nn.ParameterList(torch.randn(shape, dtype=dtype) for shape, dtype in shapes)


def gradient(p: Tensor, kind: str) -> Tensor | None:
    if kind == "none":
        return None
    g = torch.zeros_like(p) if kind == "zero" else torch.randn_like(p)
    if kind == "small":
        g = g * 1e-3
    if kind == "infinite" and g.numel():
        g.view(-1)[0] = math.inf
    return g


def is_possible(dtype: torch.dtype, actions: Any) -> bool:
    return not (dtype.is_complex and any(isinstance(a, ClipByValue) for a in actions))


SITE = gr.Site("step", "w")


def call(action: Any, g: Tensor, p: Tensor) -> Tensor:
    effect = insertion_at(action, SITE).effect
    if isinstance(effect, ReplaceTensor):
        return effect.run(g, p) if effect.reads == "value" else effect.run(g)
    return g


# Norms of float32 gradients are float32, beside those of float64 too.
MIXED: Any = [((), torch.float64, "normal", [], [0, 3]), ((7,), torch.float32, "normal", [], [0, 3])]


@pytest.mark.long
@example(MIXED, False)
@given(parameters, st.booleans())
def test_step_sites_do_what_their_actions_say(found: Any, fused: bool) -> None:
    torch.manual_seed(0)
    found = [(s, d, k, a if is_possible(d, a) else [], g) for s, d, k, a, g in found]
    chosen = {GROUPS[n].group: n for *_, groups in found for n in groups}  # one bound for each group
    groups = [[GROUPS[n] for n in sorted(numbers) if chosen[GROUPS[n].group] == n] for *_, numbers in found]
    answers = {f"p.{n}": [*found[n][3], *groups[n]] for n in range(len(found))}
    # The list names the groups in their order.
    named = sorted(chosen.values())
    policy: list[Any] = [lambda site: answers.get(site.name, ())[: len(found[int(site.name[2:])][3])]]
    policy += [lambda site, g=GROUPS[n]: g if g in answers[site.name] else None for n in named]
    holder = Holder([(s, d) for s, d, *_ in found])
    model = gr.transform(holder, [_at_steps(callback) for callback in policy])
    grads = [gradient(p, found[n][2]) for n, p in enumerate(holder.p)]
    wanted = list(grads)
    for n, (g, p) in enumerate(zip(grads, holder.p, strict=True)):
        for action in found[n][3] if g is not None else ():
            wanted[n] = call(action, wanted[n], p.detach())
    for n in named:
        members = [m for m, g in enumerate(wanted) if g is not None and GROUPS[n] in groups[m]]
        if members:
            for m, g in zip(members, GROUPS[n].apply_group([wanted[m] for m in members]), strict=True):
                wanted[m] = g
    fused &= not any(p.is_complex() for p in holder.p)
    optimizer = gr.guard(torch.optim.SGD(holder.p, lr=0.0, fused=fused), model)
    for p, g in zip(holder.p, grads, strict=True):
        p.grad = None if g is None else g.clone()
    optimizer.step()
    for p, g in zip(holder.p, wanted, strict=True):
        assert (p.grad is None) == (g is None)
        if g is not None:
            tolerance = 1e-12 if g.dtype == torch.float64 else torch.finfo(g.dtype).eps * 4
            torch.testing.assert_close(p.grad, g, rtol=tolerance, atol=0, equal_nan=True)


def _at_steps(callback: Any) -> Any:
    return lambda site: callback(site) if site.kind == "step" else None
