"""Regions: the same sites, records and gradients as in the whole model, with code that equal regions share."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.backends.model_state import state_of
from gradrewrite.backends.regions import Regions
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue, Observe, Scale

from helpers import gradients_of

SIZE = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(SIZE), nn.Linear(SIZE, 9), nn.Linear(9, SIZE)
        self.negates = False

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = self.out(self.fc(self.norm(x)).tanh()) * scale
        return x - y if self.negates else x + y


class Net(nn.Module):
    def __init__(self, number: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Checkpointed(Net):
    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class CheckpointedReentrant(Net):
    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = Block(), nn.Linear(SIZE, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.cell(x)
        return self.head(x)


def made(cls: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return cls().double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module, x: Tensor, steps: int = 2) -> dict[str, Any]:
    for _ in range(steps):
        model.zero_grad()
        model(x).square().mean().backward()
    return gradients_of(model)


def entries_of(model: nn.Module) -> list[list[str]]:
    """The regions that share each compiled function."""
    state = state_of(model)
    assert state is not None
    assert state.regions is not None
    return [sorted(map(str, entry.users)) for entry in state.regions._entries]


def records_of(model: Any) -> dict[str, float]:
    return {key: value for key, value in model.monitor.latest().items() if not key.endswith("data:x")}


NORM = Observe("norm")
EQUAL = [gr.on("error:blocks.*", [NORM, ClipByValue(1e-3, log=True)]), gr.on("gradient:blocks.*", NORM)]
DIFFERENT = [
    gr.on("error:blocks.*.fc", [Observe("max_abs"), ClipByValue(1e-4)]),
    gr.on("error:blocks.2.out", Scale(0.5)),
    gr.on("error:blocks.?", [ClipByNorm(0.01), CheckFinite("raise")]),
    gr.on("gradient:blocks.*.weight", ClipByNorm(0.02)),
    gr.on("activation:blocks.1/tanh", Observe("saturated")),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "shared"),
    [
        ([], [["blocks.0", "blocks.1", "blocks.2", "blocks.3"]]),
        (EQUAL, [["blocks.0", "blocks.1", "blocks.2", "blocks.3"]]),
        (DIFFERENT, [["blocks.0", "blocks.3"], ["blocks.1"], ["blocks.2"]]),
    ],
)
@pytest.mark.parametrize("cls", [Net, Checkpointed])
def test_gradients_and_records_are_those_of_the_whole_model(
    cls: type[Net], policy: Any, shared: list[list[str]], x: Tensor
) -> None:
    whole, regions = gr.transform(made(), policy), gr.transform(made(cls), policy, regions="blocks.*")
    wanted, got = trained(whole, x), trained(regions, x)

    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert records_of(regions) == records_of(whole)
    assert entries_of(regions) == shared
    sites = {str(site) for graph in whole.explain().graphs for site in graph.sites}
    found = {str(site) for graph in regions.explain().graphs for site in graph.sites}
    assert found == {site for site in sites if "blocks" in site}


@pytest.mark.long
def test_reentrant_checkpoints_are_parts_of_one_backward(x: Tensor) -> None:
    wanted = trained(gr.transform(made(), EQUAL), x)
    model = gr.transform(made(CheckpointedReentrant), EQUAL, regions="blocks.*")
    got = trained(model, x, steps=1)

    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    (step,) = model.monitor.steps()
    norms = [key for key in step.records if key.startswith("norm@error:blocks.") and key.count(".") == 1]
    assert sorted(norms) == [f"norm@error:blocks.{number}" for number in range(4)]


class Halves(Net):
    """Checkpoints inside of checkpoints, and layers beside them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = checkpoint(self.part, 0, x, use_reentrant=True)
        x = checkpoint(self.part, 2, self.blocks[1](x), use_reentrant=True)
        return self.head(self.blocks[3](x))

    def part(self, first: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[first], x.sin(), use_reentrant=True) + x


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # in the inner checkpoint
@pytest.mark.parametrize("kind", ["gradient", "error"])
@pytest.mark.parametrize("net", [Checkpointed, CheckpointedReentrant, Halves])
def test_schedules_in_checkpoints_follow_the_backwards_of_the_user(net: Any, kind: str, x: Tensor) -> None:
    """All layers of a step have one bound, and a backward that fails in between counts no further ones."""
    policy = gr.on(f"{kind}:blocks.*", ClipByNorm(gr.Schedule(lambda step: 1.0 / (step + 1))))
    model = gr.transform(made(net), policy, regions="blocks.*")

    def fail(g: Tensor) -> None:
        raise ArithmeticError

    for step in range(4):
        model.zero_grad()
        loss = model(x).square().sum()
        if step == 2:
            handle = model.embed.weight.register_hook(fail)
            with pytest.raises(ArithmeticError):
                loss.backward()
            handle.remove()
            continue
        loss.backward()
        bounds = {v for key, v in model.monitor.latest().items() if key.startswith("bound@")}
        assert bounds == {1.0 / (step + 1)}
        norms = [p.grad.norm().item() for p in model.blocks.parameters()]
        assert kind == "error" or max(norms) <= 1.0 / (step + 1) + 1e-9
    assert gr.state_dict(model)["step"] == 4
    assert len(model.monitor.steps()) == 3


@pytest.mark.long
def test_a_region_that_is_called_several_times_counts_its_calls(x: Tensor) -> None:
    policy = [
        gr.on("error:cell*", [ClipByNorm(1e-2), Observe("norm")]),
        gr.on("error:cell.fc#1", Scale(0.5)),
        gr.on("error:cell/tanh#2", ClipByValue(1e-6)),
    ]
    whole, regions = gr.transform(made(Recurrent), policy), gr.transform(made(Recurrent), policy, regions="cell")
    wanted, got = trained(whole, x), trained(regions, x)

    assert all(torch.allclose(got[name], wanted[name], rtol=1e-12, atol=0) for name in wanted)
    assert records_of(regions) == pytest.approx(records_of(whole), rel=1e-12)
    assert "norm@error:cell#2" in regions.monitor.latest()


class RecurrentCheckpointed(Recurrent):
    is_reentrant = False
    inside = 1  # calls of the cell in one checkpoint

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(0, 4, self.inside):
            x = checkpoint(self.run if self.inside > 1 else self.cell, x, use_reentrant=self.is_reentrant)
        return self.head(x)

    def run(self, x: Tensor) -> Tensor:
        for _ in range(self.inside):
            x = self.cell(x)
        return x


@pytest.mark.long
@pytest.mark.parametrize("inside", [1, 2])
def test_checkpoints_around_a_region_that_is_called_several_times(inside: int, x: Tensor) -> None:
    whole, regions = (
        gr.transform(made(RecurrentCheckpointed), gr.on("error:cell.fc", [NORM, CheckFinite("raise")]), regions=chosen)
        for chosen in ((), "cell")
    )
    whole.inside = regions.inside = inside
    wanted, got = trained(whole, x), trained(regions, x)
    assert all(torch.allclose(got[name], wanted[name], rtol=1e-12, atol=0) for name in wanted)
    assert records_of(regions) == pytest.approx(records_of(whole), rel=1e-12)
    with torch.no_grad():
        regions.cell.out.weight[0, 0] = float("inf")
    with pytest.raises(gr.NonFiniteError, match=r"parameter cell\.out\.weight was not" if inside == 1 else "cell"):
        regions(x).sum().backward()


@pytest.mark.long
def test_a_checkpoint_runs_the_code_of_its_own_call(x: Tensor) -> None:
    def halve_small(g: Tensor, value: Tensor) -> Tensor:
        return torch.where(value.sin() > 0, g / 2, g)

    policy = [gr.on("error:cell.fc", NORM), gr.on("error:cell.fc#1", halve_small)]
    whole, regions = (gr.transform(made(RecurrentCheckpointed), policy, regions=chosen) for chosen in ((), "cell"))
    wanted, got = trained(whole, x), trained(regions, x)
    assert all(torch.allclose(got[name], wanted[name], rtol=1e-12, atol=0) for name in wanted)
    assert records_of(regions) == pytest.approx(records_of(whole), rel=1e-12)

    regions.inside = 2
    with pytest.raises(gr.NotRewrittenError, match=r"'cell' was called 4 times .* which of these calls"):
        trained(regions, x)


@pytest.mark.long
def test_a_reentrant_checkpoint_around_a_region_that_is_called_several_times_is_refused(x: Tensor) -> None:
    model = gr.transform(made(RecurrentCheckpointed), gr.on("error:cell.fc#1", ClipByNorm(1e-3)), regions="cell")
    model.is_reentrant = True
    y = model(x.requires_grad_()).sum()
    with pytest.raises(gr.NotRewrittenError, match=r"'cell' was called 4 times .*use_reentrant=False"):
        y.backward()
    model.is_reentrant = False
    trained(model, x)


class Shortening(Recurrent):
    """Calls its cell on rows of these numbers."""

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        y = [self.cell(x[:size]) for size in sizes]
        return self.head(torch.cat(y))


def clip_at_call_3(site: gr.Site) -> ClipByNorm | None:
    return ClipByNorm(1e-3) if str(site) == "error:cell.fc#3" else None


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the policy clip_at_call_3 answered None at every site so far")
def test_a_graph_that_is_made_at_a_later_call_is_counted_at_others(x: Tensor) -> None:
    policy = [gr.on("error:cell.*", Observe("norm")), clip_at_call_3]
    whole = gr.transform(made(Shortening), policy, dynamic=False)
    regions = gr.transform(made(Shortening), policy, regions="cell", dynamic=False)
    for sizes in ((5, 4), (4, 4, 4, 4)):
        for model in (whole, regions):
            model.zero_grad()
            model(x, *sizes).square().mean().backward()
        wanted, got = gradients_of(whole), gradients_of(regions)
        assert all(torch.allclose(got[name], wanted[name], rtol=1e-12, atol=0) for name in wanted)
        assert records_of(regions) == pytest.approx(records_of(whole), rel=1e-12)


def test_two_forwards_before_their_backwards_in_any_order(x: Tensor) -> None:
    model = gr.transform(made(), gr.on("error:blocks.*.fc", Observe("max_abs")), regions="blocks.*")
    small, large = model(x).sum(), model(x).sum() * 10
    small.backward()
    first = model.monitor.latest()
    large.backward()

    assert {key: 10 * value for key, value in first.items()} == pytest.approx(dict(model.monitor.latest()))
    assert len(first) == 4


def test_a_failed_check_names_the_region(x: Tensor) -> None:
    model = gr.transform(made(), gr.on("error:*", CheckFinite("raise")), regions="blocks.*")
    model(x).sum().backward()
    with torch.no_grad():
        model.blocks[2].out.weight[0, 0] = float("inf")
    with pytest.raises(gr.NonFiniteError, match=r"activation:blocks\.2\.out.*parameter blocks\.2\.out\.weight was not"):
        model(x).sum().backward()


@pytest.mark.long
def test_a_region_with_another_flag_recompiles_in_the_shared_function(x: Tensor) -> None:
    policy = gr.on("error:blocks.*", [ClipByNorm(0.01), Observe("norm")])
    whole, regions = gr.transform(made(), policy), gr.transform(made(), policy, regions="blocks.*")
    for model in (whole, regions):
        model.blocks[2].negates = True
    wanted, got = trained(whole, x), trained(regions, x)

    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert records_of(regions) == records_of(whole)
    assert len(entries_of(regions)) == 1


@pytest.mark.long
def test_more_kinds_of_regions_than_torch_compiles_for_one_function(x: Tensor) -> None:
    model = gr.transform(made(lambda: Net(6)), EQUAL, regions="blocks.*")
    for number, block in enumerate(model.blocks):
        block.forward = lambda x, scale=1.0, number=number, block=block: Block.forward(block, x, float(number))
    with torch._dynamo.config.patch(recompile_limit=2):
        trained(model, x)
    assert sorted(name for users in entries_of(model) for name in users) == [f"blocks.{n}" for n in range(6)]
    assert len(entries_of(model)) > 1


@pytest.mark.long
def test_regions_of_other_shapes_have_code_of_their_own(x: Tensor) -> None:
    model = made()
    model.blocks[1].fc, model.blocks[1].out = nn.Linear(SIZE, 5).double(), nn.Linear(5, SIZE).double()
    rewritten = gr.transform(model, EQUAL, regions=["blocks.?"])
    trained(rewritten, x)
    assert entries_of(rewritten) == [["blocks.0", "blocks.2", "blocks.3"], ["blocks.1"]]


@pytest.mark.long
def test_a_tensor_function_is_shared_where_it_holds_equal_values(x: Tensor) -> None:
    def policy(factor: Callable[[gr.Site], float]) -> Callable[[gr.Site], Any]:
        def answer(site: gr.Site) -> Any:
            if not site.matches("error:blocks.*.fc"):
                return None
            by = factor(site)
            return lambda g: g / by

        return answer

    shared = gr.transform(made(), policy(lambda site: 2.0), regions="blocks.*")
    own = gr.transform(made(), policy(lambda site: 2.0 + int(site.name.split(".")[1])), regions="blocks.*")
    trained(shared, x)
    trained(own, x)
    assert (len(entries_of(shared)), len(entries_of(own))) == (1, 4)


@pytest.mark.long
def test_the_plain_model_has_no_policy(x: Tensor) -> None:
    plain = made()
    wanted = trained(made(), x)
    rewritten = gr.transform(plain, gr.on("error:blocks.*", Scale(0.0)), regions="blocks.*")
    trained(rewritten, x)
    with pytest.warns(gr.RewriteWarning, match=r"a backward reached blocks\.0"):
        got = trained(plain, x)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert gr.restore(rewritten) is plain
    assert all("_compiled_call_impl" not in vars(m) or m._compiled_call_impl is None for m in plain.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = trained(plain, x)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.long
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_regions_of_their_own(again: Callable[[Any], Any], inplace: bool, x: Tensor) -> None:
    model = gr.transform(made(), EQUAL, regions="blocks.*", inplace=inplace)
    wanted = trained(model, x)
    copied = again(model)
    got = trained(copied, x)

    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert records_of(copied) == records_of(model)
    assert len(copied.explain().graphs) == len(model.explain().graphs) == 4


@pytest.mark.broad
def test_two_policies_on_one_model(x: Tensor) -> None:
    plain = made()
    first = gr.transform(plain, gr.on("error:blocks.0", Scale(2.0)), regions="blocks.*")
    second = gr.transform(plain, gr.on("error:blocks.0", Scale(0.0)), regions="blocks.?")
    halves = trained(first, x)["blocks.0.fc.weight"]
    assert not trained(second, x)["blocks.0.fc.weight"].any()
    assert torch.equal(trained(first, x)["blocks.0.fc.weight"], halves)


class Breaking(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x, scale)


class Split(Block):
    """Has a graph on both sides of a graph break, and counts its calls in between."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = self.fc(self.norm(x)).tanh()
        self.num_calls += 1
        torch._dynamo.graph_break()
        return x + self.out(y) * scale


class SplitNet(Net):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks.extend(Split() for _ in range(3))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the tracer skipped a region")
@pytest.mark.parametrize("rule", [[], [gr.on("error:blocks.2.out", Scale(0.5))]])
def test_regions_with_graph_breaks(rule: Any, x: Tensor) -> None:
    policy = [gr.on("error:blocks.?.*", NORM), *rule]

    def hand_written(block: Split, x: Tensor) -> Tensor:
        y = block.fc(block.norm(x)).tanh()
        block.num_calls += 1
        return x + block.out(y)

    whole = made(SplitNet)
    for block in whole.blocks:
        block.forward = partial(hand_written, block)
    whole = gr.transform(whole, policy)
    regions = gr.transform(made(SplitNet), policy, regions="blocks.*", fullgraph=False)
    wanted, got = trained(whole, x), trained(regions, x)

    assert all(torch.allclose(got[name], wanted[name], rtol=1e-12, atol=0) for name in wanted)
    assert records_of(regions) == pytest.approx(records_of(whole), rel=1e-12)
    assert [int(block.num_calls) for block in regions.blocks] == [2] * 3
    assert {len(users) for users in entries_of(regions)} == {1}


class SplitLater(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = super().forward(x, scale)
        if not self.negates:
            return y
        torch._dynamo.graph_break()
        return y.sigmoid()


@pytest.mark.broad
@pytest.mark.filterwarnings("ignore:the tracer skipped a region", "ignore:the policy .* answered None at every site so")
def test_another_answer_behind_a_graph_break_of_shared_code(x: Tensor) -> None:
    model = made(lambda: Net(2))
    model.blocks = nn.ModuleList(SplitLater() for _ in range(2)).double()

    def policy(site: gr.Site) -> Scale | None:
        return Scale(0.5) if site.matches("error:blocks.1/sigmoid") else None

    model = gr.transform(model, policy, regions="blocks.*", fullgraph=False)
    trained(model, x)
    for block in model.blocks:
        block.negates = True
    with pytest.raises(gr.NotRewrittenError, match=r"a graph break in the region blocks\.1 was reached"):
        trained(model, x)


class Printing(Net):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.broad
def test_the_tracer_has_to_follow_the_regions_alone(x: Tensor) -> None:
    trained(gr.transform(made(Printing), EQUAL, regions="blocks.*"), x)
    broken = made()
    broken.blocks[1] = Breaking().double()
    with pytest.raises(gr.GraphBreakError):
        trained(gr.transform(broken, EQUAL, regions="blocks.*"), x)


def test_what_is_outside_is_listed(x: Tensor) -> None:
    model = gr.transform(made(), EQUAL, regions="blocks.[12]")
    assert model.explain().outside == ("embed", "head", "blocks.0", "blocks.3")
    assert "outside of all regions, without a policy: embed, head" in str(model.explain())
    with pytest.warns(gr.RewriteWarning, match=r"answers at the gradients of blocks\.0.* outside of all regions"):
        trained(model, x)


def test_parameters_are_listed_where_they_are_looked_at(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gr.transform(made(lambda: Net(1)), EQUAL, regions="blocks.*")
    trained(model, x)

    def parameters(self: Regions) -> list[Tensor]:
        raise AssertionError("once is enough")

    monkeypatch.setattr(Regions, "parameters", parameters)
    trained(model, x)


@pytest.mark.broad
@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("gradient:*", "a region and 'embed.weight', which is used outside"),
        ("gradient:blocks.*", "'blocks.0' and 'blocks.1'"),
    ],
)
def test_a_global_clip_over_several_graphs_is_refused(pattern: str, text: str, x: Tensor) -> None:
    model = gr.transform(made(), gr.on(pattern, ClipByGlobalNorm(1.0)), regions="blocks.*")
    for act in (model, model, model.trace):
        with pytest.raises(gr.PolicyError, match=rf'{text}.*gr.on\("step:\*", ClipByGlobalNorm\(1.0\)'):
            act(x)


@pytest.mark.long
def test_a_global_clip_in_one_region(x: Tensor) -> None:
    policy = gr.on("gradient:blocks.1.*", ClipByGlobalNorm(1e-3))
    got = trained(gr.transform(made(), policy, regions="blocks.*"), x)
    wanted = trained(gr.transform(made(), policy), x)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.long
def test_rules_are_checked_on_all_regions_together(x: Tensor) -> None:
    model = gr.transform(made(), [*EQUAL, gr.on("error:blocks.3.fc", NORM)], regions="blocks.*")
    trained(model, x)
    wrong = gr.transform(made(), gr.on("error:embed", ClipByNorm(1.0)), regions="blocks.*")
    with pytest.warns(gr.RewriteWarning, match="'error:embed' matches embed, which made no"):
        trained(wrong, x, steps=1)
    unknown = gr.transform(made(), gr.on("error:blocks.7", ClipByNorm(1.0)), regions="blocks.*")
    with pytest.raises(gr.NoSuchSiteError, match=r"error:blocks\.7"):
        unknown(x)


def test_patterns_that_match_no_module() -> None:
    with pytest.raises(ValueError, match=r"regions: 'block' matches no module with a forward of Net; .*'blocks\.0'"):
        gr.transform(made(), [], regions=["blocks.*", "block"])
    assert entries_of(gr.transform(made(), [], regions="blocks*")) == []  # the list itself has no forward


def test_a_region_that_is_compiled_by_itself(x: Tensor) -> None:
    model = made()
    model.blocks[0].compile(backend="eager")
    with pytest.raises(TypeError, match=r"regions: 'blocks\.0' is compiled already"):
        gr.transform(model, EQUAL, regions="blocks.*")
    other = gr.transform(made(), EQUAL, regions="blocks.*")
    other.blocks[0].compile(backend="eager")
    with pytest.raises(gr.NotRewrittenError, match=r"the region 'blocks\.0' was compiled by itself"):
        other(x)


@pytest.mark.broad
def test_trace_shows_the_regions(x: Tensor) -> None:
    model = gr.transform(made(), gr.on("*", lambda g: g * 2 if g.dim() else None), regions="blocks.*")
    sites = [str(edit.site) for edit in model.trace(x).edits]
    assert "error:blocks.0.fc" in sites
    assert not [site for site in sites if "head" in site or "embed" in site]


@pytest.mark.long
def test_hooks_of_a_region_run(x: Tensor) -> None:
    whole, regions = gr.transform(made(), EQUAL), gr.transform(made(), EQUAL, regions="blocks.*")
    for model in (whole, regions):
        model.blocks[1].register_forward_hook(lambda module, args, out: out * 2)
    wanted, got = trained(whole, x), trained(regions, x)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert records_of(regions) == records_of(whole)


@pytest.mark.long
def test_evaluation_and_other_methods(x: Tensor) -> None:
    model = gr.transform(made(), EQUAL, regions="blocks.*", methods=("run",))
    with torch.no_grad():
        assert torch.equal(model(x), made()(x))
    assert not model.explain().graphs
    model.run(model.blocks[3], x.requires_grad_()).sum().backward()
    assert [graph.region for graph in model.explain().graphs] == ["blocks.3"]


class NestedRegion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(SIZE, SIZE)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).tanh()


@pytest.mark.broad
def test_nested_compile_region_hides_sites() -> None:
    model = gr.transform(nn.Sequential(*(NestedRegion() for _ in range(3))), gr.on("error:*", ClipByNorm(1.0)))
    with pytest.warns(gr.RewriteWarning, match="nested_compile_region hides the inside of ('0', )?'1', '2'"):
        model(torch.ones(2, SIZE))


@pytest.fixture
def compiled() -> Any:
    model = gr.transform(made(), EQUAL, regions="blocks.*")
    model.compile()
    return model


@pytest.mark.inductor
def test_compiled(compiled: Any, x: Tensor) -> None:
    whole = gr.transform(made(), EQUAL)
    wanted, got = trained(whole, x), trained(compiled, x)
    assert all(torch.allclose(got[name], wanted[name], rtol=1e-12, atol=1e-14) for name in wanted)
    assert records_of(compiled) == pytest.approx(records_of(whole), rel=1e-9)
    assert len(entries_of(compiled)) == 1


@pytest.mark.long
def test_what_is_not_used_any_more_is_freed(x: Tensor) -> None:
    plain = made()
    model = gr.transform(plain, EQUAL, regions="blocks.*")
    trained(model, x)
    state = state_of(model)
    assert state is not None
    of_state, of_session, of_block = weakref.ref(state), weakref.ref(state.session), weakref.ref(plain.blocks[0])
    gc.collect()
    gc.disable()
    try:
        del model, state
        assert of_state() is None
    finally:
        gc.enable()
    del plain
    gc.collect()
    assert of_session() is None
    assert of_block() is None


def new_block() -> Block:
    torch.manual_seed(7)
    return Block().double()


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "appended": lambda model: model.blocks.append(new_block()),
    "replaced": lambda model: model.blocks.__setitem__(1, new_block()),
    "layer of a block": lambda model: setattr(model.blocks[1], "fc", nn.Sequential(new_block().fc, nn.Identity())),
    "taken out": lambda model: model.blocks.__delitem__(0),
}


@pytest.mark.broad
@pytest.mark.parametrize("change", CHANGES)
def test_regions_follow_the_modules(change: str, x: Tensor) -> None:
    policy = [gr.on("error:blocks.*", ClipByValue(1e-3)), gr.on("gradient:blocks.*.weight", Scale(0.5))]
    plain, model = made(), gr.transform(made(), policy, regions="blocks.*")
    trained(model, x, 1)
    for one in (plain, model):
        CHANGES[change](one)
    whole = gr.transform(plain, policy)
    for one in (whole, model):
        one.zero_grad()
        one(x).square().sum().backward()

    wanted, got = gradients_of(whole), gradients_of(model)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def test_the_guard_and_rules_follow_the_modules(x: Tensor) -> None:
    model = gr.transform(made(), gr.on("step:blocks.4.*", Scale(0.0)), regions="blocks.*")
    model.blocks.append(new_block())
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(x).square().sum().backward()
    optimizer.step()

    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert {name for name in before if name.startswith("blocks.4.")}.isdisjoint(moved)
    assert any(name.startswith("blocks.3.") for name in moved)


@pytest.mark.broad
def test_a_pattern_without_a_module_is_said_at_the_next_call(x: Tensor) -> None:
    model = gr.transform(made(), gr.on("gradient:blocks.0.*", Scale(0.5)), regions=["blocks.3", "blocks.0"])
    trained(model, x, 1)
    del model.blocks[3]
    with pytest.raises(ValueError, match=r"regions: 'blocks.3' matches no module"):
        model(x)
