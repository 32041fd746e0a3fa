"""The only editor of joint graphs, in a few verbs.

Every verb takes graphs that are consistent and leaves them consistent; none lints or recompiles.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, combined_kernels, fake_tensors, make_fx, operators
from gradrewrite.ir import markers

LIVE = "_live_tensor_"
AGAIN = "_computed_again"
_STORED = "gradrewrite_stored"  # in the metadata of nodes


def graph_of(inputs: Sequence[tuple[str, Tensor]], num_returned: int) -> fx.GraphModule:
    """Return a graph of these inputs, by name and value, with the first ones as its outputs."""
    graph = fx.Graph()
    nodes = [_placeholder(graph, name, value) for name, value in inputs]
    graph.output(tuple(nodes[:num_returned]))
    return fx.GraphModule({}, graph)


def add_input(graph: fx.Graph, name: str, value: Tensor) -> fx.Node:
    """Add an input behind the others."""
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        return _placeholder(graph, name, value)


def _placeholder(graph: fx.Graph, name: str, value: Tensor) -> fx.Node:
    """Add an input with an identifier made from this name as its prefix."""
    node = graph.placeholder(re.sub(r"\W", "_", name))
    node.target = node.name  # which is like no other
    node.meta = {"val": value}
    return node


def rename_inputs(placeholders: Sequence[fx.Node], prefix: str) -> None:
    """Name inputs ``prefix_0``, ``prefix_1``, ..., as AOTAutograd's partitioners know them."""
    for number, node in enumerate(placeholders):
        node.target = f"{prefix}_{number}"
        node._rename(node.target)


def input_behind(placeholder: fx.Node, name: str, value: Tensor) -> fx.Node:
    """Add an input behind another."""
    with placeholder.graph.inserting_after(placeholder):
        node = placeholder.graph.placeholder(name)
    node.meta = {"val": value}
    return node


def move_inputs(graph: fx.Graph, count: int, behind: int) -> None:
    """Move the last ``count`` inputs before the ``behind`` ones that stand before them."""
    placeholders = graph.find_nodes(op="placeholder")
    first = placeholders[len(placeholders) - count - behind]
    for node in placeholders[len(placeholders) - count :]:
        first.prepend(node)


def input_instead(node: fx.Node, name: str, after: fx.Node) -> fx.Node:
    """Put a new input behind another in the place of a node; the node stays, without readers."""
    placeholder = input_behind(after, name, node.meta["val"])
    node.replace_all_uses_with(placeholder)
    return placeholder


def size_instead(node: fx.Node, tensor: fx.Node, dim: int) -> None:
    """Read a symbolic size off an input, in the place of another input."""
    with node.graph.inserting_before(next(n for n in node.graph.nodes if n.op != "placeholder")):
        size = node.graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))
    size.meta = dict(node.meta)
    node.replace_all_uses_with(size)
    erase(node)


def erase_uses(graph: fx.Graph) -> None:
    """Erase the nodes that hand values on to single uses; markers are in the backward.

    Views of what they returned are then views of the value.
    """
    uses = graph.find_nodes(op="call_function", target=markers.use)
    memory = {fake_tensors.storage_key(t): t for node in uses if (t := _plain_value(node)) is not None}
    for node in uses:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    for node in graph.nodes if memory else ():
        value = node.meta.get("val")
        made = [value] if isinstance(value, Tensor) else value if isinstance(value, list | tuple) else []
        if node.op == "call_function" and any(_has_storage(t) and fake_tensors.storage_key(t) in memory for t in made):
            node.meta["val"] = fake_tensors.fake_result(node, fake_tensors.fake_mode_of(made))


def _plain_value(node: fx.Node) -> Tensor | None:
    """Return the fake tensor of a node; None for other values, and for tensors without memory."""
    value = node.meta.get("val")
    return value if _has_storage(value) else None


def _has_storage(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided and not fake_tensors.is_wrapper(value)


def take_used(graph: fx.Graph) -> dict[int, fx.Node]:
    """Return the used values, by the number of the use, and erase their markers."""
    found = {}
    for marker in graph.find_nodes(op="call_function", target=markers.mark_use):
        found[markers.number_of(marker)] = marker.all_input_nodes[0]
        graph.erase_node(marker)
    return found


def erase_copies(graph: fx.Graph) -> None:
    """Erase the copies of a functional graph's inputs."""
    for placeholder in graph.find_nodes(op="placeholder"):
        for user in list(placeholder.users):
            if user.target is torch.ops.aten.clone.default and not user.kwargs:
                skip(user, placeholder)


def erase_markers(graph: fx.Graph) -> None:
    """Erase all markers; the graph is then equal to one without probes."""
    erase_uses(graph)
    # In this order, so that a chain of markers hands each user on once.
    for node in list(graph.nodes):
        if node.target in markers.IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in markers.ON_FORWARD:
            graph.erase_node(node)


def erase_op_markers(graph: fx.Graph) -> None:
    """Erase the markers of ops."""
    for node in list(graph.nodes):
        if node.target in (markers.mark_op_error, markers.mark_op_gradient):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is markers.mark_operands:
            graph.erase_node(node)


def put_readers_behind(node: fx.Node) -> None:
    """Move earlier readers of a node behind it, with all their own readers."""
    found: set[fx.Node] = set()
    todo = [user for user in node.users if user < node]
    while todo:
        reader = todo.pop()
        if reader not in found:
            found.add(reader)
            todo += [user for user in reader.users if user < node]
    for reader in sorted(found):
        node.append(reader)
        node = reader


def first_reached(nodes: Iterable[fx.Node], targets: Collection[fx.Node]) -> fx.Node | None:
    """Return a target among these nodes and their successors; None without one."""
    last, todo, seen = max(targets), list(nodes), set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in targets:
            return node
        if node not in seen and not last < node:
            seen.add(node)
            todo += node.users
    return None


def move_behind(node: fx.Node, other: fx.Node) -> None:
    """Move a node behind another one that is not computed from it, with its earlier readers."""
    other.append(node)
    put_readers_behind(node)


def splice(
    traced: fx.GraphModule, graph: fx.Graph, inputs: Sequence[fx.Node], before: fx.Node, tag: str
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Copy a traced function into a graph; return the nodes of its outputs, and all new nodes in execution order.

    The function's placeholders stand for ``inputs``; its ``get_attr`` nodes for live tensors. ``tag`` is the
    ``partitioner_tag`` of the new nodes.
    """
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    new: list[fx.Node] = []
    mode = fake_tensors.fake_mode_of([node.meta["val"] for node in inputs])
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                copies[node] = _live(graph, getattr(traced, str(node.target)), inputs)
            elif node.op == "call_function":
                copies[node] = graph.node_copy(node, lambda n: copies[n])
                # Not the traced value: two copies of one traced node must not look as if they shared memory.
                value = fake_tensors.fake_copy(node, mode)
                copies[node].meta = {"val": fake_tensors.fake_result(copies[node], mode) if value is None else value}
            if node.op in ("get_attr", "call_function"):
                copies[node].meta["partitioner_tag"] = tag
                combined_kernels.mark(copies[node])
                new.append(copies[node])
    return [copies[node] for node in outputs_of(traced.graph.output_node())], new


def compute(
    graph: fx.Graph,
    run: Callable[..., Sequence[Tensor]],
    inputs: Sequence[fx.Node],
    before: fx.Node,
    tag: str = "is_backward",
    *,
    is_pruned: bool = False,
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Trace a function of the values of nodes, and ``splice`` it in; ``is_pruned`` leaves out unused nodes."""
    traced = make_fx.trace(run, [node.meta["val"] for node in inputs])
    if is_pruned:
        traced.graph.eliminate_dead_code()
    return splice(traced, graph, inputs, before, tag)


def insert_call(
    graph: fx.Graph, target: operators.OpOverload, args: tuple[Any, ...], before: fx.Node, tag: str
) -> fx.Node:
    """Insert a call of an operator of ours; in its arguments, nodes are in the place of tensors."""
    with graph.inserting_before(before):
        node = graph.create_node("call_function", target, args, name=target.overloadpacket.__name__)
    _describe(node, tag)
    combined_kernels.mark(node)
    return node


def insert_copy(
    node: fx.Node, copies: Mapping[fx.Node, fx.Node], changed: Mapping[str, Any], before: fx.Node
) -> fx.Node:
    """Insert a copy of a node of the backward.

    It reads what ``copies`` has instead of the node's inputs; ``changed`` has other arguments, by their names.
    """
    assert node.graph is before.graph
    with before.graph.inserting_before(before):
        copy = before.graph.node_copy(node, lambda n: copies.get(n, n))
    for name, value in changed.items():
        set_argument(copy, name, value)
    _describe(copy, "is_backward", node)
    combined_kernels.mark(copy)
    return copy


def read_from_forward(node: fx.Node, before: fx.Node, computed: fx.Node | None) -> fx.Node:
    """Add a saved input to a backward, before another one.

    ``node`` is the value in the forward; ``computed`` the node of the backward that has computed it, if there is one.
    """
    with before.graph.inserting_before(before):
        placeholder = before.graph.placeholder(node.name)
    placeholder.meta = dict(node.meta)
    if computed is not None:
        computed.replace_all_uses_with(placeholder)
        before.graph.erase_node(computed)
    return placeholder


def copy_from_forward(node: fx.Node, inputs: Mapping[fx.Node, fx.Node], graph: fx.Graph) -> fx.Node:
    """Copy a node of the forward to a backward, behind its inputs there.

    Its name ends in ``AGAIN``, as no other one does.
    """
    read = [inputs[given] for given in node.all_input_nodes]
    first = next(other for other in graph.nodes if other.op != "placeholder")
    args, kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
    with graph.inserting_before(max([first, *(own.next for own in read if own.op != "placeholder")])):
        copy = graph.create_node(node.op, node.target, args, kwargs, name=f"{node.name}{AGAIN}")
    copy.meta = dict(node.meta)
    return copy


def insert_twin(node: fx.Node, inputs: Mapping[fx.Node, fx.Node], name: str) -> fx.Node:
    """Insert a second node of the same kind, with its metadata, before a node or right behind its own inputs.

    It reads what ``inputs`` has instead of the node's inputs.
    """
    before = max([node, *(read.next for read in inputs.values() if read.op != "placeholder")])
    with node.graph.inserting_before(before):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: inputs.get(n, n))
        twin = node.graph.create_node(node.op, node.target, args, kwargs, name=name)
    twin.meta = dict(node.meta)
    mode = fake_tensors.fake_mode_of([read.meta.get("val") for read in twin.all_input_nodes])
    value = fake_tensors.fake_copy(node, mode)
    if value is None:
        is_op = isinstance(node.target, operators.OpOverload) or node.target is operator.getitem
        value = fake_tensors.fake_result(twin, mode) if is_op else fake_tensors.fakes_like(node.meta.get("val"), mode)
    twin.meta["val"] = value
    return twin


def _describe(node: fx.Node, tag: str, like: fx.Node | None = None) -> None:
    known = [*node.all_input_nodes, *([] if like is None else [like])]
    mode = fake_tensors.fake_mode_of([other.meta["val"] for other in known])
    node.meta = {"val": fake_tensors.fake_result(node, mode), "partitioner_tag": tag}


def call_instead(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Replace a node's operator by an equivalent one; keep its name and metadata."""
    node.target, node.args, node.kwargs = target, args, kwargs


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Set an argument of a node that calls an operator, by its name in the schema."""
    position = list(operators.arguments_of(node)).index(name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def replace_node(node: fx.Node, replacement: fx.Node) -> None:
    """Put a node in the place of another; it takes over the name."""
    name = node.name
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)
    replacement._rename(name)


def skip(node: fx.Node, value: fx.Node) -> None:
    """Let the readers of a node read another value, and erase it."""
    node.replace_all_uses_with(value)
    erase(node)


def replace_input(reader: fx.Node, given: fx.Node, replacement: fx.Node) -> None:
    """Let one reader of a node read another one."""
    reader.replace_input_with(given, replacement)


def mark_instead(marker: fx.Node, node: fx.Node) -> None:
    """Let a marker mark another value."""
    marker.update_arg(0, node)


def erase(node: fx.Node) -> None:
    """Erase a node without readers."""
    node.graph.erase_node(node)


def erase_unused(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Take out those of these nodes, in the order of execution, that nothing reads."""
    for node in reversed(list(dict.fromkeys(nodes))):
        if not node.users:
            graph.erase_node(node)


def reroute(marker: fx.Node, replacement: fx.Node) -> None:
    """Let everything behind an error marker read the replacement."""
    marker.replace_all_uses_with(replacement)


def replace_output(graph: fx.Graph, position: int, replacement: fx.Node) -> None:
    """Return another node at one position of the outputs."""
    outputs = outputs_of(graph.output_node())
    outputs[position] = replacement
    graph.output_node().args = (tuple(outputs),)


def copy_repeated_gradients(graph: fx.Graph) -> dict[str, str]:
    """Copy gradients that are those of another input too, as of the two biases of an LSTM; return these, by their copy.

    A compiler may return two views of one tensor for them, which autograd keeps, and then adds to in place.
    """
    copies = {}
    returned = outputs_of(graph.output_node())
    seen: set[fx.Node] = set()
    for position, _ in aot_autograd.gradient_outputs(graph):
        node = returned[position]
        if isinstance(node, fx.Node) and node in seen:
            copy = insert_call(graph, markers.copy, (node,), graph.output_node(), "is_backward")
            replace_output(graph, position, copy)
            copies[copy.name] = node.name
        seen.add(node)
    return copies


def add_outputs(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Return further nodes, after the outputs that there are."""
    insert_outputs(graph, len(outputs_of(graph.output_node())), nodes)


def write_back(graph: fx.Graph, count: int) -> None:
    """Write the first ``count`` outputs into the first placeholders, where they differ, and return the others.

    An output that is a placeholder itself is copied: what is written comes after it.
    """
    aten, output = torch.ops.aten, graph.output_node()
    results = outputs_of(output)
    with graph.inserting_before(output):
        others = [
            graph.call_function(aten.clone.default, (node,)) if node.op == "placeholder" else node
            for node in results[count:]
        ]
        for old, new in zip(graph.find_nodes(op="placeholder"), results[:count], strict=False):
            if old is not new:
                graph.call_function(aten.copy_.default, (old, new))
    output.args = (tuple(others),)


def write_to_inputs(graph: fx.Graph, results: Sequence[int], rest: int) -> None:
    """Write outputs into new last inputs: those at the positions ``results``, then all from position ``rest`` on.

    The inputs are contiguous. The other outputs are returned.
    """
    output, copy_ = graph.output_node(), torch.ops.aten.copy_.default
    outputs = outputs_of(output)
    moved = [*results, *range(rest, len(outputs))]
    for n in moved:
        value = outputs[n].meta["val"]
        slot = add_input(graph, "slot", value.new_empty(value.shape))
        with graph.inserting_before(output):
            copied = graph.call_function(copy_, (slot, outputs[n]))
        copied.meta = {"val": slot.meta["val"]}
    output.args = (tuple(one for n, one in enumerate(outputs) if n not in moved),)


def hold(graph: fx.Graph, nodes: Sequence[fx.Node], of_forward: Collection[fx.Node] = ()) -> fx.Node:
    """Keep nodes alive through partitioning, without outputs; the forward has to compute those of ``of_forward``."""
    positions = [number for number, node in enumerate(nodes) if node in of_forward]
    with graph.inserting_before(graph.output_node()):
        holder = graph.call_function(markers.hold, (list(nodes), positions) if positions else (list(nodes),))
    holder.meta = {"val": None, "partitioner_tag": "is_backward"}
    return holder


def nodes_for_forward(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that the forward is to compute and to save, although no output of the model needs them."""
    holders = graph.find_nodes(op="call_function", target=markers.hold)
    held = [holder.args[0][number] for holder in holders for numbers in holder.args[1:] for number in numbers]
    stored = [node for node in graph.nodes if _STORED in node.meta]
    copies = graph.find_nodes(op="call_function", target=markers.copy)
    copies = [node for node in copies if not aot_autograd.is_backward(node)]  # others are of gradients
    return [*dict.fromkeys([*held, *copies, *stored])]


def store(nodes: Sequence[fx.Node]) -> None:
    """Let the forward compute these nodes, and save them for the backward; see ``nodes_for_forward``."""
    for node in nodes:
        node.meta[_STORED] = True
        aot_autograd.always_save([node, *(node.all_input_nodes if node.target is operator.getitem else ())])


def insert_outputs(graph: fx.Graph, position: int, nodes: Sequence[fx.Node]) -> None:
    """Return further nodes, before the output at a position."""
    _replace_outputs(graph, slice(position, position), nodes)


def drop_outputs(graph: fx.Graph, position: int, count: int) -> None:
    """Do not return ``count`` outputs from a position on; the inverse of ``insert_outputs``."""
    _replace_outputs(graph, slice(position, position + count), [])


def insert_saved_copy(node: fx.Node) -> fx.Node:
    """Insert a copy of a forward value, saved for the backward; see ``nodes_for_forward``."""
    behind = node.graph.find_nodes(op="placeholder")[-1] if node.op == "placeholder" else node
    with node.graph.inserting_after(behind):
        copied = node.graph.call_function(markers.copy, (node,))
    _describe(copied, "is_forward")
    return copied


def read_before_writing(placeholder: fx.Node) -> list[fx.Node]:
    """Let all nodes read a copy of an input that the graph writes; return it, or nothing if no node reads the input."""
    graph, is_copy = placeholder.graph, torch.ops.aten.copy_.default
    readers = [user for user in placeholder.users if user.op != "output" and user.target is not is_copy]
    if not readers:
        return []
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        copied = graph.call_function(torch.ops.aten.clone.default, (placeholder,))
    for user in readers:
        user.replace_input_with(placeholder, copied)
    _describe(copied, "is_forward")
    return [copied]


def read_directly(graph: fx.Graph, names: Collection[str]) -> None:
    """Take out those of these copies that the graph does not return; the inverse of ``read_before_writing``."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        if node.name in names and graph.output_node() not in node.users:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


def release(graph: fx.Graph) -> int:
    """Turn held nodes into the last outputs, and return their number."""
    holders = graph.find_nodes(op="call_function", target=markers.hold)
    if not holders:
        return 0
    (holder,) = holders
    held = list(holder.args[0])
    add_outputs(graph, held)
    graph.erase_node(holder)
    return len(held)


def hold_last(graph: fx.Graph, count: int) -> None:
    """Take the last outputs off and hold them instead; the inverse of ``release``."""
    outputs = outputs_of(graph.output_node())
    drop_outputs(graph, len(outputs) - count, count)
    hold(graph, outputs[-count:])


def join(forward: fx.GraphModule, backward: fx.GraphModule, num_results: int) -> fx.GraphModule:
    """Return forward and backward as one graph with the results of both.

    The backward reads what the forward saves, by name, and states of random number generators, in their order; its
    other inputs, gradients from outside, become the last ones.
    """
    graph, attributes = fx.Graph(), _Attributes()
    of_forward: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(forward.graph, of_forward)
    attributes.add(forward, of_forward)
    saved = [node for node in outputs_of(forward.graph.output_node())[num_results:] if isinstance(node, fx.Node)]
    of_backward: dict[fx.Node, fx.Node] = {}
    known = {node.name: of_forward[node] for node in [*forward.graph.find_nodes(op="placeholder"), *saved]}
    given = backward.graph.find_nodes(op="placeholder")
    states = operators.random_states(saved)
    taken = [node for node in given if operators.takes_random_state(node)]
    known |= {node.name: of_forward[state] for node, state in zip(taken, states, strict=True)}
    # A stored form that was expanded has another name; torch keeps the order of saved tensors.
    tensors = [node for node in saved if node not in states and isinstance(node.meta["val"], Tensor)]
    own = [node for node in given if node not in taken and isinstance(node.meta["val"], Tensor)]
    known = {node.name: of_forward[tensor] for node, tensor in zip(own, tensors, strict=False)} | known
    last = graph.find_nodes(op="placeholder")[-1]
    for node in given:
        if node.name in known:
            of_backward[node] = known[node.name]
        else:
            with graph.inserting_after(last):
                last = of_backward[node] = graph.node_copy(node)
    graph.graph_copy(backward.graph, of_backward)
    attributes.add(backward, of_backward)
    results = [*outputs_of(forward.graph.output_node())[:num_results]]
    mapped = [fx.map_arg(node, of_forward.__getitem__) for node in results]
    mapped += [fx.map_arg(node, of_backward.__getitem__) for node in outputs_of(backward.graph.output_node())]
    graph.output(tuple(mapped))
    return fx.GraphModule(attributes.values, graph)


class _Attributes:
    """The attributes of several graph modules, without equal names for different values."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def add(self, gm: fx.GraphModule, copies: Mapping[fx.Node, fx.Node]) -> None:
        """Add the attributes that the copies of a module's nodes read."""
        for node in gm.graph.find_nodes(op="get_attr"):
            value, name = operator.attrgetter(str(node.target))(gm), str(node.target).replace(".", "_")
            while self.values.setdefault(name, value) is not value:
                name = f"{name}_"
            copies[node].target = name


def take_writes(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Take the final copies into inputs out of a graph; return the new values by placeholder."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, value = node.args[:2]
        if isinstance(target, fx.Node) and target.op == "placeholder" and isinstance(value, fx.Node):
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            found[target] = value
    return found


def write(graph: fx.Graph, targets: Mapping[fx.Node, fx.Node]) -> None:
    """Write values into inputs or live tensors, as the last thing that a graph does."""
    output = graph.output_node()
    written = set(targets)
    with graph.inserting_before(output):
        moved = {
            node: graph.call_function(torch.ops.aten.clone.default, (node,)) for node in _read_late(graph, written)
        }
        for node, copied in moved.items():
            copied.meta = dict(node.meta)
        for target, value in targets.items():
            copied = graph.call_function(torch.ops.aten.copy_.default, (target, moved.get(value, value)))
            copied.meta = {"val": target.meta["val"]}
    output.args = (fx.map_arg(output.args[0], lambda node: moved.get(node, node)),)


def _read_late(graph: fx.Graph, written: Collection[fx.Node]) -> list[fx.Node]:
    """Return the results that are written inputs, or views of them."""
    memory = {fake_tensors.storage_key(node.meta["val"]) for node in written if _has_storage(node.meta["val"])}
    results = [node for node in dict.fromkeys(outputs_of(graph.output_node())) if isinstance(node, fx.Node)]
    return [
        node for node in results if _has_storage(v := node.meta.get("val")) and fake_tensors.storage_key(v) in memory
    ]


def copied_before(node: fx.Node, before: fx.Node) -> fx.Node:
    """Insert a copy of a value of a Dynamo graph."""
    with node.graph.inserting_before(before):
        copied = node.graph.call_function(torch.clone, (node,))
    copied.meta = {key: value for key, value in node.meta.items() if key != "example_value"}
    return copied


def set_outputs(graph: fx.Graph, nodes: Sequence[Any]) -> None:
    """Return these nodes."""
    output = graph.output_node()
    output.args, output.meta = (tuple(nodes),), {}


def live(graph: fx.Graph, tensor: Tensor, like: fx.Node, before: fx.Node) -> fx.Node:
    """Insert a read of a real tensor, with a fake value in the mode of that of another node."""
    with graph.inserting_before(before):
        return _live(graph, tensor, [like])


def lift_live(gm: fx.GraphModule) -> list[tuple[str, Any]]:
    """Turn live tensors into a graph's last inputs; return names and fakes.

    The graph may be a copy whose attributes are copies too, so the tensors themselves are found by name.
    """
    lifted: dict[str, fx.Node] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if not name.startswith(LIVE):
            continue
        if name not in lifted:
            last = gm.graph.find_nodes(op="placeholder")[-1]
            with gm.graph.inserting_after(last):
                lifted[name] = gm.graph.placeholder(name.lstrip("_"))
            lifted[name].meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(lifted[name])
        gm.graph.erase_node(node)
    return [(name, placeholder.meta["val"]) for name, placeholder in lifted.items()]


def with_live_inputs(traced: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return a traced function with its real tensors as its last inputs, and these tensors."""
    graph = fx.Graph()
    inputs = [graph.node_copy(node) for node in traced.graph.find_nodes(op="placeholder")]
    graph.output(tuple(inputs))
    gm = fx.GraphModule({}, graph)
    results, _ = splice(traced, graph, inputs, graph.output_node(), "is_backward")
    graph.output_node().args = (tuple(results),)
    live = live_tensors(graph)
    names = [name for name, _ in lift_live(gm)]
    graph.lint()
    gm.recompile()
    return gm, [live[name] for name in names]


def live_tensors(graph: fx.Graph) -> dict[str, Tensor]:
    """Return the live tensors of a joint graph, by name."""
    owner = graph.owning_module
    names = {str(n.target) for n in graph.find_nodes(op="get_attr") if str(n.target).startswith(LIVE)}
    return {name: getattr(owner, name) for name in sorted(names)}


def read_instead_of_live(
    graph: fx.Graph, tensor: Tensor, node: fx.Node, readers: Collection[fx.Node] | None = None
) -> None:
    """Let the readers of a live tensor, or these of them, read a node."""
    names = {name for name, live in live_tensors(graph).items() if live is tensor}
    for read in [n for n in graph.find_nodes(op="get_attr") if str(n.target) in names]:
        if readers is None:
            skip(read, node)
            continue
        for user in [user for user in read.users if user in readers]:
            user.replace_input_with(read, node)
        if not read.users:
            erase(read)


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that later edits of ``gm`` do not reach; nodes keep their names."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    return fx.GraphModule(gm, graph)


def copy_with_inner_graphs(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy, with copies of its sub-GraphModules."""
    copied = copy_of(gm)
    copied.meta = dict(gm.meta)
    for name, inner in gm.named_children():
        if isinstance(inner, fx.GraphModule):
            setattr(copied, name, copy_with_inner_graphs(inner))
    return copied


def copy_of_nodes(graph: fx.Graph) -> fx.GraphModule:
    """A copy of a graph with its markers and live tensors, without fakes.

    Its inputs and outputs keep their descriptors.
    """
    owner = graph.owning_module
    assert owner is not None
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    copied.output_node().meta = dict(graph.output_node().meta)
    for node in copied.nodes:
        node.meta = {"desc": node.meta["desc"]} if "desc" in node.meta else {}
    return make_fx.without_code(owner, copied)


def return_instead(graph: fx.Graph, nodes: Sequence[Any]) -> None:
    """Return these nodes alone, and take out unneeded ones.

    Markers and random ops stay: the numbers that others draw are not to change.
    """
    graph.output_node().args = (tuple(nodes),)
    for node in reversed(list(graph.nodes)):
        is_needed = node.op in ("placeholder", "output") or node.target is markers.mark_activation
        if not node.users and not is_needed and not operators.is_random(node):
            graph.erase_node(node)


def _live(graph: fx.Graph, tensor: Tensor, inputs: Sequence[fx.Node]) -> fx.Node:
    owner = graph.owning_module
    assert owner is not None
    if tensor.grad_fn is not None:
        with fake_tensors.outside_of_tracing():
            tensor = tensor.detach()  # which shares its memory, and can be copied
    number = 0
    while (present := getattr(owner, f"{LIVE}{number}", tensor)) is not tensor:
        assert isinstance(present, torch.Tensor)
        number += 1
    owner.register_buffer(f"{LIVE}{number}", tensor, persistent=False)
    node = graph.get_attr(f"{LIVE}{number}")
    node.meta = {"val": fake_tensors.fake_like(inputs[0].meta["val"], tensor)}
    return node


def outputs_of(output: fx.Node) -> list[Any]:
    """Return the results of an output node."""
    returned = output.args[0]
    assert isinstance(returned, (tuple, list))
    return list(returned)


def _replace_outputs(graph: fx.Graph, at: slice, nodes: Sequence[fx.Node]) -> None:
    output = graph.output_node()
    outputs = outputs_of(output)
    descs = list(output.meta.get("desc") or [None] * len(outputs))
    outputs[at], descs[at] = nodes, ["gradrewrite"] * len(nodes)
    output.args = (tuple(outputs),)
    if "desc" in output.meta:
        output.meta["desc"] = descs
