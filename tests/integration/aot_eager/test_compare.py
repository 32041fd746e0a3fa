"""``gr.compare``: what it compares, what it leaves as it was, what it refuses. Planted differences are elsewhere."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr

from models.small import SquaredTwoLayers, TwoLayers


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, copy.deepcopy(model)


class Renamed(nn.Module):
    """``TwoLayers`` under other names, with its tanh as a module."""

    def __init__(self, net: TwoLayers) -> None:
        super().__init__()
        self.net = nn.Sequential(net.one, nn.Tanh(), net.two)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Counting(nn.Module):
    """Changes a buffer and its input in place, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.drop(self.norm(self.fc(x.mul_(2)))) * self.calls


@pytest.mark.broad
def test_everything_is_left_as_it_was() -> None:
    model, other = pair(Counting())
    x = torch.randn(3, 4)
    model.fc.weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(model.state_dict()), x.clone(), torch.get_rng_state()

    assert gr.compare(model, other, x) is None

    for module in (model, other):
        assert all(torch.equal(value, before[0][name]) for name, value in module.state_dict().items())
    assert torch.equal(x, before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert torch.equal(model.fc.weight.grad, torch.ones(4, 4))
    assert other.fc.weight.grad is None
    assert gr.compare(model, model, x) is None


@pytest.mark.broad
def test_refactored_models_are_matched_by_names() -> None:
    net = TwoLayers()
    names = {"one": "net.0", "two": "net.2", "/tanh": "net.1"}
    assert gr.compare(net, Renamed(net), torch.ones(2, 4), names=names) is None
    other = Renamed(copy.deepcopy(net))
    with torch.no_grad():
        other.net[2].weight.add_(1)
    found = gr.compare(net, other, torch.ones(2, 4), names=names)
    assert found is not None
    assert (found.site, found.other, found.op) == ("activation:two", "activation:net.2", "two/linear")
    assert "activation:two (activation:net.2 in the other), two/linear, small.py:" in str(found)


@pytest.mark.broad
def test_a_wrapped_model() -> None:
    net = TwoLayers()
    wrapped = nn.Sequential(net)
    assert gr.compare(net, wrapped, torch.ones(2, 4), names={"": "0"}) is None
    assert gr.compare(wrapped, net, torch.ones(2, 4), names={"0": ""}) is None


def test_relative_errors_are_those_of_sums_of_absolute_values() -> None:
    net, other = pair(SquaredTwoLayers())
    x = torch.randn(5, 4)
    with torch.no_grad():
        other.two.bias.add_(0.5)
    found = gr.compare(net, other, x)
    assert found is not None
    y, z = TwoLayers.forward(net, x), TwoLayers.forward(other, x)
    assert found.site == "activation:two"
    assert found.error == pytest.approx(((y - z).abs().sum() / z.abs().sum()).item(), rel=1e-5)
    growth = dict(found.growth)
    gradients = [torch.autograd.grad(module(x), module.two.weight)[0] for module in (net, other)]
    wanted = ((gradients[0] - gradients[1]).abs().sum() / gradients[1].abs().sum()).item()
    assert growth["gradient:two.weight"] == pytest.approx(wanted, rel=1e-5)
    assert list(growth) == [
        "activation:two",
        "activation:/square",
        "activation:/sum",
        "error:/sum",
        "error:/square",
        "error:two",
        "error:/tanh",
        "error:one",
        "gradient:one.weight",
        "gradient:one.bias",
        "gradient:two.weight",
        "gradient:two.bias",
    ]


class Signed(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.value = nn.Buffer(torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w * self.value).sum() * 0


@pytest.mark.broad
@pytest.mark.parametrize(
    ("a", "b", "error"),
    [(0.0, -0.0, 0.0), (math.nan, math.nan, None), (math.inf, 1.0, math.inf), (1.0, math.nan, math.inf)],
)
def test_signs_of_zeros_and_values_that_are_not_finite(a: float, b: float, error: float | None) -> None:
    found = gr.compare(Signed(a), Signed(b), torch.ones(2))
    assert (found and (found.site, found.kind, found.error)) == (
        error if error is None else ("activation:/mul#1", "bits", error)
    )


@pytest.mark.broad
def test_dtypes_are_compared_by_values_and_within_a_tolerance() -> None:
    net = TwoLayers(8, 16, 4)
    found = gr.compare(net, copy.deepcopy(net).bfloat16().float(), torch.ones(2, 8))
    assert found is not None
    assert found.kind == "bits"
    wide = copy.deepcopy(net).double()
    wide.register_forward_pre_hook(lambda _, args: tuple(x.double() for x in args))
    found = gr.compare(net, wide, torch.randn(2, 8))
    assert found is not None
    assert (found.site, found.kind) == ("activation:one", "values")
    assert 0 < found.error < 1e-6
    assert found.beyond(1e-5) is None
    largest = max(found.growth, key=lambda row: row[1])
    beyond = found.beyond(largest[1] * 0.999)
    assert beyond is not None
    assert beyond.site == largest[0]


@pytest.mark.broad
def test_shapes_and_missing_gradients() -> None:
    found = gr.compare(TwoLayers(4, 3, 2), TwoLayers(4, 5, 2), torch.ones(1, 4))
    assert found is not None
    assert (found.site, found.kind, found.error) == ("activation:one", "shape", math.inf)
    assert found.rows[0].values == ("[1, 3]", "[1, 5]")
    net, other = pair(TwoLayers())
    other.two.bias.requires_grad_(False)
    found = gr.compare(net, other, torch.ones(1, 4))
    assert found is not None
    assert (found.site, found.other, found.kind) == ("gradient:two.bias", "", "missing")
    found = gr.compare(other, net, torch.ones(1, 4))
    assert found is not None
    assert (found.site, found.other, found.kind) == ("gradient:two.bias", "gradient:two.bias", "missing")


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = TwoLayers()

    def forward(self, x: Tensor, a: Tensor) -> Output:
        logits = self.net(x)
        return Output((logits * a).mean(), logits)


@pytest.mark.broad
def test_the_loss_of_an_output_and_inputs_by_keyword() -> None:
    net, other = pair(WithLoss())
    with torch.no_grad():
        other.net.two.weight[0, 0] += 1
    x, a = torch.ones(3, 4), torch.tensor([1.0, 0.0])
    found = gr.compare(net, other, x, a=a)
    assert found is not None
    assert found.site == "activation:net.two"
    growth = dict(found.growth)
    assert growth["gradient:net.two.bias"] == 0  # of the logits as well it would be 3 more each, and equal too
    assert "error:/mean" in growth


def test_a_page_and_a_table(tmp_path: Path) -> None:
    net, other = pair(TwoLayers())
    with torch.no_grad():
        other.one.weight.mul_(1.5)
    found = gr.compare(net, other, torch.randn(2, 4))
    assert found is not None
    path = found.render(tmp_path / "page")
    assert path == str(tmp_path / "page.html")
    page = Path(path).read_text()
    for site, _ in found.growth:
        assert f'<th scope="row">{site}</th>' in page
    assert page.count("<tr data-group=") == len(found.growth)
    assert page.count('data-group="first"') == 1
    assert "small.py" in page
    assert "http" not in page
    assert repr(found).startswith("Difference('activation:one', 'bits', error=")


def test_compiled_modules_run_op_by_op_too() -> None:
    net, other = pair(TwoLayers())
    other.compile(backend="eager")
    assert gr.compare(net, other, torch.ones(2, 4)) is None


@pytest.mark.broad
def test_refusals() -> None:
    net, x = TwoLayers(), torch.ones(2, 4)
    with pytest.raises(TypeError, match=r"two nn\.Modules, got function"):
        gr.compare(net, lambda x: x, x)
    with pytest.raises(TypeError, match=r"one is rewritten; give model\.original"):
        gr.compare(net, gr.transform(copy.deepcopy(net), []), x)
    with pytest.raises(
        ValueError, match="names has 'ones', and no site of the first model begins with it; nearest: one"
    ):
        gr.compare(net, copy.deepcopy(net), x, names={"ones": "one"})
    with pytest.raises(ValueError, match="names has 'net', and no site of the second model"):
        gr.compare(net, copy.deepcopy(net), x, names={"one": "net"})
    with pytest.raises(ValueError, match="no site in common"):
        gr.compare(nn.Sequential(nn.Linear(4, 2)), nn.ModuleDict({"x": nn.Linear(4, 2)}).x, x)
    with pytest.raises(gr.TraceError, match=r"gr\.compare: no output of the model depends on"):
        gr.compare(net.requires_grad_(False), net, x)
