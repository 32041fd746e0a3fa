"""Records of the gradients of several losses, from their Gram matrix."""

from __future__ import annotations

import itertools

from torch import Tensor

from gradrewrite.numerics.gramian import cosines, diagonal_of
from gradrewrite.policy.current import current_recording
from gradrewrite.policy.recording import record_all


def record_loss_norms(gramian: Tensor) -> None:
    """Record ``loss_norm_0``, ...: the L2 norm of the gradient of each loss."""
    record_all([f"loss_norm_{number}" for number in range(len(gramian))], diagonal_of(gramian).sqrt())


def record_loss_cosines(gramian: Tensor) -> None:
    """Record ``loss_cosine``, the smallest cosine of a pair of losses; of more than two also that of each pair."""
    recording = current_recording()
    if recording is None:
        return
    found = cosines(gramian, is_opaque=recording.is_opaque)
    pairs = [f"loss_cosine_{i}_{j}" for i, j in itertools.combinations(range(len(gramian)), 2)]
    if len(pairs) > 1:
        record_all(["loss_cosine", *pairs], found)
    else:
        record_all(["loss_cosine"], found[:1])
