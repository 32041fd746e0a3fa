"""The cost and the limits of keeping the zeros of an op's backward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ZeroCover:
    """The cover of one op's backward by ``KeepZeros``.

    Attributes:
        selected: Number of tensors in which elements that zeros made NaN become 0 again.
        slices: Number of searches for slices, rows or columns of zeros.
        factors: Number of copies of values of the forward without the elements that meet zeros alone.
        not_covered: Operators of the backward through which zeros are not followed, or why it is not covered at all.
    """

    selected: int = 0
    slices: int = 0
    factors: int = 0
    not_covered: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The inserted nodes, and the operators without a cover."""
        counts = ((self.selected, "select"), (self.slices, "search"), (self.factors, "copy"))
        plural = {"select": "selects", "search": "searches", "copy": "copies"}
        found = [f"{n} {word if n == 1 else plural[word]}" for n, word in counts if n]
        found += [f"not covered: {', '.join(self.not_covered)}"] * bool(self.not_covered)
        return ", ".join(found) or "nothing to do"
