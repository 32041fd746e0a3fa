"""Commands on the graph of a model: draw, sites, memory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from rich.console import Console

from gradrewrite import viz
from gradrewrite._utils.formatting import nearest, plain_table, without_addresses
from gradrewrite.cli.loading import load, load_and, load_graph
from gradrewrite.cli.messages import Refused, reading, split_ending
from gradrewrite.cli.site_tree import site_tree
from gradrewrite.diagnostics.run_file import read_jsonl
from gradrewrite.policy.actions import describe
from gradrewrite.policy.rules import ask
from gradrewrite.sites import Pattern, Site, kinds_with

_WIDE = 1000  # columns of a file or a pipe
# Kinds of the sites of parameters at an update.
_OF_UPDATES = sorted(kinds_with(lambda traits: traits.of_parameter and traits.at_guard), reverse=True)


def draw(options: argparse.Namespace) -> None:
    """Draw or export the rewritten backward graph of a model."""
    pictures: dict[str, viz.Format] = {f".{form}": form for form in get_args(viz.Format)}
    exports: dict[str, viz.ExportFormat] = {f".{form}": form for form in get_args(viz.ExportFormat)}
    name, ending = split_ending(options.out, [*pictures, *exports])
    if ending in exports:
        _refuse_ignored(options, ending)
    elif (options.reshapes or options.records) and options.view != "ladder" and ending != ".html":
        flag = "--reshapes" if options.reshapes else "--records"
        raise Refused(f"{flag} belongs to the ladder and the page; leave it out, or take --view ladder")
    steps = reading(lambda: read_jsonl(options.run)) if options.run is not None else None
    graph = load_graph(options.model, options.input, options.policy)
    try:
        if ending in exports:
            path = viz.export(graph, name, exports[ending])
        else:
            drawing = viz.draw(
                graph,
                options.view,
                monitor=steps,
                color_by=options.color_by,
                title=options.model,
                reshapes=options.reshapes,
                records=options.records,
            )
            path = drawing.render(name, pictures[ending])
    except OSError as err:
        raise Refused(f"cannot write {options.out}: {err.strerror}; choose another path with --out") from err
    except ValueError as err:
        raise Refused(str(err)) from err
    print(path)


def _refuse_ignored(options: argparse.Namespace, ending: str) -> None:
    """Refuse options without effect on an export."""
    given = {
        "--view": options.view != "ladder",
        "--run": options.run is not None,
        "--color-by": options.color_by is not None,
        "--reshapes": options.reshapes,
        "--records": options.records,
    }
    ignored = [flag for flag, is_given in given.items() if is_given]
    if ignored:
        raise Refused(f"a {ending} file holds the whole graph, without colors; leave out {', '.join(ignored)}")


def sites(options: argparse.Namespace) -> None:
    """List the sites of a model."""
    try:
        pattern = Pattern.parse(options.pattern) if options.pattern is not None else None
    except ValueError as err:
        raise Refused(str(err)) from err
    known: Sequence[Site] = load_graph(options.model, options.input, options.policy).sites
    actions = _actions(known, options.policy) if options.policy is not None else {}
    known = [*known, *(site for site in actions if site.kind in _OF_UPDATES)]
    found = [site for site in known if pattern is None or pattern.matches(site)]
    if not found and pattern is not None:
        names = ", ".join(nearest(options.pattern, [str(s) for s in known])) or "there are none"
        raise Refused(f"no site matches {options.pattern!r}; nearest: {names}")
    if options.tree:
        width = None if sys.stdout.isatty() else _WIDE
        Console(width=width).print(site_tree(found, actions), no_wrap=True, overflow="ellipsis", highlight=False)
        print(f"{len(found)} of {len(known)} sites")
        return
    rows = [
        {
            "site": str(site),
            "kind": site.kind,
            "name": site.name,
            "call": site.call,
            "module": site.module,
            "op": site.op,
            "output_of": list(site.output_of),
            "shape": list(site.shape),
            "dtype": str(site.dtype).removeprefix("torch."),
            "source": site.source,
            **({"actions": actions.get(site, [])} if options.policy is not None else {}),
        }
        for site in found
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    sizes = [", ".join("?" if size is None else str(size) for size in site.shape) for site in found]
    columns = ["site", "shape", "dtype", "source"]
    cells = [
        [str(r["site"]), f"[{size}]", str(r["dtype"]), str(r["source"])] for r, size in zip(rows, sizes, strict=True)
    ]
    if options.policy is not None:
        columns.insert(1, "actions")
        for site, cell in zip(found, cells, strict=True):
            cell.insert(1, ", ".join(actions.get(site, [])))
    print(plain_table(columns, cells))
    print(f"{len(found)} of {len(known)} sites")


def _actions(sites: Sequence[Site], policy_name: str) -> dict[Site, list[str]]:
    """Return the actions of a policy as text, by site; of parameters those at their step and param sites too."""
    policy = load(policy_name, "the policy")
    of_parameters = [site for site in sites if site.kind == "gradient"]
    all_sites = [*sites, *(replace(site, kind=kind) for kind in _OF_UPDATES for site in of_parameters)]
    found = {site: [without_addresses(describe(one)) for one in ask(policy, site)] for site in all_sites}
    return {site: texts for site, texts in found.items() if texts}


def memory(options: argparse.Namespace) -> None:
    """Print the bytes that a model keeps for the backward, and a policy that saves some."""
    found = load_and("memory", options.model, options.input, options.policy)
    if not options.json:
        print(f"{found}\n\n{found.suggestion()}")
        return
    names = ("name", "module", "plain_bytes", "policy_bytes", "host_bytes", "action", "reason", "count")
    print(json.dumps([{name: getattr(row, name) for name in names} for row in found.rows], indent=1))
