"""Tensors that functions keep by name, against the values of eager hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import Every, Keep

from models.small import CellLoop

COMPILED = [False, pytest.param(True, marks=pytest.mark.inductor)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def masked(g: Tensor) -> Tensor:
    mask = g.abs() > 0.1
    gr.keep("mask", mask)
    gr.keep("norms", g.norm(dim=0))
    return g * mask


def run(policy: gr.Policy, *, compiled: bool = False) -> gr.RewrittenModule:
    rewritten = gr.transform(net(), policy)
    if compiled:
        rewritten.compile()
    rewritten(torch.ones(5, 3, dtype=torch.float64)).sum().backward()
    return rewritten


def texts(kept: dict[gr.Site | str, Tensor]) -> dict[str, Tensor]:
    return {str(site): value for site, value in kept.items()}


@pytest.mark.parametrize("compiled", COMPILED)
def test_values_by_name_and_site(compiled: bool) -> None:
    plain, errors = net(), dict[str, Tensor]()
    hidden = plain[0](torch.ones(5, 3, dtype=torch.float64))
    output = plain[2](plain[1](hidden))
    for name, value in (("error:0", hidden), ("error:2", output)):
        value.register_hook(lambda g, name=name: errors.__setitem__(name, g))
    output.sum().backward()

    model = run([gr.on("error:2", masked), gr.on("error:*", Keep())], compiled=compiled)
    found = model.monitor.kept("mask")
    assert list(texts(found)) == ["error:2"]
    assert torch.equal(found["error:2"], errors["error:2"].abs() > 0.1)
    torch.testing.assert_close(model.monitor.kept("norms")["error:2"], errors["error:2"].norm(dim=0))
    torch.testing.assert_close(model.monitor.kept()["error:0"], errors["error:0"])


def test_what_is_kept_is_a_copy() -> None:
    bound = torch.ones(2, dtype=torch.float64)

    def keeps(g: Tensor) -> Tensor:
        gr.keep("given", g)
        gr.keep("bound", bound)
        return g

    model = run(gr.on("gradient:2.bias", keeps))
    value = model.monitor.kept("given")["gradient:2.bias"].clone()
    model[2].bias.grad.fill_(7)
    bound.fill_(7)
    assert torch.equal(model.monitor.kept("given")["gradient:2.bias"], value)
    assert torch.equal(model.monitor.kept("bound")["gradient:2.bias"], torch.ones(2, dtype=torch.float64))


def test_a_second_tensor_of_a_name_is_numbered() -> None:
    def twice(g: Tensor) -> Tensor:
        gr.keep("x", g)
        gr.keep("x", 2 * g)
        return g

    model = run([gr.on("gradient:2.bias", twice), gr.on("gradient:2.bias", lambda g: twice(3 * g))])
    found = [model.monitor.kept(name)["gradient:2.bias"] for name in ("x", "x.2", "x.3", "x.4")]
    assert all(torch.equal(value, found[0] * factor) for value, factor in zip(found, (1, 2, 3, 6), strict=True))


def test_groups_keep_under_their_text() -> None:
    def function(gs: dict[str, Tensor]) -> dict[str, Tensor]:
        gr.keep("norms", torch.stack([g.norm() for g in gs.values()]))
        return {}

    model = run(gr.together("gradient:*", function))
    expected = torch.stack([p.grad.norm() for p in model.parameters()])
    assert torch.allclose(model.monitor.kept("norms")["group:default"].sort().values, expected.sort().values)


@pytest.mark.parametrize("compiled", COMPILED)
def test_step_sites(compiled: bool) -> None:
    model = gr.transform(net(), gr.on("step:2.*", masked))
    if compiled:
        model.compile()
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(5, 3, dtype=torch.float64)).sum().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    found = texts(model.monitor.kept("mask"))
    assert found.keys() == {"step:2.weight", "step:2.bias"}
    assert all(torch.equal(value, plain[site[5:]].abs() > 0.1) for site, value in found.items())


@pytest.mark.parametrize("compiled", COMPILED)
def test_each_iteration_of_a_loop_keeps_its_own(compiled: bool) -> None:
    torch.manual_seed(0)
    layer, x, found = CellLoop(), torch.randn(5, 2, 3, dtype=torch.float64), []
    for loops in ("unrolled", "rolled"):
        model = gr.transform(layer, gr.on("error:cell*", masked), loops=loops)
        if compiled:
            model.compile()
        model(x).backward()
        found.append(texts(model.monitor.kept("norms")))
    assert set(found[0]) == {f"error:cell{call}" for call in ("", "#1", "#2", "#3", "#4")}
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("action", "sample"), [(masked, 3), (Every(2, masked), 1)])
def test_functions_keep_in_every_step(action: Any, sample: int) -> None:
    policy = [gr.on("gradient:2.bias", action), gr.on("gradient:2.bias", Keep())]
    model = gr.transform(net(), policy, monitor=gr.Monitor(sample=sample))
    found = []
    for _ in range(4):
        model(torch.ones(5, 3, dtype=torch.float64)).sum().backward()
        found.append((len(model.monitor.kept("mask")), len(model.monitor.kept())))
    assert found == [(1, int(step % sample == 0)) for step in range(4)]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a@b", torch.ones(1), "without '@'"),
        ("", torch.ones(1), "a name is a text"),
        ("tensor", torch.ones(1), "none of 'tensor', 'example_norms', 'second_moment', which Keep has"),
        ("x", 3.0, "a tensor is kept, got float"),
    ],
)
def test_errors_of_the_function(name: str, value: Tensor, message: str) -> None:
    def keeps(g: Tensor) -> Tensor:
        gr.keep(name, value)
        return g

    with pytest.raises(gr.CallbackError, match=rf"gradient:2\.bias: gr\.keep\({name!r}.*{message}"):
        run(gr.on("gradient:2.bias", keeps))


def test_errors_of_the_monitor() -> None:
    model = run(gr.on("gradient:2.bias", masked))
    with pytest.raises(ValueError, match="'tensor', 'example_norms', 'second_moment', 'mask', 'norms', got 'maks'"):
        model.monitor.kept("maks")
    with pytest.raises(KeyError, match=r"nothing was kept at 'gradient:2\.bia'; nearest: gradient:2\.bias"):
        model.monitor.kept("mask")["gradient:2.bia"]
