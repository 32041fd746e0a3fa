"""Tensors with one element that the forward writes: their updates are those of eager mode, however it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.backends.backend import make_backend
from gradrewrite.backends.engines import AotEager
from gradrewrite.passes import ClipByNorm


class Steps(nn.Module):
    """Counts in float64, follows a mean, and scales by both and by a number."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4).double()
        self.register_buffer("count", torch.zeros((), dtype=dtype))
        self.register_buffer("mean", torch.ones((), dtype=dtype))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = self.fc(x).square().mean() * self.mean.clone() * scale
        self.count.add_(1.0)
        self.mean.mul_(0.5).add_(y.detach())
        return y


class Unread(Steps):
    """Nothing reads what it writes."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = self.fc(x).square().mean() * scale
        self.count.add_(scale)
        return y


POLICY = gr.on("error:fc", ClipByNorm(1e-2))


def by_backend(plain: nn.Module) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = torch.compile(plain, backend=make_backend(POLICY, None, AotEager()))
    return found


def compiled(plain: nn.Module) -> Callable[..., Tensor]:
    rewritten: Any = gr.transform(plain, POLICY)
    rewritten.compile()
    return rewritten


WAYS: Mapping[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "op by op": lambda plain: gr.transform(plain, POLICY),
    "without a policy": lambda plain: gr.transform(plain, []),
    "dynamic": lambda plain: gr.transform(plain, POLICY, dynamic=True),
    "parts": lambda plain: gr.transform(plain, POLICY, fullgraph=False),
    "backend": by_backend,
    "compiled": compiled,
}


@pytest.mark.inductor
@pytest.mark.parametrize("kind", [Steps, Unread])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (1.0, 0.5, 0.25)], ids=["one number", "other numbers"])
def test_updates_are_those_of_eager(kind: type[Steps], way: str, scales: tuple[float, ...]) -> None:
    plain, own = kind(), kind()
    run = WAYS[way](own)
    for step, scale in enumerate(scales):
        x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        plain(x, scale).backward()
        run(x, scale).backward()
    plain.eval()
    own.eval()
    with torch.no_grad():
        plain(x)
        run(x)
    torch.testing.assert_close(dict(own.named_buffers()), dict(plain.named_buffers()))


def test_a_scalar_that_is_given_and_written() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            seen.add_(x.detach().sum())
            y: Tensor = self.fc(x).sum()
            return y

    plain, x = Given(), torch.randn(3, 4)
    wanted, found = (torch.zeros((), dtype=torch.float64) for _ in range(2))
    plain(x, wanted).backward()
    gr.transform(plain, [])(x, found).backward()
    assert torch.equal(wanted, found)
