"""TEMPORARY stand-in."""

from __future__ import annotations

import collections
import copy
import inspect
from collections.abc import Hashable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from gradrewrite._compat import fake_tensors, make_fx


@dataclass(frozen=True)
class UpdateGraph:
    graph_module: fx.GraphModule
    parameters: tuple[int, ...]
    states: tuple[tuple[int, str], ...]
    numbers: tuple[tuple[int, str], ...]
    key: Hashable


@contextmanager
def compiling():
    before = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        yield
    finally:
        torch.compiler.is_compiling = before


class TensorFactors(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("add", "add_", "sub", "sub_") and isinstance(kwargs.get("alpha", 1), Tensor):
            alpha = kwargs.pop("alpha")
            return func(args[0], args[1] * alpha, **kwargs)
        if name in ("addcdiv_", "addcmul_") and isinstance(kwargs.get("value"), torch.Tensor):
            value = kwargs.pop("value")
            product = args[1] / args[2] if "div" in name else args[1] * args[2]
            return args[0].add_(value * product)
        return func(*args, **kwargs)


def check_traceable(optimizer): ...
def key_of(optimizer):
    return ()


def numbers_of(optimizer, numbers):
    return [float(optimizer.param_groups[g][k]) for g, k in numbers]


def prepare_state(optimizer, has_gradient):
    n = 0
    for g in optimizer.param_groups:
        for p in g["params"]:
            if (
                has_gradient[n]
                and not optimizer.state.get(p)
                and (g.get("momentum") or not isinstance(optimizer, torch.optim.SGD))
            ):
                return False
            n += 1
    return all(optimizer.state.get(p) for g in optimizer.param_groups for p in g["params"]) or (
        isinstance(optimizer, torch.optim.SGD) and not any(g["momentum"] for g in optimizer.param_groups)
    )


def trace_update(optimizer, gradients, *, foreach=False):
    params = [p for g in optimizer.param_groups for p in g["params"]]
    own = [n for n, g in enumerate(gradients) if g is not None]
    states = [(n, k) for n in own for k, v in optimizer.state.get(params[n], {}).items() if isinstance(v, Tensor)]
    numbers = tuple((g, "lr") for g in range(len(optimizer.param_groups)))
    reals = [
        *(params[n].detach() for n in own),
        *(params[n].detach() for n in own),
        *(optimizer.state[params[n]][k] for n, k in states),
        torch.zeros(len(numbers), dtype=torch.float64),
    ]
    fakes = fake_tensors.fakes_of(reals)

    def run(*xs):
        ps, gs = list(xs[: len(own)]), list(xs[len(own) : 2 * len(own)])
        st, lrs = list(xs[2 * len(own) : -1]), xs[-1]
        ps = [p.clone() for p in ps]
        st = [s.clone() for s in st]
        shadow = copy.copy(optimizer)
        shadow.state = collections.defaultdict(dict)
        at = {n: i for i, n in enumerate(own)}
        groups = []
        pos = 0
        for gi, group in enumerate(optimizer.param_groups):
            members = []
            for n in range(pos, pos + len(group["params"])):
                if n in at:
                    p = ps[at[n]]
                    p.grad = gs[at[n]]
                    members.append(p)
                    shadow.state[p] = dict(optimizer.state.get(params[n], {}))
            pos += len(group["params"])
            new = {**group, "params": members, "lr": lrs[gi], "foreach": False, "fused": False, "capturable": True}
            groups.append({k: v for k, v in new.items() if k in group})
        for (n, k), s in zip(states, st):
            shadow.state[ps[at[n]]][k] = s
        shadow.param_groups = groups
        with torch.no_grad(), compiling(), TensorFactors():
            inspect.unwrap(type(optimizer).step)(shadow)
        return [*ps, *(shadow.state[ps[at[n]]][k] for n, k in states)]

    gm = make_fx.trace(run, fakes)
    return UpdateGraph(gm, tuple(own), tuple(states), numbers, ())
