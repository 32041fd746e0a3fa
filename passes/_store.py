"""Narrower forms of saved tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from gradrewrite._compat import fake_tensors
from gradrewrite.numerics.stored_forms import FORMS, decode, encode
from gradrewrite.passes._settings import short_repr
from gradrewrite.policy.insertions import SAVED, Insertion, StoreSaved
from gradrewrite.sites import Kind, Site

Form = Literal["int8", "float8_e4m3fn", "bfloat16", "float32"]


@dataclass(frozen=True, slots=True, repr=False)
class Store:
    """Keep a saved tensor in a narrower form.

    The backward computes with the restored tensor; values of the forward do not change by a bit. With ``x`` the saved
    tensor and ``r`` the restored one, of the same shape and dtype:

    - ``"int8"``: for each row (last dimension) a scale ``s = max |x| / 127`` and ``q = round(x / s)`` in int8,
      ``r = q s``. A row of zeros is kept exactly, a row with a NaN or an infinity is NaN. The scales are float32
      (float64 for float64). Elements below ``s / 2`` become 0.
    - ``"float8_e4m3fn"``: rounded to 4 exponent and 3 mantissa bits. That form has no infinities and ends at 448:
      infinities, and elements that would be rounded to more, become NaN. Elements below 2^-10 become 0.
    - ``"bfloat16"``, ``"float32"``: rounded. NaN and infinities are kept, and what the form cannot hold is infinite.

    Quantized rows are after Chen et al., "ActNN: Reducing training memory footprint via 2-bit activation compressed
    training", 2021, https://arxiv.org/abs/2104.14129, without their stochastic rounding.

    Attributes:
        form: ``"int8"``, ``"float8_e4m3fn"``, ``"bfloat16"`` or ``"float32"``.

    Raises:
        ValueError: Another form.
        PolicyError: (at the rewrite) The form is not smaller than any tensor that its rule matches, or the device has
            no such numbers.

    Example:
        >>> Store("int8")
        Store('int8')
    """

    form: Form

    kinds: ClassVar[frozenset[Kind]] = SAVED
    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ValueError(f"Store(form) is one of {', '.join(map(repr, get_args(Form)))}, got {self.form!r}")

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return Insertion(self, StoreSaved("Store", self.refusal, self.encode, self.decode), SAVED)

    def refusal(self, tensor: Tensor) -> str:
        """Return why a tensor cannot be kept in this form; ``""`` if it can."""
        form = FORMS[self.form]
        if not form.is_on(tensor.device):
            return f"{tensor.device} has no {self.form} numbers (compute capability 8.9 or later has)"
        length = fake_tensors.hint_of(tensor.shape[-1])
        if form.bytes_per_row(length, tensor.dtype) < length * tensor.element_size():
            return ""
        return f"{self.form} is not smaller than {tensor.dtype} in rows of {length}"

    def encode(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the parts of the form."""
        parts: list[Tensor] = encode(tensor, self.form)
        return parts

    def decode(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return the restored tensor."""
        restored: Tensor = decode(list(parts), self.form, like.dtype)
        return restored
