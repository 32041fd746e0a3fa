"""Python numbers lost in the dtype of their op."""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from gradrewrite.diagnostics.causes import Cause
from gradrewrite.instrumentation.dynamo_nodes import changed_in_place, fake_of, op_name
from gradrewrite.instrumentation.source_locations import source_of

Number = int | float | complex
Loss = Literal["zero", "one", "infinite", "step"]  # "step": of a running average, which rounds off
# "least": a lower bound; "norm": an eps that keeps a norm from 0.
Role = Literal["term", "factor", "divisor", "weight", "bound", "least", "fill", "element", "eps", "norm", "logit"]


@dataclass(frozen=True, slots=True)
class _Argument:
    """A numeric argument: position, name, torch's default."""

    position: int
    name: str = ""
    default: Number | None = None


@dataclass(frozen=True, slots=True)
class _Op:
    role: Role
    arguments: tuple[_Argument, ...]


@dataclass(frozen=True, slots=True)
class _Fault:
    op: str
    role: Role
    number: Number
    dtype: torch.dtype
    loss: Loss
    source: str


def vanishing_constants(graphs: Iterable[fx.GraphModule]) -> list[Cause]:
    """Return a cause for each line and number lost in its dtype.

    A nonzero number becomes 0 (``x + 1e-8`` in float16), a bound becomes 1 (``clamp(max=1 - 1e-6)`` in bfloat16), or a
    number is beyond the range (``-1e9`` in float16). Factors count only where the product is lost too: torch computes
    products of 16-bit dtypes in float32. Layer, batch, group and RMS norms add their eps in float32.

    Args:
        graphs: Graphs of Dynamo; their submodules (bodies of checkpoints) are entered. Nothing runs.
    """
    faults = [fault for gm in graphs for graph in _graphs_in(gm) for fault in _faults_in(graph)]
    first = {(f.source or f.op, repr(f.number), f.dtype): f for f in reversed(faults)}
    return [_cause(fault) for fault in reversed(first.values())]


def vanishes(number: Number, dtype: torch.dtype) -> bool:
    """Whether a nonzero number is 0 in a dtype."""
    return dtype.is_floating_point and _rounded(number, dtype) == "zero"


def least_eps(dtype: torch.dtype) -> float:
    """Return the least power of ten above the subnormal numbers."""
    return float(10.0 ** math.ceil(math.log10(torch.finfo(dtype).smallest_normal)))


def _graphs_in(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield module.graph


def _faults_in(graph: fx.Graph) -> Iterator[_Fault]:
    known: dict[fx.Node, Number] = {}  # tensors of one number
    for node in graph.nodes:
        dtype, op = _dtype_of(node), _OPS.get(_plain_name(node))
        if node.op not in ("call_function", "call_method") or dtype is None or op is None:
            continue
        given = list(_numbers_of(node, op, known))
        for argument, number in given:
            role: Role = "least" if op.role == "bound" and argument.name.startswith("min") else op.role
            if loss := _lost(node, role, number, dtype):
                yield _Fault(op_name(node), role, number, dtype, loss, source_of(node))
        if op.role in ("fill", "element") and _is_one_number(node) and len(given) == 1:
            number = given[0][1]
            known[node] = _held(number, dtype) if _rounded(number, dtype) else number


def _dtype_of(node: fx.Node) -> torch.dtype | None:
    """Return the dtype of a floating or complex result."""
    written = node.args[0] if op_name(node) == "setitem" else node
    fake = fake_of(written) if isinstance(written, fx.Node) else None
    is_number = fake is not None and (fake.is_floating_point() or fake.is_complex())
    return fake.dtype if fake is not None and is_number and fake.dtype not in _PACKED else None


def _plain_name(node: fx.Node) -> str:
    name = op_name(node).removeprefix("special_").rstrip("_")
    return name[1:] if name in ("iadd", "isub", "imul", "itruediv") else name


def _numbers_of(node: fx.Node, op: _Op, known: Mapping[fx.Node, Number]) -> Iterator[tuple[_Argument, Number]]:
    """Yield numeric arguments, constant tensors and torch's defaults among them."""
    if _plain_name(node) == "poisson_nll_loss" and _argument(node, _Argument(2, "log_input", 1)):
        return
    for argument in op.arguments:
        value = _argument(node, argument)
        for number in value if isinstance(value, list | tuple) else [value]:
            number = known.get(number) if isinstance(number, fx.Node) else number
            if isinstance(number, int | float | complex) and not isinstance(number, bool):
                yield argument, number * _alpha(node, argument)


def _argument(node: fx.Node, argument: _Argument) -> Any:
    if argument.position < len(node.args):
        return node.args[argument.position]
    return node.kwargs.get(argument.name, argument.default)


def _alpha(node: fx.Node, argument: _Argument) -> Number:
    """Return the factor of a second operand, ``torch.add(..., alpha=...)``."""
    alpha = node.kwargs.get("alpha", 1)
    return alpha if argument.name == "other" and isinstance(alpha, int | float) else 1


def _is_one_number(node: fx.Node) -> bool:
    """Whether all elements are the number given, and stay so."""
    is_made = _plain_name(node) in _MADE_OF_ONE or node.target in ("to", "type", *_CASTS)
    return is_made and not any(node in changed_in_place(user) for user in node.users)


def _lost(node: fx.Node, role: Role, number: Number, dtype: torch.dtype) -> Loss | None:
    """Return the loss of a number in an op, if any."""
    if number in (0, 1, -1) or not cmath.isfinite(number):
        return None
    if role == "weight":
        return "step" if _is_rounded_off(number, dtype) else None
    if role in ("factor", "divisor"):
        return _lost_factor(node, number, role == "divisor", dtype)
    if role == "logit":
        return _rounded(number, dtype) or _rounded(1 - number, _holding(node, dtype))
    loss = _rounded(number, dtype)
    if loss == "one":
        return loss if _guards_one(node, role, number, dtype) else None
    return None if role in ("eps", "norm") and loss == "infinite" else loss


def _guards_one(node: fx.Node, role: Role, number: Number, dtype: torch.dtype) -> bool:
    """Whether a number beside 1 or -1 keeps values from it.

    It is a bound on the near side, or a sum of 1 and an eps.
    """
    away = 0.0 if isinstance(number, complex) else number - round(number)
    if role == "term":
        return abs(away) < _GUARD and _rounded(number, _holding(node, dtype)) == "one"
    return away > 0 if role == "least" else role == "bound" and away < 0


def _lost_factor(node: fx.Node, number: Number, divides: bool, dtype: torch.dtype) -> Loss | None:
    """Return the loss of a factor, if any.

    Torch computes products in a wider dtype, and rounds them. A loss: all products are 0 or infinite, a decay becomes
    1, or the other factor is a mask.
    """
    wide, narrow, limits = _rounded(number, _computing(dtype)), _rounded(number, dtype), torch.finfo(dtype)
    if wide in ("zero", "infinite"):
        return wide
    factor = 1 / number if divides else number
    if _rounded(factor * limits.max, dtype) == "zero":
        return "infinite" if divides else "zero"
    if divides:
        return None
    if narrow == "one" and isinstance(number, float) and 0 < number < 1:
        return "one"
    return "infinite" if narrow == "infinite" and any(map(_is_mask, node.all_input_nodes)) else None


def _is_mask(node: fx.Node) -> bool:
    """Whether a factor is 0 or 1.

    That is booleans in another dtype or shape, or 1 minus something.
    """
    fake = fake_of(node)
    if fake is not None and fake.dtype == torch.bool:
        return True
    if _plain_name(node) in ("sub", "rsub"):
        return bool(node.args[0 if _plain_name(node) == "sub" else 1] == 1)
    is_handed_on = node.target in (*_CASTS, *_SHAPES) or _plain_name(node) in ("getitem", *_SHAPES)
    return is_handed_on and isinstance(node.args[0], fx.Node) and _is_mask(node.args[0])


def _is_rounded_off(weight: Number, dtype: torch.dtype) -> bool:
    """Whether a step of ``lerp`` is below half a rounding step.

    1 minus its weight is 1, or the weight is 1.
    """
    quarter = torch.finfo(dtype).eps / 4
    return not isinstance(weight, complex) and (0 < weight <= quarter or 1 - quarter <= weight < 1)


def _rounded(number: Number, dtype: torch.dtype) -> Loss | None:
    """Return the special value of a number in a dtype; None if exact."""
    held = _held(number, dtype)
    if not cmath.isfinite(held) or abs(number) > torch.finfo(dtype).max * (1 + torch.finfo(dtype).eps / 4):
        return "infinite"  # float8_e4m3fn has no infinity: numbers beyond its range become its largest one, or NaN
    if held == 0 and number != 0:
        return "zero"
    return "one" if held in (1, -1) and number != held else None


def _held(number: Number, dtype: torch.dtype) -> Number:
    wide = torch.complex128 if isinstance(number, complex) else torch.float64
    held: Number = torch.tensor(number, dtype=wide).to(dtype).item()
    return held


def _computing(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products inside torch's kernels."""
    return torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32


def _holding(node: fx.Node, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of numbers inside kernels of ``add`` and ``logit``.

    On a GPU it is wider.
    """
    fake = fake_of(node)
    return dtype if fake is None or fake.device.type == "cpu" else _computing(dtype)


def _cause(fault: _Fault) -> Cause:
    dtype, number = _name(fault.dtype), _written(fault.number)
    if fault.loss == "infinite":
        text = f"{number} is beyond the range of {dtype} (up to {torch.finfo(fault.dtype).max:g})"
    else:
        text = f"{_held_text(fault, number)} in {dtype}"
    effect = _EFFECTS[fault.role, fault.loss].format(_written(_held(fault.number, fault.dtype)))
    text = f"{text}: `{fault.op}` {effect}."
    return Cause("constant vanishes", f"/{fault.op}", fault.source, text=text, advice=_advice(fault))


def _written(number: Number) -> str:
    short = f"{number:.8g}"
    return short if isinstance(number, complex) or float(short) == number else repr(number)


def _held_text(fault: _Fault, number: str) -> str:
    if fault.loss == "step":
        return f"A step of {number} is rounded off"
    if fault.loss == "zero":
        return f"{number} is 0"
    return f"1 - {number} is 1" if fault.role == "logit" else f"{number} is {'-' * _is_negative(fault.number)}1"


def _advice(fault: _Fault) -> str:
    limits, compute = torch.finfo(fault.dtype), f"compute this line in {_wider(fault)}"
    if (fault.role in ("factor", "divisor") and fault.loss == "zero") or fault.role == "divisor":
        return f"{compute.capitalize()}."
    if fault.loss == "infinite":
        end = "min (in a mask: float('-inf'))" if _is_negative(fault.number) else "max"
        return f"Use torch.finfo(torch.{_name(fault.dtype)}).{end}, or {compute}."
    if fault.loss == "step" or fault.role == "factor":
        return f"Keep the average in {_wider(fault)}, and cast it where it is read."
    if fault.loss == "zero":
        return f"Use {least_eps(fault.dtype):g}, or {compute}."
    if fault.role == "logit":
        return f"Use {limits.eps:.3g}, or {compute}."
    held = _held(fault.number, fault.dtype)
    return f"Use {held:g} {'-' if _is_below(fault.number, held) else '+'} {limits.eps:.3g}, or {compute}."


def _wider(fault: _Fault) -> str:
    if fault.dtype.is_complex:
        return "complex128"
    return "float32" if fault.dtype.itemsize < 4 and not _rounded(fault.number, torch.float32) else "float64"


def _is_below(number: Number, held: Number) -> bool:
    return not isinstance(number, complex) and not isinstance(held, complex) and number < held


def _is_negative(number: Number) -> bool:
    return not isinstance(number, complex) and number < 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_GUARD = 1e-3  # numbers this near to 1 in a sum are 1 and an eps
_EFFECTS: Mapping[tuple[Role, Loss], str] = {
    ("term", "zero"): "adds nothing",
    ("term", "one"): "adds no eps",
    ("term", "infinite"): "adds {}",
    ("factor", "zero"): "gives 0",
    ("factor", "one"): "changes nothing",
    ("factor", "infinite"): "makes {} of every 1",
    ("divisor", "zero"): "divides by 0",
    ("divisor", "infinite"): "gives 0",
    ("weight", "step"): "leaves an average as it was",
    ("bound", "zero"): "bounds by 0",
    ("bound", "one"): "lets {} through",
    ("bound", "infinite"): "bounds nothing, or raises",
    ("least", "zero"): "lets 0 through",
    ("least", "one"): "lets {} through",
    ("least", "infinite"): "bounds nothing, or raises",
    ("fill", "zero"): "writes 0",
    ("fill", "infinite"): "writes {}, or raises",
    ("element", "zero"): "holds 0",
    ("element", "infinite"): "holds {}",
    ("eps", "zero"): "adds nothing",
    ("norm", "zero"): "divides by 0 where a norm is 0",
    ("logit", "zero"): "is infinite at 0 and at 1",
    ("logit", "one"): "is infinite at 1",
    ("logit", "infinite"): "bounds nothing",
}
_PACKED = (torch.float4_e2m1fn_x2,)  # two numbers an element
_CASTS = ("half", "bfloat16", "float", "double", "to", "type", "type_as")
_SHAPES = ("unsqueeze", "squeeze", "view", "reshape", "expand", "contiguous", "transpose", "clone")
_MADE_OF_ONE = ("tensor", "as_tensor", "scalar_tensor", "new_tensor", "full", "full_like", "new_full")
_TERM = _Op("term", (_Argument(0), _Argument(1, "other")))
_FACTOR = _Op("factor", _TERM.arguments)
_DIVISOR = _Op("divisor", _TERM.arguments[1:])
_BOUND = _Op("bound", _TERM.arguments)
_LEAST = _Op("bound", (_Argument(0, "min_input"), _Argument(1, "min_other")))
_OPS: Mapping[str, _Op] = {
    **dict.fromkeys(("add", "sub", "subtract", "rsub"), _TERM),
    **dict.fromkeys(("mul", "multiply"), _FACTOR),
    **dict.fromkeys(("div", "divide", "truediv", "true_divide"), _DIVISOR),
    **dict.fromkeys(("minimum", "fmin", "min"), _BOUND),
    **dict.fromkeys(("maximum", "fmax", "max"), _LEAST),
    **dict.fromkeys(("clamp", "clip"), _Op("bound", (_Argument(1, "min"), _Argument(2, "max")))),
    "clamp_min": _Op("bound", (_Argument(1, "min"),)),
    "clamp_max": _Op("bound", (_Argument(1, "max"),)),
    "hardtanh": _Op("bound", (_Argument(1, "min_val"), _Argument(2, "max_val"))),
    "lerp": _Op("weight", (_Argument(2, "weight"),)),
    "where": _Op("fill", (_Argument(0), _Argument(1, "input"), _Argument(2, "other"))),
    **dict.fromkeys(("masked_fill", "threshold", "setitem"), _Op("fill", (_Argument(2, "value"),))),
    "full": _Op("fill", (_Argument(1, "fill_value"),)),
    "full_like": _Op("fill", (_Argument(1, "fill_value"),)),
    "new_full": _Op("fill", (_Argument(2, "fill_value"),)),
    "fill": _Op("fill", (_Argument(1, "value"),)),
    **dict.fromkeys(("index_fill", "scatter", "pad"), _Op("fill", (_Argument(3, "value"),))),
    "nan_to_num": _Op("fill", (_Argument(1, "nan"), _Argument(2, "posinf"), _Argument(3, "neginf"))),
    **dict.fromkeys(("tensor", "as_tensor"), _Op("element", (_Argument(0, "data"),))),
    "scalar_tensor": _Op("element", (_Argument(0, "s"),)),
    "new_tensor": _Op("element", (_Argument(1, "data"),)),
    **dict.fromkeys(_CASTS, _Op("element", (_Argument(0),))),
    "logit": _Op("logit", (_Argument(1, "eps"),)),
    "normalize": _Op("norm", (_Argument(3, "eps", 1e-12),)),
    "cosine_similarity": _Op("norm", (_Argument(3, "eps", 1e-8),)),
    "pairwise_distance": _Op("eps", (_Argument(3, "eps", 1e-6),)),
    "poisson_nll_loss": _Op("eps", (_Argument(5, "eps", 1e-8),)),
    "gaussian_nll_loss": _Op("eps", (_Argument(4, "eps", 1e-6),)),
    "triplet_margin_loss": _Op("eps", (_Argument(5, "eps", 1e-6),)),
}
