"""Facts about torch's run time that checks, replays and guards lean on; a failure here says that torch has changed."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gradrewrite._compat import autograd, operators, optimizers


@pytest.mark.pure
def test_error_in_a_callback_at_the_end_reaches_the_caller() -> None:
    x = torch.ones(2, requires_grad=True)

    def fail() -> None:
        assert x.grad is not None  # gradients are accumulated by then
        raise KeyError("end")

    def at(g: Tensor) -> None:
        autograd.at_end_of_backward(fail)

    y = x * 2
    y.register_hook(at)
    with pytest.raises(KeyError, match="end"):
        y.sum().backward()


def test_a_hook_of_an_output_sees_no_gradient_where_none_flows() -> None:
    """AOTAutograd's backward is given zeros for it."""
    seen: dict[str, Tensor | None] = {}

    @torch.compile(backend="aot_eager", fullgraph=True)
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().sum(), x.cos()

    x = torch.ones(2, requires_grad=True)
    for reads_both in (False, True):
        loss, other = fn(x)
        other.register_hook(lambda g: seen.update(other=g))
        (loss + other.sum() if reads_both else loss).backward()
        assert (seen.get("other") is not None) == reads_both


@pytest.mark.pure
def test_storage_is_known_weakly() -> None:
    x = torch.ones(3)
    ref, view = StorageWeakRef(x.untyped_storage()), x[1:]
    assert StorageWeakRef(view.untyped_storage()).cdata == ref.cdata
    assert not ref.expired()
    del x, view
    assert ref.expired()


@pytest.mark.pure
def test_grad_scaler_has_its_scale_in_place() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    assert optimizers.scale_of(scaler) is None
    scaler.scale(torch.ones(()))
    scale = optimizers.scale_of(scaler)
    assert scale is not None
    assert float(scale) == 4.0
    assert optimizers.scale_of(torch.amp.GradScaler("cpu", enabled=False)) is None


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.pure
def test_21_fused_optimizers_skip_on_the_device(make: type[torch.optim.Optimizer]) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = make([p], lr=0.1, fused=True)  # type: ignore[call-arg]
    if make is torch.optim.Adagrad and not hasattr(optimizer, "_step_supports_amp_scaling"):
        pytest.skip("its kernel reads found_inf from torch 2.13 on; before, the guard reads on the host")
    assert optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]
    p.grad = torch.full((3,), torch.nan)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert p.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.pure
def test_38_fused_optimizers_divide_gradients_and_store_them(make: type[torch.optim.Optimizer]) -> None:
    """Unless the update is skipped; a divisor of 1 changes no bit."""
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, other = (make([each], lr=0.1, fused=True) for each in (p, q))  # type: ignore[call-arg]
    if not hasattr(optimizer, "_step_supports_amp_scaling"):
        pytest.skip("its kernel reads grad_scale from torch 2.13 on; before, the guard multiplies in place")
    for scale, found in ((3.0, 0.0), (1.0, 0.0), (3.0, 1.0)):
        grad = torch.randn(3)
        p.grad, q.grad = grad.clone(), grad / scale
        optimizer.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(found)  # type: ignore[attr-defined]
        optimizer.step()
        assert torch.equal(p.grad, grad if found else grad / scale)
        if not found:
            other.step()
        assert torch.equal(p, q)


@pytest.mark.pure
def test_grad_scaler_steps_from_a_frame_of_its_own() -> None:
    """There the guard finds it; with a fused optimizer it hands its scale on, unless gradients are unscaled already."""

    class Seen(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            found.append((optimizers.scaler_in_use(), getattr(self, "grad_scale", "none")))

    for fused in (False, True):
        for unscales in (False, True):
            found: list[tuple[object, object]] = []
            p = nn.Parameter(torch.ones(3))
            optimizer = Seen([p], lr=0.1, fused=fused)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(p.sum()).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            ((seen, scale),) = found
            assert seen is scaler
            assert scale == (("none" if not fused else None) if unscales or not fused else 4.0)
            assert torch.equal(p.grad, torch.ones(3) * (4.0 if fused and not unscales else 1.0))
            optimizer.step()
            assert found[1][0] is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.pure
def test_products_with_a_wide_number_in_host_memory_are_rounded_once(dtype: torch.dtype) -> None:
    x, factor = torch.randn(1000).to(dtype), torch.tensor(0.123456789)
    got = x.clone()
    torch._foreach_mul_([got], factor)
    assert torch.equal(got, (x.float() * factor).to(dtype))


@pytest.mark.pure
def test_first_step_of_fused_sgd_makes_its_buffers_in_the_kernel() -> None:
    """So a skipped first step would leave them uninitialised: the guard reads the verdict on the host there."""
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, fused=True)
    assert optimizer.state[p].get("momentum_buffer") is None
    p.grad = torch.ones(3)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert optimizer.state[p]["momentum_buffer"] is not None


@pytest.mark.pure
def test_schedulers_want_a_bound_method() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert vars(optimizer.step)["_wrapped_by_lr_sched"]
    assert isinstance(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step, types.MethodType)


@pytest.mark.inductor
@pytest.mark.parametrize("mode", ["rand", "randn"])
def test_random_numbers_of_compiled_code_are_drawn_from_seeds(mode: str) -> None:
    """A replay draws the seeds as compiled code does, and lets Inductor make numbers of them."""

    def draw() -> Tensor:
        return getattr(torch, mode)(5, 7) * 1.0

    torch.manual_seed(3)
    wanted = torch.compile(draw)()
    graph = torch.fx.Graph()
    seeds = graph.call_function(torch.ops.prims.inductor_seeds.default, (1, torch.device("cpu")))
    node = graph.call_function(torch.ops.prims.inductor_random.default, ([5, 7], seeds, mode))
    torch.manual_seed(3)
    all_seeds = operators.run_node(seeds, (1, torch.device("cpu")), {})
    got = operators.run_node(node, ([5, 7], all_seeds[0], mode), {})
    assert torch.equal(got, wanted)


_STEPPING: dict[str, Any] = {
    f"{name} {form}": (getattr(torch.optim, name), {form: True} if form != "loop" else {"foreach": False})
    for name in ("Adam", "AdamW", "SGD", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
    for form in ("loop", "foreach", *["fused"] * (name in ("Adam", "AdamW", "SGD", "Adagrad")))
}


@pytest.mark.parametrize("case", _STEPPING)
def test_optimizers_leave_gradients_as_they_are(case: str) -> None:
    """``Hold`` is given ``.grad`` behind the update: the gradient that was used."""
    make, options = _STEPPING[case]
    own = [nn.Parameter(torch.randn(3, 2)) for _ in range(2)]
    optimizer = make(own, lr=0.1, weight_decay=0.1, **options) if "Rprop" not in case else make(own, lr=0.1, **options)
    for _ in range(3):
        for p in own:
            p.grad = torch.randn_like(p)
        kept = [p.grad.clone() for p in own if p.grad is not None]
        optimizer.step()
        for p, g in zip(own, kept, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, g)
