"""The directions of imports, the public names, and what importing the package loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradrewrite
from gradrewrite import passes

from helpers import ROOT

SOURCES = sorted(p for folder in ("gradrewrite", "passes", "viz") for p in (ROOT / folder).rglob("*.py"))
RANK = {
    name: rank
    for rank, names in enumerate(
        [
            ("sites", "_version", "suggest", "_torch", "intended", "sinks", "table", "history", "guards"),
            ("clips", "nonfinite", "nodes", "callers"),
            ("errors", "markers", "statistics", "loss_scale", "update_ratios", "trends", "habits", "origins"),
            ("doctor", "policy", "names", "records"),
            ("probes", "joint"),
            ("edit", "tracing", "recipe"),
            ("witness", "places", "evidence"),
            ("owners",),
            ("replay",),
            ("failure",),
            ("rows",),
            ("voice",),
            ("outlets",),
            ("monitor",),
            ("reports", "session", "optim"),
            ("rewrite",),
            ("show",),
            ("job",),
            ("backend",),
            ("entry",),
            ("module",),
            ("locate", "loading", "testing"),
            ("__init__",),
            ("demo",),
            ("cli",),
            ("__main__",),
        ]
    )
    for name in names
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
@pytest.mark.pure
def test_imports_point_inward(path: Path) -> None:
    folder, name = path.relative_to(ROOT).parts[0], path.stem
    ours = {i for i in imports(path) if i.startswith("gradrewrite")}
    other = {"passes": "gradrewrite.viz", "viz": "gradrewrite.passes"}.get(folder)
    if other:
        assert not {i for i in ours if i.startswith(other)}
        return
    if name in ("demo", "cli"):
        return
    assert not {i for i in ours if i.startswith(("gradrewrite.passes", "gradrewrite.viz"))}
    for imported in ours:
        parts = imported.split(".")
        if len(parts) > 1 and parts[1] in RANK:
            assert RANK[parts[1]] < RANK[name], f"{name} imports {imported}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
@pytest.mark.pure
def test_private_torch_is_imported_in_one_file(path: Path) -> None:
    if path.name != "_torch.py":
        assert not {i for i in imports(path) if i.startswith("torch._")}


def test_importing_adds_no_heavy_package_to_what_torch_loads() -> None:
    program = """
import sys, torch, torch._dynamo, torch._functorch.partitioners
before = set(sys.modules)
import gradrewrite, gradrewrite.passes
heavy = ("graphviz", "networkx", "matplotlib", "rich", "tqdm", "pygraphviz", "tensorboard")
new = [m for m in set(sys.modules) - before if m.startswith(heavy) or m == "torch._inductor.compile_fx"]
sys.exit(", ".join(new) or 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.pure
def test_public_names() -> None:
    for package in (gradrewrite, passes):
        assert package.__all__ == sorted(package.__all__)
        assert all(hasattr(package, name) for name in package.__all__)
    for name in gradrewrite.__all__:
        assert getattr(gradrewrite, name).__doc__, name
