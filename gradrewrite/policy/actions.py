"""Action protocols: the valid answers of a policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from gradrewrite._utils.formatting import located_callable
from gradrewrite.errors import PolicyError
from gradrewrite.ir.reports import OnFailure
from gradrewrite.policy.schedules import Schedule
from gradrewrite.sites import AFTER_UPDATE, Kind, Site

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TensorFunction: TypeAlias = Callable[[Tensor], Tensor] | Callable[[Tensor, Tensor], Tensor]
Answer: TypeAlias = (
    "Action | ValueAction | GroupAction | SavedForm | Recomputation | TensorFunction | Sequence[Answer] | None"
)
Policy: TypeAlias = "Callable[[Site], Answer] | Sequence[Policy]"

ExampleQuantity: TypeAlias = Literal["square_norms", "second_moment"]
LossReduction: TypeAlias = Literal["mean", "sum"]
JudgedFigure: TypeAlias = Literal["total_norm", "loss"]

BACKWARD: frozenset[Kind] = frozenset(("error", "gradient", "input", "step"))
ANYWHERE: frozenset[Kind] = BACKWARD | {"activation"}
MEASURABLE: frozenset[Kind] = ANYWHERE | AFTER_UPDATE
SAVED: frozenset[Kind] = frozenset(("saved",))


# Functions of torch that work on parameters, with the rules that do what they do.
_OF_PARAMETERS = {
    "clip_grad_norm_": 'gr.on("step:*", ClipByGlobalNorm(max_norm)), with gr.guard(optimizer, model)',
    "clip_grad_value_": 'gr.on("step:*", ClipByValue(clip_value)), with gr.guard(optimizer, model)',
}
_OTHER_FUNCTIONS = (
    (inspect.iscoroutinefunction, "a coroutine function (async def)"),
    (inspect.isgeneratorfunction, "a generator function (it has yield)"),
)


@runtime_checkable
class Action(Protocol):
    """An action at one site: a frozen value (internal until 1.0)."""

    @property
    def kinds(self) -> frozenset[Kind]:
        """The allowed kinds of site."""

    @property
    def has_units(self) -> bool:
        """Whether it means something else for a gradient that a loss scale multiplied; it is then unscaled."""

    def apply(self, tensor: Tensor) -> Tensor:
        """Compute the replacement with torch operations; traced once, on fake tensors."""


class ValueAction(Protocol):
    """An action that also reads the parameter or the activation (internal until 1.0); at run time an ``Action``."""

    kinds: ClassVar[frozenset[Kind]]
    has_units: ClassVar[bool]

    def apply(self, tensor: Tensor, value: Tensor, /) -> Tensor:
        """Compute the replacement of a gradient from it and from its parameter or activation."""


class _PerExample(Protocol):
    @property
    def loss_reduction(self) -> LossReduction:
        """The way from the losses of the examples to that of the batch."""

    @property
    def batch_dim(self) -> int:
        """The batch dimension of the model's inputs."""


@runtime_checkable
class ExampleAction(_PerExample, Protocol):
    """An action that also reads per-example gradients, at gradient sites (internal until 1.0); it is an ``Action`` too.

    The gradient of an example is that of its own loss.
    """

    @property
    def example_quantities(self) -> Sequence[ExampleQuantity]:
        """The required figures; none for the gradient alone."""

    def apply(self, tensor: Tensor, /, *quantities: Tensor) -> Tensor:
        """Compute the replacement of a gradient; ``quantities`` are in units of the unscaled loss."""


@runtime_checkable
class SpecializingAction(Action, Protocol):
    """An action with a variant for each site (internal until 1.0)."""

    def specialize(self, site: Site) -> Action:
        """The action for one site."""


@runtime_checkable
class MeasuringAction(Action, Protocol):
    """An action with records of statistics of its argument (internal until 1.0)."""

    @property
    def statistics(self) -> Mapping[str, str]:
        """Keys of ``statistics.STATISTICS``, by the names of the records."""


@runtime_checkable
class Measurement(MeasuringAction, Protocol):
    """An action that only measures: it records its statistics and returns its argument (internal until 1.0)."""

    @property
    def fails(self) -> OnFailure | None:
        """The consequence of a last statistic that is not 0 (``CheckFinite.on_failure``); None if there is none."""


@runtime_checkable
class BucketedAction(Action, Protocol):
    """An action with one operation for several single sites (internal until 1.0).

    It acts at its position in the order of each site. Its operation begins behind the last gradient of a bucket, and
    ends before the first reader.
    """

    @property
    def bucket_bytes(self) -> float:
        """Largest size of a bucket."""

    def processes(self) -> ProcessGroup:
        """Return the group of processes that it reduces over; of one process nothing is inserted."""

    def begin(self, tensors: Sequence[Tensor]) -> Tensor:
        """Start the operation on gradients of one dtype and device."""

    def end(self, begun: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute all replacements from ``begin``'s result; read no elements of ``tensors``."""


@runtime_checkable
class GroupAction(Protocol):
    """An action at several sites at once, after the actions of the single sites (internal until 1.0)."""

    kinds: ClassVar[frozenset[Kind]]
    has_units: ClassVar[bool]

    @property
    def group(self) -> Hashable:
        """Name of the group; sites are treated together if their actions have the same one."""

    def apply_group(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute all replacements, in the order of ``tensors``."""


@runtime_checkable
class ExampleClip(GroupAction, _PerExample, Protocol):
    """A group action with weights of the batch's examples (internal until 1.0).

    Its ``apply_group`` is given the squared norms ``[B]`` of the gradients of the examples, over all parameters of the
    group, in a list, and returns their weights so.
    """

    @property
    def has_noise(self) -> bool:
        """Whether noise is added to the sum of the weighted gradients."""

    def noise(self, tensor: Tensor) -> Tensor:
        """Return the noise for a sum of gradients of examples, of this shape."""


@runtime_checkable
class NormScaling(GroupAction, Protocol):
    """A group action with one factor from the norms of its gradients (internal)."""

    @property
    def norm_type(self) -> float:
        """Order of the norms."""

    def bound_and_total(self, norms: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return two 0-d tensors with the factor as their quotient: exactly 1 where the action does not act.

        ``norms`` are those of all gradients, in tensors of any shape.
        """


@runtime_checkable
class LossWeighing(GroupAction, Protocol):
    """A group action with weights of the losses, from the gradient of each (internal until 1.0).

    Its ``apply_group`` is given the inner products of the gradients of the losses, ``[K, K]``, and the losses, ``[K]``,
    if ``function`` has two required parameters, all float64, in a list, and returns the weights ``[K]`` so.
    """

    @property
    def function(self) -> Callable[..., Tensor]:
        """The function of the inner products: the user's, or a weighting's method."""


@runtime_checkable
class LossAction(Protocol):
    """An action that also reads the Gram matrix of the losses' gradients (internal until 1.0).

    It is an ``Action`` too.
    """

    @property
    def loss_figures(self) -> Sequence[str]:
        """The required figures; none for the gradient alone."""

    @property
    def without_losses(self) -> Measurement:
        """The part that reads the gradient alone."""

    def apply(self, tensor: Tensor, gramian: Tensor, /) -> Tensor:
        """Compute the replacement; ``gramian`` is that of the plain gradients here, ``[K, K]``, float64."""


@runtime_checkable
class SavedForm(Protocol):
    """An action with another form of a saved tensor (internal until 1.0)."""

    kinds: ClassVar[frozenset[Kind]]
    has_units: ClassVar[bool]

    def refusal(self, tensor: Tensor) -> str:
        """Return why a tensor cannot be kept in this form; ``""`` if it can."""

    def encode(self, tensor: Tensor) -> Sequence[Tensor]:
        """Compute the parts of the form, in the forward."""

    def decode(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """Compute the restored tensor, in the backward."""


@runtime_checkable
class Recomputation(Protocol):
    """An action that lets the backward compute a saved tensor again (internal until 1.0)."""

    kinds: ClassVar[frozenset[Kind]]
    has_units: ClassVar[bool]
    recomputes: ClassVar[bool]


@runtime_checkable
class UpdateJudge(GroupAction, Protocol):
    """A group action at step sites with a verdict on updates (internal until 1.0).

    Its ``apply_group`` returns the gradients unchanged.
    """

    @property
    def of(self) -> JudgedFigure:
        """The figure."""

    def judge(self, figure: Tensor) -> tuple[Tensor, Tensor]:
        """Return the limit of a figure and whether it skips the update, 0-d; set states as if the update is made."""


@runtime_checkable
class LiveBounds(Protocol):
    """An action with bounds that may be tensors, read where a policy is given (internal until 1.0)."""

    def check_bounds(self) -> None:
        """Raise ValueError if a bound cannot be one now."""


@runtime_checkable
class ParameterScaling(Action, Protocol):
    """An action with a factor of the parameter after the update (internal until 1.0)."""

    @property
    def parameter_factor(self) -> float | Tensor:
        """The factor: a number, or a tensor with one element, read at every step."""


@runtime_checkable
class StandIn(Protocol):
    """A value in the place of actions that follow from the site (internal until 1.0)."""

    @property
    def kinds(self) -> frozenset[Kind]:
        """The allowed kinds of site."""

    def stands_for(self, site: Site) -> Sequence[Any]:
        """Return the actions at a site."""


@runtime_checkable
class Bounded(Protocol):
    """An action with bounds, idle at infinite ones (internal until 1.0)."""

    def check_bounds(self) -> None:
        """Raise ValueError if a bound cannot be one now."""

    def with_bounds(self, change: Callable[[Any, float], Any]) -> Action | GroupAction:
        """Return the action with other bounds, each from the bound and the infinity that bounds nothing."""


def is_action(value: Any) -> bool:
    """Return whether a value is an action, of one site, of a group, or of a saved tensor."""
    return isinstance(value, Action | GroupAction | SavedForm | Recomputation | StandIn)


def stands_for(action: Any, site: Site) -> tuple[Any, ...]:
    """Return the actions at a site: those that an action stands for, or itself."""
    if not isinstance(action, StandIn):
        return (action,)
    found = action.stands_for(site)
    return tuple(one for item in found for one in ((item,) if item is action else stands_for(item, site)))


def takes_value(action: Any) -> bool:
    """Return whether a function has two required parameters: the gradient, and the value that it is the gradient of."""
    if isinstance(action, GroupAction):
        return False
    return _num_required(action.apply if isinstance(action, Action) else action) == 2


def _num_required(function: Callable[..., Any]) -> int | None:
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
    required = _num_required(function)
    if required is not None and required not in (1, 2):
        raise PolicyError(
            f"{where}: {describe(function)} takes {required} arguments; a tensor function takes the gradient, or the "
            "gradient and what it is of: the parameter, the activation, the input"
        )


def kinds_of(action: Any) -> frozenset[Kind]:
    """Return the allowed kinds of site of an action or a tensor function."""
    found: frozenset[Kind] = action.kinds if is_action(action) else BACKWARD
    return found


def has_units(action: Any) -> bool:
    """Return whether an action or a tensor function is given the unscaled gradient."""
    return not is_action(action) or bool(action.has_units)


def describe(action: Any) -> str:
    """Return an action as text for a message."""
    if is_action(action) or not callable(action):
        return repr(action)
    return f"the tensor function {located_callable(action)}"


def action_key(action: Any) -> Hashable:
    """Return a key of the nodes that an action inserts; tensors count by identity."""
    if not is_action(action) or not is_dataclass(action):
        return id(action)
    values = (getattr(action, f.name) for f in fields(action))
    return (type(action), *(_setting_key(v) for v in values))


def _setting_key(value: Any) -> Hashable:
    if isinstance(value, Schedule):
        return value
    return (id(value), "tensor") if isinstance(value, Tensor) else repr(value)
