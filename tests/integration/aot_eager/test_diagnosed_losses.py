"""A loss that is traced with its model: the op and the line behind values that are not finite."""

from __future__ import annotations

import copy
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite.diagnostics.health import examine

pytestmark = pytest.mark.broad

Sequences = namedtuple("Sequences", ["x", "y", "lengths"])


class Net(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 8), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batches(number: int = 8) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(16, 4) for _ in range(number)]


def diagnosed(loss: Callable[..., Tensor], data: Any = None, model: nn.Module | None = None) -> gr.Diagnosis:
    torch.manual_seed(0)
    return gr.diagnose(model or Net(), batches() if data is None else data, loss=loss, optimizer=sgd)


def only(found: gr.Diagnosis) -> gr.Cause:
    (cause,) = found.causes
    assert found.outcome == "non-finite"
    return cause


def log_of_zero(out: Tensor, batch: Any) -> Tensor:
    return out.square().mean() + torch.log(out.detach() * 0).mean()  # planted log


def test_the_op_of_a_loss_and_its_line_are_named() -> None:
    cause = only(diagnosed(log_of_zero))

    assert (cause.kind, cause.site) == ("non-finite op", "activation:/log")
    assert "made by /log" in cause.text
    assert cause.source.startswith("test_diagnosed_losses.py:")
    assert "# planted log" in cause.source


def test_the_backward_of_an_op_of_a_loss() -> None:
    cause = only(diagnosed(lambda out, _: torch.sqrt(out.mean() * 0)))

    assert "made by the backward of /sqrt" in cause.text
    assert "torch.sqrt(out.mean() * 0)" in cause.source


@pytest.mark.parametrize("as_mapping", [False, True])
def test_compute_loss_is_given_the_model_and_the_parts_of_a_batch(as_mapping: bool) -> None:
    def compute_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        hidden = model.encoder(x)
        return (model(x) - y).square().mean() + torch.log(hidden.detach() * 0).mean()

    data: Any = [{"x": x, "y": x[:, :1]} if as_mapping else (x, x[:, :1]) for x in batches()]
    cause = only(gr.diagnose(Net(), data, compute_loss=compute_loss, optimizer=sgd))

    assert cause.site == "activation:/log"
    assert "torch.log(hidden.detach() * 0)" in cause.source


def test_compute_loss_of_a_tensor() -> None:
    found = gr.diagnose(Net(), batches(), compute_loss=lambda model, x: model(x).square().mean(), optimizer=sgd)
    assert (found.outcome, found.causes) == ("learns", ())


def test_a_target_that_is_not_finite_is_an_input() -> None:
    data = [(x, x[:, :1] * (torch.nan if n == 4 else 1.0)) for n, x in enumerate(batches())]
    found = diagnosed(lambda out, batch: (out - batch[1]).square().mean(), data)

    (cause,) = found.causes
    assert (cause.step, cause.operands[0].name, cause.operands[0].nonfinite) == (4, "batch.1", 16)
    assert "the input batch.1 was not finite already: NaN; it reaches" in found.verdict
    assert cause.advice.startswith("Look at the batch of that step, and filter such examples")


def test_names_of_the_model_are_those_without_a_loss() -> None:
    found = diagnosed(lambda out, x: functional.mse_loss(torch.sigmoid(out), x[:, :1].expand_as(out)))
    graph = gr.transform(Net(), []).trace(batches()[0])
    assert found.graph is not None
    sites = [str(site) for site in found.graph.sites]
    own = [str(site) for site in graph.sites if site.kind != "gradient"]

    assert sites[: len(own)] == own
    assert {"error:/sigmoid", "error:/mse_loss"} <= set(sites)
    assert found.health is not None
    assert not [row for row in found.health.sites if row.site.partition(":")[2] in ("/sigmoid", "/mse_loss")]


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 5), nn.ReLU()).requires_grad_(False)

    def forward(self, out: Tensor, _: Tensor) -> Tensor:
        return self.net(out).square().mean()


def test_modules_of_a_loss_are_not_judged() -> None:
    found = diagnosed(Criterion())
    assert found.graph is not None
    sites = {str(site): site for site in found.graph.sites}

    assert sites["error:/relu"].is_outside
    assert not [name for name in sites if "gradrewrite" in name]
    assert found.health is not None
    judged = {row.site for row in found.health.sites if row.site.startswith("error:")}
    assert judged == {"error:encoder", "error:head"}


def test_a_loss_that_takes_parts_out_of_the_batch() -> None:
    data = [{"x": x, "y": torch.zeros(16, dtype=torch.long)} for x in batches()]
    found = gr.diagnose(
        Net(),
        data,
        loss=lambda out, batch: functional.cross_entropy(out, batch.pop("y")),
        optimizer=sgd,
        try_clips=True,
    )
    assert (found.outcome, len(found.trials["global clip"])) == ("learns", 50)
    assert [*data[0]] == ["x", "y"]


def ctc_batches(too_long: int) -> list[Sequences]:
    torch.manual_seed(2)
    lengths = [torch.tensor([2, 7 if n == too_long else 3]) for n in range(8)]
    return [Sequences(torch.randn(6, 2, 4), torch.randint(1, 5, (2, 7)), own) for own in lengths]


def test_the_op_that_stops_the_tracer_is_found_in_an_eager_run() -> None:
    def loss(out: Tensor, batch: Sequences) -> Tensor:
        steps = torch.full((2,), 6)
        return functional.ctc_loss(out.log_softmax(-1), batch.y, steps, batch.lengths)

    found = diagnosed(loss, ctc_batches(too_long=5))
    cause = only(found)
    (remark,) = found.remarks

    assert remark.startswith("The loss is computed beside the graph: test_diagnosed_losses.py:")
    assert "functional.ctc_loss(" in remark
    assert cause.step == 5
    assert "made by /ctc_loss, test_diagnosed_losses.py:" in cause.text
    assert "functional.ctc_loss(" in cause.source
    assert "example 1 has 6 frames for 7 labels at row 1" in cause.text
    assert cause.advice.startswith("Pass zero_infinity=True")


def prints(out: Tensor, _: Any) -> Tensor:
    print(end="")
    return torch.log(out * 0).mean()


def reads_a_number(out: Tensor, _: Any) -> Tensor:
    largest = out.abs().max().item()
    return torch.log(out * 0).mean() * largest


def uses_numpy(out: Tensor, batch: Any) -> Tensor:
    return torch.log(out * 0).mean() + float(batch.numpy().mean())


@pytest.mark.parametrize("loss", [prints, reads_a_number, uses_numpy])
def test_ops_behind_a_graph_break_are_named(loss: Callable[..., Tensor]) -> None:
    found = diagnosed(loss)
    cause, *audited = found.causes

    assert found.outcome == "non-finite"
    assert cause.site == "activation:/log"
    assert "torch.log(out * 0)" in cause.source
    assert all(".item()" in one.text for one in audited)  # a fault of its own


class Broken(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.encoder(x))
        print(end="")
        return self.head(h)


def test_a_model_in_parts_and_an_op_of_its_loss() -> None:
    found = diagnosed(log_of_zero, model=Broken())

    assert "# planted log" in only(found).source
    (remark,) = found.remarks
    assert "Not seen by the tracer" in remark


def test_a_loss_with_a_counter_leaves_the_graph_and_keeps_its_count() -> None:
    count = iter(range(1000))
    seen = []

    def loss(out: Tensor, _: Any) -> Tensor:
        number = next(count)
        seen.append(number)
        return out.square().mean() * (500.0 if number == 12 else 1.0)

    found = gr.diagnose(Net(), batches(30), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3), steps=30)
    assert [(cause.kind, cause.step) for cause in found.causes] == [("spike", 12)]
    assert "The gradients of step 12" in str(found)
    assert seen[:30] == list(range(30))  # behind the training the first step is audited
    assert found.remarks[-1] == (
        "The loss is computed beside the graph: it was traced anew 5 times, as one with a counter is."
    )


def test_a_loss_that_fails_in_the_graph_alone_has_a_remark() -> None:
    def loss(out: Tensor, _: Any) -> Tensor:
        if torch.compiler.is_compiling():
            raise ArithmeticError("planted")
        return out.square().mean()

    found = diagnosed(loss)
    (remark,) = found.remarks
    assert remark.startswith("The loss is computed beside the graph: ")


def test_a_step_that_cannot_be_run_again_has_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("planted\nsecond line")

    monkeypatch.setattr("gradrewrite.diagnosing.failed_steps.locate_in_step", fail)
    found = diagnosed(prints)
    assert found.outcome == "non-finite"
    assert "The step could not be run again with its loss (ArithmeticError: planted)." in found.remarks


class Copied(Net):
    """Notes its copies that live when another is made, and fails to be copied ``fails_after`` times."""

    living: ClassVar[list[weakref.ref[Copied]]] = []
    most = 0
    fails_after = 100

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        if len(self.living) == self.fails_after:
            raise RuntimeError("planted")
        Copied.most = max(self.most, sum(one() is not None for one in self.living))
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        vars(new).update(copy.deepcopy(vars(self), memo))
        self.living.append(weakref.ref(new))
        return new


@pytest.fixture
def copied() -> type[Copied]:
    Copied.living.clear()
    Copied.most = 0
    return Copied


@pytest.mark.parametrize("loss", [log_of_zero, prints])
def test_one_copy_lives_at_a_time(loss: Callable[..., Tensor], copied: type[Copied]) -> None:
    diagnosed(loss, model=copied())

    assert len(copied.living) == 2
    assert copied.most == 0


def test_a_copy_for_the_audit_that_fails_is_a_remark(copied: type[Copied]) -> None:
    model = copied()
    model.fails_after = 1
    found = diagnosed(log_of_zero, model=model)

    assert found.audit is None
    assert only(found).site == "activation:/log"
    assert [remark for remark in found.remarks if "could not be audited (TypeError: gr.diagnose trains" in remark]


def test_no_line_is_advised_where_there_is_none() -> None:
    def infinite(model: nn.Module, x: Tensor) -> Tensor:
        return Infinite.apply(model(x)).mean()

    class Infinite(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient / 0

    model = Net()
    with torch.no_grad():
        model.head.bias[0] = torch.inf
    for found in (
        diagnosed(lambda out, _: out.mean(), model=model),
        gr.diagnose(Net(), batches(), compute_loss=infinite),
    ):
        cause = only(found)
        assert cause.source or "that line" not in cause.advice
        assert "that line" not in found.health.verdict.advice or cause.source


def test_the_loss_of_a_constant_answer_is_known_in_the_graph() -> None:
    draw = torch.Generator().manual_seed(0)
    shares = torch.tensor([0.7, 0.1, 0.1, 0.1])
    data = [
        (torch.randn(64, 4, generator=draw), torch.multinomial(shares, 64, True, generator=draw)) for _ in range(60)
    ]

    def by_output(out: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(out, batch[1].view(-1))

    def by_model(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.CrossEntropyLoss()(model(x), y.clone())

    for form in ({"loss": by_output}, {"compute_loss": by_model}):
        torch.manual_seed(0)
        layers = [layer for _ in range(14) for layer in (nn.Linear(4, 4), nn.Sigmoid())]
        model = nn.Sequential(*layers, nn.Linear(4, 4))
        with torch.no_grad():
            model[-1].bias.copy_(torch.tensor([-1.0, 1.0, 1.0, 1.0]))
        found = gr.diagnose(model, data, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), steps=60, **form)
        assert "no more than the best constant answer, whose loss is 0.9" in str(found)


def test_classes_that_were_counted_in_the_graph_are_kept_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = []

    def noted(steps: Any, *, evidence: Any) -> Any:
        known.append(evidence.constant_loss)
        return examine(steps, evidence=evidence)

    count = iter(range(1000))

    def loss(out: Tensor, batch: Any) -> Tensor:  # leaves the graph after five steps
        return functional.cross_entropy(out, batch[1]) + 1e-9 * next(count)

    monkeypatch.setattr("gradrewrite._diagnosis.examine", noted)
    x, equal, each = torch.randn(8, 4), torch.zeros(8, dtype=torch.long), torch.arange(8) % 4
    found = gr.diagnose(Net(4), [*[(x, equal)] * 4, *[(x, each)] * 4], loss=loss, optimizer=sgd, steps=8)

    shares = torch.tensor([5, 1, 1, 1]) / 8
    assert known == [pytest.approx(float(-(shares * shares.log()).sum()))]
    assert "beside the graph" in str(found)


def test_a_loss_that_reads_the_original_leaves_its_gradients() -> None:
    model = Net()
    for n, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(n))

    def loss(out: Tensor, _: Any) -> Tensor:
        return out.square().mean() + sum(p.square().sum() for p in model.parameters())

    found = diagnosed(loss, model=model)
    assert found.causes == ()
    assert [p.grad.unique().tolist() for p in model.parameters()] == [[0.0], [1.0], [2.0], [3.0]]


class Slots(Net):
    __slots__ = ("extra",)


def test_a_class_with_slots() -> None:
    assert "# planted log" in only(diagnosed(log_of_zero, model=Slots())).source
