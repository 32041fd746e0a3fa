"""Sites at the backward of ops: refusals, layouts, records and states of rules, and other actions beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.passes import ClipByNorm, ClipByValue, KeepZeros, Observe

from models.small import Lambda


class Call(nn.Module):
    """A function of several inputs as a model."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def grads(run: Any, *inputs: Tensor) -> list[Tensor | None]:
    own = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    run(*own).backward()
    return [x.grad for x in own]


def images() -> Tensor:
    x = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    return x.to(memory_format=torch.channels_last).requires_grad_()


@pytest.mark.parametrize("rule", [lambda op: op.vjp(op.error.contiguous()), lambda op: op.vjp(op.error)])
def test_errors_have_the_layout_that_the_op_was_traced_for(rule: Any) -> None:
    norm = Lambda(lambda m, x: m.norm(x * 1).sigmoid().sum(), norm=nn.GroupNorm(2, 4))
    (wanted,) = grads(norm, images())
    (got,) = grads(gr.transform(norm, gr.on("backward:*/group_norm", rule)), images())

    assert wanted is not None
    assert got is not None
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", ["rule", "zeros"])
def test_a_gradient_of_the_graph_may_be_an_inserted_node(kind: str) -> None:
    rule = (lambda op: op.vjp(op.error * 2)) if kind == "rule" else KeepZeros()
    model = gr.transform(Lambda(lambda m, x: m.l(x.exp()).exp().sum(), l=nn.Linear(2, 1)), gr.on("backward:*/*", rule))
    graph = model.trace(torch.randn(3, 2, requires_grad=True))

    assert graph.edits
    assert "backward:" in graph.diff()
    assert set(graph.provenance.origins) >= {name for edit in graph.edits for name in edit.nodes}


def doubled(op: gr.BackwardOp) -> Any:
    return tuple(None if g is None else 2 * g for g in op.vjp(op.error))


@pytest.mark.parametrize("program", ["a factor with a gradient", "the base is used", "setitem", "a view alone"])
def test_in_place_into_a_view_is_refused(program: str) -> None:
    def forward(x: Tensor, w: Tensor) -> Tensor:
        h = x * w
        y = h.view(-1) if program == "a view alone" else h[0]
        if program == "setitem":
            h[0] = w.sin()
        elif program == "a view alone":
            y.relu_()
        else:
            y.mul_(w)
        return (h * 1.0).sum() + ((y * 1.0).sum() if program == "the base is used" else 0)

    model = gr.transform(Call(forward), gr.on("backward:*/[mrs]*_", doubled))
    if program == "setitem":
        model = gr.transform(Call(forward), gr.on("backward:*/setitem", doubled))
    with pytest.raises(gr.PolicyError, match=r"backward:/(mul_|relu_|setitem): .* writes in place into a view"):
        model(torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True))


def test_one_tensor_twice_by_keyword_is_refused() -> None:
    model = gr.transform(Call(lambda x: torch.sub(other=x, input=x).sum()), gr.on("backward:*/sub", doubled))
    with pytest.raises(gr.PolicyError, match="is given one tensor several times"):
        model(torch.ones(3, requires_grad=True))
    x = torch.ones(3, requires_grad=True)
    rule = gr.on("backward:*/sub", lambda op: (op.vjp(op.error)[0] * 7, op.vjp(op.error)[1] * 5))
    gr.transform(Call(lambda x: torch.sub(x, other=x).sum()), rule)(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


BAD: dict[str, tuple[Any, str]] = {
    "a tensor for two inputs": (lambda op: op.error, "returned one tensor, and 2 of the 2 inputs want a gradient"),
    "too few": (lambda op: (op.error,), "returns the gradients of the 2 inputs of the op, got 1 values"),
    "None": (lambda op: (op.error, None), "returned None for input 1, which wants a gradient"),
    "shape": (lambda op: (op.error.sum(), op.error), r"changed the shape from \(3,\) to \(\)"),
    "dtype": (lambda op: (op.error.double(), op.error), "changed the dtype"),
    "error": (lambda op: op.vjp(op.error.sum()), r"the error is \(3,\), torch.float32; got \(\)"),
    "random": (lambda op: (torch.rand_like(op.error), op.error), "calls the random op"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_rule_is_named(name: str) -> None:
    rule, message = BAD[name]
    model = gr.transform(Call(lambda x, y: (x * y).sum()), gr.on("backward:*/mul", rule))
    with pytest.raises(gr.CallbackError, match=f"(?s)backward:/mul: .*{message}"):
        model(torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True))


def test_other_actions_and_two_rules_are_refused() -> None:
    f = Call(lambda x: x.exp().sum())
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(gr.PolicyError, match=r"ClipByNorm\(1.0\) does not apply to this kind of site"):
        gr.transform(f, gr.on("backward:*/exp", ClipByNorm(1.0)))(x)
    with pytest.raises(gr.PolicyError, match="an op has one backward"):
        gr.transform(f, [gr.on("backward:*/exp", doubled), gr.on("backward:*/*", doubled)])(x)
    with pytest.raises(gr.PolicyError, match=r"applies to backward sites alone.*backward:\*/exp"):
        gr.transform(f, gr.on("*/exp", KeepZeros()))
    with pytest.raises(gr.NoSuchSiteError, match="nearest sites: backward:/exp"):
        gr.transform(f, gr.on("backward:*/log", doubled))(x)


def test_records_states_and_tensors_of_a_rule() -> None:
    bound, mean = torch.tensor(0.5), gr.State(name="mean")

    def rule(op: gr.BackwardOp) -> Any:
        gr.record("largest", op.error.abs().amax())
        mean.set(mean + 1)
        return op.vjp(op.error.clamp(-bound, bound) * (1 + mean.value))

    model = gr.transform(Call(lambda x: (x.exp() * 2).sum()), gr.on("backward:*/exp", rule))
    for value, factor in ((0.5, 2), (0.25, 3)):
        bound.fill_(value)
        x = torch.zeros(3, requires_grad=True)
        model(x).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [value * factor] * 3
        assert model.monitor.latest() == {"largest@backward:/exp": 2.0}
    assert gr.state_dict(model)["states"]["backward:/exp/mean"] == 2


def test_behind_an_error_clip_and_before_another() -> None:
    """The rule is given the clipped error, and its result is clipped at the site of its input."""
    f = Call(lambda x: ((x * 1.0).exp() * 8).sum())
    policy = [
        gr.on("error:*/exp", lambda g: g.clamp(max=4.0)),
        gr.on("backward:*/exp", lambda op: op.error * 3),
        gr.on("error:*/mul", lambda g: g.clamp(max=10.0)),
    ]
    (got,) = grads(gr.transform(f, policy), torch.zeros(2, requires_grad=True))

    assert got is not None
    assert got.tolist() == [10.0, 10.0]


def test_a_callback_and_the_text_of_the_graph() -> None:
    def policy(site: gr.Site) -> Any:
        return doubled if site.kind == "backward" and site.op == "exp" else None

    model = gr.transform(Call(lambda x: x.exp().sum()), policy)
    x = torch.zeros(2, requires_grad=True)
    model(x).backward()
    graph = model.trace(x)

    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]
    assert [str(edit.site) for edit in graph.edits] == ["backward:/exp"]
    assert graph.before is not None
    assert "doubled" not in graph.before.code
    assert "backward:/exp: <function doubled" in str(model.explain())
    plain = gr.transform(Call(lambda x: x.exp().sum()), lambda site: None).trace(x)
    assert not any(site.kind == "backward" for site in plain.sites)


@pytest.mark.parametrize(
    "policy",
    [
        lambda site: Observe("norm"),
        lambda site: Observe("norm") if site.matches("param:*") else Observe("max_abs"),
        lambda site: ClipByValue(1e3) if site.kind not in ("activation", "saved", "step", "param") else None,
        lambda site: (lambda g: g * 1) if site.kind != "activation" else None,
    ],
)
def test_callbacks_that_do_not_mean_ops(policy: Any) -> None:
    model = gr.transform(Call(lambda x: x.exp().sum()), policy)
    model(torch.zeros(2, requires_grad=True)).backward()

    assert model.explain().graphs[0].edits
    assert not any(site.kind == "backward" for site in model.explain().graphs[0].sites)


def test_under_a_loss_scale() -> None:
    """A rule is given the error of the unscaled loss, in a dtype that holds it."""
    scale = torch.tensor(1024.0)

    def rule(op: gr.BackwardOp) -> Any:
        gr.record("bytes", op.error.element_size())
        return op.vjp(op.error.clamp(-1, 1))

    f = Call(lambda x: (x.exp() * 4).sum())
    model = gr.transform(f, gr.on("backward:*/exp", rule), loss_scale=scale)
    x = torch.zeros(2, dtype=torch.float16, requires_grad=True)
    (model(x) * scale).backward()

    assert x.grad is not None
    assert x.grad.tolist() == [1024.0, 1024.0]
    assert model.monitor.latest() == {"bytes@backward:/exp": 4}


def test_pictures_and_exports_show_the_site(tmp_path: Path) -> None:
    model = gr.transform(Call(lambda x: x.exp().sum()), gr.on("backward:*/exp", doubled))
    graph = model.trace(torch.zeros(2, requires_grad=True))
    viz.export(graph, tmp_path / "graph.json")
    picture = Path(viz.draw(graph).render(str(tmp_path / "picture"), format="svg"))

    assert '"backward:/exp"' in (tmp_path / "graph.json").read_text()
    assert "backward:/exp" in picture.read_text()
