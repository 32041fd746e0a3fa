"""Settings of ``Store``, ``Offload`` and ``Recompute``, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradrewrite.passes import Offload, Recompute, Store

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("form", ["int4", "", None, 8, torch.int8])
def test_unknown_forms(form: Any) -> None:
    with pytest.raises(ValueError, match=r"int8.*float8_e4m3fn.*bfloat16.*float32"):
        Store(form)


def test_values() -> None:
    assert repr(Store("int8")) == "Store('int8')"
    assert Store("int8") == Store("int8") != Store("float32")
    assert hash(Recompute()) == hash(Recompute())
    assert repr(Offload()) == "Offload()"
    assert {kind for action in (Store("int8"), Offload(), Recompute()) for kind in action.kinds} == {"saved"}


@pytest.mark.parametrize(
    ("form", "dtype", "length", "is_smaller"),
    [
        ("int8", torch.float32, 2, True),
        ("int8", torch.float32, 1, False),
        ("int8", torch.bfloat16, 5, True),
        ("int8", torch.bfloat16, 4, False),
        ("int8", torch.float64, 2, True),
        ("int8", torch.float64, 1, False),
        ("float8_e4m3fn", torch.bfloat16, 1, True),
        ("bfloat16", torch.bfloat16, 64, False),
        ("bfloat16", torch.float16, 64, False),
        ("bfloat16", torch.float32, 64, True),
        ("float32", torch.float32, 64, False),
        ("float32", torch.float64, 64, True),
    ],
)
def test_forms_that_are_not_smaller(form: Any, dtype: torch.dtype, length: int, *, is_smaller: bool) -> None:
    refusal = Store(form).refusal(torch.empty(3, length, dtype=dtype))
    assert refusal == ("" if is_smaller else f"{form} is not smaller than {dtype} in rows of {length}")


def test_host_memory_is_refused() -> None:
    assert "host memory" in Offload().refusal(torch.empty(4))
