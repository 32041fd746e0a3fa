"""What an update makes non-finite, changes no clip, or scales, is told; healthy updates are not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.cli import main
from gradrewrite.passes import CheckFinite, Observe

pytestmark = pytest.mark.long
SEEDS = (0, 1, 2)
UPDATES = [
    gr.on("gradient:*", CheckFinite("record")),
    gr.on("param:*", Observe("norm", "nonfinite")),
    gr.on("state:*", Observe("max", "nonfinite")),
]
USED = gr.on("step:*", Observe("norm"))
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tagger(nn.Module):
    """Words to one of five tags; words above 49 do not occur."""

    def __init__(self, width: int = 24, *, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(70, width, sparse=sparse)
        self.norm = nn.LayerNorm(width)
        self.tag = nn.Linear(width, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.tag(self.norm(self.words(x).sum(1))).float(), y)


def tagger(seed: int, dtype: torch.dtype = torch.float32, *, sparse: bool = False) -> Tagger:
    torch.manual_seed(seed)
    return Tagger(24 + 4 * seed, sparse=sparse).to(dtype)


def sentences(seed: int, number: int = 24) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tag_of = torch.randint(0, 5, (50,), generator=generator)
    found = [torch.randint(0, 50, (32, 3), generator=generator) for _ in range(number)]
    return [(x, tag_of[x[:, 0]]) for x in found]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2e-3)


def repaired(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2e-3, eps=1e-4)


def watched(seed: int, make: MakeOptimizer) -> gr.RewrittenModule:
    """Train with the policy of a user who watches parameters and state."""
    model = gr.transform(tagger(seed, torch.float16), UPDATES)
    optimizer = gr.guard(make(model.parameters()), model)
    for batch in sentences(seed, 50):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        model.monitor.log("loss", loss)
        optimizer.step()
    return model


@pytest.mark.parametrize("seed", SEEDS)
def test_an_eps_that_is_0_is_told_in_the_step_it_spoils(seed: int) -> None:
    found = gr.diagnose(tagger(seed, torch.float16), sentences(seed), optimizer=adam)

    first = found.causes[0]
    assert (found.outcome, first.kind, first.site, first.step) == ("non-finite", "update", "param:words.weight", 0)
    assert first.text.startswith("step 0: every gradient was finite; step() made words.weight NaN in rows ")
    assert "eps 1e-08 is 0 in float16" in first.text
    assert "eps=0.0001" in first.advice
    assert "float32" in first.advice
    assert "skip" not in str(found)
    assert found.policy == ""
    assert "an earlier update" not in str(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_repaired_training_has_no_cause(seed: int) -> None:
    found = gr.diagnose(tagger(seed, torch.float16), sentences(seed, 50), optimizer=repaired)

    assert (found.outcome, found.causes) == ("learns", ())


@pytest.mark.parametrize("seed", SEEDS)
def test_records_of_a_training_say_the_same(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = watched(seed, adam)
    first = model.monitor.diagnose()[0]

    assert (first.kind, first.site, first.step) == ("update", "param:words.weight", 0)
    assert first.text.startswith("step 0: every gradient was finite; step() made words.weight ")
    assert "eps" in first.advice
    model.monitor.to_jsonl(tmp_path / "run.jsonl", "w")
    assert not main(["doctor", str(tmp_path / "run.jsonl"), "--json"])
    assert json.loads(capsys.readouterr().out)[0]["text"] == first.text
    verdict = viz.report(tmp_path / "run.jsonl").health.verdict
    assert verdict.kind == "update"
    assert first.text in verdict.text


@pytest.mark.parametrize("seed", SEEDS)
def test_records_of_the_repaired_training_have_no_cause(seed: int) -> None:
    assert watched(seed, repaired).monitor.diagnose() == ()


class Spike(nn.Module):
    """A weight in float16 whose gradient is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, 4, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x).float().sum() / 1000


def test_a_second_moment_beyond_its_dtype() -> None:
    rows = [torch.zeros(6, 4, dtype=torch.float16) for _ in range(8)]
    for row in rows:
        row[1:] = 1.0
    big = rows[5].clone()
    big[4] = 6.0e4
    batches = [*rows[:5], big, *rows[6:]]

    class Large(Spike):
        def forward(self, x: Tensor) -> Tensor:
            return (self.scale * x).float().sum()

    found = gr.diagnose(Large(), batches, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-4))
    first = found.causes[0]
    assert (found.outcome, first.kind, first.site, first.step) == ("non-finite", "update", "state:scale.exp_avg_sq", 5)
    assert "infinite in row 4" in first.text
    assert "float16" in first.text
    assert "65,504" in first.text


def test_a_rate_that_is_not_finite() -> None:
    batches = [torch.ones(6, 4, dtype=torch.float16)] * 6
    found = gr.diagnose(Spike(), batches, optimizer=lambda p: torch.optim.SGD(p, lr=math.inf))
    first = found.causes[0]
    assert (first.kind, first.site, first.step) == ("update", "param:scale", 0)
    assert "lr of param group 0 is Infinity" in first.text
    assert "all 6 rows" in first.text


def test_a_weight_beyond_its_dtype() -> None:
    batches = [10000 * torch.ones(6, 4, dtype=torch.float16)] * 6
    found = gr.diagnose(Spike(), batches, optimizer=lambda p: torch.optim.SGD(p, lr=3e4))
    first = found.causes[0]
    assert (first.kind, first.site, first.step) == ("update", "param:scale", 0)
    assert "infinite in all 6 rows" in first.text
    assert "beyond float16" in first.text


class Wrong(torch.optim.SGD):
    """An update of a user's that divides by zero."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        first = self.param_groups[0]["params"][0]
        self.state[first]["calls"] = self.state[first].get("calls", 0) + 1
        if self.state[first]["calls"] == 3:
            first[7] /= torch.zeros(())
            first[9].fill_(torch.nan)


def test_without_a_known_reason_the_rows_are_told() -> None:
    found = gr.diagnose(tagger(0), sentences(0), optimizer=lambda p: Wrong(p, lr=0.1))
    first = found.causes[0]
    assert (first.kind, first.site, first.step) == ("update", "param:words.weight", 2)
    assert first.text == (
        "step 2: every gradient was finite; step() made words.weight NaN in row 9, and infinite in row 7."
    )


class Averaged(nn.Module):
    """A running figure that is never read in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("spread", torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.spread.mul_(0.9).add_(torch.sqrt(3.5 - self.calls) * 0.1)
        return (self.linear(x) - x[:, :1]).square().mean()


def test_a_buffer_that_became_nan() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(16, 4) for _ in range(8)]
    found = gr.diagnose(Averaged(), batches, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    first = found.causes[0]
    assert (found.outcome, first.kind, first.site, first.step) == ("non-finite", "update", "buffer:spread", 3)
    assert "every gradient was finite" in first.text
    assert "the buffer spread is NaN in all 4 elements" in first.text


class Masked(nn.Module):
    """A mask of -inf as a buffer, and one row of an embedding that was NaN from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8)
        self.out = nn.Linear(8, 3)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        with torch.no_grad():
            self.words.weight[39] = torch.nan

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x)
        h = torch.softmax(h @ h.transpose(1, 2) + self.mask, -1) @ h
        return F.cross_entropy(self.out(h[:, -1]), y)


def test_what_was_not_finite_when_the_run_began_is_no_fault() -> None:
    torch.manual_seed(0)
    tag_of = torch.randint(0, 3, (39,))
    inputs = [torch.randint(0, 39, (32, 4)) for _ in range(40)]
    model = Masked()
    found = gr.diagnose(model, [(x, tag_of[x[:, 3]]) for x in inputs], optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))
    assert (found.outcome, found.causes) == ("learns", ())


def frozen(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    parameters[-1].requires_grad_(False)
    return torch.optim.AdamW(parameters, lr=1e-2)


HEALTHY: dict[str, tuple[torch.dtype, MakeOptimizer]] = {
    "half": (torch.float16, lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4)),
    "bfloat16": (torch.bfloat16, lambda p: torch.optim.Adam(p, lr=1e-2)),
    "frozen": (torch.float32, frozen),
    "sgd": (torch.float32, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "adamax": (torch.float32, lambda p: torch.optim.Adamax(p, lr=2e-2)),
    "nadam": (torch.float32, lambda p: torch.optim.NAdam(p, lr=1e-2)),
    "rmsprop": (torch.float32, lambda p: torch.optim.RMSprop(p, lr=3e-3, centered=True)),
    "adagrad": (torch.float32, lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "adadelta": (torch.float32, lambda p: torch.optim.Adadelta(p, lr=3.0)),
    "asgd": (torch.float32, lambda p: torch.optim.ASGD(p, lr=0.3)),
    "rprop": (torch.float32, lambda p: torch.optim.Rprop(p, lr=1e-3)),
    "adafactor": (torch.float32, lambda p: torch.optim.Adafactor(p, lr=3e-2)),
    "amsgrad": (torch.float32, lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_updates_have_no_cause(name: str) -> None:
    dtype, make = HEALTHY[name]
    found = gr.diagnose(tagger(1, dtype), sentences(1, 50), optimizer=make)
    assert (found.outcome, found.causes) == ("learns", ()), found


def test_sparse_gradients_are_looked_at() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(70, 5, sparse=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.words(x).sum(1), y)

    torch.manual_seed(0)
    found = gr.diagnose(Words(), sentences(1, 50), optimizer=lambda p: torch.optim.SparseAdam(list(p), lr=0.1))
    assert (found.outcome, found.causes) == ("learns", ()), found


class Noisy(nn.Module):
    """A regression with large gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        return 10 * (self.body(x) - 5 * x.sum(1, keepdim=True)).square().mean()


def clipped(
    seed: int, where: str, *, scale: float = 1.0, policy: Any = USED, steps: int = 24, rate: float = 1e-3
) -> gr.RewrittenModule:
    """Train with a clip of the user's: before the backward, right, after the step, or before unscaling."""
    torch.manual_seed(seed)
    model = gr.transform(Noisy(), policy)
    parameters = list(model.parameters())
    optimizer = gr.guard(torch.optim.Adam(parameters, lr=rate), model)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 6))
        if where == "before":
            clip()
        (loss * scale).backward()
        model.monitor.log("loss", loss)
        if where == "scaled":
            clip()
        for parameter in parameters:
            parameter.grad /= scale
        if where == "right":
            clip()
        optimizer.step()
        if where == "after":
            clip()
    return model


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_clip_that_changes_nothing_is_told(where: str, seed: int) -> None:
    first = clipped(seed, where).monitor.diagnose(clip=1.0)[0]
    assert first.kind == "update"
    assert first.text.startswith("clip=1, but the optimizer used gradients of norm up to ")
    assert "before backward()" in first.text


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clip_of_scaled_gradients_is_told(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = clipped(seed, "scaled", scale=65536.0)
    first = model.monitor.diagnose(clip=1.0)[0]
    assert first.kind == "loss scale"
    assert "65,536" in first.text
    assert "scaler.unscale_(optimizer)" in first.text
    model.monitor.to_jsonl(tmp_path / "run.jsonl", "w")
    assert not main(["doctor", str(tmp_path / "run.jsonl"), "--clip", "1.0"])
    assert first.text in capsys.readouterr().out
    assert not main(["report", str(tmp_path / "run.jsonl"), "--clip", "1.0", "--out", str(tmp_path / "page.html")])
    assert "65,536" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("unscales", [False, True])
def test_the_clip_of_a_scaler(unscales: bool) -> None:
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=9)
    model = gr.transform(Noisy(), USED, loss_scale=scaler)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1e-4), model)
    for _ in range(24):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 6))
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.5)
        scaler.step(optimizer)
        scaler.update()
    found = [cause for cause in model.monitor.diagnose(clip=2.5) if cause.kind in ("update", "loss scale")]
    assert [cause.kind for cause in found] == ([] if unscales else ["loss scale"])
    assert unscales or "scaled by 8,192" in found[0].text or "scaled by 16,384" in found[0].text


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clip_that_holds_is_no_fault(seed: int) -> None:
    found = clipped(seed, "right", rate=3e-2, steps=60).monitor.diagnose(clip=1.0)
    assert not [cause for cause in found if cause.kind in ("update", "loss scale")]
    found = clipped(seed, "right", scale=65536.0, rate=3e-2, steps=60).monitor.diagnose(clip=1.0)
    assert not [cause for cause in found if cause.kind in ("update", "loss scale")]


def test_without_records_of_used_gradients_the_rule_is_told() -> None:
    model = clipped(0, "right", policy=gr.on("gradient:*", Observe("norm")))
    with pytest.warns(gr.RewriteWarning, match=r'gr\.on\("step:\*", Observe\("norm"\)\)'):
        model.monitor.diagnose(clip=1.0)
    with pytest.raises(ValueError, match="clip is a number > 0"):
        model.monitor.diagnose(clip=-1.0)


class OwnClip(torch.optim.Adam):
    """An optimizer that clips after its step, so that nothing is clipped."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)


def test_diagnose_compares_the_gradients_that_the_optimizer_used() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(16, 6) for _ in range(30)]

    def hooked(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(parameters, lr=3e-2)

        def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    assert gr.diagnose(Noisy(), batches, optimizer=hooked, clip=1.0).causes == ()
    told = gr.diagnose(Noisy(), batches, optimizer=hooked, clip=0.1).causes[0]
    assert (told.kind, told.site) == ("update", "")
    assert "used gradients of norm up to 1" in told.text
    plain = gr.diagnose(Noisy(), batches, optimizer=lambda p: torch.optim.Adam(p, lr=3e-2), clip=1.0)
    assert plain.causes == ()
    assert any("clip=1" in remark for remark in plain.remarks)
    untrained = gr.diagnose(Noisy(), batches, clip=1.0)
    assert any("without optimizer=" in remark for remark in untrained.remarks)
    with pytest.raises(ValueError, match="clip is a number > 0"):
        gr.diagnose(Noisy(), batches, clip=0.0)


def accumulated(count: int, *, divided: bool = True, logs_part: bool = False, steps: int = 6) -> gr.RewrittenModule:
    """Train on the same examples in ``count`` micro-batches."""
    torch.manual_seed(0)
    model = gr.transform(Noisy(), [gr.on("gradient:*", Observe("norm")), USED, gr.on("param:*", Observe("norm"))])
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1e-4), model)
    for _ in range(steps):
        optimizer.zero_grad()
        for part in torch.randn(16, 6).chunk(count):
            loss = model(part)
            used = loss / count if divided else loss
            used.backward()
            model.monitor.log("loss", used if logs_part else loss)
        optimizer.step()
    return model


@pytest.mark.parametrize("logs_part", [False, True])
def test_a_right_accumulation_equals_the_whole_batch(
    logs_part: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {"whole": (1, True), "parts": (4, True), "wrong": (4, False)}
    for name, (count, divided) in runs.items():
        model = accumulated(count, divided=divided, logs_part=logs_part)
        model.monitor.to_jsonl(tmp_path / f"{name}.jsonl", "w")
    whole, parts, wrong = (str(tmp_path / f"{name}.jsonl") for name in runs)
    assert main(["diff", whole, parts]) == 0
    text = capsys.readouterr().out
    assert "no difference" in text
    assert "updates" in text
    assert 'gr.on("step:*"' in text
    assert main(["diff", whole, wrong]) == 1
    text = capsys.readouterr().out
    assert "first difference: update 0, step:body.0.weight" in text


def test_a_loss_scale_against_a_baseline_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, scale in (("plain", 1.0), ("scaled", 65536.0)):
        torch.manual_seed(0)
        model = gr.transform(Noisy(), [gr.on("gradient:*", Observe("norm")), USED])
        optimizer = gr.guard(torch.optim.Adam(model.parameters(), lr=1e-3), model)
        for _ in range(24):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 6))
            (loss * scale).backward()
            model.monitor.log("loss", loss)
            optimizer.step()
        model.monitor.to_jsonl(tmp_path / f"{name}.jsonl", "w")
    plain, scaled = str(tmp_path / "plain.jsonl"), str(tmp_path / "scaled.jsonl")
    assert main(["diff", scaled, plain]) == 1
    assert "65,536-fold: a loss scale" in capsys.readouterr().out
    health = viz.report(scaled, baseline=plain).health
    assert health.faults[0].kind == "loss scale"
    assert "65,536-fold" in health.faults[0].text
