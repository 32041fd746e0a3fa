"""DistributedDataParallel and FSDP2, as Dynamo treats them."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import distributed, fx, nn
from torch.nn.parallel import DistributedDataParallel as DistributedDataParallel

from gradrewrite._compat.versions import needed_for

with needed_for("Dynamo's settings say how DistributedDataParallel is compiled"):
    from torch._dynamo import config as dynamo_config


def is_inside_data_parallel() -> bool:
    """Whether this runs in the forward of an ``nn.DataParallel``."""
    code, frame = nn.DataParallel.forward.__code__, sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame.f_code is code


def whole_graphs() -> contextlib.AbstractContextManager[None]:
    """Keep a DistributedDataParallel around this call from splitting graphs into its buckets.

    Outside of the forward of one nothing is patched: up to 2.11 torch's settings are process-wide.
    """
    is_inside = DistributedDataParallel._get_active_ddp_module() is not None
    if not is_inside or dynamo_config.optimize_ddp not in (True, "ddp_optimizer"):
        return contextlib.nullcontext()
    return cast(contextlib.AbstractContextManager[None], dynamo_config.patch(optimize_ddp=False))


def lets_ranks_join(module: DistributedDataParallel) -> bool:
    """Whether a rank without further inputs may take part in the collectives of this module alone (``join``)."""
    with needed_for("a DistributedDataParallel knows how its join context was configured"):
        config = module._join_config
    return bool(config.enable and not config.throw_on_early_termination)


def is_ddp_split(gm: fx.GraphModule) -> bool:
    """Whether a graph is a part that DDPOptimizer made of one of Dynamo's."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and reason.reason.startswith("DDPOptimizer")


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it no module is sharded
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


@contextlib.contextmanager
def unsharded(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Gather parameters sharded by ``fully_shard``; a collective call of their ranks."""
    gathered: list[Any] = [module for module in modules if is_sharded(module)]
    for module in gathered:
        module.unshard()
    try:
        yield
    finally:
        for module in gathered:
            module.reshard()


def sharded_parameters(modules: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """Return the parameters of optimizers in place of those that FSDP2 gives to a forward, by the identity of these."""
    groups = (group for module in modules if is_sharded(module) for group in _fully_shard_groups(module))
    parameters = (parameter for group in groups for parameter in group.fsdp_params)
    return {id(p._unsharded_param): p.sharded_param for p in parameters if hasattr(p, "_unsharded_param")}


def _fully_shard_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # up to torch 2.11


@dataclass(frozen=True, slots=True)
class DataParallelism:
    """The data parallelism around a model; by default none."""

    name: str = ""
    size: int = 1  # number of ranks
    group: distributed.ProcessGroup | None = None  # None also where the parameters tell (FSDP2)
    module: weakref.ref[DistributedDataParallel] | None = None  # if torch tells which


def parallelism_around(modules: Iterable[nn.Module]) -> DataParallelism:
    """Return the data parallelism around these modules."""
    if not distributed.is_available() or not distributed.is_initialized():
        return DataParallelism()
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None:
        return DataParallelism("DistributedDataParallel", ddp.process_group.size(), ddp.process_group, weakref.ref(ddp))
    number = distributed.get_world_size()
    if str(dynamo_config.optimize_ddp).startswith("python_reducer"):  # then torch does not say whose forward runs
        return DataParallelism("DistributedDataParallel (python_reducer)", number, distributed.group.WORLD)
    if any(map(is_sharded, modules)):
        return DataParallelism("FSDP2 (fully_shard)", number)
    return DataParallelism()
