"""``transform``: a model with a policy, of the same class."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from gradrewrite._compat import data_parallel, dynamo, dynamo_cache
from gradrewrite._utils.progress import show_progress
from gradrewrite._utils.warnings import warn
from gradrewrite.backends.backend import monitor_or_new
from gradrewrite.backends.capture import capture_joint_graph, capture_memory
from gradrewrite.backends.explanation import Explanation
from gradrewrite.backends.model_state import TORCHSCRIPT, ModelState, state_of
from gradrewrite.backends.session import STATE
from gradrewrite.diagnostics.memory import Memory
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.monitoring.monitor import Monitor
from gradrewrite.optimizer.step_sites import trace_step
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.rules import Rule, check_policy, parts_of
from gradrewrite.rewriting.config import Loops, RewriteConfig, states_with, uses_of
from gradrewrite.rewriting.loss_scale import LossScale

_Module = TypeVar("_Module", bound=nn.Module)


def transform(
    model: nn.Module,
    policy: Policy,
    *,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    monitor: Monitor | None = None,
    loss_scale: torch.amp.GradScaler | Tensor | None = None,
    methods: Sequence[str] = ("forward",),
    regions: str | Sequence[str] = (),
    loops: Loops = None,
    uses: str | Sequence[str] = (),
    seed: int = 0,
    inplace: bool = False,
) -> RewrittenModule:
    """Give a model a policy for its backward pass.

    The forward pass is never changed: outputs, buffers and random numbers are those of the plain model run the
    same way. Until ``compile`` is called, a call runs the rewritten graph op by op.

    The result is an instance of a subclass of the model's class, with the same name and signature, that shares the
    model's ``__dict__``: parameters, buffers, submodules, hooks and attributes are those of the model. The policy holds
    where the result is called, also by its own methods (``self(x)``). A backward that reaches parameters in another way
    (a submodule called directly, a method without an entry point, the model that was given) warns once.

    Args:
        model: Any module; nothing of it is copied.
        policy: A callback ``Site -> action, sequence of actions, or None``; a rule (``gr.on``); or a list of
            policies, whose answers all apply, in order. ``[]`` leaves the backward as it is.
        fullgraph: Refuse what the tracer cannot see (the policy cannot reach it). False lists such regions in
            ``explain()`` and warns once about each.
        dynamic: Symbolic shapes, as in ``torch.compile``.
        monitor: Where records go; a new ``Monitor`` if None.
        loss_scale: What the loss is multiplied by before ``backward``: a ``torch.amp.GradScaler``, or a tensor with
            one element. It is read at every backward, on the device; thresholds, records and what tensor functions
            see are then in units of the unscaled loss.
        methods: Methods beside ``forward`` that are called from outside; each is traced by itself, as a call is.
            Rules are checked when all of them, and the model, were called in training.
        regions: Patterns of names of modules, ``"layers.*"``: each outermost module that matches is compiled
            separately, and regions of equal structure and equal answers share what is compiled. Names, patterns and
            records are those of the whole model; ``fullgraph`` applies to each region. What is outside of all regions
            runs as plain PyTorch and has step sites alone; ``explain().outside`` lists it.
        loops: What becomes of loops. By default ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM`` are loops over time, and loops
            in Python are unrolled. ``"rolled"`` compiles one iteration of these, where they are equal: names, records
            and gradients stay those of the unrolled loop, but for rounding in the gradients of weights, and
            ``explain()`` tells of each loop. ``"unrolled"`` does not look for loops in Python.
        uses: Patterns of single uses of values, ``"cell->cell"``, with sites that a callback is asked about; a rule for
            a use needs none.
        seed: A whole number from which the numbers of ``gr.uniform``, ``gr.normal`` and ``gr.bernoulli`` follow.
        inplace: Rewrite the given object itself: its class changes, and it is returned. ``restore`` undoes it.

    Returns:
        The model with the policy; ``isinstance`` of its class and of ``RewrittenModule``.

    Raises:
        TypeError: ``model`` is no module, or one that cannot be traced; it has a policy already; ``loss_scale`` is
            neither scaler nor tensor; ``seed`` is no whole number; or ``inplace`` with a class that has ``__slots__``.
        ValueError: The model has no method of a name in ``methods``, a pattern in ``regions`` matches no module, one in
            ``uses`` is none of a use, a bound in a rule is a tensor that is negative, or ``loops`` is none of these.
        PolicyError: ``policy`` is none. What it answers is checked at the first training forward, or in ``trace``.

    Example:
        >>> import torch, gradrewrite as gr
        >>> from gradrewrite.passes import ClipByValue
        >>> model = gr.transform(torch.nn.Linear(2, 2), gr.on("gradient:*", ClipByValue(0.1)))
        >>> isinstance(model, torch.nn.Linear)
        True
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> float(model.weight.grad.max())
        0.10000000149011612
    """
    _check_model(model)
    scale = None if loss_scale is None else LossScale(loss_scale)
    check_policy(policy)
    patterns = (regions,) if isinstance(regions, str) else regions
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"regions is a pattern of names of modules, as 'layers.*', or several, got {regions!r}")
    patterns = tuple(patterns)
    given = _checked_methods(model, methods), patterns, loops, uses_of(uses)
    config = RewriteConfig(policy, scale, fullgraph, dynamic, *given, states=states_with(seed))
    return _rewritten(model, config, monitor_or_new(monitor), inplace=inplace)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"gr.transform takes an nn.Module, got {_text_of_no_module(model)}")
    if isinstance(model, RewrittenModule):
        raise TypeError(
            "this module is transformed already; transform gr.restore(model), with a list of both policies if both are "
            "to hold"
        )
    if isinstance(model, data_parallel.DistributedDataParallel):
        raise TypeError(
            "gr.transform takes the model inside of DistributedDataParallel, whose own forward cannot be traced; wrap "
            "in this order: DistributedDataParallel(gr.transform(model, policy))"
        )
    if isinstance(model, nn.DataParallel):
        raise TypeError(
            "gr.transform takes the model inside of nn.DataParallel, whose copies of the model have no policy; use "
            "DistributedDataParallel(gr.transform(model, policy)), with one process for each GPU"
        )
    inside = next((name for name, module in model.named_modules() if isinstance(module, RewrittenModule)), None)
    if inside is not None:
        raise TypeError(
            f"the submodule {inside!r} is transformed already, and would be a graph break; gr.restore it, and give the "
            "whole model one policy"
        )
    refuse_trainers(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("gr.transform cannot trace a TorchScript module; give it the module that was scripted")
    if isinstance(model, dynamo_cache.OptimizedModule):
        raise TypeError(
            "gr.transform takes the plain model and not what torch.compile returned; compile afterwards: "
            "gr.transform(model, policy).compile()"
        )


def _text_of_no_module(given: Any) -> str:
    """Return the name of a value in the place of a model, and the way out."""
    if isinstance(given, type):
        return f"the class {given.__name__}; give an object, as in {given.__name__}(...)"
    owner = getattr(given, "__self__", None)
    if isinstance(owner, nn.Module):
        return f"a method of {type(owner).__name__}; give the model itself, and methods=({given.__name__!r},)"
    if isinstance(given, Rule | Sequence):
        return f"{type(given).__name__}; the model comes first: gr.transform(model, policy)"
    return f"{type(given).__name__}; for a function use gr.backend"


def refuse_trainers(model: nn.Module) -> None:
    """Raise TypeError for a model that DeepSpeed or FSDP1 trains."""
    for origin in (type(module).__module__ for module in model.modules()):
        if origin.startswith("deepspeed."):
            raise TypeError(
                "DeepSpeed runs the backward and the optimizer itself, so that no policy holds there; train with "
                "DistributedDataParallel(gr.transform(model, policy)) or FSDP2 (fully_shard)"
            )
        if origin.startswith("torch.distributed.fsdp.fully_sharded_data_parallel"):
            raise TypeError(
                "FSDP1 (FullyShardedDataParallel) flattens the parameters that a policy is asked about; use FSDP2 "
                "(torch.distributed.fsdp.fully_shard)"
            )


def _checked_methods(model: nn.Module, methods: Sequence[str]) -> tuple[str, ...]:
    if isinstance(methods, str):
        raise TypeError(f"methods is a sequence of names, got the string {methods!r}; write methods=({methods!r},)")
    further = tuple(name for name in dict.fromkeys(methods) if name != "forward")
    for name in further:
        if not inspect.isfunction(inspect.getattr_static(type(model), name, None)) or name in vars(model):
            raise ValueError(
                f"methods: the class {type(model).__name__} has no method {name!r} (static and class methods, "
                "submodules and functions that are attributes of the object have no entry points)"
            )
    return ("forward", *further)


def restore(model: nn.Module) -> nn.Module:
    """Take the policy off a model again; guards of its optimizers stay (``unguard``).

    Args:
        model: What ``transform`` returned. A model that was rewritten in place gets its class back.

    Returns:
        The plain model: the object that was given to ``transform``.

    Raises:
        TypeError: The model has no policy, or its class was changed since (``fully_shard``).

    Example:
        >>> plain = nn.Linear(2, 2)
        >>> restore(transform(plain, [])) is plain
        True
    """
    state = state_of(model)
    if state is None:
        raise TypeError(f"gr.restore takes what gr.transform returned, got a plain {type(model).__name__}")
    if STATE not in vars(model):
        state.drop()
        return state.original
    if type(model).__mro__[1] is not RewrittenModule:
        raise TypeError(
            f"gr.restore: the class of this {type(model).__name__} was changed after gr.transform (as fully_shard does)"
        )
    state.drop()
    del vars(model)[STATE]
    model.__class__ = type(state.original)
    return model


class RewrittenModule(nn.Module):
    """A model with a policy for its backward pass; made by ``transform``.

    It is the first base of the class of such a model, before the model's own class. A name below that the model's
    class or the model itself defines too stays the model's; ours is then ``RewrittenModule.trace(model, ...)``,
    ``RewrittenModule.monitor.fget(model)``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Skip ``__init_subclass__`` of the model's class; it may list its subclasses."""

    if TYPE_CHECKING:  # the attributes of the model's class

        def __getattr__(self, name: str) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; its backward will follow the policy.

        Raises:
            GraphBreakError: The tracer cannot see the whole model (``fullgraph=True``).
            NotRewrittenError: Torch would run the plain model (``fullgraph=True``).
            PolicyError, CallbackError, NoSuchSiteError: The policy cannot be followed, or not on several processes.
        """
        if getattr(vars(self).get("forward"), "__qualname__", "") == _REDIRECTED:
            return super().__call__(*args, **kwargs)
        return _call(self, "forward", args, kwargs)

    @property
    def original(self) -> nn.Module:
        """The plain module: the one that was given, or (rewritten in place) a view of it without the policy."""
        return _state(self).original

    @original.setter
    def original(self, value: object) -> None:
        raise AttributeError(_FIXED.format("original"))

    @property
    def monitor(self) -> Monitor:
        """The monitor, with the records of the backward passes."""
        return _state(self).monitor

    @monitor.setter
    def monitor(self, value: object) -> None:
        raise AttributeError(_FIXED.format("monitor"))

    def compile(self, **kwargs: Any) -> RewrittenModule:  # type: ignore[override]
        """Compile with Inductor from the next call on, in place; compiled again, only the new arguments hold.

        Args:
            **kwargs: What ``torch.compile`` takes, except ``backend``; ``fullgraph`` and ``dynamic`` win over those
                given to ``transform``.

        Returns:
            The model itself.

        Raises:
            TypeError: ``backend`` is given, or something that ``torch.compile`` does not take.
            RuntimeError: ``mode`` or one of ``options`` is unknown to Inductor, or both are given. The model stays as
                it was.

        Example:
            >>> model = transform(nn.Linear(2, 2), []).compile(dynamic=False)
        """
        if "backend" in kwargs:
            raise TypeError(
                "model.compile() compiles with Inductor and takes no backend; to call torch.compile yourself, use "
                "torch.compile(model, backend=gr.backend(policy))"
            )
        _state(self).compile(kwargs)
        return self

    def trace(self, *args: Any, **kwargs: Any) -> JointGraph:
        """Show the rewritten joint graph for these inputs; nothing runs and nothing changes.

        With ``regions`` it is the graph of the whole model, with what the policy does inside of the regions.
        A trace that takes longer than 5 seconds shows its progress on standard error, if that is a terminal.

        Args:
            *args: Inputs of the model; only their shapes, dtypes and devices matter.
            **kwargs: As ``args``.

        Returns:
            The graph that Inductor would get, whether the model is compiled or not; see above for ``regions``.

        Raises:
            GraphBreakError: The tracer cannot see the whole model.
            TraceError: Nothing needs a gradient.
            PolicyError, CallbackError, NoSuchSiteError: The policy cannot be followed.

        Example:
            >>> graph = transform(nn.Linear(2, 2), []).trace(torch.ones(1, 2))
            >>> [str(site) for site in graph.sites]
            ['activation:/linear', 'error:/linear', 'gradient:weight', 'gradient:bias']
        """
        state = _state(self)
        if any(isinstance(one, Rule) for one in (*args, *kwargs.values())):
            raise TypeError("model.trace takes the inputs of the model's forward; a policy is given to gr.transform")
        with show_progress("trace", "reading the model"):
            graph = capture_joint_graph(state.original, state.traced_config(), args, kwargs)
        return shown(graph, state.original)

    def memory(self, *args: Any, **kwargs: Any) -> Memory:
        """Return the bytes that the forward keeps for the backward, without and with the policy.

        As ``trace`` it compiles, runs and changes nothing, and takes the tensors that Inductor would save; op by op
        others are saved. With ``regions`` it is of the whole model; a region also keeps its inputs.

        Args:
            *args: Inputs of the model; ``suggestion()`` of the result runs its forward on them.
            **kwargs: As ``args``.

        Returns:
            Rows by tensor, sums by module, and a policy to try; ``print`` shows tables, ``viz.plot_memory`` bars.

        Raises:
            GraphBreakError, TraceError, PolicyError, CallbackError, NoSuchSiteError: As ``trace``.

        Example:
            >>> import gradrewrite as gr
            >>> from gradrewrite.passes import Store
            >>> net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            >>> memory = gr.transform(net, gr.on("saved:*", Store("int8"))).memory(torch.ones(8, 64))
            >>> memory.plain_bytes, memory.policy_bytes
            (16384, 4160)
        """
        state = _state(self)
        with show_progress("memory", "reading the model"):
            return capture_memory(state.original, state.traced_config(), args, kwargs)

    def trace_step(self, optimizer: torch.optim.Optimizer) -> JointGraph:
        """Return the step graph of an optimizer, without running or changing anything.

        It is what ``gr.guard`` does to the gradients before the update.

        Args:
            optimizer: An optimizer of the model's parameters, guarded or not; each parameter that needs a gradient is
                taken to have one.

        Returns:
            A graph from gradients to gradients, records, and factors that are applied after it: ``grad_scale``, by
            which a fused optimizer divides, or ``factor``, by which the gradients of a group are multiplied in place.

        Raises:
            TypeError: ``optimizer`` is none.
            TraceError: None of its parameters belongs to the model.
            PolicyError, CallbackError, NoSuchSiteError: The policy cannot be followed.

        Example:
            >>> import gradrewrite as gr
            >>> from gradrewrite.passes import ClipByGlobalNorm
            >>> model = gr.transform(nn.Linear(2, 2), gr.on("step:*", ClipByGlobalNorm(1.0)))
            >>> graph = model.trace_step(torch.optim.SGD(model.parameters(), lr=0.1))
            >>> [str(site) for site in graph.sites]
            ['step:weight', 'step:bias']
        """
        return shown(trace_step(self, optimizer), _state(self).original)

    def explain(self) -> Explanation:
        """Return the compiled graphs and the skipped regions so far."""
        return _state(self).session.graphs.explanation()

    def __copy__(self) -> RewrittenModule:
        """Copy the plain module as ``copy.copy`` does; share the policy, not the monitor."""
        config, *others = _settings(self)
        return _rebuild(copy.copy(_state(self).original), (_with_own_states(config), *others))

    def __deepcopy__(self, memo: dict[int, Any]) -> RewrittenModule:
        """Copy the plain module; share the policy and its thresholds, not the monitor."""
        state = _state(self)
        # The model may refer to itself: what is copied then refers to this object.
        copied = memo[id(self)] = object.__new__(type(self))
        original = copy.deepcopy(state.original, memo)
        vars(original).pop(STATE, None)
        _fill(copied, original, _with_own_states(state.config), Monitor())
        if state.is_compiled:
            _state(copied).compile(state.compile_options)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the plain module, policy and settings, without compiled code and records."""
        settings = _settings(self)
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] not in ("cloudpickle", "dill"):
            _check_pickled(settings[0].policy)
        if not settings[-1]:
            return _rebuild, (_state(self).original, settings)
        # The object comes first, for its attributes may refer to it.
        original = _state(self).original
        return _empty, (type(original),), (original, settings), None, None, _fill_in_place

    def __prepare_scriptable__(self) -> Any:
        """Refuse torch.jit.script."""
        raise TypeError(TORCHSCRIPT)

    def _replicate_for_data_parallel(self) -> Any:
        """Refuse nn.DataParallel; its replicas would run without the policy."""
        raise TypeError(
            "nn.DataParallel replicates the model at every call, and its replicas have no policy; use "
            "DistributedDataParallel(gr.transform(model, policy))"
        )


# Lightning's strategies call a model whose ``forward`` is, for that one call, ``training_step``, which calls the model.
_REDIRECTED = "_ForwardRedirection.__call__.<locals>.wrapped_forward"
_FIXED = (
    "{!r} of a transformed model cannot be set: what was compiled would keep the old one. Give gr.transform(model, "
    "policy, monitor=...) the model and the monitor"
)
_PROPERTIES = ("monitor", "original")
_OWN = ("compile", "explain", "memory", "monitor", "original", "trace", "trace_step")


def _with_own_states(config: RewriteConfig) -> RewriteConfig:
    return replace(config, states=copy.deepcopy(config.states))


def _state(model: nn.Module) -> ModelState:
    state = state_of(model)
    if state is None:
        raise TypeError(
            f"this {type(model).__name__} was made by the class of a transformed model, not by gr.transform"
        )
    return state


def _run(model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _state(model).call(model, method, args, kwargs)


_call = dynamo.outside_of_graphs(_run, "gradrewrite compiles the model by itself; an outer graph would lose the policy")


def _rewritten(model: nn.Module, config: RewriteConfig, monitor: Monitor, *, inplace: bool) -> RewrittenModule:
    cls = _subclass(model, config.methods, inplace=inplace)
    if not inplace:
        rewritten = object.__new__(cls)
        _fill(rewritten, model, config, monitor)
        return cast(RewrittenModule, rewritten)
    original = object.__new__(type(model))
    object.__setattr__(original, "__dict__", vars(model))
    state = ModelState(original, config, monitor)
    model.__class__ = cls
    object.__setattr__(model, STATE, state)
    return cast(RewrittenModule, model)


def _fill(rewritten: nn.Module, original: nn.Module, config: RewriteConfig, monitor: Monitor) -> None:
    object.__setattr__(rewritten, "__dict__", vars(original))
    object.__setattr__(rewritten, STATE, ModelState(original, config, monitor))


def _subclass(model: nn.Module, methods: Sequence[str], *, inplace: bool) -> type[nn.Module]:
    """Make the class of a rewritten model; rewritten in place, it has the memory layout of the model's."""
    cls = type(model)
    slots = [s for base in cls.__mro__ for s in _slots(base)]
    if slots and inplace:
        raise TypeError(
            f"gr.transform(..., inplace=True): {cls.__name__} has __slots__ ({', '.join(slots)}), so its objects "
            "cannot change their class; use gr.transform(model, policy)"
        )
    body: dict[str, Any] = {
        **({"__slots__": (), STATE: None} if inplace else {"__slots__": (STATE,)}),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__new__": functools.partial(_new_plain, cls),
        **{name: _attribute_of_original(name) for name in slots},
        **{name: _entry_method(cls, name) for name in methods if name != "forward"},
    }
    taken = {name: found for name in _OWN if (found := _definition(model, name)) is not None}
    if taken:
        ours = ", ".join(f"gr.RewrittenModule.{name}{'.fget' if name in _PROPERTIES else ''}(model)" for name in taken)
        warn(f"{cls.__name__} defines {', '.join(taken)} itself, which stays the model's; gradrewrite's: {ours}")
    metaclass: Any = type(cls)
    made: type[nn.Module] = metaclass(cls.__name__, (RewrittenModule, cls), {**body, **taken})
    return made


def _slots(cls: type) -> list[str]:
    slots = vars(cls).get("__slots__", ())
    return [s for s in ([slots] if isinstance(slots, str) else slots) if s not in ("__dict__", "__weakref__")]


def _new_plain(plain: type[_Module], _: type, *args: Any, **kwargs: Any) -> _Module:
    """Make a plain model where the class of a rewritten one is called, as ``type(model).from_pretrained`` does."""
    return plain(*args, **kwargs)


def _attribute_of_original(name: str) -> property:
    def read(self: RewrittenModule) -> Any:
        return getattr(_state(self).original, name)

    def write(self: RewrittenModule, value: Any) -> None:
        setattr(_state(self).original, name, value)

    return property(read, write)


def _entry_method(cls: type[nn.Module], name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(cls, name))
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _call(self, name, args, kwargs)

    return method


class _OwnAttribute:
    """An attribute, parameter or submodule of the object, with a name that ``RewrittenModule`` has too."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, model: nn.Module | None, _: type) -> Any:
        return self if model is None else nn.Module.__getattr__(model, self._name)


def _definition(model: nn.Module, name: str) -> Any:
    """Return the model's or its class's own definition of a name; None if torch's is all there is."""
    if any(name in held for held in (vars(model), model._parameters, model._buffers, model._modules)):
        return _OwnAttribute(name)
    found = inspect.getattr_static(type(model), name, None)
    return None if found is vars(nn.Module).get(name) else found


def _check_pickled(policy: Policy) -> None:
    """Raise TypeError for a part of a policy without a pickle."""
    for part in parts_of(policy):
        try:
            pickle.dumps(part)
        except (pickle.PicklingError, AttributeError, TypeError) as err:
            source = f" ({part.source})" if isinstance(part, Rule) and part.source else ""
            raise TypeError(
                f"the policy of this model cannot be pickled: {part!r}{source}: {err}. Functions at the top level of a "
                "module can; or save model.state_dict() and gr.state_dict(model) instead, and transform the model anew"
            ) from err


def _settings(model: nn.Module) -> tuple[Any, ...]:
    state = _state(model)
    return state.config, state.compile_options, state.is_compiled, STATE in vars(model)


def _empty(cls: type[_Module]) -> _Module:
    return object.__new__(cls)


def _fill_in_place(model: nn.Module, state: tuple[nn.Module, tuple[Any, ...]]) -> None:
    original, settings = state
    object.__setattr__(model, "__dict__", vars(original))
    _rebuild(model, settings)


def _rebuild(original: nn.Module, settings: tuple[Any, ...]) -> RewrittenModule:
    config, options, is_compiled, inplace = settings
    vars(original).pop(STATE, None)
    model = _rewritten(original, config, Monitor(), inplace=inplace)
    if is_compiled:
        _state(model).compile(options)
    return model


def shown(graph: JointGraph, model: nn.Module) -> JointGraph:
    """Return a graph with the name of its model's class, and its page for notebooks."""
    return replace(graph, name=type(model).__name__, to_html=_page)


def _page(graph: JointGraph) -> str:
    from gradrewrite.viz import draw  # matplotlib and networkx are imported when a notebook shows a graph

    return draw(graph, "overview")._repr_html_()
