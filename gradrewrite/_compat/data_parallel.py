"""DistributedDataParallel and FSDP2, as Dynamo treats them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable

import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel as DistributedDataParallel

from gradrewrite._compat.versions import needed_for

with needed_for("Dynamo's settings say how DistributedDataParallel is compiled"):
    from torch._dynamo import config as dynamo_config

_SPLITS = (True, "ddp_optimizer")


def is_inside_ddp() -> bool:
    """Whether this runs in the forward of a DistributedDataParallel."""
    return DistributedDataParallel._get_active_ddp_module() is not None


def whole_graphs() -> contextlib.AbstractContextManager[None]:
    """Keep the DistributedDataParallel in whose forward this runs from splitting graphs into its buckets.

    Outside of such a forward it is not to be used: up to 2.11 torch's settings are process-wide.
    """
    if dynamo_config.optimize_ddp not in _SPLITS:
        return contextlib.nullcontext()
    patch: contextlib.AbstractContextManager[None] = dynamo_config.patch(optimize_ddp=False)
    return patch


def is_ddp_split(gm: fx.GraphModule) -> bool:
    """Whether a graph is a part that DDPOptimizer made of one of Dynamo's."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and reason.reason.startswith("DDPOptimizer")


def ranks_around(modules: Iterable[nn.Module]) -> tuple[str, int]:
    """Return the name of the data parallelism around these modules and its number of ranks; ``("", 1)`` if none."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return "", 1
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None:
        return "DistributedDataParallel", ddp.process_group.size()
    if str(dynamo_config.optimize_ddp).startswith("python_reducer"):  # then torch does not say whose forward runs
        return "DistributedDataParallel (python_reducer)", torch.distributed.get_world_size()
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it no module is sharded
    if fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in modules):
        return "FSDP2 (fully_shard)", torch.distributed.get_world_size()
    return "", 1
