"""Torch's OpInfo database as bodies of callbacks: every function that keeps shape, dtype and device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gradrewrite as gr

from conformance.callbacks import BODIES, Given, at, body_of, gradients
from conformance.outcomes import check_outcome, expected

SUITE = "callbacks"
CASES = list(BODIES)
SIZE = 10  # functions in one compiled model


def check(name: str) -> None:
    """Compare with the function itself, at an error and at a gradient, op by op."""
    body = body_of(BODIES[name])
    if body is None:
        pytest.skip("it maps a tensor to something else")
    wanted = body.function(body.given.clone())
    for kind in ("error", "gradient"):
        plain = Given([body])
        found = gradients(plain, gr.transform(plain, at(kind, [body])))
        torch.testing.assert_close(found, [wanted], rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_op_by_op(name: str) -> None:
    check_outcome(SUITE, name, lambda: check(name))


def groups() -> Iterator[list[str]]:
    refused = expected(SUITE)
    names = [name for name in CASES if name not in refused]
    yield from (names[n : n + SIZE] for n in range(0, len(names), SIZE))


@pytest.mark.inductor
@pytest.mark.sample(12)
@pytest.mark.parametrize("names", list(groups()), ids=lambda names: names[0])
def test_compiled(names: list[str]) -> None:
    bodies = {name: body for name in names if (body := body_of(BODIES[name])) is not None}
    if not bodies:
        pytest.skip("none of them keeps the shape")
    for kind in ("error", "gradient"):
        plain = Given(list(bodies.values()))
        rewritten: Any = gr.transform(plain, at(kind, list(bodies.values())))
        rewritten.compile()
        found = gradients(plain, rewritten)
        for (name, body), g in zip(bodies.items(), found, strict=True):
            wanted = body.function(body.given.clone())
            torch.testing.assert_close(
                g, wanted, rtol=1e-5, atol=1e-8, equal_nan=True, msg=lambda m, n=name, k=kind: f"{n} at {k}: {m}"
            )
