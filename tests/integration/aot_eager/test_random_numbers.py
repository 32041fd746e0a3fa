"""Random numbers in tensor functions: distribution, independence, and equality wherever a step is the same."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.numerics import philox
from gradrewrite.passes import CheckFinite, Keep
from gradrewrite.testing import assert_matches_eager

from models.small import CellLoop

COMPILED = [False, pytest.param(True, marks=pytest.mark.inductor)]
COUNT = 1 << 14


class Wide(nn.Module):
    """A parameter of as many elements as numbers are drawn."""

    def __init__(self, *names: str, size: Sequence[int] = (COUNT,), dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: torch.zeros(size, dtype=dtype) for name in names or ("w",)})

    def forward(self) -> Tensor:
        return sum((w.sum() for w in self.weights.values()), torch.zeros(()))


def drawn(
    function: Callable[[Tensor], Tensor], model: nn.Module, *, backwards: int = 1, compiled: bool = False, seed: int = 0
) -> list[dict[str, Tensor]]:
    """Return what a function returns at each gradient, by backward."""
    rewritten = gr.transform(model, gr.on("gradient:*", function), seed=seed)
    if compiled:
        rewritten.compile()
    return [step(rewritten) for _ in range(backwards)]


def step(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(*inputs).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def uniform(g: Tensor) -> Tensor:
    return gr.uniform(g)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0), 0, (0x257A3673, 0xCD26BE2A)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0xAB302C4D, 0x3DC9D239)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
    ],
)
def test_known_answers_of_the_authors(counter: tuple[int, int], key: int, expected: tuple[int, int]) -> None:
    """Random123, ``kat_vectors``, philox2x32 with 7 rounds."""
    assert philox.words(*counter, key) == expected
    first, second, word = (torch.tensor(number) for number in (*counter, key))
    assert tuple(map(int, philox.words(first, second, word))) == expected


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_distributions(dtype: torch.dtype, compiled: bool) -> None:
    def draw(g: Tensor) -> Tensor:
        return torch.stack([gr.uniform(g[0]), gr.normal(g[0]), gr.bernoulli(0.3, g[0])])

    ((found,),) = (each.values() for each in drawn(draw, Wide(size=(3, COUNT), dtype=dtype), compiled=compiled))
    uniforms, normals, ones = found.double()
    digits = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}[dtype]

    assert found.dtype == dtype
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    assert torch.equal(uniforms * 2**digits, (uniforms * 2**digits).floor())
    middles = uniforms + 2.0 ** -(digits + 1)
    assert stats.kstest(middles.numpy(), "uniform").pvalue > 1e-3 or digits < 12
    assert abs(middles.mean() - 0.5) < 4 * math.sqrt(1 / 12 / COUNT)
    assert stats.kstest(normals.numpy(), "norm").pvalue > 1e-3 or digits < 12
    assert abs(normals.mean()) < 4 / math.sqrt(COUNT)
    assert abs(normals.var() - 1) < 4 * math.sqrt(2 / COUNT)
    assert set(ones.tolist()) == {0.0, 1.0}
    assert abs(ones.mean() - 0.3) < 4 * math.sqrt(0.21 / COUNT)


def test_sites_draws_and_backwards_are_independent() -> None:
    def draw(g: Tensor) -> Tensor:
        return torch.stack([gr.normal(g[0]), gr.normal(g[0])])

    found = drawn(draw, Wide("a", "b", size=(2, COUNT)), backwards=3)
    rows = torch.stack([row for each in found for value in each.values() for row in value])
    correlations = torch.corrcoef(torch.cat([rows, rows.roll(1, 1)[:4]])) - torch.eye(16)

    assert correlations.abs().max() < 5 / math.sqrt(COUNT)
    assert stats.kstest(rows.flatten().numpy(), "norm").pvalue > 1e-3


@pytest.mark.inductor
def test_compiled_numbers_equal_those_op_by_op() -> None:
    for function in (
        uniform,
        lambda g: gr.bernoulli(g + 0.5, g),
        lambda g: gr.uniform(g.double(), across="ranks").float(),
    ):
        eager, compiled = (drawn(function, Wide("a", "b"), backwards=2, compiled=is_on) for is_on in (False, True))
        for one, other in zip(eager, compiled, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
    eager, compiled = (drawn(lambda g: gr.normal(g), Wide(), compiled=is_on) for is_on in (False, True))
    torch.testing.assert_close(eager, compiled, rtol=1e-4, atol=1e-6)


def test_seed_decides_and_the_generators_of_torch_do_not_move() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, same, other = (drawn(uniform, Wide(), seed=seed)[0]["weights.w"] for seed in (1, 1, 2))

    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, same)
    assert (one == other).float().mean() < 0.01
    torch.manual_seed(7)
    assert torch.equal(one, drawn(uniform, Wide(), seed=1)[0]["weights.w"])


def test_ranks_draw_equal_numbers_or_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(g: Tensor) -> Tensor:
        return torch.stack([gr.uniform(g[0]), gr.uniform(g[0], across="ranks")])

    found = []
    for rank in (None, 0, 1):  # one process is rank 0
        monkeypatch.setattr("gradrewrite.policy.state_store.this_rank", lambda rank=rank: rank)
        found.append(drawn(draw, Wide(size=(2, COUNT)))[0]["weights.w"])
    alone, first, second = found
    assert torch.equal(alone, first)
    assert torch.equal(first[0], second[0])
    assert torch.corrcoef(torch.stack([first[1], second[1], first[0]])).triu(1).abs().max() < 5 / math.sqrt(COUNT)


def test_a_new_shape_goes_on_with_the_next_numbers() -> None:
    layer = nn.Linear(3, 3)
    model = gr.transform(layer, gr.on("error:/linear", lambda g: g * gr.uniform(g)))
    first, second = (step(model, torch.ones(size, 3))["bias"] for size in (2, 4))
    again = gr.transform(layer, gr.on("error:/linear", lambda g: g * gr.uniform(g)))
    step(again, torch.ones(4, 3))

    assert torch.equal(second, step(again, torch.ones(4, 3))["bias"])
    assert not torch.equal(first, second)


@pytest.mark.parametrize("compiled", COMPILED)
def test_rolled_loops_draw_the_numbers_of_unrolled_ones(compiled: bool) -> None:
    torch.manual_seed(0)
    layer, xs = CellLoop(), [torch.randn(n, 2, 3, dtype=torch.float64) for n in (5, 3, 7, 5)]

    def act(g: Tensor) -> Tensor:
        gr.record("first", gr.uniform(g).flatten()[0])
        return g * gr.bernoulli(0.5, g) + gr.uniform(g)

    found: list[Any] = []
    for loops in ("unrolled", "rolled"):
        model = gr.transform(layer, gr.on("error:cell*", act), loops=loops, dynamic=False, seed=3)
        if compiled:
            model.compile()
        own = [{**step(model, x), **{k: torch.tensor(v) for k, v in model.monitor.latest().items()}} for x in xs]
        found.append((own, gr.state_dict(model)["states"]))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert len({float(v) for k, v in found[0][0][0].items() if k.startswith("first")}) == 5
    assert found[0][1].keys() == found[1][1].keys()
    assert all(torch.equal(found[0][1][key], found[1][1][key]) for key in found[0][1])


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["GRU", "LSTM"])
def test_recurrent_layers(name: str) -> None:
    torch.manual_seed(0)
    layer = getattr(nn, name)(3, 4).double()
    policy = gr.on("error:l0/h", lambda g: g * gr.bernoulli(0.5, g))
    assert_matches_eager(
        layer, policy, torch.randn(5, 2, 3, dtype=torch.float64), loss_fn=lambda o: o[0].sum(), steps=2
    )


@pytest.mark.inductor
def test_oracle_of_eager_autograd_draws_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    policy = [
        gr.on("error:*", lambda g: g * gr.bernoulli(0.7, g) + gr.uniform(g)),
        gr.on("error:*", lambda g: g * gr.uniform(g)),
        gr.on("gradient:*", lambda g, w: g + gr.uniform(w)),
        gr.together("gradient:*.weight", lambda gs: {name: g * gr.uniform(g) for name, g in gs.items()}),
    ]
    assert_matches_eager(model, policy, torch.randn(4, 3, dtype=torch.float64), steps=3)


def test_two_functions_at_a_site_draw_apart() -> None:
    def draw(g: Tensor) -> Tensor:
        gr.record("first", gr.uniform(g)[0])
        return g

    model = gr.transform(Wide(), [gr.on("gradient:*", draw), gr.on("gradient:*", lambda g: draw(g))])
    step(model)
    assert len(set(model.monitor.latest().values())) == 2
    assert list(gr.state_dict(model)["states"]) == [
        "gradient:weights.w/random",
        "gradient:weights.w/random.2",
    ]


def test_checkpointed_layers_draw_the_numbers_of_plain_ones() -> None:
    class Block(nn.Module):
        def __init__(self, *, is_saved: bool) -> None:
            super().__init__()
            self.layer, self.is_saved = nn.Linear(3, 3), is_saved

        def forward(self, x: Tensor) -> Tensor:
            run = lambda y: self.layer(y).tanh()  # noqa: E731
            return run(x) if self.is_saved else checkpoint(run, x, use_reentrant=False)

    torch.manual_seed(0)
    plain, other = Block(is_saved=True), Block(is_saved=False)
    other.load_state_dict(plain.state_dict())
    policy = gr.on("error:layer", lambda g: g * gr.uniform(g))
    found = [step(gr.transform(block, policy), torch.ones(2, 3)) for block in (plain, other)]
    torch.testing.assert_close(*found)


def test_two_forwards_before_two_backwards_draw_in_the_order_of_the_backwards() -> None:
    layer = nn.Linear(2, 1, bias=False)
    model = gr.transform(layer, gr.on("gradient:*", uniform))
    expected = [step(model, torch.ones(1, 2))["weight"] for _ in range(2)]
    model = gr.transform(layer, gr.on("gradient:*", uniform))
    first, second = model(torch.ones(1, 2)), model(torch.zeros(1, 2))
    for output, wanted in zip((second, first), expected, strict=True):
        model.zero_grad()
        output.sum().backward()
        assert torch.equal(layer.weight.grad, wanted)


def test_resumed_training_draws_what_uninterrupted_training_draws() -> None:
    model = gr.transform(Wide("a", "b"), gr.on("gradient:*", uniform), seed=5)
    for _ in range(2):
        step(model)
    saved = copy.deepcopy(gr.state_dict(model))
    expected = [step(model) for _ in range(2)]
    for load_first in (True, False):
        resumed = gr.transform(
            Wide("a", "b"), gr.on("gradient:*", uniform), seed=6
        )  # the state has the seed of its own
        if not load_first:
            step(resumed)
        gr.load_state_dict(resumed, saved)
        for wanted in expected:
            got = step(resumed)
            assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_copies_keep_seed_and_count() -> None:
    model = gr.transform(Wide(), gr.on("gradient:*", uniform), seed=5)
    step(model)
    copied = copy.deepcopy(model)
    assert torch.equal(step(model)["weights.w"], step(copied)["weights.w"])


class Dividing(nn.Module):
    """The backward of the first layer is divided by a number drawn below 1/2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum()


@pytest.mark.parametrize("compiled", COMPILED)
def test_a_replay_draws_the_numbers_of_the_step(compiled: bool) -> None:
    """The op that fails depends on the numbers: a replay with others would find no failure."""

    def rarely_infinite(g: Tensor) -> Tensor:
        return g / torch.where(gr.uniform(g).amax() > 0.95, 0.0, 1.0)

    failed = 0
    model = gr.transform(Dividing(), [gr.on("error:first", rarely_infinite), gr.on("gradient:*", CheckFinite("raise"))])
    if compiled:
        model.compile()
    for _ in range(12):
        before = gr.state_dict(model)["states"]
        located = gr.locate(model, torch.ones(1, 2)) is not None
        assert all(torch.equal(v, before[k]) for k, v in gr.state_dict(model)["states"].items())
        with pytest.raises(gr.NonFiniteError, match="rarely_infinite") if located else contextlib.nullcontext():
            step(model, torch.ones(1, 2))
        failed += located
        counts = {int(value[1]) for value in gr.state_dict(model)["states"].values()}
        assert len(counts) == 1
    assert 0 < failed < 12


def test_equal_regions_draw_different_numbers() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    found = []
    for regions in ("*", ()):
        model = gr.transform(net, gr.on("gradient:*.weight", uniform), regions=regions)
        found.append(step(model, torch.ones(2, 4)))
    weights = [value for name, value in found[0].items() if name.endswith("weight")]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(weights, 2))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0] if name.endswith("weight"))


@pytest.mark.parametrize("compiled", COMPILED)
def test_step_sites(compiled: bool) -> None:
    found = []
    for _ in range(2):
        model = gr.transform(Wide(), gr.on("step:*", lambda g: g + gr.normal(g)), seed=1)
        if compiled:
            model.compile()
        optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1.0), model)
        values = []
        for _ in range(2):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            values.append(model.weights["w"].detach().clone())
        found.append(values)
        assert stats.kstest((-1 - values[0]).numpy(), "norm").pvalue > 1e-3
        assert stats.kstest((-1 - values[1] + values[0]).numpy(), "norm").pvalue > 1e-3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_functions_of_several_values_callbacks_and_backward_ops() -> None:
    def straight(op: gr.BackwardOp) -> Tensor:
        return op.error * gr.uniform(op.error)

    class Rounding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(COUNT))

        def forward(self) -> Tensor:
            return self.w.round()

    model = gr.transform(Rounding(), gr.on("backward:/round", straight))
    values = step(model)["w"]
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-3

    def draw(g: Tensor, *, w: Tensor) -> Tensor:
        return gr.uniform(w)

    policy = lambda site: gr.call(draw, reads={"w": "param:{name}"}) if site.kind == "gradient" else None  # noqa: E731
    values = step(gr.transform(nn.Linear(COUNT, 1, bias=False), policy), torch.ones(1, COUNT))["weight"]
    assert stats.kstest(values.flatten().numpy(), "uniform").pvalue > 1e-3


def test_a_group_draws_apart_for_its_members() -> None:
    model = gr.transform(
        Wide("a", "b"), gr.together("gradient:*", lambda gs: {n: gr.uniform(g) for n, g in gs.items()})
    )
    first = step(model)
    assert not torch.equal(*first.values())
    assert list(gr.state_dict(model)["states"]) == ["group:default/random"]
    assert not torch.equal(first["weights.a"], step(model)["weights.a"])


def test_stochastic_rounding_is_unbiased() -> None:
    def rounded(g: Tensor) -> Tensor:
        return (8 * g + gr.uniform(g)).floor() / 8

    layer = nn.Linear(COUNT, 1, bias=False)
    x = torch.full((1, COUNT), 0.3)
    found = torch.stack([value["weight"] for value in _steps(gr.transform(layer, gr.on("gradient:*", rounded)), x, 8)])
    assert set(found.unique().tolist()) == {0.25, 0.375}
    assert abs(found.double().mean() - 0.3) < 4 * 0.125 * math.sqrt(0.24 / found.numel())


def _steps(model: nn.Module, x: Tensor, count: int) -> list[dict[str, Tensor]]:
    return [step(model, x) for _ in range(count)]


def test_annealed_noise_has_its_variance() -> None:
    number = gr.State()

    def noisy(g: Tensor) -> Tensor:
        deviation = (0.5 / (1 + number) ** 0.55).sqrt()
        number.set(number + 1)
        return g + deviation * gr.normal(g)

    for count, value in enumerate(
        _steps(gr.transform(nn.Linear(COUNT, 1), gr.on("gradient:weight", noisy)), torch.ones(1, COUNT), 4)
    ):
        variance = 0.5 / (1 + count) ** 0.55
        assert abs(value["weight"].var() - variance) < 5 * variance * math.sqrt(2 / COUNT)


def test_probabilities_may_be_tensors_states_and_bounds() -> None:
    state, p = gr.State(init=0.25), torch.tensor([0.0, 1.0, math.nan, 0.5])

    def draw(g: Tensor) -> Tensor:
        state.set(state)
        return torch.stack([gr.bernoulli(q, g[0]) for q in (0, 1, p, state, torch.linspace(-1, 2, 7)[:, None])])

    found = drawn(draw, Wide(size=(5, 7, 4)))[0]["weights.w"]
    assert torch.equal(found[0], torch.zeros(7, 4))
    assert torch.equal(found[1], torch.ones(7, 4))
    assert torch.equal(found[2][:, :3], torch.tensor([0.0, 1.0, 0.0]).expand(7, 3))
    assert torch.equal(found[4][:3], torch.zeros(3, 4)[:3])
    assert torch.equal(found[4][-3:], torch.ones(3, 4))


@pytest.mark.pure
@pytest.mark.parametrize("function", [gr.uniform, gr.normal, lambda like: gr.bernoulli(0.5, like)])
def test_outside_of_functions_is_an_error(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(gr.CallbackError, match=r"draws inside of tensor functions, as gr\.on.*torch's own"):
        function(torch.ones(2))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda g: g * gr.bernoulli(1.5, g), r"gradient:weights\.w.*p is a number in \[0, 1\].*got 1\.5"),
        (lambda g: g * gr.bernoulli(math.nan, g), "got nan"),
        (lambda g: g * gr.bernoulli(True, g), "got True"),
        (lambda g: g * gr.bernoulli(torch.ones(5), g), r"shape \(5,\), which does not broadcast"),
        (lambda g: g * gr.uniform(g.long()), r"floating dtype, got torch\.int64"),
        (lambda g: g * gr.normal(3.0), "floating dtype, got float"),
        (lambda g: g * gr.uniform(g, across="hosts"), "across is 'ranks' or None, got 'hosts'"),
        (lambda g: g * torch.rand_like(g), r"Draw with gr\.uniform, gr\.normal or gr\.bernoulli"),
    ],
)
def test_errors_name_site_and_cause(function: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(gr.CallbackError, match=message):
        drawn(function, Wide())


@pytest.mark.pure
@pytest.mark.parametrize(
    "make", [lambda seed: gr.transform(nn.Linear(1, 1), [], seed=seed), lambda seed: gr.backend([], seed=seed)]
)
def test_seed_is_a_whole_number(make: Callable[[Any], Any]) -> None:
    for seed in (1.5, True, "1"):
        with pytest.raises(TypeError, match="seed is a whole number, got"):
            make(seed)


@pytest.mark.inductor
def test_backend_draws_by_its_seed() -> None:
    found = []
    for seed in (1, 1, 2):
        layer = nn.Linear(3, 3)
        torch.compile(layer, backend=gr.backend(gr.on("gradient:*", uniform), seed=seed))(
            torch.ones(1, 3)
        ).sum().backward()
        found.append(layer.weight.grad)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_kept_numbers_are_those_that_were_used() -> None:
    model = gr.transform(Wide(), [gr.on("gradient:*", uniform), gr.on("gradient:*", Keep())])
    values = step(model)["weights.w"]
    assert torch.equal(next(iter(model.monitor.kept().values())), values)
