"""Rewritten code out of AOTAutograd's cache: the same as compiled, and never that of another policy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache

import gradrewrite as gr
from gradrewrite._compat import inductor
from gradrewrite.passes import (
    MGDA,
    CheckFinite,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    Keep,
    Observe,
    Scale,
    UPGrad,
    WeighLosses,
    Zero,
)
from gradrewrite.policy.insertions import Insertion, ReplaceTensor
from gradrewrite.sites import Kind

from helpers import failure
from models.several_losses import SeveralLosses

pytestmark = pytest.mark.skipif(not inductor.knows_cache(), reason="its parts are private, and unknown of this torch")


class Net(nn.Module):
    def __init__(self, tap: str = "here") -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(4, 6), nn.Linear(6, 2), nn.Dropout(0.25)
        self.tap = tap

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(gr.tap(self.first(x), self.tap).relu())).square().sum()


@pytest.fixture(autouse=True)
def _own_cache() -> Iterator[None]:
    with fresh_cache():
        counters.clear()
        yield


def step(policy: Any, *, build: Callable[[], nn.Module] = Net, x: Tensor | None = None, **options: Any) -> Any:
    """Compile a new model and run a step; gradients, records, and whether the code came out of the cache."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = gr.transform(build(), policy, **options)
    model.compile()
    counters.clear()
    torch.manual_seed(1)
    model(torch.linspace(-1, 1, 12).reshape(3, 4) if x is None else x).backward()
    return model, [p.grad for p in model.parameters()], bool(counters["aot_autograd"]["autograd_cache_hit"])


CLIP = ClipByValue(1e-3)
POLICIES: dict[str, Any] = {
    "empty": [],
    "value": gr.on("error:first", CLIP),
    "norms": gr.on("gradient:*", ClipByNorm(0.01)),
    "global": [
        gr.on("gradient:*.weight", ClipByGlobalNorm(0.1)),
        gr.on("gradient:*.bias", ClipByGlobalNorm(0.2, group="b")),
    ],
    "checks": [gr.on("*", CheckFinite()), gr.on("*", Observe("norm", "zeros"))],
    "kept": gr.on("error:*", Keep()),
    "callback": lambda site: Scale(2.0) if site.kind == "error" and site.output_of else None,
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_hit_is_what_was_compiled(name: str) -> None:
    policy = POLICIES[name]
    cold, wanted, was_hit = step(policy)
    warm, got, is_hit = step(policy)

    assert (was_hit, is_hit) == (False, True)
    assert all(map(torch.equal, got, wanted))
    assert warm.monitor.latest() == cold.monitor.latest()
    assert warm.monitor.kept().keys() == cold.monitor.kept().keys()
    (report,), (known,) = warm.explain().graphs, cold.explain().graphs
    assert (report.sites, report.edits, report.is_whole) == (known.sites, known.edits, known.is_whole)
    if name == "value":
        assert report.edits[0].action is CLIP


def losses_step(policy: Any, tangents: tuple[float, float] = (1.0, 1.0)) -> tuple[Any, list[Tensor], bool]:
    """As ``step``, of a model with two losses."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = gr.transform(SeveralLosses(nn.Linear(4, 6), torch.ones(3, 4), 2), policy)
    model.compile()
    counters.clear()
    losses = model(torch.linspace(-1, 1, 12).reshape(3, 4))
    sum(t * loss for t, loss in zip(tangents, losses, strict=True)).backward()
    return model, [p.grad for p in model.parameters()], bool(counters["aot_autograd"]["autograd_cache_hit"])


def test_weighed_losses_out_of_the_cache() -> None:
    """With other tangents too, with records; another weighting, or none, is another code."""
    upgrad = gr.on("gradient:trunk.*", WeighLosses(UPGrad()))
    first, wanted, was_hit = losses_step(upgrad)
    warm, got, is_hit = losses_step(upgrad)
    assert (was_hit, is_hit) == (False, True)
    assert all(map(torch.equal, got, wanted))
    assert warm.monitor.latest() == first.monitor.latest()
    assert "loss_weight_1@group:default" in warm.monitor.latest()
    assert warm.explain().graphs[0].loss_nodes == first.explain().graphs[0].loss_nodes
    scaled, _, is_hit = losses_step(upgrad, (2.0, 1.0))
    assert is_hit
    assert scaled.monitor.latest()["loss_norm_0@group:default"] == pytest.approx(
        2 * first.monitor.latest()["loss_norm_0@group:default"]
    )
    others = [
        WeighLosses(MGDA()),
        WeighLosses(UPGrad(reg_eps=0.5)),
        WeighLosses(lambda g: 3 * g.diagonal() / g.trace()),
    ]
    for action in others:
        _, found, is_hit = losses_step(gr.on("gradient:trunk.*", action))
        assert not is_hit
        assert not torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("keys", [("energy", "forces"), ("first", "second")])
def test_names_of_losses_are_a_part_of_the_key(keys: tuple[str, str]) -> None:
    class Named(SeveralLosses):
        def forward(self, x: Tensor) -> Any:
            return dict(zip(keys, super().forward(x), strict=True))

    torch.manual_seed(0)
    torch._dynamo.reset()
    policy = gr.on("gradient:trunk.weight", [Observe("norm"), Keep(), WeighLosses(UPGrad())])
    model = gr.transform(Named(nn.Linear(4, 6), torch.ones(3, 4), 2), policy)
    model.compile()
    sum(model(torch.linspace(-1, 1, 12).reshape(3, 4)).values()).backward()
    for key in keys:
        (kept,) = model.monitor.kept(loss=key).values()
        assert model.monitor.latest()[f"norm@gradient:trunk.weight[{key}]"] == pytest.approx(float(kept.norm()))


def test_another_output_than_the_losses_is_refused_out_of_the_cache_too() -> None:
    class WithFeatures(SeveralLosses):
        def forward(self, x: Tensor) -> Any:
            return *super().forward(x), self.trunk(x)

    for is_hit in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        plain = WithFeatures(nn.Linear(4, 6), torch.ones(3, 4), 2)
        model = gr.transform(plain, gr.on("gradient:trunk.*", WeighLosses(UPGrad())))
        model.compile()
        counters.clear()
        one, two, features = model(torch.ones(3, 4))
        assert bool(counters["aot_autograd"]["autograd_cache_hit"]) == is_hit
        with pytest.raises(gr.PolicyError, match="receive"):
            (one + two + features.sum()).backward()


@pytest.mark.sample(12)
def test_every_policy_gets_its_own_code() -> None:
    policies = [
        *POLICIES.values(),
        gr.on("error:first", ClipByValue(2e-3)),
        gr.on("error:here", ClipByValue(2e-3)),
        gr.on("error:second", ClipByValue(2e-3)),
        [gr.on("error:first", Scale(3.0)), gr.on("error:first", ClipByValue(2e-3))],
        [gr.on("error:first", ClipByValue(2e-3)), gr.on("error:first", Scale(3.0))],
        gr.on("gradient:*", ClipByGlobalNorm(0.1)),
        gr.on("gradient:*", ClipByNorm(0.1)),
        gr.on("gradient:first.weight", Zero()),
        gr.on("gradient:*", Scale(-1.0)),
    ]
    for _ in range(2):
        for policy in policies:
            torch.manual_seed(0)
            reference = gr.transform(Net().eval(), policy)
            _, got, _ = step(policy, build=lambda: Net().eval())
            reference(torch.linspace(-1, 1, 12).reshape(3, 4)).backward()
            for mine, other in zip(got, reference.parameters(), strict=True):
                torch.testing.assert_close(mine, other.grad, equal_nan=True)


def test_answers_decide_not_the_callback() -> None:
    bound = 1e-3

    def policy(site: gr.Site) -> Any:
        return ClipByValue(bound) if site.kind == "error" else None

    step(policy)
    assert step(policy)[2]
    bound, other = 2e-3, ClipByValue(2e-3)
    _, got, is_hit = step(policy)

    assert not is_hit
    assert all(map(torch.equal, got, step([gr.on("error:*", other), gr.on("error:*/*", other)])[1]))


def test_a_policy_is_asked_once_a_site() -> None:
    asked: list[str] = []

    def policy(site: gr.Site) -> Any:
        asked.append(str(site))
        return Scale(0.5) if site.kind == "gradient" else None

    for _ in range(3):
        step(policy)
        assert len(asked) == len(set(asked))
        asked.clear()
    for other in (lambda site: Zero(), lambda site: lambda g: g):  # an answer that is new, and one without a hash
        step(lambda site, other=other: (policy(site), other(site))[1] if site.kind == "gradient" else policy(site))
        assert len(asked) == len(set(asked))
        asked.clear()


class Double:
    kinds: frozenset[Kind] = frozenset(("error",))

    def at(self, site: gr.Site) -> Insertion:
        return Insertion(self, ReplaceTensor(lambda tensor: 2 * tensor), self.kinds, has_units=True)


def recorded(g: Tensor) -> Tensor:
    gr.record("size", g.abs().amax())
    return g


@pytest.mark.parametrize(
    "policy",
    [
        gr.on("error:*", lambda g: 2 * g),
        gr.on("error:*", recorded),
        gr.on("error:first", ClipByValue(torch.tensor(1e-3))),
        gr.on("gradient:*", ClipByNorm(torch.tensor(0.1))),
        gr.on("error:first", Double()),
    ],
    ids=["function", "record", "live bound", "live norm", "action of the user"],
)
def test_code_and_tensors_of_the_user_are_not_stored(policy: Any) -> None:
    step(policy)
    _, wanted, is_hit = step(policy)

    assert not is_hit
    assert all(map(torch.equal, wanted, step(policy)[1]))


def test_a_loss_scale_is_not_stored() -> None:
    for _ in range(2):
        assert not step(gr.on("error:first", CLIP), loss_scale=torch.tensor(8.0))[2]


def test_names_are_a_part_of_the_key() -> None:
    policy = gr.on("error:*", Observe("norm"))
    step(policy)
    model, _, _ = step(policy, build=lambda: Net("there"))

    assert "norm@error:there" in model.monitor.latest()


def test_a_failed_check_of_code_from_the_cache_is_replayed() -> None:
    class Root(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (x - 1).clamp(min=0).mul(self.second.bias[0]).abs().sqrt().sum()

    policy = gr.on("gradient:*", CheckFinite())
    texts = []
    for wants_hit in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        counters.clear()
        model = gr.transform(Root(), policy)
        model.compile()
        texts.append(failure(lambda model=model: model(torch.ones(3, 4)).backward()))
        assert bool(counters["aot_autograd"]["autograd_cache_hit"]) == wants_hit

    assert str(texts[1]) == str(texts[0])
    assert texts[1].op == "/sqrt"
    assert not texts[1].note


def test_compiled_autograd_is_refused_on_a_hit() -> None:
    policy = gr.on("gradient:*", CheckFinite())
    step(policy)
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = gr.transform(Net(), policy)
    model.compile()
    counters.clear()
    loss = model(torch.ones(3, 4))
    assert counters["aot_autograd"]["autograd_cache_hit"]

    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        with pytest.raises(gr.NotRewrittenError, match="compiled autograd"):
            loss.backward()


def test_warnings_come_on_a_hit_too() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Any:
            v = self.fc(x).view(-1)
            return v[:6].sum() + v[6:].sum(), v

    said = []
    for _ in range(2):
        torch._dynamo.reset()
        model = gr.transform(Returns(), gr.on("error:*", CLIP))
        model.compile()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sum(part.sum() for part in model(torch.ones(2, 4))).backward()
        said.append(sorted(str(w.message) for w in caught))

    assert said[0] == said[1]


@pytest.mark.sample(12)
def test_parts_of_a_model_and_symbolic_sizes() -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            torch._dynamo.graph_break()
            return self.second(h.relu()).square().sum()

    policy = gr.on("error:*", ClipByValue(1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = step(policy, build=Broken, fullgraph=False)
        got = step(policy, build=Broken, fullgraph=False)
    assert got[2]
    assert all(map(torch.equal, got[1], wanted[1]))

    sizes = [step(policy, dynamic=True, x=torch.ones(n, 4)) for n in (3, 3, 5)]
    assert not any(is_hit for *_, is_hit in sizes)


def test_an_unreadable_file_is_written_again(caplog: pytest.LogCaptureFixture) -> None:
    policy = gr.on("error:first", CLIP)
    _, wanted, _ = step(policy)
    (path,) = (p for p in Path(cache_dir(), "gradrewrite", "sites").rglob("*") if p.is_file())
    path.write_bytes(b"nonsense")
    _, got, is_hit = step(policy)

    assert not is_hit
    assert "cannot be read" in caplog.text
    assert all(map(torch.equal, got, wanted))
    assert step(policy)[2]
