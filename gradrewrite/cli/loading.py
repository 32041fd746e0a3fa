"""Loading of models, policies and inputs by ``module:name``."""

from __future__ import annotations

import inspect
import os
import pkgutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from gradrewrite._utils.formatting import nearest
from gradrewrite.cli.messages import Refused, one_line
from gradrewrite.errors import RewriteError, TraceError
from gradrewrite.policy.actions import Policy

if TYPE_CHECKING:
    from gradrewrite.ir.joint_graph import JointGraph


def load(spec: str, what: str) -> Any:
    """Return the object of ``module:name`` or ``module:name.attribute``.

    The current folder counts too. Refused, naming ``what`` it is, if the text has another form, the module cannot be
    imported, or has no such name.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise Refused(f"{what} is given as module:name, got {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        return pkgutil.resolve_name(spec)
    except ModuleNotFoundError as err:
        raise Refused(
            f"{what}: no module named {err.name!r}; run this where it can be imported, or set PYTHONPATH"
        ) from err
    except AttributeError as err:
        if module_name not in sys.modules:  # the module's own error
            raise _failed_import(what, module_name, err) from err
        known = nearest(str(err.name), [n for n in dir(err.obj) if not n.startswith("_")], count=3)
        raise Refused(
            f"{what}: {module_name!r} has no {name!r}; nearest: {', '.join(known) or 'it has no names'}"
        ) from err
    except Exception as err:
        raise _failed_import(what, module_name, err) from err


def _failed_import(what: str, module_name: str, err: Exception) -> Refused:
    return Refused(f"{what}: importing {module_name!r} failed: {one_line(err)}; import it in Python to see where")


def load_graph(factory: str, inputs: str, policy: str | None) -> JointGraph:
    """Make a model, and trace it with a policy; see ``load_and``."""
    graph: JointGraph = load_and("trace", factory, inputs, policy)
    return graph


def load_and(look: Literal["trace", "memory"], factory: str, inputs: str, policy: str | None) -> Any:
    """Make a model with a policy, and return the result of one of its methods.

    ``factory`` and ``inputs`` name the thing itself or what makes it when called: of inputs a tuple is the positional
    arguments, a dict the keyword arguments, anything else the only argument. Refused or RewriteError otherwise.
    """
    # Commands that only read files should not wait for the compiler to be imported.
    from gradrewrite.module import RewrittenModule, transform

    model = made(factory, "the model", nn.Module)
    if not isinstance(model, nn.Module):
        raise Refused(f"the model: {factory!r} made a {type(model).__name__}, wanted a torch.nn.Module")
    asked: Policy = load(policy, "the policy") if policy is not None else []
    given = made(inputs, "the input", (Tensor, tuple, Mapping))
    if isinstance(model, RewrittenModule):
        if policy is not None:
            raise Refused(f"the model: {factory!r} made a transformed model; leave out --policy, or give its original")
        rewritten = model
    else:
        rewritten = transform(model, asked)
    args = given if isinstance(given, tuple) else () if isinstance(given, Mapping) else (given,)
    kwargs = given if isinstance(given, Mapping) else {}
    signature = inspect.signature(rewritten.original.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as err:
        raise Refused(f"the input: {inputs!r} does not fit forward{signature}: {err}") from err
    try:
        return getattr(RewrittenModule, look)(rewritten, *args, **kwargs)  # the model may have such a name itself
    except TraceError as err:
        if err.__cause__ is None:  # it was traced, and has no backward
            raise
        raise Refused(f"{factory!r} cannot be traced with {inputs!r}: {one_line(err)}") from err
    except RewriteError:
        raise
    except Exception as err:
        said = one_line(err).partition(" Hint:")[0]  # torch goes on with links and lines of its own
        raise Refused(f"{factory!r} cannot be traced with {inputs!r}: {said}; call it in Python to see where") from err


def made(spec: str, what: str, ready: Any) -> Any:
    """Return the object of a spec, called if not ready."""
    found = load(spec, what)
    if isinstance(found, ready) or not callable(found):
        return found
    try:
        return found()
    except Exception as err:
        raise Refused(f"{what}: {spec}() raised {one_line(err)}; call it in Python to see where") from err
