"""Non-finite results of an optimizer's step, with reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradrewrite._compat.optimizers import computes_in_dtype_of_parameters, inside_of, may_read_gradients
from gradrewrite._utils.formatting import listed
from gradrewrite.auditing.constants import least_eps, vanishes
from gradrewrite.diagnostics.causes import KINDS, Cause, words
from gradrewrite.diagnostics.judge import WIDE

_RATES = ("lr", "weight_decay", "momentum", "betas")  # an infinite one is never meant
_SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum", "exp_inf", "max_exp_avg_sq")
_USUAL_EPS = 1e-8
_SHOWN = 3  # rows, and tensors, in one text
_WIDER = "keep the parameters in float32 and compute under torch.autocast"

Part = Literal["param", "state", "buffer"]


@dataclass(frozen=True, slots=True)
class _Watched:
    """A tensor that an update may write."""

    part: Part
    name: str
    value: Tensor
    parameter: Tensor | None = None
    key: Any = None  # of the state
    may_be_infinite: bool = False

    @property
    def site(self) -> str:
        return f"{self.part}:{self.name}" if self.part != "state" else f"state:{self.name}.{self.key}"

    @property
    def text(self) -> str:
        return {"param": self.name, "state": f"{self.key} of {self.name}", "buffer": f"the buffer {self.name}"}[
            self.part
        ]


@dataclass(frozen=True, slots=True)
class _Bad:
    """A tensor with elements made non-finite by an update."""

    watched: _Watched
    mask: Tensor

    def rows(self, of: Tensor) -> str:
        return rows_text(self.mask & of)

    @property
    def is_of_large_gradients(self) -> bool:
        """Whether it is state in a wide dtype, infinite by the square of a gradient."""
        key, value = self.watched.key, self.watched.value
        return key in _SECOND_MOMENTS and torch.finfo(value.dtype).max > WIDE and not value.isnan().any()

    @property
    def extent(self) -> str:
        """The rows with NaN, and those with infinities."""
        value = _readable(self.watched.value)
        parts = [("NaN", value.isnan()), ("infinite", value.isinf())]
        return ", and ".join(f"{what}{self.rows(of)}" for what, of in parts if (self.mask & of).any())


def began_with(model: nn.Module) -> dict[str, str]:
    """Return the non-finite tensors of a model before training, in words, by name."""
    return {one.name: _began(one) for one in _held_by(model) if _is_real(one.value) and not _is_finite(one.value)}


class UpdateWatch:
    """The updates of one training, looked at before and after.

    Call ``before`` and ``after`` around each ``optimizer.step()``.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, measures: bool = False) -> None:
        """Take the model at the begin of a run: non-finite elements there are known.

        ``measures``: the norms that updates use.
        """
        self._model, self._optimizer, self._measures = model, inside_of(optimizer), measures
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._masks = {one.site: ~_flags(one.value) for one in self._watched() if not _is_finite(one.value)}
        self._is_finite = True  # gradients before the step
        self._given = math.nan  # their norm before the step
        self.norms: dict[int, float] = {}  # global norms of the gradients that were used, by step

    def before(self) -> None:
        """Look at the gradients that the step is given."""
        gradients = self._gradients()
        self._is_finite = all(map(_is_finite, gradients))
        self._given = _norm(gradients) if self._measures else math.nan

    def after(self, step: int) -> Cause | None:
        """Return the cause in an update with finite gradients and a non-finite result."""
        if self._measures:
            gradients = self._gradients()
            self.norms[step] = _norm(gradients) if gradients else self._given
        if not self._is_finite:
            return None
        bad = [found for one in self._watched() if (found := self._bad(one)) is not None]
        if all(one.is_of_large_gradients for one in bad):  # the training goes on to what makes them so large
            self._masks |= {one.watched.site: ~_flags(one.watched.value) for one in bad}
            return None
        return _cause(self._optimizer, bad, step)

    @property
    def may_clip(self) -> bool:
        """Whether hooks, or a ``step`` of its own, may change gradients."""
        return may_read_gradients(self._optimizer, self._optimizer.step)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [_dense(p.grad) for p in self._parameters() if p.grad is not None]

    def _watched(self) -> Iterator[_Watched]:
        """Parameters, their state, then buffers."""
        for one in _held_by(self._model):
            if one.part == "param":
                yield one
        is_own = type(self._optimizer).__module__.startswith("torch.optim")
        for number, parameter in enumerate(self._parameters()):
            name = self._names.get(id(parameter), f"parameter {number} of the optimizer")
            if id(parameter) not in self._names:
                yield _Watched("param", name, parameter.detach(), parameter)
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and (is_own or value.shape == parameter.shape):
                    is_moment = is_own or key in (*_SECOND_MOMENTS, "exp_avg", "momentum_buffer")
                    yield _Watched("state", name, value, parameter, key, not is_moment)
        yield from (one for one in _held_by(self._model) if one.part == "buffer")

    def _bad(self, one: _Watched) -> _Bad | None:
        if not _is_real(one.value) or _is_finite(one.value):
            return None
        value = _readable(one.value)
        mask = value.isnan() if one.may_be_infinite else ~value.isfinite()
        known = self._masks.get(one.site)
        if known is not None:
            mask = mask & ~known if known.shape == mask.shape else mask & False
        return _Bad(one, mask) if bool(mask.any()) else None


def _held_by(model: nn.Module) -> list[_Watched]:
    """Return parameters, then buffers; of lazy modules those that are there."""
    parameters = [(name, p) for name, p in model.named_parameters() if not is_lazy(p)]
    buffers = [(name, value) for name, value in model.named_buffers() if not is_lazy(value)]
    watched = [_Watched("param", name, p.detach(), p) for name, p in parameters]
    return [*watched, *(_Watched("buffer", name, value, may_be_infinite=True) for name, value in buffers)]


def _began(one: _Watched) -> str:
    kind = "parameter" if one.part == "param" else "buffer"
    value = _readable(one.value)
    parts = [("NaN", value.isnan()), ("infinite", value.isinf())]
    text = " and ".join(f"{what}{rows_text(of)}" for what, of in parts if of.any())
    return f"the {kind} {one.name} was {text} when the run began"


def _cause(optimizer: torch.optim.Optimizer, bad: Sequence[_Bad], step: int) -> Cause:
    first, name = bad[0], type(optimizer).__name__
    reason = _reason(optimizer, bad)
    why, advice = reason.text, reason.advice
    others = [one.watched.text for one in bad[1:] if one.watched.part != "state"]
    also = f", also {listed(others, _SHOWN)}" if others else ""
    made = f"step() made {first.watched.text}"
    if first.watched.part == "buffer":
        made = f"the forward or step() left something behind: {first.watched.text} is"
        advice = "Look at what writes this buffer (running statistics, an average); it is read in evaluation."
    text = f"step {step}: every gradient was finite; {made} {first.extent}{also}{f': {why}' if why else ''}."
    figures = {"elements": float(first.mask.sum()), "of": float(first.mask.numel())}
    figures |= {} if reason.beyond is None else {"limit": torch.finfo(reason.beyond).max}
    figures |= {} if reason.eps is None else {"suggested_eps": reason.eps}
    advice = advice or f"Look at what the step of {name} divides by, at its settings and at its state there."
    return Cause("update", first.watched.site, step=step, text=text, advice=advice, figures=figures)


@dataclass(frozen=True, slots=True)
class _Reason:
    """The reason of a non-finite result, with the advice."""

    text: str = ""
    advice: str = ""
    beyond: torch.dtype | None = None  # whose range is exceeded
    eps: float | None = None  # that is advised


def _reason(optimizer: torch.optim.Optimizer, bad: Sequence[_Bad]) -> _Reason:
    """Return the reason; an empty one if it is not known."""
    looks = (_faulty_setting, _lost_eps, _overflown_state, _overflown_parameter)
    written = [one for one in bad if one.watched.part != "buffer"]
    found = (look(optimizer, one) for look in looks for one in written)
    return next((one for one in found if one is not None), _Reason())


def _group_of(optimizer: torch.optim.Optimizer, one: _Bad) -> tuple[int, Mapping[str, Any]]:
    groups = enumerate(optimizer.param_groups)
    found = [(n, group) for n, group in groups if any(p is one.watched.parameter for p in group["params"])]
    return found[0] if found else (0, {})


def _faulty_setting(optimizer: torch.optim.Optimizer, one: _Bad) -> _Reason | None:
    number, group = _group_of(optimizer, one)
    for key, value in group.items():
        numbers = value if isinstance(value, tuple) else (value,)
        for found in numbers:
            is_number = isinstance(found, float) or (isinstance(found, Tensor) and found.numel() == 1)
            if key == "params" or not is_number:
                continue
            if math.isnan(float(found)) or (key in _RATES and math.isinf(float(found))):
                advice = KINDS["faulty learning rate"].advice if key == "lr" else f"Set {key} of {_name(optimizer)}."
                return _Reason(f"{key} of param group {number} is {words(float(found))}", advice)
    return None


def _lost_eps(optimizer: torch.optim.Optimizer, one: _Bad) -> _Reason | None:
    """An eps of 0 beside a second moment of 0."""
    _, group = _group_of(optimizer, one)
    eps, parameter = group.get("eps"), one.watched.parameter
    if not isinstance(eps, float) or parameter is None:
        return None
    is_lost = vanishes(eps, parameter.dtype) and computes_in_dtype_of_parameters(optimizer, group)
    moments = {key: optimizer.state.get(parameter, {}).get(key) for key in _SECOND_MOMENTS}
    own = {key: v for key, v in moments.items() if isinstance(v, Tensor) and v.shape == one.mask.shape}
    zero = [key for key, v in own.items() if ((v == 0) & one.mask).any()]
    if not zero or not (is_lost or eps == 0):
        return None
    dtype = str(parameter.dtype).removeprefix("torch.")
    what = f"eps {eps:g} is 0 in {dtype}" if is_lost else "eps is 0"
    least = max(_USUAL_EPS, least_eps(parameter.dtype))
    text = f"{what}, and so is {zero[0]} there: step() divides by 0"
    return _Reason(text, f"Use {_name(optimizer)}(..., eps={least:g}), or {_WIDER}.", eps=least)


def _overflown_state(optimizer: torch.optim.Optimizer, one: _Bad) -> _Reason | None:
    """A gradient, or its square, beyond the dtype of the state."""
    key, parameter = one.watched.key, one.watched.parameter
    if key is None or parameter is None or parameter.grad is None:
        return None
    largest, dtype = _largest(_dense(parameter.grad)), one.watched.value.dtype
    if key in _SECOND_MOMENTS and largest > math.sqrt(torch.finfo(dtype).max):
        return _beyond(dtype, f"the square of a gradient of {words(largest)}", ", and these elements stop to move")
    if key == "momentum_buffer" and not one.watched.value.isnan().any():
        return _beyond(dtype, f"{key}, a sum of gradients of up to {words(largest)},")
    return None


def _overflown_parameter(optimizer: torch.optim.Optimizer, one: _Bad) -> _Reason | None:
    """An update of gradients, or of a momentum, beyond the dtype of the parameter."""
    parameter, (_, group) = one.watched.parameter, _group_of(optimizer, one)
    if one.watched.part != "param" or parameter is None or parameter.grad is None or not group.get("lr"):
        return None
    moved = [_dense(parameter.grad), optimizer.state.get(parameter, {}).get("momentum_buffer")]
    most = max(_largest(value) for value in moved if isinstance(value, Tensor))
    rate = abs(float(group["lr"]))
    if rate * most + _largest(parameter) <= torch.finfo(parameter.dtype).max / 2:
        return None
    return _beyond(
        parameter.dtype, f"an update of lr={words(rate)} times {words(most)}", change="Lower the learning rate"
    )


def _name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def _beyond(dtype: torch.dtype, what: str, so: str = "", *, change: str = "Use bfloat16") -> _Reason:
    """Return the reason of an overflow."""
    largest = torch.finfo(dtype).max
    ends = words(largest) if largest > WIDE else f"{largest:,.0f}"
    text = f"{what} is beyond {str(dtype).removeprefix('torch.')}, which ends at {ends}{so}"
    advice = f"{change}, or {_WIDER}."
    if largest > WIDE:
        advice = "Look at what makes the gradients so large, and lower the learning rate."
    return _Reason(text, advice, dtype)


def _is_real(value: Tensor) -> bool:
    return (value.is_floating_point() or value.is_complex()) and not value.is_sparse


def _flags(value: Tensor) -> Tensor:
    return _readable(value).isfinite()


def _readable(value: Tensor) -> Tensor:
    """Return a tensor; one of a dtype of one byte widened."""
    return value.float() if value.dtype.itemsize == 1 else value


def _is_finite(value: Tensor) -> bool:
    return not _is_real(value) or bool(_flags(value).all())


def _dense(gradient: Tensor) -> Tensor:
    """Return the values of a gradient."""
    found = gradient.detach()
    return found.coalesce().values() if found.is_sparse else found


def _norm(gradients: Sequence[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(g, dtype=_wide(g.dtype))) for g in gradients))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _largest(value: Tensor) -> float:
    """The largest finite absolute value; 0 without any."""
    finite = value.detach()[_flags(value)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def rows_text(mask: Tensor) -> str:
    """Return `` in rows 3, 8 and 11, and 7 more``; of a vector its elements, ``""`` of a number."""
    if mask.dim() == 0:
        return ""
    rows: list[int] = mask.reshape(mask.shape[0], -1).any(1).nonzero().flatten().tolist()
    noun, before = ("row", "in") if mask.dim() > 1 else ("element", "at")
    if len(rows) == mask.shape[0] > 1:
        return f" in all {len(rows)} {noun}s"
    shown, more = [str(row) for row in rows[:_SHOWN]], len(rows) - _SHOWN
    named = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f" {before} {noun}{'s' * (len(rows) > 1)} {named}{f', and {more} more' if more > 0 else ''}"
