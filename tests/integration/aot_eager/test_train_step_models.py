"""Training steps as one graph: models, their outputs, parameters and modes, and ways around the step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, Observe

from models.buffers import All as AllBuffers
from models.small import Lambda, SquaredTwoLayers
from models.training_steps import Pair, adamw, batch, loss_of, sgd

POLICY = (gr.on("gradient:*", ClipByGlobalNorm(0.1)), gr.on("error:*", Observe("norm")))


falling = gr.Schedule(lambda step: 0.5 / (1 + step))


def policy() -> list[gr.Rule]:
    return list(POLICY)


@dataclass
class Output:
    loss: Tensor
    hidden: Tensor


class Named(NamedTuple):
    loss: Tensor
    hidden: Tensor


def _head(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = m.one(x).tanh()
    return m.two(h).square().mean(), h


def _net(function: Callable[..., Any], **others: Any) -> nn.Module:
    return Lambda(function, one=nn.Linear(4, 3), two=nn.Linear(3, 2), **others)


def _tied(m: Any, x: Tensor) -> Tensor:
    loss: Tensor = m.two(m.one(x).sin()).square().mean()
    return loss


def _make_tied() -> nn.Module:
    net = _net(_tied)
    net.one, net.two = nn.Linear(4, 4), nn.Linear(4, 4)
    net.two.weight = net.one.weight
    return net


def _make_frozen() -> nn.Module:
    net = _net(lambda m, x: m.two(m.one(x).tanh()).square().mean())
    net.one.weight.requires_grad_(False)
    return net


def _frozen_first(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05, momentum=0.9)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "a dict": lambda: _net(lambda m, x: dict(zip(("loss", "hidden"), _head(m, x), strict=True))),
    "a dict with more": lambda: _net(lambda m, x: {"n": 3, "loss": _head(m, x)[0], "h": [_head(m, x)[1]], "x": x}),
    "a dataclass": lambda: _net(lambda m, x: Output(*_head(m, x))),
    "a named tuple": lambda: _net(lambda m, x: Named(*_head(m, x))),
    "a tuple": lambda: _net(lambda m, x: (_head(m, x)[0], _head(m, x)[1].detach())),
    "a view of the input": lambda: _net(lambda m, x: {"loss": _head(m, x)[0], "view": x[1:], "input": x}),
    "a view of the hidden": lambda: _net(lambda m, x: {"loss": (h := _head(m, x))[0], "a": h[1][1:], "b": h[1].t()}),
    "the hidden twice": lambda: _net(lambda m, x: {"loss": (h := _head(m, x))[0], "a": h[1], "b": h[1]}),
    "a parameter": lambda: _net(lambda m, x: {"loss": _head(m, x)[0], "w": m.one.weight}),
    "a number of a tensor": lambda: _net(lambda m, x: {"loss": _head(m, x)[0], "rows": x.shape[0], "what": "text"}),
    "tied": _make_tied,
    "frozen": _make_frozen,
    "unused": lambda: _net(lambda m, x: _head(m, x)[0], three=nn.Linear(2, 2)),
    "used by no loss": lambda: _net(
        lambda m, x: {"loss": _head(m, x)[0], "other": m.three(x).sum()}, three=nn.Linear(4, 2)
    ),
    "checkpoint": lambda: _net(
        lambda m, x: m.two(checkpoint(lambda y: m.one(y).tanh().sin(), x, use_reentrant=False)).square().mean()
    ),
    "checkpoint with dropout": lambda: _net(
        lambda m, x: m.two(checkpoint(lambda y: m.drop(m.one(y)).tanh(), x, use_reentrant=False)).square().mean(),
        drop=nn.Dropout(0.5),
    ),
    "two checkpoints with dropout": lambda: _net(
        lambda m, x: m.two(
            checkpoint(lambda y: m.drop(y).sin(), checkpoint(lambda y: m.drop(m.one(y)).tanh(), x, use_reentrant=False),
                       use_reentrant=False)
        ).square().mean(),
        drop=nn.Dropout(0.5),
    ),
    "BatchNorm": lambda: _net(lambda m, x: m.two(m.norm(m.one(x)).tanh()).square().mean(), norm=nn.BatchNorm1d(3)),
    "buffers": AllBuffers,
    "no bias": lambda: Lambda(lambda m, x: m.one(x).square().mean(), one=nn.Linear(4, 3, bias=False)),
    "a scalar parameter": lambda: _net(lambda m, x: _head(m, x)[0] * m.s, s=nn.Parameter(torch.ones(()))),
    "an inplace op": lambda: _net(lambda m, x: nn.functional.leaky_relu(m.one(x), inplace=True).square().mean()),
    "an embedding": lambda: Lambda(
        lambda m, x: m.two(m.e((x[:, :2].abs() * 3).long() % 7).sum(1)).square().mean(),
        e=nn.Embedding(7, 3), two=nn.Linear(3, 2),
    ),
    "a convolution": lambda: Lambda(lambda m, x: m.c(x[:, None]).square().mean(), c=nn.Conv1d(1, 2, 3)),
    "attention": lambda: Lambda(
        lambda m, x: m.a(x[None], x[None], x[None], need_weights=False)[0].square().mean(),
        a=nn.MultiheadAttention(4, 2, batch_first=True),
    ),
}  # fmt: skip
_SAME_LOSS = {"a dict with more", "a tuple"}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MODELS)
def test_a_model(name: str) -> None:
    torch.manual_seed(0)
    pair = Pair(MODELS[name]().double(), policy, sgd)
    for number in range(4):
        pair.step(batch(number))
    pair.finish()


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_modes(mode: str) -> None:
    net = _net(
        lambda m, x: m.two(m.drop(m.norm(m.one(x))).tanh()).square().mean(),
        norm=nn.BatchNorm1d(3), drop=nn.Dropout(0.5),
    ).double()  # fmt: skip
    pair = Pair(net, policy, sgd)
    for number in range(6):
        for model in (pair.one, pair.two, pair.net):
            model.train(mode == "train" or number % 2 == 0)
        pair.step(batch(number))
    pair.finish()


def test_keyword_arguments() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 3)

        def forward(self, x: Tensor, *, scale: float = 1.0, y: Tensor | None = None, flags: Any = ()) -> Tensor:
            out = self.one(x) * scale
            return (out if y is None else out - y).square().mean() + len(flags)

    pair = Pair(Net().double(), policy, sgd)
    pair.step(batch(0))
    pair.step(x=batch(1), scale=2.0)
    pair.step(batch(2), y=torch.ones(6, 3, dtype=torch.float64))
    pair.step(batch(3), y=torch.ones(6, 3, dtype=torch.float64), flags={"a": 1})
    pair.step(batch(4), scale=3.0, flags=[1, 2])
    pair.finish()


def test_model_output_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16, use_cache=False)
    torch.manual_seed(0)
    net = transformers.GPT2LMHeadModel(config).double()
    pair = Pair(net, lambda: [gr.on("gradient:*", ClipByGlobalNorm(0.1))], sgd)
    for number in range(3):
        ids = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(number))
        out = pair.step(input_ids=ids, labels=ids)
        assert type(out).__name__ == "CausalLMOutputWithCrossAttentions"
        assert out.logits.shape == (2, 7, 11)
    pair.finish()


def test_autocast() -> None:
    net = SquaredTwoLayers()
    pair = Pair(net, policy, sgd, near=1e-6)
    for number in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pair.step(batch(number).float())
    pair.finish()
    plain = Pair(net, policy, sgd, near=1e-6)
    for number in range(4):
        plain.step(batch(number).float())
    assert not torch.allclose(plain.one.one.weight, pair.one.one.weight, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_dtypes(dtype: torch.dtype) -> None:
    net = Lambda(
        lambda m, x: (x.to(m.w.dtype) @ m.w).abs().square().mean(), w=nn.Parameter(torch.randn(4, 3).to(dtype))
    )
    near = 2e-2 if dtype == torch.bfloat16 else 1e-6
    pair = Pair(net, lambda: [gr.on("gradient:*", ClipByGlobalNorm(0.1))], sgd, near=near)
    for number in range(4):
        pair.step(batch(number))
    pair.finish()


def test_parameters_of_several_dtypes() -> None:
    net = _net(lambda m, x: m.two(m.one(x).tanh().float()).square().mean())
    net.one.double()
    pair = Pair(net, lambda: [gr.on("gradient:*", ClipByGlobalNorm(0.1))], sgd, near=1e-6)
    for number in range(4):
        pair.step(batch(number))
    pair.finish()


def test_sizes_that_change_do_not_compile_again_and_again() -> None:
    pair = Pair(SquaredTwoLayers().double(), policy, sgd)
    pair.step(batch(0))
    pair.step(batch(1))
    counters.clear()
    before = counters["stats"]["unique_graphs"]
    for number, rows in enumerate((5, 7, 9, 11, 4, 6, 3, 8), 2):
        pair.step(batch(number, rows))
    # One dynamic graph for the training step, and one for each of the other two.
    assert counters["stats"]["unique_graphs"] - before <= 3
    assert len(pair.one.explain().graphs) <= 3
    pair.finish()


@pytest.mark.parametrize("rows", [(1, 4, 1, 6), (6, 1, 6, 1)])
def test_a_single_row(rows: tuple[int, ...]) -> None:
    pair = Pair(SquaredTwoLayers().double(), policy, sgd)
    for number, count in enumerate(rows):
        pair.step(batch(number, count))
    pair.finish()


def test_nothing_compiles_anew_from_step_to_step() -> None:
    pair = Pair(
        SquaredTwoLayers().double(),
        lambda: [gr.on("gradient:*", CheckFinite("skip")), gr.on("step:*", ClipByGlobalNorm(falling))],
        sgd, schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    )  # fmt: skip
    for number in range(3):
        pair.step(batch(number), micro_batches=[batch(100 + number)])
    counters.clear()
    for number in range(3, 12):
        pair.step(batch(number), micro_batches=[batch(100 + number)])
    assert counters["stats"]["unique_graphs"] == 0
    pair.finish()


def test_two_optimizers_over_parts_of_the_model() -> None:
    """Each has a step of its own; what the other has is left alone."""
    torch.manual_seed(0)
    net = SquaredTwoLayers().double()
    models = [gr.transform(copy.deepcopy(net), policy()) for _ in range(2)]
    parts = [[list(m.one.parameters()), list(m.two.parameters())] for m in models]
    own = [torch.optim.SGD(part, lr=0.05, momentum=0.9) for part in parts[0]]
    steps = [gr.train_step(models[0], optimizer, compile=False) for optimizer in own]
    two = [gr.guard(torch.optim.SGD(part, lr=0.05, momentum=0.9), models[1]) for part in parts[1]]
    for number in range(6):
        at = number % 2
        loss = steps[at](batch(number))
        wanted = models[1](batch(number))
        wanted.backward()
        two[at].step()
        models[1].zero_grad()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
        for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    assert any(not torch.equal(p, q) for p, q in zip(models[0].parameters(), net.parameters(), strict=True))


def test_param_groups_with_settings_of_their_own() -> None:
    def optimize(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = list(parameters)
        groups = [{"params": [first], "lr": 0.1, "weight_decay": 0.1}, {"params": rest, "momentum": 0.5}]
        return torch.optim.SGD(groups, lr=0.01)

    pair = Pair(SquaredTwoLayers().double(), policy, optimize)
    for number in range(5):
        pair.step(batch(number))
        for optimizer in (pair.optimizer, pair.reference, pair._plain):
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.param_groups[1]["momentum"] = 0.5 - 0.1 * number  # baked in, or not
            optimizer.param_groups[0]["weight_decay"] *= 0.9
    pair.finish()


def test_a_group_that_is_added() -> None:
    net = _net(lambda m, x: m.two(m.one(x).tanh() * m.s).square().mean(), s=nn.Parameter(torch.ones(3)))

    def optimize(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters)[1:], lr=0.05, momentum=0.9)

    pair = Pair(net.double(), policy, optimize)
    pair.step(batch(0))
    pair.step(batch(1))
    for model, optimizer in ((pair.one, pair.optimizer), (pair.two, pair.reference), (pair.net, pair._plain)):
        first = next(iter(model.parameters()))
        first.grad = None
        optimizer.add_param_group({"params": [first]})
    for number in range(2, 5):
        pair.step(batch(number))
    pair.finish()


@pytest.mark.parametrize("unfreezes", [True, False])
def test_parameters_that_thaw_or_freeze(unfreezes: bool) -> None:
    net = SquaredTwoLayers().double()
    net.one.requires_grad_(not unfreezes)
    pair = Pair(net, policy, sgd)
    pair.step(batch(0))
    pair.step(batch(1))
    for model in (pair.one, pair.two, pair.net):
        model.one.requires_grad_(unfreezes)
    for number in range(2, 5):
        pair.step(batch(number))
    pair.finish()


def test_gradients_that_are_there_are_added() -> None:
    pair = Pair(SquaredTwoLayers().double(), lambda: [gr.on("step:*", ClipByGlobalNorm(0.5))], sgd)
    for number in range(4):
        for model in (pair.one, pair.two, pair.net):
            for n, p in enumerate(model.parameters()):
                p.grad = torch.full_like(p, 0.1 * number) if n % 2 == number % 2 else None
        pair.step(batch(number))
    pair.finish()


def test_zero_grad_between_steps() -> None:
    pair = Pair(SquaredTwoLayers().double(), policy, sgd)
    for number in range(4):
        pair.optimizer.zero_grad()
        pair.one.zero_grad()
        pair.step(batch(number))
    pair.finish()


def test_zero_grad_drops_what_was_accumulated() -> None:
    pair = Pair(SquaredTwoLayers().double(), policy, sgd)
    pair.step(batch(0))
    pair.step_of_one.accumulate(batch(10))
    pair.optimizer.zero_grad()
    pair.two(batch(10)).backward()
    pair.reference.zero_grad()
    pair.step(batch(1))
    pair.finish()


@pytest.mark.parametrize("make", [sgd, adamw])
def test_back_to_two_phases_and_forth(make: Any) -> None:
    rules = [gr.on("error:*", Observe("norm")), gr.on("step:*", ClipByNorm(0.1))]
    pair = Pair(SquaredTwoLayers().double(), lambda: list(rules), make)
    for number in range(9):
        if number % 3 != 1:
            pair.step(batch(number), micro_batches=[batch(100 + number)] * (number % 2))
            continue
        for model, optimizer in pair.trained():
            model(batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        pair.net(batch(number)).backward()
        pair._plain.step()
        pair._plain.zero_grad()
        pair.compare()
    pair.finish()


def test_a_micro_batch_in_two_phases_and_the_step_in_one_graph() -> None:
    pair = Pair(SquaredTwoLayers().double(), lambda: [gr.on("step:*", ClipByGlobalNorm(0.1))], sgd)
    pair.step(batch(0))
    for number in range(1, 4):
        for model in (pair.one, pair.two, pair.net):
            model(batch(100 + number)).backward()
        pair.step(batch(number))
    pair.finish()


@pytest.mark.parametrize("make", [sgd, adamw])
def test_resumed(make: Any) -> None:
    def rules() -> list[Any]:
        count = gr.State((), 1.0, torch.float64, name="count")

        def grow(g: Tensor) -> Tensor:
            count.set(count.value * 1.1)
            return g * count.value

        return [*policy(), gr.on("error:one", grow), gr.on("step:*", ClipByGlobalNorm(falling))]

    first = Pair(SquaredTwoLayers().double(), rules, make)
    for number in range(3):
        first.step(batch(number))
    kept = copy.deepcopy((first.one.state_dict(), first.optimizer.state_dict(), gr.state_dict(first.one)))
    for number in range(3, 6):
        first.step(batch(number))

    for which in ("fresh", "used"):
        second = Pair(SquaredTwoLayers().double(), rules, make)
        if which == "used":
            second.step(batch(40))
            second.step(batch(41))
        for model, optimizer in second.trained():
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(copy.deepcopy(kept[1]))
            gr.load_state_dict(model, kept[2])
        for number in range(3, 6):
            second.step(batch(number))
        second.same(dict(second.one.state_dict()), dict(first.one.state_dict()), "resumed")
        second.same(second.optimizer.state_dict(), first.optimizer.state_dict(), "resumed")


@pytest.mark.parametrize("action", [ClipByGlobalNorm(0.1), ClipByNorm(0.1)])
def test_a_clip_that_meets_accumulated_gradients_warns(action: Any) -> None:
    texts = []
    for is_one in (True, False):
        model = gr.transform(SquaredTwoLayers().double(), [gr.on("gradient:*", action)])
        optimizer = sgd(model.parameters())
        step = gr.train_step(model, optimizer, compile=False)
        step(batch(0))

        def run(model: Any = model, optimizer: Any = optimizer, step: Any = step, is_one: bool = is_one) -> None:
            for number in range(2):
                if is_one:
                    step.accumulate(batch(number))
                    step(batch(10 + number))
                else:
                    model(batch(number)).backward()
                    model(batch(10 + number)).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        with pytest.warns(gr.RewriteWarning) as caught:
            run()
        texts.append([str(w.message) for w in caught])
    assert len(texts[1]) == 1
    assert texts[0] == texts[1]


def test_evaluation_between_steps() -> None:
    pair = Pair(SquaredTwoLayers().double(), policy, sgd)
    for number in range(4):
        pair.step(batch(number))
        with torch.no_grad():
            assert torch.allclose(pair.one(batch(50)), pair.two(batch(50)), rtol=1e-12)
            assert torch.allclose(pair.one.original(batch(50)), pair.two(batch(50)), rtol=1e-12)
    pair.finish()


def test_in_no_grad_it_trains_as_well() -> None:
    pair = Pair(SquaredTwoLayers().double(), policy, sgd)
    for number in range(3):
        x = batch(number)
        with torch.no_grad():
            pair.step_of_one(x)
        pair.two(x).backward()
        pair.reference.step()
        pair.reference.zero_grad()
        pair.net(x).backward()
        pair._plain.step()
        pair._plain.zero_grad()
        pair.compare()
    pair.finish()


def test_no_warning_of_schedulers() -> None:
    model = gr.transform(SquaredTwoLayers().double(), policy())
    optimizer = sgd(model.parameters())
    step = gr.train_step(model, optimizer, compile=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            step(batch(number))
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 8)
    assert model.monitor.history("total_norm@group:default")[0] > 0.1


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    ],
)
def test_schedulers(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    pair = Pair(SquaredTwoLayers().double(), policy, sgd, schedule=make)
    for number in range(7):
        pair.step(batch(number))
    pair.finish()


def test_a_learning_rate_that_is_a_tensor() -> None:
    def optimize(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=torch.tensor(0.05, dtype=torch.float64))

    pair = Pair(SquaredTwoLayers().double(), policy, optimize)
    for number in range(4):
        pair.step(batch(number))
        for optimizer in (pair.optimizer, pair.reference, pair._plain):
            optimizer.param_groups[0]["lr"].mul_(0.5)
    pair.finish()


def test_maximize() -> None:
    pair = Pair(SquaredTwoLayers().double(), policy, lambda p: torch.optim.SGD(p, lr=0.01, maximize=True))
    for number in range(4):
        pair.step(batch(number))
    pair.finish()


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_kinds_of_an_optimizer(kind: str) -> None:
    pair = Pair(
        SquaredTwoLayers().double(), lambda: [*policy(), gr.on("gradient:*", CheckFinite("skip"))],
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, **{kind: True}), near=1e-11,
    )  # fmt: skip
    for number in range(4):
        x = batch(number)
        x[0] = torch.inf if number == 2 else x[0]
        pair.step(x)
    pair.finish()
    assert pair.one.monitor.skipped == 1


def test_an_input_that_wants_a_gradient() -> None:
    pair = Pair(SquaredTwoLayers().double(), lambda: [gr.on("input:*", ClipByNorm(0.01))], sgd)
    xs = [[batch(number).requires_grad_() for _ in range(3)] for number in range(3)]
    for x, y, z in xs:
        loss = pair.step_of_one(x)
        pair.two(y).backward()
        pair.net(z).backward()
        pair.reference.step()
        pair.reference.zero_grad()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-15)
        assert float(y.grad.norm()) == pytest.approx(0.01)
        assert not loss.requires_grad
        pair.compare()


def test_a_buffer_that_is_replaced() -> None:
    net = _net(lambda m, x: m.two(m.one(x).tanh() * m.scale).square().mean(), scale=torch.ones(3))
    pair = Pair(net.double(), policy, sgd)
    for number in range(4):
        for model in (pair.one, pair.two, pair.net):
            model.scale = torch.full((3,), 1.0 + number, dtype=torch.float64)
        pair.step(batch(number))
    pair.finish()


def test_data_of_parameters_that_is_replaced() -> None:
    pair = Pair(SquaredTwoLayers().double(), policy, sgd)
    for number in range(4):
        pair.step(batch(number))
        for model in (pair.one, pair.two, pair.net):
            for p in model.parameters():
                p.data = p.data.clone() * 1.1
    pair.finish()


def test_an_average_of_weights() -> None:
    pair = Pair(SquaredTwoLayers().double(), policy, sgd)
    averages = [torch.optim.swa_utils.AveragedModel(m.original) for m in (pair.one, pair.two)]
    for number in range(4):
        pair.step(batch(number))
        for average, model in zip(averages, (pair.one, pair.two), strict=True):
            average.update_parameters(model.original)
    pair.same(dict(averages[0].state_dict()), dict(averages[1].state_dict()), "average")
    pair.finish()


def test_two_training_steps_of_one_model() -> None:
    """One with another mode of the model: both belong to the same optimizer."""
    pair = Pair(SquaredTwoLayers().double(), policy, sgd)
    other = gr.train_step(pair.one, pair.optimizer, compile=False)
    first = pair.step_of_one
    for number in range(5):
        pair.step_of_one = other if number % 2 else first
        pair.step(batch(number))
    pair.finish()


def test_losses_of_a_callable() -> None:
    """The loss is computed outside of the model."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    target = torch.randn(6, 2, dtype=torch.float64)

    def compute_loss(model: Any, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        loss: Tensor = weight * nn.functional.mse_loss(model(x), y)
        return loss

    rules = [gr.on("error:0", ClipByNorm(0.01)), gr.on("error:*", Observe("norm"))]
    models = [gr.transform(copy.deepcopy(net), rules) for _ in range(2)]
    one, two = (sgd(m.parameters()) for m in models)
    gr.guard(two, models[1])
    step = gr.train_step(models[0], one, compute_loss=compute_loss, compile=False)
    for number in range(4):
        loss = step(batch(number), target, weight=2.0)
        wanted = compute_loss(models[1], batch(number), target, weight=2.0)
        wanted.backward()
        two.step()
        two.zero_grad()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-15)
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-15)
    for address in models[1].monitor.latest():
        assert models[0].monitor.history(address) == pytest.approx(models[1].monitor.history(address)), address


def test_the_loss_of_several_outputs() -> None:
    pair = Pair(_net(lambda m, x: [m.one(x).square().mean(), m.two(m.one(x)).sin().mean()]).double(), policy, sgd)
    for number in range(3):
        pair.step(batch(number))
    pair.finish()
    assert isinstance(loss_of([torch.zeros((), requires_grad=True)]), Tensor)
