"""The torch.compile backend: Inductor, or op by op, around the rewrite."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from gradrewrite import _torch
from gradrewrite.errors import GraphBreakError, RewriteError, TraceError
from gradrewrite.job import Job, Runnable, Traced
from gradrewrite.monitor import Monitor
from gradrewrite.names import user_line
from gradrewrite.nodes import returned_inputs
from gradrewrite.places import Leaf
from gradrewrite.policy import Policy
from gradrewrite.probes import place, tracing
from gradrewrite.recipe import Given
from gradrewrite.session import Explanation, Session

Engine = Literal["inductor", "op by op", "trace"]


class Backend:
    """A torch.compile backend with a policy; made by ``gr.backend``."""

    def __init__(self, session: Session, engine: Engine, *, is_silent: bool = False) -> None:
        """Compile for a session; ``is_silent`` where no backward follows, so that what is skipped does not matter."""
        self.session = session
        self.is_silent = is_silent
        self.engine: Engine = engine
        self.__name__ = "gradrewrite"
        self._compiled: dict[int, _torch.CompiledCode] = {}  # by identity of what torch.compile made of this object
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def monitor(self) -> Monitor:
        """What the backward reported."""
        return self.session.monitor

    def explain(self) -> Explanation:
        """What was compiled and rewritten so far, and what was skipped."""
        return self.session.explanation()

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Runnable:
        """Compile one graph of Dynamo, as torch.compile asks."""
        settings = {} if self.engine == "op by op" else _torch.inductor_options(mode, options)
        broken = _torch.graph_break_of(gm)
        if broken is not None and not self.is_silent and not _torch.is_ddp_split(gm):
            self.session.note_skipped(f"{user_line(broken[1])}: {broken[0].splitlines()[0]}")
        run = _compile(self.session, gm, example_inputs, self.engine, settings)
        if not self.session.has_model:  # for a model, its entry does this
            self._live_with_modules()
        return run

    def _live_with_modules(self) -> None:
        """Let torch forget what is compiled for a module, as ``torch.compile(module)`` does, when that is gone.

        What is compiled for a function that is given modules stays: it may be given others.
        """
        used = _torch.backend_in_use()
        if used is None:
            return
        asked, code, owner = used
        if not any(owner is root for root in self.session.names.roots):
            return
        if id(asked) not in self._compiled:
            self._compiled[id(asked)] = _torch.CompiledCode(asked)
            weakref.finalize(asked, self._compiled.pop, id(asked), None).atexit = False
        self._compiled[id(asked)].add(code)
        for module in self.session.names.roots:
            if module not in self._watched:
                self._watched.add(module)
                weakref.finalize(module, _drop_unused, weakref.ref(self)).atexit = False


def _drop_unused(ref: weakref.ref[Backend]) -> None:
    backend = ref()
    if backend is not None and not backend.session.names.roots:
        for compiled in list(backend._compiled.values()):
            compiled.drop()
        _torch.clear_dropped()  # what is dropped still counts against torch's recompile limit


def backend(policy: Policy, *, monitor: Monitor | None = None) -> Backend:
    """Make a torch.compile backend that rewrites the backward, for people who call torch.compile themselves.

    Names are those of the module that is compiled; with several modules in one compiled function they begin
    with the variable (``gen.x``). A rule that matches nothing raises ``NoSuchSiteError`` from the first backward.
    torch.compile itself ignores hooks that are registered after the first call; ``gr.transform`` honours them.

    Args:
        policy: A callback, a rule, or a list of them.
        monitor: Where records go; a new ``Monitor`` if None.

    Returns:
        A backend with ``.monitor`` and ``.explain()``; ``mode`` and ``options`` of torch.compile are Inductor's.

    Raises:
        PolicyError: ``policy`` is none.

    Example:
        >>> import torch, gradrewrite as gr
        >>> from gradrewrite.passes import ClipByNorm
        >>> step = torch.compile(torch.nn.Linear(2, 2), backend=gr.backend(gr.on("gradient:*", ClipByNorm(1.0))))
    """
    return Backend(Session(policy, monitor), "inductor")


_registered: dict[int, Backend] = {}  # by identity of what torch.compile made of the name and the options


def registered_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Runnable:
    """The backend that torch finds under the name ``gradrewrite``.

    ``torch.compile(f, backend="gradrewrite", options={"policy": ..., "monitor": ...})``; other options are Inductor's.
    Without a policy it compiles the plain backward.
    """
    rest = dict(options or {})
    policy, monitor = rest.pop("policy", []), rest.pop("monitor", None)
    if "policy" not in (options or {}):
        return backend([], monitor=monitor)(gm, example_inputs, mode=mode, options=rest)
    used = _torch.backend_in_use()
    if used is None:
        return backend(policy, monitor=monitor)(gm, example_inputs, mode=mode, options=rest)
    asked, *_ = used
    if id(asked) not in _registered:
        _registered[id(asked)] = backend(policy, monitor=monitor)
        weakref.finalize(asked, _registered.pop, id(asked), None).atexit = False
    return _registered[id(asked)](gm, example_inputs, mode=mode, options=rest)


def _compile_plain(gm: fx.GraphModule, inputs: Sequence[Any], engine: Engine, options: Mapping[str, Any]) -> Runnable:
    if engine == "trace":
        raise Traced(TraceError("nothing here needs a gradient: no parameter and no input has requires_grad"))
    if engine == "op by op":
        return _torch.op_by_op(
            gm,
            inputs,
            partition=_torch.min_cut_partition,
            forward=lambda graph, _: _torch.box(graph),
            backward=lambda graph, _: _torch.box(graph),
            inference=lambda graph, _: _torch.box(graph),
        )
    return _torch.plain_inductor(gm, inputs, options=options)


def _compile_rewritten(
    gm: fx.GraphModule, inputs: Sequence[Any], engine: Engine, options: Mapping[str, Any], job: Job
) -> Runnable:
    if engine == "op by op":
        return _compile_op_by_op(gm, inputs, job)
    if engine == "trace":
        joint_pass = job.show
    else:
        joint_pass = job.rewrite
        job.copies = _torch.uses_cuda_graphs(options)
    run = _torch.inductor(
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
        return job.partition(joint, joint_inputs, inner=_torch.min_cut_partition, **kwargs)

    def inference(graph: fx.GraphModule, _: Sequence[Any]) -> Any:
        job.rewrite(graph.graph)
        return _torch.box(graph)

    def forward(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return job.compile_forward(lambda g, _: _torch.box(g), graph, example_inputs)

    def backward(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return job.compile_backward(lambda g, _: _torch.box(g), graph, example_inputs)

    return _torch.op_by_op(gm, inputs, partition=partition, forward=forward, backward=backward, inference=inference)


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
    broken = _torch.graph_break_of(gm)
    if not any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        return _compile_plain(gm, inputs, engine, options)
    local, global_, frame = _torch.current_frame()
    if not session.has_model and _torch.is_last_compilation():
        session.say_once(
            "limit",
            f"torch has compiled {frame} as often as its recompile limit allows; a further compilation (each new "
            "backend counts as one) would run without the policy. Make one backend per function, call "
            "torch.compiler.reset(), or raise torch._dynamo.config.recompile_limit",
        )
    if _torch.is_ddp_split(gm) and torch.is_grad_enabled() and session.policy not in ([], ()):
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
        ranks=_torch.ranks_around(session.names.all_modules()),
    )
    try:
        placeholders = gm.graph.find_nodes(op="placeholder")
        job.returned = returned_inputs(gm.graph)
        job.values = place(gm, session.names, [placeholders[n] for n, known in given.items() if known.is_mask])
        _torch.keep_lstms_differentiable(gm)
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
        found = next(((n, m) for n, m in pairs if _torch.share_memory(inputs[n], inputs[m])), None)
        if found is None or not _torch.refuses_shared_memory(err):
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
        is_mask = not tensor.requires_grad and _torch.is_mask(tensor)
        if buffer is not None:
            given[position] = Given("buffer", buffer, is_mask)
        else:
            given[position] = Given(role, session.inputs.name(_torch.source_name(node) or node.name), is_mask)
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
