"""The table of reasons of non-finite values, with advice and repairs."""

from __future__ import annotations

import torch

from gradrewrite._utils.tensors import computable
from gradrewrite.replay import operand_checks as checks
from gradrewrite.replay import repairs
from gradrewrite.replay.reasons import OpCall, Reason, Row

_GROWN = 0.25  # power of the largest number of a dtype

EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh")

_LOGS = ("log", "log2", "log10")

_OVERFLOWING = (
    *checks.SUMS,
    "mul", "add", "sub", "div", "pow", "square", "cumsum", "cumprod", "to_copy", "convolution", "mse_loss",
    "convert_element_type", "var", "neg", "einsum", "layer_norm", "native_layer_norm", "reciprocal", "baddbmm",
)  # fmt: skip

_CAUTION = "a where, clamp, min or mask on its result hides the value, not its gradient"

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
        "Add the epsilon inside of the root, sqrt(x + 1e-12), (x + 1e-12) ** p: its derivative at 0 is infinite, and "
        "an epsilon behind the root does not help; nor does a where behind it.",
        checks.derivative_at_zero,
        repairs.kink_moved,
        of=_ROOTS,
    ),
    Row(
        "acos or asin at 1",
        ("rsqrt", "div", "pow", ""),
        "Bound its input before it, inside of 1: acos(x.clamp(-1 + 1e-6, 1 - 1e-6)), with what its dtype "
        "resolves there; "
        "or take atan2. At 1 its derivative is infinite.",
        checks.derivative_at_one,
        repairs.kink_moved,
        of=("acos", "asin", "arccos", "arcsin", "acos_", "asin_"),
    ),
    Row(
        "log at 0, hidden",
        ("div", ""),
        "Fill its input before the log, log(where(mask, x, 1)): a where or a clamp behind it hides the value, not its "
        "gradient.",
        checks.derivative_at_zero,
        repairs.kink_moved,
        of=("log", "log2", "log10", "log1p", "xlogy"),
    ),
    Row(
        "division by 0, hidden",
        ("div", "reciprocal", ""),
        "Fill the divisor before the division, x / where(mask, y, 1): a where or a clamp behind it hides the "
        "value, not "
        "its gradient.",
        checks.derivative_at_zero,
        repairs.kink_moved,
        of=("truediv", "div", "true_divide", "divide", "reciprocal", "rtruediv"),
    ),
    Row(
        "equal eigenvalues",
        ("div", "reciprocal"),
        "The derivative of eigenvectors and of singular vectors divides by the differences of the values: add a small "
        "diagonal with different entries before it, leave such examples out, or compute from the values alone "
        "(eigvalsh, svdvals).",
        checks.divisor_zero,
        repairs.changed(1, repairs.not_zero),
        of=("linalg_eigh", "linalg_svd", "linalg_eig", "svd", "eigh", "eig"),
        operands=(1,),
    ),
    Row(
        "logarithm of a determinant of 0",
        ("linalg_slogdet", "logdet", "slogdet"),
        "Make the matrix regular before it: a + 1e-6 * torch.eye(n), of a covariance by its Cholesky factor.",
        checks.singular,
        repairs.changed(0, repairs.regular),
    ),
    Row(
        "ctc_loss of a target longer than its input",
        ("ctc_loss",),
        "Pass zero_infinity=True (such examples then add nothing), or leave out examples with fewer frames than labels "
        "and repeats.",
        checks.too_long,
        lambda args: [*args[:-1], True],
        dims=("row",),
    ),
    Row(
        "cross-entropy without targets",
        (
            *("nll_loss_forward", "nll_loss2d_forward", "cross_entropy", "nll_loss", "cross_entropy_loss"),
            *("nll_loss_backward", "nll_loss2d_backward"),
        ),
        "Leave such batches out, or divide the sum by the number of targets (of class weights by their sum), at least "
        '1: reduction="sum", then / (target != ignore_index).sum().clamp_min(1).',
        checks.no_targets,
        repairs.summed,
    ),
    Row(
        "mean of nothing",
        ("mean", "var", "std", "var_mean", "std_mean", "amax", "amin", "max", "min", "logsumexp"),
        "A mask left nothing: leave such batches out, or divide the sum by the number of elements, at least 1.",
        checks.no_elements,
        repairs.of_one,
    ),
    Row(
        "variance of one element",
        ("var", "std", "var_mean", "std_mean"),
        "Pass correction=0 (unbiased=False), or compute it over more than one element.",
        checks.one_element,
    ),
    Row(
        "log of a negative number",
        ("log", "log2", "log10"),
        f"Bound its input before it: log(x.clamp_min(1e-6)); {_CAUTION}.",
        checks.below(0.0),
        repairs.changed(0, repairs.least),
    ),
    Row(
        "log of 0",
        _LOGS,
        "Add an epsilon inside, log(x + 1e-6), or clamp its input before it; of probabilities take log_softmax or "
        f"logsigmoid of the logits; {_CAUTION}.",
        checks.at_value(0.0),
        repairs.changed(0, repairs.least),
    ),
    Row(
        "x log y at y = 0",
        ("xlogy",),
        f"Bound y before it: y.clamp_min(1e-6), of a Beta distribution y.clamp(1e-6, 1 - 1e-6); {_CAUTION}.",
        checks.log_factor,
        repairs.changed(1, repairs.least),
        operands=(1,),
    ),
    Row(
        "gamma function at a pole",
        ("lgamma", "digamma"),
        f"Keep its input above 0, before it: softplus(x) + 1e-6; {_CAUTION}.",
        checks.at_pole,
        repairs.changed(0, repairs.least),
    ),
    Row(
        "log1p of -1 or less",
        ("log1p",),
        f"Bound its input above -1 by what its dtype resolves (2**-8 in bfloat16), before it; {_CAUTION}.",
        lambda call: checks.at_value(-1.0)(call) or checks.below(-1.0)(call),
        repairs.changed(0, lambda x: x.clamp_min(-1 + torch.finfo(x.dtype).eps)),
    ),
    Row(
        "exp beyond its dtype",
        EXPONENTIALS,
        f"Bound its input, before it: exp(x.clamp(max=20)); {_CAUTION}.",
        checks.too_large,
        repairs.changed(0, repairs.bounded),
        is_too_large=True,
    ),
    Row(
        "underflow of exp in a divisor",
        ("div",),
        "Subtract the maximum before exp, as softmax and logsumexp do, or divide in the logarithm.",
        checks.underflow_in_divisor,
        repairs.changed(1, repairs.not_zero),
        operands=(1,),
    ),
    Row(
        "0/0 of a norm",
        ("div",),
        "A vector of zeros has no direction: take F.normalize(x, dim=-1) or F.cosine_similarity, or bound the divisor "
        f"before it, x / norm.clamp_min(1e-6); {_CAUTION}.",
        checks.zero_by_zero_of("linalg_vector_norm", "norm", "linalg_norm"),
        repairs.changed(1, repairs.not_zero),
        operands=(1,),
    ),
    Row(
        "0/0 of a root",
        ("div",),
        "Add the epsilon inside of the root, x / (x.square().sum(-1, keepdim=True) + 1e-12).sqrt(): at 0 its "
        "derivative is infinite, and an epsilon or a clamp behind it mends the value, not the gradient.",
        checks.zero_by_zero_of("sqrt"),
        repairs.changed(1, repairs.not_zero),
        operands=(1,),
    ),
    Row(
        "0/0 of a standard deviation",
        ("div",),
        "All values of such a group are the same: add an epsilon to the divisor, (x - mean) / (std + 1e-4), or leave "
        "such groups out.",
        checks.zero_by_zero_of("std", "var", "std_mean", "var_mean"),
        repairs.changed(1, repairs.not_zero),
        operands=(1,),
    ),
    Row(
        "0/0",
        ("div",),
        "An empty mask, or a row without a partner, divides 0 by 0: bound the divisor before it, sum / n.clamp_min(1) "
        f"of a number of elements, else x / (y + 1e-6), or leave such rows out; {_CAUTION}.",
        checks.zero_by_zero,
        repairs.changed(1, repairs.not_zero),
        operands=(1,),
    ),
    Row(
        "division by 0",
        ("div", "floor_divide", "remainder", "fmod"),
        f"Bound the divisor away from 0 before it: x / y.clamp_min(1e-6); {_CAUTION}.",
        checks.divisor_zero,
        repairs.changed(1, repairs.not_zero),
        operands=(1,),
    ),
    Row(
        "reciprocal of 0",
        ("reciprocal",),
        f"Bound the divisor away from 0 before it: 1 / y.clamp_min(1e-6); {_CAUTION}.",
        checks.at_value(0.0),
        repairs.changed(0, repairs.not_zero),
    ),
    Row(
        "reciprocal root of 0",
        ("rsqrt",),
        f"Add an epsilon inside of the root: rsqrt(x + 1e-6); {_CAUTION}.",
        lambda call: checks.at_value(0.0)(call) or checks.below(0.0)(call),
        repairs.changed(0, repairs.not_zero),
    ),
    Row(
        "root of a negative number",
        ("sqrt",),
        f"Bound its input before it: sqrt(x.clamp_min(1e-12)); {_CAUTION}.",
        checks.below(0.0),
        repairs.changed(0, repairs.least),
    ),
    Row(
        "power of 0 or of a negative number",
        ("pow",),
        f"Bound its base away from 0 before it: x.clamp_min(1e-6) ** p; {_CAUTION}.",
        lambda call: (
            checks.at_value(0.0)(call) or (checks.below(0.0)(call) if torch.isnan(call.result).any() else None)
        ),
        repairs.changed(0, repairs.least),
    ),
    Row(
        "acos or asin beyond 1",
        ("acos", "asin", "arccos", "arcsin"),
        "Bound its input before it, inside of 1: acos(x.clamp(-1 + 1e-6, 1 - 1e-6)); at 1 its derivative is infinite.",
        checks.beyond_one,
        repairs.changed(0, repairs.inside),
    ),
    Row(
        "atanh at 1 or beyond",
        ("atanh",),
        "Bound its input before it, atanh(x.clamp(-1 + 1e-6, 1 - 1e-6)), by what its dtype resolves; of an action keep "
        "the value before its tanh.",
        lambda call: checks.beyond_one(call) or checks.at_value(1.0)(call) or checks.at_value(-1.0)(call),
        repairs.changed(0, repairs.inside),
    ),
    Row(
        "logit at 0 or 1",
        ("logit", "erfinv"),
        "Pass eps=, or bound its input before it by what its dtype resolves.",
        lambda call: checks.at_bounds(0.0 if call.op == "logit" else -1.0, 1.0)(call),
        repairs.changed(0, lambda x: x.clamp(torch.finfo(x.dtype).eps, 1 - torch.finfo(x.dtype).eps)),
    ),
    Row(
        "softmax over a row of -inf",
        ("softmax", "log_softmax", "logsumexp", "safe_softmax"),
        _MASKS,
        checks.masked_rows,
        repairs.open_rows,
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
        checks.masked_attention,
        repairs.open_mask,
        dims=("row", "head", "query"),
    ),
    Row(
        "softmax of infinity",
        ("softmax", "log_softmax", "logsumexp"),
        "Bound the logits before it; mask with -inf, not with inf.",
        checks.infinite_in_softmax,
        lambda args: [repairs.filled(args[:1])[0], *args[1:]],
    ),
    Row(
        "inf - inf",
        ("sub", "add", "rsub"),
        "Fill infinite values before the op, masked_fill or where on its operand; nan_to_num behind it mends "
        "the value, not its "
        "gradient.",
        checks.infinite_difference,
        repairs.filled,
        operands=(0, 1),
    ),
    Row(
        "0 x inf",
        ("mul",),
        "Fill infinite values before the product (masked_fill or where on its operand); nan_to_num or a mask behind it "
        "mends the value, not its gradient.",
        checks.zero_times_infinity,
        repairs.filled,
        operands=(0, 1),
    ),
    Row(
        "beyond float16",
        _OVERFLOWING,
        "Compute it in float32 (x.float(), or autocast without float16 there), or use bfloat16, whose range "
        "is that of float32.",
        checks.beyond_float16,
        repairs.widened,
        is_overflow=True,
    ),
    Row(
        "overflow",
        _OVERFLOWING,
        "Its operands are finite, and far too large: look at what made them grow (learning rate, inputs that are not "
        "standardized, a missing normalization).",
        checks.beyond_dtype,
        is_overflow=True,
    ),
)


def reason_of(call: OpCall) -> Reason | None:
    """Return why an op made a non-finite value; None if the table does not know."""
    return next((found for row in TABLE if (found := row.reason(call)) is not None), None)


def growth_of(call: OpCall) -> Reason | None:
    """Return the reason of an exponential with a very large result."""
    result = computable(call.result)
    if call.op not in EXPONENTIALS or not result.numel() or not result.is_floating_point():
        return None
    where = torch.isfinite(result) & (result.abs() > torch.finfo(result.dtype).max ** _GROWN)
    if not where.any():
        return None
    x = call.operand(0)
    given, made = (checks.extreme(value.abs(), where, high=True) for value in (x, result))
    row = next(row for row in TABLE if row.find is checks.too_large)
    why = f"{call.op} of up to {given} is {made}"
    return Reason(why, row.advice, where, None, row.repair, is_too_large=True)
