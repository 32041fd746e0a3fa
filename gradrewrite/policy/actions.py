"""Actions: the valid answers of a policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from gradrewrite._utils.formatting import located_callable
from gradrewrite.errors import PolicyError
from gradrewrite.policy.backward_op import BackwardOp
from gradrewrite.policy.insertions import OF_FUNCTIONS, Action, Insertion, ReplaceBackward, ReplaceTensor
from gradrewrite.sites import Kind, Site

OpFunction: TypeAlias = Callable[[BackwardOp], "Sequence[Tensor | None] | Tensor"]
TensorFunction: TypeAlias = Callable[[Tensor], Tensor] | Callable[[Tensor, Tensor], Tensor] | OpFunction
Answer: TypeAlias = "Action | TensorFunction | Sequence[Answer] | None"
Policy: TypeAlias = "Callable[[Site], Answer] | Sequence[Policy]"


# Functions of torch that work on parameters, with the rules that do what they do.
_OF_PARAMETERS = {
    "clip_grad_norm_": 'gr.on("step:*", ClipByGlobalNorm(max_norm)), with gr.guard(optimizer, model)',
    "clip_grad_value_": 'gr.on("step:*", ClipByValue(clip_value)), with gr.guard(optimizer, model)',
}
_UNKNOWN: Any = "unknown"
_NOWHERE = Site(_UNKNOWN, "")  # of a kind at which no action is allowed
_OTHER_FUNCTIONS = (
    (inspect.iscoroutinefunction, "a coroutine function (async def)"),
    (inspect.isgeneratorfunction, "a generator function (it has yield)"),
)


@runtime_checkable
class Bounded(Protocol):
    """An action with bounds, possibly tensors (internal until 1.0).

    They are checked when a policy is given.
    """

    def check_bounds(self) -> None:
        """Raise ValueError if a bound cannot be one now."""


def is_action(value: Any) -> bool:
    """Return whether a value is an action."""
    return isinstance(value, Action)


def insertion_at(action: Any, site: Site) -> Insertion:
    """Return the insertion of an action or a tensor function at a site."""
    if isinstance(action, Action):
        found: Any = action.at(site)
        if not isinstance(found, Insertion):
            raise PolicyError(f"{site}: {action!r}.at(site) returns an Insertion, and returned {found!r}")
        return found
    if site.kind == "backward":
        if takes_value(action):
            raise PolicyError(f"{site}: {describe(action)} takes 2 arguments; here it takes one, the gr.BackwardOp")
        return Insertion(action, ReplaceBackward(action), has_units=True)
    return Insertion(action, ReplaceTensor(action, "value" if takes_value(action) else ""), has_units=True)


def takes_value(function: Callable[..., Any]) -> bool:
    """Return whether a function has two required parameters: the gradient, and the value that it is the gradient of."""
    return num_required(function) == 2


def num_required(function: Callable[..., Any]) -> int | None:
    """Return how many arguments a function needs, 1 if it takes any number; None where it has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a built-in function
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)
    return required or int(any(p.kind in (*positional, inspect.Parameter.VAR_POSITIONAL) for p in parameters))


def actions_of(answer: Any, *, where: str) -> tuple[Any, ...]:
    """Flatten a policy's answer; PolicyError names ``where`` for an invalid one."""
    if answer is None:
        return ()
    if isinstance(answer, type):
        raise PolicyError(
            f"{where}: got the class {answer.__name__}; an action is a value, as in {answer.__name__}(...)"
        )
    if is_action(answer):
        return (answer,)
    if isinstance(answer, Sequence) and not isinstance(answer, str):
        return tuple(action for item in answer for action in actions_of(item, where=where))
    if callable(answer):
        _check_function(answer, where)
        return (answer,)
    meant = "; a condition chooses: ClipByNorm(1.0) if condition else None" if isinstance(answer, bool) else ""
    raise PolicyError(
        f"{where}: a policy answers with an action, a tensor function, a sequence of them, or None; got {answer!r}"
        f"{meant}"
    )


def _check_function(function: Callable[..., Any], where: str) -> None:
    """Refuse callables that are no tensor functions: PolicyError."""
    is_of_torch = getattr(function, "__module__", "") == "torch.nn.utils.clip_grad"
    known = _OF_PARAMETERS.get(getattr(function, "__name__", "")) if is_of_torch else None
    if known is not None:
        raise PolicyError(
            f"{where}: torch's {located_callable(function)} takes parameters, and a tensor function one gradient: "
            f"write {known}"
        )
    kind = next((kind for test, kind in _OTHER_FUNCTIONS if test(function)), None)
    if kind is not None:
        raise PolicyError(f"{where}: {describe(function)} is {kind}; a tensor function returns a tensor")
    required = num_required(function)
    if required is not None and required not in (1, 2):
        raise PolicyError(
            f"{where}: {describe(function)} takes {required} arguments; a tensor function takes the gradient, or the "
            "gradient and what it is of: the parameter, the activation, the input"
        )


def insertion_anywhere(action: Any) -> Insertion | None:
    """Return the part of an insertion that does not depend on the site; None for an action that needs one."""
    try:
        return insertion_at(action, _NOWHERE)
    except Exception:  # of an action of the user; it is asked again at each site
        return None


def kinds_of(action: Any) -> frozenset[Kind]:
    """Return the allowed kinds of site of an action or a tensor function."""
    found: frozenset[Kind] = action.kinds if isinstance(action, Action) else OF_FUNCTIONS
    return found


def describe(action: Any) -> str:
    """Return an action as text for a message."""
    if is_action(action) or not callable(action):
        return repr(action)
    return f"the tensor function {located_callable(action)}"
