"""Lifetime of compiled code: functions under torch.compile, and Dynamo's caches."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from gradrewrite._compat.dynamic_sizes import marks_removed
from gradrewrite._compat.inner_gradients import inner_gradients_traced
from gradrewrite._compat.recurrent import without_time_steps
from gradrewrite._compat.versions import needed_for

with needed_for("Dynamo's cache entries of a code object can be listed and dropped"):
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list, cached_backends, innermost_backend
with needed_for("Dynamo's recompile limit can be raised while one frame compiles"):
    from torch._dynamo import config as dynamo_config
with needed_for("one thread compiles at a time, under a lock"):
    from torch._dynamo.convert_frame import compile_lock
with needed_for("a dropped cache entry is one whose guards were replaced, and a finalizer holds its guards"):
    from torch._dynamo.guards import CheckFunctionManager, DeletedGuardManagerWrapper
with needed_for("it can be asked whether Dynamo skips a frame"):
    from torch._dynamo import trace_rules

    _KNOWS_FRAME = "frame" in inspect.signature(trace_rules.check).parameters  # since torch 2.12
with needed_for("Dynamo notes the Python stacks of compilations"):
    from torch._dynamo.utils import get_metrics_context


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Hold torch's compile lock inside the block, for compilations outside of Dynamo.

    Tracers patch torch for the process. While Dynamo compiles, ``torch.compiler.is_compiling()`` holds, by which other
    threads know that it is not they who are traced, and may run compiled functions; so it does inside the block.
    """
    with compile_lock:
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


_WhileTracing = Callable[[], contextlib.AbstractContextManager[Collection[int]]]


class CompiledFunction:
    """A function under ``torch.compile``, with its compiled code in torch's caches.

    torch keeps compiled code with the code object of each frame, which Python's garbage collector does not look into,
    and every backend in a table. So nothing is freed by itself; ``drop`` frees it. The backend holds what belongs to a
    model weakly: torch may keep it after ``drop``. ``while_tracing`` is entered on the thread that traces a frame; no
    other thread traces meanwhile. It gives the identities of objects that compiled code is not guarded on.
    """

    _num_running = 0
    _lock = threading.Lock()

    def __init__(
        self,
        fn: Callable[..., Any],
        backend: Callable[..., Any],
        settings: Mapping[str, Any],
        while_tracing: _WhileTracing,
    ) -> None:
        settings = dict(settings)
        if isinstance(settings.get("options"), dict):
            settings["options"] = dict(settings["options"])  # torch.compile takes entries out of it
        compiled = torch.compile(nn.Identity(), backend=backend, **settings)
        self._frames: _Frames | None = None
        self._run = fn
        if isinstance(compiled, OptimizedModule):  # otherwise torch.compile is disabled
            context: Any = compiled.dynamo_ctx
            context.callback = self._frames = _Frames(context.callback, while_tracing)
            # Whole graphs are asked of the tracer. While a function runs that has this set, no other thread's compiled
            # code runs behind a graph break (torch before 2.15).
            context.fullgraph = False
            self._run = context(fn)

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        with self._lock:
            clear_dropped()
            CompiledFunction._num_running += 1
        try:
            return self._run(*args)
        finally:
            with self._lock:
                CompiledFunction._num_running -= 1

    @property
    def drop(self) -> Callable[[], None]:
        """Return a function that frees torch's compiled code for this one; it does not keep this object alive."""
        return self._frames.compiled.drop if self._frames is not None else lambda: None


class CompiledCode:
    """Code objects compiled for one backend."""

    def __init__(self, backend: Any) -> None:
        self._backend = weakref.ref(backend)
        self._codes: dict[int, types.CodeType] = {}
        cached_backends.pop(id(backend), None)  # torch's table of all backends

    def add(self, code: types.CodeType) -> None:
        """Note that a frame with this code object is compiled."""
        self._codes[id(code)] = code

    def drop(self) -> None:
        """Let torch forget it, as it does when an object is deleted that code was compiled for."""
        codes, self._codes = self._codes, {}
        backend, guards = self._backend(), []
        for code in codes.values():
            for entry in _debug_get_cache_entry_list(code):
                if entry.backend is backend and not _is_dropped(entry):
                    guards.append(entry.guard_manager)
                    gone = DeletedGuardManagerWrapper("the model that gradrewrite compiled it for is gone")
                    cast(Any, entry.guard_manager.extra_state).invalidate(entry, gone)
            _dropped.append(weakref.ref(code))
        _forget_guards(guards)


def _forget_guards(dropped: Sequence[Any]) -> None:
    """Let go of guards that are not in use any more.

    torch leaves a ``weakref.finalize`` for each class, module and function that compiled code is guarded on. It holds
    the guards until that object is gone, so for a class for good; ``torch.compiler.reset()`` does not release them.
    """
    identities = {id(guards) for guards in dropped}
    for finalizer in weakref.finalize._registry.copy():  # type: ignore[attr-defined]
        if id(_guards_held_by(finalizer)) in identities:
            finalizer.detach()


def _guards_held_by(finalizer: weakref.finalize[Any, Any]) -> Any:
    alive = finalizer.peek()
    method = alive[1].func if alive is not None and isinstance(alive[1], functools.partial) else None
    manager = method.__self__ if isinstance(method, types.MethodType) else None
    # A manager whose guards could not be made has none.
    return vars(manager).get("guard_manager") if isinstance(manager, CheckFunctionManager) else None


class _Frames:
    """Dynamo's callback for frames that it has no code for."""

    def __init__(self, callback: Any, while_tracing: _WhileTracing) -> None:
        self._callback = callback
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend  # where torch looks for the backend
        self._backend = innermost_backend(callback)
        self._while_tracing = while_tracing
        self.compiled = CompiledCode(self._backend)

    def __call__(self, frame: Any, *args: Any) -> Any:
        of_frame = {"frame": frame} if _KNOWS_FRAME else {}
        if trace_rules.check(frame.f_code, **of_frame):  # torch's own: marked as such, for all threads and models
            return self._callback(frame, *args)
        with compile_lock, self._while_tracing() as unguarded:
            self.compiled.add(frame.f_code)
            try:
                with (
                    self._settings(frame.f_code),
                    without_time_steps(),
                    inner_gradients_traced(),
                    marks_removed(),
                    self._without_guards_on(unguarded),
                ):
                    return self._callback(frame, *args)
            finally:
                _forget_stacks()

    def _settings(self, code: types.CodeType) -> contextlib.AbstractContextManager[None]:
        """Return Dynamo's settings for compiling a code object.

        Each backend may compile it as often as torch allows all; dropped code does not count. Methods of loggers that
        log once in a process (``warning_once`` of transformers) break no graph: what they would say is not logged.
        """
        once = {getattr(logging.Logger, name) for name in dir(logging.Logger) if name.endswith("_once")}
        entries = _debug_get_cache_entry_list(code)
        times = len({id(self._backend), *(id(entry.backend) for entry in entries if not _is_dropped(entry))})
        more = sum(_is_dropped(entry) for entry in entries)
        # Two events of the profiler in each call take as long as the call of a small model's code.
        silent: dict[str, Any] = (
            {"record_runtime_overhead": False} if hasattr(dynamo_config, "record_runtime_overhead") else {}
        )
        patch = dynamo_config.patch(
            **silent,
            recompile_limit=dynamo_config.recompile_limit * times + more,
            accumulated_recompile_limit=dynamo_config.accumulated_recompile_limit * times + more,
            allow_rnn=True,  # a recurrent layer is traced as one operator
            ignore_logging_functions=dynamo_config.ignore_logging_functions | once,
        )
        return cast(contextlib.AbstractContextManager[None], patch)

    @contextlib.contextmanager
    def _without_guards_on(self, unguarded: Collection[int]) -> Iterator[None]:
        """Compile without guards on these objects and their contents: code is used whatever becomes of them."""
        if not unguarded:
            yield
            return
        hooks = self._callback.hooks
        given = hooks.guard_filter_fn

        def keep(guards: Sequence[Any]) -> list[bool]:
            names = tuple({guard.name for guard in guards if id(guard.value) in unguarded})
            kept = list(given(guards)) if given is not None else [True] * len(guards)
            inside = tuple(f"{name}[" for name in names)
            ours = [guard.name in names or guard.name.startswith(inside) for guard in guards]
            return [k and not o for k, o in zip(kept, ours, strict=True)]

        hooks.guard_filter_fn = keep
        try:
            yield
        finally:
            hooks.guard_filter_fn = given


def _forget_stacks() -> None:
    metrics = get_metrics_context()
    if not metrics.in_progress():
        metrics._edits.clear()  # stacks of this thread's compilations, which keep code objects alive


_dropped: deque[weakref.ref[types.CodeType]] = deque()


def _is_dropped(entry: Any) -> bool:
    return isinstance(entry.guard_manager, DeletedGuardManagerWrapper)


def clear_dropped() -> None:
    """Take the empty entries from code objects that have no others; torch counts them as compilations.

    Torch must not be looking for code meanwhile: if a thread compiles, it is left for later.
    """
    if not _dropped or CompiledFunction._num_running or not compile_lock.acquire(blocking=False):
        return
    try:
        for _ in range(len(_dropped)):
            code = _dropped.popleft()()
            if code is None:
                continue
            entries = _debug_get_cache_entry_list(code)
            if not all(_is_dropped(entry) for entry in entries):
                _dropped.append(weakref.ref(code))
                continue
            del entries
            reset_code(code)
    finally:
        compile_lock.release()


def traces_recurrent() -> bool:
    """Return whether the user lets Dynamo trace recurrent layers."""
    return bool(dynamo_config.allow_rnn)
