"""The rules of example layouts: what depends on an example is where the layout says, op by op."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gradrewrite.ir import editing
from gradrewrite.per_example.analysis import ExampleAnalysis
from gradrewrite.per_example.layouts import Batch, Const, Mixed, MixesExamplesError, Sum, of_view

B = 3
aten = torch.ops.aten
Given = tuple[tuple[int, ...], Batch | None]  # the sizes of an argument, and where it has the batch

pytestmark = pytest.mark.pure


def labels(size: Sequence[int], layout: Batch) -> Tensor:
    """The number of the example of each element."""
    line = (torch.arange(size[layout.dim]) // int(layout.post)) % B
    return line.reshape([-1 if d == layout.dim else 1 for d in range(len(size))]).expand(*size)


def analysed(fn: Callable[..., Any], given: Sequence[Tensor], layouts: Sequence[Batch | None]) -> list[Any]:
    """The layouts of the results of a function."""
    with FakeTensorMode() as mode, torch.no_grad():
        gm = make_fx(torch.func.functionalize(lambda *args: results(fn(*args))))(*map(mode.from_tensor, given))
    placeholders = gm.graph.find_nodes(op="placeholder")
    known = {node: layout for node, layout in zip(placeholders, layouts, strict=True) if layout is not None}
    analysis = ExampleAnalysis(gm.graph, known, B)
    return [analysis.layouts[node] for node in editing.outputs_of(gm.graph.output_node())]


@pytest.mark.parametrize("layout", [Batch(0), Batch(1), Batch(1, 2, 1), Batch(0, 1, 4), Batch(2, 2, 5)], ids=str)
def test_views(layout: Batch) -> None:
    """Every reshape of a tensor of example numbers, to up to four dimensions."""
    size = [2, 4, 5]
    size[layout.dim] = int(layout.pre) * B * int(layout.post)
    before = labels(size, layout)
    numel, num_found = before.numel(), 0
    divisors = [d for d in range(1, numel + 1) if numel % d == 0]
    shapes = {s for n in (1, 2, 3) for s in itertools.product(divisors, repeat=n) if torch.Size(s).numel() == numel}
    for shape in sorted(shapes):
        after = before.reshape(shape)
        try:
            found = of_view(layout, size, shape, B)
        except MixesExamplesError:
            possible = [Batch(d, p, n // B // p) for d, n in enumerate(shape) if n % B == 0 for p in divs(n // B)]
            assert not any(torch.equal(labels(shape, b), after) for b in possible), shape
            continue
        num_found += 1
        assert torch.equal(labels(shape, found), after), (shape, found)
    assert num_found > 5


def divs(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def mask(size: Sequence[int]) -> Tensor:
    return torch.ones(tuple(size)).tril().bool()


CASES: dict[str, tuple[Callable[..., Any], list[Given]]] = {
    "add": (lambda x, y: x + y, [((B, 4), Batch(0)), ((2, B, 1), Batch(1))]),
    "constant": (lambda x, w: x * w, [((B, 4), Batch(0)), ((4,), None)]),
    "where": (lambda x, y: torch.where(x > 0, x, y), [((B, 4), Batch(0)), ((B, 1), Batch(0))]),
    "masked_fill": (lambda x: x.masked_fill(mask(x.shape[1:]), 0.0), [((B, 4, 4), Batch(0))]),
    "permute": (lambda x: x.permute(2, 0, 1), [((B, 2, 4), Batch(0))]),
    "transpose": (lambda x: x.transpose(-1, 0), [((B, 2, 4), Batch(0))]),
    "t": (lambda x: aten.t.default(x), [((B, 2), Batch(0))]),
    "squeeze": (lambda x: x.squeeze(0).unsqueeze(-1), [((1, B, 2), Batch(1))]),
    "expand": (lambda x: x.expand(5, 2, -1, 4), [((B, 1), Batch(0))]),
    "repeat": (lambda x: x.repeat(2, 3, 1), [((B, 2), Batch(0))]),
    "flip": (lambda x: x.flip(1).roll(1, 1), [((B, 4), Batch(0))]),
    "pad": (lambda x: F.pad(x, (1, 2)), [((B, 4), Batch(0))]),
    "select": (lambda x: x.select(0, 1), [((2, B, 4), Batch(1))]),
    "slice": (lambda x: x[:, 1:3], [((B, 4), Batch(0))]),
    "slice of batches": (lambda x: x[B:], [((2 * B, 4), Batch(0, 2))]),
    "split": (lambda x: x.split([1, 3], 1), [((B, 4), Batch(0))]),
    "split of batches": (lambda x: x.chunk(2), [((2 * B, 4), Batch(0, 2))]),
    "unbind": (lambda x: x.unbind(1), [((B, 3), Batch(0))]),
    "cat": (lambda x, y: torch.cat([x, y], 1), [((B, 4), Batch(0)), ((B, 2), None)]),
    "cat of batches": (lambda x, y: torch.cat([x, y]), [((B, 4), Batch(0)), ((2 * B, 4), Batch(0, 2))]),
    "stack": (lambda x, y: torch.stack([x, y], 1), [((4, B), Batch(1)), ((4, B), Batch(1))]),
    "select_scatter": (lambda x, y: x.select_scatter(y, 1, 2), [((B, 4), Batch(0)), ((B,), Batch(0))]),
    "select_backward": (lambda x: aten.select_backward.default(x, [4, B, 2], 0, 1), [((B, 2), Batch(0))]),
    "slice_backward": (lambda x: aten.slice_backward.default(x, [B, 4], 1, 1, 3, 1), [((B, 2), Batch(0))]),
    "slice_backward of batches": (
        lambda x: aten.slice_backward.default(x, [2 * B, 4], 0, B, 2 * B, 1),
        [((B, 4), Batch(0))],
    ),
    "unfold": (lambda x: x.unfold(1, 2, 1), [((B, 4), Batch(0))]),
    "diagonal": (lambda x: x.diagonal(0, 0, 2), [((4, B, 4), Batch(1))]),
    "sum": (lambda x: x.sum((0, 2)), [((2, B, 4), Batch(1))]),
    "mean": (lambda x: x.mean(-1, keepdim=True), [((2, B, 4), Batch(1))]),
    "var_mean": (lambda x: torch.var_mean(x, (1,)), [((B, 4), Batch(0))]),
    "amax": (lambda x: x.amax(0), [((4, B), Batch(1))]),
    "argmax": (lambda x: x.argmax(0), [((4, B), Batch(1))]),
    "logsumexp": (lambda x: x.logsumexp(1), [((B, 4), Batch(0))]),
    "softmax": (lambda x: x.softmax(-1), [((2 * B, 4), Batch(0, 1, 2))]),
    "cumsum": (lambda x: x.cumsum(1), [((B, 4), Batch(0))]),
    "cumprod": (lambda x: x.cumprod(1), [((B, B), Batch(0))]),
    "sort": (lambda x: x.sort(1), [((B, 4), Batch(0))]),
    "topk": (lambda x: x.topk(2, 1), [((B, 4), Batch(0))]),
    "glu": (lambda x: F.glu(x, 1), [((B, 4), Batch(0))]),
    "gather": (lambda x: x.gather(1, x.argsort(1)[:, :2]), [((B, 4), Batch(0))]),
    "scatter_add": (lambda x: torch.zeros(B, 5).scatter_add(1, x.argsort(1), x), [((B, 4), Batch(0))]),
    "mm": (lambda x, w: x @ w, [((B * 2, 4), Batch(0, 1, 2)), ((4, 2), None)]),
    "mm from the right": (lambda w, x: w @ x, [((2, 4), None), ((4, B), Batch(1))]),
    "bmm": (torch.bmm, [((2 * B, 3, 4), Batch(0, 1, 2)), ((2 * B, 4, 3), Batch(0, 1, 2))]),
    "bmm of rows": (torch.bmm, [((2, B, 4), Batch(1)), ((2, 4, 3), None)]),
    "addmm": (torch.addmm, [((2,), None), ((B, 4), Batch(0)), ((4, 2), None)]),
    "mv": (torch.mv, [((B, 4), Batch(0)), ((4,), None)]),
    "conv": (lambda x, w: F.conv1d(x, w, groups=2), [((B, 4, 6), Batch(0)), ((4, 2, 3), None)]),
    "attention": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        [((B, 2, 4, 8), Batch(0)), ((B, 2, 4, 8), Batch(0))],
    ),
    "max_pool": (lambda x: F.max_pool2d(x, 2), [((B, 2, 4, 4), Batch(0))]),
    "avg_pool": (lambda x: F.avg_pool2d(x, 2), [((B, 2, 4, 4), Batch(0))]),
    "layer_norm": (lambda x, w: F.layer_norm(x, (4,), w), [((B, 2, 4), Batch(0)), ((4,), None)]),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), [((B, 4, 2), Batch(0)), ((4,), None)]),
    "instance_norm": (lambda x: F.instance_norm(x), [((B, 4, 5), Batch(0))]),
    "batch_norm in evaluation": (
        lambda x, w: F.batch_norm(x, w * 0, w * w + 1, w, w),
        [((B, 4, 2), Batch(0)), ((4,), None)],
    ),
    "embedding": (lambda x, w: F.embedding(x.argsort(1), w), [((B, 4), Batch(0)), ((5, 2), None)]),
    "index": (lambda x: x[:, torch.tensor([0, 2])], [((B, 4), Batch(0))]),
    "index of rows": (lambda x: x[torch.arange(B), x.argsort(1)[:, 0, 0]], [((B, 4, 2), Batch(0))]),
    "index by the batch": (lambda x, w: w[x.argsort(1)], [((B, 4), Batch(0)), ((5, 2), None)]),
    "index_put of rows": (
        lambda x: torch.zeros(B, 4).index_put([torch.arange(B), x.argsort(1)[:, 0]], x[:, 0], accumulate=True),
        [((B, 4), Batch(0))],
    ),
    "index_put": (
        lambda x: aten.index_put.default(torch.zeros(B, 5), [None, torch.tensor([0, 2, 2])], x, True),
        [((B, 3), Batch(0))],
    ),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, x.argmax(1), reduction="none"),
        [((2 * B, 4), Batch(0, 2, 1))],
    ),
    "median": (lambda x: x.median(0).values, [((B, B, B), Batch(1))]),
    "kthvalue": (lambda x: x.kthvalue(2, 0).values, [((B, B, B), Batch(1))]),
    "isin": (lambda x, w: torch.isin(x.round(), w.round()), [((B, 9), Batch(0)), ((2,), None)]),
    "bucketize": (lambda x: torch.bucketize(x, torch.tensor([-0.5, 0.0, 0.5])), [((B, 9), Batch(0))]),
    "index_select": (lambda x: x.index_select(1, torch.tensor([2, 0, 2])), [((B, B), Batch(0))]),
    "index_add": (
        lambda x: torch.zeros(B, B).index_add(1, torch.tensor([0, 2, 2]), x),
        [((B, B), Batch(0))],
    ),
    "index_add to examples": (
        lambda x, y: x.index_add(1, torch.tensor([0]), y),
        [((B, 4), Batch(0)), ((B, 1), Batch(0))],
    ),
    "bags": (lambda x, w: F.embedding_bag(x.argsort(1)[:, :2], w), [((B, 4), Batch(0)), ((5, 2), None)]),
    "bags of examples": (
        lambda x, w: F.embedding_bag(x.argsort(2)[..., :2].flatten(0, 1), w, mode="max"),
        [((B, 2, 4), Batch(0)), ((5, 2), None)],
    ),
    "padded bags": (
        lambda x, w: F.embedding_bag(x.argsort(1)[:, :2], w, mode="sum", padding_idx=1),
        [((B, 4), Batch(0)), ((5, 2), None)],
    ),
    "fold": (lambda x: F.fold(x, (B, B), 2), [((B, 4 * B, 4), Batch(0))]),
    "mse": (lambda x, y: F.mse_loss(x, y, reduction="none"), [((B, 4), Batch(0)), ((B, 4), Batch(0))]),
}


@pytest.mark.parametrize("name", CASES)
def test_results_depend_on_the_example_that_the_layout_says(name: str) -> None:
    check_layouts(*CASES[name])


def check_layouts(fn: Callable[..., Any], given: list[Given]) -> None:
    """Check what changes with each example against the layouts of the results; those of sums are not looked at."""
    torch.manual_seed(0)
    tensors = [torch.randn(size) for size, _ in given]
    layouts = [layout for _, layout in given]
    found = analysed(fn, tensors, layouts)
    plain = results(fn(*tensors))
    changed: list[Tensor] = [torch.zeros(p.shape, dtype=torch.bool) for p in plain]
    for example in range(B):
        other = [
            t if layout is None else torch.where(labels(t.shape, layout) == example, torch.randn(t.shape), t)
            for t, layout in zip(tensors, layouts, strict=True)
        ]
        for number, (now, before, layout) in enumerate(zip(results(fn(*other)), plain, found, strict=True)):
            differs = now != before
            changed[number] |= differs
            if layout == Const():
                assert not differs.any()
            elif layout != Sum():
                assert isinstance(layout, Batch), layout
                assert not differs[labels(now.shape, layout) != example].any()
    assert all(c.any() or a == Const() for c, a in zip(changed, found, strict=True))  # or it would be anywhere
    assert isinstance(found[0], Batch)


ROWS: Given = ((B, B), Batch(0))
IMAGES: Given = ((B, B, 6, 6), Batch(0))
WITH_BACKWARDS: dict[str, tuple[Callable[..., Tensor], list[Given]]] = {
    **{
        function.__name__: (function, [ROWS])
        for function in (
            *(
                F.hardtanh,
                F.elu,
                F.softplus,
                F.leaky_relu,
                F.hardswish,
                F.hardsigmoid,
                F.mish,
                F.softshrink,
                F.hardshrink,
            ),
            *(F.logsigmoid, F.gelu, F.silu, F.selu, F.celu, F.relu6, F.tanhshrink, F.softsign),
        )
    },
    **{
        loss.__name__: (lambda x, y, loss=loss: loss(x.sigmoid(), y.sigmoid(), reduction="none"), [ROWS, ROWS])
        for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss, F.binary_cross_entropy, F.kl_div)
    },
    "soft_margin_loss": (lambda x, y: F.soft_margin_loss(x, y.detach().sign(), reduction="none"), [ROWS, ROWS]),
    "bce with logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction="none"),
        [ROWS, ROWS],
    ),
    "nll_loss2d": (lambda x: F.cross_entropy(x, x.argmax(1), reduction="none"), [IMAGES]),
    "label smoothing": (lambda x: F.cross_entropy(x, x.argmax(1), label_smoothing=0.1, reduction="none"), [ROWS]),
    "prelu": (F.prelu, [IMAGES, ((B,), None)]),
    "glu": (lambda x: F.glu(x, 1), [((B, 4), Batch(0))]),
    "softmax": (lambda x: x.softmax(0), [((B, B), Batch(1))]),
    "log_softmax": (lambda x: x.log_softmax(-1), [ROWS]),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), [ROWS]),
    "cummax": (lambda x: x.cummax(1).values, [ROWS]),
    "cummin": (lambda x: x.cummin(0).values, [((B, B), Batch(1))]),
    "prod": (lambda x: x.prod(1), [ROWS]),
    "std": (lambda x: x.std(0), [((B, B), Batch(1))]),
    "var": (lambda x: x.var(1, keepdim=True), [ROWS]),
    "norm": (lambda x: x.norm(dim=0), [((B, B, B), Batch(1))]),
    "max": (lambda x: x.max(0).values, [((B, B, B), Batch(1))]),
    "min": (lambda x: x.min(1).values, [((B, B, B), Batch(0))]),
    "amin": (lambda x: x.amin((0, 2)), [((B, B, B), Batch(1))]),
    "median": (lambda x: x.median(0).values, [((B, B, B), Batch(1))]),
    "kthvalue": (lambda x: x.kthvalue(2, 2).values, [((B, B, B), Batch(1))]),
    "topk": (lambda x: x.topk(2, 1).values, [ROWS]),
    "sort": (lambda x: x.sort(0).values, [((B, B), Batch(1))]),
    "scatter": (lambda x, y: x.scatter(1, x.argsort(1)[:, :2], y), [ROWS, ((B, 2), Batch(0))]),
    "scatter_reduce": (lambda x, y: x.scatter_reduce(1, x.argsort(1), y, "amax"), [ROWS, ROWS]),
    "index_copy": (lambda x, y: x.index_copy(1, torch.tensor([0]), y), [ROWS, ((B, 1), Batch(0))]),
    "index_fill": (lambda x: x.index_fill(1, torch.tensor([0]), 2.0), [ROWS]),
    "index_add": (lambda x, y: x.index_add(1, torch.tensor([0]), y), [ROWS, ((B, 1), Batch(0))]),
    "slice_scatter": (lambda x, y: x.slice_scatter(y, 1, 1, 2), [ROWS, ((B, 1), Batch(0))]),
    "unfold": (lambda x: x.unfold(1, 2, 1), [ROWS]),
    "diagonal": (lambda x: x.diagonal(0, 0, 2), [((B, B, B), Batch(1))]),
    "roll": (lambda x: x.roll(1, 1).flip(1), [ROWS]),
    "triu": (lambda x: x.triu(), [((B, B, B), Batch(0))]),
    "complex": (lambda x, y: torch.complex(x, y).abs(), [ROWS, ROWS]),
    "baddbmm": (torch.baddbmm, [((B, B, B), Batch(0)), ((B, B, B), Batch(0)), ((B, B, B), Batch(0))]),
    "bmm of rows": (torch.bmm, [((2, B, 4), Batch(1)), ((2, 4, B), None)]),
    "mv": (torch.mv, [ROWS, ((B,), None)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), [IMAGES, ((B, B, 3, 3), None)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [IMAGES]),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), [IMAGES]),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), [((B, B, 6), Batch(0))]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), [IMAGES]),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), [IMAGES]),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 4), [IMAGES]),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 4), [IMAGES]),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), [((B, B, B, B, B), Batch(0))]),
    "im2col": (lambda x: F.unfold(x, 2, stride=2), [IMAGES]),
    "products of pairs": (F.bilinear, [ROWS, ROWS, ((B, B, B), None)]),
    "products of pairs of rows": (
        F.bilinear,
        [((2, B, 4), Batch(1)), ((2, B, B), Batch(1)), ((B, 4, B), None), ((B,), None)],
    ),
    **{
        f"{mode} {num_spatial}-D": (
            lambda x, mode=mode, pad=(1, 2) * num_spatial: F.pad(x, pad, mode),
            [((B, B, *[B] * num_spatial), Batch(0))],
        )
        for mode in ("reflect", "replicate")
        for num_spatial in (1, 2, 3)
    },
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), [IMAGES]),
    "nearest 1-D": (lambda x: F.interpolate(x, scale_factor=2), [((B, B, 4), Batch(0))]),
    "linear": (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), [((B, B, 4), Batch(0))]),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [IMAGES]),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), [((B, 4, B, B), Batch(0))]),
    "layer_norm": (lambda x, w: F.layer_norm(x, (B,), w), [((B, B, B), Batch(1)), ((B,), None)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (B,), w), [((B, B, B), Batch(1)), ((B,), None)]),
    "group_norm": (lambda x, w: F.group_norm(x, 3, w), [IMAGES, ((B,), None)]),
    "instance_norm": (lambda x, w: F.instance_norm(x, weight=w), [IMAGES, ((B,), None)]),
    "embedding": (lambda x, w: F.embedding(x.argsort(1)[:, :2], w), [ROWS, ((B, B), None)]),
    "gather": (lambda x: x.gather(1, x.argsort(1)), [ROWS]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [((B, B, B, 8), Batch(0)), ((B, B, B, 8), Batch(0)), ((B, B, B, 8), Batch(0))],
    ),
}


@pytest.mark.broad
@pytest.mark.parametrize("name", WITH_BACKWARDS)
def test_gradients_depend_on_the_example_that_the_layout_says(name: str) -> None:
    """Sizes that are no batch are mostly equal to it."""
    fn, given = WITH_BACKWARDS[name]

    def with_gradients(*tensors: Tensor) -> list[Tensor]:
        result, back = torch.func.vjp(fn, *tensors)
        return [result, *back(result.cos())]

    check_layouts(with_gradients, given)


def results(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


W = ((4, 4), None)
REFUSED: dict[str, tuple[Callable[..., Any], list[Given], str]] = {
    "softmax": (lambda x: x.softmax(0), [((B, 4), Batch(0))], "_softmax is computed along the batch"),
    "amax": (lambda x: x.amax(0), [((B, 4), Batch(0))], "amax is computed over the batch"),
    "similarities": (lambda x: x @ x.t(), [((B, 4), Batch(0))], "mm multiplies different examples"),
    "outer": (lambda x: x[:, None] - x[None], [((B,), Batch(0))], "sub combines different examples"),
    "select": (lambda x: x[0], [((B, 4), Batch(0))], "select takes single examples"),
    "slice": (lambda x: x[1:], [((B, 4), Batch(0))], "slice takes single examples"),
    "flip": (lambda x: x.flip(0), [((B, 4), Batch(0))], "flip takes single examples, or moves them"),
    "gather": (lambda x: x.gather(1, torch.zeros(1, 1).long()), [((B, 4), Batch(0))], "gather takes single examples"),
    "index": (lambda x: x[torch.tensor([1, 0, 2])], [((B, 4), Batch(0))], "index takes single examples"),
    "square of a sum": (lambda x: x.sum(0).square(), [((B, 4), Batch(0))], "pow is computed of a sum over the batch"),
    "penalty": (lambda x, w: x.sum(0) + w[0], [((B, 4), Batch(0)), W], "add is computed of a sum over the batch"),
    "batch norm": (
        lambda x: F.batch_norm(x, None, None, training=True),
        [((B, 4), Batch(0))],
        "in training is computed over the batch",
    ),
    "fma": (
        lambda x, w: torch.ops.prims.fma.default(w[0], x.sum(), w[1]),
        [((B, 4), Batch(0)), W],
        "fma is computed of a sum over the batch",
    ),
    "sum of floats as a factor": (lambda x: x / x.sum(), [((B,), Batch(0))], "div is computed of a sum"),
    "isin": (lambda x: torch.isin(x, x), [((B, 4), Batch(0))], "isin looks up in the elements of other examples"),
    "sum of integers": (lambda x: x - x.long().sum(0), [((B, 4), Batch(0))], "adds up integers over the batch"),
    "median over examples": (lambda x: x.median(0).values, [((B, B), Batch(0))], "median is computed over the batch"),
    "index_add of examples": (
        lambda x: torch.zeros(2, 4).index_add(0, torch.zeros(B).long(), x),
        [((B, 4), Batch(0))],
        "index_add is computed along the batch",
    ),
    "addmm of constants": (torch.addmm, [((B, 2), Batch(0)), ((B, 4), None), ((4, 2), None)], "addmm has no rule for"),
    "bags of several sizes": (
        lambda x, w: F.embedding_bag(x.argsort(1).flatten(), w, torch.tensor([0, 1, 5]), mode="sum"),
        [((B, 4), Batch(0)), W],
        "_embedding_bag_forward_only has bags of several sizes",
    ),
    "bags over examples": (
        lambda x, w: F.embedding_bag(x.argsort(1).t(), w, mode="sum"),
        [((B, 4), Batch(0)), W],
        "bags of several sizes, or of words of several examples",
    ),
    "bilinear of other examples": (
        lambda x, w: F.bilinear(x[:, None].expand(B, B, 4), x[None].expand(B, B, 4), w[None]),
        [((B, 4), Batch(0)), W],
        "_trilinear combines different examples",
    ),
    "columns of one image": (lambda x: F.unfold(x, 2), [((B, 4, 4), Batch(0))], "im2col is computed along the batch"),
    "padded examples": (
        lambda x: F.pad(x[None], (1, 1), "reflect"),
        [((4, B), Batch(1))],
        "reflection_pad1d is computed along the batch",
    ),
    "unknown": (lambda x: torch.linalg.inv(x), [((B, 4, 4), Batch(0))], "linalg_inv_ex has no rule"),
    "view": (lambda x: x.reshape(-1, 2 * B), [((B, 4), Batch(0))], "view puts examples and others into one dimension"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mixing_is_named(name: str) -> None:
    fn, given, text = REFUSED[name]
    (found,) = analysed(fn, [torch.randn(size) for size, _ in given], [layout for _, layout in given])
    assert isinstance(found, Mixed)
    assert text in found.reason


def test_the_first_op_that_mixes_is_the_one_that_is_named() -> None:
    (found,) = analysed(lambda x: (x.flip(0) + x.softmax(0)).sum(0), [torch.randn(B, 4)], [Batch(0)])
    assert isinstance(found, Mixed)
    assert found.node.startswith("flip")


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, w: x.sum(0),
    "mm": lambda x, w: (x.t() @ x).t() * 2,
    "mm with a constant": lambda x, w: x.t() @ w[:B],
    "several uses": lambda x, w: x.sum(0) + (x * x).sum(0),
    "slices": lambda x, w: aten.slice_backward.default(x.sum(0)[1:3], [6], 0, 2, 4, 1),
    "a common factor": lambda x, w: x.sum(0) / (x > 0).sum() * w[0],
    "fma": lambda x, w: torch.ops.prims.fma.default(w[0], x.sum(), (x * w[1]).sum(0)),
    "diagonal": lambda x, w: aten.diagonal_backward.default(x.sum(0), [4, 4], 0, 0, 1),
    "softmax of a constant": lambda x, w: aten._softmax_backward_data.default(x.sum(0), w[0], 0, torch.float32),
    "tanh of a constant": lambda x, w: aten.tanh_backward.default(x.sum(0), w[0].tanh()),
    "bilinear": lambda x, w: aten._trilinear.default(x, x, w, [2], [1], [0], [0]),
    "weight norm": lambda x, w: aten._weight_norm_interface_backward.default(x.t() @ x, w, w[:, :1], w[:, 1:2], 0)[0],
    "zeros": lambda x, w: torch.cat([x.sum(0), torch.zeros(2)]),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_terms(name: str) -> None:
    (found,) = analysed(SUMS[name], [torch.randn(B, 4), torch.randn(4, 4)], [Batch(0), None])
    assert found == Sum()


@pytest.mark.parametrize("count", [lambda x: (x > 0).sum(), lambda x: (x > 0).long().sum(1).sum()])
def test_counts_are_constants(count: Callable[[Tensor], Tensor]) -> None:
    (found,) = analysed(lambda x: count(x).float().rsqrt(), [torch.randn(B, 4)], [Batch(0)])
    assert found == Const()
