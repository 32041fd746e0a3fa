"""The update of an optimizer as a graph: its own ``step``, with numbers that are read at each call."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

import gradrewrite as gr
from gradrewrite._compat import inductor
from gradrewrite._compat.fake_tensors import fakes_of
from gradrewrite.training.hyperparameters import key_of, numbers_of
from gradrewrite.training.prepared_state import prepare_state
from gradrewrite.training.update_trace import UpdateGraph, check_traceable, trace_update

Make = Callable[[list[Tensor]], Optimizer]
WORDS = r"Update in two phases: loss\.backward\(\); optimizer\.step\(\); optimizer\.zero_grad\(\)"


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


class Lion(Optimizer):
    """As in lion-pytorch: ``.data``, an attribute, a number that is divided in place."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        self._first_lr = lr
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                wd, (beta1, beta2), state = group["weight_decay"], group["betas"], self.state[p]
                wd /= self._first_lr
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1.0 - group["lr"] * wd)
                update = state["exp_avg"].clone().mul_(beta1).add(p.grad, alpha=1.0 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1.0 - beta2)


class Wrapped(AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


CASES: dict[str, Make] = {
    "adadelta": lambda p: Adadelta(p, lr=0.5, weight_decay=0.1),
    "adadelta maximize": lambda p: Adadelta(p, maximize=True),
    "adagrad": lambda p: Adagrad(p, lr=0.1, lr_decay=0.01, weight_decay=0.1, initial_accumulator_value=0.1),
    "adam": lambda p: Adam(p, lr=0.01),
    "adam amsgrad": lambda p: Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True, maximize=True),
    "adam decoupled": lambda p: Adam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "adam tensors": lambda p: Adam(p, lr=number(0.01), betas=(number(0.9), number(0.99)), foreach=False),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "adamw fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "adamw foreach": lambda p: AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "adamw groups": lambda p: AdamW(
        [{"params": p[:1], "lr": 0.1, "weight_decay": 0.0}, {"params": p[1:2], "amsgrad": True}, {"params": p[2:]}]
    ),
    "adamax": lambda p: Adamax(p, lr=0.01, weight_decay=0.01),
    "asgd": lambda p: ASGD(p, lr=0.01, t0=3, weight_decay=0.01),
    "nadam": lambda p: NAdam(p, lr=0.01, weight_decay=0.01),
    "nadam decoupled": lambda p: NAdam(p, lr=0.01, weight_decay=0.01, decoupled_weight_decay=True),
    "radam": lambda p: RAdam(p, lr=0.01, weight_decay=0.01),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9, centered=True, weight_decay=0.01),
    "rmsprop plain": lambda p: RMSprop(p, lr=0.01),
    "rprop": lambda p: Rprop(p, lr=0.01),
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd dampened": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.3, maximize=True),
    "lion": Lion,
    "wrapped": Wrapped,
}
EXACT = {"rprop"}


def parameters(dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    return [nn.Parameter(values(shape, 0, dtype).to(device)) for shape in ((3, 4), (4,), ())]


def values(shape: Sequence[int], seed: int, dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel()
    wave = torch.cos(torch.arange(2 * count, dtype=torch.float64) * 1.3 + seed)
    flat = torch.complex(wave[:count], wave[count:]) if dtype.is_complex else wave[:count]
    return flat.reshape(torch.Size(shape)).to(dtype)


def all_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizer: Optimizer, seed: int, without: Sequence[int] = ()) -> None:
    for n, p in enumerate(all_of(optimizer)):
        p.grad = None if n in without else values(p.shape, seed, p.dtype).to(p.device)
    optimizer.step()
    optimizer.zero_grad()


def inputs_of(update: UpdateGraph, optimizer: Optimizer, seed: int) -> list[Tensor]:
    everything = all_of(optimizer)
    own = [everything[n] for n in update.parameters]
    found = [p.detach() for p in own] + [values(p.shape, seed, p.dtype).to(p.device) for p in own]
    found += [optimizer.state[everything[n]][key] for n, key in update.states]
    if update.numbers:
        numbers = [float(x) for x in numbers_of(optimizer, update.numbers)]
        found.append(torch.tensor(numbers, dtype=torch.float64, device=update.device))
    return found


def run(update: UpdateGraph, optimizer: Optimizer, seed: int, compiled: Callable[..., Any] | None = None) -> None:
    given = inputs_of(update, optimizer, seed)
    results = update.graph_module(*given) if compiled is None else compiled(list(given))
    count = len(update.parameters)
    targets = [*given[:count], *given[2 * count :]]
    with torch.no_grad():
        for target, result in zip(targets, results, strict=False):
            assert (target.shape, target.dtype) == (result.shape, result.dtype)
            target.copy_(result)


def distance(got: Optimizer, want: Optimizer) -> float:
    """Return the largest difference of parameters and states, relative to the largest element."""
    worst = 0.0
    for a, b in zip(all_of(got), all_of(want), strict=True):
        state = want.state.get(b, {})
        assert got.state.get(a, {}).keys() == state.keys()
        pairs = [(a, b), *((got.state[a][key], value) for key, value in state.items())]
        for x, y in pairs:
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            largest = float(y.detach().abs().max()) or 1.0
            worst = max(worst, float((x.detach() - y.detach()).abs().max()) / largest)
    return worst


def after_steps(
    make: Make, dtype: torch.dtype, without: Sequence[int] = (), *, foreach: bool = False, device: str = "cpu"
) -> tuple[float, UpdateGraph]:
    """Compare five steps of a graph, and of another optimizer in two phases, with a learning rate that changes."""
    got, want = make(parameters(dtype, device)), make(parameters(dtype, device))
    for optimizer in (got, want):
        step(optimizer, 0, without)
    gradients = [None if n in without else fake for n, fake in enumerate(fakes_of(all_of(got)))]
    update = trace_update(got, gradients, foreach=foreach)
    for seed in range(1, 6):
        for optimizer in (got, want):
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * (0.7 if seed % 2 else 1.2)
        assert update.fits(got)
        run(update, got, seed)
        step(want, seed, without)
    return distance(got, want), update


@pytest.mark.broad
@pytest.mark.pure
@pytest.mark.parametrize("name", CASES)
def test_graph_equals_two_phases(name: str) -> None:
    worst, update = after_steps(CASES[name], torch.float64)

    assert worst <= (0.0 if name in EXACT else 1e-12)
    assert all((n, "lr") in update.numbers for n in {0})
    targets = {node.target for node in update.graph_module.graph.nodes if node.op == "call_function"}
    assert not any(target._schema.is_mutable for target in targets)
    assert not {torch.ops.aten.copy.default, torch.ops.aten.copy_.default} & targets


@pytest.mark.broad
@pytest.mark.pure
@pytest.mark.parametrize("name", ["adam amsgrad", "adamw", "sgd nesterov", "nadam", "radam", "rmsprop", "lion"])
def test_narrow_parameters_are_equal_to_rounding(name: str) -> None:
    assert after_steps(CASES[name], torch.float32)[0] <= 2e-5
    if name not in ("rmsprop", "lion"):  # the first subtracts what is nearly equal, the second takes the sign
        assert after_steps(CASES[name], torch.bfloat16)[0] <= 0.01


@pytest.mark.broad
@pytest.mark.pure
@pytest.mark.parametrize("name", ["adagrad", "adam amsgrad", "asgd", "rmsprop", "rprop", "sgd nesterov"])
def test_complex_parameters(name: str) -> None:
    assert after_steps(CASES[name], torch.complex128)[0] <= 1e-12


@pytest.mark.broad
@pytest.mark.pure
@pytest.mark.parametrize("name", ["adamw", "sgd nesterov", "rmsprop"])
def test_code_for_lists(name: str) -> None:
    worst, update = after_steps(CASES[name], torch.float32, foreach=True)

    assert worst <= 1e-5
    assert (0, "lr") in update.numbers
    assert any("foreach" in str(node.target) for node in update.graph_module.graph.nodes)


@pytest.mark.pure
def test_parameters_without_gradient_stay() -> None:
    worst, update = after_steps(CASES["adamw groups"], torch.float64, without=[1])

    assert worst <= 1e-12
    assert update.parameters == (0, 2)
    assert update.states == tuple((n, key) for n in (0, 2) for key in ("step", "exp_avg", "exp_avg_sq"))
    assert {group for group, _ in update.numbers} == {0, 2}


@pytest.mark.pure
def test_sizes_share_one_trace_and_layouts_do_not() -> None:
    def make(p: list[Tensor]) -> Optimizer:
        more = [nn.Parameter(values(shape, 1, torch.float64)) for shape in ((5, 2), (1, 4), (2, 3), (0, 3))]
        more.append(nn.Parameter(values((4, 3), 1, torch.float64).t()))
        return AdamW([*p, *more], lr=0.01)

    def without_empty(p: list[Tensor]) -> Optimizer:
        optimizer = make(p)
        optimizer.param_groups[0]["params"] = [p for p in optimizer.param_groups[0]["params"] if p.numel()]
        return optimizer

    assert after_steps(without_empty, torch.float64)[0] <= 1e-12
    empty = make(parameters(torch.float64))
    prepare_state(empty, [True] * 8)
    assert len(trace_update(empty, [p.detach() for p in all_of(empty)]).parameters) == 8


@pytest.mark.pure
def test_muon_equals_two_phases_but_for_its_iteration_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    make: Make = lambda p: Muon(p[:1], lr=0.01)  # noqa: E731

    assert after_steps(make, torch.float64)[0] <= 0.02
    monkeypatch.setattr(Tensor, "bfloat16", lambda self: self.clone())
    assert after_steps(make, torch.float64)[0] <= 1e-12


@pytest.mark.pure
def test_key_has_what_is_baked_in() -> None:
    p = parameters(torch.float32)
    optimizer = SGD(p, lr=0.1, momentum=0.9)
    step(optimizer, 0)
    update = trace_update(optimizer, [x.detach() for x in p])
    group = optimizer.param_groups[0]

    assert update.numbers == ((0, "lr"), (0, "momentum"), (0, "dampening"), (0, "weight_decay"))
    assert update.compared == ((0, "momentum"), (0, "weight_decay"))
    for name, same, other in (
        ("lr", 0.0, None),
        ("momentum", 0.85, 0.0),  # the code asks whether it is 0
        ("weight_decay", 0.0, 0.1),
        ("maximize", False, True),
        ("nesterov", False, True),
    ):
        before = group[name]
        group[name] = same
        assert update.fits(optimizer), name
        if other is not None:
            group[name] = other
            assert not update.fits(optimizer), name
        group[name] = before
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert not update.fits(optimizer)


@pytest.mark.pure
def test_numbers_are_read_where_they_are() -> None:
    optimizer = Adam(parameters(torch.float32), lr=number(0.25), betas=(0.5, 0.75))

    assert numbers_of(optimizer, [(0, "lr"), (0, "betas.1")]) == [0.25, 0.75]
    assert key_of(optimizer) != key_of(optimizer, [(0, "betas.0")])


class Counting(Optimizer):
    """Branches on a number other than 0."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "rate": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * (2.0 if group["rate"] > 0.25 else 1.0))


@pytest.mark.pure
def test_number_that_is_branched_on_is_baked_in() -> None:
    optimizer = Counting(parameters(torch.float64))
    update = trace_update(optimizer, [p.detach() for p in all_of(optimizer)])

    assert update.numbers == ((0, "lr"),)
    assert update.fits(optimizer)
    optimizer.param_groups[0]["rate"] = 0.75
    assert not update.fits(optimizer)


@pytest.mark.pure
@pytest.mark.parametrize("name", ["adamw groups", "sgd nesterov", "lion"])
def test_optimizer_is_untouched(name: str) -> None:
    optimizer = CASES[name](parameters(torch.float32))
    step(optimizer, 0)
    everything = all_of(optimizer)
    states = {id(p): dict(optimizer.state[p]) for p in everything}
    tensors = [*everything, *(t for state in states.values() for t in state.values())]
    before = [(id(t), t._version, t.detach().clone()) for t in tensors]
    attributes, defaults = dict(vars(optimizer)), dict(optimizer.defaults)
    groups = [dict(group) for group in optimizer.param_groups]
    random = torch.get_rng_state()

    check_traceable(optimizer)
    trace_update(optimizer, fakes_of(everything))

    assert [(id(t), t._version) for t in tensors] == [known[:2] for known in before]
    assert all(torch.equal(t, known[2]) for t, known in zip(tensors, before, strict=True))
    assert vars(optimizer).keys() == attributes.keys()
    assert all(vars(optimizer)[key] is value for key, value in attributes.items())
    assert optimizer.defaults == defaults
    assert optimizer.state.keys() == set(everything)
    assert all(dict(optimizer.state[p]) == states[id(p)] for p in everything)
    for group, known in zip(optimizer.param_groups, groups, strict=True):
        assert group.keys() == known.keys()
        assert all(group[key] is value for key, value in known.items())
    assert all(p.grad is None for p in everything)
    assert torch.equal(torch.get_rng_state(), random)
    assert not torch.compiler.is_compiling()


def hooked() -> Optimizer:
    optimizer = SGD(parameters(torch.float32), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


class Branching(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad.norm() > 1.0:
                    p.add_(p.grad, alpha=-group["lr"])


class OnHost(Branching):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad / p.grad.norm().item(), alpha=-group["lr"])


class InPython(Branching):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.add_(p.grad, alpha=-group["lr"] / state["step"])


class InAttribute(Branching):
    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-0.1 / self.steps)


class Drawing(Branching):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad + 1e-20 * torch.randn_like(p), alpha=-0.1)


class Packed(Branching):
    """As bitsandbytes: packed state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["state1"] = torch.zeros_like(p, dtype=torch.uint8)
            p.sub_(p.grad)


class WithAddresses(Branching):
    """As bitsandbytes: kernels that take addresses."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            assert p.data_ptr()


class Outer(Branching):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = SGD(self.param_groups[0]["params"], lr=0.1)


class Nested(Branching):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("history", [torch.zeros_like(p)])
            p.sub_(p.grad)


REFUSED: dict[str, tuple[Callable[[], Optimizer], str]] = {
    "lbfgs": (lambda: LBFGS(parameters(torch.float32)), r"LBFGS .*: its step needs a closure"),
    "sparse": (lambda: SparseAdam(parameters(torch.float32)), "sparse gradients alone"),
    "adafactor": (
        lambda: Adafactor(parameters(torch.float32)),
        r'branches on a value of a tensor.*\n  .*_adafactor\.py:\d+ "rho_t = min',
    ),
    "hooked": (hooked, "hooks around its step"),
    "branching": (
        lambda: Branching(parameters(torch.float32)),
        r'branches on .*\n  .*test_update_trace\.py:\d+ "if p\.grad\.norm\(\) > 1\.0:"',
    ),
    "on host": (lambda: OnHost(parameters(torch.float32)), r"reads a value .*\(item\)\n  .*norm\(\)\.item\(\)"),
    "in python": (lambda: InPython(parameters(torch.float32)), r"changes state\[parameter\]\['step'\], a Python value"),
    "in attribute": (lambda: InAttribute(parameters(torch.float32)), r"changes \.steps, a Python value"),
    "addresses": (
        lambda: WithAddresses(parameters(torch.float32)),
        r"takes the memory of a tensor out of torch \(data_ptr\)",
    ),
    "packed": (lambda: Packed(parameters(torch.float32)), r"its state 'state1' is torch\.uint8: it is packed"),
    "nested": (lambda: Nested(parameters(torch.float32)), r"its state 'history' is a list with tensors inside"),
    "outer": (lambda: Outer(parameters(torch.float32)), r"another optimizer inside \(\.inner\)"),
}


@pytest.mark.pure
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    make, words = REFUSED[name]
    optimizer = make()

    for refused in (check_traceable, lambda o: trace_update(o, [p.detach() for p in all_of(o)])):
        with pytest.raises(gr.TraceError, match=f"(?s){words}.*{WORDS}") as caught:
            refused(optimizer)
        assert caught.value.code == "optimizer-not-traced"
    assert not any(optimizer.state.values())


@pytest.mark.pure
def test_refused_while_traced() -> None:
    drawing = Drawing(parameters(torch.float64))
    with pytest.raises(gr.TraceError, match=r"draws random numbers, by aten|computes something else"):
        trace_update(drawing, [p.detach() for p in all_of(drawing)])
    late = AdamW(parameters(torch.float32))
    with pytest.raises(gr.TraceError, match=r"makes the state 'exp_avg': prepare it, or run the first step in two"):
        trace_update(late, [p.detach() for p in all_of(late)])
    sparse = SGD([nn.Parameter(torch.ones(3, 2))], lr=0.1)
    with pytest.raises(gr.TraceError, match=r"a gradient is sparse \(torch.sparse_coo\), of a parameter of \[3, 2\]"):
        trace_update(sparse, [torch.eye(3, 2).to_sparse()])
    with pytest.raises(gr.TraceError, match="none of its parameters has a gradient"):
        trace_update(sparse, [None])
    with pytest.raises(ValueError, match="2 gradients for 1 parameters"):
        trace_update(sparse, [None, None])


@pytest.mark.pure
def test_packed_and_nested_state_is_refused_by_its_key() -> None:
    for make, words in ((Packed, "its state 'state1' is torch.uint8"), (Nested, "its state 'history' is a list")):
        optimizer = make(parameters(torch.float32))
        step(optimizer, 0)
        with pytest.raises(gr.TraceError, match=words):
            check_traceable(optimizer)
    Packed.__module__, before = "bitsandbytes.optim.adamw", Packed.__module__
    with pytest.raises(gr.TraceError, match="bitsandbytes updates by kernels of its own"):
        check_traceable(Packed(parameters(torch.float32)))
    Packed.__module__ = before


@pytest.mark.pure
def test_global_hooks_are_refused() -> None:
    optimizer = SGD(parameters(torch.float32), lr=0.1)
    handle = register_optimizer_step_post_hook(lambda *_: None)
    with pytest.raises(gr.TraceError, match="hooks around its step"):
        check_traceable(optimizer)
    handle.remove()
    check_traceable(optimizer)


@pytest.mark.pure
def test_step_of_the_instance_is_left_alone() -> None:
    optimizer = SGD(parameters(torch.float64), lr=0.1)
    optimizer.step = lambda: pytest.fail("not called")

    assert trace_update(optimizer, [p.detach() for p in all_of(optimizer)]).parameters == (0, 1, 2)


@pytest.mark.broad
@pytest.mark.pure
@pytest.mark.parametrize("name", CASES)
def test_state_is_prepared_as_the_first_step_makes_it(name: str) -> None:
    first, second = CASES[name](parameters(torch.float32)), CASES[name](parameters(torch.float32))
    is_lazy = name in ("sgd nesterov", "sgd dampened", "lion", "wrapped")

    assert prepare_state(first, [True, False, True]) is not is_lazy
    if is_lazy:
        assert not any(first.state.values())
        step(first, 0)
        assert prepare_state(first, [True, False, True])
        return
    if name == "adagrad":  # it makes all state itself, when it is made
        return
    made = {p: copy.deepcopy(state) for p, state in first.state.items()}
    assert prepare_state(first, [True, False, True])
    assert not first.state.get(all_of(first)[1])
    for p, state in made.items():
        for key, value in state.items():
            assert torch.equal(value, first.state[p][key])
    step(first, 1, without=[1])
    step(second, 1, without=[1])
    assert distance(first, second) == 0.0


@pytest.mark.pure
def test_graph_from_prepared_state_makes_the_first_step() -> None:
    got, want = (CASES["adamw"](parameters(torch.float64)) for _ in range(2))
    assert prepare_state(got, [True] * 3)
    run(trace_update(got, [p.detach() for p in all_of(got)]), got, 0)
    step(want, 0)

    assert distance(got, want) <= 1e-12


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["adamw", "sgd nesterov"])
def test_compiled(name: str) -> None:
    got, want = (CASES[name](parameters(torch.float32)) for _ in range(2))
    for optimizer in (got, want):
        step(optimizer, 0)
    update = trace_update(got, [p.detach() for p in all_of(got)])
    compiled = inductor.compile_body(update.graph_module, inputs_of(update, got, 1), {})
    for seed in range(1, 4):
        for optimizer in (got, want):
            optimizer.param_groups[0]["lr"] *= 0.7
        run(update, got, seed, compiled)
        step(want, seed)

    assert distance(got, want) <= 2e-6


@pytest.mark.pure
def test_infinite_and_zero_numbers() -> None:
    optimizer = Rprop(parameters(torch.float64), step_sizes=(0.0, math.inf))
    step(optimizer, 0)
    update = trace_update(optimizer, [p.detach() for p in all_of(optimizer)])
    run(update, optimizer, 1)

    assert (0, "step_sizes.1") in update.numbers
    assert all(torch.isfinite(p).all() for p in all_of(optimizer))


@pytest.mark.cuda
@pytest.mark.pure
@pytest.mark.parametrize("name", ["adamw", "adamw fused", "asgd", "nadam", "radam", "rprop", "sgd nesterov"])
def test_on_a_gpu(name: str) -> None:
    worst, update = after_steps(CASES[name], torch.float32, device="cuda")

    assert worst <= 1e-5
    on_host = name in ("adamw", "nadam", "radam", "rprop")  # where step counts are
    assert update.device.type == ("cpu" if on_host else "cuda")
