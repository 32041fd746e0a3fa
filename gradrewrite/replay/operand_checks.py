"""Checks of operands, for the reason of a non-finite value."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gradrewrite._utils.tensors import computable, tensors_in
from gradrewrite.replay.reasons import Found, OpCall

SUMS = (
    "sum",
    "mean",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "matmul",
    "linear",
    "linalg_vector_norm",
    "norm",
    "dot",
    "prod",
)
WORDS = {
    "to_copy": "cast",
    "mm": "matrix product",
    "bmm": "matrix product",
    "addmm": "matrix product",
    "linalg_vector_norm": "norm",
    "linalg_norm": "norm",
    "sqrt": "root",
    "std": "standard deviation",
    "var": "standard deviation",
    "std_mean": "standard deviation",
}
_PASSED = (  # on the way from an op to a divisor
    "unsqueeze", "squeeze", "expand", "expand_as", "view", "reshape", "repeat_interleave", "clone", "alias", "detach",
    "mul", "getitem", "select", "slice", "permute", "transpose", "t", "to_copy", "to", "float", "contiguous", "index",
    "gather", "add", "clamp", "clamp_min",
)  # fmt: skip


def share(where: Tensor) -> str:
    """How many elements: ``at 3 of 12``; nothing of a single one."""
    return f" for {int(where.sum())} of {where.numel()}" if where.numel() > 1 else ""


def extreme(x: Tensor, where: Tensor, *, high: bool) -> str:
    """Return the largest or smallest of some elements, in words."""
    found = x[where]
    return f"{float(found.amax() if high else found.amin()):.4g}"


def rounded(call: OpCall) -> str:
    """A number of an op before that its dtype rounds to 0 or 1: ``1 - 1e-06 is 1 in bfloat16``."""
    for before in call.earlier:
        dtype = before.dtype or call.result.dtype
        if not dtype.is_floating_point:
            continue
        for number in before.numbers:
            held = float(torch.tensor(number, dtype=torch.float64).to(dtype))
            if held in (0.0, 1.0, -1.0) and held != number:
                shown = (
                    f"{number:.3g}"
                    if held == 0
                    else f"{held:g} {'-' if number < held else '+'} {abs(held - number):.3g}"
                )
                return f": {shown} is {held:g} in {short(dtype)}"
    return ""


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch``."""
    return str(dtype).removeprefix("torch.")


def below(limit: float, *, number: int = 0) -> Callable[[OpCall], Found]:
    """Operands below a limit, as a negative one of log."""

    def find(call: OpCall) -> Found:
        x = call.operand(number)
        where = x < limit
        if not where.any():
            return None
        return f"{call.op} of {extreme(x, where, high=False)}{share(where)}{rounded(call)}", where

    return find


def at_value(limit: float, *, number: int = 0, name: str = "") -> Callable[[OpCall], Found]:
    """Operands of a value that has no finite result, as 0 of log."""

    def find(call: OpCall) -> Found:
        where = call.operand(number) == limit
        if not where.any():
            return None
        return f"{name or call.op} of {limit:g}{share(where)}{rounded(call)}", where

    return find


def at_bounds(low: float, high: float) -> Callable[[OpCall], Found]:
    """Operands at one of two bounds, as 0 and 1 of logit."""

    def find(call: OpCall) -> Found:
        x = call.operand(0)
        where = (x == low) | (x == high)
        return (f"{call.op} of {low:g} or {high:g}{share(where)}{rounded(call)}", where) if where.any() else None

    return find


def beyond_one(call: OpCall) -> Found:
    """Operands outside of -1 to 1."""
    x = call.operand(0)
    where = x.abs() > 1
    if not where.any():
        return None
    return f"{call.op} of {float(x[where].flatten()[0]):.9g}{share(where)}", where


def division(call: OpCall) -> tuple[Tensor, Tensor] | None:
    """Where a divisor is 0, and where the numerator is 0 as well."""
    top, bottom = call.operand(0), call.operand(1)
    if not bottom.numel() or not (bottom == 0).any():
        return None
    try:
        top, bottom = torch.broadcast_tensors(top, bottom)
    except RuntimeError:  # of an op with other operands
        return None
    return bottom == 0, (bottom == 0) & (top == 0)


def underflow_in_divisor(call: OpCall) -> Found:
    """A divisor of exponentials that are all 0."""
    found = division(call)
    if found is None or not any(before.op in ("exp", "exp2") for before in call.earlier):
        return None
    dtype = short(call.operand(1).dtype)
    return f"divisor 0{share(found[0])}: every exp in it is too small for {dtype} and is 0", found[0]


def zero_by_zero_of(*ops: str) -> Callable[[OpCall], Found]:
    """0 divided by 0, with a divisor by one of these ops."""

    def find(call: OpCall) -> Found:
        made = call.made_by(1, _PASSED)
        made = call.made_by(1, (*_PASSED, "sqrt", "pow")) if made in ("sqrt", "pow") and "var" in ops else made
        found = zero_by_zero(call) if made in ops else None
        return None if found is None else (f"{found[0]}: the {WORDS.get(made, made)} is 0", found[1])

    return find


def zero_by_zero(call: OpCall) -> Found:
    """0 divided by 0."""
    found = division(call)
    return None if found is None or not found[1].any() else (f"0/0{share(found[1])}{rounded(call)}", found[1])


def divisor_zero(call: OpCall) -> Found:
    """A divisor of 0."""
    found = division(call)
    return None if found is None else (f"divisor 0{share(found[0])}{rounded(call)}", found[0])


def kink_of(call: OpCall) -> Tensor:
    """The divisor of a backward, or the base of its power."""
    return call.operand(1 if call.op == "div" else 0)


def derivative_at_zero(call: OpCall) -> Found:
    """A forward at 0, with an infinite derivative there."""
    where = kink_of(call) == 0
    if not where.any():
        return None
    return f"{call.backward_of} at 0{share(where)}, where its derivative is infinite{rounded(call)}", where


def derivative_at_one(call: OpCall) -> Found:
    """A forward at 1 or -1, with an infinite derivative there."""
    x = kink_of(call)
    where = x.abs() >= 1 if not call.op else x <= 0
    if not where.any():
        return None
    return f"{call.backward_of} at 1 or -1{share(where)}, where its derivative is infinite{rounded(call)}", where


def too_large(call: OpCall) -> Found:
    """An operand too large for its exponential."""
    x = call.operand(0)
    dtype = call.result.dtype
    largest = math.log(torch.finfo(dtype).max)
    limit = (
        largest / math.log(2) if call.op == "exp2" else largest + (math.log(2) if call.op in ("sinh", "cosh") else 0)
    )
    where = (x.abs() if call.op in ("sinh", "cosh") else x) > limit
    where &= torch.isfinite(x)
    if not where.any():
        return None
    return f"{call.op} of up to {extreme(x.abs(), where, high=True)}, limit {limit:.3g}{of_dtype(dtype)}", where


def of_dtype(dtype: torch.dtype) -> str:
    """Return the dtype in words, unless it is float32."""
    return "" if dtype == torch.float32 else f" in {short(dtype)}"


def masked_rows(call: OpCall) -> Found:
    """Rows that hold nothing but -inf."""
    x = call.operand(0)
    dim = call.args[1] if len(call.args) > 1 else -1
    dim = dim[0] if isinstance(dim, list | tuple) and dim else dim
    if not isinstance(dim, int) or isinstance(dim, bool) or not x.dim():
        return None
    where = torch.isneginf(x).all(dim)
    if not where.any():
        return None
    sees = f"{int(where.sum())} of {where.numel()} queries see no key" if where.dim() > 1 else "nothing is left in it"
    return f"{call.op} over a row of -inf: {sees}", where


def masked_attention(call: OpCall) -> Found:
    """Queries without a key, by a mask."""
    for x in (*tensors_in(list(call.args[3:])),):
        rows = torch.isneginf(x).all(-1) if x.is_floating_point() else x.logical_not().all(-1)
        if x.dim() >= 2 and rows.any():
            number = f"{int(rows.sum())} of {rows.numel()} queries see no key"
            return f"attention with a mask that leaves nothing: {number}", rows
    return None


def infinite_in_softmax(call: OpCall) -> Found:
    """Logits of infinity."""
    where = torch.isposinf(call.operand(0))
    return (f"{call.op} of infinity{share(where)}", where) if where.any() else None


def infinite_difference(call: OpCall) -> Found:
    """Infinity minus infinity."""
    left, right = call.operand(0), call.operand(1)
    if not (torch.isinf(left).any() and torch.isinf(right).any()):
        return None
    where = torch.isinf(left) & torch.isinf(right) & torch.isnan(computable(call.result))
    sign = "inf - inf" if where.any() else "infinity"
    return (f"{sign}{share(where)}", where) if where.any() else None


def zero_times_infinity(call: OpCall) -> Found:
    """0 times infinity."""
    left, right = call.operand(0), call.operand(1)
    if not (left.numel() and right.numel()):
        return None
    where = ((left == 0) & torch.isinf(right)) | (torch.isinf(left) & (right == 0))
    return (f"0 x inf{share(where)}", where) if where.any() else None


def beyond_dtype(call: OpCall) -> Found:
    """A finite result that its dtype cannot hold."""
    found = call.tensors
    if not found or not all(bool(torch.isfinite(t).all()) for t in found) or not torch.isinf(call.result).any():
        return None
    dtype, largest = call.result.dtype, max(float(t.abs().amax()) for t in found)
    limit = f"{torch.finfo(dtype).max:.4g}, the largest of {short(dtype)}"
    elements = None if call.op in SUMS else call.is_bad
    return f"{WORDS.get(call.op, call.op)} of values up to {largest:.4g} exceeds {limit}", elements


def beyond_float16(call: OpCall) -> Found:
    """A finite result that float16 cannot hold."""
    return beyond_dtype(call) if call.result.dtype == torch.float16 else None


def no_elements(call: OpCall) -> Found:
    """A mean of no elements."""
    x = call.args[0] if call.args else None
    if not isinstance(x, Tensor) or x.numel():
        return None
    return f"{call.op} of no elements, of shape {list(x.shape)}", None


def one_element(call: OpCall) -> Found:
    """A variance of one element, with a divisor of 0."""
    x = call.args[0] if call.args else None
    is_known = isinstance(x, Tensor) and x.numel() == call.result.numel()
    return (f"{call.op} of one element, with Bessel's correction", None) if is_known else None


def no_targets(call: OpCall) -> Found:
    """Targets that are all ignored, or all of weight 0."""
    at = next((n for n, x in enumerate(call.args) if isinstance(x, Tensor) and not x.is_floating_point()), None)
    if at is None:
        return None
    target, weight = call.args[at], call.args[at + 1] if at + 1 < len(call.args) else None
    ignored = next((n for n in reversed(call.args) if isinstance(n, int) and not isinstance(n, bool) and n < 0), -100)
    number = target.numel()
    if not number:
        return "there is no target, and the mean is 0/0", None
    if (target == ignored).all():
        return f"every target is ignored ({number} of {number} are {ignored}), and the mean is 0/0", None
    if not isinstance(weight, Tensor) or weight.dim() != 1 or (weight[target[target != ignored]] != 0).any():
        return None
    return f"the class of every target ({number} of {number}) has weight 0, and the mean is 0/0", None


def log_factor(call: OpCall) -> Found:
    """0 or a negative number as the argument of the logarithm in x log y."""
    y = torch.broadcast_to(call.operand(1), call.result.shape)
    where = call.is_bad & (y <= 0)
    return (f"log of {extreme(y, where, high=False)}{share(where)}{rounded(call)}", where) if where.any() else None


def singular(call: OpCall) -> Found:
    """Matrices with a determinant of 0, or of a negative number."""
    where = call.is_bad
    sign = "0" if not torch.isnan(call.result).any() else "0 or less"
    return f"{call.op.removeprefix('linalg_')} of a determinant of {sign}{share(where)}", where


def at_pole(call: OpCall) -> Found:
    """0 or a negative whole number, a pole of the gamma function."""
    x = call.operand(0)
    where = (x <= 0) & (x == x.round())
    return (f"{call.op} of {extreme(x, where, high=True)}{share(where)}{rounded(call)}", where) if where.any() else None


def too_long(call: OpCall) -> Found:
    """Examples of ctc_loss with more labels, and blanks between equal ones, than frames."""
    _, targets, frames, labels = (*call.args, None, None, None, None)[:4]
    if not isinstance(targets, Tensor):
        return None
    frames, labels = (torch.as_tensor(x).flatten().cpu() for x in (frames, labels))
    own = targets.cpu().split(labels.tolist()) if targets.dim() == 1 else targets.cpu()
    needed = [len(row := t[: int(n)]) + int((row[1:] == row[:-1]).sum()) for t, n in zip(own, labels, strict=False)]
    where = torch.tensor(needed) > frames
    if not where.any():
        return None
    at = int(where.nonzero()[0])
    text = f"example {at} has {int(frames[at])} frames for {int(labels[at])} labels"
    repeats = needed[at] - int(labels[at])
    text += f" and {repeats} repeated label{'s' * (repeats > 1)}, which needs {needed[at]}" if repeats else ""
    more = int(where.sum()) - 1
    return f"{text}{f', and so {more} more examples' if more else ''}", where
