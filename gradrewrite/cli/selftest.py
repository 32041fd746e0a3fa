"""The command on an installation: selftest."""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite._version import __version__
from gradrewrite.cli.messages import Refused, one_line
from gradrewrite.examples.find_nonfinite import Distances
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue
from gradrewrite.testing import assert_inert, assert_matches_eager

POLICY = [
    gr.on("error:first", ClipByNorm(1e-2)),
    gr.on("error:*/tanh", [ClipByValue(1e-3), CheckFinite("record")]),
    gr.on("gradient:*", ClipByGlobalNorm(1e-1)),
]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x))).square().sum()
        return out


def selftest(options: argparse.Namespace) -> None:
    """Print the outcome of each check; refuse after a failure."""
    print(f"gradrewrite {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    compiled = not options.eager
    checks: dict[str, Callable[[], object]] = {
        "clips equal hooks of eager autograd, op by op": lambda: _matches(compiled=False),
        "a failed check names the op and the line": lambda: _names_the_op(compiled=False),
        "the rewritten backward is drawn": _draws,
    }
    if compiled:
        checks["clips equal hooks of eager autograd, compiled"] = lambda: _matches(compiled=True)
        checks["an empty policy leaves bits and kernels as they are"] = lambda: assert_inert(_Net(), torch.ones(2, 4))
        checks["a failed check names the op and the line, compiled"] = lambda: _names_the_op(compiled=True)
    failed = [name for name, check in checks.items() if not _passes(name, check)]
    if failed:
        raise Refused(f"{len(failed)} of {len(checks)} checks failed")


def _passes(name: str, check: Callable[[], object]) -> bool:
    try:
        torch.manual_seed(0)
        check()
    except Exception as err:  # of any kind: it is what the command reports
        print(f"failed  {name}: {one_line(err)}")
        return False
    print(f"ok      {name}")
    return True


def _matches(*, compiled: bool) -> None:
    assert_matches_eager(_Net(), POLICY, torch.randn(5, 4), compiled=compiled, steps=2)


def _names_the_op(*, compiled: bool) -> None:
    model = gr.transform(Distances(), gr.on("gradient:*", CheckFinite()))
    if compiled:
        model.compile()
    try:
        model(torch.rand(3, 4)).backward()
    except gr.NonFiniteError as error:
        if error.op != "/sqrt" or error.source is None or ".sqrt()" not in error.source:
            raise AssertionError(f"the op is /sqrt, and the error names {error.op}, {error.source}") from error
    else:
        raise AssertionError("the gradients are NaN, and no check failed")


def _draws() -> None:
    graph = gr.transform(_Net(), POLICY).trace(torch.randn(5, 4))
    with tempfile.TemporaryDirectory() as folder:
        for ending in ("svg", "html"):
            written = viz.draw(graph).render(str(Path(folder) / "backward"), format=ending)
            if not Path(written).stat().st_size:
                raise AssertionError(f"{ending}: an empty file")
