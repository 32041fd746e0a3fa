"""Refusals of training steps that one graph cannot make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from gradrewrite._compat import data_parallel
from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite._utils.formatting import listed
from gradrewrite.backends.compilation import GraphCompilation
from gradrewrite.backends.model_state import ModelState
from gradrewrite.backends.parameter_watch import has_other_hook
from gradrewrite.errors import TraceError

_TWO_PHASES = "loss.backward(); optimizer.step(); optimizer.zero_grad()"


def refused(what: str, instead: str = "") -> TraceError:
    """Return the error for a step that two phases can make, with another way out in front of that."""
    way_out = f"{instead}, or train" if instead else "Train"
    return TraceError(f"gr.train_step: {what}. {way_out} in two phases: {_TWO_PHASES}", code="train-step")


def nothing_to_train() -> TraceError:
    """Return the error for a step without a gradient."""
    return TraceError(
        "gr.train_step: the loss depends on no parameter that needs a gradient, so there is no update",
        code="no-backward",
    )


def check_model(state: ModelState) -> None:
    """Raise TraceError for a model that is compiled in parts, or sharded."""
    if state.regions is not None:
        raise refused("each region of the model (regions=) is a graph of its own, and the step is one graph")
    modules = list(state.original.modules())
    if any(map(data_parallel.is_sharded, modules)) or any(map(is_dtensor, state.original.parameters())):
        raise refused("the parameters are spread over processes (FSDP2, tensor parallelism)")


def check_graph(compilation: GraphCompilation, model: nn.Module) -> None:
    """Raise TraceError for a part of a model's call, data parallelism around it, and hooks on parameters."""
    if not compilation.is_whole:
        raise refused(
            "a graph break splits the model, and the step is one graph", "Remove it (fullgraph=True finds it)"
        )
    around = compilation.parallelism
    if around.size > 1:
        raise refused(
            f"{around.name} averages gradients in hooks, which one graph never calls",
            'Train the model inside of it, with gr.on("gradient:*", AllReduce()) in its policy',
        )
    hooked = [name for name, p in model.named_parameters() if has_other_hook(p)]
    if hooked:
        raise refused(
            f"{listed(hooked)} {'has a hook' if len(hooked) == 1 else 'have hooks'} (register_hook, "
            "register_post_accumulate_grad_hook), which one graph never calls",
            'Put the function into the policy, gr.on("gradient:NAME", function)',
        )


def check_inputs(compilation: GraphCompilation, inputs: Sequence[Any]) -> None:
    """Raise TraceError for an input that another graph has computed with a gradient."""
    for n, given in compilation.inputs.items():
        tensor = inputs[n]
        if given.role != "parameter" and tensor.requires_grad and not tensor.is_leaf:
            raise refused(f"the input {given.name} has a history, so that its gradient goes on outside of the graph")
