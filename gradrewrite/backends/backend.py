"""The torch.compile backend."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradrewrite._compat import data_parallel, dynamo, dynamo_cache
from gradrewrite.backends.compilation import compile_graph, needs_gradients
from gradrewrite.backends.engines import Engine, Inductor, Runnable
from gradrewrite.backends.explanation import Explanation
from gradrewrite.backends.parameter_watch import ParameterWatch
from gradrewrite.backends.session import Session
from gradrewrite.errors import PolicyError
from gradrewrite.instrumentation.source_locations import user_line
from gradrewrite.ir import editing
from gradrewrite.monitoring.monitor import Monitor, recorder_of
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.rules import check_policy
from gradrewrite.policy.sampling import Measured
from gradrewrite.rewriting.config import Loops, RewriteConfig, states_with, uses_of


class Backend:
    """A torch.compile backend with a policy; made by ``gr.backend``."""

    def __init__(
        self,
        session: Session,
        engine: Engine,
        monitor: Monitor,
        *,
        is_silent: bool = False,
        measured: Measured = "all",
    ) -> None:
        self.session = session
        self.engine = engine
        self.is_silent = is_silent  # no backward follows, so that what is skipped does not matter
        self._monitor = monitor
        self._measured = measured
        # By what torch.compile made of this object.
        self._compiled: MutableMapping[Any, dynamo_cache.CompiledCode] = WeakIdKeyDictionary()
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._watches: list[ParameterWatch] = []
        self._given: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that torch.compile was given with it

    @property
    def __name__(self) -> str:
        """The name that torch.compile asks for when it is given this object; a module that it compiles is watched."""
        module = None if self.session.has_model else dynamo.module_given_to_compile()
        if module is not None:
            self._watch(module)
        return "gradrewrite"

    def _watch(self, module: nn.Module) -> None:
        """Watch the parameters of a module.

        A second one is refused: torch.compile runs equal modules with what was compiled for the first, by its names.
        """
        other = next((known for known in self._given if known is not module), None)
        if other is not None:
            raise PolicyError(
                f"gr.backend: it is given a {type(module).__name__} and has a {type(other).__name__} already: "
                "their names would be alike, and torch.compile may run one with what was compiled for the other. For "
                'blocks of one model use gr.transform(model, policy, regions="layers.*").compile(), which compiles '
                "each by itself with the names of the whole model; else make one backend for each module"
            )
        if module not in self._given:
            self._given.add(module)
            self._watches.append(ParameterWatch(module, self.session.warn_outside))

    def __reduce__(self) -> tuple[Any, ...]:
        config = self.session.config  # without code and records
        return make_backend, (config.policy, None, type(self.engine)(), config.loops, config.uses, config.states.seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        """Share policy, with thresholds that you change, and monitor; Lightning compiles copies."""
        config = self.session.config
        given = config.loops, config.uses, config.states.seed
        return make_backend(config.policy, self._monitor, type(self.engine)(), *given)

    @property
    def monitor(self) -> Monitor:
        """The monitor of the backward passes."""
        return self._monitor

    def explain(self) -> Explanation:
        """Return the compiled graphs and the skipped regions so far."""
        return self.session.graphs.explanation()

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Runnable:
        """Compile one graph of Dynamo, as torch.compile asks."""
        engine = self.engine.configured(mode, options)
        broken = dynamo.graph_break_of(gm)
        if broken is not None and not self.is_silent and not data_parallel.is_ddp_split(gm):
            self.session.graphs.note_skipped(f"{user_line(broken[1])}: {broken[0].splitlines()[0]}")
        if self.session.has_model:
            return compile_graph(self.session, gm, example_inputs, engine, self._measured)
        run = self._compile_all(gm, example_inputs, engine)
        self._live_with_modules()  # for a model, its entry does this
        return run

    def _compile_all(self, gm: fx.GraphModule, inputs: Sequence[Any], engine: Engine) -> Runnable:
        """Compile a graph once for each kind of step: torch.compile asks one time, and runs one function."""
        sampling, copied = self.session.sampling, editing.copy_with_inner_graphs(gm)
        compiled: dict[Measured, Runnable] = {"all": compile_graph(self.session, gm, inputs, engine)}
        for measured in sampling.kinds[1:] if needs_gradients(inputs) else ():
            own = editing.copy_with_inner_graphs(copied)
            compiled[measured] = compile_graph(self.session, own, inputs, engine, measured)
        if not needs_gradients(inputs):
            return compiled["all"]

        def run(*args: Any) -> Any:
            return compiled.get(sampling.begin(), compiled["all"])(*args)

        return run

    def _live_with_modules(self) -> None:
        """Free the compiled code of a module when the module is freed, as ``torch.compile(module)`` does.

        What is compiled for a function that is given modules stays: it may be given others.
        """
        asked, code, owner = dynamo.backend_in_use() or (None, None, None)
        if code is None or not any(owner is root for root in self.session.names.roots):
            return
        if asked not in self._compiled:
            self._compiled[asked] = dynamo_cache.CompiledCode(asked)
        self._compiled[asked].add(code)
        for module in self.session.names.roots:
            if module not in self._watched:
                self._watched.add(module)
                weakref.finalize(module, _drop_unused, weakref.ref(self)).atexit = False


def _drop_unused(ref: weakref.ref[Backend]) -> None:
    backend = ref()
    if backend is not None and not backend.session.names.roots:
        for compiled in list(backend._compiled.values()):
            compiled.drop()
        dynamo_cache.clear_dropped()  # what is dropped still counts against torch's recompile limit


def backend(
    policy: Policy,
    *,
    monitor: Monitor | None = None,
    loops: Loops = None,
    uses: str | Sequence[str] = (),
    seed: int = 0,
) -> Backend:
    """Make a torch.compile backend that rewrites the backward.

    Names are those of the module that is compiled; with several modules in one compiled function they begin
    with the variable (``gen.x``). A rule that matches nothing raises ``NoSuchSiteError`` from the first backward.
    torch.compile itself ignores hooks that are registered after the first call; ``gr.transform`` honours them.

    Args:
        policy: A callback, a rule, or a list of them.
        monitor: Where records go; a new ``Monitor`` if None.
        loops: What becomes of loops in Python, as in ``gr.transform``.
        uses: Patterns of single uses of values with sites, as there.
        seed: A whole number from which random numbers in functions follow, as there.

    Returns:
        A backend with ``.monitor`` and ``.explain()``; ``mode`` and ``options`` of torch.compile are Inductor's.

    Raises:
        TypeError: ``seed`` is no whole number.
        ValueError: A bound in a rule is a tensor that is negative, ``loops`` is none of these, or a pattern in ``uses``
            is none of a use.
        PolicyError: ``policy`` is none; or, from ``torch.compile``, the backend has another module already.

    Example:
        >>> import torch, gradrewrite as gr
        >>> from gradrewrite.passes import ClipByNorm
        >>> step = torch.compile(torch.nn.Linear(2, 2), backend=gr.backend(gr.on("gradient:*", ClipByNorm(1.0))))
    """
    return make_backend(policy, monitor, Inductor(), loops, uses, seed)


def make_backend(
    policy: Policy,
    monitor: Monitor | None,
    engine: Engine,
    loops: Loops = None,
    uses: str | Sequence[str] = (),
    seed: int = 0,
) -> Backend:
    """Make a backend that compiles with an engine; see ``backend``."""
    check_policy(policy)
    monitor = monitor_or_new(monitor)
    config = RewriteConfig(policy, loops=loops, uses=uses_of(uses), states=states_with(seed))
    return Backend(Session(config, recorder_of(monitor)), engine, monitor)


def monitor_or_new(monitor: Monitor | None) -> Monitor:
    """Return the given monitor, or a new one; TypeError for another type."""
    if monitor is not None and not isinstance(monitor, Monitor):
        raise TypeError(f"monitor is a gr.Monitor, got {type(monitor).__name__}")
    return Monitor() if monitor is None else monitor


_registered: MutableMapping[Any, Backend] = WeakIdKeyDictionary()  # by what torch.compile made of name and options


def registered_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Runnable:
    """The backend that torch finds under the name ``gradrewrite``.

    ``torch.compile(f, backend="gradrewrite", options={"policy": ..., "monitor": ..., "loops": ..., "uses": ...,
    "seed": ...})``; other options are Inductor's.
    Without a policy it compiles the plain backward.
    """
    rest = dict(options or {})
    has_policy, used = "policy" in rest, dynamo.backend_in_use()
    policy, monitor, loops = rest.pop("policy", []), rest.pop("monitor", None), rest.pop("loops", None)
    uses, seed = rest.pop("uses", ()), rest.pop("seed", 0)
    found = _registered.get(used[0]) if has_policy and used is not None else None
    if found is None:
        found = backend(policy, monitor=monitor, loops=loops, uses=uses, seed=seed)
        if has_policy and used is not None:
            _registered[used[0]] = found
    return found(gm, example_inputs, mode=mode, options=rest)
