"""Models whose loss is a mean over examples, and their per-example gradients by autograd and by torch.func."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from models.gpt import Gpt

__all__ = ["MODELS", "WithLoss", "example_gradients", "make", "vmap_gradients"]

B, T, WORDS = 4, 5, 11
Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), target.reshape(-1))


class WithLoss(nn.Module):
    """A model with its loss, the mean over the batch."""

    def __init__(self, net: nn.Module, loss: Loss = cross_entropy) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.net(x), y)


class Attention(nn.Module):
    """One block, with positions, in which all norms and kinds of sums over the batch occur."""

    def __init__(self, *, tied: bool = False, by_hand: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.words, self.position = nn.Embedding(WORDS, 8, padding_idx=0), nn.Parameter(torch.randn(T + 1, 8))
        self.norm, self.last = nn.LayerNorm(8), nn.RMSNorm(8)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, WORDS, bias=False)
        self.by_hand, self.checkpointed = by_hand, checkpointed
        if tied:
            self.head.weight = self.words.weight

    def block(self, h: Tensor) -> Tensor:
        batch, length, _ = h.shape
        q, k, v = self.qkv(self.norm(h)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.by_hand:
            scores = q @ k.transpose(-1, -2) / 2
            mask = torch.ones(length, length, dtype=torch.bool, device=h.device).triu(1)
            found = scores.masked_fill(mask, -1e9).softmax(-1) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + self.out(found.transpose(1, 2).reshape(batch, length, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.position[: x.shape[1]]
        h = checkpoint(self.block, h, use_reentrant=False) if self.checkpointed else self.block(h)
        return self.head(self.last(h))


class Convolutions(nn.Module):
    """Strides, groups, norms that see one example, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.group = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.frozen, self.instance = nn.BatchNorm2d(4).eval(), nn.InstanceNorm2d(4, affine=True)
        self.second, self.slope = nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.PReLU(6)
        self.head = nn.Linear(6, WORDS)

    def train(self, mode: bool = True) -> Convolutions:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.instance(self.frozen(self.group(self.first(x))))), 2)
        return self.head(self.slope(self.second(h)).mean((2, 3)))


class Recurrent(nn.Module):
    """A cell in a loop: its weights are used at each step."""

    def __init__(self, *, time_major: bool = False) -> None:
        super().__init__()
        self.cell, self.head, self.time_major = nn.GRUCell(3, 6), nn.Linear(6, WORDS), time_major

    def forward(self, x: Tensor) -> Tensor:
        h, states = x.new_zeros(x.shape[0], 6), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            states.append(h)
        return self.head(torch.stack(states)).sum(0) if self.time_major else self.head(h)


class Conv1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv1d(3, 4, 2, dilation=2), nn.ConvTranspose1d(4, 6, 2, stride=2, groups=2)
        self.head = nn.Linear(6, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.conv(x).tanh()).mean(-1))


class Frozen(nn.Module):
    """Its second layer and one bias are frozen, and one layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.frozen, self.head = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, WORDS)
        self.frozen.requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.twice(self.twice(x).tanh()).tanh()))


class Parts(nn.Module):
    """Its parameters are cut up and put together."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.table = nn.Parameter(torch.randn(2 * 7, 7)), nn.Parameter(torch.randn(9, 7))
        self.scale, self.shift = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(7))
        self.mixture = nn.Parameter(torch.randn(2))
        self.head = nn.Linear(7, WORDS)
        self.register_buffer("rows", torch.tensor([[3, 0, 3, 8, 1, 1, 2]]))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.both.chunk(2)
        h = (x @ first.t()).tanh() @ second.t() + self.table.gather(0, self.rows)
        scale, shift = torch.stack([self.scale, self.shift]).unbind()
        h = h * torch.cat([scale, shift])[3:10] + shift.flip(0)
        mixed = self.mixture.softmax(0) @ self.table[:2]
        return self.head(h.tanh() + mixed + self.table.index_select(0, self.rows[0, :2]).sum(0))


class Table(nn.Module):
    """Rows of a parameter by index, some counted from its end."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(WORDS, WORDS))

    def forward(self, x: Tensor) -> Tensor:
        return self.rows[torch.where(x % 2 == 0, x, x - WORDS)].sin().sum(1)


class Bags(nn.Module):
    """Sums, means and maxima of the rows of tables, two bags for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.total = nn.EmbeddingBag(WORDS, 3, mode="sum")
        self.mean = nn.EmbeddingBag(WORDS, 3, mode="mean", padding_idx=0)
        self.largest = nn.EmbeddingBag(WORDS, 3, mode="max")
        self.head = nn.Linear(9, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        bags = x.reshape(2 * x.shape[0], -1)
        weights = bags.double() / WORDS
        h = torch.cat([self.total(bags, None, weights), self.mean(bags), self.largest(bags)], 1)
        return self.head(h.tanh()).unflatten(0, (x.shape[0], 2)).sum(1)


class Windows(nn.Module):
    """Paddings of images, and products of weights that have a direction and a length with windows of the images."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.pool = nn.Conv2d(2, 3, 1), nn.AdaptiveMaxPool3d((3, 2, 2))
        self.reflect, self.replicate = nn.ReflectionPad2d(1), nn.ReplicationPad2d((1, 0, 0, 1))
        self.rows = weight_norm(nn.Linear(12, 4))
        self.pairs = nn.Bilinear(4, 4, 5)
        self.head = weight_norm(nn.Conv1d(5, WORDS, 1), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        padded = self.replicate(self.reflect(self.lift(x)))
        windows = self.rows(F.unfold(self.pool(padded.unsqueeze(1)).squeeze(1), 2, padding=1).transpose(1, 2))
        return self.head(self.pairs(windows, windows.sin()).transpose(1, 2)).sum(2)


class OneRow(nn.Module):
    """Its loss sees one row of each example."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, WORDS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device)
        return F.cross_entropy(self.layer(x).tanh()[rows, y.clamp(max=T - 1)], y)


class TwoBatches(nn.Module):
    """Both inputs go through the layer as one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = self.layer(torch.cat([x, y])).chunk(2)
        return (first - second).square().sum(1).mean()


def labels(*size: int) -> Tensor:
    return torch.randint(0, WORDS, size)


def vectors(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64)


def sum_of_outputs(out: Tensor, _: Tensor) -> Tensor:
    """The error is a constant."""
    return out.sum() / out.shape[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Loss | None]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, WORDS)),
        lambda: (vectors(B, 7), labels(B)),
        cross_entropy,
    ),
    "linear 3-D": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, WORDS)),
        lambda: (vectors(B, T, 3), labels(B, T)),
        cross_entropy,
    ),
    "constant error": (lambda: nn.Linear(7, 3), lambda: (vectors(B, 7), labels(B)), sum_of_outputs),
    "mse": (lambda: nn.Linear(7, 3), lambda: (vectors(B, 7), vectors(B, 3)), F.mse_loss),
    "conv 1-D": (Conv1d, lambda: (vectors(B, 3, 8), labels(B)), cross_entropy),
    "conv 2-D": (Convolutions, lambda: (vectors(B, 2, 8, 8), labels(B)), cross_entropy),
    "attention": (Attention, lambda: (labels(B, T), labels(B, T)), cross_entropy),
    "attention by hand": (lambda: Attention(by_hand=True), lambda: (labels(B, T), labels(B, T)), cross_entropy),
    "as many steps as examples": (Attention, lambda: (labels(T, T), labels(T, T)), cross_entropy),
    "tied": (lambda: Attention(tied=True), lambda: (labels(B, T), labels(B, T)), cross_entropy),
    "checkpointed": (lambda: Attention(checkpointed=True), lambda: (labels(B, T), labels(B, T)), cross_entropy),
    "recurrent": (Recurrent, lambda: (vectors(B, T, 3), labels(B)), cross_entropy),
    "time-major": (lambda: Recurrent(time_major=True), lambda: (vectors(B, T, 3), labels(B)), cross_entropy),
    "frozen parts": (Frozen, lambda: (vectors(B, 7), labels(B)), cross_entropy),
    "indices from the end": (Table, lambda: (labels(B, T), labels(B)), cross_entropy),
    "parts": (Parts, lambda: (vectors(B, 7), labels(B)), cross_entropy),
    "bags": (Bags, lambda: (labels(B, 6), labels(B)), cross_entropy),
    "windows": (Windows, lambda: (vectors(B, 2, 3, 4), labels(B)), cross_entropy),
    "one row": (OneRow, lambda: (vectors(B, T, 3), labels(B)), None),
    "two batches": (TwoBatches, lambda: (vectors(B, 3), vectors(B, 3)), None),
    "positions by arange": (lambda: Gpt(1, 8, 2, WORDS, T), lambda: (labels(B, T), labels(B, T)), None),
    "one example": (Recurrent, lambda: (vectors(1, T, 3), labels(1)), cross_entropy),
}


def make(name: str, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model in float64 and its inputs."""
    torch.manual_seed(seed)
    net, inputs, loss = MODELS[name]
    model = net() if loss is None else WithLoss(net(), loss)
    return model.double(), inputs()


def example_gradients(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """The gradients of each example's own loss, ``[B, ...]`` by parameter, one after the other by autograd."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    of = []
    for example in zip(*inputs, strict=True):
        loss = model(*(x.unsqueeze(0) for x in example))
        of.append(torch.autograd.grad(loss, list(trained.values())))
    return {name: torch.stack(own) for name, own in zip(trained, zip(*of, strict=True), strict=True)}


def vmap_gradients(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """The same by ``torch.func.vmap(torch.func.grad(...))``: all examples at once, without autograd's graph."""

    def loss(trained: dict[str, Tensor], *example: Tensor) -> Tensor:
        found: Tensor = functional_call(model, trained, tuple(x.unsqueeze(0) for x in example))
        return found

    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    with sdpa_kernel(SDPBackend.MATH):  # vmap has no rule for the others, and warns
        found: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, *[0] * len(inputs)))(trained, *inputs)
    return found
