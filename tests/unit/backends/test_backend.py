"""``gr.backend``: the policy under a torch.compile that the user calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.backends.backend import Backend, make_backend
from gradrewrite.backends.engines import AotEager
from gradrewrite.passes import ClipByNorm, Scale, Zero


class Gen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Linear(3, 3)

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(self.x(z))


def op_by_op(policy: gr.Policy) -> Backend:
    """The same backend without Inductor, which is quick."""
    return make_backend(policy, None, AotEager())


def edited(backend: Backend) -> list[str]:
    return [str(e.site) for g in backend.explain().graphs for e in g.edits]


def test_one_module_keeps_its_names() -> None:
    backend = op_by_op(gr.on("gradient:*", Scale(2.0)))
    model = Gen()
    torch.compile(model, backend=backend)(torch.ones(1, 3)).sum().backward()

    assert edited(backend) == ["gradient:x.weight", "gradient:x.bias"]


def test_several_modules_begin_with_their_variables() -> None:
    backend = op_by_op([gr.on("gradient:gen.*", Scale(2.0)), gr.on("error:dis.x", Zero())])
    gen, dis = Gen(), Gen()

    @torch.compile(backend=backend, fullgraph=True)
    def step(z: Tensor) -> Tensor:
        return dis(gen(z)).sum()

    step(torch.ones(1, 3)).backward()
    assert edited(backend) == ["error:dis.x", "gradient:gen.x.weight", "gradient:gen.x.bias"]
    assert not gen.x.weight.grad.any()


def test_method_of_a_trainer() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.net, self.loss = Gen(), nn.MSELoss()

        def step(self, z: Tensor) -> Tensor:
            return self.loss(self.net(z), z)

    trainer, backend = Trainer(), op_by_op(gr.on("error:net.x", Zero()))
    torch.compile(trainer.step, backend=backend, fullgraph=True)(torch.ones(1, 3)).backward()

    assert edited(backend) == ["error:net.x"]
    assert not trainer.net.x.weight.grad.any()


def test_names_after_a_graph_break() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Gen(), Gen()

        def forward(self, z: Tensor) -> Tensor:
            h = self.a(z)
            torch._dynamo.graph_break()
            return self.b(h)

    backend = op_by_op([gr.on("error:a.x", Zero()), gr.on("gradient:b.*", Scale(2.0))])
    with pytest.warns(gr.RewriteWarning, match="graph_break"):
        torch.compile(Net(), backend=backend)(torch.ones(1, 3)).sum().backward()

    assert edited(backend) == ["error:a.x", "gradient:b.x.weight", "gradient:b.x.bias"]


def test_rule_that_matches_nothing_raises_from_the_first_backward() -> None:
    loss = torch.compile(Gen(), backend=op_by_op(gr.on("error:y", Zero())))(torch.ones(1, 3)).sum()
    with pytest.raises(gr.NoSuchSiteError, match="error:x"):
        loss.backward()


def test_training_step_with_the_backward_outside() -> None:
    plain = Gen()
    model, x = copy.deepcopy(plain), torch.randn(2, 3)
    step = torch.compile(lambda z: model(z).square().mean(), backend=op_by_op(gr.on("gradient:*", Scale(3.0))))
    step(x).backward()
    plain(x).square().mean().backward()

    torch.testing.assert_close(model.x.weight.grad, 3 * plain.x.weight.grad)


@pytest.mark.inductor
def test_registered_by_name_with_options() -> None:
    plain, monitor = Gen(), gr.Monitor()
    options: dict[str, Any] = {"policy": gr.on("gradient:*", ClipByNorm(0.5)), "monitor": monitor, "max_fusion_size": 8}
    model = torch.compile(copy.deepcopy(plain), backend="gradrewrite", options=options)
    x = torch.ones(2, 3)
    model(x).sum().backward()
    plain(x).sum().backward()

    assert "gradrewrite" in torch.compiler.list_backends(exclude_tags=())
    for name, p in plain.named_parameters():
        assert monitor.latest()[f"norm@gradient:{name}"] == pytest.approx(float(p.grad.norm()), rel=1e-5)
    assert all(float(p.grad.norm()) <= 0.5001 for p in model.parameters())  # type: ignore[attr-defined]


@pytest.mark.inductor
def test_mode_and_options_are_inductors() -> None:
    x = torch.ones(2, 3)
    backend = gr.backend(gr.on("gradient:*", Scale(2.0)))
    model = torch.compile(Gen(), backend=backend, mode="max-autotune-no-cudagraphs")
    model(x).sum().backward()
    assert len(edited(backend)) == 2
    assert backend.monitor.latest() == {}
    with pytest.raises(Exception, match="nonsense"):
        torch.compile(Gen(), backend=gr.backend([]), options={"nonsense": 1})(x)
