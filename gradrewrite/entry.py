"""The compiled function around a model: its own code object, the hooks it was traced with, what torch refuses."""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradrewrite import _torch
from gradrewrite.backend import Backend
from gradrewrite.errors import GraphBreakError, NotRewrittenError
from gradrewrite.names import user_line
from gradrewrite.probes import _tap_module
from gradrewrite.session import Session

_counter = itertools.count()


class Hooks:
    """The hooks of a model: whether they have changed since it was traced."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen = self._read()
        self._newest = RemovableHandle.next_id

    def have_changed(self) -> bool:
        """Whether a hook was registered or removed.

        One comparison, unless the model has hooks or any hook in the process was registered since: then all modules
        are looked at.
        """
        if RemovableHandle.next_id == self._newest and not self._seen:
            return False
        self._newest = RemovableHandle.next_id
        return self._read() != self._seen

    def _read(self) -> tuple[Any, ...]:
        of_all = _torch.global_hooks()
        read = [("", of_all)] if any(of_all) else []
        for name, module in self._model.named_modules():
            hooks = _torch.hooks_of(module)
            if any(hooks):
                read.append((name, hooks))
        return tuple(read)


_identity_lock = threading.Lock()
_identity_forward = nn.Identity.forward


def _shown_forward(self: nn.Identity, input: Tensor) -> Tensor:
    shown: Tensor = _tap_module(input)
    return shown


def _show_identities() -> None:
    """Let pass-through modules appear in graphs while they are traced.

    The class is changed, not the modules: a hook that is there only while the tracer looks would be guarded on, and
    every call would be traced anew.
    """
    global _identity_forward
    with _identity_lock:
        if nn.Identity.forward is not _shown_forward:
            _identity_forward = nn.Identity.forward
            nn.Identity.forward = _shown_forward  # type: ignore[method-assign]


def _hide_identities() -> None:
    with _identity_lock:
        if nn.Identity.forward is _shown_forward:
            nn.Identity.forward = _identity_forward  # type: ignore[method-assign]


class Entry:
    """The compiled function around a model.

    It has a code object of its own: torch counts compilations by code object, and at the ninth transform of a class
    would run the plain model.
    """

    num_loose = 0  # entries that may break the graph: behind a break, their frames share code objects again

    def __init__(self, session: Session, backend: Backend, model: nn.Module, settings: Mapping[str, Any]) -> None:
        """Compile with these arguments of ``torch.compile``; TypeError for one that it does not take."""
        self._model = model
        self._fullgraph = bool(settings["fullgraph"])
        self._hooks = Hooks(model)
        Entry.num_loose += not self._fullgraph
        self._compiled = torch.compile(_fresh_function(session, self._fullgraph), backend=backend, **settings)

    def is_stale(self) -> bool:
        """Whether hooks have changed since the model was compiled."""
        return self._hooks.have_changed()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model.

        Raises:
            GraphBreakError: The tracer cannot see the whole model.
            NotRewrittenError: Torch would run the plain model.
        """
        many = contextlib.nullcontext() if self._fullgraph else _torch.recompile_limit_times(Entry.num_loose)
        try:
            with _torch.on_compile(_show_identities, _hide_identities), many:
                return self._compiled(self._model, args, kwargs)
        except (_torch.Unsupported, _torch.UserError) as err:
            raise _graph_break(err) from err
        except _torch.FailOnRecompileLimitHit as err:
            raise NotRewrittenError(
                f"torch's recompile limit is reached, and the policy would not hold for this call: {err}. Raise "
                "torch._dynamo.config.recompile_limit, or let shapes be symbolic (dynamic=True)"
            ) from err
        finally:
            _hide_identities()


def _fresh_function(session: Session, fullgraph: bool) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    def entry(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling():
            _runs_plain(session, fullgraph, (model, args, kwargs))
        return model(*args, **kwargs)

    session.entry_name = f"gradrewrite_entry_{next(_counter)}"
    code = entry.__code__.replace(co_name=session.entry_name)
    return types.FunctionType(code, entry.__globals__, session.entry_name, entry.__defaults__, entry.__closure__)


def _runs_plain(session: Session, fullgraph: bool, call: Any) -> None:
    """Torch runs the plain model: refuse, or warn, where a backward could follow."""
    model, args, kwargs = call
    leaves = itertools.chain(model.parameters(), tensors_in((args, kwargs)))
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in leaves):
        return
    text = (
        "torch runs the plain model, so the policy does not hold (torch.compiler.disable, a stance, "
        "TORCH_COMPILE_DISABLE, or the recompile limit)"
    )
    if fullgraph:
        raise NotRewrittenError(f"{text}; lift it, or pass fullgraph=False to run without the policy")
    session.say_once("plain", text)


def _graph_break(err: Exception) -> GraphBreakError:
    line = user_line(_torch.user_stack(err))
    where = f"{line}: " if line else ""
    paragraphs = str(err).strip().split("\n\n")
    detail = [p.strip() for p in paragraphs[1:] if "Developer debug context" in p]
    reason = " ".join(" ".join([paragraphs[0], *detail]).split())
    return GraphBreakError(
        f"{where}the tracer cannot follow this line, so the policy could not reach all of the model ({reason}). Change "
        "the line, or pass fullgraph=False: what is skipped is then listed in model.explain()"
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, dataclasses included."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave the random state of all devices as it is."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        yield
