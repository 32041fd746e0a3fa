"""Digests of texts and tensors, for comparisons."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import torch
from torch import Tensor

# Where a trace says that a node stems from gradrewrite itself: a folder, and a line that moves.
_OWN_LINE = re.compile(r"File: \S*/gradrewrite/\S+:[0-9]+ in .*")


def digest_of(tensors: Sequence[Tensor | None]) -> str:
    """Return a digest of the bits of tensors."""
    parts = [
        b"none" if t is None else t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for t in tensors
    ]
    return hashlib.sha256(b"|".join(parts)).hexdigest()[:16]


def without_own_lines(text: str) -> str:
    """Remove lines of gradrewrite itself from a trace."""
    return _OWN_LINE.sub("", text)


def digest(text: str) -> str:
    """Return a digest of a text."""
    return f"{hashlib.sha256(text.encode()).hexdigest()[:16]} of {len(text)} characters"
