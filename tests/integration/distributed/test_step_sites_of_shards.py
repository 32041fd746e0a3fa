"""Step sites of gradients that are spread over device meshes: figures are those of the whole gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gradrewrite as gr
from gradrewrite.passes import (
    L2,
    CheckFinite,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    DecayWeights,
    Keep,
    Observe,
    ZClip,
)

from models.small import Gradients
from ranks import outcomes_of, run_parts

pytestmark = pytest.mark.sample(6)  # ranks that start and train take a minute

SHAPES = {"a": (5, 4), "b": (7,), "c": (6, 6), "d": (3, 8), "e": (2, 2), "f": (1, 3), "g": (4,)}


def values(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator, dtype=dtype) for n, shape in SHAPES.items()}


def layouts() -> dict[str, tuple[Any, list[Any]] | None]:
    """Data parallelism over all ranks, expert parallelism over pairs of them, both, and none."""
    all_of_them = init_device_mesh("cpu", (4,))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    return {
        "a": (all_of_them, [Shard(0)]),  # 5 rows: 2, 2, 1 and none
        "b": (all_of_them, [Replicate()]),
        "c": (both, [Replicate(), Shard(1)]),
        "d": (both, [Shard(0), Shard(1)]),
        "e": (both["ep"], [Shard(0)]),
        "f": (all_of_them, [Shard(0)]),  # three ranks have nothing of it
        "g": None,
    }


def spread(whole: Tensor, layout: tuple[Any, list[Any]] | None) -> Tensor:
    return whole.clone() if layout is None else distribute_tensor(whole.clone(), *layout)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(policy: Any, gradients: dict[str, Tensor], where: Any, **settings: Any) -> tuple[Any, ...]:
    """One step with these gradients: parameters, records, and the number of all-reduces."""
    model = gr.transform(
        Gradients(**{n: spread(v, where[n]) for n, v in values(0, gradients["a"].dtype).items()}), policy
    )
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1.0), model, **settings)
    for name, p in model.named_parameters():
        p.grad = spread(gradients[name], where[name])
    with Collectives() as counted:
        optimizer.step()
    found = {n: full(p.detach()) for n, p in model.named_parameters()}
    return found, {n: full(p.grad) for n, p in model.named_parameters()}, model.monitor.latest(), counted


class Collectives(torch.utils._python_dispatch.TorchDispatchMode):
    """Names and bytes of the collectives of the block; tracing runs outside of modes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "c10d" in name and "wait" not in name:
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            self.found.append((name, tensor.nbytes))
        return func(*args, **(kwargs or {}))


POLICY = [
    gr.on(
        "step:*",
        [
            ClipByValue(1.5),
            CheckFinite("record"),
            Observe("norm", "max_abs", "mean_abs", "min", "zeros", "kurtosis", "exponents", "fingerprint"),
        ],
    ),
    gr.on("step:*", L2(0.1)),
    gr.on("step:*", ClipByGlobalNorm(1.0)),
    gr.on("step:*", DecayWeights(0.01)),
]


def many_figures(rank: int) -> Any:
    where = layouts()
    spread_found = step(POLICY, values(1), where)
    whole = step(POLICY, values(1), dict.fromkeys(SHAPES))
    return [*spread_found[:3], spread_found[3].found], [*whole[:3], whole[3].found]


def of_order(rank: int) -> Any:
    where = layouts()
    found = {}
    for order in (1.0, 2.0, 3.0, float("inf")):
        policy = gr.on("step:*", ClipByGlobalNorm(0.5, norm_type=order, log=True))
        found[order] = [step(policy, values(1), way)[1:3] for way in (where, dict.fromkeys(SHAPES))]
    return found


def large(rank: int) -> Any:
    """Squares of float64 numbers would be infinite, or 0."""
    where = layouts()
    policy = gr.on("step:*", ClipByGlobalNorm(float("inf")))
    return [
        step(policy, {n: v * unit for n, v in values(1).items()}, where)[2]["total_norm@step:group:default"]
        for unit in (1e200, 1e-200, 1.0)
    ]


def one_collective(rank: int) -> Any:
    """All meshes but one have the same ranks."""
    where = {**layouts(), "e": None}
    policy = gr.on("step:*", [ClipByGlobalNorm(1.0), CheckFinite("skip")])
    model = gr.transform(Gradients(**{n: spread(v, where[n]) for n, v in values(0).items()}), policy)
    graph = model.trace_step(torch.optim.SGD(model.parameters(), lr=1.0))
    shapes = {site.name: site.shape for site in graph.sites}
    return step(policy, values(1), where)[3].found, graph.code.count("_c10d_functional.all_reduce"), shapes


def extremes(rank: int) -> Any:
    """One sum and one maximum; NaN in the part of one rank makes the extremes of its gradient NaN on all."""
    gradients = values(1)
    gradients["a"].view(-1)[-1] = float("nan")
    policy = gr.on("step:*", Observe("max_abs", "min", "max", "norm", "zeros"))
    where = {**layouts(), "e": None}
    _, _, records, counted = step(policy, gradients, where)
    return counted.found, records, step(policy, gradients, dict.fromkeys(SHAPES))[2]


def bad_on_one(rank: int) -> Any:
    where = layouts()
    gradients = values(1)
    model = gr.transform(
        Gradients(**{n: spread(v, where[n]) for n, v in values(0).items()}), gr.on("step:*", CheckFinite("skip"))
    )
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=1.0), model)
    for name, p in model.named_parameters():
        p.grad = spread(gradients[name], where[name])
    if rank == 2:
        model.a.grad.to_local()[0, 0] = float("nan")
    optimizer.step()
    moved = [not torch.equal(full(p.detach()), v) for p, v in zip(model.parameters(), values(0).values(), strict=True)]
    return any(moved), model.monitor.skipped, model.monitor.latest()["nonfinite@step:a"]


def partial(rank: int) -> Any:
    where = layouts()
    mesh = where["a"][0]
    policy = gr.on("step:*", ClipByGlobalNorm(0.5))
    model = gr.transform(Gradients(**{n: spread(v, where[n]) for n, v in values(0).items()}), policy)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1.0), model)
    for name, p in model.named_parameters():
        p.grad = spread(values(1)[name], where[name])
    model.b.grad = DTensor.from_local(values(1)["b"] * (rank + 1) / 10, mesh, [Partial("sum")])
    optimizer.step()
    return full(model.b.grad), model.monitor.latest()["total_norm@step:group:default"]


def missing_on_one(rank: int) -> Any:
    """Rank 3 has no gradients at all, rank 0 lacks one; the others' are clipped by the norm of all that there is."""
    where = layouts()
    policy = gr.on("step:*", [Observe("min", "max_abs"), ClipByGlobalNorm(0.5)])
    model = gr.transform(Gradients(**{n: spread(v, where[n]) for n, v in values(0).items()}), policy)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1.0), model)
    for name, p in model.named_parameters():
        gradient = spread(values(1)[name], where[name])
        if name in ("a", "f") and rank != 3 and (name, rank) != ("f", 0):
            p.grad = gradient
    optimizer.step()
    return model.monitor.latest()


def missing_members(rank: int) -> Any:
    """Rank 0 lacks one gradient of a group, that of a set of ranks of its own or one that has a share."""
    where = layouts()
    found = {}
    for name, log in (("a", True), ("e", False)):
        policy = gr.on("step:*", ClipByGlobalNorm(0.5, log=log))
        model = gr.transform(Gradients(**{n: spread(v.float(), where[n]) for n, v in values(0).items()}), policy)
        optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for member in (name, "f"):
            gradient = spread(values(1)[member].float(), where[member])
            if (member, rank) != (name, 0):
                model.get_parameter(member).grad = gradient
        optimizer.step()
        found[name] = model.monitor.latest()
    return found


def unfrozen(rank: int) -> Any:
    """A gradient that rank 0 never has is one of the group from the second step on."""
    where = layouts()
    model = gr.transform(
        Gradients(**{n: spread(v, where[n]) for n, v in values(0).items()}), gr.on("step:*", ClipByGlobalNorm(0.5))
    )
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1.0), model)
    totals = []
    for is_frozen in (True, False):
        model.d.requires_grad_(not is_frozen)
        for name in ("a", "d"):
            gradient = spread(values(1)[name], where[name])
            if name == "a" or (not is_frozen and rank):
                model.get_parameter(name).grad = gradient
        optimizer.step()
        totals.append(model.monitor.latest()["total_norm@step:group:default"])
    return totals


def smaller_group(rank: int) -> Any:
    """The ranks that are to agree are fewer than those that have parts of a bad gradient."""
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    where = layouts()
    model = gr.transform(
        Gradients(**{n: spread(v, where[n]) for n, v in values(0).items()}), gr.on("step:*", CheckFinite("skip"))
    )
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1.0), model, process_group=groups[rank % 2])
    model.a.grad = spread(values(1)["a"], where["a"])
    if rank == 1:
        model.a.grad.to_local()[0, 0] = float("nan")
    optimizer.step()
    return torch.equal(full(model.a.detach()), values(0)["a"])


def answered_twice(rank: int) -> Any:
    clip = ClipByGlobalNorm(0.5)
    ways = (layouts(), dict.fromkeys(SHAPES))
    return [step([gr.on("step:*", clip), gr.on("step:a", clip)], values(1), way)[2] for way in ways]


def sets_of_ranks(rank: int) -> Any:
    """A graph of ranks that have no group is shown on one rank; sets that overlap are no group."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("x", "y", "z"))
    model = gr.transform(nn.Linear(2, 2, bias=False), gr.on("step:*", ClipByGlobalNorm(0.5)))
    model.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh["y", "z"], [Replicate(), Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    shown = model.trace_step(optimizer).code.count("all_reduce") if rank == 0 else 1
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    ways = {n: (both[name], [Shard(0)]) for n, name in (("a", "dp"), ("c", "ep"))}
    try:
        step(gr.on("step:*", ClipByGlobalNorm(0.5)), values(1), {**dict.fromkeys(SHAPES), **ways})
    except ValueError as err:
        return shown, str(err)
    return shown, ""


def fused(rank: int) -> Any:
    """The factor goes through the kernel of a fused optimizer, with DTensors of several meshes."""
    where = {n: layout for n, layout in layouts().items() if layout is not None}
    found = []
    for way in (where, dict.fromkeys(where)):
        parts = {n: spread(values(0)[n], way[n]) for n in way}
        parts["g"] = values(0)["g"]
        model = gr.transform(
            Gradients(**{n: t.float() for n, t in parts.items()}), gr.on("step:*", ClipByGlobalNorm(0.5))
        )
        own = [p for n, p in model.named_parameters() if n != "g"]
        optimizer = gr.guard(torch.optim.AdamW(own, lr=0.1, fused=True), model)
        for name in way:
            model.get_parameter(name).grad = spread(values(1)[name].float(), way[name])
        optimizer.step()
        found.append(({n: full(model.get_parameter(n).detach()) for n in way}, model.monitor.latest()))
    return found


def mixed_in_a_group(rank: int) -> Any:
    where = layouts()
    model = gr.transform(Gradients(**{n: spread(v, where[n]) for n, v in values(0).items()}), [])
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), model)
    optimizer.step()


def follow(g: Tensor) -> Tensor:
    calls.set(calls.value + 1)
    return g / calls.value


calls = gr.State()


def refused(rank: int) -> Any:
    where = layouts()
    texts = {}
    actions = {
        "norm": ClipByNorm(1.0),
        "log": ClipByValue(1.0, log=True),
        "mean": lambda g: g - g.mean(),
        "positions": lambda g: g * torch.arange(g.shape[-1], dtype=g.dtype),
        "shape": lambda g: g / g.numel(),
        "elementwise": lambda g: torch.where(g.abs() > 1, g.sign(), g * 0.5),
        "state": follow,
        "two": [ClipByGlobalNorm(1.0), ClipByGlobalNorm(2.0, group="second")],
    }
    for name, action in actions.items():
        try:
            step(gr.on("step:a", action), values(1), where)
            texts[name] = ""
        except gr.PolicyError as err:
            texts[name] = str(err)
    return texts


def kept(rank: int) -> Any:
    where = layouts()
    model = gr.transform(Gradients(**{n: spread(v, where[n]) for n, v in values(0).items()}), gr.on("step:a", Keep()))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1.0), model)
    model.a.grad = spread(values(1)["a"], where["a"])
    optimizer.step()
    ((site, tensor),) = model.monitor.kept().items()
    return site.shape, full(tensor)


def with_states(rank: int) -> Any:
    """Bounds that follow from the norms of former steps, with parts of gradients and with whole ones."""
    found = []
    for where in (layouts(), dict.fromkeys(SHAPES)):
        given = values(0).items()
        policy = gr.on("step:*", ZClip(0.5, warmup=2))
        model = gr.transform(Gradients(**{n: spread(v, where[n]) for n, v in given}), policy)
        optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for number in range(5):
            for name, p in model.named_parameters():
                p.grad = spread(values(1)[name] * 3.0**number, where[name])
            optimizer.step()
        parameters = {n: full(p.detach()) for n, p in model.named_parameters()}
        found.append((parameters, model.monitor.latest(), gr.state_dict(model)["states"]))
    return found


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("four"), 4)


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_figures_and_gradients_are_those_of_whole_gradients(of_four: list[dict[str, Any]]) -> None:
    for outcomes in of_four:
        (parameters, gradients, records, _), (*wanted, counted) = outcomes["many_figures"]
        close(parameters, wanted[0])
        close(gradients, wanted[1])
        assert records.keys() - wanted[2].keys() == {"skipped@optimizer:0"}
        close({n: records[n] for n in wanted[2]}, wanted[2])
        assert counted == []


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_norms_of_any_order_and_shares_of_members(of_four: list[dict[str, Any]], order: float) -> None:
    for outcomes in of_four:
        (gradients, records), (wanted, wanted_records) = outcomes["of_order"][order]
        close(gradients, wanted)
        close({n: records[n] for n in wanted_records}, wanted_records)
    assert f"norm_share@step:{'a'}" in wanted_records


def test_bounds_from_former_norms_are_those_of_whole_gradients(of_four: list[dict[str, Any]]) -> None:
    for outcomes in of_four:
        assert not isinstance(outcomes["with_states"], str), outcomes["with_states"]
        (parameters, records, states), (wanted, wanted_records, wanted_states) = outcomes["with_states"]
        assert wanted_records["factor@step:group:default"] < 1
        close(parameters, wanted)
        close(states, wanted_states)
        close({n: records[n] for n in wanted_records}, wanted_records)
        close(states, of_four[0]["with_states"][0][2])  # on all ranks
    (texts,) = {str(outcomes["refused"]["state"]) for outcomes in of_four}
    assert "what it remembers would be that of the part of one rank" in texts


def test_norms_neither_overflow_nor_vanish(of_four: list[dict[str, Any]]) -> None:
    wanted = torch.cat([v.flatten() for v in values(1).values()]).norm().item()
    for outcomes in of_four:
        close([norm / unit for norm, unit in zip(outcomes["large"], (1e200, 1e-200, 1.0), strict=True)], [wanted] * 3)


def test_one_small_all_reduce_a_step(of_four: list[dict[str, Any]]) -> None:
    for outcomes in of_four:
        ((name, size),), in_code, shapes = outcomes["one_collective"]
        assert in_code == 1
        assert shapes == SHAPES
        assert "all_reduce" in name
        # Two verdicts, three parts of the norm, and the counts of five sharded gradients.
        assert size == 8 * (2 + 3 + 5)


def test_extremes_take_one_maximum(of_four: list[dict[str, Any]]) -> None:
    for outcomes in of_four:
        found, records, wanted = outcomes["extremes"]
        close({n: records[n] for n in wanted}, wanted)
        assert sum(value != value for value in wanted.values()) == 4  # no norm and no extreme of ``a`` is a number
        assert all("all_reduce" in name for name, _ in found)
        # Of five sharded gradients three extremes; two verdicts, and of each three counts of NaN, a norm and a share.
        assert [size for _, size in found] == [8 * 5 * 3, 8 * (2 + 5 * (3 + 3 + 1))]


def test_a_failed_check_of_a_part_skips_everywhere(of_four: list[dict[str, Any]]) -> None:
    assert [outcomes["bad_on_one"] for outcomes in of_four] == [(False, 1, 1.0)] * 4


def test_partial_gradients_are_reduced_first(of_four: list[dict[str, Any]]) -> None:
    whole = values(1)
    norm = torch.cat([v.flatten() for v in whole.values()]).norm()  # 1/10 + ... + 4/10 = 1
    for outcomes in of_four:
        gradient, total = outcomes["partial"]
        close(total, norm.item())
        close(gradient, whole["b"] * (0.5 / norm))


def test_ranks_may_lack_gradients(of_four: list[dict[str, Any]]) -> None:
    chunks = values(1)["a"].chunk(4)  # rank 3 has none of the 5 rows
    wanted = torch.cat(chunks).norm().item()
    for outcomes in of_four[1:3]:
        records = outcomes["missing_on_one"]
        close(records["total_norm@step:group:default"], wanted)
        close(records["min@step:a"], values(1)["a"].min().item())
    assert "min@step:a" in of_four[0]["missing_on_one"]
    assert "min@step:f" not in of_four[0]["missing_on_one"]
    assert "min@step:a" not in of_four[3]["missing_on_one"]


def test_ranks_that_lack_gradients_use_the_norm_of_all(of_four: list[dict[str, Any]]) -> None:
    a, e, f = (values(1)[name].float() for name in "aef")
    wanted = torch.cat([a[2:].flatten(), f.flatten()]).norm().item()  # two rows are those of rank 0
    totals = [outcomes["missing_members"]["a"]["total_norm@step:group:default"] for outcomes in of_four]
    assert totals == [pytest.approx(wanted, rel=1e-6)] * 4
    assert len(set(totals)) == 1
    shares = of_four[0]["missing_members"]["a"]
    assert shares["norm_share@step:a"] + shares["norm_share@step:f"] == pytest.approx(1.0)
    pairs = [outcomes["missing_members"]["e"]["total_norm@step:group:default"] for outcomes in of_four]
    assert pairs[0] == pairs[1] == pytest.approx(torch.cat([e[1:].flatten(), f.flatten()]).norm().item(), rel=1e-6)
    assert pairs[2] == pairs[3] == pytest.approx(torch.cat([e.flatten(), f.flatten()]).norm().item(), rel=1e-6)


def test_a_parameter_that_is_unfrozen_is_exchanged(of_four: list[dict[str, Any]]) -> None:
    a, d = (values(1)[name] for name in "ad")
    d[:2, :4] = 0.0  # the part of rank 0
    wanted = [a.norm().item(), math.hypot(a.norm().item(), d.norm().item())]
    for outcomes in of_four:
        close(outcomes["unfrozen"], wanted)


def test_a_bad_gradient_skips_on_all_that_have_parts_of_it(of_four: list[dict[str, Any]]) -> None:
    assert [outcomes["smaller_group"] for outcomes in of_four] == [True] * 4


def test_a_gradient_counts_once_in_its_group(of_four: list[dict[str, Any]]) -> None:
    for outcomes in of_four:
        found, wanted = outcomes["answered_twice"]
        close(found["total_norm@step:group:default"], wanted["total_norm@step:group:default"])


def test_sets_of_ranks(of_four: list[dict[str, Any]]) -> None:
    for outcomes in of_four:
        assert not isinstance(outcomes["sets_of_ranks"], str), outcomes["sets_of_ranks"]
        shown, text = outcomes["sets_of_ranks"]
        assert shown >= 1
        assert "process_group=" in text


def test_fused_optimizers(of_four: list[dict[str, Any]]) -> None:
    for outcomes in of_four:
        (parameters, records), (wanted, wanted_records) = outcomes["fused"]
        torch.testing.assert_close(parameters, wanted)
        torch.testing.assert_close({n: records[n] for n in wanted_records}, wanted_records)
        assert "TypeError: param group 0 of AdamW has DTensors and plain tensors" in outcomes["mixed_in_a_group"]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("norm", "ClipByNorm(1.0) acts on a gradient that is spread over 4 ranks"),
        ("log", "its records would be those of the part of one rank"),
        ("mean", "is not elementwise"),
        ("positions", "makes a tensor of the size of the gradient"),
        ("shape", "it depends on the shape of the gradient"),
        ("elementwise", ""),
        ("two", "its gradients are in a later group too"),
    ],
)
def test_what_would_be_another_action_on_a_part_is_refused(of_four: list[dict[str, Any]], part: str, text: str) -> None:
    for outcomes in of_four:
        got = outcomes["refused"][part]
        assert text in got
        assert bool(text) == bool(got)


def test_kept_gradients_are_whole(of_four: list[dict[str, Any]]) -> None:
    for outcomes in of_four:
        shape, tensor = outcomes["kept"]
        assert shape == SHAPES["a"]
        close(tensor, values(1)["a"])


def test_what_torch_does(of_four: list[dict[str, Any]]) -> None:
    """``get_total_norm`` takes no tensors of several meshes."""
    for outcomes in of_four:
        assert outcomes["by_torch"].startswith("RuntimeError")


def by_torch(rank: int) -> Any:
    where = layouts()
    return torch.nn.utils.get_total_norm([spread(v, where[n]) for n, v in values(1).items()])


if __name__ == "__main__":
    run_parts([
        many_figures, of_order, large, one_collective, extremes, bad_on_one, partial, missing_on_one, missing_members,
        unfrozen, smaller_group, answered_twice, sets_of_ranks, fused, mixed_in_a_group,
        refused, kept, by_torch, with_states,
    ])  # fmt: skip
