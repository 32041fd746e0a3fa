"""The compiled function around a model: its own code object, and what torch refuses."""

from __future__ import annotations

import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from gradrewrite._compat import data_parallel, dynamo, dynamo_cache, nn_modules
from gradrewrite._tensors import tensors_in
from gradrewrite.backends.module_hooks import HookWatch, identities_shown
from gradrewrite.backends.session import Session
from gradrewrite.errors import GraphBreakError, NotRewrittenError
from gradrewrite.rewriting.source_locations import user_line

_counter = itertools.count()  # Dynamo keys its profiles by the names of functions

Compiler = Callable[..., Any]


class _WeakBackend:
    """A backend as torch gets it: torch may keep it for longer than its model lives."""

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
    would run the plain model.
    """

    def __init__(
        self,
        session: Session,
        backend: Compiler,
        evaluating_backend: Compiler,
        model: nn.Module,
        options: Mapping[str, Any],
    ) -> None:
        """Compile a model.

        Args:
            session: Has the configuration.
            backend: Compiles its graphs.
            evaluating_backend: Compiles them for calls that no backward follows: in parts, if it must be.
            model: The model.
            options: Further arguments of ``torch.compile``.

        Raises:
            TypeError: ``torch.compile`` does not take one of the options.
        """
        self._model = model
        self._fullgraph = session.config.fullgraph
        self._hooks = HookWatch(model)
        session.entry_name = f"gradrewrite_entry_{next(_counter)}"
        self._session, self._backends = session, (backend, evaluating_backend)
        settings = {**options, "dynamic": session.config.dynamic}
        self._compiled = self._compile(backend, {**settings, "fullgraph": self._fullgraph})
        self._evaluating = self._compile(evaluating_backend, {**settings, "fullgraph": False})
        self._refusal = ""  # why the model cannot be one graph where it has no backward

    def _compile(self, backend: Compiler, settings: Mapping[str, Any]) -> dynamo_cache.CompiledFunction:
        compiled = dynamo_cache.CompiledFunction(
            _fresh_function(self._session, bool(settings["fullgraph"])),
            _WeakBackend(backend),
            settings,
            partial(identities_shown, weakref.ref(self._model)),
        )
        weakref.finalize(self, compiled.drop).atexit = False
        return compiled

    def is_stale(self) -> bool:
        """Whether hooks have changed since the model was compiled."""
        return self._hooks.have_changed()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model.

        Raises:
            TypeError: The model's own, for arguments that it does not take.
            GraphBreakError: The tracer cannot see the whole model, and a backward could follow.
            NotRewrittenError: Torch would run the plain model.
        """
        has_backward = torch.is_grad_enabled()
        if self._fullgraph:  # which refuses; a tensor that may_have_backward does not know is then told by the result
            has_backward = may_have_backward(self._model, args, kwargs)
        return self._run(self._compiled, args, kwargs) if has_backward else self._evaluate(args, kwargs)

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model where no backward follows: there a graph break is no reason to refuse."""
        refusal = self._refusal
        if self._fullgraph and not refusal:
            try:
                return self._run(self._compiled, args, kwargs)
            except GraphBreakError as err:  # its text alone is kept: it holds on to the inputs
                self._refusal = refusal = str(err)
            except NotRewrittenError as err:
                refusal = str(err)
        result = self._run(self._evaluating, args, kwargs)
        if self._fullgraph and makes_gradients(result, (args, kwargs)):
            raise GraphBreakError(refusal)  # the model itself has switched gradients on
        return result

    def _run(self, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if data_parallel.is_inside_ddp():
                with data_parallel.whole_graphs():
                    return compiled(self._model, args, kwargs)
            return compiled(self._model, args, kwargs)
        except (dynamo.Unsupported, dynamo.UserError) as err:
            wrong = _wrong_arguments(self._model, args, kwargs)
            if wrong is not None:
                raise wrong from None
            raise _graph_break(err) from err
        except dynamo.FailOnRecompileLimitHit as err:
            raise NotRewrittenError(
                f"torch's recompile limit is reached, and the policy would not hold for this call: {err}. Raise "
                "torch._dynamo.config.recompile_limit, or let shapes be symbolic (dynamic=True)"
            ) from err


def _fresh_function(session: Session, fullgraph: bool) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    def entry(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling():
            _runs_plain(session, fullgraph, (model, args, kwargs))
        return model(*args, **kwargs)

    code = entry.__code__.replace(co_name=session.entry_name)
    return types.FunctionType(code, entry.__globals__, session.entry_name, entry.__defaults__, entry.__closure__)


def _runs_plain(session: Session, fullgraph: bool, call: Any) -> None:
    """Torch runs the plain model: refuse, or warn, where a backward could follow."""
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
    """Whether a backward could follow a call: gradients are on, and a parameter or an input needs one."""
    if not torch.is_grad_enabled():
        return False
    return _is_trainable(model) or any(t.requires_grad for t in tensors_in((args, kwargs)))


def _is_trainable(model: nn.Module) -> bool:
    """Whether a parameter needs a gradient; stops at the first, where ``parameters()`` begins with a list of all."""
    return any(p is not None and p.requires_grad for m in model.modules() for p in m._parameters.values())


def makes_gradients(result: Any, inputs: Any) -> bool:
    """Whether a backward can begin at what a call has made, whatever the mode in which it was called."""
    given = {id(t) for t in tensors_in(inputs)}
    return any(t.grad_fn is not None and id(t) not in given for t in tensors_in(result))


def _wrong_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError | None:
    """The error that the plain model raises for arguments that its forward does not take; None if it takes them."""
    if any(nn_modules.global_hooks()) or any(nn_modules.hooks_of(model)):
        return None  # a hook may change the arguments
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        try:
            model.forward(*args, **kwargs)
        except TypeError as err:
            return err
    return None


def _graph_break(err: Exception) -> GraphBreakError:
    line = user_line(dynamo.user_stack(err))
    where = f"{line}: " if line else ""
    paragraphs = str(err).strip().split("\n\n")
    detail = [p.strip() for p in paragraphs[1:] if "Developer debug context" in p]
    reason = " ".join(" ".join([paragraphs[0], *detail]).split())
    return GraphBreakError(
        f"{where}the tracer cannot follow this line, so the policy could not reach all of the model ({reason}). Change "
        "the line, or pass fullgraph=False: what is skipped is then listed in model.explain()"
    )
