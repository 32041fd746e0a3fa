"""One graph on its way through the compiler."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, dynamo, inductor
from gradrewrite.backends.explanation import GraphReport
from gradrewrite.backends.runtime_wrapper import _ACCUMULATED, _AGAIN, _Accumulation
from gradrewrite.backends.session import Session
from gradrewrite.diagnostics.step_snapshot import Forwards, names_of_outputs
from gradrewrite.errors import NotRewrittenError, RewriteError
from gradrewrite.ir import editing
from gradrewrite.ir.inputs import Given, Leaf
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.record_layout import Carried
from gradrewrite.ir.values import Value
from gradrewrite.policy.actions import GroupAction
from gradrewrite.rewriting.rewrite import rewrite, show

Runnable = Callable[..., Any]


class Traced(BaseException):  # not an Exception: torch wraps those
    """Ends a trace: carries the graph, or the error that stopped it."""

    def __init__(self, result: JointGraph | RewriteError) -> None:
        """Keep the result."""
        super().__init__()
        self.result = result


@dataclass
class Job:
    """One graph on its way through the compiler."""

    session: Session
    frame: str
    is_whole: bool
    leaves: Mapping[int, Leaf]
    given: Mapping[int, Given]
    is_compiled: bool
    is_last: bool
    ranks: tuple[str, int] = ("", 1)
    values: Sequence[Value] = ()
    carried: Carried = field(default_factory=Carried)
    live: Mapping[str, Tensor] = field(default_factory=dict)
    clipped: list[weakref.ref[Tensor]] = field(default_factory=list)
    copies: bool = False
    is_cacheable: bool = True
    returned: Collection[int] = ()
    forwards: Forwards | None = None

    def rewrite(self, graph: fx.Graph) -> None:
        """The pass: rewrite the joint graph (a graph without gradients only loses its markers)."""
        if not aot_autograd.gradient_outputs(graph):
            editing.erase_markers(graph)  # no backward, or the body of a higher-order op
            return
        scale = self.session.loss_scale
        scale_of = None if scale is None else scale.on
        values, leaves, policy = self.values, self.leaves, self.session.policy
        result = rewrite(graph, values, leaves, policy, given=self.given, scale_of=scale_of, is_last=self.is_last)
        self.carried, self.live, self.is_cacheable = result.carried, result.live, not result.assumes
        assert graph.owning_module is not None
        shown = JointGraph(graph.owning_module, result.sites, result.edits, result.carriers)
        dynamo.note_artifact("gradrewrite_joint_graph", lambda: str(shown))
        if result.recipe is not None:
            if self.is_compiled and result.recipe.is_random:
                inductor.replace_random(result.recipe.graph)
            self.forwards = Forwards(result.recipe)
        lost = tuple(site for site, _ in result.out_of_reach)
        self.session.graphs.append(GraphReport(self.frame, self.is_whole, result.sites, result.edits, lost))
        for site, actions in result.out_of_reach:
            self.session.note_out_of_reach(site, actions)
        returned = {self.leaves[position].name for position in self.returned if position in self.leaves}
        for edit_ in result.edits:
            if edit_.site.kind in ("gradient", "input") and edit_.site.name in returned:
                self.session.say_once(f"returned {edit_.site}", _RETURNED.format(edit_.site))
        grouped = {e.site.name for e in result.edits if isinstance(e.action, GroupAction)}
        self.clipped = [leaf.ref for leaf in self.leaves.values() if leaf.ref is not None and leaf.name in grouped]
        if result.carried.groups and not self.is_whole:
            self.session.say_once(
                "part",
                f"{', '.join(result.carried.groups)}: the global clip sees only the gradients of one part of the model "
                f"({self.frame}: {len(self.clipped)} parameters), because a graph break splits it; it clips each part "
                "by itself. Remove the break, or use fullgraph=True to find it",
            )

    def show(self, graph: fx.Graph) -> None:
        """The pass of a trace: rewrite, then stop everything."""
        assert graph.owning_module is not None
        if not aot_autograd.gradient_outputs(graph):
            editing.erase_markers(graph)
            return
        try:
            scale = self.session.loss_scale
            scale_of = None if scale is None else scale.on
            values, leaves, policy = self.values, self.leaves, self.session.policy
            joint, out_of_reach = show(graph.owning_module, values, leaves, policy, given=self.given, scale_of=scale_of)
            for site, actions in out_of_reach:
                self.session.note_out_of_reach(site, actions)
            self.session.check_rules_on(joint.sites)
        except RewriteError as err:
            raise Traced(err) from None
        raise Traced(joint)

    def partition(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], *, inner: Runnable, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Carry what is held through the partitioner as outputs of the backward."""
        count = editing.release(gm.graph)
        forward, backward = inner(gm, joint_inputs, **kwargs)
        if count:
            editing.hold_last(backward.graph, count)
            backward.recompile()
        aot_autograd.refuse_compiled_autograd(backward, _compiled_autograd)
        return forward, backward

    def compile_forward(self, compile_graph: Runnable, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """Compile the forward; where something is checked, remember what each run was given."""
        if self.forwards is not None and not self.forwards.fits(gm):
            self.forwards = None  # torch gave the forward inputs of its own: what fails is said by the checks alone
        forwards = self.forwards
        names = names_of_outputs(gm)
        compiled = compile_graph(gm, inputs)
        if forwards is None:
            return cast(Runnable, compiled)

        def run(args: list[Any]) -> Any:
            begun = forwards.begin(args)
            outputs = compiled(args)
            forwards.end(begun, names, outputs)
            return outputs

        return aot_autograd.boxed(run)

    def compile_backward(self, compile_graph: Runnable, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """Compile the backward with its extra outputs and live inputs, and take both off where it runs."""
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        count = editing.release(gm.graph)
        lifted = editing.lift_live(gm)
        gm.recompile()
        compiled = compile_graph(gm, [*inputs, *(fake for _, fake in lifted)])
        tensors = [self.live[name] for name, _ in lifted]
        carried, session, watch = self.carried, self.session, _Accumulation(self.clipped)
        forwards = self.forwards
        owned = [leaf.ref for leaf in self.leaves.values() if leaf.ref is not None]
        if forwards is not None:
            forwards.note_saved(names)

        def run(args: list[Any]) -> Any:
            if not session.has_model:
                session.check_rules()
                session.check_ranks(*self.ranks)
                session.say_now()
            if carried.groups and watch.is_accumulating():
                session.say_once("accumulated", _ACCUMULATED.format(", ".join(carried.groups)))
                session.say_now()
            witness = forwards.witness(dict(zip(names, args, strict=False))) if forwards is not None else None
            if session.loss_scale is not None:
                session.loss_scale.update()
            args.extend(tensors)
            outputs = compiled(args)
            if not count:
                return outputs
            packs, kept = outputs[-count:][: len(carried.packs)], outputs[-count:][len(carried.packs) :]
            # What is kept may be a gradient itself, which belongs to autograd; a CUDA graph overwrites all of it.
            extras = [*(t.clone() if self.copies else t for t in packs), *(t.clone() for t in kept)]
            again = session.monitor.collect(carried, extras, witness, owned)
            if again and self.is_whole:
                session.say_once("again", _AGAIN.format(", ".join(again)))
                session.say_now()
            watch.note_at_end()
            return outputs[:-count]

        return aot_autograd.boxed(run)


def _compiled_autograd() -> NotRewrittenError:
    return NotRewrittenError(
        "compiled autograd takes the backward graph apart and compiles it anew: checks, guards, records and live "
        "thresholds of the policy would be lost. Switch it off for this backward: torch._dynamo.config."
        "compiled_autograd = False, or call backward() outside of torch._dynamo.compiled_autograd's context manager"
    )


_RETURNED = (
    "{}: the model returns this tensor, itself or as a view; what the caller's use of it adds to the gradient comes "
    "after the actions. Return a copy (.clone()) to have all of it in the graph"
)
