"""Values of tokens that the user logged for one forward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradrewrite._utils.formatting import listed

_WAY_OUT = (
    "one tensor [B, T] for each value, or [total] or [1, total] of a packed batch, with cu_seqlens=[0, n_1, n_1 + n_2, "
    "..., total] or position_ids"
)


@dataclass(frozen=True, slots=True, eq=False)
class LoggedTokens:
    """The values of the tokens of a batch, by name, and its sequences if it is packed."""

    values: Mapping[str, Tensor]
    cu_seqlens: Tensor | None = None
    position_ids: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all values; that of the tokens where there are none."""
        known = [*self.values.values(), *([] if self.position_ids is None else [self.position_ids])]
        return tuple(known[0].shape)

    @property
    def is_packed(self) -> bool:
        """Whether several sequences are in a row."""
        return self.cu_seqlens is not None or self.position_ids is not None

    def places(self) -> tuple[Tensor, Tensor]:
        """Return the row and the position of each token ``[N]``; of a packed batch the sequence, and that in it.

        Waits for the device. ValueError where ``cu_seqlens`` does not fit the values.
        """
        number = math.prod(self.shape)
        order = torch.arange(number)
        starts = self._starts(number)
        rows = torch.searchsorted(starts, order, right=True) - 1
        return rows, order - starts[rows]

    def _starts(self, number: int) -> Tensor:
        """Return the number of the first token of each sequence."""
        if self.cu_seqlens is not None:
            ends = self.cu_seqlens.cpu().long()
            if len(ends) < 2 or ends[0] != 0 or ends[-1] != number or bool((ends.diff() < 0).any()):
                shown = listed([str(end) for end in ends.tolist()])
                raise ValueError(
                    f"cu_seqlens of monitor.log_tokens is [{shown}], and the values have {number} "
                    f"tokens: it goes from 0 to {number}, and never down"
                )
            return ends[:-1]
        is_first = torch.zeros(self.shape, dtype=torch.bool)
        is_first[..., :1] = True
        if self.position_ids is not None:
            is_first |= self.position_ids.cpu() == 0
        return is_first.flatten().nonzero().flatten()


def logged_tokens(
    values: Mapping[str, Any], cu_seqlens: Tensor | None = None, position_ids: Tensor | None = None
) -> LoggedTokens:
    """Return copies of these values; TypeError or ValueError if they do not fit each other."""
    packing = {"cu_seqlens": cu_seqlens, "position_ids": position_ids}
    given = {**values, **{name: value for name, value in packing.items() if value is not None}}
    for name, value in given.items():
        if not isinstance(value, Tensor) or value.is_complex():
            kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"monitor.log_tokens takes {_WAY_OUT}; {name} is {kind}")
    if not values:
        raise ValueError(f"monitor.log_tokens was given no value of the tokens; it takes {_WAY_OUT}")
    if len(given) - len(values) > 1:
        raise ValueError("monitor.log_tokens takes cu_seqlens or position_ids, not both: they say the same")
    _check_shapes({name: list(value.shape) for name, value in given.items()}, set(given) - set(values))
    copies = {name: value.detach().clone() for name, value in given.items()}
    return LoggedTokens({name: copies[name] for name in values}, copies.get("cu_seqlens"), copies.get("position_ids"))


def _check_shapes(shapes: Mapping[str, list[int]], packing: set[str]) -> None:
    """ValueError if the shapes are not those of one batch."""
    name, first = next(iter(shapes.items()))
    if not (len(first) == 2 or (len(first) == 1 and packing)):
        raise ValueError(f"monitor.log_tokens takes {_WAY_OUT}; {name} is {first}")
    for other, shape in shapes.items():
        if other == "cu_seqlens" and len(shape) != 1:
            raise ValueError(f"monitor.log_tokens: cu_seqlens has one dimension, and it is {shape}")
        if other != "cu_seqlens" and shape != first:
            raise ValueError(
                f"monitor.log_tokens: all values have one shape, and {name} is {first}, {other} is {shape}. Give "
                "those of the same tokens; one that has a number for each row: value[:, None].expand(-1, T)"
            )
