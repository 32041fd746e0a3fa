"""Mutants of the core: changes of one line, drawn by a seed, and whether the tests of ``.ci/run`` notice them.

    python tests/mutants.py [NUMBER ...] [--whole] [--jobs 2] [--out FILE]
    python tests/mutants.py --draw

``tests/mutants.json`` has them. Each is bound to a function by its name and to the text that is changed, so it survives
moves between files; ``--draw`` keeps those whose place is there and draws others for those whose place is gone. Each
runs in a copy of the packages against the tests of its module that ``GRADREWRITE_SAMPLE`` draws (0 by default), those
that are nearest first, until one fails or five minutes have passed; with ``--whole`` against all tests that are drawn
and need no GPU and no browser.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
ROOT = TESTS.parent
LIST = TESTS / "mutants.json"
PACKAGES = ("rewriting", "policy", "optimizer", "monitoring", "replay", "passes")
NUMBER, SEED = 60, 50
SECONDS = 300
# Folders of the repository that are packages inside of ``gradrewrite``.
INSIDE = ("passes", "viz", "examples")
OTHERS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A change of one line of a function.

    Attributes:
        package: The folder of the function when it was drawn.
        function: Qualified name, without the module.
        before: Source of the expression or statement that is changed.
        nth: Which of several equal ones in the function.
        after: Its source afterwards.
    """

    package: str
    function: str
    before: str
    nth: int
    after: str

    def __str__(self) -> str:
        return f"{self.package} {self.function}: {self.before}  ->  {self.after}"


@dataclass(frozen=True)
class Place:
    """Where a mutant changes a file: the text from ``start`` to ``end`` (offsets of bytes)."""

    path: Path
    start: int
    end: int


@dataclass(frozen=True)
class Verdict:
    """What the tests say of a mutant.

    Attributes:
        mutant: The mutant.
        noticed_by: The test that fails, or ``"collection"``; empty if none does.
        seconds: Of the run.
        ran: The last line of pytest.
    """

    mutant: Mutant
    noticed_by: str
    seconds: float
    ran: str


def folder_of(package: str) -> Path:
    return ROOT / package if package in INSIDE else ROOT / "gradrewrite" / package


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module with their qualified names; inner ones belong to the outer one."""
    todo: list[tuple[str, ast.AST]] = [("", tree)]
    while todo:
        prefix, owner = todo.pop(0)
        for node in ast.iter_child_nodes(owner):
            if isinstance(node, ast.FunctionDef):
                yield f"{prefix}{node.name}", node
            elif isinstance(node, ast.ClassDef):
                todo.append((f"{prefix}{node.name}.", node))


def changes(function: ast.FunctionDef) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield nodes of one line in the body of a function with the source of what replaces them."""
    for node in _without_annotations(function.body):
        if isinstance(node, ast.expr | ast.stmt) and node.lineno == node.end_lineno:
            yield from ((node, ast.unparse(changed)) for changed in _changed(node))


def _without_annotations(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        yield node
        skipped = (getattr(node, "annotation", None), getattr(node, "returns", None))
        yield from _without_annotations(child for child in ast.iter_child_nodes(node) if child not in skipped)


def _changed(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
    match node:
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Compare(ops=[op]) | ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OTHERS:
            changed: Any = copy.deepcopy(node)
            other = OTHERS[type(op)]()
            if isinstance(node, ast.Compare):
                changed.ops = [other]
            else:
                changed.op = other
            yield changed
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case _:
            return


def candidates(path: Path, package: str) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    for name, known in _functions_of(path).items():
        for function in known:
            seen: Counter[tuple[str, str]] = Counter()
            for place, after in _places(path, function):
                before = _data_of(path)[place.start : place.end].decode()
                yield Mutant(package, name, before, seen[before, after], after)
                seen[before, after] += 1


def _places(path: Path, function: ast.FunctionDef) -> Iterator[tuple[Place, str]]:
    """Yield the changes of a function with their offsets."""
    if all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in function.body):
        return  # a method of a protocol: a docstring alone
    starts = _starts_of(path)
    for node, after in changes(function):
        line = starts[node.lineno - 1]
        assert node.end_col_offset is not None
        yield Place(path, line + node.col_offset, line + node.end_col_offset), after


@cache
def _data_of(path: Path) -> bytes:
    return path.read_bytes()


@cache
def _starts_of(path: Path) -> list[int]:
    """The offsets of lines."""
    return list(accumulate((len(line) for line in _data_of(path).splitlines(keepends=True)), initial=0))


@cache
def _functions_of(path: Path) -> dict[str, list[ast.FunctionDef]]:
    known: dict[str, list[ast.FunctionDef]] = {}
    for name, function in functions(ast.parse(_data_of(path))):
        known.setdefault(name, []).append(function)
    return known


def place_of(mutant: Mutant) -> Place | None:
    """Return the place of a mutant: in its package, else anywhere; None if it is gone."""
    for folder in (folder_of(mutant.package), ROOT / "gradrewrite", *(ROOT / name for name in INSIDE)):
        for path in sorted(folder.rglob("*.py")):
            before = mutant.before.encode()
            for function in _functions_of(path).get(mutant.function, ()):
                known = [
                    place
                    for place, after in _places(path, function)
                    if after == mutant.after and _data_of(path)[place.start : place.end] == before
                ]
                if mutant.nth < len(known):
                    return known[mutant.nth]
    return None


def draw(listed: Sequence[Mutant]) -> list[Mutant]:
    """Return the listed mutants whose place is there, and new ones for those whose place is gone."""
    drawn = [mutant if place_of(mutant) else None for mutant in listed] or [None] * NUMBER
    every = {
        package: [m for path in sorted(folder_of(package).rglob("*.py")) for m in candidates(path, package)]
        for package in PACKAGES
    }
    known = {mutant for mutant in drawn if mutant is not None}
    source = random.Random(SEED)
    for place in range(len(drawn)):
        while drawn[place] is None:
            package = PACKAGES[place % len(PACKAGES)]
            new = source.choice(every[package])
            if new not in known and new not in listed:
                drawn[place] = new
                known.add(new)
    return [mutant for mutant in drawn if mutant is not None]


def copy_with(mutant: Mutant, folder: Path) -> None:
    """Copy the packages, one line of which is changed, to where ``PYTHONPATH`` finds them.

    Raises:
        LookupError: The place of the mutant is gone.
    """
    place = place_of(mutant)
    if place is None:
        raise LookupError(f"the place of a mutant is gone ({mutant}): python tests/mutants.py --draw draws another one")
    left_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "gradrewrite", folder / "gradrewrite", ignore=left_out)
    for name in INSIDE:
        shutil.copytree(ROOT / name, folder / "gradrewrite" / name, ignore=left_out)
    inside = place.path.relative_to(ROOT)
    target = folder / inside if inside.parts[0] == "gradrewrite" else folder / "gradrewrite" / inside
    data = target.read_bytes()
    after = mutant.after if mutant.after == "pass" else f"({mutant.after})"
    target.write_bytes(data[: place.start] + after.encode() + data[place.end :])


def tests_of(mutant: Mutant) -> list[str]:
    """Return the test files of a mutant's module, the nearest first.

    First the unit tests that are named as the module, then those of the package, then files that name what the module
    defines, then all tests that run models op by op.
    """
    place = place_of(mutant)
    assert place is not None
    names = [n.name for n in ast.parse(place.path.read_text()).body if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
    public = [name for name in (*names, place.path.stem.lstrip("_")) if not name.startswith("_")]
    own = TESTS / "unit" / place.path.parent.name
    naming = [
        path
        for folder in ("unit", "properties", "integration/aot_eager", "regression")
        for path in sorted((TESTS / folder).rglob("test_*.py"))
        if any(name in path.read_text() for name in public)
    ]
    exact = own / f"test_{place.path.stem.lstrip('_')}.py"
    ordered = [
        *([exact] if exact.exists() else []),
        *(path for path in naming if path.parent == own),
        *sorted(own.glob("test_*.py")),
        *naming,
        *(TESTS / name for name in ("regression", "integration/aot_eager", "properties")),
    ]
    return [str(path) for path in dict.fromkeys(ordered)]


def judge(mutant: Mutant, *, whole: bool = False) -> Verdict:
    """Run the tests of a mutant until one fails."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_with(mutant, folder)
        paths = [str(TESTS)] if whole else tests_of(mutant)
        options = [
            f"--rootdir={ROOT}",
            "-c",
            str(ROOT / "pyproject.toml"),
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not cuda and not launches and not browser",
        ]
        options += ["-n", str(os.cpu_count())] if whole else ["-n0"]
        environment = {
            "GRADREWRITE_SAMPLE": "0", **os.environ, "PYTHONPATH": name, "HYPOTHESIS_PROFILE": "ci",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        log = folder / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [str(Path(sys.executable).parent / "pytest"), *options, *paths],
                cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(None if whole else SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 15)
                process.wait()
        lines = log.read_text().strip().splitlines() or [""]
        failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        broken = process.returncode not in (0, 1, -15) and "collection"
        by = failed[0] if failed else broken or ""
        return Verdict(mutant, by, time.monotonic() - began, lines[-1])


def main(argv: Sequence[str]) -> int:
    """Draw mutants, or run them; 1 if one is not noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="which of the list; all by default")
    parser.add_argument("--draw", action="store_true", help="draw mutants for places that are gone")
    parser.add_argument("--whole", action="store_true", help="against all tests, without a limit of time")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--out", type=Path, help="a file of JSON lines for the verdicts")
    given = parser.parse_args(argv)
    listed = [Mutant(**row) for row in json.loads(LIST.read_text())] if LIST.exists() else []
    if given.draw:
        LIST.write_text(json.dumps([dataclasses.asdict(mutant) for mutant in draw(listed)], indent=1) + "\n")
        return 0
    numbers = given.numbers or range(len(listed))
    survived = 0

    def run(number: int) -> tuple[int, Verdict]:
        return number, judge(listed[number], whole=given.whole)

    with ThreadPoolExecutor(1 if given.whole else given.jobs) as pool:
        for number, found in pool.map(run, numbers):
            survived += not found.noticed_by
            print(f"{number:2} {'noticed ' if found.noticed_by else 'SURVIVED'} {found.mutant}", flush=True)
            print(f"   {found.seconds:.0f} s, {found.noticed_by or found.ran}", flush=True)
            if given.out is not None:
                row = {"number": number, **dataclasses.asdict(found)}
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(f"{len(numbers) - survived} of {len(numbers)} are noticed")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
