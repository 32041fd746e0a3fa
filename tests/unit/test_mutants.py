"""Mutants of the core: their places are there, and each changes one line of one function."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import mutants
import pytest
from mutants import LIST, NUMBER, PACKAGES, Mutant

SOURCE = '''
class A:
    """Its docstring."""

    def f(self, x: int | None = 3, *, y: bool = True) -> int | None:
        """Another one; 7."""
        z: int | None = x + 1
        print(z)
        if not (x < 2 and y):
            return x + 1
        return None


def protocol() -> int:
    """No code of its own."""
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package with one file."""
    folder = tmp_path / "gradrewrite" / "replay"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text(SOURCE)
    for name in mutants.INSIDE:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    return folder


def listed() -> list[Mutant]:
    return [Mutant(**row) for row in json.loads(LIST.read_text())]


@pytest.mark.pure
def test_all_mutants_of_a_function(package: Path) -> None:
    found = [(m.before, m.nth, m.after) for m in mutants.candidates(package / "a.py", "replay")]

    assert sorted(found) == sorted(
        [
            ("x + 1", 0, "x - 1"),
            ("1", 0, "2"),
            ("print(z)", 0, "pass"),
            ("not (x < 2 and y)", 0, "x < 2 and y"),
            ("x < 2 and y", 0, "x < 2 or y"),
            ("x < 2", 0, "x <= 2"),
            ("2", 0, "3"),
            ("x + 1", 1, "x - 1"),
            ("1", 1, "2"),
        ]
    )
    assert {m.function for m in mutants.candidates(package / "a.py", "replay")} == {"A.f"}


@pytest.mark.pure
def test_a_copy_differs_in_one_line(package: Path, tmp_path: Path) -> None:
    for number, mutant in enumerate(mutants.candidates(package / "a.py", "replay")):
        folder = tmp_path / str(number)
        mutants.copy_with(mutant, folder)
        changed = (folder / "gradrewrite" / "replay" / "a.py").read_text()
        lines = [(a, b) for a, b in zip(SOURCE.splitlines(), changed.splitlines(), strict=True) if a != b]
        assert len(lines) == 1, mutant
        assert ast.unparse(ast.parse(mutant.after)) in ast.unparse(ast.parse(changed))


@pytest.mark.pure
def test_a_mutant_moves_with_its_function(package: Path) -> None:
    mutant = Mutant("replay", "A.f", "x < 2", 0, "x <= 2")
    (package.parent / "ir").mkdir()
    (package / "a.py").rename(package.parent / "ir" / "b.py")
    place = mutants.place_of(mutant)

    assert place is not None
    assert place.path.name == "b.py"
    assert SOURCE.encode()[place.start : place.end] == b"x < 2"


@pytest.mark.pure
def test_a_mutant_whose_place_is_gone(package: Path, tmp_path: Path) -> None:
    mutant = Mutant("replay", "A.f", "x < 3", 0, "x <= 3")

    assert mutants.place_of(mutant) is None
    with pytest.raises(LookupError, match=r"replay A\.f: x < 3  ->  x <= 3.*--draw draws another one"):
        mutants.copy_with(mutant, tmp_path / "copy")


@pytest.mark.broad
@pytest.mark.pure
def test_the_places_of_the_list_are_there() -> None:
    known = listed()
    places = [mutants.place_of(mutant) for mutant in known]

    assert len(set(known)) == NUMBER
    assert {mutant.package for mutant in known} == set(PACKAGES)
    assert None not in places, "python tests/mutants.py --draw draws others for those that are gone"
    assert mutants.draw(known) == known
    assert mutants.draw([]) == mutants.draw([])


@pytest.mark.broad
@pytest.mark.pure
def test_another_is_drawn_for_one_that_is_gone() -> None:
    known = listed()
    drawn = mutants.draw([*known[:7], dataclasses.replace(known[7], before="no such text"), *known[8:]])

    assert [*drawn[:7], *drawn[8:]] == [*known[:7], *known[8:]]
    assert mutants.place_of(drawn[7]) is not None
