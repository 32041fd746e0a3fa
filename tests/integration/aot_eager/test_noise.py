"""The noise of per-example clips: where its numbers come from, and that none of them comes twice."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipPerExample

TINY = 1e-9  # so that a gradient is noise alone, of deviation 1
ROWS = 4


def noisy(max_norm: float = TINY, **options: Any) -> ClipPerExample:
    return ClipPerExample(max_norm, noise_multiplier=1 / max_norm, loss_reduction="sum", **options)


def made_by_callback(site: gr.Site) -> Any:
    return noisy() if site.kind == "gradient" else None


def noise_of(policy: Any, rows: tuple[int, ...] = (ROWS,), model: Any = None) -> list[Tensor]:
    """The gradient of each backward, one for each number of rows."""
    if model is None:
        model = gr.transform(nn.Linear(20, 5, bias=False), policy, dynamic=False)
    drawn = []
    for n in rows:
        model.zero_grad()
        model(torch.ones(n, 20)).sum().backward()
        drawn.append(model.weight.grad.clone())
    return drawn


def assert_all_differ(drawn: list[Tensor]) -> None:
    together = torch.corrcoef(torch.stack([d.flatten() for d in drawn]))
    assert float((together - torch.eye(len(drawn))).abs().max()) < 0.5
    for d in drawn:
        assert 0.7 < float(d.std()) < 1.3


@pytest.mark.long
def test_a_callback_may_make_the_action() -> None:
    """Its noise goes on where another size is compiled, with another action of the callback."""
    torch.manual_seed(0)
    assert_all_differ(noise_of(made_by_callback, (4, 4, 3, 3, 4)))


@pytest.mark.long
def test_noise_of_a_callback_goes_on_after_a_checkpoint() -> None:
    model = gr.transform(nn.Linear(20, 5, bias=False), made_by_callback, dynamic=False)
    noise_of(None, (4, 3), model)
    state = gr.state_dict(model)
    assert list(state["states"]) == ["group:default/ClipPerExample.noise.cpu"]
    wanted = noise_of(None, (4, 2), model)
    for rows in ((), (3,)):
        resumed = gr.transform(nn.Linear(20, 5, bias=False), made_by_callback, dynamic=False)
        noise_of(None, rows, resumed)
        gr.load_state_dict(resumed, state)
        assert all(map(torch.equal, noise_of(None, (4, 2), resumed), wanted))


@pytest.mark.long
@pytest.mark.parametrize("make", [lambda n: gr.on("gradient:*", noisy((1 + n) * TINY)), lambda n: made_by_callback])
def test_two_transforms_draw_other_numbers(make: Any) -> None:
    torch.manual_seed(0)
    net = nn.Linear(20, 5, bias=False)
    drawn = []
    for n in range(3):
        model = gr.transform(net, make(n), dynamic=False)
        drawn += noise_of(None, (ROWS, ROWS), model)
        del model
    assert_all_differ(drawn)


def test_groups_draw_other_numbers() -> None:
    actions = [noisy(group="a"), noisy(group="b")]
    model = gr.transform(
        nn.Sequential(nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False)),
        [gr.on("gradient:0.weight", actions[0]), gr.on("gradient:1.weight", actions[1])],
    )
    model(torch.ones(ROWS, 20)).sum().backward()
    assert_all_differ([p.grad for p in model.parameters()])


@pytest.mark.long
def test_the_seed_decides_the_noise() -> None:
    drawn = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        drawn.append(noise_of([gr.on("gradient:*", noisy())])[0])
    assert torch.equal(drawn[0], drawn[1])
    assert_all_differ(drawn[1:])


def test_only_making_an_action_with_noise_draws_from_torchs_generator() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    ClipPerExample(1.0)
    assert torch.equal(torch.get_rng_state(), before)
    noisy()
    assert not torch.equal(torch.get_rng_state(), before)
    model = gr.transform(nn.Linear(20, 5, bias=False), made_by_callback, dynamic=False)
    before = torch.get_rng_state()
    noise_of(None, (4, 3), model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.long
def test_equal_actions_are_one_group_and_a_copy_draws_other_numbers() -> None:
    first, second = noisy(), noisy()
    assert first == second
    policy = [gr.on("gradient:weight", first), gr.on("gradient:bias", second)]
    model = gr.transform(nn.Linear(20, 5), policy)
    noise_of(None, (4,), model)
    assert list(gr.state_dict(model)["states"]) == ["group:default/ClipPerExample.noise.cpu"]
    copied = copy.deepcopy(model)
    assert_all_differ([noise_of(None, (4,), copied)[0], noise_of(None, (4,), model)[0]])


def test_noise_of_several_backwards_adds_up_and_a_warning_says_so() -> None:
    torch.manual_seed(0)
    net = nn.Linear(100, 100, bias=False)
    model = gr.transform(net, gr.on("gradient:*", noisy()))
    model(torch.ones(ROWS, 100)).sum().backward()
    with pytest.warns(
        gr.RewriteWarning, match=r"default \(noise\): .* still in \.grad; noise is added in each backward"
    ):
        model(torch.ones(ROWS, 100)).sum().backward()
    assert float(net.weight.grad.square().mean()) == pytest.approx(2.0, rel=0.1)
    net.zero_grad()
    with pytest.warns(gr.RewriteWarning, match=r"default \(noise\): .* several times before this backward; noise is"):
        (model(torch.ones(ROWS, 100)).sum() + model(torch.ones(ROWS, 100)).sum()).backward()


def test_clips_of_examples_without_noise_may_add_up() -> None:
    net = nn.Linear(3, 1, bias=False)
    model = gr.transform(net, gr.on("gradient:*", ClipPerExample(1.0, loss_reduction="sum")))
    x = torch.tensor([[0.0, 3.0, 4.0], [0.0, 0.3, 0.4]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for row in x:
            model(row[None]).sum().backward()
    torch.testing.assert_close(net.weight.grad, torch.tensor([[0.0, 0.9, 1.2]]))
