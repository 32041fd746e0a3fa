"""More than forty ways in which a Python value that a function reads can change between two steps.

Each makes a tensor function and what changes its value; called eagerly, the function itself is the reference.
"""

from __future__ import annotations

import contextvars
import functools
import os
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

Function = Callable[[Tensor], Tensor]
Change = Callable[[], object]
Way = Callable[[], tuple[Function, Change]]

WAYS: dict[str, Way] = {}
factor = 0.5
settings = {"factor": 0.5, "unused": 0}
config = types.ModuleType("a_module_of_the_user")
config.factor = 0.5  # type: ignore[attr-defined]
sys.modules[config.__name__] = config


def way(make: Way) -> Way:
    """List a way under the name of its function."""
    WAYS[make.__name__.removeprefix("_")] = make
    return make


@dataclass
class Settings:
    """Settings of a user."""

    factor: float = 0.5
    others: list[float] = field(default_factory=lambda: [0.5, 1.0])
    shared: ClassVar[float] = 0.5

    @property
    def doubled(self) -> float:
        """Twice the factor."""
        return 2 * self.factor

    def scaled(self, g: Tensor) -> Tensor:
        """Multiply by the factor."""
        return g * self.factor

    def __call__(self, g: Tensor) -> Tensor:
        """Multiply by the factor."""
        return g * self.factor


@dataclass(frozen=True)
class Frozen:
    """Settings that are replaced as a whole."""

    factor: float = 0.5


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 0.5


class Dynamic:
    """Attributes by ``__getattr__``, items by ``__getitem__``."""

    def __init__(self) -> None:
        self._values = {"factor": 0.5}

    def __getattr__(self, name: str) -> float:
        return self.__dict__["_values"][name]

    def __getitem__(self, name: str) -> float:
        return self._values[name]


class Mode(Enum):
    """Two modes."""

    HALF = 0.5
    FULL = 1.0


def _nth(values: Any, at: Any) -> Any:
    return values[at]


def helper(g: Tensor) -> Tensor:
    """Multiply by a global."""
    return g * factor


@way
def closed_over_number() -> tuple[Function, Change]:
    k = 0.5

    def change() -> None:
        nonlocal k
        k = k / 2

    return lambda g: g * k, change


@way
def closed_over_boolean() -> tuple[Function, Change]:
    is_on = True

    def change() -> None:
        nonlocal is_on
        is_on = not is_on

    return lambda g: g * 2 if is_on else g, change


@way
def closed_over_string() -> tuple[Function, Change]:
    how = "half"

    def change() -> None:
        nonlocal how
        how = "double" if how == "half" else "half"

    return lambda g: g / 2 if how == "half" else g * 2, change


@way
def closed_over_none() -> tuple[Function, Change]:
    bound: float | None = None

    def change() -> None:
        nonlocal bound
        bound = 0.01

    return lambda g: g if bound is None else g.clamp(-bound, bound), change


@way
def closed_over_enum() -> tuple[Function, Change]:
    mode = Mode.HALF

    def change() -> None:
        nonlocal mode
        mode = Mode.FULL

    return lambda g: g * mode.value, change


@way
def closed_over_tensor_replaced() -> tuple[Function, Change]:
    k = torch.tensor(0.5)

    def change() -> None:
        nonlocal k
        k = k / 2

    return lambda g: g * k, change


@way
def global_number() -> tuple[Function, Change]:
    def change() -> None:
        global factor
        factor = factor / 2

    return lambda g: g * factor, change


@way
def global_in_a_helper() -> tuple[Function, Change]:
    def change() -> None:
        global factor
        factor = factor / 2

    return lambda g: helper(g) + 1, change


@way
def global_dict() -> tuple[Function, Change]:
    return lambda g: g * settings["factor"], lambda: settings.update(factor=settings["factor"] / 2)


@way
def helper_replaced() -> tuple[Function, Change]:
    def half(g: Tensor) -> Tensor:
        return g / 2

    def change() -> None:
        nonlocal half
        half = torch.neg

    return lambda g: half(g), change


@way
def attribute_of_a_module() -> tuple[Function, Change]:
    def change() -> None:
        config.factor = config.factor / 2  # type: ignore[attr-defined]

    return lambda g: g * config.factor, change


@way
def attribute_of_a_dataclass() -> tuple[Function, Change]:
    own = Settings()
    return lambda g: g * own.factor, lambda: setattr(own, "factor", own.factor / 2)


@way
def frozen_dataclass_replaced() -> tuple[Function, Change]:
    own = Frozen()

    def change() -> None:
        nonlocal own
        own = Frozen(own.factor / 2)

    return lambda g: g * own.factor, change


@way
def attribute_of_a_class() -> tuple[Function, Change]:
    class Own(Settings):
        pass

    return lambda g: g * Own.shared, lambda: setattr(Own, "shared", Own.shared / 2)


@way
def attribute_of_the_base_class() -> tuple[Function, Change]:
    class Base:
        factor = 0.5

    class Own(Base):
        pass

    own = Own()
    return lambda g: g * own.factor, lambda: setattr(Base, "factor", Base.factor / 2)


@way
def attribute_that_shadows_the_class() -> tuple[Function, Change]:
    class Own:
        factor = 0.5

    own = Own()
    return lambda g: g * own.factor, lambda: setattr(own, "factor", 0.25)


@way
def property_of_an_object() -> tuple[Function, Change]:
    own = Settings()
    return lambda g: g * own.doubled, lambda: setattr(own, "factor", own.factor / 2)


@way
def slot() -> tuple[Function, Change]:
    own = Slotted()
    return lambda g: g * own.factor, lambda: setattr(own, "factor", own.factor / 2)


@way
def namespace() -> tuple[Function, Change]:
    own = SimpleNamespace(inner=SimpleNamespace(factor=0.5))
    return lambda g: g * own.inner.factor, lambda: setattr(own.inner, "factor", own.inner.factor / 2)


@way
def attribute_by_getattr() -> tuple[Function, Change]:
    own = SimpleNamespace()
    return lambda g: g * getattr(own, "late", 0.5), lambda: setattr(own, "late", 0.25)


@way
def dynamic_attribute() -> tuple[Function, Change]:
    own = Dynamic()
    return lambda g: g * own.factor, lambda: own._values.update(factor=0.25)


@way
def item_of_an_object() -> tuple[Function, Change]:
    own = Dynamic()
    return lambda g: g * own["factor"], lambda: own._values.update(factor=0.25)


@way
def dict_entry() -> tuple[Function, Change]:
    own = {"factor": 0.5}
    return lambda g: g * own["factor"], lambda: own.update(factor=own["factor"] / 2)


@way
def dict_entry_that_is_new() -> tuple[Function, Change]:
    own: dict[str, float] = {}
    return lambda g: g * own.get("factor", 0.5), lambda: own.update(factor=0.25)


@way
def values_of_a_dict() -> tuple[Function, Change]:
    own = {"a": 0.5, "b": 0.25}
    return lambda g: g * sum(own.values()), lambda: own.update(b=own["b"] / 2)


@way
def nested_containers() -> tuple[Function, Change]:
    own = OrderedDict(groups=[{"factor": 0.5}])

    def change() -> None:
        own["groups"][0]["factor"] /= 2

    return lambda g: g * own["groups"][0]["factor"], change


@way
def default_dict() -> tuple[Function, Change]:
    own = defaultdict(lambda: 1.0, factor=0.5)
    return lambda g: g * own["factor"], lambda: own.update(factor=own["factor"] / 2)


@way
def list_element() -> tuple[Function, Change]:
    own, at = [0.5, 1.0], 0

    def change() -> None:
        own[at] /= 2

    return lambda g: g * _nth(own, at), change


@way
def length_of_a_list() -> tuple[Function, Change]:
    own = [1, 2]
    return lambda g: g * len(own), lambda: own.append(0)


@way
def deque_and_set() -> tuple[Function, Change]:
    own, names = deque([0.5]), {"a"}

    def change() -> None:
        own.append(0.25)
        names.clear()

    return lambda g: g * own[-1] if "a" in names else g, change


@way
def named_tuple_replaced() -> tuple[Function, Change]:
    make = namedtuple("make", "factor")
    own = SimpleNamespace(point=make(0.5))
    return lambda g: g * own.point.factor, lambda: setattr(own, "point", make(own.point.factor / 2))


@way
def numpy_array() -> tuple[Function, Change]:
    own = np.array([0.5, 1.0])

    def change() -> None:
        own[0] /= 2

    return lambda g: g * float(own[0]), change


@way
def default_argument() -> tuple[Function, Change]:
    def scale(g: Tensor, k: float = 0.5) -> Tensor:
        return g * k

    def change() -> None:
        scale.__defaults__ = (0.25,)

    return scale, change


@way
def keyword_default() -> tuple[Function, Change]:
    def scale(g: Tensor, *, k: float = 0.5) -> Tensor:
        return g * k

    def change() -> None:
        assert scale.__kwdefaults__ is not None
        scale.__kwdefaults__["k"] /= 2

    return scale, change


@way
def attribute_of_the_function() -> tuple[Function, Change]:
    def scale(g: Tensor) -> Tensor:
        return g * scale.factor  # type: ignore[attr-defined]

    scale.factor = 0.5  # type: ignore[attr-defined]
    return scale, lambda: setattr(scale, "factor", 0.25)


@way
def partial_of_a_holder() -> tuple[Function, Change]:
    def scale(own: dict[str, float], g: Tensor) -> Tensor:
        return g * own["factor"]

    own = {"factor": 0.5}
    return functools.partial(scale, own), lambda: own.update(factor=own["factor"] / 2)


@way
def bound_method() -> tuple[Function, Change]:
    own = Settings()
    return own.scaled, lambda: setattr(own, "factor", own.factor / 2)


@way
def callable_object() -> tuple[Function, Change]:
    own = Settings()
    return own, lambda: setattr(own, "factor", own.factor / 2)


@way
def decorated() -> tuple[Function, Change]:
    own = Settings()

    def twice(fn: Function) -> Function:
        @functools.wraps(fn)
        def run(g: Tensor) -> Tensor:
            return fn(fn(g))

        return run

    return twice(own.scaled), lambda: setattr(own, "factor", own.factor / 2)


@way
def learning_rate() -> tuple[Function, Change]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)

    def change() -> None:
        optimizer.param_groups[0]["lr"] /= 2

    return lambda g: g * optimizer.param_groups[0]["lr"], change


@way
def learning_rate_in_a_loop() -> tuple[Function, Change]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)

    def scale(g: Tensor) -> Tensor:
        for group in optimizer.param_groups:
            g = g * group["lr"]
        return g

    return scale, lambda: optimizer.param_groups[0].update(lr=0.25)


@way
def training_of_a_model() -> tuple[Function, Change]:
    net = nn.Linear(1, 1)
    return lambda g: g * 2 if net.training else g, lambda: net.train(not net.training)


@way
def parameter_of_a_model_replaced() -> tuple[Function, Change]:
    net = nn.Linear(1, 1)

    def change() -> None:
        net.bias = nn.Parameter(torch.full((1,), 3.0))

    return lambda g: g * net.bias, change


@way
def module_of_a_model_replaced() -> tuple[Function, Change]:
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def change() -> None:
        net[0] = nn.Linear(1, 1)

    return lambda g: g * net[0].bias.detach(), change


@way
def learning_rate_of_a_scheduler() -> tuple[Function, Change]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def change() -> None:
        optimizer.step()
        scheduler.step()

    return lambda g: g * scheduler.get_last_lr()[0], change


@way
def behind_a_weak_reference() -> tuple[Function, Change]:
    net = nn.Linear(1, 1)
    ref = weakref.ref(net)
    return lambda g: g * 2 if ref().training else g, lambda: net.train(not net.training)


@way
def wrapped_as_a_function_of_torch() -> tuple[Function, Change]:
    own = Settings()

    @functools.wraps(torch.nn.functional.normalize)
    def scale(g: Tensor) -> Tensor:
        return g * own.factor

    return scale, lambda: setattr(own, "factor", own.factor / 2)


@way
def environment() -> tuple[Function, Change]:
    os.environ["A_FACTOR"] = "0.5"
    return lambda g: g * float(os.environ["A_FACTOR"]), lambda: os.environ.update(A_FACTOR="0.25")


@way
def mapping_proxy() -> tuple[Function, Change]:
    own = {"factor": 0.5}
    shown = types.MappingProxyType(own)
    return lambda g: g * shown["factor"], lambda: own.update(factor=own["factor"] / 2)


@way
def context_variable() -> tuple[Function, Change]:
    own = contextvars.ContextVar("own", default=0.5)
    return lambda g: g * own.get(), lambda: own.set(own.get() / 2)
