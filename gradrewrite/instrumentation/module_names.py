"""Names of modules, parameters and inputs, found by object identity."""

from __future__ import annotations

import contextlib
import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from gradrewrite._compat import dynamo
from gradrewrite.sites import Pattern, Site

STEP = "gradrewrite_step"  # the method that is the loss of a batch, where model and loss are one graph
_ROOT = re.compile(r"([LG])\[(['\"])(.+?)\2\]")
_STEP = re.compile(r"\.([^\W\d]\w*|\d+)|\[(\d+)\]|\[(['\"])(.+?)\3\]")


class ModuleNames:
    """Names known to one policy: those of its model, or of the modules that its frames have reached.

    With a model the names are those of ``model.named_modules()`` and ``model.named_parameters()``. Without
    one (``gr.backend``) the roots are found in the locals and globals of the compiled frame; several roots
    in one frame are told apart by their variables.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._has_model = model is not None
        self._roots: list[tuple[str, weakref.ref[nn.Module]]] = [("", weakref.ref(model))] if model is not None else []
        self._scopes: Mapping[str, Mapping[str, Any]] = {}
        self.modules: dict[int, str] = {}
        self.parameters: dict[int, str] = {}
        self.buffers: dict[int, str] = {}

    @property
    def roots(self) -> list[nn.Module]:
        """The existing modules at the roots of names."""
        return [root for _, root in self._prefixed_roots()]

    def _prefixed_roots(self) -> Iterator[tuple[str, nn.Module]]:
        for prefix, ref in self._roots:
            root = ref()
            if root is not None:
                yield prefix, root

    @contextlib.contextmanager
    def in_frame(self, gm: fx.GraphModule, local: Mapping[str, Any], global_: Mapping[str, Any]) -> Iterator[None]:
        """Find the roots of a frame in its variables, and read all names again: modules may have come and gone.

        Behind the block the variables, and so the model, are dropped; the names are kept.
        """
        self._scopes = {"L": local, "G": global_}
        self._read()
        if not self._has_model:
            self._add_roots(_paths(gm))
        try:
            yield
        finally:
            self._scopes = {}

    def is_function(self, key: str, path: str) -> bool:
        """Whether an entry of ``nn_module_stack`` is no module of the model but a global of a file, or of a loss."""
        scope, steps = _steps(path)
        return (scope == "G" or STEP in steps) and self._find(key, path) is None

    def module(self, key: str, path: str) -> str:
        """Name of the module behind one entry of ``nn_module_stack``; its path where it is unknown."""
        found = self._find(key, path)
        return ".".join(_steps(path)[1]) if found is None else found

    def _find(self, key: str, path: str) -> str | None:
        identity = key.partition("@")[0]
        if identity.isdecimal() and int(identity) in self.modules:
            return self.modules[int(identity)]
        found = self._walk(path, through=True)
        return None if found is None else self.modules.get(id(found[0]))

    def all_modules(self) -> Iterator[nn.Module]:
        """Every named module."""
        for root in self.roots:
            yield from root.modules()

    def known_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the roots by their first names."""
        found: dict[str, Tensor] = {}
        for prefix, root in self._prefixed_roots():
            for name, parameter in root.named_parameters(prefix=prefix):
                found.setdefault(name, parameter)
        return found

    def first_names(self, pattern: Pattern) -> set[str]:
        """Return first names of modules and parameters with a matching second (shared, tied)."""
        found = set()
        for prefix, root in self._prefixed_roots():
            for name, module in root.named_modules(prefix=prefix, remove_duplicate=False):
                if pattern.matches(Site(pattern.kind or "error", name, output_of=(name,))):
                    found.add(self.modules[id(module)])
            for name, parameter in root.named_parameters(prefix=prefix, remove_duplicate=False):
                if pattern.matches(Site(pattern.kind or "error", name, output_of=(name,))):
                    found.add(self.parameters[id(parameter)])
        return found

    def _read(self) -> None:
        self.modules, self.parameters, self.buffers = {}, {}, {}
        self._roots = [(prefix, ref) for prefix, ref in self._roots if ref() is not None]
        for prefix, root in self._prefixed_roots():
            for name, module in root.named_modules(prefix=prefix):
                self.modules.setdefault(id(module), name)
            for name, parameter in root.named_parameters(prefix=prefix):
                self.parameters.setdefault(id(parameter), name)
            for name, buffer in root.named_buffers(prefix=prefix):
                self.buffers.setdefault(id(buffer), name)

    def _add_roots(self, paths: list[str]) -> None:
        new: dict[int, tuple[str, nn.Module]] = {}
        shares_frame = False
        for path in paths:
            found = self._walk(path, through=False)
            if found is None or (_steps(path)[0] == "G" and next(found[0].parameters(), None) is None):
                continue  # also an activation function, which is a global of a file
            if id(found[0]) in self.modules:
                shares_frame = True
            else:
                new.setdefault(id(found[0]), (found[1], found[0]))
        alone = len(new) == 1 and not shares_frame
        self._roots += [("" if alone else variable, weakref.ref(root)) for variable, root in new.values()]
        if new:
            self._read()

    def _walk(self, path: str, *, through: bool) -> tuple[nn.Module, str] | None:
        """Follow a Dynamo path to its first module, or through all of it; with the variable's name."""
        scope, steps = _steps(path)
        value: Any = self._scopes.get(scope, {})
        last = ""
        for step in steps:
            if isinstance(value, nn.Module) and not through:
                break
            try:
                value = _get(value, step)
            except (AttributeError, KeyError, IndexError, TypeError, ValueError):
                return None
            last = step
        return (value, last) if isinstance(value, nn.Module) else None


class InputNames:
    """Names of a model's inputs: those of the arguments of its methods; without one, variables keep their own."""

    def __init__(self, model: nn.Module | None, methods: Sequence[str] = ("forward",)) -> None:
        self.known: set[str] = set()  # the arguments, and all inputs that were named
        self._positional: dict[str, tuple[list[str], str | None]] = {}
        for method in methods if model is not None else ():
            self.add(method, getattr(model, method))
        self.method = methods[0]  # whose frame is being compiled, or was last

    def add(self, method: str, function: Callable[..., Any]) -> None:
        """Read the signature of a method that is being compiled, or of the forward of a region, by its name."""
        self.method = method
        parameters = inspect.signature(function).parameters.values()
        arguments = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), None)
        self.known.update(arguments, (p.name for p in parameters if p.kind == p.KEYWORD_ONLY))
        self._positional[method] = arguments, rest

    def name(self, path: str) -> str:
        """Return the name of the input at a Dynamo path: ``x``, ``batch.mask``, ``xs.0``."""
        name = self._name(path)
        self.known.add(name)
        return name

    def _name(self, path: str) -> str:
        _, steps = _steps(path)
        arguments, rest = self._positional.get(self.method, ([], None))
        if not arguments and rest is None:
            return ".".join(steps)
        if steps[:1] == ["kwargs"] and len(steps) > 1:
            return ".".join(steps[1:])
        if steps[:1] == ["args"] and len(steps) > 1 and steps[1].isdecimal():
            index = int(steps[1])
            named = [*arguments[index : index + 1]] or [rest or "args", str(index - len(arguments))]
            return ".".join([*named, *steps[2:]])
        return ".".join(steps[1:] if steps[:1] == ["model"] else steps)


def _paths(gm: fx.GraphModule) -> list[str]:
    paths: dict[str, None] = {}
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            stack = node.meta.get("nn_module_stack")
            if stack:
                paths[next(iter(stack.values()))[0]] = None
            if node.op == "placeholder":
                paths[dynamo.source_name(node)] = None
    return list(paths)


def _steps(path: str) -> tuple[str, list[str]]:
    root = _ROOT.search(path)
    if root is None:
        return "", [path]
    steps = ["".join(match.group(1, 2, 4)[i] or "" for i in range(3)) for match in _STEP.finditer(path, root.end())]
    return root[1], [root[3], *(s for s in steps if s not in ("_modules", "_parameters", "_buffers"))]


def _get(value: Any, step: str) -> Any:
    if isinstance(value, nn.Module):
        return value._modules[step] if step in value._modules else getattr(value, step)
    if isinstance(value, Mapping):
        return value[step]
    return value[int(step)] if step.isdecimal() else getattr(value, step)
