"""Fake tensors: modes, storages, symbolic sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from gradrewrite._compat.versions import needed_for

with needed_for("graphs are traced with fake tensors, which know their mode"):
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
with needed_for("sizes that depend on data are symbols that a shape environment knows"):
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
    from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true
with needed_for("subclasses with tensors inside can be told from plain tensors"):
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass
with needed_for("fake tensors are made of meta tensors, without dispatch"):
    from torch.utils._mode_utils import no_dispatch
with needed_for("dispatch modes of the user can be left while a graph is made"):
    from torch.utils._python_dispatch import _disable_current_modes
with needed_for("transforms of torch.func can be left while a function is traced"):
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
with needed_for("a storage can be known again without being kept alive"):
    from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef

is_wrapper = is_traceable_wrapper_subclass  # with tensors inside, such as a DTensor
outside_of_modes = _disable_current_modes  # to make graphs, whatever dispatch modes are on (counters, profilers)
outside_of_tracing = unset_fake_temporarily  # to make real tensors, whatever is being traced


def is_mask(tensor: Tensor) -> bool:
    """Whether a real tensor holds -inf and nothing else that is not finite; False without values: fake, or meta."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or not tensor.is_floating_point():
        return False
    tensor = tensor.float() if tensor.itemsize == 1 else tensor  # of 8 bits torch can test none
    return bool(torch.isneginf(tensor).any()) and not bool((torch.isnan(tensor) | torch.isposinf(tensor)).any())


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode:
    """The fake mode of these values, or a new one."""
    return next((t.fake_mode for t in values if isinstance(t, FakeTensor)), None) or FakeTensorMode()


def fake_result(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return the fake result of a node; views share the storage of their base, as Inductor expects."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with torch.no_grad(), mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def fake_copy(node: fx.Node, mode: FakeTensorMode) -> Tensor | None:
    """Return a copy of the fake value of a node, with memory of its own, in a tenth of the time of ``fake_result``.

    None where that has to be asked: for views, several results, unknown sizes, and values of another fake mode.
    """
    value, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
    if type(value) is not FakeTensor or value.fake_mode is not mode or value.layout is not torch.strided:
        return None
    if schema is None or any(result.alias_info is not None for result in schema.returns):
        return None
    if not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        return None
    with no_dispatch():
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(mode, meta, value.device)


def fakes_like(value: Any, mode: FakeTensorMode) -> Any:
    """Return fakes with memory of their own, of the shapes of the tensors in a result."""

    def another(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)

    with torch.no_grad(), mode:
        return fx.node.map_aggregate(value, another)


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one storage."""
    return a.layout is b.layout is torch.strided and storage_key(a) == storage_key(b)


def fake_like(reference: Tensor, tensor: Tensor) -> Tensor:
    """Fake copy of a real tensor, in the fake mode of ``reference``."""
    if not isinstance(reference, FakeTensor):
        return tensor
    return reference.fake_mode.from_tensor(tensor, static_shapes=True).detach()


def fakes_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Fake copies of real tensors, detached, in one new mode."""
    mode = FakeTensorMode()
    return [mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in tensors]


def describe_nodes(gm: fx.GraphModule, values: Sequence[Any]) -> None:
    """Give all nodes of a graph fake values, from real ones of its placeholders; sizes are numbers."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    given = iter(values)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta["val"] = fake_result(node, mode)
        elif node.op != "output":
            value = next(given) if node.op == "placeholder" else getattr(gm, str(node.target))
            is_tensor = isinstance(value, Tensor)
            node.meta["val"] = mode.from_tensor(value.detach(), static_shapes=True) if is_tensor else value


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share memory, fake ones included, as long as both are alive."""
    return cast(int, StorageWeakRef(tensor.untyped_storage()).cdata)


def has_unknown_size(tensor: Tensor) -> bool:
    """Whether a size or a stride depends on data."""
    return bool(free_unbacked_symbols([*tensor.shape, *tensor.stride()]))


def assumptions(graph: fx.Graph) -> Any:
    """Return the assumptions on data-dependent sizes of a graph, as a value that compares equal if none was added."""
    values = (node.meta.get("val") for node in graph.nodes)
    env = next((v.fake_mode.shape_env for v in values if isinstance(v, FakeTensor)), None)
    if env is None:
        return None
    asserts = {symbol: len(known) for symbol, known in env.deferred_runtime_asserts.items()}
    unbacked = {symbol: known for symbol, known in env.var_to_range.items() if free_unbacked_symbols(symbol)}
    return asserts, unbacked, {s: r for s, r in env.replacements.items() if free_unbacked_symbols(s)}


@contextlib.contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Make real tensors in the middle of a function that is traced and functionalized."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def equal_or_guarded(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are equal for the inputs at hand; torch compiles anew for others where they are not."""
    if statically_known_true(a == b):
        return True
    if not all(isinstance(n, int) or n.node.has_hint() for n in (a, b)):
        return False
    hints = [n if isinstance(n, int) else n.node.hint for n in (a, b)]
    return bool(hints[0] == hints[1]) and bool(a == b)


def hint_of(size: int | torch.SymInt) -> int:
    """Return a size for the inputs at hand, for choices that are right for every size; 1024 where it is not known."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1024


def as_number(size: int | torch.SymInt) -> int | torch.SymInt:
    """Return a size as a number where it is the same for every input."""
    known = None if isinstance(size, int) else size.node.maybe_as_int()
    return size if known is None else int(known)
