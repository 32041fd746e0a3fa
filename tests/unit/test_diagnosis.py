"""``gr.diagnose``: nothing of the user's changes, and what it is given in all its forms."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.cli import main

Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Normalizes, drops and draws, so that buffers and random numbers matter; ``fail`` raises in a later step."""

    def __init__(self, fail: type[BaseException] | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.head, self.fail = nn.Linear(8, 1), fail

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.norm(self.first(x)))))


def loss_of(out: Tensor, x: Tensor) -> Tensor:
    return (out - x[:, :1]).square().mean()


def loss_by(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def batches(number: int = 12) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(16, 4) for _ in range(number)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    own = {} if optimizer is None else copy.deepcopy(optimizer.state_dict())
    return {
        "model": copy.deepcopy(model.state_dict()),
        "gradients": gradients,
        "optimizer": own,
        "rng": torch.get_rng_state(),
    }


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, Mapping):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert a == b


def failing(error: type[BaseException]) -> Callable[[Tensor, Tensor], Tensor]:
    calls = iter(range(100))

    def loss(out: Tensor, x: Tensor) -> Tensor:
        if next(calls) == 5:
            raise error("planted")
        return loss_of(out, x)

    return loss


def test_causes_can_be_pickled_copied_and_read_as_dicts() -> None:
    found = gr.diagnose(Net(), batches(), loss=loss_of, optimizer=lambda p: torch.optim.SGD(p, lr=50.0))

    assert found.causes
    assert pickle.loads(pickle.dumps(found.causes)) == copy.deepcopy(found.causes) == found.causes
    assert [dataclasses.asdict(cause)["kind"] for cause in found.causes] == [cause.kind for cause in found.causes]
    assert pickle.loads(pickle.dumps(found.health)).verdict == found.health.verdict


@pytest.mark.broad
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_model_optimizer_and_random_numbers_stay_as_they_were(error: type[BaseException] | None) -> None:
    model, data = Net(), batches()
    optimizer = sgd(model.parameters())
    for x in data[:3]:
        loss_of(model(x), x).backward()
        optimizer.step()
    before = state_of(model, optimizer)
    if error is None:
        found = gr.diagnose(model, data, loss=loss_of, optimizer=optimizer, try_clips=True)
        assert len(found.trials["global clip"]) == 50
    else:
        with pytest.raises(error, match="planted"):
            gr.diagnose(model, data, loss=failing(error), optimizer=optimizer)
    assert_same(before, state_of(model, optimizer))


@pytest.mark.broad
def test_all_stays_as_it_was_with_a_loss_of_the_model() -> None:
    model, data = Net(), [{"x": x, "y": x[:, :1]} for x in batches()]
    optimizer = sgd(model.parameters())
    for batch in data[:3]:
        (model(batch["x"]) - batch["y"]).square().mean().backward()
        optimizer.step()
    before = state_of(model, optimizer)

    def compute_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        noise = 0.01 * torch.randn_like(y)
        return (model(x) - y + noise).square().mean() + 0.0 * model.head.weight.square().sum()

    found = gr.diagnose(model, data, compute_loss=compute_loss, optimizer=optimizer, try_clips=True, steps=20)

    assert len(found.trials["global clip"]) == 20
    assert_same(before, state_of(model, optimizer))
    assert type(model) is Net


class Loss(nn.Module):
    """Returns an object with the loss, and takes its batch by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=(self.layer(x) - y).square().mean())


def test_batches_by_keyword_and_an_output_with_its_loss() -> None:
    data = [{"x": x, "y": x[:, :1]} for x in batches(50)]
    found = gr.diagnose(Loss(), iter(data), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), steps=40)

    assert (found.outcome, found.causes, found.trials) == ("learns", (), {})
    assert found.health is not None
    assert len(found.health.run.steps) == 40


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_loader_of_inputs_and_labels(as_mapping: bool) -> None:
    data = [{"input": x, "y": x[0]} if as_mapping else (x, x[0]) for x in torch.cat(batches())]
    loader: Any = torch.utils.data.DataLoader(data, batch_size=16)  # its batches are lists, or mappings
    model = nn.Sequential(nn.Linear(4, 1))

    def loss(out: Tensor, batch: Any) -> Tensor:
        return (out[:, 0] - (batch["y"] if as_mapping else batch[1])).square().mean()

    found = gr.diagnose(model, loader, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), steps=30)
    assert (found.outcome, found.causes) == ("learns", ())


def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Linear(2, 1)
    model.kept = model(torch.ones(1, 2))
    with pytest.raises(TypeError, match=r"trains a deep copy, and copying failed .* before it has run"):
        gr.diagnose(model, [torch.ones(1, 2)])


def test_without_an_optimizer_gradients_alone_are_looked_at() -> None:
    found = gr.diagnose(Net(), batches(), loss=loss_of, steps=3)

    assert (found.outcome, found.causes) == ("untrained", ())
    assert found.verdict.startswith("Nothing wrong so far: in 3 steps no gradient exploded")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps is a whole number >= 1, got 0"),
        ({"batches": []}, ValueError, "there is no batch"),
        ({"loss": None}, TypeError, r"the loss is a tensor with one element, got shape \(16, 1\); give loss="),
        (
            {"compute_loss": loss_of},
            ValueError,
            "loss, .* and compute_loss, .* are two ways to say one thing; give one",
        ),
        (
            {"loss": None, "compute_loss": loss_by},
            TypeError,
            r"got shape \(16, 1\); compute_loss is a function \(model",
        ),
        ({"loss": lambda out, x: out.detach().sum()}, gr.TraceError, "depends on no parameter"),
        ({"loss": lambda out, x: 1.0}, TypeError, "a tensor with one element, got float"),
        ({"model": 1}, TypeError, "takes an nn.Module, got int"),
        ({"model": gr.transform(nn.Linear(2, 2), [])}, TypeError, "give model.original, or ask model.monitor.diagnose"),
        ({"optimizer": sgd(nn.Linear(2, 2).parameters())}, ValueError, "none of the model's parameters"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"model": Net(), "batches": batches(2), "loss": loss_of, "optimizer": sgd} | arguments
    with pytest.raises(error, match=message):
        gr.diagnose(given.pop("model"), given.pop("batches"), **given)


@pytest.mark.broad
def test_the_page_has_verdict_policy_and_trials(tmp_path: Path) -> None:
    def diverging(out: Tensor, x: Tensor) -> Tensor:
        return loss_of(out, x) * 1e3

    found = gr.diagnose(Net(), batches(), loss=diverging, optimizer=sgd, try_clips=True)
    page = Path(found.render(tmp_path / "diagnosis")).read_text()

    assert found.causes[0].kind == "learning rate"
    assert "Learning rate too high" in page
    assert found.policy == ""  # it ends far above the global clip
    assert "The suggested clip" not in str(found)
    assert "Tried, and of no help, so that it is not suggested: gr.on(" in str(found)
    assert '"title":"loss of each trial, from one start on the same batches"' in page
    assert [tab for tab in ("report", "curves", "overview", "ladder") if f'id="tab-{tab}"' in page] == [
        "report", "curves", "overview", "ladder",
    ]  # fmt: skip
    assert 'srcdoc="' in found._repr_html_()
    assert isinstance(found.health, type(viz.report(found.health.run.steps).health))
    for text in ("as it is: 8 steps; loss 613.1", "suggested policy: 50 steps; loss 613.1"):
        assert text in str(found)
        assert text in page


MODULE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def batches():
    torch.manual_seed(0)
    return [torch.randn(16, 4) for _ in range(50)]

def loss(out, x):
    return (out - x[:, :1]).square().mean()

def compute_loss(model, x):
    return loss(model(x), x)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.mark.broad
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model_to_diagnose.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = {"--input": "batches", "--loss": "loss", "--optimizer": "optimizer"}
    options = [word for flag, name in names.items() for word in (flag, f"model_to_diagnose:{name}")]

    assert main(["diagnose", "model_to_diagnose:make", *options, "--steps", "30", "--out", "found.html"]) == 0
    said = capsys.readouterr().out
    assert "the loss went from" in said
    assert said.endswith("found.html\n")
    assert (tmp_path / "found.html").is_file()
    by_model = [*options[:2], "--compute-loss", "model_to_diagnose:compute_loss"]
    assert main(["diagnose", "model_to_diagnose:make", *by_model, "--steps", "3"]) == 0
    assert "Nothing wrong so far" in capsys.readouterr().out
    assert main(["diagnose", "model_to_diagnose:make", *by_model, *options[2:4]]) == 2
    assert "two ways to say one thing" in capsys.readouterr().err
    assert main(["diagnose", "model_to_diagnose:make", *options[:2], "--steps", "2"]) == 2
    assert "give loss=, a function (output, batch) -> scalar" in capsys.readouterr().err
