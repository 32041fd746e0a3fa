"""Hooks of modules, and LSTMs that can be differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from gradrewrite._compat.versions import needed_for

with needed_for("the modules that update running statistics have one base class"):
    from torch.nn.modules.batchnorm import _NormBase


def keep_lstms_differentiable(gm: fx.GraphModule) -> None:
    """Trace the LSTMs of a Dynamo graph as differentiable ops.

    On the CPU torch decomposes an LSTM into oneDNN's inference kernel if its *input* needs no gradient, though its
    parameters may; that kernel has no backward (2.11 to 2.15). The setting that switches it off is process-wide.
    """
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op == "call_function" and node.target is torch.lstm:
                node.target = _lstm


def _lstm(*args: Any, **kwargs: Any) -> Any:
    given = [*args, *kwargs.values()]
    x = kwargs["input"] if "input" in kwargs else args[0]
    states_and_parameters = (t for a in given if isinstance(a, (tuple, list)) for t in a if isinstance(t, Tensor))
    if torch.is_grad_enabled() and not x.requires_grad and any(t.requires_grad for t in states_and_parameters):
        x = x.detach().requires_grad_()  # nobody asks for this gradient, so nothing computes it
    return torch.lstm(*args, **{**kwargs, "input": x}) if "input" in kwargs else torch.lstm(x, *args[1:], **kwargs)


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
