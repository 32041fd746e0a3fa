"""The compilation of one Dynamo graph: probes, joint graph, rewrite, forward and backward."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, data_parallel, dynamo, dynamo_returns, fake_tensors, inductor
from gradrewrite._compat.dynamic_sizes import trace_again_with_symbols
from gradrewrite._compat.recurrent import with_time_steps
from gradrewrite._compat.scalar_tensors import written_scalars_kept
from gradrewrite._compat.tangents import overlapping_tangents_contiguous
from gradrewrite._utils.formatting import listed
from gradrewrite.backends.call_counts import PartOfForward
from gradrewrite.backends.code_cache import CachedRewrite, CacheKey, find_key, hash_of_answers
from gradrewrite.backends.engines import Engine, Runnable
from gradrewrite.backends.explanation import GraphReport
from gradrewrite.backends.graph_uses import GraphUses, grouped
from gradrewrite.backends.live_tensors import Form, LiveTensors, form_of
from gradrewrite.backends.region_calls import RegionCall, current_region
from gradrewrite.backends.runtime_wrapper import RewrittenBackward
from gradrewrite.backends.session import Session
from gradrewrite.backends.tracing_errors import in_place_named
from gradrewrite.distributed.layouts import InputLayouts
from gradrewrite.errors import GraphBreakError, NotRewrittenError, PolicyError, RewriteError, TraceError
from gradrewrite.instrumentation.dynamo_nodes import is_nested_region, positions_of, returned_inputs
from gradrewrite.instrumentation.inner_gradients import check_inner_gradients
from gradrewrite.instrumentation.naming import may_answer_at_ops, number_loops
from gradrewrite.instrumentation.op_probes import insert_op_probes, tracing_ops
from gradrewrite.instrumentation.probes import calls_around, erase_notes, insert_probes, region_call, tracing
from gradrewrite.instrumentation.recurrent import find_recurrent, run_as_operators, sizes_of_lengths
from gradrewrite.instrumentation.rolling import LoopReport, find_long_loops, roll_loops
from gradrewrite.instrumentation.uses import insert_uses
from gradrewrite.ir import editing, encoded_nodes, partitioning
from gradrewrite.ir.called_ops import CalledOp
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.loop_code import LoopCode
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.marked_loops import Loop
from gradrewrite.ir.values import Value
from gradrewrite.policy.rules import Answered, answers_alike, ask_in_order, patterns_of_uses
from gradrewrite.policy.sampling import Measured
from gradrewrite.replay.step_snapshot import PendingForwards, names_of_outputs
from gradrewrite.rewriting.comparison import rewrite_and_compare
from gradrewrite.rewriting.function_values import FunctionValues
from gradrewrite.rewriting.inserters.loops import run_loops_in
from gradrewrite.rewriting.inserters.saved import SavedRewrite
from gradrewrite.rewriting.joint import rewrite_joint_graph
from gradrewrite.rewriting.loop_answers import answer_form, is_acting, sites_in
from gradrewrite.rewriting.result import RewriteResult
from gradrewrite.sites import Pattern, Site

logger = logging.getLogger("gradrewrite.cache")

_Role = Literal["input", "value"]  # behind a graph break, and in a region, inputs are values of the model


@overlapping_tangents_contiguous()
@written_scalars_kept()
def compile_graph(
    session: Session, gm: fx.GraphModule, inputs: Sequence[Any], engine: Engine, measured: Measured = "all"
) -> Runnable:
    """Compile one Dynamo graph, with a part of the policy's measurements.

    An error of the policy becomes a callable that raises it when the graph runs.
    """
    _let_lengths_change(session, gm)
    if not needs_gradients(inputs):
        return _compile_plain(gm, inputs, engine)
    if not session.has_model and dynamo.is_last_compilation():
        _, _, frame = dynamo.current_frame()
        session.warnings.warn_once(
            "limit",
            f"torch has compiled {frame} as often as its recompile limit allows; a further compilation (each new "
            "backend counts as one) would run without the policy. Make one backend per function, call "
            "torch.compiler.reset(), or raise torch._dynamo.config.recompile_limit",
        )
    if data_parallel.is_ddp_split(gm) and torch.is_grad_enabled() and session.config.policy not in ([], ()):
        return _raising(GraphBreakError(_SPLIT, code="ddp-optimizer"))
    if session.has_model and data_parallel.is_inside_data_parallel():
        session.warnings.warn_once("data parallel", _DATA_PARALLEL)
    try:
        with marking(session, gm, inputs, engine, measured) as compilation:
            key = _cache_key(compilation, gm, inputs)
            compilation.asked |= {} if key is None else key.answers
            if key is not None and key.hash is not None:
                compilation.store = _StoredCompilation(key, compilation)
            with in_place_named():
                run = engine.compile_rewritten(gm, inputs, compilation)
            stored = compilation.store.stored if compilation.store is not None else None
            if key is not None and stored is not None:
                key.save(stored.rewrite.sites, stored.rewrite.saved.candidates, stored.answers)
        if compilation.is_whole and session.has_model and compilation.region is None:
            session.check_rules()  # before anything runs, so that the model stays as it was
        elif not session.has_model:
            session.rules.check_forms()
        refused = compilation.result.refused_outputs if compilation.result is not None else ()
        return _refusing_gradients(run, refused) if refused else run
    except RewriteError as err:
        return _raising(err)


def _let_lengths_change(session: Session, gm: fx.GraphModule) -> None:
    """Have the lengths of loops traced as symbols, unless the user says otherwise."""
    if session.has_model and session.config.dynamic is None:
        trace_again_with_symbols(gm, sizes_of_lengths(gm))


def _compile_plain(gm: fx.GraphModule, inputs: Sequence[Any], engine: Engine) -> Runnable:
    erase_notes(gm)
    run_as_operators(gm)
    with with_time_steps():
        return engine.compile_plain(gm, inputs)


def needs_gradients(inputs: Sequence[Any]) -> bool:
    """Return whether an input of a Dynamo graph needs a gradient."""
    return any(isinstance(t, Tensor) and t.requires_grad for t in inputs)


@contextlib.contextmanager
def marking(
    session: Session, gm: fx.GraphModule, inputs: Sequence[Any], engine: Engine, measured: Measured = "all"
) -> Iterator[GraphCompilation]:
    """Insert probes into a Dynamo graph, and let them mark the joint graph that is traced inside the block."""
    local, global_, frame = dynamo.current_frame()
    broken = dynamo.graph_break_of(gm)
    session.inputs.method = session.entry_frames.get(frame, session.inputs.method)
    is_whole = broken is None and (frame in session.entry_frames or (not session.has_model and not _is_resumed(frame)))
    region, module = current_region() or (None, None)
    if region is not None and module is not None:
        session.inputs.add(region.name, module.forward)
    role: _Role = "value" if region is not None or _is_resumed(frame) else "input"
    returned = dynamo_returns.returned_tensors()
    with session.names.in_frame(gm, local, global_):
        compilation = GraphCompilation(
            session,
            engine,
            frame,
            is_whole,
            is_last=broken is None,
            inputs=_inputs_of(session, gm, inputs, is_whole=is_whole, is_region=region is not None, role=role),
            returned=returned_inputs(gm.graph),
            outputs=positions_of(gm.graph, returned),
            parallelism=data_parallel.parallelism_around(session.names.all_modules()),
            region=region,
            measured=measured,
            calls_before={} if is_whole or region is not None else dict(session.calls.counts),
        )
        check_inner_gradients(gm)
        compilation.roll(gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        masks = [placeholders[n] for n, given in compilation.inputs.items() if given.is_mask]
        name = "" if region is None else region.name
        own = None if returned is None else [fake for _, fake in returned]
        compilation.values = insert_probes(gm, session.names, masks, own, region=name)
        compilation.probe_uses(gm)
        compilation.roll_python_loops(gm)
        compilation.probe_ops(gm)
        _warn_of_nested_regions(session, gm)
        gm.recompile()
        try:
            probes = tracing(compilation.values, compilation.layouts), tracing_ops(compilation.ops)
            with probes[0], probes[1], with_time_steps(), _shared_memory_named(compilation.inputs, inputs):
                yield compilation
        finally:
            compilation.values = ()  # fake tensors, of no use any more


@dataclass(eq=False, repr=False)
class GraphCompilation:
    """The hooks of one graph's compilation, and the state of that compilation."""

    session: Session
    engine: Engine
    frame: str  # name of the Python frame
    is_whole: bool  # it holds all that one call of the model does
    is_last: bool  # no graph break ended it
    inputs: Mapping[int, GraphInput]  # the tensor inputs of the Dynamo graph, by position
    returned: Collection[int]  # positions of the inputs that it returns
    outputs: Mapping[int, str] | None  # see ``MarkedJointGraph.returned``
    parallelism: data_parallel.DataParallelism
    region: RegionCall | None = None  # None for a graph of the model
    measured: Measured = "all"
    values: Sequence[Value] = ()  # of the probes, by their number
    layouts: InputLayouts = field(default_factory=InputLayouts)  # of DTensors, and of their gradients
    result: RewriteResult | None = None  # None before the rewrite, and for a graph without gradients
    forwards: PendingForwards | None = None  # None where nothing is checked
    asked: dict[Site, tuple[Answered, ...]] = field(default_factory=dict)  # sites at which the policy was asked
    loops: tuple[Loop, ...] = ()  # in the order of the forward
    ops: Sequence[CalledOp] = ()  # with sites for their backward
    python_loops: Sequence[LoopReport] = ()  # rolled or not, in the order of the forward
    codes: tuple[LoopCode | Loop, ...] = ()  # their bodies
    calls_before: Mapping[str, int] = field(default_factory=dict)  # in other graphs of the forward, by name
    part: PartOfForward | None = None  # None for a graph of a whole call of the model, or of a region
    written: Collection[str] = ()  # names of the inputs of the joint graph that are buffers and are written
    written_at: tuple[int, ...] = ()  # their positions among the inputs of the forward
    live: LiveTensors | None = None  # None where nothing of the user's is closed over
    live_forms: Mapping[str, Form] = field(default_factory=dict)  # of all live tensors, for which code is compiled
    values_read: Sequence[FunctionValues] = ()  # by the functions of its actions
    store: _StoredCompilation | None = None  # None where AOTAutograd's cache is not used

    @property
    def is_cacheable(self) -> bool:
        """Whether Inductor may store the code: no action assumes something of data-dependent sizes."""
        return self.result is None or not self.result.assumes

    @property
    def is_replayed(self) -> bool:
        """Whether calls are replayed though nothing is checked here: a skip, or a failed check in another graph."""
        is_part = not self.is_whole or self.region is not None
        return self.session.is_replayed or self.session.may_skip or (is_part and self.session.has_checks)

    def marked(self, graph: fx.Graph) -> MarkedJointGraph:
        """Return a joint graph with its probes' values, inputs and layouts."""
        editing.erase_uses(graph)
        number = 0 if self.region is None else self.region.number
        is_whole = self.is_whole and self.region is None
        given = (
            graph,
            self.values,
            self.inputs,
            self.is_last,
            number,
            is_whole,
            self.outputs,
            self.layouts,
            self.calls_before,
            self.loops,
            self.engine.name,
            self.ops,
        )
        return MarkedJointGraph(*given)

    def roll(self, gm: fx.GraphModule) -> None:
        """Ask the policy inside recurrent layers; loops compute those with an action inside."""
        if not torch.is_grad_enabled():
            run_as_operators(gm)
            return
        region, session = self.region, self.session
        around = region_call("" if region is None else region.name)
        recurrent = find_recurrent(gm, lambda node: calls_around(node, session.names, around))
        self.loops = tuple(loop for one in recurrent for loop in one.loops)
        if region is not None or self.calls_before:  # numbers of iterations depend on lengths elsewhere
            for loop in self.loops:
                loop.fix()
        number_loops(self.loops, 0 if region is None else region.number, self.calls_before)
        for one in recurrent:
            for loop in one.loops:
                self._ask_inside(loop)
            sites = [site for loop in one.loops for site in sites_in(loop)]
            if any(is_acting(self.asked[site], self.measured) for site in sites):
                for loop in one.loops:
                    loop.is_marked = True
            one.replace()

    def roll_python_loops(self, gm: fx.GraphModule) -> None:
        """Roll the Python loops of the Dynamo graph, or note the long ones."""
        if not torch.is_grad_enabled() or self.session.config.loops == "unrolled":
            return
        if self.session.config.loops == "rolled":
            loops, self.python_loops = roll_loops(gm, self.values)
            self.loops += tuple(loops)
        else:
            self.python_loops = find_long_loops(gm, self.values)

    def probe_uses(self, gm: fx.GraphModule) -> None:
        """Insert probes of the single uses in the policy."""
        session, region = self.session, "" if self.region is None else self.region.name
        patterns = [*patterns_of_uses(session.config.policy), *map(Pattern.parse, session.config.uses)]
        if patterns and torch.is_grad_enabled():
            values = list(self.values)
            others = insert_uses(gm, values, session.names, patterns, region)
            self.values = values
            session.rules.note_uses(others)

    def probe_ops(self, gm: fx.GraphModule) -> None:
        """Insert probes around ops, if the policy may answer there."""
        policy = self.session.config.policy
        if torch.is_grad_enabled() and may_answer_at_ops(policy, self.values):
            self.ops = insert_op_probes(gm, self.loops)

    def _ask_inside(self, loop: Loop) -> None:
        """Ask the policy at the sites of a loop, and beyond its length as long as answers have known forms."""
        policy = self.session.config.policy
        answers = {site: ask_in_order(policy, site) for site in sites_in(loop)}
        self.asked |= answers
        is_by_site = any(found.insertion.is_by_site for own in answers.values() for found in own)
        if not is_by_site and all(answers_alike(policy, f"{loop.name}/{value}") for value in loop.values):
            return
        if sum(other.name == loop.name for other in self.loops) > 1:
            loop.fix()
        forms = {(site.kind, site.name, answer_form(own)) for site, own in answers.items()}
        length, most = fake_tensors.hint_of(loop.length), loop.length_ahead()
        for number in range(length, most):
            try:
                answers = {site: ask_in_order(policy, site) for site in sites_in(loop, number, number + 1)}
            except PolicyError:  # raised again where a sequence is that long
                answers = {}
            if not answers or any((s.kind, s.name, answer_form(own)) not in forms for s, own in answers.items()):
                most = number
                break
            self.asked |= answers
        loop.limit(most)

    def rewrite(self, graph: fx.Graph) -> None:
        """Rewrite the joint graph (a graph without gradients only loses its markers)."""
        if not aot_autograd.has_gradients(graph):
            editing.erase_markers(graph)  # no backward, or the body of a higher-order op
            self.codes = run_loops_in(self.marked(graph), self.session.config)
            self._compile_bodies()
            return
        assert graph.owning_module is not None
        config, graphs, num_nodes = self.session.config, self.session.graphs, len(graph.nodes)
        if graphs.wants(num_nodes):
            shown, result, replay_graph = rewrite_and_compare(
                self.marked(graph), config, self.asked, self.measured, is_replayed=self.is_replayed
            )
            graphs.keep(shown, num_nodes)
        else:
            result, replay_graph = rewrite_joint_graph(
                self.marked(graph), config, self.asked, self.measured, is_replayed=self.is_replayed
            )
            shown = JointGraph(graph.owning_module, result.sites, result.edits, result.record_nodes)
        self.result = result
        self.codes = result.loops
        self._compile_bodies()
        logger.info("rewriting: %d edits, %d nodes; compiling (%s)", len(result.edits), num_nodes, self.engine.name)
        self.written = self._written_buffers(graph)
        self.live = self._live_tensors(result)
        self.live_forms = {name: form_of(t) for name, t in result.live.items()}
        self.session.live_forms.note(result.live.values())
        dynamo.note_artifact("gradrewrite_joint_graph", lambda: str(shown))
        if replay_graph is not None:
            if self.engine.draws_from_seeds and replay_graph.is_random:
                inductor.replace_random(replay_graph.graph, graph)
            self.forwards = PendingForwards(replay_graph)
        self.report()

    def _compile_bodies(self) -> None:
        """Let the engine run the bodies of loops; they live as long as the session."""
        self.session.codes |= set(self.codes)
        for code in self.codes:
            if isinstance(code, LoopCode):
                code.compile = self.engine.compile_body

    def _live_tensors(self, result: RewriteResult) -> LiveTensors | None:
        """Watch the user's tensors, not those of states and schedules."""
        own = {id(tensor) for tensor in self.session.config.states.own_tensors()}
        given = {name: t for name, t in result.live.items() if id(t) not in own and not t.is_inference()}
        if not given or self.session.config.loss_scale is not None:
            return None
        live = LiveTensors(given, self.session.warnings.warn_once)
        live.note_names({**self.session.names.parameters, **self.session.names.buffers})
        return live

    def _written_buffers(self, graph: fx.Graph) -> frozenset[str]:
        given = aot_autograd.plain_inputs(graph)
        written = (node for node in aot_autograd.written_inputs(graph) if node in given)
        roles = ((node, self.inputs.get(given[node])) for node in written)
        return frozenset(node.name for node, known in roles if known is not None and known.role == "buffer")

    def to_cache(self, names: tuple[str, ...]) -> CachedRewrite | None:
        """Return the disk cache's entry of the rewrite; None if it depends on this process."""
        result, replay_graph = self.result, self.forwards.replay_graph if self.forwards is not None else None
        answers = hash_of_answers(list(result.answers.values())) if result is not None else None
        if result is None or answers is None or result.live or result.outputs.states or result.assumes:
            return None
        if any(site.kind == "saved" for site in result.sites):
            return None
        code = b""
        if replay_graph is not None:
            from gradrewrite._compat import autograd_cache

            if replay_graph.graph.graph.find_nodes(op="get_attr"):
                return None
            try:
                code = autograd_cache.dump_graph(replay_graph.graph)
            except Exception as err:  # whatever has no bytes: it is only a cache
                logger.info("a graph is not stored in AOTAutograd's cache: %s", err)
                return None
            inputs = {name: replace(given, parameter=None) for name, given in replay_graph.inputs.items()}
            replay_graph = replace(replay_graph, graph=fx.GraphModule({}, fx.Graph()), inputs=inputs)
        # What belongs to this process, or to the text of the graph, is left out.
        saved = SavedRewrite(result.saved.candidates)
        rewrite = replace(result, answers=dict.fromkeys(result.answers, ()), anchors={}, saved=saved)
        return CachedRewrite(rewrite, answers, replay_graph, code, names, self.written_at)

    def restore(self, cached: CachedRewrite, answers: Mapping[Site, tuple[Answered, ...]]) -> None:
        """Restore the rewrite from the cache, with the policy's actions of now."""
        left = {site: [answered.insertion for answered in own] for site, own in answers.items()}

        def answered(edit: Edit) -> Edit:
            own = left[edit.site]  # equal actions in their order
            insertion = own.pop(next(n for n, insertion in enumerate(own) if insertion.action == edit.action))
            return replace(edit, action=insertion.action, insertion=insertion)

        self.result = replace(cached.rewrite, answers=answers, edits=tuple(map(answered, cached.rewrite.edits)))
        self.written_at = cached.written_at
        if cached.replay_graph is not None:
            from gradrewrite._compat import autograd_cache

            graph = autograd_cache.load_graph(cached.replay_code)
            self.forwards = PendingForwards(replace(cached.replay_graph, graph=graph))

    def report(self) -> None:
        """Add the graph to the session's list, and note its warnings."""
        assert self.result is not None
        self.session.sampling.note(self.result.answers.values())
        self.values_read = self.session.values.note(self.result.answers)
        self.session.note_skips(edit.insertion for edit in self.result.edits)
        self.session.note_checks(bool(self.result.outputs.checks))
        if not self.is_whole and self.region is None:
            given = self.frame, self.calls_before, self.result.sites, self.session.config.policy
            self.part = PartOfForward.of(*given)
        self.session.graphs.note(self._graph_report())
        self.session.rules.note_forms(self.result.saved)
        self._note_warnings(self.result)

    @functools.cached_property
    def uses(self) -> GraphUses:
        """The uses of the rewritten graph, by the model or by each region that shares it."""
        assert self.result is not None
        answers, outputs = list(self.result.answers.values()), self.result.outputs
        return GraphUses(self.session, self.region, self._graph_report(), answers, outputs, self.inputs, self.forwards)

    def _graph_report(self) -> GraphReport:
        assert self.result is not None
        answered = frozenset(found.position for answers in self.result.answers.values() for found in answers)
        named = self.result.sites, self.result.edits, self.result.out_of_reach, str(self.region or ""), answered
        count = Counter(loss for _, loss in self.result.copies.values())
        loss_nodes = tuple(count[loss] for loss in range(1 + max((k for k in count if k is not None), default=-1)))
        not_saved, loops = tuple(self.result.saved.not_saved.items()), tuple(self.python_loops)
        further = self.measured, loss_nodes, self.engine.name, not_saved, loops
        zeros = tuple(self.result.zeros.items())
        return GraphReport(self.frame, self.is_whole, *named, *further, zeros=zeros)

    def _note_warnings(self, result: RewriteResult) -> None:
        warnings = self.session.warnings
        for note in result.notes:
            warnings.warn_once(note, note)
        for site in result.out_of_reach:
            self.session.graphs.note_out_of_reach(site, result.answers[site])
        returned = {self.inputs[n].name for n in self.returned if n in self.inputs and self.inputs[n].has_site}
        for edit in result.edits:
            if edit.site.traits.is_leaf and edit.site.name in returned:
                warnings.warn_once(f"returned {edit.site}", _RETURNED.format(edit.site))
        if result.outputs.groups and not self.is_whole and self._lacks_parameters():
            number = len(grouped(result.edits, self.inputs, self.inputs))
            warnings.warn_once(
                "part",
                f"{', '.join(result.outputs.groups)}: the global clip sees only the gradients of one part of the model "
                f"({self.frame}: {number} parameters), because a graph break splits it; it clips each "
                "part by itself. Remove the break, or use fullgraph=True to find it",
            )

    def _lacks_parameters(self) -> bool:
        """Whether the graph lacks a trainable parameter of the model."""
        known = {given.name for given in self.inputs.values() if given.role == "parameter"}
        parameters = self.session.names.known_parameters()
        return any(name not in known for name, parameter in parameters.items() if parameter.requires_grad)

    def partition(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], *, inner: Runnable, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition the joint graph; see ``partitioning.partition``."""
        forward, backward = partitioning.partition(gm, joint_inputs, inner=inner, **kwargs)
        self._note_still_saved(backward)
        if self.engine.name == "inductor":
            encoded_nodes.expand(forward.graph)
            encoded_nodes.expand(backward.graph)
            forward.recompile()  # the backward is, when it is compiled
        aot_autograd.refuse_compiled_autograd(backward, refuse_compiled_autograd)
        if self.store is not None:
            self.store.backward = backward
        return forward, backward

    def _note_still_saved(self, backward: fx.GraphModule) -> None:
        """Warn of saved tensors beside their stored form: a pass of the compiler found another way to read them."""
        stored = self.result.saved.stored if self.result is not None else {}
        for node in backward.graph.find_nodes(op="placeholder"):
            if node.name in stored:
                site = stored[node.name]
                self.session.warnings.warn_once(f"still saved {site}", _STILL_SAVED.format(site))

    def compile_forward(self, compile_graph: Runnable, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """Compile the forward; where something is checked, note the inputs of each call."""
        if self.forwards is not None and not self.forwards.fits(gm):
            self.forwards = None  # torch gave the forward inputs of its own: what fails is said by the checks alone
        inputs_of = gm.graph.find_nodes(op="placeholder")
        self.written_at = tuple(number for number, node in enumerate(inputs_of) if node.name in self.written)
        names = names_of_outputs(gm)
        if self.store is not None:
            self.store.forward_names = tuple(names)
        return self.wrap_forward(compile_graph(gm, inputs), names)

    def wrap_forward(self, compiled: Runnable, names: Sequence[str]) -> Runnable:
        """Let a compiled forward record the inputs of each call, and copy the buffers it writes, if they are needed."""
        is_followed = self.region is not None or any(x is not None for x in (self.forwards, self.live, self.part))
        if self.result is None or not (is_followed or self.written_at):
            return compiled
        uses, session, live, written = self.uses, self.session, self.live, self.written_at
        is_checked, part = bool(self.result.outputs.checks), self.part

        def run(args: list[Any]) -> Any:
            if part is not None:
                part.run(session.calls)
            copies = session.buffers.copy({n: args[n] for n in written}) if written and session.keeps_buffers else {}
            forwards = uses.of_forward().forwards
            begun = None
            if forwards is not None and (is_checked or self.is_replayed):
                begun = forwards.begin(args, session.recorder.links.begin_forward(), copies)
            given = list(args) if live is not None else ()  # compiled code empties its list
            outputs = compiled(args)
            if forwards is not None and begun is not None:
                forwards.end(begun, names, outputs)
            if live is not None:
                live.note_call(given, outputs)
            return outputs

        return aot_autograd.boxed(run)

    def compile_backward(self, compile_graph: Runnable, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """Compile the backward, and wrap its auxiliary outputs and live inputs."""
        assert self.result is not None  # a graph with a backward was rewritten
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        num_outputs = editing.release(gm.graph)
        lifted = editing.lift_live(gm)
        if self.live is not None:
            self.live.readers = self._readers_of(gm, [name for name, _ in lifted])
        gm.recompile()
        compiled = compile_graph(gm, [*inputs, *(fake for _, fake in lifted)])
        if self.store is not None:
            self.store.backward_interface = (tuple(names), num_outputs)
        live = [(self.result.live[name], self.live_forms[name]) for name, _ in lifted]
        return self.wrap_backward(compiled, names, num_outputs, live)

    def _readers_of(self, gm: fx.GraphModule, names: Sequence[str]) -> dict[str, str]:
        """Return the first site that reads each live tensor."""
        assert self.result is not None
        sites = {node: str(edit.site) for edit in self.result.edits for node in edit.nodes}
        placeholders = {name.lstrip("_"): name for name in names}
        found: dict[str, str] = {}
        for node in gm.graph.find_nodes(op="placeholder"):
            readers = [sites[user.name] for user in node.users if user.name in sites]
            if readers and node.name in placeholders:
                found[placeholders[node.name]] = readers[0]
        return found

    def wrap_backward(
        self, compiled: Runnable, names: Sequence[str], num_outputs: int, live: Sequence[tuple[Tensor, Form]] = ()
    ) -> Runnable:
        """Take the auxiliary outputs off a compiled backward with inputs of these names, and add its live inputs."""
        assert self.result is not None
        self.uses.note_saved(names)
        return aot_autograd.boxed(
            RewrittenBackward(
                self.session,
                compiled,
                live,
                self.uses.of_backward,
                num_outputs,
                self.is_whole,
                self.engine.overwrites_outputs,
                self.parallelism,
                self.measured,
                self.live,
                self.values_read,
            )
        )


@dataclass(eq=False, repr=False)
class _StoredCompilation:
    """The side of AOTAutograd's cache of one compilation; a ``CodeStore``."""

    key: CacheKey
    compilation: GraphCompilation
    forward_names: tuple[str, ...] = ()  # of its outputs; set when it is compiled
    backward_interface: tuple[tuple[str, ...], int] = ((), 0)  # names of inputs, number of auxiliary outputs; likewise
    backward: fx.GraphModule | None = None  # set when it is cut off the joint graph
    stored: CachedRewrite | None = None

    probes = ("gradrewrite.instrumentation.probes._probe", "gradrewrite.instrumentation.probes._probe_outputs")

    @property
    def identity(self) -> str:
        return self.key.identity

    def forward_payload(self) -> CachedRewrite | None:
        self.stored = self.compilation.to_cache(self.forward_names)
        return self.stored

    def backward_payload(self) -> tuple[tuple[str, ...], int] | None:
        assert self.backward is not None
        aot_autograd.refuse_cached(self.backward, refuse_compiled_autograd)
        return self.backward_interface if self.stored is not None else None

    def restore_forward(self, compiled: Runnable, payload: CachedRewrite) -> Runnable:
        if (payload.rewrite.sites, payload.answers) != (self.key.sites, self.key.hash):
            raise LookupError("the entry was made for another policy")
        self.compilation.restore(payload, self.key.answers)
        return self.compilation.wrap_forward(compiled, payload.names)

    def restore_backward(self, compiled: Runnable, payload: tuple[tuple[str, ...], int]) -> Runnable:
        self.compilation.report()
        return self.compilation.wrap_backward(compiled, *payload)


def _cache_key(compilation: GraphCompilation, gm: fx.GraphModule, inputs: Sequence[Any]) -> CacheKey | None:
    engine, config = compilation.engine, compilation.session.config
    folder = engine.cache_folder() if torch.is_grad_enabled() and config.loss_scale is None else ""
    if not folder or (config.in_framework and compilation.session.graphs.joint is None):  # stored code has no graph
        return None
    given = folder, gm, inputs, compilation.values, compilation.inputs, engine.settings, config.policy
    outputs = None if compilation.outputs is None else sorted(compilation.outputs.items())
    counts = sorted(compilation.calls_before.items())
    further = (
        compilation.is_last,
        sorted(compilation.returned),
        outputs,
        engine.overwrites_outputs,
        compilation.region,
        counts,
    )
    return find_key(*given, *further, compilation.measured, compilation.is_replayed)


def _warn_of_nested_regions(session: Session, gm: fx.GraphModule) -> None:
    """Warn once of nested regions: single ops of the graph, without inner sites."""
    stacks = [node.meta.get("nn_module_stack") for node in gm.graph.nodes if is_nested_region(node)]
    innermost = [list(stack.items())[-1] for stack in stacks if stack]
    hidden = dict.fromkeys(repr(session.names.module(key, path)) for key, (path, _) in innermost)
    if hidden:
        session.warnings.warn_once(
            "nested regions",
            f"torch.compiler.nested_compile_region hides the inside of {listed(list(hidden))}: there are no sites but "
            "its output, and no policy acts inside. Remove it, and compile the modules with "
            'gr.transform(model, policy, regions="...")',
        )


def _is_resumed(frame: str) -> bool:
    return frame.startswith("torch_dynamo_resume_in_")


def _refusing_gradients(compiled: Runnable, refused: Collection[int]) -> Runnable:
    """Refuse gradients of these outputs of a graph."""

    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        for position in refused:
            output = outputs[position]
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(functools.partial(_refuse_gradient, position, tuple(output.shape)))
        return outputs

    return run


def _refuse_gradient(position: int, shape: tuple[int, ...], gradient: Tensor | None) -> None:
    if gradient is not None:
        raise PolicyError(
            f"WeighLosses: output {position} of the model, of shape {shape}, received a gradient and is none of its "
            "losses, so that this gradient would be lost. Compute the loss of it in the model's forward, or detach it",
            code="losses",
        )


def _raising(error: RewriteError) -> Runnable:
    def run(*_: Any) -> Any:
        raise error.with_traceback(None)  # else each call would add its frames

    return run


def refuse_compiled_autograd() -> fx.GraphModule:
    """Refuse to give compiled autograd a backward graph."""
    raise NotRewrittenError(
        "compiled autograd takes the backward graph apart and compiles it again: checks, guards, records and live "
        "thresholds of the policy would be lost. Switch it off for this backward: torch._dynamo.config."
        "compiled_autograd = False, or call backward() outside of torch._dynamo.compiled_autograd's context manager",
        code="compiled-autograd",
    )


_RETURNED = (
    "{}: the model returns this tensor, itself or as a view; what the caller's use of it adds to the gradient comes "
    "after the actions. Return a copy (.clone()) to have all of it in the graph"
)
_STILL_SAVED = (
    "{}: the backward reads this tensor all the same, so that it takes memory as before: a random op that an "
    "activation checkpoint repeats needs it (op by op, a dropout), or the compiler changed the graph after the "
    "rewrite. Let the policy leave it alone"
)
_DATA_PARALLEL = (
    "nn.DataParallel around a rewritten model: on several GPUs it runs copies of the model, which have no policy; use "
    "DistributedDataParallel(gr.transform(model, policy)), with one process for each GPU"
)
_SPLIT = (
    "DistributedDataParallel lets torch split this graph into its buckets (DDPOptimizer), where gradient sites, checks "
    "and global clips are lost. Set torch._dynamo.config.optimize_ddp = False, or use "
    "DistributedDataParallel(gr.transform(model, policy))"
)


@contextlib.contextmanager
def _shared_memory_named(given: Mapping[int, GraphInput], inputs: Sequence[Any]) -> Iterator[None]:
    """Name two inputs of the graph in torch's error on shared memory."""
    try:
        yield
    except AssertionError as err:
        roles = {"buffer": 0, "parameter": 1}
        known = sorted((roles.get(one.role, 2), n) for n, one in given.items())
        pairs = ((n, m) for (_, n), (_, m) in itertools.combinations(known, 2))
        found = next(((n, m) for n, m in pairs if fake_tensors.share_memory(inputs[n], inputs[m])), None)
        if found is None or not aot_autograd.refuses_shared_memory(err):
            raise
        first, second = (given[n] for n in found)
        copied = f"{second.name}.detach().clone()" if first.role == "buffer" else f"{second.name}.clone()"
        raise TraceError(
            f"{first.role} {first.name!r} shares its memory with {second.role} {second.name!r}, and the forward writes "
            f"to one of them, which torch.compile cannot differentiate. Give the {first.role} memory of its own "
            f"({copied}), or write outside of the forward: before the call, or after the "
            "backward",
            code="shared-memory",
        ) from err


def _inputs_of(
    session: Session, gm: fx.GraphModule, inputs: Sequence[Any], *, is_whole: bool, is_region: bool, role: _Role
) -> dict[int, GraphInput]:
    found = {}
    sharded = data_parallel.sharded_parameters(session.names.all_modules())
    for position, (node, tensor) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        if not isinstance(tensor, Tensor):
            continue
        has_site = tensor.requires_grad
        parameter, buffer = session.names.parameters.get(id(tensor)), session.names.buffers.get(id(tensor))
        if parameter is not None:
            ref = weakref.ref(sharded.get(id(tensor), tensor)) if has_site else None
            found[position] = GraphInput("parameter", parameter, has_site=has_site, parameter=ref)
            continue
        is_mask = not has_site and fake_tensors.is_mask(tensor)
        # Behind a graph break, values of the graph before are no inputs; in a region, none is one of the model.
        has_site &= (is_whole or tensor.is_leaf) and not is_region
        if buffer is not None:
            found[position] = GraphInput("buffer", buffer, is_mask, has_site)
        else:
            name = session.inputs.name(dynamo.source_name(node) or node.name)
            found[position] = GraphInput(role, name, is_mask, has_site)
    return found
