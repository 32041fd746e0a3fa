"""Rules of example layouts: for each ATen op, the batch dimension of its result.

A rule sees arguments that are constant or have the batch, at least one of each call the latter. An op without a rule is
never guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat.operators import is_pointwise, overloads
from gradrewrite.per_example.layouts import (
    Batch,
    Const,
    Layout,
    MixesExamplesError,
    Sum,
    agree,
    of_view,
    product,
    quotient,
    same_size,
)
from gradrewrite.per_example.op_calls import PUTS, Layouts, OpCall, counts_up, is_count, is_zero, kept_dims, size_of

Rule = Callable[[OpCall], Layouts]

RULES: dict[Any, Rule] = {}
OVER_THE_BATCH = "is computed over the batch"
ALONG_THE_BATCH = "is computed along the batch"
SINGLE = "takes single examples, or moves them"


def rule_of(node: fx.Node) -> Rule | None:
    """Return the rule of a node's op; None if there is none."""
    found = RULES.get(node.target)
    return found or (_pointwise if is_pointwise(node) else None)


def _rule(*names: str, namespace: str = "aten") -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(overloads(names, namespace), rule))
        return rule

    return register


@_rule(
    *("hardswish", "where", "masked_fill", "bernoulli", "_to_copy", "to", "lift_fresh_copy", "detach", "alias"),
    *("clone", "rsub", "expand", "hardswish_backward"),
    *("hardtanh_backward", "elu_backward", "softplus_backward", "leaky_relu", "leaky_relu_backward"),
    *("hardsigmoid_backward", "mish_backward", "softshrink_backward", "hardshrink_backward", "log_sigmoid_forward"),
    *("log_sigmoid_backward", "native_dropout", "_prelu_kernel", "_prelu_kernel_backward"),
    *("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "soft_margin_loss_backward"),
    *("binary_cross_entropy_backward", "_conj", "complex", "tril", "triu", "native_dropout_backward"),
)
@_rule("device_put", "convert_element_type", "fma", namespace="prims")
def _pointwise(call: OpCall) -> Layouts:
    rank = max(v.dim() for v in call.results if v is not None)
    layouts = [layout.moved(layout.dim + rank - len(size_of(node))) for node, layout in call.batched]
    return call.all_results(agree(layouts))


@_rule("isin", "bucketize")
def _look_up(call: OpCall) -> Layouts:
    names = call.arguments
    table = names.get("boundaries", names.get("test_elements", names.get("test_element")))
    if call.batch_of(table) is not None:
        raise MixesExamplesError("looks up in the elements of other examples")
    return call.same_places()


@_rule("copy")
def _copy(call: OpCall) -> Layouts:
    layout = call.batch_of(call["src"])
    return Const() if layout is None else layout.moved(layout.dim + len(call.size("self")) - len(call.size("src")))


_READ_SIZES = (
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like", "new_zeros"),
    *("new_ones", "new_full", "new_empty", "new_empty_strided", "bernoulli_p"),
)
READ_SIZES = frozenset(overloads(_READ_SIZES))


@_rule(*_READ_SIZES, "fill")
def _like(call: OpCall) -> Layouts:
    """Only the sizes are read."""
    return Const()


@_rule("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")
@_rule("binary_cross_entropy_with_logits")
def _loss(call: OpCall) -> Layouts:
    return _pointwise(call) if call["reduction"] == 0 else Sum()


@_rule("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(call: OpCall) -> Layouts:
    layout = call.same_places("self", "target")
    if call["reduction"] == 0:
        return call.by_position(layout)
    return call.by_position(Sum(), Const() if call["weight"] is None else Sum())


@_rule("nll_loss_backward", "nll_loss2d_backward", "view_as_real", "view_as_complex")
def _of_one_rank(call: OpCall) -> Layouts:
    return call.same_places()


@_rule("view", "reshape", "_unsafe_view", "_reshape_alias", "squeeze", "unsqueeze", "flatten", "view_copy")
def _view(call: OpCall) -> Layouts:
    ((node, layout),) = call.batched
    return of_view(layout, size_of(node), size_of(call.node), call.num_examples)


@_rule("permute")
def _permute(call: OpCall) -> Layouts:
    ((node, layout),) = call.batched
    order = [d % len(size_of(node)) for d in call["dims"]]
    return layout.moved(order.index(layout.dim))


@_rule("transpose", "t")
def _transpose(call: OpCall) -> Layouts:
    ((node, layout),) = call.batched
    rank = len(size_of(node))
    if rank < 2:
        return layout
    first, second = (call.dim("dim0"), call.dim("dim1")) if "dim0" in call.arguments else (0, 1)
    return layout.moved({first: second, second: first}.get(layout.dim, layout.dim))


@_rule("repeat")
def _repeat(call: OpCall) -> Layouts:
    ((node, layout),) = call.batched
    dim = layout.dim + len(call["repeats"]) - len(size_of(node))
    times = size_of(call.node)[dim] // size_of(node)[layout.dim]
    return Batch(dim, layout.pre * times, layout.post)


@_rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
def _shuffle(call: OpCall) -> Layouts:
    layout = call.same_places()
    if layout.dim >= len(call.size("self")) - (3 if "channel" not in str(call.node.target) else 1):
        raise MixesExamplesError(SINGLE)
    return layout


@_rule("as_strided")
def _as_strided(call: OpCall) -> Layouts:
    """Inductor makes views so."""
    ((node, layout),) = call.batched
    before, after = node.meta["val"], call.node.meta["val"]
    is_view = before.is_contiguous() and after.is_contiguous() and not call["storage_offset"]
    if not is_view or not same_size(before.numel(), after.numel()):
        raise MixesExamplesError("has strides that are not understood")
    return of_view(layout, size_of(node), size_of(call.node), call.num_examples)


@_rule("flip", "roll")
@_rule("rev", namespace="prims")
def _reorder(call: OpCall) -> Layouts:
    ((node, layout),) = call.batched
    dims = call["dims"] or range(len(size_of(node)))
    if layout.dim in [d % len(size_of(node)) for d in dims]:
        raise MixesExamplesError(SINGLE)
    return layout


@_rule("constant_pad_nd")
def _pad(call: OpCall) -> Layouts:
    layout = call.same_places()
    padded = len(call.size("self")) - 1 - layout.dim
    if any(call["pad"][2 * padded : 2 * padded + 2]):
        raise MixesExamplesError(SINGLE)
    return layout


def _part(call: OpCall, layout: Batch, before: Any, after: Any, start: Any = 0, step: Any = 1) -> Batch:
    """Return the layout of a slice along the batch: all of it, or whole batches out of several."""
    if same_size(before, after):
        return layout
    whole = call.num_examples * layout.post
    first, number = quotient(start, whole), quotient(after, whole)
    if first is None or number is None or step != 1:
        raise MixesExamplesError(SINGLE)
    return Batch(layout.dim, number, layout.post)


@_rule("select")
def _select(call: OpCall) -> Layouts:
    ((_, layout),) = call.batched
    dim = call.dim()
    if dim == layout.dim:
        raise MixesExamplesError(SINGLE)
    return layout.moved(layout.dim - (dim < layout.dim))


@_rule("slice")
def _slice(call: OpCall) -> Layouts:
    ((node, layout),) = call.batched
    dim = call.dim()
    if dim != layout.dim:
        return layout
    before, after = size_of(node)[dim], size_of(call.node)[dim]
    return _part(call, layout, before, after, call["start"] or 0, call["step"])


@_rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unbind", "tensor_split")
def _split(call: OpCall) -> Layouts:
    ((node, layout),) = call.batched
    dim = call.dim()
    if call.node.target is torch.ops.aten.unbind.int:
        if dim == layout.dim:
            raise MixesExamplesError(SINGLE)
        return call.all_results(layout.moved(layout.dim - (dim < layout.dim)))
    if dim != layout.dim:
        return call.all_results(layout)
    found: list[Layout] = []
    start: Any = 0
    for part in call.results:
        assert part is not None
        found.append(_part(call, layout, size_of(node)[dim], part.shape[dim], start))
        start = start + part.shape[dim]
    return tuple(found)


@_rule("cat")
def _cat(call: OpCall) -> Layouts:
    tensors = [t for t in call["tensors"] if not (len(size_of(t)) == 1 and same_size(size_of(t)[0], 0))]
    dim = int(call["dim"]) % len(size_of(call.node))
    known = [layout for t in tensors if (layout := call.batch_of(t)) is not None]
    if known[0].dim != dim:
        return agree(known)
    if len(known) < len(tensors):
        raise MixesExamplesError("puts constants behind examples")
    agree([Batch(dim, 1, layout.post) if layout.dim == dim else layout for layout in known])
    pre: Any = 0
    for layout in known:
        pre = pre + layout.pre
    return Batch(dim, pre, known[0].post)


@_rule("stack")
def _stack(call: OpCall) -> Layouts:
    layout = agree(layout for _, layout in call.batched)
    dim = int(call["dim"]) % len(size_of(call.node))
    return layout.moved(layout.dim + (dim <= layout.dim))


@_rule("select_scatter", "select_backward")
def _put_back(call: OpCall) -> Layouts:
    given, dim = call.batch_of(call["src" if "src" in call.arguments else "grad_output"]), call.dim()
    moved = None if given is None else given.moved(given.dim + (dim <= given.dim))
    layout = agree([moved, call.batch_of(call.arguments.get("self"))])
    if layout.dim == dim:
        raise MixesExamplesError(SINGLE)
    return layout


@_rule("slice_scatter", "slice_backward")
def _slice_back(call: OpCall) -> Layouts:
    part, whole = ("src", call["self"]) if "src" in call.arguments else ("grad_output", 0)
    given, rest, dim = call.batch_of(call[part]), call.batch_of(whole), call.dim()
    before, after = call.size(part)[dim], size_of(call.node)[dim]
    first = rest if given is None else given
    if first is None or first.dim != dim or same_size(before, after):
        return agree([given, rest])
    if given is None or (rest is None and not is_zero(whole)):
        raise MixesExamplesError(SINGLE)
    return agree([_part(call, given, before, after, call["start"] or 0, call["step"]), rest])


@_rule("unfold", "unfold_backward", "index_fill", "index_copy", "index_add")
def _along_others(call: OpCall) -> Layouts:
    names = [name for name in ("self", "source", "grad_in") if name in call.arguments]
    layout = call.same_places(*names)
    if call.dim("dimension" if "dimension" in call.arguments else "dim") == layout.dim:
        raise MixesExamplesError(ALONG_THE_BATCH)
    if any(node not in [call[name] for name in names] for node, _ in call.batched):
        raise MixesExamplesError("has no rule for indices with the batch")
    return layout


@_rule("diagonal_backward")
def _diagonal_backward(call: OpCall) -> Layouts:
    layout = call.same_places("grad_output")
    others = kept_dims(len(call["input_sizes"]), (call.dim("dim1"), call.dim("dim2")))
    if layout.dim >= len(others):
        raise MixesExamplesError(SINGLE)
    return layout.moved(others[layout.dim])


@_rule("diagonal")
def _diagonal(call: OpCall) -> Layouts:
    ((_, layout),) = call.batched
    taken = (call.dim("dim1"), call.dim("dim2"))
    if layout.dim in taken:
        raise MixesExamplesError(SINGLE)
    return layout.moved(layout.dim - sum(d < layout.dim for d in taken))


_ADDS = frozenset(overloads(("sum", "mean")))


@_rule(
    *("sum", "mean", "amax", "amin", "var_mean", "var", "std", "std_mean", "prod", "any", "all", "argmax", "argmin"),
    *("max", "min", "linalg_vector_norm", "norm", "logsumexp", "count_nonzero", "median", "kthvalue"),
)
def _reduce(call: OpCall) -> Layouts:
    (node, layout) = call.batched[0]
    if "other" in call.arguments:  # the larger of two tensors
        return _pointwise(call)
    rank, given = len(size_of(node)), call.arguments.get("dim")
    given = [given] if isinstance(given, int) else given
    dims = [d % rank for d in given] if given else list(range(rank))
    if layout.dim not in dims:
        keeps = bool(call.arguments.get("keepdim"))
        return call.all_results(layout if keeps else layout.moved(layout.dim - sum(d < layout.dim for d in dims)))
    if call.node.target not in _ADDS:
        raise MixesExamplesError(OVER_THE_BATCH)
    value = node.meta["val"]
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return call.contract({node: layout})
    if not is_count(node):
        raise MixesExamplesError("adds up integers over the batch, which may be data: of a mask take mask.bool().sum()")
    return Const()


@_rule(
    *("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "cumsum", "cumprod", "sort"),
    *("topk", "logcumsumexp", "cummax", "cummin", "glu", "glu_backward", "gather", "scatter", "scatter_add"),
    *("scatter_reduce", "softmax", "_safe_softmax", "log_softmax", "argsort"),
)
@_rule("prepare_softmax_online", namespace="prims")
def _along(call: OpCall) -> Layouts:
    layout = call.same_places()
    if "dim" not in call.arguments or call["dim"] is None:
        raise MixesExamplesError(OVER_THE_BATCH)
    if int(call["dim"]) % len(size_of(call.batched[0][0])) == layout.dim:
        raise MixesExamplesError(ALONG_THE_BATCH)
    return call.all_results(layout)


@_rule("mm", "bmm", "addmm", "baddbmm")
def _matmul(call: OpCall) -> Layouts:
    left = next(name for name in ("mat1", "batch1", "self") if name in call.arguments)
    right, rank = call["batch2" if left == "batch1" else "mat2"], len(size_of(call.node))
    result = _product(call, call[left], right, rank - 2)
    if left == "self":
        return result
    if isinstance(result, Sum):
        raise MixesExamplesError("adds a sum over the batch to something else")
    added = call.batch_of(call["self"])
    return agree([result, None if added is None else added.moved(added.dim + rank - len(call.size("self")))])


def _product(call: OpCall, left: fx.Node, right: fx.Node, lead: int) -> Batch | Sum:
    a, b = call.batch_of(left), call.batch_of(right)
    if lead and (a is None or a.dim == 0) and (b is None or b.dim == 0):
        return agree([a, b])
    if a is not None and b is None and a.dim == lead:
        return a
    if b is not None and a is None and b.dim == lead + 1:
        return b
    rows_a, rows_b = lead + 1, lead
    if (a is None or a.dim == rows_a) and (b is None or b.dim == rows_b):
        rows = agree(layout and layout.moved(0) for layout in (a, b))
        return call.contract({left: rows.moved(rows_a), right: rows.moved(rows_b)})
    raise MixesExamplesError("multiplies different examples")


@_rule("mv", "dot")
def _vector_product(call: OpCall) -> Layouts:
    a, b = call["self"], call["vec" if "vec" in call.arguments else "tensor"]
    rows = len(size_of(a)) - 1
    own, other = call.batch_of(a), call.batch_of(b)
    if other is None and own is not None and own.dim == rows - 1:
        return own
    if (own is None or own.dim == rows) and (other is None or other.dim == 0):
        common = agree(layout and layout.moved(0) for layout in (own, other))
        return call.contract({a: common.moved(rows), b: common})
    raise MixesExamplesError("multiplies different examples")


@_rule("_trilinear")
def _trilinear(call: OpCall) -> Layouts:
    """Multiply three tensors, each broadcast along its ``expand``, and sum along ``sumdim``."""
    found: dict[fx.Node, Batch] = {}
    for name, expand in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        layout, node = call.batch_of(call[name]), call[name]
        if layout is not None:
            found[node] = layout.moved(kept_dims(len(size_of(node)) + len(call[expand]), call[expand])[layout.dim])
    layout, summed = agree(found.values()), list(call["sumdim"])
    if layout.dim in summed:
        return call.contract(dict(call.batched))
    return layout.moved(layout.dim - sum(d < layout.dim for d in summed))


@_rule("convolution")
def _convolution(call: OpCall) -> Layouts:
    layout = call.same_places("input")
    if layout.dim != 0 or len(call.batched) > 1:
        raise MixesExamplesError("convolves different examples")
    return layout


@_rule("convolution_backward")
def _convolution_backward(call: OpCall) -> Layouts:
    layout = call.same_places("grad_output", "input")
    if layout.dim != 0 or call.batch_of(call["weight"]) is not None:
        raise MixesExamplesError("convolves different examples")
    return (layout, *[call.contract({call["grad_output"]: layout, call["input"]: layout})] * 2)


_ATTENTIONS = (
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    "_scaled_dot_product_fused_attention_overrideable",
)


@_rule(*_ATTENTIONS, *(f"{name}_backward" for name in _ATTENTIONS))
def _attention(call: OpCall) -> Layouts:
    layout = call.same_places()
    if layout.dim != 0:
        raise MixesExamplesError("attends to different examples")
    # Behind two results of a forward come the states of random numbers.
    return call.by_position(*[layout] * (len(call.results) if "backward" in str(call.node.target) else 2))


def _pool(call: OpCall, num_spatial: int) -> Layouts:
    layout = call.same_places()
    if layout.dim >= len(size_of(call.batched[0][0])) - num_spatial:
        raise MixesExamplesError(ALONG_THE_BATCH)
    return call.all_results(layout)


_pool_1d, _pool_2d, _pool_3d = (partial(_pool, num_spatial=number) for number in (1, 2, 3))
_rule(
    *("upsample_nearest1d", "upsample_nearest1d_backward", "upsample_linear1d", "upsample_linear1d_backward"),
    *("reflection_pad1d", "reflection_pad1d_backward", "replication_pad1d", "replication_pad1d_backward"),
)(_pool_1d)
_rule(
    *("max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "upsample_nearest2d", "upsample_nearest2d_backward"),
    *("upsample_bilinear2d", "upsample_bilinear2d_backward", "adaptive_max_pool2d", "adaptive_max_pool2d_backward"),
    *("reflection_pad2d", "reflection_pad2d_backward", "replication_pad2d", "replication_pad2d_backward"),
)(_pool_2d)
_rule("_low_memory_max_pool_with_offsets", "_low_memory_max_pool_offsets_to_indices", namespace="prims")(_pool_2d)
_rule(
    *("max_pool3d_with_indices", "max_pool3d_with_indices_backward", "avg_pool3d", "avg_pool3d_backward"),
    *("_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "adaptive_max_pool3d", "adaptive_max_pool3d_backward"),
    *("reflection_pad3d", "reflection_pad3d_backward", "replication_pad3d", "replication_pad3d_backward"),
)(_pool_3d)


@_rule("im2col", "col2im")
def _columns(call: OpCall) -> Layouts:
    """Windows of images as columns, ``[N, C * k, L]``, and back."""
    layout = call.same_places()
    if layout.dim or len(size_of(call.node)) != (3 if "im2col" in str(call.node.target) else 4):
        raise MixesExamplesError(ALONG_THE_BATCH)
    return layout


@_rule("native_layer_norm", "_fused_rms_norm")
def _layer_norm(call: OpCall) -> Layouts:
    layout = call.same_places("input")
    if len(call.batched) > 1:
        raise MixesExamplesError("has a weight for each example")
    if layout.dim >= len(call.size("input")) - len(call["normalized_shape"]):
        raise MixesExamplesError(OVER_THE_BATCH)
    return call.all_results(layout)


@_rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(call: OpCall) -> Layouts:
    names = [name for name in ("grad_out", "input", "mean", "rstd") if name in call.arguments]
    layout = call.same_places(*names)
    if layout.dim >= len(call.size("input")) - len(call["normalized_shape"]):
        raise MixesExamplesError(OVER_THE_BATCH)
    total = call.contract({call[name]: layout for name in names})
    return (layout, *[total] * (len(call.results) - 1))


@_rule("native_group_norm")
def _group_norm(call: OpCall) -> Layouts:
    return call.all_results(_first(call, "input"))


@_rule("native_group_norm_backward")
def _group_norm_backward(call: OpCall) -> Layouts:
    names = ("grad_out", "input", "mean", "rstd")
    layout = _first(call, *names)
    total = call.contract({call[name]: layout for name in names})
    return (layout, total, total)


@_rule("_native_batch_norm_legit_no_training")
def _frozen_batch_norm(call: OpCall) -> Layouts:
    return call.by_position(call.same_places("input"))


@_rule("_native_batch_norm_legit", "_native_batch_norm_legit_functional", "native_batch_norm")
@_rule("_batch_norm_with_update", "_batch_norm_with_update_functional", "cudnn_batch_norm")
def _batch_norm(call: OpCall) -> Layouts:
    layout = call.same_places("input")
    if not call.arguments.get("training", True):
        return call.by_position(layout)
    if layout.dim != 1:
        raise MixesExamplesError(f"in training {OVER_THE_BATCH}")
    return call.by_position(layout, layout.moved(0), layout.moved(0))  # of an instance norm: its channels


@_rule("native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm_backward")
def _batch_norm_backward(call: OpCall) -> Layouts:
    layout = call.same_places(*[name for name in ("grad_out", "grad_output", "input") if name in call.arguments])
    if layout.dim == 1:
        return (layout, layout.moved(0), layout.moved(0))
    if call.arguments.get("train", call.arguments.get("update", True)):
        raise MixesExamplesError(f"in training {OVER_THE_BATCH}")
    error = call["grad_out" if "grad_out" in call.arguments else "grad_output"]
    total = call.contract({error: layout, call["input"]: layout})
    return (layout, total, total)


def _first(call: OpCall, *names: str) -> Batch:
    layout = call.same_places(*names)
    if layout.dim != 0:
        raise MixesExamplesError(OVER_THE_BATCH)
    return layout


@_rule("embedding")
def _embedding(call: OpCall) -> Layouts:
    if call.batch_of(call["weight"]) is not None:
        raise MixesExamplesError(SINGLE)
    return call.same_places("indices")


@_rule("embedding_dense_backward")
def _embedding_backward(call: OpCall) -> Layouts:
    if call["scale_grad_by_freq"]:
        raise MixesExamplesError("counts words over the batch (scale_grad_by_freq)")
    layout = call.same_places("grad_output", "indices")
    return call.contract({call["grad_output"]: layout, call["indices"]: layout})


@_rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(call: OpCall) -> Layouts:
    if any(call.batch_of(call[name]) is not None for name in ("weight", "offsets")):
        raise MixesExamplesError("has bags of sizes that depend on the examples")
    bags, largest = _bags_of(call, call.same_places("indices")), call.results[3]
    has_largest = isinstance(largest, Tensor) and largest.dim() == 2
    return (bags, Const(), bags, bags if has_largest else Const())


@_rule("_embedding_bag_backward", "_embedding_bag_dense_backward")
def _embedding_bag_backward(call: OpCall) -> Layouts:
    if call["scale_grad_by_freq"]:
        raise MixesExamplesError("counts words over the batch (scale_grad_by_freq)")
    names = ("grad", "indices", "bag_size", "maximum_indices", "per_sample_weights")
    layouts = {name: call.batch_of(call[name]) for name in names}
    return call.contract({call[name]: layout for name, layout in layouts.items() if layout is not None})


def _bags_of(call: OpCall, words: Batch) -> Batch:
    (number, *_), (total, *_) = call.size("offsets"), call.size("indices")
    number = number - 1 if call["include_last_offset"] else number
    each = quotient(total, number)
    count = None if each is None else quotient(words.post, each)
    has_one_size = each is not None and counts_up(call["offsets"], call.size("offsets")[0], each)
    if count is None or not same_size(words.pre, 1) or not has_one_size:
        raise MixesExamplesError("has bags of several sizes, or of words of several examples")
    return Batch(0, 1, count)


@_rule("index_select")
def _index_select(call: OpCall) -> Layouts:
    dim, own, index = call.dim(), call.batch_of(call["self"]), call.batch_of(call["index"])
    if own is not None and own.dim == dim:
        raise MixesExamplesError(SINGLE)
    return agree([own, index and index.moved(dim)])


class _Indices:
    def __init__(self, call: OpCall) -> None:
        self.call = call
        # The indices by the dimension that each takes, the number of dimensions of all together, and their place in the
        # result.
        self.present = {dim: index for dim, index in enumerate(call["indices"]) if index is not None}
        if any(index.meta["val"].dtype == torch.bool for index in self.present.values()):
            raise MixesExamplesError("has no rule for a mask as index")
        self.rank = max(len(size_of(index)) for index in self.present.values())
        dims = list(self.present)
        self.first = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0

    def of_indices(self) -> list[Batch]:
        """Layouts of the indices, in the dimensions common to all of them."""
        pairs = ((index, self.call.batch_of(index)) for index in self.present.values())
        return [b.moved(b.dim + self.rank - len(size_of(i))) for i, b in pairs if b is not None]

    def of_other(self, dim: int) -> int:
        """Return an unindexed dimension's place in the result."""
        before = sum(d not in self.present for d in range(dim))
        return before if before < self.first else before + self.rank

    def identity(self, size: Sequence[Any]) -> tuple[int, int] | None:
        """The dimension that ``arange(B)`` takes, and where that index has its numbers among the common dimensions."""
        for dim, index in self.present.items():
            own = size_of(index)
            long = [d for d, n in enumerate(own) if not same_size(n, 1)]
            if len(long) == 1 and same_size(size[dim], self.call.num_examples) and counts_up(index, size[dim]):
                return dim, long[0] + self.rank - len(own)
        return None


@_rule("index", "_unsafe_index", "_unsafe_masked_index")
def _index(call: OpCall) -> Layouts:
    indices, source = _Indices(call), call.batch_of(call["self"])
    common = indices.of_indices()
    identity = indices.identity(call.size("self"))
    if source is not None and source.dim in indices.present:
        if identity is None or identity[0] != source.dim:
            raise MixesExamplesError(SINGLE)
        common.append(Batch(identity[1]))
    elif source is not None:
        common.append(source.moved(indices.of_other(source.dim) - indices.first))
    mask = call.batch_of(call.arguments.get("mask"))
    if mask is not None:
        common.append(mask.moved(mask.dim + len(size_of(call.node)) - len(call.size("mask")) - indices.first))
    layout = agree(common)
    return layout.moved(layout.dim + indices.first)


def _index_put(call: OpCall) -> Layouts:
    indices, base, values = _Indices(call), call["self"], call["values"]
    rank = len(size_of(base))
    own, given = call.batch_of(base), call.batch_of(values)
    full = rank - len(indices.present) + indices.rank  # to which values and a mask are broadcast
    lead, lead_of_mask = full - len(call.size("values")), full - len(size_of(call.arguments.get("mask")))
    of_values = None if given is None else given.moved(given.dim + lead)
    common = indices.of_indices()
    others = {indices.of_other(d): d for d in range(rank) if d not in indices.present}
    if own is None and not is_zero(base):
        raise MixesExamplesError("writes into constants")
    if of_values is not None and of_values.dim in others:  # whole rows of each example
        dim = others[of_values.dim]
        if common or (own is not None and own.dim != dim):
            raise MixesExamplesError("writes into different examples")
        return agree([of_values.moved(dim), own])
    if of_values is not None:
        common.append(of_values.moved(of_values.dim - indices.first))
    identity = indices.identity(size_of(base))
    if identity is not None and common and agree(common).equals(Batch(identity[1])):
        return agree([Batch(identity[0]), own])
    mask = call.batch_of(call.arguments.get("mask"))
    if own is not None or not common or not call.arguments.get("accumulate", True):
        raise MixesExamplesError("writes into different examples")
    if mask is not None:
        common.append(mask.moved(mask.dim + lead_of_mask - indices.first))
    rows = agree(common)
    split = {node: rows.moved(rows.dim + len(size_of(node)) - indices.rank) for node in indices.present.values()}
    split = {node: layout for node, layout in split.items() if layout.dim >= 0}
    split[values] = rows.moved(rows.dim + indices.first - lead)
    if "mask" in call.arguments:
        split[call["mask"]] = rows.moved(rows.dim + indices.first - lead_of_mask)
    whole = rows.pre * call.num_examples * rows.post
    if not all(same_size(size_of(node)[layout.dim], whole) for node, layout in split.items()):
        raise MixesExamplesError("has no rule for indices that are broadcast")
    return call.contract(split)


RULES.update(dict.fromkeys(PUTS, _index_put))


def check_sizes(call: OpCall, found: Layouts) -> None:
    """Raise an error where a result has not the number of rows that its layout says: an op took some of them."""
    layouts = found if isinstance(found, tuple) else (found,)
    for value, layout in zip(call.results, layouts, strict=True):
        if isinstance(layout, Batch) and isinstance(value, Tensor):
            rows = product([layout.pre, call.num_examples, layout.post])
            if not (0 <= layout.dim < value.dim() and same_size(value.shape[layout.dim], rows)):
                raise MixesExamplesError(SINGLE)
