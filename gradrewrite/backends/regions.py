"""Regions: modules of a model that are compiled separately, with the policy and the names of the whole model."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradrewrite._compat import autograd, data_parallel, dynamo, nn_modules
from gradrewrite._utils.formatting import nearest
from gradrewrite._utils.tensors import tensors_in
from gradrewrite.backends.entry_point import EntryPoint
from gradrewrite.backends.module_hooks import HookedForwards
from gradrewrite.backends.region_calls import (
    NotShared,
    RegionCall,
    mark_backward,
    region_computed_again,
    region_running,
)
from gradrewrite.errors import NotRewrittenError
from gradrewrite.sites import Site


def find_regions(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the outermost modules with matching names, by name; ValueError for a pattern without a match.

    ``*`` crosses dots. The model itself, and containers without a forward (``ModuleList``), are no regions.
    """
    named = {name: module for name, module in model.named_modules() if name and _has_forward(module)}
    found: dict[str, nn.Module] = {}
    for name, module in named.items():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if not is_inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            found[name] = module
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            near = nearest(pattern, list(named)) or list(named)[:5]
            raise ValueError(
                f"regions: {pattern!r} matches no module with a forward of {type(model).__name__}; "
                f"names of its modules are {', '.join(map(repr, near)) or 'none'}"
            )
    return found


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def outside_of(model: nn.Module, regions: Iterable[str]) -> tuple[str, ...]:
    """Return the outermost modules outside of all regions, by name, that contain none."""
    inner = tuple(regions)
    found: list[str] = []
    for name, module in model.named_modules():
        contains = any(not name or region == name or region.startswith(f"{name}.") for region in inner)
        is_inside = any(name.startswith(f"{known}.") for known in (*inner, *found))
        if name and not contains and not is_inside and (_has_forward(module) or any(True for _ in module.parameters())):
            found.append(name)
    return tuple(found)


@dataclass(eq=False)
class _Entry:
    point: EntryPoint
    structure: Any
    users: set[RegionCall] = field(default_factory=set)


@dataclass(eq=False)
class _ModelCall:
    regions: Regions
    calls: Counter[str] = field(default_factory=Counter)  # of each region
    without_gradients: set[str] = field(default_factory=set)  # regions that were called so


class _Running(threading.local):
    call: _ModelCall | None = None


_running = _Running()


class Regions:
    """The regions of one model, and their compiled functions.

    Regions of equal structure, at whose sites the policy answers equally, run one compiled function. Torch's guards
    tell which of its graphs a call may run; the answers are compared when a region runs a graph for the first time.
    ``make_entry``, a method of what holds this object, makes the compiled function around a module.
    """

    def __init__(
        self,
        model: nn.Module,
        patterns: Sequence[str],
        make_entry: weakref.ReferenceType[Callable[..., EntryPoint]],
    ) -> None:
        self.modules = find_regions(model, patterns)
        self._model = weakref.ref(model)
        self._seen = _modules_inside(model)
        self._make_entry = make_entry
        self._entries: list[_Entry] = []
        self._known: dict[RegionCall, _Entry] = {}
        self._set = 0  # number of the set of Python values of these
        self._of_sets: dict[int, tuple[list[_Entry], dict[RegionCall, _Entry]]] = {}
        self._hooked = HookedForwards()
        self._most_calls: Counter[str] = Counter()  # of each region in one call of the model, with gradients
        self._without_gradients: set[str] = set()  # regions that the last of these called without them
        for name, module in self.modules.items():
            compiled = vars(module).get("_compiled_call_impl")
            if compiled is not None and not isinstance(compiled, _Redirection):
                raise TypeError(
                    f"regions: {name!r} is compiled already, by its own compile(), and would run without the policy; "
                    "set its _compiled_call_impl to None, transform, and compile the transformed model"
                )
        for name, module in self.modules.items():
            redirection = vars(module).get("_compiled_call_impl")
            if redirection is None:
                redirection = module._compiled_call_impl = _Redirection(module)
            redirection.names[self] = name

    def have_changed(self) -> bool:
        """Whether modules of the model were added, replaced or taken out since the regions were found."""
        model = self._model()
        return model is not None and _modules_inside(model) != self._seen

    @property
    def called(self) -> set[str]:
        """Return the names of the regions that have run a graph with a policy."""
        return {call.name for call in self._known}

    def region_of(self, site: Site) -> str | None:
        """Return the name of the region of a site of the whole model."""
        where = site.name if site.traits.of_parameter else site.module
        return next((name for name in self.modules if where == name or where.startswith(f"{name}.")), None)

    def use(self, number: int) -> None:
        """Use the compiled functions for another set of Python values; those of the last one are kept."""
        self._of_sets[self._set] = self._entries, self._known
        self._set = number
        self._entries, self._known = self._of_sets.get(number, ([], {}))

    def forget(self) -> None:
        """Drop the compiled functions."""
        self._entries.clear()
        self._known.clear()
        self._of_sets.clear()
        self._most_calls.clear()
        self._without_gradients.clear()

    def remove(self) -> None:
        """Let calls of the regions no longer come here."""
        self.forget()
        for module in self.modules.values():
            redirection = vars(module).get("_compiled_call_impl")
            if isinstance(redirection, _Redirection):
                redirection.names.pop(self, None)
                if not redirection.names:
                    module._compiled_call_impl = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the regions that are called on this thread follow the policy, in one call of the model."""
        for name, module in self.modules.items():
            if not isinstance(vars(module).get("_compiled_call_impl"), _Redirection):
                raise NotRewrittenError(
                    f"the region {name!r} was compiled by itself (module.compile()), so that its calls would run "
                    "without the policy; compile the transformed model instead: model.compile()",
                    code="regions",
                )
        before, call = _running.call, _ModelCall(self)
        _running.call = call
        has_gradients = torch.is_grad_enabled()
        try:
            yield
        finally:
            if has_gradients:
                self._most_calls |= call.calls
                self._without_gradients -= call.calls.keys()
                self._without_gradients |= call.without_gradients
            _running.call = before

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a region. The hooks of ``fully_shard`` cannot be traced, and run around the graph of the forward."""
        module, running, is_known = self.modules[name], _running.call, True
        if running is not None and running.regions is self:
            region = RegionCall(name, running.calls[name])
            running.calls[name] += 1
            if not torch.is_grad_enabled():
                running.without_gradients.add(name)
        else:  # an activation checkpoint calls it again, in a backward
            again = RegionCall(name) if self._most_calls[name] <= 1 else region_computed_again(name)
            region, is_known = again or RegionCall(name), again is not None
            if not is_known and name in self._without_gradients:
                raise self._unknown_call(name)
        call = self._call if is_known else self._call_again
        if not data_parallel.is_sharded(module):
            return call(region, module, args, kwargs)
        forward = partial(call, region, module, runs_hooks=False)
        hooked = self._hooked.around(lambda *a, **k: forward(a, k), module, type(module), f"the region {name!r}")
        return hooked._call_impl(*args, **kwargs)

    def _call(self, region: RegionCall, module: nn.Module, args: Any, kwargs: Any, *, runs_hooks: bool = True) -> Any:
        inputs = list(tensors_in((args, kwargs)))
        ends = {t.grad_fn for t in inputs if t.grad_fn is not None}
        for entry in self._entries_for(region, module, runs_hooks=runs_hooks):
            try:
                with region_running(region, module):
                    result = entry.point(args, kwargs, module)
            except NotShared:
                continue
            except NotRewrittenError as err:
                if not isinstance(err.__cause__, dynamo.FailOnRecompileLimitHit) or entry.users <= {region}:
                    raise
                continue  # torch's limit of compilations is that of all regions together
            entry.users.add(region)
            self._known[region] = entry
            changed = (t for t in inputs if t.grad_fn is not None and t.grad_fn not in ends)
            mark_backward(region, (*tensors_in(result), *changed), ends)
            return result
        raise AssertionError("the last entry is the region's own")

    def _call_again(
        self, region: RegionCall, module: nn.Module, args: Any, kwargs: Any, *, runs_hooks: bool = True
    ) -> Any:
        """Recompute a call for an activation checkpoint; all calls of the region must have run one function."""
        entries = {self._known.get(RegionCall(region.name, n)) for n in range(self._most_calls[region.name])}
        entry = entries.pop()
        if entry is None or entries:
            raise self._unknown_call(region.name)
        try:
            with region_running(region, module):
                return entry.point(args, kwargs, module)
        except NotShared:
            raise self._unknown_call(region.name) from None

    def _unknown_call(self, name: str) -> NotRewrittenError:
        return NotRewrittenError(
            f"the region {name!r} was called {self._most_calls[name]} times in the forward, and an activation "
            "checkpoint around it computes it again for its backward: it is not known which of these calls that is, "
            "whose answers and names hold. Checkpoint each call by itself, checkpoint(module, x, use_reentrant=False); "
            "or put the checkpoint inside of the region, or all calls into one region",
            code="regions",
        )

    def _entries_for(self, region: RegionCall, module: nn.Module, *, runs_hooks: bool) -> Iterator[_Entry]:
        """Yield the compiled functions that the region may run: the one that it ran last, and at the end its own."""
        known = self._known.get(region)
        if known is not None:
            yield known
        structure = self._structure(region.name, module, runs_hooks=runs_hooks)
        for entry in list(self._entries):
            if entry is not known and entry.structure == structure and not entry.point.is_split(entry.users):
                yield entry
        make_entry = self._make_entry()
        assert make_entry is not None
        entry = _Entry(make_entry(module, runs_hooks=runs_hooks), structure)
        self._entries.append(entry)
        yield entry

    def _structure(self, name: str, module: nn.Module, *, runs_hooks: bool) -> Any:
        """Return a key of regions that may run the same graphs; torch's guards do not compare relative names."""
        model = self._model()
        assert model is not None
        modules = {id(m): n for n, m in model.named_modules()}
        tensors = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}

        def relative(known: str) -> Any:
            inside = known == name or known.startswith(f"{name}.")
            return known[len(name) :] if inside else (known,)

        return (
            runs_hooks,
            type(module),
            tuple((n, type(m), relative(modules[id(m)])) for n, m in module.named_modules()),
            tuple((n, relative(tensors[id(t)]), *_described(t)) for n, t in _tensors_of(module) if id(t) in tensors),
            tuple(nn_modules.hooks_of(m) for m in module.modules() if runs_hooks or m is not module),
        )

    def parameters(self) -> list[Tensor]:
        """Return the parameters of regions that nothing else uses."""
        model = self._model()
        inside = {id(m) for region in self.modules.values() for m in region.modules()}
        others = [m for m in model.modules() if id(m) not in inside] if model is not None else []
        outside = {id(p) for m in others for p in m._parameters.values()}
        found = {id(p): p for region in self.modules.values() for p in region.parameters() if id(p) not in outside}
        return list(found.values())


def _modules_inside(model: nn.Module) -> list[nn.Module]:
    return list(model.modules())[1:]  # not the model: what is kept in it would keep it alive


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    parameters = module.named_parameters(remove_duplicate=False)
    return [*parameters, *module.named_buffers(remove_duplicate=False)]


def _described(tensor: Tensor) -> tuple[Any, ...]:
    shape = () if is_lazy(tensor) else tuple(tensor.shape)
    return shape, tensor.dtype, tensor.device, tensor.requires_grad


class _Redirection:
    """Takes the calls of a module that is a region: to the model that is running, else to the module itself.

    ``nn.Module.__call__`` runs it in place of the module's own call. Copies and pickles of the module leave it behind.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.names: weakref.WeakKeyDictionary[Regions, str] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[Regions] | None = None  # whose policy held in the last forward; None for a plain one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        regions = None if _running.call is None else _running.call.regions
        if regions is None and autograd.backward_id() >= 0:  # an activation checkpoint, which calls it again
            regions = self._last() if self._last is not None else None
        else:
            self._last = None if regions is None else weakref.ref(regions)
        name = None if regions is None else self.names.get(regions)
        if regions is None or name is None:
            return module._call_impl(*args, **kwargs)
        return regions.call(name, args, kwargs)
