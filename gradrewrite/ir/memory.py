"""Tensors that a forward keeps for its backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradrewrite.sites import Site

Forms = Mapping[str, tuple[float | None, int]]  # error (None: not measured) and bytes of each smaller form, by name


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that the forward keeps for the backward, or several small ones of a module.

    Attributes:
        site: Its saved site; of several the first, of what is no site the value next to it.
        module: Name of the innermost module that ran the op (``""`` is the root).
        plain_bytes: Without the policy; 0 of what is kept only because of it.
        policy_bytes: With the policy, on the device of the tensor.
        host_bytes: With the policy, in host memory (``Offload``).
        action: The policy's action as text; ``""`` for none.
        reason: Why it is no site, or stays as it is although a rule matches; ``""`` for neither.
        count: Number of tensors.
    """

    site: Site
    module: str
    plain_bytes: int
    policy_bytes: int
    host_bytes: int = 0
    action: str = ""
    reason: str = ""
    count: int = 1

    @property
    def name(self) -> str:
        """The name of the site, or the number of the tensors."""
        return str(self.site) if self.count == 1 else f"{self.count} tensors in {self.module or 'the root'}"
