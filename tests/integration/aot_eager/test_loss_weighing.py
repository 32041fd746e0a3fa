"""Where losses are weighed, what acts before and after it, and what is refused."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.passes import (
    MGDA,
    CheckFinite,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClipPerExample,
    Keep,
    Observe,
    Scale,
    UPGrad,
    WeighLosses,
)
from gradrewrite.rewriting.loss_gradients import weighted_sum
from gradrewrite.testing import assert_matches_eager
from gradrewrite.viz._graph_view import read_graph
from gradrewrite.viz._ladder import build_ladder
from gradrewrite.viz._overview import build_overview

from helpers import mostly_slow
from models.several_losses import MIXING, eager_gradients_by_error, losses_of, make


def uneven(gramian: Tensor) -> Tensor:
    """Weights that depend on the gradients, and are exact to compare."""
    norms = gramian.diagonal().sqrt()
    return torch.arange(1, len(gramian) + 1, dtype=torch.float64) / norms.sum()


def total(output: Any) -> Tensor:
    return torch.stack(losses_of(output)).sum()


class Net(nn.Module):
    """Two tasks with opposite wishes behind a trunk of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 5)
        self.a, self.b = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.two(self.one(x).tanh()).tanh()
        return (self.a(h) - 1).square().mean(), (self.b(h) + 2).square().mean()


def net() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net().double(), torch.randn(3, 4, dtype=torch.float64)


def step(model: nn.Module, x: Tensor, weights: Sequence[float] = (1.0, 1.0)) -> dict[str, Tensor]:
    model.zero_grad()
    first, second = model(x)
    (weights[0] * first + weights[1] * second).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weighed(policy: gr.Policy, **settings: Any) -> tuple[gr.RewrittenModule, dict[str, Tensor]]:
    plain, x = net()
    model = gr.transform(plain, policy, **settings)
    return model, step(model, x)


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def eager(
    weigh: Callable[[Tensor], Tensor] = uneven,
    each: Callable[[Tensor], Tensor] = lambda g: g,
    error: Callable[[Tensor], Tensor] = lambda g: g,
    names: Sequence[str] = ("one.weight", "one.bias", "two.weight", "two.bias"),
) -> dict[str, Tensor]:
    """The oracle: a backward for each loss, with hooks at the error of ``two``; gradients through ``each``; weights."""
    model, x = net()
    model.two.register_forward_hook(lambda _, __, out: out.register_hook(error) and None)
    rows = []
    for n in range(2):
        model.zero_grad()
        model(x)[n].backward()
        rows.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    own = [{name: each(row[name]) for name in names} for row in rows]
    gramian = torch.stack([torch.stack([sum((a[n] * b[n]).sum() for n in names) for b in own]) for a in own])
    weights = weigh(gramian)
    result = {}
    for name in {**rows[0], **rows[1]}:
        terms = [row[name] for row in rows if name in row]
        if name in names:
            terms = [w * row[name] for w, row in zip(weights, own, strict=True)]
        result[name] = torch.stack(terms).sum(0)
    return result


@pytest.mark.broad
@pytest.mark.parametrize("name", mostly_slow([*MIXING, "residual", "conv", "lstm"], 6))
def test_error_site_equals_eager(name: str) -> None:
    plain, x = make(name)
    module = "trunk.0" if name in MIXING else "trunk"
    reference = copy.deepcopy(plain)
    eager_gradients_by_error(reference, x, module, uneven)

    model = gr.transform(copy.deepcopy(plain), gr.on(f"error:{module}", WeighLosses(uneven)))
    total(model(x)).backward()

    for (parameter_name, p), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        if other.grad is None:
            assert p.grad is None or not p.grad.any()
        else:
            torch.testing.assert_close(p.grad, other.grad, rtol=1e-10, atol=1e-10, msg=parameter_name)


@pytest.mark.broad
def test_parameters_outside_of_the_group_have_the_sum() -> None:
    names = ("two.weight", "two.bias")
    _, got = weighed(gr.on("gradient:two.*", WeighLosses(uneven)))

    assert_same(got, eager(names=names))


@pytest.mark.broad
def test_two_groups() -> None:
    policy = [gr.on(f"gradient:{name}.*", WeighLosses(uneven, group=name)) for name in ("one", "two")]
    _, got = weighed(policy)
    one, two = eager(names=("one.weight", "one.bias")), eager(names=("two.weight", "two.bias"))

    assert_same(got, {**two, "one.weight": one["one.weight"], "one.bias": one["one.bias"]})


def clip(bound: float) -> Callable[[Tensor], Tensor]:
    return lambda g: g * min(1.0, bound / float(g.norm()))


@pytest.mark.broad
def test_actions_act_on_each_loss_before_and_on_the_sum_after() -> None:
    before, after, error = ClipByNorm(0.2), ClipByNorm(0.05), ClipByNorm(0.1)
    policy = [gr.on("error:two", error), gr.on("gradient:[ot]*", [before, WeighLosses(uneven), after])]
    _, got = weighed(policy)
    expected = eager(each=clip(0.2), error=clip(0.1))
    expected = {n: clip(0.05)(g) if n[0] in "ot" else g for n, g in expected.items()}

    assert_same(got, expected)


@pytest.mark.broad
def test_other_groups_act_on_the_sum() -> None:
    policy = [gr.on("gradient:[ot]*", WeighLosses(uneven)), gr.on("gradient:*", ClipByGlobalNorm(0.1))]
    _, got = weighed(policy)
    expected = eager()
    norm = torch.stack([g.norm() for g in expected.values()]).norm()

    assert_same(got, {name: g * 0.1 / norm for name, g in expected.items()})


@pytest.mark.broad
@pytest.mark.parametrize("later", [ClipByNorm(0.05), ClipByGlobalNorm(0.1)])
def test_what_stands_before_at_gradients_of_one_loss_stays(later: Any) -> None:
    """One loss reaches each head: they are in the group, and nothing is weighed there."""
    policy = [
        gr.on("gradient:[ab]*", Scale(-1.0)),
        gr.on("gradient:*", WeighLosses(uneven)),
        gr.on("gradient:*", later),
    ]
    _, got = weighed(policy)
    expected = {n: -g if n[0] in "ab" else g for n, g in eager().items()}
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    factors = {
        n: 0.1 / norm if isinstance(later, ClipByGlobalNorm) else min(1.0, 0.05 / g.norm()) for n, g in expected.items()
    }

    assert_same(got, {name: g * factors[name] for name, g in expected.items()})


@pytest.mark.broad
@pytest.mark.parametrize("further", [(), ("loss_norms",)], ids=["norm", "loss_norms"])
def test_records_of_what_acts_on_each_loss(further: tuple[str, ...]) -> None:
    model, _ = weighed([gr.on("error:two", Observe("norm", *further)), gr.on("gradient:[ot]*", WeighLosses(uneven))])
    found = model.monitor.latest()
    plain, x = net()
    outputs: list[Tensor] = []
    plain.two.register_forward_hook(lambda _, __, out: outputs.append(out))
    norms = [float(torch.autograd.grad(loss, outputs[0], retain_graph=True)[0].norm()) for loss in plain(x)]

    assert [found["norm@error:two[loss0]"], found["norm@error:two[loss1]"]] == pytest.approx(norms)
    if further:
        assert [found["loss_norm_0@error:two"], found["loss_norm_1@error:two"]] == pytest.approx(norms)
    of_all = {key for key in found if key.startswith("loss_norm_0")}
    assert of_all == {"loss_norm_0@group:default", *["loss_norm_0@error:two"] * len(further)}


@pytest.mark.broad
def test_sampled_losses_beside_weighed_ones() -> None:
    """Gradients do not depend on what is measured, nor do the names of records that are there in every step."""
    every = [Observe("norm", "loss_norms", "loss_cosine", every=2), Observe("max_abs"), Observe("norm")]
    clips = [gr.on("error:two", ClipByNorm(0.1)), gr.on("gradient:[ot]*", WeighLosses(UPGrad()))]
    observe = [gr.on("error:two", every[:2]), gr.on("gradient:[ot]*", every)]
    model, gradients = weighed([*observe, *clips], monitor=gr.Monitor(sample=1))
    always = {key for key in model.monitor.latest() if key.startswith(("max_abs", "loss_weight"))}
    again = step(model, net()[1])
    between = model.monitor.latest()

    assert_same(again, gradients, 0.0)
    assert [report.measured for report in model.explain().graphs] == ["all", "every step"]
    assert not any(key.startswith("loss_norm_0@gradient") for key in between)
    assert {"loss_weight_1@group:default", "max_abs@error:two[loss1]"} <= always
    assert always <= between.keys()
    assert_same(gradients, weighed(clips)[1], 0.0)


@pytest.mark.broad
def test_sampled_losses_alone() -> None:
    model, gradients = weighed(gr.on("gradient:[ot]*", Observe("loss_norms")), monitor=gr.Monitor(sample=2))
    first = model.monitor.latest()
    again = step(model, net()[1])
    measuring, between = model.explain().graphs

    assert_same(again, gradients, 0.0)
    assert_same(again, weighed([])[1], 0.0)
    assert "loss_norm_1@gradient:one.weight" in first
    assert not model.monitor.latest()
    assert (between.measured, between.edits, between.loss_nodes) == ("nothing", (), ())
    assert min(measuring.loss_nodes) > 0


def test_states_of_what_acts_on_each_loss() -> None:
    last = gr.State((), name="last")

    def remember(g: Tensor) -> Tensor:
        last.set(g.norm())
        return g

    model, _ = weighed([gr.on("error:two", remember), gr.on("gradient:[ot]*", WeighLosses(uneven))])

    assert set(gr.state_dict(model)["states"]) == {"error:two/loss0/last", "error:two/loss1/last"}


@pytest.mark.broad
def test_an_action_at_a_vector_of_losses_acts_on_each() -> None:
    class Vector(Net):
        def forward(self, x: Tensor) -> Any:
            return gr.tap(torch.stack(super().forward(x)), "losses")

    def shifted(g: Tensor) -> Tensor:
        return g / (1 + g.norm()) + 0.5

    plain, x = net()
    plain.__class__ = Vector
    model = gr.transform(plain, [gr.on("error:losses", shifted), gr.on("gradient:[ot]*", WeighLosses(uneven))])
    (model(x) * torch.tensor([1.0, 3.0])).sum().backward()
    plain, x = net()
    reference = gr.transform(plain, gr.on("gradient:[ot]*", WeighLosses(uneven)))

    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_same(got, step(reference, x, (1 / 2 + 0.5, 3 / 4 + 0.5)))


@pytest.mark.broad
def test_tangents_scale_the_losses() -> None:
    plain, x = net()
    got = step(gr.transform(copy.deepcopy(plain), gr.on("gradient:[ot]*", WeighLosses(uneven))), x, (2.0, 0.5))

    class Scaled(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = super().forward(x)
            return 2 * first, 0.5 * second

    plain.__class__ = Scaled
    expected = step(gr.transform(plain, gr.on("gradient:[ot]*", WeighLosses(uneven))), x)

    assert_same(got, expected)


@pytest.mark.broad
def test_loss_scale() -> None:
    plain, x = net()
    policy = gr.on("gradient:[ot]*", [WeighLosses(uneven), Observe("norm")])
    expected_model = gr.transform(copy.deepcopy(plain), policy)
    expected = step(expected_model, x)
    scale = torch.tensor(1024.0)
    model = gr.transform(copy.deepcopy(plain), policy, loss_scale=scale)
    got = step(model, x, (1024.0, 1024.0))

    assert_same(got, {name: 1024 * g for name, g in expected.items()})
    assert model.monitor.latest() == pytest.approx(expected_model.monitor.latest())


def test_each_backward_is_weighed_by_itself_with_a_warning() -> None:
    plain, x = net()
    model = gr.transform(plain, gr.on("gradient:[ot]*", WeighLosses(uneven)))
    first = step(model, x)
    with pytest.warns(gr.RewriteWarning, match="acts on the gradients of each backward by itself"):
        total(model(x)).backward()

    assert_same(
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, {n: 2 * g for n, g in first.items()}
    )


def test_losses_reach_a_function_that_asks_for_them() -> None:
    def by_loss(gramian: Tensor, losses: Tensor) -> Tensor:
        return losses / losses.sum() + 0 * gramian[0]

    plain, x = net()
    losses = torch.stack(plain(x)).detach()
    _, got = weighed(gr.on("gradient:[ot]*", WeighLosses(by_loss)))

    assert_same(got, eager(lambda _: losses / losses.sum()))


@pytest.mark.broad
@pytest.mark.parametrize("is_vector", [False, True])
def test_observed_losses_leave_gradients_as_they_are(is_vector: bool) -> None:
    class Vector(Net):
        def forward(self, x: Tensor) -> Any:
            losses = super().forward(x)
            return torch.stack(losses) if is_vector else losses

    clips = [gr.on("error:two", ClipByNorm(0.1)), gr.on("gradient:*", Scale(0.5))]
    plain, x = net()
    plain.__class__ = Vector
    without = gr.transform(copy.deepcopy(plain), clips)
    seen = [
        gr.on("error:two", Observe("loss_norms", "norm")),
        gr.on("gradient:one.*", Observe("loss_norms", "loss_cosine")),
    ]
    model = gr.transform(copy.deepcopy(plain), [*seen[:1], *clips, *seen[1:]])
    assert_same(step(model, x), step(without, x), 0.0)

    found = model.monitor.latest()
    losses = losses_of(plain(x))
    rows = [torch.autograd.grad(loss, list(plain.one.parameters()), retain_graph=True) for loss in losses]
    for n, name in enumerate(("one.weight", "one.bias")):
        a, b = (row[n].flatten() for row in rows)
        assert found[f"loss_norm_0@gradient:{name}"] == pytest.approx(float(a.norm()))
        assert found[f"loss_norm_1@gradient:{name}"] == pytest.approx(float(b.norm()))
        assert found[f"loss_cosine@gradient:{name}"] == pytest.approx(float(a @ b / a.norm() / b.norm()))
    assert "loss_norm_1@error:two" in found
    assert "norm@error:two" in found


@pytest.mark.broad
def test_records_of_a_group_and_of_pairs() -> None:
    plain, x = make("mlp", 3)
    model = gr.transform(plain, gr.on("gradient:trunk.*", [Observe("loss_cosine"), WeighLosses(UPGrad())]))
    total(model(x)).backward()
    found = model.monitor.latest()
    pairs = [found[f"loss_cosine_{i}_{j}@group:default"] for i, j in ((0, 1), (0, 2), (1, 2))]

    assert found["loss_cosine@group:default"] == min(pairs)
    assert all(f"loss_weight_{k}@group:default" in found and f"loss_norm_{k}@group:default" in found for k in range(3))
    assert "loss_cosine_1_2@gradient:trunk.0.weight" in found


@pytest.mark.broad
def test_one_loss_is_the_plain_graph() -> None:
    class One(Net):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    x = net()[1].float()
    graph = gr.transform(One(), gr.on("gradient:*", WeighLosses(uneven))).trace(x)
    plain = gr.transform(One(), []).trace(x)

    assert graph.code == plain.code


@pytest.mark.broad
def test_nothing_shared_is_the_plain_graph() -> None:
    x = net()[1].float()
    graph = gr.transform(Net(), gr.on("gradient:[ab].*", WeighLosses(uneven))).trace(x)

    assert not graph.edits
    assert graph.code == gr.transform(Net(), []).trace(x).code


def test_nan_in_one_loss_makes_all_weights_nan() -> None:
    plain, x = net()
    model = gr.transform(plain, gr.on("gradient:[ot]*", WeighLosses(UPGrad())))
    found = step(model, x, (float("nan"), 1.0))

    assert found["one.weight"].isnan().all()
    assert not found["b.weight"].isnan().any()
    assert (
        model.monitor.latest()["loss_weight_1@group:default"] != model.monitor.latest()["loss_weight_1@group:default"]
    )


def test_a_check_counts_in_each_loss_and_says_which_was_not_finite() -> None:
    policy = [gr.on("error:two", CheckFinite("raise")), gr.on("gradient:[ot]*", WeighLosses(uneven))]
    model, _ = weighed(policy)
    with pytest.raises(
        gr.NonFiniteError, match="error:/mean#1, 100 % of 1 elements, the gradient that came from outside"
    ):
        step(model, net()[1], (1.0, float("inf")))
    found = model.monitor.latest()

    assert [found["nonfinite@error:two[loss0]"], found["nonfinite@error:two[loss1]"]] == [0, 15]


@pytest.mark.broad
def test_losses_in_one_tensor_share_no_head() -> None:
    """Of ``stack`` each head is there once, also where the error of all losses is measured; changed, it is masked."""

    class Stacked(Net):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return torch.stack(super().forward(x))

    def of(*policy: Any) -> tuple[int, dict[str, Tensor], Any]:
        plain, x = net()
        plain.__class__ = Stacked
        model = gr.transform(plain, [*policy, gr.on("gradient:[ot]*", WeighLosses(uneven))])
        gradients = step(model, x)
        return sum(model.explain().graphs[0].loss_nodes), gradients, model

    plain, x = net()
    apart = gr.transform(plain, gr.on("gradient:[ot]*", WeighLosses(uneven)))
    assert_same(step(apart, x), of()[1])
    alone, number = of()[0], sum(apart.explain().graphs[0].loss_nodes)
    measured, _, _ = of(gr.on("error:/stack", Observe("norm")))
    _, gradients, model = of(gr.on("error:/stack", Observe("norm", "loss_norms")))
    changed, clipped, _ = of(gr.on("error:/stack", ClipByNorm(0.5)))

    assert alone == measured == number < changed
    assert_same(gradients, eager())
    assert_same(clipped, {name: 0.5 * g for name, g in eager(lambda g: uneven(g / 4)).items()})
    assert [model.monitor.latest()[f"loss_norm_{k}@error:/stack"] for k in range(2)] == [1.0, 1.0]


@pytest.mark.broad
def test_losses_in_one_tensor_are_weighed_themselves() -> None:
    class Stacked(Net):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return torch.stack(super().forward(x))

    plain, x = net()
    plain.__class__ = Stacked
    got = step(gr.transform(plain, gr.on("error:/stack", WeighLosses(uneven))), x)

    assert_same(got, step(net()[0], x, (0.5, 1.0)))


@pytest.mark.broad
@pytest.mark.parametrize("name", mostly_slow(["residual", "transformer", "conv and batch norm", "Stacked", "Cat"], 2))
def test_dynamic_shapes(name: str) -> None:
    plain, x = make(name)
    model = gr.transform(copy.deepcopy(plain), gr.on("gradient:trunk.*", WeighLosses(uneven)), dynamic=True)
    for rows in (4, 6):
        batch = torch.cat([x, x.flip(0)])[:rows]
        fixed = gr.transform(copy.deepcopy(plain), gr.on("gradient:trunk.*", WeighLosses(uneven)), dynamic=False)
        fixed.load_state_dict(model.state_dict())
        for one in (model, fixed):
            one.zero_grad()
            total(one(batch)).backward()
        for p, q in zip(model.parameters(), fixed.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-10)
    assert len(model.explain().graphs) == 1


@pytest.mark.broad
def test_text_and_explanation_say_which_copy_belongs_to_which_loss() -> None:
    plain, x = net()
    model = gr.transform(plain, gr.on("gradient:[ot]*", WeighLosses(uneven)))
    graph = model.trace(x)
    copies = [name for name, origin in graph.provenance.origins.items() if origin.loss == 1]
    lines = graph.code.splitlines()

    assert copies
    assert all("_loss1" in name for name in copies)
    assert any("_loss1" in line and line.endswith("# loss 1") for line in lines)
    step(model, x)
    assert f"{len(copies)} of loss 1" in str(model.explain())


def test_pictures_say_which_losses_a_box_has() -> None:
    plain, x = net()
    graph = gr.transform(plain, gr.on("gradient:[ot]*", WeighLosses(uneven))).trace(x)
    view = read_graph(graph)
    rows = [*build_ladder(view).rows, *build_overview(view).rows]
    small = {part.small for row in rows for part in row if part.column == "backward"}

    assert {"two \u00b7 losses 0, 1", "1 op \u00b7 losses 0, 1", "a"} <= small
    assert viz.to_networkx(graph).nodes["mm_4_loss1"]["loss"] == 1
    assert viz.to_networkx(graph).nodes["primals_1"]["loss"] == -1


def test_explanation_counts_what_is_there_once_for_each_loss() -> None:
    model, _ = weighed(gr.on("gradient:[ot]*", WeighLosses(uneven)))
    (report,) = model.explain().graphs
    first, second = report.loss_nodes

    assert first == second > 0


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] + torch.rand_like(grads[0])


class WithNoise(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = Noisy.apply(self.two(self.one(x).tanh()))
        return self.a(h).mean(), self.b(h).mean()


class Unbound(Net):
    def forward(self, x: Tensor) -> Any:
        losses = torch.stack(super().forward(x))
        return losses[0], losses[1]


class Each(Net):
    def forward(self, x: Tensor) -> Any:
        return self.one(x).square().mean().expand(40).clone()


class Eleven(Each):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)[:11].clone()


class Logits(Net):
    def forward(self, x: Tensor) -> Any:
        return self.a(self.one(x)[:, :5]), self.b(self.one(x)[:, :5])


class WithFeatures(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.two(self.one(x).tanh())
        return {"one": self.a(h).mean(), "two": self.b(h).mean(), "features": h}


WEIGH = WeighLosses(uneven)
REFUSED: dict[str, tuple[type[Net], Any, str]] = {
    "random op": (
        WithNoise,
        gr.on("gradient:one.*", WEIGH),
        r"rand.* \(test_loss_weighing.py:\d+ .*draws random numbers",
    ),
    "no losses": (
        Logits,
        gr.on("gradient:one.*", WEIGH),
        r"the differentiable outputs have the shapes \(3, 2\), \(3, 2\)",
    ),
    "no losses to observe": (Logits, gr.on("gradient:one.*", Observe("loss_norms")), "needs the losses of the model"),
    "two error sites": (
        Net,
        gr.on("error:[ot]*", WEIGH),
        "is at error:one, error:two.*: a group is at gradient sites, or",
    ),
    "two levels": (
        Net,
        [gr.on("error:two", WEIGH), gr.on("gradient:one.weight", WeighLosses(uneven, group=1))],
        "error:two: the losses are weighed here, and once more upstream",
    ),
    "examples": (
        Net,
        [gr.on("gradient:one.*", WEIGH), gr.on("gradient:two.*", ClipPerExample(1.0))],
        r"and ClipPerExample\(1.0\) are in one policy",
    ),
    "group before": (
        Net,
        [gr.on("gradient:*", ClipByGlobalNorm(1.0)), gr.on("gradient:one.*", WEIGH)],
        r"comes after ClipByGlobalNorm\(1.0\), a group action",
    ),
    "wrong weights": (
        Net,
        gr.on("gradient:one.*", WeighLosses(lambda g: g)),
        r"weights of 2 losses are a real tensor of shape \(2,\); the function returned \(2, 2\)",
    ),
    "views of one vector": (
        Unbound,
        gr.on("gradient:one.*", WEIGH),
        "Some are views of one tensor: return that tensor",
    ),
    "a loss for each example": (
        Each,
        gr.on("gradient:one.*", WEIGH),
        "the model returns 40 losses, each of which .* its mean",
    ),
    "too many for UPGrad": (
        Eleven,
        gr.on("gradient:one.*", WeighLosses(UPGrad())),
        "UPGrad: got 11 losses, and it looks at all sets of at most 10",
    ),
    "another kind of site": (Net, gr.on("activation:one", WEIGH), "it applies to error, gradient"),
}


@pytest.mark.broad
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    kind, policy, message = REFUSED[name]
    plain = kind().double()
    before = copy.deepcopy(plain.state_dict())
    with pytest.raises(gr.RewriteError, match=message):
        gr.transform(plain, policy)(net()[1])
    assert all(torch.equal(value, before[key]) for key, value in plain.state_dict().items())


class Stores(Net):
    """Returns two losses, and stores what it computed on the way."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.two(self.one(x).tanh()).tanh()
        self.penalty = h.square().mean()
        self.features = h
        return (self.a(h) - 1).square().mean(), (self.b(h) + 2).square().mean()


def test_what_a_model_stores_is_no_loss() -> None:
    plain, x = net()
    plain.__class__ = Stores
    model = gr.transform(plain, gr.on("gradient:[ot]*", WeighLosses(uneven)))

    assert_same(step(model, x), eager())
    first, second = model(x)
    with pytest.raises(gr.PolicyError, match="received a gradient and is none of its losses"):
        (first + second + model.penalty).backward()


def in_place(losses: Sequence[Tensor]) -> Tensor:
    found = losses[0].new_zeros(len(losses))
    for n, loss in enumerate(losses):
        found[n] = loss
    return found


VECTORS: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "stack": lambda losses: torch.stack(list(losses)),
    "cat": lambda losses: torch.cat([loss.view(1) for loss in losses]),
    "times weights": lambda losses: torch.stack(list(losses)) * torch.ones(2, dtype=torch.float64),
    "clamp": lambda losses: torch.stack(list(losses)).clamp(max=1e9),
    "in place": in_place,
}


@pytest.mark.broad
@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_of_losses_is_as_several_outputs(name: str) -> None:
    class Vector(Net):
        def forward(self, x: Tensor) -> Any:
            return VECTORS[name](super().forward(x))

    plain, x = net()
    plain.__class__ = Vector
    model = gr.transform(plain, gr.on("gradient:*", WeighLosses(uneven)))

    assert_same(step(model, x), eager())
    assert model.monitor.latest()["loss_norm_0@group:default"] > 0


def test_a_vector_beside_features() -> None:
    class WithVector(Net):
        def forward(self, x: Tensor) -> Any:
            h = self.two(self.one(x).tanh()).tanh()
            return torch.stack([(self.a(h) - 1).square().mean(), (self.b(h) + 2).square().mean()]), h

    plain, x = net()
    plain.__class__ = WithVector
    model = gr.transform(plain, gr.on("gradient:[ot]*", WeighLosses(uneven)))
    losses, _ = model(x)
    losses.sum().backward()

    assert_same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, eager())


def test_an_output_outside_of_the_graph_may_receive_a_gradient() -> None:
    class ReturnsWeight(Net):
        def forward(self, x: Tensor) -> Any:
            return *super().forward(x), self.one.weight.t()

    plain, x = net()
    plain.__class__ = ReturnsWeight
    model = gr.transform(plain, gr.on("gradient:[ot]*", WeighLosses(uneven)))
    with pytest.warns(gr.RewriteWarning, match="the model returns this tensor"):
        first, second, weight = model(x)
    (first + second + weight.sum()).backward()
    expected = eager()

    assert_same({"one.weight": model.one.weight.grad}, {"one.weight": expected["one.weight"] + 1})


class Total(Net):
    def forward(self, x: Tensor) -> Any:
        first, second = super().forward(x)
        return {"loss": first + second, "first": first, "second": second}


class Sum(Net):
    def forward(self, x: Tensor) -> Any:
        return sum(super().forward(x))


@pytest.mark.broad
@pytest.mark.parametrize(
    ("kind", "pattern", "message"),
    [
        (Total, "gradient:one.*", "loss 0 of the model .* is computed from loss 1, 2"),
        (Sum, "gradient:one.*", "the model returns one loss, and nothing is weighed"),
        (Net, "gradient:a.*", "no gradient here is shared by losses, and nothing is weighed"),
    ],
)
def test_warnings(kind: type[Net], pattern: str, message: str) -> None:
    model = gr.transform(kind().double(), gr.on(pattern, WEIGH))

    def run() -> None:
        out = model(net()[1])
        (out["loss"] if isinstance(out, dict) else out if isinstance(out, Tensor) else sum(out)).backward()

    with pytest.warns(gr.RewriteWarning, match=message):
        run()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a = torch.randn(1000).to(dtype)
    b = (-a.float() * 0.9 + 0.01 * torch.randn(1000)).to(dtype)
    weights = torch.tensor([1.5, 1.7])
    exact = a.double() * weights[0].double() + b.double() * weights[1].double()

    torch.testing.assert_close(weighted_sum(a, b, *weights).double(), exact.to(dtype).double(), rtol=1e-2, atol=1e-6)


def test_one_observed_loss_has_its_norm() -> None:
    plain, x = net()
    plain.__class__ = Sum
    model = gr.transform(plain, gr.on("gradient:one.weight", Observe("loss_norms", "norm")))
    model(x).backward()
    found = model.monitor.latest()

    assert found["loss_norm_0@gradient:one.weight"] == pytest.approx(found["norm@gradient:one.weight"])


@pytest.mark.broad
@pytest.mark.parametrize("policy", [gr.on("gradient:one.*", WEIGH), gr.on("error:two", Observe("loss_norms"))])
def test_no_comparison_with_hooks(policy: gr.Policy) -> None:
    plain, x = net()
    with pytest.raises(gr.PolicyError, match="assert_matches_eager compares with hooks"):
        assert_matches_eager(plain, policy, x, compiled=False)


def test_gradient_of_another_output_is_an_error() -> None:
    model = gr.transform(WithFeatures().double(), gr.on("gradient:one.*", WEIGH))
    out = model(net()[1])
    (out["one"] + out["two"]).backward()
    out = model(net()[1])
    with pytest.raises(gr.PolicyError, match=r"output 2 of the model, of shape \(3, 5\), received a gradient"):
        (out["one"] + out["features"].sum()).backward()


def test_a_graph_break_is_refused() -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.one(x)
            torch._dynamo.graph_break()
            h = self.two(h)
            return self.a(h).mean(), self.b(h).mean()

    model = gr.transform(Broken().double(), gr.on("gradient:two.*", WEIGH), fullgraph=False)
    with pytest.raises(gr.PolicyError, match="needs the backward of all losses in one graph"):
        total(model(net()[1])).backward()


def test_regions_are_refused() -> None:
    model = gr.transform(Net().double(), gr.on("gradient:one.*", WEIGH), regions=["one", "two"])
    with pytest.raises(gr.PolicyError, match="needs the backward of all losses in one graph"):
        total(model(net()[1])).backward()


class Branches(nn.Module):
    """Three losses, of which a branch is reached by the first and the last, and each head by one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(3, 4), nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.trunk(x).tanh()
        b = self.branch(h).tanh()
        return tuple(head(t).square().mean() for head, t in zip(self.heads, (b, h, b), strict=True))


@pytest.mark.broad
@pytest.mark.parametrize("sampled", [False, True])
def test_records_have_the_names_of_the_losses(sampled: bool) -> None:
    plain, x = Branches().double(), torch.randn(5, 3, dtype=torch.float64)
    observe = Observe("max_abs", every=2) if sampled else Observe("max_abs")
    seen = [observe, WeighLosses(MGDA()), observe]
    model = gr.transform(copy.deepcopy(plain), gr.on("gradient:*", seen))
    wanted: dict[str, float] = {}
    parameters = dict(plain.named_parameters())
    for k, loss in enumerate(plain(x)):
        found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        wanted |= {
            f"max_abs@gradient:{name}[loss{k}]": float(g.abs().max())
            for name, g in zip(parameters, found, strict=True)
            if g is not None
        }
    torch.stack(model(x)).sum().backward()
    records = {key: value for key, value in model.monitor.latest().items() if key.startswith("max_abs")}
    of_sums = {f"max_abs@gradient:{name}": float(p.grad.abs().max()) for name, p in model.named_parameters()}

    assert records == pytest.approx(wanted | of_sums)


class Named(Branches):
    """Its losses are in a mapping, in a data class, or in a nested mapping."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        a, b, c = super().forward(x)
        if self.kind == "mapping":
            return {"features": x + self.trunk.bias.sum(), "energy": a, "forces": b, "stress": c}
        nested = {"terms": {"energy": a, "forces": b}, "stress": c}
        if self.kind == "nested":
            return nested
        if self.kind == "tuple":
            return x, nested
        if self.kind == "one without a name":
            return {"loss1": a, (0,): b, "stress": c}
        return Losses(energy=a, forces=b, stress=c)


@dataclasses.dataclass
class Losses:
    """Losses as attributes."""

    energy: Tensor
    forces: Tensor
    stress: Tensor

    def values(self) -> list[Tensor]:
        return [self.energy, self.forces, self.stress]


def of_output(output: Any) -> list[Tensor]:
    """The losses in the order of the outputs."""
    if isinstance(output, tuple):
        output = output[1]
    if isinstance(output, dict):
        output = output.get("terms", {}) | output
    return [value for value in output.values() if isinstance(value, Tensor) and value.dim() == 0]


@contextlib.contextmanager
def first_tanh() -> Iterator[list[Tensor]]:
    """The results of ``tanh`` in the block."""
    seen: list[Tensor] = []
    plain = Tensor.tanh

    def tanh(tensor: Tensor) -> Tensor:
        seen.append(plain(tensor))
        return seen[-1]

    with mock.patch.object(Tensor, "tanh", tanh):
        yield seen


@pytest.mark.broad
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("mapping", ["energy", "forces", "stress"]),
        ("nested", ["terms.energy", "terms.forces", "stress"]),
        ("tuple", ["loss0", "loss1", "loss2"]),  # paths that begin with a position
        ("one without a name", ["loss0", "loss1", "loss2"]),
        ("attributes", ["energy", "forces", "stress"]),
    ],
)
@pytest.mark.parametrize("site", ["gradient:trunk.weight", "error:/tanh"])
def test_records_and_kept_tensors_of_each_loss(kind: str, names: list[str], site: str) -> None:
    torch.manual_seed(0)
    plain, x = Named(kind).double(), torch.randn(5, 3, dtype=torch.float64)
    policy = [gr.on(site, [Keep(), Observe("norm")]), gr.on("gradient:trunk.*", [WeighLosses(UPGrad()), Keep()])]
    model = gr.transform(copy.deepcopy(plain), policy)
    for _ in range(3):
        model.zero_grad()
        sum(of_output(model(x))).backward()
        with first_tanh() as seen:
            losses = of_output(plain(x))
        target = plain.trunk.weight if site.startswith("gradient") else seen[0]
        for name, loss in zip(names, losses, strict=True):
            (wanted,) = torch.autograd.grad(loss, target, retain_graph=True)
            torch.testing.assert_close(model.monitor.kept(loss=name)[site], wanted, atol=0, rtol=1e-10)
            assert model.monitor.latest()[f"norm@{site}[{name}]"] == pytest.approx(float(wanted.norm()))
        behind = model.monitor.kept()["gradient:trunk.weight"]
        torch.testing.assert_close(behind, model.trunk.weight.grad, atol=0, rtol=0)
    with pytest.raises(ValueError, match=rf"of the loss 'drag'; there is: .*{names[0]}"):
        model.monitor.kept(loss="drag")


@pytest.mark.broad
@pytest.mark.parametrize("at", ["gradient:trunk.weight", "error:/tanh"])
def test_records_of_clips_of_each_loss_are_named_as_those_of_one_loss(at: str) -> None:
    clips = gr.on(at, [ClipByNorm(0.1, log=True), ClipByValue(0.01, log=True), Observe("norm")])
    behind = gr.on("gradient:trunk.weight", [WeighLosses(UPGrad()), ClipByNorm(0.05, log=True)])

    def names(policy: Any) -> tuple[dict[str, float], dict[str, set[str]]]:
        model = gr.transform(Branches(), policy)
        torch.stack(model(torch.randn(5, 3))).sum().backward()
        found = model.monitor.latest()
        by_site = collections.defaultdict(set)
        for name, _, where in (key.partition("@") for key in found):
            by_site[where].add(name)
        return found, by_site

    (_, plain), (_, late), (found, got) = names(clips), names(behind), names([clips, behind])

    assert "factor" in plain[at]
    for where in (f"{at}[loss0]", f"{at}[loss1]", f"{at}[loss2]"):
        assert got[where] == plain[at]
        assert found[f"factor@{where}"] == pytest.approx(min(1.0, 0.1 / found[f"norm@{where}"]))
    assert got["gradient:trunk.weight"] == late["gradient:trunk.weight"]
