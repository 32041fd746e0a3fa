"""First lines of docstrings: an imperative or a noun phrase, without a relative clause."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import ROOT

LIMIT = 0  # it may only fall
RELATIVE = re.compile(r"\b(what|whose|which)\b", re.IGNORECASE)
LITERAL = re.compile(r"``.*?``")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def first_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number and the first line of each docstring in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text.splitlines()[0]


def has_relative_clause(line: str) -> bool:
    return RELATIVE.search(LITERAL.sub("", line)) is not None


@pytest.mark.pure
def test_relative_clauses_are_found() -> None:
    assert has_relative_clause("Return what was compiled.")
    assert has_relative_clause("Which op made it.")
    assert not has_relative_clause("Return the tensors of ``kept(what)``, somewhat late.")


@pytest.mark.broad
@pytest.mark.pure
def test_first_lines_have_no_relative_clauses() -> None:
    paths = [path for folder in ("gradrewrite", "passes", "viz") for path in sorted((ROOT / folder).rglob("*.py"))]
    lines = [(path.relative_to(ROOT), *line) for path in paths for line in first_lines(path)]
    found = sorted((one for one in lines if has_relative_clause(one[2])), key=lambda one: -len(one[2].split()))
    worst = "\n".join(f"{path}:{number}: {line}" for path, number, line in found[:20])

    assert (Path("passes/_clip_by_value.py"), 1, "Clipping element by element.") in lines
    assert len(found) <= LIMIT, (
        f"{len(found)} first lines of docstrings have a relative clause, at most {LIMIT}:\n{worst}"
    )
