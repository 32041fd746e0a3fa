"""Second moments of the example program: all ways agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradrewrite.examples import mean_squared_gradients
from gradrewrite.examples.mean_squared_gradients import Cost

from helpers import mostly_slow

EXACT = {"rtol": 1e-10, "atol": 1e-14}


def moments(way: str, rows: int, *, compiled: bool = False) -> dict[str, torch.Tensor]:
    network = mean_squared_gradients.start(torch.float64)
    return dict(mean_squared_gradients.WAYS[way](network, compiled=compiled)(*batch(rows)))


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return mean_squared_gradients.batch(rows, torch.float64)


def by_hand(rows: int) -> dict[str, torch.Tensor]:
    """The mean over examples, from one backward for each."""
    network = mean_squared_gradients.start(torch.float64)
    terms: dict[str, list[torch.Tensor]] = {name: [] for name, _ in network.named_parameters()}
    images, labels = batch(rows)
    for row in range(rows):
        network.zero_grad()
        network(images[row, None], labels[row, None]).backward()
        for name, p in network.named_parameters():
            terms[name].append(p.grad.square())
    return {name: torch.stack(squares).mean(0) for name, squares in terms.items()}


@pytest.mark.long
@pytest.mark.parametrize("rows", mostly_slow([5, 1]))
def test_all_ways_agree(rows: int) -> None:
    wanted = by_hand(rows)
    assert all(square.max() > 0 for square in wanted.values())
    for way in ("gradrewrite", "Python loop", "vmap(grad)"):
        torch.testing.assert_close(moments(way, rows), wanted, **EXACT)


def test_opacus_agrees() -> None:
    pytest.importorskip("opacus", reason="opacus is not installed")
    torch.testing.assert_close(moments("Opacus", 5), by_hand(5), **EXACT)


@pytest.mark.sample(8)
@pytest.mark.slow
@pytest.mark.inductor
def test_compiled_code_agrees() -> None:
    torch.testing.assert_close(moments("gradrewrite", 5, compiled=True), by_hand(5), **EXACT)


@pytest.mark.pure
def test_the_difference_is_relative_to_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"twice": lambda network, *, compiled: lambda *inputs: {n: 2 * s for n, s in by_hand(3).items()}}
    monkeypatch.setattr(mean_squared_gradients, "WAYS", wrong)
    assert mean_squared_gradients.largest_difference("twice", 3, compiled=False) == pytest.approx(1.0)


@pytest.mark.pure
def test_peak_is_of_tensors_that_live_together() -> None:
    def step() -> None:
        first = torch.empty(1_000_000, dtype=torch.uint8)
        del first
        second, third = (torch.empty(2_000_000, dtype=torch.uint8) for _ in range(2))
        del second, third

    assert mean_squared_gradients.peak_bytes(step) == 4_000_000


@pytest.mark.pure
def test_table_and_picture(tmp_path: Path) -> None:
    costs = {16: dict.fromkeys(mean_squared_gradients.WAYS, Cost(0.0021, 3_200_000))}
    lines = mean_squared_gradients.table(costs).splitlines()
    assert lines[0].split() == ["batch", "of", "16"]
    assert lines[2].split() == ["gradrewrite", "2.1", "ms,", "3.2", "MB"]
    assert Path(mean_squared_gradients.draw(costs, tmp_path / "x.png")).stat().st_size > 0
