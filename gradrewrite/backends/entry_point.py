"""The compiled function around a model: its code object, and torch's refusals."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from gradrewrite._compat import data_parallel, dynamo, dynamo_cache
from gradrewrite._utils.progress import show_progress
from gradrewrite._utils.tensors import tensors_in
from gradrewrite.backends.module_hooks import calls_shown
from gradrewrite.backends.region_calls import RegionCall, running_module
from gradrewrite.backends.session import Session
from gradrewrite.backends.tracing_errors import explained
from gradrewrite.errors import GraphBreakError, NotRewrittenError
from gradrewrite.policy.sampling import Measured

_counter = itertools.count()  # Dynamo keys its profiles by the names of functions

Compiler = Callable[..., Any]


class _WeakBackend:
    """A weak reference to a backend; torch may keep it longer than its model lives."""

    __name__ = "gradrewrite"

    def __init__(self, backend: Compiler) -> None:
        self._ref = weakref.ref(backend)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        backend = self._ref()
        assert backend is not None  # the entry, through which alone compiled code is called, holds it
        return backend(gm, example_inputs, **kwargs)


class EntryPoint:
    """The compiled function around a model.

    It has a code object of its own: torch counts compilations by code object, and at the ninth transform of a class
    would run the plain model. ``backend`` gives the backend for steps with these measurements, each of which has a
    compiled function of its own. ``evaluating_backend`` compiles for calls that no backward follows: in parts, if it
    must.
    """

    def __init__(
        self,
        session: Session,
        backend: Callable[[Measured], Compiler],
        evaluating_backend: Compiler,
        model: nn.Module,
        options: Mapping[str, Any],
        method: str = "forward",  # a call of the module, with its hooks
        *,
        runs_hooks: bool = True,  # False where they have run already
        is_region: bool = False,  # ``model`` is one of the modules that share this entry point
        function: Callable[..., Any] | None = None,  # of the model and the arguments, instead of a method
    ) -> None:
        self._model = model
        self._fullgraph = session.config.fullgraph
        self._method = method
        self._runs_hooks = runs_hooks
        self._is_region = is_region
        self._own_function = function
        self._module: Callable[[], nn.Module | None] = running_module if is_region else weakref.ref(model)
        self._session, self._backend, self._backends = session, backend, [evaluating_backend]
        self._settings = {"dynamic": session.config.dynamic, **options}
        self._evaluating = self._compile(evaluating_backend, fullgraph=False)
        self._compiled: dict[tuple[Measured, int], dynamo_cache.CompiledFunction] = {}
        self._values = 0  # number of the set of Python values that it compiles for
        self._live_forms = session.live_forms.number()  # for which it compiles
        self._function("all")
        self._refusal = ("", "")  # text and code of the error, where the model cannot be one graph without a backward

    def _function(self, measured: Measured) -> dynamo_cache.CompiledFunction:
        """Return the compiled function for these measurements and the present Python values; made lazily."""
        key = (measured, self._values)
        if key not in self._compiled:
            self._backends.append(self._backend(measured))
            self._compiled[key] = self._compile(self._backends[-1], fullgraph=self._fullgraph)
        return self._compiled[key]

    def _compile(self, backend: Compiler, *, fullgraph: bool) -> dynamo_cache.CompiledFunction:
        name = f"gradrewrite_entry_{next(_counter)}"
        self._session.entry_frames[name] = self._method
        function, shown = self._fresh_function(name, fullgraph), partial(calls_shown, self._module)
        settings = {**self._settings, "fullgraph": fullgraph}
        compiled = dynamo_cache.CompiledFunction(function, _WeakBackend(backend), settings, shown)
        weakref.finalize(self, compiled.drop).atexit = False
        return compiled

    def _fresh_function(
        self, name: str, fullgraph: bool
    ) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
        session, method = self._session, self._method

        def call_method(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return getattr(model, method)(*args, **kwargs)

        run = call_method
        if method == "forward":
            run = _call_forward if not self._runs_hooks else _call_region if self._is_region else _call

        def fn(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.compiler.is_compiling():
                _runs_plain(session, fullgraph, (model, args, kwargs))
            return run(model, *args, **kwargs)

        gradrewrite_step = self._own_function  # by this name modules that it holds are known as none of the model's

        def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.compiler.is_compiling():
                _runs_plain(session, fullgraph, (model, args, kwargs))
            assert gradrewrite_step is not None
            return gradrewrite_step(model, *args, **kwargs)

        fn = fn if gradrewrite_step is None else step
        code = fn.__code__.replace(co_name=name)
        return types.FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module | None = None) -> Any:
        """Call the model, or one of the modules that share the entry point."""
        model = self._model if model is None else model
        self._session.recorder.note_forward()
        has_backward = torch.is_grad_enabled()
        if self._fullgraph:  # which refuses; a tensor that may_have_backward does not know is then told by the result
            has_backward = may_have_backward(model, args, kwargs)
        if not has_backward:
            return self._evaluate(model, args, kwargs)
        return self.train(args, kwargs, model)

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module | None = None) -> Any:
        """Call the model for a backward."""
        model = self._model if model is None else model
        self._session.begun.add(self._method)
        self._follow_live_forms()
        self._values = self._session.values.number()
        measured = self._session.sampling.begin()
        compiled = self._compiled.get((measured, self._values))
        if compiled is not None:
            return self._run(compiled, model, args, kwargs)
        with show_progress("compile", "a second graph"):
            return self._run(self._function(measured), model, args, kwargs)

    def _follow_live_forms(self) -> None:
        """Compile anew after a change of dtype, device or sizes of closed-over tensors."""
        number = self._session.live_forms.number()
        if number != self._live_forms:
            self._live_forms = number
            for compiled in self._compiled.values():
                compiled.drop()
            self._compiled.clear()
            del self._backends[1:]

    def is_split(self, regions: Collection[RegionCall]) -> bool:
        """Whether a graph break splits the code of these regions: when a graph of it runs, others may have run."""
        names = set(map(str, regions))
        return any(graph.region in names and not graph.is_whole for graph in self._session.graphs)

    def _evaluate(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model where no backward follows: there a graph break is no reason to refuse."""
        refusal = self._refusal
        if self._fullgraph and not any(refusal):
            try:
                return self._run(self._function("all"), model, args, kwargs)
            except GraphBreakError as err:  # which is not kept: it holds on to the inputs
                self._refusal = refusal = err.text, err.code
            except NotRewrittenError as err:
                refusal = err.text, err.code
        result = self._run(self._evaluating, model, args, kwargs)
        if self._fullgraph and makes_gradients(result, (args, kwargs)):
            text, code = refusal
            raise GraphBreakError(text, code=code)  # the model itself has switched gradients on
        return result

    def _run(self, compiled: Compiler, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with data_parallel.whole_graphs():
                return compiled(model, args, kwargs)
        except (*dynamo.TRACING_ERRORS, RuntimeError) as err:
            error = explained(err, model, self._method, args, kwargs)
            if error is err:
                raise
            raise error from (None if isinstance(error, TypeError) else err)


def _call(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _call_region(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return nn.Module._call_impl(model, *args, **kwargs)  # its __call__ would lead to the region's entry again


def _call_forward(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return type(model).forward(model, *args, **kwargs)


def _runs_plain(session: Session, fullgraph: bool, call: Any) -> None:
    """Refuse, or warn, where torch runs the plain model and a backward could follow."""
    if not may_have_backward(*call):
        return
    text = (
        "torch runs the plain model, so the policy does not hold (torch.compiler.disable, a stance, "
        "TORCH_COMPILE_DISABLE, or the recompile limit)"
    )
    if fullgraph:
        raise NotRewrittenError(f"{text}; lift it, or pass fullgraph=False to run without the policy")
    session.warnings.warn_once("plain", text)


def may_have_backward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a backward could follow a call: gradients are on, and a parameter or an input needs one."""
    if not torch.is_grad_enabled():
        return False
    # This stops at the first one, where ``parameters()`` begins with a list of all.
    is_trainable = any(p is not None and p.requires_grad for m in model.modules() for p in m._parameters.values())
    return is_trainable or any(t.requires_grad for t in tensors_in((args, kwargs)))


def makes_gradients(result: Any, inputs: Any) -> bool:
    """Return whether a backward can begin at a call's result, in any mode of the call."""
    given = {id(t) for t in tensors_in(inputs)}
    return any(t.grad_fn is not None and id(t) not in given for t in tensors_in(result))
