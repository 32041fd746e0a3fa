"""Reasons of non-finite values: what an op was given, why that is not finite, and what mends it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradrewrite._utils.tensors import computable, tensors_in

Arguments = list[Any]
_GROWN = 0.25  # power of the largest number of a dtype
EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh")


@dataclass(frozen=True, slots=True)
class EarlierOp:
    """An op that made an operand, directly or some ops before.

    Attributes:
        op: Its name.
        numbers: The Python numbers among its arguments.
        dtype: Of its result; None if that is not known.
    """

    op: str
    numbers: tuple[float, ...] = ()
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class OpCall:
    """A call of an op whose result is not finite, though nothing faulty came in.

    Attributes:
        op: Its name, that of the operator without namespace, overload and underscores: ``softmax``.
        args: All its arguments, keyword arguments last.
        result: Its first result with a NaN or an infinity.
        backward_of: The op of the forward that it differentiates, as the program calls it; ``""`` in the forward.
        earlier: The ops that made its operands, the nearest first.
    """

    op: str
    args: Sequence[Any]
    result: Tensor
    backward_of: str = ""
    earlier: Sequence[EarlierOp] = field(default=(), repr=False)

    def operand(self, number: int) -> Tensor:
        """Return an argument as a tensor that can be computed with; empty if it has no numbers."""
        value = self.args[number] if number < len(self.args) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return torch.tensor(value, dtype=torch.float64)
        return computable(value) if isinstance(value, Tensor) and not value.is_complex() else torch.empty(0)

    @property
    def tensors(self) -> list[Tensor]:
        """The operands with a fraction."""
        return [computable(t) for t in tensors_in(list(self.args)) if t.is_floating_point() and t.numel()]

    @property
    def is_bad(self) -> Tensor:
        """Where the result is NaN or infinite."""
        return torch.isfinite(computable(self.result)).logical_not()


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an op made a non-finite value.

    Attributes:
        why: Half a sentence: ``log of -0.135``.
        advice: What to change.
        elements: Where the guilty elements are; None if that is not known.
        dims: Names of the dimensions of ``elements``; None for those of any value.
        repair: From the arguments of the op to those with the advice followed; None if there is no such change.
        is_overflow: Whether finite values became too large, and not by this op alone.
        is_too_large: Whether an operand was too large.
    """

    why: str
    advice: str
    elements: Tensor | None = None
    dims: tuple[str, ...] | None = None
    repair: Callable[[Arguments], Arguments] | None = None
    is_overflow: bool = False
    is_too_large: bool = False


Found = tuple[str, "Tensor | None"] | None  # the reason, and where; None if it is another one


@dataclass(frozen=True)
class Row:
    """A row of the table: ops, what they may not be given, and what mends it.

    ``of`` are ops of the forward: the row is about what their backward runs. Without it a row holds in both.
    """

    name: str
    ops: Collection[str]
    advice: str
    find: Callable[[OpCall], Found]
    repair: Callable[[Arguments], Arguments] | None = None
    of: Collection[str] = ()
    is_overflow: bool = False
    dims: tuple[str, ...] | None = None

    def reason(self, call: OpCall) -> Reason | None:
        """Return the reason of a call; None if the row is not about it."""
        if call.op not in self.ops or (self.of and call.backward_of not in self.of):
            return None
        found = self.find(call)
        if found is None:
            return None
        why, elements = found
        is_too_large = self.is_overflow or self.find is _too_large
        return Reason(why, self.advice, elements, self.dims, self.repair, self.is_overflow, is_too_large)


def reason_of(call: OpCall) -> Reason | None:
    """Return why an op made a non-finite value; None if the table does not know."""
    return next((found for row in TABLE if (found := row.reason(call)) is not None), None)


def growth_of(call: OpCall) -> Reason | None:
    """Return the reason of an exponential whose finite result is so large that what is computed from it overflows."""
    result = computable(call.result)
    if call.op not in EXPONENTIALS or not result.numel() or not result.is_floating_point():
        return None
    where = torch.isfinite(result) & (result.abs() > torch.finfo(result.dtype).max ** _GROWN)
    if not where.any():
        return None
    x = call.operand(0)
    why = f"{call.op} of up to {_extreme(x.abs(), where, high=True)} is {_extreme(result.abs(), where, high=True)}"
    row = next(row for row in TABLE if row.find is _too_large)
    return Reason(why, row.advice, where, None, row.repair, is_too_large=True)


def _share(where: Tensor) -> str:
    """How many elements: ``at 3 of 12``; nothing of a single one."""
    return f" for {int(where.sum())} of {where.numel()}" if where.numel() > 1 else ""


def _extreme(x: Tensor, where: Tensor, *, high: bool) -> str:
    found = x[where]
    return f"{float(found.amax() if high else found.amin()):.4g}"


def _rounded(call: OpCall) -> str:
    """A number of an op before that its dtype rounds to 0 or 1: ``1 - 1e-06 is 1 in bfloat16``."""
    for before in call.earlier:
        if before.dtype is None or not before.dtype.is_floating_point:
            continue
        for number in before.numbers:
            held = float(torch.tensor(number, dtype=torch.float64).to(before.dtype))
            if held in (0.0, 1.0, -1.0) and held != number:
                shown = (
                    f"{number:.3g}"
                    if held == 0
                    else f"{held:g} {'-' if number < held else '+'} {abs(held - number):.3g}"
                )
                return f": {shown} is {held:g} in {_short(before.dtype)}"
    return ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _below(limit: float, *, number: int = 0) -> Callable[[OpCall], Found]:
    """Operands below a limit, as a negative one of log."""

    def find(call: OpCall) -> Found:
        x = call.operand(number)
        where = x < limit
        if not where.any():
            return None
        return f"{call.op} of {_extreme(x, where, high=False)}{_share(where)}{_rounded(call)}", where

    return find


def _at(limit: float, *, number: int = 0, name: str = "") -> Callable[[OpCall], Found]:
    """Operands of a value that has no finite result, as 0 of log."""

    def find(call: OpCall) -> Found:
        where = call.operand(number) == limit
        if not where.any():
            return None
        return f"{name or call.op} of {limit:g}{_share(where)}{_rounded(call)}", where

    return find


def _beyond_one(call: OpCall) -> Found:
    x = call.operand(0)
    where = x.abs() > 1
    if not where.any():
        return None
    return f"{call.op} of {float(x[where].flatten()[0]):.9g}{_share(where)}", where


def _division(call: OpCall) -> tuple[Tensor, Tensor] | None:
    """Where a divisor is 0, and where the numerator is 0 as well."""
    top, bottom = call.operand(0), call.operand(1)
    if not bottom.numel() or not (bottom == 0).any():
        return None
    try:
        top, bottom = torch.broadcast_tensors(top, bottom)
    except RuntimeError:  # of an op with other operands
        return None
    return bottom == 0, (bottom == 0) & (top == 0)


def _underflow_in_divisor(call: OpCall) -> Found:
    found = _division(call)
    if found is None or not any(before.op in ("exp", "exp2") for before in call.earlier):
        return None
    dtype = _short(call.operand(1).dtype)
    return f"divisor 0{_share(found[0])}: every exp in it is too small for {dtype} and is 0", found[0]


def _zero_by_zero(call: OpCall) -> Found:
    found = _division(call)
    return None if found is None or not found[1].any() else (f"0/0{_share(found[1])}{_rounded(call)}", found[1])


def _divisor_zero(call: OpCall) -> Found:
    found = _division(call)
    return None if found is None else (f"divisor 0{_share(found[0])}{_rounded(call)}", found[0])


def _renamed(found: Found, why: str) -> Found:
    return None if found is None else (why, found[1])


def _kink_of(call: OpCall) -> Tensor:
    """What a backward divides by, or takes to a negative power."""
    return call.operand(1 if call.op == "div" else 0)


def _derivative_at_zero(call: OpCall) -> Found:
    where = _kink_of(call) == 0
    if not where.any():
        return None
    return f"{call.backward_of} at 0{_share(where)}, where its derivative is infinite{_rounded(call)}", where


def _derivative_at_one(call: OpCall) -> Found:
    x = _kink_of(call)
    where = x.abs() >= 1 if not call.op else x <= 0
    if not where.any():
        return None
    return f"{call.backward_of} at 1 or -1{_share(where)}, where its derivative is infinite{_rounded(call)}", where


def _at_kink(args: Arguments) -> Arguments:
    number = 1 if len(args) > 1 and isinstance(args[1], Tensor) else 0
    return _with(number, _not_zero)(args)


def _too_large(call: OpCall) -> Found:
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
    return f"{call.op} of up to {_extreme(x.abs(), where, high=True)}, limit {limit:.3g}{_of_dtype(dtype)}", where


def _of_dtype(dtype: torch.dtype) -> str:
    return "" if dtype == torch.float32 else f" in {_short(dtype)}"


def _masked_rows(call: OpCall) -> Found:
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


def _masked_attention(call: OpCall) -> Found:
    for x in (*tensors_in(list(call.args[3:])),):
        rows = torch.isneginf(x).all(-1) if x.is_floating_point() else x.logical_not().all(-1)
        if x.dim() >= 2 and rows.any():
            number = f"{int(rows.sum())} of {rows.numel()} queries see no key"
            return f"attention with a mask that leaves nothing: {number}", rows
    return None


def _infinite_in_softmax(call: OpCall) -> Found:
    where = torch.isposinf(call.operand(0))
    return (f"{call.op} of infinity{_share(where)}", where) if where.any() else None


def _infinite_difference(call: OpCall) -> Found:
    left, right = call.operand(0), call.operand(1)
    if not (torch.isinf(left).any() and torch.isinf(right).any()):
        return None
    where = torch.isinf(left) & torch.isinf(right) & torch.isnan(computable(call.result))
    sign = "inf - inf" if where.any() else "infinity"
    return (f"{sign}{_share(where)}", where) if where.any() else None


def _zero_times_infinity(call: OpCall) -> Found:
    left, right = call.operand(0), call.operand(1)
    where = ((left == 0) & torch.isinf(right)) | (torch.isinf(left) & (right == 0))
    return (f"0 x inf{_share(where)}", where) if where.any() else None


def _beyond_dtype(call: OpCall) -> Found:
    """A finite result that its dtype cannot hold."""
    found = call.tensors
    if not found or not all(bool(torch.isfinite(t).all()) for t in found) or not torch.isinf(call.result).any():
        return None
    dtype, largest = call.result.dtype, max(float(t.abs().amax()) for t in found)
    limit = f"{torch.finfo(dtype).max:.4g}, the largest of {_short(dtype)}"
    elements = None if call.op in _SUMS else call.is_bad
    return f"{_WORDS.get(call.op, call.op)} of values up to {largest:.4g} exceeds {limit}", elements


def _beyond_float16(call: OpCall) -> Found:
    return _beyond_dtype(call) if call.result.dtype == torch.float16 else None


def _nothing(call: OpCall) -> Found:
    x = call.args[0] if call.args else None
    if not isinstance(x, Tensor) or x.numel():
        return None
    return f"{call.op} of no elements, of shape {list(x.shape)}", None


def _one_element(call: OpCall) -> Found:
    x = call.args[0] if call.args else None
    is_known = isinstance(x, Tensor) and x.numel() == call.result.numel()
    return (f"{call.op} of one element, with Bessel's correction", None) if is_known else None


def _no_targets(call: OpCall) -> Found:
    target = call.args[1] if len(call.args) > 1 else None
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    ignored = next((n for n in reversed(call.args) if isinstance(n, int) and not isinstance(n, bool) and n < 0), -100)
    if target.numel() and not (target == ignored).all():
        return None
    count = "every target is ignored" if target.numel() else "there is no target"
    return f"{count} ({target.numel()} of {target.numel()} are {ignored}), and the mean is 0/0", None


def _too_long(call: OpCall) -> Found:
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


def _filled(args: Arguments) -> Arguments:
    """Replace infinities and NaN in tensors by 0."""
    return [torch.nan_to_num(a, 0.0, 0.0, 0.0) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def _with(number: int, change: Callable[[Tensor], Tensor]) -> Callable[[Arguments], Arguments]:
    """Return a repair that changes one tensor."""

    def repair(args: Arguments) -> Arguments:
        value = args[number] if number < len(args) else None
        if not isinstance(value, Tensor):
            return args
        return [*args[:number], change(value).to(value.dtype), *args[number + 1 :]]

    return repair


def _least(x: Tensor) -> Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny ** 0.5)


def _not_zero(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.finfo(x.dtype).eps, x) if x.is_floating_point() else x.clamp_min(1)


def _bounded(x: Tensor) -> Tensor:
    limit = min(20.0, math.log(torch.finfo(x.dtype).max) / 2)
    return x.clamp(-limit, limit)


def _inside(x: Tensor) -> Tensor:
    eps = torch.finfo(x.dtype).eps
    return x.clamp(-1 + eps, 1 - eps)


def _open_rows(args: Arguments) -> Arguments:
    x, dim = args[0], args[1] if len(args) > 1 else -1
    dim = dim[0] if isinstance(dim, list | tuple) else dim
    return [torch.where(torch.isneginf(x).all(dim, keepdim=True), torch.zeros_like(x), x), *args[1:]]


def _open_mask(args: Arguments) -> Arguments:
    def opened(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.is_floating_point():
            return torch.where(torch.isneginf(x).all(-1, keepdim=True), torch.zeros_like(x), x)
        return x | x.logical_not().all(-1, keepdim=True)

    return [*args[:3], *map(opened, args[3:])]


_SUMS = (
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
_WORDS = {"to_copy": "cast", "mm": "matrix product", "bmm": "matrix product", "addmm": "matrix product"}
_LOGS = ("log", "log2", "log10")
_OVERFLOWING = (
    *_SUMS, "mul", "add", "sub", "div", "pow", "square", "cumsum", "cumprod", "to_copy", "convolution", "mse_loss",
    "convert_element_type", "var", "neg", "einsum", "layer_norm", "native_layer_norm", "reciprocal", "baddbmm",
)  # fmt: skip
_CAUTION = "what stands behind it (where, clamp, min, a mask) hides the value, not its gradient"
_MASKS = (
    "Let each query see a key, for one itself, or leave such rows out before the softmax: "
    "a mask behind it hides the value, not its gradient."
)

_ROOTS = (
    "sqrt",
    "pow",
    "norm",
    "linalg_norm",
    "linalg_vector_norm",
    "std",
    "hypot",
    "dist",
    "cdist",
    "pairwise_distance",
)
DERIVATIVES = frozenset(("div", "pow", "rsqrt", "reciprocal", "mul", "sub", "add", "sum"))  # ops of backwards
_AT_ZERO = ("div", "pow", "rsqrt", "reciprocal", "")

TABLE: tuple[Row, ...] = (
    Row(
        "root at 0",
        _AT_ZERO,
        "Add the epsilon inside of the root, sqrt(x + 1e-12): its derivative at 0 is infinite, and an epsilon behind the "
        "root does not help; nor does a where behind it.",
        _derivative_at_zero,
        _at_kink,
        of=_ROOTS,
    ),
    Row(
        "acos or asin at 1",
        ("rsqrt", "div", "pow", ""),
        "Bound its input before it, inside of 1: acos(x.clamp(-1 + 1e-6, 1 - 1e-6)), with what its dtype resolves there; "
        "or take atan2. At 1 its derivative is infinite.",
        _derivative_at_one,
        _at_kink,
        of=("acos", "asin", "arccos", "arcsin", "acos_", "asin_"),
    ),
    Row(
        "log at 0, hidden",
        ("div", ""),
        "Fill its input before the log, log(where(mask, x, 1)): a where or a clamp behind it hides the value, not its "
        "gradient.",
        _derivative_at_zero,
        _at_kink,
        of=("log", "log2", "log10", "log1p", "xlogy"),
    ),
    Row(
        "division by 0, hidden",
        ("div", "reciprocal", ""),
        "Fill the divisor before the division, x / where(mask, y, 1): a where or a clamp behind it hides the value, not "
        "its gradient.",
        _derivative_at_zero,
        _at_kink,
        of=("truediv", "div", "true_divide", "divide", "reciprocal", "rtruediv"),
    ),
    Row(
        "angle at the origin",
        ("reciprocal", "div", ""),
        "Leave points at the origin out before atan2: its derivative at (0, 0) is not defined.",
        _derivative_at_zero,
        _at_kink,
        of=("atan2", "arctan2"),
    ),
    Row(
        "logsumexp over a row of -inf",
        ("sub",),
        _MASKS,
        lambda call: _renamed(_infinite_difference(call), "logsumexp over a row of -inf"),
        _filled,
        of=("logsumexp",),
    ),
    Row(
        "ctc_loss of a target longer than its input",
        ("ctc_loss",),
        "Pass zero_infinity=True, or leave out examples whose labels, with one frame more between two equal ones, are "
        "more than their frames.",
        _too_long,
        lambda args: [*args[:-1], True],
        dims=("row",),
    ),
    Row(
        "cross-entropy without targets",
        ("nll_loss_forward", "nll_loss2d_forward", "cross_entropy", "nll_loss", "cross_entropy_loss"),
        "Leave such batches out, or divide the sum by the number of targets, at least 1: "
        'reduction="sum", then / (target != ignore_index).sum().clamp_min(1).',
        _no_targets,
    ),
    Row(
        "mean of nothing",
        ("mean", "var", "std", "var_mean", "std_mean", "amax", "amin", "max", "min", "logsumexp"),
        "A mask left nothing: leave such batches out, or divide the sum by the number of elements, at least 1.",
        _nothing,
    ),
    Row(
        "variance of one element",
        ("var", "std", "var_mean", "std_mean"),
        "Pass correction=0 (unbiased=False), or compute it over more than one element.",
        _one_element,
    ),
    Row(
        "log of a negative number",
        ("log", "log2", "log10"),
        f"Bound its input before it: log(x.clamp_min(1e-6)); {_CAUTION}.",
        _below(0.0),
        _with(0, _least),
    ),
    Row(
        "log of 0",
        _LOGS,
        "Add an epsilon inside, log(x + 1e-6), or clamp its input before it; of probabilities take log_softmax or "
        f"logsigmoid of the logits; {_CAUTION}.",
        _at(0.0),
        _with(0, _least),
    ),
    Row(
        "log1p of -1 or less",
        ("log1p",),
        f"Bound its input above -1 by what its dtype resolves (2**-8 in bfloat16), before it; {_CAUTION}.",
        lambda call: _at(-1.0)(call) or _below(-1.0)(call),
        _with(0, lambda x: x.clamp_min(-1 + torch.finfo(x.dtype).eps)),
    ),
    Row(
        "exp beyond its dtype",
        EXPONENTIALS,
        f"Bound its input, before it: exp(x.clamp(max=20)); {_CAUTION}.",
        _too_large,
        _with(0, _bounded),
    ),
    Row(
        "underflow of exp in a divisor",
        ("div",),
        "Subtract the maximum before exp, as softmax and logsumexp do, or divide in the logarithm.",
        _underflow_in_divisor,
        _with(1, _not_zero),
    ),
    Row(
        "0/0",
        ("div",),
        "An empty mask, or a row without a partner, divides 0 by 0: bound the divisor before it, sum / n.clamp_min(1), "
        f"or leave such rows out; {_CAUTION}.",
        _zero_by_zero,
        _with(1, _not_zero),
    ),
    Row(
        "division by 0",
        ("div", "floor_divide", "remainder", "fmod"),
        f"Bound the divisor away from 0 before it: x / y.clamp_min(1e-6); {_CAUTION}.",
        _divisor_zero,
        _with(1, _not_zero),
    ),
    Row(
        "reciprocal of 0",
        ("reciprocal", "rsqrt"),
        f"Add an epsilon to its input, inside: rsqrt(x + 1e-6); {_CAUTION}.",
        lambda call: _at(0.0)(call) or _below(0.0)(call),
        _with(0, _not_zero),
    ),
    Row(
        "root of a negative number",
        ("sqrt",),
        f"Bound its input before it: sqrt(x.clamp_min(1e-12)); {_CAUTION}.",
        _below(0.0),
        _with(0, _least),
    ),
    Row(
        "power of 0 or of a negative number",
        ("pow",),
        f"Bound its base away from 0 before it: x.clamp_min(1e-6) ** p; {_CAUTION}.",
        lambda call: _at(0.0)(call) or (_below(0.0)(call) if torch.isnan(call.result).any() else None),
        _with(0, _least),
    ),
    Row(
        "acos or asin beyond 1",
        ("acos", "asin", "arccos", "arcsin", "atanh"),
        "Bound its input before it, inside of 1: acos(x.clamp(-1 + 1e-6, 1 - 1e-6)); at 1 its derivative is infinite.",
        lambda call: _beyond_one(call) or (_at(1.0)(call) or _at(-1.0)(call) if call.op == "atanh" else None),
        _with(0, _inside),
    ),
    Row(
        "logit at 0 or 1",
        ("logit", "erfinv"),
        "Pass eps=, or bound its input before it by what its dtype resolves.",
        lambda call: _at(1.0)(call) or _at(0.0 if call.op == "logit" else -1.0)(call),
        _with(0, lambda x: x.clamp(torch.finfo(x.dtype).eps, 1 - torch.finfo(x.dtype).eps)),
    ),
    Row(
        "softmax over a row of -inf",
        ("softmax", "log_softmax", "logsumexp", "safe_softmax"),
        _MASKS,
        _masked_rows,
        _open_rows,
        dims=("row", "head", "query"),
    ),
    Row(
        "attention without a key",
        (
            "scaled_dot_product_attention",
            "scaled_dot_product_flash_attention_for_cpu",
            "scaled_dot_product_efficient_attention",
            "scaled_dot_product_cudnn_attention",
        ),
        _MASKS,
        _masked_attention,
        _open_mask,
        dims=("row", "head", "query"),
    ),
    Row(
        "softmax of infinity",
        ("softmax", "log_softmax", "logsumexp"),
        "Bound the logits before it; mask with -inf, not with inf.",
        _infinite_in_softmax,
        lambda args: [_filled(args[:1])[0], *args[1:]],
    ),
    Row(
        "inf - inf",
        ("sub", "add", "rsub"),
        "Fill infinite values before the op, masked_fill or where on its operand; nan_to_num behind it mends the value, not its "
        "gradient.",
        _infinite_difference,
        _filled,
    ),
    Row(
        "0 x inf",
        ("mul",),
        "Fill infinite values before the product (masked_fill or where on its operand); nan_to_num or a mask behind it "
        "mends the value, not its gradient.",
        _zero_times_infinity,
        _filled,
    ),
    Row(
        "beyond float16",
        _OVERFLOWING,
        "Compute it in float32 (x.float(), or autocast without float16 there), or use bfloat16, whose range is that of float32.",
        _beyond_float16,
        is_overflow=True,
    ),
    Row(
        "overflow",
        _OVERFLOWING,
        "Its operands are finite, and far too large: look at what made them grow (learning rate, inputs that are not "
        "standardized, a missing normalization).",
        _beyond_dtype,
        is_overflow=True,
    ),
)
