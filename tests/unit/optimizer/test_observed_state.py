"""Sites of parameters and optimizer state: what a guarded step leaves."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import (
    CheckFinite,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    DecayWeights,
    Hold,
    Keep,
    Observe,
    SkipSpikes,
)
from gradrewrite.sites import Kind, Site

from helpers import mostly_slow
from models.optimizers import OPTIMIZERS, USUAL
from models.small import Lambda, TwoLayers

FIGURES: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda t: t.norm(),
    "max_abs": lambda t: t.abs().max(),
    "mean_abs": lambda t: t.abs().mean(),
    "min": lambda t: t.min(),
    "zeros": lambda t: (t == 0).double().mean(),
    "std": lambda t: t.std(correction=0),
}
PARAMS, STATES = gr.on("param:*", Observe(*FIGURES)), gr.on("state:*", Observe(*FIGURES))


def rewritten(policy: Any, seed: int = 0, **options: Any) -> gr.RewrittenModule:
    torch.manual_seed(seed)
    return gr.transform(TwoLayers().double(), policy, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    (model(x).square().sum() * scale).backward()
    optimizer.step()


def expected(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """By plain torch."""
    found: dict[str, float] = {}
    for name, p in model.named_parameters():
        tensors = {f"param:{name}": p.detach()}
        tensors |= {f"state:{name}.{key}": t for key, t in optimizer.state[p].items() if isinstance(t, Tensor)}
        found |= {f"{f}@{site}": float(FIGURES[f](t.double())) for site, t in tensors.items() for f in FIGURES}
    return found


def observed(records: dict[str, float]) -> dict[str, float]:
    kinds = ("param", "state")
    return {k: v for k, v in records.items() if k.partition("@")[2].startswith(kinds) and not k.startswith("mean@")}


@pytest.mark.broad
@pytest.mark.parametrize("name", mostly_slow(USUAL, 3))
def test_figures_are_those_of_plain_torch(name: str) -> None:
    model = rewritten([PARAMS, STATES])
    plain = copy.deepcopy(model.original)
    optimizer, other = gr.guard(OPTIMIZERS[name](model.parameters()), model), OPTIMIZERS[name](plain.parameters())
    for n in range(3):
        step(model, optimizer, n)
        step(plain, other, n)
        want = expected(plain, other)

        assert observed(model.monitor.latest()) == pytest.approx(want, rel=1e-12)
        assert len(want) == len(FIGURES) * len(list(plain.parameters())) * (2 if "sgd" in name else 4)


def test_they_are_after_decay_and_in_the_row_of_the_backward() -> None:
    model = rewritten(
        [PARAMS, gr.on("step:*", [DecayWeights(0.5), Observe("norm")]), gr.on("error:one", Observe("norm"))]
    )
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for n in range(2):
        step(model, optimizer, n)
    rows = model.monitor.steps()

    assert [row.step for row in rows] == [0, 1]
    assert {"norm@error:one", "norm@step:one.weight", "norm@param:one.weight"} <= rows[1].records.keys()
    assert rows[1].records["norm@param:one.weight"] == pytest.approx(model.original.one.weight.norm().item(), rel=1e-12)


def test_they_make_a_row_of_their_own_where_no_backward_records() -> None:
    model = rewritten(PARAMS)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for n in range(3):
        step(model, optimizer, n)

    assert [row.step for row in model.monitor.steps()] == [0, 1, 2]
    assert not any(math.isnan(v) for v in model.monitor.history("norm@param:one.weight"))


@pytest.mark.parametrize("name", ["adamw", "adamw fused"])
def test_skipped_step_shows_unchanged_values(name: str) -> None:
    model = rewritten([PARAMS, STATES, gr.on("gradient:*", CheckFinite("skip"))])
    optimizer = gr.guard(OPTIMIZERS[name](model.parameters()), model)
    step(model, optimizer, 0)
    before = observed(model.monitor.latest())
    step(model, optimizer, 1, scale=math.nan)

    assert model.monitor.skipped == 1
    assert observed(model.monitor.latest()) == before


def test_kept_tensors_are_copies() -> None:
    model = rewritten(gr.on("param:one.*", Keep()))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    step(model, optimizer, 0)
    (site, kept), *_ = model.monitor.kept().items()
    before = model.original.one.weight.detach().clone()
    with torch.no_grad():
        model.original.one.weight.zero_()

    assert (str(site), site.shape, site.module) == ("param:one.weight", tuple(before.shape), "one")
    assert torch.equal(kept, before)


@pytest.mark.broad
@pytest.mark.parametrize(
    ("monitor", "every", "due"),
    [({}, 1, range(7)), ({}, 3, (0, 3, 6)), ({"sample": 2}, 1, (0, 2, 4, 6)), ({"sample": 2}, 3, (0, 6))],
)
def test_sampling(monitor: dict[str, int], every: int, due: Any) -> None:
    policy = [gr.on("param:one.*", Observe("norm", every=every)), gr.on("state:two.*", [Keep(every=every)])]
    model = rewritten([*policy, gr.on("gradient:*", ClipByValue(1e9, log=True))], monitor=gr.Monitor(**monitor))
    optimizer = gr.guard(OPTIMIZERS["sgd"](model.parameters()), model)
    found, kept = [], []
    for n in range(7):
        step(model, optimizer, n)
        found += [n] * ("norm@param:one.weight" in model.monitor.latest())
        kept += [n] * bool(model.monitor.kept())

    assert found == kept == list(due)
    assert [graph.measured for graph in model.explain().graphs] == ["all"]  # the graph measures nothing


def test_sample_next() -> None:
    model = rewritten([PARAMS, gr.on("error:one", Observe("norm"))], monitor=gr.Monitor(sample=100))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    found = []
    for n in range(5):
        if n == 3:
            model.monitor.sample_next()
        step(model, optimizer, n)
        found += [n] * ("norm@param:one.weight" in model.monitor.latest())

    assert found == [0, 3]


def test_raise_comes_from_the_step_and_warn_after_it() -> None:
    model = rewritten(gr.on("param:*", CheckFinite()))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(gr.NonFiniteError, match=r"first non-finite: param:one.weight, 100 % of \d+ elements"):
        step(model, optimizer, 0, scale=math.inf)
    model = rewritten(gr.on("state:*.momentum_buffer", CheckFinite("warn")))
    optimizer = gr.guard(OPTIMIZERS["sgd"](model.parameters()), model)
    step(model, optimizer, 0, scale=math.inf)
    with pytest.warns(gr.RewriteWarning, match=r"state:one\.weight\.momentum_buffer"):
        model.monitor.flush()


REFUSED: dict[str, tuple[Any, str]] = {
    "skip": (CheckFinite("skip"), r'skipping cannot undo that. Check the gradients before it: gr.on\("step:\*"'),
    "clip": (ClipByValue(1.0), "does not apply to this kind of site"),
    "group": (ClipByGlobalNorm(1.0), "does not apply to this kind of site"),
    "judge": (SkipSpikes(), "does not apply to this kind of site"),
    "decay": (DecayWeights(0.1), "does not apply to this kind of site"),
    "hold": (Hold(torch.lt), "does not apply to this kind of site"),
    "reads": (gr.call(lambda v, *, of: v, reads={"of": "activation:0"}), "does not apply to this kind of site"),
    "several": (gr.joint(lambda values: values), "does not apply to this kind of site"),
    "examples": (Keep("example_norms"), "does not apply to this kind of site"),
}


@pytest.mark.broad
@pytest.mark.parametrize("kind", ["param", "state"])
@pytest.mark.parametrize("case", REFUSED)
def test_other_actions_are_refused(case: str, kind: str) -> None:
    action, text = REFUSED[case]
    for policy in (gr.on(f"{kind}:*", action), lambda site: action if site.kind == kind else None):
        model = rewritten(policy)
        optimizer = gr.guard(OPTIMIZERS["sgd"](model.parameters()), model)
        with pytest.raises(gr.PolicyError, match=text):
            step(model, optimizer, 0)


def test_complex_parameters_have_no_order() -> None:

    for statistic, error in (("norm", None), ("min", gr.UnsupportedGradientError)):
        net = Lambda(lambda net, x: (net.w * x).abs().sum(), w=nn.Parameter(torch.ones(2, dtype=torch.complex64)))
        model = gr.transform(net, gr.on("param:*", Observe(statistic)))
        optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.0), model)
        model(torch.ones(2)).backward()
        if error is None:
            optimizer.step()
            assert model.monitor.latest()["norm@param:w"] == pytest.approx(math.sqrt(2))
        else:
            with pytest.raises(error, match="needs real numbers"):
                optimizer.step()


@pytest.mark.broad
@pytest.mark.parametrize(
    ("policy", "has_any"),
    [
        (gr.on("*", Observe("norm")), False),
        (lambda site: Observe("norm"), False),
        (lambda site: ClipByValue(1.0) if site.kind != "activation" else None, False),
        (
            lambda site: functools.partial(torch.mul, other=1.0) if site.kind not in ("activation", "step") else None,
            False,
        ),
        (lambda site: ClipByNorm(gr.Schedule(lambda n: 1.0)) if site.kind != "activation" else None, False),
        (lambda site: (lambda g: g * 1.0) if site.kind not in ("activation", "input") else None, False),
        (lambda site: Observe("norm") if site.kind in ("step", "param", "state") else None, True),
        (
            lambda site: Observe("norm") if site.matches("param:*") or site.matches("state:*") else Observe("max_abs"),
            True,
        ),
        (lambda site: {"param": Observe("norm"), "state": Observe("norm")}.get(site.kind), True),
    ],
)
def test_callbacks_count_where_they_tell_the_kind(policy: Any, has_any: bool) -> None:
    model = rewritten(policy)
    optimizer = gr.guard(OPTIMIZERS["sgd"](model.parameters()), model)
    for n in range(3):
        step(model, optimizer, n)
    found = {key.partition("@")[2].partition(":")[0] for key in observed(model.monitor.latest())}

    assert found == ({"param", "state"} if has_any else set())


def test_callback_that_raises_at_unknown_kinds_is_left_alone() -> None:
    known: dict[Kind, Any] = {
        "error": None,
        "gradient": None,
        "activation": None,
        "input": None,
        "step": Observe("norm"),
    }
    model = rewritten(lambda site: known[site.kind])
    optimizer = gr.guard(OPTIMIZERS["sgd"](model.parameters()), model)
    step(model, optimizer, 0)

    assert observed(model.monitor.latest()) == {}
    assert "norm@step:one.weight" in model.monitor.latest()


def test_patterns_without_a_kind_do_not_match() -> None:
    for kind in ("param", "state", "step"):
        assert not Site(kind, "one.weight").matches("*")
        assert Site(kind, "one.weight").matches(f"{kind}:*.weight")


def test_rule_without_a_parameter() -> None:
    model = rewritten(gr.on("param:three.*", Observe("norm")))
    with pytest.raises(gr.NoSuchSiteError, match=r"'param:three\.\*'.*param:two\.weight"):
        gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_rule_without_state_is_told_when_there_is_state() -> None:
    model = rewritten([gr.on("state:*.exp_avg", Observe("norm")), gr.on("gradient:*", CheckFinite("skip"))])
    optimizer = gr.guard(OPTIMIZERS["sgd"](model.parameters()), model)
    step(model, optimizer, 0, scale=math.nan)  # it leaves no state behind
    with pytest.raises(gr.NoSuchSiteError, match=r"'state:\*\.exp_avg'.*state:one\.weight\.momentum_buffer"):
        step(model, optimizer, 1)


@pytest.mark.broad
def test_rule_for_state_of_two_optimizers() -> None:
    for pattern, is_known in (("state:two.*.exp_avg", True), ("state:*.max_exp_avg", False)):
        model = rewritten(gr.on(pattern, Observe("norm")))
        first = gr.guard(OPTIMIZERS["sgd"](model.one.parameters()), model)
        second = gr.guard(OPTIMIZERS["adamw"](model.two.parameters()), model)
        step(model, first, 0)
        if is_known:
            second.step()
            assert "norm@state:two.weight.exp_avg" in model.monitor.latest()
        else:
            with pytest.raises(gr.NoSuchSiteError):
                second.step()


def test_optimizer_without_state_and_policy_without_guard_are_told() -> None:
    model = rewritten(gr.on("state:*", Observe("norm")))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for n in range(2):
        step(model, optimizer, n)
    with pytest.warns(gr.RewriteWarning, match=r"'state:\*' does nothing: after 3 steps this SGD has no tensor"):
        step(model, optimizer, 2)
    for pattern in ("param:*", "state:*"):
        model = rewritten(gr.on(pattern, Observe("norm")))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, 0)
        with pytest.warns(gr.RewriteWarning, match=f"actions at {pattern[:5]} sites .*which nothing runs"):
            step(model, optimizer, 1)


def test_two_models_with_equal_names() -> None:
    one, two = rewritten(PARAMS, 1), rewritten(PARAMS, 2)
    optimizer = gr.guard(torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1), [one, two])
    optimizer.step()

    records = one.monitor.latest()
    assert records["norm@param:one.weight"] == pytest.approx(one.original.one.weight.norm().item(), rel=1e-12)
    assert records["norm@param:one.weight#1"] == pytest.approx(two.original.one.weight.norm().item(), rel=1e-12)


def test_state_that_appears_later() -> None:
    model = rewritten(gr.on("state:*.momentum_buffer", Observe("norm")))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    step(model, optimizer, 0)
    assert observed(model.monitor.latest()) == {}
    optimizer.param_groups[0]["momentum"] = 0.9
    step(model, optimizer, 1)

    assert len(observed(model.monitor.latest())) == len(list(model.parameters()))
