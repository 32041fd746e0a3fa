"""Inputs of a Dynamo graph: parameters, buffers, arguments, and values from before a graph break."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Role = Literal["parameter", "buffer", "input", "value"]


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A tensor input of a Dynamo graph."""

    role: Role  # ``"value"``: made by an earlier graph, before a graph break
    name: str  # of the parameter or buffer, or of the argument
    is_mask: bool = False  # it holds -inf on purpose
    has_site: bool = False  # its gradient is ``gradient:<name>`` of a parameter, ``input:<name>`` of an argument
    parameter: weakref.ref[Tensor] | None = None  # None for anything else, and where there is no site
