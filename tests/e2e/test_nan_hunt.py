"""Planted causes of NaN: each is named, as plain eager training shows it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradrewrite.examples import nan_hunt
from gradrewrite.examples.nan_hunt import FAULTS, Fault

from helpers import ROOT, mostly_slow

TABLE = (ROOT / "docs" / "examples.md").read_text()
MASKS = ("masked_fill", "pad")  # their infinities are meant
CAUSES = {
    "learning rate NaN (schedule)": "the parameter conv.weight was not finite already",
    "input: NaN in one batch": "the input images was not finite already",
    "parameter: one element NaN": "the parameter hidden.weight was not finite already",
}
FINDINGS = {
    "learning rate too high": "learning rate: The norm of the gradients grew ",
    "learning rate NaN (schedule)": "faulty learning rate: The learning rate of optimizer:0 is NaN in step 11",
    "input: NaN in one batch": "non-finite op: step 5: first non-finite: activation:conv, 3.12 % of 16384 elements, "
    "the input images was not finite already: NaN at row 3;",
}
BACKWARD = ("gradient blows up", "backward of sqrt at 0", "backward of sqrt behind where")


class Watch(TorchFunctionMode):
    """Keep line and share of the first op whose result is not finite."""

    line, percent = 0, 0.0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.line == 0 and isinstance(out, Tensor) and func.__name__ not in MASKS:
            bad = out.detach().isfinite().logical_not()
            if bad.any():
                self.line, self.percent = line_of_example(), 100 * bad.double().mean().item()
        return out


def line_of_example() -> int:
    frame = sys._getframe()
    while frame.f_code.co_filename != nan_hunt.__file__:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_lineno


@dataclass
class Eager:
    step: int
    watch: Watch
    gradients: set[str]


def train_eagerly(fault: Fault) -> Eager:
    """Train the plain network up to the first step whose loss or gradients are not finite."""
    network = nan_hunt.start(fault)
    optimizer = torch.optim.SGD(network.parameters(), lr=fault.rate)
    for step, (images, labels) in enumerate(nan_hunt.batches(nan_hunt.STEPS)):
        given = fault.spoil(step, network, optimizer, images)
        optimizer.zero_grad()
        with Watch() as watch:
            loss = network(given, labels)
        loss.backward()
        bad = {name for name, p in network.named_parameters() if p.grad is not None and not p.grad.isfinite().all()}
        if bad or not loss.isfinite():
            return Eager(step, watch, bad)
        optimizer.step()
    raise AssertionError(f"{fault.name} was not planted")


def planted_line(fault: Fault) -> int:
    (part,) = fault.parts.values()
    lines, start = inspect.getsourcelines(part)
    (offset,) = [number for number, line in enumerate(lines) if "# planted" in line]
    return start + offset


def check(fault: Fault, answer: nan_hunt.Answer) -> None:
    error, plain = answer.error, train_eagerly(fault)
    assert error.step == plain.step
    assert {s.name for s in (error.site, *error.others) if s.kind == "gradient"} == plain.gradients
    assert error.cause.startswith(CAUSES.get(fault.name, ""))
    assert "".join(answer.findings).startswith(FINDINGS.get(fault.name, ""))
    assert error.note == ""
    assert f"| {fault.name} | {error.step} | `{error.site}` | " in TABLE
    if fault.name in CAUSES:
        assert error.op == ""
        assert error.percent == pytest.approx(plain.watch.percent, rel=1e-6)
        return
    line = planted_line(fault)
    code = Path(nan_hunt.__file__).read_text().splitlines()[line - 1].strip()
    assert error.source == f'nan_hunt.py:{line} "{code}"'
    assert f"| `{error.site}` | `{error.op}` | `{code.partition('  #')[0]}` |" in TABLE
    if fault.name in BACKWARD:
        assert (error.site.kind, plain.watch.line) == ("error", 0)
    else:
        assert (error.site.kind, plain.watch.line) == ("activation", line)
        assert error.percent == pytest.approx(plain.watch.percent, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("fault", mostly_slow(FAULTS, 3), ids=lambda fault: fault.name)
def test_each_fault_is_named(fault: Fault) -> None:
    check(fault, nan_hunt.hunt(fault))


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("fault", FAULTS[3:14:3], ids=lambda fault: fault.name)
def test_each_fault_is_named_in_compiled_code(fault: Fault) -> None:
    check(fault, nan_hunt.hunt(fault, compiled=True))


@pytest.mark.pure
def test_every_fault_has_an_expectation() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    assert {*CAUSES, *FINDINGS, *BACKWARD} <= set(names)
    assert {fault.name for fault in FAULTS if not fault.parts} == set(CAUSES)


@pytest.mark.long
def test_the_sites_of_the_picture_are_those_of_the_model(tmp_path: Path) -> None:
    answer = nan_hunt.hunt(FAULTS[3])
    bad = {answer.error.site, *answer.error.others}
    assert bad <= {site for kind in nan_hunt.BLOCKS for site in answer.sites[kind]}
    assert [site.name for site in answer.sites["gradient"]][-2:] == ["conv.bias", "conv.weight"]
    assert answer.sites["activation"][-1].name == answer.sites["error"][0].name == "loss"
    assert Path(nan_hunt.draw([answer], tmp_path / "x.png")).stat().st_size > 0
