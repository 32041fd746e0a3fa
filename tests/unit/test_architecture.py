"""The public names, and what importing the package loads; import-linter and ruff hold the directions of imports."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradrewrite
from gradrewrite import passes
from gradrewrite._compat import versions
from gradrewrite.rewriting.result import RewriteResult

from helpers import ROOT


@pytest.mark.long
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


@pytest.mark.long
def test_reading_files_does_not_import_the_compiler() -> None:
    program = """
import sys, gradrewrite.cli
from gradrewrite import read_jsonl
from gradrewrite.viz import plot
compiler = ("torch._dynamo", "torch._inductor", "gradrewrite.backends")
sys.exit(", ".join(m for m in sys.modules if m.startswith(compiler)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.pure
@pytest.mark.parametrize("program", ["import gradrewrite", "import gradrewrite.cli as c; c._parser().format_help()"])
def test_help_does_not_import_torch(program: str) -> None:
    check = f"{program}; import sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.pure
def test_needed_facts_are_documented() -> None:
    """What a failing private import says is in ``docs/design.md``, beside its file."""
    needed = {
        (fact, path.stem)
        for path in (ROOT / "gradrewrite" / "_compat").glob("*.py")
        for fact in re.findall(r'with needed_for\("(.*)"\)', path.read_text())
    }
    section = (ROOT / "docs" / "design.md").read_text().split("\n## Facts about torch\n")[1].split("\n## ")[0]
    documented = set(re.findall(r"^\| (.*) \| `(\w+)` \|$", section, re.MULTILINE))

    assert ("AOTAutograd's cache can be switched off, for on a hit no pass runs", "aot_autograd") in needed
    assert needed == documented


@pytest.mark.pure
def test_missing_private_name_says_what_it_was_needed_for() -> None:
    with (
        pytest.raises(ImportError, match=r"cannot import name 'nothing'.*this fact: a test needs it.*torch \d"),
        versions.needed_for("a test needs it"),
    ):
        from torch._dynamo import nothing  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(AttributeError, match="this fact: a test needs it"), versions.needed_for("a test needs it"):
        object()._nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.pure
def test_versions_of_torch() -> None:
    (old_major, oldest), (new_major, newest) = versions.OLDEST, versions.NEWEST
    tested = rf"{old_major}\.{oldest} to {new_major}\.{newest}"
    with pytest.raises(ImportError, match=rf"needs torch {tested}, and torch 2\.1\.1"):
        versions.check_torch("2.1.1")
    text = versions.check_torch(f"{new_major}.{newest + 1}.0+cu130")
    assert re.search(rf"tested with torch {tested}, and torch {new_major}\.{newest + 1}\.0", text)
    for version in (f"{old_major}.{oldest}.0", "2.13.0+cpu", f"{new_major}.{newest}.1a0", "main"):
        assert versions.check_torch(version) == ""


@pytest.mark.slow
def test_newer_torch_is_warned_of_at_import() -> None:
    program = """
import warnings, torch
torch.__version__ = "2.99.0"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import gradrewrite
(found,) = [w for w in caught if issubclass(w.category, gradrewrite.RewriteWarning)]
assert found.filename == "<string>", found.filename
assert "torch 2.99.0 is installed" in str(found.message)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.pure
def test_paths_in_contributing_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = {path for path in re.findall(r"`([\w/.]+/[\w.]*)`", text) if not path.startswith(".../")}

    assert "ir/reports.py" in paths
    assert not {p for p in paths if not (ROOT / p).exists() and not (ROOT / "gradrewrite" / p).exists()}


@pytest.mark.pure
def test_policy_asks_an_action_for_two_protocols_at_most() -> None:
    modules = [
        importlib.import_module(f"gradrewrite.policy.{p.stem}") for p in (ROOT / "gradrewrite" / "policy").glob("*.py")
    ]
    protocols = {
        value
        for module in modules
        for value in vars(module).values()
        if getattr(value, "_is_runtime_protocol", False) and value.__module__.startswith("gradrewrite.")
    }

    assert {protocol.__name__ for protocol in protocols} == {"Action", "Bounded"}


@pytest.mark.pure
def test_modules_of_the_rewrite_import_25_others_at_most() -> None:
    def imported(path: Path) -> set[str]:
        found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {
            f"{node.module}.{name.name}"
            for node in found
            if "gradrewrite" in (node.module or "")
            for name in node.names
        }
        return {name if (ROOT / f"{name.replace('.', '/')}.py").exists() else name.rpartition(".")[0] for name in names}

    numbers = {path.name: len(imported(path)) for path in (ROOT / "gradrewrite" / "rewriting").rglob("*.py")}
    assert 20 < numbers["joint.py"]
    assert max(numbers.values()) <= 25


@pytest.mark.pure
def test_the_result_of_a_rewrite_has_few_fields() -> None:
    found: dict[type, int] = {}

    def visit(annotation: object) -> None:
        kind = typing.get_origin(annotation) or annotation
        for part in typing.get_args(annotation):
            visit(part)
        is_own = getattr(kind, "__module__", "").startswith(("gradrewrite.rewriting.", "gradrewrite.ir.outputs"))
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and is_own and kind not in found:
            hints = typing.get_type_hints(kind)
            found[kind] = len(dataclasses.fields(kind))
            for own in dataclasses.fields(kind):
                visit(hints[own.name])

    visit(RewriteResult)

    assert {kind.__name__ for kind in found} >= {"RewriteResult", "BackwardOutputs", "Placed", "Pack", "SavedRewrite"}
    assert sum(found.values()) <= 46  # 5 of them for loops, 1 for the backward of ops


@pytest.mark.pure
def test_public_names() -> None:
    for package in (gradrewrite, passes):
        assert package.__all__ == sorted(package.__all__)
        assert all(hasattr(package, name) for name in package.__all__)
    for name in gradrewrite.__all__:
        assert getattr(gradrewrite, name).__doc__, name


@pytest.mark.broad
@pytest.mark.pure
def test_state_at_module_level_is_documented() -> None:
    """The table of ``CONTRIBUTING.md`` has all of it, and nothing else."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("\n## State\n")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    documented = {(name, row.split("` in `")[1].rstrip("`")) for row in rows for name in _names_in(row)}
    found = {
        (name, str(path.relative_to(ROOT)).removeprefix("gradrewrite/"))
        for part in ("gradrewrite", "passes", "viz")
        for path in (ROOT / part).rglob("*.py")
        for name in _state_of(ast.parse(path.read_text()))
    }

    assert found == documented


def _names_in(row: str) -> list[str]:
    return re.findall(r"`([^`]+)`", row.split("` in `")[0] + "`")


_STATEFUL = re.compile(r"(\w+\.)*(count|deque|ContextVar|Lock|Library|Weak\w+|_Current|_Running|defaultdict)\(")


def _state_of(tree: ast.Module) -> Iterator[str]:
    """Names that can change after the import: counters, caches, registries, locks, context variables."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        is_empty = isinstance(value, (ast.List, ast.Dict)) and not ast.unparse(value).strip("[]{}")
        is_cached = isinstance(value, ast.Call) and "cache" in ast.unparse(value.func)
        if value is not None and (is_empty or is_cached or _STATEFUL.match(ast.unparse(value))):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            kinds = [ast.unparse(decorator) for decorator in node.decorator_list]
            if any(re.search(r"\b(lru_)?cache\b", kind) for kind in kinds) and node in tree.body:
                yield node.name
        elif isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.Assign) and _STATEFUL.match(ast.unparse(item.value)):
                    yield f"{node.name}.{ast.unparse(item.targets[0])}"


@pytest.mark.pure
def test_unit_tests_are_named_as_modules() -> None:
    folders = {"passes": ROOT / "passes", "viz": ROOT / "viz", "gpu": ROOT / "tests" / "gpu"}
    strange = []
    for path in (ROOT / "tests" / "unit").glob("*/test_*.py"):
        folder = folders.get(path.parent.name, ROOT / "gradrewrite" / path.parent.name)
        names = {found.stem.lstrip("_") for found in folder.iterdir()}
        if path.stem.removeprefix("test_") not in names:
            strange.append(path.relative_to(ROOT))
    assert not strange, "named as no module: a test of several modules goes to integration/aot_eager or regression"
