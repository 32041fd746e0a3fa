"""The command line in a folder that has a module of its own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from gradrewrite.cli import main

SOURCE = """
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite.passes import ClipByValue


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.requires_grad_(False)


class Branches(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x):
        return x if super().forward(x).sum() > 0 else -x


def transformed():
    return gr.transform(make(), policy)


def boom():
    raise ValueError("two\\nlines")


def five():
    return 5


def answers_five(site):
    return 5


def raises(site):
    raise RuntimeError("no\\nway")


model = make()
inputs = (torch.ones(5, 3),)
nothing_at_all = None
too_many = (torch.ones(5, 3), 1)
named = {"input": torch.ones(5, 3)}
narrow = torch.ones(5, 2)
number = 5
policy = gr.on("error:0", ClipByValue(0.1, log=True))
strange = gr.on("error:9", ClipByValue(0.1))
"""
NUMBERS = count()


@dataclass(frozen=True)
class Shell:
    """The command line in a folder that has a module of its own."""

    folder: Path
    module: str
    capture: pytest.CaptureFixture[str]

    def run(self, *words: str) -> tuple[int, str, str]:
        """Exit status, and both streams; ``m:`` stands for the module."""
        status = main([f"{self.module}:{word[2:]}" if word.startswith("m:") else word for word in words])
        return status, *self.capture.readouterr()

    def refused(self, *words: str) -> str:
        """The one line on the error stream."""
        status, out, err = self.run(*words)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("gradrewrite: ")
        return err
