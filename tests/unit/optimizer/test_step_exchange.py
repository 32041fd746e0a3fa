"""The exchange of figures between ranks: what is sent does not depend on their number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import gradrewrite as gr
from gradrewrite.distributed.shards import Spread
from gradrewrite.optimizer.step_exchange import ExchangeSettings, SpreadSite, send_nothing
from gradrewrite.passes import ClipByGlobalNorm, Observe
from gradrewrite.policy.rules import Answered

ACTIONS = (Observe("max_abs", "min", "max", "norm", "mean_abs", "zeros", "nan"), ClipByGlobalNorm(1.0, norm_type=3.0))


class Sent(TorchDispatchMode):
    """Bytes of the collectives of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d_functional" in str(func) and "wait" not in str(func):
            self.bytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


@pytest.mark.broad
@pytest.mark.parametrize("world", [4, 1024])
def test_what_is_sent_does_not_grow_with_the_ranks(world: int) -> None:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        ranks = tuple(range(world))
        sites = [
            SpreadSite(
                site := gr.Site("step", f"w{n}", shape=(64, 64), dtype=torch.float32),
                Spread(ranks, 1, 4096),
                tuple(Answered((0,), action.at(site)) for action in ACTIONS),
                None,
            )
            for n in range(300)
        ]
        assert distributed.group.WORLD is not None
        settings = ExchangeSettings(tuple(sites), {ranks: distributed.group.WORLD}, ranks)
        with Sent() as sent:
            send_nothing(settings, torch.zeros(2, dtype=torch.float64), torch.device("cpu"))
    finally:
        distributed.destroy_process_group()
    # One maximum: three extremes a site, and the largest norm. One sum: verdicts; three counts of NaN, a norm, a mean,
    # a share and a count a site; the powers of the norm.
    assert sent.bytes == [8 * (3 * 300 + 1), 8 * (2 + (3 + 3 + 3) * 300 + 1)]
