"""Numbers of other libraries as settings, such as numpy's scalars."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any


def python_number(value: Any) -> Any:
    """Return a real number of any type as an int or a float, and anything else unchanged."""
    if type(value) in (bool, int, float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
