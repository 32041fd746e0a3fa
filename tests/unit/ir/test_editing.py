"""Fake values of the copies of traced nodes: like those that the ops themselves would make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from gradrewrite._compat import fake_tensors, make_fx
from gradrewrite.ir import editing
from gradrewrite.numerics.statistics import norm_of

pytestmark = [pytest.mark.pure, pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")]

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": norm_of,
    "transposed": lambda x: (x.mT * 2).exp(),
    "views": lambda x: x.view(-1)[::2].unsqueeze(0) + 1,
    "in place": lambda x: x.clone().mul_(3).clamp_(max=1),
    "several results": lambda x: torch.stack([x.max(0).values, x.sort(0)[0][0]]),
    "narrower": lambda x: x.to(torch.bfloat16).sum(0),
    "sparse": lambda x: x * torch.sparse.sum(x.to_sparse()),
    "sparse rows": lambda x: torch.sparse.mm(x.to_sparse_csr(), x.mT),
    "integers": lambda x: (x > 0).sum(1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_the_ops(name: str) -> None:
    mode = FakeTensorMode()
    with mode:
        given = torch.empty(6, 4)
    traced = make_fx.trace(lambda x: [FUNCTIONS[name](x)], [given])
    owner = fx.GraphModule({}, fx.Graph())
    node = owner.graph.placeholder("x")
    node.meta["val"] = given
    end = owner.graph.output(())
    copies = [new for _ in range(2) for new in editing.splice(traced, owner.graph, [node], end, "is_backward")[1]]

    assert len(copies) > 1
    for copy in copies:
        value, wanted = copy.meta["val"], fake_tensors.fake_result(copy, mode)
        if not isinstance(wanted, Tensor):
            continue
        assert value.fake_mode is mode
        for what in ("shape", "dtype", "device", "layout"):
            assert getattr(value, what) == getattr(wanted, what), (copy, what)
        if wanted.layout is not torch.strided:
            continue
        assert value.stride() == wanted.stride()
        read = [n.meta["val"] for n in copy.all_input_nodes if isinstance(n.meta["val"], Tensor)]
        shares = [fake_tensors.share_memory(wanted, other) for other in read]
        assert shares == [fake_tensors.share_memory(value, other) for other in read]
    first, second = copies[: len(copies) // 2], copies[len(copies) // 2 :]
    owned = [c.meta["val"] for c in first if isinstance(c.meta["val"], Tensor)]
    others = [c.meta["val"] for c in second if isinstance(c.meta["val"], Tensor)]
    made = [t for t in owned if not fake_tensors.share_memory(t, given)]
    assert not any(fake_tensors.share_memory(a, b) for a in made for b in others)
