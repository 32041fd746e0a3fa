"""Skipped updates after spikes: decisions, verdict, counts, state, records, errors."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradrewrite as gr
from gradrewrite.backends.engines import AotEager
from gradrewrite.optimizer.spikes import Judge, Judging, Losses, remember
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, DecayWeights, Observe, SkipSpikes
from gradrewrite.policy.insertions import JudgeUpdate
from gradrewrite.policy.state_store import StateStore
from gradrewrite.sites import Site

from models.optimizers import OPTIMIZERS, USUAL
from models.small import Lambda, TwoLayers
from models.spikes import Reference, trace

INF, NAN = math.inf, math.nan
NORM, SPIKE, LIMIT = (f"{name}@step:group:default" for name in ("total_norm", "spike", "spike_limit"))


class Run:
    """A model of one parameter, fed with one figure a step: its gradient's norm, or its loss."""

    def __init__(self, action: Any, optimize: Any = OPTIMIZERS["sgd"], **guard: Any) -> None:
        # A parameter whose gradient is the input.
        net = Lambda(lambda net, x: net.weight * x, weight=nn.Parameter(torch.zeros((), dtype=torch.float64)))
        self.model = gr.transform(net, gr.on("step:*", action))
        self.optimizer = gr.guard(optimize(self.model.parameters()), self.model, **guard)
        self.monitor = self.model.monitor

    def step(self, norm: float, *losses: float) -> bool:
        """Make one step without a backward; whether it was skipped."""
        self.model.weight.grad = torch.tensor(norm, dtype=torch.float64)
        for loss in losses:
            self.monitor.log("loss", loss)
        before = self.monitor.skipped
        self.optimizer.step()
        return self.monitor.skipped > before

    def figures(self, record: str) -> list[float]:
        return self.monitor.history(f"{record}@step:group:default")


@pytest.mark.broad
@pytest.mark.pure
@pytest.mark.parametrize(("sigma", "window"), [(6.0, 128), (3.0, 7), (2.5, 2), (4.0, 33)])
@pytest.mark.parametrize("seed", [0, 1])
def test_decisions_equal_the_definition_over_ten_thousand_steps(sigma: float, window: int, seed: int) -> None:
    """The state function of the action, with updates that others skip; what is remembered is what was accepted."""
    figures, draw = trace(seed, 10_000 if (window, seed) in ((128, 0), (7, 1)) else 1_500), random.Random(seed)
    states, reference = StateStore(), Reference(sigma, window)
    action = SkipSpikes(sigma, window=window)
    effect = action.at(Site("step", "w")).effect
    assert isinstance(effect, JudgeUpdate)
    judging = Judging(Judge.at(action, effect, "here"), states, AotEager())
    numbers = {False: 0, True: 0}
    for n, figure in enumerate(figures):
        others = draw.random() < 0.01
        judgement = judging(torch.tensor(figure, dtype=torch.float64))
        limit = reference.limit()
        spike = reference.is_spike(figure, skipped=others)
        assert float(judgement.verdict) == spike, (n, figure, limit)
        assert float(judgement.values[1]) == pytest.approx(limit, rel=1e-12)
        remember([judgement], torch.tensor([float(spike or others)]))
        numbers[spike] += 1
    assert min(numbers.values()) > 20
    found = states.state_dict()["states"]
    assert sorted(found["here/SkipSpikes.window"].tolist()) == sorted(reference.accepted)


@pytest.mark.sample(12)
@pytest.mark.long
@pytest.mark.parametrize("of", ["total_norm", "loss"])
def test_decisions_of_a_guarded_optimizer_equal_the_definition(of: Any) -> None:
    """A trace of 10,000 steps; every 97th update fails a check too, so that its figure is not accepted."""
    run = Run([SkipSpikes(5.0, of=of), CheckFinite("skip")], OPTIMIZERS["sgd fused"], max_consecutive_skips=10_000)
    reference, wanted, norms = Reference(5.0, 128), [], []
    figures = trace(3, 10_000)
    for n, figure in enumerate(figures):
        others = of == "loss" and n % 97 == 5
        norms.append((NAN if others else 1.0, figure) if of == "loss" else (figure,))
        wanted.append(reference.is_spike(figure, skipped=others) or others)
    before = 0.0
    for n, values in enumerate(norms):
        run.model.weight.grad = torch.tensor(values[0], dtype=torch.float64)
        if of == "loss":
            run.monitor.log("loss", values[1])
        run.optimizer.step()
        weight = run.model.weight.item()
        if n > 0:  # momentum moves it in every update that is made
            assert (weight == before) == wanted[n], n
        before = weight
    assert run.monitor.skipped == sum(wanted) > 100


@pytest.mark.parametrize("window", [2, 3, 4, 9])
def test_nothing_is_skipped_before_half_of_the_window_is_filled(window: int) -> None:
    """Half of an odd window is rounded down, and is 2 at least."""
    half = max(2, window // 2)
    run = Run(SkipSpikes(1.0, window=window))
    skipped = [run.step(norm) for norm in [1.0, NAN, *[1.0] * (half - 2), 10.0, 1e9]]
    assert skipped == [False, True, *[False] * (half - 2), False, True]
    assert [limit < INF for limit in run.figures("spike_limit")] == [False] * (half + 1) + [True]


@pytest.mark.broad
def test_equal_figures_have_their_value_as_the_limit() -> None:
    run = Run(SkipSpikes(1.0, window=128))
    assert not any(run.step(0.1) for _ in range(200))
    assert run.figures("spike_limit")[-1] == 0.1
    assert run.step(math.nextafter(0.1, 1.0))
    assert not run.step(0.1)


def test_large_figures_do_not_overflow() -> None:
    run = Run(SkipSpikes(3.0, window=4))
    assert [run.step(norm * 1e300) for norm in (1.0, 1.1, 0.9, 1.05, 5.0, 1.0)] == [False] * 4 + [True, False]
    assert max(run.figures("spike_limit")[2:]) < 5e300


@pytest.mark.broad
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("sharing", ["same", "other group", "largest"])
def test_the_norm_is_that_before_the_clip(first: bool, fused: bool, sharing: str) -> None:
    given = {"other group": {"group": "b"}, "largest": {"norm_type": INF}}.get(sharing, {})
    clip, skip = ClipByGlobalNorm(0.1, **given), SkipSpikes(3.0, window=4)
    torch.manual_seed(0)
    plain = TwoLayers()
    model = gr.transform(copy.deepcopy(plain), gr.on("step:*", [clip, skip] if first else [skip, clip]))
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), fused=fused), model)
    wanted = []
    for n in range(6):
        optimizer.zero_grad()
        (model(torch.linspace(-1, 1, 20).view(5, 4)).square().mean() * (1e3 if n == 4 else 1 + n / 10)).backward()
        wanted.append(math.hypot(*(float(p.grad.norm()) for p in model.parameters())))
        before = [p.clone() for p in model.parameters()]
        optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)) == (n == 4)
    name = "total_norm.2" if sharing == "largest" else "total_norm"
    assert model.monitor.history(f"{name}@step:group:default") == pytest.approx(wanted, rel=1e-6)
    assert model.monitor.history(SPIKE) == [0, 0, 0, 0, 1, 0]
    assert f"{name}.2@step:group:default" not in model.monitor.latest()
    assert model.trace_step(optimizer).code.count("ops.gradrewrite.measure.default(") == 1  # one read of the gradients


@pytest.mark.broad
@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("of", ["total_norm", "loss"])
def test_a_skipped_step_leaves_everything_as_it_was(name: str, of: Any) -> None:
    """Parameters, moments, step counters and the window, bit for bit, beside a clip and a decay."""
    torch.manual_seed(0)
    policy = gr.on("step:*", [ClipByGlobalNorm(0.1), SkipSpikes(3.0, window=4, of=of), DecayWeights(0.1)])
    model = gr.transform(TwoLayers(), policy)
    optimizer = gr.guard(OPTIMIZERS[name](model.parameters()), model)

    def step(size: float) -> bool:
        """Whether anything has changed."""
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 20).view(5, 4)).square().mean() * size
        loss.backward()
        model.monitor.log("loss", loss)
        before = everything()
        optimizer.step()
        return repr(before) != repr(everything())

    def everything() -> Any:
        torch.set_printoptions(precision=20)
        return copy.deepcopy(
            (list(model.parameters()), optimizer.state_dict()["state"], gr.state_dict(model)["states"])
        )

    try:
        sizes = [1.0, 1.1, 0.9, 1e6, INF, 0.3, NAN]
        assert [step(size) for size in sizes] == [True, True, True, False, False, True, False]
    finally:
        torch.set_printoptions(profile="default")
    assert model.monitor.skipped == 3
    assert model.monitor.history("skipped@optimizer:0") == [0, 0, 0, 1, 1, 0, 1]


@pytest.mark.broad
@pytest.mark.parametrize("of", ["total_norm", "loss"])
def test_a_resumed_run_goes_on_bit_by_bit(of: Any, tmp_path: Path) -> None:
    def make() -> Run:
        return Run(SkipSpikes(3.0, window=16, of=of), OPTIMIZERS["adamw"], max_consecutive_skips=1000)

    figures = trace(5, 600)
    whole, first, second = make(), make(), make()
    for figure in figures[:300]:
        whole.step(figure, figure)
        first.step(figure, figure)
    torch.save((gr.state_dict(first.model), first.optimizer.state_dict()), tmp_path / "state.pt")
    torch.save(first.model.state_dict(), tmp_path / "model.pt")
    state, optimizer = torch.load(tmp_path / "state.pt")
    gr.load_state_dict(second.model, state)
    second.optimizer.load_state_dict(optimizer)
    second.model.load_state_dict(torch.load(tmp_path / "model.pt"))
    for figure in figures[300:]:
        assert whole.step(figure, figure) == second.step(figure, figure)
    assert torch.equal(whole.model.weight, second.model.weight)
    states = [gr.state_dict(run.model)["states"] for run in (whole, second)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert list(states[0]) == ["step:group:default/SkipSpikes.count", "step:group:default/SkipSpikes.window"]


def test_what_others_skip_is_not_accepted() -> None:
    """A check that fails, and a GradScaler that found an infinity for a fused optimizer."""
    model = gr.transform(
        nn.Linear(2, 1), [gr.on("step:*", SkipSpikes(window=4)), gr.on("error:/linear", CheckFinite("skip"))]
    )
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), fused=True), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for bad in (False, True, False):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).sum()
        scaler.scale(loss).backward()
        if bad:
            model.bias.grad.fill_(INF)
        scaler.step(optimizer)
        scaler.update()
    assert int(gr.state_dict(model)["states"]["step:group:default/SkipSpikes.count"]) == 2
    loss = model(torch.ones(3, 2)).sum()
    (loss * torch.tensor(INF)).backward()  # the check of the error fails, and the gradients are made finite again
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert model.monitor.latest()[SPIKE] == 0
    assert model.monitor.latest()["skipped@optimizer:0"] == 1
    assert int(gr.state_dict(model)["states"]["step:group:default/SkipSpikes.count"]) == 2


@pytest.mark.broad
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_norms_are_unscaled_under_a_grad_scaler(fused: bool, clip: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    plain, actions = nn.Linear(3, 2), [SkipSpikes(3.0, window=4), *([ClipByGlobalNorm(0.5)] if clip else [])]
    model = gr.transform(copy.deepcopy(plain), gr.on("step:*", actions))
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused), model)
    other, skipped = torch.optim.AdamW(plain.parameters(), lr=0.1), []
    for n in range(8):
        x = torch.linspace(-1, 2, 12).view(4, 3) * (50 if n == 5 else 1 + n / 10)
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(model.monitor.latest()["skipped@optimizer:0"])
        if n == 5:
            continue
        other.zero_grad()
        plain(x).square().mean().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        assert model.monitor.latest()[NORM] == pytest.approx(float(norm), rel=1e-5)
        if clip and norm > 0.5:
            for p in plain.parameters():
                p.grad.mul_(0.5 / norm)
        other.step()
    assert skipped == [0, 0, 0, 0, 0, 1, 0, 0]
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.broad
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_skips_takes_the_losses_along(fused: bool) -> None:
    """An optimizer that is not fused is not called where a GradScaler found an infinity."""
    model = gr.transform(nn.Linear(2, 1), gr.on("step:*", SkipSpikes(window=4, of="loss")))
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), fused=fused), model)
    scaler, given = torch.amp.GradScaler("cpu", init_scale=8.0), [1.0, 100.0, 2.0]
    for early in (False, True):
        found = []
        for n, value in enumerate(given):
            if early:
                model.monitor.log("loss", value)
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(3, 2)).sum()).backward()
            if not early:
                model.monitor.log("loss", value)
            if n == 1:
                model.bias.grad.fill_(INF)
            scaler.step(optimizer)
            scaler.update()
            found.append(model.monitor.latest()["loss@step:group:default"])
        assert found == ([1.0, 100.0, 2.0] if fused else [1.0, 1.0, 2.0])


def test_losses_of_gradients_that_are_thrown_away() -> None:
    losses = Losses()
    for backward, cleared in ((1, False), (1, True), (2, True), (3, False)):
        losses.note_backward(backward, lambda cleared=cleared: cleared)
        losses.note(torch.tensor([float(backward)]))
    assert losses.sums(torch.device("cpu")).tolist() == [6.0, 3.0]  # of the losses of the first backward one is dropped
    losses.drop()
    assert losses.sums(torch.device("cpu")).tolist() == [3.0, 1.0]  # of three losses and two backwards
    losses.clear()
    assert len(losses) == 0


def test_the_loss_is_the_mean_over_micro_batches() -> None:
    model = gr.transform(nn.Linear(2, 1), gr.on("step:*", SkipSpikes(2.0, window=4, of="loss")))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    rounds = [[1.0, 2.0], [2.0, 3.0, 1.0], [1.0, 1.5], [2.0, 1.0], [1.0, 90.0], [1.5, 1.5]]
    for n, values in enumerate(rounds):
        optimizer.zero_grad()
        for value in values:
            model(torch.ones(1, 2)).sum().backward()
            model.monitor.log("loss", value if n % 2 else torch.tensor(value))
        optimizer.step()
    assert model.monitor.history("loss@step:group:default") == [sum(v) / len(v) for v in rounds]
    assert model.monitor.history("loss@run") == [v[-1] for v in rounds]
    assert model.monitor.history(SPIKE) == [0, 0, 0, 0, 1, 0]


def test_a_step_without_a_loss_is_an_error() -> None:
    run = Run(SkipSpikes(of="loss"))
    for _ in range(2):
        with pytest.raises(
            gr.PolicyError, match=r'no.* logged since the last step.*model\.monitor\.log\("loss", loss\)'
        ):
            run.step(1.0)
        assert run.model.weight.item() == 0.0
    assert not run.step(1.0, 2.0)
    with pytest.raises(gr.PolicyError, match="no-loss"):
        run.step(1.0)
    assert not run.step(1.0, 2.0)


def test_log_works_where_no_backward_records_anything() -> None:
    model = gr.transform(nn.Linear(2, 1), gr.on("step:*", SkipSpikes()))
    with pytest.raises(RuntimeError, match="none has been recorded yet"):
        model.monitor.log("loss", 1.0)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    for n in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        model.monitor.log("loss", n)
        model.monitor.log("tokens", 10 * n)
        if n == 2:
            model.monitor.log("rare", 7)
        optimizer.step()
        model.monitor.log("late", 100 * n)
    assert "rare@run" in model.monitor.latest()
    assert [model.monitor.history(f"{name}@run") for name in ("loss", "tokens", "late")] == [
        [0.0, 1.0, 2.0], [0.0, 10.0, 20.0], [0.0, 100.0, 200.0]
    ]  # fmt: skip


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("bad", "text"), [(9.0, r"was 9, above its limit [0-9.]+"), (NAN, "was nan, which is not finite")]
)
def test_too_many_spikes_are_an_error_of_spikes(fused: bool, bad: float, text: str) -> None:
    run = Run(SkipSpikes(3.0, window=4), OPTIMIZERS["adamw fused" if fused else "adamw"], max_consecutive_skips=3)
    for norm in (1.0, 1.1, 0.9, bad, bad):
        run.step(norm)
    with pytest.raises(gr.SpikeError, match=rf"step 5: total_norm@step:group:default {text}; 3 updates in a row") as e:
        run.step(bad)
    assert "finite check" not in str(e.value)
    assert (repr(e.value.figure), e.value.step, e.value.address) == (repr(bad), 5, NORM)
    again = pickle.loads(pickle.dumps(e.value))
    assert (str(again), repr(again.limit)) == (str(e.value), repr(e.value.limit))


def test_the_error_is_that_of_the_last_skip() -> None:
    run = Run([SkipSpikes(3.0, window=4), CheckFinite("skip")], max_consecutive_skips=2)
    for norm in (1.0, 1.1, 0.9, 9.0):
        run.step(norm)
    with pytest.raises(gr.NonFiniteError, match="2 updates in a row were skipped"):
        run.step(NAN)


@pytest.mark.broad
def test_every_hundredth_skip_says_why(caplog: pytest.LogCaptureFixture) -> None:
    run = Run([SkipSpikes(3.0, window=4), CheckFinite("skip")], max_consecutive_skips=1000)
    with caplog.at_level(logging.WARNING, "gradrewrite"):
        for norm in (1.0, 1.1, 0.9, *[9.0] * 100, *[NAN] * 100, *[8.0] * 100):
            run.step(norm)
    first, second, third = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"100 updates skipped so far, because of spikes ({NORM} was 9, above its limit 1.")
    assert (
        second == "200 updates skipped so far, 100 of them because of spikes, the others because a finite check failed"
    )
    assert third.startswith(f"300 updates skipped so far, 200 of them because of spikes ({NORM} was 8, above its limit")


class HostReads(TorchDispatchMode):
    """Counts reads of tensors by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.broad
@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("of", ["total_norm", "loss"])
def test_the_host_reads_one_verdict_or_none(name: str, of: Any) -> None:
    run = Run([SkipSpikes(3.0, window=4, of=of), ClipByGlobalNorm(1.0)], OPTIMIZERS[name])
    for n in range(6):
        run.model.weight.grad = torch.ones((), dtype=torch.float64)
        run.monitor.log("loss", torch.ones(()))
        with HostReads() as reads:
            run.optimizer.step()
        if n and name != "adamw":  # torch's own reads its step counters; a first fused step of SGD makes its buffers
            assert reads.number == ("fused" not in name)


@pytest.mark.broad
def test_two_groups_and_two_optimizers() -> None:
    """Each group and each optimizer has a window of its own; one spike of a group skips the whole update."""
    model = gr.transform(
        TwoLayers(), [gr.on(f"step:{n}.*", SkipSpikes(3.0, window=4, group=n)) for n in ("one", "two")]
    )
    both = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for n in range(5):
        for name, p in model.named_parameters():
            p.grad = torch.full_like(p, 50.0 if n == 4 and name.startswith("two") else 1.0 + n / 10)
        before = model.one.weight.clone()
        both.step()
        assert torch.equal(before, model.one.weight) == (n == 4)
    latest = model.monitor.latest()
    assert (latest["spike@step:group:one"], latest["spike@step:group:two"]) == (0, 1)
    counts = {k: int(v) for k, v in gr.state_dict(model)["states"].items() if k.endswith("count")}
    assert counts == {"step:group:one/SkipSpikes.count": 4, "step:group:two/SkipSpikes.count": 4}

    model = gr.transform(TwoLayers(), gr.on("step:*", SkipSpikes()))
    optimizers = [gr.guard(torch.optim.SGD(m.parameters(), lr=0.1), model) for m in (model.one, model.two)]
    model(torch.ones(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert {"spike@step:group:default", "spike@step:group:default#1"} <= model.monitor.latest().keys()
    assert "step:group:default#1/SkipSpikes.window" in gr.state_dict(model)["states"]


def test_records_join_those_of_the_backward_and_are_written(tmp_path: Path) -> None:
    model = gr.transform(TwoLayers(), [gr.on("gradient:*", Observe("norm")), gr.on("step:*", SkipSpikes(of="loss"))])
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model.monitor.to_jsonl(tmp_path / "run.jsonl")
    for n in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        model.monitor.log("loss", n)
        optimizer.step()
    model.monitor.flush()
    steps = gr.read_jsonl(tmp_path / "run.jsonl")
    assert [step.records["loss@step:group:default"] for step in steps] == [0.0, 1.0, 2.0]
    assert {"norm@gradient:one.weight", LIMIT, SPIKE} <= steps[0].records.keys()
    assert not model.monitor.diagnose()  # a limit that is infinite is no fault
    graph = model.trace_step(optimizer)
    assert {edit.action for edit in graph.edits} == {SkipSpikes(of="loss")}


@pytest.mark.pure
@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"sigma": 0.0}, ValueError, "sigma must be > 0 and finite"),
        ({"sigma": -1.0}, ValueError, "sigma must be > 0"),
        ({"sigma": INF}, ValueError, "finite"),
        ({"sigma": NAN}, ValueError, "must not be NaN"),
        ({"sigma": "6"}, TypeError, "sigma"),
        ({"sigma": torch.ones(())}, TypeError, "sigma is a number, got a Tensor"),
        ({"sigma": gr.Schedule(float)}, TypeError, "sigma is a number, got a Schedule"),
        ({"window": 1}, ValueError, "window is a whole number >= 2"),
        ({"window": 2.0}, ValueError, "window is a whole number >= 2"),
        ({"window": True}, TypeError, "window"),
        ({"of": "norm"}, ValueError, 'of is "total_norm" or "loss"'),
    ],
)
def test_wrong_settings(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SkipSpikes(**given)


@pytest.mark.broad
def test_where_it_may_stand() -> None:
    for pattern in ("gradient:*", "error:*", "activation:*", "input:*"):
        model = gr.transform(TwoLayers(), gr.on(pattern, SkipSpikes()))
        with pytest.raises(
            gr.PolicyError, match=r"SkipSpikes.* does not apply to this kind of site; it applies to step"
        ):
            model.trace(torch.ones(2, 4, requires_grad=True))
    run = Run([SkipSpikes(), SkipSpikes(5.0)])
    with pytest.raises(gr.PolicyError, match="are in one group 'default'"):
        run.step(1.0)
