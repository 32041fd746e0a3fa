"""State of a rewritten model: its session, its compiled entry points, and the plain module behind it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gradrewrite._compat import autograd, data_parallel, dynamo
from gradrewrite._utils.tensors import tensors_in
from gradrewrite.backends.backend import Backend
from gradrewrite.backends.engines import AotEager, Engine, Inductor
from gradrewrite.backends.entry_point import EntryPoint, makes_gradients
from gradrewrite.backends.module_hooks import HookedForwards, HookWatch
from gradrewrite.backends.parameter_watch import ParameterWatch, UseOfModel
from gradrewrite.backends.regions import Regions, outside_of
from gradrewrite.backends.session import Session, attached_state
from gradrewrite.monitoring.monitor import Monitor, recorder_of
from gradrewrite.policy.rules import ask_in_order
from gradrewrite.policy.sampling import Measured
from gradrewrite.policy.scope import refuse_group_in_regions
from gradrewrite.rewriting.config import RewriteConfig
from gradrewrite.sites import Site

TORCHSCRIPT = (
    "TorchScript has no backward of ours: torch.jit.script and torch.jit.trace take the plain model, model.original or "
    "gr.restore(model)"
)


class ModelState:
    """The policy of one model at work."""

    def __init__(self, original: nn.Module, config: RewriteConfig, monitor: Monitor) -> None:
        self.original = original  # shares its ``__dict__`` with the rewritten module
        self.config = config  # that ``transform`` was given
        self.monitor = monitor
        self.engine: Engine = AotEager()
        self.compile_options: Mapping[str, Any] = {}
        self._is_dropped = False
        self.generation = 0  # of its compiled functions
        self._use = UseOfModel(original)
        self._hooked = HookedForwards()
        self._is_sharded = False
        self.regions = self._find_regions() if config.regions else None
        self._install(config, {}, self.engine)

    @property
    def is_compiled(self) -> bool:
        """Whether Inductor compiles the graphs, and not op by op."""
        return self.engine.name == "inductor"

    def _find_regions(self) -> Regions:
        return Regions(self.original, self.config.regions, weakref.WeakMethod(self._region_entry))

    def compile(self, kwargs: Mapping[str, Any]) -> None:
        """Compile with Inductor from the next call on; see ``RewrittenModule.compile``."""
        options = dict(kwargs.get("options") or {})
        options.pop("guard_filter_fn", None)  # Dynamo's, all others are Inductor's
        Inductor().configured(kwargs.get("mode"), options)
        given = {name: kwargs[name] for name in ("fullgraph", "dynamic") if name in kwargs}
        self._install(replace(self.config, **given), kwargs, Inductor())

    def serve_framework(self) -> None:
        """Belong to the callback of a framework, until its training ends; see ``RewriteConfig.in_framework``."""
        self.config = replace(self.config, in_framework=True)
        self._install(self.config, self.compile_options, self.engine)

    def _install(self, config: RewriteConfig, options: Mapping[str, Any], engine: Engine) -> None:
        outside = None if self.regions is None else outside_of(self.original, self.regions.modules)
        recorder = recorder_of(self.monitor)
        label = partial(recorder.links.label_of, weakref.ref(self.original))
        session = Session(replace(config, label=label), recorder, self.original, outside)
        entry_points = self._entry_points(session, options, engine)
        self.session, self.compile_options, self.engine = session, options, engine
        of_regions = None if self.regions is None else self.regions.parameters
        self._watch = ParameterWatch(self.original, session.warn_outside, of_regions)
        self._begin(entry_points)

    def restart(self) -> None:
        """Drop the compiled functions; the next call traces again."""
        self.session.forget()
        self._begin(self._entry_points(self.session, self.compile_options, self.engine))

    def _begin(self, entry_points: dict[str, EntryPoint]) -> None:
        self._entries = entry_points
        self.generation += 1
        self._hooks = HookWatch(self.original)
        if self.regions is not None:
            self.regions.forget()
        self._num_graphs = 0
        self._tree = _tree_of(self.original)  # when graphs were counted
        self._values = self.session.values.number() if self.regions is not None else 0  # of the regions' code
        self._num_calls = 0  # of a model with regions, with gradients

    def _entry_points(self, session: Session, options: Mapping[str, Any], engine: Engine) -> dict[str, EntryPoint]:
        monitor = self.monitor

        @functools.cache
        def backend(measured: Measured) -> Backend:
            return Backend(session, engine, monitor, measured=measured)

        evaluating = Backend(session, engine, self.monitor, is_silent=True)
        self._backends = backend, evaluating
        if self.regions is not None:
            return {}
        given, runs_hooks = (session, backend, evaluating, self.original, options), not self._is_sharded
        return {method: EntryPoint(*given, method, runs_hooks=runs_hooks) for method in session.config.methods}

    def _region_entry(self, module: nn.Module, *, runs_hooks: bool) -> EntryPoint:
        given = self.session, *self._backends, module, self.compile_options
        return EntryPoint(*given, runs_hooks=runs_hooks, is_region=True)

    def call(self, model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an entry point. The hooks of ``fully_shard`` cannot be traced, and run around the forward's graph."""
        self._use.note()
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise TypeError(TORCHSCRIPT)
        self.session.calls.begin()
        with self._buffers_watched():
            return self._call_any(model, method, args, kwargs)

    @contextlib.contextmanager
    def _buffers_watched(self) -> Iterator[None]:
        """Note buffers with changes outside of graphs, for skipped updates."""
        session = self.session
        session.buffers.note_scaling(autograd.is_half_autocast())
        if not (session.keeps_buffers and torch.is_grad_enabled()):
            yield
            return
        in_parts = self.regions is not None or not session.config.fullgraph
        seen = session.buffers.before_call(self.original, in_parts=in_parts)
        try:
            yield
        finally:
            session.buffers.after_call(seen)

    def _call_any(self, model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        has_new_regions = self.regions is not None and self.regions.have_changed()
        if has_new_regions or self.session.has_other_policy:
            if self.regions is not None:
                self.regions.remove()
                self.regions = self._find_regions()
            self._watch.remove()
            self._install(self.session.config, self.compile_options, self.engine)
        if self.regions is not None:
            self._follow_values()
            return self._call_regions(self.regions, model, method, args, kwargs)
        is_sharded = method == "forward" and data_parallel.is_sharded(model)
        if is_sharded != self._is_sharded and method == "forward":
            self._is_sharded = is_sharded
            self.restart()
        if not is_sharded:
            return self._call(model, method, args, kwargs)
        plain = type(self.original)
        hooked = self._hooked.around(lambda *a, **k: self._call(model, method, a, k), model, plain, plain.__name__)
        return nn.Module.__call__(hooked, *args, **kwargs)

    def follow(self) -> int:
        """Follow changes of the policy and of hooks before a training step; return the generation of compiled code.

        RuntimeError where the policy was taken off.
        """
        self._use.note()
        if self.session.has_other_policy:
            self._watch.remove()
            self._install(self.session.config, self.compile_options, self.engine)
        self._prepare()
        return self.generation

    def _follow_values(self) -> None:
        """Use the regions' code for the present Python values."""
        if torch.is_grad_enabled() and (number := self.session.values.number()) != self._values:
            self._values = number
            assert self.regions is not None
            self.regions.use(number)

    def _call_regions(
        self, regions: Regions, model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a model with compiled regions; the rest of it runs eagerly."""
        self._prepare()
        if torch.is_grad_enabled():
            self._check_outside(regions)
        with regions.running():
            call = nn.Module.__call__ if method == "forward" else getattr(type(self.original), method)
            result = call(model, *args, **kwargs)
        self._watch_new_graphs()
        if torch.is_grad_enabled() or makes_gradients(result, (args, kwargs)):
            self._note_parallelism(model)
            self._num_calls += 1
            if self._num_calls > 1 or regions.called.issuperset(regions.modules):
                self.session.check_rules()
        self.session.warnings.flush_warnings()
        return result

    def _watch_new_graphs(self) -> None:
        if len(self.session.graphs) != self._num_graphs:  # parameters may have come, or need a gradient by now
            tree = _tree_of(self.original)
            if self.regions is None and len(self.session.config.methods) == 1 and tree != self._tree:
                self.session.rules.check_again(self._num_graphs)
            self._tree = tree
            self._num_graphs = len(self.session.graphs)
            self._watch.refresh()

    def _note_parallelism(self, model: nn.Module) -> None:
        modules = [model, *self.original.modules()]
        around = data_parallel.parallelism_around(modules)
        self.session.graphs.note_parallelism(around)
        if around.size > 1 and self.session.may_skip:
            shards = [weakref.ref(module) for module in modules if data_parallel.is_sharded(module)]
            self.session.recorder.links.note_modules(shards)

    def traced_config(self) -> RewriteConfig:
        """Return the configuration for a graph of the whole model: with regions, the policy is asked inside of them.

        PolicyError where gradients that are not in one region are clipped together.
        """
        self._use.note()
        config, regions = self.session.config, self.regions
        if regions is None:
            return config
        self._check_outside(regions)
        grouped: dict[Hashable, str] = {}

        def ask_inside(site: Site) -> tuple[Any, ...]:
            region = regions.region_of(site)
            if region is None:
                return ()
            answers = ask_in_order(config.policy, site)
            for answered in answers:
                refuse_group_in_regions(grouped, answered.insertion, site, region)
            return tuple(answered.action for answered in answers)

        return replace(config, policy=ask_inside)

    def _check_outside(self, regions: Regions) -> None:
        self.session.graphs.check_outside(self.session.names.known_parameters(), regions.parameters)

    def _prepare(self) -> None:
        if self._is_dropped:
            raise RuntimeError(
                f"the policy of this {type(self.original).__name__} was taken off by gr.restore; use what that returned"
            )
        if self._hooks.have_changed():  # what was compiled has the old ones
            self.restart()

    def _call(self, model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._prepare()
        in_parts = not self.session.config.fullgraph
        before = dynamo.graph_breaks_so_far() if in_parts else {}
        result = self._entries[method](args, kwargs)
        self._watch_new_graphs()
        has_backward = torch.is_grad_enabled() or makes_gradients(result, (args, kwargs))
        if in_parts and has_backward:
            self._look_for_plain_ops(result, (args, kwargs), before)
        if has_backward:
            self._note_parallelism(model)
        self.session.check_rules()
        self.session.warnings.flush_warnings()
        return result

    def _look_for_plain_ops(self, result: Any, inputs: Any, breaks: Mapping[str, int]) -> None:
        for reason, count in dynamo.graph_breaks_so_far().items():
            if count > breaks.get(reason, 0):
                self.session.graphs.note_break(reason)
        if "plain" in self.session.warnings:
            return
        outputs = [t for t in tensors_in(result) if t.grad_fn is not None]
        op = autograd.find_plain_op(outputs, list(tensors_in(inputs)))
        if op is not None:
            self.session.warnings.warn_once(
                "plain",
                f"a part of this call ran outside the rewritten graphs (first seen: {op}), where the policy does not "
                "hold; model.explain() lists the regions that the tracer skipped",
            )

    def drop(self) -> None:
        """Let go of compiled code and of the hooks on parameters."""
        self._use.note()
        self._watch.remove()
        if self.regions is not None:
            self.regions.remove()
        self._entries = {}
        self._is_dropped = True

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Stay behind where a module is copied, for a copy gets a state of its own."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay behind where a module is pickled."""
        return type(None), ()


def _tree_of(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(module)) for name, module in model.named_modules()]


def state_of(value: Any) -> ModelState | None:
    """Return the state of a rewritten model; None for any other object, a plain view of such a model included."""
    state = attached_state(value)
    return state if isinstance(state, ModelState) else None
