"""The autograd engine and its nodes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gradrewrite._compat.versions import needed_for

with needed_for("one Python function hands a backward to the autograd engine"):
    from torch.autograd.graph import _engine_run_backward
with needed_for("code may write to tensors without a change of their versions"):
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter
with needed_for("the results of torch.vmap can be seen as they are made"):
    from torch._functorch import vmap

    _vmap: Any = vmap
    assert callable(_vmap._remove_batch_dim)


is_transformed = torch._C._functorch.is_functorch_wrapped_tensor  # by torch.func (vmap, grad): it stands for others
_is_batched_by_autograd = torch._C._functorch.is_legacy_batchedtensor
backward_id = torch._C._current_graph_task_id  # of this thread; -1 outside of a backward
running_node: Callable[[], Any] = torch._C._current_autograd_node  # of this thread; None outside of a backward
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # retain_graph of the backward


def creates_graph(depth: int = 16) -> bool:
    """Whether AOTAutograd runs a backward with ``create_graph=True``: the node of its results has no backward."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(depth):
        if frame is None:
            return False
        if frame.f_code.co_name == "_double_backward":
            return True
        frame = frame.f_back
    return False


def refuse_second_backward(error: Callable[[], Exception]) -> None:
    """Raise an error in a backward through the running node's results."""

    def refuse(_: Any) -> None:
        raise error()

    def mark(results: Sequence[Tensor | None], _: Any) -> None:
        for node in {t.grad_fn for t in results if t is not None and t.grad_fn is not None}:
            node.register_prehook(refuse)

    running_node().register_hook(mark)


increment_versions = torch.autograd.graph.increment_version  # of tensors that code has written without autograd
versions_kept = _unsafe_preserve_version_counter  # inside a block, of a sequence of tensors


class no_gradients:
    """``torch.no_grad`` as a block, in fewer calls."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        """Switch gradients off."""
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        """Switch them back."""
        torch._C._set_grad_enabled(self._before)


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for several: in ``torch.func``, or in a backward with ``is_grads_batched=True``."""
    return is_transformed(tensor) or _is_batched_by_autograd(tensor)


@contextlib.contextmanager
def hear_transforms(
    note: Callable[[str, Any, Any], None], pause: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[None]:
    """Report the results of ``torch.vmap`` and ``torch.cond`` inside the block; modes of torch functions see neither.

    ``torch.cond`` compiles what it is given, and does not work with a mode of torch functions around it: it runs inside
    of ``pause``.
    """
    plain_remove, plain_cond = _vmap._remove_batch_dim, torch.cond

    def remove(tensor: Tensor, *args: Any) -> Any:
        result = plain_remove(tensor, *args)
        if not is_transformed(result):
            note("_remove_batch_dim", (), result)
        return result

    def cond(*args: Any, **kwargs: Any) -> Any:
        with pause():
            result = plain_cond(*args, **kwargs)
        note("cond", (args, kwargs), result)
        return result

    _vmap._remove_batch_dim, torch.cond = remove, cond
    try:
        yield
    finally:
        _vmap._remove_batch_dim, torch.cond = plain_remove, plain_cond


def view_chain(tensor: Tensor) -> Iterator[tuple[Any, int]]:
    """Yield the autograd nodes, with output numbers, of an output and of the tensors that it is a view of.

    AOTAutograd may make all of these outside of a graph, but not the base that the graph returns, unless that is an
    input: the gradient of a view of an input does not come through the graph.
    """
    base = tensor._base
    current: tuple[Any, int] = (tensor.grad_fn or tensor, tensor.output_nr)
    yield current
    if base is None:
        return
    end = (base.grad_fn or base, base.output_nr)
    is_input = base.grad_fn is None or not base.grad_fn.next_functions
    while not isinstance(current[0], Tensor):
        following = [pair for pair in current[0].next_functions if pair[0] is not None]
        if len(following) != 1 or following[0] == end:
            break
        (current,) = following
        yield current
    if is_input:
        yield end


def is_called_by_python() -> bool:
    """Whether Python code has begun a backward that runs on this thread: on that of a device one inside another."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not runs_backward(frame):
        frame = frame.f_back
    return frame is not None


def runs_backward(frame: FrameType) -> bool:
    """Whether a Python frame is the one that hands a backward to the autograd engine and waits for it."""
    return frame.f_code is _engine_run_backward.__code__


def compiled_nodes(outputs: Iterable[Tensor], ends: Collection[Any]) -> list[Any]:
    """Return the compiled graphs' autograd nodes between outputs and ``ends``, those before a graph break included."""
    return [node for node in _nodes_behind((t.grad_fn for t in outputs), ends) if "CompiledFunction" in node.name()]


def _nodes_behind(begin: Iterable[Any], ends: Iterable[Any]) -> Iterator[Any]:
    todo, seen = list(begin), set(ends)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo += [following for following, _ in node.next_functions]


def is_half_autocast() -> bool:
    """Whether autocast computes in float16, so that a GradScaler is likely."""
    kinds = ("cpu", "cuda")
    return any(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16 for kind in kinds)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that is running ends, after gradients are accumulated."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_OF_GRAPHS = ("torch::autograd::AccumulateGrad", "torch::autograd::CopyBackwards")


def find_plain_op(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> str | None:
    """Name of an autograd node between inputs and outputs that no compiled graph made; None if there is none.

    Views that AOTAutograd makes of what a graph returned are not counted, nor its copies into what a graph changes.
    """
    begin = ((t if t._base is None else t._base).grad_fn for t in outputs)
    names = (node.name() for node in _nodes_behind(begin, (t.grad_fn for t in inputs)))
    return next((name for name in names if "CompiledFunction" not in name and name not in _OF_GRAPHS), None)
