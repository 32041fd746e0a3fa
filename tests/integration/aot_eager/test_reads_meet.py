"""Functions that read other values, where other features meet them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.backends.model_state import state_of
from gradrewrite.passes import Observe, Scale, Store, WeighLosses
from gradrewrite.testing import assert_matches_eager

WIDTH = 4


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.arange(WIDTH).double())

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.lin(h) + x) * self.gate(h).sigmoid() + 0.1 * self.scale
        return y


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for row in x:
            h = self.cell(row, h)
        return h.square().mean()


class OverTime(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rec: Any = kind(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.rec(x)[0].square().mean()


class Stack(nn.Module):
    """Equal blocks, and two losses if it is asked."""

    def __init__(self, losses: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )
        self.head, self.losses = nn.Linear(WIDTH, 1), losses

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        loss = self.head(x).square().mean()
        return loss if self.losses == 1 else (loss, x.sin().mean())


def at_cell(g: Tensor, *, gate: Tensor, w: Tensor, scale: Tensor, error: Tensor) -> Tensor:
    return g * gate.sigmoid() + w.mean() + 0.1 * scale + 0.1 * error.sum()


OF_CELL = {
    "gate": "activation:{parent}.gate", "w": "param:{name}.weight", "scale": "param:cell.scale", "error": "error:cell",
}  # fmt: skip


def rows(*sizes: int) -> Tensor:
    return torch.randn(*sizes, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def made(module: nn.Module) -> Any:
    torch.manual_seed(0)
    return module.double()


def gradients(model: Any, module: nn.Module, x: Tensor, backwards: int = 2) -> list[Tensor]:
    for _ in range(backwards):
        loss = model(x)
        (sum(loss) if isinstance(loss, tuple) else loss).backward()
    return [g for p in module.parameters() if (g := p.grad) is not None]


def assert_same(got: list[Tensor], wanted: list[Tensor], rtol: float = 1e-10) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("loops", ["rolled", "unrolled"])
def test_values_of_the_same_iteration(loops: Any) -> None:
    plain = made(Recurrence())
    module, seen = copy.deepcopy(plain), list[dict[str, Any]]()
    hooks: list[tuple[nn.Module, str]] = [(plain.cell.lin, "lin"), (plain.cell.gate, "gate"), (plain.cell, "cell")]
    for part, name in hooks:

        def keep(_: Any, __: Any, out: Tensor, name: str = name) -> None:
            if name == "lin":
                seen.append({})
            now = seen[-1]
            now[name] = out.detach()
            if name == "cell":
                out.register_hook(lambda g: now.update(error=g))
            if name == "lin":
                own = {"w": plain.cell.lin.weight.detach(), "scale": plain.cell.scale}
                out.register_hook(lambda g: at_cell(g, gate=now["gate"], error=now["error"], **own))

        part.register_forward_hook(keep)
    model = gr.transform(module, gr.on("error:cell.lin", at_cell, reads=OF_CELL), loops=loops)
    assert_same(gradients(model, module, rows(5, 3)), gradients(plain, plain, rows(5, 3)))
    assert [loop.reason for loop in model.explain().graphs[0].loops] == [""] * (loops == "rolled")


def test_one_iteration_reads_its_own_values() -> None:
    found = []
    for loops, number in (("rolled", "#3"), ("unrolled", "")):
        module = made(Recurrence())
        rule = gr.on("error:cell.lin#3", lambda g, *, of: g * of, reads={"of": f"activation:cell.gate{number}"})
        found.append(gradients(gr.transform(module, rule, loops=loops), module, rows(5, 3)))
    assert_same(*found)


@pytest.mark.parametrize(
    ("of", "words"),
    [
        ("activation:cell.gate#3", "no site matches activation:cell.gate#3 in this iteration of the loop"),
        ("activation:cell.gate#0", "'#n' is one iteration, and the rule acts in several"),
        ("activation:/square", "no site matches activation:/square in this iteration"),
    ],
)
def test_other_iterations_are_refused_in_rolled_loops(of: str, words: str) -> None:
    model = gr.transform(made(Recurrence()), gr.on("error:cell.lin", by_mean, reads={"of": of}), loops="rolled")
    with pytest.raises(gr.PolicyError, match=f"error:cell.lin: call.*{words}"):
        model(rows(5, 3))


def by_mean(g: Tensor, *, of: Tensor) -> Tensor:
    return g * of.sin().mean()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_inside_recurrent_layers(kind: Any) -> None:
    reads = {"of": "activation:rec.l0/gates" if kind is not nn.RNN else "activation:rec.l0/h"}
    rules = [gr.on("error:rec.l0/h", by_mean, reads=reads)]
    rules.append(gr.on("error:rec.l0/h", by_mean, reads={"of": "param:rec.weight_hh_l0"}))
    found = assert_matches_eager(made(OverTime(kind)), rules, rows(5, 3), compiled=False, steps=2)
    assert len(found.changed) == 5


def test_equal_regions_share_code_where_names_are_filled_in() -> None:
    policy = gr.on("error:layers.*.0", by_mean, reads={"of": "activation:{parent}.1"})
    whole, parts = made(Stack()), made(Stack())
    model = gr.transform(parts, policy, regions="layers.*")
    assert_same(gradients(model, parts, rows(5)), gradients(gr.transform(whole, policy), whole, rows(5)))
    state = state_of(model)
    assert state is not None
    assert state.regions is not None
    assert [len(entry.users) for entry in state.regions._entries] == [3]


def test_a_value_of_another_region_is_refused() -> None:
    policy = gr.on("error:layers.1.0", by_mean, reads={"of": "activation:layers.0.1"})
    model = gr.transform(made(Stack()), policy, regions="layers.*")
    with pytest.raises(gr.PolicyError, match=r"no site matches activation:layers.0.1 in this graph, which is a part"):
        model(rows(5))


def test_gradients_are_read_before_their_own_actions() -> None:
    plain = made(Stack())
    module = copy.deepcopy(plain)

    def add(g: Tensor, p: Tensor, *, other: Tensor) -> Tensor:
        return g + other * p

    first, last = "gradient:layers.0.0.weight", "gradient:layers.2.2.weight"
    rules = [gr.on("gradient:*", Scale(3.0)), gr.on(first, add, reads={"other": last})]
    rules.append(gr.on(last, add, reads={"other": first}))
    gr.transform(module, rules)(rows(5)).backward()
    plain(rows(5)).backward()
    a, b = plain.layers[0][0].weight, plain.layers[2][2].weight
    assert_same([module.layers[0][0].weight.grad], [3 * a.grad + b.grad * a.detach()])
    assert_same([module.layers[2][2].weight.grad], [3 * b.grad + a.grad * b.detach()])


def test_a_stored_value_is_read_as_it_is_restored() -> None:
    plain = made(Stack())
    module, x = copy.deepcopy(plain), rows(2000)
    reads = gr.on("error:layers.0.0", lambda g, *, of: 0 * g + of, reads={"of": "activation:layers.0.1"})
    gr.transform(module, [gr.on("saved:layers.0.1", Store("bfloat16")), reads])(x).backward()
    stored = plain.layers[0][1](plain.layers[0][0](x)).detach().bfloat16().double()
    assert_same([module.layers[0][0].bias.grad], [stored.sum(0)])


def test_what_is_kept_for_a_function_is_counted() -> None:
    policy = gr.on("error:layers.1.0", lambda g, *, of: g * of, reads={"of": "activation:layers.0.0"})
    found = gr.transform(made(Stack()), policy).memory(rows(500)).rows
    (row,) = [row for row in found if row.reason == "kept because of the policy"]
    assert (str(row.site), row.plain_bytes, row.policy_bytes) == ("saved:layers.0.0", 0, 500 * WIDTH * 8)


def test_losses_that_are_weighed() -> None:
    read = gr.on("error:layers.1.0", by_mean, reads={"of": "activation:layers.0.1"})
    weigh = gr.on("gradient:*", WeighLosses(lambda gramian: torch.ones_like(gramian.diagonal())))
    weighed, alone = made(Stack(2)), made(Stack(2))
    assert_same(
        gradients(gr.transform(weighed, [read, weigh]), weighed, rows(5), 1),
        gradients(gr.transform(alone, read), alone, rows(5), 1),
    )
    error = gr.on("error:layers.1.0", by_mean, reads={"of": "error:layers.2"})
    with pytest.raises(gr.PolicyError, match=r"error:layers.2.2 is read where WeighLosses takes .* apart"):
        gr.transform(made(Stack(2)), [error, weigh])(rows(5))


def test_a_record_and_a_state_of_a_function_that_reads() -> None:
    mean = gr.State()

    def follow(g: Tensor, *, of: Tensor) -> Tensor:
        mean.set(0.5 * mean + 0.5 * of.mean())
        gr.record("of", of.abs().mean())
        return g + mean

    policy = [
        gr.on("error:head", follow, reads={"of": "activation:layers.1"}),
        gr.on("activation:layers.1", Observe("mean_abs")),
    ]
    module = made(Stack())
    model = gr.transform(module, policy)
    gradients(model, module, rows(5))
    latest = model.monitor.latest()
    assert latest["of@error:head"] == pytest.approx(latest["mean_abs@activation:layers.1.2"])


class Shared(nn.Module):
    """Two experts with one layer in common."""

    class Expert(nn.Module):
        def __init__(self, up: nn.Module) -> None:
            super().__init__()
            self.up, self.router = up, nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.up(x) * self.router(x).sigmoid()
            return y

    def __init__(self) -> None:
        super().__init__()
        up = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = self.Expert(up), self.Expert(up)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).square().sum()


def test_the_module_around_a_call_of_a_shared_module() -> None:
    plain = made(Shared())
    module, found = copy.deepcopy(plain), list[dict[str, Tensor]]()
    for expert in (plain.a, plain.b):
        expert.router.register_forward_hook(lambda _, __, out: found[-1].update(router=out.detach()))

    def act(_: Any, __: Any, out: Tensor) -> None:
        own: dict[str, Tensor] = {}
        found.append(own)
        out.register_hook(lambda g: g * own["router"])

    plain.a.up.register_forward_hook(act)
    rule = gr.on("error:*.up", lambda g, *, of: g * of, reads={"of": "activation:{parent}.router"})
    assert_same(gradients(gr.transform(module, rule), module, rows(5)), gradients(plain, plain, rows(5)))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("unread", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.left(h).square().sum() + self.right(h).exp().mean()


@pytest.mark.parametrize("of", ["gradient:left.weight", "gradient:body.weight", "input:x"])
def test_a_gradient_that_is_computed_from_the_error_is_refused(of: str) -> None:
    model = gr.transform(made(Pair()), gr.on("error:left", by_mean, reads={"of": of}))
    with pytest.raises(gr.PolicyError, match=f"{of} is computed from error:left, and does not exist yet"):
        model(rows(5).requires_grad_())


@pytest.mark.parametrize(("at", "of"), [("left", "right"), ("right", "left")])
def test_an_error_waits_for_a_gradient(at: str, of: str) -> None:
    plain = made(Pair())
    module = copy.deepcopy(plain)
    gr.transform(module, gr.on(f"error:{at}", by_mean, reads={"of": f"gradient:{of}.weight"}))(rows(5)).backward()
    plain(rows(5)).backward()
    wanted = getattr(plain, at).weight.grad * getattr(plain, of).weight.grad.sin().mean()
    assert_same([getattr(module, at).weight.grad], [wanted])


def test_names_at_the_top_are_left_out() -> None:
    found = []
    for of in ("error:{parent}.body->{parent}.right", "error:body->right"):
        module = made(Pair())
        found.append(gradients(gr.transform(module, gr.on("error:left", by_mean, reads={"of": of})), module, rows(5)))
    assert_same(*found)


def test_what_the_forward_does_not_read() -> None:
    model = gr.transform(made(Pair()), gr.on("error:left", by_mean, reads={"of": "param:unread"}))
    with pytest.raises(gr.PolicyError, match="the forward reads no param:unread"):
        model(rows(5))


@pytest.mark.parametrize(
    "function", [lambda of, g: g, lambda g, of, x: g, lambda *, of: of, lambda a, b, c, *, of: a], ids=range(4)
)
def test_signatures(function: Any) -> None:
    with pytest.raises(TypeError, match="before the keywords in reads it takes the gradient"):
        gr.call(function, reads={"of": "activation:left"})


@pytest.mark.inductor
def test_compiled_beside_loops() -> None:
    found = []
    for compiles in (True, False):
        module = made(Recurrence())
        model = gr.transform(module, gr.on("error:cell.lin", at_cell, reads=OF_CELL))
        found.append(gradients(model.compile() if compiles else model, module, rows(5, 3)))
    assert_same(*found, rtol=1e-5)


@pytest.mark.inductor
def test_in_a_backend() -> None:
    policy = gr.on("error:layers.1.0", by_mean, reads={"of": "activation:layers.0.1"})
    one, other = made(Stack()), made(Stack())
    compiled = torch.compile(one, backend=gr.backend(policy))
    assert_same(gradients(compiled, one, rows(5)), gradients(gr.transform(other, policy), other, rows(5)), rtol=1e-5)
