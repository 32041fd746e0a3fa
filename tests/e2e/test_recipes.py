"""Each block of docs/recipes.md does what it says, in float64: against eager hooks, or its formula by hand."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import Zero
from gradrewrite.testing import assert_matches_eager

from helpers import ROOT
from models.small import Lambda

PAGE = (ROOT / "docs" / "recipes.md").read_text()
MODEL = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
SECTIONS = dict(re.findall(r"^###[^\n]*\{#(.*?)\}$(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
RECIPES = {name: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for name, text in SECTIONS.items()}
BY_HAND = (
    "straight-through",
    "relevance",
    "annealing",
    "pinn",
    "equal-losses",
    "automatic-clipping",
    "reweighting",
    "noise-scale",
    "gradcam",
)
# What acts behind the update, or only looks: a gradient is not changed.
UNCHANGED = ("freeze", "thaw", "prune", "mask", "rows", "new-rows", "selective", "decay", "load", "tokens")


def names_of(recipe: str, block: int = 0) -> dict[str, Any]:
    """Return what a block of a recipe defines, after those before it."""
    assert MODEL is not None
    names: dict[str, Any] = {"math": math}
    exec(MODEL[1], names)
    for code in RECIPES[recipe][: block + 1]:
        exec(code, names)
    return names


class ActorCritic(nn.Module):
    """A model whose trunk ends with an op."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.actor, self.critic = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.fc(x))
        return self.actor(h), self.critic(h)


def make(names: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return names["Adapted" if "Adapted" in names else "Net"]().double()


def tokens(rows: int = 6) -> Tensor:
    return torch.randint(0, 10, (rows, 5), generator=torch.Generator().manual_seed(0))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def test_every_recipe_is_found() -> None:
    assert len(RECIPES) == len(re.findall("^### ", PAGE, re.MULTILINE)) >= 30
    assert all(RECIPES.values())
    assert f"{len(RECIPES)} tested [recipes]" in (ROOT / "README.md").read_text()


@pytest.mark.broad
@pytest.mark.parametrize(
    ("recipe", "block"), [(name, n) for name in RECIPES if name not in BY_HAND for n in range(len(RECIPES[name]))]
)
def test_equals_hooks_of_eager_autograd(recipe: str, block: int) -> None:
    names = names_of(recipe, block)
    net = ActorCritic().double() if (recipe, block) == ("head", 1) else make(names)
    x = tokens() if "router" in dict(net.named_children()) else torch.randn(3, 4, dtype=torch.float64)
    if recipe in ("prune", "mask"):
        with torch.no_grad():
            net.body[0].weight[0] = 0.0
    found = assert_matches_eager(net, names["policy"], x, steps=4, compiled=False, optimizer=adamw)
    assert found.acted
    assert bool(found.changed) == (recipe not in UNCHANGED)


def losses_of(names: dict[str, Any]) -> nn.Module:
    base: Any = names["Net"]

    class Losses(base):
        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            policy, value = super().forward(tokens)
            return policy.square().mean(), 3 * value.sin().mean()

    torch.manual_seed(0)
    return Losses().double()


def examples_of(names: dict[str, Any]) -> nn.Module:
    base: Any = names["Net"]

    class Mean(base):
        def forward(self, tokens: Tensor) -> Tensor:
            policy, value = super().forward(tokens)
            return (policy.square().sum(-1) + value.sin().squeeze(-1)).mean()

    torch.manual_seed(0)
    return Mean().double()


def gradients(net: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    own = dict(net.named_parameters())
    found = torch.autograd.grad(loss, list(own.values()), retain_graph=True, allow_unused=True)
    return {name: torch.zeros_like(own[name]) if g is None else g for name, g in zip(own, found, strict=True)}


def assert_gradients(net: nn.Module, wanted: dict[str, Tensor]) -> None:
    for name, p in net.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("block", [0, 1])
def test_straight_through(block: int) -> None:
    names = names_of("straight-through", 1)
    if block == 0:  # which has no model of its own
        names["policy"] = names_of("straight-through")["policy"]
    torch.manual_seed(0)
    net = names["Rounded"](4, 4).double()
    with torch.no_grad():
        net.weight[0, 0] = 5 / 8  # whose eightfold is outside of the range
    x = torch.randn(3, 4, dtype=torch.float64)
    model = gr.transform(net, names["policy"])
    model(x).square().sum().backward()
    rounded = (net.weight.detach() * 8).round() / 8
    rounded.requires_grad_()
    nn.functional.linear(x, rounded, net.bias.detach()).square().sum().backward()
    assert rounded.grad is not None
    inside = (8 * net.weight.detach()).abs() < 4
    torch.testing.assert_close(net.weight.grad, rounded.grad * inside if block else rounded.grad)


class Positive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> Tensor:
        return torch.zeros_like(error)


@pytest.mark.parametrize(
    ("op", "pattern"),
    [(lambda x: (1 * x).round_(), "backward:*/round_"), (lambda x: Positive.apply(x), "backward:*/apply")],
    ids=["in place", "apply"],
)
def test_other_ops_straight_through(op: Any, pattern: str) -> None:
    assert pattern.partition(":")[2] in SECTIONS["straight-through"]
    x = torch.linspace(-2, 2, 5, requires_grad=True)
    gr.transform(Lambda(lambda module, x: op(x)), gr.on(pattern, lambda op: op.error))(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(5))


class ByRatio(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return error * x.tanh() / (x + 1e-6 * x.sign())


def test_relevance() -> None:
    names = names_of("relevance")
    net, plain = make(names), make(names)
    plain.body = nn.Sequential(plain.body[0], Lambda(lambda module, x: ByRatio.apply(x)))
    for run in (gr.transform(net, names["policy"]), plain):
        sum(output.sin().sum() for output in run(tokens())).backward()
    assert_gradients(net, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})


def test_the_frame_of_all_recipes() -> None:
    _, frame = re.findall(r"```python\n(.*?)```", PAGE.split("## Parts that")[0], re.DOTALL)
    names = names_of("detach")
    exec(frame, names)
    assert "error:h" in names["names"]


@pytest.mark.parametrize("recipe", ["annealing", "pinn", "equal-losses"])
def test_losses(recipe: str) -> None:
    names = names_of(recipe)
    net = losses_of(names)
    model = gr.transform(net, names["policy"])
    by_loss = [gradients(net, loss) for loss in net(tokens())]
    weights, behind = torch.ones(2, dtype=torch.float64), list(by_loss[0])
    if recipe == "annealing":
        names["weights"][1] = weights[1] = 0.25
    elif recipe == "pinn":
        shared = [name for name in behind if all(bool(found[name].any()) for found in by_loss)]
        residual, boundary = (torch.cat([found[name].flatten() for name in shared]).abs() for found in by_loss)
        weights[1] = 0.9 + 0.1 * residual.max() / boundary.mean()
    else:
        behind = [name for name in behind if name.startswith("body.")]
        flat = torch.stack([torch.cat([found[name].flatten() for name in behind]) for found in by_loss])
        weights = flat.square().sum(1).rsqrt()
    sum(model(tokens())).backward()
    weighed: dict[str, Any] = {}
    for name in by_loss[0]:
        own = weights if name in behind else torch.ones(2, dtype=torch.float64)
        weighed[name] = sum(w * found[name] for w, found in zip(own, by_loss, strict=True))
    assert_gradients(net, weighed)


@pytest.mark.parametrize("recipe", ["automatic-clipping", "reweighting", "noise-scale"])
def test_examples(recipe: str) -> None:
    names = names_of(recipe)
    net = examples_of(names)
    model = gr.transform(net, names["policy"])
    x = tokens(12)
    model(x).backward()
    rows = [gradients(net, net(row)) for row in x.split(1)]
    norms = torch.stack([torch.stack([g.norm() for g in row.values()]).norm() for row in rows])
    factors = torch.ones(12, dtype=torch.float64)
    if recipe == "automatic-clipping":
        factors = 1 / (norms + 0.01)
    if recipe == "reweighting":
        factors = (norms <= norms.quantile(0.9)).double()
        assert 0 < factors.sum() < 12
    pairs = list(zip(factors, rows, strict=True))
    assert_gradients(net, {name: sum(f * row[name] for f, row in pairs) / 12 for name in rows[0]})
    if recipe == "noise-scale":
        assert math.isfinite(model.monitor.latest()["noise_scale@group:default"])


def test_what_is_kept_has_the_shapes_of_the_page() -> None:
    names = names_of("tokens")
    model = gr.transform(make(names), names["policy"])
    model(tokens())[0].sum().backward()
    assert model.monitor.kept()["error:embed"].norm(dim=-1).shape == (6, 5)


def test_gradcam() -> None:
    torch.manual_seed(0)
    names = names_of("gradcam")
    torch.manual_seed(0)
    net = names["Classifier"]()
    activation = net.features(torch.randn(6, 3, 8, 8))
    (error,) = torch.autograd.grad(net.head(activation.mean((2, 3)))[:, 1].sum(), activation)
    weights = error.mean((2, 3))
    wanted = torch.einsum("bc,bchw->bhw", weights, activation).relu()
    assert wanted.any()
    torch.testing.assert_close(names["maps"], wanted)


class Cells(nn.Module):
    """A recurrence in four forms, with outputs at each step or at the last one; ``cut`` detaches states by number."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.cut = kind, ""
        self.cell, self.lstm = nn.GRUCell(3, 4), nn.LSTMCell(3, 4)
        self.w, self.u = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 4)
        outputs = []
        for t in range(x.shape[1]):
            if self.kind == "lstm":
                h, c = self.lstm(x[:, t], (h, c))
            else:
                h = torch.tanh(self.w(x[:, t]) + self.u(h)) if self.kind == "ops" else self.cell(x[:, t], h)
            outputs.append(h)
            if t == 2:
                h, c = (s.detach() if name in self.cut else s for name, s in (("h", h), ("c", c)))
        return torch.stack(outputs, 1)


@pytest.mark.broad
@pytest.mark.parametrize(
    ("kind", "pattern", "cut"),
    [
        ("cell", "error:cell#2->cell", "h"),
        ("lstm", "error:lstm#2->lstm", "hc"),
        ("lstm", "error:lstm/lstm_cell#5->lstm", "c"),
        ("lstm", "error:lstm/lstm_cell#4->lstm", "h"),
        ("ops", "error:/tanh#2->u", "h"),
    ],
)
def test_cuts_between_steps(kind: str, pattern: str, cut: str) -> None:
    assert pattern in SECTIONS["truncated"] or pattern == "error:lstm/lstm_cell#4->lstm"
    torch.manual_seed(0)
    net, x = Cells(kind).double(), torch.randn(2, 5, 3, dtype=torch.float64)
    plain = copy.deepcopy(net)
    plain.cut = cut
    for run in (gr.transform(net, gr.on(pattern, Zero())), plain):
        run(x).sin().sum().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.broad
@pytest.mark.parametrize(("kind", "states"), [(nn.GRU, "h"), (nn.RNN, "h"), (nn.LSTM, "[hc]")])
@pytest.mark.parametrize("reads_all", [False, True])
def test_cuts_inside_of_recurrent_layers(kind: Any, states: str, reads_all: bool) -> None:
    pattern = f"error:rec.l*/{states}#2"
    assert pattern in SECTIONS["truncated"]
    torch.manual_seed(0)
    rec, x = kind(3, 4, num_layers=2, batch_first=True).double(), torch.randn(2, 5, 3, dtype=torch.float64)
    plain, start = copy.deepcopy(rec), 0 if reads_all else 3
    model = gr.transform(Lambda(lambda module, x: module.rec(x)[0], rec=rec), gr.on(pattern, Zero()))
    model(x)[:, start:].sin().sum().backward()
    first, state = plain(x[:, :3])
    state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
    torch.cat([first, plain(x[:, 3:], state)[0]], 1)[:, start:].sin().sum().backward()
    pairs = list(zip(rec.parameters(), plain.parameters(), strict=True))
    if reads_all:  # where the error of the output of step 2 is lost too
        assert not torch.allclose(pairs[0][0].grad, pairs[0][1].grad)
        return
    for p, q in pairs:
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


class Mixed(nn.Module):
    """Weights of a convolution, a norm, a linear layer and a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.LayerNorm(4)
        self.linear, self.cell = nn.Linear(4, 4), nn.GRUCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.linear(self.norm(self.conv(x).mean((2, 3)))))


def after_step(recipe: str, lr: float) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return each parameter before a step of SGD, its gradient, and the parameter after the step."""
    torch.manual_seed(0)
    net = Mixed().double()
    with torch.no_grad():
        net.norm.bias.fill_(0.3)
    before = copy.deepcopy(net.state_dict())
    model = gr.transform(net, names_of(recipe)["policy"])
    optimizer = gr.guard(torch.optim.SGD(net.parameters(), lr=lr), model)
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    own = gradients(net, net(x).sin().sum())
    model(x).sin().sum().backward()
    optimizer.step()
    return {name: (before[name], own[name], p.detach()) for name, p in net.named_parameters()}


def test_max_norm_of_all_kinds_of_weights() -> None:
    for before, gradient, after in after_step("max-norm", 0.1).values():
        wanted = before - 0.1 * gradient
        if wanted.dim() > 1:
            norms = wanted.flatten(1).norm(dim=1)
            assert (norms > 0.5).any()
            wanted = (wanted.flatten(1) * (0.5 / norms).clamp(max=1.0)[:, None]).view_as(wanted)
        torch.testing.assert_close(after, wanted, rtol=1e-6, atol=0.0)  # renorm divides by the norm + 1e-7


def test_centralized_gradients_of_all_kinds_of_weights() -> None:
    for before, gradient, after in after_step("centralized", 1.0).values():
        if gradient.dim() > 1:
            gradient = (gradient.flatten(1) - gradient.flatten(1).mean(1)[:, None]).view_as(gradient)
        torch.testing.assert_close(after, before - gradient, rtol=1e-9, atol=1e-12)


def test_decay_of_matrices_alone() -> None:
    for before, _, after in after_step("decay", 0.0).values():
        torch.testing.assert_close(after, before * (1 - 1e-3) if before.dim() > 1 else before, rtol=1e-12, atol=0.0)


def test_patterns_of_weights() -> None:
    x = torch.randn(3, 2, 5, 5)
    known = [site for site in gr.transform(Mixed(), []).trace(x).sites if site.kind == "gradient"]
    names = [[site.name for site in known if site.matches(pattern)] for pattern in ("*.weight", "*weight*")]
    assert set(names[1]) - set(names[0]) == {"cell.weight_ih", "cell.weight_hh"}
    assert "norm.weight" in names[0]


def test_old_rows_keep_their_bits_under_decay() -> None:
    names = names_of("new-rows")
    net = make(names)
    before = net.embed.weight.detach().clone()
    model = gr.transform(net, names["policy"])
    optimizer = gr.guard(torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1), model)
    for _ in range(3):
        sum(output.sin().sum() for output in model(tokens())).backward()
        optimizer.step()
    assert torch.equal(net.embed.weight[:8], before[:8])
    assert not (net.embed.weight[8:] == before[8:]).any()
    assert not optimizer.state[net.embed.weight]["exp_avg"][:8].any()


def test_frozen_weights_move_under_a_rule_behind() -> None:
    names = names_of("freeze")
    net = make(names)
    before = net.body[0].weight.detach().clone()
    model = gr.transform(net, [names["policy"], gr.on("param:*", lambda value: value / 2)])
    optimizer = gr.guard(torch.optim.SGD(net.parameters(), lr=0.1), model)
    sum(output.sin().sum() for output in model(tokens())).backward()
    optimizer.step()
    assert torch.equal(net.body[0].weight, before / 2)


def test_momentum_is_reset_after_every_third_update() -> None:
    layer = nn.Linear(2, 1)
    model = gr.transform(layer, names_of("momentum")["policy"])
    optimizer = gr.guard(torch.optim.Adam(layer.parameters(), lr=0.1), model)
    found = []
    for _ in range(6):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        found.append(bool(optimizer.state[layer.weight]["exp_avg"].any()))
    assert found == [True, True, False] * 2


@pytest.mark.parametrize("guarded", [False, True])
def test_a_schedule_counts_updates_where_an_optimizer_is_guarded(guarded: bool) -> None:
    layer = nn.Linear(2, 1)
    factor = gr.Schedule.linear(1.0, 0.0, steps=2)
    model = gr.transform(layer, gr.on("gradient:bias", lambda g: g * factor.value.to(g.dtype)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    optimizer = gr.guard(optimizer, model) if guarded else optimizer
    found = []
    for _ in range(2):
        for _ in range(2):
            layer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            assert layer.bias.grad is not None
            found.append(layer.bias.grad.item())
        optimizer.step()
    assert found == ([1.0, 1.0, 0.5, 0.5] if guarded else [1.0, 0.5, 0.0, 0.0])


@pytest.mark.long
def test_loads_are_rows_by_expert() -> None:
    names = names_of("load")
    net = make(names)
    model = gr.transform(net, names["policy"])
    gates: list[Tensor] = []
    net.router.register_forward_hook(lambda module, args, output: gates.append(output.detach().softmax(-1).mean(0)))
    for _ in range(2):
        net(tokens())
        sum(output.sin().sum() for output in model(tokens())).backward()
    rows = torch.tensor(model.monitor.history("load@error:/softmax", per="element"), dtype=torch.float64)
    torch.testing.assert_close(rows, torch.stack(gates[:1] * 2))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:default. gradients of an earlier backward")
@pytest.mark.parametrize("kind", ["step", "gradient"])
def test_loads_of_several_sites(kind: str) -> None:
    names = names_of("load", 1)
    net = make(names)
    model = gr.transform(net, gr.together(f"{kind}:experts.*.weight", names["norms"]))
    optimizer = gr.guard(torch.optim.SGD(net.parameters(), lr=0.0), model)
    x = tokens()
    wanted = []
    for part in (x[:2], x[2:]):  # one update
        own = gradients(net, sum(output.sin().sum() for output in net(part)))
        wanted.append(torch.stack([own[f"experts.{n}.weight"] for n in range(2)]))
        sum(output.sin().sum() for output in model(part)).backward()
    optimizer.step()
    address = "load@step:group:default" if kind == "step" else "load@group:default"
    assert address in SECTIONS["load"]
    rows = torch.tensor(model.monitor.history(address, per="element"), dtype=torch.float64)
    parts = [sum(wanted)] if kind == "step" else wanted
    torch.testing.assert_close(rows, torch.stack([part.flatten(1).norm(dim=1) for part in parts]))
