"""Torch's OpInfo database as bodies of callbacks: every function that keeps shape, dtype and device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gradrewrite as gr

from conformance.callbacks import ENTRIES, NAMES, Body, Given, at, body_of, found_names, gradients
from conformance.outcomes import TORCH, check_outcome, expected

SUITE = "callbacks"
CASES = NAMES
SIZE = 10  # functions in one compiled model


def known_body(name: str) -> Body:
    body = body_of(ENTRIES[name])
    if body is None:
        pytest.skip("the list is that of another torch")
    return body


def check(name: str) -> None:
    """Compare with the function itself, at an error and at a gradient, op by op."""
    body = known_body(name)
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
    bodies = {name: known_body(name) for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: what Inductor does not compile runs as in eager mode
        warnings.simplefilter("error", gr.RewriteWarning)
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


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.skipif(not torch.__version__.startswith(TORCH), reason="the list is that of another torch")
def test_the_list_has_every_function_that_keeps_the_shape() -> None:
    assert found_names() == NAMES
