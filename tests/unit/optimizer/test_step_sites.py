"""Step sites: actions on the gradients that the optimizer uses, against the same mathematics by hand."""

from __future__ import annotations

import copy
import gc
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.optimizer.step_sites import GUARD
from gradrewrite.passes import (
    L2,
    CheckFinite,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    DecayWeights,
    Keep,
    NanToNum,
    Observe,
    Scale,
    Zero,
)

from helpers import mostly_slow
from models.optimizers import OPTIMIZERS, USUAL
from models.small import Lambda, TwoLayers


def pair(policy: gr.Policy, dtype: torch.dtype = torch.float64) -> tuple[TwoLayers, Any]:
    torch.manual_seed(0)
    plain = TwoLayers(bias=False).to(dtype)
    return plain, gr.transform(copy.deepcopy(plain), policy)


def batches(number: int, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
    torch.manual_seed(1)
    return iter([torch.randn(6, 4, dtype=dtype) for _ in range(number)])


def clip_all(model: nn.Module, bound: float) -> float:
    """The definition: one factor for the gradients of all parameters; the total norm."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    total = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    if total > bound:
        for g in grads:
            g.mul_(bound / total)
    return total


def assert_same(got: nn.Module, wanted: nn.Module, tolerance: float = 1e-12) -> None:
    for (name, a), b in zip(got.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.pure
def test_step_sites_match_only_patterns_of_their_kind() -> None:
    site = gr.Site("step", "decoder.0.weight", module="decoder.0", shape=(2,))
    assert str(site) == "step:decoder.0.weight"
    assert site.matches("step:*")
    assert site.matches("step:decoder.?.weight")
    for pattern in ("*", "decoder.*", "decoder.0.weight", "gradient:*", "*/*"):
        assert not site.matches(pattern)
    assert gr.on("*.weight", ClipByValue(1.0))(site) is None
    assert gr.on("step:*", ClipByValue(1.0))(site) == ClipByValue(1.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "bound"), mostly_slow([(n, b) for b in (0.05, 1e3) for n in (*USUAL, "adagrad fused")], 2)
)
def test_accumulated_micro_batches_equal_one_large_batch(name: str, bound: float) -> None:
    """Three micro-batches, the last one shorter, each weighted by its share."""
    plain, model = pair(gr.on("step:*", ClipByGlobalNorm(bound)))
    optimizer, other = gr.guard(OPTIMIZERS[name](model.parameters()), model), OPTIMIZERS[name](plain.parameters())
    for x in batches(3):
        optimizer.zero_grad()
        for part in (x[:2], x[2:5], x[5:]):
            (model(part).square().sum(1).mean() * (len(part) / len(x))).backward()
        optimizer.step()
        other.zero_grad()
        plain(x).square().sum(1).mean().backward()
        total = clip_all(plain, bound)
        other.step()
        assert model.monitor.latest()["total_norm@step:group:default"] == pytest.approx(total, rel=1e-12)
    assert_same(model, plain)


def three_forwards(model: nn.Module, x: Tensor) -> Tensor:
    """As in direct preference optimization: chosen and rejected, against a reference."""
    with torch.no_grad():
        reference = model(x.roll(1, 0)).sum(1)
    chosen, rejected, other = model(x).sum(1), model(-x).sum(1), model(x * 2).sum(1)
    return -nn.functional.logsigmoid(chosen - rejected - reference + other).mean()


def siamese(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - model(x.flip(0))).square().mean() + model(x).mean()


@pytest.mark.parametrize("loss", [three_forwards, siamese])
def test_several_forwards_and_one_backward(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    plain, model = pair(gr.on("step:*", ClipByGlobalNorm(0.01)))
    optimizer, other = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model), torch.optim.SGD(plain.parameters())
    other.param_groups[0]["lr"] = 0.1
    for x in batches(3):
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()
        other.zero_grad()
        loss(plain, x).backward()
        clip_all(plain, 0.01)
        other.step()
    assert_same(model, plain)


def test_two_networks_against_each_other() -> None:
    """As in a GAN: the generator's backward runs through the discriminator, whose gradients are thrown away."""
    torch.manual_seed(0)
    plain = [nn.Linear(4, 4).double(), nn.Linear(4, 1).double()]
    policy = gr.on("step:*", ClipByGlobalNorm(0.02))
    models = [gr.transform(copy.deepcopy(m), policy) for m in plain]

    def train(
        networks: list[nn.Module], optimizers: list[torch.optim.Optimizer], before: Callable[[nn.Module], Any]
    ) -> None:
        generator, discriminator = networks
        for x in batches(3):
            for network, optimizer, sign in ((discriminator, optimizers[1], 1.0), (generator, optimizers[0], -1.0)):
                for each in optimizers:
                    each.zero_grad()
                fake = generator(x) if network is generator else generator(x).detach()
                (sign * (discriminator(fake).sigmoid().mean() - discriminator(x).sigmoid().mean())).backward()
                before(network)
                optimizer.step()

    train(models, [gr.guard(torch.optim.SGD(m.parameters(), lr=0.1), m) for m in models], lambda _: None)
    train(plain, [torch.optim.SGD(m.parameters(), lr=0.1) for m in plain], lambda m: clip_all(m, 0.02))
    for got, wanted in zip(models, plain, strict=True):
        assert_same(got, wanted)


def by_value(g: Tensor, _: Tensor) -> Tensor:
    return g.clamp(-0.05, 0.03)


def by_norm(g: Tensor, _: Tensor) -> Tensor:
    return g * min(1.0, 0.1 / float(g.norm()))


ACTIONS: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "value": (ClipByValue(0.03, min=-0.05), by_value),
    "norm": (ClipByNorm(0.1), by_norm),
    "scale": (Scale(-0.5), lambda g, _: g * -0.5),
    "zero": (Zero(), lambda g, _: torch.zeros_like(g)),
    "nan to num": (NanToNum(), lambda g, _: g),
    "function": (lambda g: g / (1 + g.abs()), lambda g, _: g / (1 + g.abs())),
    "function with defaults": (lambda g, c=2.0: g * c, lambda g, _: g * 2),
    "function of both": (lambda g, w: g - w * g.abs(), lambda g, w: g - w * g.abs()),
    "l2": (L2(0.3), lambda g, w: g + 0.3 * w),
    "in order": ([Scale(2.0), ClipByValue(0.05)], lambda g, _: (g * 2).clamp(-0.05, 0.05)),
    "measured": ([Observe("max_abs"), CheckFinite("raise"), Keep()], lambda g, _: g),
}


@pytest.mark.broad
@pytest.mark.parametrize(("name", "fused"), mostly_slow([(n, f) for f in (False, True) for n in ACTIONS], len(ACTIONS)))
def test_actions_at_step_sites(name: str, fused: bool) -> None:
    action, definition = ACTIONS[name]
    plain, model = pair(gr.on("step:one.*", action))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), model)
    other = torch.optim.SGD(plain.parameters(), lr=0.1, fused=fused)
    for x in batches(2):
        for module, each in ((model, optimizer), (plain, other)):
            each.zero_grad()
            module(x).square().sum().backward()
        for p in plain.one.parameters():
            p.grad = definition(p.grad, p.detach())
        optimizer.step()
        other.step()
        for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-13, atol=0)  # .grad is what was used
    assert_same(model, plain, 1e-13)


def test_records_join_the_last_backward() -> None:
    _, model = pair(
        [gr.on("gradient:one.weight", Observe("norm")), gr.on("step:one.weight", Observe("norm", "max_abs"))]
    )
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x, y = batches(2)
    optimizer.zero_grad()
    norms = []
    for part in (x, y):
        model(part).square().sum().backward()
        norms.append(float(model.one.weight.grad.norm()))
    optimizer.step()
    history = model.monitor.history("norm@step:one.weight", per="backward")
    assert history == pytest.approx([math.nan, norms[1]], nan_ok=True)
    assert model.monitor.history("norm@gradient:one.weight")[0] == pytest.approx(norms[0])
    assert list(model.monitor.latest())[:3] == [
        "norm@gradient:one.weight",
        "norm@step:one.weight",
        "max_abs@step:one.weight",
    ]
    optimizer.step()  # no backward since
    assert len(model.monitor.steps()) == 3
    assert "norm@gradient:one.weight" not in model.monitor.latest()


@pytest.mark.long
def test_records_without_a_recording_backward_and_of_two_optimizers() -> None:
    _, model = pair(gr.on("step:*", ClipByGlobalNorm(0.5)))
    optimizers = [gr.guard(torch.optim.SGD(m.parameters(), lr=0.1), model) for m in (model.one, model.two)]
    for x in batches(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(x).square().sum().backward()
        totals = [math.sqrt(sum(float(p.grad.square().sum()) for p in m.parameters())) for m in (model.one, model.two)]
        for optimizer in optimizers:
            optimizer.step()
    assert len(model.monitor.steps()) == 3
    latest = model.monitor.latest()
    assert latest["total_norm@step:group:default"] == pytest.approx(totals[0])
    assert latest["total_norm@step:group:default#1"] == pytest.approx(totals[1])
    assert {latest[f"lr@optimizer:{n}"] for n in (0, 1)} == {0.1}


@pytest.mark.long
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("later_first", [False, True])
def test_records_of_a_guard_that_is_added_later(records: bool, later_first: bool) -> None:
    """They join those of the same backward, whether or not the backward records anything."""
    clip = gr.on("step:*", ClipByGlobalNorm(0.5))
    _, model = pair([gr.on("gradient:two.weight", Observe("norm")), clip] if records else clip)
    early, late = (torch.optim.SGD(m.parameters(), lr=0.0) for m in (model.one, model.two))
    gr.guard(early, model)
    totals = []
    for n, x in enumerate(batches(5)):
        if n == 2:
            gr.guard(late, model)
        early.zero_grad()
        late.zero_grad()
        model(x).square().sum().backward()
        totals.append([math.sqrt(sum(float(p.grad.square().sum()) for p in m.parameters())) for m in model.children()])
        for optimizer in (late, early) if later_first else (early, late):
            optimizer.step()
    rows = [step.records for step in model.monitor.steps()]
    assert [row["total_norm@step:group:default"] for row in rows] == pytest.approx([one for one, _ in totals])
    later = [row.get("total_norm@step:group:default#1") for row in rows]
    assert later[:2] == [None, None]
    assert later[2:] == pytest.approx([two for _, two in totals[2:]])


def test_records_are_written_and_kept(tmp_path: Any) -> None:
    _, model = pair(gr.on("step:two.weight", [Keep(), ClipByNorm(0.01)]))
    model.monitor.to_jsonl(tmp_path / "run.jsonl")
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(next(batches(1))).square().sum().backward()
    before = model.two.weight.grad.clone()
    optimizer.step()
    ((site, kept),) = model.monitor.kept().items()
    assert str(site) == "step:two.weight"
    assert torch.equal(kept, before)
    model.monitor.flush()
    (step,) = gr.read_jsonl(tmp_path / "run.jsonl")
    assert step.records["norm@step:two.weight"] == pytest.approx(float(before.norm()))
    assert step.records["bound@step:two.weight"] == 0.01


@pytest.mark.broad
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("optimize", [torch.optim.AdamW, torch.optim.SGD])
def test_skipped_steps_leave_everything_as_it_was(optimize: Any, fused: bool) -> None:
    policy = gr.on("step:*", [CheckFinite("skip"), ClipByGlobalNorm(0.1), DecayWeights(0.1)])
    plain, model = pair(policy, torch.float32)
    given: dict[str, Any] = {"lr": 0.1, "fused": fused} | ({"momentum": 0.9} if optimize is torch.optim.SGD else {})
    optimizer, other = gr.guard(optimize(model.parameters(), **given), model), optimize(plain.parameters(), **given)
    good = list(batches(3, torch.float32))
    for number, x in enumerate([good[0], math.nan * good[0], good[1], math.inf * good[1], good[2]]):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        before = copy.deepcopy((list(model.parameters()), optimizer.state_dict()["state"]))
        optimizer.step()
        if number in (1, 3):
            after = (list(model.parameters()), optimizer.state_dict()["state"])
            assert repr(after) == repr(before)
            assert model.monitor.latest()["skipped@optimizer:0"] == 1.0
            continue
        other.zero_grad()
        plain(x).square().sum().backward()
        clip_all(plain, 0.1)
        other.step()
        with torch.no_grad():
            for p in plain.parameters():
                p.mul_(1 - 0.1)
    assert_same(model, plain, 1e-6)
    assert model.monitor.skipped == 2


def test_checks_that_raise_warn_and_record() -> None:
    for mode in ("raise", "warn", "record"):
        _, model = pair(gr.on("step:one.weight", CheckFinite(mode)))
        optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
        x = next(batches(1))
        model(x).square().sum().backward()
        model.one.weight.grad[0, :2] = math.inf
        before = model.one.weight.clone()
        if mode == "raise":
            with pytest.raises(
                gr.NonFiniteError, match=r"step 0: first non-finite: step:one\.weight, 16\.7 %"
            ) as caught:
                optimizer.step()
            assert str(caught.value.site) == "step:one.weight"
            assert torch.equal(model.one.weight, before)
            continue
        optimizer.step()
        assert model.monitor.latest()["nonfinite@step:one.weight"] == 2.0 if mode == "record" else True
        if mode == "warn":
            with pytest.warns(gr.RewriteWarning, match=r"step:one\.weight, 16\.7 %"):
                model.monitor.latest()
        assert str(model.monitor.failure().site) == "step:one.weight"


def test_too_many_skips_name_the_step_site() -> None:
    _, model = pair(gr.on("step:one.weight", CheckFinite("skip")))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model, max_consecutive_skips=1)
    model(next(batches(1))).square().sum().backward()
    model.one.weight.grad.fill_(math.nan)
    with pytest.raises(gr.NonFiniteError, match=r"step:one\.weight, 100 %.*1 updates in a row were skipped"):
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_live_bounds_are_read_at_every_step(fused: bool) -> None:
    bound, factor = torch.tensor(1.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    _, model = pair([gr.on("step:one.*", lambda g: g * factor), gr.on("step:two.*", ClipByGlobalNorm(bound))])
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), model)
    for x, now in zip(batches(3), (0.01, 0.02, 1e9), strict=True):
        bound.fill_(now)
        factor.fill_(now)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        raw = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert torch.equal(model.one.weight.grad, raw[0] * now)
        assert float(model.two.weight.grad.norm()) == pytest.approx(min(now, float(raw[2].norm())), rel=1e-12)
    assert len(optimizer.__dict__[GUARD]._update._step_sites._plans) == 1


def test_missing_gradients_are_left_out() -> None:
    asked: list[str] = []

    def policy(site: gr.Site) -> Any:
        if site.kind == "step":
            asked.append(str(site))
            return [ClipByGlobalNorm(0.1), Observe("norm")]
        return None

    _, model = pair(policy)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x = next(batches(1))
    for missing in ((), ("one.bias",), (), ("one.bias",), ("one.weight", "one.bias", "two.weight")):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        for name, p in model.named_parameters():
            if name in missing:
                p.grad = None
        present = [p for p in model.parameters() if p.grad is not None]
        total = math.sqrt(sum(float(p.grad.square().sum()) for p in present))
        optimizer.step()
        if present:
            latest = model.monitor.latest()
            assert latest["total_norm@step:group:default"] == pytest.approx(total)
            assert ("norm@step:one.bias" in latest) == ("one.bias" not in missing)
    names = ["step:one.weight", "step:one.bias", "step:two.weight"]
    assert asked == [*names, "step:one.weight", "step:two.weight"]  # once for each set


def test_sets_of_gradients_that_are_kept_are_bounded() -> None:
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(20))

    net = Lambda(lambda net, x: torch.stack([layer(x) for layer in net.layers]).sum(), layers=layers)
    model = gr.transform(net, gr.on("step:*", Observe("norm")))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for present in range(20):
        for number, p in enumerate(model.parameters()):
            p.grad = torch.ones_like(p) if number == present else None
        optimizer.step()
    assert len(optimizer.__dict__[GUARD]._update._step_sites._plans) == 16


def test_sparse_gradients() -> None:
    def words() -> Lambda:
        return Lambda(
            lambda net, x: net.head(net.table(x)).sum(), table=nn.Embedding(5, 2, sparse=True), head=nn.Linear(2, 1)
        )

    x = torch.tensor([1, 3])
    model = gr.transform(words(), gr.on("step:*", ClipByGlobalNorm(1.0)))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(x).backward()
    with pytest.raises(TypeError, match=r"step:table\.weight: the gradient is torch\.sparse_coo"):
        optimizer.step()
    model = gr.transform(words(), gr.on("step:head.*", Zero()))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = copy.deepcopy(model.state_dict())
    model(x).backward()
    optimizer.step()
    assert torch.equal(model.head.weight, before["head.weight"])
    assert not torch.equal(model.table.weight, before["table.weight"])


def test_errors_name_the_model_among_several_with_one_name() -> None:
    first, second = (gr.transform(nn.Linear(2, 2), gr.on("step:*", ClipByGlobalNorm(1.0))) for _ in range(2))
    optimizer = gr.guard(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1), [first, second])
    for parameter in (*first.parameters(), second.bias):
        parameter.grad = torch.ones_like(parameter)
    second.weight.grad = torch.eye(2).to_sparse()

    with pytest.raises(TypeError, match=r"step:weight#1: the gradient is torch\.sparse_coo"):
        optimizer.step()


def test_rules_are_checked_by_the_guard() -> None:
    _, model = pair([gr.on("step:one.*", Zero()), gr.on("step:tow.*", Zero())])
    model(next(batches(1))).sum().backward()  # no word of step sites here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gr.NoSuchSiteError, match=r"'step:tow\.\*'.*step:two\.weight.*trace_step"):
        gr.guard(optimizer, model)
    _, model = pair(gr.on("step:two.*", Zero()))
    gr.guard(torch.optim.SGD(model.one.parameters(), lr=0.1), model)  # of another optimizer


def test_frozen_and_strange_parameters_are_told() -> None:
    _, model = pair(gr.on("step:two.*", Zero()))
    model.two.weight.requires_grad_(False)
    with pytest.warns(gr.RewriteWarning, match=r"two\.weight, which has requires_grad=False"):
        gr.guard(torch.optim.SGD(model.one.parameters(), lr=0.1), model)
    _, model = pair(gr.on("step:two.*", Zero()))
    strange = nn.Parameter(torch.ones(1))
    optimizer = gr.guard(torch.optim.SGD([strange], lr=0.1), model)
    with pytest.warns(gr.RewriteWarning, match="none of the optimizer's parameters belongs to the model"):
        optimizer.step()
    optimizer.step()


def test_what_is_not_allowed_at_step_sites() -> None:
    _, model = pair(gr.on("step:*", lambda g: g.sum()))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(next(batches(1))).sum().backward()
    with pytest.raises(gr.CallbackError, match=r"step:one\.weight: .* changed the shape"):
        optimizer.step()
    _, model = pair(gr.on("gradient:*", DecayWeights(0.1)))
    with pytest.raises(gr.PolicyError, match="applies to step"):
        model.trace(next(batches(1)))


def test_a_policy_without_a_guard_warns_at_the_second_backward() -> None:
    for policy in (gr.on("step:*", Zero()), lambda site: Zero() if site.kind == "step" else None):
        _, model = pair(policy)
        x = next(batches(1))
        model(x).sum().backward()
        with pytest.warns(gr.RewriteWarning, match=r"step:one\.weight.*gr\.guard\(optimizer, model\)"):
            model(x).sum().backward()
        model(x).sum().backward()
    _, model = pair(gr.on("step:*", Zero()))
    gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model.monitor)  # a bare monitor has no step sites
    model(x).sum().backward()
    with pytest.warns(gr.RewriteWarning, match="step sites"):
        model(x).sum().backward()


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    _, model = pair(gr.on("step:two.weight", ClipByValue(0.01, log=True)))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(next(batches(1))).square().sum().backward()
    grad = model.two.weight.grad.clone()
    with caplog.at_level(logging.INFO, "gradrewrite.monitor"):
        optimizer.step()
        model.monitor.latest()
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("gradrewrite")]
    largest, mean = float(grad.abs().max()), float(grad.abs().mean())
    assert line == f"parameter=two.weight need clipping, max grad={largest:.6g} avg grad={mean:.6g}"


def test_param_groups_and_one_that_is_added_later() -> None:
    plain, model = pair(gr.on("step:*", ClipByGlobalNorm(0.01)))
    optimizer = torch.optim.SGD([{"params": model.one.weight, "lr": 0.2}, {"params": model.one.bias}], lr=0.1)
    other = torch.optim.SGD([{"params": plain.one.weight, "lr": 0.2}, {"params": plain.one.bias}], lr=0.1)
    gr.guard(optimizer, model)
    for number, x in enumerate(batches(4)):
        if number == 2:
            optimizer.add_param_group({"params": [model.two.weight]})
            other.add_param_group({"params": [plain.two.weight]})
        for module, each in ((model, optimizer), (plain, other)):
            each.zero_grad()
            module(x).square().sum().backward()
        clip_all(plain if number >= 2 else plain.one, 0.01)
        optimizer.step()
        other.step()
    assert_same(model, plain)


def test_several_models_in_one_optimizer() -> None:
    """One group over both; the second model's own policy holds at its sites."""
    torch.manual_seed(0)
    plain = [nn.Linear(4, 3).double(), nn.Linear(3, 2).double()]
    clip = gr.on("step:*", ClipByGlobalNorm(0.05))
    first, second = (
        gr.transform(copy.deepcopy(plain[0]), clip),
        gr.transform(copy.deepcopy(plain[1]), [gr.on("step:bias", Zero()), clip]),
    )
    optimizer = gr.guard(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1), [first, second])
    other = torch.optim.SGD([p for m in plain for p in m.parameters()], lr=0.1)
    for x in batches(3):
        optimizer.zero_grad()
        second(first(x)).square().sum().backward()
        optimizer.step()
        other.zero_grad()
        plain[1](plain[0](x)).square().sum().backward()
        plain[1].bias.grad.zero_()
        total = clip_all(nn.ModuleList(plain), 0.05)
        other.step()
        for model in (first, second):
            assert model.monitor.latest()["total_norm@step:group:default"] == pytest.approx(total)
    assert_same(first, plain[0])
    assert_same(second, plain[1])


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([TwoLayers(bias=False), TwoLayers(bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        return loss_of(list(self.nets), x)


def loss_of(nets: Sequence[nn.Module], x: Tensor) -> Tensor:
    first, second = nets
    return first(x).square().sum() + 2 * second(x).square().sum()


SAME_NAMES: dict[str, Any] = {
    "value": ClipByValue(0.01),
    "norm": ClipByNorm(0.1),
    "global norm": ClipByGlobalNorm(0.1),
    "l2": L2(0.3),
    "scale": Scale(0.5),
    "function": lambda g: g * 2,
}


@pytest.mark.long
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", SAME_NAMES)
def test_two_models_with_equal_names_in_one_optimizer(name: str, fused: bool) -> None:
    """As one model that holds both."""
    torch.manual_seed(0)
    plain = Pair()
    policy = gr.on("step:*", SAME_NAMES[name])
    models = [gr.transform(net, policy) for net in copy.deepcopy(plain).nets]
    one = gr.transform(plain, policy)
    x = torch.randn(5, 4)
    optimizer = gr.guard(torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1, fused=fused), models)
    loss_of(models, x).backward()
    optimizer.step()
    other = gr.guard(torch.optim.SGD(one.parameters(), lr=0.1, fused=fused), one)
    one(x).backward()
    other.step()
    for p, wanted in zip((p for m in models for p in m.parameters()), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad, wanted.grad)
        torch.testing.assert_close(p, wanted)


def test_records_of_two_models_with_equal_names() -> None:
    """The second model's sites end in ``#1``, in its own monitor too, whichever gradients are there."""
    torch.manual_seed(0)
    policy = gr.on("step:*", [CheckFinite("record"), Observe("norm"), Keep()])
    models = [gr.transform(nn.Linear(4, 2), policy) for _ in range(2)]
    optimizer = gr.guard(torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.0), models)
    x = torch.randn(5, 4)
    loss_of(models, x).backward()
    optimizer.step()
    for model in models:
        records, kept = model.monitor.latest(), {str(site): t for site, t in model.monitor.kept().items()}
        for end, owner in zip(("", "#1"), models, strict=True):
            for name, p in owner.named_parameters():
                assert p.grad is not None
                assert records[f"norm@step:{name}{end}"] == pytest.approx(p.grad.norm().item())
                torch.testing.assert_close(kept[f"step:{name}{end}"], p.grad)

    graph = models[0].trace_step(optimizer)
    wanted = ["step:weight", "step:bias", "step:weight#1", "step:bias#1"]
    assert [str(site) for site in graph.sites] == [str(site) for site in graph.provenance.anchors] == wanted

    optimizer.zero_grad()
    models[1](x).sum().backward()
    optimizer.step()
    records = models[1].monitor.latest()
    assert "norm@step:weight#1" in records
    assert "norm@step:weight" not in records


def test_graph_breaks_do_not_split_the_group() -> None:
    class Broken(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            torch._dynamo.graph_break()
            return self.two(x.tanh())

    torch.manual_seed(0)
    plain = Broken().double()
    model = gr.transform(copy.deepcopy(plain), gr.on("step:*", ClipByGlobalNorm(0.01)), fullgraph=False)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1.0), model)
    other = torch.optim.SGD(plain.parameters(), lr=1.0)
    with pytest.warns(gr.RewriteWarning, match="skipped a region"):
        model(next(batches(1)))
    for x in batches(2):
        for module, each in ((model, optimizer), (plain, other)):
            each.zero_grad()
            module(x).square().sum().backward()
        clip_all(plain, 0.01)
        optimizer.step()
        other.step()
    assert_same(model, plain)


@pytest.mark.broad
def test_fused_optimizers_divide_by_the_norm_over_the_bound() -> None:
    """Below the bound not a bit changes; above it the quotient differs from the normative product by 2 ulp at most.

    In bfloat16 ``.grad`` is rounded, but the kernel uses the quotient before that.
    """
    for bound, acts in ((1e3, False), (0.37, True)):
        for dtype in (torch.float32, torch.bfloat16):
            plain, model = pair(gr.on("step:*", [CheckFinite("skip"), ClipByGlobalNorm(bound)]), dtype)
            optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), model)
            other = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
            graph = model.trace_step(optimizer)
            assert graph.provenance.outputs[-2:] == ("grad_scale", "records")
            for x in batches(3, dtype):
                for module in (model, plain):
                    module.zero_grad()
                    module(x).float().square().sum().backward()
                raw = [p.grad.clone() for p in model.parameters()]
                optimizer.step()
                total = torch.tensor(model.monitor.latest()["total_norm@step:group:default"])
                for p, g, q in zip(model.parameters(), raw, plain.parameters(), strict=True):
                    wanted = (g.float() * (bound / total)).to(dtype) if acts else g
                    spacing = torch.finfo(dtype).eps * wanted.abs().float()
                    assert bool(((p.grad.float() - wanted.float()).abs() <= 2 * spacing).all())
                    q.grad.copy_(p.grad)
                other.step()
                for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(p, q) or (acts and dtype == torch.bfloat16)
                    q.data.copy_(p)


def test_decay_after_the_update() -> None:
    rate = torch.tensor(0.25)
    for fused in (False, True):
        plain, model = pair([gr.on("step:one.*", DecayWeights(0.1)), gr.on("step:two.*", DecayWeights(rate))])
        optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), model)
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        for x in batches(2):
            for module, each in ((model, optimizer), (plain, other)):
                each.zero_grad()
                module(x).square().sum().backward()
                each.step()
            with torch.no_grad():
                for p in plain.one.parameters():
                    p.mul_(0.9)
                plain.two.weight.mul_(0.75)
        assert_same(model, plain, 1e-13)


def test_l2_is_the_weight_decay_of_torch_and_caffe() -> None:
    plain, model = pair(gr.on("step:*", L2(0.1)))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for x in batches(3):
        for module, each in ((model, optimizer), (plain, other)):
            each.zero_grad()
            module(x).square().sum().backward()
            each.step()
    assert_same(model, plain, 1e-13)


@pytest.mark.pure
def test_settings_of_weight_decay() -> None:
    for rate in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="DecayWeights: rate must"):
            DecayWeights(rate)
    with pytest.raises(ValueError, match="L2: rate must be finite"):
        L2(math.inf)
    for action in (L2, DecayWeights):
        with pytest.raises(TypeError):
            action("0.1")


def test_the_step_graph_is_shown_and_drawn(tmp_path: Any) -> None:
    policy = [
        gr.on("step:*", [CheckFinite("skip"), ClipByGlobalNorm(1.0)]),
        gr.on("step:one.weight", lambda g, w: g + w),
    ]
    _, model = pair(policy, torch.float32)
    before = copy.deepcopy(model.state_dict())
    for fused, label in ((True, "grad_scale"), (False, "factor")):
        graph = model.trace_step(torch.optim.AdamW(model.parameters(), fused=fused))
        assert [str(site) for site in graph.sites] == ["step:one.weight", "step:one.bias", "step:two.weight"]
        assert [(str(e.site), e.text) for e in graph.edits if e.nodes and "lambda" in e.text]
        assert graph.provenance.outputs == (*map(str, graph.sites), label, "records")
        assert "ClipByGlobalNorm(1.0) at step:one.weight" in graph.code
        assert "step:one.weight" in graph.diff()
        assert "grad_one_weight" in str(graph)
        for view in ("overview", "ladder"):
            path = viz.draw(graph, view=view).render(str(tmp_path / view), format="svg")
            inserted = {name for edit in graph.edits for name in edit.nodes}
            if view == "ladder":
                text = Path(path).read_text()
                assert all(f'data-node="{name}"' in text for name in inserted)
        assert viz.to_networkx(graph).number_of_nodes() > len(graph.sites)
        assert "html" in viz.draw(graph).render(str(tmp_path / "page"), format="html")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(gr.TraceError, match="none of the optimizer's parameters"):
        pair([])[1].trace_step(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, got int"):
        model.trace_step(3)


def test_a_backend_and_its_guard() -> None:
    from gradrewrite.backends.backend import make_backend
    from gradrewrite.backends.engines import AotEager

    torch.manual_seed(0)
    plain = TwoLayers(bias=False).double()
    other = copy.deepcopy(plain)
    backend = make_backend(gr.on("step:*", ClipByGlobalNorm(0.01)), None, AotEager())
    model = copy.deepcopy(plain)
    compiled = torch.compile(model, backend=backend)
    optimizer, reference = (
        gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), backend),
        torch.optim.SGD(other.parameters(), 0.1),
    )
    for x in batches(2):
        for module, each in ((compiled, optimizer), (other, reference)):
            each.zero_grad()
            module(x).square().sum().backward()
        clip_all(other, 0.01)
        optimizer.step()
        reference.step()
    assert_same(model, other)
    assert "total_norm@step:group:default" in backend.monitor.latest()


def test_functions_of_two_arguments_in_the_backward() -> None:
    """At a gradient the second one is the parameter, at an error the activation."""
    policy = [gr.on("gradient:one.weight", lambda g, w: g + 0.1 * w), gr.on("error:one", lambda e, h: e * (1 + h * h))]
    plain, model = pair(policy)
    x = next(batches(1))
    model(x).square().sum().backward()
    plain.one.register_forward_hook(lambda m, i, out: out.register_hook(lambda e: e * (1 + out * out)) and None)
    plain(x).square().sum().backward()
    plain.one.weight.grad.add_(plain.one.weight.detach(), alpha=0.1)
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-13, atol=1e-15)


class Wrapped(torch.optim.Optimizer):
    """As accelerate's: steps where gradients are complete, here at every second call."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.calls = optimizer, 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return self.optimizer.step() if self.calls % 2 == 0 else None


def test_wrapped_optimizers_are_guarded_where_they_step() -> None:
    plain, model = pair(gr.on("step:*", ClipByGlobalNorm(0.05)))
    inner, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    wrapper = Wrapped(inner)
    assert gr.guard(wrapper, model) is wrapper
    for x in batches(4):
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        wrapper.step()
        if wrapper.calls % 2 == 0:
            clip_all(plain, 0.05)
            other.step()
            inner.zero_grad()
            other.zero_grad()
    assert_same(model, plain)
    with pytest.raises(TypeError, match="has a guard already"):
        gr.guard(inner, model)


def test_a_model_that_is_gone_is_told() -> None:
    plain = TwoLayers(bias=False)
    optimizer = gr.guard(torch.optim.SGD(plain.parameters(), lr=0.1), gr.transform(plain, gr.on("step:*", Zero())))
    with pytest.warns(gr.RewriteWarning, match="the rewritten model is gone"):
        optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("stranger", [False, True])
def test_a_group_of_some_gradients_of_a_fused_optimizer(stranger: bool) -> None:
    """The kernel would divide all gradients, so those of the group are multiplied."""
    net = TwoLayers(bias=False)
    model = gr.transform(net, gr.on("step:*" if stranger else "step:one.*", ClipByGlobalNorm(0.5)))
    owned = [*net.parameters(), *([nn.Parameter(torch.ones(3))] if stranger else [])]
    optimizer = gr.guard(torch.optim.AdamW(owned, fused=True), model)
    for p in owned:
        p.grad = torch.ones_like(p)
    members = list(net.parameters()) if stranger else list(net.one.parameters())
    factor = 0.5 / math.sqrt(sum(p.numel() for p in members))
    optimizer.step()
    for p in owned:
        is_member = any(p is member for member in members)
        torch.testing.assert_close(p.grad, torch.full_like(p, factor if is_member else 1.0))


@pytest.mark.parametrize("fused", [False, True])
def test_groups_that_share_members_act_one_after_the_other(fused: bool) -> None:
    net = TwoLayers(bias=False)
    first, second = ClipByGlobalNorm(0.5), ClipByGlobalNorm(0.1, group="one")
    model = gr.transform(net, [gr.on("step:*", first), gr.on("step:one.*", second)])
    optimizer = gr.guard(torch.optim.AdamW(net.parameters(), fused=fused), model)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    number, ones = sum(p.numel() for p in net.parameters()), sum(p.numel() for p in net.one.parameters())
    optimizer.step()
    torch.testing.assert_close(net.two.weight.grad, torch.full((2, 3), 0.5 / math.sqrt(number)))
    torch.testing.assert_close(net.one.bias.grad, torch.full((3,), 0.1 / math.sqrt(ones)))
    latest = model.monitor.latest()
    assert latest["total_norm@step:group:default"] == pytest.approx(math.sqrt(number))
    assert latest["total_norm@step:group:one"] == pytest.approx(0.5 * math.sqrt(ones / number))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_leaves_gradients_as_they_are(bad: float, fused: bool) -> None:
    net = TwoLayers(bias=False)
    model = gr.transform(net, gr.on("step:*", ClipByGlobalNorm(0.1)))
    optimizer = gr.guard(torch.optim.SGD(net.parameters(), lr=0.0, fused=fused), model)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    net.one.bias.grad[0] = bad
    before = [p.grad.clone() for p in net.parameters()]
    optimizer.step()
    for p, g in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=0, atol=0, equal_nan=True)


def test_figures_that_are_measured_with_the_norms_keep_their_names() -> None:
    net = TwoLayers(bias=False)
    actions = [Observe("max_abs", "zeros"), CheckFinite("record"), CheckFinite("skip"), Observe("min")]
    model = gr.transform(net, [gr.on("step:*", ClipByGlobalNorm(1.0)), gr.on("step:one.*", actions)])
    optimizer = gr.guard(torch.optim.SGD(net.parameters(), lr=0.0), model)
    for p in net.parameters():
        p.grad = torch.arange(-1.0, p.numel() - 1).reshape(p.shape)
    net.one.bias.grad[0] = math.inf
    optimizer.step()
    latest = model.monitor.latest()
    got = {name: latest[f"{name}@step:one.weight"] for name in ("max_abs", "zeros", "nonfinite", "nonfinite.2", "min")}
    assert got == {"max_abs": 10.0, "zeros": pytest.approx(1 / 12), "nonfinite": 0.0, "nonfinite.2": 0.0, "min": -1.0}
    got = {name: latest[f"{name}@step:one.bias"] for name in ("max_abs", "nonfinite", "nonfinite.2", "min")}
    assert got == {"max_abs": math.inf, "nonfinite": 1.0, "nonfinite.2": 1.0, "min": 0.0}
    assert latest["total_norm@step:group:default"] == math.inf
    assert latest["skipped@optimizer:0"] == 1.0


@pytest.mark.broad
def test_nothing_outlives_model_and_optimizer() -> None:
    _, model = pair(gr.on("step:*", [CheckFinite("skip"), ClipByGlobalNorm(1.0), lambda g, w: g + w]))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for x in batches(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    gone = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.monitor), weakref.ref(model.one.weight)]
    del model, optimizer, x
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


@pytest.mark.parametrize("fused", [False, True])
def test_checks_in_the_backward_and_at_the_step_both_skip(fused: bool) -> None:
    check = CheckFinite("skip")
    _, model = pair([gr.on("gradient:*", check), gr.on("step:one.bias", check), gr.on("step:two.weight", NanToNum())])
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), fused=fused), model)
    x = next(batches(1))
    for bad_input, bad_sum in ((False, True), (True, False)):
        optimizer.zero_grad()
        model(x * math.nan if bad_input else x).square().sum().backward()
        if bad_input:
            model.one.bias.grad.zero_()  # what the step site sees is finite
        if bad_sum:
            model.one.bias.grad[0] = math.inf
        before = model.two.weight.clone()
        optimizer.step()
        assert torch.equal(model.two.weight, before)
        assert model.monitor.latest()["skipped@optimizer:0"] == 1.0
    assert model.monitor.skipped == 2


@pytest.mark.long
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["global norm", "checked"])
def test_a_step_inside_of_torch_compile(name: str, fused: bool) -> None:
    """Equal to the step outside of it, and a step that is skipped is."""
    actions: dict[str, Any] = {
        "global norm": ClipByGlobalNorm(0.1),
        "checked": [CheckFinite("skip"), ClipByNorm(0.1), DecayWeights(0.1)],
    }
    plain, model = pair(gr.on("step:*", actions[name]), torch.float32)
    other = gr.transform(plain, gr.on("step:*", actions[name]))
    guarded = [gr.guard(torch.optim.SGD(m.parameters(), lr=0.1, fused=fused), m) for m in (other, model)]

    @torch.compile(backend="eager")
    def compiled_step() -> None:
        guarded[1].step()

    torch.manual_seed(1)
    for n in range(3):
        x = torch.randn(6, 4) * (math.nan if n == 1 and name == "checked" else 1.0)
        for m, optimizer, run in ((other, guarded[0], guarded[0].step), (model, guarded[1], compiled_step)):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            run()
        assert_same(model, plain)
    assert model.monitor.skipped == other.monitor.skipped == (name == "checked")
    assert model.monitor.latest() == pytest.approx(other.monitor.latest(), nan_ok=True)


@pytest.mark.parametrize("policy", [[], gr.on("gradient:*", Zero())], ids=["empty", "no steps"])
def test_the_step_graph_of_a_policy_without_actions_at_steps(policy: gr.Policy, tmp_path: Path) -> None:
    """As the hint of NoSuchSiteError has it: the graph lists all sites."""
    model = gr.transform(TwoLayers(bias=False), policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for is_guarded in (False, True):
        if is_guarded:
            gr.guard(optimizer, model)
        graph = model.trace_step(optimizer)
        assert [str(site) for site in graph.sites] == ["step:one.weight", "step:one.bias", "step:two.weight"]
        assert not graph.edits
        assert graph.diff() == "no edits: the graph is as it was"
        for view in ("overview", "ladder"):
            viz.draw(graph, view=view).render(str(tmp_path / view), format="svg")


@pytest.mark.broad
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=[pytest.mark.inductor, pytest.mark.slow])])
@pytest.mark.parametrize("kind", ["gradient", "step"])
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch.compile runs code of the old size, of a plain model too")
def test_parameters_that_are_pruned(kind: str, compiled: bool) -> None:
    """Fewer rows, with the strides that there were; an action reads the size, and another one the parameter."""
    torch.manual_seed(0)
    net = nn.Linear(3, 6, bias=False)
    model = gr.transform(net, gr.on(f"{kind}:*", [lambda g: g / g.shape[0], L2(0.5), ClipByGlobalNorm(0.1)]))
    if compiled:
        model.compile()
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.0), model)
    for rows in (6, 4, 1):
        net.weight.data = net.weight.data[:rows]
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        wanted = torch.full((rows, 3), 2.0 / rows) + 0.5 * net.weight.detach()
        torch.testing.assert_close(net.weight.grad, wanted * (0.1 / wanted.norm()))
