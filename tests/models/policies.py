"""Random policies as values, for the fuzzer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import (
    CheckFinite,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    Keep,
    NanToNum,
    Observe,
    Scale,
    Zero,
)


@dataclass(frozen=True)
class Rule:
    """Take an action wherever the pattern matches and the site has the kind; matching nothing is no error."""

    pattern: str
    kinds: tuple[str, ...]
    action: Any

    def __call__(self, site: gr.Site) -> Any:
        may_stand = site.kind in getattr(self.action, "kinds", EVERYWHERE)
        return self.action if may_stand and site.kind in self.kinds and site.matches(self.pattern) else None


@dataclass(frozen=True)
class Function:
    """A tensor function with a name that says what it does."""

    text: str
    run: Callable[[Tensor], Tensor]

    def __call__(self, g: Tensor) -> Tensor:
        return self.run(g)

    def __repr__(self) -> str:
        return self.text


def _recording(g: Tensor) -> Tensor:
    gr.record("total", g.sum())
    gr.record("total", g.abs().sum())
    return g * 0.5


FUNCTIONS = [
    Function("g.clamp(-0.1, 0.1)", lambda g: g.clamp(-0.1, 0.1)),
    Function("g / (1 + g.norm())", lambda g: g / (1 + g.norm().to(g.dtype))),
    Function("g + 0.1", lambda g: g + 0.1),
    Function("where(g > 0, g, 2 * g)", lambda g: torch.where(g > 0, g, 2 * g)),
    Function("records total twice, g * 0.5", _recording),
    Function("g", lambda g: g),
]
BOUNDS = st.sampled_from([0.01, 0.3, 5.0])
EVERYWHERE = ("error", "gradient", "input")

ACTIONS = st.one_of(
    st.builds(ClipByValue, BOUNDS, log=st.booleans()),
    st.builds(ClipByNorm, BOUNDS, norm_type=st.sampled_from([2.0, 1.0, math.inf, 3.0]), log=st.booleans()),
    st.builds(lambda bound: ClipByNorm(torch.tensor(bound)), BOUNDS),
    st.builds(lambda bound: ClipByValue(torch.tensor(bound)), BOUNDS),
    st.builds(Scale, st.sampled_from([-1.0, 0.5, 3.0])),
    st.sampled_from([Zero(), NanToNum(), Keep(), CheckFinite("record"), CheckFinite("warn")]),
    st.sampled_from([Observe("norm", "max_abs"), Observe("min", "max", "zeros", "nonfinite", "mean_abs")]),
    st.sampled_from(FUNCTIONS),
)
SITE_PATTERNS = st.sampled_from(
    ["*", "*", "*/*", "/*", "*#0", "*#1", "t", "*fc*", "*block*", "*norm*", "*flat*", "*same*", "*/add*", "*/mul*",
     "*/getitem*", "*/view*", "fc0", "block0", "*/reshape", "*act*", "*/sin", "*/getattr"]
)  # fmt: skip
GRADIENT_PATTERNS = st.sampled_from(["*", "*.weight", "fc0.*", "*w", "*block*"])


@st.composite
def rules(
    draw: Any, kinds: Sequence[str] = ("error", "error", "gradient", "group", "group", "activation", "any")
) -> Any:
    """One rule: at errors, at gradients and inputs, or over a group of gradients."""
    kind = draw(st.sampled_from(kinds))
    if kind == "group":
        names = draw(st.sampled_from(["one", "two", "three"]))
        bound = {"one": 0.5, "two": 0.05, "three": 2.0}[names]
        order = math.inf if names == "three" else 2.0
        return Rule(draw(GRADIENT_PATTERNS), ("gradient",), ClipByGlobalNorm(bound, group=names, norm_type=order))
    if kind == "activation":
        return Rule(
            draw(SITE_PATTERNS),
            ("activation",),
            draw(st.sampled_from([Observe("norm", "min"), CheckFinite("record"), Keep()])),
        )
    if kind == "gradient":
        return Rule(draw(GRADIENT_PATTERNS), ("gradient", "input"), draw(ACTIONS))
    return Rule(draw(SITE_PATTERNS), ("error",) if kind == "error" else EVERYWHERE, draw(ACTIONS))


policies = st.builds(lambda first, rest: [first, *rest], rules(("error", "any")), st.lists(rules(), max_size=3))
