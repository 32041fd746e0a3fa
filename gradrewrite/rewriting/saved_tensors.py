"""Saved tensors of a joint graph, and their sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, fx

from gradrewrite._compat import collectives, fake_tensors, operators
from gradrewrite.instrumentation.naming import name_values
from gradrewrite.ir.attribution import attribute_nodes, backward_names
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import read_markers, value_of
from gradrewrite.ir.partitioning import saved_names
from gradrewrite.ir.values import num_bytes, shape_of
from gradrewrite.rewriting.restored_values import backward_closure
from gradrewrite.sites import Site

SMALL = 4096  # bytes; smaller tensors are left alone


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor for the backward, once for all of its views."""

    site: Site
    node: fx.Node  # that makes the memory


class SavedTensors:
    """The saved tensors of one marked joint graph; to be made before anything is inserted."""

    def __init__(self, marked: MarkedJointGraph) -> None:
        graph = marked.graph
        self._graph = graph
        self._numbers = attribute_nodes(graph, backward_names(graph))
        self._values = marked.values
        self._site_at = name_values(marked.values, marked.call, marked.counts)
        self._own = set(graph.nodes)  # of the model; what is inserted later is no site
        self._copies: set[fx.Node] = set()
        self._bases: dict[int, fx.Node] = {}  # nodes that make memory, by its key
        self._outside: set[int] = set()  # memory of inputs
        self._note_memory(graph.nodes)
        self._value_of_base: dict[fx.Node, int] = {}
        for number, marker in sorted(read_markers(graph)[0].items()):
            node = marker.all_input_nodes[0]
            base = self.base_of(node)
            if base is not None and number in self._site_at and _has_all_elements(node, base):
                self._value_of_base.setdefault(base, number)
        self.random = self._ops_with(operators.draws_numbers)
        self.collective = self._ops_with(collectives.is_collective)

    def base_of(self, node: fx.Node) -> fx.Node | None:
        """Return the maker of the memory of a node's value; None for inputs and other things than tensors."""
        key = _memory_of(node)
        return None if key is None else self._bases.get(key)

    def follow(self, copies: Mapping[str, str] = MappingProxyType({})) -> None:
        """Take note of the memory of inserted nodes; ``copies`` stand in the place of nodes of the model."""
        new = [node for node in self._graph.nodes if node not in self._own]
        self._note_memory(new)
        numbers = {node.name: number for node, number in self._numbers.items()}
        self._copies = {node for node in new if node.name in copies}
        self._numbers |= {n: numbers[copies[n.name]] for n in self._copies if copies[n.name] in numbers}

    def find(self, further: Sequence[fx.Node] = ()) -> tuple[list[SavedTensor], frozenset[str]]:
        """Return the saved tensors that are sites, and the names of all saved nodes; ``further`` are returned nodes."""
        names = saved_names(_module_of(self._graph), [node.name for node in further])
        nodes = {node.name: node for node in self._graph.nodes}
        bases = dict.fromkeys(base for name in names if (base := self.base_of(nodes[name])) is not None)
        order = {node: number for number, node in enumerate(self._graph.nodes)}
        found = [base for base in sorted(bases, key=order.__getitem__) if not self._why_left_alone(base)]
        return self._named(found), frozenset(names)

    def candidates(self) -> list[Site]:
        """Return sites of all tensors that a partitioner might save."""
        closure = backward_closure(self._graph)
        bases = [base for base in self._bases.values() if base not in closure and not self._why_left_alone(base)]
        return [saved.site for saved in self._named(bases)]

    def not_saved(self, saved: Sequence[SavedTensor]) -> dict[Site, str]:
        """Return the sites of values that are not saved, and why."""
        known = {one.node for one in saved}
        return {
            self._site(base): self._why_left_alone(base) or "the backward does not need it, or computes it again anyway"
            for base in self._value_of_base
            if base not in known
        }

    def left_alone(self, base: fx.Node) -> tuple[Site, str]:
        """Return the site next to a tensor, and why it is none itself; ``""`` if it is one."""
        return self._site(base), self._why_left_alone(base)

    def _note_memory(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            key = _memory_of(node)
            if key is None or key in self._bases or key in self._outside:
                continue
            if node.op == "call_function":
                self._bases[key] = node
            else:
                self._outside.add(key)

    def _ops_with(self, has: Callable[[fx.Node], bool]) -> frozenset[int]:
        """Return the numbers of the torch-level ops with such a node."""
        return frozenset(self._numbers[node] for node in self._graph.nodes if node in self._numbers and has(node))

    def number_of(self, base: fx.Node) -> int | None:
        """Return the number of the torch-level op that makes a saved tensor."""
        return self._numbers.get(base)

    def _why_left_alone(self, base: fx.Node) -> str:
        value, size = value_of(base), num_bytes(value_of(base))
        if base in self._copies:
            return "it is in a loop over time"
        if base not in self._own:
            return "an action keeps it"
        if not value.is_floating_point():
            return f"it is {value.dtype}"
        if size is not None and size < SMALL:
            return f"it has {size} bytes, and tensors under {SMALL} are left alone"
        return "" if _is_dense(value) else "its elements do not fill its memory"

    def _named(self, bases: Sequence[fx.Node]) -> list[SavedTensor]:
        """Name saved tensors; those that are no values of the model's code are numbered by their op."""
        parts: Counter[tuple[str, int]] = Counter()
        found = []
        for base in bases:
            site = self._site(base)
            if base not in self._value_of_base:
                op = next(((name, call) for name, call in reversed(site.addresses) if "/" in name), ("/", 0))
                parts[op] += 1
                name = f"{op[0]}.{parts[op]}"
                inside = [address for address in site.addresses if address[0] == site.module]
                site = replace(site, name=name, call=op[1], output_of=(), addresses=((name, op[1]), *inside))
            found.append(SavedTensor(site, base))
        return found

    def _site(self, base: fx.Node) -> Site:
        number = self._value_of_base.get(base)
        named = number is not None
        if number is None:
            number = self._nearest(self._numbers.get(base))
        value = value_of(base)
        if number is None:
            site = Site("saved", "/", addresses=(("/", 0),))
        else:
            site = self._site_at[number]("saved")
        shape = site.shape if named else shape_of(value)
        return replace(site, shape=shape, dtype=value.dtype, device=value.device, nbytes=num_bytes(value))

    def _nearest(self, number: int | None) -> int | None:
        """Return the number of a named value: this one, the value that it turned out to be, or the next one."""
        if number is not None and number not in self._site_at:
            same = self._values[number].same_as
            known = [n for n, value in enumerate(self._values) if value is same and n in self._site_at]
            number = next(iter(known), None) if known else next((n for n in self._site_at if n > (number or 0)), None)
        return number if number is not None else max(self._site_at, default=None)


def _module_of(graph: fx.Graph) -> fx.GraphModule:
    owner = graph.owning_module
    assert owner is not None
    return owner


def _memory_of(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or fake_tensors.is_wrapper(value) or value.layout is not torch.strided:
        return None
    return fake_tensors.storage_key(value)


def _has_all_elements(node: fx.Node, base: fx.Node) -> bool:
    view, value = value_of(node), value_of(base)
    return view.dtype == value.dtype and fake_tensors.statically_known_true(view.numel() == value.numel())


def _is_dense(value: Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory, in any order."""
    strides = value.stride()
    expected = 1
    for d in sorted(range(value.dim()), key=lambda d: fake_tensors.hint_of(strides[d])):
        if fake_tensors.statically_known_true(value.shape[d] == 1):
            continue
        if not fake_tensors.statically_known_true(strides[d] == expected):
            return False
        expected *= value.shape[d]
    return True
