"""Train the character model in several processes, wrapped in DistributedDataParallel or sharded by FSDP2.

Errors are clipped in each process, on its own rows. The clip by global norm and the finite check are at step sites, so
they see the gradients that the optimizer uses: averaged over the processes, and the norm of all shards. A step is
skipped by all processes or by none.
``torchrun --nproc-per-node 2 examples/distributed_training.py --way fsdp2 --steps 60`` uses gloo on CPUs and NCCL on
GPUs. ``examples/distributed_all_reduce.py`` averages inside of the graph instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr
from gradrewrite.examples.character_model import CharacterModel, batches, load_text
from gradrewrite.examples.distributed_all_reduce import join, own_rows, train
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByValue

POLICY = (
    gr.on("error:cell", ClipByValue(1e-3)),
    gr.on("step:*", [CheckFinite("skip"), ClipByGlobalNorm(1.0)]),
)


def wrapped(model: gr.RewrittenModule, way: str) -> nn.Module:
    """Return the compiled model that trains together with those of the other processes."""
    model.compile()
    if way == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model.cell, reshard_after_forward=False)  # it is called once for each character
    fully_shard(model)
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print the losses, the last norm of all gradients, and what was compiled."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--way", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(argv)
    device = join()
    torch.manual_seed(0)  # equal parameters and equal batches in all processes
    characters, vocabulary = load_text()
    regions = "cell" if options.way == "fsdp2" else ()
    model = gr.transform(CharacterModel(vocabulary).to(device), list(POLICY), regions=regions)
    trained = wrapped(model, options.way)
    data = (batch.to(device) for batch in own_rows(batches(characters, options.steps)))
    losses = train(model, trained, data)
    records = model.monitor.reduce("mean")
    if distributed.get_rank() == 0:
        outside = ", ".join(model.explain().outside) or "nothing"
        print(f"{distributed.get_world_size()} processes, outside of all regions: {outside}")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats")
        print(f"total norm {records['total_norm@step:group:default']:.4g}, {model.monitor.skipped} skipped")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
