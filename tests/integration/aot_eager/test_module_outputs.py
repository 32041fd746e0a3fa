"""A module's outputs are what its call returns: not what it stores, and not what an op hands on unchanged."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.passes import ClipByValue, Observe, Scale
from gradrewrite.testing import assert_matches_eager

from models.small import Lambda

BOUND = 0.01


@dataclass
class Result:
    out: Tensor
    rest: Any = None


class Attention(nn.Module):
    def __init__(self, store: Callable[[Any, Tensor], None], wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.store, self.wrap = nn.Linear(4, 4), store, wrap
        self.listed: list[Tensor] = []
        self.named: dict[str, Tensor] = {}
        self.register_buffer("seen", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Any:
        weights = self.fc(x).softmax(-1)
        self.store(self, weights)
        return self.wrap(weights * x)


def assign(m: Any, w: Tensor) -> None:
    m.map = w


def append(m: Any, w: Tensor) -> None:
    m.listed.append(w)


def put(m: Any, w: Tensor) -> None:
    m.named["weights"] = w


def auxiliary_loss(m: Any, w: Tensor) -> None:
    m.extra = (w * w.log()).sum()


def detached(m: Any, w: Tensor) -> None:
    m.map = (w * 2.0).detach()


def buffer(m: Any, w: Tensor) -> None:
    m.seen = w.detach() + 1.0


def nothing(m: Any, w: Tensor) -> None:
    """Store nothing: torch refuses it in a checkpoint."""


STORES = [assign, append, put, auxiliary_loss, detached, buffer]
WRAPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda y: y, lambda r: r),
    "tuple": (lambda y: (None, y), lambda r: r[1]),
    "nested": (lambda y: {"a": [y, 1]}, lambda r: r["a"][0]),
    "dataclass": (lambda y: Result(y), lambda r: r.out),
}


class Net(nn.Module):
    def __init__(
        self, store: Callable[[Any, Tensor], None], wrap: str = "tensor", *, checkpointed: bool = False
    ) -> None:
        super().__init__()
        make, self.unwrap = WRAPS[wrap]
        self.attn, self.head = Attention(store, make), nn.Linear(4, 2)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        call = functools.partial(checkpoint, self.attn, use_reentrant=False) if self.checkpointed else self.attn
        loss = self.head(self.unwrap(call(x))).pow(2).sum()
        stored = [vars(self.attn)[name] for name in ("map", "extra") if name in vars(self.attn)]
        for tensor in [*stored, *self.attn.listed, *self.attn.named.values()]:
            if tensor.requires_grad:
                loss = loss + 3.0 * tensor.sum()
        return loss


def clip_errors_of(module: nn.Module, unwrap: Callable[[Any], Tensor]) -> None:
    def hook(_: nn.Module, __: Any, out: Any) -> None:
        unwrap(out).register_hook(lambda g: g.clamp(-BOUND, BOUND))

    module.register_forward_hook(hook)


@pytest.mark.long
@pytest.mark.parametrize("store", STORES)
def test_what_a_module_stores_is_no_output(store: Callable[[Any, Tensor], None]) -> None:
    assert_only_the_output_is_clipped(Net(store), torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))


@pytest.mark.long
@pytest.mark.parametrize("wrap", WRAPS)
def test_outputs_in_containers(wrap: str) -> None:
    assert_only_the_output_is_clipped(Net(auxiliary_loss, wrap), torch.ones(3, 4))


def test_inside_of_a_checkpoint() -> None:
    net = Net(nothing, checkpointed=True)
    assert_only_the_output_is_clipped(net, torch.ones(3, 4))


def assert_only_the_output_is_clipped(net: Net, x: Tensor) -> None:
    plain = copy.deepcopy(net)
    clip_errors_of(plain.attn, plain.unwrap)
    plain(x).backward()
    model = gr.transform(net, gr.on("error:attn", ClipByValue(BOUND)))
    model(x).backward()

    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    (graph,) = model.explain().graphs
    assert [str(edit.site) for edit in graph.edits] == ["error:attn"]


def test_returned_and_stored_is_an_output() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x.tanh()
            return self.kept

    model = gr.transform(nn.Sequential(nn.Linear(2, 2), Both(), nn.Linear(2, 1)), gr.on("error:1", Scale(2.0)))
    graph = model.trace(torch.ones(1, 2))
    assert [str(edit.site) for edit in graph.edits] == ["error:1"]


@pytest.mark.parametrize("is_model", [True, pytest.param(False, marks=[pytest.mark.inductor, pytest.mark.slow])])
def test_a_value_of_the_last_module_that_the_model_stores(is_model: bool) -> None:
    class Stores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.squares = self.fc(x).square()
            return self.squares.sum()

    policy, net = gr.on("activation:*/*", Observe("norm")), nn.Sequential(Stores())
    run: Any = gr.transform(net, policy) if is_model else gr.backend(policy)
    (run if is_model else torch.compile(net, backend=run))(torch.ones(1, 2)).backward()
    (graph,) = run.explain().graphs
    found = {site.name: site.output_of for site in graph.sites if site.kind == "activation"}
    assert found == {"0.fc": ("0.fc",), "0/square": (), "0": ("0",)}


@pytest.mark.broad
@pytest.mark.parametrize("normalize", [spectral_norm, parametrizations.spectral_norm])
def test_normalized_weight_is_no_output(normalize: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(normalize(nn.Linear(4, 4)), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    plain = copy.deepcopy(net)
    clip_errors_of(plain[0], lambda out: out)
    plain(x).pow(2).sum().backward()
    model = gr.transform(net, gr.on("error:0", ClipByValue(BOUND)))
    model(x).pow(2).sum().backward()
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q[1].grad, msg=name)


@pytest.mark.long
def test_oracle_with_stored_values() -> None:
    for store in STORES:
        net = Net(store).double()
        x = torch.randn(3, 4, dtype=torch.float64)
        report = assert_matches_eager(net, gr.on("error:*", Scale(0.5)), x, compiled=False)
        assert "error:attn" in report.changed


DROPOUTS = [
    lambda p: nn.Dropout(p),
    lambda p: nn.Dropout2d(p),
    lambda p: nn.AlphaDropout(p),
    lambda p: nn.FeatureAlphaDropout(p),
]


@pytest.mark.long
@pytest.mark.parametrize("make", DROPOUTS)
@pytest.mark.parametrize("training", [True, False])
def test_dropout_that_drops_nothing_is_no_value(make: Callable[[float], nn.Module], training: bool) -> None:

    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    plain = Lambda(
        lambda net, x: net.head(F.dropout(net.drop(net.fc(x)), 0.0)).sum(),
        fc=nn.Linear(4, 4),
        drop=make(0.0 if training else 0.5),
        head=nn.Linear(4, 1),
    )
    net = plain.double().train(training)
    model = gr.transform(copy.deepcopy(net), gr.on("error:*", Scale(0.5)))
    model(x).backward()
    net(x).backward()
    # Scaled behind the head and behind the first layer: a value with two names is scaled once.
    assert torch.allclose(model.head.weight.grad, net.head.weight.grad * 0.5)
    assert torch.allclose(model.fc.weight.grad, net.fc.weight.grad * 0.25)
    (graph,) = model.explain().graphs
    assert [str(edit.site) for edit in graph.edits] == ["error:fc", "error:head"]
    assert_matches_eager(net, gr.on("error:*/*", Scale(0.5)), x, compiled=False)


@pytest.mark.long
def test_dropout_that_drops_is_a_value() -> None:
    model = gr.transform(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)), gr.on("error:1", Scale(2.0)))
    assert [str(edit.site) for edit in model.trace(torch.ones(2, 4)).edits] == ["error:1"]


ACTIVATION = nn.GELU()


class CallsGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(ACTIVATION(self.fc(x))).sum()


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = CallsGlobal()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2.0


def test_values_of_a_global_module_are_those_of_the_module_that_calls_it() -> None:
    net, x = Around().double(), torch.randn(2, 4, dtype=torch.float64)
    graph = gr.transform(net, gr.on("error:inner/gelu", Scale(0.5))).trace(x)
    assert [str(edit.site) for edit in graph.edits] == ["error:inner/gelu"]
    assert_matches_eager(net, gr.on("error:*/*", Scale(0.5)), x, compiled=False)


@pytest.mark.slow
@pytest.mark.inductor
def test_a_global_module_does_not_rename_the_model_of_a_backend() -> None:
    backend = gr.backend(gr.on("error:inner/gelu", Scale(0.5)))
    torch.compile(Around(), backend=backend)(torch.ones(2, 4)).backward()
    (graph,) = backend.explain().graphs
    assert [str(edit.site) for edit in graph.edits] == ["error:inner/gelu"]
    assert "gradient:inner.fc.weight" in map(str, graph.sites)


def test_subclass_of_identity_names_its_value_in_the_oracle_too() -> None:
    class Marker(nn.Identity):
        pass

    net = nn.Sequential(nn.Linear(2, 2), Marker(), nn.Linear(2, 1)).double()
    x = torch.ones(1, 2, dtype=torch.float64)
    report = assert_matches_eager(net, gr.on("error:1", Scale(0.5)), x, compiled=False)
    assert report.changed == ("error:1",)


@pytest.mark.parametrize("fn", [torch.sgn, lambda h: h.repeat(0, 1)])
def test_error_that_reaches_nothing_is_no_site(fn: Callable[[Tensor], Tensor]) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.fc(x)
            return fn(h), h * 2.0

    model = gr.transform(Returns(), gr.on("error:*/*", Scale(0.5)))
    sum(out.sum() for out in model(torch.ones(1, 2))).backward()  # without a warning, which would be an error here
    (graph,) = model.explain().graphs
    assert [str(edit.site) for edit in graph.edits] == ["error:fc", "error:/mul"]
    assert torch.equal(model.fc.bias.grad, torch.full((2,), 0.5))
