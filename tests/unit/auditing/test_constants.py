"""Constants that their dtype cannot hold: planted ones are found without a run, sound models have none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradrewrite.auditing.constants import vanishing_constants
from gradrewrite.diagnostics.causes import Cause

from helpers import make_case
from models.zoo import CASES

F16, BF16, F32, C64 = torch.float16, torch.bfloat16, torch.float32, torch.complex64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MASK = torch.tensor([True, False])
FIRST = torch.tensor([0])

Function = Callable[[Tensor], Tensor]


class Captured(BaseException):  # not an Exception: torch wraps those
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__()
        self.gm = gm


def graphs_of(function: Callable[..., Any], *args: Any) -> Iterator[fx.GraphModule]:
    """Yield the first Dynamo graph of a function; nothing runs."""

    def keep(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        raise Captured(gm)

    torch.compiler.reset()
    try:
        torch.compile(function, backend=keep)(*args)
    except Captured as end:
        yield end.gm


def found(function: Callable[..., Any], *args: Any) -> list[Cause]:
    return vanishing_constants(graphs_of(function, *args))


def filled(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor([value, value]).to(dtype)


def set_masked(x: Tensor) -> Tensor:
    y = x.clone()
    y[MASK] = -1e9
    return y


# By dtype and value of the input: the function, the number that it loses, and the value that it gives instead. The
# oracle is the same function in eager mode; None where it raises.
PLANTED: dict[str, tuple[torch.dtype, float, Function, str, float | None]] = {
    "add": (F16, 0.0, lambda x: x + 1e-8, "1e-08 is 0 in float16: `add` adds nothing", 0.0),
    "root": (F16, 0.0, lambda x: (x.square() + 1e-12).rsqrt(), "1e-12 is 0", math.inf),
    "iadd": (F16, 0.0, lambda x: x.clone().add_(1e-8), "`add_` adds nothing", 0.0),
    "one of a sum": (F16, 1.0, lambda x: 1 - 1e-6 - x, "0.999999 is 1 in float16: `sub` adds no eps", 0.0),
    "clamp min": (F16, 0.0, lambda x: x.clamp(min=1e-8), "1e-08 is 0 in float16: `clamp` lets 0 through", 0.0),
    "maximum": (F16, 0.0, lambda x: torch.maximum(x, torch.tensor(1e-8)), "`maximum` lets 0 through", 0.0),
    "tensor": (F16, 0.0, lambda x: x + torch.tensor(1e-8, dtype=F16), "1e-08 is 0 in float16: `tensor` holds 0", 0.0),
    "normalize": (F16, 0.0, lambda x: F.normalize(x, dim=0), "1e-12 is 0 in float16: `normalize`", math.nan),
    "cosine": (F16, 0.0, lambda x: F.cosine_similarity(x, x, dim=0), "`cosine_similarity` divides by 0", math.nan),
    "poisson": (F16, 0.0, lambda x: F.poisson_nll_loss(x, x + 1, log_input=False), "1e-08 is 0", math.inf),
    "pairwise": (F16, 0.0, lambda x: F.pairwise_distance(x[None], x[None], eps=1e-8), "`pairwise_distance`", 0.0),
    "where": (F16, 0.0, lambda x: torch.where(MASK, -1e9, x), "-1e+09 is beyond the range of float16", -math.inf),
    "setitem": (F16, 0.0, set_masked, "`setitem` writes -inf", -math.inf),
    "mask": (F16, 0.0, lambda x: (1.0 - x) * -1e9, "`mul` makes -inf of every 1", -math.inf),
    "masked_fill": (F16, 0.0, lambda x: x.masked_fill(MASK, -1e9), "`masked_fill` writes -inf, or raises", None),
    "full": (F16, 0.0, lambda x: x + torch.full((2,), 1e9, dtype=F16), "1e+09 is beyond the range", None),
    "far bound": (F16, 0.0, lambda x: x.clamp(max=1e9), "`clamp` bounds nothing, or raises", None),
    "far add": (F16, 0.0, lambda x: x - 1e9, "1e+09 is beyond the range of float16", -math.inf),
    "nan_to_num": (F16, math.inf, lambda x: torch.nan_to_num(x, posinf=1e9), "1e+09 is beyond", math.inf),
    "cast": (F16, 0.0, lambda x: x + torch.tensor(1e-8).half(), "1e-08 is 0 in float16: `half` holds 0", 0.0),
    "one": (BF16, 1.0, lambda x: x.clamp(max=1 - 1e-6), "0.999999 is 1 in bfloat16: `clamp`", 1.0),
    "minus one": (BF16, -1.0, lambda x: F.hardtanh(x, -1 + 1e-6, 0.5), "-0.999999 is -1 in bfloat16", -1.0),
    "minimum": (BF16, 1.0, lambda x: torch.minimum(x, torch.tensor(0.999, dtype=F32)), "0.999 is 1", 1.0),
    "decay": (BF16, 1.3, lambda x: x.mul(0.9999), "`mul` changes nothing", 1.296875),
    "lerp": (BF16, 1.0, lambda x: x.lerp(x * 9, 1e-4), "A step of 0.0001 is rounded off in bfloat16", 1.0),
    "logit": (BF16, 1.0, lambda x: torch.logit(x, 1e-6), "1 - 1e-06 is 1 in bfloat16", math.inf),
    "range of another": (BF16, 0.0, lambda x: x + torch.finfo(F32).min, "is beyond the range of bfloat16", -math.inf),
    "float32 add": (F32, 0.0, lambda x: x + 1e-50, "1e-50 is 0 in float32", 0.0),
    "float32 one": (F32, 1.0, lambda x: x.clamp(max=1 - 1e-9), "0.999999999 is 1 in float32", 1.0),
    "float32 least": (F32, 1.0, lambda x: x.clamp(min=1 + 1e-8), "1.00000001 is 1 in float32: `clamp` lets 1", 1.0),
    "float32 factor": (F32, 1e38, lambda x: x * 1e-50, "`mul` gives 0", 0.0),
    "float16 factor": (F16, 1e4, lambda x: x * 1e-13, "1e-13 is 0 in float16: `mul` gives 0", 0.0),
    "float32 divisor": (F32, 1.0, lambda x: x / 1e-50, "`truediv` divides by 0", math.inf),
    "float32 logit": (F32, 1.0, lambda x: torch.logit(x, 1e-8), "1 - 1e-08 is 1 in float32", math.inf),
    "float32 range": (F32, 0.0, lambda x: x.masked_fill(MASK, -1e39), "-1e+39 is beyond", None),
    "e4m3 full": (E4M3, 0.0, lambda x: torch.full((2,), 1e-8, dtype=E4M3), "1e-08 is 0 in float8_e4m3fn", 0.0),
    "e4m3 where": (E4M3, 0.0, lambda x: torch.where(MASK, -1e9, x), "float8_e4m3fn (up to 448)", -448.0),
    "e4m3 cast": (E4M3, 0.0, lambda x: torch.tensor(1e-4).to(x.dtype), "`to` holds 0", 0.0),
    "e5m2 full_like": (E5M2, 0.0, lambda x: torch.full_like(x, 1e-8), "1e-08 is 0 in float8_e5m2", 0.0),
    "e5m2 where": (E5M2, 0.0, lambda x: torch.where(MASK, 1e-6, x), "1e-06 is 0 in float8_e5m2", 0.0),
    "e5m2 tensor": (E5M2, 0.0, lambda x: torch.tensor(1e9, dtype=x.dtype), "1e+09 is beyond", math.inf),
    "complex add": (C64, 0.0, lambda x: (x + 1e-50).real, "1e-50 is 0 in complex64", 0.0),
    "complex fill": (C64, 0.0, lambda x: x.new_full((2,), 1e-50).real, "1e-50 is 0 in complex64", 0.0),
    "imaginary": (C64, 0.0, lambda x: (x + 1e-50j).imag, "0+1e-50j is 0 in complex64", 0.0),
}

# What torch computes in a wider dtype, holds, or does not lose.
SOUND: dict[str, tuple[torch.dtype, Function]] = {
    "factor": (F16, lambda x: x * 1e-8),
    "large factor": (F16, lambda x: x * 1e9),
    "divisor": (F16, lambda x: x / 1e9),
    "small divisor": (F16, lambda x: x / 1e-9),
    "held eps": (F16, lambda x: x + 1e-7),
    "float32": (F16, lambda x: (x.float() + 1e-8).half()),
    "promoted": (F16, lambda x: x + torch.full((2,), 1e-8)),
    "least number": (F16, lambda x: x.masked_fill(MASK, torch.finfo(x.dtype).min)),
    "infinity": (F16, lambda x: x.masked_fill(MASK, -math.inf)),
    "layer norm": (F16, lambda x: F.layer_norm(x, (2,), eps=1e-8)),
    "rms norm": (F16, lambda x: F.rms_norm(x, (2,), eps=1e-8)),
    "batch norm": (F16, lambda x: F.batch_norm(x[:, None], None, None, training=True, eps=1e-8)),
    "group norm": (F16, lambda x: F.group_norm(x[None, :, None], 1, eps=1e-8)),
    "poisson of logarithms": (F16, lambda x: F.poisson_nll_loss(x, x)),
    "far factor": (F16, lambda x: x * 1e-11),
    "pairwise": (F16, lambda x: F.pairwise_distance(x[None], x[None])),
    "whole": (BF16, lambda x: x.clamp(-1, 1) * 1.0 + 0.0),
    "eps of bfloat16": (BF16, lambda x: F.normalize(x + 1e-12, dim=0)),
    "bound": (BF16, lambda x: x.clamp(max=0.99)),
    "bounds outside": (BF16, lambda x: x.clamp(max=1 + 1e-6)),
    "gain": (BF16, lambda x: x * 1.0001),
    "written mask": (F16, lambda x: x + torch.full((2,), -1e9).index_fill_(0, FIRST, 0.0)),
    "integers": (F32, lambda x: torch.arange(2) * 1e-8 + x),
    "comparison": (F16, lambda x: torch.where(x > 1e-8, x, 0.0)),
    "dimension": (F16, lambda x: x.max(0).values + x.sum(-1)),
    "average": (F32, lambda x: x.lerp(x * 9, 1e-4) * 0.9999),
}


def first_of(function: Callable[[Tensor], Tensor], x: Tensor) -> float | None:
    """The first element; None for NaN (float8 up to torch 2.12), and where torch raises (assignments from 2.15 on)."""
    try:
        first = function(x).float().reshape(-1)[0].item()
    except RuntimeError as err:
        if "without overflow" not in str(err):
            raise
        return None
    return None if math.isnan(first) else first


@pytest.mark.parametrize("name", PLANTED)
def test_planted_constants_are_found(name: str) -> None:
    dtype, value, function, text, wanted = PLANTED[name]
    x = filled(value, dtype)
    if wanted is None:
        with pytest.raises(RuntimeError, match="without overflow"):
            function(x)
    else:
        assert first_of(function, x) in (wanted, None)
    causes = found(function, x)

    assert len(causes) == 1
    assert text in causes[0].text
    assert causes[0].kind == "constant vanishes"
    assert causes[0].source.startswith("test_constants.py:")
    assert causes[0].advice


@pytest.mark.broad
@pytest.mark.parametrize("name", SOUND)
def test_constants_that_are_held_are_none(name: str) -> None:
    dtype, function = SOUND[name]

    assert found(function, filled(0.5, dtype)) == []


@pytest.mark.pure
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_normalizations_add_their_eps_in_float32(eps: float) -> None:
    x = torch.full((3, 2), 6e-8, dtype=F16)
    gives = F.rms_norm(x, (2,), eps=eps)

    assert (gives < 0.9).all() if eps else (gives > 0.9).all()


class WithValues(fx.Interpreter):
    """Runs a graph and keeps its values where Dynamo keeps fake ones."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["example_value"] = value = super().run_node(n)
        return value


def all_numbers(dtype: torch.dtype) -> Tensor:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    return x[x.isfinite()]


def with_number(function: Callable[[Tensor, float], Tensor], c: float) -> Function:
    return lambda x: function(x, c)


EXHAUSTIVE: dict[str, Callable[[Tensor, float], Tensor]] = {
    "add": lambda x, c: x + c,
    "sub": lambda x, c: x - c,
    "rsub": lambda x, c: c - x,
    "mul": lambda x, c: x * c,
    "div": lambda x, c: x / c,
    "clamp min": lambda x, c: x.clamp(min=c),
    "clamp max": lambda x, c: x.clamp(max=c),
    "where": lambda x, c: torch.where(x > 0, x, c),
    "masked_fill": lambda x, c: x.masked_fill(x > 0, c),
    "nan_to_num": lambda x, c: torch.nan_to_num(x * math.nan, nan=c),
}
CONSTANTS = (1e-46, 1e-39, 1e-12, 1e-8, 2.9e-8, 3e-8, 1e-6, 0.995, 0.999, 0.9999, 1.0001, 1.002, 6e4, 1e5, 3.4e38, 1e39)


@pytest.mark.pure
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_found_constants_are_of_no_use_for_any_number(name: str, dtype: torch.dtype) -> None:
    """For all finite numbers of a dtype, a constant that is found gives what the value that it becomes gives."""
    function, x = EXHAUSTIVE[name], all_numbers(dtype)
    wide = name in ("mul", "div")  # whose numbers torch holds in float32
    for c in (sign * c for c in CONSTANTS for sign in (1, -1)):
        held = torch.tensor(c, dtype=torch.float64).to(dtype).item()
        gm = fx.symbolic_trace(with_number(function, c))
        try:
            gives = WithValues(gm).run(x)
        except RuntimeError:
            assert math.isinf(held)
            continue
        is_same = torch.equal(gives.nan_to_num(7.0), function(x, held).nan_to_num(7.0))
        causes = vanishing_constants([gm])

        if causes:
            assert is_same, f"{c}: {causes[0].text}"
        elif held == 0 or (math.isinf(held) and not wide):
            assert not is_same, c


def test_each_line_and_number_is_one_cause() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            x = (x + 1e-8) / (x.norm() + 1e-8)
        return x.clamp(1e-8, 1 - 1e-6)

    causes = found(function, filled(1.0, F16))

    assert [cause.text[:11] for cause in causes] == ["1e-08 is 0 ", "1e-08 is 0 ", "0.999999 is"]
    assert causes[0].site == "/add"
    assert causes[0].advice == "Use 0.0001, or compute this line in float32."


ADVICE: tuple[tuple[torch.dtype, Function, str], ...] = (
    (F16, lambda x: x.clamp(min=1e-8), "Use 0.0001, or compute this line in float32."),
    (F32, lambda x: x.clamp(min=1e-50), "Use 1e-37, or compute this line in float64."),
    (BF16, lambda x: x.clamp(max=1 - 1e-6), "Use 1 - 0.00781, or compute this line in float32."),
    (BF16, lambda x: x.clamp(min=-1 + 1e-6), "Use -1 + 0.00781, or compute this line in float32."),
    (F32, lambda x: x.clamp(min=1 + 1e-8), "Use 1 + 1.19e-07, or compute this line in float64."),
    (BF16, lambda x: torch.logit(x, 1e-6), "Use 0.00781, or compute this line in float32."),
    (BF16, lambda x: x * 0.9999, "Keep the average in float32, and cast it where it is read."),
    (F16, lambda x: x * 1e-50, "Compute this line in float64."),
    (
        F16,
        lambda x: torch.where(x > 0, x, -1e9),
        "torch.finfo(torch.float16).min (in a mask: float('-inf')), or compute",
    ),
    (C64, lambda x: x + 1e-50, "or compute this line in complex128."),
)


@pytest.mark.parametrize(("dtype", "function", "text"), ADVICE, ids=range(len(ADVICE)))
@pytest.mark.pure
def test_advice_says_what_to_write(dtype: torch.dtype, function: Function, text: str) -> None:
    gm = fx.symbolic_trace(function)
    WithValues(gm).run(filled(0.5, dtype))
    (cause,) = vanishing_constants([gm])

    assert text in cause.advice


def test_bodies_of_checkpoints_are_entered() -> None:
    x = filled(1.0, F16).requires_grad_()
    (cause,) = found(lambda x: checkpoint(lambda y: (y + 1e-8).log(), x, use_reentrant=False), x)

    assert "1e-08 is 0 in float16" in cause.text


def test_autocast_decides_by_the_dtype_of_the_result() -> None:
    def function(x: Tensor) -> Tensor:
        return (x @ x + 1e-8) + (x.sum() + 1e-12)

    with torch.autocast("cpu", dtype=F16):
        causes = found(function, torch.ones(2, 2))

    assert [cause.text.split(":")[0] for cause in causes] == ["1e-08 is 0 in float16"]


@pytest.mark.broad
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_zoo_has_none(name: str, dtype: torch.dtype) -> None:
    model, inputs = make_case(CASES[name], dtype)
    graphs = list(graphs_of(model, *inputs))

    assert graphs
    assert vanishing_constants(graphs) == []


class Attention(nn.Module):
    """Scores with additive and filled masks as in many models, in the range of the dtype or beyond."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.project, self.least = nn.Linear(4, 4), least

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scores = self.project(x) + (1.0 - keep[:, None].to(x.dtype)) * self.least
        return scores.masked_fill(~keep[:, None], self.least).softmax(0)


@pytest.mark.parametrize(("dtype", "wanted"), [(F16, 2), (BF16, 0), (F32, 0)], ids=str)
def test_masks_of_attention(dtype: torch.dtype, wanted: int) -> None:
    x, keep = torch.ones(3, 4, dtype=dtype), torch.tensor([True, True, False])

    assert len(found(Attention(-1e9).to(dtype), x, keep)) == wanted
    assert found(Attention(-1e4).to(dtype), x, keep) == []
