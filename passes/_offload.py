"""Saved tensors in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradrewrite.numerics.offloading import fetch, offload
from gradrewrite.policy.insertions import SAVED, Insertion, StoreSaved
from gradrewrite.sites import Kind, Site


@dataclass(frozen=True, slots=True)
class Offload:
    """Keep a saved tensor in pinned host memory, bit for bit.

    The forward copies it there on a stream of its own; the backward begins to copy it back when it reads the saved
    tensors of the module behind it, and waits for it, on the device, where it is read. Behind ``Store`` the narrower
    form is copied. After Rhu et al., "vDNN: Virtualized deep neural networks for scalable, memory-efficient neural
    network design", 2016, https://arxiv.org/abs/1602.08124.

    Raises:
        PolicyError: (at the rewrite) The tensor is in host memory anyway.

    Example:
        >>> Offload()
        Offload()
    """

    kinds: ClassVar[frozenset[Kind]] = SAVED

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return Insertion(self, StoreSaved("Offload", self.refusal, self.encode, self.decode), SAVED)

    def refusal(self, tensor: Tensor) -> str:
        """Return why a tensor cannot be kept in host memory; ``""`` if it can."""
        if tensor.device.type == "cuda":
            return ""
        return f"the tensor is on {tensor.device}, and host memory beside that of an accelerator saves nothing"

    def encode(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the copy in host memory."""
        return (offload(tensor),)

    def decode(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return the copy on the device."""
        (copied,) = parts
        restored: Tensor = fetch(copied, like.device, [])
        return restored
