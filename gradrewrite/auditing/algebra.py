"""Linear forms of the values of a Dynamo graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import autograd, fake_tensors
from gradrewrite.instrumentation.dynamo_nodes import changed_in_place, fake_of, op_name

_Form = Mapping[int, float]  # coefficients by atom
_NUMBER = -1  # the atom of numbers

_ADDS, _SUBTRACTS = ("add", "iadd", "__radd__"), ("sub", "isub", "subtract")
_ORDER_KEPT = (
    "view", "reshape", "unsqueeze", "squeeze", "flatten", "contiguous", "clone", "view_as", "unflatten", "ravel",
)  # fmt: skip
_OF_ONE = ("sum", "mean", "amax", "amin", "logsumexp", "nansum", "nanmean")  # the value itself, of one
_SOFTMAXES = ("softmax", "log_softmax", "softmin")
_RANDOM = (
    "dropout", "rand", "bernoulli", "multinomial", "normal", "exponential", "poisson", "gumbel", "rrelu", "fractional",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Constant:
    """An op without influence of some of its inputs, by algebra.

    Attributes:
        reason: Why, as a sentence without subject: ``"is 1 whatever is given, for ..."``.
        inputs: The inputs concerned; None for all.
        is_meant: Whether it is a product with 0, which is written on purpose.
    """

    reason: str
    inputs: tuple[fx.Node, ...] | None = None
    is_meant: bool = False


@dataclass
class LinearForms:
    """The values of one graph as sums of atoms with coefficients.

    An atom is a value that no rule takes apart; two calls of one op with the same inputs are one atom. Values that are
    overwritten, and random ones, are atoms of their own. Values of gradients count: a detached tensor is an atom.
    """

    overwritten: Collection[int | None] = frozenset()  # storages
    nodes: list[fx.Node] = field(default_factory=list)  # by atom, the first with it
    _forms: dict[fx.Node, _Form] = field(default_factory=dict)
    _atoms: dict[Any, int] = field(default_factory=dict)  # by op and inputs

    def read(self, node: fx.Node, *, is_opaque: bool = False) -> Constant | None:
        """Read a node behind its inputs; return a constant.

        ``is_opaque``: it stops gradients, and is an atom.
        """
        if is_opaque or self._is_changed(node) or _has_unknown_sizes(node):
            self._forms[node] = self._atom(node, node)
            return None
        form, constant = self._linear(node), _constant_of(node)
        if form is None:
            if constant is None and op_name(node) in _DIVISIONS:
                constant = self._quotient(node)
            form = self._atom(node, self._key(node))
        elif form.keys() <= {_NUMBER} and any(map(self._depends, node.all_input_nodes)):
            is_meant = _is_zero_product(node)
            constant = Constant("is a product with 0" if is_meant else "is constant: its terms cancel", None, is_meant)
        self._forms[node] = form
        return constant

    def _depends(self, node: fx.Node) -> bool:
        return not self._forms.get(node, {}).keys() <= {_NUMBER}

    def atoms(self, node: fx.Node) -> Mapping[fx.Node, float]:
        """Return the coefficients of a value by node."""
        form = self._forms.get(node, {})
        return {self.nodes[atom]: factor for atom, factor in form.items() if atom != _NUMBER}

    def cancels(self, node: fx.Node) -> bool:
        """Whether a value depends on fewer atoms than its inputs."""
        read = {atom for given in node.all_input_nodes for atom in self._forms.get(given, {})}
        atoms = self.atoms(node)
        return bool(atoms) and node not in atoms and not read - {_NUMBER} <= self._forms[node].keys()

    def _atom(self, node: fx.Node, key: Any) -> _Form:
        if key not in self._atoms:
            self._atoms[key] = len(self.nodes)
            self.nodes.append(node)
        return {self._atoms[key]: 1.0}

    def _is_changed(self, node: fx.Node) -> bool:
        fakes = (fake_of(given) for given in (node, *node.all_input_nodes))
        return any(storage_of(fake) in self.overwritten for fake in fakes if fake is not None)

    def _key(self, node: fx.Node) -> Any:
        name = op_name(node)
        if node.op not in ("call_function", "call_method") or any(word in name for word in _RANDOM):
            return node
        if fake_of(node) is None or changed_in_place(node) or _has_state(node):
            return node

        def key(value: Any) -> Any:
            if isinstance(value, fx.Node):
                form = self._forms.get(value)
                fake = fake_of(value)
                shape = () if fake is None else tuple(map(str, fake.shape))  # a symbol has no hash
                return value if form is None or not form else (tuple(sorted(form.items())), shape)
            if isinstance(value, list | tuple):
                return tuple(map(key, value))
            return tuple(sorted((k, key(v)) for k, v in value.items())) if isinstance(value, dict) else repr(value)

        return name, key(node.args), key(node.kwargs)

    def _linear(self, node: fx.Node) -> _Form | None:
        """Return the form of a linear op; None for another one."""
        name, args = op_name(node), node.args
        if not args or not isinstance(args[0], fx.Node | int | float):
            return None
        if name in _ADDS or name in _SUBTRACTS:
            factor = node.kwargs.get("alpha", 1)
            sign = factor if name in _ADDS else -factor if isinstance(factor, int | float) else None
            return self._sum(node, args[0], args[1], sign) if len(args) == 2 else None
        if name in ("neg", "negative"):
            return self._scaled(args[0], -1.0)
        if name in ("mul", "imul", "multiply") and len(args) == 2:
            tensor, number = args if isinstance(args[0], fx.Node) else args[::-1]
            return self._scaled(tensor, number) if isinstance(number, int | float) else None
        if name in _DIVISIONS and len(args) == 2 and isinstance(args[1], int | float) and args[1]:
            return self._scaled(args[0], 1 / args[1])
        return self._scaled(args[0], 1.0) if _keeps_values(node) else None

    def _scaled(self, value: Any, factor: float) -> _Form | None:
        form = self._forms.get(value) if isinstance(value, fx.Node) and fake_of(value) is not None else None
        return None if form is None else {atom: c * factor for atom, c in form.items() if c * factor}

    def _sum(self, node: fx.Node, a: Any, b: Any, sign: Any) -> _Form | None:
        shape = _shape(node)
        if not isinstance(sign, int | float) or any(
            isinstance(v, fx.Node) and _shape(v) != shape for v in (a, b)
        ):  # broadcast values are no elements of a sum
            return None
        found: dict[int, float] = {}
        for value, factor in ((a, 1.0), (b, float(sign))):
            form = self._scaled(value, factor) if isinstance(value, fx.Node) else {_NUMBER: value * factor}
            if form is None:
                return None
            for atom, c in form.items():
                found[atom] = found.get(atom, 0.0) + c
        return {atom: c for atom, c in found.items() if c}

    def _quotient(self, node: fx.Node) -> Constant | None:
        """Whether a value is divided by a multiple of itself."""
        a, b = node.args[:2] if len(node.args) >= 2 else (None, None)
        if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or _shape(a) != _shape(b):
            return None
        top, bottom = self._forms.get(a), self._forms.get(b)
        if not top or not bottom or top.keys() != bottom.keys():
            return None
        if len({round(top[atom] / bottom[atom], 9) for atom in top}) > 1:
            return None
        return Constant("is the same whatever is given: a value is divided by itself")


_DIVISIONS = ("div", "truediv", "divide", "true_divide", "itruediv")


def _has_unknown_sizes(node: fx.Node) -> bool:
    """Whether a size depends on values."""
    fakes = map(fake_of, (node, *node.all_input_nodes))
    return any(fake is not None and fake_tensors.has_unknown_size(fake) for fake in fakes)


def _shape(node: fx.Node) -> tuple[Any, ...] | None:
    fake = fake_of(node)
    return None if fake is None else tuple(fake.shape)


def storage_of(fake: Tensor | None) -> int | None:
    """Return a key of a fake tensor's memory, or None."""
    if fake is None or fake.layout is not torch.strided or autograd.is_transformed(fake):
        return None
    return fake_tensors.storage_key(fake)


def _has_state(node: fx.Node) -> bool:
    """Whether two calls with the same inputs may differ."""
    name = op_name(node)
    if getattr(node.target, "namespace", "aten") != "aten":  # of the user, or of higher order
        return True
    if name == "scaled_dot_product_attention" and _argument(node, 4, "dropout_p", 0.0) != 0:
        return True
    return name == "batch_norm" or bool(node.kwargs.get("training", False))


def _is_zero_product(node: fx.Node) -> bool:
    return op_name(node) in ("mul", "imul", "multiply") and any(
        isinstance(a, int | float) and a == 0 for a in node.args
    )


def _keeps_values(node: fx.Node) -> bool:
    """Whether an op keeps its first input, element by element."""
    name, given = op_name(node), node.args[0]
    fake, made = (fake_of(given) if isinstance(given, fx.Node) else None), fake_of(node)
    if fake is None or made is None or fake.numel() != made.numel() or fake.dtype != made.dtype:
        return False
    if name == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return all(part is None or part is Ellipsis or part == slice(None) for part in index)
    return name in _ORDER_KEPT or name in _OF_ONE


def _constant_of(node: fx.Node) -> Constant | None:
    """Return a constant by the sizes of inputs, or None."""
    name, given = op_name(node), node.args[0] if node.args else None
    fake = fake_of(given) if isinstance(given, fx.Node) else None
    if fake is None or not fake.is_floating_point():
        return None
    rule = _BY_SIZE.get("softmax" if name in _SOFTMAXES else name)
    return None if rule is None else rule(node, fake)


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call by position or name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _softmax(node: fx.Node, x: Tensor) -> Constant | None:
    dim = _argument(node, 1, "dim")
    if not isinstance(dim, int) or not x.dim() or x.shape[dim] != 1:
        return None
    return Constant(f"is a constant: dimension {dim} has one element")


def _normalize(node: fx.Node, x: Tensor) -> Constant | None:
    dim = _argument(node, 2, "dim", 1)
    if not isinstance(dim, int) or not x.dim() or x.shape[dim] != 1:
        return None
    return Constant(f"is the sign alone: dimension {dim} has one element")


def _layer_norm(node: fx.Node, x: Tensor) -> Constant | None:
    shape = _argument(node, 1, "normalized_shape", ())
    given = node.args[0]
    assert isinstance(given, fx.Node)
    if not isinstance(shape, Sequence) or any(size != 1 for size in shape):
        return None
    return Constant("is a constant: it normalizes one element", (given,))


def _cross_entropy(node: fx.Node, x: Tensor) -> Constant | None:
    if x.dim() < 2 or x.shape[1] != 1:
        return None
    return Constant("is a constant: there is one class")


def _attention(node: fx.Node, x: Tensor) -> Constant | None:
    query, key = node.args[0], _argument(node, 1, "key")
    if not isinstance(query, fx.Node) or not isinstance(key, fx.Node):
        return None
    shape = _shape(key)
    if shape is None or len(shape) < 2 or shape[-2] != 1:
        return None
    mask = _argument(node, 3, "attn_mask")
    more = (mask,) if isinstance(mask, fx.Node) else ()
    return Constant("gives the one key all weight", (query, key, *more))


def _power(node: fx.Node, x: Tensor) -> Constant | None:
    exponent = _argument(node, 1, "exponent")
    return Constant("is 1 whatever is given: the exponent is 0") if exponent in (0, 0.0) else None


_BY_SIZE: Mapping[str, Callable[[fx.Node, Tensor], Constant | None]] = {
    "softmax": _softmax,
    "normalize": _normalize,
    "layer_norm": _layer_norm,
    "cross_entropy": _cross_entropy,
    "scaled_dot_product_attention": _attention,
    "pow": _power,
}
