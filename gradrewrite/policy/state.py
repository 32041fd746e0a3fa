"""State: tensors on the device, kept by actions between backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from gradrewrite.errors import CallbackError
from gradrewrite.policy.current import current_recording
from gradrewrite.policy.numbers import python_number
from gradrewrite.policy.state_store import StateKind


class State:
    """State of a tensor function, kept from backward to backward.

    At step sites it is kept from one step to the next.

    A function closes over it, reads it like a tensor (in arithmetic, in torch functions, by the methods of a tensor, or
    as ``state.value``) and writes it with ``state.set``. Each site at which the function acts has a value of its own,
    and so has each group of a group action. Values are on the device of the gradient; they are read and written by
    the compiled graph, which is not compiled again and does not wait. They are part of ``gr.state_dict(model)``.
    ``==`` and ``!=`` compare elements, as those of a tensor do. Methods that work in place (``state.add_(1)``),
    ``state[0] = 1`` and ``state += 1`` are errors, and so is what writes into a tensor that was read out of it.

    What a run of the graph sets is read by the next one; within one call of the function ``set`` is seen at once. A
    function acts on every gradient, bad ones too: one that is to remember nothing of them keeps its value there
    (``torch.where(norm.isfinite(), new, state)``). What was set stays where an update is skipped or a check raises.

    Outside of a rewrite, where a function is called by hand, a state has one value of its own, on the CPU.

    Args:
        shape: Its shape, fixed.
        init: What every element is at first, as long as nothing was loaded.
        dtype: Its dtype.
        name: How it is named in ``gr.state_dict``, behind the site: ``gradient:fc.weight/<name>``; states without a
            name are numbered in the order in which they are first used at a site. A second state of one name at a
            site is named ``<name>.2``.
        over: ``"iterations"`` makes one state of all calls of a site's name, or all iterations of a loop: what the
            function sets in one of them the next one reads, in the order of the backward, the latest call first. So the
            first one in a backward reads what the last one of the backward before has set.

    Raises:
        ValueError: ``over`` is something else.
        TypeError: ``shape`` has something that is no whole number, or ``init`` is no number.
        CallbackError: (from the function) It is written in place.

    Example:
        >>> import gradrewrite as gr
        >>> mean = gr.State()
        >>> def follow(g):  # the mean of all largest values so far, with weights that fall by half
        ...     mean.set((mean + g.abs().amax()) / 2)
        ...     gr.record("mean", mean.value)
        ...     return g
        >>> model = gr.transform(torch.nn.Linear(2, 2), gr.on("gradient:weight", follow))
        >>> for _ in range(2):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> gr.state_dict(model)["states"]
        {'gradient:weight/0': tensor(0.7500)}
    """

    def __init__(
        self,
        shape: tuple[int, ...] = (),
        init: float = 0.0,
        dtype: torch.dtype = torch.float32,
        *,
        name: str = "",
        over: Literal["iterations"] | None = None,
    ) -> None:
        init, shape = python_number(init), python_number(shape)
        shape = shape if isinstance(shape, int) else tuple(map(python_number, shape))
        if isinstance(shape, int) or not all(isinstance(n, int) and not isinstance(n, bool) for n in shape):
            raise TypeError(f"gr.State: shape is a tuple of whole numbers, got {shape!r}")
        if not isinstance(init, int | float):
            raise TypeError(f"gr.State: init is a number, got {init!r}")
        if over not in (None, "iterations"):
            raise ValueError(f"gr.State: over is 'iterations' or None, got {over!r}")
        self._kind = StateKind(torch.Size(shape), init, dtype, name, over is not None)
        self._own: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The value at the site of the traced action.

        For functions called by hand there is one of its own.
        """
        recording = current_recording()
        if recording is not None and recording.states is not None:
            value = recording.states.value(self._kind, recording.device)
            return value.view(value.shape)  # not the tensor itself, whose ``item`` would be a number of the trace
        if self._own is None:
            self._own = self._kind.make()
        return self._own

    def set(self, value: Tensor | State | float) -> None:
        """Write it.

        Args:
            value: A number, a state, or a tensor that broadcasts to its shape; of its dtype from then on.

        Raises:
            CallbackError: The shape does not fit.
        """
        old = self.value
        value = value.value if isinstance(value, State) else value
        try:
            given = value if isinstance(value, Tensor) else torch.full((), value, dtype=old.dtype, device=old.device)
            new = given.to(old.device, old.dtype)
            new = new if new.shape == old.shape else new.expand(old.shape)
        except RuntimeError as err:
            shape = tuple(getattr(value, "shape", ()))
            raise CallbackError(
                f"gr.State.set: got shape {shape}, and the state has {tuple(old.shape)}; give State the shape of what "
                "is written",
                code="state",
            ) from err
        recording = current_recording()
        if recording is not None and recording.states is not None:
            recording.states.set(self._kind, recording.device, new)
        else:
            self._own = new.clone()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function on values."""

        def read(given: Any) -> Any:
            if isinstance(given, State):
                return given.value
            return type(given)(map(read, given)) if type(given) in (list, tuple) else given

        return func(*map(read, args), **{name: read(given) for name, given in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the value."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name.endswith("_"):
            raise _in_place(name)
        return getattr(self.value, name)

    def __repr__(self) -> str:
        """As the call that makes it."""
        kind = self._kind
        name = f", name={kind.name!r}" if kind.name else ""
        name += ", over='iterations'" if kind.is_carried else ""
        return f"State({tuple(kind.shape)}, {kind.init!r}, {kind.dtype}{name})"


def _in_place(name: str) -> CallbackError:
    return CallbackError(
        f"gr.State: {name} would write in place; write the new value with state.set(...)", code="state"
    )


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: State, *others: Any) -> Any:
        raise _in_place(name)

    refuse.__name__ = name
    return refuse


def _operator(name: str) -> Callable[..., Any]:
    def run(self: State, *others: Any) -> Any:
        given = (other.value if isinstance(other, State) else other for other in others)
        return getattr(self.value, name)(*given)

    run.__name__ = name
    return run


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul"),
    *("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "getitem", "len"),
):
    setattr(State, f"__{_name}__", _operator(f"__{_name}__"))  # its hash stays that of its identity
for _name in (
    *("setitem", "delitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor"),
):
    setattr(State, f"__{_name}__", _refused(f"__{_name}__"))
