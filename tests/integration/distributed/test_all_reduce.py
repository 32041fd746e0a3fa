"""AllReduce in the joint graph: equal to one process with the full batch, begun early, agreed between processes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr
from gradrewrite.passes import AllReduce, CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue, Observe
from gradrewrite.viz import draw

from ranks import outcomes_of, run_parts

pytestmark = pytest.mark.sample(6)  # ranks that start and train take a minute

WIDTH, LAYERS, ROWS, STEPS, RANKS = 16, 4, 6, 20, 2
MAX_NORM = 0.05
SMALL = 0.003  # megabytes of a bucket: about one layer of float64
CLIP = gr.on("gradient:*", ClipByGlobalNorm(MAX_NORM))


class Net(nn.Module):
    """Layers with a parameter that is used nowhere, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() * self.scale
        return x


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def full_batch(step: int) -> Tensor:
    return torch.randn(RANKS * ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).double()


def own(x: Tensor, rank: int) -> Tensor:
    number = torch.distributed.get_world_size() if torch.distributed.is_initialized() else RANKS
    return x.chunk(number)[rank]


def reducing(*policy: Any, **options: Any) -> list[Any]:
    return [gr.on("gradient:*", AllReduce(**options)), *policy]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    momenta = [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
    return {"parameters": [p.detach().clone() for p in model.parameters()], "momenta": momenta}


def train(model: Any, rank: int | None, bad_step: int = -1) -> dict[str, Any]:
    """Train for some steps; on the rows of one process, or on all."""
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    norms = []
    for step in range(STEPS):
        x = full_batch(step)
        if step == bad_step:
            x[0, 0] = torch.inf  # a row of rank 0
        optimizer.zero_grad()
        model(x if rank is None else own(x, rank)).square().mean().backward()
        optimizer.step()
        norms.append(model.monitor.latest()["total_norm@group:default"])
    return {**state_of(model, optimizer), "norms": norms, "skipped": model.monitor.skipped}


POLICIES: Mapping[str, list[Any]] = {
    "one_bucket": reducing(CLIP),
    "skipping_alone": [gr.on("gradient:*", [CheckFinite("skip"), AllReduce(bucket_mb=SMALL)]), CLIP],
    "skipping": reducing(gr.on("gradient:*", CheckFinite("skip")), CLIP, bucket_mb=SMALL),
}


def trained_with(name: str, rank: int) -> dict[str, Any]:
    return train(gr.transform(make(), POLICIES[name]), rank, bad_step=7 if name.startswith("skipping") else -1)


def trained(rank: int) -> Any:
    return {name: trained_with(name, rank) for name in POLICIES}


def trained_by_four(rank: int) -> Any:
    return {"skipping": trained_with("skipping", rank)}


def gradients_by_name(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def order_of_actions(rank: int) -> Any:
    """A clip before the average acts on the gradient of the process, one behind it on the average."""
    found = {}
    for name, answers in {
        "before": [ClipByNorm(MAX_NORM), AllReduce(bucket_mb=SMALL)],
        "behind": [AllReduce(bucket_mb=SMALL), ClipByNorm(MAX_NORM), Observe("norm")],
        "both": [ClipByValue(1e-3), AllReduce(), ClipByNorm(MAX_NORM)],
    }.items():
        model = gr.transform(make(), gr.on("gradient:*", answers))
        model(own(full_batch(0), rank)).square().mean().backward()
        found[name] = gradients_by_name(model)
    return found


def accumulated(rank: int) -> Any:
    """Two backwards before a step."""
    model = gr.transform(make(), reducing(bucket_mb=SMALL))
    for step in range(2):
        model(own(full_batch(step), rank)).square().mean().backward()
    return gradients_by_name(model)


def with_dynamic_sizes(rank: int) -> Any:
    model = gr.transform(make(), reducing(CLIP, bucket_mb=SMALL), dynamic=True)
    found = []
    for rows in (ROWS, ROWS - 1, ROWS - 2):
        model.zero_grad()
        model(own(full_batch(0), rank)[:rows]).square().mean().backward()
        found.append(gradients_by_name(model))
    return found


class Mixed(nn.Module):
    """Parameters of several dtypes, shapes and strides, one without elements."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(1)

        def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=made).to(dtype))

        self.of_half = parameter(4, 3, dtype=torch.bfloat16)
        self.of_single = parameter(3, 4, dtype=torch.float32)
        self.of_complex = parameter(2, 3, dtype=torch.complex64)
        self.of_transposed = nn.Parameter(parameter(3, 5, dtype=torch.float32).detach().t())
        self.of_empty = parameter(0, 3, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        parts = [
            self.of_half.float().flatten(),
            self.of_single.flatten(),
            torch.view_as_real(self.of_complex).flatten(),
        ]
        parts += [self.of_transposed.sin().flatten(), self.of_empty.flatten()]
        return (torch.cat(parts) * x).square().sum()


def factor_of(rank: int) -> float:
    return float(2 * rank + 1)


def mixed_dtypes(rank: int) -> Any:
    found = {}
    for name, x in (("own", factor_of(rank)), ("other", factor_of(1 - rank))):
        plain = Mixed()
        plain(torch.tensor(x)).backward()
        found[name] = gradients_by_name(plain)
    model = gr.transform(Mixed(), gr.on("gradient:*", AllReduce()))
    code = model.trace(torch.tensor(factor_of(rank))).code
    model(torch.tensor(factor_of(rank))).backward()
    found["averaged"] = gradients_by_name(model)
    found["collectives"] = code.count("all_reduce.default(")
    return found


def is_right_behind(collective: torch.fx.Node, graph: gr.JointGraph) -> bool:
    """Whether there is nothing between a collective and the last of its gradients but what flattens these."""
    inserted = {name for edit in graph.edits for name in edit.nodes}
    node, read = collective, set(collective.all_input_nodes)
    while node.prev.name in inserted:
        node = node.prev
        read.update(node.all_input_nodes)
    return node.prev in read


def seen_in_the_graph(rank: int) -> Any:
    model = gr.transform(make(), reducing(CLIP, bucket_mb=SMALL))
    graph = model.trace(own(full_batch(0), rank))
    nodes = list(graph.graph_module.graph.nodes)
    letters = {"all_reduce": "A", "wait_tensor": "W", "mm": "m"}
    calls = [n for n in nodes if isinstance(n.target, torch._ops.OpOverload)]
    schedule = "".join(letters.get(n.target._opname, "") for n in calls)
    with tempfile.TemporaryDirectory() as folder:
        drawing = Path(draw(graph).render(Path(folder, "backward"))).read_text()
    sent = [n.args[0].meta["val"].nbytes for n in calls if n.target._opname == "all_reduce"]
    return {
        "schedule": schedule,
        "text": str(graph),
        "edits": [(str(e.site), type(e.action).__name__, e.nodes) for e in graph.edits],
        "before": str(graph.before),
        "sent": sent,
        "is_right_behind": [is_right_behind(n, graph) for n in calls if n.target._opname == "all_reduce"],
        "drawing": drawing,
    }


def schedule_of(code: str) -> str:
    """The order of products (m), collectives (A) and waits (W) in the code of a compiled backward."""
    found = ""
    for line in code[code.index("def call") :].splitlines():
        if "torch.ops._c10d_functional.all_reduce" in line:
            found += "A"
        elif "torch.ops._c10d_functional.wait_tensor" in line:
            found += "W"
        elif re.search(r"extern_kernels\.(add)?mm", line):
            found += "m"
    return found


def compiled(rank: int) -> Any:
    """Inductor's code, on a second transform too: in one process its cache has the graph by then."""
    found = {}
    for name in ("first", "again"):
        model = gr.transform(make(), reducing(CLIP, bucket_mb=SMALL))
        model.compile()
        _, codes = run_and_get_code(lambda: model(own(full_batch(0), rank)).square().mean().backward())  # noqa: B023
        found[name] = gradients_by_name(model), [schedule_of(code) for code in codes], model.monitor.latest()
    return found


def inside_of_ddp(rank: int) -> Any:
    model = DistributedDataParallel(gr.transform(make(), reducing()), find_unused_parameters=True)
    model(own(full_batch(0), rank))


def clip_under_ddp(rank: int) -> Any:
    DistributedDataParallel(gr.transform(make(), CLIP), find_unused_parameters=True)(own(full_batch(0), rank))


def inside_of_fsdp(rank: int) -> Any:
    """Shards of averages: FSDP2 averages equal gradients once more."""
    model = gr.transform(make(), reducing(CLIP))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, ignored_params={model.scale})
    model(own(full_batch(0), rank)).square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}


def in_a_group_of_one(rank: int) -> Any:
    alone = [torch.distributed.new_group([n]) for n in range(RANKS)][rank]
    model = gr.transform(make(), reducing(process_group=alone))
    graph = model.trace(own(full_batch(0), rank))
    model(own(full_batch(0), rank)).square().mean().backward()
    return gradients_by_name(model), graph.code == graph.before.code


def failed_check(rank: int) -> Any:
    """The check behind the average fails in both processes, the one before it in one; either is replayed alone."""
    found = {}
    for name, answers in {
        "behind": [AllReduce(), CheckFinite("raise")],
        "before": [CheckFinite("raise"), AllReduce()],
    }.items():
        model = gr.transform(make(), gr.on("gradient:*", answers))
        x = own(full_batch(0), rank)
        x[0, 0] = torch.inf if rank == 0 else 1.0
        try:
            model(x).square().mean().backward()
        except gr.NonFiniteError as err:
            found[name] = str(err)
    return found


def bad_on_rank_0(model: Any, rank: int, **options: Any) -> dict[str, Any]:
    """Two steps; in the second one the loss of rank 0 is infinite."""
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
    for step in range(2):
        optimizer.zero_grad()
        out = full(model(own(full_batch(step), 0)))
        (out * (torch.inf if (rank, step) == (0, 1) else 1.0)).square().mean().backward()
        optimizer.step()
    parameters = {name: full(p).detach().clone() for name, p in model.named_parameters()}
    return {"skipped": model.monitor.skipped, "parameters": parameters}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def in_groups_of_two(rank: int) -> Any:
    """Ranks 0 and 2 are one group, 1 and 3 the other: models of their own, or halves of one (tensor parallel)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reducing = AllReduce(mesh.get_group("dp"))

    def parallel(*policy: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return gr.transform(model, [*policy])

    before = gr.on("error:*1", CheckFinite("skip")), gr.on("gradient:*", reducing)
    behind = gr.on("gradient:*", [reducing, CheckFinite("skip")])
    found = {"plain": bad_on_rank_0(gr.transform(make(), [*before]), rank)}
    found["behind"] = bad_on_rank_0(parallel(behind), rank)
    found["given"] = bad_on_rank_0(parallel(*before), rank, process_group=torch.distributed.group.WORLD)
    try:
        bad_on_rank_0(parallel(*before), rank)
    except gr.PolicyError as err:
        found["refused"] = {"text": str(err)}
    return found


def of_regions(rank: int) -> Any:
    """Each region averages its own gradients; what is outside of all of them is refused."""
    found: dict[str, Any] = {}
    policy = gr.on("gradient:layers.*", AllReduce(bucket_mb=SMALL))
    model = gr.transform(make(), policy, regions="layers.*")
    model(own(full_batch(0), rank)).square().mean().backward()
    found["averaged"] = gradients_by_name(model)
    try:
        gr.transform(make(), reducing(), regions="layers.*")(own(full_batch(0), rank))
    except gr.PolicyError as err:
        found["refused"] = str(err)
    return found


PARTS = [
    trained, order_of_actions, accumulated, with_dynamic_sizes, mixed_dtypes, seen_in_the_graph, compiled,
    inside_of_ddp, clip_under_ddp, inside_of_fsdp, in_a_group_of_one, failed_check, of_regions,
]  # fmt: skip


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("two"), RANKS)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("four"), 4)


def clip_all(gradients: Mapping[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients.values()]))
    return {name: g * min(1.0, max_norm / norm.item()) for name, g in gradients.items()}


def plain_gradients(x: Tensor) -> dict[str, Tensor]:
    model = make()
    model(x).square().mean().backward()
    return gradients_by_name(model)


def assert_close(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, g in got.items():
        torch.testing.assert_close(g, wanted[name], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", POLICIES)
def test_training_equals_one_process(of_two: list[dict[str, Any]], name: str) -> None:
    assert_equal_to_one_process([outcomes["trained"] for outcomes in of_two], name)


def test_training_by_four_equals_one_process(of_four: list[dict[str, Any]]) -> None:
    assert_equal_to_one_process([outcomes["trained_by_four"] for outcomes in of_four], "skipping")


def assert_equal_to_one_process(of_all: list[Any], name: str) -> None:
    policy = [gr.on("gradient:*", CheckFinite("skip")), CLIP] if name.startswith("skipping") else CLIP
    wanted = train(gr.transform(make(), policy), None, bad_step=7 if name.startswith("skipping") else -1)
    assert sum(n > MAX_NORM for n in wanted["norms"]) > STEPS // 2
    for outcomes in of_all:
        got = outcomes[name]
        assert got["skipped"] == wanted["skipped"] == name.startswith("skipping")
        for a, b in zip(got["parameters"], wanted["parameters"], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        for a, b in zip(got["momenta"], wanted["momenta"], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        assert got["norms"] == pytest.approx(wanted["norms"], rel=1e-12, nan_ok=True)
    first, *others = (outcomes[name]["parameters"] for outcomes in of_all)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_order_of_actions(of_two: list[dict[str, Any]]) -> None:
    def clipped(g: Tensor) -> Tensor:
        return g * min(1.0, MAX_NORM / g.norm().item())

    def averaged(*of_ranks: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.stack([g[name] for g in of_ranks]).mean(0) for name in of_ranks[0]}

    both = [plain_gradients(own(full_batch(0), rank)) for rank in range(RANKS)]
    wanted = {
        "before": averaged(*({name: clipped(g) for name, g in one.items()} for one in both)),
        "behind": {name: clipped(g) for name, g in averaged(*both).items()},
        "both": {
            name: clipped(g)
            for name, g in averaged(*({n: g.clamp(-1e-3, 1e-3) for n, g in one.items()} for one in both)).items()
        },
    }
    assert not torch.allclose(wanted["before"]["layers.3.weight"], wanted["behind"]["layers.3.weight"])
    for outcomes in of_two:
        for name, gradients in wanted.items():
            assert_close(outcomes["order_of_actions"][name], gradients)


def test_gradients_accumulate(of_two: list[dict[str, Any]]) -> None:
    parts = [plain_gradients(full_batch(step)) for step in range(2)]
    for outcomes in of_two:
        assert_close(outcomes["accumulated"], {name: parts[0][name] + parts[1][name] for name in parts[0]})


def test_dynamic_sizes(of_two: list[dict[str, Any]]) -> None:
    x = full_batch(0)
    for outcomes in of_two:
        for rows, got in zip((ROWS, ROWS - 1, ROWS - 2), outcomes["with_dynamic_sizes"], strict=True):
            rows_of_all = torch.cat([own(x, rank)[:rows] for rank in range(RANKS)])
            assert_close(got, clip_all(plain_gradients(rows_of_all), MAX_NORM))


def test_dtypes_have_buckets_of_their_own(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        found = outcomes["mixed_dtypes"]
        assert found["collectives"] == 3  # bfloat16, float32, complex64
        for name, got in found["averaged"].items():
            wanted = (found["own"][name] + found["other"][name]) / 2
            assert got.dtype == wanted.dtype
            torch.testing.assert_close(got, wanted)


def test_collectives_begin_behind_their_gradients(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        found = outcomes["seen_in_the_graph"]
        backward = found["schedule"]
        assert found["is_right_behind"] == [True] * LAYERS
        assert backward.index("A") < backward.rindex("m"), backward
        assert re.fullmatch(r"[mA]+AW+", backward), backward
        assert backward.count("A") == backward.count("W") == LAYERS
        used = [p for name, p in make().named_parameters() if name != "unused"]
        assert sum(found["sent"]) == sum(p.nbytes for p in used)  # each gradient once, and nothing else
        assert all(size <= SMALL * 2**20 for size in found["sent"])
        reducing_edits = [nodes for _, action, nodes in found["edits"] if action == "AllReduce"]
        assert len(reducing_edits) == 2 * LAYERS + 1
        named = [name for nodes in reducing_edits for name in nodes if name.startswith("all_reduce")]
        assert len(named) == LAYERS
        for name in named:
            assert name in found["text"]
        assert "all_reduce.default(" not in found["before"]
        assert found["drawing"].count("AllReduce(bucket_mb=0.003)") >= 2 * LAYERS + 1
        assert all(name in found["drawing"] for name in named)


def test_inductor_keeps_the_order(of_two: list[dict[str, Any]]) -> None:
    plain = plain_gradients(full_batch(0))
    wanted = clip_all(plain, MAX_NORM)
    for outcomes in of_two:
        for gradients, schedules, records in outcomes["compiled"].values():
            assert_close(gradients, wanted)
            total = torch.linalg.vector_norm(torch.cat([g.flatten() for g in plain.values()]))
            assert records["total_norm@group:default"] == pytest.approx(total.item(), rel=1e-12)
            if schedules:  # none where the code came from Inductor's cache
                last = schedules[-1]
                assert last.index("A") < last.rindex("m"), last
                assert re.fullmatch(r"[mA]+W[mW]*", last), last


@pytest.mark.parametrize(
    ("part", "texts"),
    [
        ("inside_of_ddp", ["PolicyError", "AllReduce", "averaged twice", "DistributedDataParallel"]),
        ("clip_under_ddp", ["PolicyError", "step:*", "gr.guard(optimizer, model)", "AllReduce()"]),
    ],
)
def test_what_is_refused(of_two: list[dict[str, Any]], part: str, texts: list[str]) -> None:
    for outcomes in of_two:
        assert all(text in outcomes[part] for text in texts), outcomes[part]


def test_shards_of_averages(of_two: list[dict[str, Any]]) -> None:
    wanted = clip_all(plain_gradients(full_batch(0)), MAX_NORM)
    for outcomes in of_two:
        got = outcomes["inside_of_fsdp"]
        assert not isinstance(got, str), got
        assert_close(got, wanted)


def test_group_of_one_process_is_inert(of_two: list[dict[str, Any]]) -> None:
    for rank, outcomes in enumerate(of_two):
        gradients, is_unchanged = outcomes["in_a_group_of_one"]
        assert is_unchanged
        assert_close(gradients, plain_gradients(own(full_batch(0), rank)))


def test_failed_checks(of_two: list[dict[str, Any]]) -> None:
    first, second = (outcomes["failed_check"] for outcomes in of_two)
    assert first.keys() == {"behind", "before"}
    assert second.keys() == {"behind"}
    assert "the input x was not finite already" in first["before"]
    assert "the input x was not finite already" in first["behind"]
    assert "it came from another process" in second["behind"]


def test_a_group_skips_together(of_four: list[dict[str, Any]]) -> None:
    found = [outcomes["in_groups_of_two"] for outcomes in of_four]
    for name, skipped in {"plain": [1, 0, 1, 0], "behind": [1] * 4, "given": [1] * 4}.items():
        assert [one[name]["skipped"] for one in found] == skipped
        for one, other in ((0, 2), (1, 3)):
            pairs = zip(*(found[n][name]["parameters"].values() for n in (one, other)), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


def test_ranks_of_a_skip_are_needed(of_four: list[dict[str, Any]]) -> None:
    for outcomes in of_four:
        text = outcomes["in_groups_of_two"]["refused"]["text"]
        assert "error:1" in text
        assert "gr.guard(optimizer, model, process_group=" in text


def test_regions_average_their_own_gradients(of_two: list[dict[str, Any]]) -> None:
    wanted = plain_gradients(full_batch(0))
    for rank, outcomes in enumerate(of_two):
        found = outcomes["of_regions"]
        apart = plain_gradients(own(full_batch(0), rank))
        assert_close(found["averaged"], {n: (wanted if n.startswith("layers") else apart)[n] for n in wanted})
        assert "'scale' too, which is used outside of all regions" in found["refused"]
        assert 'gr.on("step:*"' not in found["refused"]  # where it is refused, too
        assert "DistributedDataParallel(gr.transform(model, policy, regions=...))" in found["refused"]


def test_process_group_is_needed(tmp_path: Path) -> None:
    model = gr.transform(make(), reducing())
    with pytest.raises(gr.PolicyError, match="init_process_group"):
        model.trace(full_batch(0))


if __name__ == "__main__":
    run_parts(PARTS, [trained_by_four, in_groups_of_two])
