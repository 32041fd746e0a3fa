"""Tensor parallel and sequence parallel: sites are those of the global tensors, numbers those of one process."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import gradrewrite as gr
from gradrewrite.passes import AllReduce, CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue, Keep, Observe

from models.small import Block
from ranks import outcomes_of, run_parts

pytestmark = pytest.mark.sample(6)  # ranks that start and train take a minute

WIDTH, BLOCKS, ROWS, LENGTH, STEPS, RANKS = 8, 2, 3, 4, 20, 2
STATISTICS = (
    *("max_abs", "mean_abs", "norm", "min", "max", "nan", "inf", "nonfinite", "zeros"),
    *("std", "kurtosis", "exponents"),
)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, 2 * WIDTH) for _ in range(BLOCKS))).double()


def inputs(step: int) -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step)).double()


def to_small_norm(g: Tensor) -> Tensor:
    return g * (1e-2 / g.square().sum().sqrt())


POLICY = [
    gr.on("error:0.fc", [Observe(*STATISTICS), ClipByNorm(1e-3)]),
    gr.on("error:*/tanh", ClipByValue(1e-4, log=True)),
    gr.on("error:0.out", [ClipByNorm(1e-3, log=True), Observe("norm")]),
    gr.on("error:1.norm", [ClipByValue(1e-4), Observe(*STATISTICS)]),
    gr.on("error:1.fc", to_small_norm),
    gr.on("activation:*.fc", Observe(*STATISTICS)),
    gr.on("activation:1.out", Observe(*STATISTICS)),
    gr.on("gradient:*.weight", [Observe(*STATISTICS), ClipByNorm(0.1)]),
    gr.on("gradient:1.norm.*", ClipByValue(1e-4)),
    gr.on("gradient:*", ClipByGlobalNorm(0.01)),
]
# Where a layer returns the plain part of this process, only elementwise actions are those of the whole.
PLAIN_POLICY = [
    gr.on("error:*.fc", ClipByValue(1e-4)),
    gr.on("error:0.out", [ClipByNorm(1e-3), Observe("norm")]),
    gr.on("error:1.norm", ClipByNorm(1e-3)),
    gr.on("gradient:*.weight", [Observe(*STATISTICS), ClipByNorm(0.1)]),
    gr.on("gradient:*", ClipByGlobalNorm(0.01)),
]
SKIPPING_POLICY = [gr.on("error:0.fc", ClipByValue(1e-4)), gr.on("gradient:*", CheckFinite("skip")), POLICY[-1]]
SMALL_POLICY = [
    gr.on("error:0.fc", [Observe("max_abs", "mean_abs", "nan"), ClipByNorm(1e-3), to_small_norm]),
    POLICY[-1],
]
COLLECTIVE = re.compile(r"all_gather|all_reduce|reduce_scatter|all_to_all")
MEGATRON: Mapping[str, Any] = {"fc": ColwiseParallel(), "out": RowwiseParallel()}
SEQUENCE: Mapping[str, Any] = {
    "norm": SequenceParallel(),
    "fc": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    "out": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))


def parallelized(model: Any, plan: Mapping[str, Any], mesh: DeviceMesh) -> Any:
    for block in model:
        parallelize_module(block, mesh, dict(plan))
    return model


def full(tensor: Any) -> Any:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def train(model: Any, place: Callable[[Tensor], Tensor] = lambda x: x, bad_step: int = -1) -> dict[str, Any]:
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), model)
    records = []
    for step in range(STEPS):
        x = inputs(step)
        if step == bad_step:
            x[0, 0, 0] = torch.nan  # in the part of the first process
        optimizer.zero_grad()
        full_loss(model(place(x))).backward()
        optimizer.step()
        records.append(model.monitor.latest())
    parameters = {name: full(p).detach().clone() for name, p in model.named_parameters()}
    moments = {n: full(optimizer.state[p]["exp_avg"]).clone() for n, p in model.named_parameters()}
    (graph,) = model.explain().graphs
    sites = {str(s): s.shape for s in graph.sites}
    collectives = [(str(e.site), type(e.action).__name__, list(filter(COLLECTIVE.match, e.nodes))) for e in graph.edits]
    return {
        "parameters": parameters,
        "moments": moments,
        "records": records,
        "skipped": model.monitor.skipped,
        "sites": sites,
        "collectives": collectives,
    }


def full_loss(out: Tensor) -> Tensor:
    return (out.full_tensor() if isinstance(out, DTensor) else out).square().mean()


def sequence_parallel(rank: int) -> Any:
    mesh = tp_mesh()
    model = gr.transform(parallelized(make(), SEQUENCE, mesh), POLICY)
    return train(model, lambda x: distribute_tensor(x, mesh, [Shard(1)]))


def transformed_first(rank: int) -> Any:
    """The rows of the first process are bad in one step."""
    mesh = tp_mesh()
    model = parallelized(gr.transform(make(), SKIPPING_POLICY), SEQUENCE, mesh)
    return train(model, lambda x: distribute_tensor(x, mesh, [Shard(1)]), bad_step=5)


def megatron(rank: int) -> Any:
    return train(gr.transform(parallelized(make(), MEGATRON, tp_mesh()), PLAIN_POLICY))


def compiled(rank: int) -> Any:
    """The gradients of one block by Inductor."""
    mesh = tp_mesh()
    model = gr.transform(parallelized(make()[:1], SEQUENCE, mesh), SMALL_POLICY)
    model.compile()
    full_loss(model(distribute_tensor(inputs(0), mesh, [Shard(1)]))).backward()
    return {n: full(p.grad) for n, p in model.named_parameters()}, model.monitor.latest()


class Uneven(nn.Module):
    """Three columns and one column, which two processes cannot share evenly; one has no part of the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.three, self.one = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.three(x).sum(-1) + self.one(x).sum(-1)


UNEVEN_POLICY = [
    gr.on("error:three", [Observe(*STATISTICS), ClipByNorm(1e-3, log=True)]),
    gr.on("error:one", [ClipByNorm(1e-3), Observe(*STATISTICS)]),
    gr.on("activation:*", Observe(*STATISTICS)),
    gr.on("gradient:*", [Observe(*STATISTICS), ClipByNorm(1e-3), ClipByGlobalNorm(1e-3)]),
]


def gradients_and_records(model: Any, x: Tensor) -> Any:
    full_loss(model(x)).backward()
    return {n: full(p.grad) for n, p in model.named_parameters()}, model.monitor.latest()


def uneven(rank: int) -> Any:
    mesh, model = tp_mesh(), Uneven().double()
    for layer in (model.three, model.one):
        parallelize_module(layer, mesh, ColwiseParallel(use_local_output=False))
    model = gr.transform(model, UNEVEN_POLICY)
    return gradients_and_records(model, distribute_tensor(inputs(0), mesh, [Replicate()]))


def by_value(g: Tensor, value: Tensor) -> Tensor:
    gr.record("largest", value.abs().amax())
    return g * value.square().sum().sqrt()


VALUE_POLICY = [
    gr.on("error:0.fc", [by_value, Keep()]),
    gr.on("gradient:*.fc.weight", [by_value, Keep()]),
]


def with_values(rank: int) -> Any:
    """Functions of the gradient and its value; what is kept."""
    mesh = tp_mesh()
    model = gr.transform(parallelized(make(), SEQUENCE, mesh), VALUE_POLICY)
    found = gradients_and_records(model, distribute_tensor(inputs(0), mesh, [Shard(1)]))
    return (*found, {str(site): tensor for site, tensor in model.monitor.kept().items()})


def with_infinity_in_one(rank: int) -> Any:
    """An infinity in the rows of one process: checks see the global tensor."""
    mesh = tp_mesh()
    x = inputs(0)
    x[0, 0, 0] = torch.inf
    found = {}
    for mode in ("raise", "record"):
        model = gr.transform(
            parallelized(make(), SEQUENCE, mesh),
            gr.on("activation:0.fc", CheckFinite(mode)),
        )
        try:
            full_loss(model(distribute_tensor(x, mesh, [Shard(1)]))).backward()
            found[mode] = str(model.monitor.latest()["nonfinite@activation:0.fc"])
        except gr.NonFiniteError as err:
            found[mode] = str(err)
    return found


CLIP = gr.on("gradient:*", ClipByGlobalNorm(0.01))


def batch_of(rank: int, step: int) -> Tensor:
    return inputs(2 * step + rank)


def with_data_parallel(rank: int) -> Any:
    """Two groups of two processes: sequence parallel in each, gradients averaged over both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reducing = gr.on("gradient:*", AllReduce(mesh.get_group("dp"), bucket_mb=0.001))
    policy = [reducing, gr.on("gradient:*", [CheckFinite("skip"), Observe("norm")]), CLIP]
    model = gr.transform(parallelized(make(), SEQUENCE, mesh["tp"]), policy)
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), model)
    row, norms = mesh.get_local_rank("dp"), []
    for step in range(STEPS):
        x = batch_of(row, step)
        if step == 5 and row == 0:
            x[0, 0, 0] = torch.nan
        optimizer.zero_grad()
        full_loss(model(distribute_tensor(x, mesh["tp"], [Shard(1)]))).backward()
        optimizer.step()
        norms.append(model.monitor.latest()["total_norm@group:default"])
    return *parameters_and_moments(model, optimizer), norms, model.monitor.skipped


def parameters_and_moments(model: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    parameters = {n: full(p).detach().clone() for n, p in model.named_parameters()}
    return parameters, {n: full(optimizer.state[p]["exp_avg"]).clone() for n, p in model.named_parameters()}


def with_parts(rank: int) -> Any:
    """The warnings of a norm clip at the plain part of a process."""
    found = {}
    for name, action in {"norm": ClipByNorm(1e-3), "value": ClipByValue(1e-4), "seen": Observe("norm")}.items():
        model = gr.transform(parallelized(make(), MEGATRON, tp_mesh()), gr.on("error:0.fc", action))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(inputs(0)).sum().backward()
        found[name] = [str(w.message) for w in caught if issubclass(w.category, gr.RewriteWarning)]
    return found


PARTS = [
    sequence_parallel, transformed_first, megatron, compiled, uneven, with_values, with_infinity_in_one,
    with_parts,
]  # fmt: skip


PARTS_OF_FOUR = [with_data_parallel]


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("four"), 4)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("two"), RANKS)


def assert_same_training(got: dict[str, Any], wanted: dict[str, Any], *, is_plain: bool) -> None:
    assert wanted["sites"].items() <= got["sites"].items() or is_plain
    assert got["skipped"] == wanted["skipped"]
    for name in ("parameters", "moments"):
        for key, tensor in wanted[name].items():
            torch.testing.assert_close(got[name][key], tensor, rtol=0, atol=1e-10)
    for ours, theirs in zip(got["records"], wanted["records"], strict=True):
        assert ours.keys() - {"skipped@optimizer:0"} == theirs.keys() - {"skipped@optimizer:0"}  # of several ranks
        for key, figure in theirs.items():
            if key.partition("@")[2].startswith(("data:", "output:", "outside:")):  # counted in the part of each rank
                continue
            # Shares are float32.
            rel = 1e-6 if key.startswith(("share@", "zeros@")) else 1e-9
            assert ours[key] == pytest.approx(figure, rel=rel, abs=1e-12, nan_ok=True), key


@pytest.mark.parametrize(
    ("part", "policy"),
    [
        ("sequence_parallel", POLICY),
        ("transformed_first", SKIPPING_POLICY),
        ("megatron", PLAIN_POLICY),
    ],
)
def test_training_equals_one_process(of_two: list[dict[str, Any]], part: str, policy: list[Any]) -> None:
    is_skipping = policy is SKIPPING_POLICY
    wanted = train(gr.transform(make(), policy), bad_step=5 if is_skipping else -1)
    assert sum(r["factor@group:default"] < 1 for r in wanted["records"]) == STEPS - is_skipping
    assert wanted["skipped"] == is_skipping
    for outcomes in of_two:
        assert not isinstance(outcomes[part], str), outcomes[part]
        assert_same_training(outcomes[part], wanted, is_plain=part == "megatron")


def assert_same_backward(got: Any, gradients: Mapping[str, Tensor], records: Mapping[str, float]) -> None:
    assert not isinstance(got, str), got
    for name, gradient in gradients.items():
        torch.testing.assert_close(got[0][name], gradient, rtol=0, atol=1e-12)
    assert got[1].keys() == records.keys()
    for key, figure in records.items():
        rel = 1e-6 if key.startswith(("share@", "zeros@")) else 1e-9
        assert got[1][key] == pytest.approx(figure, rel=rel, abs=1e-12, nan_ok=True), key


def test_inductor(of_two: list[dict[str, Any]]) -> None:
    wanted = gradients_and_records(gr.transform(make()[:1], SMALL_POLICY), inputs(0))
    for outcomes in of_two:
        assert_same_backward(outcomes["compiled"], *wanted)


def test_uneven_and_empty_shards(of_two: list[dict[str, Any]]) -> None:
    wanted = gradients_and_records(gr.transform(Uneven().double(), UNEVEN_POLICY), inputs(0))
    assert wanted[1]["factor@error:one"] < 1
    for outcomes in of_two:
        assert_same_backward(outcomes["uneven"], *wanted)


def test_functions_of_values_and_what_is_kept(of_two: list[dict[str, Any]]) -> None:
    model = gr.transform(make(), VALUE_POLICY)
    wanted = gradients_and_records(model, inputs(0))
    for outcomes in of_two:
        assert_same_backward(outcomes["with_values"], *wanted)
        for site, tensor in model.monitor.kept().items():
            torch.testing.assert_close(outcomes["with_values"][2][str(site)], tensor, rtol=0, atol=1e-12)


def test_data_parallel_and_tensor_parallel(of_four: list[dict[str, Any]]) -> None:
    model = gr.transform(make(), [gr.on("gradient:*", [CheckFinite("skip"), Observe("norm")]), CLIP])
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), model)
    norms = []
    for step in range(STEPS):
        x = torch.cat([batch_of(row, step) for row in range(2)])
        if step == 5:
            x[0, 0, 0] = torch.nan
        optimizer.zero_grad()
        full_loss(model(x)).backward()
        optimizer.step()
        norms.append(model.monitor.latest()["total_norm@group:default"])
    assert model.monitor.skipped == 1
    for outcomes in of_four:
        assert not isinstance(outcomes["with_data_parallel"], str), outcomes["with_data_parallel"]
        parameters, moments, found, skipped = outcomes["with_data_parallel"]
        assert skipped == 1
        assert found == pytest.approx(norms, rel=1e-10, nan_ok=True)
        for name, p in model.named_parameters():
            torch.testing.assert_close(parameters[name], p.detach(), rtol=0, atol=1e-10)
            torch.testing.assert_close(moments[name], optimizer.state[p]["exp_avg"], rtol=0, atol=1e-10)


def test_one_collective_for_each_action(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        edits = outcomes["sequence_parallel"]["collectives"]
        assert any(len(found) == 1 for _, _, found in edits)
        for site, action, found in edits:
            if action != "ClipByGlobalNorm":
                is_logged_norm = site == "error:0.out" and action == "ClipByNorm"  # the norm, and what the line says
                assert len(found) <= 1 + is_logged_norm, (site, action, found)
        grouped = [name for _, action, found in edits if action == "ClipByGlobalNorm" for name in found]
        # One gather for all shards, and a sum for each gradient that is a partial sum: those of the layer norms.
        assert sorted(name[: len("all_gather")] for name in grouped) == ["all_gather"] + ["all_reduce"] * 2 * BLOCKS


def test_checks_see_the_global_tensor(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        found = outcomes["with_infinity_in_one"]
        assert found["record"] == str(float(2 * WIDTH))  # one position of one row
        assert "activation:0.fc" in found["raise"]


def test_parts_are_warned_of(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        found = outcomes["with_parts"]
        assert found["value"] == []
        for name in ("norm", "seen"):
            (warning,) = found[name]
            assert "error:0.fc" in warning
            assert "use_local_output=False" in warning


if __name__ == "__main__":
    run_parts(PARTS, PARTS_OF_FOUR)
