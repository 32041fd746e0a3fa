"""AOTAutograd's cache on disk: entries that hold code of ours, and graphs as bytes.

Imported when Inductor compiles, and by torch when it reads an entry.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch import fx

from gradrewrite._compat.aot_autograd import CodeStore
from gradrewrite._compat.donated_buffers import preserve_donated
from gradrewrite._compat.versions import needed_for

with needed_for("AOTAutograd's cache can be switched off, for on a hit no pass runs"):
    from torch._functorch import config as functorch_config
with needed_for("an entry of AOTAutograd's cache may hold an OutputCode of ours, which torch binds on a hit"):
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
    from torch._inductor import config
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import OutputCode
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler, Options

Run = Callable[[list[Any]], Any]


_store: ContextVar[CodeStore] = ContextVar("store")


@dataclasses.dataclass
class CachedCode(OutputCode):
    """A compiled graph and its wrapper's payload, as an AOTAutograd cache entry."""

    inner: Any  # Inductor's code
    payload: Any  # the wrapper is made from it; None if this code is not to be stored
    is_backward: bool
    donated: tuple[int, ...]  # positions of the inputs that it overwrites
    run: Run | None

    def __post_init__(self) -> None:
        # torch reads these from its own code.
        self._fx_graph_cache_key = self.inner._fx_graph_cache_key
        self._fx_graph_cache_debug_lines = self.inner._fx_graph_cache_debug_lines
        self._time_taken_ns = self.inner._time_taken_ns or 0  # torch divides by it after a hit
        self._boxed_call = True  # an attribute of the object: torch wraps a backward with functools.wraps

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run."""
        assert self.run is not None
        return self.run(inputs)  # type: ignore[arg-type]

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """See ``OutputCode``."""
        self.inner.set_triton_bundle(triton_bundle)

    def prepare_for_serialization(self) -> None:
        """See ``OutputCode``; torch calls it on a shallow copy."""
        if self.payload is None:
            raise BypassAOTAutogradCache("gradrewrite: the policy's answers cannot be a part of the key")
        self.run = None
        self.inner = copy.copy(self.inner)
        self.inner.prepare_for_serialization()

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Load the code, and make its run-time wrapper; on a hit."""
        store = _store.get()
        inner, _ = FxGraphCache.cache_hit_post_compile(self.inner, {}, constants)
        if inner is None:
            raise BypassAOTAutogradCache("gradrewrite: Inductor's code cannot be loaded from the disk")
        inner.post_compile(example_inputs, constants, graph_kwargs)
        self.inner = inner
        restore = store.restore_backward if self.is_backward else store.restore_forward
        self.run = restore(preserve_donated(inner, self.donated), self.payload)


@contextlib.contextmanager
def caching(store: CodeStore) -> Iterator[None]:
    """Let AOTAutograd use its cache inside the block; the backward is compiled together with the forward."""
    token = _store.set(store)
    try:
        with functorch_config.patch(
            enable_autograd_cache=True, bundled_autograd_cache=True, force_non_lazy_backward_lowering=True
        ):
            yield
    finally:
        _store.reset(token)


def is_enabled(settings: Mapping[str, Any]) -> bool:
    """Whether the user lets torch keep compiled graphs on disk."""
    asked = [settings.get(name, getattr(config, name)) for name in ("fx_graph_cache", "force_disable_caches")]
    return bool(functorch_config.enable_autograd_cache) and asked == [True, False]


def folder() -> str:
    """Return the folder of Inductor's caches."""
    return str(cache_dir())


def dump_graph(gm: fx.GraphModule) -> bytes:
    """Return a graph without metadata and attributes as bytes."""
    return bytes(GraphPickler.dumps(gm, Options(ops_filter=None)))


def load_graph(data: bytes) -> fx.GraphModule:
    """Return the graph that ``dump_graph`` was given."""
    graph = GraphPickler.loads(data, FakeTensorMode())
    assert isinstance(graph, fx.GraphModule)
    return graph
