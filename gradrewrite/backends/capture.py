"""Capture: the rewritten joint graph of a model, without compiling or running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from gradrewrite._compat import aot_autograd
from gradrewrite._utils.tensors import kept_random_state
from gradrewrite.backends.compilation import GraphCompilation, marking, needs_gradients
from gradrewrite.backends.engines import Inductor, Runnable
from gradrewrite.backends.entry_point import EntryPoint
from gradrewrite.backends.session import Session
from gradrewrite.diagnostics.memory import Memory
from gradrewrite.errors import GraphBreakError, RewriteError, TraceError
from gradrewrite.ir import editing
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.rewriting.comparison import rewrite_and_compare
from gradrewrite.rewriting.config import RewriteConfig
from gradrewrite.rewriting.kept_memory import KeptMemory
from gradrewrite.rewriting.result import RewriteResult

Result = Callable[[JointGraph, RewriteResult], Any]  # of a capture, from the rewritten graph
Look = Callable[[MarkedJointGraph, Sequence[Any]], Result]  # at the graph and the inputs, before the rewrite


class CaptureComplete(BaseException):  # not an Exception: torch wraps those
    """Ends a capture: carries its result, or the error that stopped it."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def capture_joint_graph(
    model: nn.Module, config: RewriteConfig, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> JointGraph:
    """Return the rewritten joint graph of a model for these inputs; nothing runs and nothing changes."""
    found: JointGraph = _captured(model, config, args, kwargs, lambda *_: lambda joint, _: joint)
    return found


def capture_memory(model: nn.Module, config: RewriteConfig, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Memory:
    """Return the bytes that the forward would keep for these inputs; nothing runs and nothing changes."""
    rows, measure = _captured(model, config, args, kwargs, lambda *given: KeptMemory(*given).compare)
    return Memory(rows, sum(row.plain_bytes for row in rows), sum(row.policy_bytes for row in rows), measure)


def _captured(
    model: nn.Module, config: RewriteConfig, args: tuple[Any, ...], kwargs: Mapping[str, Any], look: Look
) -> Any:
    session = Session(replace(config, fullgraph=True), StepRecorder(1), model)
    backend = partial(_capture, session, look)
    entry_point = EntryPoint(session, lambda _: backend, backend, model, {})
    try:
        with torch.enable_grad(), kept_random_state():
            entry_point(args, dict(kwargs))
    except CaptureComplete as end:
        session.warnings.flush_warnings()
        if isinstance(end.result, RewriteError):
            raise end.result from end.result.__cause__
        return end.result
    raise GraphBreakError("the model runs no tensor operation that the tracer can see; model.explain() says more")


def _capture(session: Session, look: Look, gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Runnable:
    """Stop at the joint graph of a Dynamo graph; a torch.compile backend that never returns."""
    if not needs_gradients(inputs):
        raise CaptureComplete(TraceError("nothing here needs a gradient: no parameter and no input has requires_grad"))
    try:
        engine = Inductor().configured(None, None)
        with marking(session, gm, inputs, engine) as compilation:
            engine.compile_rewritten(gm, inputs, _CaptureHooks(compilation, lambda marked: look(marked, inputs)))
    except RewriteError as err:
        raise CaptureComplete(err) from None
    raise CaptureComplete(TraceError("no output of the model depends on a parameter or an input that needs a gradient"))


@dataclass
class _CaptureHooks:
    compilation: GraphCompilation
    look: Callable[[MarkedJointGraph], Result]
    is_cacheable: bool = False
    store: None = None

    def rewrite(self, graph: fx.Graph) -> None:
        if not aot_autograd.has_gradients(graph):
            editing.erase_markers(graph)
            return
        session = self.compilation.session
        try:
            marked = self.compilation.marked(graph)
            result_of = self.look(marked)
            joint, result, _ = rewrite_and_compare(marked, session.config)
            for site in result.out_of_reach:
                session.graphs.note_out_of_reach(site, result.answers[site])
            if len(session.config.methods) == 1:  # otherwise the graph of another method may have the site
                session.rules.note_forms(result.saved)
                session.rules.check_forms()
                session.rules.check_on(joint.sites, result.saved.not_saved)
        except RewriteError as err:
            raise CaptureComplete(err) from None
        raise CaptureComplete(result_of(joint, result))

    def partition(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], *, inner: Runnable, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        partitioned: tuple[fx.GraphModule, fx.GraphModule] = inner(gm, joint_inputs, **kwargs)
        return partitioned

    def compile_forward(self, compile_graph: Runnable, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, inputs)

    def compile_backward(self, compile_graph: Runnable, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, inputs)
