"""Models and calls that once went wrong."""

from __future__ import annotations

import copy
import logging
import warnings
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue, Keep, Zero

from models.small import Lambda


def grads(model: nn.Module, *args: Tensor) -> list[Tensor]:
    model.zero_grad()
    out = model(*args)
    (out if isinstance(out, Tensor) else sum(o.sum() for o in out)).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def empty_policy_changes_nothing(model: nn.Module, *args: Tensor) -> None:
    wanted = grads(copy.deepcopy(model), *args)
    for policy in ([], lambda site: None):  # type: ignore[var-annotated]
        torch.testing.assert_close(grads(gr.transform(copy.deepcopy(model), policy), *args), wanted)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


# A forward that differentiates, maps or branches inside itself.


@pytest.mark.slow
def test_gradient_inside_the_forward() -> None:
    class Force(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.grad(lambda r: self.fc(r).tanh().sum())(x)

    empty_policy_changes_nothing(Force(), torch.randn(4))


@pytest.mark.slow
def test_autograd_inside_the_forward() -> None:
    class Penalty(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x).tanh()
            (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)
            return h.sum() + g.square().sum()

    x = torch.randn(3, 4, requires_grad=True)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        empty_policy_changes_nothing(Penalty(), x)
        model = Penalty()
        gr.transform(model, gr.on("error:fc", Zero()))(x).backward()
    assert not model.fc.bias.grad.any()


@pytest.mark.slow
def test_vmap_inside_the_forward() -> None:
    class Mapped(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(lambda row: self.fc(row).sin())(x) + self.fc(x)

    empty_policy_changes_nothing(Mapped(), torch.randn(3, 4))


@pytest.mark.slow
def test_branch_inside_the_graph() -> None:
    class Cond(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.fc(x),))

    empty_policy_changes_nothing(Cond(), torch.randn(3, 4))
    model = gr.transform(Cond(), gr.on("error:fc", [Zero(), Keep()]))
    assert [str(e.site) for e in model.trace(torch.randn(3, 4)).edits] == ["error:fc", "error:fc"]
    assert not any(g.any() for g in grads(model, torch.randn(3, 4)))
    assert [str(s) for s in model.monitor.kept()] == ["error:fc"]


def test_enable_grad_inside_no_grad() -> None:
    class Enabled(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return self.fc(x)

    model = gr.transform(Enabled(), gr.on("gradient:*", Zero()))
    with torch.no_grad():
        out = model(torch.ones(1, 4))
    assert out.requires_grad
    out.sum().backward()
    assert not model.fc.weight.grad.any()


# Layouts and views.


@pytest.mark.long
@pytest.mark.parametrize(
    "fn", [lambda g: g.mT.contiguous().mT, lambda g: (torch.eye(4) @ g.mT).mT, lambda g: g.flip(0), lambda g: g * 1]
)
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 4)])
def test_function_may_change_strides(fn: Any, shape: tuple[int, ...]) -> None:
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(*shape)
    by_hand = copy.deepcopy(plain)
    by_hand[0].register_forward_hook(lambda _, __, out: (out.register_hook(fn), None)[1])

    torch.testing.assert_close(grads(gr.transform(plain, gr.on("error:0", fn)), x), grads(by_hand, x))


def test_function_keeps_channels_last() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    model = gr.transform(plain, gr.on("error:0", lambda g: g.contiguous() * 2))
    wanted = [g * (2 if i < 2 else 1) for i, g in enumerate(grads(copy.deepcopy(plain), x))]

    torch.testing.assert_close(grads(model, x), wanted)


def test_view_of_another_output_is_said_to_be_out_of_reach() -> None:
    class Views(Net):
        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.Flatten(0)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            h = self.fc(x)
            return h, self.flat(h)

    model = gr.transform(Views(), gr.on("error:flat", Zero()))
    with pytest.warns(gr.RewriteWarning, match=r"error:flat: Zero\(\) cannot act.*views of the same memory.*clone"):
        model(torch.ones(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = gr.transform(Views(), gr.on("error:fc", Zero()))
        sum(output.sum() for output in model(torch.ones(2, 4))).backward()
    assert not model.fc.weight.grad.any()


# Tensor functions that are not what they seem.


@pytest.mark.broad
@pytest.mark.parametrize(
    "fn",
    [
        lambda g: torch.from_numpy(g.numpy() * 2),
        lambda g: torch.utils.dlpack.from_dlpack(g) * 2,
        lambda g: g * g.tolist()[0],
        lambda g: g + g.data_ptr(),
    ],
)
def test_function_that_leaves_torch_is_refused(fn: Any) -> None:
    with pytest.raises(gr.CallbackError, match=r"gradient:fc.weight.*(out of torch|could not be traced)"):
        gr.transform(Net(), gr.on("gradient:fc.weight", fn))(torch.ones(1, 4))


def test_callable_dataclasses_are_told_apart() -> None:
    @dataclass
    class Times:
        factor: InitVar[float]
        notes: list[str] = field(default_factory=list)

        def __post_init__(self, factor: float) -> None:
            self.run = lambda g: g * factor

        def __call__(self, g: Tensor) -> Tensor:
            return self.run(g)

    net = Lambda(lambda net, x: net.a(x) + net.b(x), a=nn.Linear(2, 2, bias=False), b=nn.Linear(2, 2, bias=False))
    model = gr.transform(net, [gr.on("gradient:a.*", Times(2.0)), gr.on("gradient:b.*", Times(5.0))])
    assert [g[0, 0].item() for g in grads(model, torch.ones(1, 2))] == [2.0, 5.0]


@pytest.mark.broad
@pytest.mark.parametrize("action", [ClipByNorm(1e39), ClipByGlobalNorm(1e300), ClipByValue(1e39)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bound_beyond_the_dtype_is_no_bound(action: Any, dtype: torch.dtype) -> None:
    plain, x = Net().to(dtype), torch.randn(2, 4, dtype=dtype)
    wanted = grads(copy.deepcopy(plain), x)

    torch.testing.assert_close(grads(gr.transform(plain, gr.on("gradient:*", action)), x), wanted, rtol=0, atol=0)


def test_policy_that_raises_names_the_site() -> None:
    def policy(site: gr.Site) -> None:
        raise ZeroDivisionError("oops")

    model = gr.transform(Net(), policy)
    for run in (model, model.trace):
        with pytest.raises(gr.PolicyError, match=r"activation:fc: the policy raised ZeroDivisionError: oops") as caught:
            run(torch.ones(1, 4))
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_error_does_not_grow_with_each_call() -> None:
    model = gr.transform(Net(), gr.on("error:fc", lambda g: g[:1]))
    lengths = []
    for _ in range(3):
        with pytest.raises(gr.CallbackError) as caught:
            model(torch.ones(2, 4))
        lengths.append(len(caught.traceback))
    assert lengths[1] == lengths[2]


def test_wrong_rule_leaves_buffers_and_random_state() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model, state = gr.transform(plain, gr.on("error:nonsense", Zero())), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(gr.NoSuchSiteError):
            model(torch.randn(3, 4, generator=torch.Generator()))
    assert plain[1].num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_models_own_error_is_told() -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("the batch is too small")

    with pytest.raises(gr.GraphBreakError, match=r"the batch is too small.*\n  test_models_and_calls.py:\d+"):
        gr.transform(Fails(), [])(torch.ones(1, 4))


@pytest.mark.broad
@pytest.mark.parametrize("name", ["", "*", "a#1", "a/b", "error:a"])
def test_tap_names_have_no_signs_of_patterns(name: str) -> None:
    class Tapped(Net):
        def forward(self, x: Tensor) -> Tensor:
            return gr.tap(self.fc(x), name)

    with pytest.raises(gr.PolicyError, match=r"gr\.tap"):
        gr.transform(Tapped(), [])(torch.ones(1, 4))


# What runs beside, inside or after.


@pytest.mark.broad
def test_nested_backward_keeps_its_records() -> None:
    model = gr.transform(Net(), gr.on("gradient:fc.weight", ClipByNorm(1e9)))
    x = torch.ones(1, 4, requires_grad=True)
    (checkpoint(model, x, use_reentrant=True).sum() + model(x).sum()).backward()

    latest = {"norm": 4.0, "bound": 1e9, "factor": 1.0}
    assert model.monitor.latest() == {f"{name}@gradient:fc.weight": value for name, value in latest.items()}


@pytest.mark.broad
@pytest.mark.parametrize(
    ("errors", "logged"), [((100.0, 1.0), [100]), ((1.0, 100.0), [100]), ((50.0, 100.0), [50, 100])]
)
def test_every_run_logs_its_own_figures(
    errors: tuple[float, ...], logged: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = gr.transform(Net(), gr.on("error:fc", ClipByValue(2.0, log=True)))
    with caplog.at_level(logging.INFO, "gradrewrite.monitor"):
        sum(e * model(torch.ones(1, 4)).sum() for e in errors).backward()

    assert sorted(caplog.messages) == sorted(f"layer=fc need clipping, max error={n} avg error={n}" for n in logged)


def test_callers_own_graph_is_no_skipped_region() -> None:
    before, model = nn.Linear(4, 4), gr.transform(Net(), gr.on("error:fc", Zero()), fullgraph=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", gr.RewriteWarning)
        model(before(torch.ones(1, 4))).sum().backward()
    assert not model.fc.weight.grad.any()


def test_wholly_skipped_forward_is_listed() -> None:
    class Skipped(Net):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    model = gr.transform(Skipped(), gr.on("error:fc", Zero()), fullgraph=False)
    with pytest.warns(gr.RewriteWarning) as caught:
        model(torch.ones(1, 4))
    assert any("outside the rewritten graphs" in str(w.message) for w in caught)
    assert any("Skipped.forward" in line for line in model.explain().skipped)


@pytest.mark.broad
def test_global_hook_registered_late_is_honoured_or_refused() -> None:
    model, x = gr.transform(Net(), []), torch.ones(1, 4)
    model(x)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, out: out * 0 if isinstance(module, nn.Linear) else None
    )
    try:
        wanted = model.original(x)
        assert torch.equal(model(x), wanted)
        assert not wanted.any()
    finally:
        handle.remove()
    assert model(x).any()


@pytest.mark.slow
def test_ninth_backend_of_one_function_is_announced() -> None:
    from gradrewrite.backends.backend import make_backend
    from gradrewrite.backends.engines import AotEager

    said, models = [], []
    for _ in range(torch._dynamo.config.recompile_limit):
        model = Net()
        models.append(model)  # what belongs to a deleted model does not count
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            backend = make_backend(gr.on("gradient:*", Zero()), None, AotEager())
            torch.compile(model, backend=backend)(torch.ones(1, 4)).sum().backward()
        assert not model.fc.weight.grad.any()
        said.append(any("recompile limit" in str(w.message) for w in caught))
    assert said[-1]
    assert not any(said[:-1])


@pytest.mark.inductor
def test_kept_gradient_survives_the_optimizer_compiled() -> None:
    model = gr.transform(Net(), gr.on("gradient:*", Keep()))
    model.compile()
    wanted = grads(model, torch.ones(2, 4))
    kept = list(model.monitor.kept().values())
    model.zero_grad(set_to_none=False)

    torch.testing.assert_close(kept, wanted, rtol=0, atol=0)
