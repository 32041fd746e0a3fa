"""Inputs of a Dynamo graph."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Leaf:
    """A differentiable input of the Dynamo graph: a parameter (with a reference to it), or an argument."""

    is_parameter: bool
    name: str
    ref: weakref.ref[Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """What an input of a Dynamo graph is; a mask holds -inf on purpose."""

    role: Literal["parameter", "buffer", "input", "value"]
    name: str
    is_mask: bool = False
