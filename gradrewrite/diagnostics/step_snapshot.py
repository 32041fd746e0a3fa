"""Step snapshots: what is kept of a step at run time, so that it can be replayed if it fails."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from gradrewrite.ir.record_layout import BackwardOutputs, Check, RecordKey
from gradrewrite.ir.replay_graph import ReplayGraph

_KEYS = 4
_MAX_PENDING = 16  # forwards of one graph before a backward; one that saved only parameters never seems to be over
_LARGEST_KEPT = 1 << 26  # bytes of one gradient that comes from outside; a larger one is not kept alive


class VersionedRef(NamedTuple):  # one is made for every parameter at every step
    """A value, or a weak reference to one that belongs to the model, and the version it had."""

    value: Any
    version: int

    @classmethod
    def of(cls, value: Any, *, is_weak: bool = False) -> VersionedRef:
        """Note the version of a tensor."""
        version = _version(value)
        return cls(weakref.ref(value) if is_weak else value, version)

    def get(self) -> Any:
        """The value; RuntimeError if it is gone with its model."""
        value = self.value() if isinstance(self.value, weakref.ref) else self.value
        if value is None and isinstance(self.value, weakref.ref):
            raise RuntimeError("the model is gone")
        return value

    def is_overwritten(self) -> bool:
        """Whether the tensor was changed in place since."""
        value = self.get()
        return _version(value) != self.version


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of random number generators.

    Attributes:
        cpu: That of the CPU.
        cuda: Those of CUDA devices, by the index of the device.
    """

    cpu: Tensor
    cuda: Mapping[int, Tensor]

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
    extent: tuple[int, torch.Size]

    @classmethod
    def of(cls, tensor: Tensor) -> _Key:
        return cls(StorageWeakRef(tensor.untyped_storage()), (tensor.data_ptr(), tensor.shape))

    def is_of(self, tensor: Tensor) -> bool:
        other = _Key.of(tensor)
        return self.storage.cdata == other.storage.cdata and self.extent == other.extent


@dataclass(frozen=True, eq=False, slots=True)
class ForwardCall:
    """One call of a forward graph.

    Attributes:
        inputs: Its inputs.
        random: The random state before it; None if it draws no random numbers.
        keys: The storages of its last outputs, by the name of the node: they identify its backward.
    """

    inputs: tuple[VersionedRef, ...]
    random: RandomState | None
    keys: Mapping[str, _Key]

    def is_over(self, saved: Collection[str]) -> bool:
        """Whether something that it saved for the backward is gone."""
        return any(key.storage.expired() for name, key in self.keys.items() if name in saved)


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """The inputs of a replay; ``missing`` says what it lacks.

    Attributes:
        replay_graph: The graph.
        inputs: The values of the placeholders of the forward, in order.
        tangents: The gradients that came from outside, by placeholder.
        random: The random state before the forward.
        missing: Why the step cannot be replayed; ``""`` if it can.
    """

    replay_graph: ReplayGraph
    inputs: tuple[VersionedRef, ...] = ()
    tangents: Mapping[str, VersionedRef] = field(default_factory=dict)
    random: RandomState | None = None
    missing: str = ""


_Begun = tuple[tuple[VersionedRef, ...], RandomState | None]


class PendingForwards:
    """The calls of one forward graph whose backward has not run yet.

    Attributes:
        replay_graph: The graph that a replay runs.
    """

    def __init__(self, replay_graph: ReplayGraph) -> None:
        """Create it empty."""
        self.replay_graph = replay_graph
        self._calls: list[ForwardCall] = []
        placeholders = [n.name for n in replay_graph.graph.graph.find_nodes(op="placeholder")]
        names = [name for name in placeholders if name not in replay_graph.tangents]
        known = [replay_graph.inputs.get(name) for name in names]
        self._of_model = [k is not None and k.role in ("parameter", "buffer") for k in known]
        self._inputs = frozenset(names)
        self._saved: Collection[str] = ()

    def note_saved(self, names: Collection[str]) -> None:
        """Note the inputs of the backward, when that is compiled; inputs of the forward live on by themselves."""
        self._saved = frozenset(names) - self._inputs

    def fits(self, forward: fx.GraphModule) -> bool:
        """Whether a forward graph is given just the inputs of the joint graph."""
        return len(forward.graph.find_nodes(op="placeholder")) == len(self._of_model)

    def begin(self, args: Sequence[Any]) -> _Begun:
        """Note the inputs of a call, before it begins."""
        self._calls = [call for call in self._calls if not call.is_over(self._saved)][1 - _MAX_PENDING :]
        random = RandomState.now(args) if self.replay_graph.is_random else None
        return tuple(VersionedRef.of(a, is_weak=w) for a, w in zip(args, self._of_model, strict=True)), random

    def end(self, begun: _Begun, names: Sequence[str], outputs: Sequence[Any]) -> None:
        """Note what a call returned, whose storage identifies the backward."""
        keys: dict[str, _Key] = {}
        for name, value in zip(reversed(names), reversed(outputs), strict=False):
            if isinstance(value, Tensor) and len(keys) < _KEYS:
                keys[name] = _Key.of(value)
            elif len(keys) == _KEYS:
                break
        self._calls.append(ForwardCall(*begun, keys))

    def snapshot(self, args: Mapping[str, Any]) -> StepSnapshot:
        """Return the snapshot of the step whose backward is given these arguments, by placeholder."""
        call = self._find(args)
        if call is None:
            return StepSnapshot(
                self.replay_graph, missing="its forward is not known (a second backward through one graph?)"
            )
        tangents = {n: args[n] for n in self.replay_graph.tangents if n in args}
        if any(t.numel() * t.element_size() > _LARGEST_KEPT for t in tangents.values()):
            missing = (
                "a gradient from outside the model is larger than 64 MiB and was not kept; compute the loss inside"
            )
            return StepSnapshot(self.replay_graph, missing=f"{missing} the model, or call gr.locate")
        held = {name: VersionedRef.of(t) for name, t in tangents.items()}
        return StepSnapshot(self.replay_graph, call.inputs, held, call.random)

    def _find(self, args: Mapping[str, Any]) -> ForwardCall | None:
        for call in reversed(self._calls):
            known = [n for n in call.keys if isinstance(args.get(n), Tensor)]
            if known and all(call.keys[n].is_of(args[n]) for n in known):
                self._calls.remove(call)
                return call
        unknown = [call for call in self._calls if not any(isinstance(args.get(n), Tensor) for n in call.keys)]
        if len(unknown) == len(self._calls) == 1:  # it saved nothing but inputs
            return self._calls.pop()
        return None


@dataclass(frozen=True, slots=True)
class CheckedGraph:
    """One backward graph of a step.

    Attributes:
        outputs: Its auxiliary outputs.
        values: The values of its records.
        snapshot: The inputs of a replay; None where nothing is checked, or they were let go.
    """

    outputs: BackwardOutputs
    values: Mapping[RecordKey, float]
    snapshot: StepSnapshot | None

    def failed(self, modes: Collection[str]) -> list[Check]:
        """The checks of these kinds that failed, in the order of execution."""
        return [c for c in self.outputs.checks if c.on_failure in modes and self.values[c.key] > 0]


def names_of_outputs(gm: fx.GraphModule) -> list[str]:
    """Names of the nodes that a graph returns; ``""`` for constants."""
    returned = gm.graph.output_node().args[0]
    assert isinstance(returned, list | tuple)
    return [node.name if isinstance(node, fx.Node) else "" for node in returned]
