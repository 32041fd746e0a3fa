"""Compilation of one Dynamo graph: capture, engines, refusals."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, data_parallel, dynamo, fake_tensors, inductor, nn_modules
from gradrewrite.backends.compilation import Job, Runnable, Traced
from gradrewrite.backends.session import Session
from gradrewrite.errors import GraphBreakError, RewriteError, TraceError
from gradrewrite.ir.inputs import Given, Leaf
from gradrewrite.rewriting.dynamo_nodes import returned_inputs
from gradrewrite.rewriting.probes import place, tracing

Engine = Literal["inductor", "op by op", "trace"]


def _compile_plain(gm: fx.GraphModule, inputs: Sequence[Any], engine: Engine, options: Mapping[str, Any]) -> Runnable:
    if engine == "trace":
        raise Traced(TraceError("nothing here needs a gradient: no parameter and no input has requires_grad"))
    if engine == "op by op":
        return aot_autograd.op_by_op(
            gm,
            inputs,
            partition=aot_autograd.min_cut_partition,
            forward=lambda graph, _: aot_autograd.box(graph),
            backward=lambda graph, _: aot_autograd.box(graph),
            inference=lambda graph, _: aot_autograd.box(graph),
        )
    return inductor.plain_inductor(gm, inputs, options=options)


def _compile_rewritten(
    gm: fx.GraphModule, inputs: Sequence[Any], engine: Engine, options: Mapping[str, Any], job: Job
) -> Runnable:
    if engine == "op by op":
        return _compile_op_by_op(gm, inputs, job)
    if engine == "trace":
        joint_pass = job.show
    else:
        joint_pass = job.rewrite
        job.copies = inductor.uses_cuda_graphs(options)
    run = inductor.inductor(
        gm,
        inputs,
        options=options,
        joint_pass=joint_pass,
        partition=job.partition,
        forward=job.compile_forward,
        backward=job.compile_backward,
        is_cacheable=lambda: job.is_cacheable,
    )
    if engine == "trace":
        raise Traced(TraceError("no output of the model depends on a parameter or an input that needs a gradient"))
    return run


def _compile_op_by_op(gm: fx.GraphModule, inputs: Sequence[Any], job: Job) -> Runnable:
    def partition(joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        job.rewrite(joint.graph)
        joint.graph.lint()
        joint.recompile()
        return job.partition(joint, joint_inputs, inner=aot_autograd.min_cut_partition, **kwargs)

    def inference(graph: fx.GraphModule, _: Sequence[Any]) -> Any:
        job.rewrite(graph.graph)
        return aot_autograd.box(graph)

    def forward(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return job.compile_forward(lambda g, _: aot_autograd.box(g), graph, example_inputs)

    def backward(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return job.compile_backward(lambda g, _: aot_autograd.box(g), graph, example_inputs)

    return aot_autograd.op_by_op(
        gm, inputs, partition=partition, forward=forward, backward=backward, inference=inference
    )


def _is_resumed(frame: str) -> bool:
    return frame.startswith("torch_dynamo_resume_in_")


def _raising(error: RewriteError) -> Runnable:
    def run(*_: Any) -> Any:
        raise error.with_traceback(None)  # else each call would add its frames

    return run


_SPLIT = (
    "DistributedDataParallel lets torch split this graph into its buckets (DDPOptimizer), where gradient sites, checks "
    "and global clips are lost. Set torch._dynamo.config.optimize_ddp = False, or use "
    "DistributedDataParallel(gr.transform(model, policy))"
)


def _compile(
    session: Session, gm: fx.GraphModule, inputs: Sequence[Any], engine: Engine, options: Mapping[str, Any]
) -> Runnable:
    """Compile one Dynamo graph; a policy's error becomes a callable that raises it when the graph runs."""
    broken = dynamo.graph_break_of(gm)
    if not any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        return _compile_plain(gm, inputs, engine, options)
    local, global_, frame = dynamo.current_frame()
    if not session.has_model and dynamo.is_last_compilation():
        session.say_once(
            "limit",
            f"torch has compiled {frame} as often as its recompile limit allows; a further compilation (each new "
            "backend counts as one) would run without the policy. Make one backend per function, call "
            "torch.compiler.reset(), or raise torch._dynamo.config.recompile_limit",
        )
    if data_parallel.is_ddp_split(gm) and torch.is_grad_enabled() and session.policy not in ([], ()):
        return _raising(GraphBreakError(_SPLIT))
    session.names.enter_frame(gm, local, global_)
    is_whole = broken is None and (frame == session.entry_name or (not session.has_model and not _is_resumed(frame)))
    given = _given(session, gm, inputs, "value" if _is_resumed(frame) else "input")
    job = Job(
        session,
        frame,
        is_whole,
        _leaves(given, inputs, is_whole),
        given,
        is_compiled=engine == "inductor",
        is_last=broken is None,
        ranks=data_parallel.ranks_around(session.names.all_modules()),
    )
    try:
        placeholders = gm.graph.find_nodes(op="placeholder")
        job.returned = returned_inputs(gm.graph)
        job.values = place(gm, session.names, [placeholders[n] for n, known in given.items() if known.is_mask])
        nn_modules.keep_lstms_differentiable(gm)
        gm.recompile()
        with tracing(job.values), _named(given, inputs):
            run = _compile_rewritten(gm, inputs, engine, options, job)
        if is_whole and session.has_model:
            session.check_rules()  # before anything runs, so that the model stays as it was
        return run
    except RewriteError as err:
        return _raising(err)
    finally:
        session.names.leave_frame()
        job.values = ()  # fake tensors, of no use any more


@contextlib.contextmanager
def _named(given: Mapping[int, Given], inputs: Sequence[Any]) -> Iterator[None]:
    """Say which buffer and which parameter are meant where torch cannot compile what shares its memory."""
    try:
        yield
    except AssertionError as err:
        parameters = [n for n, known in given.items() if known.role == "parameter"]
        pairs = ((n, m) for n, known in given.items() if known.role == "buffer" for m in parameters)
        found = next(((n, m) for n, m in pairs if fake_tensors.share_memory(inputs[n], inputs[m])), None)
        if found is None or not aot_autograd.refuses_shared_memory(err):
            raise
        buffer, parameter = (given[n].name for n in found)
        raise TraceError(
            f"buffer {buffer!r} shares its memory with parameter {parameter!r}, and the forward writes to one of them, "
            "which torch.compile cannot differentiate. Give the buffer memory of its own "
            f"({parameter}.detach().clone()), or write outside of the forward: before the call, or after the backward"
        ) from err


def _given(
    session: Session, gm: fx.GraphModule, inputs: Sequence[Any], role: Literal["input", "value"]
) -> dict[int, Given]:
    """What the tensor inputs of a Dynamo graph are, by position; behind a graph break they are values of another."""
    given = {}
    for position, (node, tensor) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        if not isinstance(tensor, Tensor):
            continue
        parameter, buffer = session.names.parameter(tensor), session.names.buffers.get(id(tensor))
        if parameter is not None:
            given[position] = Given("parameter", parameter)
            continue
        is_mask = not tensor.requires_grad and fake_tensors.is_mask(tensor)
        if buffer is not None:
            given[position] = Given("buffer", buffer, is_mask)
        else:
            given[position] = Given(role, session.inputs.name(dynamo.source_name(node) or node.name), is_mask)
    return given


def _leaves(given: Mapping[int, Given], inputs: Sequence[Any], is_whole: bool) -> dict[int, Leaf]:
    leaves = {}
    for position, known in given.items():
        tensor = inputs[position]
        if not tensor.requires_grad:
            continue
        if known.role == "parameter":
            leaves[position] = Leaf(True, known.name, weakref.ref(tensor))
        elif is_whole or tensor.is_leaf:  # behind a graph break, values of the graph before are no inputs
            leaves[position] = Leaf(False, known.name, None)
    return leaves
