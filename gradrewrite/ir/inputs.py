"""Inputs of a Dynamo graph: parameters, buffers, arguments, and values from before a graph break."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Role = Literal["parameter", "buffer", "input", "value"]


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A tensor input of a Dynamo graph.

    Attributes:
        role: What it is; ``"value"`` for one that an earlier graph made, before a graph break.
        name: Name of the parameter or buffer, or of the argument.
        is_mask: Whether it holds -inf on purpose.
        has_site: Whether its gradient is a site: ``gradient:<name>`` of a parameter, ``input:<name>`` of an argument.
        parameter: A reference to the parameter; None for anything else, and where there is no site.
    """

    role: Role
    name: str
    is_mask: bool = False
    has_site: bool = False
    parameter: weakref.ref[Tensor] | None = None
