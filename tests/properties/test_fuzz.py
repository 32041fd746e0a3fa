"""The fuzzer: random models and policies, compared with hooks of eager autograd.

``python tests/properties/test_fuzz.py --cases 2000`` runs many op by op, ``--compiled`` through Inductor; ``--seed``
makes other ones.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, reject, seed, settings
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))  # as conftest.py does, where this runs as a program

import gradrewrite as gr
from gradrewrite.testing import TOLERANCES, assert_matches_eager

from models.policies import policies
from models.programs import Program, programs

COUNTS: Counter[str] = Counter()


@contextlib.contextmanager
def surroundings(program: Program) -> Iterator[None]:
    logging.getLogger("gradrewrite").setLevel(logging.ERROR)
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        torch.autocast("cpu", torch.bfloat16, enabled=program.autocast),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*the model returns this tensor, itself or as a view")
        yield


def gradients(run: Any, model: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of the plain model, run in some way, at a simple loss; then its buffers."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    model.zero_grad()
    torch.manual_seed(1)
    out = run(x)
    outs = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else [out]
    torch.stack([(o.double() * 3).square().sum() for o in outs if o.requires_grad]).sum().backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in (*model.parameters(), x)]
    return [*grads, *(b.clone() for b in model.buffers())]


def runs_eagerly(program: Program) -> bool:
    """Whether eager autograd takes the program (it refuses some in-place ops), and something needs a gradient."""
    model, x = program.make()
    try:
        gradients(model, model, x)
    except (RuntimeError, IndexError):
        return False
    return True


def shares_memory(program: Program) -> bool:
    """Whether a part of an error may go elsewhere: outputs share memory, or something is changed in place."""
    model, x = program.make()
    out = model(x)
    outs = list(out.values()) if isinstance(out, dict) else list(out) if isinstance(out, tuple) else [out]
    storages = [o.untyped_storage()._cdata for o in (*outs, x)]
    is_changed = any(sign in program.source for sign in ("_(", "*= ", "] = ", "inplace=True"))
    return is_changed or len(set(storages)) < len(storages)


def torch_alone_is_right(program: Program, *, compiled: bool) -> bool:
    """Whether torch.compile without gradrewrite has the gradients of the eager model."""
    model, x = program.make()
    wanted = gradients(model, model, x)
    model, x = program.make()
    torch.compiler.reset()
    backend = "inductor" if compiled else "aot_eager"
    try:
        run = torch.compile(
            model, backend=backend, fullgraph=True, options={"fallback_random": True} if compiled else None
        )
        got = gradients(run, model, x)
    except Exception:  # whatever it is, it is not ours
        return False
    tolerance = max(TOLERANCES[program.dtype], TOLERANCES[torch.bfloat16] if program.autocast else 0.0)
    scale = max(float(t.abs().max()) if t.numel() else 0.0 for t in wanted)
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
        for a, b in zip(got, wanted, strict=True)
    )


def check(program: Program, policy: Any, *, compiled: bool) -> None:
    """One case; programs that eager autograd or torch.compile itself cannot run are rejected."""
    with surroundings(program):
        if not runs_eagerly(program):
            COUNTS["eager refuses the program"] += 1
            reject()
        model, x = program.make()
        torch.manual_seed(1)
        torch.compiler.reset()
        rtol = TOLERANCES[torch.bfloat16] if program.autocast else None
        try:
            found = assert_matches_eager(model, policy, x, compiled=compiled, steps=2, rtol=rtol)
        except gr.RewriteWarning:  # a hook on the tensor itself sees what the graph does not: documented
            COUNTS["an action at an input that is returned"] += 1
            reject()
        except gr.TraceError as err:
            if "the model computes nothing" not in str(err):
                raise
            COUNTS["the model computes nothing"] += 1
            reject()
        except Exception:
            if torch_alone_is_right(program, compiled=compiled):
                raise
            COUNTS["torch.compile alone is wrong"] += 1
            event("torch.compile alone is wrong")
            reject()
        COUNTS["compared"] += 1
        COUNTS["with an action at an error"] += any(site.startswith("error:") for site in found.acted)
        COUNTS["with a refused site"] += bool(found.refused)
        assert not found.refused or shares_memory(program), f"refused without a reason: {found.refused}"


FEW = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False)


@given(program=programs(), policy=policies)
@settings(FEW, max_examples=200, derandomize=True)
def _op_by_op(program: Program, policy: Any) -> None:
    check(program, policy, compiled=False)


@pytest.mark.sample(12)
@pytest.mark.slow
def test_op_by_op() -> None:
    COUNTS.clear()
    _op_by_op()

    assert COUNTS["compared"] >= 200
    assert COUNTS["with an action at an error"] >= 80


@pytest.mark.sample(12)
@pytest.mark.inductor
@given(program=programs(), policy=policies)
@settings(FEW, max_examples=20, derandomize=True)
def test_compiled(program: Program, policy: Any) -> None:
    check(program, policy, compiled=True)


def main() -> None:
    """Run many cases, and say how many were compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-shrink", action="store_true")
    given_args = parser.parse_args()
    phases = [Phase.generate] if given_args.no_shrink else [Phase.generate, Phase.shrink]

    @seed(given_args.seed)
    @given(program=programs(), policy=policies)
    @settings(FEW, max_examples=given_args.cases, phases=phases)
    def run(program: Program, policy: Any) -> None:
        check(program, policy, compiled=given_args.compiled)

    try:
        run()
    finally:
        for what, count in COUNTS.items():
            print(f"{count:6} {what}")


if __name__ == "__main__":
    main()
