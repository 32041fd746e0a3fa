"""One function for the values of several sites, against eager autograd that is given all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByValue, ClipPerExample, Observe, Scale, WeighLosses
from gradrewrite.testing import assert_matches_eager

WIDTH = 4
Values = Mapping[str, Tensor]


class Net(nn.Module):
    """A body with three heads; ``at`` acts on the errors of the heads, and of the body before them, in eager mode."""

    def __init__(self, *, is_checkpointed: bool = False, losses: int = 1) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.is_checkpointed, self.losses = is_checkpointed, losses

    def outputs(self, x: Tensor) -> list[Tensor]:
        def run(x: Tensor) -> list[Tensor]:
            h = self.body(x).tanh()
            return [head(h) for head in self.heads]

        return checkpoint(run, x, use_reentrant=False) if self.is_checkpointed else run(x)

    def finish(self, outputs: list[Tensor]) -> Any:
        a, b, c = outputs
        parts = (a.square().sum() + 3 * b.exp().mean(), (a * c).sin().sum())
        return sum(parts) if self.losses == 1 else parts

    def forward(self, x: Tensor) -> Any:
        return self.finish(self.outputs(x))


def equal(errors: Values) -> dict[str, Tensor]:
    mean = sum(e.norm() for e in errors.values()) / len(errors)
    gr.record("mean", mean)
    return {name: e * (mean / e.norm()) for name, e in errors.items()}


def by_largest(errors: Values, *, of: Tensor, w: Tensor) -> dict[str, Tensor]:
    largest = torch.stack([e.norm() for e in errors.values()]).amax()
    return {"heads.1": errors["heads.1"] * (largest + of.mean()) + w.mean()}


def follow() -> Callable[[Values], dict[str, Tensor]]:
    mean = gr.State((), 1.0, torch.float64)

    def divide(errors: Values) -> dict[str, Tensor]:
        mean.set(0.5 * mean + 0.5 * torch.stack([e.norm() for e in errors.values()]).sum())
        return {name: e / mean for name, e in errors.items()}

    return divide


def batch(number: int) -> Tensor:
    return torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def made(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()


POLICIES: dict[str, Callable[[], list[Any]]] = {
    "equal": lambda: [gr.on("error:heads.1", Scale(2.0)), gr.together("error:heads.*", equal)],
    "reads": lambda: [
        gr.together(
            "error:heads.*", by_largest, reads={"of": "activation:/tanh", "w": "param:body.weight"},
            act_at="error:heads.1",
        )
    ],
    "state": lambda: [gr.together("error:heads.*", follow()), gr.on("error:heads.*", Observe("norm"))],
}  # fmt: skip


class Reference:
    """The same in eager mode: the errors of the heads are taken, changed together, and sent on."""

    def __init__(self, name: str, net: Net) -> None:
        self.name, self.net, self.mean = name, net, torch.ones((), dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        outputs = self.net.outputs(x)
        inside = [t.detach().requires_grad_() for t in outputs]
        hidden = self.net.body(x).tanh().mean().detach()
        return outputs, inside, self.net.finish(inside), hidden, self.net.body.weight.detach().mean()

    def backward(self, made: tuple[Any, ...]) -> None:
        outputs, inside, loss, hidden, w = made
        a, b, c = torch.autograd.grad(loss, inside)
        norms = torch.stack([t.norm() for t in (a, 2 * b if self.name == "equal" else b, c)])
        if self.name == "equal":
            changed = [t * (norms.mean() / t.norm()) for t in (a, b, c)]
        elif self.name == "reads":
            changed = [a, b * (norms.amax() + hidden) + w, c]
        else:
            self.mean = 0.5 * self.mean + 0.5 * norms.sum()
            changed = [t / self.mean for t in (a, b, c)]
        torch.autograd.backward(outputs, changed)


def train(net: Net, forward: Callable[..., Any], backward: Callable[..., Any], steps: int = 6) -> list[Tensor]:
    """Return the gradients of all steps, with two forwards before two backwards in each."""
    found, optimizer = [], torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        first, second = forward(batch(step)), forward(batch(step + 100))
        backward(first)
        backward(second)
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
    return found


def assert_same(got: list[Tensor], wanted: list[Tensor], rtol: float = 1e-10) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_equals_eager_autograd(name: str, is_checkpointed: bool) -> None:
    net, plain = made(is_checkpointed=is_checkpointed), made()
    reference, model = Reference(name, plain), gr.transform(net, POLICIES[name]())
    wanted = train(plain, reference.forward, reference.backward)
    assert_same(train(net, model, lambda loss: loss.backward()), wanted)


@pytest.mark.inductor
@pytest.mark.parametrize("name", POLICIES)
def test_compiled(name: str) -> None:
    net, plain = made(), made()
    reference, model = Reference(name, plain), gr.transform(net, POLICIES[name]()).compile()
    wanted = train(plain, reference.forward, reference.backward, 2)
    assert_same(train(net, model, lambda loss: loss.backward(), 2), wanted, rtol=1e-5)


def test_what_is_measured_behind_acts_in_front() -> None:
    def to_head(errors: Values) -> dict[str, Tensor]:
        return {"body": errors["body"] * (errors["heads.0"].norm() / errors["body"].norm())}

    net, plain = made(), made()
    model = gr.transform(net, gr.together("error:*", to_head, act_at="error:body"))
    model(batch(0)).backward()
    h = plain.body(batch(0))
    inside = [head(h.tanh()) for head in plain.heads]
    loss = plain.finish(inside)
    of_body, of_head = torch.autograd.grad(loss, [h, inside[0]], retain_graph=True)
    h.backward(of_body * (of_head.norm() / of_body.norm()))
    assert_same([net.body.weight.grad], [plain.body.weight.grad])  # type: ignore[list-item]


def test_records_and_states_are_those_of_the_group() -> None:
    net = made()
    model = gr.transform(net, POLICIES["equal"]())
    model(batch(0)).backward()
    assert list(model.monitor.latest()) == ["mean@group:default"]
    assert [len(edit.nodes) > 0 for edit in model.explain().graphs[0].edits] == [True] * 4
    stateful = gr.transform(made(), POLICIES["state"]())
    stateful(batch(0)).backward()
    assert len(gr.state_dict(stateful)["states"]) == 1


def unit(gradients: Values) -> dict[str, Tensor]:
    total = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    gr.record("total", total)
    return {name: g / total for name, g in gradients.items() if g.dim() > 1}


def test_gradients() -> None:
    found = assert_matches_eager(
        made(), [gr.on("gradient:*", ClipByValue(0.1)), gr.together("gradient:*", unit)], batch(0), compiled=False
    )
    assert "gradient:body.weight" in found.changed
    assert found.records == ("total@group:default",)


def test_the_update() -> None:
    def to_sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    policy = gr.together("step:*", unit)
    found = assert_matches_eager(made(), policy, batch(0), compiled=False, steps=3, optimizer=to_sgd)
    assert "step:body.weight" in found.changed
    assert "total@step:group:default" in found.records


def test_one_member_of_an_unrolled_loop_reads_all_iterations() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros_like(x[0])
            for row in x:
                h = self.cell(h).tanh() + row
            return h.square().sum()

    def last(errors: Values) -> dict[str, Tensor]:
        gr.record("growth", errors["cell"].norm() / errors["cell#4"].norm())
        return {"cell": errors["cell"] / errors["cell"].norm()}

    torch.manual_seed(0)
    net = Loop().double()
    model = gr.transform(
        net, [gr.together("error:cell", last, act_at="error:cell#0"), gr.on("error:cell", Observe("norm"))]
    )
    model(batch(0)).backward()
    latest = model.monitor.latest()
    assert latest["growth@group:default"] == pytest.approx(
        latest["norm@error:cell"] / latest["norm@error:cell#4"], rel=1e-5
    )
    with pytest.raises(gr.PolicyError, match="each iteration of this loop has one by itself"):
        gr.transform(Loop().double(), gr.together("error:cell", last), loops="rolled")(batch(0))


def test_the_loss_scale_is_taken_out() -> None:
    found = []
    for scale in (None, torch.tensor(1024.0, dtype=torch.float64)):
        net = made()
        loss = gr.transform(net, gr.together("error:heads.*", by_sum), loss_scale=scale)(batch(0))
        (loss if scale is None else loss * scale).backward()
        found.append([p.grad / (1 if scale is None else scale) for p in net.parameters() if p.grad is not None])
    assert_same(*found)


def by_sum(errors: Values) -> dict[str, Tensor]:
    total = torch.stack([e.norm() for e in errors.values()]).sum()
    return {name: e * total for name, e in errors.items()}


def test_a_check_behind_names_the_group() -> None:
    def divide(errors: Values) -> dict[str, Tensor]:
        return {name: e / 0 for name, e in errors.items()}

    model = gr.transform(made(), [gr.together("error:heads.*", divide), gr.on("error:body", CheckFinite("raise"))])
    with pytest.raises(gr.NonFiniteError, match=r"joint\(.*divide"):
        model(batch(0)).backward()


def test_a_callback_and_two_groups() -> None:
    def policy(site: gr.Site) -> Any:
        if site.kind != "error" or not site.name.startswith("heads"):
            return None
        return gr.joint(equal, group="first" if site.name == "heads.0" else "others")

    model = gr.transform(made(), policy)
    model(batch(0)).backward()
    assert sorted(model.monitor.latest()) == ["mean@group:first", "mean@group:others"]


class Broken(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.body(x).tanh()
        loss = self.heads[0](h).sum()
        torch._dynamo.graph_break()
        return loss + self.heads[1](h).exp().sum()


def test_a_function_of_several_sites_reads_one_use() -> None:
    net, plain = made(), made()
    rule = gr.together("error:heads.[12]", with_body, reads={"of": "error:/tanh->heads.0"})
    gr.transform(net, rule)(batch(0)).backward()
    h = plain.body(batch(0)).tanh()
    own = [h * 1, h * 1, h * 1]
    outputs = [head(one) for head, one in zip(plain.heads, own, strict=True)]
    loss = plain.finish(outputs)
    used, *errors = torch.autograd.grad(loss, [own[0], *outputs], retain_graph=True)
    torch.autograd.backward(outputs, [errors[0], *(e * used.norm() for e in errors[1:])])
    assert_same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


def errors_of(net: Net) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of the heads, and their errors."""
    outputs = net.outputs(batch(0))
    return outputs, list(torch.autograd.grad(net.finish(outputs), outputs, retain_graph=True))


def test_a_later_group_leaves_what_an_earlier_one_has_computed() -> None:
    total = gr.State((), 0.0, torch.float64, name="total")

    def first(errors: Values) -> dict[str, Tensor]:
        twice = errors["heads.0"] * 2
        gr.record("norm", twice.norm())
        total.set(twice.norm())
        return {"heads.0": twice, "heads.1": errors["heads.1"] * twice.norm()}

    def second(errors: Values) -> dict[str, Tensor]:
        gr.record("norm", errors["heads.0"].norm())
        return {"heads.0": errors["heads.0"] * 3 + 1}

    net, plain = made(), made()
    rules = [
        gr.together("error:heads.[01]", first, group="first"),
        gr.together("error:heads.0", second, group="second"),
    ]
    model = gr.transform(net, rules)
    model(batch(0)).backward()
    outputs, (a, b, c) = errors_of(plain)
    torch.autograd.backward(outputs, [6 * a + 1, b * (2 * a).norm(), c])
    assert_same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
    norm = pytest.approx(float((2 * a).norm()))
    assert model.monitor.latest() == {"norm@group:first": norm, "norm@group:second": norm}


@pytest.mark.parametrize("is_first", [False, True])
def test_measured_members_are_seen_in_the_order_of_the_list(is_first: bool) -> None:
    def measure(errors: Values) -> dict[str, Tensor]:
        gr.record("norm", errors["heads.0"].norm())
        return {}

    def scale(errors: Values) -> dict[str, Tensor]:
        return {name: 5 * e for name, e in errors.items()}

    rules = [gr.together("error:heads.*", measure, group="m"), gr.together("error:heads.*", scale, group="s")]
    model = gr.transform(made(), rules if is_first else rules[::-1])
    model(batch(0)).backward()
    _, (a, *_) = errors_of(made())
    wanted = float(a.norm()) * (1 if is_first else 5)
    assert model.monitor.latest()["norm@group:m"] == pytest.approx(wanted)


@pytest.mark.parametrize("is_first", [False, True])
def test_examples_are_looked_for_behind_groups_of_errors(is_first: bool) -> None:
    rules = [gr.together("error:heads.*", equal), gr.on("gradient:*", ClipPerExample(1.0))]
    with pytest.raises(gr.PolicyError, match="of a sum over the batch"):
        gr.transform(made(), rules if is_first else rules[::-1])(batch(0))


def test_what_is_changed_in_place_counts_where_it_is_returned() -> None:
    def in_place(errors: Values) -> dict[str, Tensor]:
        for e in errors.values():
            e.mul_(2)
        return {"heads.0": errors["heads.0"]}

    net, plain = made(), made()
    model = gr.transform(net, gr.together("error:heads.*", in_place))
    model(batch(0)).backward()
    outputs, (a, b, c) = errors_of(plain)
    torch.autograd.backward(outputs, [2 * a, b, c])
    assert_same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
    assert not any("clone" in str(node.target) for node in model.trace(batch(0)).graph_module.graph.nodes)


class OneName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (gr.tap(self.w * x[0].float(), "a") * self.a).square().sum()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a circle": (
        lambda: gr.transform(made(), gr.together("error:*", equal)),
        r"it changes error:heads.0, and error:body, which it is given too, is computed from that",
    ),
    "what it reads is computed from a member": (
        lambda: gr.transform(made(), gr.together("error:heads.*", with_body, reads={"of": "error:body"})),
        r"it changes error:heads.0, and what it reads, which it is given too, is computed from that",
    ),
    "a site that it was not given": (
        lambda: gr.transform(made(), gr.together("error:heads.*", lambda e: {"heads.7": e["heads.0"]})),
        r"returned 'heads.7', a site that it was not given; nearest: heads.0",
    ),
    "a site that is left alone": (
        lambda: gr.transform(made(), gr.together("error:heads.*", equal, act_at="error:heads.0")),
        r"returned 'heads.1', which act_at='error:heads.0' does not match",
    ),
    "act_at without a member": (
        lambda: gr.transform(made(), gr.together("error:heads.*", equal, act_at="error:haeds.0")),
        r"act_at matches none of its sites; nearest: error:heads.0",
    ),
    "two members with one name": (
        lambda: gr.transform(OneName(), gr.on("*", gr.joint(equal, act_at="error:a"))),
        r"error:a and gradient:a have one name",
    ),
    "no mapping": (
        lambda: gr.transform(made(), gr.together("error:heads.*", lambda e: None)),  # type: ignore[return-value]
        r"returned NoneType; it returns a mapping",
    ),
    "another shape": (
        lambda: gr.transform(made(), gr.together("error:heads.*", lambda e: {"heads.0": e["heads.0"][0]})),
        r"changed the shape",
    ),
    "two functions of one group": (
        lambda: gr.transform(made(), [gr.together("error:heads.*", equal), gr.together("error:body", unit)]),
        r"are in one group 'default'",
    ),
    "regions": (
        lambda: gr.transform(made(), gr.together("error:heads.*", equal), regions="heads.*"),
        r"its group 'default' has values of the regions 'heads.0' and 'heads.1'",
    ),
    "gradients of regions": (
        lambda: gr.transform(made(), gr.together("gradient:heads.*", unit), regions="heads.*"),
        r'gr.on\("step:\*", joint\(unit',
    ),
    "a graph break": (
        lambda: gr.transform(Broken().double(), gr.together("gradient:*", unit), fullgraph=False),
        r'its group has gradients of the graphs .* gr.on\("step:\*", joint\(unit',
    ),
    "losses that are weighed": (
        lambda: gr.transform(
            made(losses=2),
            [gr.together("error:heads.0", unit), gr.on("gradient:*", WeighLosses(lambda g: g.diagonal()))],
        ),
        r"error:heads.0: joint.* is given an error that several losses share",
    ),
}


def with_body(errors: Values, *, of: Tensor) -> dict[str, Tensor]:
    return {name: e * of.norm() for name, e in errors.items()}


@pytest.mark.filterwarnings("ignore:the tracer skipped a region")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, words = REFUSED[name]
    model = make()
    with pytest.raises((gr.PolicyError, gr.CallbackError), match=words):
        model(batch(0))
    plain = copy.deepcopy(model.original)
    plain(batch(0))  # as it was


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="takes one argument, the values by their names"):
        gr.joint(lambda a, b: a)
    with pytest.raises(TypeError, match="function is callable"):
        gr.joint("equal")
    with pytest.raises(ValueError, match="without names in"):
        gr.joint(with_body, reads={"of": "activation:{name}"})
    with pytest.raises(TypeError, match="has no keyword 'other', which reads has"):
        gr.joint(with_body, reads={"other": "activation:body"})
    with pytest.raises(ValueError, match="group is a name"):
        gr.joint(equal, group="")
    with pytest.raises(ValueError, match="no kind of site"):
        gr.together("eror:*", equal)


ORACLE: dict[str, Callable[[], list[Any]]] = {
    **POLICIES,
    "two, the later one first": lambda: [
        gr.together("error:body", lambda e: {"body": e["body"] / e["body"].norm()}, group="body"),
        gr.together("error:heads.*", equal, group="heads"),
        gr.together("error:heads.*", follow(), group="again"),
    ],
    "an input": lambda: [gr.together("input:x", lambda v: {"x": v["x"].sign()}), gr.on("input:x", ClipByValue(0.1))],
}


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", ORACLE)
def test_oracle_sees_functions_of_several_errors(name: str, is_checkpointed: bool) -> None:
    x = batch(0).requires_grad_()
    net = made(is_checkpointed=is_checkpointed)
    found = assert_matches_eager(net, ORACLE[name](), x, compiled=False, steps=3)
    assert found.changed
    assert ("mean@group:default" in found.records) == (name == "equal")
