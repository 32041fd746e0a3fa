"""Small models whose forward differentiates inside of itself, by ``torch.autograd.grad``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call

Batch = tuple[Tensor, Tensor]


class Inner(nn.Module):
    """A model of one network, whose loss is a function of it."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # [B, 3], [B, 3]
        return self.loss(self.net, x, target)


def perceptron(hidden: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.SiLU(), hidden or nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.conv(x.unsqueeze(1))).tanh().flatten(1))
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.norm, self.out = nn.Linear(1, 4), nn.Linear(4, 12), nn.LayerNorm(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.unsqueeze(-1))
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        h = self.norm(h + (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v)
        out: Tensor = self.out(h.mean(1))
        return out


class Recurrent(nn.Module):
    """A loop over time in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(1, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 5)
        for one in x.unbind(1):
            h = self.cell(one.unsqueeze(-1), h)
        out: Tensor = self.out(h)
        return out


def forces(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Energy of points in a plane of distances, loss on its gradient."""
    x = x.detach().requires_grad_()
    energy = net(x).sum()
    (gradient,) = grad(energy, x, create_graph=True)
    return (gradient + target).square().mean() + 0.1 * energy.square()


def forces_of_input(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    x.requires_grad_(True)
    (gradient,) = grad(net(x).sum(), x, create_graph=True)
    return (gradient + target).square().mean()


def penalty(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    mixed = torch.lerp(x, target, 0.25).requires_grad_()
    (gradient,) = grad(net(mixed).sum(), mixed, create_graph=True)
    return net(x).mean() - net(target).mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()


def heat(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Second derivatives, and several gradients at once."""
    columns = [column.detach().requires_grad_() for column in x.unbind(1)]
    u = net(torch.stack(columns, -1)).squeeze(-1)
    first = grad(u.sum(), columns, create_graph=True)
    (second,) = grad(first[0].sum(), columns[0], create_graph=True)
    return (first[1] + u * first[0] - 0.1 * second).square().mean() + (u - target[:, 0]).square().mean()


def third(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    derivative = net(x)
    for _ in range(3):
        (derivative,) = grad(derivative.sum(), x, create_graph=True)
    return (derivative - target).square().mean()


def hessian_product(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (gradient,) = grad(net(x).sum(), x, create_graph=True)
    (product,) = grad(gradient, x, grad_outputs=target, create_graph=True)
    return product.square().mean() + gradient.square().mean()


def gradient_of_parameters(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    loss = (net(x) - target[:, :1]).square().mean()
    return loss + 0.1 * sum(g.square().sum() for g in grad(loss, tuple(net.parameters()), create_graph=True))


def adaptive_weight(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """A weight from two gradients, which is a constant of the loss."""
    y, last = net(x), list(net.parameters())[-2]
    one, two = (y - target[:, :1]).square().mean(), y.sin().mean()
    norms = [grad(loss, last, retain_graph=True)[0].norm() for loss in (one, two)]
    return one + (norms[0] / (norms[1] + 1e-4)).clamp(0, 10).detach() * two


def inner_steps(net: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Two steps of gradient descent inside of the loss."""
    parameters = dict(net.named_parameters())
    for _ in range(2):
        loss = (functional_call(net, parameters, (x,)) - target[:, :1]).square().mean()
        gradients = grad(loss, tuple(parameters.values()), create_graph=True)
        parameters = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
    return (functional_call(net, parameters, (target,)) - x[:, :1]).square().mean()


LOSSES: Mapping[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    function.__name__: function
    for function in (
        forces, forces_of_input, penalty, heat, third, hessian_product, gradient_of_parameters, adaptive_weight,
        inner_steps,
    )
}  # fmt: skip
NETS: Mapping[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "normalized": lambda: perceptron(nn.LayerNorm(6)),
    "convolutions": Convolutions,
    "attention": Attention,
    "recurrent": Recurrent,
}
PROGRAMS = (
    *(("perceptron", loss) for loss in LOSSES),
    *((net, loss) for net in ("convolutions", "attention", "recurrent") for loss in ("forces", "heat", "penalty")),
    ("normalized", "hessian_product"), ("attention", "inner_steps"),
)  # fmt: skip


def program(net: str, loss: str) -> Inner:
    """Return a model in float64, the same at each call."""
    torch.manual_seed(0)
    return Inner(NETS[net](), LOSSES[loss]).double()


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(2, 4, 3, dtype=torch.float64, generator=generator)
    return x, target


class OuterHooks:
    """Hooks on the results of modules of an eager model, which act in the outer backward alone."""

    def __init__(self, model: nn.Module, hooks: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        self._is_inner = False
        self._plain: Any = grad
        for name, hook in hooks.items():
            model.get_submodule(name).register_forward_hook(self._adding(hook))

    def _adding(self, hook: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        def add(module: nn.Module, args: Any, result: Tensor) -> None:
            if result.requires_grad:
                result.register_hook(lambda g: None if self._is_inner else hook(g))

        return add

    def grad(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of ``torch.autograd.grad`` in the model."""
        self._is_inner = True
        try:
            return self._plain(*args, **kwargs)
        finally:
            self._is_inner = False
