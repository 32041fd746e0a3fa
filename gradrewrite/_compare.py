"""``compare``: the first difference between two models in one forward and backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradrewrite._locate import run_once, sum_of_outputs
from gradrewrite._utils.formatting import nearest
from gradrewrite.backends.model_state import state_of
from gradrewrite.diagnostics.first_difference import Difference, DifferenceKind, SiteDifference, merged_order
from gradrewrite.diagnostics.run_log import as_executed
from gradrewrite.ir.outputs import SiteOp
from gradrewrite.numerics.statistics import words_of
from gradrewrite.passes import Keep
from gradrewrite.policy.rules import leave_out_unsupported
from gradrewrite.sites import Site


def compare(
    a: nn.Module, b: nn.Module, /, *args: Any, names: Mapping[str, str] | None = None, **kwargs: Any
) -> Difference | None:
    """Run two models once, and find their first difference.

    Both run forward and backward, op by op, from the same random state, on the same inputs. Compared are the values of
    all ops and module outputs, their errors, and the gradients of parameters and inputs, in this order, by their names.
    Tensors of one dtype must have equal bits; those of two dtypes equal values. The loss of each is ``.loss`` of its
    output, or its output if that is one number, or else the sum of its differentiable outputs. Values that only one
    model has, as those of ops that the other spells otherwise, are not compared; a gradient that only one has is a
    difference.

    Both models, their gradients and buffers, the inputs and torch's random state stay as they were, bit for bit.
    The values of all sites of both models are in memory at once.

    Args:
        a: A plain module.
        b: Another, or the same one. What was compiled with ``nn.Module.compile`` runs op by op too.
        *args: Inputs of both.
        names: Names of modules, parameters or values of ``a``, each with its name in ``b``; what is inside of a
            module follows: ``{"encoder": "backbone.encoder"}``. ``""`` stands for the whole model.
        **kwargs: Inputs of both.

    Returns:
        The first difference with its relative L1 error ``sum |x - y| / sum |y|`` (x of ``a``), and how far it grew:
        print it, or ``render`` it as a page. ``difference.beyond(1e-2)`` is the first of more than that. None if
        nothing differs.

    Raises:
        GraphBreakError: The tracer cannot see a whole model.
        TraceError: Nothing needs a gradient.
        TypeError: A model is no module, or rewritten already.
        ValueError: A name in ``names`` is none of a site, or the models have no site in common.

    Example:
        >>> import copy
        >>> a = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> b = copy.deepcopy(a)
        >>> with torch.no_grad():
        ...     b[1].weight[0, 0] += 1
        >>> compare(a, b, torch.ones(1, 2)).site
        'activation:1'
    """
    for model in (a, b):
        if not isinstance(model, nn.Module):
            raise TypeError(f"gr.compare takes two nn.Modules, got {type(model).__name__}")
        if state_of(model) is not None:
            raise TypeError("gr.compare takes plain models, and one is rewritten; give model.original or gr.restore it")
    values_a, values_b = (_values(model, args, kwargs) for model in (a, b))
    inside = dict(names or {})
    _check_names(inside, values_a, values_b)
    partner = {text: _renamed(text, inside) for text in values_a}
    back = {other: own for own, other in partner.items()}
    only_b = {f"{text} ": text for text in values_b if text not in back}  # no name of a site ends in a blank
    in_b = [back.get(text) or f"{text} " for text in as_executed(values_b)]
    rows = []
    for text in merged_order(as_executed(values_a), in_b):
        x, y = values_a.get(text), values_b.get(only_b.get(text) or partner[text])
        if x is not None and y is not None:
            rows.append(_row(x, y))
        elif text.startswith(("gradient:", "input:")):
            rows.append(_lone(x, y))
    if all(row.kind == "missing" for row in rows):
        raise ValueError("gr.compare: the models have no site in common; say with names={...} which belong together")
    first = next((n for n, row in enumerate(rows) if row.kind), None)
    return None if first is None else Difference(tuple(rows[first:]))


def _values(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, tuple[Site, Tensor]]:
    """Return the values of a model at all sites, by their texts."""

    @leave_out_unsupported
    def keep(site: Site) -> Keep | None:
        return None if site.traits.at_guard or site.traits.needs_kind else Keep()

    monitor = run_once(model, keep, args, kwargs, _loss)
    return {str(site): (site, tensor) for site, tensor in monitor.kept().items()}


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    return sum_of_outputs(output, "gr.compare")


def _renamed(text: str, inside: Mapping[str, str]) -> str:
    """Rename a site of the first model; the longest prefix counts."""
    kind, _, name = text.partition(":")
    for old in sorted(inside, key=len, reverse=True):
        if _begins(name, old):
            dot = "" if old or name.startswith("/") else "."
            return f"{kind}:{f'{inside[old]}{dot}{name[len(old) :]}'.lstrip('.')}"
    return text


def _begins(name: str, module: str) -> bool:
    """Whether a name is a module's or inside of it; all are inside of ``""``."""
    return not module or name == module or name.startswith((f"{module}.", f"{module}/", f"{module}#"))


def _check_names(inside: Mapping[str, str], a: Mapping[str, object], b: Mapping[str, object]) -> None:
    for which, known, names in (("first", a, inside.keys()), ("second", b, inside.values())):
        plain = list(dict.fromkeys(text.partition(":")[2] for text in known))
        for name in names:
            if not any(_begins(one, name) for one in plain):
                raise ValueError(
                    f"gr.compare: names has {name!r}, and no site of the {which} model begins with it; nearest: "
                    f"{', '.join(nearest(name, plain)) or 'there are none'}"
                )


def _row(a: tuple[Site, Tensor], b: tuple[Site, Tensor]) -> SiteDifference:
    (site, x), (other, y) = a, b
    kind: DifferenceKind | None
    if x.shape != y.shape:
        kind, error, texts = "shape", math.inf, (str([*x.shape]), str([*y.shape]))
    else:
        error = _relative_l1(x, y)
        texts = _text(x), _text(y)
        if x.dtype == y.dtype:
            kind = None if torch.equal(words_of(x), words_of(y).to(x.device)) else "bits"
        else:
            kind = "values" if error else None
            texts = f"{texts[0]} ({x.dtype})", f"{texts[1]} ({y.dtype})"
    at = SiteOp.of(site) if site.op else None
    return SiteDifference(str(site), str(other), at.op if at else "", at.source if at else "", error, kind, texts)


def _lone(a: tuple[Site, Tensor] | None, b: tuple[Site, Tensor] | None) -> SiteDifference:
    """The gradient of one model alone."""
    found = a or b
    assert found is not None
    name, text = str(found[0]), _text(found[1])
    texts = (text, "none") if a is not None else ("none", text)
    return SiteDifference(name, name if a is None else "", "", "", math.inf, "missing", texts)


def _text(x: Tensor) -> str:
    return f"mean {x.abs().to(torch.float64).mean().item():.6g}" if x.numel() else "empty"


def _relative_l1(x: Tensor, y: Tensor) -> float:
    """``sum |x - y| / sum |y|``.

    Equal elements, NaN and infinities included, differ by 0; a NaN or an infinity on one side makes inf.
    """
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    x, y = x.to(wide), y.to(x.device, wide)
    same = (x == y) | (x.isnan() & y.isnan())
    difference = torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=math.inf, posinf=math.inf).sum().item()
    size = torch.where(y.isfinite(), y.abs(), 0.0).sum().item()
    if difference == 0:
        return 0.0
    return difference / size if size else math.inf
