"""Faults of an optimizer: missing parameters, settings against training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradrewrite._compat.optimizers import computes_in_dtype_of_parameters, inside_of
from gradrewrite._utils.formatting import listed
from gradrewrite.auditing.constants import least_eps, vanishes
from gradrewrite.diagnostics.causes import Cause

_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class _Audited:
    """A model, its optimizer, and its gradients."""

    optimizer: torch.optim.Optimizer
    model: nn.Module
    with_gradient: Collection[str]
    steps: Sequence[Mapping[str, Tensor]]
    named: Mapping[str, nn.Parameter]  # of the model, by first names
    names: Mapping[int, str]  # by id() of the parameter

    def groups(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        yield from enumerate(self.optimizer.param_groups)

    def held(self) -> list[Tensor]:
        return [p for _, group in self.groups() for p in group["params"]]

    def names_in(self, group: Mapping[str, Any]) -> list[str]:
        """Names of the model's parameters in a group, each once."""
        return list(dict.fromkeys(self.names[id(p)] for p in group["params"] if id(p) in self.names))

    def trained_in(self, group: Mapping[str, Any]) -> list[str]:
        return [name for name in self.names_in(group) if self.named[name].requires_grad]


def optimizer_causes(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    with_gradient: Collection[str],
    steps: Sequence[Mapping[str, Tensor]] = (),
) -> tuple[list[Cause], list[str]]:
    """Return the faults of an optimizer, and remarks.

    Args:
        optimizer: One that is to train ``model``; it is read only.
        model: Its parameters go by their first names in ``model.named_parameters()``.
        with_gradient: Names of the parameters that get a gradient.
        steps: Gradients by name, of steps that ran; without them no row counts as masked.
    """
    named = dict(model.named_parameters())
    names = {id(p): name for name, p in named.items()}
    audited = _Audited(inside_of(optimizer), model, with_gradient, steps, named, names)
    missing, remarks = _missing(audited)
    causes = [*missing, *_twice(audited), *_empty_groups(audited)]
    for found, told in (_zero_rates(audited), _decayed_masks(audited)):
        causes += found
        remarks += told
    return [*causes, *_vanishing_eps(audited)], [*remarks, *_idle(audited)]


def _missing(audited: _Audited) -> tuple[list[Cause], list[str]]:
    """Return missing parameters as faults, tensors from elsewhere as remarks."""
    held = {id(p) for p in audited.held()}
    others = [p for p in audited.held() if id(p) not in audited.names]
    missing = {
        name: p
        for name, p in audited.named.items()
        if p.requires_grad and name in audited.with_gradient and id(p) not in held
    }
    masters = _matched({name: p for name, p in missing.items() if p.dtype.itemsize < 4}, _wide(others))
    remarks = []
    if masters:
        remarks.append(
            f"The optimizer holds float32 tensors in the shapes of {_listed(masters)}: they are taken for master "
            "weights; copy them back into the parameters after each update."
        )
    elif others and (not missing or len(_matched(missing, others)) < len(missing)):
        remarks.append(f"The optimizer holds {_count(others, 'tensor')} ({_shapes(others)}) from outside of the model.")
    missing = {name: p for name, p in missing.items() if name not in masters}
    return ([_missing_cause(audited, missing, others)] if missing else []), remarks


def _missing_cause(audited: _Audited, missing: Mapping[str, Tensor], others: Sequence[Tensor]) -> Cause:
    site = f"gradient:{next(iter(missing))}"
    text = f"{_count(missing, 'parameter')} with a gradient "
    text += f"{_is_are(missing)} not in the optimizer and never changed: {_listed(missing)}."
    if len(_matched(missing, others)) < len(missing):
        advice = f'Add {_them(missing)}: optimizer.add_param_group({{"params": [...]}}), or freeze {_them(missing)}: '
        return Cause("not in the optimizer", site, text=text, advice=f"{advice}parameter.requires_grad_(False).")
    text += (
        f" The optimizer holds {_count(others, 'tensor')} ({_shapes(others)}) that the model no longer has: parameters "
        "were replaced after it was made."
    )
    name = type(audited.optimizer).__name__
    advice = f"Make the optimizer after the last change of the model: optimizer = {name}(model.parameters(), ...)."
    return Cause("not in the optimizer", site, text=text, advice=advice)


def _matched(missing: Mapping[str, Tensor], others: Sequence[Tensor]) -> list[str]:
    """Return the parameters with an equal shape among other tensors."""
    left = Counter(tuple(p.shape) for p in others)
    names = []
    for name, parameter in missing.items():
        if left[tuple(parameter.shape)] > 0:
            left[tuple(parameter.shape)] -= 1
            names.append(name)
    return names


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [p for p in tensors if p.dtype == torch.float32]


def _twice(audited: _Audited) -> Iterator[Cause]:
    counts = Counter(id(p) for p in audited.held())
    names = [audited.names[key] for key, count in counts.items() if count > 1 and key in audited.names]
    if names:
        yield Cause(
            "optimizer setting",
            f"gradient:{names[0]}",
            text=f"{_count(names, 'parameter')} {_is_are(names)} in the optimizer more than once: {_listed(names)}. "
            f"Each update moves {_them(names)} once per entry.",
            advice="Pass each once: list({id(p): p for p in parameters}.values()).",
        )


def _empty_groups(audited: _Audited) -> Iterator[Cause]:
    for number, group in audited.groups():
        if not group["params"]:
            yield Cause(
                "optimizer setting",
                "",
                text=f"Param group {number} holds no parameter: a filter matched nothing.",
                advice="Compare the filter with the names in dict(model.named_parameters()), or leave the group out.",
            )


def _zero_rates(audited: _Audited) -> tuple[list[Cause], list[str]]:
    causes, remarks = [], []
    for number, group in audited.groups():
        names, rate = audited.trained_in(group), group.get("lr")
        if rate is None or not names or rate != 0:
            continue
        text = f"The learning rate of param group {number} is 0: no update moves {_listed(names)}"
        if "initial_lr" in group or isinstance(rate, Tensor):
            remarks.append(f"{text}, as long as {'no scheduler' if 'initial_lr' in group else 'nothing'} changes it.")
            continue
        advice = f"Set it, optimizer.param_groups[{number}]['lr'] = 1e-3, or freeze them with requires_grad_(False)."
        causes.append(Cause("optimizer setting", f"gradient:{names[0]}", text=f"{text}.", advice=advice))
    return causes, remarks


def _decayed_masks(audited: _Audited) -> tuple[list[Cause], list[str]]:
    """Rows frozen by a hook or ``padding_idx``, moved by weight decay."""
    causes, remarks = [], []
    for number, group in audited.groups():
        decay: Any = group.get("weight_decay")
        for name in audited.trained_in(group) if decay else ():
            rows, reason, is_sure = _frozen_rows(audited, name)
            if not rows:
                continue
            text = (
                f"{_rows(rows)} of {name} (of {len(audited.named[name])}) got no gradient in "
                f"{_count(audited.steps, 'step')}, and it has {reason}; weight_decay={float(decay):g} of param group "
                f"{number} moves {_them(rows)} all the same"
            )
            if not is_sure:
                remarks.append(f"{text}, if the hook is what freezes them.")
                continue
            advice = 'Put it into a param group of its own with weight_decay=0: {"params": [...], "weight_decay": 0.0}.'
            causes.append(Cause("optimizer setting", f"gradient:{name}", text=f"{text}.", advice=advice))
    return causes, remarks


def _frozen_rows(audited: _Audited, name: str) -> tuple[list[int], str, bool]:
    """Return frozen rows, the reason, and whether it is sure."""
    parameter, users = audited.named[name], _users(audited.model, audited.named[name])
    still = _rows_without_gradient(parameter, [step[name] for step in audited.steps if name in step])
    paddings = {m.padding_idx for m in users if isinstance(m, nn.Embedding | nn.EmbeddingBag)} - {None}
    if parameter._backward_hooks and (rows := [row for row in still if row not in paddings]):
        is_lookup = all(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in users)  # unseen rows have none as well
        return rows, "a gradient hook", not is_lookup
    return [row for row in still if row in paddings], "padding_idx", True


def _users(model: nn.Module, parameter: Tensor) -> list[nn.Module]:
    return [m for m in model.modules() if any(p is parameter for p in m._parameters.values())]


def _rows_without_gradient(parameter: Tensor, gradients: Sequence[Tensor]) -> list[int]:
    """Return the nonzero rows without a gradient, if others have one."""
    if parameter.dim() == 0 or not gradients:
        return []
    dense = [g.detach().to_dense() if g.is_sparse else g.detach() for g in gradients]
    is_moved = torch.stack([_nonzero_rows(g) for g in dense]).any(0)
    if not is_moved.any():
        return []
    found: list[int] = (~is_moved & _nonzero_rows(parameter.detach())).nonzero().flatten().tolist()
    return found


def _nonzero_rows(values: Tensor) -> Tensor:
    return (values != 0).reshape(values.shape[0], -1).any(1)


def _vanishing_eps(audited: _Audited) -> Iterator[Cause]:
    name = type(audited.optimizer).__name__
    for (eps, dtype), names in _lost_eps(audited).items():
        what = str(dtype).removeprefix("torch.")
        yield Cause(
            "constant vanishes",
            f"gradient:{names[0]}",
            text=f"eps={eps:g} of {name} is 0 in {what}, the dtype of {_listed(names)}: a gradient whose square is 0 "
            "is divided by 0.",
            advice=f"Use {name}(..., eps={least_eps(dtype):g}), or keep the parameters in float32 and compute under "
            "torch.autocast.",
        )


def _lost_eps(audited: _Audited) -> dict[tuple[float, torch.dtype], list[str]]:
    """Return parameters by lost eps and dtype."""
    lost: dict[tuple[float, torch.dtype], list[str]] = {}
    for _, group in audited.groups():
        eps: Any = group.get("eps")
        if not isinstance(eps, float) or not computes_in_dtype_of_parameters(audited.optimizer, group):
            continue
        for name in audited.trained_in(group):
            dtype = audited.named[name].dtype
            if vanishes(eps, dtype):
                lost.setdefault((eps, dtype), []).append(name)
    return lost


def _idle(audited: _Audited) -> Iterator[str]:
    held = [name for _, group in audited.groups() for name in audited.names_in(group)]
    frozen = [name for name in held if not audited.named[name].requires_grad]
    if frozen:
        yield f"The optimizer holds {_count(frozen, 'frozen parameter')}: {_listed(frozen)}."


def _listed(names: Collection[str]) -> str:
    return listed(list(names), _MOST_NAMES)


def _rows(rows: Sequence[int]) -> str:
    return f"Row{'s' * (len(rows) > 1)} {_listed([str(row) for row in rows])}"


def _shapes(tensors: Sequence[Tensor]) -> str:
    counts = Counter(str(list(p.shape)) for p in tensors)
    return _listed([shape if count == 1 else f"{shape} x {count}" for shape, count in counts.items()])


def _count(found: Collection[Any], noun: str) -> str:
    return f"{len(found)} {noun}{'s' * (len(found) != 1)}"


def _is_are(found: Collection[Any]) -> str:
    return "is" if len(found) == 1 else "are"


def _them(found: Collection[Any]) -> str:
    return "it" if len(found) == 1 else "them"
