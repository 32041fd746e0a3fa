"""Rules of operators for ``zero_errors``: how zeros of their errors go through them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, fx
from torch.nn import functional

from gradrewrite._compat import operators
from gradrewrite.ir.markers import value_of

Mask: TypeAlias = Callable[[fx.Node], fx.Node | None]  # makes it before a node; None where it is not known


def _unknown(_: fx.Node) -> None:
    return None


@dataclass(eq=False)
class Derived:
    """A value that is computed from errors."""

    mask: Mask = _unknown
    is_risky: bool = False  # it may have a NaN where its errors are 0


class Walk(Protocol):
    """The values of the backward of an op; see ``zero_errors``."""

    def read(self, node: fx.Node) -> list[fx.Node]: ...  # noqa: D102
    def is_risky(self, nodes: Sequence[fx.Node]) -> bool: ...  # noqa: D102
    def take_out(self, reader: fx.Node, factor: fx.Node, run: Callable[..., Tensor], mask: fx.Node) -> None: ...  # noqa: D102
    def mask(self, node: fx.Node, before: fx.Node) -> fx.Node | None: ...  # noqa: D102
    def clean(self, node: fx.Node, before: fx.Node) -> fx.Node: ...  # noqa: D102
    def compute(self, run: Callable[..., Tensor], nodes: Sequence[fx.Node], before: fx.Node) -> fx.Node: ...  # noqa: D102
    def compute_like(  # noqa: D102
        self, run: Callable[..., Tensor], nodes: Sequence[fx.Node], like: fx.Node, before: fx.Node
    ) -> fx.Node: ...
    def replace(self, reader: fx.Node, given: fx.Node, replacement: fx.Node) -> None: ...  # noqa: D102
    def leave_uncovered(self, node: fx.Node) -> None: ...  # noqa: D102


Rule: TypeAlias = Callable[[Walk, fx.Node], Derived | list[Derived]]

_LIKE = frozenset(
    operators.overloads(
        [f"{name}_like" for name in ("zeros", "ones", "full", "empty")]
        + [f"new_{name}" for name in ("zeros", "ones", "full", "empty")]
        + ["sym_size"]
    )
)


def unchanged_by_errors(node: fx.Node) -> bool:
    """Whether a result depends on the shapes of tensors alone."""
    return node.target in _LIKE or not isinstance(node.meta["val"], Tensor | tuple | list)


def _masks_of(walk: Walk, nodes: Sequence[fx.Node], before: fx.Node) -> list[fx.Node] | None:
    found = [walk.mask(node, before) for node in nodes]
    known = [mask for mask in found if mask is not None]
    return known if len(known) == len(found) else None


# Elementwise


def _plain(walk: Walk, node: fx.Node) -> Derived:
    """Follow an operator without a factor: 0 where the derived arguments are, and others."""
    read = walk.read(node)
    if operators.name_of(node) in ("add", "sub", "rsub") and isinstance(node.args[1], int | float) and node.args[1]:
        return Derived()
    others = [given for given in node.all_input_nodes if given not in read]

    def mask(before: fx.Node) -> fx.Node | None:
        masks = _masks_of(walk, read, before)
        if masks is None or (len(masks) == 1 and not others and value_of(masks[0]).shape == value_of(node).shape):
            return None if masks is None else masks[0]
        return walk.compute_like(_all_zero(len(masks)), [*masks, *others], node, before)

    return Derived(mask, _has_bad_number(node) or walk.is_risky(read))


def _has_bad_number(node: fx.Node) -> bool:
    """Whether a number among the arguments makes NaN of 0: an infinity, NaN, or a divisor 0."""
    numbers = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, int | float)]
    is_divisor = operators.name_of(node) == "div" and 0 in node.args[1:2]
    return is_divisor or not all(map(math.isfinite, numbers))


def _multiply_add(walk: Walk, node: fx.Node) -> Derived:
    """Follow ``addend + a * b``, or ``/``: 0 where the addend and the product are."""
    addend = node.args[2 if operators.name_of(node) == "fma" else 0]
    assert isinstance(addend, fx.Node)
    read = walk.read(node)
    factors = [given for given in read if given is not addend]
    if not factors:  # its product does not depend on errors
        walk.leave_uncovered(node)
        return Derived()
    others = [] if addend in read else [addend]

    def mask(before: fx.Node) -> fx.Node | None:
        masks = _masks_of(walk, [*factors, *([addend] if addend in read else [])], before)
        if masks is None:
            return None
        return walk.compute_like(_all_zero(len(masks)), [*masks, *others], node, before)

    return Derived(mask, is_risky=True)


def _factor(walk: Walk, node: fx.Node) -> Derived:
    """Follow a product with values of the forward, element by element."""
    read = walk.read(node)
    has_factor = len(node.all_input_nodes) > len(read)

    def mask(before: fx.Node) -> fx.Node | None:
        masks = _masks_of(walk, read, before)
        if masks is None or (len(masks) == 1 and value_of(masks[0]).shape == value_of(node).shape):
            return None if masks is None else masks[0]
        return walk.compute_like(_all_zero(len(masks)), masks, node, before)

    return Derived(mask, has_factor or _has_bad_number(node) or walk.is_risky(read))


def _all_zero(num_masks: int) -> Callable[..., Tensor]:
    """Return the conjunction of masks and of ``other == 0``."""

    def run(*given: Tensor) -> Tensor:
        found = given[0]
        for mask in given[1:num_masks]:
            found = found & mask
        for other in given[num_masks:]:
            found = found & (other == 0)
        return found

    return run


def _where(walk: Walk, node: fx.Node) -> Derived:
    read = walk.read(node)
    if node.args[0] in read:  # a condition on errors
        walk.leave_uncovered(node)
        return Derived()
    branches = list(node.args[1:3])

    def mask(before: fx.Node) -> fx.Node | None:
        masks = _masks_of(walk, read, before)
        if masks is None:
            return None
        given = dict(zip(read, masks, strict=True))
        nodes = [given.get(x, x) for x in node.args[:3] if isinstance(x, fx.Node)]

        def run(condition: Tensor, *tensors: Tensor) -> Tensor:
            left = iter(tensors)
            a, b = (next(left) if isinstance(x, fx.Node) else torch.as_tensor(x) for x in branches)
            a, b = (x if branch in given else x == 0 for x, branch in ((a, branches[0]), (b, branches[1])))
            return torch.where(condition, a, b)

        return walk.compute(run, nodes, before)

    return Derived(mask, walk.is_risky(read))


def _masked_fill(walk: Walk, node: fx.Node) -> Derived:
    x, condition, value = node.args[:3]
    if not isinstance(x, fx.Node) or walk.read(node) != [x] or not isinstance(condition, fx.Node):
        walk.leave_uncovered(node)
        return Derived()

    def mask(before: fx.Node) -> fx.Node | None:
        found = walk.mask(x, before)
        if found is None:
            return None
        if isinstance(value, fx.Node):
            return walk.compute(lambda m, c, v: torch.where(c, v == 0, m), [found, condition, value], before)
        is_zero = value == 0
        return walk.compute(lambda m, c: (m | c) if is_zero else (m & ~c), [found, condition], before)

    return Derived(mask, walk.is_risky([x]))


# Elements that are moved, and added up


def _move(walk: Walk, node: fx.Node) -> Derived | list[Derived]:
    """Follow an operator that moves elements: the same on masks."""
    read = walk.read(node)
    is_risky = walk.is_risky(read)

    def moved(element: int | None) -> Mask:
        def mask(before: fx.Node) -> fx.Node | None:
            masks = _masks_of(walk, read, before)
            return None if masks is None else _run_on(walk, node, read, masks, before, element, others=_is_zero)

        return mask

    if isinstance(node.meta["val"], Tensor):
        return Derived(moved(None), is_risky)
    return [Derived(moved(n), is_risky) for n in range(len(node.meta["val"]))]


def _complex(walk: Walk, node: fx.Node) -> Derived:
    """Follow a view of complex numbers as pairs, or the other way."""
    (read,) = walk.read(node)
    to_pairs = operators.name_of(node) == "view_as_real"

    def run(mask: Tensor) -> Tensor:
        return mask.unsqueeze(-1).expand(*mask.shape, 2) if to_pairs else mask.all(-1)

    def mask(before: fx.Node) -> fx.Node | None:
        found = walk.mask(read, before)
        return None if found is None else walk.compute(run, [found], before)

    return Derived(mask, walk.is_risky([read]))


def _run_on(
    walk: Walk,
    node: fx.Node,
    read: Sequence[fx.Node],
    replacements: Sequence[fx.Node],
    before: fx.Node,
    element: int | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    finish: Callable[[Tensor], Tensor] | None = None,
    others: Callable[[Any], Any] | None = None,
) -> fx.Node:
    """Run the operator of a node on other values than those that are computed from errors."""
    nodes, target = node.all_input_nodes, operators.with_any_strides(node.target)
    own = dict(zip(read, replacements, strict=True))

    def run(*tensors: Tensor) -> Tensor:
        changes = {n: prepare if n in own else others for n in nodes}
        given = {n: x if (f := changes[n]) is None else f(x) for n, x in zip(nodes, tensors, strict=True)}
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: given[n])
        made = target(*args, **kwargs)
        made = made if element is None else made[element]
        return finish(made) if finish else made

    return walk.compute(run, [own.get(n, n) for n in nodes], before)


def _is_zero(x: Tensor | torch.SymInt) -> Any:
    return x == 0 if isinstance(x, Tensor) else x  # a size stays


def _sum(walk: Walk, node: fx.Node) -> Derived:
    (read,) = walk.read(node)
    walk.replace(node, read, walk.clean(read, node))
    arguments = operators.arguments_of(node)
    dims, keepdim = arguments.get("dim"), bool(arguments.get("keepdim"))
    dims = list(range(value_of(read).dim())) if not dims else list(dims)

    def mask(before: fx.Node) -> fx.Node | None:
        found = walk.mask(read, before)
        return None if found is None else walk.compute(lambda m: _all(m, dims, keepdim=keepdim), [found], before)

    return Derived(mask)


def _all(mask: Tensor, dims: Sequence[int], *, keepdim: bool = True) -> Tensor:
    for dim in sorted((d % mask.dim() for d in dims if mask.dim()), reverse=True):
        mask = mask.all(dim, keepdim=keepdim)
    return mask


def _linear(walk: Walk, node: fx.Node) -> Derived | list[Derived]:
    """Follow an operator that moves and adds up elements, with finite coefficients of its own."""
    read = walk.read(node)
    for given in read:
        walk.replace(node, given, walk.clean(given, node))

    def mask(before: fx.Node) -> fx.Node | None:
        masks = _masks_of(walk, read, before)
        if masks is None:
            return None
        dtype = value_of(read[0]).dtype
        return _run_on(walk, node, read, masks, before, prepare=lambda m: (~m).to(dtype), finish=lambda made: made == 0)

    if isinstance(node.meta["val"], Tensor):
        return Derived(mask)
    return [Derived() for _ in node.meta["val"]]


# Products


def _product(walk: Walk, node: fx.Node) -> Derived:
    """Follow a matrix product."""
    a, b = node.args[:2]
    read = walk.read(node)
    if len(read) > 1 or a is b:
        walk.leave_uncovered(node)
        return Derived()
    (given,) = read
    other = b if given is a else a
    assert isinstance(other, fx.Node)
    walk.replace(node, given, walk.clean(given, node))
    is_left, name = given is a, operators.name_of(node)
    # Dimensions of the error and of the factor: the one that is added up is the last of ``a``, and the last but one of
    # ``b``, if that is no vector.
    matrix_a, matrix_b = {"mm": (True, True), "bmm": (True, True), "mv": (True, False), "dot": (False, False)}[name]
    found = walk.mask(given, node)
    if found is None:
        walk.leave_uncovered(node)
        return Derived()
    if is_left:
        left_out = _left_out(-2 if matrix_a else None, -1 if matrix_b else None)
    else:
        left_out = _left_out(-1 if matrix_b else None, -2 if matrix_a else None)
    walk.take_out(node, other, left_out, found)

    def mask(before: fx.Node) -> fx.Node | None:
        if not is_left and not matrix_b:
            return walk.compute_like(lambda m: m.all(), [found], node, before)
        if is_left:  # rows of ``a``
            return walk.compute_like(lambda m: m.all(-1, keepdim=matrix_b), [found], node, before)
        return walk.compute_like(lambda m: m.all(-2, keepdim=True), [found], node, before)

    return Derived(mask)


def _left_out(free: int | None, added: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that takes non-finite elements out of a factor.

    They are those that meet zeros alone. ``free`` is the dimension of the mask that is not added up; ``added`` is where
    the other one is missing in the factor.
    """

    def run(other: Tensor, mask: Tensor) -> Tensor:
        along = mask if free is None else mask.all(free)
        along = along if added is None else along.unsqueeze(added)
        return torch.where(along & ~other.isfinite(), 0, other)

    return run


# Operators of several operations, which work on slices by themselves


Search: TypeAlias = Callable[[Mapping[str, Any]], Callable[[Tensor], Tensor]]


def _slices(error: str, search: Search, saved: Mapping[str, float], *, is_risky: bool) -> Rule:
    """Return the rule of an operator on slices.

    ``search`` makes a mask of slices from one of the error. ``saved`` has the replacements of non-finite values in
    slices of zeros, by argument. The first result has the slices of the error.
    """

    def rule(walk: Walk, node: fx.Node) -> Derived | list[Derived]:
        arguments = operators.arguments_of(node)
        given = arguments[error]
        found = walk.mask(given, node) if walk.read(node) == [given] else None
        is_tensor = isinstance(node.meta["val"], Tensor)
        if found is None:
            walk.leave_uncovered(node)
            return Derived() if is_tensor else [Derived() for _ in node.meta["val"]]
        walk.replace(node, given, walk.clean(given, node))
        zeros = walk.compute(search(arguments), [found], node)
        for name, number in saved.items():
            value = arguments.get(name)
            if isinstance(value, fx.Node):
                walk.take_out(node, value, _without_bad(number), zeros)

        def mask(before: fx.Node) -> fx.Node | None:
            made = node if is_tensor else next(user for user in node.users if user.args[1] == 0)  # that asks for it
            return walk.compute_like(lambda z: z, [zeros], made, before)

        first = Derived(mask, is_risky)
        return first if is_tensor else [first, *(Derived() for _ in node.meta["val"][1:])]

    return rule


def _without_bad(number: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that replaces non-finite values in slices of zeros."""

    def run(value: Tensor, zeros: Tensor) -> Tensor:
        if not value.numel():  # statistics of a batch norm that uses its running ones
            return value
        if zeros.dim() != value.dim():  # a figure of each slice
            if zeros.numel() < value.numel():  # of attention, padded
                zeros = functional.pad(zeros.squeeze(-1), (0, value.shape[-1] - zeros.shape[-2]))
            zeros = zeros.reshape(*value.shape, -1)[..., 0]
        return torch.where(zeros & ~value.isfinite(), number, value)

    return run


def _over(dims: Callable[[Mapping[str, Any]], Sequence[int]]) -> Search:
    """Return the search for slices of these dimensions."""

    def search(arguments: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
        own = list(dims(arguments))
        return lambda mask: _all(mask, own)

    return search


def _of_groups(arguments: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    groups = arguments["group"]

    def run(mask: Tensor) -> Tensor:
        samples, channels = mask.shape[:2]
        zeros = mask.reshape(samples, groups, -1).all(-1, keepdim=True)
        zeros = zeros.expand(samples, groups, channels // groups)
        return zeros.reshape(samples, channels, *[1] * (mask.dim() - 2))

    return run


def _dims_of_input(arguments: Mapping[str, Any]) -> range:
    return range(value_of(arguments["input"]).dim())


_ALONG = _over(lambda arguments: [arguments["dim"]])
_NORMALIZED = _over(lambda arguments: [-1 - n for n in range(len(arguments["normalized_shape"]))])
_CHANNELS = _over(lambda arguments: [n for n in _dims_of_input(arguments) if n != 1])


def _of_batch(arguments: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """Return the search of a batch norm: channels in training, else elements."""
    is_training = arguments["train"] if "train" in arguments else arguments["update"]
    return _CHANNELS(arguments) if is_training else lambda mask: mask


_SAMPLES = _over(lambda arguments: _dims_of_input(arguments)[1:])
_LAST = _over(lambda _: [-1])
_INF = float("inf")
_NORM = {"input": 0.0, "mean": 0.0, "rstd": 0.0}
_BATCH_NORM = {"input": 0.0, "save_mean": 0.0, "save_invstd": 0.0, "save_var": 0.0}
_ATTENTION = {"query": 0.0, "out": 0.0, "logsumexp": _INF}

_RULES: dict[Rule, Sequence[str]] = {
    _plain: (
        "neg", "clone", "alias", "detach", "_to_copy", "positive", "conj", "_conj", "_conj_physical", "lift_fresh",
        "add", "sub", "rsub", "contiguous", "real", "imag", "convert_element_type",
    ),
    _factor: (
        "mul", "div", "sigmoid_backward", "tanh_backward", "gelu_backward", "silu_backward",
        "threshold_backward", "elu_backward", "leaky_relu_backward", "hardtanh_backward", "hardswish_backward",
        "hardsigmoid_backward", "softplus_backward", "log_sigmoid_backward", "mse_loss_backward", "mish_backward",
        "smooth_l1_loss_backward", "huber_loss_backward", "binary_cross_entropy_backward", "logit_backward",
        "softshrink_backward", "hardshrink_backward", "native_dropout_backward", "rrelu_with_noise_backward",
        "soft_margin_loss_backward", "angle_backward",
    ),
    _multiply_add: ("addcmul", "addcdiv", "fma"),
    _where: ("where",),
    _masked_fill: ("masked_fill",),
    _move: (
        "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "slice", "select", "squeeze",
        "unsqueeze", "unbind", "split", "split_with_sizes", "cat", "stack", "flip", "roll", "diagonal", "unfold",
        "repeat",
    ),
    _complex: ("view_as_real", "view_as_complex"),
    _sum: ("sum", "mean"),
    _linear: (
        "constant_pad_nd", "index", "gather", "index_select", "take", "slice_scatter", "select_scatter",
        "diagonal_scatter", "index_put", "_unsafe_index_put", "scatter", "scatter_add", "index_add", "slice_backward",
        "select_backward", "diagonal_backward", "unfold_backward", "embedding_dense_backward", "cumsum", "tril", "triu",
        "value_selecting_reduction_backward", "max_pool2d_with_indices_backward", "avg_pool2d_backward",
        "_adaptive_avg_pool2d_backward", "avg_pool3d_backward", "max_pool3d_with_indices_backward",
        "upsample_nearest2d_backward", "upsample_bilinear2d_backward", "upsample_nearest1d_backward",
        "upsample_linear1d_backward", "im2col", "col2im", "diag_embed", "nll_loss_backward", "nll_loss2d_backward",
        "reflection_pad1d_backward", "reflection_pad2d_backward", "replication_pad1d_backward",
        "replication_pad2d_backward", "_unsafe_masked_index_put_accumulate",
    ),
    _product: ("mm", "bmm", "mv", "dot"),
    _slices("grad_output", _ALONG, {"output": 0.0}, is_risky=False): (
        "_softmax_backward_data", "_log_softmax_backward_data",
    ),
    _slices("grad_out", _NORMALIZED, _NORM, is_risky=True): (
        "native_layer_norm_backward", "_fused_rms_norm_backward",
    ),
    _slices("grad_out", _of_groups, _NORM, is_risky=True): ("native_group_norm_backward",),
    _slices("grad_out", _of_batch, _BATCH_NORM, is_risky=True): (
        "native_batch_norm_backward", "batch_norm_backward",
    ),
    _slices("grad_output", _SAMPLES, {"input": 0.0}, is_risky=True): ("convolution_backward",),
    _slices("grad_out", _LAST, _ATTENTION, is_risky=True): (
        "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_cudnn_attention_backward",
    ),
    _slices("grad_out_", _LAST, _ATTENTION, is_risky=True): ("_scaled_dot_product_efficient_attention_backward",),
}  # fmt: skip
RULES: Mapping[Any, Rule] = {
    overload: rule
    for rule, names in _RULES.items()
    for overload in [*operators.overloads(names), *operators.overloads(names, "prims")]
}
