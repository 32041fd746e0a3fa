"""Saved tensors in other forms, op by op: what the backward reads, against eager models that restore the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.passes import (
    MGDA,
    CheckFinite,
    ClipByValue,
    ClipPerExample,
    Observe,
    Offload,
    Recompute,
    Store,
    WeighLosses,
)

from helpers import mostly_slow
from models.saved_tensors import assert_as_expected, changes, restored, trace
from models.small import Lambda

ROWS, WIDTH = 32, 64  # of float32: 8 KiB
FORMS = ["float32", "int8", "bfloat16", "float8_e4m3fn"]
Form = Any


def chain(depth: int = 3) -> nn.Sequential:
    """Linear layers and tanh in turns, whose results autograd saves."""
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).double()


def rows(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*(shape or (ROWS, WIDTH)), dtype=dtype)


def gradients(
    model: nn.Module, *inputs: Tensor, loss: Callable[[Any], Tensor] = lambda out: out.square().sum()
) -> dict[str, Tensor]:
    """The gradients of all parameters and inputs after one backward, from the same random numbers each time."""
    inputs = tuple(x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs)
    torch.manual_seed(1)
    model.zero_grad()
    loss(model(*inputs)).backward()
    found = {name: p.grad for name, p in model.named_parameters()} | {
        f"input {n}": x.grad for n, x in enumerate(inputs)
    }
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


@pytest.mark.broad
@pytest.mark.parametrize("form", mostly_slow(FORMS, 2))
def test_chain_agrees_with_hooks_of_autograd(form: Form) -> None:
    plain, x = chain(), rows()
    model = gr.transform(copy.deepcopy(plain), gr.on("saved:*", Store(form)))
    got = gradients(model, x)
    stored = [e.site.name for e in model.explain().graphs[0].edits]

    assert stored == ["1", "3", "5"]
    assert_equal(got, with_hooks(plain, stored, form, x))
    assert differ(got, gradients(plain, x))


@pytest.mark.broad
@pytest.mark.parametrize("chosen", ["1", "3"])
def test_only_the_named_tensor_is_restored(chosen: str) -> None:
    plain, x = chain(), rows()
    got = gradients(gr.transform(copy.deepcopy(plain), gr.on(f"saved:{chosen}", Store("int8"))), x)

    assert_equal(got, with_hooks(plain, [chosen], "int8", x))
    assert differ(got, with_hooks(plain, ["1", "3"], "int8", x))


@pytest.mark.broad
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


def test_what_a_custom_function_saves_is_restored() -> None:
    net = Lambda(
        lambda net, x: net.two(Square.apply(net.one(x))), one=nn.Linear(WIDTH, WIDTH), two=nn.Linear(WIDTH, WIDTH)
    )
    plain, x = net.double(), rows()
    model = gr.transform(copy.deepcopy(plain), gr.on("saved:one", Store("int8")))
    got = gradients(model, x)
    wanted = with_hooks(plain, ["one"], "int8", x)

    # The second layer reads the square, which is saved by itself, or computed again from what is restored.
    assert_equal(
        {n: got[n] for n in ("one.weight", "one.bias", "input 0")},
        {n: wanted[n] for n in ("one.weight", "one.bias", "input 0")},
    )


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


@pytest.mark.broad
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


# What is a site, and under which name.


class Qkv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q * k).tanh() * v)


def test_views_of_one_memory_are_stored_once() -> None:
    traced = trace(Qkv().double(), gr.on("saved:qkv", Store("int8")), rows())
    values = [n.meta["val"] for n in traced.graph.graph_module.graph.nodes if n.op == "call_function"]
    encoded = [v.shape for v in values if isinstance(v, Tensor) and v.dtype is torch.int8]

    assert [str(e.site) for e in traced.graph.edits] == ["saved:qkv"]
    assert encoded == [(ROWS, 3 * WIDTH)]
    assert_as_expected(traced)


def test_parameters_and_inputs_are_no_sites() -> None:
    """The product saves both factors: a parameter and an input."""

    net = Lambda(lambda net, x: net.two((net.w * x).sin()), w=nn.Parameter(rows()), two=nn.Linear(WIDTH, WIDTH))
    assert saved_sites(net.double(), gr.on("saved:*", Store("float32")), rows().requires_grad_()) == ["saved:/sin"]


class Small(nn.Module):
    """Sums of ``small`` and of ``large``, and an index, are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, small: Tensor, large: Tensor, index: Tensor) -> Tensor:
        small, large = (small * self.w).cumsum(-1).softmax(-1), (large * self.w).cumsum(-1).softmax(-1)
        return small.square().sum() + large[index.argsort()].square().sum()


@pytest.mark.broad
@pytest.mark.parametrize(("length", "is_site"), [(1023, False), (1024, True)])
def test_small_tensors_and_integers_are_left_alone(length: int, is_site: bool) -> None:
    found = saved_sites(
        Small(), gr.on("saved:*", Store("int8")), torch.ones(length), torch.ones(2048), torch.arange(2048)
    )

    assert found == ["saved:/cumsum"] * is_site + ["saved:/cumsum#1"]


def test_small_tensors_alone_are_no_site_and_the_rule_says_so() -> None:
    with pytest.warns(gr.RewriteWarning, match="'saved:1' matches 1, which is no saved tensor: it has 32 bytes"):
        gr.transform(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), gr.on("saved:1", Store("int8"))).trace(torch.ones(2, 4))


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.act = nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.act(self.cell(x))
        return x


@pytest.mark.broad
@pytest.mark.parametrize("pattern", ["saved:act", "saved:act#1"])
def test_calls_of_one_module_have_numbers(pattern: str) -> None:
    model = Repeated().double()
    traced = trace(model, gr.on(pattern, Store("int8")), rows())
    sites = [str(s) for s in traced.graph.sites if s.kind == "saved"]

    assert sites == ["saved:act", "saved:act#1", "saved:act#2"]
    assert [str(e.site) for e in traced.graph.edits] == ([sites[1]] if "#" in pattern else sites)
    assert_as_expected(traced)
    assert changes(traced) > 1e-6


def test_callback_chooses_by_size() -> None:
    asked: list[gr.Site] = []

    def policy(site: gr.Site) -> Any:
        if site.kind == "saved":
            asked.append(site)
        return Store("float32") if site.kind == "saved" and (site.nbytes or 0) > ROWS * WIDTH * 8 else None

    class Net(nn.Sequential):
        pass

    model = Net(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh()).double()
    graph = gr.transform(model, policy).trace(rows())

    assert [str(e.site) for e in graph.edits] == ["saved:1"]
    saved = {str(s): s.nbytes for s in graph.sites if s.kind == "saved"}
    assert saved == {"saved:1": ROWS * 2 * WIDTH * 8, "saved:3": ROWS * WIDTH * 8}
    assert all(s.nbytes is None for s in graph.sites if s.kind != "saved")


@pytest.mark.broad
@pytest.mark.parametrize(
    "policy",
    [
        gr.on("*", Observe("max_abs")),
        lambda site: Observe("max_abs"),
        lambda site: Observe("max_abs") if "1" in site.name else None,
        [],
    ],
)
def test_policies_without_the_kind_leave_saved_tensors_alone(policy: Any) -> None:
    graph = gr.transform(chain(), policy).trace(rows())

    assert not [s for s in graph.sites if s.kind == "saved"]
    assert not [e for e in graph.edits if e.site.kind == "saved"]


@pytest.mark.broad
def test_no_saved_rule_leaves_the_graph_of_other_rules_as_it_is() -> None:
    clip = gr.on("error:1", ClipByValue(0.1))
    plain = gr.transform(chain(), clip).trace(rows())
    callback = gr.transform(chain(), lambda s: ClipByValue(0.1) if s.kind == "error" and s.name == "1" else None).trace(
        rows()
    )
    beside = gr.transform(chain(), [clip, gr.on("saved:3", Store("int8"))]).trace(rows())

    def ops(graph: gr.JointGraph) -> list[str]:
        return [str(n.target) for n in graph.graph_module.graph.nodes if n.op == "call_function"]

    assert ops(callback) == ops(plain)
    assert len(ops(beside)) > len(ops(plain))


# Refusals.


@pytest.mark.broad
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ([gr.on("saved:*", Store("int8")), gr.on("saved:1", Store("bfloat16"))], "one form"),
        ([gr.on("saved:*", Store("int8")), gr.on("saved:1", Recompute())], "computed again"),
        (gr.on("saved:*", Offload()), "host memory"),
        (gr.on("saved:*", [Store("int8"), Offload()]), "host memory"),
        (gr.on("saved:*", ClipByValue(1.0)), "saved"),
        (gr.on("saved:*", Observe("max_abs")), "saved"),
        (gr.on("saved:*", lambda x: x), "saved"),
    ],
)
def test_what_cannot_be_kept_so_is_refused(policy: Any, message: str) -> None:
    with pytest.raises(gr.PolicyError, match=message):
        gr.transform(chain(), policy).trace(rows())


@pytest.mark.broad
@pytest.mark.parametrize("kind", ["error", "gradient", "activation", "input", "step"])
def test_other_kinds_refuse_saved_actions(kind: str) -> None:
    for action in (Store("int8"), Offload(), Recompute(), Observe("stored_error")):
        with pytest.raises(gr.PolicyError, match=kind):
            gr.transform(chain(1), gr.on(f"{kind}:*", action)).trace(rows().requires_grad_())


def test_form_that_is_not_smaller_is_refused() -> None:
    with pytest.raises(gr.PolicyError, match=r"float32 is not smaller than torch.float32"):
        gr.transform(chain().float(), gr.on("saved:*", Store("float32"))).trace(rows(dtype=torch.float32))


@pytest.mark.broad
def test_form_that_is_smaller_somewhere_warns_of_the_rest() -> None:

    net = Lambda(lambda net, x: net.wide(net.narrow(x).double()), narrow=chain(1).float(), wide=chain(1))
    model = gr.transform(net, gr.on("saved:*", Store("float32")))
    with pytest.warns(gr.RewriteWarning, match=r"saved:narrow.1: Store\('float32'\) leaves them as they are"):
        model(rows(dtype=torch.float32)).sum().backward()
    assert [str(e.site) for e in model.explain().graphs[0].edits] == ["saved:/double", "saved:wide.1"]


# Recompute.


def saved_bytes(out: Tensor) -> int:
    """The bytes that a compiled function keeps, each memory once."""
    memory = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in out.grad_fn.saved_tensors if t is not None
    }
    return sum(memory.values())


@pytest.mark.broad
@pytest.mark.parametrize("pattern", mostly_slow(["saved:*", "saved:*/*"]))
def test_recomputation_is_exact_and_keeps_less(pattern: str) -> None:
    plain, x = nn.Sequential(Mlp(), Mlp()).double(), rows()
    model = gr.transform(copy.deepcopy(plain), gr.on(pattern, Recompute()))
    unchanged = gr.transform(copy.deepcopy(plain), [])

    assert_equal(gradients(model, x), gradients(unchanged, x), rtol=0)
    assert saved_bytes(model(x)) < saved_bytes(unchanged(x))


class Gathered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        group = distributed.group.WORLD
        assert group is not None
        return self.two(_functional_collectives.all_gather_tensor_autograd(self.one(x), 0, group))


def test_collectives_are_not_computed_again(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(gr.PolicyError, match="waits for other processes"):
            gr.transform(Gathered().double(), gr.on("saved:*", Recompute())).trace(rows())
    finally:
        distributed.destroy_process_group()


def dropped() -> Lambda:
    return Lambda(
        lambda net, x: net.two(net.drop(net.one(x))),
        one=nn.Linear(WIDTH, WIDTH),
        drop=nn.Dropout(0.5),
        two=nn.Linear(WIDTH, WIDTH),
    )


def test_random_ops_are_not_computed_again() -> None:
    with pytest.raises(gr.PolicyError, match="random numbers"):
        gr.transform(dropped().double(), gr.on("saved:drop", Recompute())).trace(rows())


@pytest.mark.broad
def test_random_numbers_are_those_of_the_plain_model() -> None:
    plain, x = dropped().double(), rows()
    model = gr.transform(copy.deepcopy(plain), gr.on("saved:*", Store("int8")))
    unchanged = gr.transform(copy.deepcopy(plain), [])
    torch.manual_seed(3)
    got, after = model(x), torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(got, unchanged(x))
    assert torch.equal(after, torch.rand(1))
    assert_as_expected(trace(plain, gr.on("saved:*", Store("int8")), x), "int8")


# Checkpoints, in-place ops, outputs, shapes, graphs.


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(WIDTH, WIDTH), nn.Dropout(rate), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.sin(self.drop(self.one(x))))


class Checkpointed(nn.Module):
    """A layer, and a block in a checkpoint; with a form, what the checkpoint keeps is written by hand."""

    def __init__(self, rate: float = 0.0, form: str = "") -> None:
        super().__init__()
        self.head, self.block, self.form = nn.Linear(WIDTH, WIDTH), Block(rate), form

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        if not self.form:
            return checkpoint(self.block, x, use_reentrant=False)
        names, parameters = zip(*self.block.named_parameters(), strict=True)
        state: list[Tensor] = []

        def run(x: Tensor, *parameters: Tensor) -> Tensor:
            with torch.random.fork_rng(enabled=bool(state)):
                if state:
                    torch.set_rng_state(state[0])
                else:
                    state.append(torch.get_rng_state())
                return torch.func.functional_call(self.block, dict(zip(names, parameters, strict=True)), (x,))

        return KeepInput.apply(run, self.form, x, *parameters)


@pytest.mark.broad
@pytest.mark.parametrize(
    "rate",
    [
        0.0,
        pytest.param(
            0.5,
            marks=pytest.mark.xfail(
                strict=True, reason="op by op, dropout reads the input of the checkpoint as it was"
            ),
        ),
    ],
)
def test_input_of_a_checkpoint_is_a_site_and_what_is_inside_is_not(rate: float) -> None:
    plain, x = Checkpointed(rate).double(), rows()
    model = gr.transform(copy.deepcopy(plain), gr.on("saved:*", Store("int8")))
    by_hand = Checkpointed(rate, "int8").double()
    by_hand.load_state_dict(plain.state_dict())
    got = gradients(model, x)

    assert [str(s) for s in model.explain().graphs[0].sites if s.kind == "saved"] == ["saved:head"]
    assert_equal(got, gradients(by_hand, x))
    assert differ(got, gradients(gr.transform(plain, []), x))


@pytest.mark.broad
@pytest.mark.parametrize("rate", mostly_slow([0.5, 0.0]))
def test_checkpoints_under_inductor(rate: float) -> None:
    """There dropout is decomposed: its random numbers depend on no value."""
    traced = trace(Checkpointed(rate).double(), gr.on("saved:*", Store("int8")), rows())
    assert_as_expected(traced, "int8")
    assert [str(e.site) for e in traced.graph.edits] == ["saved:head"]
    assert changes(traced) > 1e-6


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        x[:, 0] = 1.0
        x.mul_(2.0).tanh_()
        return self.two(x).relu_()


@pytest.mark.broad
def test_ops_in_place() -> None:
    plain, x = InPlace().double(), rows()
    traced = trace(plain, gr.on("saved:*", Store("int8")), x)
    assert_as_expected(traced, "int8")
    assert "saved:/tanh_" in [str(e.site) for e in traced.graph.edits]


class ReturnsSaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.one(x).tanh()
        return hidden, self.two(hidden)


@pytest.mark.broad
def test_caller_may_change_a_stored_output_in_place() -> None:
    """The plain model fails then, for it has kept the output itself."""
    plain, x = ReturnsSaved().double(), rows()
    model = gr.transform(copy.deepcopy(plain), gr.on("saved:*", Store("int8")))
    unchanged = gr.transform(copy.deepcopy(plain), [])
    hidden, out = model(x)
    wanted = gradients(model, x, loss=lambda outs: outs[1].sum())
    assert all(torch.equal(a, b) for a, b in zip((hidden, out), unchanged(x), strict=True))
    with torch.no_grad():
        hidden.zero_()
    model.zero_grad()
    out.sum().backward()

    assert {str(s) for s in model.explain().graphs[0].sites if s.kind == "saved"} == {"saved:/tanh"}
    assert_equal(
        {n: p.grad for n, p in model.named_parameters()}, {n: g for n, g in wanted.items() if n != "input 0"}, rtol=0
    )


@pytest.mark.broad
def test_sizes_may_be_symbolic() -> None:
    plain = nn.Sequential(Mlp(), Mlp()).double()
    model = gr.transform(copy.deepcopy(plain), gr.on("saved:*", Store("int8")), dynamic=True)
    for number in (ROWS, 48):
        x = rows(number, WIDTH)
        by_size = gr.transform(copy.deepcopy(plain), gr.on("saved:*", Store("int8")), dynamic=False)
        assert_equal(gradients(model, x), gradients(by_size, x))
    (graph,) = model.explain().graphs
    sites = [s for s in graph.sites if s.kind == "saved"]
    assert all(s.nbytes is None and s.shape[0] is None for s in sites)
    assert [e.site for e in graph.edits] == sites


@pytest.mark.broad
def test_last_dimension_may_be_symbolic() -> None:

    net = Lambda(lambda net, x: net.last(net.conv(x).sigmoid()), conv=nn.Conv1d(4, 16, 3), last=nn.Conv1d(16, 4, 3))
    plain = net.double()
    model = gr.transform(copy.deepcopy(plain), gr.on("saved:*", Store("int8")), dynamic=True)
    for length in (80, 95):
        x = rows(8, 4, length)
        by_size = gr.transform(copy.deepcopy(plain), gr.on("saved:*", Store("int8")), dynamic=False)
        assert_equal(gradients(model, x), gradients(by_size, x))
    assert model.explain().graphs[0].edits


class Layers(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.layers, self.breaks = nn.ModuleList(Mlp() for _ in range(2)), breaks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            if self.breaks:
                torch._dynamo.graph_break()
        return x


@pytest.mark.broad
@pytest.mark.parametrize("pattern", mostly_slow(["saved:layers.*", "saved:layers.1.up", "saved:layers.0/gelu"]))
def test_regions_keep_what_the_whole_model_keeps_inside_of_them(pattern: str) -> None:
    plain, x = Layers().double(), rows()
    whole = gr.transform(copy.deepcopy(plain), gr.on(pattern, Store("int8")))
    parts = gr.transform(copy.deepcopy(plain), gr.on(pattern, Store("int8")), regions="layers.*")

    assert_equal(gradients(parts, x), gradients(whole, x), rtol=1e-10)
    names = {str(e.site) for g in parts.explain().graphs for e in g.edits}
    assert names == {str(e.site) for e in whole.explain().graphs[0].edits}


@pytest.mark.broad
def test_parts_of_a_broken_graph_keep_what_each_has() -> None:
    plain, whole, policy = Layers(breaks=True).double(), Layers().double(), gr.on("saved:*/gelu", Store("int8"))
    whole.load_state_dict(plain.state_dict())
    parts = gr.transform(plain, policy, fullgraph=False)
    x = rows()
    with pytest.warns(gr.RewriteWarning, match="skipped"):
        got = gradients(parts, x)
    assert_equal(got, gradients(gr.transform(whole, policy), x), rtol=1e-10)
    assert all(g.edits for g in parts.explain().graphs)


# Beside other actions.


def test_gradients_of_single_examples_are_of_restored_values() -> None:
    plain, x = chain(2), rows()
    clip = gr.on("gradient:2.weight", ClipPerExample(0.5, loss_reduction="sum"))
    model = gr.transform(copy.deepcopy(plain), [clip, gr.on("saved:1", Store("int8"))])
    gradients(model, x)
    # By hand: the input of the second layer as it is restored, its error as the plain model has it.
    with torch.no_grad():
        hidden = restored(plain[1](plain[0](x)), "int8")
        out = plain[3](plain[2](plain[1](plain[0](x))))
        error = 2 * out * (1 - out * out)
        norms = hidden.norm(dim=1) * error.norm(dim=1)
        factors = (0.5 / norms).clamp(max=1.0)
        wanted = (error * factors[:, None]).T @ hidden
    assert (factors < 1).any()
    torch.testing.assert_close(model.get_parameter("2.weight").grad, wanted, rtol=1e-10, atol=1e-12)


def test_nan_is_found_in_what_is_restored_and_the_op_is_named() -> None:

    policy = [gr.on("saved:*", Store("int8")), gr.on("activation:*/*", CheckFinite("raise"))]
    net = Lambda(
        lambda net, x: net.two((net.one(x) - 100.0).sqrt()), one=nn.Linear(WIDTH, WIDTH), two=nn.Linear(WIDTH, WIDTH)
    )
    model = gr.transform(net.double(), policy)
    with pytest.raises(gr.NonFiniteError) as caught:
        model(rows()).sum().backward()
    assert caught.value.op == "/sqrt"


def test_an_infinity_makes_its_row_nan_and_the_backward_is_blamed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.one(x).tanh()
            h = torch.where(torch.arange(WIDTH) == 3, h * 1e200 * 1e200, h)  # the second layer has no weight there
            return self.two(h).tanh()

    plain = Net().double()
    with torch.no_grad():
        plain.two.weight[:, 3] = 0
    policy = [gr.on("saved:*", Store("int8")), gr.on("gradient:*", CheckFinite("raise"))]
    model = gr.transform(plain, policy)
    with pytest.raises(gr.NonFiniteError):
        model(rows()).sum().backward()


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = chain(2), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.one(h).square().mean(), self.two(h).tanh().mean()


@pytest.mark.broad
def test_losses_are_weighed_of_restored_values() -> None:
    plain, x = TwoLosses().double(), rows()
    store = gr.on("saved:*", Store("int8"))
    clip = gr.on("error:trunk", WeighLosses(MGDA()))
    both, alone = gr.transform(copy.deepcopy(plain), [clip, store]), gr.transform(copy.deepcopy(plain), store)
    weighed = gr.transform(copy.deepcopy(plain), clip)
    got, stored, plain_weighed = (gradients(m, x, loss=lambda o: o[0] + o[1]) for m in (both, alone, weighed))

    assert differ(got, stored)
    assert differ(got, plain_weighed)
    for name, g in plain_weighed.items():
        assert float((got[name] - g).norm() / g.norm()) < 0.05, name


class Residual(nn.Module):
    """A block whose output and that of a layer have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.one(x)
        return h + self.two(h.tanh())


class ResidualLosses(TwoLosses):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(Residual(), Residual())


@pytest.mark.broad
@pytest.mark.parametrize("is_weighed", [False, True])
@pytest.mark.parametrize("form", [Store("bfloat16"), Recompute()])
@pytest.mark.parametrize("action", [Observe("norm"), CheckFinite(), ClipByValue(0.01)])
def test_two_error_sites_with_one_gradient(action: Any, form: Any, is_weighed: bool) -> None:
    plain, x = ResidualLosses().double(), rows()
    policy = [gr.on("error:*", action)] + ([gr.on("error:trunk", WeighLosses(MGDA()))] if is_weighed else [])
    both, alone = (gr.transform(copy.deepcopy(plain), p) for p in ([*policy, gr.on("saved:*", form)], policy))
    got, wanted = (gradients(model, x, loss=lambda o: o[0] + o[1]) for model in (both, alone))

    near = 1e-12 if isinstance(form, Recompute) else 0.05
    for name, g in wanted.items():
        assert float((got[name] - g).norm()) <= near * float(g.norm()), name
    assert both.monitor.latest().keys() == alone.monitor.latest().keys()


@pytest.mark.broad
@pytest.mark.parametrize("form", mostly_slow(FORMS))
def test_stored_error_is_that_of_the_form(form: Form) -> None:
    plain, x = chain(2), rows()
    model = gr.transform(
        copy.deepcopy(plain), [gr.on("saved:*", Store(form)), gr.on("saved:1", Observe("stored_error"))]
    )
    gradients(model, x)
    hidden = plain[1](plain[0](x)).detach()
    wanted = float((restored(hidden, form) - hidden).norm() / hidden.norm())

    assert set(model.monitor.latest()) == {"stored_error@saved:1"}
    assert model.monitor.latest()["stored_error@saved:1"] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.broad
def test_stored_error_is_measured_every_other_step() -> None:
    model = gr.transform(chain(2), gr.on("saved:1", [Store("int8"), Observe("stored_error", every=2)]))
    for _ in range(4):
        gradients(model, rows())
    history = model.monitor.history("stored_error@saved:1")
    assert [h == h for h in history] == [True, False, True, False]


@pytest.mark.broad
def test_nothing_is_recorded_where_nothing_is_stored() -> None:
    model = gr.transform(chain(2), gr.on("saved:1", Observe("stored_error")))
    with pytest.warns(gr.RewriteWarning, match="records nothing, for no Store acts"):
        got = gradients(model, x := rows())
    assert model.monitor.latest() == {}
    assert_equal(got, gradients(gr.transform(copy.deepcopy(model.original), []), x), rtol=0)


@pytest.mark.broad
def test_loss_scale_leaves_the_forms_alone() -> None:
    plain, x = chain(2), rows()
    scale = torch.tensor(256.0)
    policy = [gr.on("saved:*", [Store("int8"), Observe("stored_error")]), gr.on("error:1", ClipByValue(0.5))]
    model = gr.transform(copy.deepcopy(plain), policy, loss_scale=scale)
    unscaled = gr.transform(copy.deepcopy(plain), policy)
    got = gradients(model, x, loss=lambda out: out.square().sum() * 256)

    assert_equal({n: g / 256 for n, g in got.items()}, gradients(unscaled, x))
    assert model.monitor.latest() == unscaled.monitor.latest()


@pytest.mark.broad
@pytest.mark.parametrize("form", mostly_slow(["int8", "float8_e4m3fn"]))
def test_bfloat16_and_autocast(form: Form) -> None:
    plain, x = chain().bfloat16(), rows(dtype=torch.bfloat16)
    assert_as_expected(trace(plain, gr.on("saved:*", Store(form)), x), form)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = chain().float()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.net(x)

    traced = trace(Cast(), gr.on("saved:*", Store(form)), rows(dtype=torch.float32))
    assert_as_expected(traced, form)
    assert changes(traced) > 1e-4


@pytest.mark.broad
def test_outputs_are_those_of_the_plain_model() -> None:
    plain, x = nn.Sequential(Mlp(), nn.LayerNorm(WIDTH), Qkv()).double(), rows()
    unchanged = gr.transform(copy.deepcopy(plain), [])(x)
    model = gr.transform(copy.deepcopy(plain), gr.on("saved:*", Store("int8")))
    out = model(x)
    assert torch.equal(out, unchanged)
    assert saved_bytes(out) < 0.7 * saved_bytes(unchanged)  # with parameters and the input


class Aliased(nn.Module):
    """A saved value, views of it and an input are outputs; the gradient of a parameter is a saved value."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.w = nn.Linear(WIDTH, WIDTH), nn.Parameter(rows())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.one(x).sigmoid()
        return hidden, hidden.view(-1), hidden.t(), hidden[1:], x, (hidden.cumsum(0) * self.w).sum()


def test_outputs_that_share_memory_with_saved_tensors() -> None:
    traced = trace(Aliased().double(), gr.on("saved:*", Store("int8")), rows())
    assert_as_expected(traced, "int8")
    assert [str(e.site) for e in traced.graph.edits] == ["saved:/sigmoid", "saved:/cumsum"]
    assert changes(traced) > 1e-6


def test_backward_twice() -> None:
    model, x = gr.transform(chain(2), gr.on("saved:*", Store("int8"))), rows()
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), first, strict=True))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.heads(x).view(1, ROWS, 4, -1).transpose(1, 2)
        return functional.scaled_dot_product_attention(h, h, h)


@pytest.mark.broad
@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), "saved:1"),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)), "saved:*"),
        (Attention(), "saved:*"),
    ],
    ids=["layer norm", "batch norm", "attention"],
)
def test_ops_with_several_results_are_computed_again(model: nn.Module, pattern: str) -> None:
    plain, x = model.double(), rows()
    rewritten = gr.transform(copy.deepcopy(plain), gr.on(pattern, Recompute()))

    assert_equal(gradients(rewritten, x), gradients(plain, x), rtol=1e-12)


def test_a_callback_may_choose_by_bytes_alone() -> None:
    graph = gr.transform(chain(2), lambda site: Store("int8") if site.nbytes else None).trace(rows())

    assert [str(edit.site) for edit in graph.edits] == ["saved:1", "saved:3"]


def test_a_rule_for_saved_tensors_needs_the_kind() -> None:
    with pytest.raises(gr.PolicyError, match=r"only a pattern with that kind matches: gr.on\('saved:1', Store"):
        gr.transform(chain(2), gr.on("1", Store("int8")))


class Narrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = ((WIDTH, WIDTH), (WIDTH, 1))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).exp()
        return x


@pytest.mark.broad
@pytest.mark.parametrize("options", [{}, {"regions": "layers.*"}], ids=str)
def test_a_form_that_acts_in_one_graph_may_be_refused_in_others(options: dict[str, Any]) -> None:
    model = gr.transform(Narrowing(), gr.on("saved:*", Store("int8")), **options)
    with pytest.warns(gr.RewriteWarning, match="leaves them as they are: int8 is not smaller"):
        model(torch.randn(2048, WIDTH)).sum().backward()

    assert any(edit.nodes for graph in model.explain().graphs for edit in graph.edits)


def test_a_later_graph_may_have_rows_of_one() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return (h @ h.mT).softmax(-1) @ h

    model = gr.transform(Net(), gr.on("saved:/softmax", Store("int8")), dynamic=False)
    for number in (64, 1):
        model(torch.randn(number, WIDTH)).sum().backward()

    assert [len(graph.edits) for graph in model.explain().graphs] == [1, 0]


@pytest.mark.broad
@pytest.mark.parametrize("form", [Store("float32"), Recompute()])
def test_running_statistics_are_written_behind_the_backward(form: Any) -> None:
    """1024 channels make statistics that are large enough to be stored."""
    plain, x = nn.Sequential(nn.Linear(WIDTH, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 1)).double(), rows()
    model = gr.transform(copy.deepcopy(plain), gr.on("saved:*", form))
    got, wanted = gradients(model, x), gradients(plain, x)

    largest = max(float(g.abs().max()) for g in wanted.values())
    for name, g in wanted.items():
        torch.testing.assert_close(got[name], g, rtol=1e-4, atol=1e-5 * largest)
    for (name, b), c in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(b, c), name


def test_one_site_that_is_left_alone_has_no_others() -> None:
    model = gr.transform(chain(2), gr.on("saved:1", Offload()))
    with pytest.raises(gr.PolicyError, match=r"^saved:1: Offload\(\) leaves them as they are"):
        model(rows())
