"""Averages of gradients over processes, by collectives in the joint graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from gradrewrite._compat import collectives
from gradrewrite.distributed.buckets import flatten, unflatten
from gradrewrite.distributed.groups import check_group, resolve_group
from gradrewrite.passes._settings import short_repr, store_python_numbers
from gradrewrite.policy.insertions import AverageOverRanks, Insertion
from gradrewrite.sites import Kind, Site

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, repr=False)
class AllReduce:
    """Average gradients over the processes of a group, inside the joint graph.

    What ``DistributedDataParallel`` does beside the graph, so not to be used inside of it. Actions that come before it
    at a site act on the gradient of the process, those that come after it, and all group actions, on the average::

        [gr.on("gradient:*", AllReduce()), gr.on("gradient:*", [CheckFinite("skip"), ClipByGlobalNorm(1.0)])]

    Gradients are put into buckets in the order in which the backward computes them; each bucket has one dtype and one
    device. The collective of a bucket begins right behind its last gradient, while the backward computes the others,
    and is waited for at the end. Each gradient is divided by the number of processes and then added up, as
    ``DistributedDataParallel`` does; dtypes and shapes are kept, complex gradients are averaged too. A NaN or an
    infinity of one process is one in all of them, so that checks and clips behind it decide alike everywhere. The
    average is linear, so that gradients that are accumulated over several backwards are exact.

    All processes must have the same graph: a parameter that reaches no output has no gradient and is left out in each
    of them. A collective that a process does not join lets the others wait until the timeout of the group; of one that
    it joins with another number of elements torch.distributed promises nothing. Buckets of equal sizes whose gradients
    come in another order, or with other strides, are *not* noticed: elements of different gradients are then added up.
    So let all processes run the same code on the same versions, and let no branch on data, rank or shapes choose the
    layers or their order. The number of backwards must be the same, too. Parameters and buffers are not broadcast:
    begin with equal ones (one seed). In a group of one process nothing is inserted.

    Code with this action is not kept in AOTAutograd's cache on disk, for it depends on the group.

    Attributes:
        process_group: The group; all processes if None.
        bucket_mb: Size of a bucket in 2**20 bytes, > 0; a larger gradient has one of its own. ``inf`` makes one bucket
            for each dtype and device.

    Raises:
        ValueError: ``bucket_mb`` is not > 0, or this process is not in ``process_group``.
        TypeError: ``bucket_mb`` is no number, or ``process_group`` no process group; a dimension of a ``DeviceMesh``
            has one, ``mesh.get_group(name)``.
        PolicyError: (when the graph is made) ``torch.distributed`` is not initialized; or the model is in a
            ``DistributedDataParallel``.
        UnsupportedGradientError: (at the rewrite) The gradient is sparse.

    Example:
        >>> AllReduce(bucket_mb=1)
        AllReduce(bucket_mb=1)

    References:
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020,
        https://arxiv.org/abs/2006.15704.
    """

    process_group: ProcessGroup | None = None
    bucket_mb: float = 25

    kinds: ClassVar[frozenset[Kind]] = frozenset(("gradient",))
    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        if isinstance(self.bucket_mb, bool) or not isinstance(self.bucket_mb, int | float):
            raise TypeError(f"AllReduce: bucket_mb is a number, got {self.bucket_mb!r}")
        if math.isnan(self.bucket_mb) or self.bucket_mb <= 0:
            raise ValueError(f"AllReduce: bucket_mb must be > 0, got {self.bucket_mb!r}")
        check_group(self.process_group)

    @property
    def bucket_bytes(self) -> float:
        """``bucket_mb`` in bytes."""
        return self.bucket_mb * 2**20

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return Insertion(self, AverageOverRanks(self.processes, self.begin, self.end, self.bucket_bytes), self.kinds)

    def begin(self, tensors: Sequence[Tensor]) -> Tensor:
        """Start to average gradients of one dtype and device."""
        group = self.processes()
        return collectives.begin_sum(flatten(tensors) / group.size(), group)

    def end(self, begun: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Wait for the sum from ``begin``; return the averages as views of one tensor."""
        return unflatten(collectives.wait(begun), tensors)

    def processes(self) -> ProcessGroup:
        """Return ``process_group``, or the default group."""
        return resolve_group(self.process_group, repr(self))
