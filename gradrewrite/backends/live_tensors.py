"""Closed-over tensors of a backward graph, read at its run: their values, and their dtypes and sizes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gradrewrite._compat.autograd import keeps_graph

_KEYS = 8  # tensors, at each end of the inputs and of the results
_MAX_PENDING = 16  # forwards without a backward that are kept in mind
_CHANGED = (
    "{}: {} has changed since the forward of this backward, and another forward has run since then: an action reads "
    "what it closes over when the backward runs, so that the backwards of both act with its last value. Call backward "
    "before it changes, or let the function read a buffer of the model, as each forward had it: "
    'gr.call(function, reads={{"name": "param:..."}})'
)

Form = tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]


def form_of(tensor: Tensor) -> Form:
    """Return dtype, device, sizes and strides."""
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


class LiveForms:
    """The forms of all live tensors of compiled graphs; a change of one asks for compilations anew."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Tensor], Form]] = []
        self._number = 0

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Note the live tensors of a graph, as it is traced."""
        self._known += [(weakref.ref(tensor), form_of(tensor)) for tensor in tensors]

    def number(self) -> int:
        """Return the number of changes so far; code compiled for another number is out of date."""
        if self._known and any((t := ref()) is not None and form_of(t) != form for ref, form in self._known):
            self._known.clear()
            self._number += 1
        return self._number


@dataclass(frozen=True, slots=True)
class _Call:
    number: int
    versions: tuple[int, ...]  # of the tensors, behind the forward
    # Of some of what it was given and made, by which its backward is known. A weak reference keeps its address: else a
    # later tensor could have that of one that is gone.
    storages: frozenset[StorageWeakRef]


class LiveTensors:
    """The closed-over tensors of one graph, and the calls of its forward that have no backward yet."""

    def __init__(self, tensors: Mapping[str, Tensor], warn: Callable[[str, str], None]) -> None:
        """Watch tensors; ``warn`` takes a key and a text."""
        self._tensors, self._warn = tensors, warn
        self.readers: Mapping[str, str] = {}  # sites that read them; set when the backward is compiled
        self._names: Mapping[str, str] = {}
        self._calls: list[_Call] = []
        self._number = 0  # of the last forward
        self._lock = threading.Lock()  # threads may train one model

    def note_names(self, names: Mapping[int, str]) -> None:
        """Take names of buffers and parameters, by identity."""
        self._names = {key: names[id(t)] for key, t in self._tensors.items() if id(t) in names}

    def note_call(self, args: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Note a forward that has run."""
        with self._lock:
            self._number += 1
            self._calls = self._calls[1 - _MAX_PENDING :]
            given = [a for a in args if isinstance(a, Tensor) and not isinstance(a, nn.Parameter)]
            known = [*given[:_KEYS], *given[-_KEYS:], *outputs[:_KEYS], *outputs[-_KEYS:]]
            self._calls.append(_Call(self._number, self._versions(), _storages_of(known)))

    def note_backward(self, args: Sequence[Any]) -> None:
        """Warn of tensors with changes since the forward, after another forward."""
        with self._lock:
            if not self._calls:
                return
            own = self._calls[-1]
            if len(self._calls) > 1:
                storages = _storages_of(args)
                own = max(reversed(self._calls), key=lambda call: len(call.storages & storages))
            if not keeps_graph():
                self._calls.remove(own)
            if own.number == self._number:
                return
        for (key, tensor), before in zip(self._tensors.items(), own.versions, strict=True):
            if tensor._version != before:
                what = self._names.get(key, f"a tensor of shape {tuple(tensor.shape)}")
                self._warn(f"live {key}", _CHANGED.format(self.readers.get(key, "an action"), what))

    def _versions(self) -> tuple[int, ...]:
        return tuple([tensor._version for tensor in self._tensors.values()])


def _storages_of(values: Sequence[Any]) -> frozenset[StorageWeakRef]:
    plain = [t for t in values if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided]
    return frozenset([StorageWeakRef(t.untyped_storage()) for t in plain])
