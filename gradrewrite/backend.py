"""The torch.compile backend: Inductor, or op by op, around the rewrite."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from gradrewrite import _torch, edit
from gradrewrite.errors import NoSuchSiteError, RewriteError, RewriteWarning, TraceError
from gradrewrite.joint import Edit, JointGraph
from gradrewrite.monitor import Monitor
from gradrewrite.names import Inputs, Names, user_line
from gradrewrite.policy import GroupAction, Policy, check_policy, rules_of
from gradrewrite.probes import Value, place, tracing
from gradrewrite.records import Carried
from gradrewrite.rewrite import Leaf, rewrite, show
from gradrewrite.sites import Pattern, Site
from gradrewrite.suggest import nearest

Engine = Literal["inductor", "op by op", "trace"]
Runnable = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One compiled graph that has a backward.

    Attributes:
        frame: Name of the compiled Python frame.
        is_whole: Whether the graph holds all that one call of the model does.
        sites: Its sites.
        edits: What was inserted.
    """

    frame: str
    is_whole: bool
    sites: tuple[Site, ...]
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was compiled and rewritten so far, and what the tracer skipped.

    Attributes:
        graphs: Every compiled graph with a backward, in order; a new input shape makes a new one.
        skipped: Lines at which the tracer gave up, with the reason; code that ran there was not rewritten.
    """

    graphs: tuple[GraphReport, ...]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        """A short report in plain text."""
        lines = [f"{len(self.graphs)} rewritten graphs, {len(self.skipped)} skipped regions"]
        for number, graph in enumerate(self.graphs):
            lines.append(f"graph {number} ({graph.frame}): {len(graph.sites)} sites, {len(graph.edits)} edits")
            lines += [f"  {edit.site}: {edit.action!r}" for edit in graph.edits]
        lines += [f"skipped: {line}" for line in self.skipped]
        return "\n".join(lines)


class Traced(BaseException):  # not an Exception: torch wraps those
    """Ends a trace: carries the graph, or the error that stopped it."""

    def __init__(self, result: JointGraph | RewriteError) -> None:
        """Keep the result."""
        super().__init__()
        self.result = result


class Session:
    """One policy at work: what it was asked, what was compiled, what has to be said once."""

    def __init__(self, policy: Policy, monitor: Monitor | None, model: nn.Module | None = None) -> None:
        """Begin with nothing compiled; PolicyError if ``policy`` is none."""
        check_policy(policy)
        self.policy = policy
        self.monitor = Monitor() if monitor is None else monitor
        self.model = model
        self.graphs: list[GraphReport] = []
        self.skipped: dict[str, None] = {}
        self.entry_name = ""
        self._names = Names(model)
        self._inputs = Inputs(model)
        self.said: set[str] = set()
        self._to_say: list[str] = []
        self._checked_rules = False

    def compile(
        self, gm: fx.GraphModule, inputs: Sequence[Any], engine: Engine, options: Mapping[str, Any]
    ) -> Runnable:
        """Compile one Dynamo graph; a policy's error becomes a callable that raises it when the graph runs."""
        broken = _torch.graph_break_of(gm)
        if broken is not None:
            self.note_skipped(f"{user_line(broken[1])}: {broken[0].splitlines()[0]}")
        needs_backward = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
        if not needs_backward:
            return _compile_plain(gm, inputs, engine, options)
        local, global_, frame = _torch.current_frame()
        self._names.enter_frame(gm, local, global_)
        is_whole = broken is None and (frame == self.entry_name or (self.model is None and not _is_resumed(frame)))
        job = _Job(self, frame, is_whole, self._leaves(gm, inputs, is_whole), place(gm, self._names))
        gm.recompile()
        try:
            with tracing(job.values):
                return _compile_rewritten(gm, inputs, engine, options, job)
        except RewriteError as err:
            return _raising(err)

    def _leaves(self, gm: fx.GraphModule, inputs: Sequence[Any], is_whole: bool) -> dict[int, Leaf]:
        leaves = {}
        for position, (node, tensor) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
            if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                continue
            name = self._names.parameter(tensor)
            if name is not None:
                leaves[position] = Leaf(True, name, weakref.ref(tensor))
            elif is_whole or tensor.is_leaf:  # behind a graph break, values of the graph before are no inputs
                source = getattr(node, "_dynamo_source", None)
                leaves[position] = Leaf(False, self._inputs.name(source.name if source else node.name), None)
        return leaves

    def explanation(self) -> Explanation:
        """What was compiled so far."""
        return Explanation(tuple(self.graphs), tuple(self.skipped))

    def note_skipped(self, line: str) -> None:
        """List a region that the tracer skipped, and say so once."""
        if line not in self.skipped:
            self.skipped[line] = None
            self.say_once(line, f"the tracer skipped a region, which the policy does not reach: {line}")

    def say_once(self, key: str, text: str) -> None:
        """Warn at the next safe moment, once for each key."""
        if key not in self.said:
            self.said.add(key)
            self._to_say.append(text)

    def say_now(self) -> None:
        """Warn of what has gathered."""
        while self._to_say:
            warnings.warn(self._to_say.pop(0), RewriteWarning, stacklevel=4)

    def check_rules(self) -> None:
        """Raise NoSuchSiteError for a rule that matched no site of any graph so far; once."""
        if self._checked_rules or not self.graphs:
            return
        sites = dict.fromkeys(site for graph in self.graphs for site in graph.sites)
        self.check_rules_on(sites)
        self._checked_rules = True

    def check_rules_on(self, sites: Sequence[Site] | Mapping[Site, None]) -> None:
        """Raise for the first rule that matches none of these sites, warn where its module made no value."""
        for rule in rules_of(self.policy):
            pattern = Pattern.parse(rule.pattern)
            if any(pattern.matches(site) for site in sites):
                continue
            names = {*self._names.modules.values(), *self._names.parameters.values()}
            silent = sorted(n for n in names if n and pattern.matches(Site(pattern.kind or "error", n)))
            if not silent:
                raise NoSuchSiteError(rule.pattern, nearest(rule.pattern, [str(s) for s in sites]))
            self.say_once(
                rule.pattern,
                f"{rule.pattern!r} matches {', '.join(silent[:3])}, which made no differentiable value "
                "(unused, frozen, or not a tensor): the rule does nothing",
            )


@dataclass
class _Job:
    """One graph on its way through the compiler."""

    session: Session
    frame: str
    is_whole: bool
    leaves: Mapping[int, Leaf]
    values: Sequence[Value]
    carried: Carried = field(default_factory=Carried)
    live: Mapping[str, Tensor] = field(default_factory=dict)
    clipped: list[weakref.ref[Tensor]] = field(default_factory=list)
    copies: bool = False

    def rewrite(self, graph: fx.Graph) -> None:
        """The pass: rewrite the joint graph (a graph without gradients only loses its markers)."""
        result = rewrite(graph, self.values, self.leaves, self.session.policy)
        self.carried, self.live = result.carried, result.live
        if result.sites:
            self.session.graphs.append(GraphReport(self.frame, self.is_whole, result.sites, result.edits))
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
        try:
            if not _torch.gradient_outputs(graph):
                raise TraceError("no output of the model depends on a parameter or an input that needs a gradient")
            joint = show(graph.owning_module, self.values, self.leaves, self.session.policy)
            self.session.check_rules_on(joint.sites)
        except RewriteError as err:
            raise Traced(err) from None
        raise Traced(joint)

    def partition(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], *, inner: Runnable, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Carry what is held through the partitioner as outputs of the backward."""
        count = edit.release(gm.graph)
        forward, backward = inner(gm, joint_inputs, **kwargs)
        if count:
            edit.hold_last(backward.graph, count)
            backward.recompile()
        return forward, backward

    def compile_backward(self, compile_graph: Runnable, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """Compile the backward with its extra outputs and live inputs, and take both off where it runs."""
        count = edit.release(gm.graph)
        lifted = edit.lift_live(gm)
        gm.recompile()
        compiled = compile_graph(gm, [*inputs, *(fake for _, fake in lifted)])
        tensors = [self.live[name] for name, _ in lifted]
        carried, session, watch = self.carried, self.session, _Accumulation(self.clipped)

        def run(args: list[Any]) -> Any:
            if session.model is None:
                session.check_rules()
                session.say_now()
            if carried.groups and watch.is_accumulating():
                session.say_once("accumulated", _ACCUMULATED.format(", ".join(carried.groups)))
                session.say_now()
            args.extend(tensors)
            outputs = compiled(args)
            if not count:
                return outputs
            extras = [t.clone() for t in outputs[-count:]] if self.copies else outputs[-count:]
            again = session.monitor.collect(carried, extras)
            if again and self.is_whole:
                session.say_once("again", _AGAIN.format(", ".join(again)))
                session.say_now()
            watch.note_at_end()
            return outputs[:-count]

        return _torch.boxed(run)


_ACCUMULATED = (
    "{}: gradients of an earlier backward were still in .grad; the global clip acts on the gradients of each backward "
    "by itself, not on their sum"
)
_AGAIN = (
    "{}: the model ran several times before this backward; the global clip acts on the gradients of each run by "
    "itself, not on their sum"
)


class _Accumulation:
    """Tells whether ``.grad`` holds gradients of an earlier backward, without reading them each time."""

    def __init__(self, parameters: Sequence[weakref.ref[Tensor]]) -> None:
        self._parameters = parameters
        self._versions: dict[int, int] = {}
        self._said = False

    def is_accumulating(self) -> bool:
        """True at most once. Gradients set to zero in place since (``set_to_none=False``) do not count."""
        if self._said:
            return False
        for ref in self._parameters:
            parameter = ref()
            grad = parameter.grad if parameter is not None else None
            if grad is None:
                continue
            known = self._versions.get(id(grad))
            # Unknown gradients are read, which happens once: from then on the version tells.
            self._said = bool(grad.count_nonzero()) if known is None else known == grad._version
            if self._said:
                return True
        return False

    def note_at_end(self) -> None:
        """Remember the gradients as this backward leaves them."""
        if self._parameters and not self._said:
            _torch.at_end_of_backward(self._note)

    def _note(self) -> None:
        grads = [p.grad for p in (ref() for ref in self._parameters) if p is not None and p.grad is not None]
        self._versions = {id(g): g._version for g in grads}


class Backend:
    """A torch.compile backend with a policy; made by ``gr.backend``."""

    def __init__(self, session: Session, engine: Engine) -> None:
        """Compile for a session."""
        self.session = session
        self.engine: Engine = engine
        self.__name__ = "gradrewrite"

    @property
    def monitor(self) -> Monitor:
        """What the backward reported."""
        return self.session.monitor

    def explain(self) -> Explanation:
        """What was compiled and rewritten so far, and what was skipped."""
        return self.session.explanation()

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Runnable:
        """Compile one graph of Dynamo, as torch.compile asks."""
        settings = {} if self.engine == "op by op" else _torch.inductor_options(mode, options)
        return self.session.compile(gm, example_inputs, self.engine, settings)


def backend(policy: Policy, *, monitor: Monitor | None = None) -> Backend:
    """Make a torch.compile backend that rewrites the backward, for people who call torch.compile themselves.

    Names are those of the module that is compiled; with several modules in one compiled function they begin
    with the variable (``gen.x``). A rule that matches nothing raises ``NoSuchSiteError`` from the first backward.
    torch.compile itself ignores hooks that are registered after the first call; ``gr.transform`` honours them.

    Args:
        policy: A callback, a rule, or a list of them.
        monitor: Where records go; a new ``Monitor`` if None.

    Returns:
        A backend with ``.monitor`` and ``.explain()``; ``mode`` and ``options`` of torch.compile are Inductor's.

    Raises:
        PolicyError: ``policy`` is none.

    Example:
        >>> import torch, gradrewrite as gr
        >>> from gradrewrite.passes import ClipByNorm
        >>> step = torch.compile(torch.nn.Linear(2, 2), backend=gr.backend(gr.on("gradient:*", ClipByNorm(1.0))))
    """
    return Backend(Session(policy, monitor), "inductor")


# The options are kept with the backend, so that no other options can get their id.
_registered: dict[int, tuple[Backend, Mapping[str, Any] | None]] = {}


def registered_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Runnable:
    """The backend that torch finds under the name ``gradrewrite``.

    ``torch.compile(f, backend="gradrewrite", options={"policy": ..., "monitor": ...})``; other options are Inductor's.
    Without a policy it compiles the plain backward.
    """
    rest = dict(options or {})
    policy, monitor = rest.pop("policy", []), rest.pop("monitor", None)
    if id(options) not in _registered:
        _registered[id(options)] = (backend(policy, monitor=monitor), options)
    return _registered[id(options)][0](gm, example_inputs, mode=mode, options=rest)


def _compile_plain(gm: fx.GraphModule, inputs: Sequence[Any], engine: Engine, options: Mapping[str, Any]) -> Runnable:
    if engine == "trace":
        raise Traced(TraceError("nothing here needs a gradient: no parameter and no input has requires_grad"))
    if engine == "op by op":
        return _torch.op_by_op(
            gm,
            inputs,
            partition=_torch.min_cut_partition,
            backward=lambda graph, _: _torch.box(graph),
            inference=lambda graph, _: _torch.box(graph),
        )
    return _torch.plain_inductor(gm, inputs, options=options)


def _compile_rewritten(
    gm: fx.GraphModule, inputs: Sequence[Any], engine: Engine, options: Mapping[str, Any], job: _Job
) -> Runnable:
    if engine == "op by op":
        return _compile_op_by_op(gm, inputs, job)
    if engine == "trace":
        joint_pass = job.show
    else:
        joint_pass = job.rewrite
        job.copies = _torch.uses_cuda_graphs(options)
    return _torch.inductor(
        gm, inputs, options=options, joint_pass=joint_pass, partition=job.partition, backward=job.compile_backward
    )


def _compile_op_by_op(gm: fx.GraphModule, inputs: Sequence[Any], job: _Job) -> Runnable:
    def partition(joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        job.rewrite(joint.graph)
        joint.graph.lint()
        joint.recompile()
        return job.partition(joint, joint_inputs, inner=_torch.min_cut_partition, **kwargs)

    def inference(graph: fx.GraphModule, _: Sequence[Any]) -> Any:
        job.rewrite(graph.graph)
        return _torch.box(graph)

    def backward(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return job.compile_backward(lambda g, _: _torch.box(g), graph, example_inputs)

    return _torch.op_by_op(gm, inputs, partition=partition, backward=backward, inference=inference)


def _is_resumed(frame: str) -> bool:
    return frame.startswith("torch_dynamo_resume_in_")


def _raising(error: RewriteError) -> Runnable:
    def run(*_: Any) -> Any:
        raise error

    return run
