"""Bad input gets an error that names the site, what was found, and the way out; the model stays as it was."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, ClipByValue

from helpers import mostly_slow
from models.small import Lambda


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


def fails(policy: Any, error: type[Exception], match: str) -> BaseException:
    """The policy fails in ``trace``, op by op, and through a plain torch.compile; the model stays usable."""
    plain, x = Net(), torch.randn(3, 4)
    state = {k: v.clone() for k, v in plain.state_dict().items()}
    model = gr.transform(plain, policy)
    with pytest.raises(error, match=match):
        model.trace(x)
    for _ in range(2):
        with pytest.raises(error, match=match):
            model(x).sum().backward()
    compiled = torch.compile(plain, backend=gr.backend(policy))
    with pytest.raises(error, match=match) as caught:
        compiled(x).sum().backward()
    assert all(torch.equal(v, state[k]) for k, v in plain.state_dict().items())
    assert not any(m._forward_hooks for m in plain.modules())
    gr.transform(plain, [])(x).sum().backward()
    assert plain.decoder.weight.grad is not None
    return caught.value


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "match"),
    mostly_slow(
        [
            (1, r"activation:encoder: a policy answers with .* got 1"),
            ("clip", r"activation:encoder.*'clip'"),
            (ClipByValue, r"activation:encoder.*class ClipByValue.*ClipByValue\(\.\.\.\)"),
            ([None, 3], r"activation:encoder.*got 3"),
        ],
        1,
    ),
)
def test_nonsense_answer(answer: Any, match: str) -> None:
    fails(lambda site: answer, gr.PolicyError, match)


@pytest.mark.parametrize("policy", [1, None, "error:*", ClipByValue(1.0), [ClipByValue(1.0)], ClipByValue])
@pytest.mark.pure
def test_no_policy(policy: Any) -> None:
    with pytest.raises(gr.PolicyError):
        gr.transform(Net(), policy)
    with pytest.raises(gr.PolicyError):
        gr.backend(policy)


@pytest.mark.slow
def test_action_at_a_wrong_kind() -> None:
    fails(
        gr.on("activation:encoder", ClipByValue(1.0)),
        gr.PolicyError,
        r"activation:encoder: ClipByValue.*error, gradient, input",
    )
    fails(gr.on("error:encoder", ClipByGlobalNorm(1.0)), gr.PolicyError, r"error:encoder: ClipByGlobalNorm.*gradient")
    fails(gr.on("activation:encoder", lambda g: g), gr.PolicyError, r"activation:encoder.*does not apply")


@pytest.mark.slow
def test_rule_without_a_kind_keeps_to_where_it_may_stand() -> None:
    graph = gr.transform(Net(), gr.on("*", ClipByValue(1.0))).trace(torch.randn(3, 4))

    assert {e.site.kind for e in graph.edits} == {"error", "gradient"}


@pytest.mark.inductor
def test_pattern_that_matches_nothing_names_the_nearest() -> None:
    caught = fails(
        gr.on("error:decodr", ClipByValue(1.0)), gr.NoSuchSiteError, r"'error:decodr'; nearest sites: error:decoder,"
    )
    assert isinstance(caught, LookupError)
    copied = pickle.loads(pickle.dumps(caught))
    assert str(copied) == str(caught)
    fails(gr.on("gradient:*.wieght", ClipByValue(1.0)), gr.NoSuchSiteError, r"gradient:\w+\.weight")


def test_second_name_of_a_tied_parameter_leads_to_the_first() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)
            self.head.weight = self.encoder.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(super().forward(x) @ torch.ones(2, 4))

    with pytest.raises(gr.NoSuchSiteError, match=r"'gradient:head.weight'; nearest sites: gradient:encoder.weight,"):
        gr.transform(Tied(), gr.on("gradient:head.weight", ClipByValue(1.0)))(torch.ones(1, 4))


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.actor, self.critic = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc(x))
        return self.actor(h).sum() + self.critic(h).sum()


@pytest.mark.broad
@pytest.mark.parametrize(
    ("pattern", "first", "listed"),
    [
        ("error:*->critic", "error:/relu->critic", ["*->*", "*/*->*"]),
        ("error:fc->critic", "error:/relu->critic", ["*->*", "*/*->*"]),
        ("error:fc->/tanh", "error:fc->/relu", ["*->*/*", "*/*->*/*"]),
    ],
)
def test_a_use_that_is_not_there_names_those_of_its_destination(pattern: str, first: str, listed: list[str]) -> None:
    x = torch.randn(3, 4)
    with pytest.raises(gr.NoSuchSiteError) as caught:
        gr.transform(ActorCritic(), gr.on(pattern, ClipByValue(1.0))).trace(x)

    assert caught.value.known[0] == first
    assert f"gr.transform(model, [], uses={listed})".replace("'", '"') in str(caught.value)
    assert first in map(str, gr.transform(ActorCritic(), [], uses=listed).trace(x).sites)


def test_module_without_a_value_warns() -> None:
    model = gr.transform(Net(), gr.on("error:unused", ClipByValue(1.0)))
    with pytest.warns(gr.RewriteWarning, match=r"'error:unused' matches unused"):
        model(torch.randn(3, 4))


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [("gradient:encoder", "gradient:encoder.weight, gradient:encoder.bias"), ("input:decoder", ""), ("input:z", "")],
)
def test_name_of_another_kind_is_no_site(pattern: str, nearest: str) -> None:
    model = gr.transform(Net(), gr.on(pattern, ClipByValue(1.0)))

    with pytest.raises(gr.NoSuchSiteError, match=f"'{pattern}'; nearest sites: {nearest}"):
        model.trace(torch.randn(3, 4))


@pytest.mark.broad
@pytest.mark.parametrize("pattern", ["input:x", "input:*"])
def test_input_that_needs_no_gradient_warns(pattern: str) -> None:
    model = gr.transform(Net(), gr.on(pattern, ClipByValue(1.0)))

    with pytest.warns(gr.RewriteWarning, match="matches x, which made no differentiable value"):
        model.trace(torch.randn(3, 4))
    assert model.trace(torch.randn(3, 4, requires_grad=True)).edits


def test_frozen_parameter_warns() -> None:
    net = Net()
    net.decoder = nn.Linear(4, 2, bias=False)
    net.encoder.bias.requires_grad_(False)
    model = gr.transform(net, gr.on("gradient:*.bias", ClipByValue(1.0)))

    with pytest.warns(gr.RewriteWarning, match=r"'gradient:\*\.bias' matches encoder.bias"):
        model.trace(torch.randn(3, 4))


def test_rules_are_not_checked_without_a_backward() -> None:
    model = gr.transform(Net(), gr.on("error:nonsense", ClipByValue(1.0)))
    with torch.no_grad():
        model(torch.randn(3, 4))
    with pytest.raises(gr.NoSuchSiteError):
        model(torch.randn(3, 4))


@pytest.mark.parametrize("pattern", ["eror:*", "error:decoder#x", "", None])
@pytest.mark.pure
def test_malformed_pattern(pattern: Any) -> None:
    with pytest.raises(ValueError, match="pattern"):
        gr.on(pattern, ClipByValue(1.0))
    with pytest.raises(ValueError, match="pattern"):
        gr.Site("error", "x").matches(pattern)


def branch(g: Tensor) -> Tensor:
    return g * 2 if g.sum() > 0 else g


def reads(g: Tensor) -> Tensor:
    return g * g.max().item()


def fails_itself(g: Tensor) -> Tensor:
    raise KeyError("oops")


STATE = torch.zeros(1)


def counts(g: Tensor) -> Tensor:
    STATE.add_(1)
    return g


@pytest.mark.long
@pytest.mark.parametrize(
    ("fn", "match"),
    mostly_slow(
        [
            (lambda g: g[:1], r"^error:encoder: .* changed the shape from \(3, 4\) to \(1, 4\)"),
            (lambda g: g.double(), r"changed the dtype from torch.float32 to torch.float64.*\.to\(torch.float32\)"),
            (lambda g: g.to("meta"), r"changed the device from cpu to meta"),
            (lambda g: None, "returned NoneType"),
            (lambda g: [g], "returned list"),
            (branch, r"^test_errors.py:\d+ \"return .*\": error:encoder: .* branch reads a value .*torch.where"),
            (reads, r"^test_errors.py:\d+ \".*\": .*\.item\(\)"),
            (fails_itself, "fails_itself could not be traced: KeyError: 'oops'"),
            (lambda g: g + torch.randn_like(g), r"random op aten"),
            (lambda g: torch.nn.functional.dropout(g, 0.5, training=True), "random op"),
            (lambda g: g * torch.rand(()), "random op"),
            (counts, "changes a tensor that it closes over"),
            (lambda g: gr.record("x", g) or g, "a record is one real number"),  # type: ignore[func-returns-value]
        ],
        3,
    ),
)
def test_tensor_function_that_breaks_its_contract(fn: Callable[[Tensor], Any], match: str) -> None:
    caught = fails(gr.on("error:encoder", fn), gr.CallbackError, match)
    assert "error:encoder" in str(caught) + "".join(getattr(caught, "__notes__", []))


@pytest.mark.slow
def test_callback_error_keeps_its_cause() -> None:
    caught = fails(gr.on("error:encoder", fails_itself), gr.CallbackError, "oops")
    assert isinstance(caught.__cause__, KeyError)
    assert not STATE.any()


def test_tensor_function_may_change_its_argument_in_place() -> None:
    model, x = Net(), torch.randn(3, 4)
    gr.transform(model, gr.on("error:decoder", lambda g: g.mul_(2.0)))(x).sum().backward()
    got = model.decoder.weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()

    torch.testing.assert_close(got, 2 * model.decoder.weight.grad)


def test_sparse_gradient() -> None:

    x = torch.tensor([1, 2, 2])
    plain = Lambda(lambda net, x: net.head(net.table(x)), table=nn.Embedding(7, 3, sparse=True), head=nn.Linear(3, 2))
    with pytest.raises(TypeError, match=r"gradient:table.weight.*sparse"):
        gr.transform(plain, gr.on("gradient:table.weight", ClipByValue(1.0)))(x).sum().backward()
    with pytest.raises(TypeError, match=r"gradient:table.weight.*sparse"):
        gr.transform(plain, gr.on("gradient:*", ClipByGlobalNorm(1.0)))(x).sum().backward()
    plain.zero_grad()
    gr.transform(plain, gr.on("error:head", ClipByValue(0.5)))(x).sum().backward()
    got = plain.table.weight.grad
    assert got.is_sparse
    (wanted,) = torch.autograd.grad(plain(x).sum(), [plain.table.weight])
    torch.testing.assert_close(got.to_dense(), wanted.to_dense() * 0.5)


def test_error_in_the_policy_itself_passes() -> None:
    def policy(site: gr.Site) -> None:
        raise ZeroDivisionError(f"at {site}")

    with pytest.raises(Exception, match=r"ZeroDivisionError|at activation:encoder"):
        gr.transform(Net(), policy)(torch.randn(3, 4))


def test_nothing_to_trace() -> None:
    plain = Net().requires_grad_(False)
    model = gr.transform(plain, gr.on("error:*", ClipByValue(1.0)))
    with pytest.raises(gr.TraceError, match="requires_grad"):
        model.trace(torch.randn(3, 4))
    assert torch.equal(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))
