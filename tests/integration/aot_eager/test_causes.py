"""The well-known causes of NaN, each with a small real model: the report names the right place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByValue

from helpers import failure, mostly_slow
from models.small import Lambda

GRADIENTS = gr.on("gradient:*", CheckFinite())
EVERYTHING = [GRADIENTS, gr.on("activation:*/*", CheckFinite()), gr.on("error:*/*", CheckFinite())]
POLICIES = pytest.mark.parametrize("policy", mostly_slow([GRADIENTS, EVERYTHING]), ids=["gradients", "everything"])


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.out(self.hidden(x)) - y).square().mean()


@POLICIES
def test_learning_rate_too_high(policy: gr.Policy) -> None:
    model = gr.transform(Regression(), policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3)

    def train() -> None:
        for _ in range(50):
            optimizer.zero_grad()
            model(torch.ones(2, 4), torch.ones(2, 1)).backward()
            optimizer.step()

    err = failure(train)
    # Every update multiplies the weights, until a product of two of them overflows.
    assert err.op in ("/square", "out/linear", "hidden/linear")
    assert not err.cause
    assert err.step > 1
    assert err.window or err.site.name == "hidden"
    assert err.percent > 0


@POLICIES
def test_learning_rate_nan(policy: gr.Policy) -> None:
    model = gr.transform(Regression(), policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4), torch.ones(2, 1)).backward()
        optimizer.step()

    step()
    optimizer.param_groups[0]["lr"] = float("nan")
    step()
    err = failure(step)
    assert err.step == 2
    assert err.cause == "the parameter hidden.weight was not finite already: an earlier update, or what it began with"
    assert str(err.site) == "activation:hidden"
    assert err.percent == 100.0
    assert not err.op


class CountedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        losses = self.head(x).square().sum(-1) * mask
        return losses.sum() / mask.sum()


@POLICIES
def test_loss_divides_by_a_count_of_zero(policy: gr.Policy) -> None:
    model = gr.transform(CountedLoss(), policy)
    model(torch.ones(2, 3), torch.ones(2)).backward()
    err = failure(lambda: model(torch.ones(2, 3), torch.zeros(2)).backward())

    assert err.op == "/truediv"
    assert str(err.site) == "activation:/truediv"
    assert err.source.endswith('"return losses.sum() / mask.sum()"')
    assert err.percent == 100.0


@POLICIES
def test_nan_in_the_input(policy: gr.Policy) -> None:
    model = gr.transform(Regression(), policy)
    x = torch.ones(2, 4)
    x[1, 2] = torch.nan
    err = failure(lambda: model(x, torch.ones(2, 1)).backward())

    assert err.cause == "the input x was not finite already"
    assert not err.op
    assert str(err.site) == "activation:hidden"
    assert err.percent == 50.0


@POLICIES
def test_loss_outside_the_model_that_is_nan(policy: gr.Policy) -> None:
    model = gr.transform(nn.Linear(3, 2), policy)
    err = failure(lambda: (model(torch.ones(2, 3)).sum() / torch.zeros(())).backward())

    assert "came from outside the model (the loss)" in err.cause
    assert str(err.site) == "error:/linear"


@pytest.mark.long
@POLICIES
@pytest.mark.parametrize("pool", [F.avg_pool2d, F.max_pool2d])
def test_pooling_at_the_border_is_no_alarm(policy: gr.Policy, pool: Callable[..., Tensor]) -> None:
    net = Lambda(
        lambda net, x: net.out(pool(net.conv(x), 2, stride=3, padding=1, ceil_mode=True).flatten(1)).sum(),
        conv=nn.Conv2d(1, 2, 3),
        out=nn.Linear(8, 1),
    )
    model = gr.transform(net, policy)
    model(torch.randn(2, 1, 6, 6)).backward()

    assert not any(value for name, value in model.monitor.latest().items() if name.startswith("non"))
    assert gr.locate(model, torch.randn(2, 1, 6, 6)) is None


class NormWithoutEpsilon(nn.Module):
    """BatchNorm as people write it; torch's own refuses ``eps=0``."""

    def forward(self, h: Tensor) -> Tensor:
        return (h - h.mean(0)) / h.var(0, correction=0).sqrt()


@pytest.mark.long
@POLICIES
def test_batch_norm_over_equal_values(policy: gr.Policy) -> None:

    net = Lambda(
        lambda net, x: net.out(net.norm(net.first(x))).sum(),
        first=nn.Linear(3, 4),
        norm=NormWithoutEpsilon(),
        out=nn.Linear(4, 1),
    )
    model = gr.transform(net, policy)
    model(torch.randn(4, 3)).backward()
    err = failure(lambda: model(torch.ones(4, 3)).backward())  # the variance of equal rows is zero

    assert err.op == "norm/truediv"
    assert str(err.site) == "activation:norm"


@POLICIES
@pytest.mark.filterwarnings("ignore:std:UserWarning")
def test_variance_of_one_sample(policy: gr.Policy) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return ((h - h.mean(0)) / h.std(0)).sum()

    model = gr.transform(Net(), policy)
    err = failure(lambda: model(torch.ones(1, 3)).backward())

    assert err.op == "/std"
    assert err.source.endswith('"return ((h - h.mean(0)) / h.std(0)).sum()"')


@pytest.mark.long
@POLICIES
def test_batch_norm_of_one_sample_with_epsilon_is_no_fault(policy: gr.Policy) -> None:
    """One sample without variance; of one value a channel torch makes an error itself."""
    model = gr.transform(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)), policy)
    model(torch.ones(1, 1, 2, 2)).sum().backward()

    assert gr.locate(model, torch.ones(1, 1, 2, 2)) is None


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, dtype=dtype) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT
        scores = scores.masked_fill(mask, float("-inf"))
        return (torch.softmax(scores, -1) @ self.v(x)).sum()


@pytest.mark.long
@POLICIES
def test_float16_overflow_in_attention_scores(policy: gr.Policy) -> None:
    model = gr.transform(Attention(torch.float16), policy)
    x, mask = torch.ones(1, 4, 8, dtype=torch.float16), torch.zeros(4, 4, dtype=torch.bool)
    model(x, mask).backward()
    with torch.no_grad():
        model.q.weight.fill_(20.0)
        model.k.weight.fill_(20.0)
    err = failure(lambda: model(x * 8, mask).backward())

    assert err.op == "/matmul"
    assert str(err.site) == "activation:/matmul"
    assert err.source.endswith('"scores = self.q(x) @ self.k(x).mT"')
    assert err.percent == 100.0


@POLICIES
def test_softmax_over_a_row_that_is_wholly_masked(policy: gr.Policy) -> None:
    model = gr.transform(Attention(), policy)
    x, mask = torch.randn(1, 4, 8), torch.ones(4, 4, dtype=torch.bool).triu(1)
    model(x, mask).backward()  # an ordinary causal mask is no fault
    mask[2] = True
    err = failure(lambda: model(x, mask).backward())

    assert err.op == "/softmax"
    assert str(err.site) == "activation:/softmax"
    assert err.percent == 25.0


@POLICIES
@pytest.mark.parametrize("as_buffer", [False, True])
def test_masks_that_are_added_are_no_fault(policy: gr.Policy, as_buffer: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.v = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            mask = self.mask if as_buffer else torch.full((4, 4), float("-inf")).triu(1)
            scores = (self.q(x) @ x.mT + mask) / 2
            return (torch.softmax(scores, -1) @ self.v(x)).sum()

    model = gr.transform(Net(), policy)
    model(torch.randn(1, 4, 8)).backward()

    with torch.no_grad():
        model.v.weight[0, 0] = torch.inf
    err = failure(lambda: model(torch.randn(1, 4, 8)).backward())
    assert err.cause.startswith("the parameter v.weight was not finite already")


@POLICIES
def test_log_of_zero(policy: gr.Policy) -> None:

    model = Lambda(lambda net, x: torch.log(net.fc(x).square()).sum(), fc=nn.Linear(3, 4))
    with torch.no_grad():
        model.fc.bias.copy_(torch.tensor([1.0, 0.0, 1.0, 1.0]))
        model.fc.weight.zero_()
    rewritten = gr.transform(model, policy)
    err = failure(lambda: rewritten(torch.ones(2, 3)).backward())

    assert err.op == "/log"
    assert str(err.site) == "activation:/log"
    assert err.percent == 25.0


@POLICIES
def test_root_at_zero_in_the_backward(policy: gr.Policy) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return torch.sqrt(h * h).sum()

    model = gr.transform(Net(), policy)
    loss = model(torch.zeros(2, 3))
    assert loss.isfinite()
    err = failure(loss.backward)

    assert err.op == "/sqrt"  # not the layer before it
    assert str(err.site) == "error:/mul"
    assert err.source.endswith('"return torch.sqrt(h * h).sum()"')
    assert err.percent == 100.0
    assert [str(s.site) for s in err.window][-1] == "error:/sqrt"
    assert err.window[-1].smallest == err.window[-1].largest == 1.0


def test_a_clip_of_the_error_on_the_way_changes_no_blame() -> None:

    for more in ([], [gr.on("error:*/sqrt", ClipByValue(10.0))]):
        net = Lambda(lambda net, x: torch.exp(torch.sqrt(net.lin(x) * 0.0)).sum(), lin=nn.Linear(3, 3))
        model = gr.transform(net, [gr.on("error:*/mul", CheckFinite()), *more])
        assert failure(model(torch.ones(2, 3)).backward).op == "/sqrt"


def test_a_parameter_that_was_replaced_is_the_one_of_the_replay() -> None:
    net = nn.Linear(2, 2, bias=False)
    model = gr.transform(net, gr.on("gradient:weight", CheckFinite("raise")))
    model(torch.ones(1, 2)).square().sum().backward()
    model.zero_grad()
    net.weight = nn.Parameter(torch.tensor([[1.0, float("nan")], [0.0, 1.0]]))
    with pytest.raises(gr.NonFiniteError) as caught:
        model(torch.ones(1, 2)).square().sum().backward()
    assert len(model.explain().graphs) == 1  # the same code, with other inputs
    assert caught.value.cause.startswith("the parameter weight was not finite already")
