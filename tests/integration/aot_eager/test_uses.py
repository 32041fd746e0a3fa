"""One use of a value, against hooks of eager autograd on ``value * 1``."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import metrics
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByValue, Keep, NanToNum, Observe, Scale, Store, WeighLosses, Zero
from gradrewrite.testing import assert_matches_eager
from gradrewrite.viz._graph_view import read_graph
from gradrewrite.viz._ladder import build_ladder

from models.saved_tensors import assert_as_expected, trace
from models.small import Lambda
from models.uses import CASES, WIDTH, Attention, Head, build, inputs


def train(model: Any, steps: int) -> list[Tensor]:
    """Return all gradients of some steps, with an accumulation and two forwards before a backward in each."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(3 * step)).backward()
        first, second = model(inputs(3 * step + 1)), model(inputs(3 * step + 2))
        first.backward()
        second.backward()
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return found


@pytest.mark.parametrize("name", CASES)
def test_equals_hooks_on_one_use(name: str) -> None:
    case = CASES[name]
    wanted, got = (train(build(case, is_by_hand=by_hand), 6) for by_hand in (True, False))
    plain = train(build(replace(case, hooks={}), is_by_hand=True), 1)

    largest = max(float(g.abs().max()) for g in wanted)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10 * largest)
    assert not all(map(torch.allclose, got, plain))


@pytest.mark.inductor
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str) -> None:
    model = build(CASES[name], is_by_hand=False)
    wanted = train(build(CASES[name], is_by_hand=True), 2)
    largest = max(float(g.abs().max()) for g in wanted)

    model.compile()
    for one, other in zip(train(model, 2), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("name", [name for name in CASES if name != "in place"])
def test_the_oracle_knows_uses(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    found = assert_matches_eager(case.program().double(), case.policy, inputs(), compiled=False)

    assert found.acted
    assert all("->" in site for site in found.acted)


def rewritten(name: str, *rules: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return gr.transform(CASES[name].program().double(), list(rules), **options)


def test_every_action_of_error_sites() -> None:
    own: list[Any] = [Observe("norm", "max_abs"), Keep(), CheckFinite(), ClipByValue(1e-3), NanToNum(), lambda g: 2 * g]
    model = rewritten("head", *(gr.on("error:/tanh->policy", action) for action in own))
    model(inputs()).backward()
    kept = model.monitor.kept()["error:/tanh->policy#1"]

    assert model.monitor.latest()["norm@error:/tanh->policy#1"] == pytest.approx(float(kept.norm()))
    assert model.monitor.latest()["max_abs@error:/tanh->policy"] > 1e-3
    assert len(model.explain().graphs[0].edits) == 2 * len(own)


def test_a_callback_is_asked_where_uses_names_them() -> None:
    def policy(site: gr.Site) -> Any:
        return ClipByValue(1e-3) if site.to == "policy" and site.to_call == 1 else None

    model = rewritten("head", policy, uses="/tanh->*")
    model(inputs()).backward()
    (edit,) = model.explain().graphs[0].edits

    assert str(edit.site) == "error:/tanh->policy#1"
    assert (edit.site.name, edit.site.op, edit.site.shape) == ("/tanh", "tanh", (3, 8, 6))
    assert not [edit for edit in rewritten("head", policy).trace(inputs()).edits]


def test_no_other_pattern_means_a_use() -> None:
    graph = rewritten("head", gr.on("error:*", Observe("norm")), uses="/tanh->*").trace(inputs())

    assert {site.to for site in graph.sites} == {"", "policy", "value"}
    assert not [edit for edit in graph.edits if edit.site.to]


def test_a_use_without_an_action_leaves_no_node() -> None:
    plain, asked = (rewritten("head", uses=uses).trace(inputs()) for uses in ((), "/tanh->policy"))
    counts = [Counter(str(node.target) for node in graph.graph_module.graph.nodes) for graph in (plain, asked)]

    assert counts[0] == counts[1]


@pytest.mark.inductor
def test_a_use_without_an_action_costs_no_kernel() -> None:
    def kernels(**options: Any) -> int:
        begin = metrics.generated_kernel_count
        rewritten("head", **options).compile()(inputs()).backward()
        return metrics.generated_kernel_count - begin

    assert kernels(uses="/tanh->policy") == kernels() > 0


def test_rolled_records_are_those_of_the_unrolled_loop() -> None:
    rules = gr.on("error:cell->cell", Observe("norm")), gr.on("error:cell->head", Observe("max_abs"))
    models = [rewritten("truncated", *rules, loops=loops) for loops in ("rolled", "unrolled")]
    for model in models:
        model(inputs()).backward()
    rolled, unrolled = (model.monitor.latest() for model in models)

    assert [loop.reason for loop in models[0].explain().graphs[0].loops] == [""]
    assert rolled == pytest.approx(unrolled, rel=1e-9)
    assert len(rolled) == 13


def test_the_sum_of_a_view_that_a_use_takes_a_part_of_is_measured() -> None:
    rules = [gr.on("error:/getitem", Observe("norm", "max_abs"))]
    parted, whole = rewritten("view", gr.on("error:/tanh->value", Scale(1.0)), *rules), rewritten("view", *rules)
    for model in (parted, whole):
        model(inputs()).backward()

    assert parted.monitor.latest() == pytest.approx(whole.monitor.latest(), rel=1e-12)
    with pytest.raises(gr.PolicyError, match="error:/getitem: Zero"):
        rewritten("view", gr.on("error:/tanh->value", Zero()), gr.on("error:/getitem", Zero()))(inputs())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.head = nn.LayerNorm(WIDTH), Attention(), Head()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attn(h) + self.head(h)


def layers(policy: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return gr.transform(nn.Sequential(*(Layer() for _ in range(3))).double(), policy, **options)


def test_regions() -> None:
    policy = [gr.on("error:*.norm->*.attn", ClipByValue(1e-3)), gr.on("error:*.norm->*.head", Observe("norm"))]
    models = [layers(policy), layers(policy, regions="?")]
    for model in models:
        model(inputs()).square().sum().backward()
    first, second = models

    assert first.monitor.latest() == pytest.approx(second.monitor.latest(), rel=1e-10)
    assert "norm@error:2.norm->2.head" in second.monitor.latest()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10)


def test_several_losses() -> None:
    def losses(m: Any, x: Tensor, use: Any = lambda t: t) -> tuple[Tensor, Tensor]:
        h = m.body(x).tanh()
        return m.a(use(h)).square().mean(), (m.b(h) + m.a(h)).exp().mean()

    def half(gramian: Tensor) -> Tensor:
        return gramian.new_tensor([0.5, 2.0])

    torch.manual_seed(0)
    parts = {"body": nn.Linear(WIDTH, WIDTH), "a": Head(), "b": Head()}
    plain = Lambda(losses, **parts).double()
    rules = [gr.on("error:/tanh->a#0", Scale(3.0)), gr.on("error:/tanh->b", Zero())]
    model = gr.transform(plain, [*rules, gr.on("gradient:*", WeighLosses(half))])
    sum(model(inputs())).backward()

    def tripled(t: Tensor) -> Tensor:
        t = t * 1
        t.register_hook(lambda g: 3 * g)
        return t

    first, second = losses(plain, inputs(), tripled)[0], losses(plain, inputs())[1]
    h = plain.body(inputs()).tanh()
    second = (plain.b(h.detach()) + plain.a(h)).exp().mean()
    own = list(plain.parameters())
    found = [torch.autograd.grad(loss, own, allow_unused=True) for loss in (first, second)]
    wanted = [[torch.zeros_like(p) if g is None else g for g, p in zip(one, own, strict=True)] for one in found]
    for p, a, b in zip(plain.parameters(), *wanted, strict=True):
        weighed = 0.5 * a + 2 * b if bool((a != 0).any()) and bool((b != 0).any()) else a + b
        torch.testing.assert_close(p.grad, weighed, rtol=1e-10, atol=1e-12)


def test_beside_rules_for_ops() -> None:
    clip = gr.on("error:/tanh->policy", ClipByValue(1e-3))
    models = [rewritten("head", clip, *more) for more in ([], [gr.on("backward:policy.a/linear", _same)])]
    for model in models:
        model(inputs()).backward()
    first, second = models

    assert all(torch.equal(p.grad, q.grad) for p, q in zip(first.parameters(), second.parameters(), strict=True))


def _same(op: gr.BackwardOp) -> Any:
    return op.vjp(op.error)


def test_a_tap_in_one_branch_is_that_branch() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.body(x).tanh()
        return m.a(gr.tap(h, "h")).sum() + m.b(m.path(h)).square().sum() + h.exp().sum()

    torch.manual_seed(0)
    plain = Lambda(forward, body=nn.Linear(WIDTH, WIDTH), a=Head(), b=Head(), path=nn.Identity()).double()
    policy = [gr.on("error:h", ClipByValue(1e-3)), gr.on("error:path", Zero())]
    model = gr.transform(plain, policy)
    model(inputs()).backward()
    h = plain.body(inputs()).tanh()
    tapped = h * 1
    tapped.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    loss = plain.a(tapped).sum() + plain.b(h.detach()).square().sum() + h.exp().sum()

    for p, g in zip(plain.parameters(), torch.autograd.grad(loss, list(plain.parameters())), strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-10, atol=1e-12)
    for pattern in ("error:h", "error:path", "error:*", "error:h->a"):
        assert assert_matches_eager(plain, gr.on(pattern, ClipByValue(1e-3)), inputs(), compiled=False).changed


def test_a_tap_that_all_read_names_the_value() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        gr.tap(m.body(x), "unused")
        h = gr.tap(m.body(x), "h")
        return (m.a(h) + h).sum()

    graph = gr.transform(Lambda(forward, body=nn.Linear(WIDTH, WIDTH), a=Head()), []).trace(inputs().float())

    assert "error:h" in map(str, graph.sites)
    assert "error:body#1" not in map(str, graph.sites)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("error:cell->hea", "error:cell->head"),
        ("error:cell#99->cell", "error:cell"),
        ("error:cel->head", "no site matches 'error:cel->head'"),
    ],
)
def test_a_use_that_is_not_there(pattern: str, words: str) -> None:
    with pytest.raises(gr.NoSuchSiteError, match=words):
        rewritten("truncated", gr.on(pattern, Zero()))(inputs())


@pytest.mark.parametrize("pattern", ["error:cell->", "error:->x", "gradient:a->b", "error:cell#x->cell"])
def test_malformed_patterns(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        gr.on(pattern, Zero())


def test_a_write_under_another_name_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.body(x)
        y = m.a(h)
        h.view(-1).mul_(2)
        return (y + h).sum()

    parts = {"body": nn.Linear(WIDTH, WIDTH), "a": Lambda(lambda _, x: x + 1)}
    model = gr.transform(Lambda(forward, **parts), gr.on("error:body->a", Zero()))
    with pytest.raises(gr.PolicyError, match=r"error:body->a: its memory is written to in place .* by mul_"):
        model(inputs().float())


def test_a_use_in_another_graph_is_not_there() -> None:
    with pytest.raises(gr.NoSuchSiteError, match="error:0->1"):
        layers(gr.on("error:0->1", Zero()), regions="?")(inputs())


def test_uses_are_patterns_of_uses() -> None:
    with pytest.raises(ValueError, match="uses: 'cell' is no pattern of a use"):
        rewritten("truncated", uses=("cell",))


@pytest.mark.parametrize("loops", ["unrolled", "rolled"])
def test_a_function_reads_the_value_that_is_used(loops: Any) -> None:
    def along(g: Tensor, h: Tensor) -> Tensor:
        return g * h.sigmoid()

    torch.manual_seed(0)
    plain = CASES["truncated"].program().double()
    model = gr.transform(copy.deepcopy(plain), gr.on("error:cell->cell", along), loops=loops)
    model(inputs()).backward()

    def use(name: str, h: Tensor) -> Tensor:
        used = h * 1
        if name.startswith("cell#") and name != "cell#0":
            used.register_hook(lambda g: along(g, h.detach()))
        return used

    plain.use = use
    plain(inputs()).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().max()
        return self.a(x) / scale


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.view(-1, WIDTH)).view_as(x)


def without_gradients(m: Any, x: Tensor) -> Tensor:
    h = m.body(x)
    with torch.no_grad():
        t = m.path(h)
    return m.a(t).sum() + h.exp().sum()


def two_checkpoints(m: Any, x: Tensor) -> Tensor:
    h = m.body(x)
    first = checkpoint(lambda h: m.a(gr.tap(h, "t")), h, use_reentrant=False).sum()
    return first + checkpoint(lambda h: m.b(h).square(), h, use_reentrant=False).sum()


def two_taps(m: Any, x: Tensor) -> Tensor:
    h = m.body(x)
    return m.a(gr.tap(h, "t")).sum() + m.b(gr.tap(h, "u")).square().sum()


PARTS: dict[str, Any] = {
    "body": nn.Linear(WIDTH, WIDTH), "a": Head(), "b": Head(), "q": Quantized(), "flat": Flat(), "path": nn.Identity(),
    "relu": nn.Sequential(nn.ReLU(inplace=True), Head()),
}  # fmt: skip
MEETING: dict[str, tuple[Any, tuple[str, ...], Any]] = {
    # what runs, the patterns of a rule that halves, and the same by hand: ``use(n, h)`` halves the error n times
    "no_grad": (without_gradients, ("error:body",), lambda m, x, use: without_gradients(m, x)),
    "no_grad first": (
        lambda m, x: m.q(h := m.body(x)).sum() + h.exp().sum(),
        ("error:body->q",),
        lambda m, x, use: m.q(use(1, h := m.body(x))).sum() + h.exp().sum(),
    ),
    "a view and its value": (
        lambda m, x: m.a((h := m.body(x).tanh())[:, -1]).sum() + h.square().sum(),
        ("error:/tanh->a", "error:/getitem->a"),
        lambda m, x, use: m.a(use(2, h := m.body(x).tanh())[:, -1]).sum() + h.square().sum(),
    ),
    "a shared view and its value": (
        lambda m, x: m.a(v := (h := m.body(x).tanh())[:, -1]).sum() + h.square().sum() + v.exp().sum(),
        ("error:/*->a",),
        lambda m, x, use: m.a(use(2, h := m.body(x).tanh())[:, -1]).sum() + h.square().sum() + h[:, -1].exp().sum(),
    ),
    "a view in the outer destination": (
        lambda m, x: m.flat(h := m.body(x)).sum() + h.exp().sum(),
        ("error:body->flat", "error:body->flat.inner"),
        lambda m, x, use: m.flat(use(2, h := m.body(x))).sum() + h.exp().sum(),
    ),
    "an op and what reads its result": (
        lambda m, x: m.a((h := m.body(x))[:, 1:]).sum() + h.exp().sum(),
        ("error:body->a", "error:body->/getitem"),
        lambda m, x, use: m.a(use(2, h := m.body(x))[:, 1:]).sum() + h.exp().sum(),
    ),
    "in place in two destinations": (
        lambda m, x: m.relu(m.body(x)).sum(),
        ("error:body->relu", "error:body->relu.0"),
        lambda m, x, use: m.relu(use(2, m.body(x))).sum(),
    ),
    "one of two checkpoints": (
        two_checkpoints,
        ("error:t",),
        lambda m, x, use: m.a(use(1, h := m.body(x))).sum() + m.b(h).square().sum(),
    ),
    "behind a dropout of nothing": (
        lambda m, x: m.a(gr.tap(nn.functional.dropout(h := m.body(x), 0.0), "t")).sum() + h.exp().sum(),
        ("error:t",),
        lambda m, x, use: m.a(use(1, h := m.body(x))).sum() + h.exp().sum(),
    ),
    "two taps": (
        two_taps,
        ("error:t",),
        lambda m, x, use: m.a(use(1, h := m.body(x))).sum() + m.b(h).square().sum(),
    ),
    "through an Identity": (
        lambda m, x: m.a(m.path(h := m.body(x))).sum() + h.exp().sum(),
        ("error:body->a", "error:path"),
        lambda m, x, use: m.a(use(2, h := m.body(x))).sum() + h.exp().sum(),
    ),
    "a chunk by keyword": (
        lambda m, x: m.a(torch.transpose(input=(h := m.body(x)), dim0=0, dim1=1)).sum() + h.exp().sum(),
        ("error:body->a",),
        lambda m, x, use: m.a(use(1, h := m.body(x)).transpose(0, 1)).sum() + h.exp().sum(),
    ),
}


@pytest.mark.parametrize("name", MEETING)
def test_uses_meet(name: str) -> None:
    run, patterns, by_hand = MEETING[name]
    plain = Lambda(run, **copy.deepcopy(PARTS)).double()
    model = gr.transform(copy.deepcopy(plain), [gr.on(pattern, Scale(0.5)) for pattern in patterns])
    model(inputs()).backward()

    def use(times: int, h: Tensor) -> Tensor:
        used = h * 1
        used.register_hook(lambda g: g * 0.5**times)
        return used

    if name == "no_grad":
        plain.body.register_forward_hook(lambda _, __, h: use(1, h))
    by_hand(plain, inputs(), use).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if p.grad is None or q.grad is None:
            assert p.grad is q.grad
        else:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("uses", [(), "body->*"])
def test_views_in_a_branch_are_views_of_the_value(uses: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.body(x)
        return m.a(m.path(h).view(-1, WIDTH)).sum() + h.sum()

    plain = Lambda(forward, **{name: copy.deepcopy(PARTS[name]) for name in ("body", "a", "b", "path")}).double()
    model, x = gr.transform(plain, gr.on("saved:*", Store("float32")), uses=uses), torch.randn(64, 8, WIDTH).double()
    graph = model.trace(x)
    without = gr.transform(gr.restore(model), gr.on("saved:*", Store("float32"))).trace(x)

    assert_as_expected(trace(plain, gr.on("saved:*", Store("float32")), x), "float32")
    assert [str(edit.site) for edit in graph.edits] == [str(edit.site) for edit in without.edits]
    assert "saved:body" in [str(edit.site) for edit in graph.edits]


def test_pictures_tell_the_uses_of_one_value_apart() -> None:
    rules = [gr.on(f"error:cell->{to}", Scale(0.5)) for to in ("cell", "head")]
    view = read_graph(rewritten("truncated", *rules, loops="rolled").trace(inputs()))
    boxes = [part.small for row in build_ladder(view).rows for part in row if part.column == "edit"]

    wanted = ["error:cell#6->head#6", "error:cell->cell", "error:cell->head"]  # the last one is behind the loop
    assert sorted(box.split(" ")[0] for box in boxes) == wanted
