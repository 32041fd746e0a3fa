"""Answers of the policy at values without a dense gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from gradrewrite._utils.formatting import listed
from gradrewrite.errors import UnsupportedGradientError
from gradrewrite.policy.actions import describe
from gradrewrite.policy.rules import Answered
from gradrewrite.sites import Site


def possible(answers: tuple[Answered, ...], layout: torch.layout | None = None) -> tuple[Answered, ...]:
    """Leave out lenient answers at sparse tensors and subclasses."""
    return answers if layout is torch.strided else tuple(found for found in answers if not found.is_lenient)


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
