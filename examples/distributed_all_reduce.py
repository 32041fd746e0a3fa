"""Train the character model in several processes, with gradients averaged inside the graph of the backward.

The policy averages all gradients (``AllReduce``), then clips them by their global norm, which is therefore that of the
whole batch: the clip acts as in one process with all rows. There is no DistributedDataParallel.
``torchrun --nproc-per-node 2 examples/distributed_all_reduce.py --steps 60`` uses gloo on CPUs and NCCL on GPUs; each
process trains on its own rows of each batch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, distributed, nn

import gradrewrite as gr
from gradrewrite.examples.character_model import CharacterModel, batches, load_text
from gradrewrite.passes import AllReduce, CheckFinite, ClipByGlobalNorm, ClipByValue

UNROLL = 12
POLICY = (
    gr.on("error:cell", ClipByValue(1e-3)),  # in each process, on its own rows
    gr.on("gradient:*", [AllReduce(bucket_mb=0.05), CheckFinite("skip")]),  # a step is skipped by all or by none
    gr.on("gradient:*", ClipByGlobalNorm(1.0)),
)


def join() -> torch.device:
    """Join the processes that torchrun started; alone, make a group of one. Return the device of this process."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        distributed.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    return device


def own_rows(data: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the rows of this process; all processes make the same batches."""
    for batch in data:
        yield batch.chunk(distributed.get_world_size())[distributed.get_rank()][:, : UNROLL + 1]


def train(model: gr.RewrittenModule, called: nn.Module, data: Iterable[Tensor]) -> list[float]:
    """Train with SGD a model that is called in a wrapper, or itself; return the mean losses of all processes."""
    optimizer = gr.guard(torch.optim.SGD(called.parameters(), lr=1.0), model)
    losses = []
    for batch in data:
        loss = called(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / distributed.get_world_size()
        distributed.all_reduce(mean)
        losses.append(mean.item())
    return losses


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print the losses, the collectives of a backward, and what was clipped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(argv)
    device = join()
    torch.manual_seed(0)  # equal parameters and equal batches in all processes
    characters, vocabulary = load_text()
    model = gr.transform(CharacterModel(vocabulary).to(device), list(POLICY))
    data = [batch.to(device) for batch in own_rows(batches(characters, options.steps))]
    collectives = model.trace(data[0]).code.count("all_reduce.default(")
    model.compile()
    losses = train(model, model, data)
    if distributed.get_rank() == 0:
        print(f"{distributed.get_world_size()} processes, {collectives} collectives in a backward")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats")
        print(f"total norm {model.monitor.latest()['total_norm@group:default']:.4g}, {model.monitor.skipped} skipped")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
