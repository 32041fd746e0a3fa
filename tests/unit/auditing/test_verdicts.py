"""``audit``: faults and remarks, eager mode against the trace, several losses, and nothing changed."""

from __future__ import annotations

import copy
import json
import linecache
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.auditing.findings import Audit

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Branches(nn.Module):
    """A trunk with two heads; a function says what becomes of them."""

    def __init__(self, join: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.policy, self.value = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.join = join

    def forward(self, x: Tensor) -> Any:
        h = self.trunk(x).tanh()
        return self.join(self.policy(h), self.value(h))


def line_at(text: str) -> str:
    """The line of this file behind "`mean` at test_verdicts.py:12"."""
    return linecache.getline(__file__, int(text.rpartition(":")[2]))


def verdicts(found: Audit) -> dict[str, str]:
    return {row.name: row.verdict for row in found.rows}


def test_a_sound_model_has_no_cause_and_no_remark() -> None:
    found = gr.audit(Branches(lambda p, v: (p * v).sum()), X)

    assert (found.causes, found.remarks) == ((), ())
    assert set(verdicts(found).values()) == {"trained"}
    assert str(found) == "6 of 6 parameters are trained; no fault was found."


def test_a_way_that_is_left_is_a_remark() -> None:
    def join(policy: Tensor, value: Tensor) -> Tensor:
        return (policy * value.detach() + value).square().mean()

    found = gr.audit(Branches(join), X)

    assert found.causes == ()
    (remark,) = found.remarks
    assert "`detach` at test_verdicts.py" in remark
    assert "policy * value.detach()" in remark
    assert "ends one path of gradients to trunk.weight, trunk.bias, value.weight and 1 more; another is left" in remark


def test_a_detached_head_is_a_fault() -> None:
    found = gr.audit(Branches(lambda p, v: p.sum() + v.detach().sum()), X)

    (cause,) = found.causes
    assert (cause.kind, cause.site) == ("no gradient", "gradient:value.weight")
    assert cause.text.startswith("2 parameters (value.weight, value.bias) get no gradient: `detach` hands on")
    assert "v.detach().sum()" in cause.source
    assert "detach()" in cause.advice
    assert verdicts(found)["trunk.weight"] == "trained"


def test_an_unused_head_is_a_remark_unless_it_was_named() -> None:
    model = Branches(lambda p, v: p.sum())
    found = gr.audit(model, X)
    named = gr.audit(model, X, trained=["trunk.*", "policy.*", "value.*"])

    assert found.causes == ()
    assert found.remarks == (
        "2 parameters (value.weight, value.bias) get no gradient: the loss is computed without them.",
    )
    assert [cause.kind for cause in named.causes] == ["no gradient"]
    assert verdicts(named)["value.weight"] == "unused"


def test_trained_is_judged_in_both_directions() -> None:
    model = Branches(lambda p, v: (p * v).sum())
    model.policy.requires_grad_(False)
    found = gr.audit(model, X, trained=["trunk.*", "policy.*"])

    assert [(cause.kind, cause.site) for cause in found.causes] == [
        ("no gradient", "gradient:policy.weight"),
        ("trained unasked", "gradient:value.weight"),
    ]
    assert "requires_grad is False" in found.causes[0].text
    assert "trained='trunk.*', 'policy.*'" in found.causes[1].text
    assert gr.audit(model, X, trained=["trunk.*", "value.*"]).causes == ()


def test_parameters_of_one_loss_alone_are_told() -> None:
    """A router that only its balance loss moves."""

    def join(policy: Tensor, value: Tensor) -> Tensor:
        routed = value.gather(-1, policy.argmax(-1, keepdim=True))
        balance = policy.softmax(-1).square().mean()
        return routed.square().mean() + 0.01 * balance

    found = gr.audit(Branches(join), X)
    losses = {row.name: row.losses for row in found.rows}

    assert found.causes == ()
    assert [len(losses[name]) for name in ("policy.weight", "value.weight", "trunk.weight")] == [1, 1, 2]
    assert "balance = " in line_at(losses["policy.weight"][0])
    assert "routed.square()" in line_at(losses["value.weight"][0])
    (remark,) = found.remarks
    assert remark.startswith("2 parameters (policy.weight, policy.bias) are not trained by `mean` at ")
    assert "`argmax` at" in remark
    assert "ends the path; what trains them is `mean` at" in remark


def test_several_returned_losses_are_told_apart() -> None:
    found = gr.audit(Branches(lambda p, v: {"a": p.sum(), "b": v.sum()}), X)
    losses = {row.name: len(row.losses) for row in found.rows}

    assert losses["policy.weight"] == losses["value.weight"] == 1
    assert losses["trunk.weight"] == 2


class Adapted(nn.Module):
    """A frozen embedding, and an adapter behind a checkpoint."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(self.lora_b.weight)
        self.head = nn.Linear(4, 2)
        self.use_reentrant = use_reentrant

    def block(self, x: Tensor) -> Tensor:
        return x + self.lora_b(self.lora_a(x))

    def forward(self, tokens: Tensor) -> Tensor:
        h = checkpoint(self.block, self.embed(tokens), use_reentrant=self.use_reentrant)
        return self.head(h).square().mean()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_reentrant_checkpoint_is_trained_compiled_and_not_in_eager_mode() -> None:
    found = gr.audit(Adapted(use_reentrant=True), torch.arange(5))

    assert verdicts(found)["lora_a.weight"] == verdicts(found)["lora_b.weight"] == "compiled only"
    (cause,) = found.causes
    assert (cause.kind, cause.site) == ("no gradient", "gradient:lora_a.weight")
    assert "no gradient in eager mode, where `checkpoint` hands on none; compiled there is one" in cause.text
    assert "checkpoint(self.block" in cause.source
    assert "use_reentrant=False" in cause.advice


def test_zeros_that_the_first_steps_change_are_no_fault() -> None:
    """LoRA with B = 0: A has a gradient of 0 in the first step."""
    found = gr.audit(Adapted(use_reentrant=False), torch.arange(5), trained=["lora_*", "head.*"])

    assert (found.causes, found.remarks) == ((), ())
    assert verdicts(found)["lora_a.weight"] == "trained"
    assert verdicts(gr.audit(Adapted(use_reentrant=False), torch.arange(5), steps=1))["lora_a.weight"] == "zero so far"


class AsksTheCopy(torch.autograd.Function):
    """A product that asks its saved copy whether it needs a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.copy = x.detach()
        return x @ weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        return (g @ weight.T if ctx.copy.requires_grad else None), x.T @ g


def test_a_function_that_asks_a_copy_is_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            return AsksTheCopy.apply(self.first(x), self.weight).sum()

    found = gr.audit(Net(), X)

    (cause,) = found.causes
    assert cause.text.startswith(
        "2 parameters (first.weight, first.bias) get no gradient: the backward of `AsksTheCopy`"
    )
    assert "AsksTheCopy.apply" in cause.source
    assert "ctx.needs_input_grad" in cause.advice


def test_a_branch_of_eager_mode_alone_is_told() -> None:
    def join(policy: Tensor, value: Tensor) -> Tensor:
        return policy.sum() + (value if torch.compiler.is_compiling() else value.detach()).sum()

    found = gr.audit(Branches(join), X)
    assert verdicts(found)["value.weight"] == "compiled only"
    assert "hooks and at branches" in found.causes[0].advice

    def other(policy: Tensor, value: Tensor) -> Tensor:
        return policy.sum() + (value.detach() if torch.compiler.is_compiling() else value).sum()

    found = gr.audit(Branches(other), X)
    assert verdicts(found)["value.weight"] == "eager only"
    assert "in eager mode, and none under torch.compile: `detach`" in found.causes[0].text


def test_a_shift_that_a_normalization_removes_is_a_remark() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    found = gr.audit(model, X.double(), compute_loss=lambda m, x: (m(x) - x[:, :1]).square().mean())

    assert found.causes == ()
    assert verdicts(found)["0.bias"] == "zero up to rounding"
    assert "0.bias gets a gradient of 0 up to rounding" in found.remarks[0]


def test_everything_is_given_back_bit_for_bit() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    nn.init.zeros_(model[3].weight)  # so that parameters are moved, too
    model(X).sum().backward()
    x = X.clone().requires_grad_()
    before = copy.deepcopy(model.state_dict())
    gradients = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in gradients]
    state = torch.get_rng_state()
    gr.audit(model, x)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(v is None or torch.equal(g, v) for g, v in zip(gradients, values, strict=True) if g is not None)
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None


class CountsItself(nn.Module):
    """Overwrites a frozen parameter in its forward, as a mean of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.mean = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.mean.weight.mul_(0.9).add_(self.live.weight, alpha=0.1)
        return (self.live(x) - self.mean(x)).square().mean()


def test_a_frozen_parameter_that_the_forward_writes_is_given_back() -> None:
    model = CountsItself()
    before = model.mean.weight.clone()
    gr.audit(model, X)

    assert torch.equal(model.mean.weight, before)
    assert model.calls == 0


def test_attributes_of_modules_are_given_back() -> None:
    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total, self.seen, self.by_name = torch.zeros(()), [torch.ones(2)], {"count": 0}

        def forward(self, loss: Tensor) -> None:
            self.total += loss.detach()
            self.seen.append(loss.detach())
            self.seen[0].add_(1)
            self.by_name["count"] += 1
            self.last = loss.detach()

    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.metric = nn.Linear(4, 4), Metric()

        def forward(self, x: Tensor) -> Tensor:
            loss = self.linear(x).square().mean()
            self.metric(loss)
            return loss

    metric = (model := Measured()).metric
    total, seen = metric.total, metric.seen
    gr.audit(model, X)

    assert metric.total is total
    assert metric.seen is seen
    assert (float(total), [one.tolist() for one in seen], metric.by_name) == (0.0, [[1.0, 1.0]], {"count": 0})
    assert not hasattr(metric, "last")


def test_the_structural_half_runs_nothing() -> None:
    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                raise AssertionError("it runs")
            return self.linear(x).round().sum()

    found = gr.audit(Runs(), X, steps=0)
    assert verdicts(found)["linear.weight"] == "no gradient"
    with pytest.raises(AssertionError, match="it runs"):
        gr.audit(Runs(), X, steps=1)


def test_forms_of_losses() -> None:
    of_object = gr.audit(Branches(lambda p, v: SimpleNamespace(loss=p.sum(), other=v.sum())), X)
    of_mapping = gr.audit(Branches(lambda p, v: {"loss": p.sum(), "other": v.sum()}), X)
    of_outputs = gr.audit(Branches(lambda p, v: (p.softmax(-1), v)), X)

    assert verdicts(of_object) == verdicts(of_mapping)
    assert verdicts(of_object)["value.weight"] == "unused"
    assert set(verdicts(of_outputs).values()) == {"trained"}  # a sum of a softmax would not depend on "policy"


def test_a_loss_without_any_gradient_names_its_cut() -> None:
    found = gr.audit(Branches(lambda p, v: (p * v).detach().sum()), X)

    assert set(verdicts(found).values()) == {"no gradient"}
    assert {row.op for row in found.rows} == {"detach"}
    assert "(p * v).detach().sum()" in found.causes[0].source


def test_a_transformed_model_is_audited_as_its_original() -> None:
    model = gr.transform(Branches(lambda p, v: p.sum() + v.detach().sum()), [])

    assert len(gr.audit(model, X).causes) == 1


def test_texts_json_and_page(tmp_path: Any) -> None:
    found = gr.audit(Branches(lambda p, v: p.sum() + v.detach().sum()), X)
    page = (tmp_path / "audit.html").read_text() if found.render(tmp_path / "audit") else ""
    as_json = json.loads(json.dumps(found.to_json(), allow_nan=False))

    assert "4 of 6 parameters are trained." in str(found)

    assert "value.weight" in str(found)
    assert "value.weight" in page
    assert "v.detach().sum()" in page
    assert "<script" not in page
    assert [row["verdict"] for row in as_json["rows"]] == [row.verdict for row in found.rows]
    assert "<table" in found._repr_html_()


@pytest.mark.pure
def test_bad_arguments_are_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r"gr\.audit takes an nn\.Module, got str"):
        gr.audit("model")
    with pytest.raises(ValueError, match="steps is a whole number >= 0, got -1"):
        gr.audit(model, X, steps=-1)
    with pytest.raises(ValueError, match=r"trained='\*lora\*' matches no parameter; nearest: "):
        gr.audit(model, X, trained="*lora*")


def test_a_backward_that_waits_is_not_spoiled() -> None:
    """Saved buffers and inputs keep their versions."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    loss = model(X).square().sum()
    gr.audit(model, X)
    loss.backward()

    assert model[0].weight.grad is not None


def test_expanded_buffers_are_given_back() -> None:
    class Expanded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("ones", torch.ones(1).expand(4))

        def forward(self, x: Tensor) -> Tensor:
            print(end="")  # a graph break
            return (self.linear(x) * self.ones).square().mean()

    assert gr.audit(Expanded(), X).causes == ()


def test_a_straight_through_estimator_in_front_of_dead_units_is_no_fault() -> None:
    def join(policy: Tensor, value: Tensor) -> Tensor:
        passed = value + (value.round() - value).detach()
        return policy.sum() + (passed - 100).relu().sum()

    found = gr.audit(Branches(join), X)

    assert found.causes == ()
    assert verdicts(found)["value.weight"] == "zero so far"


def test_layers_that_share_one_graph_are_all_followed() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            print(end="")  # a graph break
            return self.linear(x) * self.gate(x).detach()

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    found = verdicts(gr.audit(Stack(), X))

    assert {name for name, verdict in found.items() if verdict == "no gradient"} == {
        f"layers.{n}.gate.{kind}" for n in range(3) for kind in ("weight", "bias")
    }
    assert {verdict for name, verdict in found.items() if ".linear." in name} == {"trained"}


@pytest.mark.parametrize(("joined", "kind"), [(lambda p, v: None, "NoneType"), (lambda p, v: p.sum().item(), "float")])
def test_a_loss_that_is_no_tensor_is_refused(joined: Callable[[Tensor, Tensor], Any], kind: str) -> None:
    with pytest.raises(TypeError, match=f"the loss is a tensor, got {kind}; let compute_loss, or the model, return it"):
        gr.audit(Branches(joined), X)


def test_a_loss_without_a_path_to_a_parameter_is_a_fault() -> None:
    found = gr.audit(Branches(lambda p, v: torch.ones(3).sum()), X)

    (cause,) = found.causes
    assert "no path leads from the loss to a parameter" in cause.text


def test_an_input_of_another_model_may_be_overwritten() -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mul_(2)).square().mean()

    given = nn.Linear(4, 4)(X)
    before = given.detach().clone()

    assert gr.audit(Doubles(), given).causes == ()
    assert torch.equal(given, before)


def test_a_bias_that_rounding_errors_move_is_trained_unasked() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    loss = lambda m, x: (m(x) - x[:, :1]).square().mean()  # noqa: E731
    found = gr.audit(model, X.double(), compute_loss=loss, trained=["1.*", "2.*", "0.weight"])

    assert [(cause.kind, cause.site) for cause in found.causes] == [("trained unasked", "gradient:0.bias")]
