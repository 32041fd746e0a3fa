"""States carried from call to call of a value, in the order of the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from gradrewrite.ir import editing

Current = Callable[[fx.Node], fx.Node]


@dataclass(eq=False)
class CarriedState:
    """A state of all calls of a value, and the actions that read or set it.

    Attributes:
        tensor: The state before the backward.
        steps: For each action its nodes, and the node of the new value; None where it sets none.
    """

    tensor: Tensor
    steps: list[tuple[Sequence[fx.Node], fx.Node | None]] = field(default_factory=list)

    def chain(self, graph: fx.Graph, current: Current, first: fx.Node | None = None) -> fx.Node | None:
        """Let each action read the value set by the one before; return the last value.

        They are in the order of execution; the first one reads this node, or the tensor.
        """
        order = {node: number for number, node in enumerate(graph.nodes)}
        steps = [([n for n in nodes if n in order], value) for nodes, value in self.steps]
        last = first
        for nodes, value in sorted((s for s in steps if s[0]), key=lambda step: order[step[0][0]]):
            if last is not None:
                editing.read_instead_of_live(graph, self.tensor, last, nodes)
            last = last if value is None else current(value)
        return last


class CarriedStates:
    """The carried states of a graph, by key."""

    def __init__(self) -> None:
        self._states: dict[str, CarriedState] = {}

    def note(self, tensors: Mapping[str, Tensor], nodes: Sequence[fx.Node], updates: Mapping[str, fx.Node]) -> None:
        """Note the nodes of an action, with the new values that it sets."""
        for key, tensor in tensors.items():
            state = self._states.setdefault(key, CarriedState(tensor))
            state.steps.append((nodes, updates.get(key)))

    def take(self) -> dict[str, CarriedState]:
        """Return the states that were noted since the last call."""
        found, self._states = self._states, {}
        return found

    def chain(self, graph: fx.Graph, current: Current) -> dict[str, tuple[Tensor, fx.Node]]:
        """Chain all states; return those that are set, with their last values."""
        found = {key: (state.tensor, state.chain(graph, current)) for key, state in self._states.items()}
        return {key: (tensor, node) for key, (tensor, node) in found.items() if node is not None}
