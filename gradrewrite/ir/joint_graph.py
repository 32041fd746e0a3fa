"""Joint forward/backward graphs and edits, and their text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff

from torch import fx

from gradrewrite._utils.formatting import plain_table
from gradrewrite.ir.edits import Edit, told_once
from gradrewrite.ir.provenance import Provenance
from gradrewrite.sites import Site

_ASSIGNED = re.compile(r"^\s*(\w+)(?:: \"[^\"]*\")? = ")
_OWN_LINE = re.compile(r"^\s*# (?:.* in gradrewrite_entry_\d+|No stacktrace found)")  # no line of the user's
_DELETED = re.compile(r";  [\w, =]+ = None$")


@dataclass(frozen=True, eq=False, repr=False)
class JointGraph:
    """A joint forward/backward graph, as Inductor gets it.

    Attributes:
        graph_module: The graph; it can be run with the values of its placeholders.
        sites: All sites: values in execution order, then parameters, then inputs.
        edits: What was inserted, by site in the same order; group actions last.
        record_nodes: Names of the inserted nodes that carry records out of the graph.
        before: The same graph without the rewrite; None for such a graph itself.
        provenance: What its parts mean: lanes, ops and modules of nodes, the nodes of sites.
        name: Name of the model's class; ``""`` where the graph is not that of a model.
        to_html: Writes the graph for a notebook.
    """

    graph_module: fx.GraphModule = field(repr=False)
    sites: tuple[Site, ...]
    edits: tuple[Edit, ...] = ()
    record_nodes: tuple[str, ...] = ()
    before: JointGraph | None = None
    provenance: Provenance = field(default_factory=Provenance, repr=False)
    name: str = ""
    to_html: Callable[[JointGraph], str] | None = None

    def __repr__(self) -> str:
        """Class, model and sizes, on one line; ``print`` shows the code."""
        nodes = sum(node.op != "output" for node in self.graph_module.graph.nodes)
        name = f" of {self.name}" if self.name else ""
        return f"<JointGraph{name}: {len(self.sites)} sites, {len(self.edits)} edits, {nodes} nodes>"

    def _repr_html_(self) -> str | None:
        """Return the page in a frame, for notebooks; None where the graph is not from ``trace``."""
        return self.to_html(self) if self.to_html is not None else None

    @property
    def code(self) -> str:
        """The graph as Python, inserted lines marked with action and site, those of single losses with the loss."""
        origins = self.provenance.origins.items()
        marks = {name: f"loss {origin.loss}" for name, origin in origins if origin.loss is not None}
        marks |= {name: f"{edit.text} at {edit.site}" for edit in self.edits for name in edit.nodes}
        marks |= dict.fromkeys(self.record_nodes, "records")
        from gradrewrite.ir.loop_code import OP_LOOP, code_of  # it imports the compiler, which pictures do without

        lines = _code_of(self.graph_module, marks)
        for node in self.graph_module.graph.find_nodes(op="call_function", target=OP_LOOP):
            body = _code_of(code_of(node).body, marks, f"{node.name}.")
            lines += ["", f"# {node.name} runs once an iteration:", *body]
        return "\n".join(lines) + "\n"

    def diff(self) -> str:
        """Return a unified diff of the code before and after the rewrite, and a table of the edits by action.

        Example:
            >>> import torch, gradrewrite as gr
            >>> graph = gr.transform(torch.nn.Linear(2, 2), []).trace(torch.ones(1, 2))
            >>> graph.diff()
            'no edits: the graph is as it was'
        """
        if not self.edits:
            return "no edits: the graph is as it was"
        assert self.before is not None
        before, after = self.before.code.splitlines(), self.code.splitlines()
        lines = unified_diff(before, after, "before", "after", lineterm="", n=2)
        actions: dict[str, list[Edit]] = {}
        for edit in self.edits:
            actions.setdefault(edit.text, []).append(edit)
        rows = []
        for text, edits in actions.items():
            num_nodes, sites = sum(len(edit.nodes) for edit in edits), [str(edit.site) for edit in edits]
            rows.append((text, str(len(edits)), str(num_nodes), _first_and_last(sites)))
        if self.record_nodes:
            rows.append(("(carries records)", "", str(len(self.record_nodes)), ""))
        return "\n".join([*lines, "", plain_table(("action", "edits", "nodes", "sites"), rows)])

    def __str__(self) -> str:
        """The sites that were edited, then the code."""
        known = [(where, edit.text, ", ".join(edit.nodes) or "no nodes") for where, edit in told_once(self.edits)]
        edits = "".join(f"# {where}: {text} -> {nodes}\n" for where, text, nodes in known)
        return f"# {len(self.sites)} sites, {len(self.edits)} edits\n{edits}{self.code}"


def _code_of(graph_module: fx.GraphModule, marks: Mapping[str, str], prefix: str = "") -> list[str]:
    """Return lines of code, with marks of nodes by their names behind a prefix."""
    lines = []
    for line in graph_module.print_readable(print_output=False).splitlines():
        if _OWN_LINE.match(line):
            continue
        text = _DELETED.sub("", line.rstrip())
        assigned = _ASSIGNED.match(text)
        mark = marks.get(f"{prefix}{assigned[1]}") if assigned else None
        lines.append(f"{text}  # {mark}" if mark else text)
    return lines


def _first_and_last(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} {'...' if len(names) > 2 else 'and'} {names[-1]}"
