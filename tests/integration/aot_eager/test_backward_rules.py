"""The backward of an op, replaced by a rule: equal to one written by hand, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradrewrite as gr

from models.backward_rules import CASES, Program, step

WAYS = ("", "checkpoint", "regions", "loop")


def rewritten(name: str, way: str, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    case = CASES[name]
    model = Program(name, way="" if way == "regions" else way, **kwargs).to(dtype)
    options: dict[str, Any] = {"regions": "layers.*"} if way == "regions" else {}
    options |= {"loops": "rolled"} if way == "loop" else {}
    return gr.transform(model, gr.on(f"backward:layers.?/{case.site}", case.rule), **options)


def assert_same(got: Any, expected: Any, *, is_exact: bool = True, tolerance: float = 1e-6) -> None:
    for a, b in ((got[0], expected[0]), (got[2], expected[2]), *((got[1][n], expected[1][n]) for n in expected[1])):
        if is_exact:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert got[1].keys() == expected[1].keys()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_function_by_hand(name: str, way: str) -> None:
    case = CASES[name]
    expected = step(Program(name, is_by_hand=True, way="" if way == "regions" else way))
    plain = step(Program(name, way="" if way == "regions" else way))
    got = step(rewritten(name, way))

    assert_same(
        got, expected, is_exact=case.is_exact and way != "loop", tolerance=1e-5
    )  # a rolled loop computes decomposed ops
    assert not torch.allclose(got[2], plain[2])
    if way != "loop":
        assert torch.equal(got[0], plain[0])


@pytest.mark.parametrize("name", CASES)
def test_freezing_the_weight_in_front_changes_nothing(name: str) -> None:
    free, frozen = step(rewritten(name, "")), step(rewritten(name, "", frozen=True))

    assert torch.equal(free[2], frozen[2])
    assert {n: g for n, g in free[1].items() if "before.weight" not in n}.keys() == frozen[1].keys()
    assert all(torch.equal(g, free[1][n]) for n, g in frozen[1].items())


@pytest.mark.inductor
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in CASES if name != "dropout"])
def test_compiled(name: str, way: str) -> None:
    compiled = step(rewritten(name, way, torch.float64).compile())
    assert_same(compiled, step(rewritten(name, way, torch.float64)), is_exact=False, tolerance=1e-10)
