"""Parameters with gradients from outside of the rewritten graphs, beyond the policy."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import FunctionType

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from gradrewrite._compat import autograd
from gradrewrite._utils.formatting import listed
from gradrewrite._utils.warnings import warn

_UNUSED = (
    "a backward reached {} of a {} that was given to gr.transform, but what gr.transform returned was never called and "
    "is gone, so that the policy holds nowhere: keep the result and call it, model = gr.transform(model, policy), or "
    "rewrite the object itself, gr.transform(model, policy, inplace=True)"
)


class GraphCoverage:
    """The last backward of a rewritten graph, for the parameters with gradients from it."""

    __slots__ = ("__weakref__", "task")

    def __init__(self, parameters: Sequence[weakref.ref[Tensor]]) -> None:
        self.task = -1  # number of the backward that ran the graph last; -1 before the first
        for ref in parameters:
            parameter = ref()
            if parameter is not None:
                _hook_of(parameter).add_graph(self)

    def note(self) -> None:
        """Record the number of the running backward."""
        self.task = autograd.backward_id()


class _ParameterHook:
    """The hook on one parameter; it runs after its gradient is accumulated."""

    def __init__(self) -> None:
        self.watches: list[weakref.ref[ParameterWatch]] = []
        self.kept: list[ParameterWatch] = []  # those of models that are gone
        self._graphs: list[weakref.ref[GraphCoverage]] = []
        self._handle: RemovableHandle | None = None

    def add_graph(self, graph: GraphCoverage) -> None:
        self._graphs = [ref for ref in self._graphs if ref() is not None] + [weakref.ref(graph)]

    def add_watch(self, watch: ParameterWatch, parameter: Tensor) -> None:
        self.watches.append(weakref.ref(watch))
        if self._handle is None:
            self._handle = parameter.register_post_accumulate_grad_hook(self)

    def remove_watch(self, watch: ParameterWatch | None) -> None:
        """Remove one watch and those that are gone; without any, the parameter has no hook."""
        self.kept = [known for known in self.kept if known is not watch]
        self.watches = [ref for ref in self.watches if ref() is not None and ref() is not watch]
        if not self.watches and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, parameter: Tensor) -> None:
        if _own_backwards:
            return
        task = autograd.backward_id()
        for ref in self._graphs:
            graph = ref()
            if graph is not None and graph.task == task:
                return
        for watch in [known() for known in self.watches]:
            if watch is not None:
                watch.note_outside(parameter)


_own_backwards: list[object] = []  # blocks that are open; hooks of a device run on threads of their own


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Let backwards of plain models pass inside the block: they are ours."""
    block = object()
    _own_backwards.append(block)
    try:
        yield
    finally:
        _own_backwards.remove(block)


_hooks: MutableMapping[Tensor, _ParameterHook] = WeakIdKeyDictionary()


def _hook_of(parameter: Tensor) -> _ParameterHook:
    return _hooks.setdefault(parameter, _ParameterHook())


def has_other_hook(parameter: Tensor) -> bool:
    """Whether a parameter has a hook that is not a watch of ours."""
    hooks = [*(parameter._backward_hooks or {}).values(), *(_after_accumulation(parameter) or {}).values()]
    return any(not isinstance(hook, _ParameterHook) for hook in hooks)


def _after_accumulation(parameter: Tensor) -> Mapping[int, object] | None:
    hooks: Mapping[int, object] | None = parameter._post_accumulate_grad_hooks
    return hooks


class ParameterWatch:
    """Detect the first backward that reaches parameters of a model through none of its rewritten graphs.

    A submodule that is called directly, a method without an entry point, and the plain module do that. Until then each
    parameter that needs a gradient has a hook (``register_post_accumulate_grad_hook``).
    """

    def __init__(
        self,
        model: nn.Module,
        report: Callable[[nn.Module, list[str]], None],
        parameters: Callable[[], Iterable[Tensor]] | None = None,  # that are watched; None for all of the model
    ) -> None:
        self._model = weakref.ref(model)
        self._report = report  # called at the end of that backward, with the names of the parameters
        self._parameters = parameters
        self._outside: set[int] = set()
        self.hooks: list[_ParameterHook] = []  # it is on
        self._is_over = False
        self.refresh()
        weakref.finalize(self, _remove_watch, self.hooks).atexit = False

    def refresh(self) -> None:
        """Watch the current parameters that need a gradient."""
        model = self._model()
        if model is None or self._is_over:
            return
        known = set(map(id, self.hooks))
        for parameter in model.parameters() if self._parameters is None else self._parameters():
            if not parameter.requires_grad or not parameter.is_leaf or is_lazy(parameter):
                continue
            hook = _hook_of(parameter)
            if id(hook) not in known:
                hook.add_watch(self, parameter)
                self.hooks.append(hook)

    def remove(self) -> None:
        """Take the hooks off, for good."""
        self._is_over = True
        _remove_watch(self.hooks, self)
        self.hooks.clear()

    def note_outside(self, parameter: Tensor) -> None:
        """Record a parameter with a gradient from outside of the rewritten graphs."""
        if not self._outside:
            autograd.at_end_of_backward(self._end)
        self._outside.add(id(parameter))

    def _end(self) -> None:
        found, self._outside = self._outside, set()
        model = self._model()
        names = [name for name, p in model.named_parameters() if id(p) in found] if model is not None else []
        if model is not None and names:  # others were replaced since
            self.remove()
            self._report(model, names)


class UseOfModel:
    """Detection of unused rewritten models: a backward of the plain one warns."""

    def __init__(self, plain: nn.Module) -> None:
        """Watch the life of this object, a part of the rewritten model."""
        self._use = [False]
        weakref.finalize(self, _watch_unused, weakref.ref(plain), self._use).atexit = False

    def note(self) -> None:
        """The model is used."""
        self._use[0] = True


def _watch_unused(ref: weakref.ref[nn.Module], use: Sequence[bool]) -> None:
    model = ref()
    if model is None or use[0]:
        return
    watch = ParameterWatch(model, _warn_of_unused)
    for hook in watch.hooks:
        hook.kept.append(watch)  # nobody else holds it


def _warn_of_unused(model: nn.Module, names: Sequence[str]) -> None:
    warn(_UNUSED.format(listed(names), type(model).__name__))


def _remove_watch(hooks: Iterable[_ParameterHook], watch: ParameterWatch | None = None) -> None:
    for hook in hooks:
        hook.remove_watch(watch)


def methods_that_use(model: nn.Module, attributes: Sequence[str]) -> list[str]:
    """Return a model's own public methods, except ``forward``, that name an attribute."""
    own = type(model).__mro__[: type(model).__mro__.index(nn.Module)]
    functions = ((name, f) for cls in own for name, f in vars(cls).items() if isinstance(f, FunctionType))
    public = ((name, f) for name, f in functions if name != "forward" and not name.startswith("_"))
    return list(dict.fromkeys(name for name, f in public if not set(attributes).isdisjoint(f.__code__.co_names)))
