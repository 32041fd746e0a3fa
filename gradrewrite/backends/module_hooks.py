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

        One comparison, unless the model has hooks or any hook in the process was registered since.
        """
        if RemovableHandle.next_id == self._newest and not self._seen:
            return False
        self._newest = RemovableHandle.next_id
        return self._read() != self._seen

    def _read(self) -> list[Any]:
        of_each = ((name, nn_modules.hooks_of(module)) for name, module in self._model.named_modules())
        return [(name, hooks) for name, hooks in [(None, nn_modules.global_hooks()), *of_each] if any(hooks)]


class WithHooks:
    """First base of the class of an object that runs the hooks of a module around another forward."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Skip ``__init_subclass__`` of the module's class; it may list its subclasses."""


class HookedForwards:
    """Objects that run the hooks of a module around another forward; one class is made for each type."""

    def __init__(self) -> None:
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}

    def around(
        self, forward: Callable[..., Any], module: nn.Module, plain: type[nn.Module], description: str
    ) -> nn.Module:
        """Return an object with a module's attributes and hooks, to be called once, that runs another forward.

        It has the other methods of ``plain``. A replaced forward is refused; ``description`` names the module there.
        """
        if "forward" in vars(module):
            raise NotRewrittenError(
                f"fully_shard and a replaced forward of {description}: the policy would not hold; apply autocast "
                "around the call instead"
            )
        cls = self._classes.get(plain)
        if cls is None:
            body = {"__slots__": ("_gradrewrite_forward",), "forward": _run_other}
            metaclass: Any = type(plain)
            cls = self._classes[plain] = metaclass(plain.__name__, (WithHooks, plain), body)
        hooked: nn.Module = object.__new__(cls)
        object.__setattr__(hooked, "__dict__", vars(module))
        object.__setattr__(hooked, "_gradrewrite_forward", forward)  # a slot, for the module shares the dictionary
        return hooked


def _run_other(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._gradrewrite_forward(*args, **kwargs)


@contextlib.contextmanager
def calls_shown(ref: Callable[[], nn.Module | None]) -> Iterator[Collection[int]]:
    """Show module returns and pass-through modules in traced graphs.

    Pass-through modules get hooks meanwhile, on which compiled code is not guarded: ``HookWatch`` notices the user's.
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
