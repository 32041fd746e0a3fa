"""Every action against plain mathematics, and what all actions owe: inert, pair, twice, live, no recompilation."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue, Keep, NanToNum, Scale, Zero
from gradrewrite.policy.actions import insertion_at
from gradrewrite.policy.insertions import Insertion, ReplaceTensor
from gradrewrite.rewriting.action_tracing import ActionTracer
from gradrewrite.sites import Kind, Site

from helpers import Probe, mostly_slow
from models.small import Lambda

INF, NAN = math.inf, math.nan
SITE = Site("error", "h")


def through(action: Any, error: Tensor, pattern: str = "error:h") -> Tensor:
    """What comes out of an action in the backward of a model when ``error`` comes in."""
    model = gr.transform(Probe(error.numel(), error.dtype), gr.on(pattern, action))
    model(error).backward()
    assert model.w.grad is not None
    return model.w.grad


def apply(action: Any, value: Tensor) -> Tensor:
    """The traced action by itself."""
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(value)
    insertion = insertion_at(action, SITE)
    assert isinstance(insertion.effect, ReplaceTensor)
    (out, *_) = ActionTracer().trace(insertion, insertion.effect.run, SITE, fake).graph(value)
    return out


@pytest.mark.broad
def test_clip_by_value() -> None:
    g = torch.tensor([-INF, -3.0, -2.0, -0.0, 1.0, 2.0, 3.0, INF, NAN])

    assert same(through(ClipByValue(2.0), g), torch.tensor([-2.0, -2, -2, -0.0, 1, 2, 2, 2, NAN]))
    assert same(through(ClipByValue(2.0, min=1.5), g), torch.tensor([1.5, 1.5, 1.5, 1.5, 1.5, 2, 2, 2, NAN]))
    assert same(through(ClipByValue(INF), g), g)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ((NAN,), ValueError),
        ((-1.0,), ValueError),
        (("1",), TypeError),
        ((torch.ones(2),), ValueError),
        ((True,), TypeError),
    ],
)
@pytest.mark.pure
def test_clip_by_value_refuses(settings: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error, match="ClipByValue"):
        ClipByValue(*settings)
    with pytest.raises(ValueError, match=r"min=2.0, max=1.0"):
        ClipByValue(1.0, min=2.0)
    with pytest.raises(ValueError, match="NaN"):
        ClipByValue(1.0, min=NAN)


@pytest.mark.broad
@pytest.mark.parametrize("action", [ClipByNorm, ClipByGlobalNorm])
@pytest.mark.parametrize("order", mostly_slow([2.0, INF, 0.5, 1.0, 3.0], 2))
def test_norm_clips(action: Any, order: float) -> None:
    g = torch.randn(50, dtype=torch.float64)
    norm = g.abs().max() if order == INF else g.abs().pow(order).sum().pow(1 / order)
    got = through(action(0.25, norm_type=order), g, "gradient:w")

    torch.testing.assert_close(got, g * 0.25 / norm, rtol=1e-12, atol=0)


@pytest.mark.broad
@pytest.mark.parametrize("action", [ClipByNorm(5.0), ClipByGlobalNorm(5.0)])
@pytest.mark.parametrize("g", mostly_slow([[3.0, 4.0], [0.0, 0.0], [INF, 1.0], [-INF, 1.0], [NAN, 1.0], [INF, NAN]], 3))
def test_norm_clips_leave_alone(action: Any, g: list[float]) -> None:
    assert same(through(action, torch.tensor(g), "gradient:w"), torch.tensor(g))


@pytest.mark.broad
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_do_not_overflow(dtype: torch.dtype) -> None:
    large = torch.finfo(dtype).max / 4
    g = torch.full((9,), large, dtype=dtype)
    if dtype in (torch.bfloat16, torch.float32, torch.float64):
        g[:] = large / 4  # so that the norm itself is representable in the accumulator
    got = through(ClipByNorm(3.0), g)

    torch.testing.assert_close(got, torch.ones(9, dtype=dtype))
    assert torch.isfinite(got).all()


def test_norms_do_not_underflow() -> None:
    model = gr.transform(Probe(4), gr.on("error:h", ClipByNorm(INF)))
    model(torch.full((4,), 1e-30)).backward()

    assert model.monitor.latest()["norm@error:h"] == pytest.approx(2e-30)


def test_infinite_bound_measures() -> None:
    model = gr.transform(Probe(2), gr.on("gradient:w", ClipByGlobalNorm(INF)))
    model(torch.tensor([3.0, 4.0])).backward()

    assert same(model.w.grad, torch.tensor([3.0, 4.0]))
    latest = {"total_norm": 5.0, "bound": math.inf, "factor": 1.0}
    assert model.monitor.latest() == {f"{name}@group:default": value for name, value in latest.items()}


@pytest.mark.broad
@given(bound=st.integers(1, 990).map(float), seed=st.integers(0, 2**16))
@pytest.mark.pure
def test_loose_bound_is_inert(bound: float, seed: int) -> None:
    g = torch.randn(7, generator=torch.Generator().manual_seed(seed)) * bound / 3
    norm = torch.linalg.vector_norm(g)
    scaled = g * (bound / norm)  # its norm is the bound, or a rounding away

    for action in (ClipByNorm(bound * 1.001), ClipByNorm(INF), ClipByValue(float(scaled.abs().max()))):
        assert same(apply(action, scaled), scaled)


@pytest.mark.parametrize("action", [ClipByNorm, ClipByGlobalNorm])
@pytest.mark.parametrize("bound", [0.0, -1.0, NAN])
@pytest.mark.pure
def test_norm_clips_refuse(action: Any, bound: float) -> None:
    with pytest.raises(ValueError, match="max_norm"):
        action(bound)
    with pytest.raises(ValueError, match="norm_type"):
        action(1.0, norm_type=bound)
    with pytest.raises(TypeError, match="max_norm"):
        action("1")


@pytest.mark.broad
def test_global_norm_counts_each_parameter_once_and_skips_the_missing() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.tied = nn.Linear(2, 2, bias=False), nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
            self.tied.weight, self.unused = self.a.weight, nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.tied(torch.tanh(self.b(self.a(x))))

    plain, x = Net().double(), torch.randn(3, 2, dtype=torch.float64)
    plain(x).square().sum().backward()
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    norm = torch.cat([g.flatten() for g in wanted.values() if g is not None]).norm()
    other = copy.deepcopy(plain)
    other.zero_grad()
    model = gr.transform(other, gr.on("gradient:*", ClipByGlobalNorm(0.1)))
    model(x).square().sum().backward()

    for name, p in model.named_parameters():
        if wanted[name] is None:
            assert p.grad is None
        else:
            torch.testing.assert_close(p.grad, wanted[name] * 0.1 / norm, rtol=1e-12, atol=0)


@pytest.mark.broad
def test_groups_are_scaled_by_themselves() -> None:
    plain, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double(), torch.randn(2, 3, dtype=torch.float64)
    plain(x).sum().backward()
    grads = [p.grad.clone() for p in plain.parameters()]
    plain.zero_grad()
    groups = [
        gr.on("gradient:0.*", ClipByGlobalNorm(0.1, group="a")),
        gr.on("gradient:1.*", ClipByGlobalNorm(0.2, group="b")),
    ]
    model = gr.transform(plain, groups)
    model(x).sum().backward()
    norms = [torch.cat([g.flatten() for g in grads[i : i + 2]]).norm() for i in (0, 2)]

    for i, p in enumerate(model.parameters()):
        torch.testing.assert_close(p.grad, grads[i] * (0.1, 0.2)[i // 2] / norms[i // 2], rtol=1e-12, atol=0)
    latest = model.monitor.latest()
    assert [latest[f"total_norm@group:{g}"] for g in "ab"] == pytest.approx([float(n) for n in norms])


def test_one_group_has_one_bound() -> None:
    rules = [gr.on("gradient:weight", ClipByGlobalNorm(1.0)), gr.on("gradient:bias", ClipByGlobalNorm(2.0))]
    with pytest.raises(gr.PolicyError, match=r"gradient:bias.*gradient:weight.*one action with one setting"):
        gr.transform(nn.Linear(2, 2), rules)(torch.ones(1, 2))


def test_group_acts_after_the_single_sites() -> None:
    model = gr.transform(
        Probe(2), [gr.on("gradient:w", ClipByGlobalNorm(5.0)), gr.on("gradient:w", ClipByValue(4.0, min=3.0))]
    )
    model(torch.tensor([3.0, 40.0])).backward()

    assert same(model.w.grad, torch.tensor([3.0, 4.0]))


@pytest.mark.slow
def test_empty_and_scalar_gradients() -> None:
    empty = torch.zeros(0)
    for action in (ClipByValue(1.0, log=True), ClipByNorm(1.0, log=True), ClipByGlobalNorm(1.0), Scale(2.0), Keep()):
        assert through(action, empty, "gradient:w").shape == (0,)
    model = gr.transform(Probe(0), gr.on("error:h", ClipByNorm(1.0)))
    model(empty).backward()
    assert model.monitor.latest() == {"norm@error:h": 0.0, "bound@error:h": 1.0, "factor@error:h": 1.0}


def test_complex_gradients() -> None:
    def make_net() -> Lambda:
        return Lambda(lambda net, x: (net.w * x).real.sum(), w=nn.Parameter(torch.zeros(1, dtype=torch.complex64)))

    x = torch.tensor([3 + 4j])
    model = gr.transform(make_net(), gr.on("gradient:w", ClipByNorm(1.0)))
    model(x).backward()
    torch.testing.assert_close(model.w.grad.abs(), torch.ones(1))
    with pytest.raises(TypeError, match=r"gradient:w.*ClipByNorm"):
        gr.transform(make_net(), gr.on("gradient:w", ClipByValue(1.0)))(x)


@pytest.mark.broad
def test_simple_actions() -> None:
    g = torch.tensor([1.0, -2.0, 0.0, INF, -INF, NAN])

    assert same(through(Scale(-1.0), g), -g)
    assert same(through(Zero(), g), torch.zeros(6))
    assert same(through(NanToNum(), g), torch.nan_to_num(g))
    with pytest.raises(ValueError, match="factor"):
        Scale(INF)


@pytest.mark.broad
def test_actions_of_a_site_apply_in_order() -> None:
    g = torch.tensor([3.0])
    assert same(through([ClipByValue(1.0), Scale(2.0)], g), torch.tensor([2.0]))
    assert same(through([Scale(2.0), ClipByValue(1.0)], g), torch.tensor([1.0]))
    assert same(through([lambda t: t + 1, lambda t: t * 2, ClipByValue(7.0)], g), torch.tensor([7.0]))


def test_clip_acts_on_the_sum_over_all_uses() -> None:
    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self) -> Tensor:
            h = gr.tap(self.w * 1, "h")
            return 3 * h + 4 * h

    for clip in (ClipByValue(5.0), ClipByNorm(5.0)):
        model = gr.transform(Fan(), gr.on("error:h", clip))
        model().sum().backward()
        assert model.w.grad.item() == 5.0


def test_keep_keeps_what_stands_there() -> None:
    policy = [
        gr.on("error:h", [Keep(), Scale(2.0)]),
        gr.on("gradient:w", Keep()),
        gr.on("activation:h", Keep()),
    ]
    model = gr.transform(Probe(2), policy)
    model(torch.tensor([1.0, 2.0])).backward()
    kept = {str(site): tensor for site, tensor in model.monitor.kept().items()}

    assert same(kept["error:h"], torch.tensor([1.0, 2.0]))
    assert same(kept["gradient:w"], torch.tensor([2.0, 4.0]))
    assert same(kept["activation:h"], torch.zeros(2))


@pytest.mark.slow
def test_two_answers_of_one_clip_act_as_one() -> None:
    """Twice: clipping again to the same bound changes nothing."""
    g = torch.randn(20)
    for action in (ClipByValue(0.5), ClipByNorm(0.5), Zero(), NanToNum()):
        torch.testing.assert_close(through([action, action], g), through(action, g), rtol=1e-6, atol=0)


@pytest.mark.broad
@pytest.mark.parametrize("make", [ClipByValue, ClipByNorm, ClipByGlobalNorm, Scale])
def test_live_thresholds(make: Any) -> None:
    bound = torch.tensor(0.5)
    model = gr.transform(Probe(1), gr.on("gradient:w", make(bound)))
    model(torch.tensor([2.0])).backward()
    first = model.w.grad.item()
    counters.clear()
    for value in (0.25, 1.0, 0.125):
        bound.fill_(value)
        model.zero_grad()
        model(torch.tensor([2.0])).backward()
        assert model.w.grad.item() == (2 * value if make is Scale else value)

    assert first == (1.0 if make is Scale else 0.5)
    assert not counters["frames"]


def test_closed_over_tensors_live() -> None:
    shift = torch.tensor([1.0, -1.0])
    model = gr.transform(Probe(2), gr.on("error:h", lambda g: g - shift))
    for value in (1.0, 2.0):
        shift.fill_(value)
        model.zero_grad()
        model(torch.tensor([1.0, 2.0])).backward()
        assert same(model.w.grad, torch.tensor([1.0, 2.0]) - value)


def same(a: Tensor | None, b: Tensor) -> bool:
    """Equal bit for bit, but for the payload of NaN."""
    assert a is not None
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.broad
@pytest.mark.parametrize(
    ("action", "wanted"),
    [
        (Scale(5.0), 0.0),
        (ClipByNorm(0.1), 0.0),
        (ClipByGlobalNorm(0.1), 0.0),
        (NanToNum(), 0.0),
        (ClipByValue(1.0, min=0.5), 0.5),
        (lambda g: g + 1, 1.0),
    ],
    ids=["scale", "norm", "global", "nan", "value", "additive"],
)
def test_zeros_of_an_output_that_the_loss_ignores(action: Any, wanted: float) -> None:
    net = Lambda(lambda net, x: (net.used(x), net.ignored(x)), used=nn.Linear(2, 2), ignored=nn.Linear(2, 2))
    model = gr.transform(net, gr.on("gradient:ignored.weight", action))
    used, _ = model(torch.ones(1, 2))
    used.sum().backward()

    assert torch.equal(model.ignored.weight.grad, torch.full((2, 2), wanted))
    assert not model.ignored.bias.grad.any()


@pytest.mark.pure
def test_what_is_kept_is_a_tensor() -> None:
    assert Keep(what="tensor") == Keep()
    with pytest.raises(ValueError, match="'second_moment', got 'norm'"):
        Keep(what="norm")
    with pytest.raises(ValueError, match="'second_moment', got 'norm'"):
        gr.Monitor().kept("norm")
    assert gr.Monitor().kept(what="tensor") == {}


class Logged:
    """An action that logs each read of its attributes."""

    __module__ = "gradrewrite.passes.logged"  # values that an action of a user reads are compared at each backward
    reads: list[str]

    def __init__(self, reads: list[str]) -> None:
        object.__setattr__(self, "reads", reads)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            object.__getattribute__(self, "reads").append(name)
        return object.__getattribute__(self, name)

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(("error",))

    def at(self, site: Site) -> Insertion:
        return Insertion(self, ReplaceTensor(lambda g: g / 2), frozenset(("error",)))


def test_an_action_is_asked_for_its_insertion_alone() -> None:
    """A new kind of action is one class; the core reads ``at``, and tells actions by ``kinds`` and ``at``."""
    reads: list[str] = []
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    expected = torch.autograd.grad(net(torch.ones(1, 2)).sum() / 2, list(net[0].parameters()))
    model = gr.transform(net, gr.on("error:0", Logged(reads)))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(1, 2)).sum().backward()
    for parameter, wanted in zip(net[0].parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)
    optimizer.step()
    str(model.explain()), str(model.monitor.table())

    assert set(reads) == {"at", "kinds", "check_bounds"}  # the last one, where it has it, when a policy is given
