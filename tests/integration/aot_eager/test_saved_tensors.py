"""Saved tensors in other forms, op by op: what the backward reads, against eager models that restore the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByValue, ClipPerExample, Observe, Recompute, Store, WeighLosses

from models.saved_tensors import assert_as_expected, changes, restored, trace

ROWS, WIDTH = 32, 64  # of float32: 8 KiB
FORMS = ["float32", "int8", "bfloat16", "float8_e4m3fn"]
Form = Any


def chain(depth: int = 3) -> nn.Sequential:
    """Linear layers and tanh in turns, whose results autograd saves."""
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).double()


def rows(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*(shape or (ROWS, WIDTH)), dtype=dtype)


def gradients(model: nn.Module, *inputs: Tensor, loss: Callable[[Any], Tensor] = lambda out: out.square().sum()) -> dict[str, Tensor]:
    """The gradients of all parameters and inputs after one backward, from the same random numbers each time."""
    inputs = tuple(x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs)
    torch.manual_seed(1)
    model.zero_grad()
    loss(model(*inputs)).backward()
    found = {name: p.grad for name, p in model.named_parameters()} | {f"input {n}": x.grad for n, x in enumerate(inputs)}
    return {name: g.clone() for name, g in found.items() if g is not None}


class Hooked(nn.Module):
    """A plain model for which autograd keeps the outputs of modules, in each of their calls, in another form."""

    def __init__(self, model: nn.Module, names: Sequence[str], form: str) -> None:
        super().__init__()
        self.model, self.form = copy.deepcopy(model), form
        self.outputs: dict[int, Tensor] = {}  # by the address of their memory
        self.read: set[int] = set()
        for name in names:
            self.model.get_submodule(name).register_forward_hook(self._note)

    def _note(self, _: nn.Module, __: Any, output: Tensor) -> None:
        self.outputs[output.untyped_storage().data_ptr()] = output.detach()

    def _unpack(self, x: Tensor) -> Tensor:
        key = x.untyped_storage().data_ptr()
        if key not in self.outputs:
            return x
        self.read.add(key)
        memory = restored(self.outputs[key], self.form).untyped_storage()
        return torch.empty(0, dtype=x.dtype).set_(memory, x.storage_offset(), x.shape, x.stride())

    def forward(self, *inputs: Tensor) -> Any:
        # A module's output is saved before its hook runs, so that it is restored when it is read.
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, self._unpack):
            return self.model(*inputs)


def with_hooks(model: nn.Module, names: Sequence[str], form: str, *inputs: Tensor, **options: Any) -> dict[str, Tensor]:
    """The gradients of a plain model for which autograd restores the outputs of these modules."""
    hooked = Hooked(model, names, form)
    found = gradients(hooked, *inputs, **options)
    assert hooked.read == set(hooked.outputs), "autograd saves no such tensor"
    return {name.removeprefix("model."): g for name, g in found.items()}


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-12) -> None:
    assert got.keys() == wanted.keys()
    scale = max(float(g.abs().max()) for g in wanted.values())
    for name, g in wanted.items():
        torch.testing.assert_close(got[name], g, rtol=rtol, atol=rtol * scale, msg=lambda m, n=name: f"{n}: {m}")


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(one[name], other[name]) for name in one)


def saved_sites(model: nn.Module, policy: gr.Policy, *inputs: Any) -> list[str]:
    return [str(s) for s in gr.transform(model, policy).trace(*inputs).sites if s.kind == "saved"]


# Against hooks of autograd.


@pytest.mark.parametrize("form", FORMS)
def test_chain_agrees_with_hooks_of_autograd(form: Form) -> None:
    plain, x = chain(), rows()
    model = gr.transform(copy.deepcopy(plain), gr.on("saved:*", Store(form)))
    got = gradients(model, x)
    stored = [e.site.name for e in model.explain().graphs[0].edits]

    assert stored == ["1", "3", "5"]
    assert_equal(got, with_hooks(plain, stored, form, x))
    assert differ(got, gradients(plain, x))


@pytest.mark.parametrize("chosen", ["1", "3"])
def test_only_the_named_tensor_is_restored(chosen: str) -> None:
    plain, x = chain(), rows()
    got = gradients(gr.transform(copy.deepcopy(plain), gr.on(f"saved:{chosen}", Store("int8"))), x)

    assert_equal(got, with_hooks(plain, [chosen], "int8", x))
    assert differ(got, with_hooks(plain, ["1", "3"], "int8", x))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutions_agree_with_hooks_of_autograd(memory_format: torch.memory_format) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 2, 3)).double()
    x = rows(4, 3, 12, 12).to(memory_format=memory_format)
    model = gr.transform(copy.deepcopy(plain), gr.on("saved:[13]", Store("int8")))
    got = gradients(model, x)

    assert [str(e.site) for e in model.explain().graphs[0].edits] == ["saved:1", "saved:3"]
    assert_equal(got, with_hooks(plain, ["1", "3"], "int8", x))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2.5 * g * x  # not the true derivative


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(Square.apply(self.one(x)))


def test_what_a_custom_function_saves_is_restored() -> None:
    plain, x = WithFunction().double(), rows()
    model = gr.transform(copy.deepcopy(plain), gr.on("saved:one", Store("int8")))
    got = gradients(model, x)
    wanted = with_hooks(plain, ["one"], "int8", x)

    # The second layer reads the square, which is saved by itself, or computed again from what is restored.
    assert_equal({n: got[n] for n in ("one.weight", "one.bias", "input 0")}, {n: wanted[n] for n in ("one.weight", "one.bias", "input 0")})


class KeepInput(torch.autograd.Function):
    """``fn(x, *weights)`` whose backward computes it again from a restored ``x``."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Tensor], form: str, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.fn = fn
        ctx.save_for_backward(restored(x, form), *weights)
        return fn(x, *weights)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        given = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.fn(*given)
        return (None, None, *torch.autograd.grad(out, given, g))


class Mlp(nn.Module):
    """up, GELU, down; with a form, the output of ``up`` is kept in it and all behind it computed again."""

    def __init__(self, form: str = "") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        def rest(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return functional.linear(functional.gelu(h), weight, bias)

        h = self.up(x)
        given = (h, self.down.weight, self.down.bias)
        return KeepInput.apply(rest, self.form, *given) if self.form else rest(*given)


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_gelu_is_computed_again_from_what_is_restored(form: Form) -> None:
    plain, x = Mlp().double(), rows()
    model = gr.transform(copy.deepcopy(plain), [gr.on("saved:up", Store(form)), gr.on("saved:/gelu", Recompute())])
    by_hand = Mlp(form).double()
    by_hand.load_state_dict(plain.state_dict())
    loss = torch.sum
    got = gradients(model, x, loss=loss)

    assert [str(e.site) for e in model.explain().graphs[0].edits] == ["saved:up", "saved:/gelu"]
    assert_equal(got, gradients(by_hand, x, loss=loss))
    assert differ(got, gradients(plain, x, loss=loss))
