"""Figures of four ranks and eight micro-batches are those of one process with the whole batch."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.passes import AllReduce, CheckFinite, ClipByNorm, Observe

from ranks import outcomes_of, run_parts

pytestmark = pytest.mark.sample(6)  # ranks that start and train take a minute

RANKS, PARTS, ROWS = 4, 8, 3
STATISTICS = (
    *("max_abs", "mean_abs", "norm", "min", "max", "nan", "inf", "nonfinite", "zeros"),
    *("std", "kurtosis", "exponents", "fingerprint"),
)


class Net(nn.Module):
    """The sum of a loss over rows; ``hidden`` is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = checkpoint(lambda h: self.hidden(h).tanh(), x, use_reentrant=False)
        return self.last(x).square().sum()


POLICY = [
    gr.on("activation:*", Observe(*STATISTICS)),
    gr.on("error:*", [Observe(*STATISTICS), CheckFinite("record")]),
    gr.on("gradient:last.bias", ClipByNorm(1e9)),
]


def make(policy: Any = POLICY, **options: Any) -> gr.RewrittenModule:
    torch.manual_seed(0)
    return gr.transform(Net().double(), policy, **options)


def rows(rank: int, part: int) -> Tensor:
    """Micro-batches of unequal size."""
    number = ROWS + (rank + part) % 3
    return torch.randn(number, 4, generator=torch.Generator().manual_seed(10 * rank + part)).double()


class Reductions:
    """Counts all-reduces of the block by their operation, and the bytes of each."""

    def __enter__(self) -> Reductions:
        self.found: list[tuple[str, int]] = []
        inner = distributed.all_reduce

        def counting(tensor: Tensor, op: Any = distributed.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
            self.found.append((str(op).rpartition(".")[2], tensor.nbytes))
            return inner(tensor, op, *args, **kwargs)

        self._patch = mock.patch.object(distributed, "all_reduce", counting)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def accumulated(rank: int) -> Any:
    model = make(dynamic=True)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.0), model)
    called = DistributedDataParallel(model)
    found = []
    for _ in range(2):
        for part in range(PARTS):
            with called.no_sync():
                called(rows(rank, part)).backward()
        with Reductions() as counted:
            found.append(model.monitor.reduce(per="step"))
        optimizer.step()
        optimizer.zero_grad()
    history = model.monitor.history("norm@error:hidden", per="step")
    return found, counted.found, history


def lacking(rank: int) -> Any:
    """One rank has records that the others lack, in the second step."""
    found = []
    model = make([gr.on("error:last", Observe("norm", "max"))])
    other = make([gr.on("error:*", Observe("norm", "max"))], monitor=model.monitor)
    for step in range(3):
        own = other if step == 1 and rank == 2 else model
        own(rows(rank, 0)).backward()
        with Reductions() as counted:
            found.append((model.monitor.reduce(), model.monitor.latest(), [op for op, _ in counted.found]))
    return found


def sampled(rank: int) -> Any:
    """Statistics of global tensors are collectives: all ranks measure in the same steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    mesh = init_device_mesh("cpu", (RANKS,))
    parallelize_module(net, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})
    policy = [gr.on("error:0", Observe("norm", "max_abs")), gr.on("step:*", Observe("norm"))]
    model = gr.transform(net, policy, monitor=gr.Monitor(sample=3))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model, update_ratios=False)
    found = []
    for step in range(6):
        if step == 4:
            model.monitor.sample_next()
        for part in range(2):
            model(torch.full((2, 4), 1.0 + step + part)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({key: value for key, value in model.monitor.latest().items() if "norm@" in key})
    return found


def averaged(rank: int) -> Any:
    """What all ranks have counts once: over all of them, over one, and over the micro-batches of one."""
    model = make([gr.on("gradient:*", [AllReduce(), Observe("norm", "nan", "std")])])
    model(rows(rank, 0)).backward()
    own = distributed.new_group([rank], use_local_synchronization=True)
    latest, history = model.monitor.latest(), model.monitor.history("norm@gradient:first.weight", per="step")
    return latest, model.monitor.reduce(), model.monitor.reduce(process_group=own), history


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("four"), RANKS)


def test_figures_are_those_of_the_whole_batch(of_four: list[dict[str, Any]]) -> None:
    model = make()
    model(torch.cat([rows(rank, part) for rank in range(RANKS) for part in range(PARTS)])).backward()
    wanted = {key: value for key, value in model.monitor.latest().items() if not key.startswith("fingerprint")}
    for outcomes in of_four:
        assert not isinstance(outcomes["accumulated"], str), outcomes["accumulated"]
        found, _, _ = outcomes["accumulated"]
        for step in found:
            for key, value in wanted.items():
                if "@gradient:" in key or key.endswith("@run"):
                    continue
                assert step[key] == pytest.approx(value, rel=1e-12, abs=1e-12, nan_ok=True), key


def test_fingerprints_are_those_of_the_parts(of_four: list[dict[str, Any]]) -> None:
    """In one process the whole is rounded otherwise; two equal steps have the same."""
    for outcomes in of_four:
        first, second = outcomes["accumulated"][0]
        names = [key for key in first if key.startswith("fingerprint")]
        assert "fingerprint_0@error:hidden" in names, names
        assert [first[key] for key in names] == [second[key] for key in names]


def test_one_sum_and_one_maximum(of_four: list[dict[str, Any]]) -> None:
    (counts,) = {tuple(outcomes["accumulated"][1]) for outcomes in of_four}
    assert [op for op, _ in counts] == ["SUM", "SUM", "MAX"]  # the first for the means of the moments


def test_history_of_a_step_is_that_of_its_micro_batches(of_four: list[dict[str, Any]]) -> None:
    for rank, outcomes in enumerate(of_four):
        model = make()
        model(torch.cat([rows(rank, part) for part in range(PARTS)])).backward()
        wanted = model.monitor.latest()["norm@error:hidden"]
        assert outcomes["accumulated"][2] == pytest.approx([wanted, wanted], rel=1e-12)


def test_records_that_a_rank_lacks(of_four: list[dict[str, Any]]) -> None:
    for step in range(3):
        latest = [outcomes["lacking"][step][1] for outcomes in of_four]
        for outcomes in of_four:
            found, _, operations = outcomes["lacking"][step]
            assert found.keys() == {key for own in latest for key in own}
            for key in ("norm@error:last", "norm@error:hidden"):
                squares = [own[key] ** 2 for own in latest if key in own]
                assert (key in found) == bool(squares)
                assert not squares or found[key] == pytest.approx(sum(squares) ** 0.5, rel=1e-12)
            # In the second step rank 2 has others, and all agree again.
            assert Counter(operations) == {"SUM": 1 + (step == 1), "MAX": 1}


def test_ranks_measure_in_the_same_steps(of_four: list[dict[str, Any]]) -> None:
    for outcomes in of_four:
        found = outcomes["sampled"]
        assert not isinstance(found, str), found
        assert [bool(row) for row in found] == [True, False, False, True, True, False]
        assert {"norm@error:0", "norm@step:0.weight"} <= found[0].keys()
        assert found == of_four[0]["sampled"]


def test_what_all_ranks_have_counts_once(of_four: list[dict[str, Any]]) -> None:
    for outcomes in of_four:
        assert not isinstance(outcomes["averaged"], str), outcomes["averaged"]
        latest, of_all, of_one, (history,) = outcomes["averaged"]
        known = [key for key in latest if "@gradient:" in key]
        for found in (of_all, of_one):
            assert {key: found[key] for key in known} == pytest.approx({key: latest[key] for key in known}, rel=1e-12)
        assert history == pytest.approx(latest["norm@gradient:first.weight"], rel=1e-12)


if __name__ == "__main__":
    run_parts([accumulated, lacking, sampled, averaged])
