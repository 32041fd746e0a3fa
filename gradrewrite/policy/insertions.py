"""Insertions: the effect of an action at a site, as one value for all readers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

from gradrewrite.ir.reports import OnFailure
from gradrewrite.policy.backward_op import BackwardOp
from gradrewrite.policy.recording import record_statistics
from gradrewrite.policy.schedules import Schedule
from gradrewrite.sites import AFTER_UPDATE, Kind, Site, kinds_with

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ExampleQuantity: TypeAlias = Literal["square_norms", "second_moment"]
LossReduction: TypeAlias = Literal["mean", "sum"]
LossStatistic: TypeAlias = Literal["max_abs", "mean_abs"]
JudgedFigure: TypeAlias = Literal["total_norm", "loss"]

BACKWARD = kinds_with(lambda traits: traits.has_units)
ANYWHERE = kinds_with(lambda traits: not traits.needs_kind)
_HEAP_TYPE = 1 << 9  # of Python: a class that was made by a class statement
MEASURABLE = ANYWHERE | AFTER_UPDATE
SAVED: frozenset[Kind] = frozenset(("saved",))
OF_OPS: frozenset[Kind] = frozenset(("backward",))
OF_FUNCTIONS = BACKWARD | OF_OPS | AFTER_UPDATE  # of the user


@dataclass(frozen=True, slots=True)
class PerExample:
    """The figures of single examples' gradients that an action reads, in units of the unscaled loss."""

    quantities: Sequence[ExampleQuantity]
    loss_reduction: LossReduction  # from the losses of the examples to that of the batch
    batch_dim: int  # of the model's inputs


@dataclass(frozen=True, slots=True)
class OtherValues:
    """The values of other sites that an action reads, by the name of the argument."""

    patterns: tuple[tuple[str, str], ...]
    reads_value: bool = False  # and before them that which the gradient is of


@dataclass(frozen=True, slots=True, eq=False)
class MeasureTensor:
    """The measurement of an unchanged tensor."""

    statistics: Mapping[str, str]  # keys of ``statistics.STATISTICS``, by the names of the records
    fails: OnFailure | None = None  # the consequence of a last statistic that is not 0

    def run(self, tensor: Tensor) -> Tensor:
        """Record the statistics; return the tensor."""
        if self.statistics:
            record_statistics(tensor, self.statistics, fails=self.fails)
        return tensor


@dataclass(frozen=True, slots=True, eq=False)
class ReplaceTensor:
    """The replacement of a tensor by a function of it.

    ``"value"``: the second argument of the function is the value that the gradient is of. ``PerExample``: further
    arguments are its quantities. ``OtherValues``: further arguments are these. ``"losses"``: the second argument is the
    Gram matrix of the gradients of the losses, ``[K, K]``, float64.
    """

    run: Callable[..., Tensor]
    reads: Literal["", "value", "losses"] | PerExample | OtherValues = ""
    statistics: Mapping[str, str] = field(default_factory=dict)  # of its argument, among its records
    # Where the gradients of several losses are taken apart it acts at that of the first, and this one at the others.
    of_others: MeasureTensor | None = None
    observed: frozenset[str] = frozenset()  # names of statistics that a measurement of the same value has as well


@dataclass(frozen=True, slots=True, eq=False)
class KeepTensor:
    """A copy of a tensor for the host."""

    run: Callable[[Tensor], Tensor]  # returns its argument


@dataclass(frozen=True, slots=True, eq=False)
class AverageOverRanks:
    """A collective on gradients, in buckets of one dtype and device.

    It begins behind the last gradient of a bucket, and ends before the first reader.
    """

    processes: Callable[[], ProcessGroup]  # of one process nothing is inserted
    begin: Callable[[Sequence[Tensor]], Tensor]
    end: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]  # reads no elements of the second argument
    bucket_bytes: float


@dataclass(frozen=True, slots=True, eq=False)
class ScaleParameter:
    """A factor of the parameter after the update; the gradient stays as it is."""

    factor: Callable[[], float | Tensor]  # a number, or a tensor with one element


@dataclass(frozen=True, slots=True, eq=False)
class HoldElements:
    """Elements of a parameter, and of its optimizer's state, as they were before the update."""

    where: Callable[[Tensor, Tensor], Tensor]  # of the gradient and the value before: True for those


@dataclass(frozen=True, slots=True, eq=False)
class ReplaceGroup:
    """The replacement of the values of a group by a function of all.

    ``run`` is given the sites, their values, and those of ``reads``; it returns all values, unchanged ones as they are.
    """

    group: Hashable
    run: Callable[[Sequence[Site], Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
    reads: OtherValues = field(default_factory=lambda: OtherValues(()))


@dataclass(frozen=True, slots=True, eq=False)
class ScaleGroup:
    """The product of the values of a group with one factor of their norms.

    ``bound_and_total`` makes two 0-d tensors of the norms of all, with the factor as their quotient: exactly 1 where it
    does not act.
    """

    group: Hashable
    run: Callable[[Sequence[Tensor]], Sequence[Tensor]]  # the same in one function, for DTensors
    norm_type: float
    bound_and_total: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]
    has_shares: bool = False  # it records the share of each member


@dataclass(frozen=True, slots=True, eq=False)
class WeighExampleGradients:
    """Weights of the batch's examples in the gradients of a group.

    ``run`` is given the squared norms ``[B]`` of the gradients of the examples, over all parameters of the group, or
    with ``per_parameter`` of each alone, in a list, and returns their weights so.
    """

    group: Hashable
    run: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    examples: PerExample
    noise: Callable[[Tensor], Tensor] | None = None  # for a sum of gradients of examples of this shape
    per_parameter: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class MeasureExampleGradients:
    """Figures of the examples' gradients of a group; the gradients stay as they are.

    ``run`` is given the squared norms ``[B]`` of the gradients of the examples, and that of the gradient of the batch,
    both over all parameters of the group; it records.
    """

    group: Hashable
    run: Callable[[Tensor, Tensor], None]
    examples: PerExample


@dataclass(frozen=True, slots=True, eq=False)
class WeighLossGradients:
    """The weighted sum of the gradients of each loss, in the place of their sum.

    ``run`` is given the inner products of the gradients, ``[K, K]``, the losses, ``[K]``, if ``reads_losses``, and each
    of ``statistics``, ``[K]``, all float64, in a list, and returns the weights ``[K]`` so.
    """

    group: Hashable
    run: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    function: Callable[..., Tensor]  # of the inner products: the user's, or a weighting's method
    reads_losses: bool
    statistics: tuple[LossStatistic, ...] = ()  # of the gradient of each loss
    everywhere: bool = False  # gradients that one loss reaches are multiplied by its weight
    is_constant: bool = False  # the weights do not depend on the gradients


@dataclass(frozen=True, slots=True, eq=False)
class JudgeUpdate:
    """A verdict on an update from one figure of its gradients; they stay as they are.

    ``judge`` returns the limit of a figure and whether it skips the update, 0-d; it sets states as if the update is
    made.
    """

    group: Hashable
    of: JudgedFigure
    judge: Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class StoreSaved:
    """Another form of a saved tensor."""

    form: str  # one tensor has one form of each name
    refusal: Callable[[Tensor], str]  # why a tensor cannot be kept so; ``""`` if it can
    encode: Callable[[Tensor], Sequence[Tensor]]  # in the forward
    decode: Callable[[Sequence[Tensor], Tensor], Tensor]  # in the backward


@dataclass(frozen=True, slots=True, eq=False)
class RecomputeSaved:
    """A saved tensor that the backward computes again."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplaceBackward:
    """The replacement of the backward of an op by a function of it."""

    run: Callable[[BackwardOp], Sequence[Tensor | None] | Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class KeepZeroErrors:
    """Zeros of errors, kept through the backward of an op."""


@dataclass(frozen=True, slots=True, eq=False)
class Omitted:
    """A measurement left out of a graph, with its reserved record names."""

    names: tuple[str, ...]


SingleEffect: TypeAlias = (
    ReplaceTensor | MeasureTensor | KeepTensor | AverageOverRanks | ScaleParameter | HoldElements | Omitted
)
ExampleEffect: TypeAlias = WeighExampleGradients | MeasureExampleGradients
GroupEffect: TypeAlias = ReplaceGroup | ScaleGroup | ExampleEffect | WeighLossGradients | JudgeUpdate
SavedEffect: TypeAlias = StoreSaved | RecomputeSaved
OpEffect: TypeAlias = ReplaceBackward | KeepZeroErrors
Effect: TypeAlias = SingleEffect | GroupEffect | SavedEffect | OpEffect


@dataclass(frozen=True, slots=True, eq=False)
class Insertion:
    """The insertion of one action at one site."""

    action: Any  # as the policy answered it
    effect: Effect
    kinds: frozenset[Kind] = frozenset()  # the allowed kinds of site; those of the action where none are given
    # Whether it means something else for a gradient that a loss scale multiplied; it is then given the unscaled one.
    has_units: bool = False
    every: int | None = None  # number of steps between measurements; None for what acts in each step
    records: tuple[str, ...] = ()  # names that are reserved in a step that leaves it out; those of statistics go first
    rule: str = ""  # pattern of the rule that answered with it; of another callback its name
    numbers: Mapping[str, float] = field(default_factory=dict)  # settings of the action that may be tensors
    is_by_site: bool = False  # the action had other settings at other sites
    key: Hashable = None  # equal for insertions of the same nodes

    def __post_init__(self) -> None:
        """Make the key of an action, and take its kinds."""
        if not self.kinds:
            object.__setattr__(self, "kinds", self.action.kinds if isinstance(self.action, Action) else OF_FUNCTIONS)
        if self.key is None:
            object.__setattr__(self, "key", action_key(self.action))

    @property
    def group(self) -> Hashable | None:
        """Key of the group that it acts on as a whole; None for single sites."""
        return (type(self.action), self.effect.group) if isinstance(self.effect, GroupEffect) else None

    @property
    def read_patterns(self) -> tuple[tuple[str, str], ...]:
        """Patterns of its further arguments, by keyword."""
        reads = isinstance(self.effect, ReplaceTensor | ReplaceGroup) and self.effect.reads
        return reads.patterns if isinstance(reads, OtherValues) else ()

    @property
    def form(self) -> Hashable:
        """The key, without the values of the numbers."""
        if not self.numbers:
            return self.key
        others = (f.name for f in fields(self.action) if f.name not in self.numbers)
        return (
            type(self.action),
            *self.numbers,
            *((name, _setting_key(getattr(self.action, name))) for name in others),
        )

    def omitted(self) -> Insertion:
        """Return the insertion of a step that leaves it out."""
        names = tuple(self.effect.statistics) if isinstance(self.effect, MeasureTensor) else self.records
        return replace(self, effect=Omitted(names))


def run_group(
    effect: GroupEffect, sites: Sequence[Site], values: Sequence[Tensor], others: Sequence[Tensor] = ()
) -> Sequence[Tensor]:
    """Run the function of a group on the values of its sites."""
    match effect:
        case ReplaceGroup():
            return effect.run(sites, values, others)
        case MeasureExampleGradients() | JudgeUpdate():
            return values
    return effect.run(values)


def group_effect(insertion: Insertion) -> GroupEffect:
    """Return the effect of the insertion of a group action."""
    assert isinstance(insertion.effect, GroupEffect)
    return insertion.effect


@runtime_checkable
class Action(Protocol):
    """An action: a frozen value with an insertion for each site (internal until 1.0)."""

    @property
    def kinds(self) -> frozenset[Kind]:
        """The allowed kinds of site."""

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""


def action_key(action: Any) -> Hashable:
    """Return a key of the nodes that an action inserts; tensors count by identity.

    Callables that are made anew at each answer are equal if they hold equal values.
    """
    if is_dataclass(action) and isinstance(action, Action):
        return (type(action), *(_setting_key(getattr(action, f.name)) for f in fields(action)))
    if isinstance(action, FunctionType):
        held = [_contents(cell) for cell in action.__closure__ or ()]
        held += [*(action.__defaults__ or ()), *sorted((action.__kwdefaults__ or {}).items()), *vars(action).items()]
        return action.__code__, id(action.__globals__), tuple(map(_value_key, held))
    if type(action) is functools.partial:
        return action_key(action.func), tuple(map(_value_key, (*action.args, *sorted(action.keywords.items()))))
    if isinstance(action, MethodType):
        return action_key(action.__func__), _value_key(action.__self__)
    if isinstance(action, Action | nn.Module) or not _has_all_in_dict(type(action)):
        return id(action)
    return type(action), tuple((name, _value_key(value)) for name, value in sorted(vars(action).items()))


def _has_all_in_dict(kind: type) -> bool:
    """Whether ``vars`` shows all that an object of a class holds: no slots, no base like ``float`` or ``list``."""
    *bases, last = kind.__mro__
    return last is object and all(base.__flags__ & _HEAP_TYPE and "__slots__" not in vars(base) for base in bases)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


def _value_key(value: Any) -> Hashable:
    if isinstance(value, tuple):
        return tuple(map(_value_key, value))
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def _setting_key(value: Any) -> Hashable:
    match value:
        case Schedule():
            return value
        case Tensor():
            return id(value), "tensor"
        case Mapping():
            return tuple((repr(name), _setting_key(one)) for name, one in value.items())
        case tuple() | list():
            return tuple(map(_setting_key, value))
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(_setting_key(getattr(value, f.name)) for f in fields(value)))
    return action_key(value) if callable(value) else repr(value)
