"""Dynamo: the frame that is being compiled, graph breaks, structured logs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn

from gradrewrite._compat.versions import needed_for

with needed_for("it can be asked whether Dynamo looks at the frames of a thread"):
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
with needed_for("compilations of a code object can be counted against Dynamo's recompile limit"):
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list, innermost_backend
with needed_for("the tracer's refusals have types of their own"):
    from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
    from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
    from torch._dynamo.exc import TorchRuntimeError as TorchRuntimeError
    from torch._dynamo.exc import Unsupported as Unsupported
    from torch._dynamo.exc import UserError as UserError
with needed_for("the frame that Dynamo compiles can be asked for"):
    from torch._dynamo.symbolic_convert import InstructionTranslator
with needed_for("Dynamo counts the reasons of graph breaks"):
    from torch._dynamo.utils import counters
with needed_for("texts can be added to the log of TORCH_TRACE"):
    from torch._logging._internal import trace_structured

TRACING_ERRORS = (Unsupported, UserError, FailOnRecompileLimitHit, TorchRuntimeError, BackendCompilerFailed)


def is_of_graph(err: Exception) -> bool:
    """Whether an error comes from an op of a graph that runs op by op."""
    traceback = err.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename.startswith("<eval_with_key>"):
            return True
        traceback = traceback.tb_next
    return False


_Function = TypeVar("_Function", bound=Callable[..., Any])


def translator() -> Any:
    """Return Dynamo's translator of the frame that is being compiled; None if the backend was called by hand."""
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # there is none on this thread
        return None


def current_frame() -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """Locals, globals and code name of the frame that Dynamo is compiling; empty outside Dynamo."""
    tx = translator()
    return ({}, {}, "") if tx is None else (tx.f_locals, tx.f_globals, tx.f_code.co_name)


def is_compiling() -> bool:
    """Whether Dynamo compiles a frame on this thread; it takes back the random numbers that are drawn meanwhile."""
    return translator() is not None


def user_stack(err: Exception) -> Sequence[Any]:
    """Frames of the code that the tracer could not follow; empty if the error has none."""
    return tuple(getattr(err, "real_stack", None) or ())


def graph_breaks_so_far() -> Mapping[str, int]:
    """Return how often each reason has broken a graph in this process."""
    return dict(counters["graph_break"])


def is_last_compilation() -> bool:
    """Whether torch's recompile limit refuses a further compilation of the frame that is being compiled."""
    tx = translator()
    return tx is not None and len(_debug_get_cache_entry_list(tx.f_code)) + 1 >= dynamo_config.recompile_limit


def graph_break_of(gm: fx.GraphModule) -> tuple[str, Sequence[Any]] | None:
    """Reason and user stack of the graph break that ended a Dynamo graph; None if it ended by itself."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return (reason.reason, reason.user_stack) if reason is not None and reason.graph_break else None


def backend_in_use() -> tuple[Any, types.CodeType, Any] | None:
    """Return the backend object that torch.compile uses for the current frame, the frame's code and its ``self``."""
    tx = translator()
    if tx is None:
        return None
    root = tx.output.root_tx
    return innermost_backend(cast(Any, tx.output.compiler_fn)), root.f_code, root.f_locals.get("self")


def module_given_to_compile() -> nn.Module | None:
    """Return the module that ``torch.compile``, or ``nn.Module.compile``, is given further up; None if it is none."""
    code = inspect.unwrap(torch.compile).__code__  # Lightning wraps it
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    given = frame.f_locals.get("model") if frame is not None else None
    owner = getattr(given, "__self__", given)
    return owner if isinstance(owner, nn.Module) else None


def outside_of_graphs(fn: _Function, reason: str) -> _Function:
    """Keep a function out of the graphs of an outer torch.compile."""
    disabled = torch.compiler.disable(fn, reason=reason)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Where nothing is compiled, there is nothing to disable, which takes longer than a small model.
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            return disabled(*args, **kwargs)
        return fn(*args, **kwargs)

    return cast(_Function, run)


def changing_numbers() -> contextlib.AbstractContextManager[None]:
    """Let changing numbers of modules be inputs of graphs.

    A count of steps is one. Otherwise each value is compiled by itself, until the recompile limit is reached.
    """
    patch: contextlib.AbstractContextManager[None] = dynamo_config.patch(allow_unspec_int_on_nn_module=True)
    return patch


def source_name(node: fx.Node) -> str:
    """Return Dynamo's source of a placeholder, ``L['x']``; ``""`` without one."""
    source = getattr(node, "_dynamo_source", None)
    return source.name if source is not None else ""


def note_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured log (``TORCH_TRACE``, ``tlparse``); it is made only if there is a log."""
    metadata = {"name": name, "encoding": "string"}
    trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=text, expect_trace_id=False)
