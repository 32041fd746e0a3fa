"""Kept attributes, modes and random state of a diagnosis."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from gradrewrite._utils.tensors import kept_random_state

_MOST = 1000  # items of a container that is copied: metrics, no data set


@contextlib.contextmanager
def kept_attributes(owner: Any) -> Iterator[None]:
    """Restore the attributes of an object, and the containers inside.

    Lists of more than 1,000 items lose the items that were appended; larger dicts stay as the block leaves them.
    """
    found = [*_containers(vars(owner), set())]
    before = [(one, copy.copy(one) if len(one) <= _MOST else None, len(one)) for one in found]
    try:
        yield
    finally:
        for container, items, number in before:
            if items is not None:
                container.clear()
                (container.update if isinstance(container, dict) else container.extend)(items)
            elif isinstance(container, list):
                del container[number:]


def _containers(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield a dict or a list, and the nested ones.

    The items of large containers are not searched.
    """
    if not isinstance(value, dict | list) or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    if len(value) > _MOST:
        return
    for item in value.values() if isinstance(value, dict) else value:
        yield from _containers(item, seen)


@contextlib.contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Restore the modes of modules."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, is_training in before:
            module.training = is_training


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the random state of torch, Python and NumPy."""
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with kept_random_state():
            yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
