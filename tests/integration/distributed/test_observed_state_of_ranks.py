"""Parameters, optimizer state and update ratios of shards: the figures are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, Keep, Observe

from models.optimizers import OPTIMIZERS, USUAL
from models.small import Gradients, TwoLayers
from ranks import outcomes_of, run_parts

STATISTICS = ("norm", "max_abs", "mean_abs", "min", "zeros", "kurtosis", "exponents", "fingerprint", "nonfinite")
POLICY = [
    gr.on("param:*", Observe(*STATISTICS)),
    gr.on("state:*", Observe("norm", "max_abs", "mean_abs")),
    gr.on("state:one.weight.*", Keep()),
    gr.on("gradient:*", Observe("norm")),
]


class Collectives(TorchDispatchMode):
    """Names of the collectives of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "c10d_functional" in name and "wait" not in name:
            self.found.append(f"{name} {args[1]}")
        return func(*args, **(kwargs or {}))


def train(name: str, *, is_sharded: bool, rank: int = 0, ranks: int = 1, monitor: Any = None) -> list[Any]:
    """Records of parameters, state and ratios in each step, the collectives of the last, and kept tensors."""
    torch.manual_seed(0)
    model = gr.transform(TwoLayers().double(), POLICY, monitor=monitor)
    if is_sharded:
        fully_shard(model)
    optimizer = gr.guard(OPTIMIZERS[name](model.parameters()), model, update_ratios=True)
    rows, counted = [], Collectives()
    for n in range(4):
        batch = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        optimizer.zero_grad()
        model(batch.chunk(ranks)[rank]).square().mean().backward()
        counted = Collectives()
        with counted:
            optimizer.step()
        kinds = ("@param:", "@state:", "update_ratio@")
        rows.append({k: v for k, v in model.monitor.latest().items() if any(kind in k for kind in kinds)})
    return [rows, counted.found, {str(site): _full(tensor) for site, tensor in model.monitor.kept().items()}]


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def figures(rank: int) -> Any:
    return {
        name: (train(name, is_sharded=True, rank=rank, ranks=2), train(name, is_sharded=False)) for name in USUAL[:3]
    }


def sampled(rank: int) -> Any:
    monitor = gr.Monitor(sample=2)
    return train("adamw", is_sharded=True, rank=rank, ranks=2, monitor=monitor)


def layouts(rank: int) -> Any:
    """Uneven shards, of which one is empty, replicas, plain parameters, sizes whose squares are no float64, NaN."""
    mesh = init_device_mesh("cpu", (2,))
    where = {
        "uneven": Shard(0),
        "lone": Shard(0),
        "same": Replicate(),
        "large": Shard(0),
        "small": Shard(0),
        "bad": Shard(0),
    }
    generator = torch.Generator().manual_seed(3)
    values = {name: torch.randn(5, 3, generator=generator, dtype=torch.float64) for name in [*where, "plain"]}
    values["lone"] = values["lone"][:1].clone()
    values["large"] *= 1e200
    values["small"] *= 1e-200
    values["bad"][4, 2] = float("nan")
    found = []
    for is_sharded in (True, False):
        own = {
            n: distribute_tensor(v.clone(), mesh, [where[n]]) if is_sharded and n in where else v.clone()
            for n, v in values.items()
        }
        model = gr.transform(
            Gradients(**own), [gr.on("param:*", Observe(*STATISTICS)), gr.on("state:*", CheckFinite("record"))]
        )
        optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), model, update_ratios=True)
        for p in model.parameters():
            p.grad = (p.detach() * 0.25).clone()
        optimizer.step()
        found.append(dict(model.monitor.latest()))
    return found


def checked(_: int) -> Any:
    """The order of failed checks, of sharded and plain parameters in turn."""
    mesh = init_device_mesh("cpu", (2,))
    bad = torch.full((4, 2), float("nan"))
    own = {"a": distribute_tensor(bad.clone(), mesh, [Shard(0)]), "b": bad.clone()}
    own["c"] = distribute_tensor(bad.clone(), mesh, [Shard(0)])
    model = gr.transform(Gradients(**own), gr.on("param:*", CheckFinite("raise")))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.5), model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    try:
        optimizer.step()
    except gr.NonFiniteError as error:
        return [str(error.site), *map(str, error.others)]
    return []


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("two"), 2)


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)


def without_bits(row: dict[str, float]) -> dict[str, float]:
    """Records that rounding does not change altogether; the order of sums differs between one and two processes."""
    return {k: v for k, v in row.items() if not k.startswith("fingerprint")}


@pytest.mark.parametrize("name", USUAL[:3])
def test_figures_of_fsdp_are_those_of_one_process(of_two: list[dict[str, Any]], name: str) -> None:
    for outcomes in of_two:
        (rows, found, kept), (wanted, nothing, wanted_kept) = outcomes["figures"][name]
        assert [row.keys() for row in rows] == [row.keys() for row in wanted]
        assert any("update_ratio" in key for key in rows[0])
        assert any(key.startswith("norm@state:one.weight.") for key in rows[0])
        for row, whole in zip(rows, wanted, strict=True):
            close(without_bits(row), without_bits(whole))
        close(kept, wanted_kept)
        assert nothing == []
        sums, largest = (sum("all_reduce" in one and how in one for one in found) for how in (" sum", " max"))
        assert (sums, largest, len(found)) == (
            2,
            1,
            3,
        )  # of the figures, and of the ratios; whatever torch does is none


def test_failed_checks_are_in_the_order_of_the_parameters(of_two: list[dict[str, Any]]) -> None:
    assert [outcomes["checked"] for outcomes in of_two] == [["param:a", "param:b", "param:c"]] * 2


def test_all_ranks_measure_the_same_steps(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        rows, found, _ = outcomes["sampled"]
        assert [any("@param:" in key for key in row) for row in rows] == [True, False, True, False]
        assert [any("update_ratio" in key for key in row) for row in rows] == [True, False, True, False]
        assert found == []


def test_layouts(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        got, wanted = outcomes["layouts"]
        # Fingerprints too: no element is rounded. Moments are combined by powers, which leave the range of float64.
        moments = [f"{name}@param:{p}" for name in ("std", "skewness", "kurtosis") for p in ("large", "small")]
        close(*({k: v for k, v in own.items() if k not in moments} for own in (got, wanted)))
        assert got["norm@param:large"] > 1e199
        ratios = [got[f"update_ratio@gradient:{name}"] for name in ("uneven", "lone", "same", "plain")]
        assert ratios == pytest.approx([0.125] * 4, rel=1e-12)
        assert got["nonfinite@state:bad.momentum_buffer"] == 1.0


if __name__ == "__main__":
    run_parts([figures, sampled, layouts, checked])
