"""Hooks of modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gradrewrite._compat.versions import needed_for

with needed_for("the modules that update running statistics have one base class"):
    from torch.nn.modules.batchnorm import _NormBase


def global_hooks() -> tuple[tuple[int, ...], ...]:
    """Identities of the hooks registered on all modules."""
    module = torch.nn.modules.module
    return tuple(
        tuple(hooks)
        for hooks in (
            module._global_forward_pre_hooks,
            module._global_forward_hooks,
            module._global_backward_pre_hooks,
            module._global_backward_hooks,
        )
    )


_OURS_WHILE_TRACING = -1  # torch counts hooks from 0


def hooks_of(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Identities of the hooks registered on one module; those of ``shown_while_tracing`` are left out."""
    dicts = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    # Read at once: another thread may be tracing.
    return tuple(tuple(key for key in tuple(hooks) if key != _OURS_WHILE_TRACING) for hooks in dicts)


@contextlib.contextmanager
def shown_while_tracing(modules: Sequence[nn.Module], show: Callable[[Any], Any]) -> Iterator[Collection[int]]:
    """Pass the results of modules through ``show``, while tracing; of one with forward hooks its first argument.

    A hook on each module does it, put into its dictionary without the counter of hooks moving. Gives the identities of
    the dictionaries. A module that has forward hooks and forward pre-hooks is left out.
    """

    def on_output(module: nn.Module, args: Any, output: Any) -> Any:
        return show(output)

    def on_input(module: nn.Module, args: Any) -> Any:
        return (show(args[0]), *args[1:]) if args else None

    changed = []
    try:
        for module in modules:
            if not module._forward_hooks:
                module._forward_hooks[_OURS_WHILE_TRACING] = on_output
                changed.append(module._forward_hooks)
            elif _OURS_WHILE_TRACING not in module._forward_hooks and not module._forward_pre_hooks:
                module._forward_pre_hooks[_OURS_WHILE_TRACING] = on_input
                changed.append(module._forward_pre_hooks)
        yield {id(hooks) for hooks in changed}
    finally:
        for hooks in changed:
            del hooks[_OURS_WHILE_TRACING]


def updates_statistics(module: nn.Module | None) -> bool:
    """Whether a module writes running statistics in its forward, by a kernel that leaves their versions as they are."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats
