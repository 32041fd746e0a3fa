"""Answers of the policy at values without a dense gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from gradrewrite._utils.formatting import listed
from gradrewrite.errors import PolicyError, UnsupportedGradientError
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import KeepTensor, MeasureTensor, Omitted
from gradrewrite.policy.rules import Answered
from gradrewrite.sites import Site


def possible(answers: tuple[Answered, ...], layout: torch.layout | None = None) -> tuple[Answered, ...]:
    """Leave out lenient answers at sparse tensors and subclasses."""
    return answers if layout is torch.strided else tuple(found for found in answers if not found.is_lenient)


def check_uses(
    sums: Mapping[Site, Sequence[Answered]],
    refused: Mapping[Site, str],
    ask: Callable[[Site], Sequence[Answered]],
) -> None:
    """Raise PolicyError for an action at an error that is only measured, or at a use without an error of its own."""
    for site, answers in sums.items():
        acting = next((a for a in answers if not isinstance(a.insertion.effect, _MEASURING)), None)
        if acting is not None:
            raise PolicyError(_TAKEN_APART.format(site, describe(acting.action)), code="use")
    for site, why in refused.items():
        if ask(site):
            raise PolicyError(f"{site}: {why}", code="use")


_MEASURING = (MeasureTensor, KeepTensor, Omitted)
_TAKEN_APART = (
    "{}: {} cannot act here: a rule for one use of another value (a pattern with '->') takes the part of this error "
    "that goes there, so that the sum is only measured. Leave one of the two rules out, or let the other one name this "
    "value on its left side"
)


def check_subclasses(answers: Mapping[Site, Sequence[Answered]], classes: Mapping[Site, str]) -> Iterator[str]:
    """Yield warnings for actions at values of tensor subclasses; UnsupportedGradientError for those at gradients."""
    by_class: dict[str, list[Site]] = {}
    for site, found in answers.items():
        if not found:
            continue
        if site.traits.is_leaf:
            raise UnsupportedGradientError(
                f"{site}: the gradient is a tensor subclass other than DTensor, and {describe(found[0].action)} takes "
                f"plain tensors and DTensors only. Let the policy leave this site alone: one that returns None at "
                f"{str(site)!r}, or patterns that do not match it"
            )
        by_class.setdefault(classes[site], []).append(site)
    for name, sites in by_class.items():
        yield (
            f"{listed(list(map(str, sites)))}: the policy answers at values that are a {name}, a tensor subclass other "
            "than DTensor. No action can act there, and nothing was inserted"
        )
