"""Facts about torch that the code leans on; a test that fails here says that torch has changed."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.backends import common
from torch._dynamo.eval_frame import _debug_get_cache_entry_list, cached_backends, innermost_backend
from torch._dynamo.guards import CheckFunctionManager, DeletedGuardManagerWrapper
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import compilation_time_metrics, get_metrics_context
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.graph_module import _loader
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from gradrewrite._compat import (
    aot_autograd,
    autograd,
    dynamic_sizes,
    dynamo,
    dynamo_cache,
    dynamo_returns,
    inductor,
    inner_gradients,
    make_fx,
)
from gradrewrite.ir import markers

from models.buffers import Net as BufferNet
from models.buffers import RunningMean


def dynamo_graph(fn: Callable[..., Any], *args: Any) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    return graphs[0]


def joint_graph(fn: Callable[..., Any], *args: Any) -> fx.GraphModule:
    joints: list[fx.GraphModule] = []

    def partition(gm: fx.GraphModule, *rest: Any, **kwargs: Any) -> Any:
        joints.append(gm)
        return min_cut_rematerialization_partition(gm, *rest, **kwargs)

    backend = common.aot_autograd(fw_compiler=lambda g, _: aot_autograd.box(g), partition_fn=partition)
    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    return joints[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(3, 3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(self.act(self.fc(x))))


def test_1_checkpoint_is_a_named_op_with_a_body() -> None:
    net = Net()
    gm = dynamo_graph(lambda x: checkpoint(net, x, use_reentrant=False), torch.randn(2, 3))
    (node,) = (n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == "tag_activation_checkpoint")
    (got,) = node.users
    (returned,) = getattr(gm, node.args[0].target).graph.output_node().args[0]

    assert node.args[0].op == "get_attr"
    assert got.meta["example_value"] is returned.meta["example_value"]


@pytest.mark.pure
def test_2_side_effect_ops_survive_dead_code_removal() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(markers.hold, ([x],))
    graph.output(x)

    assert not graph.eliminate_dead_code()
    assert len(graph.nodes) == 3


def test_3_module_stack_is_keyed_by_identity_and_run() -> None:
    net = Net()
    gm = dynamo_graph(net, torch.randn(2, 3))
    keys = [list(n.meta["nn_module_stack"])[-1] for n in gm.graph.nodes if n.op == "call_function"]

    assert keys == [str(id(net.fc)), str(id(net.act)), f"{id(net.fc)}@1", f"{id(net.act)}@1"]


def test_3_locals_of_the_frame_are_readable_and_parameters_are_themselves() -> None:
    net, seen = Net(), []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        frame = InstructionTranslator.current_tx().f_locals
        seen.append((frame["self"] is net, any(t is net.fc.weight for t in inputs)))
        return gm.forward

    torch.compile(net, backend=backend)(torch.randn(2, 3))
    assert seen == [(True, True)]


def test_3_in_place_ops_return_the_same_fake_tensor() -> None:
    gm = dynamo_graph(Net(), torch.randn(2, 3))
    linear, relu, *_ = (n for n in gm.graph.nodes if n.op == "call_function")

    assert linear.meta["example_value"] is relu.meta["example_value"]


def test_3_joint_outputs_say_which_input_they_are_the_gradient_of() -> None:
    gm = joint_graph(Net(), torch.randn(2, 3))
    output = gm.graph.output_node()
    descs = output.meta["desc"]

    assert len(descs) == len(output.args[0])
    assert {d.grad_of.idx for d in descs if isinstance(d, GradAOTOutput)} == {0, 1}  # type: ignore[attr-defined]
    assert all(isinstance(d.grad_of, PlainAOTInput) for d in descs if isinstance(d, GradAOTOutput))


def test_5_partitioner_tags_are_there() -> None:
    gm = joint_graph(Net(), torch.randn(2, 3))
    tags = {n.meta.get("partitioner_tag") for n in gm.graph.nodes if n.op == "call_function"}

    assert "is_backward" in tags


def test_7_hooks_registered_late_are_ignored_by_torch_compile() -> None:
    net, x = Net(), torch.randn(2, 3)
    compiled = torch.compile(net, backend="eager")
    before = compiled(x)
    net.fc.register_forward_hook(lambda _, __, out: out * 0)

    assert torch.equal(compiled(x), before)


@pytest.mark.pure
def test_7_every_registration_of_a_hook_has_a_new_number() -> None:
    before = RemovableHandle.next_id
    Net().fc.register_forward_hook(lambda *_: None)

    assert RemovableHandle.next_id == before + 1


@pytest.mark.broad
def test_7_code_objects_are_told_apart_by_their_names() -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1

    limit = torch._dynamo.config.recompile_limit
    for n in range(limit + 4):
        code = f.__code__.replace(co_name=f"f{n}")
        fresh = type(f)(code, f.__globals__)
        torch.compile(fresh, backend=lambda gm, _: gm.forward, fullgraph=True)(torch.ones(1))


@pytest.mark.inductor
def test_10_the_joint_pass_runs_on_a_graph_with_its_module() -> None:
    from torch._inductor.compile_fx import compile_fx

    seen: list[Any] = []
    patches = {"joint_custom_pre_pass": inductor._inductor_pass(lambda g: seen.append(g.owning_module), None)}
    compiled = torch.compile(nn.Linear(2, 2), backend=lambda gm, xs: compile_fx(gm, xs, config_patches=patches))
    with aot_autograd.no_autograd_cache():
        compiled(torch.ones(1, 2)).sum().backward()

    assert isinstance(seen[0], fx.GraphModule)


@pytest.mark.pure
def test_tracing_maps_inputs_by_identity() -> None:
    """``make_fx`` gives two equal placeholders one proxy: our ``trace`` tells them apart."""
    with torch._subclasses.FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2))
    gm = make_fx.trace(lambda a, b: [a - 2 * b], [x, x])

    assert gm(torch.tensor([3.0, 3.0]), torch.tensor([1.0, 1.0]))[0].tolist() == [1.0, 1.0]


@pytest.mark.pure
def test_12_real_tensors_become_get_attr_and_stay_themselves() -> None:
    shift = torch.ones(2)
    with torch._subclasses.FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2))
    gm = make_fx.trace(lambda a: [a + shift], [x])
    (node,) = gm.graph.find_nodes(op="get_attr")

    assert getattr(gm, node.target) is shift


def test_15_backward_callables_are_boxed() -> None:
    seen: list[type] = []

    def bw_compiler(gm: fx.GraphModule, _: Any) -> Any:
        boxed = aot_autograd.box(gm)
        return aot_autograd.boxed(lambda args: seen.append(type(args)) or boxed(args))  # type: ignore[func-returns-value]

    backend = common.aot_autograd(fw_compiler=lambda g, _: aot_autograd.box(g), bw_compiler=bw_compiler)
    torch.compile(Net(), backend=backend)(torch.ones(1, 3)).sum().backward()
    assert seen == [list]


@pytest.mark.pure
def test_17_callbacks_run_when_the_backward_ends() -> None:
    order: list[str] = []
    p = torch.ones(1, requires_grad=True)

    class Callback(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            order.append(f"backward {autograd.backward_id() >= 0}")
            autograd.at_end_of_backward(lambda: order.append(f"end {p.grad is not None}"))
            return g

    Callback.apply(p).sum().backward()
    assert order == ["backward True", "end True"]
    assert autograd.backward_id() == -1


@pytest.mark.pure
def test_19_scaling_by_a_clamped_norm_is_not_exact() -> None:
    g = torch.tensor([0.1, 0.2, 0.3, 0.7])

    def changed(scale: Callable[[float], Tensor]) -> int:
        return sum(not torch.equal(scale(float(bound)), g) for bound in range(1, 991))

    assert changed(lambda m: g * (m / g.norm().clamp(min=m))) > 100
    assert changed(lambda m: torch.where(g.norm() > m, g * (m / g.norm()), g)) == 0


@pytest.mark.pure
def test_20_clip_grad_norm_zeroes_everything_at_an_infinity() -> None:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([torch.inf, 1.0])
    nn.utils.clip_grad_norm_([p], 1.0)

    assert p.grad[1] == 0


def test_graph_breaks_say_their_reason() -> None:
    seen: list[Any] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        seen.append(dynamo.graph_break_of(gm))
        return gm.forward

    def f(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    torch.compile(f, backend=backend)(torch.ones(1))
    assert [s is not None for s in seen] == [True, False]
    assert "graph_break" in seen[0][0]
    assert seen[0][1][-1].name == "f"


def test_an_exception_that_is_no_exception_ends_tracing_unwrapped() -> None:
    class Stop(BaseException):
        pass

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        raise Stop

    with pytest.raises(Stop), warnings.catch_warnings():
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))


def test_compilations_are_timed_until_a_reset() -> None:
    """The markers ``pure`` and ``inductor`` are held by these names (``tests/conftest.py``)."""
    assert not compilation_time_metrics
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert compilation_time_metrics
    assert "compile_fx_inner" not in compilation_time_metrics
    torch.compiler.reset()
    assert not compilation_time_metrics


@pytest.mark.inductor
def test_inductor_is_timed_by_name() -> None:
    torch.compile(lambda x: x + 1)(torch.ones(1))
    assert "compile_fx_inner" in compilation_time_metrics


def test_8_recurrent_layers_break_the_graph() -> None:
    with pytest.raises(dynamo.Unsupported):
        torch.compile(nn.GRU(2, 2), backend="eager", fullgraph=True)(torch.ones(1, 1, 2))


def with_extra_output(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    boxed = aot_autograd.box(gm)
    return aot_autograd.boxed(lambda args: (*boxed(args), torch.ones(1)))


def test_64_recurrent_layers_are_decomposed_into_their_time_steps() -> None:
    graphs: list[fx.Graph] = []

    def forward(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return aot_autograd.box(gm)

    for length in (2, 12):
        torch._dynamo.reset()
        backend = common.aot_autograd(fw_compiler=forward)
        with torch._dynamo.config.patch(allow_rnn=True, automatic_dynamic_shapes=False):
            torch.compile(nn.GRU(2, 2), backend=backend, fullgraph=True)(torch.ones(length, 1, 2))
    few, many = (len(graph.nodes) for graph in graphs)
    assert many > 3 * few


def test_a_backend_can_have_a_frame_traced_again_with_symbols() -> None:
    shapes: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        shapes.append([n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")][-1].shape)
        if len(shapes) == 1:
            dynamic_sizes.trace_again_with_symbols(gm, [(0, 0)])
        return gm

    x = torch.ones(5, 2)
    with dynamic_sizes.marks_removed():
        torch.compile(lambda x: x + 1, backend=backend)(x)
    assert shapes[0] == (5, 2)
    assert isinstance(shapes[1][0], torch.SymInt)
    assert not [name for name in vars(x) if "dynamo" in name]


def test_the_kernel_of_an_lstm_has_a_workspace_in_training_alone() -> None:
    """Its size is 3.8 to 3.9 times that of the gates, and at least 28,672 bytes (``numerics/recurrent_layers``)."""

    def workspace(length: int, batch: int, width: int) -> Tensor:
        tensors = [torch.ones(s) for s in ((length, batch, 3), (4 * width, 3), (4 * width, width), *[(4 * width,)] * 2)]
        states = [torch.ones(1, batch, width)] * 2
        rest: tuple[Any, ...] = False, [], 2, width, 1, True, False, False, True
        found: Tensor = torch.ops.aten.mkldnn_rnn_layer.default(*tensors, *states, *rest)[3]
        return found

    assert workspace(1, 1, 1).numel() == 28_672
    for sizes in ((50, 16, 256), (400, 8, 64)):
        assert 3.75 < workspace(*sizes).numel() / (4 * 4 * sizes[0] * sizes[1] * sizes[2]) < 4
    with torch.no_grad():
        assert workspace(5, 3, 4) is None


def test_13_backward_outputs_are_counted() -> None:
    backend = common.aot_autograd(
        fw_compiler=lambda g, _: aot_autograd.box(g), bw_compiler=lambda g, _: with_extra_output(g)
    )
    loss = torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(1, 2)).sum()

    with pytest.raises(Exception, match=r"number of gradients|expected \d+"):
        loss.backward()


def test_33_backends_and_invalid_entries_of_code_stay_until_a_reset() -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1

    compiled = torch.compile(f, backend="eager")
    compiled(torch.ones(1))
    (entry,) = _debug_get_cache_entry_list(f.__code__)
    assert any(backend is innermost_backend(entry.backend) for backend in cached_backends.values())
    entry.guard_manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper("test"))
    del entry
    assert len(_debug_get_cache_entry_list(f.__code__)) == 1
    reset_code(f.__code__)
    assert _debug_get_cache_entry_list(f.__code__) == []


def test_a_thread_remembers_the_stacks_of_its_last_compilation() -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert get_metrics_context()._edits
    dynamo_cache._forget_stacks()
    assert get_metrics_context()._edits == []


def compile_and_forget(x: Tensor) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.sin(x)

    torch.compile(f, backend="eager", fullgraph=True)(x)
    torch.compiler.reset()
    gc.collect()


@pytest.mark.slow
def test_guards_of_code_that_torch_forgot_stay() -> None:
    def count() -> int:
        return sum(type(known) is CheckFunctionManager for known in gc.get_objects())

    compile_and_forget(torch.ones(1))
    before = count()
    for _ in range(3):
        compile_and_forget(torch.ones(1))
    assert count() == before + 3


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.slow
def test_fake_values_of_a_computed_input_stay_before_215(is_leaf: bool) -> None:
    def count() -> int:
        for finalizer in weakref.finalize._registry.copy():  # type: ignore[attr-defined]  # which guards hold fake values too
            if dynamo_cache._guards_held_by(finalizer) is not None:
                finalizer.detach()
        gc.collect()
        return sum(type(known) is FakeTensorMode for known in gc.get_objects())

    x = torch.ones(1, requires_grad=True)
    compile_and_forget(x if is_leaf else x * 2)
    before = count()
    for _ in range(3):
        compile_and_forget(x if is_leaf else x * 2)
    assert count() - before == (0 if is_leaf or torch.__version__ >= "2.15" else 3)


@pytest.mark.broad
@pytest.mark.pure
def test_source_text_of_every_graph_module_stays() -> None:
    before = len(_loader.eval_cache)
    for _ in range(3):
        fx.GraphModule({}, fx.symbolic_trace(nn.ReLU()).graph)
    gc.collect()
    assert len(_loader.eval_cache) >= before + 3


@pytest.mark.inductor
def test_11_a_hit_of_the_autograd_cache_skips_the_joint_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    runs: list[str] = []
    plain = nn.Linear(3, 2)

    def step(name: str) -> None:
        patches = {"joint_custom_pre_pass": inductor._inductor_pass(lambda _: runs.append(name), None)}
        torch.compiler.reset()
        compiled = torch.compile(plain, backend=lambda gm, xs: compile_fx(gm, xs, config_patches=patches))
        compiled(torch.ones(1, 3)).sum().backward()

    with functorch_config.patch(enable_autograd_cache=True):
        step("first")
        step("second")
    with aot_autograd.no_autograd_cache():
        step("third")
    assert runs == ["first", "third"]


def weight_gradient(errors: Tensor, values: Tensor) -> Any:
    weight, settings = torch.ones(2, 3, 2), ([1], [0], [1], False, [0], 1, [False, True, False])
    return torch.ops.aten.convolution_backward.default(errors[None], values[None], weight, None, *settings)[1]


@pytest.mark.broad
@pytest.mark.parametrize(
    "fn",
    [
        weight_gradient,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.ops.aten.slice_backward.default(a, [9, 6], 0, 1, 3, 1),
        lambda a, b: torch.gather(a, 0, torch.zeros(1, 2, dtype=torch.int64)),
    ],
)
def test_vmap_fixes_the_symbolic_sizes_of_some_ops(fn: Callable[..., Tensor]) -> None:
    """``per_example.tails`` runs these without ``vmap``; where this fails, ``vmap`` may do."""
    errors, values = torch.randn(5, 2, 6), torch.randn(5, 3, 7)
    if fn is not weight_gradient:
        values = values[:, :, :6]
    traced = proxy_tensor.make_fx(torch.func.vmap(fn), tracing_mode="symbolic")(errors, values)
    guards = [str(guard.expr) for guard in traced.shape_env.guards]
    assert any(guard.startswith("Eq(") and guard.endswith(", 5)") for guard in guards)


class Stores(nn.Module):
    """Returns one value and stores another one."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.stored = x.sin()
        return {"returned": x.cos()}


def noted(key: str, path: str, *returned: Any) -> None:
    """Stand behind the call of a module."""


torch.compiler.allow_in_graph(noted)
fx.node.has_side_effect(noted)


def test_a_call_of_a_module_is_traced_by_a_method_that_knows_what_it_returns() -> None:
    module = Stores()
    with dynamo_returns.returns_noted(noted):
        graph = dynamo_graph(lambda m, x: m(x)["returned"], module, torch.ones(2)).graph
    (note,) = graph.find_nodes(op="call_function", target=noted)
    key, path, *returned = note.args
    assert key == str(id(module))
    assert path == "L['m']"
    assert [node.target for node in returned] == ["cos"]


def test_what_a_frame_returns_is_on_its_stack_while_the_backend_runs() -> None:
    known: list[Any] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        known.append((len(gm.graph.output_node().args[0]), dynamo_returns.returned_tensors()))
        return gm.forward

    torch.compile(lambda m, x: m(x), backend=backend, fullgraph=True)(Stores(), torch.ones(2))
    ((num_outputs, returned),) = known
    assert num_outputs == 2  # the stored value is an output of the graph too
    assert [path for path, _ in returned] == ["returned"]


def test_the_partitioner_may_save_an_output_of_the_model_for_what_reads_more() -> None:
    """It saves what is smallest, so that values that the forward has to compute are outputs of it meanwhile."""
    saved: list[list[str]] = []

    def partition(gm: fx.GraphModule, *rest: Any, **kwargs: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(gm, *rest, **kwargs)
        saved.append([node.name for node in forward.graph.output_node().args[0]])
        return forward, backward

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.sum()
            ctx.save_for_backward(torch.stack([y, y * 2.0, y * 3.0]))
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return (g * ctx.saved_tensors[0].sum()).expand(4)

    backend = common.aot_autograd(fw_compiler=lambda g, _: aot_autograd.box(g), partition_fn=partition)
    loss = torch.compile(Twice.apply, backend=backend, fullgraph=True)(torch.ones(4, requires_grad=True))
    assert saved[0][0] in saved[0][1:]  # the output is saved
    loss.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_equal_nodes_of_a_joint_graph_are_one_when_it_is_cut() -> None:
    """So what the backward reads of an equal node is found by the first of them."""
    x = torch.ones(4, requires_grad=True)
    joint = joint_graph(lambda x: (x.sin() * x.sin()).exp() * x.sin(), x)

    assert len(joint.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)) == 1


@pytest.mark.inductor
def test_53_a_sum_with_a_matrix_product_drops_its_factor() -> None:
    """Why ``_compat/factors.py`` writes factors out as products."""
    x, w, p = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    found = torch.compile(lambda x, w, p: (x @ w).add(p, alpha=0.25))(x, w, p)

    torch.testing.assert_close(found, x @ w + p)


def _traced(fn: Callable[..., Any], *args: Any) -> Any:
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        return torch.compile(fn, backend="aot_eager", fullgraph=True)(*args)


def _penalty(x: Tensor, w: Tensor) -> Tensor:
    (g,) = torch.autograd.grad((x * w).sin().sum(), x, create_graph=True)
    return g.square().sum()


@pytest.mark.skipif(not inner_gradients.IS_KNOWN, reason="Dynamo traces torch.autograd.grad from torch 2.12 on")
def test_54_dynamo_traces_a_gradient_by_a_switch() -> None:
    """Why ``_compat/inner_gradients.py`` sets it."""
    x, w = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="trace_autograd_ops"):
        torch.compile(_penalty, backend="aot_eager", fullgraph=True)(x, w)
    _traced(_penalty, x, w).backward()
    expected = torch.autograd.grad(_penalty(x, w), w)[0]
    assert torch.equal(w.grad, expected)


@pytest.mark.skipif(not inner_gradients.IS_KNOWN, reason="Dynamo traces torch.autograd.grad from torch 2.12 on")
@pytest.mark.parametrize(
    ("begin", "message"),
    [(lambda x: x.requires_grad_(), "requires_grad_"), (lambda x: x.detach().requires_grad_(), "source-less")],
)
def test_dynamo_refuses_tensors_that_begin_to_need_a_gradient(begin: Callable[[Tensor], Tensor], message: str) -> None:
    """Why ``_compat/inner_gradients.py`` replaces its handlers."""
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        _traced(lambda x, w: _penalty(begin(x), w), x, w)
    with inner_gradients.inner_gradients_traced():
        _traced(lambda x, w: _penalty(begin(x), w), x, w).backward()
    expected = torch.autograd.grad(_penalty(x.requires_grad_(), w), w)[0]
    assert torch.equal(w.grad, expected)


@pytest.mark.skipif(not inner_gradients.IS_KNOWN, reason="Dynamo traces torch.autograd.grad from torch 2.12 on")
def test_dynamo_drops_create_graph_of_a_backward() -> None:
    """Why ``_compat/inner_gradients.py`` refuses ``loss.backward()`` in a forward."""

    def penalty(x: Tensor, w: Tensor) -> Tensor:
        (x * w).sin().sum().backward(create_graph=True, inputs=[x])
        assert x.grad is not None
        return x.grad.square().sum()

    x, w = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    assert not _traced(penalty, x, w).requires_grad


@pytest.mark.broad
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_60_a_written_buffer_is_read_again_in_the_backward(backend: str) -> None:
    """Why ``ir/partitioning.py`` saves what was read."""
    plain = BufferNet(RunningMean)
    model, x = copy.deepcopy(plain), torch.randn(8, 4)
    plain(x).backward()
    torch.compile(model, backend=backend)(x).backward()

    wanted = plain.first.linear.weight.grad
    assert (model.first.linear.weight.grad - wanted).abs().max() > 0.05 * wanted.abs().max()


def test_updates_of_0d_float64_tensors_are_lost() -> None:
    """Why there is ``_compat/scalar_tensors.py``."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1.0)
            y: Tensor = self.fc(x).sum()
            return y

    plain = Counted()
    torch.compile(plain, backend="aot_eager")(torch.ones(1, 2)).backward()
    assert plain.count == 0


def test_gradients_of_overlapping_outputs_are_overwritten() -> None:
    """Why there is ``_compat/tangents.py``."""
    x, weights = torch.randn(3, 6), torch.rand(3, 4, 3)
    found = []
    for compiled in (False, True):
        w = torch.eye(6, requires_grad=True)
        function: Any = lambda x, w: (x @ w).unfold(1, 3, 1)  # noqa: E731
        run = torch.compile(function, backend="aot_eager") if compiled else function
        (run(x, w) * weights).sum().backward()
        found.append(w.grad)
    assert (found[0] - found[1]).abs().max() > 0.05 * found[0].abs().max()
