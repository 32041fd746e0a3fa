"""The public names, and what importing the package loads; import-linter and ruff hold the directions of imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gradrewrite
from gradrewrite import passes


def test_importing_adds_no_heavy_package_to_what_torch_loads() -> None:
    program = """
import sys, torch, torch._dynamo, torch._functorch.partitioners
before = set(sys.modules)
import gradrewrite, gradrewrite.passes
for name in gradrewrite.__all__:
    getattr(gradrewrite, name)
heavy = ("graphviz", "networkx", "matplotlib", "rich", "tqdm", "pygraphviz", "tensorboard")
new = [m for m in set(sys.modules) - before if m.startswith(heavy) or m == "torch._inductor.compile_fx"]
sys.exit(", ".join(new) or 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_reading_files_does_not_import_the_compiler() -> None:
    program = """
import sys, gradrewrite.cli
from gradrewrite import read_jsonl
compiler = ("torch._dynamo", "torch._inductor", "torch._functorch", "gradrewrite.backends")
sys.exit(", ".join(m for m in sys.modules if m.startswith(compiler)) or 0)
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
