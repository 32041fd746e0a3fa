"""Tracing errors in three lines: the failure, the user's line, the way out."""

from __future__ import annotations

import contextlib
import copy
import inspect
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gradrewrite._compat import dynamo, inner_gradients, nn_modules
from gradrewrite._compat.versions import installed_torch
from gradrewrite._utils.tensors import kept_random_state, tensors_in
from gradrewrite.errors import GraphBreakError, NotRewrittenError, TraceError
from gradrewrite.instrumentation.recurrent import MASKED, PACKED
from gradrewrite.instrumentation.source_locations import last_line_in, user_line

# What torch's text says, what that means, and what to do.
_REASONS: tuple[tuple[str, str, str], ...] = (
    ("packed_sequence", PACKED, MASKED),
    ("pack_padded_sequence", PACKED, MASKED),
    ("pack_sequence", PACKED, MASKED),
    ("Data-dependent branching", "a branch depends on the values of a tensor",
     "select with torch.where, compute the condition outside of the model and pass it in,"),
    ("builtin operator `print`", "a traced model cannot print",
     "print after the call, report figures with Observe or gr.record,"),
    ("tolist()", "values of a tensor are read on the host", "compute with tensors, read values outside of the model,"),
    (".item()", "a value of a tensor is read on the host", "compute with tensors, read values outside of the model,"),
    ("Unsupported functorch tracing attempt", "a transform of torch.func (grad, vmap, jvp, ...) runs around the model",
     "let it run inside of the model's forward, or give it the plain model, model.original;"),
    ("Tensor.backward()", "a backward runs inside of the forward",
     "compute what it leaves in .grad by torch.autograd.grad(loss, inputs, create_graph=True),"),
    ("returning intermediate with requires_grad_()",
     "the forward returns a tensor that began to need a gradient inside of it, by requires_grad_()",
     "return what is computed from it, or a copy: x.detach(); call requires_grad_() of inputs before the forward,"),
    ("autograd.grad consumed", "torch.autograd.grad frees values that the backward of the result needs",
     "pass create_graph=True, or retain_graph=True where the gradient is a constant; evaluate under no_grad(),"),
    ("data-dependent", "a size, a branch or a Python number depends on the values of a tensor or a NumPy array",
     "make sizes fixed (masks in the place of selections), keep numbers in tensors,"),
)  # fmt: skip
_TOO_OLD = (
    f"torch.autograd.grad inside of a forward is traced from torch {inner_gradients.FIRST_VERSION} on, and torch "
    f"{installed_torch()} is installed",
    f"pip install 'torch>={inner_gradients.FIRST_VERSION}',",
)
_FULL_HOOKS = (
    "the model has full backward hooks (register_full_backward_hook, register_full_backward_pre_hook), which "
    "torch.compile cannot trace. Take them off, and let the policy do what they do: gr.on('error:0', function) changes "
    "or measures the error of module '0', gr.passes.Observe and gr.passes.Keep record it"
)
_SKIP = "or pass fullgraph=False: what is skipped is then listed in model.explain()"
_LONGEST = 300
_LARGEST_COPY = 1 << 26  # bytes


def explained(
    err: Exception, model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception:
    """Return the error that a call of a model raises in place of one of torch's; that one itself if it says enough.

    A copy of the plain model may be run, to see whether it fails too.
    """
    if isinstance(err, dynamo.FailOnRecompileLimitHit):
        return NotRewrittenError(
            "torch's recompile limit is reached, and the policy would not hold for this call. Each new size or Python "
            "value makes a graph, and so does each length of a loop over time, which is unrolled. Pad to few lengths; "
            "let sizes be symbolic (dynamic=True), where no loop is unrolled; or raise "
            "torch._dynamo.config.recompile_limit",
            code="recompile-limit",
        )
    if isinstance(err, dynamo.Unsupported | dynamo.UserError):
        return _wrong_arguments(model, method, args, kwargs) or _graph_break(
            str(err), user_line(dynamo.user_stack(err))
        )
    inner = err.inner_exception if isinstance(err, dynamo.BackendCompilerFailed) else err
    if isinstance(inner, _InPlaceError):
        what, line, way_out = inner.args
    elif isinstance(err, dynamo.TorchRuntimeError):
        what, line = _first_error_in(str(err)), user_line(dynamo.user_stack(err))
        way_out = "Give inputs of the shapes, dtypes and devices that the model is made for"
        if "does not require grad" in what:
            way_out = (
                "A forward that differentiates runs with gradients switched on: with torch.enable_grad() around it"
            )
    elif inner is not err and "data-dependent" in str(inner):
        return _graph_break(str(inner), user_line(dynamo.user_stack(inner)))
    elif not _is_out_of_memory(err) and dynamo.is_of_graph(err):  # traced, and refused by its kernel
        what, line = str(err).partition("\n")[0], ""
        way_out = "Give inputs of the shapes, dtypes and devices that the model is made for"
        if not _fails_plainly(model, method, args, kwargs):
            return err
    else:
        return err
    fails = _fails_plainly(model, method, args, kwargs)
    if fails is False and isinstance(err, dynamo.TorchRuntimeError):
        way_out = f"The plain model runs: a custom op needs torch.library.register_fake; {_SKIP}"
    return TraceError(_in_lines(what, line, f"{way_out}; the plain model fails too" if fails else way_out))


def _is_out_of_memory(err: Exception) -> bool:
    return isinstance(err, torch.OutOfMemoryError) or "allocate memory" in str(err)


def _in_lines(what: str, line: str, way_out: str) -> str:
    return "\n".join([what, *([f"  {line}"] if line else []), f"  {way_out}"])


def _graph_break(text: str, line: str) -> GraphBreakError:
    known = next(((what, way_out) for sign, what, way_out in _REASONS if sign in text), None)
    if not inner_gradients.IS_KNOWN and ("requires_grad_" in text or ("torch.autograd" in text and "grad" in line)):
        known = _TOO_OLD
    if known is None:
        paragraphs = text.strip().split("\n\n")
        sign = "Developer debug context:"
        detail = [p.partition(sign)[2].strip() for p in paragraphs[1:] if sign in p]
        known = textwrap.shorten(" ".join([*detail, paragraphs[0]]), _LONGEST, placeholder=" ..."), "change the line,"
    what, way_out = known
    if "Module-level backwards hooks" in text:
        return GraphBreakError(_FULL_HOOKS, code="graph-break")
    begin = "the tracer cannot follow this line, so the policy could not reach all of the model"
    return GraphBreakError(_in_lines(f"{begin}: {what}", line, f"{way_out[0].upper()}{way_out[1:]} {_SKIP}"))


def _first_error_in(text: str) -> str:
    _, found, rest = text.partition("): got ")
    first = (rest if found else text).splitlines()[0]
    return first.partition("('")[2].removesuffix("')") or first


class _InPlaceError(RuntimeError):
    """An in-place op that overwrites a value of the backward, with the user's line and the way out."""


@contextlib.contextmanager
def in_place_named() -> Iterator[None]:
    """Name the user's line of an in-place op on a saved value."""
    traces: list[str] = []
    heard: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.filterwarnings("always", message="Error detected in")  # autograd's own, with the line
            yield
    except RuntimeError as err:
        if "modified by an inplace operation" not in str(err):
            raise
        traces = [str(w.message) for w in heard if "Traceback of forward call" in str(w.message)]
        raise _InPlaceError(
            "an in-place op of the model changes a value that the backward of this line needs",
            last_line_in(traces[-1]) if traces else "",
            "Let the op change a copy: h = h + 1 in the place of h += 1, or h = h.clone() before",
        ) from err
    finally:
        for w in heard:
            if str(w.message) not in traces:
                warnings.showwarning(w.message, w.category, w.filename, w.lineno)


def _fails_plainly(model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """Whether a copy of the plain model raises an error too, in this call or its backward.

    None where that is not known: on several processes, of which all would have to run it; of a model that is too large
    to be copied for a message; or if there is no copy.
    """
    tensors = (*model.parameters(), *model.buffers(), *tensors_in((args, kwargs)))
    size = sum(t.numel() * t.element_size() for t in tensors)
    if size > _LARGEST_COPY or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    try:
        plain, (args, kwargs) = copy.deepcopy((model, (args, kwargs)))
    except (RuntimeError, TypeError):  # what has no copy: a tensor that is no leaf, a lock
        return None
    try:
        with kept_random_state():
            outputs = [t for t in tensors_in(getattr(plain, method)(*args, **kwargs)) if t.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    except torch.OutOfMemoryError:
        return None
    except Exception:  # the model's own, of any kind
        return True
    return False


def _wrong_arguments(model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError | None:
    if any(nn_modules.global_hooks()) or any(nn_modules.hooks_of(model)):
        return None  # a hook may change the arguments
    try:
        inspect.signature(getattr(model, method)).bind(*args, **kwargs)
    except TypeError:
        try:
            getattr(model, method)(*args, **kwargs)
        except TypeError as err:
            return err
    return None
