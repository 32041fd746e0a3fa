"""Inductor's scheduler on CUDA: the inserted kernels of many sites as few launches."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from gradrewrite._compat.versions import needed_for

_MARK = "gradrewrite"
_SMALL = 1 << 18  # bytes: kernels that read and write less are launches and nothing else


def mark(node: fx.Node) -> None:
    """Mark an inserted node."""
    node.meta[_MARK] = True


@contextlib.contextmanager
def combined_kernels(inputs: Sequence[Any]) -> Iterator[None]:
    """Let Inductor launch small kernels together that do not depend on each other, where inserted ones are among them.

    Inductor fuses the first stage of a reduction with what makes the tensor; its second stage is a kernel by itself,
    three for each site of a clip that logs. Here all those of a graph become the parts of a few combo kernels, with the
    inserted kernels that read gradients, as far as no tensor lives longer for that. The other kernels stay as they are,
    and so do all of a graph without an input on CUDA.
    """
    if not any(isinstance(value, Tensor) and value.device.type == "cuda" for value in inputs):
        yield
        return
    with needed_for("Inductor's settings and metrics can be read, and patched for one compilation"):
        from torch._inductor import config
    try:
        from torch._inductor.custom_graph_pass import CustomSchedulerPass
    except ImportError:  # it came after torch 2.11; without it there are more launches
        yield
        return
    asked = config._post_fusion_custom_pass
    if asked is not None and not isinstance(asked, CustomSchedulerPass):
        yield  # a pass of the user that has no key for Inductor's cache
        return

    class Pass(CustomSchedulerPass):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            return _combine(nodes if asked is None else asked(nodes))

        def uuid(self) -> Any:
            return ("gradrewrite combined kernels", asked.uuid() if isinstance(asked, CustomSchedulerPass) else None)

    with config.patch(_post_fusion_custom_pass=Pass()):
        yield


def _combine(nodes: list[Any]) -> list[Any]:
    """Replace nodes of the scheduler, in topological order, by combined ones."""
    with needed_for("Inductor's scheduler has nodes that are launched together"):
        from torch._inductor import config
        from torch._inductor.scheduler import ForeachKernelSchedulerNode

    candidates = [n for n in ForeachKernelSchedulerNode.combinable_nodes(nodes) if _is_inserted(n) or _is_small(n)]
    if len(candidates) < 2:
        return nodes
    scheduler = candidates[0].scheduler
    groups: dict[Hashable, list[Any]] = defaultdict(list)
    levels = _levels(scheduler, nodes, candidates)
    for node in candidates:
        if _may_wait(node, levels):
            groups[levels[node], node.get_device(), scheduler.node_to_stream.get(node)].append(node)
    combined = dict.fromkeys(nodes)
    for members in groups.values():
        if len(members) < 2 or not any(_is_inserted(member, wholly=False) for member in members):
            continue
        together = ForeachKernelSchedulerNode(
            scheduler, members, use_custom_partition_algo=True, enable_autotune=config.combo_kernels_autotune > 0
        )
        for member in members:
            del combined[member]
        combined[together] = None
        scheduler.name_to_fused_node.update({n.get_name(): together for n in together.get_nodes()})
        stream = scheduler.node_to_stream.get(members[0])
        if stream is not None:
            scheduler.node_to_stream[together] = stream
    ordered = scheduler.topological_sort_schedule(sorted(combined, key=lambda n: n.min_order))
    scheduler.prune_redundant_deps(ordered)
    return list(ordered)


def _is_inserted(node: Any, *, wholly: bool = True) -> bool:
    """Return whether all ops of a scheduler node on CUDA are inserted ones; any of them, if not ``wholly``."""
    if not _is_on_cuda(node):
        return False
    marks = [origin.meta.get(_MARK, False) for part in node.get_nodes() for origin in part.node.get_origins()]
    return (all(marks) and bool(marks)) if wholly else any(marks)


def _is_small(node: Any) -> bool:
    """Whether a node takes longer to launch than to run, such as the second stage of a reduction."""
    return _is_on_cuda(node) and all(dep.numbytes_hint() <= _SMALL for dep in node.read_writes.reads_and_writes())


def _is_on_cuda(node: Any) -> bool:
    device = node.get_device()
    return device is not None and device.type == "cuda"


def _levels(scheduler: Any, nodes: Sequence[Any], candidates: Sequence[Any]) -> dict[Any, int]:
    """The largest number of candidates on a path to each node.

    Nodes of one level do not depend on each other, and groups by level never depend on each other in a circle.
    """
    counted = set(candidates)
    levels: dict[Any, int] = {}
    for node in nodes:
        buffers = (scheduler.name_to_buf[dep.name] for dep in node.unmet_dependencies)
        found = {scheduler.name_to_fused_node[buffer.defining_op_name()] for buffer in buffers}
        levels[node] = max((levels[dep] + (dep in counted) for dep in found if dep in levels), default=0)
    return levels


def _may_wait(node: Any, levels: dict[Any, int]) -> bool:
    """Whether a node may run later than it could: all that it reads is small, or lives longer anyway."""
    with needed_for("Inductor's scheduler has nodes that are launched together"):
        from torch._inductor.virtualized import V

    scheduler = node.scheduler
    kept = {*V.graph.get_output_names(), *V.graph.graph_inputs}

    def lives_on(name: str) -> bool:
        if name in kept or name not in scheduler.name_to_buf:
            return True
        users = [scheduler.name_to_fused_node.get(user.node.get_name()) for user in scheduler.name_to_buf[name].users]
        return any(levels.get(user, 0) > levels[node] for user in users)

    if any(dep.name in kept for dep in node.read_writes.writes):
        return True
    return all(dep.numbytes_hint() <= _SMALL or lives_on(dep.name) for dep in node.read_writes.reads)
