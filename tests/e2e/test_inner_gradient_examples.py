"""Examples that differentiate inside of their forward: their claims, against eager PyTorch where there is one."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import gradrewrite as gr
from gradrewrite.examples import forces, gradient_penalty
from gradrewrite.examples.gradient_penalty import CHECK, PROGRAMS, Critic, gaussians


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
def test_close_pairs_spoil_forces_but_for_a_clip_of_errors(capsys: pytest.CaptureFixture[str]) -> None:
    forces.main([])
    lines = capsys.readouterr().out.splitlines()
    learned, *rows = (line.rsplit(maxsplit=1) for line in lines[1:])
    errors = {name.removesuffix(" mean error of a force").rstrip(): float(error) for name, error in rows}
    mean = float(learned[1])
    assert errors["plain, no close pair"] < errors["error clip"] < 0.9 * mean
    assert min(errors["plain"], errors["parameter clip"], errors["clip at a layer"]) > errors["error clip"]


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
    for name, (length, policy) in list(PROGRAMS.items())[1:]:
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
