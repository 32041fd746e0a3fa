"""Loops in marked joint graphs: two operators, for the iterations of a body and for their backward."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import fake_tensors
from gradrewrite.errors import TraceError
from gradrewrite.ir.values import Value, shape_of
from gradrewrite.numerics.library import LIBRARY
from gradrewrite.sites import Kind, Site

LEAST_AHEAD = 256  # iterations
_numbers = itertools.count()
_loops: weakref.WeakValueDictionary[str, Loop] = weakref.WeakValueDictionary()  # by key


@dataclass(eq=False)
class Loop:
    """A loop over dimension 0 of its inputs.

    ``body(*carries, *inputs, *invariants)`` returns the next carries, then the outputs of the iteration. The loop
    returns the last carries, then the outputs stacked over the iterations. The stacks of inputs and outputs are in the
    order of the inputs; a reversed loop begins with the last of them.
    """

    name: str  # of its sites, before ``/``
    body: fx.GraphModule  # of torch-level ops, with probes
    num_carries: int
    num_inputs: int
    is_reversed: bool
    length: int | torch.SymInt  # number of iterations, for the inputs at hand
    values: dict[str, Value] = field(default_factory=dict)  # those with sites, by name, in the order of execution
    nodes: dict[str, fx.Node] = field(default_factory=dict)  # of the body, that make these values
    is_marked: bool = False  # something is inserted inside
    numbers: dict[str, int] = field(default_factory=dict)  # of the markers of these values; empty where it has none
    first_call: int = 0  # number of iterations before it, of loops of this name
    before: tuple[Loop, ...] = ()  # loops of this name before it in the graph; their lengths may change
    most: int | None = None  # the largest length that its code is for; None for every length
    detached: frozenset[int] = frozenset()  # positions of floating results without a gradient
    outside: dict[str, int] = field(default_factory=dict)  # how many iterations of a value are before the loop, if any
    _sites: dict[tuple[str, Kind, int], Site] = field(default_factory=dict)
    key: str = field(default_factory=lambda: f"loop_{next(_numbers)}")

    def __post_init__(self) -> None:
        """Let the operators find the loop as long as it is alive."""
        _loops[self.key] = self

    def split(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split the arguments of the loop or of its body: carries, inputs, invariants."""
        first, second = self.num_carries, self.num_carries + self.num_inputs
        return list(tensors[:first]), list(tensors[first:second]), list(tensors[second:])

    def is_differentiable(self, position: int, result: Tensor) -> bool:
        """Return whether a result of the body has a gradient."""
        return result.is_floating_point() and position not in self.detached

    def has_site(self, name: str, kind: Kind) -> bool:
        """Return whether a value has a site of a kind."""
        return True

    def site(self, name: str, kind: Kind, iteration: int = 0) -> Site:
        """Return the site of a value in one iteration."""
        known = self._sites.get((name, kind, iteration))
        if known is None:
            known = self._sites[name, kind, iteration] = self._made_site(name, kind, iteration)
        return known

    def _made_site(self, name: str, kind: Kind, iteration: int) -> Site:
        value, call = self.values[name], self.first_call + iteration
        return Site(
            kind=kind,
            name=f"{self.name}/{name}",
            module=value.calls[-1][0] if value.calls else "",
            op=name,
            call=call,
            shape=shape_of(value.fake),
            dtype=value.fake.dtype,
            device=value.fake.device,
            source=value.source,
            addresses=((f"{self.name}/{name}", call),),
            iteration=iteration,
        )

    @property
    def num_answered(self) -> int:
        """Number of iterations with answers in the code: the length at hand, or the limit."""
        return fake_tensors.hint_of(self.length) if self.most is None else self.most

    def limit(self, most: int | None = None) -> int:
        """Limit the length that the code is for; return the limit.

        torch compiles a longer loop anew. Without a number it is the limit that there is, else ``length_ahead``.
        """
        if self.most is None or (most is not None and most < self.most):
            self.most = self.length_ahead() if most is None else most
            torch._check(self.length <= self.most)  # a guard, where the length is a symbol
        return self.most

    def fix(self) -> None:
        """Make its length a number; torch compiles another length anew."""
        self.length = int(self.length)  # a guard, where it is a symbol

    def length_ahead(self) -> int:
        """Return the length to ask ahead for; a length that is a number is that one."""
        hint = fake_tensors.hint_of(self.length)
        return hint if isinstance(self.length, int) else max(LEAST_AHEAD, 4 * hint)

    def order(self, length: int) -> Iterator[int]:
        """Positions in the stacks, in the order of execution."""
        return iter(range(length - 1, -1, -1) if self.is_reversed else range(length))


@dataclass(eq=False)
class RolledLoop(Loop):
    """A Python loop that Dynamo has unrolled.

    Its sites are those of the unrolled program, which are known when all loops of a graph are traced. The numbers of
    values in ``numbers`` are those of the first iteration.
    """

    iterations: dict[str, list[int]] = field(default_factory=dict)  # numbers of a value in each iteration, by name
    _site_at: Mapping[int, Callable[[Kind], Site]] = field(default_factory=dict)

    def share_facts(self, values: Sequence[Value]) -> None:
        """Copy the facts of the values of the first iteration to those of the others."""
        names = {id(values[numbers[0]]): name for name, numbers in self.iterations.items()}
        for numbers in self.iterations.values():
            first = values[numbers[0]]
            same = None if first.same_as is None else self.iterations[names[id(first.same_as)]]
            for t, number in enumerate(numbers[1:], 1):
                value = values[number]
                value.has_error, value.is_view, value.subclass = first.has_error, first.is_view, first.subclass
                value.same_as = None if same is None else values[same[t]]

    def name_sites(self, site_at: Mapping[int, Callable[[Kind], Site]]) -> None:
        """Give its values their sites; TraceError for uneven numbers of calls."""
        self._site_at = site_at
        for name, numbers in self.iterations.items():
            if numbers[0] in site_at:
                first, last = (site_at[numbers[n]]("activation") for n in (0, -1))
                sites = [self.site(name, "activation", t) for t in range(len(numbers))]
                for t, number in enumerate(numbers):
                    found = site_at[number]("activation")
                    if (found.addresses, found.destination) != (sites[t].addresses, sites[t].destination):
                        raise TraceError(
                            f"the iterations of a rolled loop have names of different forms: {first}, {last}; "
                            'loops="unrolled" leaves the loop as it is'
                        )

    def has_site(self, name: str, kind: Kind) -> bool:
        """Return whether a value has a site of a kind."""
        value = self.values[name]
        is_number = (value.fake.is_floating_point() or value.fake.is_complex()) and value.use_of is None
        return self.iterations[name][0] in self._site_at and (is_number if kind == "activation" else value.has_error)

    def _made_site(self, name: str, kind: Kind, iteration: int) -> Site:
        first, second = (self._site_at[n](kind) for n in self.iterations[name][:2])
        pairs = zip(first.addresses + first.destination, second.addresses + second.destination, strict=True)
        strides = tuple(b - a for (_, a), (_, b) in pairs)
        before = self.outside[name]
        return replace(first, iteration=before, strides=strides).at_iteration(before + iteration)


LIBRARY.define("loop_forward(Tensor[] tensors, str key) -> Tensor[]")
LIBRARY.define("loop_backward(Tensor[] tensors, Tensor[] tangents, int[] wanted, str key) -> Tensor[]")


def _forward(tensors: list[Tensor], key: str) -> list[Tensor]:
    """Run a loop iteration by iteration; the arguments are carries, inputs and invariants."""
    loop = _loops[key]
    carries, inputs, invariants = loop.split(tensors)
    rows: dict[int, Sequence[Tensor]] = {}
    for t in loop.order(len(inputs[0])):
        results = loop.body(*carries, *(x[t] for x in inputs), *invariants)
        carries, rows[t] = list(results[: len(carries)]), results[len(carries) :]
    stacks = [torch.stack(own) for own in zip(*(rows[t] for t in sorted(rows)), strict=True)]
    return [*(carry.clone() for carry in carries), *stacks]


def _backward(tensors: list[Tensor], tangents: list[Tensor], wanted: list[int], key: str) -> list[Tensor]:
    """Differentiate a loop; gradients are those of the tensors at the positions ``wanted``."""
    with torch.enable_grad():
        given = [t.detach().requires_grad_(n in wanted) for n, t in enumerate(tensors)]
        results = [r for n, r in enumerate(_forward(given, key)) if _loops[key].is_differentiable(n, r)]
        pairs = [(r, g) for r, g in zip(results, tangents, strict=True) if r.requires_grad]
        outputs, gradients = [r for r, _ in pairs], [g for _, g in pairs]
        found = torch.autograd.grad(outputs, [given[n] for n in wanted], gradients, allow_unused=True)
    return [torch.zeros_like(tensors[n]) if g is None else g.clone() for n, g in zip(wanted, found, strict=True)]


def _fake_forward(tensors: list[Tensor], key: str) -> list[Tensor]:
    loop = _loops[key]
    carries, inputs, invariants = loop.split(tensors)
    with torch.no_grad():  # a body may set the mode, and set it back to what its iterations begin with
        results = loop.body(*carries, *(x.new_empty(x.shape[1:]) for x in inputs), *invariants)
    number, length = len(carries), inputs[0].shape[0]
    stacks = [out.new_empty((length, *out.shape)) for out in results[number:]]
    return [*(torch.empty_like(out, memory_format=torch.contiguous_format) for out in results[:number]), *stacks]


def _fake_backward(tensors: list[Tensor], _: list[Tensor], wanted: list[int], key: str) -> list[Tensor]:
    return [torch.empty_like(tensors[n]) for n in wanted]


for _name, _implementation, _fake in (
    ("loop_forward", _forward, _fake_forward),
    ("loop_backward", _backward, _fake_backward),
):
    LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gradrewrite::{_name}", _fake, lib=LIBRARY)

loop_forward = torch.ops.gradrewrite.loop_forward.default
loop_backward = torch.ops.gradrewrite.loop_backward.default


def find_loop(key: str) -> Loop:
    """Return the loop with a key."""
    return _loops[key]


def hold_loops(graph: fx.Graph) -> None:
    """Keep the loops of a graph alive as long as its nodes, and their copies."""
    for target in (loop_forward, loop_backward):
        for node in graph.find_nodes(op="call_function", target=target):
            node.meta["loop"] = loop_of(node)


def loop_of(node: fx.Node) -> Loop:
    """Return the loop of a node that calls one of the operators."""
    return _loops[str(node.args[-1])]
