"""Gradients that a forward computes of itself, by ``torch.autograd.grad``, while Dynamo traces."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from gradrewrite._compat.versions import needed_for

with needed_for("Dynamo's settings can be changed while one frame compiles"):
    from torch._dynamo import config as dynamo_config
with needed_for("one thread compiles at a time, under a lock"):
    from torch._dynamo.convert_frame import compile_lock
with needed_for("Dynamo has a handler of requires_grad_, and looks at what a graph returns"):
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables.tensor import TensorVariable

FIRST_VERSION = "2.12"  # of torch, whose Dynamo traces torch.autograd.grad and requires_grad_()
_CHECK = "_check_requires_grad_intermediate_outputs"
IS_KNOWN = hasattr(dynamo_config, "trace_autograd_ops") and hasattr(OutputGraph, _CHECK)
if IS_KNOWN:
    with needed_for("a frame is traced again with a graph break at requires_grad_"):
        from torch._dynamo.exc import RequiresGradRestartAnalysis

_OutputGraph: Any = OutputGraph
_GIVEN = "_gradrewrite_given"  # attribute of graphs of which an input began to need a gradient
_TensorVariable: Any = TensorVariable


@contextlib.contextmanager
def inner_gradients_traced() -> Iterator[None]:
    """Let Dynamo trace ``torch.autograd.grad`` inside the block, and ``requires_grad_()`` of tensors in a forward.

    By itself it refuses ``requires_grad_()`` of an input, and results that depend on a tensor which began to need a
    gradient inside of the graph: AOTAutograd forgets that. Of these only the tensor itself has to be refused; of what
    is computed from it, the gradients of parameters and inputs are as they are without the graph.

    torch's compile lock is held: no other thread traces meanwhile.
    """
    with contextlib.ExitStack() as stack:
        if not IS_KNOWN:
            yield
            return
        stack.enter_context(compile_lock)
        for owner, name, replacement in (
            (_TensorVariable, "method_requires_grad_", _requires_grad_from),
            (_TensorVariable, "call_method", _call_method_from),
            (_OutputGraph, _CHECK, _check_from),
            (_OutputGraph, "_validate_outputs_safe_for_autograd_nodes", _validate_from),
        ):
            plain = getattr(owner, name)
            setattr(owner, name, replacement(plain))
            stack.callback(setattr, owner, name, plain)
        stack.enter_context(dynamo_config.patch(trace_autograd_ops=True))
        yield


def _requires_grad_from(plain: Any) -> Any:
    def method_requires_grad_(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        wanted = requires_grad if isinstance(requires_grad, bool) else requires_grad.as_python_constant()
        fake = self.as_proxy().node.meta["example_value"]
        is_given = self.source and wanted and not fake.requires_grad and not isinstance(fake, torch.nn.Parameter)
        if is_given and not tx.speculation_log.graph_break_on_requires_grad_:
            # Behind this line the name means a tensor of the graph, which needs a gradient; the input stays as it is.
            setattr(tx.output, _GIVEN, True)
            inner = plain(self.call_method(tx, "detach", [], {}), tx, True)
            self.proxy, self.requires_grad = inner.proxy, True
            return self
        return plain(self, tx, requires_grad)

    return method_requires_grad_


def _call_method_from(plain: Any) -> Any:
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "requires_grad_":
            return self.method_requires_grad_(tx, *args, **kwargs)
        with contextlib.ExitStack() as stack:
            if name == "backward":  # which would drop create_graph=True
                stack.enter_context(dynamo_config.patch(trace_autograd_ops=False))
            return plain(self, tx, name, args, kwargs)

    return call_method


def _check_from(plain: Any) -> Any:
    def check(self: Any, rv: Any, tx: Any) -> None:
        reason = self.compile_subgraph_reason
        is_broken = reason is not None and reason.graph_break
        if is_broken and hasattr(self, _GIVEN):  # what follows would read the input as it was
            tx.speculation_log.graph_break_on_requires_grad_ = True
            raise RequiresGradRestartAnalysis(restart_reason="an input began to need a gradient before a graph break")
        if is_broken or not _has_gradients(self):
            plain(self, rv, tx)
            return
        leaves = {v.as_proxy().node for v in self.leaf_var_creation_order if isinstance(v, TensorVariable)}
        returned = [v for v in rv if isinstance(v, TensorVariable) and _is_view_of(v.as_proxy().node, leaves)]
        plain(self, returned, tx)

    return check


def _validate_from(plain: Any) -> Any:
    def validate(self: Any, rv: Any, tx: Any) -> None:
        if not torch.is_grad_enabled() and self.autograd_grad_consumed_grad_fns:
            # No backward follows, so that what the gradient has freed may be returned.
            for variable in rv:
                if isinstance(variable, TensorVariable) and variable.requires_grad:
                    variable.proxy = variable.call_method(tx, "detach", [], {}).as_proxy()
            return
        plain(self, rv, tx)

    return validate


def _has_gradients(output: Any) -> bool:
    """Whether a gradient is computed in a graph, or in the body of a checkpoint in it."""
    graphs = [output.graph, *(m.graph for m in output.nn_modules.values() if isinstance(m, fx.GraphModule))]
    return any(node.target is torch.autograd.grad for graph in graphs for node in graph.nodes)


def _is_view_of(node: fx.Node, leaves: Collection[fx.Node]) -> bool:
    """Whether a node is one of these tensors or a view of one."""
    if node in leaves:
        return True
    fake, fakes = node.meta.get("example_value"), [leaf.meta["example_value"] for leaf in leaves]
    return isinstance(fake, torch.Tensor) and any(fake is leaf or fake._base is leaf for leaf in fakes)
