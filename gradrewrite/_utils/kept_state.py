"""State of a model, kept over a training step."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradrewrite._utils.tensors import kept_random_state, tensors_in


class KeptState:
    """The state of a model and of further tensors.

    Gradients of leaves are taken off, and given back by ``restore``; values are copied of buffers, and of the leaves
    with an identity in ``written`` (None: of all). Attributes of modules count: numbers, tensors, lists, dicts and sets
    (states of metrics), replaced buffers, ``training`` and ``requires_grad``.
    """

    def __init__(self, model: nn.Module, written: Collection[int] | None = None) -> None:
        self._written = written
        self._modules = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
        own = [v for _, attributes, _ in self._modules for name, v in attributes.items() if name not in _OF_MODULES]
        self._containers = [(v, v.copy()) for v in own if type(v) in (list, dict, set)]
        self._flags = [(p, p.requires_grad) for p in model.parameters()]
        self._gradients: dict[Tensor, Tensor | None] = {}
        self._values: dict[Tensor, Tensor] = {}
        self._random = _python_random_state()
        self.add(model.buffers(), are_written=True)
        self.add(model.parameters())
        of_containers = (one for _, items in self._containers for one in tensors_in(items))
        self.add((t for t in (*filter(_is_tensor, own), *of_containers) if t.is_leaf), are_written=True)

    def add(self, tensors: Iterable[Tensor], *, are_written: bool = False) -> None:
        """Keep further leaves, and written tensors."""
        for t in tensors:
            if t in self._gradients or t in self._values or not (t.is_leaf or are_written):
                continue
            if t.is_leaf:
                self._gradients[t] = t.grad
                t.grad = None
            if are_written or self._written is None or id(t) in self._written:
                self._values[t] = t.detach().clone()

    def has_drawn(self) -> bool:
        """Whether Python's or NumPy's random numbers were drawn from."""
        return repr(_python_random_state()) != repr(self._random)

    def restore(self) -> None:
        """Give all of it back."""
        python, of_numpy = self._random
        random.setstate(python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)
        for module, attributes, buffers in self._modules:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for container, items in self._containers:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(items)
        for parameter, needs_gradient in self._flags:
            parameter.requires_grad = needs_gradient
        for tensor, gradient in self._gradients.items():
            tensor.grad = gradient
        for tensor, value in self._values.items():
            give_back(tensor, value)


_OF_MODULES = frozenset(vars(nn.Module()))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def give_back(tensor: Tensor, value: Tensor) -> None:
    """Write a value into a tensor, if a bit differs.

    A version tells less: BatchNorm writes without a new one, and a write of equal bits would spoil a graph that saved
    the tensor.
    """
    if not torch.equal(_bytes_of(tensor), _bytes_of(value)):
        with torch.no_grad():
            tensor.copy_(value)


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_sparse:
        return plain.to_dense().contiguous().view(torch.uint8)
    return plain.contiguous().flatten().view(torch.uint8)


def _python_random_state() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)


@contextlib.contextmanager
def kept_state(model: nn.Module, given: Any, written: Collection[int] | None = None) -> Iterator[KeptState]:
    """Restore a model, inputs and random state behind the block."""
    state = KeptState(model, written)
    state.add(tensors_in(given))
    try:
        with kept_random_state():
            yield state
    finally:
        state.restore()
