"""Memory: objects of a deleted model are freed; torch.compiler.reset() is not needed."""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.guards import CheckFunctionManager

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByNorm, ClipByValue, Keep, Observe, Scale

from helpers import mostly_slow

pytestmark = pytest.mark.filterwarnings("ignore::gradrewrite.RewriteWarning")


class Net(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.name = nn.Identity()
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        h = self.name(self.fc(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return h.relu()


class Asked:
    """A policy that has a tensor and can be referred to weakly."""

    def __init__(self) -> None:
        self.threshold = torch.tensor(1.0)

    def __call__(self, site: gr.Site) -> Any:
        if site.kind == "error" and site.matches("fc"):
            return [ClipByNorm(self.threshold), Keep(), CheckFinite("record")]
        return None


def alive(refs: dict[str, weakref.ref[Any]]) -> list[str]:
    gc.collect()
    return [name for name, ref in refs.items() if ref() is not None]


def refs_of(policy: Asked, monitor: gr.Monitor, model: nn.Module, batch: Tensor) -> dict[str, weakref.ref[Any]]:
    named = {"policy": policy, "threshold": policy.threshold, "monitor": monitor, "batch": batch, "model": model}
    named["kept"] = next(iter(monitor.kept().values()))
    return {name: weakref.ref(value) for name, value in named.items()}


def nothing(model: gr.RewrittenModule, batch: Tensor) -> None:
    return None


def change_hooks(model: gr.RewrittenModule, batch: Tensor) -> None:
    model.original.fc.register_forward_hook(lambda *_: None)
    model(batch).sum().backward()


def locate(model: gr.RewrittenModule, batch: Tensor) -> None:
    assert gr.locate(model, batch) is None


def trace(model: gr.RewrittenModule, batch: Tensor) -> None:
    assert model.trace(batch).edits


def change_shape(model: gr.RewrittenModule, batch: Tensor) -> None:
    model(torch.ones(5, 3)).sum().backward()
    model(batch).sum().backward()


@pytest.mark.long
@pytest.mark.parametrize("fullgraph", mostly_slow([True, False]))
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.inductor)])
@pytest.mark.parametrize("use", mostly_slow([nothing, change_hooks, locate, trace, change_shape], 2))
def test_deleted_model_leaves_nothing(
    fullgraph: bool, compiled: bool, use: Callable[[gr.RewrittenModule, Tensor], None]
) -> None:
    def run() -> dict[str, weakref.ref[Any]]:
        policy, batch = Asked(), torch.ones(2, 3)
        breaks = not fullgraph and use not in (locate, trace)
        model = gr.transform(Net(breaks=breaks), policy, fullgraph=fullgraph)
        if compiled:
            model.compile()
        optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model(batch).sum().backward()
        optimizer.step()
        use(model, batch)
        return refs_of(policy, model.monitor, model.original, batch)

    assert alive(run()) == []


@pytest.mark.slow
def test_model_that_lives_is_not_touched_when_another_of_its_class_is_deleted() -> None:
    kept = gr.transform(Net(breaks=True), gr.on("error:fc", ClipByValue(0.5)), fullgraph=False)
    other = gr.transform(Net(breaks=True), gr.on("error:fc", ClipByValue(0.25)), fullgraph=False)
    batch = torch.ones(1, 3)
    for model in (kept, other):
        nn.init.constant_(model.fc.weight, 1.0)
        model(batch).sum().backward()
    num_graphs = len(kept.explain().graphs)
    del other, model
    gc.collect()
    kept.zero_grad()
    kept(batch).sum().backward()
    assert kept.fc.bias.grad.tolist() == [0.5] * 3
    assert len(kept.explain().graphs) == num_graphs


@pytest.mark.sample(12)
@pytest.mark.slow
def test_thirty_models_of_one_class_in_a_row_with_graph_breaks() -> None:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list, cached_backends

    limit, backends = torch._dynamo.config.recompile_limit, set(cached_backends)
    for number in range(30):
        model = gr.transform(Net(breaks=True), gr.on("error:fc", ClipByValue(0.5)), fullgraph=False)
        model(torch.ones(1, 3)).sum().backward()
        assert [len(graph.edits) for graph in model.explain().graphs].count(1) == 1, number
        del model
        gc.collect()
        assert len(_debug_get_cache_entry_list(Net.forward)) <= 1
    assert torch._dynamo.config.recompile_limit == limit
    assert [b for b in cached_backends.values() if b is not None and id(b) not in backends] == []


def guards() -> int:
    gc.collect()
    return sum(type(known) is CheckFunctionManager for known in gc.get_objects())


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.slow
def test_deleted_model_leaves_no_guards(fullgraph: bool) -> None:
    def run() -> None:
        model = gr.transform(Net(breaks=not fullgraph), gr.on("error:fc", ClipByValue(0.5)), fullgraph=fullgraph)
        for size in (2, 3):
            model(torch.ones(size, 3)).sum().backward()
        assert guards() > before

    before = guards()
    run()
    assert guards() == before


@pytest.mark.slow
def test_guards_of_a_model_that_lives_stay() -> None:
    kept = gr.transform(Net(), gr.on("error:fc", ClipByValue(0.5)))
    kept(torch.ones(2, 3)).sum().backward()
    before = guards()
    other = gr.transform(Net(), gr.on("error:fc", ClipByValue(0.5)))
    other(torch.ones(2, 3)).sum().backward()
    del other
    assert guards() == before


@pytest.mark.slow
def test_many_living_models_of_one_class_with_graph_breaks() -> None:
    models = []
    for _ in range(10):
        models.append(gr.transform(Net(breaks=True), gr.on("error:fc", ClipByValue(0.5)), fullgraph=False))
        models[-1](torch.ones(1, 3)).sum().backward()
        assert sum(len(graph.edits) for graph in models[-1].explain().graphs) == 1


@pytest.mark.slow
def test_hooks_changed_many_times_with_graph_breaks() -> None:
    model = gr.transform(Net(breaks=True), gr.on("error:fc", ClipByValue(0.5)), fullgraph=False)
    for number in range(12):
        model.original.fc.register_forward_hook(lambda *_: None)
        model(torch.ones(1, 3)).sum().backward()
        assert sum(len(graph.edits) for graph in model.explain().graphs) == 1, number


@pytest.mark.inductor
@pytest.mark.parametrize("by_name", [False, True])
def test_backend_leaves_nothing_when_its_function_and_modules_are_gone(by_name: bool) -> None:
    from gradrewrite.backends.backend import _registered

    def run() -> dict[str, weakref.ref[Any]]:
        policy, batch, monitor, model = Asked(), torch.ones(2, 3), gr.Monitor(), Net()
        if by_name:
            options = {"policy": policy, "monitor": monitor}
            step = torch.compile(model, backend="gradrewrite", options=options)
        else:
            step = torch.compile(model, backend=gr.backend(policy, monitor=monitor))
        gc.collect()
        for _ in range(2):
            step(batch).sum().backward()
            assert monitor.latest()["norm@error:fc"] > 0
        return refs_of(policy, monitor, model, batch)

    before = len(_registered)
    assert alive(run()) == []
    assert len(_registered) == before


def test_locate_leaves_no_exit_callback() -> None:
    gr.locate(nn.Linear(2, 1), torch.ones(1, 2))
    before = atexit._ncallbacks()
    gr.locate(nn.Linear(2, 1), torch.ones(1, 2))
    model = gr.transform(nn.Linear(2, 1), gr.on("gradient:*", Observe("norm")))
    model(torch.ones(1, 2)).sum().backward()
    assert atexit._ncallbacks() == before


@pytest.mark.sample(12)
@pytest.mark.inductor
def test_backend_keeps_its_policy_for_one_model_after_another() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum()

    compiled = torch.compile(step, backend=gr.backend(gr.on("gradient:*", Scale(2.0))))
    for _ in range(12):  # more than torch's recompile limit
        model = nn.Linear(3, 1)
        compiled(model, torch.ones(2, 3)).backward()
        assert float(model.bias.grad) == 4.0
        del model
        gc.collect()


@pytest.mark.long
def test_records_of_a_deleted_model_are_in_its_file(tmp_path: Path) -> None:
    model = gr.transform(nn.Linear(3, 1), gr.on("gradient:*", Observe("norm")))
    model.monitor.to_jsonl(tmp_path / "run.jsonl")
    for _ in range(5):
        model(torch.ones(2, 3)).sum().backward()
    del model
    gc.collect()

    assert len(gr.read_jsonl(tmp_path / "run.jsonl")) == 5


class Chain(nn.Module):
    """Two blocks that can be regions, the second of which is given what the first computed; or with a graph break."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.blocks[1](x)


def num_elements() -> int:
    """Elements of all tensors that are alive."""
    gc.collect()
    return sum(t.numel() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter))


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ["raise", "record", "skip"])
@pytest.mark.parametrize("breaks", [False, True], ids=["regions", "graph break"])
def test_checked_parts_of_deleted_models_leave_no_tensors(breaks: bool, on_failure: Any) -> None:
    """The inputs of a part, which a replay needs, were computed by the part before."""

    def run() -> list[weakref.ref[Tensor]]:
        split: dict[str, Any] = {"fullgraph": False} if breaks else {"regions": "blocks.*"}
        model = gr.transform(Chain(breaks=breaks), gr.on("error:*", CheckFinite(on_failure)), **split)
        optimizer = gr.guard(torch.optim.AdamW(model.parameters()), model)
        for _ in range(2):
            model(torch.ones(4, 32)).sum().backward()
            optimizer.step()
        return [weakref.ref(p) for p in model.parameters()]

    sizes = []
    for _ in range(8):
        refs = run()
        sizes.append(num_elements())
        assert [ref for ref in refs if ref() is not None] == []
    assert sizes[-1] <= sizes[1]


@pytest.mark.sample(12)
@pytest.mark.slow
@pytest.mark.parametrize("scheduled", [False, True])
def test_optimizers_of_one_model_in_a_row_leave_nothing(scheduled: bool) -> None:
    model = gr.transform(Chain(breaks=False), gr.on("step:*", [CheckFinite("skip"), Observe("norm")]))
    sizes = []
    for _ in range(8):
        optimizer = gr.guard(torch.optim.AdamW(model.parameters()), model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduled else None
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del optimizer, scheduler
        sizes.append(num_elements())
    assert sizes[-1] - sizes[1] < 100  # records; the moments of one optimizer have 4224 elements
