"""Step snapshots, taken at run time for the replay of a failed step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from gradrewrite._compat.autograd import keeps_graph
from gradrewrite.ir.outputs import BackwardOutputs, PlacedCheck
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.replay_graph import ReplayGraph

_KEYS = 4
_MAX_PENDING = 16  # forwards of one graph before a backward; one that saved only parameters never seems to be over
_LARGEST_KEPT = 1 << 26  # bytes of one gradient that comes from outside; a larger one is not kept alive


class VersionedRef(NamedTuple):
    """A value, or a weak reference to one that belongs to the model, and the version it had."""

    value: Any
    version: int

    def get(self) -> Any:
        """The value; RuntimeError if it is gone with its model, or its memory was released since."""
        value = self.value() if isinstance(self.value, weakref.ref) else self.value
        if value is None and isinstance(self.value, weakref.ref):
            raise RuntimeError("the model is gone")
        if _is_released(value):
            raise RuntimeError(
                "the memory of parameters was released behind the backward, as fully_shard does; "
                "model.set_reshard_after_backward(False) keeps it while you look for the cause"
            )
        return value

    def is_overwritten(self) -> bool:
        """Whether the tensor was changed in place since."""
        return _version(self.get()) != self.version


def _version(value: Any) -> int:
    return value._version if _has_version(value) else 0


def _without_history(value: Any) -> Any:
    """The value, of one that another graph computed without its autograd node.

    The node holds compiled code, which holds the session and so what is kept here: a cycle through C++ that Python's
    garbage collector does not see. The version is still that of the value.
    """
    return value.detach() if isinstance(value, Tensor) and value.grad_fn is not None else value


def _is_released(value: Any) -> bool:
    """Whether the memory of a tensor was freed, though the tensor is there."""
    is_plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided
    return is_plain and value.numel() > 0 and value.untyped_storage().nbytes() == 0


def _has_version(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of random number generators."""

    cpu: Tensor
    cuda: Mapping[int, Tensor]  # those of CUDA devices, by the index of the device

    @classmethod
    def now(cls, values: Sequence[Any]) -> RandomState:
        """The states of the generators of the devices of these values."""
        indices = {v.device.index for v in values if isinstance(v, Tensor) and v.device.type == "cuda"}
        return cls(torch.get_rng_state(), {index: torch.cuda.get_rng_state(index) for index in indices})

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)


class _Key(NamedTuple):
    """The identity of a tensor, without keeping it alive."""

    storage: StorageWeakRef
    address: int
    shape: torch.Size

    @classmethod
    def of(cls, tensor: Tensor) -> _Key:
        return cls(StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr(), tensor.shape)

    def is_of(self, tensor: Tensor) -> bool:
        if self.address != tensor.data_ptr() or self.shape != tensor.shape:
            return False
        same: bool = self.storage.cdata == tensor.untyped_storage()._cdata
        return same


class ForwardCall(NamedTuple):
    """One call of a forward graph."""

    values: Sequence[Any]  # its inputs; weak references to those that belong to the model
    versions: Sequence[int]
    random: RandomState | None  # random state before it; None if it draws no random numbers
    # Storages of some of its last outputs, by the name of the node: they identify its backward.
    keys: Mapping[str, _Key]
    names: Any = None  # of its examples and tokens, that the user gave

    def is_over(self, saved: Collection[str]) -> bool:
        """Whether something that it saved for the backward is gone."""
        return any([key.storage.expired() for name, key in self.keys.items() if name in saved])


class StepSnapshot(NamedTuple):
    """The inputs of a replay."""

    replay_graph: ReplayGraph
    # Placeholders of the forward, in order; weak references to those that belong to the model.
    values: Sequence[Any] = ()
    versions: Sequence[int] = ()
    tangents: Mapping[str, VersionedRef] = MappingProxyType({})  # gradients that came from outside, by placeholder
    random: RandomState | None = None  # random state before the forward
    missing: str = ""  # why the step cannot be replayed; ``""`` if it can
    names: Any = None  # of its examples and tokens, that the user gave; None where there are none
    streams: Mapping[int, Tensor] = MappingProxyType({})  # copies of random streams, by the identity of the tensor

    @property
    def inputs(self) -> tuple[VersionedRef, ...]:
        """The placeholders of the forward."""
        return tuple(map(VersionedRef, self.values, self.versions))


_Begun = tuple[Sequence[Any], Sequence[int], RandomState | None, Any]


class PendingForwards:
    """The calls of one forward graph before their backwards."""

    def __init__(self, replay_graph: ReplayGraph) -> None:
        self.replay_graph = replay_graph  # graph that a replay runs
        self._calls: list[ForwardCall] = []
        self._lock = threading.Lock()  # of the calls: threads may train one model
        placeholders = [n.name for n in replay_graph.graph.graph.find_nodes(op="placeholder")]
        names = [name for name in placeholders if name not in replay_graph.tangents]
        known = [replay_graph.inputs.get(name) for name in names]
        self._updated = [n for n, name in enumerate(names) if name in replay_graph.updated]
        self._of_model = [k is not None and k.role in ("parameter", "buffer") for k in known]
        self._inputs = frozenset(names)
        self._saved: Collection[str] = ()
        self._positions: Mapping[str, int] = {}  # of the inputs of the backward
        self._tangents: Sequence[tuple[str, int]] = ()  # names and positions
        self._key = -1  # position of the output that identifies the backward, once it is known what is saved
        # Of the inputs of the last call: weak references to those of the model, and whether they have versions. The
        # next call is mostly given the same parameters, and compiled code is always given the same kinds of tensors.
        self._refs: list[weakref.ref[Any] | None] = []
        self._versioned: list[bool] = []

    def note_saved(self, names: Sequence[str]) -> None:
        """Note the inputs of the backward, when that is compiled; inputs of the forward live on by themselves."""
        self._saved = frozenset(names) - self._inputs
        self._positions = {name: number for number, name in enumerate(names)}
        self._tangents = [(n, self._positions[n]) for n in self.replay_graph.tangents if n in self._positions]
        self._key = -1

    def fits(self, forward: fx.GraphModule) -> bool:
        """Whether a forward graph is given just the inputs of the joint graph."""
        return len(forward.graph.find_nodes(op="placeholder")) == len(self._of_model)

    def begin(
        self, args: Sequence[Any], names: Any = None, copies: Mapping[int, Tensor] = MappingProxyType({})
    ) -> _Begun:
        """Note the inputs of a call before it; copy the written ones, but for those with ``copies`` by position."""
        with self._lock:
            if self._calls:
                self._calls = [call for call in self._calls if not call.is_over(self._saved)][1 - _MAX_PENDING :]
        refs = self._refs
        if len(refs) != len(args) or not all([r is None or r() is a for r, a in zip(refs, args, strict=True)]):
            refs = self._note_inputs(args)
        try:
            pairs = zip(args, refs, self._versioned, strict=True)
            versions = [_version(a) if r is None else (a._version if v else 0) for a, r, v in pairs]
        except RuntimeError:  # an inference tensor has none
            refs = self._note_inputs(args)
            versions = [_version(a) for a in args]
        values = [_without_history(a) if r is None else r for r, a in zip(refs, args, strict=True)]
        for n in self._updated:
            values[n], versions[n] = copies[n] if n in copies else args[n].detach().clone(), 0
        return values, versions, RandomState.now(args) if self.replay_graph.is_random else None, names

    def _note_inputs(self, args: Sequence[Any]) -> list[weakref.ref[Any] | None]:
        self._refs = [weakref.ref(a) if w else None for a, w in zip(args, self._of_model, strict=True)]
        self._versioned = [_has_version(a) for a in args]
        return self._refs

    def end(self, begun: _Begun, names: Sequence[str], outputs: Sequence[Any]) -> None:
        """Record the outputs of a call; their storage identifies the backward."""
        keys: dict[str, _Key] = {}
        for number in (self._key,) if self._key >= 0 else reversed(range(len(names))):
            if not isinstance(outputs[number], Tensor):
                continue
            if names[number] in self._saved:
                self._key = number
                keys = {names[number]: _Key.of(outputs[number])}
                break
            if len(keys) < _KEYS:
                keys[names[number]] = _Key.of(outputs[number])
        with self._lock:
            self._calls.append(ForwardCall(*begun[:3], keys, begun[3]))

    def snapshot(self, args: Sequence[Any]) -> StepSnapshot:
        """Return the step snapshot for a backward with these arguments; see ``note_saved``."""
        call = self._find(args)
        if call is None:
            return StepSnapshot(
                self.replay_graph, missing="its forward is not known (two forwards saved nothing but inputs?)"
            )
        tangents = {name: VersionedRef(args[at], _version(args[at])) for name, at in self._tangents}
        if any([t.value.numel() * t.value.element_size() > _LARGEST_KEPT for t in tangents.values()]):
            missing = "a gradient from outside the model is larger than 64 MiB and was not kept; "
            return StepSnapshot(
                self.replay_graph, missing=f"{missing}compute the loss inside the model, or call gr.locate"
            )
        return StepSnapshot(self.replay_graph, call.values, call.versions, tangents, call.random, names=call.names)

    def _find(self, args: Sequence[Any]) -> ForwardCall | None:
        unknown = []
        with self._lock:
            for number in reversed(range(len(self._calls))):
                call = self._calls[number]
                known = [(key, t) for name, key in call.keys.items() if (t := self._argument(name, args)) is not None]
                if known and all([key.is_of(t) for key, t in known]):
                    return call if keeps_graph() else self._calls.pop(number)
                if not known:
                    unknown.append(call)
            if len(unknown) == len(self._calls) == 1:  # it saved nothing but inputs
                return self._calls.pop()
        return None

    def _argument(self, name: str, args: Sequence[Any]) -> Tensor | None:
        position = self._positions.get(name)
        value = args[position] if position is not None else None
        return value if isinstance(value, Tensor) else None


@dataclass(frozen=True, slots=True)
class CheckedGraph:
    """One backward graph of a step."""

    outputs: BackwardOutputs  # its auxiliary outputs
    values: Mapping[RecordKey, float]
    snapshot: StepSnapshot | None  # inputs of a replay; None where nothing is checked, or they were let go

    def failed(self, modes: Collection[str]) -> list[PlacedCheck]:
        """The checks of these kinds that failed, in the order of execution."""
        return [c for c in self.outputs.checks if c.report.on_failure in modes and self.values[c.report.count] > 0]


def names_of_outputs(gm: fx.GraphModule) -> list[str]:
    """Return the names of a graph's output nodes; ``""`` for constants."""
    returned = gm.graph.output_node().args[0]
    assert isinstance(returned, list | tuple)
    return [node.name if isinstance(node, fx.Node) else "" for node in returned]
