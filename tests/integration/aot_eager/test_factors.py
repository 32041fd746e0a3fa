"""Ops with factors become products where a function is traced, and mean the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gradrewrite._compat import make_fx
from gradrewrite._compat.factors import DECOMPOSITIONS

from models.factors import FUNCTIONS

FACTORS = ("alpha", "beta", "value")
INTERNAL = {
    "_add_relu", "_addmm_activation", "_cslt_sparse_mm", "_cslt_sparse_mm_search", "_sparse_semi_structured_addmm",
    "_sparse_addmm", "_test_serialization_subcmul", "_dirichlet_grad", "cudnn_convolution_add_relu",
    "miopen_convolution_add_relu", "sparse_sampled_addmm", "sspaddmm",
}  # fmt: skip
# A parameter of a function of one tensor, no factor of a sum; with an out dtype there is no gradient.
OF_OTHER_KINDS = {
    "celu", "elu", "elu_backward", "smooth_l1_loss", "smooth_l1_loss_backward", "softplus", "softplus_backward",
    "addmm.dtype", "baddbmm.dtype", "hamming_window.periodic_alpha", "hamming_window.periodic_alpha_beta",
    "kaiser_window.beta",
}  # fmt: skip
# Torch's own table decomposes them, or they are others by another name.
DECOMPOSED_BY_TORCH = {"addmv", "addr", "index_add", "rsub.Scalar", "rsub.Tensor", "subtract.Scalar", "subtract.Tensor"}


def ops_with_factors() -> Iterator[str]:
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        has_factor = any(a.name in ("alpha", "beta") for a in schema.arguments) or "addc" in name
        if space == "aten" and has_factor and not schema.is_mutable and name not in INTERNAL:
            yield f"{name}.{schema.overload_name}" if schema.overload_name else name


@pytest.mark.pure
def test_every_op_with_a_factor_is_known() -> None:
    own = {str(op).removeprefix("aten.").removesuffix(".default") for op in DECOMPOSITIONS}
    assert "addmm" in own
    assert set(ops_with_factors()) - own - OF_OTHER_KINDS - DECOMPOSED_BY_TORCH == set()


@pytest.mark.broad
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_mean_the_same(name: str, dtype: torch.dtype) -> None:
    run = FUNCTIONS[name]
    g, p = torch.randn(4, 6, dtype=dtype), torch.randn(4, 6, dtype=dtype)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (g, p)]
    graph = make_fx.trace(lambda *xs: [run(*xs)], fakes)
    (found,) = graph(g, p)

    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        assert len(node.args) == 2
    assert not [node for node in graph.graph.nodes if set(node.kwargs) & set(FACTORS)]
    assert (found.dtype, found.shape) == (g.dtype, g.shape)
    wide = {torch.bfloat16: 0.02, torch.float16: 0.002}.get(dtype)  # a product of matrices is rounded once more
    torch.testing.assert_close(found, run(g, p), rtol=wide, atol=wide)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.tensor([3, 4]), torch.tensor([1.5, 2.5])),
        (torch.tensor([1.5, 2.5], dtype=torch.float64), torch.tensor([1 << 40, 3])),
        (torch.tensor([1.5, 2.5], dtype=torch.float16), torch.tensor(2.0, dtype=torch.float64)),
        (torch.tensor([1.5, 2.5], dtype=torch.float16), torch.tensor([2.0, 1e-3])),
        (torch.tensor([1 + 2j, 2]), torch.tensor([0.5, 2.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([True, False])),
    ],
)
def test_dtypes_of_sums(first: torch.Tensor, second: torch.Tensor) -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (first, second)]
    for run in (lambda a, b: torch.add(a, b, alpha=0.3), lambda a, b: torch.addcmul(a, b, b, value=0.3)):
        (found,) = make_fx.trace(lambda *xs, run=run: [run(*xs)], fakes)(first, second)
        torch.testing.assert_close(found, run(first, second), rtol=0, atol=0)
