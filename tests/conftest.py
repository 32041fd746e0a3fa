"""Fixtures that every test file shares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _fresh_torch() -> Iterator[None]:
    """Each test has its own random numbers, and no compiled code of the test before."""
    torch.manual_seed(0)
    yield
    torch.compiler.reset()
