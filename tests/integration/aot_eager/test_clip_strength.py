"""The strength of clips as records: ``factor``, ``share`` and ``norm_share`` against eager arithmetic in float64."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue, Observe, Scale

from helpers import Probe
from models.small import Gradients

NAN, INF = math.nan, math.inf
SHARE = "norm_share@gradient:"


def gradients(*sizes: int) -> Gradients:
    return Gradients(**{name: torch.zeros(size) for name, size in zip("abc", sizes, strict=False)})


def records(error: Tensor, *actions: Any) -> dict[str, float]:
    model = gr.transform(Probe(error.shape, error.dtype), lambda s: actions if str(s) == "error:h" else None)
    model(error).backward()
    return {name.removesuffix("@error:h"): v for name, v in model.monitor.latest().items()}


def ratio(after: Tensor, before: Tensor) -> float:
    return float(after.double().norm() / before.double().norm())


@pytest.mark.broad
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bound", [0.01, 0.7, 1e4])
def test_clip_by_norm(bound: float, dtype: torch.dtype) -> None:
    g = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = records(g, ClipByNorm(bound))
    norm = float(g.double().norm())

    assert found["factor"] == pytest.approx(min(1.0, bound / norm), rel=1e-6)
    assert list(found) == ["norm", "factor", "bound"]


@pytest.mark.broad
@pytest.mark.parametrize(
    ("values", "bound", "want"),
    [
        ((3.0, 4.0), 5.0, 1.0),  # at the bound
        ((0.0, 0.0), 1.0, 1.0),
        ((3.0, NAN), 1.0, 1.0),
        ((3.0, INF), 1.0, 1.0),
        ((3.0, 4.0), INF, 1.0),
        ((3.0, 4.0), 1.0, 0.2),
        ((0.1, 0.0), 0.1, 1.0),  # in float32 the bound is 0.1 too, which is more than 0.1
        ((2.0, 0.0), 1e39, 1.0),
    ],
)
def test_edges_of_a_clip_by_norm(values: tuple[float, ...], bound: float, want: float) -> None:
    assert records(torch.tensor(values), ClipByNorm(bound))["factor"] == pytest.approx(want)


def test_bound_that_is_a_tensor() -> None:
    bound = torch.tensor(1.0)
    model = gr.transform(Probe(), gr.on("error:h", ClipByNorm(bound)))
    for value in (1.0, 2.0, NAN):
        bound.fill_(value)
        model(torch.tensor([3.0, 4.0])).backward()
    bound.fill_(-1.0)
    model(torch.zeros(2)).backward()
    assert model.monitor.history("factor@error:h") == pytest.approx([0.2, 0.4, 1.0, 1.0])


def test_two_clips_of_one_site() -> None:
    found = records(torch.tensor([3.0, 4.0]), ClipByNorm(1.0), ClipByNorm(0.25), ClipByValue(0.01, log=True))

    assert found["factor"] == pytest.approx(0.2)
    assert found["factor.2"] == pytest.approx(0.25)
    assert found["factor.3"] == pytest.approx(math.sqrt(2) * 0.01 / 0.25, rel=1e-5)


def test_one_model_called_twice() -> None:
    """Of several calls in one backward the last value is kept, as of the norm."""
    model = gr.transform(Probe(), gr.on("error:h", ClipByNorm(1.0)))
    (model(torch.tensor([3.0, 4.0])) + model(torch.tensor([6.0, 8.0]))).backward()
    latest = model.monitor.latest()
    assert latest["factor@error:h"] == pytest.approx(1 / latest["norm@error:h"])


def test_every_reader_has_the_factor(tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.found: dict[str, list[float]] = {}

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.found.setdefault(tag, []).append(value)

    writer = Writer()
    model = gr.transform(Probe(), gr.on("error:h", ClipByNorm(1.0)))
    model.monitor.to_jsonl(tmp_path / "run.jsonl")
    model.monitor.to_tensorboard(writer)
    for size in (10.0, 1.0, 5.0):
        model(torch.tensor([0.0, size])).backward()
    model.monitor.flush()
    lines = [step.records for step in gr.read_jsonl(tmp_path / "run.jsonl")]

    want = pytest.approx([0.1, 1.0, 0.2])
    assert [line["factor@error:h"] for line in lines] == want
    assert writer.found["factor/error:h"] == want
    assert [step.records["factor@error:h"] for step in model.monitor.steps()] == want
    (row,) = [row for row in model.monitor.table().rows if row.address == "factor@error:h"]
    assert row.median == pytest.approx(0.2)
    assert row.steps == 3


def test_name_that_a_user_took() -> None:
    def watch(g: Tensor) -> Tensor:
        gr.record("factor", 7.0)
        return g

    found = records(torch.tensor([3.0, 4.0]), watch, ClipByNorm(1.0))
    assert found["factor"] == 7.0
    assert found["factor.2"] == pytest.approx(0.2)


@pytest.mark.broad
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, INF])
def test_global_clip(norm_type: float) -> None:
    a, b, c = (torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (4, 9, 2))
    model = gr.transform(gradients(4, 9, 2), gr.on("gradient:*", ClipByGlobalNorm(0.5, norm_type=norm_type, log=True)))
    model(a, b, c).backward()
    latest = model.monitor.latest()
    norms = [float(g.double().norm(norm_type)) for g in (a, b, c)]
    total = float(torch.cat([a, b, c]).double().norm(norm_type))

    assert latest["factor@group:default"] == pytest.approx(0.5 / total, rel=1e-6)
    assert sum(latest[f"{SHARE}{name}"] for name in "abc") == pytest.approx(1.0)
    for name, norm in zip("abc", norms, strict=True):
        want = float(norm == max(norms)) if norm_type == INF else (norm / total) ** norm_type
        assert latest[f"{SHARE}{name}"] == pytest.approx(want, rel=1e-5), name


@pytest.mark.broad
@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        (0.0, 0.0, (0.0, 0.0)),
        (3e38, 3e38, (0.5, 0.5)),  # the total overflows float32
        (1e-30, 1e-30, (0.5, 0.5)),
        (1.0, INF, (0.0, 1.0)),
        (NAN, INF, (0.5, 0.5)),
        (NAN, 1.0, (1.0, 0.0)),
    ],
)
def test_share_of_a_member_is_safe(a: float, b: float, want: tuple[float, float]) -> None:
    model = gr.transform(gradients(1, 1), gr.on("gradient:*", ClipByGlobalNorm(1.0, log=True)))
    model(torch.tensor([a]), torch.tensor([b])).backward()
    latest = model.monitor.latest()
    assert (latest[f"{SHARE}a"], latest[f"{SHARE}b"]) == pytest.approx(want)


def test_members_at_the_largest_norm_share_it() -> None:
    model = gr.transform(gradients(1, 1), gr.on("gradient:*", ClipByGlobalNorm(1.0, norm_type=INF, log=True)))
    model(torch.tensor([2.0]), torch.tensor([-2.0])).backward()
    assert model.monitor.latest()[f"{SHARE}a"] == 0.5


def test_global_clip_without_log_has_no_shares() -> None:
    model = gr.transform(gradients(1, 1), gr.on("gradient:*", ClipByGlobalNorm(1.0)))
    model(torch.tensor([3.0]), torch.tensor([4.0])).backward()
    assert model.monitor.latest() == {
        "total_norm@group:default": 5.0,
        "bound@group:default": 1.0,
        "factor@group:default": pytest.approx(0.2),
    }


def test_global_clip_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = gr.transform(gradients(1, 1), gr.on("gradient:*", ClipByGlobalNorm(1.0, log=True)))
    with caplog.at_level(logging.INFO, "gradrewrite.monitor"):
        for size in (1.0, 0.1, NAN):
            model.zero_grad()
            model(torch.tensor([3.0 * size]), torch.tensor([4.0 * size])).backward()
        model.monitor.flush()
    assert [line.getMessage() for line in caplog.records] == [
        "group=default need clipping, total norm=5 max norm=1",
    ]


@pytest.mark.broad
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("observed", [False, True])
def test_global_clip_at_steps(fused: bool, observed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With what is measured beside the norm of one member, members are measured in another order."""
    given = [torch.full((n,), float(n)) for n in (1, 2, 3)]
    net = gradients(1, 2, 3)
    policy = [gr.on("step:*", ClipByGlobalNorm(0.5, log=True))]
    policy += [gr.on("step:b", Observe("max_abs"))] if observed else []
    model = gr.transform(net, policy)
    optimizer = gr.guard(torch.optim.SGD(net.parameters(), lr=0.0, fused=fused), model)
    with caplog.at_level(logging.INFO, "gradrewrite.monitor"):
        model(*given).backward()
        optimizer.step()
        latest = model.monitor.latest()
    squares = [float(g.square().sum()) for g in given]

    assert latest["factor@step:group:default"] == pytest.approx(0.5 / math.sqrt(sum(squares)))
    for name, square in zip("abc", squares, strict=True):
        assert latest[f"norm_share@step:{name}"] == pytest.approx(square / sum(squares)), name
    assert "group=default need clipping" in caplog.text


def test_clips_at_steps() -> None:
    net = gradients(2)
    model = gr.transform(net, gr.on("step:*", [ClipByNorm(1.0), ClipByValue(0.7, log=True)]))
    optimizer = gr.guard(torch.optim.SGD(net.parameters(), lr=0.0), model)
    model(torch.tensor([3.0, 4.0])).backward()
    optimizer.step()
    latest = model.monitor.latest()
    assert latest["factor@step:a"] == pytest.approx(0.2)
    assert latest["factor.2@step:a"] == pytest.approx(math.hypot(0.6, 0.7))
    assert latest["share@step:a"] == 0.5


@pytest.mark.broad
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bound", [0.01, 0.7, 1e4])
def test_clip_by_value(bound: float, dtype: torch.dtype) -> None:
    g = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = records(g, ClipByValue(bound, log=True))
    after = g.clamp(-bound, bound)

    assert found["factor"] == pytest.approx(ratio(after, g), rel=1e-6)
    assert found["share"] == pytest.approx(float((after != g).double().mean()), rel=1e-6)


@pytest.mark.broad
@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_squares_of_float64_neither_overflow_nor_vanish(size: float) -> None:
    g = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * size
    found = records(g, ClipByValue(2 * size, log=True))
    assert found["factor"] == pytest.approx(3 / math.sqrt(14))


@pytest.mark.broad
@pytest.mark.parametrize(
    ("values", "bounds", "factor", "share"),
    [
        ((0.0, 0.0), (-1.0, 1.0), 1.0, 0.0),
        ((0.0, 0.0), (0.5, 1.0), 1.0, 1.0),  # changed, and no ratio to a norm of 0
        ((0.5, -1.0), (-1.0, 1.0), 1.0, 0.0),
        ((INF, 1.0), (-1.0, 1.0), 0.0, 0.5),
        ((INF, -2.0), (-1.0, INF), NAN, 0.5),
        ((INF, 1.0), (-1.0, INF), 1.0, 0.0),
        ((NAN, 0.5), (-1.0, 1.0), 1.0, 0.0),
        ((NAN, 3.0), (-1.0, 1.0), NAN, 0.5),
        ((NAN, INF), (-1.0, 1.0), NAN, 0.5),
        ((), (-1.0, 1.0), 1.0, 0.0),
    ],
)
def test_edges_of_a_clip_by_value(
    values: tuple[float, ...], bounds: tuple[float, float], factor: float, share: float
) -> None:
    found = records(torch.tensor(values), ClipByValue(bounds[1], min=bounds[0], log=True))
    assert found["factor"] == pytest.approx(factor, nan_ok=True)
    assert found["share"] == share


def test_clip_by_value_without_log_records_nothing() -> None:
    assert records(torch.tensor([3.0, 4.0]), ClipByValue(1.0)) == {}


def test_clip_by_norm_that_logs_has_one_factor() -> None:
    found = records(torch.tensor([3.0, 4.0]), ClipByNorm(1.0, log=True))
    assert list(found) == ["norm", "factor", "max_abs", "mean_abs", "clipped", "bound"]


def test_what_the_factor_is_taken_of() -> None:
    """Actions before the clip are no part of it."""
    found = records(torch.tensor([3.0, 4.0]), Scale(10.0), ClipByNorm(1.0), ClipByValue(0.7, log=True))
    assert found["factor"] == pytest.approx(1 / 50)
    assert found["factor.2"] == pytest.approx(math.hypot(0.6, 0.7))


def test_loss_scale() -> None:
    scale = torch.tensor(1024.0)
    actions = [ClipByNorm(2.0), ClipByValue(1.0, log=True)]
    model = gr.transform(Probe(), gr.on("error:h", actions), loss_scale=scale)
    (model(torch.tensor([3.0, 4.0])) * scale).backward()
    latest = model.monitor.latest()
    assert latest["factor@error:h"] == pytest.approx(0.4)
    assert latest["factor.2@error:h"] == pytest.approx(math.sqrt(2) / 2, rel=1e-6)
