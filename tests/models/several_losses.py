"""Small modules with several losses: trunks of many kinds, and losses that ops mix in other ways than by sums."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.small import Lambda

Make = Callable[[], nn.Module]


class SeveralLosses(nn.Module):
    """A trunk and heads, each with a loss; every second head wants the opposite of the one before."""

    def __init__(self, trunk: nn.Module, x: Tensor, number: int) -> None:
        super().__init__()
        self.trunk = trunk
        with torch.no_grad():
            width = trunk(x).flatten(1).shape[1]
        self.heads = nn.ModuleList(nn.Linear(width, 2) for _ in range(number))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        features = self.trunk(x).flatten(1)
        losses = [head(features).square().mean() for head in self.heads]
        shifted = [(features.tanh() - (-2) ** n).square().mean() for n in range(len(losses))]
        return tuple(a + b for a, b in zip(losses, shifted, strict=True))


def _rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(4, *shape)


def _linear(*widths: int) -> list[nn.Module]:
    return [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def _nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Sequential(*_linear(6, 5)), nn.Sequential(nn.Sequential(*_linear(5, 4)))))


def _unused() -> nn.Module:
    return Lambda(lambda m, x: m.used(x), used=nn.Linear(6, 4), unused=nn.Linear(6, 4))


def _frozen() -> nn.Module:
    trunk = nn.Sequential(*_linear(6, 5, 4))
    trunk[0].requires_grad_(False)
    return trunk


def _tied() -> nn.Module:
    return Lambda(lambda m, x: m.one(m.one(x).tanh()) @ m.one.weight, one=nn.Linear(6, 6))


def _recurrent(kind: str) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 5)
        for step in x.unbind(1):
            if kind == "lstm":
                h, c = m.cell(step, (h, c))
            else:
                h = m.cell(step, h)
        return h

    cells: dict[str, Any] = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}
    return Lambda(run, cell=cells[kind](3, 5))


def _attention() -> nn.Module:
    return Lambda(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(8, 2, batch_first=True))


def _loop() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + m.one(x).tanh()
        return x

    return Lambda(run, one=nn.Linear(6, 6))


def _in_place() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.one(x)
        h[:, 0] = x[:, 1]
        h.mul_(2).tanh_()
        return h.view(-1).view_as(h)

    return Lambda(run, one=nn.Linear(6, 6))


def _residual(width: int = 6) -> nn.Module:
    return Lambda(
        lambda m, x: x + m.two(m.one(m.norm(x)).relu()),
        norm=nn.LayerNorm(width),
        one=nn.Linear(width, 9),
        two=nn.Linear(9, width),
    )


def _convolutions(*further: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), *further, nn.ReLU(), nn.Conv2d(4, 3, 3, stride=2))


# name: (trunk, its input)
TRUNKS: dict[str, tuple[Make, Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(*_linear(6, 8, 8, 4)), _rows(6)),
    "nested": (_nested, _rows(6)),
    "unused parameter": (_unused, _rows(6)),
    "frozen layer": (_frozen, _rows(6)),
    "tied": (_tied, _rows(6)),
    "shared in a loop": (_loop, _rows(6)),
    "residual": (_residual, _rows(6)),
    "residual twice": (lambda: nn.Sequential(_residual(), _residual()), _rows(6)),
    "in place": (_in_place, _rows(6)),
    "bilinear": (lambda: Lambda(lambda m, x: m.b(x, x.tanh()), b=nn.Bilinear(6, 6, 4)), _rows(6)),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 5), nn.PReLU(), nn.Linear(5, 4)), _rows(6)),
    "gelu and softmax": (lambda: nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 4), nn.Softmax(-1)), _rows(6)),
    "glu": (lambda: nn.Sequential(nn.Linear(6, 8), nn.GLU(), nn.SiLU(), nn.Linear(4, 4)), _rows(6)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)), _rows(6)),
    "dropout in evaluation": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.0), nn.Linear(5, 4)), _rows(6)),
    "rms norm": (lambda: nn.Sequential(nn.Linear(6, 5), nn.RMSNorm(5), nn.Linear(5, 4)), _rows(6)),
    "no bias": (lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False)), _rows(6)),
    "einsum": (lambda: Lambda(lambda m, x: torch.einsum("bi,ijk->bjk", x, m.w), w=nn.Parameter(torch.randn(6, 3, 2))),
               _rows(6)),
    "embedding": (lambda: Lambda(lambda m, x: m.e((x * 3).long().abs() % 7), e=nn.Embedding(7, 3)), _rows(5)),
    "conv": (_convolutions, _rows(2, 9, 9)),
    "conv and batch norm": (lambda: _convolutions(nn.BatchNorm2d(4)), _rows(2, 9, 9)),
    "conv and group norm": (lambda: _convolutions(nn.GroupNorm(2, 4)), _rows(2, 9, 9)),
    "conv and instance norm": (lambda: _convolutions(nn.InstanceNorm2d(4, affine=True)), _rows(2, 9, 9)),
    "conv and max pool": (lambda: _convolutions(nn.MaxPool2d(2, 1)), _rows(2, 10, 10)),
    "conv and average pool": (lambda: _convolutions(nn.AvgPool2d(2, 1)), _rows(2, 10, 10)),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Hardswish(), nn.Conv2d(4, 2, 1)),
                  _rows(4, 6, 6)),
    "transposed conv": (lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3, stride=2), nn.Tanh()), _rows(2, 4, 4)),
    "conv 1d": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.ELU(), nn.Conv1d(4, 2, 3)), _rows(2, 8)),
    "upsampling": (lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.Upsample(scale_factor=2), nn.Conv2d(2, 1, 3)),
                   _rows(2, 6, 6)),
    "transformer": (_encoder, _rows(5, 8)),
    "two transformer layers": (lambda: nn.Sequential(_encoder(), _encoder()), _rows(5, 8)),
    "attention": (_attention, _rows(5, 8)),
    "rnn": (lambda: _recurrent("rnn"), _rows(4, 3)),
    "gru": (lambda: _recurrent("gru"), _rows(4, 3)),
    "lstm": (lambda: _recurrent("lstm"), _rows(4, 3)),
    "checkpoint": (lambda: Lambda(lambda m, x: checkpoint(m.one, x, use_reentrant=False),
                                  one=nn.Sequential(*_linear(6, 5, 4))), _rows(6)),
}  # fmt: skip


class _Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4))
        self.a, self.b, self.c = (nn.Linear(4, 2) for _ in range(3))

    def features(self, x: Tensor) -> Tensor:
        return self.trunk(x).tanh()

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError

    def losses(self, h: Tensor) -> list[Tensor]:
        return [self.a(h).square().mean(), (self.b(h) - 3).square().mean(), (self.c(h) + 3).square().mean()]


class Stacked(_Mixing):
    """The losses are one tensor ``[3]``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.losses(self.features(x)))


class Vector(_Mixing):
    """The losses are one tensor ``[5]``, the mean of a matrix."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        return torch.cat([self.a(h), self.b(h) - 3, self.c(h)[:, :1] + 3], 1).square().mean(0)


class Named(_Mixing):
    """A mapping with another output, which is not differentiable."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.features(x)
        one, two, three = self.losses(h)
        return {"one": one, "features": h.detach(), "two": two, "rest": {"three": three}}


class Cat(_Mixing):
    """Errors of several losses are joined by ``cat``."""

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.features(x)
        y = torch.cat([self.a(h), self.b(h)], 1).sin()
        return [y[:, :2].mean(), (y[:, 2:] - 3).square().mean(), y.sum()]


class Stack(_Mixing):
    """Errors of several losses are joined by ``stack``."""

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.features(x)
        one, two = torch.stack([h, h * 2]).exp().unbind(0)
        return [one.mean(), (two - 2).square().mean()]


class Put(_Mixing):
    """Errors are added by ``index_put`` and ``slice_scatter``, and written in place."""

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.features(x)
        y = x.new_zeros(4, 8)
        y[:, :4] = h
        y[0, 5] = h[0, 0] * 3
        y = y * y
        chosen = torch.tensor([0, 1, 1])
        return [y[chosen].sum(), y[:, ::2].exp().mean(), y[:, 2:5].sum()]


class Early(_Mixing):
    """A loss leaves the trunk early, and reaches a part of it."""

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.trunk[0](x)
        early = self.a(h[:, :4]).square().mean()
        _, two, three = self.losses(self.trunk[1:](h).tanh())
        return [early, two, three]


class Views(_Mixing):
    """Views and writes in place between the trunk and the losses."""

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.features(x)
        part = h.reshape(-1)[:10].view(2, 5)
        turned = h.t().contiguous()
        turned.mul_(2)
        return [part.sum() * self.a.bias.sum(), turned.square().mean()]


class Double(torch.autograd.Function):
    """Its backward is written by hand, and is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0] / (1 + grads[0].norm())


class ByHand(_Mixing):
    """A backward that is not linear acts on the error of each loss by itself."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.losses(Double.apply(self.features(x)))


MIXING: dict[str, type[_Mixing]] = {
    kind.__name__: kind for kind in (Stacked, Vector, Named, Cat, Stack, Put, Early, Views, ByHand)
}
MODULES = [*TRUNKS, *MIXING]


def make(name: str, number: int = 3, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    """A module with several losses (``number``, where it can be chosen) and its input."""
    torch.manual_seed(0)
    if name in MIXING:
        return MIXING[name]().to(dtype), torch.randn(4, 6).to(dtype)
    trunk, x = TRUNKS[name][0](), TRUNKS[name][1]()
    return SeveralLosses(trunk, x, number).to(dtype), x.to(dtype)


def losses_of(output: Any) -> list[Tensor]:
    """The losses in an output, in their order."""
    if isinstance(output, Tensor):
        found = output.unbind() if output.dim() == 1 else [output]
        return [loss for loss in found if loss.requires_grad]
    values = output.values() if isinstance(output, dict) else output
    return [loss for value in values for loss in losses_of(value)]


def gramian_of(gradients: Sequence[Sequence[Tensor | None]]) -> Tensor:
    def dot(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> Tensor:
        pairs = [(x * y).sum() for x, y in zip(a, b, strict=True) if x is not None and y is not None]
        return torch.stack(pairs).sum() if pairs else torch.zeros((), dtype=torch.float64)

    return torch.stack([torch.stack([dot(a, b) for b in gradients]) for a in gradients])


def eager_gradients(
    model: nn.Module, inputs: Tensor | dict[str, Any], pattern: str, weighting: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """The oracle: one backward a loss, the Gram matrix of what they share, weights; all gradients, and the weights."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses = losses_of(model(**inputs) if isinstance(inputs, dict) else model(inputs))
    all_parameters = list(parameters.values())
    found = [torch.autograd.grad(loss, all_parameters, retain_graph=True, allow_unused=True) for loss in losses]
    reached = [sum(own[n] is not None for own in found) for n in range(len(parameters))]
    shared = [n for n, name in enumerate(parameters) if name.startswith(pattern) and reached[n] > 1]
    gramian = gramian_of([[own[n] for n in shared] for own in found])
    weights = weighting(gramian)
    total = {}
    for n, name in enumerate(parameters):
        terms = [
            (w if n in shared else 1) * own[n] for w, own in zip(weights, found, strict=True) if own[n] is not None
        ]
        if terms:
            total[name] = torch.stack(terms).sum(0)
    return total, weights


def assert_equal_gradients(model: nn.Module, expected: dict[str, Tensor], tolerance: float) -> None:
    for name, parameter in model.named_parameters():
        if name not in expected:
            assert parameter.grad is None or not parameter.grad.any()
            continue
        assert parameter.grad is not None, name
        scale = float(expected[name].abs().max()) if expected[name].numel() else 1.0
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=tolerance * max(scale, 1e-3))


def eager_gradients_by_error(model: nn.Module, x: Tensor, module: str, weigh: Callable[[Tensor], Tensor]) -> None:
    """The oracle: the errors of the losses at a module's output, weighed; then a backward a loss, their sum once."""
    layer, outputs = model.get_submodule(module), []
    hook = layer.register_forward_hook(lambda _, __, out: outputs.append(out))
    losses = losses_of(model(x))
    hook.remove()
    found = [torch.autograd.grad(loss, outputs[0], retain_graph=True, allow_unused=True)[0] for loss in losses]
    dense = [torch.zeros_like(outputs[0]) if e is None else e for e in found]
    weights = weigh(torch.stack([torch.stack([(a * b).sum() for b in dense]) for a in dense]))
    combined = torch.stack([w * e for w, e in zip(weights, dense, strict=True)]).sum(0)
    errors = iter([combined, *[torch.zeros_like(combined)] * len(losses)])
    layer.register_forward_hook(lambda _, __, out: out.register_hook(lambda _: next(errors)) and None)
    for loss in losses_of(model(x)):
        loss.backward(retain_graph=True)
