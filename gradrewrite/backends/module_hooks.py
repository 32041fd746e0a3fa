"""Hooks of a model: change detection, hooks around another forward, and taps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from gradrewrite._compat import dynamo_returns, nn_modules
from gradrewrite.errors import NotRewrittenError
from gradrewrite.instrumentation.probes import note_return, tap_module


class HookWatch:
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
        of_all = nn_modules.global_hooks()
        read = [("", of_all)] if any(of_all) else []
        for name, module in self._model.named_modules():
            hooks = nn_modules.hooks_of(module)
            if any(hooks):
                read.append((name, hooks))
        return tuple(read)


class WithHooks:
    """First base of the class of an object that runs the hooks of a module around another forward."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Skip ``__init_subclass__`` of the module's class; it may list its subclasses."""


class HookedForwards:
    """Objects that run the hooks of a module around another forward; their class is made once for each type."""

    def __init__(self) -> None:
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}

    def around(
        self, forward: Callable[..., Any], module: nn.Module, plain: type[nn.Module], description: str
    ) -> nn.Module:
        """Return an object with the attributes and hooks of a module, to be called once, that runs another forward.

        Args:
            forward: The other forward, without ``self``.
            module: The module.
            plain: The class whose other methods the object has.
            description: Names the module in errors.

        Raises:
            NotRewrittenError: The forward of the module itself was replaced.
        """
        if "forward" in vars(module):
            raise NotRewrittenError(
                f"fully_shard and a replaced forward of {description}: the policy would not hold; apply autocast "
                "around the call instead"
            )
        cls = self._classes.get(plain)
        if cls is None:
            body = {"__slots__": (_FORWARD,), "forward": _run_other}
            metaclass: Any = type(plain)
            cls = self._classes[plain] = metaclass(plain.__name__, (WithHooks, plain), body)
        hooked: nn.Module = object.__new__(cls)
        object.__setattr__(hooked, "__dict__", vars(module))
        object.__setattr__(hooked, _FORWARD, forward)  # a slot, for the module shares the dictionary
        return hooked


_FORWARD = "_gradrewrite_forward"


def _run_other(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(self, _FORWARD)(*args, **kwargs)


@contextlib.contextmanager
def calls_shown(ref: Callable[[], nn.Module | None]) -> Iterator[Collection[int]]:
    """Show module returns and pass-through modules in traced graphs.

    Pass-through modules get hooks that are there only meanwhile. Compiled code is not guarded on these; ``HookWatch``
    notices what the user registers there.
    """
    model = ref()
    modules = [m for m in model.modules() if passes_through(m)] if model is not None else []
    shown = nn_modules.shown_while_tracing(modules, tap_module)
    with dynamo_returns.returns_noted(note_return), shown as unguarded:
        yield unguarded


def passes_through(module: nn.Module) -> bool:
    """Whether a module is an ``nn.Identity``, or of a subclass with the same forward: placed to name a value."""
    return (
        isinstance(module, nn.Identity)
        and type(module).forward is nn.Identity.forward
        and "forward" not in module.__dict__
    )
