"""Examples that differentiate inside of their forward: their claims, against eager PyTorch where there is one."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite.examples import forces, gradient_penalty, physics_informed
from gradrewrite.examples.gradient_penalty import CHECK, PROGRAMS, Critic, gaussians
from gradrewrite.passes import CheckFinite, ClipByNorm


@pytest.mark.long
def test_the_clip_of_forces_is_the_loss_of_huber() -> None:
    torch.manual_seed(0)
    net, rows = forces.Potential(), 8
    x, energies, wanted = forces.clusters(rows, 0.7, 1)
    gr.transform(net, forces.ERROR_CLIP)(x, energies, wanted).backward()
    found = [p.grad.clone() for p in net.parameters()]

    net.zero_grad()
    own_energies, own_forces = net.predict(x)
    bound = forces.BOUND / 2  # the loss of Huber has half a square
    loss = functional.huber_loss(own_energies, energies, delta=4 * bound * energies.numel())
    loss = loss + functional.huber_loss(own_forces, wanted, delta=bound * wanted.numel())
    (2 * loss).backward()
    assert (own_forces - wanted).abs().max() > bound * wanted.numel()
    torch.testing.assert_close(found, [p.grad for p in net.parameters()], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.inductor
def test_close_pairs_spoil_forces_but_for_a_clip_of_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = {name: way for name, way in forces.WAYS.items() if name != "clip at a layer"}
    monkeypatch.setattr(forces, "WAYS", ways)
    forces.main([])
    lines = capsys.readouterr().out.splitlines()
    learned, *rows = (line.rsplit(maxsplit=1) for line in lines[1:])
    errors = {name.removesuffix(" mean error of a force").rstrip(): float(error) for name, error in rows}
    mean = float(learned[1])
    assert errors["plain, no close pair"] < errors["error clip"] < 0.9 * mean
    assert min(errors["plain"], errors["parameter clip"]) > errors["error clip"]


@pytest.mark.long
def test_the_check_names_the_root_and_its_line() -> None:
    torch.manual_seed(0)
    model = gr.transform(Critic(gradient_penalty.root), [CHECK])
    with pytest.raises(gr.NonFiniteError) as caught:
        model(gaussians(8), gaussians(8), torch.rand(8, 1)).backward()
    lines, start = inspect.getsourcelines(gradient_penalty.root)
    (offset,) = [number for number, line in enumerate(lines) if "# planted" in line]
    assert caught.value.op == "/sqrt"
    assert caught.value.source.startswith(f"{Path(gradient_penalty.__file__).name}:{start + offset} ")


@pytest.mark.long
def test_the_cures_agree() -> None:
    found = {}
    root = gr.on("backward:*/sqrt", lambda op: torch.where(op.output == 0, 0.0, op.vjp(op.error)[0]))
    for name, (length, policy) in [*list(PROGRAMS.items())[1:], ("backward", (gradient_penalty.root, root))]:
        torch.manual_seed(0)
        critic = Critic(length)
        gr.transform(critic, policy)(gaussians(8), gaussians(8), torch.rand(8, 1)).backward()
        found[name] = [p.grad for p in critic.parameters()]
    for gradients in found.values():
        torch.testing.assert_close(gradients, found["norm"])
    assert any(gradient.any() for gradient in found["norm"])


@pytest.mark.slow
@pytest.mark.inductor
def test_the_generator_approaches_the_gaussians() -> None:
    distances = torch.tensor(gradient_penalty.train(*PROGRAMS["norm"], steps=200, seed=0))
    assert distances[-40:].mean() < 0.6 * distances[:40].mean()


@pytest.mark.long
def test_weights_of_losses_are_those_of_two_backwards() -> None:
    torch.manual_seed(0)
    network = physics_informed.Burgers().double()
    given = 2 * torch.rand(3, 16, dtype=torch.float64) - 1
    parameters, rows = list(network.parameters()), []
    for number in range(2):
        gradients = torch.autograd.grad(network(*given)[number], parameters, materialize_grads=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    both = torch.stack(rows)
    model = gr.transform(network, physics_informed.WAYS["AlignedMTL"][0])
    sum(model(*given)).backward()
    found = torch.cat([p.grad.flatten() for p in parameters])
    latest = model.monitor.latest()
    weights = torch.tensor([latest[f"loss_weight_{number}@group:default"] for number in range(2)], dtype=torch.float64)
    torch.testing.assert_close(found, weights @ both, rtol=1e-5, atol=1e-8)
    assert (weights - 1).abs().min() > 0.1


def made(example: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the model of an example in float64, and a batch."""
    torch.manual_seed(0)
    if example == "forces":
        return forces.Potential().double(), tuple(one.double() for one in forces.clusters(8, 1.0, 1))
    points = gaussians(8).double(), gaussians(8).double()
    if example == "gradient_penalty":
        return Critic(gradient_penalty.norm).double(), (*points, torch.rand(8, 1, dtype=torch.float64))
    given = 2 * torch.rand(3, 16, dtype=torch.float64) - 1
    return physics_informed.Burgers().double(), (given[0], given[1].abs(), given[2])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=[pytest.mark.inductor, pytest.mark.slow])])
@pytest.mark.parametrize("example", ["forces", "gradient_penalty", "physics_informed"])
def test_twenty_steps_are_those_of_eager_pytorch(example: str, compiled: bool) -> None:
    (plain, inputs), (net, _) = made(example), made(example)
    model = gr.transform(net, [gr.on("error:*", ClipByNorm(1e9)), gr.on("gradient:*", CheckFinite())])
    if compiled:
        model.compile()
    for run, owner in ((plain, plain), (model, net)):
        optimizer = torch.optim.Adam(owner.parameters(), lr=1e-3)
        for _ in range(20):
            optimizer.zero_grad()
            loss = run(*inputs)
            (sum(loss) if isinstance(loss, tuple) else loss).backward()
            optimizer.step()
    near = 1e-6 if compiled else 1e-10
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=near, atol=near)


@pytest.mark.pure
def test_the_exact_solution_solves_the_equation() -> None:
    x, t = (one.double().requires_grad_() for one in (torch.linspace(-0.9, 0.9, 19), torch.full((19,), 0.4)))
    u = physics_informed.exact(x, t)
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x)
    residual = u_t + u * u_x - physics_informed.VISCOSITY * u_xx
    assert residual.abs().max() < 1e-6 * u_t.abs().max()
    early = physics_informed.exact(x.detach(), torch.full_like(x, 1e-5).detach())
    torch.testing.assert_close(early, -torch.sin(torch.pi * x.detach()), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.inductor
def test_weighed_losses_solve_the_equation_better() -> None:
    plain, weighed = (
        physics_informed.train(*physics_informed.WAYS[name], steps=1200, seed=1) for name in ("plain", "AlignedMTL")
    )
    assert weighed < 0.8 * plain
