"""Training steps: the loss of a batch by a model, traced as one method."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import nn

from gradrewrite.instrumentation.module_names import STEP

METHOD = STEP

Loss = Callable[[Any, Any], Any]  # of an output and the batch
ComputeLoss = Callable[..., Any]  # of a model and the parts of the batch


class TrainingStep:
    """The loss of one batch, by ``loss(output, batch)`` or by ``compute_loss(model, *args, **kwargs)``."""

    def __init__(self, loss: Loss | None = None, compute_loss: ComputeLoss | None = None) -> None:
        self._loss, self._compute_loss = loss, compute_loss

    def add_to(self, model: nn.Module) -> None:
        """Give a model the method ``METHOD``; its class changes.

        TypeError or ValueError if it cannot have one.
        """
        step = self.function(model)

        def method(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return step(self, *args, **kwargs)

        method.__signature__ = self._signature(model)  # type: ignore[attr-defined]  # names of inputs
        cls = next(known for known in type(model).__mro__ if not issubclass(known, _HasStep))
        metaclass: Any = type(cls)
        names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        model.__class__ = metaclass(cls.__name__, (_HasStep, cls), {"__slots__": (), **names, METHOD: method})

    def added_to(self, model: nn.Module) -> nn.Module:
        """Return a view of a model with the method."""
        view: nn.Module = object.__new__(type(model))
        object.__setattr__(view, "__dict__", vars(model))
        self.add_to(view)
        return view

    def function(self, model: nn.Module) -> ComputeLoss:
        """Return the step as a function of a model and these arguments."""
        if self._compute_loss is not None:
            return self._compute_loss
        loss, name = self._loss, _name_of_batch(model)
        assert loss is not None

        def step(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            batch = kwargs.pop(name)
            return loss(model(*args, **kwargs), batch)

        return step

    def arguments(self, model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the method for a batch.

        The batch stays as it is, if a loss takes parts out of it.
        """
        args, kwargs = arguments_of(model, batch, has_loss=self._compute_loss is None)
        return args, kwargs if self._compute_loss is not None else {**kwargs, _name_of_batch(model): own_batch(batch)}

    def _signature(self, model: nn.Module) -> inspect.Signature:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        try:
            if self._compute_loss is None:
                known = [*inspect.signature(model.forward).parameters.values()]
            else:
                first, *known = inspect.signature(self._compute_loss).parameters.values()
                known = [first, *known] if first.kind in _MANY else known
            if self._compute_loss is None and inspect.Parameter.VAR_KEYWORD not in {p.kind for p in known}:
                known.append(_ANY[1])  # the batch
            return inspect.Signature([own, *known])
        except (TypeError, ValueError):  # a function that Python cannot read, or a name that is taken
            return inspect.Signature([own, *_ANY])


class _HasStep(nn.Module):
    """The first base of a class with a step."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Skip ``__init_subclass__`` of the model's class; it may list its subclasses."""


_MANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_ANY = [inspect.Parameter("args", _MANY[0]), inspect.Parameter("kwargs", _MANY[1])]


def _name_of_batch(model: nn.Module) -> str:
    """Return a keyword for the batch, unknown to the forward."""
    return "batch" if "batch" not in inspect.signature(model.forward).parameters else "whole_batch"


def own_batch(batch: Any) -> Any:
    """Copy a batch, if a loss could take parts out of it."""
    return copy.copy(batch) if isinstance(batch, MutableMapping | list) else batch


def arguments_of(model: nn.Module, batch: Any, *, has_loss: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model's call with a batch.

    With a loss, for the rest of the batch, they are the parts alone that its forward needs.
    """
    parameters = inspect.signature(model.forward).parameters.values() if has_loss else ()
    kinds = {parameter.kind for parameter in parameters}
    if isinstance(batch, Mapping):
        if not has_loss or inspect.Parameter.VAR_KEYWORD in kinds:
            return (), dict(batch)
        return (), {parameter.name: batch[parameter.name] for parameter in parameters if parameter.name in batch}
    args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if has_loss and inspect.Parameter.VAR_POSITIONAL not in kinds:
        needed = [p for p in parameters if p.default is p.empty and p.kind is not inspect.Parameter.KEYWORD_ONLY]
        args = args[: max(1, len(needed))]
    return args, {}
