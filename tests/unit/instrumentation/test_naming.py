"""Names of sites and patterns, on models that make naming hard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.passes import Keep, Scale
from gradrewrite.sites import Site

from models.small import Lambda

FILE = Path(__file__).name


def sites(model: nn.Module, *args: Any, kind: str = "error", **kwargs: Any) -> dict[str, Site]:
    return {str(s): s for s in gr.transform(model, []).trace(*args, **kwargs).sites if s.kind == kind}


def names(model: nn.Module, *args: Any, kind: str = "error", **kwargs: Any) -> list[str]:
    return [name.partition(":")[2] for name in sites(model, *args, kind=kind, **kwargs)]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))


SOFTMAX = Site("error", "decoder.0.attn/softmax", call=1)
LAYER = Site("error", "decoder.0.out", output_of=("decoder.0.out", "decoder.0"), addresses=(
    ("decoder.0.out", 0), ("decoder.0", 3), ("decoder.0.out/linear", 2),
))  # fmt: skip


@pytest.mark.parametrize(
    ("site", "pattern", "expected"),
    [
        (SOFTMAX, "error:decoder.0.attn/softmax", True),
        (SOFTMAX, "*.attn/softmax", True),
        (SOFTMAX, "*/*", True),
        (SOFTMAX, "*.attn/softmax#1", True),
        (SOFTMAX, "*.attn/softmax#0", False),
        (SOFTMAX, "*", False),
        (SOFTMAX, "error:*", False),
        (SOFTMAX, "gradient:*/*", False),
        (LAYER, "decoder.0", True),
        (LAYER, "decoder.0#3", True),
        (LAYER, "decoder.0#0", False),
        (LAYER, "decoder.?", True),
        (LAYER, "decoder.*", True),
        (LAYER, "error:*", True),
        (LAYER, "decoder.0.out/linear#2", True),
        (LAYER, "decoder.0.out/linear#0", False),
        (LAYER, "DECODER.0", False),
        (LAYER, "decoder.[01]", True),
    ],
)
@pytest.mark.pure
def test_patterns(site: Site, pattern: str, expected: bool) -> None:
    assert site.matches(pattern) is expected


@pytest.mark.pure
def test_site_is_a_value() -> None:
    assert str(SOFTMAX) == "error:decoder.0.attn/softmax#1"
    assert str(LAYER) == "error:decoder.0.out"
    assert len({SOFTMAX, Site("error", "decoder.0.attn/softmax", call=1)}) == 1
    with pytest.raises(AttributeError):
        SOFTMAX.name = "x"


def test_runs_in_place_ops_and_nesting() -> None:

    found = sites(Lambda(lambda net, x: net.cell(net.cell(x)) * 2, cell=Cell()), torch.randn(2, 4))

    assert list(found) == [
        "error:cell.fc", "error:cell.act", "error:cell.fc#1", "error:cell.act#1", "error:/mul"
    ]  # fmt: skip
    assert found["error:cell.act#1"].output_of == ("cell.act", "cell")
    assert found["error:cell.act#1"].matches("cell#1")
    assert found["error:cell.act#1"].matches("cell.act/relu#1")
    assert found["error:cell.act#1"].op == "relu"
    assert found["error:/mul"].module == ""
    assert not found["error:/mul"].matches("error:*")


def test_first_name_wins_by_identity() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.again = self.first
            self.hidden = [self.first]

        def forward(self, x: Tensor) -> Tensor:
            return self.hidden[0](torch.tanh(self.again(x)))

    assert names(Net(), torch.randn(2, 4)) == ["first", "/tanh", "first#1"]
    assert names(Net(), torch.randn(2, 4), kind="gradient") == ["first.weight", "first.bias"]


def test_op_names_are_what_the_user_called() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            h = x @ self.w
            h = functional.gelu(h) / 2 - 1
            a, b = h.chunk(2, dim=-1)
            h = torch.softmax(a + b, -1) * 2
            h += 1
            h[0] = 0
            return functional.linear(h, self.w[:2, :2]).sum()

    assert names(Net(), torch.randn(2, 4)) == [
        "/matmul", "/gelu", "/truediv", "/sub", "/chunk", "/chunk#1", "/add", "/softmax", "/mul", "/iadd", "/setitem",
        "/getitem", "/linear", "/sum",
    ]  # fmt: skip


def test_module_with_several_outputs_keeps_op_names() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.fc(x)
            return h.sin(), h.cos()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two = Two()

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.two(x)
            return a + b

    found = sites(Net(), torch.randn(2, 4))
    assert list(found) == ["error:two.fc", "error:two/sin", "error:two/cos", "error:/add"]
    assert [s.output_of for s in found.values()] == [("two.fc",), ("two",), ("two",), ()]
    assert [n for n, s in found.items() if s.matches("error:two")] == ["error:two/sin", "error:two/cos"]


def test_tap_and_identity_name_values() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.here = nn.Linear(4, 4), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            h = gr.tap(torch.tanh(self.fc(x)), "hidden")
            h = self.here(h * 2)
            return gr.tap(gr.tap(h + 1, "hidden"), "last")

    found = sites(Net(), torch.randn(2, 4))
    assert list(found) == ["error:fc", "error:hidden", "error:here", "error:hidden#1"]
    assert found["error:hidden"].matches("/tanh")
    assert found["error:here"].matches("/mul")
    assert found["error:here"].output_of == ("here",)
    assert found["error:hidden#1"].matches("error:last")
    x = torch.randn(2, 4)
    assert torch.equal(gr.tap(x, "x"), x)
    with pytest.raises(TypeError, match="name is a string"):
        gr.tap(x, 1)


def test_pass_through_makes_no_second_site() -> None:

    net = Lambda(lambda net, x: net.fc(x).contiguous().float().to(torch.float32), fc=nn.Linear(4, 4))
    assert names(net, torch.randn(2, 4)) == ["fc"]


def test_checkpointed_values_are_named_once() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList([Cell(), Cell()])

        def forward(self, x: Tensor) -> Tensor:
            for cell in self.cells:
                x = checkpoint(cell, x, use_reentrant=False)
            return x

    assert names(Net(), torch.randn(2, 4)) == ["cells.0.fc", "cells.0.act", "cells.1.fc", "cells.1.act"]


def test_custom_function_is_one_op() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    net = Lambda(lambda net, x: Twice.apply(net.fc(x)), fc=nn.Linear(4, 4))
    assert names(net, torch.randn(2, 4)) == ["fc", "/apply"]


def test_inputs_have_the_names_of_arguments() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, batch: dict[str, Tensor], *rest: Tensor, scale: Tensor) -> Tensor:
            return (x * batch["mask"] + rest[0] * scale).sum()

    def leaf() -> Tensor:
        return torch.randn(3, requires_grad=True)

    found = sites(Net(), leaf(), {"mask": leaf()}, leaf(), scale=leaf(), kind="input")
    assert sorted(found) == ["input:batch.mask", "input:rest.0", "input:scale", "input:x"]
    x = leaf()
    args = (x, {"mask": leaf()}, leaf())
    gr.transform(Net(), gr.on("input:x", lambda g: g * 0))(*args, scale=leaf()).backward()
    assert not x.grad.any()
    assert args[2].grad.any()


def test_dead_and_frozen_values_are_no_error_sites() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.fc = nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            _ = self.fc(x).sum()
            return self.fc(self.frozen(x))

    assert names(Net(), torch.randn(2, 4)) == ["fc#1"]
    assert names(Net(), torch.randn(2, 4), kind="activation") == ["fc", "/sum", "frozen", "fc#1"]


def test_source_is_the_users_line() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            w = h.exp().sqrt()
            return w

    found = sites(Net(), torch.randn(2, 4))
    line = Net.forward.__code__.co_firstlineno
    assert found["error:fc"].source == f'{FILE}:{line + 1} "h = self.fc(x)"'
    assert found["error:/sqrt"].source == f'{FILE}:{line + 2} "w = h.exp().sqrt()"'


def test_site_describes_its_value() -> None:
    found = sites(nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double(), torch.randn(2, 4, dtype=torch.float64))
    site = found["error:0"]

    assert (site.shape, site.dtype, site.device, site.module) == ((2, 3), torch.float64, torch.device("cpu"), "0")
    assert str(found["error:1"]) == "error:1"


def test_policy_is_asked_once_per_site_and_graph() -> None:
    asked: list[str] = []
    model = gr.transform(Cell(), lambda site: asked.append(str(site)))
    model(torch.randn(2, 4))
    model(torch.randn(2, 4))

    assert sorted(asked) == sorted(set(asked))
    assert {"activation:fc", "error:fc", "error:act", "gradient:fc.weight"} <= set(asked)


def test_policies_of_a_list_all_apply_in_order() -> None:
    plain, x = Cell(), torch.randn(2, 4)
    policy = [
        gr.on("gradient:*", Scale(2.0)),
        [lambda site: (lambda g: g + 1) if site.kind == "gradient" else None],
        [],
    ]
    model = gr.transform(plain, policy)
    model(x).sum().backward()
    (wanted,) = torch.autograd.grad(plain(x).sum(), [plain.fc.weight])

    torch.testing.assert_close(plain.fc.weight.grad, wanted * 2 + 1)


def test_in_place_values_have_their_own_errors() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            h.mul_(3)
            h[0] = 0
            return h.sum()

    model = gr.transform(Net(), [gr.on("error:fc", Keep()), gr.on("error:/*", Keep())])
    model(torch.randn(2, 4)).backward()
    kept = {str(site): tensor[:, 0].tolist() for site, tensor in model.monitor.kept().items() if tensor.dim()}

    assert kept == {"error:fc": [0.0, 3.0], "error:/mul_": [0.0, 1.0], "error:/setitem": [1.0, 1.0]}


def test_pass_through_modules_are_traced_once() -> None:
    model = gr.transform(
        nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 3)), gr.on("error:1", lambda g: g * 0.5)
    )
    for _ in range(12):  # torch gives up at the ninth compilation
        model(torch.ones(2, 3)).sum().backward()

    assert len(model.explain().graphs) == 1
    assert nn.Identity.forward.__name__ == "forward"


class Slashed(nn.Module):
    """Names with a slash, as some converters write them."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("a/b", nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
        self.register_parameter("w/scale", nn.Parameter(torch.ones(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self._modules["a/b"](x) * self._parameters["w/scale"]


@pytest.mark.broad
@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("error:a/b", ["error:a/b.1"]),
        ("error:a/b.*", ["error:a/b.0", "error:a/b.1"]),
        ("error:a/b.1", ["error:a/b.1"]),
        ("error:a/b.1/tanh", ["error:a/b.1"]),
        ("error:*", ["error:a/b.0", "error:a/b.1"]),
        ("error:/mul", ["error:/mul"]),
        ("gradient:w/scale", ["gradient:w/scale"]),
        ("gradient:a/*.weight", ["gradient:a/b.0.weight"]),
        ("gradient:*", ["gradient:a/b.0.weight", "gradient:a/b.0.bias", "gradient:w/scale"]),
    ],
)
def test_names_with_a_slash_are_matched(pattern: str, matched: list[str]) -> None:
    edits = gr.transform(Slashed(), gr.on(pattern, Scale(2.0))).trace(torch.ones(1, 2)).edits

    assert sorted(str(e.site) for e in edits) == sorted(matched)


def test_silent_module_with_a_slash_is_told() -> None:
    model = Slashed()
    model.add_module("c/d", nn.Linear(2, 2))

    with pytest.warns(gr.RewriteWarning, match="made no differentiable value"):
        gr.transform(model, gr.on("error:c/d", Scale(2.0))).trace(torch.ones(1, 2))


def test_identity_that_cannot_name_a_value_points_to_tap() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 1))
    plain[1].register_forward_hook(lambda *_: None)
    plain[1].register_forward_pre_hook(lambda *_: None)
    model = gr.transform(plain, gr.on("error:1", Scale(2.0)))
    with pytest.warns(gr.RewriteWarning, match=r"'error:1' matches 1, .*gr\.tap\(x, name\)"):
        model(torch.ones(1, 2)).sum().backward()


def test_other_module_without_a_value_does_not_point_to_tap() -> None:
    plain = nn.Sequential(nn.Linear(2, 1))
    plain.unused = nn.Linear(2, 1)
    plain.forward = plain[0].forward
    model = gr.transform(plain, gr.on("error:unused", Scale(2.0)))
    with pytest.warns(gr.RewriteWarning, match=r"does nothing$"):
        model(torch.ones(1, 2)).sum().backward()


def test_the_name_that_a_pattern_means() -> None:
    seen: list[gr.Site] = []
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    model = gr.transform(net, lambda site: seen.append(site) if site.kind == "error" else None)
    model(torch.ones(1, 2)).sum().backward()
    (site,) = (site for site in seen if site.name == "0.1")
    assert site.matched("error:0") == "0"
    assert site.matched("*") == "0.1"
    assert site.matched("error:0.0") == site.matched("gradient:*") == ""
