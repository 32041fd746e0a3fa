"""Trainings with one planted fault each, whose name, place and remedy are known, and healthy ones beside them.

A seed changes parameters and data, a size the depth or the length. ``CASES`` has all of them by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradrewrite.diagnostics.causes import Kind

from models.gpt import Gpt

CLASSES, FEATURES, ROWS, STEPS = 10, 16, 32, 50
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Case:
    """A training, and its diagnosis.

    Attributes:
        model: The model; its forward takes a batch.
        batches: One batch a step.
        rate: Learning rate of SGD.
        kind: The kind of the first cause; None for a healthy one.
        site: Its site, as a pattern; ``""`` for none.
        remark: Part of a remark that has to be there.
        factor: The factor of the cause, within 20 %; None if it has none.
        source: Part of the line of the cause.
        momentum: Momentum of SGD.
        loss: Of the output and the batch; None if the model returns it.
    """

    model: nn.Module
    batches: Sequence[Any]
    rate: float
    kind: Kind | None = None
    site: str = ""
    remark: str = ""
    factor: float | None = None
    source: str = ""
    momentum: float = 0.0
    loss: Loss | None = None


def points(seed: int, count: int = STEPS, features: int = FEATURES) -> list[Batch]:
    """Return batches of points around ten centers, with the number of the center."""
    torch.manual_seed(seed)
    centers = 2 * torch.randn(CLASSES, features)
    labels = torch.randint(0, CLASSES, (count, ROWS))
    return [(centers[own] + 0.5 * torch.randn(ROWS, features), own) for own in labels]


class Net(nn.Module):
    """Equal layers with an activation; a classifier that returns its loss."""

    def __init__(self, depth: int, act: Callable[[], nn.Module], *, residual: bool = False, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.acts = nn.ModuleList(act() for _ in range(depth))
        self.head, self.residual = nn.Linear(width, CLASSES), residual

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for layer, act in zip(self.layers, self.acts, strict=True):
            change = act(layer(h))
            h = h + change if self.residual else change
        return functional.cross_entropy(self.head(h), y)


def he(net: Net, gain: float = math.sqrt(2)) -> Net:
    """Start the layers so that a ReLU network keeps the size of what it carries."""
    for layer in net.layers:
        nn.init.kaiming_normal_(layer.weight, a=0)
        with torch.no_grad():
            layer.weight.mul_(gain / math.sqrt(2))
        nn.init.zeros_(layer.bias)
    return net


class Recurrence(nn.Module):
    """A recurrence in a loop of the root module: ``wh`` is called ``times`` times a step; the head reads the end."""

    def __init__(
        self, gain: float, times: int = 1, width: int = 24, act: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.wx, self.wh = nn.Linear(FEATURES, width), nn.Linear(width, width, bias=False)
        self.head, self.times, self.act = nn.Linear(width, CLASSES), times, act
        nn.init.orthogonal_(self.wh.weight, gain)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], self.wh.out_features)
        for step in range(x.shape[1]):
            for _ in range(self.times):
                h = self.wh(h)
            h = h + self.wx(x[:, step])
            h = h if self.act is None else self.act(h)
        return functional.cross_entropy(self.head(h), y)


def sequences(seed: int, length: int, scale: float = 1.0) -> list[Batch]:
    """Return sequences of small noise that begin with a point."""
    found = []
    for x, y in points(seed):
        rest = 0.01 * torch.randn(x.shape[0], length - 1, x.shape[1])
        found.append((scale * torch.cat([x[:, None], rest], 1), y))
    return found


def chaotic_recurrence(seed: int, size: int = 40) -> Case:
    """Bounded on the way forward, exploding on the way back: what it reads last is easily learned."""
    torch.manual_seed(seed)
    batches = [(x.flip(1), y) for x, y in sequences(seed, size)]
    return Case(Recurrence(2.5, act=torch.sin), batches, 0.3, "exploding", "error:wh")


def exploding_recurrence(seed: int, size: int = 60) -> Case:
    torch.manual_seed(seed)
    return Case(Recurrence(1.4), sequences(seed, size), 0.1, "exploding", "error:wh", factor=1.4)


def slowly_exploding_recurrence(seed: int, size: int = 120) -> Case:
    torch.manual_seed(seed)
    return Case(Recurrence(1.19), sequences(seed, size), 0.1, "exploding", "error:wh", factor=1.19)


def recurrence_of_two_calls(seed: int, size: int = 30) -> Case:
    torch.manual_seed(seed)
    return Case(Recurrence(1.3, times=2), sequences(seed, size), 0.1, "exploding", "error:wh", factor=1.3)


def vanishing_depth(seed: int, size: int = 14) -> Case:
    torch.manual_seed(seed)
    return Case(Net(size, nn.Sigmoid), points(seed), 0.1, "vanishing", "error:*")


def dead_relus(seed: int, size: int = 4) -> Case:
    torch.manual_seed(seed)
    net = he(Net(size, nn.ReLU))
    nn.init.constant_(net.layers[size // 2].bias, -50.0)
    return Case(net, points(seed), 0.05, "dead", f"activation:acts.{size // 2}")


def saturated_tanh(seed: int, size: int = 4) -> Case:
    torch.manual_seed(seed)
    net = Net(size, nn.Tanh)
    with torch.no_grad():
        for layer in net.layers:
            layer.weight.mul_(200.0)
    return Case(net, points(seed), 1e-6, "saturated", "activation:acts.*")


def one_bad_layer(seed: int, size: int = 12) -> Case:
    torch.manual_seed(seed)
    net = he(Net(size, nn.ReLU))
    with torch.no_grad():
        net.layers[size // 3].weight.mul_(3000.0)
    return Case(net, points(seed), 0.05, "one layer", f"error:layers.{size // 3}")


def learning_rate_too_high(seed: int, size: int = 3) -> Case:
    torch.manual_seed(seed)
    return Case(he(Net(size, nn.ReLU)), points(seed), 5.0, "learning rate", "")


def bad_batch(seed: int, size: int = 3) -> Case:
    torch.manual_seed(seed)
    batches = points(seed)
    x, y = batches[20 + seed]
    batches[20 + seed] = (1e6 * x, y)
    return Case(he(Net(size, nn.ReLU)), batches, 0.02, "bad batch", "")


def spike(seed: int, size: int = 3) -> Case:
    torch.manual_seed(seed)
    net = he(Net(size, nn.ReLU))
    count = itertools.count()

    def loss(out: Tensor, _: Any) -> Tensor:
        return out * (500.0 if next(count) == 25 + seed else 1.0)

    return Case(net, points(seed), 1e-3, "spike", "", loss=loss)


class Broken(Net):
    """Applies an op that goes wrong at the value of one batch."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__(2, nn.ReLU)
        self.op = op

    def forward(self, x: Tensor, y: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, y) + 0.01 * self.op(value * self.first.bias.abs().sum().add(1.0)).mean()


def log_of_zero(value: Tensor) -> Tensor:
    return torch.log(value)  # planted log


def root_backward(value: Tensor) -> Tensor:
    return torch.sqrt(value)  # planted sqrt


def zero_by_zero(value: Tensor) -> Tensor:
    return value / value.detach()  # planted division


def nan_by(op: Callable[[Tensor], Tensor], source: str) -> Callable[..., Case]:
    def make(seed: int, size: int = 10) -> Case:
        torch.manual_seed(seed)
        batches = [(x, y, torch.tensor(0.0 if n == size + seed else 1.0)) for n, (x, y) in enumerate(points(seed))]
        return Case(Broken(op), batches, 0.05, "non-finite op", "*", source=source)

    return make


class Half(nn.Module):
    """A body in float16, whose errors are too small for it."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(depth))
        self.layers = nn.Sequential(*layers).half()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 1e-7 * functional.cross_entropy(self.head(self.layers(x.half()).float()), y)


def float16_underflow(seed: int, size: int = 3) -> Case:
    torch.manual_seed(seed)
    return Case(Half(size), points(seed), 0.1, "underflow", "*layers.*")


class Branch(Net):
    """Has a branch that nothing reads, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__(3, nn.ReLU, residual=True)
        self.unused = nn.Linear(4, 4)
        self.layers[0].requires_grad_(False)


def unused_branch(seed: int, size: int = 0) -> Case:
    torch.manual_seed(seed)
    return Case(Branch(), points(seed), 0.05, remark="unused.weight")


def frozen_layer(seed: int, size: int = 0) -> Case:
    torch.manual_seed(seed)
    return Case(Branch(), points(seed), 0.05, remark="layers.0.weight")


def healthy_gpt(seed: int, size: int = 2) -> Case:
    torch.manual_seed(seed)
    table = torch.randint(0, 32, (32,))  # the next token follows from the one before
    batches = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 32, (8, 1))
        while tokens.shape[1] < 17:
            tokens = torch.cat([tokens, table[tokens[:, -1:]]], 1)
        batches.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return Case(Gpt(size, 32, 2, 32, 16), batches, 0.1, momentum=0.9)


class Convolutions(nn.Module):
    """Convolutions with BatchNorm."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        widths = [1, *[8] * depth]
        pairs = itertools.pairwise(widths)
        self.convs = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairs)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        images = x.view(x.shape[0], 1, 4, 4)
        return functional.cross_entropy(self.head(self.convs(images).mean((2, 3))), y)


def healthy_convnet(seed: int, size: int = 3) -> Case:
    torch.manual_seed(seed)
    return Case(Convolutions(size), points(seed), 0.1)


def healthy_residual(seed: int, size: int = 6) -> Case:
    torch.manual_seed(seed)
    return Case(Net(size, nn.Tanh, residual=True), points(seed), 0.05)


def healthy_recurrence(seed: int, size: int = 20) -> Case:
    torch.manual_seed(seed)
    return Case(Recurrence(1.0, act=torch.tanh), sequences(seed, size), 0.02, momentum=0.9)


SICK: dict[str, Callable[..., Case]] = {
    "chaotic recurrence": chaotic_recurrence,
    "exploding recurrence": exploding_recurrence,
    "slowly exploding recurrence": slowly_exploding_recurrence,
    "recurrence of two calls a step": recurrence_of_two_calls,
    "vanishing depth": vanishing_depth,
    "dead ReLUs": dead_relus,
    "saturated tanh": saturated_tanh,
    "one bad layer": one_bad_layer,
    "learning rate too high": learning_rate_too_high,
    "bad batch": bad_batch,
    "spike": spike,
    "log of 0": nan_by(log_of_zero, "planted log"),
    "backward of a root of 0": nan_by(root_backward, "planted sqrt"),
    "0 / 0": nan_by(zero_by_zero, "planted division"),
    "float16 underflow": float16_underflow,
}
HEALTHY: dict[str, Callable[..., Case]] = {
    "unused branch": unused_branch,
    "frozen layer": frozen_layer,
    "GPT": healthy_gpt,
    "convnet": healthy_convnet,
    "residual": healthy_residual,
    "recurrence": healthy_recurrence,
}


def all_cases(seeds: Sequence[int] = (0,)) -> Iterator[tuple[str, int]]:
    """Yield the names of all cases, with seeds."""
    for name in (*SICK, *HEALTHY):
        yield from ((name, seed) for seed in seeds)
