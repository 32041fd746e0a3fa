"""The policy of an observed training."""

from __future__ import annotations

from typing import Any

import torch

from gradrewrite import passes
from gradrewrite.policy.rules import leave_out_unsupported
from gradrewrite.sites import Site

_RECTIFIERS = frozenset(("relu", "relu_", "relu6", "threshold"))
_SATURATING = frozenset(("tanh", "tanh_", "sigmoid", "sigmoid_"))


@leave_out_unsupported
def observe(site: Site) -> list[Any] | None:
    """Record all that the judge reads; no policy of the user's."""
    if site.kind == "activation" and site.op in _SATURATING | _RECTIFIERS:
        return [passes.Observe("saturated" if site.op in _SATURATING else "zeros")]
    is_hidden_state = site.iteration is not None and site.op == "h"  # of a recurrent layer, at each time step
    if site.kind == "error" and (site.output_of or is_hidden_state or site.dtype == torch.float16):
        return [passes.Observe("norm", "zeros")]
    if site.kind == "gradient":
        return [passes.Observe("norm", "zeros"), passes.CheckFinite("record")]
    return None


@leave_out_unsupported
def observe_model(site: Site) -> list[Any] | None:
    """Record the judge's figures of a model, without its loss."""
    return None if site.is_outside and site.kind in ("activation", "error") else observe(site)
