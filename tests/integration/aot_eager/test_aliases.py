"""Values that share memory: outputs that are views of each other, and in-place ops through views."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByValue, Observe

from helpers import mostly_slow

BOUND = 0.01
CLIP = ClipByValue(BOUND)
MT = "getattr" if torch.__version__ < "2.15" else "mT"  # Dynamo's name of the op


class Outputs(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.flat, self.head = nn.Linear(4, 6), nn.Flatten(0), nn.Linear(12, 2)
        self.compute = forward

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def flat(m: Any, x: Tensor) -> Any:
    v = m.flat(m.fc(x))
    return v[:6], v[6:], m.head(v)


def beside_its_base(m: Any, x: Tensor) -> Any:
    h = m.fc(x)
    v = h.view(-1)
    return h, v, m.head(v)


def transposed(m: Any, x: Tensor) -> Any:
    v = m.fc(x).mT
    return v.mT, v.mT.mT, m.head(v.reshape(-1))


def base_is_no_output(m: Any, x: Tensor) -> Any:
    h = m.fc(x)
    return h[:1], h.reshape(-1)


def last_step(m: Any, x: Tensor) -> Any:
    h = m.fc(x).tanh()
    return h, h[-1]


def halves(m: Any, x: Tensor) -> Any:
    a, b = m.fc(x).chunk(2, 1)
    return a, b


def one_view(m: Any, x: Tensor) -> Any:
    v = m.flat(m.fc(x))
    return v[2:], m.head(v)


def loss_of(outputs: Any) -> Tensor:
    return torch.stack([(out * 3).sum() for out in outputs]).sum()


def clipped_by_hooks(plain: nn.Module, x: Tensor, sites: set[str]) -> list[Tensor]:
    """The oracle: hooks on the same values, found by the modules and views that make them."""
    model = copy.deepcopy(plain)
    for name in sites:
        model.get_submodule(name).register_forward_hook(hook)
    loss_of(model(x)).backward()
    return grads(model)


def hook(_: nn.Module, __: Any, out: Tensor) -> None:
    out.register_hook(lambda g: g.clamp(-BOUND, BOUND))


def grads(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


@pytest.mark.broad
@pytest.mark.parametrize("shape", [(2, 4), (1, 2, 4)])
@pytest.mark.parametrize(
    "forward", mostly_slow([flat, beside_its_base, transposed, base_is_no_output, last_step, halves, one_view])
)
def test_error_of_a_returned_view_is_whole_or_refused(forward: Any, shape: tuple[int, ...]) -> None:
    plain, x = Outputs(forward), torch.randn(shape)
    for name in ("fc", "flat"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = gr.transform(plain, lambda site, name=name: CLIP if str(site) == f"error:{name}" else None)
            outputs = model(x)
        sites = {str(site) for graph in model.explain().graphs for site in graph.sites}
        plain.zero_grad()
        loss_of(outputs).backward()
        got = [g.clone() for g in grads(plain)]
        refused = [str(w.message) for w in said if f"error:{name}: ClipByValue(0.01) cannot act" in str(w.message)]
        used = name == "fc" or forward in (flat, one_view)

        assert (f"error:{name}" in sites) == used
        assert len(refused) == sum(len(graph.out_of_reach) for graph in model.explain().graphs)
        torch.testing.assert_close(got, clipped_by_hooks(plain, x, {name} if used and not refused else set()))


@pytest.mark.long
@pytest.mark.parametrize(
    ("forward", "refused"),
    [
        (flat, {"flat", "/getitem", "/getitem#1"}),
        (beside_its_base, {"/view"}),
        (transposed, {f"/{MT}", f"/{MT}#1", f"/{MT}#2", f"/{MT}#3"}),
        (base_is_no_output, {"/getitem", "/reshape"}),
        (last_step, {"/getitem"}),
        (halves, set()),
        (one_view, set()),
    ],
)
def test_what_is_refused(forward: Any, refused: set[str]) -> None:
    model = gr.transform(Outputs(forward), lambda site: CLIP if site.kind == "error" else None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(torch.randn(2, 4))
    (graph,) = model.explain().graphs

    assert {str(site).partition(":")[2] for site in graph.out_of_reach} == refused
    assert len(said) == len(refused)
    assert all(".clone()" in str(w.message) for w in said)


def test_trace_warns_too() -> None:
    model = gr.transform(Outputs(flat), gr.on("error:flat", CLIP))
    with pytest.warns(gr.RewriteWarning, match="error:flat: ClipByValue"):
        graph = model.trace(torch.randn(2, 4))

    assert not graph.edits
    assert "error:flat" in map(str, graph.sites)


class Scaled(nn.Module):
    def __init__(self, mutate: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.mutate = mutate

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.mutate(y)
        return y


class Around(nn.Module):
    def __init__(self, mutate: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.scaled, self.head = Scaled(mutate), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scaled(x)).sum()


def by_setitem(y: Tensor) -> None:
    y[:, 1] = y[:, 2] * 100


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "column": lambda y: y[:, 1].mul_(100.0),
    "view": lambda y: y.view(-1).add_(1.0).mul_(100.0),
    "transpose": lambda y: y.t().mul_(100.0),
    "copy": lambda y: y[0].copy_(y[1] * 100),
    "diagonal": lambda y: y.diagonal().mul_(100.0),
    "foreach": lambda y: torch._foreach_mul_([y[:, 1], y[:, 2]], 100.0),
    "setitem": by_setitem,
    "view of a view": lambda y: y[:, 1:][0].zero_(),
}


@pytest.mark.broad
@pytest.mark.parametrize("name", mostly_slow(IN_PLACE, 3))
def test_in_place_op_through_a_view_makes_new_values(name: str) -> None:
    plain, x = Around(IN_PLACE[name]), torch.randn(2, 4)
    wanted = clipped_by_hooks_around(plain, x, "scaled")
    model = gr.transform(plain, gr.on("error:scaled", CLIP))
    model(x).backward()
    torch.testing.assert_close(grads(model), wanted)

    plain.zero_grad()
    wanted = clipped_by_hooks_around(plain, x, "scaled.fc")
    model = gr.transform(plain, gr.on("error:scaled.fc", CLIP))  # the value before the op
    model(x).backward()
    torch.testing.assert_close(grads(model), wanted)


def clipped_by_hooks_around(plain: nn.Module, x: Tensor, name: str) -> list[Tensor]:
    model = copy.deepcopy(plain)
    model.get_submodule(name).register_forward_hook(hook)
    model(x).backward()
    return grads(model)


def test_every_alias_that_is_used_later_is_a_new_value() -> None:
    class Aliases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            used, unused = y[:, 1], y[:, 2]
            (unused * 0).sum()
            y.mul_(100)
            return (used * y[:, 0]).sum()

    model = gr.transform(Aliases(), gr.on("activation:/mul_", Observe("max_abs")))
    x = torch.randn(3, 4)
    model(x).backward()
    wanted = 100 * model.fc(x).detach()
    latest = model.monitor.latest()

    assert latest == {
        "max_abs@activation:/mul_": pytest.approx(float(wanted.abs().max())),
        "max_abs@activation:/mul_#1": pytest.approx(float(wanted[:, 1].abs().max())),
    }


def test_out_argument_is_changed_in_place() -> None:
    def add(y: Tensor) -> None:
        with torch.no_grad():
            torch.add(y.detach(), 1.0, out=y.detach())

    plain, x = Around(add), torch.randn(2, 4)
    wanted = clipped_by_hooks_around(plain, x, "scaled")
    model = gr.transform(plain, gr.on("error:scaled", CLIP))
    model(x).backward()

    torch.testing.assert_close(grads(model), wanted)


class _Doubles(torch.autograd.Function):
    """Returns a sum, and its second argument, which it has doubled in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        ctx.mark_dirty(y)
        y.mul_(2)
        return total, y

    @staticmethod
    def backward(ctx: Any, g: Tensor, of_doubled: Tensor) -> tuple[Tensor, Tensor]:
        return g, g + 2 * of_doubled


class _Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Doubles.apply(x, x.clone())[1]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo takes no function that marks its arguments as dirty")
def test_an_argument_that_a_custom_function_marks_as_dirty_is_a_new_value() -> None:
    model = gr.transform(nn.Sequential(_Doubled(), nn.Flatten(0)), gr.on("error:0", CLIP))
    x = torch.ones(3, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 2 * BOUND))


def test_no_gradient_at_all_comes_to_a_hook() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.fc(x).chunk(2, -1)
            left @ left.mT
            return right

    plain, x = Halves(), torch.randn(0, 4)  # autograd hands None to a hook on what an empty product came from
    model = gr.transform(plain, gr.on("error:fc", CLIP))
    model(x).sum().backward()

    assert not any(g.any() for g in grads(model))


@pytest.mark.long
@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4)])
@pytest.mark.parametrize("name", ["mul_", "add_ through a view", "relu"])
def test_error_before_an_in_place_op_is_whole_or_refused(name: str, shape: tuple[int, ...]) -> None:
    change = {
        "mul_": lambda h: h.mul_(3.0),
        "add_ through a view": lambda h: h[..., 0].add_(h.detach()[..., 1]),
        "relu": lambda h: torch.relu_(h),
    }[name]

    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            k = h.sum()
            change(h)
            return ((h + k) * 3).sum()

    class Copied(Changed):  # the same, where the value is no view: a hook on it sees all of its error
        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x).clone()
            h.register_hook(lambda g: g.clamp(-BOUND, BOUND))
            k = h.sum()
            h = h * 1
            change(h)
            return ((h + k) * 3).sum()

    plain, x = Changed(), torch.randn(shape)
    reference = Copied()
    reference.load_state_dict(plain.state_dict())
    reference(x).backward()
    model = gr.transform(plain, gr.on("error:fc", CLIP))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss = model(x)
    loss.backward()

    lost = [str(site) for site in model.explain().graphs[0].out_of_reach]
    if not lost:
        torch.testing.assert_close(grads(plain), grads(reference))
    else:  # before torch 2.15 the output of a linear layer is a view of a matrix, which the op changes
        assert (lost, len(shape)) == (["error:fc"], 3)
        assert "changes this value, a view, in place" in str(said[0].message)
