"""What frameworks leave in the process is taken away after each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from torch import distributed


@pytest.fixture(autouse=True)
def nothing_of_torch_distributed_is_left() -> Iterator[None]:
    """Lightning's strategy of DistributedDataParallel leaves a process group, and its address in the environment."""
    before = dict(os.environ)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
