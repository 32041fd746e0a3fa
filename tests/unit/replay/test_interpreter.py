"""Which op made it: planted faults, replays of compiled steps, and what cannot be replayed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByValue, NanToNum

from helpers import failure
from models.faults import BACKWARD, OPS, Fault, FaultyTransformer, line_of, masked_log_backward
from models.small import Lambda

GRADIENTS = gr.on("gradient:*", CheckFinite())
EVERYTHING = [GRADIENTS, gr.on("activation:*/*", CheckFinite()), gr.on("error:*/*", CheckFinite())]
AWAKE = 3


def wake(model: gr.RewrittenModule, fault: Fault, inputs: tuple[Tensor, ...]) -> gr.NonFiniteError:
    model.zero_grad()
    fault.awake.fill_(AWAKE)
    err = failure(lambda: model(*inputs).backward())
    fault.awake.zero_()
    return err


def check_error(err: gr.NonFiniteError, name: str, fault: Fault) -> None:
    is_backward = fault.fault in BACKWARD
    assert err.op == f"{name}/{OPS[fault.fault]}"
    assert err.source == line_of(fault.fault)
    assert err.site.module == name
    assert err.site.kind == ("error" if is_backward else "activation")
    if not is_backward:
        assert err.site.op == OPS[fault.fault]
    assert err.percent == 100.0 * AWAKE / math.prod(size for size in err.site.shape if size)
    assert not err.note
    assert len(err.window) == 5
    assert err.site not in err.others


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.slow
def test_twenty_faults_with_every_op_checked(seed: int) -> None:
    torch.manual_seed(seed)
    plain = FaultyTransformer(seed)
    inputs = torch.randn(2, 6, 16), torch.randn(2, 6, 1)
    model = gr.transform(plain, EVERYTHING)
    model(*inputs).backward()
    for name, fault in plain.planted:
        err = wake(model, fault, inputs)
        if fault.fault is masked_log_backward:  # every op is checked, and its logarithm is infinite already
            assert (err.site.kind, err.site.op, err.op) == ("activation", "log", f"{name}/log")
        else:
            check_error(err, name, fault)
    model(*inputs).backward()


@pytest.mark.sample(12)
@pytest.mark.inductor
def test_twenty_faults_by_replay_of_a_compiled_step() -> None:
    plain = FaultyTransformer(2)
    inputs = torch.randn(2, 6, 16), torch.randn(2, 6, 1)
    model = gr.transform(plain, GRADIENTS)
    model.compile()
    model(*inputs).backward()
    for name, fault in plain.planted:
        check_error(wake(model, fault, inputs), name, fault)
    model(*inputs).backward()


@pytest.mark.sample(12)
@pytest.mark.slow
def test_replay_from_gradients_says_what_a_check_at_every_op_says() -> None:
    plain = FaultyTransformer(3)
    inputs = torch.randn(2, 6, 16), torch.randn(2, 6, 1)
    coarse, fine = gr.transform(plain, GRADIENTS), gr.transform(plain, EVERYTHING)
    for _, fault in plain.planted:
        if fault.fault is masked_log_backward:
            continue
        torch.manual_seed(7)
        one = wake(coarse, fault, inputs)
        torch.manual_seed(7)
        other = wake(fine, fault, inputs)
        assert (one.site, one.op, one.source, one.percent) == (other.site, other.op, other.source, other.percent)
        assert one.others == other.others
        assert one.window == other.window


class Dropping(nn.Module):
    """Fails at exactly the elements that dropout lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(8, 64), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        kept = gr.tap(self.drop(self.fc(x).square() + 1.0), "kept")
        return (1.0 / (kept - kept.detach() + (kept == 0))).sum()


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.inductor)])
@pytest.mark.slow
def test_replay_draws_the_random_numbers_of_the_step(is_compiled: bool) -> None:
    model = gr.transform(Dropping(), [GRADIENTS, gr.on("activation:*/truediv", CheckFinite("record"))])
    if is_compiled:
        model.compile()
    for _ in range(3):
        err = failure(model(torch.randn(4, 8)).backward)
        counted = model.monitor.latest()["nonfinite@activation:/truediv"]
        assert err.op == "/truediv"
        assert 20 < err.percent < 80
        assert err.percent == 100 * counted / 256
    state = torch.get_rng_state()
    assert gr.locate(model, torch.randn(4, 8, generator=torch.Generator())) is not None
    assert torch.equal(state, torch.get_rng_state())


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return torch.sqrt(h * h).sum()


def test_input_that_was_overwritten_is_said() -> None:
    model = gr.transform(Root(), GRADIENTS)
    x = torch.zeros(2, 3)
    loss = model(x)
    x.fill_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # autograd's own, where it saved x
        loss.backward()

    class Shifted(Root):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2.0)  # x itself is not saved

    model = gr.transform(Shifted(), GRADIENTS)
    loss = model(x.zero_())
    x.fill_(1.0)
    err = failure(loss.backward)
    assert "input x was overwritten since the forward" in err.note
    assert str(err.site) == "gradient:fc.weight"
    assert err.percent == 100.0
    assert not err.op


def test_buffer_that_the_step_itself_updates_is_no_obstacle() -> None:
    class Net(Root):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x) * 0.0)

    model = gr.transform(Net(), GRADIENTS)
    err = failure(model(torch.randn(4, 3)).backward)
    assert (err.op, err.note) == ("/sqrt", "")


def test_model_that_is_gone_is_said() -> None:
    class Net(Root):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("two", torch.full((), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.two

    err = failure(gr.transform(Net(), GRADIENTS)(torch.zeros(2, 3)).backward)
    assert "the model is gone" in err.note


def test_second_backward_through_one_graph_is_replayed_too() -> None:
    model = gr.transform(Root(), GRADIENTS)
    loss = model(torch.zeros(2, 3))
    first, second = failure(lambda: loss.backward(retain_graph=True)), failure(loss.backward)
    assert (first.op, first.step, first.note) == ("/sqrt", 0, "")
    assert (second.op, second.step, second.note, second.site) == ("/sqrt", 1, "", first.site)


def test_each_backward_replays_its_own_forward() -> None:
    model = gr.transform(Root(), GRADIENTS)
    good, bad = torch.ones(2, 3), torch.zeros(2, 3)
    first, second = model(bad), model(good)
    second.backward()
    assert failure(first.backward).op == "/sqrt"
    first, second = model(bad), model(good)
    assert failure(first.backward).op == "/sqrt"
    second.backward()
    for _ in range(3):
        model(good)  # without a backward
    assert failure(model(bad).backward).op == "/sqrt"


def test_several_calls_in_one_backward() -> None:
    model = gr.transform(Root(), GRADIENTS)
    err = failure(lambda: (model(torch.ones(2, 3)) + model(torch.zeros(2, 3))).backward())
    assert (err.op, str(err.site), err.note) == ("/sqrt", "error:/mul", "")


def test_inside_a_checkpoint() -> None:

    net = Lambda(
        lambda net, x: checkpoint(net.root, net.out(x) * 0.0, use_reentrant=False), root=Root(), out=nn.Linear(3, 3)
    )
    err = failure(gr.transform(net, GRADIENTS)(torch.ones(2, 3)).backward)
    assert (err.op, str(err.site)) == ("root/sqrt", "error:root/mul")


@pytest.mark.broad
@pytest.mark.filterwarnings("ignore::gradrewrite.RewriteWarning")
def test_behind_a_graph_break() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.log(self.first(x).square())
            torch._dynamo.graph_break()
            return torch.sqrt(self.last(h).square()).sum()

    plain = Net()
    model = gr.transform(plain, GRADIENTS, fullgraph=False)
    model(torch.ones(2, 3)).backward()
    with torch.no_grad():
        plain.last.weight.zero_()
        plain.last.bias.zero_()
    assert failure(lambda: model(torch.ones(2, 3)).backward()).op == "/sqrt"
    with torch.no_grad():
        plain.first.weight.zero_()
        plain.first.bias.zero_()
    err = failure(lambda: model(torch.ones(2, 3)).backward())
    assert (err.op, str(err.site)) == ("/log", "activation:/log")


def test_symbolic_shapes() -> None:
    model = gr.transform(Root(), GRADIENTS, dynamic=True)
    for rows in (2, 3, 5):
        err = failure(model(torch.zeros(rows, 3)).backward)
        assert (err.op, err.percent, err.note) == ("/sqrt", 100.0, "")
    assert len(model.explain().graphs) == 1


def test_under_autocast() -> None:
    model = gr.transform(Root(), GRADIENTS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.zeros(2, 3))
    assert failure(loss.backward).op == "/sqrt"


@pytest.mark.slow
def test_branches_of_cond_are_one_op() -> None:
    class Net(Root):
        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            h = torch.cond(h.sum() > 1e9, lambda h: h * 1.0, lambda h: torch.sqrt(h * h), (h,))
            return h.sum()

    err = failure(gr.transform(Net(), GRADIENTS)(torch.zeros(2, 3)).backward)
    assert err.op == "/cond"
    assert str(err.site) == "error:fc"


def test_action_that_makes_it() -> None:
    model = gr.transform(Root(), [gr.on("error:fc", lambda g: g / (g - g)), GRADIENTS])
    err = failure(lambda: model(torch.ones(2, 3)).backward())
    assert err.op.startswith("fc: <function")
    assert str(err.site) == "gradient:fc.weight"


@pytest.mark.broad
def test_check_sees_what_stands_before_it() -> None:
    hidden = gr.transform(Root(), gr.on("error:fc", [NanToNum(), CheckFinite()]))
    hidden(torch.zeros(2, 3)).backward()
    shown = gr.transform(Root(), gr.on("error:fc", [CheckFinite(), NanToNum()]))
    assert failure(shown(torch.zeros(2, 3)).backward).op == "/sqrt"

    x = torch.tensor([torch.inf, 1.0])
    net = Lambda(lambda net, x: (gr.tap(net.w * 1.0, "h") * x).sum(), w=nn.Parameter(torch.zeros(2)))
    clipped = gr.transform(net, gr.on("error:h", [ClipByValue(1.0), CheckFinite()]))
    clipped(x).backward()  # an infinity becomes the bound


@pytest.mark.broad
@pytest.mark.filterwarnings("error")
def test_locate_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Dropout(0.5))
    model[1].weight.grad = torch.ones(3, 3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(4, 3)
    random = torch.get_rng_state()

    assert gr.locate(model, x) is None
    err = gr.locate(model, x, loss_fn=lambda out: torch.sqrt(out * 0.0).sum())
    assert err is not None
    assert (err.op, err.in_backward, err.cause) == ("/sqrt", True, "")  # outside of the model
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(model[1].weight.grad, torch.ones(3, 3))
    assert model[1].bias.grad is None


def test_locate_names_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"nn\.Module"):
        gr.locate(lambda x: x, torch.ones(1))
    with pytest.raises(TypeError, match="loss_fn returns a tensor with one element"):
        gr.locate(nn.Linear(2, 2), torch.ones(1, 2), loss_fn=lambda out: out)
    with pytest.raises(gr.TraceError):
        gr.locate(nn.Linear(2, 2).requires_grad_(False), torch.ones(1, 2))


def test_error_travels() -> None:
    import pickle

    err = failure(gr.transform(Root(), GRADIENTS)(torch.zeros(2, 3)).backward)
    copy = pickle.loads(pickle.dumps(err))
    assert str(copy) == str(err)
    assert (copy.site, copy.others, copy.window) == (err.site, err.others, err.window)
    assert isinstance(err, ArithmeticError)


def test_locate_with_a_buffer_that_the_step_updates() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.register_buffer("scale", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            out = torch.sqrt((self.fc(x) * 0.0 + self.scale).square()).sum()
            self.scale.add_(1.0)
            return out

    err = gr.locate(Net(), torch.ones(1, 2))
    assert err is not None
    assert err.note == ""  # it was copied before the forward
    assert (err.site.kind, err.op) == ("error", "/sqrt")


def test_a_failed_step_is_analysed_once() -> None:

    net = Lambda(lambda net, x: (net.w * x).sqrt().sum(), w=nn.Parameter(torch.zeros(2)))
    model = gr.transform(net, gr.on("gradient:*", CheckFinite()))
    raised = failure(lambda: model(torch.ones(2)).backward())
    with torch.no_grad():
        model.w += 1  # a replay would be one of other numbers

    again = model.monitor.failure()

    assert again is not None
    assert again is not raised
    assert (str(again), again.window, raised.op, raised.note) == (str(raised), raised.window, "/sqrt", "")
