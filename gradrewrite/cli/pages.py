"""The command ``help``: entries of the documentation that are a part of the package, and of the reference."""

from __future__ import annotations

import argparse
import re
import sys
from importlib import resources

from rich.console import Console
from rich.markdown import Markdown

from gradrewrite._utils.formatting import nearest
from gradrewrite.cli.messages import Refused

_HEADING = re.compile(r"^(#+) (.*?)(?: \{#([a-z-]+)\})?$", re.MULTILINE)


def help(options: argparse.Namespace) -> None:
    """Print the entry of an error's last line or of a public name, the cheat sheet, or the names of all entries."""
    if options.name is None:
        rows = [f"{name:20} {title}" for name, (title, _) in entries().items()]
        print("\n".join([f"{'cheatsheet':20} What you have, and what you write", *rows]))
        print("A public name has its signature and docstring: gradrewrite help ClipByNorm, gr.guard, Monitor.reduce")
        return
    name = options.name.rpartition("#")[2]
    if name == "cheatsheet":
        _show(_page("cheatsheet.md"))
        return
    known = entries()
    if name in known:
        _show(known[name][1])
        return
    from gradrewrite.cli import reference  # which imports torch

    found = reference.entry(name)
    if found is None:
        near = ", ".join(nearest(name, ["cheatsheet", *known, *reference.names()], count=3))
        raise Refused(f"help: there is no {name!r}; nearest: {near} (gradrewrite help lists all)")
    print(found)


def entries() -> dict[str, tuple[str, str]]:
    """Return the entries of the page on errors by name: title, and text with the title."""
    text = _page("troubleshooting.md")
    headings = [*_HEADING.finditer(text)]
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    found = {}
    for heading, end in zip(headings, ends, strict=True):
        if heading[3]:
            found[heading[3]] = heading[2], f"# {heading[2]}\n{text[heading.end() : end].rstrip()}\n"
    return found


def _page(name: str) -> str:
    return resources.files("gradrewrite.cli").joinpath(name).read_text(encoding="utf-8")


def _show(text: str) -> None:
    """Print Markdown: laid out on a terminal, else as it is."""
    if sys.stdout.isatty():
        Console().print(Markdown(text))
    else:
        print(text.rstrip())
