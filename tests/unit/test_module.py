"""RewrittenModule behaves as the module it wraps, and never loses its policy in silence."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gradrewrite as gr
from gradrewrite.backends.model_state import state_of
from gradrewrite.passes import ClipByGlobalNorm, ClipByValue, Keep, Scale, Zero

from helpers import CASES, gradient, make_case, run_case

DOUBLE = gr.on("gradient:*", Scale(2.0))
GLOBAL = gr.on("gradient:*", ClipByGlobalNorm(0.1))


@pytest.mark.pure
def test_shares_parameters_and_state(plain: nn.Module) -> None:
    model = gr.transform(plain, DOUBLE)

    assert model.original is plain
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(a is b for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]


@pytest.mark.long
def test_saves_and_loads(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, DOUBLE)
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    other = gr.transform(copy.deepcopy(plain), DOUBLE)
    with torch.no_grad():
        other.get_submodule("0").weight.zero_()
    other.load_state_dict(torch.load(stream))

    assert torch.equal(other(x), model(x))


@pytest.mark.long
def test_deepcopy_keeps_policy_and_shares_nothing_else(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, DOUBLE)
    wanted = gradient(model, x)
    other = copy.deepcopy(model)

    assert torch.equal(gradient(other, x), wanted)
    assert other.original is not plain
    assert other.monitor is not model.monitor
    assert not {id(p) for p in other.parameters()} & {id(p) for p in plain.parameters()}


@pytest.mark.long
def test_pickles_with_its_policy(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, DOUBLE)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    other = torch.load(stream, weights_only=False)

    assert torch.equal(gradient(other, x), gradient(model, x))


@pytest.mark.long
def test_train_and_eval_reach_the_original(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, DOUBLE)

    assert model.train().original.training
    assert plain[2].training
    assert not model.eval().training
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))
    plain.eval()
    assert not model.training


@pytest.mark.pure
def test_unknown_attributes_are_the_originals(plain: nn.Module) -> None:
    plain.config = {"width": 3}
    model = gr.transform(plain, DOUBLE)

    assert model.config is plain.config
    model.scale = 2.0
    assert plain.scale == 2.0
    del model.scale
    assert not hasattr(plain, "scale")
    with pytest.raises(AttributeError, match="nonsense"):
        _ = model.nonsense


def test_moves_with_to(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, DOUBLE).to(torch.float64)

    assert plain[0].weight.dtype == torch.float64
    assert gradient(model, x.double()).dtype == torch.float64


@pytest.mark.slow
def test_forward_is_that_of_the_plain_model() -> None:
    case = CASES["transformer"]
    plain, inputs = make_case(case, torch.float32)
    out, _ = run_case(case, copy.deepcopy(plain).train(), inputs)
    got, _ = run_case(case, gr.transform(plain.train(), gr.on("error:*", Zero())), inputs)

    assert torch.equal(out, got)


@pytest.mark.long
def test_buffers_are_those_of_the_plain_model() -> None:
    case = CASES["cnn"]
    plain, inputs = make_case(case, torch.float32)
    other = copy.deepcopy(plain)
    run_case(case, other, inputs)
    run_case(case, gr.transform(plain, gr.on("error:*", Zero())), inputs)

    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), other.buffers(), strict=True))


@pytest.mark.long
def test_second_transform_has_its_own_policy(plain: nn.Module, x: Tensor) -> None:
    wanted = gradient(plain, x)
    once, twice = gr.transform(plain, []), gr.transform(plain, DOUBLE)

    torch.testing.assert_close(gradient(twice, x), 2 * wanted)
    torch.testing.assert_close(gradient(once, x), wanted)
    torch.testing.assert_close(gradient(plain, x), wanted)


@pytest.mark.slow
def test_twenty_transforms_keep_their_policies(x: Tensor) -> None:
    base = nn.Linear(4, 3)
    wanted = gradient(base, x)
    models = [(n, gr.transform(base, gr.on("gradient:*", Scale(float(n))))) for n in range(1, 8)]
    models += [(n, gr.transform(copy.deepcopy(base), gr.on("gradient:*", Scale(float(n))))) for n in range(8, 15)]
    for n in range(15, 21):
        fresh = nn.Linear(4, 3)
        fresh.load_state_dict(base.state_dict())
        models.append((n, gr.transform(fresh, gr.on("gradient:*", Scale(float(n))))))

    for n, model in [*models, *reversed(models)]:
        torch.testing.assert_close(gradient(model, x), n * wanted)


@pytest.mark.slow
def test_second_shape_and_no_grad(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, DOUBLE)
    for rows in (5, 3, 7):
        part = torch.randn(rows, 4)
        torch.testing.assert_close(gradient(model, part), 2 * gradient(plain, part))
        with torch.no_grad():
            assert torch.equal(model(part), plain(part))
    with torch.inference_mode():
        assert torch.equal(model(x), plain(x))


def test_dynamic_shapes_reach_the_policy_as_none(x: Tensor) -> None:
    seen: list[tuple[int | None, ...]] = []

    def policy(site: gr.Site) -> None:
        seen.append(site.shape)

    plain = nn.Linear(4, 3)
    model = gr.transform(plain, [policy, gr.on("error:/linear", lambda g: g / g.shape[0])], dynamic=True)
    gradient(model, x)
    with pytest.warns(gr.RewriteWarning, match="answered None at every site"):
        gradient(model, x)
    for rows in (5, 6, 9):
        part = torch.randn(rows, 4)
        torch.testing.assert_close(gradient(model, part), gradient(plain, part) / rows)

    assert (None, 3) in seen
    assert len(model.explain().graphs) == 1


@pytest.mark.long
def test_trace_changes_nothing(plain: nn.Module, x: Tensor) -> None:
    plain.train()
    model = gr.transform(plain, DOUBLE)
    state = {k: v.clone() for k, v in plain.state_dict().items()}
    random = torch.get_rng_state()
    graph = model.trace(x)
    counters.clear()

    assert graph.edits
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(v, state[k]) for k, v in plain.state_dict().items())
    assert all(p.grad is None for p in plain.parameters())
    assert not any(m._forward_hooks for m in plain.modules())
    assert not model.explain().graphs
    wanted = gradient(plain.eval(), x)
    torch.testing.assert_close(gradient(model, x), 2 * wanted)


@pytest.mark.long
def test_trace_is_the_same_compiled_or_not(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, gr.on("error:1", ClipByValue(0.1)))
    before = model.trace(x)
    gradient(model, x)
    after = model.trace(x)

    assert before.code == after.code
    assert before.edits == after.edits


@pytest.mark.slow
def test_late_forward_hook_is_honoured(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, DOUBLE)
    gradient(model, x)
    handle = plain[0].register_forward_hook(lambda _, __, out: out * 3)
    wanted = gradient(plain, x)

    torch.testing.assert_close(gradient(model, x), 2 * wanted)
    handle.remove()
    torch.testing.assert_close(gradient(model, x), 2 * gradient(plain, x))


def test_late_backward_hook_is_honoured_or_refused(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, DOUBLE)
    gradient(model, x)
    plain[0].register_full_backward_hook(lambda _, __, out: (out[0] * 3,) if out[0] is not None else None)
    calls: list[int] = []
    plain[3].register_full_backward_hook(lambda *_: calls.append(1))
    with pytest.raises(gr.GraphBreakError, match="hook"):
        gradient(model, x)
    assert not calls


@pytest.mark.long
def test_late_parameter_hook_is_honoured(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, DOUBLE)
    gradient(model, x)
    plain[0].weight.register_hook(lambda g: g * 10)

    torch.testing.assert_close(gradient(model, x), 2 * gradient(plain, x))


def test_identity_hooks_cost_no_recompilation(x: Tensor) -> None:
    model = gr.transform(nn.Sequential(nn.Linear(4, 3), nn.Identity()), gr.on("error:1", Zero()))
    assert not gradient(model, x).any()
    counters.clear()
    gradient(model, x)

    assert not counters["frames"]


@pytest.mark.pure
def test_compile_takes_no_backend(plain: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"gr\.backend"):
        gr.transform(plain, []).compile(backend="inductor")
    with pytest.raises(TypeError):
        gr.transform(plain, []).compile(nonsense=1)


@pytest.mark.broad
@pytest.mark.parametrize(
    "arguments",
    [{"options": {"nonsense": 1}}, {"mode": "nonsense"}, {"mode": "default", "options": {"max_autotune": 1}}],
)
def test_compile_refuses_at_once(arguments: dict[str, Any], plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, gr.on("gradient:*", Zero()))
    with pytest.raises(RuntimeError):
        model.compile(**arguments)

    assert not gradient(model, x).any()  # op by op, as before


@pytest.mark.pure
def test_compile_again_takes_the_new_arguments_alone(plain: nn.Module) -> None:
    model = gr.transform(plain, [], fullgraph=True)
    model.compile(fullgraph=False, dynamic=True, options={"max_fusion_size": 2})
    model.compile(mode="reduce-overhead")
    copied = copy.deepcopy(model)

    for one in (model, copied):
        state = state_of(one)
        assert state is not None
        assert (state.session.config.fullgraph, state.session.config.dynamic) == (True, None)
        assert state.compile_options == {"mode": "reduce-overhead"}


@pytest.mark.pure
def test_transform_takes_one_module(plain: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"gr\.backend"):
        gr.transform(lambda x: x, [])
    with pytest.raises(TypeError, match="restore"):
        gr.transform(gr.transform(plain, []), [])


def test_double_backward_is_refused(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, DOUBLE)
    x.requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(gr.TraceError, match=r"gradients of gradients .*torch\.autograd\.grad"):
        g.square().sum().backward()


def test_kept_tensors_survive_the_optimizer(plain: nn.Module, x: Tensor) -> None:
    model = gr.transform(plain, gr.on("gradient:0.weight", Keep()))
    wanted = gradient(model, x)
    model.zero_grad(set_to_none=False)
    (kept,) = model.monitor.kept().values()

    assert torch.equal(kept, wanted)


@pytest.mark.slow
def test_model_is_freed(x: Tensor) -> None:
    plain = nn.Linear(4, 3)
    model = gr.transform(plain, [GLOBAL, gr.on("error:/linear", Keep())])
    model(x).sum().backward()
    model.trace(x)
    refs = [weakref.ref(plain), weakref.ref(plain.weight), weakref.ref(model)]
    del plain, model
    gc.collect()

    assert [ref() for ref in refs] == [None, None, None]
