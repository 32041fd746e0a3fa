"""The backward of one op, as a function at a ``backward`` site is given it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradrewrite.errors import CallbackError


@dataclass(frozen=True, slots=True, eq=False)
class BackwardOp:
    """The backward of one op: the argument of a function at a ``backward`` site.

    The function returns the gradients of the inputs of the op: a tuple in the order of ``inputs`` with None where no
    gradient is wanted, or one tensor where one input wants a gradient. Each has the shape, dtype and device of its
    input; gradients of other inputs are ignored. It is traced once, as other tensor functions are.

    Attributes:
        error: dL/d(output), of the shape and dtype of the output, in units of the unscaled loss; of an op with several
            results a tuple, with None where no error arrives.
        inputs: The values of all tensor inputs, in the order of the op's arguments.
        needs: Whether each input wants a gradient; of a frozen weight False.
        args: The positional arguments of the op as the user called it, with tensors in their places.
        kwargs: Its keyword arguments.
        output: Its result, or the tuple of its results.

    Example:
        >>> import torch
        >>> import gradrewrite as gr
        >>> class Round(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x.round() * 2).sum()
        >>> model = gr.transform(Round(), gr.on("backward:*/round", lambda op: op.error))
        >>> x = torch.tensor([0.4, 1.6], requires_grad=True)
        >>> model(x).backward()
        >>> x.grad
        tensor([2., 2.])
    """

    error: Any
    inputs: tuple[Tensor, ...]
    needs: tuple[bool, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    _vjp: Callable[[Sequence[Tensor | None]], tuple[Tensor | None, ...]] = field(repr=False)

    def vjp(self, error: Any) -> tuple[Tensor | None, ...]:
        """Return torch's own backward of the op for an error, of the one forward that ran.

        Args:
            error: As ``error``: its shapes and dtypes; None in a tuple stands for zeros.

        Returns:
            The gradients in the order of ``inputs``, None where no gradient is wanted.

        Raises:
            CallbackError: A tensor of another shape or dtype, or another number of them.
        """
        own = self.error if isinstance(self.error, tuple) else (self.error,)
        given = tuple(error) if isinstance(error, tuple | list) else (error,)
        if len(given) != len(own):
            raise CallbackError(f"op.vjp(error): the op has {len(own)} results, got {len(given)} errors")
        for g, e in zip(given, own, strict=True):
            if e is None or g is None:
                if g is not None:
                    raise CallbackError("op.vjp(error): no error arrives at one of the results; give None for it")
                continue
            if not isinstance(g, Tensor) or g.shape != e.shape or g.dtype != e.dtype:
                got = f"{tuple(g.shape)}, {g.dtype}" if isinstance(g, Tensor) else type(g).__name__
                raise CallbackError(f"op.vjp(error): the error is {tuple(e.shape)}, {e.dtype}; got {got}")
        return self._vjp(given)
